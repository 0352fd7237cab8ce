//! A system that gives no more: descriptors, file sizes. What cannot be done is said, and nobody hangs.

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::image::{self, BLOCK};
use dsync_tests::site::binary;
use dsync_tests::{Random, Run, Site, beyond, need, need_root};
use rustix::process::{Resource, Rlimit, prlimit};

const MIB: u64 = 1 << 20;
/// How long a client may send nothing.
const HANDSHAKE: Duration = Duration::from_secs(30);

/// Connects and waits for the greeting: true if it comes, false if the server closes the connection instead.
fn greeted(socket: &Path) -> (UnixStream, bool) {
    let mut stream = UnixStream::connect(socket).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
    let mut greeting = [0; 18];
    match stream.read(&mut greeting) {
        Ok(0) => (stream, false),
        Ok(_) => (stream, true),
        Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => (stream, false),
        Err(e) => panic!("neither a greeting nor an end: {e}"),
    }
}

#[test]
fn a_server_without_descriptors_turns_clients_away_and_says_so_once() {
    let site = Site::new();
    let image = site.image("vm.raw", MIB);
    let mut server = site.serve(&[&image], &[]);
    let mut early = server.client("vm");
    let usual = rustix::process::getrlimit(Resource::Nofile);
    // Some more than it has.
    let has = std::fs::read_dir(format!("/proc/{}/fd", server.id())).expect("its descriptors").count();
    let few = Rlimit { current: Some(has as u64 + 8), maximum: usual.maximum };
    let before = prlimit(Some(server.process().pid()), Resource::Nofile, few).expect("prlimit");
    let began = Instant::now();
    let clients: Vec<_> = (0..48).map(|_| greeted(server.socket())).collect();
    let turned_away = clients.iter().filter(|(_, greeted)| !greeted).count();
    assert!(turned_away > 0 && turned_away < clients.len(), "{turned_away} turned away");
    // Who is in stays in.
    early.write(0, &[7; 512]).expect("a write");
    // The state of the source is asked for by the same means: an error, but no wait.
    site.dsync(["status"]).limit(Duration::from_secs(60)).output();
    let said = server.process().stderr_so_far();
    // Once a minute.
    let times = said.matches("cannot accept a connection").count() as u64;
    assert!((1..=1 + began.elapsed().as_secs() / 60).contains(&times), "{said}");
    // With none left at all the next one waits. Of what comes free the server's own need is met first.
    let none = Rlimit { current: Some(3), maximum: usual.maximum };
    prlimit(Some(server.process().pid()), Resource::Nofile, none).expect("prlimit");
    let waits = UnixStream::connect(server.socket()).expect("a connection");
    waits.set_read_timeout(Some(Duration::from_millis(500))).expect("a limit");
    (&waits).read(&mut [0]).expect_err("nothing can be accepted, nor turned away");
    prlimit(Some(server.process().pid()), Resource::Nofile, few).expect("prlimit");
    let is_in = greeted(server.socket()).1;
    // Those that are in and send nothing make room after a while.
    if began.elapsed() < HANDSHAKE {
        assert!(!is_in, "a client was given the descriptor that turns others away");
    }
    drop(clients);
    prlimit(Some(server.process().pid()), Resource::Nofile, before).expect("prlimit");
    let until = Instant::now() + Duration::from_secs(30);
    while !greeted(server.socket()).1 {
        assert!(Instant::now() < until, "the server takes nobody any more");
    }
    server.stop();
}

#[test]
fn a_file_that_may_not_grow_is_an_error_and_no_sudden_death() {
    if !need(&["prlimit"], "a limit on the size of files") {
        return;
    }
    let site = Site::new();
    let image = site.path("vm.raw");
    image::random(&image, 8 * MIB, &mut Random::seeded(1));
    let output = site
        .run(Path::new("prlimit"))
        .arg("--fsize=2097152")
        .arg(binary())
        .args(["sync".as_ref(), image.as_os_str(), site.path("copy.raw").as_os_str()])
        .code(1);
    assert!(output.stderr.contains("File too large") && output.stderr.contains("ulimit -f"), "{output}");
    site.sync(&image, &site.path("copy.raw"), &[]).ok();
    image::assert_equal(&image, &site.path("copy.raw"));
}

