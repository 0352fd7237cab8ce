//! The unsure set: the blocks in which a replica cannot vouch that they are of its epoch. A batch of a mirror has brought them
//! further, or the source could not read them. The source adds them to the changes that it sends.
//!
//! The set is kept in a file of its own in the replica's folder, which the lineage names: `unsure-ID`, the XXH3-128 of ID and what
//! follows, then [`UnsureSet::encode`]. `unsure.new` is the room for the next.
//!
//! | why a block is unsure | who put it there | it is sure again when |
//! | --- | --- | --- |
//! | a batch of a mirror wrote it: it is newer than the epoch | `BatchCommitter::commit` | the epoch ends, or a sync has written it |
//! | the source could not read it | a record *unsure* of a delta | any delta has written it |
//! | others were seen to write to the device: every block | `Replica::notice` | all of it was compared |
//!
//! The set is a bitmap; a commit writes the next one first. Within a mirror's journal it is
//! in memory: recovery makes it again from the batches that the journal holds. Room for it is reserved before a journal is sealed. The
//! source hears it with the status (`sync/src/wire/messages.rs`) and adds it to what changed (`plan::tracked`), so no comparison is needed;
//! such a delta is bound to the replica's state. A delta made without that knowledge, of `extract`, takes out of the set what it writes
//! and leaves the rest. A step that was cut off in place needs no blocks in it: its parts are at their own epochs, and what changed
//! between these covers what it had begun to write.

use std::ops::Range;
use std::{fmt, io};

use delta::{Frame, Header, Record};
use device::Folder;
use extents::{Bitmap, Extents, varint};
use twox_hash::XxHash3_128;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::journal::Target;
use crate::state::lineage::{self, Unsure};

/// What the names of the files begin with.
const NAME: &str = "unsure";
/// The most bytes that a range takes in an encoding.
const RANGE: u64 = 12;
/// The most that everything else takes in a file.
const REST: u64 = 64;
/// The fewest bytes that a bit covers.
const LEAST_UNIT: u64 = 4096;
/// The most bits of a set: of a larger disk, each covers more.
const MOST_BLOCKS: u64 = 1 << 30;

/// Blocks of a replica, as a set of byte ranges.
pub struct UnsureSet {
    /// Bytes a block.
    unit: u64,
    blocks: Bitmap,
}

impl UnsureSet {
    /// The longest encoding of a set, in bytes: a bitmap as it is, and a percent.
    pub const LONGEST: usize = (MOST_BLOCKS / 8 / 99 * 100) as usize;

    /// The empty set.
    pub fn new() -> UnsureSet {
        UnsureSet { unit: LEAST_UNIT, blocks: Bitmap::new(0) }
    }

    /// The blocks of a bitmap, each of `block_size` bytes.
    pub fn of_blocks(blocks: &Bitmap, block_size: u64) -> UnsureSet {
        let mut set = UnsureSet::new();
        set.reach(blocks.blocks().saturating_mul(block_size), block_size);
        for run in blocks.runs() {
            set.insert(run.start * block_size..run.end * block_size);
        }
        set
    }

