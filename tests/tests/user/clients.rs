//! Real clients against `dsync serve`.

use std::path::Path;
use std::time::Duration;

use dsync_tests::image::{self, BLOCK};
use dsync_tests::nbd::{self, ALLOCATION, Address, Client, DIRTY};
use dsync_tests::{Random, Run, Scene, Site, need};

const MIB: u64 = 1 << 20;

/// `nbdinfo --map` as ranges with their type.
fn map(uri: &str, context: &str) -> Vec<(u64, u64, u64)> {
    let option = if context == ALLOCATION { "--map".to_string() } else { format!("--map={context}") };
    let output = Run::new("nbdinfo").args([&option, "--json", uri]).ok();
    let list: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output}"));
    let field = |entry: &serde_json::Value, name: &str| entry[name].as_u64().expect("a number");
    let entries = list.as_array().expect("a list").iter();
    entries.map(|e| (field(e, "offset"), field(e, "length"), field(e, "type"))).collect()
}

#[test]
fn nbdinfo_names_what_the_server_can() {
    if !need(&["nbdinfo"], "nbdinfo against dsync serve") {
        return;
    }
    let site = Site::new();
    let (one, two) = (site.image("one.raw", 10 * MIB), site.image("two.img", 5_000_007));
    let server = site.serve(&[&one, &two], &[]);
    let mut names = nbd::list(&server.address()).expect("a list");
    names.retain(|name| !name.contains('@'));
    assert_eq!(names, ["one", "two"]);
    let listed = Run::new("nbdinfo").args(["--list", &server.uri("")]).ok().text();
    assert!(listed.contains("one") && listed.contains("two"), "{listed}");
    assert_eq!(Run::new("nbdinfo").args(["--size", &server.uri("one")]).ok().text().trim(), "10485760");
    assert_eq!(Run::new("nbdinfo").args(["--size", &server.uri("two")]).ok().text().trim(), "5000007");
    for can in ["flush", "fua", "trim", "zero", "fast-zero", "cache", "df", "multi-conn"] {
        Run::new("nbdinfo").args(["--can", can, &server.uri("one")]).ok();
    }
    Run::new("nbdinfo").args(["--is", "read-only", &server.uri("one")]).code(2);
    let text = Run::new("nbdinfo").arg(server.uri("one")).ok().text();
    assert!(text.contains(ALLOCATION) && text.contains(DIRTY), "{text}");
    // An export that is not there is an error to the client and nothing to the server.
    assert!(!Run::new("nbdinfo").arg(server.uri("three")).output().status.success());
    Run::new("nbdinfo").arg(server.uri("two")).ok();
    server.stop();
}

#[test]
fn nbdinfo_maps_what_is_allocated_and_what_is_dirty() {
    if !need(&["nbdinfo"], "nbdinfo --map against dsync serve") {
        return;
    }
    let site = Site::new();
    let image = site.image("vm.raw", 64 * MIB);
    image::scribble(&image, 8 * MIB, MIB, &mut Random::seeded(3));
    let server = site.serve(&[&image], &[]);
    let uri = server.uri("vm");
    let holes: Vec<_> = map(&uri, ALLOCATION).into_iter().filter(|(_, _, kind)| kind & 1 != 0).collect();
    assert_eq!(holes, [(0, 8 * MIB, 3), (9 * MIB, 55 * MIB, 3)]);
    // A sync leaves nothing dirty.
    site.sync(&image, &site.path("copy.raw"), &[]).ok();
    assert_eq!(map(&uri, DIRTY), [(0, 64 * MIB, 0)]);
    let mut client = server.client("vm");
    client.write(10 * BLOCK + 100, &[7; 50]).expect("a write");
    client.zero(8 * MIB, 2 * BLOCK as u32, 0).expect("zeroes");
    client.trim(8 * MIB + 5 * BLOCK, BLOCK as u32).expect("a trim");
    let dirty: Vec<_> = map(&uri, DIRTY).into_iter().filter(|(_, _, kind)| *kind != 0).collect();
    let expected = [(10 * BLOCK, BLOCK, 1), (8 * MIB, 2 * BLOCK, 1), (8 * MIB + 5 * BLOCK, BLOCK, 1)];
    assert_eq!(dirty, expected);
}

