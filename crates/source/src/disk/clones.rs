//! An image that is tracked by clones: of its last epoch a clone is kept beside it, and what differs between that and the next one was written
//! since, by whatever program. The image may be in use: what is read is the new clone, which is one moment of it.
//!
//! The clones that are kept, at most two, stand in the source's folder with the epoch of each. The new one is noted before its epoch is in the
//! history, and the old one forgotten afterwards; so whatever a crash leaves, the one of the history's last epoch is known. Where there is none,
//! or it is not the file that was left, what was written is not known.
//!
//! The folder beside the image may belong to another user than the process, who can put anything in the place of a clone at any time. So a clone is
//! known by its open file, never by its path; one that is opened again is compared with what was left; and what is removed is a name in
//! an open folder.
//!
//! - **What the clones say goes before the record and the stamp**, except that an older image in the place of a newer one is refused as
//!   ever. The marks are in the record before the stamp says that it is whole.
//! - **The stamp is the image's just before its clone**, so a disk that was at rest since is known to be so without a clone. If the image
//!   was written to around it, the stamp is one that no image has, and a record that is trusted by times alone is not trusted.
//! - **At rest**: a demotion and a group need disks that nobody writes to. They lock the image, read the clone, and fail if the image is not
//!   what that is in the end. What was read of the image itself, and stayed in a journal when the sync ended, would be taken for the epoch
//!   whose clone the image may be given back from.
//! - **A server** records for itself: it takes what differs into its record, and removes the clone. The first sync after it makes one
//!   again.
//!
//! Outside: pages of a shared mapping that a device writes to behind the kernel's back (RDMA, O_DIRECT reads into the mapping).

use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use delta::Epoch;
use device::{Boot, Clock, Dir, Disk, Folder, FolderLock, Identity, Overwritten};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::disk::backing::Backing;
use crate::disk::rests::Rests;
use crate::record::history::History;
use crate::record::json::{read_json, write_json};
use crate::record::stamp::StampVerdict;
use crate::record::state::SourceMetadata;
use crate::{Gap, SourceError};

const NAME: &str = "clones";

/// What is held around the moment that a clone shows.
pub trait Around: Debug + Send + Sync {
    /// The clone is about to be made.
    ///
    /// # Errors
    /// Why it must not be.
    fn before(&self) -> Result<(), String>;

    /// The clone was made, or not.
    fn after(&self, made: bool);
}

/// The clone of an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    epoch: Epoch,
    /// As it was left. The number of its file system's device may be another one at each mount.
    file: Identity,
}

impl Kept {
    fn dir(&self) -> io::Result<Dir> {
        Dir::existing(self.file.path.parent().unwrap_or(&self.file.path))
    }

    fn name(&self) -> &str {
        self.file.path.file_name().and_then(OsStr::to_str).unwrap_or_default()
    }

    /// Opens it, if it is what was left.
    fn open(&self) -> io::Result<File> {
        let file =
            device::open_within(self.dir()?.held(), self.name().as_ref(), OFlags::RDONLY, Mode::empty())?;
        let now = device::identity_of(&file, &self.file.path)?;
        match (Identity { dev: self.file.dev, ..now }) == self.file {
            true => Ok(file),
            false => Err(ErrorKind::NotFound.into()),
        }
    }

