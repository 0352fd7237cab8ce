//! What is in use has an exit code of its own, and `--wait` waits for it: at the source, at the replica, here and far.

use std::path::Path;
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image;
use dsync_tests::{Background, Run, Scene, Site, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");
/// The exit code of what is in use.
const BUSY: i32 = 6;

/// Starts a slow command, and waits until another one, which changes nothing, meets it.
fn held(slow: Run, other: impl Fn() -> Run) -> Background {
    // Another one may have met it first.
    let mut slow = slow.arg("--wait").start();
    let limit = Instant::now() + Duration::from_secs(30);
    while other().output().status.code() != Some(BUSY) {
        assert!(slow.ended().is_none() && Instant::now() < limit, "it is not held: {}", slow.stderr_so_far());
    }
    slow
}

/// A command that waits does not end before the holder does, and says once for what it waits.
fn waits(mut holder: Background, waiting: Run, names: &str) {
    let mut waiting = waiting.start();
    let limit = Instant::now() + Duration::from_secs(30);
    while !waiting.stderr_so_far().contains("waiting for up to") {
        assert!(waiting.ended().is_none() && Instant::now() < limit, "{}", waiting.stderr_so_far());
    }
    std::thread::sleep(Duration::from_millis(700));
    assert!(waiting.ended().is_none(), "it did not wait: {}", waiting.stderr_so_far());
    holder.signal(Signal::TERM);
    holder.output(Duration::from_secs(30));
    let ended = waiting.output(Duration::from_secs(60));
    assert!(ended.status.success(), "{ended}");
    ended.says(&[names, "is in use (dsync"]);
    assert!(!ended.stderr.contains("--wait"), "it waits already: {ended}");
    // A holder that has just begun has not said who it is.
    let lines = ended.stderr.lines().filter(|line| !line.contains("(another process)"));
    assert_eq!(lines.filter(|line| line.contains("waiting for up to")).count(), 1, "{ended}");
}

#[test]
fn a_replica_in_use_is_waited_for() {
    let mut scene = Scene::synced("a replica in use", 16 * MIB);
    scene.change(500);
    let again = |options: &[&str]| scene.sync(&[]).args(["--quiet"]).args(options);
    let slow = || held(scene.sync(&["--bwlimit", "64K"]), || again(&["-n"]));
    let mut holder = slow();
    let refused = again(&[]).code(BUSY);
    let error = refused.json().pop().expect("an error");
    assert_eq!((error["message_type"].as_str(), error["code"].as_i64()), (Some("error"), Some(6)), "{error}");
    refused.says(&["wait for it, as --wait does, or stop it"]);
    let patience = Instant::now();
    let gave_up = scene.sync(&["--wait=700ms"]).code(BUSY);
    let process = holder.pid().as_raw_nonzero();
    let who = format!("is in use (dsync sync, process {process} on ");
    gave_up.says(&["gave up after waiting 0.70 s: replica", &who, "): wait longer, or stop it"]);
    assert!(patience.elapsed() >= Duration::from_millis(700), "{gave_up}");
    holder.kill();
    let text = |verb: &str| scene.site.dsync([verb, "--wait"]).arg(&scene.image).arg(&scene.replica);
    let name = scene.replica.display().to_string();
    for verb in ["sync", "verify"] {
        waits(slow(), text(verb), &name);
        scene.sync(&[]).ok();
        scene.client().write(0, &vec![verb.len() as u8; 4 << 20]).expect("a write");
    }
    // The value follows a "=", as that of every option that may be without one.
    let words = scene.site.dsync(["sync", "--wait", "1s"]).arg(&scene.image).arg(&scene.replica);
    words.code(2).says(&["--wait=1s"]);
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn a_replica_in_use_on_another_host_is_waited_for() {
    let (mut scene, far) = (Scene::new("a far replica in use", 16 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    scene.change(500);
    let slow = || held(far.sync(&scene, &["--bwlimit", "64K"], None), || far.sync(&scene, &["-n"], None));
    let holder = slow();
    let destination = format!("far:{}", far.replica().display());
    let waiting = scene.site.dsync(["sync", "--wait=1m"]).arg(&scene.image).arg(destination);
    let waiting = waiting.args(["--rsh", RSH]).env("RSH_STATE", far.site.state());
    waits(holder, waiting, "far: replica ");
    image::assert_equal(&scene.image, &far.replica());
}

#[test]
fn a_source_in_use_is_waited_for() {
    let site = Site::new();
    let (disk, copy, second) =
        (site.image("vm.raw", 16 * MIB), site.path("copy.raw"), site.path("second.raw"));
    image::random(&disk, 8 * MIB, &mut dsync_tests::Random::new("a source in use"));
    let sync = |to: &Path, options: &[&str]| site.dsync(["sync"]).arg(&disk).arg(to).args(options);
    let slow = || held(sync(&copy, &["--bwlimit", "64K"]), || sync(&second, &["-n"]));
    waits(slow(), sync(&second, &["--wait"]), "source ");
    image::assert_equal(&disk, &second);
    // A server takes its turn, too.
    let (holder, socket) = (slow(), site.socket("served"));
    let serve = || site.dsync(["serve"]).arg(&disk).arg("--socket").arg(&socket);
    serve().code(BUSY).says(&["is in use"]);
    let mut server = serve().arg("--wait").start();
    std::thread::sleep(Duration::from_millis(300));
    assert!(server.ended().is_none(), "it did not wait");
    drop(holder);
    server.wait_to_say("serving vm");
    // And a checkpoint of what is served needs none.
    site.dsync(["checkpoint", "vm", "reader"]).ok();
}

#[test]
fn a_mirror_waits_for_its_replica() {
    let mut scene = Scene::synced("a mirror of a replica in use", 16 * MIB);
    scene.change(500);
    let slow = || held(scene.sync(&["--bwlimit", "64K"]), || scene.sync(&["-n"]));
    let mirror = |options: &[&str]| scene.site.dsync(["mirror", "vm"]).arg(&scene.replica).args(options);
    let mut holder = slow();
    let gave_up = mirror(&[]).code(BUSY);
    assert!(gave_up.time > Duration::from_secs(2), "the far side may not have noticed yet: {gave_up}");
    let mut waiting = mirror(&["--wait"]).start();
    let limit = Instant::now() + Duration::from_secs(30);
    while !waiting.stderr_so_far().contains("waiting for up to") {
        assert!(waiting.ended().is_none() && Instant::now() < limit, "{}", waiting.stderr_so_far());
        std::thread::sleep(Duration::from_millis(20));
    }
    holder.kill();
    waiting.wait_to_say("mirroring to");
    waiting.signal(Signal::TERM);
    assert!(waiting.output(Duration::from_secs(30)).status.success());
    scene.equal();
}

/// Where the far side lost power, it may hold the replica for a while: the units try again.
#[test]
fn no_unit_gives_up_what_is_in_use() {
    let folder = dsync_tests::repository().join("systemd");
    let mut restarted = 0;
    for entry in folder.read_dir().expect("the units") {
        let path = entry.expect("a unit").path();
        let text = std::fs::read_to_string(&path).expect("a unit");
        let Some(prevented) = text.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus="))
        else {
            continue;
        };
        assert!(text.contains("\nRestart=on-failure\n"), "{}", path.display());
        assert!(prevented.split(' ').all(|code| code != "6"), "{}: {prevented}", path.display());
        restarted += 1;
    }
    assert_eq!(restarted, 4);
}

/// A disk that a guest's QEMU has locked, as this test does in its place.
#[test]
fn what_another_program_has_locked_is_waited_for() {
    let mut scene = Scene::synced("locked by another program", MIB);
    scene.stop();
    // What has just ended may hold it for a moment.
    let lock = |path: &Path| {
        let mut held = None;
        until("a lock", || {
            held = device::lock_image(path, device::Access::Write).ok();
            held.is_some()
        });
        held.expect("a lock")
    };
    let socket = scene.site.socket("locked");
    let (image, replica) = (scene.image.clone(), scene.replica.clone());
    let run = |verb: &str| scene.site.dsync([verb, "--wait=300ms"]).arg(&image);
    let serve = || run("serve").arg("--socket").arg(&socket);
    let demote = || run("demote").arg(&replica);
    let promote = || scene.site.dsync(["promote", "--wait=300ms"]).arg(&replica);
    let held: [(&Path, Vec<Run>); 2] = [
        (&image, vec![run("sync").arg(&replica), run("verify").arg(&replica), serve(), demote()]),
        (&replica, vec![run("sync").arg(&replica), run("verify").arg(&replica), promote()]),
    ];
    for (path, runs) in held {
        let _held = lock(path);
        for run in runs {
            let refused = run.code(BUSY);
            refused.says(&["gave up after waiting", &format!("pid {}", std::process::id())]);
            assert!(
                !refused.stderr.contains("(dsync, pid") && !refused.stderr.contains("; dsync, pid"),
                "{refused}"
            );
        }
    }
    let held = lock(&scene.replica);
    let waiting = scene.site.dsync(["sync", "--wait"]).arg(&scene.image).arg(&scene.replica);
    let mut waiting = waiting.start();
    std::thread::sleep(Duration::from_millis(700));
    assert!(waiting.ended().is_none(), "it did not wait: {}", waiting.stderr_so_far());
    drop(held);
    let ended = waiting.output(Duration::from_secs(60));
    assert!(ended.status.success(), "{ended}");
}