    /// True if no block is in the set.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_clean()
    }

    /// Bytes a block.
    pub(crate) fn unit(&self) -> u64 {
        self.unit
    }

    /// Bytes of the blocks in the set, the last one whole.
    pub fn bytes(&self) -> u64 {
        self.blocks.count().saturating_mul(self.unit)
    }

    /// Ranges in the set.
    pub(crate) fn count(&self) -> u64 {
        self.blocks.runs().count() as u64
    }

    /// The ranges in bytes, ascending. The last may reach past the end of the disk.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.blocks.runs().map(|run| run.start * self.unit..run.end.saturating_mul(self.unit))
    }

    /// Marks the blocks of `block_size` bytes that it has a part of.
    pub fn mark(&self, blocks: &Bitmap, block_size: u64) {
        for range in self.ranges() {
            blocks.set(range.start / block_size..range.end.div_ceil(block_size));
        }
    }

    /// Makes room for the blocks of a disk of `size` bytes, tracked in blocks of `block_size` bytes.
    pub(crate) fn reach(&mut self, size: u64, block_size: u64) {
        let mut unit = if self.is_empty() { LEAST_UNIT.max(block_size) } else { self.unit };
        while size.div_ceil(unit) > MOST_BLOCKS {
            unit *= 2;
        }
        let blocks = size.div_ceil(unit);
        if unit == self.unit && blocks <= self.blocks.blocks() {
            return;
        }
        let before = std::mem::replace(self, UnsureSet { unit, blocks: Bitmap::new(blocks) });
        before.ranges().for_each(|range| self.insert(range));
    }

    /// Adds the blocks of a range of bytes, as far as there is room for them.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        self.blocks.set(range.start / self.unit..range.end.div_ceil(self.unit));
    }

    /// The parts of a range of bytes, in whole blocks of a disk of `size` bytes, that are not in the set.
    pub(crate) fn missing(&self, range: Range<u64>, size: u64) -> Vec<Range<u64>> {
        let blocks = range.start / self.unit..range.end.min(size).div_ceil(self.unit);
        let (mut missing, mut at) = (Vec::new(), blocks.start);
        let end = std::iter::once(blocks.end..blocks.end);
        for run in self.blocks.runs_in(blocks.clone()).chain(end) {
            if at < run.start {
                missing.push(at * self.unit..(run.start * self.unit).min(size));
            }
            at = run.end;
        }
        missing
    }

    /// Takes out the blocks that a range of bytes covers, on a disk of `size` bytes.
    fn remove(&mut self, range: Range<u64>, size: u64) {
        let end = if range.end >= size { self.blocks.blocks() } else { range.end / self.unit };
        let start = range.start.div_ceil(self.unit);
        if start < end {
            self.blocks.clear(start..end);
        }
    }

    /// Adds the blocks of another set.
    pub(crate) fn join(&mut self, other: &UnsureSet) {
        if !other.is_empty() {
            let size = other.blocks.blocks().saturating_mul(other.unit);
            self.reach(size, other.unit);
            other.ranges().for_each(|range| self.insert(range));
        }
    }

    /// Adds ranges of bytes.
    pub fn extend(&mut self, ranges: &Extents) {
        if !ranges.is_empty() {
            self.reach(ranges.end(), 1);
            ranges.iter().for_each(|range| self.insert(range));
        }
    }

    /// A compact form: the bytes of a block as a varint, then the bitmap.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        varint::put(&mut out, self.unit);
        self.blocks.encode(&mut out);
        out
    }

    /// A set from its compact form; `None` if it is malformed.
    pub fn decode(mut bytes: &[u8]) -> Option<UnsureSet> {
        let unit = varint::get(&mut bytes).ok()?;
        let blocks = varint::get(&mut { bytes }).ok()?;
        let sound = unit.is_power_of_two() && (LEAST_UNIT..=1 << 40).contains(&unit) && blocks <= MOST_BLOCKS;
        let sound = sound && blocks.saturating_mul(unit) <= 1 << 63;
        let set = sound.then(|| UnsureSet { unit, blocks: Bitmap::new(blocks) })?;
        set.blocks.decode_into(bytes).ok()?;
        Some(set)
    }
}

impl Default for UnsureSet {
    fn default() -> UnsureSet {
        UnsureSet::new()
    }
}

impl Clone for UnsureSet {
    fn clone(&self) -> UnsureSet {
        let blocks = Bitmap::new(self.blocks.blocks());
        blocks.union_with(&self.blocks);
        UnsureSet { unit: self.unit, blocks }
    }
}

impl PartialEq for UnsureSet {
    fn eq(&self, other: &UnsureSet) -> bool {
        self.ranges().eq(other.ranges())
    }
}

impl Eq for UnsureSet {}

impl fmt::Debug for UnsureSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.ranges()).finish()
    }
}

/// The set that a lineage names. It is empty if the lineage says everything, which is to be asked first.
///
/// # Errors
/// If the file is missing or damaged.
pub(crate) fn load(folder: &dyn Folder, unsure: &Unsure) -> Result<UnsureSet> {
    let Unsure::Blocks { file, .. } = unsure else { return Ok(UnsureSet::new()) };
    let name = name_of(file);
    let path = folder.path().join(&name);
    let found = folder.open(&name, false).and_then(|file| {
        let mut bytes = vec![0; file.len()?.min(UnsureSet::LONGEST as u64) as usize];
        file.read_at(0, &mut bytes).map(|()| bytes)
    });
    let bytes = match found {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(io_error("read", &path)(e)),
        found => found.unwrap_or_default(),
    };
    let (hash, encoded) = bytes.split_at_checked(16).unwrap_or_default();
    let whole = hash_of(file, encoded) == *hash;
    whole.then(|| UnsureSet::decode(encoded)).flatten().ok_or_else(|| ReplicaError::Damaged {
        path,
        why: "it does not say in which blocks the replica is unsure".into(),
        way_out: lineage::COMPARE_ANEW.into(),
    })
}

