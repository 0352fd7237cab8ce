//! The limit of a commit: what storing known blocks in a journal, durably, and then bringing them to their places costs at least, and what
//! it costs to keep beforehand what they replace: two writes of each block, or three and one more read. Without the journal, what is kept
//! takes its place: two writes and two reads.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use device::{Buf, Disk, DiskOptions, Piece, Queue, Request, RequestKind};

use crate::measure::limit::{direct, read_list, runs};

/// Requests on their way to each file at once, and the most bytes of one.
const DEPTH: usize = 64;
const RUN: u64 = 256 << 10;

/// A file that is read or written past the page cache, and what is on its way.
struct Place {
    disk: Arc<dyn Disk>,
    queue: Box<dyn Queue>,
}

impl Place {
    fn open(path: &Path) -> Result<Place> {
        let disk = device::open(path, &DiskOptions { write: true, direct: true, exclusive: false })?;
        // Refuses a file system that would answer from its cache.
        direct(path, true)?;
        let queue = disk.clone().queue(DEPTH as u32)?;
        Ok(Place { disk, queue })
    }

    /// A new file of so many bytes.
    fn create(path: &Path, bytes: u64) -> Result<Place> {
        let file = std::fs::File::create(path).with_context(|| path.display().to_string())?;
        file.set_len(bytes)?;
        Place::open(path)
    }

    fn submit(&mut self, kind: RequestKind, offset: u64, buf: Buf, token: usize) {
        let pieces = [Piece { offset, len: buf.len() as u64 }].into_iter().collect();
        self.queue.submit(Request { kind, pieces, buf, token: token as u64 });
        self.queue.start();
    }

    /// The next that completes: its number and its bytes.
    fn complete(&mut self) -> Result<(usize, Buf)> {
        let done = self.queue.complete(true).context("nothing is on its way")?;
        done.result?;
        Ok((done.request.token as usize, done.request.buf))
    }
}

/// Reads runs of one file, and writes them one behind the other to another, durably, if there is one. Returns what was read.
fn store(from: &mut Place, runs: &[(u64, u64)], mut to: Option<Place>) -> Result<Vec<Buf>> {
    let mut stored: Vec<Buf> = runs.iter().map(|_| Buf::default()).collect();
    let places: Vec<u64> = runs
        .iter()
        .scan(0, |end, run| {
            *end += run.1;
            Some(*end - run.1)
        })
        .collect();
    let written = |to: &Option<Place>| to.as_ref().map_or(0, |to| to.queue.in_flight());
    let (mut next, mut done) = (0, 0);
    while done < runs.len() {
        while next < runs.len() && from.queue.in_flight() + written(&to) < 2 * DEPTH {
            from.submit(RequestKind::Read, runs[next].0, Buf::scratch(runs[next].1 as usize), next);
            next += 1;
        }
        if from.queue.in_flight() > 0 {
            let (number, buf) = from.complete()?;
            match &mut to {
                Some(to) => to.submit(RequestKind::Write { fua: false }, places[number], buf, number),
                None => (stored[number], done) = (buf, done + 1),
            }
        }
        let Some(to) = &mut to else { continue };
        while to.queue.in_flight() > DEPTH || from.queue.in_flight() == 0 && to.queue.in_flight() > 0 {
            let (number, buf) = to.complete()?;
            (stored[number], done) = (buf, done + 1);
        }
    }
    if let Some(to) = to {
        to.disk.flush()?;
    }
    Ok(stored)
}

/// Brings listed blocks of `source` to `destination`, by way of a journal if one is named, and keeps what they replace if it is named where.
pub(crate) fn run(
    source: &Path,
    destination: &Path,
    list: &Path,
    journal: Option<&Path>,
    undo: Option<&Path>,
) -> Result<()> {
    let runs = runs(read_list(list)?.into_iter(), RUN);
    let bytes: u64 = runs.iter().map(|run| run.1).sum();
    let create = |path: Option<&Path>| path.map(|path| Place::create(path, bytes)).transpose();
    let mut to = Place::open(destination)?;
    let stored = store(&mut Place::open(source)?, &runs, create(journal)?)?;
    if undo.is_some() {
        store(&mut to, &runs, create(undo)?)?;
    }
    for (number, buf) in stored.into_iter().enumerate() {
        while to.queue.in_flight() >= DEPTH {
            to.complete()?;
        }
        to.submit(RequestKind::Write { fua: false }, runs[number].0, buf, number);
    }
    while to.queue.in_flight() > 0 {
        to.complete()?;
    }
    to.disk.flush()?;
    journal.map_or(Ok(()), |journal| {
        std::fs::remove_file(journal).with_context(|| journal.display().to_string())
    })
}
