//! Making the undo delta of a commit: what the commit replaces is read and kept, durably, before the journal is sealed that lets
//! it be overwritten. What is sealed without one never gets one: the destination may be half merged then.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use delta::{Encoder, Epoch, Frame, Header, Method, Record};
use uuid::Uuid;

use crate::commit::holes::Holes;
use crate::error::{ReplicaError, Result, disk_error, io_error, is_full};
use crate::journal::unsure::UnsureSet;
use crate::journal::{self, Contents, Relief, Relieved, Target};
use crate::past::aside::Aside;
use crate::past::commits::PastCommits;
use crate::past::old::Old;
use crate::past::views;
use crate::past::{self, Ageing, GROWING, Past, PastSettings, Squeezed, Undo, UndoKind};
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::intent::Intent;
use crate::state::keep::Keep;
use crate::state::lineage::{Lineage, State, Toward, Unsure};

/// What a delta replaces of a replica.
pub(crate) struct Touched {
    set: UnsureSet,
    /// Bytes of the replica before.
    size: u64,
    /// What a repair replaces was damaged, and is not kept: the way back leads past it.
    mends: bool,
    /// What it was before is not known to be a moment.
    via: bool,
}

impl Touched {
    /// Nothing yet, of a replica of this lineage.
    pub(crate) fn new(lineage: &Lineage) -> Touched {
        let mut set = UnsureSet::new();
        set.reach(lineage.size, lineage.block_size.into());
        Touched { set, size: lineage.size, mends: false, via: false }
    }

    /// Takes a delta's header. From `known` on, what it does not name becomes zero.
    pub(crate) fn header(&mut self, header: &Header, known: u64) {
        self.mends = header.partial;
        self.via |= header.partial;
        let rest = known.min(header.size_after)..self.size;
        if !rest.is_empty() {
            self.set.insert(rest);
        }
    }

    /// Takes a frame's records.
    pub(crate) fn records(&mut self, records: &[Record]) {
        for record in records.iter().filter(|_| !self.mends) {
            if record.offset() < self.size {
                self.set.insert(record.offset()..record.end().min(self.size));
            }
        }
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.set.ranges().map(|range| range.start..range.end.min(self.size))
    }
}

impl Target for Touched {
    fn rewind(&mut self, header: &Header, known: u64) -> io::Result<()> {
        self.header(header, known);
        Ok(())
    }

    fn frame(&mut self, frame: Frame) -> io::Result<()> {
        self.records(&frame.records);
        Ok(())
    }
}

/// What is to be kept.
impl Replica {
    /// Takes over what applies from now on to a complete replica to which nothing has to be sent: what is to be kept, and that it leaves a group
    /// in which its source is no more.
    ///
    /// # Errors
    /// If it cannot be written down.
    pub fn apply_options(&mut self) -> Result<()> {
        let (keeps, leaves) = (self.options().keep.is_some(), self.leaves_group());
        if !(keeps || leaves) || !self.is_kept() || self.lineage().role.promoted.is_some() {
            return Ok(());
        }
        self.sound()?;
        if leaves {
            self.admit_alone()?;
        }
        self.set_keep()
    }

    /// Takes over from the options what is to be kept of the past, for a replica that receives something.
    pub(crate) fn set_keep(&mut self) -> Result<()> {
        self.close_logs()?;
        let Some(keep) = self.options().keep.clone() else { return Ok(()) };
        let before = self.settings().map(|settings| &settings.keep);
        if before == Some(&keep) || before.is_none() && keep.is_nothing() {
            return Ok(());
        }
        if keep.is_nothing() {
            PastSettings::remove(self.state())?;
            self.set_settings(None);
            return self.age().map(drop);
        }
        let settings = match self.settings() {
            Some(before) => PastSettings { keep, given_up: None, short: None, ..before.clone() },
            None => PastSettings::new(keep),
        };
        settings.store(self.state())?;
        self.set_settings(Some(settings));
        Ok(())
    }

    /// True if what a delta replaces is kept, by what is asked for now.
    pub fn keeps_past(&self) -> bool {
        self.options().keep.as_ref().map_or(self.settings().is_some(), |keep| !keep.is_nothing())
    }

