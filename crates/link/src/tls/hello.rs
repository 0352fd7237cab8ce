//! The hello that each side sends on a connection before any chunk, 28 bytes.
//!
//! Magic (8), version (u16), what (u8), connections (u8), session (16 bytes), all little-endian. The client sends for each
//! connection its number in `what` and the session that it belongs to: none, zeroes, for connection 0, which makes one. The
//! server answers with the outcome in `what`, and with the session.

/// Bytes of a hello.
pub(super) const HELLO: usize = 28;
/// The most connections that a session has.
pub const MAX_CONNECTIONS: usize = 16;

const MAGIC: [u8; 8] = *b"\x93dslane\n";
const VERSION: u16 = 1;

/// A session's name: random, and known only to the key that created it.
pub(super) type Id = [u8; 16];

/// A hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SessionHello {
    /// The connection's number, or the server's answer.
    pub(super) what: u8,
    /// How many connections the session has.
    pub(super) connections: u8,
    /// The session.
    pub(super) session: Id,
}

// Answers.
/// The connection belongs to the session.
pub(super) const WELCOME: u8 = 0;
/// No more sessions are accepted now.
pub(super) const BUSY: u8 = 1;
/// No such session waits for that connection of this key.
pub(super) const NO_SESSION: u8 = 2;

impl SessionHello {
    pub(super) fn to_bytes(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        (bytes[10], bytes[11]) = (self.what, self.connections);
        bytes[12..].copy_from_slice(&self.session);
        bytes
    }

    /// Reads a hello, or returns what is wrong with it.
    pub(super) fn parse(bytes: &[u8; HELLO]) -> Result<SessionHello, String> {
        if bytes[..8] != MAGIC {
            return Err("something other than dsync's hello".into());
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(format!(
                "version {version} of the session protocol, this dsync speaks version {VERSION}: install the same version of dsync on both sides"
            ));
        }
        let mut session = Id::default();
        session.copy_from_slice(&bytes[12..]);
        let hello = SessionHello { what: bytes[10], connections: bytes[11], session };
        match usize::from(hello.connections) {
            1..=MAX_CONNECTIONS => Ok(hello),
            count => Err(format!("a session of {count} connections; a session has 1 to {MAX_CONNECTIONS}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_read_as_it_is_written() {
        let hello = SessionHello { what: 2, connections: 16, session: [9; 16] };
        assert_eq!(
            hello.to_bytes(),
            *b"\x93dslane\n\x01\0\x02\x10\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09\x09"
        );
        assert_eq!(SessionHello::parse(&hello.to_bytes()), Ok(hello));
        for (at, value) in [(0, 0), (7, 0), (8, 2), (9, 1), (11, 0), (11, 17), (11, 255)] {
            let mut bytes = hello.to_bytes();
            bytes[at] = value;
            assert!(SessionHello::parse(&bytes).is_err(), "byte {at} as {value}");
        }
    }
}
