//! The log as a file: appended to, never overwritten; what it folds to is a new file that is renamed over it.
//!
//! ```text
//!     "dsynclog"  then for each commit  [length u32][xxh3 u64][length of the head u32][head: JSON][blocks]
//! ```
//!
//! Numbers are little-endian; the length and the checksum are of what follows the prefix. A commit whose entry is not whole at the end of
//! the file never was, unless the disk's head says otherwise; one in the middle is a gap.

use std::ops::Range;
use std::path::PathBuf;

use device::{Folder, StateFile};
use extents::Extents;

use crate::{Changes, Commit, Log, Point};

const NAME: &str = "log";
const MAGIC: &[u8; 8] = b"dsynclog";
/// Bytes of an entry before its head.
const PREFIX: u64 = 16;
/// How the JSON of a head begins.
const HEAD: &[u8] = b"{\"at\":{\"life\":";
/// The longest entry, in bytes: far more than the changes of the largest disk take.
const MOST: u64 = 1 << 30;
/// Commits at which the log is folded, and how many of the newest stay as they are.
const FOLD_AT: usize = 512;
const KEPT: usize = 256;

/// Why a log cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The system refuses.
    #[error("cannot {what} {}: {cause}", path.display())]
    Io {
        /// What was to be done.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// It is no log.
    #[error("{} is damaged (it does not begin as a log): restore it from a backup", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
    },
}

/// A log in a folder. One process appends, under the disk's lock; any number read.
pub struct LogFile {
    path: PathBuf,
    file: Box<dyn StateFile>,
    log: Log,
    /// Where the blocks of each commit lie.
    blocks: Vec<Range<u64>>,
    end: u64,
}

impl LogFile {
    /// Opens the log in a folder, an empty one if there is none. For one that appends, `write`: then what is read is durable, as a process
    /// that was killed may have left it in memory only.
    ///
    /// # Errors
    /// If it cannot be read, or is something else.
    pub fn open(folder: &dyn Folder, write: bool) -> Result<Option<LogFile>, LogError> {
        let path = folder.path().join(NAME);
        let fail = |what| failed(what, &path);
        let file = match folder.open(NAME, write) {
            Ok(file) => file,
            Err(error) if !write && error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fail("open")(error)),
        };
        let mut opened =
            LogFile { path: path.clone(), file, log: Log::default(), blocks: Vec::new(), end: 8 };
        opened.read()?;
        if write {
            opened.file.sync().map_err(fail("sync"))?;
            folder.sync().map_err(failed("sync", folder.path()))?;
        }
        Ok(Some(opened))
    }

    /// The commits.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.end
    }

    fn read(&mut self) -> Result<(), LogError> {
        let path = self.path.clone();
        let fail = failed("read", &path);
        let mut content = vec![0; self.file.len().map_err(&fail)?.min(usize::MAX as u64) as usize];
        self.file.read_at(0, &mut content).map_err(&fail)?;
        match content.get(..8) {
            // Not even the beginning reached the disk.
            None | Some([0, 0, 0, 0, 0, 0, 0, 0]) => return Ok(()),
            Some(magic) if magic == MAGIC => {}
            Some(_) => return Err(LogError::Damaged { path }),
        }
        let mut at = self.end;
        while let Some((commit, blocks, begin)) = next(&content, at) {
            if begin != at {
                self.log.damaged();
            }
            at = blocks.end;
            if self.log.push(commit) {
                self.blocks.push(blocks);
            }
            self.end = at;
        }
        Ok(())
    }

    /// Adds a commit with the blocks that changed: durable on return. One that is there already is not added again.
    ///
    /// # Errors
    /// If it cannot be written: then it was not added.
    pub fn append(&mut self, commit: Commit, blocks: &Extents) -> Result<bool, LogError> {
        if self.log.knows(&commit) {
            return Ok(false);
        }
        let bytes = entry(&commit, &encoded(&commit, blocks));
        let fail = |what| failed(what, &self.path);
        let first = self.end == 8;
        if first {
            self.file.write_at(0, MAGIC).map_err(fail("write"))?;
        }
        self.file.write_at(self.end, &bytes).map_err(fail("write"))?;
        self.file.sync().map_err(fail("sync"))?;
        self.log.push(commit);
        let head = u64::from(u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]));
        let begin = self.end + PREFIX + head;
        self.end += bytes.len() as u64;
        self.blocks.push(begin..self.end);
        Ok(true)
    }

    /// The blocks that changed in the commits of these indices.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn changed(&self, commits: &[usize]) -> Result<Extents, LogError> {
        let fail = failed("read", &self.path);
        let mut all = Extents::new();
        for range in commits.iter().filter_map(|at| self.blocks.get(*at)).filter(|range| !range.is_empty()) {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            self.file.read_at(range.start, &mut bytes).map_err(&fail)?;
            let blocks = Extents::decode(&mut bytes.as_slice());
            all = all.union(&blocks.map_err(|error| fail(std::io::Error::other(error)))?);
        }
        Ok(all)
    }

    /// Writes the log anew, with old commits folded, once there are many. The points in `needed` stay apart from what comes after.
    ///
    /// # Errors
    /// If it cannot be written: then it is as it was.
    pub fn fold(&mut self, folder: &dyn Folder, needed: &[Point]) -> Result<(), LogError> {
        let folds = self.log.folds(needed, KEPT);
        if self.log.commits().len() < FOLD_AT || folds.len() == self.log.commits().len() {
            return Ok(());
        }
        let (mut content, mut commits) = (MAGIC.to_vec(), Vec::new());
        let mut blocks = Vec::new();
        for fold in folds {
            let changed = self.changed(&fold.clone().collect::<Vec<_>>())?;
            let Some(commit) = self.log.fold(fold) else { continue };
            let encoded = encoded(&commit, &changed);
            content.extend(entry(&commit, &encoded));
            blocks.push((content.len() - encoded.len()) as u64..content.len() as u64);
            commits.push(commit);
        }
        let fail = |what| failed(what, &self.path);
        device::replace(folder, NAME, &content).map_err(fail("write"))?;
        self.file = folder.open(NAME, true).map_err(fail("open"))?;
        self.log.replace(commits);
        (self.blocks, self.end) = (blocks, content.len() as u64);
        Ok(())
    }
}

