//! Syncing a live disk: passes over the changes until little is left, then a cut.
//!
//! Each pass is a delta to a checkpoint of the tracker, read from the disk while it is in use: what it carries is of that
//! epoch or newer, and what is newer is sent again by the next. The replica keeps passes like interrupted transfers;
//! the delta of the cut resumes them and commits all as one epoch.

use std::sync::Arc;

use delta::Method;
use extents::Bitmap;
use lineage::Branch;
use source::{Convergence, Cut, Handle, Live};

use crate::conflict::Conflict;
use crate::cut_hook::around;
use crate::error::SyncError;
use crate::options::SyncOptions;
use crate::plan::facts::{facts, moment};
use crate::plan::{Choice, SourceFacts, choose};
use crate::transfer::{PreparedSync, Transfer};
use crate::wire::messages::StatusReply;

/// What may be read under a freeze without another pass: some ten milliseconds of a fast disk.
const FEW_BYTES: u64 = 16 << 20;
const FEW_BLOCKS: u64 = 2048;

/// How far passes have brought a replica.
pub(crate) struct Approach {
    status: StatusReply,
    choice: Choice,
    /// How the first pass found its changes.
    first: Option<(Method, String)>,
}

/// Makes passes until the rest can be read in a moment, and reads it.
pub(crate) fn catch_up(
    handle: &Handle,
    live: &Live,
    transfer: &Transfer<'_>,
    status: StatusReply,
    choice: Choice,
) -> Result<PreparedSync, SyncError> {
    let options = transfer.options;
    let mut approach = Approach::new(status, choice);
    let lacking = approach.come_close(handle, live, transfer)?;
    let cut = around(&options.hook, || Ok(live.cut(&lacking, &options.live.cut)?))?;
    approach.arrive(handle, &cut, options)
}

impl Approach {
    /// From where a replica is.
    pub(crate) fn new(status: StatusReply, choice: Choice) -> Approach {
        Approach { status, choice, first: None }
    }

    /// Makes passes until the rest can be read in a moment. Returns that.
    pub(crate) fn come_close(
        &mut self,
        handle: &Handle,
        live: &Live,
        transfer: &Transfer<'_>,
    ) -> Result<Bitmap, SyncError> {
        let (about, options) = (handle.about(), transfer.options);
        let later = later(options);
        let block_size = u64::from(about.block_size);
        let size = live.size();
        let mut convergence = Convergence::new(FEW_BYTES.min(FEW_BLOCKS * block_size));
        let mut pass = 0;
        let lacking = loop {
            live.flush(&options.live.cut)?;
            // Passes are made while they pay.
            let is_whole = self.choice.positions.last().is_some_and(|last| last.upto >= size);
            if is_whole && self.choice.method == Method::Tracked {
                let lacking = handle.estimate(&self.choice.positions)?;
                self.status.replica.unsure.mark(&lacking, block_size);
                let pays = convergence.pays(lacking.count().saturating_mul(block_size));
                if !pays || pass >= options.live.passes {
                    break lacking;
                }
            }
            if pass > options.live.passes {
                let why = "tracking was lost repeatedly during the copy".into();
                return Err(Conflict::Lost { path: about.path.clone(), why }.into());
            }
            let view = live.checkpoint()?;
            // What is written during a later pass is read with writers stopped: it is made short.
            let view = Arc::new(if pass == 0 { view } else { view.at_full_speed() });
            if let Some(why) = live.lost_for_good()? {
                return Err(Conflict::Unfollowed { path: about.path.clone(), why: why.to_string() }.into());
            }
            let moment = moment(handle, &view, &self.choice, &self.status, options)?;
            // The requested method applies to the first pass.
            let plan = self.choice.clone().at(moment, &self.status, &later)?.into_pass();
            self.status = transfer.pass(&view, &plan)?;
            self.first.get_or_insert((plan.header.method, plan.trust));
            // A larger replica is truncated at the commit: what is beyond the disk's end is not needed.
            let parts = std::mem::take(&mut self.status.replica.positions);
            self.status.replica.positions = within(parts, size);
            // Whether the replica may be overwritten was decided before the first pass.
            let branch = Branch::Behind;
            let facts = SourceFacts { branch, ..facts(handle, &self.status, transfer.name, &later)? };
            self.choice = choose(&facts, &self.status, &later)?;
            pass += 1;
        };
        Ok(lacking)
    }

    /// What is to be sent at the cut.
    pub(crate) fn arrive(
        self,
        handle: &Handle,
        cut: &Cut,
        options: &SyncOptions,
    ) -> Result<PreparedSync, SyncError> {
        let Approach { status, choice, first, .. } = self;
        let view = Arc::new(cut.view.clone());
        let moment = moment(handle, &view, &choice, &status, options)?;
        // Only what was read at the cut may be sent, and only the record determines what that must be.
        let tracked = SyncOptions { method: Some(Method::Tracked), ..later(options) };
        let mut plan = choice.at(moment, &status, &tracked)?;
        if plan.wanted.all_from < plan.header.size_after || !cut.holds(&plan.wanted.changes) {
            let why = "more was missing at the end than had been read".into();
            return Err(Conflict::Lost { path: handle.about().path.clone(), why }.into());
        }
        plan.header.fuzzy = cut.fuzzy;
        let freeze_ms = cut.freeze.map(|lasted| lasted.as_millis() as u64);
        Ok(PreparedSync { view, plan, status, first, freeze_ms })
    }
}

/// What applies to all but the first pass.
fn later(options: &SyncOptions) -> SyncOptions {
    SyncOptions { method: None, adopt: false, ..options.clone() }
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
