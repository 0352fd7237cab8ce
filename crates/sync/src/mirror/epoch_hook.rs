//! The hook around the end of an epoch of a mirror: it gets ready while batches go on, so the replica falls no further behind.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cut_hook::CutHook;
use crate::error::SyncError;

/// A hook that is asked to hold what it holds, until the epoch was cut.
pub(super) struct EpochHook {
    hook: Arc<dyn CutHook>,
    step: Arc<Mutex<Step>>,
    /// How long it is left alone after it has failed.
    respite: Duration,
}

/// Where the hook is.
enum Step {
    /// Nothing was asked of it, or it has failed: then nothing is asked before that time.
    Idle(Option<Instant>),
    /// It gets ready.
    Preparing,
    /// It is, or has failed.
    Ended(Result<(), SyncError>),
    /// The epoch was cut, and is not committed yet.
    Committing,
    /// Nobody waits for it any more.
    Abandoned,
}

/// What a hook answers.
pub(super) enum HookAnswer {
    /// It is not ready yet.
    Waiting,
    /// It holds: cut now, and tell it with [`EpochHook::cut`].
    Ready,
    /// It failed; the next request begins anew.
    Failed(SyncError),
}

fn lock(step: &Mutex<Step>) -> MutexGuard<'_, Step> {
    step.lock().unwrap_or_else(PoisonError::into_inner)
}

impl EpochHook {
    /// A hook of which nothing was asked.
    pub(super) fn new(hook: Arc<dyn CutHook>, respite: Duration) -> EpochHook {
        EpochHook { hook, step: Arc::new(Mutex::new(Step::Idle(None))), respite }
    }

    /// True if nothing is asked of it, and something may be.
    pub(super) fn may_be_asked(&self) -> bool {
        matches!(*lock(&self.step), Step::Idle(until) if until.is_none_or(|until| until <= Instant::now()))
    }

    /// True if an answer other than [`HookAnswer::Waiting`] is there.
    pub(super) fn has_answered(&self) -> bool {
        matches!(*lock(&self.step), Step::Ended(_))
    }

    /// Asks it to hold. The first request starts it; later ones say how far it is. `at_once`: even if it has just failed.
    pub(super) fn hold(&self, at_once: bool) -> HookAnswer {
        let idle = at_once || self.may_be_asked();
        let mut step = lock(&self.step);
        match std::mem::replace(&mut *step, Step::Preparing) {
            Step::Idle(_) | Step::Abandoned if idle => {}
            Step::Ended(Ok(())) => {
                *step = Step::Ended(Ok(()));
                return HookAnswer::Ready;
            }
            Step::Ended(Err(error)) => {
                *step = Step::Idle(Some(Instant::now() + self.respite));
                return HookAnswer::Failed(error);
            }
            waits => {
                *step = waits;
                return HookAnswer::Waiting;
            }
        }
        let (hook, shared) = (Arc::clone(&self.hook), Arc::clone(&self.step));
        let prepare = move || {
            let ended = hook.before();
            let mut step = lock(&shared);
            match *step {
                Step::Abandoned if ended.is_ok() => hook.after(false),
                Step::Abandoned => {}
                _ => *step = Step::Ended(ended),
            }
        };
        match std::thread::Builder::new().name("hook".into()).spawn(prepare) {
            Ok(_) => HookAnswer::Waiting,
            Err(error) => {
                *step = Step::Idle(Some(Instant::now() + self.respite));
                HookAnswer::Failed(SyncError::io("start a thread")(error))
            }
        }
    }

    /// The epoch was cut, or that failed.
    pub(super) fn cut(&self, made: bool) {
        *lock(&self.step) = if made { Step::Committing } else { Step::Idle(None) };
        self.hook.after(made);
    }

    /// The epoch was committed, and the hook told so: it may be asked again.
    pub(super) fn committed(&self) {
        let mut step = lock(&self.step);
        if matches!(*step, Step::Committing) {
            *step = Step::Idle(None);
        }
    }
}

impl Drop for EpochHook {
    /// What it holds is let go.
    fn drop(&mut self) {
        let before = std::mem::replace(&mut *lock(&self.step), Step::Abandoned);
        if let Step::Ended(Ok(())) = before {
            self.hook.after(false);
        }
    }
}
