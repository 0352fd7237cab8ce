//! The past of a replica: after everything was overwritten at the source and synced, the moments before are still there.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::records::{self, Records};
use dsync_tests::scene::number;
use dsync_tests::{Run, Scene, image, need, need_root, rounds, skipped};
use rustix::process::Signal;
use serde_json::Value;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// Where a replica is, and how it gets there.
struct Place<'a> {
    replica: PathBuf,
    /// `dsync sync` with these options.
    sync: &'a dyn Fn(&Scene, &[&str]) -> Run,
    /// `dsync rewind` at the replica's site.
    rewind: &'a dyn Fn(&Scene, &[&str]) -> Run,
}

fn rewind_here(scene: &Scene, replica: &Path, args: &[&str]) -> Run {
    scene.site.dsync(["rewind", "--json"]).arg(replica).args(args)
}

/// The first bytes of a device are the disk.
fn assert_holds(replica: &Path, expected: &Path) {
    let found = std::fs::File::open(replica).expect("a replica");
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::Read::take(found, SIZE), &mut bytes).expect("a replica");
    let expected = std::fs::read(expected).expect("a copy");
    assert!(bytes == expected, "{} is not what it was then", replica.display());
}

fn moments(listed: &Value) -> Vec<(u64, u64)> {
    let list = listed["moments"].as_array().expect("a list");
    list.iter().map(|moment| (number(&moment["epoch"], "number"), number(moment, "at"))).collect()
}

/// Three epochs, then a disaster that is synced. Each epoch is gone back to, and the disaster itself.
fn disaster(scene: &mut Scene, place: &Place<'_>, options: &[&str]) {
    let keep = [&["--keep", "24h/10m,7d/1h", "--keep-last", "9"], options].concat();
    let sync = |scene: &Scene, options: &[&str]| {
        let summary = (place.sync)(scene, options).ok().summary();
        let epoch = number(&summary, "epoch");
        let copy = scene.site.path(&format!("epoch-{epoch}.raw"));
        image::copy(&scene.image, &copy);
        (epoch, copy)
    };
    let mut epochs = vec![sync(scene, &keep)];
    for _ in 0..2 {
        scene.change(100);
        // What is kept is remembered.
        epochs.push(sync(scene, options));
        // Times are told by the second.
        std::thread::sleep(Duration::from_millis(1100));
    }
    let mut client = scene.client();
    for at in (0..SIZE).step_by(MIB as usize) {
        client.write(at, &scene.random.bytes(MIB as usize)).expect("a write");
    }
    client.close().expect("the end");
    epochs.push(sync(scene, options));
    assert_holds(&place.replica, &epochs[3].1);

    let listed = (place.rewind)(scene, &[]).ok().summary();
    let kept = moments(&listed);
    let numbers: Vec<u64> = kept.iter().map(|(epoch, _)| *epoch).collect();
    assert_eq!(numbers, [epochs[2].0, epochs[1].0, epochs[0].0]);
    // By its epoch, and by its time; looking changes nothing.
    let last = epochs[2].0.to_string();
    (place.rewind)(scene, &["--to", &last, "-n"]).ok();
    assert_holds(&place.replica, &epochs[3].1);
    let rewound = (place.rewind)(scene, &["--to", &last]).ok().summary();
    assert_eq!((number(&rewound, "epoch"), number(&rewound, "at")), kept[0]);
    assert_holds(&place.replica, &epochs[2].1);
    let then = Run::new("date").args(["-u", "-d", &format!("@{}", kept[1].1), "+%F %T"]).ok().stdout;
    let then = String::from_utf8(then).expect("a date");
    let rewound = (place.rewind)(scene, &["--to", then.trim()]).ok().summary();
    assert_eq!(number(&rewound, "epoch"), epochs[1].0);
    assert_holds(&place.replica, &epochs[1].1);
    // Forth again, and back to the first.
    for at in [3, 0] {
        (place.rewind)(scene, &["--to", &epochs[at].0.to_string()]).ok();
        assert_holds(&place.replica, &epochs[at].1);
    }
    (place.rewind)(scene, &["--to", "77"]).code(4).says(&["epoch 77"]);
    (place.rewind)(scene, &["--to", "tomorrow"]).code(2).says(&["tomorrow", "10 minutes ago"]);
    // The source goes on from that epoch, by what was written down since.
    let summary = (place.sync)(scene, options).ok().summary();
    assert_eq!(summary["trust"], "tracked", "{summary}");
    assert_holds(&place.replica, &epochs[3].1);
}

