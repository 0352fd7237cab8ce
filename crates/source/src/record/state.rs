//! The state directory, with the folders of all sources.
//!
//! # Which source a disk is
//!
//! The identity of a source is kept in its state: path, inode and birth time of the file, or an identifier of the disk behind a device
//! (`device::disk_id`) that does not depend on its kernel name. A file that was moved or renamed, or has changed places with another, is
//! recognised by inode and birth time, served or not; its record is then not trusted once, since a rename changes the same time as a
//! write. Another file at the old path is the old source only if nothing is known of it; another disk under the old one's name is another
//! source. Looking up and creating a source happens under `STATE/sources/lock`, so that two first syncs of a disk create one source. A
//! state folder that cannot be read is reported by `status`, and affects its own source only.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use delta::Epoch;
use device::{Dir, Folder, FolderLock, Format, Identity};
use lineage::{Lives, Point};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::SourceError;
use crate::record::history;
use crate::record::json::{read_json, write_json};
use crate::record::stamp::ImageStamp;

pub(crate) const ABOUT: &str = "source";

/// The state directory.
#[derive(Debug, Clone)]
pub struct StateDir {
    root: PathBuf,
}

/// The description in a source's folder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SourceMetadata {
    /// Version of the folder's format.
    pub version: u32,
    /// The source's UUID.
    pub uuid: Uuid,
    /// Its path, without links.
    pub path: PathBuf,
    /// Inode and device numbers when it was last opened.
    pub identity: Identity,
    /// How the disk lies in its file.
    #[serde(default, skip_serializing_if = "Format::is_raw")]
    pub format: Format,
    /// Block size in bytes.
    pub block_size: u32,
    /// Rises at each promotion of one of its replicas, from 1.
    pub term: u64,
    /// The epoch at which that term began: the last one that it has in common with the source of the term before. `None` in
    /// the first term.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Epoch>,
    /// The promotion with which that term began gave up what the source of the term before had written since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gave_up: bool,
    /// The life that began with that promotion, whatever has become of the way from it since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promotion: Option<Uuid>,
    /// Of a replica that passes on what it receives: where it was on its own way when it was opened last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed: Option<Point>,
    /// The lives that led to the present one, which is the first of them.
    pub lives: Lives,
}

impl SourceMetadata {
    /// The version this program writes.
    pub const VERSION: u32 = 1;

    /// A source in its first term.
    pub fn new(uuid: Uuid, identity: Identity, block_size: u32) -> SourceMetadata {
        let path = identity.path.clone();
        let (term, lives) = (1, Lives::first(Uuid::new_v4()));
        let (began, gave_up, promotion, passed) = (None, false, None, None);
        let format = Format::Raw;
        SourceMetadata {
            version: SourceMetadata::VERSION,
            uuid,
            path,
            identity,
            format,
            block_size,
            term,
            began,
            gave_up,
            promotion,
            passed,
            lives,
        }
    }

    /// Takes over the term and the lives from an earlier description of the same source.
    pub(crate) fn in_term_of(self, known: SourceMetadata) -> SourceMetadata {
        SourceMetadata {
            term: known.term,
            began: known.began,
            gave_up: known.gave_up,
            promotion: known.promotion,
            passed: known.passed,
            lives: known.lives,
            ..self
        }
    }

    /// The name under which the source is served: the stem of its file name.
    pub fn name(&self) -> String {
        export_name(&self.path)
    }
}

/// The description in a source's folder, with an identifier of its disk: inode and device numbers are reused.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Known {
    #[serde(flatten)]
    about: SourceMetadata,
    mark: Option<String>,
}

/// The birth time of a file, which no other file with the same inode has; the identifier of the disk behind a device, however the kernel
/// calls it. `None` if there is none.
fn mark(identity: &Identity) -> Option<String> {
    if identity.is_block() {
        return device::disk_id(identity.dev);
    }
    const SECOND: i64 = 1_000_000_000;
    identity.born_ns.map(|born| format!("{}.{:09}", born / SECOND, born % SECOND))
}

