//! What is written to a source.

use device::Disk;
use testing::Random;

use crate::machine::host::State;
use crate::machine::inode::PAGE;
use crate::machine::kernel::BLOCK;

/// A write to the source.
#[derive(Debug, Clone)]
pub(crate) enum Write {
    /// Data.
    Data { offset: u64, bytes: Vec<u8> },
    /// Zeroes.
    Zero { offset: u64, len: u64, unmap: bool },
}

impl Write {
    pub(crate) fn draw(dice: &mut Random, len: u64) -> Write {
        if dice.one_in(6) {
            return Write::trim(dice, len);
        }
        let sectors = len / 512;
        let first = dice.below(sectors);
        let count = match dice.below(4) {
            0 => 1,
            1 => dice.within(1..40),
            _ => 8,
        };
        let count = count.min(sectors - first);
        let byte = dice.bits() as u8;
        let mut bytes = vec![byte; (count * 512) as usize];
        bytes.chunks_mut(512).for_each(|sector| sector[..8].copy_from_slice(&dice.bits().to_le_bytes()));
        Write::Data { offset: first * 512, bytes }
    }

    pub(crate) fn trim(dice: &mut Random, len: u64) -> Write {
        let first = dice.below(len / BLOCK);
        let count = dice.within(1..12).min(len / BLOCK - first);
        Write::Zero { offset: first * BLOCK, len: count * BLOCK, unmap: dice.one_in(2) }
    }

    /// The pages that it touches.
    pub(crate) fn pages(&self) -> std::ops::Range<u64> {
        let (offset, len) = match self {
            Write::Data { offset, bytes } => (*offset, bytes.len() as u64),
            Write::Zero { offset, len, .. } => (*offset, *len),
        };
        offset / PAGE as u64..(offset + len).div_ceil(PAGE as u64)
    }

    /// Through the served disk.
    pub(crate) fn through(&self, disk: &impl Disk) -> std::io::Result<()> {
        match self {
            Write::Data { offset, bytes } => disk.write_at(*offset, bytes),
            Write::Zero { offset, len, unmap } => disk.zero(*offset, *len, *unmap, false),
        }
    }

    /// To a disk in use.
    pub(crate) fn queue(&self, state: &mut State, disk: u64) {
        match self {
            Write::Data { offset, bytes } => state.tracker(disk).begin(*offset, bytes.clone()),
            Write::Zero { offset, len, .. } => state.tracker(disk).begin(*offset, vec![0; *len as usize]),
        }
    }
}