#[test]
fn a_disaster_is_taken_back() {
    let mut scene = Scene::in_memory("past of a file", SIZE);
    let replica = scene.replica.clone();
    let rewind = |scene: &Scene, args: &[&str]| rewind_here(scene, &scene.replica, args);
    disaster(
        &mut scene,
        &Place { replica, sync: &|scene, options| scene.sync(options), rewind: &rewind },
        &[],
    );
}

#[test]
fn a_disaster_is_taken_back_at_another_host() {
    let mut scene = Scene::in_memory("past at another host", SIZE);
    let far = Far::new(env!("CARGO_BIN_EXE_rsh"));
    let rewind =
        |_: &Scene, args: &[&str]| far.site.dsync(["rewind", "--json"]).arg(far.replica()).args(args);
    let place = Place {
        replica: far.replica(),
        sync: &|scene, options| far.sync(scene, options, None),
        rewind: &rewind,
    };
    disaster(&mut scene, &place, &["--compress"]);
}

#[test]
fn a_disaster_is_taken_back_on_a_device() {
    let what = "the past of a replica on a loop device";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("past of a device", SIZE);
    let Some(device) = Loop::new(&scene.site.image("device.img", SIZE + MIB)) else {
        return skipped(what, "there is no loop device");
    };
    scene.replica = device.device().to_path_buf();
    let replica = scene.replica.clone();
    let rewind = |scene: &Scene, args: &[&str]| rewind_here(scene, &scene.replica, args);
    disaster(
        &mut scene,
        &Place { replica, sync: &|scene, options| scene.sync(options), rewind: &rewind },
        &[],
    );
}

#[test]
fn a_disaster_is_taken_back_by_reflinks() {
    let what = "the past of a replica committed by reflink on XFS";
    if !need(&["mkfs.xfs"], what) || !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory("past by reflink", SIZE);
    let (disk, mount) = (scene.site.image("xfs.raw", 512 * MIB), scene.site.path("xfs"));
    Run::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&disk).ok();
    let Some(_mounted) = Mount::new(&["-o", "loop"], &disk, &mount) else {
        return skipped(what, "XFS cannot be mounted from a loop device here");
    };
    scene.replica = mount.join("vm.raw");
    let replica = scene.replica.clone();
    let rewind = |scene: &Scene, args: &[&str]| rewind_here(scene, &scene.replica, args);
    let place = Place { replica, sync: &|scene, options| scene.sync(options), rewind: &rewind };
    disaster(&mut scene, &place, &["--commit", "reflink"]);
}

/// The past gives way to the replica: on a full file system the oldest moments go, and the sync succeeds.
#[test]
fn a_full_file_system_costs_moments_and_no_sync() {
    let what = "a past that fills a file system";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("full of the past", SIZE, "44m", what) else {
        return;
    };
    scene.sync(&["--keep-last", "100", "--keep-bytes", "1G"]).ok();
    let mut warned = 0;
    for _ in 0..12 {
        scene.change(1000);
        let summary = scene.sync(&[]).ok().summary();
        warned += summary["warnings"].as_array().expect("a list").len();
        scene.equal();
    }
    assert!(warned > 0, "the past never gave way");
    let kept = moments(&rewind_here(&scene, &scene.replica, &[]).ok().summary());
    assert!((1..12).contains(&kept.len()), "{kept:?}");
}

