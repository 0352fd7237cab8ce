//! Readers of a served disk that dsync knows nothing of but a name: their views, their checkpoints, what changed for them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::image;
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::nbd::{Client, DIRTY};
use dsync_tests::scene::{number, ranges};
use dsync_tests::{Random, Run, Scene, Server, Site, got, need, need_root, rounds, skipped, until};

const MIB: u64 = 1 << 20;

fn view(scene: &Scene, name: &str, checkpoints: &[&str]) -> Client {
    let contexts: Vec<String> = checkpoints.iter().map(|name| format!("qemu:dirty-bitmap:{name}")).collect();
    let contexts: Vec<&str> = contexts.iter().map(String::as_str).collect();
    let export = format!("vm@view.{name}");
    Client::connect_with(&scene.server().address(), &export, &contexts).expect("a view")
}

fn checkpoint(scene: &Scene, words: &[&str]) -> Run {
    scene.site.dsync(["checkpoint", "vm", "--json"]).args(words)
}

fn epoch(scene: &Scene) -> String {
    number(&scene.site.dsync(["status", "vm", "--json"]).ok().summary(), "epoch").to_string()
}

/// Bytes that the files without a name take that a process has open.
fn nameless(process: i32) -> u64 {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).expect("a process").flatten();
    let files = open.filter_map(|entry| entry.path().metadata().ok()).filter(|found| found.is_file());
    files.filter(|found| found.nlink() == 0).map(|found| found.blocks() * 512).sum()
}

/// A view takes no more than half of the room that the record needs too, and gives it back when it fails or ends, also where no connection writes on.
#[test]
fn a_view_leaves_room_for_the_writes() {
    let what = "a view whose file system runs full";
    if !need_root(what) || !need(&["mkfs.ext4"], what) {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new(what));
    let (vm, fs) = (site.path("vm.raw"), site.image("fs.img", 64 * MIB));
    image::random(&vm, 64 * MIB, &mut random);
    Run::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&fs).ok();
    let Some(_mounted) = Mount::new(&["-o", "loop"], &fs, &site.state()) else {
        return skipped(what, "ext4 cannot be mounted from a loop device here");
    };
    let server = site.serve(&[&vm], &[]);
    let kept = || nameless(server.id()) / MIB;
    let mut guest = server.client("vm");
    let mut write = |mib: std::ops::Range<u64>| {
        mib.for_each(|at| guest.write(at * MIB, &random.bytes(MIB as usize)).expect("a write"))
    };
    let reader = server.client("vm@view");
    write(0..16);
    assert_eq!(kept(), 16);
    drop(reader);
    until("the view has given its room back", || kept() == 0);
    let mut reader = server.client("vm@view");
    write(0..64);
    assert_eq!(kept(), 0);
    reader.read(0, 4096).expect_err("it has failed");
    // Nor does it tell of holes, which are newer than it.
    write(0..1);
    server.client("vm").trim(0, 64 << 20).expect("a trim");
    let mut asked = Client::connect_with(&server.address(), "vm@view", &["base:allocation"]).expect("a view");
    asked.ranges("base:allocation", 3).expect_err("it has failed");
    // Holes take none, and are not read.
    server.stop();
    let sparse = site.image("sparse.raw", 4096 * MIB);
    let server = site.serve(&[&sparse], &["--view-limit", "1M"]);
    let (mut guest, mut reader) = (server.client("sparse"), server.client("sparse@view"));
    guest.trim(0, 2 << 30).expect("a trim");
    reader.read(0, 4096).expect("the view goes on");
}

