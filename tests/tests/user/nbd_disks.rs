//! Disks behind the NBD servers that people use: as destination and as source, with what servers lack, and what becomes of them.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::{Background, Random, Run, Scene, Site, need, rounds, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// A server with one export on a socket, which may be ended and started again.
struct Export {
    socket: PathBuf,
    process: Option<Background>,
}

impl Export {
    fn new(site: &Site) -> Export {
        Export { socket: site.socket("export"), process: None }
    }

    /// QEMU's server of an image.
    fn of(site: &Site, image: &Path, options: &[&str]) -> Export {
        let mut export = Export::new(site);
        export.start(image, options);
        export
    }

    fn start(&mut self, image: &Path, options: &[&str]) {
        let server = Run::new("qemu-nbd").args(["-t", "-f", "raw", "--discard=unmap"]).args(options);
        self.run(server.arg("-k").arg(&self.socket).arg(image));
    }

    /// nbdkit, with what follows its socket.
    fn nbdkit(site: &Site, words: &[&str]) -> Export {
        let mut export = Export::new(site);
        let server = Run::new("nbdkit").args(["-f", "-U"]).arg(&export.socket).args(words);
        export.run(server);
        export
    }

    fn run(&mut self, server: Run) {
        let mut process = server.start();
        until("the server listens", || {
            assert!(process.ended().is_none(), "the server ended: {}", process.stderr_so_far());
            UnixStream::connect(&self.socket).is_ok()
        });
        self.process = Some(process);
    }

    fn kill(&mut self) {
        self.process.take().expect("a server").killed();
        let _ = std::fs::remove_file(&self.socket);
    }

    fn stop(&mut self) {
        let mut process = self.process.take().expect("a server");
        process.signal(Signal::TERM);
        process.wait_for(Duration::from_secs(30)).expect("the end");
        let _ = std::fs::remove_file(&self.socket);
    }

    fn uri(&self) -> PathBuf {
        format!("nbd+unix:///?socket={}", self.socket.display()).into()
    }
}

/// An image with something in it, and an empty one of its size.
fn images(site: &Site, random: &mut Random) -> [PathBuf; 2] {
    let images = [site.image("vm.raw", SIZE), site.image("back.raw", SIZE)];
    image::scribble(&images[0], 3 * MIB, 5 * MIB, random);
    images
}

fn verify(site: &Site, source: &Path, replica: &Path) -> Run {
    site.dsync(["verify", "--json"]).arg(source).arg(replica)
}

#[test]
fn a_replica_behind_a_server_is_followed_verified_and_rewound() {
    if !need(&["qemu-nbd", "nbdinfo"], "replicas behind QEMU's server") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("a replica behind a server"));
    let [vm, back] = images(&site, &mut random);
    let export = Export::of(&site, &back, &[]);
    let uri = export.uri();
    let size = Run::new("nbdinfo").arg("--size").arg(&uri).ok();
    assert_eq!(String::from_utf8(size.stdout).unwrap().trim(), SIZE.to_string());
    assert_eq!(site.sync(&vm, &uri, &["--keep", "1h"]).ok().summary()["method"], "copy");
    image::assert_equal(&vm, &back);
    let before = site.path("before.raw");
    image::copy(&vm, &before);
    image::scribble(&vm, 20 * MIB + 100, 5000, &mut random);
    assert_eq!(site.sync(&vm, &uri, &[]).ok().summary()["method"], "compare");
    image::assert_equal(&vm, &back);
    verify(&site, &vm, &uri).ok();
    assert!(site.dsync(["status"]).arg(&uri).ok().text().contains("consistent, at epoch"));
    // What others change behind the server, its samples tell or a verification.
    image::scribble(&back, 25 * MIB, BLOCK, &mut random);
    verify(&site, &vm, &uri).code(5);
    site.dsync(["verify", "--repair"]).arg(&vm).arg(&uri).ok();
    image::assert_equal(&vm, &back);
    site.dsync(["rewind"]).arg(&uri).args(["--to", "1"]).ok();
    image::assert_equal(&before, &back);
    site.sync(&vm, &uri, &[]).ok();
    image::assert_equal(&vm, &back);
    for command in ["promote", "demote"] {
        site.dsync([command]).arg(&uri).code(4);
    }
    site.dsync(["track", "add"]).arg(&uri).code(4).says(&["behind an NBD server"]);
    site.dsync(["forget"]).arg(&uri).ok();
}

