//! A workload that knows what it wrote: several connections write, zero and trim at random with many requests in
//! flight, and remember per block what was answered and what was only tried.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Random;
use crate::image::{BLOCK, is_zero};
use crate::nbd::{Address, Client, NbdCommand};

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Random bytes from this seed.
    Data(u64),
    Zero,
    /// It was trimmed: anything.
    Any,
}

impl Content {
    fn fits(self, block: u64, bytes: &[u8]) -> bool {
        match self {
            Content::Data(seed) => {
                let mut expected = vec![0; bytes.len()];
                fill(seed, block, &mut expected);
                expected == bytes
            }
            Content::Zero => is_zero(bytes),
            Content::Any => true,
        }
    }
}

fn fill(seed: u64, block: u64, buf: &mut [u8]) {
    Random::seeded(seed ^ block.wrapping_mul(0xd6e8_feb8_6659_fd93)).fill(buf);
}

#[derive(Debug, Default, Clone, Copy)]
struct Block {
    answered: Option<Content>,
    tried: Option<Content>,
}

/// How to load an export.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections, each with its own part of the blocks.
    pub connections: u64,
    /// Requests in flight on each.
    pub depth: usize,
    /// Longest request in blocks.
    pub longest: u64,
    /// Mix in zeroing and trimming.
    pub zeroes: bool,
    /// Flush (and now and then write with FUA) one time in this many requests; 0 is never.
    pub flush_every: u64,
    /// At most this many requests a second on each connection; 0 is as fast as it goes.
    pub rate: u64,
}

impl Default for Options {
    fn default() -> Options {
        Options { connections: 4, depth: 16, longest: 16, zeroes: true, flush_every: 100, rate: 0 }
    }
}

/// A workload under way.
pub struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    threads: Vec<JoinHandle<HashMap<u64, Block>>>,
}

/// What a workload wrote.
#[derive(Debug, Default)]
pub struct Written {
    blocks: HashMap<u64, Block>,
}

impl Load {
    /// Starts to write. The workload ends when it is told to, or when the server goes away.
    pub fn start(address: &Address, export: &str, options: &Options, random: &mut Random) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicU64::new(0));
        let threads = (0..options.connections)
            .map(|lane| {
                let client = Client::connect_with(address, export, &[])
                    .unwrap_or_else(|e| panic!("cannot connect to {export} at {address}: {e}"));
                let worker = Worker {
                    client,
                    lane,
                    options: options.clone(),
                    random: Random::seeded(random.bits()),
                    blocks: HashMap::new(),
                    in_flight: HashMap::new(),
                };
                let (stop, answered) = (stop.clone(), answered.clone());
                std::thread::spawn(move || worker.run(&stop, &answered))
            })
            .collect();
        Load { stop, answered, threads }
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    /// Waits until so many requests were answered; fails the test if that takes over a minute.
    pub fn wait_for(&self, answered: u64) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.answered() < answered {
            assert!(Instant::now() < until, "only {} of {answered} requests were answered", self.answered());
            assert!(self.threads.iter().any(|t| !t.is_finished()), "the server went away under the workload");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Ends the workload, waits for what is in flight and tells what was written.
    pub fn stop(self) -> Written {
        self.stop.store(true, Ordering::Relaxed);
        let mut written = Written::default();
        for thread in self.threads {
            written.blocks.extend(thread.join().expect("a connection of the workload"));
        }
        written
    }
}

struct Worker {
    client: Client,
    lane: u64,
    options: Options,
    random: Random,
    blocks: HashMap<u64, Block>,
    /// Per cookie: first block, blocks, content.
    in_flight: HashMap<u64, (u64, u64, Content)>,
}

/// Blocks are dealt out to the connections in strips of this many.
const STRIP: u64 = 64;

impl Worker {
    fn run(mut self, stop: &AtomicBool, answered: &AtomicU64) -> HashMap<u64, Block> {
        let started = Instant::now();
        let mut sent = 0;
        while !stop.load(Ordering::Relaxed) {
            while self.client.in_flight() < self.options.depth {
                if self.submit().is_err() {
                    return self.blocks;
                }
                sent += 1;
            }
            if self.take().is_err() {
                return self.blocks;
            }
            answered.fetch_add(1, Ordering::Relaxed);
            if self.options.rate > 0 {
                let due = Duration::from_secs_f64(sent as f64 / self.options.rate as f64);
                std::thread::sleep(due.saturating_sub(started.elapsed()));
            }
        }
        while self.client.in_flight() > 0 && self.take().is_ok() {}
        self.blocks
    }

