//! Serves one conversation as the replica's end: about one replica, or about those of a group.

use link::Link;
use replica::Replica;

use crate::error::SyncError;
use crate::replica_end::allowed_paths::AllowedPaths;
use crate::replica_end::far::{Opened, Opener, ReplicaEnd, asked_for, end_with, open_here};
use crate::replica_end::group_receiver::{GroupOpener, open_group};
use crate::site::Site;
use crate::wire::messages::Asked;

/// Serves one sync as the replica's end of `link`. Errors are reported to the other end too.
pub fn receive(link: Link, site: &dyn Site) -> Result<(), SyncError> {
    receive_within(link, site, &AllowedPaths::Anything)
}

/// Serves one sync as the replica's end of `link`, within the allowed paths.
pub fn receive_within(link: Link, site: &dyn Site, allowed: &AllowedPaths) -> Result<(), SyncError> {
    let one: Opener<'_> = &|open| {
        let path = allowed.find(&open.path)?;
        allowed.only_beside("a journal in", open.journal_dir.as_deref())?;
        allowed.only_beside(
            "the digest file",
            open.digests.as_ref().and_then(|digests| digests.file.as_deref()),
        )?;
        allowed.only_beside("the file to save to,", open.saves())?;
        match open_here(open, &path, site)? {
            Opened::Primary(path, primary) if open.give_up.is_some() && allowed.is_restricted() => {
                Err(SyncError::Refused(format!(
                    "{0} is a source itself (term {1}), which no remote client may give up: run \"dsync demote {0}\" there first",
                    path.display(),
                    primary.term
                )))
            }
            opened => Ok(opened),
        }
    };
    let group: GroupOpener<'_> = &|asked| {
        let paths = asked.members.iter().map(|open| allowed.find(&open.path));
        open_group(asked, &paths.collect::<Result<Vec<_>, _>>()?, site)
    };
    receive_at(link, Some(site), one, group)
}

/// Serves one sync as the replica's end of `link`, to a replica that the caller opens, wherever it is.
#[doc(hidden)]
pub fn receive_over(
    link: Link,
    open: &dyn Fn(&replica::ReplicaOptions) -> replica::Result<Replica>,
) -> Result<(), SyncError> {
    let one: Opener<'_> = &|asked| {
        let options = asked_for(asked, replica::ReplicaOptions::default());
        Ok(Opened::Replica(Box::new(open(&options)?)))
    };
    receive_at(link, None, one, &|_| Err(SyncError::Refused("no group is received here".into())))
}

fn receive_at(
    link: Link,
    site: Option<&dyn Site>,
    opened: Opener<'_>,
    group: GroupOpener<'_>,
) -> Result<(), SyncError> {
    let (sender, receiver) = link.split();
    let end = ReplicaEnd { sender: &sender, receiver: &receiver, site, progress: &|_, _| {}, writes: true };
    let result = Asked::hear(&receiver).and_then(|asked| match asked {
        Asked::One(open) => end.converse(&open, opened).map(drop),
        Asked::Group(asked) => end.converse_group(&asked, group),
    });
    end_with(sender, result)
}
