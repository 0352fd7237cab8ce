//! What the images hold: every block's content follows from its number and its generation, so that any state of an image
//! can be written, restored and checked without keeping a copy of it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use device::Buf;
use dsync_tests::Random;
use dsync_tests::nbd::{Client, NbdCommand};

use crate::measure::limit::{self, BLOCK};
use crate::measure::process;

/// A stretch that is generated, written or checked at once, in blocks.
const STRETCH: u64 = 256;

/// What an image should hold.
#[derive(Clone)]
pub(crate) struct Content {
    seed: u64,
    /// Of each block. Generations count the rounds in which something changed.
    generations: Vec<u16>,
    latest: u16,
}

/// The blocks that one round changes, ascending.
pub(crate) struct Change {
    /// Their numbers.
    pub blocks: Vec<u64>,
    /// Their generations before.
    before: Vec<u16>,
}

impl Content {
    /// An image of `size` bytes, no byte of which compresses.
    pub(crate) fn new(seed: u64, size: u64) -> Content {
        Content { seed, generations: vec![0; (size / BLOCK) as usize], latest: 0 }
    }

    /// Blocks of the image.
    pub(crate) fn blocks(&self) -> u64 {
        self.generations.len() as u64
    }

    /// Decides what the next round changes: so many different blocks, spread at random.
    pub(crate) fn change(&mut self, count: u64) -> Change {
        self.latest += 1;
        let mut random = Random::seeded(self.seed ^ u64::from(self.latest) << 32);
        let total = self.blocks();
        let mut chosen = vec![false; total as usize];
        let mut left = count.min(total);
        while left > 0 {
            let block = &mut chosen[random.below(total) as usize];
            left -= u64::from(!*block);
            *block = true;
        }
        self.next((0..total).filter(|&block| chosen[block as usize]).collect())
    }

    /// The next round changes these, ascending.
    pub(crate) fn change_blocks(&mut self, blocks: Vec<u64>) -> Change {
        self.latest += 1;
        self.next(blocks)
    }

    fn next(&mut self, blocks: Vec<u64>) -> Change {
        let before = blocks.iter().map(|&block| self.generations[block as usize]).collect();
        for &block in &blocks {
            self.generations[block as usize] = self.latest;
        }
        Change { blocks, before }
    }

    fn fill(&self, block: u64, generation: u16, buf: &mut [u8]) {
        let mut random = Random::seeded(self.seed ^ block << 16 ^ u64::from(generation));
        // One mixing step first: neighbouring seeds begin alike.
        Random::seeded(random.bits()).fill(buf);
    }

    fn stretch(&self, first: u64, buf: &mut [u8]) {
        for (block, buf) in (first..).zip(buf.chunks_mut(BLOCK as usize)) {
            self.fill(block, self.generations[block as usize], buf);
        }
    }

    /// Writes the whole image.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path);
        let file = file.with_context(|| path.display().to_string())?;
        let mut buf = Buf::new((STRETCH * BLOCK) as usize);
        for first in (0..self.blocks()).step_by(STRETCH as usize) {
            process::go_on()?;
            buf.set_len((STRETCH.min(self.blocks() - first) * BLOCK) as usize);
            self.stretch(first, &mut buf);
            file.write_all_at(&buf, first * BLOCK).with_context(|| path.display().to_string())?;
        }
        file.sync_all().with_context(|| path.display().to_string())
    }

    /// Writes what a round changes to a file.
    pub(crate) fn apply(&self, change: &Change, path: &Path) -> Result<()> {
        self.rewrite(change, path, |at| self.generations[change.blocks[at] as usize])
    }

    /// Takes back what a round changed.
    pub(crate) fn undo(&self, change: &Change, path: &Path) -> Result<()> {
        self.rewrite(change, path, |at| change.before[at])
    }

    fn rewrite(&self, change: &Change, path: &Path, generation: impl Fn(usize) -> u16) -> Result<()> {
        let file = OpenOptions::new().write(true).open(path).with_context(|| path.display().to_string())?;
        let mut buf = [0; BLOCK as usize];
        for (at, &block) in change.blocks.iter().enumerate() {
            self.fill(block, generation(at), &mut buf);
            file.write_all_at(&buf, block * BLOCK).with_context(|| path.display().to_string())?;
        }
        file.sync_all().with_context(|| path.display().to_string())
    }

    /// Writes what a round changes through an NBD server, as a guest would, and flushes.
    pub(crate) fn apply_through(&self, change: &Change, client: &mut Client) -> Result<()> {
        let finish = |client: &mut Client| -> Result<()> {
            let reply = client.finish()?;
            ensure!(reply.error == 0, "the server answers a write with error {}", reply.error);
            Ok(())
        };
        for &block in &change.blocks {
            let mut data = vec![0; BLOCK as usize];
            self.fill(block, self.generations[block as usize], &mut data);
            client.start(&NbdCommand::Write { offset: block * BLOCK, data, flags: 0 })?;
            if client.in_flight() >= 32 {
                finish(client)?;
            }
        }
        while client.in_flight() > 0 {
            finish(client)?;
        }
        Ok(client.flush()?)
    }

    /// Checks every byte of a file, bypassing the page cache where that can be.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        let file = limit::direct(path, false).or_else(|_| File::open(path))?;
        ensure!(
            file.metadata()?.len() == self.blocks() * BLOCK,
            "{}: {} bytes, and should be {}",
            path.display(),
            file.metadata()?.len(),
            self.blocks() * BLOCK
        );
        let (mut found, mut wanted) =
            (Buf::new((STRETCH * BLOCK) as usize), Buf::new((STRETCH * BLOCK) as usize));
        for first in (0..self.blocks()).step_by(STRETCH as usize) {
            process::go_on()?;
            let len = (STRETCH.min(self.blocks() - first) * BLOCK) as usize;
            found.set_len(len);
            wanted.set_len(len);
            file.read_exact_at(&mut found, first * BLOCK)?;
            self.stretch(first, &mut wanted);
            if found[..] != wanted[..] {
                let at = found.iter().zip(wanted.iter()).position(|(a, b)| a != b).unwrap_or(0) as u64;
                anyhow::bail!("{}: WRONG CONTENT in block {}", path.display(), first + at / BLOCK);
            }
        }
        Ok(())
    }

    /// Checks the blocks that a round changed.
    pub(crate) fn check_changed(&self, change: &Change, path: &Path) -> Result<()> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let (mut found, mut wanted) = ([0; BLOCK as usize], [0; BLOCK as usize]);
        for &block in &change.blocks {
            file.read_exact_at(&mut found, block * BLOCK)?;
            self.fill(block, self.generations[block as usize], &mut wanted);
            ensure!(found == wanted, "{}: WRONG CONTENT in block {block}", path.display());
        }
        Ok(())
    }
}

/// Reads a file through, so that the page cache holds it.
pub(crate) fn warm(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let size = file.metadata()?.len();
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        process::go_on()?;
        let len = file.read_at(&mut buf, at)?;
        ensure!(len > 0, "{}: ends early", path.display());
        at += len as u64;
    }
    Ok(())
}

/// Empties the page cache. Needs root.
pub(crate) fn drop_caches() -> Result<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").context("dropping caches needs root")
}
