//! The attempts of a mirror: what is tried again when an attempt fails, how soon, and when it is given up.
//!
//! A mirror tries again after half a second, and then after pauses that double up to `--rpo` (30 seconds at most); a conversation that
//! lasted longer than the pause resets them. It retries without limit if a link was cut, the replica's disk or file system is away, or
//! the source's server stopped; an error that another attempt cannot fix ends it.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use source::SourceError;

use crate::error::{Class, SyncError};

/// How often a wait is interrupted to check for events, unless the replica may be less behind.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The pause between attempts to connect, at first and at most.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(30);
/// The longest pause where the replica may be hardly behind.
const CLOSE_RETRY: Duration = Duration::from_secs(1);
/// For how long a replica that is in use is requested again at once, and how often after that.
const BUSY_AT_ONCE: Duration = Duration::from_secs(2);
const BUSY_RETRY: Duration = Duration::from_secs(1);

/// Why nothing is moved for a while.
#[derive(Debug)]
pub enum Interruption<'a> {
    /// The source or the replica is in use; it is requested again for that long.
    Waiting(&'a SyncError, Duration),
    /// An attempt failed; another follows after a pause.
    Broken(&'a SyncError, Duration),
}

/// What mirrors that are to be stopped do between attempts.
#[derive(Debug)]
pub struct Attempts<'a> {
    stop: &'a AtomicBool,
    /// How far the replica may fall behind.
    rpo: Duration,
    /// For how long what is in use is waited for, before that counts as a failure. It is two seconds at least: the far side of a
    /// link that broke, or of a killed mirror, may not have noticed yet.
    busy_for: Duration,
    /// The next pause.
    pause: Duration,
    /// When it was first found in use.
    busy: Option<Instant>,
    /// Until both ends were reached once, an error is most likely a mistake of the user.
    worked: bool,
    stopped: bool,
}

