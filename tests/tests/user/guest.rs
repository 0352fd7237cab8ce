//! A Linux guest writes to a disk that dsync serves, and the disk is synced meanwhile.

use std::path::Path;
use std::time::Duration;

use dsync_tests::guest::{self, Guest};
use dsync_tests::scene::number;
use dsync_tests::{Site, image, need, rounds};

const MIB: u64 = 1 << 20;

/// Writes, renames and deletes files, and says after each fsync what must not be lost from then on.
const WORKLOAD: &str = r#"set -e
mkfs.ext4 -q /dev/vda
mkdir /tmp/disk
mount /dev/vda /tmp/disk
cd /tmp/disk
work() {
    i=0
    while [ ! -e /tmp/stop ]; do
        i=$((i + 1))
        mkdir -p dir$((i % 7))
        dd if=/dev/urandom of=dir$((i % 7))/file$((i % 40)) bs=4k count=$((i % 60 + 1)) 2>/dev/null
        [ $((i % 3)) != 0 ] || mv dir$((i % 7))/file$((i % 40)) dir$((i % 7))/moved$((i % 11))
        [ $((i % 5)) != 0 ] || rm -rf dir$(((i + 3) % 7))
        [ $((i % 13)) != 0 ] || fstrim /tmp/disk 2>/dev/null || :
        echo $i >count.new
        sync count.new
        mv count.new count
        sync .
        mark synced $i
    done
}
work &
read word
touch /tmp/stop
wait
cd /
umount /tmp/disk
"#;

#[test]
fn a_guest_writes_while_its_disk_is_synced_and_outlives_its_server() {
    let what = "a Linux guest on a disk served by dsync";
    if !guest::possible(what) || !need(&["mkfs.ext4", "e2fsck", "debugfs"], what) {
        return;
    }
    let site = Site::new();
    let (disk, replica) = (site.image("vm.raw", 192 * MIB), site.path("replica.raw"));
    let mut server = site.serve(&[&disk], &[]);
    let mut guest = Guest::boot(&guest::Options {
        script: WORKLOAD.into(),
        disks: vec![server.uri("vm")],
        ..Default::default()
    });
    guest.wait_for("synced", Duration::from_secs(90));
    let mut blocks = Vec::new();
    for round in 0..rounds(2, 60) {
        if round % 3 == 1 {
            let socket = server.socket().to_path_buf();
            server.kill();
            // Longer than a moment: the guest's writes wait.
            std::thread::sleep(Duration::from_secs(2));
            server = site.serve_on(socket, &[&disk], &[]);
        }
        // Some more work between two syncs, and what is certain before the cut.
        let mut certain = 0;
        for _ in 0..3 {
            certain = guest.wait_for("synced", Duration::from_secs(60)).parse::<u64>().expect("a number");
        }
        // The view is held while it is sent, so that there is something to compare with.
        let mut view = server.client("vm@view");
        let summary = site.sync(&disk, &replica, &["--at-view"]).ok().summary();
        let copy = site.path("view.raw");
        view.save(&copy).expect("reading the view");
        drop(view);
        image::assert_equal(&copy, &replica);
        assert_eq!(summary["method"], if round == 0 { "copy" } else { "tracked" }, "{summary}");
        blocks.push(number(&summary, "blocks_changed"));

        image::fsck_after_replay(&replica);
        // What the guest was told is durable is in the replica.
        dsync_tests::Run::new("e2fsck").arg("-fp").arg(&copy).output();
        let count = dsync_tests::Run::new("debugfs").args(["-R", "cat count"]).arg(&copy).ok();
        let count: u64 = count.text().trim().parse().unwrap_or_else(|_| panic!("no count: {count}"));
        assert!(count >= certain, "the guest had synced {certain}, the replica knows {count}");
    }
    guest.send("stop");
    guest.finish(Duration::from_secs(120));
    println!("blocks changed in each round: {blocks:?}");
    site.sync(&disk, &replica, &[]).ok();
    image::assert_equal(&disk, &replica);
    dsync_tests::Run::new("e2fsck").arg("-fn").arg(&replica).ok();
    server.stop();
}

#[test]
fn a_guest_loses_its_power_on_a_served_disk() {
    let what = "a power cut of a guest on a disk served by dsync";
    if !guest::possible(what) || !need(&["mkfs.ext4", "e2fsck"], what) {
        return;
    }
    let site = Site::new();
    let (disk, replica) = (site.image("vm.raw", 192 * MIB), site.path("replica.raw"));
    let server = site.serve(&[&disk], &[]);
    let options =
        guest::Options { script: WORKLOAD.into(), disks: vec![server.uri("vm")], ..Default::default() };
    for round in 0..rounds(1, 10) {
        let mut guest = Guest::boot(&options);
        guest.wait_for("synced", Duration::from_secs(90));
        guest.wait_for(&format!("synced {}", 6 + round), Duration::from_secs(60));
        guest.cut();
        site.sync(&disk, &replica, &[]).ok();
        image::assert_equal(&disk, &replica);
        image::fsck_after_replay(&replica);
    }
}

