//! Which disk a replica is on, and who wrote to it: what dsync itself let others write, disks that are exchanged, partitions.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::tracked::Untrack;
use dsync_tests::{Run, Scene, Site, find, got, image, need, need_root, skipped, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// The name of a loop device that nothing else takes; the device is removed at the end.
struct Node(PathBuf);

impl Node {
    fn new() -> Node {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Node(format!("/dev/loop{}", 3000 + std::process::id() % 1000 * 10 + number).into())
    }

    fn attach(&self, image: &Path) -> Option<Loop> {
        Loop::named(&self.0, image)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Detaching may take a moment.
        let number = self.0.to_string_lossy().trim_start_matches("/dev/loop").to_owned();
        let line = format!("losetup --detach {} 2>/dev/null; sleep 0.2", self.0.display());
        Run::shell(&line).output();
        let remove =
            "import fcntl,os,sys; fcntl.ioctl(os.open('/dev/loop-control', 2), 0x4C81, int(sys.argv[1]))";
        Run::new("python3").args(["-c", remove, &number]).output();
    }
}

fn write(path: &Path, at: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).expect("a disk");
    file.write_all_at(bytes, at).and_then(|()| file.sync_all()).expect("a write");
}

fn byte(path: &Path, at: u64) -> u8 {
    let mut byte = [0];
    File::open(path).and_then(|file| file.read_exact_at(&mut byte, at)).expect("a disk");
    byte[0]
}

fn assert_same(source: &Path, replica: &Path) {
    let read = |path: &Path| std::fs::read(path).expect("a disk");
    assert!(read(source) == read(replica), "{} and {} differ", source.display(), replica.display());
}

fn sync(scene: &Scene, to: &Path, options: &[&str]) -> Run {
    scene.site.sync(&scene.image, to, options)
}

/// A replica is not served for writing. Promoted, what is written to it is not overwritten by its old source, on a device as in a
/// file, after a clean end as after a kill.
#[test]
fn a_promoted_replica_is_no_silent_destination() {
    let what = "serving a replica on a device";
    let mut scene = Scene::synced("a promoted replica", 16 * MIB);
    let file = scene.site.image("device.img", 16 * MIB);
    let device = if need_root(what) { Loop::new(&file) } else { None };
    if device.is_none() {
        skipped(what, "there is no loop device");
    }
    let places =
        std::iter::once(scene.replica.clone()).chain(device.iter().map(|d| d.device().to_path_buf()));
    for place in places.collect::<Vec<_>>() {
        sync(&scene, &place, &[]).ok();
        for kill in [false, true] {
            let name = place.file_stem().expect("a name").to_string_lossy().into_owned();
            let shown = place.display().to_string();
            let refused = scene.site.dsync(["serve", "--socket", "s"]).arg(&place).code(4);
            refused.says(&[&shown, "is a replica of source", "dsync promote ", "--read-only"]);
            scene.site.serve(&[&place], &["--read-only"]).stop();
            scene.change(3);
            assert_eq!(sync(&scene, &place, &[]).ok().summary()["method"], "tracked");
            scene.site.dsync(["promote", "--force"]).arg(&place).ok();
            let server = scene.site.serve(&[&place], &[]);
            let mut client = server.client(&name);
            client.write(5 * MIB, &[0xee; 4096]).and_then(|()| client.flush()).expect("a write");
            client.close().expect("the end");
            let _ = if kill { server.kill() } else { server.stop() };
            scene.change(10);
            for command in ["sync", "mirror"] {
                let run = scene.site.dsync([command]).arg(&scene.image).arg(&place);
                run.code(4).says(&[&shown, "have diverged", "--save-there FILE"]);
            }
            let delta = scene.site.dsync(["extract", "--since", "1"]).arg(&scene.image).ok().stdout;
            scene.site.dsync(["merge"]).arg(&place).input(delta).code(4).says(&["was promoted", "overwrite"]);
            scene.site.dsync(["recover"]).arg(&place).code(4).says(&["was promoted", "dsync demote"]);
            let status = scene.site.dsync(["status"]).arg(&place).ok().text();
            assert!(status.contains("promoted: term"), "{status}");
            for options in [&[][..], &["--repair"], &["--repair", "--commit", "in-place"]] {
                let run = scene.site.dsync(["verify"]).args(options).arg(&scene.image).arg(&place);
                run.code(4).says(&[&shown, "have diverged", "--save-there FILE"]);
            }
            sync(&scene, &place, &[]).code(4);
            sync(&scene, &place, &["--adopt"]).code(4).says(&[&shown, "have diverged", "--save-there FILE"]);
            assert_eq!(byte(&place, 5 * MIB), 0xee);
            // Given up by consent, it follows again.
            sync(&scene, &place, &["--discard-there"]).ok();
            assert_same(&scene.image, &place);
            scene.change(10);
            assert_eq!(sync(&scene, &place, &[]).ok().summary()["method"], "tracked");
        }
        assert_same(&scene.image, &place);
    }
}

