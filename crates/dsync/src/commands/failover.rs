//! `dsync promote` and `dsync demote`.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::Result;
use replica::{Released, ReplicaError, ReplicaReader};
use source::{Handle, StateDir};
use sync::{
    Class, DemoteOptions, DemoteSummary, LastWord, PromoteOptions, Promotion, Summary, SyncError, SyncOptions,
};

use crate::args;
use crate::commands::sync_command;
use crate::failure::{self, Failure};
use crate::jobs::steering::Steering;
use crate::output::Output;
use crate::reach::location::{self, Ends};
use crate::terms::units;

/// Makes a replica the source.
pub(crate) fn promote(args: &args::Promote, state: &StateDir, output: &Output) -> Result<()> {
    let path = device::absolute(&args.replica)?;
    location::refuse_host(&args.replica, "promote")?;
    if path.is_dir() {
        let path = path.display();
        return Err(Failure::usage(format!(
            "{path} is a folder: \"dsync promote --group {path}\" promotes the replicas of a group in it"
        ))
        .into());
    }
    let options =
        PromoteOptions { force: args.force, dry_run: args.dry_run, journal_dir: args.journal_dir.clone() };
    warn_of_readers(&path, &sync::open_options(options.journal_dir.as_deref(), state), output);
    let promotion = sync::promote(state, &path, &options)
        .map_err(|error| not_promoted(error, &path, has_begun(&path, &options, state)))?;
    promotion.recovered.iter().for_each(|recovered| output.warn(recovered));
    let shown = path.display();
    let ways = (&*format!("dsync sync {shown} SRC --save-there FILE"), &*format!("dsync rewind {shown}"));
    say_promotion(&promotion, ways, output);
    output.summary(&promotion);
    Ok(())
}

/// Says who shows the replica to clients, which lose it to a promotion.
pub(crate) fn warn_of_readers(path: &Path, options: &replica::ReplicaOptions, output: &Output) {
    let readers = replica::readers(path, options).unwrap_or_default();
    for ReplicaReader { process, epoch, .. } in readers.iter().filter(|reader| reader.lost.is_none()) {
        output.warn(&format!(
            "process {process} shows epoch {epoch} of {} to its clients, which get I/O errors after the promotion",
            path.display()
        ));
    }
}

/// True unless it is certain that a promotion which failed has changed nothing.
fn has_begun(path: &Path, options: &PromoteOptions, state: &StateDir) -> bool {
    let opening = sync::open_options(options.journal_dir.as_deref(), state);
    // The mark is the first step.
    let is_marked = |lineage: replica::Lineage| lineage.role.promoted.is_some();
    match replica::inspect(path, &opening) {
        Ok(lineage) => lineage.is_some_and(is_marked),
        // What cannot be reached was not written to.
        Err(ReplicaError::Device(_) | ReplicaError::NotAReplica(_)) => false,
        Err(ReplicaError::Io { error, .. }) => !matches!(
            error.kind(),
            ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied
        ),
        Err(_) => true,
    }
}

/// An error of a promotion, with what to do where the source is gone.
pub(crate) fn not_promoted(error: SyncError, path: &Path, has_begun: bool) -> anyhow::Error {
    let path = path.display();
    let why = match &error {
        SyncError::Replica(ReplicaError::Busy { .. }) => format!(
            "{path} cannot be promoted while a sync or a mirror to it is under way: stop that where its source is. If that host is \
             gone, end the process here: what it has committed stays"
        ),
        SyncError::Replica(ReplicaError::Changed { path, former: false, .. }) => format!(
            "{0} cannot be promoted, because it may hold what its source never was. If its source is gone, \"dsync forget {0}\" makes \
             it a plain disk as it is",
            path.display()
        ),
        error if error.class() == Class::Failed && !has_begun => {
            format!("{path} was not promoted: it is a replica as before, and nothing was changed")
        }
        error if error.class() == Class::Failed => format!(
            "the promotion of {path} is not complete: run the command again once that is mended, which completes it"
        ),
        _ => return error.into(),
    };
    anyhow::Error::from(error).context(why)
}

