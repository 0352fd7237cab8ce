//! Sectors of a replica's device that cannot be read: what needs them says so, all else goes on. And a source's disk that cannot be written to
//! for a while.

use std::os::unix::net::UnixStream;

use device::{Buf, DiskOptions, Pieces, Request, RequestKind};
use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{Attached, Mount, Worn};
use dsync_tests::scene::number;
use dsync_tests::{Random, Run, Scene, Site, need, need_root, skipped, until};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// True if worn disks can be made here.
fn ready(what: &str) -> bool {
    need(&["losetup", "nbdkit", "nbdfuse"], what) && need_root(what)
}

/// A served source full of noise, and a device that is its replica.
fn synced(what: &str) -> Option<(Scene, Worn)> {
    let mut scene = Scene::new(what, SIZE);
    let noise = scene.random.bytes(SIZE as usize);
    let mut client = scene.client();
    client.write(0, &noise).expect("a write");
    client.close().expect("the end");
    let Some(worn) = Worn::new(&scene.site.image("worn.raw", SIZE)) else {
        skipped(what, "there are no loop devices over FUSE here");
        return None;
    };
    scene.replica = worn.device().to_path_buf();
    scene.sync(&[]).ok();
    image::assert_equal(&scene.image, worn.content());
    Some((scene, worn))
}

/// Writes to blocks of the source.
fn write(scene: &mut Scene, blocks: impl Iterator<Item = u64>) {
    let mut client = scene.client();
    for block in blocks {
        client.write(block * BLOCK, &scene.random.bytes(BLOCK as usize)).expect("a write");
    }
    client.close().expect("the end");
}

fn verify(scene: &Scene, options: &[&str]) -> Run {
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).arg("--json").args(options)
}

#[test]
fn a_replica_with_sectors_that_cannot_be_read() {
    let what = "unreadable sectors of a replica";
    if !ready(what) {
        return;
    }
    let Some((mut scene, worn)) = synced(what) else { return };
    // The first and the last are looked at whenever the device is opened.
    for bad in [vec![SIZE - BLOCK], vec![0, 1000 * BLOCK, 1002 * BLOCK, SIZE - BLOCK]] {
        for commit in ["journal", "in-place"] {
            let sync =
                |scene: &Scene, options: &[&str]| scene.sync(&[&["--commit", commit][..], options].concat());
            let (first, lost) = (bad[0].to_string(), bad.len() as u64 * BLOCK);
            worn.spoil(&bad);
            // What was written down needs nothing of them, and what lies between the changed blocks of a dense region
            // is left alone.
            write(
                &mut scene,
                (990..1020).filter(|block| !bad.contains(&(block * BLOCK))).step_by(2).chain([5]),
            );
            let summary = sync(&scene, &[]).ok().summary();
            assert_eq!(summary["method"], "tracked", "{summary}");
            image::assert_equal(&scene.image, worn.content());

            verify(&scene, &[]).code(1).says(&[&first, "--keep-going"]);
            let found = verify(&scene, &["--keep-going"]).code(1).summary();
            assert_eq!(number(&found["unreadable_there"], "bytes"), lost, "{found}");
            assert_eq!(number(&found["differing"], "bytes"), lost, "{found}");

            for method in ["compare", "rolling"] {
                worn.spoil(&bad);
                write(&mut scene, [7, 2000].into_iter());
                sync(&scene, &["--method", method]).code(1).says(&[&first, "--keep-going"]);
                let summary = sync(&scene, &["--method", method, "--keep-going"]).code(1).summary();
                let there = &summary["unreadable_there"];
                assert!(number(there, "bytes") >= lost, "{method}, {commit}: {summary}");
                assert!(number(&there["list"][0], "offset") <= bad[0], "{method}, {commit}: {summary}");
                assert!(number(&summary, "blocks_changed") < 100, "{method}, {commit}: {summary}");
                assert!(summary["epoch"].is_u64(), "all was sent, and written: {summary}");
                image::assert_equal(&scene.image, worn.content());
                // What was written can be read again.
                let sound = verify(&scene, &[]).ok().summary();
                assert_eq!(sound["trust"], "exact", "{sound}");
            }
        }
    }
    // It is followed as before, and still told from one that others wrote to.
    worn.spoil(&[SIZE - BLOCK]);
    write(&mut scene, [1].into_iter());
    scene.sync(&[]).ok();
    image::scribble(worn.content(), 0, BLOCK, &mut scene.random);
    worn.spoil(&[SIZE - BLOCK]);
    write(&mut scene, [1].into_iter());
    scene.sync(&[]).code(4).says(&["modified outside dsync"]);
}

