//! The queue of direct disks: io_uring.
//!
//! # Why it is sound
//! The kernel reads and writes a request's buffer from the moment its entry is submitted until its completion is taken from
//! the ring. All that time the buffer is in a [`Slot`] of the queue, where its bytes are not touched: a slot's request is
//! taken out only when the last of its operations has completed, and its address was taken before the first was submitted
//! (moving a `Buf` does not move its memory). Dropping the queue waits for operations in flight. If waiting is
//! impossible, or the queue is forgotten, the buffers are never freed, so the kernel may still use them.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::FileDisk;
use crate::disk::{Disk, Done, Pieces, Queue, Request, RequestKind};
use crate::error::at;

/// Longer runs are cut, so that a few large requests keep the disk as busy as many small ones.
const LONGEST: u64 = 1 << 20;
const DEEPEST: u32 = 4096;
/// How long the kernel may take to start a thread.
const LENT_WITHIN: Duration = Duration::from_secs(1);

pub(crate) struct UringQueue {
    ring: IoUring,
    disk: Arc<FileDisk>,
    /// An opening of the file that this queue alone flushes: of what could not be written the kernel tells each opening once, and another queue may
    /// take the answer to its own flush from the ring much later.
    flushed: File,
    /// The most operations in flight.
    depth: usize,
    slots: Vec<Option<Slot>>,
    free_slots: Vec<usize>,
    /// Operations in flight, by the number that the kernel returns.
    flying: Vec<Option<Op>>,
    free: Vec<usize>,
    waiting: VecDeque<Op>,
    done: VecDeque<Done>,
    in_flight: usize,
    /// Everything that waits was meant to start: what takes the place of a completed operation starts by itself.
    started: bool,
    /// The ring failed: the numbers of operations that it may still have cannot be reused.
    dead: bool,
}

/// A request, as long as the kernel may use its buffer.
struct Slot {
    request: Request,
    /// The address of the buffer's bytes.
    memory: *mut u8,
    /// Operations that have not completed.
    left: usize,
    error: Option<io::Error>,
    then_flush: bool,
}

// SAFETY: the pointer leads to the memory of the request's own buffer, which may move between threads.
unsafe impl Send for Slot {}

/// A run of bytes of a request, and where in the buffer it is.
#[derive(Clone, Copy)]
struct Run {
    slot: usize,
    /// Address of the buffer.
    memory: usize,
    offset: u64,
    /// Where its bytes begin in the buffer.
    from: usize,
    len: u64,
}

/// A part of a request, as the kernel knows it.
#[derive(Debug, Clone, Copy)]
struct Op {
    slot: usize,
    act: Act,
    offset: u64,
    /// First byte in the request's buffer.
    at: usize,
    len: u64,
    /// Through the page cache.
    plain: bool,
    /// Let the kernel use a thread, after EAGAIN without one.
    patient: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Read,
    Write { durable: bool },
    Fallocate { mode: i32 },
    Flush,
}

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Lets the kernel start the thread for operations that block; it keeps the last one as long as this thread
/// lives. Where it may not start any (`RLIMIT_NPROC`), it would keep a flush waiting forever.
fn lend_a_thread(ring: &mut IoUring) -> io::Result<()> {
    let nothing = opcode::Nop::new().build().flags(squeue::Flags::ASYNC);
    // SAFETY: it uses no memory.
    unsafe { ring.submission().push(&nothing) }.map_err(io::Error::other)?;
    let limit = types::Timespec::from(LENT_WITHIN);
    let within = types::SubmitArgs::new().timespec(&limit);
    loop {
        match ring.submitter().submit_with_args(1, &within) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            submitted => {
                submitted?;
                break;
            }
        }
    }
    let done = ring.completion().next().filter(|done| done.result() >= 0);
    done.map(drop).ok_or_else(|| io::ErrorKind::WouldBlock.into())
}