#[test]
fn a_map_begins_at_its_readers_checkpoint_and_ends_at_its_view() {
    let mut scene = Scene::synced("checkpoints", 16 * MIB);
    checkpoint(&scene, &["one"]).ok();
    let mut changed = scene.change(40);
    // Everything that ends an epoch, but moves no checkpoint of others.
    scene.sync(&[]).ok();
    changed.extend(scene.change(10));
    checkpoint(&scene, &["two"]).ok();
    let late: BTreeSet<u64> = scene.change(10);
    changed.extend(&late);
    drop(scene.server().client("vm@view"));
    drop(view(&scene, "other", &["two"]));
    scene.site.dsync(["extract", "vm"]).ok();

    let mut first = view(&scene, "reader", &["one", "two", "dsync", "none"]);
    let shown = scene.site.path("shown.raw");
    image::copy(&scene.image, &shown);
    let after = scene.change(20);
    let map = |client: &mut Client, name: &str| {
        client.ranges(&format!("qemu:dirty-bitmap:{name}"), 1).expect("a map")
    };
    assert_eq!(map(&mut first, "one"), ranges(&changed));
    assert_eq!(map(&mut first, "two"), ranges(&late));
    assert!(!first.has(DIRTY) && !first.has("qemu:dirty-bitmap:none"), "a map that begins nowhere");

    // The same reader's next connection sees the same, wherever the checkpoint has gone; another reader sees more.
    let read = epoch(&scene);
    let summary = checkpoint(&scene, &["one", "--at", &read]).ok().summary();
    assert_eq!(number(&summary, "epoch").to_string(), read);
    let mut second = view(&scene, "reader", &["one"]);
    assert_eq!(map(&mut second, "one"), ranges(&changed));
    let saved = scene.site.path("saved.raw");
    second.save(&saved).expect("the view");
    image::assert_equal(&shown, &saved);
    let mut other = view(&scene, "other", &["one", "two"]);
    assert_eq!(map(&mut other, "one"), ranges(&after));
    assert_eq!(map(&mut other, "two"), ranges(&late.union(&after).copied().collect()));
}

#[test]
fn a_checkpoint_moves_only_by_its_readers_word_and_never_back() {
    let mut scene = Scene::synced("moves", 8 * MIB);
    let old = epoch(&scene);
    checkpoint(&scene, &["backup"]).ok();
    scene.change(5);
    let before = scene.dirty();
    checkpoint(&scene, &["backup"]).code(4).says(&["backup", "exists already", "--at"]);
    for name in ["7", "a/b", "a:b", "", "with space", "-x"] {
        assert_ne!(checkpoint(&scene, &["--", name]).output().status.code(), Some(0), "'{name}'");
    }
    checkpoint(&scene, &["backup", "--at", "99"]).output().says(&["99"]);
    assert_eq!(before, scene.dirty(), "a refused checkpoint left an epoch behind");
    let summary = checkpoint(&scene, &[]).ok().summary();
    let now = number(&summary, "epoch").to_string();
    checkpoint(&scene, &["backup", "--at", &now]).ok();
    checkpoint(&scene, &["backup", "--at", &old]).code(4).says(&["backup", "cannot move back", &now]);
    let listed = scene.site.dsync(["checkpoint", "vm", "--list"]).ok().text();
    assert!(listed.contains("backup at epoch"), "{listed}");
    checkpoint(&scene, &["--delete", "backup"]).ok();
    checkpoint(&scene, &["--delete", "backup"]).output().says(&["backup"]);
    assert!(!view(&scene, "reader", &["backup"]).has("qemu:dirty-bitmap:backup"));
}

#[test]
fn a_gap_takes_a_checkpoints_map_away() {
    let mut scene = Scene::synced("gap", 8 * MIB);
    checkpoint(&scene, &["backup"]).ok();
    scene.change(5);
    scene.stop();
    // Somebody writes past the server.
    image::scribble(&scene.image, MIB, 4096, &mut scene.random);
    scene.start();
    assert!(!view(&scene, "backup", &["backup"]).has("qemu:dirty-bitmap:backup"), "a map across a gap");
    scene.site.dsync(["changes", "vm", "--since", "backup"]).code(3).says(&["not known"]);
    let now = epoch(&scene);
    checkpoint(&scene, &["backup", "--at", &now]).ok();
    let changed = scene.change(5);
    let mut again = view(&scene, "backup", &["backup"]);
    assert_eq!(again.ranges("qemu:dirty-bitmap:backup", 1).expect("a map"), ranges(&changed));
}