/// A rewind that was killed is completed, or was not begun.
#[test]
fn a_rewind_survives_its_death() {
    let mut scene = Scene::in_memory("killed rewind", 4 * SIZE);
    scene.sync(&["--keep-last", "9"]).ok();
    let before = scene.site.path("before.raw");
    image::copy(&scene.image, &before);
    scene.change(8000);
    scene.sync(&[]).ok();
    let after = scene.site.path("after.raw");
    image::copy(&scene.image, &after);
    for _ in 0..rounds(4, 20) {
        let mut running = rewind_here(&scene, &scene.replica, &["--to", "1"]).start();
        std::thread::sleep(Duration::from_millis(scene.random.within(10..260)));
        running.signal(Signal::KILL);
        drop(running);
        let recovered = scene.site.dsync(["recover", "--json"]).arg(&scene.replica).ok().summary();
        match number(&recovered, "epoch") {
            1 => image::assert_equal(&before, &scene.replica),
            _ => image::assert_equal(&after, &scene.replica),
        }
        // Forth again.
        rewind_here(&scene, &scene.replica, &["--to", "1"]).ok();
        image::assert_equal(&before, &scene.replica);
        rewind_here(&scene, &scene.replica, &["--to", "2"]).ok();
        image::assert_equal(&after, &scene.replica);
    }
}

/// A mirror keeps its epochs, also when it is killed in the midst of one.
#[test]
fn a_mirror_keeps_its_epochs() {
    let mut scene = Scene::in_memory("past of a mirror", SIZE);
    let start = |scene: &Scene| {
        let run = scene.site.dsync(["mirror", "--epoch", "300ms", "--rpo", "400ms", "--keep-last", "50"]);
        let mut running = run.arg(&scene.image).arg(&scene.replica).start();
        running.wait_to_say("mirroring to");
        running
    };
    let mut running = start(&scene);
    let mut copies = Vec::new();
    for round in 0..4 {
        scene.change(300);
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while image::first_difference(&scene.image, &scene.replica).is_some() {
            assert!(std::time::Instant::now() < until, "waited for a minute");
            std::thread::sleep(Duration::from_millis(50));
        }
        // The epoch ends with these changes.
        std::thread::sleep(Duration::from_secs(1));
        let epoch = number(&scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().summary(), "epoch");
        let copy = scene.site.path(&format!("mirrored-{round}.raw"));
        image::copy(&scene.image, &copy);
        copies.push((epoch, copy));
        if round == 2 {
            running.signal(Signal::KILL);
            drop(running);
            running = start(&scene);
        }
    }
    // In the midst of an epoch.
    scene.change(100);
    while image::first_difference(&scene.image, &scene.replica).is_some() {
        std::thread::sleep(Duration::from_millis(5));
    }
    running.signal(Signal::KILL);
    drop(running);
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
    let kept = moments(&rewind_here(&scene, &scene.replica, &[]).ok().summary());
    let numbers: Vec<u64> = kept.iter().map(|(epoch, _)| *epoch).collect();
    for (epoch, copy) in copies {
        assert!(numbers.contains(&epoch), "{epoch} is not one of {numbers:?}");
        rewind_here(&scene, &scene.replica, &["--to", &epoch.to_string()]).ok();
        image::assert_equal(&copy, &scene.replica);
    }
    // And the sync after it has all again.
    scene.sync(&[]).ok();
    scene.equal();
}

/// What is to be kept is taken over although nothing has to be sent, and not by a dry run.
#[test]
fn what_is_kept_is_changed_without_a_write() {
    let mut scene = Scene::synced_in_memory("keep", MIB);
    let shown = |scene: &Scene| {
        let listed = rewind_here(scene, &scene.replica, &[]).ok().summary();
        (listed["keep"]["last"].clone(), moments(&listed).len())
    };
    assert_eq!(shown(&scene), (0.into(), 0));
    scene.sync(&["--keep-last", "3", "-n"]).ok();
    assert_eq!(shown(&scene), (0.into(), 0));
    assert_eq!(number(&scene.sync(&["--keep-last", "3"]).ok().summary(), "blocks_changed"), 0);
    assert_eq!(shown(&scene), (3.into(), 0));
    for _ in 0..2 {
        scene.change(3);
        scene.sync(&[]).ok();
    }
    assert_eq!(shown(&scene), (3.into(), 2));
    scene.sync(&["--keep-last", "5", "--keep-bytes", "1M"]).ok();
    assert_eq!(shown(&scene), (5.into(), 2));
    scene.sync(&[]).ok();
    assert_eq!(shown(&scene), (5.into(), 2));
    scene.sync(&["--keep", "none"]).ok();
    assert_eq!(shown(&scene), (0.into(), 0));
    // A mirror that has nothing to send either.
    let mut mirror = scene.site.dsync(["mirror", "--keep-last", "4", "vm"]).arg(&scene.replica).start();
    mirror.wait_to_say("mirroring to");
    mirror.signal(Signal::TERM);
    assert!(mirror.wait_for(Duration::from_secs(60)).is_some_and(|status| status.success()));
    assert_eq!(shown(&scene).0, 4);
}

