//! `dsync sync HOST:SRC DST`: the replica's host asks for it, over a remote shell, ssh, or TLS.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::image::{self, BLOCK};
use dsync_tests::listener::{HOST, Offering, key, trust};
use dsync_tests::mount::Worn;
use dsync_tests::scene::{fingerprints, number};
use dsync_tests::{Background, Output, Random, Run, Scene, Site, need, need_root, skipped};
use rustix::process::{Signal, kill_process};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// A scene whose disk is on another host than the replica.
struct Pulling {
    /// The host of the source.
    scene: Scene,
    /// The host of the replica, where the commands run.
    near: Site,
}

impl Pulling {
    fn new(what: &str, size: u64) -> Pulling {
        Pulling { scene: Scene::new(what, size), near: Site::new() }
    }

    /// The same, with a replica that stands where the source does.
    fn synced(what: &str, size: u64) -> Pulling {
        let pulling = Pulling::new(what, size);
        pulling.sync(&[]).ok();
        pulling.equal();
        pulling
    }

    fn replica(&self) -> PathBuf {
        self.near.path("copy.raw")
    }

    fn source(&self) -> String {
        format!("far:{}", self.scene.image.display())
    }

    /// A command from the source to the replica, through the remote shell of the tests.
    fn run(&self, command: &str, options: &[&str]) -> Run {
        let run = self.near.dsync([command]).arg(self.source()).arg(self.replica()).args(["--rsh", RSH]);
        run.args(options).env("RSH_STATE", self.scene.site.state())
    }

    fn sync(&self, options: &[&str]) -> Run {
        self.run("sync", &[&["--json"], options].concat())
    }

    /// The name under which the source knows the replica.
    fn bookmark(&self) -> String {
        let system = rustix::system::uname();
        format!("pull://{}{}", system.nodename().to_str().expect("a name"), self.replica().display())
    }

    fn status(&self) -> serde_json::Value {
        self.scene.site.dsync(["status", "--json"]).arg(&self.scene.image).ok().summary()
    }

    fn equal(&self) {
        image::assert_equal(&self.scene.image, &self.replica());
    }

    /// Writes so much that a sync of it with `--bwlimit 16M` can be met by a fault.
    fn rewrite(&mut self) {
        let mut client = self.scene.client();
        for at in 0..16 {
            client.write(at << 20, &self.scene.random.bytes(1 << 20)).expect("a write");
        }
        client.close().expect("the end");
    }
}

#[test]
fn a_container_that_is_fetched_is_called_one_for_each_replica() {
    let (far, near) = (Site::new(), Site::new());
    let path = far.image("vm.img", MIB);
    let image = std::fs::File::options().write(true).open(&path).expect("the image");
    std::os::unix::fs::FileExt::write_all_at(&image, b"QFI\xfb", 0).expect("a write");
    drop(image);
    let source = format!("far:{}", path.display());
    let told = |to: &str| {
        let run = near.dsync(["sync", &source, "--rsh", RSH]).arg(near.path(to));
        let said = run.env("RSH_STATE", far.state()).ok().stderr;
        said.contains("is a qcow2 image, and is copied as it is")
    };
    assert!(told("copy.raw") && !told("copy.raw") && told("second.raw") && !told("third.qcow2"));
}

