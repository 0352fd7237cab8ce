//! The trail of a replica: which blocks each of its commits changed, in a log of its own that has the format of a history. A replica that
//! is promoted begins its history with its trail, so it knows what another replica lacks that stands at an earlier epoch. The replica's
//! commit appends to it, a promotion reads it, and a demotion leaves a source's history behind as one.
//!
//! **An entry is a fact about the source, not about the replica**: what differs between the epoch `after` and the last epoch of the entry
//! lies in its changes, and so does what differs between any epoch in between that it names and the last one. Epochs have random ids and
//! never change, so a fact stays true whatever becomes of the replica: a rewind, an adoption, a repair or a promotion make no entry wrong. Only
//! a tracked delta, which names all that the source has recorded, makes one; see `replica/src/journal/trail.rs`.
//!
//! **No change is missed**, because a trail is nothing but the chain of facts that ends in the epoch from which the promoted replica
//! goes on. [`Trail::leading_to`] starts at that epoch, takes the entry that ends in it, goes to the epoch after which that begins, by its id, takes
//! the entry that ends in that one, and so on. The union of the entries from an epoch of the chain on holds every block that differs between that
//! epoch and the last. Where the next entry is missing, does not say what changed, or cannot be read, the chain ends, and with
//! it all that the new source claims to know: a replica further back is compared. So a commit that was not noted (a crash before its entry, a
//! full disk, a lost tail after a power cut) breaks the chain, because the entry after it begins at an epoch
//! in which no entry ends; and a log of another moment or another replica leads to other epochs, and says nothing. What the promoted
//! disk holds beyond the epoch of its last commit is its unsure set, which is the change of the next entry of its history.
//!
//! **Behind a gap only names are known**: which epochs the source had. A replica at one of them is compared. One at another epoch of a
//! number that is taken was at a moment that its source has forgotten, because its state went back: it has diverged, and may be the only one that
//! holds what was written then.
//!
//! Appending looks at nothing that the log holds and makes nothing durable: an entry that is torn fails its checksum.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use delta::Epoch;
use device::Folder;
use extents::Bitmap;
use uuid::Uuid;

use super::{Entry, Head, History, IDS_KEPT, MAGIC, NAME, encoded, entry_bytes, now};
use crate::{Gap, SourceError};

/// Bytes of a trail at which it is tidied, and at every multiple.
const TIDY_BYTES: u64 = 1 << 20;
/// A trail that stays longer than this is tidied only at multiples of it.
const TIDY_LONG: u64 = 8 << 20;
/// The most bytes that are kept of a trail when it is tidied.
const MOST_BYTES: usize = 16 << 20;

/// One commit of a replica.
#[derive(Debug)]
pub struct TrailStep<'a> {
    /// The epoch before, and the bytes of the disk then.
    pub from: Option<(Epoch, u64)>,
    /// Epochs of the source between that and `to`, ascending; those that led to `to` where `from` is not one of them.
    pub through: &'a [Epoch],
    /// The epoch after.
    pub to: Epoch,
    /// Bytes of the disk after.
    pub size: u64,
    /// Bytes of a block of `changes`.
    pub block_size: u32,
    /// The blocks that may differ between any of the epochs before and `to`; or why that is not known.
    pub changes: Result<&'a Bitmap, &'a str>,
}

/// Appends a commit to the trail in `folder`. Not durable: what a power cut takes away is a gap.
///
/// # Errors
/// If it cannot be written: then it is a gap, too.
pub fn note_step(folder: &dyn Folder, step: &TrailStep<'_>) -> Result<(), SourceError> {
    let path = folder.path().join(NAME);
    let len = write_step(folder, step).map_err(|error| SourceError::State { what: "write", path, error })?;
    let every = if len.end < TIDY_LONG { TIDY_BYTES } else { TIDY_LONG };
    if len.start / every != len.end / every {
        tidy(folder, &step.to)?;
    }
    Ok(())
}

