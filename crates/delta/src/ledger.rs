//! What both ends of a delta keep as its frames pass: the order, the totals, and the digest.

use device::Buf;
use serde::{Deserialize, Serialize};

use crate::frame::FrameSummary;
use crate::limits::TRAILER;
use crate::unit::Fields;
use crate::{Error, Header, Method, Record, Result, Unit, UnitKind};

/// What a delta holds in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Frames.
    pub frames: u64,
    /// Records in them.
    pub records: u64,
    /// Bytes that data records write.
    pub data: u64,
    /// Bytes that zero records cover.
    pub zero: u64,
    /// Bytes that copy records move.
    pub copied: u64,
}

#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    pub stream: uuid::Uuid,
    size_before: u64,
    size_after: u64,
    rolling: bool,
    end: u64,
    totals: Totals,
    digest: blake3::Hasher,
}

impl Ledger {
    /// For a delta with this header, encoded as `head`.
    pub(crate) fn new(header: &Header, head: &[u8]) -> Ledger {
        let mut digest = blake3::Hasher::new();
        digest.update(head);
        Ledger {
            stream: header.stream,
            size_before: header.size_before,
            size_after: header.size_after,
            rolling: header.method == Method::Rolling,
            end: 0,
            totals: Totals::default(),
            digest,
        }
    }

    /// Enters the next frame, or says why it may not follow.
    pub(crate) fn enter(&mut self, facts: &FrameSummary) -> Result<()> {
        if facts.sequence != self.totals.frames {
            return Err(Error::Sequence { expected: self.totals.frames, found: facts.sequence });
        }
        let fault =
            |offset, len, why| Error::Record { unit: facts.sequence.saturating_add(1), offset, len, why };
        if facts.end > self.size_after {
            return Err(fault(
                facts.start,
                facts.end - facts.start.min(facts.end),
                "reaches past the end of the disk",
            ));
        }
        match facts.copy {
            Some(record) if !self.rolling => {
                return Err(fault(
                    record.offset(),
                    record.len(),
                    "copies, which is allowed in deltas of the method rolling only",
                ));
            }
            Some(record @ Record::Copy { from, len, .. }) if from + len > self.size_before => {
                return Err(fault(record.offset(), len, "copies from past the end of the disk"));
            }
            _ => {}
        }
        if !self.rolling {
            if let Some(record) = facts.disorder {
                return Err(fault(record.offset(), record.len(), "is not behind the previous one"));
            }
            if facts.start < self.end {
                return Err(fault(facts.start, facts.end - facts.start, "is not behind the previous frame"));
            }
        }
        self.end = self.end.max(facts.end);
        self.totals.frames += 1;
        self.totals.records += facts.records;
        self.totals.data = self.totals.data.saturating_add(facts.data);
        self.totals.zero = self.totals.zero.saturating_add(facts.zero);
        self.totals.copied = self.totals.copied.saturating_add(facts.copied);
        self.digest.update(&facts.hash);
        Ok(())
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    pub(crate) fn digest(&self) -> [u8; 32] {
        *self.digest.finalize().as_bytes()
    }

    /// The trailer that belongs to what was entered.
    pub(crate) fn trailer(&self) -> Unit {
        let mut head = Vec::with_capacity(TRAILER);
        let Totals { frames, records, data, zero, copied } = self.totals;
        for number in [frames, records, data, zero, copied] {
            head.extend(number.to_le_bytes());
        }
        head.extend(self.digest());
        Unit { kind: UnitKind::Trailer, head, body: Buf::new(0) }
    }

    /// Compares a trailer with what was entered.
    pub(crate) fn close(&self, head: &[u8]) -> Result<Totals> {
        let unit = self.totals.frames.saturating_add(1);
        let mut fields = Fields { rest: head, unit };
        let stated = Totals {
            frames: fields.u64()?,
            records: fields.u64()?,
            data: fields.u64()?,
            zero: fields.u64()?,
            copied: fields.u64()?,
        };
        let digest: [u8; 32] = fields.array()?;
        fields.finish()?;
        if stated != self.totals {
            return Err(Error::Damaged { unit, what: "its totals are not those of the frames before it" });
        }
        if digest != self.digest() {
            return Err(Error::Damaged { unit, what: "its digest is not that of the units before it" });
        }
        Ok(stated)
    }
}