#[test]
fn changes_are_printed_for_served_disks_and_for_images_at_rest() {
    let mut scene = Scene::new("changes", 8 * MIB);
    checkpoint(&scene, &["backup"]).ok();
    let changed = scene.change(30);
    let expected: Vec<(u64, u64)> = ranges(&changed).iter().map(|r| (r.start, r.end - r.start)).collect();
    let found = |scene: &Scene| -> Vec<(u64, u64)> {
        let text = scene.site.dsync(["changes"]).arg(&scene.image).args(["--since", "backup"]).ok().text();
        let number = |text: &str| text.parse::<u64>().expect("a number");
        let pair = |line: &str| line.split_once(' ').map(|(at, len)| (number(at), number(len)));
        text.lines().map(|line| pair(line).expect("two numbers")).collect()
    };
    assert_eq!(found(&scene), expected);
    scene.sync(&[]).ok();
    assert_eq!(found(&scene), expected, "a sync moved it");
    scene.stop();
    assert_eq!(found(&scene), expected, "at rest");
    let json =
        scene.site.dsync(["changes"]).arg(&scene.image).args(["--since", "backup", "--format", "json"]);
    let summary = json.ok().summary();
    assert_eq!(summary["ranges"].as_array().map(Vec::len), Some(expected.len()), "{summary}");
    let at = number(&summary, "epoch").to_string();
    scene.site.dsync(["checkpoint"]).arg(&scene.image).args(["backup", "--at", &at]).ok();
    assert_eq!(found(&scene), []);
    // An image that nobody ever served.
    let image = scene.site.image("rest.raw", MIB);
    scene.site.dsync(["checkpoint"]).arg(&image).arg("rest").ok();
    let none = scene.site.dsync(["changes"]).arg(&image).args(["--since", "rest"]).ok();
    assert_eq!(none.text(), "");
    image::scribble(&image, 0, 4096, &mut scene.random);
    scene.site.dsync(["changes"]).arg(&image).args(["--since", "rest"]).code(3).says(&["not known"]);
}

/// A block of the documentation's code, as a program.
fn documented(site: &Site, name: &str) -> PathBuf {
    let text = std::fs::read_to_string(dsync_tests::repository().join("docs/incremental-backup.md"))
        .expect("the docs");
    let found = text.split("```python\n").skip(1).filter_map(|rest| rest.split("```").next());
    let code = found.into_iter().find(|code| code.contains(&format!("# {name} "))).expect("the program");
    let path = site.path(name);
    std::fs::write(&path, code).expect("a file");
    path
}

/// A Python that has libnbd.
fn python() -> Result<&'static str, String> {
    let has = |python: &&&str| Run::new(python).args(["-c", "import nbd"]).output().status.success();
    ["/usr/bin/python3", "python3"].iter().find(has).copied().ok_or("python3-libnbd is missing".into())
}

/// The program of the documentation, and the store that it fills.
struct Backup {
    python: &'static str,
    program: PathBuf,
    restore: PathBuf,
    store: PathBuf,
}

impl Backup {
    /// In a folder of the site; `None` if there is no Python for it here.
    fn new(site: &Site) -> Option<Backup> {
        let python = python();
        if !got(python.as_ref().map(|_| ()), "incremental backups with libnbd") {
            return None;
        }
        let store = site.path("store");
        std::fs::create_dir(&store).expect("a folder");
        let (program, restore) = (documented(site, "backup.py"), documented(site, "restore.py"));
        Some(Backup { python: python.expect("checked"), program, restore, store })
    }

