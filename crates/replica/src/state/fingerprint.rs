//! Fingerprints of disks that have no times: hashes of a few blocks, by which another disk is told from the one that was left.

use std::io;

use device::Disk;

/// Blocks that make a device's fingerprint, in number and bytes: few enough to cost nothing, and enough that no two disks
/// in use agree in all of them.
pub(crate) const PRINT_BLOCKS: u64 = 16;
pub(crate) const PRINT_BLOCK: u64 = 4096;

/// Hashes of a few blocks: the first, which every file system and partition table changes, others spread evenly, and those that are
/// marked. Each by itself: an unreadable one must not hide what the others say.
pub(crate) fn fingerprint(disk: &dyn Disk, marks: &[u64]) -> io::Result<String> {
    let mut block = device::Buf::new(PRINT_BLOCK as usize);
    samples(disk.len(), marks).map(|at| device::hash_of(disk, at, &mut block)).collect()
}

/// Where the blocks of a fingerprint begin.
pub(crate) fn samples(len: u64, marks: &[u64]) -> impl Iterator<Item = u64> {
    let blocks = len / PRINT_BLOCK;
    let at = move |n| (u128::from(blocks - 1) * u128::from(n) / u128::from(PRINT_BLOCKS - 1)) as u64;
    let mut samples: Vec<u64> = (0..PRINT_BLOCKS.min(blocks)).map(at).collect();
    samples.dedup();
    let marked = marks.iter().copied().filter(move |at| at.saturating_add(PRINT_BLOCK) <= len);
    samples.into_iter().map(|at| at * PRINT_BLOCK).chain(marked)
}
