//! Bringing a replica up to date where nobody wrote down what changed: copies, digests, gaps in the history, and sources and
//! replicas that are not as they should be.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::load::{Load, Options};
use dsync_tests::mount::Loop;
use dsync_tests::scene::number;
use dsync_tests::{Random, Run, Scene, Site, beyond, got, need, need_root, rounds, skipped, until};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// Makes the source's record worthless: somebody writes past the server.
fn lose_track(scene: &mut Scene, at: u64, len: u64) {
    scene.stop();
    // The clock of files ticks a few times a second only.
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.image, at, len, &mut scene.random);
    scene.start();
}

/// Changes one byte of a replica so that its lineage does not notice, as a disk does that loses bits.
fn rot(replica: &Path, at: u64) {
    use std::os::unix::fs::MetadataExt;
    let file = OpenOptions::new().read(true).write(true).open(replica).expect("the replica");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("reading");
    file.write_all_at(&[!byte[0]], at).expect("writing");
    let name = replica.file_name().and_then(|n| n.to_str()).expect("a name");
    let path = replica.with_file_name(format!(".{name}.dsync")).join("lineage");
    let mut lineage: Value = serde_json::from_slice(&std::fs::read(&path).expect("a lineage")).expect("JSON");
    let now = file.metadata().expect("the replica");
    lineage["stamp"]["changed"] = (now.ctime() * 1_000_000_000 + now.ctime_nsec()).into();
    std::fs::write(&path, serde_json::to_vec(&lineage).expect("JSON")).expect("a lineage");
}

fn text<'a>(summary: &'a Value, field: &str) -> &'a str {
    summary[field].as_str().unwrap_or_else(|| panic!("no {field} in {summary}"))
}

/// What others write after it was found out what changed, and before it is read, is in none of that: one of two writes would be read, and the other not.
#[test]
fn what_is_written_between_the_cut_and_the_reading_is_noticed() {
    let what = "a write between the cut and the reading";
    if !need(&["strace"], what) {
        return;
    }
    let mut scene = Scene::synced(what, 4 * MIB);
    for round in 0..rounds(6, 40) {
        let mut client = scene.client();
        client.write(0, &scene.random.bytes(BLOCK as usize)).expect("a write");
        client.close().expect("the end");
        scene.stop();
        let epochs = || {
            let folders = scene.site.state().join("sources").read_dir().expect("the sources").flatten();
            let history = |folder: PathBuf| folder.join("history").metadata().map_or(0, |found| found.len());
            folders.map(|folder| history(folder.path())).sum::<u64>()
        };
        let before = epochs();
        let strace = scene.site.run(&dsync_tests::find("strace").expect("strace"));
        let slow = ["-f", "-qq", "-o", "/dev/null", "-e", "inject=fsync,fdatasync:delay_exit=40000"];
        let sync = strace.args(slow).arg(dsync_tests::site::binary()).arg("sync");
        let sync = sync.args([&scene.image, &scene.replica]).start();
        until("the epoch is written down", || epochs() != before);
        let bytes = [scene.random.bytes(BLOCK as usize), scene.random.bytes(BLOCK as usize)];
        // In what changed, and beside it.
        let places = [0, MIB];
        let file = OpenOptions::new().read(true).write(true).open(&scene.image).expect("the source");
        for (at, bytes) in places.iter().zip(&bytes) {
            file.write_all_at(bytes, *at).expect("a write");
        }
        let done = sync.output(Duration::from_secs(60));
        let replica = OpenOptions::new().read(true).open(&scene.replica).expect("the replica");
        let has = |at: &u64, bytes: &Vec<u8>| {
            let mut found = vec![0; bytes.len()];
            replica.read_exact_at(&mut found, *at).expect("reading");
            found == *bytes
        };
        let has: Vec<bool> = places.iter().zip(&bytes).map(|(at, bytes)| has(at, bytes)).collect();
        assert!(!done.status.success() || has[0] == has[1], "round {round}: {has:?} {done}");
        scene.sync(&[]).ok();
        scene.equal();
        scene.start();
    }
}

