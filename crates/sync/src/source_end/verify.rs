//! Verifying a replica: its checksums are compared with those of the source, except where that has changed since the
//! replica's epoch.
//!
//! A view is taken first. The history holds exactly what changed between the replica's epoch and the view; everything
//! else must be equal. So a source may be written to meanwhile, and no difference is a false alarm.
//!
//! | | sends | leaves the replica at |
//! | --- | --- | --- |
//! | `verify` | nothing | its epoch |
//! | `verify --repair` | what differs and has not changed since | its epoch |
//! | the same where that is not known, or the replica may be of no single moment | all that differs from the view | the view's epoch |
//! | `verify --repair --range …` | what differs there and has not changed since | its epoch |
//!
//! A replica that other programs have changed is opened for this all the same. If moments of its past are kept, `--repair` looks before
//! it sends anything: where nothing differs the replica is accepted as it was, under the name that its undo deltas lead from. Blocks that
//! the source has changed since cannot be compared, so that takes a source without changes, or a file whose mtime is to the nanosecond
//! what it was: then only its owner, mode or links were changed, or a program wrote to just those blocks and set that time back, and the
//! next sync overwrites them. Otherwise only a full compare fits it, so `--repair --range` does not repair it; nor one some of whose
//! blocks may be of another moment than its epoch, because a mirror was ahead or it is a former source. Where there is no source to
//! compare with, `recover --accept` accepts it by its user's word, if size and mtime are what they were (`replica/src/commit/accept.rs`).
//!
//! A repair at the replica's epoch keeps its past: the undo delta from the repaired state is empty, so the way back to earlier moments
//! leads through what was mended, and never brings the damage back. One that goes to the view gives the past up, and says so: what it
//! replaces may be damage.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use compare::{Finding, Hash, Scope};
use delta::{Epoch, Header, Method};
use device::Disk;
use extents::Bitmap;
use lineage::Lives;
use link::{Link, Pace, Receiver, Sender};
use replica::{Acceptable, CommitMode, State};
use serde::{Deserialize, Serialize};
use source::{Handle, KnownPosition, LastVerify, Reached, SourceError, View};

use crate::error::SyncError;
use crate::extents::ListedExtents;
use crate::options::{SyncOptions, Way};
use crate::plan::facts::{bookmark, facts, is_older, note_older};
use crate::plan::read::FrameSize;
use crate::plan::{refuse_diverged, refuse_emptied, refuse_foreign, refuse_other_content, refuse_vanished};
use crate::report::{Progress, RunningTotals};
use crate::source_end::account::Account;
use crate::transfer::committed;
use crate::transfer::compared::Comparison;
use crate::transfer::pack::{DeltaSender, Packing};
use crate::wire::messages::{Open, PLAN, Plan, StatusReply, VERDICT, VerifyFinding, open, part, text};

/// Options of a verification.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct VerifyOptions {
    /// Send what differs, and commit it. A replica that is its epoch but for damage stays at it, and keeps its past; so does one that
    /// others have changed, if nothing differs. One of which that is not known is brought to the source's present epoch, if the whole
    /// disk is compared.
    pub repair: bool,
    /// How a repair is committed.
    pub commit: CommitMode,
    /// Compare only these bytes; all, if empty.
    pub ranges: Vec<Range<u64>>,
    /// The hash of blocks.
    pub hash: Hash,
    /// The most bytes read per second, on each side.
    pub rate: Option<u64>,
    /// The most bytes sent per second.
    pub bwlimit: Option<Pace>,
    /// Read more slowly while a guest writes to the source, so that its writes take no longer.
    #[serde(default)]
    pub polite: bool,
    /// Skip what cannot be read.
    pub keep_going: bool,
    /// Refuse, before anything is read, what could only say that differences may be changes: [`SyncError::Inexact`].
    #[serde(skip)]
    pub exact: bool,
    /// Where the replica keeps lineage and journal.
    #[serde(skip)]
    pub journal_dir: Option<PathBuf>,
    /// How the replica's side was reached.
    #[serde(skip)]
    pub way: Way,
}

