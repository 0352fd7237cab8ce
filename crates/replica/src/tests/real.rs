//! The replica on real files, file systems and devices.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use device::{Boot, Clock, Dir, Disk, MediumChange};
use testing::faulty::{FaultyDisk, FaultyFolder, Keep, Outage, Power};
use testing::{Loop, Mount, on_disk, run, skipped};

use super::batches;
use super::world::*;
use crate::state::destination::{Destination, DeviceDestination, FileDestination, Name};
use crate::state::lineage::Stamp;
use crate::state::note::Foreign;
use crate::{CommitMode, Replica, ReplicaError, ReplicaOptions, State, inspect, settle};

/// A child that a neighbouring test begins holds, until it runs its own program, the locks of all the others.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

pub(super) fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn source() -> Source {
    Source::new(3, &[400, 480, 440, 440, 600])
}

fn open(path: &Path) -> crate::Result<Replica> {
    Replica::open(path, &ReplicaOptions::default())
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_file_is_seeded_and_kept_up_to_date() {
    let _alone = alone();
    let temp = testing::temporary();
    let path = temp.path().join("vm.raw");
    let source = source();
    assert_eq!(inspect(&path, &ReplicaOptions::default()).unwrap(), None);
    let mut replica = open(&path).unwrap();
    assert_eq!(replica.path(), std::fs::canonicalize(temp.path()).unwrap().join("vm.raw"));
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), source.images[0]);
    let committed = merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    assert_eq!(committed.epoch, source.epochs[1]);
    // Once to the journal, once to the destination.
    assert!(committed.bytes_written > 2 * 100 * BLOCK, "{committed:?}");
    merge(&mut replica, &source.tracked(1, 3), CommitMode::InPlace).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), source.images[3]);
    drop(replica);
    let lineage = inspect(&path, &ReplicaOptions::default()).unwrap().unwrap();
    assert_eq!((lineage.epoch, lineage.state), (Some(source.epochs[3]), State::Exact));
    assert_eq!(names(temp.path()), [".vm.raw.dsync", "vm.raw"]);
    assert_eq!(names(&temp.path().join(".vm.raw.dsync")), ["history", "lineage", "lock", "present"]);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    // A single write by anybody, an instant later.
    let mut replica = open(&path).unwrap();
    merge(&mut replica, &source.tracked(3, 4), CommitMode::Journal).unwrap();
    drop(replica);
    std::fs::File::options().write(true).open(&path).unwrap().write_at(b"x", 5).unwrap();
    assert!(matches!(open(&path), Err(ReplicaError::Changed { .. })));
}

#[test]
fn holes_stay_holes_and_odd_sizes_fit() {
    let _alone = alone();
    let temp = on_disk();
    let path = temp.path().join("vm.raw");
    // 1 GiB with a few blocks, and a short last one.
    let size = (1 << 30) + 700;
    let mut header = source().header(0, 0, delta::Method::Copy);
    header.size_after = size;
    let mut bytes = Vec::new();
    let mut writer = delta::Writer::new(&mut bytes);
    let (mut encoder, unit) = delta::Encoder::new(&header, None).unwrap();
    writer.unit(&unit).unwrap();
    let frame = delta::Frame {
        records: vec![
            delta::Record::Data { offset: 8192, len: 4096 },
            delta::Record::Zero { offset: 1 << 20, len: 500 << 20 },
            delta::Record::Data { offset: size - 700, len: 700 },
        ],
        data: device::Buf::from(&[7; 4796][..]),
    };
    writer.unit(&encoder.frame(frame).unwrap()).unwrap();
    writer.unit(&encoder.trailer()).unwrap();
    merge(&mut open(&path).unwrap(), &bytes, CommitMode::Journal).unwrap();
    let found = std::fs::metadata(&path).unwrap();
    assert_eq!(found.len(), size);
    assert!(found.blocks() * 512 <= 64 << 10, "{} bytes are allocated", found.blocks() * 512);
    let file = std::fs::File::open(&path).unwrap();
    let mut tail = [0; 800];
    file.read_exact_at(&mut tail, size - 800).unwrap();
    assert_eq!((tail[..100].to_vec(), tail[100..].to_vec()), (vec![0; 100], vec![7; 700]));
}

#[test]
fn what_is_refused_leaves_no_trace() {
    let _alone = alone();
    let temp = testing::temporary();
    let path = temp.path().join("vm.raw");
    std::fs::write(&path, b"precious").unwrap();
    let error = open(&path).err().unwrap();
    assert!(matches!(error, ReplicaError::NotAReplica(_)) && error.is_refusal());
    assert!(error.to_string().contains("vm.raw") && error.to_string().contains("--adopt"), "{error}");
    assert_eq!(names(temp.path()), ["vm.raw"]);
    // Nothing was received: the folder goes again.
    drop(open(&temp.path().join("new.raw")).unwrap());
    assert_eq!(names(temp.path()), ["vm.raw"]);
    for (path, words) in [
        (temp.path().to_path_buf(), "neither a file nor a block device"),
        (PathBuf::from("/dev/null"), "neither a file nor a block device"),
        (temp.path().join("no/where.raw"), "create it"),
    ] {
        let error = open(&path).err().unwrap();
        assert!(error.is_refusal() && error.to_string().contains(words), "{error}");
    }
    std::os::unix::fs::symlink("nowhere", temp.path().join("dangling")).unwrap();
    assert!(
        open(&temp.path().join("dangling")).err().unwrap().to_string().contains("symbolic link to nothing")
    );
    assert_eq!(names(temp.path()), ["dangling", "vm.raw"]);
}

