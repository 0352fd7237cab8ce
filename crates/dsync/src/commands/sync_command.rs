//! `dsync sync`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use source::{Around, Handle, SourceOptions, StateDir, Told};
use sync::{
    Conflict, CutHook, ListedExtents, Method, Pull, SourceInfo, Summary, SyncError, SyncOptions, Task,
    Unreadable, Way,
};

use crate::args::{self, Command, FreezeArg, HashArg, MethodArg, SourceArgs};
use crate::failure::{self, FAILED, Failure};
use crate::jobs::hook::Hook;
use crate::jobs::steering::{self, Steering};
use crate::output::Output;
use crate::reach::effect;
use crate::reach::location::{Ends, Location};
use crate::status::job_copies::remembered;
use crate::terms::change_list;
use crate::terms::machine_name;
use crate::terms::units;

/// What a summary says of a sync by the record alone.
pub(crate) const TRACKED: &str = "tracked";

/// How long a hook may take, unless its user says otherwise.
const HOOK_LIMIT: Duration = Duration::from_secs(60);

/// What the arguments ask for; `is_far`: one end is on another host.
pub(crate) fn options(args: &args::Sync, steering: &Steering, is_far: bool) -> Result<SyncOptions, Failure> {
    if args.begin.adopts()
        && !matches!(args.method, MethodArg::Auto | MethodArg::Compare | MethodArg::Rolling)
    {
        return Err(Failure::usage("--adopt compares the copy: omit --method, or use compare or rolling"));
    }
    Ok(SyncOptions {
        method: match args.method {
            MethodArg::Auto => None,
            MethodArg::Tracked => Some(Method::Tracked),
            MethodArg::Compare => Some(Method::Compare),
            MethodArg::Rolling => Some(Method::Rolling),
            MethodArg::Copy => Some(Method::Copy),
        },
        hash: args.hash.unwrap_or(HashArg::Blake3).into(),
        in_place: compare::rolling::InPlace { cycles: args.cycles.into(), ..Default::default() },
        commit: args.commit.into(),
        digests: args.digests.as_ref().map(|file| (!file.is_empty()).then(|| PathBuf::from(file))),
        unreadable: if args.keep_going { Unreadable::SendAnew } else { Unreadable::Fail },
        dry_run: args.dry_run,
        adopt: args.begin.adopts(),
        overwrite: args.begin.overwrites(),
        shrink: args.open.allow_shrink,
        accept_source: args.begin.accept_source,
        create: args.begin.create,
        format: args.begin.format.map(Into::into),
        give_up: None,
        existing: false,
        at_view: args.live.at_view,
        compress: args.compress.level,
        bwlimit: steering.pace.clone(),
        polite: args.far.polite,
        journal_dir: args.far.journal_dir.clone(),
        keep: args.begin.past.keep()?,
        way: Way::to(is_far),
        live: args.live.options(),
        hook: None,
    })
}

/// Runs the command; its exit code.
pub(crate) fn run(
    args: &args::Sync,
    told: &Option<Told>,
    steering: &Steering,
    state: &StateDir,
    output: &Output,
) -> Result<u8> {
    machine_name::refuse_options(args.machine.any())?;
    let named = args.destination.as_deref().unwrap_or_default();
    let ends = Ends::parse(&args.source, named)?;
    let options = options(args, steering, ends.far().is_some())?;
    let give_up = args.consent.give_up(ends.destination.host.is_some())?;
    steering::refuse_hours(&args.far, &ends)?;
    effect::on_way(&ends, &args.far, output);
    effect::on_method(args, output);
    if let Some(host) = ends.source.host.as_ref().filter(|_| args.live.hook.hook.is_some()) {
        let how = format!("the hook is run where the source is: run \"dsync sync\" with it on {host}");
        return Err(Failure::usage(how).into());
    }
    if let Some(host) = ends.source.host.as_ref().filter(|_| told.is_some()) {
        let how = format!(
            "--changes, --moment and --as are for the host of the source: run \"dsync sync\" with them on {host}"
        );
        return Err(Failure::usage(how).into());
    }
    let hook = hook(&args.live.hook, &args.source, named);
    let hooked = hook.clone().map(|hook| hook as Arc<dyn CutHook>);
    let options = SyncOptions { hook: hooked, give_up, ..options };
    let pulls = ends.source.host.is_some();
    let summary = if pulls {
        pull(args, &ends, options, state, output)
    } else {
        push(args, &ends, options, (told, hook.clone()), state, output)
    };
    hook.inspect(|hook| hook.end(summary.is_ok(), output));
    let mut summary = summary?;
    if let Some(file) = args.told.changes.as_ref().filter(|_| summary.trust == TRACKED) {
        summary.trust = format!("as told by {}", change_list::name(file));
    }
    warn(&summary, output);
    say_given_up(&summary, output);
    list("unreadable at the source", &summary.unreadable, output);
    list("unreadable at the replica, and sent again", &summary.unreadable_there, output);
    say(&summary, output);
    say_restored(&ends.destination, state, output);
    output.summary(&summary);
    let unread = summary.unreadable.extents + summary.unreadable_there.extents;
    Ok(if unread > 0 { FAILED } else { 0 })
}

