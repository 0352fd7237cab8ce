//! Both ends of a sync: the source's end plans, reads, packs and sends ([`push`]); the replica's end reports its status,
//! receives and commits ([`receive`]). [`extract`] and [`merge`] do the same with a pipe between; [`verify`] proves a replica,
//! and mends it; [`Mirror`] repeats it all without end.
//!
//! ```text
//!     facts ──▶ plan ──▶ transfer (read, pack, send) ──▶ report
//! ```

mod allowed_paths;
mod batching;
mod compared;
mod conflict;
mod dense;
mod digests;
mod error;
mod extents;
mod extract;
mod facts;
mod far;
mod live;
mod messages;
mod mirror;
mod mirror_receiver;
mod options;
mod pack;
mod pipeline;
mod plan;
mod push;
mod read;
mod report;
#[cfg(test)]
mod tests;
mod transfer;
mod verify;

pub use allowed_paths::AllowedPaths;
pub use batching::Batching;
pub use conflict::Conflict;
pub use delta::Method;
pub use error::{Class, SyncError};
pub use extents::{Extent, Extents};
pub use extract::{Extracted, extract};
pub use far::{MergeOptions, Merged, merge, receive, receive_within};
#[doc(hidden)]
pub use far::{merge_over, receive_over};
pub use mirror::{BatchReport, Mirror, MirrorEvent, MirrorOptions, MirrorSummary};
pub use options::{LiveOptions, Options, Unreadable};
pub use pipeline::Stages;
pub use push::push;
pub use replica::Commit;
pub use report::{Progress, Summary};
pub use verify::{Verified, VerifyOptions, verify};
