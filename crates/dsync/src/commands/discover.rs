//! `dsync discover`: the disks of this host, and for each how it can be followed. It looks, and changes nothing.
//!
//! Disks are the block devices that nothing but a file system lies on, and the images of virtual machines: those that a running QEMU has
//! open, and those in the folders where libvirt and Proxmox put them, or in the folders that are given.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Serialize;
use source::StateDir;

use crate::args;
use crate::machine;
use crate::output::Output;
use crate::terms::{shell_word, units};

/// Where images are looked for unless folders are given.
const FOLDERS: [&str; 2] = ["/var/lib/libvirt/images", "/var/lib/vz/images"];
/// The endings of images.
const ENDINGS: [&str; 6] = ["qcow2", "raw", "img", "vmdk", "vdi", "vhdx"];
/// The least bytes of an image: a smaller file is a floppy, a seed of cloud-init, or NVRAM.
const LEAST: u64 = 16 << 20;
/// How deep folders are searched, and how many of their entries are looked at.
const DEPTH: u32 = 4;
const ENTRIES: usize = 20_000;
/// What the kernel must tell a BPF program of its types.
const TYPES: &str = "/sys/kernel/btf/vmlinux";

/// A disk, and how it can be followed.
#[derive(Debug, Serialize)]
struct Found {
    kind: &'static str,
    path: PathBuf,
    /// Bytes of the block device or the file.
    size: u64,
    what: String,
    used_by: Option<String>,
    method: Method,
    /// What is to be known of the method.
    note: &'static str,
    commands: Vec<String>,
}

/// A VM, of libvirt or of QEMU alone.
#[derive(Debug, Serialize)]
struct Machine {
    kind: &'static str,
    name: String,
    note: &'static str,
    commands: [String; 1],
}

/// What is to be known of a VM.
const OF_MACHINE: &str = "all its disks as of one moment, and its definition; it goes on running";

/// How a disk is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Method {
    /// It is a source already.
    Source,
    /// It is a replica.
    Replica,
    /// A program in the kernel records writes.
    Bpf,
    /// A clone of the last sync is kept.
    Clone,
    /// Its VM writes through a server.
    Serve,
    /// Nothing records writes.
    Compare,
}

impl Method {
    /// What a user should know of it.
    fn note(self) -> &'static str {
        match self {
            Method::Source => "dsync knows it as a source: \"dsync status\" tells how it is followed",
            Method::Replica => "it is a replica: what follows it is its source's host",
            Method::Bpf => "the kernel records its writes; nothing is restarted",
            Method::Clone => "its file system tells what changed; its VM goes on running",
            Method::Serve => {
                "the server records its writes: start its VM with the export as its disk. A VM under libvirt goes on with \"dsync sync vm:NAME\", one with a QMP monitor with \"dsync sync qemu:SOCKET\""
            }
            Method::Compare => {
                "nothing records its writes here: a sync reads both sides, while nothing writes to it"
            }
        }
    }

    /// The lines to type for a disk.
    fn commands(self, path: &Path) -> Vec<String> {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let replica = match path.extension().filter(|_| path.metadata().is_ok_and(|m| m.is_file())) {
            Some(_) => path.file_name().unwrap_or_default().into(),
            None => PathBuf::from(format!("{stem}.raw")),
        };
        let replica = shell_word(&replica.to_string_lossy());
        let disk = shell_word(&path.to_string_lossy());
        let sync = format!("dsync sync {disk} HOST:/srv/{replica}");
        match self {
            Method::Source | Method::Replica => vec![format!("dsync status {disk}")],
            Method::Bpf | Method::Clone => vec![format!("dsync track add {disk}"), sync],
            Method::Serve => {
                let socket = shell_word(&format!("/run/{stem}.sock"));
                vec![format!("dsync serve {disk} --socket {socket}"), sync]
            }
            Method::Compare => vec![sync],
        }
    }
}

/// What this host has and is able to.
struct Host {
    sources: BTreeSet<PathBuf>,
    replicas: BTreeSet<PathBuf>,
    /// The programs that have a file open, by device and inode; for other users only root sees them.
    users: BTreeMap<(u64, u64), User>,
    /// A tracker in the kernel can be loaded.
    bpf: bool,
}

/// A program that has a file open.
struct User {
    path: PathBuf,
    name: String,
    pid: String,
}