#[test]
fn nbdcopy_both_ways() {
    if !need(&["nbdcopy"], "nbdcopy against dsync serve") {
        return;
    }
    let mut random = Random::new("nbdcopy");
    let site = Site::new();
    let disk = site.image("vm.raw", 96 * MIB + 512);
    let (from, to) = (site.image("from.raw", 96 * MIB + 512), site.path("to.raw"));
    for at in [0, 20, 60] {
        image::scribble(&from, at * MIB + 4096, 9 * MIB, &mut random);
    }
    let server = site.serve(&[&disk], &[]);
    for connections in ["1", "4"] {
        let uri = server.uri("vm");
        Run::new("nbdcopy").args(["--flush", "--connections", connections]).arg(&from).arg(&uri).ok();
        Run::new("nbdcopy").args(["--connections", connections]).arg(&uri).arg(&to).ok();
        image::assert_equal(&from, &to);
        image::assert_equal(&from, &disk);
        image::scribble(&from, 30 * MIB, MIB, &mut random);
        std::fs::remove_file(&to).expect("removing a copy");
    }
    assert!(image::space(&disk) < 40 * MIB, "holes are gone: {} bytes", image::space(&disk));
}

#[test]
fn qemu_img_converts_and_compares() {
    if !need(&["qemu-img"], "qemu-img against dsync serve") {
        return;
    }
    let mut random = Random::new("qemu-img");
    let site = Site::new();
    let disk = site.image("vm.raw", 64 * MIB);
    let (from, to) = (site.image("from.raw", 64 * MIB), site.path("to.qcow2"));
    image::scribble(&from, 3 * MIB, 5 * MIB, &mut random);
    image::scribble(&disk, 40 * MIB, 5 * MIB, &mut random);
    let server = site.serve(&[&disk], &[]);
    let uri = server.uri("vm");
    let qemu_img = |words: &[&str]| Run::new("qemu-img").args(words);
    qemu_img(&["compare", "-f", "raw", "-F", "raw"]).arg(&from).arg(&uri).code(1);
    qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "8"]).arg(&from).arg(&uri).ok();
    qemu_img(&["compare", "-f", "raw", "-F", "raw"]).arg(&from).arg(&uri).ok();
    image::assert_equal(&from, &disk);
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2"]).arg(&uri).arg(&to).ok();
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2"]).arg(&from).arg(&to).ok();
    let map = qemu_img(&["map", "--output=json", "-f", "raw"]).arg(&uri).ok();
    let extents: serde_json::Value = serde_json::from_slice(&map.stdout).expect("JSON");
    assert!(extents.as_array().expect("a list").iter().any(|e| e["data"] == false), "no holes: {map}");
}

#[test]
fn qemu_io_patterns() {
    if !need(&["qemu-io"], "qemu-io against dsync serve") {
        return;
    }
    let site = Site::new();
    let disk = site.image("vm.raw", 32 * MIB);
    for options in [&[][..], &["--direct"][..]] {
        let server = site.serve(&[&disk], options);
        let commands = [
            "write -P 0x5a 0 4M",
            "write -P 0x11 1234567 7777",
            "write -f -P 0x22 5M 64k",
            "aio_write -P 0x33 6M 1M",
            "aio_write -P 0x44 7M 1M",
            "aio_flush",
            "write -z 1M 1M",
            "write -z -u 64k 64k",
            "write -z 3000000 5000",
            "discard 2M 64k",
            "flush",
            "read -P 0x5a 0 64k",
            "read -P 0x00 64k 64k",
            "read -P 0x00 1M 1M",
            "read -P 0x00 3000000 5000",
            "read -P 0x22 5M 64k",
            "read -P 0x33 6M 1M",
            "read -P 0x44 7M 1M",
        ];
        let mut run = Run::new("qemu-io").args(["-f", "raw"]);
        for command in commands {
            run = run.args(["-c", command]);
        }
        let output = run.arg(server.uri("vm")).ok();
        assert!(!output.text().contains("Pattern verification failed"), "{output}");
        server.stop();
        let plain = Run::new("qemu-io").args(["-f", "raw", "-c", "read -P 0x33 6M 1M"]).arg(&disk).ok();
        assert!(!plain.text().contains("failed"), "{plain}");
    }
}

