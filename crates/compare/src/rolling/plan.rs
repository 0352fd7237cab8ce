//! The source's side: from tokens to changes, in an order in which they can be made.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use extents::Extents;
use serde::{Deserialize, Serialize};

use super::index::BlockIndex;
use super::order::{Cycles, order};
use super::scan::{LONGEST, Move, Scan, Token, hash};
use super::sums::CHUNK;
use crate::in_order;
use crate::segments::{Segment, Segments};

/// A change that makes the destination equal to the source.
#[derive(Debug)]
pub enum Change {
    /// Data to write; at most 1 MiB.
    Data {
        /// Where, in bytes.
        offset: u64,
        /// What.
        data: Buf,
    },
    /// Zeroes.
    Zero(Range<u64>),
    /// A copy within the destination; at most 1 MiB.
    Copy {
        /// Where to write it, in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Where to read it.
        from: u64,
        /// XXH3-128 of the bytes, low half first.
        hash: [u8; 16],
    },
}

/// Options for a destination that is rebuilt in place.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct InPlace {
    /// How cycles are broken.
    pub cycles: Cycles,
    /// Tokens ordered together, above zero. No window can read what an earlier one has overwritten. The memory of the side
    /// that orders them, so another side does not choose it.
    #[serde(skip, default = "usual_window")]
    pub window: usize,
}

fn usual_window() -> usize {
    1 << 19
}

impl Default for InPlace {
    fn default() -> InPlace {
        InPlace { cycles: Cycles::default(), window: usual_window() }
    }
}

/// Unit of direct reads, in bytes.
const SECTOR: u32 = 4096;

/// Reads the sectors that contain a range, and returns its place in the buffer. Reads of partial sectors would go through the
/// page cache and fill it.
fn sectors(disk: &Arc<dyn Disk>, range: Range<u64>, buf: &mut Buf) -> io::Result<Range<usize>> {
    let sector = u64::from(SECTOR);
    let start = range.start / sector * sector;
    let end = range.end.next_multiple_of(sector).min(disk.len());
    super::read(disk, start..end, buf, SECTOR, false)?;
    Ok((range.start - start) as usize..(range.end - start) as usize)
}

/// The tokens of a chunk, and the data of its literals in order.
type Piece = (Range<u64>, Vec<Token>, VecDeque<Buf>);

/// Scans the whole source, and passes to `found` the changes that turn the index's destination into it: ascending, or, in
/// place, in the order in which they must be made. `taken` gets the offset below which the source is no longer needed. Returns
/// the bytes read.
///
/// # Errors
/// If the disk or `found` fails.
pub fn changes(
    disk: &Arc<dyn Disk>,
    index: &BlockIndex,
    in_place: Option<InPlace>,
    mut found: impl FnMut(Change) -> io::Result<()>,
    taken: impl Fn(u64),
) -> io::Result<u64> {
    let mut read = 0;
    match in_place {
        None => scan(disk, index, true, |bytes, (chunk, tokens, mut data)| {
            read += bytes;
            for token in tokens {
                match token {
                    Token::Same(_) => {}
                    Token::Zero(range) => found(Change::Zero(range))?,
                    Token::Move(Move { at, from, len, hash }) => {
                        found(Change::Copy { offset: at, len, from, hash })?;
                    }
                    Token::Literal(range) => {
                        let mut offset = range.start;
                        while offset < range.end {
                            let data = data.pop_front().unwrap_or_default();
                            let len = data.len().max(1) as u64;
                            found(Change::Data { offset, data })?;
                            offset += len;
                        }
                    }
                }
            }
            taken(chunk.end);
            Ok(())
        })?,
        Some(how) => {
            let mut windows =
                Windows { disk, how, tokens: Vec::new(), at: 0, begun: 0, kept: Extents::new(), read: 0 };
            scan(disk, index, false, |bytes, (_, tokens, _)| {
                read += bytes;
                tokens.into_iter().try_for_each(|token| windows.token(token, &mut found))
            })?;
            windows.close(&mut found)?;
            read += windows.read;
            taken(disk.len());
        }
    }
    Ok(read)
}

/// Scans all chunks on all cores, and passes their tokens on in order, each with the bytes read for it.
fn scan(
    disk: &Arc<dyn Disk>,
    index: &BlockIndex,
    with_data: bool,
    mut sink: impl FnMut(u64, Piece) -> io::Result<()>,
) -> io::Result<()> {
    let size = disk.len();
    let around = index.block() as u64 - 1;
    let mut segments = Segments::new(disk, std::iter::once(0..size).collect(), CHUNK);
    in_order(
        super::threads(),
        || segments.next(),
        Buf::default,
        |buf, segment| {
            let chunk = match segment {
                Segment::Hole(range) => {
                    let wrong = index.not_zero(range.clone()).into_iter().map(Token::Zero).collect();
                    return Ok((0, (range, wrong, VecDeque::new())));
                }
                Segment::Data(range) => range,
            };
            let whole = chunk.start.saturating_sub(around)..chunk.end.saturating_add(around).min(size);
            let place = sectors(disk, whole.clone(), buf)?;
            let data = &buf[place];
            let tokens = Scan::new(index, data, whole.start, size, chunk.clone()).run();
            let mut literals = VecDeque::new();
            if with_data {
                for token in &tokens {
                    let Token::Literal(range) = token else { continue };
                    let bytes = (range.start - whole.start) as usize..(range.end - whole.start) as usize;
                    literals.extend(data[bytes].chunks(LONGEST as usize).map(Buf::from));
                }
            }
            Ok((buf.len() as u64, (chunk, tokens, literals)))
        },
        |(bytes, piece)| sink(bytes, piece),
    )
}

