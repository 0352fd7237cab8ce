//! Replicas in qcow2, with QEMU's tools as the oracle.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::{Random, Run, Scene, Site, image, mount, need, need_root, rounds, until};
use rustix::process::{Pid, Signal, kill_process};

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

fn qemu_img(args: &[&str]) -> Run {
    Run::new("qemu-img").args(args)
}

/// A scene whose replica is to be a qcow2 file. `None` without QEMU's tools.
fn scene(what: &str, size: u64) -> Option<Scene> {
    if !need(&["qemu-nbd", "qemu-img", "qemu-io"], what) {
        return None;
    }
    let mut scene = Scene::new(what, size);
    scene.replica = scene.site.path("vm.qcow2");
    Some(scene)
}

/// Fails the test unless QEMU finds the same disk in both files, and nothing wrong with the qcow2 one; clusters may be unused where a
/// process was killed.
fn equal(raw: &Path, qcow2: &Path) {
    sound(qcow2);
    qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2"]).arg(raw).arg(qcow2).ok();
}

fn sound(qcow2: &Path) {
    let checked = qemu_img(&["check", "--output=json", "-f", "qcow2"]).arg(qcow2).output();
    // Three: there are clusters that nothing uses.
    assert!(matches!(checked.status.code(), Some(0 | 3)), "{checked}");
    let found: serde_json::Value = serde_json::from_str(&checked.text()).expect("what it found");
    assert_eq!(found["check-errors"], 0, "{checked}");
}

fn qemu_io(image: &Path, command: &str) {
    Run::new("qemu-io").args(["-f", "qcow2", "-c", command]).arg(image).ok();
}

/// The processes of qemu-nbd that have a file open, by its path.
fn servers(of: &Path) -> Vec<Pid> {
    let (mut found, of) = (Vec::new(), std::fs::canonicalize(of).unwrap_or(of.to_path_buf()));
    for process in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let name = process.file_name();
        let Some(id) = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw) else {
            continue;
        };
        let comm = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        let opens = std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let has = opens.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|open| open == of);
        if comm.trim() == "qemu-nbd" && has {
            found.push(id);
        }
    }
    found
}

#[test]
fn a_replica_in_qcow2_follows_its_source() {
    let Some(mut scene) = scene("a replica in qcow2", 64 * MIB) else { return };
    scene.change(300);
    let first = scene.sync(&[]).ok().summary();
    assert_eq!(first["method"], "copy", "{first}");
    assert!(!scene.replica.with_extension("qcow2.partial").exists());
    equal(&scene.image, &scene.replica);
    assert!(
        scene.replica.metadata().expect("a replica").len() < 48 * MIB,
        "what is not written takes no space"
    );
    let changed = scene.change(200).len() as u64;
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(
        (&summary["method"], &summary["blocks_changed"]),
        (&"tracked".into(), &changed.into()),
        "{summary}"
    );
    equal(&scene.image, &scene.replica);
    // What is made zero gives its space back.
    let before = dsync_tests::image::space(&scene.replica);
    scene.client().zero(0, 32 * MIB as u32, 0).expect("zeroes");
    scene.sync(&[]).ok();
    assert!(dsync_tests::image::space(&scene.replica) < before);
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).ok();
    assert!(scene.site.dsync(["status"]).arg(&scene.replica).ok().text().contains("vm.qcow2"));
    // It stays what it is.
    let other = scene.sync(&["--format", "raw"]).code(4);
    other.says(&["is a qcow2 replica, and --format raw was given"]);
    assert!(servers(&scene.replica).is_empty(), "none is left");
    // A clone of the file, where it can be had, or a refusal.
    scene.change(10);
    let cloned = scene.sync(&["--commit", "reflink"]).output();
    match cloned.status.code() {
        Some(0) => equal(&scene.image, &scene.replica),
        code => assert!(code == Some(4) && cloned.stderr.contains("cannot clone"), "{cloned}"),
    }
    scene.sync(&["--commit", "in-place"]).ok();
    equal(&scene.image, &scene.replica);
    // Nor does another name say what it is.
    scene.replica = scene.site.path("vm.disk");
    scene.sync(&["--format", "qcow2"]).ok();
    equal(&scene.image, &scene.replica);
}