/// Keeps a set in a file of its own, durably, for a lineage to name.
///
/// # Errors
/// If it cannot be written.
pub(crate) fn store(folder: &dyn Folder, set: &UnsureSet, state: &'static str) -> Result<Unsure> {
    if set.is_empty() {
        return Ok(Unsure::Nothing);
    }
    let (encoded, file) = (set.encode(), Uuid::new_v4());
    let mut bytes = hash_of(&file, &encoded).to_vec();
    bytes.extend(encoded);
    let written = (|| {
        let fresh = device::reserved(NAME);
        let room = folder.open(&fresh, true)?;
        room.write_at(0, &bytes)?;
        room.set_len(bytes.len() as u64)?;
        room.sync()?;
        folder.rename(&fresh, &name_of(&file))?;
        folder.sync()
    })();
    written.map_err(disk_error("write", &folder.path().join(NAME), state))?;
    Ok(Unsure::Blocks { file, bytes: set.bytes() })
}

/// Makes room for the next set, of so many ranges, before that is needed.
///
/// # Errors
/// If there is none.
pub(crate) fn reserve(folder: &dyn Folder, ranges: u64, state: &'static str) -> Result<()> {
    let reserved = device::reserve(folder, NAME, REST + ranges.saturating_mul(RANGE));
    reserved.map_err(disk_error("make room for", &folder.path().join(NAME), state))
}

/// Gives the room back that was made for a set.
///
/// # Errors
/// If it cannot be removed.
pub(crate) fn give_back(folder: &dyn Folder) -> Result<()> {
    let name = device::reserved(NAME);
    folder.remove(&name).map_err(io_error("remove", &folder.path().join(name)))
}

/// Removes the sets that no lineage names any more. Where the next one has no room yet and `reuse` says so, it gets that of the
/// largest.
pub(crate) fn sweep(folder: &dyn Folder, named: &[&Unsure], reuse: bool) -> Result<()> {
    let keeps =
        |name: &String| named.iter().any(|unsure| unsure.file().is_some_and(|file| name_of(file) == *name));
    let names = folder.list().map_err(io_error("look into", folder.path()))?;
    let is_set = |name: &String| name.starts_with(NAME) && *name != device::reserved(NAME);
    let mut unnamed: Vec<&String> = names.iter().filter(|name| is_set(name) && !keeps(name)).collect();
    if reuse && !names.contains(&device::reserved(NAME)) {
        let len = |name: &&String| folder.open(name, false).and_then(|file| file.len()).unwrap_or(0);
        unnamed.sort_by_key(len);
        if let Some(largest) = unnamed.pop() {
            let path = folder.path().join(largest);
            folder.rename(largest, &device::reserved(NAME)).map_err(io_error("rename", &path))?;
        }
    }
    for name in unnamed {
        folder.remove(name).map_err(io_error("remove", &folder.path().join(name)))?;
    }
    Ok(())
}

/// The hash of an encoded set, bound to its file.
fn hash_of(file: &Uuid, encoded: &[u8]) -> [u8; 16] {
    let seed = file.as_u64_pair().0;
    XxHash3_128::oneshot_with_seed(seed, encoded).to_le_bytes()
}

fn name_of(file: &Uuid) -> String {
    format!("unsure-{}", file.simple())
}

/// Brings a journal to a target, and marks what it makes of the unsure set.
pub(crate) struct Marking<'a> {
    pub target: &'a mut dyn Target,
    /// The set before it.
    pub was: UnsureSet,
    pub passing: Option<Passing>,
}

impl Marking<'_> {
    /// The set after all of it.
    pub(crate) fn end(self) -> UnsureSet {
        self.passing.map_or(self.was, Passing::end)
    }
}

