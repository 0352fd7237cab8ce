//! The partitions in a disk's own table.

use std::io;
use std::ops::Range;

use crate::Buf;
use crate::disk::Disk;
use crate::error::is_unreadable;

/// A table counts in sectors of these sizes, in bytes; which one follows from the place of the GPT header.
const SECTORS: [u64; 2] = [512, 4096];
/// The most entries of a valid table.
const MOST: u64 = 256;

/// The partitions of a disk, in bytes: those of its GPT, or the four of its MBR. Empty if there is no table, or it cannot be
/// read. Partitions within an extended one are not included.
///
/// # Errors
/// If the disk cannot be read, for other reasons than bad sectors.
pub(crate) fn partitions(disk: &dyn Disk) -> io::Result<Vec<Range<u64>>> {
    let found = listed_partitions(disk);
    let fits = |range: &Range<u64>| range.start > 0 && range.start < range.end && range.end <= disk.len();
    match found {
        Ok(found) => Ok(found.into_iter().filter(fits).collect()),
        Err(error) if is_unreadable(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The partitions in a disk's table, in bytes, as they stand there: they may be empty, or go beyond the end of the disk.
///
/// # Errors
/// If the table cannot be read.
pub fn listed_partitions(disk: &dyn Disk) -> io::Result<Vec<Range<u64>>> {
    gpt(disk)?.map_or_else(|| mbr(disk), Ok)
}

fn read(disk: &dyn Disk, at: u64, len: u64) -> io::Result<Option<Buf>> {
    if at.checked_add(len).is_none_or(|end| end > disk.len()) {
        return Ok(None);
    }
    let mut buf = Buf::new(len as usize);
    disk.read_at(at, &mut buf)?;
    Ok(Some(buf))
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes.get(at..at + len).unwrap_or_default().iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

fn gpt(disk: &dyn Disk) -> io::Result<Option<Vec<Range<u64>>>> {
    for sector in SECTORS {
        let Some(header) = read(disk, sector, 512)? else { continue };
        if !header.starts_with(b"EFI PART") {
            continue;
        }
        let (first, count, size) = (number(&header, 72, 8), number(&header, 80, 4), number(&header, 84, 4));
        if !(128..=4096).contains(&size) {
            return Ok(Some(Vec::new()));
        }
        let Some(table) = read(disk, first.saturating_mul(sector), count.min(MOST) * size)? else {
            return Ok(Some(Vec::new()));
        };
        let used = table.chunks_exact(size as usize).filter(|entry| entry[..16].iter().any(|b| *b != 0));
        let ranges = used.map(|entry| {
            let end = number(entry, 40, 8).saturating_add(1);
            number(entry, 32, 8).saturating_mul(sector)..end.saturating_mul(sector)
        });
        return Ok(Some(ranges.collect()));
    }
    Ok(None)
}

fn mbr(disk: &dyn Disk) -> io::Result<Vec<Range<u64>>> {
    let Some(head) = read(disk, 0, 512)?.filter(|head| head[510..] == [0x55, 0xaa]) else {
        return Ok(Vec::new());
    };
    let entries = head[446..510].chunks_exact(16);
    // A file system's boot sector has the same signature; its "entries" are code, and not valid.
    let entries = entries.filter(|entry| entry[4] != 0 && entry[0] & 0x7f == 0);
    Ok(entries
        .map(|entry| {
            let start = number(entry, 8, 4) * 512;
            start..start + number(entry, 12, 4) * 512
        })
        .collect())
}

// Lists of one range are just that.
#[allow(clippy::single_range_in_vec_init)]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamDisk;

    #[test]
    fn partitions_of_both_kinds_and_of_none() {
        let disk = RamDisk::new(8 << 20);
        assert!(partitions(&disk).unwrap().is_empty());
        assert!(partitions(&RamDisk::new(100)).unwrap().is_empty());
        disk.write_at(510, &[0x55, 0xaa]).unwrap();
        disk.write_at(446 + 4, &[0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0]).unwrap();
        disk.write_at(446 + 20, &[0x83, 0, 0, 0, 0, 8, 0, 0, 0xff, 0xff, 0xff, 0xff]).unwrap();
        assert_eq!(partitions(&disk).unwrap(), [1 << 20..2 << 20]);
        for sector in SECTORS {
            let disk = RamDisk::new(8 << 20);
            let mut header = [0; 92];
            header[..8].copy_from_slice(b"EFI PART");
            header[72] = 2;
            header[80] = 128;
            header[84] = 128;
            disk.write_at(sector, &header).unwrap();
            let mut entry = [1; 48];
            entry[32..48].copy_from_slice(&[0; 16]);
            (entry[33], entry[41]) = (1, 2);
            disk.write_at(2 * sector + 128, &entry).unwrap();
            let (start, end) = (256 * sector, 513 * sector);
            assert_eq!(partitions(&disk).unwrap(), [start..end].as_slice());
            // Whatever a header says.
            header[72..88].fill(0xff);
            disk.write_at(sector, &header).unwrap();
            assert!(partitions(&disk).unwrap().is_empty());
        }
    }
}
