//! A process that thaws file systems when the one that froze them cannot.
//!
//! It thaws when the time is up, or when its parent is dead, and continues until that has an effect: a freeze may take effect long
//! after its start, when a write that it waited for ends, even after its parent was killed.
//!
//! ```text
//!  parent                     watchdog
//!  start ───────────────────▶ waits
//!  a byte for each freeze ──▶ the first: the time runs
//!  freezes, reads, thaws      time is up: thaws, again and again
//!  dismisses ───────────────▶ leaves
//!  (dies) ── end of line ───▶ thaws once more, leaves
//! ```
//!
//! The line ends when the last thread of the parent has left the kernel. So nothing is frozen behind the last thaw.
//!
//! It runs in its own session and, where that is allowed, in its own control groups (`dsync-thaw`, at the top of the hierarchy), and is
//! exempt from the OOM killer: `systemctl kill`, `cgroup.kill` and `memory.oom.group` of dsync's service do not reach it. If both
//! processes are killed by their ids, by their open files (`fuser -k` on the mount), or together with the container whose hierarchy the
//! group is in, the file system stays frozen until `fsfreeze --unfreeze`. The next sync refuses, and says that.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::pipe::PipeFlags;
use rustix::process::{Pid, WaitOptions};

pub(crate) const FITHAW: u32 = 0xc004_5878;
/// Switches expedited grace periods off.
pub(crate) const OFF: &[u8; 1] = b"0";

const BEGIN: &[u8; 1] = b"f";
const DISMISS: &[u8; 1] = b".";

/// Time between attempts to thaw, in milliseconds.
const PAUSE: i32 = 20;

/// The arguments of a watchdog.
pub(crate) struct WatchdogArgs<'a> {
    /// The file systems, in the order of freezing.
    pub frozen: Vec<BorrowedFd<'a>>,
    /// The kernel's switch to turn off.
    pub rcu: Option<BorrowedFd<'a>>,
    /// The time from the first freeze.
    pub limit: Duration,
}

/// See the module. Started before memory is prepared: pages shared with a child are copied when they are written.
pub(crate) struct Watchdog {
    pid: Pid,
    line: OwnedFd,
    shelter: Vec<PathBuf>,
}

impl Watchdog {
    /// Starts a watchdog, outside of the process's own control group.
    pub(crate) fn start(args: &WatchdogArgs) -> io::Result<Watchdog> {
        let (ear, line) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let child = ChildArgs::new(args, ear.as_raw_fd());
        // SAFETY: the child calls nothing but system calls, and leaves by `_exit`: no lock of another thread is touched.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: this is the child of a fork, and its arguments name descriptors that are open.
            unsafe { watch(&child) }
        }
        match Pid::from_raw(pid) {
            Some(pid) if pid.as_raw_nonzero().get() > 0 => {
                Ok(Watchdog { pid, line, shelter: take_shelter(pid) })
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// To be called before each freeze. The first call starts the time.
    ///
    /// # Errors
    /// If the watchdog is gone: then nothing may be frozen.
    pub(crate) fn begin(&self) -> io::Result<()> {
        rustix::io::write(&self.line, BEGIN)?;
        Ok(())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // If it is gone already, its work is done.
        let _ = rustix::io::write(&self.line, DISMISS);
        let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
        for place in &self.shelter {
            // Another watchdog may still be there.
            let _ = std::fs::remove_dir(place);
        }
    }
}

/// The mounted hierarchies of control groups by which a service manager may kill services.
const HIERARCHIES: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"];
const SHELTER: &str = "dsync-thaw";

/// Moves a process into its own control group, and exempts it from the OOM killer: what kills all of a service must not
/// kill it. If that is not allowed it stays where it is. Returns the groups.
#[allow(clippy::disallowed_methods, reason = "in procfs")]
fn take_shelter(pid: Pid) -> Vec<PathBuf> {
    let pid = pid.as_raw_nonzero().get();
    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), "-1000");
    let hierarchies = HIERARCHIES.iter().map(Path::new);
    // Elsewhere this would create an ordinary folder.
    let hierarchies = hierarchies.filter(|place| place.join("cgroup.procs").exists());
    hierarchies.map(|place| place.join(SHELTER)).filter(|place| move_to(place, pid)).collect()
}

