//! A disk as bytes: queues of batched requests with owned, aligned buffers; direct and buffered files, block devices, RAM and
//! faulty disks; and the folders that hold state.
//!
//! Everything above this room reads and writes disks through [`Disk`] and keeps its state through [`Folder`], so that one
//! faulty pair ([`faulty`]) can cut the power under all of it.

mod buffer;
mod clock;
pub mod contract;
mod disk;
mod error;
pub mod faulty;
mod file;
mod folder;
mod folder_lock;
mod human;
mod identity;
mod lock;
mod medium;
mod moment;
mod ram;
mod reserve;
mod rng;
mod sharing;
mod storage;
mod sys;
mod table;
#[cfg(test)]
mod tests;
mod threads;
mod usage;
mod written;

pub use buffer::Buf;
pub use clock::{Boot, Clock, Life};
pub use disk::{Disk, Done, InlineQueue, Kind, Piece, Pieces, Queue, Request};
pub use error::{DeviceError, DeviceErrorKind, is_unreadable, unreadable};
pub use file::{Options, adopt, open};
pub use folder::{Dir, Folder, Mapping, StateFile, replace, reserve, reserved};
pub use folder_lock::FolderLock;
pub use human::{exact_size, human_size};
pub use identity::{DiskKind, Identity, identity};
pub use lock::{Access, ImageLock, lock_image};
pub use medium::{Gauge, Medium, agree, disk_id, hash_of};
pub use moment::moment;
pub use ram::RamDisk;
pub use reserve::Reserve;
pub use sharing::Sharing;
pub use storage::Storage;
pub use usage::{Mount, file_system, free_space, in_use, may_change, mounts_on};
pub use written::{WriteWatch, Written};
