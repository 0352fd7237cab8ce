//! Two sites without ssh: keys, `dsync receive --listen`, and destinations over TLS, on loopback.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::listener::{HOST, Listening, key, trust};
use dsync_tests::scene::{fingerprints, number};
use dsync_tests::{Scene, Site, image, until};
use rustix::process::Signal;

/// Runs the command that a message ends with, as one who pastes it would.
fn paste(site: &Site, message: &str) {
    let line = message.lines().find_map(|line| line.split_once("run: ")).expect("a command").1;
    let line = line.replace("NAME", "near");
    site.dsync(line.strip_prefix("dsync ").expect("dsync").split_whitespace()).ok();
}

#[test]
fn two_sites_need_six_commands() {
    let mut scene = Scene::new("two sites without ssh", 64 << 20);
    let far = Listening::new(&[]);
    trust(&scene.site, HOST, &far.site, &[]);
    // As words, without quotes, it is the same.
    let words = key(&scene.site);
    far.site.dsync(["key", "trust", "near"]).args(words.split(' ')).args(["--for", "serve"]).ok();
    // Also under the name that the option had before.
    far.sync(&scene, &["--lanes", "3"]).ok();
    image::assert_equal(&scene.image, &far.replica());
    let changed = scene.change(50);
    let summary = far.sync(&scene, &[]).ok().summary();
    assert_eq!(summary["method"], "tracked");
    assert_eq!(number(&summary, "blocks_changed"), changed.len() as u64);
    image::assert_equal(&scene.image, &far.replica());
    let verify = scene.site.dsync(["verify", "--json"]).arg(&scene.image).arg(far.destination("vm.raw"));
    assert_eq!(number(&verify.ok().summary(), "bytes_changed_since"), 0);
    far.says(&["near", "SHA256:", "session ended"]);
    let list = scene.site.dsync(["key", "list"]).ok().text();
    assert!(list.contains(HOST) && list.contains("SHA256:"), "{list}");
    // An absolute path within the folder is as good.
    let absolute = far.destination(far.replica().to_str().expect("a name"));
    let summary = far.sync_to(&scene, &absolute, &[]).ok().summary();
    assert_eq!(number(&summary, "blocks_changed"), 0);
}

#[test]
fn who_is_not_known_is_refused_and_told_what_to_do() {
    let scene = Scene::new("unknown keys", 16 << 20);
    let mut far = Listening::new(&[]);
    let refused = far.sync(&scene, &[]).code(4);
    refused.says(&["not pinned here", "SHA256:", "key trust 127.0.0.1 dsync-ed25519 "]);
    paste(&scene.site, &refused.stderr);
    far.sync(&scene, &[]).code(4).says(&["does not accept this host's key", "dsync key trust"]);
    let own = format!("dsync --state-dir {} key trust NAME", far.site.state().display());
    far.says(&[HOST, "not pinned here", "SHA256:", &own]);
    assert!(fingerprints(&far.replica()).is_empty(), "nothing was written");
    paste(&far.site, &far.process().stderr_so_far());
    far.sync(&scene, &[]).ok();
    image::assert_equal(&scene.image, &far.replica());

    // What is forgotten, or has expired, counts at once.
    far.site.dsync(["key", "forget", "near"]).ok();
    far.sync(&scene, &[]).code(4).says(&["does not accept"]);
    trust(&far.site, "near", &scene.site, &["--expires", "2001-09-09"]);
    far.sync(&scene, &[]).code(4).says(&["does not accept"]);
    far.says(&["near", "has expired", "key trust near"]);
    trust(&far.site, "near", &scene.site, &["--expires", "1d"]);
    far.sync(&scene, &[]).ok();
    // A mirror ends when its key is trusted no longer, whether its session is open then or not: asking again does not help.
    for open in [true, false] {
        let mirror = scene.site.dsync(["mirror"]).arg(&scene.image).arg(far.destination("vm.raw"));
        let mut mirror = mirror.start();
        mirror.wait_to_say("mirroring to");
        far.site.dsync(["key", "forget", "near"]).ok();
        if !open {
            far.kill();
            far.start(&[]);
        }
        let ended = mirror.output(Duration::from_secs(60));
        assert_eq!(ended.status.code(), Some(4), "{ended}");
        ended.says(&["does not accept this host's key", "dsync key trust"]);
        assert!(!ended.stderr.contains("retrying") || !open, "{ended}");
        if open {
            far.says(&["near", "session failed", "no longer trusted here", "key trust near"]);
        }
        trust(&far.site, "near", &scene.site, &[]);
        far.sync(&scene, &[]).ok();
    }
    // So does a transfer, when the time is over for which the key was trusted.
    trust(&far.site, "near", &scene.site, &["--expires", "2s"]);
    let slow = far.sync_to(&scene, &far.destination("slow.raw"), &["--bwlimit", "100K"]);
    slow.code(4).says(&["does not accept this host's key"]);
    far.says(&["near", "session failed", "has expired"]);
    trust(&far.site, "near", &scene.site, &[]);
    trust(&scene.site, HOST, &far.site, &["--expires", "0s"]);
    far.sync(&scene, &[]).code(4).says(&["has expired", "key trust 127.0.0.1"]);
    assert!(scene.site.dsync(["key", "list"]).ok().text().contains("EXPIRED"));
}

