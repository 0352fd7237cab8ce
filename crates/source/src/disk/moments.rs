//! A source of which somebody else knows what was written to it: a storage array, a file system, a script. Each moment of it that is read has
//! a name, which is kept with its epoch, and a list of changes is taken only if it counts from the moment of the last epoch. That the list is
//! complete is the word of who made it: only a comparison can tell.
//!
//! The names, at most two, stand in the source's folder with the epoch of each. The new one is noted before its epoch is in the history, and
//! the old one forgotten afterwards; so whatever a crash leaves, the one of the history's last epoch is known.
//!
//! - **Elsewhere**: a moment may be read from another place than the source's path, as a snapshot whose device is another one each time. The
//!   source itself may be in use then, or be on another machine. What its record and its stamp say is of no use, as they are about the disk at the
//!   path; and after such an epoch they do not hold for that one.
//! - **Not to its end**: what was read at the source's path while others wrote there is not one moment, and a sync that has noticed that, or was
//!   killed, may have left it in a replica's journal. A list that counts from such a moment is not believed, as the disk may have been set back to it meanwhile.
//! - **Again**: a list that was taken already is taken once more, and nothing is new. It is known by the name of its moment and by its ranges: of
//!   two moments with one name and lists of the same ranges, the second counts as the first. What was read at another place is refused, and so is
//!   what was written to since, if no list leads to it: the name would go over to other content.
//!   A bitmap of QEMU is refused then: it is read anew, and its ranges are so coarse that other writes leave them the same.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use delta::Epoch;
use device::{Boot, DeviceErrorKind, Dir, Disk, DiskKind, Folder, Identity, WriteCounts, WriteWatch};
use extents::Extents;
use qcow2::ImageHeader;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::disk::backing::Backing;
use crate::disk::clones;
use crate::disk::recorded::Recorded;
use crate::record::history::History;
use crate::record::json::{read_json, write_json};
use crate::record::stamp::StampVerdict;
use crate::record::state::{SourceMetadata, StateDir};
use crate::{Gap, SourceError};

const NAME: &str = "moments";
/// Why a list is not believed that counts from a moment which was not read to its end.
const UNPROVEN: &str = "the moment before was read where others could write, and not to its end";

/// What is said of a moment of a source that is to be read.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// Where it is read. `None`: at the source's path.
    pub place: Option<PathBuf>,
    /// Its name.
    pub name: Option<String>,
    /// What was written up to it.
    pub changes: ToldChanges,
    /// The group of which this is the moment of one disk. A list that does not fit is no error then: that disk is compared.
    pub group: Option<String>,
    /// Says why the moment is shown no more. `None`: nobody ends it while it is read.
    pub still: Option<Still>,
}

/// Asks who shows a moment whether what was read so far was that moment. Its error says why not.
#[derive(Clone)]
pub struct Still(pub Arc<dyn Fn() -> io::Result<()> + Send + Sync>);

impl fmt::Debug for Still {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Still")
    }
}

/// What is said of the writes to a source since its last epoch.
#[derive(Debug, Clone, Default)]
pub enum ToldChanges {
    /// Nothing is.
    #[default]
    Unknown,
    /// Nobody knows, for this reason.
    Lost(String),
    /// There were none: it is the moment of that epoch.
    Nothing,
    /// They are in a list.
    List(ChangeList),
    /// A tracker in the kernel has recorded them.
    Recorded(Recorded),
    /// They are in a bitmap of QEMU, which the export of the moment offers as a context of this name.
    Bitmap {
        /// The name of the first moment.
        since: String,
        /// The name that NBD knows it by: `qemu:dirty-bitmap:NAME`.
        context: String,
    },
}

/// What was written to a source between two moments.
#[derive(Debug, Clone)]
pub struct ChangeList {
    /// The name of the first moment.
    pub since: String,
    /// Bytes that were written.
    pub ranges: Extents,
    /// Bytes of the disk at the second moment, if the list says that.
    pub size: Option<u64>,
    /// It says nothing of what a change of the disk's size did, as a bitmap of QEMU: `block_resize` marks nothing.
    pub one_size: bool,
}

