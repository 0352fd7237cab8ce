//! The history of a source: the changes of each epoch, in one append-only log.
//!
//! The log is a sequence of entries, each `[length u32][xxh3 u64][head length u32][head: JSON][changes]`, fsynced one by one. A truncated
//! last entry is an epoch that never existed. Entries that no bookmark needs are dropped, and old neighbours folded into
//! one, by writing a new log and renaming it.
//!
//! Each entry names the epoch before it. So an entry that cannot be read, or is gone, is a gap between its neighbours, and not the end of
//! what is known: the next one counts as lost, whatever it says.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::PathBuf;

use delta::Epoch;
use device::{Folder, StateFile};
use extents::Bitmap;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::{Gap, SourceError};

pub(crate) mod trail;

use trail::Trail;

pub(crate) const NAME: &str = "history";
const MAGIC: &[u8; 8] = b"dsynchis";
/// Bytes of an entry before its head.
const PREFIX: usize = 16;
/// Entries at which the log is tidied, and how many of the newest are then kept as they are.
const TIDY_AT: usize = 512;
const TIDY_KEEPS: usize = 256;
/// Ids that a folded entry remembers; older ones are forgotten, and a replica there is compared.
const IDS_KEPT: usize = 4096;
/// Epochs that a replica is told of which come before all that it knows.
const TOLD_OF_BEFORE: usize = 256;
/// The most epochs that a replica is told of.
const MOST_TOLD: usize = 4096;

/// One epoch's entry, or several epochs' folded into one.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Head {
    /// The epochs, ascending; the last one is where the entry ends. Where a history begins with a trail, the others are
    /// nothing but names.
    epochs: Vec<Epoch>,
    /// Why the changes are not known; `None` if they are.
    lost: Option<Gap>,
    /// Size in bytes at the end.
    size: u64,
    /// Block size in bytes.
    block_size: u32,
    /// Seconds since 1970 at the end.
    time: u64,
    /// The epoch in which the entry before ends. `None` for the very first, and where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    after: Option<Uuid>,
    /// It is of a replica's trail: there may have been epochs in it, or before it, back to the entry before, that it does not name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    trail: bool,
}

/// How the JSON of a head begins, after its entry's prefix.
const HEAD: &[u8] = b"{\"epochs\":[";

impl Head {
    /// The epochs of which more than the name is known.
    fn known(&self) -> &[Epoch] {
        let named = if self.lost == Some(Gap::Begins) { self.epochs.len().saturating_sub(1) } else { 0 };
        self.epochs.get(named..).unwrap_or_default()
    }
}

#[derive(Debug, Clone)]
struct Entry {
    head: Head,
    /// Where the changes lie in the file.
    changes: Range<u64>,
}

/// Public description of an entry.
#[derive(Debug, Clone, Serialize)]
pub struct EpochInfo {
    /// The epoch.
    pub epoch: Epoch,
    /// The number of the first epoch that is folded into this entry.
    pub first: u64,
    /// Why its changes are not known; `None` if they are.
    pub lost: Option<String>,
    /// Size of the source in bytes at its end.
    pub size: u64,
    /// Seconds since 1970 at its end.
    pub time: u64,
}

/// The epoch of a part of a replica: the bytes below `upto` (and not below that of the previous position) are of `epoch`. What
/// is beyond the last position is missing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPosition {
    /// The epoch.
    pub epoch: Epoch,
    /// The first byte after.
    pub upto: u64,
}

/// In place of the file of a history that has not begun.
struct Nothing;