/// Runs the command.
pub(crate) fn run(args: &args::Discover, state: &StateDir, output: &Output) -> Result<()> {
    for folder in &args.folders {
        std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    }
    let machines = if args.folders.is_empty() { machine::names() } else { Vec::new() };
    machines.into_iter().for_each(|name| say_machine(format!("vm:{name}"), name, "VM of libvirt", output));
    let monitors = if args.folders.is_empty() { machine::monitors() } else { Vec::new() };
    for socket in monitors {
        let name = socket.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        say_machine(format!("qemu:{}", socket.display()), name, "VM of QEMU, by its monitor", output);
    }
    let host = Host::read(state)?;
    let mut found = match args.folders.is_empty() {
        true => host.devices(),
        false => Vec::new(),
    };
    found.extend(host.images(&args.folders));
    if found.is_empty() {
        output.say("No disks were found. Name the folders that have images, as in \"dsync discover /srv\".");
        return Ok(());
    }
    for disk in &found {
        output.summary(disk);
        let used = disk.used_by.as_ref().map_or(String::new(), |user| format!(", {user}"));
        output.say(&format!("{}  {}, {}{used}", disk.path.display(), units::size(disk.size), disk.what));
        output.say(&format!("    {}", disk.note));
        disk.commands.iter().for_each(|command| output.say(&format!("        {command}")));
    }
    output.say("");
    output.say("HOST:/srv stands for where the replica shall be. Add -n to a sync to see what it would do.");
    if !rustix::process::geteuid().is_root() {
        output.warn("only root sees which programs use an image, and which of them is in use");
    }
    Ok(())
}

/// Says how a VM is copied with all its disks, by the word that names it.
fn say_machine(word: String, name: String, what: &str, output: &Output) {
    let commands = [format!("dsync sync {} HOST:/srv/vms/", shell_word(&word))];
    let machine = Machine { kind: "machine", name, note: OF_MACHINE, commands };
    output.summary(&machine);
    output.say(&format!("{word}  {what}"));
    output.say(&format!("    {}", machine.note));
    machine.commands.iter().for_each(|command| output.say(&format!("        {command}")));
}

impl Host {
    fn read(state: &StateDir) -> Result<Host> {
        let survey = state.survey()?;
        let replicas = sync::known_replicas(state).all().context("cannot read the list of replicas")?;
        Ok(Host {
            sources: survey.sources.into_iter().map(|(_, about)| about.path).collect(),
            replicas: replicas.into_iter().map(|replica| replica.path).collect(),
            users: users(),
            bpf: rustix::process::geteuid().is_root() && Path::new(TYPES).exists(),
        })
    }

    /// The method for a disk, unless dsync knows the disk.
    fn method(&self, path: &Path, otherwise: Method) -> Method {
        match () {
            () if self.sources.contains(path) => Method::Source,
            () if self.replicas.contains(path) => Method::Replica,
            () => otherwise,
        }
    }

    /// The block devices that nothing but a file system or swap space lies on, by name.
    fn devices(&self) -> Vec<Found> {
        let entries = std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten();
        let mut found: Vec<Found> = entries.filter_map(|entry| self.device(&entry.path())).collect();
        found.sort_by(|a, b| a.path.cmp(&b.path));
        found
    }

    /// A block device by its folder in sysfs; `None` if it is no disk to be copied by itself.
    fn device(&self, place: &Path) -> Option<Found> {
        let text = |name: &str| std::fs::read_to_string(place.join(name)).map(|text| text.trim().to_owned());
        let name = place.file_name()?.to_str()?;
        let passing = ["loop", "ram", "zram", "sr", "fd", "nbd"].iter().any(|kind| {
            name.strip_prefix(kind).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        });
        let size = text("size").ok()?.parse::<u64>().ok()? * 512;
        let is_part = place.join("partition").exists() || text("hidden").is_ok_and(|it| it == "1");
        // What holds it is the disk that programs use.
        let is_held = std::fs::read_dir(place.join("holders")).ok()?.next().is_some();
        let uuid = text("dm/uuid").unwrap_or_default();
        if passing || size == 0 || is_part || is_held || is_part_of_lvm(&uuid) {
            return None;
        }
        let path = match text("dm/name") {
            Ok(name) => Path::new("/dev/mapper").join(name),
            Err(_) => Path::new("/dev").join(name.replace('!', "/")),
        };
        let slaves = std::fs::read_dir(place.join("slaves")).into_iter().flatten().flatten();
        let mut uuids = slaves.filter_map(|slave| std::fs::read_to_string(slave.path().join("dm/uuid")).ok());
        let what = match name {
            _ if uuid.starts_with("LVM-") && uuids.any(|uuid| uuid.trim().ends_with("-tpool")) => {
                "LVM thin volume"
            }
            _ if uuid.starts_with("LVM-") => "LVM volume",
            _ if name.starts_with("rbd") => "RBD image",
            _ if name.starts_with("zd") => "ZFS volume",
            _ if name.starts_with("md") => "RAID array",
            _ => "disk",
        };
        let read_only = text("ro").is_ok_and(|it| it == "1");
        let method = match self.bpf && !read_only {
            true => Method::Bpf,
            false => Method::Compare,
        };
        let method = self.method(&path, method);
        Some(Found {
            kind: "disk",
            size,
            what: what.into(),
            used_by: device::in_use(&path),
            note: method.note(),
            commands: method.commands(&path),
            method,
            path,
        })
    }

