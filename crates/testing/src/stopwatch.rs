//! How long tests take. A test that hangs is ended with its name, and `make test` shows the slowest.
//!
//! A test's time runs from its first scratch folder to the end of its thread, which bears its name.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use crate::needs::{guests_in_full, say};

/// A test that takes longer hangs.
fn limit() -> Duration {
    // Guests have limits of their own.
    Duration::from_secs(if guests_in_full() { 4 * 3600 } else { 400 })
}

/// Those that run, and since when.
static RUNNING: Mutex<BTreeMap<String, Instant>> = Mutex::new(BTreeMap::new());

fn running() -> MutexGuard<'static, BTreeMap<String, Instant>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends with its thread.
struct Stopwatch {
    test: Option<String>,
}

thread_local! {
    static STOPWATCH: Stopwatch = Stopwatch::start();
}

/// Takes the time of this thread's test from now on, unless it runs already.
pub(crate) fn start() {
    // A thread that ends has no test any more.
    let _ = STOPWATCH.try_with(|_| ());
}

impl Stopwatch {
    fn start() -> Stopwatch {
        // With one thread for all, tests have no name, and no time of their own.
        let test = std::thread::current().name().filter(|name| *name != "main").map(str::to_owned);
        if let Some(test) = &test {
            running().insert(test.clone(), Instant::now());
            watch();
        }
        Stopwatch { test }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        let Some(test) = self.test.take() else { return };
        let Some(since) = running().remove(&test) else { return };
        let Some(file) = std::env::var_os("DSYNC_TEST_TIMES") else { return };
        let line = format!("{:8.1} {test}\n", since.elapsed().as_secs_f64());
        let open = std::fs::OpenOptions::new().append(true).create(true).open(file);
        // Nobody misses it but the table of the slowest.
        let _ = open.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// Ends this program once a test hangs.
fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(Duration::from_secs(1));
                let hangs = running()
                    .iter()
                    .find(|(_, since)| since.elapsed() > limit())
                    .map(|(test, _)| test.clone());
                if let Some(test) = hangs {
                    say(&format!("test {test} hangs: it runs for more than {:?}", limit()));
                    std::process::abort();
                }
            }
        });
    });
}
