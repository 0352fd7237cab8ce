//! The mirror: at every moment, whatever is killed or cut, the replica is the source as it was at the end of one batch.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::records::{self, Records};
use dsync_tests::scene::number;
use dsync_tests::{Background, Random, Run, Scene, need, need_root, rounds, until};
use rustix::process::{Pid, Signal, kill_process};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");
/// What a mirror says when its batches begin.
const MIRRORING: &str = "mirroring to";

fn mirror(scene: &Scene, replica: &Path, options: &[&str]) -> Run {
    scene.site.dsync(["mirror", "--json", "-v"]).arg(&scene.image).arg(replica).args(options)
}

/// Ends a mirror in good order: its batches and its summary.
fn stop(mut mirror: Background) -> (Vec<serde_json::Value>, serde_json::Value) {
    mirror.signal(Signal::TERM);
    let output = mirror.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    let batches = output.json().into_iter().filter(|o| o.get("batch").is_some()).collect();
    (batches, output.summary())
}

fn recover(scene: &Scene, replica: &Path) {
    scene.site.dsync(["recover"]).arg(replica).ok();
}

/// Ctrl-C goes to the remote shell as well. That is no failure of the link, and a success ends one anyway.
#[test]
fn an_interrupt_at_a_terminal_is_no_failure() {
    let mut scene = Scene::new("ctrl-c", 8 * MIB);
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    let mut running = far.run("mirror", &scene, &["-v"], None).start();
    running.wait_to_say(MIRRORING);
    scene.change(5);
    let shells = running.descendants();
    assert!(!shells.is_empty());
    running.signal(Signal::INT);
    for (shell, _) in shells {
        let _ = kill_process(shell, Signal::INT);
    }
    let output = running.output(Duration::from_secs(60));
    assert!(output.status.success() && !output.stderr.contains("retrying"), "{output}");
    scene.site.dsync(["status", "--check"]).ok();
    image::assert_equal(&scene.image, &far.replica());
}

/// The replica of a mirror is not forgotten under it.
#[test]
fn what_a_mirror_works_for_is_not_forgotten() {
    let scene = Scene::new("forgotten", 8 * MIB);
    let mut running = mirror(&scene, &scene.replica, &[]).start();
    running.wait_to_say(MIRRORING);
    let forget = || scene.site.dsync(["forget", "vm"]).arg(&scene.replica);
    forget().code(6).says(&["a mirror to", "is under way", "stop it first"]);
    stop(running);
    forget().ok();
}

#[test]
fn what_is_written_arrives_in_batches() {
    let mut scene = Scene::new("mirror", 64 * MIB);
    let mut running = mirror(&scene, &scene.replica, &["--rpo", "1s"]).start();
    running.wait_to_say(MIRRORING);
    let load = Records::start(&scene.server().address(), "vm", None, 200);
    std::thread::sleep(Duration::from_millis(1500));
    load.stop();
    let status = scene.site.dsync(["status"]).arg(&scene.replica).ok().text();
    assert!(status.contains("in use by dsync") && status.contains("epoch 1"), "{status}");
    scene.change(300);
    let (batches, summary) = stop(running);
    scene.equal();
    assert!(batches.len() >= 3, "{} batches in 1.5 s: {summary}", batches.len());
    assert_eq!(number(&summary, "syncs"), 1, "{summary}");
    assert_eq!(number(&summary, "broken"), 0, "{summary}");
    // The end of a mirror is an epoch like any other: a sync finds nothing.
    let synced = scene.sync(&[]).ok().summary();
    assert_eq!((synced["method"].as_str(), number(&synced, "blocks_changed")), (Some("tracked"), 0));
    for batch in &batches {
        let interval = batch["interval"].as_f64().expect("an interval");
        assert!(interval <= 0.5, "half of the bound on what may be lost: {batch}");
    }
}

#[test]
fn a_killed_mirror_leaves_a_batch() {
    let mut scene = Scene::synced("mirror kills", 32 * MIB);
    let (mut next, mut had) = (None, [0, 0]);
    for round in 0..rounds(10, 170) {
        let mut running = mirror(&scene, &scene.replica, &["--epoch", "300ms"]).start();
        let load = Records::start(&scene.server().address(), "vm", next, 500 * scene.random.below(2));
        if !scene.random.one_in(4) {
            running.wait_to_say(MIRRORING);
        }
        std::thread::sleep(Duration::from_millis(scene.random.below(700)));
        running.kill();
        next = Some(load.stop());
        if scene.random.one_in(3) {
            let mut recovering = scene.site.dsync(["recover"]).arg(&scene.replica).start();
            std::thread::sleep(Duration::from_micros(scene.random.below(20_000)));
            recovering.kill();
        }
        recover(&scene, &scene.replica);
        let found = records::check(&scene.replica, &format!("round {round}"));
        assert!(found >= had, "round {round}: the replica went back from {had:?} to {found:?}");
        println!("round {round}: {found:?} of {next:?}");
        had = found;
    }
    let mut running = mirror(&scene, &scene.replica, &[]).start();
    running.wait_to_say(MIRRORING);
    stop(running);
    scene.equal();
}