/// The result of a verification.
///
/// More than fifteen fields: they are the keys of its JSON object, which is flat.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Verified {
    /// The source.
    pub source: PathBuf,
    /// The replica.
    pub destination: String,
    /// The epoch of the replica before.
    pub epoch: u64,
    /// The epoch of the source that it was compared with.
    pub source_epoch: u64,
    /// `exact`: what changed since is known, and every difference is damage. Else why differences may be changes.
    pub trust: String,
    /// How other programs changed the replica since its last commit, as far as its times or counts show.
    pub changed: Option<String>,
    /// The size of the replica, if it is wrong.
    pub wrong_size: Option<u64>,
    /// Bytes of the source.
    pub disk_size: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Bytes that were to be compared.
    pub bytes_compared: u64,
    /// Bytes of these that have changed at the source since the replica's epoch, and are not compared.
    pub bytes_changed_since: u64,
    /// Where the replica differs.
    pub differing: ListedExtents,
    /// What could not be read at the source.
    pub unreadable: ListedExtents,
    /// What could not be read at the replica. It counts as differing too.
    pub unreadable_there: ListedExtents,
    /// What differed was sent and committed.
    pub repaired: bool,
    /// It is known what changed since: every difference is damage.
    #[serde(skip)]
    pub exact: bool,
    /// Blocks that changed since the replica's epoch were not compared.
    #[serde(skip)]
    pub passed_over: bool,
    /// The epoch of the replica afterwards.
    pub epoch_after: u64,
    /// Bytes read from the source.
    pub bytes_read: u64,
    /// Bytes sent over the link.
    pub bytes_sent: u64,
    /// Bytes received over the link.
    pub bytes_received: u64,
    /// Bytes written at the replica, journal included.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// What opening the replica had to mend.
    pub recovered: Option<String>,
    /// What the user should know of the repair.
    pub warnings: Vec<String>,
}

/// Compares the replica at the other end of `link` with a view of the source. `name` is how the user named the destination.
pub fn verify(
    handle: &Handle,
    link: Link,
    destination: &Path,
    name: &str,
    options: &VerifyOptions,
    progress: Progress<'_>,
) -> Result<Verified, SyncError> {
    let (sender, receiver) = link.split();
    let verified = verify_over((&sender, &receiver), handle, destination, name, options, progress);
    part(sender, &receiver, verified)
}

/// The replica as a verification opens it.
pub(crate) fn replica_for_verify(path: &Path, options: &VerifyOptions) -> Open {
    Open { verify: true, ..Open::new(path, &options.journal_dir, options.commit) }
}

/// Compares the replica with a view of the source as [`verify`] does, without the goodbye.
pub(crate) fn verify_over(
    (sender, receiver): (&Sender, &Receiver),
    handle: &Handle,
    destination: &Path,
    name: &str,
    options: &VerifyOptions,
    progress: Progress<'_>,
) -> Result<Verified, SyncError> {
    let account = Account::begin(handle, (destination, name), &options.way, "verify");
    let progress = |done, total| {
        account.progress(done, total);
        progress(done, total);
    };
    let mut unfinished = 0;
    let verified = (|| {
        let (began, traffic) = (Instant::now(), sender.traffic());
        let replica = replica_for_verify(destination, options).beside(handle)?;
        let mut status = open(sender, receiver, replica, options.bwlimit.as_ref())?;
        handle.be_polite(options.polite);
        account.opened();
        refuse_sources(handle, name, &status, options)?;
        missing(handle, name, &status, options)?;
        let totals = RunningTotals::new(&progress);
        let looking = VerifyOptions { repair: false, ..options.clone() };
        let accepted = match Proof::of_acceptable(handle, &status, options, &looking)? {
            None => None,
            Some(proof) => {
                let accepted = proof.accept(sender, receiver, name, &totals)?;
                if accepted.is_none() {
                    status = StatusReply::hear(receiver)?;
                }
                accepted
            }
        };
        let mut verified = match accepted {
            Some(verified) => verified,
            None => {
                let proof = Proof::begin(handle, status, options)?;
                proof.conclude(sender, receiver, name, &totals, &mut unfinished)?
            }
        };
        verified.bytes_read = totals.read.load(Relaxed);
        verified.bytes_sent = traffic.sent();
        verified.bytes_received = traffic.received();
        verified.seconds = began.elapsed().as_secs_f64();
        Ok(verified)
    })();
    if unfinished > 0 {
        account.found(LastVerify::now(unfinished, false));
    }
    account.ended(&verified, |tally, verified: &Verified| {
        tally.bytes_sent += verified.bytes_sent;
        if verified.repaired && options.ranges.is_empty() {
            // What had been refused is accepted.
            tally.succeed();
        }
        let found = LastVerify::now(verified.differing.bytes, verified.repaired);
        let found = LastVerify { inexact: !verified.exact && found.differs(), ..found };
        let in_part = !options.ranges.is_empty() || verified.unreadable.extents > 0;
        match &mut tally.verified {
            // What is known to be damage is not what may be changes.
            Some(before) if before.differs() && found.inexact => {}
            // All of it has changed since: nothing was looked at.
            _ if verified.passed_over && verified.bytes_changed_since >= verified.bytes_compared => {}
            // What was found before may be in blocks that were not looked at.
            Some(before) if before.stands() && !found.stands() && in_part => {}
            Some(before) if before.stands() && !found.stands() && verified.passed_over => {
                before.until_sync = true;
            }
            last => *last = Some(found),
        }
    });
    verified
}