#[test]
fn a_pull_moves_what_a_push_would() {
    let mut pulling = Pulling::new("pull", 64 * MIB);
    let dry = pulling.sync(&["-n"]).ok().summary();
    assert!(number(&dry, "bytes_changed") > 0, "no estimate: {dry}");
    assert!(!pulling.replica().exists(), "a dry run has made a replica");
    let first = pulling.sync(&[]).ok().summary();
    assert_eq!((&first["method"], &first["trust"]), (&"copy".into(), &"seeded".into()), "{first}");
    assert_eq!(first["source"], pulling.source().as_str());
    assert_eq!(first["destination"], pulling.replica().to_str().expect("a name"));
    pulling.equal();
    assert!(image::space(&pulling.replica()) <= image::space(&pulling.scene.image) + MIB, "holes stay holes");

    let changed = pulling.scene.change(300);
    let summary = pulling.sync(&["--method", "tracked"]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    let bytes = changed.len() as u64 * BLOCK;
    let (sent, written) = (number(&summary, "bytes_sent"), number(&summary, "bytes_written"));
    assert!((bytes..bytes * 102 / 100).contains(&sent), "{sent} sent for {bytes}: {summary}");
    assert!(written >= bytes && written * 100 <= bytes * 220, "{written} written for {bytes}: {summary}");
    pulling.equal();
    // Nothing changed, nothing moves, and nobody says a word.
    let idle = pulling.sync(&[]).ok();
    assert_eq!(number(&idle.summary(), "blocks_changed"), 0, "{idle}");
    assert_eq!(idle.stderr, "");
    for method in ["compare", "rolling", "copy"] {
        pulling.scene.change(50);
        let summary = pulling.sync(&["--method", method, "--compress"]).ok().summary();
        assert_eq!(summary["method"], method, "{summary}");
        pulling.equal();
    }
    for commit in ["in-place", "journal"] {
        pulling.scene.change(50);
        let summary = pulling.sync(&["--commit", commit]).ok().summary();
        assert_eq!(summary["method"], "tracked", "{summary}");
        pulling.equal();
    }
    let verified = pulling.run("verify", &["--json"]).ok().summary();
    assert_eq!(number(&verified["differing"], "extents"), 0, "{verified}");
}

#[test]
fn what_is_printed_is_what_a_push_prints() {
    let mut pulling = Pulling::new("what a pull prints", 32 * MIB);
    let seeded = pulling.run("sync", &[]).ok().text();
    let replica = pulling.replica().display().to_string();
    assert!(seeded.starts_with(&format!("{replica} is at epoch ")), "{seeded}");
    assert!(seeded.contains("(seeded)\nread "), "{seeded}");
    pulling.scene.change(3);
    let estimate = pulling.run("sync", &["-n"]).ok().text();
    assert!(estimate.starts_with("would send 3 blocks"), "{estimate}");
    let verified = pulling.run("verify", &[]).ok().text();
    assert!(verified.contains("no differences"), "{verified}");
    // Progress is that of the bytes that arrive.
    pulling.rewrite();
    let output = pulling.sync(&["--bwlimit", "8M"]).ok();
    let done: Vec<u64> = output.json().iter().filter_map(|line| line["bytes_done"].as_u64()).collect();
    let total = output.json().iter().find_map(|line| line["bytes_total"].as_u64());
    assert!(done.len() >= 2 && done.is_sorted(), "{output}");
    let changed = number(&output.summary(), "bytes_changed");
    assert_eq!(total, Some(changed), "{output}");
    assert!(*done.last().expect("progress") <= changed, "{output}");
    // The same when the replica is compared.
    let output = pulling.sync(&["--method", "compare"]).ok();
    assert_eq!(number(&output.summary(), "blocks_changed"), 0, "{output}");
}

#[test]
fn bwlimit_bounds_what_the_source_sends() {
    let mut pulling = Pulling::synced("bwlimit of a pull", 32 * MIB);
    pulling.rewrite();
    let began = Instant::now();
    pulling.sync(&["--bwlimit", "8M"]).ok();
    let seconds = began.elapsed().as_secs_f64();
    assert!((1.7..20.0).contains(&seconds), "16 MiB at 8 MiB/s took {seconds} s");
    pulling.equal();
}

#[test]
fn the_source_remembers_a_replica_that_is_pulled_by_its_own_name() {
    let mut pulling = Pulling::synced("bookmark of a pull", 32 * MIB);
    // A push to a path of the same name is another replica.
    pulling.scene.sync(&[]).ok();
    pulling.scene.change(10);
    let name = pulling.bookmark();
    let names = |status: &serde_json::Value| -> Vec<(String, u64)> {
        let replicas = status["replicas"].as_array().expect("replicas");
        let name = |replica: &serde_json::Value| replica["replica"].as_str().expect("a name").to_owned();
        replicas.iter().map(|replica| (name(replica), number(replica, "blocks"))).collect()
    };
    let pushed = pulling.scene.replica.display().to_string();
    let told = names(&pulling.status());
    assert_eq!(told, [(pushed.clone(), 10), (name.clone(), 10)]);
    pulling.sync(&[]).ok();
    assert_eq!(names(&pulling.status()), [(pushed.clone(), 10), (name.clone(), 0)]);
    let text = pulling.scene.site.dsync(["status", "-v"]).ok().text();
    assert!(text.contains(&name), "{text}");
    // No destination can have that name.
    let refused = pulling.scene.site.dsync(["sync"]).arg(&pulling.scene.image).arg(&name).code(2);
    refused.says(&["from its own host", "dsync sync HOST:SRC DST"]);
    // The other side lists the replica.
    let there = pulling.near.dsync(["status", "-v"]).ok().text();
    assert!(there.contains(pulling.replica().to_str().expect("a name")), "{there}");

    // A replica that is missing is not made again without a word.
    let away = pulling.near.path("away.raw");
    let folder = pulling.near.path(".copy.raw.dsync");
    std::fs::rename(pulling.replica(), &away).expect("a replica");
    std::fs::rename(&folder, pulling.near.path("folder")).expect("its folder");
    let missing = pulling.sync(&[]).code(4);
    missing.says(&[&format!("dsync: the replica at {} is missing", pulling.replica().display()), "--create"]);
    assert!(!pulling.replica().exists());
    pulling.scene.site.dsync(["forget"]).arg(&pulling.scene.image).arg(&name).ok();
    assert_eq!(names(&pulling.status()), [(pushed, 10)]);
    pulling.sync(&[]).ok();
    pulling.equal();
}

#[test]
fn what_is_no_replica_is_refused_here_and_taken_over_on_request() {
    let pulling = Pulling::new("adopt by a pull", 32 * MIB);
    image::copy(&pulling.scene.image, &pulling.replica());
    image::scribble(&pulling.replica(), 5 * MIB, BLOCK, &mut Random::seeded(4));
    let before = fingerprints(&pulling.replica());
    let refused = pulling.run("sync", &[]).code(4);
    refused.says(&["is not a dsync replica", "--adopt"]);
    assert_eq!(refused.stderr.lines().count(), 1, "{refused}");
    assert_eq!(fingerprints(&pulling.replica()), before);
    let summary = pulling.sync(&["--adopt"]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), 1, "{summary}");
    pulling.equal();
    // It is a replica of that source, and of no other.
    let other = pulling.scene.site.image("other.raw", 32 * MIB);
    let run = pulling.near.dsync(["sync", "--rsh", RSH]).arg(format!("far:{}", other.display()));
    let refused = run.arg(pulling.replica()).env("RSH_STATE", pulling.scene.site.state()).code(4);
    // It is here, and not there.
    let here = format!("dsync: replica {} is a copy of another source", pulling.replica().display());
    refused.says(&[&here]);
    pulling.equal();
    // The source itself, under whatever name, is no destination.
    let itself = pulling.near.dsync(["sync", "--adopt", "--rsh", RSH]).arg(pulling.source());
    let refused = itself.arg(&pulling.scene.image).env("RSH_STATE", pulling.scene.site.state()).code(4);
    refused.says(&["is the source itself"]);
}

