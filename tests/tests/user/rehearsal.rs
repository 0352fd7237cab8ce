//! Rehearsals: a replica is served as it is at one moment, while mirrors, syncs, rewinds and kills go on beneath.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::image::BLOCK;
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::nbd::Client;
use dsync_tests::records::{self, Records};
use dsync_tests::{Background, Random, Run, Scene, Server, need, need_root, skipped, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
/// What a mirror says when its batches begin.
const MIRRORING: &str = "mirroring to";

/// A replica at a moment, as the command line names it.
fn at(replica: &Path, moment: &str) -> PathBuf {
    PathBuf::from(format!("{}@{moment}", replica.display()))
}

fn rehearse(scene: &Scene, moment: &str, options: &[&str]) -> Server {
    scene.site.serve(&[&at(&scene.replica, moment)], options)
}

/// The name of its export.
fn export(scene: &Scene) -> String {
    scene.replica.file_stem().expect("a name").to_string_lossy().into_owned()
}

/// Reads all of an export in random order.
fn read(client: &mut Client, random: &mut Random) -> Vec<u8> {
    const PART: u64 = 128 << 10;
    let mut bytes = vec![0; client.size as usize];
    let mut parts: Vec<u64> = (0..client.size.div_ceil(PART)).collect();
    while !parts.is_empty() {
        let start = parts.swap_remove(random.index(parts.len())) * PART;
        let end = (start + PART).min(client.size);
        let read = client.read(start, (end - start) as u32).expect("a read");
        bytes[start as usize..end as usize].copy_from_slice(&read);
    }
    bytes
}

fn mirror(scene: &Scene, options: &[&str]) -> Background {
    mirror_in_epochs(scene, "400ms", options)
}

fn mirror_in_epochs(scene: &Scene, of: &str, options: &[&str]) -> Background {
    let run = scene.site.dsync(["mirror", "--json"]).arg(&scene.image).arg(&scene.replica);
    let mut running = run.args(["--epoch", of]).args(options).start();
    running.wait_to_say(MIRRORING);
    running
}

fn stop(mut mirror: Background) {
    mirror.signal(Signal::TERM);
    let output = mirror.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
}

/// The files of the replica's state.
fn state_of(scene: &Scene) -> Vec<String> {
    let status = scene.site.dsync(["recover", "--json"]).arg(&scene.replica).ok();
    drop(status);
    let beside = scene
        .replica
        .with_file_name(format!(".{}.dsync", scene.replica.file_name().expect("a name").to_string_lossy()));
    let folders = match beside.is_dir() {
        true => vec![beside],
        false => {
            let all = std::fs::read_dir(scene.site.state().join("replicas")).expect("replicas");
            all.map(|entry| entry.expect("a folder").path()).collect()
        }
    };
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).expect("a state"));
    files.map(|entry| entry.expect("a file").file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until a server has said these words on standard error.
fn waits_to_warn(server: &mut Server, words: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    while !server.process().stderr_so_far().contains(words) {
        assert!(Instant::now() < until, "it does not say \"{words}\": {}", server.process().stderr_so_far());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Everything that goes on beneath a reader, and what it sees.
fn beside(scene: &mut Scene, commit: &[&str]) {
    let mut random = Random::new("reading");
    scene.sync(commit).ok();
    let name = export(scene);
    let saved = scene.site.path("read.raw");
    let mut expected = std::fs::read(&scene.image).expect("the source");
    // At an epoch.
    let still = rehearse(scene, "now", &[]);
    let mut client = still.client(&name);
    assert!(read(&mut client, &mut random) == expected, "the moment at which it was opened");
    scene.change(500);
    scene.sync(commit).ok();
    assert!(read(&mut client, &mut random) == expected, "after a sync");
    // Within epochs, beneath a mirror with a load.
    let running = mirror(scene, &["--rpo", "200ms"]);
    let load = Records::start(&scene.server().address(), "vm", None, 100);
    load.wait_for(200);
    let moving = rehearse(scene, "now", &[]);
    let mut other = moving.client(&name);
    let moment = read(&mut other, &mut random);
    std::fs::write(&saved, &moment).expect("a copy");
    let had = records::check(&saved, "the moment of a mirror");
    load.wait_for(400);
    for what in ["beneath the mirror", "beneath the mirror, once more"] {
        assert!(read(&mut other, &mut random) == moment, "{what}");
        assert!(read(&mut client, &mut random) == expected, "{what}");
        load.wait_for(200);
    }
    // Who commits is killed, and another one completes what it left.
    let mut running = running;
    running.kill();
    assert!(read(&mut other, &mut random) == moment, "after the mirror was killed");
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
    assert!(read(&mut other, &mut random) == moment, "after what it left was completed");
    let running = mirror(scene, &[]);
    let last = load.stop();
    stop(running);
    assert!(last >= had);
    for what in ["at the end", "at the end, once more"] {
        assert!(read(&mut other, &mut random) == moment, "{what}");
        assert!(read(&mut client, &mut random) == expected, "{what}");
    }
    // Others see who reads, and how it is.
    let status = scene.site.dsync(["status", "--json"]).arg(&scene.replica).ok().summary();
    let readers = status["readers"].as_array().expect("a list");
    assert_eq!(readers.len(), 2, "{status}");
    for (reader, server) in readers.iter().zip([&still, &moving]) {
        assert_eq!(reader["process"], server.id(), "{status}");
        assert!(reader["lost"].is_null() && reader["since"].as_u64() > Some(1 << 30), "{status}");
        // Where files are replaced, nothing has to be kept.
        assert!(reader["bytes"].as_u64() > Some(0) || !commit.is_empty(), "{status}");
    }
    assert!(readers[0]["epoch"] == 1 && readers[0]["ahead"] == false, "{status}");
    // Who reads is killed.
    drop((client, other));
    still.stop();
    moving.kill();
    scene.change(200);
    scene.sync(commit).ok();
    let left = state_of(scene);
    assert!(!left.iter().any(|name| name.starts_with("view-") || name.starts_with("undo")), "{left:?}");
    expected.clear();
    scene.stop();
    let found = std::fs::read(&scene.replica).expect("the replica");
    assert!(found[..] == std::fs::read(&scene.image).expect("the source"), "the replica is not the source");
}

/// A replica on a file system that is mounted read-only, such as that of a disk that is not to be touched.
#[test]
fn a_replica_that_nobody_may_write_beside_is_rehearsed() {
    let what = "a replica on a file system that is read-only";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("read-only", 4 << 20, "24m", what) else {
        return;
    };
    scene.sync(&[]).ok();
    let before = std::fs::read(&scene.image).expect("the image");
    let folder = scene.replica.parent().expect("a folder").to_path_buf();
    let remount =
        |how: &str| drop(Run::new("mount").args(["-o", &format!("remount,{how}")]).arg(&folder).ok());
    remount("ro");
    let overlay = scene.site.path("overlay");
    std::fs::create_dir(&overlay).expect("a folder");
    let server = rehearse(&scene, "now", &["--writable", "--overlay", overlay.to_str().expect("a path")]);
    let mut client = server.client("vm");
    assert!(read(&mut client, &mut scene.random) == before, "another content");
    client.write(0, &[7; 4096]).expect("a write");
    assert!(client.read(0, 4096).expect("a read") == [7; 4096]);
    drop(client);
    server.stop();
    // Read-only, nothing needs a folder of its user's.
    let plain = rehearse(&scene, "now", &[]);
    let mut client = plain.client("vm");
    assert!(read(&mut client, &mut scene.random) == before, "another content");
    // What is mounted for writing and written to is not shown as what it was.
    remount("rw");
    scene.change(20);
    scene.sync(&[]).ok();
    assert!(client.read(0, 4096).is_err(), "the moment is gone");
    drop(client);
    plain.kill();
}

#[test]
fn a_moment_stays_as_it_is_beneath_everything() {
    beside(&mut Scene::in_memory("rehearsal of a file", SIZE), &[]);
}

#[test]
fn a_moment_of_a_device_stays_as_it_is() {
    let what = "a rehearsal of a replica on a loop device";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("rehearsal of a device", SIZE);
    let Some(device) = Loop::new(&scene.site.image("device.img", SIZE)) else {
        return skipped(what, "no loop device can be made here");
    };
    scene.replica = device.device().to_path_buf();
    beside(&mut scene, &[]);
}

#[test]
fn a_moment_stays_as_it_is_where_files_are_replaced() {
    let what = "a rehearsal of a replica committed by reflink on XFS";
    if !need(&["mkfs.xfs"], what) || !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("rehearsal by reflink", SIZE);
    let (disk, mount) = (scene.site.image("xfs.raw", 512 * MIB), scene.site.path("xfs"));
    Run::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&disk).ok();
    let Some(_mounted) = Mount::new(&["-o", "loop"], &disk, &mount) else {
        return skipped(what, "XFS cannot be mounted from a loop device here");
    };
    scene.replica = mount.join("vm.raw");
    beside(&mut scene, &["--commit", "reflink"]);
}

#[test]
fn what_is_written_to_a_rehearsal_is_thrown_away() {
    let mut scene = Scene::synced_in_memory("writable rehearsal", SIZE);
    let mut random = Random::new("writing");
    let before = std::fs::read(&scene.replica).expect("the replica");
    let server = rehearse(&scene, "now", &["--writable"]);
    let mut client = server.client("vm");
    let mut model = before.clone();
    for round in 0..400 {
        let offset = random.below(SIZE - 70_000);
        let most = if random.coin() { 3000 } else { 66_000 };
        let len = 1 + random.below(most);
        let place = offset as usize..(offset + len) as usize;
        match random.below(5) {
            0 => {
                client.zero(offset, len as u32, 0).expect("a zeroing");
                model[place].fill(0);
            }
            _ => {
                let bytes = random.bytes(len as usize);
                client.write(offset, &bytes).expect("a write");
                model[place].copy_from_slice(&bytes);
            }
        }
        if round == 200 {
            scene.change(800);
            scene.sync(&[]).ok();
            client.flush().expect("a flush");
        }
    }
    // Another connection sees the same.
    let mut other = server.client("vm");
    assert!(read(&mut other, &mut random) == model && read(&mut client, &mut random) == model);
    drop((client, other));
    server.stop();
    scene.equal();
    let again = rehearse(&scene, "2", &[]);
    drop(again);
}

#[test]
fn earlier_moments_are_served_while_they_are_dropped() {
    let mut scene = Scene::in_memory("rehearsal of the past", SIZE);
    let mut random = Random::new("the past");
    let mut epochs = Vec::new();
    for _ in 0..4 {
        let summary = scene.sync(&["--keep-last", "9"]).ok().summary();
        epochs.push((summary["epoch"].to_string(), std::fs::read(&scene.image).expect("the source")));
        scene.change(300);
    }
    let servers: Vec<Server> = epochs.iter().map(|(epoch, _)| rehearse(&scene, epoch, &[])).collect();
    let check = |random: &mut Random, what: &str| {
        for (server, (epoch, image)) in servers.iter().zip(&epochs) {
            assert!(read(&mut server.client("vm"), random) == *image, "epoch {epoch} {what}");
        }
    };
    check(&mut random, "at first");
    scene.site.dsync(["rewind", "--to", &epochs[1].0]).arg(&scene.replica).ok();
    check(&mut random, "after a rewind");
    scene.sync(&["--keep", "none"]).ok();
    check(&mut random, "after all moments were dropped");
    let gone = scene.site.dsync(["serve"]).arg(at(&scene.replica, &epochs[0].0)).args(["--socket", "s"]);
    gone.code(4).says(&["no moment of epoch", "dsync rewind"]);
    drop(servers);
    let left = state_of(&scene);
    assert!(!left.iter().any(|name| name.starts_with("view-") || name.starts_with("undo")), "{left:?}");
}

#[test]
fn who_reads_loses_and_who_commits_does_not() {
    let mut scene = Scene::synced_in_memory("a rehearsal that is lost", SIZE);
    let refused = |scene: &Scene, moment: &str, words: &[&str]| {
        let run = scene.site.dsync(["serve"]).arg(at(&scene.replica, moment)).args(["--socket", "s"]);
        run.output().says(words);
    };
    refused(&scene, "7", &["no moment of epoch 7"]);
    refused(&scene, "never", &["invalid moment"]);
    let plain = scene.site.dsync(["serve", "--writable", "--socket", "s"]).arg(&scene.replica).code(2);
    plain.says(&["@now"]);
    let mut server = rehearse(&scene, "now", &["--writable"]);
    let mut client = server.client("vm");
    client.write(0, &[7; 4096]).expect("a write");
    // A commit in place overwrites blocks as they come.
    scene.change(300);
    scene.sync(&["--commit", "in-place"]).ok();
    scene.equal();
    assert!(client.read(0, BLOCK as u32).is_err() || client.read(16 * MIB, BLOCK as u32).is_err());
    waits_to_warn(&mut server, "can no longer be served: a commit in place");
    let status = scene.site.dsync(["status"]).arg(&scene.replica).ok();
    let lost = format!("  process {} has lost epoch 1", server.id());
    assert!(status.text().contains(&lost) && status.text().contains(": a commit in place"), "{status}");
    drop(server);
    assert!(!scene.site.dsync(["status"]).arg(&scene.replica).ok().text().contains("process"));
    // So does a promotion.
    let mut server = rehearse(&scene, "now", &[]);
    for words in [&["promote", "--force", "-n"][..], &["promote", "--force"]] {
        scene.site.dsync(words).arg(&scene.replica).ok().says(&["shows epoch", "I/O errors"]);
    }
    waits_to_warn(&mut server, "the replica was promoted");
    refused(&scene, "now", &["promoted"]);
    drop(server);
}

/// The files below a folder that a process holds open.
fn holds(process: i32, below: &Path) -> Vec<PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).expect("its files");
    let paths = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    paths.filter(|path| path.starts_with(below)).collect()
}

