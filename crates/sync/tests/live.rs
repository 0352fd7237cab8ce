//! Syncs of a disk that is written to all the while: whatever is committed is one moment of it.
//!
//! The tracker is the embedded one in the kernel's place; the disk is read behind its back, as a live one is. Write number n
//! puts n into block [`place`]`(n)`, one after the other, so that an image tells how far it reaches and whether it is whole.
#![allow(missing_docs)]

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{Dir, Disk};
use extents::Bitmap;
use link::Link;
use source::{CutOptions, FreezeMode, Handle, Live, StateDir};
use sync::{Commit, How, Options, Summary, SyncError, push, receive};
use trackers::{Settings, TrackError, TrackedDisk, Tracker};
use uuid::Uuid;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 8192;

/// Where write number `n` goes.
fn place(n: u64) -> u64 {
    (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % BLOCKS
}

/// The embedded tracker as if it were one in the kernel.
struct Standin {
    disk: TrackedDisk,
    released: Arc<Mutex<Option<Uuid>>>,
    lost: Arc<Mutex<Option<String>>>,
}

impl Tracker for Standin {
    fn kind(&self) -> &'static str {
        "embedded"
    }
    fn block_size(&self) -> u32 {
        BLOCK as u32
    }
    fn size(&self) -> u64 {
        self.disk.len()
    }
    fn lost(&self) -> Result<Option<String>, TrackError> {
        Ok(self.lost.lock().unwrap().clone())
    }
    fn checkpoint(&self) -> Result<Bitmap, TrackError> {
        Ok(self.disk.checkpoint(None, None)?.changes)
    }
    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        *self.released.lock().unwrap() = Some(epoch);
        *self.lost.lock().unwrap() = None;
        self.disk.release()
    }
    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        Ok(*self.released.lock().unwrap())
    }
    fn dirty(&self) -> Result<Bitmap, TrackError> {
        Ok(self.disk.dirty())
    }
}

struct Scene {
    folder: tempfile::TempDir,
    disk: TrackedDisk,
    released: Arc<Mutex<Option<Uuid>>>,
    lost: Arc<Mutex<Option<String>>>,
    /// The last write that was begun.
    written: Arc<AtomicU64>,
}

impl Scene {
    fn new() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk");
        std::fs::File::create(&image).unwrap().set_len(BLOCKS * BLOCK).unwrap();
        let state = folder.path().join("record");
        std::fs::create_dir(&state).unwrap();
        let options = device::Options { write: true, direct: false, exclusive: false };
        let inner = device::open(&image, &options).unwrap();
        let settings = Settings {
            block_size: BLOCK as u32,
            region: Settings::REGION,
            intents: false,
            allow_shrink: false,
        };
        let records = Arc::new(Dir::open(&state).unwrap());
        let disk = TrackedDisk::open(inner, records, settings, 0, true, false).unwrap();
        Scene { folder, disk, released: Arc::default(), lost: Arc::default(), written: Arc::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, count: u64) {
        for _ in 0..count {
            let n = self.written.fetch_add(1, SeqCst) + 1;
            let block: Vec<u8> = n.to_le_bytes().repeat(BLOCK as usize / 8);
            self.disk.write_at(place(n) * BLOCK, &block).unwrap();
        }
    }

    fn attach(&self, state: &str) -> Handle {
        let tracker =
            Standin { disk: self.disk.clone(), released: self.released.clone(), lost: self.lost.clone() };
        let state = StateDir::find(Some(&self.path(state)));
        Live::open(&state, &self.path("disk"), Box::new(tracker)).unwrap().into()
    }

    fn sync(&self, options: &Options) -> Result<Summary, SyncError> {
        sync(&self.attach("state"), &self.path("copy"), options)
    }
}

fn sync(handle: &Handle, copy: &Path, options: &Options) -> Result<Summary, SyncError> {
    let (here, there) = Link::pair();
    between(handle, here, there, copy, options)
}

fn between(
    handle: &Handle,
    here: Link,
    there: Link,
    copy: &Path,
    options: &Options,
) -> Result<Summary, SyncError> {
    let state = StateDir::find(Some(&copy.with_extension("state")));
    std::thread::scope(|scope| {
        scope.spawn(move || receive(there, &state).is_ok());
        push(handle, here, copy, &copy.display().to_string(), options, &|_, _| {})
    })
}

fn options(freeze: FreezeMode) -> Options {
    Options { passes: 6, cut: CutOptions { freeze, limit: Duration::from_secs(5) }, ..Options::default() }
}

