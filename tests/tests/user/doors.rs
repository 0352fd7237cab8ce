//! What an ordinary user of the host can do to root's dsync, and what a pinned peer can: each test has what another user tries.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use dsync_tests::listener::{HOST, Listening, Offering, key, trust};
use dsync_tests::{Run, Scene, Site, need_root, until};
use rustix::process::{Gid, Uid};

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
        server.signal(rustix::process::Signal::TERM);
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