    /// The images in these folders, or in the usual ones and in use; by path.
    fn images(&self, folders: &[PathBuf]) -> Vec<Found> {
        let mut paths = BTreeSet::new();
        let mut left = ENTRIES;
        let usual: Vec<PathBuf> = FOLDERS.iter().map(PathBuf::from).collect();
        let places = if folders.is_empty() { &usual } else { folders };
        places.iter().for_each(|folder| search(folder, DEPTH, &mut left, &mut paths));
        if folders.is_empty() {
            let machines = self.users.values().filter(|user| user.name.starts_with("qemu"));
            paths.extend(machines.map(|user| user.path.clone()));
        }
        paths.iter().filter_map(|path| self.image(path)).collect()
    }

    fn image(&self, path: &Path) -> Option<Found> {
        let path = std::fs::canonicalize(path).ok()?;
        let about = path.metadata().ok().filter(Metadata::is_file)?;
        if about.len() < LEAST {
            return None;
        }
        let format = device::container_format(&path);
        let user = self.users.get(&(about.dev(), about.ino()));
        let by_clones = File::open(&path).is_ok_and(|file| device::tells_places(&file).unwrap_or(false));
        let method = match format {
            _ if by_clones => Method::Clone,
            None | Some("qcow2") => Method::Serve,
            Some(_) => Method::Compare,
        };
        let method = self.method(&path, method);
        Some(Found {
            kind: "disk",
            size: about.len(),
            what: format!("{} image", format.unwrap_or("raw")),
            used_by: user.map(|user| format!("used by {} (pid {})", user.name, user.pid)),
            note: method.note(),
            commands: method.commands(&path),
            method,
            path,
        })
    }
}

/// True of the volumes that LVM makes for itself, such as the data of a pool: their ids end with what they are.
fn is_part_of_lvm(uuid: &str) -> bool {
    const OWN: usize = "LVM-".len() + 2 * 32;
    uuid.starts_with("LVM-") && uuid.len() > OWN
}

/// Adds the images in a folder, and in those below it.
fn search(folder: &Path, depth: u32, left: &mut usize, found: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Some(less) = left.checked_sub(1) else { return };
        *left = less;
        let (path, kind) = (entry.path(), entry.file_type());
        if kind.as_ref().is_ok_and(|kind| kind.is_dir()) {
            // Its own folders begin with a dot.
            if depth > 1 && !entry.file_name().as_encoded_bytes().starts_with(b".") {
                search(&path, depth - 1, left, found);
            }
        } else if kind.is_ok_and(|kind| kind.is_file()) {
            let ending = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
            if ENDINGS.iter().any(|known| ending.eq_ignore_ascii_case(known)) {
                found.insert(path);
            }
        }
    }
}

/// The programs that have files open, but dsync itself.
fn users() -> BTreeMap<(u64, u64), User> {
    let mut users = BTreeMap::new();
    let own = std::process::id().to_string();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_string_lossy().into_owned();
        if pid == own || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        for file in std::fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let (Ok(path), Ok(about)) = (std::fs::read_link(file.path()), file.path().metadata()) else {
                continue;
            };
            if about.is_file() && path.is_absolute() {
                let user = User { path, name: name.trim().to_owned(), pid: pid.clone() };
                users.entry((about.dev(), about.ino())).or_insert(user);
            }
        }
    }
    users
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_of_lvm_itself_are_told_from_those_of_its_users() {
        let own = format!("LVM-{}", "a".repeat(64));
        assert!(!is_part_of_lvm(&own) && !is_part_of_lvm("CRYPT-LUKS2-0123-root") && !is_part_of_lvm(""));
        for end in ["tpool", "tdata", "real", "cow"] {
            assert!(is_part_of_lvm(&format!("{own}-{end}")), "{end}");
        }
    }

    #[test]
    fn a_command_can_be_pasted() {
        let commands = Method::Serve.commands(Path::new("/srv/my disk.qcow2"));
        assert_eq!(commands[0], "dsync serve '/srv/my disk.qcow2' --socket '/run/my disk.sock'");
        let commands = Method::Bpf.commands(Path::new("/dev/mapper/vg-root"));
        assert_eq!(
            commands,
            ["dsync track add /dev/mapper/vg-root", "dsync sync /dev/mapper/vg-root HOST:/srv/vg-root.raw"]
        );
    }
}
