//! `--hook` is held open around the cut, and `--on-failure` is told of what failed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{Attached, Mount};
use dsync_tests::scene::number;
use dsync_tests::tracked::Tracked;
use dsync_tests::{Background, Run, Scene, Site, need, need_root, repository, skipped, until};
use rustix::process::Signal;

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
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, path, place) = (&tracked.site, tracked.device(), &tracked.place);
    let copy = site.path("copy.raw");
    let hook = script(
        site,
        &format!(
            "read w; echo held-by-the-hook > {0}/marker; echo ready; read w; echo $w > {0}/after; read w",
            place.display()
        ),
    );
    let summary = site.sync(path, &copy, &["--freeze", "require", "--hook", &hook]).ok().summary();
    assert!(summary["freeze_ms"].is_u64(), "{summary}");
    let content = std::fs::read(&copy).expect("a copy");
    let found = content.windows(16).any(|window| window == b"held-by-the-hook");
    assert!(found, "what the hook wrote is not in the copy");
    assert_eq!(std::fs::read_to_string(place.join("after")).expect("a word"), "cut\n", "thawed by then");
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

fn mirror(scene: &Scene, options: &[&str]) -> Background {
    let mut mirror = scene.site.dsync(["mirror"]).arg(&scene.image).arg(&scene.replica).args(options).start();
    mirror.wait_to_say("mirroring to");
    mirror
}

fn stop(mut mirror: Background) -> dsync_tests::Output {
    mirror.signal(Signal::TERM);
    let ended = mirror.output(Duration::from_secs(60));
    assert!(ended.status.success(), "{ended}");
    ended
}

#[test]
fn a_mirror_holds_its_hook_around_the_end_of_each_epoch() {
    let scene = Scene::new("hooks of a mirror", 16 * MIB);
    let at = |name: &str| -> PathBuf { scene.site.path(name) };
    // An application that writes two blocks one after the other. It stops between two such pairs while it is held.
    let hook = script(
        &scene.site,
        "read word; echo $$ > new; mv new hold; while test \"$(cat held)\" != $$; do sleep 0.01; done 2>/dev/null; echo ready\n\
         read word; rm hold; echo $word >> words\n\
         read word; echo $word >> words\n",
    );
    let (tell, told) = channel();
    let (hold, held) = (at("hold"), at("held"));
    let mut client = scene.client();
    let application = std::thread::spawn(move || {
        for byte in (1..=255).cycle() {
            client.write(7 * BLOCK, &[byte; BLOCK as usize]).expect("a write");
            std::thread::sleep(Duration::from_millis(15));
            client.write(9 * BLOCK, &[byte; BLOCK as usize]).expect("a write");
            // Which of the hooks it is held by is said: an answer to an earlier one is none.
            while let Ok(hook) = std::fs::read(&hold) {
                std::fs::write(&held, hook).expect("a file");
                std::thread::sleep(Duration::from_millis(1));
            }
            if told.try_recv().is_ok() {
                client.close().expect("the end");
                return;
            }
        }
    });
    let words = || std::fs::read_to_string(at("words")).unwrap_or_default();
    let running = mirror(&scene, &["--epoch", "300ms", "--rpo", "1s", "--keep-last", "20", "--hook", &hook]);
    until("the ends of three epochs", || words().matches("end\n").count() >= 4);
    let ended = stop(running);
    assert!(ended.stderr.is_empty(), "{ended}");
    tell.send(()).expect("it writes");
    application.join().expect("an application");
    assert!(words().lines().collect::<Vec<_>>().chunks(2).all(|pair| pair == ["cut", "end"]), "{}", words());
    let pair = |when: &str| {
        let bytes = [byte_at(&scene.replica, 7), byte_at(&scene.replica, 9)];
        assert_eq!(bytes[0], bytes[1], "{when}: not as the application was held");
    };
    pair("the last epoch");
    // And those before it.
    let moments = scene.site.dsync(["rewind", "--json"]).arg(&scene.replica).ok().json();
    let moments = moments[0]["moments"].as_array().expect("moments");
    let mut epochs: Vec<u64> = moments.iter().map(|moment| number(&moment["epoch"], "number")).collect();
    epochs.sort();
    assert!(epochs.len() >= 2, "{moments:?}");
    for epoch in epochs.iter().rev().take(3) {
        scene.site.dsync(["rewind"]).arg(&scene.replica).args(["--to", &epoch.to_string()]).ok();
        pair(&format!("epoch {epoch}"));
    }
}

