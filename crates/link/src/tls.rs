//! TLS 1.3 with both sides' raw public keys (RFC 7250): no certificates, no authorities. Who is trusted says [`Keys`].

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, DigitallySignedStruct,
    DistinguishedName, OtherError, ServerConfig, ServerConnection, SignatureScheme,
};

use crate::keys::{Own, host_name};
use crate::{Error, Key, Keys, Result};

/// Whose key must come.
#[derive(Debug)]
enum Whom {
    /// The host's that was called: its name in messages, and the names under which its key may be pinned.
    Called { peer: String, names: [String; 2] },
    /// That of one who calls: any that is pinned, or of those only the ones named.
    Caller { from: Vec<String> },
}

/// Judges the key that the peer shows, before anything of it is believed.
#[derive(Debug)]
struct Check {
    keys: Keys,
    whom: Whom,
    algorithms: WebPkiSupportedAlgorithms,
}

impl Check {
    fn new(keys: &Keys, whom: Whom) -> Check {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        Check { keys: keys.clone(), whom, algorithms }
    }

    fn judge(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let key = Key::from_spki(shown).ok_or(CertificateError::BadEncoding)?;
        self.trusted(key).map_err(|error| {
            rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
        })
    }

    fn trusted(&self, key: Key) -> Result<()> {
        let pins = self.keys.pins()?;
        let pin = match &self.whom {
            Whom::Called { peer, names } => {
                // A pin of HOST:PORT comes before one of HOST.
                let pin = names.iter().find_map(|name| pins.iter().find(|pin| pin.name == *name));
                let [_, name] = names.clone();
                let pin = pin.ok_or_else(|| Error::Unknown { peer: peer.clone(), name, key })?;
                if pin.key != key {
                    let (peer, name) = (peer.clone(), pin.name.clone());
                    return Err(Error::Swapped { peer, name, pinned: pin.key, shown: key });
                }
                pin
            }
            Whom::Caller { from } => {
                let ours = |name: &String| from.is_empty() || from.contains(name);
                let of_key = || pins.iter().filter(|pin| pin.key == key);
                // One key may be pinned under several names: the one that serves best counts.
                let best = of_key().max_by_key(|pin| (ours(&pin.name), !pin.has_expired()));
                let unknown = || Error::Unknown { peer: "the caller".into(), name: "NAME".into(), key };
                let pin = best.ok_or_else(unknown)?;
                if !ours(&pin.name) {
                    return Err(Error::NotFrom { name: pin.name.clone(), key });
                }
                pin
            }
        };
        match pin.has_expired() {
            true => Err(Error::Expired { name: pin.name.clone(), key }),
            false => Ok(()),
        }
    }

    fn signed(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// TLS 1.2 is not spoken.
fn no_tls12() -> Result<HandshakeSignatureValid, rustls::Error> {
    Err(rustls::Error::General("TLS 1.2 is not spoken here".into()))
}

/// What both sides' verifiers say of signatures.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            no_tls12()
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            key: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, rustls::Error> {
            self.signed(message, key, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }

        fn requires_raw_public_keys(&self) -> bool {
            true
        }
    };
}

impl ServerCertVerifier for Check {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.judge(shown).map(|()| ServerCertVerified::assertion())
    }

    signatures!();
}

impl ClientCertVerifier for Check {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.judge(shown).map(|()| ClientCertVerified::assertion())
    }

    signatures!();
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn certified(own: &Own) -> Result<Arc<CertifiedKey>, rustls::Error> {
    let secret = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(own.secret.as_slice()))?;
    Ok(Arc::new(CertifiedKey::new(vec![own.key.to_spki().into()], secret)))
}

fn no_config(error: rustls::Error) -> Error {
    Error::Tls { peer: "this side".into(), why: error.to_string() }
}

/// How a side calls another, and with which key.
pub(crate) struct Caller {
    peer: String,
    own: Key,
    config: Arc<ClientConfig>,
}

impl Caller {
    /// Calls `host` at `port` with the own key of `keys`, and believes only the key that is pinned for it there.
    pub(crate) fn new(keys: &Keys, host: &str, port: u16) -> Result<Caller> {
        let own = keys.own_with_secret()?;
        let peer = format!("{host}:{port}");
        let whom = Whom::Called { peer: peer.clone(), names: [peer.clone(), host.to_string()] };
        let config = (|| {
            let mut config = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(&[&TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Check::new(keys, whom)))
                .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified(
                    &own,
                )?)));
            config.enable_sni = false;
            // Every lane shows its key.
            config.resumption = Resumption::disabled();
            Ok(Arc::new(config))
        })();
        Ok(Caller { peer, own: own.key, config: config.map_err(no_config)? })
    }

    /// `HOST:PORT`.
    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    pub(crate) fn shake(&self, socket: TcpStream, until: Instant) -> Result<Secured> {
        let name = ServerName::try_from("dsync")
            .map_err(|error| Error::Tls { peer: self.peer.clone(), why: error.to_string() })?;
        let tls = ClientConnection::new(Arc::clone(&self.config), name).map_err(no_config)?;
        Secured::shake(Arc::new(socket), tls.into(), until).map_err(|failed| self.error(failed))
    }

    /// What a failure means to the side that calls.
    pub(crate) fn error(&self, failed: Failed) -> Error {
        match failed.is_distrust() {
            true => Error::NotTrusted { peer: self.peer.clone(), name: host_name(), key: self.own },
            false => failed.error(&self.peer),
        }
    }
}

