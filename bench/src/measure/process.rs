//! Programs that are run and measured, and servers in the background. All of them end with the bench, also on Ctrl-C.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Process groups that are alive.
static GROUPS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

fn groups() -> std::sync::MutexGuard<'static, Vec<Pid>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on Ctrl-C ends what runs, and the bench cleans up behind itself.
pub(crate) fn catch_signals() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            INTERRUPTED.store(true, Ordering::SeqCst);
            for &group in groups().iter() {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
        }
    });
    Ok(())
}

/// Fails once the bench was interrupted.
pub(crate) fn go_on() -> Result<()> {
    ensure!(!INTERRUPTED.load(Ordering::SeqCst), "interrupted");
    Ok(())
}

/// True once the bench was interrupted.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// A program by its name, in root's folders too.
pub(crate) fn command(program: &str) -> Command {
    let found = dsync_tests::find(program);
    let mut command = Command::new(found.as_deref().unwrap_or(Path::new(program)));
    command.env("LC_ALL", "C");
    command
}

/// A line for bash, which fails when any part of a pipeline fails.
pub(crate) fn shell(line: &str) -> Command {
    let mut shell = command("bash");
    shell.args(["-o", "pipefail", "-c", line]);
    shell
}

/// A word for [`shell`].
pub(crate) fn quote(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// The files that programs consist of: themselves, and their libraries. Cold caches are about data: what is measured
/// should not begin with reading programs.
pub(crate) fn parts<'a>(programs: impl Iterator<Item = &'a Path>) -> Vec<PathBuf> {
    let mut parts = BTreeSet::new();
    for program in programs {
        let libraries = command("ldd").arg(program).output().map(|output| output.stdout).unwrap_or_default();
        let libraries = String::from_utf8_lossy(&libraries).into_owned();
        parts.extend(libraries.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from));
        parts.insert(program.to_path_buf());
    }
    parts.into_iter().filter(|part| part.is_file()).collect()
}

fn words(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().map(|word| word.to_string_lossy()));
    words.join(" ")
}

/// How a program went.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// From the start to the end, in seconds.
    pub seconds: f64,
    /// Processor time that it and its children took, in seconds.
    pub processor: f64,
    /// Standard output.
    pub stdout: String,
    /// The most memory that it or one of its children had resident, in bytes.
    pub peak: u64,
    /// Bytes that it and its children had read from storage.
    pub read: u64,
    /// Bytes that they wrote to files, whether the page cache took them or storage.
    pub written: u64,
}

/// Runs a program to its end; an error if it fails, or takes longer than `limit`.
pub(crate) fn run(command: &mut Command, limit: Duration) -> Result<Outcome> {
    go_on()?;
    run_always(command, limit)
}

/// As [`run`], but after an interruption too: for what cleans up.
pub(crate) fn run_always(command: &mut Command, limit: Duration) -> Result<Outcome> {
    let text = words(command);
    let (mut out, mut err) = (tempfile::tempfile()?, tempfile::tempfile()?);
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?).process_group(0);
    let read_before = own_io()?;
    let started = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {text}"))?;
    let group = Pid::from_child(&child);
    groups().push(group);
    let (done, timer) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let late = timer.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout);
        if late {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
        late
    });
    let waited = wait(&child);
    let seconds = started.elapsed().as_secs_f64();
    groups().retain(|&other| other != group);
    drop(done);
    let late = watchdog.join().unwrap_or(false);
    let (status, usage) = waited?;
    let (mut stdout, mut stderr) = (String::new(), Vec::new());
    out.rewind()?;
    out.read_to_string(&mut stdout)?;
    if late {
        bail!("{text}: still running after {} s, killed", limit.as_secs());
    }
    if !status.success() {
        err.rewind()?;
        err.read_to_end(&mut stderr)?;
        go_on()?;
        bail!("{text}: {status}: {} {}", last(&String::from_utf8_lossy(&stderr)), last(&stdout));
    }
    let time = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    let processor = time(usage.ru_utime) + time(usage.ru_stime);
    let peak = usage.ru_maxrss as u64 * 1024;
    let read = own_io()?.saturating_sub(read_before);
    let written = usage.ru_oublock as u64 * 512;
    Ok(Outcome { seconds, processor, stdout, peak, read, written })
}