impl Known {
    /// Whether it is the recorded disk, by its mark; `None` if that is not known.
    fn is(&self, identity: &Identity, mark: Option<&String>) -> Option<bool> {
        let same = self.mark.as_ref()? == mark?;
        // Two disks that are attached at once under one number are different.
        let is_it = || self.about.identity.same_object(identity);
        Some(same && (is_it() || (identity.is_block() && !self.is_in_place())))
    }

    /// True if its path still leads to its disk.
    fn is_in_place(&self) -> bool {
        device::identity(&self.about.path).is_ok_and(|now| now.same_object(&self.about.identity))
    }
}

/// The known source of a disk, also if it was moved.
fn known_as(sources: &[(PathBuf, Known)], identity: &Identity) -> Option<(PathBuf, SourceMetadata)> {
    let mark = mark(identity);
    let at_path = |known: &Known| known.about.path == identity.path;
    let named = || {
        let mut same = sources.iter().filter(|(_, known)| known.is(identity, mark.as_ref()) == Some(true));
        let first = same.clone().find(|(_, known)| at_path(known));
        first.or_else(|| same.next())
    };
    // An image that another file has replaced is the same source; another disk of the same name is not.
    let placed = || {
        sources.iter().find(|(_, known)| {
            at_path(known) && !(identity.is_block() && known.is(identity, mark.as_ref()) == Some(false))
        })
    };
    let unmarked = || {
        sources.iter().find(|(_, known)| {
            known.is(identity, mark.as_ref()).is_none()
                && known.about.identity.same_object(identity)
                && !device::is_there(&known.about.path)
        })
    };
    let (place, known) = named().or_else(placed).or_else(unmarked)?;
    let mut about = known.about.clone();
    // A second name of a file that also has its old one changes nothing.
    if !at_path(known) && !known.is_in_place() {
        about = SourceMetadata { path: identity.path.clone(), identity: identity.clone(), ..about };
    }
    Some((place.clone(), about))
}

/// The contents of the state directory.
#[derive(Debug, Default)]
pub struct Survey {
    /// The known sources, sorted by path.
    pub sources: Vec<(PathBuf, SourceMetadata)>,
    /// The folders that cannot be read, and why.
    pub damaged: Vec<(PathBuf, SourceError)>,
    /// The folders of sources that do not say of which, as errors.
    pub nameless: Vec<(PathBuf, SourceError)>,
}

/// The export's name of an image: the stem of its file name.
pub fn export_name(path: &Path) -> String {
    if let Some(Ok(uri)) = device::ExportUri::of(path) {
        return if uri.export.is_empty() { "disk".into() } else { uri.export };
    }
    path.file_stem().map_or_else(|| "disk".into(), |s| s.to_string_lossy().into_owned())
}

/// The file with the name under which a source was served last, if its path does not tell that: it was named by a link.
const SERVED_AS: &str = "served-as";

/// Whether a source was last served under this name.
fn was_served_as(place: &Path, name: &str) -> bool {
    let read = |folder: Dir| crate::record::json::read_json::<String>(&folder, SERVED_AS).ok().flatten();
    Dir::existing(place).ok().and_then(read).is_some_and(|known| known == name)
}

/// Writes down the name under which a source is served, so that it is found by that.
pub(crate) fn note_served_as(
    folder: &dyn Folder,
    about: &SourceMetadata,
    name: &str,
) -> Result<(), SourceError> {
    let known = crate::record::json::read_json::<String>(folder, SERVED_AS)?;
    if known.is_none() && about.name() == name || known.as_deref() == Some(name) {
        return Ok(());
    }
    // What the link led to before is not meant by it any more.
    let others =
        folder.path().parent().and_then(|sources| sources.read_dir().ok()).into_iter().flatten().flatten();
    for other in
        others.map(|entry| entry.path()).filter(|other| other != folder.path() && was_served_as(other, name))
    {
        Dir::existing(&other)
            .and_then(|other| other.remove(SERVED_AS))
            .map_err(SourceError::state("write to", &other))?;
    }
    crate::record::json::write_json(folder, SERVED_AS, &name)
}

