//! VMs under libvirt by their names: all disks of one, at one moment, while their guest never stops writing.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use dsync_tests::libvirt::{Libvirt, disk, one_moment, writer};
use dsync_tests::mount::Loop;
use dsync_tests::site::binary;
use dsync_tests::tracked::Untrack;
use dsync_tests::{Background, Output, Random, Run, Site, got, need, rounds, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

const VM: &str = "t1";

struct World {
    site: Site,
    host: Libvirt,
    replicas: PathBuf,
}

impl World {
    /// A VM with a qcow2 disk and a raw one, whose guest writes to both in turn; `None` if there can be none here.
    fn new(what: &str) -> Option<World> {
        World::at(what, Site::in_memory)
    }

    fn at(what: &str, site: fn() -> Site) -> Option<World> {
        if !Libvirt::possible(what) {
            return None;
        }
        let (site, host) = (site(), Libvirt::start());
        let replicas = site.path("replicas");
        std::fs::create_dir(&replicas).expect("a folder");
        host.boot(VM, &[&writer(&site, "a.qcow2"), &writer(&site, "b.raw")]);
        Some(World { site, host, replicas })
    }

    fn dsync(&self, words: &[&str]) -> Run {
        self.host.run(&self.site, binary()).args(words)
    }

    fn run(&self, options: &[&str]) -> Run {
        self.dsync(&["sync", "vm:t1"]).arg(&self.replicas).args(options)
    }

    fn replica(&self, name: &str) -> PathBuf {
        self.replicas.join(name)
    }

    /// The replicas of the two disks.
    fn disks(&self) -> [PathBuf; 2] {
        ["t1-vda.img", "t1-vdb.img"].map(|name| self.replica(name))
    }

    /// Syncs as it should be, and leaves nothing behind.
    fn sync(&self) -> Output {
        let said = self.run(&[]).ok();
        assert_eq!(said.stderr, "", "{said}");
        self.clean();
        said
    }

    /// Syncs while the guest stands still, and holds the replicas against its images.
    fn sync_paused(&self) -> String {
        self.host.virsh(["suspend", VM]).ok();
        let said = self.sync().text();
        self.equal();
        self.host.virsh(["resume", VM]).ok();
        said
    }

    /// Fails unless the replicas have what the images have.
    fn equal(&self) {
        for (image, replica) in ["a.qcow2", "b.raw"].into_iter().zip(self.disks()) {
            let image = self.site.path(image);
            Run::new("qemu-img").args(["compare", "-U", "-F", "raw"]).arg(&image).arg(&replica).ok();
        }
    }

    /// Has the VM go on in an image of its own above that of one disk.
    fn snapshot(&self, disk: &str) {
        let file = self.site.path(&format!("{disk}.snap"));
        let own = format!("{disk},snapshot=external,file={}", file.display());
        let other = if disk == "vda" { "vdb,snapshot=no" } else { "vda,snapshot=no" };
        let words = ["--disk-only", "--no-metadata", "--diskspec", &own, "--diskspec", other];
        self.host.virsh(["snapshot-create-as", VM].into_iter().chain(words)).ok();
    }

    /// Merges that into the image beneath it.
    fn merge(&self, disk: &str) {
        self.host.virsh(["blockcommit", VM, disk, "--active", "--pivot", "--wait"]).ok();
        std::fs::remove_file(self.site.path(&format!("{disk}.snap"))).expect("the snapshot");
    }

    /// Fails if a job is left, a file of one, or more than one checkpoint.
    fn clean(&self) {
        let both = format!("checkpoint-list --name {VM}; backup-dumpxml {VM}");
        let said = self.host.virsh([&*both]).output();
        let is_free = ["no domain backup job", "domain is not running"];
        assert!(is_free.iter().any(|none| said.stderr.contains(none)), "{said}");
        let checkpoints = said.text().split_whitespace().count();
        assert!(checkpoints <= 1 && self.host.left(VM).is_empty(), "{said} {:?}", self.host.left(VM));
        let bitmaps: BTreeSet<_> = self.bitmaps().into_iter().map(|(_, name)| name).collect();
        assert!(bitmaps.len() <= 1, "{bitmaps:?}");
    }

    /// The bitmaps of ours that QEMU has, of the raw disk: each with the node that it is on.
    fn bitmaps(&self) -> Vec<(String, String)> {
        let nodes = r#"{"execute":"query-named-block-nodes","arguments":{"flat":true}}"#;
        let said = self.host.virsh(["qemu-monitor-command", VM, nodes]).output();
        let said: serde_json::Value = serde_json::from_str(&said.text()).unwrap_or_default();
        let nodes = said["return"].as_array().into_iter().flatten();
        let names = |node: &serde_json::Value| -> Vec<(String, String)> {
            let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
            let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
            let of_node = bitmaps.map(|bitmap| (text(&node["node-name"]), text(&bitmap["name"])));
            of_node.filter(|(node, name)| node.ends_with("-storage") && name.starts_with("dsync-")).collect()
        };
        nodes.flat_map(names).collect()
    }
}

#[test]
fn all_disks_of_a_vm_are_of_one_moment_in_each_sync() {
    let Some(world) = World::new("a VM by its name") else { return };
    let mut last = 0;
    for round in 0..5 {
        world.host.writes_on(VM);
        let said = world.sync();
        let [a, b] = &world.disks();
        let now = one_moment([a, b]);
        assert!(now > last, "{now} after {last}");
        last = now;
        let text = said.text();
        let how =
            if round == 0 { "vda: copied: it was not synced yet" } else { "vda: QEMU's bitmap since dsync-" };
        assert!(text.contains(how), "{text}");
        assert!(text.contains(&how.replace("vda", "vdb")), "{text}");
        assert_eq!(text.matches("(as told by QEMU)").count(), if round > 0 { 2 } else { 0 }, "{text}");
    }
}

#[test]
fn a_kill_of_qemu_costs_a_comparison() {
    let Some(world) = World::new("a VM by its name whose QEMU is killed") else { return };
    world.sync();
    assert!(world.sync_paused().contains("vda: QEMU's bitmap since"));
    // Its bitmap is gone with it.
    world.host.kill(VM);
    world.host.on(VM);
    let said = world.sync_paused();
    assert!(
        said.contains("vda: compared: its QEMU was started, its image opened, or its checkpoint deleted or made again after its last sync"),
        "{said}"
    );
    world.host.writes_on(VM);
    let said = world.sync_paused();
    assert!(said.contains("vda: QEMU's bitmap since") && said.contains("(as told by QEMU)"), "{said}");
    world.host.virsh(["blockresize", VM, "vda", "80M"]).ok();
    world.host.writes_on(VM);
    assert!(world.sync_paused().contains("vda: compared: the disk was resized"));
    // Somebody deletes the checkpoint.
    let [checkpoint] = &world.host.checkpoints(VM)[..] else { panic!("one checkpoint") };
    world.host.virsh(["checkpoint-delete", VM, checkpoint]).ok();
    let said = world.sync_paused();
    assert!(
        said.contains("vda: compared: ") && said.contains("its checkpoint deleted or made again"),
        "{said}"
    );
    // Somebody makes another of its name: it has none of what was written before.
    let [checkpoint] = &world.host.checkpoints(VM)[..] else { panic!("one checkpoint") };
    world.host.writes_on(VM);
    world.host.virsh(["checkpoint-delete", VM, checkpoint]).ok();
    // libvirt tells the time in seconds.
    std::thread::sleep(Duration::from_millis(1100));
    let disks = ["--diskspec", "vda", "--diskspec", "vdb,checkpoint=no"];
    world.host.virsh(["checkpoint-create-as", VM, checkpoint].into_iter().chain(disks)).ok();
    let said = world.sync_paused();
    assert!(said.contains("or its checkpoint deleted or made again after its last sync"), "{said}");
}

/// Its QEMU would end with a connection, also with that of a sync that is killed.
#[test]
fn a_vm_with_io_threads_is_left_alone() {
    let Some(world) = World::new("a VM by its name with I/O threads") else { return };
    let version = Run::new("qemu-system-x86_64").arg("--version").ok().text();
    let major = version.split("version ").nth(1).and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    if major >= Some(9) {
        return dsync_tests::left_out(
            "a QEMU that ends with a connection in an I/O thread",
            "QEMU before 9.0",
        );
    }
    world.sync();
    let text = world.host.virsh(["dumpxml", "--inactive", VM]).ok().text();
    let text = text.replacen("<vcpu ", "<iothreads>1</iothreads><vcpu ", 1);
    let text = text.replacen("type='qcow2' cache='unsafe'", "type='qcow2' cache='unsafe' iothread='1'", 1);
    let xml = world.site.path("threads.xml");
    std::fs::write(&xml, text).expect("the VM");
    world.host.virsh(["destroy", VM]).ok();
    world.host.virsh(["define"]).arg(&xml).ok();
    world.host.on(VM);
    for options in [&[][..], &["-n"]] {
        world.run(options).code(4).says(&["vda of t1 has an I/O thread", "--without vda"]);
    }
    world.verify().code(4).says(&["vda of t1 has an I/O thread"]);
    world.run(&["--without", "vda"]).ok();
    world.host.writes_on(VM);
    world.host.virsh(["destroy", VM]).ok();
    world.sync();
    world.equal();
}

#[test]
fn a_vm_that_is_off_is_read_once_and_does_not_start_meanwhile() {
    let Some(world) = World::new("a VM by its name that is off") else { return };
    world.host.virsh(["destroy", VM]).ok();
    // Enough for some seconds, however little its guest has written.
    let image = world.site.path("a.qcow2");
    Run::new("qemu-io").args(["-f", "qcow2", "-c", "write -q -P 7 32M 24M"]).arg(image).ok();
    let mut running = world.run(&["--bwlimit", "1M"]).start();
    until("the first copy is under way", || {
        assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
        world.replica("t1-vda.img.partial").exists()
    });
    world.host.virsh(["start", VM]).code(1).says(&["lock"]);
    running.kill();
    drop(running);
    world.host.on(VM);
    world.sync();
    world.host.virsh(["destroy", VM]).ok();
    let said = world.sync().text();
    assert!(said.contains("vda: compared: the VM ran at its last sync"), "{said}");
    world.equal();
    let said = world.sync().text();
    assert!(said.contains("vda: not read: the VM is off") && said.contains("vdb: not read"), "{said}");
    world.host.on(VM);
    let said = world.sync_paused();
    assert!(said.contains("vda: compared: the VM was off at its last sync"), "{said}");
    assert!(world.sync_paused().contains("vda: QEMU's bitmap since"));
}

#[test]
fn a_sync_of_a_vm_that_is_killed_leaves_nothing_that_the_next_does_not_end() {
    let Some(world) = World::new("a VM by its name whose sync is killed") else { return };
    let mut random = Random::new("a killed sync of a VM");
    let mut killed = 0;
    for _ in 0..rounds(6, 200) {
        // It takes half a second to a second, most of it with a job.
        let mut running = world.run(&["--bwlimit", "40M"]).start();
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        running.kill();
        killed += u32::from(running.output(Duration::from_secs(10)).was_killed());
    }
    assert!(killed > 0);
    world.host.writes_on(VM);
    // It may have to say what it has completed.
    world.run(&[]).ok();
    world.clean();
    let [a, b] = &world.disks();
    one_moment([a, b]);
    world.host.writes_on(VM);
    assert!(world.sync().text().contains("vda: QEMU's bitmap since"));
    one_moment([a, b]);
}

impl World {
    /// Starts a sync that takes seconds, and waits until its job is there.
    fn begun(&self) -> Background {
        let mut running = self.run(&["--bwlimit", "32K", "--adopt"]).start();
        until("the job is there", || {
            assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
            self.host.job(VM).is_some()
        });
        running
    }
}

#[test]
fn a_sync_of_a_vm_that_is_interrupted_ends_its_job_and_others_are_left_alone() {
    let Some(world) = World::new("a VM by its name that is disturbed") else { return };
    // A dry run begins nothing.
    let said = world.run(&["-n"]).ok().text();
    assert!(
        said.contains("vda: copied: it was not synced yet") && !world.site.state().join("machines").exists()
    );
    assert_eq!((world.host.job(VM), world.host.checkpoints(VM)), (None, vec![]));
    let mut running = world.begun();
    // Another run waits for the end of this one, or does not.
    world.run(&[]).code(6).says(&["t1 is synced or verified already, by dsync"]);
    running.signal(Signal::TERM);
    assert_eq!(running.output(Duration::from_secs(20)).status.code(), Some(130));
    world.clean();
    world.sync();
    // A job of somebody else.
    let job = world.site.path("other.xml");
    let text = "<domainbackup mode='pull'><server transport='unix' socket='/var/lib/libvirt/other.sock'/><disks><disk name='vdb' \
                type='file'><scratch file='/var/lib/libvirt/other'/></disk></disks></domainbackup>";
    std::fs::write(&job, text).expect("a job");
    world.host.virsh(["backup-begin", VM]).arg(&job).ok();
    for options in [&[][..], &["-n"]] {
        world
            .run(options)
            .code(6)
            .says(&["another backup job of t1 is running (at /var/lib/libvirt/other.sock)"]);
    }
    assert!(world.host.job(VM).is_some_and(|job| job.contains("other.sock")));
    world.host.virsh(["domjobabort", VM]).ok();
    until("the job is gone", || world.host.job(VM).is_none());
    assert!(world.sync().text().contains("vda: QEMU's bitmap since"));
    // QEMU is killed in the job: nothing may come of it.
    let running = world.begun();
    world.host.kill(VM);
    assert!(!running.output(Duration::from_secs(20)).status.success());
    world.host.on(VM);
    world.sync_paused();
    world.dsync(&["sync", "vm:t9"]).arg(&world.replicas).code(1).says(&["there is no VM t9 in libvirt"]);
    world.run(&["--without", "vdc"]).code(2).says(&["t1 has no disk vdc"]);
    world.run(&["--method", "copy"]).code(2);
    let listed = world.dsync(&["discover"]).ok().text();
    assert!(listed.contains("dsync sync vm:t1 HOST:/srv/vms/"), "{listed}");
    world.dsync(&["extract", "vm:t1"]).code(2).says(&["vm:t1 is a VM, which is not taken here"]);
    let nowhere = world
        .site
        .dsync(["sync", "vm:t1", "replicas"])
        .env("LIBVIRT_DEFAULT_URI", "qemu:///system?socket=/nowhere");
    nowhere.code(1).says(&["libvirt does not answer"]);
    let without = world.site.dsync(["sync", "vm:t1", "replicas"]).env("PATH", "/nowhere");
    without.code(1).says(&["vm:NAME needs virsh, which is not here"]);
}

#[test]
fn a_disk_is_added_and_another_goes() {
    let Some(world) = World::new("a VM by its name whose disks change") else { return };
    world.sync();
    let added = world.site.image("c.raw", 8 * MIB);
    let xml = world.site.path("c.xml");
    std::fs::write(&xml, disk(&added, 'c', "")).expect("a disk");
    world.host.virsh(["attach-device", VM, "--live", "--config"]).arg(&xml).ok();
    let said = world.sync().text();
    assert!(
        said.contains("vda: QEMU's bitmap since")
            && said.contains("t1-vdc.img is up to date at epoch 1 (seeded"),
        "{said}"
    );
    assert!(said.contains("4 disks at one moment"), "{said}");
    let [a, b] = &world.disks();
    one_moment([a, b]);
    // One that others write to as well.
    world.host.virsh(["destroy", VM]).ok();
    world.host.virsh(["detach-disk", VM, "vdc", "--config"]).ok();
    world.host.virsh(["attach-disk", VM, "", "hdc", "--type", "cdrom", "--config"]).ok();
    std::fs::write(&xml, disk(&added, 'd', "<shareable/>")).expect("a disk");
    world.host.virsh(["attach-device", VM, "--config"]).arg(&xml).ok();
    world.run(&[]).code(4).says(&["vdd of t1 cannot be copied, as it is shared", "--without vdd"]);
    let said = world.run(&["--without", "vdd"]).ok().text();
    assert!(said.contains("vdd: left out: by --without"), "{said}");
    assert!(said.contains("c.raw is no disk of t1 any more: its replica t1-vdc.img stays"), "{said}");
    world.equal();
    world.host.on(VM);
    let said = world.run(&["--without", "vdd"]).ok().text();
    assert!(said.contains("hdc: left out: a CD-ROM"), "{said}");
    assert!(!said.contains("any more") && said.contains("3 disks at one moment"), "{said}");
    // What stays of it is in nobody's way.
    let group = format!("{}@now", world.replicas.display());
    let mut shown =
        world.dsync(&["serve", "--group", &group, "--socket"]).arg(world.site.socket("shown")).start();
    shown.wait_to_say("t1-vdc.img is left out: it had no part in that moment of the group vm.t1");
    shown.wait_to_say("t1-vdb.img");
    shown.kill();
}

/// Each image is another disk, whose replica stays where it is.
#[test]
fn a_disk_that_is_moved_twice_has_a_replica_of_its_own_each_time() {
    let Some(world) = World::new("a VM whose disk is moved twice") else { return };
    world.sync();
    for (image, replica) in [("c.raw", "t1-vdb.2.img"), ("d.raw", "t1-vdb.3.img")] {
        let image = world.site.path(image);
        world.host.virsh(["blockcopy", VM, "vdb", "--pivot", "--wait", "--transient-job"]).arg(&image).ok();
        world.sync();
        world.host.virsh(["suspend", VM]).ok();
        world.sync();
        let replica = world.replica(replica);
        Run::new("qemu-img").args(["compare", "-U", "-F", "raw"]).arg(&image).arg(&replica).ok();
        world.host.virsh(["resume", VM]).ok();
    }
}

#[test]
fn a_vm_starts_elsewhere_from_its_replicas() {
    const ODD: &str = "it's a & b";
    if !Libvirt::possible("a VM that starts from its replicas") {
        return;
    }
    let (site, far, host, other) = (Site::in_memory(), Site::in_memory(), Libvirt::start(), Libvirt::start());
    let replicas = far.path("vms");
    std::fs::create_dir(&replicas).expect("a folder");
    let nvram = site.image("nvram.fd", MIB / 4);
    std::fs::write(&nvram, vec![7; 1 << 18]).expect("an NVRAM");
    let os = format!(
        "<loader readonly='yes' type='pflash'>/usr/share/seabios/bios-256k.bin</loader><nvram>{}</nvram>",
        nvram.display()
    );
    host.define(ODD, &os, &[&writer(&site, "a.qcow2"), &writer(&site, "b.raw")]);
    host.on(ODD);
    let sync = || {
        let run = host.run(&site, binary()).args(["sync", &format!("vm:{ODD}"), "--rsh", RSH]);
        run.arg(format!("far:{}", replicas.display())).env("RSH_STATE", far.state())
    };
    sync().ok();
    host.writes_on(ODD);
    let said = sync().ok().text();
    assert!(said.contains("vda: QEMU's bitmap since") && said.contains("4 disks at one moment"), "{said}");
    let names: Vec<String> = replicas
        .read_dir()
        .expect("replicas")
        .map(|entry| entry.expect("one").file_name().into_string().expect("a name"))
        .collect();
    let of = |end: &str| {
        let name = names.iter().find(|name| !name.starts_with('.') && name.ends_with(end));
        replicas.join(name.unwrap_or_else(|| panic!("no {end} in {names:?}")))
    };
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &of(".xml").metadata().expect("the definition").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    host.virsh(["destroy", ODD]).ok();
    let last = one_moment([&of("vda.img"), &of("vdb.img")]);
    assert_eq!(std::fs::read(of(".nvram")).expect("the NVRAM"), vec![7; 1 << 18]);
    let carried = std::fs::read_to_string(of(".xml")).expect("the definition");
    let defined = host.virsh(["dumpxml", "--inactive", "--security-info", ODD]).ok().text();
    // And behind it which replica each disk is.
    let (definition, disks) = carried.split_once("<?dsync-disks").expect("the disks");
    assert_eq!(definition.trim_end(), defined.trim_end());
    assert!(disks.contains("-vda.img vdb=") && disks.trim_end().ends_with("-vdb.img?>"), "{disks}");
    // What was written last, with the VM off: nothing is given up.
    assert!(sync().ok().text().contains("vda: compared: the VM ran at its last sync"));
    let group =
        names.iter().find_map(|name| name.strip_prefix('.')?.strip_suffix(".dsync-group")).expect("a group");
    let folder = replicas.join(format!(".{group}.dsync-group"));
    // A rehearsal, and the switch, as the guide has them.
    let socket = far.socket("try");
    let now = format!("{}@now", folder.display());
    let mut serving = far.dsync(["serve", "--group", &now, "--writable", "--socket"]).arg(&socket).start();
    serving.wait_to_say("serving");
    serving.signal(Signal::TERM);
    assert!(serving.output(Duration::from_secs(20)).status.success());
    let there = far.path("there.xml");
    far.dsync(["promote", "--force", "--group"]).arg(&folder).arg("--define").arg(&there).ok();
    assert!(one_moment([&of("vda.img"), &of("vdb.img")]) > last);
    other.virsh(["define"]).arg(&there).ok();
    other.on(ODD);
    // And back, into new files.
    other.virsh(["destroy", ODD]).ok();
    let back = site.path("back");
    std::fs::create_dir(&back).expect("a folder");
    let group =
        names.iter().find_map(|name| name.strip_prefix('.')?.strip_suffix(".dsync-group")).expect("a group");
    let run = far.dsync(["sync", "--group", group, "--rsh", RSH]).arg(format!("far:{}", back.display()));
    run.env("RSH_STATE", site.state()).ok();
    for end in ["vda.img", "vdb.img", ".xml"] {
        let there = of(end);
        dsync_tests::image::assert_equal(&there, &back.join(there.file_name().expect("a name")));
    }
}

#[test]
fn a_snapshot_of_a_vm_is_compared_and_its_disk_stays_what_it_is() {
    let Some(world) = World::new("a VM by its name with a snapshot") else { return };
    world.sync();
    for disk in ["vda", "vdb"] {
        world.snapshot(disk);
    }
    world.host.writes_on(VM);
    let said = world.sync().text();
    assert!(
        said.contains("vda: compared: its image has another beneath") && said.contains("3 disks at one"),
        "{said}"
    );
    let [a, b] = &world.disks();
    one_moment([a, b]);
    world.host.virsh(["destroy", VM]).ok();
    world.run(&[]).code(4).says(&["vda of t1 has an image with another beneath"]);
    world.host.virsh(["start", VM]).ok();
    for disk in ["vda", "vdb"] {
        world.merge(disk);
    }
    assert!(world.sync_paused().contains("vda: compared: "));
    world.host.writes_on(VM);
    assert!(world.sync_paused().contains("vda: QEMU's bitmap since"));
}

/// What the job that merges a snapshot writes to the image beneath is in the bitmap of that.
#[test]
fn a_snapshot_of_a_raw_disk_that_is_merged_between_two_syncs_is_told() {
    let Some(world) = World::new("a VM by its name with a snapshot that is merged") else { return };
    world.sync();
    for _ in 0..2 {
        world.host.writes_on(VM);
        world.snapshot("vdb");
        world.host.writes_on(VM);
        world.merge("vdb");
    }
    let said = world.sync_paused();
    assert!(said.contains("vdb: QEMU's bitmap since"), "{said}");
    // Somebody removes it.
    let [(node, name)] = &world.bitmaps()[..] else { panic!("one bitmap") };
    let gone = format!(
        r#"{{"execute":"block-dirty-bitmap-remove","arguments":{{"node":"{node}","name":"{name}"}}}}"#
    );
    world.host.virsh(["qemu-monitor-command", VM, &gone]).ok();
    world.host.writes_on(VM);
    let said = world.sync_paused();
    assert!(said.contains("vdb: compared: QEMU's bitmap does not hold: ") && said.contains(name), "{said}");
    assert!(said.contains("vda: QEMU's bitmap since"), "{said}");
    world.host.writes_on(VM);
    assert!(world.sync_paused().contains("vdb: QEMU's bitmap since"));
    // Its guest writes 4 KiB here and there, and no more is sent.
    world.host.writes_on(VM);
    let lines = world.run(&["--json"]).ok().json();
    let of_vdb =
        |line: &&serde_json::Value| line["destination"].as_str().is_some_and(|to| to.ends_with("t1-vdb.img"));
    let summary = lines.iter().find(of_vdb).expect("its summary");
    let number = |key: &str| summary[key].as_u64().expect("a number");
    assert!(number("blocks_changed") < 2 * number("extents"), "{summary}");
    // QEMU does not answer once, as what is left of the sync is tidied up: it is known the next time.
    world.host.writes_on(VM);
    let run = world.run(&[]).env("PATH", world.before_virsh(DEAF)).env("ONCE", world.site.path("once"));
    run.ok().says(&["the checkpoints of t1 are not tidied up", "does not tell what bitmaps it has"]);
    world.host.writes_on(VM);
    let said = world.sync_paused();
    assert_eq!(said.matches("QEMU's bitmap since").count(), 2, "{said}");
    world.dsync(&["forget", "vm:t1"]).ok();
    assert_eq!(world.bitmaps(), []);
}

/// Stands before virsh: a bitmap is begun, and that is not answered.
const UNANSWERED: &str = r#"#!/bin/sh
if [ "$2" = qemu-monitor-command ] && echo "$*" | grep -q '"transaction"' && mkdir "$ONCE" 2>/dev/null; then
    /usr/bin/virsh "$@" >/dev/null
    echo "error: Timed out during operation" >&2
    exit 1
fi
exec /usr/bin/virsh "$@"
"#;

#[test]
fn a_bitmap_of_which_it_is_not_known_when_it_began_is_not_believed() {
    let Some(world) = World::new("a VM by its name whose QEMU does not answer in time") else { return };
    world.run(&[]).env("PATH", world.before_virsh(UNANSWERED)).env("ONCE", world.site.path("once")).ok();
    assert!(world.site.path("once").exists());
    assert_eq!(world.bitmaps(), []);
    world.host.writes_on(VM);
    let said = world.sync_paused();
    assert!(said.contains("vdb: compared: ") && said.contains("vda: QEMU's bitmap since"), "{said}");
    world.host.writes_on(VM);
    assert!(world.sync_paused().contains("vdb: QEMU's bitmap since"));
}

/// Stands before virsh: once the job was ended, QEMU is not asked.
const DEAF: &str = r#"#!/bin/sh
if [ "$2" = domjobabort ]; then touch "$ONCE.ended"; fi
if [ "$2" = qemu-monitor-command ] && [ -e "$ONCE.ended" ] && mkdir "$ONCE" 2>/dev/null; then
    echo "error: Timed out during operation" >&2
    exit 1
fi
exec /usr/bin/virsh "$@"
"#;

/// Stands before virsh, and changes the VM once: as its job begins, or when it is looked at for the second time.
const CHANGES: &str = r#"#!/bin/sh
if [ "$2" = backup-begin ] || { [ "$2$4" = dumpxml ] && ! mkdir "$ONCE.looked" 2>/dev/null; }; then
    mkdir "$ONCE" 2>/dev/null && /usr/bin/virsh -q desc t1 --config --new-desc "changed $ONCE"
fi
exec /usr/bin/virsh "$@"
"#;

/// The same, but once there is this file, no job is told of.
const ENDED: &str = r#"#!/bin/sh
if [ "$2" = backup-dumpxml ] && [ -e "$ONCE" ]; then
    echo "error: no domain backup job" >&2
    exit 1
fi
exec /usr/bin/virsh "$@"
"#;

impl World {
    /// The PATH with which this script stands before virsh.
    fn before_virsh(&self, script: &str) -> String {
        let bin = self.site.path("bin");
        std::fs::create_dir(&bin).expect("a folder");
        std::fs::write(bin.join("virsh"), script).expect("a virsh");
        Run::new("chmod").arg("+x").arg(bin.join("virsh")).ok();
        format!("{}:/usr/bin:/bin", bin.display())
    }
}

/// The same, but once there is this file, libvirt does not answer.
const HANGS: &str = r#"#!/bin/sh
[ ! -e "$ONCE" ] || sleep 3600
exec /usr/bin/virsh "$@"
"#;

/// The same, but a job is asked for only once there is this file. Leaves a file for each command.
const LATE: &str = r#"#!/bin/sh
: >"$ONCE.$2"
[ "$2" != backup-begin ] || while [ ! -e "$ONCE" ]; do sleep 0.05; done
exec /usr/bin/virsh "$@"
"#;

/// Beside the second request libvirt would let the first wait, and begin its job when nobody is there to end it.
#[test]
fn a_job_that_a_killed_sync_has_asked_for_is_waited_for_and_ended() {
    let Some(world) = World::new("a VM by its name whose sync is killed as its job begins") else { return };
    let path = world.before_virsh(LATE);
    let go_on = world.site.path("go-on");
    let run = || world.run(&[]).env("PATH", &path).env("ONCE", &go_on).start();
    let called = |command: &str| go_on.with_extension(command);
    let killed = run();
    until("a job is asked for", || called("backup-begin").exists());
    assert!(killed.killed().was_killed());
    std::fs::remove_file(called("dumpxml")).expect("a call");
    let next = run();
    until("the next sync has begun", || called("dumpxml").exists());
    std::fs::write(&go_on, "").expect("a file");
    let said = next.output(Duration::from_secs(60));
    assert!(said.status.success(), "{said}");
    // libvirt itself has the second request wait for 30 seconds.
    assert!(said.time < Duration::from_secs(25), "{said}");
    world.clean();
}

#[test]
fn a_libvirt_that_hangs_is_not_waited_for_without_end() {
    let Some(world) = World::new("a VM by its name whose libvirt hangs") else { return };
    world.sync();
    let path = world.before_virsh(HANGS);
    let hangs = world.site.path("hangs");
    world.host.writes_on(VM);
    let run = || world.run(&["--bwlimit", "1M", "--timeout", "2s"]).env("PATH", &path).env("ONCE", &hangs);
    let mut running = run().start();
    until("the job is there", || {
        assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
        world.host.job(VM).is_some()
    });
    std::fs::write(&hangs, "").expect("a file");
    let failed = running.output(Duration::from_secs(60));
    assert_eq!(failed.status.code(), Some(1), "{failed}");
    failed.says(&["libvirt hangs: \"virsh ", "has not ended within 2", "\"systemctl status libvirtd\""]);
    run().code(1).says(&["libvirt hangs: \"virsh dumpxml\" has not ended within 2"]);
    // The job is still there, and the next run ends it.
    world.sync();
    let [a, b] = &world.disks();
    one_moment([a, b]);
}

/// QEMU goes on to answer who reads, but shows the present.
#[test]
fn what_was_read_of_a_job_that_has_ended_is_not_committed() {
    let Some(world) = World::new("a VM by its name whose job ends") else { return };
    world.sync();
    let path = world.before_virsh(ENDED);
    let ended = world.site.path("ended");
    world.host.writes_on(VM);
    let mut running = world.run(&["--bwlimit", "1M"]).env("PATH", &path).env("ONCE", &ended).start();
    until("the job is there", || {
        assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
        world.host.job(VM).is_some()
    });
    std::fs::write(&ended, "").expect("a file");
    let failed = running.output(Duration::from_secs(60));
    assert!(!failed.status.success(), "{failed}");
    failed.says(&["the backup job of t1 ended while its disks were read"]);
    // The job is in fact there, and the next run ends it.
    world.sync();
    let [a, b] = &world.disks();
    one_moment([a, b]);
}

/// The same, but what comes behind the beginning of a job waits until there is this file.
const WAITS: &str = r#"#!/bin/sh
[ "$2" != backup-begin ] || : >"$ONCE.begins"
[ "$2" != checkpoint-dumpxml ] || [ ! -e "$ONCE.begins" ] || while : >"$ONCE.begun"; [ ! -e "$ONCE" ]; do sleep 0.05; done
exec /usr/bin/virsh "$@"
"#;

/// With state directories of their own, neither sees the other's lock.
#[test]
fn a_job_that_another_run_has_begun_is_not_read() {
    let Some(world) = World::new("a VM by its name that two runs sync") else { return };
    let folder = world.site.path("other");
    std::fs::create_dir(&folder).expect("a folder");
    let other = |options: &[&str]| {
        let run = world.dsync(&["sync", "vm:t1"]).arg(&folder).args(options);
        run.env("DSYNC_STATE_DIR", folder.join("state")).env("DSYNC_RUN_DIR", folder.join("run"))
    };
    world.sync();
    world.host.writes_on(VM);
    other(&[]).ok();
    world.host.writes_on(VM);
    let (path, go_on) = (world.before_virsh(WAITS), world.site.path("go-on"));
    let first = world.run(&[]).env("PATH", &path).env("ONCE", &go_on).start();
    until("the first job has begun", || go_on.with_extension("begun").exists());
    let counts_from = || {
        let job = world.host.job(VM)?;
        job.split_once("incremental=")?.1.split(['\'', '"']).nth(1).map(str::to_owned)
    };
    let first_from = counts_from();
    let second = other(&["--bwlimit", "1M"]).start();
    until("the second job has begun", || counts_from().is_some_and(|now| Some(now) != first_from));
    std::fs::write(&go_on, "").expect("a file");
    let failed = first.output(Duration::from_secs(60));
    assert!(!failed.status.success(), "{failed}");
    let said = second.output(Duration::from_secs(60));
    assert!(said.status.success(), "{said}");
    let [a, b] = ["t1-vda.img", "t1-vdb.img"].map(|name| folder.join(name));
    one_moment([&a, &b]);
    world.run(&[]).ok();
    let [a, b] = &world.disks();
    one_moment([a, b]);
}

/// A backup in the place of a disk is not taken for what the VM wrote, whether it is off or runs on it.
#[test]
fn a_backup_in_the_place_of_a_disk_of_a_vm_is_refused() {
    let Some(world) = World::new("a VM by its name whose disk is restored from a backup") else { return };
    let image = world.site.path("b.raw");
    let backup = image.with_extension("backup");
    Run::new("cp").arg("-a").args([&image, &backup]).ok();
    Run::new("touch").args(["-d", "6 days ago"]).arg(&backup).ok();
    world.sync();
    world.host.virsh(["destroy", VM]).ok();
    Run::new("cp").arg("--preserve=timestamps").args([&backup, &image]).ok();
    let has = world.disks().map(|disk| std::fs::read(disk).expect("a replica"));
    let words = ["may be the newest copy", "before what was recorded", "--accept-source"];
    world.run(&[]).code(4).says(&words);
    world.run(&[]).code(4).says(&words);
    // What its guest writes makes the backup no newer, whether a sync has seen it before or not.
    world.host.on(VM);
    world.run(&[]).code(4).says(&words);
    assert!(has == world.disks().map(|disk| std::fs::read(disk).expect("a replica")));
    world.host.virsh(["destroy", VM]).ok();
    world.run(&["--accept-source"]).ok();
    world.equal();
    // The last moment was one of the VM at rest.
    Run::new("cp").arg("--preserve=timestamps").args([&backup, &image]).ok();
    world.run(&[]).code(4).says(&words);
    world.run(&["--accept-source"]).ok();
    world.equal();
    // Renamed over the image, and written to before any sync.
    world.host.on(VM);
    world.sync();
    world.host.virsh(["destroy", VM]).ok();
    std::fs::rename(&backup, &image).expect("a file");
    world.host.on(VM);
    let said = world.run(&[]).code(4);
    said.says(&["may be the newest copy", "another file is in its place", "--accept-source"]);
    world.run(&["--accept-source"]).ok();
}

#[test]
fn a_vm_that_is_changed_as_its_job_begins_is_begun_anew() {
    let Some(world) = World::new("a VM by its name that is changed") else { return };
    let path = world.before_virsh(CHANGES);
    let changed = |once: &str| world.run(&[]).env("PATH", &path).env("ONCE", world.site.path(once));
    changed("once").ok();
    world.clean();
    let carried = std::fs::read_to_string(world.replica("t1.xml")).expect("the definition");
    assert!(carried.contains("/once"), "{carried}");
    assert!(world.sync().text().contains("vda: QEMU's bitmap since"));
    let [a, b] = &world.disks();
    one_moment([a, b]);
    world.host.virsh(["destroy", VM]).ok();
    changed("twice").code(6).says(&["t1 was started or changed meanwhile: run it again"]);
    world.sync();
    let carried = std::fs::read_to_string(world.replica("t1.xml")).expect("the definition");
    assert!(carried.contains("/twice"), "{carried}");
}

#[test]
fn a_job_of_a_vm_has_its_hook_around_the_moment() {
    let Some(world) = World::new("a VM by its name with a hook") else { return };
    let (log, folder) = (world.site.path("log"), world.site.path("conf"));
    let job = format!(
        "command = sync\nsource = vm:t1\ndestination = {}\nhook = while read word; do echo $word $(virsh -q backup-dumpxml t1 2>/dev/null | \
         wc -l) >>{}; [ $word != begin ] || echo ready; done\n",
        world.replicas.display(),
        log.display()
    );
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("nightly.conf"), job).expect("a job");
    let said = world.dsync(&["run", "nightly"]).ok().text();
    assert!(said.contains("at common epoch 1: 3 disks at one moment"), "{said}");
    let said = std::fs::read_to_string(log).expect("a log");
    let words: Vec<(&str, bool)> =
        said.lines().map(|line| (&line[..line.find(' ').expect("a count")], line.ends_with(" 0"))).collect();
    // With a job from the cut on, and without one at the end.
    assert_eq!(words, [("begin", true), ("cut", false), ("end", true)]);
    world.clean();
    // What the job is to copy is known by the name of the VM.
    let healthy = world.dsync(&["status", "--check"]).output();
    assert!(healthy.status.success(), "{healthy}");
}

