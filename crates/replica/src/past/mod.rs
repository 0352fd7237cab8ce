//! The past of a replica: the undo deltas that lead it back to earlier states.
//!
//! ```text
//!     undo-TIME-FROM-TO        an ordinary delta, bound to the state FROM; its stream is the state TO
//!     undo-TIME-FROM-TO-ahead  the same; a rewind left TO, or the first delta of another branch, ahead of its epoch by batches of a mirror
//!     undo-TIME-FROM-TO-via    the same; TO is no moment of the source, and only leads on
//!
//!     present ◀── lineage.nonce
//!        │ undo-…-present-C
//!        ▼
//!        C ──undo-…-C-B──▶ B ──undo-…-B-A──▶ A
//! ```
//!
//! A state has the name of the stream that led to it, which the lineage keeps as its nonce. So what can be reached is found by
//! following the names from the present state, and whatever else changes the destination gives its state another name, from which
//! no undo delta leads: nothing has to be marked as void. A name is given once the file is whole and durable.
//!
//! After a rewind the states that came later are reached in the same way, by the undo delta of the rewind. Nothing of the past ages
//! until the replica has gone on from there, so that the rewind can be taken back.
//!
//! # How it grows and ages
//!
//! Moments are epochs, not batches: where the replica keeps one moment of each period (`--keep 24h/10m`), it says so with its status, and
//! the mirror ends an epoch in each such period in which something changed.
//!
//! At the end of a commit the past is aged (`Ageing::run`). A state has the time at which the replica came to it first; where a
//! rewind or a wrong clock has left times that do not rise on the way, nothing goes that one reading of them keeps (`kept`). What leads nowhere is
//! removed, and
//! what the rules do not keep (`keep.rs`) is removed at the end of the past, or folded into its neighbour by the same combination. A
//! commit folds one run of at most 32 undo deltas, so its work is bounded; the next commits do the rest. The oldest moments go if all
//! take more than `--keep-bytes`, or if there is no room for an undo delta or the journal; if there is still none, the commit goes on
//! without a past, and says so. None goes for a journal that would not fit either way: where the size of the delta is not known before
//! (`ExpectedBytes::Countable`), what comes behind the end of the room is counted and not stored, and if dropping moments makes room for all,
//! the replica's side asks for the delta again, whose size is known then. What is kept is written down beside the replica (`past`) and
//! applies until a command says otherwise; `--commit in-place` is refused meanwhile, because it overwrites blocks as they come.
//!
//! Where the past is kept, a changed block is written three times: to the journal, as what it replaces to the undo delta, and to the
//! destination. The undo delta goes past the page cache, several writes at once (`replica/src/past/aside.rs`), so a sync that keeps the past
//! takes as long as a program that does nothing but these reads and writes (`bench/RESULTS.md`, keep). Undo written before each block in
//! place would spare the journal: such a program then takes 1.2 times as long as one that keeps nothing, not 1.6 times. It was not
//! chosen: the destination would be between two states for as long as the line carries the delta, and not only while it is merged; a
//! delta that ends without its trailer, or fails its checksum, would have been written already; and going back gives up what had arrived,
//! where the journal is kept and the transfer resumed. To collect the delta in memory first, so that only its merge is undone, was tried
//! as a journal that is not made durable: it gained nothing over the journal that is.

pub(crate) mod aside;
pub(crate) mod commits;
pub(crate) mod old;
pub(crate) mod present;
pub(crate) mod saving;
pub(crate) mod views;

use std::io;

use delta::{Combined, Epoch, Header, Reader};
use device::{Folder, StateFile};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::error::{ReplicaError, Result, disk_error, io_error, is_full};
use crate::journal::{self, Input};
use crate::past::aside::Aside;
use crate::state::keep::Keep;
use crate::state::lineage::{self, Lineage};
use crate::state::version::of_version;

/// An undo delta that is being written.
pub(crate) const GROWING: &str = "undo";
/// What the names of logs begin with.
const LOG: &str = "undo-log-";
/// What is kept, and when the replica came to a state to which it was rewound.
const SETTINGS: &str = "past";
/// The most undo deltas that are combined at once: memory holds a frame of each.
const WIDEST: usize = 32;