/// The last write that an image holds, if it is the disk right after that write.
fn moment(image: &Path) -> Result<u64, String> {
    let bytes = std::fs::read(image).unwrap();
    let numbers: Vec<u64> = bytes
        .chunks(BLOCK as usize)
        .map(|block| {
            let n = u64::from_le_bytes(block[..8].try_into().unwrap());
            assert!(block.chunks(8).all(|word| word == n.to_le_bytes()), "a torn block");
            n
        })
        .collect();
    let last = numbers.iter().copied().max().unwrap();
    let mut expected = vec![0; BLOCKS as usize];
    (1..=last).for_each(|n| expected[place(n) as usize] = n);
    match expected.iter().zip(&numbers).position(|(a, b)| a != b) {
        None => Ok(last),
        Some(at) => {
            Err(format!("block {at} holds write {} and not {}, of {last}", numbers[at], expected[at]))
        }
    }
}

/// Writes for a while, pauses for a while, from before the work begins until it ends.
fn writing<T>(scene: &Scene, busy: u64, pause: Duration, work: impl FnOnce() -> T) -> T {
    let (stop, before) = (AtomicBool::new(false), scene.written.load(SeqCst));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(SeqCst) {
                scene.write(busy);
                std::thread::sleep(pause);
            }
        });
        while scene.written.load(SeqCst) == before {
            std::thread::yield_now();
        }
        let result = work();
        stop.store(true, SeqCst);
        result
    })
}

#[test]
fn a_busy_disk_is_copied_as_of_one_moment() {
    let scene = Scene::new();
    scene.write(20_000);
    for commit in [Commit::Journal, Commit::InPlace] {
        let mut last = 0;
        let rounds = if std::env::var_os("DSYNC_SOAK").is_some() { 100 } else { 6 };
        for round in 0..rounds {
            let before = scene.written.load(SeqCst);
            let options = Options { commit, ..options(FreezeMode::Auto) };
            // Longer pauses than a cut takes: sooner or later one is hit.
            let result = writing(&scene, 300, Duration::from_millis(60), || {
                for _ in 0..20 {
                    match scene.sync(&options) {
                        Err(error) if error.to_string().contains("is being written to") => continue,
                        other => return other,
                    }
                }
                panic!("no pause was hit");
            });
            let summary = result.unwrap();
            let reached = moment(&scene.path("copy")).unwrap();
            assert!(reached >= before && reached > last, "{reached}, {before}");
            if round > 0 {
                assert_eq!(summary.trust, "tracked");
            }
            last = reached;
        }
    }
    // Nobody writes: one more brings it to the end, and then there is nothing to do.
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
    let again = scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert_eq!((again.blocks_changed, again.bytes_read), (0, 0));
}

#[test]
fn without_a_cut_the_copy_is_fuzzy_and_the_next_one_mends_it() {
    let scene = Scene::new();
    scene.write(5_000);
    let summary = writing(&scene, 50, Duration::from_micros(200), || {
        let refused = scene.sync(&options(FreezeMode::Auto)).unwrap_err();
        assert!(refused.to_string().contains("--freeze never"), "{refused}");
        scene.sync(&options(FreezeMode::Never)).unwrap()
    });
    assert_eq!(summary.freeze_ms, None);
    let status = |scene: &Scene| {
        let replica = replica::Replica::open(&scene.path("copy"), &replica::Options::default()).unwrap();
        replica.standing().state
    };
    assert_eq!(status(&scene), replica::State::Fuzzy);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert_eq!(status(&scene), replica::State::Exact);
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
    let refused = scene.sync(&options(FreezeMode::Require)).unwrap_err();
    assert!(refused.to_string().contains("no mounted file system"), "{refused}");
}

#[test]
fn what_the_tracker_lost_is_compared_and_then_tracked_again() {
    let scene = Scene::new();
    scene.write(5_000);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    scene.write(100);
    *scene.lost.lock().unwrap() = Some("an event was dropped".into());
    let refused =
        scene.sync(&Options { how: How::Tracked, ..options(FreezeMode::Auto) }).unwrap_err().to_string();
    assert!(refused.contains("an event was dropped"), "{refused}");
    let summary = scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert!(summary.trust.contains("an event was dropped"), "{}", summary.trust);
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
    scene.write(100);
    assert_eq!(scene.sync(&options(FreezeMode::Auto)).unwrap().trust, "tracked");
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
}