#[test]
fn another_key_under_the_same_name_is_loud() {
    let scene = Scene::new("a swapped key", 16 << 20);
    let mut far = Listening::for_near(&scene.site);
    far.sync(&scene, &[]).ok();
    let before = fingerprints(&far.replica());
    far.kill();
    std::fs::remove_file(far.site.state().join("keys/own")).expect("a key");
    far.start(&[]);
    let refused = far.sync(&scene, &[]).code(4);
    refused.says(&["THE KEY OF", "HAS CHANGED", "key forget 127.0.0.1"]);
    assert_eq!(before, fingerprints(&far.replica()));
    let theirs = key(&far.site);
    let again = || scene.site.dsync(["key", "trust", HOST, &theirs, "--for", "push"]);
    again().code(4).says(&["another key", "dsync key forget"]);
    scene.site.dsync(["key", "forget", HOST]).ok();
    again().ok();
    far.sync(&scene, &[]).ok();
}

#[test]
fn clients_reach_nothing_but_the_folder() {
    let scene = Scene::new("paths out of the folder", 16 << 20);
    let mut far = Listening::for_near(&scene.site);
    let outside = far.site.path("outside");
    std::fs::create_dir(&outside).expect("a folder");
    let link = |to: &Path, name: &str| {
        std::os::unix::fs::symlink(to, far.folder().join(name)).expect("a link");
    };
    std::fs::write(outside.join("file"), "precious").expect("a file");
    link(&outside, "link");
    link(&outside.join("file"), "file");
    link(&outside.join("new"), "new");
    let before = fingerprints(&outside.join("x"));
    let refused = |path: &str, options: &[&str]| {
        let refused = far.sync_to(&scene, &far.destination(path), options).code(4);
        refused.says(&["not allowed for remote clients"]);
        assert_eq!(fingerprints(&outside.join("x")), before, "{path}");
    };
    let absolute = outside.join("vm.raw").display().to_string();
    for path in
        ["../outside/vm.raw", "a/../../outside/vm.raw", "link/vm.raw", "file", "new", &absolute, "..", "."]
    {
        refused(path, &[]);
    }
    let elsewhere = outside.display().to_string();
    refused("vm.raw", &["--journal-dir", &elsewhere]);
    refused("vm.raw", &[&format!("--digests={elsewhere}/digests")]);
    far.sync(&scene, &["--digests"]).ok();
    refused(".vm.raw.dsync/lineage", &[]);
    refused("vm.raw.partial", &[]);
    std::fs::create_dir(far.folder().join(".ssh")).expect("a folder");
    for path in [".ssh/authorized_keys", ".bashrc", "new\nline.raw", "new\u{1b}[2J.raw", "\u{202e}war.mv"] {
        refused(path, &[]);
    }
    image::assert_equal(&scene.image, &far.replica());
    // To read is to reach too.
    let verify = scene.site.dsync(["verify"]).arg(&scene.image).arg(far.destination("link/file"));
    verify.code(4).says(&["not allowed for remote clients"]);
    // Unless its user says so.
    far.kill();
    far.start(&["--hidden-files"]);
    far.sync_to(&scene, &far.destination(".hidden.raw"), &[]).ok();
    image::assert_equal(&scene.image, &far.folder().join(".hidden.raw"));
    far.sync_to(&scene, &far.destination(".hidden.raw\n"), &[]).code(4);
}

