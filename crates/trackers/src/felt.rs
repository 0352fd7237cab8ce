//! What writers feel: how many changes have ended, and how long they took. The server counts in memory that it shares with every process
//! that may open its folder, and whoever reads beside a guest compares two moments.
//!
//! The words are hints for such readers. Nothing depends on their values, so no access to them is ordered.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use device::StateFile;

use crate::gate::LANES;

/// The words, a cache line after those of the gate.
const ENDED: usize = 96;
const NANOS: usize = 97;

/// The words up to the last of them.
pub(crate) const WORDS: usize = 98;

/// How often a thread asks how long it has waited for a processor.
const ASK_EVERY: Duration = Duration::from_millis(1);

/// What was counted up to a moment. Only differences mean something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Felt {
    /// Changes in flight.
    pub inside: u64,
    /// Changes that have ended.
    pub ended: u64,
    /// What these took together, in nanoseconds, with the time that their threads waited for a processor.
    pub nanos: u64,
}

/// The counts of a disk that another process serves.
pub struct FeltFile(pub(crate) Box<dyn StateFile>);

impl FeltFile {
    /// What was counted up to now; `None` if that cannot be read.
    pub fn read(&self) -> Option<Felt> {
        let mut bytes = [0; WORDS * 8];
        self.0.read_at(0, &mut bytes).ok()?;
        let word = |at: usize| bytes[at * 8..].first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
        let inside = LANES.iter().fold(0, |sum: u64, lane| sum.wrapping_add(word(*lane)));
        Some(Felt { inside, ended: word(ENDED), nanos: word(NANOS) })
    }
}

/// Counts a change that has ended.
pub(crate) fn count(words: &[AtomicU64], took: Duration) {
    words[NANOS].fetch_add(took.as_nanos() as u64, Relaxed);
    words[ENDED].fetch_add(1, Relaxed);
}

/// How long the thread of a queue waits for a processor, which no request of it shows: it waits before it takes them in.
#[derive(Default)]
pub(crate) struct Waits {
    asked: Option<Instant>,
    /// `None` inside: the kernel does not count.
    counts: Option<Option<File>>,
    waited: u64,
}

impl Waits {
    /// What the calling thread, always the same, has waited since the last answer above zero.
    pub(crate) fn since(&mut self, now: Instant) -> Duration {
        if self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_EVERY) {
            return Duration::ZERO;
        }
        let first = self.asked.replace(now).is_none();
        let waited = self.read().unwrap_or(0);
        let before = std::mem::replace(&mut self.waited, waited);
        if first { Duration::ZERO } else { Duration::from_nanos(waited.saturating_sub(before)) }
    }

    #[allow(clippy::disallowed_methods, reason = "a file of the kernel")]
    fn read(&mut self) -> Option<u64> {
        let open = || File::open("/proc/thread-self/schedstat").ok();
        let file = self.counts.get_or_insert_with(open).as_ref()?;
        let mut text = [0; 64];
        let len = file.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..len]).ok()?.split_whitespace().nth(1)?.parse().ok()
    }
}
