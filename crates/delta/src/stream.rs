//! Units over byte streams.

use std::io::{self, IoSlice, Read, Write};

use device::Buf;

use crate::{Decoder, Error, Event, Header, Result, Unit, UnitKind};

/// Writes units to a byte stream, each with a few large calls. A buffered writer beneath would only copy.
pub struct Writer<W> {
    inner: W,
    bytes: u64,
}

impl<W: Write> Writer<W> {
    /// A writer at the beginning of a delta.
    pub fn new(inner: W) -> Writer<W> {
        Writer { inner, bytes: 0 }
    }

    /// Writes a unit.
    ///
    /// # Errors
    /// [`Error::Write`]; what was written is then of no use.
    pub fn unit(&mut self, unit: &Unit) -> Result<()> {
        let prefix = unit.prefix();
        let mut slices = [IoSlice::new(&prefix), IoSlice::new(&unit.head), IoSlice::new(&unit.body)];
        let mut slices = &mut slices[..];
        // Drops the empty ones at the front, so that a write of nothing is never asked for.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.inner.write_vectored(slices) {
                Ok(0) => return Err(Error::Write(io::ErrorKind::WriteZero.into())),
                Ok(written) => IoSlice::advance_slices(&mut slices, written),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Write(error)),
            }
        }
        self.bytes += unit.wire_len();
        Ok(())
    }

    /// Bytes written so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Flushes the stream beneath.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn flush(&mut self) -> Result<()> {
        self.inner.flush().map_err(Error::Write)
    }

    /// Gives the stream beneath back.
    pub fn into_inner(self) -> W {
        self.inner
    }
}

/// Reads raw units from a byte stream. Lengths are checked before memory is asked for; nothing else is.
pub struct Units<R> {
    inner: R,
    units: u64,
    bytes: u64,
    failed: bool,
}

impl<R: Read> Units<R> {
    /// The units of a stream that begins with a header.
    pub fn new(inner: R) -> Units<R> {
        Units { inner, units: 0, bytes: 0, failed: false }
    }

    /// The next unit; `None` if the stream ends before its first byte. Bodies are read into aligned memory.
    ///
    /// # Errors
    /// [`Error::Torn`] if the stream ends inside the unit; [`Error::NotADelta`] or [`Error::Damaged`] for what is no unit.
    /// After an error there is no telling where the next unit begins: [`Error::Refused`].
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator's result would hide the error that ends it"
    )]
    pub fn next(&mut self) -> Result<Option<Unit>> {
        if self.failed {
            return Err(Error::Refused { unit: self.units });
        }
        self.read().inspect_err(|_| self.failed = true)
    }

    fn read(&mut self) -> Result<Option<Unit>> {
        let mut prefix = [0; Unit::PREFIX];
        let got = self.fill(&mut prefix)?;
        // What does not even begin like a delta is none, however short.
        if self.units == 0 && !Unit::MAGIC.starts_with(&prefix[..got.min(4)]) {
            return Err(Error::NotADelta);
        }
        match got {
            0 => return Ok(None),
            Unit::PREFIX => {}
            _ => return Err(self.torn()),
        }
        let unit = self.units;
        let damaged = |what| Error::Damaged { unit, what };
        if prefix[..4] != Unit::MAGIC {
            return Err(damaged("unknown magic"));
        }
        if prefix[5..8] != [0; 3] {
            return Err(damaged("reserved bytes are not zero"));
        }
        let Some(kind) = UnitKind::from_byte(prefix[4]) else {
            return Err(damaged("unknown kind"));
        };
        let length = |at: usize| {
            u32::from_le_bytes([prefix[at], prefix[at + 1], prefix[at + 2], prefix[at + 3]]) as usize
        };
        let (head_len, body_len) = (length(8), length(12));
        Unit::check_lengths(kind, unit, head_len, body_len)?;
        let mut head = vec![0; head_len];
        let mut body = Buf::scratch(body_len);
        if self.fill(&mut head)? < head_len || self.fill(&mut body)? < body_len {
            return Err(self.torn());
        }
        self.units += 1;
        Ok(Some(Unit { kind, head, body }))
    }

    fn torn(&self) -> Error {
        Error::Torn { unit: self.units, offset: self.bytes }
    }

    /// Reads until `buf` is full or the stream ends.
    fn fill(&mut self, buf: &mut [u8]) -> Result<usize> {
        let mut got = 0;
        while got < buf.len() {
            match self.inner.read(&mut buf[got..]) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Read { unit: self.units, error }),
            }
        }
        self.bytes += got as u64;
        Ok(got)
    }

    /// Whole units read so far.
    pub fn count(&self) -> u64 {
        self.units
    }

    /// Bytes read so far. After a whole unit: where the next one begins.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives the stream beneath back. Not a byte more than the units was read from it.
    pub fn into_inner(self) -> R {
        self.inner
    }
}

/// Reads and verifies a delta from a byte stream.
pub struct Reader<R> {
    units: Units<R>,
    decoder: Decoder,
}

impl<R: Read> Reader<R> {
    /// A reader of a stream that begins with a header.
    pub fn new(inner: R) -> Reader<R> {
        Reader { units: Units::new(inner), decoder: Decoder::new() }
    }

    /// The next event; `None` after the trailer, of which nothing behind is read.
    ///
    /// # Errors
    /// [`Error::NoTrailer`] if the stream ends between two units, [`Error::Torn`] if it ends inside one, and all that a
    /// [`Decoder`] refuses.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator's result would hide the error that ends it"
    )]
    pub fn next(&mut self) -> Result<Option<Event>> {
        if self.decoder.is_complete() {
            return Ok(None);
        }
        match self.units.next()? {
            Some(unit) => self.decoder.push(unit).map(Some),
            None => Err(Error::NoTrailer { units: self.units.count() }),
        }
    }

    /// Reads the header, which comes first.
    ///
    /// # Errors
    /// As [`Reader::next`].
    pub fn header(&mut self) -> Result<&Header> {
        if self.decoder.header().is_none() {
            self.next()?;
        }
        self.decoder.header().ok_or(Error::NoTrailer { units: 0 })
    }

    /// Makes sure that the stream ends here, after the trailer.
    ///
    /// # Errors
    /// [`Error::AfterEnd`] if anything follows, [`Error::NoTrailer`] if the trailer has not come yet.
    pub fn expect_end(&mut self) -> Result<()> {
        let unit = self.units.count();
        if !self.decoder.is_complete() {
            return Err(Error::NoTrailer { units: unit });
        }
        match self.units.fill(&mut [0])? {
            0 => Ok(()),
            _ => Err(Error::AfterEnd { unit }),
        }
    }

    /// The decoder, for what it knows of the delta so far.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Bytes read so far. After an event: where the next unit begins.
    pub fn bytes(&self) -> u64 {
        self.units.bytes()
    }

    /// Gives the stream beneath back.
    pub fn into_inner(self) -> R {
        self.units.into_inner()
    }
}