/// The moment of an epoch.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Kept {
    epoch: Epoch,
    name: Option<String>,
    /// It was not read at the source's path.
    elsewhere: bool,
    /// The file in which it was read then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<PlaceFile>,
    /// The list that led to it.
    list: Option<Taken>,
    /// Replicas, by their states, to which it is sent, and where it has not arrived. It is read at the source's path, where others may write: what they
    /// have of it may be of later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sent_to: Vec<Uuid>,
    /// Others wrote where it was read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_spoiled: bool,
}

impl Kept {
    /// True if a replica may have a part of it that is not of it.
    fn is_doubted(&self) -> bool {
        self.is_spoiled || !self.sent_to.is_empty()
    }
}

/// A file in which a moment was read, wherever its file system was mounted. A device is another one each time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PlaceFile {
    ino: u64,
    mtime_ns: i64,
}

impl PlaceFile {
    /// The file at a place, if it is one.
    fn at(place: &Path) -> Option<PlaceFile> {
        let identity = device::identity(place).ok().filter(|identity| !identity.is_block())?;
        Some(PlaceFile { ino: identity.ino, mtime_ns: identity.mtime_ns })
    }
}

/// A list that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Taken {
    since: String,
    /// Of its ranges.
    checksum: u64,
}

impl Taken {
    fn of(list: &ChangeList) -> Taken {
        let mut bytes = Vec::new();
        list.ranges.encode(&mut bytes);
        Taken { since: list.since.clone(), checksum: twox_hash::XxHash3_64::oneshot(&bytes) }
    }
}

/// The moment of an epoch, if its name or its place was told.
fn kept(folder: &dyn Folder, epoch: Option<Epoch>) -> Result<Option<Kept>, SourceError> {
    let list = read_json::<Vec<Kept>>(folder, NAME)?.unwrap_or_default();
    Ok(list.into_iter().find(|kept| Some(kept.epoch) == epoch))
}

/// Notes that what is read of an epoch is sent to the replica in this state, where it may be of later; or that it was that epoch, and has arrived
/// there. Durable on return.
///
/// # Errors
/// If that cannot be written.
pub(crate) fn note_sent(
    folder: &dyn Folder,
    epoch: Epoch,
    replica: Uuid,
    has_arrived: bool,
) -> Result<(), SourceError> {
    change(folder, epoch, |kept| {
        let is_due = !has_arrived && !kept.elsewhere;
        let was_due = kept.sent_to.contains(&replica);
        kept.sent_to.retain(|known| *known != replica);
        kept.sent_to.extend(Some(replica).filter(|_| is_due));
        is_due != was_due
    })
}

/// Notes that others have written to what was read as the moment of an epoch, while it was. Durable on return.
///
/// # Errors
/// If that cannot be written.
pub(crate) fn note_spoiled(folder: &dyn Folder, epoch: Epoch) -> Result<(), SourceError> {
    change(folder, epoch, |kept| !std::mem::replace(&mut kept.is_spoiled, true))
}

/// Changes what is kept of an epoch, if anything; `change` says whether it has.
fn change(
    folder: &dyn Folder,
    epoch: Epoch,
    change: impl FnOnce(&mut Kept) -> bool,
) -> Result<(), SourceError> {
    let mut list = read_json::<Vec<Kept>>(folder, NAME)?.unwrap_or_default();
    match list.iter_mut().find(|kept| kept.epoch == epoch).map(change) {
        Some(true) => write_json(folder, NAME, &list),
        _ => Ok(()),
    }
}

/// What others have said of the moment of a source's last epoch.
#[derive(Debug, Clone)]
pub struct LastMoment {
    /// Its name.
    pub name: Option<String>,
    /// It was not read at the source's path.
    pub elsewhere: bool,
}