/// How a side is called, and whom it lets in.
pub(crate) struct Callee {
    config: Arc<ServerConfig>,
}

impl Callee {
    /// Answers with the own key of `keys`, those whose keys are pinned there; only those named in `from`, if any are.
    pub(crate) fn new(keys: &Keys, from: Vec<String>) -> Result<Callee> {
        let own = keys.own_with_secret()?;
        let config = (|| {
            let mut config = ServerConfig::builder_with_provider(provider())
                .with_protocol_versions(&[&TLS13])?
                .with_client_cert_verifier(Arc::new(Check::new(keys, Whom::Caller { from })))
                .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified(&own)?)));
            config.send_tls13_tickets = 0;
            Ok(Arc::new(config))
        })();
        Ok(Callee { config: config.map_err(no_config)? })
    }

    pub(crate) fn shake(&self, socket: Arc<TcpStream>, until: Instant) -> Result<Secured, Failed> {
        let tls = ServerConnection::new(Arc::clone(&self.config)).map_err(Failed::Tls)?;
        Secured::shake(socket, tls.into(), until)
    }
}

/// Why there is no connection.
pub(crate) enum Failed {
    Io(io::Error),
    Tls(rustls::Error),
}

impl Failed {
    /// True if the other side does not believe the key that was shown to it.
    pub(crate) fn is_distrust(&self) -> bool {
        matches!(self, Failed::Tls(rustls::Error::AlertReceived(AlertDescription::CertificateUnknown)))
    }

    /// As an error about `peer`.
    pub(crate) fn error(self, peer: &str) -> Error {
        let peer = peer.to_string();
        match self {
            // Nothing of this says that it would not talk as it should.
            Failed::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
                Error::Connect { peer, why: "no answer in time".into() }
            }
            Failed::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => Error::Connect {
                peer,
                why: "it closed the connection before it had answered: it is ending, or has too many callers"
                    .into(),
            },
            Failed::Io(error) => Error::Connect { peer, why: error.to_string() },
            Failed::Tls(rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(error))))
                if error.is::<Error>() =>
            {
                error.downcast_ref::<Error>().cloned().unwrap_or(Error::Tls { peer, why: error.to_string() })
            }
            Failed::Tls(rustls::Error::InvalidMessage(_)) => {
                Error::Tls { peer, why: "what it says is no TLS".into() }
            }
            Failed::Tls(error) => Error::Tls { peer, why: error.to_string() },
        }
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Failed {
        Failed::Io(error)
    }
}

/// A connection whose other end has shown a key that is trusted.
pub(crate) struct Secured {
    pub(crate) socket: Arc<TcpStream>,
    pub(crate) tls: Connection,
}

impl Secured {
    /// Both sides' greeting, all of it before `until`.
    fn shake(socket: Arc<TcpStream>, mut tls: Connection, until: Instant) -> Result<Secured, Failed> {
        // Bounded by what is handed over: never more than a chunk at a time.
        tls.set_buffer_limit(None);
        let mut secured = Secured { socket, tls };
        while secured.tls.is_handshaking() {
            secured.turn(until)?;
        }
        secured.flush(until)?;
        Ok(secured)
    }

    /// The key that the other end has shown.
    pub(crate) fn key(&self) -> Option<Key> {
        self.tls.peer_certificates().and_then(|shown| Key::from_spki(shown.first()?))
    }

    /// Sends what there is to be sent, then takes what comes next.
    fn turn(&mut self, until: Instant) -> Result<(), Failed> {
        self.flush(until)?;
        if !self.tls.is_handshaking() {
            return Ok(());
        }
        self.take(until)
    }

    fn take(&mut self, until: Instant) -> Result<(), Failed> {
        if self.tls.read_tls(&mut Timed { socket: &self.socket, until })? == 0 {
            return Err(Failed::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        if let Err(error) = self.tls.process_new_packets() {
            // The other side is told why, if it listens.
            let _ = self.flush(until);
            self.part(until);
            return Err(Failed::Tls(error));
        }
        Ok(())
    }

    fn flush(&mut self, until: Instant) -> Result<(), Failed> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut Timed { socket: &self.socket, until })?;
        }
        Ok(())
    }

    /// Fills `buf`, before `until`.
    pub(crate) fn read_exact(&mut self, buf: &mut [u8], until: Instant) -> Result<(), Failed> {
        let mut have = 0;
        while have < buf.len() {
            match self.tls.reader().read(&mut buf[have..]) {
                Ok(0) => return Err(Failed::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => have += len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.take(until)?,
                Err(error) => return Err(Failed::Io(error)),
            }
        }
        Ok(())
    }

    /// Sends all of `bytes`, before `until`.
    pub(crate) fn write_all(&mut self, bytes: &[u8], until: Instant) -> Result<(), Failed> {
        self.tls.writer().write_all(bytes)?;
        self.flush(until)
    }

    /// Says no more, and listens for a moment: closing at once could take back what was said last.
    pub(crate) fn part(&mut self, until: Instant) {
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

/// A socket that gives up at a moment, however little comes at a time.
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
                // A process that was stopped and goes on: calls with a time limit are not restarted by themselves.
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
