//! What a sync will do, decided from facts alone: nothing here reads, sends or writes.
//!
//! A plan is made in two steps. [`choose`] picks the method before a checkpoint is taken, so that a refused sync leaves no
//! epoch behind. [`Choice::at`] makes the plan for the moment of the checkpoint: the header of the delta, and what of
//! the source it carries. A dry run takes both steps, the second without a checkpoint.
//!
//! ```text
//!     source's history, replica's status, options ── choose ──▶ Choice, or a Conflict
//!     Choice, moment (epoch, size, changes)       ── at ──────▶ SyncPlan: header, wanted
//! ```

pub(crate) mod dense;
pub(crate) mod facts;
pub(crate) mod primary;
pub(crate) mod read;

use std::path::Path;

use delta::{Epoch, Header, Method};
use extents::Bitmap;
use lineage::{Branch, Lives};
use replica::State;
use source::{Bookmark, Gap, KnownPosition};
use uuid::Uuid;

use crate::conflict::{Conflict, Diverged, Divergence};
use crate::options::{SyncOptions, Unreadable};
use crate::plan::primary::TwoSources;
use crate::plan::read::WantedBlocks;
use crate::wire::messages::StatusReply;

/// What is known of a source before a checkpoint is taken.
pub(crate) struct SourceFacts<'a> {
    pub path: &'a Path,
    pub uuid: Uuid,
    /// Its term, and the epoch at which that began.
    pub term: u64,
    pub began: Option<Epoch>,
    /// What the replica is to it, by the lives that led to either.
    pub branch: Branch,
    /// The epoch from which the two go apart, as far as its history knows that.
    pub common: Option<Epoch>,
    /// What is known of two sources, where the destination is one of the same id.
    pub two: TwoSources,
    /// The replica, as the user named it.
    pub name: &'a str,
    /// It is a disk in use, tracked in the kernel.
    pub live: Option<LiveDisk>,
    /// It is known to read as zeroes.
    pub empty: bool,
    /// Bytes of it.
    pub size: u64,
    /// What its history knows of the replica's positions.
    pub history: Knowledge,
    /// The first of these, where they are of an interrupted comparison that can go on: what changed in them since is known.
    pub compared: Vec<KnownPosition>,
    /// Where it remembers a replica of this name.
    pub bookmark: Option<Bookmark>,
}

/// A disk in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LiveDisk {
    /// It has another size than when its tracker began.
    pub resized: bool,
}

/// What a source's history knows of a replica's positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Knowledge {
    /// What changed since each of them.
    Known,
    /// There is a gap since, for this reason.
    Lost(Gap),
    /// They are of another history, for this reason.
    Foreign(String),
    /// Not queried: the replica has no positions that a history could know.
    NotAsked,
}

/// How the changes will be found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub method: Method,
    /// What the replica's equality will be based on.
    pub trust: String,
    /// Where the replica is, for `tracked`; for a comparison that goes on, where it is up to there.
    pub positions: Vec<KnownPosition>,
}

impl Choice {
    pub(crate) fn compare(why: &str) -> Choice {
        Choice { method: Method::Compare, trust: format!("compared: {why}"), positions: Vec::new() }
    }

    /// A comparison of what an interrupted one has left, if it can go on.
    fn rest(why: &Gap, facts: &SourceFacts<'_>) -> Choice {
        Choice { positions: facts.compared.clone(), ..Choice::compare(&why.to_string()) }
    }

    fn rolling() -> Choice {
        Choice { method: Method::Rolling, trust: "compared: asked for".into(), positions: Vec::new() }
    }

    pub(crate) fn copy(trust: &str) -> Choice {
        Choice { method: Method::Copy, trust: trust.into(), positions: Vec::new() }
    }

    pub(crate) fn tracked(positions: Vec<KnownPosition>) -> Choice {
        Choice { method: Method::Tracked, trust: "tracked".into(), positions }
    }
}

/// The replica's positions, if it knows an epoch for each.
pub(crate) fn positions(status: &StatusReply) -> Option<Vec<KnownPosition>> {
    let parts = status.replica.positions.iter();
    parts.map(|part| Some(KnownPosition { epoch: part.epoch?, upto: part.upto })).collect()
}

/// Picks the method.
pub(crate) fn choose(
    facts: &SourceFacts<'_>,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<Choice, Conflict> {
    allow_live(facts, options)?;
    refuse_diverged(facts, status, options)?;
    let replica = &status.replica;
    let nothing = replica.positions.is_empty();
    if !options.create {
        refuse_vanished((facts.path, facts.name), status, facts.bookmark.as_ref())?;
    }
    if options.existing && nothing && replica.source.is_none() {
        return Err(Conflict::NoSuccessor { name: facts.name.to_owned(), path: facts.path.to_path_buf() });
    }
    if replica.gone && !options.create {
        return Err(Conflict::Gone(status.path.clone()));
    }
    if let Some(other) = replica.source.filter(|source| *source != facts.uuid && !options.adopt) {
        return Err(Conflict::OtherSource {
            replica: status.path.clone(),
            other,
            path: facts.path.to_path_buf(),
        });
    }
    refuse_smaller(facts, status)?;
    if nothing && replica.source.is_none() && !options.adopt {
        return match options.method {
            Some(Method::Tracked) => Err(Conflict::NoReplica(status.path.clone())),
            _ => Ok(Choice::copy("seeded")),
        };
    }
    refuse_foreign(facts, status, options)?;
    refuse_emptied(facts, status, options)?;
    refuse_other_content(facts, options)?;
    let something = replica.epoch.is_some() || !nothing;
    match options.method {
        Some(Method::Compare) => return Ok(Choice::compare("asked for")),
        Some(Method::Rolling) if options.unreadable == Unreadable::LeaveOut => {
            return Ok(Choice::compare("a part of the source cannot be read"));
        }
        Some(Method::Rolling) if options.adopt || something => return Ok(Choice::rolling()),
        None if nothing && something => return Ok(Choice::compare("the replica was empty")),
        // A seed that was interrupted before it kept anything.
        _ if nothing => return Ok(Choice::copy("seeded")),
        Some(Method::Copy) => return Ok(Choice::copy("copied: asked for")),
        _ => {}
    }
    let why = match positions(status).filter(|_| !options.adopt) {
        None => unplaced(replica, options.adopt).to_owned(),
        // It may hold what its source wrote later, and no other branch has.
        Some(_)
            if replica.state == State::Fuzzy && replica.epoch.is_some_and(|epoch| shared(facts, &epoch)) =>
        {
            "it was copied from a disk in use without a freeze, of which another replica was promoted since"
                .to_owned()
        }
        // As it comes from a disk in use, it may be newer than the epoch that it counts as.
        Some(positions)
            if positions
                .iter()
                .any(|part| Some(part.epoch) != replica.epoch && shared(facts, &part.epoch)) =>
        {
            INTERRUPTED.to_owned()
        }
        Some(positions) => match &facts.history {
            Knowledge::Known => return Ok(Choice::tracked(positions)),
            // Trusted only with --adopt.
            Knowledge::NotAsked => "its history was not queried".to_owned(),
            Knowledge::Lost(why) if options.goes_on() => return Ok(Choice::rest(why, facts)),
            Knowledge::Lost(why) => why.to_string(),
            Knowledge::Foreign(why) => why.clone(),
        },
    };
    match options.method {
        Some(Method::Tracked) => Err(Conflict::Lost { path: facts.path.to_path_buf(), why }),
        _ => Ok(Choice::compare(&why)),
    }
}

