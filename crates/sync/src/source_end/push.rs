//! The source's end of a sync: plan, transfer, report.

use std::path::Path;
use std::time::Instant;

use link::{Link, Receiver, Sender};
use source::Handle;

use crate::cut_hook::around;
use crate::error::SyncError;
use crate::options::{GiveUp, SyncOptions};
use crate::plan::facts::present;
use crate::plan::{Choice, cut_off};
use crate::report::{Progress, RunningTotals, Summary};
use crate::source_end::account::Account;
use crate::source_end::apart::{Consented, consent};
use crate::source_end::live::catch_up;
use crate::source_end::member::{self, PlannedMember, at_view, pick};
use crate::transfer::{DeltaAnswer, Transfer, heard};
use crate::wire::messages::{Open, StatusReply, open, part};

/// Brings the replica at the other end of `link` up to date. `name` is how the user named the destination.
pub fn push(
    handle: &Handle,
    link: Link,
    destination: &Path,
    name: &str,
    options: &SyncOptions,
    progress: Progress<'_>,
) -> Result<Summary, SyncError> {
    let (sender, receiver) = link.split();
    let pushed = push_over((&sender, &receiver), handle, destination, name, options, progress);
    part(sender, &receiver, pushed)
}

/// Brings the replica up to date as [`push`] does, without the goodbye.
pub(crate) fn push_over(
    (sender, receiver): (&Sender, &Receiver),
    handle: &Handle,
    destination: &Path,
    name: &str,
    options: &SyncOptions,
    progress: Progress<'_>,
) -> Result<Summary, SyncError> {
    let account = Account::begin(handle, (destination, name), &options.way, "sync");
    let account = if options.dry_run { account.dry() } else { account };
    let progress = |done, total| {
        account.progress(done, total);
        progress(done, total);
    };
    let pushed = (|| {
        let replica = Open::for_sync(destination, options).beside(handle)?;
        let (began, traffic) = (Instant::now(), sender.traffic());
        let status = open(sender, receiver, replica, options.bwlimit.as_ref())?;
        handle.be_polite(options.polite);
        let in_place = status.in_place;
        let totals = RunningTotals::new(&progress);
        let transfer =
            Transfer { sender, receiver, name, options, totals, in_place, member: (0, false), resends: true };
        let mut summary = bring(handle, transfer, status, || account.opened())?;
        summary.cost(&traffic, began);
        Ok(summary)
    })();
    account.synced(&pushed);
    pushed.map(|mut summary| {
        account.say_doubts(&mut summary);
        summary
    })
}

/// A sync, from the replica's status to the commit. `begun` is called once it is known that it is not refused: nothing is kept of a first
/// copy that never was.
pub(crate) fn bring(
    handle: &Handle,
    transfer: Transfer<'_>,
    status: StatusReply,
    begun: impl FnOnce(),
) -> Result<Summary, SyncError> {
    let (name, options) = (transfer.name, transfer.options);
    if let Some(how) = &options.give_up {
        return consented(handle, transfer, status, how, begun);
    }
    let mut summary = member::summary(handle, &status, name, options.dry_run);
    let choice = pick(handle, &status, name, options)?;
    if options.dry_run {
        estimate(handle, choice, &status, options, &mut summary)?;
        return Ok(summary);
    }
    transfer.refuse_unlike(handle, &choice, &status)?;
    begun();
    let prepared = match handle.live() {
        None => {
            let view = around(&options.hook, || Ok(handle.view(options.at_view)?))?;
            at_view(handle, view, choice, status, options)?
        }
        Some(live) => heard(transfer.receiver, catch_up(handle, live, &transfer, status, choice))?,
    };
    let planned = PlannedMember::new(handle, transfer, prepared, summary);
    if planned.is_done() {
        return planned.settle(None);
    }
    match planned.transfer.commit(&planned.view, &planned.plan)? {
        DeltaAnswer::Committed(committed) => planned.settle(Some(committed)),
        DeltaAnswer::Counted(status) => {
            // From another view: this one lets go of what was sent.
            let PlannedMember { transfer, .. } = planned;
            bring(handle, Transfer { resends: false, ..transfer }, *status, (|| ()) as fn())
        }
    }
}

/// Brings the replica up to date, with consent to give up what only the destination has.
fn consented(
    handle: &Handle,
    transfer: Transfer<'_>,
    status: StatusReply,
    how: &GiveUp,
    begun: impl FnOnce(),
) -> Result<Summary, SyncError> {
    let Consented { status, options, outcome } = consent(handle, &transfer, status, how)?;
    let mut summary = bring(handle, Transfer { options: &options, ..transfer }, status, begun)?;
    outcome.tell(&mut summary);
    Ok(summary)
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