/// Returns where the new entry lies.
fn write_step(folder: &dyn Folder, step: &TrailStep<'_>) -> io::Result<Range<u64>> {
    let file = folder.open(NAME, true)?;
    let begin = file.len()?;
    let mut bytes = Vec::new();
    if begin < 8 {
        bytes.extend(MAGIC);
        if let Some((from, size)) = step.from {
            bytes.extend(entry_bytes(&head(&[from], Some(Gap::Begins), size, step.block_size, None), &[])?);
        }
    }
    let (from, block_size) = (step.from.map(|(from, _)| from), step.block_size);
    // Only where the source names the epoch before is that one of its own, and are all in between known.
    let names_all = from.is_none_or(|from| step.through.contains(&from));
    let begins = from.filter(|_| names_all || step.changes.is_ok()).map_or(0, |from| from.number + 1);
    let named = step.through.iter().filter(|e| (begins..step.to.number).contains(&e.number));
    let mut epochs: Vec<Epoch> = named.copied().collect();
    epochs.push(step.to);
    epochs.drain(..epochs.len().saturating_sub(IDS_KEPT));
    let lost = step.changes.err().map(Gap::from).or(from.is_none().then_some(Gap::Begins));
    let after = from.filter(|_| names_all || lost.is_none()).map(|from| from.id);
    let changes = step.changes.ok().filter(|_| lost.is_none()).map_or_else(Vec::new, encoded);
    let trail = !names_all && lost.is_none();
    let entry = Head { trail, ..head(&epochs, lost, step.size, block_size, after) };
    let entry = entry_bytes(&entry, &changes)?;
    bytes.extend(entry);
    let at = if begin < 8 { 0 } else { begin };
    file.write_at(at, &bytes)?;
    Ok(at..at + bytes.len() as u64)
}

fn head(epochs: &[Epoch], lost: Option<Gap>, size: u64, block_size: u32, after: Option<Uuid>) -> Head {
    Head { epochs: epochs.to_vec(), lost, size, block_size, time: now(), after, trail: false }
}

/// Leaves a history behind as the trail of the replica whose folder is `to`: what the source knew while it was one. Durable on return.
///
/// # Errors
/// If it cannot be read or written. The trail is what it was then.
pub fn leave_trail(history: &History, to: &dyn Folder) -> Result<(), SourceError> {
    let fail = |what| SourceError::state(what, &history.path);
    let mut content = vec![0; history.end as usize];
    if history.entries.is_empty() {
        return Ok(());
    }
    history.file.read_at(0, &mut content).map_err(fail("read"))?;
    device::replace(to, NAME, &content).map_err(SourceError::state("write", &to.path().join(NAME)))
}

/// The unbroken end of a trail.
#[derive(Debug, Default)]
pub struct Trail {
    /// The epochs before the first entry, ascending. What has changed since is not known.
    names: Vec<Epoch>,
    /// Heads and changes, oldest first. The first is what the chain begins after, and has no changes.
    entries: Vec<(Head, Vec<u8>)>,
}

impl Trail {
    /// What the trail in `folder` knows of the way to this epoch: the longest chain of commits without a gap that ends in it. It is
    /// empty if no commit is known to.
    pub fn leading_to(folder: &dyn Folder, to: &Epoch) -> Trail {
        // What cannot be read says nothing: what it could have told is found by comparing.
        Trail::read(folder, to).unwrap_or_default()
    }

