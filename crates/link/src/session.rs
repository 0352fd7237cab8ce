//! What is said on a lane before the link's own words: one word from each side, 28 bytes.
//!
//! Magic (8), version (u16), what (u8), lanes (u8), session (16 bytes), all little-endian. The side that calls says for
//! each lane its number in `what` and the session that it belongs to: none, zeroes, for lane 0, which makes one. The
//! side that is called answers with how it went in `what`, and with the session. Then come chunks: sequence number (u64),
//! length (u32), bytes. Any lane may carry the next one; on each lane the numbers rise.

/// Bytes of a word.
pub const WORD: usize = 28;
/// The most lanes that a session has.
pub const MAX_LANES: usize = 16;
/// The most bytes that a chunk carries.
pub(crate) const CHUNK: usize = 128 << 10;
/// Bytes in front of a chunk's own.
pub(crate) const CHUNK_HEADER: usize = 12;

const MAGIC: [u8; 8] = *b"\x93dslane\n";
const VERSION: u16 = 1;

/// A session's name: random, and told only to the key that made it.
pub(crate) type Id = [u8; 16];

/// What is said on a lane, once from each side.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Word {
    /// The lane's number, or the answer.
    pub what: u8,
    /// How many lanes the session has.
    pub lanes: u8,
    /// The session.
    pub session: [u8; 16],
}

/// Answers.
pub(crate) const WELCOME: u8 = 0;
pub(crate) const BUSY: u8 = 1;
pub(crate) const NO_SESSION: u8 = 2;

impl Word {
    /// The word's bytes.
    pub fn to_bytes(self) -> [u8; WORD] {
        let mut bytes = [0; WORD];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        (bytes[10], bytes[11]) = (self.what, self.lanes);
        bytes[12..].copy_from_slice(&self.session);
        bytes
    }

    /// Reads a word; what is wrong with the bytes, if they are none.
    pub fn parse(bytes: &[u8; WORD]) -> Result<Word, String> {
        if bytes[..8] != MAGIC {
            return Err("what no dsync says".into());
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(format!(
                "version {version} of the session where {VERSION} is spoken here: install the same dsync on both sides"
            ));
        }
        let mut session = [0; 16];
        session.copy_from_slice(&bytes[12..]);
        let word = Word { what: bytes[10], lanes: bytes[11], session };
        match usize::from(word.lanes) {
            1..=MAX_LANES => Ok(word),
            lanes => Err(format!("a session of {lanes} lanes, where 1 to {MAX_LANES} may be")),
        }
    }
}

/// A chunk that came whole.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) number: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Puts together the chunks of one lane from whatever pieces come.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    header: [u8; CHUNK_HEADER],
    chunk: Option<Chunk>,
    /// Bytes of the header, or of the chunk, that are there.
    have: usize,
    /// The least number that the next chunk may have.
    least: u64,
}

impl Pieces {
    /// Where the next bytes go. Never empty.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        match &mut self.chunk {
            Some(chunk) => &mut chunk.bytes[self.have..],
            None => &mut self.header[self.have..],
        }
    }

    /// So many bytes were put there. A chunk, if that was the last of it; what is wrong, if it is none.
    pub(crate) fn filled(&mut self, len: usize) -> Result<Option<Chunk>, String> {
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
            return Err(format!("a chunk of {len} bytes, where 1 to {CHUNK} may be"));
        }
        if number < self.least || number == u64::MAX {
            return Err(format!("chunk {number} after chunk {}", self.least.wrapping_sub(1)));
        }
        self.least = number + 1;
        self.chunk = Some(Chunk { number, bytes: vec![0; len] });
        Ok(None)
    }

    /// True in the middle of a chunk.
    pub(crate) fn is_within(&self) -> bool {
        self.chunk.is_some() || self.have > 0
    }
}

/// Reads a lane's bytes as the other side of a session would, whoever wrote them: for fuzzing. Bytes of chunks that came whole.
#[doc(hidden)]
pub fn read_lane(bytes: &[u8]) -> Result<usize, String> {
    let (word, mut rest) = bytes.split_first_chunk::<WORD>().ok_or("too short")?;
    let parsed = Word::parse(word)?;
    assert_eq!(parsed.to_bytes(), *word, "a word is read as it is written");
    let mut pieces = Pieces::default();
    let mut total = 0;
    // In steps of many lengths, as they may come.
    let mut step = 1 + usize::from(parsed.what);
    while !rest.is_empty() {
        let room = pieces.room();
        let len = room.len().min(rest.len()).min(step);
        room[..len].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
        if let Some(chunk) = pieces.filled(len)? {
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

    fn lane(parts: &[Vec<u8>]) -> Vec<u8> {
        [&Word { what: 3, lanes: 4, session: [7; 16] }.to_bytes()[..], &parts.concat()].concat()
    }

    #[test]
    fn a_word_is_read_as_it_is_written() {
        let word = Word { what: 2, lanes: 16, session: [9; 16] };
        assert_eq!(Word::parse(&word.to_bytes()), Ok(word));
        for (at, value) in [(0, 0), (7, 0), (8, 2), (9, 1), (11, 0), (11, 17), (11, 255)] {
            let mut bytes = word.to_bytes();
            bytes[at] = value;
            assert!(Word::parse(&bytes).is_err(), "byte {at} as {value}");
        }
    }

    #[test]
    fn chunks_are_bounded_and_rise() {
        let chunk = |number, len: usize| [header(number, len as u32), vec![1; len]].concat();
        assert_eq!(read_lane(&lane(&[chunk(0, 5), chunk(1, CHUNK), chunk(9, 1)])), Ok(CHUNK + 6));
        for wrong in [header(0, 0), header(0, CHUNK as u32 + 1), header(0, u32::MAX), header(u64::MAX, 1)] {
            assert!(read_lane(&lane(std::slice::from_ref(&wrong))).is_err(), "{wrong:?}");
        }
        for second in [0, 4, 5] {
            assert!(read_lane(&lane(&[chunk(5, 3), chunk(second, 3)])).is_err(), "{second} after 5");
        }
    }

    proptest! {
        #[test]
        fn garbage_is_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..400), flip in any::<(usize, u8)>()) {
            let _ = read_lane(&bytes);
            let mut whole = lane(&[header(0, 100), bytes.clone(), header(1, 20), bytes]);
            let at = flip.0 % whole.len();
            whole[at] ^= flip.1;
            let _ = read_lane(&whole);
        }
    }
}
