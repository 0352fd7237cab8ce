//! What a link of any kind must do.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use device::Buf;

use crate::flow::transport::WINDOW;
use crate::tls::tests::over_tls;
use crate::{Error, Link, Message, widen};

fn message(kind: u8, len: usize) -> Message {
    Message { kind, head: vec![kind; 7], body: Buf::new(len) }
}

pub(crate) fn pipe() -> (File, File) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    (reader.into(), writer.into())
}

/// A link over two pipes within the process.
fn piped() -> (Link, Link) {
    let (a_in, b_out) = pipe();
    let (b_in, a_out) = pipe();
    for fd in [&a_out, &b_out] {
        widen(fd);
    }
    (Link::pipe(a_in, a_out), Link::pipe(b_in, b_out))
}

/// What a link of any kind must do: in `check`, `a` and `b` are its ends.
fn every_link(check: fn(Link, Link)) {
    every_near_link(check);
    let (a, b) = over_tls(3);
    check(a, b);
}

/// What a link must do in time: only for links that need no more of a busy machine than a memory copy.
fn every_near_link(check: fn(Link, Link)) {
    let (a, b) = Link::pair();
    check(a, b);
    let (a, b) = piped();
    check(a, b);
}

#[test]
fn messages_arrive_in_order_and_the_end_is_clean() {
    every_link(|a, b| {
        let traffic = (a.traffic(), b.traffic());
        let ((a_tx, a_rx), (b_tx, b_rx)) = (a.split(), b.split());
        let far = thread::spawn(move || {
            while let Some(message) = b_rx.recv().unwrap() {
                b_tx.send(message).unwrap();
            }
            b_tx.finish().unwrap();
            assert!(b_rx.recv().unwrap().is_none(), "the end stays the end");
        });
        for (kind, len) in [(0, 0), (255, 1), (7, 4096), (8, MAX), (9, 3)] {
            let mut sent = message(kind, len);
            if let Some(last) = sent.body.last_mut() {
                *last = 42;
            }
            a_tx.send(sent).unwrap();
            let got = a_rx.recv().unwrap().unwrap();
            assert_eq!((got.kind, &got.head[..], got.body.len()), (kind, &[kind; 7][..], len));
            assert_eq!(got.body.last().copied(), (len > 0).then_some(42));
            assert!(len == 0 || got.body.as_ptr() as usize % Buf::ALIGN == 0);
        }
        a_tx.send_json(3, &vec!["x"]).unwrap();
        let got = a_rx.recv().unwrap().unwrap();
        assert_eq!(got.json::<Vec<String>>().unwrap(), ["x"]);
        assert!(matches!(got.json::<u32>(), Err(Error::Bad { .. })));
        a_tx.finish().unwrap();
        assert!(a_rx.recv().unwrap().is_none());
        far.join().unwrap();
        assert!(traffic.0.sent() > MAX as u64 && traffic.0.sent() == traffic.1.received());
        assert_eq!(traffic.0.received(), traffic.1.sent());
    });
    const MAX: usize = crate::MAX_BODY;
}

#[test]
fn both_ways_flood() {
    every_link(|a, b| {
        let sides = [a, b].map(|link| {
            let (tx, rx) = link.split();
            let sender = thread::spawn(move || {
                for i in 0..200usize {
                    // Small ones between, and some that overdraw the window.
                    let len = [17, crate::MAX_BODY, 300_000][i % 3];
                    let head = vec![1; if i % 50 == 0 { crate::MAX_HEAD } else { 10 }];
                    tx.send(Message { kind: i as u8, head, body: Buf::new(len) }).unwrap();
                }
                tx.finish().unwrap();
            });
            let receiver = thread::spawn(move || {
                let mut count = 0usize;
                while let Some(message) = rx.recv().unwrap() {
                    assert_eq!(message.kind, count as u8);
                    count += 1;
                    if count % 40 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                }
                count
            });
            (sender, receiver)
        });
        for (sender, receiver) in sides {
            sender.join().unwrap();
            assert_eq!(receiver.join().unwrap(), 200);
        }
    });
}

#[test]
fn the_window_bounds_what_is_in_flight() {
    let near = i64::from(WINDOW);
    // Over TLS it is a share of what all sessions of this process have together, and other tests have some.
    let far = near / 2..=8 * near;
    for ((a, b), windows) in [(Link::pair(), near..=near), (piped(), near..=near), (over_tls(3), far)] {
        a.ready().unwrap();
        let end = Arc::clone(a.endpoint());
        let credit = move || end.shared().window.credit().unwrap();
        let window = credit();
        assert!(windows.contains(&window), "a window of {window}");
        let window = window as u64;
        let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
        let traffic = tx.traffic();
        let sender = thread::spawn(move || {
            let mut sent = 0u64;
            while tx.send(message(1, 1 << 20)).is_ok() {
                sent += 1;
            }
            sent
        });
        while credit() > 0 || traffic.sent() < window {
            assert!(!sender.is_finished(), "{} sent", traffic.sent());
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(200));
        let bound = window + crate::message::MAX_COST;
        assert!((window..bound).contains(&traffic.sent()), "{} in flight", traffic.sent());
        for _ in 0..100 {
            rx.recv().unwrap().unwrap();
        }
        drop(rx);
        let most = 102 + (window >> 20);
        assert!((100..=most).contains(&sender.join().unwrap()));
    }
}