    /// The shortest period, in seconds, of which a moment is kept from the next commit on; `None` if there is none.
    pub fn keeps_every(&self) -> Option<u64> {
        let kept = self.settings().map(|settings| &settings.keep);
        self.options().keep.as_ref().or(kept).and_then(Keep::every)
    }

    /// Begins to note what a delta replaces, if that is to be kept.
    pub(crate) fn touched_by(&self) -> Option<Touched> {
        if self.settings().is_none() && !self.rewinds() || self.no_way_back().is_some() {
            return None;
        }
        Some(Touched::new(self.lineage()))
    }

    /// False if the delta brings a replica that others changed to another moment: what it replaces may be damage, which must not come back.
    pub(crate) fn keeps_what_is_replaced(&self, header: &Header) -> bool {
        header.partial || !self.options().doubt
    }

    /// Notes what the delta in a journal replaces, if that is to be kept.
    pub(crate) fn touched_of(&self, name: &str, contents: &Contents) -> Result<Option<Touched>> {
        let Some(mut touched) = self.touched_by() else { return Ok(None) };
        let failed = io_error("read", self.path());
        journal::replay(self.state(), name, contents, &mut touched, &mut self.positions(), failed)?;
        Ok(Some(touched))
    }

    /// Why the present state is none that an undo delta could lead back to.
    fn no_way_back(&self) -> Option<&'static str> {
        let lineage = self.lineage();
        match () {
            () if lineage.epoch.is_none() => Some("there was no complete replica"),
            () if lineage.step.is_some() => Some("a commit had been cut off"),
            () if self.changed().is_some() || lineage.unsure == Unsure::Everything => {
                Some("another program had written to it")
            }
            () => None,
        }
    }

    /// Seconds since 1970.
    pub(crate) fn now(&self) -> u64 {
        self.destination().clock().now() / 1_000_000_000
    }
}

/// Keeping it.
impl Replica {
    /// Keeps what the commit of `toward` replaces, before that may begin. Where this fails, the commit goes on without: its
    /// user is told.
    pub(crate) fn keep_past(&mut self, touched: Option<Touched>, toward: &Toward) -> Result<()> {
        let Some(mut touched) = touched else {
            let lost = self.settings().is_some() && self.has_past();
            let repaired = self.options().doubt.then_some("what was repaired may be in earlier moments");
            if let Some(why) = self.no_way_back().or(repaired).filter(|_| lost) {
                self.give_up_past(why);
            }
            return Ok(());
        };
        let at = past::since(self.state(), self.lineage(), self.settings()).unwrap_or_else(|| self.now());
        let kind = if touched.via { UndoKind::Via } else { self.kind(toward) };
        let undo = Undo::new(at, toward.stream, self.lineage().nonce, kind);
        if undo.kind == UndoKind::Ahead {
            // On the way forth, all of it is to join the unsure set, also what a comparison found equal.
            touched.set.join(&self.unsure()?);
        }
        let failed = io_error("look into", self.folder());
        let there = Past::load(self.state(), toward.stream).map_err(failed)?;
        if there.undos.iter().any(|other| other.to == undo.to) {
            // Of a commit that was interrupted before it was sealed, or a way back exists as the way forth was an undo delta.
            return Ok(());
        }
        while let Err(error) = self.write_undo(&touched, toward, &undo) {
            let _ = self.state().remove(GROWING);
            if is_full(&error) && self.past_gives_way() {
                continue;
            }
            if self.rewinds() {
                // It could not be taken back.
                let state = "the replica is unchanged";
                return Err(disk_error("write to", self.folder(), state)(error));
            }
            self.give_up_past(&format!("what was to be replaced could not be kept: {error}"));
            return self.untouched();
        }
        // Reading it took its time.
        self.untouched()
    }

    /// Ends what is kept for readers, else drops the oldest moment, to make room. False if there is neither.
    pub(crate) fn past_gives_way(&mut self) -> bool {
        self.past_gives_way_from(self.lineage().nonce)
    }

