//! The time of the last write through the tracker: it distinguishes, after an unclean stop, own writes from foreign ones.

use std::io;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::time::Duration;

use device::{Clock, Folder, Mapping, StateFile};

use crate::bitmap_file::raise;
use crate::felt::{self, FeltFile};

const NAME: &str = "served";

/// Words of the mapping: the last note; the image's time of change at the last look; how often another program was seen to
/// have changed it, and how many of these are in the history. The words of the gate follow, and those of what writers feel.
const NOTED: usize = 0;
const SEEN: usize = 1;
const FOREIGN: usize = 2;
const SETTLED: usize = 3;

/// A clock that is this much behind the last note was set back, in nanoseconds.
const SET_BACK: u64 = 1_000_000_000;

/// The time of the last served write, in a mapped file: the latest value survives the process, a recent one a power cut.
pub struct LastWriteTime {
    clock: Clock,
    file: Box<dyn StateFile>,
    mapping: Mapping,
    durable: AtomicU64,
}

impl LastWriteTime {
    /// Opens the file, or creates it. Values of an earlier run are kept. Where the folder is read-only, it can be looked at.
    pub fn open(folder: &dyn Folder, clock: Clock) -> io::Result<LastWriteTime> {
        let file = folder.open(NAME, true).or_else(|error| match error.kind() {
            io::ErrorKind::ReadOnlyFilesystem => folder.open(NAME, false).map_err(|_| error),
            _ => Err(error),
        })?;
        if file.len()? < 4096 {
            file.reserve(4096)?;
            file.sync()?;
            folder.sync()?;
        }
        let mapping = file.map(4096)?;
        let durable = AtomicU64::new(mapping[NOTED].load(Relaxed));
        Ok(LastWriteTime { clock, file, mapping, durable })
    }

    /// Notes that a write is about to start, or has just completed. Every note differs from the last.
    pub fn note(&self) {
        let (word, now) = (&self.mapping[NOTED], self.clock.now());
        match word.load(Relaxed) {
            last if last < now => raise(word, now),
            // A note from before the clock was set back would hide foreign writes until that time.
            last if last - now > SET_BACK => word.store(now, Relaxed),
            _ => {
                word.fetch_add(1, Relaxed);
            }
        }
        self.keep();
    }

    /// Brings the words, and those that follow, to the file where it is not mapped. If there is no room, older ones stay there, which
    /// after a kill make an image doubted that need not be.
    pub(crate) fn keep(&self) {
        let _ = self.put();
    }

    fn put(&self) -> io::Result<()> {
        self.mapping.put(NOTED..crate::felt::WORDS)
    }

    /// Nanoseconds since 1970 at the last served write; 0 if there was none.
    pub fn last(&self) -> u64 {
        self.mapping[NOTED].load(Relaxed)
    }

    /// True if the clock was set back to before the last note.
    pub(crate) fn is_ahead(&self) -> bool {
        self.last().saturating_sub(self.clock.now()) > SET_BACK
    }

    /// The image's time of change when it was last looked at, in nanoseconds since 1970; 0 if it never was.
    pub fn seen(&self) -> u64 {
        self.mapping[SEEN].load(Relaxed)
    }

    pub(crate) fn see(&self, changed: u64) {
        self.mapping[SEEN].store(changed, Relaxed);
        self.keep();
    }

    /// How often another program was seen to have changed the image, if the history does not say so yet.
    pub fn foreign(&self) -> Option<u64> {
        let times = self.mapping[FOREIGN].load(SeqCst);
        (times != self.mapping[SETTLED].load(SeqCst)).then_some(times)
    }

    /// Notes that another program has changed the image. Known after a kill, and after a power cut once [`LastWriteTime::sync`] was called.
    pub(crate) fn count_foreign(&self) {
        self.mapping[FOREIGN].fetch_add(1, SeqCst);
        // Makes the next sync write, whatever the last note is.
        self.durable.store(0, Relaxed);
        self.keep();
    }

    /// Notes durably that another program has changed the image.
    pub(crate) fn doubt(&self) -> io::Result<()> {
        self.count_foreign();
        self.put()?;
        self.file.sync()
    }

    /// The history has this, up to an earlier answer of [`LastWriteTime::foreign`].
    pub(crate) fn settle(&self, times: u64) {
        self.mapping[SETTLED].store(times, SeqCst);
        self.keep();
    }

    /// The words of the gate, shared with it.
    pub(crate) fn words(&self) -> Mapping {
        self.mapping.clone()
    }

    /// What the writers feel of the server whose folder this is.
    ///
    /// # Errors
    /// If the folder has no server.
    pub fn felt_in(folder: &dyn Folder) -> io::Result<FeltFile> {
        folder.open(NAME, false).map(FeltFile)
    }

    /// Counts a change that took this long.
    pub(crate) fn felt(&self, took: Duration) {
        felt::count(&self.mapping, took);
    }

    /// True if writes were in flight when the process died that had this open before.
    pub fn was_busy(&self) -> bool {
        crate::gate::inside(&self.mapping) > 0
    }

    /// Makes the time durable if it changed.
    pub fn sync(&self) -> io::Result<()> {
        let last = self.last();
        if last != self.durable.load(Relaxed) {
            self.put()?;
            self.file.sync()?;
            self.durable.store(last, Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_back_takes_the_note_with_it() {
        let temp = tempfile::tempdir().unwrap();
        let folder = device::Dir::open(temp.path()).unwrap();
        let served = LastWriteTime::open(&folder, Clock::system()).unwrap();
        served.note();
        let first = served.last();
        served.note();
        assert!(served.last() > first, "every note differs");
        served.mapping[NOTED].store(served.clock.now() + 500_000_000, Relaxed);
        let ahead = served.last();
        served.note();
        assert_eq!(served.last(), ahead + 1, "a small step shows as little as it can");
        served.mapping[NOTED].store(served.clock.now() + 3600 * 1_000_000_000, Relaxed);
        assert!(served.is_ahead());
        served.note();
        assert!(!served.is_ahead() && served.last() <= served.clock.now());
    }
}
