//! The note of own writes, and what it tells of others' ([`crate::foreign`] has the rules).

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Relaxed, SeqCst},
};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use device::{Boot, Clock, Folder, Life, Mapping, MediumChange, StateFile};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::state::lineage::Stamp;

/// The note's file.
pub(crate) const NAME: &str = "rest";

/// What it says is written in one piece, and of one length.
const LEN: usize = 512;

/// Bytes of the whole note: the time of the last own write has a page's second part for itself.
const WHOLE_LEN: u64 = 4096;

/// The time's place, in words. For a device it holds the number of sectors that were handed to it.
const TIME: usize = LEN / 8;

/// How often the kernel may count a sector that was made zero: it tries up to three ways, one after the other.
const ZEROED: u64 = 3;

/// How long after the last note of a dying process its writes may still have stamped the file, in nanoseconds: many are
/// submitted at once, and on a busy machine the kernel is slow to end them. Another program that begins to write in that time is noticed if
/// it goes on a little longer.
pub(crate) const DYING: u64 = 1_000_000_000;

/// How often the note is made durable meanwhile: well within [`Boot::LATE`].
const KEPT_EVERY: Duration = Duration::from_secs(2);

/// How often the time is noted while own writes are on their way.
const EVERY: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The boot it was written in.
    pub life: String,
    /// `None` while the file is written to.
    pub stamp: Option<Stamp>,
    /// Of a device that is written to, what it was before; of a copy that is about to be put in place, what it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<Stamp>,
    /// Of a file that is written to, when that began, and the time that it bore until then, in nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<(u64, i64)>,
    /// The last delta that was brought to the file.
    pub stream: Option<Uuid>,
    /// The change time that the lineage had for the file then.
    pub since: Option<i64>,
}

impl Stamp {
    /// What of it costs next to nothing to be looked at: all but the content of a device.
    pub(crate) fn glance(self) -> Stamp {
        let medium = self.medium.map(|medium| medium.glance());
        Stamp { print: String::new(), marks: Vec::new(), medium, ..self }
    }

    /// In what way a device is not as its own writes can have left it, up to `sectors` of them; both are glances.
    pub(crate) fn differs_beyond(&self, now: &Stamp, sectors: u64) -> Option<Foreign> {
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

    /// True if others have changed the owner, mode, name or links of a file alone, as a write moves the time of its content too. Not where
    /// times are coarse: of two writes within one step, the second moves nothing.
    pub(crate) fn differs_in_attributes(&self, now: &Stamp) -> bool {
        let same = (self.inode, self.size, self.written) == (now.inode, now.size, now.written);
        let fine = self.written.is_some_and(|written| device::grain(written) == 1);
        same && fine && self.inode != 0 && self.changed < now.changed
    }

    /// True if both are of one file. Where inodes last no longer than a mount, another one is of the same file if nothing else differs.
    pub(crate) fn is_of_file(&self, now: &Stamp) -> bool {
        let rest = |stamp: &Stamp| (stamp.renumbered, stamp.size, stamp.changed, stamp.written);
        self.inode == now.inode || now.renumbered && rest(self) == rest(now)
    }

    /// In what way a destination is not as it was left; `None` if nothing tells.
    pub(crate) fn differs(&self, now: &Stamp) -> Option<Foreign> {
        let medium = self.medium.as_ref().zip(now.medium.as_ref()).and_then(|(was, now)| was.differs(now));
        match () {
            () if !self.is_of_file(now) => Some(Foreign::OtherFile),
            () if self.size != now.size => Some(Foreign::Resized),
            () if self.changed != now.changed => Some(Foreign::Written),
            () if medium.is_some() => medium.map(Foreign::from),
            () if !device::agree(&self.print, &now.print) => Some(Foreign::Print),
            () => None,
        }
    }
}

/// In what way others have changed a destination, or may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Foreign {
    /// Its times of change or the kernel's count of writes show that.
    Written,
    /// Its time of change is from before own writes.
    SetBack,
    /// Its time of change is from before own writes, as the clock was set back.
    Clock,
    /// A file has another inode.
    OtherFile,
    /// It has another size.
    Resized,
    /// A device shows it.
    Medium(MediumChange),
    /// Samples of a device's content differ.
    Print,
    /// The set of blocks in which it is unsure cannot be read, so anything may have been changed.
    Unsure,
    /// A write in place to an export was interrupted, and nothing tells whether it is the same disk still.
    Interrupted,
    /// The state of a device was copied, and the kernel does not tell what was written since.
    Copied,
    /// It is a source itself.
    Promoted,
}