/// Why parts of a replica may be of no epoch that this source knows.
pub(crate) const INTERRUPTED: &str =
    "a transfer to it was interrupted, and another replica of its source was promoted since";

/// Why the parts of a replica count as of no epoch.
fn unplaced(replica: &replica::Status, adopt: bool) -> &'static str {
    if adopt || replica.source.is_none() {
        "the replica was adopted"
    } else if replica.role.demoted.is_some() {
        "it was demoted without knowing what had been written to it"
    } else {
        "moving its parts in place was cut off"
    }
}

/// Refuses a replica of another history: what that has is not overwritten by the way, however the differences are found.
pub(crate) fn refuse_foreign(
    facts: &SourceFacts<'_>,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<(), Conflict> {
    // What is adopted of another source is given up with that.
    let is_given_up = options.overwrites() || options.adopt && status.replica.source != Some(facts.uuid);
    match &facts.history {
        Knowledge::Foreign(why) if !is_given_up => Err(newer(foreign(facts, status, why.clone()), options)),
        _ => Ok(()),
    }
}

/// Refuses a source that was lost, and in whose place is an empty file: a comparison would empty the replica as well.
pub(crate) fn refuse_emptied(
    facts: &SourceFacts<'_>,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<(), Conflict> {
    match &facts.history {
        // Its user has said that it may have shrunk, to nothing in the end.
        Knowledge::Lost(_) if options.shrink && facts.size == 0 => Ok(()),
        Knowledge::Lost(why) if facts.empty && status.holds_data && !options.adopt => {
            Err(Conflict::Emptied {
                path: facts.path.to_path_buf(),
                name: facts.name.to_owned(),
                why: why.to_string(),
            })
        }
        _ => Ok(()),
    }
}

/// Refuses a source in whose place a backup was put, or whose file system was rolled back: a comparison would take the replica back with it.
pub(crate) fn refuse_other_content(facts: &SourceFacts<'_>, options: &SyncOptions) -> Result<(), Conflict> {
    match &facts.history {
        Knowledge::Lost(why @ Gap::OtherContent(_)) if !options.accept_source && !options.overwrites() => {
            let (path, name) = (facts.path.to_path_buf(), facts.name.to_owned());
            Err(Conflict::OtherContent { path, name, why: why.to_string() })
        }
        _ => Ok(()),
    }
}

/// True for an epoch from before the term of this source.
fn shared(facts: &SourceFacts<'_>, epoch: &Epoch) -> bool {
    facts.began.is_some_and(|began| epoch.number <= began.number)
}

