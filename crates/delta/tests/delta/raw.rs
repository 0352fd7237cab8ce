//! A second implementation of the format, written from its description: it puts together units that the encoder would never
//! make, with checksums that hold, so that what is behind the checksums is tried too.

use twox_hash::{XxHash3_64, XxHash3_128};

pub(crate) const HEADER: u8 = 1;
pub(crate) const FRAME: u8 = 2;
pub(crate) const TRAILER: u8 = 3;

pub(crate) fn unit(kind: u8, head: &[u8], body: &[u8]) -> Vec<u8> {
    let mut out = b"dsyn".to_vec();
    out.extend([kind, 0, 0, 0]);
    out.extend((head.len() as u32).to_le_bytes());
    out.extend((body.len() as u32).to_le_bytes());
    out.extend(head);
    out.extend(body);
    out
}

/// Kind, head and body of a unit, and what follows it.
pub(crate) type Split<'a> = (u8, &'a [u8], &'a [u8], &'a [u8]);

/// The unit at the front; `None` if it is not whole.
pub(crate) fn split(bytes: &[u8]) -> Option<Split<'_>> {
    let (prefix, rest) = bytes.split_first_chunk::<16>()?;
    let len = |at: usize| u32::from_le_bytes(prefix[at..at + 4].try_into().unwrap()) as usize;
    let (head, rest) = rest.split_at_checked(len(8))?;
    let (body, rest) = rest.split_at_checked(len(12))?;
    Some((prefix[4], head, body, rest))
}

pub(crate) fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value > 127 {
        out.push(value as u8 & 127 | 128);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

pub(crate) fn signed(value: i64) -> Vec<u8> {
    varint(if value < 0 { !(value as u64) << 1 | 1 } else { (value as u64) << 1 })
}

pub(crate) fn sealed(mut head: Vec<u8>) -> Vec<u8> {
    head.extend(XxHash3_128::oneshot(&head).to_le_bytes());
    head
}

pub(crate) fn frame_hash(stream: &[u8], sequence: u64, count: u32, records: &[u8], data: &[u8]) -> [u8; 16] {
    let mut all = stream.to_vec();
    all.extend(sequence.to_le_bytes());
    all.extend(count.to_le_bytes());
    all.extend((data.len() as u32).to_le_bytes());
    all.extend(XxHash3_128::oneshot(data).to_le_bytes());
    all.extend(records);
    XxHash3_128::oneshot(&all).to_le_bytes()
}

/// The head of a frame of any content.
pub(crate) fn frame_head(stream: &[u8], sequence: u64, count: u32, records: &[u8], data: &[u8]) -> Vec<u8> {
    let mut head = sequence.to_le_bytes().to_vec();
    head.extend([0; 4]);
    head.extend(count.to_le_bytes());
    head.extend((data.len() as u32).to_le_bytes());
    head.extend(frame_hash(stream, sequence, count, records, data));
    head.extend(records);
    head
}

pub(crate) fn frame(stream: &[u8], sequence: u64, count: u32, records: &[u8], data: &[u8]) -> Vec<u8> {
    unit(FRAME, &frame_head(stream, sequence, count, records, data), data)
}

pub(crate) fn trailer(totals: [u64; 5], header_head: &[u8], frame_hashes: &[[u8; 16]]) -> Vec<u8> {
    let mut digest = blake3::Hasher::new();
    digest.update(header_head);
    frame_hashes.iter().for_each(|hash| {
        digest.update(hash);
    });
    let mut head: Vec<u8> = totals.iter().flat_map(|n| n.to_le_bytes()).collect();
    head.extend(digest.finalize().as_bytes());
    unit(TRAILER, &head, &[])
}

/// Makes every checksum hold again, as far as there are units: what a patient forger would do, and a fuzzer must.
pub(crate) fn repair(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = bytes;
    let mut stream = [0; 16];
    let mut header_head = Vec::new();
    let mut hashes = Vec::new();
    while let Some((kind, head, body, behind)) = split(rest) {
        let mut head = head.to_vec();
        match kind {
            HEADER if head.len() >= 48 => {
                head.truncate(head.len() - 16);
                head = sealed(head);
                stream.copy_from_slice(&head[16..32]);
                header_head = head.clone();
            }
            FRAME if head.len() >= 44 => {
                let sequence = u64::from_le_bytes(head[..8].try_into().unwrap());
                let count = u32::from_le_bytes(head[12..16].try_into().unwrap());
                let zstd = head[8] & 1 == 1;
                let data = if zstd {
                    head[36..44].copy_from_slice(&XxHash3_64::oneshot(body).to_le_bytes());
                    let data = zstd::bulk::decompress(body, 1 << 20).unwrap_or_default();
                    head[16..20].copy_from_slice(&(data.len() as u32).to_le_bytes());
                    data
                } else {
                    head[16..20].copy_from_slice(&(body.len() as u32).to_le_bytes());
                    body.to_vec()
                };
                let records = if zstd { &head[44..] } else { &head[36..] };
                let hash = frame_hash(&stream, sequence, count, records, &data);
                head[20..36].copy_from_slice(&hash);
                hashes.push(hash);
            }
            TRAILER if head.len() >= 72 => {
                let totals =
                    std::array::from_fn(|i| u64::from_le_bytes(head[i * 8..i * 8 + 8].try_into().unwrap()));
                head = trailer(totals, &header_head, &hashes)[16..].to_vec();
            }
            _ => {}
        }
        out.extend(unit(kind, &head, body));
        rest = behind;
    }
    out.extend(rest);
    out
}