impl From<MediumChange> for Foreign {
    fn from(change: MediumChange) -> Foreign {
        match change {
            MediumChange::Written => Foreign::Written,
            other => Foreign::Medium(other),
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Foreign::Written => "it was written to",
            Foreign::SetBack => "it was set back to an earlier state",
            Foreign::Clock => {
                "the clock was set back while it was written to, so its times do not tell who wrote to it"
            }
            Foreign::OtherFile => "another file is in its place",
            Foreign::Resized => "its size has changed",
            Foreign::Medium(change) => return change.fmt(f),
            Foreign::Print => "it is another disk, or was written to",
            Foreign::Unsure => "the record of the blocks in which it is unsure is missing or damaged",
            Foreign::Interrupted => {
                "a copy to it was interrupted, and nothing tells whether its NBD server still has the same disk there"
            }
            Foreign::Copied => {
                "its state was copied or restored from a copy, and nothing tells what was written to it since"
            }
            Foreign::Promoted => "it was promoted",
        })
    }
}

/// What there is to tell own writes from others', at a file that was written to after its lineage was stored.
pub(crate) struct Evidence<'a> {
    /// As the lineage has it.
    pub before: &'a Stamp,
    pub now: &'a Stamp,
    /// The note, and the time in it, in nanoseconds since 1970, or the number of sectors.
    pub note: Option<(Note, u64)>,
    /// When something was last made durable that comes before own writes, in nanoseconds since 1970.
    pub durable: u64,
    /// The last delta that may have been brought to the file.
    pub stream: Option<Uuid>,
    /// What the file's time of change was when a part of a step in place was made durable, in nanoseconds since 1970; 0 if none was.
    pub floor: i64,
}

impl Evidence<'_> {
    /// A file bears a time from before own writes began, and not the one that it bore then.
    fn is_before_own(&self, changed: u64) -> bool {
        let began = self.note.as_ref().and_then(|(note, _)| note.began);
        began.is_some_and(|(began, bore)| changed < began && changed != bore.max(0) as u64)
    }

    /// In what way others have changed the file, or may have.
    pub(crate) fn foreign(&self, boot: &Boot) -> Option<Foreign> {
        let (before, now) = (self.before, self.now);
        if !before.is_of_file(now) {
            return before.differs(now);
        }
        // The step says that this part is there.
        if now.changed < self.floor {
            return Some(Foreign::SetBack);
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
                None if now.changed < before.changed => Some(Foreign::SetBack),
                None if self.is_before_own(changed) => Some(Foreign::Clock),
                None => (changed > time.saturating_add(DYING)).then_some(Foreign::Written),
            };
        }
        // The power was cut, or the system shut down after a kill. What was not durable may be of any earlier moment.
        if now.changed == before.changed || left.is_some_and(|left| left.differs(now).is_none()) {
            return None;
        }
        if now.changed < before.changed {
            return Some(Foreign::SetBack);
        }
        let all_there = self.note.as_ref().is_some_and(|(note, _)| note.stream == self.stream);
        let last = match left.filter(|_| all_there) {
            Some(left) => left.changed.max(0) as u64,
            None => time.max(self.durable).saturating_add(Boot::LATE),
        };
        // Since when a disk is back that was detached, nothing tells.
        let of_this_boot = changed >= boot.began && life != Life::Detached;
        (changed > last || of_this_boot).then_some(Foreign::Written)
    }
}