#[test]
fn a_hook_that_is_slow_or_fails_does_not_hold_up_a_mirror() {
    let scene = Scene::synced("a slow hook of a mirror", 16 * MIB);
    let at = |name: &str| -> PathBuf { scene.site.path(name) };
    let hook = script(
        &scene.site,
        "read word; test ! -e broken || { echo no database; exit 3; }\n\
         test ! -e slow || { touch waits; while test -e slow; do sleep 0.02; done; rm waits; }\n\
         echo ready; read word; read word\n",
    );
    let options = ["--epoch", "200ms", "--rpo", "500ms", "--hook", &hook, "--hook-limit", "30s"];
    let running = mirror(&scene, &options);
    let arrives = |byte: u8| {
        write(&scene, 5, byte);
        until("what was written", || byte_at(&scene.replica, 5) == byte);
    };
    std::fs::write(at("slow"), "").expect("a file");
    arrives(1);
    until("a hook that gets ready", || at("waits").exists());
    (2..6).for_each(arrives);
    assert!(at("waits").exists(), "it was not waited for");
    std::fs::remove_file(at("slow")).expect("a file");
    until("the end of an epoch", || !at("waits").exists());
    std::fs::write(at("broken"), "").expect("a file");
    let mut byte = 10;
    until("the failure is said", || {
        byte += 1;
        arrives(byte);
        running.stderr_so_far().contains("no database")
    });
    let epochs = || scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().summary()["epoch"].clone();
    let before = epochs();
    (100..103).for_each(arrives);
    let ended = stop(running);
    assert_eq!(epochs(), before, "an epoch that no hook held");
    assert!(ended.stderr.contains("exit status: 3") && ended.stderr.contains("warning"), "{ended}");
    scene.equal();
    // The first sync of a mirror has no replica to keep: it fails.
    let refused = scene.site.dsync(["mirror", "--hook", &hook]).arg(&scene.image).arg(&scene.replica).code(1);
    refused.says(&["no database", "before the cut"]);
}

/// A guest agent: what it is asked. While `holds`, a freeze does not end.
fn agent(socket: &Path, holds: &Arc<AtomicBool>) -> Receiver<String> {
    let holds = Arc::clone(holds);
    let (tell, told) = channel();
    let listener = UnixListener::bind(socket).expect("a socket");
    std::thread::spawn(move || {
        // One client at a time, as the channel of a guest.
        for client in listener.incoming() {
            let Ok(client) = client else { return };
            let _ = converse(&client, &holds, &|word| tell.send(word.to_owned()).is_ok());
        }
    });
    told
}

