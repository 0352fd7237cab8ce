//! The facts for plans, queried from the source.

use std::path::Path;

use lineage::{Branch, Lives};
use source::{Gap, Handle, KnownPosition, Reached, SourceError, View};

use crate::conflict::Conflict;
use crate::error::SyncError;
use crate::options::{SyncOptions, Way};
use crate::plan::primary::two_sources;
use crate::plan::{
    Choice, INTERRUPTED, Knowledge, LiveDisk, MomentChanges, SourceFacts, SourceMoment, positions,
};
use crate::wire::messages::StatusReply;

/// What the source knows before a checkpoint. `name` is how the user named the replica.
pub(crate) fn facts<'a>(
    handle: &'a Handle,
    status: &StatusReply,
    name: &'a str,
    options: &SyncOptions,
) -> Result<SourceFacts<'a>, SyncError> {
    let about = handle.about();
    let positions = positions(status).filter(|positions| !positions.is_empty());
    let branch = handle.lives()?.relation(&status.replica.role.lives);
    let asked = positions.filter(|_| !options.overwrites());
    // Where a step was left off, blocks may be of the epoch to which it led, also where no position says so yet. What was received since was made for
    // them as well, as far as that reaches.
    let is_passed = status.replica.resumes.is_some() && status.replica.positions.len() == 1;
    let left_off = status.replica.toward.filter(|_| !is_passed);
    let unknown =
        left_off.filter(|epoch| handle.reaches(&[KnownPosition { epoch: *epoch, upto: 0 }]).is_err());
    let is_past = |epoch| {
        let known = handle.reaches(&[KnownPosition { epoch, upto: 0 }]);
        matches!(branch, Branch::Same | Branch::Behind) && !matches!(known, Err(SourceError::Foreign(_)))
    };
    let knowledge = match asked.map(|positions| handle.reaches(&positions)) {
        // Another content is one for each of its replicas, also where nothing tells how old that is.
        None => {
            match handle
                .lost()?
                .filter(|_| status.replica.source == Some(about.uuid) && !options.overwrites())
            {
                Some(why @ Gap::OtherContent(_)) => Knowledge::Lost(why),
                _ => Knowledge::NotAsked,
            }
        }
        Some(Ok(())) => match unknown {
            None => Knowledge::Known,
            Some(epoch) => Knowledge::Lost(Gap::Told(format!(
                "parts of the replica may be of epoch {}, which this source does not know: its state is older",
                epoch.number
            ))),
        },
        Some(Err(SourceError::Lost { why, .. })) => Knowledge::Lost(why),
        // What it has committed is of this source's past: only what was received since is of another branch, and no state of anything.
        Some(Err(SourceError::Foreign(_))) if status.replica.epoch.is_some_and(is_past) => {
            Knowledge::Lost(Gap::Told(INTERRUPTED.into()))
        }
        Some(Err(SourceError::Foreign(why))) => Knowledge::Foreign(why),
        Some(Err(other)) => return Err(other.into()),
    };
    let disk = handle.reader()?;
    let two = status.primary.as_ref().map(|theirs| two_sources(handle, theirs)).transpose()?;
    Ok(SourceFacts {
        path: &about.path,
        uuid: about.uuid,
        term: about.term,
        began: about.began,
        branch,
        common: match branch {
            Branch::Ahead(at) | Branch::Forked(at) => handle.history()?.by_number(at.cut()),
            _ => None,
        },
        two: two.unwrap_or_default(),
        name,
        live: handle.live().map(|live| LiveDisk { resized: live.is_resized() }),
        size: disk.len(),
        empty: matches!(disk.allocated(0), Ok(None)),
        compared: match knowledge {
            Knowledge::Lost(_) if options.goes_on() => compared(handle, status),
            _ => Vec::new(),
        },
        history: knowledge,
        bookmark: handle
            .bookmarks()?
            .named(&bookmark(name, status, &options.way))
            .map(|(_, known)| known.clone()),
    })
}

/// The parts that an interrupted comparison has brought to an epoch of which it is known what changed since. They must be all that was received since the
/// last commit, and behind them nothing but that: what lies at the destination is compared there, which what the journal has would overwrite. Of a replica
/// that others have changed, or that is unsure of some of its blocks, there are none.
fn compared(handle: &Handle, status: &StatusReply) -> Vec<KnownPosition> {
    let replica = &status.replica;
    let is_plain = replica.changed.is_none() && replica.unsure.is_empty() && replica.role.demoted.is_none();
    let is_journal = replica.resumes.is_some() && !replica.under_way();
    let Some((base, received)) = replica.positions.split_last().filter(|_| is_plain && is_journal) else {
        return Vec::new();
    };
    let is_base = base.epoch.is_some() && base.epoch == replica.epoch && base.upto == replica.size;
    let known = |part: &replica::Position| Some(KnownPosition { epoch: part.epoch?, upto: part.upto });
    let parts: Vec<_> = received.iter().map_while(known).collect();
    let are_known = is_base && parts.len() == received.len() && handle.reaches(&parts).is_ok();
    if are_known { parts } else { Vec::new() }
}

/// Where a replica has later epochs or batches of this source than that knows of: what was recorded since does not hold, and what follows is a
/// branch of its own.
pub(crate) fn note_older(handle: &Handle, branch: Branch, status: &StatusReply) {
    if is_older(handle, branch, status) {
        handle.outdate("its state was restored from a copy");
        // Where it cannot be written, this replica is refused all the same.
        let _ = handle.branch(&status.replica.role.lives);
    }
}

