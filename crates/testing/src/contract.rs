//! The tests that every implementation of a disk passes, including those of other crates.

use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk, Done, Piece, Pieces, Queue, Request, RequestKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Random;

/// Compares disks that `make` makes, empty (all zeroes) and of at least the given number of bytes, with what a disk is to do:
/// random requests of all kinds and sizes, by the plain methods and through queues, against a copy in memory; ends, errors,
/// holes, sizes.
///
/// # Panics
/// If the disk fails the test.
pub fn contract(make: impl Fn(u64) -> Arc<dyn Disk>) {
    let mut dice = Random::new("the contract of disks");
    for size in [1, 512, 4095, 4096, 10_000, 70_144, 3 << 20, (5 << 20) + 12_345] {
        let disk = make(size);
        assert!(disk.len() >= size && disk.align().is_power_of_two());
        ends(&disk);
        let len = disk.len();
        let mut part = Region::new(&disk, 0..len, dice.bits());
        part.plain(60);
        part.queued(200);
        part.abandoned();
        part.compare();
        holes(&*disk, &part.model);
        disk.flush().expect("flush");
    }
    together(make(1 << 20), dice.bits());
    sizes(make(10_000));
}

/// Requests that pass the end are refused, and change nothing.
fn ends(disk: &Arc<dyn Disk>) {
    let len = disk.len();
    let mut two = [7; 2];
    assert_eq!(
        disk.read_at(len - 1, &mut two).expect_err("a read past the end").kind(),
        ErrorKind::UnexpectedEof
    );
    for offset in [len - 1, len, len + 4096, u64::MAX] {
        assert!(disk.read_at(offset, &mut two).is_err());
        assert!(disk.write_at(offset, &[1; 2]).is_err(), "a write past the end");
        assert!(disk.write_through(offset, &[1; 2]).is_err(), "a write past the end");
        assert!(disk.zero(offset, 2, true, false).is_err(), "a zeroing past the end");
        assert!(disk.discard(offset, 2).is_err(), "a discard past the end");
        let mut queue = Arc::clone(disk).queue(4).expect("a queue");
        for kind in [RequestKind::Read, RequestKind::Write { fua: true }] {
            let good = Piece { offset: 0, len: 1 };
            let pieces = [good, Piece { offset, len: 2 }].into_iter().collect();
            queue.submit(Request { kind, pieces, buf: Buf::new(3), token: 9 });
            let done = queue.complete(true).expect("a completion");
            assert!(done.result.is_err() && done.request.token == 9 && done.request.buf.len() == 3);
        }
        let pieces = [Piece { offset: 0, len: 1 }].into_iter().collect();
        queue.submit(Request { kind: RequestKind::Read, pieces, buf: Buf::new(2), token: 0 });
        assert!(queue.complete(true).expect("a completion").result.is_err(), "a buffer too long");
        assert!(queue.complete(true).is_none() && queue.complete(false).is_none());
    }
    assert_eq!(disk.len(), len);
    disk.read_at(len, &mut []).expect("nothing, at the end");
    disk.write_at(len, &[]).expect("nothing, at the end");
    disk.zero(len, 0, true, true).expect("nothing, at the end");
    assert_eq!(disk.allocated(len).expect("allocated"), None);
}

/// What is not allocated reads as zeroes.
fn holes(disk: &dyn Disk, model: &[u8]) {
    let mut from = 0;
    while let Some(run) = disk.allocated(from).expect("allocated") {
        assert!(run.start >= from && run.start < run.end && run.end <= disk.len(), "{run:?} after {from}");
        assert!(model[from as usize..run.start as usize].iter().all(|b| *b == 0), "data in a hole");
        from = run.end;
    }
    assert!(model[from as usize..].iter().all(|b| *b == 0), "data in the last hole");
}

/// Threads with their own queues, whose parts meet within a sector.
fn together(disk: Arc<dyn Disk>, seed: u64) {
    let len = disk.len();
    std::thread::scope(|scope| {
        for n in 0..4 {
            let disk = &disk;
            // Unaligned boundaries.
            let edge = |n: u64| if n == 4 { len } else { n * (len / 4) + n * 77 };
            scope.spawn(move || {
                let mut part = Region::new(disk, edge(n)..edge(n + 1), seed ^ n);
                part.plain(20);
                part.queued(100);
                part.compare();
            });
        }
    });
}