/// Too little memory for the bitmaps of a large disk, or for anything: an error with its way out, and no abort; what was begun is completed later.
#[test]
fn too_little_memory_is_an_error_and_no_abort() {
    if !need(&["prlimit"], "a limit on memory") {
        return;
    }
    let site = Site::new();
    let (image, copy) = (site.image("vm.raw", 2 << 40), site.path("copy.raw"));
    let write = |at: u64| {
        let file = std::fs::File::options().write(true).open(&image).expect("the image");
        file.write_all_at(&[at as u8 | 1; 4096], at << 30).expect("a write");
    };
    write(1);
    let run = |mib: u64, args: &[&str]| {
        site.run(Path::new("prlimit"))
            .arg(format!("--as={}", mib << 20))
            .arg(binary())
            .args(args)
            .arg(&image)
            .arg(&copy)
            .output()
    };
    site.sync(&image, &copy, &[]).ok();
    let mut refused = 0;
    for (at, mib) in [700, 500, 400, 300, 250, 200, 150, 100, 60].into_iter().enumerate() {
        write(at as u64 + 2);
        for args in [&["sync", "--method", "compare"][..], &["sync"], &["verify"]] {
            let output = run(mib, args);
            let code = output.status.code();
            // The C library ends a program itself that cannot have a few bytes for a new thread.
            let by_library = output.stderr.contains("Fatal glibc error") && output.stderr.contains("memory");
            assert!(matches!(code, Some(0 | 1 | 5)) || by_library, "{mib} MiB: {output}");
            if code == Some(1) {
                output.says(&["memory", "raise the limit"]);
                refused += 1;
            }
        }
    }
    assert!(refused > 3, "{refused}");
    site.sync(&image, &copy, &[]).ok();
    site.dsync(["verify"]).arg(&image).arg(&copy).ok();
}

/// A server that lacks the memory for a snapshot refuses that, and goes on.
#[test]
fn a_server_without_memory_for_a_snapshot_goes_on() {
    let site = Site::new();
    let (image, copy) = (site.image("vm.raw", 2 << 40), site.path("copy.raw"));
    let mut server = site.serve(&[&image], &[]);
    let process = server.process().pid();
    let limit = |current| {
        prlimit(Some(process), Resource::As, Rlimit { current, maximum: None }).expect("a limit");
    };
    let text =
        std::fs::read_to_string(format!("/proc/{}/statm", process.as_raw_nonzero())).expect("its memory");
    let pages: u64 = text.split(' ').next().expect("pages").parse().expect("a number");
    limit(Some(pages * 4096 + 20 * MIB));
    site.sync(&image, &copy, &[]).code(1).says(&["memory"]);
    limit(None);
    site.sync(&image, &copy, &[]).ok();
    assert!(server.process().ended().is_none());
    server.stop();
}

/// A user who may start few threads: a sync works with them, or ends with an error, but never waits for one.
#[test]
fn too_few_threads_are_an_error_and_no_wait() {
    let what = "a limit on threads";
    if !need_root(what) || !need(&["prlimit", "setpriv", "chown"], what) {
        return;
    }
    // No other program's processes count.
    const USER: &str = "54321";
    let site = Site::new();
    let image = site.path("vm.raw");
    image::random(&image, 8 * MIB, &mut Random::seeded(1));
    let folder = site.path("theirs");
    std::fs::create_dir(&folder).expect("a folder");
    Run::new("chown").args(["-R", USER]).arg(site.path("")).ok();
    let as_user = |threads: u32, args: &[&std::path::Path]| {
        site.run(Path::new("setpriv"))
            .args(["--reuid", USER, "--regid", USER, "--clear-groups", "prlimit"])
            .arg(format!("--nproc={threads}"))
            .arg(binary())
            .env("DSYNC_STATE_DIR", folder.join("state"))
            .args(args)
    };
    if !as_user(100, &["--version".as_ref()]).output().status.success() {
        return beyond(what, "the program cannot be reached by another user");
    }
    let copy = folder.join("copy.raw");
    let sync = |threads| as_user(threads, &["sync".as_ref(), &image, &copy]).limit(Duration::from_secs(60));
    for threads in 2..12 {
        let output = sync(threads).output();
        assert!(matches!(output.status.code(), Some(0 | 1)), "{threads}: {output}");
    }
    sync(100).ok();
    image::assert_equal(&image, &copy);
}

