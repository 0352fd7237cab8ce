//! A block device whose user says that nothing writes to it beside its server. What dsync itself writes there as to a replica is not missed for
//! that: where the device passes on what it receives, or is restored from its own replica. Nor is what the kernel has counted since, or what
//! a copy of its state does not know.

use std::path::{Path, PathBuf};

use dsync_tests::mount::Loop;
use dsync_tests::tracked::Untrack;
use dsync_tests::{Random, Run, Site, got, image, need_root, skipped};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
const TRUST: &[&str] = &["--trust-device"];

struct Disk {
    site: Site,
    random: Random,
    device: Loop,
}

impl Disk {
    fn new(what: &str) -> Option<Disk> {
        if !need_root(what) {
            return None;
        }
        let site = Site::new();
        let device = Loop::new(&site.image("disk.img", SIZE));
        if device.is_none() {
            skipped(what, "losetup cannot attach a loop device");
        }
        Some(Disk { site, random: Random::new(what), device: device? })
    }

    fn path(&self) -> &Path {
        self.device.device()
    }

    /// Writes to it through its server.
    fn write(&mut self, at: u64) {
        let server = self.site.serve(&[self.path()], TRUST);
        let name = self.path().file_name().expect("a name").to_string_lossy().into_owned();
        let mut client = server.client(&name);
        client.write(at, &self.random.bytes(4096)).expect("a write");
        client.close().expect("the end");
        server.stop();
    }

    /// Its next sync to a replica, and how that found what differed.
    fn sync(&self, to: &Path) -> String {
        let method = self.site.sync(self.path(), to, TRUST).ok().summary()["method"].to_string();
        Run::new("blockdev").arg("--flushbufs").arg(self.path()).output();
        assert!(
            std::fs::read(self.path()).expect("a disk") == std::fs::read(to).expect("a disk"),
            "they differ"
        );
        method
    }
}

#[test]
fn a_device_that_passes_on_what_it_receives_misses_nothing() {
    let Some(disk) = Disk::new("a chain over a device") else { return };
    let (from, to) = (disk.site.image("from.raw", SIZE), disk.site.path("to.raw"));
    let mut random = Random::new("what is passed on");
    for at in [8 * MIB, 20 * MIB, 21 * MIB] {
        image::scribble(&from, at, MIB, &mut random);
        disk.site.sync(&from, disk.path(), &[]).ok();
        assert_ne!(disk.sync(&to), "\"tracked\"");
        // Nothing was written since.
        assert_eq!(disk.sync(&to), "\"tracked\"");
    }
    image::assert_equal(&from, &to);
}

/// Tracked in the kernel, it is told all that dsync writes to it, and not that this is older than what a replica has.
#[test]
fn a_tracked_device_passes_on_what_it_receives_and_is_restored() {
    let what = "a tracked device in two roles";
    let Some(disk) = Disk::new(what) else { return };
    let mut random = Random::new(what);
    let added = disk.site.dsync(["track", "add"]).arg(disk.path()).output();
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let _untrack = Untrack(&disk.site, disk.path());
    let [from, older, newer] = ["from.raw", "older.raw", "newer.raw"].map(|name| disk.site.path(name));
    disk.site.image("from.raw", SIZE);
    let sync = |to: &Path| disk.site.sync(disk.path(), to, &[]);
    for at in [8 * MIB, 20 * MIB, 21 * MIB] {
        image::scribble(&from, at, MIB, &mut random);
        disk.site.sync(&from, disk.path(), &[]).ok();
        let method = sync(&newer).ok().summary()["method"].clone();
        assert_eq!(method == "tracked", at > 8 * MIB, "{method}");
        image::assert_equal(&from, &newer);
    }
    sync(&older).ok();
    disk.site.dsync(["forget", "--replica"]).arg(disk.path()).ok();
    image::scribble(disk.path(), 9 * MIB, MIB, &mut random);
    sync(&newer).ok();
    disk.site.sync(&older, disk.path(), &["--adopt"]).ok();
    sync(&newer).code(4).says(&["may be the newest copy", "dsync has restored it"]);
    disk.site.dsync(["forget", "--replica"]).arg(disk.path()).ok();
    sync(&newer).code(4).says(&["may be the newest copy", "dsync has restored it"]);
    disk.site.sync(disk.path(), &newer, &["--accept-source"]).ok();
    image::assert_equal(&older, &newer);
}

#[test]
fn a_restore_is_not_missed_by_the_next_sync() {
    let Some(mut disk) = Disk::new("a restored device") else { return };
    let [restored_from, other] = ["one.raw", "other.raw"].map(|name| disk.site.path(name));
    let all = |disk: &Disk| -> Vec<String> { [&restored_from, &other].map(|to| disk.sync(to)).into() };
    disk.write(8 * MIB);
    disk.site.sync(disk.path(), &restored_from, &["--keep-last", "5", "--trust-device"]).ok();
    all(&disk);
    disk.write(20 * MIB);
    assert_eq!(all(&disk), ["\"tracked\""; 2]);
    let moments = disk.site.dsync(["rewind", "--json"]).arg(&restored_from).ok().summary();
    let moments = moments["moments"].as_array().expect("moments");
    let to = moments
        .iter()
        .filter_map(|moment| moment["epoch"]["number"].as_u64())
        .min()
        .expect("a moment")
        .to_string();
    disk.site.dsync(["rewind"]).arg(&restored_from).arg("--to").arg(to).ok();
    let device = disk.path().to_path_buf();
    disk.site.sync(&restored_from, &device, &["--adopt"]).ok();
    forget(&disk, &device);
    // Tracked since then, by what its user says.
    disk.write(9 * MIB);
    // It has what was restored from the other lacks.
    disk.site.sync(&device, &other, TRUST).code(4).says(&["may be the newest copy", "dsync has restored it"]);
    let accepted = disk.site.sync(&device, &other, &["--trust-device", "--accept-source"]).ok().summary();
    assert_ne!(accepted["method"], "tracked", "{accepted}");
    disk.write(10 * MIB);
    assert_eq!(disk.sync(&other), "\"tracked\"");
}

