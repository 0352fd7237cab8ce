//! Where a reader waits for the guest: all reads of a view pass here, whoever makes them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use trackers::Felt;

use crate::views::pace::{Pacer, ReadRate};

/// How long a sleep lasts at most before the guest is looked at again.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Returns what the guest has felt so far; `None` if that is not known.
pub(crate) type Feels = Box<dyn Fn() -> Option<Felt> + Send + Sync>;

/// Readers of one disk, and the guest that they are polite to.
pub(crate) struct Courtesy {
    /// `None`: there is no guest, or none that is known of.
    feels: Option<Feels>,
    polite: AtomicBool,
    begun: Instant,
    /// Held for memory operations and the question alone, never while waiting.
    state: Mutex<State>,
    waits: AtomicU64,
}

struct State {
    pace: Pacer,
    /// From when on the next read may begin.
    free_at: Instant,
    allowed: ReadRate,
}

impl Courtesy {
    pub(crate) fn new(feels: Option<Feels>) -> Courtesy {
        let begun = Instant::now();
        let state = State { pace: Pacer::new(), free_at: begun, allowed: ReadRate::All };
        Courtesy {
            feels,
            polite: AtomicBool::new(false),
            begun,
            state: state.into(),
            waits: AtomicU64::new(0),
        }
    }

    /// The courtesy of readers that wait for nobody.
    pub(crate) fn none() -> Arc<Courtesy> {
        Arc::new(Courtesy::new(None))
    }

    /// Whether readers wait for the guest from now on. At first they do not.
    pub(crate) fn be_polite(&self, polite: bool) {
        self.polite.store(polite, Relaxed);
    }

    /// How many reads have waited.
    pub(crate) fn waits(&self) -> u64 {
        self.waits.load(Relaxed)
    }

    /// The most bytes that a reader should ask for at once.
    pub(crate) fn at_once(&self) -> u64 {
        match self.polite.load(Relaxed) {
            true => self.state().allowed.at_once(),
            false => u64::MAX,
        }
    }

    /// Waits until so many bytes may be read, and returns whether the guest is writing. `first` is called once before a wait.
    pub(crate) fn wait(&self, bytes: u64, first: impl FnOnce()) -> bool {
        let mut first = Some(first);
        loop {
            let pause = match self.pause(bytes) {
                Ok(writes) => return writes,
                Err(pause) => pause,
            };
            if let Some(first) = first.take() {
                self.waits.fetch_add(1, Relaxed);
                first();
            }
            sleep(pause.min(LOOK_EVERY));
        }
    }

    /// Counts the bytes if they may be read now, and returns whether the guest is writing. Otherwise how long to wait.
    fn pause(&self, bytes: u64) -> Result<bool, Duration> {
        let feels = self.feels.as_ref().filter(|_| self.polite.load(Relaxed));
        let Some(felt) = feels.and_then(|feels| feels()) else { return Ok(false) };
        let mut state = self.state();
        let now = Instant::now();
        state.allowed = state.pace.look(now.saturating_duration_since(self.begun), felt);
        let next = match state.allowed {
            ReadRate::All => now,
            ReadRate::Nothing => return Err(LOOK_EVERY),
            ReadRate::Rate(_) if state.free_at > now => return Err(state.free_at - now),
            ReadRate::Rate(rate) => now + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64),
        };
        state.free_at = next;
        state.pace.took(bytes);
        Ok(state.allowed != ReadRate::All)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}
