//! While a host is down its disks are rolled back, and what dsync knows of them is not: no sync is tracked over that, and nothing is called up to
//! date.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{Loop, Mount, wait_until_free};
use dsync_tests::site::binary;
use dsync_tests::{Random, Run, Server, Site, need, need_root, say, skipped};

const MIB: u64 = 1 << 20;

/// How a disk comes to be as it was.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// With the file system that it is on.
    Snapshot,
    /// From a copy with its times.
    Copy,
    /// From one that was made last week.
    Backup,
}

/// A host with a disk on a file system of its own. The fields are let go in this order.
struct Machine {
    mount: Option<Mount>,
    device: Loop,
    place: PathBuf,
    disk: PathBuf,
    random: Random,
    site: Site,
}

/// Runs a command as after a reboot: `BOOT_ID STAT COMMAND...`.
const BOOTED: &str = "mount --bind \"$1\" /proc/sys/kernel/random/boot_id && mount --bind \"$2\" /proc/stat && shift 2 && exec \"$@\"";

impl Machine {
    fn new(what: &str) -> Option<Machine> {
        if !need_root(what) || !need(&["mkfs.ext4", "losetup", "unshare"], what) {
            return None;
        }
        let (random, site) = (Random::new(what), Site::new());
        let fs = site.image("fs.img", 24 * MIB);
        Run::new("mkfs.ext4").args(["-q", "-I", "256"]).arg(&fs).ok();
        let Some(device) = Loop::new(&fs) else {
            skipped(what, "there is no loop device");
            return None;
        };
        let place = site.path("disks");
        let disk = place.join("vm.raw");
        let mount = Mount::new(&[], device.device(), &place);
        if mount.is_none() {
            skipped(what, "mounting is not allowed");
            return None;
        }
        Some(Machine { mount, device, place, disk, random, site })
    }

    /// Copies the file system from here to there while it is not mounted.
    fn copy_all(&mut self, from: &Path, to: &Path) {
        Run::new("umount").arg(&self.place).ok();
        self.mount = None;
        wait_until_free(self.device.device());
        let ends = [format!("if={}", from.display()), format!("of={}", to.display())];
        Run::new("dd").args(ends).args(["bs=1M", "conv=fsync", "status=none"]).ok();
        self.mount = Mount::new(&[], self.device.device(), &self.place);
    }

    /// What the disk is by now is kept.
    fn keep(&mut self, way: Way) {
        let (device, kept) = (self.device.device().to_path_buf(), self.site.path("kept"));
        match way {
            Way::Snapshot => self.copy_all(&device, &kept),
            Way::Copy | Way::Backup => drop(Run::new("cp").arg("-a").args([&self.disk, &kept]).ok()),
        }
        if way == Way::Backup {
            Run::new("touch").args(["-d", "6 days ago"]).arg(&kept).ok();
        }
    }

    /// The host is down, and comes up with the disk as it was kept.
    fn reboot(&mut self, way: Way) {
        let (device, kept) = (self.device.device().to_path_buf(), self.site.path("kept"));
        let mut began = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_secs();
        match way {
            Way::Snapshot => {
                self.copy_all(&kept, &device);
                // All that was stamped was stamped before.
                began += 1;
            }
            Way::Copy | Way::Backup => drop(Run::new("cp").arg("-a").args([&kept, &self.disk]).ok()),
        }
        let stat = std::fs::read_to_string("/proc/stat").expect("the system's figures");
        let is_began = |line: &&str| line.starts_with("btime ");
        let before = stat.lines().find(is_began).expect("when it began");
        let stat = stat.replace(before, &format!("btime {began}"));
        let id = std::fs::read("/proc/sys/kernel/random/uuid").expect("a number");
        let write = |name: &str, bytes: Vec<u8>| std::fs::write(self.site.path(name), bytes);
        write("stat", stat.into()).and_then(|()| write("boot_id", id)).expect("another boot");
    }

    /// A command after the reboot.
    fn after(&self, words: &[&str]) -> Run {
        let run = self.site.run("unshare".as_ref()).args(["--mount", "sh", "-c", BOOTED, "sh"]);
        run.arg(self.site.path("boot_id")).arg(self.site.path("stat")).arg(binary()).args(words)
    }

    /// Writes to blocks of a disk through a server, which goes on.
    fn serve(&mut self, disk: &Path, blocks: &[u64]) -> Server {
        let server = self.site.serve(&[disk], &[]);
        let mut client = server.client("vm");
        for block in blocks {
            client.write(block * BLOCK, &self.random.bytes(BLOCK as usize)).expect("a write");
        }
        client.flush().and_then(|()| client.close()).expect("the end");
        server
    }

    /// A disk of the same name elsewhere on the host.
    fn other(&self) -> PathBuf {
        std::fs::create_dir(self.site.path("other")).expect("a folder");
        self.site.path("other/vm.raw")
    }

    /// A planned switch.
    fn switch(&self, from: &Path, to: &Path) {
        self.site.dsync(["demote"]).arg(from).arg(to).ok();
        self.site.dsync(["promote"]).arg(to).ok();
    }

