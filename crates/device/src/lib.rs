//! Disks as bytes: files, block devices and memory behind one trait, with batched requests, direct I/O, holes, identity and locks;
//! and the folders in which dsync keeps its state.
//!
//! All other crates read and write disks through [`Disk`] and store state through [`Folder`], so that tests can fail any call or cut
//! the power under all of them.
//!
//! ```
//! use device::Disk;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("vm.raw");
//! std::fs::File::create(&path)?.set_len(1 << 20)?;
//! let disk = device::open(&path, &device::DiskOptions { write: true, direct: false, exclusive: false })?;
//! disk.write_at(4096, b"hello")?;
//! disk.flush()?;
//! let mut read = [0; 5];
//! disk.read_at(4096, &mut read)?;
//! assert_eq!(&read, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! Streams of requests go through [`Disk::queue`], which keeps many of them in flight.

mod clone;
mod disk;
mod error;
mod export;
mod folder;
mod human;
mod identity;
mod local_socket;
mod lock;
mod medium;
mod moment;
mod room;
mod sharing;
mod sys;
mod usage;

pub use clone::{Overwritten, clone_file, differing, likely_differing, tells_places};
pub use disk::bell::Bell;
pub use disk::buffer::Buf;
pub use disk::container::{Format, container_format};
pub use disk::file::{DiskOptions, adopt, open, open_without_uring};
pub use disk::overlay::Overlay;
pub use disk::ram::RamDisk;
pub use disk::table::listed_partitions;
pub use disk::threads::ThreadQueue;
pub use disk::{Disk, Done, InlineQueue, Piece, Pieces, Queue, Request, RequestKind};
pub use error::{DeviceError, DeviceErrorKind, is_unreadable, unreadable};
pub use export::{ExportUri, NbdServer, absolute, is_export, is_there};
pub use folder::lock::FolderLock;
pub use folder::new_file::NewFile;
pub use folder::reserve::Reserve;
pub use folder::{
    Dir, Folder, Mapping, StateFile, give, open_within, replace, replace_with, reserve, reserved,
};
pub use human::{exact_size, human_size, human_time};
pub use identity::{DiskKind, Identity, identity, identity_of};
pub use local_socket::listen_at;
pub use lock::{Access, ImageLock, lock_image};
pub use medium::clock::{Boot, Clock, Life, grain, stamps_apart};
pub use medium::storage::{Storage, parts_of};
pub use medium::written::{WriteCounts, WriteTimes, WriteWatch};
pub use medium::{Gauge, Medium, MediumChange, UNREADABLE, agree, disk_id, hash_of, hash_of_bytes, hashes};
pub use moment::{moment, moments};
pub use room::Room;
pub use sharing::Sharing;
pub use sys::local_minute;
pub use usage::{
    Mount, drop_cached, file_system, free_space, hidden_mount, in_use, may_change, mounted_at, mounts_on,
    opened_for_writing,
};
