//! The destination's side: reports digests of its blocks.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::Disk;

use crate::reader::{ReadSegment, ScopeReader};
use crate::scope::CHUNK;
use crate::{DIGEST, DigestReport, Scope, in_order, workers};

/// Reports the digests of the ranges of a scope on `disk`, in order.
///
/// # Errors
/// If the disk or `say` fails; `InvalidData` for an invalid scope.
pub fn answer(
    disk: &Arc<dyn Disk>,
    scope: &Scope,
    mut say: impl FnMut(DigestReport, Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    scope.check()?;
    let mut reader = ScopeReader::new(disk, scope)?;
    let block = scope.block_size as usize;
    in_order(
        workers(),
        move || reader.next(),
        || (),
        |_, chunk| {
            let (range, buf, bad) = match chunk {
                ReadSegment::Hole(range) => return Ok(vec![(DigestReport::Zero(range), Vec::new())]),
                ReadSegment::Data(range, buf, bad) => (range, buf, bad),
            };
            let digests = |part: Range<u64>| {
                let bytes = &buf[(part.start - range.start) as usize..(part.end - range.start) as usize];
                let mut digests = Vec::with_capacity(bytes.len().div_ceil(block) * DIGEST);
                bytes.chunks(block).for_each(|block| digests.extend(scope.hash.digest(block)));
                (DigestReport::Digests(part), digests)
            };
            let mut reports = Vec::with_capacity(1);
            let mut at = range.start;
            for bad in bad {
                if bad.start > at {
                    reports.push(digests(at..bad.start));
                }
                at = bad.end;
                reports.push((DigestReport::Unreadable(bad), Vec::new()));
            }
            // What is beyond the end of the disk belongs to the last block.
            if at < range.end {
                reports.push(digests(at..range.end));
            }
            Ok(reports)
        },
        |reports| reports.into_iter().try_for_each(|(report, digests)| say(report, digests)),
    )
}

/// Reports the digests of the ranges of a scope, in order, from known digests of blocks: no disk is read.
///
/// # Errors
/// If one of the functions fails; `InvalidData` for an invalid scope.
pub fn answer_from(
    mut digests: impl FnMut(Range<u64>) -> io::Result<Vec<u8>>,
    scope: &Scope,
    mut say: impl FnMut(DigestReport, Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    scope.check()?;
    let block = u64::from(scope.block_size);
    let zero = scope.hash.digest(&vec![0; scope.block_size as usize]);
    for range in &scope.ranges {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / CHUNK + 1) * CHUNK).min(range.end);
            let digests = digests(at / block..end.div_ceil(block))?;
            // A short last block of zeroes has another digest.
            if end % block == 0 && digests.chunks(DIGEST).all(|digest| digest == zero) {
                say(DigestReport::Zero(at..end), Vec::new())?;
            } else {
                say(DigestReport::Digests(at..end), digests)?;
            }
            at = end;
        }
    }
    Ok(())
}