/// Attempts to enter a control group, which another watchdog may remove between its creation and our move.
const TRIES: usize = 5;

#[allow(clippy::disallowed_methods, reason = "in cgroupfs")]
fn move_to(group: &Path, pid: i32) -> bool {
    (0..TRIES).any(|_| {
        let _ = std::fs::create_dir(group);
        std::fs::write(group.join("cgroup.procs"), pid.to_string()).is_ok()
    })
}

/// What the child needs, allocated before: between fork and exit it may only call what is safe in a signal handler.
struct ChildArgs {
    frozen: Vec<RawFd>,
    rcu: Option<RawFd>,
    ear: RawFd,
    /// Milliseconds.
    limit: i64,
    /// Ranges of descriptors to close, inclusive.
    closed: Vec<(RawFd, RawFd)>,
}

impl ChildArgs {
    fn new(args: &WatchdogArgs, ear: RawFd) -> ChildArgs {
        let frozen: Vec<RawFd> = args.frozen.iter().map(AsRawFd::as_raw_fd).collect();
        let rcu = args.rcu.map(|switch| switch.as_raw_fd());
        let mut kept: Vec<RawFd> = frozen.iter().copied().chain(rcu).chain([ear]).collect();
        kept.sort_unstable();
        let (mut closed, mut next) = (Vec::new(), 0);
        for fd in kept {
            if fd > next {
                closed.push((next, fd - 1));
            }
            next = fd + 1;
        }
        closed.push((next, RawFd::MAX));
        let limit = i64::try_from(args.limit.as_millis()).unwrap_or(i64::MAX / 2);
        ChildArgs { frozen, rcu, ear, limit, closed }
    }
}

/// The child: waits for a byte or for the time, thaws, exits.
///
/// # Safety
/// Only for the child of a fork, which it ends. The descriptors are open.
unsafe fn watch(child: &ChildArgs) -> ! {
    // SAFETY: system calls with valid arguments only; see the caller.
    unsafe {
        // Ctrl-C is for the parent, which thaws; a kill by name hits the parent too.
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"thaw-watchdog".as_ptr());
        // Otherwise the parent's locks and pipes would stay open here, and the line's other end with them.
        for &(first, last) in &child.closed {
            libc::syscall(libc::SYS_close_range, first, last, 0);
        }
        let mut begun = 0;
        let mut end = None;
        loop {
            let left = end.map_or(-1, |end| i64::clamp(end - now(), 0, i64::from(i32::MAX)) as i32);
            let mut wait = libc::pollfd { fd: child.ear, events: libc::POLLIN, revents: 0 };
            if libc::poll(&mut wait, 1, left) <= 0 {
                if end.is_some_and(|end| now() >= end) {
                    thaw(child, begun);
                    end = Some(now() + i64::from(PAUSE));
                }
                continue;
            }
            match hear(child.ear) {
                Some(word) if word == BEGIN[0] => {
                    begun = (begun + 1).min(child.frozen.len());
                    end = end.or_else(|| Some(now().saturating_add(child.limit)));
                }
                Some(_) => libc::_exit(0),
                None => break,
            }
        }
        while !thaw(child, begun) {
            libc::poll(std::ptr::null_mut(), 0, PAUSE);
        }
        libc::_exit(0)
    }
}

/// Thaws what may be frozen. False if it should be tried again.
///
/// # Safety
/// As [`watch`].
unsafe fn thaw(child: &ChildArgs, begun: usize) -> bool {
    let mut done = true;
    // SAFETY: system calls with valid arguments only; see the caller.
    unsafe {
        for &fd in child.frozen.iter().take(begun) {
            // Not an error: not frozen, or cannot be frozen.
            let harmless = [libc::EINVAL, libc::EOPNOTSUPP, libc::EPERM];
            done &= libc::ioctl(fd, FITHAW as _, 0) >= 0 || harmless.contains(&*libc::__errno_location());
        }
        if let Some(switch) = child.rcu {
            libc::pwrite(switch, OFF.as_ptr().cast(), 1, 0);
        }
    }
    done
}

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

/// Milliseconds since some moment.
fn now() -> i64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a system call that writes to a variable of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec * 1000 + now.tv_nsec / 1_000_000
}