/// Says what a promotion did, with the commands that make a replica of the old source, which saves what that has, and that list the moments
/// that are kept.
pub(crate) fn say_promotion(promotion: &Promotion, (back, rewind): (&str, &str), output: &Output) {
    let done = match (promotion.dry_run, promotion.completed) {
        (true, _) => "would become",
        (false, true) => "is now (its promotion was interrupted)",
        (false, false) => "is now",
    };
    output.say(&format!(
        "{} {done} the source {} in term {}, from epoch {}{} on",
        promotion.path.display(),
        promotion.source,
        promotion.term,
        promotion.epoch,
        promotion.time.map_or(String::new(), |time| format!(
            " ({}, {})",
            device::moment(time),
            units::age(time)
        ))
    ));
    if promotion.bytes_ahead > 0 {
        output.say(&format!(
            "  it is ahead of that epoch: {} are of a later moment",
            units::size(promotion.bytes_ahead)
        ));
    }
    if promotion.fuzzy {
        output.say("  it was copied from a disk in use without a freeze: check its file systems");
    }
    if let Some(found) = &promotion.verdict {
        output.say(&format!(
            "  it differed from its source in {} when it was verified on {}, which was not repaired: check its file systems. The first sync to each \
             disk, its old source among them, compares all of it and overwrites what differs: what is damaged here may be sound there, so copy that disk first",
            units::size(found.bytes_differing),
            device::moment(found.time)
        ));
    }
    say_moments(promotion, rewind, output);
    if !promotion.copies.is_empty() {
        output.say(&format!(
            "  copies were made of it while it was a replica ({}): the next sync to each needs --adopt, and compares",
            promotion.copies.join(", ")
        ));
    }
    if let Some(told) = &promotion.told {
        output.say(&format!(
            "  its last word was given to {told}, which can be promoted without --force, or was: sync to it before that, or keep it \
             from being used"
        ));
        return;
    }
    if promotion.released {
        output.say("  its old source has ended there: nothing that was written to it is lost");
        return;
    }
    if let Some(gave) = &promotion.gave_up {
        output.say(&format!(
            "  nothing that was written to it is lost; what its old source wrote after epoch {} is given up, as it was when this disk was promoted to \
             term {}. If that source returns, let nothing use it: \"{back}\" makes it a replica, and saves that",
            gave.began.number, gave.term
        ));
        return;
    }
    if promotion.former {
        output.say("  nothing that was written to it is lost. If another disk was promoted meanwhile, demote one of the two");
        return;
    }
    let more = match promotion.lacks_epoch {
        Some(epoch) => format!("it is known to have reached epoch {epoch}, which is not here"),
        None => "nothing is known of that".into(),
    };
    output.say(&format!(
        "  what its old source wrote after that is given up: {more}. If it returns, let nothing use it: \"{back}\" makes it a replica, and saves \
         that"
    ));
}

/// Prints what becomes of the moments that were kept.
fn say_moments(promotion: &Promotion, rewind: &str, output: &Output) {
    let moments = match promotion.moments_lost {
        0 => return,
        1 => "the earlier moment that was kept".to_owned(),
        number => format!("the {number} earlier moments that were kept"),
    };
    output.say(&match promotion.dry_run {
        true => format!(
            "  {moments} could not be reached any more: if one is wanted, go back to it before ({rewind})"
        ),
        false => format!("  {moments} cannot be reached any more"),
    });
}

/// Makes a source a replica.
pub(crate) fn demote(
    args: &args::Demote,
    steering: &Steering,
    state: &StateDir,
    output: &Output,
) -> Result<()> {
    let source = args.source.as_deref().unwrap_or_default();
    let ends = args.destination.as_deref().map(|there| Ends::parse(source, there)).transpose()?;
    if let Some(host) = ends.as_ref().and_then(|ends| ends.source.host.as_ref()) {
        return Err(Failure::usage(format!("{source} is on another host: run this on {host}")).into());
    }
    let options = DemoteOptions {
        dry_run: args.dry_run,
        journal_dir: args.own_journal_dir.clone(),
        open: crate::reach::source::source_options(&args.open)?,
    };
    let progress = |done, total| output.progress(done, total);
    let Some(ends) = ends else {
        let summary = sync::demote(state, source, &options, None, &progress);
        output.finish();
        let summary = summary.map_err(|error| not_demoted(error, source, &options, state))?;
        say_demotion(&summary, output);
        output.summary(&summary);
        return Ok(());
    };
    let mut failed = None;
    let mut last_sync = |handle: &Handle| {
        let synced = push(handle, &ends, (args, steering), state, output);
        output.finish();
        synced.map_err(|error| {
            failed = Some(error);
            SyncError::Stopped
        })
    };
    let summary = sync::demote(state, source, &options, Some(&mut last_sync), &progress);
    if let Some(error) = failed {
        return Err(error);
    }
    let summary = summary.map_err(|error| not_demoted(error, source, &options, state))?;
    say_demotion(&summary, output);
    if !summary.dry_run {
        let promoted = tell(&summary, &ends, (&args.far, args.own_journal_dir.as_deref()), false, state)?;
        let (_, name) = ends.destination.place()?;
        match (promoted, &summary.released) {
            (Some(term), _) => say_promoted(&name, term, output),
            (None, Some(Released { epoch, .. })) => output
                .say(&format!("{name} can be promoted: it has all of epoch {}, the last one", epoch.number)),
            (None, None) => {}
        }
    }
    output.summary(&summary);
    Ok(())
}

