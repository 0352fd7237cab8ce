//! `dsync verify`.

use anyhow::Result;
use compare::Scope;
use source::{SourceOptions, StateDir, ToldChanges};
use sync::{Pull, SourceInfo, Task, Verified, VerifyOptions, Way};

use crate::args;
use crate::commands::sync_command::list;
use crate::failure::{DIFFERS, FAILED, Failure};
use crate::jobs::steering::{self, Steering};
use crate::output::Output;
use crate::reach::effect;
use crate::reach::location::Ends;
use crate::terms::{machine_name, units};

/// Runs the command; its exit code.
pub(crate) fn run(args: &args::Verify, steering: &Steering, state: &StateDir, output: &Output) -> Result<u8> {
    let ends = Ends::parse(&args.source, &args.destination)?;
    machine_name::refuse_options(args.machine.any())?;
    check_rate(args)?;
    steering::refuse_hours(&args.far, &ends)?;
    let options = options(args, steering, ends.far().is_some());
    if args.told.moment.is_some() && args.told.called.is_none() {
        return Err(Failure::usage(
            "--moment needs --as NAME here: the name that the last sync gave to this moment",
        )
        .into());
    }
    if let Some(host) = ends.source.host.as_ref().filter(|_| args.told.called.is_some()) {
        let how = format!(
            "--moment and --as are for the host of the source: run \"dsync verify\" with them on {host}"
        );
        return Err(Failure::usage(how).into());
    }
    effect::on_way(&ends, &args.far, output);
    let begun = |info: &SourceInfo| {
        effect::on_source(info, &args.open, &[], output);
        Ok(())
    };
    let verified = if ends.source.host.is_some() {
        let task = (Task::Verify(options), &args.open, &args.far);
        Verified { source: (&args.source).into(), ..ends.pull(task, state, output, &begun, Pull::verify)? }
    } else {
        // The moment that was synced last: nothing was written since.
        let told = args.told.told(ToldChanges::Nothing);
        let opening = SourceOptions { told, ..crate::reach::source::source_options(&args.open)? };
        let handle = sync::attach(state, &args.source, &opening)?;
        begun(&(&handle).into())?;
        let progress = |done, total| output.progress(done, total);
        let verified = ends.converse(&args.far, state, None, |link, path, name| {
            sync::verify(&handle, link, path, name, &options, &progress)
        });
        output.finish();
        crate::reach::source::close(handle, verified)?
    };
    Ok(tell(&verified, output))
}

/// Refuses a rate that is not one.
///
/// # Errors
/// Bad usage.
pub(crate) fn check_rate(args: &args::Verify) -> Result<()> {
    units::check_rates(&[("--rate", args.rate)])?;
    if args.rate.is_some_and(|rate| rate < Scope::LEAST_RATE) {
        let how = "--rate needs 16K or more: a slower reader could not be stopped for minutes";
        return Err(Failure::usage(how).into());
    }
    Ok(())
}

/// Options from the arguments; `is_far`: one end is on another host.
pub(crate) fn options(args: &args::Verify, steering: &Steering, is_far: bool) -> VerifyOptions {
    VerifyOptions {
        repair: args.repair,
        commit: args.commit.unwrap_or(args::CommitArg::Journal).into(),
        ranges: args.ranges.clone(),
        hash: args.hash.into(),
        rate: args.rate,
        bwlimit: steering.pace.clone(),
        polite: args.far.polite,
        keep_going: args.keep_going,
        exact: false,
        journal_dir: args.far.journal_dir.clone(),
        way: Way::to(is_far),
    }
}

/// Says what was found; the exit code for it.
pub(crate) fn tell(verified: &Verified, output: &Output) -> u8 {
    verified.recovered.iter().for_each(|recovered| output.warn(recovered));
    say(verified, output);
    verified.warnings.iter().for_each(|warning| output.warn(&format!("{}: {warning}", verified.destination)));
    output.summary(verified);
    let unread = verified.unreadable.extents > 0;
    let unmended = !verified.repaired && verified.unreadable_there.extents > 0;
    if unread || unmended {
        FAILED
    } else if verified.differs() {
        DIFFERS
    } else {
        0
    }
}

fn say(verified: &Verified, output: &Output) {
    if let Some(changed) = &verified.changed {
        output.warn(&format!(
            "{} was modified outside dsync since its last commit ({changed})",
            verified.destination
        ));
    }
    if verified.trust != "exact" {
        let rest = if verified.differs() { "; \"dsync sync\" sends them" } else { "" };
        output.warn(&format!(
            "new changes at the source since epoch {} are not known: {}{rest}",
            verified.epoch, verified.trust
        ));
    }
    if let Some(size) = verified.wrong_size {
        output.say(&format!("differs: its size is {}", device::exact_size(size)));
    }
    list("differs", &verified.differing, output);
    list("unreadable at the source", &verified.unreadable, output);
    list("unreadable at the replica", &verified.unreadable_there, output);
    let unread = verified.unreadable.bytes + verified.unreadable_there.bytes;
    let compared = verified.bytes_compared.saturating_sub(verified.bytes_changed_since + unread);
    let found = match verified.differing.extents {
        0 => "no differences".to_owned(),
        extents => {
            let bytes = units::size(verified.differing.bytes);
            format!("{} with differences, {bytes}", units::many(extents, "extent"))
        }
    };
    output.say(&format!(
        "{} at epoch {}: {found}; compared {} of {}{} in {}",
        verified.destination,
        verified.epoch,
        units::size(compared),
        units::size(verified.disk_size),
        match verified.bytes_changed_since {
            0 => String::new(),
            bytes => format!(" ({} changed at the source since)", units::size(bytes)),
        },
        units::seconds(verified.seconds)
    ));
    if verified.repaired {
        let mended = verified.differing.extents > 0
            || verified.unreadable_there.extents > 0
            || verified.wrong_size.is_some()
            || verified.changed.is_some();
        let rest = match verified.bytes_changed_since {
            bytes if bytes > 0 && verified.epoch_after == verified.epoch => format!(
                "; the {} that the source has changed since were not compared: the next sync sends them",
                units::size(bytes)
            ),
            _ => String::new(),
        };
        output.say(&format!(
            "{}: it is at epoch {} now, {} written{rest}",
            if mended { "repaired" } else { "nothing to repair" },
            verified.epoch_after,
            units::size(verified.bytes_written)
        ));
    }
}
