//! Before a destination is adopted: whether it is a copy of the source at all.

use std::ops::Range;
use std::sync::Arc;

use compare::{Finding, Held, Scope};
use delta::Method;
use device::Disk;
use link::{Receiver, Sender};
use source::Handle;

use crate::compared::Comparison;
use crate::conflict::Conflict;
use crate::error::SyncError;
use crate::messages::{PLAN, Plan, Status};
use crate::options::Unreadable;
use crate::plan::Choice;
use crate::report::Totals;
use crate::transfer::Transfer;

/// Larger disks are looked at in pieces, so that they need not be read twice.
const SAMPLED: u64 = 256 << 20;
/// How many, and bytes of each.
const PIECES: u64 = 512;
const PIECE: u64 = 128 << 10;
/// Bytes of data from which on a sample tells.
const ENOUGH: u64 = 4 << 20;

/// A look at what a destination holds, before anything is sent to it.
pub(crate) struct Look<'a> {
    pub sender: &'a Sender,
    pub receiver: &'a Receiver,
    pub totals: &'a Totals<'a>,
    /// The disk that it is compared with.
    pub disk: Arc<dyn Disk>,
    /// All of it, with the options of the comparison.
    pub scope: Scope,
    /// The number of the member in its group; 0 outside of one.
    pub member: usize,
}

impl Transfer<'_> {
    /// Refuses to adopt a destination of whose data the larger part differs from the source. It is compared before the checkpoint, so that
    /// a refusal leaves both as they were, however what differs is found and committed later.
    pub(crate) fn refuse_unlike(
        &self,
        handle: &Handle,
        choice: &Choice,
        status: &Status,
    ) -> Result<(), SyncError> {
        let options = self.options;
        let compares = matches!(choice.method, Method::Compare | Method::Rolling);
        if !options.adopt || options.overwrite || !compares {
            return Ok(());
        }
        let disk = handle.reader()?;
        let scope = Scope {
            hash: options.hash,
            keep_going: options.unreadable >= Unreadable::SendAnew,
            ..Scope::whole(disk.len(), handle.about().block_size)
        };
        let (sender, receiver, totals) = (self.sender, self.receiver, &self.totals);
        let look = Look { sender, receiver, totals, disk, scope, member: self.member.0 };
        look.refuse_unlike(handle, status)
    }
}

impl Look<'_> {
    /// Refuses a destination of whose data the larger part differs.
    pub(crate) fn refuse_unlike(&self, handle: &Handle, status: &Status) -> Result<(), SyncError> {
        let len = self.disk.len();
        let mut found = Held::default();
        if len > SAMPLED {
            let ranges = sample(len, handle.about().block_size);
            found = self.held(Scope { ranges, ..self.scope.clone() })?;
        }
        // A sample of holes tells nothing, and holes are compared in no time.
        if found.bytes < ENOUGH {
            found = self.held(self.scope.clone())?;
        }
        let Held { bytes: held, differing } = found;
        if differing <= held / 2 {
            return Ok(());
        }
        let (replica, path) = (status.path.clone(), handle.about().path.clone());
        Err(Conflict::Unlike { replica, held, differing, path }.into())
    }

    /// What the destination holds in the ranges of a scope.
    fn held(&self, scope: Scope) -> Result<Held, SyncError> {
        let (compare, member) = (Some(scope.clone()), self.member);
        self.sender.send_json(PLAN, &Plan { compare, looks_first: true, member, ..Plan::default() })?;
        let (receiver, disk, totals) = (self.receiver, self.disk.clone(), self.totals);
        let comparison = Comparison { receiver, disk, view: None, scope: &scope, fill: false, totals };
        let mut all = Held::default();
        comparison.run(|finding| {
            if let Finding::Held(held) = finding {
                all.add(held);
            }
            Ok(())
        })?;
        Status::hear(self.receiver)?;
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