/// A variable of the environment. An empty one is one that is not set.
fn variable(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The last part of a path.
pub fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A device's path as one name.
fn device_name(device: &Path) -> String {
    device.to_string_lossy().trim_start_matches('/').replace('/', "-")
}

impl StateDir {
    /// The given directory, else the one of `DSYNC_STATE_DIR`, else `/var/lib/dsync` for root, else the user's own.
    pub fn find(given: Option<&Path>) -> StateDir {
        let root = match (given, variable("DSYNC_STATE_DIR")) {
            (Some(path), _) => path.to_path_buf(),
            (None, Some(path)) => path.into(),
            (None, None) => StateDir::usual(),
        };
        StateDir { root }
    }

    /// The default state directory of this user.
    fn usual() -> PathBuf {
        match variable("XDG_STATE_HOME") {
            _ if rustix::process::geteuid().is_root() => "/var/lib/dsync".into(),
            Some(path) => Path::new(&path).join("dsync"),
            None => PathBuf::from(variable("HOME").unwrap_or_else(|| "/".into())).join(".local/state/dsync"),
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The option that names it, where a command without one would take another: a service may have its own, in its environment.
    pub fn option(&self) -> Option<String> {
        let path = self.absolute();
        (StateDir::usual() != path).then(|| format!("--state-dir {}", path.display()))
    }

    /// The directory from the root on.
    pub fn absolute(&self) -> PathBuf {
        let path = std::fs::canonicalize(&self.root).or_else(|_| std::path::absolute(&self.root));
        path.unwrap_or_else(|_| self.root.clone())
    }

    /// Where the folders for replicas on block devices are.
    pub fn replicas_folder(&self) -> PathBuf {
        self.root.join("replicas")
    }

    /// The folder for the list of the other replicas on this host.
    pub fn replica_list(&self) -> PathBuf {
        self.root.join("known-replicas")
    }

    /// The folder for the saved record of a tracked device, by its canonical path.
    pub fn tracker_folder(&self, device: &Path) -> PathBuf {
        self.root.join("trackers").join(device_name(device))
    }

    /// The folder for what the jobs of this host did last.
    pub fn jobs_folder(&self) -> PathBuf {
        self.root.join("jobs")
    }

    /// The folder for what machines need besides their disks.
    pub fn machines_folder(&self) -> PathBuf {
        self.root.join("machines")
    }

    /// The folder for this site's key and those that it trusts.
    pub fn keys_folder(&self) -> PathBuf {
        self.root.join("keys")
    }

    /// The known sources, and the unreadable folders, which do not affect the others.
    pub fn survey(&self) -> Result<Survey, SourceError> {
        let (known, damaged) = self.known()?;
        let is_known = |place: &PathBuf| {
            known
                .iter()
                .map(|(known, _)| known)
                .chain(damaged.iter().map(|(place, _)| place))
                .any(|at| at == place)
        };
        let entries = std::fs::read_dir(self.root.join("sources")).into_iter().flatten().flatten();
        let others = entries.map(|entry| entry.path()).filter(|place| !is_known(place));
        let nameless = others.filter(|place| is_nameless(place)).map(|place| {
            let (path, why) = (place.join(ABOUT), "it is missing".to_owned());
            (place, SourceError::Damaged { path, why })
        });
        let nameless = nameless.collect();
        let sources = known.into_iter().map(|(place, known)| (place, known.about)).collect();
        Ok(Survey { sources, damaged, nameless })
    }

    #[allow(clippy::type_complexity)]
    fn known(&self) -> Result<(Vec<(PathBuf, Known)>, Vec<(PathBuf, SourceError)>), SourceError> {
        let root = self.root.join("sources");
        let entries = match std::fs::read_dir(&root) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Default::default()),
            Err(e) => return Err(SourceError::state("read", &root)(e)),
        };
        let (mut known, mut damaged) = (Vec::new(), Vec::new());
        for entry in entries {
            let place = entry.map_err(SourceError::state("read", &root))?.path();
            if !place.is_dir() {
                continue;
            }
            match read_about(&place) {
                Ok(Some(about)) => known.push((place, about)),
                Ok(None) => {}
                Err(error) => damaged.push((place, error)),
            }
        }
        known.sort_by(|a, b| a.1.about.path.cmp(&b.1.about.path));
        damaged.sort_by(|a, b| a.0.cmp(&b.0));
        Ok((known, damaged))
    }

    /// The source of a path, an export name, or an id. A moved or renamed file is recognised by its inode
    /// and birth time; its present path is returned.
    pub fn source(&self, what: &str) -> Result<Option<(PathBuf, SourceMetadata)>, SourceError> {
        let (sources, damaged) = self.known()?;
        if let Ok(id) = what.parse::<Uuid>() {
            let sources = sources.into_iter().map(|(place, known)| (place, known.about));
            // Two have one id where a replica was promoted on the host of its source.
            return Ok(sources.filter(|(_, about)| about.uuid == id).max_by_key(|(_, about)| about.term));
        }
        if let Ok(path) = std::fs::canonicalize(what) {
            match device::identity(&path) {
                Ok(identity) => {
                    let found = known_as(&sources, &identity);
                    return if found.is_some() { Ok(found) } else { not_damaged(damaged, &identity) };
                }
                // A folder in the current directory does not hide an export of that name.
                Err(error) if what.contains('/') => return Err(error.into()),
                Err(_) => {}
            }
        }
        let mut sources = sources.into_iter().map(|(place, known)| (place, known.about));
        if what.contains('/') {
            // A source that is gone can be named by its former path.
            let what = device::absolute(what).unwrap_or_else(|_| what.into());
            return Ok(sources.find(|(_, a)| a.path == what));
        }
        // A link may lead elsewhere by now, so a name that a path has itself goes before.
        let (mut named, others): (Vec<_>, Vec<_>) = sources.partition(|(_, a)| a.name() == what);
        if named.is_empty() {
            named = others.into_iter().filter(|(place, _)| was_served_as(place, what)).collect();
        }
        let mut named = named.into_iter();
        match (named.next(), named.next()) {
            (Some(one), Some(other)) => Err(SourceError::Unknown(format!(
                "\"{what}\" is ambiguous ({} or {}): give the path, or remove one that is not used any more with \"dsync forget PATH\"",
                one.1.path.display(),
                other.1.path.display()
            ))),
            (one, _) => Ok(one),
        }
    }

    /// Locks looking up and creating sources: two processes that start at once agree on one identity.
    ///
    /// # Errors
    /// `Refused` if the lock is not free within ten seconds.
    pub(crate) fn lock(&self) -> Result<FolderLock, SourceError> {
        let root = self.root.join("sources");
        Dir::open(&root).map_err(SourceError::state("make", &root))?;
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            match FolderLock::take(&root).map_err(SourceError::state("lock", &root))? {
                Ok(lock) => return Ok(lock),
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Err(holder) => {
                    return Err(SourceError::Refused(format!(
                        "{} is locked by {holder}, which is opening a source: wait for it, or stop it",
                        root.display()
                    )));
                }
            }
        }
    }

    /// The folder for a source of this UUID.
    pub(crate) fn source_folder(&self, uuid: Uuid) -> PathBuf {
        self.root.join("sources").join(uuid.to_string())
    }

    /// The folder for a term of a source, on a host where another disk is the source of an earlier term.
    pub(crate) fn folder_of_term(&self, uuid: Uuid, term: u64) -> PathBuf {
        self.root.join("sources").join(format!("{uuid}-{term}"))
    }
}

