//! Options of a sync.

use std::path::PathBuf;
use std::sync::Arc;

use compare::Hash;
use compare::rolling::InPlace;
use delta::Method;
use device::Format;
use link::Pace;
use replica::{CommitMode, Keep};
use serde::{Deserialize, Serialize};
use source::CutOptions;

use crate::cut_hook::CutHook;

/// Options of a sync.
///
/// More than fifteen fields: they are the options of the command.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SyncOptions {
    /// How to find the changes. `None`: the tracker's record, a comparison where it has a gap, a copy for a new replica.
    pub method: Option<Method>,
    /// The commit mode.
    pub commit: CommitMode,
    /// How the disk is to lie in the replica's file. `None`: as it does, and in a new one as its name says.
    #[serde(skip)]
    pub format: Option<Format>,
    /// Only report what would be sent.
    pub dry_run: bool,
    /// Take over a file or device that is not a replica of this source, after comparing all of it.
    pub adopt: bool,
    /// Adopt it also if most of what it holds differs from the source, or if it has what the source has not.
    pub overwrite: bool,
    /// Adopt also a file that is larger than the source, and cut off what it has beyond.
    pub shrink: bool,
    /// The source is what it holds now, also if that is not what its record ends with.
    pub accept_source: bool,
    /// Create a new replica although the source knows of one that is not found.
    pub create: bool,
    /// What the destination has and the source has not may be given up, in this way.
    pub give_up: Option<GiveUp>,
    /// Sync only to a replica that is there.
    #[serde(skip)]
    pub existing: bool,
    /// Send the view that is open as `@view`.
    pub at_view: bool,
    /// The hash of blocks.
    pub hash: Hash,
    /// What to do about blocks that cannot be read.
    pub unreadable: Unreadable,
    /// Keep digests of the replica from this sync to the next: in this file, or in the replica's folder.
    #[serde(skip)]
    pub digests: Option<Option<PathBuf>>,
    /// How copies within the replica are ordered, where they are made in place.
    pub in_place: InPlace,
    /// A zstd level.
    pub compress: Option<i32>,
    /// The most to send, in bytes a second.
    pub bwlimit: Option<Pace>,
    /// Read more slowly while a guest writes to the source, so that its writes take no longer. A mirror: only in its first sync.
    #[serde(default)]
    pub polite: bool,
    /// Where the replica keeps lineage and journal.
    #[serde(skip)]
    pub journal_dir: Option<PathBuf>,
    /// How the replica's side was reached.
    #[serde(skip)]
    pub way: Way,
    /// What of its past the replica is to keep from now on. `None`: what it kept before.
    #[serde(skip)]
    pub keep: Option<Keep>,
    /// Passes and cut of a live disk.
    pub live: LiveOptions,
    /// What is held open around the cut.
    #[serde(skip)]
    pub hook: Option<Arc<dyn CutHook>>,
}

/// What becomes of what only a destination has, by its user's consent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GiveUp {
    /// It is saved first, as a delta in this new file on the destination's host.
    Save(PathBuf),
    /// It is lost.
    Discard,
}

/// How the two sides reached each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Way {
    /// Both are on this host.
    #[default]
    Local,
    /// The source's side reached for another host.
    Far,
    /// The replica's side did, on the host of this name: a part of the name under which the source remembers the replica.
    Pulled(String),
}

impl Way {
    /// From the source's side, to another host or not.
    pub fn to(another_host: bool) -> Way {
        if another_host { Way::Far } else { Way::Local }
    }

    /// The link leads to another host, and may break.
    pub fn may_be_cut(&self) -> bool {
        *self != Way::Local
    }
}

/// What to do about blocks that cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub enum Unreadable {
    /// Fail.
    #[default]
    Fail,
    /// Send what the replica cannot read; fail if the source cannot be read.
    SendAnew,
    /// Send what the replica cannot read, and leave out what the source cannot read: the replica is unsure of it then, and incomplete.
    LeaveOut,
}

/// Passes and cut of a live disk.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LiveOptions {
    /// The most passes to make over it before the cut.
    pub passes: u32,
    /// The cut.
    pub cut: CutOptions,
}

impl SyncOptions {
    /// True if the destination is adopted whatever it has.
    pub(crate) fn overwrites(&self) -> bool {
        self.adopt && self.overwrite
    }

    /// True if a comparison may go on from one that was cut off: what is asked for by name is about all of the disk, and so are digests.
    pub(crate) fn goes_on(&self) -> bool {
        let is_plain = self.method.is_none() && self.digests.is_none() && self.unreadable == Unreadable::Fail;
        is_plain && !self.adopt
    }

    /// On one host, without a journal, a dense region is copied whole: that costs less than picking blocks.
    pub(crate) fn fills(&self) -> bool {
        !self.way.may_be_cut() && self.commit == CommitMode::InPlace
    }
}
