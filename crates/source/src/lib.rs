//! A source: the disk that is followed. Its identity, its history, its checkpoints and views.
//!
//! [`Source`] holds one whose writes pass through this process, [`Live`] one that a tracker in the kernel follows; [`Handle`]
//! reaches one wherever it is held.

mod batches;
mod bookmarks;
mod captured;
mod control;
mod discard;
mod error;
mod forget;
mod freeze;
mod handle;
mod history;
mod json;
mod live;
mod peek;
mod shrinking;
mod source;
mod stamp;
mod state;
mod view;
mod watchdog;

pub use batches::{Batch, Batches};
pub use bookmarks::{Bookmark, Bookmarks, is_plain};
pub use control::{Client, ControlServer, Status};
pub use device::Boot;
pub use error::SourceError;
pub use forget::{forget_bookmark, forget_source, in_use};
pub use freeze::{Freeze, FreezeError, Prepared};
pub use handle::{Changes, Handle};
pub use history::{EpochInfo, History, Position};
pub use live::{Cut, CutOptions, FreezeMode, Live, RESIZED};
pub use peek::written_since;
pub use shrinking::Shrinking;
pub use source::{Checkpoint, Medium, Options, Portion, SharedView, Source};
pub use state::{About, StateDir, Survey, export_name};
pub use view::View;
