//! Transmission: one connection's requests, from the socket to the disk and back.
//!
//! One thread does it all. It takes in all that has arrived, hands it to the disk's queue, and sends the replies together
//! when there is nothing more to take in. Large reads and writes go in parts of [`CHUNK`], so that the client, the socket
//! and the disk work at the same time and memory stays bounded.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use device::{Buf, Done, Piece, Queue, Request, RequestKind};
use rustix::event::{PollFd, PollFlags};
use smallvec::smallvec;

use crate::context::{Context, tidy};
use crate::export::Export;
use crate::handshake::Negotiated;
use crate::output::Replies;
use crate::pool::Pool;
use crate::protocol::*;
use crate::socket::{Disconnected, SocketRead, Stream, wait};

/// Bytes taken from the socket in one step.
const INPUT: usize = 256 << 10;
/// Requests above this go to the disk in parts that end at multiples of it.
pub(crate) const CHUNK: usize = 1 << 20;
/// Writes above this are received straight into their buffer, without a look at what follows them.
const LARGE: usize = 32 << 10;
/// Bytes of buffers in use beyond which no further request is taken in.
const HELD: usize = 8 << 20;
/// Bytes of replies that are worth a separate call.
const SEND: usize = 128 << 10;
/// The most replies to hold back: the client can use them while the next are made.
const BATCH: usize = 16;
/// Runs in one block status reply.
const RUNS: usize = 16 << 10;
/// Payload that is read and thrown away to get at the next request. A client that sends more in one is cut off.
const SKIP: u32 = 64 << 20;
/// How long requests are taken in after the server was told to end. Those that had arrived are done long before; this is
/// for a client that never stops sending.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves one connection until it ends. All that was submitted has completed when this returns.
pub(crate) fn run(stream: &Stream, negotiated: Negotiated, closing: &AtomicBool) {
    let mut transmission = Transmission::new(stream, negotiated, closing);
    // Disconnected: there is no one to report to.
    let _ = transmission.serve();
    // The disk must be done with this connection's requests before its end is reported.
    while transmission.queue.in_flight() > 0 && transmission.queue.complete(true).is_some() {}
}

/// What the next bytes from the client are.
enum Step {
    /// The head of a request.
    Head,
    /// Payload of a write: `left` bytes for `offset` and on, including the current part.
    Payload { slot: usize, offset: u64, left: usize, part: Option<PayloadBuf>, large: bool },
    /// Payload of a refused write.
    Skip { left: usize, cookie: u64, failure: Failure },
    /// None: the parts of a read are still to be submitted.
    Read { slot: usize, offset: u64, left: usize },
    /// None: the client is done.
    End,
}

struct PayloadBuf {
    buf: Buf,
    filled: usize,
}

/// Why taking in stopped.
#[derive(PartialEq, Eq)]
enum Stop {
    /// There is no more input.
    Dry,
    /// The disk has enough to do, or the buffers are used up.
    Full,
    /// The client is through.
    End,
}

/// An error, as sent to the client.
struct Failure {
    code: u32,
    message: String,
}

/// A request whose parts are in flight.
#[derive(Default)]
struct Slot {
    header: RequestHeader,
    /// Parts submitted and not completed.
    parts: u32,
    /// No more parts follow.
    sealed: bool,
    /// A flush is due when all parts have completed.
    flush: bool,
    /// The data goes out in one piece, when all is there.
    whole: bool,
    collected: Vec<(u64, Buf)>,
    failure: Option<Failure>,
}

/// Requests whose parts are in flight, by the number in the parts' tokens.
#[derive(Default)]
struct Slots {
    all: Vec<Slot>,
    free: Vec<usize>,
}

impl Slots {
    fn open(&mut self, header: &RequestHeader) -> usize {
        let index = self.free.pop().unwrap_or(self.all.len());
        self.all.resize_with(self.all.len().max(index + 1), Slot::default);
        self.all[index] = Slot { header: *header, ..Slot::default() };
        index
    }
}