/// Writes the description of a source into its folder.
///
/// # Errors
/// If that fails.
#[doc(hidden)]
pub fn write_about(folder: &dyn Folder, about: &SourceMetadata) -> Result<(), SourceError> {
    write_json(folder, ABOUT, &Known { about: about.clone(), mark: mark(&about.identity) })
}

fn read_about(place: &Path) -> Result<Option<Known>, SourceError> {
    match Dir::existing(place) {
        // It was forgotten since it was found.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        folder => read_known(&folder.map_err(SourceError::state("open", place))?),
    }
}

/// True for the folder of a source whose description is missing: it has a history, and nobody is about to make or to forget it.
fn is_nameless(place: &Path) -> bool {
    let is_so = || place.join(history::NAME).exists() && !place.join(ABOUT).exists();
    is_so() && !FolderLock::is_held(place) && is_so()
}

/// The description in a source's folder; `None` if it is not one.
///
/// # Errors
/// If it cannot be read.
#[doc(hidden)]
pub fn about_in(folder: &dyn Folder) -> Result<Option<SourceMetadata>, SourceError> {
    Ok(read_known(folder)?.map(|known| known.about))
}

fn read_known(folder: &dyn Folder) -> Result<Option<Known>, SourceError> {
    let place = folder.path();
    let Some(said) = read_json::<serde_json::Value>(folder, ABOUT)? else { return Ok(None) };
    match said.get("version").and_then(serde_json::Value::as_u64) {
        Some(version) if version != u64::from(SourceMetadata::VERSION) => Err(SourceError::Refused(format!(
            "the state in {} has version {version}, and this dsync knows version {}: use the dsync that wrote it, or a newer one",
            place.display(),
            SourceMetadata::VERSION
        ))),
        _ => serde_json::from_value(said)
            .map(Some)
            .map_err(|e| SourceError::Damaged { path: place.join(ABOUT), why: e.to_string() }),
    }
}