/// What others have said of the moment of an epoch; `None` if it was nothing.
///
/// # Errors
/// If the state in the folder cannot be read.
pub fn moment_of(folder: &dyn Folder, epoch: Option<Epoch>) -> Result<Option<LastMoment>, SourceError> {
    Ok(kept(folder, epoch)?.map(|Kept { name, elsewhere, .. }| LastMoment { name, elsewhere }))
}

/// What others have said of the moment of the last epoch of the source at a path; `None` if it is no source, or nothing was said.
///
/// # Errors
/// If its state cannot be read.
pub fn last_moment(state: &StateDir, path: &Path) -> Result<Option<LastMoment>, SourceError> {
    let Some((place, _)) = state.source(&path.to_string_lossy())? else { return Ok(None) };
    let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
    moment_of(&folder, History::read(&folder)?.last())
}

/// Why the disk at the source's path is not what its last epoch ends with: that was read elsewhere.
pub(crate) fn elsewhere(folder: &dyn Folder, last: Option<Epoch>) -> Result<Option<Gap>, SourceError> {
    let kept = kept(folder, last)?.filter(|kept| kept.elsewhere);
    Ok(kept.map(|kept| match kept.name {
        Some(name) => format!("its last epoch is the moment \"{name}\", which was read elsewhere").into(),
        None => "its last epoch was read elsewhere, from a moment without a name".into(),
    }))
}

/// The identity of the source at a path of which a moment of this size is read elsewhere: its own, or that of a disk that is not on this machine.
pub(crate) fn identity(path: &Path, size: u64) -> Result<Identity, SourceError> {
    match device::identity(path) {
        Ok(own) => Ok(Identity { size, ..own }),
        Err(error) if error.kind() != DeviceErrorKind::Missing => Err(error.into()),
        Err(_) if !path.is_absolute() => Err(SourceError::Refused(format!(
            "there is no {}: if the disk is on another machine, name it by an absolute path, which need not exist here",
            path.display()
        ))),
        Err(_) => {
            let (kind, path) = (DiskKind::File, path.to_path_buf());
            Ok(Identity {
                kind,
                path,
                dev: 0,
                ino: 0,
                diskseq: None,
                size,
                mtime_ns: 0,
                ctime_ns: 0,
                born_ns: None,
                part: None,
            })
        }
    }
}

/// Why nobody else has to say what was written to a source.
pub(crate) fn refuse_recorded(path: &Path, told: &Told) -> SourceError {
    if let Some(group) = &told.group {
        return SourceError::Refused(format!(
            "dsync itself records what is written to {0} (it is served, or tracked with \"dsync track add\"), and the group {group} is followed \
             by another program: end that with \"dsync track remove {0}\", or leave the disk out",
            path.display()
        ));
    }
    SourceError::Refused(format!(
        "dsync itself records what is written to {} (it is served, or tracked with \"dsync track add\"): omit --changes, --moment and --as",
        path.display()
    ))
}

/// Why nobody can say what was written to a disk of a group alone.
pub(crate) fn refuse_member(path: &Path, group: &str) -> SourceError {
    SourceError::Refused(format!(
        "{} is in the group {group}, whose disks are of one moment: omit --changes, --moment and --as, or take it out of the group with \"dsync \
         forget --group {group} {0}\"",
        path.display()
    ))
}

/// A moment of a source, and what is said of it.
pub(crate) struct NewMoment {
    /// The state of its source.
    state: Arc<dyn Folder>,
    path: PathBuf,
    name: Option<String>,
    elsewhere: bool,
    file: Option<PlaceFile>,
    list: Option<Taken>,
    /// Where what was written is recorded, until it is in an epoch.
    recorded: Option<Recorded>,
    /// What was written since the last epoch; or why that is not known.
    pub since: Result<Vec<Range<u64>>, Gap>,
    /// It is the moment of the last epoch.
    is_last: bool,
    /// What a replica has of the last epoch may be of later.
    doubted: bool,
    /// It is the moment of the last epoch, which was not read to its end.
    is_unended: bool,
    /// The last epoch, if it is said to be the moment of that, of which no list tells.
    is_of: Option<Epoch>,
    /// The epoch that it is.
    epoch: Option<Epoch>,
}

