//! Readers of a view give way to a guest that writes, and to no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use device::{Buf, Disk, Piece, Queue, Request, RequestKind};
use source::{ControlServer, Handle, Source, SourceOptions, StateDir, View};

/// Long enough for anything, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(15);
const READ: u64 = 64 << 10;

fn request(kind: RequestKind, offset: u64, len: u64) -> Request {
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
    (0..16).for_each(|at| run(&mut *queue, request(RequestKind::Read, at * READ, READ)));
}

/// A served disk; its state, to be attached to; and what serves it.
struct Scene {
    _temp: tempfile::TempDir,
    source: Arc<Source>,
    handle: Handle,
    _control: ControlServer,
}

impl Scene {
    fn new(view_limit: u64) -> Scene {
        let temp = tempfile::tempdir().unwrap();
        let image = temp.path().join("vm.raw");
        // Of zeroes nothing would be saved.
        std::fs::write(&image, vec![1; 4 << 20]).unwrap();
        let state = StateDir::find(Some(&temp.path().join("state")));
        let options = SourceOptions { view_limit, ..SourceOptions::default() };
        let source = Arc::new(Source::open(&state, &image, &options).unwrap());
        let control = ControlServer::start(source.clone()).unwrap();
        let handle = Handle::attach(&state, &image.to_string_lossy(), &SourceOptions::default()).unwrap();
        Scene { _temp: temp, source, handle, _control: control }
    }

    /// Does something beside a guest that writes one block until that is done.
    fn beside_a_guest<T>(&self, what: impl FnOnce() -> T) -> T {
        let writes = AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut queue = Arc::new(self.source.disk().clone()).queue(1).unwrap();
                while writes.load(Relaxed) {
                    run(&mut *queue, request(RequestKind::Write { fua: false }, 1 << 20, 4096));
                }
            });
            let done = what();
            writes.store(false, Relaxed);
            done
        })
    }
}

/// Reads until a read has waited.
fn read_until_it_waits(view: &Arc<View>) {
    let until = Instant::now() + LIMIT;
    while view.waits() == 0 {
        read(view);
        assert!(Instant::now() < until, "nobody waited");
    }
}

#[test]
fn a_reader_waits_for_a_guest_that_writes_and_for_no_other() {
    let scene = Scene::new(SourceOptions::VIEW_LIMIT);
    // One in a process of its own, as far as it can tell, and those whom the server reads for.
    let own = Arc::new(scene.handle.view(false).unwrap());
    let open = scene.source.shared_view("").unwrap();
    let shared = Arc::new(open.view.clone());
    let (of_handle, of_source) = (&scene.handle, &scene.source);
    let ways: [(_, &dyn Fn(bool)); 2] =
        [(own, &|polite| of_handle.be_polite(polite)), (shared, &|polite| of_source.be_polite(polite))];
    for (view, be_polite) in ways {
        be_polite(true);
        read(&view);
        assert_eq!((view.waits(), view.at_once()), (0, u64::MAX), "there was nobody to wait for");
        scene.beside_a_guest(|| {
            read_until_it_waits(&view);
            let waits = view.waits();
            be_polite(false);
            read(&view);
            assert_eq!(view.waits(), waits);
        });
        be_polite(true);
        let until = Instant::now() + LIMIT;
        let rests = |before| {
            read(&view);
            view.waits() == before && view.at_once() == u64::MAX
        };
        while !rests(view.waits()) {
            assert!(Instant::now() < until, "it still waits for a guest that has gone");
        }
    }
}

/// The longer a reader waits, the more is saved for it: before that is too much, it waits no more.
#[test]
fn a_reader_for_whom_much_is_saved_waits_for_nobody() {
    let scene = Scene::new(64 << 10);
    scene.source.be_polite(true);
    let open = scene.source.shared_view("").unwrap();
    let view = Arc::new(open.view.clone());
    scene.beside_a_guest(|| read_until_it_waits(&view));
    let mut queue = Arc::new(scene.source.disk().clone()).queue(1).unwrap();
    (0..8).for_each(|at| {
        run(&mut *queue, request(RequestKind::Write { fua: false }, (2 << 20) + at * 4096, 4096))
    });
    assert!(view.kept_bytes() >= 32 << 10, "{} bytes are saved", view.kept_bytes());
    let before = view.waits();
    scene.beside_a_guest(|| (0..4).for_each(|_| read(&view)));
    assert_eq!(view.waits(), before);
}
