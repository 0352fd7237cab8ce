//! `qemu-nbd` as a process of ours: started on a file that is open, gone when we are.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::tools::{DESCRIPTORS, missing, path_of_image};

/// How long it may take to end, with its tables to be written to a slow disk.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
/// What of its error text is kept.
const MOST_TEXT: u64 = 16 << 10;

/// How the disk is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Written, by nobody else.
    Write,
    /// Read, and nobody writes.
    Read,
    /// Read, though another process may write. What was written since the opening may be seen, or not; what was not, is.
    ReadBesideWriter,
}

/// A qemu-nbd. Ended in order when dropped, which waits for it.
pub(crate) struct QemuNbd {
    /// Its socket, which has no name any more.
    socket: OwnedFd,
    pidfd: OwnedFd,
    keeper: Option<JoinHandle<()>>,
    ended: Arc<Ended>,
}

/// The error text of a qemu-nbd, once it has ended.
#[derive(Default)]
struct Ended {
    text: Mutex<Option<String>>,
    told: Condvar,
}

impl QemuNbd {
    /// Starts it on the disk in `image`. It may still find that it cannot open that: then its connections end.
    /// With `place`, the socket keeps a name.
    pub(crate) fn start(image: &File, access: Use, place: Option<&Path>) -> io::Result<QemuNbd> {
        let (listener, socket) = place.map_or_else(nameless_socket, socket_at)?;
        let mut command = command(image, access, place.is_some())?;
        command.stdin(OwnedFd::from(listener));
        let (tell, told) = sync_channel(1);
        let ended = Arc::new(Ended::default());
        let end = ended.clone();
        // The kernel kills it with the thread that starts it, so that lives as long.
        let keeper = std::thread::Builder::new().name("qemu-nbd".into()).spawn(move || {
            let started = command.spawn();
            // It holds the listening socket, which must end with the process.
            drop(command);
            let mut child = match started {
                Ok(child) => child,
                Err(e) => {
                    let _ = tell.send(Err(e));
                    return;
                }
            };
            let pidfd = Pid::from_raw(child.id() as i32)
                .ok_or(io::ErrorKind::NotFound.into())
                .and_then(|pid| Ok(pidfd_open(pid, PidfdFlags::empty())?));
            let _ = tell.send(pidfd);
            let mut text = String::new();
            if let Some(errors) = child.stderr.take() {
                let mut errors = errors.take(MOST_TEXT);
                let _ = errors.read_to_string(&mut text);
                // It must not wait for somebody to read the rest.
                let _ = io::copy(&mut errors.into_inner(), &mut io::sink());
            }
            let _ = child.wait();
            *end.text.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
            end.told.notify_all();
        })?;
        let pidfd = told.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        Ok(QemuNbd { socket, pidfd, keeper: Some(keeper), ended })
    }

    /// A path at which this process reaches its socket.
    pub(crate) fn address(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.socket.as_raw_fd()).into()
    }

    /// What it said, if it ends within this time.
    pub(crate) fn last_words(&self, within: Duration) -> Option<String> {
        let text = self.ended.text.lock().unwrap_or_else(PoisonError::into_inner);
        let lives = |text: &mut Option<String>| text.is_none();
        let (text, _) =
            self.ended.told.wait_timeout_while(text, within, lives).unwrap_or_else(PoisonError::into_inner);
        text.clone()
    }

    fn signal(&self, signal: Signal) {
        // One that has ended needs none.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }
}

impl Drop for QemuNbd {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        if self.last_words(ENDS_WITHIN).is_none() {
            self.signal(Signal::KILL);
        }
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

/// A listening socket, and what it is reached by. Its name is gone before anybody else could connect: its folder is the user's alone.
fn nameless_socket() -> io::Result<(UnixListener, OwnedFd)> {
    let folder = tempfile::Builder::new().prefix("dsync-").tempdir()?;
    let path = folder.path().join("nbd");
    let made = device::listen_at(&path, 0o600).and_then(|listener| Ok((listener, hold(&path)?)));
    // With its name in it.
    drop(folder);
    made
}

/// A listening socket at a path, and what it is reached by.
fn socket_at(path: &Path) -> io::Result<(UnixListener, OwnedFd)> {
    // Of a process that was killed. The path may be too long for a socket's.
    let folder =
        openat(CWD, path.parent().unwrap_or(Path::new("/")), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let _ = std::fs::remove_file(path);
    let near = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
        .join(path.file_name().unwrap_or_default());
    let listener = device::listen_at(&near, 0o600)?;
    Ok((listener, hold(path)?))
}

/// What a socket is reached by, also once its name is gone.
pub(crate) fn hold(socket: &Path) -> io::Result<OwnedFd> {
    Ok(openat(CWD, socket, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// The command line: the socket is its standard input, and the image its standard output, until a shell has moved them to where
/// qemu-nbd looks.
fn command(image: &File, access: Use, serves: bool) -> io::Result<Command> {
    missing(&["qemu-nbd", "setpriv"])?;
    let mut command = Command::new("setpriv");
    // What a client was told is written must outlive this process. Of a replica, the journal has that, and its file should not change for long
    // after a kill.
    let signal = if serves { "TERM" } else { "KILL" };
    command.args(["--pdeathsig", signal, "sh", "-c"]);
    // Where this process ended before the kernel was told to kill that one, the shell has another parent.
    command.arg(format!(
        "[ \"$PPID\" = {} ] || exit 1; LISTEN_FDS=1 LISTEN_PID=$$ exec qemu-nbd \"$@\" {DESCRIPTORS}",
        std::process::id()
    ));
    command.arg("sh");
    let cache = if takes_direct(image) { "none" } else { "writeback" };
    // What was no zero stays allocated until its source says that it is one: nothing here looks into what is written.
    command.args(["--shared=64", "--discard=unmap", "--detect-zeroes=off"]).arg(format!("--cache={cache}"));
    let how = match access {
        Use::Write => "lazy-refcounts=off",
        Use::Read => {
            command.arg("--read-only");
            "file.locking=on"
        }
        Use::ReadBesideWriter => {
            command.arg("--read-only");
            "force-share=on"
        }
    };
    command.arg("--image-opts").arg(format!("driver=qcow2,{how},{}", path_of_image("file.")));
    // A terminal's interrupt is for us, who end it in order.
    command.stdout(image.try_clone()?).stderr(Stdio::piped()).process_group(0);
    Ok(command)
}

/// True if the file can bypass the page cache.
fn takes_direct(image: &File) -> bool {
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    openat(CWD, path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).is_ok()
}