impl UringQueue {
    /// A queue over a disk that has a direct descriptor. Fails if io_uring is missing or forbidden.
    pub(crate) fn new(disk: Arc<FileDisk>, depth: u32) -> io::Result<UringQueue> {
        let depth = depth.clamp(1, DEEPEST);
        let mut ring = IoUring::builder().setup_clamp().build(depth.next_power_of_two())?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::Fallocate::CODE, opcode::Fsync::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        lend_a_thread(&mut ring)?;
        let flushed = disk.open_once_more()?;
        let depth = depth as usize;
        Ok(UringQueue {
            ring,
            disk,
            flushed,
            depth,
            slots: Vec::new(),
            free_slots: Vec::new(),
            flying: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::new(),
            done: VecDeque::new(),
            in_flight: 0,
            started: false,
            dead: false,
        })
    }

    /// Operations that the kernel has, or that are in the ring.
    fn under_way(&self) -> usize {
        self.depth - self.free.len()
    }

    /// Cuts a request into operations. What cannot go through the ring is executed here.
    fn cut(&mut self, slot: usize) -> io::Result<()> {
        let Some(held) = self.slots[slot].as_ref() else { return Ok(()) };
        let (kind, memory) = (held.request.kind, held.memory as usize);
        let disk = Arc::clone(&self.disk);
        held.request.check()?;
        if self.dead {
            let text = format!("{}: io_uring has failed: open the disk again", disk.path.display());
            return Err(io::Error::other(text));
        }
        for piece in &held.request.pieces {
            disk.check(name(kind), piece.offset, piece.len)?;
        }
        let asked: u64 = held.request.pieces.iter().map(|piece| piece.len).sum();
        let runs = merge(&held.request.pieces);
        let before = self.waiting.len();
        for (offset, from, len) in runs {
            let run = Run { slot, memory, offset, from, len };
            if let Some(act) = self.act(kind, &run).map_err(|e| at(&disk.path, name(kind), offset, len, e))? {
                self.cut_run(act, &run).map_err(|e| at(&disk.path, name(kind), offset, len, e))?;
            }
        }
        let fua = matches!(
            kind,
            RequestKind::Write { fua: true }
                | RequestKind::Zero { fua: true, .. }
                | RequestKind::Discard { fua: true }
        );
        if kind == RequestKind::Flush {
            let act = Act::Flush;
            self.waiting.push_back(Op { slot, act, offset: 0, at: 0, len: 0, plain: false, patient: false });
        }
        let count = self.waiting.len() - before;
        // One forced write is cheaper than a write and a flush; of many, one flush is, also of those that were executed here.
        let bytes: u64 = self.waiting.range(before..).map(|op| op.len).sum();
        let forced = count == 1 && bytes == asked && matches!(kind, RequestKind::Write { .. });
        let then_flush = fua && !forced;
        if then_flush {
            self.waiting.range_mut(before..).for_each(|op| {
                if let Act::Write { durable } = &mut op.act {
                    *durable = false;
                }
            });
        }
        if let Some(held) = self.slots[slot].as_mut() {
            held.left = count;
            held.then_flush = then_flush;
        }
        Ok(())
    }

    /// The ring's operation for a run; `None` if it was executed here.
    fn act(&self, kind: RequestKind, run: &Run) -> io::Result<Option<Act>> {
        let (disk, Run { offset, len, .. }) = (&self.disk, *run);
        Ok(Some(match kind {
            RequestKind::Read => Act::Read,
            RequestKind::Write { fua } => Act::Write { durable: fua },
            RequestKind::Zero { unmap, fast, .. } => {
                // One that is refused has changed nothing: so the middle first.
                if fast && (disk.is_block() || disk.units(offset, len) != (offset..offset + len)) {
                    disk.zero_raw(offset, len, unmap, fast)?;
                    return Ok(None);
                }
                Act::Fallocate { mode: if unmap { PUNCH } else { ZERO } }
            }
            RequestKind::Discard { .. } => {
                if disk.is_block() {
                    disk.discard_raw(offset, len)?;
                    return Ok(None);
                }
                Act::Fallocate { mode: PUNCH }
            }
            RequestKind::Flush => Act::Flush,
        }))
    }

