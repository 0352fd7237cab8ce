//! A VM with databases on two disks is synced while it writes, its host dies in the midst of a sync, and another takes over; then the way back.
//!
//! It takes minutes under emulation: `make test-vm` runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::libvirt::Libvirt;
use dsync_tests::mount::Mount;
use dsync_tests::scene::number;
use dsync_tests::site::binary;
use dsync_tests::{Random, Run, Site, left_out, machine, need, soak};

const RSH: &str = env!("CARGO_BIN_EXE_rsh");
const VM: &str = "db1";
const GROUP: &str = ".vm.db1.dsync-group";
/// From power to the first transaction, on a machine eight times slower than one that is idle.
const BOOT: Duration = Duration::from_secs(900);

/// What the guest does from its start on: it tells what its databases hold, then one transaction after the other writes to both.
const LOAD: &str = r#"#!/bin/sh
cd /var/lib/load
for db in a.db /data/b.db; do sqlite3 $db 'create table if not exists t (n integer primary key, what blob)'; done
of() { sqlite3 $1 'pragma integrity_check; select coalesce(max(n), 0), count(*) from t' | tr '\n' ' '; }
echo "has $(of a.db)and $(of /data/b.db)" >/dev/ttyS1
n=$(sqlite3 a.db 'select coalesce(max(n), 0) from t')
while :; do
    n=$((n + 1))
    sqlite3 a.db "pragma synchronous=extra; attach '/data/b.db' as b; begin; insert into t values ($n, randomblob(9000));
        insert into b.t values ($n, randomblob(5000)); commit" && echo "did $n" >/dev/ttyS1
done
"#;

const UNIT: &str = "[Unit]\nRequiresMountsFor=/data\n[Service]\nExecStart=/bin/sh /usr/local/sbin/load\n";

/// What a guest has told so far, on one host.
struct Told(PathBuf);

