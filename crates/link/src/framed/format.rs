//! The bytes of a framed stream.
//!
//! Each side begins with a hello of 16 bytes: magic (8), version (u16), timeout in tenths of a second (u16), window in bytes
//! (u32). Then come frames, each with a header of 12 bytes: what it is (u8: 0 message, 1 credit, 2 goodbye, 3 ping, 4
//! distrust), the message's kind (u8), zero (u16), length of the head (u32), length of the body or bytes of credit (u32); a message's head
//! and body follow. All little-endian. Pings may follow the goodbye: a side that has said goodbye still receives from the other.

use std::time::Duration;

use crate::message::{FRAMING, MAX_BODY, MAX_HEAD};

/// The version of the link and of all messages.
pub const VERSION: u16 = 2;

pub(super) const MAGIC: [u8; 8] = *b"\x93dsync\r\n";
/// Bytes of a hello.
pub(super) const HELLO: usize = 16;

/// The unit of timeouts in a hello.
const UNIT_MS: u64 = 100;

/// The longest timeout of a hello: for a side that has none of its own.
pub(crate) const NEVER: Duration = Duration::from_millis(u16::MAX as u64 * UNIT_MS);

/// The first thing a side sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    /// What may be in transit to this side, in bytes.
    pub(super) window: u32,
    /// A side that receives nothing for this long cuts the link.
    pub(super) timeout: Duration,
}

/// Why a hello is refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadHello {
    /// The version of the other side.
    Version(u16),
    /// A window or a timeout of zero.
    Incomplete,
}

impl Hello {
    pub(super) fn to_bytes(self) -> [u8; HELLO] {
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..10].copy_from_slice(&VERSION.to_le_bytes());
        hello[10..12].copy_from_slice(&to_units(self.timeout).to_le_bytes());
        hello[12..].copy_from_slice(&self.window.to_le_bytes());
        hello
    }

    /// Reads what follows the magic.
    pub(super) fn parse(bytes: &[u8; HELLO]) -> Result<Hello, BadHello> {
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(BadHello::Version(version));
        }
        let timeout = u16::from_le_bytes([bytes[10], bytes[11]]);
        let window = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
        if timeout == 0 || window == 0 {
            return Err(BadHello::Incomplete);
        }
        Ok(Hello { window, timeout: from_units(timeout) })
    }
}

/// A timeout in a hello's unit, never zero.
fn to_units(timeout: Duration) -> u16 {
    let units = timeout.as_millis().div_ceil(UNIT_MS.into()).max(1);
    u16::try_from(units).unwrap_or(u16::MAX)
}

fn from_units(units: u16) -> Duration {
    Duration::from_millis(u64::from(units) * UNIT_MS)
}

/// A frame, without the bytes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameHead {
    /// Lengths in bytes; both parts follow.
    Message { kind: u8, head: usize, body: usize },
    /// The receiver has taken this many bytes.
    Credit(u32),
    /// No message follows.
    Goodbye,
    /// A sign of life.
    Ping,
    /// The receiver's key is no longer trusted: the link ends.
    Distrust,
}

impl FrameHead {
    pub(super) fn to_bytes(self) -> [u8; FRAMING] {
        // Messages are checked to be within bounds before they get here.
        let (what, kind, head, body) = match self {
            FrameHead::Message { kind, head, body } => (0, kind, head as u32, body as u32),
            FrameHead::Credit(bytes) => (1, 0, 0, bytes),
            FrameHead::Goodbye => (2, 0, 0, 0),
            FrameHead::Ping => (3, 0, 0, 0),
            FrameHead::Distrust => (4, 0, 0, 0),
        };
        let mut bytes = [0; FRAMING];
        (bytes[0], bytes[1]) = (what, kind);
        bytes[4..8].copy_from_slice(&head.to_le_bytes());
        bytes[8..].copy_from_slice(&body.to_le_bytes());
        bytes
    }

    /// Reads a header, or returns what is wrong with it.
    pub(super) fn parse(bytes: [u8; FRAMING]) -> Result<FrameHead, String> {
        let [what, kind, zero_1, zero_2, h0, h1, h2, h3, b0, b1, b2, b3] = bytes;
        let (head, body) = (u32::from_le_bytes([h0, h1, h2, h3]), u32::from_le_bytes([b0, b1, b2, b3]));
        match (what, kind, head, body) {
            _ if (zero_1, zero_2) != (0, 0) => Err("an unknown frame".into()),
            (0, ..) => {
                let (head, body) = (head as usize, body as usize);
                if head > MAX_HEAD || body > MAX_BODY {
                    return Err(format!(
                        "a message of {head} + {body} bytes; the limit is {MAX_HEAD} + {MAX_BODY}"
                    ));
                }
                Ok(FrameHead::Message { kind, head, body })
            }
            (1, 0, 0, bytes) => Ok(FrameHead::Credit(bytes)),
            (2, 0, 0, 0) => Ok(FrameHead::Goodbye),
            (3, 0, 0, 0) => Ok(FrameHead::Ping),
            (4, 0, 0, 0) => Ok(FrameHead::Distrust),
            _ => Err("an unknown frame".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_told_as_it_is_and_never_as_none() {
        for ms in [100, 5000, 30_000, NEVER.as_millis() as u64] {
            let timeout = Duration::from_millis(ms);
            assert_eq!(from_units(to_units(timeout)), timeout);
        }
        assert_eq!(to_units(Duration::ZERO), 1);
        assert_eq!(to_units(Duration::MAX), u16::MAX);
        assert_eq!(from_units(to_units(Duration::from_millis(101))), Duration::from_millis(200));
    }

    #[test]
    fn frames_and_hellos_have_the_bytes_of_the_format() {
        let hello = Hello { window: 0x0001_0203, timeout: Duration::from_secs(30) };
        assert_eq!(hello.to_bytes(), *b"\x93dsync\r\n\x02\0\x2c\x01\x03\x02\x01\0");
        assert_eq!(Hello::parse(&hello.to_bytes()), Ok(hello));
        for (frame, bytes) in [
            (
                FrameHead::Message { kind: 7, head: 0x0102, body: 0x0304 },
                *b"\0\x07\0\0\x02\x01\0\0\x04\x03\0\0",
            ),
            (FrameHead::Credit(0x0102_0304), *b"\x01\0\0\0\0\0\0\0\x04\x03\x02\x01"),
            (FrameHead::Goodbye, *b"\x02\0\0\0\0\0\0\0\0\0\0\0"),
            (FrameHead::Ping, *b"\x03\0\0\0\0\0\0\0\0\0\0\0"),
            (FrameHead::Distrust, *b"\x04\0\0\0\0\0\0\0\0\0\0\0"),
        ] {
            assert_eq!(frame.to_bytes(), bytes);
            assert_eq!(FrameHead::parse(bytes), Ok(frame));
        }
    }
}
