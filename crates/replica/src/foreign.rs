//! Foreign-write detection. Between its own writes a replica's file rests: whatever changes it then was written by another
//! program, and must not be sealed by the next commit.
//!
//! While a replica is open, the stamp with which its file was left is kept in memory. Where the lineage's stamp is of before
//! the last own write (a merge, the batches of a mirror, a step in place), a note in the folder tells more to whoever opens
//! the replica after a kill or a power cut:
//!
//! - *at rest*: the stamp that the file was left with, and the batch that was its last. Nothing but equality will do.
//! - *at work*: the time, by the clock that stamps files, every few milliseconds. A file that bears a later time was written to
//!   by somebody else. After a kill the note is that of the last moment. After a power cut it is the last durable one, and what
//!   is written durably before own writes begin, the journal, tells as well; nothing of this boot is own.
//!
//! Where neither tells, the file is doubted.
//!
//! A device has no times, but within one boot the kernel's count of sectors written tells the same: *at rest*, nothing but
//! equality will do; *at work*, the note has the count from which own writes began, and how many sectors have been handed to
//! the device since: if more were written, somebody else wrote. Of what came before a reboot nothing tells.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Relaxed, SeqCst},
};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device::{Boot, Clock, Folder, Life, Mapping, StateFile};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::destination::Name;
use crate::error::{ReplicaError, Result, disk_error, io_error};
use crate::holes::is_full;
use crate::journal::{Contents, WHOLE};
use crate::lineage::{self, Lineage, Stamp, StepKind};
use crate::replica::{Replica, SAFE};

/// The note's file.
pub(crate) const NAME: &str = "rest";
/// What it says is written in one piece, and of one length.
const LEN: usize = 512;
/// Its whole length: the time of the last own write has a page's second part for itself.
const WHOLE_LEN: u64 = 4096;
/// The time's place, in words. For a device the number of sectors that were handed to it stands there.
const TIME: usize = LEN / 8;
/// How often the kernel may count a sector that was made zero: it tries up to three ways, one after the other.
const ZEROED: u64 = 3;
/// How long after the last note of a dying process its writes may still have stamped the file, in nanoseconds: many are
/// submitted at once, and on a busy machine the kernel is slow to end them. Who else begins to write in that time is noticed if
/// that goes on a little longer.
pub(crate) const DYING: u64 = 1_000_000_000;
/// How often the note is made durable meanwhile: well within [`Boot::LATE`].
const KEPT_EVERY: Duration = Duration::from_secs(2);
/// How often the time is noted while own writes are on their way.
const EVERY: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Note {
    /// The boot it was written in.
    life: String,
    /// `None` while the file is written to.
    stamp: Option<Stamp>,
    /// Of a device that is written to, what it was before; of a copy that is about to be put in place, what it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    before: Option<Stamp>,
    /// Of a file that is written to, when that began, and the time that it bore until then, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    began: Option<(u64, i64)>,
    /// The last delta that was brought to the file.
    #[serde(default)]
    stream: Option<Uuid>,
    /// The change time that the lineage had for the file then.
    #[serde(default)]
    since: Option<i64>,
}

impl Stamp {
    /// What of it costs next to nothing to be looked at: all but the content of a device.
    pub(crate) fn glance(self) -> Stamp {
        Stamp { print: String::new(), medium: self.medium.map(|medium| medium.glance()), ..self }
    }

    /// In what way a device is not as its own writes can have left it, up to `sectors` of them; both are glances.
    fn differs_beyond(&self, now: &Stamp, sectors: u64) -> Option<&'static str> {
        let medium =
            now.medium.as_ref().zip(self.medium.as_ref()).map(|(now, was)| now.without(was, sectors));
        self.differs(&Stamp { medium, ..now.clone() })
    }

    /// True if it is certain that nothing was written between the two.
    pub(crate) fn is_proof_of(&self, now: &Stamp) -> bool {
        let counted = match (&self.medium, &now.medium) {
            (Some(before), Some(now)) => before.is_proof_of(now),
            (None, None) => self.inode != 0,
            _ => false,
        };
        counted && self.differs(now).is_none()
    }

    /// In what way a destination is not as it was left; `None` if nothing tells.
    pub(crate) fn differs(&self, now: &Stamp) -> Option<&'static str> {
        let medium = self.medium.as_ref().zip(now.medium.as_ref()).and_then(|(was, now)| was.differs(now));
        match () {
            () if self.inode != now.inode => Some("another file is in its place"),
            () if self.size != now.size => Some("its size has changed"),
            () if self.changed != now.changed => Some(WRITTEN),
            () if medium.is_some() => medium,
            () if !device::agree(&self.print, &now.print) => Some("it is another disk, or was written to"),
            () => None,
        }
    }
}

