//! A Debian 12 machine with systemd under qemu's emulation: its own disk, its own packages, reboots and power cuts.
//!
//! Its disks are served by the test over NBD, so that a power cut takes what was not flushed, sector by sector as the dice
//! fall. A small service inside runs the test's scripts.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use device::Disk;
use nbd::{Export, ExportInfo, ExportRefusal, Exports, Server};
use testing::faulty::{FaultyDisk, Keep, Outage, Power};

use crate::{Background, Random, Run, Site, image};

/// From power to the first script, on a machine eight times slower than one that is idle.
const BOOT: Duration = Duration::from_secs(900);

/// The folder of what machines are made of: `disk.raw`, `vmlinuz` and `initrd`.
pub fn base() -> Result<&'static Path, &'static str> {
    static FOUND: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = FOUND.get_or_init(|| {
        let script = crate::repository().join("scripts/guest-machine");
        let output = Run::new(script).limit(Duration::from_secs(1800)).output();
        match output.status.success() {
            true => Ok(PathBuf::from(output.text().trim())),
            false => Err(format!("no machine ({})", output.stderr.trim())),
        }
    });
    made.as_deref().map_err(String::as_str)
}

/// True if machines can run here. Else says what goes untested.
pub fn possible(what: &str) -> bool {
    let tools = ["qemu-system-x86_64", "mmdebstrap", "mkfs.ext4", "sfdisk"];
    crate::need_root(what) && crate::need(&tools, what) && crate::got(base(), what)
}

/// A machine, on or off.
pub struct Machine {
    name: &'static str,
    /// Raw images, the first with the root file system.
    disks: Vec<PathBuf>,
    /// The folder of the host that is the machine's `/mnt`.
    share: PathBuf,
    /// More arguments for qemu.
    pub qemu: Vec<String>,
    /// More of the kernel's command line.
    pub append: String,
    /// A folder with the `vmlinuz` and the `initrd` that it boots, if those are not the ones that it was made with.
    pub boots: Option<PathBuf>,
    /// The last part of its address on the line.
    address: Option<usize>,
    folder: PathBuf,
    life: Option<Life>,
}

/// The answer of a script.
pub struct Answer {
    /// Its exit status.
    pub status: i32,
    /// What it printed.
    pub text: String,
}

/// From power on to power off.
struct Life {
    process: Background,
    lines: Receiver<String>,
    power: Power,
    servers: Vec<Server>,
}

struct One(Arc<FaultyDisk>);

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { name: "disk".into(), description: String::new() }]
    }

    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        Ok(Export::new(name, Arc::clone(&self.0) as Arc<dyn Disk>))
    }
}

impl Machine {
    /// A machine that was never on. `disks` are the sizes of those that it has beside its root. Ask [`possible`] first.
    pub fn new(site: &Site, name: &'static str, disks: &[u64], share: &Path) -> Machine {
        let root = site.path(&format!("{name}-0.raw"));
        image::copy(&base().expect("ask possible first").join("disk.raw"), &root);
        let mut all = vec![root];
        for (n, size) in disks.iter().enumerate() {
            let path = site.path(&format!("{name}-{}.raw", n + 1));
            image::sparse(&path, *size);
            all.push(path);
        }
        let folder = site.socket(name).parent().expect("a folder").to_path_buf();
        let (share, append, qemu) = (share.to_path_buf(), String::new(), Vec::new());
        Machine { name, disks: all, share, qemu, append, boots: None, address: None, folder, life: None }
    }

    /// Two machines with a line between them, which lasts over the lives of both. In each the other is in `/etc/hosts`.
    pub fn pair(mut machines: [Machine; 2]) -> [Machine; 2] {
        let line = |machine: &Machine| machine.folder.join(format!("{}-line", machine.name));
        let ends = [line(&machines[0]), line(&machines[1])];
        for (n, machine) in machines.iter_mut().enumerate() {
            let [local, remote] = [&ends[n], &ends[1 - n]].map(|path| path.display());
            machine.qemu.extend([
                "-netdev".into(),
                format!(
                    "dgram,id=line,local.type=unix,local.path={local},remote.type=unix,remote.path={remote}"
                ),
                "-device".into(),
                format!("virtio-net-pci,netdev=line,mac=52:54:00:00:00:0{}", n + 1),
            ]);
            machine.address = Some(n + 1);
        }
        machines
    }

    /// The image of one of its disks. It may be read while the machine is off.
    pub fn disk(&self, number: usize) -> &Path {
        assert!(self.life.is_none(), "{} is on", self.name);
        &self.disks[number]
    }

    /// Turns it on, and returns once it takes scripts.
    pub fn on(&mut self) {
        self.power();
        self.wait_up();
    }