    /// Cuts a run into operations that the kernel takes. What is not aligned is executed here.
    fn cut_run(&mut self, act: Act, run: &Run) -> io::Result<()> {
        let Run { slot, memory, offset, from, len } = *run;
        let whole = self.disk.units(offset, len);
        let at = from + (whole.start - offset) as usize;
        let op = |range: Range<u64>| Op {
            slot,
            act,
            offset: range.start,
            at: from + (range.start - offset) as usize,
            len: range.end - range.start,
            plain: false,
            patient: false,
        };
        let is_data = !matches!(act, Act::Fallocate { .. });
        if is_data && !self.disk.fits(whole.start, memory + at, whole.end - whole.start) {
            return self.by_hand(slot, act, offset, from, len);
        }
        self.by_hand(slot, act, offset, from, whole.start - offset)?;
        if is_data {
            self.waiting.extend(steps(whole.clone()).map(op));
        } else if !whole.is_empty() {
            self.waiting.push_back(op(whole.clone()));
        }
        let done = (whole.end - offset) as usize;
        self.by_hand(slot, act, whole.end, from + done, len - done as u64)
    }

    /// Waits for this queue's operations in flight in the units of which a request writes parts: read, changed and written whole, such a unit
    /// would lose what is written meanwhile.
    fn let_finish(&mut self, request: &Request) {
        if !matches!(request.kind, RequestKind::Write { .. } | RequestKind::Zero { .. }) {
            return;
        }
        for piece in &request.pieces {
            let (offset, len) = (piece.offset, piece.len);
            if offset.checked_add(len).is_none_or(|end| end > self.disk.len())
                || self.disk.units(offset, len) == (offset..offset + len)
            {
                continue;
            }
            let around = self.disk.around(offset, len);
            let there = |op: &Op| op.offset < around.end && around.start < op.offset + op.len;
            while self.flying.iter().flatten().chain(&self.waiting).any(there) {
                self.fill();
                self.enter(1);
                self.reap();
            }
        }
    }

    /// Executes what the ring does not take: other than whole units, or with memory that is not aligned.
    fn by_hand(&mut self, slot: usize, act: Act, offset: u64, from: usize, len: u64) -> io::Result<()> {
        let Some(held) = self.slots[slot].as_mut().filter(|_| len > 0) else { return Ok(()) };
        if matches!(act, Act::Fallocate { .. }) {
            // Less than a unit need not be discarded.
            let zeroes = matches!(held.request.kind, RequestKind::Zero { .. });
            return if zeroes { self.disk.write_zeroes(offset, len) } else { Ok(()) };
        }
        // No operation uses this part of the buffer, but others may use the rest: so a slice of this part alone.
        // SAFETY: `check` has found the part within the buffer, which the slot owns; no entry of this part is submitted.
        let part = unsafe { std::slice::from_raw_parts_mut(held.memory.add(from), len as usize) };
        if act == Act::Read { self.disk.read_raw(offset, part) } else { self.disk.write_raw(offset, part) }
    }