impl StateFile for Nothing {
    fn len(&self) -> io::Result<u64> {
        Ok(0)
    }
    fn read_at(&self, _offset: u64, _buf: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
    fn write_at(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn set_len(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn reserve(&self, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn map(&self, _len: u64) -> io::Result<device::Mapping> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }
}

/// The history, read.
pub struct History {
    path: PathBuf,
    file: Box<dyn StateFile>,
    entries: Vec<Entry>,
    end: u64,
}

impl History {
    /// Reads the history in `folder`; an empty one if there is none. No lock is needed: a log only grows,
    /// and is only ever replaced by an equivalent one. Changes nothing, so the folder may be read-only.
    pub fn read(folder: &dyn Folder) -> Result<History, SourceError> {
        let path = folder.path().join(NAME);
        match folder.open(NAME, false) {
            Ok(file) => History::of(path, file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(History { path, file: Box::new(Nothing), entries: Vec::new(), end: 8 })
            }
            Err(error) => Err(SourceError::state("open", &path)(error)),
        }
    }

    /// Opens the history for the process that holds the state and appends to it, and makes it durable. A process that was killed may have
    /// left an epoch in memory only, and what a replica is brought to must still be known after a power cut.
    pub(crate) fn hold(folder: &dyn Folder) -> Result<History, SourceError> {
        let path = folder.path().join(NAME);
        let file = folder.open(NAME, true).map_err(SourceError::state("open", &path))?;
        let history = History::of(path, file)?;
        history.file.sync().map_err(SourceError::state("sync", &history.path))?;
        folder.sync().map_err(SourceError::state("sync", folder.path()))?;
        Ok(history)
    }

    /// Reads the entries in a file.
    fn of(path: PathBuf, file: Box<dyn StateFile>) -> Result<History, SourceError> {
        let fail = |what| SourceError::state(what, &path);
        let len = file.len().map_err(fail("read"))?;
        let mut history = History { path: path.clone(), file, entries: Vec::new(), end: 8 };
        if len < 8 {
            return Ok(history);
        }
        let mut magic = [0u8; 8];
        history.file.read_at(0, &mut magic).map_err(fail("read"))?;
        if &magic != MAGIC {
            // Not even the beginning of the log reached the disk.
            if magic == [0; 8] {
                return Ok(history);
            }
            return Err(SourceError::Damaged { path, why: "not a history".into() });
        }
        let mut from = history.end;
        while let Some((entry, begin, end)) = history.sound_entry(from, len).map_err(fail("read"))? {
            history.link(entry, begin == from);
            (history.end, from) = (end, end);
        }
        Ok(history)
    }

    /// Adds an entry that was read. If it does not follow the previous one, there is a gap between them.
    fn link(&mut self, mut entry: Entry, adjoins: bool) {
        let follows = match (self.last(), entry.head.epochs.first()) {
            (Some(last), Some(first)) => {
                first.number > last.number && entry.head.after.is_none_or(|after| after == last.id)
            }
            _ => true,
        };
        if !(adjoins && follows) {
            entry.head.lost = Some(Gap::Damaged);
            entry.changes = entry.changes.end..entry.changes.end;
        }
        self.entries.push(entry);
    }

    /// The first valid entry at or after an offset, its start and its end.
    fn sound_entry(&self, from: u64, len: u64) -> io::Result<Option<(Entry, u64, u64)>> {
        if let Some((entry, end)) = self.entry_at(from, len)? {
            return Ok(Some((entry, from, end)));
        }
        // A damaged length does not tell where the next entry begins: search for a head.
        let mut window = vec![0u8; 1 << 16];
        let mut at = from + 1;
        while at + (PREFIX + HEAD.len()) as u64 <= len {
            let bytes = &mut window[..(len - at).min(1 << 16) as usize];
            self.file.read_at(at, bytes)?;
            for found in bytes.windows(HEAD.len()).enumerate().filter(|(_, w)| *w == HEAD).map(|(i, _)| i) {
                let Some(begin) = (at + found as u64).checked_sub(PREFIX as u64) else { continue };
                if begin > from {
                    if let Some((entry, end)) = self.entry_at(begin, len)? {
                        return Ok(Some((entry, begin, end)));
                    }
                }
            }
            if at + bytes.len() as u64 >= len {
                break;
            }
            // A head may straddle two windows.
            at += (bytes.len() - HEAD.len()) as u64;
        }
        Ok(None)
    }

    /// The valid entry at an offset, and its end.
    fn entry_at(&self, at: u64, len: u64) -> io::Result<Option<(Entry, u64)>> {
        let mut prefix = [0u8; PREFIX];
        if at + PREFIX as u64 > len {
            return Ok(None);
        }
        self.file.read_at(at, &mut prefix)?;
        let word = |i: usize| u32::from_le_bytes([prefix[i], prefix[i + 1], prefix[i + 2], prefix[i + 3]]);
        let (total, head_len) = (u64::from(word(0)), u64::from(word(12)));
        let sum = u64::from_le_bytes(prefix[4..12].try_into().unwrap_or_default());
        let end = at + PREFIX as u64 + total;
        if total == 0 || head_len > total || end > len {
            return Ok(None);
        }
        let mut content = vec![0u8; total as usize];
        self.file.read_at(at + PREFIX as u64, &mut content)?;
        if twox_hash::XxHash3_64::oneshot(&content) != sum {
            return Ok(None);
        }
        let Ok(head) = serde_json::from_slice::<Head>(&content[..head_len as usize]) else { return Ok(None) };
        if head.epochs.is_empty() || !head.block_size.is_power_of_two() {
            return Ok(None);
        }
        Ok(Some((Entry { head, changes: at + PREFIX as u64 + head_len..end }, end)))
    }

    /// The last epoch.
    pub fn last(&self) -> Option<Epoch> {
        self.entries.last().and_then(|e| e.head.epochs.last().copied())
    }

    /// Every entry, oldest first.
    pub fn epochs(&self) -> Vec<EpochInfo> {
        let info = |e: &Entry| {
            let epoch = e.head.epochs.last().copied()?;
            let first = e.head.epochs.first().map_or(epoch.number, |first| first.number);
            Some(EpochInfo {
                epoch,
                first,
                lost: e.head.lost.as_ref().map(Gap::to_string),
                size: e.head.size,
                time: e.head.time,
            })
        };
        self.entries.iter().filter_map(info).collect()
    }

    /// The size of the source at an epoch.
    pub fn size_at(&self, epoch: &Epoch) -> Option<u64> {
        self.entries.iter().find(|e| e.head.known().contains(epoch)).map(|e| e.head.size)
    }

    /// The epochs that led to `to`, ascending, with that itself: from `since` on if it is one of them, else the latest ones.
    pub fn way(&self, since: Option<&Epoch>, to: &Epoch) -> Vec<Epoch> {
        let mut way: Vec<Epoch> = Vec::new();
        for Head { epochs, lost, trail, .. } in self.entries.iter().map(|entry| &entry.head) {
            // Before one that may be missing nothing is named: what is not would be taken for another branch's.
            if *trail || *lost == Some(Gap::Damaged) {
                way.clear();
            }
            let from = if *trail { epochs.len().saturating_sub(1) } else { 0 };
            way.extend(epochs[from..].iter().filter(|epoch| epoch.number < to.number));
        }
        let begins = match since {
            Some(since) if since == to => way.len(),
            Some(since) => way
                .iter()
                .position(|epoch| epoch == since)
                .unwrap_or(way.len().saturating_sub(TOLD_OF_BEFORE)),
            None => way.len().saturating_sub(TOLD_OF_BEFORE),
        };
        way.drain(..begins);
        if way.len() > MOST_TOLD {
            way.drain(1..=way.len() - MOST_TOLD);
        }
        way.push(*to);
        way
    }

    /// The epoch of a number.
    pub fn by_number(&self, number: u64) -> Option<Epoch> {
        self.entries.iter().flat_map(|e| &e.head.epochs).find(|e| e.number == number).copied()
    }

    /// The epoch of an id.
    pub(crate) fn by_id(&self, id: Uuid) -> Option<Epoch> {
        self.entries.iter().flat_map(|e| e.head.known()).find(|e| e.id == id).copied()
    }

    /// True if the log has an epoch with this id.
    pub(crate) fn knows(&self, id: Uuid) -> bool {
        self.by_id(id).is_some()
    }

    /// Appends an epoch; durable on return. After an error the log is as before.
    pub(crate) fn append(
        &mut self,
        epoch: Epoch,
        lost: Option<Gap>,
        size: u64,
        block_size: u32,
        changes: &Bitmap,
    ) -> Result<(), SourceError> {
        let time = now();
        let after = self.last().map(|e| e.id);
        let head = Head { epochs: vec![epoch], lost, size, block_size, time, after, trail: false };
        let mut encoded = Vec::new();
        if head.lost.is_none() {
            changes.encode(&mut encoded);
        }
        let bytes = entry_bytes(&head, &encoded).map_err(SourceError::state("write", &self.path))?;
        let write = |file: &dyn StateFile, end: u64| -> io::Result<()> {
            if end == 8 {
                file.write_at(0, MAGIC)?;
            }
            file.set_len(end)?;
            file.write_at(end, &bytes)?;
            file.sync()
        };
        write(&*self.file, self.end).map_err(|error| {
            // Otherwise the next process might read it from the page cache and take it for durable.
            let _ = self.file.set_len(self.end);
            SourceError::state("write", &self.path)(error)
        })?;
        let end = self.end + bytes.len() as u64;
        self.entries.push(Entry { head, changes: end - encoded.len() as u64..end });
        self.end = end;
        Ok(())
    }

    /// Replaces the history in `folder`, if there is one: it knows what changed from `base` on, and what `trail`, which leads to `base`,
    /// knows. At the last of `moments` the source differs from `base` in `changes`; the others are as true of it then, but for
    /// those. Durable on return.
    pub(crate) fn begin(
        folder: &dyn Folder,
        (trail, base): (&Trail, Epoch),
        moments: Vec<Epoch>,
        size: u64,
        block_size: u32,
        changes: Result<&Bitmap, Gap>,
    ) -> Result<(), SourceError> {
        let path = folder.path().join(NAME);
        let head = |epochs: Vec<Epoch>, lost: Option<Gap>, after: Option<Uuid>| Head {
            epochs,
            lost,
            size,
            block_size,
            time: now(),
            after,
            trail: false,
        };
        let (lost, changes) = match changes {
            Ok(changes) => (None, encoded(changes)),
            Err(why) => (Some(why), Vec::new()),
        };
        let fail = |e| SourceError::State { what: "write", path: path.clone(), error: e };
        let leads = trail.epochs().last() == Some(&base);
        let mut content = if leads { trail.encode().map_err(fail)? } else { MAGIC.to_vec() };
        if !leads {
            content.extend(entry_bytes(&head(vec![base], Some(Gap::Begins), None), &[]).map_err(fail)?);
        }
        content.extend(entry_bytes(&head(moments, lost, Some(base.id)), &changes).map_err(fail)?);
        device::replace(folder, NAME, &content).map_err(fail)
    }

    /// The place of an epoch, as the number of entries up to and including its own.
    fn locate(&self, epoch: &Epoch) -> Result<usize, SourceError> {
        if let Some(at) = self.entries.iter().position(|e| e.head.epochs.contains(epoch)) {
            // A replica inside a folded entry may lack all of it.
            let is_end = self.entries[at].head.epochs.last() == Some(epoch);
            return Ok(if is_end { at + 1 } else { at });
        }
        let beyond = self.entries.iter().position(|e| e.head.epochs.iter().any(|e| e.number > epoch.number));
        if beyond.map(|at| &self.entries[at].head).is_some_and(|head| {
            head.lost == Some(Gap::Damaged)
                && head.epochs.first().is_some_and(|first| first.number > epoch.number)
        }) {
            // It may be in the unreadable part.
            return Err(SourceError::Lost { since: epoch.number, why: Gap::Damaged });
        }
        let unnamed = beyond.is_some_and(|at| self.entries[at].head.trail);
        if unnamed && self.by_number(epoch.number).is_none() {
            let why = "the replica that was promoted does not know what its source had at that epoch";
            return Err(SourceError::Lost { since: epoch.number, why: why.into() });
        }
        let last = self.last().map_or(0, |e| e.number);
        let first = self.entries.first().and_then(|e| e.head.epochs.first()).map_or(0, |e| e.number);
        if epoch.number > last {
            return Err(SourceError::Foreign(format!(
                "the replica is at epoch {}, but this source only knows epochs up to {last}: its state was restored from a \
                 copy, its host rolled back, or created anew. If what the replica has is wanted, \"dsync promote --force\" where it is makes that \
                 the source; \"dsync sync --discard-there SRC DST\" compares everything, overwrites what differs in the replica, and continues from here",
                epoch.number
            )));
        }
        if epoch.number >= first {
            return Err(SourceError::Foreign(format!(
                "the replica's epoch {} is not this source's epoch of that number: one of the two is a copy that has \
                 diverged. If what the replica has is wanted, \"dsync promote --force\" where it is makes that the source; \"dsync sync --discard-there SRC DST\" \
                 compares everything, overwrites what differs in the replica, and continues from here",
                epoch.number
            )));
        }
        Err(SourceError::Lost {
            since: epoch.number,
            why: format!("the history now begins at epoch {first}").into(),
        })
    }

    /// Checks whether [`History::changes_since`] would succeed, without reading the changes.
    pub fn reaches(&self, positions: &[KnownPosition]) -> Result<(), SourceError> {
        for position in positions {
            let at = self.locate(&position.epoch)?;
            let gaps = || self.entries[at..].iter().filter_map(|e| e.head.lost.as_ref());
            // That it is another content is asked about first.
            let other = gaps().find(|gap| matches!(gap, Gap::OtherContent(_)));
            if let Some(why) = other.or(gaps().next()).cloned() {
                return Err(SourceError::Lost { since: position.epoch.number, why });
            }
        }
        Ok(())
    }

    /// Adds to `into` the blocks below the last position that a replica with these positions lacks. Returns the epochs it may be at:
    /// from the oldest position to the last epoch. Blocks of `into` have `block_size` bytes and cover the source as it is.
    ///
    /// # Errors
    /// `Lost` if there is a gap in between, `Foreign` if a position is not in this source's past.
    pub fn changes_since(
        &self,
        positions: &[KnownPosition],
        block_size: u32,
        into: &Bitmap,
    ) -> Result<Vec<Epoch>, SourceError> {
        self.changes_in(&self.entries, positions, block_size, into)
    }

    /// Adds to `into` what changed from one epoch to a later one; what the disk grew by meanwhile counts as changed. Blocks of
    /// `into` have `block_size` bytes and cover the source as it was at the later epoch.
    ///
    /// # Errors
    /// As [`History::changes_since`].
    pub fn changes_between(
        &self,
        since: &Epoch,
        upto: &Epoch,
        block_size: u32,
        into: &Bitmap,
    ) -> Result<(), SourceError> {
        let first = self.locate(since)?;
        let end = self.entries.iter().position(|e| e.head.epochs.contains(upto)).map_or(0, |at| at + 1);
        if end == 0 || since.number > upto.number {
            return Err(SourceError::Unknown(format!(
                "the history does not lead from epoch {} to epoch {}",
                since.number, upto.number
            )));
        }
        let entries = &self.entries[..end];
        self.changes_in(entries, &[KnownPosition { epoch: *since, upto: u64::MAX }], block_size, into)?;
        // A disk that shrank and grew again has lost what it held there.
        let spanned = &entries[first.saturating_sub(1).min(end - 1)..];
        let least = spanned.iter().map(|e| e.head.size).min().unwrap_or(0);
        if spanned.iter().any(|e| e.head.size != least) {
            into.set(least / u64::from(block_size)..into.blocks());
        }
        Ok(())
    }

    fn changes_in(
        &self,
        entries: &[Entry],
        positions: &[KnownPosition],
        block_size: u32,
        into: &Bitmap,
    ) -> Result<Vec<Epoch>, SourceError> {
        let mut oldest = entries.len();
        let mut below = 0;
        let mut spans = Vec::new();
        for position in positions {
            let at = self.locate(&position.epoch)?;
            oldest = oldest.min(at);
            spans.push((at, below..position.upto));
            below = below.max(position.upto);
        }
        let since = positions.last().map_or(0, |p| p.epoch.number);
        let mut chain = Vec::new();
        // The base stands in the entry before the first that is needed, or inside it.
        chain.extend(positions.iter().map(|p| p.epoch).min_by_key(|e| e.number));
        for (index, entry) in entries.iter().enumerate().skip(oldest) {
            if let Some(why) = &entry.head.lost {
                return Err(SourceError::Lost { since, why: why.clone() });
            }
            let base = chain.first().map_or(0, |e| e.number);
            chain.extend(entry.head.epochs.iter().filter(|e| e.number > base));
            let wanted: Vec<&Range<u64>> = spans
                .iter()
                .filter(|(at, range)| *at <= index && !range.is_empty())
                .map(|(_, r)| r)
                .collect();
            let whole = wanted.iter().any(|r| r.start == 0 && r.end >= entry.head.size);
            let changes = self.changes(entry)?;
            if entry.head.block_size == block_size && whole && changes.blocks() == into.blocks() {
                into.union_with(&changes);
                continue;
            }
            let (from, to) = (u64::from(entry.head.block_size), u64::from(block_size));
            for run in changes.runs() {
                for range in &wanted {
                    let start = (run.start * from).max(range.start);
                    let end =
                        run.end.saturating_mul(from).min(range.end).min(into.blocks().saturating_mul(to));
                    if start < end {
                        into.set(start / to..end.div_ceil(to));
                    }
                }
            }
        }
        Ok(chain)
    }

    fn changes(&self, entry: &Entry) -> Result<Bitmap, SourceError> {
        let mut bytes = vec![0u8; (entry.changes.end - entry.changes.start) as usize];
        self.file.read_at(entry.changes.start, &mut bytes).map_err(SourceError::state("read", &self.path))?;
        self.decoded(&entry.head, &bytes)
    }

    fn decoded(&self, head: &Head, bytes: &[u8]) -> Result<Bitmap, SourceError> {
        let changes = Bitmap::try_new(head.size.div_ceil(u64::from(head.block_size)))
            .map_err(SourceError::memory(&self.path))?;
        changes
            .decode_into(bytes)
            .map_err(|e| SourceError::Damaged { path: self.path.clone(), why: e.to_string() })?;
        Ok(changes)
    }

    /// Tidies a long log: what none of the `bookmarks` needs is dropped, old neighbours are folded. The newest entries always stay, so
    /// that a replica rolled back a little still finds its epoch; and so does what `open` names, the epochs of open views, at
    /// which a bookmark may be set yet.
    pub(crate) fn tidy(
        &mut self,
        folder: &dyn Folder,
        bookmarks: &[Epoch],
        open: &[Epoch],
    ) -> Result<(), SourceError> {
        if self.entries.len() < TIDY_AT {
            return Ok(());
        }
        let old = self.entries.len() - TIDY_KEEPS;
        let needed: BTreeSet<u64> = bookmarks.iter().chain(open).map(|e| e.number).collect();
        // Without a bookmark it is not known what is needed.
        let oldest_needed = needed.first().copied().filter(|_| !bookmarks.is_empty());
        let mut kept: Vec<(Head, Vec<u8>)> = Vec::new();
        for entry in &self.entries[..old] {
            let number = entry.head.epochs.last().map_or(0, |e| e.number);
            if oldest_needed.is_some_and(|needed| number < needed) {
                continue;
            }
            if entry.head.lost.is_some() {
                // A gap's changes mean nothing; once tidied, it has none.
                kept.push((entry.head.clone(), Vec::new()));
                continue;
            }
            let changes = self.changes(entry)?;
            let folds = kept.last().is_some_and(|(last, _)| {
                last.lost.is_none()
                    && last.block_size == entry.head.block_size
                    && last.size <= entry.head.size
                    && !last.epochs.last().is_some_and(|e| needed.contains(&e.number))
            });
            if let (true, Some((mut head, before))) = (folds, if folds { kept.pop() } else { None }) {
                // The disk may have grown in between: what it had before is a part of what it has now.
                self.decoded(&head, &before)?.runs().for_each(|run| {
                    changes.set(run);
                });
                head.epochs.extend(&entry.head.epochs);
                let extra = head.epochs.len().saturating_sub(IDS_KEPT);
                head.epochs.drain(..extra);
                let trail = head.trail || entry.head.trail;
                let folded = Head { epochs: head.epochs, after: head.after, trail, ..entry.head.clone() };
                kept.push((folded, encoded(&changes)));
            } else {
                kept.push((entry.head.clone(), encoded(&changes)));
            }
        }
        let mut content = MAGIC.to_vec();
        let fail = |e| SourceError::State { what: "write", path: self.path.clone(), error: e };
        for (head, changes) in kept {
            content.extend(entry_bytes(&head, &changes).map_err(fail)?);
        }
        for entry in &self.entries[old..] {
            let mut changes = vec![0u8; (entry.changes.end - entry.changes.start) as usize];
            self.file.read_at(entry.changes.start, &mut changes).map_err(fail)?;
            content.extend(entry_bytes(&entry.head, &changes).map_err(fail)?);
        }
        device::replace(folder, NAME, &content).map_err(fail)?;
        *self = History::hold(folder)?;
        Ok(())
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn encoded(changes: &Bitmap) -> Vec<u8> {
    let mut bytes = Vec::new();
    changes.encode(&mut bytes);
    bytes
}

fn entry_bytes(head: &Head, changes: &[u8]) -> io::Result<Vec<u8>> {
    let head = serde_json::to_vec(head)?;
    let total = u32::try_from(head.len() + changes.len())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "an epoch's changes are too large"))?;
    let mut content = head.clone();
    content.extend_from_slice(changes);
    let mut bytes = Vec::with_capacity(PREFIX + content.len());
    bytes.extend_from_slice(&total.to_le_bytes());
    bytes.extend_from_slice(&twox_hash::XxHash3_64::oneshot(&content).to_le_bytes());
    bytes.extend_from_slice(&(head.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&content);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::bookmarks::{Bookmarks, Reached};
    use device::Dir;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_reader_changes_nothing() {
        let (temp, dir) = scratch();
        let history = History::read(&dir).unwrap();
        assert!(history.last().is_none() && history.epochs().is_empty());
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
        History::hold(&dir).unwrap();
        assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 1);
    }

    fn scratch() -> (tempfile::TempDir, Dir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = Dir::open(temp.path()).unwrap();
        (temp, dir)
    }

    fn epoch(number: u64) -> Epoch {
        Epoch { number, id: Uuid::new_v4() }
    }

    fn bitmap(blocks: u64, set: &[u64]) -> Bitmap {
        let bitmap = Bitmap::new(blocks);
        set.iter().for_each(|b| {
            bitmap.set(*b..*b + 1);
        });
        bitmap
    }

    const BLOCKS: u64 = 100;

    fn filled(dir: &Dir, epochs: &[Vec<u64>]) -> (History, Vec<Epoch>) {
        let mut history = History::hold(dir).unwrap();
        let ids: Vec<Epoch> = (1..=epochs.len() as u64).map(|n| epoch(n * 3)).collect();
        for (id, set) in ids.iter().zip(epochs) {
            history.append(*id, None, BLOCKS * 4096, 4096, &bitmap(BLOCKS, set)).unwrap();
        }
        (history, ids)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        /// The changes found for positions are at least, and for unfolded histories exactly, what changed since each.
        #[test]
        fn positions_get_what_they_lack(
            epochs in proptest::collection::vec(proptest::collection::vec(0..BLOCKS, 0..12), 1..12),
            cuts in proptest::collection::vec((any::<proptest::sample::Index>(), 1..BLOCKS), 1..4),
        ) {
            let (_temp, dir) = scratch();
            let (_, ids) = filled(&dir, &epochs);
            let history = History::read(&dir).unwrap();
            let mut ends: Vec<u64> = cuts.iter().map(|c| c.1).collect();
            ends.sort_unstable();
            ends.dedup();
            let at: Vec<usize> = cuts.iter().take(ends.len()).map(|c| c.0.index(ids.len())).collect();
            let positions: Vec<KnownPosition> =
                ends.iter().zip(&at).map(|(end, i)| KnownPosition { epoch: ids[*i], upto: end * 4096 }).collect();
            let found = Bitmap::new(BLOCKS);
            let chain = history.changes_since(&positions, 4096, &found).unwrap();
            let mut expected = BTreeSet::new();
            let mut below = 0;
            for (end, i) in ends.iter().zip(&at) {
                expected.extend(epochs[i + 1..].iter().flatten().filter(|b| (below..*end).contains(b)));
                below = *end;
            }
            prop_assert_eq!(found.runs().flatten().collect::<BTreeSet<_>>(), expected);
            let oldest = *at.iter().min().unwrap();
            prop_assert_eq!(chain, ids[oldest..].to_vec());
        }
    }

    #[test]
    fn a_gap_an_unknown_and_a_copied_epoch_are_told_apart() {
        let (_temp, dir) = scratch();
        let (mut history, ids) = filled(&dir, &[vec![1], vec![2]]);
        history.append(epoch(9), Some("test".into()), BLOCKS * 4096, 4096, &Bitmap::new(BLOCKS)).unwrap();
        let last = epoch(12);
        history.append(last, None, BLOCKS * 4096, 4096, &bitmap(BLOCKS, &[7])).unwrap();
        let since = |epoch: Epoch| {
            history.changes_since(&[KnownPosition { epoch, upto: u64::MAX }], 4096, &Bitmap::new(BLOCKS))
        };
        assert!(matches!(since(ids[0]), Err(SourceError::Lost { since: 3, .. })));
        assert!(matches!(since(epoch(6)), Err(SourceError::Foreign(_))), "another id under a known number");
        assert!(matches!(since(epoch(13)), Err(SourceError::Foreign(_))), "ahead of the source");
        assert!(matches!(since(epoch(1)), Err(SourceError::Lost { .. })), "before the history");
        assert_eq!(since(last).unwrap(), [last]);
    }

    #[test]
    fn a_cut_off_entry_never_was() {
        let (temp, dir) = scratch();
        let (history, ids) = filled(&dir, &[vec![1], vec![2], vec![3]]);
        let whole = std::fs::read(temp.path().join(NAME)).unwrap();
        let second_end = history.entries[1].changes.end;
        for cut in second_end..whole.len() as u64 {
            std::fs::write(temp.path().join(NAME), &whole[..cut as usize]).unwrap();
            let mut history = History::hold(&dir).unwrap();
            assert_eq!(history.last(), Some(ids[1]), "cut at {cut}");
            let next = epoch(50);
            history.append(next, None, BLOCKS * 4096, 4096, &bitmap(BLOCKS, &[9])).unwrap();
            assert_eq!(History::read(&dir).unwrap().last(), Some(next));
        }
        for at in second_end as usize..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x40;
            std::fs::write(temp.path().join(NAME), &flipped).unwrap();
            assert_eq!(History::read(&dir).unwrap().last(), Some(ids[1]), "flipped at {at}");
        }
    }

    /// Compares what a replica at an epoch is said to lack with what it does lack.
    fn misses(history: &History, ids: &[Epoch], epochs: &[Vec<u64>], at: usize) -> Option<String> {
        let found = Bitmap::new(BLOCKS);
        let position = KnownPosition { epoch: ids[at], upto: u64::MAX };
        let known = history.last().and_then(|last| ids.iter().position(|id| *id == last)).unwrap_or(0);
        match history.changes_since(&[position], 4096, &found) {
            Ok(_) => {
                let mut lacks = epochs[at + 1..=known.max(at)].iter().flatten();
                lacks.find(|b| !found.get(**b)).map(|b| format!("a replica at {at} misses block {b}"))
            }
            Err(SourceError::Lost { .. } | SourceError::Foreign(_)) => None,
            Err(other) => Some(other.to_string()),
        }
    }

    #[test]
    fn damage_in_the_middle_is_a_gap_and_not_an_end() {
        let (temp, dir) = scratch();
        let epochs: Vec<Vec<u64>> = (0..6).map(|n| vec![n * 10, n * 10 + 1]).collect();
        let (history, ids) = filled(&dir, &epochs);
        let path = temp.path().join(NAME);
        let whole = std::fs::read(&path).unwrap();
        let ends: Vec<usize> = history.entries.iter().map(|e| e.changes.end as usize).collect();
        // A changed byte, and a missing entry.
        let flipped = (8..ends[4]).map(|at| {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x15;
            (format!("flipped at {at}"), bytes, ends.iter().position(|end| at < *end).unwrap())
        });
        let gone =
            (1..5).map(|n| (format!("without {n}"), [&whole[..ends[n - 1]], &whole[ends[n]..]].concat(), n));
        for (what, bytes, hurt) in flipped.chain(gone) {
            std::fs::write(&path, bytes).unwrap();
            let mut history = History::hold(&dir).unwrap();
            assert_eq!(history.last(), Some(ids[5]), "{what}: what came later still stands");
            for at in 0..6 {
                assert_eq!(misses(&history, &ids, &epochs, at), None, "{what}");
                let position = [KnownPosition { epoch: ids[at], upto: u64::MAX }];
                match history.reaches(&position) {
                    Ok(()) => assert!(at > hurt, "{what}: {at}"),
                    Err(SourceError::Lost { .. }) => assert!(at <= hurt, "{what}: {at}"),
                    Err(other) => panic!("{what}, at {at}: {other}"),
                }
            }
            // Appending continues from the last valid entry.
            let next = epoch(50);
            history.append(next, None, BLOCKS * 4096, 4096, &bitmap(BLOCKS, &[9])).unwrap();
            let again = History::read(&dir).unwrap();
            assert_eq!((again.last(), again.entries.len()), (Some(next), 6), "{what}");
            again.reaches(&[KnownPosition { epoch: ids[5], upto: u64::MAX }]).unwrap();
        }
    }

    #[test]
    fn the_history_of_a_disk_that_grew_is_tidied() {
        let (_temp, dir) = scratch();
        let many: Vec<Vec<u64>> = (0..10).map(|n| vec![n]).collect();
        let (mut history, mut ids) = filled(&dir, &many);
        for n in 0..TIDY_AT as u64 {
            let next = epoch(100 + n);
            let size = (BLOCKS + n / 3) * 4096;
            history.append(next, None, size, 4096, &bitmap(BLOCKS + n / 3, &[n / 6])).unwrap();
            ids.push(next);
        }
        let bookmarks = Bookmarks::set(&dir, "somewhere", Reached::epoch(ids[3])).unwrap();
        history.tidy(&dir, &bookmarks.epochs(), &[]).unwrap();
        assert!(history.entries.len() <= TIDY_KEEPS + 3, "{} entries", history.entries.len());
        let blocks = BLOCKS + (TIDY_AT as u64 - 1) / 3;
        let found = Bitmap::new(blocks);
        history.changes_since(&[KnownPosition { epoch: ids[3], upto: u64::MAX }], 4096, &found).unwrap();
        let changed = (TIDY_AT as u64 - 1) / 6 + 1;
        assert!(found.all(0..changed) && found.count() == changed);
        assert!(History::read(&dir).unwrap().entries.iter().all(|e| e.head.lost.is_none()));
    }

    #[test]
    fn a_history_with_a_gap_is_tidied_again_and_again() {
        let (_temp, dir) = scratch();
        let (mut history, mut ids) = filled(&dir, &[vec![1], vec![2]]);
        let bookmarks = Bookmarks::set(&dir, "somewhere", Reached::epoch(ids[0])).unwrap();
        for n in 0..3 * TIDY_AT as u64 {
            let (next, gap) = (epoch(100 + n), n % TIDY_AT as u64 == 0);
            let changed = bitmap(BLOCKS, if gap { &[] } else { &[7] });
            history.append(next, gap.then(|| "test".into()), BLOCKS * 4096, 4096, &changed).unwrap();
            ids.push(next);
            history.tidy(&dir, &bookmarks.epochs(), &[]).unwrap();
            assert!(history.entries.len() < TIDY_AT, "{} entries", history.entries.len());
        }
        let since = |at: Epoch| {
            let found = Bitmap::new(BLOCKS);
            history.changes_since(&[KnownPosition { epoch: at, upto: u64::MAX }], 4096, &found).map(|_| found)
        };
        assert!(matches!(since(ids[0]), Err(SourceError::Lost { .. })));
        let found = since(ids[ids.len() - 2]).unwrap();
        assert!(found.get(7) && found.count() == 1);
    }

    #[test]
    fn a_long_history_is_tidied_and_still_answers() {
        let (_temp, dir) = scratch();
        let many: Vec<Vec<u64>> = (0..TIDY_AT as u64).map(|n| vec![n % BLOCKS]).collect();
        let (mut history, ids) = filled(&dir, &many);
        let bookmarks = Bookmarks::set(&dir, "somewhere", Reached::epoch(ids[100])).unwrap();
        history.tidy(&dir, &bookmarks.epochs(), &[]).unwrap();
        assert!(history.entries.len() <= TIDY_KEEPS + 3, "{} entries", history.entries.len());
        // The bookmark finds exactly its changes; an epoch inside a fold finds at least them.
        for at in [100, 101, 150, 255, 300, 511] {
            let found = Bitmap::new(BLOCKS);
            let position = KnownPosition { epoch: ids[at], upto: u64::MAX };
            let chain = history.changes_since(&[position], 4096, &found).unwrap();
            assert!(many[at + 1..].iter().flatten().all(|b| found.get(*b)), "from {at}");
            assert_eq!(chain.first(), Some(&ids[at]));
            assert_eq!(chain.last(), ids.last());
        }
        let before = KnownPosition { epoch: ids[50], upto: u64::MAX };
        assert!(matches!(
            history.changes_since(&[before], 4096, &Bitmap::new(BLOCKS)),
            Err(SourceError::Lost { .. })
        ));
    }

    #[test]
    fn what_changed_between_two_epochs_is_exact_wherever_the_history_was_folded() {
        let (_temp, dir) = scratch();
        let many: Vec<Vec<u64>> = (0..TIDY_AT as u64).map(|n| vec![n * 7 % BLOCKS]).collect();
        let (mut history, ids) = filled(&dir, &many);
        let marks = [100, 150, 153, 200];
        let mut bookmarks = Bookmarks::default();
        for (name, at) in ["a", "b", "c"].iter().zip(marks) {
            bookmarks = Bookmarks::set(&dir, name, Reached::epoch(ids[at])).unwrap();
        }
        // The last one is the epoch of an open view, which its reader may still bookmark.
        history.tidy(&dir, &bookmarks.epochs(), &[ids[marks[3]]]).unwrap();
        assert!(history.entries.len() <= TIDY_KEEPS + 2 * marks.len(), "{} entries", history.entries.len());
        for (from, to) in [(0, 1), (0, 3), (1, 2), (2, 3), (3, 3)].map(|(a, b)| (marks[a], marks[b])) {
            let found = Bitmap::new(BLOCKS);
            history.changes_between(&ids[from], &ids[to], 4096, &found).unwrap();
            let expected: BTreeSet<u64> = many[from + 1..=to].iter().flatten().copied().collect();
            assert_eq!(found.runs().flatten().collect::<BTreeSet<_>>(), expected, "{from} to {to}");
        }
        let back = history.changes_between(&ids[200], &ids[100], 4096, &Bitmap::new(BLOCKS));
        assert!(back.is_err(), "a later epoch leads to no earlier one");
    }

    #[test]
    fn what_a_disk_grew_by_has_changed_even_if_it_had_been_larger() {
        let (_temp, dir) = scratch();
        let mut history = History::hold(&dir).unwrap();
        let ids: Vec<Epoch> = (1..=3).map(epoch).collect();
        for (id, (blocks, set)) in ids.iter().zip([(100, 1), (40, 2), (80, 3)]) {
            history.append(*id, None, blocks * 4096, 4096, &bitmap(blocks, &[set])).unwrap();
        }
        let found = Bitmap::new(80);
        history.changes_between(&ids[0], &ids[2], 4096, &found).unwrap();
        assert_eq!(found.runs().collect::<Vec<_>>(), [2..4, 40..80]);
        let gap = epoch(4);
        history.append(gap, Some("test".into()), 80 * 4096, 4096, &Bitmap::new(80)).unwrap();
        let across = history.changes_between(&ids[0], &gap, 4096, &Bitmap::new(80));
        assert!(matches!(across, Err(SourceError::Lost { .. })));
        // Before the gap the changes are still known.
        history.changes_between(&ids[0], &ids[2], 4096, &Bitmap::new(80)).unwrap();
    }
}