pub(crate) const WRITTEN: &str = "it was written to";
const SET_BACK: &str = "it was set back to an earlier state";
const CLOCK: &str =
    "the clock was set back while it was written to, so its times do not tell who wrote to it";

/// What there is to tell own writes from others', at a file that was written to after its lineage was stored.
struct Evidence<'a> {
    /// As the lineage has it.
    before: &'a Stamp,
    now: &'a Stamp,
    /// The note, and the time in it, in nanoseconds since 1970, or the number of sectors.
    note: Option<(Note, u64)>,
    /// When something was last made durable that comes before own writes, in nanoseconds since 1970.
    durable: u64,
    /// The last delta that may have been brought to the file.
    stream: Option<Uuid>,
}

impl Evidence<'_> {
    /// A file bears a time from before own writes began, and not the one that it bore then.
    fn is_before_own(&self, changed: u64) -> bool {
        let began = self.note.as_ref().and_then(|(note, _)| note.began);
        began.is_some_and(|(began, bore)| changed < began && changed != bore.max(0) as u64)
    }

    /// In what way others have changed the file, or may have.
    fn foreign(&self, boot: &Boot) -> Option<&'static str> {
        let (before, now) = (self.before, self.now);
        if before.inode != now.inode {
            return before.differs(now);
        }
        let changed = now.changed.max(0) as u64;
        let left = self.note.as_ref().and_then(|(note, _)| note.stamp.as_ref());
        let time = self.note.as_ref().map_or(0, |(_, time)| *time);
        let life = self.note.as_ref().map_or(Life::Earlier, |(note, _)| boot.life(&note.life));
        if life == Life::This {
            return match left {
                Some(left) => left.differs(now),
                // Nothing was written yet.
                None if now.changed == before.changed => None,
                None if now.changed < before.changed => Some(SET_BACK),
                None if self.is_before_own(changed) => Some(CLOCK),
                None => (changed > time.saturating_add(DYING)).then_some(WRITTEN),
            };
        }
        // The power was cut, or the system shut down after a kill. What was not durable may be of any earlier moment.
        if now.changed == before.changed || left.is_some_and(|left| left.differs(now).is_none()) {
            return None;
        }
        if now.changed < before.changed {
            return Some(SET_BACK);
        }
        let all_there = self.note.as_ref().is_some_and(|(note, _)| note.stream == self.stream);
        let last = match left.filter(|_| all_there) {
            Some(left) => left.changed.max(0) as u64,
            None => time.max(self.durable).saturating_add(Boot::LATE),
        };
        // Since when a disk is back that was detached, nothing tells.
        let of_this_boot = changed >= boot.began && life != Life::Detached;
        (changed > last || of_this_boot).then_some(WRITTEN)
    }
}

/// In what way others have changed a device since its lineage had it as `before`, or may have.
fn foreign_to_device(
    boot: &Boot,
    note: Option<(Note, u64)>,
    before: Option<&Stamp>,
    now: &Stamp,
) -> Option<&'static str> {
    let now = now.clone().glance();
    match note.filter(|(note, _)| note.life == boot.id) {
        Some((Note { stamp: Some(left), .. }, _)) => left.differs(&now),
        Some((Note { before: Some(before), .. }, sectors)) => before.differs_beyond(&now, sectors),
        // Before a note was written, nothing else was.
        _ => before?.clone().glance().differs(&now),
    }
}