/// Yesterday's state of a disk that was written to since. Without the kernel's count, as after a reboot, a replica tells.
#[test]
fn a_restored_state_is_not_believed() {
    for counted in [true, false] {
        let Some(mut disk) = Disk::new("a restored state of a device") else { return };
        let [one, other] = ["one.raw", "other.raw"].map(|name| disk.site.path(name));
        let (state, kept) = (disk.site.state(), disk.site.path("kept"));
        disk.write(8 * MIB);
        disk.sync(&one);
        disk.sync(&other);
        Run::new("cp").arg("-a").args([&state, &kept]).ok();
        disk.write(20 * MIB);
        disk.sync(&one);
        std::fs::remove_dir_all(&state).expect("a folder");
        Run::new("cp").arg("-a").args([&kept, &state]).ok();
        if !counted {
            forget_counts(&state);
            // No replica has told yet, and the user vouches for the device alone.
            assert_ne!(disk.sync(&other), "\"tracked\"");
            disk.site.sync(disk.path(), &one, TRUST).code(4).says(&["has diverged", "goes on from epoch"]);
        }
        if counted {
            assert_ne!(disk.sync(&other), "\"tracked\"");
        }
        assert_eq!(disk.sync(&other), "\"tracked\"");
    }
}

/// Leaves in the stamps of all sources what there is after a reboot: nothing of the kernel's count.
fn forget_counts(state: &Path) {
    for folder in std::fs::read_dir(state.join("sources")).expect("sources") {
        let stamp = folder.expect("a source").path().join("stamp");
        let Ok(text) = std::fs::read(&stamp) else { continue };
        let mut fields: serde_json::Value = serde_json::from_slice(&text).expect("a stamp");
        assert!(fields.as_object_mut().expect("fields").remove("written").is_some(), "no count to forget");
        std::fs::write(&stamp, fields.to_string()).expect("a stamp");
    }
}

#[test]
fn a_write_beside_the_server_is_counted() {
    let Some(mut disk) = Disk::new("a write to a device that is not served") else { return };
    let to = disk.site.path("to.raw");
    disk.write(8 * MIB);
    disk.sync(&to);
    disk.write(9 * MIB);
    assert_eq!(disk.sync(&to), "\"tracked\"");
    let file = std::fs::File::options().write(true).open(disk.path()).expect("a device");
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 4096], 20 * MIB).expect("a write");
    file.sync_all().expect("a flush");
    drop(file);
    assert_ne!(disk.sync(&to), "\"tracked\"");
}

fn forget(disk: &Disk, device: &PathBuf) {
    disk.site.dsync(["forget", "--replica"]).arg(device).ok();
}

/// What its tracker has recorded stays where nobody uses the disk as that ends: the source at rest goes on from there.
#[test]
fn what_was_recorded_in_the_kernel_outlives_its_tracker() {
    let what = "the record of a tracker that is removed";
    let Some(disk) = Disk::new(what) else { return };
    let (device, copy) = (disk.path().to_path_buf(), disk.site.path("copy.raw"));
    let track = |action: &str| disk.site.dsync(["track", action]).arg(&device).output();
    let added = track("add");
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let _untrack = Untrack(&disk.site, &device);
    disk.site.sync(&device, &copy, &[]).ok();
    let content = Random::new(what).bytes(64 << 10);
    let write = |at: u64| {
        let file = std::fs::OpenOptions::new().write(true).open(&device).expect("a disk");
        std::os::unix::fs::FileExt::write_all_at(&file, &content, at).expect("a write");
        file.sync_all().expect("a flush");
        file
    };
    drop(write(MIB));
    // Not while another command is at work with it.
    let mut mirror = disk.site.dsync(["mirror"]).args([&device, &disk.site.path("other.raw")]).start();
    mirror.wait_to_say("other.raw");
    assert_eq!(track("remove").status.code(), Some(6));
    mirror.kill();
    let removed = track("remove");
    assert!(removed.status.success() && removed.text().contains("what was recorded is kept"), "{removed}");
    let synced = disk.site.sync(&device, &copy, TRUST).ok().summary();
    assert_eq!((&synced["method"], &synced["blocks_changed"]), (&"tracked".into(), &16.into()), "{synced}");
    assert!(std::fs::read(&device).expect("a disk") == std::fs::read(&copy).expect("a disk"), "they differ");
    // Nor of a disk that somebody uses.
    assert!(track("add").status.success());
    disk.site.sync(&device, &copy, &[]).ok();
    let held = write(2 * MIB);
    let removed = track("remove");
    assert!(removed.text().contains("its record is discarded"), "{removed}");
    drop(held);
    assert_ne!(disk.sync(&copy), "\"tracked\"");
}