/// The bitmaps of all images of a VM have one name, and come along where an image is copied.
#[test]
fn an_image_that_takes_the_place_of_another_is_not_taken_for_it() {
    let Some(world) = World::new("a VM whose images are exchanged") else { return };
    let [a, b] = ["x.qcow2", "y.qcow2"].map(|name| {
        let image = world.site.path(name);
        Run::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("64M").ok();
        let content = Random::new(name).bytes(4 * MIB as usize);
        let raw = world.site.path("content");
        std::fs::write(&raw, content).expect("a file");
        let write = format!("write -s {} 1M 4M", raw.display());
        Run::new("qemu-io").args(["-f", "qcow2", "-c", &write]).arg(&image).ok();
        image
    });
    let disks = world.disks();
    world.host.virsh(["destroy", VM]).ok();
    let definition = world.host.virsh(["dumpxml", VM]).ok().text();
    let first = [world.site.path("a.qcow2"), world.site.path("b.raw")];
    let definition = first.iter().zip([&a, &b]).fold(definition, |text, (was, is)| {
        text.replace(&was.display().to_string(), &is.display().to_string())
    });
    let file = world.site.path("exchanged.xml");
    std::fs::write(&file, definition.replace("type='raw'", "type='qcow2'")).expect("a definition");
    world.host.virsh(["define"]).arg(&file).ok();
    let sync = || {
        world.host.virsh(["start", "--paused", VM]).ok();
        let said = world.run(&[]).ok().text();
        for (image, replica) in [&a, &b].into_iter().zip(&disks) {
            Run::new("qemu-img").args(["compare", "-U", "-F", "raw"]).arg(image).arg(replica).ok();
        }
        world.host.virsh(["destroy", VM]).ok();
        said
    };
    sync();
    std::fs::copy(&a, &b).expect("a copy in its place");
    let said = sync();
    assert!(said.contains("vdb: compared: its QEMU was started"), "{said}");
    world.clean();
}