/// Keeps the note of own writes as long as it lives: of a file the time.
pub(crate) struct Working {
    /// The note.
    file: Arc<dyn StateFile>,
    map: Mapping,
    /// `None` for a device.
    clock: Option<Clock>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Working {
    fn begin(file: Arc<dyn StateFile>, clock: Option<Clock>) -> io::Result<Working> {
        let (map, over) = (file.map(WHOLE_LEN)?, Arc::new(AtomicBool::new(false)));
        map[TIME].store(clock.as_ref().map_or(0, Clock::now), Relaxed);
        let Some(time) = clock.clone() else { return Ok(Working { file, map, clock, over, thread: None }) };
        let (noted, ended) = (map.clone(), over.clone());
        let thread = std::thread::Builder::new().name("at work".into()).spawn(move || {
            while !ended.load(SeqCst) {
                // Who looks at the clock and then sleeps must not put an old time in the place of a writer's newer one.
                let before = noted[TIME].load(Relaxed);
                let _ = noted[TIME].compare_exchange(before, time.now(), Relaxed, Relaxed);
                std::thread::park_timeout(EVERY);
            }
        })?;
        Ok(Working { file, map, clock, over, thread: Some(thread) })
    }
}

/// Keeps a note under way: for whoever writes. That of a file is made durable now and then.
#[derive(Default)]
pub(crate) struct Keeping(Option<Kept>);

struct Kept {
    file: Arc<dyn StateFile>,
    map: Mapping,
    clock: Option<Clock>,
    /// When it was made durable last.
    last: Instant,
}

impl Keeping {
    /// So many sectors of a disk, of 512 bytes, are about to be written, or made zero.
    pub(crate) fn hands_over(&mut self, sectors: u64, zeroes: bool) {
        let Some(kept) = self.0.as_ref().filter(|kept| kept.clock.is_none()) else { return };
        kept.map[TIME].fetch_add(if zeroes { ZEROED * sectors } else { sectors }, SeqCst);
    }

