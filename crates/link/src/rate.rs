//! A limit on bytes per second.

use std::io::{self, Write};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How much may be caught up after a pause. With chunks of the same size, at most 100 ms' worth is sent at once.
const SLACK: Duration = Duration::from_millis(50);

/// A token bucket, stored as the time from which more may pass.
pub struct Rate {
    per_second: u64,
    free_at: Instant,
}

impl Rate {
    /// A limit in bytes per second; at least one.
    pub fn new(per_second: u64) -> Rate {
        Rate { per_second: per_second.max(1), free_at: Instant::now() }
    }

    /// The most that one write should carry.
    pub(crate) fn chunk(&self) -> usize {
        (self.per_second / 20).clamp(1, 1 << 20) as usize
    }

    /// True if the rate is so low that collecting data before sending would leave the peer without any for too long.
    pub(crate) fn is_slow(&self) -> bool {
        self.per_second < 1 << 20
    }

    /// Sleeps until more may pass.
    pub fn wait(&mut self) {
        let now = Instant::now();
        match self.free_at.checked_duration_since(now) {
            Some(early) => sleep(early),
            None => self.free_at = self.free_at.max(now.checked_sub(SLACK).unwrap_or(now)),
        }
    }

    /// Counts what has passed.
    pub fn charge(&mut self, bytes: u64) {
        self.free_at += Duration::from_secs_f64(bytes as f64 / self.per_second as f64);
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
