//! The chunks in which a session's stream is sent: sequence number (u64), length (u32), bytes, all little-endian. Any
//! connection may carry the next one; on each connection the numbers rise.

use device::Buf;

use super::hello::{HELLO, SessionHello};

/// The most bytes that a chunk carries: a frame's data, which has one for itself.
pub(super) const CHUNK: usize = 1 << 20;
/// Bytes in front of a chunk's own.
pub(super) const CHUNK_HEADER: usize = 12;

/// A complete chunk.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) number: u64,
    pub(super) bytes: Buf,
}

/// The header of a chunk of `len` bytes.
pub(super) fn header(number: u64, len: usize) -> [u8; CHUNK_HEADER] {
    let mut header = [0; CHUNK_HEADER];
    header[..8].copy_from_slice(&number.to_le_bytes());
    header[8..].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    header
}

/// Puts together the chunks of one connection from pieces of any length.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    header: [u8; CHUNK_HEADER],
    chunk: Option<Chunk>,
    /// Bytes of the header, or of the chunk, received so far.
    have: usize,
    /// The least number that the next chunk may have.
    least: u64,
}

impl Assembler {
    /// Where the next bytes go. Never empty.
    pub(super) fn room(&mut self) -> &mut [u8] {
        match &mut self.chunk {
            Some(chunk) => &mut chunk.bytes[self.have..],
            None => &mut self.header[self.have..],
        }
    }

    /// Accounts for bytes stored there. Returns the chunk if it is complete, or what is wrong with it.
    pub(super) fn filled(&mut self, len: usize) -> Result<Option<Chunk>, String> {
        self.have += len;
        if let Some(chunk) = &self.chunk {
            if self.have < chunk.bytes.len() {
                return Ok(None);
            }
            self.have = 0;
            return Ok(self.chunk.take());
        }
        if self.have < CHUNK_HEADER {
            return Ok(None);
        }
        self.have = 0;
        let [n0, n1, n2, n3, n4, n5, n6, n7, l0, l1, l2, l3] = self.header;
        let number = u64::from_le_bytes([n0, n1, n2, n3, n4, n5, n6, n7]);
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if !(1..=CHUNK).contains(&len) {
            return Err(format!("a chunk of {len} bytes; a chunk has 1 to {CHUNK}"));
        }
        if number < self.least || number == u64::MAX {
            return Err(format!("chunk {number} after chunk {}", self.least.wrapping_sub(1)));
        }
        self.least = number + 1;
        self.chunk = Some(Chunk { number, bytes: Buf::scratch(len) });
        Ok(None)
    }

    /// True in the middle of a chunk.
    pub(super) fn is_within(&self) -> bool {
        self.chunk.is_some() || self.have > 0
    }
}

/// Reads a connection's bytes like the other side of a session: for fuzzing. Returns the bytes of
/// complete chunks.
pub fn read_connection(bytes: &[u8]) -> Result<usize, String> {
    let (hello, mut rest) = bytes.split_first_chunk::<HELLO>().ok_or("too short")?;
    let parsed = SessionHello::parse(hello)?;
    assert_eq!(parsed.to_bytes(), *hello, "a hello is read as it is written");
    let mut assembler = Assembler::default();
    let mut total = 0;
    // In steps of many lengths, as they may come.
    let mut step = 1 + usize::from(parsed.what);
    while !rest.is_empty() {
        let room = assembler.room();
        let len = room.len().min(rest.len()).min(step);
        room[..len].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
        if let Some(chunk) = assembler.filled(len)? {
            assert!((1..=CHUNK).contains(&chunk.bytes.len()));
            total += chunk.bytes.len();
        }
        step = step * 7 % 4099 + 1;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(number: u64, len: u32) -> Vec<u8> {
        [&number.to_le_bytes()[..], &len.to_le_bytes()].concat()
    }

    fn connection(parts: &[Vec<u8>]) -> Vec<u8> {
        [&SessionHello { what: 3, connections: 4, session: [7; 16] }.to_bytes()[..], &parts.concat()].concat()
    }

    #[test]
    fn chunks_are_bounded_and_rise() {
        let chunk = |at, len: usize| [&super::header(at, len)[..], &vec![1; len]].concat();
        let whole = connection(&[chunk(0, 5), chunk(1, CHUNK), chunk(9, 1)]);
        assert_eq!(read_connection(&whole), Ok(CHUNK + 6));
        for wrong in [header(0, 0), header(0, CHUNK as u32 + 1), header(0, u32::MAX), header(u64::MAX, 1)] {
            assert!(read_connection(&connection(std::slice::from_ref(&wrong))).is_err(), "{wrong:?}");
        }
        for second in [0, 4, 5] {
            assert!(
                read_connection(&connection(&[chunk(5, 3), chunk(second, 3)])).is_err(),
                "{second} after 5"
            );
        }
    }

    proptest! {
        #[test]
        fn garbage_is_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..400), flip in any::<(usize, u8)>()) {
            let _ = read_connection(&bytes);
            let mut whole = connection(&[header(0, 100), bytes.clone(), header(1, 20), bytes]);
            let at = flip.0 % whole.len();
            whole[at] ^= flip.1;
            let _ = read_connection(&whole);
        }
    }
}
