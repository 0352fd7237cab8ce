//! Rounds of one conversation, each with a cut of its own: the mirror of a live disk, and that of a group.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use source::Handle;

use super::attempts::{LOOK_EVERY, rest_until};
use super::{Ended, Turns};
use crate::error::SyncError;
use crate::source_end::session::{Round, Session};

/// The shortest time from one cut to the next.
const LEAST: Duration = Duration::from_millis(250);
/// The shortest time between cuts that cost those who write: file systems of live disks are frozen each time, and a hook holds what it holds.
const LEAST_HELD: Duration = Duration::from_secs(1);
/// How long a turn of the loop takes at most.
const TURN: Duration = Duration::from_secs(1);

/// When there is a round.
pub(super) struct Rounds<'a> {
    pub disks: &'a [Handle],
    /// How far the replicas may fall behind while the link keeps up.
    pub rpo: Duration,
    /// A hook holds something around each cut.
    pub hooked: bool,
    pub stop: &'a AtomicBool,
    pub pause: &'a AtomicBool,
    pub turns: &'a Turns,
}

impl Rounds<'_> {
    /// Brings the replicas to one moment after the other, until stopped, paused or an error. There is no round while nothing is written, but now
    /// and then, and at the end.
    pub(super) fn run(
        &self,
        session: &mut Session<'_>,
        mut done: impl FnMut(Round),
    ) -> Result<Ended, SyncError> {
        session.within(self.rpo);
        let mut last: Option<Instant> = None;
        loop {
            // Asked first: what is written before the stop is in the last round.
            let stops = self.stop.load(SeqCst);
            if self.pause.load(SeqCst) && !stops {
                return Ok(Ended::Paused);
            }
            let began = Instant::now();
            let changed = || self.turns.within(|| self.have_changed());
            let due = |last: Instant| last.elapsed() >= self.rpo / 2;
            // Where another command has ended an epoch, what was written before that is in no record of the present one: so now and then, and
            // at the end, it is not asked.
            if stops || last.is_none_or(due) || changed()? {
                done(session.round()?);
                // As for batches: only the first round may be long.
                self.disks.iter().for_each(|disk| disk.be_polite(false));
                last = Some(began);
            }
            if stops {
                return Ok(Ended::Stopped);
            }
            // As long as there is time for two rounds within the bound.
            let least = self.least();
            let interval = (began.elapsed() * 2).max(least).min((self.rpo / 2).max(least));
            self.turns.within(|| self.rest_until(began + interval));
        }
    }

    /// The shortest time from one cut to the next. Those that cost something are four within the bound at most.
    fn least(&self) -> Duration {
        match self.hooked || self.disks.iter().any(|disk| disk.live().is_some()) {
            true => (self.rpo / 4).max(LEAST_HELD),
            false => LEAST,
        }
    }

    fn rest_until(&self, until: Instant) {
        while Instant::now() < until && !self.stop.load(SeqCst) {
            rest_until(until.min(Instant::now() + TURN), self.stop, LOOK_EVERY.min(self.rpo));
            self.turns.turn();
        }
    }

    /// True if something was written since the last cut, or that is not known.
    fn have_changed(&self) -> Result<bool, SyncError> {
        for disk in self.disks {
            let status = disk.status()?;
            if status.dirty > 0 || status.lost.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
