//! Readers of a view give way to a guest that writes, and to no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use device::{Buf, Disk, Kind, Piece, Queue, Request};
use source::{ControlServer, Handle, Source, SourceOptions, StateDir, View};

/// Long enough for anything, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(15);
const READ: u64 = 64 << 10;

fn request(kind: Kind, offset: u64, len: u64) -> Request {
    let mut buf = Buf::new(len as usize);
    buf.set_len(len as usize);
    Request { kind, pieces: [Piece { offset, len }].into_iter().collect(), buf, token: 0 }
}

fn run(queue: &mut dyn Queue, request: Request) {
    queue.submit(request);
    queue.start();
    queue.complete(true).unwrap().result.unwrap();
}

/// Reads 16 pieces, of which each may wait.
fn read(view: &Arc<View>) {
    let mut queue = view.clone().queue(4).unwrap();
    (0..16).for_each(|at| run(&mut *queue, request(Kind::Read, at * READ, READ)));
}

/// A served disk, and a guest that writes to it until told otherwise.
#[test]
fn a_reader_waits_for_a_guest_that_writes_and_for_no_other() {
    let temp = tempfile::tempdir().unwrap();
    let image = temp.path().join("vm.raw");
    std::fs::File::create(&image).unwrap().set_len(4 << 20).unwrap();
    let state = StateDir::find(Some(&temp.path().join("state")));
    let source = Arc::new(Source::open(&state, &image, &SourceOptions::default()).unwrap());
    let _control = ControlServer::start(source.clone()).unwrap();
    // A reader in a process of its own, as far as it can tell.
    let handle = Handle::attach(&state, &image.to_string_lossy(), &SourceOptions::default()).unwrap();
    handle.be_polite(true);
    let view = Arc::new(handle.view(false).unwrap());
    read(&view);
    assert_eq!((view.waits(), view.at_once()), (0, u64::MAX), "there was nobody to wait for");
    let writes = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut queue = Arc::new(source.disk().clone()).queue(1).unwrap();
            while writes.load(Relaxed) {
                run(&mut *queue, request(Kind::Write { fua: false }, 1 << 20, 4096));
            }
        });
        let until = Instant::now() + LIMIT;
        while view.waits() == 0 && Instant::now() < until {
            read(&view);
        }
        let waits = view.waits();
        handle.be_polite(false);
        read(&view);
        let at_full_speed = view.waits();
        writes.store(false, Relaxed);
        assert!(waits > 0, "nobody waited");
        assert_eq!(at_full_speed, waits);
    });
    handle.be_polite(true);
    let until = Instant::now() + LIMIT;
    let rests = |before| {
        read(&view);
        view.waits() == before && view.at_once() == u64::MAX
    };
    while !rests(view.waits()) {
        assert!(Instant::now() < until, "it still waits for a guest that has gone");
    }
}
