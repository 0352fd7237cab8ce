//! The kernel's count of what was written to a block device.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::identity::{Identity, sysfs};
use crate::sys;
use crate::usage::may_change;

/// What was written to a block device since it appeared, by any program: if two counts are equal, nothing was written in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WriteCounts {
    /// Sectors of 512 bytes, by writes that have ended.
    pub sectors: u64,
    /// Sectors, by discards that have ended.
    pub discarded: u64,
    /// Writes that have begun and not ended.
    pub in_flight: u64,
    /// Of a partition: sectors written and discarded on its disk past all partitions, which its own count does not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<[u64; 2]>,
}

impl WriteCounts {
    /// True if something was written or discarded between this count and a later one.
    pub fn has_moved(&self, now: &WriteCounts) -> bool {
        let beside = self.beside.zip(now.beside).is_some_and(|(before, now)| before != now);
        beside || (self.sectors, self.discarded) != (now.sectors, now.discarded)
    }

    /// Counts for the device of this number; a partition counts what goes through it. `None` if the kernel does not count.
    pub fn of(device: u64) -> Option<WriteCounts> {
        Counters::of(device)?.read_own()
    }

    /// Counts for a device as [`WriteCounts::of`], with what its page cache holds, which is written out first.
    pub fn settled(device: &Identity) -> Option<WriteCounts> {
        settle(device);
        WriteCounts::of(device.dev)
    }

    /// Counts as [`WriteCounts::settled`], for a partition also what goes past all partitions of its disk. `None` also if the disk is so busy that its
    /// counts do not agree.
    pub fn settled_whole(device: &Identity) -> Option<WriteCounts> {
        settle(device);
        Counters::of(device.dev)?.read()
    }
}

/// Writes out what the page cache holds of a device and of its partitions, which have caches of their own: what is not on the disk is not counted.
fn settle(device: &Identity) {
    let place = sysfs(device.dev);
    let partitions = std::fs::read_dir(&place).into_iter().flatten().flatten().map(|entry| entry.path());
    let partitions = partitions.filter(|place| place.join("partition").exists());
    // In sysfs a name has "!" where the node has a folder.
    let node = |place: PathBuf| Some(Path::new("/dev").join(place.file_name()?.to_str()?.replace('!', "/")));
    let nodes = partitions.filter_map(node);
    for node in std::iter::once(device.path.clone()).chain(nodes) {
        let _ = File::open(node).and_then(|file| sys::write_back(&file));
    }
}

/// The folder in sysfs of the disk that a device is a part of, or is.
fn whole_disk(place: &Path) -> &Path {
    place.parent().filter(|_| place.join("partition").exists()).unwrap_or(place)
}

fn numbers(file: &File) -> Option<Vec<u64>> {
    let mut text = [0; 512];
    let len = file.read_at(&mut text, 0).ok()?;
    let text = std::str::from_utf8(text.get(..len)?).ok()?;
    Some(text.split_whitespace().map_while(|number| number.parse().ok()).collect())
}

/// The counts of one disk or partition, kept open because they are read often.
#[derive(Debug)]
struct Counter {
    stat: File,
    in_flight: File,
}

impl Counter {
    fn open(place: &Path) -> Option<Counter> {
        let open = |name| File::open(place.join(name)).ok();
        Some(Counter { stat: open("stat")?, in_flight: open("inflight")? })
    }

    fn read(&self) -> Option<WriteCounts> {
        let (stat, in_flight) = (numbers(&self.stat)?, numbers(&self.in_flight)?);
        let (sectors, discarded) = (*stat.get(6)?, *stat.get(13)?);
        Some(WriteCounts { sectors, discarded, in_flight: *in_flight.get(1)?, beside: None })
    }
}

/// The counts of a block device, kept open.
///
/// A partition can also be written through the whole disk, which counts that as its own: so what the disk has counted
/// beyond all its partitions counts, too.
#[derive(Debug)]
pub(crate) struct Counters {
    own: Counter,
    /// For a partition, its disk and all its partitions.
    disk: Option<(Counter, Vec<Counter>)>,
    /// Whether the kernel counts what is written to the disk.
    counts: File,
}

