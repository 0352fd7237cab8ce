//! The way to a point.
//!
//! A source keeps its path with its description; each delta says the path of the moment to which it leads, and the commit of a replica
//! takes it over; an undo delta has that of the state to which it leads back. A life in which nothing was cut counts as the one before
//! it. Two paths tell what two disks are to each other:
//!
//! | | |
//! | --- | --- |
//! | same, behind | the other ends at a point of this path: this one has all that it has |
//! | ahead | this one ends at a point of the other's path |
//! | forked | they part at a point that both have |
//! | strangers, incomplete | no life is known to be in both |
//!
//! So a rewound replica that is promoted, a source that is restored from a copy (once, or twice to one moment), and a host that is rolled
//! back under a mirror need no rules of their own: what they do next is another life. The epochs of one life are told apart by their
//! random ids as well, because a source that is not served may be copied with its state and end an epoch on either side. A source that
//! learns from a replica that its state is an older copy begins a life there (`Handle::branch`). A path is as long as there were lives,
//! 16 384 at most, and takes 24 bytes for each; a delta that is made for one replica leaves out what that knows.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{Changes, Gap, Log, Point};

/// The lives that led to a point, newest first, each with the number at which it was left.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lives {
    steps: Vec<Point>,
    /// It goes back to the first life, with none missing.
    whole: bool,
}

/// What another path is to mine, if nothing was written to either disk since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Branch {
    /// They end at one point.
    Same,
    /// Theirs ends at a point of mine.
    Behind,
    /// Mine ends at this point of theirs.
    Ahead(Point),
    /// They part at this point.
    Forked(Point),
    /// They have no life in common.
    Strangers,
    /// No life is known to be in both, and one of them does not go back to the beginning.
    Incomplete,
}

impl Lives {
    /// The most lives of a path; of more, the newest.
    pub const MOST: usize = 1 << 14;

    /// The way to a disk's first life, in which nothing is committed yet.
    pub fn first(life: Uuid) -> Lives {
        Lives { steps: vec![Point { life, n: 0 }], whole: true }
    }

    /// The way from these points, newest first. `whole`: the last is of the first life.
    pub fn of(steps: Vec<Point>, whole: bool) -> Lives {
        Lives { steps, whole }
    }

    /// The way to a point, as far as a log knows it.
    pub fn to(point: Point, log: &Log) -> Lives {
        let mut steps: Vec<Point> = Vec::new();
        let mut next = Some(point);
        let mut whole = false;
        while let Some(at) = next.take() {
            // A damaged log may lead in a circle.
            if steps.iter().any(|step| step.life == at.life) {
                break;
            }
            steps.push(at);
            match log.birth(at.life) {
                Some(Some(parent)) => next = Some(parent),
                Some(None) => whole = true,
                None => {}
            }
        }
        Lives { steps, whole }
    }

    /// The lives with another that begins where they end. Those in which nothing was committed go: a server that is started again and again
    /// makes no long path.
    pub fn and(&self, life: Uuid) -> Lives {
        let mut steps: Vec<Point> = [Point { life, n: 0 }].into_iter().chain(self.steps().copied()).collect();
        let whole = self.whole && steps.len() <= Lives::MOST;
        steps.truncate(Lives::MOST);
        Lives { steps, whole }
    }

    /// Takes the last life to number `n`, unless it goes further already.
    pub fn reaching(mut self, n: u64) -> Lives {
        if let Some(last) = self.steps.first_mut() {
            last.n = last.n.max(n);
        }
        self
    }

    /// The way to the last commit or batch on it whose number is `n` at most. Numbers rise along a path.
    pub fn upto(&self, n: u64) -> Lives {
        let (mut at, mut left) = (self.steps.len(), 0);
        while at > 0 && (at == self.steps.len() || left < n) {
            at -= 1;
            left = left.max(self.steps[at].n);
        }
        let mut steps = self.steps[at..].to_vec();
        if let Some(last) = steps.first_mut() {
            last.n = last.n.min(n);
        }
        Lives { steps, whole: self.whole }
    }

    /// What of it is new to a disk with that path: from the newest life on that both have. All of it if there is none.
    pub fn since(&self, known: &Lives) -> Lives {
        match self.steps.iter().position(|step| known.left(step.life).is_some()) {
            Some(at) => Lives { steps: self.steps[..=at].to_vec(), whole: false },
            None => self.clone(),
        }
    }