/// What one history released, another one lacks.
#[test]
fn another_state_directory_does_not_believe_the_record() {
    let scene = Scene::new();
    scene.write(1_000);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    let other = scene.path("other");
    let copy = |options: &Options| sync(&scene.attach("state2"), &other, options);
    copy(&options(FreezeMode::Auto)).unwrap();
    scene.write(1_000);
    // The record now begins at the other history's epoch: what came between is unknown to the first.
    copy(&options(FreezeMode::Auto)).unwrap();
    scene.write(10);
    let summary = scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert!(summary.trust.contains("another history"), "{}", summary.trust);
    for image in ["copy", "other"] {
        sync(
            &scene.attach(if image == "copy" { "state" } else { "state2" }),
            &scene.path(image),
            &options(FreezeMode::Auto),
        )
        .unwrap();
        assert_eq!(moment(&scene.path(image)).unwrap(), scene.written.load(SeqCst), "{image}");
    }
}

/// A stream that ends after so many bytes.
struct Short<R> {
    stream: R,
    left: u64,
}

impl<R: Read> Read for Short<R> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let room = buf.len().min(self.left as usize);
        let read = self.stream.read(&mut buf[..room])?;
        self.left -= read as u64;
        Ok(read)
    }
}

/// The link falls in a pass, between two, in the cut, or not at all: what had arrived counts, and the replica is one moment.
#[test]
fn a_link_that_is_cut_costs_no_more_than_time() {
    let seed: Option<u64> = std::env::var("DSYNC_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| std::process::id().into());
    println!("DSYNC_SEED={seed}");
    let scene = Scene::new();
    scene.write(20_000);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    let rounds = if std::env::var_os("DSYNC_SOAK").is_some() { 300 } else { 12 };
    let (mut cut, mut through) = (0, 0);
    for round in 0..rounds {
        let left = seed.wrapping_mul(1000).wrapping_add(round).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 42;
        let result = writing(&scene, 300, Duration::from_millis(60), || {
            let (near, far) = UnixStream::pair().unwrap();
            let short = Short { stream: far.try_clone().unwrap(), left };
            let there = Link::pipe(short, far);
            let here = Link::pipe(near.try_clone().unwrap(), near);
            between(&scene.attach("state"), here, there, &scene.path("copy"), &options(FreezeMode::Auto))
        });
        *(if result.is_ok() { &mut through } else { &mut cut }) += 1;
        let reached = moment(&scene.path("copy")).unwrap();
        let summary = scene.sync(&options(FreezeMode::Auto)).unwrap();
        assert_eq!(summary.trust, "tracked", "after {left} bytes");
        let now = moment(&scene.path("copy")).unwrap();
        assert!(reached <= now && now == scene.written.load(SeqCst), "{reached}, {now}");
    }
    println!("{cut} of {rounds} were cut, {through} came through");
    assert!(cut > 0);
}

/// An extract has no passes: it is a cut, or nothing.
#[test]
fn an_extract_of_a_live_disk_is_a_cut() {
    let scene = Scene::new();
    scene.write(2_000);
    let extract = |since| {
        let mut delta = Vec::new();
        sync::extract(&scene.attach("state"), since, None, &mut delta, &|_, _| {}).map(|_| delta)
    };
    let refused = extract(None).unwrap_err().to_string();
    assert!(refused.contains("dsync sync"), "{refused}");
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    scene.write(300);
    let delta = extract(None).unwrap();
    let state = StateDir::find(Some(&scene.path("far")));
    sync::merge(&scene.path("copy"), &sync::MergeOptions::default(), &state, &delta[..]).unwrap();
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
    let busy =
        writing(&scene, 50, Duration::from_micros(200), || extract(Some("2"))).unwrap_err().to_string();
    assert!(busy.contains("is being written to"), "{busy}");
}

/// A pass that left blocks out would be committed by the cut as if it were whole.
#[test]
fn nothing_may_be_left_out_of_a_live_disk() {
    let scene = Scene::new();
    scene.write(100);
    for options in [
        Options { keep_going: true, ..options(FreezeMode::Auto) },
        Options { keep_going: true, lacking: true, ..options(FreezeMode::Auto) },
    ] {
        let refused = scene.sync(&options).unwrap_err().to_string();
        assert!(refused.contains("--keep-going"), "{refused}");
        assert!(!scene.path("copy").exists());
    }
}
