//! A mirror whose replica is a block device: what others write there, between two batches, or after the receiver was killed,
//! is never taken for what the mirror wrote.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::mount::Loop;
use dsync_tests::records::Records;
use dsync_tests::{Background, Run, Scene, beyond, need, need_root, rounds, skipped, until};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 32 * MIB;
/// What a mirror says when its batches begin.
const MIRRORING: &str = "mirroring to";

/// A device for a replica, and another way to its bytes, if there is one.
struct Disk {
    place: PathBuf,
    beneath: Option<(PathBuf, u64)>,
    /// Undone at the end.
    mapped: Option<String>,
    _loop: Loop,
}

impl Disk {
    fn whole(scene: &Scene) -> Option<Disk> {
        let device = Loop::new(&scene.site.image("device.img", SIZE))?;
        Some(Disk { place: device.device().into(), beneath: None, mapped: None, _loop: device })
    }

    /// A partition at 1 MiB.
    fn partition(scene: &Scene) -> Option<Disk> {
        let file = scene.site.image("device.img", SIZE + 2 * MIB);
        let table = format!("echo 2048,{},L | sfdisk -q {}", SIZE / 512, file.display());
        Run::shell(&table).ok();
        let device = Loop::new(&file)?;
        let whole = device.device().to_path_buf();
        Run::new("partx").arg("--add").arg(&whole).output();
        let place = PathBuf::from(format!("{}p1", whole.display()));
        let beneath = Some((whole, MIB));
        place.exists().then_some(Disk { place, beneath, mapped: None, _loop: device })
    }

    fn mapped(scene: &Scene) -> Option<Disk> {
        let device = Loop::new(&scene.site.image("device.img", SIZE))?;
        let name = format!("{}linear", testing::leftovers::name());
        let table = format!("0 {} linear {} 0", SIZE / 512, device.device().display());
        let made = Run::new("dmsetup").args(["create", "--verifyudev", &name, "--table", &table]).output();
        let place = PathBuf::from(format!("/dev/mapper/{name}"));
        let disk = Disk { place, beneath: None, mapped: Some(name), _loop: device };
        (made.status.success() && disk.place.exists()).then_some(disk)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(name) = &self.mapped {
            Run::new("dmsetup").args(["remove", "--retry", name]).output();
        }
        if let Some((whole, _)) = &self.beneath {
            Run::new("partx").arg("--delete").arg(whole).output();
        }
    }
}

fn read(path: &Path) -> Vec<u8> {
    use std::os::unix::fs::OpenOptionsExt;
    let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
    let flags = if path.starts_with("/dev") { direct } else { 0 };
    let file = File::options().read(true).custom_flags(flags).open(path).expect("a disk");
    let mut content = vec![0; SIZE as usize + 4096];
    let from = content.as_ptr().align_offset(4096);
    file.read_exact_at(&mut content[from..from + SIZE as usize], 0).expect("a disk");
    content[from..from + SIZE as usize].to_vec()
}

fn is_equal(scene: &Scene, disk: &Disk) -> bool {
    read(&scene.image) == read(&disk.place)
}

/// A block in which no sample is taken.
const ELSEWHERE: u64 = 9 * MIB + 4096;

fn write(path: &Path, at: u64) {
    let file = File::options().write(true).open(path).expect("a disk");
    file.write_all_at(&[0x5a; 4096], at).and_then(|()| file.sync_all()).expect("a write");
}

fn mirror(scene: &Scene, disk: &Disk) -> Background {
    let run =
        scene.site.dsync(["mirror", "--json", "-v", "--adopt=overwrite"]).arg(&scene.image).arg(&disk.place);
    let mut running = run.start();
    running.wait_to_say(MIRRORING);
    running
}

fn recover(scene: &Scene, disk: &Disk) -> Run {
    scene.site.dsync(["recover"]).arg(&disk.place)
}

/// A mirror has brought something there, and looks on.
fn mirrored(scene: &mut Scene, disk: &Disk) -> Background {
    let running = mirror(scene, disk);
    scene.change(50);
    until("a batch arrives", || is_equal(scene, disk));
    running
}

