//! The way to a point.

use uuid::Uuid;

use crate::{Changes, Gap, Log, Point};

/// The lives that led to a point, newest first, each with the number at which it was left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    steps: Vec<Point>,
    /// It goes back to the first life, with none missing.
    whole: bool,
}

impl Path {
    /// The way to a point, as far as a log knows it.
    pub fn to(point: Point, log: &Log) -> Path {
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
        Path { steps, whole }
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

    /// The indices of the commits of a log that lie on it after one of its points, oldest first, or why what changed since is not known. Numbers
    /// between two commits are batches, whose changes the later commit has.
    ///
    /// # Errors
    /// The first gap after the point.
    pub fn since(&self, point: &Point, log: &Log) -> Result<Vec<usize>, Gap> {
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
