//! The source's side: compares the peer's digests with its own blocks.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use extents::Bitmap;

use crate::reader::{ReadSegment, ScopeReader};
use crate::scope::CoverageCheck;
use crate::{DIGEST, DigestReport, Scope, in_order, is_zero, workers};

/// A result of a comparison, in order of offset.
#[derive(Debug, PartialEq, Eq)]
pub enum Finding<'a> {
    /// The peer differs; the source has this data.
    Data {
        /// Offset in bytes.
        offset: u64,
        /// The source's data.
        data: &'a [u8],
    },
    /// The peer differs; the source has zeroes.
    Zero(Range<u64>),
    /// The peer has the same, but `widen` asked for it because of what differs around it.
    Between {
        /// Offset in bytes.
        offset: u64,
        /// What both have; not zeroes.
        data: &'a [u8],
    },
    /// The source cannot be read here, so it is not known whether the peer differs.
    Unreadable(Range<u64>),
    /// The peer cannot be read here; what the source has was reported before.
    UnreadableThere(Range<u64>),
    /// What the peer holds of what was compared since the last time.
    Held(HeldBytes),
    /// All before the first number has been compared; the second is the bytes read since the last time.
    Upto(u64, u64),
}

/// Bytes of the peer's blocks that are not zeroes, and that it could read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// All of them.
    pub bytes: u64,
    /// Bytes of those blocks that differ from the source.
    pub differing: u64,
}

impl HeldBytes {
    /// Adds what another part holds.
    pub fn add(&mut self, other: HeldBytes) {
        self.bytes += other.bytes;
        self.differing += other.differing;
    }

    fn block(&mut self, range: &Range<u64>, verdict: Verdict) {
        let differing = u64::from(matches!(verdict, Verdict::Data | Verdict::Zero));
        let bytes = range.end - range.start;
        self.add(HeldBytes { bytes, differing: bytes * differing });
    }
}

/// What the peer reports of a range.
enum Theirs {
    Zero,
    Digests(Vec<u8>),
    Unreadable,
}

/// A chunk of the source, and what the peer reports of it.
struct Work {
    range: Range<u64>,
    ours: Option<(Buf, Vec<Range<u64>>)>,
    theirs: Vec<(Range<u64>, Theirs)>,
}

impl Work {
    /// The place of a range in the chunk's buffer.
    fn within(&self, range: &Range<u64>) -> Range<usize> {
        (range.start - self.range.start) as usize..(range.end - self.range.start) as usize
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Same,
    Between,
    Data,
    Zero,
    Unreadable,
}

/// Takes the peer's reports from `hear`, in order, compares them with `disk`, and passes the results to `found`, ascending.
/// `widen` gets a map of the blocks of a chunk that differ and are data, and may mark more: those that are equal and not zero
/// are passed on as [`Finding::Between`].
///
/// # Errors
/// If the disk or one of the functions fails; `InvalidData` if the reports do not cover the scope without a gap.
pub fn differences(
    disk: &Arc<dyn Disk>,
    scope: &Scope,
    widen: impl Fn(&Bitmap) + Sync,
    hear: impl FnMut() -> io::Result<Option<(DigestReport, Vec<u8>)>> + Send,
    mut found: impl FnMut(Finding<'_>) -> io::Result<()>,
) -> io::Result<()> {
    scope.check()?;
    if disk.len() < scope.size {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("the source has {} bytes instead of {}", disk.len(), scope.size),
        ));
    }
    let mut pairing = Pairing {
        reader: ScopeReader::new(disk, scope)?,
        coverage: CoverageCheck::new(scope),
        hear,
        hole: 0..0,
        heard: None,
        block: scope.block_size as usize,
    };
    let zero_block = vec![0; scope.block_size as usize];
    let zero = scope.hash.digest(&zero_block);
    in_order(
        workers(),
        move || pairing.next(),
        || (),
        |_, work| {
            let (runs, held) = compare(scope, &work, &zero);
            let runs = widened(runs, &work, scope.block_size.into(), &widen);
            Ok((work, runs, held))
        },
        |(work, runs, held): (Work, Vec<(Range<u64>, Verdict)>, HeldBytes)| {
            let empty = Buf::default();
            let buf = work.ours.as_ref().map_or(&empty, |(buf, _)| buf);
            for (range, verdict) in runs {
                let data = || &buf[work.within(&range)];
                found(match verdict {
                    Verdict::Same => continue,
                    Verdict::Between => Finding::Between { offset: range.start, data: data() },
                    Verdict::Data => Finding::Data { offset: range.start, data: data() },
                    Verdict::Unreadable => Finding::Unreadable(range),
                    Verdict::Zero => Finding::Zero(range),
                })?;
            }
            for (range, _) in work.theirs.into_iter().filter(|(_, t)| matches!(t, Theirs::Unreadable)) {
                found(Finding::UnreadableThere(range))?;
            }
            found(Finding::Held(held))?;
            found(Finding::Upto(work.range.end, buf.len() as u64))
        },
    )
}