#[test]
fn a_missing_qemu_is_named() {
    let Some(scene) = scene("a host without QEMU", MIB) else { return };
    let missing = scene.sync(&[]).env("PATH", "/nowhere").code(1);
    missing.says(&["qemu-img", "qemu-utils"]);
    assert!(!scene.site.path("vm.qcow2.partial").exists());
    // Nothing was there, so nothing is missing.
    let status = scene.site.dsync(["status", "--check"]).output().text();
    assert!(status.contains("is incomplete") && !status.contains("missing"), "{status}");
    scene.sync(&[]).ok();
    equal(&scene.image, &scene.replica);
}

/// The last cluster of the file keeps what was behind the end of a disk that was cut.
#[test]
fn what_was_cut_off_does_not_come_back_as_it_grows() {
    let Some(mut scene) = scene("a qcow2 replica that is cut within a cluster", 6 * MIB) else { return };
    scene.stop();
    image::scribble(&scene.image, 0, 6 * MIB, &mut scene.random);
    scene.sync(&[]).ok();
    for (size, options) in [(5 * MIB + 512, &["--allow-shrink"][..]), (6 * MIB, &[])] {
        let file = std::fs::File::options().write(true).open(&scene.image).expect("the image");
        file.set_len(size).expect("another size");
        scene.sync(options).ok();
        equal(&scene.image, &scene.replica);
    }
}

#[test]
fn it_grows_and_shrinks_with_its_source() {
    let Some(mut scene) = scene("a qcow2 replica of another size", 16 * MIB) else { return };
    scene.change(100);
    scene.sync(&[]).ok();
    for (size, option) in [("48M", None), ("20M", Some("--allow-shrink"))] {
        scene.stop();
        Run::new("truncate").args(["-s", size]).arg(&scene.image).ok();
        scene.server = Some(scene.site.serve(&[&scene.image], option.as_slice()));
        scene.change(50);
        scene.sync(&[]).ok();
        equal(&scene.image, &scene.replica);
    }
    scene.stop();
    Run::new("truncate").args(["-s", "1000001"]).arg(&scene.image).ok();
    let odd = scene.site.sync(&scene.image, &scene.site.path("odd.qcow2"), &["--allow-shrink"]).code(4);
    odd.says(&["sectors of 512 bytes"]);
    // Nothing of that was taken, so that the replica is what it was, and can take over.
    let before = image::fingerprint(&scene.replica).0;
    scene
        .site
        .sync(&scene.image, &scene.replica, &["--allow-shrink"])
        .code(4)
        .says(&["sectors of 512 bytes"]);
    assert_eq!(image::fingerprint(&scene.replica).0, before);
    scene.site.dsync(["promote", "--force"]).arg(&scene.replica).ok();
}

/// A guest that writes a header to its raw disk does not choose what its replica is.
#[test]
fn a_header_in_a_raw_disk_makes_no_qcow2() {
    let Some(scene) = scene("a qcow2 header in a raw disk", 4 * MIB) else { return };
    let (site, guest) = (Site::new(), scene.site.path("guest.raw"));
    let secret = scene.site.path("secret");
    std::fs::write(&secret, vec![b's'; 1 << 20]).expect("a file");
    let options = format!("backing_file={},backing_fmt=raw", secret.display());
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options]).arg(&guest).arg("1M").ok();
    Run::new("truncate").args(["-s", "4M"]).arg(&guest).ok();
    // Nor where the disk has such a name, and was served for what it is.
    let named = scene.site.path("named.qcow2");
    image::copy(&guest, &named);
    site.serve(&[&named], &["--format", "raw"]).stop();
    let other = site.path("other.qcow2");
    site.sync(&named, &other, &[]).ok();
    equal(&named, &other);
    let copy = site.path("copy.qcow2");
    site.sync(&guest, &copy, &[]).ok();
    let said = qemu_img(&["info", "--output=json"]).arg(&copy).ok().text();
    assert!(!said.contains("backing"), "{said}");
    equal(&guest, &copy);
}