/// Says what is left to do where a disk of this host was restored.
fn say_restored(destination: &Location, state: &StateDir, output: &Output) {
    let place = destination.host.is_none().then(|| destination.place().ok()).flatten();
    let Some((path, _)) = place else { return };
    let lineage = replica::inspect(&path, &sync::open_options(None, state)).ok().flatten();
    if lineage.is_some_and(|lineage| sync::restored(&path, &lineage, state).is_some()) {
        output.say(&format!(
            "{0} is restored, and a replica as well as the source that it was: before it is used, run \"dsync forget --replica {0}\"; the next \
             sync from it takes --accept-source",
            path.display()
        ));
    }
}

/// Says what a sync to a replica of this host has cost that one by the time it is interrupted.
pub(crate) fn cost_of_interrupt(command: &Command, state: &StateDir) -> impl Fn() -> &'static str + use<> {
    let replica = match command {
        Command::Sync(args) => args.destination.as_deref().and_then(|named| {
            let place = Location::parse(named).ok().filter(|place| place.host.is_none())?.place().ok()?.0;
            Some((place, sync::open_options(args.far.journal_dir.as_deref(), state)))
        }),
        _ => None,
    };
    move || match &replica {
        Some((path, options)) if replica::has_dropped(path, options) => {
            "; the oldest moments of its past were dropped to make room"
        }
        _ => "",
    }
}

/// What is told of the cut of a source, for a destination.
pub(crate) fn hook(args: &args::HookArgs, source: &str, destination: &str) -> Option<Arc<Hook>> {
    let limit = args.hook_limit.unwrap_or(HOOK_LIMIT);
    args.hook.as_deref().map(|command| Arc::new(Hook::new(command, limit, source, destination)))
}

/// Syncs from a source on this host.
fn push(
    args: &args::Sync,
    ends: &Ends,
    mut options: SyncOptions,
    (told, hook): (&Option<Told>, Option<Arc<Hook>>),
    state: &StateDir,
    output: &Output,
) -> Result<Summary> {
    let around = hook.filter(|_| !options.dry_run).map(|hook| hook as Arc<dyn Around>);
    let opening =
        SourceOptions { around, told: told.clone(), ..crate::reach::source::source_options(&args.open)? };
    let handle = sync::attach(state, &args.source, &opening)?;
    if handle.is_clone() {
        options.hook = None;
    }
    if let Err(refused) = check(&(&handle).into(), is_first_to(&handle, &ends.destination), args, output) {
        handle.close()?;
        return Err(refused.into());
    }
    let summary = persist(args, options, output, |options| {
        let progress = |done, total| output.progress(done, total);
        let summary = ends.converse(&args.far, state, Some(&handle), |link, path, name| {
            sync::push(&handle, link, path, name, options, &progress)
        });
        output.finish();
        summary
    });
    output.more(&format!("source {} in {}", handle.about().uuid, state.path().display()));
    let path = handle.about().path.clone();
    let summary = crate::reach::source::close(handle, summary);
    // The ways out that a refusal names are those of a restore, unless it is of a disk that was restored.
    let is_restored = |error: &anyhow::Error| {
        matches!(error.downcast_ref(), Some(SyncError::Conflict(Conflict::OtherContent { .. })))
    };
    summary.map_err(|error| match sync::unpromoted(&path, state) {
        Some(what) if failure::code(&error) == failure::REFUSED && !is_restored(&error) => {
            error.context(what)
        }
        _ => error,
    })
}

