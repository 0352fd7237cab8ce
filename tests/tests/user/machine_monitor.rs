//! VMs that QEMU alone runs, by their monitors: all disks of one, at one moment, while their guest never stops writing.

use std::path::PathBuf;
use std::time::Duration;

use dsync_tests::image;
use dsync_tests::libvirt::{one_moment, writer};
use dsync_tests::qemu::Qemu;
use dsync_tests::{Output, Random, Run, Site, rounds, until};
use rustix::process::Signal;
use serde_json::json;

const RSH: &str = env!("CARGO_BIN_EXE_rsh");

struct World {
    site: Site,
    vm: Qemu,
    replicas: PathBuf,
}

impl World {
    /// A VM with a qcow2 disk and a raw one, whose guest writes to both in turn; `None` if there can be none here.
    fn new(what: &str) -> Option<World> {
        if !Qemu::possible(what) {
            return None;
        }
        let site = Site::in_memory();
        let replicas = site.path("replicas");
        std::fs::create_dir(&replicas).expect("a folder");
        let vm = Qemu::boot(&site, "q1", &[&writer(&site, "a.qcow2"), &writer(&site, "b.raw")]);
        Some(World { site, vm, replicas })
    }

    fn run(&self, options: &[&str]) -> Run {
        self.site.dsync(["sync", &self.vm.word()]).arg(&self.replicas).args(options)
    }

    fn disks(&self) -> [PathBuf; 2] {
        ["q1-disk0.img", "q1-disk1.img"].map(|name| self.replicas.join(name))
    }

    /// Syncs as it should be, and leaves nothing behind.
    fn sync(&self) -> String {
        let said = self.run(&[]).ok();
        assert_eq!(said.stderr, "", "{said}");
        self.clean(&said);
        said.text()
    }

    /// Syncs after a kill, which may have to complete what that one had begun, and says so.
    fn sync_after_kill(&self) -> String {
        let said = self.run(&[]).ok();
        assert!(said.stderr.lines().all(|line| line.starts_with("dsync: warning: ")), "{said}");
        self.clean(&said);
        said.text()
    }

    /// Syncs while the guest stands still, and holds the replicas against its images.
    fn sync_paused(&self) -> String {
        self.vm.ask("stop", json!({}));
        let said = self.sync();
        self.equal();
        self.vm.ask("cont", json!({}));
        said
    }

    /// Fails unless the replicas have what the images have.
    fn equal(&self) {
        for (image, replica) in ["a.qcow2", "b.raw"].into_iter().zip(self.disks()) {
            let image = self.site.path(image);
            Run::new("qemu-img").args(["compare", "-U", "-F", "raw"]).arg(&image).arg(&replica).ok();
        }
    }

    /// Fails if a part of a job is left, or more than one checkpoint of a disk.
    fn clean(&self, said: &Output) {
        let (parts, checkpoints) = self.vm.left();
        assert!(parts.is_empty() && checkpoints.len() <= 2, "{parts:?} {checkpoints:?} {said}");
        let runs = self.site.path("run/machines/vm.q1");
        let sockets = runs.read_dir().into_iter().flatten().flatten().map(|file| file.path());
        let sockets: Vec<_> =
            sockets.filter(|path| path.extension().is_some_and(|end| end == "sock")).collect();
        assert!(sockets.is_empty(), "{sockets:?}");
    }

    /// Starts the VM anew. Its guest writes other numbers.
    fn reboot(&mut self) {
        self.vm.kill();
        self.vm = Qemu::boot(&self.site, "q1", &[&self.site.path("a.qcow2"), &self.site.path("b.raw")]);
    }
}