#[test]
fn a_container_is_copied_as_it_is() {
    let what = "the copy of a container";
    if !need(&["qemu-img", "qemu-io"], what) {
        return;
    }
    let site = Site::new();
    let (image, copy) = (site.path("a.qcow2"), site.path("b.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2"]).arg(&image).arg("8M").ok();
    qemu_io(&image, "write -P 3 1M 1M");
    for _ in 0..2 {
        site.sync(&image, &copy, &[]).ok();
        dsync_tests::image::assert_equal(&image, &copy);
        qemu_io(&image, "write -P 4 3M 1M");
    }
    let refused = site.sync(&image, &site.path("c.raw"), &["--format", "qcow2"]).output();
    assert!(refused.status.code() == Some(4) || refused.status.success(), "{refused}");
}

#[test]
fn what_others_write_to_it_is_noticed() {
    let Some(mut scene) = scene("foreign writes to a qcow2 replica", 16 * MIB) else { return };
    scene.change(100);
    scene.sync(&[]).ok();
    qemu_io(&scene.replica, "write -P 7 1M 64K");
    scene.change(10);
    scene.sync(&[]).code(4).says(&["modified outside dsync"]);
    scene.sync(&["--adopt"]).ok();
    equal(&scene.image, &scene.replica);
    // It is in use: by a machine, say.
    let mut user = Run::new("qemu-io").args(["-f", "qcow2"]).arg(&scene.replica).start_talking();
    until("qemu-io has it open", || {
        scene.site.dsync(["status"]).arg(&scene.replica).output();
        Run::new("qemu-img")
            .args(["check", "-f", "qcow2"])
            .arg(&scene.replica)
            .output()
            .stderr
            .contains("lock")
    });
    scene.change(10);
    let busy = scene.sync(&[]).code(6);
    busy.says(&["vm.qcow2", "qemu-io", &user.pid().as_raw_nonzero().to_string()]);
    user.kill();
    scene.sync(&[]).ok();
    equal(&scene.image, &scene.replica);
}

#[test]
fn what_cannot_be_a_replica_is_refused() {
    let Some(scene) = scene("unfit qcow2 files", 8 * MIB) else { return };
    let base = scene.site.path("base.qcow2");
    let create = |path: &Path, more: &[&str]| {
        qemu_img(&["create", "-q", "-f", "qcow2"]).args(more).arg(path).arg("8M").ok();
        qemu_io(path, "write -P 1 0 1M");
    };
    create(&base, &[]);
    let over = base.to_str().expect("a name");
    let data = format!("data_file={}", scene.site.path("data").display());
    let cases: [(&str, &[&str]); 3] = [
        ("backing file", &["-b", over, "-F", "qcow2"]),
        ("another file", &["-o", &data]),
        ("internal snapshots", &[]),
    ];
    for (at, (words, options)) in cases.into_iter().enumerate() {
        let path = scene.site.path(&format!("unfit-{at}.qcow2"));
        create(&path, options);
        if words == "internal snapshots" {
            qemu_img(&["snapshot", "-c", "one"]).arg(&path).ok();
        }
        let before = dsync_tests::image::fingerprint(&path);
        scene
            .site
            .sync(&scene.image, &path, &["--adopt=overwrite"])
            .code(4)
            .says(&["cannot be a replica", words]);
        assert_eq!(dsync_tests::image::fingerprint(&path), before, "{words}");
    }
    // One that can is compared, and taken over.
    scene.site.sync(&scene.image, &base, &["--adopt=overwrite"]).ok();
    equal(&scene.image, &base);
}

