//! Freezing file systems for a moment, and thawing them whatever happens.
//!
//! A process of its own watches: if the freeze lasts too long, or if whoever froze dies, it thaws. Then the freeze proves
//! nothing, and [`Freeze::thaw`] says so.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use device::Mount;
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
    watchdog: Option<Watchdog>,
}

impl Freeze {
    /// Freezes file systems, for at most `limit`. What they hold in memory is written out first.
    ///
    /// # Errors
    /// If one can't be frozen; then none is.
    pub fn begin(mounts: &[Mount], limit: Duration) -> Result<Freeze, FreezeError> {
        let mut files = Vec::with_capacity(mounts.len());
        for mount in mounts {
            let refused = |error| FreezeError::Refused { place: mount.place.clone(), error };
            let file = File::open(&mount.place).map_err(refused)?;
            // Before, so that little is left to write when everybody waits.
            rustix::fs::syncfs(&file).map_err(|e| refused(e.into()))?;
            files.push((mount.place.clone(), file));
        }
        let descriptors: Vec<RawFd> = files.iter().map(|(_, file)| file.as_raw_fd()).collect();
        let place = || mounts.first().map(|m| m.place.clone()).unwrap_or_default();
        let watchdog = Watchdog::start(&descriptors, limit)
            .map_err(|error| FreezeError::Refused { place: place(), error })?;
        let mut freeze = Freeze { mounts: Vec::new(), began: Instant::now(), watchdog: Some(watchdog) };
        for (place, file) in files {
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
        if let Some(watchdog) = self.watchdog.take() {
            watchdog.dismiss();
        }
        early
    }
}

impl Drop for Freeze {
    fn drop(&mut self) {
        self.end();
    }
}

fn control(file: &File, request: u32) -> io::Result<()> {
    // SAFETY: both requests ignore their argument.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The process that thaws.
struct Watchdog {
    pid: Pid,
    /// A byte here dismisses it; its end without one means that we died.
    line: OwnedFd,
}

impl Watchdog {
    fn start(frozen: &[RawFd], limit: Duration) -> io::Result<Watchdog> {
        let (ear, line) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let limit = limit.as_millis().min(i32::MAX as u128) as i32;
        // All that the child needs is made before: between fork and exit it may only call what is safe in a signal handler.
        let (ear_fd, line_fd) = (ear.as_raw_fd(), line.as_raw_fd());
        // SAFETY: the child calls nothing but system calls, and leaves by `_exit`: no lock of another thread is touched.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: as above; the slice lies in memory that the child has a copy of.
            unsafe { watch(frozen, ear_fd, line_fd, limit) }
        }
        match Pid::from_raw(pid) {
            Some(pid) if pid.as_raw_nonzero().get() > 0 => Ok(Watchdog { pid, line }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn dismiss(self) {
        // If it is gone already it has done its work.
        let _ = rustix::io::write(&self.line, b".");
        let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
    }
}

/// The child: waits for the word or for the time, then thaws or leaves.
///
/// # Safety
/// Only for the child of a fork, which it ends. The descriptors are open.
unsafe fn watch(frozen: &[RawFd], ear: RawFd, line: RawFd, limit: i32) -> ! {
    // SAFETY: system calls with valid arguments only; see the caller.
    unsafe {
        // A Ctrl-C is for the parent, which thaws; and who kills by name means the parent too.
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"thaw-watchdog".as_ptr());
        libc::close(line);
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
        let mut word = 0u8;
        let dismissed = ready > 0 && libc::read(ear, (&raw mut word).cast(), 1) == 1;
        if !dismissed {
            for &fd in frozen {
                libc::ioctl(fd, FITHAW as _, 0);
            }
        }
        libc::_exit(0)
    }
}
