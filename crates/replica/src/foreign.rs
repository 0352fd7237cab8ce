//! Foreign-write detection. Between its own writes a replica's file rests: whatever changes it then was written by another
//! program, and must not be sealed by the next commit.
//!
//! While a replica is open, the stamp with which its file was left is kept in memory. Where the lineage's stamp is of before
//! the last own write (a merge, the batches of a mirror, a step in place), a note in the folder tells the next process
//! more after a kill or a power cut:
//!
//! - *at rest*: the stamp that the file was left with, and the batch that was its last. Nothing but equality will do.
//! - *at work*: the time, by the clock that stamps files, every few milliseconds. A file with a later time was written to by
//!   another program. After a kill the note is that of the last moment. After a power cut it is the last durable one, and what
//!   is written durably before own writes begin, the journal, tells as well; nothing of this boot is own.
//!
//! Where neither tells, the file is doubted.
//!
//! A device has no times, but within one boot the kernel's count of sectors written tells the same: *at rest*, nothing but
//! equality will do; *at work*, the note has the count from which own writes began, and how many sectors have been handed to
//! the device since: if more were written, another program wrote. Of what came before a reboot nothing tells.
//!
//! # What is checked, and what is not noticed
//!
//! Before each commit and each batch the file is checked: if its inode, size or change time differ from how dsync left it, nothing is
//! committed over it. On a file system that gives files other inodes at each mount (FAT, exFAT, FUSE, SMB) another inode alone does not
//! count: size and times tell. It is checked once more when the note has been written, and after the flush that ends a mirror's batches. The next
//! process to open the replica decides by the note:
//!
//! | what was in progress | the note | the file is trusted if its change time is |
//! | --- | --- | --- |
//! | nothing | | that of the lineage |
//! | batches, or an interrupted step in place; at rest | of this boot | that of the note |
//! | the same | of an earlier boot | that of the note, or earlier (the power cut took the later one) |
//! | space reserved for what was never committed | | as for batches at rest |
//! | a merge, a batch, a step in place, a copy being put in place | of this boot | at most 1 s after the note, and not before own writes began (the clock was set back); the content of a copy must match the note |
//! | the same | of an earlier boot, or lost | at most 10 s after the last durable note or journal, and before this boot |
//!
//! In every other case only a compare fits the replica. Not detected: a write by another program during own ones, one within the second
//! after a kill (a program that goes on writing is noticed), one within the 10 s before a power cut that took the note, and one by a host
//! whose clock stamps the file differently (network file systems). A copy that is put in place keeps the time of its content, so a write
//! to it before its lineage is stored is noticed too. A file is compared without need if there was no room for its note, or if the kill
//! was on a very busy machine and the last write ended more than a second later. A note that cannot be written for another reason ends
//! the command before its first write.
//!
//! Of a partition the kernel's count includes what was written to its disk outside all partitions. The count is read wherever a file's
//! times are, also between two batches, after the page cache of the device has been written out. Not detected: a write by another program during own ones that is smaller than what a kill kept
//! from being written or than the allowance for zeroed ranges (the kernel may count these up to three times), and all that happened while
//! there was no count: before a power cut or reboot that followed the kill, while the disk was detached, by another host, beneath the
//! device, or with `queue/iostats` at 0.

use std::io;
use std::path::Path;
use std::sync::Arc;

use device::{Clock, StateFile};

use uuid::Uuid;

