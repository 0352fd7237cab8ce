//! A Linux guest: Debian's kernel under qemu's emulation, with the host's root shared read-only, so that the host's
//! own programs (mkfs, fio) run in it on the guest's disks.
//!
//! The guest runs one shell script. What the script prints is read line by line; lines that begin with `@` are its
//! marks (`mark begun` prints one), for which a test waits. The last is `@exit STATUS`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::{Background, Run};

/// The kernel modules that are loaded, with what they need, in this order.
const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "9pnet_virtio", "9p", "crc32c_generic", "ext4"];

/// Which of Debian's kernels a guest boots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Kernel {
    /// The release's own.
    #[default]
    Stable,
    /// The release's backports'.
    Backports,
}

/// A guest to be booted.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Its kernel.
    pub kernel: Kernel,
    /// The script, for the host's `/bin/sh` inside the guest.
    pub script: String,
    /// Disks in their order (`/dev/vda`, `/dev/vdb`): an NBD URI or the path of a raw image.
    pub disks: Vec<String>,
    /// More kernel modules to load: a name, and parameters behind it.
    pub modules: Vec<String>,
    /// Files that the script finds in `/tmp/files`, beside a busybox and mdadm.
    pub files: Vec<PathBuf>,
    /// A folder of the host that the script finds, writable, at `/mnt`.
    pub share: Option<PathBuf>,
    /// Memory in MiB; 0 means 384.
    pub memory: u32,
    /// Processors; 0 means one.
    pub cpus: u32,
    /// More arguments for qemu.
    pub qemu: Vec<String>,
}

/// A guest that runs. Killed at the latest when dropped.
pub struct Guest {
    process: Background,
    lines: Receiver<String>,
    seen: Vec<String>,
    folder: TempDir,
    /// When it was started.
    pub started: Instant,
}

/// True if a test is to run that is left out of the sample; else says so.
pub fn wanted(what: &str) -> bool {
    if !testing::guests_in_full() {
        crate::left_out(what, "make test-vm");
    }
    testing::guests_in_full()
}

/// True for one of three numbers in each run of the sample, drawn by its seed. Otherwise says that the test is skipped.
pub fn drawn(number: u64, what: &str) -> bool {
    static DRAWN: OnceLock<u64> = OnceLock::new();
    let drawn = DRAWN.get_or_init(|| testing::Random::new("which test of guests is in the sample").below(3));
    *drawn == number || wanted(what)
}

/// True if guests can run here. Else says what goes untested.
pub fn possible(what: &str) -> bool {
    possible_with(Kernel::Stable, what)
}

/// The same for a guest with the kernel named.
pub fn possible_with(kernel: Kernel, what: &str) -> bool {
    if !cfg!(target_arch = "x86_64") {
        crate::beyond(what, "guests share this machine's programs and are x86_64");
        return false;
    }
    if !crate::need(&["qemu-system-x86_64"], what) {
        return false;
    }
    crate::got(kernel.folder(), what)
}

impl Kernel {
    /// The folder of the unpacked kernel package.
    fn folder(self) -> Result<&'static Path, &'static str> {
        static FOUND: [OnceLock<Result<PathBuf, String>>; 2] = [const { OnceLock::new() }; 2];
        let found = FOUND[self as usize].get_or_init(|| self.fetch(&[]));
        found.as_deref().map_err(String::as_str)
    }

    /// The tree that modules for this kernel are built against.
    pub fn headers(self) -> Result<PathBuf, String> {
        self.fetch(&["--headers"]).map(|folder| folder.join("build"))
    }

    /// The package itself.
    pub fn package(self) -> Result<PathBuf, String> {
        self.fetch(&["--package"]).map(|folder| folder.join("package.deb"))
    }

    fn fetch(self, options: &[&str]) -> Result<PathBuf, String> {
        let backports = (self == Kernel::Backports).then_some("--backports");
        let script = crate::repository().join("scripts/guest-kernel");
        let output = Run::new(script).args(options).args(backports).limit(Duration::from_secs(600)).output();
        match output.status.success() {
            true => Ok(PathBuf::from(output.text().trim())),
            false => Err(format!("no kernel for guests ({})", output.stderr.trim())),
        }
    }
}

/// Runs first in the guest: makes it a machine in which the host's programs feel at home, and runs the script there.
const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do
    # shellcheck disable=SC2086 # a file and parameters
    insmod /modules/$module || echo "cannot load $module"
done </modules/order
# Talk is raw: what a test sends is not echoed and what the script prints is not changed.
stty -F /dev/ttyS1 raw -echo
echo @up >/dev/ttyS1
(
    mkdir /host
    mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 root /host &&
    for folder in tmp run var/tmp mnt; do
        mount -t tmpfs none /host/$folder || exit
    done
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 share /host/mnt 2>/dev/null
    mount --bind /dev /host/dev && mount -t proc proc /host/proc && mount -t sysfs sys /host/sys &&
    cp /script /host/tmp/script && cp -r /files /host/tmp &&
    exec chroot /host /usr/bin/env -i HOME=/tmp LC_ALL=C PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        /bin/sh /tmp/script
) </dev/ttyS1 >/dev/ttyS1 2>&1
status=$?
echo >/dev/ttyS1
echo "@exit $status" >/dev/ttyS1
sync
poweroff -f
"#;

