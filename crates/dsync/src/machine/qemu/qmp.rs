//! A client of QMP, the protocol of QEMU's monitors: one request at a time, in JSON. A monitor serves one client at a time, too; the others wait.

use std::io::{self, BufRead, BufReader, ErrorKind, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, sendmsg, socket_with,
};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::machine::hypervisor::patience;
use crate::machine::part::LOOK_EVERY;
use crate::terms::units;

/// How long another client may keep the monitor.
const FREE_WITHIN: Duration = Duration::from_secs(20);

/// A connection to a monitor.
pub(super) struct Qmp {
    socket: PathBuf,
    reader: BufReader<UnixStream>,
    /// The process that listens there.
    pub pid: u32,
}

impl Qmp {
    /// Connects to a monitor; `None` if nobody listens there.
    ///
    /// # Errors
    /// If it is no monitor, or another program keeps it.
    pub(super) fn connect(socket: &Path) -> Result<Option<Qmp>, Failure> {
        let failed = |error: io::Error| {
            Failure::failed(format!("cannot connect to the monitor {}: {error}", socket.display()))
        };
        let free_within = FREE_WITHIN.min(patience());
        let busy = || {
            Failure::busy(format!(
                "the monitor {} does not answer: another program is connected to it, and QEMU talks to one at a time. Wait for it, as --wait does, or \
                 give QEMU one more for dsync, with another -qmp unix:PATH,server=on,wait=off",
                socket.display()
            ))
        };
        let stream = match dial(socket, Instant::now() + free_within) {
            Ok(stream) => stream,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(error) if is_late(&error) => return Err(busy()),
            Err(error) => return Err(failed(error)),
        };
        let peer = rustix::net::sockopt::socket_peercred(&stream).map_err(io::Error::from).map_err(failed)?;
        let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
        let mut qmp = Qmp { socket: socket.to_path_buf(), reader: BufReader::new(stream), pid };
        let greeting = match qmp.line(free_within) {
            Ok(Some(line)) => line,
            // It ended as it was asked.
            Ok(None) => return Ok(None),
            Err(error) if is_late(&error) => return Err(busy()),
            Err(error) => return Err(failed(error)),
        };
        if serde_json::from_str::<Value>(&greeting).ok().is_none_or(|said| said["QMP"].is_null()) {
            return Err(qmp.foreign());
        }
        match qmp.ask("qmp_capabilities", json!({}))? {
            Ok(_) => Ok(Some(qmp)),
            Err(why) => Err(qmp.refused("talk", &why)),
        }
    }

    fn foreign(&self) -> Failure {
        Failure::refused(format!(
            "{} is no QMP monitor: start QEMU with -qmp unix:PATH,server=on,wait=off, and name that",
            self.socket.display()
        ))
    }

    /// The failure of a request that QEMU refuses.
    pub(super) fn refused(&self, what: &str, why: &str) -> Failure {
        Failure::failed(format!("the QEMU at {} does not {what}: {why}", self.socket.display()))
    }

