//! Freezing file systems for a moment, and thawing them whatever happens.
//!
//! A process of its own watches: if the freeze lasts too long, or if whoever froze dies, it thaws. Then the freeze proves
//! nothing, and [`Freeze::thaw`] says so.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use device::Mount;
use rustix::fs::FlockOperation;
use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions};

const FIFREEZE: u32 = 0xc004_5877;
const FITHAW: u32 = 0xc004_5878;

/// What can go wrong with a freeze.
#[derive(Debug, thiserror::Error)]
pub enum FreezeError {
    /// It could not be begun; nothing is frozen.
    #[error("can't freeze {}: {error}", place.display())]
    Refused {
        /// The file system.
        place: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Somebody thawed it before its end: the watchdog, when the time was up, or another program.
    #[error("the freeze of {} ended too early, after {} ms: what was read under it may be of several moments", place.display(), after.as_millis())]
    Thawed {
        /// The file system.
        place: PathBuf,
        /// How long it lasted at most.
        after: Duration,
    },
}

/// File systems that are frozen until this is thawed or dropped.
pub struct Freeze {
    mounts: Vec<(PathBuf, File)>,
    began: Instant,
    /// Both end when all is thawed.
    _hurry: Option<Hurry>,
    _watchdog: Watchdog,
}

/// File systems that are about to be frozen, watched over already.
pub struct Prepared {
    mounts: Vec<(PathBuf, File)>,
    hurry: Option<Hurry>,
    watchdog: Watchdog,
}

/// A run of [`flush`] that takes no longer leaves little to write.
const SHORT: Duration = Duration::from_millis(20);
/// Under load a run leaves what came meanwhile: after so many that is as little as it will be.
const RUNS: usize = 4;

impl Prepared {
    /// Lets the file systems write out what they hold in memory until little is left, so that a freeze has little to write
    /// while everybody waits.
    pub fn settle(&self) -> Result<(), FreezeError> {
        let mut before = Duration::MAX;
        for _ in 0..RUNS {
            let began = Instant::now();
            self.mounts.iter().try_for_each(flush_one)?;
            let took = began.elapsed();
            if took < SHORT || took > before / 4 * 3 {
                break;
            }
            before = took;
        }
        Ok(())
    }

    /// Freezes them. From now on the time runs.
    ///
    /// # Errors
    /// If one can't be frozen; then none is.
    pub fn freeze(self) -> Result<Freeze, FreezeError> {
        let Prepared { mounts, hurry, watchdog } = self;
        watchdog.begin().map_err(|error| refused(&mounts, error))?;
        hurry.iter().for_each(Hurry::begin);
        let began = Instant::now();
        let mut freeze = Freeze { mounts: Vec::new(), began, _hurry: hurry, _watchdog: watchdog };
        for (place, file) in mounts {
            if let Err(error) = control(&file, FIFREEZE) {
                let error = match error.raw_os_error() {
                    Some(libc::EBUSY) => {
                        io::Error::new(error.kind(), "it is frozen already, by another program")
                    }
                    Some(libc::EOPNOTSUPP) => {
                        io::Error::new(error.kind(), "this kind of file system can't be frozen")
                    }
                    _ => error,
                };
                // What was frozen so far is thawed as this is dropped.
                drop(freeze);
                return Err(FreezeError::Refused { place, error });
            }
            freeze.mounts.push((place, file));
        }
        Ok(freeze)
    }
}

impl Freeze {
    /// Makes ready to freeze file systems, for at most `limit`.
    pub fn prepare(mounts: &[Mount], limit: Duration) -> Result<Prepared, FreezeError> {
        let mounts = mounts.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let descriptors: Vec<RawFd> = mounts.iter().map(|(_, file)| file.as_raw_fd()).collect();
        let hurry = Hurry::ready();
        let watchdog = Watchdog::start(&descriptors, hurry.as_ref(), limit);
        let watchdog = watchdog.map_err(|error| refused(&mounts, error))?;
        Ok(Prepared { mounts, hurry, watchdog })
    }

    /// Thaws. Returns how long the freeze lasted.
    ///
    /// # Errors
    /// If it had ended before.
    pub fn thaw(mut self) -> Result<Duration, FreezeError> {
        let early = self.end();
        let after = self.began.elapsed();
        match early {
            None => Ok(after),
            Some(place) => Err(FreezeError::Thawed { place, after }),
        }
    }

