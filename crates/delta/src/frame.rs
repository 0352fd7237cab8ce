//! Frames: records, and the data of the data records one after the other.

use device::Buf;
use extents::varint;
use twox_hash::{XxHash3_64, XxHash3_128};
use uuid::Uuid;

use crate::limits::{FIXED, MAX_DATA, MAX_RECORDS, MAX_SIZE};
use crate::unit::Fields;
use crate::{Error, Result, Unit, UnitKind};

const ZSTD: u8 = 1;

const DATA: u8 = 0;
const ZERO: u8 = 1;
const COPY: u8 = 2;
const UNSURE: u8 = 3;

/// One change. Offsets and lengths in bytes; no length is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// The bytes are those of the frame's data, where that of the data records before ends.
    Data {
        /// First byte on the disk.
        offset: u64,
        /// At most [`MAX_DATA`].
        len: u64,
    },
    /// The bytes read as zeroes; their space may be given back.
    Zero {
        /// First byte on the disk.
        offset: u64,
        /// Up to the end of the disk.
        len: u64,
    },
    /// The bytes are those that stand elsewhere in the destination. In deltas of the method `rolling` only.
    Copy {
        /// First byte on the disk.
        offset: u64,
        /// At most [`MAX_DATA`].
        len: u64,
        /// First byte of where they stand.
        from: u64,
        /// XXH3-128 of the bytes, low half first.
        hash: [u8; 16],
    },
    /// The bytes could not be read at the source. The destination keeps what it has, and cannot vouch for it: they join its
    /// unsure set.
    Unsure {
        /// First byte on the disk.
        offset: u64,
        /// Up to the end of the disk.
        len: u64,
    },
}

impl Record {
    /// First byte on the disk.
    pub fn offset(&self) -> u64 {
        match *self {
            Record::Data { offset, .. }
            | Record::Zero { offset, .. }
            | Record::Copy { offset, .. }
            | Record::Unsure { offset, .. } => offset,
        }
    }

    /// Bytes on the disk.
    pub fn len(&self) -> u64 {
        match *self {
            Record::Data { len, .. }
            | Record::Zero { len, .. }
            | Record::Copy { len, .. }
            | Record::Unsure { len, .. } => len,
        }
    }

    /// True for a record of no bytes, which no delta may have.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first byte behind it.
    pub fn end(&self) -> u64 {
        self.offset().saturating_add(self.len())
    }

    /// Adds what follows at once, if that can be said with one record. True if it was.
    pub fn extend(&mut self, next: Record) -> bool {
        let follows = self.end() == next.offset();
        match (self, next) {
            (Record::Data { len, .. }, Record::Data { len: more, .. })
            | (Record::Zero { len, .. }, Record::Zero { len: more, .. })
            | (Record::Unsure { len, .. }, Record::Unsure { len: more, .. })
                if follows =>
            {
                *len += more;
                true
            }
            _ => false,
        }
    }

    /// What is wrong with the record by itself.
    fn fault(&self) -> Option<&'static str> {
        let (len, limited) = (self.len(), matches!(self, Record::Data { .. } | Record::Copy { .. }));
        let from = if let Record::Copy { from, .. } = *self { from } else { 0 };
        match () {
            _ if len == 0 => Some("is empty"),
            _ if limited && len > MAX_DATA as u64 => Some("is longer than a frame may be"),
            _ if self.end() > MAX_SIZE => Some("is beyond the end of any disk"),
            _ if from.saturating_add(len) > MAX_SIZE => Some("copies from beyond the end of any disk"),
            _ => None,
        }
    }
}

/// Records in order, and their data. A frame as it comes out of a [`crate::Decoder`] is verified.
#[derive(Debug, Default)]
pub struct Frame {
    /// At least one, at most [`MAX_RECORDS`].
    pub records: Vec<Record>,
    /// What the data records put on the disk, one after the other, at most [`MAX_DATA`]: where they are multiples of
    /// 4096 bytes, each lies aligned and can be written with direct I/O as it is.
    pub data: Buf,
}

