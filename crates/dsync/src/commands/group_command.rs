//! `dsync sync --group` and `dsync mirror --group`: all disks of a group, as they were at one moment.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use anyhow::Result;
use source::{GroupHandle, SourceError, StateDir};
use sync::{
    CutHook, GroupEvent, GroupMirror, GroupMirrorSummary, GroupSummary, Summary, SyncError, SyncOptions,
    Turns,
};

use crate::args::{self, CommitArg, MethodArg};
use crate::commands::mirror_command;
use crate::commands::mirroring::{Mirroring, Receiving};
use crate::commands::sync_command;
use crate::failure::Failure;
use crate::jobs::hook::Hook;
use crate::jobs::steering::Steering;
use crate::output::Output;
use crate::reach::effect;
use crate::reach::location::Location;
use crate::terms::{machine_name, units};

const ALONE: &str =
    "--group takes the folder of the replicas alone: the sources are the members of the group";

/// How often -v and --json print where a mirror is.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// Refuses what a group cannot do.
fn check(args: &args::Sync) -> Result<(), Failure> {
    if args.commit != CommitArg::Journal {
        return Err(Failure::usage("the replicas of a group are committed by their journals: omit --commit"));
    }
    if matches!(args.method, MethodArg::Rolling | MethodArg::Copy) {
        return Err(Failure::usage("with --group, --method is auto, tracked or compare"));
    }
    Ok(())
}

/// A sync of a group, with what its user asks of it.
pub(crate) struct GroupSync<'a> {
    destination: Location,
    args: &'a args::Sync,
    options: SyncOptions,
    /// What is told of the cut.
    pub hook: Option<Arc<Hook>>,
    state: &'a StateDir,
    output: &'a Output,
}

impl<'a> GroupSync<'a> {
    /// A sync to this folder.
    ///
    /// # Errors
    /// Bad usage.
    pub(crate) fn new(
        (name, folder): (&str, &str),
        args: &'a args::Sync,
        steering: &Steering,
        state: &'a StateDir,
        output: &'a Output,
    ) -> Result<GroupSync<'a>> {
        check(args)?;
        let destination = Location::folder(folder)?;
        let hook = sync_command::hook(&args.live.hook, name, folder);
        let options = sync_command::options(args, steering, destination.host.is_some())?;
        let give_up = args.consent.give_up(destination.host.is_some())?;
        let options = SyncOptions { give_up, ..options };
        Ok(GroupSync { destination, args, options, hook, state, output })
    }

    /// It only counts.
    pub(crate) fn is_dry_run(&self) -> bool {
        self.args.dry_run
    }

    /// Brings the replicas of a group to one moment, with the hook around its cut.
    ///
    /// # Errors
    /// What refuses one of them refuses all.
    pub(crate) fn run(&self, group: GroupHandle, hook: bool) -> Result<(GroupSummary, Vec<Summary>)> {
        let (args, output, destination) = (self.args, self.output, &self.destination);
        let hooked = self.hook.clone().filter(|_| hook).map(|hook| hook as Arc<dyn CutHook>);
        let options = SyncOptions { hook: hooked, ..self.options.clone() };
        let (dir, shown) = destination.place()?;
        group.members().iter().for_each(|handle| effect::on_size(&handle.into(), output));
        let progress = |done, total| output.progress(done, total);
        let pushed = (|| -> Result<_> {
            let (link, receiving) = destination.connect(&args.far, self.state)?;
            let pushed = sync::push_group(&group, link, (&dir, &shown), &options, &progress);
            if let Some(receiving) = receiving {
                let _ = receiving.join();
            }
            Ok(pushed.map_err(|error| of_machine(&group, &shown, destination.named(error)))?)
        })();
        output.finish();
        let closed: Result<(), SourceError> = group.close();
        let pushed = pushed?;
        closed?;
        Ok(pushed)
    }
}

/// An error about the group of a machine with that in the commands that it names: a disk of it, or its group, is not synced by itself.
fn of_machine(group: &GroupHandle, folder: &str, error: SyncError) -> SyncError {
    let Some(machine) = machine_name::of_group(group.name()).map(|plain| format!("vm:{plain}")) else {
        return error;
    };
    let (class, text) = (error.class(), error.to_string());
    let mut message = text.replace(&format!("--group {}", group.name()), &machine);
    for (handle, file) in group.members().iter().zip(group.files()) {
        let ends = format!("{} {}/{file}", handle.about().path.display(), folder.trim_end_matches('/'));
        message = message.replace(&ends, &format!("{machine} {folder}"));
    }
    if message == text { error } else { SyncError::Far { message, class } }
}

/// Runs the command; its exit code.
pub(crate) fn sync(
    name: &str,
    args: &args::Sync,
    steering: &Steering,
    state: &StateDir,
    output: &Output,
) -> Result<u8> {
    if args.destination.is_some() {
        return Err(Failure::usage(ALONE).into());
    }
    machine_name::refuse_options(args.machine.any())?;
    let sync = GroupSync::new((name, &args.source), args, steering, state, output)?;
    let group = sync::attach_group(state, name, &crate::reach::source::source_options(&args.open)?)?;
    let pushed = sync.run(group, true);
    sync.hook.inspect(|hook| hook.end(pushed.is_ok(), output));
    let (summary, members) = pushed?;
    tell(&summary, &members, output);
    Ok(0)
}

