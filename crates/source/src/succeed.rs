//! The source that a promoted replica becomes: the id of the one it followed, a history that begins with the replica's epoch, and a
//! record that is clean.
//!
//! The description of the source is written last. So what a crash leaves is not a source, and is made anew.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use delta::Epoch;
use device::{Dir, Disk, Folder, FolderLock, Format};
use extents::Bitmap;
use lineage::Lives;
use qcow2::Use;
use uuid::Uuid;

use crate::SourceError;
use crate::disk::backing::{Backing, PathBacking, open_image};
use crate::disk::discard::clear;
use crate::record::history::History;
use crate::record::history::trail::Trail;
use crate::record::stamp::StampVerdict;
use crate::record::state::{ABOUT, SourceMetadata, StateDir, write_about};
use crate::source::{AtRest, Found, Parts, Source, SourceOptions};

/// What a replica takes over from its source.
#[derive(Debug)]
pub struct Succession {
    /// The source's UUID.
    pub uuid: Uuid,
    /// The new term.
    pub term: u64,
    /// The lives that led to it; the one that began with the promotion is the first of them.
    pub lives: Lives,
    /// The promotion gave up what its source wrote later.
    pub gave_up: bool,
    /// The replica's epoch.
    pub base: Epoch,
    /// What the replica knows of the way to that epoch.
    pub trail: Trail,
    /// The epoch of the promotion, and before it those that are as true of the disk but for `changes`; ascending.
    pub moments: Vec<Epoch>,
    /// How the disk lies in its file.
    pub format: Format,
    /// Block size in bytes.
    pub block_size: u32,
    /// The blocks in which the disk differs from `base`; or why that is not known.
    pub changes: Result<Bitmap, String>,
}

impl Succession {
    /// The life that began with the promotion.
    fn promotion(&self) -> Option<Uuid> {
        self.lives.lives().first().map(|promotion| promotion.life)
    }

    /// True if this is the source that it makes, made to the end: the promotion is the last that led to it. What its history still
    /// knows does not tell.
    #[doc(hidden)]
    pub fn is_done(&self, about: &SourceMetadata) -> bool {
        let promotion = self.promotion();
        (about.uuid, about.term) == (self.uuid, self.term)
            && promotion.is_some()
            && about.promotion == promotion
    }
}

/// Makes the disk at `path` the source that succeeds the one it followed. The caller holds the disk: nothing else writes to it. Returns
/// false if that was done before.
///
/// # Errors
/// `Busy` if another program holds the state of that source; `Refused` if the disk cannot be a source. Nothing is a source then
/// that was not one before.
pub fn succeed(state: &StateDir, path: &Path, succession: &Succession) -> Result<bool, SourceError> {
    let identity = device::identity(path)?;
    let _minting = state.lock()?;
    let known = state.source(&identity.path.to_string_lossy())?;
    if known.as_ref().is_some_and(|(_, about)| succession.is_done(about)) {
        return Ok(false);
    }
    let place = match known {
        // What this disk was as a source before: the new one is found by the same path.
        Some((place, _)) => place,
        None => free_place(state, succession.uuid, succession.term)?,
    };
    let folder = Dir::open(&place).map_err(SourceError::state("make", &place))?;
    let lock = match FolderLock::take(&place).map_err(SourceError::state("lock", &place))? {
        Ok(lock) => lock,
        Err(holder) => return Err(SourceError::Busy { path: identity.path, holder }),
    };
    let backing = PathBacking::new(identity.clone(), folder.path(), succession.format);
    let reading = device::DiskOptions { write: false, direct: false, exclusive: false };
    let (disk, backing): (Arc<dyn Disk>, _) = match succession.format {
        Format::Raw => (device::open(&identity.path, &reading)?, backing),
        // The replica that holds it may have it open.
        Format::Qcow2 => {
            let image = open_image(&identity.path, Use::ReadBesideWriter, None)?;
            (image.clone(), backing.over(image))
        }
    };
    let backing = Box::new(backing);
    succeed_in(succession, disk, Arc::new(folder), backing)?;
    drop(lock);
    Ok(true)
}

/// Refuses to make the disk at `path` that source in that term where another disk of this host is that already. Changes nothing.
///
/// # Errors
/// `Refused` then.
pub fn check_term(state: &StateDir, path: &Path, uuid: Uuid, term: u64) -> Result<(), SourceError> {
    let path = device::identity(path)?.path;
    match state.source(&path.to_string_lossy())? {
        Some(_) => Ok(()),
        None => free_place(state, uuid, term).map(drop),
    }
}

/// A folder that belongs to no source yet, or to one that was not made to the end.
fn free_place(state: &StateDir, uuid: Uuid, term: u64) -> Result<PathBuf, SourceError> {
    let first = state.source_folder(uuid);
    if !first.join(ABOUT).exists() {
        return Ok(first);
    }
    // On the host of the old source.
    let place = state.folder_of_term(uuid, term);
    match place.join(ABOUT).exists() {
        false => Ok(place),
        true => Err(SourceError::Refused(format!(
            "another disk of this host is already the source {uuid} in term {term}: \"dsync status\" shows which",
        ))),
    }
}

/// Makes `disk`, with its state in `folder`, the source that succeeds the one it followed. Takes no lock, unlike [`succeed`].
#[doc(hidden)]
pub fn succeed_in(
    succession: &Succession,
    disk: Arc<dyn Disk>,
    folder: Arc<dyn Folder>,
    backing: Box<dyn Backing>,
) -> Result<(), SourceError> {
    clear(&*folder).map_err(SourceError::state("clear", folder.path()))?;
    let (identity, counted) = (backing.identity()?, backing.counted());
    let Succession { uuid, term, base, block_size, .. } = *succession;
    let about = SourceMetadata {
        term,
        began: Some(base),
        gave_up: succession.gave_up,
        format: succession.format,
        promotion: succession.promotion(),
        lives: succession.lives.clone(),
        ..SourceMetadata::new(uuid, identity.clone(), block_size)
    };
    let changes = succession.changes.as_ref().map_err(|why| why.as_str().into());
    let way = (&succession.trail, base);
    History::begin(&*folder, way, succession.moments.clone(), disk.len(), block_size, changes)?;
    let history = History::read(&*folder)?;
    let parts = Parts {
        outside: None,
        about: about.clone(),
        disk,
        folder: folder.clone(),
        backing,
        history,
        identity,
    };
    // Whether it was served or not, an older content of it is a backup.
    let options = SourceOptions { read_only: true, at_rest: AtRest::InUse, ..SourceOptions::default() };
    // The replica was just seen to be what its lineage says, and is held.
    let verdict = StampVerdict::Trusted { power_lost: false };
    let found = Found { verdict, was: 0, foreign: None, counted };
    Source::begin(parts, found, &options)?.close()?;
    write_about(&*folder, &about)
}