/// zstd with its context kept. A thread of its own needs one of its own.
pub struct Compressor(zstd::bulk::Compressor<'static>);

impl Compressor {
    /// A compressor of a zstd level; 0 is zstd's default.
    ///
    /// # Errors
    /// [`Error::Compression`] if memory is short.
    pub fn new(level: i32) -> Result<Compressor> {
        zstd::bulk::Compressor::new(level).map(Compressor).map_err(Error::Compression)
    }

    /// The data compressed, if that is worth it.
    fn shrink(&mut self, data: &[u8]) -> Result<Option<Buf>> {
        // What saves less than a thirty-second is not worth the time to unpack it.
        let limit = data.len() - data.len() / 32;
        if limit == data.len() || looks_random(data) {
            return Ok(None);
        }
        let mut out = Buf::scratch(limit);
        match self.0.compress_to_buffer(data, &mut out[..]) {
            Ok(len) => {
                out.set_len(len);
                Ok(Some(out))
            }
            // The one thing that fails with enough memory: it does not fit, which is the answer.
            Err(_) => Ok(None),
        }
    }
}

/// True if a sample's bytes are spread as evenly as those of random or compressed data. Such data costs zstd most and gains
/// nothing; runs of it that repeat, which might, are rare in changed blocks.
fn looks_random(data: &[u8]) -> bool {
    const SAMPLES: usize = 128;
    const SAMPLE: usize = 64;
    if data.len() < 4 * SAMPLES * SAMPLE {
        return false;
    }
    let mut counts = [0u32; 256];
    for i in 0..SAMPLES {
        let at = i * (data.len() - SAMPLE) / (SAMPLES - 1);
        for &byte in &data[at..at + SAMPLE] {
            counts[usize::from(byte)] += 1;
        }
    }
    // Expected of evenly spread bytes: n²/256 + n. A twentieth of zeroes in the sample doubles nothing, but adds half.
    let n = (SAMPLES * SAMPLE) as u64;
    let sum: u64 = counts.iter().map(|&c| u64::from(c) * u64::from(c)).sum();
    sum * 100 < (n * n / 256 + n) * 108
}

/// zstd with its context kept.
pub struct Decompressor(zstd::bulk::Decompressor<'static>);

impl Decompressor {
    /// A decompressor.
    ///
    /// # Errors
    /// [`Error::Compression`] if memory is short.
    pub fn new() -> Result<Decompressor> {
        zstd::bulk::Decompressor::new().map(Decompressor).map_err(Error::Compression)
    }
}

/// What must be known of a frame to put it in its place in a delta.
#[derive(Debug, Clone)]
pub(crate) struct FrameSummary {
    pub sequence: u64,
    pub hash: [u8; 16],
    /// Where the first record begins.
    pub start: u64,
    /// The highest end of a record.
    pub end: u64,
    /// The first record that does not lie behind the one before.
    pub disorder: Option<Record>,
    /// A copy record, the one that reads farthest.
    pub copy: Option<Record>,
    pub records: u64,
    pub data: u64,
    pub zero: u64,
    pub copied: u64,
}

impl FrameSummary {
    /// Looks at the records; refuses those that are wrong by themselves, and data that is not theirs.
    fn gather(sequence: u64, records: &[Record], data_len: usize) -> Result<FrameSummary> {
        let unit = sequence.saturating_add(1);
        let Some(first) = records.first() else {
            return Err(Error::Damaged { unit, what: "it has no records" });
        };
        for (what, found, limit) in
            [("records", records.len(), MAX_RECORDS), ("bytes of data", data_len, MAX_DATA)]
        {
            if found > limit {
                return Err(Error::TooLong { unit, what, found: found as u64, limit: limit as u64 });
            }
        }
        let mut facts = FrameSummary {
            sequence,
            hash: [0; 16],
            start: first.offset(),
            end: 0,
            disorder: None,
            copy: None,
            records: records.len() as u64,
            data: 0,
            zero: 0,
            copied: 0,
        };
        for record in records {
            if let Some(why) = record.fault() {
                return Err(Error::Record { unit, offset: record.offset(), len: record.len(), why });
            }
            if record.offset() < facts.end && facts.disorder.is_none() {
                facts.disorder = Some(*record);
            }
            facts.end = facts.end.max(record.end());
            // No sum overflows: 4096 lengths of up to 2^63 might, so zeroes saturate; no honest delta comes near.
            match *record {
                Record::Data { len, .. } => facts.data += len,
                Record::Zero { len, .. } => facts.zero = facts.zero.saturating_add(len),
                Record::Unsure { .. } => {}
                Record::Copy { len, from, .. } => {
                    facts.copied += len;
                    let reach =
                        |r: &Record| if let Record::Copy { from, len, .. } = *r { from + len } else { 0 };
                    if facts.copy.as_ref().is_none_or(|r| reach(r) < from + len) {
                        facts.copy = Some(*record);
                    }
                }
            }
        }
        if facts.data != data_len as u64 {
            return Err(Error::Damaged { unit, what: "the length of its data differs from its records" });
        }
        Ok(facts)
    }
}

/// An encoded frame, to be put in its place by [`crate::Encoder::append`].
#[derive(Debug)]
pub struct Encoded {
    pub(crate) unit: Unit,
    pub(crate) facts: FrameSummary,
}

/// A frame that is sound in itself, to be put in its place by [`crate::Decoder::append`].
#[derive(Debug)]
pub struct Decoded {
    pub(crate) frame: Frame,
    pub(crate) facts: FrameSummary,
}

/// Encodes one frame: the part that costs, with no state but the compressor's, so that several threads may encode frames of
/// one delta at once. `stream` is the header's, `sequence` counts frames from 0.
///
/// Data that is not compressed is not copied, it moves.
///
/// # Errors
/// If no delta may have the frame.
pub fn encode_frame(
    stream: Uuid,
    sequence: u64,
    frame: Frame,
    compressor: Option<&mut Compressor>,
) -> Result<Encoded> {
    let Frame { records, data } = frame;
    let mut facts = FrameSummary::gather(sequence, &records, data.len())?;
    let mut encoded = Vec::with_capacity(records.len() * 8);
    encode_records(&records, &mut encoded);
    facts.hash = hash(stream, sequence, records.len() as u32, &encoded, &data);
    let (mut flags, mut body) = (0, data);
    if let Some(shrunk) = compressor.map(|c| c.shrink(&body)).transpose()?.flatten() {
        (flags, body) = (ZSTD, shrunk);
    }
    let mut head = Vec::with_capacity(FIXED + 8 + encoded.len());
    head.extend(sequence.to_le_bytes());
    head.extend([flags, 0, 0, 0]);
    head.extend((records.len() as u32).to_le_bytes());
    head.extend((facts.data as u32).to_le_bytes());
    head.extend(facts.hash);
    if flags & ZSTD != 0 {
        // The hash above is of what comes out. This one keeps zstd from ever seeing damaged data, some of which it would
        // not mind.
        head.extend(XxHash3_64::oneshot(&body).to_le_bytes());
    }
    head.append(&mut encoded);
    Ok(Encoded { unit: Unit { kind: UnitKind::Frame, head, body }, facts })
}

/// Decodes and verifies one frame: the part that costs, with no state but the decompressor's. `sequence` is the number
/// expected.
///
/// Data that is not compressed is not copied, it moves.
///
/// # Errors
/// If the frame is damaged, or not the one expected.
pub fn decode_frame(
    stream: Uuid,
    sequence: u64,
    unit: Unit,
    decompressor: Option<&mut Decompressor>,
) -> Result<Decoded> {
    let number = sequence.saturating_add(1);
    let damaged = |what| Error::Damaged { unit: number, what };
    if unit.kind != UnitKind::Frame {
        return Err(Error::Unexpected { unit: number, found: unit.kind, expected: "a frame" });
    }
    Unit::check_lengths(unit.kind, number, unit.head.len(), unit.body.len())?;
    let Unit { head, body, .. } = unit;
    let mut fields = Fields { rest: &head, unit: number };
    let found = fields.u64()?;
    if found != sequence {
        return Err(Error::Sequence { expected: sequence, found });
    }
    let flags = fields.u8()?;
    if flags & !ZSTD != 0 {
        return Err(Error::Flags { flags: u32::from(flags & !ZSTD) });
    }
    fields.reserved(3)?;
    let (count, data_len) = (fields.u32()?, fields.u32()? as usize);
    for (what, found, limit) in
        [("records", count as usize, MAX_RECORDS), ("bytes of data", data_len, MAX_DATA)]
    {
        if found > limit {
            return Err(Error::TooLong { unit: number, what, found: found as u64, limit: limit as u64 });
        }
    }
    let stated = fields.array()?;
    let data = if flags & ZSTD == 0 {
        body
    } else {
        if XxHash3_64::oneshot(&body).to_le_bytes() != fields.array()? {
            return Err(Error::Foreign { frame: sequence });
        }
        let mut data = Buf::scratch(data_len);
        let mut own = None;
        let decompressor = match decompressor {
            Some(kept) => kept,
            None => own.insert(Decompressor::new()?),
        };
        match decompressor.0.decompress_to_buffer(&body[..], &mut data[..]) {
            Ok(len) if len == data_len => data,
            _ => return Err(damaged("its data cannot be decompressed")),
        }
    };
    if data.len() != data_len {
        return Err(damaged("its data has the wrong length"));
    }
    let encoded = fields.rest;
    let actual = hash(stream, sequence, count, encoded, &data);
    if actual != stated {
        return Err(Error::Foreign { frame: sequence });
    }
    let records = decode_records(encoded, count).ok_or(damaged("its records are malformed"))?;
    let facts = FrameSummary { hash: actual, ..FrameSummary::gather(sequence, &records, data.len())? };
    Ok(Decoded { frame: Frame { records, data }, facts })
}

/// The hash of a frame's decoded content, bound to its place. Data is hashed by itself first: in one piece, as it lies.
fn hash(stream: Uuid, sequence: u64, count: u32, records: &[u8], data: &[u8]) -> [u8; 16] {
    let mut all = Vec::with_capacity(48 + records.len());
    all.extend(stream.as_bytes());
    all.extend(sequence.to_le_bytes());
    all.extend(count.to_le_bytes());
    all.extend((data.len() as u32).to_le_bytes());
    all.extend(XxHash3_128::oneshot(data).to_le_bytes());
    all.extend(records);
    XxHash3_128::oneshot(&all).to_le_bytes()
}

fn encode_records(records: &[Record], out: &mut Vec<u8>) {
    let mut at = 0;
    for record in records {
        out.push(match record {
            Record::Data { .. } => DATA,
            Record::Zero { .. } => ZERO,
            Record::Copy { .. } => COPY,
            Record::Unsure { .. } => UNSURE,
        });
        // Both are below 2^63, so their difference fits.
        varint::put_signed(out, record.offset() as i64 - at as i64);
        varint::put(out, record.len());
        if let Record::Copy { from, hash, .. } = record {
            varint::put(out, *from);
            out.extend(hash);
        }
        at = record.end();
    }
}

fn decode_records(mut bytes: &[u8], count: u32) -> Option<Vec<Record>> {
    // At least three bytes each, so that a lie about the count costs nothing.
    if u64::from(count) * 3 > bytes.len() as u64 {
        return None;
    }
    let mut records = Vec::with_capacity(count as usize);
    let mut at = 0i64;
    for _ in 0..count {
        let (&kind, rest) = bytes.split_first()?;
        bytes = rest;
        let offset = at.checked_add(varint::get_signed(&mut bytes).ok()?)?;
        let len = varint::get(&mut bytes).ok()?;
        at = i64::try_from((u64::try_from(offset).ok()?).checked_add(len)?).ok()?;
        let offset = offset as u64;
        records.push(match kind {
            DATA => Record::Data { offset, len },
            ZERO => Record::Zero { offset, len },
            UNSURE => Record::Unsure { offset, len },
            COPY => {
                let from = varint::get(&mut bytes).ok()?;
                let (hash, rest) = bytes.split_first_chunk()?;
                bytes = rest;
                Record::Copy { offset, len, from, hash: *hash }
            }
            _ => return None,
        });
    }
    bytes.is_empty().then_some(records)
}