    /// Removes it. It is not an error if it is gone.
    fn remove(&self) -> io::Result<()> {
        let removed = |dir: Dir| dir.remove(self.name()).map(|()| remove_if_empty(dir.path()));
        match self.dir().and_then(removed) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes it if that is possible now. Otherwise the next clone's maker does.
    fn forget(&self) {
        let _ = self.remove();
    }
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

/// What was most likely written since the last epoch to an image that may be in use, or `None` if there is no clone of that; `None` if it is not
/// tracked by clones.
///
/// # Errors
/// If the state cannot be read.
pub(crate) fn written(
    folder: &dyn Folder,
    history: &History,
    image: &Path,
) -> Result<Option<Option<Overwritten>>, SourceError> {
    let Some(list) = kept(folder)? else { return Ok(None) };
    let old = opened(list.iter().find(|kept| Some(kept.epoch) == history.last())).ok();
    let both = old.zip(open_image(image).ok());
    Ok(Some(both.and_then(|(old, image)| device::likely_differing(&old, &image).ok())))
}

/// Opens an image, where its owner may have put anything: nothing is waited for.
#[allow(clippy::disallowed_methods, reason = "the image, which its user names")]
fn open_image(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path)?;
    device::identity_of(&file, path).map(|_| file)
}

/// Removes the clones of a source that are kept, and what a crash has left of others. The source stays tracked by them: the next one says nothing of what
/// was written until then.
///
/// # Errors
/// If the state cannot be read or written.
pub(crate) fn drop_kept(folder: &dyn Folder, about: &SourceMetadata) -> Result<(), SourceError> {
    if let Some(kept) = kept(folder)?.filter(|kept| !kept.is_empty()) {
        write_json(folder, NAME, &Vec::<Kept>::new())?;
        kept.iter().for_each(Kept::forget);
    }
    remove_strays(about, &[]);
    Ok(())
}

/// Ends tracking a source by clones, and removes them. Returns whether there was one.
///
/// # Errors
/// If the state cannot be read or written, or a clone not removed: then the source is tracked as before.
pub(crate) fn end(folder: &dyn Folder, about: &SourceMetadata) -> Result<bool, SourceError> {
    let list = kept(folder)?.unwrap_or_default();
    let mut found = false;
    for kept in &list {
        found |= kept.open().is_ok();
        kept.remove().map_err(SourceError::state("remove the clone", &kept.file.path))?;
    }
    found |= remove_strays(about, &[]);
    let gone = folder.remove(NAME).and_then(|()| folder.sync());
    gone.map_err(SourceError::state("write to", folder.path()))?;
    Ok(found)
}

/// A new clone of an image, and what it says.
pub(crate) struct NewClone {
    /// The state of its source.
    state: Arc<dyn Folder>,
    dir: Dir,
    name: String,
    file: Arc<File>,
    /// The image just before. Of one that was written to meanwhile it has a time that the image never had: as long as the image is so, it is what
    /// the clone is.
    pub image: Identity,
    /// The image as it was found just before.
    looked: Identity,
    is_still: bool,
    /// What was written since the last epoch; or why that is not known.
    pub since: Result<Vec<std::ops::Range<u64>>, Gap>,
    /// How long writers had to wait.
    pub waited: Duration,
    /// It is that of an epoch, and stays.
    is_kept: bool,
}

impl NewClone {
    /// Makes a clone of the image of a source, of which `last` is the last epoch. Its state is in `state`, which the caller has locked. An inner
    /// `Err` says why none can be made.
    ///
    /// # Errors
    /// `Busy` while another dsync writes to the image as a replica; `Hook` with what `around` says; if the state cannot be read or written.
    pub(crate) fn make(
        state: Arc<dyn Folder>,
        about: &SourceMetadata,
        last: Option<Epoch>,
        around: Option<&dyn Around>,
    ) -> Result<Result<NewClone, String>, SourceError> {
        let image = match open_image(&about.path) {
            Ok(image) if device::tells_places(&image).unwrap_or(false) => image,
            Ok(_) => return Ok(Err("its file system makes none".into())),
            Err(error) => return Ok(Err(error.to_string())),
        };
        let mut list = only_of(&*state, last)?;
        remove_strays(about, &list);
        let place = beside(&about.path, "dsync-clones");
        let open = || Dir::open(&place).map_err(|error| format!("cannot make {}: {error}", place.display()));
        let mut dir = match open() {
            Ok(dir) => dir,
            Err(why) => return Ok(Err(why)),
        };
        let _replica = lock_replica(&about.path)?;
        let name = format!("{}{}", prefix(about), Uuid::new_v4());
        let mut made = fill(&*state, (&dir, &name), (&image, &about.path), around)?;
        if matches!(&made, Err(error) if error.kind() == ErrorKind::StorageFull) && !list.is_empty() {
            // The old one makes room, and all is compared once.
            write_json(&*state, NAME, &Vec::<Kept>::new())?;
            list.drain(..).for_each(|kept| kept.forget());
            // It went with the last one in it.
            match open() {
                Ok(anew) => dir = anew,
                Err(why) => return Ok(Err(why)),
            }
            made = fill(&*state, (&dir, &name), (&image, &about.path), around)?;
        }
        Ok(made.map_err(|error| error.to_string()).map(|Filled { file, image, looked, is_still, waited }| {
            let since = since(list.first(), &file);
            let file = Arc::new(file);
            NewClone { state, dir, name, file, image, looked, is_still, since, waited, is_kept: false }
        }))
    }