/// A replica between two epochs never was the disk of anybody: it is no source, and cannot be made one.
#[test]
fn a_replica_that_is_not_complete_is_no_source() {
    let mut scene = Scene::synced("an incomplete source", 32 * MIB);
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    let site = &far.site;
    let (replica, second) = (far.replica(), site.path("second.raw"));
    let cut = |scene: &mut Scene| {
        scene.change(1200);
        let cut = far.sync(scene, &["--commit", "in-place"], Some(2 * MIB)).output();
        assert!(!cut.status.success(), "it was to be cut off: {cut}");
    };
    cut(&mut scene);
    let shown = replica.display().to_string();
    for words in [&["extract"][..], &["changes", "--since", "x"], &["checkpoint", "--name", "x"]] {
        let run = site.dsync([words[0]]).arg(&replica).args(&words[1..]).output();
        assert!(!run.status.success(), "{words:?}: {run}");
    }
    site.dsync(["extract"]).arg(&replica).code(4).says(&[&shown, "cut off between"]);
    for command in ["sync", "verify"] {
        let run = site.dsync([command]).arg(&replica).arg(&second);
        run.code(4).says(&[&shown, "cut off between", "dsync sync", "dsync forget"]);
    }
    assert!(!second.exists(), "something was copied");
    let refused = site.dsync(["promote", "--force"]).arg(&replica).code(4);
    refused.says(&[&shown, "cut off between", "dsync sync", "dsync forget"]);
    // Completed, it is a source.
    far.sync(&scene, &[], None).ok();
    image::assert_equal(&scene.image, &replica);
    site.sync(&replica, &second, &[]).ok();
    image::assert_equal(&replica, &second);
    // So it is as a plain image, which is nobody's replica.
    cut(&mut scene);
    site.sync(&replica, &second, &[]).code(4).says(&["dsync forget"]);
    site.dsync(["forget", "--journal-dir"]).arg(site.path(".vm.raw.dsync")).arg(&replica).ok();
    site.sync(&replica, &second, &[]).ok();
    image::assert_equal(&replica, &second);
}

/// A replica between two epochs is one by whatever name it is read: a link, a loop device over it, without the option that its state is elsewhere.
#[test]
fn a_replica_that_is_not_complete_is_no_source_by_another_name() {
    for is_elsewhere in [false, true] {
        let mut scene = Scene::synced("an incomplete source by another name", 32 * MIB);
        let far = Far::new(RSH);
        let site = &far.site;
        let (replica, second, link) = (far.replica(), site.path("second.raw"), site.path("link.raw"));
        let elsewhere = site.path("elsewhere");
        let there = ["--journal-dir", elsewhere.to_str().expect("UTF-8")];
        let options = if is_elsewhere { &there[..] } else { &[] };
        far.sync(&scene, options, None).ok();
        std::fs::hard_link(&replica, &link).expect("a link");
        scene.change(1200);
        let in_place = [options, &["--commit", "in-place"]].concat();
        assert!(
            !far.sync(&scene, &in_place, Some(2 * MIB)).output().status.success(),
            "it was to be cut off"
        );
        for name in [&replica, &link] {
            site.sync(name, &second, &[]).code(4).says(&["cut off between"]);
        }
        let device = match need_root("a replica beneath a loop device") {
            true => Loop::with(&["--read-only"], &replica),
            false => None,
        };
        if let Some(device) = &device {
            site.sync(device.device(), &second, &[]).code(6).says(&["is in use (the backing of"]);
        }
        for name in [&*link].into_iter().chain(device.as_ref().map(Loop::device)) {
            let served = site.dsync(["serve"]).arg(name).arg("--socket").arg(site.socket("s"));
            served.code(4).says(&["is a replica of source"]);
        }
        assert!(!second.exists(), "something was copied");
        drop(device);
        far.sync(&scene, options, None).ok();
        image::assert_equal(&scene.image, &replica);
        site.sync(&link, &second, &[]).ok();
        image::assert_equal(&replica, &second);
    }
}

/// Between the look at a replica and its opening as a source a sync to it may begin.
#[test]
fn a_replica_to_which_a_sync_begins_meanwhile_is_not_read() {
    let mut scene = Scene::synced("a source that becomes incomplete", 32 * MIB);
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    let site = &far.site;
    let (replica, second) = (far.replica(), site.path("second.raw"));
    site.sync(&replica, &second, &[]).ok();
    scene.change(1200);
    // Whoever opens a source holds it for a moment.
    let lock = File::open(site.state().join("sources/lock")).expect("a lock");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
    let reading = site.sync(&replica, &second, &[]).start();
    let asleep = format!("/proc/{}/wchan", reading.pid().as_raw_nonzero());
    until("a sync that has looked at its source", || {
        std::fs::read_to_string(&asleep).is_ok_and(|at| at.contains("nanosleep"))
    });
    assert!(
        !far.sync(&scene, &["--commit", "in-place"], Some(2 * MIB)).output().status.success(),
        "it was to be cut off"
    );
    drop(lock);
    let read = reading.output(Duration::from_secs(60));
    assert_eq!(read.status.code(), Some(6), "{read}");
    read.says(&["a sync to it has begun"]);
    far.sync(&scene, &[], None).ok();
    site.sync(&replica, &second, &[]).ok();
    image::assert_equal(&scene.image, &second);
}