impl Target for Marking<'_> {
    fn rewind(&mut self, header: &Header, known: u64) -> io::Result<()> {
        let was = std::mem::take(&mut self.was);
        let was = self.passing.take().map_or(was, Passing::end);
        self.passing = Some(Passing::new(was, header));
        self.target.rewind(header, known)
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        if let Some(passing) = &mut self.passing {
            passing.records(&frame.records);
        }
        self.target.frame(frame)
    }
}

/// What a delta makes of the unsure set, as its records pass.
pub(crate) struct Passing {
    set: UnsureSet,
    rule: Rule,
    size: u64,
    /// The source could not read something.
    unread: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// A batch is newer than the epoch in all that it writes.
    Adds,
    /// What is written is of the epoch; what is not named stays as it was.
    Mends,
    /// The delta was made for all that the replica is: what it does not name is of the epoch too.
    Renews,
}

impl Rule {
    fn of(header: &Header) -> Rule {
        let whole = header.is_seed() || header.binds.is_some();
        match () {
            () if header.batch => Rule::Adds,
            () if whole && !header.partial && header.resumes.is_none() => Rule::Renews,
            () => Rule::Mends,
        }
    }
}

impl Passing {
    /// A delta with this header comes to a replica with this set.
    pub(crate) fn new(mut set: UnsureSet, header: &Header) -> Passing {
        let rule = Rule::of(header);
        if rule == Rule::Renews {
            set = UnsureSet::new();
        }
        set.reach(header.size_after, header.block_size.into());
        Passing { set, rule, size: header.size_after, unread: false }
    }

    /// Takes a frame's records.
    pub(crate) fn records(&mut self, records: &[Record]) {
        for record in records {
            let range = record.offset()..record.end();
            self.unread |= matches!(record, Record::Unsure { .. });
            if self.rule == Rule::Adds || matches!(record, Record::Unsure { .. }) {
                self.set.insert(range);
            } else if !self.set.is_empty() {
                self.set.remove(range, self.size);
            }
        }
    }

    /// Adds what the source could not read of what the delta goes on from.
    pub(crate) fn extend(&mut self, unread: &Extents) {
        self.unread |= !unread.is_empty();
        self.set.extend(unread);
    }

    /// True if the source could not read something since [`Passing::kept_unread`].
    pub(crate) fn has_unread(&self) -> bool {
        self.unread
    }

    /// What the source could not read was written down.
    pub(crate) fn kept_unread(&mut self) {
        self.unread = false;
    }

    /// True for a batch: the blocks before are in the set, too.
    pub(crate) fn adds(&self) -> bool {
        self.rule == Rule::Adds
    }

    /// The set so far.
    pub(crate) fn set(&self) -> &UnsureSet {
        &self.set
    }

    /// The set after all of the delta: what was cut off the disk is not in it.
    pub(crate) fn end(self) -> UnsureSet {
        let end = self.size.div_ceil(self.set.unit);
        if end < self.set.blocks.blocks() {
            self.set.blocks.clear(end..self.set.blocks.blocks());
        }
        self.set
    }
}

// Lists of one range are just that.
#[allow(clippy::single_range_in_vec_init)]
#[cfg(test)]
mod tests {
    use delta::{Epoch, Method};
    use proptest::prelude::*;

    use super::*;

    const K: u64 = 4096;

    fn set(ranges: &[Range<u64>]) -> UnsureSet {
        let mut set = UnsureSet::new();
        set.extend(&ranges.iter().cloned().collect());
        set
    }

    fn record(kind: char, range: Range<u64>) -> Record {
        let (offset, len) = (range.start * K, (range.end - range.start) * K);
        match kind {
            'd' => Record::Data { offset, len },
            'z' => Record::Zero { offset, len },
            _ => Record::Unsure { offset, len },
        }
    }

    fn epoch(number: u64) -> Epoch {
        Epoch { number, id: Uuid::from_u128(number.into()) }
    }

