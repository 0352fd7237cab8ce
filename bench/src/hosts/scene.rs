//! What the figures of two hosts measure: an image on the near one, whose writes are followed in every way there is, and for each
//! tool a copy on the far one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dsync_tests::nbd::{Address, Client};
use serde_json::Value;

use crate::hosts::qemu::Qemu;
use crate::hosts::rows::Row;
use crate::hosts::sites::{Followed, Sites};
use crate::hosts::{Carried, Hosts, Sample};
use crate::measure::content::{Change, Content, drop_caches};
use crate::measure::dsync::export;
use crate::measure::places::{Loop, sockets};
use crate::measure::process::{Daemon, go_on, quote, run, shell};
use crate::measure::report::Report;

const LIMIT: Duration = Duration::from_secs(3600);

/// A way to bring the far host's copy up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    /// What the NBD server recorded, over TLS and over ssh.
    Tls,
    Ssh,
    /// What the bpf tracker recorded on a loop device over the image, over TLS.
    Bpf,
    /// Without a record: checksums of both copies, which is the paper's blockmd5sync.
    Compare,
    Qemu,
    Rsync,
    /// All of it, with a cipher and without.
    Scp,
    Nc,
}

impl Tool {
    pub(crate) const ALL: [Tool; 8] =
        [Tool::Tls, Tool::Bpf, Tool::Ssh, Tool::Compare, Tool::Qemu, Tool::Rsync, Tool::Scp, Tool::Nc];

    /// What it is called in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Tool::Tls => "dsync, TLS",
            Tool::Ssh => "dsync, ssh",
            Tool::Bpf => "dsync bpf, TLS",
            Tool::Compare => "dsync compare, TLS",
            Tool::Qemu => "QEMU bitmap, NBD",
            Tool::Rsync => "rsync --inplace",
            Tool::Scp => "scp",
            Tool::Nc => "nc",
        }
    }

    fn file(self) -> &'static str {
        match self {
            Tool::Tls => "tls.img",
            Tool::Ssh => "ssh.img",
            Tool::Bpf => "bpf.img",
            Tool::Compare => "compare.img",
            Tool::Qemu => "qemu.img",
            Tool::Rsync => "rsync.img",
            Tool::Scp => "scp.img",
            Tool::Nc => "nc.img",
        }
    }

    /// Programs beside dsync, ssh and the shell.
    pub(crate) fn needs(self) -> &'static [&'static str] {
        match self {
            Tool::Qemu => &["qemu-storage-daemon", "qemu-nbd"],
            Tool::Bpf => &["losetup"],
            Tool::Rsync => &["rsync"],
            Tool::Scp => &["scp"],
            Tool::Nc => &["nc"],
            Tool::Tls | Tool::Ssh | Tool::Compare => &[],
        }
    }

    /// True if it moves what was recorded: what it did not hear of while it was away it cannot move.
    fn follows(self) -> bool {
        matches!(self, Tool::Tls | Tool::Ssh | Tool::Bpf | Tool::Compare)
    }
}

/// One run of a tool.
pub(crate) struct Measured {
    pub row: Row,
    pub samples: Vec<Sample>,
    /// Bytes that it read of the image, where it says so.
    pub read: Option<u64>,
}

/// An image on the near host that is served and written, and a copy for each tool on the far one.
pub(crate) struct Scene<'a> {
    hosts: &'a Arc<Hosts>,
    sites: Sites,
    folder: PathBuf,
    image: PathBuf,
    /// The same content once more, for what follows writes elsewhere: to the server they would be foreign.
    twin: PathBuf,
    sockets: PathBuf,
    socket: PathBuf,
    /// What the image holds.
    pub content: Content,
    qemu: Option<Qemu>,
    device: Option<Followed>,
    _server: Daemon,
}