    /// Makes room as [`Replica::past_gives_way`] does, where undo deltas lead back from `state`, as those to the present one are not written yet.
    pub(crate) fn past_gives_way_from(&mut self, state: Uuid) -> bool {
        if self.readers_give_way() {
            return true;
        }
        let gives = self.settings().is_some() && !self.rewinds();
        let dropped = gives && past::drop_oldest(self.state(), state).unwrap_or(false);
        if dropped {
            self.warn_of_room();
        }
        dropped
    }

    pub(crate) fn warn_of_room(&mut self) {
        self.warn("the oldest moments of its past were dropped to make room".into());
        self.note_dropped(true);
    }

    /// Makes room for a journal that grows as [`Replica::past_gives_way`] does, and notes in `gave` that moments were dropped. Nothing is given up
    /// before it is known that it helps, where that can be known.
    pub(crate) fn relief(&self, gave: Arc<AtomicBool>) -> Option<Relief> {
        let (folder, present) = (self.shared_state(), self.lineage().nonce);
        let gives = self.settings().is_some() && !self.rewinds();
        let (expected, counts) = (self.expected(), self.counts());
        Some(Box::new(move |written| {
            let findable = past::findable(&*folder, present, gives);
            if findable == 0 || findable < expected.saturating_sub(written) {
                return Relieved::Not;
            }
            if counts {
                return Relieved::Counts(findable);
            }
            if views::give_way(&*folder) {
                return Relieved::Made;
            }
            let dropped = gives && past::drop_oldest(&*folder, present).unwrap_or(false);
            gave.fetch_or(dropped, SeqCst);
            dropped.into()
        }))
    }

    /// Makes room as [`Replica::make_room`] does, at the cost of the past.
    pub(crate) fn make_room_of_past(&mut self, holes: Option<Holes>, state: &'static str) -> Result<()> {
        loop {
            match self.make_room(holes.clone(), false, state) {
                // Rounded up where it was told.
                Err(ReplicaError::Full { missing, .. })
                    if self.may_find_here(missing.unwrap_or(0).saturating_sub(2 << 20), 0)
                        && self.past_gives_way() => {}
                made => return made,
            }
        }
    }

    fn write_undo(&self, touched: &Touched, toward: &Toward, undo: &Undo) -> io::Result<()> {
        let lineage = self.lineage();
        let epoch = lineage.epoch.ok_or(io::ErrorKind::InvalidInput)?;
        let sizes = (toward.size, lineage.size);
        let mut header = Header::new(toward.source, Method::Tracked, vec![epoch], sizes, lineage.block_size);
        (header.stream, header.binds) = (undo.to, Some(undo.from));
        header.fuzzy = lineage.state == State::Fuzzy;
        header.batch = undo.kind.is_batch();
        header.lives.clone_from(&lineage.role.lives);
        let (mut encoder, unit) = Encoder::new(&header, None).map_err(io::Error::other)?;
        let mut file = Aside::begin(self.state(), GROWING)?;
        file.unit(&unit)?;
        let disk = self.destination().open(Name::Final).map_err(io::Error::other)?;
        Old::each(disk, touched.ranges(), |frame| {
            file.unit(&encoder.frame(frame).map_err(io::Error::other)?)
        })?;
        file.unit(&encoder.trailer())?;
        file.name(self.state(), GROWING, &undo.name)
    }

    /// What a way back to the present state leads to.
    fn kind(&self, toward: &Toward) -> UndoKind {
        let lineage = self.lineage();
        match () {
            // It may be the only copy of what was written since the epoch.
            () if (self.rewinds() || !lineage.is_followed_by(toward)) && lineage.is_ahead() => {
                UndoKind::Ahead
            }
            () if lineage.state == State::Incomplete || !lineage.unsure.is_nothing() => UndoKind::Via,
            () => UndoKind::Epoch,
        }
    }

