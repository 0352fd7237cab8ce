//! A source: the disk that is followed. Its identity, its history, its checkpoints and views.
//!
//! [`Source`] holds one in this process; [`Handle`] reaches one wherever it is held.

mod control;
mod error;
mod handle;
mod history;
mod source;
mod stamp;
mod state;
mod view;

pub use control::{Client, ControlServer, Status};
pub use error::SourceError;
pub use handle::Handle;
pub use history::{Bookmark, Bookmarks, EpochInfo, History, Position};
pub use source::{Checkpoint, Medium, Options, SharedView, Source, bookmarks};
pub use stamp::Boot;
pub use state::{About, StateDir, export_name};
pub use view::View;
