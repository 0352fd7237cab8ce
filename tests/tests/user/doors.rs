//! What an ordinary user of the host can do to root's dsync, and what a pinned peer can: each test has what another user tries.

use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use dsync_tests::listener::{HOST, Listening, Offering, key, trust};
use dsync_tests::mount::Loop;
use dsync_tests::tracked::Tracked;
use dsync_tests::{Background, Run, Scene, Site, got, need, need_root, until};
use rustix::process::{Gid, Signal, Uid};
use testing::stalled::{StalledWrite, is_freezing};

const MIB: u64 = 1 << 20;
const NOBODY: u32 = 65534;

/// Does something as another user, who has no rights of root.
fn as_nobody<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let acting = || {
        let (uid, gid) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        rustix::thread::set_thread_groups(&[]).expect("no groups");
        rustix::thread::set_thread_res_gid(gid, gid, gid).expect("a group");
        rustix::thread::set_thread_res_uid(uid, uid, uid).expect("a user");
        act()
    };
    std::thread::scope(|scope| scope.spawn(acting).join()).expect("no panic")
}

/// Lets every user reach what is in these folders, so that only what dsync makes keeps them out.
fn open_to_all<'a>(folders: impl IntoIterator<Item = &'a Path>) {
    for folder in folders {
        std::fs::set_permissions(folder, PermissionsExt::from_mode(0o777)).expect("root may");
    }
}

/// `dsync` at a site in a shell that sets this umask.
fn with_umask(site: &Site, umask: &str) -> Run {
    let script = format!("umask {umask}; exec dsync \"$@\"");
    site.run("/bin/sh".as_ref()).args(["-c", &script, "sh"])
}

fn mode(path: &Path) -> u32 {
    path.metadata().expect("a file").permissions().mode() & 0o777
}

#[test]
fn sockets_let_in_their_owner_whatever_the_umask() {
    if !need_root("connections of another user") {
        return;
    }
    let site = Site::new();
    // Where paths are short enough for sockets.
    let (image, metrics, state) = (site.image("vm.raw", MIB), site.socket("metrics"), site.socket("s"));
    for (options, given) in [(&[][..], 0o600), (&["--socket-mode", "666"], 0o666)] {
        let socket = site.socket(&format!("nbd-{given:o}"));
        let serve = with_umask(&site, "0").args(["serve", "--socket"]).arg(&socket).arg(&image).args(options);
        let serve = serve.arg(format!("--metrics=unix:{}", metrics.display())).env("DSYNC_STATE_DIR", &state);
        let mut server = serve.start();
        server.wait_to_say("serving vm");
        let source = state.join("sources").read_dir().expect("sources");
        let source = source.map(|entry| entry.expect("an entry").path()).find(|path| path.is_dir());
        let source = source.expect("a source");
        open_to_all([socket.parent().expect("a folder"), &state, &*state.join("sources"), &source]);
        let control = source.join("control");
        for (path, expected) in [(&socket, given), (&control, 0o600), (&metrics, 0o600)] {
            assert_eq!(mode(path), expected, "{path:?}");
            let connected = as_nobody(|| UnixStream::connect(path).map(drop).map_err(|error| error.kind()));
            let lets_in = if expected == 0o666 { Ok(()) } else { Err(io::ErrorKind::PermissionDenied) };
            assert_eq!(connected, lets_in, "{path:?}");
        }
        server.signal(Signal::TERM);
        until("the server ends", || server.ended().is_some());
    }
}

/// A host to which this one sends may not read from it, nor write to it.
#[test]
fn a_key_that_is_pinned_to_push_to_is_no_client() {
    let (scene, far) = (Scene::new("roles", 4 * MIB), Listening::new(&[]));
    trust(&scene.site, HOST, &far.site, &["--for", "push"]);
    trust(&far.site, "near", &scene.site, &["--for", "serve"]);
    far.sync(&scene, &[]).ok();
    // The other way round.
    let offering = Offering::start(&scene.site, &[&scene.image], &[]);
    let into = scene.site.path("into");
    std::fs::create_dir(&into).expect("a folder");
    trust(&far.site, HOST, &scene.site, &["--for", "push,pull"]);
    let pull = || {
        let source = offering.source(scene.image.to_str().expect("a name"));
        far.site.dsync(["sync"]).arg(source).arg(far.site.path("pulled.raw"))
    };
    pull().code(4).says(&["does not accept this host's key", "--for serve"]);
    offering.says(&["the key of 127.0.0.1", "not for serve", "key trust 127.0.0.1 --for push,serve"]);
    // Its user says so, and need not paste the key again.
    scene.site.dsync(["key", "trust", HOST, "--for", "push,serve"]).ok();
    pull().ok();
    let list = scene.site.dsync(["key", "list"]).ok().text();
    assert!(list.contains("for push,serve"), "{list}");
    scene.site.dsync(["key", "trust", "x", &key(&far.site)]).code(2).says(&["--for"]);
}

