//! Finding changes without a record: checksums of aligned blocks on both sides.
//!
//! The destination's hashes flow to the source ([`answer`]), which compares them with its own blocks while it holds them
//! ([`differences`]), so that each side reads once. Holes are told, not read.

mod ordered;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use serde::{Deserialize, Serialize};

pub use ordered::in_order;

/// Bytes of the digest of a block: half a BLAKE3, so that even a guest that chooses its blocks finds no two alike.
pub const DIGEST: usize = 16;

/// Bytes that are read and hashed in one step.
const CHUNK: u64 = 1 << 20;

/// What one side says of a stretch of its disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// It reads as zeroes.
    Zero(Range<u64>),
    /// Its blocks have these digests, one after the other; they come apart from this head.
    Digests(Range<u64>),
}

impl Claim {
    /// The bytes that it speaks of.
    pub fn range(&self) -> &Range<u64> {
        match self {
            Claim::Zero(range) | Claim::Digests(range) => range,
        }
    }
}

/// A stretch that differs, as the source has it.
#[derive(Debug)]
pub enum Difference {
    /// Data to be written.
    Data {
        /// Where, in bytes.
        offset: u64,
        /// What.
        data: Buf,
    },
    /// Zeroes.
    Zero(Range<u64>),
}

fn threads() -> usize {
    // Twice the cores: half of them wait for the disk while the other half hashes.
    std::thread::available_parallelism().map_or(2, |n| n.get()).saturating_mul(2).clamp(4, 32)
}

/// Cuts a disk into holes and chunks, ascending.
struct Chunks<'a> {
    disk: &'a dyn Disk,
    at: u64,
    end: u64,
    data: Option<Range<u64>>,
}

impl Chunks<'_> {
    /// The next stretch: a hole of any length, or allocated bytes up to the next multiple of a chunk.
    fn next(&mut self) -> io::Result<Option<Claim>> {
        if self.at >= self.end {
            return Ok(None);
        }
        if self.data.as_ref().is_none_or(|d| d.end <= self.at) {
            self.data = self.disk.allocated(self.at)?;
        }
        let hole_end = match &self.data {
            Some(data) => data.start.clamp(self.at, self.end),
            None => self.end,
        };
        // Holes are told in whole chunks alone: what is not aligned is read with its neighbours.
        let hole_end = if hole_end == self.end { hole_end } else { hole_end / CHUNK * CHUNK };
        let start = self.at;
        if hole_end > start {
            self.at = hole_end;
            return Ok(Some(Claim::Zero(start..hole_end)));
        }
        self.at = ((start / CHUNK + 1) * CHUNK).min(self.end);
        Ok(Some(Claim::Digests(start..self.at)))
    }
}

fn digest(block: &[u8]) -> [u8; DIGEST] {
    let mut short = [0; DIGEST];
    short.copy_from_slice(&blake3::hash(block).as_bytes()[..DIGEST]);
    short
}

/// The destination's side: says of every stretch of the first `size` bytes of `disk` what it holds, in order. What lies
/// beyond the disk's end reads as zeroes.
///
/// # Errors
/// Those of the disk and of `say`.
pub fn answer(
    disk: &Arc<dyn Disk>,
    size: u64,
    block_size: u32,
    mut say: impl FnMut(Claim, Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    let here = size.min(disk.len());
    let mut chunks = Chunks { disk: &**disk, at: 0, end: here, data: None };
    in_order(
        threads(),
        || chunks.next(),
        || (),
        |_, claim| match &claim {
            Claim::Zero(_) => Ok((claim, Vec::new())),
            Claim::Digests(range) => {
                let mut buf = Buf::new((range.end - range.start) as usize);
                disk.read_at(range.start, &mut buf)?;
                // A block cut off by the end is hashed as if zeroes followed: the other side may be longer.
                let short = (range.end < size).then(|| range.end % u64::from(block_size)).filter(|s| *s > 0);
                if short.is_some() {
                    let whole = buf.len().next_multiple_of(block_size as usize);
                    let mut padded = Buf::new(whole);
                    padded[..buf.len()].copy_from_slice(&buf);
                    buf = padded;
                }
                let end = (range.start + buf.len() as u64).min(size);
                let digests = buf[..(end - range.start) as usize]
                    .chunks(block_size as usize)
                    .flat_map(digest)
                    .collect();
                Ok((Claim::Digests(range.start..end), digests))
            }
        },
        |(claim, digests)| say(claim, digests),
    )?;
    let said = here.next_multiple_of(u64::from(block_size)).min(size);
    if said < size { say(Claim::Zero(said..size), Vec::new()) } else { Ok(()) }
}

/// The source's side: takes the destination's claims from `hear`, in order, and hands what differs to `found`, ascending.
/// Returns the bytes read.
///
/// # Errors
/// Those of the disk and of both functions; `InvalidData` where the claims are not a gapless account of the disk.
pub fn differences(
    disk: &Arc<dyn Disk>,
    block_size: u32,
    mut hear: impl FnMut() -> io::Result<Option<(Claim, Vec<u8>)>> + Send,
    mut found: impl FnMut(Difference) -> io::Result<()>,
) -> io::Result<u64> {
    let size = disk.len();
    let block = u64::from(block_size);
    let mut heard = 0u64;
    let mut read = 0u64;
    in_order(
        threads(),
        // A long hole is cut into chunks where the source has data.
        {
            let mut hole: Option<Chunks<'_>> = None;
            move || loop {
                if let Some(chunks) = &mut hole {
                    match chunks.next()? {
                        // Zeroes on both sides.
                        Some(Claim::Zero(_)) => continue,
                        Some(Claim::Digests(range)) => return Ok(Some((Claim::Zero(range), Vec::new()))),
                        None => hole = None,
                    }
                }
                if heard == size {
                    return Ok(None);
                }
                let Some((claim, digests)) = hear()? else {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the other side stopped in the middle of its digests",
                    ));
                };
                let range = claim.range().clone();
                let sound = range.start == heard
                    && range.end > range.start
                    && range.end <= size
                    && (range.end % block == 0 || range.end == size);
                let expected = match &claim {
                    Claim::Zero(_) => 0,
                    Claim::Digests(r) if r.end - r.start <= CHUNK => {
                        (r.end - r.start).div_ceil(block) as usize * DIGEST
                    }
                    Claim::Digests(_) => usize::MAX,
                };
                if !sound || digests.len() != expected {
                    return Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("the other side's digests are out of order at byte {heard}"),
                    ));
                }
                heard = range.end;
                match claim {
                    Claim::Zero(range) => {
                        hole = Some(Chunks { disk: &**disk, at: range.start, end: range.end, data: None });
                    }
                    claim => return Ok(Some((claim, digests))),
                }
            }
        },
        || (),
        |_, (claim, theirs)| {
            let range = claim.range().clone();
            let mut buf = Buf::new((range.end - range.start) as usize);
            disk.read_at(range.start, &mut buf)?;
            let mut differences = Vec::new();
            let mut run: Option<(Range<usize>, bool)> = None;
            for (index, ours) in buf.chunks(block_size as usize).enumerate() {
                let zero = is_zero(ours);
                let same = match &claim {
                    Claim::Zero(_) => zero,
                    Claim::Digests(_) => digest(ours) == theirs[index * DIGEST..(index + 1) * DIGEST],
                };
                let at = index * block_size as usize;
                let bytes = at..at + ours.len();
                match &mut run {
                    Some((r, z)) if !same && *z == zero && r.end == at => r.end = bytes.end,
                    _ if same => differences.extend(run.take()),
                    _ => differences.extend(run.replace((bytes, zero))),
                }
            }
            differences.extend(run);
            let differences: Vec<Difference> = differences
                .into_iter()
                .map(|(r, zero)| {
                    let offset = range.start + r.start as u64;
                    match zero {
                        true => Difference::Zero(offset..range.start + r.end as u64),
                        false => Difference::Data { offset, data: Buf::from(&buf[r]) },
                    }
                })
                .collect();
            Ok((buf.len() as u64, differences))
        },
        |(bytes, differences)| {
            read += bytes;
            differences.into_iter().try_for_each(&mut found)
        },
    )?;
    Ok(read)
}