fn converse(mut client: &UnixStream, holds: &AtomicBool, tell: &dyn Fn(&str) -> bool) -> std::io::Result<()> {
    // Somebody's answer that was never fetched.
    client.write_all(b"{\"return\": 1}\n")?;
    for line in BufReader::new(client.try_clone()?).split(b'\n') {
        let line = line?;
        let asked: serde_json::Value = serde_json::from_slice(line.strip_prefix(b"\xff").unwrap_or(&line))?;
        let word = asked["execute"].as_str().unwrap_or_default().to_owned();
        if word == "guest-sync-delimited" {
            client.write_all(b"\xff")?;
            writeln!(client, "{{\"return\": {}}}", asked["arguments"]["id"])?;
            continue;
        }
        tell(&word);
        while word == "guest-fsfreeze-freeze" && holds.load(SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        client.write_all(b"{\"return\": 2}\n")?;
    }
    Ok(())
}

/// A hook that comes with dsync.
fn shipped(name: &str, argument: &Path) -> String {
    format!("{} {}", repository().join("hooks").join(name).display(), argument.display())
}

fn hears(told: &Receiver<String>, word: &str) {
    let heard = told.recv_timeout(Duration::from_secs(60));
    assert_eq!(heard.as_deref(), Ok(word));
}

/// True if a process that was started with this argument is in the control group of what thaws.
fn in_shelter(argument: &Path) -> bool {
    let read = |process: &Path, name: &str| std::fs::read_to_string(process.join(name)).unwrap_or_default();
    let argument = argument.display().to_string();
    let processes = std::fs::read_dir("/proc").expect("processes").flatten().map(|entry| entry.path());
    processes.into_iter().any(|process| {
        read(&process, "cmdline").split('\0').any(|word| word == argument)
            && read(&process, "cgroup").contains("/dsync-thaw")
    })
}

#[test]
fn the_guest_agent_thaws_whatever_happens() {
    let what = "the hook for QEMU's guest agent";
    if !need(&["python3"], what) {
        return;
    }
    let scene = Scene::synced(what, 16 * MIB);
    let (holds, socket) = (Arc::new(AtomicBool::new(false)), scene.site.socket("agent"));
    let (told, hook) = (agent(&socket, &holds), shipped("qemu-guest-agent", &socket));
    write(&scene, 7, 0xaa);
    scene.sync(&["--hook", &hook]).ok();
    scene.equal();
    ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"].iter().for_each(|word| hears(&told, word));
    // The hook is killed while the guest freezes: that ends later. On a busy machine it may not have come so far.
    let mut limit = 1;
    loop {
        holds.store(true, SeqCst);
        let given = format!("{limit}s");
        scene
            .sync(&["--hook", &hook, "--hook-limit", &given])
            .code(1)
            .says(&["did not say \"ready\" within"]);
        if told.try_recv().is_ok() {
            break;
        }
        assert!(limit < 60, "the agent is never asked");
        limit *= 2;
    }
    holds.store(false, SeqCst);
    hears(&told, "guest-fsfreeze-thaw");
    // And all of it is.
    holds.store(true, SeqCst);
    let mut running = scene.sync(&["--hook", &hook]).start();
    hears(&told, "guest-fsfreeze-freeze");
    // What ends a service kills all of its control group.
    let groups = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .map(|place| Path::new(place).join("cgroup.procs").exists());
    if need_root("the control group of a hook's second process") && groups.contains(&true) {
        until("a second process in another control group", || in_shelter(&socket));
    }
    running.kill();
    holds.store(false, SeqCst);
    hears(&told, "guest-fsfreeze-thaw");
    // Nobody is there.
    let nobody = shipped("qemu-guest-agent", &scene.site.path("nobody"));
    scene.sync(&["--hook", &nobody]).code(1).says(&["guest agent at", "No such file"]);
    assert!(told.try_recv().is_err(), "it was asked for more");
}

/// Runs QEMU's guest agent as in a guest that has one disk: the agent freezes every file system on a disk that it sees mounted, so
/// it gets a root in which there is no other, and is not started unless that is so.
const GUEST: &str = r#"set -e
mounted=$1 root=$2 agent=$3
mount -t tmpfs guest "$root"
mkdir "$root/proc" "$root/disk" "$root/old" "$root/run"
umount=$(command -v umount)
for program in "$umount" "$agent"; do
    # shellcheck disable=SC2046 # a list of files
    cp -L --parents "$program" $(ldd "$program" | grep -o '/[^ ]*') "$root"
done
mount --bind "$mounted" "$root/disk"
mount -t proc proc "$root/proc"
cd "$root"
pivot_root . old
cd /
"$umount" -l /old
while read -r line; do
    rest=${line#* - }
    case ${rest%% *}/$line in
    tmpfs/* | proc/* | ext4/*" / /disk "*) ;;
    *) echo "the agent would freeze another file system: $line" >&2; exit 1 ;;
    esac
done </proc/self/mountinfo
exec "$agent" --method=unix-listen --path=/guest.agent --statedir=/run --pidfile=/run/agent.pid
"#;

/// The agent of a guest that has this file system mounted, and its socket as this host sees it; what it says if it does not start.
fn real_agent(site: &Site, mounted: &Path) -> Result<(Background, PathBuf), String> {
    let (script, root) = (site.path("guest.sh"), site.path("guest"));
    std::fs::write(&script, GUEST).expect("a script");
    std::fs::create_dir(&root).expect("a folder");
    let agent = dsync_tests::find("qemu-ga").expect("an agent");
    let guest = Run::new("unshare").args(["--mount", "sh"]).arg(&script).args([mounted, &root, &agent]);
    let mut guest = guest.start();
    let socket = PathBuf::from(format!("/proc/{}/root/guest.agent", guest.pid().as_raw_nonzero()));
    let limit = Instant::now() + Duration::from_secs(60);
    // Its file is there a moment before the agent listens.
    while UnixStream::connect(&socket).is_err() {
        if guest.ended().is_some() || Instant::now() > limit {
            return Err(guest.killed().stderr);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((guest, socket))
}

/// True if the file system in an image was cut off at work, so that its journal is to be replayed.
fn needs_recovery(image: &Path) -> bool {
    let features = Run::new("dumpe2fs").arg("-h").arg(image).ok().text();
    features.lines().any(|line| line.starts_with("Filesystem features:") && line.contains("needs_recovery"))
}

#[test]
fn qemus_own_agent_freezes_the_guests_file_system_around_the_cut() {
    let what = "the hook for QEMU's guest agent, with the agent itself";
    if !need(&["qemu-ga", "nbdfuse", "losetup", "mkfs.ext4"], what) || !need_root(what) {
        return;
    }
    let scene = Scene::new(what, 64 * MIB);
    let Some(disk) = Attached::new(&scene.server().uri("vm"), &scene.site.path("disk")) else {
        return skipped(what, "there are no loop devices over FUSE here");
    };
    Run::new("mkfs.ext4").arg("-q").arg(disk.device()).ok();
    let place = scene.site.path("mounted");
    let Some(_mount) = Mount::new(&[], disk.device(), &place) else {
        return skipped(what, "mounts are not allowed here");
    };
    let (guest, socket) = match real_agent(&scene.site, &place) {
        Ok(guest) => guest,
        Err(why) => return skipped(what, &why),
    };
    let hook = shipped("qemu-guest-agent", &socket);
    // Nothing is flushed by the guest itself.
    std::fs::write(place.join("before"), "without a hook").expect("a write");
    scene.sync(&[]).ok();
    assert!(needs_recovery(&scene.replica), "a copy of a file system at work");
    for round in 0..3 {
        let said = format!("round {round}");
        std::fs::write(place.join("said"), &said).expect("a write");
        scene.sync(&["--hook", &hook]).ok();
        assert!(!needs_recovery(&scene.replica), "{said}: it was not frozen at the cut");
        let found = Run::new("debugfs").args(["-R", "cat /said"]).arg(&scene.replica).ok();
        assert_eq!(String::from_utf8_lossy(&found.stdout), said, "what was written before the freeze");
    }
    let (tell, thawed) = channel();
    std::thread::spawn(move || tell.send(std::fs::write(place.join("after"), "thawed").is_ok()));
    assert!(thawed.recv_timeout(Duration::from_secs(60)).expect("a guest that is thawed"));
    drop(guest);
}

#[test]
fn a_guest_of_libvirt_is_thawed_whatever_happens() {
    let scene = Scene::synced("the hook for libvirt", 16 * MIB);
    let calls = scene.site.path("calls");
    let virsh = scene.site.path("virsh");
    let text =
        format!("#!/bin/sh\n[ $2 != domfsfreeze ] || sleep 2\necho \"$2 $3\" >> {}\n", calls.display());
    std::fs::write(&virsh, text).expect("a script");
    Run::new("chmod").arg("755").arg(&virsh).ok();
    let hook = shipped("libvirt", Path::new("vm"));
    let hook = format!("PATH={}:$PATH {hook}", scene.site.dir().display());
    let thawed = |what: &str| {
        until(what, || {
            std::fs::read_to_string(&calls).is_ok_and(|text| text == "domfsfreeze vm\ndomfsthaw vm\n")
        });
        std::fs::remove_file(&calls).expect("the calls");
    };
    scene.sync(&["--hook", &hook]).ok();
    thawed("a sync");
    // Killed before the freeze has ended.
    scene.sync(&["--hook", &hook, "--hook-limit", "900ms"]).code(1);
    until("a thaw", || std::fs::read_to_string(&calls).is_ok_and(|text| text.contains("domfsthaw vm")));
}
