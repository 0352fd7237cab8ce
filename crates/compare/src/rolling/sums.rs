//! The sums of the destination's blocks: their size, their key, and how they are reported.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use serde::{Deserialize, Serialize};

use super::weak::Weak;
use crate::segments::{Segment, Segments};
use crate::{in_order, is_zero};

/// Bytes of the sums of a block as sent: five of the weak sum, twelve of the strong one.
///
/// Copies are verified by another hash. A block in place is accepted by its strong sum alone: 96 bits of BLAKE3 under a key
/// drawn for each sync, after the content was written. With 2^32 differing blocks, the most an index holds, one is
/// mistaken for equal in one of 2^64 syncs, whatever their content.
pub const SUMS: usize = 17;
const WEAK: usize = 5;

/// Bytes that are read and summed in one step, and covered by one report.
pub(super) const CHUNK: u64 = 4 << 20;

const SMALLEST: u64 = 512;
const LARGEST: u64 = 128 << 10;

/// What both sides need to compute the same sums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SumParams {
    /// Bytes of the destination to report.
    pub size: u64,
    /// Block size in bytes: a power of two from 512 to 128 KiB.
    pub block: u32,
    /// Drawn for each sync, and known to both sides only.
    pub key: [u8; 32],
    /// Skip unreadable blocks; they match nothing.
    pub keep_going: bool,
}

impl SumParams {
    /// Parameters for a destination of `size` bytes: about as many blocks as a block has bytes, as in rsync.
    pub fn new(size: u64, key: [u8; 32]) -> SumParams {
        let block =
            (1..).map(|shift| 1u64 << shift).find(|b| b.saturating_mul(*b) >= size).unwrap_or(LARGEST);
        SumParams { size, block: block.clamp(SMALLEST, LARGEST) as u32, key, keep_going: false }
    }

    /// Refuses parameters out of range: they may come from a peer.
    ///
    /// # Errors
    /// `InvalidData` for parameters out of range.
    pub fn check(&self) -> io::Result<()> {
        let block = u64::from(self.block);
        if (SMALLEST..=LARGEST).contains(&block) && block.is_power_of_two() && self.size <= i64::MAX as u64 {
            return Ok(());
        }
        let text = format!("the peer asks for sums of blocks of {block} bytes");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }
}

/// What the destination reports of a range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SumReport {
    /// Reads as zeroes.
    Zero(Range<u64>),
    /// The sums of its blocks follow, in order, in the body of the message.
    Sums(Range<u64>),
}

impl SumReport {
    /// The range reported.
    pub fn range(&self) -> &Range<u64> {
        match self {
            SumReport::Zero(range) | SumReport::Sums(range) => range,
        }
    }
}

/// The sums of a block.
pub(super) type Sums = [u8; SUMS];

/// Stands for a block of zeroes, which is never copied.
pub(super) const ZERO: Sums = [0; SUMS];

/// Stands for an unreadable block. No other block has it, except with the probability of a collision.
pub(super) const UNREADABLE: Sums = [0xff; SUMS];

/// Computes sums.
pub(super) struct Hasher {
    pub weak: Weak,
    key: [u8; 32],
}

impl Hasher {
    pub(super) fn new(params: &SumParams) -> Hasher {
        // Neither the point nor the key of the strong sums may reveal the other.
        let point = blake3::derive_key("dsync rolling 2026 weak point", &params.key);
        let mut seed = [0; 8];
        seed.copy_from_slice(&point[..8]);
        Hasher { weak: Weak::new(u64::from_le_bytes(seed), params.block as usize), key: params.key }
    }

    /// The weak sum, cut to the bits that are sent.
    pub(super) fn short(weak: u64) -> u64 {
        weak & ((1 << (8 * WEAK)) - 1)
    }

    /// The sums of a block with this weak sum.
    pub(super) fn sums(&self, weak: u64, block: &[u8]) -> Sums {
        let mut sums = ZERO;
        sums[..WEAK].copy_from_slice(&weak.to_le_bytes()[..WEAK]);
        sums[WEAK..].copy_from_slice(&self.strong(block));
        sums
    }

    /// The strong sum.
    pub(super) fn strong(&self, block: &[u8]) -> [u8; SUMS - WEAK] {
        let mut strong = [0; SUMS - WEAK];
        strong.copy_from_slice(&blake3::keyed_hash(&self.key, block).as_bytes()[..SUMS - WEAK]);
        strong
    }
}

/// The weak part of sums, and the strong one.
pub(super) fn parts(sums: &Sums) -> (u64, &[u8]) {
    let mut weak = [0; 8];
    weak[..WEAK].copy_from_slice(&sums[..WEAK]);
    (u64::from_le_bytes(weak), &sums[WEAK..])
}

/// The destination's side: reports the sums of the first `params.size` bytes of `disk`, in order. Beyond its end it reads as
/// zeroes.
///
/// # Errors
/// If the disk or `say` fails; `InvalidData` for parameters out of range.
pub fn block_sums(
    disk: &Arc<dyn Disk>,
    params: &SumParams,
    mut say: impl FnMut((SumReport, Vec<u8>)) -> io::Result<()>,
) -> io::Result<()> {
    params.check()?;
    let hasher = Hasher::new(params);
    let block = params.block as usize;
    let here = params.size.min(disk.len());
    let mut segments = Segments::new(disk, std::iter::once(0..here).collect(), CHUNK);
    in_order(
        super::threads(),
        || segments.next(),
        Buf::default,
        |buf, segment| {
            let range = match segment {
                Segment::Hole(range) => return Ok((SumReport::Zero(range), Vec::new())),
                Segment::Data(range) => range,
            };
            let bad = super::read(disk, range.clone(), buf, params.block, params.keep_going)?;
            let mut bad = bad.iter().peekable();
            if bad.peek().is_none() && is_zero(buf) {
                return Ok((SumReport::Zero(range), Vec::new()));
            }
            let mut told = Vec::with_capacity(buf.len().div_ceil(block) * SUMS);
            for (block, at) in buf.chunks(block).zip((range.start..).step_by(block)) {
                while bad.next_if(|bad| bad.end <= at).is_some() {}
                match is_zero(block) {
                    _ if bad.peek().is_some_and(|bad| bad.start <= at) => told.extend(UNREADABLE),
                    true => told.extend(ZERO),
                    false => told.extend(hasher.sums(hasher.weak.sum(block), block)),
                }
            }
            Ok((SumReport::Sums(range), told))
        },
        &mut say,
    )?;
    if here < params.size { say((SumReport::Zero(here..params.size), Vec::new())) } else { Ok(()) }
}