/// What is mended would be of the epoch, and the rest of the batch: no moment of the source.
#[test]
fn a_range_of_a_replica_that_is_ahead_is_not_repaired_alone() {
    let mut scene = Scene::synced("mirror ahead", 32 * MIB);
    let mut running = mirror(&scene, &scene.replica, &["--epoch", "1h", "--rpo", "500ms"]).start();
    running.wait_to_say(MIRRORING);
    let before = std::fs::metadata(&scene.replica).unwrap().modified().unwrap();
    scene.change(100);
    until("a batch", || std::fs::metadata(&scene.replica).unwrap().modified().unwrap() != before);
    running.kill();
    let ahead = || scene.site.dsync(["recover"]).arg(&scene.replica).ok().text().contains("the last batch");
    assert!(ahead());
    let repair = |options: &[&str]| {
        let words = [&["verify", "--repair"][..], options].concat();
        scene.site.dsync(words).arg(&scene.image).arg(&scene.replica)
    };
    repair(&["--range", "0:4K"]).code(4).says(&["another moment than its epoch", "omit --range"]);
    assert!(ahead());
    repair(&[]).ok();
    scene.equal();
}

#[test]
fn a_mirror_outlives_its_server() {
    let mut scene = Scene::synced("server kills under a mirror", 32 * MIB);
    let mut running = mirror(&scene, &scene.replica, &["--epoch", "1s"]).start();
    running.wait_to_say(MIRRORING);
    let mut next = None;
    for round in 0..rounds(4, 160) {
        let load = Records::start(&scene.server().address(), "vm", next, 300);
        load.wait_for(100 + scene.random.below(1000));
        scene.server.take().expect("a server").kill();
        next = Some(load.stop());
        // What is there while nobody can say more: what the mirror holds is looked at through its journal, once it is ended.
        if scene.random.one_in(3) {
            running.kill();
            recover(&scene, &scene.replica);
            records::check(&scene.replica, &format!("round {round}"));
            scene.start();
            running = mirror(&scene, &scene.replica, &["--epoch", "1s"]).start();
            running.wait_to_say(MIRRORING);
        } else {
            scene.start();
        }
        assert!(running.ended().is_none(), "{}", running.stderr_so_far());
    }
    scene.change(50);
    until("the last change arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
    stop(running);
    scene.equal();
}

/// A server that stays away is waited for, as a link is, however it ended, and while the first copy is made as well as later.
#[test]
fn a_server_that_stays_away_is_waited_for() {
    let mut scene = Scene::new("a server stays away under a mirror", 32 * MIB);
    scene.stop();
    image::scribble(&scene.image, 0, 16 * MIB, &mut scene.random);
    scene.start();
    let run = scene.site.dsync(["mirror", "-v", "--bwlimit", "4M"]).arg(&scene.image).arg(&scene.replica);
    let mut running = run.start();
    let partial = scene.replica.with_extension("raw.partial");
    until("the first copy begins", || std::fs::metadata(&partial).is_ok_and(|found| found.len() > 0));
    for killed in [true, false, true] {
        let server = scene.server.take().expect("a server");
        let before = running.stderr_so_far().matches("retrying").count();
        if killed {
            server.kill()
        } else {
            server.stop()
        };
        until("it waits", || {
            assert!(running.ended().is_none(), "{}", running.stderr_so_far());
            running.stderr_so_far().matches("retrying").count() >= before + 2
        });
        scene.start();
        scene.change(50);
        until("it goes on", || {
            scene.replica.exists() && image::first_difference(&scene.image, &scene.replica).is_none()
        });
    }
    assert!(running.stderr_so_far().contains("went away"), "{}", running.stderr_so_far());
    // The content is there before its commit is.
    running.wait_to_say(MIRRORING);
    running.signal(Signal::TERM);
    let ended = running.output(Duration::from_secs(60));
    assert!(ended.status.success(), "{ended}");
    scene.equal();
}

/// The far side of a mirror, if it lives.
fn far_side(running: &Background) -> Option<Pid> {
    running.descendant("dsync", "receive")
}

fn kill_far(running: &Background) -> bool {
    far_side(running).is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok())
}