impl NewMoment {
    /// Takes what is said of a source with this history, of which a disk of this size is the moment. Its state is in `state`, which the caller has
    /// locked.
    ///
    /// # Errors
    /// `Refused` if the list does not fit the last epoch or the disk, and if the source has a record of its own.
    pub(crate) fn take(
        state: Arc<dyn Folder>,
        about: &SourceMetadata,
        history: &History,
        told: &Told,
        size: u64,
    ) -> Result<NewMoment, SourceError> {
        if clones::are_kept(&*state)? {
            return Err(refuse_recorded(&about.path, told));
        }
        let last = history.last();
        let kept = kept(&*state, last)?;
        let was = last.and_then(|last| history.size_at(&last)).unwrap_or(0);
        let is_last = told.is_of(kept.as_ref());
        let file = told.place.as_deref().and_then(PlaceFile::at);
        let same = kept.as_ref().filter(|_| is_last);
        if same.is_some_and(|kept| kept.elsewhere != told.place.is_some()) {
            return Err(told.at_another_place(about));
        }
        let before = same.and_then(|kept| kept.file.as_ref());
        if before.zip(file.as_ref()).is_some_and(|(before, now)| before != now) {
            return Err(told.another(about));
        }
        let mut doubted = is_last && kept.as_ref().is_some_and(|kept| kept.is_spoiled);
        let is_unended = is_last && kept.as_ref().is_some_and(|kept| !kept.sent_to.is_empty());
        let since = match &told.changes {
            ToldChanges::Unknown => Err("no list says what was written since".into()),
            _ if is_last && was == size => Ok(Vec::new()),
            _ if is_last => return Err(told.other_size(about, was, size)),
            ToldChanges::Nothing => return Err(told.not_at(about, kept.as_ref())),
            ToldChanges::Bitmap { .. } => Err("its bitmap was not read".into()),
            ToldChanges::Lost(why) => Err(why.clone().into()),
            ToldChanges::Recorded(recorded) => recorded.since(history, (was, size))?,
            ToldChanges::List(list) => match list.gap(kept.as_ref(), (was, size)) {
                Some(why) if told.group.is_some() => Err(why),
                _ => {
                    list.check(told, about, kept.as_ref(), (was, size))?;
                    doubted = kept.as_ref().is_some_and(Kept::is_doubted);
                    // What the disk has more than it had is new.
                    Ok(list.ranges.iter().chain((was < size).then_some(was..size)).collect())
                }
            },
        };
        let since = if doubted { Err(UNPROVEN.into()) } else { since };
        let list = match (&told.changes, kept) {
            (ToldChanges::List(list), _) => Some(Taken::of(list)),
            (ToldChanges::Nothing, kept) => kept.and_then(|kept| kept.list),
            _ => None,
        };
        let (name, elsewhere) = (told.name.clone(), told.place.is_some());
        let (recorded, path) = (told.recorded().cloned(), about.path.clone());
        let is_of = last.filter(|_| matches!(told.changes, ToldChanges::Nothing));
        let epoch = None;
        Ok(NewMoment {
            state,
            path,
            name,
            elsewhere,
            file,
            list,
            recorded,
            since,
            is_last,
            doubted,
            is_unended,
            is_of,
            epoch,
        })
    }

