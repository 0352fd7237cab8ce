//! The simulated machine beneath a site: its disks, its files, its kernel, its links.

pub mod backing;
pub mod destination;
pub mod file_system;
pub mod files;
pub mod host;
pub mod inode;
pub mod kernel;
pub mod mirror;
pub mod pipe;
pub mod tracker;
