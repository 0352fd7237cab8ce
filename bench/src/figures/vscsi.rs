//! The binary traces that vscsiStats of VMware ESX writes (`.vscsi`), in both versions, as published by CloudPhysics.
//!
//! A record a request, all of the same size, little-endian, without a head:
//!
//! ```text
//! version 1, 32 bytes: serial u32, length u32, segments u32, command u16, version u16, block u64, time u64
//! version 2, 40 bytes: command u16, version u16, serial u32, length u32, segments u32, block u64, time u64, latency u64
//! ```
//!
//! The upper byte of the version field is the version. The length is in bytes, the block has 512 bytes, the time is in microseconds. A command
//! is the SCSI operation code.

use std::io::Read;

use anyhow::{Context, Result, bail, ensure};

const SECTOR: u64 = 512;

/// The two layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Version {
    One,
    Two,
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// In microseconds, from any moment.
    pub time: u64,
    pub write: bool,
    /// In bytes.
    pub offset: u64,
    pub len: u64,
}

impl Version {
    /// What the first bytes of a file say; `None` if it is another kind of file. The version must stand where it belongs in two records, or in
    /// the only one.
    pub(crate) fn of(head: &[u8]) -> Option<Version> {
        [Version::Two, Version::One].into_iter().find(|version| {
            let mut records = head.chunks_exact(version.size()).take(2).peekable();
            records.peek().is_some() && records.all(|record| version.is_named_by(record))
        })
    }

    /// Bytes of a record.
    pub(crate) fn size(self) -> usize {
        match self {
            Version::One => 32,
            Version::Two => 40,
        }
    }

    fn is_named_by(self, record: &[u8]) -> bool {
        match self {
            Version::One => record[15] == 1,
            Version::Two => record[3] == 2,
        }
    }

    /// Where command, length, block and time stand.
    fn places(self) -> [usize; 4] {
        match self {
            Version::One => [12, 4, 16, 24],
            Version::Two => [0, 8, 16, 24],
        }
    }
}

/// The requests of a trace, in order.
pub(crate) struct Trace<R> {
    input: R,
    version: Version,
    at: u64,
}

impl<R: Read> Trace<R> {
    pub(crate) fn new(input: R, version: Version) -> Trace<R> {
        Trace { input, version, at: 0 }
    }

    /// The byte at which the next record begins.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// The next request; `None` at the end. An error names the byte at which the record begins.
    pub(crate) fn next(&mut self) -> Result<Option<Request>> {
        let (at, size) = (self.at, self.version.size());
        let mut record = Vec::with_capacity(size);
        self.input.by_ref().take(size as u64).read_to_end(&mut record)?;
        if record.is_empty() {
            return Ok(None);
        }
        ensure!(
            record.len() == size,
            "byte {at}: the last record is cut off: {} of {size} bytes",
            record.len()
        );
        ensure!(
            self.version.is_named_by(&record),
            "byte {at}: not a record of version {}",
            if self.version == Version::One { 1 } else { 2 }
        );
        let [command, len, block, time] = self.version.places();
        let number = |at: usize, bytes: usize| {
            record[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let command = number(command, 2);
        let offset = number(block, 8).checked_mul(SECTOR);
        let offset =
            offset.with_context(|| format!("byte {at}: a block beyond any disk: {}", number(block, 8)))?;
        self.at += size as u64;
        Ok(Some(Request {
            time: number(time, 8),
            write: is_write(command, at)?,
            offset,
            len: number(len, 4),
        }))
    }
}

/// True for what changes blocks; not for what reads or asks.
fn is_write(command: u64, at: u64) -> Result<bool> {
    match command {
        // WRITE of 6, 10, 12 and 16, WRITE AND VERIFY, WRITE SAME.
        0x0a | 0x2a | 0xaa | 0x8a | 0x2e | 0xae | 0x8e | 0x41 | 0x93 => Ok(true),
        0..=0xff => Ok(false),
        _ => bail!("byte {at}: not a SCSI command: {command:#06x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request as (time, command, block, bytes).
    type Made = (u64, u16, u64, u32);

    const SOME: [Made; 3] =
        [(5_000_000, 0x2a, 16, 8192), (5_000_100, 0x28, 0, 512), (5_000_200, 0x8a, 3, 1024)];

    fn one((time, command, block, len): Made) -> Vec<u8> {
        let mut record = [7u32.to_le_bytes(), len.to_le_bytes(), 1u32.to_le_bytes()].concat();
        record.extend(command.to_le_bytes());
        record.extend(0x0100u16.to_le_bytes());
        record.extend([block.to_le_bytes(), time.to_le_bytes()].concat());
        record
    }

    fn two((time, command, block, len): Made) -> Vec<u8> {
        let mut record = [command.to_le_bytes(), 0x0200u16.to_le_bytes()].concat();
        record.extend([7u32.to_le_bytes(), len.to_le_bytes(), 1u32.to_le_bytes()].concat());
        record.extend([block.to_le_bytes(), time.to_le_bytes(), 99u64.to_le_bytes()].concat());
        record
    }

    fn all(bytes: &[u8], version: Version) -> Result<Vec<Request>> {
        let mut trace = Trace::new(bytes, version);
        std::iter::from_fn(|| trace.next().transpose()).collect()
    }

    #[test]
    fn both_versions_say_the_same() {
        let wanted = [
            Request { time: 5_000_000, write: true, offset: 8192, len: 8192 },
            Request { time: 5_000_100, write: false, offset: 0, len: 512 },
            Request { time: 5_000_200, write: true, offset: 1536, len: 1024 },
        ];
        for (bytes, version) in
            [(SOME.map(one).concat(), Version::One), (SOME.map(two).concat(), Version::Two)]
        {
            assert_eq!(Version::of(&bytes), Some(version));
            assert_eq!(Version::of(&bytes[..version.size()]), Some(version), "one record");
            assert_eq!(all(&bytes, version).unwrap(), wanted);
        }
    }

    #[test]
    fn other_files_are_none() {
        let csv = b"128166372003061629,hm,0,Read,383496192,32768,413\n128166372016382155,hm,0,Write,2822144,4096,8327\n";
        for other in [&csv[..], b"", b"short", &[0; 80]] {
            assert_eq!(Version::of(other), None);
        }
    }

    #[test]
    fn damage_is_named_by_its_byte() {
        let whole = SOME.map(two).concat();
        let error = |bytes: &[u8]| all(bytes, Version::Two).unwrap_err().to_string();
        assert!(error(&whole[..119]).starts_with("byte 80: the last record is cut off: 39 of 40"));
        let mut damaged = whole.clone();
        damaged[43] = 9;
        assert!(error(&damaged).starts_with("byte 40: not a record of version 2"));
        damaged = whole.clone();
        damaged[81] = 0x77;
        assert!(error(&damaged).starts_with("byte 80: not a SCSI command: 0x778a"));
        damaged = whole;
        damaged[16..24].fill(0xff);
        assert!(error(&damaged).starts_with("byte 0: a block beyond any disk"));
    }
}
