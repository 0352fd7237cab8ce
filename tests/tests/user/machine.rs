//! VMs under libvirt by their names: all disks of one, at one moment, while their guest never stops writing.

use std::path::PathBuf;

use dsync_tests::libvirt::{Libvirt, one_moment, writer};
use dsync_tests::site::binary;
use dsync_tests::{Output, Run, Site};

const VM: &str = "t1";

struct World {
    site: Site,
    host: Libvirt,
    replicas: PathBuf,
}

impl World {
    /// A VM with a qcow2 disk and a raw one, whose guest writes to both in turn; `None` if there can be none here.
    fn new(what: &str) -> Option<World> {
        if !Libvirt::possible(what) {
            return None;
        }
        let (site, host) = (Site::new(), Libvirt::start());
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

    /// Fails if a job is left, a file of one, or more than one checkpoint.
    fn clean(&self) {
        assert_eq!((self.host.job(VM), self.host.left(VM)), (None, vec![]));
        assert!(self.host.checkpoints(VM).len() <= 1, "{:?}", self.host.checkpoints(VM));
    }
}

#[test]
fn all_disks_of_a_vm_are_of_one_moment_in_each_sync() {
    let Some(world) = World::new("a VM by its name") else { return };
    let mut last = 0;
    for round in 0..5 {
        world.host.writes_on(VM);
        let said = world.sync();
        eprintln!("{said}");
        let [a, b] = &world.disks();
        let now = one_moment([a, b]);
        assert!(now > last, "{now} after {last}");
        last = now;
        let text = said.text();
        let how = if round == 0 { "vda: compared: it was not synced yet" } else { "vda: QEMU's bitmap since dsync-" };
        assert!(text.contains(how), "{text}");
        assert!(text.contains("vdb: compared: a raw image, of which libvirt keeps no checkpoint"), "{text}");
        assert_eq!(text.contains("(as told by QEMU)"), round > 0, "{text}");
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
    eprintln!("{said}");
    assert!(said.contains("vda: compared: QEMU's bitmap is gone"), "{said}");
    world.host.writes_on(VM);
    let said = world.sync_paused();
    assert!(said.contains("vda: QEMU's bitmap since") && said.contains("(as told by QEMU)"), "{said}");
    // Somebody deletes the checkpoint.
    let [checkpoint] = &world.host.checkpoints(VM)[..] else { panic!("one checkpoint") };
    world.host.virsh(["checkpoint-delete", VM, checkpoint]).ok();
    assert!(world.sync_paused().contains("vda: compared: libvirt has no checkpoint"));
}

#[test]
fn a_vm_that_is_off_is_read_once_and_does_not_start_meanwhile() {
    let Some(world) = World::new("a VM by its name that is off") else { return };
    world.sync();
    world.host.virsh(["destroy", VM]).ok();
    let said = world.sync().text();
    eprintln!("{said}");
    world.equal();
    let said = world.sync().text();
    eprintln!("{said}");
    assert!(said.contains("vda: not read: the VM is off") && said.contains("vdb: not read"), "{said}");
    world.host.on(VM);
    let said = world.sync_paused();
    eprintln!("{said}");
    assert!(said.contains("vda: compared: its last sync was not one of the VM as it ran"), "{said}");
    assert!(world.sync_paused().contains("vda: QEMU's bitmap since"));
}
