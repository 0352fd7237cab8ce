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

mod batches;
mod control;
mod disk;
mod error;
mod forget;
mod gap;
mod group_handle;
mod handle;
mod live;
mod peek;
mod record;
mod source;
mod succeed;
mod track;
mod views;

pub use batches::{Batch, BatchFollower};
pub use control::group::{
    Members, SourceGroup, SourceMembership, check_name, check_promotion, group_members, join_group,
    leave_group,
};
#[doc(hidden)]
pub use control::group::{join_in, leave_in};
pub use control::{ControlClient, ControlServer, ServerStatus};
pub use device::Boot;
pub use disk::backing::{Backing, disk_in, read_image};
pub use disk::clones::Around;
#[doc(hidden)]
pub use disk::discard::clear;
pub use disk::export::unrecorded;
pub use disk::moments::{ChangeList, LastMoment, Still, Told, ToldChanges, last_moment, moment_of};
pub use disk::recorded::Recorded;
pub use error::SourceError;
pub use forget::{forget_bookmark, forget_source, in_use, is_recorded};
pub use gap::Gap;
pub use group_handle::GroupHandle;
pub use handle::{Handle, MissingChanges};
pub use live::convergence::Convergence;
pub use live::freeze::{Freeze, FreezeError, PreparedFreeze};
pub use live::{Cut, CutOptions, FreezeMode, Live};
pub use peek::{KeptClone, SourceWrites, doubt, lost, was_recorded, was_served, written_since};
pub use record::bookmarks::{Bookmark, Bookmarks, Reached, is_plain};
pub use record::history::trail::{Trail, TrailStep, leave_trail, note_step};
pub use record::history::{EpochInfo, History, KnownPosition};
pub use record::job_record::{FetchedCopy, JobEnd, JobOutcome, JobRecord};
pub use record::lives::lives;
pub use record::overwritten::overwritten;
pub use record::process::ProcessMark;
pub use record::stamp::DeviceTrust;
pub use record::state::{SourceMetadata, StateDir, Survey, export_name, file_name};
#[doc(hidden)]
pub use record::state::{about_in, write_about};
pub use record::tally::{Counter, LastFailure, LastVerify, Tally, Work};
pub use source::{AtRest, BatchChanges, Checkpoint, SharedView, Source, SourceOptions};
#[doc(hidden)]
pub use succeed::succeed_in;
pub use succeed::{Succession, check_term, succeed};
pub use track::{track_by_clones, untrack};
pub use views::attended::{Attended, There};
pub use views::shared::View;