    /// A run of blocks in this connection's strips, none of it in flight.
    fn choose(&mut self) -> (u64, u64) {
        let total = self.client.size / BLOCK;
        let strips = (total / STRIP / self.options.connections).max(1);
        loop {
            let strip = self.random.below(strips) * self.options.connections + self.lane;
            let within = self.random.below(STRIP);
            let longest = self.options.longest.min(STRIP - within);
            let (first, count) = (strip * STRIP + within, 1 + self.random.below(longest));
            let busy = |(at, len, _): &(u64, u64, Content)| *at < first + count && first < at + len;
            if first + count <= total && !self.in_flight.values().any(busy) {
                return (first, count);
            }
        }
    }

    fn submit(&mut self) -> std::io::Result<()> {
        let flush = self.options.flush_every;
        if flush > 0 && self.random.one_in(flush) {
            self.client.start(&NbdCommand::Flush)?;
            return Ok(());
        }
        let (first, count) = self.choose();
        let (offset, len) = (first * BLOCK, (count * BLOCK) as u32);
        let kind = if self.options.zeroes { self.random.below(16) } else { 2 };
        let (content, command) = match kind {
            0 => (Content::Any, NbdCommand::Trim { offset, len }),
            1 => {
                let flags = if self.random.one_in(2) { crate::nbd::NO_HOLE } else { 0 };
                (Content::Zero, NbdCommand::Zero { offset, len, flags })
            }
            _ => {
                let seed = self.random.bits();
                let mut data = vec![0; len as usize];
                for (i, block) in data.chunks_mut(BLOCK as usize).enumerate() {
                    fill(seed, first + i as u64, block);
                }
                let flags = if flush > 0 && self.random.one_in(flush) { crate::nbd::FUA } else { 0 };
                (Content::Data(seed), NbdCommand::Write { offset, data, flags })
            }
        };
        for block in first..first + count {
            self.blocks.entry(block).or_default().tried = Some(content);
        }
        let cookie = self.client.start(&command)?;
        self.in_flight.insert(cookie, (first, count, content));
        Ok(())
    }

    fn take(&mut self) -> std::io::Result<()> {
        let reply = self.client.finish()?;
        if let Some((first, count, content)) = self.in_flight.remove(&reply.cookie) {
            assert_eq!(reply.error, 0, "the server answered a request at block {first} with an error");
            for block in first..first + count {
                self.blocks.insert(block, Block { answered: Some(content), tried: None });
            }
        }
        Ok(())
    }
}

impl Written {
    /// Adds what a later workload wrote.
    pub fn then(&mut self, later: Written) {
        for (number, block) in later.blocks {
            let entry = self.blocks.entry(number).or_default();
            // What was tried before a crash and written over since is of no interest; what was not written over is
            // one of two contents still.
            if block.answered.is_some() || block.tried.is_none() {
                *entry = block;
            } else if entry.tried.is_none() {
                entry.tried = block.tried;
            } else {
                *entry = Block { answered: Some(Content::Any), tried: None };
            }
        }
    }

    /// Blocks written or tried.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True if nothing was tried.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The first block of the image that holds neither what was last answered nor what was tried after it.
    pub fn lost(&self, image: &Path) -> Option<u64> {
        let file = std::fs::File::open(image).unwrap_or_else(|e| panic!("{}: {e}", image.display()));
        let mut bytes = vec![0; BLOCK as usize];
        let mut lost = self.blocks.iter().filter(|(number, block)| {
            // What a block held before the first answer is not known here.
            let Some(answered) = block.answered else { return false };
            file.read_exact_at(&mut bytes, **number * BLOCK).expect("reading an image");
            !answered.fits(**number, &bytes) && !block.tried.is_some_and(|tried| tried.fits(**number, &bytes))
        });
        lost.next().map(|(number, _)| *number)
    }

    /// Fails the test if a write is lost.
    pub fn check(&self, image: &Path) {
        if let Some(block) = self.lost(image) {
            panic!("{}: block {block} lost an answered write: {:?}", image.display(), self.blocks[&block]);
        }
    }
}
