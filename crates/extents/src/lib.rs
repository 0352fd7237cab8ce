//! Sets of blocks: ranges, and bitmaps that skip what is clean. No I/O.
//!
//! [`Extents`] holds a set as sorted ranges and knows its algebra. [`Bitmap`] holds one bit a block in memory that many
//! threads may set at once, or that is a mapping of a file. [`varint`] writes small numbers in few bytes.

mod bitmap;
mod ranges;
pub mod varint;

pub use bitmap::{Bitmap, DecodeError, Runs, StorageError};
pub use ranges::{Extents, Iter};
