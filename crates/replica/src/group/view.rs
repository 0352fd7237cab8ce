//! Readers of several replicas of a group, all at the moment of one common commit.
//!
//! A reader says at which epoch it is. Readers that are at the epochs of one intent are at one moment, whatever is committed
//! meanwhile; others are opened again.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use device::{Dir, Folder as _};

use crate::error::{ReplicaError, Result};
use crate::group::past::{GroupMoment, apart, find_members};
use crate::journal::ARRIVING;
use crate::moments::view::MomentView;
use crate::state::intent::Intent;
use crate::state::lineage::Lineage;
use crate::state::locate::{inspect, state_folder};
use crate::state::options::ReplicaOptions;

/// How long a common commit under way is waited for.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait before they are opened again.
const PAUSE: Duration = Duration::from_millis(20);

/// The replicas of a group that are to be read, and the moment.
#[derive(Debug, Clone, Copy)]
pub struct WantedGroup<'a> {
    /// Where they are, without links.
    pub dir: &'a Path,
    /// The name of the group.
    pub name: &'a str,
    /// An earlier common commit; `None` for the last one.
    pub moment: Option<&'a GroupMoment>,
    /// Some of them, by their paths without links; `None` for all.
    pub only: Option<&'a [PathBuf]>,
}

/// Readers of the replicas of a group.
pub struct GroupView {
    /// Each with its path in the folder.
    pub views: Vec<(PathBuf, MomentView)>,
    /// The replicas that had no part in the moment, or are no longer there: their sources have joined since, or had left the group. Empty if some
    /// were named.
    pub without: Vec<PathBuf>,
}

/// Opens a reader of each replica that had a part in the moment. Takes no lock, unless a commit was killed, which is completed then. A commit under way
/// is waited for.
///
/// # Errors
/// As [`MomentView::open`]; refused if they are not all at that moment, or cannot be shown as they were then.
pub fn view_together(wanted: WantedGroup<'_>, options: &ReplicaOptions) -> Result<GroupView> {
    let began = Instant::now();
    loop {
        let (intent, members) = find_members(wanted.dir, wanted.name, options)?;
        let is_wanted = |path: &Path| {
            let at = std::fs::canonicalize(path);
            wanted.only.is_none_or(|only| at.is_ok_and(|at| only.contains(&at)))
        };
        let has_part = |source| match wanted.moment {
            Some(moment) => moment.member(source).is_some(),
            None => intent.names(source),
        };
        // One that is named is refused if it has none.
        let (members, without): (Vec<_>, Vec<_>) = members
            .into_iter()
            .filter(|(path, _)| is_wanted(path))
            .partition(|(_, lineage)| wanted.only.is_some() || has_part(lineage.source));
        let mut views = Vec::new();
        for (path, lineage) in &members {
            let Some(view) = open(path, lineage, &intent, wanted.moment, options)? else { break };
            views.push((path.clone(), view));
        }
        if views.len() == members.len() {
            let gone = wanted.moment.into_iter().flat_map(|moment| moment.without.clone());
            let mut without: Vec<PathBuf> = without.into_iter().map(|(path, _)| path).chain(gone).collect();
            without.sort();
            without.dedup();
            return Ok(GroupView { views, without });
        }
        let waits = members.iter().any(|(path, lineage)| waits(path, lineage, &intent, options));
        let still = find_members(wanted.dir, wanted.name, options)?;
        if still.0 == intent && (!waits || began.elapsed() >= PATIENCE) {
            let now = still
                .1
                .iter()
                .filter(|(path, _)| is_wanted(path) && !without.iter().any(|(of, _)| of == path));
            let apart = apart(&intent, now.map(|(path, lineage)| (path.as_path(), lineage)));
            if !apart.is_empty() {
                return Err(ReplicaError::Refused(format!(
                    "the replicas of the group {} in {} are not of one moment: {}. Run \"dsync sync --group {0} DIR\" to bring them to one, \
                     or show each by a server of its own",
                    wanted.name,
                    wanted.dir.display(),
                    apart.join("; ")
                )));
            }
        }
        if began.elapsed() >= PATIENCE {
            return Err(ReplicaError::Refused(format!(
                "the replicas of the group {} in {} could not be shown at one moment, because its commits follow one another too \
                 closely: run the command again",
                wanted.name,
                wanted.dir.display()
            )));
        }
        std::thread::sleep(PAUSE);
    }
}

/// A reader at the moment; `None` if the replica is not there now.
fn open(
    path: &Path,
    lineage: &Lineage,
    intent: &Intent,
    moment: Option<&GroupMoment>,
    options: &ReplicaOptions,
) -> Result<Option<MomentView>> {
    let Some(moment) = moment else {
        let at = intent.members.values().find(|member| Some(member.source) == lineage.source);
        let Some(at) = at else { return Ok(None) };
        let view = MomentView::open(path, options, None)?;
        return Ok(Some(view).filter(|view| view.epoch() == at.epoch && !view.is_ahead()));
    };
    let gone = || {
        ReplicaError::Refused(format!(
            "{} cannot be shown as it was at common epoch {} any more: \"dsync rewind --group DIR\" lists the moments that all replicas of \
             the group have kept",
            path.display(),
            moment.epoch.number
        ))
    };
    let at = moment.member(lineage.source).ok_or_else(gone)?;
    let view = MomentView::open(path, options, Some(at.state.ok_or_else(gone)?))?;
    Ok(Some(view).filter(|view| view.epoch() == at.epoch))
}

/// True if the last common commit of a replica may be under way.
fn waits(path: &Path, lineage: &Lineage, intent: &Intent, options: &ReplicaOptions) -> bool {
    let member = intent.members.values().find(|member| Some(member.source) == lineage.source);
    let Some(stream) = member.and_then(|member| member.stream) else { return false };
    // It may have been completed meanwhile.
    let now = inspect(path, options).ok().flatten();
    if now.is_none_or(|now| now.committed == Some(stream)) {
        return lineage.committed != Some(stream);
    }
    let folder = state_folder(path, options).ok().and_then(|folder| Dir::existing(&folder).ok());
    folder.is_some_and(|folder| folder.open(ARRIVING, false).is_ok())
}