#[test]
fn a_refused_pull_leaves_no_source_behind() {
    let (far, near) = (Site::new(), Site::new());
    let disk = far.image("vm.raw", MIB);
    let sync = |options: &[&str], replica: &str| {
        let run = near.dsync(["sync", "--rsh", RSH]).args(options).arg(format!("far:{}", disk.display()));
        run.arg(replica).env("RSH_STATE", far.state())
    };
    let sources = || {
        let Ok(entries) = std::fs::read_dir(far.state().join("sources")) else { return 0 };
        entries.flatten().filter(|entry| entry.path().is_dir()).count()
    };
    std::fs::write(near.path("other.raw"), "somebody's file").expect("a file");
    sync(&[], "other.raw").code(4).says(&["other.raw"]);
    sync(&["-n"], "copy.raw").ok();
    sync(&["--freeze", "require"], "copy.raw").code(4).says(&["is not a tracked disk"]);
    assert_eq!(sources(), 0, "nothing was taken from it");
    sync(&[], "copy.raw").ok();
    assert_eq!(sources(), 1);
}

#[test]
fn a_disk_is_restored_from_its_replica() {
    let mut scene = Scene::new("a restore", 32 * MIB);
    let backup = Site::new();
    let replica = format!("backup:{}", backup.path("vm.raw").display());
    let rsh = |run: Run| run.args(["--json", "--rsh", RSH]).env("RSH_STATE", backup.state());
    let push = |scene: &Scene, options: &[&str]| {
        rsh(scene.site.dsync(["sync"]).args(options).arg(&scene.image).arg(&replica))
    };
    let restore = |scene: &Scene, options: &[&str]| {
        rsh(scene.site.dsync(["sync"]).args(options).arg(&replica).arg(&scene.image))
    };
    push(&scene, &[]).ok();
    // In use, it is not overwritten.
    restore(&scene, &["--adopt"]).code(6).says(&["has it open", "stop that server"]);
    scene.stop();
    let whole = std::fs::read(&scene.image).expect("the disk");
    image::scribble(&scene.image, 3 * MIB, MIB, &mut scene.random);
    restore(&scene, &[]).code(4).says(&["is not a dsync replica", "--adopt"]);
    let estimate = restore(&scene, &["--adopt", "-n"]).ok().summary();
    assert_eq!(estimate["method"], "compare", "{estimate}");
    let summary = restore(&scene, &["--adopt"]).ok().summary();
    assert_eq!(number(&summary, "bytes_changed"), MIB, "only what was damaged: {summary}");
    assert!(std::fs::read(&scene.image).expect("the disk") == whole);
    // It is the disk that it was, and its replica is still its replica.
    let image = scene.image.display().to_string();
    scene.site.dsync(["forget", &image]).code(4).says(&["--replica", "a source and a replica"]);
    scene.site.dsync(["forget", "--replica", &image]).ok();
    scene.start();
    scene.change(20);
    // Another replica may have what this one had not.
    push(&scene, &[]).code(4).says(&["may be the newest copy", "dsync has restored it", "--accept-source"]);
    let summary = push(&scene, &["--accept-source"]).ok().summary();
    assert_eq!(
        (&summary["method"], number(&summary, "blocks_changed")),
        (&"compare".into(), 20),
        "{summary}"
    );
    scene.site.dsync(["status", "--check"]).ok();
    let changed = scene.change(20).len() as u64;
    let summary = push(&scene, &[]).ok().summary();
    assert_eq!(
        (&summary["method"], number(&summary, "blocks_changed")),
        (&"tracked".into(), changed),
        "{summary}"
    );
    image::assert_equal(&scene.image, &backup.path("vm.raw"));
    // A new disk, on a host that knows nothing any more.
    scene.stop();
    let new = Scene { site: Site::new(), image: scene.site.path("new.raw"), ..scene };
    let summary = restore(&new, &[]).ok().summary();
    assert_eq!(summary["method"], "copy", "{summary}");
    image::assert_equal(&new.image, &backup.path("vm.raw"));
    push(&new, &[]).code(4).says(&["is a copy of another source", "--adopt"]);
    let summary = push(&new, &["--adopt"]).ok().summary();
    assert_eq!(number(&summary, "blocks_changed"), 0, "{summary}");
    // What another program made of the replica is no copy of the disk, nor what an interrupted sync left of it.
    let served = || {
        backup
            .dsync(["serve", "--read-only"])
            .arg(backup.path("vm.raw"))
            .arg("--socket")
            .arg(backup.path("s"))
    };
    image::scribble(&backup.path("vm.raw"), 5 * MIB, 4096, &mut Random::new("a replica that was changed"));
    restore(&new, &["--adopt"]).code(4).says(&["modified outside dsync", "vm.raw"]);
    served().code(4).says(&["modified outside dsync"]);
}

