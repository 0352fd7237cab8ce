//! What records a source's writes: the embedded tracker [`TrackedDisk`], a disk that writes down what is written through it
//! and keeps what open views still need; and, behind [`Tracker`], what records the writes to a live disk from the kernel.

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