/// Runs a mirror until a signal ends it.
pub(crate) fn mirror(name: &str, args: &args::MirrorArgs, state: &StateDir, output: &Output) -> Result<()> {
    if args.destination.is_some() {
        return Err(Failure::usage(ALONE).into());
    }
    machine_name::refuse_options(args.machine.any())?;
    let destination = Location::folder(&args.source)?;
    let mirroring = Mirroring::begin(args, state, output, || ())?;
    let options = mirror_command::options(args, &mirroring.steering, destination.host.is_some())?;
    let hook = sync_command::hook(&args.hook, name, &args.source);
    let options = mirror_command::held(options, hook.clone());
    let (dir, shown) = destination.place()?;
    let mut receiving = Receiving::default();
    let teller = Teller {
        output,
        hook: hook.as_ref(),
        destination: &destination,
        name,
        shown: &shown,
        mirroring: &mirroring,
        last: None.into(),
    };
    let turns = Turns::default();
    let mirror = GroupMirror {
        attach: &mut || {
            let group = sync::follow_group(state, name)?;
            group.members().iter().for_each(|handle| effect::on_size(&handle.into(), output));
            Ok(group)
        },
        connect: &mut || receiving.connect(&destination, &args.far, state),
        dir: &dir,
        name: &shown,
        options: &options.sync,
        rpo: args.rpo,
        busy_for: options.busy_for,
        stop: &mirroring.stop,
        pause: &mirroring.steering.pause,
        tell: &|event| teller.tell(event),
        progress: &|done, total| {
            output.progress(done, total);
            // A first copy may take days, and its service is begun as soon as nothing is refused any more.
            if !mirroring.begun.load(SeqCst) && mirroring.manager.is_due(mirror_command::STATUS_EVERY) {
                mirroring.manager.ready(&format!("bringing group {name} in {shown} up to date"));
            }
        },
        turns: &turns,
    };
    let summary = mirroring.manager.watched(|| turns.is_awake(), || mirror.run())?;
    receiving.end();
    output.finish();
    hook.inspect(|hook| hook.end(summary.is_ok(), output));
    let summary = summary.map_err(|error| destination.named(error))?;
    say_end(name, &shown, &summary, output);
    output.summary(&summary);
    Ok(())
}

/// Reports events as text or JSON.
struct Teller<'a> {
    output: &'a Output,
    /// What is told of cuts.
    hook: Option<&'a Arc<Hook>>,
    destination: &'a Location,
    name: &'a str,
    shown: &'a str,
    mirroring: &'a Mirroring,
    last: Cell<Option<Instant>>,
}

impl Teller<'_> {
    /// An error, with the other host's name if it is from there.
    fn text(&self, error: &SyncError) -> String {
        match (error, self.destination.host.as_deref()) {
            (SyncError::Far { message, .. }, Some(host)) => format!("{host}: {message}"),
            (error, _) => error.to_string(),
        }
    }

    fn tell(&self, event: GroupEvent<'_>) {
        let Teller { output, mirroring, name, shown, .. } = *self;
        let end = |done| self.hook.iter().for_each(|hook| hook.end_later(done, output));
        match event {
            GroupEvent::Committed(group, members) => {
                end(true);
                self.committed(group, members);
            }
            // What changes the limit says so.
            GroupEvent::Paused => {
                mirroring
                    .manager
                    .ready(&format!("not mirroring group {name} to {shown}: paused by --bwlimit"));
            }
            GroupEvent::Waiting(error, left) => {
                end(false);
                mirroring.waiting(&self.text(error), left, output);
            }
            GroupEvent::Broken(error, pause) => {
                end(false);
                mirroring.broken(shown, &self.text(error), pause, output);
            }
        }
    }

    fn committed(&self, group: &GroupSummary, members: &[Summary]) {
        let Teller { output, mirroring, name, shown, .. } = *self;
        output.finish();
        let first = !mirroring.begun.swap(true, SeqCst);
        let due = self.last.get().is_none_or(|last| last.elapsed() >= TOLD_EVERY);
        members.iter().for_each(|member| sync_command::warn(member, output));
        if first {
            tell_members(members, output);
            mirroring.manager.ready(&format!("mirroring group {name} to {shown}"));
            output.ready(&format!("mirroring group {name} to {shown}, at common epoch {}", number(group)));
        } else if output.is_verbose() && due && !output.is_json() {
            output.more(&format!("group {name} is at common epoch {}", number(group)));
        }
        if first || due {
            self.last.set(Some(Instant::now()));
            mirroring.manager.status(&format!("mirroring group {name} to {shown}"));
            output.status(group);
        }
    }
}

/// Says what a mirror of a group did.
pub(crate) fn say_end(name: &str, shown: &str, summary: &GroupMirrorSummary, output: &Output) {
    output.say(&format!(
        "group {name} in {shown} is at common epoch {}: {} with {} of changes, sent {}, in {}",
        summary.epoch.map_or_else(|| "none".to_owned(), |epoch| epoch.to_string()),
        units::many(summary.commits, "commit"),
        units::size(summary.bytes_changed),
        units::size(summary.bytes_sent),
        units::seconds(summary.seconds.round())
    ));
}

fn number(group: &GroupSummary) -> String {
    group.epoch.map_or_else(|| "none".to_owned(), |epoch| epoch.to_string())
}

fn tell_members(members: &[Summary], output: &Output) {
    members.iter().for_each(|member| sync_command::say(member, output));
}

/// Says what a sync of a group did.
pub(crate) fn tell(group: &GroupSummary, members: &[Summary], output: &Output) {
    for member in members {
        sync_command::warn(member, output);
        sync_command::say_given_up(member, output);
        sync_command::say(member, output);
        output.summary(member);
    }
    match group.epoch {
        Some(epoch) => output.say(&format!(
            "group {} in {} is at common epoch {epoch}: {} at one moment ({})",
            group.group,
            group.destination,
            units::many(members.len() as u64, "disk"),
            units::seconds(group.seconds)
        )),
        None => output.say(&format!("group {}: {}", group.group, units::many(members.len() as u64, "disk"))),
    }
    output.summary(group);
}
