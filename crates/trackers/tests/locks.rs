//! Nobody waits forever: writers whose completions come only when they look for them, beside all that drains the gate.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use device::{Buf, Dir, Disk, Done, Folder, Piece, Queue, RamDisk, Request, RequestKind};
use testing::{Random, rounds};
use trackers::{CowStore, TrackOptions, TrackedDisk};

const BLOCK: u64 = 4096;
const REGION: u64 = 1 << 20;
const REGIONS: u64 = 512;
/// Without a step for so long, a thread is stuck.
const LIMIT: Duration = Duration::from_secs(30);

/// A disk whose queue carries a request out when its completion is looked for, as a ring hands it over then.
struct Polled(Arc<RamDisk>);

impl Disk for Polled {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, buf)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.0.zero(offset, len, unmap, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(PolledQueue { ram: self.0.clone(), under_way: VecDeque::new() }))
    }
}

struct PolledQueue {
    ram: Arc<RamDisk>,
    under_way: VecDeque<Request>,
}

impl Queue for PolledQueue {
    fn submit(&mut self, request: Request) {
        self.under_way.push_back(request);
    }
    fn start(&mut self) {}
    fn complete(&mut self, _wait: bool) -> Option<Done> {
        let request = self.under_way.pop_front()?;
        let result = self.ram.write_at(request.pieces[0].offset, &request.buf);
        Some(Done { request, result })
    }
    fn in_flight(&self) -> usize {
        self.under_way.len()
    }
}

/// What each thread is at, and since when.
struct Watched {
    name: String,
    step: Mutex<(&'static str, Instant)>,
    steps: AtomicU64,
}

impl Watched {
    fn at(&self, step: &'static str) {
        *self.step.lock().unwrap() = (step, Instant::now());
        self.steps.fetch_add(1, SeqCst);
    }
}

struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<(Arc<Watched>, std::thread::JoinHandle<()>)>,
}

impl Watch {
    /// Runs `work` again and again in a thread of its own.
    fn run(&mut self, name: String, mut work: impl FnMut(&Watched) + Send + 'static) {
        let watched =
            Arc::new(Watched { name, step: Mutex::new(("start", Instant::now())), steps: AtomicU64::new(0) });
        let (stop, own) = (self.stop.clone(), watched.clone());
        let thread = std::thread::spawn(move || {
            while !stop.load(SeqCst) {
                work(&own);
            }
            own.at("end");
        });
        self.threads.push((watched, thread));
    }

    /// Lets them run for a while. Panics with the name of the step at which a thread stands still.
    fn wait(self, time: Duration) {
        let began = Instant::now();
        while !self.threads.iter().all(|(_, thread)| thread.is_finished()) {
            if began.elapsed() > time {
                self.stop.store(true, SeqCst);
            }
            let stuck: Vec<String> = self
                .threads
                .iter()
                .filter_map(|(watched, thread)| {
                    let (step, since) = *watched.step.lock().unwrap();
                    let still = !thread.is_finished() && since.elapsed() > LIMIT;
                    still.then(|| format!("{} at \"{step}\"", watched.name))
                })
                .collect();
            assert!(stuck.is_empty(), "stuck: {}", stuck.join(", "));
            std::thread::sleep(Duration::from_millis(20));
        }
        for (watched, thread) in self.threads {
            thread.join().unwrap();
            assert!(watched.steps.load(SeqCst) > 10, "{} did hardly anything", watched.name);
        }
    }
}

/// As a connection does it: a queue that is full is looked at once, and questions are answered in between.
fn write_and_ask(disk: &TrackedDisk, seed: u64) -> impl FnMut(&Watched) + Send + 'static {
    let disk = disk.clone();
    let mut queue = Arc::new(disk.clone()).queue(16).unwrap();
    let mut random = Random::seeded(seed);
    move |at| {
        let offset = random.below(REGIONS) * REGION + random.below(REGION / BLOCK) * BLOCK;
        at.at("begin a write");
        queue.submit(Request {
            kind: RequestKind::Write { fua: false },
            pieces: [Piece { offset, len: 512 }].into_iter().collect(),
            buf: Buf::new(512),
            token: 0,
        });
        queue.start();
        if random.one_in(16) {
            at.at("ask what is dirty");
            disk.dirty_runs(0..REGIONS * REGION / BLOCK, 64).unwrap();
        }
        while queue.in_flight() >= 16 {
            at.at("complete a write");
            queue.complete(true).unwrap().result.unwrap();
        }
        // Slow enough for regions to fall idle in between.
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn no_writer_waits_for_one_who_waits_for_the_writers() {
    let seconds = rounds(3, 60);
    let temp = tempfile::tempdir().unwrap();
    let folder: Arc<dyn Folder> = Arc::new(Dir::open(temp.path()).unwrap());
    let settings = TrackOptions {
        block_size: BLOCK as u32,
        region: REGION,
        intents: true,
        allow_shrink: false,
        clock: device::Clock::system(),
    };
    let ram = Arc::new(RamDisk::new(REGIONS * REGION));
    let disk = TrackedDisk::open(Arc::new(Polled(ram)), folder, settings, 0, true, false).unwrap();
    let mut watch = Watch { stop: Arc::default(), threads: Vec::new() };
    for seed in 1..=2 {
        watch.run(format!("writer {seed}"), write_and_ask(&disk, seed));
    }
    let tracked = disk.clone();
    watch.run("sweeps".into(), move |at| {
        at.at("sweep");
        tracked.sweep(1).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    });
    let (tracked, place) = (disk.clone(), temp.path().to_path_buf());
    watch.run("checkpoints".into(), move |at| {
        let saved = Arc::new(CowStore::create(&place, tracked.len(), BLOCK as u32, 1 << 30).unwrap());
        at.at("checkpoint");
        tracked.checkpoint(Some(saved.clone()), None).unwrap();
        at.at("release");
        tracked.release().unwrap();
        std::thread::sleep(Duration::from_millis(3));
        tracked.drop_view(&saved);
    });
    let (tracked, place) = (disk.clone(), temp.path().to_path_buf());
    let follower = disk.follow();
    watch.run("cuts".into(), move |at| {
        let saved = Arc::new(CowStore::create(&place, tracked.len(), BLOCK as u32, 1 << 30).unwrap());
        at.at("cut");
        tracked.cut(&follower, &saved);
        std::thread::sleep(Duration::from_millis(3));
        tracked.drop_view(&saved);
    });
    let tracked = disk.clone();
    watch.run("tender".into(), move |at| {
        at.at("pulse");
        tracked.pulse(0);
        at.at("look");
        tracked.look(|| None).unwrap();
        at.at("make a record ahead");
        tracked.prepare().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    });
    watch.run("status".into(), move |at| {
        at.at("count what is dirty");
        disk.dirty().unwrap().count();
        at.at("count active regions");
        disk.active_regions();
        std::thread::sleep(Duration::from_millis(1));
    });
    watch.wait(Duration::from_secs(seconds));
}
