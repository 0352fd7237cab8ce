//! A source: a disk with a recorded history of changes. Its identity, its epochs, its checkpoints and views.
//!
//! [`Source`] is one whose writes pass through this process, [`Live`] one recorded by a tracker in the kernel; [`Handle`] reaches
//! either, in whatever process it is held. A checkpoint ends an epoch; the history says which blocks changed in which epoch.
//!
//! ```
//! use device::Disk;
//! use source::{SourceOptions, Source, StateDir};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let image = folder.path().join("vm.raw");
//! # std::fs::File::create(&image)?.set_len(1 << 20)?;
//! let state = StateDir::find(Some(&folder.path().join("state")));
//! let source = Source::open(&state, &image, &SourceOptions::default())?;
//! source.checkpoint(false)?;
//! source.disk().write_at(8192, b"hello")?;
//! assert_eq!(source.dirty()?.runs().collect::<Vec<_>>(), [2..3]);
//! let epoch = source.checkpoint(false)?.epoch;
//! assert_eq!(epoch.number, 2);
//! source.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! `examples/changes.rs` queries the history.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod attended;
mod backing;
mod batches;
mod bookmarks;
mod clones;
mod control;
mod convergence;
mod courtesy;
mod discard;
mod error;
mod export;
mod forget;
mod freeze;
mod gap;
mod group;
mod group_handle;
mod handle;
mod history;
mod json;
mod live;
mod lives;
mod memory_view;
mod moments;
mod outside;
mod overwritten;
mod pace;
mod peek;
mod rests;
mod source;
mod stamp;
mod state;
mod succeed;
mod tally;
mod track;
mod view;
mod watchdog;

pub use attended::{Attended, There};
pub use backing::{Backing, disk_in, read_image};
pub use batches::{Batch, Batches};
pub use bookmarks::{Bookmark, Bookmarks, Reached, is_plain};
pub use clones::Around;
pub use control::{Client, ControlServer, Status};
pub use convergence::Convergence;
pub use device::Boot;
#[doc(hidden)]
pub use discard::clear;
pub use error::SourceError;
pub use export::unrecorded;
pub use forget::{forget_bookmark, forget_source, in_use};
pub use freeze::{Freeze, FreezeError, Prepared};
pub use gap::Gap;
pub use group::{
    Members, Membership, SourceGroup, check_name, check_promotion, group_members, join_group, leave_group,
};
#[doc(hidden)]
pub use group::{join_in, leave_in};
pub use group_handle::GroupHandle;
pub use handle::{Changes, Handle};
pub use history::trail::{Step, Trail, leave_trail, note_step};
pub use history::{EpochInfo, History, Position};
pub use live::{Cut, CutOptions, FreezeMode, Live};
pub use lives::lives;
pub use moments::{ChangeList, LastMoment, Told, ToldChanges, last_moment, moment_of};
pub use overwritten::overwritten;
pub use peek::{KeptClone, Written, doubt, lost, was_served, written_since};
pub use source::{BatchChanges, Checkpoint, SharedView, Source, SourceOptions};
pub use state::{About, StateDir, Survey, export_name, file_name};
#[doc(hidden)]
pub use state::{about_in, write_about};
#[doc(hidden)]
pub use succeed::succeed_in;
pub use succeed::{Succession, check_term, succeed};
pub use tally::{Counter, LastFailure, LastVerify, Tally, Work};
pub use track::{track_by_clones, untrack};
pub use view::View;
