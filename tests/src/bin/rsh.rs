//! A remote shell for tests: called as `rsh HOST WORDS...` it runs the words on this machine, as ssh would on the
//! other, and may cut the line.
//!
//! Environment:
//! - `RSH_CUT`: bytes towards the far side after which the line is cut and the far side killed.
//! - `RSH_DEAF`: bytes from the far side after which nothing more of what it says arrives; half a second later the line
//!   is cut.
//! - `RSH_LOG`: a file to which the bytes carried are appended at the end: `UP DOWN`, one line a call.
//! - `RSH_RATE`: bytes a second, each way; without it as fast as it goes.
//! - `RSH_STATE`: the far side's DSYNC_STATE_DIR.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// Carries bytes until the end of the input, an error, or the cut. True at the cut.
fn carry(mut from: impl Read, mut to: impl Write, carried: &AtomicU64, cut: Option<u64>) -> bool {
    let rate = number("RSH_RATE");
    let started = Instant::now();
    let mut buf = [0; 1 << 16];
    let mut total = 0u64;
    loop {
        let room = cut.map_or(buf.len() as u64, |cut| (cut - total).min(buf.len() as u64)) as usize;
        if room == 0 {
            return true;
        }
        let Ok(len @ 1..) = from.read(&mut buf[..room]) else { return false };
        if to.write_all(&buf[..len]).and_then(|()| to.flush()).is_err() {
            return false;
        }
        total += len as u64;
        carried.store(total, Ordering::SeqCst);
        if let Some(rate) = rate {
            let due = Duration::from_secs_f64(total as f64 / rate as f64);
            std::thread::sleep(due.saturating_sub(started.elapsed()));
        }
    }
}

fn log(up: &AtomicU64, down: &AtomicU64) {
    let Some(path) = std::env::var_os("RSH_LOG") else { return };
    let line = format!("{} {}\n", up.load(Ordering::SeqCst), down.load(Ordering::SeqCst));
    let written = OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .and_then(|mut f| f.write_all(line.as_bytes()));
    written.expect("RSH_LOG");
}

fn main() {
    let mut words = std::env::args().skip(1).skip_while(|word| word.starts_with('-'));
    let host = words.next().unwrap_or_else(|| panic!("rsh HOST COMMAND..."));
    // ssh joins the words with blanks and hands them to the user's shell on the far side.
    let line = words.collect::<Vec<_>>().join(" ");
    if host == "unreachable" {
        eprintln!("rsh: connect to host {host}: No route to host");
        exit(255);
    }
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &line]).stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
    if let Some(state) = std::env::var_os("RSH_STATE") {
        command.env("DSYNC_STATE_DIR", state);
    }
    let mut child = command.spawn().expect("/bin/sh");
    let group = rustix::process::Pid::from_child(&child);
    let (up, down) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
    let (up2, down2) = (up.clone(), down.clone());
    std::thread::spawn(move || {
        if carry(std::io::stdin(), input, &up, number("RSH_CUT")) {
            // What was carried is the far side's to read: a cut line delivers what was on it.
            std::thread::sleep(Duration::from_millis(100));
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            log(&up, &down2);
            exit(255);
        }
    });
    let deaf = number("RSH_DEAF");
    let mut output = output;
    if carry(&mut output, std::io::stdout(), &down, deaf) {
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        std::thread::sleep(Duration::from_millis(500));
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        log(&up2, &down);
        exit(255);
    }
    let status = child.wait().expect("the far side");
    log(&up2, &down);
    exit(status.code().unwrap_or(255));
}
