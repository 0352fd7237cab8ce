//! An NBD server for any [`device::Disk`], over Unix sockets and TCP; and an export of any server as a disk.
//!
//! Fixed newstyle negotiation, simple and structured replies, block status, and every command of the protocol document except
//! its experimental extensions. The server knows nothing about what is behind a disk: an implementation of [`Exports`] says
//! which disks there are, and a [`Context`] what is known about their blocks.
//!
//! ```no_run
//! # use std::sync::Arc;
//! # fn example(exports: Arc<dyn nbd::Exports>) -> std::io::Result<()> {
//! let server = nbd::Server::new(exports);
//! server.serve_unix(std::os::unix::net::UnixListener::bind("/run/dsync.sock")?)?;
//! // ... until the program is told to end
//! server.shutdown(std::time::Duration::from_secs(5));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod client;
mod connection;
mod context;
mod disk;
mod export;
mod handshake;
mod output;
mod pool;
mod protocol;
mod server;
mod socket;
mod transmission;

pub use context::{BlockStatus, Context, state};
pub use disk::NbdDisk;
pub use export::{BlockSizes, Export, ExportInfo, ExportRefusal, Exports};
pub use server::{Server, ServerLimits, is_loopback};
pub use socket::Stream;