/// A reader that has lost its moment holds nothing that takes space, though its server goes on.
#[test]
fn who_loses_lets_go_of_what_it_held() {
    let mut scene = Scene::in_memory("letting go", SIZE);
    let epochs = [0, 1, 2].map(|_| {
        let epoch = scene.sync(&["--keep-last", "9"]).ok().summary()["epoch"].to_string();
        scene.change(300);
        epoch
    });
    let mut server = rehearse(&scene, &epochs[0], &["--writable"]);
    server.client("vm").write(0, &scene.random.bytes(MIB as usize)).expect("a write");
    let folder = scene.replica.parent().expect("a folder").to_path_buf();
    let process = server.id();
    let before = holds(process, &folder);
    let undos = before.iter().filter(|path| path.to_string_lossy().contains("/undo-")).count();
    assert!(undos == 2 && before.contains(&scene.replica), "{before:?}");
    scene.site.dsync(["promote", "--force"]).arg(&scene.replica).ok();
    waits_to_warn(&mut server, "the replica was promoted");
    let until = Instant::now() + Duration::from_secs(60);
    let is_small = |path: &PathBuf| path.is_dir() || path.to_string_lossy().contains("/view-");
    loop {
        // The scratch file has no name, and no length any more.
        let left = holds(process, &folder);
        let large = left.iter().filter(|path| !is_small(path));
        let large: Vec<_> = large.filter(|path| !path.to_string_lossy().contains('#')).collect();
        if large.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "it still holds {large:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What another program has written to a replica is no moment of its source, and is not shown as one.
#[test]
fn what_others_write_to_is_not_shown() {
    let scene = Scene::synced_in_memory("rehearsal of a foreign write", SIZE);
    let shows = || scene.site.dsync(["serve"]).arg(at(&scene.replica, "now")).args(["--socket", "s"]);
    let file = std::fs::File::options().write(true).open(&scene.replica).expect("the replica");
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 512], MIB).expect("a write");
    // Somebody has it open for writing, as a guest has its disk: what it holds is not known.
    let lock = device::lock_image(&scene.replica, device::Access::Write).expect("a lock");
    shows().code(6).says(&["another program has it open for writing"]);
    drop(lock);
    let what = "a rehearsal of a file beneath a loop device";
    if need_root(what) {
        match Loop::new(&scene.replica) {
            Some(device) => {
                shows().code(6).says(&["in use"]);
                drop(device);
                // The kernel lets go of the file once nobody looks at the device any more.
                let until = Instant::now() + Duration::from_secs(60);
                while shows().output().status.code() == Some(6) && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            None => skipped(what, "no loop device can be made here"),
        }
    }
    shows().code(4).says(&["modified outside dsync"]);
}

#[test]
fn what_others_write_to_a_device_is_not_shown() {
    let what = "a rehearsal of a device that others have written to";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("rehearsal of a written device", SIZE);
    let Some(device) = Loop::new(&scene.site.image("device.img", SIZE)) else {
        return skipped(what, "no loop device can be made here");
    };
    scene.replica = device.device().to_path_buf();
    scene.sync(&[]).ok();
    let server = rehearse(&scene, "now", &[]);
    drop(server);
    let file = std::fs::File::options().write(true).open(&scene.replica).expect("the device");
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], MIB).expect("a write");
    file.sync_all().expect("a sync");
    drop(file);
    let shows = scene.site.dsync(["serve"]).arg(at(&scene.replica, "now")).args(["--socket", "s"]);
    shows.code(4).says(&["modified outside dsync"]);
}

