//! A commit, and the point at which it stands.

use std::fmt;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A moment of a disk: the `n`th of a life. The 0th is what the disk held when the life began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Point {
    /// One opening of a source for writing, to its end. Random.
    pub life: Uuid,
    /// Rises with each cut and each batch of a mirror: the number of the last cut in the upper 40 bits, which rises along a path, and that of
    /// the batches since in the lower 24.
    pub n: u64,
}

/// The bits of [`Point::n`] that number batches.
const BATCH_BITS: u32 = 24;

impl Point {
    /// Of no life.
    pub(crate) const NOWHERE: Point = Point { life: Uuid::nil(), n: 0 };
    /// The most batches after a cut.
    pub const MOST_BATCHES: u64 = (1 << BATCH_BITS) - 1;

    /// The number that so many batches have after a cut.
    pub fn number(cut: u64, batches: u64) -> u64 {
        (cut << BATCH_BITS) | batches.min(Point::MOST_BATCHES)
    }

    /// The number of the last cut.
    pub fn cut(&self) -> u64 {
        self.n >> BATCH_BITS
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.8}:{}", self.life.simple().to_string(), self.n)
    }
}

/// What a commit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A source was opened: a life begins.
    Opened,
    /// A checkpoint.
    Cut,
    /// A replica became a source: a life begins.
    Promoted,
    /// A source gave up its role, in favour of `heir` if there is one.
    Sealed {
        /// The id of the replica that takes over.
        heir: Option<Uuid>,
    },
}

/// Why it is not known what changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum Gap {
    /// An entry of the log cannot be read.
    #[error("a part of the log is damaged")]
    Damaged,
    /// The record of a source was not trusted when it was opened.
    #[error("the record of what was written was not trusted")]
    NotTrusted,
    /// The commit was made by a comparison or a copy, not from a record.
    #[error("the commit was compared, not recorded")]
    Compared,
    /// A disk in use was copied without a cut.
    #[error("the copy was made without a cut")]
    Fuzzy,
    /// Its blocks are of several moments, as after a transfer that was interrupted.
    #[error("a transfer to it was interrupted")]
    Parts,
    /// Any of its blocks may differ.
    #[error("any of its blocks may differ")]
    Unsure,
}

/// What is known of the changes of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Changes {
    /// The blocks are in the log.
    Known,
    /// They were never known.
    Unknown(Gap),
}

/// A commit, or several successive ones of a life folded into one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Where it stands; of several, the last.
    pub at: Point,
    /// The number of the first that is folded into it; `at.n` for one.
    pub first: u64,
    /// Random, a check of `at`. `None` where it is old and was dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Uuid>,
    /// Where its life began; `None` for the first life of a disk. In each commit, so that one that is damaged takes no life with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub birth: Option<Point>,
    /// What it is.
    pub kind: Kind,
    /// It was made here, rather than received.
    pub own: bool,
    /// The cut of a group that it is a part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Uuid>,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a block: a power of two.
    pub block_size: u32,
    /// Seconds since 1970.
    pub time: u64,
    /// What is known of its changes since the commit before it.
    pub changes: Changes,
}

#[cfg(test)]
impl Commit {
    /// A single one of this kind, made here.
    pub(crate) fn made(at: Point, birth: Option<Point>, kind: Kind, id: Option<Uuid>) -> Commit {
        let (size, block_size, changes) = (1 << 30, 4096, Changes::Known);
        Commit {
            at,
            first: at.n,
            id,
            birth,
            kind,
            own: true,
            group: None,
            size,
            block_size,
            time: 0,
            changes,
        }
    }
}
