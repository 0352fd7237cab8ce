//! `dsync checkpoint` and `dsync changes`: what changed, for readers other than replicas.

use std::io::{BufWriter, Read, Write, stdin, stdout};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use delta::Epoch;
use serde::Serialize;
use source::{Bookmarks, Handle, History, KnownPosition, SourceError, StateDir};
use sync::SyncError;
use uuid::Uuid;

use crate::args::{self, WaitArg};
use crate::commands::forget;
use crate::failure::Failure;
use crate::output::Output;
use crate::reach::effect;
use crate::terms::units;
use crate::wait::until_free;

/// How long a command waits until the previous one in a pipeline releases a source that is not served.
const PATIENCE: Duration = Duration::from_secs(10);

/// A checkpoint in the list.
#[derive(Serialize)]
pub(crate) struct Listed {
    name: String,
    epoch: u64,
    /// Seconds since 1970 when it was set.
    time: u64,
    /// Blocks that changed from it up to the last epoch; `None` if that is not known.
    blocks: Option<u64>,
    why: Option<String>,
}

#[derive(Serialize)]
struct Checkpoints {
    source: std::path::PathBuf,
    checkpoints: Vec<Listed>,
}

#[derive(Serialize)]
struct Named {
    source: std::path::PathBuf,
    name: Option<String>,
    epoch: u64,
    epoch_id: Uuid,
}

#[derive(Serialize)]
struct Changes {
    source: std::path::PathBuf,
    since: u64,
    since_id: Uuid,
    epoch: u64,
    epoch_id: Uuid,
    size: u64,
    block_size: u32,
    bytes: u64,
    /// Offset and length of each range, in bytes.
    ranges: Vec<(u64, u64)>,
}

/// Sets, lists or removes named checkpoints.
pub(crate) fn run(args: &args::CheckpointArgs, state: &StateDir, output: &Output) -> Result<()> {
    if args.list {
        return list(&args.source, state, output);
    }
    if let Some(name) = &args.delete {
        if !source::is_plain(name) {
            bail!(Failure::usage(format!("\"{name}\" is not the name of a checkpoint")));
        }
        return forget::bookmark(&args.source, name, false, state, output);
    }
    // Read to its end before the source is touched: the merge must have finished.
    let confirmed = match args.at.as_deref() {
        Some("-") => Some(confirmed(&mut stdin().lock())?),
        _ => None,
    };
    let attach = || crate::reach::source::attach(state, &args.source, &args.open);
    let handle = until_free(&patience(args), output, attach)?;
    effect::on_source(&(&handle).into(), &args.open, &[], output);
    let done = set(args, confirmed, &handle, output);
    crate::reach::source::close(handle, done)
}

/// How long a checkpoint waits for its source.
fn patience(args: &args::CheckpointArgs) -> WaitArg {
    WaitArg { wait: args.wait.wait.or_else(|| args.at.is_some().then_some(PATIENCE)) }
}

fn set(
    args: &args::CheckpointArgs,
    confirmed: Option<(Uuid, Uuid)>,
    handle: &Handle,
    output: &Output,
) -> Result<()> {
    let path = handle.about().path.display().to_string();
    let at = match (confirmed, &args.at) {
        (Some((source, epoch)), _) => Some(of_this_source(handle, source, epoch)?),
        (None, Some(at)) => Some(handle.epoch(at)?),
        (None, None) => None,
    };
    let epoch = match &args.name {
        Some(name) => handle.name_checkpoint(name, at)?,
        None => handle.end_epoch()?,
    };
    match &args.name {
        Some(name) => output.say(&format!("{path}: checkpoint {name} is at epoch {}", epoch.number)),
        None => output.say(&format!("{path} is at epoch {}", epoch.number)),
    }
    output.summary(&Named {
        source: handle.about().path.clone(),
        name: args.name.clone(),
        epoch: epoch.number,
        epoch_id: epoch.id,
    });
    Ok(())
}

/// The source and the epoch that a merge reports as committed.
fn confirmed(answer: &mut impl Read) -> Result<(Uuid, Uuid)> {
    let mut text = String::new();
    answer.read_to_string(&mut text).context("cannot read the output of the merge")?;
    let mut ids = text.lines().rev().filter_map(|line| {
        let said: serde_json::Value = serde_json::from_str(line).ok()?;
        let id = |field: &str| said[field].as_str()?.parse().ok();
        (said["message_type"] == "summary").then_some(())?;
        Some((id("source")?, id("epoch_id")?))
    });
    ids.next().ok_or_else(|| {
        anyhow::anyhow!(
            "no merge was confirmed on standard input, so the checkpoint was not moved: --at - reads the output of \
             \"dsync merge --json\""
        )
    })
}

