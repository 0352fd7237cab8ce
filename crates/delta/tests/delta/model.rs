//! A disk in memory, and deltas to try on it.

use delta::{Encoder, Epoch, Event, Frame, Header, Method, Reader, Record, Writer};
use device::Buf;
use proptest::prelude::*;
use testing::Random;
use uuid::Uuid;

pub(crate) fn epoch(number: u64) -> Epoch {
    Epoch { number, id: Uuid::from_u128(u128::from(number) << 64 | 0xe) }
}

pub(crate) fn header(size_before: u64, size_after: u64, chain: &[u64]) -> Header {
    Header {
        stream: Uuid::from_u128(0x5),
        source: Uuid::from_u128(0x50),
        chain: chain.iter().copied().map(epoch).collect(),
        size_before,
        size_after,
        block_size: 4096,
        method: Method::Tracked,
        binds: None,
        resumes: None,
        fuzzy: false,
        batch: false,
        partial: false,
        lives: lineage::Lives::default(),
    }
}

/// One change of a disk in memory.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub offset: u64,
    pub len: u64,
    /// `None` for zeroes, else what the data is made of.
    pub fill: Option<u8>,
}

impl Change {
    fn data(&self) -> Vec<u8> {
        let fill = self.fill.unwrap_or(0);
        (0..self.len).map(|i| fill.wrapping_add(((i + self.offset) % 7) as u8).max(1)).collect()
    }
}

/// Changes of a disk of `size` bytes, ascending and apart.
pub(crate) fn changes(size: u64) -> impl Strategy<Value = Vec<Change>> {
    let change = (0u64..900, 1u64..1500, proptest::option::weighted(0.7, any::<u8>()));
    proptest::collection::vec(change, 0..25).prop_map(move |parts| {
        let mut at = 0;
        let mut out = Vec::new();
        for (gap, len, fill) in parts {
            let offset = at + gap;
            if offset >= size {
                break;
            }
            let len = len.min(size - offset);
            out.push(Change { offset, len, fill });
            at = offset + len;
        }
        out
    })
}

/// Frames of at most `per_frame` records each.
pub(crate) fn frames(changes: &[Change], per_frame: usize) -> Vec<Frame> {
    changes
        .chunks(per_frame)
        .map(|chunk| {
            let records = chunk.iter().map(|c| match c.fill {
                Some(_) => Record::Data { offset: c.offset, len: c.len },
                None => Record::Zero { offset: c.offset, len: c.len },
            });
            let data: Vec<u8> = chunk.iter().filter(|c| c.fill.is_some()).flat_map(Change::data).collect();
            Frame { records: records.collect(), data: Buf::from(&data[..]) }
        })
        .collect()
}

/// A delta as a stream of bytes.
pub(crate) fn delta(header: &Header, frames: Vec<Frame>, compression: Option<i32>) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new());
    let (mut encoder, unit) = Encoder::new(header, compression).unwrap();
    writer.unit(&unit).unwrap();
    for frame in frames {
        writer.unit(&encoder.frame(frame).unwrap()).unwrap();
    }
    writer.unit(&encoder.trailer()).unwrap();
    writer.into_inner()
}

/// Everything in a delta, read strictly.
pub(crate) fn read(bytes: &[u8]) -> delta::Result<(Header, Vec<Frame>)> {
    let mut reader = Reader::new(bytes);
    let header = reader.header()?.clone();
    let mut frames = Vec::new();
    while let Some(event) = reader.next()? {
        if let Event::Frame(frame) = event {
            frames.push(frame);
        }
    }
    reader.expect_end()?;
    Ok((header, frames))
}

/// Merges a delta: first the size, then the records in order.
pub(crate) fn merge(disk: &mut Vec<u8>, bytes: &[u8]) {
    let (header, frames) = read(bytes).unwrap();
    disk.resize(header.size_after as usize, 0);
    for frame in frames {
        let mut data = &frame.data[..];
        for record in &frame.records {
            let (offset, len) = (record.offset() as usize, record.len() as usize);
            match *record {
                Record::Data { .. } => {
                    let (own, rest) = data.split_at(len);
                    disk[offset..offset + len].copy_from_slice(own);
                    data = rest;
                }
                Record::Zero { .. } => disk[offset..offset + len].fill(0),
                Record::Copy { from, .. } => {
                    disk.copy_within(from as usize..from as usize + len, offset);
                }
                Record::Unsure { .. } => {}
            }
        }
        assert!(data.is_empty());
    }
}

/// Changes of a disk of `size` bytes, for those who have numbers of their own.
pub(crate) fn changes_of(random: &mut Random, size: u64) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut at = 0;
    for _ in 0..random.below(12) {
        let offset = at + random.below(900);
        if offset >= size {
            break;
        }
        let len = (1 + random.below(1500)).min(size - offset);
        let fill = (random.below(3) > 0).then(|| random.bits() as u8);
        changes.push(Change { offset, len, fill });
        at = offset + len;
    }
    changes
}
