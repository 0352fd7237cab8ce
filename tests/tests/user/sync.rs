//! `dsync sync`, `extract`, `merge` and what goes with them, as a user runs them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::load::{Load, Options};
use dsync_tests::mount::Mount;
use dsync_tests::scene::{fingerprints, number, ranges};
use dsync_tests::{Random, Run, Scene, Site, need, need_root, rounds, skipped};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

#[test]
fn the_first_sync_seeds_and_holes_stay_holes() {
    let scene = Scene::new("seed", 256 * MIB);
    let summary = scene.sync(&[]).ok().summary();
    scene.equal();
    assert_eq!(summary["method"], "copy", "{summary}");
    let (source, replica) = (image::space(&scene.image), image::space(&scene.replica));
    assert!(replica <= source + MIB, "the source takes {source} bytes, its replica {replica}");
    assert!(number(&summary, "bytes_read") <= source + MIB, "{summary}");
    assert!(!scene.site.path("replica/vm.raw.partial").exists());
}

/// Most likely it is the wrong one, or was just made.
#[test]
fn a_source_without_a_byte_is_copied_with_a_warning() {
    let site = Site::new();
    let (disk, copy) = (site.image("vm.raw", 0), site.path("copy.raw"));
    for options in [&["-n"][..], &[], &[]] {
        let told = site.sync(&disk, &copy, options).ok().summary();
        assert!(told["warnings"].to_string().contains("the source is empty"), "{told}");
    }
    std::fs::File::options().write(true).open(&disk).and_then(|file| file.set_len(MIB)).expect("a size");
    let told = site.sync(&disk, &copy, &[]).ok().summary();
    assert_eq!(told["warnings"], serde_json::json!([]), "{told}");
}

/// The journal of a small delta is there for a crash: what it holds goes to the destination from memory.
#[test]
fn the_journal_of_a_small_delta_is_not_read_back() {
    if !need(&["strace"], "what a sync reads of its journal") {
        return;
    }
    let mut scene = Scene::synced("not read back", 64 * MIB);
    let strace = dsync_tests::find("strace").expect("strace");
    let trace = scene.site.path("trace");
    for changed in [500, 1] {
        scene.change(changed);
        let run = scene.site.run(&strace).args([
            "-f",
            "-qq",
            "-y",
            "-e",
            "trace=read,readv,pread64,preadv,pwrite64",
        ]);
        let run = run.arg("-o").arg(&trace).arg(dsync_tests::site::binary());
        run.arg("sync").arg(&scene.image).arg(&scene.replica).ok();
        scene.equal();
        let calls = std::fs::read_to_string(&trace).expect("a trace");
        let of_journal = |call: &str| {
            calls.lines().filter(|line| line.contains(call) && line.contains("/journal")).count()
        };
        assert!(of_journal("pwrite64(") > 0, "the trace shows no journal\n{calls}");
        assert_eq!(of_journal("read"), 0, "{calls}");
    }
}

/// Cron mails whatever is said: a conversation that ends in order ends without a word at either side.
#[test]
fn nothing_to_do_is_nothing_to_say() {
    let (scene, far) = (Scene::new("nothing to do", 16 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let verify = |scene: &Scene| far.run("verify", scene, &["-q"], None);
    for round in 0..12 {
        for run in [far.sync(&scene, &["-q"], None), far.sync(&scene, &["-q", "-n"], None), verify(&scene)] {
            let output = run.ok();
            assert_eq!(output.stderr, "", "round {round}: {output}");
        }
    }
    // What is refused is said once, by the near side.
    let other = scene.site.image("other.raw", 8 * MIB);
    let destination = format!("far:{}", far.replica().display());
    let refused = scene.site.dsync(["sync", "-q", "--rsh", RSH]).arg(&other).arg(destination);
    let refused = refused.env("RSH_STATE", far.site.state()).code(4);
    assert_eq!(refused.stderr.lines().count(), 1, "{refused}");
}

#[test]
fn a_later_sync_moves_what_changed_and_nothing_else() {
    let mut scene = Scene::synced("delta", 128 * MIB);
    let changed = scene.change(700);
    assert_eq!(scene.dirty(), ranges(&changed));
    let summary = scene.sync(&[]).ok().summary();
    scene.equal();
    let bytes = changed.len() as u64 * BLOCK;
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    assert_eq!(number(&summary, "extents"), ranges(&changed).len() as u64, "{summary}");
    for (field, most) in [("bytes_read", 105), ("bytes_sent", 102), ("bytes_written", 220)] {
        let found = number(&summary, field);
        assert!(
            found >= bytes && found * 100 <= bytes * most,
            "{field} {found} for {bytes} changed: {summary}"
        );
    }
    for field in ["trust", "seconds", "epoch", "freeze_ms"] {
        assert!(summary.get(field).is_some(), "no {field} in {summary}");
    }
    // Nothing changed, nothing moves.
    let epoch = number(&summary, "epoch");
    let idle = scene.sync(&[]).ok().summary();
    assert_eq!(number(&idle, "blocks_changed"), 0, "{idle}");
    assert!(number(&idle, "bytes_sent") < 10_000, "{idle}");
    assert!(number(&idle, "epoch") >= epoch, "{idle}");
    scene.equal();
}

#[test]
fn zeroes_and_trims_arrive_as_holes() {
    let scene = Scene::synced("zeroes", 64 * MIB);
    let mut client = scene.client();
    let data = vec![0xab; 8 * MIB as usize];
    client.write(0, &data).expect("a write");
    scene.sync(&[]).ok();
    let full = image::space(&scene.replica);
    client.zero(0, 4 * MIB as u32, 0).expect("zeroes");
    client.trim(4 * MIB, 4 * MIB as u32).expect("a trim");
    let summary = scene.sync(&[]).ok().summary();
    scene.equal();
    assert!(number(&summary, "bytes_sent") < MIB / 2, "zeroes were sent as data: {summary}");
    let left = image::space(&scene.replica);
    assert!(left + 7 * MIB <= full, "{full} bytes before, {left} after: the holes are missing");
}

#[test]
fn several_replicas_each_get_what_they_lack() {
    let mut scene = Scene::synced("replicas", 64 * MIB);
    let other = scene.site.path("other.raw");
    let to_other = |scene: &Scene| scene.site.sync(&scene.image, &other, &[]).ok().summary();
    to_other(&scene);
    let mut lacking = BTreeSet::new();
    for _ in 0..5 {
        let changed = scene.change(50);
        let summary = scene.sync(&[]).ok().summary();
        assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64);
        scene.equal();
        lacking.extend(changed);
    }
    let summary = to_other(&scene);
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), lacking.len() as u64, "{summary}");
    image::assert_equal(&scene.image, &other);
}