/// The past of a replica ends with its promotion, which says so before and after; what has none says why.
#[test]
fn a_promotion_says_which_moments_it_gives_up() {
    let mut scene = Scene::synced_in_memory("moments", MIB);
    scene.sync(&["--keep-last", "3"]).ok();
    for _ in 0..2 {
        scene.change(3);
        scene.sync(&[]).ok();
    }
    let promote = |options: &[&str]| scene.site.dsync(["promote"]).arg(&scene.replica).args(options);
    promote(&[]).code(4).says(&["gives up", "the 2 moments that are kept", "dsync rewind "]);
    let outlook = promote(&["-n", "--force"]).ok().text();
    assert!(
        outlook.contains("the 2 earlier moments that were kept could not be reached any more"),
        "{outlook}"
    );
    assert_eq!(number(&promote(&["-n", "--force", "--json"]).ok().summary(), "moments_lost"), 2);
    let told = promote(&["--force"]).ok().text();
    assert!(told.contains("the 2 earlier moments that were kept cannot be reached any more"), "{told}");

    // What is no replica has no past, and is told from one that is away.
    let rewind = |path: &str| scene.site.dsync(["rewind", path]);
    for source in [&scene.replica, &scene.image] {
        let source = source.to_str().expect("a name");
        rewind(source).code(4).says(&[source, "is a source", "dsync status"]);
        rewind(source).args(["--to", "1"]).code(4).says(&[source, "dsync status"]);
    }
    let gone = scene.site.path("gone.raw");
    rewind(gone.to_str().expect("a name")).code(1).says(&[
        "no replica at ",
        "gone.raw",
        "\"dsync status\" lists",
    ]);
    let plain = scene.site.image("plain.raw", MIB);
    rewind(plain.to_str().expect("a name")).code(4).says(&["plain.raw is not a replica", "--journal-dir"]);
    for command in ["rewind", "recover", "status", "promote"] {
        let refused = scene.site.dsync([command, "far:/srv/vm.raw"]).code(2);
        refused.says(&[
            "far:/srv/vm.raw is on another host",
            &format!("\"dsync {command} /srv/vm.raw\" on far"),
        ]);
    }
}