#[test]
fn one_process_at_a_time() {
    let _alone = alone();
    let temp = testing::temporary();
    let path = temp.path().join("vm.raw");
    let first = open(&path).unwrap();
    let error = open(&path).err().unwrap();
    let told = format!("process {}", std::process::id());
    assert!(matches!(error, ReplicaError::Busy { .. }) && error.to_string().contains(&told), "{error}");
    drop(first);
    let source = source();
    merge(&mut open(&path).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
    // By a link, it is the same replica.
    let link = temp.path().join("link.raw");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let mut replica = open(&link).unwrap();
    assert!(matches!(open(&path), Err(ReplicaError::Busy { .. })));
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    drop(replica);
    assert!(link.is_symlink());
    assert_eq!(std::fs::read(&path).unwrap(), source.images[1]);
    // Somebody who has the image open, as QEMU does.
    let lock = device::lock_image(&path, device::Access::ReadShared).unwrap();
    let error = open(&path).err().unwrap();
    assert!(error.is_refusal(), "{error}");
    drop(lock);
    open(&path).unwrap();
}

/// A destination whose writer can be killed.
struct Frail {
    destination: Box<dyn Destination>,
    power: Power,
    /// Somebody else writes before it is made durable.
    meddled: Arc<AtomicBool>,
}

impl Destination for Frail {
    fn path(&self) -> &Path {
        self.destination.path()
    }
    fn boot(&self) -> Boot {
        self.destination.boot()
    }
    fn mark(&self, blocks: &[u64]) {
        self.destination.mark(blocks);
    }
    fn is_device(&self) -> bool {
        self.destination.is_device()
    }
    fn stamp(&self, name: Name) -> std::io::Result<Option<Stamp>> {
        self.destination.stamp(name)
    }
    fn glance(&self) -> std::io::Result<Option<Stamp>> {
        self.destination.glance()
    }
    fn settle(&self) -> std::io::Result<Stamp> {
        if self.meddled.swap(false, SeqCst) {
            std::fs::File::options().write(true).open(self.destination.path())?.write_at(b"x", 5)?;
        }
        self.destination.settle()
    }
    fn open(&self, name: Name) -> crate::Result<Arc<dyn Disk>> {
        Ok(Arc::new(FaultyDisk::new(&self.power, self.destination.open(name)?)))
    }
    fn create(&self) -> std::io::Result<u64> {
        self.destination.create()
    }
    fn clone_final(&self) -> std::io::Result<()> {
        self.destination.clone_final()
    }
    fn carry_attributes(&self) -> std::io::Result<()> {
        self.destination.carry_attributes()
    }
    fn rename(&self, replace: bool) -> std::io::Result<()> {
        self.destination.rename(replace)
    }
    fn remove(&self) -> std::io::Result<()> {
        self.destination.remove()
    }
    fn sync(&self) -> std::io::Result<()> {
        self.destination.sync()
    }
}

/// Opens a replica in this boot, or one that began at a moment.
fn open_frail(path: &Path, power: &Power, began: Option<u64>) -> crate::Result<Replica> {
    open_meddled(path, power, began, &Arc::default())
}

/// Opens a replica otherwise.
fn open_frail_with(path: &Path, power: &Power, options: &ReplicaOptions) -> crate::Result<Replica> {
    let destination = FileDestination::new(path.to_path_buf(), device::Format::Raw).unwrap();
    let folder = FaultyFolder::new(power, &path.with_file_name("state")).unwrap();
    let destination =
        Frail { destination: Box::new(destination), power: power.clone(), meddled: Arc::default() };
    Replica::begin(Box::new(destination), Box::new(folder), options)
}

fn open_meddled(
    path: &Path,
    power: &Power,
    began: Option<u64>,
    meddled: &Arc<AtomicBool>,
) -> crate::Result<Replica> {
    let mut destination = FileDestination::new(path.to_path_buf(), device::Format::Raw).unwrap();
    if let Some(began) = began {
        destination.boot = Boot { id: "the next".into(), began };
    }
    let folder = FaultyFolder::new(power, &path.with_file_name("state")).unwrap();
    let destination =
        Frail { destination: Box::new(destination), power: power.clone(), meddled: meddled.clone() };
    let mut replica = Replica::begin(Box::new(destination), Box::new(folder), &ReplicaOptions::default())?;
    replica.save_every(40 * BLOCK);
    Ok(replica)
}

/// What is done from now on is later than anything that may have been on its way when the last writer died: its note is moved
/// back, which takes no time.
fn later(path: &Path) {
    let note = path.with_file_name("state").join(crate::state::note::NAME);
    let Ok(note) = std::fs::File::options().read(true).write(true).open(note) else { return };
    let mut time = [0; 8];
    if note.read_exact_at(&mut time, 512).is_err() {
        // Killed before it had its length, it says nothing.
        return;
    }
    let earlier = u64::from_ne_bytes(time).saturating_sub(2 * crate::state::note::DYING);
    note.write_at(&earlier.to_ne_bytes(), 512).unwrap();
}

/// Batches are flushed, and somebody writes while that takes its time: the stamp that is stored next is not theirs.
#[test]
fn a_write_during_the_flush_of_batches_is_noticed() {
    let _alone = alone();
    let temp = testing::temporary();
    let (path, source, meddled) = (temp.path().join("vm.raw"), batches::source(), Arc::default());
    let power = Power::new(Outage::Kill);
    let mut replica = open_meddled(&path, &power, None, &meddled).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let (mut log, mut running) = {
        let nonce = replica.status().nonce;
        let header = batches::header(&source, 1, nonce);
        let bytes = source.encode(&header, 1, &source.changed(0, 1));
        let (mut log, mut running) = replica.batches().unwrap();
        batches::send(&mut log, &mut running, &bytes, header.stream).unwrap();
        (log, running)
    };
    running.apply().unwrap();
    log.end().unwrap();
    meddled.store(true, SeqCst);
    assert!(matches!(running.finish(), Err(ReplicaError::Changed { .. })));
    drop(replica);
    assert!(matches!(open_frail(&path, &power, None), Err(ReplicaError::Changed { .. })));
}

/// What is written and made durable behind a note that is not would be taken for another program's after a power cut.
#[test]
fn nothing_is_written_behind_a_note_that_is_not_durable() {
    let _alone = alone();
    let source = source();
    let begin = |failing: u64| {
        let temp = testing::in_memory();
        let power = Power::new(Outage::Kill);
        let mut replica = open_frail(&temp.path().join("vm.raw"), &power, None).unwrap();
        merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
        let before = power.steps();
        power.fail_at(before + failing, 1, 5);
        (replica.work(true).map(drop), power.steps() - before)
    };
    let (begun, steps) = begin(1 << 32);
    begun.unwrap();
    assert!(steps > 2, "{steps}");
    for failing in 1..=steps {
        assert!(begin(failing).0.is_err(), "step {failing} of {steps}");
    }
}

/// A batch is refused because somebody has written meanwhile, and then the power is cut: that it was noticed is not forgotten.
#[test]
fn a_write_that_was_noticed_outlives_a_power_cut() {
    let _alone = alone();
    let temp = testing::in_memory();
    let (path, source) = (temp.path().join("vm.raw"), batches::source());
    let power = Power::new(Outage::PowerCut);
    let mut replica = open_frail(&path, &power, None).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let nonce = replica.status().nonce;
    let (mut log, mut running) = replica.batches().unwrap();
    let next = batches::send_one(&source, &mut log, &mut running, 1, nonce).unwrap();
    running.apply().unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().write_at(b"x", 17 * BLOCK).unwrap();
    let refused = batches::send_one(&source, &mut log, &mut running, 2, next);
    assert!(matches!(refused, Err(ReplicaError::Changed { .. })), "{refused:?}");
    let _ = running.finish();
    drop((log, replica));
    power.crash(Keep::KeepAll, Keep::LoseUnsynced, 0).unwrap();
    let clock = Clock::system();
    std::thread::sleep(Duration::from_nanos(2 * clock.tick()));
    let opened = open_frail(&path, &Power::new(Outage::Kill), Some(clock.now()));
    assert!(matches!(opened, Err(ReplicaError::Changed { .. })), "{:?}", opened.map(|r| r.status().clone()));
}

/// A copy is put in place, the process is killed before its lineage says so, and somebody writes to it at once.
#[test]
fn a_copy_just_put_in_place_covers_no_foreign_write() {
    let _alone = alone();
    let source = source();
    let run = |step: Option<u64>| {
        let temp = testing::temporary();
        let (path, power) = (temp.path().join("vm.raw"), Power::new(Outage::Kill));
        power.cut_at(step.unwrap_or(u64::MAX));
        if let Ok(mut replica) = open_frail(&path, &power, None) {
            let _ = merge(&mut replica, &source.seed(0), CommitMode::Journal);
        }
        if step.is_some() && path.exists() {
            std::fs::File::options().write(true).open(&path).unwrap().write_at(b"x", 5).unwrap();
            let opened = open_frail(&path, &Power::new(Outage::Kill), None).err();
            assert!(matches!(opened, Some(ReplicaError::Changed { .. })), "killed at {step:?}: {opened:?}");
        }
        (power.steps(), path.exists())
    };
    let (steps, _) = run(None);
    let put = (1..=steps).filter(|step| run(Some(*step)).1).count();
    assert!(put > 2, "{put} of {steps}");
}

/// Whenever the writer is killed: the replica is trusted, in this boot and in the next; and what somebody else does to the file
/// before it is opened again is never taken for its own.
#[test]
fn a_kill_is_trusted_and_a_foreign_write_after_it_is_not() {
    let plain = source();
    let mirrored = batches::source();
    type Act<'a> = Box<dyn Fn(&mut Replica) -> crate::Result<()> + 'a>;
    let delta = plain.tracked(0, 1);
    let merges = |commit| -> Act<'_> {
        let delta = &delta;
        Box::new(move |replica| merge(replica, delta, commit).map(drop))
    };
    let acts: [(&str, &Source, Act<'_>); 5] = [
        ("seed", &plain, {
            let seed = plain.seed(1);
            Box::new(move |replica| merge(replica, &seed, CommitMode::Journal).map(drop))
        }),
        ("journal", &plain, merges(CommitMode::Journal)),
        ("in place", &plain, merges(CommitMode::InPlace)),
        ("the same again", &plain, merges(CommitMode::Journal)),
        ("batches", &mirrored, Box::new(|r| batches::mirror_to(&mirrored, r, &Default::default()))),
    ];
    for (name, source, act) in acts {
        let new = || {
            // What is tried is the clock, not the disk.
            let temp = testing::in_memory();
            let path = temp.path().join("vm.raw");
            if name != "seed" {
                let mut replica = open_frail(&path, &Power::new(Outage::Kill), None).unwrap();
                merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
                if name == "the same again" {
                    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
                }
            }
            (temp, path)
        };
        let (_temp, path) = new();
        let power = Power::new(Outage::Kill);
        act(&mut open_frail(&path, &power, None).unwrap()).unwrap();
        let steps = power.steps();
        let mut turn = 0;
        // Past the last one: killed at rest.
        println!("{name}: {steps} steps");
        // Of a seed, what comes once the file has its name.
        let by = if testing::soak() || name == "seed" { 1 } else { 23 };
        for step in (2..=steps + 1).rev().step_by(by) {
            if name == "seed" && step + 9 < steps {
                break;
            }

            turn += 1;
            type Foreign<'a> = Option<&'a dyn Fn(&Path)>;
            let cases: [(&str, Foreign<'_>); 3] = [
                ("nobody", None),
                (
                    "a write",
                    Some(&|path| {
                        let file = std::fs::File::options().write(true).open(path).unwrap();
                        file.write_at(b"x", 17 * BLOCK).unwrap();
                    }),
                ),
                ("an older copy", Some(&|path| std::fs::write(path, &source.images[0]).unwrap())),
            ];
            for (who, foreign) in &cases[..if turn % 3 == 0 { 3 } else { 2 }] {
                for rebooted in [false, true] {
                    let (_temp, path) = new();
                    let power = Power::new(Outage::Kill);
                    let mut replica = open_frail(&path, &power, None).unwrap();
                    power.cut_at(step);
                    let _ = act(&mut replica);
                    drop(replica);
                    power.crash(Keep::KeepAll, Keep::KeepAll, 0).unwrap();
                    let began = rebooted.then(|| {
                        // A file is stamped by the tick before.
                        let clock = Clock::system();
                        std::thread::sleep(Duration::from_nanos(2 * clock.tick()));
                        let began = clock.now();
                        std::thread::sleep(Duration::from_nanos(2 * clock.tick()));
                        began
                    });
                    if !path.exists() {
                        continue;
                    }
                    if let Some(foreign) = foreign {
                        later(&path);
                        foreign(&path);
                    }
                    let opened = open_frail(&path, &Power::new(Outage::Kill), began);
                    let what = format!("{name}, killed at {step} of {steps}, {who}, rebooted: {rebooted}");
                    match (opened, foreign.is_some()) {
                        (Ok(_), false) | (Err(ReplicaError::Changed { .. }), true) => {}
                        (Ok(_), true) => panic!("{what}: what others did is taken for its own"),
                        (Err(e), _) => panic!("{what}: {e}"),
                    }
                }
            }
        }
    }
}

/// What happened to the file is told as exactly as it can be, with what comes next.
#[test]
fn what_others_did_is_told() {
    let _alone = alone();
    let temp = testing::temporary();
    let (path, other) = (temp.path().join("vm.raw"), temp.path().join("web.raw"));
    let source = source();
    merge(&mut open(&path).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
    // Moved without its state, and with it.
    std::fs::rename(&path, &other).unwrap();
    let told = open(&other).err().unwrap();
    assert!(matches!(told, ReplicaError::Moved { .. }) && told.is_refusal(), "{told}");
    assert!(told.to_string().contains(".web.raw.dsync as well"), "{told}");
    std::fs::rename(temp.path().join(".vm.raw.dsync"), temp.path().join(".web.raw.dsync")).unwrap();
    // Not where times cannot tell this from a write.
    let told = match open(&other) {
        Ok(replica) => replica.status().recovered.clone().unwrap(),
        Err(refused) => refused.to_string(),
    };
    assert!(told.contains("name or links"), "{told}");
    std::fs::File::options().write(true).open(&other).unwrap().write_at(b"x", 5).unwrap();
    let told = open(&other).err().unwrap().to_string();
    let order =
        ["content written", "ago", "find out who", "overwrites what differs"].map(|words| told.find(words));
    assert!(order.iter().all(Option::is_some) && order.is_sorted(), "{told}");
    // An adoption that was cut off.
    let mut replica =
        Replica::open(&other, &ReplicaOptions { adopt: true, ..ReplicaOptions::default() }).unwrap();
    let content = std::fs::read(&other).unwrap();
    let delta = source.lacks(replica.status(), Some(&content), 1);
    receive_part(&mut replica, &delta, CommitMode::Journal, 1).unwrap();
    drop(replica);
    let told = open(&other).err().unwrap();
    assert!(matches!(told, ReplicaError::Unproven(_)) && told.is_refusal(), "{told}");
}

/// A file system of this kind in a new file of the folder, mounted beside it.
fn mounted(kind: &str, folder: &Path) -> Option<(Mount, PathBuf)> {
    let (image, place) = (folder.join("image"), folder.join("mount"));
    std::fs::File::create(&image).unwrap().set_len(400 << 20).unwrap();
    run(&format!("mkfs.{kind}"), ["-q".as_ref(), image.as_os_str()])?;
    Some((Mount::new(&["-o", "loop"], &image, &place)?, place))
}

#[test]
fn reflink_where_the_file_system_can() {
    let _alone = alone();
    let mut tried = 0;
    for kind in ["xfs", "btrfs"] {
        let temp = on_disk();
        let Some((_mount, place)) = mounted(kind, temp.path()) else {
            skipped(&format!("reflink on {kind}"), "it cannot be made and mounted here");
            continue;
        };
        tried += 1;
        let path = place.join("vm.raw");
        let source = source();
        let mut replica = open(&path).unwrap();
        merge(&mut replica, &source.seed(0), CommitMode::Reflink).unwrap();
        let before = std::fs::metadata(&path).unwrap().ino();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        drop(replica);
        // Who changes the mode has not changed the content, which is as old as it was; it is told once.
        let told = || open(&path).unwrap().status().recovered.clone();
        assert!(told().is_some_and(|told| told.contains("mode")) && told().is_none());
        let mut replica =
            Replica::open(&path, &ReplicaOptions { adopt: true, ..ReplicaOptions::default() }).unwrap();
        let delta = source.lacks(replica.status(), Some(&source.images[0]), 1);
        merge(&mut replica, &delta, CommitMode::Reflink).unwrap();
        let after = std::fs::metadata(&path).unwrap();
        assert!(after.ino() != before && after.mode() & 0o777 == 0o640, "{kind}");
        assert_eq!(std::fs::read(&path).unwrap(), source.images[1]);
        // Cut off and gone on from.
        receive_part(&mut replica, &source.tracked(1, 2), CommitMode::Reflink, 3).unwrap();
        drop(replica);
        let mut replica = open(&path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), source.images[1]);
        assert!(replica.status().under_way() && replica.status().state == State::Exact);
        let delta = source.lacks(replica.status(), None, 3);
        merge(&mut replica, &delta, CommitMode::Reflink).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), source.images[3]);
        drop(replica);
        assert!(open(&path).unwrap().status().recovered.is_none());
    }
    println!("reflink: tried on {tried} file systems");
}

