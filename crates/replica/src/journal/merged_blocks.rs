//! What a destination without times may be while a delta is merged into it: each block of its fingerprint is as it was, or as the delta leaves it.

use std::io;
use std::ops::Range;

use delta::{Frame, Header, Record};

use crate::journal::Target;
use crate::state::fingerprint::{PRINT_BLOCK, samples};
use crate::state::lineage::Stamp;

/// The blocks of a fingerprint, as deltas leave them.
pub(crate) struct MergedBlocks {
    blocks: Vec<MergedBlock>,
}

/// What a block may be meanwhile, besides what it was.
struct MergedBlock {
    at: u64,
    /// Hashes of what each delta leaves there.
    hashes: Vec<String>,
    /// A delta leaves what is not known here.
    is_unknown: bool,
}

impl MergedBlocks {
    /// The blocks of a destination with this stamp, before any delta.
    pub(crate) fn of(stamp: &Stamp) -> MergedBlocks {
        let block = |at| MergedBlock { at, hashes: Vec::new(), is_unknown: false };
        MergedBlocks { blocks: samples(stamp.size, &stamp.marks).map(block).collect() }
    }

    /// The fingerprint of a destination while the deltas are merged into it: each block is as it was, or as one of them leaves it. Of one of which
    /// that is not known nothing is said.
    pub(crate) fn meanwhile(&self, before: &Stamp, now: &Stamp) -> String {
        let hashes = device::hashes(&before.print).zip(device::hashes(&now.print)).zip(&self.blocks);
        let expected = hashes.map(|((before, now), block)| match block {
            block if block.hashes.iter().any(|hash| hash == now) => now,
            MergedBlock { is_unknown: true, .. } if before != now => device::UNREADABLE,
            _ => before,
        });
        expected.collect()
    }

    /// A delta changes a range; the hash of what it leaves in a block there, if that is known.
    fn leave(&mut self, range: &Range<u64>, mut hash: impl FnMut(u64) -> Option<String>) {
        for block in &mut self.blocks {
            let end = block.at + PRINT_BLOCK;
            if range.start < end && block.at < range.end {
                let is_whole = range.start <= block.at && end <= range.end;
                match is_whole.then(|| hash(block.at)).flatten() {
                    Some(hash) => block.hashes.push(hash),
                    None => block.is_unknown = true,
                }
            }
        }
    }
}

impl Target for MergedBlocks {
    fn rewind(&mut self, _header: &Header, known: u64) -> io::Result<()> {
        self.leave(&(known..u64::MAX), |_| None);
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
                        Some(device::hash_of_bytes(&own[from..from + PRINT_BLOCK as usize]))
                    });
                }
                Record::Zero { .. } => {
                    let zeroes = device::hash_of_bytes(&[0; PRINT_BLOCK as usize]);
                    self.leave(&range, |_| Some(zeroes.clone()));
                }
                _ => self.leave(&range, |_| None),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The stamp of a disk of sixteen blocks, the first of which have this content.
    fn stamp(first: &[u8]) -> Stamp {
        let content = [first, &[0; 16]].concat();
        let content = &content[..16];
        let print =
            content.iter().map(|byte| device::hash_of_bytes(&[*byte; PRINT_BLOCK as usize])).collect();
        Stamp { size: content.len() as u64 * PRINT_BLOCK, print, ..Stamp::default() }
    }

    /// A frame of one block.
    fn block(at: u64, byte: u8) -> Frame {
        let records = vec![Record::Data { offset: at * PRINT_BLOCK, len: PRINT_BLOCK }];
        Frame { records, data: device::Buf::from(&[byte; PRINT_BLOCK as usize][..]) }
    }

    #[test]
    fn a_block_is_as_it_was_or_as_a_delta_leaves_it_and_nothing_else() {
        let before = stamp(&[1, 2, 3]);
        let mut merged = MergedBlocks::of(&before);
        // Two batches write one block.
        for frame in [block(1, 7), block(1, 8), block(2, 9)] {
            merged.frame(frame).unwrap();
        }
        let fits = |now: &[u8]| device::agree(&merged.meanwhile(&before, &stamp(now)), &stamp(now).print);
        for now in [[1, 2, 3], [1, 7, 3], [1, 8, 3], [1, 8, 9], [1, 2, 9]] {
            assert!(fits(&now), "{now:?}");
        }
        for now in [[4, 8, 9], [1, 9, 9], [1, 8, 7]] {
            assert!(!fits(&now), "{now:?}");
        }
        // A part of a block may leave anything, and the others must still agree.
        let data = device::Buf::from(&[5; 512][..]);
        let part = Record::Data { offset: PRINT_BLOCK, len: 512 };
        merged.frame(Frame { records: vec![part], data }).unwrap();
        let fits = |now: &[u8]| device::agree(&merged.meanwhile(&before, &stamp(now)), &stamp(now).print);
        assert!(fits(&[1, 6, 3]) && !fits(&[6, 6, 3]));
    }
}
