//! Syncing a live disk: passes over the changes until little is left, then a cut.
//!
//! Each pass is a delta to a checkpoint of the tracker, read from the disk while it is in use: what it carries is of that
//! epoch or newer, and what is newer is sent again by the next. The replica keeps passes like interrupted transfers;
//! the delta of the cut resumes them and commits all as one epoch.

use std::sync::Arc;

use delta::Method;
use source::{Convergence, Handle, Live};

use crate::conflict::Conflict;
use crate::cut_hook::around;
use crate::error::SyncError;
use crate::facts::{facts, moment};
use crate::messages::Status;
use crate::options::SyncOptions;
use crate::plan::{Choice, choose};
use crate::transfer::{Prepared, Transfer};

/// What may be read under a freeze without another pass: some ten milliseconds of a fast disk.
const FEW_BYTES: u64 = 16 << 20;
const FEW_BLOCKS: u64 = 2048;

/// Makes passes until the rest can be read in a moment, and reads it.
pub(crate) fn catch_up(
    handle: &Handle,
    live: &Live,
    transfer: &Transfer<'_>,
    mut status: Status,
    mut choice: Choice,
) -> Result<Prepared, SyncError> {
    let (about, options) = (handle.about(), transfer.options);
    // The requested method applies to the first pass.
    let later = SyncOptions { method: None, adopt: false, ..options.clone() };
    let block_size = u64::from(about.block_size);
    let size = live.size();
    let mut convergence = Convergence::new(FEW_BYTES.min(FEW_BLOCKS * block_size));
    let (mut first, mut pass) = (None, 0);
    let lacking = loop {
        live.flush(&options.live.cut)?;
        // Passes are made while they pay.
        if choice.positions.last().is_some_and(|last| last.upto >= size) {
            let lacking = handle.estimate(&choice.positions)?;
            status.replica.unsure.mark(&lacking, block_size);
            let pays = convergence.pays(lacking.count().saturating_mul(block_size));
            if !pays || pass >= options.live.passes {
                break lacking;
            }
        }
        if pass > options.live.passes {
            let why = "tracking was lost repeatedly during the copy".into();
            return Err(Conflict::Lost { path: about.path.clone(), why }.into());
        }
        let view = Arc::new(live.checkpoint()?);
        if let Some(why) = live.lost_for_good()? {
            return Err(Conflict::Unfollowed { path: about.path.clone(), why }.into());
        }
        let moment = moment(handle, &view, &choice, &status, options)?;
        let plan = choice.at(moment, &status, &later)?.into_pass();
        status = transfer.pass(&view, &plan)?;
        first.get_or_insert((plan.header.method, plan.trust));
        // A larger replica is truncated at the commit: what is beyond the disk's end is not needed.
        let parts = std::mem::take(&mut status.replica.positions);
        status.replica.positions = within(parts, size);
        choice = choose(&facts(handle, &status, transfer.name, &later)?, &status, &later)?;
        pass += 1;
    };
    let cut = around(&options.hook, || Ok(live.cut(&lacking, &options.live.cut)?))?;
    let view = Arc::new(cut.view.clone());
    let moment = moment(handle, &view, &choice, &status, options)?;
    // Only what was read at the cut may be sent, and only the record determines what that must be.
    let tracked = SyncOptions { method: Some(Method::Tracked), ..later };
    let mut plan = choice.at(moment, &status, &tracked)?;
    if plan.wanted.all_from < plan.header.size_after || !cut.holds(&plan.wanted.changes) {
        let why = "more was missing at the end than had been read".into();
        return Err(Conflict::Lost { path: about.path.clone(), why }.into());
    }
    plan.header.fuzzy = cut.fuzzy;
    let freeze_ms = cut.freeze.map(|lasted| lasted.as_millis() as u64);
    Ok(Prepared { view, plan, status, first, freeze_ms })
}

/// The parts of a replica that begin before `size`.
fn within(parts: Vec<replica::Position>, size: u64) -> Vec<replica::Position> {
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