/// A device has no times: what others wrote to it while it was read is known by the kernel's count, and must not be taken to be in what the next count
/// begins with.
#[test]
fn what_others_write_to_a_device_while_it_is_read_is_not_missed() {
    let what = "writes to a device that is read";
    if !need_root(what) {
        return;
    }
    let trusted = &["--trust-device"][..];
    let told = &["--as", "s1", "--since", "s0", "--changes"][..];
    let ends = ["noticed", "interrupted", "the line is cut"];
    for (options, end) in [trusted, told].into_iter().flat_map(|options| ends.map(|end| (options, end))) {
        let mut random = Random::new(what);
        let site = Site::new();
        let (image, replica) = (site.image("disk", 12 * MIB), site.path("replica.raw"));
        let Some(device) = Loop::new(&image) else { return skipped(what, "no loop device is free") };
        let list = site.path("list");
        std::fs::write(&list, format!("0 {}\n", 12 * MIB)).expect("a list");
        let list = list.to_str().expect("a path");
        let named = options.len() > 1;
        let options: Vec<&str> = options.iter().copied().chain(named.then_some(list)).collect();
        let far = Site::new();
        let sync = |options: &[&str]| match end {
            "the line is cut" => {
                let to = format!("far:{}", replica.display());
                let run = site.dsync(["sync", "--json", "--rsh", RSH]).arg(device.device()).arg(to);
                run.args(options).env("RSH_STATE", far.state())
            }
            _ => site.sync(device.device(), &replica, options),
        };
        let write = |at: u64, len: u64, random: &mut Random| {
            image::scribble(device.device(), at, len, random);
            Run::new("sync").arg(device.device()).ok();
        };
        sync(if named { &["--as", "s0"] } else { &[] }).ok();
        write(0, 12 * MIB, &mut random);
        let first = sync(&options).args(["--bwlimit", "4M"]);
        let first =
            if end == "the line is cut" { first.env("RSH_CUT", (6 * MIB).to_string()) } else { first };
        let mut first = first.start();
        let journal = site.path(".replica.raw.dsync/journal");
        until("a part has arrived", || journal.metadata().is_ok_and(|file| file.len() > 2 * MIB));
        // What was read already, and what was not.
        write(MIB / 2, MIB / 4, &mut random);
        write(11 * MIB, MIB / 4, &mut random);
        if end == "interrupted" {
            first.signal(rustix::process::Signal::TERM);
        }
        let first = first.output(Duration::from_secs(60));
        assert!(!first.status.success(), "{first}");
        sync(&options).ok();
        assert!(
            std::fs::read(device.device()).expect("the device")
                == std::fs::read(&replica).expect("a replica"),
            "{options:?}, {end}: {first}"
        );
    }
}

/// What others write to a device between its opening and the cut is in no record of it.
#[test]
fn what_others_write_to_a_device_before_the_cut_is_not_missed() {
    let what = "writes to a device before the cut";
    if !need_root(what) {
        return;
    }
    let mut random = Random::new(what);
    let site = Site::new();
    let (image, replica) = (site.image("disk", 4 * MIB), site.path("replica.raw"));
    let Some(device) = Loop::new(&image) else { return skipped(what, "no loop device is free") };
    image::scribble(device.device(), 0, 4 * MIB, &mut random);
    Run::new("sync").arg(device.device()).ok();
    let sync = |options: &[&str]| site.sync(device.device(), &replica, options);
    sync(&[]).ok();
    sync(&["--trust-device"]).ok();
    let hook = format!(
        "read begin; head -c 4096 /dev/urandom | dd of={} bs=4k seek=9 oflag=direct conv=notrunc status=none; \
         echo ready; read cut; read end",
        device.device().display()
    );
    sync(&["--trust-device", "--hook", &hook]).code(1).says(&["another program wrote"]);
    sync(&["--trust-device"]).ok();
    let (disk, copy) = (std::fs::read(device.device()), std::fs::read(&replica));
    assert!(disk.expect("the device") == copy.expect("a replica"));
}

#[test]
fn a_copy_by_hand_sends_everything_and_keeps_holes() {
    for commit in ["journal", "in-place"] {
        let mut scene = Scene::synced("copy", 64 * MIB);
        let space = image::space(&scene.image);
        // Something that only a copy of everything, its zeroes too, makes good.
        rot(&scene.replica, 3 * MIB);
        rot(&scene.replica, 60 * MIB);
        let mut client = scene.client();
        client.write(20 * MIB, &[5; 8192]).expect("a write");
        let summary = scene.sync(&["--method", "copy", "--commit", commit]).ok().summary();
        scene.equal();
        assert_eq!(text(&summary, "method"), "copy", "{summary}");
        let sent = number(&summary, "bytes_sent");
        assert!(sent <= space + 2 * MIB, "{sent} bytes sent of {space} allocated");
        let replica = image::space(&scene.replica);
        assert!(replica <= space + 2 * MIB, "the source takes {space} bytes, its replica {replica}");
        // A new state, followed as any other.
        let changed = scene.change(30);
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(text(&summary, "method"), "tracked", "{summary}");
        assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64);
        scene.equal();
    }
    let scene = Scene::new("first copy", 16 * MIB);
    scene.sync(&["--method", "copy"]).ok();
    scene.equal();
    scene.sync(&["--method", "copy", "--adopt"]).code(2);
}