fn fio(site: &Site, uri: &str, jobs: u32, size: u64, block: &str) {
    // Each job is a connection with a part of the disk to itself.
    let part = size / u64::from(jobs);
    Run::new("fio")
        // It leaves the state of its verification where it runs.
        .dir(site.dir())
        .args(["--name=verify", "--ioengine=nbd", "--rw=randwrite", "--verify=crc32c", "--do_verify=1"])
        .args(["--verify_fatal=1", "--iodepth=16", "--group_reporting", "--fsync=1000"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--bs={block}"))
        .arg(format!("--numjobs={jobs}"))
        .arg(format!("--size={part}"))
        .arg(format!("--offset_increment={part}"))
        .limit(Duration::from_secs(180))
        .ok();
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !need(&["fio"], "fio's nbd engine against dsync serve") {
        return;
    }
    let size = dsync_tests::rounds(32, 1024) * MIB;
    for options in [&[][..], &["--direct"][..]] {
        let site = Site::new();
        let disk = site.image("vm.raw", size);
        let server = site.serve(&[&disk], options);
        for (jobs, block) in [(1, "4k"), (4, "4k"), (4, "64k"), (1, "1m")] {
            fio(&site, &server.uri("vm"), jobs, size, block);
        }
        // All of it was written through the server, so all of it is dirty.
        let dirty = server.client("vm").dirty().expect("a dirty bitmap");
        assert_eq!(dirty.iter().map(|range| range.end - range.start).sum::<u64>(), size);
        server.stop();
    }
}

#[test]
fn a_read_only_export_refuses_writes() {
    let site = Site::new();
    let disk = site.image("vm.raw", MIB);
    let before = image::fingerprint(&disk);
    let server = site.serve(&[&disk], &["--read-only"]);
    let mut client = server.client("vm");
    assert_eq!(client.flags & 2, 2, "the read-only flag is missing");
    assert_eq!(client.write(0, &[1; 4096]).expect_err("a write").raw_os_error(), Some(1));
    assert_eq!(client.zero(0, 4096, 0).expect_err("zeroes").raw_os_error(), Some(1));
    assert_eq!(client.trim(0, 4096).expect_err("a trim").raw_os_error(), Some(1));
    assert!(image::is_zero(&client.read(0, 4096).expect("a read")));
    server.stop();
    assert_eq!(before, image::fingerprint(&disk));
}

#[test]
fn loopback_tcp_serves_and_other_addresses_are_refused() {
    let site = Site::new();
    let disk = site.image("vm.raw", MIB);
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let place = format!("127.0.0.1:{port}");
    let server = site.serve(&[&disk], &["--tcp", &place, "--allow-local-users"]);
    let mut client = Client::connect(&Address::Tcp(place.clone()), "vm").expect("a connection");
    client.write(0, &[9; 4096]).expect("a write");
    assert_eq!(server.client("vm").read(0, 4096).expect("a read"), [9; 4096]);
    server.stop();
    let other = site.image("other.raw", MIB);
    let refused = site.dsync(["serve"]).arg(&other).args(["--tcp", "0.0.0.0:10809"]).output();
    assert!(matches!(refused.status.code(), Some(1 | 2)), "{refused}");
    refused.says(&["0.0.0.0", "loopback"]);
    let open = site.dsync(["serve"]).arg(&other).args(["--tcp", "127.0.0.1:10809"]).code(2);
    open.says(&["every user of this host", "--socket PATH", "--allow-local-users"]);
}

#[test]
fn four_connections_see_each_others_flushed_writes() {
    let scene = Scene::new("multi-conn", 16 * MIB);
    let mut clients: Vec<Client> = (0..4).map(|_| scene.client()).collect();
    for round in 0..64u64 {
        let at = round * 8192;
        let data = [round as u8 + 1; 8192];
        clients[(round % 4) as usize].write(at, &data).expect("a write");
        clients[(round % 4) as usize].flush().expect("a flush");
        assert_eq!(clients[((round + 1) % 4) as usize].read(at, 8192).expect("a read"), data);
    }
}

fn held_view_copies_out(scene: &mut Scene, copy: &Path) {
    let before = scene.site.path("before.raw");
    image::copy(&scene.image, &before);
    let uri = scene.server().uri("vm@view");
    // Held by one client, read by another.
    let holder = scene.server().client("vm@view");
    scene.change(500);
    let mut client = scene.client();
    client.zero(MIB, MIB as u32, 0).expect("zeroes");
    client.trim(2 * MIB, MIB as u32).expect("a trim");
    Run::new("nbdcopy").arg(&uri).arg(copy).ok();
    image::assert_equal(&before, copy);
    assert_ne!(image::first_difference(&scene.image, copy), None);
    drop(holder);
}

#[test]
fn a_view_is_the_disk_as_it_was() {
    if !need(&["nbdcopy"], "nbdcopy of a view") {
        return;
    }
    let mut scene = Scene::new("view", 32 * MIB);
    let copies = [scene.site.path("one.raw"), scene.site.path("two.raw")];
    // The second time it is another view: the first ended with its last client.
    for copy in &copies {
        held_view_copies_out(&mut scene, copy);
    }
    // A view cannot be written to.
    let mut view = scene.server().client("vm@view");
    assert_eq!(view.write(0, &[1; 4096]).expect_err("a write").raw_os_error(), Some(1));
}