#[test]
fn reflink_where_it_can_not_is_refused() {
    let _alone = alone();
    // Memory's file system clones nothing.
    if !Path::new("/dev/shm").is_dir() {
        return skipped("reflink where it is refused", "there is no /dev/shm");
    }
    let temp = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    let mut replica = open(&path).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Reflink).unwrap();
    let error = merge(&mut replica, &source.tracked(0, 1), CommitMode::Reflink).unwrap_err();
    assert!(error.is_refusal() && error.to_string().contains("pass --commit journal"), "{error}");
    assert_eq!(names(temp.path()), [".vm.raw.dsync", "vm.raw"]);
    drop(replica);
    let mut replica = open(&path).unwrap();
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), source.images[1]);
}

#[test]
fn a_device_is_seeded_in_place() {
    let _alone = alone();
    let temp = on_disk();
    let image = temp.path().join("image");
    std::fs::write(&image, vec![0xaa; 4 << 20]).unwrap();
    let Some(disk) = Loop::new(&image) else {
        return skipped("a replica on a device", "loop devices need root");
    };
    let path = disk.device();
    assert!(open(path).err().unwrap().to_string().contains("--journal-dir"));
    let state = temp.path().join("state");
    let options = ReplicaOptions { devices: state.clone(), ..ReplicaOptions::default() };
    let source = source();
    // It holds something.
    assert!(matches!(Replica::open(path, &options), Err(ReplicaError::NotAReplica(_))));
    assert_eq!(std::fs::read_dir(&state).map_or(0, Iterator::count), 0);
    let replacing = ReplicaOptions { replace: true, ..options.clone() };
    let mut replica = Replica::open(path, &replacing).unwrap();
    assert_eq!(replica.status().capacity, Some(4 << 20));
    assert!(Replica::open(path, &replacing).is_err());
    receive_part(&mut replica, &source.seed(0), CommitMode::Journal, 5).unwrap();
    drop(replica);
    let mut replica = Replica::open(path, &options).unwrap();
    assert_eq!(replica.status().state, State::Incomplete);
    let delta = source.lacks(replica.status(), None, 1);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    for (from, to, commit) in [(1, 2, CommitMode::InPlace), (2, 4, CommitMode::Journal)] {
        merge(&mut replica, &source.tracked(from, to), commit).unwrap();
        let mut held = vec![0; source.images[to].len()];
        replica.content().unwrap().read_at(0, &mut held).unwrap();
        assert!(held == source.images[to], "{commit:?}");
    }
    let error = merge(&mut replica, &source.tracked(3, 4), CommitMode::Reflink).unwrap_err();
    assert!(error.to_string().contains("is a device"), "{error}");
    drop(replica);
    // Somebody makes a file system on it.
    std::fs::File::options().write(true).open(path).unwrap().write_at(&[1; 512], 1024).unwrap();
    run("blockdev", ["--flushbufs".as_ref(), disk.device().as_os_str()]).unwrap();
    let error = Replica::open(path, &options).err().unwrap();
    assert!(matches!(error, ReplicaError::Changed { .. }), "{error}");
    // The file under the device is in use.
    let error =
        Replica::open(&image, &ReplicaOptions { adopt: true, ..ReplicaOptions::default() }).err().unwrap();
    assert!(
        matches!(error, ReplicaError::Busy { .. })
            && error.to_string().contains(disk.device().to_str().unwrap()),
        "{error}"
    );
}