/// A small file system with a replica: there is room for a sync, and not for what a reader needs besides.
#[test]
fn where_space_is_short_the_reader_loses() {
    let what = "a rehearsal on a small file system";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("a full rehearsal", SIZE, "56m", what) else {
        return;
    };
    scene.sync(&[]).ok();
    let mut server = rehearse(&scene, "now", &["--writable"]);
    let mut client = server.client("vm");
    // Writes fail before they take what commits need.
    let mut written = 0;
    while client.write(written, &scene.random.bytes(MIB as usize)).is_ok() {
        written += MIB;
        assert!(written < SIZE, "nothing bounds what is written");
    }
    let mut lost = false;
    for round in 0..40 {
        scene.change(1200);
        scene.sync(&[]).ok();
        scene.equal();
        lost = lost || client.read(20 * MIB, BLOCK as u32).is_err();
        if lost && round >= 8 {
            break;
        }
    }
    assert!(lost, "there was room for everything");
    waits_to_warn(&mut server, "there was no room in");
}

/// A sync that cannot find room costs no rehearsal, whose reader would have lost for nothing.
#[test]
fn a_sync_without_room_costs_no_rehearsal() {
    let what = "a rehearsal beside a sync that finds no room";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("no room for a sync", 8 * MIB, "15m", what)
    else {
        return;
    };
    scene.fill();
    scene.sync(&[]).ok();
    let server = rehearse(&scene, "now", &["--writable"]);
    let mut client = server.client("vm");
    let written = scene.random.bytes(MIB as usize);
    client.write(2 * MIB, &written).expect("a write");
    let before = std::fs::read(&scene.replica).expect("the replica");
    scene.change(1900);
    scene.sync(&[]).code(1).says(&["no space left", "the replica is unchanged"]);
    assert!(client.read(2 * MIB, MIB as u32).expect("what was written") == written);
    assert!(client.read(0, MIB as u32).expect("what was there") == before[..MIB as usize]);
}