/// What a guest has sealed by its TPM opens with that state alone, as BitLocker's keys.
#[test]
fn the_state_of_a_tpm_goes_with_its_vm() {
    let what = "the state of a VM's TPM";
    if !need(&["swtpm", "swtpm_setup", "install"], what) {
        return;
    }
    let Some(world) = World::new(what) else { return };
    let uuid = world.give("<tpm model='tpm-tis'><backend type='emulator' version='2.0'/></tpm>");
    world.sync();
    let kept = |host: &Libvirt| {
        let state = host.lib().join(format!("swtpm/{uuid}/tpm2/tpm2-00.permall"));
        std::fs::read(state).expect("the state of a TPM")
    };
    let carried = std::fs::read(world.replica("t1.tpm")).expect("a replica");
    assert_eq!(carried, kept(&world.host));
    assert!(world.sync().text().contains("4 disks at one moment"), "the disks, the definition and the TPM");
    world.host.virsh(["destroy", VM]).ok();
    world.sync();
    let (far, other) = (Site::in_memory(), Libvirt::start());
    let definition = far.path("there.xml");
    let promote = far.dsync(["promote", "--force", "--group"]).arg(world.replica(".vm.t1.dsync-group"));
    let said = promote.arg("--define").arg(&definition).ok().text();
    let command = said.lines().find_map(|line| line.split_once("\"install ")).expect("a command").1;
    let command = format!("install {}", command.trim_end().trim_end_matches('"'));
    other.run(&far, "/bin/sh".as_ref()).args(["-c", &command]).ok();
    other.virsh(["define"]).arg(&definition).ok();
    other.on(VM);
    // Its counters go on; the keys of another TPM would be others.
    let differ = |now: &[u8]| now.iter().zip(&carried).filter(|(now, was)| now != was).count();
    let now = kept(&other);
    assert!(
        now.len() == carried.len() && differ(&now) < 64,
        "{} of {} bytes differ",
        differ(&now),
        now.len()
    );
}