    /// The whole way, of which [`Lives::since`] has left out what a disk with that path knew.
    pub fn onto(&self, known: &Lives) -> Lives {
        let Some(oldest) = self.steps.last().filter(|_| !self.whole) else { return self.clone() };
        let Some(at) = known.steps.iter().position(|step| step.life == oldest.life) else {
            return self.clone();
        };
        let mut steps: Vec<Point> = self.steps.iter().chain(&known.steps[at + 1..]).copied().collect();
        let whole = known.whole && steps.len() <= Lives::MOST;
        steps.truncate(Lives::MOST);
        Lives { steps, whole }
    }

    /// True if nothing is known of it.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// False for what no dsync says.
    pub fn is_sound(&self) -> bool {
        let lives: std::collections::HashSet<Uuid> = self.steps.iter().map(|step| step.life).collect();
        self.steps.len() <= Lives::MOST && lives.len() == self.steps.len()
    }

    /// All of its lives, newest first, each with the number at which it was left.
    pub fn lives(&self) -> &[Point] {
        &self.steps
    }

    /// The lives that count, newest first: one in which nothing was committed is its parent.
    pub fn steps(&self) -> impl Iterator<Item = &Point> {
        let last = self.steps.len().saturating_sub(1);
        self.steps
            .iter()
            .enumerate()
            .filter(move |(at, step)| step.n > 0 || *at == last)
            .map(|(_, step)| step)
    }

    /// Where it ends.
    pub fn tip(&self) -> Option<&Point> {
        self.steps().next()
    }

    /// It goes back to the beginning: what is not on it never led to the point.
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// The number at which a life was left; `None` if it is not on the way.
    pub fn left(&self, life: Uuid) -> Option<u64> {
        self.steps.iter().find(|step| step.life == life).map(|step| step.n)
    }

    /// True if the point is on it.
    pub fn has(&self, point: &Point) -> bool {
        self.left(point.life).is_some_and(|left| point.n <= left)
    }

    /// True if it leads over the point at which another one ends.
    pub fn leads_over(&self, other: &Lives) -> bool {
        other.tip().is_some_and(|tip| self.has(tip))
    }

    /// The last point that two paths share. The beginning of a life is where its parent was left. `agrees` says up to which number, that
    /// at most, the commits of a life are known to be the same ones.
    pub fn common(&self, other: &Lives, agrees: impl Fn(Uuid, u64) -> u64) -> Option<Point> {
        let mut shared = self.steps().filter_map(|step| {
            let n = step.n.min(other.left(step.life)?);
            Some(Point { life: step.life, n: agrees(step.life, n) })
        });
        let first = self.steps.last().filter(|_| self.whole).map(|first| first.life);
        shared.find(|point| point.n > 0 || Some(point.life) == first)
    }

    /// What another path is to this one.
    pub fn relation(&self, theirs: &Lives) -> Branch {
        let Some(common) = self.common(theirs, |_, n| n) else {
            return if self.whole && theirs.whole { Branch::Strangers } else { Branch::Incomplete };
        };
        match (self.tip() == Some(&common), theirs.tip() == Some(&common)) {
            (true, true) => Branch::Same,
            (false, true) => Branch::Behind,
            (true, false) => Branch::Ahead(common),
            (false, false) => Branch::Forked(common),
        }
    }

    /// The indices of the commits of a log that lie on it after one of its points, oldest first, or why what changed since is not known. Numbers
    /// between two commits are batches, whose changes the later commit has.
    ///
    /// # Errors
    /// The first gap after the point.
    pub fn changes_after(&self, point: &Point, log: &Log) -> Result<Vec<usize>, Gap> {
        let from = self.age(point);
        let mut found = Vec::new();
        for (at, commit) in log.commits().iter().enumerate() {
            let Some(left) = self.left(commit.at.life) else { continue };
            let is_after = self.age(&commit.at) < from;
            if commit.first > left || !is_after {
                continue;
            }
            if let Changes::Unknown(gap) = commit.changes {
                return Err(gap);
            }
            if log.is_after_damage(at) {
                return Err(Gap::Damaged);
            }
            found.push(at);
        }
        Ok(found)
    }