    /// What is known of the disk, by what its record says.
    ///
    /// # Errors
    /// `Refused` if it is said to be the moment of the last epoch, and was written to since.
    pub(crate) fn verdict(&self, recorded: StampVerdict) -> Result<StampVerdict, SourceError> {
        Ok(match (&self.since, recorded) {
            // Whether that is wanted only its user can say.
            (_, StampVerdict::Lost(other @ Gap::OtherContent(_))) if !self.elsewhere => {
                StampVerdict::Lost(other)
            }
            (Ok(_), StampVerdict::Lost(why)) if self.is_last && !self.elsewhere => {
                if self.is_of.is_some() {
                    return Err(self.changed(&why.to_string()));
                }
                // A list is taken again as long as its epoch has not arrived.
                StampVerdict::Lost(why)
            }
            (Err(why), _) if self.doubted => StampVerdict::Lost(why.clone()),
            // After a power cut nothing tells whether others wrote to a device while it was read.
            (Ok(_), StampVerdict::Unproven { why, power_lost: true }) if self.is_unended => {
                StampVerdict::Lost(why)
            }
            // What tells of each write also tells which content it is.
            (Ok(_), _) => StampVerdict::Trusted { power_lost: false },
            (Err(_), StampVerdict::Lost(other @ Gap::OtherContent(_))) => StampVerdict::Lost(other),
            (Err(_), recorded) if !self.elsewhere => recorded,
            (Err(_), StampVerdict::New) => StampVerdict::New,
            (Err(why), _) => StampVerdict::Lost(why.clone()),
        })
    }

    fn changed(&self, why: &str) -> SourceError {
        SourceError::Refused(format!(
            "{} is not the moment \"{}\" any more ({why}): give this one a name of its own, with --as",
            self.path.display(),
            self.name.as_deref().unwrap_or_default()
        ))
    }

    /// Keeps the moment for an epoch which is about to be written to the history, or is the last one there. Durable on return.
    ///
    /// # Errors
    /// If that cannot be written; `Refused` if it is the moment of another epoch.
    pub(crate) fn keep(&mut self, epoch: Epoch) -> Result<(), SourceError> {
        if self.is_of.is_some_and(|of| of != epoch) {
            return Err(self.changed("it was written to since"));
        }
        let mut list = read_json::<Vec<Kept>>(&*self.state, NAME)?.unwrap_or_default();
        let before = list.iter().position(|kept| kept.epoch == epoch).map(|at| list.remove(at));
        let (sent_to, is_spoiled) = before.map(|kept| (kept.sent_to, kept.is_spoiled)).unwrap_or_default();
        let (name, elsewhere) = (self.name.clone(), self.elsewhere);
        let (file, taken) = (self.file.clone(), self.list.clone());
        list.push(Kept { epoch, name, elsewhere, file, list: taken, sent_to, is_spoiled });
        self.epoch = Some(epoch);
        write_json(&*self.state, NAME, &list)
    }

    /// Forgets those of other epochs. What fails is repeated by the next one.
    pub(crate) fn drop_others(&self) {
        let Ok(Some(mut list)) = read_json::<Vec<Kept>>(&*self.state, NAME) else { return };
        list.retain(|kept| Some(kept.epoch) == self.epoch);
        let _ = write_json(&*self.state, NAME, &list);
        // The epoch is in the history.
        self.recorded.iter().zip(self.epoch).for_each(|(recorded, epoch)| recorded.release(epoch));
    }
}

impl Told {
    /// What a tracker has recorded, if that tells what was written.
    pub(crate) fn recorded(&self) -> Option<&Recorded> {
        match &self.changes {
            ToldChanges::Recorded(recorded) => Some(recorded),
            _ => None,
        }
    }

    /// The context that has what was written.
    pub(crate) fn bitmap(&self) -> Option<&str> {
        match &self.changes {
            ToldChanges::Bitmap { context, .. } => Some(context),
            _ => None,
        }
    }