/// On the other host the VM is followed like any other. Here it is not demoted, which would leave some of its disks sources and others not.
#[test]
fn a_vm_that_was_promoted_is_followed_where_it_is() {
    let Some(world) = World::new("a VM that was promoted") else { return };
    world.sync();
    let demote = world.dsync(&["demote", "--group", "vm.t1"]).arg(&world.replicas);
    demote.code(4).says(&["vm.t1 is the group of a VM, which is moved in another way"]);
    world.host.virsh(["destroy", VM]).ok();
    world.sync();
    let (far, other) = (Site::in_memory(), Libvirt::start());
    let definition = far.path("there.xml");
    let promote = |site: &Site, folder: &std::path::Path| {
        let promote = site.dsync(["promote", "--force", "--group"]).arg(folder.join(".vm.t1.dsync-group"));
        promote.arg("--define").arg(&definition).ok();
    };
    promote(&far, &world.replicas);
    other.virsh(["define"]).arg(&definition).ok();
    other.on(VM);
    let back = far.path("back");
    std::fs::create_dir(&back).expect("a folder");
    let sync = || {
        other.run(&far, binary()).args(["sync", "vm:t1"]).arg(&back).ok();
        for disk in world.disks() {
            dsync_tests::image::assert_equal(&disk, &back.join(disk.file_name().expect("a name")));
        }
    };
    for _ in 0..3 {
        other.virsh(["suspend", VM]).ok();
        sync();
        other.virsh(["resume", VM]).ok();
        other.writes_on(VM);
    }
    other.virsh(["destroy", VM]).ok();
    sync();
    // And back, once what was here before is given up.
    world.dsync(&["forget", "vm:t1"]).ok();
    promote(&world.site, &back);
    world.host.virsh(["undefine", "--checkpoints-metadata", VM]).ok();
    world.host.virsh(["define"]).arg(&definition).ok();
    world.host.on(VM);
    let onward = world.site.path("onward");
    std::fs::create_dir(&onward).expect("a folder");
    for _ in 0..2 {
        world.dsync(&["sync", "vm:t1"]).arg(&onward).ok();
    }
}

