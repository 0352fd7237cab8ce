//! Both ends of a sync: the source's end chooses the method, finds, reads, packs and sends ([`push`]); the replica's end
//! says where it stands, receives and commits ([`receive`]). [`extract`] and [`merge`] do the same with a pipe between.

mod compared;
mod error;
mod extract;
mod far;
mod messages;
mod push;
mod read;

pub use error::{Class, SyncError};
pub use extract::{Extracted, extract};
pub use far::{Merged, merge, receive};
pub use messages::Commit;
pub use push::{How, Options, Progress, Summary, push};