    /// What was told, with the list of changes that was read from its bitmap; `size` is that of what is read.
    ///
    /// # Errors
    /// If there is no such bitmap, or it is of another disk.
    pub(crate) fn listed(
        &self,
        backing: &dyn Backing,
        about: &SourceMetadata,
        size: u64,
    ) -> Result<Told, SourceError> {
        let ToldChanges::Bitmap { since, context } = &self.changes else { return Ok(self.clone()) };
        let ranges = match backing.bitmap(context) {
            Err(error) if self.group.is_some() && error.is_refusal() => {
                let changes = ToldChanges::Lost(format!("its moment does not offer {context}"));
                return Ok(Told { changes, ..self.clone() });
            }
            read => read?,
        };
        // The export of a machine's disk is the right one, and what the guest has written to a raw one may look like anything.
        let image = if self.group.is_none() { qcow2_size(&about.path)? } else { None };
        if let Some(image) = image.filter(|image| *image != size) {
            return Err(SourceError::Refused(format!(
                "the disk in {} has {}, and the one that is read in its place has {}: give the export of that disk",
                about.path.display(),
                device::exact_size(image),
                device::exact_size(size)
            )));
        }
        let list = ChangeList { since: since.clone(), ranges, size: Some(size), one_size: true };
        Ok(Told { changes: ToldChanges::List(list), ..self.clone() })
    }

    /// True if the moment is said to be that of the last epoch: a list by having led to it.
    fn is_of(&self, kept: Option<&Kept>) -> bool {
        let Some(kept) = kept.filter(|kept| kept.name.is_some() && kept.name == self.name) else {
            return false;
        };
        match &self.changes {
            ToldChanges::Nothing => true,
            // A bitmap is coarse, and is read anew: the same ranges may have been written to again.
            ToldChanges::List(list) => !list.one_size && kept.list == Some(Taken::of(list)),
            _ => false,
        }
    }

    fn other_size(&self, about: &SourceMetadata, was: u64, is: u64) -> SourceError {
        SourceError::Refused(format!(
            "the moment \"{}\" of {} had {} when it was recorded, and has {} now, so it is another one: give each moment a name of its own",
            self.name.as_deref().unwrap_or_default(),
            about.path.display(),
            device::exact_size(was),
            device::exact_size(is)
        ))
    }

    fn another(&self, about: &SourceMetadata) -> SourceError {
        SourceError::Refused(format!(
            "{} was written to or replaced since the moment \"{}\" of {} was read there, so it is another one: give each moment a name of its own",
            self.place.as_deref().unwrap_or(Path::new("")).display(),
            self.name.as_deref().unwrap_or_default(),
            about.path.display()
        ))
    }

    fn at_another_place(&self, about: &SourceMetadata) -> SourceError {
        let (name, path) = (self.name.as_deref().unwrap_or_default(), about.path.display());
        let Some(place) = &self.place else {
            return SourceError::Refused(format!(
                "the moment \"{name}\" of {path} was read elsewhere: give the place of it, with --moment, or this one a name of its own, with --as"
            ));
        };
        SourceError::Refused(format!(
            "the moment \"{name}\" of {path} was read there, and not in {}: omit --moment, or give this one a name of its own, with --as",
            place.display()
        ))
    }

    fn not_at(&self, about: &SourceMetadata, kept: Option<&Kept>) -> SourceError {
        SourceError::Refused(format!(
            "{} at its last epoch is {}, not the moment \"{}\": give the one that was synced last",
            about.path.display(),
            said(kept),
            self.name.as_deref().unwrap_or_default()
        ))
    }
}

/// Bytes of the disk in a qcow2 file; `None` if it is another one, or elsewhere.
fn qcow2_size(path: &Path) -> Result<Option<u64>, SourceError> {
    if device::is_export(path) || !path.is_file() {
        return Ok(None);
    }
    #[allow(clippy::disallowed_methods, reason = "the image, which its user names")]
    let head = File::open(path).and_then(|file| ImageHeader::of(&file));
    Ok(head.map_err(SourceError::state("read", path))?.map(|head| head.size))
}

/// What the last epoch is, for people.
fn said(kept: Option<&Kept>) -> String {
    match kept.and_then(|kept| kept.name.as_ref()) {
        Some(name) => format!("the moment \"{name}\""),
        None => "a moment without a name".into(),
    }
}

