//! `dsync extract` and `dsync merge`: the two halves of a sync, with any pipe between.

use std::io::{IsTerminal, stdin, stdout};

use anyhow::{Result, bail};
use source::StateDir;

use crate::args;
use crate::failure::Failure;
use crate::output::Output;
use crate::reach::effect;
use crate::terms::units;

/// Writes the changed blocks to standard output.
pub(crate) fn extract(args: &args::Extract, state: &StateDir, output: &Output) -> Result<()> {
    if stdout().is_terminal() {
        return Err(Failure::usage(
            "refusing to write a binary delta to a terminal: redirect it, as in \"dsync extract SRC > vm.delta\" or \"dsync extract SRC | ssh backup dsync merge DST\"",
        )
        .into());
    }
    units::check_rates(&[("--bwlimit", args.bwlimit)])?;
    let handle = crate::reach::source::attach(state, &args.source, &args.open)?;
    effect::on_source(&(&handle).into(), &args.open, &[], output);
    let progress = |done, total| output.progress(done, total);
    let result = match args.bwlimit {
        Some(rate) => {
            let out = link::Limited::new(stdout().lock(), rate);
            sync::extract(&handle, args.since.as_deref(), args.compress.level, out, &progress)
        }
        None => {
            link::widen(&stdout());
            sync::extract(&handle, args.since.as_deref(), args.compress.level, stdout().lock(), &progress)
        }
    };
    output.finish();
    let result = result.map_err(|error| match error.class() {
        sync::Class::Lost => anyhow::Error::from(Failure::lost(format!(
            "{error}: \"dsync extract --since 0\" writes the whole disk"
        ))),
        _ => error.into(),
    });
    let extracted = crate::reach::source::close(handle, result)?;
    let from = match extracted.since {
        Some(epoch) => format!("epoch {epoch} to {}", extracted.epoch),
        None => format!("the whole disk at epoch {}", extracted.epoch),
    };
    output.say(&format!(
        "{}: {from}, {}, {} written in {}",
        extracted.source.display(),
        units::many(extracted.blocks_changed, "block"),
        units::size(extracted.bytes_sent),
        units::seconds(extracted.seconds)
    ));
    output.summary(&extracted);
    Ok(())
}

/// Merges a delta from standard input.
pub(crate) fn merge(args: &args::Merge, state: &StateDir, output: &Output) -> Result<()> {
    if stdin().is_terminal() {
        bail!(Failure::usage("merge reads a delta from standard input: dsync merge DST < vm.delta"));
    }
    link::widen(&stdin());
    let path = device::absolute(&args.destination)?;
    let options = sync::MergeOptions {
        commit: args.commit.into(),
        journal_dir: args.journal_dir.clone(),
        create: args.create,
        keep: args.past.keep()?,
    };
    let merged = sync::merge(&path, &options, state, stdin().lock())?;
    merged.recovered.iter().chain(&merged.warnings).for_each(|warning| output.warn(warning));
    output.say(&format!(
        "{} is at epoch {}: {} merged, {} written in {}",
        path.display(),
        merged.epoch,
        units::size(merged.bytes_read),
        units::size(merged.bytes_written),
        units::seconds(merged.seconds)
    ));
    output.summary(&merged);
    Ok(())
}
