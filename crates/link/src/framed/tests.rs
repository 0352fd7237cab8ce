//! What two peers, bad ones among them, say to each other over streams.

use std::sync::mpsc;

use proptest::prelude::*;

use device::Buf;

use super::format::{HELLO, MAGIC};
use super::*;
use crate::Link;
use crate::message::{FRAMING, MAX_BODY, MAX_HEAD};
use crate::tests::pipe;

/// Runs `check` in a thread, and fails when it hangs.
fn in_time<T: Send + 'static>(check: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    let worker = thread::spawn(move || done.send(check()));
    match wait.recv_timeout(Duration::from_secs(20)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => unreachable!("a value was sent"),
        },
    }
}

/// A writer that keeps what is written.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A header, whether or not a peer may send it.
fn unit(what: u8, kind: u8, head: u32, body: u32) -> [u8; FRAMING] {
    let mut bytes = [0; FRAMING];
    (bytes[0], bytes[1]) = (what, kind);
    bytes[4..8].copy_from_slice(&head.to_le_bytes());
    bytes[8..].copy_from_slice(&body.to_le_bytes());
    bytes
}

const MESSAGE: u8 = 0;
const CREDIT: u8 = 1;
const GOODBYE: u8 = 2;
const PING: u8 = 3;

fn hello() -> Vec<u8> {
    let mut hello = [&MAGIC[..], &VERSION.to_le_bytes(), &[0xff, 0xff]].concat();
    hello.extend_from_slice(&WINDOW.to_le_bytes());
    hello
}

/// What one side of a short conversation writes.
fn conversation() -> Vec<u8> {
    let kept = Kept::default();
    let link = Link::pipe(io::Cursor::new(hello()), kept.clone());
    let (tx, _rx) = link.split();
    let _ = tx.send(Message { kind: 1, head: b"head".to_vec(), body: Buf::from(&b"a body"[..]) });
    // The scripted peer has gone by now, which may be known or not: write on all the same.
    let mut bytes = lock(&kept.0).clone();
    bytes.truncate(HELLO);
    for (kind, head, body) in [(1, &b"head"[..], &b"a body"[..]), (2, b"", b""), (3, b"x", b"")] {
        bytes.extend_from_slice(&unit(MESSAGE, kind, head.len() as u32, body.len() as u32));
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(body);
    }
    bytes.extend_from_slice(&unit(CREDIT, 0, 0, 100));
    bytes.extend_from_slice(&unit(GOODBYE, 0, 0, 0));
    bytes
}

/// Receives until the end.
fn hear(bytes: &[u8]) -> (usize, Result<()>) {
    let input = io::Cursor::new(bytes.to_vec());
    in_time(move || {
        let (_tx, rx) = Link::pipe(input, Kept::default()).split();
        let mut count = 0;
        loop {
            match rx.recv() {
                Ok(Some(_)) => count += 1,
                Ok(None) => return (count, Ok(())),
                Err(error) => return (count, Err(error)),
            }
        }
    })
}

#[test]
fn a_cut_at_every_byte_is_a_cut() {
    let whole = conversation();
    assert_eq!(whole[..HELLO], hello()[..]);
    for at in 0..whole.len() {
        let (count, result) = hear(&whole[..at]);
        assert!(result.unwrap_err().is_cut(), "cut at {at}");
        assert!(count <= 3);
    }
    assert_eq!(hear(&whole), (3, Ok(())));
}

#[test]
fn a_cut_of_the_other_direction_at_every_byte_is_a_cut() {
    /// A writer that fails after so many bytes.
    struct Cut(usize);
    impl Write for Cut {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let take = bytes.len().min(self.0);
            self.0 -= take;
            if take == 0 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(take) }
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    // The hello, a message of 12 + 4 + 6 bytes, the goodbye.
    for at in 0..HELLO + 22 + FRAMING {
        let error = in_time(move || {
            let (reader, keep) = pipe();
            (&keep).write_all(&hello()).unwrap();
            let (tx, _rx) = Link::pipe(reader, Cut(at)).split();
            let message = Message { kind: 1, head: b"head".to_vec(), body: Buf::from(&b"a body"[..]) };
            tx.send(message).and_then(|()| tx.finish()).unwrap_err()
        });
        assert!(error.is_cut(), "cut at {at}: {error}");
    }
}