#[test]
fn after_a_gap_the_replica_is_compared_under_load_and_tracked_again() {
    let mut scene = Scene::synced("gap under load", 48 * MIB);
    for round in 0..rounds(3, 30) {
        lose_track(&mut scene, round * MIB, 9000);
        let mut random = scene.random.clone();
        let options = Options { rate: 1500, ..Options::default() };
        let load = Load::start(&scene.server().address(), "vm", &options, &mut random);
        load.wait_for(50);
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(text(&summary, "method"), "compare", "{summary}");
        assert!(text(&summary, "trust").starts_with("compared: "), "{summary}");
        assert!(text(&summary, "trust").len() > "compared: ".len(), "no reason: {summary}");
        load.wait_for(load.answered() + 100);
        // What was written while it was compared was written down.
        let written = load.stop();
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(text(&summary, "method"), "tracked", "{summary}");
        scene.equal();
        written.check(&scene.replica);
    }
}

#[test]
fn digests_spare_reading_the_replica() {
    let mut scene = Scene::new("digests", 32 * MIB);
    // The seed makes them, every later sync keeps them.
    let summary = scene.sync(&["--digests"]).ok().summary();
    assert!(text(&summary, "digests").starts_with("created"), "{summary}");
    let file = scene.site.path("replica/.vm.raw.dsync/digests");
    assert!(file.exists());
    for options in
        [&["--digests"][..], &["--digests", "--commit", "in-place"], &["--digests", "--method", "copy"]]
    {
        scene.change(60);
        scene.client().zero(5 * MIB, 100_000 / 4096 * 4096, 0).expect("zeroes");
        let summary = scene.sync(options).ok().summary();
        assert_eq!(text(&summary, "digests"), "used", "{options:?}: {summary}");
        scene.equal();
    }
    // What is rotten in the replica does not show: it was not read.
    lose_track(&mut scene, 9 * MIB, 50_000);
    rot(&scene.replica, 25 * MIB);
    let summary = scene.sync(&["--digests"]).ok().summary();
    assert_eq!(text(&summary, "method"), "compare", "{summary}");
    assert_eq!(text(&summary, "digests"), "used", "{summary}");
    let blocks = number(&summary, "blocks_changed");
    assert!((12..=14).contains(&blocks), "{summary}");
    assert_eq!(image::differing_blocks(&scene.image, &scene.replica), [25 * MIB / BLOCK]);
    // A compare that reads finds it.
    let summary = scene.sync(&["--method", "compare"]).ok().summary();
    assert_eq!(number(&summary, "blocks_changed"), 1, "{summary}");
    scene.equal();
}

#[test]
fn stale_digests_are_never_used() {
    let mut scene = Scene::new("stale digests", 16 * MIB);
    let file = scene.site.path("replica/my-digests");
    let option = format!("--digests={}", file.display());
    scene.sync(&[&option]).ok();
    let good = std::fs::read(&file).expect("digests");
    for what in
        ["a commit without them", "an older file", "damage", "another hash", "another program's writes"]
    {
        println!("{what}");
        let mut options = vec!["--method", "compare", &option];
        match what {
            "a commit without them" => {
                scene.change(5);
                scene.sync(&[]).ok();
                rot(&scene.replica, 3 * MIB);
            }
            "an older file" => {
                std::fs::write(&file, &good).expect("digests");
                rot(&scene.replica, 4 * MIB);
            }
            "damage" => {
                let mut bytes = std::fs::read(&file).expect("digests");
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                std::fs::write(&file, bytes).expect("digests");
                rot(&scene.replica, 5 * MIB);
            }
            "another hash" => {
                options.extend(["--hash", "xxh3"]);
                rot(&scene.replica, 6 * MIB);
            }
            _ => {
                std::thread::sleep(Duration::from_millis(50));
                image::scribble(&scene.replica, 7 * MIB, 10, &mut scene.random);
                scene.sync(&options).code(4).says(&["--adopt"]);
                options = vec!["--adopt", &option];
            }
        }
        let summary = scene.sync(&options).ok().summary();
        assert!(text(&summary, "digests").starts_with("created: "), "{what}: {summary}");
        assert_eq!(number(&summary, "blocks_changed"), 1, "{what}: {summary}");
        scene.equal();
    }
    // A file that is not a digest file is not written to.
    let letter = scene.site.path("letter");
    std::fs::write(&letter, "dear friend").expect("a file");
    let option = format!("--digests={}", letter.display());
    scene.sync(&["--method", "compare", &option]).code(1).says(&["letter"]);
    assert_eq!(std::fs::read(&letter).expect("a file"), b"dear friend");
    let option = format!("--digests={}", scene.replica.display());
    scene.sync(&["--method", "compare", &option]).code(1).says(&["vm.raw"]);
    scene.equal();
}

/// What came of a sync that was cut off stands in the digests, and not in the replica.
#[test]
fn digests_of_a_sync_that_was_cut_off_are_not_used() {
    let mut scene = Scene::new("cut digests", 16 * MIB);
    scene.sync(&["--digests"]).ok();
    scene.change(2000);
    let before = image::fingerprint(&scene.replica);
    let mut process = scene.sync(&["--digests", "--bwlimit", "2M"]).start();
    process.wait_to_say("bytes_done");
    process.kill();
    assert_eq!(image::fingerprint(&scene.replica), before, "nothing is merged yet");
    let summary = scene.sync(&["--method", "compare", "--digests"]).ok().summary();
    assert!(text(&summary, "digests").starts_with("created: "), "{summary}");
    scene.equal();
}