/// A replica of the first epoch on a device, with the options that open it. `None` where there are no loop devices.
fn on_device(source: &Source) -> Option<(tempfile::TempDir, Loop, ReplicaOptions)> {
    let temp = on_disk();
    let image = temp.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
    let disk = Loop::new(&image);
    if disk.is_none() {
        skipped("a replica on a device", "loop devices need root");
    }
    let disk = disk?;
    let options = ReplicaOptions { folder: Some(temp.path().join("state")), ..ReplicaOptions::default() };
    let mut replica = Replica::open(disk.device(), &options).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    Some((temp, disk, options))
}

/// Another program writes to it, where nobody looks at the content, which would write it out.
fn meddle(disk: &Loop, durably: bool) {
    let file = std::fs::File::options().write(true).open(disk.device()).unwrap();
    file.write_at(&[0x5a; BLOCK as usize], 300 * BLOCK).unwrap();
    if durably {
        file.sync_data().unwrap();
    }
}

/// A delta to this epoch from the one before with nothing that is made zero, for which the kernel may count more.
fn data_alone(source: &Source, to: usize) -> Vec<u8> {
    let has_data = |block: &u64| {
        let place = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        source.images[to][place].iter().any(|byte| *byte != 0)
    };
    let blocks = source.changed(to - 1, to).into_iter().filter(has_data).collect();
    source.encode(&source.header(to - 1, to, delta::Method::Tracked), to, &blocks)
}