fn of_this_source(handle: &Handle, source: Uuid, epoch: Uuid) -> Result<Epoch> {
    let about = handle.about();
    if source != about.uuid {
        bail!(Failure::refused(format!(
            "the merged delta is of source {source}, but {} is source {}: the checkpoint was not moved",
            about.path.display(),
            about.uuid
        )));
    }
    handle.epoch_of(epoch)?.ok_or_else(|| {
        let why = "the merged epoch is no longer in its history: the checkpoint was not moved";
        Failure::refused(format!("{}: {why}", about.path.display())).into()
    })
}

fn list(what: &str, state: &StateDir, output: &Output) -> Result<()> {
    let (place, about) = crate::reach::source::known(what, state)?;
    let folder = device::Dir::existing(&place)?;
    // The bookmarks before the history: the epoch to which another command moves one meanwhile is in that.
    let (bookmarks, history) = (Bookmarks::read(&folder)?, History::read(&folder)?);
    let checkpoints = listed(&history, &bookmarks, about.block_size);
    if checkpoints.is_empty() {
        output.say(&format!("{} has no named checkpoints", about.path.display()));
    }
    for checkpoint in &checkpoints {
        output.say(&checkpoint.told(about.block_size));
    }
    output.summary(&Checkpoints { source: about.path, checkpoints });
    Ok(())
}

/// The named checkpoints of a source.
pub(crate) fn listed(history: &History, bookmarks: &Bookmarks, block_size: u32) -> Vec<Listed> {
    let list = bookmarks.checkpoints().map(|(name, bookmark)| {
        let (blocks, why) = match changed(history, &bookmark.epoch, block_size) {
            Ok(blocks) => (Some(blocks), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Listed { name: name.clone(), epoch: bookmark.epoch.number, time: bookmark.time, blocks, why }
    });
    list.collect()
}

impl Listed {
    /// A line of the list, as text.
    pub(crate) fn told(&self, block_size: u32) -> String {
        let since = match (self.blocks, &self.why) {
            (Some(blocks), _) => format!(
                "{} ({}) changed up to the last epoch",
                units::many(blocks, "block"),
                units::size(blocks.saturating_mul(block_size.into()))
            ),
            (None, why) => why.clone().unwrap_or_default(),
        };
        format!("{} at epoch {}: {since}", self.name, self.epoch)
    }
}

fn changed(history: &History, since: &Epoch, block_size: u32) -> Result<u64, SourceError> {
    let Some(last) = history.last() else { return Ok(0) };
    let size = history.size_at(&last).unwrap_or(0);
    let blocks = extents::Bitmap::new(size.div_ceil(u64::from(block_size)));
    history.changes_between(since, &last, block_size, &blocks)?;
    Ok(blocks.count())
}

/// Prints what changed since a checkpoint.
pub(crate) fn changes(args: &args::ChangesArgs, state: &StateDir, output: &Output) -> Result<()> {
    let handle = crate::reach::source::attach(state, &args.source, &args.open)?;
    effect::on_source(&(&handle).into(), &args.open, &[], output);
    let found = find(args, &handle);
    let found = crate::reach::source::close(handle, found)?;
    if args.format == args::ChangesFormat::Json || output.is_json() {
        return output.print_summary(&found);
    }
    let mut out = BufWriter::new(stdout().lock());
    for (offset, len) in &found.ranges {
        writeln!(out, "{offset} {len}").context("cannot print the changes")?;
    }
    out.flush().context("cannot print the changes")
}

fn find(args: &args::ChangesArgs, handle: &Handle) -> Result<Changes> {
    let since = handle.epoch(&args.since).map_err(|error| match error {
        // Of a source that went back, or an epoch that is too old: what the reader has is of no use.
        SourceError::Unknown(why) if args.since.parse::<Uuid>().is_ok() => Failure::lost(why).into(),
        error => anyhow::Error::from(SyncError::from(error)),
    })?;
    let known = || -> Result<_, SyncError> {
        let upto = match &args.at {
            Some(at) => handle.epoch(at)?,
            None => {
                // If the changes are not known, no epoch ends.
                handle.reaches(&[KnownPosition { epoch: since, upto: u64::MAX }])?;
                handle.end_epoch()?
            }
        };
        let (blocks, size) = handle.changes_between(&since, &upto)?;
        Ok((upto, blocks, size))
    };
    let (upto, blocks, size) = known()?;
    let about = handle.about();
    let block_size = u64::from(about.block_size);
    let range = |run: std::ops::Range<u64>| {
        let (start, end) = (run.start * block_size, (run.end * block_size).min(size));
        (start, end - start)
    };
    let ranges: Vec<(u64, u64)> = blocks.runs().map(range).collect();
    Ok(Changes {
        source: about.path.clone(),
        since: since.number,
        since_id: since.id,
        epoch: upto.number,
        epoch_id: upto.id,
        size,
        block_size: about.block_size,
        bytes: ranges.iter().map(|(_, len)| len).sum(),
        ranges,
    })
}