/// Collects tokens and orders them one window at a time.
struct Windows<'a> {
    disk: &'a Arc<dyn Disk>,
    how: InPlace,
    /// Tokens of this window that change something.
    tokens: Vec<Token>,
    /// End of the tokens so far.
    at: u64,
    /// Start of this window.
    begun: u64,
    /// Ranges before this window that still have their old content.
    kept: Extents,
    /// Bytes read a second time, to send them.
    read: u64,
}

impl Windows<'_> {
    fn token(&mut self, token: Token, found: &mut impl FnMut(Change) -> io::Result<()>) -> io::Result<()> {
        let range = match &token {
            Token::Same(range) | Token::Zero(range) | Token::Literal(range) => range.clone(),
            Token::Move(m) => m.at..m.at + m.len,
        };
        // What no token names is in place already.
        self.keep(self.at..range.start);
        if let Token::Same(range) = token {
            self.keep(range);
        } else {
            self.tokens.push(token);
        }
        self.at = range.end;
        if self.tokens.len() >= self.how.window { self.close(found) } else { Ok(()) }
    }

    fn keep(&mut self, range: Range<u64>) {
        // Bounded: copies that would read a forgotten range are sent instead.
        if self.kept.count() < 2 * self.how.window.max(1 << 16) {
            self.kept.insert(range);
        }
    }

    /// Ends a window: copies first, then what is sent.
    fn close(&mut self, found: &mut impl FnMut(Change) -> io::Result<()>) -> io::Result<()> {
        let mut nodes = Vec::new();
        let mut rest = Vec::new();
        for token in std::mem::take(&mut self.tokens) {
            match token {
                Token::Move(whole) => self.readable(whole, &mut nodes, &mut rest)?,
                other => rest.push(other),
            }
        }
        let (steps, sent) = order(&nodes, self.how.cycles);
        drop(nodes);
        for step in steps {
            let hash = match step.hash {
                Some(hash) => hash,
                None => hash(&self.bytes(step.at, step.len)?),
            };
            found(Change::Copy { offset: step.at, len: step.len, from: step.from, hash })?;
        }
        rest.extend(sent.into_iter().map(Token::Literal));
        rest.sort_by_key(|token| match token {
            Token::Same(range) | Token::Zero(range) | Token::Literal(range) => range.start,
            Token::Move(m) => m.at,
        });
        for token in rest {
            match token {
                Token::Zero(range) => found(Change::Zero(range))?,
                Token::Literal(range) => {
                    let mut at = range.start;
                    while at < range.end {
                        let len = LONGEST.min(range.end - at);
                        found(Change::Data { offset: at, data: self.bytes(at, len)? })?;
                        at += len;
                    }
                }
                Token::Same(_) | Token::Move(_) => {}
            }
        }
        self.begun = self.at;
        Ok(())
    }

    /// Splits a copy into what can still be read and what must be sent.
    fn readable(&mut self, whole: Move, nodes: &mut Vec<Move>, rest: &mut Vec<Token>) -> io::Result<()> {
        let before = whole.from..(whole.from + whole.len).min(self.begun);
        if before.is_empty() || self.kept.covers(before.clone()) {
            nodes.push(whole);
            return Ok(());
        }
        let mut good: Vec<Range<u64>> = self.kept.clip(before.clone()).iter().collect();
        if before.end < whole.from + whole.len {
            good.push(before.end..whole.from + whole.len);
        }
        let mut at = whole.from;
        let end = whole.from + whole.len;
        let place = |from: u64| whole.at + (from - whole.from);
        for good in good.into_iter().chain(std::iter::once(end..end)) {
            if at < good.start {
                rest.push(Token::Literal(place(at)..place(good.start)));
            }
            if !good.is_empty() {
                let len = good.end - good.start;
                let hash = hash(&self.bytes(place(good.start), len)?);
                nodes.push(Move { at: place(good.start), from: good.start, len, hash });
            }
            at = good.end;
        }
        Ok(())
    }

    /// Reads bytes of the source again.
    fn bytes(&mut self, offset: u64, len: u64) -> io::Result<Buf> {
        let mut buf = Buf::default();
        let place = sectors(self.disk, offset..offset + len, &mut buf)?;
        self.read += len;
        Ok(if place == (0..buf.len()) { buf } else { Buf::from(&buf[place]) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_to_be_kept_has_a_bound() {
        let disk: Arc<dyn Disk> = Arc::new(device::RamDisk::new(1 << 20));
        let how = InPlace { window: 1, ..InPlace::default() };
        let mut windows =
            Windows { disk: &disk, how, tokens: Vec::new(), at: 0, begun: 0, kept: Extents::new(), read: 0 };
        (0..400_000).for_each(|n| windows.keep(n * 2..n * 2 + 1));
        assert!((100_000..200_000).contains(&windows.kept.count()), "{}", windows.kept.count());
    }
}