#[test]
fn its_moments_are_read_and_gone_back_to() {
    let Some(mut scene) = scene("moments of a qcow2 replica", 16 * MIB) else { return };
    scene.change(200);
    scene.sync(&["--keep-last", "5"]).ok();
    let first = scene.site.path("first.raw");
    dsync_tests::image::copy(&scene.image, &first);
    let now = scene.site.dsync(["serve"]).arg(format!("{}@now", scene.replica.display()));
    let socket = scene.site.socket("now");
    let reader = now.arg("--socket").arg(&socket).start();
    let uri = format!("nbd+unix:///vm?socket={}", socket.display());
    until("a reader serves", || qemu_img(&["info"]).arg(&uri).output().status.success());
    // What it shows stays, whatever is committed.
    for _ in 0..2 {
        scene.change(300);
        scene.client().zero(4 * MIB, 4 * MIB as u32, 0).expect("zeroes");
        scene.sync(&[]).ok();
        qemu_img(&["compare", "-q", "-f", "raw", "-F", "raw"]).arg(&uri).arg(&first).ok();
    }
    equal(&scene.image, &scene.replica);
    reader.killed();
    until("its server is gone", || servers(&scene.replica).is_empty());
    scene.site.dsync(["rewind"]).arg(&scene.replica).args(["--to", "1"]).ok();
    equal(&first, &scene.replica);
    scene.sync(&[]).ok();
    equal(&scene.image, &scene.replica);
}

#[test]
fn a_mirror_keeps_one() {
    let Some(mut scene) = scene("a mirror in qcow2", 16 * MIB) else { return };
    scene.sync(&[]).ok();
    let mut mirror =
        scene.site.dsync(["mirror"]).arg(&scene.image).arg(&scene.replica).args(["--rpo", "1s"]).start();
    mirror.wait_to_say("mirroring to");
    for _ in 0..5 {
        scene.change(50);
        std::thread::sleep(Duration::from_millis(300));
    }
    mirror.signal(Signal::TERM);
    let ended = mirror.output(Duration::from_secs(300));
    assert!(ended.status.success(), "{ended}");
    scene.sync(&[]).ok();
    equal(&scene.image, &scene.replica);
}

#[test]
fn another_host_keeps_one() {
    let Some(mut scene) = scene("a far replica in qcow2", 16 * MIB) else { return };
    let far = Far::new(RSH);
    for _ in 0..2 {
        scene.change(100);
        far.sync(&scene, &["--format", "qcow2"], None).ok();
        equal(&scene.image, &far.replica());
    }
}

#[test]
fn a_full_file_system_loses_nothing() {
    let what = "a full file system under a qcow2 replica";
    let Some(mut scene) = scene(what, 32 * MIB) else { return };
    if !need_root(what) {
        return;
    }
    let place = scene.site.path("small");
    let Some(_mount) = mount::small(&place, "12m", what) else { return };
    scene.replica = place.join("vm.qcow2");
    scene.change(100);
    scene.sync(&[]).ok();
    let before = scene.site.path("before.raw");
    dsync_tests::image::copy(&scene.image, &before);
    let mut client = scene.client();
    for at in 0..24 {
        client.write(at * MIB, &scene.random.bytes(MIB as usize)).expect("a write");
    }
    drop(client);
    let full = scene.sync(&[]).code(1);
    assert!(full.stderr.contains("room") || full.stderr.contains("space"), "{full}");
    let recovered = scene.site.dsync(["recover"]).arg(&scene.replica).output();
    assert!(recovered.status.success(), "{recovered}");
    equal(&before, &scene.replica);
    drop(_mount);
}

/// Kills dsync or its qemu-nbd at a random moment of a sync; returns whether it was in time.
fn killed(scene: &Scene, options: &[&str], random: &mut Random, within: Duration) -> bool {
    let mut sync = scene.sync(options).start();
    let delay = Duration::from_micros(random.below(within.as_micros() as u64));
    let partial = PathBuf::from(format!("{}.partial", scene.replica.display()));
    if random.coin() {
        std::thread::sleep(delay);
        sync.kill();
    } else {
        let began = Instant::now();
        let server = loop {
            let found = [&scene.replica, &partial].into_iter().flat_map(|path| servers(path)).next();
            if found.is_some() || sync.ended().is_some() {
                break found;
            }
        };
        std::thread::sleep(delay.saturating_sub(began.elapsed()));
        if let Some(server) = server {
            let _ = kill_process(server, Signal::KILL);
        }
    }
    let ended = sync.output(Duration::from_secs(60));
    !ended.status.success()
}