/// A replica on a device is that of the disk, and not of what else has its name later.
#[test]
fn another_disk_under_the_name_of_a_replicas_device_is_no_replica() {
    let what = "another disk under the name of a replica's device";
    if !need_root(what) {
        return;
    }
    let scene = Scene::synced(what, 8 * MIB);
    let (site, elsewhere) = (&scene.site, scene.site.path("elsewhere"));
    let [one, other] = ["one.raw", "other.raw"].map(|name| site.image(name, 8 * MIB));
    let Some(device) = Loop::new(&one) else { return skipped(what, "losetup cannot attach a loop device") };
    let name = device.device().to_path_buf();
    let options = ["--journal-dir", elsewhere.to_str().expect("UTF-8")];
    site.sync(&scene.image, &name, &options).ok();
    let serve = || site.dsync(["serve"]).arg(&name).arg("--socket").arg(site.socket("s"));
    serve().code(4).says(&["is a replica of source", "dsync promote --journal-dir"]);
    drop(device);
    let Some(_device) = Loop::named(&name, &other) else {
        return skipped(what, "its name was taken meanwhile");
    };
    site.serve(&[&name], &[]).stop();
}

/// Between the look at a destination and its lock another command may make it, and others may open it since.
#[test]
fn a_replica_that_is_made_meanwhile_is_looked_at_anew() {
    let what = "a replica that is made meanwhile";
    if !need(&["strace"], what) {
        return;
    }
    let scene = Scene::new(what, 8 * MIB);
    let strace = scene.site.run(&find("strace").expect("strace"));
    let slow = ["-f", "-e", "trace=flock", "-e", "inject=flock:delay_enter=4000000:when=1"];
    let sync = strace
        .args(slow)
        .arg(dsync_tests::site::binary())
        .arg("sync")
        .arg(&scene.image)
        .arg(&scene.replica)
        .start();
    until("a sync that is to lock its replica", || sync.stderr_so_far().contains("flock("));
    scene.sync(&[]).ok();
    let late = sync.output(Duration::from_secs(60));
    assert_eq!(late.status.code(), Some(6), "{late}");
    late.says(&["another command has just made it"]);
    scene.sync(&[]).ok();
    scene.equal();
}

/// What goes wrong at the end of one disk leaves the others closed in order.
#[test]
fn one_disk_that_cannot_be_ended_leaves_the_others_in_order() {
    let scene = Scene::synced("ends of several disks", 16 * MIB);
    let other = scene.site.image("other.raw", 64 * MIB);
    let copy = scene.site.path("copy.raw");
    {
        let server = scene.site.serve(&[&other], &[]);
        scene.site.sync(&other, &copy, &[]).ok();
        server.stop();
    }
    scene.site.dsync(["promote", "--force"]).arg(&scene.replica).ok();
    let mut server = scene.site.serve(&[&scene.replica, &other], &[]);
    let mut client = server.client("other");
    client.write(MIB, &[7; 4096]).and_then(|()| client.flush()).expect("a write");
    client.close().expect("the end");
    // The image of the first is gone when it is to be stamped.
    std::fs::remove_file(&scene.replica).expect("an image");
    server.process().signal(Signal::TERM);
    let ended = server.process().wait_for(Duration::from_secs(60)).expect("the end");
    assert!(!ended.success(), "it failed, and did not say so");
    drop(server);
    // What a server that ended in order has stamped.
    let folders = std::fs::read_dir(scene.site.state().join("sources")).expect("sources").flatten();
    let stamps = folders.filter_map(|folder| {
        let read = |name| std::fs::read_to_string(folder.path().join(name)).ok();
        read("source").filter(|source| source.contains("other.raw")).and_then(|_| read("stamp"))
    });
    let stamps: Vec<String> = stamps.map(|stamp| stamp.replace(' ', "")).collect();
    assert_eq!(stamps.len(), 1, "{stamps:?}");
    assert!(stamps[0].contains("\"clean\":true"), "{stamps:?}");
    let summary = scene.site.sync(&other, &copy, &[]).ok().summary();
    assert_eq!(summary["blocks_changed"], 1, "{summary}");
    image::assert_equal(&other, &copy);
}

