//! One TLS connection with a trusted peer, while its steps still have a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustls::{AlertDescription, CertificateError, Connection, OtherError};

use crate::{Error, Key};

/// Makes a connection notice within `timeout` that its peer has vanished, and carry as much as it can.
pub(super) fn tune(socket: &TcpStream, timeout: Duration) {
    // All are optional: what the system refuses is left as it is.
    let _ = socket.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(socket, true);
    let second = Duration::from_secs(1);
    let _ = sockopt::set_tcp_keepidle(socket, (timeout / 3).max(second));
    let _ = sockopt::set_tcp_keepintvl(socket, (timeout / 6).max(second));
    let _ = sockopt::set_tcp_keepcnt(socket, 4);
    let _ = sockopt::set_tcp_user_timeout(socket, u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
    // Other algorithms take a lost packet for congestion: one in a thousand makes them crawl on a far link.
    let _ = sockopt::set_tcp_congestion(socket, "bbr");
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) enum ConnectError {
    Io(io::Error),
    Tls(rustls::Error),
}

impl ConnectError {
    /// True if the other side does not trust the key.
    pub(super) fn is_distrust(&self) -> bool {
        matches!(self, ConnectError::Tls(rustls::Error::AlertReceived(AlertDescription::CertificateUnknown)))
    }

    /// The error to report about `peer`.
    pub(super) fn error(self, peer: &str) -> Error {
        let peer = peer.to_string();
        match self {
            // None of these means that it does not speak TLS.
            ConnectError::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
                Error::Connect { peer, why: "no answer in time".into() }
            }
            ConnectError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => Error::Connect {
                peer,
                why: "it closed the connection before it answered: it is shutting down or has too many connections"
                    .into(),
            },
            ConnectError::Io(error) => Error::Connect { peer, why: error.to_string() },
            ConnectError::Tls(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(error))))
                if error.is::<Error>() =>
            {
                error.downcast_ref::<Error>().cloned().unwrap_or(Error::Tls { peer, why: error.to_string() })
            }
            ConnectError::Tls(rustls::Error::InvalidMessage(_)) => {
                Error::Tls { peer, why: "what it sent is not TLS".into() }
            }
            ConnectError::Tls(error) => Error::Tls { peer, why: error.to_string() },
        }
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> ConnectError {
        ConnectError::Io(error)
    }
}

/// A connection whose other end has shown a trusted key.
pub(super) struct TlsConnection {
    pub(super) socket: Arc<TcpStream>,
    pub(super) tls: Connection,
}

impl TlsConnection {
    /// Both sides' part of the handshake, all of it before `until`.
    pub(super) fn handshake(
        socket: Arc<TcpStream>,
        mut tls: Connection,
        until: Instant,
    ) -> Result<TlsConnection, ConnectError> {
        // Bounded by what is passed in: never more than a chunk at a time.
        tls.set_buffer_limit(None);
        let mut connection = TlsConnection { socket, tls };
        while connection.tls.is_handshaking() {
            connection.turn(until)?;
        }
        connection.flush(until)?;
        Ok(connection)
    }

    /// The peer's key.
    pub(super) fn key(&self) -> Option<Key> {
        self.tls.peer_certificates().and_then(|shown| Key::from_spki(shown.first()?))
    }

    /// Sends what there is to be sent, then takes what comes next.
    fn turn(&mut self, until: Instant) -> Result<(), ConnectError> {
        self.flush(until)?;
        if !self.tls.is_handshaking() {
            return Ok(());
        }
        self.take(until)
    }

    fn take(&mut self, until: Instant) -> Result<(), ConnectError> {
        if self.tls.read_tls(&mut Timed { socket: &self.socket, until })? == 0 {
            return Err(ConnectError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        if let Err(error) = self.tls.process_new_packets() {
            // The other side is told why, if it listens.
            let _ = self.flush(until);
            self.part(until);
            return Err(ConnectError::Tls(error));
        }
        Ok(())
    }

    fn flush(&mut self, until: Instant) -> Result<(), ConnectError> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut Timed { socket: &self.socket, until })?;
        }
        Ok(())
    }

    /// Fills `buf`, before `until`.
    pub(super) fn read_exact(&mut self, buf: &mut [u8], until: Instant) -> Result<(), ConnectError> {
        let mut have = 0;
        while have < buf.len() {
            match self.tls.reader().read(&mut buf[have..]) {
                Ok(0) => return Err(ConnectError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => have += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.take(until)?,
                Err(error) => return Err(ConnectError::Io(error)),
            }
        }
        Ok(())
    }

    /// Sends all of `bytes`, before `until`.
    pub(super) fn write_all(&mut self, bytes: &[u8], until: Instant) -> Result<(), ConnectError> {
        self.tls.writer().write_all(bytes)?;
        self.flush(until)
    }

    /// Stops sending, and listens for a moment: closing at once could discard what was sent last.
    pub(super) fn part(&mut self, until: Instant) {
        let until = until.min(Instant::now() + Duration::from_secs(1));
        let _ = self.socket.shutdown(std::net::Shutdown::Write);
        let mut heard = [0; 4096];
        let mut timed = Timed { socket: &self.socket, until };
        for _ in 0..64 {
            if !matches!(timed.read(&mut heard), Ok(1..)) {
                break;
            }
        }
    }
}

/// A socket with a deadline for all reads and writes together.
struct Timed<'a> {
    socket: &'a TcpStream,
    until: Instant,
}

impl Timed<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

fn late(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::WouldBlock { io::ErrorKind::TimedOut.into() } else { error }
}

impl Read for Timed<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            self.socket.set_read_timeout(self.left()?)?;
            match (&mut &*self.socket).read(buf) {
                // After a stop and continue: calls with a timeout are not restarted automatically.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map_err(late),
            }
        }
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        loop {
            self.socket.set_write_timeout(self.left()?)?;
            match (&mut &*self.socket).write(buf) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return done.map_err(late),
            }
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