/// In what way others have changed a device since its lineage had it as `before`, or may have.
pub(crate) fn foreign_to_device(
    boot: &Boot,
    note: Option<(Note, u64)>,
    before: Option<&Stamp>,
    now: &Stamp,
) -> Option<Foreign> {
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
    /// Begins to keep the note in `file`; `clock` is the one that stamps the destination, `None` for a device.
    pub(crate) fn begin(file: Arc<dyn StateFile>, clock: Option<Clock>) -> io::Result<Working> {
        let (map, over) = (file.map(WHOLE_LEN)?, Arc::new(AtomicBool::new(false)));
        map[TIME].store(clock.as_ref().map_or(0, Clock::now), Relaxed);
        map.put(TIME..TIME + 1)?;
        let Some(time) = clock.clone() else { return Ok(Working { file, map, clock, over, thread: None }) };
        let (noted, ended) = (map.clone(), over.clone());
        let thread = std::thread::Builder::new().name("at work".into()).spawn(move || {
            while !ended.load(SeqCst) {
                // A thread that sleeps after it read the clock must not overwrite a writer's newer time.
                let before = noted[TIME].load(Relaxed);
                let _ = noted[TIME].compare_exchange(before, time.now(), Relaxed, Relaxed);
                put(&noted);
                std::thread::park_timeout(EVERY);
            }
        })?;
        Ok(Working { file, map, clock, over, thread: Some(thread) })
    }

    /// Ends own writes, which left a file with the change time `left`: what is later is another program's. The note in memory
    /// says so by itself, even where the next one cannot be written.
    pub(crate) fn end(mut self, left: i64) {
        self.join();
        if self.clock.is_some() {
            self.map[TIME].store((left.max(0) as u64).saturating_sub(DYING), SeqCst);
            put(&self.map);
        }
    }

    fn join(&mut self) {
        self.over.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }

    /// How many sectors were handed to a device since own writes began; `None` for a file.
    pub(crate) fn sectors(&self) -> Option<u64> {
        self.clock.is_none().then(|| self.map[TIME].load(SeqCst))
    }

    /// Makes the note of a file durable. Of a device it tells nothing after a power cut.
    pub(crate) fn make_durable(&self, folder: &dyn Folder) -> io::Result<()> {
        match self.clock {
            Some(_) => self.file.sync().and_then(|()| folder.sync()),
            None => Ok(()),
        }
    }

    /// For the writer.
    pub(crate) fn keeping(&self) -> Keeping {
        Keeping(Some(Kept {
            file: self.file.clone(),
            map: self.map.clone(),
            clock: self.clock.clone(),
            last: Instant::now(),
        }))
    }
}

/// Brings the time to the file where the note is not mapped. If there is no room for it, the older one makes a file doubted that need not
/// be.
fn put(map: &Mapping) {
    let _ = map.put(TIME..TIME + 1);
}

/// Keeps a note up to date: for the writer. That of a file is made durable now and then.
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
    /// Counts sectors of 512 bytes that are about to be written to a disk, or made zero.
    pub(crate) fn hands_over(&mut self, sectors: u64, zeroes: bool) {
        let Some(kept) = self.0.as_ref().filter(|kept| kept.clock.is_none()) else { return };
        kept.map[TIME].fetch_add(if zeroes { ZEROED * sectors } else { sectors }, SeqCst);
        put(&kept.map);
    }

    /// A write is about to go down, or has just come back.
    pub(crate) fn note(&mut self) {
        let Some(kept) = &mut self.0 else { return };
        let Some(clock) = &kept.clock else { return };
        kept.map[TIME].store(clock.now(), Relaxed);
        put(&kept.map);
        if kept.last.elapsed() >= KEPT_EVERY {
            // An older note makes a file doubted that need not be, after a power cut.
            let _ = kept.file.sync();
            kept.last = Instant::now();
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.join();
    }
}

/// The note of a folder, and the time or the sectors in it. `None` if there is none, or a power cut has left a part of one.
///
/// # Errors
/// If it cannot be read. That must not pass for a folder without one.
pub(crate) fn read(folder: &dyn Folder) -> io::Result<Option<(Note, u64)>> {
    let file = match folder.open(NAME, false) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = vec![0; LEN];
    match file.read_at(0, &mut bytes) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let mut time = [0; 8];
    // One that was written before there was a time has none.
    match file.read_at(LEN as u64, &mut time) {
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {}
        read => read?,
    }
    Ok(serde_json::from_slice(&bytes).ok().map(|note| (note, u64::from_ne_bytes(time))))
}

/// Makes room for a folder's note.
pub(crate) fn reserve(folder: &dyn Folder) -> io::Result<Box<dyn StateFile>> {
    let file = folder.open(NAME, true)?;
    if file.len()? < WHOLE_LEN {
        file.reserve(WHOLE_LEN)?;
    }
    Ok(file)
}

impl Note {
    /// Puts this note in the place of the folder's. Not durable.
    pub(crate) fn write(&self, folder: &dyn Folder) -> io::Result<Arc<dyn StateFile>> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.resize(bytes.len().max(LEN), b' ');
        let file = reserve(folder)?;
        file.write_at(0, &bytes)?;
        Ok(file.into())
    }
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
        let evidence = Evidence { before: &before, now: &now, note, durable: durable * S, stream, floor: 0 };
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
            let evidence = Evidence { before: &before, now: &now, note, durable: 0, stream, floor: 0 };
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
