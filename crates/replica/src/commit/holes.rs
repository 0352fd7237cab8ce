//! Room for what a delta will write into holes of the destination's file. A merge that runs out of room cannot be completed
//! without more room, so it is reserved before a journal is sealed or a batch is confirmed: the holes are found as frames
//! pass, and reserved at the end. If there is no room, the replica stays as it was.
//!
//! Nothing is reserved on devices, and not for what overwrites blocks: file systems that write these to another place (Btrfs, or
//! XFS where another file shares them) may still run out of room.
//!
//! A clone needs none of this: it may fail at any time. After a crash, space for the journal's content is reserved before it is merged;
//! what was never confirmed and has no room is dropped.
//!
//! A journal takes at most half of the free space of its folder (256 MiB at most) and is then started again; space for the next lineage
//! and the note is reserved before it begins. So a full file system ends a commit with an error, and never keeps the next command from
//! merging what was committed.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Frame, Header, Record};
use device::Disk;

use crate::commit::apply;
use crate::error::{ReplicaError, Result, disk_error, io_error, is_full};
use crate::journal::last_writes::{LastWrites, WrittenLast};
use crate::journal::{self, Contents, Target};
use crate::replica::Replica;
use crate::state::destination::Name;

/// Holes that a delta will fill.
#[derive(Clone)]
pub(crate) struct Holes {
    disk: Arc<dyn Disk>,
    /// Up to where the destination keeps what the delta does not name.
    known: u64,
    /// Nothing between the records is filled.
    scattered: bool,
    /// What seems to be a hole may have been reserved before, for a batch that was confirmed and is not written yet: nothing is given back.
    keeps: bool,
    /// From where the next run of data was looked for, and where it is.
    looked: u64,
    data: Range<u64>,
    /// The holes in the order in which they come; adjacent ones are one.
    found: Vec<Range<u64>>,
}

impl Holes {
    fn new(disk: Arc<dyn Disk>) -> Holes {
        Holes {
            disk,
            known: 0,
            scattered: false,
            keeps: false,
            looked: u64::MAX,
            data: 0..0,
            found: Vec::new(),
        }
    }

    /// For what was promised before.
    pub(crate) fn keeping(self) -> Holes {
        Holes { keeps: true, ..self }
    }

    /// Bytes of all holes.
    pub(crate) fn bytes(&self) -> u64 {
        self.found.iter().map(|range| range.end - range.start).sum()
    }

    /// Bytes that the destination may grow by: all holes so far, and as many more as `rest` bytes of data can fill, up to `size`.
    pub(crate) fn at_most(&self, rest: u64, size: u64) -> io::Result<u64> {
        let (mut at, mut all) = (0, 0);
        while let Some(data) = self.disk.allocated(at)? {
            all += data.start - at;
            at = data.end;
        }
        all += size.saturating_sub(at);
        Ok(all.min(self.bytes().saturating_add(rest)))
    }

    /// Looks at what records will write.
    pub(crate) fn records(&mut self, records: &[Record]) -> io::Result<()> {
        if self.scattered {
            let data = records.iter().filter(|record| matches!(record, Record::Data { .. }));
            return data.map(|record| record.offset()..record.end()).try_for_each(|range| self.range(range));
        }
        apply::written(records, self.known).try_for_each(|range| self.range(range))
    }

