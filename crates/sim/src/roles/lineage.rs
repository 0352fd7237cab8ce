//! What `lineage::relation` says of the disks of a run of roles, beside what a sync does. Both logs have all commits that the run knows of, so
//! what is compared is the decision.

use std::collections::HashMap;

use extents::Extents;
use lineage::{Changes, Commit, Head, Kind, Log, Point, Relation, Set, Side, relation};
use replica::State;
use sync::SyncError;
use uuid::Uuid;

use crate::machine::inode::PAGE;
use crate::roles::model::{Epochs, Pages};
use crate::roles::{Role, Run};

/// The epochs as commits of lives: the first that follows another goes on in its life, and each later one begins a life there.
#[derive(Default)]
struct Commits {
    log: Log,
    points: HashMap<Uuid, Point>,
}

impl Commits {
    fn of(epochs: &Epochs) -> Commits {
        let mut commits = Commits::default();
        let mut last: HashMap<Uuid, u64> = HashMap::new();
        for (id, parent) in epochs.in_order() {
            let parent = parent.and_then(|parent| commits.points.get(&parent).copied());
            let goes_on = parent.filter(|parent| last.get(&parent.life) == Some(&parent.n));
            let at = match goes_on {
                Some(parent) => Point { n: parent.n + 1, ..parent },
                None => Point { life: id, n: 1 },
            };
            let birth = if goes_on.is_some() { commits.log.birth(at.life).flatten() } else { parent };
            last.insert(at.life, at.n);
            commits.points.insert(id, at);
            commits.log.push(Commit {
                at,
                first: at.n,
                id: Some(id),
                birth,
                kind: Kind::Cut,
                own: true,
                group: None,
                size: 0,
                block_size: PAGE as u32,
                time: 0,
                changes: Changes::Known,
            });
        }
        commits
    }
}

fn set(pages: &Pages) -> Set {
    let mut blocks = Extents::new();
    pages.iter().for_each(|page| blocks.insert(*page..*page + 1));
    Set::Blocks(blocks)
}

impl Run {
    /// Where a disk stands, if that is a point.
    fn head(&self, at: usize, commits: &Commits) -> Option<Head> {
        let place = &self.disks[at].place;
        let (lineage, ..) = self.recorded(at);
        let mut head = Head::at(commits.points.get(&place.at?).copied()?);
        match self.role(at) {
            Role::Source => head.own = set(&place.dirty),
            Role::Replica => {
                let lineage =
                    lineage.filter(|lineage| lineage.state == State::Exact && lineage.step.is_none())?;
                head.parts[0].at = commits.points.get(&lineage.epoch?.id).copied()?;
            }
            Role::Nothing | Role::Unfinished => return None,
        }
        Some(head)
    }

    /// What one disk is to another.
    pub(crate) fn related(&self, mine: usize, theirs: usize) -> Option<Relation> {
        let commits = Commits::of(&self.epochs);
        let (one, other) = (self.head(mine, &commits)?, self.head(theirs, &commits)?);
        let side = |head| Side { log: &commits.log, head, doubt: None };
        Some(relation(side(&one), side(&other)))
    }

    /// What the disks of one site are to those of another, together: what the worst of them is.
    pub(crate) fn related_groups(&self, pairs: &[(usize, usize)]) -> Option<Relation> {
        let all: Option<Vec<_>> = pairs.iter().map(|(mine, theirs)| self.related(*mine, *theirs)).collect();
        let goes_on = |related: &Relation| matches!(related, Relation::Same | Relation::Behind(_));
        all?.into_iter().min_by_key(goes_on)
    }

    /// Counts whether a sync did what the lineage says, and says where not.
    pub(crate) fn compare_with_lineage(
        &mut self,
        (related, roles): (Option<Relation>, (Role, Role)),
        done: Result<(), &SyncError>,
    ) {
        let (Some(related), (Role::Source, there)) = (related, roles) else {
            let why = match roles {
                (Role::Source, Role::Replica) => "a transfer or a promotion was interrupted",
                (Role::Source, _) => "nothing is there",
                _ => "it is not a source",
            };
            return self.table.note(format!("lineage: not asked, {why}"));
        };
        let name = match related {
            Relation::Same => "same",
            Relation::Behind(_) => "behind",
            Relation::Ahead => "ahead",
            Relation::Forked(_) => "forked",
            Relation::Unknown(_) => "unknown",
        };
        let goes_on = matches!(related, Relation::Same | Relation::Behind(_));
        let did = match done {
            Ok(()) => "done",
            Err(error) if error.class().is_refusal() => "refused",
            Err(_) => return,
        };
        let role = if there == Role::Source { "source" } else { "replica" };
        self.table.note(format!("lineage: a {role} is {name}, {did}"));
        if goes_on != (did == "done") && std::env::var_os("DSYNC_LINEAGE").is_some() {
            let why = done.err().map(ToString::to_string).unwrap_or_default();
            println!(
                "lineage: DSYNC_SEED={} step {}: a {role} is {related}, {did}: {why}",
                self.seed,
                self.told.len()
            );
        }
    }
}
