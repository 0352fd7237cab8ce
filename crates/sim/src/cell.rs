//! The cells of the matrix, drawn by the dice, and how many rounds there were in each.

use std::collections::BTreeMap;
use std::fmt;

use testing::Random;

/// What is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// A served image, through the page cache.
    File,
    /// A served image, bypassing the page cache.
    Direct,
    /// A served block device.
    Device,
    /// A disk in use, with the bpf tracker.
    Bpf,
    /// A disk in use, with dm-track.
    Dm,
}

impl Origin {
    /// A disk in use that the kernel follows.
    pub fn is_live(self) -> bool {
        matches!(self, Origin::Bpf | Origin::Dm)
    }

    /// It has no times that tell of changes.
    pub fn is_device(self) -> bool {
        self.is_live() || self == Origin::Device
    }
}

/// Where the replica is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// In a file.
    File,
    /// On a device.
    Device,
}

/// How the ends reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// In one process.
    Local,
    /// Over a link to another machine.
    Far,
}

/// What is done in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    /// A sync.
    Sync,
    /// Two syncs at once.
    Both,
    /// A mirror for a while.
    Mirror,
    /// An extract, and a merge.
    Extract,
    /// A verify, which may repair.
    Verify,
}

/// How the source changes before a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// Not at all: the first copy, or nothing to do.
    Nothing,
    /// Here and there.
    Scattered,
    /// Most of it.
    Dense,
    /// Parts move.
    Moved,
    /// It grows.
    Grown,
    /// It shrinks.
    Shrunk,
    /// Parts are trimmed.
    Trimmed,
}

/// How a replica commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Commit {
    /// Through the journal.
    Journal,
    /// In place.
    InPlace,
    /// By a clone.
    Reflink,
}

impl From<Commit> for sync::CommitMode {
    fn from(commit: Commit) -> sync::CommitMode {
        match commit {
            Commit::Journal => sync::CommitMode::Journal,
            Commit::InPlace => sync::CommitMode::InPlace,
            Commit::Reflink => sync::CommitMode::Reflink,
        }
    }
}

/// What a run is about; verb, method and change are drawn again for each of its rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// What is followed.
    pub origin: Origin,
    /// Where the replica is stored.
    pub target: Target,
    /// How they reach each other.
    pub way: Way,
    /// How the replica commits.
    pub commit: Commit,
}

impl Cell {
    /// A cell that exists.
    pub fn draw(dice: &mut Random) -> Cell {
        let origin = dice.pick(&[Origin::File, Origin::Direct, Origin::Device, Origin::Bpf, Origin::Dm]);
        let target = dice.pick(&[Target::File, Target::Device]);
        let way = dice.pick(&[Way::Local, Way::Far]);
        let commit = match target {
            Target::File => dice.pick(&[Commit::Journal, Commit::InPlace, Commit::Reflink]),
            Target::Device => dice.pick(&[Commit::Journal, Commit::InPlace]),
        };
        Cell { origin, target, way, commit }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} to {:?}, {:?}, {:?}", self.origin, self.target, self.way, self.commit)
    }
}

/// Rounds by cell.
#[derive(Debug, Default)]
pub struct Table {
    cells: BTreeMap<Cell, BTreeMap<Verb, u64>>,
    others: BTreeMap<String, u64>,
    runs: u64,
}

impl Table {
    /// Counts a run.
    pub fn run(&mut self) {
        self.runs += 1;
    }

    /// Counts a round.
    pub fn round(&mut self, cell: Cell, verb: Verb) {
        *self.cells.entry(cell).or_default().entry(verb).or_default() += 1;
    }

    /// Counts something else.
    pub fn note(&mut self, what: impl Into<String>) {
        *self.others.entry(what.into()).or_default() += 1;
    }

    /// Adds another table.
    pub fn add(&mut self, other: Table) {
        self.runs += other.runs;
        for (cell, verbs) in other.cells {
            for (verb, count) in verbs {
                *self.cells.entry(cell).or_default().entry(verb).or_default() += count;
            }
        }
        for (what, count) in other.others {
            *self.others.entry(what).or_default() += count;
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rounds: u64 = self.cells.values().flat_map(|verbs| verbs.values()).sum();
        writeln!(f, "{} runs, {rounds} rounds", self.runs)?;
        writeln!(
            f,
            "{:40} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "cell", "sync", "two", "mirror", "extract", "verify"
        )?;
        for (cell, verbs) in &self.cells {
            let count = |verb| verbs.get(&verb).copied().unwrap_or(0);
            write!(f, "{:40}", cell.to_string())?;
            for verb in [Verb::Sync, Verb::Both, Verb::Mirror, Verb::Extract, Verb::Verify] {
                write!(f, " {:>9}", count(verb))?;
            }
            writeln!(f)?;
        }
        for (what, count) in &self.others {
            writeln!(f, "{what:40} {count:>9}")?;
        }
        Ok(())
    }
}
