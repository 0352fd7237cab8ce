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
use source::{CutOptions, FreezeMode, Handle, Live, SourceMetadata, StateDir};
use sync::{CommitMode, LiveOptions, Method, Summary, SyncError, SyncOptions, Unreadable, push, receive};
use testing::{Random, rounds};
use trackers::{TrackError, TrackOptions, TrackedDisk, Tracker};
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
    world: Arc<World>,
}

/// What else a test does to the tracker, and sees of it.
#[derive(Default)]
struct World {
    /// A checkpoint mends no loss.
    severed: AtomicBool,
    /// The tracker loses something when it is next asked what was written.
    loses: AtomicBool,
    /// A write to this block is taken to be in flight, forever; 0 is none.
    stuck: AtomicU64,
    /// It says which those are.
    says_stuck: AtomicBool,
    checkpoints: AtomicU64,
    /// Epochs that were released with changes, and nothing flushed since their end.
    unflushed: AtomicU64,
    changed: AtomicBool,
    /// The record is a copy, made before the machine was restarted.
    restored: AtomicBool,
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
        self.world.checkpoints.fetch_add(1, SeqCst);
        let changes = self.disk.checkpoint(None, None)?.changes;
        if let stuck @ 1.. = self.world.stuck.load(SeqCst) {
            changes.set(stuck..stuck + 1);
        }
        self.world.changed.store(!changes.is_clean(), SeqCst);
        Ok(changes)
    }
    fn in_flight(&self) -> Option<Bitmap> {
        let stuck = Bitmap::new(BLOCKS);
        let block = self.world.stuck.load(SeqCst);
        stuck.set(block..block + 1);
        self.world.says_stuck.load(SeqCst).then_some(stuck)
    }
    fn release(&self, epoch: Uuid) -> Result<(), TrackError> {
        *self.released.lock().unwrap() = Some(epoch);
        self.world.restored.store(false, SeqCst);
        self.world.unflushed.fetch_add(self.world.changed.load(SeqCst).into(), SeqCst);
        if !self.world.severed.load(SeqCst) {
            *self.lost.lock().unwrap() = None;
        }
        self.disk.release()
    }
    fn released(&self) -> Result<Option<Uuid>, TrackError> {
        Ok(*self.released.lock().unwrap())
    }
    fn is_restored(&self) -> Result<bool, TrackError> {
        Ok(self.world.restored.load(SeqCst))
    }
    fn dirty(&self) -> Result<Bitmap, TrackError> {
        if self.world.loses.swap(false, SeqCst) {
            *self.lost.lock().unwrap() = Some("an event was dropped".into());
        }
        let dirty = self.disk.dirty().unwrap();
        if let stuck @ 1.. = self.world.stuck.load(SeqCst) {
            dirty.set(stuck..stuck + 1);
        }
        Ok(dirty)
    }
}

/// The disk as it is read, whose flushes are seen.
struct Seen {
    disk: Arc<dyn Disk>,
    world: Arc<World>,
}