fn sizes(disk: Arc<dyn Disk>) {
    let len = disk.len();
    disk.write_at(0, &vec![3; len as usize]).expect("write");
    match disk.resize(5_001) {
        Err(e) => return assert_eq!(e.kind(), ErrorKind::Unsupported),
        Ok(()) => assert_eq!(disk.len(), 5_001),
    }
    assert!(disk.read_at(5_000, &mut [0; 2]).is_err());
    disk.resize(20_000).expect("grow");
    let mut bytes = vec![1; 20_000];
    disk.read_at(0, &mut bytes).expect("read");
    assert!(bytes[..5_001].iter().all(|b| *b == 3) && bytes[5_001..].iter().all(|b| *b == 0));
    disk.write_at(19_999, &[4]).expect("write at the new end");
}

/// A part of a disk that one thread uses, and what it should hold.
struct Region<'a> {
    disk: &'a Arc<dyn Disk>,
    range: Range<u64>,
    model: Vec<u8>,
    dice: Random,
}

/// A request under way: its pieces, and for a read what it should find.
struct Expected {
    pieces: Pieces,
    content: Vec<u8>,
}

impl<'a> Region<'a> {
    fn new(disk: &'a Arc<dyn Disk>, range: Range<u64>, seed: u64) -> Region<'a> {
        let model = vec![0; (range.end - range.start) as usize];
        let part = Region { disk, range, model, dice: Random::seeded(seed) };
        part.compare();
        part
    }

    fn compare(&self) {
        let mut found = Buf::new(self.model.len());
        self.disk.read_at(self.range.start, &mut found).expect("read");
        if let Some(at) = (0..found.len()).find(|i| found[*i] != self.model[*i]) {
            let offset = self.range.start + at as u64;
            panic!("byte {offset} is {} and should be {}", found[at], self.model[at]);
        }
    }

    fn model(&mut self, piece: Piece) -> &mut [u8] {
        let start = (piece.offset - self.range.start) as usize;
        &mut self.model[start..start + piece.len as usize]
    }

    /// A range of any size, with a preference for pages, sectors and the ends.
    fn piece(&mut self) -> Piece {
        let all = self.range.end - self.range.start;
        let unit = [1, 512, 4096, 4096][self.dice.below(4) as usize];
        let most = [4096, 20_000, 3 << 20][self.dice.below(3) as usize].min(all);
        let mut start = self.dice.below(all) / unit * unit;
        let mut len = (1 + self.dice.below(most)).next_multiple_of(unit);
        if self.dice.below(10) == 0 {
            (start, len) = (0, all);
        }
        let offset = self.range.start.max((self.range.start + start) / unit * unit);
        Piece { offset, len: len.min(self.range.end - offset) }
    }

    /// Takes over what can be anything: after a discard, or a zeroing that failed.
    fn adopt(&mut self, piece: Piece) {
        let mut found = vec![0; piece.len as usize];
        self.disk.read_at(piece.offset, &mut found).expect("read");
        self.model(piece).copy_from_slice(&found);
    }

    fn plain(&mut self, count: usize) {
        for _ in 0..count {
            let piece = self.piece();
            match self.dice.below(6) {
                0 | 1 => {
                    let bytes = self.dice.bytes(piece.len as usize);
                    if self.dice.coin() {
                        self.disk.write_at(piece.offset, &bytes).expect("write");
                    } else {
                        self.disk.write_through(piece.offset, &bytes).expect("write through");
                    }
                    self.model(piece).copy_from_slice(&bytes);
                }
                2 => {
                    let (unmap, fast) = (self.dice.coin(), self.dice.coin());
                    match self.disk.zero(piece.offset, piece.len, unmap, fast) {
                        Ok(()) => self.model(piece).fill(0),
                        Err(e) if fast && e.kind() == ErrorKind::Unsupported => self.adopt(piece),
                        Err(e) => panic!("zero: {e}"),
                    }
                }
                3 => {
                    self.disk.discard(piece.offset, piece.len).expect("discard");
                    self.adopt(piece);
                }
                4 => self.disk.flush().expect("flush"),
                _ => {
                    self.disk.prefetch(piece.offset, piece.len).expect("prefetch");
                    let mut found = vec![0; piece.len as usize];
                    self.disk.read_at(piece.offset, &mut found).expect("read");
                    assert!(found == self.model(piece), "{piece:?} reads wrong");
                }
            }
        }
    }

    /// Pieces that touch neither each other nor `busy`.
    fn pieces(&mut self, busy: &[Option<Expected>]) -> Pieces {
        let mut pieces = Pieces::new();
        for _ in 0..[1, 1, 3, 40][self.dice.below(4) as usize] {
            let mut piece = self.piece();
            if self.dice.below(3) == 0
                && let Some(last) = pieces.last()
            {
                // Right behind the one before.
                let last: &Piece = last;
                piece.offset = last.offset + last.len;
                piece.len = piece.len.min(self.range.end - piece.offset);
            }
            let apart = |other: &Piece| {
                other.offset + other.len <= piece.offset || piece.offset + piece.len <= other.offset
            };
            let others = busy.iter().flatten().flat_map(|e| e.pieces.iter());
            if piece.len > 0 && others.chain(pieces.iter()).all(apart) {
                pieces.push(piece);
            }
        }
        pieces
    }

    fn request(&mut self, busy: &[Option<Expected>]) -> (Request, Expected) {
        let pieces = self.pieces(busy);
        let len = pieces.iter().map(|p| p.len as usize).sum::<usize>();
        let (fua, unmap, fast) = (self.dice.coin(), self.dice.coin(), self.dice.coin());
        let kind = match self.dice.below(10) {
            0..4 => RequestKind::Read,
            4..7 => RequestKind::Write { fua },
            7 => RequestKind::Zero { unmap, fast, fua },
            8 => RequestKind::Discard { fua },
            _ => RequestKind::Flush,
        };
        let mut content = Vec::new();
        let buf = match kind {
            RequestKind::Read => {
                pieces.iter().for_each(|p| content.extend_from_slice(self.model(*p)));
                Buf::new(len)
            }
            RequestKind::Write { .. } => {
                let bytes = self.dice.bytes(len);
                let mut rest = &bytes[..];
                for piece in &pieces {
                    let (now, later) = rest.split_at(piece.len as usize);
                    self.model(*piece).copy_from_slice(now);
                    rest = later;
                }
                Buf::from(&bytes[..])
            }
            RequestKind::Zero { .. } => {
                pieces.iter().for_each(|p| self.model(*p).fill(0));
                Buf::default()
            }
            _ => Buf::default(),
        };
        let pieces = if kind == RequestKind::Flush { Pieces::new() } else { pieces };
        let expected = Expected { pieces: pieces.clone(), content };
        (Request { kind, pieces, buf, token: 0 }, expected)
    }

    fn finished(&mut self, done: Done, expected: Expected) {
        let kind = done.request.kind;
        assert_eq!(done.request.pieces, expected.pieces);
        match (kind, done.result) {
            (RequestKind::Read, Ok(())) => {
                assert!(*done.request.buf == *expected.content, "{:?} read wrong", expected.pieces)
            }
            (RequestKind::Discard { .. }, Ok(())) => expected.pieces.iter().for_each(|p| self.adopt(*p)),
            (RequestKind::Zero { fast: true, .. }, Err(e)) if e.kind() == ErrorKind::Unsupported => {
                expected.pieces.iter().for_each(|p| self.adopt(*p));
            }
            (_, Ok(())) => {}
            (_, Err(e)) => panic!("{kind:?} of {:?}: {e}", expected.pieces),
        }
    }

    fn next(&mut self, queue: &mut dyn Queue) -> Done {
        queue.start();
        let Some(fd) = queue.wait_fd().filter(|_| self.dice.coin()) else {
            return queue.complete(true).expect("a completion");
        };
        let fd = fd.try_clone_to_owned().expect("a descriptor");
        loop {
            if let Some(done) = queue.complete(false) {
                return done;
            }
            let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).expect("poll");
            assert!(ready == 1, "requests are under way, and the descriptor doesn't wake");
        }
    }

