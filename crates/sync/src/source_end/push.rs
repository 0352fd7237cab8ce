//! The source's end of a sync: plan, transfer, report.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use delta::Method;
use link::{Link, Receiver, Sender};
use source::Handle;

use crate::cut_hook::around;
use crate::error::SyncError;
use crate::options::{GiveUp, SyncOptions};
use crate::plan::facts::{acknowledge, bookmark, facts, moment, note_older, present};
use crate::plan::{Choice, choose, cut_off, refuse_larger};
use crate::report::{Progress, RunningTotals, Summary};
use crate::source_end::account::Account;
use crate::source_end::apart::{Consented, consent};
use crate::source_end::live::catch_up;
use crate::transfer::{DeltaAnswer, PreparedSync, Transfer, heard};
use crate::wire::messages::{Open, StatusReply, open, part, text};

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
        let status = open(sender, receiver, &replica, options.bwlimit.as_ref())?;
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
        account.say_unrepaired(&mut summary);
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
    let mut summary = Summary::new(handle.about(), name, options.dry_run);
    summary.resumed = status.replica.under_way() || status.replica.resumes.is_some();
    summary.recovered.clone_from(&status.replica.recovered);
    let known = facts(handle, &status, name, options)?;
    note_older(handle, known.branch, &status, options);
    let choice = choose(&known, &status, options)?;
    if options.adopt {
        let about = handle.about();
        refuse_larger((&about.path, about.uuid, handle.reader()?.len()), &status, options)?;
    }
    if options.dry_run {
        estimate(handle, choice, &status, options, &mut summary)?;
        return Ok(summary);
    }
    transfer.refuse_unlike(handle, &choice, &status)?;
    begun();
    let is_first = status.replica.epoch.is_none();
    let bookmark = bookmark(name, &status, &options.way);
    let prepared = match handle.live() {
        None => at_view(handle, choice, status, options)?,
        Some(live) => heard(transfer.receiver, catch_up(handle, live, &transfer, status, choice))?,
    };
    let PreparedSync { view, plan, status, first, freeze_ms } = prepared;
    summary.freeze_ms = freeze_ms;
    summary.disk_size = plan.header.size_after;
    summary.bytes_cut = cut_off(&status, summary.disk_size);
    (summary.method, summary.trust) = first.unwrap_or((plan.header.method, plan.trust.clone()));
    // The rest of a first copy is found by what the source was at its beginning, and is a first copy all the same.
    if is_first && summary.method == Method::Tracked {
        (summary.method, summary.trust) = (Method::Copy, "seeded".into());
    }
    if plan.header.fuzzy {
        summary.trust.push_str(", without a cut: the disk was written to during the last pass");
    }
    if plan.is_done(&status) {
        let state = (status.replica.nonce, 0);
        summary.warnings.extend(acknowledge(handle, &bookmark, &status, view.epoch(), state)?);
        summary.epoch = Some(view.epoch().number);
        return Ok(summary);
    }
    let committed = match transfer.commit(&view, &plan)? {
        DeltaAnswer::Committed(committed) => committed,
        // From another view: this one has let go of what was sent.
        DeltaAnswer::Counted(status) => {
            drop(view);
            return bring(handle, Transfer { resends: false, ..transfer }, *status, (|| ()) as fn());
        }
    };
    summary.count(&transfer.totals);
    let state = (plan.header.stream, summary.unreadable.bytes);
    let renamed = acknowledge(handle, &bookmark, &status, committed.epoch, state)?;
    summary.epoch = Some(committed.epoch.number);
    if let Some(changed) = plan.changed.filter(|(blocks, ..)| *blocks < summary.blocks_changed) {
        (summary.blocks_changed, summary.extents, summary.bytes_changed) = changed;
    }
    summary.digests = committed.digests.as_deref().map(text);
    summary.warnings = committed.warnings.iter().map(|warning| text(warning)).chain(renamed).collect();
    summary.bytes_written = committed.bytes_written;
    summary.view_bytes = view.kept_bytes();
    summary.reads_waited = handle.waits();
    Ok(summary)
}

/// Brings the replica up to date, with consent to give up what only the destination has.
fn consented(
    handle: &Handle,
    transfer: Transfer<'_>,
    status: StatusReply,
    how: &GiveUp,
    begun: impl FnOnce(),
) -> Result<Summary, SyncError> {
    let Consented { status, options, given_up, said } = consent(handle, &transfer, status, how)?;
    let mut summary = bring(handle, Transfer { options: &options, ..transfer }, status, begun)?;
    summary.warnings.extend(said);
    summary.given_up = given_up;
    Ok(summary)
}

/// The plan for a view that is taken now.
fn at_view(
    handle: &Handle,
    choice: Choice,
    status: StatusReply,
    options: &SyncOptions,
) -> Result<PreparedSync, SyncError> {
    let view = Arc::new(around(&options.hook, || Ok(handle.view(options.at_view)?))?);
    let moment = moment(handle, &view, &choice, &status, options)?;
    let plan = choice.at(moment, &status, options)?;
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