    /// What is known of the disk, by what its record says.
    pub(crate) fn verdict(&self, recorded: StampVerdict) -> StampVerdict {
        match (recorded, &self.since) {
            // Whether that is wanted only its user can say.
            (StampVerdict::Lost(other @ Gap::OtherContent(_)), _) => StampVerdict::Lost(other),
            (_, Ok(_)) => StampVerdict::Trusted { power_lost: false },
            // The record is of the image just before its clone.
            (StampVerdict::Trusted { .. }, Err(_)) if !self.is_still => {
                StampVerdict::Lost("it was written to while it was cloned".into())
            }
            (recorded @ (StampVerdict::Trusted { .. } | StampVerdict::New), Err(_)) => recorded,
            (_, Err(why)) => StampVerdict::Lost(why.clone()),
        }
    }

    /// The source's disk: the clone.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn disk(&self) -> Result<Arc<dyn Disk>, SourceError> {
        open_disk(&self.file, &self.path())
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join(&self.name)
    }

    /// What a source has to know of it.
    pub(crate) fn backing(&self) -> CloneBacking {
        let boot = Boot::of(&[&self.image.path, self.state.path()]);
        CloneBacking { file: self.file.clone(), path: self.path(), image: self.image.clone(), boot }
    }

    /// What a source has to know of it whose image has to be at rest.
    pub(crate) fn at_rest(&self, image: Box<dyn Backing>) -> RestingImage {
        RestingImage { file: self.file.clone(), path: self.path(), image, was: self.looked.clone() }
    }

    /// Keeps the clone for an epoch which is about to be written to the history, or is the last one there and has none that holds: unless the
    /// source's disk is the image itself, and was written to since. Durable on return.
    ///
    /// # Errors
    /// If that cannot be written.
    pub(crate) fn keep(&mut self, epoch: Epoch, backing: &dyn Backing) -> Result<(), SourceError> {
        if backing.identity()? != self.image {
            return Ok(());
        }
        let failed = SourceError::state("look at a clone in", self.dir.path());
        let file = device::identity_of(&self.file, &self.path()).map_err(failed)?;
        let list = kept(&*self.state)?.unwrap_or_default();
        let (goes, mut stays): (Vec<_>, Vec<_>) = list.into_iter().partition(|kept| kept.epoch == epoch);
        stays.push(Kept { epoch, file });
        write_json(&*self.state, NAME, &stays)?;
        self.is_kept = true;
        goes.iter().for_each(Kept::forget);
        Ok(())
    }

    /// Forgets those of other epochs. What fails is repeated by the next clone's maker.
    pub(crate) fn drop_others(&self) {
        let Ok(Some(list)) = kept(&*self.state) else { return };
        let (stays, goes): (Vec<_>, Vec<_>) = list.into_iter().partition(|kept| kept.name() == self.name);
        if write_json(&*self.state, NAME, &stays).is_ok() {
            goes.iter().for_each(Kept::forget);
        }
    }
}

