//! Merges delta files into a replica.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use delta::Units;
use replica::{CommitMode, Coverage, Keep, Replica};
use serde::Serialize;
use source::StateDir;

use crate::error::SyncError;
use crate::plan::primary::refuse_merge;
use crate::replica_end::opening::{known_replicas, open_options, open_replica};
use crate::site::list;

/// How to merge.
#[derive(Debug, Clone, Default)]
pub struct MergeOptions {
    /// The commit mode.
    pub commit: CommitMode,
    /// Where the replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// Create a new replica if the file of one is gone.
    pub create: bool,
    /// What of its past the replica is to keep from now on. `None`: what it kept before.
    pub keep: Option<Keep>,
}

/// The result of a merge.
#[derive(Debug, Clone, Serialize)]
pub struct Merged {
    /// The replica.
    pub destination: PathBuf,
    /// Its source.
    pub source: uuid::Uuid,
    /// The number of its epoch afterwards.
    pub epoch: u64,
    /// The id of that epoch.
    pub epoch_id: uuid::Uuid,
    /// Bytes of the delta.
    pub bytes_read: u64,
    /// Bytes written, journal included.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// What opening the replica recovered.
    pub recovered: Option<String>,
    /// What the user should know of the commit.
    pub warnings: Vec<String>,
}

/// Merges a delta from a byte stream into the replica at `path`.
pub fn merge(
    path: &Path,
    options: &MergeOptions,
    state: &StateDir,
    input: impl Read,
) -> Result<Merged, SyncError> {
    let how = replica::ReplicaOptions {
        create: options.create,
        keep: options.keep.clone(),
        ..open_options(options.journal_dir.as_deref(), state)
    };
    let open = || {
        refuse_merge(path, &how, state)?;
        open_replica(path, &how, state)
    };
    let (merged, replica) = merge_into(open, options.commit, input)?;
    // Not before: a merge that is refused makes no replica.
    list(&replica, Some(&known_replicas(state)));
    Ok(Merged { destination: path.to_path_buf(), ..merged })
}

/// Merges a delta from a byte stream into a replica that the caller opens, wherever it is.
#[doc(hidden)]
pub fn merge_over(
    open: impl FnOnce() -> replica::Result<Replica>,
    commit: CommitMode,
    input: impl Read,
) -> Result<Merged, SyncError> {
    merge_into(|| Ok(open()?), commit, input).map(|(merged, _)| merged)
}

fn merge_into(
    open: impl FnOnce() -> Result<Replica, SyncError>,
    commit: CommitMode,
    input: impl Read,
) -> Result<(Merged, Replica), SyncError> {
    let began = Instant::now();
    let mut units = Units::new(input);
    let no_delta = || delta::Error::NoTrailer { units: 0 };
    // The header first: input that is not a delta leaves no trace.
    let header = units.next()?.ok_or_else(no_delta)?;
    let mut replica = open()?;
    let destination = replica.path().to_path_buf();
    let recovered = replica.status().recovered.clone();
    let mut receipt = replica.receive(header, commit)?;
    // What changed after its end is not in it.
    let whole = receipt.covers() == Coverage::Whole;
    let committed = loop {
        let unit = match units.next() {
            Ok(Some(unit)) => unit,
            end => {
                receipt.keep()?;
                return Err(match end {
                    Err(error) => error.into(),
                    Ok(_) => delta::Error::NoTrailer { units: units.count() }.into(),
                });
            }
        };
        if unit.kind == delta::UnitKind::Trailer {
            // Before anything is merged: data after the trailer is not from an extract.
            let number = units.count();
            if !matches!(units.next(), Ok(None)) {
                return Err(delta::Error::AfterEnd { unit: number }.into());
            }
            receipt.unit(unit)?;
            break receipt.finish()?;
        }
        receipt.unit(unit)?;
    };
    replica.note_committed(if whole { Coverage::Whole } else { Coverage::Part });
    let merged = Merged {
        destination,
        source: replica.status().source.unwrap_or_default(),
        epoch: committed.epoch.number,
        epoch_id: committed.epoch.id,
        bytes_read: units.bytes(),
        bytes_written: committed.bytes_written,
        seconds: began.elapsed().as_secs_f64(),
        recovered,
        warnings: replica.take_warnings(),
    };
    Ok((merged, replica))
}
