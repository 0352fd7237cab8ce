//! A limit on bytes per second.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// How much may be caught up after a pause. With chunks of the same size, at most 100 ms' worth is sent at once.
const SLACK: Duration = Duration::from_millis(50);

/// How long a sleep lasts at most before a changed limit is noticed.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// A limit in bytes per second that may be changed while it applies; copies share it. Zero is no limit.
#[derive(Debug, Clone, Default)]
pub struct Pace(Arc<AtomicU64>);

impl Pace {
    /// A limit.
    pub fn new(per_second: u64) -> Pace {
        Pace(Arc::new(per_second.into()))
    }

    /// The limit now.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Changes the limit.
    pub fn set(&self, per_second: u64) {
        self.0.store(per_second, Relaxed);
    }
}

/// Written as the number that it is now.
impl Serialize for Pace {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.get().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Pace {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Pace, D::Error> {
        u64::deserialize(deserializer).map(Pace::new)
    }
}

/// A token bucket, stored as the time from which more may pass.
pub struct Rate {
    pace: Pace,
    /// What the pace was when that time was calculated.
    per_second: u64,
    free_at: Instant,
}

impl Rate {
    /// A limit in bytes per second; at least one.
    pub fn new(per_second: u64) -> Rate {
        Rate::at(Pace::new(per_second.max(1)))
    }

    /// A limit that may change.
    pub(crate) fn at(pace: Pace) -> Rate {
        Rate { per_second: pace.get(), pace, free_at: Instant::now() }
    }

    /// The most that one write should carry.
    pub(crate) fn chunk(&self) -> usize {
        match self.pace.get() {
            0 => usize::MAX,
            per_second => (per_second / 20).clamp(1, 1 << 20) as usize,
        }
    }

    /// True if the rate is so low that collecting data before sending would leave the peer without any for too long.
    pub(crate) fn is_slow(&self) -> bool {
        (1..1 << 20).contains(&self.pace.get())
    }

    /// Sleeps until more may pass.
    pub fn wait(&mut self) {
        let _ = self.wait_while(|| Ok::<_, std::convert::Infallible>(()));
    }

    /// Sleeps until more may pass, as long as the other side may still want it: `wanted` is asked several times a second.
    ///
    /// # Errors
    /// If `wanted` fails.
    pub fn wait_while<E>(&mut self, wanted: impl Fn() -> Result<(), E>) -> Result<(), E> {
        loop {
            let (now, per_second) = (Instant::now(), self.pace.get());
            if per_second != self.per_second {
                // What was charged at another rate is forgiven.
                (self.per_second, self.free_at) = (per_second, now);
            }
            match self.free_at.checked_duration_since(now) {
                Some(early) if !early.is_zero() => sleep(early.min(LOOK_EVERY)),
                _ => {
                    self.free_at = self.free_at.max(now.checked_sub(SLACK).unwrap_or(now));
                    return Ok(());
                }
            }
            wanted()?;
        }
    }

    /// Counts what has passed.
    pub fn charge(&mut self, bytes: u64) {
        if self.per_second > 0 {
            self.free_at += Duration::from_secs_f64(bytes as f64 / self.per_second as f64);
        }
    }
}

/// A writer with a rate limit.
pub struct Limited<W> {
    inner: W,
    rate: Rate,
}

impl<W: Write> Limited<W> {
    /// Limits `inner`.
    pub fn new(inner: W, bytes_per_second: u64) -> Limited<W> {
        Limited { inner, rate: Rate::new(bytes_per_second) }
    }
}

impl<W: Write> Write for Limited<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.rate.wait();
        let written = self.inner.write(&buf[..buf.len().min(self.rate.chunk())])?;
        self.rate.charge(written as u64);
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