/// A peer gets freezes as short as the offering host says, and the disk has time to work between them.
#[test]
fn a_peer_freezes_a_disk_for_a_tenth_of_the_time() {
    let what = "freezes for a peer";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (near, device) = (Site::new(), tracked.device());
    let offering = Offering::start(&tracked.site, &[device], &["--freeze-limit", "1s"]);
    trust(&near, HOST, &tracked.site, &[]);
    trust(&tracked.site, "vault", &near, &["--for", "serve"]);
    let source = offering.source(device.to_str().expect("a name"));
    let pull = || near.dsync(["sync", "--freeze-limit", "60"]).arg(&source).arg(near.path("copy.raw"));
    let Some(stalled) = StalledWrite::new(&tracked.place.join("stalled"), what) else { return };
    let pulling = pull().start();
    let process = Path::new("/proc").join(offering.process.pid().as_raw_nonzero().to_string());
    until("it freezes", || is_freezing(&process));
    std::thread::sleep(Duration::from_millis(1200));
    stalled.end();
    let failed = pulling.output(Duration::from_secs(20));
    assert_eq!(failed.status.code(), Some(4), "{failed}");
    failed.says(&["longer than its limit of 1000 ms"]);
    pull().arg("--wait=1s").code(6).says(&["gave up after waiting", "no more than a tenth of the time"]);
    // Nor does another listener freeze it.
    let other = Offering::start(&tracked.site, &[device], &[]);
    let source = other.source(device.to_str().expect("a name"));
    near.dsync(["sync"]).arg(source).arg(near.path("copy.raw")).code(6).says(&["a tenth of the time"]);
    // The host's own syncs are not held up.
    tracked.site.sync(device, &tracked.site.path("own.raw"), &["--freeze", "require"]).ok();
}

/// What a peer has started ends when it leaves, also where nothing is sent to it for long: its disk is free for the next.
#[test]
fn work_for_a_peer_that_has_left_ends() {
    let (mut scene, far) = (Scene::new("a peer that leaves", 16 * MIB), Listening::new(&[]));
    let near = Site::new();
    scene.change(2000);
    trust(&scene.site, HOST, &far.site, &[]);
    trust(&far.site, "near", &scene.site, &["--for", "serve"]);
    far.sync(&scene, &[]).ok();
    trust(&near, HOST, &scene.site, &[]);
    trust(&scene.site, "vault", &near, &["--for", "serve"]);
    let offering = Offering::start(&scene.site, &[&scene.image], &[]);
    let source = offering.source(scene.image.to_str().expect("a name"));
    near.dsync(["sync"]).arg(&source).arg(near.path("copy.raw")).ok();
    // At this rate the second chunk is read a minute after the first.
    let slow = |run: Run| run.args(["--rate", "16K"]);
    let pushed = || scene.site.dsync(["verify"]).arg(&scene.image).arg(far.destination("vm.raw"));
    let pulled = || near.dsync(["verify"]).arg(&source).arg(near.path("copy.raw"));
    let verifies: [(&Background, &dyn Fn() -> Run); 2] =
        [(far.process(), &pushed), (&offering.process, &pulled)];
    for (listener, verify) in verifies {
        let count = |word: &str| listener.stderr_so_far().matches(word).count();
        let (started, failed) = (count("session started"), count("session failed"));
        let client = slow(verify()).start();
        until("a session starts", || count("session started") > started);
        // By then it reads, and waits.
        std::thread::sleep(Duration::from_secs(1));
        client.killed();
        let left = Instant::now();
        until("the session ends", || count("session failed") > failed);
        assert!(left.elapsed() < Duration::from_secs(10), "it went on for {:?}", left.elapsed());
        verify().arg("--wait=10s").ok();
    }
}

/// A line that is cut without a word, as where a network goes away, ends them as well, and so does a peer that stands still.
#[test]
fn work_for_a_peer_that_has_fallen_silent_ends() {
    let (scene, far) =
        (Scene::new("a peer that stands still", 16 * MIB), Listening::new(&["--timeout", "2s"]));
    trust(&scene.site, HOST, &far.site, &[]);
    trust(&far.site, "near", &scene.site, &["--for", "serve"]);
    far.sync(&scene, &[]).ok();
    let command = |name: &str| scene.site.dsync([name]).arg(&scene.image).arg(far.destination("vm.raw"));
    let count = |word: &str| far.process().stderr_so_far().matches(word).count();
    let falls_silent = |mut client: Background| {
        let failed = count("session failed");
        client.signal(Signal::STOP);
        let silent = Instant::now();
        until("the session ends", || count("session failed") > failed);
        assert!(silent.elapsed() < Duration::from_secs(10), "it went on for {:?}", silent.elapsed());
        far.site.dsync(["recover"]).arg(far.replica()).ok();
        client.killed();
    };
    let started = count("session started");
    let verify = command("verify").args(["--rate", "16K"]).start();
    until("a session starts", || count("session started") > started);
    // By then it reads, and waits.
    std::thread::sleep(Duration::from_secs(1));
    falls_silent(verify);
    let mut mirror = command("mirror").start();
    mirror.wait_to_say("mirroring to");
    falls_silent(mirror);
}

