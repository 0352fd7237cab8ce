//! What can be wrong with a delta.

use std::io;

use crate::{Epoch, UnitKind};

/// The result of working with deltas.
pub type Result<T> = std::result::Result<T, Error>;

/// What is wrong with a delta, and where. Units are counted from 0, the header; frame n is unit n + 1.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The first bytes are not those of a delta.
    #[error("not a delta (unknown magic): expected the output of \"dsync extract\"")]
    NotADelta,
    /// A format that this version does not know.
    #[error("the delta has format version {found}, and this dsync reads version {known}: use a newer dsync")]
    Version {
        /// The delta's.
        found: u16,
        /// Ours.
        known: u16,
    },
    /// Something must be understood to merge this delta, and is not.
    #[error("the delta uses features that this dsync does not know (flags {flags:#x}): use a newer dsync")]
    Flags {
        /// The bits not known.
        flags: u32,
    },
    /// The stream ends between two units, before the trailer.
    #[error(
        "{}: send or extract it again", incomplete(*units)
    )]
    NoTrailer {
        /// Units that are there.
        units: u64,
    },
    /// The stream ends inside a unit.
    #[error(
        "the delta ends in the middle of unit {unit}, at byte {offset}, so it is incomplete: send or extract it again"
    )]
    Torn {
        /// The unit that is cut off.
        unit: u64,
        /// Bytes of the stream that are there.
        offset: u64,
    },
    /// Bits are not as they were written.
    #[error("unit {unit} of the delta is damaged ({what}): send or extract the delta again")]
    Damaged {
        /// The unit.
        unit: u64,
        /// What does not agree.
        what: &'static str,
    },
    /// The checksum of a frame does not hold: flipped bits, or a frame of another delta.
    #[error("frame {frame} is damaged or belongs to another delta: send or extract the delta again")]
    Foreign {
        /// The frame's sequence number.
        frame: u64,
    },
    /// A frame is missing, doubled or out of order.
    #[error(
        "frame {found} of the delta is in the place of frame {expected}: send or extract the delta again"
    )]
    Sequence {
        /// The number that belongs here.
        expected: u64,
        /// The number found.
        found: u64,
    },
    /// A unit of the wrong kind.
    #[error("unit {unit} of the delta is a {found} instead of {expected}: send or extract the delta again")]
    Unexpected {
        /// The unit.
        unit: u64,
        /// Its kind.
        found: UnitKind,
        /// What may stand there.
        expected: &'static str,
    },
    /// Something follows the trailer.
    #[error(
        "the delta continues after its trailer, with unit {unit}: it was altered, or concatenated with another"
    )]
    AfterEnd {
        /// The first unit that should not be there.
        unit: u64,
    },
    /// A part is longer than the format allows.
    #[error("unit {unit} of the delta has {found} {what}, the format allows {limit}")]
    TooLong {
        /// The unit.
        unit: u64,
        /// What is counted.
        what: &'static str,
        /// How many there are.
        found: u64,
        /// How many there may be.
        limit: u64,
    },
    /// A record that no delta of this kind may have.
    #[error(
        "unit {unit} of the delta has a record at byte {offset} of {len} bytes that {why}: the delta is invalid"
    )]
    Record {
        /// The unit.
        unit: u64,
        /// The record's offset on the disk, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// What it does.
        why: &'static str,
    },
    /// The header contradicts itself.
    #[error("invalid delta header: {why}")]
    Header {
        /// The contradiction.
        why: &'static str,
    },
    /// A unit was used after one was refused.
    #[error("the delta was refused at unit {unit}, and cannot be continued: send or extract it again")]
    Refused {
        /// The unit refused.
        unit: u64,
    },
    /// zstd refused to start or to compress.
    #[error("cannot compress a frame of the delta: {0}")]
    Compression(#[source] io::Error),
    /// Reading failed.
    #[error("cannot read unit {unit} of the delta: {error}")]
    Read {
        /// The unit.
        unit: u64,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// Writing failed.
    #[error("cannot write the delta: {0}")]
    Write(#[source] io::Error),
    /// Two deltas of different disks.
    #[error("the deltas are of different sources ({first} and {second}): combine deltas of one source")]
    Sources {
        /// The first delta's source.
        first: uuid::Uuid,
        /// The second's.
        second: uuid::Uuid,
    },
    /// The second delta does not go on from where the first ends.
    #[error(
        "the first delta ends at epoch {to}, the second covers epochs {begins} to {ends} which do not include it: give consecutive deltas"
    )]
    Apart {
        /// Where the first ends.
        to: Epoch,
        /// Where the second begins.
        begins: Epoch,
        /// Where the second ends.
        ends: Epoch,
    },
    /// Deltas of a kind that can't be combined.
    #[error("the {} delta {why}: merge the deltas one after the other instead", ordinal(*number))]
    Uncombinable {
        /// "first" or "second".
        number: usize,
        /// What stands in the way.
        why: &'static str,
    },
    /// What is wrong with one of two deltas.
    #[error("the {} delta: {error}", ordinal(*number))]
    Of {
        /// "first" or "second".
        number: usize,
        /// What is wrong.
        #[source]
        error: Box<Error>,
    },
}

fn ordinal(number: usize) -> String {
    let word = number.checked_sub(1).and_then(|at| ["first", "second", "third"].get(at));
    word.map_or_else(|| format!("{number}th"), |word| (*word).into())
}

/// How much there is of a delta without its end.
fn incomplete(units: u64) -> String {
    match units {
        0 => "the delta is empty".into(),
        units => format!("the delta ends after {units} units without its trailer, so it is incomplete"),
    }
}