    fn range(&mut self, range: Range<u64>) -> io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            if at < self.looked || at >= self.data.end {
                let none = u64::MAX..u64::MAX;
                (self.looked, self.data) = (at, self.disk.allocated(at)?.unwrap_or(none));
            }
            let end = range.end.min(if at < self.data.start { self.data.start } else { self.data.end });
            if at < self.data.start {
                match self.found.last_mut() {
                    Some(last) if last.end == at => last.end = end,
                    _ => self.found.push(at..end),
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Reserves the holes. Returns how many bytes they take where there was no room; then what it reserved was given back, unless it is kept.
    fn reserve(self) -> io::Result<Option<u64>> {
        // What was a hole when its frame passed may have been written since.
        let mut now = Holes { known: self.known, ..Holes::new(self.disk.clone()) };
        self.found.into_iter().try_for_each(|range| now.range(range))?;
        let needed = now.bytes();
        for (count, range) in now.found.iter().enumerate() {
            match now.disk.reserve(range.start, range.end - range.start) {
                Err(e) if is_full(&e) => {
                    if !self.keeps {
                        // Of the last one a part may be there.
                        give_back(&*now.disk, &now.found[..=count])?;
                    }
                    return Ok(Some(needed));
                }
                other => other?,
            }
        }
        // Made durable, so that a power cut in the midst of the merge leaves it.
        now.disk.flush().map(|()| None)
    }
}

impl Target for Holes {
    fn rewind(&mut self, _: &Header, known: u64) -> io::Result<()> {
        self.known = known;
        Ok(())
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        self.records(&frame.records)
    }
}

/// Bytes to free, in whole MiB, and with room for what the file system needs besides.
pub(crate) fn rounded(bytes: u64) -> u64 {
    (bytes + (1 << 20)).next_multiple_of(1 << 20)
}

/// Makes ranges holes again that were reserved a moment ago.
fn give_back(disk: &dyn Disk, holes: &[Range<u64>]) -> io::Result<()> {
    let len = disk.len();
    for hole in holes.iter().filter(|hole| hole.start < len) {
        disk.discard(hole.start, hole.end.min(len) - hole.start)?;
    }
    // What was reserved behind the end goes with a new end.
    if holes.iter().any(|hole| hole.end > len) { disk.resize(len) } else { Ok(()) }
}

impl Replica {
    /// Begins to look for holes that a delta will fill; `known` is up to where the destination keeps what that does not name.
    /// `None` where nothing can be reserved, or where that could not be told from another program's write.
    pub(crate) fn holes(&self, known: u64) -> Result<Option<Holes>> {
        if self.destination().is_device() || self.is_timeless() {
            return Ok(None);
        }
        let disk = self.destination().open(Name::Final)?;
        Ok(Some(Holes { known, ..Holes::new(disk) }))
    }

    /// The holes that a journal's delta will fill.
    pub(crate) fn holes_of(&self, name: &str, contents: &Contents) -> Result<Option<Holes>> {
        self.holes_of_one(name, contents, 0, None)
    }

    /// The holes that the delta of this number in a journal will fill, except where a later one writes.
    pub(crate) fn holes_of_one(
        &self,
        name: &str,
        contents: &Contents,
        delta: usize,
        last: Option<&LastWrites>,
    ) -> Result<Option<Holes>> {
        let Some(mut holes) = self.holes(0)? else { return Ok(None) };
        holes.scattered = last.is_some();
        let failed = io_error("look for holes in", self.path());
        let mut written = WrittenLast { target: &mut holes, last, delta };
        journal::replay(self.state(), name, contents, &mut written, &mut self.positions(), failed)?;
        Ok(Some(holes))
    }

    /// Makes sure that what is to be merged finds room. `state` is what becomes of the replica if it does not.
    ///
    /// This moves the file's times; the note says that it was this program, until a journal under its last name does.
    pub(crate) fn make_room(
        &mut self,
        holes: Option<Holes>,
        sealed: bool,
        state: &'static str,
    ) -> Result<()> {
        let Some(holes) = holes.filter(|holes| !holes.found.is_empty()) else { return Ok(()) };
        match sealed {
            true => self.work(true)?,
            false => self.work_noted(true, state)?,
        };
        let mut reserved = holes.clone().reserve();
        if let Ok(Some(needed)) = reserved {
            let free = self.destination().free().unwrap_or(u64::MAX);
            if self.may_find_here(needed, free) && self.readers_give_way() {
                reserved = holes.reserve();
            }
        }
        self.rest()?;
        if let Ok(None) = reserved {
            return Ok(());
        }
        if !sealed {
            self.keep_times()?;
        }
        let needed = reserved.map_err(disk_error("reserve room in", self.path(), state))?.unwrap_or(0);
        let place = format!("for what the delta adds to {}", self.path().display());
        let missing = self.destination().free().map(|free| rounded(needed.saturating_sub(free)));
        Err(ReplicaError::Full { place, missing, state, otherwise: "" })
    }
}

// Lists of one range are just that.
#[allow(clippy::single_range_in_vec_init)]
#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use testing::faulty::{FaultyDisk, Outage, Power};

    use super::*;

    /// 64 KiB, of which the pages 2, 3 and 8 hold data.
    fn sparse(folder: &std::path::Path) -> (std::path::PathBuf, Arc<dyn Disk>) {
        let path = folder.join("sparse");
        std::fs::File::create(&path).unwrap().set_len(64 << 10).unwrap();
        let disk = device::open(&path, &device::DiskOptions { write: true, ..Default::default() }).unwrap();
        disk.write_at(8 << 10, &[1; 8 << 10]).unwrap();
        disk.write_at(32 << 10, &[1; 4 << 10]).unwrap();
        (path, disk)
    }

    fn data(page: u64, pages: u64) -> Record {
        Record::Data { offset: page << 12, len: pages << 12 }
    }

    #[test]
    fn holes_are_what_a_delta_writes_where_nothing_is() {
        let temp = testing::on_disk();
        let (path, disk) = sparse(temp.path());
        let mut holes = Holes { known: u64::MAX, ..Holes::new(disk.clone()) };
        holes.records(&[data(0, 1), data(1, 2), data(7, 3)]).unwrap();
        holes.records(&[Record::Zero { offset: 11 << 12, len: 4096 }, data(15, 2)]).unwrap();
        assert_eq!(holes.found, [0..2 << 12, 7 << 12..8 << 12, 9 << 12..10 << 12, 15 << 12..17 << 12]);
        let blocks = || std::fs::metadata(&path).unwrap().blocks() * 512;
        let before = blocks();
        assert_eq!(holes.reserve().unwrap(), None);
        // With what the file system needs to name them.
        assert!((6 << 12..9 << 12).contains(&(blocks() - before)), "{}", blocks() - before);
        // What was filled meanwhile is no hole any more, and is never given back.
        let mut holes = Holes { known: u64::MAX, ..Holes::new(disk.clone()) };
        holes.records(&[data(4, 4)]).unwrap();
        disk.write_at(5 << 12, &[7; 4096]).unwrap();
        let mut now = Holes::new(disk.clone());
        holes.found.iter().for_each(|range| now.range(range.clone()).unwrap());
        assert_eq!(now.found, [4 << 12..5 << 12, 6 << 12..8 << 12]);
        give_back(&*disk, &now.found).unwrap();
        let mut page = [0; 4096];
        disk.read_at(5 << 12, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
    }

    /// After a power cut in the midst of a merge, what was reserved may be all the room that there is.
    #[test]
    fn what_was_reserved_is_made_durable() {
        let temp = testing::on_disk();
        let power = Power::new(Outage::PowerCut);
        let disk: Arc<dyn Disk> = Arc::new(FaultyDisk::new(&power, sparse(temp.path()).1));
        let mut holes = Holes { known: u64::MAX, ..Holes::new(disk) };
        holes.records(&[data(0, 1)]).unwrap();
        assert_eq!((holes.reserve().unwrap(), power.syncs()), (None, 1));
    }

    #[test]
    fn gaps_that_are_filled_count() {
        let temp = testing::on_disk();
        let (_, disk) = sparse(temp.path());
        let mut holes = Holes { known: u64::MAX, ..Holes::new(disk) };
        // Every third page of what is dense enough to be written whole.
        holes.records(&(0..40).map(|n| data(16 + 3 * n, 1)).collect::<Vec<_>>()).unwrap();
        assert_eq!(holes.found, [16 << 12..(16 + 3 * 39 + 1) << 12]);
    }
}
