//! A VM is booted from its replicas, while syncs go on beneath, and nothing of that stays.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::PathBuf;
use std::time::Duration;

use dsync_tests::libvirt::{Libvirt, writer};
use dsync_tests::site::binary;
use dsync_tests::{Background, Run, Site, rounds, until};
use rustix::process::Signal;

const VM: &str = "t1";
const REHEARSED: &str = "t1-rehearsal";
/// Where the guest never writes.
const MARK: u64 = 40 << 20;

/// A host with a VM, and one with its replicas, where QEMU has a user of its own in the long run.
struct Sites {
    site: Site,
    near: Libvirt,
    far: Libvirt,
    replicas: PathBuf,
}

impl Sites {
    fn new(what: &str) -> Option<Sites> {
        if !Libvirt::possible(what) {
            return None;
        }
        let site = Site::in_memory();
        // libvirt looks at each QEMU anew for another user, which takes a minute.
        let near = Libvirt::start();
        let far = if rounds(0, 1) == 1 { Libvirt::start_as("nobody", "nogroup") } else { Libvirt::start() };
        let [replicas, scratch] = ["replicas", "tmp"].map(|name| site.path(name));
        fs::create_dir(&replicas).expect("a folder");
        fs::create_dir(&scratch).expect("a folder");
        // What is passed on the way to the socket.
        for folder in [site.dir(), &scratch] {
            fs::set_permissions(folder, Permissions::from_mode(0o711)).expect("its mode");
        }
        near.define(VM, "", &[&writer(&site, "a.qcow2"), &writer(&site, "b.raw")]);
        Some(Sites { site, near, far, replicas })
    }

    fn sync(&self) {
        self.near.run(&self.site, binary()).args(["sync", "vm:t1", "--keep", "24h"]).arg(&self.replicas).ok();
    }

    fn rehearse(&self, vm: &str, options: &[&str]) -> Run {
        let run = self.far.run(&self.site, binary()).env("TMPDIR", self.site.path("tmp"));
        run.args(["rehearse", vm]).arg(&self.replicas).args(options)
    }

    fn booted(&self) -> Background {
        let mut running = self.rehearse("vm:t1", &[]).start();
        running.wait_to_say("t1-rehearsal runs from the replicas");
        self.writes();
        running
    }

    /// Waits until the rehearsed guest has written more than it had.
    fn writes(&self) {
        let written = || {
            let said = self.far.virsh(["domblkstat", REHEARSED, "vda"]).ok().text();
            let bytes =
                said.lines().find_map(|line| line.strip_prefix("vda wr_bytes ")?.trim().parse::<u64>().ok());
            bytes.unwrap_or_else(|| panic!("no count: {said}"))
        };
        let before = written();
        until("the guest writes", || written() > before);
    }

    /// Fails if the VM or a file of a rehearsal is left.
    fn nothing_left(&self) {
        self.far.virsh(["domstate", REHEARSED]).code(1);
        assert_eq!(fs::read_dir(self.site.path("tmp")).expect("a folder").count(), 0);
    }
}

#[test]
fn a_vm_runs_from_its_replicas_while_they_are_synced_and_nothing_stays() {
    let Some(sites) = Sites::new("a rehearsal of a VM") else { return };
    sites.near.on(VM);
    sites.near.virsh(["attach-interface", VM, "network", "nowhere", "--config"]).ok();
    sites.near.virsh(["attach-disk", VM, "/no/such.iso", "hdc", "--type", "cdrom", "--config"]).ok();
    sites.sync();
    let mut running = sites.booted();
    let said = running.stdout_so_far();
    assert!(said.contains("left out: hdc, interface"), "{said}");
    let said = sites.far.virsh(["domiflist", REHEARSED]).ok().text()
        + &sites.far.virsh(["domblklist", REHEARSED]).ok().text();
    assert!(!said.contains("nowhere") && !said.contains("such.iso"), "{said}");
    sites.rehearse("vm:t1", &[]).code(6).says(&["t1-rehearsal runs already"]);
    let mut waiting = sites.rehearse("vm:t1", &["--wait"]).start();
    until("it waits", || waiting.stderr_so_far().contains("runs already"));
    waiting.signal(Signal::INT);
    assert!(!waiting.output(Duration::from_secs(120)).status.success());
    sites.near.virsh(["suspend", VM]).ok();
    sites.sync();
    sites.writes();
    running.signal(Signal::INT);
    let said = running.output(Duration::from_secs(120));
    assert!(said.status.success() && said.text().contains("t1-rehearsal was ended after"), "{said}");
    for (image, replica) in [("a.qcow2", "t1-vda.img"), ("b.raw", "t1-vdb.img")] {
        let compare = Run::new("qemu-img").args(["compare", "-U", "-F", "raw"]).arg(sites.site.path(image));
        compare.arg(sites.replicas.join(replica)).ok();
    }
    sites.nothing_left();
    // Killed, with all that it may leave but the files.
    sites.booted().killed();
    until("the VM has ended", || sites.far.virsh(["domstate", REHEARSED]).output().status.code() == Some(1));
}

