//! Turns the source into tokens: what is in place already, can be copied, is zeroes, or must be sent. Chunks are independent of
//! each other, so the result is the same for any number of threads.

use std::ops::Range;

use twox_hash::XxHash3_128;

use super::index::BlockIndex;
use crate::is_zero;

/// The longest copy: the limit for a record of a delta.
pub(super) const LONGEST: u64 = 1 << 20;
/// Runs of zeroes within literals become zero tokens in multiples of this length.
const ZEROES: usize = 256;
/// In a run of copies, check every so many blocks whether the block is in place.
const TRY: u32 = 16;

/// A copy within the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Move {
    /// Where the bytes go.
    pub at: u64,
    /// Where they are.
    pub from: u64,
    /// From 1 to [`LONGEST`].
    pub len: u64,
    /// XXH3-128 of the bytes.
    pub hash: [u8; 16],
}

/// A part of the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Token {
    /// In place already.
    Same(Range<u64>),
    /// Copied within the destination.
    Move(Move),
    /// Zeroes.
    Zero(Range<u64>),
    /// Sent.
    Literal(Range<u64>),
}

/// Classification of a range of the buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Copied from this byte of the destination.
    From(u64),
    Zero,
    Literal,
}

/// The scan of one chunk.
pub(super) struct Scan<'a> {
    index: &'a BlockIndex,
    block: usize,
    /// The chunk, and around it as much as a block across its ends needs.
    data: &'a [u8],
    /// The byte of the source where `data` begins.
    start: u64,
    /// Where the source ends.
    size: u64,
    /// The chunk within the data.
    chunk: Range<usize>,
    found: Vec<(Range<usize>, Found)>,
    /// Bytes that may still be hashed without a match.
    patience: usize,
    candidates: Vec<u32>,
}

impl<'a> Scan<'a> {
    /// Scans the chunk `chunk` of a source of `size` bytes; `data` begins at `start`.
    pub(super) fn new(
        index: &'a BlockIndex,
        data: &'a [u8],
        start: u64,
        size: u64,
        chunk: Range<u64>,
    ) -> Scan<'a> {
        let chunk = (chunk.start - start) as usize..(chunk.end - start) as usize;
        Scan {
            block: index.block(),
            index,
            data,
            start,
            size,
            // Without crafted sums, only a few blocks are hashed without a match.
            patience: 4 * data.len() + 64 * index.block(),
            chunk,
            found: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// The tokens of the chunk, ascending and without a gap.
    pub(super) fn run(mut self) -> Vec<Token> {
        // A block that begins before the chunk may reach into it.
        let mut at = self.chunk.start;
        if !self.in_place(at) {
            at = self.chunk.start.saturating_sub(self.block - 1);
        }
        // The block that would continue the last copy, and the length of that run in blocks.
        let mut next: Option<u64> = None;
        let mut run = 0u32;
        while at < self.chunk.end {
            let tried = next.is_none() || run % TRY == 0;
            run += 1;
            if tried && self.in_place(at) {
                at = self.take(at, self.start + at as u64, self.block);
                next = None;
                continue;
            }
            if let Some((from, len)) = next.and_then(|number| self.follows(at, number)) {
                let end = if tried { self.until_in_place(at, len) } else { at + len };
                self.take(at, from, end - at);
                next = (end == at + len).then_some(from / self.block as u64 + 1);
                at = end;
                continue;
            }
            (next, run) = (None, 0);
            match self.roll(at) {
                Some((to, Found::Zero)) => {
                    self.literal(at, to);
                    let end = self.zeroes(to);
                    // A block may begin with the last of the zeroes: only what follows them is taken from it.
                    let reach = if end < self.chunk.end { self.block - 1 } else { 0 };
                    at = (end - reach).max(to + 1);
                }
                Some((to, Found::From(from))) => {
                    self.literal(at, to);
                    if from == self.start + to as u64 {
                        at = self.take(to, from, self.block);
                    } else {
                        let end = self.until_in_place(to, self.block);
                        self.take(to, from, end - to);
                        next = (end == to + self.block).then_some(from / self.block as u64 + 1);
                        run = 1;
                        at = end;
                    }
                }
                _ => {
                    self.rest(at);
                    break;
                }
            }
        }
        self.tokens()
    }

    fn bytes(&self, at: usize, len: usize) -> Option<&'a [u8]> {
        self.data.get(at..at.checked_add(len)?)
    }

