//! SIGKILL at any moment: to the server under load, to either side of a sync.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::load::{Load, Options};
use dsync_tests::mount::Loop;
use dsync_tests::scene::fingerprints;
use dsync_tests::site::Server;
use dsync_tests::{Random, Run, Scene, Site, find, need, need_root, rounds, skipped, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// Fails the test unless the server's dirty set covers every block that differs.
fn covered(scene: &Scene) -> BTreeSet<u64> {
    let dirty: BTreeSet<u64> =
        scene.dirty().into_iter().flat_map(|range| range.start / BLOCK..range.end.div_ceil(BLOCK)).collect();
    for block in image::differing_blocks(&scene.image, &scene.replica) {
        assert!(dirty.contains(&block), "block {block} differs and is not dirty; {} blocks are", dirty.len());
    }
    dirty
}

#[test]
fn the_server_is_killed_under_load() {
    let mut scene = Scene::synced("server kills", 64 * MIB);
    let mut random = scene.random.clone();
    for round in 0..rounds(10, 200) {
        let connections = 1 + random.below(4);
        let options = Options { connections, depth: 1 + random.below(32) as usize, ..Options::default() };
        let load = Load::start(&scene.server().address(), "vm", &options, &mut random);
        load.wait_for(random.below(2000));
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        scene.server.take().expect("a server").kill();
        let written = load.stop();
        // A killed server loses nothing that it answered.
        written.check(&scene.image);
        // It may be killed again before it serves.
        for _ in 0..random.below(3) {
            let socket = scene.site.socket("short");
            let run = scene.site.dsync(["serve"]).arg(&scene.image).arg("--socket").arg(socket);
            let process = run.start();
            std::thread::sleep(Duration::from_micros(random.below(30_000)));
            process.killed();
        }
        scene.start();
        let dirty = covered(&scene);
        println!("round {round}: {} blocks written, {} dirty", written.len(), dirty.len());
        // Not each time: the record must also hold over several kills.
        if random.one_in(2) {
            let summary = scene.sync(&[]).ok().summary();
            believed_or_doubted(&summary);
            scene.equal();
            assert_eq!(scene.dirty(), []);
        }
    }
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn the_server_is_killed_while_views_are_open_and_syncs_run() {
    let mut scene = Scene::synced("server kills with views", 64 * MIB);
    let mut random = scene.random.clone();
    for _ in 0..rounds(6, 100) {
        let load = Load::start(&scene.server().address(), "vm", &Options::default(), &mut random);
        load.wait_for(100);
        let view = scene.server().client("vm@view");
        let mut sync = scene.sync(&["--bwlimit", "64M"]).start();
        std::thread::sleep(Duration::from_millis(random.below(300)));
        scene.server.take().expect("a server").kill();
        drop(view);
        load.stop().check(&scene.image);
        // The sync ends by itself: with an error, or it was through.
        let ended = sync.wait_for(Duration::from_secs(30));
        assert!(ended.is_some_and(|status| matches!(status.code(), Some(0 | 1))), "{}", sync.stderr_so_far());
        scene.site.dsync(["recover"]).arg(&scene.replica).ok();
        scene.start();
        let summary = scene.sync(&[]).ok().summary();
        believed_or_doubted(&summary);
        scene.equal();
    }
}

/// How long a sync of so many blocks takes here, to spread the kills over it.
fn usual(scene: &mut Scene, blocks: usize, sync: impl Fn(&Scene) -> Run) -> Duration {
    scene.change(blocks);
    let began = Instant::now();
    sync(scene).ok();
    began.elapsed()
}

/// The replica must be one of two images, once it is opened.
/// A record is believed after a kill, or doubted by the image's times, as on a machine too busy to note the last write in time.
/// Both are sound; what is never done is to believe it wrongly, which the comparison after this shows.
fn believed_or_doubted(summary: &serde_json::Value) {
    let doubted = summary["trust"].as_str().is_some_and(|t| t.contains("after its server was killed"));
    assert!(summary["method"] == "tracked" || doubted, "{summary}");
    if doubted {
        println!("doubted: {}", summary["trust"]);
    }
}

fn is_one_of(replica: &Path, before: &Path, after: &Path, what: &str) {
    if let (Some(at), Some(_)) =
        (image::first_difference(replica, before), image::first_difference(replica, after))
    {
        panic!("{what}: the replica is neither the old epoch nor the new; it leaves the old at byte {at}");
    }
}

#[test]
fn both_sides_of_a_local_sync_are_killed() {
    let mut scene = Scene::synced("sync kills", 32 * MIB);
    let usual = usual(&mut scene, 2000, |scene| scene.sync(&[]));
    let before = scene.site.path("before.raw");
    for round in 0..rounds(8, 200) {
        image::copy(&scene.replica, &before);
        scene.change(2000);
        let mut sync = scene.sync(&[]).start();
        std::thread::sleep(usual.mul_f64(scene.random.below(1200) as f64 / 1000.0));
        sync.kill();
        // Now and then the server too.
        if scene.random.one_in(3) {
            scene.server.take().expect("a server").kill();
            scene.start();
        }
        // Now and then the recovery is killed as well.
        if scene.random.one_in(3) {
            let mut recover = scene.site.dsync(["recover"]).arg(&scene.replica).start();
            std::thread::sleep(usual.mul_f64(scene.random.below(500) as f64 / 1000.0));
            recover.kill();
        }
        scene.site.dsync(["recover"]).arg(&scene.replica).ok();
        is_one_of(&scene.replica, &before, &scene.image, &format!("round {round}"));
        let summary = scene.sync(&[]).ok().summary();
        believed_or_doubted(&summary);
        scene.equal();
    }
}

#[test]
fn a_sync_is_killed_while_it_merges_in_place() {
    let mut scene = Scene::synced("in-place kills", 32 * MIB);
    let usual = usual(&mut scene, 2000, |scene| scene.sync(&["--commit", "in-place"]));
    for _ in 0..rounds(8, 100) {
        scene.change(2000);
        let mut sync = scene.sync(&["--commit", "in-place"]).start();
        std::thread::sleep(usual.mul_f64(scene.random.below(1200) as f64 / 1000.0));
        sync.kill();
        // Incomplete or not, it is said, and the next sync mends it.
        scene.site.dsync(["status"]).arg(&scene.replica).ok();
        let commit = if scene.random.one_in(2) { "in-place" } else { "journal" };
        scene.sync(&["--commit", commit]).ok();
        scene.equal();
    }
}

#[test]
fn a_seed_is_killed_and_goes_on() {
    for _ in 0..rounds(4, 50) {
        let mut scene = Scene::new("seed kills", 64 * MIB);
        let mut sync = scene.sync(&["--bwlimit", "64M"]).start();
        std::thread::sleep(Duration::from_millis(scene.random.below(200)));
        sync.kill();
        // There is no replica until the seed is whole.
        if scene.replica.exists() {
            scene.equal();
        }
        scene.change(20);
        scene.sync(&[]).ok();
        scene.equal();
    }
}

#[test]
fn the_far_side_is_killed_and_answers_are_lost() {
    let (mut scene, far) = (Scene::new("far kills", 32 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let before = far.site.path("before.raw");
    let mut random = Random::seeded(scene.random.bits());
    for round in 0..rounds(6, 200) {
        image::copy(&far.replica(), &before);
        let changed = scene.change(500);
        // The line is cut on the way there, or goes deaf on the way back: then the far side may commit and not be heard.
        let run = if random.one_in(2) {
            far.sync(&scene, &[], Some(random.below(changed.len() as u64 * (BLOCK + 100))))
        } else {
            far.sync(&scene, &[], None).env("RSH_DEAF", random.below(1500).to_string())
        };
        let output = run.output();
        assert!(matches!(output.status.code(), Some(0 | 1)), "{output}");
        far.site.dsync(["recover"]).arg(far.replica()).ok();
        is_one_of(&far.replica(), &before, &scene.image, &format!("round {round}"));
        scene.change(5);
        let summary = far.sync(&scene, &[], None).ok().summary();
        believed_or_doubted(&summary);
        image::assert_equal(&scene.image, &far.replica());
    }
}

/// An administrator tidies up too much: the server still ends when it is told to, and nothing is believed afterwards.
#[test]
fn a_server_without_its_state_ends_all_the_same() {
    let mut scene = Scene::synced("state gone", 8 * MIB);
    std::fs::remove_dir_all(scene.site.state()).expect("the state");
    scene.change(3);
    let mut server = scene.server.take().expect("a server");
    server.process().signal(Signal::TERM);
    assert!(server.process().wait_for(Duration::from_secs(20)).is_some(), "the server hangs");
    refuses(&scene);
    scene.sync(&["--adopt"]).ok();
    scene.equal();
}

/// Another file has been moved over the image that is served: nothing of it is sent as if it had been followed.
#[test]
fn an_image_that_was_replaced_while_it_is_served() {
    let mut scene = Scene::synced("replaced", 8 * MIB);
    scene.change(3);
    let other = scene.site.image("other.raw", 8 * MIB);
    image::scribble(&other, 0, MIB, &mut scene.random);
    std::fs::rename(&other, &scene.image).expect("another image in its place");
    let before = fingerprints(&scene.replica);
    refuses(&scene);
    assert_eq!(before, fingerprints(&scene.replica));
    scene.stop();
    scene.start();
    scene.sync(&[]).code(4).says(&["is not the disk", "--accept-source"]);
    assert_eq!(before, fingerprints(&scene.replica));
    let summary = scene.sync(&["--accept-source"]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    scene.equal();
}

fn refuses(scene: &Scene) {
    let output = scene.sync(&[]).output();
    assert_eq!(output.status.code(), Some(4), "{output}");
}

/// Written by another program while it is served and idle.
#[test]
fn a_write_beside_the_server_is_noticed() {
    let mut scene = Scene::synced("beside", 8 * MIB);
    scene.change(3);
    scene.sync(&[]).ok();
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.image, 5 * MIB, 4096, &mut scene.random);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    scene.equal();
    // Nor does a write through the server that comes soon after hide it.
    for pause in [0, 300] {
        scene.change(3);
        std::thread::sleep(Duration::from_millis(300));
        image::scribble(&scene.image, 5 * MIB, 4096, &mut scene.random);
        std::thread::sleep(Duration::from_millis(pause));
        scene.change(1);
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(summary["method"], "compare", "{pause} ms: {summary}");
        scene.equal();
    }
    // And then all is in order again.
    scene.change(3);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!((summary["method"].as_str(), summary["blocks_changed"].as_u64()), (Some("tracked"), Some(3)));
    scene.equal();
}

/// While the disk of the state takes seconds for what the server makes durable.
#[test]
fn a_write_beside_a_server_that_waits_for_its_state_is_noticed() {
    if !need(&["strace"], "a write beside a server whose state is on a slow disk") {
        return;
    }
    let mut scene = Scene::synced("slow state", 8 * MIB);
    let strace = scene.site.run(&find("strace").expect("strace"));
    let slow =
        ["-f", "-e", "trace=fsync,fdatasync,msync", "-e", "inject=fsync,fdatasync,msync:delay_enter=5000000"];
    let own = |scene: &mut Scene| {
        let mut client = scene.client();
        client.write(0, &scene.random.bytes(BLOCK as usize)).expect("a write");
        client.close().expect("the end");
    };
    own(&mut scene);
    let mut strace = strace.args(slow).args(["-p", &scene.server().id().to_string()]).start();
    // It has the time of the last write to make durable each second.
    until("a server that waits", || {
        own(&mut scene);
        strace.stderr_so_far().contains("sync(")
    });
    std::thread::sleep(Duration::from_millis(300));
    own(&mut scene);
    std::thread::sleep(Duration::from_millis(300));
    image::scribble(&scene.image, 5 * MIB, 4096, &mut scene.random);
    own(&mut scene);
    strace.signal(Signal::TERM);
    assert!(strace.wait_for(Duration::from_secs(20)).is_some(), "strace hangs");
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    scene.equal();
}

/// A block device has no times; the kernel counts what is written to it.
#[test]
fn a_write_beside_the_server_of_a_device_is_noticed() {
    let what = "a write beside the server of a block device";
    if !need_root(what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("a device beside its server"));
    let beneath = site.image("disk.raw", 8 * MIB);
    let Some(device) = Loop::new(&beneath) else {
        return skipped(what, "losetup cannot attach one");
    };
    let (disk, copy) = (device.device(), site.path("copy.raw"));
    let export = disk.file_name().expect("a name").to_string_lossy().into_owned();
    let mut server = site.serve(&[disk], &["--trust-device"]);
    let own = |server: &Server, random: &mut Random| {
        let mut client = server.client(&export);
        client.write(0, &random.bytes(BLOCK as usize)).expect("a write");
        client.close().expect("the end");
    };
    let synced = |method: &str, what: &str| {
        let summary = site.sync(disk, &copy, &[]).ok().summary();
        assert_eq!(summary["method"], method, "{what}: {summary}");
        image::assert_equal(&beneath, &copy);
    };
    site.sync(disk, &copy, &[]).ok();
    for (hidden, restarted) in [(false, false), (true, false), (false, true)] {
        let what = format!("hidden by an own write {hidden}, restarted {restarted}");
        own(&server, &mut random);
        synced("tracked", &what);
        std::thread::sleep(Duration::from_millis(50));
        // Through the page cache, and not flushed.
        image::scribble(disk, 5 * MIB, 4096, &mut random);
        if hidden {
            own(&server, &mut random);
        }
        if restarted {
            server.stop();
            server = site.serve(&[disk], &["--trust-device"]);
        }
        synced("compare", &what);
    }
    own(&server, &mut random);
    synced("tracked", "at last");
    server.stop();
}

/// What a file system writes shows when it leaves the page cache, which may be while the guest writes: so none is mounted on a disk that is served,
/// or on a part of it. What is written to a part by hand is noticed.
#[test]
fn a_device_that_is_served_is_not_mounted() {
    let what = "a partition of a device that is served";
    if !need(&["losetup", "partx", "sfdisk", "mkfs.ext4", "mount"], what) || !need_root(what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let beneath = site.image("disk.raw", 16 * MIB);
    Run::shell(&format!("echo 8192,,L | sfdisk -q {}", beneath.display())).ok();
    let Some(device) = Loop::with(&["--partscan"], &beneath) else {
        return skipped(what, "losetup cannot attach one");
    };
    let disk = device.device();
    let partition = PathBuf::from(format!("{}p1", disk.display()));
    if !partition.exists() {
        Run::new("partx").arg("--add").arg(disk).output();
    }
    Run::new("mkfs.ext4").arg("-q").arg(&partition).ok();
    let server = site.serve(&[disk], &[]);
    let copy = site.path("copy.raw");
    site.sync(disk, &copy, &[]).ok();
    let folder = site.path("mounted");
    std::fs::create_dir(&folder).expect("a folder");
    let mounted = Run::new("mount").arg(&partition).arg(&folder).output();
    if mounted.status.success() {
        Run::new("umount").arg(&folder).ok();
        panic!("a part of a disk that is served was mounted");
    }
    // Held open, as its last user's close would write it out.
    let held = std::fs::File::options().write(true).open(&partition).expect("a partition");
    held.write_all_at(&random.bytes(BLOCK as usize), MIB).expect("a write");
    until("a look", || site.dsync(["status"]).arg(disk).ok().text().contains("another program"));
    let mut client = server.client(&disk.file_name().expect("a name").to_string_lossy());
    client.write(0, &random.bytes(BLOCK as usize)).expect("a write");
    client.close().expect("the end");
    assert_eq!(site.sync(disk, &copy, &[]).ok().summary()["method"], "compare");
    image::assert_equal(&beneath, &copy);
    server.stop();
    drop(held);
    Run::new("partx").arg("--delete").arg(disk).output();
}

/// A server that is told to stop flushes, which may take long; others write meanwhile.
#[test]
fn a_write_while_a_server_ends_is_noticed() {
    if !need(&["strace"], "a write while a server ends") {
        return;
    }
    let mut scene = Scene::synced("while it ends", 8 * MIB);
    scene.change(3);
    let server = scene.server.as_mut().expect("a server");
    let strace = scene.site.run(&find("strace").expect("strace"));
    let slow = ["-e", "trace=fsync,fdatasync", "-e", "inject=fsync,fdatasync:delay_enter=500000", "-p"];
    let strace = strace.args(slow).arg(server.id().to_string()).start();
    until("strace", || strace.stderr_so_far().contains("attached"));
    let mut random = scene.random.clone();
    let mut client = server.client("vm");
    client.write(0, &random.bytes(BLOCK as usize)).expect("a write");
    server.process().signal(Signal::TERM);
    until("a server that flushes", || strace.stderr_so_far().contains("sync("));
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.image, 5 * MIB, 4096, &mut random);
    assert!(server.process().wait_for(Duration::from_secs(60)).is_some(), "the server hangs");
    drop(strace);
    scene.server = None;
    scene.start();
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    scene.equal();
}
