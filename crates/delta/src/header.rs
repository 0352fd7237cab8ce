//! The header: where a delta comes from, and what it fits.

use std::fmt;

use device::Buf;
use lineage::{Lives, Point};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use uuid::Uuid;

use crate::limits::{MAX_CHAIN, MAX_SIZE};
use crate::unit::Fields;
use crate::{Epoch, Error, Result, Unit, UnitKind};

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u16 = 1;

const BINDS: u32 = 1;
const RESUMES: u32 = 2;
const FUZZY: u32 = 4;
// 8 was in use before the first release.
const BATCH: u32 = 16;
const PARTIAL: u32 = 32;
const WHOLE_PATH: u32 = 128;
const KNOWN: u32 = BINDS | RESUMES | FUZZY | BATCH | PARTIAL | WHOLE_PATH;

/// How the changes were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Method {
    /// A tracker wrote them down.
    Tracked = 1,
    /// Checksums of aligned blocks on both sides.
    Compare = 2,
    /// Rolling checksums, which find moved data too.
    Rolling = 3,
    /// Everything that is allocated; a seed, if bound to nothing.
    Copy = 4,
}

impl Method {
    fn from_byte(byte: u8) -> Option<Method> {
        [Method::Tracked, Method::Compare, Method::Rolling, Method::Copy]
            .into_iter()
            .find(|&m| m as u8 == byte)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Method::Tracked => "tracked",
            Method::Compare => "compare",
            Method::Rolling => "rolling",
            Method::Copy => "copy",
        })
    }
}

/// The part of an interrupted delta on top of which another goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// The interrupted delta's stream id.
    pub stream: Uuid,
    /// Its frames that were received.
    pub frames: u64,
    /// [`crate::Decoder::digest`] after the last of them.
    pub digest: [u8; 32],
}

/// Where a delta comes from, and what it fits.
///
/// To merge a delta is to give the replica `size_after` (cutting it, or adding zeroes at its end), then to apply the
/// records in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Random; frames are bound to it, so that those of different deltas can't be mixed up.
    pub stream: Uuid,
    /// The source.
    pub source: Uuid,
    /// The epochs that the delta spans, ascending: it takes a replica at any of them to the last. A seed's chain has only
    /// that one. A delta that is bound to a replica's state takes that to the last; the others are epochs that its source had before.
    pub chain: Vec<Epoch>,
    /// Size of the disk in bytes at the first epoch of the chain; 0 before a seed.
    pub size_before: u64,
    /// Size of the disk in bytes at the last epoch.
    pub size_after: u64,
    /// Unit of tracking in bytes, a power of two from 512 to 1 GiB. Tells how fine the extents are, nothing else.
    pub block_size: u32,
    /// How the changes were found.
    pub method: Method,
    /// The state (nonce) of the one replica that the delta fits, for methods that looked at the replica.
    pub binds: Option<Uuid>,
    /// The interrupted delta on top of which this one goes on: it fits nothing else.
    pub resumes: Option<Resume>,
    /// Read from a live disk without a cut: the result is no exact epoch.
    pub fuzzy: bool,
    /// A batch of a mirror: the result is ahead of the chain's last epoch, at a moment within the next, which nothing names
    /// but this delta's stream id.
    pub batch: bool,
    /// Found by comparing a part of the replica at its own epoch: what it does not name stays as it was.
    pub partial: bool,
    /// The way to the moment that the delta leads to. Bound to a replica's state, it may begin with the newest life that the replica knows.
    pub lives: Lives,
}

impl Header {
    /// The header of a delta from `source` to the last epoch of `chain`, for a disk of these sizes in bytes before and
    /// after. It is bound to no replica's state, goes on from no other delta, and makes an exact epoch.
    pub fn new(
        source: Uuid,
        method: Method,
        chain: Vec<Epoch>,
        (size_before, size_after): (u64, u64),
        block_size: u32,
    ) -> Header {
        Header {
            stream: Uuid::new_v4(),
            source,
            chain,
            size_before,
            size_after,
            block_size,
            method,
            binds: None,
            resumes: None,
            fuzzy: false,
            batch: false,
            partial: false,
            lives: Lives::default(),
        }
    }