/// A peer may overwrite replicas in the folder, and no disk that took over there: who is on that host gives it up first.
#[test]
fn no_peer_gives_up_a_source() {
    let mut scene = Scene::new("a source behind a listener", 16 << 20);
    let far = Listening::for_near(&scene.site);
    far.sync(&scene, &[]).ok();
    let replica = far.replica();
    far.site.dsync(["promote", "--force"]).arg(&replica).ok();
    let server = far.site.serve(&[&replica], &[]);
    server.client("vm").write(0, &[7; 4096]).expect("a write");
    server.stop();
    scene.change(3);
    let held = std::fs::read(&replica).expect("a disk");
    let way = format!("run \"dsync demote {}\" there first", replica.display());
    let refused = far.sync(&scene, &["--discard-there"]).code(4);
    refused.says(&["no remote client may give up", &way]);
    far.site.dsync(["demote"]).arg(&replica).ok();
    let file = far.site.path("saved.delta").display().to_string();
    far.sync(&scene, &["--save-there", &file]).code(4).says(&["not allowed for remote clients"]);
    assert!(std::fs::read(&replica).expect("a disk") == held, "something was given up");
    far.sync(&scene, &[]).code(4).says(&["was demoted at epoch", "--discard-there"]);
    far.sync(&scene, &["--discard-there"]).ok();
    image::assert_equal(&scene.image, &replica);
}

/// What ends in order is logged as that, whatever was to be done.
#[test]
fn nothing_to_do_is_a_session_that_ended_well() {
    let scene = Scene::new("nothing to do over tls", 16 << 20);
    let mut far = Listening::for_near(&scene.site);
    far.sync(&scene, &[]).ok();
    for round in 0..8 {
        let verify = scene.site.dsync(["verify", "-q"]).arg(&scene.image).arg(far.destination("vm.raw"));
        for run in [far.sync(&scene, &[]), far.sync(&scene, &["-n"]), verify] {
            let output = run.ok();
            assert_eq!(output.stderr, "", "round {round}: {output}");
        }
    }
    let mut process = far.take();
    process.signal(Signal::TERM);
    let log = process.output(Duration::from_secs(20)).stderr;
    assert_eq!(log.matches("session ended").count(), 25, "{log}");
    assert!(!log.contains("failed"), "{log}");
}

