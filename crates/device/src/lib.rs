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
//! let disk = device::open(&path, &device::Options { write: true, direct: false, exclusive: false })?;
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

mod bell;
mod buffer;
mod clock;
mod clone;
mod container;
mod disk;
mod error;
mod export;
mod file;
mod folder;
mod folder_lock;
mod human;
mod identity;
mod local_socket;
mod lock;
mod medium;
mod moment;
mod new_file;
mod overlay;
mod ram;
mod reserve;
mod sharing;
mod storage;
mod sys;
mod table;
mod threads;
mod usage;
mod written;

pub use bell::Bell;
pub use buffer::Buf;
pub use clock::{Boot, Clock, Life, grain, stamps_apart};
pub use clone::{Overwritten, clone_file, differing, likely_differing, tells_places};
pub use container::{Format, container_format};
pub use disk::{Disk, Done, InlineQueue, Kind, Piece, Pieces, Queue, Request};
pub use error::{DeviceError, DeviceErrorKind, is_unreadable, unreadable};
pub use export::{ExportUri, NbdServer, absolute, is_export, is_there};
pub use file::{Options, adopt, open, open_without_uring};
pub use folder::{Dir, Folder, Mapping, StateFile, give, open_within, replace, reserve, reserved};
pub use folder_lock::FolderLock;
pub use human::{exact_size, human_size, human_time};
pub use identity::{DiskKind, Identity, identity, identity_of};
pub use local_socket::listen_at;
pub use lock::{Access, ImageLock, lock_image};
pub use medium::{Gauge, Medium, MediumChange, agree, disk_id, hash_of, masked};
pub use moment::{moment, moments};
pub use new_file::NewFile;
pub use overlay::Overlay;
pub use ram::RamDisk;
pub use reserve::Reserve;
pub use sharing::Sharing;
pub use storage::Storage;
pub use sys::local_minute;
pub use threads::ThreadQueue;
pub use usage::{Mount, file_system, free_space, hidden_mount, in_use, may_change, mounted_at, mounts_on};
pub use written::{WriteTimes, WriteWatch, Written};