/// Refuses a destination that was written to as the same source, or that has what this one has not: neither has what the other wrote since.
pub(crate) fn refuse_diverged(
    facts: &SourceFacts<'_>,
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<(), Conflict> {
    let replica = &status.replica;
    let diverged = |term, common: Option<u64>, divergence| {
        Err(Conflict::Diverged(Box::new(Diverged {
            path: facts.path.to_path_buf(),
            term: facts.term,
            destination: facts.name.to_owned(),
            there: status.path.clone(),
            other_term: term,
            common,
            divergence,
        })))
    };
    if let Some(theirs) = &status.primary {
        let TwoSources { common, here, there } = facts.two;
        return diverged(theirs.term, common, Divergence::TwoSources { here, there });
    }
    let Some(epoch) = replica.epoch.filter(|_| replica.source == Some(facts.uuid) && !options.overwrites())
    else {
        return Ok(());
    };
    let (term, demoted) = (replica.role.term, replica.role.demoted.is_some());
    let common = match facts.branch {
        Branch::Same | Branch::Behind => return Ok(()),
        Branch::Ahead(common) | Branch::Forked(common) => common.cut(),
        // [`refuse_other_content`] refuses that, in words of its own.
        Branch::Strangers | Branch::Incomplete
            if matches!(facts.history, Knowledge::Lost(Gap::OtherContent(_))) =>
        {
            return Ok(());
        }
        Branch::Strangers | Branch::Incomplete => {
            return Err(newer(foreign(facts, status, UNKNOWN_BRANCH.into()), options));
        }
    };
    let refused = match facts.branch {
        _ if term > facts.term && !demoted => diverged(term, Some(common), Divergence::Superseded),
        Branch::Ahead(_) if term == facts.term && !demoted => {
            Err(foreign(facts, status, later(&epoch, common, replica.ahead)))
        }
        // A mirror has brought it there from an epoch that both have.
        _ if replica.ahead && epoch.number <= common => {
            let bytes = replica.unsure.bytes();
            diverged(term, Some(common), Divergence::Ahead { epoch: epoch.number, bytes })
        }
        _ => {
            // What its own history does not reach, it could not be demoted at.
            let anew = facts.common.filter(|common| status.demotes_anew.contains(common));
            let common = if demoted { anew.map(|common| common.number) } else { Some(common) };
            diverged(term, common, Divergence::OtherBranch { epoch: epoch.number, demoted })
        }
    };
    refused.map_err(|conflict| newer(conflict, options))
}

/// Says what `--adopt` does not give up.
fn newer(conflict: Conflict, options: &SyncOptions) -> Conflict {
    if options.adopt { Conflict::Newer(Box::new(conflict)) } else { conflict }
}

/// Why a replica is refused of which nothing tells whether its source has all that it has.
const UNKNOWN_BRANCH: &str = "nothing tells whether this source has all that the replica has. If what the replica has is wanted, \"dsync promote \
                              --force\" where it is makes that the source; \"dsync sync --discard-there SRC DST\" compares everything, overwrites what \
                              differs in the replica, and continues from here";

fn foreign(facts: &SourceFacts<'_>, status: &StatusReply, why: String) -> Conflict {
    Conflict::Foreign { replica: status.path.clone(), path: facts.path.to_path_buf(), why }
}

/// Why a replica is refused that has later epochs or batches of this very source than that knows of.
fn later(epoch: &Epoch, known: u64, ahead: bool) -> String {
    let at = match ahead {
        true => format!("a mirror has brought the replica past epoch {}", epoch.number),
        false => format!("the replica is at epoch {}", epoch.number),
    };
    format!(
        "{at}, and this source knows nothing of what came after epoch {known}: its state was restored from a copy, its host rolled back, or created \
         anew. If what the replica has is wanted, \"dsync promote --force\" where it is makes that the source; \"dsync sync \
         --discard-there SRC DST\" compares everything, overwrites what differs in the replica, and continues from here"
    )
}

/// Refuses to create a replica in place of a missing one: most likely its disk is not attached, or its file system
/// not mounted. `known` is where the source remembers it.
pub(crate) fn refuse_vanished(
    (path, name): (&Path, &str),
    status: &StatusReply,
    known: Option<&Bookmark>,
) -> Result<(), Conflict> {
    match known.filter(|_| status.replica.positions.is_empty() && status.replica.source.is_none()) {
        None => Ok(()),
        Some(known) => Err(Conflict::Vanished {
            path: path.to_path_buf(),
            name: name.to_owned(),
            time: device::moment(known.time),
            epoch: known.epoch.number,
        }),
    }
}

/// Bytes that a destination has beyond the end of a source of `size` bytes, and that a commit cuts off. A device keeps them.
pub(crate) fn cut_off(status: &StatusReply, size: u64) -> u64 {
    let has = status.wrong_size.unwrap_or(status.replica.size);
    if status.replica.capacity.is_some() { 0 } else { has.saturating_sub(size) }
}

/// Refuses to adopt a file that is larger than the source: its size is the best sign of a wrong destination.
pub(crate) fn refuse_larger(
    (path, uuid, size): (&Path, Uuid, u64),
    status: &StatusReply,
    options: &SyncOptions,
) -> Result<(), Conflict> {
    let beyond = cut_off(status, size);
    // A replica of this source may be from before the source was shrunk.
    if !options.adopt || options.shrink || beyond == 0 || status.replica.source == Some(uuid) {
        return Ok(());
    }
    let (replica, path) = (status.path.clone(), path.to_path_buf());
    Err(Conflict::Larger { replica, has: size + beyond, path, size })
}

/// Refuses a device that cannot hold the source, before anything of a first copy is written down.
fn refuse_smaller(facts: &SourceFacts<'_>, status: &StatusReply) -> Result<(), Conflict> {
    let (name, path, size) = (facts.name.to_owned(), facts.path.to_path_buf(), facts.size);
    match status.replica.capacity.filter(|has| *has < size) {
        Some(has) => Err(Conflict::Smaller { name, has, path, size }),
        None => Ok(()),
    }
}

/// Refuses what cannot be done with a disk in use.
fn allow_live(facts: &SourceFacts<'_>, options: &SyncOptions) -> Result<(), Conflict> {
    let Some(live) = facts.live else { return Ok(()) };
    let path = facts.path.to_path_buf();
    if options.at_view {
        return Err(Conflict::NoView(path));
    }
    if options.unreadable != Unreadable::Fail {
        return Err(Conflict::LiveInPart(path));
    }
    if options.method == Some(Method::Rolling) {
        return Err(Conflict::LiveRolling(path));
    }
    if live.resized {
        return Err(Conflict::Unfollowed { path, why: Gap::Resized.to_string() });
    }
    Ok(())
}

/// A moment of a source.
pub(crate) struct SourceMoment<'a> {
    pub path: &'a Path,
    pub source: Uuid,
    pub epoch: Epoch,
    /// The epochs of the source that led to it, ascending, with that itself: from the replica's on, if that is one of them.
    pub way: Vec<Epoch>,
    /// The lives that led to it.
    pub lives: Lives,
    /// Bytes of the disk.
    pub size: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// What is between dense changes may be moved too.
    pub fill: bool,
    /// What a tracked delta carries, or why that is not known; `None` if it was not queried.
    pub changes: Option<Result<MomentChanges, Gap>>,
}

/// What changed between a replica's positions and a moment.
pub(crate) struct MomentChanges {
    pub blocks: Bitmap,
    /// The epochs at which the replica may be, ascending; the last is the moment's.
    pub chain: Vec<Epoch>,
    /// Bytes of the disk at the replica's last commit; at the first epoch of the chain, if it has none.
    pub size_before: u64,
}

/// A delta to send.
pub(crate) struct SyncPlan {
    pub trust: String,
    pub header: Header,
    /// A seed: epochs of the source that came before its own, ascending.
    pub before: Vec<Epoch>,
    pub wanted: WantedBlocks,
    /// Blocks, extents and bytes that changed, if that is less than what is sent.
    pub changed: Option<(u64, u64, u64)>,
    /// What an interrupted comparison has left to this one.
    pub left: Option<LeftCompared>,
    /// It is a pass over a live disk, without a commit.
    pub pass: bool,
}

/// What an interrupted comparison has done, and what is left of it.
pub(crate) struct LeftCompared {
    /// What changed since, where it has compared. That is sent: the replica's journal is newer there than its content.
    pub changed: WantedBlocks,
    /// Where it goes on, in bytes.
    pub from: u64,
}

