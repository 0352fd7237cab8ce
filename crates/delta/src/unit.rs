//! Units: the pieces a delta travels in.

use device::Buf;

use crate::{Error, Result, UnitKind};

/// One piece of a delta as it travels: encoded, not yet believed. Only a [`crate::Decoder`] tells whether it is in order.
#[derive(Debug)]
pub struct Unit {
    /// What it is.
    pub kind: UnitKind,
    /// Metadata: a few bytes a record.
    pub head: Vec<u8>,
    /// A frame's data, aligned in memory; empty for the others.
    pub body: Buf,
}

impl Unit {
    /// Bytes in front of head and body in a byte stream.
    pub const PREFIX: usize = 16;
    /// The first bytes of every unit in a byte stream.
    pub const MAGIC: [u8; 4] = *b"dsyn";

    /// Bytes that the unit takes in a byte stream.
    pub fn wire_len(&self) -> u64 {
        (Self::PREFIX + self.head.len() + self.body.len()) as u64
    }

    /// Refuses lengths beyond those of the format; `unit` is the number for the message.
    pub(crate) fn check_lengths(kind: UnitKind, unit: u64, head: usize, body: usize) -> Result<()> {
        let bounds = kind.bounds();
        for (what, found, limit) in [("bytes of metadata", head, bounds.0), ("bytes of data", body, bounds.1)]
        {
            if found > limit {
                return Err(Error::TooLong { unit, what, found: found as u64, limit: limit as u64 });
            }
        }
        Ok(())
    }

    pub(crate) fn prefix(&self) -> [u8; Self::PREFIX] {
        let mut prefix = [0; Self::PREFIX];
        prefix[..4].copy_from_slice(&Self::MAGIC);
        prefix[4] = self.kind as u8;
        prefix[8..12].copy_from_slice(&(self.head.len() as u32).to_le_bytes());
        prefix[12..].copy_from_slice(&(self.body.len() as u32).to_le_bytes());
        prefix
    }
}

/// Fixed-size fields from the front of a unit's head.
pub(crate) struct Fields<'a> {
    pub rest: &'a [u8],
    pub unit: u64,
}

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8]> {
        if len > self.rest.len() {
            return Err(Error::Damaged { unit: self.unit, what: "its metadata is too short" });
        }
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn uuid(&mut self) -> Result<uuid::Uuid> {
        Ok(uuid::Uuid::from_bytes(self.array()?))
    }

    /// Bytes kept for later, zero until then: so that no byte of a delta can change unnoticed.
    pub(crate) fn reserved(&mut self, len: usize) -> Result<()> {
        match self.bytes(len)?.iter().all(|&b| b == 0) {
            true => Ok(()),
            false => Err(Error::Damaged { unit: self.unit, what: "reserved bytes are not zero" }),
        }
    }

    pub(crate) fn finish(self) -> Result<()> {
        match self.rest {
            [] => Ok(()),
            _ => Err(Error::Damaged { unit: self.unit, what: "its metadata is too long" }),
        }
    }
}