    /// A repair has given another name to the state to which it was rewound.
    pub(crate) fn stays_rewound(&mut self, before: Uuid, now: Uuid) {
        let settings =
            self.settings().filter(|settings| settings.rewound.is_some_and(|(to, _)| to == before));
        let Some(settings) = settings else { return };
        let rewound = settings.rewound.map(|(_, at)| (now, at));
        let settings = PastSettings { rewound, ..settings.clone() };
        // Where it cannot be written, the past ages as after a sync.
        let _ = settings.store(self.state());
        self.set_settings(Some(settings));
    }

    fn has_past(&self) -> bool {
        self.has_past_of(self.lineage().nonce)
    }

    /// True if undo deltas lead back from a state.
    pub(crate) fn has_past_of(&self, state: Uuid) -> bool {
        Past::load(self.state(), state).is_ok_and(|past| !past.undos.is_empty())
    }

    /// Ages the past after a commit, which does not fail if this does. Where that was a rewind, all stays until the next.
    pub(crate) fn age_past(&mut self) {
        let Some(rewound) = self.settings().map(|settings| settings.rewound) else { return };
        self.record_given_up();
        let rewound = rewound.is_some_and(|(state, _)| state == self.lineage().nonce);
        let aged = self.close_logs().and_then(|()| if rewound { Ok(None) } else { self.age() });
        match aged {
            Ok(None) => {}
            Ok(Some(squeezed)) => self.warn_of(&squeezed),
            Err(error) => self.warn(error.to_string()),
        }
    }

    /// Fewer moments are kept than were asked for.
    fn warn_of(&mut self, squeezed: &Squeezed) {
        let Some(keep) = self.settings().map(|settings| settings.keep.to_string()) else { return };
        let plural = if squeezed.dropped == 1 { "moment was" } else { "moments were" };
        self.warn(format!(
            "{} {plural} dropped and {} are left of what is to be kept ({keep}): together they may take no more than is free in {}; free some \
             space there, or keep less",
            squeezed.dropped,
            squeezed.left,
            self.folder().display()
        ));
    }

    fn age(&self) -> Result<Option<Squeezed>> {
        let mut keep = self.settings().map_or_else(Keep::default, |settings| settings.keep.clone());
        let (present, now) = (self.lineage().nonce, self.now());
        // No moment goes that is not too old by both clocks: this one may be far ahead.
        let ahead = self.options().source_time.map_or(0, |there| now.saturating_sub(there.now()));
        keep.spans.iter_mut().for_each(|span| span.seconds = span.seconds.saturating_add(ahead));
        let keep = &keep;
        Ageing { folder: self.state(), keep, present, now, common: self.common_states() }.run()
    }

    /// What it was at the common commits of its group, in order, and when those were; of no group, nothing.
    fn common_states(&self) -> Vec<(u64, Uuid)> {
        let Some(group) = &self.lineage().group else { return Vec::new() };
        let past = self.destination().group(group).and_then(|folder| PastCommits::load(&*folder));
        let source = self.lineage().source;
        let of_this = |intent: &Intent| {
            let member = intent.members.values().find(|member| Some(member.source) == source)?;
            Some((intent.time, member.state?, member.epoch))
        };
        let common: Vec<_> = past.unwrap_or_default().intents.iter().filter_map(of_this).collect();
        let there = Past::load(self.state(), self.lineage().nonce).unwrap_or_default().undos;
        // A repair gives a state another name, and leaves its epoch. Of other states than those few no header is read.
        let unnamed = |undo: &&Undo| {
            undo.kind == UndoKind::Epoch && common.iter().all(|(_, state, _)| *state != undo.to)
        };
        let epoch_of = |undo| past::header_of(self.state(), undo)?.0.to().copied();
        let renamed: Vec<_> =
            there.iter().filter(unnamed).filter_map(|undo| Some((epoch_of(undo)?, undo.to))).collect();
        let is_there = |state| there.iter().any(|undo| undo.to == state && undo.kind != UndoKind::Via);
        let named = |&(time, state, epoch): &(u64, Uuid, Epoch)| {
            let now = renamed.iter().find(|(of, _)| *of == epoch && !is_there(state));
            (time, now.map_or(state, |(_, now)| *now))
        };
        common.iter().map(named).collect()
    }
}