/// A comparison of a view with a replica.
struct Proof<'a> {
    handle: &'a Handle,
    options: &'a VerifyOptions,
    status: StatusReply,
    /// The replica's epoch.
    epoch: Epoch,
    /// Why it is not known what changed since.
    lost: Option<String>,
    view: Arc<View>,
    /// Blocks that changed since.
    since: Bitmap,
    scope: Scope,
    /// A repair brings the replica to the view. Otherwise only blocks count that have not changed since.
    to_view: bool,
    /// The lives that led to the view.
    lives: Lives,
}

impl<'a> Proof<'a> {
    fn begin(
        handle: &'a Handle,
        status: StatusReply,
        options: &'a VerifyOptions,
    ) -> Result<Proof<'a>, SyncError> {
        let position = [stands(handle, &status, options)?];
        let lost = match status.replica.under_way() {
            true => Some(INTERRUPTED.to_owned()),
            false => known(handle, &position, &status)?,
        };
        refuse(handle, &status, options, lost.as_deref())?;
        if let Some(why) = lost.clone().filter(|_| options.exact) {
            return Err(SyncError::Inexact { epoch: position[0].epoch.number, why });
        }
        // The view first, then what changed up to it: no write can fall between.
        let view = Arc::new(handle.view(false)?);
        let (size, block_size) = (view.len(), handle.about().block_size);
        let block = u64::from(block_size);
        let since = match lost {
            Some(_) => Bitmap::new(size.div_ceil(block)),
            None => handle.changes_since(&position, &view)?.blocks,
        };
        if status.replica.size < size && lost.is_none() {
            since.set(status.replica.size / block..since.blocks());
        }
        let mut scope = Scope {
            hash: options.hash,
            rate: options.rate,
            keep_going: options.keep_going,
            ..Scope::whole(size, block_size)
        };
        if !options.ranges.is_empty() {
            scope = scope.within(&options.ranges);
            if scope.ranges.is_empty() {
                return Err(SyncError::Refused(format!(
                    "the ranges are beyond the end of {}, which has {}",
                    handle.about().path.display(),
                    device::exact_size(size)
                )));
            }
        }
        let known = lost.is_none() && is_one_moment(&status);
        let to_view = options.repair && options.ranges.is_empty() && !known;
        let lives = handle.lives_to(&view.epoch())?;
        let epoch = position[0].epoch;
        let proof = Proof { handle, options, status, epoch, lost, view, since, scope, to_view, lives };
        if !proof.to_view {
            proof.narrow();
        }
        Ok(proof)
    }

    /// A comparison with a replica that others have changed, and that may be accepted as it was. `None` if a repair is not asked for, or nothing
    /// could be accepted.
    fn of_acceptable(
        handle: &'a Handle,
        status: &StatusReply,
        options: &VerifyOptions,
        looking: &'a VerifyOptions,
    ) -> Result<Option<Proof<'a>>, SyncError> {
        let asked = options.repair && options.ranges.is_empty() && status.wrong_size.is_none();
        let Some(acceptable) = status.acceptable.filter(|_| asked) else { return Ok(None) };
        let proof = Proof::begin(handle, status.clone(), looking)?;
        let known = proof.lost.is_none() && proof.view.len() == status.replica.size;
        let enough = acceptable == Acceptable::Unchanged || proof.since.is_clean();
        Ok(Some(proof).filter(|_| known && enough))
    }

    /// Compares, and has the replica accepted as it was if nothing differs. Otherwise `None`, and the replica says its status anew.
    fn accept(
        &self,
        sender: &Sender,
        receiver: &Receiver,
        name: &str,
        totals: &RunningTotals<'_>,
    ) -> Result<Option<Verified>, SyncError> {
        let mut verified = self.verified(name);
        self.compare(sender, receiver, &mut verified, totals, true)?;
        let unread = verified.unreadable.extents + verified.unreadable_there.extents;
        if verified.differing.extents + unread > 0 {
            return Ok(None);
        }
        StatusReply::hear(receiver)?;
        committed(
            receiver,
            self.epoch,
            Ok(sender.send_json(PLAN, &Plan { accept: true, ..Plan::default() })?),
        )?;
        verified.repaired = true;
        self.tell(sender, &mut verified);
        Ok(Some(verified))
    }

    /// Compares, repairs if requested, and tells the replica what was found. Of one that does not end, `unfinished` is what is known to
    /// differ, in bytes.
    fn conclude(
        &self,
        sender: &Sender,
        receiver: &Receiver,
        name: &str,
        totals: &RunningTotals<'_>,
        unfinished: &mut u64,
    ) -> Result<Verified, SyncError> {
        let mut verified = self.verified(name);
        self.run(sender, receiver, &mut verified, totals).inspect_err(|_| {
            *unfinished = if verified.exact { verified.differing.bytes } else { 0 };
        })?;
        self.tell(sender, &mut verified);
        Ok(verified)
    }

    fn tell(&self, sender: &Sender, verified: &mut Verified) {
        verified.passed_over = self.passes_over(verified);
        if let Some(found) = self.found(verified) {
            // What was found is the result, whether the other side notes it or not.
            let _ = sender.send_json(VERDICT, &found);
        }
    }

    /// What the replica is to be told: how much of it is damaged. `None` if that is not known, because differences may be changes, or because
    /// nothing differs in the part that was looked at.
    fn found(&self, verified: &Verified) -> Option<VerifyFinding> {
        let left = if verified.repaired { 0 } else { verified.differing.bytes };
        let whole = self.options.ranges.is_empty() && verified.unreadable.extents == 0;
        let says = if left > 0 { verified.exact } else { whole };
        says.then(|| VerifyFinding { bytes_differing: left, but_changed: self.passes_over(verified) })
    }

    /// True if blocks that changed since the replica's epoch were not compared: the next sync sends them.
    fn passes_over(&self, verified: &Verified) -> bool {
        !self.to_view && verified.bytes_changed_since > 0
    }

    /// Block size in bytes.
    fn block(&self) -> u64 {
        self.handle.about().block_size.into()
    }

    /// Lets the writers save only what is compared.
    fn narrow(&self) {
        let (needed, block) = (Bitmap::new(self.since.blocks()), self.block());
        for range in &self.scope.ranges {
            needed.set(range.start / block..range.end.div_ceil(block));
        }
        needed.subtract(&self.since);
        self.view.narrow(&needed);
    }

    /// What is known before anything is compared.
    fn verified(&self, name: &str) -> Verified {
        let about = self.handle.about();
        let replica = &self.status.replica;
        let trust = match &self.lost {
            None => "exact".to_owned(),
            Some(why) => format!("differences may be changes: {why}"),
        };
        Verified {
            source: about.path.clone(),
            destination: name.to_owned(),
            epoch: self.epoch.number,
            source_epoch: self.view.epoch().number,
            trust,
            changed: replica.changed.clone(),
            wrong_size: self.status.wrong_size,
            disk_size: self.view.len(),
            block_size: about.block_size,
            bytes_compared: self.scope.bytes(),
            bytes_changed_since: self.scope.ranges.iter().map(|r| marked(&self.since, r, self.block())).sum(),
            differing: ListedExtents::default(),
            unreadable: ListedExtents::default(),
            unreadable_there: ListedExtents::default(),
            repaired: false,
            exact: self.lost.is_none(),
            passed_over: false,
            epoch_after: self.epoch.number,
            bytes_read: 0,
            bytes_sent: 0,
            bytes_received: 0,
            bytes_written: 0,
            seconds: 0.0,
            recovered: replica.recovered.clone(),
            warnings: Vec::new(),
        }
    }

    /// Compares, and repairs if requested.
    fn run(
        &self,
        sender: &Sender,
        receiver: &Receiver,
        verified: &mut Verified,
        totals: &RunningTotals<'_>,
    ) -> Result<(), SyncError> {
        if !self.options.repair {
            return self.compare(sender, receiver, verified, totals, false);
        }
        let at_its_epoch = !self.to_view && self.options.ranges.is_empty();
        let mends = at_its_epoch.then(|| self.passes_over(verified));
        let plan = Plan { compare: Some(self.scope.clone()), delta: true, mends, ..Plan::default() };
        sender.send_json(PLAN, &plan)?;
        let comparison = self.comparison(receiver, totals);
        let to = if self.to_view { self.view.epoch() } else { self.epoch };
        let sent = self.send_repair(sender, &comparison, verified);
        let committed = committed(receiver, to, sent)?;
        if self.to_view {
            let bookmark = bookmark(&verified.destination, &self.status, &self.options.way);
            self.handle.acknowledge(&bookmark, Reached::epoch(committed.epoch))?;
        }
        verified.repaired = true;
        verified.epoch_after = committed.epoch.number;
        verified.bytes_written = committed.bytes_written;
        verified.warnings = committed.warnings.iter().map(|warning| text(warning)).collect();
        Ok(())
    }

    fn comparison<'c>(&'c self, receiver: &'c Receiver, totals: &'c RunningTotals<'c>) -> Comparison<'c> {
        let (disk, view) = (self.view.clone(), Some(&*self.view));
        Comparison { receiver, disk, view, scope: &self.scope, fill: false, totals }
    }

    /// Notes what differs.
    fn compare(
        &self,
        sender: &Sender,
        receiver: &Receiver,
        verified: &mut Verified,
        totals: &RunningTotals<'_>,
        looks_first: bool,
    ) -> Result<(), SyncError> {
        sender
            .send_json(PLAN, &Plan { compare: Some(self.scope.clone()), looks_first, ..Plan::default() })?;
        self.comparison(receiver, totals).run(|finding| {
            note(verified, &finding, &self.since, self.block());
            Ok(())
        })
    }

    fn send_repair(
        &self,
        sender: &Sender,
        comparison: &Comparison<'_>,
        verified: &mut Verified,
    ) -> Result<(), SyncError> {
        let packing = Packing {
            compress: None,
            frames: FrameSize::new(self.options.way.may_be_cut(), self.block()),
            leave_out: false,
        };
        let mut sending = DeltaSender::begin(sender, &self.header(), packing, comparison.totals)?;
        comparison.run(|finding| {
            note(verified, &finding, &self.since, self.block());
            if self.to_view {
                sending.add(&finding)
            } else {
                outside(&finding, &self.since, self.block(), |part| sending.add(&part))
            }
        })?;
        match verified.unreadable.list.first() {
            Some(first) => Err(SyncError::Unverifiable(format!("at byte {}", first.offset))),
            None => sending.end(),
        }
    }

    /// The header of a repair: to the view, or at the replica's own epoch.
    fn header(&self) -> Header {
        let (about, replica) = (self.handle.about(), &self.status.replica);
        let (epoch, size) = match self.to_view {
            true => (self.view.epoch(), self.view.len()),
            false => (self.epoch, replica.size),
        };
        let sizes = (replica.size, size);
        Header {
            binds: Some(replica.nonce),
            partial: !self.to_view,
            // A part proves nothing for the rest.
            fuzzy: !self.to_view && replica.state == State::Fuzzy,
            lives: self.lives.clone(),
            ..Header::new(about.uuid, Method::Compare, vec![epoch], sizes, about.block_size)
        }
    }
}