#[test]
fn a_check_decides_and_a_moment_is_what_it_was() {
    let Some(sites) = Sites::new("a check of a rehearsed VM") else { return };
    let image = fs::File::options().write(true).open(sites.site.path("b.raw")).expect("the image");
    for mark in [b"1", b"2"] {
        image.write_all_at(&mark.repeat(4096), MARK).expect("a mark");
        sites.sync();
    }
    let marked = |mark: u8| {
        format!(
            "socket=$(virsh dumpxml $DSYNC_VM | grep -om1 \"socket='[^']*disks.sock\" | cut -d\"'\" -f2); said=$(qemu-io -r -f \
             raw -c 'read -P {mark} {MARK} 4k' \"nbd+unix:///t1-vdb?socket=$socket\") && ! echo \"$said\" | grep failed"
        )
    };
    for (moment, mark) in [("vm:t1", b'2'), ("vm:t1@1", b'1')] {
        let said = sites.rehearse(moment, &["--json", "--check", &marked(mark)]).ok();
        assert_eq!(said.summary()["ended"], "checked", "{said}");
    }
    let check = |options: &[&str]| sites.rehearse("vm:t1", options);
    check(&["--check", &marked(b'1')]).code(1).says(&["--check", "failed (exit status: 1)"]);
    sites.nothing_left();
}

#[test]
fn a_rehearsal_that_fails_says_why_and_leaves_nothing() {
    let Some(sites) = Sites::new("a check of a rehearsed VM that fails") else { return };
    sites.sync();
    let check = |options: &[&str]| sites.rehearse("vm:t1", options);
    check(&["--check", "echo so; exit 3"]).code(1).says(&["failed (exit status: 3): so"]);
    check(&["--check", "sleep 600", "--for", "1s"]).code(1).says(&["has not ended within the time of --for"]);
    check(&["--check", "virsh -q destroy $DSYNC_VM; sleep 600"])
        .code(1)
        .says(&["ended before its --check did"]);
    let said = check(&["--for", "1s"]).ok();
    assert!(said.text().contains("was ended after"), "{said}");
    sites.nothing_left();
    sites.rehearse("vm:t2", &[]).code(4).says(&["has no replicas of a VM t2: it has t1"]);
    sites.rehearse("/srv/a", &[]).code(2).says(&["is not vm:NAME"]);
}

#[test]
fn a_rehearsed_disk_is_what_it_was_whatever_its_target_is_by_now() {
    let Some(sites) = Sites::new("a rehearsal of a VM whose targets were swapped") else { return };
    sites.sync();
    let definition = sites.near.virsh(["dumpxml", VM]).ok().text();
    let swapped = definition
        .replace("dev='vda'", "dev='-'")
        .replace("dev='vdb'", "dev='vda'")
        .replace("dev='-'", "dev='vdb'");
    let file = sites.site.path("swapped.xml");
    fs::write(&file, swapped).expect("a definition");
    sites.near.virsh(["define"]).arg(&file).ok();
    sites.sync();
    let order = "virsh dumpxml $DSYNC_VM | grep -o \"name='t1-vd.'\\|dev='vd.'\" | tr -d '\\n' | grep \"^name='t1-vdb'dev='vda'name='t1-vda'dev='vdb'\"";
    sites.rehearse("vm:t1", &["--check", order]).ok();
    sites.nothing_left();
}