/// The error for an unknown disk, which may belong to an unreadable folder.
fn not_damaged<T>(
    damaged: Vec<(PathBuf, SourceError)>,
    identity: &Identity,
) -> Result<Option<T>, SourceError> {
    let is_its = |place: &Path| {
        let stamp = Dir::existing(place).ok().and_then(|folder| ImageStamp::read(&folder).ok().flatten());
        stamp.is_some_and(|s| s.identity.path == identity.path || s.identity.same_object(identity))
    };
    match damaged.into_iter().find(|(place, _)| is_its(place)) {
        Some((_, error)) => Err(error),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::source::{Source, SourceOptions};

    fn scene() -> (tempfile::TempDir, StateDir) {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::find(Some(&temp.path().join("state")));
        (temp, state)
    }

    fn image(temp: &tempfile::TempDir, name: &str) -> PathBuf {
        let path = temp.path().join(name);
        std::fs::File::create_new(&path).unwrap().set_len(1 << 20).unwrap();
        path
    }

    fn followed(state: &StateDir, path: &Path) -> Uuid {
        let source = Source::open(state, path, &SourceOptions::default()).unwrap();
        let uuid = source.about().uuid;
        source.close().unwrap();
        uuid
    }

    fn uuid(state: &StateDir, what: &Path) -> Option<(Uuid, PathBuf)> {
        state.source(what.to_str().unwrap()).unwrap().map(|(_, about)| (about.uuid, about.path))
    }

    #[test]
    fn what_is_moved_is_found_where_it_is_now() {
        let (temp, state) = scene();
        let (vm, web) = (image(&temp, "vm.raw"), temp.path().join("web.raw"));
        let first = followed(&state, &vm);
        std::fs::rename(&vm, &web).unwrap();
        assert_eq!(uuid(&state, &web), Some((first, web.clone())));
        // Something else where it was is something else, once the source has been seen in its new place.
        assert_eq!(followed(&state, &web), first);
        image(&temp, "vm.raw");
        assert_eq!(uuid(&state, &vm), None);
        // A second name is the same disk; its first name stays.
        let link = temp.path().join("link.raw");
        std::fs::hard_link(&web, &link).unwrap();
        assert_eq!(uuid(&state, &link), Some((first, web.clone())));
        // Two that change places keep what they are.
        let second = followed(&state, &vm);
        let aside = temp.path().join("aside");
        for (from, to) in [(&vm, &aside), (&web, &vm), (&aside, &web)] {
            std::fs::rename(from, to).unwrap();
        }
        assert_eq!(uuid(&state, &vm), Some((first, vm.clone())));
        assert_eq!(uuid(&state, &web), Some((second, web.clone())));
        assert_eq!((followed(&state, &vm), followed(&state, &web)), (first, second));
    }

    #[test]
    fn an_inode_that_is_given_anew_is_not_what_it_was() {
        let (temp, state) = scene();
        let (vm, web) = (image(&temp, "vm.raw"), image(&temp, "web.raw"));
        let (first, second) = (followed(&state, &vm), followed(&state, &web));
        // The old web.raw is gone, and a new version of vm.raw got its inode.
        let folder = Dir::open(&state.source_folder(second)).unwrap();
        let mut known = read_about(folder.path()).unwrap().unwrap();
        if known.mark.is_none() {
            return testing::beyond(
                "inodes given anew",
                "this file system does not tell when a file was made",
            );
        }
        known.about.identity = device::identity(&vm).unwrap();
        known.about.path = temp.path().join("gone.raw");
        write_json(&folder, ABOUT, &known).unwrap();
        assert_eq!(uuid(&state, &vm).map(|found| found.0), Some(first));
        let copy = image(&temp, "copy");
        std::fs::rename(copy, &vm).unwrap();
        assert_eq!(uuid(&state, &vm).map(|found| found.0), Some(first), "replaced, and the same source");
    }

    #[test]
    fn a_disk_without_a_mark_is_found_and_another_version_is_refused() {
        let (temp, state) = scene();
        let vm = image(&temp, "vm.raw");
        let first = followed(&state, &vm);
        let folder = Dir::open(&state.source_folder(first)).unwrap();
        let about = read_about(folder.path()).unwrap().unwrap().about;
        write_json(&folder, ABOUT, &about).unwrap();
        assert_eq!(uuid(&state, &vm), Some((first, vm.clone())));
        let web = temp.path().join("web.raw");
        std::fs::rename(&vm, &web).unwrap();
        assert_eq!(uuid(&state, &web), Some((first, web)));
        write_json(&folder, ABOUT, &serde_json::json!({ "version": 2, "uuid": "of another form" })).unwrap();
        let error = state.survey().unwrap().damaged.pop().unwrap().1;
        assert!(error.to_string().contains("version 2"), "{error}");
    }

    #[test]
    fn a_damaged_folder_hinders_nobody_else() {
        let (temp, state) = scene();
        let (vm, web) = (image(&temp, "vm.raw"), image(&temp, "web.raw"));
        let (first, second) = (followed(&state, &vm), followed(&state, &web));
        std::fs::write(state.source_folder(first).join(ABOUT), b"{ half a").unwrap();
        assert_eq!(uuid(&state, &web).map(|found| found.0), Some(second));
        assert_eq!(uuid(&state, &image(&temp, "third.raw")), None);
        let survey = state.survey().unwrap();
        assert_eq!((survey.sources.len(), survey.damaged.len()), (1, 1));
        // What it is about is no new source meanwhile.
        let error = state.source(vm.to_str().unwrap()).unwrap_err();
        assert!(matches!(&error, SourceError::Damaged { path, .. } if path.ends_with(ABOUT)), "{error}");
    }

    #[test]
    fn those_who_open_a_disk_at_once_agree_on_what_it_is() {
        let (temp, state) = scene();
        let vm = image(&temp, "vm.raw");
        for _ in 0..10 {
            let start = Barrier::new(4);
            let open = || {
                start.wait();
                Source::open(&state, &vm, &SourceOptions { read_only: true, ..SourceOptions::default() }).ok()
            };
            // Held meanwhile: one of which no epoch came goes again when it is let go.
            let opened: Vec<Source> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
                all.into_iter().filter_map(|one| one.join().unwrap()).collect()
            });
            assert!(!opened.is_empty());
            let sources = state.survey().unwrap().sources;
            assert_eq!(sources.len(), 1, "one disk has {} identities", sources.len());
            drop(opened);
            std::fs::remove_dir_all(state.path()).unwrap();
        }
    }

    /// Nor is its folder made again by who looks.
    #[test]
    fn a_source_that_is_forgotten_while_it_is_looked_at_is_none() {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::find(Some(temp.path()));
        let place = state.source_folder(Uuid::new_v4());
        std::fs::create_dir(place.parent().unwrap()).unwrap();
        std::thread::scope(|scope| {
            let comes_and_goes = || {
                (0..3000)
                    .try_for_each(|_| std::fs::create_dir(&place).and_then(|()| std::fs::remove_dir(&place)))
            };
            let others = scope.spawn(comes_and_goes);
            while !others.is_finished() {
                let survey = state.survey().unwrap();
                assert!(survey.damaged.is_empty(), "{:?}", survey.damaged);
            }
            others.join().unwrap().unwrap();
        });
    }
}