/// The last lines of a text.
fn last(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

/// Waits for a child; its status, and what it and its children used.
fn wait(child: &Child) -> Result<(ExitStatus, libc::rusage)> {
    let pid = child.id() as libc::pid_t;
    loop {
        let mut status = 0;
        // SAFETY: all-zero bytes are a valid rusage.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to values of the right types that live through the call.
        let found = unsafe { libc::wait4(pid, &mut status, 0, &mut usage) };
        if found == pid {
            return Ok((ExitStatus::from_raw(status), usage));
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error).context("waiting for a child");
        }
    }
}

/// Bytes read from storage by this process and by all children that it has waited for.
fn own_io() -> Result<u64> {
    storage_reads(Path::new("/proc/self/io"))
}

fn storage_reads(file: &Path) -> Result<u64> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let line = text.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    Ok(line.and_then(|number| number.trim().parse().ok()).unwrap_or(0))
}

/// A server in the background, killed with its children when dropped.
pub(crate) struct Daemon {
    name: String,
    child: Child,
    log: File,
    ended: bool,
}

impl Daemon {
    /// Starts a server, and waits until a Unix socket accepts a connection.
    pub(crate) fn start(mut command: Command, socket: &Path) -> Result<Daemon> {
        let mut daemon = Daemon::start_bare(&mut command)?;
        let until = Instant::now() + Duration::from_secs(60);
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            daemon.check()?;
            ensure!(Instant::now() < until, "{} does not listen on {}", daemon.name, socket.display());
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    /// Starts a server.
    pub(crate) fn start_bare(command: &mut Command) -> Result<Daemon> {
        go_on()?;
        let name = words(command);
        let log = tempfile::tempfile()?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?).process_group(0);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        groups().push(Pid::from_child(&child));
        Ok(Daemon { name, child, log, ended: false })
    }

    /// Fails if it has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        go_on()?;
        if let Some(status) = self.child.try_wait()? {
            self.ended = true;
            bail!("{} ended ({status}): {}", self.name, self.said());
        }
        Ok(())
    }

    fn said(&self) -> String {
        last(&self.so_far())
    }

    /// What it has written so far.
    pub(crate) fn so_far(&self) -> String {
        let size = self.log.metadata().map_or(0, |meta| meta.len());
        let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        // At its place: the server's own stands in the same open file.
        let have = self.log.read_at(&mut bytes, 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..have]).into_owned()
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Bytes it has read from storage so far.
    pub(crate) fn reads(&self) -> u64 {
        storage_reads(Path::new(&format!("/proc/{}/io", self.child.id()))).unwrap_or(0)
    }

    /// Processor time that it, and those of its children that have ended, have taken so far, in seconds.
    pub(crate) fn processor(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // The name of the program may hold spaces; what follows its bracket begins with the third field.
        let fields = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
        let ticks: u64 = fields.skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum();
        ticks as f64 / rustix::param::clock_ticks_per_second() as f64
    }

    /// The most memory it has had resident, in bytes.
    pub(crate) fn peak(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    /// Ends it as its user would.
    pub(crate) fn stop(mut self) -> Result<()> {
        let _ = rustix::process::kill_process(Pid::from_child(&self.child), Signal::TERM);
        self.ended()
    }

    /// Ends it, and what it runs, as Ctrl-C does.
    pub(crate) fn interrupt(mut self) -> Result<()> {
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), Signal::INT);
        self.ended().or_else(|error| if self.ended { Ok(()) } else { Err(error) })
    }

    fn ended(&mut self) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait()? {
                self.ended = true;
                // Many servers die of the signal; what counts is that they have ended.
                let fine = status.success() || status.signal() == Some(Signal::TERM.as_raw());
                ensure!(fine, "{}: {status}: {}", self.name, self.said());
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        bail!("{} does not end", self.name)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let group = Pid::from_child(&self.child);
        groups().retain(|&other| other != group);
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
        if !self.ended {
            let _ = self.child.wait();
        }
    }
}