impl Disk for Seen {
    fn len(&self) -> u64 {
        self.disk.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.disk.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.disk.write_at(offset, data)
    }
    fn zero(&self, offset: u64, len: u64, may_trim: bool, fast: bool) -> std::io::Result<()> {
        self.disk.zero(offset, len, may_trim, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> std::io::Result<()> {
        self.disk.discard(offset, len)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.world.changed.store(false, SeqCst);
        self.disk.flush()
    }
    fn allocated(&self, from: u64) -> std::io::Result<Option<std::ops::Range<u64>>> {
        self.disk.allocated(from)
    }
    fn queue(self: Arc<Self>, depth: u32) -> std::io::Result<Box<dyn device::Queue>> {
        self.disk.clone().queue(depth)
    }
}

struct Scene {
    folder: tempfile::TempDir,
    disk: TrackedDisk,
    released: Arc<Mutex<Option<Uuid>>>,
    lost: Arc<Mutex<Option<String>>>,
    /// The last write that was begun.
    written: Arc<AtomicU64>,
    world: Arc<World>,
}

impl Scene {
    fn new() -> Scene {
        Self::of(BLOCKS)
    }

    fn of(blocks: u64) -> Scene {
        let folder = testing::temporary();
        let image = folder.path().join("disk");
        std::fs::File::create(&image).unwrap().set_len(blocks * BLOCK).unwrap();
        let state = folder.path().join("record");
        std::fs::create_dir(&state).unwrap();
        let options = device::DiskOptions { write: true, direct: false, exclusive: false };
        let inner = device::open(&image, &options).unwrap();
        let settings = TrackOptions {
            block_size: BLOCK as u32,
            region: TrackOptions::REGION,
            intents: false,
            allow_shrink: false,
            clock: device::Clock::system(),
        };
        let records = Arc::new(Dir::open(&state).unwrap());
        let disk = TrackedDisk::open(inner, records, settings, 0, true, false).unwrap();
        let (released, lost, written, world) = Default::default();
        Scene { folder, disk, released, lost, written, world }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, count: u64) {
        for _ in 0..count {
            let n = self.written.fetch_add(1, SeqCst) + 1;
            let block: Vec<u8> = n.to_le_bytes().repeat(BLOCK as usize / 8);
            self.disk.write_at(place(n) * BLOCK % self.disk.len(), &block).unwrap();
        }
    }

    fn standin(&self) -> Box<Standin> {
        let (disk, released, lost) = (self.disk.clone(), self.released.clone(), self.lost.clone());
        Box::new(Standin { disk, released, lost, world: self.world.clone() })
    }

    /// A handle to a disk whose flushes are seen.
    fn watched(&self) -> Handle {
        let path = self.path("disk");
        let folder = self.path("watched");
        std::fs::create_dir_all(&folder).unwrap();
        let options = device::DiskOptions { write: false, direct: false, exclusive: false };
        let disk = device::open(&path, &options).unwrap();
        let disk = Arc::new(Seen { disk, world: self.world.clone() });
        let identity = device::identity(&path).unwrap();
        let about =
            SourceMetadata { path, ..SourceMetadata::new(Uuid::from_u128(5), identity, BLOCK as u32) };
        let folder = Arc::new(Dir::open(&folder).unwrap());
        Live::over(about, disk, folder, self.standin()).unwrap().into()
    }

    fn attach(&self, state: &str) -> Handle {
        let tracker = self.standin();
        let state = StateDir::find(Some(&self.path(state)));
        Live::open(&state, &self.path("disk"), tracker).unwrap().into()
    }

    fn sync(&self, options: &SyncOptions) -> Result<Summary, SyncError> {
        sync(&self.attach("state"), &self.path("copy"), options)
    }
}

fn sync(handle: &Handle, copy: &Path, options: &SyncOptions) -> Result<Summary, SyncError> {
    let (here, there) = Link::pair();
    between(handle, here, there, copy, options)
}

fn between(
    handle: &Handle,
    here: Link,
    there: Link,
    copy: &Path,
    options: &SyncOptions,
) -> Result<Summary, SyncError> {
    let state = StateDir::find(Some(&copy.with_extension("state")));
    std::thread::scope(|scope| {
        scope.spawn(move || receive(there, &state).is_ok());
        push(handle, here, copy, &copy.display().to_string(), options, &|_, _| {})
    })
}

fn options(freeze: FreezeMode) -> SyncOptions {
    let cut = CutOptions { freeze, limit: Duration::from_secs(5), ..CutOptions::default() };
    SyncOptions { live: LiveOptions { passes: 6, cut }, ..SyncOptions::default() }
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
            let mut pause = pause;
            while !stop.load(SeqCst) {
                scene.write(busy);
                std::thread::sleep(pause);
                if pause > Duration::from_millis(10) {
                    // On a busy machine a cut takes its time: sooner or later a pause is longer.
                    pause = pause * 11 / 10;
                }
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
    for commit in [CommitMode::Journal, CommitMode::InPlace] {
        let mut last = 0;
        let rounds = rounds(6, 100);
        for round in 0..rounds {
            let before = scene.written.load(SeqCst);
            let options = SyncOptions { commit, ..options(FreezeMode::Auto) };
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

/// A record that was saved before a later epoch ended lacks what was written up to that, and what was written since may be in neither.
#[test]
fn a_restored_record_counts_only_after_the_last_epoch() {
    let scene = Scene::new();
    let mut epochs = Vec::new();
    for method in [Method::Copy, Method::Tracked] {
        scene.write(100);
        assert_eq!(scene.sync(&options(FreezeMode::Auto)).unwrap().method, method);
        epochs.push(*scene.released.lock().unwrap());
    }
    for (released, method) in [(epochs[1], Method::Tracked), (epochs[0], Method::Compare)] {
        *scene.released.lock().unwrap() = released;
        scene.world.restored.store(true, SeqCst);
        scene.write(100);
        assert_eq!(scene.sync(&options(FreezeMode::Auto)).unwrap().method, method);
        assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
    }
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
    assert!(summary.trust.contains("without a cut"), "{}", summary.trust);
    let status = |scene: &Scene| {
        let replica =
            replica::Replica::open(&scene.path("copy"), &replica::ReplicaOptions::default()).unwrap();
        replica.status().state
    };
    assert_eq!(status(&scene), replica::State::Fuzzy);
    let trust = scene.sync(&options(FreezeMode::Auto)).unwrap().trust;
    assert_eq!((status(&scene), trust.as_str()), (replica::State::Exact, "tracked"));
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
    let refused = scene
        .sync(&SyncOptions { method: Some(Method::Tracked), ..options(FreezeMode::Auto) })
        .unwrap_err()
        .to_string();
    assert!(refused.contains("an event was dropped"), "{refused}");
    let summary = scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert!(summary.trust.contains("an event was dropped"), "{}", summary.trust);
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
    scene.write(100);
    assert_eq!(scene.sync(&options(FreezeMode::Auto)).unwrap().trust, "tracked");
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
}

/// Whether anything was written while the last pass was read, a tracker that lost something then cannot say.
#[test]
fn what_is_lost_during_the_last_pass_makes_it_no_cut() {
    let scene = Scene::new();
    scene.write(5_000);
    scene.world.loses.store(true, SeqCst);
    let refused = scene.sync(&options(FreezeMode::Auto)).unwrap_err().to_string();
    assert!(refused.contains("an event was dropped"), "{refused}");
    scene.write(100);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    assert_eq!(moment(&scene.path("copy")).unwrap(), scene.written.load(SeqCst));
}

/// As on a device whose cache is lost with the power: what is old there must be in the record.
#[test]
fn what_is_released_was_flushed() {
    let scene = Scene::new();
    let handle = scene.watched();
    for _ in 0..4 {
        scene.write(3_000);
        sync(&handle, &scene.path("copy"), &options(FreezeMode::Auto)).unwrap();
    }
    assert!(scene.world.checkpoints.load(SeqCst) >= 8);
    assert_eq!(scene.world.unflushed.load(SeqCst), 0);
}

/// A write whose end was not seen stays in flight for the tracker, and tells nothing of writes since. Where the kernel does
/// not count the writes to the disk, it cannot be told from one to the same block.
#[test]
fn a_write_that_was_in_flight_at_the_cut_is_no_writer() {
    let scene = Scene::new();
    scene.write(1_000);
    scene.world.stuck.store(77, SeqCst);
    scene.world.says_stuck.store(true, SeqCst);
    let refused = scene.sync(&options(FreezeMode::Auto)).unwrap_err().to_string();
    assert!(refused.contains("is being written to"), "{refused}");
}

/// More passes bring no more than the first.
#[test]
fn what_no_checkpoint_mends_is_refused_at_once() {
    let scene = Scene::new();
    scene.write(1_000);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    let checkpoints = || scene.world.checkpoints.load(SeqCst);
    let before = checkpoints();
    *scene.lost.lock().unwrap() = Some("its link is gone".into());
    scene.world.severed.store(true, SeqCst);
    let refused = scene.sync(&options(FreezeMode::Auto)).unwrap_err().to_string();
    assert!(refused.contains("its link is gone") && refused.contains("track remove"), "{refused}");
    assert!(checkpoints() <= before + 2, "{} checkpoints", checkpoints() - before);
    scene.world.severed.store(false, SeqCst);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    let before = checkpoints();
    std::fs::File::options()
        .write(true)
        .open(scene.path("disk"))
        .unwrap()
        .set_len(2 * BLOCKS * BLOCK)
        .unwrap();
    let refused = scene.sync(&options(FreezeMode::Auto)).unwrap_err().to_string();
    assert!(refused.contains("resized") && refused.contains("track add"), "{refused}");
    assert_eq!(checkpoints(), before);
}

/// What was another source's, of whatever size, is compared in the first pass and followed from then on.
#[test]
fn a_replica_of_another_source_is_taken_over() {
    // Each waits for a pause that is long enough.
    std::thread::scope(|scope| {
        for (commit, blocks) in [
            (CommitMode::Journal, BLOCKS),
            (CommitMode::InPlace, BLOCKS),
            (CommitMode::Journal, 2 * BLOCKS),
            (CommitMode::InPlace, 9),
        ] {
            scope.spawn(move || take_over(commit, blocks));
        }
    });
}

fn take_over(commit: CommitMode, blocks: u64) {
    let (scene, other) = (Scene::new(), Scene::of(blocks));
    other.write(2_000);
    scene.write(3_000);
    let copy = scene.path("copy");
    sync(&other.attach("state"), &copy, &options(FreezeMode::Auto)).unwrap();
    let refused = scene.sync(&options(FreezeMode::Auto)).unwrap_err().to_string();
    assert!(refused.contains("--adopt"), "{refused}");
    let adopt =
        SyncOptions { adopt: true, overwrite: true, shrink: true, commit, ..options(FreezeMode::Auto) };
    let summary = writing(&scene, 300, Duration::from_millis(60), || {
        for _ in 0..20 {
            match scene.sync(&adopt) {
                Err(error) if error.to_string().contains("is being written to") => continue,
                other => return other,
            }
        }
        panic!("no pause was hit");
    })
    .unwrap();
    assert_eq!(summary.method, delta::Method::Compare, "{}", summary.trust);
    moment(&copy).unwrap();
    scene.write(100);
    assert_eq!(scene.sync(&options(FreezeMode::Auto)).unwrap().trust, "tracked");
    assert_eq!(moment(&copy).unwrap(), scene.written.load(SeqCst));
    let refused = sync(&other.attach("state"), &copy, &options(FreezeMode::Auto)).unwrap_err().to_string();
    assert!(refused.contains("--adopt"), "{refused}");
}

/// What one history released, another one lacks.
#[test]
fn another_state_directory_does_not_believe_the_record() {
    let scene = Scene::new();
    scene.write(1_000);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    let other = scene.path("other");
    let copy = |options: &SyncOptions| sync(&scene.attach("state2"), &other, options);
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
    let mut random = Random::new("a link that is cut");
    let scene = Scene::new();
    scene.write(20_000);
    scene.sync(&options(FreezeMode::Auto)).unwrap();
    let rounds = rounds(12, 300);
    let (mut cut, mut through) = (0, 0);
    for _ in 0..rounds {
        let left = random.below(1 << 22);
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
        SyncOptions { unreadable: Unreadable::SendAnew, ..options(FreezeMode::Auto) },
        SyncOptions { unreadable: Unreadable::LeaveOut, ..options(FreezeMode::Auto) },
    ] {
        let refused = scene.sync(&options).unwrap_err().to_string();
        assert!(refused.contains("--keep-going"), "{refused}");
        assert!(!scene.path("copy").exists());
    }
}