    /// How far back a point is: lives, then numbers. Greater is older.
    pub(crate) fn age(&self, point: &Point) -> (usize, u64) {
        let at = self.steps.iter().position(|step| step.life == point.life).unwrap_or(self.steps.len());
        (at, u64::MAX - point.n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "3:9 2:5 1:4": life 3 to its number 9, begun at number 5 of life 2, begun at number 4 of life 1, the first. "…" at the end:
    /// what came before is not known.
    fn path(words: &str) -> Lives {
        let point = |word: &str| {
            let (life, n) = word.split_once(':').unwrap();
            Point { life: Uuid::from_u128(life.parse().unwrap()), n: n.parse().unwrap() }
        };
        let steps = words.split_whitespace().filter(|word| *word != "…").map(point);
        Lives { steps: steps.collect(), whole: !words.ends_with('…') }
    }

    #[test]
    fn paths_are_compared() {
        let point = |life, n| Point { life: Uuid::from_u128(life), n };
        for (mine, theirs, is) in [
            ("1:5", "1:5", Branch::Same),
            ("1:5", "1:3", Branch::Behind),
            ("1:3", "1:5", Branch::Ahead(point(1, 3))),
            ("2:7 1:5", "1:5", Branch::Behind),
            ("2:7 1:5", "1:6", Branch::Forked(point(1, 5))),
            ("2:7 1:5", "3:7 1:6", Branch::Forked(point(1, 5))),
            ("1:5", "2:7 1:5", Branch::Ahead(point(1, 5))),
            // A life without a commit is its parent.
            ("2:0 1:5", "1:5", Branch::Same),
            ("2:0 1:5", "3:0 1:5", Branch::Same),
            ("2:7 1:5", "4:9", Branch::Strangers),
            ("2:7 1:5", "4:9 …", Branch::Incomplete),
            ("2:7 1:5", "1:5 …", Branch::Behind),
            ("", "1:5", Branch::Incomplete),
        ] {
            let mine = if mine.is_empty() { Lives::default() } else { path(mine) };
            assert_eq!(mine.relation(&path(theirs)), is, "{mine:?} {theirs}");
        }
    }

    #[test]
    fn what_is_known_already_is_left_out_and_found_again() {
        for (whole, known, sent) in [
            ("3:9 2:5 1:4", "2:5 1:4", "3:9 2:5 …"),
            ("3:9 2:5 1:4", "3:8 2:5 1:4", "3:9 …"),
            ("3:9 2:5 1:4", "4:7 1:4", "3:9 2:5 1:4 …"),
            ("3:9 2:5 1:4", "7:7", "3:9 2:5 1:4"),
        ] {
            let (whole, known) = (path(whole), path(known));
            assert_eq!(whole.since(&known), path(sent));
            assert_eq!(path(sent).onto(&known), whole);
        }
    }

    #[test]
    fn the_longest_path_grows_no_longer() {
        let life = |number: usize| Uuid::from_u128(number as u128 + 1);
        let lives = |at: usize| Point { life: life(at), n: at as u64 + 1 };
        let longest = Lives::of((0..Lives::MOST).rev().map(lives).collect(), true);
        let next = longest.and(life(Lives::MOST)).reaching(1 << 20);
        assert!(next.is_sound() && !next.is_whole());
        assert_eq!(next.since(&longest).onto(&longest), next);
    }

    #[test]
    fn a_path_is_followed_back() {
        for (n, to) in
            [(12, "3:9 2:5 1:4"), (9, "3:9 2:5 1:4"), (6, "3:6 2:5 1:4"), (5, "2:5 1:4"), (3, "1:3")]
        {
            assert_eq!(path("3:9 2:5 1:4").upto(n), path(to), "{n}");
        }
        assert_eq!(path("3:0 2:5 1:4").and(Uuid::from_u128(4)), path("4:0 2:5 1:4"));
        assert_eq!(path("1:0").and(Uuid::from_u128(4)), path("4:0 1:0"));
        // A life without a commit is passed over.
        assert_eq!(path("4:9 3:0 2:5").upto(5), path("2:5"));
        assert_eq!(path("3:9 2:5 1:4").and(Uuid::from_u128(4)).reaching(11), path("4:11 3:9 2:5 1:4"));
    }
}