#[test]
fn digests_flow_over_the_link_and_little_else() {
    let (mut scene, far) = (Scene::new("bytes", 64 * MIB), Far::new(RSH));
    let mut random = scene.random.clone();
    image::random(&scene.site.path("noise"), 64 * MIB, &mut random);
    let noise = std::fs::read(scene.site.path("noise")).expect("noise");
    for (n, part) in noise.chunks(MIB as usize).enumerate() {
        scene.client().write(n as u64 * MIB, part).expect("a write");
    }
    far.sync(&scene, &[], None).ok();
    let changed = scene.change(150);
    let summary = far.sync(&scene, &["--method", "compare"], None).ok().summary();
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    let both = number(&summary, "bytes_sent") + number(&summary, "bytes_received");
    let besides = both - changed.len() as u64 * BLOCK;
    assert!(besides * 1000 <= 64 * MIB * 5, "{besides} bytes besides what changed: {summary}");
    image::assert_equal(&scene.image, &far.replica());
}

/// A device over a file that has become shorter: what lies behind its end cannot be read.
struct Broken {
    site: Site,
    file: PathBuf,
    device: Loop,
}

impl Broken {
    fn new(random: &mut Random) -> Option<Broken> {
        let site = Site::new();
        let file = site.image("disk.raw", 16 * MIB);
        image::random(&file, 16 * MIB, random);
        Some(Broken { device: Loop::new(&file)?, site, file })
    }

    fn cut(&self, size: u64) {
        let file = OpenOptions::new().write(true).open(&self.file).expect("the file");
        file.set_len(size).expect("another size");
        Run::new("blockdev").arg("--flushbufs").arg(self.device.device()).output();
    }
}

#[test]
fn behind_unreadable_sectors_of_a_source() {
    let what = "unreadable sectors";
    if !need(&["losetup"], what) || !need_root(what) {
        return;
    }
    let mut random = Random::new(what);
    for (seeded, commit) in [(false, "journal"), (true, "journal"), (true, "in-place")] {
        let Some(broken) = Broken::new(&mut random) else {
            return skipped(what, "there are no loop devices here");
        };
        let replica = broken.site.path("copy.raw");
        let sync = |options: &[&str]| {
            let options = [&["--commit", commit][..], options].concat();
            broken.site.sync(broken.device.device(), &replica, &options)
        };
        if seeded {
            sync(&[]).ok();
            image::scribble(&broken.file, MIB, 100_000, &mut random);
        }
        let first = 16 * MIB - 5 * BLOCK;
        broken.cut(first);
        let before = replica.exists().then(|| image::fingerprint(&replica));
        sync(&[]).code(1).says(&[&first.to_string()]);
        if commit == "journal" {
            assert_eq!(replica.exists().then(|| image::fingerprint(&replica)), before);
        }
        let summary = sync(&["--keep-going"]).code(1).summary();
        assert_eq!(number(&summary["unreadable"], "bytes"), 5 * BLOCK, "{summary}");
        assert_eq!(number(&summary["unreadable"]["list"][0], "offset"), first, "{summary}");
        assert!(summary["epoch"].is_u64(), "{summary}");
        // All else is there, and nobody claims more.
        let bytes = |path: &Path| std::fs::read(path).expect("an image")[..first as usize].to_vec();
        assert!(bytes(&broken.file) == bytes(&replica));
        let status = broken.site.dsync(["status", "--json"]).arg(&replica).ok().summary();
        assert_eq!(
            (text(&status, "state"), number(&status, "unsure")),
            ("incomplete", 5 * BLOCK),
            "{status}"
        );
        broken
            .site
            .dsync(["verify"])
            .arg(broken.device.device())
            .arg(&replica)
            .code(1)
            .says(&["--keep-going"]);
        sync(&["--method", "tracked"]).code(3);
        // The disk is mended. Nobody has watched it: a compare makes it whole.
        broken.cut(16 * MIB);
        let summary = sync(&[]).ok().summary();
        assert_eq!(text(&summary, "method"), "compare", "{summary}");
        image::assert_equal(&broken.file, &replica);
        let status = broken.site.dsync(["status", "--json"]).arg(&replica).ok().summary();
        assert_eq!(text(&status, "state"), "exact", "{status}");
    }
}