impl World {
    /// Gives the VM a device that it starts with. Returns its UUID.
    fn give(&self, device: &str) -> String {
        self.host.virsh(["destroy", VM]).ok();
        let text = self.host.virsh(["dumpxml", "--inactive", VM]).ok().text();
        let file = self.site.path("more.xml");
        std::fs::write(&file, text.replace("</devices>", &format!("{device}</devices>"))).expect("the VM");
        self.host.virsh(["define"]).arg(&file).ok();
        self.host.on(VM);
        self.host.virsh(["domuuid", VM]).ok().text().trim().to_owned()
    }

    fn verify(&self) -> Run {
        self.dsync(&["verify", "vm:t1"]).arg(&self.replicas)
    }

    /// Changes a byte of a replica where its guest never writes, as a disk that fails does.
    fn damage(&self, name: &str) {
        let replica = std::fs::File::options().write(true).open(self.replica(name)).expect("a replica");
        let time = replica.metadata().and_then(|replica| replica.modified()).expect("its time");
        std::os::unix::fs::FileExt::write_all_at(&replica, b"?", 40 * MIB).expect("damage");
        replica.set_modified(time).expect("its time");
    }
}

#[test]
fn a_vm_is_verified_while_it_writes_and_what_it_wrote_is_no_difference() {
    // In memory the times of a replica do not tell that its content is as old as it was.
    let Some(world) = World::at("a verify of a VM by its name", Site::new) else { return };
    world.sync();
    world.host.writes_on(VM);
    let said = world.verify().ok();
    assert!(said.text().contains("vda: QEMU's bitmap since dsync-"), "{said}");
    assert!(said.text().contains("3 disks verified, 0 with differences, 0 not verified"), "{said}");
    assert!(said.text().contains("t1.xml at epoch") && said.text().contains(" changed at the source since)"));
    world.clean();
    // The next sync goes on from there.
    world.host.writes_on(VM);
    assert!(world.sync_paused().contains("vda: QEMU's bitmap since dsync-"));
    world.snapshot("vdb");
    world.host.writes_on(VM);
    world.damage("t1-vda.img");
    let said = world.verify().arg("--json").output();
    assert_eq!(said.status.code(), Some(5), "{said}");
    let last: serde_json::Value =
        serde_json::from_str(said.text().lines().last().expect("a line")).expect("JSON");
    assert_eq!(last["kind"], "machine-verified");
    assert_eq!(
        (&last["differing"][0], last["differing"].as_array().map(Vec::len)),
        (&last["verified"][0], Some(1))
    );
    assert_eq!(last["unverified"], serde_json::json!(["vdb"]));
    world.merge("vdb");
    for option in [&["--repair"][..], &["--range", "0:1M"], &["--as", "x"]] {
        world.verify().args(option).code(2).says(&[option[0], "omit it"]);
    }
    // What the refusal of --repair names.
    world.run(&["--method", "compare"]).ok();
    world.verify().ok();
    world.sync_paused();
}

