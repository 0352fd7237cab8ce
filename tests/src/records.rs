//! Writers that leave numbered records, one after the other: some of them tell whether they are all that was
//! there at one moment.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Random;
use crate::image::BLOCK;
use crate::nbd::{Address, Client};

/// Blocks of a writer's ring.
const RING: u64 = 257;
const WRITERS: u64 = 2;
/// Bytes that the rings of all writers need.
pub const SPACE: u64 = WRITERS * RING * BLOCK * 3;

/// Writers, each of which waits for the answer to a record before it writes the next.
pub struct Records {
    stop: Arc<AtomicBool>,
    next: Arc<[AtomicU64; WRITERS as usize]>,
    threads: Vec<JoinHandle<()>>,
}

/// Where a writer's record goes.
fn place(writer: u64, number: u64) -> u64 {
    // Scattered, and among the other's.
    ((number % RING) * 3 * WRITERS + writer * 3 + number % 2) * BLOCK
}

fn record(writer: u64, number: u64) -> Vec<u8> {
    let mut bytes = Random::seeded(number.wrapping_mul(WRITERS).wrapping_add(writer)).bytes(BLOCK as usize);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..16].copy_from_slice(&writer.to_le_bytes());
    bytes
}

impl Records {
    /// Goes on behind the records that `before` has left. Pauses after each record for up to so many microseconds.
    pub fn start(
        address: &Address,
        export: &str,
        before: Option<[u64; WRITERS as usize]>,
        pause: u64,
    ) -> Records {
        let stop = Arc::new(AtomicBool::new(false));
        let next = Arc::new(before.unwrap_or([1; WRITERS as usize]).map(AtomicU64::new));
        let threads = (0..WRITERS)
            .map(|writer| {
                let (stop, next, address) = (stop.clone(), next.clone(), address.clone());
                let export = export.to_owned();
                std::thread::spawn(move || {
                    let Ok(mut client) = Client::connect(&address, &export) else { return };
                    let mut random = Random::seeded(writer);
                    while !stop.load(SeqCst) {
                        let number = next[writer as usize].load(SeqCst);
                        // A server that was killed does not answer: the same record is written again later.
                        if client.write(place(writer, number), &record(writer, number)).is_err() {
                            return;
                        }
                        next[writer as usize].store(number + 1, SeqCst);
                        if pause > 0 {
                            std::thread::sleep(Duration::from_micros(random.below(pause)));
                        }
                    }
                    let _ = client.close();
                })
            })
            .collect();
        Records { stop, next, threads }
    }

    /// Records written so far by all.
    pub fn written(&self) -> u64 {
        self.next.iter().map(|n| n.load(SeqCst)).sum()
    }

    /// Waits for so many more.
    pub fn wait_for(&self, more: u64) {
        let (upto, until) = (self.written() + more, Instant::now() + Duration::from_secs(60));
        while self.written() < upto && Instant::now() < until && !self.threads.iter().all(|t| t.is_finished())
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops; the numbers that come next.
    pub fn stop(self) -> [u64; WRITERS as usize] {
        self.stop.store(true, SeqCst);
        for thread in self.threads {
            thread.join().expect("a writer");
        }
        [0, 1].map(|writer: usize| self.next[writer].load(SeqCst))
    }
}

/// The last record of each writer in an image. Fails the test unless every record before it is there, but those written over
/// by one of these.
pub fn check(image: &Path, what: &str) -> [u64; WRITERS as usize] {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(image).unwrap_or_else(|e| panic!("{}: {e}", image.display()));
    let read = |at: u64| {
        let mut bytes = vec![0; BLOCK as usize];
        file.read_exact_at(&mut bytes, at).expect("an image");
        bytes
    };
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    [0, 1].map(|writer: u64| {
        // A slot has two places, for odd and even numbers: an odd ring visits them by turns.
        let there = (0..2 * RING).map(|n| read(place(writer, n))).map(|bytes| (number(&bytes), bytes));
        let records = there.filter(|(number, bytes)| *bytes == record(writer, *number));
        let found = records.map(|(number, _)| number).max().unwrap_or(0);
        for n in found.saturating_sub(2 * RING - 1).max(1)..=found {
            let there = read(place(writer, n));
            assert!(
                there == record(writer, n),
                "{what}: writer {writer} had written record {found}, and record {n} is not there but {}",
                number(&there)
            );
        }
        found
    })
}