    /// A write is about to go down, or has just come back.
    pub(crate) fn note(&mut self) {
        let Some(kept) = &mut self.0 else { return };
        let Some(clock) = &kept.clock else { return };
        kept.map[TIME].store(clock.now(), Relaxed);
        if kept.last.elapsed() >= KEPT_EVERY {
            // An older note makes a file doubted that need not be, after a power cut.
            let _ = kept.file.sync();
            kept.last = Instant::now();
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// The path leads elsewhere by now.
pub(crate) fn covered(path: &Path) -> ReplicaError {
    ReplicaError::Away(format!(
        "replica {} is not where it was: another file system was mounted over its folder, or its own was unmounted",
        path.display()
    ))
}

impl Replica {
    /// Makes sure that the path still leads to the destination that is open.
    pub(crate) fn at_path(&self) -> Result<()> {
        match self.destination.is_at_path().map_err(io_error("look at the folder of", self.path()))? {
            true => Ok(()),
            false => Err(covered(self.path())),
        }
    }

    /// Keeps in mind that others have written to a device. The times of a file tell by themselves, and another disk under the
    /// device's name does not make the right one another.
    pub(crate) fn notice(&self, why: &str) {
        let marked = self.lineage.foreign || self.lineage.promoted.is_some();
        let tells = why == WRITTEN && self.destination.is_device() && self.kept;
        if tells && !marked && !self.noticed.swap(true, SeqCst) {
            // In memory the lineage may be ahead by batches that only the journal has.
            if let Ok(Some(durable)) = Lineage::load(&*self.folder) {
                // Where this can't be written down, the kernel's count tells until the next reboot.
                let _ = Lineage { foreign: true, ..durable }.store(&*self.folder);
            }
        }
    }

    pub(crate) fn touched(&self, why: &str) -> ReplicaError {
        self.notice(why);
        let found = self.destination.stamp(Name::Final).ok().flatten();
        let left = self.left.as_ref().or(self.lineage.stamp.as_ref());
        let why = match found.filter(|_| why == WRITTEN).and_then(|now| Some((now.changed, now.written?))) {
            // A write moves both times, and whoever likes sets this one back.
            Some((changed, written)) if left.and_then(|left| left.written) == Some(written) => format!(
                "its owner, mode, name or links were changed {}; whether its content was, too, its times do not tell",
                ago(changed, &self.destination.clock())
            ),
            Some((_, written)) => format!("content written {}", ago(written, &self.destination.clock())),
            None => why.into(),
        };
        ReplicaError::Changed { path: self.path().to_path_buf(), why }
    }

    fn gone(&self) -> ReplicaError {
        ReplicaError::Away(format!(
            "replica {} no longer exists: it was removed, or its file system was unmounted",
            self.path().display()
        ))
    }

    /// What the destination looks like, as far as that costs next to nothing.
    fn glance(&self) -> Result<Option<Stamp>> {
        self.destination.glance().map_err(io_error("look at", self.path()))
    }

    /// The file is left alone from now on, until the next own write.
    pub(crate) fn leave(&mut self) -> Result<()> {
        self.left = self.glance()?;
        Ok(())
    }

    /// Makes sure that nobody else has changed the file since it was left alone.
    pub(crate) fn untouched(&self) -> Result<()> {
        self.at_path()?;
        let Some(left) = &self.left else { return Ok(()) };
        let why = match self.glance()? {
            None => return Err(self.gone()),
            Some(now) => left.differs(&now),
        };
        why.map_or(Ok(()), |why| Err(self.touched(why)))
    }

    /// Makes sure that the file which was written to is still the one that stands there, and that nobody else has written to a
    /// device meanwhile. `size` is its size by now.
    pub(crate) fn still_there(&self, size: u64) -> Result<()> {
        self.at_path()?;
        match self.glance()? {
            None => Err(self.gone()),
            Some(now) => self.only_own(&now, size),
        }
    }

    /// The same of a destination that was glanced at.
    pub(crate) fn only_own(&self, now: &Stamp, size: u64) -> Result<()> {
        let Some(left) = &self.left else { return Ok(()) };
        let why = if self.destination.is_device() {
            // Own writes have moved its count, and the note says how far at most; without one, nobody can say.
            let noted = self.working.as_ref().filter(|working| working.clock.is_none());
            left.differs_beyond(now, noted.map_or(u64::MAX, |working| working.map[TIME].load(SeqCst)))
        } else {
            // Own writes have changed its time.
            Stamp { size, changed: now.changed, ..left.clone() }.differs(now)
        };
        why.map_or(Ok(()), |why| Err(self.touched(why)))
    }

    /// Nothing tells own writes from others', or has to.
    pub(crate) fn is_timeless(&self) -> bool {
        self.destination.boot().id.is_empty()
    }

    /// A time that no own write to a file will be stamped before, and the one that the file bears now.
    fn before_own_writes(&self) -> io::Result<(u64, i64)> {
        let bears = match self.writes_to() {
            Name::Final => self.left.clone(),
            Name::Temporary => self.destination.stamp(Name::Temporary)?,
        };
        let clock = self.destination.clock();
        Ok((clock.now().saturating_sub(clock.tick()), bears.map_or(0, |stamp| stamp.changed)))
    }

    fn write_note(&self, stamp: Option<Stamp>) -> io::Result<Arc<dyn StateFile>> {
        let before = match self.writes_to() {
            _ if stamp.is_some() => None,
            Name::Temporary => self.destination.stamp(Name::Temporary)?,
            Name::Final => self.left.clone().filter(|_| self.destination.is_device()),
        };
        let since = self.lineage.stamp.as_ref().map(|stamp| stamp.changed);
        let began = match stamp.is_none() && !self.destination.is_device() {
            true => Some(self.before_own_writes()?),
            false => None,
        };
        let (life, stream) = (self.destination.boot().id, self.lineage.committed);
        let note = Note { life, stamp, before, began, stream, since };
        let mut bytes = serde_json::to_vec(&note)?;
        bytes.resize(bytes.len().max(LEN), b' ');
        let file = self.folder.open(NAME, true)?;
        if file.len()? < WHOLE_LEN {
            file.reserve(WHOLE_LEN)?;
        }
        file.write_at(0, &bytes)?;
        Ok(file.into())
    }

    /// From now on the file is written to: notes the time until [`Replica::rest`]. `durable` where nothing else was made
    /// durable just now that comes before the first write.
    ///
    /// # Errors
    /// If the note can't be written: without it, a file that was written to would be doubted. Where only the room is missing,
    /// it is done without. If others have changed the destination since it was left alone: after the note nothing tells.
    pub(crate) fn work(&mut self, durable: bool) -> Result<Keeping> {
        if !self.is_timeless() && self.working.is_none() {
            let note = self.write_note(None);
            let failed = io_error("write", &self.folder.path().join(NAME));
            let clock = (!self.destination.is_device()).then(|| self.destination.clock());
            self.working = match note.and_then(|file| Working::begin(file, clock)) {
                Err(e) if is_full(&e) => None,
                begun => Some(begun.map_err(failed)?),
            };
            if let Err(foreign) = self.untouched() {
                self.working = None;
                let _ = self.write_note(self.left.clone());
                return Err(foreign);
            }
        }
        // Of a device it says nothing after a power cut.
        if let Some(working) = self.working.as_ref().filter(|working| durable && working.clock.is_some()) {
            let _ = working.file.sync().and_then(|()| self.folder.sync());
        }
        Ok(Keeping(self.working.as_ref().map(|working| Kept {
            file: working.file.clone(),
            map: working.map.clone(),
            clock: working.clock.clone(),
            last: Instant::now(),
        })))
    }

    /// Makes room for the note.
    pub(crate) fn reserve_note(&self) -> Result<()> {
        if self.is_timeless() {
            return Ok(());
        }
        let path = self.folder.path().join(NAME);
        let reserved = self.folder.open(NAME, true).and_then(|file| match file.len()? < WHOLE_LEN {
            true => file.reserve(WHOLE_LEN),
            false => Ok(()),
        });
        reserved.map_err(disk_error("write", &path, "the replica is unchanged"))
    }

    /// Notes how the file was left after own writes.
    ///
    /// # Errors
    /// If others have written to a device meanwhile: then the note goes on to say what own writes can have been.
    pub(crate) fn rest(&mut self) -> Result<()> {
        // First: whatever comes later is somebody else's.
        let left = self.glance().and_then(|left| {
            let others = left.as_ref().filter(|_| self.destination.is_device() && self.working.is_some());
            others.map_or(Ok(()), |now| self.only_own(now, now.size))?;
            Ok(left)
        });
        self.working = None;
        self.left = left?;
        if !self.is_timeless() {
            let _ = self.write_note(self.left.clone());
        }
        Ok(())
    }

    /// Makes the destination durable, and its stamp the lineage's, if nobody else has written to it since it was left.
    pub(crate) fn note_stamp(&mut self) -> Result<()> {
        let failed = disk_error("flush", self.destination.path(), SAFE);
        let stamp = self.destination.settle().map_err(failed)?;
        let now = stamp.clone().glance();
        // What came in the time that this took must not be taken for own.
        if let Some(why) = self.left.as_ref().and_then(|left| left.differs(&now)) {
            return Err(self.touched(why));
        }
        (self.left, self.lineage.stamp) = (Some(now), Some(stamp));
        Ok(())
    }

    /// Brings the lineage's stamp up to own writes that came to nothing.
    pub(crate) fn keep_times(&mut self) -> Result<()> {
        let before = self.lineage.stamp.clone();
        self.note_stamp()?;
        if self.store().is_err() {
            // The note still tells.
            self.lineage.stamp = before;
            return Ok(());
        }
        self.forget_note()
    }

    /// True if there is a note of own writes that were made since the lineage was stored, with no journal that says so: room was
    /// made for a delta, and that came to nothing.
    pub(crate) fn has_note(&self) -> bool {
        let since = self.lineage.stamp.as_ref().map(|stamp| stamp.changed);
        if self.lineage.step.is_some() || self.destination.is_device() || self.is_timeless() {
            return false;
        }
        read_note(&*self.folder)
            .is_some_and(|(note, _)| note.before.is_none() && note.since.is_some() && note.since == since)
    }

    /// Own writes are over, and the lineage says how they left the file.
    pub(crate) fn forget_note(&mut self) -> Result<()> {
        self.working = None;
        self.remove(NAME)
    }

    /// In what way others have changed a device since it was first opened after a reboot, or after it was attached anew: the
    /// kernel's count begins anew with either.
    pub(crate) fn since_attached(&self, now: &Stamp) -> Option<&'static str> {
        let attached =
            |stamp: &Stamp| stamp.medium.as_ref().map(|medium| (medium.boot.clone(), medium.diskseq));
        if !self.destination.is_device() || self.lineage.stamp.as_ref().and_then(attached) == attached(now) {
            return None;
        }
        match read_note(&*self.folder).filter(|(note, _)| note.life == self.destination.boot().id) {
            Some((Note { stamp: None, .. }, _)) => None,
            Some((Note { stamp: Some(left), .. }, _)) if attached(&left) == attached(now) => {
                left.differs(&now.clone().glance())
            }
            _ => {
                let _ = self.write_note(Some(now.clone().glance()));
                None
            }
        }
    }

    /// In what way others have changed the file since the last own write, or may have, where that was later than the
    /// lineage: batches or a delta were merged from `journal`, a step in place was begun, or a copy was put in place.
    pub(crate) fn since_own_writes(&self, now: &Stamp, journal: &[Contents]) -> Option<&'static str> {
        if self.is_timeless() {
            return None;
        }
        if self.destination.is_device() {
            let note = read_note(&*self.folder);
            let noted = note.is_some();
            let foreign = foreign_to_device(&self.destination.boot(), note, self.lineage.stamp.as_ref(), now);
            if noted && foreign.is_none() {
                // From here on a bound is not enough.
                let _ = self.write_note(Some(now.clone().glance()));
            }
            return foreign;
        }
        let cloned = match self.lineage.step.as_ref().map(|step| step.kind) {
            // It has just got its name: whatever its time was before, that has changed it.
            Some(StepKind::NewFile { inode, .. } | StepKind::Clone { inode }) => {
                Some(Stamp { inode, changed: 0, ..now.clone() })
            }
            _ => None,
        };
        let before = cloned.as_ref().or(self.lineage.stamp.as_ref())?;
        let note = read_note(&*self.folder);
        // A new name does not move the time of the content; a power cut may set it back.
        let copy = note
            .as_ref()
            .and_then(|(note, _)| Some((note.before.as_ref()?, note.life == self.destination.boot().id)));
        if let Some((copy, told)) = copy.filter(|(copy, _)| cloned.is_some() && copy.inode == now.inode) {
            if copy.size != now.size || now.written > copy.written || told && now.written != copy.written {
                return Some(WRITTEN);
            }
        }
        let durable = if journal.is_empty() { lineage::NAME } else { WHOLE };
        let evidence = Evidence {
            before,
            now,
            note,
            durable: self.folder.modified(durable).unwrap_or(0),
            stream: journal.last().and_then(Contents::stream).or(self.lineage.committed),
        };
        if let Some(why) = evidence.foreign(&self.destination.boot()) {
            return Some(why);
        }
        let mut sizes = journal.iter().flat_map(|contents| &contents.segments).map(|s| s.header.size_after);
        // A step in place may have been given up at any size on the way.
        let possible =
            self.lineage.step.is_some() || before.size == now.size || sizes.any(|size| size == now.size);
        (!possible).then_some("its size has changed")
    }
}

/// How long ago a moment is, in nanoseconds since 1970, for people.
fn ago(moment: i64, clock: &Clock) -> String {
    let seconds = clock.now().saturating_sub(moment.max(0) as u64) / 1_000_000_000;
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}

fn read_note(folder: &dyn Folder) -> Option<(Note, u64)> {
    let file = folder.open(NAME, false).ok()?;
    let mut bytes = vec![0; LEN];
    file.read_at(0, &mut bytes).ok()?;
    let mut time = [0; 8];
    // One that was written before there was a time has none.
    let _ = file.read_at(LEN as u64, &mut time);
    Some((serde_json::from_slice(&bytes).ok()?, u64::from_ne_bytes(time)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    fn at(seconds: u64) -> Stamp {
        Stamp { inode: 7, size: 4096, changed: (seconds * S) as i64, ..Stamp::default() }
    }

    #[test]
    fn a_thread_that_slept_sets_no_note_back() {
        let temp = tempfile::tempdir().unwrap();
        let folder = device::Dir::open(temp.path()).unwrap();
        let file: Arc<dyn StateFile> = folder.open(NAME, true).unwrap().into();
        file.reserve(WHOLE_LEN).unwrap();
        // The thread looks at the clock, and sleeps until a writer has noted a later time.
        let (looked_in, looked) = std::sync::mpsc::channel();
        let (wake, woken) = std::sync::mpsc::channel();
        let woken = std::sync::Mutex::new(woken);
        let clock = Clock::exact(move || {
            if std::thread::current().name() != Some("at work") {
                return 9 * S;
            }
            let _ = looked_in.send(());
            let _ = woken.lock().unwrap().recv();
            S
        });
        let later = Some(Clock::exact(|| 10 * S));
        let working = Working::begin(file.clone(), Some(clock)).unwrap();
        let mut writer =
            Keeping(Some(Kept { file, map: working.map.clone(), clock: later, last: Instant::now() }));
        looked.recv().unwrap();
        writer.note();
        working.over.store(true, SeqCst);
        wake.send(()).unwrap();
        let map = working.map.clone();
        drop(working);
        assert_eq!(map[TIME].load(SeqCst), 10 * S);
    }

    /// A file that its lineage knows from second 100, in a boot that began at second 1000: is it doubted?
    fn doubted(now: u64, note: Option<(&str, Option<u64>, u64, u128)>, durable: u64) -> bool {
        let note = note.map(|(life, left, time, stream)| {
            let (stamp, stream) = (left.map(at), Some(Uuid::from_u128(stream)));
            (Note { life: life.into(), stamp, before: None, began: None, stream, since: None }, time * S)
        });
        let (before, now) = (at(100), at(now));
        let stream = Some(Uuid::from_u128(2));
        let evidence = Evidence { before: &before, now: &now, note, durable: durable * S, stream };
        evidence.foreign(&Boot { id: "this#7".into(), began: 1000 * S }).is_some()
    }

    #[test]
    fn a_clock_that_was_set_back_tells_nothing() {
        let (stream, boot) = (Some(Uuid::from_u128(2)), Boot { id: "this#7".into(), began: S });
        // Own writes began at 1300, to a file that an own write had left at 1250.
        let began = Some((1300 * S, (1250 * S) as i64));
        for (changed, doubt) in [(1205, true), (1250, false), (1299, true), (1300, false), (1310, false)] {
            let note = Note { life: "this".into(), stamp: None, before: None, began, stream, since: None };
            let (before, now, note) = (at(100), at(changed), Some((note, 1310 * S)));
            let evidence = Evidence { before: &before, now: &now, note, durable: 0, stream };
            assert_eq!(evidence.foreign(&boot).is_some(), doubt, "{changed}");
        }
    }

    #[test]
    fn own_writes_are_told_from_others() {
        // What the note says of this boot holds.
        for (now, note, doubt) in [
            (1200, ("this", Some(1200), 1199, 2), false),
            (1201, ("this", Some(1200), 1199, 2), true),
            (1199, ("this", Some(1200), 1199, 2), true),
            (1200, ("this", None, 1200, 2), false),
            (100, ("this", None, 1200, 2), false),
            (1201, ("this", None, 1200, 2), false),
            (1202, ("this", None, 1200, 2), true),
            (99, ("this", None, 1200, 2), true),
        ] {
            assert_eq!(doubted(now, Some(note), 1200), doubt, "{now} {note:?}");
        }
        // After a power cut, what was noted or made durable last, with what may have come after that.
        for (now, note, durable, doubt) in [
            (100, None, 0, false),
            (500, None, 495, false),
            (500, None, 480, true),
            (500, Some(("", None, 0, 1)), 480, true),
            (500, Some(("last", None, 499, 1)), 300, false),
            (520, Some(("last", None, 499, 1)), 300, true),
            (520, Some(("last", None, 499, 1)), 515, false),
            // The last batch was brought to the file, so nothing of ours came after that.
            (500, Some(("last", Some(500), 499, 2)), 499, false),
            (501, Some(("last", Some(500), 499, 2)), 499, true),
            (490, Some(("last", Some(500), 499, 2)), 499, false),
            (501, Some(("last", Some(500), 499, 1)), 499, false),
            (99, Some(("last", Some(500), 499, 2)), 499, true),
            // The disk was detached and attached again in this boot.
            (1200, Some(("this#6", Some(1200), 1199, 2)), 1199, false),
            (1190, Some(("this#6", Some(1200), 1199, 2)), 1199, false),
            (1201, Some(("this#6", Some(1200), 1199, 2)), 1199, true),
            (1205, Some(("this#6", None, 1200, 1)), 1100, false),
            (1211, Some(("this#6", None, 1200, 1)), 1100, true),
            // Nothing of this boot is own, whatever is durable of it.
            (1001, None, 1001, true),
            (1001, Some(("last", None, 1000, 1)), 1001, true),
        ] {
            assert_eq!(doubted(now, note, durable), doubt, "{now} {note:?} {durable}");
        }
    }
}