#[test]
fn another_version_is_named() {
    let mut other = conversation();
    other[8..10].copy_from_slice(&7u16.to_le_bytes());
    let error = hear(&other).1.unwrap_err();
    assert_eq!(
        error.to_string(),
        "the far side speaks version 7 of the link, this dsync speaks version 2: install the same version of dsync on both sides"
    );
}

#[test]
fn what_is_not_dsync_is_shown() {
    for (said, shown) in [
        ("Welcome to Ubuntu!\nlast login: ...\n", "Welcome to Ubuntu!"),
        ("bash: dsync: command not found", "bash: dsync: command not found"),
        ("\n\n  hi", "  hi"),
        ("x", "x"),
        ("\u{93}", "\u{93}"),
    ] {
        match hear(said.as_bytes()).1 {
            Err(Error::NotDsync { said, .. }) => assert_eq!(said, shown),
            other => panic!("{said:?}: {other:?}"),
        }
    }
    // It need not end, nor write a whole line.
    let (reader, keep) = pipe();
    (&keep).write_all(b"login: ").unwrap();
    let error = in_time(move || Link::pipe(reader, Kept::default()).ready().unwrap_err());
    assert!(matches!(error, Error::NotDsync { .. }));
}

#[test]
fn what_no_peer_sends_is_refused() {
    let with = |units: &[[u8; FRAMING]]| {
        let mut bytes = hello();
        units.iter().for_each(|unit| bytes.extend_from_slice(unit));
        hear(&bytes).1
    };
    for units in [
        &[unit(4, 0, 0, 0)][..],
        &[unit(PING, 1, 0, 0)],
        &[unit(PING, 0, 0, 1)],
        &[unit(MESSAGE, 0, MAX_HEAD as u32 + 1, 0)],
        &[unit(MESSAGE, 0, 0, MAX_BODY as u32 + 1)],
        &[unit(MESSAGE, 0, u32::MAX, u32::MAX)],
        &[unit(CREDIT, 1, 0, 0)],
        &[unit(CREDIT, 0, 1, 0)],
        &[[0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
    ] {
        assert!(matches!(with(units), Err(Error::Bad { .. })), "{units:?}");
    }
    let mut none = hello();
    none[12..].fill(0);
    assert!(matches!(hear(&none).1, Err(Error::Bad { .. })));
    let mut none = hello();
    none[10..12].fill(0);
    assert!(matches!(hear(&none).1, Err(Error::Bad { .. })));
    // After the goodbye the end stands, whatever comes.
    assert_eq!(with(&[unit(GOODBYE, 0, 0, 0), unit(MESSAGE, 0, 0, 0), unit(9, 9, 9, 9)]), Ok(()));
    // Sending on without credit is noticed.
    let error = in_time(|| {
        let (reader, mut peer) = pipe();
        let (_tx, rx) = Link::pipe(reader, Kept::default()).split();
        peer.write_all(&hello()).unwrap();
        let body = vec![0; MAX_BODY];
        for _ in 0..7 {
            let unit = unit(MESSAGE, 0, 0, MAX_BODY as u32);
            if peer.write_all(&unit).and_then(|()| peer.write_all(&body)).is_err() {
                break;
            }
        }
        drop(peer);
        loop {
            match rx.inbox_end() {
                Some(error) => break error,
                None => thread::sleep(Duration::from_millis(5)),
            }
        }
    });
    assert!(matches!(error, Error::Bad { .. }), "{error}");
}

impl crate::Receiver {
    fn inbox_end(&self) -> Option<Error> {
        self.shared().inbox.failure(Duration::ZERO)
    }
}

proptest! {
    #[test]
    fn garbage_never_hangs_and_never_panics(
        tail in proptest::collection::vec(any::<u8>(), 0..300), whole in 0usize..100, flip in any::<(usize, u8)>()
    ) {
        let mut bytes = conversation();
        bytes.truncate(whole);
        bytes.extend_from_slice(&tail);
        let _ = hear(&bytes);
        let mut bytes = conversation();
        let at = flip.0 % bytes.len();
        bytes[at] ^= flip.1;
        let _ = hear(&bytes);
    }
}
