//! Random histories of several disks, judged by what was written: each write is known by a number, and a disk holds some of them. Whatever
//! becomes of the disks, nothing that only one of them holds is overwritten without a word, and a sync makes two of them equal.

use std::collections::BTreeSet;

use extents::Extents;
use testing::Random;
use uuid::Uuid;

use crate::{Changes, Commit, Gap, Head, Kind, Lives, Log, Part, Point, Relation, Set, Side, relation};

const BLOCKS: usize = 12;
const SITES: usize = 4;

#[derive(Clone)]
struct Disk {
    log: Log,
    /// The blocks of each commit of the log.
    blocks: Vec<BTreeSet<usize>>,
    head: Head,
    content: Vec<u64>,
    /// The writes that led to the content.
    holds: BTreeSet<u64>,
    /// Written since the last commit, and since the last number was drawn.
    record: BTreeSet<usize>,
    own: BTreeSet<usize>,
    /// The last number of its life.
    drawn: u64,
    is_open: bool,
    is_source: bool,
    /// Until it is brought to a commit, nothing that it holds is asked for.
    is_given_up: bool,
}

fn set(blocks: &BTreeSet<usize>) -> Set {
    let mut all = Extents::new();
    blocks.iter().for_each(|block| all.insert(*block as u64..*block as u64 + 1));
    Set::Blocks(all)
}

fn blocks_of(set: &Set) -> BTreeSet<usize> {
    match set {
        Set::All => (0..BLOCKS).collect(),
        Set::Blocks(blocks) => blocks.iter().flatten().map(|block| block as usize).collect(),
    }
}

impl Disk {
    fn new() -> Disk {
        Disk {
            log: Log::default(),
            blocks: Vec::new(),
            head: Head::at(Point::NOWHERE),
            content: vec![0; BLOCKS],
            holds: BTreeSet::new(),
            record: BTreeSet::new(),
            own: BTreeSet::new(),
            drawn: 0,
            is_open: false,
            is_source: false,
            is_given_up: false,
        }
    }