/// What a mirror has brought a replica to within an epoch may be the only copy of it: a rewind leaves it as a moment.
#[test]
fn a_rewind_of_a_replica_ahead_of_its_epoch_is_taken_back() {
    let mut scene = Scene::in_memory("rewound from within an epoch", SIZE);
    let run = scene.site.dsync(["mirror", "--epoch", "1h", "--rpo", "400ms", "--keep", "1h"]);
    let mut running = run.arg(&scene.image).arg(&scene.replica).start();
    running.wait_to_say("mirroring to");
    scene.change(100);
    while image::first_difference(&scene.image, &scene.replica).is_some() {
        std::thread::sleep(Duration::from_millis(50));
    }
    // Beneath the mirror as well: that it may give up what no other disk has is said before anything is stopped.
    let listed = scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).ok().summary();
    let epoch = number(&listed["epoch"], "number");
    assert_eq!(
        (&listed["ahead"], number(&listed["moments"][0]["epoch"], "number")),
        (&true.into(), epoch),
        "{listed}"
    );
    let would =
        scene.site.dsync(["rewind", "-n", "--to", &epoch.to_string()]).arg(&scene.replica).ok().text();
    assert!(would.contains(&format!("would go back to epoch {epoch}")), "{would}");
    running.signal(Signal::KILL);
    drop(running);
    let copy = scene.site.path("last.raw");
    image::copy(&scene.image, &copy);
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
    let rewind = |args: &[&str]| rewind_here(&scene, &scene.replica, args);
    let listed = rewind(&[]).ok().summary();
    let epoch = number(&listed["epoch"], "number").to_string();
    assert_eq!(listed["ahead"], true, "{listed}");
    assert_eq!(rewind(&["--to", &epoch]).ok().summary()["ahead"], false);
    assert!(image::first_difference(&copy, &scene.replica).is_some());
    let told = |args: &[&str], words: &str| {
        let text = scene.site.dsync(["rewind"]).arg(&scene.replica).args(args).ok().text();
        assert!(text.contains(words), "{text}");
    };
    told(&[], &format!("ahead of epoch {epoch} (--to {epoch}+)"));
    let listed = rewind(&[]).ok().summary();
    assert_eq!((&listed["ahead"], &listed["moments"][0]["ahead"]), (&false.into(), &true.into()), "{listed}");
    // The epoch itself is where it is.
    told(&["--to", &epoch], "at that moment already");
    told(&["--to", &format!("{epoch}+")], "the state ahead of epoch");
    image::assert_equal(&copy, &scene.replica);
    rewind(&["--to", &epoch]).ok();
    rewind(&["--to", "0 seconds ago"]).ok();
    image::assert_equal(&copy, &scene.replica);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    scene.equal();
}

/// A mirror keeps a moment of each period of the grid, however seldom its epochs end otherwise, and each of them is one moment of its source.
#[test]
fn a_mirror_keeps_moments_as_close_as_the_grid_asks() {
    const EVERY: u64 = 2;
    let scene = Scene::in_memory("grid of a mirror", SIZE);
    let keep = format!("1h/{EVERY}s");
    let run = scene.site.dsync(["mirror", "--epoch", "1h", "--rpo", "400ms", "--keep", &keep]);
    let mut running = run.arg(&scene.image).arg(&scene.replica).start();
    running.wait_to_say("mirroring to");
    let load = Records::start(&scene.server().address(), "vm", None, 2000);
    std::thread::sleep(Duration::from_secs(7 * EVERY));
    load.stop();
    running.signal(Signal::TERM);
    let output = running.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    let mut kept = moments(&rewind_here(&scene, &scene.replica, &[]).ok().summary());
    kept.reverse();
    println!("moments: {kept:?}");
    // The first is that of the sync, and the present one is none.
    assert!(kept.len() >= 5, "{kept:?}");
    for pair in kept.windows(2) {
        let periods = pair[1].1 / EVERY - pair[0].1 / EVERY;
        // A busy machine may be late for one.
        assert!((1..=2).contains(&periods), "{kept:?}: the moment after epoch {} is missing", pair[0].0);
    }
    let mut before = [0; 2];
    let copies: Vec<(String, Vec<u8>)> = kept
        .iter()
        .map(|(epoch, _)| {
            let moment = PathBuf::from(format!("{}@{epoch}", scene.replica.display()));
            let server = scene.site.serve(&[&moment], &[]);
            let mut client = server.client("vm");
            let parts = (0..SIZE / MIB).map(|at| client.read(at * MIB, MIB as u32).expect("a read"));
            let copy = parts.collect::<Vec<_>>().concat();
            let path = scene.site.path("moment.raw");
            std::fs::write(&path, &copy).expect("a copy");
            let records = records::check(&path, &format!("the moment of epoch {epoch}"));
            assert!(records[0] >= before[0] && records[1] >= before[1], "{records:?} after {before:?}");
            before = records;
            (epoch.to_string(), copy)
        })
        .collect();
    assert!(before[0] > 0);
    for (epoch, copy) in copies.iter().rev().step_by(2) {
        rewind_here(&scene, &scene.replica, &["--to", epoch]).ok();
        assert!(std::fs::read(&scene.replica).expect("the replica") == *copy, "epoch {epoch}");
    }
    scene.sync(&[]).ok();
    scene.equal();
}