/// Bytes received and not yet taken in.
struct Input {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last write was large: receive no further than the next head.
    shy: bool,
}

impl Input {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }
}

struct Transmission<'a> {
    stream: &'a Stream,
    closing: &'a AtomicBool,
    queue: Box<dyn Queue>,
    /// The queue cannot be waited for together with the socket: most likely it is done when `submit` returns.
    prompt: bool,
    depth: usize,

    input: Input,
    step: Step,
    slots: Slots,
    pool: Pool,
    output: Replies,
    /// When to take in no more. Set once the server was told to end.
    last_words: Option<Instant>,

    size: u64,
    structured: bool,
    contexts: Vec<Arc<dyn Context>>,
    /// Last, as its guard outlives the queue.
    export: Export,
}

impl<'a> Transmission<'a> {
    fn new(stream: &'a Stream, negotiated: Negotiated, closing: &'a AtomicBool) -> Transmission<'a> {
        let Negotiated { export, size, structured, contexts, queue } = negotiated;
        Transmission {
            stream,
            closing,
            prompt: queue.wait_fd().is_none(),
            depth: export.queue_depth.max(1) as usize,
            queue,
            input: Input { bytes: vec![0; INPUT].into_boxed_slice(), start: 0, end: 0, shy: false },
            step: Step::Head,
            slots: Slots::default(),
            pool: Pool::new(),
            output: Replies::new(),
            last_words: None,
            size,
            structured,
            contexts,
            export,
        }
    }

    fn serve(&mut self) -> Result<(), Disconnected> {
        loop {
            let stop = self.take_in()?;
            self.queue.start();
            self.collect(false);
            if stop == Stop::Full && self.has_room() {
                continue;
            }
            self.flush()?;
            match stop {
                Stop::Full if self.has_room() => {}
                Stop::Full => self.collect(true),
                Stop::End if self.queue.in_flight() == 0 => return Ok(()),
                Stop::End => self.collect(true),
                Stop::Dry => self.await_more(),
            }
        }
    }

    /// Waits for input or for a completion.
    fn await_more(&mut self) {
        if self.closing.load(Ordering::Relaxed) {
            let until = *self.last_words.get_or_insert_with(|| Instant::now() + LAST_WORDS);
            if Instant::now() >= until {
                self.step = Step::End;
                return;
            }
        }
        if self.queue.in_flight() == 0 {
            self.receive(true);
        } else if let Some(fd) = self.queue.wait_fd() {
            let mut fds =
                [PollFd::new(self.stream, PollFlags::IN), PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            let polled = wait(&mut fds, None);
            let input = !fds[0].revents().is_empty();
            if polled.is_err() {
                self.collect(true);
            } else {
                if input {
                    self.receive(false);
                }
                self.collect(false);
            }
        } else if !self.receive(false) {
            self.collect(true);
        }
    }

    /// Takes bytes from the socket; false if there are none.
    fn receive(&mut self, wait: bool) -> bool {
        // What is left is less than a head: all else is taken in as soon as it is there.
        let input = &mut self.input;
        input.bytes.copy_within(input.start..input.end, 0);
        (input.start, input.end) = (0, input.end - input.start);
        let (direct, limit) = match &mut self.step {
            Step::Payload { left, part: Some(part), large, .. } => {
                let limit = match part.buf.len() == *left {
                    false => 0,
                    true if *large => RequestHeader::LEN,
                    true => INPUT,
                };
                (&mut part.buf[part.filled..], limit)
            }
            Step::Head if input.shy => (&mut [][..], RequestHeader::LEN),
            _ => (&mut [][..], INPUT),
        };
        let room = direct.len();
        let received = self.stream.receive(direct, &mut input.bytes[input.end..limit.max(input.end)], wait);
        match received {
            SocketRead::Bytes(got) => {
                if let Step::Payload { part: Some(part), .. } = &mut self.step {
                    part.filled += got.min(room);
                }
                self.input.end += got.saturating_sub(room);
            }
            SocketRead::Nothing => return false,
            // A truncated request gets no answer: its sender is gone.
            SocketRead::End => self.step = Step::End,
        }
        true
    }

    /// Takes in what has been received.
    fn take_in(&mut self) -> Result<Stop, Disconnected> {
        loop {
            match &mut self.step {
                Step::Head => {
                    if !self.has_room() {
                        return Ok(Stop::Full);
                    }
                    let Some(head) = self.input.rest().first_chunk() else {
                        return Ok(Stop::Dry);
                    };
                    // Without the magic number the start of the next request is not known.
                    let header = RequestHeader::decode(head);
                    self.input.start += RequestHeader::LEN;
                    match header {
                        Some(header) if header.command != CMD_DISC => self.begin(header),
                        _ => self.step = Step::End,
                    }
                }
                Step::Payload { offset, left, part, .. } => {
                    if part.is_none() {
                        let len = part_len(*offset, *left);
                        if !self.has_room() {
                            return Ok(Stop::Full);
                        }
                        let buf = self.pool.take(len);
                        if let Step::Payload { part, .. } = &mut self.step {
                            *part = Some(PayloadBuf { buf, filled: 0 });
                        }
                    }
                    if !self.fill() {
                        return Ok(Stop::Dry);
                    }
                }
                Step::Skip { left, .. } => {
                    let step = self.input.rest().len().min(*left);
                    self.input.start += step;
                    *left -= step;
                    if *left > 0 {
                        return Ok(Stop::Dry);
                    }
                    if let Step::Skip { cookie, failure, .. } = std::mem::replace(&mut self.step, Step::Head)
                    {
                        self.fail(cookie, failure);
                    }
                }
                Step::Read { slot, offset, left } => {
                    let (slot, at, len) = (*slot, *offset, part_len(*offset, *left));
                    let whole = self.slots.all[slot].whole;
                    if !(self.has_room() || whole && self.queue.in_flight() < self.depth) {
                        return Ok(Stop::Full);
                    }
                    if let Step::Read { offset, left, .. } = &mut self.step {
                        *offset += len as u64;
                        *left -= len;
                        if *left == 0 {
                            self.step = Step::Head;
                            self.slots.all[slot].sealed = true;
                        }
                    }
                    let buf = self.pool.take(len);
                    self.submit(slot, RequestKind::Read, at, len as u64, buf);
                }
                Step::End => return Ok(Stop::End),
            }
            if self.prompt {
                self.collect(false);
            }
            if self.output.replies() >= BATCH || self.output.bytes() >= SEND {
                self.flush()?;
            }
        }
    }

    fn has_room(&self) -> bool {
        let busy = self.queue.in_flight();
        busy < self.depth && (self.pool.held() < HELD || (busy == 0 && self.output.bytes() == 0))
    }

    /// Begins a request whose head was taken in.
    fn begin(&mut self, header: RequestHeader) {
        self.input.shy = header.command == CMD_WRITE && header.len as usize > LARGE;
        if let Err(failure) = self.check(&header) {
            self.step = match header.command {
                CMD_WRITE if header.len > SKIP => Step::End,
                CMD_WRITE => Step::Skip { left: header.len as usize, cookie: header.cookie, failure },
                _ => return self.fail(header.cookie, failure),
            };
            return;
        }
        let fua = header.flags & CMD_FLAG_FUA != 0;
        let (offset, len) = (header.offset, header.len as usize);
        let kind = match header.command {
            CMD_BLOCK_STATUS => return self.block_status(&header),
            CMD_CACHE => {
                return match self.export.disk.prefetch(offset, header.len.into()) {
                    Ok(()) => self.output.simple(header.cookie, 0),
                    Err(error) => self.fail(header.cookie, failure_of(&error, &header)),
                };
            }
            CMD_FLUSH => RequestKind::Flush,
            _ if len == 0 => {
                return match header.command == CMD_READ && self.structured {
                    true => self.output.chunk(header.cookie, CHUNK_NONE, true, 0),
                    false => self.output.simple(header.cookie, 0),
                };
            }
            CMD_READ => {
                let slot = self.slots.open(&header);
                self.slots.all[slot].whole = !self.structured || header.flags & CMD_FLAG_DF != 0;
                self.step = Step::Read { slot, offset, left: len };
                return;
            }
            CMD_WRITE => {
                let slot = self.slots.open(&header);
                self.slots.all[slot].flush = fua && len > CHUNK;
                self.step = Step::Payload { slot, offset, left: len, part: None, large: len > LARGE };
                return;
            }
            CMD_TRIM => RequestKind::Discard { fua },
            _ => {
                let unmap = header.flags & CMD_FLAG_NO_HOLE == 0;
                RequestKind::Zero { unmap, fast: header.flags & CMD_FLAG_FAST_ZERO != 0, fua }
            }
        };
        let slot = self.slots.open(&header);
        self.slots.all[slot].sealed = true;
        self.submit(slot, kind, offset, header.len.into(), Buf::default());
    }

    /// Adds received payload to the current part, and submits the part when it is full. False if it is not.
    fn fill(&mut self) -> bool {
        let Step::Payload { slot, offset, left, part: under_way, .. } = &mut self.step else { return true };
        let Some(part) = under_way else { return true };
        let ready = self.input.rest().len().min(part.buf.len() - part.filled);
        part.buf[part.filled..part.filled + ready].copy_from_slice(&self.input.rest()[..ready]);
        part.filled += ready;
        self.input.start += ready;
        if part.filled < part.buf.len() {
            return false;
        }
        let (slot, at) = (*slot, *offset);
        let buf = under_way.take().map(|part| part.buf).unwrap_or_default();
        *offset += buf.len() as u64;
        *left -= buf.len();
        if *left == 0 {
            self.step = Step::Head;
            self.slots.all[slot].sealed = true;
        }
        let header = &self.slots.all[slot].header;
        let fua = header.flags & CMD_FLAG_FUA != 0 && !self.slots.all[slot].flush;
        let len = buf.len() as u64;
        self.submit(slot, RequestKind::Write { fua }, at, len, buf);
        true
    }

    /// Validates a request by itself.
    fn check(&self, header: &RequestHeader) -> Result<(), Failure> {
        let RequestHeader { command, flags, offset, len, .. } = *header;
        let refuse = |code, message: String| Err(Failure { code, message });
        let (name, allowed, modifies) = match command {
            CMD_READ => ("read", if self.structured { CMD_FLAG_DF } else { 0 }, false),
            CMD_WRITE => ("write", 0, true),
            CMD_FLUSH => ("flush", 0, false),
            CMD_TRIM => ("trim", 0, true),
            CMD_CACHE => ("cache", 0, false),
            CMD_WRITE_ZEROES if self.export.fast_zero => {
                ("write zeroes", CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO, true)
            }
            CMD_WRITE_ZEROES => ("write zeroes", CMD_FLAG_NO_HOLE, true),
            CMD_BLOCK_STATUS => ("block status", CMD_FLAG_REQ_ONE, false),
            _ => return refuse(EINVAL, format!("unknown command {command}")),
        };
        // The protocol document requires FUA to be accepted with every command, whether it means something there or not.
        let unknown = flags & !(allowed | CMD_FLAG_FUA);
        if unknown != 0 {
            return refuse(EINVAL, format!("{name} has no flags {unknown:#x} on this connection"));
        }
        if modifies && self.export.read_only {
            return refuse(EPERM, format!("{name}: export {} is read-only", self.export.name));
        }
        if command == CMD_FLUSH {
            return match (offset, len) {
                (0, 0) => Ok(()),
                _ => refuse(EINVAL, "a flush has neither offset nor length".into()),
            };
        }
        if command == CMD_BLOCK_STATUS && (self.contexts.is_empty() || len == 0) {
            return refuse(EINVAL, "block status needs a negotiated context and a length".into());
        }
        let block = self.export.block;
        if matches!(command, CMD_READ | CMD_WRITE) && len > block.max {
            return refuse(
                EINVAL,
                format!("{name} of {len} bytes: at most {} bytes fit into one request", block.max),
            );
        }
        if offset.checked_add(len.into()).is_none_or(|end| end > self.size) {
            let code = if matches!(command, CMD_WRITE | CMD_WRITE_ZEROES) { ENOSPC } else { EINVAL };
            let size = self.size;
            return refuse(code, format!("{name} of {len} bytes at {offset} is beyond the end at {size}"));
        }
        if (offset | u64::from(len)) & u64::from(block.min - 1) != 0 {
            let min = block.min;
            return refuse(
                EINVAL,
                format!("{name} of {len} bytes at {offset}: not a multiple of {min} bytes"),
            );
        }
        Ok(())
    }

    fn submit(&mut self, slot: usize, kind: RequestKind, offset: u64, len: u64, buf: Buf) {
        self.slots.all[slot].parts += 1;
        let pieces = if kind == RequestKind::Flush { smallvec![] } else { smallvec![Piece { offset, len }] };
        self.queue.submit(Request { kind, pieces, buf, token: slot as u64 });
    }

    /// Takes all completions that are there; waits for the first one if `wait` is set.
    fn collect(&mut self, mut wait: bool) {
        while let Some(done) = self.queue.complete(wait) {
            wait = false;
            self.completed(done);
        }
    }

    fn completed(&mut self, done: Done) {
        let Request { pieces, buf, token, .. } = done.request;
        let index = token as usize;
        let slot = &mut self.slots.all[index];
        slot.parts -= 1;
        if let Err(error) = done.result {
            slot.failure.get_or_insert_with(|| failure_of(&error, &slot.header));
        }
        let last = slot.sealed && slot.parts == 0;
        let offset = pieces.first().map_or(0, |piece| piece.offset);
        if slot.header.command != CMD_READ || slot.failure.is_some() {
            self.pool.give(buf);
            if last {
                self.finish(index);
            }
        } else if slot.whole {
            if slot.collected.is_empty() && last {
                // The common case, without an allocation.
                self.data_head(index);
                self.output.add_data(buf);
                self.slots.free.push(index);
            } else {
                slot.collected.push((offset, buf));
                if last {
                    self.finish(index);
                }
            }
        } else {
            let cookie = slot.header.cookie;
            if is_zero(&buf) {
                self.output.chunk(cookie, CHUNK_OFFSET_HOLE, last, 12);
                self.output.add(&offset.to_be_bytes());
                self.output.add(&(buf.len() as u32).to_be_bytes());
                self.pool.give(buf);
            } else {
                self.output.chunk(cookie, CHUNK_OFFSET_DATA, last, buf.len() as u32 + 8);
                self.output.add(&offset.to_be_bytes());
                self.output.add_data(buf);
            }
            if last {
                self.slots.free.push(index);
            }
        }
    }

    /// Answers a request whose parts have all completed; streamed reads have been answered part by part.
    fn finish(&mut self, index: usize) {
        let slot = &mut self.slots.all[index];
        let cookie = slot.header.cookie;
        let mut collected = std::mem::take(&mut slot.collected);
        if let Some(failure) = slot.failure.take() {
            collected.into_iter().for_each(|(_, buf)| self.pool.give(buf));
            self.fail(cookie, failure);
        } else if std::mem::take(&mut slot.flush) {
            self.submit(index, RequestKind::Flush, 0, 0, Buf::default());
            // Here, as what completes is collected in many places, and the queue is polled after most of them.
            return self.queue.start();
        } else if slot.header.command == CMD_READ {
            collected.sort_unstable_by_key(|(offset, _)| *offset);
            self.data_head(index);
            collected.into_iter().for_each(|(_, buf)| self.output.add_data(buf));
        } else {
            self.output.simple(cookie, 0);
        }
        self.slots.free.push(index);
    }

    /// The head of a read's answer whose data comes in one piece.
    fn data_head(&mut self, index: usize) {
        let RequestHeader { cookie, offset, len, .. } = self.slots.all[index].header;
        if self.structured {
            self.output.chunk(cookie, CHUNK_OFFSET_DATA, true, len + 8);
            self.output.add(&offset.to_be_bytes());
        } else {
            self.output.simple(cookie, 0);
        }
    }

    fn fail(&mut self, cookie: u64, failure: Failure) {
        let Failure { code, message } = failure;
        if !self.structured {
            return self.output.simple(cookie, code);
        }
        let message = clip(&message).as_bytes();
        let len = message.len() as u16;
        self.output.chunk(cookie, CHUNK_ERROR, true, u32::from(len) + 6);
        self.output.add(&code.to_be_bytes());
        self.output.add(&len.to_be_bytes());
        self.output.add(message);
    }

    fn block_status(&mut self, header: &RequestHeader) {
        let limit = if header.flags & CMD_FLAG_REQ_ONE != 0 { 1 } else { RUNS };
        let mut answers = Vec::with_capacity(self.contexts.len());
        for context in &self.contexts {
            let runs = context.status(header.offset, header.len.into(), limit).and_then(|runs| {
                tidy(&runs, header.len, limit)
                    .ok_or_else(|| io::Error::other(format!("{} gave an invalid answer", context.name())))
            });
            match runs {
                Ok(runs) => answers.push(runs),
                Err(error) => return self.fail(header.cookie, failure_of(&error, header)),
            }
        }
        let count = answers.len();
        for (id, runs) in answers.iter().enumerate() {
            self.output.chunk(header.cookie, CHUNK_BLOCK_STATUS, id + 1 == count, 4 + 8 * runs.len() as u32);
            self.output.add(&(id as u32).to_be_bytes());
            for (len, flags) in runs {
                self.output.add(&len.to_be_bytes());
                self.output.add(&flags.to_be_bytes());
            }
        }
    }

    /// Sends what there is. A client that does not take its replies must not make others wait: a disk that counts
    /// its writes waits for each to be collected, so this collects them before it waits for the client.
    fn flush(&mut self) -> Result<(), Disconnected> {
        loop {
            let mut collected = Vec::new();
            let queue = &mut self.queue;
            self.output.flush(self.stream, &mut self.pool, || {
                let before = collected.len();
                collected.extend(queue.complete(true));
                collected.len() > before
            })?;
            if collected.is_empty() {
                return Ok(());
            }
            collected.into_iter().for_each(|done| self.completed(done));
            // The queue is polled next, and reports only what completes from then on: all that it has found must be taken.
            self.collect(false);
        }
    }
}

/// Requests up to [`CHUNK`] go whole; larger ones in parts that end at its multiples, so that no two parts touch the same
/// block of the disk.
fn part_len(offset: u64, left: usize) -> usize {
    if left <= CHUNK { left } else { CHUNK - (offset % CHUNK as u64) as usize }
}

/// Data ends the search in the first bytes; only zeroes are read whole.
fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(512).all(|part| part.iter().fold(0, |any, byte| any | byte) == 0)
}

fn failure_of(error: &io::Error, header: &RequestHeader) -> Failure {
    use io::ErrorKind::*;
    let code = match error.kind() {
        PermissionDenied | ReadOnlyFilesystem => EPERM,
        StorageFull | QuotaExceeded | FileTooLarge => ENOSPC,
        OutOfMemory => ENOMEM,
        Unsupported if header.flags & CMD_FLAG_FAST_ZERO != 0 => ENOTSUP,
        Unsupported | InvalidInput => EINVAL,
        _ => EIO,
    };
    Failure { code, message: error.to_string() }
}