/// True if a replica was one moment of its source when it was left: what differs from that is damage.
fn is_one_moment(status: &StatusReply) -> bool {
    let replica = &status.replica;
    let whole = status.wrong_size.is_none() && replica.state != State::Fuzzy;
    whole && replica.changed.is_none() && replica.unsure.is_empty()
}

/// Refuses to verify a replica that is missing.
fn missing(
    handle: &Handle,
    name: &str,
    status: &StatusReply,
    options: &VerifyOptions,
) -> Result<(), SyncError> {
    let bookmarks = handle.bookmarks()?;
    let bookmark = bookmark(name, status, &options.way);
    Ok(refuse_vanished(
        (&handle.about().path, name),
        status,
        bookmarks.named(&bookmark).map(|(_, known)| known),
    )?)
}

/// Refuses to compare with another source of the same id, and to repair what has diverged.
fn refuse_sources(
    handle: &Handle,
    name: &str,
    status: &StatusReply,
    options: &VerifyOptions,
) -> Result<(), SyncError> {
    let sync = SyncOptions { way: options.way.clone(), ..SyncOptions::default() };
    let facts = facts(handle, status, name, &sync)?;
    if status.primary.is_none() && !options.repair && !is_older(handle, facts.branch, status) {
        return Ok(());
    }
    note_older(handle, facts.branch, status);
    refuse_diverged(&facts, status, &sync)?;
    refuse_foreign(&facts, status, &sync)?;
    refuse_emptied(&facts, status, &sync)?;
    Ok(refuse_other_content(&facts, &sync)?)
}