/// Where it cannot be read what is to be kept, nothing is taken for granted: the commit is refused, and no moment is lost.
#[test]
fn what_is_kept_is_not_forgotten_by_an_error() {
    let mut scene = Scene::in_memory("settings of the past", SIZE);
    scene.sync(&["--keep-last", "9"]).ok();
    for _ in 0..2 {
        scene.change(10);
        scene.sync(&[]).ok();
    }
    let kept = moments(&rewind_here(&scene, &scene.replica, &[]).ok().summary());
    assert_eq!(kept.len(), 2);
    let name = scene.replica.file_name().expect("a name").to_string_lossy();
    let settings = scene.replica.with_file_name(format!(".{name}.dsync/past"));
    let bytes = std::fs::read(&settings).expect("settings");
    scene.change(10);
    // A disk that fails, bit rot, a file of a newer version.
    std::fs::remove_file(&settings).and_then(|()| std::fs::create_dir(&settings)).expect("a folder");
    scene.sync(&[]).code(1).says(&["past"]);
    std::fs::remove_dir(&settings).expect("its end");
    for (content, says) in [
        ("{\"versi", ["EOF", "remove it", "--keep"]),
        ("{\"version\":7,\"keep\":{}}", ["version 7", "use the dsync that wrote it", "a newer one"]),
    ] {
        std::fs::write(&settings, content).expect("a file");
        scene.sync(&[]).code(4).says(&["past"]).says(&says);
    }
    std::fs::write(&settings, bytes).expect("settings");
    scene.sync(&[]).ok();
    let now = moments(&rewind_here(&scene, &scene.replica, &[]).ok().summary());
    assert_eq!(now[1..], kept);
}

/// A replica that was moved has left its moments behind: whoever begins another one is told, and who puts it back has them.
#[test]
fn a_new_replica_is_not_begun_without_a_word_of_the_moments() {
    let mut scene = Scene::in_memory("a replica that was moved", SIZE);
    scene.sync(&["--keep-last", "5"]).ok();
    scene.change(20);
    scene.sync(&[]).ok();
    let (replica, moved) = (scene.replica.clone(), scene.site.path("moved.raw"));
    std::fs::rename(&replica, &moved).expect("a replica");
    let warned = |options: &[&str]| {
        let summary = scene.sync(options).ok().summary();
        let said = summary["recovered"].as_str().unwrap_or_default().to_owned();
        assert!(said.contains("without the moments") && said.contains("put it back"), "{said}");
    };
    warned(&["--create", "-n"]);
    let forgotten = scene.site.dsync(["forget", "-n"]).arg(&replica).ok().text();
    assert!(forgotten.contains("the moment kept by --keep is lost"), "{forgotten}");
    std::fs::rename(&moved, &replica).expect("a replica");
    assert_eq!(moments(&rewind_here(&scene, &replica, &[]).ok().summary()).len(), 1);
    std::fs::remove_file(&replica).expect("a replica");
    warned(&["--create"]);
    assert!(moments(&rewind_here(&scene, &replica, &[]).ok().summary()).is_empty());
    scene.equal();
}

