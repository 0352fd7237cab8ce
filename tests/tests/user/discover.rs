//! `dsync discover`: what it lists is there, and what it says to type works.

use std::fs::File;
use std::path::Path;

use dsync_tests::image;
use dsync_tests::mount::Mount;
use dsync_tests::site::binary;
use dsync_tests::{Random, Run, Site, beyond, need, need_root, skipped};
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// What it lists in a folder, by path.
fn listed(site: &Site, folder: &Path) -> Vec<Value> {
    site.dsync(["discover", "--json"]).arg(folder).ok().json()
}

/// The disk at a path.
fn at<'a>(disks: &'a [Value], path: &Path) -> &'a Value {
    let is_it = |disk: &&Value| disk["path"].as_str().is_some_and(|it| Path::new(it) == path);
    disks.iter().find(is_it).unwrap_or_else(|| panic!("{} is not in {disks:?}", path.display()))
}

#[test]
fn an_image_has_its_method_and_commands_that_work() {
    let site = Site::new();
    let folder = site.path("my images");
    std::fs::create_dir_all(folder.join("below/.hidden")).expect("folders");
    let image = folder.join("below/web 1.raw");
    image::random(&image, 16 * MIB, &mut Random::new("discover"));
    for other in ["seed.img", "below/.hidden/clone.raw", "notes.txt"] {
        let size = if other == "seed.img" { MIB } else { 16 * MIB };
        image::sparse(&folder.join(other), size);
    }
    let disks = listed(&site, &folder);
    assert_eq!(disks.len(), 1, "{disks:?}");
    let disk = at(&disks, &image);
    assert_eq!((disk["what"].as_str(), disk["size"].as_u64()), (Some("raw image"), Some(16 * MIB)));
    assert_eq!(disk["used_by"], Value::Null);
    // Its program has it open.
    let open = File::open(&image).expect("the image");
    let (pid, disks) = (format!("(pid {})", std::process::id()), listed(&site, &folder));
    assert!(at(&disks, &image)["used_by"].as_str().is_some_and(|user| user.ends_with(&pid)), "{disks:?}");
    drop(open);
    // The last command, with a place of ours, as a shell reads it.
    let sync = disk["commands"].as_array().and_then(|all| all.last()?.as_str()).expect("a command");
    let replicas = site.path("replicas");
    std::fs::create_dir(&replicas).expect("a folder");
    let sync = sync.replace("HOST:/srv", &replicas.to_string_lossy());
    let line = format!("dsync() {{ {} \"$@\"; }}; {sync}", binary().display());
    site.run(Path::new("sh")).args(["-c", &line]).ok();
    let replica = replicas.join("web 1.raw");
    image::assert_equal(&image, &replica);
    assert_eq!(at(&listed(&site, &folder), &image)["method"], "source");
    assert_eq!(at(&listed(&site, &replicas), &replica)["method"], "replica");
    site.dsync(["discover", "nowhere"]).code(1).says(&["cannot read nowhere"]);
    let empty = site.dsync(["discover"]).arg(folder.join("below/.hidden/none"));
    empty.code(1).says(&["cannot read"]);
}

#[test]
fn an_image_on_a_file_system_with_clones_is_tracked_in_place() {
    let what = "dsync discover on XFS";
    if !need_root(what) || !need(&["mkfs.xfs", "qemu-img"], what) {
        return;
    }
    let site = Site::new();
    let (disk, place) = (site.image("fs.img", 640 * MIB), site.path("fs"));
    Run::new("mkfs.xfs").arg("-q").arg(&disk).ok();
    let Some(_mount) = Mount::new(&["-o", "loop"], &disk, &place) else {
        return skipped(what, "it cannot be mounted from a loop device here");
    };
    let (cloned, served) = (place.join("vm.raw"), site.path("vm.qcow2"));
    image::sparse(&cloned, 16 * MIB);
    let options = ["create", "-q", "-f", "qcow2", "-o", "preallocation=full"];
    Run::new("qemu-img").args(options).arg(&served).arg("16M").ok();
    let disks = listed(&site, site.dir());
    for (path, what, method, command) in [
        (&cloned, "raw image", "clone", "dsync track add "),
        (&served, "qcow2 image", "serve", "dsync serve "),
    ] {
        let disk = at(&disks, path);
        assert_eq!((disk["what"].as_str(), disk["method"].as_str()), (Some(what), Some(method)));
        assert!(disk["commands"][0].as_str().is_some_and(|line| line.starts_with(command)), "{disk}");
    }
    site.dsync(["track", "add"]).arg(&cloned).ok();
    assert_eq!(at(&listed(&site, site.dir()), &cloned)["method"], "source");
    site.dsync(["track", "remove"]).arg(&cloned).ok();
}

#[test]
fn the_disk_of_the_root_file_system_is_among_the_block_devices() {
    let what = "dsync discover of block devices";
    let root = Run::new("findmnt").args(["-n", "-o", "SOURCE", "/"]).output().text();
    if !need_root(what) || !root.starts_with("/dev/") {
        return beyond(what, "the root file system is on no block device");
    }
    let site = Site::new();
    let disks = site.dsync(["discover", "--json"]).ok().json();
    let is_mounted = |disk: &Value| disk["used_by"].as_str().is_some_and(|user| user.contains("mounted on"));
    assert!(disks.iter().any(|disk| disk["size"].as_u64() > Some(0) && is_mounted(disk)), "{disks:?}");
    for disk in disks.iter().filter(|disk| disk["kind"] != "machine") {
        let path = Path::new(disk["path"].as_str().expect("a path"));
        // What others use may go meanwhile.
        assert!(!path.starts_with("/dev/") || path.exists() && !path.starts_with("/dev/loop0"), "{disk}");
    }
}
