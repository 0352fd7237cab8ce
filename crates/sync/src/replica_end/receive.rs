//! Serves one conversation as the replica's end: about one replica, or about those of a group.

use link::Link;
use replica::Replica;

use crate::error::SyncError;
use crate::replica_end::allowed_paths::AllowedPaths;
use crate::replica_end::conversation::{ReplicaEnd, end_with};
use crate::replica_end::opening::{Opened, OpenedDisks, Opener, asked_for, open_here};
use crate::site::Site;
use crate::wire::messages::{Opening, nonsense};

/// Serves one sync as the replica's end of `link`. Errors are reported to the other end too.
pub fn receive(link: Link, site: &dyn Site) -> Result<(), SyncError> {
    receive_within(link, site, &AllowedPaths::Anything)
}

/// Serves one sync as the replica's end of `link`, within the allowed paths.
pub fn receive_within(link: Link, site: &dyn Site, allowed: &AllowedPaths) -> Result<(), SyncError> {
    receive_at(link, Some(site), &|asked| {
        let mut paths = Vec::new();
        for open in &asked.members {
            paths.push(allowed.find(&open.path)?);
            allowed.only_beside("a journal in", open.journal_dir.as_deref())?;
            let digests = open.digests.as_ref().and_then(|digests| digests.file.as_deref());
            allowed.only_beside("the digest file", digests)?;
            allowed.only_beside("the file to save to,", open.saves())?;
        }
        let opened = open_here(asked, &paths, site, !allowed.is_restricted())?;
        for (open, member) in asked.members.iter().zip(&opened.members) {
            if let (Opened::Primary(path, primary), true) =
                (member, allowed.is_restricted() && open.give_up.is_some())
            {
                return Err(SyncError::Refused(format!(
                    "{0} is a source itself (term {1}), which no remote client may give up: run \"dsync demote {0}\" there first",
                    path.display(),
                    primary.term
                )));
            }
        }
        Ok(opened)
    })
}

/// Serves one sync as the replica's end of `link`, to a replica that the caller opens, wherever it is.
#[doc(hidden)]
pub fn receive_over(
    link: Link,
    open: &dyn Fn(&replica::ReplicaOptions) -> replica::Result<Replica>,
) -> Result<(), SyncError> {
    receive_at(link, None, &|asked| match &*asked.members {
        [one] => {
            let replica = open(&asked_for(one, replica::ReplicaOptions::default()))?;
            Ok(OpenedDisks { members: vec![Opened::Replica(Box::new(replica))], group: None })
        }
        _ => Err(nonsense("a group")),
    })
}

fn receive_at(link: Link, site: Option<&dyn Site>, opener: Opener<'_>) -> Result<(), SyncError> {
    let (sender, receiver) = link.split();
    let end = ReplicaEnd { sender: &sender, receiver: &receiver, site, progress: &|_, _| {}, writes: true };
    let result = Opening::hear(&receiver).and_then(|asked| end.converse(asked, opener).map(drop));
    end_with(sender, result)
}