/// What a disk has lost is mended at the replica's epoch: the moments before stay, and none of them has the damage.
#[test]
fn a_repair_keeps_the_past() {
    let mut scene = Scene::in_memory("a past that is repaired", SIZE);
    scene.sync(&["--keep-last", "9"]).ok();
    let mut epochs = Vec::new();
    for n in 0..3 {
        scene.change(50);
        let epoch = number(&scene.sync(&[]).ok().summary(), "epoch");
        let copy = scene.site.path(&format!("epoch-{n}.raw"));
        image::copy(&scene.image, &copy);
        epochs.push((epoch, copy));
    }
    let list = |scene: &Scene| moments(&rewind_here(scene, &scene.replica, &[]).ok().summary());
    let verify = |scene: &Scene, options: &[&str]| {
        let run = scene.site.dsync(["verify", "--json"]).args(options);
        run.args([&scene.image, &scene.replica])
    };
    let kept = list(&scene);
    assert_eq!(kept.len(), 3);
    assert!(verify(&scene, &["--repair"]).ok().summary()["warnings"] == serde_json::json!([]));
    assert_eq!(list(&scene), kept, "there was nothing to repair");
    let contents: Vec<_> = epochs.iter().map(|(_, copy)| std::fs::read(copy).expect("a copy")).collect();
    let same =
        |at: &usize| contents.iter().all(|content| content[*at..at + 4096] == contents[0][*at..at + 4096]);
    let block = (0..SIZE as usize).step_by(4096).find(same).expect("a block that was not written to");
    let damage = |scene: &Scene| {
        let file = std::fs::File::options().write(true).open(&scene.replica).expect("the replica");
        std::os::unix::fs::FileExt::write_all_at(&file, &[0x5a; 4096], block as u64).expect("damage");
    };
    damage(&scene);
    scene.restamp();
    let mended = verify(&scene, &["--repair"]).ok().summary();
    assert_eq!(number(&mended["differing"], "bytes"), 4096, "{mended}");
    assert_eq!(number(&mended, "epoch_after"), number(&mended, "epoch"), "{mended}");
    assert_eq!(list(&scene), kept);
    for at in [1, 0] {
        let rewound = rewind_here(&scene, &scene.replica, &["--to", &epochs[at].0.to_string()]).ok();
        assert!(rewound.text().contains("if a change had been missed, and nothing was damaged"), "{rewound}");
        assert_holds(&scene.replica, &epochs[at].1);
    }
    // One that is repaired there is as rewound as before.
    verify(&scene, &["--repair"]).ok();
    let rewound = || scene.site.dsync(["status", "--check"]).output().text().contains("replica was rewound");
    assert!(rewound());
    scene.sync(&[]).ok();
    assert!(!rewound());
    assert!(!list(&scene).is_empty());
    // What others have written is in no moment for certain: that is said, and a command that is refused costs nothing.
    let kept = list(&scene);
    damage(&scene);
    verify(&scene, &["--repair", "--commit", "in-place"]).code(4).says(&["the past of", "--keep none"]);
    let refused = scene.sync(&[]).code(4);
    refused.says(&["if nothing was written, the moments kept by --keep stay"]);
    let taken = scene.sync(&["--adopt"]).ok().summary();
    assert!(taken["warnings"].to_string().contains("its past is given up"), "{taken}");
    assert!(list(&scene).is_empty(), "{kept:?}");
    scene.equal();
    // Nor is that known of damage where the source has no record of its own changes.
    scene.change(50);
    scene.sync(&[]).ok();
    assert!(!list(&scene).is_empty());
    scene.stop();
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.image, MIB, 4096, &mut scene.random);
    let repaired = verify(&scene, &["--repair"]).ok().summary();
    assert!(repaired["warnings"].to_string().contains("its past is given up"), "{repaired}");
    assert!(list(&scene).is_empty());
    scene.equal();
}

