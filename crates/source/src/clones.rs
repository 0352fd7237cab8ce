//! An image that is tracked by clones: of its last epoch a clone is kept beside it, and what differs between that and the next one was written
//! since, by whatever program. The image may be in use: what is read is the new clone, which is one moment of it.
//!
//! The clones that are kept, at most two, stand in the source's folder with the epoch of each. The new one is noted before its epoch is in the
//! history, and the old one forgotten afterwards; so whatever a crash leaves, the one of the history's last epoch is known. Where there is none,
//! or it is not the file that was left, what was written is not known.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta::Epoch;
use device::{Boot, Clock, Dir, Disk, Folder, Identity};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::backing::Backing;
use crate::history::History;
use crate::json::{read_json, write_json};
use crate::stamp::Verdict;
use crate::state::About;
use crate::{Gap, SourceError};

const NAME: &str = "clones";

/// The clone of an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    epoch: Epoch,
    /// As it was left.
    file: Identity,
}

impl Kept {
    /// Opens it, if it is what was left.
    fn open(&self) -> Option<File> {
        // The number of a file system's device is not the same at each mount.
        let as_left = |now: &Identity| Identity { dev: self.file.dev, ..now.clone() } == self.file;
        let file = open_clone(&self.file.path).ok()?;
        device::identity(&self.file.path).ok().filter(as_left).map(|_| file)
    }
}

fn open_clone(path: &Path) -> std::io::Result<File> {
    let (folder, name) = (path.parent().unwrap_or(path), path.file_name().unwrap_or_default());
    Ok(device::open_within(Dir::existing(folder)?.held(), name, OFlags::RDONLY, Mode::empty())?)
}

/// What is kept, of a source that is tracked by clones.
fn kept(folder: &dyn Folder) -> Result<Option<Vec<Kept>>, SourceError> {
    read_json(folder, NAME)
}

/// True if the source with its state in this folder is tracked by clones.
///
/// # Errors
/// If that cannot be read.
pub(crate) fn are_kept(folder: &dyn Folder) -> Result<bool, SourceError> {
    Ok(kept(folder)?.is_some())
}

/// Why what was written since the last epoch is not known, where that is what the record says; `None` if it is known.
///
/// # Errors
/// If the state cannot be read.
pub(crate) fn lost(
    folder: &dyn Folder,
    history: &History,
    recorded: Gap,
) -> Result<Option<Gap>, SourceError> {
    let Some(list) = kept(folder)? else { return Ok(Some(recorded)) };
    // Whether another content is wanted only its user can say.
    if matches!(recorded, Gap::OtherContent(_)) {
        return Ok(Some(recorded));
    }
    Ok(opened(list.iter().find(|kept| Some(kept.epoch) == history.last())).err())
}

/// The ranges that most likely differ from the clone of the last epoch at present, of an image that may be in use; `None` if there is none.
///
/// # Errors
/// If the state cannot be read.
pub(crate) fn written(
    folder: &dyn Folder,
    history: &History,
    image: &Path,
) -> Result<Option<Vec<Range<u64>>>, SourceError> {
    let list = kept(folder)?.unwrap_or_default();
    let old = opened(list.iter().find(|kept| Some(kept.epoch) == history.last())).ok();
    let Some((old, image)) = old.zip(open_image(image).ok()) else { return Ok(None) };
    Ok(device::likely_differing(&old, &image).ok())
}

#[allow(clippy::disallowed_methods, reason = "the image, which its user names")]
fn open_image(path: &Path) -> std::io::Result<File> {
    File::open(path)
}

/// Begins to track a source by clones, if it is not; durable on return.
///
/// # Errors
/// If that cannot be written.
pub(crate) fn begin(folder: &dyn Folder) -> Result<(), SourceError> {
    if are_kept(folder)? { Ok(()) } else { write_json(folder, NAME, &Vec::<Kept>::new()) }
}

/// Removes the clones that are kept. The source stays tracked by them: the next one says nothing of what was written until then.
///
/// # Errors
/// If the state cannot be read or written.
pub(crate) fn drop_kept(folder: &dyn Folder) -> Result<(), SourceError> {
    let Some(kept) = kept(folder)?.filter(|kept| !kept.is_empty()) else { return Ok(()) };
    write_json(folder, NAME, &Vec::<Kept>::new())?;
    kept.iter().for_each(|kept| remove(&kept.file.path));
    Ok(())
}

/// Ends tracking a source by clones, and removes them. Returns whether it was tracked so.
///
/// # Errors
/// If the state cannot be read or written.
pub(crate) fn end(folder: &dyn Folder) -> Result<bool, SourceError> {
    let was = are_kept(folder)?;
    drop_kept(folder)?;
    folder
        .remove(NAME)
        .and_then(|()| folder.sync())
        .map_err(SourceError::state("write to", folder.path()))?;
    Ok(was)
}