/// True if a replica has later epochs or batches of this source in its present term than that knows of: its state is an older copy.
pub(crate) fn is_older(handle: &Handle, branch: Branch, status: &StatusReply) -> bool {
    let (about, replica) = (handle.about(), &status.replica);
    let follows = replica.source == Some(about.uuid) && replica.role.term == about.term;
    let is_replica = replica.epoch.is_some() && replica.role.demoted.is_none();
    follows && is_replica && status.primary.is_none() && matches!(branch, Branch::Ahead(_))
}

/// The moment of a view, for a delta to the replica of `choice`.
pub(crate) fn moment<'a>(
    handle: &'a Handle,
    view: &View,
    choice: &Choice,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<SourceMoment<'a>, SyncError> {
    let about = handle.about();
    let changes = match choice.method {
        _ if choice.positions.is_empty() => None,
        delta::Method::Tracked | delta::Method::Compare => {
            match handle.changes_since(&choice.positions, view) {
                Ok(found) => {
                    let begins = status.replica.epoch.or(found.chain.first().copied());
                    let size_before = begins.and_then(|epoch| found.size_at(&epoch));
                    let size_before = size_before.unwrap_or(status.replica.size);
                    Some(Ok(MomentChanges { blocks: found.blocks, chain: found.chain, size_before }))
                }
                // The gap appeared with the checkpoint itself.
                Err(SourceError::Lost { why, .. }) => Some(Err(why)),
                // A comparison can begin anew.
                Err(_) if choice.method == delta::Method::Compare => None,
                Err(other) => return Err(other.into()),
            }
        }
        _ => None,
    };
    let lives = handle.lives_to(&view.epoch())?;
    refuse_left(handle, &lives, status, options)?;
    Ok(SourceMoment {
        path: &about.path,
        source: about.uuid,
        epoch: view.epoch(),
        lives: lives.since(&status.replica.role.lives),
        way: handle.history()?.way(status.replica.epoch.as_ref(), &view.epoch()),
        size: device::Disk::len(view),
        block_size: about.block_size,
        fill: options.fills() && handle.live().is_none(),
        changes,
    })
}

/// Refuses a source that was seen to have another content only when the moment was taken: it has left the way on which the replica is since that was
/// allowed.
fn refuse_left(
    handle: &Handle,
    lives: &Lives,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<(), SyncError> {
    let (about, replica) = (handle.about(), &status.replica);
    // Whoever takes a delta from a file says nothing of its lives.
    let is_known = replica.epoch.is_some() && !replica.role.lives.is_empty();
    let follows = replica.source == Some(about.uuid) && is_known;
    let has_left = matches!(lives.relation(&replica.role.lives), Branch::Strangers | Branch::Incomplete);
    if options.accept_source || options.overwrites() || !follows || !has_left {
        return Ok(());
    }
    let (path, name) = (about.path.clone(), status.path.display().to_string());
    let why =
        Gap::OtherContent("others have put an older one in its place while it was open".into()).to_string();
    Err(Conflict::OtherContent { path, name, why }.into())
}

/// The present, without a checkpoint: what a sync would find now.
pub(crate) fn present<'a>(handle: &'a Handle, choice: &Choice) -> Result<SourceMoment<'a>, SyncError> {
    let about = handle.about();
    let mut epoch = handle.last_epoch()?.unwrap_or(NO_EPOCH);
    let mut changes = None;
    if choice.method == delta::Method::Tracked {
        let blocks = handle.estimate(&choice.positions)?;
        if !blocks.is_clean() {
            epoch = NO_EPOCH;
        }
        changes = Some(Ok(MomentChanges { blocks, chain: Vec::new(), size_before: 0 }));
    }
    let size = handle.reader()?.len();
    let (source, block_size, way) = (about.uuid, about.block_size, vec![epoch]);
    let lives = Lives::default();
    Ok(SourceMoment { path: &about.path, source, epoch, way, lives, size, block_size, fill: false, changes })
}

/// The gap that a checkpoint would begin with.
const NO_EPOCH: delta::Epoch = delta::Epoch { number: 0, id: uuid::Uuid::nil() };

/// Begins the name of a replica that is brought up to date from its own host.
pub const PULLED: &str = "pull://";

/// The name under which a source remembers a replica: where it is reached from the source, or `pull://HOST/PATH` if the
/// replica's side reaches for the source. No destination has such a name.
pub(crate) fn bookmark(name: &str, status: &StatusReply, way: &Way) -> String {
    known_as(name, &status.path, way)
}

/// Moves the bookmark of a replica to the epoch at which it is now, in the state of this name. Returns what there is to say where it had another
/// name so far.
pub(crate) fn acknowledge(
    handle: &Handle,
    name: &str,
    status: &StatusReply,
    epoch: delta::Epoch,
    (state, unread): (uuid::Uuid, u64),
) -> Result<Option<String>, SyncError> {
    let was = Some(status.replica.nonce);
    let known = handle.bookmarks()?;
    let other = known.others(name, status.replica.nonce).map(|other| {
        format!(
            "it was known as {other} until now, and counts as one replica with both names. If {other} is another disk with a copy of it, sync to \
             that one as well: it counts by itself again then"
        )
    });
    handle.acknowledge(name, Reached { epoch, unread, was, state: Some(state) })?;
    Ok(other)
}

/// The name under which a source remembers the replica at this path, as [`bookmark`] gives it.
pub(crate) fn known_as(name: &str, path: &Path, way: &Way) -> String {
    if let Way::Pulled(host) = way {
        return format!("{PULLED}{host}{}", path.display());
    }
    let far = name.contains(':') && !name.starts_with('/');
    if far { name.to_owned() } else { path.display().to_string() }
}
