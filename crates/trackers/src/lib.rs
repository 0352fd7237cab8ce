//! What records the writes to a disk: [`TrackedDisk`], a disk that records what is written through it and keeps old data for open
//! views; and, behind [`Tracker`], what records the writes to a block device in use from within the kernel ([`bpf`], [`dm`]).
//!
//! ```
//! use std::path::Path;
//!
//! /// Prints how much was written to a tracked device since its last checkpoint.
//! fn written(device: &Path) -> Result<(), trackers::TrackError> {
//!     match trackers::find(device)? {
//!         None => println!("{} is not tracked", device.display()),
//!         Some(tracker) => println!("{} blocks of {} bytes", tracker.dirty()?.count(), tracker.block_size()),
//!     }
//!     Ok(())
//! }
//! ```

pub mod bpf;
pub mod dm;
mod find;
mod gate;
mod hold;
mod intent;
mod record;
mod saved;
mod served;
mod tracked;
mod tracker;

pub use find::{find, list};
pub use hold::Hold;
pub use record::Record;
pub use saved::{Saved, SavedParts};
pub use served::Served;
pub use tracked::{Follower, Frozen, Settings, TrackError, TrackedDisk};
pub use tracker::Tracker;
