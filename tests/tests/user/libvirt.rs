//! VMs under libvirt, followed by the script of the guide while their guest never stops writing.

use std::path::PathBuf;

use dsync_tests::libvirt::{Libvirt, writer};
use dsync_tests::{Background, Output, Run, Site, image, need, until};
use rustix::process::{Signal, kill_process_group};

use crate::told::of_guide;

const VM: &str = "t1";

/// Stands before dsync: a sync waits while `hold-before` is there, compares what it has made with what its moment shows, and waits while
/// `hold-after` is there. `held` says that it waits.
const WITNESS: &str = r#"#!/bin/sh
hold() {
    if [ -e "$WORLD/$1" ]; then : >"$WORLD/held"; fi
    while [ -e "$WORLD/$1" ]; do sleep 0.01; done
}
[ "$1" != sync ] || hold hold-before
"$DSYNC" "$@" || exit
[ "$1" = sync ] || exit 0
to=$3
while [ "$1" != --moment ]; do shift; done
qemu-img convert -f raw -O raw "$2" "$WORLD/shown" && cmp "$WORLD/shown" "$to" && echo "as the moment"
hold hold-after
"#;

struct World {
    site: Site,
    host: Libvirt,
    script: PathBuf,
    replica: PathBuf,
}

impl World {
    /// A VM that writes; `None` if there can be none here.
    fn new(what: &str) -> Option<World> {
        if !Libvirt::possible(what) || !need(&["jq", "cmp"], what) {
            return None;
        }
        let (site, host) = (Site::new(), Libvirt::start());
        let (script, replica) = (site.path("libvirt-sync"), site.path("replica.raw"));
        std::fs::write(&script, of_guide("libvirt-sync")).expect("the script");
        std::fs::create_dir(site.path("bin")).expect("a folder");
        std::fs::write(site.path("bin/dsync"), WITNESS).expect("the witness");
        Run::new("chmod").arg("+x").arg(site.path("bin/dsync")).ok();
        host.boot(VM, &[&writer(&site, "vda.qcow2"), &writer(&site, "vdb.qcow2")]);
        Some(World { site, host, script, replica })
    }

    fn script(&self, vm: &str) -> Run {
        let inner = "PATH=$WORLD/bin:$PATH exec sh \"$@\"";
        let run = self.host.run(&self.site, "/bin/sh".as_ref()).args(["-c", inner, "sh"]).arg(&self.script);
        let run = run.args([vm, "vda"]).arg(&self.replica);
        run.env("WORLD", self.site.dir()).env("DSYNC", dsync_tests::site::binary())
    }

    /// Syncs as it should be; what it said.
    fn sync(&self) -> String {
        let said = self.script(VM).ok().text();
        assert!(said.contains("as the moment"), "{said}");
        assert_eq!(self.host.checkpoints(VM).len(), 1, "one checkpoint is kept");
        self.clean();
        said
    }

    /// Fails if a job is left, or a file of one.
    fn clean(&self) {
        assert_eq!((self.host.job(VM), self.host.left(VM)), (None, vec![]));
    }

    /// Starts a sync, and waits until it holds.
    fn held(&self, hold: &str) -> Background {
        for name in [hold, "held"] {
            let _ = std::fs::remove_file(self.site.path(name));
        }
        std::fs::write(self.site.path(hold), "").expect("a file");
        let mut running = self.script(VM).start();
        until("the sync holds", || {
            assert!(running.ended().is_none(), "it ended: {}", running.stderr_so_far());
            self.site.path("held").exists()
        });
        running
    }

    fn release(&self, hold: &str, running: Background) -> Output {
        std::fs::remove_file(self.site.path(hold)).expect("a hold");
        running.output(std::time::Duration::from_secs(60))
    }
}

#[test]
fn the_script_of_the_guide_follows_a_vm_that_never_stops_writing() {
    let Some(world) = World::new("a VM under libvirt that is followed") else { return };
    assert!(world.sync().contains("seeded"));
    for _ in 0..4 {
        world.host.writes_on(VM);
        let said = world.sync();
        assert!(
            said.contains("as told by qemu:dirty-bitmap:backup-vda") && !said.contains("up to date"),
            "{said}"
        );
    }
    // Somebody deletes the checkpoint.
    let [checkpoint] = &world.host.checkpoints(VM)[..] else { panic!("one checkpoint") };
    world.host.virsh(["checkpoint-delete", VM, checkpoint]).ok();
    assert!(world.sync().contains("compared"));
}

#[test]
fn a_kill_of_qemu_costs_a_comparison() {
    let Some(world) = World::new("a VM under libvirt whose QEMU is killed") else { return };
    world.sync();
    // Its bitmap is gone with it.
    world.host.kill(VM);
    world.script(VM).code(1);
    world.host.on(VM);
    assert!(world.sync().contains("compared"));
    assert!(world.sync().contains("as told by"));
    // In the job, of which nothing may come.
    let running = world.held("hold-before");
    world.host.kill(VM);
    let before = image::fingerprint(&world.replica);
    assert!(!world.release("hold-before", running).status.success());
    assert_eq!(image::fingerprint(&world.replica), before);
    world.host.on(VM);
    assert!(world.sync().contains("compared"));
}

#[test]
fn a_sync_of_a_vm_that_is_killed_leaves_nothing_behind() {
    let Some(world) = World::new("a VM under libvirt that is disturbed") else { return };
    world.sync();
    // The run is killed in its backup job: before the replica has anything, and when it has all.
    for hold in ["hold-before", "hold-after"] {
        let running = world.held(hold);
        assert!(world.host.job(VM).is_some());
        kill_process_group(running.pid(), Signal::KILL).expect("a kill");
        drop(world.release(hold, running));
        assert!(world.sync().contains("as told by"), "{hold}");
    }
    // A signal ends it in good order.
    let mut running = world.held("hold-before");
    running.signal(Signal::TERM);
    assert!(!world.release("hold-before", running).status.success());
    world.clean();
    assert!(world.sync().contains("as told by"));
    // A job of somebody else is left alone.
    let job = world.site.path("other.xml");
    let text = "<domainbackup mode='pull'><server transport='unix' socket='/var/lib/libvirt/other.sock'/><disks><disk name='vdb' \
                type='file'><scratch file='/var/lib/libvirt/other'/></disk></disks></domainbackup>";
    std::fs::write(&job, text).expect("a job");
    world.host.virsh(["backup-begin", VM]).arg(&job).ok();
    world.script(VM).code(1).says(&["another backup of t1 is running"]);
    assert!(world.host.job(VM).is_some_and(|job| job.contains("other.sock")));
    world.host.virsh(["domjobabort", VM]).ok();
    until("the job is gone", || world.host.job(VM).is_none());
    assert!(world.sync().contains("as told by"));
    world.script("t9").code(1).says(&["failed to get domain"]);
}