/// While a delta comes and is merged, somebody writes to the device: to the disk at once, or to the system's memory, from which
/// it goes to the disk much later.
#[test]
fn a_foreign_write_to_a_device_in_the_midst_of_a_delta_is_noticed() {
    let _alone = alone();
    let source = batches::source();
    let delta = data_alone(&source, 1);
    for (commit, durably, goes_on) in [
        (CommitMode::Journal, false, true),
        (CommitMode::Journal, true, true),
        (CommitMode::InPlace, false, true),
        (CommitMode::InPlace, true, true),
        (CommitMode::InPlace, true, false),
    ] {
        let Some((_temp, disk, options)) = on_device(&source) else { return };
        let what = format!("{commit:?}, durably: {durably}, goes on: {goes_on}");
        let mut replica = Replica::open(disk.device(), &options).unwrap();
        let mut units = units(&delta).into_iter();
        let mut receipt = replica.receive(units.next().unwrap(), commit).unwrap();
        receipt.unit(units.next().unwrap()).unwrap();
        meddle(&disk, durably);
        let ended = match goes_on {
            true => {
                units.for_each(|unit| receipt.unit(unit).unwrap());
                receipt.finish().map(drop)
            }
            false => receipt.keep(),
        };
        assert!(matches!(ended, Err(ReplicaError::Changed { .. })), "{what}: {ended:?}");
        drop(replica);
        let opened = Replica::open(disk.device(), &options).err();
        assert!(matches!(opened, Some(ReplicaError::Changed { .. })), "{what}, opened anew: {opened:?}");
    }
}

/// A device is flushed at the end of a commit, and somebody writes while that takes its time: the stamp that is stored is not theirs.
#[test]
fn a_foreign_write_to_a_device_during_the_flush_of_a_commit_is_noticed() {
    let _alone = alone();
    let source = batches::source();
    let Some((temp, disk, options)) = on_device(&source) else { return };
    for (to, meddles) in [(1, false), (2, true)] {
        let destination = Box::new(DeviceDestination::new(disk.device().to_path_buf()).unwrap());
        let meddled = Arc::new(AtomicBool::new(meddles));
        let destination = Frail { destination, power: Power::new(Outage::Kill), meddled: meddled.clone() };
        let folder = Dir::open(&temp.path().join("state")).unwrap();
        let mut replica = Replica::begin(Box::new(destination), Box::new(folder), &options).unwrap();
        let merged = merge(&mut replica, &data_alone(&source, to), CommitMode::Journal);
        assert!(!meddled.load(SeqCst), "it is flushed");
        assert_eq!(matches!(merged, Err(ReplicaError::Changed { .. })), meddles, "{merged:?}");
    }
    let opened = Replica::open(disk.device(), &options).err();
    assert!(matches!(opened, Some(ReplicaError::Changed { .. })), "{opened:?}");
}

#[test]
fn a_foreign_write_to_a_device_between_batches_is_noticed() {
    let _alone = alone();
    let source = batches::source();
    let Some((_temp, disk, options)) = on_device(&source) else { return };
    let mut replica = Replica::open(disk.device(), &options).unwrap();
    let nonce = replica.status().nonce;
    let (mut log, mut running) = replica.batches().unwrap();
    let nonce = batches::send_one(&source, &mut log, &mut running, 1, nonce).unwrap();
    running.apply().unwrap();
    meddle(&disk, false);
    let sent = batches::send_one(&source, &mut log, &mut running, 2, nonce);
    assert!(matches!(sent, Err(ReplicaError::Changed { .. })), "{sent:?}");
}

#[test]
fn a_foreign_write_that_the_system_holds_in_memory_is_noticed_at_the_opening() {
    let _alone = alone();
    let source = source();
    let Some((_temp, disk, options)) = on_device(&source) else { return };
    // As long as anybody has it open, nothing is written out when its writer closes it.
    let _holder = std::fs::File::open(disk.device()).unwrap();
    meddle(&disk, false);
    let opened = Replica::open(disk.device(), &options).err();
    assert!(matches!(opened, Some(ReplicaError::Changed { .. })), "{opened:?}");
}