    /// Turns it on.
    pub fn power(&mut self) {
        assert!(self.life.is_none(), "{} is on", self.name);
        let base = self.boots.as_deref().unwrap_or_else(|| base().expect("ask possible first"));
        let _ = fs::remove_file(self.folder.join(format!("{}-line", self.name)));
        let address = self.address.map_or(String::new(), |n| format!("machine.address={n}"));
        let power = Power::new(Outage::PowerCut);
        let mut servers = Vec::new();
        let console = self.folder.join(format!("{}-console", self.name));
        let mut run = Run::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-cpu", "max", "-machine", "pc", "-smp", "1", "-m", "640"])
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none"])
            .arg("-kernel")
            .arg(base.join("vmlinuz"))
            .arg("-initrd")
            .arg(base.join("initrd"))
            .arg("-append")
            .arg(format!(
                "root=/dev/vda1 ro console=ttyS0 quiet panic=-1 mitigations=off no_timer_check \
                 systemd.hostname={} {address} {}",
                self.name, self.append
            ))
            .args(["-serial", &format!("file:{}", console.display())])
            .args(["-chardev", "stdio,id=talk,signal=off", "-serial", "chardev:talk"])
            .args(["-device", "virtio-rng-pci"])
            .args(["-fsdev", &format!("local,id=s,path={},security_model=none", self.share.display())])
            .args(["-device", "virtio-9p-pci,fsdev=s,mount_tag=share"]);
        for (n, image) in self.disks.iter().enumerate() {
            let options = device::DiskOptions { write: true, ..Default::default() };
            let inner = device::open(image, &options).unwrap_or_else(|e| panic!("{}: {e}", image.display()));
            let server = Server::new(Arc::new(One(Arc::new(FaultyDisk::new(&power, inner)))));
            let socket = self.folder.join(format!("{}-{n}", self.name));
            let _ = fs::remove_file(&socket);
            server.serve_unix(UnixListener::bind(&socket).expect("a socket")).expect("a server");
            servers.push(server);
            run = run
                .args(["-blockdev", &format!("driver=nbd,node-name=disk{n},server.type=unix,server.path={},export=disk,discard=unmap", socket.display())])
                .args(["-device", &format!("virtio-blk-pci,drive=disk{n},serial={}-{n}", self.name)]);
        }
        let mut process = run.args(&self.qemu).start_talking();
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
        self.life = Some(Life { process, lines, power, servers });
    }

    /// Waits until it takes scripts.
    pub fn wait_up(&mut self) {
        let until = Instant::now() + BOOT;
        while self.line(until, "it does not come up") != "@up" {}
    }

    fn line(&mut self, until: Instant, what: &str) -> String {
        let life = self.life.as_ref().unwrap_or_else(|| panic!("{} is off", self.name));
        match life.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("{}: {what}: {}", self.name, self.report()),
            Err(RecvTimeoutError::Disconnected) => panic!("{}: qemu ended: {}", self.name, self.report()),
        }
    }

    /// What the console shows.
    pub fn report(&self) -> String {
        let console = fs::read(self.folder.join(format!("{}-console", self.name))).unwrap_or_default();
        let console = String::from_utf8_lossy(&console).into_owned();
        let lines: Vec<&str> = console.lines().collect();
        let said = self.life.as_ref().map(|life| life.process.stderr_so_far()).unwrap_or_default();
        format!("--- console:\n{}\n--- qemu:\n{said}", lines[lines.len().saturating_sub(40)..].join("\n"))
    }

    fn send(&mut self, script: &str) {
        fs::write(self.share.join(format!("{}.sh", self.name)), script).expect("a script");
        let life = self.life.as_mut().unwrap_or_else(|| panic!("{} is off", self.name));
        let pipe = life.process.child.stdin.as_mut().expect("a pipe");
        writeln!(pipe, "{}", self.name).and_then(|()| pipe.flush()).expect("talking to the machine");
    }

    /// Runs a script, however it ends.
    pub fn run(&mut self, script: &str) -> Answer {
        self.send(script);
        let until = Instant::now() + BOOT;
        loop {
            let line = self.line(until, script);
            assert_ne!(line, "@up", "{} restarted in the midst of: {script}", self.name);
            if let Some(status) = line.strip_prefix("@done ") {
                let printed = fs::read(self.share.join(format!("{}.out", self.name))).expect("its output");
                let text = String::from_utf8_lossy(&printed).into_owned();
                return Answer { status: status.trim().parse().expect("a status"), text };
            }
        }
    }

    /// Runs a script of root's that must succeed at each step. Returns what it printed.
    pub fn ok(&mut self, script: &str) -> String {
        let answer = self.run(&format!("set -e\n{script}"));
        assert_eq!(answer.status, 0, "{}: {script}\n{}", self.name, answer.text);
        answer.text
    }

    /// Runs a script again and again until it succeeds. Returns what it printed.
    pub fn until(&mut self, script: &str, limit: Duration) -> String {
        let began = Instant::now();
        loop {
            let answer = self.run(script);
            if answer.status == 0 {
                return answer.text;
            }
            if began.elapsed() > limit {
                let journal = self.run("journalctl -b --no-pager -n 80 -u 'dsync*'; dsync status").text;
                panic!("{}: not within {limit:?}: {script}\n{}\n{journal}", self.name, answer.text);
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Restarts it in order.
    pub fn reboot(&mut self) {
        self.send("systemctl reboot");
        self.wait_up();
    }

    /// Shuts it down in order.
    pub fn off(&mut self) {
        self.send("systemctl poweroff");
        let life = self.life.as_mut().expect("it is on");
        let ended = life.process.wait_for(BOOT);
        assert!(ended.is_some(), "{} does not turn off: {}", self.name, self.report());
        self.life = None;
    }

    /// Cuts its power: of what was not flushed each sector stays or goes as the dice fall.
    pub fn cut(&mut self, random: &mut Random) {
        let mut life = self.life.take().expect("it is on");
        life.power.cut();
        life.process.kill();
        for server in &life.servers {
            server.shutdown(Duration::from_secs(1));
        }
        life.power.crash(Keep::Random, Keep::KeepAll, random.bits()).expect("a crash");
    }
}