/// Syncs from a source on another host, to a replica on this one.
fn pull(
    args: &args::Sync,
    ends: &Ends,
    options: SyncOptions,
    state: &StateDir,
    output: &Output,
) -> Result<Summary> {
    let begun = |info: &SourceInfo| {
        output.more(&format!("source {} ({})", info.uuid, args.source));
        let opening = sync::open_options(args.far.journal_dir.as_deref(), state);
        let known = ends.destination.place().ok().map(|(path, _)| replica::inspect(&path, &opening));
        let is_first =
            known.is_some_and(|known| known.is_ok_and(|known| known.is_none_or(|at| at.epoch.is_none())));
        check(info, is_first, args, output)
    };
    let summary = persist(args, options, output, |options| {
        let task = (Task::Sync(options.clone()), &args.open, &args.far);
        ends.pull(task, state, output, &begun, Pull::sync)
    })?;
    Ok(Summary { source: (&args.source).into(), ..summary })
}

/// True if nothing was synced yet from a source to this replica.
fn is_first_to(handle: &Handle, replica: &Location) -> bool {
    let known = remembered(replica).ok().zip(handle.bookmarks().ok());
    known.is_some_and(|(name, bookmarks)| bookmarks.named(&name).is_none())
}

/// Holds an open source against the options, for a replica to which it is synced for the first time or not.
fn check(info: &SourceInfo, is_first: bool, args: &args::Sync, output: &Output) -> Result<(), SyncError> {
    // With --adopt this one is about the destination, too.
    let allow_shrink = args.open.allow_shrink && !args.begin.adopts();
    let open = SourceArgs { allow_shrink, ..args.open.clone() };
    effect::on_source(info, &open, &args.live.given(), output);
    // Later, what a guest has written to the first block of its disk does not matter.
    let container = info.container.as_ref().filter(|_| info.is_new);
    if let (Some(format), Some(args::FormatArg::Qcow2)) = (container, args.begin.format) {
        return Err(SyncError::Refused(format!(
            "{} is a {format} image, and is copied as it is, so --format qcow2 would put it into another one: omit that, or serve the disk in it \
             with \"dsync serve\"",
            info.path.display()
        )));
    }
    if is_first {
        effect::on_container(info, args.destination.as_deref().unwrap_or_default(), output);
    }
    if args.live.freeze == Some(FreezeArg::Require) && !info.tracked {
        let why = "is not a tracked disk, so no file system on it can be frozen: omit --freeze require";
        return Err(SyncError::Refused(format!("{} {why}", info.path.display())));
    }
    Ok(())
}

/// Makes an attempt, and with --keep-going another one if parts of the source cannot be read: what will be lacking has to be
/// known before the replica takes the first byte.
fn persist(
    args: &args::Sync,
    options: SyncOptions,
    output: &Output,
    attempt: impl Fn(&SyncOptions) -> Result<Summary>,
) -> Result<Summary> {
    let summary = attempt(&options);
    let unreadable = |e: &anyhow::Error| e.downcast_ref::<SyncError>().is_some_and(SyncError::is_unreadable);
    if !summary.as_ref().err().is_some_and(|e| args.keep_going && unreadable(e)) {
        return summary;
    }
    output.warn("parts of the source cannot be read: the sync begins again without them");
    attempt(&SyncOptions { unreadable: Unreadable::LeaveOut, ..options })
}

/// Extents that are shown to people who did not ask for more.
const SHOWN: usize = 20;

/// Lists extents, as many as people read.
pub(crate) fn list(what: &str, extents: &ListedExtents, output: &Output) {
    let shown = if output.is_verbose() { ListedExtents::LISTED } else { SHOWN };
    for extent in extents.list.iter().take(shown) {
        output.say(&format!("{what}: {} at byte {}", device::exact_size(extent.bytes), extent.offset));
    }
    let rest = extents.extents.saturating_sub(shown.min(extents.list.len()) as u64);
    if rest > 0 {
        output.say(&format!("{what}: {} more", units::many(rest, "extent")));
    }
}