#[test]
fn what_is_no_fit_destination_is_refused_and_named() {
    if !need(&["qemu-nbd", "nbdkit"], "destinations that are refused") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("unfit destinations"));
    let [vm, back] = images(&site, &mut random);
    let mut export = Export::of(&site, &back, &["-r"]);
    let uri = export.uri();
    site.sync(&vm, &uri, &[]).code(4).says(&["read-only"]);
    export.stop();
    site.sync(&vm, &uri, &[]).code(1).says(&["cannot reach", "start its NBD server"]);
    export.start(&back, &[]);
    site.sync(&vm, &uri, &[]).ok();
    export.stop();

    // Another disk under the old name, and the old one with another size.
    let other = site.image("other.raw", SIZE);
    export.start(&other, &[]);
    site.sync(&vm, &uri, &[]).code(4).says(&["another disk"]);
    assert!(image::first_difference(&other, &site.image("empty.raw", SIZE)).is_none(), "it was written to");
    export.stop();
    std::fs::File::options().write(true).open(&back).unwrap().set_len(SIZE / 2).unwrap();
    export.start(&back, &[]);
    site.sync(&vm, &uri, &[]).code(4).says(&["its size has changed from 32.0 MiB", "to 16.0 MiB"]);
    export.stop();

    // A disk with something on it, and a server that makes nothing durable.
    image::scribble(&other, 0, BLOCK, &mut random);
    let [first, second] = [Site::new(), Site::new()];
    let export = Export::of(&first, &other, &[]);
    site.sync(&vm, &export.uri(), &[]).code(4).says(&["not a dsync replica"]);
    let script =
        ["eval", "get_size=echo 33554432", "pread=dd if=/dev/zero bs=$3 count=1", "pwrite=cat >/dev/null"];
    let lossy = Export::nbdkit(&second, &script);
    site.sync(&vm, &lossy.uri(), &[]).code(4).says(&["no flush"]);
    for wrong in ["nbd://", "nbds://backup/vm", "nbd+unix:///vm", "nbd+unix:///vm?socket=x"] {
        site.sync(&vm, Path::new(wrong), &[]).code(2).says(&["NBD URI"]);
    }
}

#[test]
fn a_server_may_lack_much() {
    if !need(&["nbdkit", "nbdcopy"], "servers that lack much") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("servers that lack much"));
    let [vm, read] = images(&site, &mut random);
    let memory = format!("size={SIZE}");
    let limits = [
        "--filter=blocksize-policy",
        "memory",
        &memory,
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=64K",
        "blocksize-error-policy=error",
    ];
    for words in [
        &["memory", &memory][..],
        &["--no-sr", "memory", &memory],
        &["--mask-handshake=0", "memory", &memory],
        &["--filter=nozero", "memory", &memory],
        &["--filter=noextents", "memory", &memory],
        &limits,
    ] {
        let place = Site::new();
        let export = Export::nbdkit(&place, words);
        let uri = export.uri();
        site.sync(&vm, &uri, &[]).ok();
        image::scribble(&vm, random.below(SIZE / BLOCK - 9) * BLOCK, 9 * BLOCK, &mut random);
        site.sync(&vm, &uri, &[]).ok();
        verify(&site, &vm, &uri).ok();
        Run::new("nbdcopy").arg("--request-size=65536").arg(&uri).arg(&read).ok();
        image::assert_equal(&vm, &read);
    }
}

#[test]
fn errors_of_a_server_end_the_sync_and_the_next_one_completes_it() {
    if !need(&["nbdkit", "nbdcopy"], "errors of NBD servers") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("errors of a server"));
    let [vm, read] = images(&site, &mut random);
    let (size, trigger) = (format!("size={SIZE}"), site.path("fail"));
    let file = format!("error-pwrite-file={}", trigger.display());
    let words = ["--filter=error", "memory", &size, "error-pwrite=ENOSPC", "error-pwrite-rate=50%", &file];
    let export = Export::nbdkit(&site, &words);
    let uri = export.uri();
    site.sync(&vm, &uri, &[]).ok();
    for _ in 0..3 {
        for _ in 0..20 {
            image::scribble(&vm, random.below(SIZE / BLOCK) * BLOCK, BLOCK, &mut random);
        }
        std::fs::write(&trigger, b"").unwrap();
        let failed = site.sync(&vm, &uri, &[]).output();
        assert!(!failed.status.success(), "{failed}");
        std::fs::remove_file(&trigger).unwrap();
        site.sync(&vm, &uri, &[]).ok();
        verify(&site, &vm, &uri).ok();
        Run::new("nbdcopy").arg("--request-size=65536").arg(&uri).arg(&read).ok();
        image::assert_equal(&vm, &read);
    }
}

