//! What the batches of a mirror replace, kept before they are written: a log of undo deltas, one for each batch, each made
//! durable before its batch is brought to the destination. A block that was kept since the log began is not kept again.
//!
//! A log begins at a state, `undo-log-TIME-TO`, before the first batch after that state is sealed in the journal. It ends with the
//! epoch: then it becomes one undo delta. So what is there after a crash tells what may have been overwritten: nothing but
//! blocks that the log holds. What the journal has beyond it is still to be kept when that is merged.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Header, Method, Record};
use device::StateFile;
use extents::Extents;
use uuid::Uuid;

use crate::error::{ReplicaError, Result, SAFE, disk_error, io_error, is_full};
use crate::journal::{Contents, WHOLE};
use crate::past;
use crate::past::saving::Saving;
use crate::replica::Replica;
use crate::state::destination::Name;
use crate::state::lineage::{State, Unsure};

/// A log that grows.
pub(crate) struct UndoLog {
    saving: Saving,
    /// The last state that it leads back from.
    state: Uuid,
    /// What the batch that arrives replaces.
    arriving: Extents,
    /// The state is at an epoch: what comes next belongs to another log.
    ended: bool,
}

impl UndoLog {
    /// A batch begins.
    pub(crate) fn begin(&mut self) {
        self.arriving = Extents::new();
    }

    /// Takes records of the batch that arrives.
    pub(crate) fn records(&mut self, records: &[Record]) {
        self.arriving.extend(records.iter().map(|record| record.offset()..record.end()));
    }

    /// Keeps what the batch that has arrived replaces, durably: it may be written after that. `ends`: it ends the epoch.
    pub(crate) fn keep(&mut self, stream: Uuid, ends: bool) -> io::Result<()> {
        let arriving = std::mem::take(&mut self.arriving);
        self.append(arriving.iter(), stream)?;
        self.ended = ends;
        Ok(())
    }

    /// True if what comes next belongs to another log.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    fn append(&mut self, replaced: impl Iterator<Item = Range<u64>>, from: Uuid) -> io::Result<()> {
        let missing = self.saving.missing(replaced);
        self.saving.append(missing, from, self.state)?;
        self.state = from;
        // The first one leads to where the log began; those before it only lead on.
        self.saving.header.batch = true;
        Ok(())
    }
}

impl Replica {
    /// Begins a log at the present state, if its past is to be kept.
    pub(crate) fn begin_log(&mut self) -> Result<Option<UndoLog>> {
        if self.touched_by().is_none() {
            return Ok(None);
        }
        let (lineage, folder) = (self.lineage(), self.shared_state());
        let at = past::since(&*folder, lineage, self.settings()).unwrap_or_else(|| self.now());
        let name = past::log_name(at, lineage.nonce);
        let path = self.folder().join(&name);
        let made = folder.open(&name, true).and_then(|file| {
            file.set_len(0)?;
            file.sync()?;
            folder.sync()?;
            Ok(file)
        });
        match made {
            Ok(file) => self.log_of(file.into()).map(Some),
            Err(e) if is_full(&e) => {
                self.give_up_past("there is no room to keep what is replaced");
                self.drop_logs().map(|()| None)
            }
            Err(e) => Err(io_error("make", &path)(e)),
        }
    }

    /// An empty log. It begins at the lineage's state.
    fn log_of(&self, file: Arc<dyn StateFile>) -> Result<UndoLog> {
        let lineage = self.lineage();
        let (source, chain) = (lineage.source.unwrap_or_default(), lineage.epoch.into_iter().collect());
        let sizes = (lineage.size, lineage.size);
        let mut header = Header::new(source, Method::Tracked, chain, sizes, lineage.block_size);
        header.fuzzy = lineage.state == State::Fuzzy;
        header.lives.clone_from(&lineage.role.lives);
        header.batch = lineage.state == State::Incomplete || lineage.unsure != Unsure::Nothing;
        let (disk, state) = (self.destination().open(Name::Final)?, lineage.nonce);
        let saving = Saving::new(file, disk, 0, header, true);
        Ok(UndoLog { saving, state, arriving: Extents::new(), ended: false })
    }

