//! The facts for plans, queried from the source.

use std::path::Path;

use source::{Handle, Position, Reached, SourceError, View};

use crate::error::SyncError;
use crate::messages::Status;
use crate::options::{SyncOptions, Way};
use crate::plan::{Changes, Choice, Facts, Knowledge, LiveDisk, Moment, positions};
use crate::primary::two_sources;

/// What the source knows before a checkpoint. `name` is how the user named the replica.
pub(crate) fn facts<'a>(
    handle: &'a Handle,
    status: &Status,
    name: &'a str,
    options: &SyncOptions,
) -> Result<Facts<'a>, SyncError> {
    let about = handle.about();
    let positions = positions(status).filter(|positions| !positions.is_empty());
    let batch = if options.adopt { None } else { unknown_batch(handle, status)? };
    if batch.is_some() || positions.as_ref().is_some_and(|positions| is_later(handle, status, positions)) {
        handle.outdate("its state was restored from a copy");
        // Of others the line tells it already, or nothing is known.
        if status.replica.role.line == about.line {
            // Where it cannot be written, this replica is refused all the same.
            let _ = handle.branch();
        }
    }
    let asked = positions.filter(|_| !options.adopt);
    // Where a step was left off, blocks may be of the epoch to which it led, also where no position says so yet. What was
    // received since was made for them as well.
    let left_off = status.replica.toward.filter(|_| status.replica.resumes.is_none());
    let unknown = left_off.filter(|epoch| handle.reaches(&[Position { epoch: *epoch, upto: 0 }]).is_err());
    let knowledge = match asked.map(|positions| handle.reaches(&positions)) {
        None => Knowledge::NotAsked,
        Some(Ok(()) | Err(SourceError::Lost { .. })) if batch.is_some() => {
            Knowledge::Foreign(batch.unwrap_or_default())
        }
        Some(Ok(())) => match unknown {
            None => Knowledge::Known,
            Some(epoch) => Knowledge::Lost(format!(
                "parts of the replica may be of epoch {}, which this source does not know: its state is older",
                epoch.number
            )),
        },
        Some(Err(SourceError::Lost { why, .. })) => Knowledge::Lost(why),
        Some(Err(SourceError::Foreign(why))) => Knowledge::Foreign(why),
        Some(Err(other)) => return Err(other.into()),
    };
    let (history, disk) = (handle.history()?, handle.reader()?);
    let known = |epoch: &delta::Epoch| history.size_at(epoch).is_some();
    let two = status.primary.as_ref().map(|theirs| two_sources(handle, theirs)).transpose()?;
    Ok(Facts {
        path: &about.path,
        uuid: about.uuid,
        term: about.term,
        began: about.began,
        line: &about.line,
        made: handle.has_made(&status.replica.nonce)?,
        knows: status.replica.epoch.as_ref().is_some_and(known),
        common: about.line.common(&status.replica.role.line).filter(known),
        two: two.unwrap_or_default(),
        name,
        live: handle.live().map(|live| LiveDisk { resized: live.is_resized() }),
        size: disk.len(),
        empty: matches!(disk.allocated(0), Ok(None)),
        history: knowledge,
        bookmark: handle
            .bookmarks()?
            .named(&bookmark(name, status, &options.way))
            .map(|(_, known)| known.clone()),
    })
}

/// What there is to say of a replica that got a batch from this source in its present term of which that knows nothing. That its epoch is known
/// does not help: the batch came after it.
pub(crate) fn unknown_batch(handle: &Handle, status: &Status) -> Result<Option<String>, SyncError> {
    let (about, replica) = (handle.about(), &status.replica);
    let follows = replica.source == Some(about.uuid) && replica.role.term == about.term;
    if !follows || is_of_another_branch(handle, status) || handle.has_made(&replica.nonce)? != Some(false) {
        return Ok(None);
    }
    let at = replica.epoch.map_or(String::new(), |epoch| format!(" past epoch {}", epoch.number));
    let why = format!(
        "a mirror has brought the replica{at}, and this source knows nothing of that: its state was restored from a copy, or its host \
         rolled back. \"dsync promote --force\" where the replica is makes that the source, with all it has; \"dsync sync --adopt\" \
         compares everything, overwrites what differs in the replica, and continues from here"
    );
    Ok(Some(why))
}

/// True if a replica that follows this source in its present term is at an epoch that comes after all that this knows.
fn is_later(handle: &Handle, status: &Status, positions: &[Position]) -> bool {
    let (about, replica) = (handle.about(), &status.replica);
    let last = handle.last_epoch().ok().flatten().map_or(0, |epoch| epoch.number);
    replica.source == Some(about.uuid)
        && replica.role.term == about.term
        && !is_of_another_branch(handle, status)
        && positions.iter().any(|position| position.epoch.number > last)
}

