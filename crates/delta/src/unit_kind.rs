//! What a unit can be, and how long.

use std::fmt;

use crate::limits::{MAX_DATA, MAX_FRAME_HEAD, MAX_HEADER, TRAILER};

/// What a unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum UnitKind {
    /// The first unit: where the delta comes from and what it fits.
    Header = 1,
    /// Records and their data.
    Frame = 2,
    /// The last unit: totals, and a digest of everything.
    Trailer = 3,
}

impl UnitKind {
    /// The kind that a byte of a stream or a message stands for.
    pub fn from_byte(byte: u8) -> Option<UnitKind> {
        [UnitKind::Header, UnitKind::Frame, UnitKind::Trailer].into_iter().find(|&kind| kind as u8 == byte)
    }

    /// The longest head and body.
    pub(crate) fn bounds(self) -> (usize, usize) {
        match self {
            UnitKind::Header => (MAX_HEADER, 0),
            UnitKind::Frame => (MAX_FRAME_HEAD, MAX_DATA),
            UnitKind::Trailer => (TRAILER, 0),
        }
    }
}

impl fmt::Display for UnitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UnitKind::Header => "header",
            UnitKind::Frame => "frame",
            UnitKind::Trailer => "trailer",
        })
    }
}