    /// The epoch that a replica stands at afterwards. (`None` only if the chain is empty, which no encoder accepts and no
    /// decoder yields.)
    pub fn to(&self) -> Option<&Epoch> {
        self.chain.last()
    }

    /// Leaves epochs out of a chain that is too long for a delta: not its first, at which the replica is for which it was made, nor the latest.
    pub fn limit_chain(&mut self) {
        let excess = self.chain.len().saturating_sub(MAX_CHAIN);
        if excess > 0 {
            self.chain.drain(1..=excess);
        }
    }

    /// Where in the chain an epoch stands, by its id.
    pub fn position(&self, at: &Epoch) -> Option<usize> {
        self.chain.iter().position(|epoch| epoch == at)
    }

    /// True if the delta can be merged into an exact replica that stands at `at`. What is bound to one replica's state or
    /// goes on from an interrupted delta fits no epoch: compare [`Header::binds`] and [`Header::resumes`].
    pub fn fits(&self, at: &Epoch) -> bool {
        self.binds.is_none() && self.resumes.is_none() && self.position(at).is_some()
    }

    /// True for the first, whole delta: what it does not mention is zero.
    pub fn is_seed(&self) -> bool {
        self.method == Method::Copy && self.binds.is_none()
    }

    /// Refuses headers that contradict themselves.
    fn check(&self) -> Result<()> {
        let chain = &self.chain;
        let bound = self.binds.is_some() || self.resumes.is_some();
        let why = if chain.is_empty() {
            "its chain of epochs is empty"
        } else if chain.len() > MAX_CHAIN {
            "its chain of epochs is too long"
        } else if !chain.windows(2).all(|pair| pair[0].number < pair[1].number) {
            "its epochs do not ascend"
        } else if !self.block_size.is_power_of_two() || !(512..=1 << 30).contains(&self.block_size) {
            "its block size is not a power of two from 512 bytes to 1 GiB"
        } else if self.size_before.max(self.size_after) > MAX_SIZE {
            "its disk size is out of range"
        } else if matches!(self.method, Method::Compare | Method::Rolling) && !bound {
            "its changes were found by looking at a replica, but it does not say which"
        } else if self.batch && (self.method != Method::Tracked || self.binds.is_none()) {
            "it is a batch, but does not say for which state of a replica"
        } else if self.partial && self.method != Method::Compare {
            "it is of a part, but was not found by comparing"
        } else if !self.lives.is_sound() {
            "the lives that led to it are too many, or repeat themselves"
        } else if self.is_seed() && chain.len() > 1 {
            "a seed spans one epoch, not several"
        } else {
            return Ok(());
        };
        Err(Error::Header { why })
    }

    /// The header as a unit.
    pub(crate) fn encode(&self) -> Result<Unit> {
        self.check()?;
        let mut flags = 0;
        let mut head =
            Vec::with_capacity(72 + (self.chain.len() + self.lives.lives().len()) * 24 + 16 + 56 + 16);
        flags |= if self.binds.is_some() { BINDS } else { 0 };
        flags |= if self.resumes.is_some() { RESUMES } else { 0 };
        flags |= if self.fuzzy { FUZZY } else { 0 };
        flags |= if self.batch { BATCH } else { 0 };
        flags |= if self.partial { PARTIAL } else { 0 };
        flags |= if self.lives.is_whole() { WHOLE_PATH } else { 0 };
        head.extend(VERSION.to_le_bytes());
        head.extend([self.method as u8, 0]);
        head.extend(flags.to_le_bytes());
        head.extend([0; 4]);
        head.extend(self.block_size.to_le_bytes());
        head.extend(self.stream.as_bytes());
        head.extend(self.source.as_bytes());
        head.extend(self.size_before.to_le_bytes());
        head.extend(self.size_after.to_le_bytes());
        head.extend((self.chain.len() as u32).to_le_bytes());
        head.extend((self.lives.lives().len() as u32).to_le_bytes());
        for epoch in &self.chain {
            head.extend(epoch.number.to_le_bytes());
            head.extend(epoch.id.as_bytes());
        }
        for life in self.lives.lives() {
            head.extend(life.n.to_le_bytes());
            head.extend(life.life.as_bytes());
        }
        if let Some(nonce) = &self.binds {
            head.extend(nonce.as_bytes());
        }
        if let Some(resume) = &self.resumes {
            head.extend(resume.stream.as_bytes());
            head.extend(resume.frames.to_le_bytes());
            head.extend(resume.digest);
        }
        head.extend(XxHash3_128::oneshot(&head).to_le_bytes());
        Ok(Unit { kind: UnitKind::Header, head, body: Buf::new(0) })
    }

