//! Messages, as the layers above send them.

use device::Buf;
use serde::de::DeserializeOwned;

use crate::{Error, Result, printable};

/// The longest head in bytes.
pub const MAX_HEAD: usize = 4 << 20;
/// The longest body in bytes.
pub const MAX_BODY: usize = 2 << 20;
/// Bytes of framing in front of head and body.
pub(crate) const FRAMING: usize = 12;
/// A receiver's memory for a message besides head and body.
const KEPT: usize = 128;
/// The cost of the longest message.
pub(crate) const MAX_COST: u64 = cost(MAX_HEAD, MAX_BODY);

/// The cost of a message in the window is its memory at the receiver, so that many small ones are as bounded as few large ones.
pub(crate) const fn cost(head: usize, body: usize) -> u64 {
    (KEPT + head + body.next_multiple_of(Buf::ALIGN)) as u64
}

/// One message. The kinds' meaning is up to the layers above.
#[derive(Debug, Default)]
pub struct Message {
    /// The type of the message.
    pub kind: u8,
    /// Metadata, at most [`MAX_HEAD`] bytes.
    pub head: Vec<u8>,
    /// Data, at most [`MAX_BODY`] bytes. It arrives in aligned memory, ready for direct I/O.
    pub body: Buf,
}

impl Message {
    /// The head, read as JSON.
    ///
    /// # Errors
    /// [`Error::Bad`] if it is not the JSON of a `T`.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_slice(&self.head).map_err(|error| Error::Bad {
            peer: "the far side".into(),
            what: format!(
                "a message of kind {} that cannot be read ({})",
                self.kind,
                printable(&error.to_string())
            ),
        })
    }

    /// The cost of the message in the window.
    pub(crate) fn cost(&self) -> u64 {
        cost(self.head.len(), self.body.len())
    }

    /// Bytes of the message in a stream, framing included.
    pub(crate) fn bytes(&self) -> u64 {
        (FRAMING + self.head.len() + self.body.len()) as u64
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (part, len, limit) in [("head", self.head.len(), MAX_HEAD), ("body", self.body.len(), MAX_BODY)] {
            if len > limit {
                return Err(Error::TooLong { kind: self.kind, part, len, limit });
            }
        }
        Ok(())
    }
}