fn failed(what: &'static str, path: &std::path::Path) -> impl Fn(std::io::Error) -> LogError + use<> {
    let path = path.to_path_buf();
    move |cause| LogError::Io { what, path: path.clone(), cause }
}

fn encoded(commit: &Commit, blocks: &Extents) -> Vec<u8> {
    let mut bytes = Vec::new();
    if commit.changes == Changes::Known && !blocks.is_empty() {
        blocks.encode(&mut bytes);
    }
    bytes
}

fn entry(commit: &Commit, blocks: &[u8]) -> Vec<u8> {
    // Its types have no map with other keys than strings, so this cannot fail.
    let head = serde_json::to_vec(commit).unwrap_or_default();
    let total = head.len() + blocks.len();
    let mut bytes = Vec::with_capacity(PREFIX as usize + total);
    bytes.extend((total as u32).to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend((head.len() as u32).to_le_bytes());
    bytes.extend(head);
    bytes.extend(blocks);
    let sum = twox_hash::XxHash3_64::oneshot(&bytes[PREFIX as usize..]);
    bytes[4..12].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The first whole entry at or after an offset: its commit, where its blocks lie, and where it begins.
fn next(content: &[u8], from: u64) -> Option<(Commit, Range<u64>, u64)> {
    if let Some((commit, blocks)) = entry_at(content, from) {
        return Some((commit, blocks, from));
    }
    // A damaged length does not tell where the next one begins: look for a head.
    let after = content.get(from as usize + 1..)?;
    after.windows(HEAD.len()).enumerate().filter(|(_, window)| *window == HEAD).find_map(|(at, _)| {
        let begin = (from + 1 + at as u64).checked_sub(PREFIX).filter(|begin| *begin > from)?;
        let (commit, blocks) = entry_at(content, begin)?;
        Some((commit, blocks, begin))
    })
}

fn entry_at(content: &[u8], at: u64) -> Option<(Commit, Range<u64>)> {
    let at = usize::try_from(at).ok()?;
    let prefix = content.get(at..at + PREFIX as usize)?;
    let word =
        |i: usize| u64::from(u32::from_le_bytes([prefix[i], prefix[i + 1], prefix[i + 2], prefix[i + 3]]));
    let (total, head_len) = (word(0), word(12));
    if total == 0 || head_len > total || total > MOST {
        return None;
    }
    let begin = at + PREFIX as usize;
    let body = content.get(begin..begin + total as usize)?;
    if twox_hash::XxHash3_64::oneshot(body).to_le_bytes() != prefix[4..12] {
        return None;
    }
    let (head, _) = body.split_at(head_len as usize);
    let commit: Commit = serde_json::from_slice(head).ok()?;
    let is_sound = commit.first <= commit.at.n && commit.block_size.is_power_of_two();
    let blocks = (begin + head_len as usize) as u64..(begin + total as usize) as u64;
    is_sound.then_some((commit, blocks))
}