/// Stands before every script.
const PRELUDE: &str = r#"mark() { echo "@$*"; }
"#;

/// How often a boot is tried: the emulator now and then trips over a kernel that patches itself while two processors run.
const BOOTS: u32 = 3;

impl Guest {
    /// Boots a guest. Ask [`possible`] first. Call it from the test's own thread, as [`Run::start`].
    pub fn boot(options: &Options) -> Guest {
        for left in (0..BOOTS).rev() {
            let mut guest = Guest::start(options);
            if guest.is_up() {
                return guest;
            }
            assert!(left > 0, "no guest comes up: {}", guest.report());
            crate::say(&format!("a guest died as it booted, and is started anew: {}", guest.report()));
        }
        unreachable!("the last one is up, or the test has failed")
    }

    /// False if it ended before its first process began.
    fn is_up(&mut self) -> bool {
        match self.lines.recv_timeout(Duration::from_secs(120)) {
            Ok(line) if line == "@up" => true,
            Ok(line) => panic!("a guest begins with '{line}': {}", self.report()),
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => panic!("the guest does not come up: {}", self.report()),
        }
    }

    fn start(options: &Options) -> Guest {
        let kernel = options.kernel.folder().expect("a kernel: ask guest::possible first");
        let folder = testing::temporary();
        let initrd = folder.path().join("initrd");
        fs::write(&initrd, initramfs(kernel, options)).expect("the initramfs");
        let console = folder.path().join("console");
        let memory = if options.memory == 0 { 384 } else { options.memory };
        let cpus = options.cpus.max(1);
        let mut run = Run::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-cpu", "max", "-machine", "pc"])
            .args(["-smp", &cpus.to_string(), "-m", &memory.to_string()])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"])
            .arg("-kernel")
            .arg(image(&kernel.join("boot")))
            .arg("-initrd")
            .arg(&initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"])
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-chardev", "stdio,id=talk,signal=off", "-serial", "chardev:talk"])
            .args(["-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"])
            .args(["-device", "virtio-9p-pci,fsdev=root,mount_tag=root"]);
        if let Some(share) = &options.share {
            let share = share.display();
            run = run
                .args(["-fsdev", &format!("local,id=share,path={share},security_model=none,multidevs=remap")])
                .args(["-device", "virtio-9p-pci,fsdev=share,mount_tag=share"]);
        }
        for (n, disk) in options.disks.iter().enumerate() {
            // Both are named by a device, so that they stand in the guest in this order.
            let backend = match disk.strip_prefix("nbd+unix:///").and_then(|uri| uri.split_once("?socket=")) {
                Some((export, socket)) => [
                    "-blockdev".into(),
                    format!(
                        "driver=nbd,node-name=disk{n},server.type=unix,server.path={socket},export={export},\
                         reconnect-delay=60,discard=unmap"
                    ),
                ],
                None => [
                    "-drive".into(),
                    format!("if=none,id=disk{n},file={disk},format=raw,cache=writeback,discard=unmap"),
                ],
            };
            run = run.args(backend).args(["-device", &format!("virtio-blk-pci,drive=disk{n}")]);
        }
        let started = Instant::now();
        let mut process = run.args(&options.qemu).start_talking();
        let stdout = process.child.stdout.take().expect("a pipe");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_string();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Guest { process, lines, seen: Vec::new(), folder, started }
    }

    /// Waits for a line that is the mark, or begins with it and a blank; returns what follows. Fails the test if the
    /// script or the guest ends before, or after `limit`.
    pub fn wait_for(&mut self, mark: &str, limit: Duration) -> String {
        let until = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let found =
                        line.strip_prefix('@').and_then(|rest| rest.strip_prefix(mark)).map(str::to_string);
                    let ended = line.starts_with("@exit ");
                    self.seen.push(line);
                    match found {
                        Some(rest) if rest.is_empty() => return rest,
                        Some(rest) if rest.starts_with(' ') => return rest[1..].to_string(),
                        _ => assert!(!ended, "the script ended before it marked '{mark}': {}", self.report()),
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    panic!("no mark '{mark}' within {limit:?}: {}", self.report())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("the guest ended before it marked '{mark}': {}", self.report())
                }
            }
        }
    }

    /// Sends a line to the script's standard input.
    pub fn send(&mut self, line: &str) {
        let pipe = self.process.child.stdin.as_mut().expect("a pipe");
        writeln!(pipe, "{line}").and_then(|()| pipe.flush()).expect("talking to the guest");
    }

    /// Waits until the script has ended with success and the guest has powered off.
    pub fn finish(mut self, limit: Duration) -> Vec<String> {
        let status = self.wait_for("exit", limit);
        assert_eq!(status, "0", "the script failed: {}", self.report());
        self.gone();
        std::mem::take(&mut self.seen)
    }

    /// Cuts the guest's power: nothing is unmounted, and nothing is flushed, as the emulator itself would at its end.
    pub fn cut(mut self) {
        self.process.kill();
    }

    fn gone(&mut self) {
        let ended = self.process.wait_for(Duration::from_secs(30));
        assert!(ended.is_some_and(|status| status.success()), "qemu did not end well: {}", self.report());
    }

    /// What the script printed and the console showed.
    pub fn report(&self) -> String {
        let tail = |text: &str| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(60)..].join("\n")
        };
        let console = fs::read(self.folder.path().join("console")).unwrap_or_default();
        let failed: Vec<&str> =
            self.seen.iter().map(String::as_str).filter(|line| line.starts_with("not ok")).collect();
        format!(
            "--- what failed:\n{}\n--- the script printed:\n{}\n--- the console shows:\n{}\n--- qemu says:\n{}",
            failed.join("\n"),
            tail(&self.seen.join("\n")),
            tail(&String::from_utf8_lossy(&console)),
            self.process.stderr_so_far()
        )
    }
}

