//! What passes through a link does so in the same memory again and again, of which nothing is seen afterwards. A program of its own: the
//! count is of the whole process.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::thread;

use device::Buf;
use link::{Link, Message};

/// What is sent, in bytes.
const SENT: usize = 256 << 20;
/// What both ends together may ask the system for: the window and what is at hand, for each of the sizes that messages have.
const FRESH: u64 = 80 << 20;
/// No message has this byte.
const OLD: u8 = 0xdb;

/// A stream that is looked at: the longest run of an old byte that it carried.
struct Watched(File, Arc<Mutex<usize>>);

impl Write for Watched {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let longest = bytes.split(|byte| *byte != OLD).map(<[u8]>::len).max().unwrap_or(0);
        let mut seen = self.1.lock().unwrap();
        *seen = longest.max(*seen);
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn pipe() -> (File, File) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    (reader.into(), writer.into())
}

#[test]
fn memory_is_used_again_and_shows_nothing_old() {
    // As if an earlier work had left it.
    drop((0..8).map(|_| Buf::from(&vec![OLD; 1 << 20][..])).collect::<Vec<_>>());
    let old_runs = Arc::default();
    let ((a_in, b_out), (b_in, a_out)) = (pipe(), pipe());
    let near = Link::pipe(a_in, Watched(a_out, Arc::clone(&old_runs)));
    let far = Link::pipe(b_in, b_out);
    let before = Buf::fresh();
    thread::scope(|threads| {
        threads.spawn(move || {
            let (sender, answers) = near.split();
            let mut sent = 0;
            while sent < SENT {
                // Frames grow with what was sent: memory of the sizes before must not keep out that of the next.
                let len = (sent / 64).next_power_of_two().clamp(64 << 10, 1 << 20) - 100;
                let mut body = Buf::scratch(len);
                body.fill((sent / len % 100) as u8);
                sent += len;
                sender.send(Message { kind: 1, head: vec![1; 50], body }).unwrap();
            }
            sender.finish().unwrap();
            assert!(answers.recv().unwrap().is_none());
        });
        let (sender, receiver) = far.split();
        let mut received = 0;
        while let Some(message) = receiver.recv().unwrap() {
            let first = (received / message.body.len() % 100) as u8;
            assert!(message.body.iter().all(|byte| *byte == first), "after {received} bytes");
            received += message.body.len();
        }
        sender.finish().unwrap();
        assert!(received >= SENT);
    });
    assert!(*old_runs.lock().unwrap() < 8, "old bytes were sent");
    let fresh = Buf::fresh() - before;
    assert!(fresh <= FRESH, "{} MiB were fresh", fresh >> 20);
}
