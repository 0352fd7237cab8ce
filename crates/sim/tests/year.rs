//! A year of a sync every five minutes: what is kept stays bounded, and the last week costs what the second one did.
//!
//! A sample of some weeks' pace in `make test`; all 105 120 syncs with `DSYNC_SOAK=1`, or as many as `DSYNC_ROUNDS` says.
#![allow(missing_docs)]

use std::time::Duration;

use device::Disk;
use peak_alloc::PeakAlloc;
use sim::cell::{Cell, Commit, Origin, Target, Way};
use sim::world::{Cuts, Moments, World};
use testing::{Random, number, rounds};

/// The time between syncs, in nanoseconds.
const EVERY: i64 = 300_000_000_000;
/// Syncs of a week, and of a year of 365 days.
const WEEK: u64 = 7 * 24 * 12;
const YEAR: u64 = 365 * 24 * 12;
/// How much more the last week may cost than an early one.
const MORE: f64 = 1.1;

/// Bytes of the files in a folder of the simulated machine, and how many there are.
fn kept(host: &sim::machine::host::Host, folder: &str) -> (usize, usize) {
    let files = host.state().files.snapshot(folder);
    (files.values().map(Vec::len).sum(), files.len())
}

/// What is held, and the most of it. What the allocator keeps beside that depends on which blocks met, and not on the syncs.
#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Time that processors spent for this process: what else the machine does is not in it.
fn processor_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

/// What one span of time cost.
#[derive(Debug, Default)]
struct Span {
    times: Vec<Duration>,
    source: Kept,
    replica: Kept,
    /// The most during a sync.
    memory: f64,
}

/// Sums of what was kept after each sync.
#[derive(Debug, Default)]
struct Kept {
    bytes: usize,
    files: usize,
}

impl Kept {
    fn add(&mut self, (bytes, files): (usize, usize)) {
        self.bytes += bytes;
        self.files += files;
    }
}

#[test]
fn a_year_of_syncs_costs_what_a_week_does() {
    let scratch = testing::in_memory();
    let mut random = Random::new("a year of syncs");
    let cell = Cell { origin: Origin::File, target: Target::File, way: Way::Local, commit: Commit::Journal };
    let mut world = World::new(cell, &mut random, scratch.path());
    let all = number("DSYNC_ROUNDS").unwrap_or(rounds(1200, YEAR)).max(40);
    // Moments are kept for a day and a week: their number is the same from the second span on.
    let span = WEEK.min(all / 8);
    let keep = match all < 8 * WEEK {
        true => "2h/10m,4h/1h".parse().expect("a policy"),
        false => "24h/10m,7d/1h".parse().expect("a policy"),
    };
    let options = sync::SyncOptions { keep: Some(keep), ..world.options(None) };
    world.serve().expect("a server");
    let which = world.add_replica();
    let (mut early, mut late) = (Span::default(), Span::default());
    for n in 0..all {
        let source = world.server.as_ref().expect("a server").source.clone();
        for _ in 0..random.below(3) {
            let at = random.below(world.size() / 512) * 512;
            source.disk().write_at(at, &[random.bits() as u8; 512]).expect("a write");
        }
        drop(source);
        world.near.state().pass(EVERY);
        MEMORY.reset_peak_usage();
        let began = processor_time();
        world.sync(which, &options, Cuts::NEVER).unwrap_or_else(|error| panic!("sync {n}: {error}"));
        let (time, most) = (processor_time().saturating_sub(began), MEMORY.peak_usage());
        // What the judge remembers of a year is no memory of the syncs.
        *world.moments.lock().expect("the moments") = Moments::default();
        world.near.state().files.sweep();
        let measured = match n {
            n if (2 * span..3 * span).contains(&n) => &mut early,
            n if n >= all - span => &mut late,
            _ => continue,
        };
        measured.times.push(time);
        measured.memory = measured.memory.max(most as f64);
        let kept = (kept(&world.near, &world.state), kept(&world.far, &world.folder_of(which)));
        measured.source.add(kept.0);
        measured.replica.add(kept.1);
    }
    assert_eq!(world.raw(which), Some(world.content()), "the replica is the source");
    println!("{all} syncs\n  early: {}\n  late:  {}", told(&early), told(&late));
    // A sample has few moments, and what is written in them differs; a machine that does other things is slower for minutes.
    // What grows with each sync is seen in the year.
    let more = if all < 8 * WEEK { 2.0 } else { MORE };
    for (what, before, after) in [
        ("bytes of the source's state", early.source.bytes, late.source.bytes),
        ("files of the source's state", early.source.files, late.source.files),
        ("bytes of the replica's state", early.replica.bytes, late.replica.bytes),
        ("files of the replica's state", early.replica.files, late.replica.files),
    ] {
        let mean = |sum: usize| sum as f64 / span as f64;
        let (before, after) = (mean(before), mean(after));
        assert!(after <= before * more, "{what}: {before} early, {after} late");
    }
    assert!(late.memory <= early.memory * more, "memory: {} early, {} late", early.memory, late.memory);
    // A sync reads the history, which a sample has not filled at first: how far that grows is bounded above.
    let filled = (late.source.bytes as f64 / early.source.bytes as f64).max(1.0);
    let (before, after) = (median(early.times), median(late.times));
    assert!(after <= before * more * filled, "a sync took {before} s early, {after} s late");
}

fn told(span: &Span) -> String {
    let (syncs, median) = (span.times.len().max(1), median(span.times.clone()) * 1e3);
    let kept = |kept: &Kept| format!("{} bytes in {} files", kept.bytes / syncs, kept.files / syncs);
    let (source, replica) = (kept(&span.source), kept(&span.replica));
    format!(
        "{median:.3} ms a sync; at the source {source}, at the replica {replica}; {:.1} MB",
        span.memory / 1e6
    )
}