/// The runs of a chunk, with the equal blocks that `widen` asked for.
fn widened(
    runs: Vec<(Range<u64>, Verdict)>,
    work: &Work,
    block: u64,
    widen: &impl Fn(&Bitmap),
) -> Vec<(Range<u64>, Verdict)> {
    let blocks = |range: &Range<u64>| {
        (range.start - work.range.start) / block..(range.end - work.range.start).div_ceil(block)
    };
    let told = runs.iter().filter(|(_, verdict)| *verdict == Verdict::Data);
    // Less than two runs have nothing between them.
    let Some((buf, _)) = work.ours.as_ref().filter(|_| told.clone().count() > 1) else { return runs };
    let map = Bitmap::new(blocks(&work.range).end);
    for (range, _) in told {
        map.set(blocks(range));
    }
    widen(&map);
    let mut widened_runs = Runs::default();
    for (range, verdict) in runs {
        if verdict != Verdict::Same {
            widened_runs.push(range, verdict);
            continue;
        }
        for n in blocks(&range) {
            let start = work.range.start + n * block;
            let one = start..(start + block).min(range.end);
            // Zeroes may be a hole at the peer, and should stay one.
            let between = map.get(n) && !is_zero(&buf[work.within(&one)]);
            widened_runs.push(one, if between { Verdict::Between } else { Verdict::Same });
        }
    }
    widened_runs.0
}

/// Ranges with their verdicts; adjacent ranges with the same verdict are joined.
#[derive(Default)]
struct Runs(Vec<(Range<u64>, Verdict)>);

impl Runs {
    fn push(&mut self, range: Range<u64>, verdict: Verdict) {
        match self.0.last_mut() {
            Some((last, v)) if *v == verdict && last.end == range.start => last.end = range.end,
            _ => self.0.push((range, verdict)),
        }
    }
}

/// Compares a chunk block by block.
fn compare(scope: &Scope, work: &Work, zero: &[u8]) -> (Vec<(Range<u64>, Verdict)>, HeldBytes) {
    let block = u64::from(scope.block_size);
    let (mut runs, mut held) = (Runs::default(), HeldBytes::default());
    let mut push = |range, verdict| runs.push(range, verdict);
    // The last block may be short.
    let is_zeroes = |range: &Range<u64>, digest: &[u8]| match range.end - range.start {
        len if len == block => digest == zero,
        len => digest == scope.hash.digest(&vec![0; len as usize]),
    };
    for (part, theirs) in &work.theirs {
        let Some((buf, bad)) = &work.ours else {
            // A hole here: what is not zero at the peer differs.
            match theirs {
                Theirs::Zero => push(part.clone(), Verdict::Same),
                Theirs::Unreadable => push(part.clone(), Verdict::Zero),
                Theirs::Digests(digests) => {
                    for (n, digest) in digests.chunks(DIGEST).enumerate() {
                        let start = part.start + n as u64 * block;
                        let range = start..(start + block).min(part.end);
                        let same = is_zeroes(&range, digest);
                        let verdict = if same { Verdict::Same } else { Verdict::Zero };
                        if !same {
                            held.block(&range, verdict);
                        }
                        push(range, verdict);
                    }
                }
            }
            continue;
        };
        let mut bad = bad.iter().peekable();
        let mut start = part.start;
        let mut index = 0;
        while start < part.end {
            let end = (start + block).min(part.end);
            let ours = &buf[work.within(&(start..end))];
            while bad.peek().is_some_and(|b| b.end <= start) {
                bad.next();
            }
            let verdict = if bad.peek().is_some_and(|b| b.start <= start) {
                Verdict::Unreadable
            } else {
                let differs = |zero: bool| if zero { Verdict::Zero } else { Verdict::Data };
                match theirs {
                    Theirs::Zero if is_zero(ours) => Verdict::Same,
                    Theirs::Zero => Verdict::Data,
                    Theirs::Unreadable => differs(is_zero(ours)),
                    Theirs::Digests(digests) => {
                        let theirs = digests.get(index * DIGEST..(index + 1) * DIGEST);
                        if theirs.is_some_and(|theirs| scope.hash.digest(ours) == theirs) {
                            Verdict::Same
                        } else {
                            differs(is_zero(ours))
                        }
                    }
                }
            };
            if let Theirs::Digests(digests) = theirs {
                let theirs = digests.get(index * DIGEST..(index + 1) * DIGEST);
                if theirs.is_some_and(|theirs| !is_zeroes(&(start..end), theirs)) {
                    held.block(&(start..end), verdict);
                }
            }
            push(start..end, verdict);
            start = end;
            index += 1;
        }
    }
    (runs.0, held)
}