#[test]
fn it_is_one_moment_whatever_is_killed() {
    let Some(mut scene) = scene("kills around a qcow2 replica", 32 * MIB) else { return };
    let mut random = scene.random.clone();
    scene.change(500);
    let began = Instant::now();
    scene.sync(&[]).ok();
    let mut usual = began.elapsed();
    let before = scene.site.path("before.raw");
    let (mut hit, mut reclaimed) = (0, 0);
    for round in 0..rounds(6, 60) {
        if random.one_in(4) {
            // The first copy is killed.
            scene.replica = scene.site.path(&format!("vm-{round}.qcow2"));
        } else {
            dsync_tests::image::copy(&scene.image, &before);
        }
        scene.change(300);
        let mode = *random.pick(&[&"journal", &"in-place"]);
        hit += u32::from(killed(&scene, &["--commit", mode], &mut random, usual));
        until("nobody has it open", || servers(&scene.replica).is_empty());
        if scene.replica.exists() {
            sound(&scene.replica);
            let recovered = scene.site.dsync(["recover"]).arg(&scene.replica).output();
            assert!(recovered.status.success() || mode == "in-place", "{recovered}");
            let is = |raw: &Path| {
                let compared =
                    qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2"]).arg(raw).arg(&scene.replica);
                compared.output().status.success()
            };
            assert!(mode == "in-place" || is(&before) || is(&scene.image), "round {round}: neither epoch");
        }
        let began = Instant::now();
        scene.sync(&[]).ok();
        usual = usual.min(began.elapsed());
        equal(&scene.image, &scene.replica);
        let leaks = qemu_img(&["check", "-f", "qcow2"]).arg(&scene.replica).output();
        reclaimed += u32::from(leaks.status.success());
        assert!(leaks.status.success(), "round {round}: {leaks}");
    }
    println!("{hit} syncs were killed in time, {reclaimed} left nothing behind");
}

/// A scene whose source is a qcow2 file.
fn served(what: &str, size: &str) -> Option<Scene> {
    let mut scene = scene(what, MIB)?;
    scene.stop();
    scene.image = scene.site.path("source").join("vm.qcow2");
    std::fs::create_dir(scene.image.parent().expect("a folder")).expect("a folder");
    qemu_img(&["create", "-q", "-f", "qcow2"]).arg(&scene.image).arg(size).ok();
    scene.start();
    Some(scene)
}

/// Fails the test unless QEMU finds the same disk in both qcow2 files.
fn equal_disks(scene: &Scene) {
    sound(&scene.replica);
    sound(&scene.image);
    qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "qcow2"]).arg(&scene.image).arg(&scene.replica).ok();
}

#[test]
fn a_served_qcow2_is_tracked() {
    let Some(mut scene) = served("a served qcow2", "32M") else { return };
    assert_eq!(scene.client().size, 32 * MIB);
    scene.change(200);
    scene.sync(&[]).ok();
    let changed = scene.change(100).len() as u64;
    // A client's flush, and a snapshot that is read meanwhile.
    let mut client = scene.client();
    client.flush().expect("a flush");
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(
        (&summary["method"], &summary["blocks_changed"]),
        (&"tracked".into(), &changed.into()),
        "{summary}"
    );
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).ok();
    drop(client);
    // A raw replica of it.
    let raw = scene.site.path("vm.raw.copy");
    scene.site.sync(&scene.image, &raw, &[]).ok();
    let last = scene.change(50).len() as u64;
    scene.stop();
    assert!(servers(&scene.image).is_empty());
    equal_disks_but(&scene, last);
    // What was written to it is still known, and it is read as the disk that it is.
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(
        (&summary["method"], &summary["blocks_changed"]),
        (&"tracked".into(), &last.into()),
        "{summary}"
    );
    equal_disks(&scene);
    scene.site.sync(&scene.image, &raw, &[]).ok();
    equal(&raw, &scene.image);
    // What others write while it is not served.
    qemu_io(&scene.image, "write -P 5 2M 64K");
    scene.start();
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "compare", "{summary}");
    scene.stop();
    equal_disks(&scene);
    scene.site.dsync(["serve"]).arg(&scene.image).args(["--socket", "s", "--format", "raw"]).code(4);
}

