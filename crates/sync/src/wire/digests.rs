//! The replica's digests, kept from one sync to the next so that it need not be read to be compared.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use compare::{DIGEST, DigestFile, DigestReport, Hash, Scope};
use delta::{Frame, Header, Method, Record};
use device::{Dir, Disk};
use replica::{Replica, Status};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::SyncError;

/// Where and how to keep digests.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Digests {
    /// The file; in the replica's folder if `None`.
    pub file: Option<PathBuf>,
    /// The hash for new files.
    pub hash: Hash,
}

/// The name in the replica's folder.
const NAME: &str = "digests";

/// The folder and the name of the file at a path.
fn of_path(path: &Path) -> io::Result<(PathBuf, String)> {
    let path = std::path::absolute(path)?;
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(folder), Some(name)) => Ok((folder.to_path_buf(), name.to_owned())),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

/// The digests of one sync. Failures are reported, and only cost reading the replica the next time.
pub(crate) struct ReplicaDigests {
    folder: Dir,
    name: String,
    hash: Hash,
    /// `None` once they are useless.
    file: Mutex<Option<DigestFile>>,
    /// They match the replica.
    good: bool,
    /// They are to be of the state that the delta leads to.
    keeps: bool,
    told: String,
}

impl ReplicaDigests {
    /// Opens the digests of a replica's present state. One that is adopted is read, whatever they say.
    pub(crate) fn open(
        asked: &Digests,
        replica: &Replica,
        adopts: bool,
    ) -> Result<ReplicaDigests, SyncError> {
        let found = match &asked.file {
            Some(path) => of_path(path).map_err(SyncError::io(format!("find {}", path.display())))?,
            None => (replica.folder().to_path_buf(), NAME.to_owned()),
        };
        let (folder, name) = (Dir::existing(&found.0), found.1);
        let folder = folder.map_err(SyncError::io("open the folder of the digest file"))?;
        let opened = DigestFile::open(&folder, &name, replica.status().nonce);
        let opened = opened.map_err(SyncError::io("open the digest file"))?;
        let (file, told) = match opened {
            Ok(_) if adopts => (None, "the replica was adopted".into()),
            Ok(_) if replica.doubts_digests()? => {
                (None, "a verification found differences or did not end, or the replica was rewound".into())
            }
            Ok(file) => (Some(file), String::new()),
            Err(why) => (None, why),
        };
        let (hash, good) = (asked.hash, file.is_some());
        Ok(ReplicaDigests { folder, name, hash, good, keeps: true, file: Mutex::new(file), told })
    }

    /// True if they stand for the replica, which is not read.
    pub(crate) fn stand(&self) -> bool {
        self.good
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<DigestFile>> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares for a delta: from here on the file names no state until all is committed.
    pub(crate) fn begin(
        &mut self,
        scope: Option<&Scope>,
        header: Option<&Header>,
        status: &Status,
    ) -> Result<(), SyncError> {
        let Some(header) = header else { return Ok(()) };
        let fits = |file: &DigestFile| match scope {
            Some(scope) => file.serves(scope),
            None => file.fits(header.size_after, header.block_size) && status.size == header.size_after,
        };
        let begun = (|| {
            let mut slot = self.lock();
            // The content of an interrupted delta is merged with this one, and is not seen here.
            let alone = header.resumes.is_none();
            if let Some(file) = slot.as_mut().filter(|file| self.good && alone && fits(file)) {
                file.forget()?;
                return Ok((true, true, "used".to_owned()));
            }
            let why = match self.good {
                _ if !alone => "an interrupted transfer was resumed".into(),
                true => "the digests have another hash or block size".into(),
                false => self.told.clone(),
            };
            let (size, block) = (header.size_after, header.block_size);
            // What is not named is zero.
            let all = match scope {
                Some(scope) => {
                    *scope
                        == Scope {
                            rate: scope.rate,
                            keep_going: scope.keep_going,
                            hash: self.hash,
                            ..Scope::whole(size, block)
                        }
                }
                None => header.method == Method::Copy,
            };
            if !all || !alone {
                // The next compare creates them.
                *slot = None;
                return Ok((false, false, format!("not kept: {why}")));
            }
            let file = DigestFile::create(&self.folder, &self.name, size, block, self.hash)?;
            *slot = Some(file);
            Ok((false, true, format!("created: {why}")))
        })();
        (self.good, self.keeps, self.told) = begun.map_err(SyncError::io("write the digest file"))?;
        Ok(())
    }

    /// Answers for the replica: from the digests if they are good, otherwise by reading it, which creates them.
    pub(crate) fn answer(
        &self,
        disk: &Arc<dyn Disk>,
        scope: &Scope,
        mut say: impl FnMut(DigestReport, Vec<u8>) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.good {
            return compare::answer_from(
                |blocks| match self.lock().as_mut() {
                    Some(file) => file.get(blocks),
                    None => Err(io::Error::other("the digests could not be written: run again")),
                },
                scope,
                say,
            );
        }
        let block = u64::from(scope.block_size);
        compare::answer(disk, scope, |report, digests| {
            // Stored before it is sent: changes that result from it are stored after.
            self.enter(|file| match &report {
                DigestReport::Zero(range) => file.wrote(range.start, range.end - range.start, None),
                DigestReport::Digests(range) => file.put(range.start / block, &digests),
                DigestReport::Unreadable(range) => {
                    let blocks = (range.end - range.start).div_ceil(block);
                    // No block has such a digest.
                    file.put(range.start / block, &vec![0xff; blocks as usize * DIGEST])
                }
            });
            say(report, digests)
        })
    }

    /// Follows a frame of the delta on its way to the replica.
    pub(crate) fn frame(&self, frame: &Frame) {
        self.enter(|file| {
            let mut at = 0;
            for record in &frame.records {
                let (offset, len) = (record.offset(), record.len());
                match record {
                    Record::Data { .. } => {
                        let end = at + len as usize;
                        let data = frame.data.get(at..end);
                        let missing = || io::Error::other("a frame is short of data");
                        file.wrote(offset, len, Some(data.ok_or_else(missing)?))?;
                        at = end;
                    }
                    Record::Zero { .. } => file.wrote(offset, len, None)?,
                    Record::Unsure { .. } => return Err(io::Error::other("blocks were not read")),
                    Record::Copy { .. } => return Err(io::Error::other("blocks were moved")),
                }
            }
            Ok(())
        });
    }

    /// Changes the file; drops it on failure.
    fn enter(&self, change: impl FnOnce(&mut DigestFile) -> io::Result<()>) {
        let mut slot = self.lock();
        if let Some(file) = slot.as_mut() {
            if change(file).is_err() {
                *slot = None;
            }
        }
    }

    /// Binds the digests to the state with this nonce, after the commit. Returns what became of them.
    pub(crate) fn end(self, nonce: Uuid) -> String {
        let file = self.file.into_inner().unwrap_or_else(PoisonError::into_inner);
        match file.map(|file| file.seal(nonce)) {
            Some(Ok(())) => self.told,
            Some(Err(error)) => format!("not kept: {error}"),
            None if !self.keeps => self.told,
            None => "not kept: they could not be written, or blocks were moved or unreadable".into(),
        }
    }
}
