//! The disk in a qcow2 file, as a [`device::Disk`]: QEMU's own `qemu-nbd` reads and writes the file, and this starts it, ends it, and talks
//! NBD to it. A source and a replica both need that, so it is no part of either; it needs `nbd`, so it is none of `device`.
//!
//! What must hold:
//!
//! - *qemu-nbd never outlives this process.* The kernel kills it with the thread that started it, and it ends by itself once its last
//!   connection is gone. It listens on a socket that has no name by the time it is started, so nothing is left behind either.
//! - *Nobody guesses a format.* The file is opened before QEMU looks at it, its head is read here ([`ImageHeader`]), and QEMU is told that it is a
//!   qcow2 file, and which one, by the descriptor. A guest that writes a header to its disk names no file to QEMU.
//! - *The file is at rest when it is looked at.* QEMU keeps tables in memory until a flush, so a write may move the file's times later.
//!   [`Image::settle`] writes them out; until the next write nothing changes the file.
//!
//! A SIGKILL of qemu-nbd leaves a file in order in which some clusters may be allocated and used by nothing: QEMU writes its tables in
//! an order that ensures that, as `lazy-refcounts` is off. [`Image::reclaim`] frees them.

#![forbid(unsafe_code)]

mod head;
mod image;
mod server;
mod tools;

pub use head::ImageHeader;
pub use image::{Image, connect, free};
pub use server::Use;
pub use tools::{check, check_size, create};