/// How often the counts of a disk and of its partitions are read until they are consistent: there may be writes meanwhile.
const READS: usize = 1000;

impl Counters {
    /// `None` where there are none.
    pub(crate) fn of(device: u64) -> Option<Counters> {
        let place = std::fs::canonicalize(sysfs(device)).ok()?;
        let disk = whole_disk(&place);
        let counts = File::open(disk.join("queue/iostats")).ok()?;
        let own = Counter::open(&place)?;
        if disk == place {
            return Some(Counters { own, disk: None, counts });
        }
        let partitions = std::fs::read_dir(disk).ok()?.flatten().map(|entry| entry.path());
        let partitions: Option<Vec<Counter>> =
            partitions.filter(|p| p.join("partition").exists()).map(|p| Counter::open(&p)).collect();
        Some(Counters { own, disk: Some((Counter::open(disk)?, partitions?)), counts })
    }

    /// What goes through the device itself. `None` if the kernel does not count.
    fn read_own(&self) -> Option<WriteCounts> {
        (numbers(&self.counts)? == [1]).then(|| self.own.read())?
    }

    /// What goes through the device, and for a partition also what goes past all partitions. `None` if the kernel does not count.
    pub(crate) fn read(&self) -> Option<WriteCounts> {
        let Some((disk, partitions)) = &self.disk else { return self.read_own() };
        for _ in 0..READS {
            let before = disk.read()?;
            let mut beside = [before.sectors, before.discarded];
            for partition in partitions {
                let part = partition.read()?;
                beside = [beside[0].wrapping_sub(part.sectors), beside[1].wrapping_sub(part.discarded)];
            }
            let own = self.read_own()?;
            let after = disk.read()?;
            // Between these two reads no write ended that only one count would have.
            if (before.sectors, before.discarded) == (after.sectors, after.discarded) {
                return Some(WriteCounts { beside: Some(beside), ..own });
            }
        }
        None
    }
}

/// How many writes to a block device have ended and how long they took, by the kernel's count.
#[derive(Debug)]
pub struct WriteTimes(Counters);

impl WriteTimes {
    /// `None` if there is no such device.
    pub fn of(device: u64) -> Option<WriteTimes> {
        Counters::of(device).map(WriteTimes)
    }

    /// Writes in flight, writes that have ended, and the milliseconds that these took together. `None` if the kernel does not count.
    pub fn read(&self) -> Option<(u64, u64, u64)> {
        let (stat, in_flight) = (numbers(&self.0.own.stat)?, numbers(&self.0.own.in_flight)?);
        let counted = (*in_flight.get(1)?, *stat.get(4)?, *stat.get(7)?);
        (numbers(&self.0.counts)? == [1]).then_some(counted)
    }
}

/// Detects writes to a block device that is being read: equal counts at both ends mean that there were none.
#[derive(Debug)]
pub struct WriteWatch {
    path: PathBuf,
    counters: Option<Counters>,
    begun: Option<WriteCounts>,
}

impl WriteWatch {
    /// Begins to watch a block device. Its page cache is written out first, so that reading does not cause writes later.
    ///
    /// # Errors
    /// If the device cannot be opened or flushed.
    pub fn begin(device: &Identity) -> io::Result<WriteWatch> {
        File::open(&device.path)?.sync_all()?;
        let counters = Counters::of(device.dev);
        let begun = counters.as_ref().and_then(Counters::read);
        Ok(WriteWatch { path: device.path.clone(), counters, begun })
    }

    /// True if nothing was written since. If the kernel does not count, true if no possible writer is known.
    pub fn is_still(&self) -> bool {
        match (&self.counters, &self.begun) {
            (Some(counters), Some(begun)) => {
                begun.in_flight == 0 && counters.read().is_some_and(|now| now == *begun)
            }
            _ => may_change(&self.path).is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_sysfs() {
        let file = tempfile::tempfile().unwrap();
        file.write_at(b"       1        2  3 x 4\n", 0).unwrap();
        assert_eq!(numbers(&file), Some(vec![1, 2, 3]));
    }
}