    /// True if the destination has the block at `at` in the same place.
    fn in_place(&self, at: usize) -> bool {
        let offset = self.start + at as u64;
        let block = self.block as u64;
        if offset % block != 0 {
            return false;
        }
        let number = offset / block;
        let place = self.index.extent(number);
        let len = (place.end - place.start) as usize;
        // A short block must be the last of both.
        let whole = len == self.block || offset + len as u64 == self.size;
        len > 0 && whole && self.is(at, len, number)
    }

    /// True if these bytes equal a block of the destination.
    fn is(&self, at: usize, len: usize, number: u64) -> bool {
        match (self.index.strong(number), self.bytes(at, len)) {
            (Some(strong), Some(bytes)) => self.index.hasher.strong(bytes) == strong,
            _ => false,
        }
    }

    /// The place and length of a block of the destination, if it continues a copy at `at`.
    fn follows(&self, at: usize, number: u64) -> Option<(u64, usize)> {
        let place = self.index.place(u32::try_from(number).ok()?)?;
        let len = (place.end - place.start) as usize;
        self.is(at, len, number).then_some((place.start, len))
    }

    /// The end of a copy of at most `len` bytes that does not cover a block that is in place.
    fn until_in_place(&self, at: usize, len: usize) -> usize {
        let offset = self.start + at as u64;
        let border = (offset.next_multiple_of(self.block as u64) - self.start) as usize;
        if border > at && border < at + len && self.in_place(border) { border } else { at + len }
    }

    /// The first place from `from` on where a block of the destination or a block of zeroes begins.
    fn roll(&mut self, from: usize) -> Option<(usize, Found)> {
        let index = self.index;
        let mut at = from;
        // Only a little at first: most changes are small.
        let mut step = 2 * self.block;
        loop {
            let end = (self.data.len() + 1).saturating_sub(self.block).min(self.chunk.end);
            if at >= end || self.patience == 0 {
                return None;
            }
            let places = at..end.min(at.saturating_add(step));
            let known = |sum| sum == 0 || index.has(sum);
            let hit = index.hasher.weak.search(self.data, self.block, places.clone(), &index.filter, &known);
            at = match hit {
                Some((place, sum)) => match self.look_up(place, sum) {
                    Some(found) => return Some((place, found)),
                    None => place + 1,
                },
                None => places.end,
            };
            step = usize::MAX;
        }
    }

    /// Looks up the block at `at`, which has this weak sum.
    fn look_up(&mut self, at: usize, weak: u64) -> Option<Found> {
        let block = self.bytes(at, self.block)?;
        if weak == 0 && is_zero(block) {
            return Some(Found::Zero);
        }
        self.index.candidates(weak, &mut self.candidates);
        if self.candidates.is_empty() || self.patience == 0 {
            return None;
        }
        let strong = self.index.hasher.strong(block);
        let same = |number: u64| self.index.strong(number).is_some_and(|s| s == strong);
        let offset = self.start + at as u64;
        let number = offset / self.block as u64;
        if offset % self.block as u64 == 0
            && self.index.extent(number).end == offset + self.block as u64
            && same(number)
        {
            return Some(Found::From(offset));
        }
        let found = self.candidates.iter().find(|number| same(u64::from(**number)));
        match found.and_then(|number| self.index.place(*number)) {
            Some(place) => Some(Found::From(place.start)),
            None => {
                self.patience = self.patience.saturating_sub(self.block);
                None
            }
        }
    }