impl Drop for NewClone {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = self.dir.remove(&self.name);
            remove_if_empty(self.dir.path());
        }
    }
}

/// A clone that was just made, and what the image was then.
struct Filled {
    file: File,
    image: Identity,
    looked: Identity,
    is_still: bool,
    waited: Duration,
}

/// Makes a clone of this name in a folder. After an error there is none.
fn fill(
    state: &dyn Folder,
    (dir, name): (&Dir, &str),
    (from, path): (&File, &Path),
    around: Option<&dyn Around>,
) -> Result<io::Result<Filled>, SourceError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let file = match device::open_within(dir.held(), name.as_ref(), flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file,
        Err(error) => return Ok(Err(error.into())),
    };
    let filled = (|| -> Result<io::Result<Filled>, SourceError> {
        // What takes long is done before.
        if let Err(error) = from.sync_all() {
            return Ok(Err(error));
        }
        around.map_or(Ok(()), |around| around.before()).map_err(SourceError::Hook)?;
        let cloned = clone_now(state, from, &file, path);
        around.into_iter().for_each(|around| around.after(cloned.is_ok()));
        Ok(cloned.and_then(|(image, looked, is_still, waited)| {
            // What was written between the two is in the clone.
            from.sync_all()?;
            file.sync_all()?;
            dir.sync()?;
            Ok(Filled { file, image, looked, is_still, waited })
        }))
    })();
    if !matches!(filled, Ok(Ok(_))) {
        let _ = dir.remove(name);
    }
    filled
}

/// Makes a clone. What the image is taken to have been just before, and was found to be; whether it was that just after, and how long its writers waited.
fn clone_now(
    state: &dyn Folder,
    from: &File,
    to: &File,
    path: &Path,
) -> io::Result<(Identity, Identity, bool, Duration)> {
    let clock = Clock::system();
    let look = || device::identity_of(from, path);
    let mut image = look()?;
    // What is written from now on gives it another time.
    if !clock.is_past(image.ctime_ns) {
        std::thread::sleep(Duration::from_nanos(clock.apart(image.ctime_ns) + clock.tick()));
        image = look()?;
    }
    let is_settled = clock.is_past(image.ctime_ns);
    let began = Instant::now();
    let cloned = device::clone_file(from, to);
    let waited = began.elapsed();
    // Where that cannot be written, nor can what follows.
    let _ = Rests::of_image(state).map(|rests| rests.add(waited));
    cloned?;
    let looked = image.clone();
    let is_still = is_settled && look()? == image;
    if !is_still {
        // No older than what is recorded, and no newer than what there will be.
        let ctime_ns = image.ctime_ns + if is_settled { 1 } else { -1 };
        image = Identity { ctime_ns, size: to.metadata()?.len(), ..image };
    }
    Ok((image, looked, is_still, waited))
}

/// Makes a disk of a clone, which is opened again by what it is.
fn open_disk(clone: &File, path: &Path) -> Result<Arc<dyn Disk>, SourceError> {
    let file = clone.try_clone().map_err(SourceError::state("open", path))?;
    Ok(device::adopt(file, path, &device::DiskOptions { direct: true, ..Default::default() })?)
}

/// A hidden folder beside an image.
fn beside(image: &Path, what: &str) -> PathBuf {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    image.with_file_name(format!(".{name}.{what}"))
}

fn remove_if_empty(folder: &Path) {
    let _ = std::fs::remove_dir(folder);
}