/// On one host a region in which much has changed is sent and written whole, and what has changed is told all the same. Over a
/// link nothing more is sent than has changed.
#[test]
fn dense_regions_are_sent_whole_on_one_host() {
    let (mut scene, far) = (Scene::new("dense", 8 * MIB), Far::new(RSH));
    // Zeroes are never sent.
    let mut client = scene.client();
    let noise = scene.random.bytes(8 << 20);
    client.write(0, &noise).expect("a write");
    client.close().expect("the end");
    scene.sync(&[]).ok();
    far.sync(&scene, &[], None).ok();
    for (method, commit, whole) in
        [("tracked", "in-place", true), ("compare", "in-place", true), ("compare", "journal", false)]
    {
        let before = std::fs::read(&scene.replica).expect("a replica");
        // What is zero already stands between what has changed, too.
        scene.change(1200);
        let mut client = scene.client();
        (0..2048).step_by(7).for_each(|block| client.trim(block * BLOCK, BLOCK as u32).expect("zeroes"));
        client.close().expect("the end");
        let after = std::fs::read(&scene.image).expect("an image");
        let parts = before.chunks(BLOCK as usize).zip(after.chunks(BLOCK as usize));
        let differs: Vec<bool> = parts.map(|(before, after)| before != after).collect();
        let changed = differs.iter().filter(|differs| **differs).count() as u64;
        let options = ["--method", method, "--commit", commit];
        let summary = scene.sync(&options).ok().summary();
        scene.equal();
        // Frames have heads.
        let more = |summary: &Value| number(summary, "bytes_sent") > changed * BLOCK * 102 / 100;
        assert_eq!(more(&summary), whole, "{method}, {commit}: {summary}");
        let summaries = [summary, far.sync(&scene, &options, None).ok().summary()];
        image::assert_equal(&scene.image, &far.replica());
        assert!(!more(&summaries[1]), "{method}, {commit}: {}", summaries[1]);
        for summary in summaries.iter().filter(|summary| summary["method"] == "compare") {
            let runs = differs.chunk_by(|a, b| a == b).filter(|run| run[0]).count() as u64;
            assert_eq!(number(summary, "blocks_changed"), changed, "{commit}: {summary}");
            assert_eq!(number(summary, "extents"), runs, "{commit}: {summary}");
            assert_eq!(number(summary, "bytes_changed"), changed * BLOCK, "{commit}: {summary}");
        }
    }
}

#[test]
fn a_source_that_changes_its_size_while_it_is_read() {
    let mut random = Random::new("size under way");
    for size in [6 * MIB, 40 * MIB] {
        let site = Site::new();
        let (disk, replica) = (site.image("vm.raw", 24 * MIB), site.path("copy.raw"));
        image::random(&disk, 24 * MIB, &mut random);
        site.sync(&disk, &replica, &[]).ok();
        for options in [&["--method", "compare"][..], &["--method", "copy"]] {
            image::random(&disk, 24 * MIB, &mut random);
            let before = image::fingerprint(&replica);
            let slow = [options, &["--bwlimit", "6M", "--allow-shrink"]].concat();
            let process = site.sync(&disk, &replica, &slow).start();
            std::thread::sleep(Duration::from_millis(1200));
            let file = OpenOptions::new().write(true).open(&disk).expect("the disk");
            file.set_len(size).expect("another size");
            let output = process.output(Duration::from_secs(60));
            assert_eq!(output.status.code(), Some(1), "{output}");
            output.says(&["vm.raw"]);
            assert_eq!(image::fingerprint(&replica), before, "the replica is as it was: {output}");
        }
        site.sync(&disk, &replica, &["--allow-shrink"]).ok();
        image::assert_equal(&disk, &replica);
    }
}