    /// Puts waiting operations into the ring as far as the depth allows.
    fn fill(&mut self) {
        while let (Some(op), Some(&number)) = (self.waiting.front().copied(), self.free.last()) {
            let Some(held) = self.slots[op.slot].as_ref() else {
                self.waiting.pop_front();
                continue;
            };
            let entry = self.entry(&op, held).user_data(number as u64);
            let entry = if op.patient { entry.flags(squeue::Flags::ASYNC) } else { entry };
            // SAFETY: the entry's memory is that of a slot's buffer and stays until the completion is taken (see above);
            // its descriptor is open as long as `self.disk`, or this queue.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                // The ring has as many entries as operations, so this never fails; the next round would try again.
                return;
            }
            self.waiting.pop_front();
            self.free.pop();
            self.flying[number] = Some(op);
        }
    }

    fn entry(&self, op: &Op, held: &Slot) -> squeue::Entry {
        let file = match op.act {
            Act::Flush => &self.flushed,
            Act::Fallocate { .. } => &self.disk.plain,
            _ if op.plain => &self.disk.plain,
            _ => self.disk.direct().unwrap_or(&self.disk.plain),
        };
        let file = types::Fd(file.as_raw_fd());
        // Stays within the buffer: `check` has compared its length with the pieces'.
        let memory = held.memory.wrapping_add(op.at);
        match op.act {
            Act::Read => opcode::Read::new(file, memory, op.len as u32).offset(op.offset).build(),
            Act::Write { durable } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                opcode::Write::new(file, memory, op.len as u32).offset(op.offset).rw_flags(flags).build()
            }
            Act::Fallocate { mode } => {
                opcode::Fallocate::new(file, op.len).offset(op.offset).mode(mode).build()
            }
            Act::Flush => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        }
    }

    /// Submits what is in the ring, and waits for `want` completions.
    fn enter(&mut self, want: usize) {
        loop {
            match self.ring.submit_and_wait(want) {
                Ok(_) => return,
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The kernel is short of memory, or wants completions taken first.
                    Some(libc::EAGAIN | libc::EBUSY) => {
                        self.reap();
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        // What was taken does not come again: how many are worth waiting for is another number now.
                        if want > 0 {
                            return;
                        }
                    }
                    _ => return self.give_up(&e),
                },
            }
        }
    }

    /// The ring does not work any more. Its operations fail, and their buffers stay in place for the kernel.
    fn give_up(&mut self, error: &io::Error) {
        self.dead = true;
        self.waiting.clear();
        let lost: Vec<Slot> = self.slots.iter_mut().filter_map(Option::take).collect();
        for mut slot in lost {
            std::mem::forget(std::mem::take(&mut slot.request.buf));
            let result =
                Err(io::Error::new(error.kind(), format!("{}: io_uring: {error}", self.disk.path.display())));
            self.done.push_back(Done { request: slot.request, result });
        }
        self.flying.iter_mut().for_each(|op| *op = None);
        self.free = (0..self.depth).rev().collect();
    }

    /// Takes the completions that are there.
    fn reap(&mut self) {
        loop {
            let Some(entry) = self.ring.completion().next() else { return };
            let number = entry.user_data() as usize;
            let Some(op) = self.flying.get_mut(number).and_then(Option::take) else { continue };
            self.free.push(number);
            self.completed(op, entry.result());
        }
    }

    fn completed(&mut self, op: Op, result: i32) {
        let Some(kind) = self.slots[op.slot].as_ref().map(|held| held.request.kind) else { return };
        let outcome = match (op.act, result) {
            (_, error) if [-libc::EINTR, -libc::EAGAIN, -libc::ECANCELED].contains(&error) => {
                return self.again(Op { patient: true, ..op });
            }
            // Refused for its alignment: use the page cache.
            (Act::Read | Act::Write { .. }, error)
                if error == -libc::EINVAL && !op.plain && !self.disk.is_block() =>
            {
                return self.again(Op { plain: true, ..op });
            }
            (Act::Fallocate { .. }, error) if error == -libc::EOPNOTSUPP || error == -libc::ENOSYS => {
                match kind {
                    RequestKind::Zero { unmap, fast, .. } => {
                        self.disk.zero_raw(op.offset, op.len, unmap, fast)
                    }
                    _ => Ok(()),
                }
            }
            (_, error) if error < 0 => Err(io::Error::from_raw_os_error(-error)),
            (Act::Fallocate { .. } | Act::Flush, _) => Ok(()),
            (Act::Read, 0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the disk became smaller")),
            (Act::Write { .. }, 0) => Err(io::ErrorKind::WriteZero.into()),
            (Act::Read | Act::Write { .. }, count) if (count as u64) < op.len => {
                let count = u64::from(count.unsigned_abs());
                let (offset, from, len) = (op.offset + count, op.at + count as usize, op.len - count);
                let memory = self.slots[op.slot].as_ref().map_or(0, |held| held.memory as usize);
                if op.plain || self.disk.fits(offset, memory + from, len) {
                    return self.again(Op { offset, at: from, len, ..op });
                }
                self.by_hand(op.slot, op.act, offset, from, len)
            }
            _ => Ok(()),
        };
        let outcome = match op.act {
            Act::Flush => self.disk.flushed(outcome),
            Act::Write { durable: true } => self.disk.forced(outcome),
            _ => outcome,
        };
        let Some(held) = self.slots[op.slot].as_mut() else { return };
        if let Err(e) = outcome {
            held.error.get_or_insert_with(|| at(&self.disk.path, name(kind), op.offset, op.len, e));
        }
        held.left -= 1;
        if held.left == 0 {
            self.finish(op.slot);
        }
    }

    /// Queued first: its request is older.
    fn again(&mut self, op: Op) {
        self.waiting.push_front(op);
    }

    /// The last operation of a request has completed.
    fn finish(&mut self, slot: usize) {
        let Some(held) = self.slots[slot].as_mut() else { return };
        if held.error.is_none() && std::mem::take(&mut held.then_flush) {
            held.left = 1;
            let act = Act::Flush;
            self.waiting.push_back(Op { slot, act, offset: 0, at: 0, len: 0, plain: false, patient: false });
            return;
        }
        if let Some(held) = self.slots[slot].take() {
            self.free_slots.push(slot);
            let result = held.error.map_or(Ok(()), Err);
            self.done.push_back(Done { request: held.request, result });
        }
    }

    /// Completions without which no request can be done: waiting for fewer would only wake in vain.
    fn worth_waiting(&self) -> usize {
        let least = self.slots.iter().flatten().map(|held| held.left).min().unwrap_or(1);
        // With more to start, the disk must not become idle meanwhile.
        let most = if self.waiting.is_empty() { self.depth } else { self.depth.div_ceil(4) };
        least.min(most).clamp(1, self.under_way().max(1))
    }
}