/// What an undo delta leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UndoKind {
    /// An epoch of the source.
    Epoch,
    /// A moment after an epoch and before the next one, where a rewind left it, or the first delta of another branch: what the undo delta
    /// writes may differ from the epoch.
    Ahead,
    /// Neither: it is never offered, and only leads on.
    Via,
}

impl UndoKind {
    fn suffix(self) -> &'static str {
        match self {
            UndoKind::Epoch => "",
            UndoKind::Ahead => "-ahead",
            UndoKind::Via => "-via",
        }
    }

    /// True if what the delta writes joins the unsure set: it is marked as a batch.
    pub(crate) fn is_batch(self) -> bool {
        self != UndoKind::Epoch
    }
}

/// A step back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Undo {
    pub name: String,
    /// Where it is in its file, and how long; 0 for a file of its own.
    pub start: u64,
    pub bytes: u64,
    /// When the replica came to the state that this leads to, in seconds since 1970.
    pub at: u64,
    /// The state before and after.
    pub from: Uuid,
    pub to: Uuid,
    pub kind: UndoKind,
}

impl Undo {
    pub(crate) fn new(at: u64, from: Uuid, to: Uuid, kind: UndoKind) -> Undo {
        let name = format!("undo-{at:011}-{}-{}{}", from.simple(), to.simple(), kind.suffix());
        Undo { name, start: 0, bytes: 0, at, from, to, kind }
    }

    fn parse(name: &str) -> Option<Undo> {
        let mut parts = name.strip_prefix("undo-")?.split('-');
        let (at, from, to) = (parts.next()?, parts.next()?, parts.next()?);
        let (from, to) = (Uuid::try_parse(from).ok()?, Uuid::try_parse(to).ok()?);
        let kind = match parts.next() {
            None => UndoKind::Epoch,
            Some("ahead") => UndoKind::Ahead,
            Some(_) => UndoKind::Via,
        };
        let undo = Undo::new(at.parse().ok()?, from, to, kind);
        (undo.name == name).then_some(undo)
    }
}

/// An earlier state that a replica can be brought back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// When the replica came to it, in seconds since 1970: its content is no newer.
    pub at: u64,
    /// The epoch of the source.
    pub epoch: Epoch,
    /// It is after that epoch: batches of a mirror had brought the replica there when it was rewound.
    pub ahead: bool,
    /// Bytes of the disk.
    pub size: u64,
    /// It was copied from a live disk without a cut.
    pub fuzzy: bool,
    /// It is from before a verification found what differed, and may hold that.
    pub doubted: bool,
    /// Bytes on disk that keep it.
    pub bytes: u64,
    /// Names the state.
    pub state: Uuid,
}

/// What can be reached from the present state.
#[derive(Debug, Default)]
pub(crate) struct Past {
    /// Each leads on from the present state or from one before it in this list, and each to another state.
    pub undos: Vec<Undo>,
    /// Names of files that lead nowhere.
    pub rest: Vec<String>,
}

impl Past {
    pub(crate) fn load(folder: &dyn Folder, present: Uuid) -> io::Result<Past> {
        let names = folder.list()?;
        let mut left: Vec<Undo> = names.iter().filter_map(|name| Undo::parse(name)).collect();
        for log in names.iter().filter(|name| name.starts_with(LOG)) {
            left.extend(entries(folder, log)?);
        }
        let mut past = Past::default();
        let (mut reached, mut next) = (vec![present], 0);
        while let Some(state) = reached.get(next).copied() {
            next += 1;
            let (onward, others): (Vec<Undo>, Vec<Undo>) = left.into_iter().partition(|u| u.from == state);
            left = others;
            for undo in onward {
                if reached.contains(&undo.to) {
                    past.rest.push(undo.name);
                } else {
                    reached.push(undo.to);
                    past.undos.push(undo);
                }
            }
        }
        // Logs are closed by those who write them.
        past.rest.extend(left.into_iter().map(|undo| undo.name));
        past.rest.retain(|name| !name.starts_with(LOG));
        Ok(past)
    }

