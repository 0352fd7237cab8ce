//! One disk of a sync, alone or in a group: the choice of a method, the plan for a view, and what its source keeps of the commit.

use std::sync::Arc;

use delta::Method;
use source::{Handle, View};

use crate::error::SyncError;
use crate::options::SyncOptions;
use crate::plan::facts::{acknowledge, bookmark, facts, moment, note_older, present};
use crate::plan::{
    Choice, SyncPlan, choose, cut_off, refuse_diverged, refuse_foreign, refuse_larger, refuse_other_content,
};
use crate::report::Summary;
use crate::transfer::{PreparedSync, Transfer};
use crate::wire::messages::{CommitReply, StatusReply, nonsense, text};

/// Picks the method for a disk, or refuses the sync. `name` is how the user named the replica.
pub(crate) fn pick(
    handle: &Handle,
    status: &StatusReply,
    name: &str,
    options: &SyncOptions,
) -> Result<Choice, SyncError> {
    // That others have changed it takes nothing from what only it has.
    if let Some(former) = status.replica.former.as_deref().filter(|_| options.adopt) {
        let recorded = StatusReply { replica: former.clone(), ..status.clone() };
        let known = facts(handle, &recorded, name, options)?;
        refuse_diverged(&known, &recorded, options)?;
        refuse_foreign(&known, &recorded, options)?;
        refuse_other_content(&known, options)?;
    }
    let known = facts(handle, status, name, options)?;
    note_older(handle, known.branch, status);
    let choice = choose(&known, status, options)?;
    if options.adopt {
        let about = handle.about();
        refuse_larger((&about.path, about.uuid, handle.reader()?.len()), status, options)?;
    }
    Ok(choice)
}

/// The summary of a sync that begins where a replica is.
pub(crate) fn summary(handle: &Handle, status: &StatusReply, name: &str, dry_run: bool) -> Summary {
    let resumed = status.replica.under_way() || status.replica.resumes.is_some();
    let recovered = status.replica.recovered.clone();
    Summary { resumed, recovered, ..Summary::new(handle.about(), name, dry_run) }
}

/// The plan for a view.
pub(crate) fn at_view(
    handle: &Handle,
    view: View,
    choice: Choice,
    status: StatusReply,
    options: &SyncOptions,
) -> Result<PreparedSync, SyncError> {
    let view = Arc::new(view);
    let moment = moment(handle, &view, &choice, &status, options)?;
    let plan = choice.at(moment, &status, options)?;
    handle.sends(view.epoch(), status.replica.nonce)?;
    Ok(PreparedSync { view, plan, status, first: None, freeze_ms: None })
}

/// What a sync would move, without taking a checkpoint.
pub(crate) fn estimate(
    handle: &Handle,
    choice: Choice,
    status: &StatusReply,
    options: &SyncOptions,
    summary: &mut Summary,
) -> Result<(), SyncError> {
    let moment = present(handle, &choice)?;
    let plan = choice.at(moment, status, options)?;
    summary.method = plan.header.method;
    summary.trust = plan.trust;
    summary.disk_size = plan.header.size_after;
    summary.bytes_cut = cut_off(status, summary.disk_size);
    let disk = handle.reader()?;
    let looked = plan.wanted.count(&*disk);
    let count = looked.map_err(SyncError::io(format!("look at {}", summary.source.display())))?;
    (summary.blocks_changed, summary.extents, summary.bytes_changed) =
        (count.blocks, count.extents, count.bytes);
    // Before compression, and without the few bytes for a hole; a compare sends at most this.
    (summary.bytes_read, summary.bytes_sent) = (count.read, count.read);
    Ok(())
}

/// A disk with what is to be sent to its replica.
pub(crate) struct PlannedMember<'a> {
    pub handle: &'a Handle,
    pub transfer: Transfer<'a>,
    pub view: Arc<View>,
    pub plan: SyncPlan,
    pub status: StatusReply,
    pub summary: Summary,
}

impl<'a> PlannedMember<'a> {
    /// A disk as it was prepared. What came before is in the summary.
    pub(crate) fn new(
        handle: &'a Handle,
        transfer: Transfer<'a>,
        prepared: PreparedSync,
        mut summary: Summary,
    ) -> PlannedMember<'a> {
        let PreparedSync { view, plan, status, first, freeze_ms } = prepared;
        summary.freeze_ms = freeze_ms;
        summary.disk_size = plan.header.size_after;
        summary.bytes_cut = cut_off(&status, summary.disk_size);
        (summary.method, summary.trust) = first.unwrap_or((plan.header.method, plan.trust.clone()));
        // What was found by comparing is found anew, unless what changed since is known.
        summary.resumed &=
            plan.left.is_some() || !matches!(plan.header.method, Method::Compare | Method::Rolling);
        // The rest of a first copy is found by what the source was at its beginning, and is a first copy all the same.
        if status.replica.epoch.is_none() && summary.method == Method::Tracked {
            (summary.method, summary.trust) = (Method::Copy, "seeded".into());
        }
        if plan.header.fuzzy {
            summary.trust.push_str(", without a cut: the disk was written to during the last pass");
        }
        PlannedMember { handle, transfer, view, plan, status, summary }
    }

    /// True if the replica is where it should be.
    pub(crate) fn is_done(&self) -> bool {
        self.plan.is_done(&self.status)
    }

    /// Records at the source where the replica is: at what was committed, or where it was already.
    pub(crate) fn settle(self, committed: Option<CommitReply>) -> Result<Summary, SyncError> {
        let PlannedMember { handle, transfer, view, plan, status, mut summary } = self;
        let (epoch, name) = (view.epoch(), bookmark(transfer.name, &status, &transfer.options.way));
        summary.epoch = Some(epoch.number);
        let Some(committed) = committed else {
            let state = (status.replica.nonce, 0);
            summary.warnings.extend(acknowledge(handle, &name, &status, epoch, state)?);
            return Ok(summary);
        };
        if committed.epoch != epoch {
            return Err(nonsense("an epoch that was not sent"));
        }
        summary.count(&transfer.totals);
        let state = (plan.header.stream, summary.unreadable.bytes);
        let renamed = acknowledge(handle, &name, &status, epoch, state)?;
        if let Some(changed) = plan.changed.filter(|(blocks, ..)| *blocks < summary.blocks_changed) {
            (summary.blocks_changed, summary.extents, summary.bytes_changed) = changed;
        }
        summary.digests = committed.digests.as_deref().map(text);
        (summary.by_digests, summary.sound) = (committed.by_digests, committed.sound);
        summary.warnings = committed.warnings.iter().map(|warning| text(warning)).chain(renamed).collect();
        summary.bytes_written = committed.bytes_written;
        summary.view_bytes = view.kept_bytes();
        summary.reads_waited = view.waits();
        Ok(summary)
    }
}
