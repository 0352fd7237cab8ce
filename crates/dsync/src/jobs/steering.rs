//! `--bwlimit` while a command runs: it follows the clock, and the file of its job, which is read again on SIGHUP.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context as _, Result};
use link::Pace;

use crate::args::{Command, FarArgs};
use crate::failure::{self, Failure};
use crate::jobs::job;
use crate::output::Output;
use crate::reach::location::Ends;
use crate::terms::bandwidth::{Bandwidth, SendRate};
use crate::terms::units;

/// How often the clock is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A limit that follows the clock, and the file of a job.
pub(crate) struct Steering {
    /// For the sender; `None` where nothing limits it, and nothing will.
    pub pace: Option<Pace>,
    /// True while nothing may be sent.
    pub pause: Arc<AtomicBool>,
}

impl Steering {
    /// Follows the limit from now on. `may_pause`: the command can do nothing for a while.
    ///
    /// # Errors
    /// Bad usage, if it cannot and the limit says so.
    pub(crate) fn begin(limit: Option<&Bandwidth>, may_pause: bool, output: &Output) -> Result<Steering> {
        check(limit, may_pause)?;
        // At a terminal, its end is that of the command.
        let job = job::running().filter(|_| !std::io::stdin().is_terminal());
        let steering =
            Steering { pace: (limit.is_some() || job.is_some()).then(Pace::default), pause: Arc::default() };
        let follows = limit.is_some_and(Bandwidth::varies) || job.is_some();
        let mut now = apply(limit, &steering);
        if now == SendRate::Nothing {
            output.note(&paused(limit));
        }
        if !follows {
            return Ok(steering);
        }
        let mut signals = match job {
            Some(_) => Some(signal_hook::iterator::Signals::new([signal_hook::consts::SIGHUP])?),
            None => None,
        };
        let (mut limit, output) = (limit.cloned(), output.alike());
        let applied = Steering { pace: steering.pace.clone(), pause: Arc::clone(&steering.pause) };
        let follow = move || loop {
            std::thread::sleep(LOOK_EVERY);
            let hung_up = signals.as_mut().is_some_and(|signals| signals.pending().next().is_some());
            if let (true, Some(job)) = (hung_up, job) {
                match reread(job).and_then(|fresh| check(fresh.as_ref(), may_pause).map(|()| fresh)) {
                    Ok(fresh) => limit = fresh,
                    Err(error) => {
                        output.warn(&format!("--bwlimit stays as it is: {}", failure::text(&error)))
                    }
                }
            }
            let before = std::mem::replace(&mut now, apply(limit.as_ref(), &applied));
            if now != before {
                output.note(&match now {
                    SendRate::All => "--bwlimit: no limit now".to_owned(),
                    SendRate::Rate(rate) => format!("--bwlimit: at most {}/s now", units::size(rate)),
                    SendRate::Nothing => paused(limit.as_ref()),
                });
            }
        };
        std::thread::Builder::new().name("bwlimit".into()).spawn(follow).context("cannot start a thread")?;
        Ok(steering)
    }
}

/// Says that nothing is sent, and until when.
fn paused(limit: Option<&Bandwidth>) -> String {
    match limit.and_then(|limit| limit.paused_until(device::local_minute())) {
        Some(minute) => format!("--bwlimit: paused now, until {:02}:{:02}", minute / 60, minute % 60),
        None => "--bwlimit: paused now, at all hours".to_owned(),
    }
}

/// What the file of a job says now.
fn reread(job: &job::Running) -> Result<Option<Bandwidth>> {
    Ok(match job.read_again()?.command {
        Command::Sync(args) => args.far.bwlimit,
        Command::Mirror(args) => args.far.bwlimit,
        Command::Verify(args) => args.far.bwlimit,
        _ => None,
    })
}

/// Refuses hours where the other host sends: they are those of this one.
pub(crate) fn refuse_hours(far: &FarArgs, ends: &Ends) -> Result<(), Failure> {
    let varies = far.bwlimit.as_ref().is_some_and(Bandwidth::varies);
    match &ends.source.host {
        Some(host) if varies => Err(Failure::usage(format!(
            "{host} sends, so --bwlimit cannot follow the hours of this host: give one rate, or run \"dsync sync\" on {host}"
        ))),
        _ => Ok(()),
    }
}

fn check(limit: Option<&Bandwidth>, may_pause: bool) -> Result<()> {
    match limit.is_some_and(Bandwidth::pauses) && !may_pause {
        true => Err(job::at_line(
            "bwlimit",
            Failure::usage(
                "only a mirror can pause: give a rate for these hours, or start the command at other times",
            ),
        )
        .into()),
        false => Ok(()),
    }
}

/// Sets what applies now.
fn apply(limit: Option<&Bandwidth>, steering: &Steering) -> SendRate {
    let allowed = limit.map_or(SendRate::All, |limit| limit.at(device::local_minute()));
    steering.pause.store(allowed == SendRate::Nothing, SeqCst);
    if let Some(pace) = &steering.pace {
        match allowed {
            SendRate::All => pace.set(0),
            SendRate::Rate(rate) => pace.set(rate),
            // What was sent before the pause arrives at the rate that it was sent at.
            SendRate::Nothing => {}
        }
    }
    allowed
}
