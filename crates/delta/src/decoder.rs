//! Units into frames, believing nothing.

use crate::frame::{Decoded, Decompressor, decode_frame};
use crate::ledger::Ledger;
use crate::{Error, Frame, Header, Result, Totals, Unit, UnitKind};

/// What a unit turned out to be.
#[derive(Debug)]
pub enum Event {
    /// The delta begins.
    Header(Header),
    /// Changes, verified.
    Frame(Frame),
    /// The delta is whole.
    End(Totals),
}

/// Verifies the units of one delta, in order. After a refusal it takes nothing more.
///
/// Several threads may share the work: [`decode_frame`] verifies each frame in itself, [`Decoder::append`] then puts them in
/// order.
#[derive(Default)]
pub struct Decoder {
    header: Option<Header>,
    ledger: Option<Ledger>,
    decompressor: Option<Decompressor>,
    ended: bool,
    refused: Option<u64>,
}

impl Decoder {
    /// A decoder that expects a header.
    pub fn new() -> Decoder {
        Decoder::default()
    }

    /// Takes the next unit.
    ///
    /// # Errors
    /// What is wrong with the unit, or why it may not stand where it stands.
    pub fn push(&mut self, unit: Unit) -> Result<Event> {
        self.guarded(|decoder| decoder.take(unit))
    }

    /// Takes the next frame after [`decode_frame`] has verified it in itself.
    ///
    /// # Errors
    /// As [`Decoder::push`].
    pub fn append(&mut self, decoded: Decoded) -> Result<Frame> {
        self.guarded(|decoder| {
            let unit = decoder.units();
            match &mut decoder.ledger {
                Some(_) if decoder.ended => Err(Error::AfterEnd { unit }),
                Some(ledger) => ledger.enter(&decoded.facts).map(|()| decoded.frame),
                None => Err(Error::Unexpected { unit, found: UnitKind::Frame, expected: "the header" }),
            }
        })
    }

    fn guarded<T>(&mut self, step: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(unit) = self.refused {
            return Err(Error::Refused { unit });
        }
        let unit = self.units();
        step(self).inspect_err(|_| self.refused = Some(unit))
    }

    fn take(&mut self, unit: Unit) -> Result<Event> {
        let number = self.units();
        if self.ended {
            return Err(Error::AfterEnd { unit: number });
        }
        Unit::check_lengths(unit.kind, number, unit.head.len(), unit.body.len())?;
        match (unit.kind, &mut self.ledger) {
            (UnitKind::Header, None) => {
                let header = Header::decode(&unit.head)?;
                self.ledger = Some(Ledger::new(&header, &unit.head));
                self.header = Some(header.clone());
                Ok(Event::Header(header))
            }
            (UnitKind::Frame, Some(ledger)) => {
                if self.decompressor.is_none() {
                    self.decompressor = Some(Decompressor::new()?);
                }
                let decoded =
                    decode_frame(ledger.stream, ledger.totals().frames, unit, self.decompressor.as_mut())?;
                ledger.enter(&decoded.facts)?;
                Ok(Event::Frame(decoded.frame))
            }
            (UnitKind::Trailer, Some(ledger)) => {
                let totals = ledger.close(&unit.head)?;
                self.ended = true;
                Ok(Event::End(totals))
            }
            (found, None) => Err(Error::Unexpected { unit: number, found, expected: "the header" }),
            (found, Some(_)) => {
                Err(Error::Unexpected { unit: number, found, expected: "a frame or the trailer" })
            }
        }
    }

    /// The header, once it has come.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// Units taken so far.
    pub fn units(&self) -> u64 {
        u64::from(self.header.is_some()) + self.frames() + u64::from(self.ended)
    }

    /// Frames taken so far.
    pub fn frames(&self) -> u64 {
        self.totals().frames
    }

    /// The highest byte reached so far, one past. As extents ascend (but with the method `rolling`), all changes below it
    /// have been taken.
    pub fn end(&self) -> u64 {
        self.ledger.as_ref().map_or(0, Ledger::end)
    }

    /// What was taken so far.
    pub fn totals(&self) -> Totals {
        self.ledger.as_ref().map(Ledger::totals).unwrap_or_default()
    }

    /// The digest of the units taken so far, as [`crate::Resume`] names it; zeroes before the header.
    pub fn digest(&self) -> [u8; 32] {
        self.ledger.as_ref().map(Ledger::digest).unwrap_or_default()
    }

    /// True once the trailer has been taken: the delta is whole.
    pub fn is_complete(&self) -> bool {
        self.ended
    }
}