    /// Runs a command; an inner `Err` is what QEMU says if it fails.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub(super) fn ask(&mut self, command: &str, arguments: Value) -> Result<Result<Value, String>, Failure> {
        self.request(command, arguments, None)
    }

    /// Runs a command with which a file is handed over.
    ///
    /// # Errors
    /// If QEMU does not answer.
    pub(super) fn hand_over(
        &mut self,
        command: &str,
        arguments: Value,
        file: impl AsFd,
    ) -> Result<Result<Value, String>, Failure> {
        self.request(command, arguments, Some(file.as_fd()))
    }

    /// Runs a command that does not fail but where QEMU is not as it should be.
    ///
    /// # Errors
    /// What QEMU says.
    pub(super) fn tell(&mut self, command: &str, arguments: Value) -> Result<Value, Failure> {
        self.ask(command, arguments)?.map_err(|why| self.refused(&format!("run \"{command}\""), &why))
    }

    fn request(
        &mut self,
        command: &str,
        arguments: Value,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<Result<Value, String>, Failure> {
        let failed = |error: io::Error, socket: &Path| {
            let socket = socket.display();
            Failure::failed(match is_late(&error) {
                true => format!(
                    "the QEMU at {socket} has not answered \"{command}\" within {}",
                    units::seconds(patience().as_secs_f64())
                ),
                false => format!("the QEMU at {socket} went away at \"{command}\": {error}"),
            })
        };
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        send(self.reader.get_ref(), text.as_bytes(), file).map_err(|error| failed(error, &self.socket))?;
        let until = Instant::now() + patience();
        loop {
            let line = self.line(until.saturating_duration_since(Instant::now()));
            let line = line.and_then(|line| line.ok_or_else(|| ErrorKind::UnexpectedEof.into()));
            let line = line.map_err(|error| failed(error, &self.socket))?;
            let mut said: Value = serde_json::from_str(&line).map_err(|_| self.foreign())?;
            if !said["error"].is_null() {
                return Ok(Err(said["error"]["desc"].as_str().unwrap_or("it does not say why").to_owned()));
            }
            // All else are events.
            if said.get("return").is_some() {
                return Ok(Ok(said["return"].take()));
            }
        }
    }

    /// The next line; `None` at the end.
    fn line(&mut self, within: Duration) -> io::Result<Option<String>> {
        let until = Instant::now() + within;
        let mut line = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            self.reader.get_ref().set_read_timeout(Some(left))?;
            match self.reader.read_until(b'\n', &mut line) {
                Ok(_) if line.is_empty() => return Ok(None),
                Ok(_) => return Ok(Some(String::from_utf8_lossy(&line).into_owned())),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Connects, or waits for a place in the queue of those that want to.
fn dial(socket: &Path, until: Instant) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(socket)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&stream, &address) {
            Ok(()) => {
                let stream = UnixStream::from(stream);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            // The queue is full.
            Err(Errno::AGAIN) if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Sends all of a text, and a file with its beginning.
fn send(stream: &UnixStream, text: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<()> {
    stream.set_write_timeout(Some(patience()))?;
    let mut sent = 0;
    while sent < text.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = file.into_iter().filter(|_| sent == 0).collect();
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        sent += match sendmsg(stream, &[IoSlice::new(&text[sent..])], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => 0,
            sent => sent?,
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A monitor that says this to whoever connects, and answers each request with the next of these.
    fn monitor(says: &'static [u8], answers: &'static [&'static str]) -> (tempfile::TempDir, PathBuf) {
        let temp = tempfile::tempdir().unwrap();
        let socket = temp.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(says).unwrap();
            for answer in answers {
                let mut request = [0; 4096];
                if stream.read(&mut request).unwrap_or(0) == 0 {
                    return;
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        (temp, socket)
    }

    const GREETING: &[u8] = b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";

    #[test]
    fn answers_are_told_from_events_and_errors() {
        let (_temp, socket) = monitor(
            GREETING,
            &[
                "{\"return\": {}}\r\n",
                "{\"event\": \"STOP\"}\r\n{\"event\": \"RESUME\", \"data\": {}}\r\n{\"return\": {\"a\": 1}}\r\n",
                "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such node\"}}\r\n",
                "{\"return\": [",
            ],
        );
        let mut qmp = Qmp::connect(&socket).unwrap().unwrap();
        assert_eq!(qmp.pid, std::process::id());
        assert_eq!(qmp.ask("a", json!({})).unwrap().unwrap()["a"], 1);
        assert_eq!(qmp.ask("b", json!({})).unwrap().unwrap_err(), "no such node");
        assert!(qmp.ask("c", json!({})).is_err());
    }

    #[test]
    fn what_is_no_monitor_is_refused() {
        for says in [&b"QEMU 7.2.0 monitor - type 'help'\n"[..], b"{}\n", b"\xff\n"] {
            let (_temp, socket) = monitor(says, &[]);
            let Err(error) = Qmp::connect(&socket) else { panic!("{says:?}") };
            assert!(error.to_string().contains("is no QMP monitor"), "{error}");
        }
        assert!(Qmp::connect(Path::new("/nowhere/qmp")).unwrap().is_none());
    }
}