/// Says what went wrong on the way, and what is wrong with the replica.
pub(crate) fn warn(summary: &Summary, output: &Output) {
    summary.recovered.iter().for_each(|recovered| output.warn(recovered));
    summary.warnings.iter().for_each(|warning| output.warn(&format!("{}: {warning}", summary.destination)));
}

/// Says what the destination gave up.
pub(crate) fn say_given_up(summary: &Summary, output: &Output) {
    let Some(given_up) = &summary.given_up else { return };
    let (name, dry_run) = (&summary.destination, summary.dry_run);
    let what = match (given_up.bytes, given_up.since) {
        (Some(bytes), Some(since)) => format!("{} written to it since epoch {since}", units::size(bytes)),
        (_, Some(since)) => format!("what was written to it since epoch {since}"),
        (_, None) => "what only it had".into(),
    };
    let done = if dry_run { "would give up" } else { "gave up" };
    if given_up.bytes == Some(0) && given_up.saved.is_none() {
        let done = if dry_run { "would be" } else { "is" };
        let since = given_up.since.unwrap_or(0);
        output.say(&format!("{name} {done} a replica again: nothing was written to it since epoch {since}"));
        return;
    }
    output.say(&match &given_up.saved {
        Some(file) => {
            format!("{name} {done} {what}, saved there in {0}: \"dsync inspect {0}\"", file.display())
        }
        None => format!("{name} {done} {what}"),
    });
}

/// Says what a sync did.
pub(crate) fn say(summary: &Summary, output: &Output) {
    let found = format!(
        "{} in {}, {}",
        units::many(summary.blocks_changed, "block"),
        units::many(summary.extents, "extent"),
        units::size(summary.bytes_changed)
    );
    let found = match summary.bytes_copied {
        0 => found,
        copied => format!("{found} ({} of that copied at the destination)", units::size(copied)),
    };
    let of = format!("of {}", units::size(summary.disk_size));
    if summary.bytes_cut > 0 {
        output.say(&format!(
            "{} {} from {} to {}",
            if summary.dry_run { "would cut" } else { "cut" },
            summary.destination,
            device::exact_size(summary.disk_size + summary.bytes_cut),
            device::exact_size(summary.disk_size)
        ));
    }
    if summary.dry_run {
        // Which blocks these are only the destination knows.
        let besides = match summary.given_up.as_ref().map(|given_up| given_up.bytes) {
            None | Some(Some(0)) => String::new(),
            Some(None) => ", and the blocks that it gives up".into(),
            Some(Some(bytes)) => format!(", and the blocks that it gives up, {} at most", units::size(bytes)),
        };
        output.say(&match summary.method {
            delta::Method::Compare | delta::Method::Rolling => format!(
                "would compare all of {} with {} ({}): at most {} read at the source and sent; up to {} read at the replica, and overwritten where it \
                 differs",
                summary.source.display(),
                summary.destination,
                summary.trust,
                units::size(summary.bytes_sent),
                units::size(summary.disk_size)
            ),
            _ if summary.bytes_sent < summary.bytes_changed => format!(
                "would send {found} {of} to {} ({}): {} of data, the rest as holes{besides}",
                summary.destination,
                summary.trust,
                units::size(summary.bytes_sent)
            ),
            _ => format!("would send {found} {of} to {} ({}){besides}", summary.destination, summary.trust),
        });
        return;
    }
    let epoch = match summary.epoch {
        Some(epoch) => format!(" at epoch {epoch}"),
        None => " incomplete".to_owned(),
    };
    if let Some(digests) = &summary.digests {
        output.say(&format!("digests of the replica: {digests}"));
    }
    if summary.blocks_changed == 0 && summary.epoch.is_some() {
        output.say(&format!(
            "{} is up to date{epoch} ({}; {})",
            summary.destination,
            summary.trust,
            units::seconds(summary.seconds)
        ));
        return;
    }
    output.say(&format!("{} is{epoch}: {found} {of} ({})", summary.destination, summary.trust));
    output.say(&format!(
        "read {}, sent {}, wrote {}, in {}{}",
        units::size(summary.bytes_read),
        units::size(summary.bytes_sent),
        units::size(summary.bytes_written),
        units::seconds(summary.seconds),
        match summary.freeze_ms {
            Some(ms) => format!(", frozen for {ms} ms"),
            None if summary.resumed => ", resuming an interrupted transfer".to_owned(),
            None => String::new(),
        }
    ));
}