#[test]
fn all_disks_of_a_qemu_are_of_one_moment_in_each_sync() {
    let Some(world) = World::new("a VM by its monitor") else { return };
    let mut last = 0;
    for round in 0..rounds(8, 60) {
        world.vm.writes_on();
        let said = match round {
            // It is known by its name from then on.
            1 => world.site.dsync(["sync", "vm:q1"]).arg(&world.replicas).ok().text(),
            _ => world.sync(),
        };
        let [a, b] = &world.disks();
        let now = one_moment([a, b]);
        assert!(now > last, "{now} after {last}");
        last = now;
        for disk in ["disk0", "disk1"] {
            let how = if round == 0 { "copied: it was not synced yet" } else { "QEMU's bitmap since dsync-" };
            assert!(said.contains(&format!("{disk}: {how}")), "{said}");
        }
        assert_eq!(said.contains("(as told by QEMU)"), round > 0, "{said}");
        assert!(said.contains("3 disks at one moment"), "{said}");
    }
    // What was written since is no difference.
    world.vm.writes_on();
    let said = world.site.dsync(["verify", &world.vm.word()]).arg(&world.replicas).ok().text();
    assert!(said.contains("3 disks verified, 0 with differences, 0 not verified"), "{said}");
    let listed = world.site.dsync(["discover"]).ok().text();
    let line = format!("dsync sync {} HOST:/srv/vms/", world.vm.word());
    assert!(listed.contains(&line), "{listed}");
    let shown = world.site.dsync(["status"]).ok().text();
    assert!(shown.contains("vm:q1"), "{shown}");
}

#[test]
fn a_qemu_that_was_started_anew_is_compared() {
    let Some(mut world) = World::new("a VM by its monitor that is started anew") else { return };
    world.sync();
    assert!(world.sync_paused().contains("disk0: QEMU's bitmap since"));
    world.reboot();
    let said = world.sync_paused();
    for disk in ["disk0", "disk1"] {
        assert!(said.contains(&format!("{disk}: compared: ")), "{said}");
    }
    assert!(world.sync_paused().contains("disk1: QEMU's bitmap since"));
    // Its bitmaps go, as by hand.
    for bitmap in world.vm.left().1 {
        let (node, name) = bitmap.split_once(": ").expect("a node");
        if world.vm.ask("query-block", json!({}))[0]["inserted"]["node-name"] == node {
            world.vm.ask("block-dirty-bitmap-remove", json!({ "node": node, "name": name }));
        }
    }
    world.vm.writes_on();
    let said = world.sync_paused();
    assert!(said.contains("disk0: compared: QEMU's bitmap does not hold"), "{said}");
    assert!(said.contains("disk1: QEMU's bitmap since"), "{said}");
    // The same while the guest stands still, where QEMU keeps each file that it was given.
    world.vm.ask("stop", json!({}));
    world.sync();
    world.sync();
    let node = &world.vm.ask("query-block", json!({}))[1]["inserted"]["node-name"];
    for bitmap in world.vm.left().1 {
        if let Some((_, name)) = bitmap.split_once(": ").filter(|(of, _)| node == of) {
            world.vm.ask("block-dirty-bitmap-remove", json!({ "node": node, "name": name }));
        }
    }
    let said = world.sync();
    assert!(said.contains("disk1: compared: QEMU's bitmap does not hold"), "{said}");
    world.vm.ask("cont", json!({}));
    world.vm.ask("block_resize", json!({ "device": "d1", "size": 80 << 20 }));
    world.vm.writes_on();
    let said = world.sync_paused();
    assert!(said.contains("disk1: compared: the disk was resized"), "{said}");
    // A snapshot, and back.
    let snapshot = world.site.path("a.snap");
    world.vm.ask(
        "blockdev-snapshot-sync",
        json!({ "device": "d0", "snapshot-file": snapshot, "format": "qcow2" }),
    );
    world.vm.writes_on();
    let said = world.sync();
    assert!(said.contains("disk0: compared: ") && said.contains("3 disks at one moment"), "{said}");
    world.vm.writes_on();
    assert!(world.sync().contains("disk0: QEMU's bitmap since"));
    world.vm.ask("block_resize", json!({ "device": "d0", "size": 96 << 20 }));
    assert!(world.sync().contains("disk0: compared: the disk was resized"));
    assert!(world.sync().contains("disk0: QEMU's bitmap since"));
    world.vm.ask("block-commit", json!({ "device": "d0", "job-id": "merge" }));
    until("the images are merged", || {
        let jobs = world.vm.ask("query-block-jobs", json!({}));
        jobs[0]["ready"] == true
    });
    world.vm.ask("block-job-complete", json!({ "device": "merge" }));
    until("the job is gone", || world.vm.ask("query-block-jobs", json!({})) == json!([]));
    world.vm.writes_on();
    assert!(world.sync_paused().contains("disk0: "));
}

