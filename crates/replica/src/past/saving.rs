//! A log of what is replaced, kept before it is: undo deltas one after the other in one file. A block that the log holds is not kept
//! again, so the log holds each block as it was when the log began.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use delta::{Encoder, Event, Header, Reader};
use device::{Disk, StateFile};
use uuid::Uuid;

use crate::journal::unsure::UnsureSet;
use crate::journal::{Growing, Input};
use crate::past::old::Old;

/// A log that grows.
pub(crate) struct Saving {
    pub file: Arc<dyn StateFile>,
    disk: Arc<dyn Disk>,
    /// Where the next undo delta begins.
    pub end: u64,
    /// Of its undo deltas, but for what each leads from and to.
    pub header: Header,
    /// What the log holds.
    saved: UnsureSet,
    /// Its reader may come after a power cut.
    durable: bool,
}

impl Saving {
    /// An empty log of what is replaced on `disk`, which begins at this place of its file.
    pub(crate) fn new(
        file: Arc<dyn StateFile>,
        disk: Arc<dyn Disk>,
        start: u64,
        header: Header,
        durable: bool,
    ) -> Saving {
        let mut saved = UnsureSet::new();
        saved.reach(header.size_after, header.block_size.into());
        Saving { file, disk, end: start, header, saved, durable }
    }

    /// What of the ranges, which ascend, the log does not hold yet.
    pub(crate) fn missing(&self, replaced: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
        let mut missing: Vec<Range<u64>> = Vec::new();
        for range in replaced {
            for part in self.saved.missing(range, self.header.size_after) {
                // Two ranges may have parts of one block.
                let start = missing.last().map_or(0, |last| last.end).max(part.start);
                match missing.last_mut() {
                    Some(last) if last.end == start && start < part.end => last.end = part.end,
                    _ if start < part.end => missing.push(start..part.end),
                    _ => {}
                }
            }
        }
        missing
    }

    /// Keeps these ranges, which the log does not hold, as an undo delta that leads from one state to another.
    pub(crate) fn append(&mut self, missing: Vec<Range<u64>>, from: Uuid, to: Uuid) -> io::Result<()> {
        let header = Header { stream: to, binds: Some(from), ..self.header.clone() };
        let (mut encoder, unit) = Encoder::new(&header, None).map_err(io::Error::other)?;
        let mut file = Growing::after(self.file.clone(), self.end);
        file.unit(&unit)?;
        Old::each(self.disk.clone(), missing.iter().cloned(), |frame| {
            file.unit(&encoder.frame(frame).map_err(io::Error::other)?)
        })?;
        file.unit(&encoder.trailer())?;
        file.keep()?;
        if self.durable {
            self.file.sync()?;
        }
        missing.into_iter().for_each(|range| self.saved.insert(range));
        self.end = file.len();
        Ok(())
    }

    /// Notes what the undo delta at this place of the file holds, and returns where it ends.
    pub(crate) fn cover(&mut self, start: u64) -> io::Result<u64> {
        let mut reader = Reader::new(Input::new(&*self.file, start)?);
        while let Some(event) = reader.next().map_err(io::Error::other)? {
            match event {
                Event::Header(_) => {}
                Event::Frame(frame) => {
                    frame.records.iter().for_each(|r| self.saved.insert(r.offset()..r.end()));
                }
                Event::End(_) => return Ok(start + reader.bytes()),
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}
