//! One rule for every conversation over any transport: a side sends something at least four times within the timeout, a ping if
//! it has nothing else, and a side that receives nothing for that long cuts the link. The shorter timeout of both sides, from their
//! hellos, applies to both.
//!
//! Threads of the link do this, so the layers above may be busy for as long as they like. Intervals are counted, not measured:
//! a process that was itself stopped for a while receives what has arrived meanwhile before it decides.
//!
//! To cut the link also ends any read or write that waits on it and any reading of a disk for the peer, and releases the replica and the
//! source: so it is with a host that is switched off, of which no word comes. It takes a quarter of the timeout more at most. No listener
//! waits for a lock for a peer: `--wait` is the peer's own, and ends with it.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use super::FramedStream;
use crate::flow::lock;

/// How often the peer's key is judged again: after this long at most, a key that was forgotten or has expired ends the link.
const TRUST_EVERY: Duration = Duration::from_secs(1);

/// Pings in a timeout.
const PINGS: u32 = 4;

/// Rises whenever something is received from the peer.
#[derive(Clone, Default)]
pub(crate) struct Activity(Arc<AtomicU64>);

impl Activity {
    pub(crate) fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Stops the threads that keep a link alive.
#[derive(Default)]
pub(super) struct Keepalive {
    over: Mutex<bool>,
    changed: Condvar,
    activity: Activity,
}

impl Keepalive {
    pub(super) fn new(activity: Activity) -> Keepalive {
        Keepalive { activity, ..Keepalive::default() }
    }

    pub(super) fn end(&self) {
        *lock(&self.over) = true;
        self.changed.notify_all();
    }

    /// Waits for an interval to pass. False when the link is over.
    fn rest(&self, interval: Duration) -> bool {
        let over = lock(&self.over);
        let waited = self.changed.wait_timeout_while(over, interval, |over| !*over);
        !*waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// What a thread does for a link, at every interval.
type Work = fn(&FramedStream, Duration);

/// Keeps a link alive once the peer's hello has come.
pub(super) fn start(stream: &Arc<FramedStream>, timeout: Duration) -> io::Result<()> {
    let interval = (timeout / PINGS).max(Duration::from_millis(1));
    let works = [
        ("link pings", ping as Work, interval),
        ("link watch", watch, interval),
        ("link trust", trust, TRUST_EVERY),
    ];
    for (name, run, interval) in works.into_iter().take(if stream.options.trust.is_some() { 3 } else { 2 }) {
        let stream = Arc::clone(stream);
        thread::Builder::new().name(name.into()).spawn(move || run(&stream, interval))?;
    }
    Ok(())
}

/// Sends pings while nothing else is sent. If it is stuck in a write because the peer does not read, the watch decides.
fn ping(stream: &FramedStream, interval: Duration) {
    let traffic = &stream.shared.traffic;
    let mut sent = traffic.sent();
    while stream.keepalive.rest(interval) {
        if sent == traffic.sent() && !stream.ping() {
            return;
        }
        sent = traffic.sent();
    }
}

/// Cuts the link when nothing has come for as many intervals as a timeout has.
fn watch(stream: &FramedStream, interval: Duration) {
    let keepalive = &stream.keepalive;
    let (mut heard, mut silent) = (keepalive.activity.count(), 0);
    while keepalive.rest(interval) {
        let now = keepalive.activity.count();
        silent = if now == heard { silent + 1 } else { 0 };
        heard = now;
        if silent == PINGS {
            let seconds = (interval * PINGS).as_secs_f64();
            return stream.give_up(&format!("nothing came from it for {seconds:.1} s"));
        }
    }
}

/// Ends the link when the peer's key is no longer trusted.
fn trust(stream: &FramedStream, interval: Duration) {
    let Some(trust) = &stream.options.trust else { return };
    while stream.keepalive.rest(interval) {
        if let Err(error) = trust.check() {
            return stream.distrust(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use super::*;
    use crate::framed::{NEVER, StreamOptions};
    use crate::tests::pipe;
    use crate::{Link, Message};

    const TIMEOUT: Duration = Duration::from_millis(800);

    /// A pipe whose bytes are carried until it is stopped.
    fn carried(stopped: &Arc<AtomicBool>) -> (File, File) {
        let (mut from, writer) = pipe();
        let (reader, mut to) = pipe();
        let stopped = Arc::clone(stopped);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = from.read(&mut bytes) {
                if stopped.load(Ordering::SeqCst) {
                    // Neither an end nor an error: it stays like this.
                    thread::sleep(Duration::from_secs(20));
                }
                if to.write_all(&bytes[..len]).is_err() {
                    return;
                }
            }
        });
        (reader, writer)
    }

    /// Two ends with a line between them.
    fn two(stopped: &Arc<AtomicBool>, timeouts: [Duration; 2]) -> [Link; 2] {
        let ((a_in, b_out), (b_in, a_out)) = (carried(stopped), carried(stopped));
        let mut ends = [(a_in, a_out), (b_in, b_out)].into_iter().zip(timeouts);
        [(); 2].map(|()| {
            let ((reader, writer), timeout) = ends.next().unwrap();
            Link::over(FramedStream::open("the peer", reader, writer, StreamOptions::of(timeout), None))
        })
    }

    #[test]
    fn an_idle_link_lives_and_a_silent_one_is_given_up_at_both_ends() {
        // The shorter timeout applies to both.
        for timeouts in [[TIMEOUT, TIMEOUT], [TIMEOUT, NEVER], [NEVER, TIMEOUT]] {
            let stopped = Arc::new(AtomicBool::new(false));
            let [(a_tx, a_rx), (b_tx, b_rx)] = two(&stopped, timeouts).map(Link::split);
            a_tx.send(Message::default()).unwrap();
            b_rx.recv().unwrap().unwrap();
            // No messages and no requests.
            thread::sleep(3 * TIMEOUT);
            b_tx.send(Message::default()).unwrap();
            a_rx.recv().unwrap().unwrap();

            stopped.store(true, Ordering::SeqCst);
            let began = Instant::now();
            for end in [&a_rx, &b_rx] {
                let Err(error) = end.recv_within(Duration::from_secs(10)) else {
                    panic!("it is not given up")
                };
                assert_eq!(error.to_string(), "the link to the peer was cut: nothing came from it for 0.8 s");
            }
            let took = began.elapsed();
            assert!(took > TIMEOUT / 2 && took < Duration::from_secs(10), "{took:?}");
            assert!(a_tx.send(Message::default()).is_err() && b_tx.finish().is_err());
        }
    }

    #[test]
    fn one_that_has_said_goodbye_still_hears_the_other_out() {
        let stopped = Arc::new(AtomicBool::new(false));
        let [(a_tx, a_rx), (b_tx, b_rx)] = two(&stopped, [TIMEOUT; 2]).map(Link::split);
        a_tx.finish().unwrap();
        assert!(b_rx.recv().unwrap().is_none());
        thread::sleep(3 * TIMEOUT);
        b_tx.send(Message { kind: 9, ..Message::default() }).unwrap();
        b_tx.finish().unwrap();
        assert_eq!(a_rx.recv().unwrap().unwrap().kind, 9);
        assert!(a_rx.recv().unwrap().is_none());
    }
}
