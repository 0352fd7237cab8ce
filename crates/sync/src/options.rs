//! What a sync is told to do.

use std::path::PathBuf;

use compare::Hash;
use compare::rolling::InPlace;
use delta::Method;
use replica::Commit;
use source::CutOptions;

/// What a sync is told to do.
#[derive(Debug, Clone, Default)]
pub struct SyncOptions {
    /// How to find the changes. `None`: the tracker's record, a comparison where it has a gap, a copy for a new replica.
    pub method: Option<Method>,
    /// How the replica steps to the new epoch.
    pub commit: Commit,
    /// Only report what would be moved.
    pub dry_run: bool,
    /// Take over a file or device that is not a replica of this source, after comparing all of it.
    pub adopt: bool,
    /// Begin a new replica where the source knows of one and none is found.
    pub create: bool,
    /// Send the view that is open as `@view`.
    pub at_view: bool,
    /// How blocks are digested.
    pub hash: Hash,
    /// What to do about blocks that cannot be read.
    pub unreadable: Unreadable,
    /// Keep digests of the replica from this sync to the next: in this file, or in the replica's folder.
    pub digests: Option<Option<PathBuf>>,
    /// How copies within the replica are ordered, where they are made in place.
    pub in_place: InPlace,
    /// A zstd level.
    pub compress: Option<i32>,
    /// The most to send, in bytes a second.
    pub bwlimit: Option<u64>,
    /// Where the replica keeps lineage and journal.
    pub journal_dir: Option<PathBuf>,
    /// The link leads to another host, and may be cut.
    pub may_be_cut: bool,
    /// How a live disk is followed and cut.
    pub live: LiveOptions,
}

/// What to do about blocks that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Unreadable {
    /// Fail.
    #[default]
    Fail,
    /// Send what the replica cannot read; fail if the source cannot be read.
    SendAnew,
    /// The same, and leave out what the source cannot read: the replica is incomplete then.
    LeaveOut,
}

/// How a live disk is followed and cut.
#[derive(Debug, Clone, Default)]
pub struct LiveOptions {
    /// The most passes to make over it before the cut.
    pub passes: u32,
    /// The cut.
    pub cut: CutOptions,
}

impl SyncOptions {
    /// On one host, and with nothing stored in between, a dense region is moved whole: that costs less than picking.
    pub(crate) fn fills(&self) -> bool {
        !self.may_be_cut && self.commit == Commit::InPlace
    }
}
