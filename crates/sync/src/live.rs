//! A live disk: passes over what changes, until little is left, then a cut.
//!
//! Each pass is a delta to a checkpoint of the tracker, read from the disk while it is in use: what it carries is of that
//! epoch or newer, and what is newer is sent again by the next. The replica keeps passes as it keeps transfers that were cut;
//! the delta of the cut goes on from them and commits all as one epoch.

use std::sync::Arc;

use delta::Method;
use link::{Receiver, Sender};
use source::{Cut, Handle, Live, Position, RESIZED};

use crate::error::SyncError;
use crate::messages::{Part, Standing};
use crate::push::{How, Options, Progress, Totals, Way, choose, find, send};

/// So little is read under a freeze without another pass: some ten milliseconds of a fast disk.
const FEW_BYTES: u64 = 16 << 20;
const FEW_BLOCKS: u64 = 2048;

/// Where the passes have led.
pub(crate) struct Caught {
    /// The replica after the last pass.
    pub standing: Standing,
    pub positions: Vec<Position>,
    pub cut: Cut,
    /// How the first pass found its changes; `None` if there was none.
    pub first: Option<(Method, String)>,
}

/// Brings the far side so near that the rest can be read in a moment, and reads it.
#[allow(clippy::too_many_arguments)]
pub(crate) fn catch_up(
    handle: &Handle,
    live: &Live,
    (sender, receiver): (&Sender, &Receiver),
    mut standing: Standing,
    mut way: Way,
    options: &Options,
    totals: &Totals,
    progress: Progress<'_>,
) -> Result<Caught, SyncError> {
    if options.at_view {
        return Err(SyncError::Refused(format!(
            "{} is not served, so no view of it is open: leave --at-view out",
            handle.about().path.display()
        )));
    }
    if options.keep_going || options.lacking {
        return Err(SyncError::Refused(format!(
            "{} is a disk in use, and what a pass over it left out could not be told from what it sent: leave --keep-going \
             out, or copy the disk while nobody uses it",
            handle.about().path.display()
        )));
    }
    if options.how == How::Rolling {
        return Err(SyncError::Refused(format!(
            "{} is a disk in use, and --method rolling looks for what has moved in a file: leave it out",
            handle.about().path.display()
        )));
    }
    if live.is_resized() {
        return Err(unknown(handle, RESIZED));
    }
    // What was asked of the method holds for the first pass.
    let later = Options { how: How::Auto, adopt: false, ..options.clone() };
    let block_size = u64::from(handle.about().block_size);
    let size = live.size();
    let (mut first, mut before) = (None, u64::MAX);
    let mut pass = 0;
    let (positions, also) = loop {
        live.flush(&options.cut)?;
        let whole = |positions: &[Position]| positions.last().is_some_and(|p| p.upto >= size);
        if let Way::Tracked(positions) = &way {
            if whole(positions) {
                let lacks = handle.estimate(positions)?;
                let blocks = lacks.count();
                let few = blocks <= FEW_BLOCKS && blocks.saturating_mul(block_size) <= FEW_BYTES;
                if few || pass >= options.passes || blocks > before / 4 * 3 {
                    break (positions.clone(), lacks);
                }
                before = blocks;
            }
        }
        if pass > options.passes {
            let why = "tracking was lost again and again while it was copied";
            return Err(SyncError::Lost { path: handle.about().path.clone(), why: why.into() });
        }
        let view = Arc::new(live.checkpoint()?);
        if let Some(why) = live.lost_for_good()? {
            return Err(unknown(handle, &why));
        }
        let mut found = find(handle, &view, way, &standing, later.how, false)?;
        found.pass = true;
        found.wanted.to_end = true;
        let last = found.wanted.changes.blocks();
        found.wanted.changes.set(last.saturating_sub(1)..last);
        send(sender, receiver, &view, &found, options, totals, progress)?;
        first.get_or_insert((found.method, found.trust));
        standing = Standing::hear(receiver)?;
        // A replica that was larger is cut at the commit: what stands beyond the disk's end is of no use.
        standing.positions = within(std::mem::take(&mut standing.positions), size);
        way = choose(handle, &standing, &later)?;
        pass += 1;
    };
    let cut = live.cut(&also, &options.cut)?;
    Ok(Caught { standing, positions, cut, first })
}

/// The parts of a replica that lie before `size`.
fn within(parts: Vec<Part>, size: u64) -> Vec<Part> {
    let mut from = 0;
    let mut kept = Vec::new();
    for part in parts {
        if from < size || kept.is_empty() {
            kept.push(part);
        }
        from = part.upto;
    }
    kept
}

/// What no pass mends, however many there are.
fn unknown(handle: &Handle, why: &str) -> SyncError {
    SyncError::Refused(format!(
        "what is written to {0} is not known ({why}), and no checkpoint mends that: run \"dsync track remove {0}\" and \"dsync \
         track add {0}\", then sync again",
        handle.about().path.display()
    ))
}