/// What is done to every kind of device. The write goes to `path`, `shift` bytes further on.
fn attack(scene: &mut Scene, disk: &Disk, path: &Path, shift: u64) {
    // Killed at rest: what is there is the last batch, exactly.
    mirrored(scene, disk).kill();
    recover(scene, disk).ok();
    assert!(is_equal(scene, disk), "{}", disk.place.display());
    // Written to between the kill and the next opening.
    mirrored(scene, disk).kill();
    write(path, shift + ELSEWHERE);
    recover(scene, disk).code(4).says(&["was written to", "--adopt"]);
    scene.site.sync(&scene.image, &disk.place, &[]).code(4).says(&["was written to", "--adopt"]);
    // Written to between two batches.
    let mut running = mirrored(scene, disk);
    write(path, shift + ELSEWHERE);
    scene.change(3);
    until("the mirror ends", || running.ended().is_some());
    let output = running.output(Duration::from_secs(5));
    assert_eq!(output.status.code(), Some(4), "{output}");
    output.says(&["was written to"]);
    recover(scene, disk).code(4).says(&["was written to"]);
}

fn attack_all(scene: &mut Scene, disk: &Disk) {
    let place = disk.place.clone();
    attack(scene, disk, &place, 0);
    if let Some((whole, shift)) = disk.beneath.clone() {
        attack(scene, disk, &whole, shift);
    }
}

#[test]
fn others_write_to_a_mirrors_disk() {
    let what = "others write to a mirror's disk";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let mut scene = Scene::new(what, SIZE);
    let Some(disk) = Disk::whole(&scene) else { return skipped(what, "there is no loop device") };
    attack_all(&mut scene, &disk);
}

#[test]
fn others_write_to_a_mirrors_partition_and_through_its_disk() {
    let what = "others write to a mirror's partition";
    if !need_root(what) || !need(&["losetup", "sfdisk", "partx"], what) {
        return;
    }
    let mut scene = Scene::new(what, SIZE);
    let Some(disk) = Disk::partition(&scene) else {
        return skipped(what, "there are no partitions of loop devices");
    };
    attack_all(&mut scene, &disk);
}

#[test]
fn others_write_to_a_mirrors_mapped_device() {
    let what = "others write to a mirror's mapped device";
    if !need_root(what) || !need(&["losetup", "dmsetup"], what) {
        return;
    }
    let mut scene = Scene::new(what, SIZE);
    let Some(disk) = Disk::mapped(&scene) else { return beyond(what, "there is no device mapper") };
    attack_all(&mut scene, &disk);
}

/// A mirror that is killed while it writes is believed: no own write is taken for another's; and one that is more than it can
/// have written is not.
#[test]
fn a_mirror_to_a_device_is_killed_while_it_writes() {
    let what = "a mirror to a device is killed while it writes";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let mut scene = Scene::new(what, SIZE);
    let Some(disk) = Disk::whole(&scene) else { return skipped(what, "there is no loop device") };
    let mut next = None;
    for round in 0..rounds(8, 200) {
        let mut running = mirror(&scene, &disk);
        let load = Records::start(&scene.server().address(), "vm", next, 300);
        std::thread::sleep(Duration::from_millis(100 + scene.random.below(400)));
        running.kill();
        next = Some(load.stop());
        if round % 4 == 3 {
            // More than one batch holds.
            let file = File::options().write(true).open(&disk.place).expect("a disk");
            let much = vec![0x5a; 16 * MIB as usize];
            file.write_all_at(&much, 8 * MIB).and_then(|()| file.sync_all()).expect("a write");
            recover(&scene, &disk).code(4).says(&["was written to"]);
        } else {
            recover(&scene, &disk).ok();
        }
    }
    let options = ["--adopt=overwrite"];
    scene.site.sync(&scene.image, &disk.place, &options).ok();
    assert!(is_equal(&scene, &disk));
}