/// What is booted: the kernel as it runs, or one that unpacks itself where there is only that.
fn image(boot: &Path) -> PathBuf {
    let plain = boot.join("vmlinux");
    if plain.metadata().is_ok_and(|file| file.len() > 0) { plain } else { only(boot, "vmlinuz-") }
}

/// The only entry of a folder whose name begins so.
fn only(folder: &Path, prefix: &str) -> PathBuf {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut found = entries
        .map(|entry| entry.expect("a folder").path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)));
    found.next().unwrap_or_else(|| panic!("{}: nothing begins with {prefix}", folder.display()))
}

/// The initial file system as a cpio archive.
fn initramfs(kernel: &Path, options: &Options) -> Vec<u8> {
    let mut archive = Cpio::default();
    for folder in ["bin", "dev", "proc", "sys", "modules", "files"] {
        archive.add(folder, 0o040755, &[]);
    }
    let busybox = fs::read(kernel.join("bin/busybox")).expect("busybox");
    archive.add("bin/busybox", 0o100755, &busybox);
    archive.add("init", 0o100755, INIT.as_bytes());
    archive.add("script", 0o100644, format!("{PRELUDE}{}\n", options.script).as_bytes());
    for path in ["bin/busybox", "sbin/mdadm"].map(|tool| kernel.join(tool)).iter().chain(&options.files) {
        let name = path.file_name().expect("a file").to_string_lossy();
        let content = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        archive.add(&format!("files/{name}"), 0o100755, &content);
    }
    let modules = only(&kernel.join("lib/modules"), "");
    let names = MODULES.iter().copied().chain(options.modules.iter().map(String::as_str));
    let mut order = String::new();
    for path in module_order(&modules, names.clone().map(|name| name.split(' ').next().unwrap_or(name))) {
        let name = path.file_name().expect("a module").to_string_lossy().into_owned();
        let module = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        archive.add(&format!("modules/{name}"), 0o100644, &module);
        let stem = name.split('.').next().unwrap_or_default();
        let parameters = names.clone().find_map(|asked| asked.strip_prefix(stem)?.strip_prefix(' '));
        order.push_str(&format!("{name} {}\n", parameters.unwrap_or_default()));
    }
    archive.add("modules/order", 0o100644, order.as_bytes());
    archive.end()
}

/// The files of modules, each after those that it needs.
fn module_order<'a>(folder: &Path, names: impl Iterator<Item = &'a str>) -> Vec<PathBuf> {
    let text = fs::read_to_string(folder.join("modules.dep")).expect("modules.dep");
    let mut order: Vec<&str> = Vec::new();
    for name in names {
        // Modules are named with either sign and filed with either.
        let same = |path: &str| {
            let file = path.rsplit('/').next().unwrap_or_default();
            file.split('.').next().unwrap_or_default().replace('-', "_") == name.replace('-', "_")
        };
        let line = text.lines().find(|line| line.split(':').next().is_some_and(same));
        // What is built into the kernel needs no loading.
        let Some((path, needs)) = line.and_then(|line| line.split_once(':')) else { continue };
        // The last one named needs nothing of the others.
        for needed in needs.split_whitespace().rev().chain([path]) {
            if !order.contains(&needed) {
                order.push(needed);
            }
        }
    }
    order.into_iter().map(|path| folder.join(path)).collect()
}

/// A cpio archive ("newc"), as the kernel unpacks it.
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    files: u32,
}

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.files += 1;
        let (size, name_size) = (content.len(), name.len() + 1);
        let fields = [self.files as usize, mode as usize, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}