#[test]
fn a_vm_that_is_off_is_verified_once_it_was_synced_so() {
    let Some(world) = World::new("a verify of a VM that is off") else { return };
    world.sync();
    world.host.virsh(["destroy", VM]).ok();
    let refused = world.verify().code(4);
    refused.says(&["vda: not verified: the VM ran at its last sync; the next sync compares all of it"]);
    refused.says(&["no disk of t1 can be verified", "run \"dsync sync vm:t1 "]);
    world.sync();
    let said = world.verify().ok().text();
    assert!(said.contains("3 disks verified, 0 with differences, 0 not verified"), "{said}");
    world.damage("t1-vdb.img");
    let said = world.verify().code(5).text();
    assert!(said.contains("3 disks verified, 1 with differences"), "{said}");
}

/// What one folder has by a comparison is a gap for the replicas in another.
#[test]
fn a_replica_is_verified_where_it_is_known_what_changed_since_its_epoch() {
    let Some(world) = World::new("a verify of a VM with replicas in two folders") else { return };
    let other = world.site.path("other");
    std::fs::create_dir(&other).expect("a folder");
    let there = |command: &str| world.dsync(&[command, "vm:t1"]).arg(&other);
    there("sync").ok();
    // Nothing is known of a VM that was started anew. What a killed run left ends also where all is refused.
    world.host.kill(VM);
    world.host.on(VM);
    world.begun().kill();
    assert!(world.host.job(VM).is_some());
    there("verify").code(4).says(&[
        "vda: not verified: ",
        "its QEMU was started",
        "no disk of t1 can be verified",
    ]);
    assert_eq!(world.host.job(VM), None);
    world.host.virsh(["destroy", VM]).ok();
    // Its checkpoints cannot be deleted while it is off.
    world.run(&[]).ok();
    assert!(world.verify().ok().text().contains("3 disks verified, 0 with differences, 0 not verified"));
    let refused = there("verify").code(4);
    for disk in ["vda", "vdb"] {
        refused.says(&[&format!(
            "{disk}: not verified: what changed at the source since the replica's epoch 1 is not known ("
        )]);
    }
    refused.says(&["no disk of t1 can be verified", &format!("run \"dsync sync vm:t1 {}", other.display())]);
    there("sync").ok();
    there("verify").ok();
    world.verify().ok();
}

