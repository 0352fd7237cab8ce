//! The source's side: comparing what the other side says with what is here.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::{Buf, Disk};
use extents::Bitmap;

use crate::reader::{Reader, Stretch};
use crate::scope::Account;
use crate::{Claim, DIGEST, Scope, in_order, is_zero, workers};

/// What a comparison comes upon, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum Finding<'a> {
    /// The other side differs: this is what the source has.
    Data {
        /// Where, in bytes.
        offset: u64,
        /// What.
        data: &'a [u8],
    },
    /// The other side differs: the source has zeroes.
    Zero(Range<u64>),
    /// The other side has the same; it was asked to be told because of what differs around it.
    Between {
        /// Where, in bytes.
        offset: u64,
        /// What both have: no zeroes.
        data: &'a [u8],
    },
    /// The source can't be read here: nobody knows whether the other side differs.
    Unreadable(Range<u64>),
    /// The other side can't be read here; what the source has was told before.
    UnreadableThere(Range<u64>),
    /// All before this byte has been looked at; so many bytes were read for it since the last time.
    Upto(u64, u64),
}

/// What the other side says of a part of a stretch.
enum Theirs {
    Zero,
    Digests(Vec<u8>),
    Unreadable,
}

/// A stretch of the source, and what is said of it, in parts.
struct Work {
    range: Range<u64>,
    ours: Option<(Buf, Vec<Range<u64>>)>,
    theirs: Vec<(Range<u64>, Theirs)>,
}

impl Work {
    /// Where a range of the source lies in what was read of it.
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

/// Takes the other side's claims from `hear`, in order, compares them with `disk`, and hands what comes of it to `found`,
/// ascending. `widen` is shown those blocks of a stretch, counted from its beginning, that are told as data, and may mark
/// more: what of these is the same and not zero is told as [`Finding::Between`].
///
/// # Errors
/// Those of the disk and of both functions; `InvalidData` where the claims are not a gapless account of the scope.
pub fn differences(
    disk: &Arc<dyn Disk>,
    scope: &Scope,
    widen: impl Fn(&Bitmap) + Sync,
    hear: impl FnMut() -> io::Result<Option<(Claim, Vec<u8>)>> + Send,
    mut found: impl FnMut(Finding<'_>) -> io::Result<()>,
) -> io::Result<()> {
    scope.check()?;
    if disk.len() < scope.size {
        return Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("the source ends at byte {} and should have {}", disk.len(), scope.size),
        ));
    }
    let mut pairing = Pairing {
        reader: Reader::new(disk, scope)?,
        account: Account::new(scope),
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
            let runs = compare(scope, &work, &zero);
            let runs = widened(runs, &work, scope.block_size.into(), &widen);
            Ok((work, runs))
        },
        |(work, runs): (Work, Vec<(Range<u64>, Verdict)>)| {
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
            found(Finding::Upto(work.range.end, buf.len() as u64))
        },
    )
}

/// The runs of a stretch, with what is told though it is the same.
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
    // Nothing lies between less than two.
    let Some((buf, _)) = work.ours.as_ref().filter(|_| told.clone().count() > 1) else { return runs };
    let map = Bitmap::new(blocks(&work.range).end);
    for (range, _) in told {
        map.set(blocks(range));
    }
    widen(&map);
    let mut wider = Runs::default();
    for (range, verdict) in runs {
        if verdict != Verdict::Same {
            wider.push(range, verdict);
            continue;
        }
        for n in blocks(&range) {
            let start = work.range.start + n * block;
            let one = start..(start + block).min(range.end);
            // Zeroes may be a hole there, and are to stay one.
            let between = map.get(n) && !is_zero(&buf[work.within(&one)]);
            wider.push(one, if between { Verdict::Between } else { Verdict::Same });
        }
    }
    wider.0
}

/// Ranges with their verdicts; neighbours of the same verdict are joined.
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

/// Compares a stretch block by block, and joins neighbours of the same verdict.
fn compare(scope: &Scope, work: &Work, zero: &[u8]) -> Vec<(Range<u64>, Verdict)> {
    let block = u64::from(scope.block_size);
    let mut runs = Runs::default();
    let mut push = |range, verdict| runs.push(range, verdict);
    for (part, theirs) in &work.theirs {
        let Some((buf, bad)) = &work.ours else {
            // A hole here: what is not zero there differs.
            match theirs {
                Theirs::Zero => push(part.clone(), Verdict::Same),
                Theirs::Unreadable => push(part.clone(), Verdict::Zero),
                Theirs::Digests(digests) => {
                    for (n, digest) in digests.chunks(DIGEST).enumerate() {
                        let start = part.start + n as u64 * block;
                        let end = (start + block).min(part.end);
                        // The last block may be short.
                        let same = if end - start == block {
                            digest == zero
                        } else {
                            digest == scope.hash.digest(&vec![0; (end - start) as usize])
                        };
                        push(start..end, if same { Verdict::Same } else { Verdict::Zero });
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
            push(start..end, verdict);
            start = end;
            index += 1;
        }
    }
    runs.0
}

/// Brings the stretches of this side and the claims of the other together.
struct Pairing<'a, H> {
    reader: Reader,
    account: Account<'a>,
    hear: H,
    /// What is left of a hole of this side.
    hole: Range<u64>,
    /// What of the last claim belongs to later stretches.
    heard: Option<(Range<u64>, Theirs)>,
    block: usize,
}

impl<H: FnMut() -> io::Result<Option<(Claim, Vec<u8>)>>> Pairing<'_, H> {
    fn next(&mut self) -> io::Result<Option<Work>> {
        loop {
            if !self.hole.is_empty() {
                // A hole of any length meets one claim at a time.
                let (range, theirs) = self.claim(self.hole.end)?;
                self.hole.start = range.end;
                return Ok(Some(Work { range: range.clone(), ours: None, theirs: vec![(range, theirs)] }));
            }
            match self.reader.next()? {
                None if self.account.due().is_none() => return Ok(None),
                None => return Err(io::Error::other("the disk ended before the comparison")),
                Some(Stretch::Hole(range)) => self.hole = range,
                Some(Stretch::Data(range, buf, bad)) => {
                    let mut theirs = Vec::with_capacity(1);
                    let mut at = range.start;
                    while at < range.end {
                        let (part, claim) = self.claim(range.end)?;
                        at = part.end;
                        theirs.push((part, claim));
                    }
                    return Ok(Some(Work { range, ours: Some((buf, bad)), theirs }));
                }
            }
        }
    }

    /// What is said next, as far as `end`.
    fn claim(&mut self, end: u64) -> io::Result<(Range<u64>, Theirs)> {
        let (range, theirs) = match self.heard.take() {
            Some(heard) => heard,
            None => {
                let Some((claim, digests)) = (self.hear)()? else {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the peer stopped in the middle of its digests",
                    ));
                };
                self.account.take(&claim, digests.len())?;
                match claim {
                    Claim::Zero(range) => (range, Theirs::Zero),
                    Claim::Unreadable(range) => (range, Theirs::Unreadable),
                    Claim::Digests(range) => (range, Theirs::Digests(digests)),
                }
            }
        };
        if range.end <= end {
            return Ok((range, theirs));
        }
        // Both sides' stretches end at whole blocks, or at the end of all.
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