/// Syncs to a replica on FAT, which is mounted anew before each sync. A second one is looked up first, so that the inode is another one.
const FAT: &str = r#"set -e
# From there it would be read anew at each start.
cp "$DSYNC" /tmp/dsync
DSYNC=/tmp/dsync
export DSYNC_STATE_DIR=/tmp/state
mkfs.vfat /dev/vda >/dev/null
mkdir /tmp/disk
dd if=/dev/urandom of=/tmp/vm.raw bs=64k count=16 2>/dev/null
inode=0
for round in 1 2; do
    mount -t vfat /dev/vda /tmp/disk
    : >/tmp/disk/other$round
    ls -l /tmp/disk >/dev/null
    "$DSYNC" sync /tmp/vm.raw /tmp/disk/vm.raw
    cmp /tmp/vm.raw /tmp/disk/vm.raw
    before=$inode
    inode=$(stat -c %i /tmp/disk/vm.raw)
    [ "$inode" != "$before" ]
    umount /tmp/disk
    dd if=/dev/urandom of=/tmp/vm.raw bs=4k count=1 seek=$round conv=notrunc 2>/dev/null
done
mount -t vfat /dev/vda /tmp/disk
echo another >>/tmp/disk/vm.raw
umount /tmp/disk
mount -t vfat /dev/vda /tmp/disk
"$DSYNC" sync /tmp/vm.raw /tmp/disk/vm.raw && exit 1
[ $? = 4 ]
umount /tmp/disk
"#;

#[test]
fn a_replica_on_fat_is_the_same_after_each_mount() {
    let what = "a replica on FAT";
    if !guest::possible(what) || !need(&["mkfs.vfat"], what) {
        return;
    }
    let site = Site::new();
    let program = dsync_tests::site::binary();
    let name = program.file_name().expect("a file").to_string_lossy();
    let guest = Guest::boot(&guest::Options {
        script: format!("DSYNC=/mnt/{name}\n{FAT}"),
        // The guest has a /tmp of its own, where the program may lie.
        share: program.parent().map(Path::to_path_buf),
        disks: vec![site.image("fat.raw", 16 * MIB).display().to_string()],
        modules: ["nls_cp437", "nls_ascii", "vfat"].map(str::to_owned).into(),
        ..Default::default()
    });
    guest.finish(Duration::from_secs(120));
}

/// Mounts a disk that was never its own, writes to it and reads that again.
const REHEARSAL: &str = r#"set -e
mkdir /tmp/disk
mount /dev/vda /tmp/disk
mark found $(cat /tmp/disk/name)
read word
dd if=/dev/urandom of=/tmp/disk/scratch bs=1M count=8 2>/dev/null
sum=$(md5sum </tmp/disk/scratch)
echo changed >/tmp/disk/name
fstrim /tmp/disk 2>/dev/null || :
umount /tmp/disk
mount /dev/vda /tmp/disk
[ "$sum" = "$(md5sum </tmp/disk/scratch)" ]
mark wrote $(cat /tmp/disk/name)
umount /tmp/disk
"#;

#[test]
fn a_guest_rehearses_on_a_replica_that_goes_on() {
    let what = "a Linux guest on a rehearsal of a replica";
    if !guest::possible(what) || !need(&["mkfs.ext4", "e2fsck", "debugfs"], what) {
        return;
    }
    let site = Site::new();
    let (disk, replica) = (site.image("vm.raw", 64 * MIB), site.path("copy.raw"));
    let name = site.path("name");
    std::fs::write(&name, "replica\n").expect("a file");
    dsync_tests::Run::new("mkfs.ext4").arg("-q").arg(&disk).ok();
    let write = format!("write {} name", name.display());
    dsync_tests::Run::new("debugfs").args(["-w", "-R", &write]).arg(&disk).ok();
    let source = site.serve(&[&disk], &[]);
    site.sync(&disk, &replica, &[]).ok();
    let moment = std::path::PathBuf::from(format!("{}@now", replica.display()));
    let server = site.serve(&[&moment], &["--writable"]);
    let mut guest = Guest::boot(&guest::Options {
        script: REHEARSAL.into(),
        disks: vec![server.uri("copy")],
        ..Default::default()
    });
    assert_eq!(guest.wait_for("found", Duration::from_secs(90)), "replica");
    // The source goes on, and the replica with it: over all of the file system.
    let mut client = source.client("vm");
    for at in (0..64).step_by(2) {
        client.write(at * MIB, &[at as u8 + 1; 256 << 10]).expect("a write");
    }
    client.close().expect("the end");
    site.sync(&disk, &replica, &[]).ok();
    guest.send("go on");
    assert_eq!(guest.wait_for("wrote", Duration::from_secs(90)), "changed");
    guest.finish(Duration::from_secs(60));
    server.stop();
    source.stop();
    image::assert_equal(&disk, &replica);
}
