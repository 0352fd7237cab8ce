//! Exit codes, and errors of the command itself.

use std::fmt;
use std::io::Write;

use anyhow::{Context as _, Result};

/// Failed.
pub(crate) const FAILED: u8 = 1;
/// Bad usage.
pub(crate) const USAGE: u8 = 2;
/// Tracking was lost and `--method tracked` was demanded.
pub(crate) const LOST: u8 = 3;
/// A check has nothing to judge: "unknown" for monitors.
pub(crate) const UNKNOWN: u8 = 3;
/// Lineage, state or a key refuses.
pub(crate) const REFUSED: u8 = 4;
/// `verify` found differences.
pub(crate) const DIFFERS: u8 = 5;
/// Another program uses the source or the replica, which may be free soon.
pub(crate) const BUSY: u8 = 6;
/// Interrupted by a signal.
pub(crate) const INTERRUPTED: u8 = 130;

/// An error of the command itself, with its exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// An attempt that failed.
    pub(crate) fn failed(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: FAILED }
    }

    /// Bad usage.
    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: USAGE }
    }

    /// An error that another program reports: only the exit code matters.
    pub(crate) fn told(error: &sync::SyncError) -> Failure {
        Failure { message: String::new(), code: of_class(error.class()) }
    }

    /// Refused while another program is at work.
    pub(crate) fn busy(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: BUSY }
    }

    /// What changed is not known.
    pub(crate) fn lost(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: LOST }
    }

    /// Lineage, state or a lock forbids it.
    pub(crate) fn refused(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: REFUSED }
    }

    /// A signal came before the end.
    pub(crate) fn interrupted(message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code: INTERRUPTED }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The exit code of an error: that of the first cause with one.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if let Some(failure) = cause.downcast_ref::<Failure>() {
            return failure.code;
        }
        if let Some(error) = cause.downcast_ref::<sync::SyncError>() {
            return of_class(error.class());
        }
        let busy = cause.downcast_ref::<source::SourceError>().is_some_and(|e| e.is_busy())
            || cause.downcast_ref::<replica::ReplicaError>().is_some_and(|e| e.is_busy())
            || cause.downcast_ref::<device::DeviceError>().is_some_and(|e| e.is_busy())
            || cause.downcast_ref::<link::Error>().is_some_and(|e| e.is_busy());
        if busy {
            return BUSY;
        }
        let refused = cause.downcast_ref::<source::SourceError>().map(|e| e.is_refusal()).or_else(|| {
            cause
                .downcast_ref::<replica::ReplicaError>()
                .map(|e| e.is_refusal())
                .or_else(|| cause.downcast_ref::<trackers::TrackError>().map(|e| e.is_refusal()))
                .or_else(|| cause.downcast_ref::<device::DeviceError>().map(|_| false))
                .or_else(|| cause.downcast_ref::<link::Error>().map(|e| e.is_refusal()))
        });
        match refused {
            Some(true) => return REFUSED,
            Some(false) => return FAILED,
            None => {}
        }
    }
    FAILED
}

fn of_class(class: sync::Class) -> u8 {
    match class {
        sync::Class::Failed | sync::Class::Unreadable => FAILED,
        sync::Class::Lost => LOST,
        sync::Class::Refused | sync::Class::Diverged | sync::Class::Changed | sync::Class::Away => REFUSED,
        sync::Class::Busy => BUSY,
    }
}

/// The error's text, with causes after a colon, without repetitions.
pub(crate) fn text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    advised(text)
}

/// A system's error with what its number leaves out.
fn advised(mut text: String) -> String {
    // EFBIG does not name the limit of the process, which is the usual reason.
    if text.contains("(os error 27)") {
        text.push_str(" for the file system, or for the limit of \"ulimit -f\"");
    }
    // ENOMEM of a mapping or a thread: usually a limit, and seldom that the machine has no memory.
    if text.contains("(os error 12)") {
        text.push_str(": raise the limit of memory of this process (\"ulimit -v\", LimitAS= of a unit)");
    }
    // EAGAIN of a thread: its stack found no memory, or there are too many.
    if text.contains("a thread") && text.contains("(os error 11)") {
        text.push_str(
            ": raise the limit of memory of this process (\"ulimit -v\", LimitAS= of a unit), or that of its user's threads (\"ulimit -u\", TasksMax=)",
        );
    }
    text
}

/// Ends the program, as it ends wherever it lacks memory, where the standard library panics for it: as a thread begins.
pub(crate) fn on_panic() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        match panic.payload().downcast_ref::<String>().filter(|text| text.contains("(os error 12)")) {
            Some(text) => {
                let _ = writeln!(std::io::stderr(), "dsync: {}", advised(text.clone()));
                std::process::exit(i32::from(FAILED));
            }
            None => usual(panic),
        }
    }));
}

/// Ends the program with code 130 when it is interrupted, after `says`. Work in progress is as safe as after any other
/// kill.
pub(crate) fn on_interrupt(says: impl FnOnce() + Send + 'static) -> Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    let waiting = std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            says();
            std::process::exit(i32::from(INTERRUPTED));
        }
    });
    waiting.context("cannot start a thread")?;
    Ok(())
}