/// Its map is another at each batch: what was a hole when the mirror began may have become data.
#[test]
fn a_mirror_of_a_served_qcow2_has_what_is_written_into_its_holes() {
    let Some(scene) = served("a mirror of a served qcow2", "64M") else { return };
    scene.sync(&[]).ok();
    let mut mirror =
        scene.site.dsync(["mirror"]).arg(&scene.image).arg(&scene.replica).args(["--rpo", "200ms"]).start();
    mirror.wait_to_say("mirroring to");
    let mut client = scene.client();
    let holds = |at: u64, byte: u8| {
        let pattern = format!("read -q -P {byte} {at} {MIB}");
        let output = Run::new("qemu-io")
            .args(["-U", "-r", "-f", "qcow2", "-c", &pattern])
            .arg(&scene.replica)
            .output();
        output.status.success() && !output.text().contains("verification failed")
    };
    for (round, at) in [0, 10 * MIB, 30 * MIB].into_iter().enumerate() {
        let byte = round as u8 + 1;
        client.write(at, &[byte; MIB as usize]).and_then(|()| client.flush()).expect("a write");
        until("it is mirrored", || holds(at, byte));
    }
    mirror.signal(Signal::TERM);
    assert!(mirror.output(Duration::from_secs(60)).status.success());
    scene.site.dsync(["verify"]).arg(&scene.image).arg(&scene.replica).ok();
}

/// They differ in what was not synced yet.
fn equal_disks_but(scene: &Scene, blocks: u64) {
    let compared =
        qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "qcow2"]).arg(&scene.image).arg(&scene.replica);
    assert_eq!(compared.output().status.success(), blocks == 0);
}

#[test]
fn a_killed_server_of_a_qcow2_loses_nothing_that_it_answered() {
    let Some(mut scene) = served("kills of a qcow2's server", "32M") else { return };
    scene.sync(&[]).ok();
    for _ in 0..rounds(3, 30) {
        scene.change(100);
        // Not flushed.
        let mut client = scene.client();
        let at = scene.random.below(32 * MIB / 4096) * 4096;
        client.write(at, &[7; 4096]).expect("a write");
        scene.server.take().expect("a server").kill();
        until("nobody has it open", || servers(&scene.image).is_empty());
        sound(&scene.image);
        scene.start();
        assert_eq!(scene.client().read(at, 4096).expect("a read"), [7; 4096]);
        let summary = scene.sync(&[]).ok().summary();
        println!("{}", summary["trust"]);
        scene.stop();
        equal_disks(&scene);
        scene.start();
    }
}

#[test]
fn roles_change_between_two_qcow2_files() {
    let Some(mut scene) = served("roles of qcow2 files", "16M") else { return };
    scene.change(100);
    scene.sync(&[]).ok();
    scene.stop();
    let demoted = scene.site.dsync(["demote"]).arg(&scene.image).arg(&scene.replica).output();
    assert!(demoted.status.success(), "{demoted}");
    scene.site.dsync(["promote"]).arg(&scene.replica).ok();
    std::mem::swap(&mut scene.image, &mut scene.replica);
    scene.start();
    scene.change(50);
    let summary = scene.sync(&[]).ok().summary();
    assert_eq!(summary["method"], "tracked", "{summary}");
    scene.stop();
    equal_disks(&scene);
}

#[test]
fn an_image_that_names_other_files_is_not_served() {
    if !need(&["qemu-img"], "qcow2 files that name others") {
        return;
    }
    let site = Site::new();
    let (base, over) = (site.image("secret.raw", MIB), site.path("over.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&over).ok();
    for options in [&[][..], &["--read-only"], &["--format", "qcow2"]] {
        let refused = site.dsync(["serve"]).arg(&over).args(["--socket", "s"]).args(options).code(4);
        refused.says(&["over.qcow2", "backing file"]);
    }
    // The name alone says nothing, nor do the bytes.
    let raw = site.path("disk.raw");
    std::fs::copy(&over, &raw).expect("a copy");
    site.dsync(["serve"]).arg(&raw).args(["--socket", "s"]).code(4).says(&["--format qcow2", "--format raw"]);
}
