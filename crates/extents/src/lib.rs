//! Sets of blocks, for programs that track what changed: sorted ranges with their algebra, and bitmaps that many threads may set at
//! once and that skip what is clean. No I/O.
//!
//! [`Bitmap`] holds one bit a block, in memory of its own or in a mapped file, with summary levels, so that counting and iterating
//! cost in proportion to what is set. [`Extents`] holds a set as ranges. [`varint`] writes small numbers in few bytes.
//!
//! ```
//! use extents::Bitmap;
//!
//! let dirty = Bitmap::new(1 << 20);
//! dirty.set(10..20);
//! dirty.set(15..30);
//! assert_eq!(dirty.count(), 20);
//! assert_eq!(dirty.runs().collect::<Vec<_>>(), [10..30]);
//! ```

mod bitmap;
mod error;
mod memory;
mod ranges;
pub mod varint;

pub use bitmap::{Bitmap, Runs, StorageError};
pub use error::DecodeError;
pub use memory::{Memory, OutOfMemory};
pub use ranges::{Extents, Iter};
