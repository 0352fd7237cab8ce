//! The destination's side: saying what is there.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use device::Disk;

use crate::reader::{Reader, Stretch};
use crate::scope::CHUNK;
use crate::{Claim, DIGEST, Scope, in_order, workers};

/// Says of every stretch of a scope what `disk` holds, in order.
///
/// # Errors
/// Those of the disk and of `say`; `InvalidData` for a scope that makes no sense.
pub fn answer(
    disk: &Arc<dyn Disk>,
    scope: &Scope,
    mut say: impl FnMut(Claim, Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    scope.check()?;
    let mut reader = Reader::new(disk, scope)?;
    let block = scope.block_size as usize;
    in_order(
        workers(),
        move || reader.next(),
        || (),
        |_, stretch| {
            let (range, buf, bad) = match stretch {
                Stretch::Hole(range) => return Ok(vec![(Claim::Zero(range), Vec::new())]),
                Stretch::Data(range, buf, bad) => (range, buf, bad),
            };
            let digests = |part: Range<u64>| {
                let bytes = &buf[(part.start - range.start) as usize..(part.end - range.start) as usize];
                let mut digests = Vec::with_capacity(bytes.len().div_ceil(block) * DIGEST);
                bytes.chunks(block).for_each(|block| digests.extend(scope.hash.digest(block)));
                (Claim::Digests(part), digests)
            };
            let mut claims = Vec::with_capacity(1);
            let mut at = range.start;
            for bad in bad {
                if bad.start > at {
                    claims.push(digests(at..bad.start));
                }
                at = bad.end;
                claims.push((Claim::Unreadable(bad), Vec::new()));
            }
            // What lies beyond the end of the disk belongs to the last block.
            if at < range.end {
                claims.push(digests(at..range.end));
            }
            Ok(claims)
        },
        |claims| claims.into_iter().try_for_each(|(claim, digests)| say(claim, digests)),
    )
}

/// The same from what `digests` knows of some blocks; the disk is not read.
///
/// # Errors
/// Those of both functions; `InvalidData` for a scope that makes no sense.
pub fn answer_from(
    mut digests: impl FnMut(Range<u64>) -> io::Result<Vec<u8>>,
    scope: &Scope,
    mut say: impl FnMut(Claim, Vec<u8>) -> io::Result<()>,
) -> io::Result<()> {
    scope.check()?;
    let block = u64::from(scope.block_size);
    let zero = scope.hash.digest(&vec![0; scope.block_size as usize]);
    for range in &scope.ranges {
        let mut at = range.start;
        while at < range.end {
            let end = ((at / CHUNK + 1) * CHUNK).min(range.end);
            let digests = digests(at / block..end.div_ceil(block))?;
            // The last block may be short, and has another digest then.
            if end % block == 0 && digests.chunks(DIGEST).all(|digest| digest == zero) {
                say(Claim::Zero(at..end), Vec::new())?;
            } else {
                say(Claim::Digests(at..end), digests)?;
            }
            at = end;
        }
    }
    Ok(())
}
