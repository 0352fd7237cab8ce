//! `dsync promote` and `dsync demote` of one disk or, with `--group`, of a group: all disks of a group take over, or are given up, together.

use std::cell::RefCell;
use std::path::Path;

use anyhow::Result;
use source::{GroupHandle, StateDir};
use sync::{DemoteOptions, DemoteSummary, GroupSummary, PromoteOptions, Summary, SyncError, SyncOptions};

use crate::args;
use crate::commands::failover::{self, not_promoted, say_demotion, say_promotion};
use crate::commands::group_command::tell;
use crate::failure::Failure;
use crate::jobs::steering::Steering;
use crate::machine;
use crate::output::Output;
use crate::reach::location::{self, Ends, Location};
use crate::terms::machine_name;

/// Makes a source of a replica, or of all those of a group in a folder.
pub(crate) fn promote(args: &args::Promote, state: &StateDir, output: &Output) -> Result<()> {
    if !args.group {
        return failover::promote(args, state, output);
    }
    location::refuse_host(&args.replica, "promote --group")?;
    let dir = device::absolute(&args.replica)?;
    let options = PromoteOptions { force: args.force, dry_run: args.dry_run, ..PromoteOptions::default() };
    warn_of_readers(&dir, state, output);
    let promotion =
        sync::promote_group(state, &dir, &options).map_err(|error| not_promoted(error, &dir, true))?;
    let way_back = format!("dsync sync --group {} DIR --save-there FOLDER", promotion.group);
    let rewind = format!("dsync rewind --group {}", dir.display());
    for member in &promotion.members {
        member.recovered.iter().for_each(|recovered| output.warn(recovered));
        say_promotion(member, (&way_back, &rewind), output);
        output.summary(member);
    }
    let disks: Vec<String> = promotion
        .members
        .iter()
        .map(|member| promotion.dir.join(&member.file).display().to_string())
        .collect();
    let (name, epoch) = (&promotion.group, promotion.epoch);
    output.say(&match args.dry_run {
        true => format!("group {name} would go on from common epoch {epoch}"),
        false => format!(
            "group {name} goes on from common epoch {epoch}: serve it with \"dsync serve --group {name} {}\"",
            disks.join(" ")
        ),
    });
    output.summary(&promotion);
    let files: Vec<String> = promotion.members.iter().map(|member| member.file.clone()).collect();
    match args.define.as_ref().filter(|_| !args.dry_run) {
        Some(to) => machine::define(&promotion.dir, &files, to, output),
        None => Ok(()),
    }
}

/// Says who shows the members of a group in a folder, as far as they are listed on this host.
fn warn_of_readers(dir: &Path, state: &StateDir, output: &Output) {
    let in_group = |known: &replica::KnownReplica| {
        known.path.parent() == Some(dir)
            && known.lineage.as_ref().is_some_and(|lineage| lineage.group.is_some())
    };
    let known = sync::known_replicas(state).all().unwrap_or_default();
    for member in known.iter().filter(|known| in_group(known)) {
        failover::warn_of_readers(&member.path, &sync::open_options(None, state), output);
    }
}

/// A demotion of a group, with the replicas that succeed it if they are named.
struct Demoting<'a> {
    name: &'a str,
    args: &'a args::Demote,
    destination: Option<Location>,
    steering: &'a Steering,
    state: &'a StateDir,
    output: &'a Output,
    /// An error that is not of the crate that is called.
    failed: RefCell<Option<anyhow::Error>>,
}

/// Makes a replica of a source, or of all members of a group.
pub(crate) fn demote(
    args: &args::Demote,
    steering: &Steering,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    let Some(name) = args.group.as_deref() else { return failover::demote(args, steering, state, output) };
    machine_name::refuse_demotion(name, state)?;
    let destination = args.source.as_deref().map(Location::folder).transpose()?;
    if args.destination.is_some() {
        let how = "--group takes the folder of the replicas alone: the sources are the members of the group";
        return Err(Failure::usage(how).into());
    }
    let options = DemoteOptions {
        dry_run: args.dry_run,
        open: crate::reach::source::source_options(&args.open)?,
        ..DemoteOptions::default()
    };
    let failed = RefCell::default();
    let demoting = Demoting { name, args, destination, steering, state, output, failed };
    let mut last_sync = |group: &GroupHandle| demoting.told(demoting.sync(group));
    let mut afterwards = |demoted: &[DemoteSummary]| demoting.told(demoting.tell(demoted));
    let last_sync: Option<sync::LastGroupSync<'_>> =
        demoting.destination.as_ref().map(|_| &mut last_sync as sync::LastGroupSync<'_>);
    let progress = |done, total| output.progress(done, total);
    let demoted = sync::demote_group(state, name, &options, last_sync, &mut afterwards, &progress);
    output.finish();
    if let Some(error) = demoting.failed.take() {
        return Err(error);
    }
    for summary in demoted? {
        say_demotion(&summary, output);
        output.summary(&summary);
    }
    Ok(())
}

impl Demoting<'_> {
    /// Keeps an error of this crate, and ends what has called.
    fn told<T>(&self, done: Result<T>) -> Result<T, SyncError> {
        done.map_err(|error| {
            *self.failed.borrow_mut() = Some(error);
            SyncError::Stopped
        })
    }

    /// The last sync.
    fn sync(&self, group: &GroupHandle) -> Result<(GroupSummary, Vec<Summary>)> {
        let Demoting { args, state, output, .. } = *self;
        let Some(destination) = &self.destination else { return Err(SyncError::Stopped.into()) };
        let options = SyncOptions {
            dry_run: args.dry_run,
            existing: true,
            compress: args.compress.level,
            bwlimit: self.steering.pace.clone(),
            polite: args.far.polite,
            way: sync::Way::to(destination.host.is_some()),
            ..SyncOptions::default()
        };
        let (dir, shown) = destination.place()?;
        let (link, receiving) = destination.connect(&args.far, state)?;
        let progress = |done, total| output.progress(done, total);
        let pushed = sync::push_group(group, link, (&dir, &shown), &options, &progress);
        if let Some(receiving) = receiving {
            let _ = receiving.join();
        }
        output.finish();
        let (summary, members) = pushed.map_err(|error| destination.named(error))?;
        tell(&summary, &members, output);
        Ok((summary, members))
    }

    /// Tells the replicas that there was no more.
    fn tell(&self, demoted: &[DemoteSummary]) -> Result<()> {
        let Some(destination) = &self.destination else { return Ok(()) };
        let (_, shown) = destination.place()?;
        for summary in demoted {
            let source = Location::parse(&format!("./{}", summary.path.display()))?;
            let ends = Ends { source, destination: destination.within(Path::new(&summary.file)) };
            if let Some(term) = failover::tell(summary, &ends, (&self.args.far, None), true, self.state)? {
                failover::say_promoted(&ends.destination.place()?.1, term, self.output);
            }
        }
        let name = self.name;
        self.output.say(&format!(
            "group {name} in {shown} can be promoted: \"dsync promote --group\" of that folder, where it is"
        ));
        Ok(())
    }
}