/// What is only read brings nothing into the page cache, and drives nothing out of it.
#[test]
fn reading_leaves_the_page_cache_as_it_was() {
    let what = "the page cache after a compare";
    if !need(&["fincore"], what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let (disk, replica) = (site.image("vm.raw", 48 * MIB), site.path("copy.raw"));
    image::random(&disk, 48 * MIB, &mut random);
    site.sync(&disk, &replica, &[]).ok();
    for warm in [0, 16 * MIB] {
        for words in [
            &["verify"][..],
            &["sync", "--method", "compare"],
            &["sync", "--method", "compare", "--commit", "in-place"],
            &["sync", "--method", "rolling"],
            &["sync", "--method", "rolling", "--commit", "in-place"],
        ] {
            // Changing it once makes it another file for who compares; the pages that are written are gone then.
            let syncs = words[0] == "sync";
            if syncs {
                image::scribble(&disk, 40 * MIB, BLOCK, &mut random);
            }
            [&disk, &replica].into_iter().for_each(|path| image::cache(path, warm));
            // What is read ahead arrives later.
            std::thread::sleep(Duration::from_millis(if warm > 0 { 500 } else { 0 }));
            let cached = || (image::cached(&disk), image::cached(&replica));
            let (Some(source), Some(copy)) = cached() else {
                return skipped(what, "fincore does not tell what is cached");
            };
            assert!(source >= warm && copy >= warm, "{source} and {copy} bytes are cached");
            let run = site.dsync([words[0]]).arg(&disk).arg(&replica).args(&words[1..]).ok();
            let (Some(source_after), Some(copy_after)) = cached() else { continue };
            // The system itself may take away what nobody has used for a while. What is written lies far from what is warm.
            for (before, after) in [(source, source_after), (copy, copy_after)] {
                let told = format!("{before} became {after}: {words:?}, {warm} bytes warm: {run}");
                assert!(after <= before && after >= warm / 2, "{told}");
            }
        }
    }
    image::assert_equal(&disk, &replica);
}

#[test]
fn a_compare_without_space_for_it() {
    let what = "a full destination";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("full", 8 * MIB, "12m", what) else {
        return;
    };
    let fill = scene.replica.with_file_name("fill");
    scene.sync(&[]).ok();
    scene.change(1500);
    // What was not written since has been damaged by the disk itself: a repair needs room for it.
    let damaged: Vec<u8> =
        std::fs::read(&scene.replica).expect("the replica").iter().map(|byte| !byte).collect();
    std::fs::write(&scene.replica, damaged).expect("damage");
    scene.restamp();
    let room = 12 * MIB - image::space(&scene.replica);
    std::fs::write(&fill, vec![1; room.saturating_sub(MIB / 16) as usize]).expect("filling");
    let before = image::fingerprint(&scene.replica);
    scene.sync(&["--method", "compare"]).code(1).says(&["space"]);
    scene.site.dsync(["verify", "--repair"]).arg(&scene.image).arg(&scene.replica).code(1).says(&["space"]);
    assert_eq!(image::fingerprint(&scene.replica), before);
    std::fs::remove_file(&fill).expect("making room");
    scene.sync(&["--method", "compare", "--commit", "in-place", "--digests"]).ok();
    scene.equal();
}

#[test]
fn holes_cost_neither_side_anything() {
    let (site, size) = (Site::new(), 256 << 30);
    let (disk, replica) = (site.image("vm.raw", size), site.path("copy.raw"));
    let mut random = Random::new("holes");
    image::scribble(&disk, 100 << 30, MIB, &mut random);
    site.sync(&disk, &replica, &[]).ok();
    image::scribble(&disk, 200 << 30, 5000, &mut random);
    let began = Instant::now();
    let summary = site.sync(&disk, &replica, &["--method", "compare"]).ok().summary();
    assert!(number(&summary, "bytes_read") < 8 * MIB, "{summary}");
    assert!(number(&summary, "bytes_received") < MIB, "{summary}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let at = |path: &Path| {
        let mut bytes = vec![0; 5000];
        OpenOptions::new()
            .read(true)
            .open(path)
            .and_then(|f| f.read_exact_at(&mut bytes, 200 << 30))
            .expect("reading");
        bytes
    };
    assert!(at(&disk) == at(&replica));
}

/// Writes the same few blocks again and again until it is dropped.
struct Scribbler(std::sync::Arc<std::sync::atomic::AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Scribbler {
    fn at(path: &Path) -> Scribbler {
        let file = OpenOptions::new().write(true).open(path).expect("the source");
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = stop.clone();
        let write = move || {
            for n in 0.. {
                if stopped.load(std::sync::atomic::Ordering::SeqCst) {
                    break;
                }
                file.write_all_at(&[n as u8; 4096], n % 7 * 4096).expect("a write");
                file.sync_data().expect("a flush");
            }
        };
        Scribbler(stop, Some(std::thread::spawn(write)))
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
        let _ = self.1.take().map(std::thread::JoinHandle::join);
    }
}

/// Whoever reads `source` while `written` is being written says so, and the replica is not made anybody's state.
fn refuses_while_it_is_written(site: &Site, source: &Path, written: &Path, replica: &str) {
    let replica = site.path(replica);
    let same = || std::fs::read(source).expect("the source") == std::fs::read(&replica).expect("the replica");
    let torn = ["another program wrote to"];
    let verify = || site.dsync(["verify"]).args([source, &replica]);
    let extract = || site.dsync(["extract", "--since", "0"]).arg(source);
    let scribbler = Scribbler::at(written);
    // So slow that writes fall into it on a busy machine too.
    let slow = ["--bwlimit", "12M"];
    site.sync(source, &replica, &slow).code(1).says(&torn);
    assert!(!replica.exists(), "a torn first copy stands where a whole one belongs");
    drop(scribbler);
    site.sync(source, &replica, &[]).ok();
    assert!(same(), "the replica is not the source");
    verify().ok();
    extract().ok();
    let before = std::fs::read(&replica).expect("the replica");
    let scribbler = Scribbler::at(written);
    site.sync(source, &replica, &[]).code(1).says(&torn);
    extract().code(1).says(&torn);
    let verified = verify().output();
    assert!(!verified.status.success() && verified.stderr.contains(torn[0]), "{verified}");
    drop(scribbler);
    assert!(std::fs::read(&replica).expect("the replica") == before, "a torn delta was merged");
    // What lies in the page cache is nobody's write.
    let file = OpenOptions::new().write(true).open(written).expect("the source");
    file.write_all_at(&[77; 65536], 8 * MIB - 65536).expect("a write");
    site.sync(source, &replica, &[]).ok();
    assert!(same(), "the replica is not the source");
}

/// Takes the partitions that were added to a device away again.
struct Parts<'a>(&'a Path);

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        for number in ["1", "2"] {
            Run::new("delpart").arg(self.0).arg(number).output();
        }
    }
}

