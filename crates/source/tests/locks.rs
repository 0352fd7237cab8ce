//! What is asked while a checkpoint is under way: it is answered, and nothing that was written is missing from the answer.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use delta::Epoch;
use device::{Buf, Disk, Piece, Request, RequestKind};
use source::{
    ControlClient, ControlServer, GroupHandle, Handle, History, KnownPosition, Source, SourceMembership,
    SourceOptions, StateDir,
};
use uuid::Uuid;

/// Long enough for any answer, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(30);

/// A disk of 1 GiB that is served. The server ends before the source's folder goes.
struct Served {
    _control: ControlServer,
    source: Arc<Source>,
    state: StateDir,
    image: PathBuf,
    _temp: tempfile::TempDir,
}

impl Served {
    fn new() -> Served {
        let temp = tempfile::tempdir().unwrap();
        let image = temp.path().join("vm.raw");
        std::fs::File::create(&image).unwrap().set_len(1 << 30).unwrap();
        let state = StateDir::find(Some(&temp.path().join("state")));
        let source = Arc::new(Source::open(&state, &image, &SourceOptions::default()).unwrap());
        let control = ControlServer::start(source.clone()).unwrap();
        Served { _control: control, source, state, image, _temp: temp }
    }

    fn attach(&self) -> Handle {
        Handle::attach(&self.state, &self.image.to_string_lossy(), &SourceOptions::default()).unwrap()
    }
}

#[test]
fn a_writer_is_answered_while_a_checkpoint_waits_for_it() {
    let served = Served::new();
    let source = &served.source;
    // Nobody looks for the completion: the write stays inside the gate.
    let mut queue = Arc::new(source.disk().clone()).queue(4).unwrap();
    queue.submit(Request {
        kind: RequestKind::Write { fua: false },
        pieces: [Piece { offset: 4096, len: 4096 }].into_iter().collect(),
        buf: Buf::new(4096),
        token: 0,
    });
    let before = source.disk().record().number();
    let ending = {
        let source = source.clone();
        std::thread::spawn(move || source.checkpoint(false).unwrap())
    };
    let until = Instant::now() + LIMIT;
    while source.disk().record().number() == before {
        assert!(Instant::now() < until, "the checkpoint does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (tell, told) = channel();
    let asking = source.clone();
    std::thread::spawn(move || {
        asking.lost();
        tell.send("why knowledge was lost").unwrap();
        assert!(!asking.disk().dirty_runs(0..100, 10).unwrap().is_empty());
        tell.send("which runs are dirty").unwrap();
        assert_eq!(asking.dirty().unwrap().count(), 1);
        tell.send("all that is dirty").unwrap();
        let folder = asking.folder().path().to_path_buf();
        let history = History::read(asking.folder()).unwrap();
        ControlClient::connect(&folder).unwrap().unwrap().status(&history).unwrap();
        tell.send("the status").unwrap();
        asking.disk().sweep(10).unwrap();
        tell.send("a sweep that finds nothing idle").unwrap();
        asking.disk().write_at(900 << 20, &[1; 4096]).unwrap();
        tell.send("another write, in an idle region").unwrap();
    });
    for step in [
        "why knowledge was lost",
        "which runs are dirty",
        "all that is dirty",
        "the status",
        "a sweep that finds nothing idle",
        "another write, in an idle region",
    ] {
        assert_eq!(told.recv_timeout(LIMIT), Ok(step), "stuck at: {step}");
    }
    assert!(!ending.is_finished(), "the checkpoint did not wait for the write");
    queue.complete(true).unwrap().result.unwrap();
    ending.join().unwrap();
}

#[test]
fn what_was_written_is_in_each_estimate_while_epochs_end() {
    let served = Served::new();
    let source = &served.source;
    source.disk().write_at(0, &[1; 512]).unwrap();
    let at = KnownPosition { epoch: source.checkpoint(false).unwrap().epoch, upto: 1 << 30 };
    let (written, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for block in 1..=80 {
                source.disk().write_at(block * 4096, &[2; 512]).unwrap();
                written.store(block, SeqCst);
                source.checkpoint(false).unwrap();
            }
            ended.store(true, SeqCst);
        });
        let looks = || {
            let handle = served.attach();
            while !ended.load(SeqCst) {
                let least = written.load(SeqCst);
                let found = handle.estimate(&[at]).unwrap();
                assert!((1..=least).all(|block| found.get(block)), "of {least} blocks {}", found.count());
            }
        };
        (0..2).for_each(|_| drop(scope.spawn(looks)));
    });
}

/// Of a served group, replicas in several folders may be brought up to date at once.
#[test]
fn commits_of_a_group_that_end_at_once_are_all_written_down_and_the_last_cut_stands() {
    let served = Served::new();
    let source = &served.source;
    let epoch = |number| Epoch { number, id: Uuid::new_v4() };
    let last = epoch(1000);
    let known = || SourceMembership::first("db").committed(source.folder()).unwrap();
    std::thread::scope(|scope| {
        let commits = |to: u64| {
            let handle = served.attach();
            let group = GroupHandle::new("db", vec![handle]).unwrap();
            (1..to).try_for_each(|cut| group.committed(epoch(cut), &[epoch(cut)])).map(|()| group)
        };
        let slow = scope.spawn(move || commits(300));
        let quick = commits(100).and_then(|group| group.committed(last, &[last]));
        let slow = slow.join().unwrap();
        quick.and(slow.map(drop)).unwrap();
    });
    assert_eq!(known(), Some((last, last)));
}
