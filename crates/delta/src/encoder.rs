//! Frames into units.

use crate::frame::{Compressor, Encoded, encode_frame};
use crate::ledger::Ledger;
use crate::{Frame, Header, Result, Totals, Unit};

/// Makes the units of one delta.
///
/// One thread uses [`Encoder::frame`]. Several take numbers from [`Encoder::frames`] on, call [`encode_frame`], and hand the
/// results to [`Encoder::append`] in order.
pub struct Encoder {
    ledger: Ledger,
    compressor: Option<Compressor>,
}

impl Encoder {
    /// Begins a delta, and gives its first unit. `compression` is a zstd level, `None` stores the data as it is.
    ///
    /// # Errors
    /// [`crate::Error::Header`] for a header that contradicts itself.
    pub fn new(header: &Header, compression: Option<i32>) -> Result<(Encoder, Unit)> {
        let unit = header.encode()?;
        let compressor = compression.map(Compressor::new).transpose()?;
        Ok((Encoder { ledger: Ledger::new(header, &unit.head), compressor }, unit))
    }

    /// Encodes the next frame. Its data moves into the unit's body, unless it is compressed.
    ///
    /// # Errors
    /// If no delta, or not this one, may have the frame at this place.
    pub fn frame(&mut self, frame: Frame) -> Result<Unit> {
        let encoded =
            encode_frame(self.ledger.stream, self.ledger.totals().frames, frame, self.compressor.as_mut())?;
        self.append(encoded)
    }

    /// Puts a frame that was encoded elsewhere in its place, which is the next.
    ///
    /// # Errors
    /// As [`Encoder::frame`].
    pub fn append(&mut self, encoded: Encoded) -> Result<Unit> {
        self.ledger.enter(&encoded.facts)?;
        Ok(encoded.unit)
    }

    /// Ends the delta with its last unit.
    pub fn trailer(self) -> Unit {
        self.ledger.trailer()
    }

    /// Frames so far.
    pub fn frames(&self) -> u64 {
        self.ledger.totals().frames
    }

    /// The highest byte reached so far, one past.
    pub fn end(&self) -> u64 {
        self.ledger.end()
    }

    /// What the delta holds so far.
    pub fn totals(&self) -> Totals {
        self.ledger.totals()
    }

    /// The digest of all units so far, as [`crate::Resume`] names it.
    pub fn digest(&self) -> [u8; 32] {
        self.ledger.digest()
    }
}