impl Queue for UringQueue {
    fn submit(&mut self, mut request: Request) {
        self.let_finish(&request);
        let memory = request.buf.memory();
        let held = Slot { request, memory, left: 0, error: None, then_flush: false };
        let slot = self.free_slots.pop().unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[slot] = Some(held);
        self.in_flight += 1;
        self.started = false;
        let before = self.waiting.len();
        if let Err(error) = self.cut(slot) {
            // None of its operations has been started yet.
            self.waiting.truncate(before);
            if let Some(held) = self.slots[slot].as_mut() {
                (held.left, held.then_flush, held.error) = (0, false, Some(error));
            }
        }
        if self.slots[slot].as_ref().is_some_and(|held| held.left == 0) {
            self.finish(slot);
        }
        self.fill();
    }

    fn start(&mut self) {
        self.started = true;
        self.fill();
        if !self.ring.submission().is_empty() {
            self.enter(0);
        }
    }

    fn complete(&mut self, wait: bool) -> Option<Done> {
        loop {
            if self.done.is_empty() {
                self.reap();
                self.fill();
            }
            if let Some(done) = self.done.pop_front() {
                self.in_flight -= 1;
                return Some(done);
            }
            if self.under_way() == 0 && self.waiting.is_empty() {
                return None;
            }
            if !wait {
                if self.started {
                    self.start();
                }
                // A kernel that takes nothing more in had its completions taken first: a poll would not report them.
                if self.done.is_empty() {
                    return None;
                }
                continue;
            }
            self.started = true;
            let want = self.worth_waiting();
            self.enter(want);
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.as_fd())
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        // What was not started is discarded; what was, uses the buffers until it has completed.
        self.waiting.clear();
        while self.under_way() > 0 {
            let want = self.under_way();
            self.enter(want);
            self.reap();
            self.waiting.clear();
        }
    }
}

fn name(kind: RequestKind) -> &'static str {
    match kind {
        RequestKind::Read => "read",
        RequestKind::Write { .. } => "write",
        RequestKind::Zero { .. } => "zeroing",
        RequestKind::Discard { .. } => "discard",
        RequestKind::Flush => "flush",
    }
}

/// The runs of adjacent pieces: offset, first byte in the buffer, length.
fn merge(pieces: &Pieces) -> Vec<(u64, usize, u64)> {
    let mut runs: Vec<(u64, usize, u64)> = Vec::with_capacity(pieces.len());
    let mut from = 0;
    for piece in pieces.iter().filter(|piece| piece.len > 0) {
        match runs.last_mut() {
            Some((offset, _, len)) if *offset + *len == piece.offset => *len += piece.len,
            _ => runs.push((piece.offset, from, piece.len)),
        }
        from += piece.len as usize;
    }
    runs
}

/// A range in steps of at most [`LONGEST`].
fn steps(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let start = at;
        at = range.end.min(at + LONGEST);
        (start < range.end).then_some(start..at)
    })
}