use crate::error::{ReplicaError, Result, SAFE, disk_error, io_error, is_full};
use crate::journal::merged_blocks::MergedBlocks;
use crate::journal::{self, Contents, WHOLE, compares};
use crate::past::views;
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{self, Lineage, Stamp, StepKind, Unsure};
use crate::state::note::{self, Evidence, Foreign, Keeping, Note, Working};

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
        match self.destination().is_at_path().map_err(io_error("look at the folder of", self.path()))? {
            true => Ok(()),
            false => Err(covered(self.path())),
        }
    }

    /// Keeps in mind that others have written to a device. The times of a file tell by themselves, and another disk under the
    /// device's name does not make the right one another.
    pub(crate) fn notice(&self, why: Foreign) {
        let marked = self.lineage().unsure == Unsure::Everything || self.lineage().role.promoted.is_some();
        let tells = self.is_noticed_by_lineage(why);
        if tells && !marked && !self.mark_noticed() {
            // In memory the lineage may be ahead by batches that only the journal has.
            if let Ok(Some(durable)) = Lineage::load(self.state()) {
                // If this cannot be recorded, the kernel's count tells until the next reboot.
                let _ = Lineage { unsure: Unsure::Everything, ..durable }.store(self.state());
            }
        }
    }

    /// True if the lineage must say in what way others have changed the destination, as nothing else does after a reboot, or once it is stored.
    fn is_noticed_by_lineage(&self, why: Foreign) -> bool {
        matches!(why, Foreign::Written | Foreign::Copied) && self.destination().is_device() && self.is_kept()
    }

    /// Gives the state another name: a delta that is sealed in the journal, and was found by comparing, was made before this
    /// write. Only the name tells after a reboot.
    fn outdate_sealed(&self) {
        let sealed = journal::measure(self.state(), WHOLE).ok().flatten();
        if !sealed.is_some_and(|delta| delta.segments.first().is_some_and(|s| compares(&s.header))) {
            return;
        }
        if let Ok(Some(mut durable)) = Lineage::load(self.state()) {
            durable.nonce = Uuid::new_v4();
            durable.step.iter_mut().for_each(|step| step.nonce = Uuid::new_v4());
            let _ = durable.store(self.state());
        }
    }

    pub(crate) fn touched(&self, why: Foreign) -> ReplicaError {
        // What is read of it is no state of the source any more.
        let _ = views::lose_all(self.state(), "the replica was modified outside dsync");
        self.notice(why);
        if self.is_noticed_by_lineage(why) {
            self.outdate_sealed();
        }
        self.keep_note();
        let group = self.lineage().group.as_ref().map(|group| group.name.clone());
        let role = &self.lineage().role;
        let former = role.demoted.is_some() && role.promoted.is_none();
        let as_old = self.is_as_old();
        ReplicaError::Changed {
            path: self.path().to_path_buf(),
            why: self.how_changed(why),
            group,
            former,
            as_old,
        }
    }

    /// In what way others have changed the destination, as exactly as its times tell.
    pub(crate) fn how_changed(&self, why: Foreign) -> String {
        let found = self.destination().stamp(Name::Final).ok().flatten();
        let recorded = self.lineage().stamp.as_ref();
        // In doubt, what it was left like is what others have left.
        let left = if self.changed().is_some() { recorded } else { self.left().or(recorded) };
        if let (Foreign::Resized, Some(left), Some(now)) = (why, left, &found) {
            let [was, is] = [left.size, now.size].map(device::exact_size);
            return format!("{why} from {was} to {is}");
        }
        // Where that is all that is known, the times were recorded later.
        let is_recorded = self.lineage().unsure != Unsure::Everything;
        match found.filter(|_| why == Foreign::Written).and_then(|now| Some((now.changed, now.written?))) {
            // A write moves both times, but any program may set this one back.
            Some((changed, written))
                if is_recorded && left.and_then(|left| left.written) == Some(written) =>
            {
                format!(
                    "its owner, mode, name or links were changed {}; its times do not tell whether its content was changed too",
                    ago(changed, &self.destination().clock())
                )
            }
            Some((_, written)) => format!("content written {}", ago(written, &self.destination().clock())),
            None => why.to_string(),
        }
    }

    fn gone(&self) -> ReplicaError {
        ReplicaError::Away(format!(
            "replica {} no longer exists: it was removed, or its file system was unmounted",
            self.path().display()
        ))
    }

    /// What the destination looks like, as far as that costs next to nothing.
    fn glance(&self) -> Result<Option<Stamp>> {
        self.destination().glance().map_err(io_error("look at", self.path()))
    }

    /// The file is left alone from now on, until the next own write.
    pub(crate) fn leave(&mut self) -> Result<()> {
        let left = self.glance()?;
        self.set_left(left);
        Ok(())
    }

    /// Fails if another program has changed the file since it was left alone.
    pub(crate) fn untouched(&self) -> Result<()> {
        self.at_path()?;
        let Some(left) = self.left() else { return Ok(()) };
        let why = match self.glance()? {
            None => return Err(self.gone()),
            Some(now) => left.differs(&now),
        };
        why.map_or(Ok(()), |why| Err(self.touched(why)))
    }

    /// Fails if another file is in place of the one that was written to, or if another program has written to a device
    /// meanwhile. `size` is its size by now.
    pub(crate) fn still_there(&self, size: u64) -> Result<()> {
        self.at_path()?;
        match self.glance()? {
            None => Err(self.gone()),
            Some(now) => self.only_own(&now, size),
        }
    }

    /// Fails if `now`, a glance at the destination, shows another file or size, or more writes to a device than its own.
    pub(crate) fn only_own(&self, now: &Stamp, size: u64) -> Result<()> {
        let Some(left) = self.left() else { return Ok(()) };
        let why = if self.destination().is_device() {
            // Own writes have moved its count, and the note says how far at most; without one, nothing is known.
            left.differs_beyond(now, self.working().and_then(Working::sectors).unwrap_or(u64::MAX))
        } else {
            // Own writes have changed its time.
            Stamp { size, changed: now.changed, ..left.clone() }.differs(now)
        };
        why.map_or(Ok(()), |why| Err(self.touched(why)))
    }

    /// True if nothing tells own writes from others', or has to.
    pub(crate) fn is_timeless(&self) -> bool {
        self.destination().boot().id.is_empty()
    }

    /// A time that no own write to a file will be stamped before, and the one that the file bears now.
    fn before_own_writes(&self) -> io::Result<(u64, i64)> {
        let bears = match self.writes_to() {
            Name::Final => self.left().cloned(),
            Name::Temporary => self.destination().stamp(Name::Temporary)?,
        };
        let clock = self.destination().clock();
        Ok((clock.now().saturating_sub(clock.tick()), bears.map_or(0, |stamp| stamp.changed)))
    }

    fn write_note(&self, stamp: Option<Stamp>) -> io::Result<Arc<dyn StateFile>> {
        let before = match self.writes_to() {
            _ if stamp.is_some() => None,
            Name::Temporary => self.destination().stamp(Name::Temporary)?,
            Name::Final => self.left().cloned().filter(|_| self.destination().is_device()),
        };
        let since = self.lineage().stamp.as_ref().map(|stamp| stamp.changed);
        let began = match stamp.is_none() && !self.destination().is_device() {
            true => Some(self.before_own_writes()?),
            false => None,
        };
        let (life, stream) = (self.destination().boot().id, self.lineage().committed);
        Note { life, stamp, before, began, stream, since }.write(self.state())
    }

    /// From now on the file is written to: notes the time until [`Replica::rest`]. `durable` where nothing else was made
    /// durable just now that comes before the first write.
    ///
    /// # Errors
    /// If the note cannot be written, or made durable: without it, a file that was written to would be doubted. Where only the room is missing,
    /// it is done without. If others have changed the destination since it was left alone: after the note nothing tells.
    pub(crate) fn work(&mut self, durable: bool) -> Result<Keeping> {
        self.herald(self.lineage().epoch.is_none())?;
        if !self.is_timeless() && self.working().is_none() {
            let note = self.write_note(None);
            let failed = io_error("write", &self.folder().join(note::NAME));
            let clock = (!self.destination().is_device()).then(|| self.destination().clock());
            let working = match note.and_then(|file| Working::begin(file, clock)) {
                Err(e) if is_full(&e) => None,
                begun => Some(begun.map_err(failed)?),
            };
            self.set_working(working);
            if let Err(foreign) = self.untouched() {
                self.end_work();
                self.keep_note();
                return Err(foreign);
            }
            if self.take_unclean() && self.stamp(Name::Final)?.is_some() {
                self.destination().mend(Name::Final)?;
            }
        }
        if let Some(working) = self.working().filter(|_| durable) {
            working.make_durable(self.state()).map_err(io_error("sync", &self.folder().join(note::NAME)))?;
        }
        Ok(self.working().map(Working::keeping).unwrap_or_default())
    }

    /// Begins to write as [`Replica::work`] does, but fails without room for the note where nothing else tells own writes from others'. `state` is
    /// what becomes of the replica then.
    pub(crate) fn work_noted(&mut self, durable: bool, state: &'static str) -> Result<Keeping> {
        let keeping = self.work(durable)?;
        if self.is_timeless() || self.working().is_some() {
            return Ok(keeping);
        }
        let place = format!("to write {}", self.folder().join(note::NAME).display());
        Err(ReplicaError::Full { place, missing: None, state, otherwise: "" })
    }

    /// Makes room for the note.
    pub(crate) fn reserve_note(&self) -> Result<()> {
        if self.is_timeless() {
            return Ok(());
        }
        let path = self.folder().join(note::NAME);
        note::reserve(self.state()).map(drop).map_err(disk_error("write", &path, "the replica is unchanged"))
    }

    /// Notes how the file was left after own writes.
    ///
    /// # Errors
    /// If others have written to a device meanwhile: then the note goes on to say what own writes can have been.
    pub(crate) fn rest(&mut self) -> Result<()> {
        // First: whatever comes later is another program's.
        let left = self.glance().and_then(|left| {
            let others = left.as_ref().filter(|_| self.destination().is_device() && self.working().is_some());
            others.map_or(Ok(()), |now| self.only_own(now, now.size))?;
            Ok(left)
        });
        if left.is_err() {
            self.set_working(None);
        }
        self.set_left(left?);
        self.end_work();
        Ok(())
    }

    /// Own writes have ended: notes how the destination was left.
    fn end_work(&mut self) {
        let left = self.left().cloned();
        if let (Some(working), Some(left)) = (self.set_working(None), &left) {
            working.end(left.changed);
        }
        if !self.is_timeless() {
            let _ = self.write_note(left);
        }
    }

    /// Makes the note of a file durable, as others have changed that: after a power cut an older note would take what they wrote
    /// for own. One that says that own writes go on does just that, and is replaced first.
    fn keep_note(&self) {
        if !self.destination().is_device() && !self.is_timeless() && self.working().is_none() {
            // Where there is none, or it cannot be kept, the times tell alone.
            let _ = self
                .state()
                .open(note::NAME, false)
                .and_then(|note| note.sync())
                .and_then(|()| self.state().sync());
        }
    }

    /// Makes the destination durable, and its stamp the lineage's, if no other program has written to it since it was left.
    pub(crate) fn note_stamp(&mut self) -> Result<()> {
        let failed = disk_error("flush", self.destination().path(), SAFE);
        let stamp = self.destination().settle().map_err(failed)?;
        let now = stamp.clone().glance();
        // What came in the time that this took must not be taken for own.
        if let Some(why) = self.left().and_then(|left| left.differs(&now)) {
            return Err(self.touched(why));
        }
        self.set_left(Some(now));
        self.lineage_mut().stamp = Some(stamp);
        Ok(())
    }

    /// Brings the lineage's stamp up to own writes that came to nothing.
    pub(crate) fn keep_times(&mut self) -> Result<()> {
        let before = self.lineage().stamp.clone();
        self.note_stamp()?;
        if self.store().is_err() {
            // The note still tells.
            self.lineage_mut().stamp = before;
            return Ok(());
        }
        self.forget_note()
    }

    /// The note, which must not pass for missing where it cannot be read.
    fn read_note(&self) -> Result<Option<(Note, u64)>> {
        note::read(self.state()).map_err(io_error("read", &self.folder().join(note::NAME)))
    }

    /// True if there is a note of own writes that were made since the lineage was stored, with no journal that says so: room was
    /// made for a delta, and that came to nothing.
    pub(crate) fn has_note(&self) -> Result<bool> {
        let since = self.lineage().stamp.as_ref().map(|stamp| stamp.changed);
        if self.lineage().step.is_some() || self.destination().is_device() || self.is_timeless() {
            return Ok(false);
        }
        let note = self.read_note()?;
        Ok(note.is_some_and(|(note, _)| note.before.is_none() && note.since.is_some() && note.since == since))
    }

    /// Own writes are over, and the lineage says how they left the file.
    pub(crate) fn forget_note(&mut self) -> Result<()> {
        self.set_working(None);
        self.remove(note::NAME)
    }

    /// True of a file, and of a device whose count of writes has gone on since the lineage was stored.
    fn is_counted_since_stored(&self, now: &Stamp) -> bool {
        !self.destination().is_device() || self.lineage().stamp.as_ref().and_then(attached) == attached(now)
    }

    /// True if the state may be older than what a device holds: it is a copy, and nothing has counted what was written since it was stored.
    pub(crate) fn is_copied(&self, now: &Stamp) -> Result<bool> {
        let is_counted = self.is_counted_since_stored(now) && !self.destination().is_export();
        if is_counted { Ok(false) } else { Lineage::is_copied(self.state()) }
    }

    /// In what way others have changed a device since it was first opened after a reboot, or after it was attached anew: the
    /// kernel's count begins anew with either.
    pub(crate) fn since_attached(&self, now: &Stamp) -> Result<Option<Foreign>> {
        if self.is_counted_since_stored(now) {
            return Ok(None);
        }
        let note = self.read_note()?;
        Ok(match note.filter(|(note, _)| note.life == self.destination().boot().id) {
            Some((Note { stamp: None, .. }, _)) => None,
            Some((Note { stamp: Some(left), .. }, _)) if attached(&left) == attached(now) => {
                left.differs(&now.clone().glance())
            }
            _ => {
                let _ = self.write_note(Some(now.clone().glance()));
                None
            }
        })
    }

    /// How an export was changed beside own writes: it must be as it was or as the journal has it, or another disk may have its name.
    fn beside_own_writes(&self, now: &Stamp, journal: &[Contents]) -> Result<Option<Foreign>> {
        let Some(before) = self.lineage().stamp.as_ref().filter(|_| !journal.is_empty()) else {
            return Ok(Some(Foreign::Interrupted));
        };
        let mut merged = MergedBlocks::of(before);
        for delta in journal {
            let failed = io_error("read", self.path());
            journal::replay(self.state(), WHOLE, delta, &mut merged, &mut self.positions(), failed)?;
        }
        let print = merged.meanwhile(before, now);
        Ok(Stamp { print, ..before.clone() }.differs(now))
    }

    /// In what way others have changed the file since the last own write, or may have, where that was later than the
    /// lineage: batches or a delta were merged from `journal`, a step in place was begun, or a copy was put in place.
    pub(crate) fn since_own_writes(&self, now: &Stamp, journal: &[Contents]) -> Result<Option<Foreign>> {
        if self.destination().is_export() {
            return self.beside_own_writes(now, journal);
        }
        if self.is_timeless() {
            return Ok(None);
        }
        if self.destination().is_device() {
            let note = self.read_note()?;
            let foreign =
                note::foreign_to_device(&self.destination().boot(), note, self.lineage().stamp.as_ref(), now);
            if foreign.is_none() {
                // From here on a bound is not enough. A power cut may have taken the note of a first copy, which has no other.
                let _ = self.write_note(Some(now.clone().glance()));
            }
            return Ok(foreign);
        }
        let cloned = match self.lineage().step.as_ref().map(|step| step.kind) {
            // It has just got its name: whatever its time was before, that has changed it.
            Some(StepKind::NewFile { inode, .. } | StepKind::Clone { inode }) => {
                Some(Stamp { inode, changed: 0, ..now.clone() })
            }
            _ => None,
        };
        let Some(before) = cloned.as_ref().or(self.lineage().stamp.as_ref()) else { return Ok(None) };
        let note = self.read_note()?;
        // A new name does not move the time of the content; a power cut may set it back.
        let copy = note
            .as_ref()
            .and_then(|(note, _)| Some((note.before.as_ref()?, note.life == self.destination().boot().id)));
        if let Some((copy, told)) = copy.filter(|(copy, _)| cloned.is_some() && copy.inode == now.inode) {
            if copy.size != now.size || now.written > copy.written || told && now.written != copy.written {
                return Ok(Some(Foreign::Written));
            }
        }
        let durable = if journal.is_empty() { lineage::NAME } else { WHOLE };
        let evidence = Evidence {
            before,
            now,
            note,
            durable: self.state().modified(durable).unwrap_or(0),
            stream: journal.last().and_then(Contents::stream).or(self.lineage().committed),
            floor: self.lineage().step.as_ref().map_or(0, |step| step.durable),
        };
        if let Some(why) = evidence.foreign(&self.destination().boot()) {
            return Ok(Some(why));
        }
        let mut sizes = journal.iter().flat_map(|contents| &contents.segments).map(|s| s.header.size_after);
        // A step in place may have been given up at any size on the way.
        let possible =
            self.lineage().step.is_some() || before.size == now.size || sizes.any(|size| size == now.size);
        Ok((!possible).then_some(Foreign::Resized))
    }
}

/// In which boot, and as which disk of it, a device was stamped.
fn attached(stamp: &Stamp) -> Option<(&str, Option<u64>)> {
    stamp.medium.as_ref().map(|medium| (medium.boot.as_str(), medium.diskseq))
}

/// How long ago a moment was, in nanoseconds since 1970, in words.
fn ago(moment: i64, clock: &Clock) -> String {
    let seconds = clock.now().saturating_sub(moment.max(0) as u64) / 1_000_000_000;
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}
