//! A child process that has so long to end.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Runs a command to its end, in a process group of its own: a terminal's interrupt is not for it. `None` if it has not ended within `limit`: then the
/// group was killed.
///
/// # Errors
/// If it cannot be started.
pub(super) fn output_within(command: &mut Command, limit: Duration) -> io::Result<Option<Output>> {
    let mut child = command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let pid = Pid::from_child(&child);
    let readers = (reader(child.stdout.take()), reader(child.stderr.take()));
    let in_time = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
    let in_time = in_time.and_then(|ended| ends(&ended, Instant::now() + limit));
    if !matches!(in_time, Ok(true)) {
        // It was not waited for yet, so the number is its own.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let status = child.wait()?;
    if !in_time? {
        return Ok(None);
    }
    let (stdout, stderr) = (readers.0.join().unwrap_or_default(), readers.1.join().unwrap_or_default());
    Ok(Some(Output { status, stdout, stderr }))
}

/// Reads all that a child says, which would wait for that otherwise.
fn reader(from: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut said = Vec::new();
        let _ = from.map(|mut from| from.read_to_end(&mut said));
        said
    })
}

/// True if the process of this descriptor ends before then.
fn ends(process: &OwnedFd, then: Instant) -> io::Result<bool> {
    loop {
        let left = then.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn script(text: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn a_child_that_hangs_is_killed_with_what_it_has_started() {
        let temp = tempfile::tempdir().unwrap();
        let lives = temp.path().join("lives");
        let text = format!("(sleep 3600; true) & echo $! >{}; wait", lives.display());
        let output = output_within(&mut script(&text), Duration::from_millis(300)).unwrap();
        assert!(output.is_none());
        let started = std::fs::read_to_string(lives).unwrap_or_default();
        let gone = || std::fs::read_to_string(format!("/proc/{}/cmdline", started.trim()));
        while gone().is_ok_and(|words| !words.is_empty()) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn all_that_a_child_says_is_read() {
        let text = "head -c 300000 /dev/zero; head -c 200000 /dev/zero >&2; exit 3";
        let output = output_within(&mut script(text), LONG).unwrap().unwrap();
        assert_eq!((output.stdout.len(), output.stderr.len()), (300_000, 200_000));
        assert_eq!(output.status.code(), Some(3));
        assert!(output_within(&mut Command::new("/nowhere"), LONG).is_err());
    }
}
