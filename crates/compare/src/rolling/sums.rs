//! What one side says of its blocks: how large they are, what their sums are, and how they are told.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use serde::{Deserialize, Serialize};

use super::cut::{Stretch, Stretches};
use super::weak::Weak;
use crate::{in_order, is_zero};

/// Bytes of the sums of a block as they are told: five of the weak one, twelve of the strong one.
///
/// What is copied is hashed again. A block that stands at its place is believed by its strong sum alone: 96 bits of a keyed
/// BLAKE3, whose key is drawn anew for every sync, after the content. So of 2^32 blocks that differ, the most that an index
/// takes, one is taken for equal in one of 2^64 syncs, whoever wrote them.
pub const SUMS: usize = 17;
const WEAK: usize = 5;

/// Bytes that are read and summed in one step, and told in one claim.
pub(super) const CHUNK: u64 = 4 << 20;

const SMALLEST: u64 = 512;
const LARGEST: u64 = 128 << 10;

/// What both sides must know to make the same sums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Bytes of the destination that are spoken of.
    pub size: u64,
    /// Bytes a block: a power of two from 512 to 128 KiB.
    pub block: u32,
    /// Drawn anew for every sync, and told to nobody else.
    pub key: [u8; 32],
    /// Go on behind blocks that can't be read: they fit nothing.
    pub keep_going: bool,
}

impl Shape {
    /// The shape for a destination of `size` bytes: about as many blocks as a block has bytes, as rsync has it.
    pub fn new(size: u64, key: [u8; 32]) -> Shape {
        let block =
            (1..).map(|shift| 1u64 << shift).find(|b| b.saturating_mul(*b) >= size).unwrap_or(LARGEST);
        Shape { size, block: block.clamp(SMALLEST, LARGEST) as u32, key, keep_going: false }
    }

    /// Refuses a shape that makes no sense: it may come from the other side of a link.
    ///
    /// # Errors
    /// `InvalidData` for a shape that nobody needs.
    pub fn check(&self) -> io::Result<()> {
        let block = u64::from(self.block);
        if (SMALLEST..=LARGEST).contains(&block) && block.is_power_of_two() && self.size <= i64::MAX as u64 {
            return Ok(());
        }
        let text = format!("the peer asks for sums of blocks of {block} bytes");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }
}

/// What the destination says of a stretch of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// It reads as zeroes.
    Zero(Range<u64>),
    /// Its blocks have these sums, one after the other; they come apart from this head.
    Sums(Range<u64>),
}

impl Told {
    /// The bytes that it speaks of.
    pub fn range(&self) -> &Range<u64> {
        match self {
            Told::Zero(range) | Told::Sums(range) => range,
        }
    }
}

/// The sums of a block.
pub(super) type Sums = [u8; SUMS];

/// Sums of blocks of zeroes: such blocks are no matter of copying.
pub(super) const ZERO: Sums = [0; SUMS];

/// Sums of blocks that can't be read. They are those of no other, but for a chance as small as that two blocks have equal ones.
pub(super) const UNREADABLE: Sums = [0xff; SUMS];

/// Makes sums.
pub(super) struct Summer {
    pub weak: Weak,
    key: [u8; 32],
}

impl Summer {
    pub(super) fn new(shape: &Shape) -> Summer {
        // The point and the key of the strong sums must not tell of each other.
        let point = blake3::derive_key("dsync rolling 2026 weak point", &shape.key);
        let mut seed = [0; 8];
        seed.copy_from_slice(&point[..8]);
        Summer { weak: Weak::new(u64::from_le_bytes(seed), shape.block as usize), key: shape.key }
    }

    /// The weak sum as it is told.
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

/// The destination's side: says of the first bytes of `disk` what they hold, in order. What lies beyond its end reads as
/// zeroes.
///
/// # Errors
/// Those of the disk and of `say`; `InvalidData` for a shape that nobody needs.
pub fn tell(
    disk: &Arc<dyn Disk>,
    shape: &Shape,
    mut say: impl FnMut((Told, Vec<u8>)) -> io::Result<()>,
) -> io::Result<()> {
    shape.check()?;
    let summer = Summer::new(shape);
    let block = shape.block as usize;
    let here = shape.size.min(disk.len());
    let mut stretches = Stretches::new(&**disk, here, CHUNK);
    in_order(
        super::threads(),
        || stretches.next(),
        Buf::default,
        |buf, stretch| {
            let range = match stretch {
                Stretch::Hole(range) => return Ok((Told::Zero(range), Vec::new())),
                Stretch::Data(range) => range,
            };
            let bad = super::read(disk, range.clone(), buf, shape.block, shape.keep_going)?;
            let mut bad = bad.iter().peekable();
            if bad.peek().is_none() && is_zero(buf) {
                return Ok((Told::Zero(range), Vec::new()));
            }
            let mut told = Vec::with_capacity(buf.len().div_ceil(block) * SUMS);
            for (block, at) in buf.chunks(block).zip((range.start..).step_by(block)) {
                while bad.next_if(|bad| bad.end <= at).is_some() {}
                match is_zero(block) {
                    _ if bad.peek().is_some_and(|bad| bad.start <= at) => told.extend(UNREADABLE),
                    true => told.extend(ZERO),
                    false => told.extend(summer.sums(summer.weak.sum(block), block)),
                }
            }
            Ok((Told::Sums(range), told))
        },
        &mut say,
    )?;
    if here < shape.size { say((Told::Zero(here..shape.size), Vec::new())) } else { Ok(()) }
}