#[test]
fn a_qemu_that_is_off_is_read_as_it_was_synced_last() {
    let Some(mut world) = World::new("a VM by its monitor that is off") else { return };
    world.sync();
    world.vm.writes_on();
    world.vm.kill();
    let said = world.run(&[]).ok().text();
    assert!(said.contains("disk0: compared: the VM ran at its last sync"), "{said}");
    world.equal();
    let said = world.site.dsync(["sync", "vm:q1"]).arg(&world.replicas).ok().text();
    assert!(said.contains("disk0: not read: the VM is off") && said.contains("disk1: not read"), "{said}");
    world.reboot();
    let said = world.sync_paused();
    assert!(said.contains("disk0: compared: the VM was off at its last sync"), "{said}");
    assert!(world.sync_paused().contains("disk0: QEMU's bitmap since"));
    // Its guest writes to a raw disk what looks like another format.
    let other = world.site.path("other.qcow2");
    Run::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&other).arg("1G").ok();
    world.vm.ask("stop", json!({}));
    let write = format!("qemu-io d1 \"write -s {} 0 64k\"", other.display());
    world.vm.ask("human-monitor-command", json!({ "command-line": write }));
    for _ in 0..2 {
        assert!(world.sync().contains("disk1: QEMU's bitmap since"));
        image::assert_equal(&world.site.path("b.raw"), &world.disks()[1]);
    }
    let known = std::fs::read_to_string(world.replicas.join("q1.json")).expect("the definition");
    let known: serde_json::Value = serde_json::from_str(&known).expect("JSON");
    assert_eq!(known["disks"]["disk1"]["replica"], "q1-disk1.img");
    assert_eq!(known["command_line"][1], "-name");
}

#[test]
fn a_sync_of_a_qemu_that_is_killed_leaves_nothing_that_the_next_does_not_end() {
    let Some(world) = World::new("a VM by its monitor whose sync is killed") else { return };
    let mut random = Random::new("a killed sync of a QEMU");
    let (mut killed, mut told) = (0, 0);
    for _ in 0..rounds(12, 200) {
        let mut running = world.run(&["--bwlimit", "40M"]).start();
        let most = [250, 1500][random.below(2) as usize];
        std::thread::sleep(Duration::from_millis(random.below(most)));
        if random.below(4) == 0 {
            running.signal(Signal::TERM);
        } else {
            running.kill();
        }
        killed += u32::from(!running.output(Duration::from_secs(30)).status.success());
        if random.below(3) == 0 {
            let said = world.sync_after_kill();
            told += u32::from(said.contains("disk1: QEMU's bitmap since"));
            let [a, b] = &world.disks();
            one_moment([a, b]);
        }
    }
    assert!(killed > 0);
    world.sync_after_kill();
    world.vm.writes_on();
    assert!(world.sync().contains("disk0: QEMU's bitmap since"), "{told}");
    let [a, b] = &world.disks();
    one_moment([a, b]);
}