impl Choice {
    /// The plan for a moment. If what changed up to it is not known after all, the plan is a comparison.
    pub(crate) fn at(
        self,
        moment: SourceMoment<'_>,
        status: &StatusReply,
        options: &SyncOptions,
    ) -> Result<SyncPlan, Conflict> {
        let Choice { method, trust, positions } = self;
        let mut moment = moment;
        let why = match (method, moment.changes.take()) {
            (Method::Tracked, Some(Ok(changes))) => {
                return Ok(tracked(&positions, changes, &moment, status));
            }
            (Method::Tracked, Some(Err(why))) => why.to_string(),
            (Method::Tracked, None) => "its history was not queried".to_owned(),
            (Method::Copy, _) => return Ok(copy(trust, &moment, status)),
            (Method::Compare, Some(Ok(changes))) if !positions.is_empty() => {
                return Ok(go_on(trust, &positions, changes, &moment, status));
            }
            (Method::Compare | Method::Rolling, _) => return Ok(compare(method, trust, &moment, status)),
        };
        if options.method == Some(Method::Tracked) {
            return Err(Conflict::Lost { path: moment.path.to_path_buf(), why });
        }
        let Choice { method, trust, .. } = Choice::compare(&why);
        Ok(compare(method, trust, &moment, status))
    }
}

/// A delta to that moment.
fn header(method: Method, moment: &SourceMoment<'_>, size_before: u64) -> Header {
    let (sizes, lives) = ((size_before, moment.size), moment.lives.clone());
    Header { lives, ..Header::new(moment.source, method, moment.way.clone(), sizes, moment.block_size) }
}

/// What a comparison finds. It replaces an interrupted transfer, as the digests are those of the destination.
fn compare(method: Method, trust: String, moment: &SourceMoment<'_>, status: &StatusReply) -> SyncPlan {
    let replica = &status.replica;
    let header = Header { binds: Some(replica.nonce), ..header(method, moment, replica.size) };
    // The most that it can be.
    let wanted = WantedBlocks::allocated(moment.size, moment.block_size.into());
    SyncPlan { trust, header, before: Vec::new(), wanted, changed: None, left: None, pass: false }
}

/// What an interrupted comparison has left to find, and what changed where it has been.
fn go_on(
    trust: String,
    positions: &[KnownPosition],
    changes: MomentChanges,
    moment: &SourceMoment<'_>,
    status: &StatusReply,
) -> SyncPlan {
    let (blocks, block_size) = (changes.blocks, u64::from(moment.block_size));
    let upto = positions.last().map_or(0, |position| position.upto).min(moment.size);
    // A block that it has compared in part is sent.
    let whole = upto.div_ceil(block_size);
    blocks.set(upto / block_size..whole.min(blocks.blocks()));
    let changed = WantedBlocks::marked(blocks, moment.size, block_size);
    let mut plan = compare(Method::Compare, trust, moment, status);
    plan.header.resumes = status.replica.resumes;
    plan.left = Some(LeftCompared { changed, from: (whole * block_size).min(moment.size) });
    plan
}

/// Everything that is allocated.
fn copy(trust: String, moment: &SourceMoment<'_>, status: &StatusReply) -> SyncPlan {
    let (replica, block_size) = (&status.replica, u64::from(moment.block_size));
    let seed = replica.positions.is_empty();
    let header = header(Method::Copy, moment, if seed { 0 } else { replica.size });
    let binds = (!seed || replica.under_way()).then_some(replica.nonce);
    let wanted = match seed {
        true => WantedBlocks::allocated(moment.size, block_size),
        // The destination has content: the source's zeroes must be named.
        false => {
            let all = Bitmap::new(moment.size.div_ceil(block_size));
            all.set(0..all.blocks());
            WantedBlocks::marked(all, moment.size, block_size)
        }
    };
    let mut header = Header { binds, ..header };
    let mut before = Vec::new();
    if header.is_seed() {
        before = header.chain.drain(..header.chain.len() - 1).collect();
    }
    SyncPlan { trust, header, before, wanted, changed: None, left: None, pass: false }
}

/// What changed since the replica's positions, where it is unsure of what it holds, and what is beyond the last position.
fn tracked(
    positions: &[KnownPosition],
    changes: MomentChanges,
    moment: &SourceMoment<'_>,
    status: &StatusReply,
) -> SyncPlan {
    let (replica, block_size) = (&status.replica, u64::from(moment.block_size));
    let MomentChanges { blocks, chain, size_before } = changes;
    let mut header = header(Method::Tracked, moment, size_before);
    header.resumes = replica.resumes;
    if replica.under_way() || !replica.unsure.is_empty() || replica.role.demoted.is_some() {
        // Only this replica, in this very state, can use it.
        header.binds = Some(replica.nonce);
        header.size_before = replica.size;
        if replica.epoch.as_ref() != moment.way.first() {
            // Of what lies behind what it knows, the source cannot say that it changed in these blocks.
            header.chain = vec![moment.epoch];
        }
    } else {
        // All parts of a journal may be past the last commit, at which the replica still is. A commit that is
        // not below the chain is of another history, and must not hide where this delta leads.
        let begins = chain.first().map_or(0, |epoch| epoch.number);
        header.chain = match replica.epoch.filter(|epoch| epoch.number < begins) {
            Some(epoch) => {
                let rest = chain.into_iter().filter(|later| later.number > epoch.number);
                std::iter::once(epoch).chain(rest).collect()
            }
            None => chain,
        };
        header.limit_chain();
    }
    let upto = positions.last().map_or(0, |position| position.upto);
    replica.unsure.mark(&blocks, block_size);
    let mut wanted = WantedBlocks::marked(blocks, moment.size, block_size).and_beyond(upto);
    let changed = moment.fill.then(|| wanted.fill_dense());
    SyncPlan { trust: "tracked".into(), header, before: Vec::new(), wanted, changed, left: None, pass: false }
}

impl SyncPlan {
    /// True if there is nothing to commit: the replica is at the plan's epoch, without leftovers. A former source becomes a replica of this
    /// one by a commit, also by one that writes nothing: until then it may be made the source again as if nothing were lost.
    pub(crate) fn is_done(&self, status: &StatusReply) -> bool {
        let (replica, header) = (&status.replica, &self.header);
        let at = replica::Position { epoch: header.to().copied(), upto: header.size_after };
        header.method == Method::Tracked
            && replica.positions == [at]
            && replica.unsure.is_empty()
            && replica.role.demoted.is_none()
            && !replica.under_way()
            && replica.resumes.is_none()
    }

    /// Makes it the plan of a pass over a live disk. It is sent up to the disk's end, whatever is there, so that the replica has
    /// some content for every block.
    pub(crate) fn into_pass(mut self) -> SyncPlan {
        self.pass = true;
        self.wanted.reach_end();
        self
    }
}

#[cfg(test)]
mod tests {
    use lineage::Point;
    use replica::Position;