    /// Keeps what a batch replaces, before it is written. Where that fails the past is given up, and the log is gone: it must
    /// not be taken for one that knows of all that was overwritten.
    pub(crate) fn keep_replaced(
        &mut self,
        log: Option<UndoLog>,
        stream: Uuid,
        ends: bool,
    ) -> Result<Option<UndoLog>> {
        let Some(mut log) = log else { return Ok(None) };
        loop {
            let arriving = log.arriving.clone();
            let Err(error) = log.keep(stream, ends) else { return Ok(Some(log)) };
            log.arriving = arriving;
            // The batch that arrives leads nowhere yet.
            if !is_full(&error) || !self.past_gives_way_from(log.state) {
                self.give_up_past(&format!("what was to be replaced could not be kept: {error}"));
                return self.drop_logs().map(|()| None);
            }
        }
    }

    /// Removes all logs, durably.
    pub(crate) fn drop_logs(&self) -> Result<()> {
        let dropped = past::logs(self.state()).and_then(|names| {
            names.iter().try_for_each(|name| self.state().remove(name))?;
            if names.is_empty() { Ok(()) } else { self.state().sync() }
        });
        dropped.map_err(disk_error("remove an undo log in", self.folder(), SAFE))
    }

    /// Makes ordinary undo deltas of what a mirror's log holds, before anything but its batches is committed: what is written
    /// then, the log does not know of.
    pub(crate) fn close_logs(&mut self) -> Result<()> {
        let logs = past::logs(self.state()).map_err(io_error("look into", self.folder()))?;
        if logs.is_empty() {
            return Ok(());
        }
        while let Err(error) = past::fold_logs(self.state(), self.lineage().nonce) {
            let full = matches!(&error, ReplicaError::Io { error, .. } if is_full(error));
            if full && self.past_gives_way() {
                continue;
            }
            if full && self.rewinds() {
                let place = format!("to keep the moments in {}", self.folder().display());
                return Err(ReplicaError::Full {
                    place,
                    missing: None,
                    state: "the replica is unchanged",
                    otherwise: "",
                });
            }
            self.warn(format!(
                "its past up to the present epoch is given up, because it could not be kept: {error}"
            ));
            break;
        }
        self.drop_logs()
    }

    /// After a crash: keeps what batches in the journal replace, of which the log does not know yet. They were not
    /// written, and what was, the log knows of.
    pub(crate) fn complete_log(&mut self, deltas: &[Contents]) -> Result<()> {
        let failed = |e| io_error("read an undo log in", self.folder())(e);
        let Some(name) = past::logs(self.state()).map_err(failed)?.pop() else { return Ok(()) };
        if self.settings().is_none() {
            return self.drop_logs();
        }
        let entries = match past::entries(self.state(), &name) {
            Ok(entries) => entries,
            Err(error) => {
                // What is behind may have been overwritten already, and would be kept as it is now.
                self.give_up_past(&format!("its undo log cannot be read: {error}"));
                return self.drop_logs();
            }
        };
        let file: Arc<dyn StateFile> = self.state().open(&name, false).map_err(failed)?.into();
        let begun = past::began_at(&name).unwrap_or_default();
        let mut log = self.log_of(file)?;
        log.state = entries.last().map_or(begun, |entry| entry.from);
        log.saving.end = entries.last().map_or(0, |entry| entry.start + entry.bytes);
        log.saving.header.batch |= !entries.is_empty();
        entries.iter().try_for_each(|entry| log.saving.cover(entry.start).map(drop)).map_err(failed)?;
        let streams: Vec<Uuid> = deltas.iter().filter_map(Contents::stream).collect();
        let known = match streams.iter().position(|stream| *stream == log.state) {
            Some(at) => at + 1,
            None if log.state == self.lineage().nonce => 0,
            // Of another life.
            None => return self.drop_logs(),
        };
        let Some(last) = streams.last().filter(|_| known < streams.len()) else { return Ok(()) };
        let Some(mut touched) = self.touched_by() else { return self.drop_logs() };
        for contents in &deltas[known..] {
            let read = io_error("read", self.path());
            crate::journal::replay(self.state(), WHOLE, contents, &mut touched, &mut self.positions(), read)?;
        }
        let cut = log.saving.file.set_len(log.saving.end).and_then(|()| log.append(touched.ranges(), *last));
        match cut {
            Ok(()) => Ok(()),
            Err(error) => {
                self.give_up_past(&format!("what was to be replaced could not be kept: {error}"));
                self.drop_logs()
            }
        }
    }
}