/// After a device was attached anew, only the note tells of a foreign write. An adoption that comes to nothing must not take it
/// away, also where the lineage cannot be written.
#[test]
fn an_adoption_that_comes_to_nothing_forgets_no_foreign_write() {
    let _alone = alone();
    let source = source();
    let Some((temp, disk, options)) = on_device(&source) else { return };
    let path = disk.device().to_path_buf();
    drop(disk);
    let disk = Loop::named(&path, &temp.path().join("image")).unwrap();
    // The first look.
    Replica::open(&path, &options).unwrap();
    meddle(&disk, true);
    let no_room = temp.path().join("state").join(device::reserved(crate::state::lineage::NAME));
    for full in [true, false] {
        if full {
            std::fs::create_dir(&no_room).unwrap();
        }
        let adopting = ReplicaOptions { adopt: true, ..options.clone() };
        Replica::open(&path, &adopting).unwrap();
        if full {
            std::fs::remove_dir(&no_room).unwrap();
        }
        let opened = Replica::open(&path, &options).map(drop);
        assert!(matches!(opened, Err(ReplicaError::Changed { .. })), "{opened:?}");
    }
}

/// A batch that was confirmed outlives the notice of a foreign write: until the device has it, the journal does.
#[test]
fn a_foreign_write_to_a_device_costs_no_confirmed_batch() {
    let _alone = alone();
    let source = batches::source();
    let Some((temp, disk, options)) = on_device(&source) else { return };
    let path = disk.device();
    let mut replica = Replica::open(path, &options).unwrap();
    // Whoever plugs in the wrong disk has not written to the right one.
    drop(replica.touched(Foreign::Medium(MediumChange::OtherDisk)));
    assert!(inspect(path, &options).unwrap().unwrap().unsure.is_nothing());
    let nonce = replica.status().nonce;
    let (mut log, mut running) = replica.batches().unwrap();
    batches::send_one(&source, &mut log, &mut running, 1, nonce).unwrap();
    meddle(&disk, false);
    let applied = running.apply();
    assert!(matches!(applied, Err(ReplicaError::Changed { .. })), "{applied:?}");
    drop(running);
    drop(replica);
    for _ in 0..2 {
        let opened = Replica::open(path, &options).err();
        assert!(matches!(opened, Some(ReplicaError::Changed { .. })), "{opened:?}");
        assert!(temp.path().join("state").join(crate::journal::WHOLE).exists());
    }
    let lineage = inspect(path, &options).unwrap().unwrap();
    assert!(lineage.unsure == crate::Unsure::Everything && lineage.nonce == nonce, "{lineage:?}");
}

/// Wherever a comparison is killed that mends what others wrote to a device: it can be made again, and what opens without one
/// is what it says.
#[test]
fn a_comparison_that_was_killed_while_it_mended_a_device_can_be_made_again() {
    let _alone = alone();
    let source = source();
    let Some((temp, disk, options)) = on_device(&source) else { return };
    let path = disk.device();
    let open = |power: &Power, doubt| {
        let destination = DeviceDestination::new(path.to_path_buf())?;
        let folder = FaultyFolder::new(power, &temp.path().join("state")).unwrap();
        Replica::begin(
            Box::new(destination),
            Box::new(folder),
            &ReplicaOptions { doubt, ..ReplicaOptions::default() },
        )
    };
    let on = || Power::new(Outage::Kill);
    let image = &source.images[0];
    let mend = |power: &Power| {
        let mut replica = open(power, true)?;
        let mut header = source.header(0, 0, delta::Method::Compare);
        header.binds = Some(replica.status().nonce);
        let content = content(&replica).unwrap();
        let blocks = (0..source.size(0) / BLOCK).filter(|block| {
            let place = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
            content[place.clone()] != image[place]
        });
        let delta = source.encode(&header, 0, &blocks.collect());
        merge(&mut replica, &delta, CommitMode::Journal)
    };
    let mut merged = 0;
    for step in 1.. {
        meddle(&disk, true);
        assert!(matches!(open(&on(), false), Err(ReplicaError::Changed { .. })), "step {step}");
        let settled = settle(path, &options);
        assert!(matches!(settled, Err(ReplicaError::Changed { .. })), "step {step}: {settled:?}");
        let power = on();
        power.cut_at(step);
        let mended = mend(&power).is_ok();
        power.crash(Keep::KeepAll, Keep::KeepAll, 0).unwrap();
        match open(&on(), false) {
            Ok(replica) => {
                merged += 1;
                assert!(content(&replica).unwrap().starts_with(image), "killed at step {step}");
            }
            Err(ReplicaError::Changed { .. }) => {}
            Err(e) => panic!("killed at step {step}: {e}"),
        }
        mend(&on()).unwrap_or_else(|e| panic!("killed at step {step}, compared again: {e}"));
        let replica = open(&on(), false).unwrap();
        assert!(content(&replica).unwrap().starts_with(image), "killed at step {step}, compared again");
        if mended {
            break;
        }
    }
    assert!(merged > 1);
}

/// A file's replica in the boot after this one.
fn open_after_a_reboot(path: &Path, options: &ReplicaOptions) -> crate::Result<Replica> {
    let mut destination = FileDestination::new(path.to_path_buf(), device::Format::Raw).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    destination.boot = Boot { id: "the next".into(), began: now.as_nanos() as u64 + 1_000_000_000 };
    let folder = device::Dir::open(&path.with_file_name("state")).unwrap();
    Replica::begin(Box::new(destination), Box::new(folder), options)
}

/// A block that no epoch changes, in which another program writes.
fn write_elsewhere(source: &Source, path: &Path) {
    std::thread::sleep(Duration::from_millis(12));
    let quiet = (0..400).rev().find(|block| !source.changed(0, 4).contains(block)).unwrap();
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_at(b"FOREIGN", quiet * BLOCK + 5).unwrap();
}

/// In the midst of a step in place others write to a file, and only the note tells: an adoption that comes to nothing leaves it.
#[test]
fn an_adoption_that_comes_to_nothing_leaves_the_note_of_a_file() {
    let _alone = alone();
    let source = source();
    let temp = testing::temporary();
    let path = temp.path().join("vm.raw");
    let options = ReplicaOptions { folder: Some(temp.path().join("state")), ..ReplicaOptions::default() };
    let mut replica = Replica::open(&path, &options).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let delta = source.lacks(replica.status(), None, 1);
    receive_part(&mut replica, &delta, CommitMode::InPlace, 5).unwrap();
    drop(replica);
    write_elsewhere(&source, &path);
    Replica::open(&path, &ReplicaOptions { adopt: true, ..options.clone() }).unwrap();
    let here = Replica::open(&path, &options).map(drop);
    assert!(matches!(here, Err(ReplicaError::Changed { .. })), "{here:?}");
    let later = open_after_a_reboot(&path, &options).map(drop);
    assert!(matches!(later, Err(ReplicaError::Changed { .. })), "{later:?}");
}