/// An error of a demotion, with what to do about one that is not a refusal.
fn not_demoted(error: SyncError, source: &str, options: &DemoteOptions, state: &StateDir) -> anyhow::Error {
    if error.class() != Class::Failed {
        return error.into();
    }
    let opening = sync::open_options(options.journal_dir.as_deref(), state);
    let known = state.source(source).ok().flatten();
    let is_source = known.is_some_and(|(_, about)| {
        // The lineage is the first step.
        let lineage = replica::inspect(&about.path, &opening);
        lineage.is_ok_and(|lineage| lineage.is_none_or(|lineage| lineage.role.promoted.is_some()))
    });
    anyhow::Error::from(error).context(match is_source {
        true => format!("{source} was not demoted: it is the source as before"),
        false => format!(
            "the demotion of {source} is not complete: run the command again once that is mended, and let nothing write to it until \
             then"
        ),
    })
}

/// The last sync.
fn push(
    handle: &Handle,
    ends: &Ends,
    (args, steering): (&args::Demote, &Steering),
    state: &StateDir,
    output: &Output,
) -> Result<Summary> {
    let options = SyncOptions {
        dry_run: args.dry_run,
        existing: true,
        compress: args.compress.level,
        bwlimit: steering.pace.clone(),
        polite: args.far.polite,
        journal_dir: args.far.journal_dir.clone(),
        way: sync::Way::to(ends.destination.host.is_some()),
        ..SyncOptions::default()
    };
    let progress = |done, total| output.progress(done, total);
    let summary = ends.converse(&args.far, state, Some(handle), |link, path, name| {
        sync::push(handle, link, path, name, &options, &progress)
    })?;
    summary.recovered.iter().for_each(|recovered| output.warn(recovered));
    sync_command::say(&summary, output);
    Ok(summary)
}

/// Tells the replica that there was no more. `peers` are the other disks of its group. Returns its term if it was promoted already.
pub(crate) fn tell(
    summary: &DemoteSummary,
    ends: &Ends,
    (far, own_journal_dir): (&args::FarArgs, Option<&Path>),
    peers: bool,
    state: &StateDir,
) -> Result<Option<u64>> {
    let (_, name) = ends.destination.place()?;
    let path = summary.path.display();
    let Some(released) = summary.released else {
        if summary.bytes_unsure.is_none() {
            return Err(unknown_since(&summary.path, &name).into());
        }
        let (what, each) = match peers {
            true => ("the group there", ", and so for each disk of the group"),
            false => (&*name, ""),
        };
        return Err(Failure::refused(format!(
            "{path} is demoted, with writes that {name} may not have. If {what} was not promoted, \"dsync promote --force {path}\" makes this the source \
             again and loses nothing{each}; then run this command again, which sends them. If it was promoted, sync from it; if it is to take over \
             without them, promote it with --force first. Either overwrites them"
        ))
        .into());
    };
    let word = LastWord { demoted: summary, released, state, own_journal_dir };
    let told =
        ends.converse(far, state, None, |link, path, name| word.give(link, path, name, &far.journal_dir));
    told.map_err(|error| {
        let again = match failure::code(&error) {
            failure::REFUSED => "",
            _ => ": run the command again, so that it can be promoted without --force",
        };
        error.context(format!("{path} is demoted, but {name} was not told so{again}"))
    })
}

/// Says that a replica went on already.
pub(crate) fn say_promoted(name: &str, term: u64, output: &Output) {
    output.say(&format!("{name} was promoted already (term {term})"));
}

/// Why a replica is not told that there was no more, by a disk that was demoted without knowing what was written to it.
fn unknown_since(path: &Path, name: &str) -> Failure {
    let path = path.display();
    Failure::refused(format!(
        "{path} was demoted without knowing what was written to it, so {name} was not told that it has all. If {name} is to take over without those \
         writes, promote it with --force; copy {path} first if they are wanted, as the next sync to it overwrites what differs. If {path} is to remain \
         the source, \"dsync promote {path}\" says how"
    ))
}

pub(crate) fn say_demotion(summary: &DemoteSummary, output: &Output) {
    let path = summary.path.display();
    let done = match (summary.dry_run, summary.again) {
        (true, _) => "would become",
        (false, true) => "is already",
        (false, false) => "is now",
    };
    let since = match (summary.epoch, summary.bytes_unsure) {
        (Some(epoch), Some(0)) => format!("at epoch {epoch}"),
        (Some(epoch), Some(bytes)) => {
            format!("at epoch {epoch}, with {} written since", units::size(bytes))
        }
        _ => {
            "and the next sync to it compares everything, because what was written to it is not known".into()
        }
    };
    output.say(&format!(
        "{path} {done} a replica of source {}, {since} (term {} has ended)",
        summary.source, summary.term
    ));
    if summary.others_wrote {
        output.say("  others may have written to it since then: a sync to it asks for --adopt, which compares all of it");
    }
    if let Some(file) = &summary.saved {
        output.say(&format!("  what was written since is saved in {0}: dsync inspect {0}", file.display()));
    } else if summary.again && summary.bytes_unsure.is_some_and(|bytes| bytes > 0) {
        output.say("  the next sync to it overwrites what was written since, unless it is one with --save-there FILE");
    }
}
