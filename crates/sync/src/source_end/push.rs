//! A sync, of one disk or of a group: one round of a conversation.

use std::path::Path;

use link::{Link, Receiver, Sender};
use serde::Serialize;
use source::{GroupHandle, Handle};

use crate::error::SyncError;
use crate::options::SyncOptions;
use crate::report::{Progress, Summary};
use crate::source_end::session::{Round, Session};
use crate::wire::messages::{nonsense, part};

/// Brings the replica at the other end of `link` up to date. `name` is how the user named the destination.
pub fn push(
    handle: &Handle,
    link: Link,
    destination: &Path,
    name: &str,
    options: &SyncOptions,
    progress: Progress<'_>,
) -> Result<Summary, SyncError> {
    let (sender, receiver) = link.split();
    let pushed = push_over((&sender, &receiver), handle, destination, name, options, progress);
    part(sender, &receiver, pushed)
}

/// Brings the replica up to date as [`push`] does, without the goodbye.
pub(crate) fn push_over(
    ends: (&Sender, &Receiver),
    handle: &Handle,
    destination: &Path,
    name: &str,
    options: &SyncOptions,
    progress: Progress<'_>,
) -> Result<Summary, SyncError> {
    let round = Session::of_disk(ends, handle, (destination, name), options, progress)?.round()?;
    round.members.into_iter().next().ok_or_else(|| nonsense("no replica"))
}

/// Brings the replicas of a group at the other end of `link` to one moment. They are in the folder `dir`, and have the names of
/// the sources; `name` is how the user named the folder. With [`SyncOptions::give_up`], all are asked what they would give up before one does; it
/// names the folder in which each is saved.
pub fn push_group(
    group: &GroupHandle,
    link: Link,
    (dir, name): (&Path, &str),
    options: &SyncOptions,
    progress: Progress<'_>,
) -> Result<(GroupSummary, Vec<Summary>), SyncError> {
    let (sender, receiver) = link.split();
    let pushed = Session::of_group((&sender, &receiver), group, (dir, name), options, progress)
        .and_then(|mut session| session.round())
        .map(|round| GroupSummary::of(round, group.name(), name, options.dry_run));
    part(sender, &receiver, pushed)
}

/// What a sync of a group did, besides the summaries of its members.
#[derive(Debug, Clone, Serialize)]
pub struct GroupSummary {
    kind: &'static str,
    /// The name of the group.
    pub group: String,
    /// The folder of its replicas, as the user named it.
    pub destination: String,
    /// The number of the cut at which all replicas are. `None` after a dry run.
    pub epoch: Option<u64>,
    /// Its id.
    pub epoch_id: Option<uuid::Uuid>,
    /// The members that were copied for the first time.
    pub seeded: Vec<String>,
    /// Bytes sent over the link, framing included.
    pub bytes_sent: u64,
    /// Bytes received over the link.
    pub bytes_received: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// Nothing was sent, only counted.
    pub dry_run: bool,
}

impl GroupSummary {
    /// What a round did, and the summaries of the members.
    pub(crate) fn of(
        round: Round,
        group: &str,
        destination: &str,
        dry_run: bool,
    ) -> (GroupSummary, Vec<Summary>) {
        let summary = GroupSummary {
            kind: "group",
            group: group.to_owned(),
            destination: destination.to_owned(),
            epoch: round.cut.map(|cut| cut.number),
            epoch_id: round.cut.map(|cut| cut.id),
            seeded: round.seeded,
            bytes_sent: round.moved.0,
            bytes_received: round.moved.1,
            seconds: round.seconds,
            dry_run,
        };
        (summary, round.members)
    }
}
