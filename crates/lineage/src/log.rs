//! The commits of a disk, in the order in which it learnt of them.

use std::collections::{BTreeMap, HashMap};

use uuid::Uuid;

use crate::{Changes, Commit, Point};

/// How many of the newest commits keep their ids.
const IDS_KEPT: usize = 4096;

/// The commits that a disk knows of: those that led to it, and side branches that it has left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    commits: Vec<Commit>,
    births: HashMap<Uuid, Option<Point>>,
    /// Where an entry between two commits cannot be read: the index of the later one.
    holes: Vec<usize>,
}

impl Log {
    /// Adds one at the end. A commit that is there already is not added again.
    pub fn push(&mut self, commit: Commit) -> bool {
        let is_new = !self.knows(&commit);
        if is_new {
            self.births.insert(commit.at.life, commit.birth);
            self.commits.push(commit);
        }
        is_new
    }

    /// True if it has a commit of this kind there.
    pub(crate) fn knows(&self, commit: &Commit) -> bool {
        let is_it = |known: &Commit| {
            known.at.life == commit.at.life
                && (known.first..=known.at.n).contains(&commit.at.n)
                && known.kind == commit.kind
        };
        self.commits.iter().rev().any(is_it)
    }

    /// Says that the entry before the next commit is lost.
    pub(crate) fn damaged(&mut self) {
        self.holes.push(self.commits.len());
    }

    /// The commits, oldest first.
    pub fn commits(&self) -> &[Commit] {
        &self.commits
    }

    /// True if the entry before a commit is lost.
    pub(crate) fn is_after_damage(&self, commit: usize) -> bool {
        self.holes.contains(&commit)
    }

    /// The commits are replaced by what they fold to.
    pub(crate) fn replace(&mut self, commits: Vec<Commit>) {
        (self.commits, self.holes) = (commits, Vec::new());
    }

    /// Where a life began: `Some(None)` for the first of a disk, `None` if the log does not know it.
    pub fn birth(&self, life: Uuid) -> Option<Option<Point>> {
        self.births.get(&life).copied()
    }

    /// The highest number of a life, `n` at most, up to which the ids in two logs do not contradict each other.
    pub(crate) fn agrees(&self, other: &Log, life: Uuid, n: u64) -> u64 {
        let ids = |log: &Log| -> BTreeMap<u64, Uuid> {
            let of = log.commits.iter().filter(|commit| commit.at.life == life && commit.at.n <= n);
            of.filter_map(|commit| Some((commit.at.n, commit.id?))).collect()
        };
        let (mine, theirs) = (ids(self), ids(other));
        let mut both = mine.iter().filter_map(|(n, id)| Some((*n, theirs.get(n)? == id)));
        let mut agreed = 0;
        both.find(|(n, same)| {
            agreed = if *same { *n } else { agreed };
            !same
        })
        .map_or(n, |_| agreed)
    }

    /// Groups of successive commits that fold into one, as ranges of indices, oldest first: of one life and one maker, with nothing that is
    /// needed in between, and none of the newest `keep`. Changes are joined; names become a range.
    pub fn folds(&self, needed: &[Point], keep: usize) -> Vec<std::ops::Range<usize>> {
        let old = self.commits.len().saturating_sub(keep);
        let joins = |at: usize| {
            let (one, next) = (&self.commits[at - 1], &self.commits[at]);
            at < old
                && !self.holes.contains(&at)
                && one.at.life == next.at.life
                && one.own == next.own
                && one.kind == next.kind
                && one.at.n < next.first
                && !needed
                    .iter()
                    .any(|point| point.life == one.at.life && (one.at.n..next.at.n).contains(&point.n))
        };
        let mut folds: Vec<std::ops::Range<usize>> = Vec::new();
        for at in 0..self.commits.len() {
            match folds.last_mut().filter(|_| at > 0 && joins(at)) {
                Some(fold) => fold.end = at + 1,
                None => folds.push(at..at + 1),
            }
        }
        folds
    }

    /// What commits fold to.
    pub(crate) fn fold(&self, range: std::ops::Range<usize>) -> Option<Commit> {
        let commits = self.commits.get(range.clone())?;
        let (first, last) = (commits.first()?, commits.last()?);
        let gap = commits.iter().find_map(|commit| match commit.changes {
            Changes::Unknown(gap) => Some(gap),
            Changes::Known => None,
        });
        let is_old = self.commits.len() - range.end >= IDS_KEPT;
        Some(Commit {
            first: first.first,
            id: last.id.filter(|_| !is_old),
            changes: gap.map_or(Changes::Known, Changes::Unknown),
            ..last.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::{Commit, Kind, Log, Point};
    use uuid::Uuid;

    /// Of another life, another maker or another kind, or of a lower number: each stays apart.
    #[test]
    fn only_successors_fold() {
        let commit = |life, n, own, kind| {
            let at = Point { life: Uuid::from_u128(life), n };
            Commit { own, ..Commit::made(at, None, kind, None) }
        };
        let mut log = Log::default();
        let cut = |life, n, own| commit(life, n, own, Kind::Cut);
        let commits = [
            cut(1, 1, true),
            cut(1, 2, true),
            cut(1, 5, false),
            cut(2, 6, false),
            cut(2, 3, false),
            cut(2, 9, false),
        ];
        for commit in commits.into_iter().chain([commit(2, 10, false, Kind::Sealed { heir: None })]) {
            assert!(log.push(commit));
        }
        assert_eq!(log.folds(&[], 0), [0..2, 2..3, 3..4, 4..6, 6..7]);
        assert_eq!(log.folds(&[], 6), [0..1, 1..2, 2..3, 3..4, 4..5, 5..6, 6..7]);
    }
}
