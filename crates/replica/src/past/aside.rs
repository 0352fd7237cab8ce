//! Files of units that nothing reads again soon: undo deltas. They are written past the page cache where the file system can do that, several
//! writes at once, so that what is read meanwhile does not wait for them, and what is cached stays.

use std::io::{self, IoSlice, Write};
use std::sync::Arc;

use delta::{Unit, Writer};
use device::{Buf, Disk, Folder, Piece, Queue, Request, RequestKind, StateFile};

/// Bytes of a write.
const STEP: usize = 1 << 20;
/// Writes kept on their way.
const DEPTH: usize = 4;
/// The file is made longer by so much ahead of what is written: writes that lengthen a file wait for each other.
const AHEAD: u64 = 64 << 20;

/// Such a file while it is written. Until it has its name, nothing counts of it.
pub(crate) struct Aside {
    file: Box<dyn StateFile>,
    past_cache: Option<PastCache>,
    /// What was handed over and not written yet.
    gathered: Buf,
    /// Bytes before it, all of which are on their way.
    written: u64,
}

struct PastCache {
    disk: Arc<dyn Disk>,
    queue: Box<dyn Queue>,
}

impl Aside {
    /// Begins a file of this name, in place of any other.
    pub(crate) fn begin(folder: &dyn Folder, name: &str) -> io::Result<Aside> {
        folder.remove(name)?;
        Ok(Aside { file: folder.open(name, true)?, past_cache: None, gathered: empty(), written: 0 })
    }

    /// Adds a unit.
    pub(crate) fn unit(&mut self, unit: &Unit) -> io::Result<()> {
        match Writer::new(&mut *self).unit(unit) {
            Ok(()) => Ok(()),
            Err(delta::Error::Write(error)) => Err(error),
            Err(other) => Err(io::Error::other(other)),
        }
    }

    /// The file is whole: makes it durable, and gives it the name that says so.
    pub(crate) fn name(mut self, folder: &dyn Folder, from: &str, to: &str) -> io::Result<()> {
        let rest = std::mem::take(&mut self.gathered);
        if let Some(past_cache) = &mut self.past_cache {
            past_cache.wait_for(0)?;
        }
        self.file.write_at(self.written, &rest)?;
        if self.past_cache.is_some() {
            self.file.set_len(self.written + rest.len() as u64)?;
        }
        self.file.sync()?;
        self.file.uncache(0, self.written + rest.len() as u64);
        folder.rename(from, to)?;
        folder.sync()
    }

    /// Writes what was gathered, of full length.
    fn step(&mut self) -> io::Result<()> {
        let (buf, offset) = (std::mem::replace(&mut self.gathered, empty()), self.written);
        self.written += STEP as u64;
        if offset == 0 {
            self.past_cache = PastCache::of(&*self.file)?;
        }
        match &mut self.past_cache {
            Some(past_cache) => past_cache.write(offset, buf),
            None => {
                self.file.write_at(offset, &buf)?;
                self.file.write_back(offset, STEP as u64);
                Ok(())
            }
        }
    }
}

impl Write for Aside {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        for slice in slices {
            let mut left = &slice[..];
            while !left.is_empty() {
                let at = self.gathered.len();
                let (part, rest) = left.split_at(left.len().min(STEP - at));
                self.gathered.set_len(at + part.len());
                self.gathered[at..].copy_from_slice(part);
                left = rest;
                if self.gathered.len() == STEP {
                    self.step()?;
                }
            }
        }
        Ok(slices.iter().map(|slice| slice.len()).sum())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl PastCache {
    /// `None` where writes go through the page cache, as on some file systems.
    fn of(file: &dyn StateFile) -> io::Result<Option<PastCache>> {
        let Some(disk) = file.past_cache() else { return Ok(None) };
        Ok(Some(PastCache { queue: disk.clone().queue(DEPTH as u32)?, disk }))
    }

    fn write(&mut self, offset: u64, buf: Buf) -> io::Result<()> {
        let len = buf.len() as u64;
        if offset + len > self.disk.len() {
            lengthen(offset, len, |to| self.disk.resize(to))?;
        }
        self.wait_for(DEPTH - 1)?;
        let pieces = [Piece { offset, len }].into_iter().collect();
        self.queue.submit(Request { kind: RequestKind::Write { fua: false }, pieces, buf, token: 0 });
        self.queue.start();
        Ok(())
    }

    /// Waits until no more writes than these are on their way.
    fn wait_for(&mut self, most: usize) -> io::Result<()> {
        while self.queue.in_flight() > most {
            let Some(done) = self.queue.complete(true) else { return Ok(()) };
            done.result?;
        }
        Ok(())
    }
}

/// Makes the file long enough for a write, and for those after it; or, at a limit and where that takes room, for this one alone.
fn lengthen(offset: u64, len: u64, resize: impl Fn(u64) -> io::Result<()>) -> io::Result<()> {
    resize(offset + AHEAD).or_else(|_| resize(offset + len))
}

/// A buffer for one step.
fn empty() -> Buf {
    let mut buf = Buf::scratch(STEP);
    buf.set_len(0);
    buf
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use device::Dir;

    use super::*;

    #[test]
    fn what_is_written_aside_needs_no_room_but_its_own() {
        for (most, to) in [(AHEAD, Some(AHEAD)), (AHEAD - 1, Some(10)), (10, Some(10)), (9, None)] {
            let len = Cell::new(None);
            let done = lengthen(0, 10, |to| {
                if to > most {
                    return Err(io::ErrorKind::FileTooLarge.into());
                }
                len.set(Some(to));
                Ok(())
            });
            assert_eq!((done.is_ok(), len.get()), (to.is_some(), to), "a limit of {most}");
        }
    }

    #[test]
    fn what_is_written_aside_is_found_again_whatever_its_length() -> io::Result<()> {
        let place = tempfile::tempdir()?;
        let folder = Dir::open(place.path())?;
        // Past what the file was made longer by, and no whole number of pages.
        let ahead = AHEAD as usize + 2 * STEP + 5;
        for len in [0, 1, 4097, STEP - 1, STEP, STEP + 1, 5 * STEP + 123, ahead] {
            let content: Vec<u8> = (0..len).map(|at| (at / 7 + at / STEP) as u8).collect();
            let mut aside = Aside::begin(&folder, "growing")?;
            for part in content.chunks(700_001) {
                aside.write_all(part)?;
            }
            let past_cache = aside.past_cache.is_some();
            aside.name(&folder, "growing", "whole")?;
            assert!(std::fs::read(place.path().join("whole"))? == content, "{len} bytes");
            assert!(!past_cache || len >= STEP);
            assert!(!place.path().join("growing").exists());
        }
        Ok(())
    }
}