/// An epoch is shown as it was, also while a mirror is ahead of it and has not ended the next one.
#[test]
fn an_epoch_that_a_mirror_has_left_is_shown_as_it_was() {
    let mut scene = Scene::synced("a moment beneath a mirror", 8 * MIB);
    scene.change(10);
    scene.sync(&["--keep", "24h"]).ok();
    scene.change(10);
    let epoch = scene.sync(&[]).ok().summary()["epoch"].clone();
    let then = std::fs::read(&scene.image).expect("an image");
    let mirror = mirror_in_epochs(&scene, "1h", &[]);
    for _ in 0..3 {
        scene.change(10);
        let now = std::fs::read(&scene.image).expect("an image");
        until("the batch is there", || std::fs::read(&scene.replica).is_ok_and(|there| there == now));
        let listed = scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).ok().summary();
        let id = &listed["moments"][0]["epoch"];
        assert_eq!(id["number"], epoch, "{listed}");
        for moment in [&epoch.to_string(), id["id"].as_str().expect("an id"), "now"] {
            let server = rehearse(&scene, moment, &[]);
            let bytes = read(&mut server.client(&export(&scene)), &mut scene.random.clone());
            assert!(bytes == if moment == "now" { now.clone() } else { then.clone() }, "{moment}");
            server.stop();
        }
    }
    stop(mirror);
}