    /// The undo deltas that lead to a state, in order.
    pub(crate) fn path(&self, to: Uuid) -> Vec<&Undo> {
        let mut path: Vec<&Undo> = Vec::new();
        let mut state = to;
        while let Some(undo) = self.undos.iter().find(|undo| undo.to == state) {
            path.push(undo);
            state = undo.from;
        }
        path.reverse();
        path
    }

    fn leads_on(&self, state: Uuid) -> impl Iterator<Item = &Undo> {
        self.undos.iter().filter(move |undo| undo.from == state)
    }

    /// The oldest state behind which there is no other.
    pub(crate) fn oldest(&self) -> Option<&Undo> {
        let last = |undo: &&Undo| undo.bytes == 0 && self.leads_on(undo.to).next().is_none();
        self.undos.iter().rev().filter(last).min_by_key(|undo| undo.at)
    }

    pub(crate) fn forget(&mut self, name: &str) {
        self.undos.retain(|undo| undo.name != name);
    }

    /// The states on the way back, the first that is reached last: their order, whatever the clock said.
    fn in_order(&self) -> Vec<&Undo> {
        let onward = |state| {
            let mut onward: Vec<&Undo> = self.leads_on(state).collect();
            onward.sort_by_key(|undo| undo.at);
            onward
        };
        let mut left = self.undos.first().map_or(Vec::new(), |first| onward(first.from));
        let mut order = Vec::new();
        while let Some(undo) = left.pop() {
            left.extend(onward(undo.to));
            order.push(undo);
        }
        order.reverse();
        order
    }

    /// What is to be thinned out: states that are not kept, whose undo deltas are to be removed; and the first run of those
    /// through which others are reached, whose undo deltas are to become one.
    fn thin(&self, keep: &Keep, now: u64, common: &[(u64, Uuid)]) -> (Vec<String>, Vec<Undo>) {
        let mut order = self.in_order();
        order.retain(|undo| undo.kind != UndoKind::Via);
        let own_times: Vec<u64> = order.iter().map(|undo| undo.at).collect();
        let common_times: Vec<u64> = common.iter().map(|(time, _)| *time).collect();
        let (own, by_all) = (kept(keep, &own_times, now), kept(keep, &common_times, now));
        let is_kept = |undo: &Undo| match common.iter().any(|(_, state)| *state == undo.to) {
            true => common.iter().zip(&by_all).any(|((_, state), kept)| *kept && *state == undo.to),
            false => order.iter().zip(&own).any(|(other, kept)| *kept && other.to == undo.to),
        };
        let mut thinned = Past { undos: self.undos.clone(), rest: Vec::new() };
        let mut removed = Vec::new();
        while let Some(last) =
            thinned.undos.iter().find(|u| thinned.leads_on(u.to).next().is_none() && !is_kept(u)).cloned()
        {
            thinned.forget(&last.name);
            removed.push(last.name);
        }
        let single = |state| thinned.leads_on(state).count() == 1;
        let first = thinned.undos.iter().find(|u| !is_kept(u) && single(u.to));
        let mut run: Vec<Undo> = first.into_iter().cloned().collect();
        while let Some(last) = run.last().filter(|u| run.len() < WIDEST && !is_kept(u) && single(u.to)) {
            let Some(next) = thinned.leads_on(last.to).next().cloned() else { break };
            run.push(next);
        }
        (removed, run)
    }
}

/// Which states are kept, by their times, in the order of the way back. A clock that was wrong for a while, and a rewind, leave times that do not
/// rise along it: what is kept by the times as they are, by those that are no later than what follows, or by those that are no earlier than what
/// went before, is kept. Times that are still to come count from what follows, with what is between them.
fn kept(keep: &Keep, order: &[u64], now: u64) -> Vec<bool> {
    let mut flags = vec![false; order.len()];
    // The last of them are those that come last on the way.
    let by_time = Keep { last: 0, ..keep.clone() };
    let mut keep_by = |(keep, places): (&Keep, Vec<(u64, usize)>)| {
        let times: Vec<u64> = places.iter().map(|(time, _)| *time).chain([now]).collect();
        for ((_, place), kept) in places.iter().zip(keep.kept(&times)) {
            flags[*place] |= kept;
        }
    };
    let all = || order.iter().copied().zip(0..);
    let past = || all().filter(|(time, _)| *time <= now);
    let mut as_they_are: Vec<_> = past().collect();
    as_they_are.sort_unstable();
    let (mut latest, mut ahead) = (now, 0);
    let mut down: Vec<_> = all().collect();
    down.iter_mut().rev().for_each(|(time, _)| {
        // Those that were ahead together keep the time between them.
        ahead = time.checked_sub(latest).filter(|by| *by > 0).map_or(0, |by| by.max(ahead));
        latest = latest.min(time.saturating_sub(ahead));
        *time = latest;
    });
    let mut earliest = 0;
    let mut up: Vec<_> = past().collect();
    up.iter_mut().for_each(|(time, _)| {
        earliest = earliest.max(*time);
        *time = earliest;
    });
    [(keep, down), (&by_time, as_they_are), (&by_time, up)].into_iter().for_each(&mut keep_by);
    flags
}

