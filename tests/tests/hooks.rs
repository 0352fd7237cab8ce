//! `--hook` is held open around the cut, and `--on-failure` is told of what failed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::scene::number;
use dsync_tests::{Run, Scene, Site, got, need, need_root, skipped};

const RSH: &str = env!("CARGO_BIN_EXE_rsh");
const MIB: u64 = 1 << 20;

/// A script for the shell.
fn script(site: &Site, text: &str) -> String {
    let path = site.path("hook.sh");
    std::fs::write(&path, text).expect("a script");
    format!("sh {}", path.display())
}

fn wait_for(path: &Path) {
    let until = Instant::now() + Duration::from_secs(30);
    while !path.exists() {
        assert!(Instant::now() < until, "{} does not come", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn write(scene: &Scene, block: u64, byte: u8) {
    let mut client = scene.client();
    client.write(block * BLOCK, &[byte; BLOCK as usize]).expect("a write");
    client.close().expect("the end");
}

fn byte_at(image: &Path, block: u64) -> u8 {
    std::fs::read(image).expect("a disk")[(block * BLOCK) as usize]
}

#[test]
fn the_cut_is_between_what_the_hook_is_told() {
    let scene = Scene::synced("a hook", 16 * MIB);
    let at = |name: &str| -> PathBuf { scene.site.path(name) };
    let hook = script(
        &scene.site,
        "echo \"$DSYNC_SOURCE $DSYNC_REPLICA\" > names\n\
         read word; echo $word > begun\n\
         while ! test -e go; do sleep 0.02; done\n\
         echo ready\n\
         read word; echo $word > word-of-cut\n\
         read word; echo $word > word-of-end\n",
    );
    // The commit is some time after the cut.
    let mut sync = scene.sync(&["--hook", &hook, "--bwlimit", "128K"]).start();
    wait_for(&at("begun"));
    write(&scene, 7, 0xaa);
    let mut client = scene.client();
    client.write(8 * BLOCK, &scene.random.clone().bytes(64 * BLOCK as usize)).expect("a write");
    client.close().expect("the end");
    std::fs::write(at("go"), "").expect("a file");
    wait_for(&at("word-of-cut"));
    assert!(!at("word-of-end").exists() && sync.ended().is_none(), "the commit comes later");
    write(&scene, 7, 0xbb);
    let ended = sync.output(Duration::from_secs(60));
    assert!(ended.status.success() && ended.stderr.is_empty(), "{ended}");
    assert_eq!(byte_at(&scene.replica, 7), 0xaa, "of the moment at which the hook was ready");
    let said = |name: &str| std::fs::read_to_string(at(name)).expect("a word");
    assert_eq!([said("begun"), said("word-of-cut"), said("word-of-end")], ["begin\n", "cut\n", "end\n"]);
    assert_eq!(said("names"), format!("{} {}\n", scene.image.display(), scene.replica.display()));
}

#[test]
fn a_hook_that_fails_ends_the_sync_before_the_cut() {
    let scene = Scene::synced("a hook that fails", 8 * MIB);
    write(&scene, 7, 0xaa);
    let epoch = || {
        let status = scene.site.dsync(["status", "vm", "--json"]).ok().json();
        number(&status[0], "epoch")
    };
    let before = (epoch(), byte_at(&scene.replica, 7));
    let failed = scene.sync(&["--hook", "echo 'database is in recovery' >&2; exit 3"]).code(1);
    failed.says(&["exit status: 3", "before the cut: database is in recovery"]);
    let began = Instant::now();
    let pid = scene.site.path("pid");
    let slow = scene.sync(&["--hook", "echo $$ > pid; echo waits; exec sleep 60", "--hook-limit", "400ms"]);
    slow.code(1).says(&["did not say \"ready\" within 0.40 s", "--hook-limit", ": waits"]);
    assert!(began.elapsed() < Duration::from_secs(20));
    let pid = std::fs::read_to_string(pid).expect("a number");
    assert!(!Path::new(&format!("/proc/{}", pid.trim())).exists(), "the hook is left");
    assert_eq!((epoch(), byte_at(&scene.replica, 7)), before, "there was a cut");
    // A dry run cuts nothing, and after the cut a failure is a warning.
    scene.sync(&["-n", "--hook", "exit 3"]).ok();
    let warned = scene.sync(&["--hook", "read w; echo ready; read w; read w; echo late; exit 4"]).ok();
    assert!(warned.text().contains("failed after the cut (exit status: 4): late"), "{warned}");
    scene.equal();
    // That the line is cut after the cut of the disk is told to the hook.
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    let mut client = scene.client();
    client.write(0, &scene.random.clone().bytes(1 << 20)).expect("a write");
    client.close().expect("the end");
    let hook = "read w; echo ready; read w; read w; echo $w > word";
    assert!(!far.sync(&scene, &["--hook", hook], Some(200 << 10)).output().status.success());
    assert_eq!(std::fs::read_to_string(scene.site.path("word")).expect("a word"), "failed\n");
    scene.site.dsync(["sync", "near:vm", "copy", "--hook", "true"]).code(2).says(&["on near"]);
}

#[test]
fn a_hook_writes_before_the_freeze() {
    let what = "a hook around a freeze";
    if !need_root(what) || !need(&["losetup", "mkfs.ext4"], what) {
        return;
    }
    let site = Site::new();
    let disk = site.image("disk.raw", 64 * MIB);
    Run::new("mkfs.ext4").arg("-q").arg(&disk).ok();
    let Some(device) = Loop::new(&disk) else { return skipped(what, "loop devices are not allowed here") };
    let path = device.device().to_path_buf();
    let added = site.dsync(["track", "add"]).arg(&path).output();
    let _untrack = Untrack(&site, &path);
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let place = site.path("mounted");
    let Some(_mount) = Mount::new(&[], &path, &place) else {
        return skipped(what, "mounts are not allowed here");
    };
    let copy = site.path("copy.raw");
    let hook = script(
        &site,
        &format!(
            "read w; echo held-by-the-hook > {0}/marker; echo ready; read w; echo $w > {0}/after; read w",
            place.display()
        ),
    );
    let summary = site.sync(&path, &copy, &["--freeze", "require", "--hook", &hook]).ok().summary();
    assert!(summary["freeze_ms"].is_u64(), "{summary}");
    let content = std::fs::read(&copy).expect("a copy");
    let found = content.windows(16).any(|window| window == b"held-by-the-hook");
    assert!(found, "what the hook wrote is not in the copy");
    assert_eq!(std::fs::read_to_string(place.join("after")).expect("a word"), "cut\n", "thawed by then");
}

/// Ends the tracking of a disk.
struct Untrack<'a>(&'a Site, &'a Path);

impl Drop for Untrack<'_> {
    fn drop(&mut self) {
        self.0.dsync(["track", "remove"]).arg(self.1).output();
    }
}

#[test]
fn a_failure_is_told_with_its_job_code_and_message() {
    let scene = Scene::synced("on failure", 8 * MIB);
    let told = scene.site.path("told");
    let folder = scene.site.path("conf");
    std::fs::create_dir(&folder).expect("a folder");
    let job = |command: &str, more: &str| {
        let replica = scene.replica.display();
        let tell = "echo \"$DSYNC_JOB $DSYNC_EXIT_CODE $DSYNC_MESSAGE\" >> told";
        let text = format!(
            "command = {command}\nsource = vm\ndestination = {replica}\non-failure = {tell}\n{more}\n"
        );
        std::fs::write(folder.join("nightly.conf"), text).expect("a job");
    };
    job("sync", "");
    scene.site.dsync(["run", "nightly"]).ok();
    assert!(!told.exists(), "nothing failed");
    image::scribble(&scene.replica, MIB, BLOCK, &mut scene.random.clone());
    let failed = scene.site.dsync(["run", "nightly"]).code(4);
    let said = std::fs::read_to_string(&told).expect("it was told");
    assert!(said.starts_with("nightly 4 replica ") && said.contains("modified outside dsync"), "{said}");
    assert!(
        failed.stderr.contains(said.trim_end().strip_prefix("nightly 4 ").expect("a message")),
        "{failed}"
    );
    // Also an exit code without a message.
    std::fs::remove_file(&told).expect("a file");
    job("verify", "");
    scene.site.dsync(["run", "nightly"]).code(5);
    assert_eq!(std::fs::read_to_string(&told).expect("it was told"), "nightly 5 \n");
    // A command that fails itself changes no exit code.
    let run = scene.site.dsync(["verify", "--on-failure", "echo broken; exit 9", "vm"]).arg(&scene.replica);
    run.code(5).says(&["--on-failure \"echo broken; exit 9\" failed (exit status: 9): broken"]);
}