impl<'a> Scene<'a> {
    /// Writes the image, serves it, and lets the far host listen.
    pub(crate) fn new(
        hosts: &'a Arc<Hosts>,
        binary: &Path,
        folder: &Path,
        content: Content,
    ) -> Result<Scene<'a>> {
        let sites = Sites::new(hosts, binary, folder)?;
        let image = folder.join("disk.img");
        content.write(&image)?;
        let twin = folder.join("twin.img");
        let sockets = sockets()?.keep();
        let socket = sockets.join("nbd");
        let mut serve = sites.near.command("serve");
        serve.arg(&image).arg("--socket").arg(&socket);
        let server = Daemon::start(hosts.near.run(&serve), &socket)?;
        let folder = folder.to_path_buf();
        Ok(Scene {
            hosts,
            sites,
            folder,
            image,
            twin,
            sockets,
            socket,
            content,
            qemu: None,
            device: None,
            _server: server,
        })
    }

    /// The image on the near host.
    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// Where it is served.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// A command on the near host.
    pub(crate) fn near(&self, program: &Command) -> Command {
        self.hosts.near.run(program)
    }

    /// A mirror of the image to the far host, in the place of a tool's copy.
    pub(crate) fn mirror(&self, tool: Tool) -> Command {
        let mut mirror = self.sites.near.command("mirror");
        mirror.arg(&self.image).arg(self.sites.url(tool.file()));
        self.near(&mirror)
    }

    /// A tool's command as a line for a shell on the near host.
    pub(crate) fn line(&self, tool: Tool) -> Result<String> {
        let command = self.command(tool)?;
        let set = command.get_envs().filter_map(|(name, value)| {
            Some(format!("{}={}", name.to_string_lossy(), quote(Path::new(value?))))
        });
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words = words.map(|word| quote(Path::new(word)));
        Ok(std::iter::once("env".to_string()).chain(set).chain(words).collect::<Vec<_>>().join(" "))
    }

    /// The far host's copy of a tool.
    pub(crate) fn copy(&self, tool: Tool) -> PathBuf {
        self.sites.copy(tool.file())
    }

    /// A tool's command, for the near host.
    fn command(&self, tool: Tool) -> Result<Command> {
        let (copy, rsh) = (self.copy(tool), &self.hosts.rsh);
        let mut sync = self.sites.near.command("sync");
        sync.arg("--json");
        let durable = format!("{rsh} backup 'sync {0}'", copy.display());
        let command = match tool {
            Tool::Tls | Tool::Compare | Tool::Bpf => {
                let device = self.device.as_ref().map(|followed| followed.path());
                sync.arg(if tool == Tool::Bpf { device.context("no device")? } else { &self.image });
                sync.arg(self.sites.url(tool.file()));
                if tool == Tool::Compare && copy.exists() {
                    sync.args(["--method", "compare"]);
                }
                sync
            }
            Tool::Ssh => {
                let state = self.folder.join("far-state");
                let far =
                    format!("env DSYNC_STATE_DIR={} {}", state.display(), self.sites.far.binary.display());
                sync.arg(&self.image).args(["--rsh", rsh, "--remote-dsync", &far]);
                sync.arg(format!("backup:{}", copy.display()));
                sync
            }
            Tool::Rsync => shell(&format!(
                "rsync --inplace --no-whole-file --rsh={0} {1} backup:{2} && {durable}",
                quote(Path::new(rsh)),
                quote(&self.image),
                copy.display()
            )),
            Tool::Scp => shell(&format!(
                "scp -q {} {} backup:{} && {durable}",
                rsh.trim_start_matches("ssh "),
                quote(&self.image),
                copy.display()
            )),
            Tool::Nc => shell(&format!(
                "{rsh} backup 'nc -l {far} 7000 >{copy} && sync {copy}' & \
                 until nc -N {far} 7000 <{image}; do kill -0 $! || break; sleep 0.02; done 2>/dev/null; wait $!",
                far = Hosts::FAR,
                copy = copy.display(),
                image = quote(&self.image),
            )),
            Tool::Qemu => shell(&durable),
        };
        Ok(command)
    }

    /// A copy for each tool, all alike; without those that cannot be had here.
    pub(crate) fn first_copies(&mut self, tools: &mut Vec<Tool>, report: &mut Report) -> Result<()> {
        let mut without = Vec::new();
        for &tool in &*tools {
            if let Err(error) = self.first_copy(tool) {
                go_on()?;
                report.left_out(tool.name(), &format!("{error:#}"));
                without.push(tool);
                continue;
            }
            self.content.check(&self.copy(tool))?;
        }
        tools.retain(|tool| !without.contains(tool));
        Ok(())
    }

    fn first_copy(&mut self, tool: Tool) -> Result<()> {
        let missing = tool.needs().iter().find(|name| dsync_tests::find(name).is_none());
        if let Some(name) = missing {
            anyhow::bail!("{name} is not installed");
        }
        if [Tool::Bpf, Tool::Qemu].contains(&tool) && !self.twin.exists() {
            std::fs::copy(&self.image, &self.twin)?;
        }
        if tool == Tool::Bpf {
            self.device = Some(Followed::new(Loop::over(&self.twin, true)?, &self.sites.near)?);
        }
        if tool.follows() {
            return run(&mut self.near(&self.command(tool)?), LIMIT).map(drop);
        }
        std::fs::copy(&self.image, self.copy(tool))?;
        if tool == Tool::Qemu {
            self.qemu = Some(Qemu::new(self.hosts, &self.twin, &self.copy(tool), &self.sockets)?);
        }
        Ok(())
    }

    /// Changes so many of a hundred blocks. Each way of following hears of it by writes of its own, of the same content.
    pub(crate) fn change(&mut self, percent: u32) -> Result<Change> {
        let change = self.content.change(self.content.blocks() * u64::from(percent) / 100);
        self.write(change)
    }

    /// Changes these blocks, ascending.
    pub(crate) fn change_blocks(&mut self, blocks: Vec<u64>) -> Result<Change> {
        let change = self.content.change_blocks(blocks);
        self.write(change)
    }

    fn write(&self, change: Change) -> Result<Change> {
        go_on()?;
        let address = Address::Unix(self.socket.clone());
        let mut client = Client::connect_with(&address, &export(&self.image), &[])?;
        self.content.apply_through(&change, &mut client)?;
        client.close()?;
        if let Some(qemu) = &self.qemu {
            let mut client = qemu.client()?;
            self.content.apply_through(&change, &mut client)?;
            client.close()?;
        }
        if let Some(followed) = &self.device {
            self.content.apply(&change, followed.path())?;
        }
        Ok(change)
    }

    /// Brings one tool's copy up to date, from cold caches.
    pub(crate) fn measure(&mut self, tool: Tool, percent: u32, round: usize) -> Result<Measured> {
        drop_caches()?;
        let before = Carried::by_the_disk_of(&self.folder);
        let sampling = self.hosts.sample();
        let began = Instant::now();
        if let Some(qemu) = self.qemu.as_mut().filter(|_| tool == Tool::Qemu) {
            qemu.backup()?;
        }
        let outcome = run(&mut self.near(&self.command(tool)?), LIMIT)?;
        let seconds = began.elapsed().as_secs_f64();
        let samples = sampling.end();
        let after = Carried::by_the_disk_of(&self.folder);
        let last = samples.last().context("no sample")?;
        let row = Row {
            tool: tool.name().into(),
            bytes: self.content.blocks() * 4096,
            percent,
            round,
            seconds,
            disk: Carried { read: after.read - before.read, written: after.written - before.written },
            near: last.near,
            far: last.far,
        };
        let mut lines = outcome.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let summary = lines.rfind(|line| line["message_type"] == "summary").unwrap_or_default();
        if [Tool::Tls, Tool::Ssh, Tool::Bpf].contains(&tool) {
            // Otherwise it is another tool that is measured.
            ensure!(summary["method"] == "tracked", "{}: {summary}", tool.name());
        }
        let read = summary["bytes_read"].as_u64();
        Ok(Measured { row, samples, read })
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.sockets);
    }
}