    fn read(folder: &dyn Folder, to: &Epoch) -> Result<Trail, SourceError> {
        let path = folder.path().join(NAME);
        let file = match folder.open(NAME, false) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Trail::default()),
            Err(e) => return Err(SourceError::state("open", &path)(e)),
        };
        let mut log = History { path, file, entries: Vec::new(), end: 8 };
        let fail = |what| SourceError::state(what, &log.path);
        let len = log.file.len().map_err(fail("read"))?;
        let mut magic = [0; 8];
        if len < 8 || log.file.read_at(0, &mut magic).is_err() || magic != *MAGIC {
            return Ok(Trail::default());
        }
        let mut entries = Vec::new();
        let mut at = log.end;
        while let Some((entry, _, end)) = log.sound_entry(at, len).map_err(fail("read"))? {
            entries.push(entry);
            at = end;
        }
        log.end = at;
        let (names, chain) = chain(&entries, to);
        let mut trail = Trail { names, entries: Vec::new() };
        for entry in &chain {
            let mut changes = vec![0; (entry.changes.end - entry.changes.start) as usize];
            log.file.read_at(entry.changes.start, &mut changes).map_err(fail("read"))?;
            trail.push(entry.head.clone(), changes);
        }
        Ok(trail)
    }

    /// Adds the next entry of the chain. The first is known by its end alone.
    fn push(&mut self, mut head: Head, changes: Vec<u8>) {
        match self.entries.last().and_then(|(last, _)| last.epochs.last()) {
            None => {
                head.epochs.drain(..head.epochs.len() - 1);
                (head.lost, head.after, head.trail) = (Some(Gap::Begins), None, false);
                self.entries.push((head, Vec::new()));
            }
            Some(_) => self.entries.push((head, changes)),
        }
    }

    /// The epochs at which it knows what a replica lacks, the last one included; oldest first.
    pub fn epochs(&self) -> Vec<Epoch> {
        self.entries.iter().flat_map(|(head, _)| &head.epochs).copied().collect()
    }

    /// The bytes, in ranges, in which the last epoch may differ from one of [`Trail::epochs`]; `None` if that is not known. For tests.
    #[doc(hidden)]
    pub fn lacks(&self, at: &Epoch) -> Option<Vec<Range<u64>>> {
        let entry = self.entries.iter().position(|(head, _)| head.epochs.contains(at))?;
        let is_end = self.entries[entry].0.epochs.last() == Some(at);
        let mut ranges = Vec::new();
        for (head, changes) in &self.entries[entry + usize::from(is_end)..] {
            let unit = u64::from(head.block_size);
            let blocks = Bitmap::new(head.size.div_ceil(unit));
            blocks.decode_into(changes).ok().filter(|()| head.lost.is_none())?;
            ranges.extend(blocks.runs().map(|run| run.start * unit..run.end * unit));
        }
        Some(ranges)
    }

    /// The trail, as the beginning of a log.
    pub(super) fn encode(&self) -> io::Result<Vec<u8>> {
        let mut content = MAGIC.to_vec();
        let mut names = &self.names[..];
        for (head, changes) in &self.entries {
            let epochs = [std::mem::take(&mut names), &head.epochs].concat();
            content.extend(entry_bytes(&Head { epochs, ..head.clone() }, changes)?);
        }
        Ok(content)
    }

    /// Forgets what is oldest, until the rest takes no more than so many bytes.
    fn shorten(mut self, most: usize) -> Trail {
        let mut bytes = 0;
        let fits = |entry: &&(Head, Vec<u8>)| {
            bytes += size_of_entry(entry);
            bytes <= most
        };
        let keeps = self.entries.iter().rev().take_while(fits).count();
        let rest = self.entries.split_off(self.entries.len() - keeps);
        let mut trail = Trail::default();
        rest.into_iter().for_each(|(head, changes)| trail.push(head, changes));
        trail
    }
}

/// Bytes that an entry takes at most, its ids included.
fn size_of_entry((head, changes): &(Head, Vec<u8>)) -> usize {
    changes.len() + head.epochs.len() * 64 + 256
}

/// The entries of a log that lead to an epoch, each beginning where the one before it ends; oldest first. The first one is where the
/// chain begins: of what came before that only the epochs are known, which come with it.
fn chain<'a>(entries: &'a [Entry], to: &Epoch) -> (Vec<Epoch>, Vec<&'a Entry>) {
    let mut ends: HashMap<Uuid, &Entry> = HashMap::new();
    for entry in entries {
        let Some(last) = entry.head.epochs.last() else { continue };
        // A commit that was noted twice is known if it is known once.
        if entry.head.lost.is_none() || !ends.contains_key(&last.id) {
            ends.insert(last.id, entry);
        }
    }
    let Some(mut entry) = ends.get(&to.id).copied().filter(|entry| entry.head.epochs.last() == Some(to))
    else {
        return (Vec::new(), Vec::new());
    };
    let before = |entry: &Entry| {
        let first = entry.head.epochs.first().map_or(0, |first| first.number);
        let before = ends.get(&entry.head.after?).copied();
        before.filter(|e| e.head.epochs.last().is_some_and(|e| e.number < first))
    };
    let mut chain = vec![entry];
    while let (None, Some(earlier)) = (&entry.head.lost, before(entry)) {
        entry = earlier;
        chain.push(entry);
    }
    chain.reverse();
    // Back to where one may be missing.
    let inside = |entry: &Entry| if entry.head.trail { 1 } else { usize::MAX };
    let mut names: Vec<Epoch> = entry.head.epochs.iter().rev().take(inside(entry)).skip(1).copied().collect();
    while let Some(earlier) = before(entry).filter(|_| !entry.head.trail && names.len() < IDS_KEPT) {
        entry = earlier;
        names.extend(entry.head.epochs.iter().rev().take(inside(entry)));
    }
    names.truncate(IDS_KEPT);
    names.reverse();
    (names, chain)
}

