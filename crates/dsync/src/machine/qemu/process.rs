//! The process of a QEMU.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// The images that a process has open: by its paths of them alone another file might be meant, as where it has gone to another folder since.
pub(super) struct OpenImages {
    folder: PathBuf,
    images: Vec<(PathBuf, ImageId)>,
}

/// Names a file, or a block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImageId {
    File(u64, u64),
    Device(u64),
}

impl ImageId {
    fn of(found: &Metadata) -> Option<ImageId> {
        let kind = found.file_type();
        match kind.is_block_device() {
            true => Some(ImageId::Device(found.rdev())),
            false => kind.is_file().then(|| ImageId::File(found.dev(), found.ino())),
        }
    }
}

impl OpenImages {
    /// The images of this process.
    ///
    /// # Errors
    /// If they cannot be listed.
    pub(super) fn of(pid: u32) -> io::Result<OpenImages> {
        let (_, folder) = command_line(pid)?;
        let files = std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().map(|entry| entry.path());
        let image = |file: PathBuf| {
            let id = ImageId::of(&file.metadata().ok()?)?;
            Some((std::fs::read_link(file).ok()?, id))
        };
        Ok(OpenImages { folder, images: files.filter_map(image).collect() })
    }

    /// True if this file is one of them.
    pub(super) fn has(&self, file: &File) -> bool {
        file.metadata().is_ok_and(|found| self.is_open(&found))
    }

    fn is_open(&self, found: &Metadata) -> bool {
        ImageId::of(found).is_some_and(|id| self.images.iter().any(|(_, open)| *open == id))
    }

    /// The path of an image that the process calls so; `None` if that is none of those it has open, or could be several, or cannot be written in JSON.
    pub(super) fn path(&self, name: &str) -> Option<PathBuf> {
        let is_open =
            |path: &Path| path.to_str().is_some() && path.metadata().is_ok_and(|found| self.is_open(&found));
        let path = self.folder.join(name);
        if is_open(&path) {
            return Some(path);
        }
        let ending: PathBuf =
            Path::new(name).components().filter(|part| matches!(part, Component::Normal(_))).collect();
        let named = self.images.iter().map(|(path, _)| path);
        let mut named: Vec<_> = named.filter(|path| path.ends_with(&ending) && is_open(path)).collect();
        named.sort();
        named.dedup();
        match &named[..] {
            [path] if Path::new(name).is_relative() => Some((*path).clone()),
            _ => None,
        }
    }
}

/// The command line of a process, and its folder.
///
/// # Errors
/// If they cannot be read.
pub(super) fn command_line(pid: u32) -> std::io::Result<(Vec<String>, PathBuf)> {
    let process = Path::new("/proc").join(pid.to_string());
    let words = std::fs::read(process.join("cmdline"))?;
    let words = words.strip_suffix(&[0]).unwrap_or(&words).split(|byte| *byte == 0);
    let words = words.map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    Ok((words, std::fs::read_link(process.join("cwd"))?))
}

/// Names a process, of all that this host will ever have: by its number, and when it was started since the host was.
///
/// # Errors
/// If that cannot be read.
pub(super) fn process_id(pid: u32) -> std::io::Result<String> {
    let said = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Behind its name, which may have any characters in it; the twentieth number from there.
    let behind = said.rsplit_once(") ").map(|(_, behind)| behind);
    let began = behind.and_then(|behind| behind.split(' ').nth(19));
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    began
        .map(|began| format!("{pid}-{began}-{}", boot.trim()))
        .ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

/// The sockets of the monitors of the QEMUs of this host that are started by hand, as far as this user sees them.
pub(in crate::machine) fn monitors() -> Vec<PathBuf> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let of = |pid: u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        let (words, folder) = name.starts_with("qemu-system").then(|| command_line(pid).ok())??;
        monitor_of(&words).map(|socket| folder.join(socket))
    };
    let found: BTreeSet<PathBuf> = numbers.filter_map(of).collect();
    found.into_iter().collect()
}

/// The socket of the first monitor in a command line at which QEMU listens.
fn monitor_of(words: &[String]) -> Option<&str> {
    words.windows(2).find_map(|pair| {
        let [option, value] = pair else { return None };
        let place =
            value.strip_prefix("unix:").filter(|_| ["-qmp", "--qmp", "-qmp-pretty"].contains(&&**option))?;
        let (socket, options) = place.split_once(',')?;
        options.split(',').any(|option| option == "server" || option == "server=on").then_some(socket)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitor_of_a_command_line_is_the_first_that_listens() {
        let of = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            monitor_of(&words).map(str::to_owned)
        };
        let listens = "qemu -m 1 -qmp unix:/a,server=on,wait=off -qmp unix:/b,server=on";
        assert_eq!(of(listens).as_deref(), Some("/a"));
        assert_eq!(of("qemu -qmp unix:a,server,nowait").as_deref(), Some("a"));
        for other in [
            "qemu -qmp unix:/a",
            "qemu -qmp tcp::4444,server=on",
            "qemu -monitor unix:/a,server=on",
            "qemu -qmp",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn an_image_is_what_the_process_has_open() {
        let temp = tempfile::tempdir().unwrap();
        let [open, other] = ["open.img", "other.img"].map(|name| temp.path().join(name));
        std::fs::write(&other, "b").unwrap();
        std::fs::write(&open, "a").unwrap();
        let held = std::fs::File::open(&open).unwrap();
        let images = || OpenImages::of(std::process::id()).unwrap();
        let path = |name: &Path| images().path(&name.to_string_lossy());
        assert_eq!(path(&open), Some(open.clone()));
        assert_eq!(path(&other), None);
        assert!(images().has(&held));
        // It was started elsewhere.
        assert_eq!(images().path("open.img"), Some(open.clone()));
        assert_eq!(images().path("../x/open.img"), None);
        // Another one is in its place.
        std::fs::rename(&other, &open).unwrap();
        assert_eq!((path(&open), images().path("open.img")), (None, None));
        drop(held);
    }

    #[test]
    fn a_process_is_named_once() {
        let own = process_id(std::process::id()).unwrap();
        assert_eq!(own, process_id(std::process::id()).unwrap());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let other = process_id(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_ne!(other, own);
        let (words, _) = command_line(std::process::id()).unwrap();
        assert_eq!(words, std::env::args().collect::<Vec<_>>());
    }
}
