//! Trackers of writes: [`TrackedDisk`], a disk that records what is written through it and saves old data for open
//! views; and, behind [`Tracker`], those in the kernel for block devices in use ([`bpf`], [`dm`]).
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

mod bitmap_file;
pub mod bpf;
mod cow_store;
pub mod dm;
mod felt;
mod find;
mod gate;
mod intent;
mod last_write_time;
mod tracked;
mod tracker;
mod tracker_lock;
mod unwritten;

pub use bitmap_file::BitmapFile;
pub use cow_store::{CowFiles, CowStore};
pub use felt::{Felt, FeltFile};
pub use find::{find, list};
pub use last_write_time::LastWriteTime;
pub use tracked::{Follower, Frozen, TrackError, TrackOptions, TrackedDisk, WriteMark};
pub use tracker::{Tracker, is_fresh};
pub use tracker_lock::TrackerLock;

/// Where processes of this host tell each other what holds at most until the machine stops: locks of trackers, rests of file systems.
pub fn run_folder() -> std::path::PathBuf {
    folder("DSYNC_RUN_DIR", "/run/dsync")
}

/// The folder that this variable of the environment names, else this one.
fn folder(variable: &str, otherwise: &str) -> std::path::PathBuf {
    let named = std::env::var_os(variable).filter(|folder| !folder.is_empty());
    named.unwrap_or_else(|| otherwise.into()).into()
}
