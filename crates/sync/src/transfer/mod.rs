//! Carrying out a plan: sends its delta to the replica's side, and receives the answer.

pub(crate) mod compared;
pub(crate) mod extract;
pub(crate) mod pack;
pub(crate) mod saved;
pub(crate) mod unlike;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use compare::rolling::{BlockIndex, SumParams, SumReport, changes};
use compare::{Finding, Scope};
use delta::{Epoch, Method};
use device::{Buf, Disk};
use link::{Message, Receiver, Sender};
use source::View;
use uuid::Uuid;

use crate::error::{Class, SyncError};
use crate::options::{SyncOptions, Unreadable};
use crate::plan::SyncPlan;
use crate::plan::read::FrameSize;
use crate::report::RunningTotals;
use crate::transfer::compared::{Comparison, while_linked};
use crate::transfer::pack::{DeltaSender, Packing, pack, reading};
use crate::wire::messages::{
    Apart, COMMITTED, CommitReply, FAILED, PLAN, PREPARED, Plan, STATUS, SUMS, StatusReply, expect, next,
    unexpected,
};

/// A conversation with the replica's side, in which plans are carried out.
pub(crate) struct Transfer<'a> {
    pub sender: &'a Sender,
    pub receiver: &'a Receiver,
    /// The replica, as the user named it.
    pub name: &'a str,
    pub options: &'a SyncOptions,
    pub totals: RunningTotals<'a>,
    /// The replica's blocks are copied where they are, so that the order of copies counts.
    pub in_place: bool,
    /// Which member of the group the replica is, and whether its delta waits for the commit of the group. 0 and false if it is in
    /// none.
    pub member: (usize, bool),
    /// A delta of unknown size may be sent twice.
    pub resends: bool,
}

/// The replica's side's answer to a delta.
pub(crate) enum DeltaAnswer {
    Committed(CommitReply),
    /// There was no room before its size was known: it is to be sent again.
    Counted(Box<StatusReply>),
}