#[test]
fn what_is_written_while_it_is_read_is_no_one_moment() {
    let what = "sources that are written to while they are read";
    let mut random = Random::new(what);
    let mut site_with_image = || {
        let site = Site::new();
        let image = site.image("disk.raw", 24 * MIB);
        image::random(&image, 24 * MIB, &mut random);
        (site, image)
    };
    let (site, file) = site_with_image();
    refuses_while_it_is_written(&site, &file, &file, "copy.raw");
    if !need(&["losetup", "addpart", "delpart"], what) || !need_root(what) {
        return;
    }
    let (site, image) = site_with_image();
    let Some(disk) = Loop::new(&image) else {
        return skipped(what, "there are no loop devices here");
    };
    let whole = disk.device();
    refuses_while_it_is_written(&site, whole, whole, "copy.raw");
    // The first half of the disk as a partition, the other half as another.
    let half = 12 * MIB / 512;
    let _parts = Parts(whole);
    for (number, start) in [("1", 0), ("2", half)] {
        Run::new("addpart").arg(whole).args([number, &start.to_string(), &half.to_string()]).ok();
    }
    let partition = |number: u32| PathBuf::from(format!("{}p{number}", whole.display()));
    if got(std::fs::metadata(partition(2)), what) {
        refuses_while_it_is_written(&site, &partition(1), whole, "part.raw");
        // Its neighbour's writes are none of its own.
        let scribbler = Scribbler::at(&partition(2));
        site.sync(&partition(1), &site.path("part.raw"), &[]).ok();
        drop(scribbler);
        refuses_while_it_is_written(&site, whole, &partition(2), "again.raw");
    }
}

#[test]
fn a_disk_is_known_under_another_name_and_no_other_disk_under_its_own() {
    let what = "disks that change their names";
    if !need(&["losetup"], what) || !need_root(what) {
        return;
    }
    let mut random = Random::new(what);
    let site = Site::new();
    let mut disk = |name: &str| {
        let image = site.image(name, 8 * MIB);
        image::random(&image, 8 * MIB, &mut random);
        image
    };
    let (one, other) = (disk("one.raw"), disk("other.raw"));
    let Some(first) = Loop::new(&one) else {
        return skipped(what, "there are no loop devices here");
    };
    let replica = site.path("copy.raw");
    site.sync(first.device(), &replica, &[]).ok();
    let before = std::fs::read(&replica).expect("the replica");
    let name = first.device().to_path_buf();
    drop(first);
    // As after a start of the machine: the other disk has the first one's name.
    if !Run::new("losetup").arg(&name).arg(&other).output().status.success() {
        return beyond(what, "another program has taken the loop device");
    }
    let refused = site.sync(&name, &replica, &[]).output();
    let second = Loop::new(&one).expect("a loop device");
    let found = site.sync(second.device(), &replica, &[]).output();
    Run::new("losetup").arg("--detach").arg(&name).ok();
    assert_eq!(refused.status.code(), Some(4), "{refused}");
    refused.says(&["--adopt"]);
    assert!(std::fs::read(&replica).expect("the replica") == before);
    assert!(found.status.success(), "{found}");
    assert_eq!(found.summary()["method"], "compare", "{found}");
}

/// A server goes on with the size that its disk had: every command says so, and the restart keeps the record.
#[test]
fn a_disk_resized_while_it_is_served_is_told_of() {
    let mut scene = Scene::synced("resized while served", 16 << 20);
    let image = scene.image.clone();
    let resize = |size: u64| {
        let file = OpenOptions::new().write(true).open(&image).expect("the image");
        file.set_len(size).expect("a size");
    };
    resize(24 << 20);
    let told = ["vm.raw was resized", "has 24.0 MiB", "offers 16.0 MiB: restart the server"];
    scene.site.dsync(["sync"]).arg(&scene.image).arg(&scene.replica).ok().says(&told);
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).ok().says(&told);
    let status = |scene: &Scene, options: &[&str]| scene.site.dsync(["status"]).args(options).output();
    for options in [&[][..], &["--check"]] {
        let said = status(&scene, options);
        assert!(told.iter().all(|words| said.text().contains(words)), "{said}");
    }
    scene.stop();
    scene.start();
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    scene.equal();
    assert!(!status(&scene, &["--check"]).text().contains("resized"));
    resize(8 << 20);
    scene.sync(&[]).code(4).says(&["vm.raw was resized", "has 8.00 MiB", "offers 24.0 MiB: restart"]);
    // A guest makes it no longer again.
    let mut client = scene.client();
    until("writes beyond the end are refused", || {
        let refused = client.write(12 << 20, &[7; 4096]).is_err();
        resize(8 << 20);
        refused
    });
    client.write(4 << 20, &[7; 4096]).expect("a write before the end");
    client.write(12 << 20, &[7; 4096]).expect_err("a write beyond the end");
    assert_eq!(std::fs::metadata(&image).expect("the image").len(), 8 << 20);
    client.close().expect("the end");
    scene.stop();
    scene.site.dsync(["serve", "--socket", "s"]).arg(&image).code(4).says(&["shrank", "--allow-shrink"]);
    let server = scene.site.serve(&[&image], &["--allow-shrink"]);
    scene.sync(&["--allow-shrink"]).ok();
    server.stop();
    scene.equal();
}