/// Keeps of a long trail what leads to its last epoch, with old neighbours folded.
fn tidy(folder: &dyn Folder, to: &Epoch) -> Result<(), SourceError> {
    let path = folder.path().join(NAME);
    let write = |trail: &Trail| {
        let content = trail.encode().and_then(|content| device::replace(folder, NAME, &content));
        content.map_err(SourceError::state("write", &path))
    };
    write(&Trail::read(folder, to)?)?;
    History::read(folder)?.tidy(folder, &[], &[])?;
    let trail = Trail::read(folder, to)?;
    match trail.entries.iter().map(size_of_entry).sum::<usize>() > MOST_BYTES {
        true => write(&trail.shorten(MOST_BYTES)),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use device::Dir;
    use proptest::prelude::*;

    use super::*;
    use crate::record::history::KnownPosition;

    const BLOCKS: u64 = 64;
    const SIZE: u64 = BLOCKS * 4096;

    fn scratch() -> (tempfile::TempDir, Dir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = Dir::open(temp.path()).unwrap();
        (temp, dir)
    }

    fn epoch(number: u64) -> Epoch {
        Epoch { number, id: Uuid::from_u128(1000 + u128::from(number)) }
    }

    fn note(dir: &Dir, from: u64, through: &[u64], to: u64, set: &[u64]) {
        let changes = Bitmap::new(BLOCKS);
        set.iter().for_each(|b| {
            changes.set(*b..*b + 1);
        });
        let through: Vec<Epoch> = through.iter().map(|n| epoch(*n)).collect();
        let from = Some((epoch(from), SIZE));
        let step = TrailStep {
            from,
            through: &through,
            to: epoch(to),
            size: SIZE,
            block_size: 4096,
            changes: Ok(&changes),
        };
        note_step(dir, &step).unwrap();
    }

    fn lost(dir: &Dir, from: u64, to: u64) {
        let from = Some((epoch(from), SIZE));
        let step = TrailStep {
            from,
            through: &[],
            to: epoch(to),
            size: SIZE,
            block_size: 4096,
            changes: Err("test"),
        };
        note_step(dir, &step).unwrap();
    }

    /// The blocks that a replica at an epoch lacks of a source that was promoted at `base`, and unsure in block 63 then. `Err` with
    /// what the history says.
    fn lacks(dir: &Dir, base: u64, at: u64) -> Result<Vec<u64>, String> {
        lacks_each(dir, base, &[at]).remove(0)
    }

    fn lacks_each(dir: &Dir, base: u64, at: &[u64]) -> Vec<Result<Vec<u64>, String>> {
        let (_temp, place) = scratch();
        let trail = Trail::leading_to(dir, &epoch(base));
        let ahead = Bitmap::new(BLOCKS);
        ahead.set(63..64);
        let moments = vec![Epoch { number: base + 1, id: Uuid::from_u128(5) }];
        History::begin(&place, (&trail, epoch(base)), moments, SIZE, 4096, Ok(&ahead)).unwrap();
        let history = History::read(&place).unwrap();
        at.iter().map(|at| lacks_of(&history, *at)).collect()
    }

    fn lacks_of(history: &History, at: u64) -> Result<Vec<u64>, String> {
        let blocks = Bitmap::new(BLOCKS);
        let position = KnownPosition { epoch: epoch(at), upto: SIZE };
        assert_eq!(
            history.reaches(&[position]).is_ok(),
            history.changes_since(&[position], 4096, &blocks).is_ok()
        );
        history.changes_since(&[position], 4096, &blocks).map_err(|error| error.to_string())?;
        assert_eq!(history.size_at(&epoch(at)), Some(SIZE));
        Ok(blocks.runs().flatten().collect())
    }

    #[test]
    fn a_promoted_replica_knows_what_its_commits_changed() {
        let (_temp, dir) = scratch();
        assert_eq!(lacks(&dir, 5, 5), Ok(vec![63]), "without a trail");
        note(&dir, 3, &[], 5, &[1, 2]);
        note(&dir, 5, &[6, 7], 8, &[2, 9]);
        note(&dir, 8, &[], 9, &[30]);
        for (at, expected) in [
            (3, vec![1, 2, 9, 30, 63]),
            (5, vec![2, 9, 30, 63]),
            (7, vec![2, 9, 30, 63]),
            (8, vec![30, 63]),
            (9, vec![63]),
        ] {
            assert_eq!(lacks(&dir, 9, at), Ok(expected), "since epoch {at}");
        }
        // Of what is not named it is not said that it is another's.
        for at in [1, 4] {
            let error = lacks(&dir, 9, at).unwrap_err();
            assert!(error.contains("not known") && !error.contains("diverged"), "{error}");
        }
        // At an earlier epoch, to which it was brought back.
        assert_eq!(lacks(&dir, 5, 3), Ok(vec![1, 2, 63]));
        lacks(&dir, 5, 8).unwrap_err();
        // And on from there.
        note(&dir, 5, &[], 11, &[40]);
        assert_eq!(lacks(&dir, 11, 3), Ok(vec![1, 2, 40, 63]));
        lacks(&dir, 11, 8).unwrap_err();
    }

    /// What its source has named behind a gap is compared; another epoch of a number that is taken has diverged.
    #[test]
    fn behind_a_gap_epochs_are_known_by_name() {
        let (_temp, dir) = scratch();
        let gap = |from: Option<u64>, through: &[u64], to: u64| {
            let through: Vec<Epoch> = through.iter().map(|n| epoch(*n)).collect();
            let from = from.map(|from| (epoch(from), SIZE));
            let changes = Err("test");
            let step =
                TrailStep { from, through: &through, to: epoch(to), size: SIZE, block_size: 4096, changes };
            note_step(&dir, &step).unwrap();
        };
        let other = |number| Epoch { number, id: Uuid::from_u128(7) };
        let says = |base: u64, at: Epoch| {
            let (_temp, place) = scratch();
            let trail = Trail::leading_to(&dir, &epoch(base));
            assert!(!trail.epochs().contains(&at));
            History::begin(&place, (&trail, epoch(base)), vec![epoch(base + 1)], SIZE, 4096, Err("".into()))
                .unwrap();
            let history = History::read(&place).unwrap();
            assert_eq!(history.size_at(&at), None);
            match history.reaches(&[KnownPosition { epoch: at, upto: SIZE }]) {
                Ok(()) => "known",
                Err(SourceError::Foreign(_)) => "diverged",
                Err(_) => "not known",
            }
        };
        gap(None, &[2, 3], 4);
        note(&dir, 4, &[4], 5, &[1]);
        gap(Some(5), &[5, 7], 8);
        note(&dir, 8, &[8, 9], 10, &[2]);
        for (at, expected) in [
            (epoch(1), "not known"),
            (epoch(2), "not known"),
            (epoch(4), "not known"),
            (epoch(5), "not known"),
            (epoch(7), "not known"),
            (other(1), "not known"),
            (other(2), "diverged"),
            (other(3), "diverged"),
            (other(4), "diverged"),
            (other(5), "diverged"),
            (other(6), "diverged"),
            (other(7), "diverged"),
            (other(9), "diverged"),
        ] {
            assert_eq!(says(10, at), expected, "{at:?}");
        }
        assert_eq!(lacks(&dir, 10, 8), Ok(vec![2, 63]));
        assert_eq!(lacks(&dir, 10, 9), Ok(vec![2, 63]));
        // Its epoch is not one of a source that does not name it: what was before that is nothing to this one.
        gap(Some(10), &[12, 13], 14);
        assert_eq!(says(14, other(9)), "not known");
        assert_eq!(says(14, other(12)), "diverged");
        gap(Some(14), &[14], 15);
        tidy(&dir, &epoch(15)).unwrap();
        assert_eq!(says(15, other(12)), "diverged");
    }

    /// Each kind of gap: what lies behind it is not known, what follows it is.
    #[test]
    fn a_gap_ends_what_is_known() {
        type Gap<'a> = (&'a str, &'a dyn Fn(&Dir));
        let kinds: [Gap<'_>; 4] = [
            ("not noted", &|_| {}),
            ("noted as unknown", &|dir| lost(dir, 5, 7)),
            ("damaged", &|dir| {
                note(dir, 5, &[], 7, &[3]);
                let path = dir.path().join(NAME);
                let mut bytes = std::fs::read(&path).unwrap();
                let at = bytes.len() - 3;
                bytes[at] ^= 1;
                std::fs::write(path, bytes).unwrap();
            }),
            ("cut off", &|dir| {
                note(dir, 5, &[], 7, &[3]);
                let path = dir.path().join(NAME);
                let bytes = std::fs::read(&path).unwrap();
                std::fs::write(path, &bytes[..bytes.len() - 5]).unwrap();
            }),
        ];
        for (what, gap) in kinds {
            let (_temp, dir) = scratch();
            note(&dir, 3, &[], 5, &[1, 2]);
            gap(&dir);
            note(&dir, 7, &[], 9, &[9]);
            note(&dir, 9, &[], 10, &[10]);
            for at in [3, 5] {
                lacks(&dir, 10, at).expect_err(what);
            }
            assert_eq!(lacks(&dir, 10, 9), Ok(vec![10, 63]), "{what}");
            // Of another moment than the replica.
            assert_eq!(lacks(&dir, 12, 12), Ok(vec![63]), "{what}");
            lacks(&dir, 12, 10).expect_err(what);
        }
    }

    #[test]
    fn a_long_trail_is_tidied_and_what_it_knows_stays_true() {
        let (temp, dir) = scratch();
        let sets = |number: u64| (number * 7 % 61..number * 7 % 61 + 1 + number % 3).collect::<Vec<u64>>();
        for number in 1..9000 {
            note(&dir, number, &[], number + 1, &sets(number));
        }
        let len = std::fs::metadata(temp.path().join(NAME)).unwrap().len();
        assert!(len < TIDY_BYTES * 5 / 4, "{len}");
        for at in [8999, 8900, 8000] {
            let mut expected: Vec<u64> = (at..9000).flat_map(sets).chain([63]).collect();
            expected.sort_unstable();
            expected.dedup();
            let found = lacks(&dir, 9000, at).unwrap();
            assert!(expected.iter().all(|block| found.contains(block)), "since epoch {at}: {found:?}");
        }
        // As a demoted source leaves it.
        let (_temp, place) = scratch();
        leave_trail(&History::read(&dir).unwrap(), &place).unwrap();
        assert_eq!(lacks(&place, 9000, 8999), lacks(&dir, 9000, 8999));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        /// A replica that commits, fails to note it, is brought back, and loses parts of its log: what the trail says it lacks is all
        /// that differs.
        #[test]
        fn no_change_is_missed(
            steps in proptest::collection::vec(
                (0u8..12, proptest::collection::vec(0..BLOCKS - 1, 0..6), any::<proptest::sample::Index>()), 1..40),
        ) {
            let (_temp, dir) = scratch();
            let path = dir.path().join(NAME);
            let mut contents = vec![vec![0u32; BLOCKS as usize]];
            // The line of epochs on which the replica stands, and old copies of the log.
            let (mut line, mut copies) = (vec![0u64], vec![Vec::new()]);
            for (kind, set, pick) in steps {
                let from = *line.last().unwrap();
                let to = contents.len() as u64;
                let mut content = contents[from as usize].clone();
                set.iter().for_each(|b| content[*b as usize] += to as u32);
                let log = std::fs::read(&path).unwrap_or_default();
                match kind {
                    0..=5 => note(&dir, from, &[], to, &set),
                    6 => lost(&dir, from, to),
                    7 => {
                        line.truncate(pick.index(line.len()) + 1);
                        continue;
                    }
                    8 => {
                        std::fs::write(&path, &log[..pick.index(log.len() + 1)]).unwrap();
                        continue;
                    }
                    9 => {
                        std::fs::write(&path, pick.get(&copies)).unwrap();
                        continue;
                    }
                    10 => copies.push(log),
                    _ => {}
                }
                contents.push(content);
                line.push(to);
            }
            let base = *line.last().unwrap();
            let mut known = 0;
            for (at, found) in line.iter().zip(lacks_each(&dir, base, &line)) {
                let Ok(found) = found else { continue };
                known += 1;
                let (then, now) = (&contents[*at as usize], &contents[base as usize]);
                let differs = (0..BLOCKS).filter(|b| then[*b as usize] != now[*b as usize]);
                for block in differs {
                    prop_assert!(found.contains(&block), "block {} since epoch {}", block, at);
                }
            }
            prop_assert!(known > 0);
        }
    }
}