#[test]
fn a_killed_far_side_and_a_cut_line() {
    let (mut scene, far) = (Scene::new("far kills under a mirror", 32 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let mut random = Random::seeded(scene.random.bits());
    let (mut next, mut had) = (None, [0, 0]);
    for round in 0..rounds(5, 170) {
        // Each connection is cut after so many bytes, if at all.
        let cut = random.one_in(2).then(|| 200_000 + random.below(3_000_000));
        let mut running = far.run("mirror", &scene, &["-v", "--epoch", "700ms"], cut).start();
        if cut.is_none() {
            running.wait_to_say(MIRRORING);
        }
        let load = Records::start(&scene.server().address(), "vm", next, 300);
        for _ in 0..1 + random.below(2) {
            std::thread::sleep(Duration::from_millis(200 + random.below(500)));
            if cut.is_none() {
                println!("round {round}: the far side was killed: {}", kill_far(&running));
            }
        }
        std::thread::sleep(Duration::from_millis(300 + random.below(900)));
        assert!(running.ended().is_none(), "{}", running.stderr_so_far());
        running.kill();
        next = Some(load.stop());
        // The far side notices that its line has ended.
        until("the far side lets go", || {
            let output = far.site.dsync(["recover"]).arg(far.replica()).output();
            output.status.success()
        });
        let found = records::check(&far.replica(), &format!("round {round}"));
        assert!(found >= had, "round {round}: the replica went back from {had:?} to {found:?}");
        println!("round {round}: {found:?} of {next:?}");
        had = found;
    }
    scene.change(20);
    far.sync(&scene, &[], None).ok();
    image::assert_equal(&scene.image, &far.replica());
}

/// A far side that stands still is given up, and gone on with when it moves again.
#[test]
fn a_far_side_that_says_nothing_is_given_up() {
    let (mut scene, far) = (Scene::new("a far side that stands still", 16 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let mut running = far.run("mirror", &scene, &["-v", "--timeout", "2s"], None).start();
    running.wait_to_say(MIRRORING);
    let far_side = far_side(&running).expect("a far side");
    kill_process(far_side, Signal::STOP).expect("a process that stands still");
    scene.change(10);
    running.wait_to_say("nothing came from it for 2.0 s");
    // It holds the replica until it moves, and finds its line gone; or the system has ended it with its shell.
    let _ = kill_process(far_side, Signal::CONT);
    until("it goes on", || image::first_difference(&scene.image, &far.replica()).is_none());
    let (_, summary) = stop(running);
    assert!(number(&summary, "broken") >= 1, "{summary}");
}

/// What a mirror has reached last says nothing of now: status and monitors go by how long that is ago.
#[test]
fn a_far_side_that_hangs_is_behind_in_status() {
    let (mut scene, far) = (Scene::new("a far side that hangs", 16 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let mut running = far.run("mirror", &scene, &["--rpo", "1s", "--timeout", "60s"], None).start();
    running.wait_to_say(MIRRORING);
    scene.change(10);
    until("the batch is there", || image::first_difference(&scene.image, &far.replica()).is_none());
    let check = |scene: &Scene| scene.site.dsync(["status", "--check"]).output().text();
    until("it is known here", || check(&scene) == "OK\n");
    let far_side = far_side(&running).expect("a far side");
    kill_process(far_side, Signal::STOP).expect("a process that stands still");
    scene.change(10);
    until("a monitor sees it", || {
        check(&scene).contains("behind, and its mirror is to keep it within 1.00 s")
    });
    let shown = scene.site.dsync(["status"]).ok().text();
    let row = shown.lines().find(|line| line.starts_with("! vm ")).expect("the replica first");
    let words: Vec<&str> = row.split("  ").map(str::trim).filter(|word| !word.is_empty()).collect();
    let behind = words[3].split(',').next().expect("a time");
    let seconds = behind.strip_suffix(" s").and_then(|number| number.parse::<u64>().ok());
    assert!(words[2] == "stale" && seconds.is_some_and(|seconds| seconds >= 3), "{shown}");
    let mut watch = scene.site.dsync(["status", "--watch=1"]).start();
    watch.wait_to_say("behind, and its mirror is to keep it within 1.00 s");
    watch.wait_to_say("\n! vm ");
    let _ = kill_process(far_side, Signal::CONT);
    until("it goes on", || check(&scene) == "OK\n");
    watch.wait_to_say("no problems\n");
    running.kill();
}

/// A remote shell whose line can fall silent without an end: two processes carry it, which outlive the shell.
struct Partition<'a> {
    scene: &'a Scene,
    script: PathBuf,
    pids: PathBuf,
}

impl<'a> Partition<'a> {
    fn new(scene: &'a Scene, far: &Far) -> Partition<'a> {
        let (script, pids) = (far.site.path("silent-shell"), far.site.path("carriers"));
        let text = format!(
            "#!/bin/sh\nshift\nexport DSYNC_STATE_DIR={}\n\
             sh -c 'echo $$ >>{pids}; exec cat' | sh -c \"$*\" | sh -c 'echo $$ >>{pids}; exec cat'\n",
            far.site.state().display(),
            pids = pids.display()
        );
        std::fs::write(&script, text).expect("a file");
        Run::new("chmod").arg("+x").arg(&script).ok();
        Partition { scene, script, pids }
    }

    fn run(&self, words: &[&str], replica: &Path) -> Run {
        let destination = format!("far:{}", replica.display());
        self.scene.site.dsync(words).arg(&self.scene.image).arg(destination).arg("--rsh").arg(&self.script)
    }

    fn signal(&self, signal: Signal) {
        let pids = std::fs::read_to_string(&self.pids).expect("the carriers");
        for pid in pids.lines() {
            let pid = pid.parse().ok().and_then(Pid::from_raw).expect("a number");
            // One that has ended has ended.
            let _ = kill_process(pid, signal);
        }
    }

    /// From here on nothing is carried.
    fn silence(&self) {
        self.signal(Signal::STOP);
        println!("silent");
        std::fs::rename(&self.pids, self.pids.with_extension("stopped")).expect("the carriers");
    }
}

impl Drop for Partition<'_> {
    fn drop(&mut self) {
        for name in [self.pids.with_extension("stopped"), self.pids.clone()] {
            self.pids = name;
            if self.pids.exists() {
                self.signal(Signal::KILL);
            }
        }
    }
}

/// An idle mirror lives whatever its timeout; when the line falls silent both ends notice, so the far one lets the replica go
/// for the next that comes.
#[test]
fn both_ends_of_a_silent_line_let_go() {
    let (mut scene, far) = (Scene::new("a partition", 16 * MIB), Far::new(RSH));
    let image = scene.image.clone();
    let (first, second) = (scene.random.bytes(1 << 20), scene.random.bytes(8 << 20));
    far.sync(&scene, &[], None).ok();
    let idle_mirror = Partition::new(&scene, &far);
    let words = ["mirror", "--json", "-v", "--timeout", "2s", "--rpo", "1s"];
    let mut running = idle_mirror.run(&words, &far.replica()).start();
    running.wait_to_say(MIRRORING);
    std::thread::sleep(Duration::from_secs(6));
    assert!(!running.stdout_so_far().contains("retrying"), "{}", running.stdout_so_far());
    idle_mirror.silence();
    running.wait_to_say("nothing came from it for 2.0 s");
    // The old far side is there still, behind a line that does not end, and must give the replica up by itself.
    let mut client = scene.client();
    client.write(0, &first).expect("a write");
    client.close().expect("the end");
    until("it goes on", || image::first_difference(&image, &far.replica()).is_none());
    let (_, summary) = stop(running);
    assert!(number(&summary, "broken") >= 1, "{summary}");
    drop(idle_mirror);

    // A sync is no other conversation.
    let mut client = scene.client();
    client.write(0, &second).expect("a write");
    client.close().expect("the end");
    let syncing = Partition::new(&scene, &far);
    let mut running =
        syncing.run(&["sync", "--json", "--timeout", "2", "--bwlimit", "1M"], &far.replica()).start();
    running.wait_to_say("bytes_done");
    syncing.silence();
    let status = running.wait_for(Duration::from_secs(30)).expect("an end");
    assert_eq!(status.code(), Some(1), "{}", running.stderr_so_far());
    assert!(
        running.stderr_so_far().contains("nothing came from it for 2.0 s"),
        "{}",
        running.stderr_so_far()
    );
    until("the far side lets go", || far.sync(&scene, &[], None).output().status.success());
    image::assert_equal(&scene.image, &far.replica());
}

/// How long a mirror waits for a line follows what may be lost, and begins again with a line that holds, whether there was
/// something to send or not.
#[test]
fn an_idle_mirror_is_back_as_soon_as_its_line() {
    let (scene, far) = (Scene::new("flapping", 16 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let (script, down) = (far.site.path("shell"), far.site.path("down"));
    let text = format!(
        "#!/bin/sh\n[ -e {} ] && {{ echo no route >&2; exit 255; }}\nexec {RSH} \"$@\"\n",
        down.display()
    );
    std::fs::write(&script, text).expect("a file");
    Run::new("chmod").arg("+x").arg(&script).ok();
    let destination = format!("far:{}", far.replica().display());
    let run = scene.site.dsync(["mirror", "--json", "-v", "--rpo", "2s"]).arg(&scene.image).arg(destination);
    let mut running = run.arg("--rsh").arg(&script).env("RSH_STATE", far.site.state()).start();
    running.wait_to_say(MIRRORING);
    let waits = |running: &Background| -> Vec<f64> {
        let said = running.stdout_so_far();
        let waits = said.split("retrying in ").skip(1);
        waits
            .map(|rest| rest.split(' ').next().and_then(|word| word.parse().ok()).expect("seconds"))
            .collect()
    };
    std::fs::write(&down, "").expect("a file");
    until("the far side is there", || kill_far(&running));
    until("it tries again and again", || waits(&running).len() >= 6);
    std::fs::remove_file(&down).expect("a line");
    assert_eq!(waits(&running)[..6], [0.5, 1.0, 2.0, 2.0, 2.0, 2.0]);
    until("it is back", || far_side(&running).is_some());
    std::thread::sleep(Duration::from_millis(3500));
    let before = waits(&running).len();
    until("the far side is there", || kill_far(&running));
    until("it notices", || waits(&running).len() > before);
    assert_eq!(waits(&running)[before], 0.5);
    let (_, summary) = stop(running);
    assert!(number(&summary, "broken") >= 7, "{summary}");
}

/// A line that was cut costs what was on it: what is dirty is not sent twice.
#[test]
fn after_a_cut_only_what_is_missing_is_sent() {
    let (mut scene, far) = (Scene::new("cut and caught up", 64 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    far.carried();
    let mut running = far.run("mirror", &scene, &["-v", "--epoch", "1h"], None).start();
    running.wait_to_say(MIRRORING);
    let mut dirtied = 0;
    for round in 0..3 {
        dirtied += scene.change(1000).len() as u64;
        until("it arrives", || image::first_difference(&scene.image, &far.replica()).is_none());
        until("the far side is there", || kill_far(&running));
        println!("round {round}: cut");
        // What is written from now on, the mirror knows that it cannot be sent.
        until("it is noticed", || running.stdout_so_far().matches("was cut").count() > round);
        dirtied += scene.change(500).len() as u64;
        until("it is caught up", || image::first_difference(&scene.image, &far.replica()).is_none());
    }
    let (_, summary) = stop(running);
    assert_eq!(number(&summary, "syncs"), 1, "batches went on from where they were: {summary}");
    let (carried, _) = far.carried();
    let payload = dirtied * BLOCK;
    // What was on its way at each cut is sent again.
    assert!(carried < payload + payload / 10, "{carried} bytes were carried for {payload} that changed");
    assert_eq!(number(&summary, "broken"), 3, "{summary}");
}

/// What was on its way when a line was cut is sent again, and what is written while the mirror begins is not missed: no block is
/// written twice here, and no sync covers what batches leave out.
#[test]
fn nothing_is_left_out_at_any_cut() {
    let (scene, far) = (Scene::in_memory("cuts without a second chance", 64 * MIB), Far::in_memory(RSH));
    far.sync(&scene, &[], None).ok();
    let mut client = scene.client();
    let (mut random, done) = (Random::seeded(scene.random.clone().bits()), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Every block once, in a scattered order.
            for number in 0..rounds(1500, 3000) {
                let at = number * 2731 % (64 * MIB / BLOCK) * BLOCK;
                client.write(at, &random.bytes(BLOCK as usize)).expect("a write");
                std::thread::sleep(Duration::from_micros(random.below(3000)));
                if number % 100 == 99 {
                    // No batch grows larger than what the line takes before it is cut.
                    until("all so far arrives", || {
                        image::first_difference(&scene.image, &far.replica()).is_none()
                    });
                }
            }
            done.store(true, SeqCst);
        });
        let mut running = far.run("mirror", &scene, &["-v", "--epoch", "1h"], Some(1_500_000)).start();
        until("all is written", || done.load(SeqCst));
        until("all arrives", || image::first_difference(&scene.image, &far.replica()).is_none());
        assert!(running.ended().is_none(), "{}", running.stderr_so_far());
        let said = running.stdout_so_far();
        running.kill();
        assert!(said.matches("was cut").count() >= 3, "lines were cut: {said}");
        assert!(!said.contains("compared"), "{said}");
    });
}

/// A device that was put back to an older state while the mirror looked away, with all that its replica knows of itself, is
/// noticed, and brought up to date by a sync.
#[test]
fn a_replica_that_was_put_back_is_noticed() {
    let what = "a mirror to a device that is put back";
    if !need_root(what) {
        return;
    }
    let mut scene = Scene::new(what, 16 * MIB);
    let image = scene.site.image("device.img", 16 * MIB);
    let Some(device) = Loop::new(&image) else {
        return dsync_tests::skipped(what, "there is no loop device");
    };
    let device = device.device();
    let (folder, kept) = (scene.site.path("journal"), scene.site.path("kept"));
    let command = |command: &str| {
        let run = scene.site.dsync([command, "--json", "--adopt", "--rsh", RSH, "--journal-dir"]);
        run.arg(&folder).arg(&scene.image).arg(format!("far:{}", device.display()))
    };
    command("sync").ok();
    let before = std::fs::read(device).expect("a device");
    // The files themselves are kept: a copy of them would be told.
    std::fs::rename(&folder, &kept).expect("its name");
    Run::new("cp").arg("-a").args([&kept, &folder]).ok();
    let mut running = command("mirror").args(["-v", "--epoch", "1h"]).start();
    running.wait_to_say(MIRRORING);
    scene.change(100);
    let equal = |scene: &Scene| std::fs::read(&scene.image).ok() == std::fs::read(device).ok();
    until("it arrives", || equal(&scene));
    running.signal(Signal::STOP);
    until("the far side is there", || kill_far(&running));
    std::fs::write(device, &before).expect("a device");
    Run::new("rm").arg("-r").arg(&folder).ok();
    Run::new("mv").args([&kept, &folder]).ok();
    // In another life of the kernel: in this one it has counted what was written.
    let lineage = folder.join("lineage");
    let text = std::fs::read_to_string(&lineage).expect("a lineage");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot");
    assert!(text.contains(boot.trim()), "{text}");
    std::fs::write(&lineage, text.replace(boot.trim(), "before")).expect("a lineage");
    scene.change(10);
    running.signal(Signal::CONT);
    until("what was taken away is there again", || equal(&scene));
    let (_, summary) = stop(running);
    assert_eq!(number(&summary, "syncs"), 2, "{summary}");
}

/// A replica that a mirror left within an epoch takes a sync, and no delta that ends before it.
#[test]
fn a_replica_within_an_epoch() {
    let mut scene = Scene::synced("within an epoch", 16 * MIB);
    scene.change(10);
    let old = scene.site.dsync(["extract"]).arg(&scene.image).ok().stdout;
    scene.sync(&[]).ok();
    let mut running = mirror(&scene, &scene.replica, &["--epoch", "1h"]).start();
    running.wait_to_say(MIRRORING);
    scene.change(100);
    until("it arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
    running.kill();
    recover(&scene, &scene.replica);
    scene.equal();
    let status = scene.site.dsync(["status"]).arg(&scene.replica).ok().text();
    assert!(status.contains("batch of a mirror after epoch"), "{status}");
    let refused = scene.site.dsync(["merge"]).arg(&scene.replica).input(old).code(4);
    refused.says(&["ahead"]);
    scene.change(5);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    // All that was written since the epoch, as no batch is known to a new process.
    assert!((100..=105).contains(&number(&summary, "blocks_changed")), "{summary}");
    scene.equal();
}

#[test]
fn one_slow_mirror_does_not_hold_up_another() {
    let (scene, far) = (Scene::synced("two mirrors", 32 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let mut slow = far.run("mirror", &scene, &["-v", "--bwlimit", "1M"], None).start();
    let mut fast = mirror(&scene, &scene.replica, &[]).start();
    fast.wait_to_say(MIRRORING);
    slow.wait_to_say(MIRRORING);
    let load = Records::start(&scene.server().address(), "vm", None, 300);
    until("the fast one has made some batches", || fast.stdout_so_far().matches("\"lag\"").count() > 10);
    let end = load.stop();
    until("the fast one has it", || image::first_difference(&scene.image, &scene.replica).is_none());
    let (batches, _) = stop(fast);
    let mut lags: Vec<f64> = batches.iter().map(|b| b["lag"].as_f64().expect("a lag")).collect();
    lags.sort_by(f64::total_cmp);
    // The machine itself may stand still for a while.
    let usual = lags[lags.len() / 2];
    println!("{end:?}; {} fast batches, {usual:.3} s behind as a rule", lags.len());
    assert!(usual < 2.0, "{lags:?}");
    stop(slow);
    image::assert_equal(&scene.image, &far.replica());
}

/// Another client's epoch may have ended with what another program wrote to the source while a mirror stood still: its next batch, whether it ends an
/// epoch or not, has to find that out.
#[test]
fn what_another_program_wrote_while_a_mirror_stood_still_is_found() {
    for ends in [false, true] {
        let mut scene = Scene::synced("a foreign write beside a mirror", 8 * MIB);
        let other = scene.site.path("other.raw");
        scene.site.sync(&scene.image, &other, &[]).ok();
        let mut running = mirror(&scene, &scene.replica, &["--rpo", "1s"]).start();
        running.wait_to_say(MIRRORING);
        running.signal(Signal::STOP);
        let image = std::fs::File::options().write(true).open(&scene.image).expect("the image");
        std::os::unix::fs::FileExt::write_all_at(&image, b"foreign", 5 * MIB).expect("a write");
        let said = scene.site.sync(&scene.image, &other, &[]).ok().summary();
        assert_eq!(
            said["trust"], "compared: the image was changed by another program while dsync had it open",
            "{said}"
        );
        scene.change(3);
        running.signal(Signal::CONT);
        if !ends {
            running.wait_to_say("by another program while dsync had it open");
        }
        let (_, summary) = stop(running);
        assert!(number(&summary, "syncs") == 2, "{summary}");
        scene.equal();
        scene.sync(&[]).ok();
        scene.equal();
    }
}

/// Whatever another program does to a replica's file between two batches, or after a mirror was killed: no commit seals it.
#[test]
fn what_others_do_to_a_replica_is_noticed() {
    let mut scene = Scene::synced("others at the replica", 16 * MIB);
    for act in ["write", "cut", "replace", "remove"] {
        for killed in [false, true] {
            let mut running = mirror(&scene, &scene.replica, &["--epoch", "1h"]).start();
            running.wait_to_say(MIRRORING);
            scene.change(20);
            until("it arrives", || image::first_difference(&scene.image, &scene.replica).is_none());
            // The times of files go by ticks.
            std::thread::sleep(Duration::from_millis(30));
            if killed {
                running.kill();
            }
            let replica = &scene.replica;
            match act {
                "write" => image::scribble(replica, 5 * MIB, BLOCK, &mut scene.random),
                "cut" => {
                    let file = std::fs::OpenOptions::new().write(true).open(replica).expect("a file");
                    file.set_len(8 * MIB).expect("a shorter file");
                }
                "remove" => std::fs::remove_file(replica).expect("a file"),
                _ => {
                    let other = scene.site.path("replica/other");
                    image::copy(replica, &other);
                    std::fs::rename(&other, replica).expect("another file");
                }
            }
            if !killed && act == "remove" {
                // It may come back: the mirror says so, and waits.
                scene.change(1);
                until("it is missed", || running.stdout_so_far().contains("last synced on"));
                running.kill();
            } else if !killed {
                scene.change(1);
                let ended = running.output(Duration::from_secs(30));
                assert_eq!(ended.status.code(), Some(4), "{act}: {ended}");
                ended.says(&["modified outside dsync"]);
            }
            let recovered = scene.site.dsync(["recover"]).arg(&scene.replica).output();
            let expected = if act == "remove" { 1 } else { 4 };
            assert_eq!(recovered.status.code(), Some(expected), "{act}, killed: {killed}: {recovered}");
            scene.sync(&[if act == "remove" { "--create" } else { "--adopt" }]).ok();
            scene.equal();
        }
    }
}

/// A file system of the replica's own, which comes and goes.
struct Away {
    device: Loop,
    place: PathBuf,
}

impl Away {
    fn new(scene: &Scene, what: &str) -> Option<Away> {
        if !need_root(what) || !need(&["mkfs.ext4", "losetup"], what) {
            return None;
        }
        let device = Loop::new(&scene.site.image("site.img", 128 * MIB))?;
        Run::new("mkfs.ext4").arg("-q").arg(device.device()).ok();
        let place = scene.site.path("site");
        std::fs::create_dir(&place).expect("a folder");
        Some(Away { device, place })
    }

    fn mount(&self) -> Option<Mount> {
        Mount::new(&[], self.device.device(), &self.place)
    }

    fn replica(&self) -> PathBuf {
        self.place.join("vm.raw")
    }
}

/// A mirror whose replica's file system is unmounted waits for it, and makes nothing in its place.
#[test]
fn a_replica_that_is_unmounted_is_waited_for() {
    let what = "a mirror to a file system that is unmounted";
    let mut scene = Scene::new(what, 16 * MIB);
    let Some(away) = Away::new(&scene, what) else { return dsync_tests::skipped(what, "no loop device") };
    let Some(mount) = away.mount() else { return dsync_tests::skipped(what, "no mounts here") };
    let mut running = mirror(&scene, &away.replica(), &["--epoch", "1h"]).start();
    running.wait_to_say(MIRRORING);
    scene.change(20);
    until("it arrives", || image::first_difference(&scene.image, &away.replica()).is_none());
    drop(mount);
    scene.change(20);
    until("it is missed", || running.stdout_so_far().contains("last synced on"));
    // A lock may be there while it looks.
    until("nothing is left", || std::fs::read_dir(&away.place).expect("a folder").count() == 0);
    let mount = away.mount().expect("a mount");
    scene.change(20);
    until("it goes on", || image::first_difference(&scene.image, &away.replica()).is_none());
    stop(running);
    image::assert_equal(&scene.image, &away.replica());
    recover(&scene, &away.replica());
    drop(mount);
}

/// What is mounted over the folder in which a mirror works is neither written to as if it were that folder, nor missed.
#[test]
fn a_replica_that_is_mounted_late_is_taken_up() {
    let what = "a mirror whose folder is mounted over";
    let mut scene = Scene::new(what, 16 * MIB);
    let Some(away) = Away::new(&scene, what) else { return dsync_tests::skipped(what, "no loop device") };
    let Some(mount) = away.mount() else { return dsync_tests::skipped(what, "no mounts here") };
    scene.site.sync(&scene.image, &away.replica(), &[]).ok();
    drop(mount);
    scene.change(20);
    // The user insists: beneath the mount another replica begins.
    let mut running = mirror(&scene, &away.replica(), &["--epoch", "1h", "--create"]).start();
    running.wait_to_say(MIRRORING);
    scene.change(20);
    until("it arrives", || image::first_difference(&scene.image, &away.replica()).is_none());
    let lineage = away.place.join(".vm.raw.dsync/lineage");
    let mount = away.mount().expect("a mount");
    let before = std::fs::read(&lineage).expect("a lineage");
    let (old, beneath) = (std::fs::read(away.replica()).expect("a replica"), "mounted over");
    assert_eq!(std::fs::read(&lineage).expect("a lineage"), before);
    assert!(old != std::fs::read(&scene.image).expect("an image"));
    scene.change(20);
    until("the other is taken up", || image::first_difference(&scene.image, &away.replica()).is_none());
    assert!(running.stdout_so_far().contains(beneath), "{}", running.stdout_so_far());
    let (_, summary) = stop(running);
    assert_eq!(number(&summary, "syncs"), 2, "{summary}");
    recover(&scene, &away.replica());
    image::assert_equal(&scene.image, &away.replica());
    scene.change(5);
    assert_eq!(scene.site.sync(&scene.image, &away.replica(), &[]).ok().summary()["method"], "tracked");
    drop(mount);
}

/// The same in the course of a sync.
#[test]
fn what_others_do_while_a_delta_comes_is_noticed() {
    let mut scene = Scene::synced("others during a sync", 16 * MIB);
    scene.change(1000);
    let running = scene.sync(&["--bwlimit", "2M"]).start();
    std::thread::sleep(Duration::from_millis(700));
    image::scribble(&scene.replica, 5 * MIB, BLOCK, &mut scene.random);
    let ended = running.output(Duration::from_secs(30));
    assert_eq!(ended.status.code(), Some(4), "{ended}");
    ended.says(&["modified outside dsync"]);
    scene.sync(&[]).code(4).says(&["--adopt"]);
    scene.sync(&["--adopt"]).ok();
    scene.equal();
}

/// A link that cannot keep up costs lag, and neither time of the writer nor memory without end.
#[test]
fn a_writer_never_waits_for_a_slow_link() {
    let (mut scene, far) = (Scene::new("a link that cannot keep up", 64 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let mut running = far.run("mirror", &scene, &["-v", "--bwlimit", "128K"], None).start();
    running.wait_to_say(MIRRORING);
    let mut client = scene.client();
    let (began, mut count, mut slowest) = (Instant::now(), 0u64, Duration::ZERO);
    while began.elapsed() < Duration::from_secs(5) {
        let (at, data) = (scene.random.below(16 * MIB / BLOCK) * BLOCK, scene.random.bytes(BLOCK as usize));
        let asked = Instant::now();
        client.write(at, &data).expect("a write");
        slowest = slowest.max(asked.elapsed());
        count += 1;
    }
    client.close().expect("the end");
    let status = scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().summary();
    let kept = status["served"]["kept_bytes"].as_u64().expect("a number");
    let text = std::fs::read_to_string(format!("/proc/{}/status", running.pid())).expect("a process");
    let peak = text.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak = peak.expect("a peak").parse::<u64>().expect("a number") << 10;
    running.kill();
    println!(
        "{count} writes, the slowest {slowest:?}; {} MiB at most, {kept} bytes kept: {status}",
        peak / MIB
    );
    let link = 5 * (128 << 10);
    assert!(count * BLOCK > 8 * link, "{count} writes in 5 s: the writer is as slow as the link");
    assert!(slowest < Duration::from_secs(2), "a write took {slowest:?}");
    assert!(kept <= 32 * MIB, "{kept} bytes are kept for batches of at most 16 MiB");
    assert!(peak < 200 * MIB, "{} MiB", peak / MIB);
    until("the far side lets go", || {
        far.site.dsync(["recover"]).arg(far.replica()).output().status.success()
    });
    far.sync(&scene, &[], None).ok();
    image::assert_equal(&scene.image, &far.replica());
}

#[test]
fn what_can_not_be_mirrored_is_refused() {
    let mut scene = Scene::new("mirror refusals", 8 * MIB);
    let replica = scene.replica.clone();
    for (options, words) in [
        (["--rpo", "soon"], ["use a form like"]),
        (["--alpha", "2"], ["from 0 to 1"]),
        (["--rate", "0"], ["above zero"]),
    ] {
        mirror(&scene, &replica, &options).code(2).says(&words);
    }
    let itself: PathBuf = scene.image.clone();
    mirror(&scene, &itself, &[]).code(4).says(&["source itself"]);
    scene.stop();
    mirror(&scene, &replica, &[]).code(4).says(&["dsync serve"]);
    assert!(!replica.exists());
    // Nobody could tell what is written while the mirror is away from a file that nothing follows.
    scene.start();
    std::fs::write(&replica, b"somebody's").expect("a file");
    mirror(&scene, &replica, &[]).code(4).says(&["--adopt"]);
}
