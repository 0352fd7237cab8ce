//! A log with a rate limit, so that strangers cannot fill it.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::flow::lock;

/// The most lines per second; duplicates are dropped.
const MOST: usize = 20;

/// Passes on a bounded number of lines per second, and reports how many it dropped.
pub(crate) struct RateLimitedLog {
    write: Box<dyn Fn(&str) + Send + Sync>,
    state: Mutex<LogState>,
}

struct LogState {
    /// The start of the current second, and the lines written in it.
    since: Instant,
    written: HashSet<String>,
    left_out: u64,
}

impl RateLimitedLog {
    pub(crate) fn new(write: impl Fn(&str) + Send + Sync + 'static) -> RateLimitedLog {
        let state = LogState { since: Instant::now(), written: HashSet::new(), left_out: 0 };
        RateLimitedLog { write: Box::new(write), state: Mutex::new(state) }
    }

    pub(crate) fn line(&self, line: &str) {
        let mut state = lock(&self.state);
        if state.since.elapsed() >= Duration::from_secs(1) {
            state.since = Instant::now();
            state.written.clear();
        }
        if state.written.len() >= MOST || state.written.contains(line) {
            state.left_out += 1;
            return;
        }
        state.written.insert(line.to_string());
        if state.left_out > 0 {
            let left_out = std::mem::take(&mut state.left_out);
            (self.write)(&format!("{left_out} more lines like these were dropped"));
        }
        (self.write)(line);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_flood_of_lines_is_cut_short_and_counted() {
        let written = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&written);
        let log = RateLimitedLog::new(move |line| lock(&lines).push(line.to_string()));
        (0..1000).for_each(|_| log.line("the same"));
        assert_eq!(*lock(&written), ["the same"]);
        (0..1000).for_each(|at| log.line(&format!("line {at}")));
        // Writing them takes at most one second.
        assert!(lock(&written).len() <= 2 * MOST + 2);
        lock(&log.state).since -= Duration::from_secs(2);
        log.line("the same");
        let written = lock(&written);
        assert_eq!(written.last().map(String::as_str), Some("the same"));
        assert!(written.iter().any(|line| line.ends_with("more lines like these were dropped")));
    }
}
