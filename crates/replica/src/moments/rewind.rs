//! Rewinding: a replica goes back to an earlier moment by the undo deltas since, as one delta that is committed like any other.
//!
//! The undo deltas are combined by `delta/src/combine.rs`: the earlier content wins, as it comes later on the way. The state has its old
//! name again, so moments before it remain reachable, and those after it through the undo delta of the rewind. The next sync goes on from
//! the epoch that the replica is at. Where a mirror had brought the replica ahead of its epoch, the undo delta of the rewind leads to
//! that state as to a moment: with the mark of a batch, so that on the way forth all that it writes, which is at least what differs from
//! the epoch, joins the unsure set. After a rewind nothing is aged until the next commit, and a rewind whose undo delta cannot be stored
//! is not made.

use std::path::Path;
use std::time::Duration;

use delta::Epoch;
use device::Folder;
use serde::Serialize;
use uuid::Uuid;

use crate::commit::receive::{CommitMode, Committed, DeltaReceiver};
use crate::error::{ReplicaError, Result, io_error};
use crate::known::verdict::Verdict;
use crate::past::present::{Shown, Watched};
use crate::past::{self, Moment, Past, PastSettings};
use crate::replica::Replica;
use crate::state::intent::Member;
use crate::state::keep::Keep;
use crate::state::lineage::{Lineage, State, StepKind, Unsure};
use crate::state::locate::{inspect, state_folder};
use crate::state::options::ReplicaOptions;

/// How often a destination that is written to is looked at again, and how soon.
const LOOKS: u32 = 20;
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The past of a replica.
#[derive(Debug, Clone, Serialize)]
pub struct ReplicaPast {
    /// The epoch of the present state.
    pub epoch: Option<Epoch>,
    /// Batches of a mirror have brought it ahead of that epoch.
    pub ahead: bool,
    /// Names the present state.
    pub state: Uuid,
    /// When the replica came to it, in seconds since 1970. `None` if that is not known.
    pub at: Option<u64>,
    /// What is kept.
    pub keep: Keep,
    /// The moments that the replica can be brought to, the latest first.
    pub moments: Vec<Moment>,
}

impl ReplicaPast {
    /// The state by which it can be brought to what it was at a common commit; `None` if it cannot. A repair gives the state another name, and leaves
    /// its epoch.
    pub(crate) fn state_of(&self, member: &Member) -> Option<Uuid> {
        let moments = self.moments.iter().map(|moment| (moment.state, Some(moment.epoch), moment.ahead));
        let all = || std::iter::once((self.state, self.epoch, self.ahead)).chain(moments.clone());
        let named = all().find(|(state, ..)| Some(*state) == member.state);
        let same = || all().find(|(_, epoch, ahead)| *epoch == Some(member.epoch) && !ahead);
        member.state.and(named.or_else(same)).map(|(state, ..)| state)
    }
}

/// The past of the replica at `path`. Takes no lock and changes nothing.
///
/// # Errors
/// If there is no replica, or its state cannot be read.
pub fn history(path: &Path, options: &ReplicaOptions) -> Result<ReplicaPast> {
    let Some(lineage) = inspect(path, options)? else {
        return Err(ReplicaError::NotAReplica(path.to_path_buf()));
    };
    let folder = state_folder(path, options)?;
    let folder = device::Dir::existing(&folder).map_err(io_error("open", &folder))?;
    of(&folder, &lineage)
}

/// The past of the replica at `path` as of the last batch of a mirror that is at work, or was killed: its lineage does not have that batch yet,
/// and a rewind gives it up.
///
/// # Errors
/// As [`history`].
pub fn history_at_work(path: &Path, options: &ReplicaOptions) -> Result<ReplicaPast> {
    let mut history = history(path, options)?;
    let Some(lineage) = inspect(path, options)? else { return Ok(history) };
    let folder = state_folder(path, options)?;
    let folder = device::Dir::existing(&folder).map_err(io_error("open", &folder))?;
    let Some(shown) = shown(&folder) else { return Ok(history) };
    if Some(shown.source) != lineage.source || [history.state, lineage.nonce].contains(&shown.state) {
        return Ok(history);
    }
    // What the batches replaced leads back to what is written down.
    let log = history.at.and_then(|at| folder.open(&past::log_name(at, lineage.nonce), false).ok());
    if let (Some(log), Some(epoch), Some(at)) = (log, history.epoch, history.at) {
        let (ahead, size, fuzzy) = (history.ahead, lineage.size, lineage.state == State::Fuzzy);
        let doubted = Verdict::in_state(&folder, epoch.number, lineage.nonce).is_some();
        let bytes = log.len().map_err(io_error("look into", folder.path()))?;
        history
            .moments
            .insert(0, Moment { at, epoch, ahead, size, fuzzy, doubted, bytes, state: lineage.nonce });
    }
    (history.epoch, history.ahead) = (Some(shown.epoch), shown.ahead);
    (history.state, history.at) = (shown.state, shown.at);
    Ok(history)
}