    fn run(&self, scene: &Scene) -> Run {
        self.of(scene.server(), &scene.site.state())
    }

    fn of(&self, server: &Server, state: &Path) -> Run {
        // As a user has it: "dsync" in the PATH, and the state directory in the environment.
        let bin = dsync_tests::site::binary().parent().expect("a folder").display();
        Run::new(self.python)
            .env("DSYNC_STATE_DIR", state)
            .env("PATH", format!("{bin}:/usr/bin:/bin"))
            .arg(&self.program)
            .arg("vm")
            .arg(server.socket())
            .arg(&self.store)
    }

    fn restored(&self, to: &Path) {
        Run::new(self.python).arg(&self.restore).arg(&self.store).arg(to).ok();
    }

    /// What its files are called, in their order: a number, since when, up to when.
    fn files(&self) -> Vec<[String; 3]> {
        let names = std::fs::read_dir(&self.store).expect("the store").flatten();
        let names = names.map(|entry| entry.file_name().into_string().expect("a name"));
        let mut files: Vec<[String; 3]> = names
            .filter_map(|name| name.split('.').map(str::to_owned).collect::<Vec<_>>().try_into().ok())
            .collect();
        files.sort();
        files
    }
}

/// Epochs of the lost branch and of the one that followed have the same numbers.
#[test]
fn a_backup_notices_that_its_machine_was_rolled_back() {
    let what = "an incremental backup of a machine that is rolled back";
    if !need(&["mkfs.ext4"], what) || !need_root(what) {
        return;
    }
    let site = Site::in_memory();
    let Some(backup) = Backup::new(&site) else { return };
    let mut random = Random::new("rolled back");
    let (machine, place) = (site.image("machine.raw", 64 * MIB), site.path("machine"));
    // Of one device throughout: another number is another file.
    let Some(device) = Loop::new(&machine) else { return skipped(what, "there is no free loop device") };
    let machine = device.device();
    Run::new("mkfs.ext4").arg("-q").arg(machine).ok();
    let (disk, state) = (place.join("vm.raw"), place.join("state"));
    let on = || {
        let mounted = Mount::new(&[], machine, &place)?;
        let _ = std::fs::File::create_new(&disk).and_then(|file| file.set_len(8 * MIB));
        let options = ["--state-dir", state.to_str().expect("a path")];
        let server = site.serve(&[&disk], &options);
        Some((mounted, server))
    };
    let shown = site.path("shown.raw");
    let mut run = |server: &Server, block: u64| {
        let mut client = server.client("vm");
        client.write(block * 4096, &random.bytes(4096)).expect("a write");
        client.flush().and_then(|()| client.close()).expect("the end");
        let mut view = server.client("vm@view.backup");
        backup.of(server, &state).ok();
        view.save(&shown).expect("the view");
    };
    let Some((mounted, server)) = on() else {
        return skipped(what, "ext4 cannot be mounted from a loop device here");
    };
    let copy = |from: &Path, to: &Path| {
        let (from, to) = (format!("if={}", from.display()), format!("of={}", to.display()));
        Run::new("dd").args([&from, &to]).args(["bs=1M", "conv=fsync", "status=none"]).ok();
    };
    run(&server, 1);
    run(&server, 2);
    server.stop();
    drop(mounted);
    let snapshot = site.path("snapshot.raw");
    copy(machine, &snapshot);
    let (mounted, server) = on().expect("mounted before");
    run(&server, 3);
    run(&server, 4);
    server.stop();
    drop(mounted);
    copy(&snapshot, machine);
    let (_mounted, server) = on().expect("mounted before");
    for block in [5, 6, 7] {
        run(&server, block);
        let restored = site.path("restored.raw");
        backup.restored(&restored);
        image::assert_equal(&shown, &restored);
    }
    let files = backup.files();
    let why = site.dsync(["changes", "vm", "--since", &files[0][2]]).arg("--state-dir").arg(&state).output();
    assert_eq!(files.iter().filter(|[_, since, _]| since == "full").count(), 1, "{files:?} {why}");
    assert_eq!(files[4][1], files[1][2], "it goes on from the newest that is not lost: {files:?}");
    let changes =
        |since: &str| site.dsync(["changes", "vm", "--since", since]).arg("--state-dir").arg(&state);
    changes(&files[3][2]).code(3).says(&[&format!("no epoch {} in its history", files[3][2])]);
    assert_eq!(changes(&files[5][2]).ok().text(), format!("{} 4096\n", 7 * 4096));
    // What came before the last full backup may go, and no more.
    let at = |file: &[String; 3]| backup.store.join(file.join("."));
    let remove = |file: &[String; 3]| std::fs::remove_file(at(file)).expect("it was there");
    site.dsync(["checkpoint", "vm", "--delete", "backup"]).arg("--state-dir").arg(&state).ok();
    run(&server, 8);
    files.iter().for_each(remove);
    [9, 10].iter().for_each(|block| run(&server, *block));
    let (files, restored) = (backup.files(), site.path("restored.raw"));
    let numbers: Vec<&str> = files.iter().map(|[number, ..]| number.as_str()).collect();
    assert_eq!(numbers, ["00000007", "00000008", "00000009"]);
    backup.restored(&restored);
    image::assert_equal(&shown, &restored);
    files.iter().filter(|[_, since, _]| since == "full").for_each(remove);
    let lacks = Run::new(backup.python).arg(&backup.restore).arg(&backup.store).arg(&restored);
    lacks.code(1).says(&["one was removed"]);
    server.stop();
}