/// Carries connections to a port, and cuts them all after so many bytes towards it, once as many have arrived `there` but for 4 MiB.
fn cutting(port: u16, bytes: u64, there: PathBuf) -> u16 {
    let listener = TcpListener::bind((HOST, 0)).expect("a port");
    let here = listener.local_addr().expect("an address").port();
    let left = std::sync::Arc::new(std::sync::atomic::AtomicI64::new(bytes as i64));
    let all = std::sync::Arc::new(std::sync::Mutex::new(Vec::<TcpStream>::new()));
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect((HOST, port)).expect("the listener");
            for (mut from, mut to, counts) in [
                (near.try_clone().expect("a socket"), far.try_clone().expect("a socket"), true),
                (far, near, false),
            ] {
                all.lock().expect("no panic").push(from.try_clone().expect("a socket"));
                let (left, all, there) = (left.clone(), all.clone(), there.clone());
                std::thread::spawn(move || {
                    let mut buf = [0; 1 << 16];
                    while let Ok(len @ 1..) = from.read(&mut buf) {
                        if counts
                            && left.fetch_sub(len as i64, std::sync::atomic::Ordering::SeqCst) < len as i64
                        {
                            until("what was sent arrives", || image::space(&there) + (4 << 20) >= bytes);
                            for socket in all.lock().expect("no panic").iter() {
                                let _ = socket.shutdown(Shutdown::Both);
                            }
                            return;
                        }
                        if to.write_all(&buf[..len]).is_err() {
                            return;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    here
}

#[test]
fn a_cut_transfer_goes_on() {
    let mut scene = Scene::new("a cut over tls", 64 << 20);
    let mut far = Listening::for_near(&scene.site);
    let mut client = scene.client();
    for at in 0..24 {
        client.write(at << 20, &scene.random.bytes(1 << 20)).expect("a write");
    }
    client.close().expect("the end");
    let port = cutting(far.port(), 10 << 20, far.replica().with_file_name("vm.raw.partial"));
    let through = format!("tls://{HOST}:{port}/vm.raw");
    far.sync_to(&scene, &through, &["--connections", "3"]).code(1).says(&["was cut"]);
    far.says(&["near", "session failed"]);
    let summary = far.sync(&scene, &[]).ok().summary();
    assert_eq!(summary["resumed"], true, "{summary}");
    let sent = number(&summary, "bytes_sent");
    let all = image::space(&scene.image);
    // What was under way on the connections is lost with them.
    assert!(sent + (1 << 20) < all, "what had arrived was sent again: {sent} of {all}");
    image::assert_equal(&scene.image, &far.replica());

    // The same when the listener is told to end in the middle of one, and when it is killed.
    for signal in [Signal::TERM, Signal::KILL] {
        let mut client = scene.client();
        for at in 0..16 {
            client.write(at << 20, &scene.random.bytes(1 << 20)).expect("a write");
        }
        client.close().expect("the end");
        let mut syncing = far.sync(&scene, &["--bwlimit", "4M"]).start();
        let arriving = far.replica().with_file_name(".vm.raw.dsync").join("journal");
        dsync_tests::until("it arrives", || {
            std::fs::metadata(&arriving).is_ok_and(|file| file.len() > 1 << 20)
        });
        let mut process = far.take();
        process.signal(signal);
        let ended = process.output(Duration::from_secs(20));
        assert_eq!(ended.status.success(), signal == Signal::TERM, "{ended}");
        let status = syncing.wait_for(Duration::from_secs(30)).expect("an end");
        assert_eq!(status.code(), Some(1));
        far.start(&[]);
        far.sync(&scene, &[]).ok();
        image::assert_equal(&scene.image, &far.replica());
    }
}

#[test]
fn a_mirror_outlives_its_listener() {
    let mut scene = Scene::new("a mirror over tls", 32 << 20);
    let mut far = Listening::for_near(&scene.site);
    let mut mirror = scene
        .site
        .dsync(["mirror", "--json", "-v", "--connections", "2"])
        .arg(&scene.image)
        .arg(far.destination("vm.raw"))
        .start();
    mirror.wait_to_say("mirroring to");
    for signal in [Signal::KILL, Signal::TERM] {
        scene.change(200);
        let mut process = far.take();
        process.signal(signal);
        process.output(Duration::from_secs(20));
        scene.change(200);
        far.start(&[]);
        let until = Instant::now() + Duration::from_secs(60);
        while image::first_difference(&scene.image, &far.replica()).is_some() {
            assert!(Instant::now() < until, "it is not caught up: {}", mirror.stderr_so_far());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    mirror.signal(Signal::TERM);
    let output = mirror.output(Duration::from_secs(30));
    assert!(output.status.success(), "{output}");
    assert!(number(&output.summary(), "broken") >= 2, "{output}");
    image::assert_equal(&scene.image, &far.replica());
}

#[test]
fn a_replica_in_use_is_refused_and_others_are_not() {
    let scene = Scene::new("two at once", 64 << 20);
    let far = Listening::for_near(&scene.site);
    let slow = far.sync(&scene, &["--bwlimit", "1M"]).start();
    let lock = far.folder().join(".vm.raw.dsync/lock");
    let until = Instant::now() + Duration::from_secs(20);
    while !lock.exists() {
        assert!(Instant::now() < until, "no session begins");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    far.sync(&scene, &[]).code(6);
    // Meanwhile somebody talks nonsense to the port, and another replica is made.
    let mut nonsense = TcpStream::connect((HOST, far.port())).expect("the listener");
    nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("a write");
    far.sync_to(&scene, &far.destination("other.raw"), &[]).ok();
    image::assert_equal(&scene.image, &far.folder().join("other.raw"));
    far.says(&[HOST, "not TLS"]);
    drop(slow);
}

#[test]
fn wrong_usage_names_the_way_out() {
    let site = Site::new();
    site.dsync(["receive", "--listen", HOST]).code(2).says(&["--into"]);
    site.dsync(["receive", "--listen", "here", "--into", "."]).code(2).says(&["use a form like"]);
    std::fs::write(site.path("file"), "").expect("a file");
    site.dsync(["receive", "--listen", HOST, "--into", "file"]).code(4).says(&["neither a folder nor"]);
    let taken = TcpListener::bind((HOST, 0)).expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    site.dsync(["receive", "--listen", &address, "--into", "."])
        .code(1)
        .says(&["cannot listen on", &address]);
    for wrong in ["tls://backup", "tls://:1/x", "tls://backup:x/y"] {
        site.dsync(["sync", "file", wrong])
            .code(2)
            .says(&["invalid source or destination", "tls://HOST/PATH"]);
    }
    let trust = |key: &str| site.dsync(["key", "trust", "backup", "--for", "push", key]);
    trust("ssh-ed25519 AAAA").code(1).says(&["invalid key"]);
    site.dsync(["key", "forget", "nobody"]).code(1).says(&["nobody"]);
    trust(&key(&site)).args(["--expires", "soon"]).code(2).says(&["use a form like"]);
    let json = site.dsync(["key", "--json"]).ok().summary();
    assert!(key(&site).starts_with(json["key"].as_str().expect("a key")));
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(site.state().join("keys/own")).expect("a key").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
}