    /// Consumes the zeroes from `at` on.
    fn zeroes(&mut self, at: usize) -> usize {
        let rest = &self.data[at..self.chunk.end.max(at)];
        let whole = rest.chunks(ZEROES).take_while(|part| is_zero(part)).map(<[u8]>::len).sum::<usize>();
        let tail = rest[whole..].iter().take_while(|b| **b == 0).count();
        let end = at + whole + tail;
        self.push(at..end, Found::Zero);
        // A block of zeroes was found, so there is progress even if it lies before the chunk.
        end.max(at + 1)
    }

    /// Consumes the rest, in which no block begins; it may end with the destination's short last block.
    fn rest(&mut self, at: usize) {
        let end = self.chunk.end;
        if self.start + end as u64 == self.size {
            if let Some(number) = self.index.short() {
                let len = self.index.place(number).map_or(0, |p| (p.end - p.start) as usize);
                if end - at >= len {
                    if let Some((from, len)) = self.follows(end - len, number.into()) {
                        self.literal(at, end - len);
                        self.take(end - len, from, len);
                        return;
                    }
                }
            }
        }
        self.literal(at, end);
    }

    fn take(&mut self, at: usize, from: u64, len: usize) -> usize {
        let end = (at + len).min(self.data.len());
        self.push(at..end, Found::From(from));
        end
    }

    /// Adds a literal, apart from the zeroes in it.
    fn literal(&mut self, from: usize, to: usize) {
        let to = to.min(self.chunk.end);
        let mut at = from.max(self.done());
        let mut sent = at;
        while at < to {
            let part = &self.data[at..to.min(at + ZEROES)];
            if part.len() == ZEROES && is_zero(part) {
                self.push(sent..at, Found::Literal);
                let more = self.data[at..to].chunks_exact(ZEROES).take_while(|p| is_zero(p)).count();
                self.push(at..at + more * ZEROES, Found::Zero);
                at += more * ZEROES;
                sent = at;
            } else {
                at += part.len();
            }
        }
        self.push(sent..to, Found::Literal);
    }

    /// The end of what has been classified.
    fn done(&self) -> usize {
        self.found.last().map_or(self.chunk.start, |(last, _)| last.end)
    }

    /// Adds the part of a range that is within the chunk and not yet classified.
    fn push(&mut self, range: Range<usize>, found: Found) {
        let inside = range.start.max(self.done())..range.end.min(self.chunk.end);
        if inside.is_empty() {
            return;
        }
        let found = match found {
            Found::From(from) => Found::From(from + (inside.start - range.start) as u64),
            other => other,
        };
        let joins = self.found.last().is_some_and(|(last, before)| {
            last.end == inside.start
                && match (*before, found) {
                    (Found::From(a), Found::From(b)) => a + last.len() as u64 == b,
                    (a, b) => a == b,
                }
        });
        match self.found.last_mut() {
            Some((last, _)) if joins => last.end = inside.end,
            _ => self.found.push((inside, found)),
        }
    }

    fn tokens(&self) -> Vec<Token> {
        let mut tokens = Vec::with_capacity(self.found.len());
        for (range, found) in &self.found {
            let bytes = self.start + range.start as u64..self.start + range.end as u64;
            match *found {
                Found::From(from) if from == bytes.start => tokens.push(Token::Same(bytes)),
                Found::From(from) => {
                    for (n, piece) in self.data[range.clone()].chunks(LONGEST as usize).enumerate() {
                        let moved = n as u64 * LONGEST;
                        tokens.push(Token::Move(Move {
                            at: bytes.start + moved,
                            from: from + moved,
                            len: piece.len() as u64,
                            hash: hash(piece),
                        }));
                    }
                }
                Found::Zero => {
                    let mut at = bytes.start;
                    for wrong in self.index.not_zero(bytes.clone()) {
                        if at < wrong.start {
                            tokens.push(Token::Same(at..wrong.start));
                        }
                        tokens.push(Token::Zero(wrong.clone()));
                        at = wrong.end;
                    }
                    if at < bytes.end {
                        tokens.push(Token::Same(at..bytes.end));
                    }
                }
                Found::Literal => tokens.push(Token::Literal(bytes)),
            }
        }
        tokens
    }
}

/// The hash of a copy's result.
pub(super) fn hash(bytes: &[u8]) -> [u8; 16] {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}