/// True if every byte is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // A step at a time, so that blocks of data mostly end the search at the first one.
    bytes.chunks(64).all(|step| step.iter().fold(0, |all, b| all | b) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::RamDisk;
    use proptest::prelude::*;

    fn run(source: &[u8], replica: &[u8], block_size: u32) -> (Vec<u8>, u64) {
        let from: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(source));
        let to: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(replica));
        let mut claims = Vec::new();
        answer(&to, source.len() as u64, block_size, |claim, digests| {
            claims.push((claim, digests));
            Ok(())
        })
        .unwrap();
        let mut claims = claims.into_iter();
        let mut mended = replica.to_vec();
        mended.resize(source.len(), 0);
        let (mut last, mut sent) = (0, 0);
        differences(
            &from,
            block_size,
            || Ok(claims.next()),
            |difference| {
                let range = match &difference {
                    Difference::Data { offset, data } => {
                        sent += data.len() as u64;
                        mended[*offset as usize..*offset as usize + data.len()].copy_from_slice(data);
                        *offset..*offset + data.len() as u64
                    }
                    Difference::Zero(r) => {
                        mended[r.start as usize..r.end as usize].fill(0);
                        r.clone()
                    }
                };
                assert!(range.start >= last, "differences ascend");
                last = range.end;
                Ok(())
            },
        )
        .unwrap();
        (mended, sent)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn any_replica_becomes_equal(
            size in 1usize..5_000_000,
            other in 1usize..5_000_000,
            edits in proptest::collection::vec((0usize..5_000_000, 1usize..300_000, 0u8..4), 0..20),
            shift in 12u32..17,
        ) {
            let mut source = vec![0u8; size];
            for (at, len, value) in &edits {
                if *at < size {
                    let end = (at + len).min(size);
                    source[*at..end].fill(*value);
                }
            }
            let mut replica = source.clone();
            replica.resize(other, 7);
            for (at, len, value) in edits.iter().rev().take(5) {
                if *at < other {
                    let end = (at + len / 2).min(other);
                    replica[*at..end].fill(value.wrapping_mul(3));
                }
            }
            let (mended, _) = run(&source, &replica, 1 << shift);
            prop_assert!(mended == source);
        }
    }

    #[test]
    fn equal_disks_differ_nowhere() {
        let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i / 7) as u8).collect();
        assert_eq!(run(&bytes, &bytes, 4096).1, 0);
    }

    #[test]
    fn a_lying_account_is_refused() {
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&[1; 10_000]));
        for claims in [
            vec![],
            vec![(Claim::Zero(0..20_000), vec![])],
            vec![(Claim::Zero(4096..8192), vec![])],
            vec![(Claim::Zero(0..5), vec![])],
            vec![(Claim::Digests(0..10_000), vec![0; 7])],
            vec![(Claim::Digests(0..4096), vec![0; DIGEST]), (Claim::Digests(0..4096), vec![0; DIGEST])],
        ] {
            let mut claims = claims.into_iter();
            assert!(differences(&disk, 4096, || Ok(claims.next()), |_| Ok(())).is_err());
        }
    }
}