/// Backups by the documented program among all that takes checkpoints too, and all that fails.
#[test]
fn a_week_of_incremental_backups_restores_every_hour() {
    let mut scene = Scene::synced("a week of backups", 8 * MIB);
    let Some(backup) = Backup::new(&scene.site) else { return };
    let mirrored = scene.site.path("mirrored.raw");
    let mirror = |scene: &Scene| {
        let options = ["--epoch", "200ms", "--rpo", "200ms"];
        scene.site.dsync(["mirror", "vm"]).arg(&mirrored).args(options).start()
    };
    let mut mirroring = mirror(&scene);
    let (shown, restored) = (scene.site.path("shown.raw"), scene.site.path("restored.raw"));
    for hour in 0..rounds(10, 168) {
        let mut random = scene.random.clone();
        scene.change(1 + random.below(60) as usize);
        if random.one_in(2) {
            scene.sync(&[]).ok();
        }
        if random.one_in(3) {
            drop(view(&scene, "other", &["backup"]));
        }
        if random.one_in(3) {
            // It dies at any moment.
            let mut killed = backup.run(&scene).start();
            std::thread::sleep(Duration::from_millis(random.below(300)));
            killed.kill();
            scene.change(5);
        }
        if random.one_in(4) {
            // The server dies while it reads.
            let reading = backup.run(&scene).start();
            std::thread::sleep(Duration::from_millis(random.below(300)));
            scene.server.take().expect("a server").kill();
            let ended = reading.output(Duration::from_secs(30));
            println!("hour {hour}: the server was killed, the backup {}", ended.status);
            scene.start();
        }
        // Held open, so that there is something to compare with.
        let mut holder = view(&scene, "backup", &[]);
        scene.change(5);
        backup.run(&scene).ok();
        holder.save(&shown).expect("the view");
        drop(holder);
        backup.restored(&restored);
        image::assert_equal(&shown, &restored);
        if mirroring.ended().is_some() {
            mirroring = mirror(&scene);
        }
        scene.random = random;
    }
    let files = backup.files();
    let full = files.iter().filter(|[_, since, _]| since == "full").count();
    let changes = files.len() - full;
    println!("{full} full, {changes} with changes only");
    assert!(changes > full, "{full} full backups, {changes} of changes");
}