    pub(crate) fn decode(head: &[u8]) -> Result<Header> {
        let mut fields = Fields { rest: head, unit: 0 };
        // The version first: whatever a later one changes, this much stays.
        let version = fields.u16()?;
        let Some(hashed) = head.len().checked_sub(16).filter(|&at| at >= 72) else {
            return Err(Error::Damaged { unit: 0, what: "its metadata is too short" });
        };
        if XxHash3_128::oneshot(&head[..hashed]).to_le_bytes() != head[hashed..] {
            return Err(Error::Damaged { unit: 0, what: "its checksum is wrong" });
        }
        if version != VERSION {
            return Err(Error::Version { found: version, known: VERSION });
        }
        fields.rest = &head[2..hashed];
        let method = fields.u8()?;
        fields.reserved(1)?;
        let flags = fields.u32()?;
        if flags & !KNOWN != 0 {
            return Err(Error::Flags { flags: flags & !KNOWN });
        }
        let other_flags = fields.u32()?;
        let block_size = fields.u32()?;
        let (stream, source) = (fields.uuid()?, fields.uuid()?);
        let (size_before, size_after) = (fields.u64()?, fields.u64()?);
        let (count, lives) = (fields.u32()? as usize, fields.u32()? as usize);
        if count > MAX_CHAIN {
            return Err(Error::TooLong {
                unit: 0,
                what: "epochs in its chain",
                found: count as u64,
                limit: MAX_CHAIN as u64,
            });
        }
        if lives > Lives::MOST {
            let (found, limit) = (lives as u64, Lives::MOST as u64);
            return Err(Error::TooLong { unit: 0, what: "lives in its path", found, limit });
        }
        let mut chain = Vec::new();
        let mut epochs = Fields { rest: fields.bytes(count * 24)?, unit: 0 };
        while !epochs.rest.is_empty() {
            chain.push(Epoch { number: epochs.u64()?, id: epochs.uuid()? });
        }
        let mut path = Vec::new();
        let mut points = Fields { rest: fields.bytes(lives * 24)?, unit: 0 };
        while !points.rest.is_empty() {
            let n = points.u64()?;
            path.push(Point { life: points.uuid()?, n });
        }
        let binds = if flags & BINDS != 0 { Some(fields.uuid()?) } else { None };
        let resumes = if flags & RESUMES != 0 {
            Some(Resume { stream: fields.uuid()?, frames: fields.u64()?, digest: fields.array()? })
        } else {
            None
        };
        // What later versions add, and what may be ignored, stands here.
        if other_flags == 0 {
            fields.finish()?;
        }
        let Some(method) = Method::from_byte(method) else {
            return Err(Error::Header { why: "unknown method: use a newer dsync" });
        };
        let header = Header {
            stream,
            source,
            chain,
            size_before,
            size_after,
            block_size,
            method,
            binds,
            resumes,
            fuzzy: flags & FUZZY != 0,
            batch: flags & BATCH != 0,
            partial: flags & PARTIAL != 0,
            lives: Lives::of(path, flags & WHOLE_PATH != 0),
        };
        header.check()?;
        Ok(header)
    }
}
