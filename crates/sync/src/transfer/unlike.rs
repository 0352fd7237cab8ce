//! Before a destination is adopted: whether it is a copy of the source at all.

use std::ops::Range;

use compare::{Finding, HeldBytes, Scope};
use delta::Method;
use source::Handle;

use crate::conflict::Conflict;
use crate::error::SyncError;
use crate::options::Unreadable;
use crate::plan::Choice;
use crate::transfer::Transfer;
use crate::transfer::compared::Comparison;
use crate::wire::messages::{PLAN, Plan, StatusReply};

/// Larger disks are looked at in pieces, so that they need not be read twice.
const SAMPLED: u64 = 256 << 20;
/// How many, and bytes of each.
const PIECES: u64 = 512;
const PIECE: u64 = 128 << 10;
/// Bytes of data from which on a sample tells.
const ENOUGH: u64 = 4 << 20;

impl Transfer<'_> {
    /// Refuses to adopt a destination of whose data the larger part differs from the source. It is compared before the checkpoint, so that
    /// a refusal leaves both as they were, however what differs is found and committed later.
    pub(crate) fn refuse_unlike(
        &self,
        handle: &Handle,
        choice: &Choice,
        status: &StatusReply,
    ) -> Result<(), SyncError> {
        let options = self.options;
        let compares = matches!(choice.method, Method::Compare | Method::Rolling);
        if !options.adopt || options.overwrite || !compares {
            return Ok(());
        }
        let (len, block_size) = (handle.reader()?.len(), handle.about().block_size);
        let whole = Scope::whole(len, block_size);
        let mut found = HeldBytes::default();
        if len > SAMPLED {
            found = self.held(handle, Scope { ranges: sample(len, block_size), ..whole.clone() })?;
        }
        // A sample of holes tells nothing, and holes are compared in no time.
        if found.bytes < ENOUGH {
            found = self.held(handle, whole)?;
        }
        let HeldBytes { bytes: held, differing } = found;
        if differing <= held / 2 {
            return Ok(());
        }
        let (replica, path) = (status.path.clone(), handle.about().path.clone());
        Err(Conflict::Unlike { replica, held, differing, path }.into())
    }

    /// What the destination holds in these ranges.
    fn held(&self, handle: &Handle, scope: Scope) -> Result<HeldBytes, SyncError> {
        let options = self.options;
        let scope =
            Scope { hash: options.hash, keep_going: options.unreadable >= Unreadable::SendAnew, ..scope };
        let (compare, member) = (Some(scope.clone()), self.member.0);
        self.sender.send_json(PLAN, &Plan { compare, looks_first: true, member, ..Plan::default() })?;
        let (disk, totals) = (handle.reader()?, &self.totals);
        let comparison =
            Comparison { receiver: self.receiver, disk, view: None, scope: &scope, fill: false, totals };
        let mut all = HeldBytes::default();
        comparison.run(|finding| {
            if let Finding::Held(held) = finding {
                all.add(held);
            }
            Ok(())
        })?;
        StatusReply::hear(self.receiver)?;
        Ok(all)
    }
}

/// Pieces of a disk, evenly spaced.
fn sample(len: u64, block_size: u32) -> Vec<Range<u64>> {
    let piece = PIECE.max(block_size.into());
    let step = (len / PIECES).max(2 * piece) / piece * piece;
    (0..len).step_by(step as usize).map(|at| at..(at + piece).min(len)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_the_disk_and_small() {
        for (len, block_size) in [(SAMPLED + 1, 4096), (1 << 40, 4096), ((1 << 40) + 512, 1 << 20)] {
            let ranges = sample(len, block_size);
            assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "apart");
            assert!(ranges.iter().all(|range| range.start % u64::from(block_size) == 0 && range.end <= len));
            assert!(ranges.last().is_some_and(|range| range.end > len - len / 100));
            let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            assert!((ENOUGH..=2 * PIECES * PIECE.max(block_size.into())).contains(&bytes), "{bytes}");
        }
    }
}
