//! The source's side: from parts to changes, in an order in which they can be made.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use extents::Extents;

use super::cut::{Stretch, Stretches};
use super::index::Index;
use super::order::{Cycles, order};
use super::scan::{LONGEST, Move, Part, Scan, hash};
use super::sums::CHUNK;
use crate::in_order;

/// A change that makes the destination equal to the source.
#[derive(Debug)]
pub enum Change {
    /// Data to be written; at most 1 MiB.
    Data {
        /// Where, in bytes.
        offset: u64,
        /// What.
        data: Buf,
    },
    /// Zeroes.
    Zero(Range<u64>),
    /// Bytes to be copied within the destination; at most 1 MiB.
    Copy {
        /// Where to, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Where from.
        from: u64,
        /// XXH3-128 of the bytes, low half first.
        hash: [u8; 16],
    },
}

/// The changes are made where the destination lies, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct InPlace {
    /// How cycles are broken.
    pub cycles: Cycles,
    /// Parts that are ordered together, above zero. What one window has overwritten no later one can read.
    pub window: usize,
}

impl Default for InPlace {
    fn default() -> InPlace {
        InPlace { cycles: Cycles::default(), window: 1 << 19 }
    }
}

/// Bytes of what disks read in one piece.
const SECTOR: u32 = 4096;

/// Reads the whole sectors in which a range lies, and says where in the buffer it is. What is no whole sector goes through
/// the page cache, which is to stay as it is.
fn sectors(disk: &Arc<dyn Disk>, range: Range<u64>, buf: &mut Buf) -> io::Result<Range<usize>> {
    let sector = u64::from(SECTOR);
    let start = range.start / sector * sector;
    let end = range.end.next_multiple_of(sector).min(disk.len());
    super::read(disk, start..end, buf, SECTOR, false)?;
    Ok((range.start - start) as usize..(range.end - start) as usize)
}

/// What a chunk has become: its parts, and the data of its literals one after the other.
type Piece = (Range<u64>, Vec<Part>, VecDeque<Buf>);