/// The kernel counts what is written to a device, whoever it is.
#[test]
fn a_write_to_a_replicas_device_or_partition_is_noticed() {
    let what = "writes to a replica's device";
    if !need_root(what) || !need(&["losetup", "sfdisk", "partx", "mkfs.ext4"], what) {
        return;
    }
    let mut scene = Scene::synced(what, 64 * MIB);
    scene.stop();
    Run::shell(&format!("echo 2048,,L | sfdisk -q {}", scene.image.display())).ok();
    let node = Node::new();
    {
        let Some(disk) = node.attach(&scene.image) else { return skipped(what, "no loop device of a name") };
        let part = partition(disk.device());
        if !part.exists() {
            return skipped(what, "there are no partitions of loop devices");
        }
        Run::new("mkfs.ext4").arg("-q").arg(&part).ok();
    }
    scene.start();
    let file = scene.site.image("device.img", 64 * MIB);
    let node = Node::new();
    let disk = node.attach(&file).expect("a loop device");
    let place = disk.device().to_path_buf();
    sync(&scene, &place, &[]).ok();
    scene.change(3);
    sync(&scene, &place, &[]).ok();
    // A block that no sample looks at.
    let old = byte(&place, 9 * MIB + 12345);
    write(&place, 9 * MIB + 12345, &[!old]);
    scene.change(3);
    sync(&scene, &place, &[]).code(4).says(&["was written to", "--adopt"]);
    sync(&scene, &place, &["--adopt"]).ok();
    // A file system on a partition, mounted for writing.
    let part = partition(&place);
    {
        let Some(_mount) = Mount::new(&[], &part, &scene.site.path("mount")) else {
            return skipped(what, "loop devices cannot be mounted here");
        };
        std::fs::write(scene.site.path("mount/file"), [1; 10000]).expect("a file");
    }
    wait_free(&part);
    scene.change(3);
    sync(&scene, &place, &[]).code(4).says(&["was written to", "--adopt"]);
    // After a reboot, the mark tells; and without it, the superblock.
    let folders = std::fs::read_dir(scene.site.state().join("replicas")).expect("replicas");
    let lineage = folders.flatten().next().expect("a replica").path().join("lineage");
    let text = std::fs::read_to_string(&lineage).expect("a lineage");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot");
    let text = text.replace(boot.trim(), "before");
    std::fs::write(&lineage, &text).expect("a lineage");
    sync(&scene, &place, &[]).code(4).says(&["was written to", "--adopt"]);
    assert!(text.contains("\"everything\""), "{text}");
    let text = text.replace("\"everything\"", "\"nothing\"");
    std::fs::write(&lineage, text).expect("a lineage");
    sync(&scene, &place, &[]).code(4).says(&["mounted or written to", "--adopt"]);
    sync(&scene, &place, &["--adopt"]).ok();
    assert_same(&scene.image, &place);
}

/// The first partition of a disk; kernels that read no tables are told of it.
fn partition(disk: &Path) -> PathBuf {
    Run::new("partx").arg("--add").arg(disk).output();
    format!("{}p1", disk.display()).into()
}

