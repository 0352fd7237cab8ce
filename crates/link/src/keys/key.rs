//! A site's public key, as text and in TLS.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use ring::digest;
use serde::{Deserialize, Serialize};

/// Precedes a key's own characters.
pub(crate) const KIND: &str = "dsync-ed25519";

/// What precedes an Ed25519 key in its SubjectPublicKeyInfo (RFC 8410).
const SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// A site's public key. Written as one line, `dsync-ed25519 BASE64`, and read back from it with or without a comment.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Key {
        Key(bytes)
    }

    /// The key's fingerprint, for people to compare: `SHA256:…`, over its SubjectPublicKeyInfo.
    pub fn fingerprint(&self) -> String {
        format!("SHA256:{}", STANDARD_NO_PAD.encode(digest::digest(&digest::SHA256, &self.to_spki())))
    }

    /// The key as TLS carries it (RFC 7250).
    pub(crate) fn to_spki(self) -> Vec<u8> {
        [&SPKI[..], &self.0].concat()
    }

    pub(crate) fn from_spki(spki: &[u8]) -> Option<Key> {
        spki.strip_prefix(&SPKI).and_then(|key| key.try_into().ok()).map(Key)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{KIND} {}", STANDARD.encode(self.0))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Key {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Key, InvalidKey> {
        let mut words = text.split_whitespace();
        let key = match (words.next(), words.next()) {
            (Some(KIND), Some(word)) => STANDARD.decode(word).ok().and_then(|key| key.try_into().ok()),
            _ => None,
        };
        key.map(Key).ok_or_else(|| InvalidKey(text.to_string()))
    }
}

/// An invalid key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid key \"{0}\": paste the line that \"dsync key\" prints, {KIND} and 44 characters")]
pub struct InvalidKey(String);

impl Serialize for Key {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Key, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_is_written() {
        let key = Key::from_bytes(std::array::from_fn(|at| at as u8 * 7));
        let line = key.to_string();
        assert_eq!(line.parse::<Key>().unwrap(), key);
        assert_eq!(format!("  {line} root@backup\n").parse::<Key>().unwrap(), key);
        assert_eq!(Key::from_spki(&key.to_spki()), Some(key));
        assert_eq!(key.fingerprint().len(), "SHA256:".len() + 43);
        for wrong in
            ["", KIND, "dsync-ed25519 AAAA", "ssh-ed25519 AAAA", &line[..line.len() - 1], "dsync-ed25519 %"]
        {
            assert!(wrong.parse::<Key>().is_err(), "{wrong}");
        }
        assert_eq!(Key::from_spki(&key.to_spki()[..43]), None);
    }
}