/// The replica's journal holds what was found so far: only what changed there since is sent, and only the rest compared. After another gap, and in place,
/// it begins anew.
#[test]
fn a_comparison_that_is_cut_off_goes_on() {
    let mut scene = Scene::synced_in_memory("a comparison that is cut off", 64 * MIB);
    let far = Far::in_memory(RSH);
    far.sync(&scene, &[], None).ok();
    let mut random = scene.random.clone();
    let mut went_on = 0;
    for round in 0..rounds(6, 120) {
        let commit = if round > 0 && random.one_in(6) { "in-place" } else { "journal" };
        let sync = |scene: &Scene, cut: Option<u64>| far.sync(scene, &["--commit", commit], cut);
        // Differences all over, of which the server knows nothing.
        scene.stop();
        std::thread::sleep(Duration::from_millis(50));
        for at in 0..1024 {
            image::scribble(&scene.image, at * 16 * BLOCK, BLOCK, &mut random);
        }
        scene.start();
        let mut is_cut = false;
        for _ in 0..if round == 0 { 1 } else { 1 + random.below(4) } {
            let cut = if round == 0 { 2 * MIB } else { random.below(4 * MIB) };
            is_cut = !sync(&scene, Some(cut)).output().status.success();
            let mut client = scene.client();
            for _ in 0..random.below(40) {
                let content = vec![random.below(256) as u8; BLOCK as usize];
                client.write(random.below(64 * MIB / BLOCK) * BLOCK, &content).expect("a write");
            }
            drop(client);
            if round > 0 && random.one_in(4) {
                is_cut = false;
                lose_track(&mut scene, random.below(64) * MIB, BLOCK);
            }
        }
        let summary = sync(&scene, None).ok().summary();
        image::assert_equal(&scene.image, &far.replica());
        let goes_on = summary["resumed"] == true && summary["method"] == "compare";
        println!("round {round}: {commit}, {}, resumed: {}", summary["trust"], summary["resumed"]);
        assert!(!goes_on || (is_cut && commit == "journal"), "{summary}");
        if goes_on {
            went_on += 1;
            assert!(number(&summary, "bytes_read") < 64 * MIB, "{summary}");
        }
    }
    assert!(went_on > 0, "none went on");
}

/// What one that goes on does not look at is as it was: a difference that is known stays known. And at an older moment it begins anew.
#[test]
fn a_comparison_that_goes_on_proves_nothing_of_what_it_passes_over() {
    let mut scene = Scene::synced_in_memory("a comparison that goes on", 16 * MIB);
    let far = Far::in_memory(RSH);
    far.sync(&scene, &[], None).ok();
    scene.stop();
    std::thread::sleep(Duration::from_millis(50));
    for at in 0..512 {
        image::scribble(&scene.image, at * 8 * BLOCK, BLOCK, &mut scene.random);
    }
    scene.start();
    // Of this moment, which is older than what was received.
    let view = scene.server().client("vm@view");
    far.sync(&scene, &[], Some(MIB)).code(1);
    far.sync(&scene, &["--at-view"], None).ok();
    drop(view);
    scene.stop();
    std::thread::sleep(Duration::from_millis(50));
    for at in 0..512 {
        image::scribble(&scene.image, at * 8 * BLOCK, BLOCK, &mut scene.random);
    }
    scene.start();
    far.sync(&scene, &[], Some(MIB)).code(1);
    rot(&far.replica(), 5 * BLOCK);
    let verify = || far.run("verify", &scene, &[], None);
    verify().code(5);
    let summary = far.sync(&scene, &[], None).ok().summary();
    assert_eq!((&summary["method"], &summary["resumed"]), (&"compare".into(), &true.into()), "{summary}");
    let status = scene.site.dsync(["status", "--check"]).code(1);
    assert!(status.text().contains("replica differs"), "{status}");
    verify().code(5);
    far.run("verify", &scene, &["--repair"], None).ok();
    image::assert_equal(&scene.image, &far.replica());
}
