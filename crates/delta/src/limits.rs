//! How large each part of a delta may be: checked before anything is allocated.

use extents::varint;

/// The most epochs a chain may name. A longer history names fewer: a delta then fits fewer positions, and stays true.
pub const MAX_CHAIN: usize = 1 << 16;
/// The longest header in bytes, with room for what later versions may add.
pub(crate) const MAX_HEADER: usize = 2 << 20;
/// The largest disk: offsets are signed wherever systems count bytes.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64;

/// The most data a frame holds, in bytes. No data or copy record is longer.
pub const MAX_DATA: usize = 1 << 20;
/// The most records a frame holds.
pub const MAX_RECORDS: usize = 4096;
/// Bytes of a frame's head before the records; with zstd eight more.
pub(crate) const FIXED: usize = 36;
/// A kind, three numbers of ten bytes at most, and a hash.
const MAX_RECORD: usize = 1 + 3 * varint::MAX + 16;
pub(crate) const MAX_FRAME_HEAD: usize = FIXED + 8 + MAX_RECORDS * MAX_RECORD;

/// Bytes of a trailer.
pub(crate) const TRAILER: usize = 5 * 8 + 32;
