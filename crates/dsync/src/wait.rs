//! `--wait`: a command whose source or replica is in use tries again until it is free.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::args::WaitArg;
use crate::failure::{self, BUSY, Failure};
use crate::output::Output;
use crate::terms::units;

/// The pause between attempts, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// The advice at the end of a message that something is in use, before the other way out.
const ADVICE: &str = ": wait for it, as --wait does, or ";

/// Makes attempts until one ends in another way than that the source or the replica is in use, or for as long as the user
/// has said. An attempt that is refused for this reason has changed nothing.
pub(crate) fn until_free<T>(
    wait: &WaitArg,
    output: &Output,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let Some(limit) = wait.wait else { return attempt() };
    let (began, mut pause) = (Instant::now(), FIRST_PAUSE);
    let mut told = String::new();
    loop {
        let error = match attempt() {
            Err(error) if failure::code(&error) == BUSY => error,
            ended => return ended,
        };
        let Some(left) = limit.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) else {
            let waited = units::seconds(limit.as_secs_f64());
            let why = failure::text(&error).replace(ADVICE, ": wait longer, or ");
            return Err(Failure::busy(format!("gave up after waiting {waited}: {why}")).into());
        };
        let why = failure::text(&error);
        if why != told {
            output.finish();
            output.note(&waiting(&why, left));
            told = why;
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// What is said of a wait, for what alone: who waits needs no advice to do so.
pub(crate) fn waiting(why: &str, left: Duration) -> String {
    let what = why.split_once(ADVICE).map_or(why, |(what, _)| what);
    format!("waiting for up to {}: {what}", units::seconds(left.as_secs_f64().round()))
}
