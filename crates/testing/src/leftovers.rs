//! What tests that were killed have left on the machine: processes, mounts, loop devices, pinned trackers, folders. The next run removes it.
//!
//! All of it bears the name of its test's process, `dsync-test-NAMESPACE_PID-`, in a path. What belongs to a process that lives, or to one of
//! another container on this machine, and what has no such name, is not touched.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::process::{Pid, Signal, kill_process};

use crate::needs::run;

/// How the names of all that tests make begin.
const NAME: &str = "dsync-test-";
/// How the names of programs begin that serve a test in the background, each with a path of it in its arguments.
const DAEMONS: [&str; 3] = ["qemu-system-", "libvirtd", "swtpm"];
/// Where trackers are pinned.
const BPFFS: &str = "/sys/fs/bpf";

/// How the names of all that this process makes begin. A BPF file system allows no dot in them.
pub fn name() -> String {
    format!("{NAME}{}_{}-", namespace(), std::process::id())
}

/// The namespace in which a process's number is its own; 0 where that is not known.
fn namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino())
}

/// A folder below which trackers are pinned for one site of this process, by its number. It need not exist. Its file system is mounted, for
/// root: two commands that find it missing at once would mount one over the other.
pub fn pins(site: u32) -> PathBuf {
    static MOUNTED: Once = Once::new();
    MOUNTED.call_once(|| {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        if !mounts.lines().any(|mount| mount.split(' ').nth(1) == Some(BPFFS)) {
            run("mount", ["-t", "bpf", "bpf", BPFFS]);
        }
    });
    Path::new(BPFFS).join(format!("{}{site}", name()))
}

/// Removes a folder of pins with all trackers in it: they end.
pub fn unpin(folder: &Path) {
    for tracker in fs::read_dir(folder).into_iter().flatten().flatten() {
        for pin in fs::read_dir(tracker.path()).into_iter().flatten().flatten() {
            let _ = fs::remove_file(pin.path());
        }
        let _ = fs::remove_dir(tracker.path());
    }
    let _ = fs::remove_dir(folder);
}

/// True if this text names something of a test's process that is gone.
fn is_left(text: &str) -> bool {
    let here = namespace();
    let owner = |rest: &str| {
        let (namespace, owner) = rest.split('-').next()?.split_once('_')?;
        let owner = owner.parse::<u32>().ok()?;
        (namespace.parse() == Ok(here)).then_some(owner)
    };
    text.split(NAME)
        .skip(1)
        .filter_map(owner)
        .any(|owner| !Path::new("/proc").join(owner.to_string()).exists())
}

/// Removes what was left, once in a process. `place` is where this run's scratch folders lie.
pub(crate) fn remove(place: &Path) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        processes();
        mounts();
        mapped();
        loops();
        // A run of the suite may have a temporary folder of its own.
        for place in
            [place, Path::new(BPFFS), Path::new("/dev/shm"), Path::new("/tmp"), &std::env::temp_dir()]
        {
            folders(place);
        }
    });
}

/// Processes that were started for a test: their environment says so. Not those of somebody who looks into its folder.
fn processes() {
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let number = process.file_name().to_str().and_then(|number| number.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else { continue };
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let of_site =
            variables.any(|variable| variable.starts_with("DSYNC_STATE_DIR=") && is_left(&variable));
        // Those that became daemons, or were started by one.
        let text = |file| fs::read(process.path().join(file)).unwrap_or_default();
        let program = text("comm");
        let is_daemon = DAEMONS.iter().any(|name| program.starts_with(name.as_bytes()));
        if of_site || (is_daemon && is_left(&String::from_utf8_lossy(&text("cmdline")))) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

fn mounts() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // The last comes first: one may lie on another.
    for mount in mounts.lines().rev() {
        let place = mount.split(' ').nth(1).unwrap_or_default();
        if is_left(place) {
            run("umount", ["--lazy", place]);
        }
    }
}

/// Devices of the device mapper, which lie on loop devices.
fn mapped() {
    for device in fs::read_dir("/dev/mapper").into_iter().flatten().flatten() {
        let name = device.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(NAME) && is_left(name)) {
            run("dmsetup", ["remove".as_ref(), "--retry".as_ref(), name.as_os_str()]);
        }
    }
}

fn loops() {
    for device in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let image = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        if is_left(&image) {
            run("losetup", [OsStr::new("--detach"), Path::new("/dev").join(device.file_name()).as_os_str()]);
        }
    }
}

fn folders(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(|name| name.starts_with(NAME) && is_left(name)) {
            continue;
        }
        match place == Path::new(BPFFS) {
            true => unpin(&entry.path()),
            false => drop(fs::remove_dir_all(entry.path())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name of a process that is gone: none has a number above the kernel's bound.
    fn gone() -> String {
        format!("{NAME}{}_4194305-abc", namespace())
    }

    #[test]
    fn what_belongs_to_a_living_process_is_not_left() {
        assert!(!is_left(&format!("/x/{}abc/vm.raw", name())));
        assert!(!is_left("/x/dsync-test-/vm.raw") && !is_left("/x/dsync-tests/vm.raw") && !is_left(""));
        assert!(is_left(&format!("/x/{}/vm.raw (deleted)", gone())));
        assert!(!is_left("/x/dsync-test-1_4194305-abc/vm.raw"), "of another container");
    }

    #[test]
    fn what_a_killed_test_has_left_is_removed() {
        let place = crate::on_disk();
        let left = place.path().join(gone());
        let kept = place.path().join("dsync-test");
        fs::create_dir_all(left.join("state")).unwrap();
        fs::create_dir(&kept).unwrap();
        let mut process = std::process::Command::new("sleep")
            .arg("60")
            .env("DSYNC_STATE_DIR", left.join("state"))
            .spawn()
            .unwrap();
        let program = left.join("swtpm");
        fs::copy("/bin/sleep", &program).unwrap();
        let mut daemon = std::process::Command::new(&program).arg("60").spawn().unwrap();
        let image = left.join("image");
        fs::write(&image, vec![0; 1 << 20]).unwrap();
        let attached = run("losetup", ["--find".as_ref(), "--show".as_ref(), image.as_os_str()]);
        let mounted = run("mount", ["-t", "tmpfs", "none", left.join("state").to_str().unwrap()]);
        let pins = Path::new(BPFFS).join(gone());
        let pinned = fs::create_dir_all(pins.join("7:0")).is_ok();
        processes();
        mounts();
        loops();
        folders(place.path());
        folders(Path::new(BPFFS));
        assert!(!pinned || !pins.exists(), "a pin is left");
        assert!(!process.wait().unwrap().success() && !daemon.wait().unwrap().success());
        assert!(!left.exists() && kept.exists());
        if let Some(device) = attached {
            let name = Path::new(&device).file_name().unwrap().to_owned();
            let image = fs::read_to_string(Path::new("/sys/block").join(name).join("loop/backing_file"));
            assert!(!image.unwrap_or_default().contains(&gone()));
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(mounted.is_none() || !mounts.contains(&gone()));
    }
}
