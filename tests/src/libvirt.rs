//! A host of VMs under libvirt. Its daemon has a mount namespace of its own, so that what the machine itself has of libvirt is neither seen nor
//! changed. The guest of its VMs is a boot sector that never stops writing: it needs no kernel, and writes within seconds.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{Background, Run, Site, until};

/// The folders of libvirt that the namespace has its own of, and where they are on the machine.
const FOLDERS: [(&str, &str); 5] = [
    ("etc", "/etc/libvirt"),
    ("run", "/run/libvirt"),
    ("lib", "/var/lib/libvirt"),
    ("log", "/var/log/libvirt"),
    ("tpm-log", "/var/log/swtpm"),
];

/// Where libvirt keeps what it has found of the machine's QEMU, which takes seconds. It is kept from test to test.
const CACHE: &str = "/var/cache/libvirt";

/// Where swtpm keeps the authority that signs the keys of its TPMs.
const TPM_CA: &str = "/var/lib/swtpm-localca";

/// What QEMU needs here beside its user: no service but libvirtd.
const QEMU: &str = r#"dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
"#;

/// Writes 4 KiB here and there between 1 and 17 MiB, a hundred times a second, on the first disk and the second in turn, each time with another number in
/// it. Between two writes it halts: without that, three such guests take all of the machine.
///
/// ```text
///     xor ax, ax; mov ds, ax; mov ss, ax; mov sp, 0x7c00
///     mov al, 0x34; out 0x43, al; mov ax, 11932; out 0x40, al; mov al, ah; out 0x40, al; sti
/// on: hlt; inc dword [0x8000]; imul ax, [0x8000], 293; and ax, 0x7ff8; add ax, 0x800; mov [packet + 8], ax
///     xor dl, 1; mov si, packet; mov ax, 0x4300; int 0x13; jmp on
/// packet: its length 16; 8 sectors; from 0:0x8000; to the sector
/// ```
const WRITER: [u8; 73] = [
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xb0, 0x34, 0xe6, 0x43, 0xb8, 0x9c, 0x2e, 0xe6,
    0x40, 0x88, 0xe0, 0xe6, 0x40, 0xfb, 0xf4, 0x66, 0xff, 0x06, 0x00, 0x80, 0x69, 0x06, 0x00, 0x80, 0x25,
    0x01, 0x25, 0xf8, 0x7f, 0x05, 0x00, 0x08, 0xa3, 0x41, 0x7c, 0x80, 0xf2, 0x01, 0xbe, 0x39, 0x7c, 0xb8,
    0x00, 0x43, 0xcd, 0x13, 0xeb, 0xde, 16, 0, 8, 0, 0x00, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// A host with libvirt. Its VMs end with it.
pub struct Libvirt {
    folder: TempDir,
    daemon: Background,
}

impl Libvirt {
    /// True if there can be one, and the test is drawn for this run: one of three is in the sample, as each takes its seconds. Else says what goes untested.
    pub fn possible(what: &str) -> bool {
        let tools = ["libvirtd", "virsh", "qemu-system-x86_64", "qemu-img", "nsenter", "unshare"];
        // The user of QEMU that libvirtd looks for as it starts comes with its configuration.
        let configured =
            fs::metadata("/etc/libvirt/qemu.conf").map_err(|_| "libvirt-daemon-system is missing");
        let can = crate::need_root(what) && crate::need(&tools, what) && crate::got(configured, what);
        can && crate::guest::drawn(what.bytes().map(u64::from).sum::<u64>() % 3, what)
    }

    /// Starts the daemon. Ask [`Libvirt::possible`] first; call it from the test's own thread, as [`Run::start`].
    pub fn start() -> Libvirt {
        Libvirt::start_as("root", "root")
    }

    /// Starts it with a QEMU that runs as this user and group. It opens only images that they may open.
    pub fn start_as(user: &str, group: &str) -> Libvirt {
        let folder = testing::temporary();
        let at = folder.path();
        let mut inside = String::from("set -e\n");
        let cache = (crate::profile_dir().join("../libvirt-cache"), CACHE);
        let own = FOLDERS.map(|(own, place)| (at.join(own), place));
        for (own, place) in own.into_iter().chain([cache]) {
            fs::create_dir_all(&own).expect("a folder");
            fs::create_dir_all(place).expect("a folder of libvirt");
            inside.push_str(&format!("mount --bind {} {place}\n", own.display()));
        }
        for folder in ["sock", "ca"] {
            fs::create_dir(at.join(folder)).expect("a folder");
        }
        // Where TPMs are emulated: their user has a folder.
        inside.push_str(&format!(
            "if [ -d {TPM_CA} ]; then chown --reference={TPM_CA} {0}; mount --bind {0} {TPM_CA}; fi\n",
            at.join("ca").display()
        ));
        let owner = format!("user = \"{user}\"\ngroup = \"{group}\"\n");
        fs::write(at.join("etc/qemu.conf"), owner + QEMU).expect("qemu.conf");
        let settings = format!(
            "unix_sock_dir = \"{0}/sock\"\nunix_sock_group = \"root\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n\
             log_outputs = \"2:file:{0}/libvirtd.log\"\nhost_uuid = \"2e8f1a54-90c3-4d6b-8a17-5c0e9d3b7f21\"\n",
            at.display()
        );
        fs::write(at.join("libvirtd.conf"), settings).expect("libvirtd.conf");
        inside
            .push_str(&format!("exec libvirtd --config {0}/libvirtd.conf --pid-file {0}/pid", at.display()));
        let run = Run::new("unshare").args(["-m", "--propagation", "private", "/bin/sh", "-c", &inside]);
        let mut host = Libvirt { daemon: run.start(), folder };
        let socket = host.folder.path().join("sock/libvirt-sock");
        until("libvirtd listens", || {
            assert!(host.daemon.ended().is_none(), "libvirtd ended: {}", host.log());
            UnixStream::connect(&socket).is_ok()
        });
        host
    }

    /// What is `/var/lib/libvirt` for its daemon.
    pub fn lib(&self) -> PathBuf {
        self.folder.path().join("lib")
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join("libvirtd.log")).unwrap_or_default();
        format!("{log}\n{}", self.daemon.stderr_so_far())
    }

    /// By which clients reach it.
    pub fn uri(&self) -> String {
        format!("qemu:///system?socket={}/sock/libvirt-sock", self.folder.path().display())
    }

    /// A command of virsh.
    pub fn virsh<'a>(&self, words: impl IntoIterator<Item = &'a str>) -> Run {
        Run::new("virsh").args(["-q", "-c", &self.uri()]).args(words)
    }

    /// A program of a site that runs on this host: it sees the folders of its libvirt.
    pub fn run(&self, site: &Site, program: &Path) -> Run {
        let namespace = format!("--mount=/proc/{}/ns/mnt", self.daemon.pid().as_raw_nonzero());
        let run = site.run("nsenter".as_ref()).env("LIBVIRT_DEFAULT_URI", self.uri());
        run.arg(namespace).arg("--").arg(program)
    }

    /// Defines a VM with these images, raw or qcow2 by their names, `vda` first, and starts it. [`writer`] makes the first.
    pub fn boot(&self, name: &str, images: &[&Path]) {
        self.define(name, "", images);
        self.on(name);
    }

    /// Defines a VM, with something more in its `<os>`.
    pub fn define(&self, name: &str, os: &str, images: &[&Path]) {
        self.define_with(name, 32, os, images, "");
    }

    /// Defines a VM with this memory, in MiB, and with more devices.
    pub fn define_with(&self, name: &str, memory: u32, os: &str, images: &[&Path], devices: &str) {
        let disks: String = images.iter().zip('a'..).map(|(image, letter)| disk(image, letter, "")).collect();
        let xml = self.folder.path().join(format!("{}.xml", name.replace(['&', ' ', '\''], "-")));
        let text = format!(
            "<domain type='qemu'><name>{}</name><memory unit='MiB'>{memory}</memory><vcpu>1</vcpu>\
             <os><type arch='x86_64' machine='pc'>hvm</type>{os}</os><features><acpi/></features><devices>{disks}{devices}\
             <memballoon model='none'/></devices></domain>",
            name.replace('&', "&amp;")
        );
        fs::write(&xml, text).expect("the VM");
        self.virsh(["define"]).arg(xml).ok();
    }

    /// Starts a VM that is off, and waits until it writes.
    pub fn on(&self, name: &str) {
        self.virsh(["start", name]).ok();
        self.writes_on(name);
    }

    /// Waits until a VM has written more than it had, by what its QEMU has written.
    pub fn writes_on(&self, name: &str) {
        let id = fs::read_to_string(self.pid_file(name)).expect("a VM that runs");
        crate::qemu::writes_on(id.trim());
    }

    /// Where libvirt keeps the number of a VM's QEMU: under its name as it stands in XML.
    fn pid_file(&self, name: &str) -> PathBuf {
        let name = name.replace('&', "&amp;").replace('\'', "&apos;");
        self.folder.path().join(format!("run/qemu/{name}.pid"))
    }

    /// Kills the QEMU of a VM, and waits until libvirt has seen that.
    pub fn kill(&self, name: &str) {
        kill(&self.pid_file(name));
        until("the VM is off", || self.virsh(["domstate", name]).ok().text().trim() == "shut off");
    }

    /// The names of the checkpoints of a VM.
    pub fn checkpoints(&self, name: &str) -> Vec<String> {
        let said = self.virsh(["checkpoint-list", "--name", name]).ok().text();
        said.split_whitespace().map(str::to_owned).collect()
    }

    /// The backup job of a VM, if there is one.
    pub fn job(&self, name: &str) -> Option<String> {
        let said = self.virsh(["backup-dumpxml", name]).output();
        said.status.success().then(|| said.text())
    }

    /// What is in the folder in which the QEMU of a VM may write, but for what libvirt itself puts there.
    pub fn left(&self, name: &str) -> Vec<PathBuf> {
        let of = format!("-{name}");
        let all =
            |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        all(&self.folder.path().join("lib/qemu"))
            .filter(|folder| folder.to_string_lossy().ends_with(&of))
            .flat_map(|folder| all(&folder).collect::<Vec<_>>())
            .filter(|path| !path.ends_with("monitor.sock") && !path.ends_with("master-key.aes"))
            .collect()
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        self.daemon.kill();
        for entry in fs::read_dir(self.folder.path().join("run/qemu")).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|end| end == "pid") && !path.ends_with("driver.pid") {
                kill(&path);
            }
        }
    }
}

