//! Clones: files that share their content with another one until either is written to (XFS, Btrfs). What differs between two clones of one file is
//! told by where the file system keeps their content, without reading it.
//!
//! Content that two files keep in one place is the same: what is shared is never overwritten in place. Everything else
//! differs, or may:
//!
//! - **What has no place of its own** (compressed, inline, encrypted) differs if the maps do, and is read from both and compared if they
//!   do not, because another part of a packed extent can be shared at the same place. So on compressed Btrfs a sync reads the image and
//!   the clone. Holes and preallocated extents are zeroes.
//! - **A balance or a defragmentation** moves content; that names too much. The old map is read before and after the new one, and again
//!   until it no longer changes: content of the old clone could be moved away, and other content to where it was, between two looks.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{Advice, IFlags, fadvise, fstatfs, ioctl_ficlone, ioctl_getflags, ioctl_setflags};

use crate::sys;

/// How often the map of a file is read again that is moved meanwhile.
const ATTEMPTS: usize = 20;

/// Bytes that are compared at once.
const CHUNK: u64 = 1 << 20;

/// Bytes of the parts in which content that was compared counts as the same.
const PART: usize = 4096;

/// True if the file system of a file makes clones, and tells where it keeps content: XFS and Btrfs, as no other was tried.
///
/// # Errors
/// If it cannot be asked.
pub fn tells_places(file: &File) -> io::Result<bool> {
    const XFS: u64 = 0x5846_5342;
    const BTRFS: u64 = 0x9123_683e;
    Ok([XFS, BTRFS].contains(&(fstatfs(file)?.f_type as u64)))
}

/// Makes the empty file `to` a clone of another one of its file system: all that was written to that before. Writers of that wait meanwhile.
/// Durable when it is synced.
///
/// # Errors
/// If the file system cannot, or there is no room.
pub fn clone_file(from: &File, to: &File) -> io::Result<()> {
    // Btrfs shares content of files without copy-on-write only with such files. A new file has it from its folder.
    let (is, was) = (ioctl_getflags(to), ioctl_getflags(from));
    if let (Ok(is), Ok(was)) = (is, was) {
        if (is ^ was).contains(IFlags::NOCOW) {
            ioctl_setflags(to, is ^ IFlags::NOCOW)?;
        }
    }
    Ok(ioctl_ficlone(to, from)?)
}

/// Where a part of a file is kept. Parts that are kept nowhere are zeroes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Extent {
    start: u64,
    end: u64,
    place: u64,
    /// The place does not tell the content.
    opaque: bool,
}

impl Extent {
    /// Where its content at an offset is kept.
    fn at(&self, offset: u64) -> u64 {
        self.place.wrapping_add(offset - self.start)
    }
}

/// Where the content of a file is kept, in its order; with `flush`, after what is cached was written out.
fn places(file: &File, flush: bool) -> io::Result<Vec<Extent>> {
    const LAST: u32 = 0x1;
    const UNWRITTEN: u32 = 0x800;
    // FIEMAP_EXTENT_MERGED and FIEMAP_EXTENT_SHARED change nothing. Any other flag says that the place is unknown, or of something else.
    const PLAIN: u32 = LAST | UNWRITTEN | 0x1000 | 0x2000;
    let (mut found, mut from) = (Vec::new(), 0);
    loop {
        let part = sys::extents(file, from, flush)?;
        let Some(&(start, _, len, flags)) = part.last() else { return Ok(found) };
        let kept = part.into_iter().filter(|(.., flags)| flags & UNWRITTEN == 0 || flags & !PLAIN != 0);
        found.extend(kept.map(|(start, place, len, flags)| Extent {
            start,
            end: start.saturating_add(len),
            place,
            opaque: flags & !PLAIN != 0,
        }));
        let end = start.saturating_add(len);
        if flags & LAST != 0 || end <= from {
            return Ok(found);
        }
        from = end;
    }
}

