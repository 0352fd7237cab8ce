//! A VM that QEMU alone runs, with a monitor. Its guest is the boot sector that never stops writing (see [`crate::libvirt::writer`]).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{Background, Run, Site, until};

/// A VM. It ends with this.
pub struct Qemu {
    process: Background,
    /// The socket of its monitor for dsync.
    pub monitor: PathBuf,
    /// That of a second one, for tests.
    own: PathBuf,
}

impl Qemu {
    /// True if there can be one. Else says what goes untested.
    pub fn possible(what: &str) -> bool {
        crate::need(&["qemu-system-x86_64", "qemu-img"], what)
    }

    /// Starts a VM with these images, raw or qcow2 by their names, the first of which it boots; their devices are `disk0` and so on. Waits until its guest
    /// writes.
    pub fn boot(site: &Site, name: &str, images: &[&Path]) -> Qemu {
        let qemu = Qemu::start(site, name, images, &[]);
        qemu.writes_on();
        qemu
    }

    /// Starts it with an I/O thread of the first disk.
    pub fn boot_threaded(site: &Site, name: &str, images: &[&Path]) -> Qemu {
        let thread = ["-object", "iothread,id=io0", "-set", "device.disk0.iothread=io0"];
        let qemu = Qemu::start(site, name, images, &thread);
        qemu.writes_on();
        qemu
    }

    /// Starts it with more arguments.
    pub fn start(site: &Site, name: &str, images: &[&Path], more: &[&str]) -> Qemu {
        let [monitor, own] = ["qmp", "own"].map(|end| site.socket(&format!("{name}.{end}")));
        let mut run = Run::new("qemu-system-x86_64").args([
            "-name",
            name,
            "-machine",
            "pc,accel=tcg",
            "-m",
            "32",
            "-nodefaults",
            "-display",
            "none",
        ]);
        for socket in [&monitor, &own] {
            run = run.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        }
        for (at, image) in images.iter().enumerate() {
            let format = image.extension().and_then(|end| end.to_str()).unwrap_or("raw");
            run = run
                .arg("-drive")
                .arg(format!("if=none,id=d{at},file={},format={format},cache=unsafe", image.display()))
                .arg("-device")
                .arg(format!("virtio-blk-pci,id=disk{at},drive=d{at},bootindex={at}"));
        }
        let qemu = Qemu { process: run.args(more).start(), monitor, own };
        until("the monitors listen", || qemu.own.exists() && UnixStream::connect(&qemu.own).is_ok());
        qemu
    }

    /// By which dsync knows it.
    pub fn word(&self) -> String {
        format!("qemu:{}", self.monitor.display())
    }

    /// Waits until the guest has written more than it had.
    pub fn writes_on(&self) {
        writes_on(&self.process.pid().as_raw_nonzero().to_string());
    }

    /// Connects to a monitor, which is nobody else's then.
    pub fn connect(&self, monitor: &Path) -> Monitor {
        let stream = UnixStream::connect(monitor).expect("the monitor");
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.line();
        monitor.ask("qmp_capabilities", json!({}));
        monitor
    }

    /// Runs a command at the monitor of the tests.
    ///
    /// # Panics
    /// If it fails.
    pub fn ask(&self, command: &str, arguments: Value) -> Value {
        self.connect(&self.own).ask(command, arguments)
    }

    /// The names of all that a backup job is made of, and of each checkpoint with its node.
    pub fn left(&self) -> (Vec<String>, Vec<String>) {
        let mut monitor = self.connect(&self.own);
        let nodes = monitor.ask("query-named-block-nodes", json!({ "flat": true }));
        let jobs = monitor.ask("query-jobs", json!({}));
        let exports = monitor.ask("query-block-exports", json!({}));
        let sets = monitor.ask("query-fdsets", json!({}));
        let list = |list: &Value| list.as_array().cloned().unwrap_or_default();
        let name = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut parts: Vec<String> = list(&nodes).iter().map(|node| name(&node["node-name"])).collect();
        parts.retain(|name| name.starts_with("dsync"));
        parts.extend(list(&jobs).iter().chain(&list(&exports)).map(|thing| name(&thing["id"])));
        parts.extend(list(&sets).iter().map(|set| format!("set {}", set["fdset-id"])));
        let of_node = |node: &Value| {
            let bitmaps = list(&node["dirty-bitmaps"]);
            let own = name(&node["node-name"]);
            bitmaps.iter().map(|bitmap| format!("{own}: {}", name(&bitmap["name"]))).collect::<Vec<_>>()
        };
        (parts, list(&nodes).iter().flat_map(of_node).collect())
    }

    /// Kills it.
    pub fn kill(&mut self) {
        self.process.kill();
    }
}

/// Waits until the guest of the QEMU with this process number has written more than it had, by what that has written.
pub(crate) fn writes_on(process: &str) {
    let place = format!("/proc/{process}/io");
    let written = || {
        let said = std::fs::read_to_string(&place).unwrap_or_else(|error| panic!("{place}: {error}"));
        let bytes = said.lines().find_map(|line| line.strip_prefix("wchar: ")?.parse::<u64>().ok());
        bytes.unwrap_or_else(|| panic!("no count: {said}"))
    };
    let before = written();
    until("the guest writes", || written() > before + (10 << 12));
}

/// A connection to a monitor.
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Runs a command.
    ///
    /// # Panics
    /// If it fails.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        self.0.get_mut().write_all(text.as_bytes()).expect("a request");
        loop {
            let said: Value = serde_json::from_str(&self.line()).expect("JSON");
            assert!(said.get("error").is_none(), "{command}: {said}");
            if let Some(answer) = said.get("return") {
                return answer.clone();
            }
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("a line of the monitor");
        assert!(!line.is_empty(), "the monitor is gone");
        line
    }
}