/// True if the promotions tell that the replica is not in this source's past: then that says nothing of how old the source's state is.
fn is_of_another_branch(handle: &Handle, status: &Status) -> bool {
    let (ours, replica) = (&handle.about().line, &status.replica);
    replica.epoch.is_some_and(|epoch| ours.leads_from(&replica.role.line, &epoch) == Some(false))
}

/// A demoted source is any of several epochs, but for the blocks that it is unsure of: takes the newest that this source knows. What a sync
/// that was cut off has brought to it stays at the epoch of that.
pub(crate) fn newest_known(handle: &Handle, mut status: Status) -> Result<Status, SyncError> {
    let replica = &mut status.replica;
    if replica.role.also().is_empty() {
        return Ok(status);
    }
    let history = handle.history()?;
    let known = |epoch: &&delta::Epoch| history.size_at(epoch).is_some();
    if let Some(newest) = replica.role.also().iter().rev().find(known).copied() {
        let since = replica.epoch.replace(newest);
        let rest = replica.positions.iter_mut().filter(|position| position.epoch == since);
        rest.for_each(|position| position.epoch = Some(newest));
    }
    Ok(status)
}

/// The moment of a view, for a delta to the replica of `choice`.
pub(crate) fn moment<'a>(
    handle: &'a Handle,
    view: &View,
    choice: &Choice,
    status: &Status,
    options: &SyncOptions,
) -> Result<Moment<'a>, SyncError> {
    let about = handle.about();
    let changes = match choice.method {
        delta::Method::Tracked => match handle.changes_since(&choice.positions, view) {
            Ok(found) => {
                let begins = status.replica.epoch.or(found.chain.first().copied());
                let size_before = begins.and_then(|epoch| found.size_at(&epoch));
                let size_before = size_before.unwrap_or(status.replica.size);
                Some(Ok(Changes { blocks: found.blocks, chain: found.chain, size_before }))
            }
            // The gap appeared with the checkpoint itself.
            Err(SourceError::Lost { why, .. }) => Some(Err(why)),
            Err(other) => return Err(other.into()),
        },
        _ => None,
    };
    Ok(Moment {
        path: &about.path,
        source: about.uuid,
        epoch: view.epoch(),
        way: handle.history()?.way(status.replica.epoch.as_ref(), &view.epoch()),
        size: device::Disk::len(view),
        block_size: about.block_size,
        fill: options.fills() && handle.live().is_none(),
        changes,
    })
}

/// The present, without a checkpoint: what a sync would find now.
pub(crate) fn present<'a>(handle: &'a Handle, choice: &Choice) -> Result<Moment<'a>, SyncError> {
    let about = handle.about();
    let mut epoch = handle.last_epoch()?.unwrap_or(NO_EPOCH);
    let mut changes = None;
    if choice.method == delta::Method::Tracked {
        let blocks = handle.estimate(&choice.positions)?;
        if !blocks.is_clean() {
            epoch = NO_EPOCH;
        }
        changes = Some(Ok(Changes { blocks, chain: Vec::new(), size_before: 0 }));
    }
    let size = handle.reader()?.len();
    let (source, block_size, way) = (about.uuid, about.block_size, vec![epoch]);
    Ok(Moment { path: &about.path, source, epoch, way, size, block_size, fill: false, changes })
}

/// The gap that a checkpoint would begin with.
const NO_EPOCH: delta::Epoch = delta::Epoch { number: 0, id: uuid::Uuid::nil() };

/// Begins the name of a replica that is brought up to date from its own host.
pub const PULLED: &str = "pull://";

/// The name under which a source remembers a replica: where it is reached from the source, or `pull://HOST/PATH` if the
/// replica's side reaches for the source. No destination has such a name.
pub(crate) fn bookmark(name: &str, status: &Status, way: &Way) -> String {
    known_as(name, &status.path, way)
}

/// Moves the bookmark of a replica to the epoch at which it is now, in the state of this name. Returns what there is to say where it had another
/// name so far.
pub(crate) fn acknowledge(
    handle: &Handle,
    name: &str,
    status: &Status,
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

/// The same, of a replica at this path.
pub(crate) fn known_as(name: &str, path: &Path, way: &Way) -> String {
    if let Way::Pulled(host) = way {
        return format!("{PULLED}{host}{}", path.display());
    }
    let far = name.contains(':') && !name.starts_with('/');
    if far { name.to_owned() } else { path.display().to_string() }
}