/// Keeps other dsync processes from writing to the image as a replica, if it ever was one.
fn lock_replica(image: &Path) -> Result<Option<FolderLock>, SourceError> {
    let Ok(dir) = Dir::existing(&beside(image, "dsync")) else { return Ok(None) };
    if !dir.list().is_ok_and(|names| names.iter().any(|name| name == FolderLock::NAME)) {
        return Ok(None);
    }
    let taken = FolderLock::of(&dir).map_err(SourceError::state("lock", dir.path()))?;
    taken.map(Some).map_err(|holder| SourceError::Busy { path: image.to_path_buf(), holder })
}

/// The clone that is kept of the last epoch, if there is one. Any other one is removed: what it was made for has failed, or has a later one.
fn only_of(folder: &dyn Folder, last: Option<Epoch>) -> Result<Vec<Kept>, SourceError> {
    let list = kept(folder)?.unwrap_or_default();
    let (stays, goes): (Vec<_>, Vec<_>) = list.into_iter().partition(|kept| Some(kept.epoch) == last);
    if !goes.is_empty() {
        write_json(folder, NAME, &stays)?;
        goes.iter().for_each(Kept::forget);
    }
    Ok(stays)
}

/// The clone that is kept of the last epoch, open.
fn opened(kept: Option<&Kept>) -> Result<File, Gap> {
    let kept = kept.ok_or("no clone is kept of its last epoch")?;
    kept.open().map_err(|error| match error.kind() {
        ErrorKind::NotFound => "the clone of its last epoch was changed or removed".into(),
        _ => format!("the clone of its last epoch cannot be opened: {error}").into(),
    })
}

/// What differs between the clone that is kept of the last epoch and a new one.
fn since(kept: Option<&Kept>, new: &File) -> Result<Vec<std::ops::Range<u64>>, Gap> {
    device::differing(&opened(kept)?, new)
        .map_err(|error| format!("the clone of its last epoch cannot be compared: {error}").into())
}

/// How the names of a source's clones begin. Another state directory may know this image as well.
fn prefix(about: &SourceMetadata) -> String {
    format!("clone-{}-", about.uuid)
}

/// Removes clones of a source that a crash has left. Returns whether there were any.
fn remove_strays(about: &SourceMetadata, kept: &[Kept]) -> bool {
    let (place, prefix) = (beside(&about.path, "dsync-clones"), prefix(about));
    let Ok(dir) = Dir::existing(&place) else { return false };
    let names = dir.list().unwrap_or_default();
    let is_stray = |name: &&String| name.starts_with(&prefix) && kept.iter().all(|kept| kept.name() != *name);
    let removed = names.iter().filter(is_stray).filter(|name| dir.remove(name).is_ok()).count();
    remove_if_empty(&place);
    removed > 0
}

/// A clone in place of its image, which was that then.
pub(crate) struct CloneBacking {
    file: Arc<File>,
    path: PathBuf,
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
        open_disk(&self.file, &self.path)
    }
    fn durable_times(&self) -> Result<(i64, i64), SourceError> {
        // The image was made durable with it.
        Ok((self.image.ctime_ns, self.image.mtime_ns))
    }
    fn is_clone(&self) -> bool {
        true
    }
}

/// An image that is read by its clone, and is what that is as long as nobody writes to it.
pub(crate) struct RestingImage {
    file: Arc<File>,
    path: PathBuf,
    image: Box<dyn Backing>,
    /// The image just before.
    was: Identity,
}

impl Backing for RestingImage {
    fn identity(&self) -> Result<Identity, SourceError> {
        self.image.identity()
    }
    fn boot(&self) -> Boot {
        self.image.boot()
    }
    fn clock(&self) -> Clock {
        self.image.clock()
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        open_disk(&self.file, &self.path)
    }
    fn durable_times(&self) -> Result<(i64, i64), SourceError> {
        self.image.durable_times()
    }
    fn still(&self) -> io::Result<()> {
        match self.image.identity() {
            Ok(now) if now == self.was => Ok(()),
            Ok(now) => Err(io::Error::other(SourceError::NotAtRest(now.path))),
            Err(error) => Err(io::Error::other(error)),
        }
    }
}