/// Removes a clone, and its folder if there is nothing else. What cannot be removed now is a stray, which the next clone's maker removes.
fn remove(clone: &Path) {
    let Some((folder, name)) = clone.parent().zip(clone.file_name()) else { return };
    if let Ok(dir) = Dir::existing(folder) {
        let _ = dir.remove(&name.to_string_lossy());
        let _ = std::fs::remove_dir(folder);
    }
}

/// A new clone of an image, and what it says.
pub(crate) struct NewClone {
    folder: Arc<dyn Folder>,
    /// The clone.
    file: Identity,
    /// The image just before: as long as it is so, it is what the clone is.
    pub image: Identity,
    /// What was written since the last epoch, in ranges of bytes; or why that is not known.
    pub since: Result<Vec<Range<u64>>, Gap>,
    /// How long writers had to wait.
    pub waited: Duration,
    /// It is that of an epoch, and stays.
    is_kept: bool,
}

impl NewClone {
    /// Makes a clone of the image of a source, of which `last` is the last epoch. Its state is in `folder`, which the caller has locked.
    ///
    /// # Errors
    /// `Refused` if the file system makes none, or there is no room.
    pub(crate) fn make(
        folder: Arc<dyn Folder>,
        about: &About,
        last: Option<Epoch>,
    ) -> Result<NewClone, SourceError> {
        let image = &about.path;
        let file = open_image(image).map_err(SourceError::state("open", image))?;
        let found = device::identity(image)?;
        if found.is_block() || !device::tells_places(&file).unwrap_or(false) {
            return Err(SourceError::Refused(format!(
                "{} cannot be tracked by clones: that takes a file on XFS (made with reflink=1, as is usual) or Btrfs. Serve it with \"dsync serve\", \
                 and have its user write through that; or let each sync compare it",
                image.display()
            )));
        }
        let list = only_of(&*folder, last)?;
        let place = folder_beside(image);
        let dir = Dir::open(&place).map_err(failed("make", &place))?;
        // Another state directory may know this image as well.
        let prefix = format!("clone-{}-", about.uuid);
        remove_strays(&dir, &prefix, &list);
        let name = format!("{prefix}{}", Uuid::new_v4());
        let clone = device::open_within(
            dir.held(),
            name.as_ref(),
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            Mode::RUSR | Mode::WUSR,
        );
        let clone = clone.map_err(|e| failed("make a clone in", &place)(e.into()))?;
        let path = place.join(&name);
        let made = (|| {
            // Before the clone, so that what is written meanwhile shows.
            let image = settled(image)?;
            file.sync_all()?;
            let began = Instant::now();
            device::clone_file(&file, &clone)?;
            let waited = began.elapsed();
            clone.sync_all()?;
            dir.sync()?;
            let clone = device::identity(&path).map_err(std::io::Error::other)?;
            // One that grew meanwhile has another time as well.
            Ok((Identity { size: clone.size, ..image }, clone, waited))
        })();
        let (image, file, waited) = made.map_err(|error| {
            remove(&path);
            failed("make a clone of", image)(error)
        })?;
        let since = since(list.first(), &clone);
        Ok(NewClone { folder, file, image, since, waited, is_kept: false })
    }

    /// What is known of the disk, by what its record says.
    pub(crate) fn verdict(&self, recorded: Verdict) -> Verdict {
        match (recorded, &self.since) {
            // Whether that is wanted only its user can say.
            (Verdict::Lost(other @ Gap::OtherContent(_)), _) => Verdict::Lost(other),
            (_, Ok(_)) => Verdict::Trusted { power_lost: false },
            (Verdict::Lost(_), Err(why)) => Verdict::Lost(why.clone()),
            (recorded, Err(_)) => recorded,
        }
    }