#[test]
fn a_dry_run_changes_nothing() {
    let mut scene = Scene::new("dry run", 64 * MIB);
    let summary = scene.sync(&["--dry-run"]).ok().summary();
    assert!(number(&summary, "bytes_changed") > 0, "no estimate: {summary}");
    assert_eq!(std::fs::read_dir(scene.site.path("replica")).expect("a folder").count(), 0);
    scene.sync(&[]).ok();
    let changed = scene.change(100);
    let (before, dirty) = (fingerprints(&scene.replica), scene.dirty());
    let estimate = scene.sync(&["-n"]).ok().summary();
    assert_eq!(number(&estimate, "blocks_changed"), changed.len() as u64, "{estimate}");
    assert_eq!(before, fingerprints(&scene.replica));
    assert_eq!(dirty, scene.dirty());
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    assert_eq!(number(&estimate, "bytes_changed"), changed.len() as u64 * BLOCK, "{estimate}");
    scene.equal();
}

#[test]
fn a_source_is_synced_when_its_server_is_not_running() {
    let mut scene = Scene::synced("offline", 64 * MIB);
    let changed = scene.change(64);
    scene.stop();
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    scene.equal();
    // And the record goes on.
    scene.start();
    let changed = scene.change(64);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    scene.equal();
}

#[test]
fn a_write_past_the_server_is_noticed_and_compared() {
    let mut scene = Scene::synced("foreign write", 32 * MIB);
    scene.stop();
    // The clock of files ticks a few times a second only.
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(&scene.image, 10 * MIB, 5000, &mut scene.random);
    scene.start();
    let refused = scene.sync(&["--method", "tracked"]).code(3);
    refused.says(&["vm.raw"]);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    assert!(number(&summary, "bytes_sent") < 2 * MIB, "a blind copy: {summary}");
    scene.equal();
    let changed = scene.change(10);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    scene.equal();
}

#[test]
fn a_served_source_goes_by_its_name_too() {
    let mut scene = Scene::synced("name", 16 * MIB);
    scene.change(20);
    // Whatever folder of that name lies here.
    std::fs::create_dir(scene.site.path("vm")).expect("a folder");
    scene.site.dsync(["sync", "vm"]).arg(&scene.replica).ok();
    scene.equal();
}

#[test]
fn odd_sizes_and_large_blocks() {
    for (size, options) in
        [(10_000_007, &[][..]), (4096 * 3 + 1, &[]), (33 * MIB + 512, &["--block-size", "64K"])]
    {
        let mut random = Random::new("odd sizes");
        let site = Site::new();
        let (disk, replica) = (site.image("vm.raw", size), site.path("copy.raw"));
        image::scribble(&disk, 0, size.min(3 * MIB), &mut random);
        let server = site.serve(&[&disk], options);
        site.sync(&disk, &replica, &[]).ok();
        image::assert_equal(&disk, &replica);
        let mut client = server.client("vm");
        client.write(size - 3, &[1, 2, 3]).expect("a write at the end");
        client.write(1, &[5; 10]).expect("a write");
        let summary = site.sync(&disk, &replica, &[]).ok().summary();
        image::assert_equal(&disk, &replica);
        // The last three bytes may lie in two blocks.
        let block = number(&summary, "block_size");
        let last = (size - 1) / block - (size - 3) / block + 1;
        assert_eq!(number(&summary, "blocks_changed"), 1 + last, "{summary}");
        server.stop();
    }
}

#[test]
fn a_source_that_grew_makes_its_replica_grow() {
    let mut scene = Scene::synced("growth", 16 * MIB);
    scene.stop();
    let file = std::fs::OpenOptions::new().write(true).open(&scene.image).expect("the image");
    file.set_len(24 * MIB).expect("growing");
    drop(file);
    scene.start();
    assert_eq!(scene.client().size, 24 * MIB);
    let mut client = scene.client();
    client.write(20 * MIB, &[3; 100_000]).expect("a write");
    scene.sync(&[]).ok();
    scene.equal();
    // A shrunk source is a mistake until somebody says it is not.
    scene.stop();
    let file = std::fs::OpenOptions::new().write(true).open(&scene.image).expect("the image");
    file.set_len(8 * MIB).expect("shrinking");
    drop(file);
    let before = fingerprints(&scene.replica);
    let refused = scene.sync(&[]).output();
    assert!(!refused.status.success(), "{refused}");
    refused.says(&["vm.raw", "--allow-shrink"]);
    assert_eq!(before, fingerprints(&scene.replica));
    scene.sync(&["--allow-shrink"]).ok();
    scene.equal();
}

#[test]
fn bandwidth_is_capped() {
    let mut scene = Scene::synced("bwlimit", 16 * MIB);
    scene.change(1024);
    let began = Instant::now();
    scene.sync(&["--bwlimit", "2M"]).ok();
    let time = began.elapsed();
    assert!(
        time > Duration::from_millis(1400) && time < Duration::from_secs(8),
        "4 MiB at 2 MiB/s took {time:?}"
    );
    scene.equal();
}