    fn side(&self) -> Side<'_> {
        Side { log: &self.log, head: &self.head, doubt: None }
    }

    fn at(&self) -> Point {
        self.head.parts[0].at
    }

    fn knows_nothing(&self) -> bool {
        self.at() == Point::NOWHERE
    }

    fn push(&mut self, commit: Commit, blocks: BTreeSet<usize>) {
        if self.log.push(commit) {
            self.blocks.push(blocks);
        }
    }

    fn commit(
        &self,
        at: Point,
        birth: Option<Point>,
        kind: Kind,
        changes: Changes,
        random: &mut Random,
    ) -> Commit {
        let id = Some(Uuid::from_u128(u128::from(random.bits())));
        Commit { changes, ..Commit::made(at, birth, kind, id) }
    }

    /// Begins a life, as a source that is opened or a replica that is promoted.
    fn begin(&mut self, kind: Kind, random: &mut Random) {
        let birth = Some(self.at()).filter(|_| !self.knows_nothing());
        let life = Uuid::from_u128(u128::from(random.bits()));
        let mut unsure = blocks_of(&self.head.unsure);
        if kind == Kind::Promoted {
            unsure.extend(&self.own);
            (self.head.own, self.own) = (Set::none(), BTreeSet::new());
        }
        // What it was unsure of makes it another moment than the one it came from.
        self.drawn = u64::from(kind == Kind::Promoted && !unsure.is_empty());
        let gap = match kind {
            Kind::Promoted if self.head.unsure == Set::All => Some(Gap::Unsure),
            // A record that is not trusted is as if all were written.
            Kind::Opened if birth.is_some() && random.one_in(8) => Some(Gap::NotTrusted),
            _ => None,
        };
        let at = Point { life, n: self.drawn };
        let commit = self.commit(at, birth, kind, gap.map_or(Changes::Known, Changes::Unknown), random);
        self.push(commit, unsure);
        // The process may end before the head is stored.
        match random.one_in(3) && kind == Kind::Promoted {
            true => self.head.roll_forward(&self.log),
            false => (self.head.parts, self.head.unsure) = (vec![Part { at, upto: u64::MAX }], Set::none()),
        }
        self.head.confirmed = self.log.commits().len() as u64;
        (self.is_open, self.is_source) = (true, true);
    }

    fn write(&mut self, token: u64, block: usize) {
        self.content[block] = token;
        self.holds.insert(token);
        self.record.insert(block);
        self.own.insert(block);
        self.head.own = set(&self.own);
    }

    /// Draws a number: a commit, or a batch of a mirror, which stands in no log.
    fn draw(&mut self, is_cut: bool, random: &mut Random) {
        self.drawn += 1;
        let at = Point { n: self.drawn, ..self.at() };
        if is_cut {
            let birth = self.log.birth(at.life).flatten();
            let commit = self.commit(at, birth, Kind::Cut, Changes::Known, random);
            let record = std::mem::take(&mut self.record);
            self.push(commit, record);
        }
        self.own.clear();
        (self.head.parts, self.head.own) = (vec![Part { at, upto: u64::MAX }], Set::none());
        self.head.confirmed = self.log.commits().len() as u64;
    }

    /// A bound that was stored ahead is what it goes on from.
    fn close(&mut self, is_clean: bool, random: &mut Random) {
        if self.is_open && !is_clean {
            self.drawn += random.below(4);
            self.head.parts[0].at.n = self.drawn;
            self.own.clone_from(&self.record);
            self.head.own = set(&self.own);
        }
        self.is_open = false;
    }

    /// What was recorded since its last commit is all that a replica knows of that.
    fn demote(&mut self) {
        self.is_source = false;
        let mut unsure = blocks_of(&self.head.unsure);
        unsure.extend(std::mem::take(&mut self.record));
        self.head.unsure = set(&unsure);
    }

    /// What was done to it since a point of its own past; `None` if that is not known.
    fn since(&self, point: &Point) -> Option<BTreeSet<usize>> {
        let commits = Lives::to(self.at(), &self.log).changes_after(point, &self.log).ok()?;
        let mut all: BTreeSet<usize> = commits.into_iter().flat_map(|at| self.blocks[at].clone()).collect();
        all.extend(&self.record);
        all.extend(blocks_of(&self.head.unsure));
        Some(all)
    }
}

struct World {
    random: Random,
    disks: Vec<Disk>,
    past: Vec<Vec<Disk>>,
    copies: Vec<(usize, Disk)>,
    written: u64,
    told: Vec<String>,
    needless: usize,
}

impl World {
    fn tell(&mut self, line: String) {
        self.told.push(line);
    }

    fn step(&mut self) -> Result<(), String> {
        let at = self.random.index(SITES);
        match self.random.below(21) {
            20 => self.fold(at)?,
            0..=5 => self.write(at),
            6 => {
                let clean = self.random.coin();
                self.tell(format!("{at} closes, clean {clean}"));
                self.disks[at].close(clean, &mut self.random);
            }
            7 => self.promote(at),
            8 => {
                self.disks[at].close(true, &mut self.random);
                self.disks[at].demote();
                self.tell(format!("{at} is demoted"));
            }
            9 => self.rewind(at),
            10 => {
                let copy = self.disks[at].clone();
                self.copies.push((at, copy));
                self.tell(format!("{at} is backed up"));
            }
            11 => self.restore(),
            _ => {
                let to = (at + 1 + self.random.index(SITES - 1)) % SITES;
                return self.sync(at, to);
            }
        }
        Ok(())
    }

    /// What is folded answers as before.
    fn fold(&mut self, at: usize) -> Result<(), String> {
        let mut folded = self.disks[at].clone();
        let folds = folded.log.folds(&[], self.random.index(4));
        folded.blocks = folds
            .iter()
            .map(|fold| folded.blocks[fold.clone()].iter().flatten().copied().collect())
            .collect();
        let commits: Vec<Commit> = folds.into_iter().filter_map(|fold| folded.log.fold(fold)).collect();
        folded.log.replace(commits);
        folded.head.confirmed = folded.log.commits().len() as u64;
        for other in &self.disks {
            let (then, now) =
                (relation(self.disks[at].side(), other.side()), relation(folded.side(), other.side()));
            let may = matches!((then, now), (Relation::Behind(_), Relation::Behind(Err(_))));
            if then != now && !may {
                return Err(format!("{at} is folded, and {then} became {now}"));
            }
        }
        self.disks[at] = folded;
        self.tell(format!("{at} is folded"));
        Ok(())
    }