/// Refuses what cannot be verified, or not repaired.
fn refuse(
    handle: &Handle,
    status: &StatusReply,
    options: &VerifyOptions,
    lost: Option<&str>,
) -> Result<(), SyncError> {
    if options.repair && !options.ranges.is_empty() {
        let replica = &status.replica;
        // What is mended would be of its epoch, and the rest of another moment.
        let ahead = !replica.unsure.is_empty();
        let ahead = ahead.then_some("some of its blocks may be of another moment than its epoch");
        if let Some(why) = replica.changed.as_deref().or(ahead).or(lost) {
            return Err(SyncError::Refused(format!(
                "a part of {} cannot be repaired alone ({why}): omit --range",
                status.path.display()
            )));
        }
    }
    if handle.live().is_some() {
        return Err(SyncError::Refused(format!(
            "{} is tracked in the kernel, which keeps no view of it for a verify: \"dsync sync --method compare\" compares it with \
             the replica and repairs what differs; or verify after \"dsync track remove\", while the disk is not in use",
            handle.about().path.display()
        )));
    }
    Ok(())
}

impl Verified {
    /// True if the replica differs and was not repaired.
    pub fn differs(&self) -> bool {
        !self.repaired && (self.differing.extents > 0 || self.wrong_size.is_some())
    }
}

