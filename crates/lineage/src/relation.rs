//! What two disks are to each other.

use std::fmt;

use crate::{Gap, Head, Lives, Log, Point, Set};

/// A disk, for a comparison with another.
#[derive(Debug, Clone, Copy)]
pub struct Side<'a> {
    /// Its commits.
    pub log: &'a Log,
    /// Where it stands.
    pub head: &'a Head,
    /// Why its content may not be what its log says.
    pub doubt: Option<Doubt>,
}

/// Why a relation is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    /// They have no life in common.
    #[error("they have nothing in common")]
    Strangers,
    /// The log is shorter than the disk's head says, or a life that led to it is missing.
    #[error("a part of the log is missing")]
    Incomplete,
    /// Another object is in the disk's place, or the disk is older than its log.
    #[error("the content is not what the log ends with")]
    OtherContent,
}

/// What another disk is to mine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// It holds the same.
    Same,
    /// Mine has all that it has, and more: what changed since this point is sent, with what it is unsure of. Or why that is not known, and
    /// all is compared.
    Behind(Result<Point, Gap>),
    /// It has all that mine has, and more.
    Ahead,
    /// Each has what the other has not, since this point.
    Forked(Point),
    /// Nothing is known, so nothing is written.
    Unknown(Doubt),
}

impl fmt::Display for Relation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Relation::Same => write!(f, "the same"),
            Relation::Behind(Ok(point)) => write!(f, "behind since {point}"),
            Relation::Behind(Err(gap)) => write!(f, "behind, to be compared ({gap})"),
            Relation::Ahead => write!(f, "ahead"),
            Relation::Forked(point) => write!(f, "forked at {point}"),
            Relation::Unknown(doubt) => write!(f, "unknown ({doubt})"),
        }
    }
}

impl Side<'_> {
    fn doubt(&self) -> Option<Doubt> {
        let is_short = (self.log.commits().len() as u64) < self.head.confirmed;
        self.doubt.or(is_short.then_some(Doubt::Incomplete))
    }

    /// The way to the oldest of its parts: what it has whole.
    fn path(&self) -> Lives {
        let mut paths = self.head.parts.iter().map(|part| Lives::to(part.at, self.log));
        let first = paths.next().unwrap_or_else(|| Lives::to(Point::NOWHERE, self.log));
        paths.fold(first, |oldest, next| match next.tip() {
            Some(tip) if !oldest.has(tip) => oldest,
            _ => next,
        })
    }
}

/// What `theirs` is to `mine`. That is a matter of what each holds, not of its role.
pub fn relation(mine: Side<'_>, theirs: Side<'_>) -> Relation {
    if let Some(doubt) = mine.doubt().or(theirs.doubt()) {
        return Relation::Unknown(doubt);
    }
    let (my_path, their_path) = (mine.path(), theirs.path());
    let agrees = |life, n| mine.log.agrees(theirs.log, life, n);
    let Some(common) = my_path.common(&their_path, agrees) else {
        let whole = my_path.is_whole() && their_path.is_whole();
        return Relation::Unknown(if whole { Doubt::Strangers } else { Doubt::Incomplete });
    };
    let is_tip = |path: &Lives| path.tip() == Some(&common);
    let i_lack = !is_tip(&their_path) || !theirs.head.own.is_none();
    let they_lack = !is_tip(&my_path) || !mine.head.own.is_none();
    match (i_lack, they_lack) {
        (true, true) => Relation::Forked(common),
        (true, false) => Relation::Ahead,
        (false, false) if is_exact(mine.head) && is_exact(theirs.head) => Relation::Same,
        (false, _) => Relation::Behind(found(&mine, &my_path, theirs.head, common)),
    }
}

/// It is what the log says, everywhere.
fn is_exact(head: &Head) -> bool {
    head.parts.len() == 1 && head.unsure.is_none() && !head.fuzzy
}

/// From where on changes are sent.
fn found(mine: &Side<'_>, path: &Lives, theirs: &Head, common: Point) -> Result<Point, Gap> {
    let heads = [mine.head, theirs];
    if heads.iter().any(|head| head.fuzzy) {
        return Err(Gap::Fuzzy);
    }
    if heads.iter().any(|head| head.unsure == Set::All) {
        return Err(Gap::Unsure);
    }
    // The rest may be of a commit that is not on the path.
    if heads.iter().any(|head| head.parts.len() > 1) && !theirs.parts.iter().all(|part| path.has(&part.at)) {
        return Err(Gap::Parts);
    }
    path.changes_after(&common, mine.log).map(|_| common)
}
