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

mod account;
mod allowed_paths;
mod apart;
mod attach;
mod attempts;
mod batching;
mod compared;
mod conflict;
mod cut_hook;
mod demote;
mod dense;
mod digests;
mod ended;
mod error;
mod extents;
mod extract;
mod facts;
mod far;
mod group;
mod group_demote;
mod group_mirror;
mod group_promote;
mod group_receiver;
mod host;
mod last_word;
mod live;
mod messages;
mod mirror;
mod mirror_receiver;
mod options;
mod pack;
mod pipeline;
mod plan;
mod primary;
mod promote;
mod pull;
mod push;
mod read;
mod receive;
mod report;
mod roles;
mod saved;
mod site;
#[cfg(test)]
mod tests;
mod transfer;
mod unlike;
mod verify;

pub use account::count_failure;
pub use allowed_paths::AllowedPaths;
pub use apart::give_up_member;
pub use attach::{ToldMember, attach, attach_group, attach_told_group, follow, follow_group, resized};
pub use batching::Batching;
pub use conflict::{Conflict, Diverged, Divergence, Since, with_ends};
pub use cut_hook::CutHook;
pub use delta::Method;
pub use demote::{DemoteOptions, DemoteSummary, LastSync, demote};
pub use error::{Class, SyncError};
pub use extents::{Extent, Extents};
pub use extract::{Extracted, extract};
pub use facts::PULLED;
#[doc(hidden)]
pub use far::merge_over;
pub use far::{MergeOptions, Merged, known_replicas, merge, open_options, open_replica};
pub use group::{GroupSummary, push_group};
pub use group_demote::{Afterwards, LastGroupSync, demote_group};
pub use group_mirror::{GroupEvent, GroupMirror, GroupMirrorSummary};
pub use group_promote::{GroupPromotion, promote_group};
pub use last_word::LastWord;
pub use mirror::{BatchReport, Mirror, MirrorEvent, MirrorOptions, MirrorSummary, Turns};
pub use options::{GiveUp, LiveOptions, SyncOptions, Unreadable, Way};
pub use pipeline::Stages;
pub use promote::{PromoteOptions, Promotion, promote};
pub use pull::{Pull, PullClient, PullContext, SourceInfo, SourceRequest, Task, send};
pub use push::push;
#[doc(hidden)]
pub use receive::receive_over;
pub use receive::{receive, receive_within};
pub use replica::{Commit, Keep};
pub use report::{GivenUp, Progress, Summary};
pub use roles::{made_elsewhere, refuse_replica, unpromoted};
#[doc(hidden)]
pub use site::Site;
pub use verify::{Verified, VerifyOptions, verify};