/// A lazy unmount ends a moment later.
fn wait_free(device: &Path) {
    for _ in 0..200 {
        if File::options().read(true).custom_flags_excl().open(device).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

trait Exclusive {
    fn custom_flags_excl(&mut self) -> &mut Self;
}

impl Exclusive for std::fs::OpenOptions {
    fn custom_flags_excl(&mut self) -> &mut Self {
        use std::os::unix::fs::OpenOptionsExt;
        self.custom_flags(rustix::fs::OFlags::EXCL.bits() as i32)
    }
}

/// Two disks take turns under one name. Each has its own state; the one is never taken for the other.
#[test]
fn disks_that_are_exchanged_under_one_name() {
    let what = "disks that are exchanged";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let mut scene = Scene::new(what, 16 * MIB);
    let disks = ["a.img", "b.img", "c.img"].map(|name| scene.site.image(name, 16 * MIB));
    let node = Node::new();
    let Some(disk) = node.attach(&disks[0]) else { return skipped(what, "no loop device of a name") };
    let place = disk.device().to_path_buf();
    let mut client = scene.client();
    client.write(0, &[1; 4096]).and_then(|()| client.close()).expect("a write");
    sync(&scene, &place, &[]).ok();
    drop(disk);
    // The same content, but for one block that no sample looks at, and nobody knows of it.
    image::copy(&disks[0], &disks[1]);
    write(&disks[1], 7 * MIB + 40960, &[0x77; 4096]);
    // A blank disk is no replica that came back, nor one that may be begun unasked.
    let disk = node.attach(&disks[2]).expect("a loop device");
    sync(&scene, &place, &[]).code(4).says(&["last synced on", "--create"]);
    drop(disk);
    let disk = node.attach(&disks[1]).expect("a loop device");
    scene.change(5);
    sync(&scene, &place, &[]).code(4).says(&["--adopt"]);
    assert_eq!(byte(&place, 7 * MIB + 40960), 0x77);
    sync(&scene, &place, &["--adopt"]).ok();
    assert_same(&scene.image, &place);
    drop(disk);
    for round in 0..4 {
        let disk = node.attach(&disks[round % 2]).expect("a loop device");
        scene.change(5);
        sync(&scene, &place, &[]).ok();
        drop(disk);
        assert_eq!(image::first_difference(&scene.image, &disks[round % 2]), None, "{round}");
    }
    // With a folder of its own the state is found whichever disk is there.
    let folder = scene.site.path("folder");
    let option = ["--journal-dir", folder.to_str().expect("a path")];
    let disk = node.attach(&disks[2]).expect("a loop device");
    sync(&scene, &place, &[&option[..], &["--adopt"]].concat()).ok();
    drop(disk);
    image::copy(&disks[2], &disks[1]);
    let _disk = node.attach(&disks[1]).expect("a loop device");
    scene.change(5);
    sync(&scene, &place, &option).code(4).says(&["on the disk", "--journal-dir"]);
}

/// Where the source knows of a replica, no other is begun without a word.
#[test]
fn a_replica_that_is_away_is_not_made_anew() {
    let mut scene = Scene::synced("a replica that is away", 8 * MIB);
    let (folder, away) = (scene.site.path("replica"), scene.site.path("away"));
    let far = format!("far:{}", scene.site.path("far.raw").display());
    let to_far = |scene: &Scene, options: &[&str]| {
        scene.site.dsync(["sync", "--json", "--rsh", RSH]).args(options).arg(&scene.image).arg(&far)
    };
    to_far(&scene, &[]).ok();
    scene.change(10);
    std::fs::rename(&folder, &away).expect("a folder");
    scene.sync(&[]).code(4).says(&["does not exist", "mount"]);
    std::fs::create_dir(&folder).expect("a folder");
    for options in [&[][..], &["--adopt"], &["--method", "copy"], &["-n"]] {
        scene.sync(options).code(4).says(&["vm.raw", "last synced on", "epoch 1", "mounted", "--create"]);
        assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 0);
    }
    scene.site.dsync(["mirror"]).arg(&scene.image).arg(&scene.replica).code(4).says(&["--create"]);
    // It comes back.
    std::fs::remove_dir(&folder).and_then(|()| std::fs::rename(&away, &folder)).expect("a folder");
    assert_eq!(scene.sync(&[]).ok().summary()["method"], "tracked");
    scene.equal();
    // Only the file is gone, here and on another host.
    let delta = scene.site.dsync(["extract", "vm", "--since", "0"]).ok().stdout;
    for file in ["replica/vm.raw", "far.raw"] {
        std::fs::rename(scene.site.path(file), scene.site.path("kept")).expect("a file");
        let run = |scene: &Scene, options: &[&str]| match file {
            "far.raw" => to_far(scene, options),
            _ => scene.sync(options),
        };
        run(&scene, &[]).code(4).says(&["last synced on", "--create"]);
        let place = scene.site.path(file);
        scene.site.dsync(["merge"]).arg(&place).input(delta.clone()).code(4).says(&["gone", "dsync forget"]);
        scene.change(5);
        std::fs::rename(scene.site.path("kept"), &place).expect("a file");
        assert_eq!(run(&scene, &[]).ok().summary()["method"], "tracked");
        std::fs::remove_file(&place).expect("a file");
        assert_eq!(run(&scene, &["--create"]).ok().summary()["method"], "copy");
        image::assert_equal(&scene.image, &place);
        scene.change(5);
        assert_eq!(run(&scene, &[]).ok().summary()["method"], "tracked");
    }
    // A device that is not attached.
    let missing = Path::new("/dev/dsync-test-missing");
    scene.site.sync(&scene.image, missing, &[]).code(4).says(&["does not exist", "attach"]);
}

/// Source and destination that are one storage are refused, whatever they are called.
#[test]
fn a_source_is_not_its_own_destination() {
    let what = "a source as its own destination";
    let mut scene = Scene::new(what, 16 * MIB);
    let dir = scene.site.dir().to_path_buf();
    let path = |name: &str| dir.join(name);
    std::fs::hard_link(&scene.image, path("hard.raw")).expect("a link");
    std::os::unix::fs::symlink(&scene.image, path("soft.raw")).expect("a link");
    let mut places = vec![scene.image.clone(), path("hard.raw"), path("soft.raw")];
    let mut held: Vec<Box<dyn std::any::Any>> = Vec::new();
    if need_root(what) {
        std::fs::write(path("bound.raw"), "").expect("a file");
        let bound = Run::new("mount").arg("--bind").arg(&scene.image).arg(path("bound.raw")).output();
        if bound.status.success() {
            places.push(path("bound.raw"));
        }
        if let Some(one) = Loop::new(&scene.image) {
            places.push(one.device().to_path_buf());
            if let Some(two) = Loop::new(one.device()) {
                places.push(two.device().to_path_buf());
                held.push(Box::new(two));
            }
            held.push(Box::new(one));
        } else {
            skipped(what, "there is no loop device");
        }
    }
    let before = image::fingerprint(&scene.image);
    for place in &places {
        for options in [&[][..], &["--adopt"]] {
            scene.site.sync(&scene.image, place, options).code(4).says(&["shares storage"]);
        }
        let far = format!("far:{}", place.display());
        let run = scene.site.dsync(["sync", "--adopt", "--rsh", RSH]).arg(&scene.image).arg(far);
        run.code(4).says(&["shares storage"]);
    }
    assert_eq!(before, image::fingerprint(&scene.image));
    // Two devices over one file.
    if let Some(one) = places.iter().find(|place| place.starts_with("/dev")) {
        scene.stop();
        let two = Loop::new(&scene.image).expect("a loop device");
        scene.site.sync(one, two.device(), &["--adopt"]).code(4).says(&["shares storage"]);
        scene.site.sync(two.device(), &scene.image, &["--adopt"]).code(4).says(&["shares storage"]);
        drop(two);
        assert_eq!(before.0, image::fingerprint(&scene.image).0);
    }
    if places.contains(&path("bound.raw")) {
        Run::new("umount").arg("--lazy").arg(path("bound.raw")).output();
    }
    // Beside each other is no matter.
    scene.site.sync(&scene.image, &path("other.raw"), &[]).ok();
}

/// A disk that is detached and attached again within one boot may have lost what was not flushed, as in a power cut: after an
/// unclean stop the record of what is on it is not believed, and it is believed where only the file system was mounted again.
#[test]
fn a_disk_that_was_detached_is_not_taken_for_one_that_stayed() {
    let what = "a source's disk is detached";
    if !need_root(what) || !need(&["losetup", "mkfs.ext4"], what) {
        return;
    }
    let site = Site::new();
    let node = Node::new();
    let file = site.image("disk.img", 64 * MIB);
    let Some(disk) = node.attach(&file) else { return skipped(what, "no loop device of a name") };
    Run::new("mkfs.ext4").arg("-q").arg(disk.device()).ok();
    let place = site.path("mount");
    let mount = || Mount::new(&[], &node.0, &place);
    let Some(mut mounted) = mount() else { return skipped(what, "loop devices cannot be mounted here") };
    let (image, replica) = (place.join("vm.raw"), site.path("replica.raw"));
    File::create(&image).and_then(|file| file.set_len(16 * MIB)).expect("an image");
    let mut disk = Some(disk);
    for detached in [false, true, false] {
        let server = site.serve(&[&image], &[]);
        site.sync(&image, &replica, &[]).ok();
        server.client("vm").write(5 * MIB, &[7; 4096]).expect("a write");
        server.kill();
        drop(mounted);
        wait_free(&node.0);
        if detached {
            drop(disk.take());
            disk = Some(node.attach(&file).expect("a loop device"));
        }
        mounted = mount().expect("a mount");
        let server = site.serve(&[&image], &[]);
        let summary = site.sync(&image, &replica, &[]).ok().summary();
        let expected = if detached { "compare" } else { "tracked" };
        assert_eq!(summary["method"], expected, "{summary}");
        server.stop();
        assert_same(&image, &replica);
    }
    drop((mounted, disk));
}

/// The kernel's count begins again when a disk is attached again: it is noted at the first look after that, not only at a commit.
#[test]
fn a_write_after_a_replica_was_attached_anew_is_noticed() {
    let what = "a replica on a disk that is attached anew";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::synced(what, 16 * MIB);
    let file = scene.site.image("device.img", 16 * MIB);
    let node = Node::new();
    let recover = |place: &Path| scene.site.dsync(["recover"]).arg(place);
    {
        let Some(disk) = node.attach(&file) else { return skipped(what, "no loop device of a name") };
        sync(&scene, disk.device(), &[]).ok();
    }
    let attached = || {
        // Detaching may take a moment.
        (0..50).find_map(|_| {
            std::thread::sleep(Duration::from_millis(20));
            node.attach(&file)
        })
    };
    for _ in 0..2 {
        let disk = attached().expect("a loop device");
        recover(disk.device()).ok();
        recover(disk.device()).ok();
    }
    let disk = attached().expect("a loop device");
    recover(disk.device()).ok();
    let old = byte(disk.device(), 9 * MIB + 12345);
    write(disk.device(), 9 * MIB + 12345, &[!old]);
    recover(disk.device()).code(4).says(&["was written to"]);
    scene.change(3);
    sync(&scene, disk.device(), &[]).code(4).says(&["was written to", "--adopt"]);
}

/// A replica is passed on from a loop device over it, and is set back while that is not there.
#[test]
fn a_replica_that_was_set_back_out_of_sight_takes_no_other_back() {
    let what = "a loop device over a replica that is set back";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::synced(what, 16 * MIB);
    let (node, carried) = (Node::new(), scene.site.path("carried.raw"));
    let replica = scene.replica.clone();
    let attached = || {
        wait_free(&node.0);
        node.attach(&replica)
    };
    let pass_on =
        |scene: &Scene, options: &[&str]| scene.site.sync(&node.0, &carried, options).arg("--trust-device");
    let mut epochs = Vec::new();
    for _ in 0..2 {
        scene.change(3);
        let synced = scene.sync(&["--keep-last", "5"]).ok().summary();
        epochs.push(synced["epoch"].to_string());
        let Some(_disk) = attached() else { return skipped(what, "no loop device of a name") };
        pass_on(&scene, &[]).ok();
        assert_same(&replica, &carried);
    }
    wait_free(&node.0);
    let before = std::fs::read(&carried).expect("the disk");
    scene.site.dsync(["rewind", "--to", &epochs[0]]).arg(&replica).ok();
    let disk = attached().expect("a loop device");
    pass_on(&scene, &[]).code(4).says(&["may be the newest copy", "--accept-source"]);
    assert!(std::fs::read(&carried).expect("the disk") == before, "it was written to");
    // Brought up to date, it has all again.
    drop(disk);
    wait_free(&node.0);
    scene.sync(&[]).ok();
    let _disk = attached().expect("a loop device");
    pass_on(&scene, &["--accept-source"]).ok();
    assert_same(&replica, &carried);
}

/// What is written to a device is told by the kernel's count alone, and that begins anew where it is attached anew: a state that was restored
/// meanwhile may be older than what the disk holds.
#[test]
fn a_restored_state_of_a_replica_that_was_attached_anew_is_not_believed() {
    let what = "a restored state of a device that is attached anew";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::synced(what, 16 * MIB);
    let (file, node, saved) =
        (scene.site.image("device.img", 16 * MIB), Node::new(), scene.site.path("saved"));
    let of_replica = |scene: &Scene, command: &str| scene.site.dsync([command]).arg(&node.0);
    let attached = || {
        wait_free(&node.0);
        node.attach(&file)
    };
    let Some(mut disk) = attached() else { return skipped(what, "no loop device of a name") };
    for round in 0..3 {
        scene.change(3);
        sync(&scene, &node.0, &["--keep-last", "5"]).ok();
        if round == 1 {
            Run::new("cp").arg("-a").arg(scene.site.state().join("replicas")).arg(&saved).ok();
        }
    }
    drop(disk);
    disk = attached().expect("a loop device");
    of_replica(&scene, "recover").ok();
    drop(disk);
    std::fs::remove_dir_all(scene.site.state().join("replicas")).expect("its state");
    Run::new("cp").arg("-a").arg(&saved).arg(scene.site.state().join("replicas")).ok();
    disk = attached().expect("a loop device");
    let before = std::fs::read(&node.0).expect("the disk");
    of_replica(&scene, "rewind").args(["--to", "1"]).code(4).says(&["restored from a copy", "dsync verify"]);
    of_replica(&scene, "promote").arg("--force").code(4);
    sync(&scene, &node.0, &[]).code(4).says(&["--adopt"]);
    assert!(std::fs::read(&node.0).expect("the disk") == before, "it was written to");
    sync(&scene, &node.0, &["--adopt"]).ok();
    drop(disk);
    disk = attached().expect("a loop device");
    scene.change(3);
    assert_eq!(sync(&scene, &node.0, &[]).ok().summary()["method"], "tracked");
    assert_same(&scene.image, disk.device());
}

/// Deletes the partitions of a disk and makes them again, until the first one is another device under its name.
fn made_anew(disk: &Path, first: &Path) {
    use std::os::unix::fs::MetadataExt;
    let number = || std::fs::metadata(first).expect("a partition").rdev();
    let before = number();
    for _ in 0..100 {
        Run::new("partx").arg("--delete").arg(disk).ok();
        // Who comes first gets the number that has become free.
        for one in ["2", "1"] {
            Run::new("partx").args(["--add", "--nr", one]).arg(disk).ok();
        }
        if number() != before {
            return;
        }
    }
    panic!("{} has the number that it had", first.display());
}

#[test]
fn a_partition_that_was_made_anew_is_not_the_one_that_was_tracked() {
    let what = "a tracked partition that is made anew";
    if !need_root(what) || !need(&["losetup", "sfdisk", "partx"], what) {
        return;
    }
    let (site, node) = (Site::new(), Node::new());
    let image = site.image("disk.raw", 64 * MIB);
    Run::new("sfdisk").arg("-q").arg(&image).input("label: dos\n,20M\n,20M\n").ok();
    let Some(disk) = node.attach(&image) else { return skipped(what, "no loop device of a name") };
    Run::new("partx").arg("--add").arg(disk.device()).output();
    let (first, copy) = (PathBuf::from(format!("{}p1", disk.device().display())), site.path("copy.raw"));
    let track = |what: &str| site.dsync(["track", what]).arg(&first);
    let added = track("add").output();
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let _untrack = Untrack(&site, &first);
    site.sync(&first, &copy, &[]).ok();
    made_anew(disk.device(), &first);
    let gone = ["is gone, and another one is in its place", "dsync track remove", "dsync track add"];
    let status = site.dsync(["status"]).arg(&first).ok();
    assert!(gone.iter().all(|word| status.text().contains(word)), "{status}");
    assert!(!status.text().contains("only root"), "{status}");
    track("add").code(4).says(&gone);
    site.sync(&first, &copy, &[]).code(4).says(&gone);
    // The way out leaves one tracker.
    track("remove").ok();
    track("remove").code(4).says(&["is not tracked"]);
    track("add").ok();
    site.sync(&first, &copy, &[]).ok();
    assert_same(&first, &copy);
}

#[test]
fn a_loop_device_without_its_file_is_told_to_be_detached() {
    let what = "a tracked loop device that is detached";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let (site, node) = (Site::new(), Node::new());
    let [image, other] = ["one.raw", "other.raw"].map(|name| site.image(name, 4 * MIB));
    let Some(disk) = node.attach(&image) else { return skipped(what, "no loop device of a name") };
    let (device, copy) = (disk.device().to_path_buf(), site.path("copy.raw"));
    let track = |what: &str| site.dsync(["track", what]).arg(&device);
    let added = track("add").output();
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let _untrack = Untrack(&site, &device);
    site.sync(&device, &copy, &[]).ok();
    drop(disk);
    let backing = Path::new("/sys/block").join(device.file_name().expect("a name")).join("loop/backing_file");
    until("it is detached", || !backing.exists());
    let status = || site.dsync(["status"]).arg(&device).ok().text();
    let told = status();
    assert!(told.contains("the loop device is detached") && told.contains("(detached, blocks of"), "{told}");
    assert!(!told.contains("(0 B"), "{told}");
    site.sync(&device, &copy, &[]).code(4).says(&["has no disk", "attach"]);
    let _disk = node.attach(&other).expect("a loop device");
    let told = status();
    assert!(told.contains("was detached, and is attached to") && told.contains("other.raw"), "{told}");
    // It is another disk.
    site.sync(&device, &copy, &[]).code(4).says(&["is a copy of another source"]);
}

/// A device is detached and attached to its file again: what was written to that meanwhile is not known, which is said until the device is tracked
/// anew; then all of it is found.
#[test]
fn a_loop_device_that_is_attached_to_its_file_again_misses_nothing() {
    let what = "a tracked loop device that is attached again";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let (site, node) = (Site::new(), Node::new());
    let image = site.image("disk.raw", 4 * MIB);
    let Some(disk) = node.attach(&image) else { return skipped(what, "no loop device of a name") };
    let (device, copy) = (disk.device().to_path_buf(), site.path("copy.raw"));
    let track = |what: &str| site.dsync(["track", what]).arg(&device);
    let added = track("add").output();
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let _untrack = Untrack(&site, &device);
    let sync = || site.sync(&device, &copy, &[]);
    sync().ok();
    write(&device, MIB, &[7; 4096]);
    drop(disk);
    write(&image, 2 * MIB, &[7; 4096]);
    let _disk = node.attach(&image).expect("a loop device");
    write(&device, 3 * MIB, &[7; 4096]);
    let detached = "the loop device was detached, and is attached to";
    for status in [site.dsync(["status"]), site.dsync(["status"]).arg(&device)] {
        let told = status.ok().text();
        assert!(told.contains(detached) && told.contains("disk.raw by now"), "{told}");
        assert!(told.contains("run \"dsync track remove\" and \"dsync track add\""), "{told}");
    }
    sync().code(4).says(&["is not known", detached, "dsync track remove", "dsync track add"]);
    track("remove").ok();
    track("add").ok();
    for (method, at) in [("compare", 3 * MIB), ("tracked", 0)] {
        assert_eq!(sync().ok().summary()["method"], method);
        assert_same(&device, &copy);
        write(&device, at, &[8; 4096]);
    }
    sync().ok();
    assert_same(&device, &copy);
}

/// A folder of a site as sshfs shows it, which gives inodes in the order in which files are looked up, after that of so many others.
fn by_sshfs(site: &Site, place: &Path, others: usize, what: &str) -> Option<Mount> {
    let (server, folder) = (site.path("sftp"), site.path("far"));
    // In place of ssh: nobody is to be logged in to.
    std::fs::write(&server, "#!/bin/sh\nexec /usr/lib/openssh/sftp-server 2>/dev/null\n").expect("a script");
    std::fs::set_permissions(&server, std::fs::Permissions::from_mode(0o755)).expect("a script");
    std::fs::create_dir_all(&folder).and_then(|()| std::fs::create_dir_all(place)).expect("folders");
    let command = format!("ssh_command={}", server.display());
    let at = format!("here:{}", folder.display());
    let mounted = Run::new("sshfs").args(["-o", &command, &at]).arg(place).output();
    if !mounted.status.success() {
        skipped(what, &format!("sshfs cannot mount here: {mounted}"));
        return None;
    }
    for other in 0..others {
        std::fs::write(place.join(format!("other-{other}")), "").expect("a file");
    }
    Some(Mount::made(place))
}

#[test]
fn a_replica_whose_inode_lasts_for_a_mount_is_known_by_its_size_and_times() {
    let what = "a replica on a file system that gives out inodes at each mount";
    if !need_root(what) || !need(&["sshfs", "/usr/lib/openssh/sftp-server"], what) {
        return;
    }
    let mut scene = Scene::new(what, 4 * MIB);
    let place = scene.site.path("replica");
    scene.replica = place.join("vm.raw");
    let mut mounted = by_sshfs(&scene.site, &place, 0, what);
    if mounted.is_none() {
        return;
    }
    scene.sync(&[]).ok();
    let inode = |scene: &Scene| std::fs::metadata(&scene.replica).expect("the replica").ino();
    let mut others = 0;
    let mut again = |scene: &Scene| {
        let before = inode(scene);
        others += 20;
        drop(mounted.take());
        mounted = by_sshfs(&scene.site, &place, others, what);
        assert_ne!(inode(scene), before);
    };
    again(&scene);
    scene.change(3);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    again(&scene);
    scene.site.dsync(["status", "--check"]).ok();
    scene.equal();
    // It counts as before that another program wrote to it, or that another file is in its place.
    write(&scene.replica, MIB, &[7; 512]);
    again(&scene);
    scene.sync(&[]).code(4).says(&["modified outside dsync"]);
    scene.sync(&["--adopt"]).ok();
    scene.equal();
    let copy = place.join("copy");
    std::fs::copy(&scene.replica, &copy)
        .and_then(|_| std::fs::rename(&copy, &scene.replica))
        .expect("a copy");
    again(&scene);
    scene.sync(&[]).code(4).says(&["another file is in its place"]);
}