/// A disk in the words of libvirt, with something more in it. The BIOS knows only those from which it may boot. Of what its guest writes nothing is
/// flushed: no test cuts the power of this host.
pub fn disk(image: &Path, letter: char, more: &str) -> String {
    let format = image.extension().and_then(|end| end.to_str()).unwrap_or("raw");
    let is_device = fs::metadata(image).is_ok_and(|found| found.file_type().is_block_device());
    let (kind, attribute) = if is_device { ("block", "dev") } else { ("file", "file") };
    format!(
        "<disk type='{kind}' device='disk'><driver name='qemu' type='{format}' cache='unsafe'/><source {attribute}='{}'/>\
         <target dev='vd{letter}' bus='virtio'/><boot order='{}'/>{more}</disk>",
        image.display(),
        u32::from(letter) - u32::from('`')
    )
}

/// Kills the process of a file, and waits for its end.
fn kill(file: &Path) {
    let Some(pid) = fs::read_to_string(file).ok().and_then(|id| Pid::from_raw(id.trim().parse().ok()?))
    else {
        return;
    };
    let _ = kill_process(pid, Signal::KILL);
    let place = format!("/proc/{}/exe", pid.as_raw_nonzero());
    until("the process is gone", || fs::read_link(&place).is_err());
}

/// Makes an image of 64 MiB, raw or qcow2 by its name, with the boot sector that writes.
pub fn writer(site: &Site, name: &str) -> PathBuf {
    let raw = site.image(&format!("{name}.boot"), 64 << 20);
    let mut sector = [0; 512];
    sector[..WRITER.len()].copy_from_slice(&WRITER);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let file = fs::File::options().write(true).open(&raw).expect("the image");
    std::os::unix::fs::FileExt::write_all_at(&file, &sector, 0).expect("the boot sector");
    let image = site.path(name);
    if name.ends_with(".qcow2") {
        Run::new("qemu-img").args(["convert", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&image).ok();
        fs::remove_file(raw).expect("the raw image");
    } else {
        fs::rename(raw, &image).expect("the raw image");
    }
    image
}

/// Holds the copies of the disks of a VM with two, which was booted once, against each other: each write that its guest made up to the last one is on
/// its disk, and no other. Returns how many there were.
///
/// # Panics
/// If they are of two moments, or a write is missing.
pub fn one_moment(copies: [&Path; 2]) -> u32 {
    let disks = copies.map(|copy| fs::read(copy).expect("a copy"));
    let number =
        |disk: &[u8], at: usize| u32::from_le_bytes(disk[at..at + 4].try_into().expect("four bytes"));
    let last = disks.iter().flat_map(|disk| (1 << 20..17 << 20).step_by(4096).map(|at| number(disk, at)));
    let last = last.max().unwrap_or(0);
    // What is behind a number of the guest's own is not looked at: a write begins with its number.
    let mut expected = [vec![0; 4096], vec![0; 4096]];
    for n in 1..=last {
        let sector = (n as u16).wrapping_mul(293) & 0x7ff8;
        expected[usize::from(n % 2 == 1)][usize::from(sector / 8)] = n;
    }
    for (disk, expected) in disks.iter().zip(&expected) {
        for (block, n) in expected.iter().enumerate() {
            let is = number(disk, (1 << 20) + block * 4096);
            assert_eq!(is, *n, "block {block}, after write {last}");
        }
    }
    last
}
