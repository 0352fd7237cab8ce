//! Requests and replies of the transmission phase.

use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::ops::Range;

use super::{bad, bytes, u16, u32, u64};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

const CHUNK_OFFSET_DATA: u16 = 1;
const CHUNK_OFFSET_HOLE: u16 = 2;
const CHUNK_BLOCK_STATUS: u16 = 5;
const CHUNK_ERROR: u16 = 1 << 15;
const CHUNK_DONE: u16 = 1;
/// Bytes of a block status, an error's text and the like at most: more than any server sends.
const MOST: u32 = 16 << 20;

pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const ZEROES: u16 = 6;
pub(crate) const BLOCK_STATUS: u16 = 7;

/// A request without its payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub kind: u16,
    pub flags: u16,
    pub offset: u64,
    pub len: u32,
}

impl Order {
    /// Sends the request, and `data` behind it.
    pub(crate) fn send(&self, output: &mut impl Write, cookie: u64, data: &[u8]) -> io::Result<()> {
        let mut head = [0; 28];
        head[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        head[4..6].copy_from_slice(&self.flags.to_be_bytes());
        head[6..8].copy_from_slice(&self.kind.to_be_bytes());
        head[8..16].copy_from_slice(&cookie.to_be_bytes());
        head[16..24].copy_from_slice(&self.offset.to_be_bytes());
        head[24..].copy_from_slice(&self.len.to_be_bytes());
        // One call for both, where the system takes them.
        let sent = match output.write_vectored(&[IoSlice::new(&head), IoSlice::new(data)]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            sent => sent?,
        };
        output.write_all(&head[sent.min(head.len())..])?;
        output.write_all(&data[sent.saturating_sub(head.len())..])
    }
}

/// The beginning of a reply, or of a chunk of one.
pub(crate) struct ReplyHead {
    pub cookie: u64,
    pub part: ReplyPart,
    /// Nothing follows this part.
    pub last: bool,
}

/// What a head announces. The content of `Simple` and `Data` has not been read yet.
pub(crate) enum ReplyPart {
    Simple { error: u32 },
    Data { offset: u64, len: u32 },
    Hole { offset: u64, len: u32 },
    Status { context: u32, extents: Vec<(u32, u32)> },
    Error(u32),
    Nothing,
}

impl ReplyHead {
    pub(crate) fn read(input: &mut impl Read) -> io::Result<ReplyHead> {
        match u32(input)? {
            SIMPLE_REPLY_MAGIC => {
                let error = u32(input)?;
                Ok(ReplyHead { cookie: u64(input)?, part: ReplyPart::Simple { error }, last: true })
            }
            STRUCTURED_REPLY_MAGIC => {
                let (flags, kind) = (u16(input)?, u16(input)?);
                let (cookie, len) = (u64(input)?, u32(input)?);
                let part = ReplyPart::read(input, kind, len)?;
                Ok(ReplyHead { cookie, part, last: flags & CHUNK_DONE != 0 })
            }
            magic => Err(bad(format!("{magic:#x} where a reply should begin"))),
        }
    }
}

impl ReplyPart {
    fn read(input: &mut impl Read, kind: u16, len: u32) -> io::Result<ReplyPart> {
        match kind {
            CHUNK_OFFSET_DATA if len > 8 => Ok(ReplyPart::Data { offset: u64(input)?, len: len - 8 }),
            CHUNK_OFFSET_HOLE if len == 12 => Ok(ReplyPart::Hole { offset: u64(input)?, len: u32(input)? }),
            CHUNK_BLOCK_STATUS if len >= 12 && len % 8 == 4 && len <= MOST => {
                let context = u32(input)?;
                let extents = (0..len / 8).map(|_| Ok((u32(input)?, u32(input)?)));
                let extents = extents.collect::<io::Result<Vec<_>>>()?;
                match extents.iter().any(|(len, _)| *len == 0) {
                    true => Err(bad("the status of no bytes")),
                    false => Ok(ReplyPart::Status { context, extents }),
                }
            }
            _ if kind & CHUNK_ERROR != 0 && (6..=MOST).contains(&len) => {
                let error = u32(input)?;
                bytes(input, len as usize - 4)?;
                Ok(ReplyPart::Error(error))
            }
            0 if len == 0 => Ok(ReplyPart::Nothing),
            _ => Err(bad(format!("a chunk of kind {kind} with {len} bytes"))),
        }
    }
}

/// What has arrived of a reply.
#[derive(Debug, Default)]
pub(crate) struct Arrived {
    /// NBD's error number; zero is success.
    pub error: u32,
    /// Per context id: lengths and flags.
    pub status: HashMap<u32, Vec<(u32, u32)>>,
    bytes: usize,
}

impl Arrived {
    /// Takes a part, and from the input what follows its head. `buf` is that of a read, else empty.
    pub(crate) fn take(
        &mut self,
        part: ReplyPart,
        input: &mut impl Read,
        start: u64,
        buf: &mut [u8],
    ) -> io::Result<()> {
        match part {
            ReplyPart::Simple { error: 0 } => {
                input.read_exact(buf)?;
                self.bytes = buf.len();
            }
            ReplyPart::Data { offset, len } => {
                let place = place(start, offset, len, buf.len())?;
                input.read_exact(&mut buf[place])?;
                self.bytes += len as usize;
            }
            ReplyPart::Hole { offset, len } => {
                let place = place(start, offset, len, buf.len())?;
                buf[place].fill(0);
                self.bytes += len as usize;
            }
            ReplyPart::Status { context, extents } => {
                if self.status.insert(context, extents).is_some() {
                    return Err(bad(format!("two descriptions of the context {context}")));
                }
            }
            ReplyPart::Simple { error } | ReplyPart::Error(error) if self.error == 0 => self.error = error,
            ReplyPart::Simple { .. } | ReplyPart::Error(_) | ReplyPart::Nothing => {}
        }
        Ok(())
    }

    /// Refuses a reply that ends before all that was to be read has come.
    pub(crate) fn check(&self, wanted: usize) -> io::Result<()> {
        match self.error != 0 || self.bytes == wanted {
            true => Ok(()),
            false => Err(bad(format!("{} bytes where {wanted} were to be read", self.bytes))),
        }
    }
}

/// Where in the buffer of a read that began at `start` a part belongs.
fn place(start: u64, offset: u64, len: u32, room: usize) -> io::Result<Range<usize>> {
    let at = offset.checked_sub(start).filter(|at| *at <= room as u64 && u64::from(len) <= room as u64 - at);
    let at = at.ok_or_else(|| bad("data outside the request"))? as usize;
    Ok(at..at + len as usize)
}

/// A reply's error. NBD's numbers are Linux's; one that the protocol does not name counts as EINVAL.
pub(crate) fn error_of(number: u32) -> io::Error {
    const SHUTDOWN: u32 = 108;
    match number {
        SHUTDOWN => io::Error::new(io::ErrorKind::ConnectionAborted, "the NBD server is shutting down"),
        1 | 5 | 12 | 22 | 28 | 75 | 95 => io::Error::from_raw_os_error(number as i32),
        _ => io::Error::from_raw_os_error(22),
    }
}