/// An interrupted commit is completed only on the disk on which it began.
#[test]
fn another_disk_under_the_name_gets_nothing_of_an_interrupted_commit() {
    if !need(&["qemu-nbd", "nbdkit"], "interrupted commits behind NBD servers") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("interrupted commits"));
    let [vm, back] = images(&site, &mut random);
    let mut export = Export::of(&site, &back, &[]);
    let uri = export.uri();
    site.sync(&vm, &uri, &[]).ok();
    export.stop();
    image::scribble(&vm, MIB, BLOCK, &mut random);
    // The journal is whole, and no write arrives.
    let file = format!("file={}", back.display());
    let failing = ["--filter=error", "file", &file, "error-pwrite=EIO", "error-pwrite-rate=100%"];
    let mut failed = Export::nbdkit(&site, &failing);
    site.sync(&vm, &uri, &[]).code(1);
    failed.kill();
    let other = site.path("other.raw");
    image::random(&other, SIZE, &mut random);
    let before = image::fingerprint(&other).0;
    export.start(&other, &[]);
    site.sync(&vm, &uri, &[]).code(4).says(&["another disk"]);
    site.dsync(["recover"]).arg(&uri).code(4);
    assert_eq!(image::fingerprint(&other).0, before, "it was written to");
    export.stop();
    export.start(&back, &[]);
    site.dsync(["recover"]).arg(&uri).ok();
    image::assert_equal(&vm, &back);

    // Of a first copy nothing tells on which disk it began.
    export.stop();
    let (second, empty) = (site.image("second.raw", SIZE), site.image("empty.raw", SIZE));
    let mut export = Export { socket: site.socket("second"), process: None };
    let uri = export.uri();
    export.start(&second, &[]);
    let mut sync = site.sync(&vm, &uri, &["--bwlimit", "4M"]).start();
    until("the copy has begun", || image::space(&second) > 0);
    sync.kill();
    export.kill();
    export.start(&empty, &[]);
    site.sync(&vm, &uri, &[]).code(4).says(&["interrupted", "--adopt"]);
    assert_eq!(image::space(&empty), 0, "it was written to");
    site.sync(&vm, &uri, &["--adopt"]).ok();
    image::assert_equal(&vm, &empty);
}

/// One export has one replica, whatever name leads to its socket.
#[test]
fn a_link_to_the_socket_of_a_server_is_another_name_of_the_replica() {
    if !need(&["qemu-nbd"], "a link to the socket of an NBD server") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("a link to a socket"));
    let [vm, back] = images(&site, &mut random);
    let export = Export::of(&site, &back, &[]);
    let uri = export.uri();
    site.sync(&vm, &uri, &[]).ok();
    let (before, socket) = uri.to_str().and_then(|uri| uri.split_once("?socket=")).expect("a socket");
    let link = site.path("link");
    std::os::unix::fs::symlink(socket, &link).expect("a link");
    image::scribble(&vm, 9 * MIB, BLOCK, &mut random);
    site.sync(&vm, Path::new(&format!("{before}?socket={}", link.display())), &[]).ok();
    image::assert_equal(&vm, &back);
    site.sync(&vm, &uri, &[]).ok();
}

/// A server shows an older copy of the same source, which agrees with the newest in all but what the last delta changed.
#[test]
fn an_older_copy_under_the_name_gets_no_delta() {
    if !need(&["qemu-nbd"], "copies that are exchanged behind NBD servers") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("exchanged copies"));
    let [vm, back] = images(&site, &mut random);
    let mut export = Export::of(&site, &back, &[]);
    let uri = export.uri();
    let older = site.path("older.raw");
    for how in [&[][..], &["--commit", "in-place"], &[]] {
        std::fs::copy(&back, &older).expect("a copy");
        image::scribble(&vm, (1 + random.below(30)) * MIB + 5 * BLOCK, BLOCK, &mut random);
        site.sync(&vm, &uri, how).ok();
        // Nothing was written: what tells is what was written before.
        site.sync(&vm, &uri, &[]).ok();
        export.stop();
        let before = image::fingerprint(&older).0;
        export.start(&older, &[]);
        image::scribble(&vm, 2 * MIB, BLOCK, &mut random);
        site.sync(&vm, &uri, how).code(4).says(&["another disk"]);
        assert_eq!(image::fingerprint(&older).0, before, "it was written to");
        export.stop();
        export.start(&back, &[]);
        site.sync(&vm, &uri, how).ok();
        image::assert_equal(&vm, &back);
    }
}