impl Transfer<'_> {
    /// Tells the destination since when it goes its own way, and receives what it is once it has given that up.
    pub(crate) fn ask_to_give_up(&self, apart: Apart) -> Result<StatusReply, SyncError> {
        let (give_up, member) = (Some(apart), self.member.0);
        self.sender.send_json(PLAN, &Plan { give_up, member, ..Plan::default() })?;
        StatusReply::hear(self.receiver)
    }

    /// Sends a delta, and waits until it is prepared for the commit of the group. Returns what that has cost so far.
    pub(crate) fn prepare(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<(), SyncError> {
        let sent = self.send(view, plan);
        let prepared = sent.and_then(|()| expect(self.receiver, PREPARED));
        heard(self.receiver, prepared).map(drop)
    }

    /// What is said of every plan.
    fn announced(&self, plan: &SyncPlan) -> Plan {
        let (member, prepare) = self.member;
        let before = plan.before.clone();
        let resends = self.resends && !plan.pass;
        Plan { delta: true, pass: plan.pass, member, prepare, before, resends, ..Plan::default() }
    }

    /// Sends a pass over a live disk, and receives the replica's new status.
    pub(crate) fn pass(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<StatusReply, SyncError> {
        self.send(view, plan)?;
        StatusReply::hear(self.receiver)
    }

    /// Sends a delta, and waits for its commit.
    pub(crate) fn commit(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<DeltaAnswer, SyncError> {
        let answer = self.send(view, plan).and_then(|()| next(self.receiver));
        match heard(self.receiver, answer)? {
            message if message.kind == STATUS && self.resends => {
                StatusReply::of_message(&message, self.receiver).map(Box::new).map(DeltaAnswer::Counted)
            }
            message if message.kind == COMMITTED => {
                of_epoch(&message, view.epoch()).map(DeltaAnswer::Committed)
            }
            message => Err(unexpected(&message)),
        }
    }

    fn send(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<(), SyncError> {
        if let (Method::Tracked, Some(blocks)) = (plan.header.method, plan.wanted.blocks()) {
            view.narrow(&blocks);
        }
        match plan.header.method {
            Method::Tracked | Method::Copy => self.send_wanted(view, plan),
            Method::Compare => self.send_differences(view, plan),
            Method::Rolling => self.send_moved(view, plan),
        }
    }

    fn packing(&self, plan: &SyncPlan) -> Packing {
        Packing::new(self.options, plan.header.block_size)
    }

    /// Sends what the plan wants.
    fn send_wanted(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<(), SyncError> {
        let view = &Arc::new(view.attended(while_linked(self.receiver)));
        let count = plan.wanted.count(&**view).map_err(SyncError::io("look for data in the source"))?;
        self.sender
            .send_json(PLAN, &Plan { bytes: count.bytes, data: count.read, ..self.announced(plan) })?;
        self.totals.expect(count.bytes);
        pack(self.sender, view, plan, self.packing(plan), &self.totals)
    }

    /// Sends what differs from the view.
    fn send_differences(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<(), SyncError> {
        let unreadable = self.options.unreadable;
        let scope = Scope {
            hash: self.options.hash,
            keep_going: unreadable >= Unreadable::SendAnew,
            ..Scope::whole(view.len(), plan.header.block_size)
        };
        let from = plan.left.as_ref().map_or(0, |left| left.from);
        let scope = scope.within(std::slice::from_ref(&(from..view.len())));
        let said = Plan { compare: Some(scope.clone()), ..self.announced(plan) };
        self.sender.send_json(PLAN, &said)?;
        let mut sending = DeltaSender::begin(self.sender, &plan.header, self.packing(plan), &self.totals)?;
        if let Some(left) = &plan.left {
            let attended = Arc::new(view.attended(while_linked(self.receiver)));
            sending.wanted(&left.changed, &attended, self.packing(plan))?;
        }
        let mut told = Told { from, upto: from, at: Instant::now() };
        let fill = self.options.fills() && !plan.pass;
        let comparison = Comparison {
            receiver: self.receiver,
            disk: view.clone(),
            view: Some(view),
            scope: &scope,
            fill,
            totals: &self.totals,
        };
        comparison.run(|finding| match finding {
            Finding::Unreadable(range) if unreadable == Unreadable::LeaveOut => {
                self.totals.left_out(&range);
                sending.unsure(range)
            }
            Finding::Unreadable(range) => Err(SyncError::Unreadable(format!("at byte {}", range.start))),
            Finding::UnreadableThere(range) => {
                self.totals.unreadable_there(&range);
                Ok(())
            }
            Finding::Upto(upto, _) if told.is_due(upto) => sending.flush(),
            other => sending.add(&other),
        })?;
        if plan.pass && sending.end < view.len() {
            let mut block = Buf::new(last_block(view.len(), plan.header.block_size.into()) as usize);
            let offset = view.len() - block.len() as u64;
            view.read_at(offset, &mut block).map_err(SyncError::io("read the source"))?;
            sending.add(&Finding::Data { offset, data: &block })?;
        }
        sending.end()
    }

    /// Sends what makes the replica equal to the view, as copies where the replica has it elsewhere.
    fn send_moved(&self, view: &Arc<View>, plan: &SyncPlan) -> Result<(), SyncError> {
        let view = &Arc::new(view.attended(while_linked(self.receiver)));
        // If the replica claims to be far larger than its source, not all of it is worth the memory.
        let before = plan.header.size_before.min(view.len().saturating_mul(2).max(LEAST_ASKED));
        let keep_going = self.options.unreadable >= Unreadable::SendAnew;
        let params = SumParams { keep_going, ..SumParams::new(view.len().max(before), key()) };
        self.sender.send_json(PLAN, &Plan { rolling: Some(params.clone()), ..self.announced(plan) })?;
        self.totals.expect(params.size + view.len());
        let index = self.hear_sums(&params, before)?;
        let mut sending = DeltaSender::begin(self.sender, &plan.header, self.packing(plan), &self.totals)?;
        // Keeps an error of the link.
        let mut trouble = None;
        let disk: Arc<dyn Disk> = view.clone();
        let found = |change| {
            sending.change(change).map_err(|error| {
                trouble = Some(error);
                io::Error::other("the far side stopped")
            })
        };
        let taken = |upto| {
            view.taken(upto);
            self.totals.progress(params.size + upto);
        };
        let in_place = self.in_place.then_some(self.options.in_place);
        let read = match changes(&disk, &index, in_place, found, taken) {
            Ok(read) => read,
            Err(error) => return Err(trouble.unwrap_or_else(|| reading(error))),
        };
        self.totals.read.fetch_add(read, Relaxed);
        // The last chance to notice that the data read mixes several moments.
        view.verify().map_err(reading)?;
        sending.end()
    }

    /// Receives the sums of the replica's blocks.
    fn hear_sums(&self, params: &SumParams, before: u64) -> Result<BlockIndex, SyncError> {
        let mut index = BlockIndex::new(params.clone(), before).map_err(reading)?;
        while !index.is_whole() {
            let message = expect(self.receiver, SUMS)?;
            let told = message.json::<SumReport>()?;
            index.hear(&told, &message.body).map_err(SyncError::io("use the replica's sums"))?;
            self.totals.progress(index.heard());
        }
        index.unreadable().iter().for_each(|range| self.totals.unreadable_there(range));
        index.finish();
        Ok(index)
    }
}

/// How far the replica was told that a comparison has come: a cut costs one part in 64 of it, as with [`FrameSize`].
struct Told {
    from: u64,
    upto: u64,
    at: Instant,
}

impl Told {
    /// True if it is to be told again, which counts as done then.
    fn is_due(&mut self, upto: u64) -> bool {
        let is_due = (upto - self.upto) * FrameSize::PART >= upto - self.from;
        let is_due = is_due && self.at.elapsed() >= TOLD_AGAIN_AFTER;
        if is_due {
            (self.upto, self.at) = (upto, Instant::now());
        }
        is_due
    }
}

/// The shortest time after which a replica is told again how far a comparison has come.
const TOLD_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A plan, its view, and the replica's status.
pub(crate) struct PreparedSync {
    pub view: Arc<View>,
    pub plan: SyncPlan,
    pub status: StatusReply,
    /// How the first pass over a live disk found its changes; `None` if there was none.
    pub first: Option<(Method, String)>,
    /// How long a file system was frozen, in milliseconds.
    pub freeze_ms: Option<u64>,
}

/// Bytes of a replica that are searched for moved data, however small the source is.
const LEAST_ASKED: u64 = 1 << 30;

/// A random key.
fn key() -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(Uuid::new_v4().as_bytes());
    key[16..].copy_from_slice(Uuid::new_v4().as_bytes());
    key
}

/// Bytes of a disk's last block.
fn last_block(size: u64, block_size: u64) -> u64 {
    if size == 0 { 0 } else { (size - 1) % block_size + 1 }
}

/// The far side's answer to a delta, or to an error here. If the far side gave a reason, that is
/// the error, not the broken link that resulted from it.
pub(crate) fn committed(
    receiver: &Receiver,
    epoch: Epoch,
    sent: Result<(), SyncError>,
) -> Result<CommitReply, SyncError> {
    let committed = sent.and_then(|()| expect(receiver, COMMITTED));
    of_epoch(&heard(receiver, committed)?, epoch)
}

fn of_epoch(message: &Message, epoch: Epoch) -> Result<CommitReply, SyncError> {
    let committed: CommitReply = message.json()?;
    // Only the epoch that was sent may be recorded.
    if committed.epoch != epoch {
        return Err(SyncError::Far {
            message: format!("the far side committed epoch {}, which was not sent", committed.epoch.number),
            class: Class::Failed,
        });
    }
    Ok(committed)
}

/// The far side's reason for a broken link, if it sent one.
pub(crate) fn heard<T>(receiver: &Receiver, result: Result<T, SyncError>) -> Result<T, SyncError> {
    result.map_err(|error| match error {
        error @ SyncError::Link(_) => loop {
            match receiver.recv() {
                Ok(Some(message)) if message.kind == FAILED => return unexpected(&message),
                // Skip earlier messages.
                Ok(Some(_)) => {}
                _ => return error,
            }
        },
        error => error,
    })
}