    /// Thaws everything; the first that was not frozen any more.
    fn end(&mut self) -> Option<PathBuf> {
        let mut early = None;
        for (place, file) in self.mounts.drain(..).rev() {
            if control(&file, FITHAW).is_err() {
                early = Some(place);
            }
        }
        early
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        self.end();
    }
}

/// Lets file systems write out what they hold in memory.
pub(crate) fn flush(mounts: &[Mount]) -> Result<(), FreezeError> {
    mounts.iter().try_for_each(|mount| flush_one(&open(mount)?))
}

fn flush_one((place, file): &(PathBuf, File)) -> Result<(), FreezeError> {
    rustix::fs::syncfs(file).map_err(|e| FreezeError::Refused { place: place.clone(), error: e.into() })
}

fn open(mount: &Mount) -> Result<(PathBuf, File), FreezeError> {
    let place = mount.place.clone();
    match File::open(&place) {
        Ok(file) => Ok((place, file)),
        Err(error) => Err(FreezeError::Refused { place, error }),
    }
}

/// An error that is no file system's own.
fn refused(mounts: &[(PathBuf, File)], error: io::Error) -> FreezeError {
    FreezeError::Refused { place: mounts.first().map(|(place, _)| place.clone()).unwrap_or_default(), error }
}

fn control(file: &File, request: u32) -> io::Result<()> {
    // SAFETY: both requests ignore their argument.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The kernel's switch that lets nobody wait long for a grace period. A freeze waits for three, which take it 30 ms or more
/// without and less than one with it; the price is an interrupt on every processor for each.
struct Hurry(File);

impl Hurry {
    /// `None` where there is no such switch, where it is on already, and while another freeze has it.
    fn ready() -> Option<Hurry> {
        let switch = File::options().read(true).write(true).open("/sys/kernel/rcu_expedited").ok()?;
        rustix::fs::flock(&switch, FlockOperation::NonBlockingLockExclusive).ok()?;
        let mut is_on = [0];
        (switch.read_at(&mut is_on, 0).ok()? == 1 && &is_on == OFF).then_some(Hurry(switch))
    }

    fn begin(&self) {
        // Without it all takes longer, no more.
        let _ = self.0.write_at(ON, 0);
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        let _ = self.0.write_at(OFF, 0);
    }
}

const ON: &[u8; 1] = b"1";
const OFF: &[u8; 1] = b"0";

/// The process that thaws. Started before memory is made ready: what is shared with a child has to be copied when it is
/// written to.
struct Watchdog {
    pid: Pid,
    /// A first byte here begins the freeze, a second one dismisses; the line's end means that we died.
    line: OwnedFd,
}

impl Watchdog {
    fn start(frozen: &[RawFd], hurry: Option<&Hurry>, limit: Duration) -> io::Result<Watchdog> {
        let (ear, line) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let limit = limit.as_millis().min(i32::MAX as u128) as i32;
        // All that the child needs is made before: between fork and exit it may only call what is safe in a signal handler.
        let (ear_fd, line_fd) = (ear.as_raw_fd(), line.as_raw_fd());
        let hurry = hurry.map(|switch| switch.0.as_raw_fd());
        // SAFETY: the child calls nothing but system calls, and leaves by `_exit`: no lock of another thread is touched.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above; the slice lies in memory that the child has a copy of.
            unsafe { watch(frozen, hurry, ear_fd, line_fd, limit) }
        }
        match Pid::from_raw(pid) {
            Some(pid) if pid.as_raw_nonzero().get() > 0 => Ok(Watchdog { pid, line }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// From now on the time runs.
    ///
    /// # Errors
    /// If it is gone: then nothing may be frozen.
    fn begin(&self) -> io::Result<()> {
        rustix::io::write(&self.line, BEGIN)?;
        Ok(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // If it is gone already it has done its work.
        let _ = rustix::io::write(&self.line, DISMISS);
        let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
    }
}

const BEGIN: &[u8; 1] = b"f";
const DISMISS: &[u8; 1] = b".";

/// The next byte of the line; `None` at its end. For the child.
fn hear(ear: RawFd) -> Option<u8> {
    let mut word = 0u8;
    loop {
        // SAFETY: a system call that writes one byte to a variable of ours.
        match unsafe { libc::read(ear, (&raw mut word).cast(), 1) } {
            1 => return Some(word),
            0 => return None,
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

/// The child: waits for the word or for the time, then thaws or leaves.
///
/// # Safety
/// Only for the child of a fork, which it ends. The descriptors are open.
unsafe fn watch(frozen: &[RawFd], hurry: Option<RawFd>, ear: RawFd, line: RawFd, limit: i32) -> ! {
    // SAFETY: system calls with valid arguments only; see the caller.
    unsafe {
        // A Ctrl-C is for the parent, which thaws; and who kills by name means the parent too.
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"thaw-watchdog".as_ptr());
        libc::close(line);
        if hear(ear) != Some(BEGIN[0]) {
            libc::_exit(0);
        }
        let mut wait = libc::pollfd { fd: ear, events: libc::POLLIN, revents: 0 };
        let mut left = limit;
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
        let end = now.tv_sec * 1000 + now.tv_nsec / 1_000_000 + i64::from(limit);
        let ready = loop {
            let ready = libc::poll(&mut wait, 1, left);
            if ready >= 0 || *libc::__errno_location() != libc::EINTR {
                break ready;
            }
            libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now);
            left = (end - now.tv_sec * 1000 - now.tv_nsec / 1_000_000).clamp(0, i64::from(limit)) as i32;
        };
        if ready <= 0 || hear(ear) != Some(DISMISS[0]) {
            for &fd in frozen {
                libc::ioctl(fd, FITHAW as _, 0);
            }
            if let Some(switch) = hurry {
                libc::pwrite(switch, OFF.as_ptr().cast(), 1, 0);
            }
        }
        libc::_exit(0)
    }
}
