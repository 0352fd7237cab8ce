//! Judges the key that a peer shows, before anything else of the peer is believed: raw public keys (RFC 7250), and no
//! certificates or authorities. [`Keys`] say which are trusted.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, SignatureScheme};

use crate::{Error, Key, Keys, Pin, Result, Roles};

/// Which key is accepted.
#[derive(Debug)]
pub(super) enum ExpectedPeer {
    /// The key of a server: its name in messages, the names under which its key may be pinned, the better one first, and what for.
    Server { peer: String, names: [String; 2], role: Roles },
    /// The key of a client: any that is pinned to be served or, if names are given, only theirs.
    Client { from: Vec<String> },
}

impl ExpectedPeer {
    /// What the key must be trusted for.
    pub(super) fn role(&self) -> Roles {
        match self {
            ExpectedPeer::Server { role, .. } => *role,
            ExpectedPeer::Client { .. } => Roles::SERVE,
        }
    }
}

/// Accepts a key if it is the expected one, for this role, and its pin has not expired.
#[derive(Debug)]
pub(super) struct KeyVerifier {
    keys: Keys,
    expected: ExpectedPeer,
    algorithms: WebPkiSupportedAlgorithms,
}

impl KeyVerifier {
    /// Judges by what `keys` say at the moment of each handshake.
    pub(super) fn new(keys: &Keys, expected: ExpectedPeer) -> Arc<KeyVerifier> {
        let algorithms = ring::default_provider().signature_verification_algorithms;
        Arc::new(KeyVerifier { keys: keys.clone(), expected, algorithms })
    }

    fn judge(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let key = Key::from_spki(shown).ok_or(CertificateError::BadEncoding)?;
        self.trusted(key).map_err(|error| {
            rustls::Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
        })
    }

    /// Judges a key by the pins as they are now.
    pub(super) fn trusted(&self, key: Key) -> Result<()> {
        let (pins, command) = (self.keys.pins()?, self.keys.command());
        let needed = self.expected.role();
        let pin = match &self.expected {
            ExpectedPeer::Server { peer, names, .. } => {
                // A pin of HOST:PORT comes before one of HOST.
                let pin = names.iter().find_map(|name| pins.iter().find(|pin| pin.name == *name));
                let [_, name] = names.clone();
                let (peer, roles) = (peer.clone(), needed);
                let Some(pin) = pin else { return Err(Error::Unknown { peer, name, key, command, roles }) };
                if pin.key != key {
                    let (peer, name) = (peer.into(), pin.name.clone().into());
                    let (pinned, roles) = (pin.key.into(), pin.roles.and(needed));
                    return Err(Error::Swapped { peer, name, pinned, shown: key, command, roles });
                }
                pin
            }
            ExpectedPeer::Client { from } => {
                let ours = |name: &String| from.is_empty() || from.contains(name);
                let of_key = || pins.iter().filter(|pin| pin.key == key);
                // One key may be pinned under several names: the one that serves best counts.
                let serves = |pin: &&Pin| (ours(&pin.name), pin.roles.has(needed), !pin.has_expired());
                let (peer, name, roles) = ("the client".into(), "NAME".into(), needed);
                let Some(pin) = of_key().max_by_key(serves) else {
                    return Err(Error::Unknown { peer, name, key, command, roles });
                };
                if !ours(&pin.name) {
                    return Err(Error::NotFrom { name: pin.name.clone(), key });
                }
                pin
            }
        };
        let (name, roles) = (pin.name.clone(), pin.roles.and(needed));
        if !pin.roles.has(needed) {
            return Err(Error::NotFor { name, key, needed, command, roles });
        }
        match pin.has_expired() {
            true => Err(Error::Expired { name, key, command, roles }),
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

/// Never asked: only TLS 1.3 is offered.
fn no_tls12() -> Result<HandshakeSignatureValid, rustls::Error> {
    Err(rustls::Error::General("TLS 1.2 is not supported".into()))
}

/// The part that both sides' verifiers have in common.
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

impl ServerCertVerifier for KeyVerifier {
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

impl ClientCertVerifier for KeyVerifier {
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
