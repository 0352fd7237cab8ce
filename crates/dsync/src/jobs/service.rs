//! What a service manager such as systemd offers: a listening socket (sd_listen_fds(3)), and to be told how the service
//! is (sd_notify(3)). Without one, all of it does nothing.
//!
//! `serve` and `receive` serve a socket that was passed to them and leave it as it is: they are woken by
//! a descriptor of their own (`device::Bell`), never by shutting the socket down, because the service manager holds the same socket and
//! passes it to the next process. Clients that connect in between wait in its queue.
//!
//! `READY=1` is sent when clients can connect; by a mirror when the first sync has been accepted by both sides. With a watchdog, a thread
//! asks the loop whether it turns, and sends `WATCHDOG=1` only then: `serve` and `receive` ring the bell of each thread that accepts
//! clients, and the next ring finds out whether the last one was heard; the loop of a mirror that cuts batches counts its turns
//! (`sync/src/mirror/turns.rs`). A disk that hangs does not stop it: ending the server would not help the disk, and clients get their
//! data when it comes back.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use listenfd::ListenFd;
use rustix::net::sockopt::socket_acceptconn;

use crate::failure::Failure;
use crate::output::Output;

/// The end of a terminal, or a SIGHUP that is meant for a program that reads its settings again, is not the end of this process: there is
/// nothing to read again, and others use its disk. A handler, because a signal that is ignored stays so for the programs that this one starts.
pub(crate) fn outlive_terminal() -> Result<()> {
    signal_hook::flag::register(signal_hook::consts::SIGHUP, Arc::default())?;
    Ok(())
}

/// A socket on which the service manager has begun to listen.
pub(crate) enum Inherited {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// The socket that was passed to this process, if one was. The service manager goes on listening on it when this program
/// has ended. Called before there are threads, because it changes the environment.
///
/// # Errors
/// Bad usage: several sockets, or one that is not a listening stream socket of TCP or Unix.
pub(crate) fn inherited() -> Result<Option<Inherited>> {
    let is_ours = std::env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string());
    let count = std::env::var("LISTEN_FDS").unwrap_or_default();
    match (is_ours, count.as_str()) {
        (false, _) | (true, "" | "0") => return Ok(None),
        (true, "1") => {}
        _ => {
            return Err(Failure::usage(format!(
                "LISTEN_FDS is {count}, and this program serves one socket: pass one, such as with one Listen line in the \
                 socket unit"
            ))
            .into());
        }
    }
    let mut passed = ListenFd::from_env();
    let socket = match (passed.take_unix_listener(0), passed.take_tcp_listener(0)) {
        (Ok(Some(unix)), _) => Inherited::Unix(unix),
        (_, Ok(Some(tcp))) => Inherited::Tcp(tcp),
        (_, other) => {
            let why = other.err().map_or_else(String::new, |error| format!(" ({error})"));
            return Err(Failure::usage(format!(
                "the socket passed in LISTEN_FDS is not a stream socket of TCP or Unix{why}: use ListenStream= with a path or \
                 an address"
            ))
            .into());
        }
    };
    let fd = match &socket {
        Inherited::Unix(unix) => unix.as_fd(),
        Inherited::Tcp(tcp) => tcp.as_fd(),
    };
    if !socket_acceptconn(fd).unwrap_or(false) {
        let why =
            "the socket passed in LISTEN_FDS is connected, not listening: set Accept=no in the socket unit";
        return Err(Failure::usage(why).into());
    }
    Ok(Some(socket))
}

/// The service manager, if this process is a service that reports to it.
pub(crate) struct Manager {
    socket: Option<UnixDatagram>,
    is_ready: AtomicBool,
    last: Mutex<Option<Instant>>,
}

impl Manager {
    /// The one that the environment names. Warns if it cannot be reached.
    pub(crate) fn find(output: &Output) -> Manager {
        let socket = std::env::var("NOTIFY_SOCKET").ok().filter(|name| !name.is_empty()).and_then(|name| {
            connect(&name)
                .inspect_err(|error| {
                    output.warn(&format!("cannot report to the service manager at {name}: {error}"));
                })
                .ok()
        });
        Manager { socket, is_ready: AtomicBool::new(false), last: Mutex::new(None) }
    }

    /// The service works, and what it does.
    pub(crate) fn ready(&self, status: &str) {
        let prefix = if self.is_ready.swap(true, SeqCst) { "" } else { "READY=1\n" };
        self.send(&format!("{prefix}STATUS={}", link::printable(status)));
    }

    /// What the service does now.
    pub(crate) fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", link::printable(status)));
    }

    /// True if there was no status for so long, or none yet.
    pub(crate) fn is_due(&self, every: Duration) -> bool {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        self.socket.is_some() && last.is_none_or(|last| last.elapsed() >= every)
    }

    /// The service is about to end.
    pub(crate) fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// Runs a service. If the manager watches it, it is told that the service is well, as long as `is_awake` says so: often
    /// enough that one slow answer does no harm.
    pub(crate) fn watched<T>(
        &self,
        is_awake: impl Fn() -> bool + Send,
        run: impl FnOnce() -> T,
    ) -> Result<T> {
        let Some(limit) = watchdog() else { return Ok(run()) };
        std::thread::scope(|scope| {
            let (ends, ended) = channel::<()>();
            let watch = move || {
                while ended.recv_timeout(limit / 4) == Err(RecvTimeoutError::Timeout) {
                    if is_awake() {
                        self.send("WATCHDOG=1");
                    }
                }
            };
            let watching = std::thread::Builder::new().name("watchdog".into());
            watching.spawn_scoped(scope, watch).context("cannot start a thread")?;
            let result = run();
            drop(ends);
            Ok(result)
        })
    }

    fn send(&self, state: &str) {
        let Some(socket) = &self.socket else { return };
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        // A manager that is gone does not end the service.
        let _ = socket.send(state.as_bytes());
    }
}

/// Connects to the manager's socket: a path, or an abstract name after an "@".
fn connect(name: &str) -> std::io::Result<UnixDatagram> {
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    // A manager that does not read must not stop the work.
    socket.set_write_timeout(Some(Duration::from_secs(1)))?;
    Ok(socket)
}

/// The time without a sign of life after which the manager ends this process, if it watches it.
fn watchdog() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let is_ours = std::env::var_os("WATCHDOG_PID").is_none()
        || number("WATCHDOG_PID") == Some(std::process::id().into());
    number("WATCHDOG_USEC").filter(|time| is_ours && *time > 0).map(Duration::from_micros)
}