#[test]
fn a_replica_that_was_not_written_to_keeps_its_past() {
    use std::os::unix::fs::{FileExt, PermissionsExt};
    let mut scene = Scene::synced("a chmod and its past", SIZE);
    let keep = ["--keep", "1h/1s", "--keep-last", "9"];
    let list = |scene: &Scene| moments(&rewind_here(scene, &scene.replica, &[]).ok().summary());
    let verify = |scene: &Scene, options: &[&str]| {
        scene.site.dsync(["verify", "--json"]).arg(&scene.image).arg(&scene.replica).args(options)
    };
    let open =
        |scene: &Scene| std::fs::File::options().write(true).open(&scene.replica).expect("the replica");
    let chmod = |scene: &Scene, mode| {
        std::fs::set_permissions(&scene.replica, std::fs::Permissions::from_mode(mode)).expect("a chmod");
    };
    let touch = |scene: &Scene| {
        let now = std::time::SystemTime::now();
        open(scene).set_times(std::fs::FileTimes::new().set_modified(now)).expect("a touch");
    };
    let past = |scene: &mut Scene| {
        scene.sync(&keep).ok();
        scene.change(100);
        scene.sync(&[]).ok();
        std::thread::sleep(Duration::from_millis(1100));
        list(scene)
    };
    let kept = past(&mut scene);
    assert!(!kept.is_empty());
    let then = number(&scene.sync(&[]).ok().summary(), "epoch");
    let copy = scene.site.path("then.raw");
    image::copy(&scene.image, &copy);

    // While its source is unchanged, whatever its times say.
    touch(&scene);
    scene.sync(&[]).code(4);
    verify(&scene, &[]).ok();
    scene.sync(&[]).code(4);
    let accepted = verify(&scene, &["--repair"]).ok().summary();
    assert_eq!(accepted["repaired"], true);
    assert_eq!(number(&accepted, "bytes_written"), 0, "{accepted}");
    assert_eq!(list(&scene), kept);
    scene.sync(&[]).ok();
    // After its source has changed, where the content is as old as it was.
    scene.change(50);
    chmod(&scene, 0o600);
    let accepted = verify(&scene, &["--repair"]).ok().summary();
    assert!(number(&accepted, "bytes_changed_since") > 0, "{accepted}");
    assert_eq!(accepted["epoch_after"], accepted["epoch"]);
    assert_eq!(list(&scene), kept);
    scene.sync(&[]).ok();
    scene.equal();
    rewind_here(&scene, &scene.replica, &["--to", &then.to_string()]).ok();
    assert_holds(&scene.replica, &copy);
    scene.sync(&[]).ok();
    assert!(list(&scene).len() > kept.len());

    // Not where it may have been written to in what is not compared.
    scene.change(50);
    touch(&scene);
    let repaired = verify(&scene, &["--repair"]).ok().summary();
    assert!(repaired["warnings"].to_string().contains("its past is given up"), "{repaired}");
    assert!(list(&scene).is_empty());
    scene.equal();
    // Where it was, and only looks as old as it was, its times are believed, and a verification tells.
    assert!(!past(&mut scene).is_empty());
    let before = std::fs::metadata(&scene.replica).and_then(|known| known.modified()).expect("a time");
    open(&scene).write_all_at(&[0x5a; 4096], MIB).expect("a write");
    open(&scene).set_times(std::fs::FileTimes::new().set_modified(before)).expect("a time");
    assert!(scene.sync(&[]).ok().summary()["recovered"].to_string().contains("is taken for what it was"));
    let repaired = verify(&scene, &["--repair"]).ok().summary();
    assert_eq!(number(&repaired["differing"], "bytes"), 4096, "{repaired}");
    scene.equal();

    // Its source is gone: its user says that nothing was written, and its times do not tell otherwise.
    assert!(!past(&mut scene).is_empty());
    let then = number(&scene.sync(&[]).ok().summary(), "epoch");
    image::copy(&scene.image, &copy);
    scene.change(50);
    scene.sync(&[]).ok();
    let kept = list(&scene);
    std::fs::remove_file(&scene.image).expect("the source is gone");
    let rewind = |scene: &Scene| rewind_here(scene, &scene.replica, &["--to", &then.to_string()]);
    let accept = |scene: &Scene| scene.site.dsync(["recover", "--accept"]).arg(&scene.replica);
    chmod(&scene, 0o640);
    assert_eq!(list(&scene), kept);
    // As "cp -a" brings it back.
    let other = scene.site.path("copied.raw");
    let known = std::fs::metadata(&scene.replica).and_then(|known| known.modified()).expect("a time");
    image::copy(&scene.replica, &other);
    let copied = std::fs::File::options().write(true).open(&other).expect("the copy");
    copied.set_times(std::fs::FileTimes::new().set_modified(known)).expect("a time");
    std::fs::rename(&other, &scene.replica).expect("a restore");
    rewind(&scene).code(4).says(&["dsync recover --accept"]);
    accept(&scene).ok();
    rewind(&scene).ok();
    assert_holds(&scene.replica, &copy);
    touch(&scene);
    let refused = accept(&scene).code(4);
    refused.says(&["cannot be taken for what it was", "content written"]);
}