/// What is not ours is left alone, and what is no monitor is said.
#[test]
fn a_monitor_that_others_use_is_refused() {
    let Some(world) = World::new("a VM by its monitor that others use") else { return };
    let said = world.run(&["-n"]).ok().text();
    assert!(said.contains("disk0: copied: it was not synced yet"), "{said}");
    assert_eq!(world.vm.left(), (vec![], vec![]));
    // Another client, that does not go.
    let other = world.vm.connect(&world.vm.monitor);
    // QEMU's queue of those that wait has two places.
    for _ in 0..4 {
        let busy = world.run(&["--timeout", "1s"]).code(6);
        busy.says(&["does not answer: another program is connected to it", "one more"]);
        assert!(busy.time < Duration::from_secs(8), "{busy}");
    }
    drop(other);
    // Another server and its export.
    let socket = world.site.socket("other");
    world.vm.ask("nbd-server-start", json!({ "addr": { "type": "unix", "data": { "path": socket } } }));
    world.run(&[]).code(1).says(&["begins no backup job", "already running"]);
    let node = &world.vm.ask("query-block", json!({}))[1]["inserted"]["node-name"];
    world.vm.ask("block-export-add", json!({ "type": "nbd", "id": "other", "node-name": node, "name": "x" }));
    for options in [&[][..], &["-n"]] {
        world.run(options).code(6).says(&["the export \"other\" of another program is at work"]);
    }
    world.vm.ask("nbd-server-stop", json!({}));
    world.sync();
    // A job of another program.
    let copy = world.site.path("copy.raw");
    world.vm.ask(
        "drive-mirror",
        json!({ "device": "d1", "job-id": "copy", "target": copy, "sync": "full", "format": "raw" }),
    );
    world.run(&[]).code(6).says(&["another program is at work"]);
    world.vm.ask("block-job-cancel", json!({ "device": "copy" }));
    until("the job is gone", || world.vm.ask("query-block-jobs", json!({})) == json!([]));
    assert!(world.sync().contains("disk1: QEMU's bitmap since"));
    let missing = world.site.path("none.qmp");
    let sync = |what: String| world.site.dsync(["sync", &what]).arg(&world.replicas);
    sync(format!("qemu:{}", missing.display())).code(1).says(&["no QEMU listens at", "-qmp unix:"]);
    let image = world.site.path("b.raw");
    sync(format!("qemu:{}", image.display()))
        .code(2)
        .says(&["is not the socket of a monitor", "ssh://qemu/"]);
    world.run(&["--without", "vdc"]).code(2).says(&["q1 has no disk vdc", "\"query-block\""]);
    world.run(&["--moment", "x"]).code(2).says(&["a VM does not take --moment"]);
}

/// Its QEMU would end with a connection, also with that of a sync that is killed.
#[test]
fn a_qemu_with_io_threads_is_left_alone() {
    let Some(mut world) = World::new("a VM by its monitor with I/O threads") else { return };
    let version = world.vm.ask("query-version", json!({}));
    if version["qemu"]["major"].as_u64() >= Some(9) {
        return dsync_tests::left_out(
            "a QEMU that ends with a connection in an I/O thread",
            "QEMU before 9.0",
        );
    }
    world.vm.kill();
    world.vm =
        Qemu::boot_threaded(&world.site, "q1", &[&world.site.path("a.qcow2"), &world.site.path("b.raw")]);
    for options in [&[][..], &["-n"]] {
        world.run(options).code(4).says(&["disk0 of q1 has an I/O thread", "--without disk0"]);
    }
    world.run(&["--without", "disk0"]).ok();
    world.vm.writes_on();
    let said = world.run(&["--without", "disk0"]).ok().text();
    assert!(said.contains("disk1: QEMU's bitmap since"), "{said}");
    world.vm.kill();
    world.run(&[]).ok();
    world.equal();
}