    fn write(&mut self, at: usize) {
        let disk = &mut self.disks[at];
        if !disk.is_source && !disk.knows_nothing() {
            return;
        }
        if !disk.is_open {
            disk.begin(Kind::Opened, &mut self.random);
        }
        self.written += 1;
        disk.write(self.written, self.random.index(BLOCKS));
        self.tell(format!("{at} has write {}", self.written));
    }

    fn promote(&mut self, at: usize) {
        let disk = &mut self.disks[at];
        if disk.is_source || disk.knows_nothing() || disk.head.parts.len() > 1 {
            return;
        }
        disk.begin(Kind::Promoted, &mut self.random);
        self.tell(format!("{at} is promoted"));
    }

    fn rewind(&mut self, at: usize) {
        if self.disks[at].is_source || self.past[at].is_empty() {
            return;
        }
        let Some(then) = self.past[at].pop() else { return };
        let (log, blocks) = (self.disks[at].log.clone(), self.disks[at].blocks.clone());
        self.disks[at] = Disk { log, blocks, is_source: false, is_open: false, ..then };
        self.disks[at].head.confirmed = self.disks[at].log.commits().len() as u64;
        self.tell(format!("{at} is rewound"));
    }

    /// A host goes back to a copy of its disk with its state.
    fn restore(&mut self) {
        if self.copies.is_empty() {
            return;
        }
        let which = self.random.index(self.copies.len());
        let (at, copy) = self.copies[which].clone();
        self.disks[at] = copy;
        self.past[at].clear();
        // Of numbers drawn since the copy it knows nothing: those within a stored bound are beyond any log.
        self.disks[at].close(true, &mut self.random);
        self.tell(format!("{at} is restored"));
    }