/// What the settings file says.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct PastSettings {
    pub version: u32,
    pub keep: Keep,
    /// A state to which the replica was rewound, and when it had come to it first.
    pub rewound: Option<(Uuid, u64)>,
    /// When what was kept last was given up, in seconds since 1970, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_up: Option<GivenUpPast>,
    /// Moments were dropped to make room, of which nobody was told yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dropped: bool,
    /// The time of the newest moment that was dropped for want of room, in seconds since 1970, as long as this is what is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short: Option<u64>,
}

/// A past that could not be kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenUpPast {
    /// When it was given up, in seconds since 1970.
    pub at: u64,
    /// Why, as the part of a sentence after "because".
    pub why: String,
}

impl PastSettings {
    /// The settings of a folder; `None` if nothing is kept.
    ///
    /// # Errors
    /// Also for what is damaged, or of a newer version: a commit that took it for nothing would drop the past.
    pub(crate) fn load(folder: &dyn Folder) -> Result<Option<PastSettings>> {
        let path = || folder.path().join(SETTINGS);
        let mut bytes = Vec::new();
        let read = folder.open(SETTINGS, false).and_then(|file| {
            bytes.resize(file.len()?.min(1 << 16) as usize, 0);
            file.read_at(0, &mut bytes)
        });
        match read {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|e| io_error("read", &path())(e))?,
        }
        let way_out = "it says what is kept of the past of the replica: remove it, and pass to the next sync what is to be kept, as in \
                       \"dsync sync --keep 24h\"";
        let damaged = |error: serde_json::Error| {
            let why = error.to_string();
            ReplicaError::Damaged { path: path(), why, way_out: way_out.into() }
        };
        let settings: PastSettings = of_version(&bytes, 1, &path())?.map_err(damaged)?;
        Ok(Some(settings).filter(|settings| !settings.keep.is_nothing()))
    }

    pub(crate) fn new(keep: Keep) -> PastSettings {
        PastSettings { version: 1, keep, ..PastSettings::default() }
    }

    pub(crate) fn store(&self, folder: &dyn Folder) -> Result<()> {
        let path = folder.path().join(SETTINGS);
        // Who makes room notes it there alone.
        let written = PastSettings::load(folder).ok().flatten().filter(|written| written.keep == self.keep);
        let short = self.short.max(written.and_then(|written| written.short));
        let settings = PastSettings { short, ..self.clone() };
        let bytes = serde_json::to_vec(&settings).map_err(|e| io_error("write", &path)(e.into()))?;
        let state = "what the replica holds is unchanged";
        device::replace(folder, SETTINGS, &bytes).map_err(disk_error("write", &path, state))
    }

    /// Keeps nothing from now on.
    pub(crate) fn remove(folder: &dyn Folder) -> Result<()> {
        let removed = folder.remove(SETTINGS).and_then(|()| folder.sync());
        removed.map_err(io_error("remove", &folder.path().join(SETTINGS)))
    }
}

/// When a replica came to its present state, in seconds since 1970; `None` if that is not known.
pub(crate) fn since(folder: &dyn Folder, lineage: &Lineage, settings: Option<&PastSettings>) -> Option<u64> {
    let rewound = settings.and_then(|settings| settings.rewound);
    if let Some((_, at)) = rewound.filter(|(state, _)| *state == lineage.nonce) {
        return Some(at);
    }
    if lineage.at.is_some() {
        return lineage.at;
    }
    // Of a former source, which no commit has made what it is.
    let written = lineage.stamp.as_ref().and_then(|stamp| stamp.written);
    let written = written.and_then(|written| u64::try_from(written).ok());
    Some(written.or_else(|| folder.modified(lineage::NAME))? / 1_000_000_000)
}