/// A part of a step in place was made durable, and its lineage says so. Then the image is rolled back without that, over a power cut: to what it
/// was before the step.
#[test]
fn an_image_without_the_part_that_a_step_has_made_durable_is_refused() {
    let _alone = alone();
    let source = source();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let options = ReplicaOptions { folder: Some(temp.path().join("state")), ..ReplicaOptions::default() };
    let mut replica = Replica::open(&path, &options).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let delta = source.lacks(replica.status(), None, 1);
    receive_part(&mut replica, &delta, CommitMode::InPlace, 5).unwrap();
    drop(replica);
    let file = temp.path().join("state").join(crate::state::lineage::NAME);
    let mut lineage: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let changed = device::identity(&path).unwrap().ctime_ns;
    assert_eq!(lineage["step"]["durable"], changed);
    open_after_a_reboot(&path, &options).unwrap();
    // The time of a file cannot be set back, so those that it is held against are moved on.
    lineage["stamp"]["changed"] = changed.into();
    lineage["step"]["durable"] = (changed + 1).into();
    std::fs::write(&file, lineage.to_string()).unwrap();
    let refused = open_after_a_reboot(&path, &options).map(drop);
    assert!(matches!(refused, Err(ReplicaError::Changed { .. })), "{refused:?}");
}