    fn sync(&mut self, from: usize, to: usize) -> Result<(), String> {
        let (one, other) = (&self.disks[from], &self.disks[to]);
        if one.knows_nothing() || one.head.parts.len() > 1 {
            return Ok(());
        }
        let is_new = other.knows_nothing();
        let found =
            if is_new { Relation::Behind(Err(Gap::Compared)) } else { relation(one.side(), other.side()) };
        let told = format!("{from} to {to}: {found}");
        self.tell(told.clone());
        let (one, other) = (&self.disks[from], &self.disks[to]);
        let fits = other.is_given_up || other.holds.is_subset(&one.holds);
        let fits_back = other.is_given_up || one.holds.is_subset(&other.holds);
        match found {
            Relation::Same if one.content != other.content => return Err(format!("{told}, and they differ")),
            Relation::Ahead if !fits_back => return Err(format!("{told}, and it lacks something")),
            Relation::Behind(_) if !fits => return Err(format!("{told}, and something is overwritten")),
            Relation::Forked(_) | Relation::Unknown(_) if fits && other.head.parts.len() == 1 => {
                self.needless += 1
            }
            _ => {}
        }
        match found {
            Relation::Behind(since) => self.bring(from, to, since.ok()),
            // Its user gives up what only it has.
            Relation::Forked(common) if self.random.one_in(3) => {
                let (before, depth) = (self.disks[to].clone(), self.past[to].len());
                let other = &mut self.disks[to];
                let lost = other.since(&common).map(|mut blocks| {
                    blocks.extend(&other.own);
                    blocks
                });
                let path = Lives::to(other.at(), &other.log);
                let known = path.has(&common) && other.head.parts.len() == 1;
                other.head.unsure = lost.filter(|_| known).map_or(Set::All, |blocks| set(&blocks));
                (other.head.own, other.own, other.record) = (Set::none(), BTreeSet::new(), BTreeSet::new());
                other.head.parts = vec![Part { at: common, upto: u64::MAX }];
                other.is_given_up = true;
                (self.disks[to].is_open, self.disks[to].is_source) = (false, false);
                self.tell(format!("{to} is given up"));
                self.sync(from, to)?;
                // The way back is to what it was before that was given up, with what it had of its own.
                if self.past[to].len() > depth {
                    self.past[to][depth] = before;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Sends what changed since a point that both have; compares without one.
    fn bring(&mut self, from: usize, to: usize, since: Option<Point>) -> Result<(), String> {
        let then = self.disks[to].clone();
        let is_batch = since.is_some() && self.disks[from].is_open && self.random.one_in(3);
        if self.disks[from].is_open {
            self.disks[from].draw(!is_batch, &mut self.random);
        }
        let one = self.disks[from].clone();
        let mut blocks = since
            .map_or(Some((0..BLOCKS).collect()), |since| one.since(&since))
            .ok_or("it is not known any more")?;
        blocks.extend(blocks_of(&then.head.unsure));
        let other = &mut self.disks[to];
        // Sometimes it is cut off after a part, which was written in place.
        let upto = if self.random.one_in(6) { self.random.index(BLOCKS) } else { BLOCKS };
        blocks
            .iter()
            .filter(|block| **block < upto)
            .for_each(|block| other.content[*block] = one.content[*block]);
        let path = Lives::to(one.at(), &one.log);
        for (commit, changed) in one.log.commits().iter().zip(&one.blocks) {
            if path.has(&commit.at) {
                let changes = if since.is_some() { commit.changes } else { Changes::Unknown(Gap::Compared) };
                other.push(Commit { own: false, changes, ..commit.clone() }, changed.clone());
            }
        }
        other.head.confirmed = other.log.commits().len() as u64;
        (other.is_source, other.is_open) = (false, false);
        // Past the last commit, it differs from that in what the source has recorded since.
        let mut unsure = blocks_of(&one.head.unsure);
        unsure.extend(&one.record);
        if upto < BLOCKS {
            if then.knows_nothing() {
                *other = Disk::new();
                return Ok(());
            }
            unsure.extend(blocks_of(&other.head.unsure));
            other.head.unsure = set(&unsure);
            let first = Part { at: one.at(), upto: upto as u64 };
            let parts = std::mem::take(&mut other.head.parts);
            other.head.parts = std::iter::once(first).chain(parts).collect();
            self.tell(format!("{to} is cut off at {upto}"));
            return Ok(());
        }
        other.head.parts = vec![Part { at: one.at(), upto: u64::MAX }];
        other.head.unsure = set(&unsure);
        other.holds.clone_from(&one.holds);
        // What a former source has of its own goes on with it.
        (other.head.own, other.own, other.record) = (one.head.own.clone(), one.own.clone(), BTreeSet::new());
        (other.drawn, other.is_given_up) = (one.drawn, false);
        if other.content != one.content {
            return Err(format!("{to} is not what {from} is, since {since:?}, batch {is_batch}"));
        }
        if then.head.parts.len() == 1 && !then.knows_nothing() {
            self.past[to].push(then);
        }
        Ok(())
    }
}

/// With as many runs as are asked for, and the seeds from that one on.
#[test]
fn nothing_that_only_one_disk_holds_is_overwritten_without_a_word() {
    let first = testing::seed("histories");
    let (mut needless, mut syncs) = (0, 0);
    for seed in first..first + testing::rounds(3000, 300_000) {
        let random = Random::seeded(seed);
        let (disks, past) = (vec![Disk::new(); SITES], vec![Vec::new(); SITES]);
        let mut world =
            World { random, disks, past, copies: Vec::new(), written: 0, told: Vec::new(), needless: 0 };
        for _ in 0..60 {
            if let Err(why) = world.step() {
                panic!("DSYNC_SEED={seed}: {why}\n{}", world.told.join("\n"));
            }
        }
        needless += world.needless;
        syncs += world.told.iter().filter(|line| line.contains(" to ")).count();
    }
    println!("{needless} of {syncs} relations were refused although nothing would have been lost");
}