/// Looks through the whole source and hands over what changes the destination of the index into it. Out of place changes
/// ascend; in place they are in the order in which they must be made. `taken` is told how far the source was read for good.
/// Returns the bytes read.
///
/// # Errors
/// Those of the disk and of `found`.
pub fn changes(
    disk: &Arc<dyn Disk>,
    index: &Index,
    in_place: Option<InPlace>,
    mut found: impl FnMut(Change) -> io::Result<()>,
    taken: impl Fn(u64),
) -> io::Result<u64> {
    let mut read = 0;
    match in_place {
        None => scan(disk, index, true, |bytes, (chunk, parts, mut data)| {
            read += bytes;
            for part in parts {
                match part {
                    Part::Same(_) => {}
                    Part::Zero(range) => found(Change::Zero(range))?,
                    Part::Move(Move { at, from, len, hash }) => {
                        found(Change::Copy { offset: at, len, from, hash })?;
                    }
                    Part::Literal(range) => {
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
                Windows { disk, how, parts: Vec::new(), at: 0, begun: 0, kept: Extents::new(), read: 0 };
            scan(disk, index, false, |bytes, (_, parts, _)| {
                read += bytes;
                parts.into_iter().try_for_each(|part| windows.part(part, &mut found))
            })?;
            windows.close(&mut found)?;
            read += windows.read;
            taken(disk.len());
        }
    }
    Ok(read)
}

/// Looks through all chunks, on all cores, and hands their parts on in order, each with the bytes read for it.
fn scan(
    disk: &Arc<dyn Disk>,
    index: &Index,
    with_data: bool,
    mut sink: impl FnMut(u64, Piece) -> io::Result<()>,
) -> io::Result<()> {
    let size = disk.len();
    let around = index.block() as u64 - 1;
    let mut stretches = Stretches::new(&**disk, size, CHUNK);
    in_order(
        super::threads(),
        || stretches.next(),
        Buf::default,
        |buf, stretch| {
            let chunk = match stretch {
                Stretch::Hole(range) => {
                    let wrong = index.not_zero(range.clone()).into_iter().map(Part::Zero).collect();
                    return Ok((0, (range, wrong, VecDeque::new())));
                }
                Stretch::Data(range) => range,
            };
            let whole = chunk.start.saturating_sub(around)..chunk.end.saturating_add(around).min(size);
            let place = sectors(disk, whole.clone(), buf)?;
            let data = &buf[place];
            let parts = Scan::new(index, data, whole.start, size, chunk.clone()).run();
            let mut literals = VecDeque::new();
            if with_data {
                for part in &parts {
                    let Part::Literal(range) = part else { continue };
                    let bytes = (range.start - whole.start) as usize..(range.end - whole.start) as usize;
                    literals.extend(data[bytes].chunks(LONGEST as usize).map(Buf::from));
                }
            }
            Ok((buf.len() as u64, (chunk, parts, literals)))
        },
        |(bytes, piece)| sink(bytes, piece),
    )
}

/// Parts, gathered and ordered a window at a time.
struct Windows<'a> {
    disk: &'a Arc<dyn Disk>,
    how: InPlace,
    /// Those of this window that change something.
    parts: Vec<Part>,
    /// How far the parts have come.
    at: u64,
    /// Where this window begins.
    begun: u64,
    /// What lies before this window and is as it was.
    kept: Extents,
    /// Bytes read a second time, to be sent.
    read: u64,
}

impl Windows<'_> {
    fn part(&mut self, part: Part, found: &mut impl FnMut(Change) -> io::Result<()>) -> io::Result<()> {
        let range = match &part {
            Part::Same(range) | Part::Zero(range) | Part::Literal(range) => range.clone(),
            Part::Move(m) => m.at..m.at + m.len,
        };
        // What no part names stands there already.
        self.keep(self.at..range.start);
        if let Part::Same(range) = part {
            self.keep(range);
        } else {
            self.parts.push(part);
        }
        self.at = range.end;
        if self.parts.len() >= self.how.window { self.close(found) } else { Ok(()) }
    }

    fn keep(&mut self, range: Range<u64>) {
        // To forget one is no fault: what is read of it is sent.
        if self.kept.count() < 2 * self.how.window.max(1 << 16) {
            self.kept.insert(range);
        }
    }

    /// Ends a window: first what is copied, then what is sent.
    fn close(&mut self, found: &mut impl FnMut(Change) -> io::Result<()>) -> io::Result<()> {
        let mut nodes = Vec::new();
        let mut rest = Vec::new();
        for part in std::mem::take(&mut self.parts) {
            match part {
                Part::Move(whole) => self.readable(whole, &mut nodes, &mut rest)?,
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
        rest.extend(sent.into_iter().map(Part::Literal));
        rest.sort_by_key(|part| match part {
            Part::Same(range) | Part::Zero(range) | Part::Literal(range) => range.start,
            Part::Move(m) => m.at,
        });
        for part in rest {
            match part {
                Part::Zero(range) => found(Change::Zero(range))?,
                Part::Literal(range) => {
                    let mut at = range.start;
                    while at < range.end {
                        let len = LONGEST.min(range.end - at);
                        found(Change::Data { offset: at, data: self.bytes(at, len)? })?;
                        at += len;
                    }
                }
                Part::Same(_) | Part::Move(_) => {}
            }
        }
        self.begun = self.at;
        Ok(())
    }

    /// Of a copy, what may still be read; the rest is to be sent.
    fn readable(&mut self, whole: Move, nodes: &mut Vec<Move>, rest: &mut Vec<Part>) -> io::Result<()> {
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
                rest.push(Part::Literal(place(at)..place(good.start)));
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

    /// Bytes of the source, read once more.
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
            Windows { disk: &disk, how, parts: Vec::new(), at: 0, begun: 0, kept: Extents::new(), read: 0 };
        (0..400_000).for_each(|n| windows.keep(n * 2..n * 2 + 1));
        assert!((100_000..200_000).contains(&windows.kept.count()), "{}", windows.kept.count());
    }
}
