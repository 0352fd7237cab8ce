//! Where a disk stands.

use extents::Extents;

use crate::{Commit, Kind, Log, Point};

/// Blocks of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Set {
    /// These.
    Blocks(Extents),
    /// Any of them.
    All,
}

impl Set {
    /// No block.
    pub fn none() -> Set {
        Set::Blocks(Extents::new())
    }

    /// True if it has no block.
    pub fn is_none(&self) -> bool {
        matches!(self, Set::Blocks(blocks) if blocks.is_empty())
    }
}

/// A part of a disk, from the end of the part before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The point of which its blocks are.
    pub at: Point,
    /// The first byte after it.
    pub upto: u64,
}

/// Where a disk stands: what it holds is what the log says of its parts, but for `own` and `unsure`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Its parts, ascending. There is one, unless a transfer was interrupted. Of a source in use, the highest number that it has drawn.
    pub parts: Vec<Part>,
    /// Written here, and in no commit.
    pub own: Set,
    /// May differ from what the log says: an interrupted merge, an unreadable sector, a batch of a mirror.
    pub unsure: Set,
    /// It was copied while it was written to: it may be of no single moment.
    pub fuzzy: bool,
    /// How many entries the log had when this was stored: with fewer, a part of it is lost.
    pub confirmed: u64,
}

impl Head {
    /// At a point, whole.
    pub fn at(at: Point) -> Head {
        let parts = vec![Part { at, upto: u64::MAX }];
        Head { parts, own: Set::none(), unsure: Set::none(), fuzzy: false, confirmed: 0 }
    }

    /// The role that the log says: a source if the last commit that was made here is not the end of one.
    pub fn is_source(log: &Log) -> bool {
        let own = log.commits().iter().rev().find(|commit| commit.own);
        own.is_some_and(|commit| !matches!(commit.kind, Kind::Sealed { .. }))
    }

    /// Goes on to the last commit that was made here, which is durable before the head is: the process may have ended in between.
    /// Commits that were received are followed by what brings their blocks, and never move it. What was written since is the record's to
    /// tell: `own` stays as it was.
    pub fn roll_forward(&mut self, log: &Log) {
        let known = usize::try_from(self.confirmed).unwrap_or(usize::MAX).min(log.commits().len());
        let own = |commit: &&Commit| commit.own;
        if let Some(commit) = log.commits()[known..].iter().rev().find(own) {
            self.parts = vec![Part { at: commit.at, upto: u64::MAX }];
            if commit.kind == Kind::Promoted {
                // They are its changes now.
                self.unsure = Set::none();
            }
        }
        self.confirmed = log.commits().len() as u64;
    }
}