/// The ranges of bytes in which two files may differ that nothing writes to, ascending, up to the end of `new`. What `new` has beyond the end of
/// `old` is among them. Both have to be of one file system that [tells places](tells_places).
///
/// # Errors
/// If they cannot be read, or are moved all the time.
pub fn differing(old: &File, new: &File) -> io::Result<Vec<Range<u64>>> {
    let (old_size, size) = (old.metadata()?.len(), new.metadata()?.len());
    if old.metadata()?.dev() != new.metadata()?.dev() {
        return Err(io::Error::other("they are on two file systems"));
    }
    let (before, now) = together(|| places(old, true), || places(new, true))?;
    let (mut ranges, opaque) = walk(&before, &now, old_size.min(size));
    for range in opaque {
        compare(old, new, range, &mut ranges)?;
    }
    if old_size < size {
        ranges.push(old_size..size);
    }
    ranges.sort_unstable_by_key(|range| range.start);
    Ok(ranges)
}

/// What was most likely written to a file since a clone of it was made.
pub struct Overwritten {
    /// Where, in bytes.
    pub ranges: Vec<Range<u64>>,
    /// Bytes of what was there, which the clone keeps, and maybe others too.
    pub kept: u64,
}

/// What was most likely written to a file that is in use since the clone `old` of it was made. For people: what is not written out yet may be missing.
///
/// # Errors
/// If they cannot be read.
pub fn likely_differing(old: &File, new: &File) -> io::Result<Overwritten> {
    let (before, now) = (places(old, false)?, places(new, false)?);
    let ranges = walk(&before, &now, new.metadata()?.len()).0;
    let end = before.last().map_or(0, |extent| extent.end);
    let mut kept = 0;
    let mut extents = before.iter().peekable();
    for range in walk(&before, &now, end).0 {
        while extents.next_if(|extent| extent.end <= range.start).is_some() {}
        let within = extents.clone().take_while(|extent| extent.start < range.end);
        kept += within.map(|e| e.end.min(range.end) - e.start.max(range.start)).sum::<u64>();
    }
    Ok(Overwritten { ranges, kept })
}

/// Two maps, of which the old one stood still while the new one was read: a balance may move its content away between two looks, and other content to where
/// that was.
fn together(
    mut old: impl FnMut() -> io::Result<Vec<Extent>>,
    mut new: impl FnMut() -> io::Result<Vec<Extent>>,
) -> io::Result<(Vec<Extent>, Vec<Extent>)> {
    for _ in 0..ATTEMPTS {
        let (before, now) = (old()?, new()?);
        if old()? == before {
            return Ok((before, now));
        }
    }
    Err(io::Error::other("its file system moves its content all the time, as a balance does"))
}

/// Where two maps differ up to an end, and where both are opaque and say the same.
fn walk(old: &[Extent], new: &[Extent], end: u64) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
    let (mut differ, mut opaque): (Vec<Range<u64>>, Vec<Range<u64>>) = (Vec::new(), Vec::new());
    let (mut old, mut new) = (old.iter().peekable(), new.iter().peekable());
    let mut at = 0;
    while at < end {
        while old.next_if(|extent| extent.end <= at).is_some() {}
        while new.next_if(|extent| extent.end <= at).is_some() {}
        let (was, is) = (old.peek().copied(), new.peek().copied());
        // Up to where neither begins or ends.
        let bound = |extent: Option<&Extent>| match extent {
            Some(extent) if extent.start > at => extent.start,
            Some(extent) => extent.end,
            None => end,
        };
        let upto = bound(was).min(bound(is)).min(end);
        let here = |extent: Option<&Extent>| extent.copied().filter(|extent| extent.start <= at);
        let into = match (here(was), here(is)) {
            (None, None) => None,
            (Some(was), Some(is)) if was.opaque && is == was => Some(&mut opaque),
            (Some(was), Some(is)) if !was.opaque && !is.opaque && was.at(at) == is.at(at) => None,
            _ => Some(&mut differ),
        };
        if let Some(ranges) = into {
            match ranges.last_mut() {
                Some(last) if last.end == at => last.end = upto,
                _ => ranges.push(at..upto),
            }
        }
        at = upto;
    }
    (differ, opaque)
}