/// Reads undo deltas as one stream each.
fn open(folder: &dyn Folder, undos: &[Undo]) -> io::Result<Vec<Input<Box<dyn StateFile>>>> {
    undos.iter().map(|undo| Input::new(folder.open(&undo.name, false)?, undo.start)).collect()
}

/// The delta that several undo deltas make, one after the other. Of more than [`WIDEST`], intermediate ones are written.
pub(crate) fn combine(
    folder: &dyn Folder,
    mut undos: Vec<Undo>,
) -> Result<Combined<Input<Box<dyn StateFile>>>> {
    while undos.len() > WIDEST {
        let groups: Vec<Vec<Undo>> = undos.chunks(WIDEST).map(<[Undo]>::to_vec).collect();
        undos = groups.into_iter().map(|group| fold(folder, &group)).collect::<Result<_>>()?;
    }
    let inputs = open(folder, &undos).map_err(io_error("read the undo deltas in", folder.path()))?;
    Combined::new(inputs, None).map_err(|e| damaged(folder, &undos, &e))
}

/// The error of undo deltas that cannot be combined.
pub(crate) fn damaged(folder: &dyn Folder, undos: &[Undo], error: &delta::Error) -> ReplicaError {
    let (number, error) = match error {
        delta::Error::Of { number, error } => (*number, &**error),
        error => (1, error),
    };
    let name = number.checked_sub(1).and_then(|at| undos.get(at)).map_or(GROWING, |undo| &undo.name);
    ReplicaError::Damaged {
        path: folder.path().join(name),
        why: error.to_string(),
        way_out: "no moment behind it can be reached: choose a later one; the replica is unchanged".into(),
    }
}

/// Writes what adjacent undo deltas make as one, durably and under its name.
fn fold(folder: &dyn Folder, undos: &[Undo]) -> Result<Undo> {
    let ([first, .., last] | [first @ last]) = undos else {
        return Err(damaged(folder, undos, &delta::Error::NoTrailer { units: 0 }));
    };
    let folded = Undo::new(last.at, first.from, last.to, last.kind);
    if undos.len() == 1 && first.bytes == 0 {
        return Ok(folded);
    }
    let path = folder.path().join(GROWING);
    let failed = |e| io_error("write", &path)(e);
    let mut combined = combine(folder, undos.to_vec())?;
    let mut file = Aside::begin(folder, GROWING).map_err(failed)?;
    while let Some(unit) = combined.next().map_err(|e| damaged(folder, undos, &e))? {
        file.unit(&unit).map_err(failed)?;
    }
    file.name(folder, GROWING, &folded.name).map_err(failed)?;
    Ok(folded)
}

/// The name of the log of a mirror's batches that begins at a state.
pub(crate) fn log_name(at: u64, state: Uuid) -> String {
    format!("{LOG}{at:011}-{}", state.simple())
}

/// The state at which a log begins.
pub(crate) fn began_at(name: &str) -> Option<Uuid> {
    Uuid::try_parse(name.strip_prefix(LOG)?.split_once('-')?.1).ok()
}

/// The names of logs: one, or none.
pub(crate) fn logs(folder: &dyn Folder) -> io::Result<Vec<String>> {
    Ok(folder.list()?.into_iter().filter(|name| name.starts_with(LOG)).collect())
}

/// The undo deltas of a log, in the order in which they came. What is torn ends it.
pub(crate) fn entries(folder: &dyn Folder, name: &str) -> io::Result<Vec<Undo>> {
    let at = name.strip_prefix(LOG).and_then(|name| name.split_once('-')?.0.parse().ok()).unwrap_or(0);
    let file = folder.open(name, false)?;
    let mut entries: Vec<Undo> = Vec::new();
    loop {
        let start = entries.last().map_or(0, |last| last.start + last.bytes);
        let contents = journal::measure_at(&*file, start)?;
        let header = contents.segments.first().filter(|_| contents.whole).map(|segment| &segment.header);
        let Some((header, from)) = header.and_then(|header| Some((header, header.binds?))) else {
            return Ok(entries);
        };
        let (name, bytes, to) = (name.to_owned(), contents.bytes, header.stream);
        let kind = if header.batch { UndoKind::Via } else { UndoKind::Epoch };
        entries.push(Undo { name, start, bytes, at, from, to, kind });
    }
}