#[test]
fn a_vm_is_one_row_of_the_status_with_its_members_behind_it() {
    let Some(world) = World::new("the status of a VM by its name") else { return };
    let status = |words: &[&str]| world.dsync(&["status"]).args(words);
    status(&["vm:t1"]).code(2).says(&["no VM t1 was synced with this state directory"]);
    world.sync();
    let folder = world.replicas.display().to_string();
    let table = |state: &str| {
        let said = status(&[]).ok().text();
        let rows: Vec<&str> = said.lines().skip_while(|line| !line.contains("ROLE")).skip(1).collect();
        let [row] = rows[..] else { panic!("one row: {said}") };
        assert!(row.contains("vm:t1  VM") && row.contains(state) && row.ends_with(&folder), "{said}");
        said
    };
    table("synced");
    let long = status(&["vm:t1"]).ok().text();
    for disk in ["a.qcow2", "b.raw", "t1.xml"] {
        assert!(long.contains(&format!("{disk} (")), "{long}");
    }
    assert!(long.contains("group vm.t1 of the VM t1: ") && long.contains("last common epoch 1"), "{long}");
    let lines = status(&["--json"]).ok().text();
    let of_it = |line: &serde_json::Value| line["group"]["machine"] == "t1";
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines.iter().filter(|line| line["kind"] == "source" && of_it(line)).count(), 3);
    assert_eq!(lines.iter().filter(|line| line["kind"] == "group" && line["machine"] == "t1").count(), 1);
    assert_eq!(status(&["--check"]).ok().text(), "OK\n");
    assert_eq!(status(&["--check", "vm:t1"]).ok().text(), "OK\n");
    let metrics = status(&["--prometheus"]).ok().text();
    assert!(metrics.contains("dsync_replica_lag_seconds{") && !metrics.contains("dsync_source_tracking{"));
    // What a verify finds of one disk is that of the VM.
    world.damage("t1-vda.img");
    world.verify().code(5);
    assert!(table("! vm:t1  VM    differs").starts_with("! replica differs: "));
    status(&["--check", "vm:t1"]).code(1);
    assert!(status(&["vm:t1"]).ok().text().contains("not repaired: dsync sync --method compare vm:t1 DIR"));
}

#[test]
fn a_vm_is_forgotten_with_all_that_it_has_left() {
    let Some(world) = World::new("a VM that is forgotten") else { return };
    let forget = |words: &[&str]| world.dsync(&["forget", "vm:t1"]).args(words);
    forget(&[]).code(2).says(&["no VM t1 was synced"]);
    world.sync();
    let other = world.site.path("other");
    std::fs::create_dir(&other).expect("a folder");
    world.dsync(&["sync", "vm:t1"]).arg(&other).ok();
    let status = || world.dsync(&["status", "vm:t1"]).ok().text();
    let of_other = |text: &str| text.lines().filter(|line| line.contains("/other/t1")).count();
    assert_eq!(of_other(&status()), 3);
    // One of its folders.
    let folder = format!("{}/", other.display());
    assert_eq!(of_other(&forget(&["-n", &folder]).ok().text()), 3);
    assert_eq!(of_other(&status()), 3);
    assert_eq!(of_other(&forget(&[&folder]).ok().text()), 3);
    assert_eq!(of_other(&status()), 0);
    forget(&[&folder]).code(4).says(&["no replica of t1 in ", "is known"]);
    forget(&["--replica"]).code(2);
    assert!(world.sync().text().contains("vda: QEMU's bitmap since"));
    // All of it.
    let checkpoints = world.host.checkpoints(VM);
    assert_eq!(checkpoints.len(), 1);
    let said = forget(&["-n"]).ok().text();
    assert_eq!(said.lines().filter(|line| line.contains("would be forgotten")).count(), 3, "{said}");
    assert_eq!(world.host.checkpoints(VM), checkpoints);
    forget(&[]).ok();
    assert_eq!(world.host.checkpoints(VM), [""; 0]);
    let left: Vec<_> = world.site.state().join("machines").read_dir().expect("a folder").flatten().collect();
    assert!(left.iter().all(|entry| entry.path().is_dir()), "{left:?}");
    assert!(!world.dsync(&["status"]).ok().text().contains("vm:t1"));
    // What was forgotten begins anew, and goes on from there.
    world.run(&["--adopt"]).ok();
    assert!(world.sync_paused().contains("vda: QEMU's bitmap since"));
    // Off, the checkpoint is left until it runs again.
    world.host.virsh(["destroy", VM]).ok();
    let said = forget(&[]).ok();
    said.says(&["is left (the VM is off): \"virsh checkpoint-delete t1 dsync-"]);
    world.host.on(VM);
    world.run(&["--adopt"]).ok();
    world.clean();
}

#[test]
fn a_vm_with_another_name_is_copied_anew_once_the_former_is_forgotten() {
    let Some(world) = World::new("a VM that is renamed") else { return };
    world.sync();
    world.host.virsh(["destroy", VM]).ok();
    let [checkpoint] = &world.host.checkpoints(VM)[..] else { panic!("one checkpoint") };
    world.host.virsh(["checkpoint-delete", VM, checkpoint, "--metadata"]).ok();
    world.host.virsh(["domrename", VM, "t2"]).ok();
    world.host.on("t2");
    let sync = || world.dsync(&["sync", "vm:t2"]).arg(&world.replicas);
    sync().code(4).says(&["of t2 was synced as a disk of the VM t1", "run \"dsync forget vm:t1\""]);
    assert_eq!(world.host.job("t2"), None);
    world.dsync(&["forget", "vm:t1"]).ok();
    let said = sync().ok().text();
    assert!(said.contains("vda: copied") && said.contains("t2-vda.img is"), "{said}");
    assert!(sync().ok().text().contains("vda: QEMU's bitmap since"));
}

/// Waits for the next words in what a mirror says, behind those that were found before.
struct Said {
    mirror: Background,
    seen: usize,
}

impl Said {
    fn wait(&mut self, words: &str) {
        until(words, || {
            let said = self.mirror.stdout_so_far();
            assert!(self.mirror.ended().is_none(), "it ended: {said} {}", self.mirror.stderr_so_far());
            let found = said[self.seen..].find(words);
            self.seen += found.map_or(0, |at| at + words.len());
            found.is_some() || self.mirror.stderr_so_far().contains(words)
        });
    }

    /// Waits for so many commits from now on.
    fn passes(&self, count: usize) {
        let commits = || self.mirror.stderr_so_far().matches("vm:t1 is at common epoch").count();
        let before = commits();
        until("passes", || commits() >= before + count);
    }
}

impl World {
    fn mirror(&self) -> Said {
        let mirror = self.dsync(&["mirror", "-v", "vm:t1", "--rpo", "1s"]).arg(&self.replicas).start();
        let mut said = Said { mirror, seen: 0 };
        said.wait("mirroring vm:t1 to ");
        said
    }
}