/// The state of a replica was restored, and nothing tells what its server was given since.
#[test]
fn a_restored_state_of_an_export_is_not_believed() {
    if !need(&["qemu-nbd"], "a restored state of a replica behind an NBD server") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("a restored state of an export"));
    let [vm, back] = images(&site, &mut random);
    let export = Export::of(&site, &back, &[]);
    let uri = export.uri();
    site.sync(&vm, &uri, &["--keep-last", "5"]).ok();
    let saved = site.path("saved");
    let copy = |from: &Path, to: &Path| Run::new("cp").arg("-a").arg(from).arg(to).ok();
    copy(&site.state(), &saved);
    image::scribble(&vm, 9 * MIB, BLOCK, &mut random);
    site.sync(&vm, &uri, &[]).ok();
    std::fs::remove_dir_all(site.state()).expect("the state");
    copy(&saved, &site.state());
    site.sync(&vm, &uri, &[]).code(4).says(&["restored from a copy", "dsync verify --repair"]);
    site.sync(&vm, &uri, &["--adopt"]).ok();
    image::assert_equal(&vm, &back);
    image::scribble(&vm, 11 * MIB, BLOCK, &mut random);
    site.sync(&vm, &uri, &[]).ok();
    image::assert_equal(&vm, &back);
}

/// An older copy of the disk shows in none of the sixteen blocks: an adoption reads all of it, whatever digests say.
#[test]
fn what_is_adopted_is_read_in_spite_of_digests() {
    if !need(&["qemu-nbd"], "digests of disks behind NBD servers") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("digests of exports"));
    let [vm, back] = images(&site, &mut random);
    let mut export = Export::of(&site, &back, &[]);
    let uri = export.uri();
    site.sync(&vm, &uri, &["--method", "compare", "--digests", "--adopt=overwrite"]).ok();
    let old = site.path("old.raw");
    image::copy(&back, &old);
    image::scribble(&vm, 5 * BLOCK, BLOCK, &mut random);
    let again = site.sync(&vm, &uri, &["--method", "compare", "--digests"]).ok().summary();
    assert_eq!(again["digests"], "used", "{again}");
    export.stop();
    export.start(&old, &[]);
    site.sync(&vm, &uri, &["--adopt", "--digests"]).ok();
    image::assert_equal(&vm, &old);
}

#[test]
fn a_source_behind_a_server_is_compared_each_time() {
    if !need(&["qemu-nbd"], "sources behind NBD servers") {
        return;
    }
    let (site, mut random) = (Site::new(), Random::new("a source behind a server"));
    let [vm, _] = images(&site, &mut random);
    let replica = site.path("copy.raw");
    let mut export = Export::of(&site, &vm, &["-r"]);
    let uri = export.uri();
    assert_eq!(site.sync(&uri, &replica, &[]).ok().summary()["method"], "copy");
    image::assert_equal(&vm, &replica);
    verify(&site, &uri, &replica).ok();
    let delta = site.dsync(["extract", "--since", "0"]).arg(&uri).ok();
    site.dsync(["merge"]).arg(site.path("merged.raw")).input(delta.stdout).ok();
    image::assert_equal(&vm, &site.path("merged.raw"));
    // Nothing shows that the server has another moment by now: it is looked for.
    export.stop();
    image::scribble(&vm, 9 * MIB, BLOCK, &mut random);
    export.start(&vm, &["-r"]);
    assert_eq!(site.sync(&uri, &replica, &[]).ok().summary()["method"], "compare");
    image::assert_equal(&vm, &replica);
    site.dsync(["mirror"]).arg(&uri).arg(&replica).code(4).says(&["where nobody records writes"]);
    assert!(site.dsync(["status"]).ok().text().contains("nbd+unix:"));
    export.stop();
    site.sync(&uri, &replica, &[]).code(1).says(&["cannot reach source", "start its NBD server"]);
    export.start(&vm, &[]);
    site.sync(&uri, &replica, &[]).code(4).says(&["read-only", "of no one moment"]);
    export.stop();
    std::fs::File::options().write(true).open(&vm).unwrap().set_len(SIZE / 2).unwrap();
    export.start(&vm, &["-r"]);
    site.sync(&uri, &replica, &[]).code(4).says(&["shrank", "--allow-shrink"]);
}