#[test]
fn another_qemu_with_the_name_of_one_is_refused() {
    let Some(mut world) = World::new("two VMs with one name by their monitors") else { return };
    world.sync();
    world.vm.kill();
    let other =
        Qemu::boot(&world.site, "q1", &[&writer(&world.site, "c.raw"), &writer(&world.site, "d.raw")]);
    world.vm = other;
    world.run(&[]).code(4).says(&["another VM was synced as q1", "dsync forget vm:q1"]);
    world.vm.kill();
    world.vm = Qemu::boot(&world.site, "q1", &[&world.site.path("a.qcow2"), &world.site.path("d.raw")]);
    let said = world.run(&[]).ok().text();
    assert!(said.contains("b.raw is no disk of q1 any more: its replica q1-disk1.img stays"), "{said}");
    // Of the two disks, one is not there any more; the names of both are known while it is off.
    world.vm.kill();
    let off = world.run(&["--without", "disk0"]).ok();
    assert!(off.text().contains("disk0: left out: by --without"), "{off}");
    off.says(&["q1 is off: its disks are those of its last sync"]);
    world.vm = Qemu::boot(&world.site, "q1", &[&world.site.path("a.qcow2"), &world.site.path("d.raw")]);
    world.run(&[]).ok();
    world.site.dsync(["forget", "vm:q1"]).ok();
    assert_eq!(world.vm.left(), (vec![], vec![]));
    let listed = world.site.state().join("machines").read_dir().expect("a folder").count();
    assert_eq!(listed, 0);
}

/// QEMU goes on to answer who reads, but shows the present.
#[test]
fn what_was_read_of_a_qemu_whose_job_has_ended_is_not_committed() {
    let Some(mut world) = World::new("a VM by its monitor whose job ends") else { return };
    world.sync();
    world.vm.writes_on();
    let begun = |world: &World| {
        let mut running = world.run(&["--bwlimit", "64K"]).start();
        until("the job is there", || {
            assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
            !world.vm.ask("query-block-exports", json!({})).as_array().expect("a list").is_empty()
        });
        running
    };
    let running = begun(&world);
    for job in world.vm.ask("query-block-jobs", json!({})).as_array().expect("jobs") {
        world.vm.ask("block-job-cancel", json!({ "device": job["device"], "force": true }));
    }
    let failed = running.output(Duration::from_secs(120));
    assert!(!failed.status.success(), "{failed}");
    world.sync();
    let [a, b] = &world.disks();
    one_moment([a, b]);
    // QEMU is killed in the job.
    let running = begun(&world);
    world.vm.kill();
    assert!(!running.output(Duration::from_secs(120)).status.success());
    world.reboot();
    assert!(world.sync_paused().contains("disk0: compared: "));
}

#[test]
fn a_mirror_of_a_qemu_goes_on_when_it_is_started_anew() {
    let Some(mut world) = World::new("a mirror of a VM by its monitor") else { return };
    let far = Site::in_memory();
    let replicas = far.path("vms");
    std::fs::create_dir(&replicas).expect("a folder");
    let word = world.vm.word();
    let run = world.site.dsync([
        "mirror",
        &word,
        &format!("far:{}", replicas.display()),
        "--rpo",
        "2s",
        "--rsh",
        RSH,
    ]);
    let mut mirror = run.env("RSH_STATE", far.state()).start();
    mirror.wait_to_say("mirroring qemu:");
    world.vm.writes_on();
    world.vm.kill();
    until("the mirror waits", || mirror.stderr_so_far().contains("q1 is off: waiting until it runs"));
    let images = ["a.qcow2", "b.raw"].map(|name| world.site.path(name));
    world.vm = Qemu::boot(&world.site, "q1", &[&images[0], &images[1]]);
    world.vm.writes_on();
    world.vm.ask("stop", json!({}));
    let equal = || {
        let equal = |(image, name): (&PathBuf, &str)| {
            let compare = Run::new("qemu-img").args(["compare", "-U", "-F", "raw"]).arg(image);
            compare.arg(replicas.join(name)).output().status.success()
        };
        images.iter().zip(["q1-disk0.img", "q1-disk1.img"]).all(equal)
    };
    until("the replicas have what the images have", equal);
    mirror.signal(Signal::TERM);
    let said = mirror.output(Duration::from_secs(60));
    assert!(said.status.success(), "{said}");
    assert!(world.vm.left().0.is_empty());
}