/// Why differences may be changes where a repair goes on from an interrupted one.
const INTERRUPTED: &str = "a transfer to it was interrupted";

/// The replica's epoch, if it is whole, or if the rest is repaired.
fn stands(
    handle: &Handle,
    status: &StatusReply,
    options: &VerifyOptions,
) -> Result<KnownPosition, SyncError> {
    let (path, about) = (status.path.display(), handle.about());
    if let Some(other) = status.replica.source.filter(|source| *source != about.uuid) {
        return Err(SyncError::Refused(format!(
            "replica {path} is a copy of another source ({other}), not of {}: give the right source or destination",
            about.path.display()
        )));
    }
    // A sync refuses what others have changed, and leaves it to this.
    let repairs = options.repair && options.ranges.is_empty() && status.replica.changed.is_some();
    match (status.replica.epoch, &status.replica.changed) {
        (Some(epoch), _) if !status.replica.under_way() || repairs => {
            Ok(KnownPosition { epoch, upto: status.replica.size })
        }
        (None, None) if status.replica.source.is_none() => {
            Err(SyncError::Refused(format!("no replica at {path} yet: create it with \"dsync sync\"")))
        }
        (_, None) => {
            Err(SyncError::Refused(format!("replica {path} is incomplete: run \"dsync sync\" first")))
        }
        (epoch, Some(why)) => Err(SyncError::Changed(format!(
            "replica {path} is incomplete, and was modified outside dsync ({why}): {} compares all of it with the source, and \
             overwrites what differs",
            if epoch.is_some() { "\"dsync verify --repair\"" } else { "\"dsync sync --adopt\"" }
        ))),
    }
}