#[test]
fn what_a_guest_trimmed_is_no_data_to_send() {
    let site = Site::new();
    let image = site.path("vm.raw");
    image::random(&image, 16 * MIB, &mut Random::seeded(3));
    let copy = site.path("copy.raw");
    let server = site.serve(&[&image], &[]);
    site.sync(&image, &copy, &[]).ok();
    let mut client = server.client("vm");
    client.trim(0, 12 << 20).expect("a trim");
    client.write(3 * BLOCK, &[9; BLOCK as usize]).expect("a write");
    let summary = site.sync(&image, &copy, &["-n"]).ok().summary();
    assert_eq!(summary["blocks_changed"], 12 * MIB / BLOCK, "{summary}");
    assert_eq!(summary["bytes_sent"], BLOCK, "{summary}");
    let said = site.dsync(["sync", "-n"]).arg(&image).arg(&copy).ok().text();
    assert!(said.contains("4.00 KiB of data"), "{said}");
    let summary = site.sync(&image, &copy, &[]).ok().summary();
    assert!(summary["bytes_sent"].as_u64() < Some(2 * BLOCK), "{summary}");
    image::assert_equal(&image, &copy);
}

/// Formats of images that contain a disk: the end of a name, and what is where in the file.
const CONTAINERS: [(&str, u64, &[u8]); 4] = [
    ("qcow2", 0, b"QFI\xfb\0\0\0\x03"),
    ("vmdk", 0, b"KDMV"),
    ("vdi", 0x40, b"\x7f\x10\xda\xbe"),
    ("vhdx", 0, b"vhdxfile"),
];

/// A file that has these bytes there.
fn container(site: &Site, name: &str, offset: u64, magic: &[u8]) -> PathBuf {
    let image = site.image(name, MIB);
    let file = std::fs::File::options().write(true).open(&image).expect("an image");
    std::os::unix::fs::FileExt::write_all_at(&file, magic, offset).expect("a write");
    image
}

#[test]
fn a_container_is_not_served_for_the_disk_in_it() {
    let site = Site::new();
    for (format, offset, magic) in CONTAINERS {
        let image = container(&site, &format!("{format}.img"), offset, magic);
        for options in [&[][..], &["--read-only"]] {
            let run = site.dsync(["serve"]).arg(&image).args(["--socket", "s"]).args(options);
            let output = run.limit(Duration::from_secs(60)).code(4);
            assert!(output.stderr.contains("--format raw"), "{output}");
        }
        site.serve(&[&image], &["--format", "raw"]).stop();
        // It is followed as it is from now on.
        site.serve(&[&image], &[]).stop();
    }
    // A guest that writes such bytes to its own disk is served again.
    let image = site.image("vm.raw", MIB);
    let server = site.serve(&[&image], &[]);
    server.client("vm").write(0, b"QFI\xfb").expect("a write");
    server.stop();
    site.serve(&[&image], &[]).stop();
}

#[test]
fn a_container_that_is_copied_is_called_one() {
    for (format, offset, magic) in CONTAINERS {
        let site = Site::in_memory();
        let image = container(&site, &format!("a.{format}"), offset, magic);
        let told = |to: &str| {
            let said = site.dsync(["sync"]).arg(&image).arg(site.path(to)).ok().stderr.to_ascii_lowercase();
            said.contains(&format!("is a {format} image, and is copied as it is"))
                && said.contains(&format!("a name that ends in .{format}"))
        };
        assert!(!told(&format!("same.{format}")), "{format}");
        std::fs::remove_dir_all(site.state()).expect("its state");
        assert!(told("copy.raw"), "{format}");
        assert!(!told("copy.raw"), "{format}: told at the first sync alone");
        assert!(told("second.raw"), "{format}: of each replica");
        image::assert_equal(&image, &site.path("copy.raw"));
    }
}

#[test]
fn a_disk_whose_end_clients_cannot_reach_is_told_of() {
    let site = Site::new();
    for (size, told) in [(MIB, false), (MIB + 100, true)] {
        let image = site.image("vm.raw", size);
        let stopped = site.serve(&[&image], &["--read-only"]).stop();
        assert_eq!(
            stopped.stderr.contains("most clients see a disk without its last 100"),
            told,
            "{stopped}"
        );
    }
}

#[test]
fn a_printed_uri_works_from_anywhere() {
    let site = Site::new();
    let image = site.image("my vm.raw", MIB);
    let mut server = site.dsync(["serve"]).arg(&image).args(["--socket", "here sock"]).start();
    let socket = site.path("here%20sock");
    server.wait_to_say(&format!("nbd+unix:///my%20vm?socket={} ", socket.display()));
    server.signal(rustix::process::Signal::TERM);
    assert!(server.output(Duration::from_secs(60)).status.success());
}