/// Pairs the chunks of this side with the peer's reports.
struct Pairing<'a, H> {
    reader: ScopeReader,
    coverage: CoverageCheck<'a>,
    hear: H,
    /// The rest of a hole of this side.
    hole: Range<u64>,
    /// The rest of the last report, for later chunks.
    heard: Option<(Range<u64>, Theirs)>,
    block: usize,
}

impl<H: FnMut() -> io::Result<Option<(DigestReport, Vec<u8>)>>> Pairing<'_, H> {
    fn next(&mut self) -> io::Result<Option<Work>> {
        loop {
            if !self.hole.is_empty() {
                // A hole may span many reports.
                let (range, theirs) = self.report(self.hole.end)?;
                self.hole.start = range.end;
                return Ok(Some(Work { range: range.clone(), ours: None, theirs: vec![(range, theirs)] }));
            }
            match self.reader.next()? {
                None if self.coverage.due().is_none() => return Ok(None),
                None => return Err(io::Error::other("the disk ended before the comparison")),
                Some(ReadSegment::Hole(range)) => self.hole = range,
                Some(ReadSegment::Data(range, buf, bad)) => {
                    let mut theirs = Vec::with_capacity(1);
                    let mut at = range.start;
                    while at < range.end {
                        let (part, report) = self.report(range.end)?;
                        at = part.end;
                        theirs.push((part, report));
                    }
                    return Ok(Some(Work { range, ours: Some((buf, bad)), theirs }));
                }
            }
        }
    }

    /// The next report, cut at `end`.
    fn report(&mut self, end: u64) -> io::Result<(Range<u64>, Theirs)> {
        let (range, theirs) = match self.heard.take() {
            Some(heard) => heard,
            None => {
                let Some((report, digests)) = (self.hear)()? else {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the peer ended before its last digest",
                    ));
                };
                self.coverage.take(&report, digests.len())?;
                match report {
                    DigestReport::Zero(range) => (range, Theirs::Zero),
                    DigestReport::Unreadable(range) => (range, Theirs::Unreadable),
                    DigestReport::Digests(range) => (range, Theirs::Digests(digests)),
                }
            }
        };
        if range.end <= end {
            return Ok((range, theirs));
        }
        // Both sides' ranges end at block boundaries, or at the end of the disk.
        let (now, later) = match theirs {
            Theirs::Zero => (Theirs::Zero, Theirs::Zero),
            Theirs::Unreadable => (Theirs::Unreadable, Theirs::Unreadable),
            Theirs::Digests(mut digests) => {
                let blocks = ((end - range.start) as usize).div_ceil(self.block);
                let later = digests.split_off((blocks * DIGEST).min(digests.len()));
                (Theirs::Digests(digests), Theirs::Digests(later))
            }
        };
        self.heard = Some((end..range.end, later));
        Ok((range.start..end, now))
    }
}