/// Adds the parts of a range in which the content of two files differs, and drops what the page cache has of them: nobody else reads clones.
fn compare(old: &File, new: &File, range: Range<u64>, into: &mut Vec<Range<u64>>) -> io::Result<()> {
    let (mut before, mut now) = (vec![0; CHUNK as usize], vec![0; CHUNK as usize]);
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(CHUNK) as usize;
        old.read_exact_at(&mut before[..len], at)?;
        new.read_exact_at(&mut now[..len], at)?;
        for (part, (before, now)) in before[..len].chunks(PART).zip(now[..len].chunks(PART)).enumerate() {
            if before != now {
                let start = at + (part * PART) as u64;
                into.push(start..start + now.len() as u64);
            }
        }
        at += len as u64;
        // What was read ahead is kept until the end.
        let upto = NonZeroU64::new(at).filter(|_| at < range.end);
        for file in [old, new] {
            let _ = fadvise(file, 0, upto, Advice::DontNeed);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, reason = "the ranges that are found")]

    use super::*;

    fn kept(start: u64, end: u64, place: u64) -> Extent {
        Extent { start, end, place, opaque: false }
    }

    fn opaque(start: u64, end: u64, place: u64) -> Extent {
        Extent { opaque: true, ..kept(start, end, place) }
    }

    #[test]
    fn what_is_kept_elsewhere_differs() {
        let walk = |old: &[Extent], new: &[Extent]| walk(old, new, 100);
        let whole = [kept(0, 100, 1000)];
        assert_eq!(walk(&whole, &whole), (vec![], vec![]));
        assert_eq!(walk(&[], &[]), (vec![], vec![]));
        assert_eq!(walk(&[], &whole), (vec![0..100], vec![]));
        assert_eq!(walk(&whole, &[]), (vec![0..100], vec![]));
        // The same in other pieces, and beyond the end.
        assert_eq!(walk(&whole, &[kept(0, 30, 1000), kept(30, 200, 1030)]), (vec![], vec![]));
        let middle = [kept(0, 30, 1000), kept(30, 50, 7), kept(50, 100, 1050)];
        assert_eq!(walk(&whole, &middle), (vec![30..50], vec![]));
        assert_eq!(walk(&middle, &whole), (vec![30..50], vec![]));
        // A hole, its neighbour, and the same place at another offset.
        let hole = [kept(0, 30, 1000), kept(50, 100, 1051)];
        assert_eq!(walk(&whole, &hole), (vec![30..100], vec![]));
        assert_eq!(walk(&hole, &hole), (vec![], vec![]));
    }

    /// Between two looks the content of the old file is moved away, and other content of the new one to where it was.
    #[test]
    fn maps_are_of_one_moment() {
        let looks = |at: &'static [u64]| {
            let mut places = at.iter();
            move || Ok(vec![kept(0, 100, *places.next().expect("a look"))])
        };
        let (old, new) = together(looks(&[7, 8, 8, 8]), looks(&[7, 7])).unwrap();
        assert_eq!(walk(&old, &new, 100).0, [0..100]);
        let mut looks = 0..;
        let moving = || Ok(vec![kept(0, 100, looks.next().expect("a number"))]);
        let never = together(moving, || Ok(Vec::new()));
        assert!(never.is_err());
    }

    #[test]
    fn what_has_no_place_is_to_be_compared() {
        let walk = |old: &[Extent], new: &[Extent]| walk(old, new, 100);
        let packed = [opaque(0, 50, 7), kept(50, 100, 1000)];
        assert_eq!(walk(&packed, &packed), (vec![], vec![0..50]));
        assert_eq!(walk(&packed, &[opaque(0, 50, 8), kept(50, 100, 1000)]), (vec![0..50], vec![]));
        assert_eq!(walk(&packed, &[kept(0, 50, 7), kept(50, 100, 1000)]), (vec![0..50], vec![]));
        // A part of it may be another part of what is packed there.
        assert_eq!(walk(&packed, &[opaque(0, 40, 7), kept(50, 100, 1000)]), (vec![0..50], vec![]));
    }
}
