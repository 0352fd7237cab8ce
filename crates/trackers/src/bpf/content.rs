//! What of a disk's content shows that it was mounted: for records that are to be believed across a reboot.
//!
//! Another system may have had the disk meanwhile, whose writes this kernel has not counted. A mount of ext4, XFS or Btrfs changes a superblock,
//! in the first MiB of the disk or partition; a write to XFS that was not unmounted shows in its log alone. So no write of another system can
//! be missed where one of them is all that there is: on the whole disk, or on each partition in its table.

use std::io;
use std::ops::Range;

use device::Disk;
use twox_hash::XxHash3_128;

use super::disk::BlockDevice;
use crate::TrackError;

/// What counts as the edge of a disk or partition, in bytes: it has the superblocks of ext4, XFS, Btrfs, LVM and md, and partition tables.
const EDGE: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// What a disk holds at the places that mounts change.
pub(super) struct DiskContent {
    /// A hash of these places.
    pub fingerprint: String,
    /// What may be written to without a change there; `None` if there is nothing like that.
    pub silent: Option<&'static str>,
}

impl DiskContent {
    /// Reads a device, which is flushed.
    pub(super) fn of(disk: &BlockDevice) -> Result<DiskContent, TrackError> {
        let options = device::DiskOptions { write: false, direct: true, exclusive: false };
        let opened = device::open(&disk.path, &options)?;
        read(&*opened).map_err(TrackError::state("cannot read the device", &disk.path))
    }
}

fn read(disk: &dyn Disk) -> io::Result<DiskContent> {
    const OTHER: &str = "a disk that does not have ext4, XFS or Btrfs on all of it or on each partition";
    let whole = 0..disk.len();
    let listed = device::listed_partitions(disk)?;
    let (partitions, strange): (Vec<_>, Vec<_>) =
        listed.into_iter().partition(|part| 0 < part.start && part.start < part.end && part.end <= whole.end);
    let (mut prints, mut silent) = (String::new(), None);
    let mut is_shown = strange.is_empty();
    for range in std::iter::once(&whole).chain(&partitions) {
        let edge = EDGE.min(range.end - range.start);
        let mut head = vec![0; edge as usize];
        disk.read_at(range.start, &mut head)?;
        let mut tail = vec![0; edge as usize];
        disk.read_at(range.end - edge, &mut tail)?;
        for part in [&head, &tail] {
            prints += &hash(part);
            silent = silent.or(signature(part));
        }
        if *range != whole || partitions.is_empty() {
            match file_system(&head) {
                Some(KnownFileSystem::Xfs) => match log_head(disk, range, &head)? {
                    Some(print) => prints += &print,
                    None => is_shown = false,
                },
                Some(KnownFileSystem::OneSuperblock) => {}
                None => is_shown = false,
            }
        }
    }
    let silent = silent.or((!is_shown).then_some(OTHER));
    Ok(DiskContent { fingerprint: hash(prints.as_bytes()), silent })
}

/// A file system that shows where it was written to.
enum KnownFileSystem {
    Xfs,
    /// ext4 or Btrfs: each mount for writing changes the superblock.
    OneSuperblock,
}

fn file_system(head: &[u8]) -> Option<KnownFileSystem> {
    let at = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    if at(0, b"XFSB") && head.len() as u64 >= SECTOR {
        return Some(KnownFileSystem::Xfs);
    }
    let known = at(1024 + 56, &[0x53, 0xef]) || at((64 << 10) + 64, b"_BHRfS_M");
    known.then_some(KnownFileSystem::OneSuperblock)
}