    use super::*;
    use crate::conflict::Since;
    use crate::wire::messages::Primary;

    const BLOCK: u64 = 4096;
    /// Blocks of the disk.
    const BLOCKS: u64 = 8;
    const SOURCE: Uuid = Uuid::from_u128(1);
    const OTHER: Uuid = Uuid::from_u128(2);

    fn epoch(number: u64) -> Epoch {
        Epoch { number, id: Uuid::from_u128(number.into()) }
    }

    /// A replica in words: "none", "at 5", "other at 5", "empty at 5", "unknown", "file"; "unsure" in its first block and its
    /// last; with "partly" it is at 5 in its first half only, with "cut off" the rest of a transfer can be resumed. "demoted": a
    /// former source that went on to 7; "batches": a mirror brought it ahead; "term2": it has heard of that term; "source1": the
    /// source itself, in that term.
    fn replica(words: &str) -> StatusReply {
        let has = |word: &str| words.split_whitespace().any(|w| w == word);
        let number =
            words.split_once("at ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
        let size = BLOCKS * BLOCK;
        let mut replica = match number {
            Some(number) => replica::Status::at(SOURCE, epoch(number), size),
            None => replica::Status::nothing(),
        };
        replica.nonce = Uuid::from_u128(99);
        if has("other") {
            replica.source = Some(OTHER);
        }
        replica.gone = has("gone");
        replica.capacity = has("device").then_some(0);
        if has("unsure") {
            replica.unsure.extend(&[0..1, size - 1..size].into_iter().collect());
        }
        if has("empty") {
            (replica.positions, replica.size) = (Vec::new(), 0);
        }
        if has("unknown") || has("file") {
            replica.source = has("unknown").then_some(SOURCE);
            replica.state = State::Incomplete;
            (replica.positions, replica.size) = (vec![Position { epoch: None, upto: size }], size);
        }
        if has("partly") {
            replica.toward = replica.epoch;
            replica.positions[0].upto = size / 2;
        }
        if has("staged") {
            // Of the next epoch, in the first half.
            let next = replica.epoch.map(|at| epoch(at.number + 1));
            replica.toward = next;
            replica.positions.insert(0, Position { epoch: next, upto: size / 2 });
        }
        if has("cut") {
            replica.resumes = Some(delta::Resume { stream: OTHER, frames: 3, digest: [0; 32] });
        }
        if has("demoted") {
            replica.role.demoted = Some(replica::Demoted {
                complete: false,
                since: 0,
                told: None,
                saved: None,
                lives: Lives::default(),
                gave_up: None,
            });
        }
        replica.ahead = has("batches");
        if has("fuzzy") {
            replica.state = State::Fuzzy;
        }
        replica.role.term = (1..4).find(|term| has(&format!("term{term}"))).unwrap_or(1);
        let primary = (1..4).find(|term| has(&format!("source{term}"))).map(|term| Primary {
            term,
            epoch: Some(epoch(9)),
            common: None,
            written: None,
            began: None,
            lives: Lives::default(),
            reaches: false,
            doubted: false,
        });
        let holds_data = has("at");
        StatusReply { path: "/replica".into(), primary, holds_data, ..StatusReply::of(replica) }
    }

    /// Options in words, as on the command line.
    fn options(words: &str) -> SyncOptions {
        let has = |word: &str| words.split_whitespace().any(|w| w == word);
        let method = [Method::Tracked, Method::Compare, Method::Rolling, Method::Copy]
            .into_iter()
            .find(|method| has(&format!("--{method}")));
        let unreadable = match (has("--keep-going"), has("--leave-out")) {
            (_, true) => Unreadable::LeaveOut,
            (true, _) => Unreadable::SendAnew,
            _ => Unreadable::Fail,
        };
        let (adopt, create, at_view) =
            (has("--adopt") || has("--adopt=overwrite"), has("--create"), has("--at-view"));
        let (accept_source, overwrite) = (has("--accept-source"), has("--adopt=overwrite"));
        SyncOptions {
            method,
            adopt,
            overwrite,
            accept_source,
            create,
            at_view,
            unreadable,
            ..SyncOptions::default()
        }
    }

    /// Epoch 5 of a life.
    const COMMON: Point = Point { life: SOURCE, n: 5 << 24 };

    fn chosen(status: &StatusReply, words: &str) -> Result<Choice, Conflict> {
        let has = |word: &str| words.split_whitespace().any(|w| w == word);
        let history = match () {
            () if has("gap") => Knowledge::Lost("the host crashed".into()),
            () if has("other-content") => {
                Knowledge::Lost(Gap::OtherContent("written to last a day before".into()))
            }
            () if has("foreign") => Knowledge::Foreign("it was restored".into()),
            () => Knowledge::Known,
        };
        let facts = SourceFacts {
            path: Path::new("/source"),
            uuid: SOURCE,
            term: (2..4).find(|term| has(&format!("term{term}"))).unwrap_or(1),
            began: (2..4).find(|term| has(&format!("term{term}"))).map(|_| epoch(5)),
            branch: match () {
                () if has("ahead") => Branch::Ahead(COMMON),
                () if has("forked") => Branch::Forked(COMMON),
                () if has("strangers") => Branch::Strangers,
                () => Branch::Behind,
            },
            common: Some(epoch(5)),
            two: TwoSources {
                common: has("common").then_some(5),
                here: Since {
                    has: has("wrote") || has("begun"),
                    ..Since::of(has("wrote").then_some(Some(2 * BLOCK)))
                },
                there: Since::of(has("theirs").then_some(Some(3 * BLOCK))),
            },
            name: "far:/replica",
            live: has("live").then(|| LiveDisk { resized: has("resized") }),
            empty: has("empty"),
            size: 1,
            history,
            compared: if has("halfway") {
                vec![KnownPosition { epoch: epoch(6), upto: BLOCKS * BLOCK / 2 }]
            } else {
                Vec::new()
            },
            bookmark: has("remembered").then(|| Bookmark {
                epoch: epoch(4),
                time: 0,
                unread: 0,
                also: Vec::new(),
                state: None,
            }),
        };
        choose(&facts, status, &options(words))
    }

    /// What is chosen, or the name of the conflict.
    fn choice(situation: &str) -> String {
        let (replica_words, words) = situation.split_once(';').unwrap_or((situation, ""));
        match chosen(&replica(replica_words), words) {
            Ok(choice) if choice.method == Method::Tracked => "tracked".into(),
            Ok(choice) => format!("{}, {}", choice.method, choice.trust),
            Err(conflict) => {
                let debug = format!("{conflict:?}");
                debug.split([' ', '(']).next().unwrap_or_default().to_owned()
            }
        }
    }

    #[test]
    fn the_method_follows_from_what_is_known() {
        let situations = [
            // No replica yet.
            ("none", "copy, seeded"),
            ("none; --copy", "copy, seeded"),
            ("none; --compare", "copy, seeded"),
            ("none; --rolling", "copy, seeded"),
            ("none; --tracked", "NoReplica"),
            ("none; remembered", "Vanished"),
            ("none; remembered --adopt", "Vanished"),
            ("none; remembered --create", "copy, seeded"),
            ("none; remembered --tracked", "Vanished"),
            ("none gone", "Gone"),
            ("none gone; --adopt", "Gone"),
            ("none gone; remembered", "Vanished"),
            ("none gone; --create", "copy, seeded"),
            // What was copied without a freeze may hold what is in no other branch.
            ("at 5 fuzzy", "tracked"),
            (
                "at 5 fuzzy; term2",
                "compare, compared: it was copied from a disk in use without a freeze, of which another replica was promoted since",
            ),
            ("at 6 fuzzy term2; term2", "tracked"),
            ("at 5; term2", "tracked"),
            (
                "at 4 staged; term2",
                "compare, compared: a transfer to it was interrupted, and another replica of its source was promoted since",
            ),
            ("at 5 staged; term2", "tracked"),
            ("at 4 staged", "tracked"),
            // A replica of this source.
            ("at 5", "tracked"),
            ("at 5; remembered", "tracked"),
            ("at 5; --tracked", "tracked"),
            ("at 5; --compare", "compare, compared: asked for"),
            ("at 5; --rolling", "rolling, compared: asked for"),
            ("at 5; --copy", "copy, copied: asked for"),
            ("at 5; --leave-out", "tracked"),
            ("at 5; --rolling --leave-out", "compare, compared: a part of the source cannot be read"),
            ("unsure at 5", "tracked"),
            ("unsure at 5; gap", "compare, compared: the host crashed"),
            ("at 5 partly", "tracked"),
            ("at 5 cut off", "tracked"),
            ("empty at 5", "compare, compared: the replica was empty"),
            ("empty at 5; --tracked", "copy, seeded"),
            // Knowledge was lost.
            ("at 5; gap", "compare, compared: the host crashed"),
            ("at 5; gap --tracked", "Lost"),
            ("at 5; gap --copy", "copy, copied: asked for"),
            ("at 5; foreign", "Foreign"),
            ("at 5; foreign --compare", "Foreign"),
            ("at 5; foreign --copy", "Foreign"),
            ("at 5; foreign --rolling", "Foreign"),
            ("at 5 term2; term2 foreign --compare", "Foreign"),
            ("at 5; foreign --adopt", "Newer"),
            ("at 5; foreign --adopt=overwrite", "compare, compared: the replica was adopted"),
            ("at 5; gap empty", "Emptied"),
            ("at 5; gap empty --compare", "Emptied"),
            ("at 5; gap empty --copy", "Emptied"),
            ("at 5; gap empty --adopt", "compare, compared: the replica was adopted"),
            ("at 5; other-content", "OtherContent"),
            ("at 5; other-content --compare", "OtherContent"),
            ("at 5; other-content --copy", "OtherContent"),
            ("at 5; other-content --adopt", "OtherContent"),
            ("at 5; other-content --adopt=overwrite", "compare, compared: the replica was adopted"),
            (
                "at 5; other-content --accept-source",
                "compare, compared: its content is not what was recorded last: written to last a day before",
            ),
            ("nothing; other-content", "copy, seeded"),
            ("at 5; empty", "tracked"),
            ("nothing; gap empty", "copy, seeded"),
            ("unknown", "compare, compared: moving its parts in place was cut off"),
            ("unknown; --tracked", "Lost"),
            // Something that is not a replica of this source.
            ("other at 5", "OtherSource"),
            ("other at 5; --copy", "OtherSource"),
            ("other at 5; --adopt", "compare, compared: the replica was adopted"),
            ("other at 5; --adopt --rolling", "rolling, compared: asked for"),
            ("file; --adopt", "compare, compared: the replica was adopted"),
            ("file; --adopt --tracked", "Lost"),
            ("at 5; --adopt", "compare, compared: the replica was adopted"),
            // A former source, of any epoch from 5 to 7 but for what it is unsure of.
            ("unsure demoted at 5; term2", "tracked"),
            ("unsure demoted at 7; term2", "tracked"),
            (
                "demoted unknown; term2",
                "compare, compared: it was demoted without knowing what had been written to it",
            ),
            ("demoted unknown; term2 --tracked", "Lost"),
            ("unsure demoted at 7; term2 forked", "Diverged"),
            ("unsure demoted at 7; term2 forked --adopt", "Newer"),
            (
                "unsure demoted at 7; term2 forked --adopt=overwrite",
                "compare, compared: the replica was adopted",
            ),
            // It was of a later term, and was given up.
            ("unsure demoted at 5 term2", "tracked"),
            ("unsure demoted at 5 term2; gap", "compare, compared: the host crashed"),
            ("unsure demoted at 5 term2; ahead", "Diverged"),
            // A replica has all that this source has, and more: its state is older, or another took over.
            ("at 7; ahead", "Foreign"),
            ("at 7; ahead gap", "Foreign"),
            ("at 7; ahead --compare", "Foreign"),
            ("at 7; ahead --copy", "Foreign"),
            ("at 7; ahead --adopt", "Newer"),
            ("at 7; ahead --adopt=overwrite", "compare, compared: the replica was adopted"),
            ("unsure batches at 5; ahead", "Foreign"),
            ("at 7 term2; ahead", "Diverged"),
            ("at 7 term2; ahead gap", "Diverged"),
            ("at 7 term2; ahead --copy", "Diverged"),
            ("at 7 term2; ahead --adopt", "Newer"),
            ("at 7 term2; ahead --adopt=overwrite", "compare, compared: the replica was adopted"),
            ("at 7 term3; term2 ahead", "Diverged"),
            // Each has what the other has not.
            ("at 7; term2 forked", "Diverged"),
            ("at 7; term2 forked gap", "Diverged"),
            ("at 7; term2 forked --compare", "Diverged"),
            ("at 7; term2 forked --adopt", "Newer"),
            ("at 7; term2 forked --adopt=overwrite", "compare, compared: the replica was adopted"),
            ("at 7 term2; term2 forked", "Diverged"),
            ("unsure batches at 5; term2 forked", "Diverged"),
            ("unsure batches at 5; term2 forked --compare", "Diverged"),
            ("unsure batches at 5; term2 forked --adopt", "Newer"),
            (
                "unsure batches at 5; term2 forked --adopt=overwrite",
                "compare, compared: the replica was adopted",
            ),
            // Nothing tells.
            ("at 5; strangers", "Foreign"),
            ("at 5; strangers gap", "Foreign"),
            ("at 5; strangers --adopt", "Newer"),
            ("at 5; strangers --adopt=overwrite", "compare, compared: the replica was adopted"),
            // It has all that the replica has, of whatever term and whatever was brought to that.
            ("at 5; term2", "tracked"),
            ("at 5 term2; term2", "tracked"),
            ("at 5; term2 gap", "compare, compared: the host crashed"),
            ("unsure batches at 5; term2", "tracked"),
            ("other at 5 term3", "OtherSource"),
            // The same source itself.
            ("none source1; term2", "Diverged"),
            ("none source2", "Diverged"),
            ("none source2; --copy", "Diverged"),
            ("none source2; remembered --create", "Diverged"),
            // A disk in use.
            ("at 5; live", "tracked"),
            ("none; live", "copy, seeded"),
            ("at 5; live --compare", "compare, compared: asked for"),
            ("at 5; live --rolling", "LiveRolling"),
            ("at 5; live --keep-going", "LiveInPart"),
            ("at 5; live --leave-out", "LiveInPart"),
            ("at 5; live --at-view", "NoView"),
            ("at 5; live resized", "Unfollowed"),
        ];
        for (situation, expected) in situations {
            assert_eq!(choice(situation), expected, "{situation}");
        }
    }

    #[test]
    fn a_file_larger_than_the_source_is_adopted_only_if_it_may_be_cut() {
        let size = BLOCKS * BLOCK;
        let larger = |words: &str, asked: SyncOptions, size: u64| {
            let mut status = replica(words);
            if words.contains("device") {
                status.replica.capacity = Some(1 << 40);
            }
            refuse_larger((Path::new("/source"), SOURCE, size), &status, &asked)
        };
        let adopt = || options("--adopt");
        for words in ["file", "other at 5"] {
            let refused = larger(words, adopt(), size - BLOCK).unwrap_err().to_string();
            for told in ["/replica", "/source", "32.0 KiB", "28.0 KiB", "--adopt --allow-shrink"] {
                assert!(refused.contains(told), "{words}: {told}: {refused}");
            }
            assert_eq!(larger(words, adopt(), size), Ok(()), "{words}");
            assert_eq!(larger(words, adopt(), size + 1), Ok(()), "{words}");
            assert_eq!(larger(words, SyncOptions { shrink: true, ..adopt() }, 0), Ok(()), "{words}");
        }
        for words in ["at 5", "unknown", "file device", "none"] {
            assert_eq!(larger(words, adopt(), size - BLOCK), Ok(()), "{words}");
        }
    }

    #[test]
    fn every_refusal_names_the_thing_and_the_way_out() {
        for (situation, names) in [
            ("none device", ["far:/replica has 0 B", "source /source has 1 B"]),
            ("none; --tracked", ["/replica", "without --method tracked"]),
            ("none; remembered", ["far:/replica", "--create"]),
            ("none; remembered", ["\"dsync forget /source far:/replica\"", "--create"]),
            ("none gone", ["the file of replica /replica is gone", "--create"]),
            ("at 5; gap --tracked", ["/source", "omit --method tracked"]),
            ("at 5; foreign", ["/replica", "it was restored"]),
            ("other at 5", ["/replica", "--adopt"]),
            ("at 5; live --rolling", ["/source", "omit"]),
            ("at 5; live --keep-going", ["/source", "omit --keep-going"]),
            ("at 5; live --at-view", ["/source", "omit --at-view"]),
            ("at 5; live resized", ["/source", "dsync track add /source"]),
            ("at 7 term2; ahead", ["sync from its source to /source", "term 2) than /source (term 1"]),
            ("at 7; term2 forked", ["at epoch 7 of term 1", "goes on from epoch 5"]),
            ("at 7; term2 forked", ["far:/replica", "dsync sync --discard-there SRC DST"]),
            (
                "at 7; ahead",
                ["at epoch 7, and this source knows nothing of what came after epoch 5", "--discard-there"],
            ),
            (
                "unsure batches at 5; ahead",
                ["a mirror has brought the replica past epoch 5", "--discard-there"],
            ),
            ("at 5; strangers", ["/replica", "--discard-there"]),
            ("unsure batches at 5; term2 forked", ["ahead of epoch 5 (8.00 KiB", "goes on from epoch 5"]),
            (
                "unsure batches at 5; term2 forked",
                ["dsync rewind /replica --to 5", "dsync promote --force /replica"],
            ),
            ("unsure demoted at 5; forked", ["so copy it first", "was demoted at epoch 5"]),
            ("none source1; term2", ["/source (term 2)", "far:/replica (term 1)"]),
            (
                "none source1; term2",
                ["apart since an epoch that is not known", "an unknown amount was written"],
            ),
            ("none source1; term2 common theirs", ["apart since epoch 5", "12.0 KiB to far:/replica"]),
            (
                "none source1; term2 common wrote theirs",
                ["8.00 KiB was written to /source", "12.0 KiB to far:/replica"],
            ),
            (
                "none source1; term2 common wrote theirs",
                ["dsync sync --save-there FILE SRC DST", "dsync sync --save-there FILE DST SRC"],
            ),
            // The history of one of them does not go back to that epoch.
            (
                "none source1; term2 common theirs",
                ["dsync sync --discard-there SRC DST", "dsync sync --discard-there DST SRC"],
            ),
            (
                "none source1; term2 common theirs",
                ["cannot be saved as a delta, so copy it first", "differs in far:/replica"],
            ),
            // Though that is in its past.
            (
                "none source1; term2 common theirs begun",
                ["dsync sync --save-there FILE SRC DST", "dsync sync --discard-there DST SRC"],
            ),
        ] {
            let (replica_words, words) = situation.split_once(';').unwrap_or((situation, ""));
            let text = chosen(&replica(replica_words), words).unwrap_err().to_string();
            assert!(names.iter().all(|name| text.contains(name)), "{situation}: {text}");
        }
    }

    /// The plan for epoch 7, when blocks 2 and 3 have changed since `since`, which the chain begins with.
    fn planned(situation: &str, blocks_now: u64, since: u64) -> Result<SyncPlan, Conflict> {
        let (replica_words, words) = situation.split_once(';').unwrap_or((situation, ""));
        let status = replica(replica_words);
        let choice = chosen(&status, words)?;
        let changes = || {
            let blocks = Bitmap::new(blocks_now);
            blocks.set(2..4);
            let chain = (since..=7).map(epoch).collect();
            MomentChanges { blocks, chain, size_before: BLOCKS * BLOCK }
        };
        let late = words.contains("late");
        let moment = SourceMoment {
            path: Path::new("/source"),
            source: SOURCE,
            epoch: epoch(7),
            way: (since..=7).map(epoch).collect(),
            lives: Lives::default(),
            size: blocks_now * BLOCK,
            block_size: BLOCK as u32,
            fill: false,
            changes: Some(if late { Err("the tracker was away".into()) } else { Ok(changes()) }),
        };
        choice.at(moment, &status, &options(words))
    }

    /// What a plan sends: its method, chain, sizes in blocks, whether it is bound or resumes, and the blocks.
    fn told(plan: &SyncPlan) -> String {
        let SyncPlan { header, wanted, .. } = plan;
        let chain: Vec<String> = header.chain.iter().map(|epoch| epoch.number.to_string()).collect();
        let sizes = (header.size_before / BLOCK, header.size_after / BLOCK);
        let bound = if header.binds.is_some() { " bound" } else { "" };
        let resumes = if header.resumes.is_some() { " resumes" } else { "" };
        let runs = |blocks: Bitmap| {
            let runs = blocks.runs().map(|run| format!("{}-{}", run.start, run.end - 1));
            runs.collect::<Vec<_>>().join(" ")
        };
        let mut blocks = wanted.blocks().map_or("all".to_owned(), runs);
        if let Some(LeftCompared { changed, from }) = &plan.left {
            blocks += &format!(", {} and from {}", runs(changed.blocks().unwrap()), from / BLOCK);
        }
        format!("{} {} {}>{}{bound}{resumes}: {blocks}", header.method, chain.join(","), sizes.0, sizes.1)
    }

    #[test]
    fn a_plan_says_what_the_delta_is_and_what_it_carries() {
        let situations = [
            ("at 5", 8, 5, "tracked 5,6,7 8>8: 2-3"),
            // All parts are at 6 in the journal, and the last commit was 5.
            ("at 5", 8, 6, "tracked 5,6,7 8>8: 2-3"),
            // The last commit is of another history than the chain.
            ("at 9", 8, 5, "tracked 5,6,7 8>8: 2-3"),
            // Where it is unsure is sent again, even if nothing changed; nothing else may be at that.
            ("unsure at 5", 8, 5, "tracked 5,6,7 8>8 bound: 0-0 2-3 7-7"),
            ("unsure at 7", 8, 7, "tracked 7 8>8 bound: 0-0 2-3 7-7"),
            ("unsure at 5", 6, 5, "tracked 5,6,7 8>6 bound: 0-0 2-3"),
            // A former source gets what it is unsure of, too; where that is nothing, no other replica may take the delta.
            ("unsure demoted at 5; term2", 8, 5, "tracked 5,6,7 8>8 bound: 0-0 2-3 7-7"),
            ("demoted at 5; term2", 8, 5, "tracked 5,6,7 8>8 bound: 2-3"),
            // Its journal has come to 7.
            ("ahead at 7 cut off", 8, 7, "tracked 7 8>8 resumes: 2-3"),
            ("at 5 cut off", 8, 5, "tracked 5,6,7 8>8 resumes: 2-3"),
            ("at 5 partly", 8, 5, "tracked 5,6,7 8>8 bound: 2-7"),
            ("at 5", 10, 5, "tracked 5,6,7 8>10: 2-3 8-9"),
            ("at 5", 6, 5, "tracked 5,6,7 8>6: 2-3"),
            ("at 5; late", 8, 5, "compare 5,6,7 8>8 bound: all"),
            ("at 5; --compare", 8, 5, "compare 5,6,7 8>8 bound: all"),
            ("at 5 cut off; --compare", 8, 5, "compare 5,6,7 8>8 bound: all"),
            ("staged at 5 cut off; gap halfway", 8, 6, "compare 6,7 8>8 bound resumes: all, 2-3 and from 4"),
            ("staged at 5 cut off; gap halfway late", 8, 6, "compare 6,7 8>8 bound: all"),
            ("staged at 5 cut off; gap halfway --compare", 8, 6, "compare 6,7 8>8 bound: all"),
            ("staged at 5 cut off; gap", 8, 6, "compare 6,7 8>8 bound: all"),
            ("at 5; --rolling", 8, 5, "rolling 5,6,7 8>8 bound: all"),
            ("at 5; --copy", 8, 5, "copy 5,6,7 8>8 bound: 0-7"),
            ("none", 8, 5, "copy 7 0>8: all"),
        ];
        for (situation, blocks, since, expected) in situations {
            let plan = planned(situation, blocks, since).unwrap();
            assert_eq!(told(&plan), expected, "{situation}, now {blocks} blocks, since {since}");
        }
        assert!(matches!(planned("at 5; late --tracked", 8, 5), Err(Conflict::Lost { .. })));
    }

    #[test]
    fn a_plan_is_done_only_at_its_own_epoch_with_nothing_left_over() {
        let done = |situation: &str| planned(situation, 8, 5).unwrap().is_done(&replica(situation));
        assert!(done("at 7"));
        for situation in ["at 5", "at 7 cut off", "at 7 partly", "unsure at 7", "demoted at 7; term2"] {
            assert!(!done(situation), "{situation}");
        }
    }

    #[test]
    fn a_pass_reaches_the_end_of_the_disk() {
        let plan = planned("at 5", 8, 5).unwrap().into_pass();
        assert_eq!(told(&plan), "tracked 5,6,7 8>8: 2-3 7-7");
        assert!(plan.pass && plan.wanted.to_end);
    }
}