/// Makes one undo delta of what a log holds, durably.
pub(crate) fn fold_logs(folder: &dyn Folder, present: Uuid) -> Result<()> {
    let past = Past::load(folder, present).map_err(io_error("look into", folder.path()))?;
    let entries: Vec<Undo> = past.undos.into_iter().filter(|undo| undo.bytes > 0).collect();
    if entries.is_empty() { Ok(()) } else { fold(folder, &entries).map(drop) }
}

/// How the past is aged.
pub(crate) struct Ageing<'a> {
    pub folder: &'a dyn Folder,
    pub keep: &'a Keep,
    /// The present state, and the time by now in seconds since 1970.
    pub present: Uuid,
    pub now: u64,
    /// States at common commits of its group, in order, and when those were: which of them are kept is one answer for all replicas of
    /// the group.
    pub common: Vec<(u64, Uuid)>,
}

impl Ageing<'_> {
    /// Removes what leads nowhere, what is too old or too large, and folds one run of what the grid thins out. Returns what lack of room
    /// has cost.
    pub(crate) fn run(&self) -> Result<Option<Squeezed>> {
        let Ageing { folder, keep, .. } = *self;
        let failed = |e| io_error("age the past in", folder.path())(e);
        let mut past = Past::load(folder, self.present).map_err(failed)?;
        let (removed, run) = past.thin(keep, self.now, &self.common);
        let unfinished = [GROWING.into(), device::reserved(SETTINGS)];
        for name in past.rest.iter().chain(&removed).chain(&unfinished) {
            folder.remove(name).map_err(failed)?;
        }
        removed.iter().for_each(|name| past.forget(name));
        if run.len() > 1 {
            match fold(folder, &run) {
                Ok(_) => run.iter().try_for_each(|undo| folder.remove(&undo.name)).map_err(failed)?,
                // It stays finer than it needs to be.
                Err(ReplicaError::Io { error, .. }) if is_full(&error) => {
                    folder.remove(GROWING).map_err(failed)?;
                }
                Err(e) => return Err(e),
            }
        }
        self.bound().map_err(failed)
    }

    /// Removes the oldest until the rest takes no more than it may.
    fn bound(&self) -> io::Result<Option<Squeezed>> {
        let mut past = Past::load(self.folder, self.present)?;
        let len = |undo: &Undo| self.folder.open(&undo.name, false).and_then(|file| file.len());
        let mut bytes = past.undos.iter().map(len).sum::<io::Result<u64>>()?;
        let moments = |past: &Past| past.undos.iter().filter(|undo| undo.kind != UndoKind::Via).count();
        let (before, mut short) = (moments(&past), None);
        while let Some(oldest) = past.oldest().cloned() {
            let most = self.keep.bytes.or_else(|| self.folder.free()).unwrap_or(u64::MAX);
            if bytes <= most {
                break;
            }
            bytes -= len(&oldest)?;
            self.folder.remove(&oldest.name)?;
            past.forget(&oldest.name);
            short = short.max(Some(oldest.at));
        }
        let left = moments(&past);
        // What --keep-bytes bounds is as its user has asked for.
        if self.keep.bytes.is_none() {
            // Where there is no room for that, the sync has told it.
            let _ = note_dropped(self.folder, short, false);
        }
        Ok(Some(Squeezed { dropped: before - left, left })
            .filter(|it| it.dropped > 0 && self.keep.bytes.is_none()))
    }
}

/// Moments that were to be kept, and for which there was no room.
pub(crate) struct Squeezed {
    pub dropped: usize,
    /// How many are kept still.
    pub left: usize,
}