    /// Fails the test if a replica is called up to date.
    fn shows_none_up_to_date(&self) {
        let status = self.after(&["status"]).ok().text();
        assert!(!status.contains("  up to date"), "{status}");
    }
}

/// The power is cut while a source is served. A copy that is no older than what this may take of its times is compared.
#[test]
fn a_source_that_was_rolled_back_is_refused_or_compared() {
    for (way, switched) in
        [(Way::Snapshot, false), (Way::Snapshot, true), (Way::Copy, false), (Way::Backup, true)]
    {
        say(&format!("{way:?}, after a switch: {switched}"));
        let Some(mut machine) = Machine::new("a source that is rolled back over a reboot") else { return };
        let (disk, replica) = (machine.disk.clone(), machine.other());
        let sync = |machine: &Machine, from: &Path, to: &Path| drop(machine.site.sync(from, to, &[]).ok());
        if switched {
            image::sparse(&replica, 8 * MIB);
            sync(&machine, &replica, &disk);
            machine.switch(&replica, &disk);
        } else {
            image::sparse(&disk, 8 * MIB);
        }
        machine.serve(&disk, &[1, 2, 3]).stop();
        sync(&machine, &disk, &replica);
        machine.keep(way);
        let server = machine.serve(&disk, &[3, 4, 5, 1000]);
        sync(&machine, &disk, &replica);
        server.kill();
        machine.reboot(way);
        assert!(image::first_difference(&disk, &replica).is_some());
        let has = image::fingerprint(&replica).0;
        let run = |words: &[&str]| machine.after(words).arg(&disk).arg(&replica);
        machine.shows_none_up_to_date();
        if way == Way::Copy {
            assert_eq!(run(&["sync", "--json"]).ok().summary()["method"], "compare");
            image::assert_equal(&disk, &replica);
            continue;
        }
        for words in [&["sync"][..], &["sync", "-n"], &["sync", "--method", "compare"], &["demote"]] {
            run(words).code(4).says(&["may be the newest copy", "--accept-source"]);
        }
        machine.shows_none_up_to_date();
        assert_eq!(image::fingerprint(&replica).0, has);
        run(&["sync", "--accept-source"]).ok();
        image::assert_equal(&disk, &replica);
    }
}

/// A replica whose state is elsewhere.
#[test]
fn a_replica_that_was_rolled_back_is_refused() {
    for way in [Way::Snapshot, Way::Copy] {
        let Some(mut machine) = Machine::new("a replica that is rolled back over a reboot") else { return };
        let (replica, source) = (machine.disk.clone(), machine.other());
        let journal = format!("--journal-dir={}", machine.site.path("journal").display());
        image::sparse(&source, 8 * MIB);
        let sync = |machine: &Machine| drop(machine.site.sync(&source, &replica, &[&journal]).ok());
        machine.serve(&source, &[1, 2, 3]).stop();
        sync(&machine);
        machine.keep(way);
        machine.serve(&source, &[3, 4, 5, 1000]).stop();
        sync(&machine);
        machine.reboot(way);
        let run = |words: &[&str]| machine.after(words).arg(&source).arg(&replica).arg(&journal);
        machine.shows_none_up_to_date();
        for words in [&["sync"][..], &["sync", "-n"]] {
            run(words).code(4).says(&["was modified outside dsync", "verify --repair"]);
        }
        machine.after(&["promote", "--force", &journal]).arg(&replica).code(4).says(&["cannot be promoted"]);
        machine.shows_none_up_to_date();
        run(&["verify", "--repair"]).ok();
        image::assert_equal(&source, &replica);
    }
}

/// What a source became by a planned switch is refused as well, also where its state lies beside it and is gone with that.
#[test]
fn an_old_source_that_was_rolled_back_is_refused() {
    for (way, words) in [
        (Way::Snapshot, "is not a dsync replica"),
        (Way::Copy, "was modified outside dsync"),
        (Way::Backup, "6 days ago"),
    ] {
        let Some(mut machine) = Machine::new("an old source that is rolled back over a reboot") else {
            return;
        };
        let (disk, source) = (machine.disk.clone(), machine.other());
        image::sparse(&disk, 8 * MIB);
        machine.serve(&disk, &[1, 2, 3]).stop();
        machine.site.sync(&disk, &source, &[]).ok();
        machine.keep(way);
        machine.serve(&disk, &[3, 4, 5, 1000]).stop();
        machine.switch(&disk, &source);
        machine.reboot(way);
        machine.shows_none_up_to_date();
        for command in [&["sync"][..], &["sync", "-n"], &["verify"]] {
            let run = machine.after(command).arg(&source).arg(&disk);
            if command == ["verify"] && way != Way::Snapshot {
                run.code(5);
            } else {
                run.code(4).says(&[words]);
            }
        }
        machine.after(&["promote", "--force"]).arg(&disk).code(4);
        machine.shows_none_up_to_date();
        machine.after(&["sync", "--adopt"]).arg(&source).arg(&disk).ok();
        image::assert_equal(&source, &disk);
    }
}