impl Told {
    fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.0).unwrap_or_default()).replace('\r', "")
    }

    /// The last transaction of which the guest was told that it is durable.
    fn done(&self) -> u64 {
        let text = self.text();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().rev().find_map(|line| line.strip_prefix("did ")?.parse().ok()).unwrap_or(0)
    }

    /// Waits for so many transactions more.
    fn goes_on(&self, more: u64) {
        let (before, began) = (self.done(), Instant::now());
        while self.done() < before + more {
            assert!(began.elapsed() < BOOT, "it does not go on: {}", self.text());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// What both databases had at its start.
    ///
    /// # Panics
    /// If one is damaged, or they are of two moments.
    fn had(&self) -> u64 {
        let text = self.text();
        let line = text.lines().find_map(|line| line.strip_prefix("has ")).expect("it has begun");
        let (a, b) = line.split_once("and ").expect("two databases");
        assert_eq!(a.trim(), b.trim(), "they are of two moments");
        let rest = a.trim().strip_prefix("ok ").unwrap_or_else(|| panic!("a database is damaged: {line}"));
        let (last, count) = rest.split_once('|').expect("two numbers");
        assert_eq!(last, count, "some are missing");
        last.parse().expect("a number")
    }
}

/// The guest's disks, in qcow2: its root with the load on it, and one for its second database.
fn disks(site: &Site) -> [PathBuf; 2] {
    let base = machine::base().expect("asked");
    let (root, data) = (site.path("root.raw"), site.image("data.raw", 128 << 20));
    dsync_tests::image::copy(&base.join("disk.raw"), &root);
    // Beside what never changes: a disk that differs in most of its data is not taken for the copy that it is.
    let beside = site.path("beside");
    fs::create_dir(&beside).expect("a folder");
    dsync_tests::image::random(&beside.join("archive"), 64 << 20, &mut Random::new("an archive"));
    Run::new("mkfs.ext4").args(["-q", "-L", "data", "-d"]).args([&beside, &data]).ok();
    let place = site.path("root");
    let mount = Mount::new(&["-o", "loop,offset=1048576"], &root, &place).expect("a file system");
    for folder in ["var/lib/load", "data"] {
        fs::create_dir(place.join(folder)).expect("a folder");
    }
    fs::write(place.join("usr/local/sbin/load"), LOAD).expect("the load");
    fs::write(place.join("etc/systemd/system/load.service"), UNIT).expect("its unit");
    let wanted = place.join("etc/systemd/system/multi-user.target.wants");
    std::os::unix::fs::symlink("/etc/systemd/system/load.service", wanted.join("load.service"))
        .expect("a link");
    fs::remove_file(wanted.join("control.service")).expect("the service of other tests");
    let fstab = place.join("etc/fstab");
    let more = fs::read_to_string(&fstab).expect("fstab") + "LABEL=data /data ext4 defaults 0 2\n";
    fs::write(fstab, more).expect("fstab");
    drop(mount);
    [root, data].map(|raw| {
        let image = raw.with_extension("qcow2");
        Run::new("qemu-img").args(["convert", "-O", "qcow2"]).arg(&raw).arg(&image).ok();
        fs::remove_file(raw).expect("the raw image");
        image
    })
}

/// Starts the VM, and waits for its first transactions.
fn boot(host: &Libvirt, told: &Told) {
    let _ = fs::remove_file(&told.0);
    host.virsh(["start", VM]).ok();
    told.goes_on(3);
}

/// The replicas take over: the VM is defined from them.
fn promote(site: &Site, host: &Libvirt, replicas: &Path) {
    let definition = site.path("promoted.xml");
    site.dsync(["promote", "--force", "--group"])
        .arg(replicas.join(GROUP))
        .arg("--define")
        .arg(&definition)
        .ok();
    host.virsh(["define"]).arg(definition).ok();
}

#[test]
fn a_host_dies_in_the_midst_of_a_sync_and_its_databases_live_on() {
    let what = "a VM with databases whose host dies";
    if !(soak() || std::env::var_os("DSYNC_VM").is_some_and(|value| value == "1")) {
        return left_out(what, "make test-vm");
    }
    if !Libvirt::possible(what) || !machine::possible(what) || !need(&["mkfs.ext4", "qemu-img"], what) {
        return;
    }
    let (site, far, host) = (Site::new(), Site::new(), Libvirt::start());
    let (images, replicas) = (disks(&site), far.path("vms"));
    fs::create_dir(&replicas).expect("a folder");
    let told = Told(site.path("told"));
    let base = machine::base().expect("asked");
    let os = format!(
        "<kernel>{0}/vmlinuz</kernel><initrd>{0}/initrd</initrd><cmdline>root=/dev/vda1 ro quiet mitigations=off \
         no_timer_check</cmdline>",
        base.display()
    );
    let serial = format!(
        "<serial type='null'><target port='0'/></serial><serial type='file'><source path='{}'/><target port='1'/></serial>",
        told.0.display()
    );
    host.define_with(VM, 512, &os, &[&images[0], &images[1]], &serial);
    boot(&host, &told);
    let sync = |options: &[&str]| {
        let run = host.run(&site, binary()).args(["sync", "vm:db1", "--rsh", RSH]).args(options);
        run.arg(format!("far:{}", replicas.display())).env("RSH_STATE", far.state())
    };
    sync(&[]).ok();
    let mut certain = 0;
    for _ in 0..4 {
        told.goes_on(6);
        certain = told.done();
        sync(&[]).ok();
    }
    told.goes_on(6);
    // What it has to send takes a second.
    let mut dying = sync(&["--bwlimit", "300K"]).start();
    let arrives = || {
        let journal = |disk: &str| replicas.join(format!(".db1-{disk}.img.dsync/journal")).metadata();
        ["vda", "vdb"].iter().any(|disk| journal(disk).is_ok_and(|file| file.len() > 64 << 10))
    };
    dsync_tests::until("some of it has arrived", || {
        assert!(dying.ended().is_none(), "it has ended before it was killed");
        arrives()
    });
    dying.kill();
    drop(host);
    let acknowledged = told.done();

    // The other host takes over.
    let other = Libvirt::start();
    promote(&far, &other, &replicas);
    boot(&other, &told);
    let had = told.had();
    println!("of {acknowledged} transactions {certain} were certain, {had} are there");
    assert!((certain..=acknowledged + 1).contains(&had), "{had}");

    // The way back: what the host still has spares most of the way.
    let near = Libvirt::start();
    let back = site.path("back");
    fs::create_dir(&back).expect("a folder");
    for (image, name) in images.iter().zip(["db1-vda.img", "db1-vdb.img"]) {
        Run::new("qemu-img").args(["convert", "-O", "raw"]).arg(image).arg(back.join(name)).ok();
    }
    let sync = |options: &[&str]| {
        let run = other.run(&far, binary()).args(["sync", "vm:db1", "--json", "--rsh", RSH]).args(options);
        run.arg(format!("near:{}", back.display())).env("RSH_STATE", site.state()).ok()
    };
    let said = sync(&["--adopt"]);
    let disks = said.json().into_iter().filter(|line| line["message_type"] == "summary");
    let sent: u64 = disks.map(|disk| number(&disk, "bytes_sent")).sum();
    println!("the way back: {sent} bytes sent");
    assert!(sent < 64 << 20, "{said}");
    told.goes_on(6);
    sync(&[]);
    other.virsh(["destroy", VM]).ok();
    sync(&[]);
    let acknowledged = told.done();
    site.dsync(["forget", "vm:db1"]).ok();
    promote(&site, &near, &back);
    boot(&near, &told);
    assert!((acknowledged..=acknowledged + 1).contains(&told.had()));
}