/// A lost disk was made anew, without content: no method empties the replica, which is brought back as the message says.
#[test]
fn an_empty_file_in_the_place_of_a_lost_disk_does_not_empty_its_replica() {
    let mut scene = Scene::new("an empty file", 8 * MIB);
    scene.stop();
    let (image, replica) = (scene.image.clone(), scene.site.path("replica.raw"));
    let run = |command: &[&str], from: &Path, to: &Path| scene.site.dsync(command).arg(from).arg(to);
    run(&["sync"], &image, &replica).ok();
    let whole = std::fs::read(&replica).expect("a replica");
    std::fs::remove_file(&image).expect("a disk");
    image::sparse(&image, 8 * MIB);
    for method in ["sync", "sync -n", "sync --method compare", "sync --method copy", "verify --repair"] {
        let command: Vec<&str> = method.split(' ').collect();
        run(&command, &image, &replica).code(4).says(&["is empty", "may be the only copy", "--adopt"]);
        assert!(std::fs::read(&replica).expect("a replica") == whole, "{method}");
    }
    run(&["sync", "--adopt"], &replica, &image).ok();
    assert!(std::fs::read(&image).expect("a disk") == whole);
    // One that is meant to be empty.
    let (other, copy) = (scene.site.path("other.raw"), scene.site.path("copy.raw"));
    image::sparse(&other, MIB);
    run(&["sync"], &other, &copy).ok();
    std::fs::remove_file(&other).expect("a disk");
    image::sparse(&other, MIB);
    run(&["sync"], &other, &copy).ok();
}