/// Why it is not known what changed since the replica's epoch; `None` if it is.
fn known(
    handle: &Handle,
    position: &[KnownPosition],
    status: &StatusReply,
) -> Result<Option<String>, SyncError> {
    match handle.reaches(position) {
        Ok(()) => Ok(None),
        Err(SourceError::Lost { why, .. }) => Ok(Some(why.to_string())),
        Err(SourceError::Foreign(why)) => Err(SyncError::Refused(format!(
            "replica {} does not fit source {}: {why}",
            status.path.display(),
            handle.about().path.display()
        ))),
        Err(other) => Err(other.into()),
    }
}

/// Bytes of a range whose blocks are marked.
fn marked(marks: &Bitmap, range: &Range<u64>, block: u64) -> u64 {
    let runs = marks.runs_in(range.start / block..range.end.div_ceil(block));
    runs.map(|run| (run.end * block).min(range.end) - (run.start * block).max(range.start)).sum()
}

/// The parts of a range whose blocks are not marked.
fn unmarked(marks: &Bitmap, range: &Range<u64>, block: u64, mut part: impl FnMut(Range<u64>)) {
    let mut at = range.start;
    for run in marks.runs_in(range.start / block..range.end.div_ceil(block)) {
        let (start, end) = ((run.start * block).max(range.start), (run.end * block).min(range.end));
        if start > at {
            part(at..start);
        }
        at = end.max(at);
    }
    if at < range.end {
        part(at..range.end);
    }
}

/// Records a finding, unless the source has changed there since.
fn note(verified: &mut Verified, finding: &Finding<'_>, since: &Bitmap, block: u64) {
    let (range, list) = match finding {
        Finding::Data { offset, data } => (*offset..offset + data.len() as u64, &mut verified.differing),
        Finding::Zero(range) => (range.clone(), &mut verified.differing),
        Finding::Unreadable(range) => (range.clone(), &mut verified.unreadable),
        Finding::UnreadableThere(range) => return verified.unreadable_there.add(range),
        Finding::Between { .. } | Finding::Held(_) | Finding::Upto(..) => return,
    };
    unmarked(since, &range, block, |part| list.add(&part));
}

/// Passes on the parts of a finding where the source has not changed since.
fn outside(
    finding: &Finding<'_>,
    since: &Bitmap,
    block: u64,
    mut hand: impl FnMut(Finding<'_>) -> Result<(), SyncError>,
) -> Result<(), SyncError> {
    let mut result = Ok(());
    match finding {
        Finding::Data { offset, data } => {
            unmarked(since, &(*offset..offset + data.len() as u64), block, |part| {
                let data = &data[(part.start - offset) as usize..(part.end - offset) as usize];
                if result.is_ok() {
                    result = hand(Finding::Data { offset: part.start, data });
                }
            });
        }
        Finding::Zero(range) => unmarked(since, range, block, |part| {
            if result.is_ok() {
                result = hand(Finding::Zero(part));
            }
        }),
        _ => {}
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_since_is_left_out() {
        let marks = Bitmap::new(10);
        marks.set(1..2);
        marks.set(4..6);
        let left = |range: Range<u64>| {
            let mut parts = Vec::new();
            unmarked(&marks, &range, 100, |part| parts.push(part));
            assert_eq!(
                parts.iter().map(|p| p.end - p.start).sum::<u64>() + marked(&marks, &range, 100),
                range.end - range.start
            );
            parts
        };
        assert_eq!(left(0..950), [0..100, 200..400, 600..950]);
        assert_eq!(left(100..200), []);
        assert_eq!(left(400..700), [Range { start: 600, end: 700 }]);
    }
}