/// A job runs commands as root: nobody else may have written it.
#[test]
fn a_job_that_others_may_write_is_refused() {
    if !need_root("jobs of another user") {
        return;
    }
    let site = Site::new();
    let folder = site.path("conf");
    std::fs::create_dir(&folder).expect("a folder");
    let (job, ran) = (folder.join("x.conf"), site.path("ran"));
    let text = format!(
        "command = sync\nsource = /nowhere\ndestination = /nowhere.copy\non-failure = touch {}\n",
        ran.display()
    );
    std::fs::write(&job, text).expect("a job");
    let refused = |place: &Path, why: &str| {
        site.dsync(["run", "x"]).code(4).says(&["jobs run commands", &place.display().to_string(), why]);
        assert!(!ran.exists(), "its command was run");
    };
    for place in [&job, &folder] {
        let usual = mode(place);
        for open in [0o020, 0o002] {
            std::fs::set_permissions(place, PermissionsExt::from_mode(usual | open)).expect("root may");
            refused(place, "chmod go-w");
        }
        std::fs::set_permissions(place, PermissionsExt::from_mode(usual)).expect("root may");
        chown(place, Some(NOBODY), None).expect("root may");
        refused(place, "belongs to another user");
        chown(place, Some(0), None).expect("root may");
    }
    site.dsync(["run", "x"]).output();
    assert!(ran.exists(), "a job of root's own is run");
}

#[test]
fn a_key_of_another_user_is_no_key() {
    if !need_root("keys of another user") {
        return;
    }
    let site = Site::new();
    site.dsync(["key"]).ok();
    for name in ["own", "pinned"] {
        let file = site.state().join("keys").join(name);
        let kept = std::fs::read(&file).unwrap_or_else(|_| b"[]".into());
        std::fs::write(&file, &kept).expect("a file");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).expect("root may");
        chown(&file, Some(NOBODY), None).expect("root may");
        let command = if name == "own" { &["key"][..] } else { &["key", "list"] };
        site.dsync(command).code(1).says(&["belongs to another user", "remove it"]);
        std::fs::remove_file(&file).expect("a file");
        std::os::unix::fs::symlink("/etc/hostname", &file).expect("a link");
        site.dsync(command).code(1);
        std::fs::remove_file(&file).expect("a link");
    }
    site.dsync(["key"]).ok();
}

/// A peer that may choose a name, or a user who has a folder, writes no lines of his own into what root reads.
#[test]
fn names_forge_no_line_and_move_no_cursor() {
    let site = Site::new();
    let source = site.image("vm.raw", MIB);
    let name = "a\nOK\r\u{1b}[2J\u{9b}\u{202e}\u{7f}.raw";
    let replica = site.path(name);
    site.sync(&source, &replica, &[]).ok();
    site.sync(&replica, &site.path("next.raw"), &[]).output();
    let replica = replica.as_os_str().as_bytes();
    let calls: [&[&str]; 4] =
        [&["status"], &["status", "--check"], &["status", "--prometheus"], &["status", "-v"]];
    for call in calls {
        let output = site.dsync(call).output();
        for text in [output.text(), output.stderr.clone()] {
            assert!(!text.contains(['\r', '\u{1b}', '\u{9b}', '\u{202e}', '\u{7f}']), "{call:?}: {text:?}");
            assert!(!text.lines().any(|line| line.starts_with("OK") && line.len() > 2), "{call:?}: {text:?}");
        }
    }
    assert!(site.dsync(["status"]).ok().text().contains("a\\nOK"), "{replica:?}");
}

#[test]
fn silent_clients_keep_no_scrape_out() {
    let site = Site::new();
    let (image, metrics) = (site.image("vm.raw", MIB), site.socket("metrics"));
    let _server = site.serve(&[&image], &[&format!("--metrics=unix:{}", metrics.display())]);
    let connect = || UnixStream::connect(&metrics).expect("a connection");
    let _silent: Vec<UnixStream> = (0..100).map(|_| connect()).collect();
    for _ in 0..3 {
        let (mut client, mut answer) = (connect(), String::new());
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("a request");
        client.read_to_string(&mut answer).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer:?}");
    }
}