#[test]
fn compression_pays() {
    let scene = Scene::synced("compression", 32 * MIB);
    let text = "all work and no play makes a disk a dull disk\n".repeat(100_000);
    scene.client().write(0, &text.as_bytes()[..4 * MIB as usize]).expect("a write");
    let summary = scene.sync(&["--compress"]).ok().summary();
    assert!(number(&summary, "bytes_sent") < MIB / 2, "{summary}");
    scene.equal();
    scene.client().write(8 * MIB, &text.as_bytes()[..4 * MIB as usize]).expect("a write");
    let summary = scene.sync(&["--compress=9"]).ok().summary();
    assert!(number(&summary, "bytes_sent") < MIB / 2, "{summary}");
    scene.equal();
}

#[test]
fn an_interrupt_is_told_and_the_next_sync_goes_on() {
    let mut scene = Scene::synced("interrupt", 32 * MIB);
    scene.change(2048);
    let mut process = scene.sync(&["--bwlimit", "2M"]).start();
    process.wait_to_say("bytes_done");
    process.signal(Signal::INT);
    let output = process.output(Duration::from_secs(20));
    assert_eq!(output.status.code(), Some(130), "{output}");
    let said = output.json();
    assert!(said.iter().any(|line| line["message_type"] == "error" && line["code"] == 130), "{output}");
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn a_copy_carried_there_by_hand_is_adopted() {
    let mut scene = Scene::new("adopt", 64 * MIB);
    image::copy(&scene.image, &scene.replica);
    let changed = scene.change(30);
    scene.sync(&[]).code(4).says(&["vm.raw", "--adopt"]);
    let summary = scene.sync(&["--adopt"]).ok().summary();
    scene.equal();
    assert_eq!(summary["method"], "compare", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    scene.change(30);
    assert_eq!(scene.sync(&[]).ok().summary()["method"], "tracked");
    scene.equal();
}

#[test]
fn compare_finds_what_changed_without_a_record() {
    let mut scene = Scene::synced("compare", 64 * MIB);
    let changed = scene.change(100);
    let summary = scene.sync(&["--method", "compare"]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    scene.equal();
}

#[test]
fn a_replica_is_committed_in_place() {
    let mut scene = Scene::synced("in place", 64 * MIB);
    for _ in 0..3 {
        let changed = scene.change(500);
        let summary = scene.sync(&["--commit", "in-place"]).ok().summary();
        assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
        let written = number(&summary, "bytes_written");
        assert!(written < changed.len() as u64 * BLOCK * 11 / 10, "{summary}");
        scene.equal();
    }
    scene.change(10);
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn a_replica_is_committed_as_a_reflink() {
    let what = "--commit reflink on XFS";
    if !need(&["mkfs.xfs"], what) || !need_root(what) {
        return;
    }
    let mut scene = Scene::new("reflink", 64 * MIB);
    let (disk, mount) = (scene.site.image("xfs.raw", 512 * MIB), scene.site.path("xfs"));
    Run::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&disk).ok();
    let Some(_mounted) = Mount::new(&["-o", "loop"], &disk, &mount) else {
        return dsync_tests::skipped(what, "XFS cannot be mounted from a loop device here");
    };
    scene.replica = mount.join("vm.raw");
    scene.sync(&["--commit", "reflink"]).ok();
    for _ in 0..3 {
        scene.change(200);
        scene.sync(&["--commit", "reflink"]).ok();
        scene.equal();
    }
    scene.change(10);
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn sync_runs_while_the_disk_is_written() {
    let scene = Scene::synced("busy", 64 * MIB);
    let mut random = scene.random.clone();
    let load = Load::start(
        &scene.server().address(),
        "vm",
        &Options { rate: 2000, ..Options::default() },
        &mut random,
    );
    load.wait_for(100);
    for _ in 0..rounds(5, 100) {
        // The view is held open, so that there is something to compare with.
        let mut view = scene.server().client("vm@view");
        let summary = scene.sync(&["--at-view"]).ok().summary();
        assert_eq!(summary["method"], "tracked", "{summary}");
        let copy = scene.site.path("view.raw");
        view.save(&copy).expect("reading the view");
        image::assert_equal(&copy, &scene.replica);
        drop(view);
        load.wait_for(load.answered() + 200);
    }
    let written = load.stop();
    written.check(&scene.image);
    scene.sync(&[]).ok();
    scene.equal();
    written.check(&scene.replica);
}

#[test]
fn a_replica_on_another_host() {
    let (mut scene, far) = (Scene::new("remote", 64 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    image::assert_equal(&scene.image, &far.replica());
    far.carried();
    let changed = scene.change(300);
    let summary = far.sync(&scene, &[], None).ok().summary();
    image::assert_equal(&scene.image, &far.replica());
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    let (sent, calls) = far.carried();
    assert_eq!(calls, 1);
    let bytes = changed.len() as u64 * BLOCK;
    assert!(sent >= bytes && sent * 100 < bytes * 102, "{sent} bytes on the wire for {bytes} changed");
    let told = number(&summary, "bytes_sent");
    assert!(told.abs_diff(sent) < 4096, "{sent} bytes on the wire, the summary says {told}");
}

/// Cuts the link at random every few hundred KiB until the sync is through; the bytes that it took in all, but for those that were on their
/// way at a cut, as many as a pipe holds and the far side has not stored yet.
fn through_cuts(scene: &mut Scene, far: &Far, most: u64) -> u64 {
    let (mut total, mut calls) = (0, 0);
    loop {
        let cut = scene.random.within(200 << 10..800 << 10);
        let output = far.sync(scene, &[], Some(cut)).output();
        let (sent, _) = far.carried();
        total += sent;
        calls += 1;
        if output.status.success() {
            println!("{total} bytes in {calls} calls");
            return total.saturating_sub((calls - 1) * (128 << 10));
        }
        assert_eq!(output.status.code(), Some(1), "{output}");
        output.says(&["cut"]);
        assert!(total < 3 * most, "no progress: {total} bytes in {calls} calls, {output}");
    }
}

#[test]
fn a_link_that_is_cut_again_and_again_costs_next_to_nothing() {
    for _ in 0..rounds(1, 10) {
        let (mut scene, far) = (Scene::new("cuts", 32 * MIB), Far::new(RSH));
        // The seed, too, goes on where it was cut.
        let seed = image::space(&scene.image);
        let sent = through_cuts(&mut scene, &far, seed);
        assert!(sent * 100 <= seed * 103, "{sent} bytes for a seed of {seed}");
        image::assert_equal(&scene.image, &far.replica());

        // And a delta, while the disk is written on: what came before the cut and did not change is kept.
        let changed = scene.change(2048);
        let bytes = changed.len() as u64 * BLOCK;
        let sent = through_cuts(&mut scene, &far, bytes);
        assert!(sent * 100 <= bytes * 103, "{sent} bytes for a delta of {bytes}");
        image::assert_equal(&scene.image, &far.replica());

        let first = scene.change(2048);
        let cut = far.sync(&scene, &[], Some(5 * MIB)).output();
        assert!(!cut.status.success(), "{cut}");
        let (before, _) = far.carried();
        let second = scene.change(100);
        far.sync(&scene, &[], None).ok();
        let (after, _) = far.carried();
        let bytes = (first.len() + second.len()) as u64 * BLOCK;
        assert!((before + after) * 100 <= bytes * 105, "{before} and {after} bytes for a delta of {bytes}");
        image::assert_equal(&scene.image, &far.replica());
    }
}

#[test]
fn a_partial_journal_survives_the_loss_of_the_view() {
    let (mut scene, far) = (Scene::new("resume", 32 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let first = scene.change(1024);
    let cut = far.sync(&scene, &[], Some(2 * MIB)).output();
    assert!(!cut.status.success(), "{cut}");
    // A new server knows nothing of the old one's views.
    scene.stop();
    scene.start();
    let second = scene.change(1024);
    far.carried();
    far.sync(&scene, &[], None).ok();
    image::assert_equal(&scene.image, &far.replica());
    let (sent, _) = far.carried();
    let all = first.union(&second).count() as u64 * BLOCK;
    assert!(sent < all - MIB, "{sent} of {all} bytes were sent: nothing that came before the cut was used");
}

#[test]
fn through_the_systems_ssh() {
    let what = "sync through ssh and sshd";
    if !need(&["ssh", "sshd", "ssh-keygen"], what) {
        return;
    }
    let (mut scene, far) = (Scene::new("ssh", 32 * MIB), Far::new(RSH));
    let dir = far.site.dir();
    for key in ["host", "user"] {
        Run::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(key)).ok();
    }
    std::fs::copy(dir.join("user.pub"), dir.join("authorized")).expect("a key");
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let user = Run::new("id").arg("-un").ok().text();
    let path = dsync_tests::site::binary().parent().expect("a folder");
    let (d, state) = (dir.display(), far.site.state());
    let server = format!(
        "ListenAddress 127.0.0.1\nPort {port}\nHostKey {d}/host\nAuthorizedKeysFile {d}/authorized\nPidFile none\n\
         UsePAM no\nStrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
         PermitRootLogin prohibit-password\n\
         SetEnv PATH={}:/usr/bin:/bin DSYNC_STATE_DIR={}\n",
        path.display(),
        state.display()
    );
    let client = format!(
        "Host far\n HostName 127.0.0.1\n Port {port}\n User {}\n IdentityFile {d}/user\n IdentitiesOnly yes\n\
         \x20StrictHostKeyChecking no\n UserKnownHostsFile {d}/known\n BatchMode yes\n LogLevel ERROR\n",
        user.trim()
    );
    std::fs::write(dir.join("sshd_config"), server).expect("a file");
    std::fs::write(dir.join("ssh_config"), client).expect("a file");
    if rustix::process::geteuid().is_root() {
        // sshd gives up its rights in there. Debian's unit makes it at start.
        std::fs::create_dir_all("/run/sshd").expect("/run/sshd");
    }
    let daemon = Run::new("sshd").args(["-D", "-e", "-f"]).arg(dir.join("sshd_config")).start();
    let ssh = format!("ssh -F {}", dir.join("ssh_config").display());
    let works = (0..50).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        Run::shell(&format!("{ssh} far true")).output().status.success()
    });
    if !works {
        let why = format!("this user cannot log in through a sshd of its own ({})", daemon.stderr_so_far());
        return dsync_tests::skipped(what, &why);
    }
    let sync_by = |scene: &Scene, options: &[&str]| {
        let destination = format!("far:{}", far.replica().display());
        scene
            .site
            .dsync(["sync"])
            .arg(&scene.image)
            .arg(destination)
            .args(["--json", "-e", &ssh])
            .args(options)
            .ok()
            .summary()
    };
    let sync = |scene: &Scene| sync_by(scene, &[]);
    sync(&scene);
    image::assert_equal(&scene.image, &far.replica());
    let changed = scene.change(500);
    let summary = sync(&scene);
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64, "{summary}");
    image::assert_equal(&scene.image, &far.replica());

    // What has moved.
    let mut client = scene.client();
    let part = client.read(0, 2 << 20).expect("a read");
    client.write(20 * MIB + BLOCK, &part).expect("a write");
    client.close().expect("the end");
    let summary = sync_by(&scene, &["--method", "rolling", "--commit", "in-place"]);
    // Half a block of 8 KiB at either end, and where things stand.
    assert!(number(&summary, "bytes_sent") < 32 * 1024, "{summary}");
    image::assert_equal(&scene.image, &far.replica());

    // The paper's way, with its names.
    let bin = scene.site.path("bin");
    std::fs::create_dir(&bin).expect("a folder");
    for name in ["dmextract", "dmmerge"] {
        std::os::unix::fs::symlink(dsync_tests::site::binary(), bin.join(name)).expect("a link");
    }
    scene.change(500);
    let line = format!(
        "set -o pipefail; {bin}/dmextract vm | {ssh} far {bin}/dmmerge {}",
        far.replica().display(),
        bin = bin.display()
    );
    Run::new("bash").args(["-c", &line]).env("DSYNC_STATE_DIR", scene.site.state()).ok();
    image::assert_equal(&scene.image, &far.replica());
}

#[test]
fn extract_and_merge_over_a_pipe_and_through_files() {
    let mut scene = Scene::new("extract", 32 * MIB);
    let extract = |scene: &Scene, options: &[&str]| {
        let delta = scene.site.dsync(["extract"]).arg(&scene.image).args(options).ok().stdout;
        assert!(!delta.is_empty());
        delta
    };
    let merge = |scene: &Scene, delta: &[u8]| scene.site.dsync(["merge"]).arg(&scene.replica).input(delta);
    // There is no replica and no bookmark: the whole disk.
    let seed = extract(&scene, &[]);
    assert!((seed.len() as u64) < image::space(&scene.image) * 102 / 100 + 4096);
    merge(&scene, &seed).ok();
    scene.equal();
    let status = scene.site.dsync(["status"]).arg(&scene.replica).arg("--json").ok();
    let epoch = number(&status.summary(), "epoch").to_string();

    // Three deltas, one after the other.
    let (mut deltas, mut since) = (Vec::new(), epoch.clone());
    for _ in 0..3 {
        let changed = scene.change(100);
        let delta = extract(&scene, &["--since", &since]);
        assert!((delta.len() as u64) < changed.len() as u64 * BLOCK * 102 / 100 + 4096);
        let path = scene.site.path(&format!("{}.delta", deltas.len()));
        std::fs::write(&path, &delta).expect("a file");
        let told = scene.site.dsync(["inspect"]).arg(&path).arg("--json").ok();
        let chain = told.summary()["header"]["chain"].clone();
        let last = chain.as_array().and_then(|chain| chain.last());
        since = last.unwrap_or_else(|| panic!("no chain: {told}"))["number"].to_string();
        deltas.push(path);
    }
    // Out of order: refused, and nothing happens.
    let before = fingerprints(&scene.replica);
    merge(&scene, &std::fs::read(&deltas[1]).expect("a delta")).code(4).says(&["epoch"]);
    assert_eq!(before, fingerprints(&scene.replica));
    // The first two folded into one, then the third.
    let both = scene.site.dsync(["combine"]).args(&deltas[..2]).ok().stdout;
    merge(&scene, &both).ok();
    merge(&scene, &std::fs::read(&deltas[2]).expect("a delta")).ok();
    scene.equal();
    // A delta that the replica holds already does no harm.
    let again = merge(&scene, &both).output();
    assert!(matches!(again.status.code(), Some(0 | 4)), "{again}");
    scene.equal();

    // Compressed, and by a pipe of the shell.
    scene.change(100);
    let dsync = dsync_tests::site::binary().display();
    let line = format!(
        "set -o pipefail; {dsync} extract --compress vm --since {since} | {dsync} merge {}",
        scene.replica.display()
    );
    Run::new("bash").args(["-c", &line]).env("DSYNC_STATE_DIR", scene.site.state()).ok();
    scene.equal();
}

#[test]
fn extract_without_since_fits_every_replica_whose_bookmark_is_known() {
    let mut scene = Scene::synced("bookmark", 16 * MIB);
    let extract = |scene: &Scene| scene.site.dsync(["extract", "vm"]).ok().stdout;
    let changed = scene.change(40);
    let delta = extract(&scene);
    assert!((delta.len() as u64) < changed.len() as u64 * BLOCK * 102 / 100 + 4096, "{} bytes", delta.len());
    scene.site.dsync(["merge"]).arg(&scene.replica).input(delta).ok();
    scene.equal();
    // Two replicas at two epochs, and a reader that is no replica.
    let other = scene.site.path("other.raw");
    scene.site.sync(&scene.image, &other, &[]).ok();
    scene.site.dsync(["checkpoint", "vm", "reader"]).ok();
    scene.change(10);
    scene.sync(&[]).ok();
    scene.change(10);
    let both = extract(&scene);
    for replica in [&scene.replica, &other] {
        scene.site.dsync(["merge"]).arg(replica).input(both.clone()).ok();
        image::assert_equal(&scene.image, replica);
    }
}

#[test]
fn a_replica_behind_a_gap_keeps_no_other_from_its_deltas() {
    let site = Site::new();
    let mut random = Random::new("extracts beside an old replica");
    let (disk, old, new) = (site.image("disk.raw", MIB), site.path("old.raw"), site.path("new.raw"));
    let extract = || site.dsync(["extract"]).arg(&disk);
    image::scribble(&disk, 0, 8 * BLOCK, &mut random);
    site.sync(&disk, &old, &[]).ok();
    // Whatever is written outside dsync is a gap.
    image::scribble(&disk, BLOCK, BLOCK, &mut random);
    extract().code(3).says(&["is not known", "extract --since 0"]);
    site.sync(&disk, &new, &[]).ok();
    let server = site.serve(&[&disk], &[]);
    server.client("disk").write(0, &[7; BLOCK as usize]).expect("a write");
    let delta = extract().ok().stdout;
    assert!(delta.len() < 3 * BLOCK as usize, "{} bytes", delta.len());
    site.dsync(["merge"]).arg(&old).input(delta.clone()).code(4);
    site.dsync(["merge"]).arg(&new).input(delta).ok();
    image::assert_equal(&disk, &new);
    let last = number(&site.dsync(["status", "disk", "--json"]).ok().summary(), "epoch").to_string();
    let empty = site.dsync(["extract", "disk", "--since", &last]).ok().stdout;
    let said = site.dsync(["inspect", "-"]).input(empty).ok().text();
    assert!(said.contains(&format!("epochs   {last} to {last}: nothing changed")), "{said}");
}

#[test]
fn a_broken_pipe_is_made_good_by_the_next_extract() {
    let mut scene = Scene::new("broken pipe", 16 * MIB);
    let extract = |scene: &Scene| scene.site.dsync(["extract", "vm"]).ok().stdout;
    let merge = |scene: &Scene, delta: Vec<u8>| {
        scene.site.dsync(["merge", "--json"]).arg(&scene.replica).input(delta)
    };
    let seed = extract(&scene);
    merge(&scene, seed).ok();
    let (mut changed, mut broken) = (0, 0);
    for round in 0..6 {
        changed += scene.change(30).len() as u64;
        let delta = extract(&scene);
        assert!(
            (delta.len() as u64) < changed * (BLOCK + 200) + 4096,
            "{} bytes for {changed} blocks",
            delta.len()
        );
        // All of it was written, and none of it arrived.
        if round != 5 && scene.random.one_in(2) {
            broken += 1;
            continue;
        }
        merge(&scene, delta).ok();
        scene.equal();
    }
    println!("{broken} of 6 pipes broke");
    // The merge's answer moves the bookmark: the next delta is a small one.
    let dsync = dsync_tests::site::binary().display();
    let line = format!(
        "set -o pipefail; {dsync} extract vm | {dsync} merge --json {} | {dsync} checkpoint vm extract --at -",
        scene.replica.display()
    );
    let run = |scene: &Scene, line: &str| {
        Run::new("bash").args(["-c", line]).env("DSYNC_STATE_DIR", scene.site.state())
    };
    run(&scene, &line).ok();
    scene.change(5);
    let small = extract(&scene);
    assert!((small.len() as u64) < 5 * (BLOCK + 200) + 4096, "{} bytes for 5 blocks", small.len());
    // No answer, and no move; nor by the answer of another source.
    run(&scene, &line.replace("merge --json", "merge --nonsense")).output().says(&["no merge was confirmed"]);
    let (second, copy) = (scene.site.image("second.raw", MIB), scene.site.path("second-copy.raw"));
    let seed = scene.site.dsync(["extract"]).arg(&second).ok().stdout;
    let answer = scene.site.dsync(["merge", "--json"]).arg(&copy).input(seed).ok().stdout;
    let confirm = scene.site.dsync(["checkpoint", "vm", "extract", "--at", "-"]).input(answer);
    confirm.code(4).says(&["is of source"]);
    let again = extract(&scene);
    merge(&scene, again).ok();
    scene.equal();
    // At rest too: the extract still holds the source when the merge is through.
    scene.stop();
    run(&scene, &line).ok();
    scene.equal();
}

#[test]
fn status_tells_of_sources_and_replicas() {
    let mut scene = Scene::synced("status", 16 * MIB);
    scene.change(25);
    let text = scene.site.dsync(["status", "-v"]).ok().text();
    assert!(text.contains("vm"), "{text}");
    let source = scene.site.dsync(["status"]).arg(&scene.image).ok().text();
    assert!(source.contains("vm.raw"), "{source}");
    let replica = scene.site.dsync(["status"]).arg(&scene.replica).ok().text();
    assert!(replica.contains("consistent, at epoch"), "{replica}");
    scene.site.dsync(["status", "--json"]).ok().json();
    let missing = scene.site.dsync(["status"]).arg(scene.site.path("nothing.raw")).output();
    assert!(!missing.status.success(), "{missing}");
    missing.says(&["nothing.raw"]);
    // A first copy that was cut is a replica too.
    let second = scene.site.path("second.raw");
    let mut process = scene.site.sync(&scene.image, &second, &["--bwlimit", "100K"]).start();
    std::thread::sleep(Duration::from_millis(500));
    process.signal(Signal::INT);
    process.output(Duration::from_secs(20));
    let cut = scene.site.dsync(["status"]).arg(&second).ok().text();
    assert!(cut.contains("incomplete") && cut.contains("goes on from it"), "{cut}");
}

#[test]
fn recover_has_nothing_to_do_on_a_healthy_replica() {
    let scene = Scene::synced("recover", 16 * MIB);
    let before = image::fingerprint(&scene.replica);
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
    assert_eq!(before, image::fingerprint(&scene.replica));
    let missing = scene.site.dsync(["recover"]).arg(scene.site.path("nothing.raw")).output();
    assert!(!missing.status.success(), "{missing}");
    missing.says(&["nothing.raw"]);
}

#[test]
fn the_demo_shows_the_whole_thing() {
    let site = Site::new();
    let output =
        site.dsync(["demo", "--size", "512M"]).env("TMPDIR", site.dir()).limit(Duration::from_secs(60)).ok();
    let text = output.text().to_lowercase();
    for word in ["sent", "read", "written", "copy"] {
        assert!(text.contains(word), "no '{word}' in the table: {output}");
    }
    let left: Vec<_> =
        std::fs::read_dir(site.dir()).expect("a folder").flatten().map(|e| e.file_name()).collect();
    assert!(left.is_empty(), "the demo left {left:?} behind");
}

#[test]
fn a_disk_of_nothing_may_become_one_of_something() {
    let site = Site::new();
    let (disk, replica) = (site.image("vm.raw", 0), site.path("copy.raw"));
    site.sync(&disk, &replica, &[]).ok();
    for size in [4096 + 7, 0, 3 * MIB] {
        image::scribble(&disk, 0, size, &mut Random::new("something"));
        std::fs::File::options().write(true).open(&disk).and_then(|f| f.set_len(size)).expect("another size");
        site.sync(&disk, &replica, &["--allow-shrink"]).ok();
        image::assert_equal(&disk, &replica);
    }
}

#[test]
fn status_tells_what_a_replica_lacks_or_that_nobody_knows() {
    let mut scene = Scene::synced("what a replica lacks", 16 * MIB);
    let lacking = |scene: &Scene| {
        let status = scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().summary();
        status["replicas"][0].clone()
    };
    let text = |scene: &Scene| scene.site.dsync(["status"]).arg(&scene.image).ok().text();
    let first = lacking(&scene);
    assert_eq!(first["blocks"], 0, "{first}");
    assert!(text(&scene).contains("nothing written since"), "{}", text(&scene));
    scene.change(5);
    assert_eq!(lacking(&scene)["blocks"], 5);
    assert!(text(&scene).contains("5 blocks (20.0 KiB) written since"), "{}", text(&scene));
    scene.sync(&[]).ok();
    // A sync that finds nothing has found it up to date, all the same.
    std::thread::sleep(Duration::from_millis(1100));
    let before = lacking(&scene);
    scene.sync(&[]).ok();
    let after = lacking(&scene);
    assert_eq!(after["epoch"], before["epoch"]);
    assert!(number(&after, "time") > number(&before, "time"), "{before} {after}");
    // Without its server nobody says what happens to it.
    scene.stop();
    let unserved = lacking(&scene);
    assert!(unserved["blocks"].is_null() && unserved["why"].is_string(), "{unserved}");
    assert!(text(&scene).contains("later writes are not known"), "{}", text(&scene));
    // What it was known to lack before is not forgotten.
    scene.start();
    scene.change(5);
    scene.stop();
    assert_eq!(lacking(&scene)["blocks_at_least"], 5);
    assert!(text(&scene).contains("5 blocks (20.0 KiB) written since, and later writes"), "{}", text(&scene));
}

#[test]
fn one_damaged_source_is_named_and_hides_no_other() {
    let scene = Scene::synced("a damaged state folder", 16 * MIB);
    let other = scene.site.image("other.raw", MIB);
    let copy = scene.site.path("other-copy.raw");
    scene.site.sync(&other, &copy, &[]).ok();
    let folders = std::fs::read_dir(scene.site.state().join("sources")).expect("the sources");
    let folder = folders.flatten().map(|e| e.path()).find(|folder| {
        std::fs::read_to_string(folder.join("source")).is_ok_and(|about| about.contains("other.raw"))
    });
    let folder = folder.expect("the other source's folder");
    for file in ["history", "source"] {
        std::fs::write(folder.join(file), b"no longer what it was").expect("damage");
        let status = scene.site.dsync(["status", "-v"]).code(4);
        assert!(status.text().contains("vm.raw"), "{status}");
        status.says(&["is damaged", "--adopt", &folder.join(file).display().to_string()]);
        scene.sync(&[]).ok();
        scene.site.sync(&other, &copy, &[]).code(4).says(&["is damaged", "--adopt"]);
    }
    // As the message says.
    std::fs::rename(&folder, scene.site.path("aside")).expect("a folder that is moved away");
    scene.site.sync(&other, &copy, &[]).code(4);
    scene.site.sync(&other, &copy, &["--adopt"]).ok();
    scene.site.dsync(["status", "-v"]).ok();
}

#[test]
fn a_source_that_is_renamed_goes_on() {
    let mut scene = Scene::synced("a source that is renamed", 16 * MIB);
    let web = scene.image.with_file_name("web.raw");
    // While it is served, and then while it is not.
    for (from, to) in [(scene.image.clone(), web.clone()), (web, scene.image.clone())] {
        let epoch = number(&scene.site.sync(&from, &scene.replica, &[]).ok().summary(), "epoch");
        std::fs::rename(&from, &to).expect("another name");
        let mut served = scene.site.sync(&to, &scene.replica, &[]).ok().summary();
        image::assert_equal(&to, &scene.replica);
        assert!(number(&served, "epoch") >= epoch, "{served}");
        if from == scene.image {
            scene.change(3);
            served = scene.site.sync(&to, &scene.replica, &[]).ok().summary();
            assert_eq!(
                (&served["method"], number(&served, "blocks_changed")),
                (&"tracked".into(), 3),
                "{served}"
            );
            image::assert_equal(&to, &scene.replica);
            scene.stop();
        }
    }
    let known = std::fs::read_dir(scene.site.state().join("sources")).expect("the sources").flatten();
    assert_eq!(known.filter(|e| e.path().is_dir()).count(), 1, "it became another source");
}

/// A remote shell that writes its arguments down, and runs the command on this machine.
fn recording_rsh(site: &Site) -> (std::path::PathBuf, impl Fn() -> String + use<>) {
    use std::os::unix::fs::PermissionsExt;
    let (rsh, log) = (site.path("with blank/rsh"), site.path("arguments"));
    std::fs::create_dir(site.path("with blank")).expect("a folder");
    let script = format!(
        "#!/bin/sh\nfor last; do :; done\nprintf '%s|' \"$@\" >'{}'\nexec sh -c \"$last\"\n",
        log.display()
    );
    std::fs::write(&rsh, script).expect("a script");
    std::fs::set_permissions(&rsh, PermissionsExt::from_mode(0o755)).expect("a mode");
    (rsh, move || std::fs::read_to_string(&log).expect("the arguments"))
}

/// An address or a port reaches the remote shell, whichever command is given it.
#[test]
fn places_over_ssh_are_named_as_users_of_ssh_do() {
    let scene = Scene::new("places over ssh", MIB);
    let (rsh, said) = recording_rsh(&scene.site);
    let dsync = |words: &[&str]| scene.site.dsync(words).env("DSYNC_RSH", format!("'{}'", rsh.display()));
    let there = scene.site.path("there.raw").display().to_string();
    dsync(&["sync"]).arg(&scene.image).arg(format!("[::1]:{there}")).ok();
    assert!(said().starts_with("::1|"), "{}", said());
    dsync(&["verify"]).arg(&scene.image).arg(format!("me@[2001:db8::7]:{there}")).ok();
    assert!(said().starts_with("me@2001:db8::7|"), "{}", said());
    dsync(&["sync"]).arg(format!("ssh://me@far:2222{there}")).arg(scene.site.path("pulled.raw")).ok();
    assert!(said().starts_with("-p|2222|me@far|"), "{}", said());
    dsync(&["sync", "vm"])
        .arg(format!("far:22:{there}"))
        .code(2)
        .says(&[&format!("use ssh://far:22{there}")]);
    dsync(&["sync", "vm", "2001:db8::7:/x"]).code(2).says(&["use [2001:db8::7]:/x"]);
    // The home folder there is where the remote shell begins.
    dsync(&["sync"]).arg(&scene.image).arg("far:~/home.raw").dir(&scene.site.path("with blank")).ok();
    image::assert_equal(&scene.image, &scene.site.path("with blank/home.raw"));
    image::assert_equal(&scene.image, &scene.site.path("pulled.raw"));
}

/// The remote shell and its options are split as a shell splits them.
#[test]
fn a_remote_shell_may_have_quotes() {
    let scene = Scene::new("a quoted remote shell", MIB);
    let (rsh, said) = recording_rsh(&scene.site);
    let command = format!("'{}' -o 'ProxyCommand=nc %h %p' -F a\\ b \"c 'd\"", rsh.display());
    let sync = |rsh: &str| {
        let run = scene.site.dsync(["sync", "--rsh", rsh]).arg(&scene.image);
        run.arg(format!("far:{}", scene.site.path("there.raw").display()))
    };
    sync(&command).ok();
    assert!(said().starts_with("-o|ProxyCommand=nc %h %p|-F|a b|c 'd|far|"), "{}", said());
    sync("ssh -o 'Port=22").code(2).says(&["a quote in it is not closed", "--rsh"]);
    // What is named to be tried by hand works there.
    sync("sh -c 'exit 255'").code(1).says(&["\"sh -c 'exit 255' far true\""]);
}

/// The attributes of a file by which others are kept from it, or let in: owner, mode, and all extended ones.
fn attributes(file: &std::path::Path) -> (u32, u32, u32, Vec<(String, Vec<u8>)>) {
    use std::os::unix::fs::MetadataExt;
    let found = std::fs::metadata(file).expect("a file");
    let mut list = vec![0; 4096];
    let len = rustix::fs::listxattr(file, list.as_mut_slice()).expect("a list");
    let names = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut all: Vec<_> = names
        .map(|name| {
            let mut value = vec![0; 4096];
            let len = rustix::fs::getxattr(file, name, value.as_mut_slice()).expect("a value");
            (String::from_utf8_lossy(name).into_owned(), value[..len].to_vec())
        })
        .collect();
    all.sort();
    (found.uid(), found.gid(), found.mode(), all)
}

/// With an access list, the group's bits of the mode are its mask: carried over without it, they would let the group in. A folder gives its
/// new files a list of its own.
#[test]
fn a_clone_has_the_attributes_of_the_replica_and_no_others() {
    for (kind, options) in [("xfs", &["-q", "-m", "reflink=1"][..]), ("btrfs", &["-q"])] {
        let what = &format!("the attributes of a replica that is committed as a reflink on {kind}");
        let make = format!("mkfs.{kind}");
        if !need(&[&make], what) || !need_root(what) {
            continue;
        }
        let mut scene = Scene::new(what, 64 * MIB);
        let (disk, mount) = (scene.site.image("fs.img", 512 * MIB), scene.site.path("mount"));
        Run::new(make).args(options).arg(&disk).ok();
        match Mount::new(&["-o", "loop"], &disk, &mount) {
            Some(_mounted) => keeps_attributes(&mut scene, &mount),
            None => skipped(what, &format!("{kind} cannot be mounted from a loop device here")),
        }
    }
}

/// Commits to a replica in this folder leave it what it has, and give it nothing that the folder gives.
fn keeps_attributes(scene: &mut Scene, mount: &std::path::Path) {
    scene.replica = mount.join("vm.raw");
    scene.sync(&[]).ok();
    let set = |file: &std::path::Path, name: &str, value: &[u8]| {
        rustix::fs::setxattr(file, name, value, rustix::fs::XattrFlags::empty()).expect("an attribute");
    };
    // Owner, user 2222, group, mask and others: see acl(5). The group may do nothing.
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, u32::MAX), (2, 6, 2222), (4, 0, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, may, id) in entries {
        list.extend(tag.to_le_bytes().into_iter().chain(may.to_le_bytes()).chain(id.to_le_bytes()));
    }
    for (listed, repairs) in [(true, false), (true, true), (false, false)] {
        if listed {
            std::os::unix::fs::chown(&scene.replica, Some(0), Some(6789)).expect("a group");
            set(&scene.replica, "system.posix_acl_access", &list);
            for kind in ["user", "trusted", "security"] {
                set(&scene.replica, &format!("{kind}.note"), b"hello");
            }
        } else {
            rustix::fs::removexattr(&scene.replica, "system.posix_acl_access").expect("no list");
            set(mount, "system.posix_acl_default", &list);
        }
        let verify = |options: &[&str]| {
            scene.site.dsync(["verify", "--repair"]).args(options).args([&scene.image, &scene.replica]).ok()
        };
        verify(&[]);
        let before = attributes(&scene.replica);
        if repairs {
            image::scribble(&scene.replica, MIB, MIB, &mut scene.random.clone());
            verify(&["--commit", "reflink"]);
        } else {
            scene.change(3);
            scene.sync(&["--commit", "reflink"]).ok();
        }
        assert_eq!(attributes(&scene.replica), before, "listed: {listed}, repaired: {repairs}");
        scene.equal();
    }
}

/// A record in blocks of another size than before is as good.
#[test]
fn a_record_is_kept_when_its_blocks_change_their_size() {
    let mut random = Random::new("blocks of another size");
    let site = Site::new();
    // The last block of 64K is one in part.
    let (image, replica) = (site.image("vm.raw", 16 * MIB + 5 * BLOCK), site.path("replica.raw"));
    let write = |size: &str, blocks: &[u64], random: &mut Random| {
        let server = site.serve(&[&image], &["--block-size", size]);
        let mut client = server.client("vm");
        for block in blocks {
            client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        }
        client.close().expect("the end");
        server.stop();
    };
    write("64K", &[], &mut random);
    site.sync(&image, &replica, &[]).ok();
    for size in ["4K", "64K", "4K", "16K"] {
        write("64K", &[1, 100, 1000, 4099], &mut random);
        write("4K", &[2, 3, 101, 2000, 2001], &mut random);
        write(size, &[7], &mut random);
        let summary = site.sync(&image, &replica, &[]).ok().summary();
        assert_eq!(
            (&summary["method"], &summary["trust"]),
            (&"tracked".into(), &"tracked".into()),
            "{summary}"
        );
        image::assert_equal(&image, &replica);
    }
}