impl<'a> Attempts<'a> {
    /// Begins the attempts of a mirror whose replica may fall behind by `rpo`; what is in use is waited for `busy_for`, or two seconds.
    pub fn new(stop: &'a AtomicBool, rpo: Duration, busy_for: Duration) -> Attempts<'a> {
        Attempts { stop, rpo, busy_for, pause: FIRST_RETRY, busy: None, worked: false, stopped: false }
    }

    /// The pause before the next attempt, should this one fail.
    pub(crate) fn pause(&self) -> Duration {
        self.pause
    }

    /// Something was committed, a link has lasted, or an attempt has come to its end: both ends were reached.
    pub fn succeeded(&mut self) {
        (self.pause, self.busy, self.worked) = (FIRST_RETRY, None, true);
    }

    /// An attempt failed: returns before the next, and whether that counts as a failure, unless its error is the end.
    ///
    /// # Errors
    /// That error: another attempt cannot fix it, or none is to be made.
    pub fn failed(&mut self, error: SyncError, tell: &dyn Fn(Interruption<'_>)) -> Result<bool, SyncError> {
        if error.class() == Class::Busy && self.waits(&error, tell) {
            return Ok(false);
        }
        // After a stop was requested, one more attempt is made only.
        if is_final(&error) || !(self.worked || is_outage(&error)) || self.stopped {
            return Err(error);
        }
        self.worked = true;
        // The signal that stops a mirror ends its remote shell as well.
        if !self.stop.load(SeqCst) {
            tell(Interruption::Broken(&error, self.pause));
        }
        self.rest_until(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(self.rpo.clamp(CLOSE_RETRY, LAST_RETRY));
        self.stopped = self.stop.load(SeqCst);
        Ok(true)
    }

    /// Sleeps before the next request for what is in use, unless it was requested for long enough.
    fn waits(&mut self, error: &SyncError, tell: &dyn Fn(Interruption<'_>)) -> bool {
        let waited = self.busy.get_or_insert_with(Instant::now).elapsed();
        let left = self.busy_for.max(BUSY_AT_ONCE).saturating_sub(waited);
        let at_once = waited < BUSY_AT_ONCE;
        if left.is_zero() || (!at_once && self.stop.load(SeqCst)) {
            return false;
        }
        if at_once {
            std::thread::sleep(LOOK_EVERY);
            return true;
        }
        if waited < BUSY_AT_ONCE + BUSY_RETRY {
            tell(Interruption::Waiting(error, left));
        }
        self.rest_until(Instant::now() + BUSY_RETRY.min(left));
        true
    }

    /// Sleeps until then, or until stopped.
    pub fn rest_until(&self, until: Instant) {
        rest_until(until, self.stop, LOOK_EVERY.min(self.rpo));
    }
}

/// Sleeps until then, or until it is to stop, for which it looks every so often.
pub(crate) fn rest_until(until: Instant, stop: &AtomicBool, every: Duration) {
    while Instant::now() < until && !stop.load(SeqCst) {
        std::thread::sleep(every.min(until.saturating_duration_since(Instant::now())));
    }
}

/// Sleeps as long as it is to pause, or until it is to stop. `note` is told that a pause begins, and that it is over.
pub(crate) fn rest_while(pause: &AtomicBool, stop: &AtomicBool, mut note: impl FnMut(bool)) {
    let paused = || pause.load(SeqCst) && !stop.load(SeqCst);
    if paused() {
        note(true);
        while paused() {
            std::thread::sleep(LOOK_EVERY);
        }
        note(false);
    }
}

/// True if another attempt cannot help: another source, another replica, a source that shrank. What is merely in use may be free
/// soon: the far side of a broken link releases the replica when it notices.
fn is_final(error: &SyncError) -> bool {
    match error {
        // The far side of a source's restart.
        SyncError::Source(_) => false,
        _ => error.class().is_refusal(),
    }
}

/// True if a link broke, or the source's server stopped.
fn is_outage(error: &SyncError) -> bool {
    is_cut(error) || matches!(error, SyncError::Source(SourceError::Away(_)))
}

/// True if an established link broke.
pub(crate) fn is_cut(error: &SyncError) -> bool {
    matches!(error, SyncError::Link(link::Error::Cut { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn far(class: Class) -> SyncError {
        SyncError::Far { message: "no".into(), class }
    }

    fn told(attempts: &mut Attempts<'_>, error: SyncError) -> (Option<bool>, Vec<&'static str>) {
        let told = std::cell::RefCell::new(Vec::new());
        let counted = attempts.failed(error, &|trouble| {
            told.borrow_mut().push(match trouble {
                Interruption::Waiting(..) => "waiting",
                Interruption::Broken(..) => "broken",
            });
        });
        (counted.ok(), told.into_inner())
    }

    #[test]
    fn what_never_worked_is_given_up_and_what_worked_is_tried_again_until_stopped() {
        let stop = AtomicBool::new(true);
        let mut attempts = Attempts::new(&stop, Duration::from_secs(5), Duration::ZERO);
        assert_eq!(told(&mut attempts, far(Class::Failed)), (None, vec![]), "a mistake of the user");
        attempts.succeeded();
        assert_eq!(told(&mut attempts, far(Class::Refused)), (None, vec![]), "nothing helps");
        // Stopped meanwhile: one more attempt, without a pause and without a word: the signal may have broken it.
        assert_eq!(told(&mut attempts, far(Class::Failed)), (Some(true), vec![]));
        assert_eq!(told(&mut attempts, far(Class::Failed)), (None, vec![]));
        assert_eq!(attempts.pause(), Duration::from_secs(1));
        attempts.succeeded();
        assert_eq!(attempts.pause(), FIRST_RETRY);
    }

    #[test]
    fn what_is_in_use_is_requested_again_for_as_long_as_was_said() {
        let stop = AtomicBool::new(false);
        let mut attempts = Attempts::new(&stop, Duration::from_secs(5), Duration::from_secs(60));
        assert_eq!(told(&mut attempts, far(Class::Busy)), (Some(false), vec![]), "at once");
        attempts.busy = Instant::now().checked_sub(BUSY_AT_ONCE);
        assert_eq!(told(&mut attempts, far(Class::Busy)), (Some(false), vec!["waiting"]));
        attempts.busy = Instant::now().checked_sub(Duration::from_secs(61));
        assert_eq!(told(&mut attempts, far(Class::Busy)), (None, vec![]), "for long enough");
    }
}