/// A hash of sectors of an XFS's log, one of which the next write to the log changes: those that a search for the place of that write reads.
/// `None` if the log is on another device.
///
/// Each sector begins with the number of the round in which the log was written there; that of the sectors before that place is one higher.
fn log_head(disk: &dyn Disk, part: &Range<u64>, superblock: &[u8]) -> io::Result<Option<String>> {
    let number = |at: usize, len: usize| {
        superblock[at..at + len].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let (block, start, blocks) = (number(4, 4), number(48, 8), number(96, 4));
    let (group_blocks, group_bits) = (number(84, 4), superblock[124].min(31));
    let block_at =
        (start >> group_bits).saturating_mul(group_blocks).saturating_add(start & ((1 << group_bits) - 1));
    let begin = part.start.saturating_add(block_at.saturating_mul(block));
    let sectors = blocks.saturating_mul(block) / SECTOR;
    if start == 0 || sectors < 2 || begin.saturating_add(sectors * SECTOR) > part.end {
        return Ok(None);
    }
    let mut prints = String::new();
    let mut round = |sector: u64| {
        let mut bytes = [0; SECTOR as usize];
        disk.read_at(begin + sector * SECTOR, &mut bytes)?;
        prints += &hash(&bytes);
        // The header of a record has it behind its magic number.
        let at = if bytes.starts_with(&[0xfe, 0xed, 0xba, 0xbe]) { 4 } else { 0 };
        Ok::<_, io::Error>(<[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap_or_default())
    };
    let first = round(0)?;
    let (mut same, mut other) = (0, sectors - 1);
    round(other)?;
    while other - same > 1 {
        let between = same + (other - same) / 2;
        *(if round(between)? == first { &mut same } else { &mut other }) = between;
    }
    Ok(Some(prints))
}

/// What is on a disk or partition with this edge that can be written through without a change at the edges.
fn signature(edge: &[u8]) -> Option<&'static str> {
    const MD: &[u8] = &0xa92b_4efc_u32.to_le_bytes();
    const ZFS: &[u8] = &0x00ba_b10c_u64.to_le_bytes();
    const BCACHE: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
    let at = |offset: usize, magic: &[u8]| edge.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    // An md superblock of version 1.0 or 0.90 is at a multiple of 4 KiB near the end.
    let on_page = |magic: &[u8]| edge.chunks(4096).any(|page| page.starts_with(magic));
    let on_sector = |magic: &[u8]| edge.chunks(512).any(|sector| sector.starts_with(magic));
    let kinds = [
        ("an LVM physical volume", on_sector(b"LABELONE")),
        ("an encrypted volume (LUKS)", at(0, b"LUKS\xba\xbe")),
        ("a member of an md array", on_page(MD)),
        ("a bcache device", at(4096 + 24, BCACHE)),
        ("a ZFS pool", on_sector(ZFS)),
        ("swap space", [4096, 16384, 65536].iter().any(|page| at(page - 10, b"SWAPSPACE2"))),
    ];
    kinds.into_iter().find_map(|(name, is_it)| is_it.then_some(name))
}

pub(super) fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_write_through_is_known_by_its_signature() {
        let signed = |offset: usize, magic: &[u8]| {
            let mut edge = vec![0; 1 << 20];
            edge[offset..offset + magic.len()].copy_from_slice(magic);
            signature(&edge)
        };
        assert_eq!(signed(0, b""), None);
        // The magic number of ext4, whose superblock every mount changes.
        assert_eq!(signed(1024 + 56, &[0x53, 0xef]), None);
        assert!(signed(512, b"LABELONE").is_some_and(|s| s.contains("LVM")));
        assert!(signed(0, b"LUKS\xba\xbe\0\x02").is_some_and(|s| s.contains("LUKS")));
        for superblock in [0, 4096, (1 << 20) - 8192, (1 << 20) - (64 << 10)] {
            assert!(signed(superblock, &0xa92b_4efc_u32.to_le_bytes()).is_some_and(|s| s.contains("md")));
        }
        assert!(signed(4096 - 10, b"SWAPSPACE2").is_some());
        assert!(signed(128 << 10, &0x00ba_b10c_u64.to_le_bytes()).is_some_and(|s| s.contains("ZFS")));
        assert_eq!(signature(&[]), None);
    }
}
