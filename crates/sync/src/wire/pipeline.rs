//! The stages of a site: one produces items, some work on them, one takes the results in order. The number of threads is a
//! matter of [`Stages`]: the four models of "A Remote Mirroring Architecture with Adaptively Cooperative Pipelining".

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use compare::in_order;
use crossbeam_channel::bounded;
use serde::{Deserialize, Serialize};

use crate::error::SyncError;

/// How a site's work is shared among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stages {
    /// Threads that compress or decompress: 0 for one thread that does everything, `None` for as many as keep the other
    /// stages busy.
    pub workers: Option<u32>,
    /// A batch may begin before the previous one is done.
    pub overlap: bool,
}

impl Stages {
    /// One thread for everything.
    pub const SERIAL: Stages = Stages { workers: Some(0), overlap: false };
    /// A thread for each stage.
    pub const FINE: Stages = Stages { workers: Some(1), overlap: true };
    /// Two threads work on one batch.
    pub const THREADS: Stages = Stages { workers: Some(2), overlap: false };
    /// Two threads work on one batch, and the next batch begins before that is done.
    pub const HYBRID: Stages = Stages { workers: Some(2), overlap: true };
    /// As many threads as are measured to be useful.
    pub const ADAPTIVE: Stages = Stages { workers: None, overlap: true };

    /// The most worker threads.
    fn threads(self) -> usize {
        let all = || available_parallelism().map_or(2, |n| n.get());
        self.workers.map_or_else(all, |count| count.min(MOST_WORKERS) as usize)
    }

    /// Runs the stages until the first ends. It emits items by calling its argument; an error from that
    /// tells it to stop. `stop` is called when another stage has failed, to wake the first.
    pub(crate) fn run<T: Send, R: Send, S>(
        self,
        produce: impl FnOnce(&mut dyn FnMut(T) -> Result<(), SyncError>) -> Result<(), SyncError> + Send,
        own: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, T) -> Result<R, SyncError> + Sync,
        mut sink: impl FnMut(R) -> Result<(), SyncError>,
        stop: impl Fn() + Sync,
    ) -> Result<(), SyncError> {
        if self.threads() == 0 {
            let mut own = own();
            return produce(&mut |item| sink(work(&mut own, item)?));
        }
        let (items_in, items) = bounded::<T>(0);
        let permits = Permits::new(if self.workers.is_some() { self.threads() } else { 1 }, self.threads());
        let measured = self.workers.is_none();
        std::thread::scope(|scope| {
            let permits = &permits;
            let producing = move || {
                produce(&mut |item| {
                    let began = Instant::now();
                    let sent = items_in.send(item).map_err(|_| SyncError::Stopped);
                    permits.waited_to_give(began.elapsed());
                    sent
                })
            };
            let producing = std::thread::Builder::new().name("produce".into()).spawn_scoped(scope, producing);
            let producing = producing.map_err(SyncError::io("start a thread"))?;
            let taken = in_order(
                self.threads(),
                || Ok(items.recv().ok()),
                own,
                |own, item| {
                    let _one = permits.take();
                    work(own, item).inspect_err(|_| stop())
                },
                |result| {
                    let taken = sink(result).inspect_err(|_| stop());
                    if measured {
                        permits.adjust();
                    }
                    taken
                },
            );
            // The first stage must not wait for items to be taken.
            drop(items);
            let produced = producing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match (taken, produced) {
                // Unfinished work of the first stage may be lost with its error.
                (Err(_), Err(error @ SyncError::Source(_))) => Err(error),
                (taken, produced) => taken.and(produced),
            }
        })
    }
}

/// How many workers may work at a time: one more while the first stage waits for them, one less while they wait for it.
struct Permits {
    state: Mutex<PermitsState>,
    changed: Condvar,
    most: usize,
}

struct PermitsState {
    limit: usize,
    busy: usize,
    since: Instant,
    worked: Duration,
    waited: Duration,
}

/// The most threads that may be requested: a plan may come from a peer.
const MOST_WORKERS: u32 = 64;

