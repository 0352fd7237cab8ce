//! Both ends of a sync: the source's end plans, reads, packs and sends ([`push`]); the replica's end reports its status,
//! receives and commits ([`receive`]). [`extract`] and [`merge`] do the same with a pipe between; [`verify`] checks a replica,
//! and repairs it; [`Mirror`] repeats syncs continuously.
//!
//! ```text
//!     facts ──▶ plan ──▶ transfer (read, pack, send) ──▶ report
//! ```
//!
//! ```
//! use link::Link;
//! use source::{Handle, SourceOptions, StateDir};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let (image, copy) = (folder.path().join("vm.raw"), folder.path().join("copy.raw"));
//! # std::fs::write(&image, vec![7; 1 << 20])?;
//! let state = StateDir::find(Some(&folder.path().join("state")));
//! let handle = Handle::attach(&state, image.to_str().unwrap(), &SourceOptions::default())?;
//! // Over ssh or TLS the other end is another process.
//! let (here, there) = Link::pair();
//! let far = state.clone();
//! let receiving = std::thread::spawn(move || sync::receive(there, &far));
//! let options = sync::SyncOptions::default();
//! let summary = sync::push(&handle, here, &copy, "copy.raw", &options, &|_done, _total| {})?;
//! assert_eq!(summary.bytes_changed, 1 << 20);
//! receiving.join().unwrap()?;
//! handle.close()?;
//! assert!(std::fs::read(&image)? == std::fs::read(&copy)?);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod conflict;
mod cut_hook;
mod error;
mod extents;
mod mirror;
mod options;
mod plan;
mod replica_end;
mod report;
mod roles;
mod site;
mod source_end;
#[cfg(test)]
mod tests;
mod transfer;
mod wire;

pub use conflict::{Conflict, Diverged, Divergence, Since, with_ends};
pub use cut_hook::CutHook;
pub use delta::Method;
pub use error::{Class, SyncError};
pub use extents::{Extent, ListedExtents};
pub use mirror::attempts::{Attempts, Interruption};
pub use mirror::batching::Batching;
pub use mirror::group::{GroupEvent, GroupMirror, GroupMirrorSummary};
pub use mirror::{BatchReport, Mirror, MirrorEvent, MirrorOptions, MirrorSummary, Turns};
pub use options::{GiveUp, LiveOptions, SyncOptions, Unreadable, Way};
pub use plan::facts::PULLED;
pub use replica::{CommitMode, Keep};
pub use replica_end::allowed_paths::AllowedPaths;
#[doc(hidden)]
pub use replica_end::merge::merge_over;
pub use replica_end::merge::{MergeOptions, Merged, merge};
pub use replica_end::opening::{known_replicas, open_options, open_replica};
pub use replica_end::pull::{Pull, PullClient, PullContext, SourceInfo, SourceRequest, Task, send};
#[doc(hidden)]
pub use replica_end::receive::receive_over;
pub use replica_end::receive::{receive, receive_within};
pub use report::{GivenUpWrites, Progress, Summary};
pub use roles::attach::{
    ToldMember, attach, attach_group, attach_told_group, follow, follow_group, resized, settle,
};
pub use roles::demote::{DemoteOptions, DemoteSummary, LastSync, demote};
pub use roles::group_demote::{Afterwards, LastGroupSync, demote_group};
pub use roles::group_promote::{GroupPromotion, promote_group};
pub use roles::last_word::LastWord;
pub use roles::promote::{PromoteOptions, Promotion, promote};
pub use roles::{made_elsewhere, refuse_replica, restored, unpromoted};
#[doc(hidden)]
pub use site::Site;
pub use source_end::account::count_failure;
pub use source_end::push::{GroupSummary, push, push_group};
pub use source_end::verify::{Verified, VerifyOptions, verify};
pub use transfer::extract::{Extracted, extract};
pub use wire::pipeline::Stages;