#[test]
fn many_small_messages_are_as_bounded_as_few_large_ones() {
    // What one of them takes at least: its place in the queue, and a page for any body.
    for (body, takes) in [(0, 100), (1, 4096)] {
        for (a, b) in [Link::pair(), piped()] {
            let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
            let sent = Arc::new(AtomicU64::new(0));
            let count = Arc::clone(&sent);
            let sender = thread::spawn(move || {
                while tx.send(Message { body: Buf::new(body), ..Message::default() }).is_ok() {
                    count.fetch_add(1, Ordering::SeqCst);
                }
            });
            let (mut before, until) = (0, Instant::now() + Duration::from_secs(20));
            // Until it stands still.
            loop {
                thread::sleep(Duration::from_millis(300));
                let now = sent.load(Ordering::SeqCst);
                if now == before && now > 0 {
                    break;
                }
                assert!(Instant::now() < until);
                before = now;
            }
            assert!(before * takes <= u64::from(WINDOW), "{before} of {body} bytes");
            drop(rx);
            sender.join().unwrap();
        }
    }
}

#[test]
fn a_half_that_is_dropped_cuts_the_link() {
    every_link(|a, b| {
        let ((a_tx, a_rx), (b_tx, b_rx)) = (a.split(), b.split());
        a_tx.send(message(1, 5)).unwrap();
        drop(a_tx);
        assert_eq!(b_rx.recv().unwrap().unwrap().kind, 1, "what was sent before still arrives");
        assert!(b_rx.recv().unwrap_err().is_cut());
        assert!(b_rx.recv().unwrap_err().is_cut());
        assert!((0..100).find_map(|_| b_tx.send(message(1, 1 << 20)).err()).unwrap().is_cut());
        assert!((0..100).find_map(|_| a_rx.recv().err()).unwrap().is_cut());
    });
    every_link(|a, b| {
        drop(a);
        let (b_tx, b_rx) = b.split();
        assert!(b_rx.recv().unwrap_err().is_cut());
        assert!(b_tx.send(message(1, 1)).unwrap_err().is_cut());
        assert!(b_tx.finish().unwrap_err().is_cut());
    });
}

#[test]
fn a_sender_that_waits_for_credit_learns_of_the_cut() {
    every_link(|a, b| {
        let ((tx, _a_rx), far) = (a.split(), b);
        let sender = thread::spawn(move || {
            loop {
                if let Err(error) = tx.send(message(1, 1 << 20)) {
                    return error;
                }
            }
        });
        thread::sleep(Duration::from_millis(100));
        drop(far);
        assert!(sender.join().unwrap().is_cut());
    });
}

#[test]
fn a_message_that_is_too_long_is_refused_and_the_link_goes_on() {
    every_link(|a, b| {
        let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
        let error = tx.send(message(5, crate::MAX_BODY + 1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the body of a message of kind 5 has 2097153 bytes; the limit is 2097152"
        );
        let head = vec![0; crate::MAX_HEAD + 1];
        assert!(tx.send(Message { head, ..Message::default() }).is_err());
        tx.send(message(6, 1)).unwrap();
        assert_eq!(rx.recv().unwrap().unwrap().kind, 6);
    });
}

#[test]
fn the_limit_holds_within_a_tenth() {
    every_near_link(|a, b| {
        let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
        let rate = 16 << 20;
        tx.limit(rate);
        let far = thread::spawn(move || while let Ok(Some(_)) = rx.recv() {});
        let takes = || {
            let started = Instant::now();
            for _ in 0..64 {
                tx.send(message(1, 256 << 10)).unwrap();
            }
            started.elapsed().as_secs_f64()
        };
        // The last message of a pair is handed over before its time has passed. On a busy machine one run may take longer.
        let within = (0..10).any(|_| {
            let seconds = takes();
            assert!(seconds >= 0.9, "16 MiB at 16 MiB/s took {seconds:.3} s");
            seconds < 1.1
        });
        assert!(within, "16 MiB at 16 MiB/s took over 1.1 s each time");
        tx.limit(0);
        assert!((0..10).any(|_| takes() < 0.5), "the limit was lifted");
        tx.finish().unwrap();
        far.join().unwrap();
    });
}

#[test]
fn it_is_fast_enough_to_be_no_bottleneck() {
    every_near_link(|a, b| {
        let ((tx, _a_rx), (_b_tx, rx)) = (a.split(), b.split());
        let started = Instant::now();
        let far = thread::spawn(move || {
            let mut bytes = 0;
            while let Some(message) = rx.recv().unwrap() {
                bytes += message.body.len();
            }
            bytes
        });
        for _ in 0..1024 {
            tx.send(message(1, 1 << 20)).unwrap();
        }
        tx.finish().unwrap();
        assert_eq!(far.join().unwrap(), 1 << 30);
        let rate = 1.0 / started.elapsed().as_secs_f64();
        println!("{rate:.2} GiB/s");
        // Far below what is usual, so that a busy machine does not fail the test.
        assert!(rate > 0.1, "{rate:.3} GiB/s");
    });
}