#[test]
fn a_view_of_our_own_server_is_a_source() {
    let mut scene = Scene::new("a view as a source", SIZE);
    let uri = PathBuf::from(scene.server().uri("vm@view"));
    scene.site.sync(&uri, &scene.replica, &[]).ok();
    scene.equal();
    scene.change(20);
    scene.site.sync(&uri, &scene.replica, &[]).ok();
    scene.equal();
}

#[test]
fn a_mirror_waits_for_a_server_that_comes_back() {
    if !need(&["qemu-nbd"], "mirrors to NBD servers") {
        return;
    }
    let mut scene = Scene::new("a mirror to a server", SIZE);
    let back = scene.site.image("back.raw", SIZE);
    let mut export = Export::of(&scene.site, &back, &[]);
    scene.replica = export.uri();
    let mut mirror = scene
        .site
        .dsync(["mirror", "-v"])
        .arg(&scene.image)
        .arg(&scene.replica)
        .args(["--rpo", "1s"])
        .start();
    mirror.wait_to_say("mirroring to");
    let mut noticed = 0;
    for round in 0..3 {
        scene.change(50);
        until("the replica has it", || image::first_difference(&scene.image, &back).is_none());
        export.kill();
        scene.change(50);
        // Now and then it notices only later.
        if round != 1 {
            until("the mirror notices", || mirror.stderr_so_far().matches("cannot reach").count() > noticed);
            noticed = mirror.stderr_so_far().matches("cannot reach").count();
        }
        export.start(&back, &[]);
    }
    until("the replica has it", || image::first_difference(&scene.image, &back).is_none());
    mirror.signal(Signal::TERM);
    let output = mirror.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    verify(&scene.site, &scene.image, &scene.replica).ok();
}

#[test]
fn an_export_is_reached_from_another_host() {
    if !need(&["qemu-nbd"], "exports on another host") {
        return;
    }
    let (mut scene, far) = (Scene::new("an export there", SIZE), Far::new(RSH));
    let back = far.site.image("back.raw", SIZE);
    let export = Export::of(&far.site, &back, &[]);
    let name = format!("far:{}", export.uri().display());
    for _ in 0..2 {
        far.run_to(&name, "sync", &scene, &[], None).ok();
        image::assert_equal(&scene.image, &back);
        far.run_to(&name, "verify", &scene, &[], None).ok();
        scene.change(20);
    }
}

/// Server and dsync are killed at any moment: what the next commands make of it is the source, or they refuse.
#[test]
fn both_ends_are_killed_at_any_moment() {
    if !need(&["qemu-nbd"], "kills of NBD servers") {
        return;
    }
    let mut scene = Scene::new("kills of NBD servers", SIZE);
    let back = scene.site.image("back.raw", SIZE);
    let mut export = Export::of(&scene.site, &back, &[]);
    scene.replica = export.uri();
    let first = scene.sync(&[]).ok();
    for round in 0..rounds(8, 100) {
        scene.change(1000);
        // A copy writes all of the blocks by which the disk is known.
        let how = if round % 2 == 0 { &["--method", "copy"][..] } else { &[] };
        let mut sync = scene.sync(how).start();
        std::thread::sleep(first.time.mul_f64(scene.random.below(1500) as f64 / 1000.0));
        let dead = scene.random.below(3);
        if dead != 0 {
            export.kill();
        }
        match dead {
            1 => drop(sync.wait_for(Duration::from_secs(30)).expect("the end")),
            _ => sync.kill(),
        }
        if dead != 0 {
            export.start(&back, &[]);
        }
        if scene.random.one_in(2) {
            scene.site.dsync(["recover"]).arg(&scene.replica).ok();
        }
        scene.sync(&[]).ok();
        image::assert_equal(&scene.image, &back);
        verify(&scene.site, &scene.image, &scene.replica).ok();
    }
}