impl ChangeList {
    /// Why it does not tell what was written since the last epoch.
    fn gap(&self, kept: Option<&Kept>, (was, size): (u64, u64)) -> Option<Gap> {
        match kept.and_then(|kept| kept.name.as_ref()) == Some(&self.since) {
            false => Some(
                format!("the list counts from \"{}\", and its last epoch is {}", self.since, said(kept))
                    .into(),
            ),
            true => (self.one_size && was != size).then_some(Gap::Resized),
        }
    }

    /// Checks that it counts from the last epoch, and is within the disk. `was` is the size at that epoch, `size` the present one.
    fn check(
        &self,
        told: &Told,
        about: &SourceMetadata,
        kept: Option<&Kept>,
        (was, size): (u64, u64),
    ) -> Result<(), SourceError> {
        let refuse = |why: String| Err(SourceError::Refused(why));
        let (path, since) = (about.path.display(), &self.since);
        let name = told.name.as_deref().unwrap_or_default();
        let last = kept.and_then(|kept| kept.name.as_deref());
        if last == Some(name) && self.one_size {
            return refuse(format!(
                "{path} is at the moment \"{name}\" already, and a bitmap does not tell whether it is the same one: give each moment a name of its own; \
                 for another replica of that moment, pass --since \"{name}\" without --changes"
            ));
        }
        if last == Some(name) {
            return refuse(format!(
                "{path} is at the moment \"{name}\" already, and another list led to it: give each moment a name of its own"
            ));
        }
        if last != Some(since.as_str()) {
            return refuse(format!(
                "the list has what changed since \"{since}\", but {path} at its last epoch is {}: give a list since that moment, or omit \
                 --changes and --since, and the sync compares all of it",
                said(kept)
            ));
        }
        if let Some(listed) = self.size.filter(|listed| *listed != size) {
            return refuse(format!(
                "the list is of a disk of {}, and the moment \"{name}\" of {path} has {}: give the list that belongs to it",
                device::exact_size(listed),
                device::exact_size(size)
            ));
        }
        if self.one_size && was != size {
            return refuse(format!(
                "{path} had {} at the moment \"{since}\", and has {} at the moment \"{name}\"; a bitmap does not show what a change of the size did: omit \
                 --changes and --since, and the sync compares all of it",
                device::exact_size(was),
                device::exact_size(size)
            ));
        }
        if self.ranges.end() > size {
            return refuse(format!(
                "the list names bytes up to {}, and the moment \"{name}\" of {path} has {size}: give the list that belongs to it",
                self.ranges.end()
            ));
        }
        Ok(())
    }
}

/// A moment that is read elsewhere, in place of the source.
pub(crate) struct MomentBacking {
    shown: Box<dyn Backing>,
    place: PathBuf,
    /// The source's path.
    path: PathBuf,
    still: Option<Still>,
}

impl MomentBacking {
    /// What is shown stands for the source at a path.
    pub(crate) fn new(
        path: PathBuf,
        shown: Box<dyn Backing>,
        told: Option<&Told>,
    ) -> Result<MomentBacking, SourceError> {
        let place = shown.identity()?.path;
        Ok(MomentBacking { shown, place, path, still: told.and_then(|told| told.still.clone()) })
    }
}

impl Backing for MomentBacking {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(Identity { path: self.path.clone(), ..self.shown.identity()? })
    }
    fn boot(&self) -> Boot {
        self.shown.boot()
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        self.shown.reader()
    }
    fn cached_reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        self.shown.cached_reader()
    }
    fn counted(&self) -> Option<WriteCounts> {
        self.shown.counted()
    }
    fn watch(&self) -> Result<Option<WriteWatch>, SourceError> {
        self.shown.watch()
    }
    fn bitmap(&self, context: &str) -> Result<Extents, SourceError> {
        self.shown.bitmap(context)
    }
    fn elsewhere(&self) -> Option<&Path> {
        Some(&self.place)
    }
    fn still(&self) -> io::Result<()> {
        self.still.as_ref().map_or(Ok(()), |Still(asked)| asked())
    }
}
