//! Handshakes: TLS 1.3, both sides present a raw public key.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::{PrivatePkcs8KeyDer, ServerName};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

use super::connection::{ConnectError, TlsConnection};
use super::verify::{ExpectedPeer, KeyVerifier};
use crate::framed::Trust;
use crate::keys::{Own, host_name};
use crate::{Error, Key, Keys, Result, Roles};

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

/// A client's side of handshakes with one server.
pub(super) struct ClientHandshake {
    peer: String,
    own: Key,
    verifier: Arc<KeyVerifier>,
    config: Arc<ClientConfig>,
}

impl ClientHandshake {
    /// Presents the own key of `keys`, and accepts only the one that is pinned there for `host` and `port`, and for this role.
    pub(super) fn new(keys: &Keys, host: &str, port: u16, role: Roles) -> Result<ClientHandshake> {
        let own = keys.own_with_secret()?;
        let peer = format!("{host}:{port}");
        let names = [peer.clone(), host.to_string()];
        let expected = ExpectedPeer::Server { peer: peer.clone(), names, role };
        let verifier = KeyVerifier::new(keys, expected);
        let config = (|| {
            let mut config = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(&[&TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::clone(&verifier) as _)
                .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(certified(
                    &own,
                )?)));
            config.enable_sni = false;
            // No resumption: every connection presents its key.
            config.resumption = Resumption::disabled();
            Ok(Arc::new(config))
        })();
        Ok(ClientHandshake { peer, own: own.key, verifier, config: config.map_err(no_config)? })
    }

    /// `HOST:PORT`.
    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    pub(super) fn handshake(&self, socket: TcpStream, until: Instant) -> Result<TlsConnection> {
        let name = ServerName::try_from("dsync")
            .map_err(|error| Error::Tls { peer: self.peer.clone(), why: error.to_string() })?;
        let tls = ClientConnection::new(Arc::clone(&self.config), name).map_err(no_config)?;
        TlsConnection::handshake(Arc::new(socket), tls.into(), until).map_err(|failed| self.error(failed))
    }

    /// The trust in a server that has shown this key.
    pub(super) fn trust(&self, shown: Key) -> Arc<dyn Trust> {
        let (verifier, peer) = (Arc::clone(&self.verifier), self.peer.clone());
        Arc::new(SessionTrust { verifier, peer, shown, own: self.own })
    }

    /// What a failure means to the client.
    pub(super) fn error(&self, failed: ConnectError) -> Error {
        match failed.is_distrust() {
            true => Error::NotTrusted { peer: self.peer.clone(), name: host_name(), key: self.own },
            false => failed.error(&self.peer),
        }
    }
}

/// A server's side of handshakes.
pub(super) struct ServerHandshake {
    own: Key,
    verifier: Arc<KeyVerifier>,
    config: Arc<ServerConfig>,
}

impl ServerHandshake {
    /// Presents the own key of `keys`, and accepts those that are pinned there to be served; if `from` has names, only theirs.
    pub(super) fn new(keys: &Keys, from: Vec<String>) -> Result<ServerHandshake> {
        let own = keys.own_with_secret()?;
        let verifier = KeyVerifier::new(keys, ExpectedPeer::Client { from });
        let config = (|| {
            let mut config = ServerConfig::builder_with_provider(provider())
                .with_protocol_versions(&[&TLS13])?
                .with_client_cert_verifier(Arc::clone(&verifier) as _)
                .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified(&own)?)));
            config.send_tls13_tickets = 0;
            Ok(Arc::new(config))
        })();
        Ok(ServerHandshake { own: own.key, verifier, config: config.map_err(no_config)? })
    }

    pub(super) fn handshake(
        &self,
        socket: Arc<TcpStream>,
        until: Instant,
    ) -> Result<TlsConnection, ConnectError> {
        let tls = ServerConnection::new(Arc::clone(&self.config)).map_err(ConnectError::Tls)?;
        TlsConnection::handshake(socket, tls.into(), until)
    }

    /// The trust in a client that was let in.
    pub(super) fn trust(&self, name: &str, shown: Key) -> Arc<dyn Trust> {
        let verifier = Arc::clone(&self.verifier);
        Arc::new(SessionTrust { verifier, peer: name.to_owned(), shown, own: self.own })
    }
}

/// The trust between the two sides of a session.
struct SessionTrust {
    verifier: Arc<KeyVerifier>,
    peer: String,
    /// The peer's key.
    shown: Key,
    own: Key,
}

impl Trust for SessionTrust {
    fn check(&self) -> Result<()> {
        self.verifier.trusted(self.shown).map_err(|error| match error {
            Error::Unknown { command, roles, .. } | Error::Swapped { command, roles, .. } => {
                Error::Forgotten { name: self.peer.clone(), key: self.shown, command, roles }
            }
            other => other,
        })
    }

    fn refused(&self) -> Error {
        Error::NotTrusted { peer: self.peer.clone(), name: host_name(), key: self.own }
    }
}