/// Removes the oldest undo delta, to make room. False if there is none.
pub(crate) fn drop_oldest(folder: &dyn Folder, present: Uuid) -> io::Result<bool> {
    let past = Past::load(folder, present)?;
    let (name, short) = match (past.rest.first(), past.oldest()) {
        (Some(name), _) => (name, None),
        (None, Some(oldest)) => (&oldest.name, Some(oldest.at).filter(|_| oldest.kind != UndoKind::Via)),
        (None, None) => return Ok(false),
    };
    // First, so that whoever is interrupted leaves it to the next to tell; where there is no room for that yet, then.
    let noted = note_dropped(folder, short, true);
    folder.remove(name)?;
    folder.sync()?;
    noted.or_else(|_| note_dropped(folder, short, true)).ok();
    Ok(true)
}

/// Notes the newest moment that was dropped for want of room, and that this is to be told.
fn note_dropped(folder: &dyn Folder, short: Option<u64>, is_told: bool) -> Result<()> {
    let Some(before) = PastSettings::load(folder)? else { return Ok(()) };
    let (dropped, short) = (before.dropped || is_told, before.short.max(short));
    if (dropped, short) == (before.dropped, before.short) {
        return Ok(());
    }
    PastSettings { dropped, short, ..before }.store(folder)
}

/// The time of a moment that was dropped for want of room, and that would be kept otherwise.
pub(crate) fn lacks(folder: &dyn Folder, present: Uuid, settings: &PastSettings, now: u64) -> Option<u64> {
    let short = settings.short?;
    let past = Past::load(folder, present).ok()?;
    let moments = past.undos.iter().filter(|undo| undo.kind != UndoKind::Via).map(|undo| undo.at);
    let mut times: Vec<u64> = moments.chain([short, now]).collect();
    times.sort_unstable();
    let at = times.iter().position(|time| *time == short)?;
    settings.keep.kept(&times).get(at).is_some_and(|is_kept| *is_kept).then_some(short)
}

/// The most bytes that may be found in a folder at the cost of readers of the state `present`, and of the past if that `gives` way.
pub(crate) fn findable(folder: &dyn Folder, present: Uuid, gives: bool) -> u64 {
    let Some(readers) = views::may_give(folder, present) else { return u64::MAX };
    let past = if gives { bytes(folder).unwrap_or(u64::MAX) } else { 0 };
    readers.saturating_add(past)
}

/// Bytes of the files that keep the past.
pub(crate) fn bytes(folder: &dyn Folder) -> io::Result<u64> {
    let names = folder.list()?.into_iter().filter(|name| Undo::parse(name).is_some());
    names.map(|name| folder.open(&name, false)?.len()).sum()
}

/// True if no moment has a file that leads to it.
pub(crate) fn is_empty(folder: &dyn Folder) -> bool {
    let led_to = |name: &String| Undo::parse(name).is_some_and(|undo| undo.kind != UndoKind::Via);
    folder.list().is_ok_and(|names| !names.iter().any(|name| led_to(name) || name.starts_with(LOG)))
}

/// The moments that can be reached from the present state, the latest first. What is damaged is left out, with all behind it.
pub(crate) fn moments(folder: &dyn Folder, present: Uuid) -> io::Result<Vec<Moment>> {
    let past = Past::load(folder, present)?;
    let mut reached = vec![present];
    let mut moments = Vec::new();
    for undo in &past.undos {
        let Some((header, bytes)) = header_of(folder, undo) else { continue };
        if !reached.contains(&undo.from) {
            continue;
        }
        reached.push(undo.to);
        let Some(epoch) = header.to().copied().filter(|_| undo.kind != UndoKind::Via) else { continue };
        let (size, fuzzy, ahead) = (header.size_after, header.fuzzy, undo.kind == UndoKind::Ahead);
        moments.push(Moment {
            at: undo.at,
            epoch,
            ahead,
            size,
            fuzzy,
            doubted: false,
            bytes,
            state: undo.to,
        });
    }
    moments.sort_by_key(|moment| std::cmp::Reverse((moment.at, moment.ahead)));
    Ok(moments)
}

