//! The matrix, a sample of it; with `DSYNC_SOAK=1` a million runs. `DSYNC_SEED` repeats one run, `DSYNC_ROUNDS` says how many.
#![allow(missing_docs)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use sim::campaign;
use sim::cell::Table;
use testing::{number, rounds};

/// Runs that take longer than this hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder in which a source may be looked for.
fn scratch() -> tempfile::TempDir {
    let scratch = testing::in_memory();
    std::fs::write(scratch.path().join("disk"), b"").unwrap();
    scratch
}

#[test]
fn whatever_fails_a_replica_is_what_it_says() {
    let scratch = scratch();
    let all = if number("DSYNC_SEED").is_some() { 1 } else { rounds(450, 1_000_000) };
    let count = number("DSYNC_ROUNDS").unwrap_or(all);
    let first = testing::seed("the matrix");
    println!("DSYNC_ROUNDS={count}");
    let threads = number("DSYNC_THREADS").unwrap_or(4).min(count);
    // Only cells whose name has this in it.
    let only = std::env::var("DSYNC_CELL").ok();
    let keep_going = std::env::var_os("DSYNC_KEEP_GOING").is_some();
    let (next, failed, done) = (AtomicU64::new(0), Mutex::new(Vec::new()), AtomicBool::new(false));
    let table = Mutex::new(Table::default());
    let busy = Mutex::new(std::collections::BTreeMap::<u64, Instant>::new());
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                std::thread::park_timeout(Duration::from_millis(20));
                let stuck = busy
                    .lock()
                    .unwrap()
                    .iter()
                    .find(|(_, since)| since.elapsed() > PATIENCE)
                    .map(|(n, _)| *n);
                if let Some(seed) = stuck {
                    eprintln!("DSYNC_SEED={seed} hangs");
                    std::process::exit(1);
                }
            }
        });
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let n = next.fetch_add(1, SeqCst);
                        if n >= count || (!keep_going && !failed.lock().unwrap().is_empty()) {
                            break;
                        }
                        let seed = first + n;
                        if only.as_ref().is_some_and(|only| !campaign::cell(seed).contains(only)) {
                            continue;
                        }
                        busy.lock().unwrap().insert(seed, Instant::now());
                        match campaign::run(seed, scratch.path()) {
                            Ok(counted) => table.lock().unwrap().add(counted),
                            Err(failure) => {
                                println!("{failure}");
                                failed
                                    .lock()
                                    .unwrap()
                                    .push(format!("{}: {} {}", failure.seed, failure.cell, failure.why));
                            }
                        }
                        busy.lock().unwrap().remove(&seed);
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        done.store(true, SeqCst);
    });
    let trails = campaign::TRAILS.load(SeqCst);
    println!("{trails} earlier epochs were looked at in trails");
    assert!(
        count < 300 || only.is_some() || trails > count / 4,
        "hardly any replica knows the way to its epoch"
    );
    println!("{}{:.1} s", table.into_inner().unwrap(), began.elapsed().as_secs_f64());
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} runs failed:\n{}", failed.len(), failed.join("\n"));
}

/// The campaign is no better than what it finds: each write in flight at a checkpoint is lost, so its sample must see that.
#[test]
fn a_tracker_that_forgets_writes_in_flight_is_found() {
    let scratch = scratch();
    let first = testing::seed("the canary");
    let live = |seed: &u64| ["Bpf", "Dm"].iter().any(|kind| campaign::cell(*seed).starts_with(kind));
    let seeds = (first..).filter(live).take(300);
    let runs =
        seeds.zip(1..).find_map(|(seed, run)| Some((campaign::canary(seed, scratch.path()).err()?, run)));
    let (found, run) = runs.expect("nothing was found in 300 runs");
    println!("found in run {run}: {}", found.why);
}
