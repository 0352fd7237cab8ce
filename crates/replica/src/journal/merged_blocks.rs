//! What a destination without times may be while a delta is merged into it: each block of its fingerprint is as it was, or as the delta leaves it.

use std::io;
use std::ops::Range;

use delta::{Frame, Header, Record};

use crate::journal::Target;
use crate::state::fingerprint::{PRINT_BLOCK, samples};
use crate::state::lineage::Stamp;

/// The blocks of a fingerprint, as a delta leaves them.
pub(crate) struct MergedBlocks {
    blocks: Vec<(u64, Leaves)>,
}

/// What a delta makes of a block.
enum Leaves {
    AsItWas,
    /// What has this hash.
    Hash(String),
    /// What is not known here.
    Unknown,
}

impl MergedBlocks {
    /// The blocks of a destination with this stamp, before any delta.
    pub(crate) fn of(stamp: &Stamp) -> MergedBlocks {
        MergedBlocks { blocks: samples(stamp.size, &stamp.marks).map(|at| (at, Leaves::AsItWas)).collect() }
    }

    /// The fingerprint of a destination while the delta is merged into it: each block is as it was, or as the delta leaves it. Of one of which that
    /// is not known nothing is said.
    pub(crate) fn meanwhile(&self, before: &Stamp, now: &Stamp) -> String {
        let hashes = device::hashes(&before.print).zip(device::hashes(&now.print)).zip(&self.blocks);
        let expected = hashes.map(|((before, now), (_, leaves))| match leaves {
            Leaves::Hash(after) if after == now => now,
            Leaves::Unknown if before != now => device::UNREADABLE,
            _ => before,
        });
        expected.collect()
    }

    fn leave(&mut self, range: &Range<u64>, mut leaves: impl FnMut(u64) -> Leaves) {
        for (at, block) in &mut self.blocks {
            let end = *at + PRINT_BLOCK;
            if range.start <= *at && end <= range.end {
                *block = leaves(*at);
            } else if range.start < end && *at < range.end {
                *block = Leaves::Unknown;
            }
        }
    }
}

impl Target for MergedBlocks {
    fn rewind(&mut self, _header: &Header, known: u64) -> io::Result<()> {
        self.leave(&(known..u64::MAX), |_| Leaves::Unknown);
        Ok(())
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        let mut data = &frame.data[..];
        for record in &frame.records {
            let range = record.offset()..record.end();
            match record {
                Record::Data { len, .. } => {
                    let (own, rest) =
                        data.split_at_checked(*len as usize).ok_or(io::ErrorKind::InvalidData)?;
                    data = rest;
                    self.leave(&range, |at| {
                        let from = (at - range.start) as usize;
                        Leaves::Hash(device::hash_of_bytes(&own[from..from + PRINT_BLOCK as usize]))
                    });
                }
                Record::Zero { .. } => {
                    let zeroes = device::hash_of_bytes(&[0; PRINT_BLOCK as usize]);
                    self.leave(&range, |_| Leaves::Hash(zeroes.clone()));
                }
                _ => self.leave(&range, |_| Leaves::Unknown),
            }
        }
        Ok(())
    }
}