/// The header of an undo delta and its length, if it is what its name says.
pub(crate) fn header_of(folder: &dyn Folder, undo: &Undo) -> Option<(Header, u64)> {
    let file = folder.open(&undo.name, false).ok()?;
    let bytes = file.len().ok()?;
    let mut reader = Reader::new(Input::new(file, undo.start).ok()?);
    let header = reader.header().ok()?.clone();
    let names =
        (header.binds, header.stream, header.batch) == (Some(undo.from), undo.to, undo.kind.is_batch());
    names.then_some((header, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The states that are kept, of these undo deltas: from one state to another, and when the replica came to that first.
    fn kept(undos: &[(u128, u128, u64)], keep: &str, last: u64, now: u64) -> Vec<u128> {
        let state = Uuid::from_u128;
        let all =
            undos.iter().map(|(from, to, at)| Undo::new(*at, state(*from), state(*to), UndoKind::Epoch));
        let past = Past { undos: all.collect(), rest: Vec::new() };
        let keep = Keep { last, ..keep.parse().unwrap() };
        let (removed, _) = past.thin(&keep, now, &[]);
        let kept = past.undos.iter().filter(|undo| !removed.contains(&undo.name));
        kept.map(|undo| undo.to.as_u128()).collect()
    }

    #[test]
    fn a_state_that_was_left_last_is_the_latest() {
        let straight = [(4, 3, 30), (3, 2, 20), (2, 1, 10)];
        assert_eq!(kept(&straight, "none", 2, 40), [3, 2]);
        assert_eq!(kept(&straight, "15s", 0, 40), [3, 2]);
        // From 5 it was brought back to 2, and has gone on from there: 2 was left last, and 5 has its time.
        let back = [(6, 2, 20), (2, 5, 50), (2, 1, 10), (5, 4, 40), (4, 3, 30)];
        assert_eq!(kept(&back, "none", 1, 70), [2]);
        assert_eq!(kept(&back, "none", 3, 70), [2, 5, 4]);
        assert_eq!(kept(&back, "10s", 0, 70), [2, 5]);
        assert_eq!(kept(&back, "25s", 0, 70), [2, 5, 4]);
        // It was brought back to 2, and forth again.
        let forth = [(7, 5, 50), (5, 4, 40), (5, 2, 20), (4, 3, 30), (2, 1, 10)];
        assert_eq!(kept(&forth, "1h/10s", 0, 70), [5, 4, 2, 3, 1]);
    }

    #[test]
    fn a_clock_that_was_wrong_drops_nothing_new() {
        let undos = [(9, 8, 12), (8, 7, 11), (7, 6, 1001), (6, 5, 1000)];
        assert_eq!(kept(&undos, "none", 2, 13), [8, 7]);
        assert_eq!(kept(&undos, "1h/2s", 0, 13), [8, 7]);
        assert_eq!(kept(&undos, "20s", 0, 40), [8]);
        // It was set back for one commit, of which the time is 10.
        let back = [(9, 8, 1030), (8, 7, 10), (7, 6, 1020), (6, 5, 1010)];
        assert_eq!(kept(&back, "1h", 0, 1040), [8, 7, 6, 5]);
        assert_eq!(kept(&back, "1h/5s", 0, 1040), [8, 7, 6, 5]);
        assert_eq!(kept(&back, "15s", 0, 1040), [8, 7, 6]);
        // It was ahead for one, of which the time is 1028.
        let ahead = [(9, 8, 1025), (8, 7, 1023), (7, 6, 1028), (6, 5, 1010)];
        assert_eq!(kept(&ahead, "1h/5s", 0, 1040), [8, 7, 6, 5]);
        // It was ahead by two hours until now, for seven of them.
        let rtc: Vec<_> = (1..=7).map(|n: u128| (n + 1, n, 7200 + 600 * n as u64)).rev().collect();
        assert_eq!(kept(&rtc, "24h/10m", 0, 4300), [7, 6, 5, 4, 3, 2, 1]);
        // Nothing is kept without end.
        let later: Vec<_> = [(11, 10, 9000), (10, 9, 5000)].into_iter().chain(ahead).collect();
        assert_eq!(kept(&later, "1h", 0, 10_000), [10, 9]);
        assert_eq!(kept(&[(9, 8, 1025), (8, 7, 1 << 40)], "1h", 0, 1_000_000), [8]);
    }
}