    /// The source's disk: the clone.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub(crate) fn disk(&self) -> Result<Arc<dyn Disk>, SourceError> {
        open_disk(&self.file.path)
    }

    /// What a source has to know of it.
    pub(crate) fn backing(&self) -> CloneBacking {
        let boot = Boot::of(&[&self.image.path, self.folder.path()]);
        CloneBacking { clone: self.file.path.clone(), image: self.image.clone(), boot }
    }

    /// It will be that of an epoch which is about to be written to the history, or is the last one there and has none that holds. Durable on return.
    ///
    /// # Errors
    /// If that cannot be written.
    pub(crate) fn keep(&mut self, epoch: Epoch) -> Result<(), SourceError> {
        let list = kept(&*self.folder)?.unwrap_or_default();
        let (goes, mut stays): (Vec<_>, Vec<_>) = list.into_iter().partition(|kept| kept.epoch == epoch);
        stays.push(Kept { epoch, file: self.file.clone() });
        write_json(&*self.folder, NAME, &stays)?;
        self.is_kept = true;
        goes.iter().for_each(|kept| remove(&kept.file.path));
        Ok(())
    }

    /// Forgets those of earlier epochs. What fails is repeated by the next clone's maker.
    pub(crate) fn drop_earlier(&self) {
        let Ok(Some(list)) = kept(&*self.folder) else { return };
        let (stays, goes): (Vec<_>, Vec<_>) =
            list.into_iter().partition(|kept| kept.file.path == self.file.path);
        if write_json(&*self.folder, NAME, &stays).is_ok() {
            goes.iter().for_each(|kept| remove(&kept.file.path));
        }
    }
}

impl Drop for NewClone {
    fn drop(&mut self) {
        if !self.is_kept {
            remove(&self.file.path);
        }
    }
}

fn open_disk(clone: &Path) -> Result<Arc<dyn Disk>, SourceError> {
    Ok(device::open(clone, &device::Options { direct: true, ..Default::default() })?)
}

/// The folder for what belongs to an image, which is that of its replica's state as well.
fn folder_beside(image: &Path) -> PathBuf {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    image.with_file_name(format!(".{name}.dsync"))
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> SourceError {
    let path = path.display().to_string();
    move |error| {
        let way_out = match error.kind() {
            std::io::ErrorKind::PermissionDenied => "run as a user who may write there, or ",
            std::io::ErrorKind::StorageFull => "free some space, or ",
            _ => "",
        };
        SourceError::Refused(format!(
            "cannot {what} {path}: {error}: {way_out}stop tracking the image by clones, with \"dsync track remove\""
        ))
    }
}

/// What an image is, so that whatever is written from now on gives it another identity.
fn settled(image: &Path) -> std::io::Result<Identity> {
    let clock = Clock::system();
    let look = || device::identity(image).map_err(std::io::Error::other);
    let mut found = look()?;
    if !clock.is_past(found.ctime_ns) {
        std::thread::sleep(Duration::from_nanos(clock.apart(found.ctime_ns) + clock.tick()));
        found = look()?;
    }
    // It is written to all the time: a time that it never has again.
    if !clock.is_past(found.ctime_ns) {
        found.ctime_ns -= 1;
    }
    Ok(found)
}

/// The clone that is kept of the last epoch, if there is one. Any other one is removed: what it was made for has failed, or has a later one.
fn only_of(folder: &dyn Folder, last: Option<Epoch>) -> Result<Vec<Kept>, SourceError> {
    let list = kept(folder)?.unwrap_or_default();
    let (stays, goes): (Vec<_>, Vec<_>) = list.into_iter().partition(|kept| Some(kept.epoch) == last);
    if !goes.is_empty() {
        write_json(folder, NAME, &stays)?;
        goes.iter().for_each(|kept| remove(&kept.file.path));
    }
    Ok(stays)
}

/// The clone that is kept of the last epoch, open.
fn opened(kept: Option<&Kept>) -> Result<File, Gap> {
    let kept = kept.ok_or("no clone is kept of its last epoch")?;
    Ok(kept.open().ok_or("the clone of its last epoch was changed or removed")?)
}

/// What differs between the clone that is kept of the last epoch and a new one.
fn since(kept: Option<&Kept>, new: &File) -> Result<Vec<Range<u64>>, Gap> {
    device::differing(&opened(kept)?, new)
        .map_err(|error| format!("the clone of its last epoch cannot be compared: {error}").into())
}

/// Removes clones that a crash has left.
fn remove_strays(dir: &Dir, prefix: &str, kept: &[Kept]) {
    let is_kept = |name: &str| kept.iter().any(|kept| kept.file.path == dir.path().join(name));
    for name in dir.list().unwrap_or_default() {
        if name.starts_with(prefix) && !is_kept(&name) {
            let _ = dir.remove(&name);
        }
    }
}

/// A clone in place of its image, which was that then.
pub(crate) struct CloneBacking {
    clone: PathBuf,
    image: Identity,
    boot: Boot,
}

impl Backing for CloneBacking {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(self.image.clone())
    }
    fn boot(&self) -> Boot {
        self.boot.clone()
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        open_disk(&self.clone)
    }
    fn durable_time(&self) -> Result<i64, SourceError> {
        // The image was made durable with it.
        Ok(self.image.ctime_ns)
    }
}