    fn queued(&mut self, count: usize) {
        let depth = [1, 3, 32, 64][self.dice.below(4) as usize];
        let mut queue = Arc::clone(self.disk).queue(depth).expect("a queue");
        let mut busy: Vec<Option<Expected>> = Vec::new();
        let mut left = count;
        loop {
            let under_way = busy.iter().flatten().count();
            assert_eq!(queue.in_flight(), under_way);
            if left > 0 && (under_way < 20 && self.dice.below(3) > 0 || under_way == 0) {
                left -= 1;
                let (mut request, expected) = self.request(&busy);
                let index = busy.iter().position(Option::is_none).unwrap_or(busy.len());
                if index == busy.len() {
                    busy.push(None);
                }
                request.token = index as u64;
                busy[index] = Some(expected);
                queue.submit(request);
            } else if under_way > 0 {
                let done = self.next(&mut *queue);
                let expected = busy[done.request.token as usize].take().expect("a request under way");
                self.finished(done, expected);
            } else {
                break;
            }
        }
        assert!(queue.complete(true).is_none());
    }

    /// Drops a queue with requests under way: what was started is over by then.
    fn abandoned(&mut self) {
        let mut busy = Vec::new();
        let mut queue = Arc::clone(self.disk).queue(8).expect("a queue");
        for n in 0..30 {
            let (request, expected) = self.request(&busy);
            busy.push(Some(expected));
            queue.submit(request);
            if n == 20 {
                queue.start();
            }
        }
        drop(queue);
        for expected in busy.into_iter().flatten() {
            expected.pieces.iter().for_each(|p| self.adopt(*p));
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
        self.compare();
    }
}
