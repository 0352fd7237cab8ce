//! What is written down of who is at work: the process, the time, and messages.

use std::time::{SystemTime, UNIX_EPOCH};

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process, for which no later one of its number is taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMark {
    /// Its number.
    pub process: u32,
    /// When it began, as the kernel counts: numbers are used again.
    born: u64,
}

impl ProcessMark {
    /// This process.
    pub(crate) fn this() -> ProcessMark {
        ProcessMark::of(std::process::id())
    }

    pub(crate) fn of(process: u32) -> ProcessMark {
        ProcessMark { process, born: born(process).unwrap_or(0) }
    }

    /// A process that has ended.
    #[cfg(test)]
    pub(crate) fn gone() -> ProcessMark {
        let this = ProcessMark::this();
        ProcessMark { born: this.born.wrapping_sub(1), ..this }
    }

    /// True if it lives, as far as that can be seen from here.
    pub fn is_alive(&self) -> bool {
        born(self.process).map_or_else(|| is_hidden(self.process), |born| born == self.born)
    }
}

/// When a process began, in ticks since the boot.
#[allow(clippy::disallowed_methods, reason = "in procfs")]
fn born(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program, in parentheses, may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    // One that has ended is there until its parent has asked how.
    let is_over = fields.next().is_none_or(|state| ["Z", "X"].contains(&state));
    fields.nth(18)?.parse().ok().filter(|_| !is_over)
}

/// True for a process of another user, of which no more may be seen here than that it is there.
fn is_hidden(process: u32) -> bool {
    let process = i32::try_from(process).ok().and_then(Pid::from_raw);
    process.is_some_and(|process| test_kill_process(process) == Err(Errno::PERM))
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// The first characters of a text that have room in so many bytes.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    let ends = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    &text[..ends.take_while(|at| *at <= most).last().unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_not_another_one_of_its_number() {
        assert!(ProcessMark::this().is_alive());
        assert!(!ProcessMark::gone().is_alive());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mark = ProcessMark::of(child.id());
        assert!(mark.is_alive());
        child.kill().unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while mark.is_alive() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(!mark.is_alive(), "its parent has not asked yet");
        child.wait().unwrap();
    }
}
