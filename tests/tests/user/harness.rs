//! The harness proves itself against servers that are known to work: qemu-nbd and plain files.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::guest::{self, Guest};
use dsync_tests::load::{Load, Options};
use dsync_tests::nbd::{ALLOCATION, Address, Client, HOLE};
use dsync_tests::{Background, Random, Run, image, need, on_disk};

/// qemu-nbd, serving an image for eight clients.
struct Reference {
    _process: Background,
    folder: tempfile::TempDir,
}

impl Reference {
    fn serve(image: &Path) -> Reference {
        let folder = testing::temporary();
        let process = Run::new("qemu-nbd")
            .args([
                "--format=raw",
                "--persistent",
                "--shared=8",
                "--discard=unmap",
                "--export-name=vm",
                "--socket",
            ])
            .arg(folder.path().join("nbd"))
            .arg(image)
            .start();
        let server = Reference { _process: process, folder };
        let until = Instant::now() + Duration::from_secs(10);
        while dsync_tests::nbd::list(&server.address()).is_err() {
            assert!(Instant::now() < until, "qemu-nbd does not answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        server
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("nbd")
    }

    fn address(&self) -> Address {
        Address::Unix(self.socket())
    }
}

#[test]
fn the_client_speaks_nbd() {
    if !need(&["qemu-nbd"], "the NBD client of the tests") {
        return;
    }
    let folder = on_disk();
    let image = folder.path().join("vm.raw");
    image::sparse(&image, 16 << 20);
    let server = Reference::serve(&image);
    assert_eq!(dsync_tests::nbd::list(&server.address()).expect("a list"), ["vm"]);
    let mut client = Client::connect(&server.address(), "vm").expect("a connection");
    assert_eq!(client.size, 16 << 20);
    assert!(client.has(ALLOCATION));
    let data = Random::seeded(1).bytes(100_000);
    client.write(5000, &data).expect("a write");
    assert_eq!(client.read(5000, 100_000).expect("a read"), data);
    client.zero(8192, 4096, 0).expect("zeroes");
    assert!(image::is_zero(&client.read(8192, 4096).expect("a read")));
    client.trim(1 << 20, 4096).expect("a trim");
    client.flush().expect("a flush");
    let holes = client.ranges(ALLOCATION, HOLE).expect("a status");
    assert!(holes.contains(&(104 << 10..16 << 20)), "{holes:?}");
    let error = client.write((16 << 20) - 10, &[1; 20]).expect_err("a write past the end");
    assert!([22, 28].contains(&error.raw_os_error().expect("a number")), "{error}");
    let saved = folder.path().join("saved.raw");
    client.save(&saved).expect("a copy");
    image::assert_equal(&image, &saved);
    client.close().expect("the end");
    assert!(Client::connect(&server.address(), "other").is_err());
}

#[test]
fn the_load_knows_what_it_wrote() {
    if !need(&["qemu-nbd"], "the workload of the tests") {
        return;
    }
    let mut random = Random::new("load");
    let folder = on_disk();
    let image = folder.path().join("vm.raw");
    image::sparse(&image, 64 << 20);
    let server = Reference::serve(&image);
    let load = Load::start(&server.address(), "vm", &Options::default(), &mut random);
    load.wait_for(1000);
    let mut written = load.stop();
    written.check(&image);
    // A server that goes away ends the workload, and what it had answered holds.
    let load = Load::start(&server.address(), "vm", &Options::default(), &mut random);
    load.wait_for(500);
    drop(server);
    written.then(load.stop());
    written.check(&image);
    // A lost write is found.
    let found = (0..64 << 8).rev().any(|block| {
        image::scribble(&image, block * image::BLOCK, 1, &mut random);
        written.lost(&image) == Some(block)
    });
    assert!(found, "a lost write goes unseen");
}

#[test]
fn differences_are_found() {
    let folder = on_disk();
    let (a, b) = (folder.path().join("a"), folder.path().join("b"));
    let mut random = Random::seeded(7);
    image::sparse(&a, 1 << 30);
    image::scribble(&a, 500 << 20, 3 << 20, &mut random);
    image::copy(&a, &b);
    assert_eq!(image::first_difference(&a, &b), None);
    assert!(image::space(&b) < 4 << 20);
    image::scribble(&b, (501 << 20) + 8192 + 5, 4096, &mut random);
    image::scribble(&b, 900 << 20, 1, &mut random);
    let at = image::first_difference(&a, &b).expect("a difference");
    // A random byte may happen to be the same.
    let start = (501 << 20) + 8192 + 5;
    assert!((start..start + 8).contains(&at), "{at}");
    let first = (501 << 20) / image::BLOCK + 2;
    assert_eq!(image::differing_blocks(&a, &b), [first, first + 1, (900 << 20) / image::BLOCK]);
    image::sparse(&b, 5);
    image::sparse(&a, 6);
    assert_eq!(image::first_difference(&a, &b), Some(5));
}

#[test]
fn a_guest_makes_a_file_system_on_a_served_disk() {
    let what = "the guest harness";
    if !guest::wanted(what) || !guest::possible(what) || !need(&["qemu-nbd", "mkfs.ext4", "e2fsck"], what) {
        return;
    }
    let folder = on_disk();
    let image = folder.path().join("vm.raw");
    image::sparse(&image, 64 << 20);
    let server = Reference::serve(&image);
    let script = "set -e
        mark begun $(uname -r)
        mkfs.ext4 -q /dev/vda
        mkdir /tmp/disk
        mount /dev/vda /tmp/disk
        for i in 1 2 3; do
            dd if=/dev/urandom of=/tmp/disk/file$i bs=64k count=16 conv=fsync 2>/dev/null
        done
        (cd /tmp/disk && sha256sum file*) >/mnt/sums
        mark written
        read word
        mark heard $word
        umount /tmp/disk";
    let mut guest = Guest::boot(&guest::Options {
        script: script.into(),
        disks: vec![format!("nbd+unix:///vm?socket={}", server.socket().display())],
        share: Some(folder.path().to_path_buf()),
        ..Default::default()
    });
    let kernel = guest.wait_for("begun", Duration::from_secs(60));
    println!("Linux {kernel} after {:.1?}", guest.started.elapsed());
    guest.wait_for("written", Duration::from_secs(60));
    guest.send("hello");
    assert_eq!(guest.wait_for("heard", Duration::from_secs(10)), "hello");
    let started = guest.started;
    guest.finish(Duration::from_secs(60));
    println!("off after {:.1?}", started.elapsed());
    Run::new("e2fsck").arg("-fn").arg(&image).ok();
    for name in ["file1", "file2", "file3"] {
        let dump = format!("dump {name} {}", folder.path().join(name).display());
        Run::new("debugfs").args(["-R", &dump]).arg(&image).ok();
    }
    Run::new("sha256sum").args(["-c", "sums"]).dir(folder.path()).ok();
}

#[test]
fn a_guest_loses_its_power() {
    let what = "power cuts in the guest harness";
    if !guest::wanted(what) || !guest::possible(what) || !need(&["mkfs.ext4", "e2fsck"], what) {
        return;
    }
    let folder = on_disk();
    let image = folder.path().join("vm.raw");
    image::sparse(&image, 64 << 20);
    Run::new("mkfs.ext4").arg("-q").arg(&image).ok();
    let script = "set -e
        mkdir /tmp/disk
        mount /dev/vda /tmp/disk
        mark begun
        i=0
        while :; do
            i=$((i + 1))
            echo $i >/tmp/disk/file$((i % 50))
            [ $((i % 10)) != 0 ] || { sync /tmp/disk/file$((i % 50)); mark synced $i; }
        done";
    let mut guest = Guest::boot(&guest::Options {
        script: script.into(),
        disks: vec![image.display().to_string()],
        ..Default::default()
    });
    guest.wait_for("begun", Duration::from_secs(60));
    guest.wait_for("synced 20", Duration::from_secs(60));
    guest.cut();
    image::fsck_after_replay(&image);
    Run::new("e2fsck").arg("-fp").arg(&image).output();
    let file = Run::new("debugfs").args(["-R", "cat file20"]).arg(&image).ok();
    assert_eq!(file.text().trim(), "20");
}