/// Whether a device is blank is looked at where it begins and ends.
#[test]
fn a_device_without_a_replica_that_cannot_be_read() {
    let what = "unreadable sectors of a device without a replica";
    if !ready(what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let (source, content) = (site.image("vm.raw", SIZE), site.image("worn.raw", SIZE));
    image::random(&source, SIZE, &mut random);
    let Some(worn) = Worn::new(&content) else {
        return skipped(what, "there are no loop devices over FUSE here");
    };
    let sync = |options: &[&str]| site.sync(&source, worn.device(), options);
    let bad = SIZE - BLOCK;
    worn.spoil(&[bad]);
    sync(&[]).code(1).says(&[&bad.to_string()]);
    sync(&["--adopt"]).code(1).says(&[&bad.to_string(), "--keep-going"]);
    let summary = sync(&["--adopt", "--keep-going"]).code(1).summary();
    assert_eq!(number(&summary["unreadable_there"], "bytes"), BLOCK, "{summary}");
    image::assert_equal(&source, worn.content());
}

/// Rolling looks for what has moved in all of the source: where that cannot be read, the rest is compared.
#[test]
fn a_source_that_cannot_be_read_is_compared() {
    let what = "unreadable sectors of a source, rolling";
    if !ready(what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let content = site.image("worn.raw", SIZE);
    image::random(&content, SIZE, &mut random);
    let Some(worn) = Worn::new(&content) else {
        return skipped(what, "there are no loop devices over FUSE here");
    };
    let replica = site.path("copy.raw");
    let sync = |options: &[&str]| site.sync(worn.device(), &replica, options);
    sync(&[]).ok();
    for commit in ["journal", "in-place"] {
        image::scribble(worn.content(), MIB, 100_000, &mut random);
        let bad = 3000 * BLOCK;
        worn.spoil(&[bad]);
        let options = ["--method", "rolling", "--commit", commit];
        sync(&options).code(1).says(&[&bad.to_string()]);
        let summary = sync(&[&options[..], &["--keep-going"]].concat()).code(1).summary();
        assert_eq!(summary["method"], "compare", "{summary}");
        assert_eq!(number(&summary["unreadable"], "bytes"), BLOCK, "{summary}");
        image::assert_equal(worn.content(), &replica);
        worn.spoil(&[]);
        sync(&[]).ok();
    }
}

/// A served source: what could not be read is sent when it can be, with what has changed since, and nothing is compared.
#[test]
fn what_could_not_be_read_is_sent_later() {
    let what = "unreadable sectors of a served source";
    if !ready(what) {
        return;
    }
    let (mut scene, mut random) = (Scene::new(what, SIZE), Random::new(what));
    image::random(&scene.image, SIZE, &mut scene.random);
    let Some(worn) = Worn::new(&scene.image) else {
        return skipped(what, "there are no loop devices over FUSE here");
    };
    scene.stop();
    scene.image = worn.device().to_path_buf();
    scene.start();
    let name = worn.device().file_name().expect("a name").to_string_lossy().into_owned();
    let write = |scene: &Scene, random: &mut Random, blocks: &[u64]| {
        let mut client = scene.server().client(&name);
        for block in blocks {
            client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        }
        client.close().expect("the end");
    };
    let status = |scene: &Scene| scene.site.dsync(["status", "--json"]).arg(&scene.replica).ok().summary();
    for commit in ["journal", "in-place"] {
        let sync =
            |scene: &Scene, options: &[&str]| scene.sync(&[&["--commit", commit][..], options].concat());
        let bad = [700 * BLOCK, 701 * BLOCK, 3000 * BLOCK];
        write(&scene, &mut random, &[700, 701, 702, 2000, 3000]);
        worn.spoil(&bad);
        sync(&scene, &[]).code(1).says(&[&bad[0].to_string(), "--keep-going"]);
        let summary = sync(&scene, &["--keep-going"]).code(1).summary();
        assert_eq!(number(&summary["unreadable"], "bytes"), 3 * BLOCK, "{summary}");
        let unsure = status(&scene);
        assert_eq!(
            (&unsure["state"], number(&unsure, "unsure")),
            (&"incomplete".into(), 3 * BLOCK),
            "{unsure}"
        );
        let known = scene.site.dsync(["status"]).arg(&scene.image).ok().text();
        assert!(known.contains("but for 12.0 KiB that could not be read"), "{known}");
        verify(&scene, &[]).code(1).says(&["--keep-going"]);
        // Of what is written whole, the reading no longer matters; the rest is not lost over another sync, nor over a delta
        // that knows nothing of it.
        write(&scene, &mut random, &[3000, 9]);
        worn.spoil(&bad[..2]);
        let summary = sync(&scene, &["--keep-going"]).code(1).summary();
        assert_eq!(
            (summary["method"].as_str(), number(&summary["unreadable"], "bytes")),
            (Some("tracked"), 2 * BLOCK)
        );
        write(&scene, &mut random, &[10]);
        let delta = scene.site.dsync(["extract"]).arg(&scene.image).ok().stdout;
        scene.site.dsync(["merge", "--commit", commit]).arg(&scene.replica).input(delta).ok();
        assert_eq!(number(&status(&scene), "unsure"), 2 * BLOCK);
        worn.spoil(&[]);
        assert_eq!(number(&verify(&scene, &[]).code(5).summary()["differing"], "bytes"), 2 * BLOCK);
        write(&scene, &mut random, &[11]);
        let summary = sync(&scene, &[]).ok().summary();
        assert_eq!(
            (summary["method"].as_str(), number(&summary, "blocks_changed")),
            (Some("tracked"), 3),
            "{summary}"
        );
        assert_eq!(status(&scene)["state"], "exact");
        image::assert_equal(worn.content(), &scene.replica);
        verify(&scene, &[]).ok();
    }
}

/// What the system could not write it says once, and takes for written from then on.
#[test]
fn a_flush_that_failed_is_never_followed_by_one_that_succeeds() {
    let what = "a served image whose disk takes no writes for a while";
    if !need(&["nbdkit", "nbdfuse", "mkfs.ext2"], what) || !need_root(what) {
        return;
    }
    let site = Site::new();
    let mut random = Random::new(what);
    let (disk, socket, fails) = (site.image("disk.raw", 64 * MIB), site.socket("disk"), site.path("fails"));
    let error = format!("error-file={}", fails.display());
    let server =
        Run::new("nbdkit").args(["-f", "-U"]).arg(&socket).args(["--filter=error", "file"]).arg(&disk);
    let _server = server.args(["error-pwrite=EIO", "error-pwrite-rate=100%", &error]).start();
    until("it listens", || UnixStream::connect(&socket).is_ok());
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let Some(device) = Attached::new(&uri, &site.path("fuse")) else {
        return skipped(what, "FUSE or loop devices are not to be had");
    };
    Run::new("mkfs.ext2").arg("-q").arg(device.device()).ok();
    let place = site.path("place");
    let Some(_mounted) = Mount::new(&["-o", "errors=continue"], device.device(), &place) else {
        return skipped(what, "ext2 cannot be mounted");
    };
    let (image, replica) = (place.join("vm.raw"), site.path("replica.raw"));
    image::random(&image, 8 * MIB, &mut random);
    let server = site.serve(&[&image], &[]);
    site.sync(&image, &replica, &[]).ok();
    let mut client = server.client("vm");
    client.write(MIB, &random.bytes(65536)).expect("it is in memory");
    std::fs::write(&fails, "").expect("a file");
    client.flush().expect_err("it cannot be written");
    std::fs::remove_file(&fails).expect("the file");
    client.flush().expect_err("nor was it");
    site.sync(&image, &replica, &[]).code(1).says(&["an earlier flush failed", "start it again"]);
    let checked = site.dsync(["status", "--check"]).code(1).text();
    assert!(checked.contains("a flush failed (") && checked.contains("start the server again"), "{checked}");
    assert!(site.dsync(["status"]).ok().text().contains("flush failed"), "the table does not say so");
    drop(client);
    server.kill();
    // The disk has what it has, and so has the replica from then on.
    let server = site.serve(&[&image], &[]);
    site.sync(&image, &replica, &[]).ok();
    server.stop();
    let found = site.path("found.raw");
    Run::new("dd")
        .arg(format!("if={}", image.display()))
        .arg(format!("of={}", found.display()))
        .args(["iflag=direct", "bs=1M", "status=none"])
        .ok();
    image::assert_equal(&found, &replica);
    // A server that cannot write all at its end has told nobody: the next one tells whoever still counts on it.
    let mut server = site.serve(&[&image], &[]);
    let mut client = server.client("vm");
    client.write(MIB, &random.bytes(65536)).expect("it is in memory");
    std::fs::write(&fails, "").expect("a file");
    server.process().signal(Signal::TERM);
    until("it has ended", || server.process().ended().is_some());
    drop(server);
    std::fs::remove_file(&fails).expect("the file");
    let server = site.serve(&[&image], &[]);
    let mut client = server.client("vm");
    client.flush().expect_err("what the server before has answered for is lost");
    let checked = site.dsync(["status", "--check"]).code(1).text();
    assert!(checked.contains("a flush failed ("), "{checked}");
    drop(client);
    let said = server.stop();
    said.says(&["the server before could not write all that it had answered for", "stop what uses the disk"]);
    let server = site.serve(&[&image], &[]);
    server.client("vm").flush().expect("all has been started anew");
    server.stop();
    // Of two queues, the one that has not looked at its answer yet does not have the error alone.
    let options = DiskOptions { write: true, direct: true, exclusive: false };
    let disk = device::open(&image, &options).expect("the image");
    let queue = || disk.clone().queue(4).expect("a queue");
    let flush = || Request { kind: RequestKind::Flush, pieces: Pieces::new(), buf: Buf::new(0), token: 0 };
    let (mut first, mut second) = (queue(), queue());
    image::scribble(&image, 0, BLOCK, &mut random);
    std::fs::write(&fails, "").expect("a file");
    first.submit(flush());
    first.start();
    let Some(completion) = first.wait_fd() else { return skipped(what, "there is no io_uring") };
    let mut ready = [PollFd::new(&completion, PollFlags::IN)];
    poll(&mut ready, None).expect("its end");
    std::fs::remove_file(&fails).expect("the file");
    second.submit(flush());
    second.complete(true).expect("the flush").result.expect_err("it cannot be written");
    first.complete(true).expect("the flush").result.expect_err("it cannot be written");
}