#[test]
fn a_write_to_the_replica_is_noticed() {
    let mut pulling = Pulling::synced("a foreign write between pulls", 32 * MIB);
    image::scribble(&pulling.replica(), MIB, BLOCK, &mut pulling.scene.random);
    pulling.sync(&[]).code(4).says(&["was modified outside dsync", "--adopt"]);
    let summary = pulling.sync(&["--adopt"]).ok().summary();
    assert_eq!(number(&summary, "blocks_changed"), 1, "{summary}");
    pulling.equal();
    // A verify finds it too, and repairs it.
    image::scribble(&pulling.replica(), MIB, BLOCK, &mut pulling.scene.random);
    let found = pulling.run("verify", &["--json"]).code(5).summary();
    assert_eq!(number(&found["differing"], "bytes"), BLOCK, "{found}");
    pulling.run("verify", &["--repair"]).ok();
    pulling.equal();
    assert_eq!(pulling.sync(&[]).ok().summary()["method"], "tracked");
}

#[test]
fn a_pulled_replica_keeps_its_past() {
    let mut pulling = Pulling::new("the past of a pulled replica", 16 * MIB);
    let mut epochs = vec![number(&pulling.sync(&["--keep-last", "9"]).ok().summary(), "epoch")];
    for _ in 0..2 {
        pulling.scene.change(50);
        epochs.push(number(&pulling.sync(&[]).ok().summary(), "epoch"));
    }
    let listed = pulling.near.dsync(["rewind", "--json"]).arg(pulling.replica()).ok().summary();
    let kept: Vec<u64> = listed["moments"]
        .as_array()
        .expect("moments")
        .iter()
        .map(|moment| number(&moment["epoch"], "number"))
        .collect();
    assert!(epochs[..2].iter().all(|epoch| kept.contains(epoch)), "{epochs:?}: {listed}");
}