/// Wherever a comparison is killed that mends what others wrote to a file: until it is done, the file is refused.
#[test]
fn a_repair_that_was_killed_forgives_no_foreign_write() {
    let _alone = alone();
    let source = source();
    let temp = testing::in_memory();
    let path = temp.path().join("vm.raw");
    for (outage, keep) in [(Outage::Kill, Keep::KeepAll), (Outage::PowerCut, Keep::LoseUnsynced)] {
        for commit in [CommitMode::Journal, CommitMode::InPlace] {
            let mut refused = 0;
            for step in (1..).filter(|step| testing::soak() || *step < 24 || step % 17 == 0) {
                let _ = (std::fs::remove_file(&path), std::fs::remove_dir_all(temp.path().join("state")));
                let seeded = open_frail(&path, &Power::new(Outage::Kill), None);
                merge(&mut seeded.unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
                write_elsewhere(&source, &path);
                let power = Power::new(outage);
                power.cut_at(step);
                let doubting = ReplicaOptions { doubt: true, ..ReplicaOptions::default() };
                if let Ok(mut replica) = open_frail_with(&path, &power, &doubting) {
                    replica.save_every(40 * BLOCK);
                    let mut status = replica.status().clone();
                    status.positions.iter_mut().for_each(|position| position.epoch = None);
                    let delta = source.lacks(&status, Some(&std::fs::read(&path).unwrap()), 1);
                    let _ = merge(&mut replica, &delta, commit);
                }
                let done = power.steps() < step;
                power.crash(keep, keep, step).unwrap();
                match Replica::open(
                    &path,
                    &ReplicaOptions { folder: Some(temp.path().join("state")), ..ReplicaOptions::default() },
                ) {
                    Ok(mut replica) => {
                        let delta = source.lacks(replica.status(), None, 4);
                        merge(&mut replica, &delta, CommitMode::Journal).unwrap();
                        let what = format!("{commit:?}, {outage:?} at step {step}");
                        assert!(
                            std::fs::read(&path).unwrap() == source.images[4],
                            "{what}: not what it says"
                        );
                    }
                    Err(ReplicaError::Changed { .. }) => refused += 1,
                    Err(e) => panic!("{commit:?}, {outage:?} at step {step}: {e}"),
                }
                if done {
                    break;
                }
            }
            assert!(refused > 3, "{commit:?}, {outage:?}: refused {refused} times");
        }
    }
}

/// Wherever a commit is killed, and others write then: who doubts sees what is there, and a comparison mends it. Wherever that is killed in
/// turn, the file is refused until it is done.
#[test]
fn what_was_half_committed_and_then_changed_is_mended_by_a_comparison() {
    let _alone = alone();
    let source = source();
    let temp = testing::in_memory();
    let (path, state) = (temp.path().join("vm.raw"), temp.path().join("state"));
    let options = ReplicaOptions { folder: Some(state.clone()), ..ReplicaOptions::default() };
    let doubting = ReplicaOptions { doubt: true, ..options.clone() };
    let refused = |what: &str| {
        let opened = Replica::open(&path, &options).map(|replica| replica.status().clone());
        assert!(matches!(opened, Err(ReplicaError::Changed { .. })), "{what}: {opened:?}");
    };
    let repair = |replica: &mut Replica| {
        let mut status = replica.status().clone();
        status.positions.iter_mut().for_each(|position| position.epoch = None);
        let delta = source.lacks(&status, Some(&std::fs::read(&path).unwrap()), 2);
        merge(replica, &delta, CommitMode::Journal).map(drop)
    };
    // How often a journal was half merged, of deltas of either kind, and a new file had its name and was not known by it.
    let (mut half, mut renamed) = ([0, 0], 0);
    for (kind, delta) in [source.seed(0), source.tracked(0, 1), Vec::new()].iter().enumerate() {
        for step in (1..).filter(|step| testing::soak() || *step < 12 || step % 19 == 0 || kind == 0) {
            for file in [&path, &temp.path().join("vm.raw.partial")] {
                let _ = std::fs::remove_file(file);
            }
            let _ = std::fs::remove_dir_all(&state);
            if kind > 0 {
                merge(&mut Replica::open(&path, &options).unwrap(), &source.seed(0), CommitMode::Journal)
                    .unwrap();
            }
            if kind == 2 {
                write_elsewhere(&source, &path);
            }
            let power = Power::new(Outage::Kill);
            power.cut_at(step);
            if let Ok(mut replica) = open_frail_with(
                &path,
                &power,
                &ReplicaOptions { doubt: kind == 2, ..ReplicaOptions::default() },
            ) {
                let _ = if kind == 2 {
                    repair(&mut replica)
                } else {
                    merge(&mut replica, delta, CommitMode::Journal).map(drop)
                };
            }
            let done = power.steps() < step;
            if !path.exists() {
                assert!(!done, "delta {kind} was not committed");
                continue;
            }
            later(&path);
            write_elsewhere(&source, &path);
            let what = format!("delta {kind} killed at {step}");
            if kind > 0 {
                half[kind - 1] += usize::from(state.join("journal-whole").exists());
            } else {
                renamed += usize::from(!done);
            }
            refused(&what);
            let content = std::fs::read(&path).unwrap();
            assert!(Replica::open(&path, &doubting).unwrap().status().changed.is_some(), "{what}");
            assert!(std::fs::read(&path).unwrap() == content, "{what}: to look has changed it");
            refused(&what);
            // Killed again.
            let power = Power::new(Outage::Kill);
            power.cut_at(1 + step % 41);
            let repaired =
                open_frail_with(&path, &power, &ReplicaOptions { doubt: true, ..ReplicaOptions::default() })
                    .and_then(|mut replica| repair(&mut replica));
            match Replica::open(&path, &options).map(|replica| replica.status().epoch) {
                Ok(epoch) => assert_eq!(epoch, Some(source.epochs[2]), "{what}: {repaired:?}"),
                Err(ReplicaError::Changed { .. }) => {
                    repair(&mut Replica::open(&path, &doubting).unwrap())
                        .unwrap_or_else(|e| panic!("{what}: {e}"));
                }
                Err(e) => panic!("{what}: {e}"),
            }
            assert_eq!(
                Replica::open(&path, &options).unwrap().status().epoch,
                Some(source.epochs[2]),
                "{what}"
            );
            assert!(std::fs::read(&path).unwrap() == source.images[2], "{what}: not what it says");
            if done {
                break;
            }
        }
    }
    assert!(half.iter().all(|times| *times > 2) && renamed > 0, "{half:?} {renamed}");
}

/// A batch is confirmed and not written yet, and another lies whole behind it; the process is killed, and others fill the file system. Nothing tells
/// which of them was confirmed: none is left off, and both are merged once there is room.
#[test]
fn what_may_be_confirmed_waits_for_room() {
    let _alone = alone();
    let temp = on_disk();
    let Some((_mount, place)) = mounted("ext4", temp.path()) else {
        return skipped("batches on a full file system", "ext4 or mounting needs root");
    };
    let path = place.join("vm.raw");
    let mut source = Source::new(5, &[1600; 4]);
    let changed: [std::ops::Range<u64>; 4] = [0..20, 0..1, 200..456, 200..1400];
    let mut image = vec![0; (1600 * BLOCK) as usize];
    for (at, blocks) in changed.iter().enumerate() {
        let byte = 0xa0 + at as u8;
        image[(blocks.start * BLOCK) as usize..(blocks.end * BLOCK) as usize].fill(byte);
        source.images[at] = image.clone();
    }
    let mut replica = open(&path).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let mut nonce = replica.status().nonce;
    let (mut log, mut running) = replica.batches().unwrap();
    for (to, blocks) in changed.iter().enumerate().skip(1) {
        let header = delta::Header {
            chain: vec![source.epochs[0]],
            binds: Some(nonce),
            batch: true,
            ..source.header(to - 1, to, delta::Method::Tracked)
        };
        nonce = header.stream;
        let bytes = source.encode_in(&header, to, &blocks.clone().collect(), 128);
        if to == 3 {
            let mut units = delta::Units::new(&bytes[..]);
            while let Some(unit) = units.next().unwrap() {
                log.unit(&unit).unwrap();
            }
            log.end().unwrap();
            break;
        }
        batches::send(&mut log, &mut running, &bytes, nonce).unwrap();
        if to == 1 {
            running.apply().unwrap();
        }
    }
    drop((log, running));
    drop(replica);
    let full = place.join("filler");
    let filler = filled(&full);
    let refused = open(&path).map(|replica| replica.status().clone());
    assert!(matches!(&refused, Err(error) if error.to_string().contains("no space left")), "{refused:?}");
    drop(filler);
    std::fs::remove_file(full).unwrap();
    assert_eq!(open(&path).unwrap().status().nonce, nonce);
    assert!(std::fs::read(&path).unwrap() == source.images[3], "a batch is missing");
}

/// A file that takes all there is.
fn filled(path: &Path) -> std::fs::File {
    let mut filler = std::fs::File::create(path).unwrap();
    for len in [1 << 20, 4096, 1] {
        while std::io::Write::write_all(&mut filler, &vec![1u8; len]).is_ok() {}
    }
    filler
}

/// A batch writes into a hole and the next one trims it, or every other block of it; the process is killed, and others fill the file system. What
/// was confirmed is merged all the same.
#[test]
fn confirmed_batches_need_no_room_for_what_was_trimmed_since() {
    let _alone = alone();
    let temp = on_disk();
    let Some((_mount, place)) = mounted("ext4", temp.path()) else {
        return skipped("batches on a full file system", "ext4 or mounting needs root");
    };
    for every in [1, 2] {
        confirmed_and_trimmed(&place, every);
    }
}

/// Trims one in so many blocks.
fn confirmed_and_trimmed(place: &Path, every: usize) {
    let path = place.join(format!("vm-{every}.raw"));
    let mut source = Source::new(5, &[600; 4]);
    let mut image = vec![0; (600 * BLOCK) as usize];
    image[..20 * BLOCK as usize].fill(1);
    let hole = 200..456;
    let trimmed: Vec<u64> = hole.clone().step_by(every).collect();
    let changed: [Vec<u64>; 4] =
        [vec![], vec![0], (1..2).chain(hole).collect(), (0..1).chain(trimmed.clone()).collect()];
    for (at, blocks) in changed.iter().enumerate() {
        for block in blocks {
            let trims = at == 3 && trimmed.contains(block);
            let byte = if trims { 0 } else { 0xa0 + at as u8 };
            image[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(byte);
        }
        source.images[at] = image.clone();
    }
    let mut replica = open(&path).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let mut nonce = replica.status().nonce;
    let (mut log, mut running) = replica.batches().unwrap();
    for (to, blocks) in changed.iter().enumerate().skip(1) {
        let header = delta::Header {
            chain: vec![source.epochs[0]],
            binds: Some(nonce),
            batch: true,
            ..source.header(to - 1, to, delta::Method::Tracked)
        };
        nonce = header.stream;
        let bytes = source.encode_in(&header, to, &blocks.iter().copied().collect(), 128);
        batches::send(&mut log, &mut running, &bytes, nonce).unwrap();
        running.apply().unwrap();
    }
    drop((log, running));
    drop(replica);
    let full = place.join("filler");
    let filler = filled(&full);
    let replica = open(&path).unwrap();
    assert_eq!(replica.status().nonce, nonce, "{:?}", replica.status());
    assert!(std::fs::read(&path).unwrap() == source.images[3], "not the last batch that was confirmed");
    drop((replica, filler));
    std::fs::remove_file(full).unwrap();
}