#[test]
fn a_mirror_of_a_vm_goes_on_with_a_new_disk_and_after_a_break() {
    let Some(world) = World::new("a mirror of a VM by its name") else { return };
    let nobody = world.dsync(&["mirror", "vm:t9"]).arg(&world.replicas);
    nobody.code(1).says(&["there is no VM t9 in libvirt"]);
    world.dsync(&["mirror", "vm:t1", "--rate", "1M"]).arg(&world.replicas).code(2).says(&["--rate: omit it"]);
    let mut said = world.mirror();
    said.wait("vda: QEMU's bitmap since dsync-");
    said.passes(1);
    let added = world.site.image("c.raw", 8 * MIB);
    let xml = world.site.path("c.xml");
    std::fs::write(&xml, disk(&added, 'c', "")).expect("a disk");
    world.host.virsh(["attach-device", VM, "--live", "--config"]).arg(&xml).ok();
    said.wait("vdc: QEMU's bitmap since");
    // How a disk is followed is said once.
    let text = said.mirror.stdout_so_far();
    assert_eq!(text.matches("vda: QEMU's bitmap since").count(), 1, "{text}");
    assert_eq!(text.matches("vdb: QEMU's bitmap since").count(), 1, "{text}");
    // The replicas are away for a while.
    let away = world.site.path("away");
    std::fs::rename(&world.replicas, &away).expect("away");
    said.wait("; retrying in ");
    std::fs::rename(&away, &world.replicas).expect("back");
    said.wait("again, at common epoch");
    // At its end they have what was written until then.
    world.host.virsh(["suspend", VM]).ok();
    said.mirror.signal(Signal::TERM);
    let ended = said.mirror.output(Duration::from_secs(20));
    assert!(ended.status.success() && ended.text().contains("group vm.t1 in "), "{ended}");
    world.clean();
    world.equal();
}

#[test]
fn a_mirror_of_a_vm_waits_while_it_is_off() {
    let Some(world) = World::new("a mirror of a VM that is off for a while") else { return };
    let mut said = world.mirror();
    world.host.kill(VM);
    said.wait("t1 is off: waiting until it runs");
    world.host.on(VM);
    said.wait("vda: compared: its QEMU was started");
    said.wait("vda: QEMU's bitmap since dsync-");
    // At its end it is synced all the same.
    world.host.virsh(["destroy", VM]).ok();
    said.mirror.signal(Signal::TERM);
    let ended = said.mirror.output(Duration::from_secs(30));
    assert!(ended.status.success(), "{ended}");
    assert!(ended.text().contains("vda: compared: the VM ran at its last sync"), "{ended}");
    world.equal();
    // As long as it is off, its replicas do not age.
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(world.dsync(&["status", "--check", "--max-age", "1s"]).ok().text(), "OK\n");
}

#[test]
fn a_mirror_of_a_vm_has_what_was_written_between_two_looks_at_it() {
    let Some(world) = World::new("a mirror of a VM that runs for a moment") else { return };
    world.host.virsh(["destroy", VM]).ok();
    let mut said = world.mirror();
    // As by a start and a stop, of which the mirror sees neither.
    let image = world.site.path("a.qcow2");
    Run::new("qemu-io").args(["-f", "qcow2", "-c", "write -q -P 9 32M 1M"]).arg(image).ok();
    said.mirror.signal(Signal::TERM);
    let ended = said.mirror.output(Duration::from_secs(30));
    assert!(ended.status.success(), "{ended}");
    world.equal();
}

#[test]
fn a_mirror_of_a_vm_that_is_interrupted_in_its_first_copy_ends_its_job() {
    let Some(world) = World::new("a mirror of a VM that is interrupted") else { return };
    // Slower than the guest writes, so that it is not over before it is interrupted.
    let mirror = world.dsync(&["mirror", "vm:t1", "--bwlimit", "16K"]).arg(&world.replicas);
    let mut mirror = mirror.start();
    until("the job is there", || {
        assert!(mirror.ended().is_none(), "it ended: {}", mirror.stderr_so_far());
        world.host.job(VM).is_some()
    });
    mirror.signal(Signal::TERM);
    assert_eq!(mirror.output(Duration::from_secs(60)).status.code(), Some(130));
    world.clean();
}

/// A disk of a VM is not synced by itself: the ways out name the VM.
#[test]
fn a_replica_of_a_vm_that_was_changed_is_taken_over_with_the_others() {
    let Some(world) = World::new("a replica of a VM that was changed") else { return };
    world.sync();
    world.damage("t1-vda.img");
    std::fs::File::options()
        .append(true)
        .open(world.replica("t1-vda.img"))
        .and_then(|file| file.set_modified(std::time::SystemTime::now()))
        .expect("another time");
    let ways = ["verify vm:t1", "sync vm:t1 --adopt"];
    let [looks, way] = ways.map(|way| format!("\"dsync {way} {}\"", world.replicas.display()));
    world.run(&[]).code(4).says(&["t1-vda.img was modified outside dsync", &looks, &way]);
    world.verify().code(5);
    world.run(&["--adopt"]).ok();
    world.sync_paused();
}

/// What QEMU tells of no raw disk, the tracker of a device tells: while the VM runs, as it is off, and after it was started anew.
#[test]
fn a_device_of_a_vm_that_is_tracked_is_not_compared() {
    let what = "a VM with a device that is tracked";
    if !Libvirt::possible(what) || !need(&["losetup"], what) {
        return;
    }
    let site = Site::in_memory();
    let device = Loop::new(&writer(&site, "b.raw"));
    if !got(device.as_ref().ok_or("there is no free loop device"), what) {
        return;
    }
    let (device, host, replicas) = (device.expect("a device"), Libvirt::start(), site.path("replicas"));
    std::fs::create_dir(&replicas).expect("a folder");
    let added = site.dsync(["track", "add"]).arg(device.device()).output();
    if !got(added.status.success().then_some(()).ok_or(&added.stderr), what) {
        return;
    }
    let world = World { site, host, replicas };
    let _tracked = Untrack(&world.site, device.device());
    world.host.boot(VM, &[&writer(&world.site, "a.qcow2"), device.device()]);
    let equal = || {
        let [_, replica] = world.disks();
        Run::new("cmp").arg(device.device()).arg(replica).ok();
    };
    let said = world.sync().text();
    assert!(said.contains("vdb: copied: "), "{said}");
    const RECORDED: &str =
        "vdb: tracked: what was written to the device since its last sync is recorded in the kernel";
    let sync = |paused: bool| {
        world.host.writes_on(VM);
        if paused {
            world.host.virsh(["suspend", VM]).ok();
        }
        let lines = world.run(&["--json"]).ok().json();
        let of_vdb = |line: &&serde_json::Value| line["kind"] == "machine-disk" && line["disk"] == "vdb";
        assert_eq!(lines.iter().find(of_vdb).expect("a line of vdb")["how"], "recorded");
        let name = device.device().display().to_string();
        let summary = lines.iter().find(|line| line["source"] == name.as_str()).expect("its summary");
        assert_eq!(
            (&summary["method"], &summary["trust"]),
            (&"tracked".into(), &"tracked".into()),
            "{summary}"
        );
        assert!(summary["bytes_read"].as_u64().is_some_and(|read| read < 40 << 20), "{summary}");
        if paused {
            equal();
            world.host.virsh(["resume", VM]).ok();
        } else {
            one_moment([&world.disks()[0], &world.disks()[1]]);
        }
    };
    let mut random = Random::new(what);
    for round in 0..rounds(1, 30) {
        let mut killed = world.run(&[]).start();
        std::thread::sleep(Duration::from_millis(random.below(1500)));
        killed.kill();
        sync(round % 2 == 1);
    }
    // What is not told of the one is told of the other.
    world.host.kill(VM);
    world.host.on(VM);
    assert!(world.run(&["-n"]).ok().text().contains(RECORDED));
    sync(true);
    let told = world.verify().ok().text();
    assert!(told.contains("3 disks verified, 0 with differences, 0 not verified"), "{told}");
    // As it is off, what it wrote last is brought without reading all.
    world.host.writes_on(VM);
    world.host.virsh(["destroy", VM]).ok();
    let said = world.run(&[]).ok().text();
    assert!(said.contains(RECORDED), "{said}");
    equal();
    world.host.on(VM);
    sync(false);
    // Without its tracker it is compared.
    world.site.dsync(["track", "remove"]).arg(device.device()).ok();
    world.host.virsh(["suspend", VM]).ok();
    let said = world.run(&[]).ok().text();
    equal();
    assert!(said.contains("vdb: compared: its last sync began no bitmap of it"), "{said}");
    world.host.virsh(["resume", VM]).ok();
    world.host.writes_on(VM);
    world.host.virsh(["suspend", VM]).ok();
    assert!(world.sync().text().contains("vdb: QEMU's bitmap since"));
    equal();
}