/// The far process of a running pull.
fn far_process(running: &Background) -> rustix::process::Pid {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(process) = running.descendant("dsync", "send") {
            return process;
        }
        assert!(Instant::now() < until, "no far side: {}", running.stderr_so_far());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until some of a transfer has arrived.
fn some_has_arrived(running: &Background) {
    let until = Instant::now() + Duration::from_secs(30);
    while !running.stdout_so_far().contains("bytes_done") {
        assert!(Instant::now() < until, "nothing arrives: {}", running.stderr_so_far());
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
}

#[test]
fn a_pull_that_was_killed_on_either_side_goes_on() {
    let mut pulling = Pulling::synced("kills of a pull", 32 * MIB);
    for side in ["near", "far", "line"] {
        pulling.rewrite();
        let mut run = pulling.sync(&["--bwlimit", "8M"]);
        if side == "line" {
            run = run.env("RSH_DEAF", (6 * MIB).to_string());
        }
        let mut running = run.start();
        match side {
            "near" => {
                some_has_arrived(&running);
                running.kill();
            }
            "far" => {
                some_has_arrived(&running);
                kill_process(far_process(&running), Signal::KILL).expect("a far side");
            }
            _ => {}
        }
        let ended = running.output(Duration::from_secs(30));
        assert!(!ended.status.success(), "{side}: {ended}");
        if side != "near" {
            assert_eq!(ended.status.code(), Some(1), "{side}: {ended}");
            ended.says(&["far", "was cut"]);
        }
        // The source has been let go of, and the replica too.
        let until = Instant::now() + Duration::from_secs(20);
        let summary = loop {
            let output = pulling.sync(&[]).output();
            if output.status.success() {
                break output.summary();
            }
            assert!(Instant::now() < until, "{side}: {output}");
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(summary["resumed"], true, "{side}: {summary}");
        let sent = number(&summary, "bytes_sent");
        assert!(sent < 15 * MIB, "{side}: {sent} bytes of 16 MiB were sent again");
        pulling.equal();
    }
}

#[test]
fn an_interrupted_pull_says_what_to_do() {
    let mut pulling = Pulling::synced("a pull is interrupted", 32 * MIB);
    pulling.rewrite();
    let mut running = pulling.sync(&["--bwlimit", "8M"]).start();
    some_has_arrived(&running);
    running.signal(Signal::INT);
    let ended = running.output(Duration::from_secs(20));
    assert_eq!(ended.status.code(), Some(130), "{ended}");
    ended.says(&["run the same command again"]);
}

#[test]
fn errors_of_the_far_side_come_with_its_name_and_its_code() {
    let mut pulling = Pulling::synced("far errors of a pull", 32 * MIB);
    let server = pulling.scene.server.take().expect("a server");
    let sync = |source: &str, options: &[&str]| {
        let run = pulling.near.dsync(["sync", "--rsh", RSH]).args(options).arg(source).arg(pulling.replica());
        run.env("RSH_STATE", pulling.scene.site.state())
    };
    let lines = |output: Output| {
        assert_eq!(output.stderr.lines().count(), 1, "said once: {output}");
        output
    };
    lines(sync("far:/no/such/disk", &[]).code(1))
        .says(&["dsync: far: no source /no/such/disk: no such file or device"]);
    sync(&format!("unreachable:{}", pulling.scene.image.display()), &[])
        .code(1)
        .says(&["No route to host", "unreachable true"]);
    sync(&pulling.source(), &["--remote-dsync", "nothing-like-it"])
        .code(1)
        .says(&["nothing-like-it is not installed on far", "--remote-dsync"]);
    sync(&pulling.source(), &["--remote-dsync", "echo"]).code(1).says(&["does not answer as dsync does"]);
    let old = pulling.near.path("old");
    let script = "#!/bin/sh\nprintf '\\223dsync\\r\\n\\011\\000\\054\\001\\000\\000\\200\\000'; sleep 1\n";
    std::fs::write(&old, script).expect("a script");
    Run::new("chmod").arg("+x").arg(&old).ok();
    let old = old.to_str().expect("a name");
    sync(&pulling.source(), &["--remote-dsync", old]).code(1).says(&["speaks version 9", "the same version"]);
    // One that has no such command.
    let older = pulling.near.path("older");
    let script = "#!/bin/sh\necho \"error: unrecognized subcommand '$1'\" >&2; exit 2\n";
    std::fs::write(&older, script).expect("a script");
    Run::new("chmod").arg("+x").arg(&older).ok();
    let older = older.to_str().expect("a name");
    sync(&pulling.source(), &["--remote-dsync", older])
        .code(1)
        .says(&["unrecognized subcommand 'send'", "the same version of dsync on both sides"]);
    // What the source demands or lacks.
    sync(&pulling.source(), &["--freeze", "require"]).code(4).says(&["far:", "is not a tracked disk"]);
    sync(&pulling.source(), &["--passes", "3"]).ok().says(&["--passes has no effect", "far:"]);
    sync(&pulling.source(), &["--at-view"]).code(4).says(&["dsync: far: no snapshot"]);
    server.stop();
    let file = std::fs::OpenOptions::new().write(true).open(&pulling.scene.image).expect("the source");
    file.set_len(16 * MIB).expect("a smaller source");
    sync(&pulling.source(), &[]).code(4).says(&["dsync: far: ", "--allow-shrink"]);
    sync(&pulling.source(), &["--allow-shrink", "--method", "tracked"]).code(3).says(&["dsync: far: "]);
    sync(&pulling.source(), &["--allow-shrink"]).ok();
    pulling.equal();
}

#[test]
fn wrong_usage_of_two_hosts_names_the_way_out() {
    let site = Site::new();
    let file = site.image("file", BLOCK);
    let command = |name: &str, source: &str, destination: &str| site.dsync([name, source, destination]);
    for name in ["sync", "verify", "mirror"] {
        command(name, "a:/x", "b:/y").code(2).says(&["both on other hosts", "ssh a dsync"]);
        command(name, ":/x", "file").code(2).says(&["host is missing"]);
    }
    command("mirror", "a:/x", "file").code(2).says(&["run \"dsync mirror\" on a", "dsync sync a:/x file"]);
    let far = format!("a:{}", file.display());
    site.dsync(["sync", "--connections", "2", "-e", "false", &far, "copy"])
        .code(1)
        .says(&["--connections has no effect: the source is reached over ssh"]);
    // By hand it does not hang or print nonsense.
    site.dsync(["send"]).input("hello").code(1).says(&["does not answer as dsync does"]);
    site.dsync(["send", "--listen", HOST]).code(2).says(&["--offer"]);
    site.dsync(["send", "--listen", HOST, "--offer", "/dev/null"]).code(4).says(&["neither a folder nor"]);
}

/// A source that cannot be read everywhere: the rest arrives, and the code says so.
#[test]
fn unreadable_blocks_of_the_source_are_left_out_on_request() {
    let what = "a pull from a disk with bad sectors";
    if !need(&["losetup", "nbdkit", "nbdfuse"], what) || !need_root(what) {
        return;
    }
    let (far, near) = (Site::new(), Site::new());
    let image = far.image("worn.raw", 16 * MIB);
    image::scribble(&image, 0, 16 * MIB, &mut Random::seeded(5));
    let Some(worn) = Worn::new(&image) else {
        return skipped(what, "there are no loop devices over FUSE here");
    };
    let sync = |options: &[&str]| {
        let source = format!("far:{}", worn.device().display());
        let run = near.dsync(["sync", "--json", "--rsh", RSH]).arg(source).arg("copy.raw");
        run.args(options).env("RSH_STATE", far.state()).output()
    };
    worn.spoil(&[4 * MIB]);
    let (fails, skips) = (sync(&[]), sync(&["--keep-going"]));
    assert_eq!(fails.status.code(), Some(1), "{fails}");
    fails.says(&["cannot be read", "--keep-going"]);
    assert_eq!(skips.status.code(), Some(1), "{skips}");
    assert!(skips.text().contains("begins again without them"), "{skips}");
    assert_eq!(number(&skips.summary()["unreadable"], "bytes"), 4096, "{skips}");
    let (here, there) = (std::fs::read(near.path("copy.raw")), std::fs::read(&image));
    let (here, there) = (here.expect("a replica"), there.expect("a source"));
    assert!(here[..4 << 20] == there[..4 << 20] && here[(4 << 20) + 4096..] == there[(4 << 20) + 4096..]);
}

#[test]
fn a_pull_over_tls_reads_what_is_offered_and_nothing_else() {
    let mut pulling = Pulling::new("a pull over tls", 64 * MIB);
    let far = &pulling.scene.site;
    let images = far.path("images");
    std::fs::create_dir(&images).expect("a folder");
    image::copy(&pulling.scene.image, &images.join("still.raw"));
    std::fs::write(far.path("secret"), "precious").expect("a file");
    std::os::unix::fs::symlink(far.path("secret"), images.join("link")).expect("a link");
    let offering = Offering::start(far, &[&images, &pulling.scene.image], &[]);
    let at = |path: &Path| offering.source(path.to_str().expect("a name"));
    let served = at(&pulling.scene.image);
    let sync = |source: &str, options: &[&str]| {
        pulling.near.dsync(["sync", "--json"]).arg(source).arg(pulling.replica()).args(options)
    };
    sync(&served, &[]).code(4).says(&["not pinned here", "key trust 127.0.0.1"]);
    trust(&pulling.near, HOST, far, &[]);
    sync(&served, &[]).code(4).says(&["does not accept this host's key", "dsync key trust"]);
    far.dsync(["key", "trust", "vault", &key(&pulling.near), "--for", "serve"]).ok();
    let secret = far.path("secret").display().to_string();
    std::fs::write(images.join(".netrc"), "precious").expect("a file");
    let paths = [
        "/etc/passwd",
        &secret,
        "../secret",
        "link",
        "still.raw/x",
        ".still.raw.dsync/x",
        ".netrc",
        ".",
        "vm",
    ];
    for path in paths {
        let refused = sync(&offering.source(path), &[]).output();
        assert!([1, 4].contains(&refused.status.code().expect("a code")), "{path}: {refused}");
        assert!(
            path == "vm" || refused.stderr.contains("not allowed for remote clients"),
            "{path}: {refused}"
        );
        assert!(!pulling.replica().exists(), "{path}");
    }
    for option in [&["--trust-device"][..], &["--allow-shrink"], &["--block-size", "8K"]] {
        sync(&served, option).code(4).says(&[option[0], "not allowed for remote clients"]);
    }
    let summary = sync(&served, &["--connections", "3"]).ok().summary();
    assert_eq!(summary["source"], served.as_str());
    pulling.equal();
    let changed = pulling.scene.change(40);
    let sync = |source: &str| pulling.near.dsync(["sync", "--json"]).arg(source).arg(pulling.replica());
    let summary = sync(&served).ok().summary();
    assert_eq!(
        (&summary["method"], number(&summary, "blocks_changed")),
        (&"tracked".into(), changed.len() as u64)
    );
    pulling.equal();
    offering.says(&["vault", "session ended"]);
    // It is known by the name of its key, not by what its host calls itself.
    let name = format!("pull://vault{}", pulling.replica().display());
    assert_eq!(pulling.status()["replicas"][0]["replica"], name.as_str());
    let verify = pulling.near.dsync(["verify"]).arg(&served).arg(pulling.replica());
    assert!(verify.ok().text().contains("no differences"));
    // An image in the folder, by its name alone.
    pulling.near.dsync(["sync"]).arg(offering.source("still.raw")).arg("still.raw").ok();
    image::assert_equal(&images.join("still.raw"), &pulling.near.path("still.raw"));
    // Who sends does not receive.
    let push = pulling.near.dsync(["sync", "still.raw"]).arg(offering.source("new.raw"));
    push.code(4).says(&["\"dsync receive\""]);
    let mut offering = offering;
    offering.process.signal(Signal::TERM);
    assert!(offering.process.wait_for(Duration::from_secs(20)).expect("an end").success());
}

#[test]
fn who_receives_does_not_send() {
    let scene = Scene::new("a pull from dsync receive", 16 * MIB);
    let far = dsync_tests::listener::Listening::for_near(&scene.site);
    let pull = scene.site.dsync(["sync"]).arg(far.destination("vm.raw")).arg("copy.raw");
    pull.code(4).says(&["\"dsync send\""]);
    assert!(!scene.site.path("copy.raw").exists());
}

/// An sshd on loopback with a key of its own.
struct Sshd {
    _process: Background,
    rsh: String,
}

impl Sshd {
    fn start(site: &Site, state: &Path) -> Sshd {
        let at = |name: &str| site.path(name).display().to_string();
        for name in ["host_key", "user_key"] {
            Run::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &at(name)]).ok();
        }
        std::fs::copy(at("user_key.pub"), at("authorized")).expect("a key");
        let port = std::net::TcpListener::bind((HOST, 0))
            .and_then(|socket| socket.local_addr())
            .expect("a port")
            .port();
        // A machine without systemd lacks what sshd wants.
        std::fs::create_dir_all("/run/sshd").expect("/run/sshd");
        let config = format!(
            "Port {port}\nListenAddress {HOST}\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nPidFile none\n\
             PasswordAuthentication no\nSetEnv DSYNC_STATE_DIR={}\n",
            at("host_key"),
            at("authorized"),
            state.display()
        );
        std::fs::write(at("sshd_config"), config).expect("a file");
        let process = Run::new("/usr/sbin/sshd").args(["-D", "-e", "-f", &at("sshd_config")]).start();
        let until = Instant::now() + Duration::from_secs(20);
        while std::net::TcpStream::connect((HOST, port)).is_err() {
            assert!(Instant::now() < until, "sshd does not listen: {}", process.stderr_so_far());
            std::thread::sleep(Duration::from_millis(20));
        }
        let rsh = format!(
            "ssh -F none -p {port} -i {} -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR",
            at("user_key")
        );
        Sshd { _process: process, rsh }
    }
}

#[test]
fn a_pull_through_ssh() {
    let what = "a pull through sshd";
    if !need_root(what) || !need(&["ssh", "/usr/sbin/sshd", "ssh-keygen"], what) {
        return;
    }
    let mut pulling = Pulling::new(what, 32 * MIB);
    let sshd = Sshd::start(&pulling.near, &pulling.scene.site.state());
    let dsync = dsync_tests::site::binary().display().to_string();
    let sync = |pulling: &Pulling, source: &str| {
        let run = pulling.near.dsync(["sync", "--json", "-e", &sshd.rsh, "--remote-dsync", &dsync]);
        run.arg(source).arg(pulling.replica())
    };
    let source = format!("{HOST}:{}", pulling.scene.image.display());
    sync(&pulling, &source).ok();
    pulling.equal();
    let changed = pulling.scene.change(30);
    // As a user, and by the name of the export.
    let summary = sync(&pulling, &format!("root@{HOST}:vm")).ok().summary();
    assert_eq!(
        (&summary["method"], number(&summary, "blocks_changed")),
        (&"tracked".into(), changed.len() as u64)
    );
    pulling.equal();
    // Killed in the middle: the far side ends with the connection, and lets go of everything.
    pulling.rewrite();
    let running = sync(&pulling, &source).args(["--bwlimit", "8M"]).start();
    some_has_arrived(&running);
    running.killed();
    let until = Instant::now() + Duration::from_secs(20);
    let summary = loop {
        let output = sync(&pulling, &source).output();
        if output.status.success() {
            break output.summary();
        }
        assert!(Instant::now() < until, "{output}");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(summary["resumed"], true, "{summary}");
    pulling.equal();
}