    /// The set after a delta of 100 blocks, which is given in words, to a replica at epoch 5 that is unsure in 10..20.
    fn after(delta: &str) -> Vec<Range<u64>> {
        let has = |word: &str| delta.split_whitespace().any(|w| w == word);
        let method = match () {
            () if has("compare") => Method::Compare,
            () if has("seed") => Method::Copy,
            () => Method::Tracked,
        };
        let mut header = Header::new(Uuid::nil(), method, vec![epoch(6)], (100 * K, 100 * K), 4096);
        header.binds = has("bound").then(Uuid::nil);
        (header.batch, header.partial) = (has("batch"), has("partial"));
        header.resumes =
            has("resumes").then(|| delta::Resume { stream: Uuid::nil(), frames: 1, digest: [0; 32] });
        let mut passing = Passing::new(set(&[10 * K..20 * K]), &header);
        passing.records(&[record('d', 5..12), record('z', 14..15), record('u', 50..51)]);
        passing.end().ranges().map(|r| r.start / K..r.end / K).collect()
    }

    #[test]
    fn what_a_delta_makes_of_the_set() {
        for (delta, expected) in [
            // What is written is no longer unsure; what was not read is.
            ("tracked", &[12..14, 15..20, 50..51][..]),
            ("tracked resumes bound", &[12..14, 15..20, 50..51]),
            // Made for what the replica is, of which it knows.
            ("tracked bound", &[50..51]),
            ("compare bound", &[50..51]),
            ("seed", &[50..51]),
            ("compare bound partial", &[12..14, 15..20, 50..51]),
            ("batch bound", &[5..20, 50..51]),
        ] {
            assert_eq!(after(delta), expected, "{delta}");
        }
    }

    #[test]
    fn what_is_cut_off_is_not_unsure() {
        let header = Header::new(Uuid::nil(), Method::Tracked, vec![epoch(6)], (100 * K, 15 * K - 7), 4096);
        let passing = Passing::new(set(&[10 * K..20 * K]), &header);
        assert_eq!(passing.end().ranges().collect::<Vec<_>>(), [10 * K..15 * K]);
        // The disk's last block is written as a whole, however short it is.
        let mut passing = Passing::new(set(&[10 * K..20 * K]), &header);
        passing.records(&[Record::Data { offset: 14 * K, len: K - 7 }]);
        assert_eq!(passing.end().ranges().collect::<Vec<_>>(), [10 * K..14 * K]);
    }

    #[test]
    fn sets_are_kept_until_no_lineage_names_them() {
        let temp = tempfile::tempdir().unwrap();
        let folder = device::Dir::open(temp.path()).unwrap();
        assert_eq!(store(&folder, &UnsureSet::new(), "").unwrap(), Unsure::Nothing);
        let (one, two) = (set(&[3..5, K * 77..K * 99]), set(&[0..1]));
        let (first, second) = (store(&folder, &one, "").unwrap(), store(&folder, &two, "").unwrap());
        assert_eq!((load(&folder, &first).unwrap(), load(&folder, &second).unwrap()), (one, two.clone()));
        sweep(&folder, &[&Unsure::Nothing, &second], false).unwrap();
        assert!(matches!(load(&folder, &first), Err(ReplicaError::Damaged { .. })));
        assert_eq!(load(&folder, &second).unwrap(), two);
        let path = temp.path().join(name_of(second.file().unwrap()));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(load(&folder, &second), Err(ReplicaError::Damaged { .. })));
    }

    proptest! {
        #[test]
        fn a_set_returns_from_its_encoding(
            ranges in proptest::collection::vec((0u64..1 << 40, 1u64..1 << 24), 0..40),
            unit in 9u32..24,
        ) {
            let mut set = UnsureSet::new();
            set.reach(1 << 41, 1 << unit);
            ranges.iter().for_each(|&(start, len)| set.insert(start..start + len));
            prop_assert_eq!(UnsureSet::decode(&set.encode()), Some(set.clone()));
            let mut joined = UnsureSet::new();
            joined.join(&set);
            prop_assert_eq!(joined, set);
        }

        #[test]
        fn nonsense_is_no_set(bytes: Vec<u8>, unit in 12u32..63, blocks in 0u64..1 << 31) {
            let _ = UnsureSet::decode(&bytes);
            // Of a peer, so nothing that it says may overflow.
            let mut lie = Vec::new();
            varint::put(&mut lie, 1 << unit);
            let all = Bitmap::new(blocks.min(1 << 20));
            all.set(0..blocks);
            all.encode(&mut lie);
            if let Some(set) = UnsureSet::decode(&lie) {
                set.ranges().for_each(drop);
            }
        }
    }
}