/// What a destination holds, once it rests.
fn shown(folder: &device::Dir) -> Option<Shown> {
    let watched = Watched::open(folder).ok()??;
    (0..LOOKS).find_map(|look| {
        if look > 0 {
            std::thread::sleep(LOOK_EVERY);
        }
        watched.look()?.1.ok()
    })
}

fn of(folder: &dyn Folder, lineage: &Lineage) -> Result<ReplicaPast> {
    let settings = PastSettings::load(folder)?;
    // An interrupted step, or another program, has changed what they go back from.
    let mut moments = match in_place(lineage) || lineage.unsure == Unsure::Everything {
        true => Vec::new(),
        false => past::moments(folder, lineage.nonce).map_err(io_error("look into", folder.path()))?,
    };
    for moment in &mut moments {
        moment.doubted = Verdict::in_state(folder, moment.epoch.number, moment.state).is_some();
    }
    Ok(ReplicaPast {
        epoch: lineage.epoch,
        ahead: lineage.is_ahead(),
        state: lineage.nonce,
        at: past::since(folder, lineage, settings.as_ref()),
        keep: settings.map(|settings| settings.keep).unwrap_or_default(),
        moments,
    })
}

fn in_place(lineage: &Lineage) -> bool {
    lineage.step.as_ref().is_some_and(|step| step.kind == StepKind::InPlace)
}

impl Replica {
    /// The replica's past.
    ///
    /// # Errors
    /// If its state cannot be read.
    pub fn history(&self) -> Result<ReplicaPast> {
        of(self.state(), self.lineage())
    }

    /// Brings it back to the moment of this [state](Moment::state). Durable when this returns; if it is interrupted, opening the
    /// replica completes it or leaves the replica as it was. The way forth again is kept as another undo delta.
    ///
    /// # Errors
    /// Refused if it was changed by others or promoted, or a commit was interrupted; if there is no such moment, or an undo
    /// delta on the way is damaged: then the replica is unchanged. As for [`crate::DeltaReceiver::finish`].
    pub fn rewind(&mut self, state: Uuid) -> Result<Committed> {
        self.go_back(state, |receiver| receiver.finish())
    }

    /// Prepares to bring it back to the moment of this state, up to where the commit of the group decides.
    ///
    /// # Errors
    /// As [`Replica::rewind`]. What was prepared is dropped with [`Replica::give_up_journal`].
    pub(crate) fn prepare_rewind(&mut self, state: Uuid) -> Result<Epoch> {
        self.go_back(state, |receiver| receiver.prepare())
    }

    fn go_back<T>(&mut self, state: Uuid, end: impl FnOnce(DeltaReceiver<'_>) -> Result<T>) -> Result<T> {
        self.sound()?;
        self.mergeable()?;
        self.admit_alone()?;
        let refuse = |why: &str| Err(ReplicaError::Refused(format!("{} {why}", self.path().display())));
        if in_place(self.lineage()) {
            return refuse(
                "has a commit under way that was interrupted: complete it first, with \"dsync sync\"",
            );
        }
        if let Some(why) = self.changed() {
            return Err(self.touched(why));
        }
        let found = self.history()?.moments.into_iter().find(|moment| moment.state == state);
        let Some(moment) = found else {
            return refuse(
                "cannot be brought back to that moment: \"dsync rewind\" without --to lists those that it can",
            );
        };
        self.herald_back()?;
        self.note_return(moment.epoch.number, state)?;
        // A repair has mended what it held then with what it holds now.
        self.doubt_digests()?;
        self.note_rewind(&moment)?;
        // To make room, the moment itself might be dropped.
        self.set_rewinds(true);
        let rewound = self.receive_undo(state, end);
        self.set_rewinds(false);
        rewound
    }

    fn receive_undo<T>(
        &mut self,
        state: Uuid,
        end: impl FnOnce(DeltaReceiver<'_>) -> Result<T>,
    ) -> Result<T> {
        let folder = self.shared_state();
        let past = Past::load(&*folder, self.lineage().nonce);
        let past = past.map_err(io_error("look into", folder.path()))?;
        let path: Vec<_> = past.path(state).into_iter().cloned().collect();
        let mut combined = past::combine(&*folder, path.clone())?;
        let damaged = |e: delta::Error| past::damaged(&*folder, &path, &e);
        let Some(header) = combined.next().map_err(damaged)? else {
            return Err(damaged(delta::Error::NoTrailer { units: 0 }));
        };
        let mut receiver = self.receive(header, CommitMode::Journal)?;
        while let Some(unit) = combined.next().map_err(damaged).transpose() {
            match unit.and_then(|unit| receiver.unit(unit)) {
                Ok(()) => {}
                Err(error) => {
                    receiver.give_up();
                    return Err(error);
                }
            }
        }
        end(receiver)
    }

    /// Writes down when it came to the moment first: that is still the age of what it holds then.
    fn note_rewind(&mut self, moment: &Moment) -> Result<()> {
        let Some(settings) = self.settings() else { return Ok(()) };
        let settings = PastSettings { rewound: Some((moment.state, moment.at)), ..settings.clone() };
        settings.store(self.state())?;
        self.set_settings(Some(settings));
        Ok(())
    }
}