/// Its disks are another's, which writes to them unseen.
#[test]
fn a_qemu_that_was_migrated_away_is_refused() {
    let Some(mut world) = World::new("a VM by its monitor that was migrated") else { return };
    world.sync();
    let images = ["a.qcow2", "b.raw"].map(|name| world.site.path(name));
    let place = world.site.socket("migration");
    let incoming = format!("unix:{}", place.display());
    // Each on images of its own: these have locks, and what matters here is what the old one says.
    let copies = ["a2.qcow2", "b2.raw"].map(|name| world.site.path(name));
    for (image, copy) in images.iter().zip(&copies) {
        Run::new("cp").args([image, copy]).ok();
    }
    let there = Qemu::start(&world.site, "q2", &[&copies[0], &copies[1]], &["-incoming", &incoming]);
    let waiting = world.site.dsync(["sync", &there.word()]).arg(&world.replicas);
    waiting.code(4).says(&["runs in another one (inmigrate)"]);
    world.vm.ask("migrate", json!({ "uri": incoming }));
    until("it was migrated", || world.vm.ask("query-migrate", json!({}))["status"] == "completed");
    world.run(&[]).code(4).says(&["runs in another one (postmigrate)"]);
    world.vm.kill();
}

/// With a run folder of its own, it does not see the lock of the other.
#[test]
fn a_qemu_that_another_dsync_reads_is_busy() {
    let Some(world) = World::new("a VM by its monitor that two state directories sync") else { return };
    let folder = world.site.path("other");
    std::fs::create_dir(&folder).expect("a folder");
    let other = |options: &[&str]| {
        let run = world.site.dsync(["sync", &world.vm.word()]).arg(&folder).args(options);
        run.env("DSYNC_STATE_DIR", folder.join("state")).env("DSYNC_RUN_DIR", folder.join("run"))
    };
    world.sync();
    let mut running = other(&["--bwlimit", "64K"]).start();
    until("the replicas are begun", || {
        assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
        folder.join("q1-disk0.img.partial").exists()
    });
    world.run(&[]).code(6).says(&["synced or verified already, by another dsync"]);
    assert!(running.killed().was_killed());
    // What that has left, its own next run would end, and so does another's.
    world.vm.writes_on();
    assert!(world.run(&[]).ok().text().contains("disk1: QEMU's bitmap since"));
    assert_eq!(world.vm.left().0, [""; 0]);
    other(&[]).ok();
    world.vm.writes_on();
    world.run(&[]).ok();
    let [a, b] = &world.disks();
    one_moment([a, b]);
}

/// QEMU says a path as it was given, and has gone to another folder since.
#[test]
fn an_image_is_the_one_that_its_qemu_has_open() {
    let Some(mut world) = World::new("a VM by its monitor with relative paths") else { return };
    world.vm.kill();
    let [monitor, pid] = ["d.qmp", "d.pid"].map(|name| world.site.socket(name));
    let run = Run::new("qemu-system-x86_64").dir(world.site.dir());
    let run = run.args([
        "-name",
        "d1",
        "-machine",
        "pc,accel=tcg",
        "-nodefaults",
        "-display",
        "none",
        "-daemonize",
        "-pidfile",
    ]);
    let run = run.arg(&pid).args(["-drive", "if=virtio,id=d0,file=b.raw,format=raw", "-qmp"]);
    run.arg(format!("unix:{},server=on,wait=off", monitor.display())).ok();
    let word = format!("qemu:{}", monitor.display());
    let said = world.site.dsync(["sync", &word]).arg(&world.replicas).output();
    let known = world.site.dsync(["status", "vm:d1"]).output();
    let id = std::fs::read_to_string(&pid).expect("a number");
    Run::new("kill").arg(id.trim()).ok();
    assert!(said.status.success(), "{said}");
    let path = world.site.path("b.raw").display().to_string();
    assert!(known.text().contains(&path), "{known}");
}