#[test]
fn pins_of_another_user_are_not_believed() {
    let what = "pins of another user";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let site = Site::new();
    let pins = site.pins();
    if !got(std::fs::create_dir(pins), what) {
        return;
    }
    let device = Loop::new(&site.image("disk.raw", MIB));
    if !got(device.as_ref().ok_or("there is no free loop device"), what) {
        return;
    }
    let device = device.expect("a device");
    let refused = || {
        for call in [&["status", "--check"][..], &["track", "add", device.device().to_str().expect("a name")]]
        {
            let output = site.dsync(call).output();
            output.says(&["is not a folder of root's", "remove it"]);
            assert!(!output.status.success(), "{output}");
        }
    };
    chown(pins, Some(NOBODY), None).expect("root may");
    refused();
    chown(pins, Some(0), None).expect("root may");
    std::fs::set_permissions(pins, PermissionsExt::from_mode(0o777)).expect("root may");
    refused();
}

/// The folder of a replica belongs to a user who puts things of other kinds under the names of readers' logs.
#[test]
fn what_is_no_log_of_a_reader_stops_no_sync() {
    if !need_root("the folder of a replica that belongs to another user") {
        return;
    }
    let mut scene = Scene::synced("no logs", 4 * MIB);
    let name = scene.replica.file_name().expect("a name").to_string_lossy();
    let state = scene.replica.with_file_name(format!(".{name}.dsync"));
    for place in state
        .read_dir()
        .expect("the state")
        .map(|entry| entry.expect("an entry").path())
        .chain([state.clone()])
    {
        chown(place, Some(NOBODY), Some(NOBODY)).expect("root may");
    }
    open_to_all([scene.site.dir(), &state]);
    as_nobody(|| {
        std::fs::create_dir(state.join("view-x")).expect("a folder");
        std::fs::write(state.join("view-x/file"), "precious").expect("a file");
        std::os::unix::fs::symlink("/etc/hostname", state.join("view-y")).expect("a link");
        std::fs::write(state.join("view-z"), [0xff; 5000]).expect("a file");
    });
    for _ in 0..2 {
        scene.change(5);
        scene.sync(&[]).ok();
        scene.equal();
    }
    assert!(state.join("view-x/file").exists(), "a folder is not dsync's");
    // A promotion tells all readers.
    scene.site.dsync(["promote", "--force"]).arg(&scene.replica).ok();
}

const ACL: &str = "system.posix_acl_access";

/// Adds another user to who may write to a folder, as `setfacl -m u:nobody:rwx` does.
fn let_nobody_write(folder: &Path) -> io::Result<()> {
    // Its tags: the owner, a user, the group, the mask, others.
    let entries =
        [(1u16, 7u16, u32::MAX), (2, 7, NOBODY), (4, 5, u32::MAX), (16, 7, u32::MAX), (32, 5, u32::MAX)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        list.extend([&tag.to_le_bytes()[..], &rights.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    Ok(rustix::fs::setxattr(folder, ACL, &list, rustix::fs::XattrFlags::empty())?)
}

/// Who may write to a folder could exchange what is in it while root writes there.
#[test]
fn root_receives_into_no_folder_of_another_user() {
    if !need_root("folders of another user") {
        return;
    }
    let (scene, far) = (Scene::new("a folder of another user", 4 * MIB), Listening::new(&[]));
    trust(&scene.site, HOST, &far.site, &[]);
    trust(&far.site, "near", &scene.site, &[]);
    let way = ["other users may write to", "received here as root", "as the user whose folder it is"];
    let sub = far.folder().join("sub");
    std::fs::create_dir(&sub).expect("a folder");
    let sync = || far.sync_to(&scene, &far.destination("sub/vm.raw"), &[]);
    let modes = [(NOBODY, 0o755), (0, 0o777), (0, 0o1777), (0, 0o775), (0, 0o1775)];
    let cases = modes.map(|(owner, open)| (owner, open, false)).into_iter().chain([(0, 0o755, true)]);
    for (owner, open, listed) in cases {
        chown(&sub, Some(owner), None).expect("root may");
        std::fs::set_permissions(&sub, PermissionsExt::from_mode(open)).expect("root may");
        if listed && !got(let_nobody_write(&sub), "an access control list") {
            continue;
        }
        sync().code(4).says(&way);
        assert_eq!(sub.read_dir().expect("a folder").count(), 0);
        let receive = far.site.dsync(["receive", "--listen", "127.0.0.1:0", "--into"]).arg(&sub);
        receive.limit(Duration::from_secs(10)).code(4).says(&way);
    }
    let _ = rustix::fs::removexattr(&sub, ACL);
    std::fs::set_permissions(&sub, PermissionsExt::from_mode(0o755)).expect("root may");
    sync().ok();
}