/// How often the number of workers is adjusted.
const LOOK_EVERY: Duration = Duration::from_millis(200);

impl Permits {
    fn new(limit: usize, most: usize) -> Permits {
        let (worked, waited) = (Duration::ZERO, Duration::ZERO);
        let state = PermitsState { limit, busy: 0, since: Instant::now(), worked, waited };
        Permits { state: Mutex::new(state), changed: Condvar::new(), most }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, PermitsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Permit<'_> {
        let mut state = self.state();
        while state.busy >= state.limit {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.busy += 1;
        Permit { permits: self, began: Instant::now() }
    }

    fn waited_to_give(&self, waited: Duration) {
        self.state().waited += waited;
    }

    fn adjust(&self) {
        let mut state = self.state();
        let past = state.since.elapsed();
        if past < LOOK_EVERY {
            return;
        }
        let busy = state.worked.as_secs_f64() / past.as_secs_f64();
        let held_up = state.waited.as_secs_f64() / past.as_secs_f64();
        // Workers are busy nearly all the time, and another stage waits for them.
        if busy > 0.8 * state.limit as f64 && held_up > 0.2 {
            state.limit = (state.limit + 1).min(self.most);
        } else if busy < 0.7 * (state.limit as f64 - 1.0) {
            state.limit = (state.limit - 1).max(1);
        }
        (state.since, state.worked, state.waited) = (Instant::now(), Duration::ZERO, Duration::ZERO);
        drop(state);
        self.changed.notify_all();
    }
}

struct Permit<'a> {
    permits: &'a Permits,
    began: Instant,
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = self.permits.state();
        state.busy -= 1;
        state.worked += self.began.elapsed();
        drop(state);
        self.permits.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doubled(stages: Stages) -> Vec<u32> {
        let mut taken = Vec::new();
        let made = |give: &mut dyn FnMut(u32) -> Result<(), SyncError>| (0..1000).try_for_each(give);
        let sink = |n| {
            taken.push(n);
            Ok(())
        };
        stages.run(made, || (), |(), n| Ok(n * 2), sink, || {}).unwrap();
        taken
    }

    #[test]
    fn every_model_keeps_the_order() {
        let expected: Vec<u32> = (0..1000).map(|n| n * 2).collect();
        for stages in [Stages::SERIAL, Stages::FINE, Stages::THREADS, Stages::HYBRID, Stages::ADAPTIVE] {
            assert_eq!(doubled(stages), expected, "{stages:?}");
        }
    }

    #[test]
    fn a_failure_anywhere_ends_all_of_it() {
        for stages in [Stages::SERIAL, Stages::FINE, Stages::HYBRID, Stages::ADAPTIVE] {
            for fails in ["produce", "work", "sink"] {
                let failed = |at: &str| match at == fails {
                    true => Err(SyncError::Refused(at.into())),
                    false => Ok(()),
                };
                let made = |give: &mut dyn FnMut(u32) -> Result<(), SyncError>| {
                    (0..10).try_for_each(&mut *give)?;
                    failed("produce")?;
                    (10..).try_for_each(give)
                };
                let work = |_: &mut (), n| if n == 5 { failed("work").map(|()| n) } else { Ok(n) };
                let sink = |n| if n == 5 { failed("sink") } else { Ok(()) };
                let error = stages.run(made, || (), work, sink, || {}).unwrap_err();
                assert_eq!(error.to_string(), fails, "{stages:?}");
            }
        }
    }

    #[test]
    fn workers_are_added_while_they_are_what_all_wait_for() {
        let permits = Permits::new(1, 4);
        for _ in 0..3 {
            permits.state().since = Instant::now() - Duration::from_secs(1);
            permits.state().worked = Duration::from_secs(10);
            permits.waited_to_give(Duration::from_secs(1));
            permits.adjust();
        }
        assert_eq!(permits.state().limit, 4);
        permits.state().since = Instant::now() - Duration::from_secs(1);
        permits.adjust();
        assert_eq!(permits.state().limit, 3);
    }
}
