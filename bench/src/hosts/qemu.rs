//! QEMU's own way to another host: its storage daemon follows the writes in a dirty bitmap, and a backup job writes what is in it
//! to an NBD server at the other end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use dsync_tests::nbd::{Address, Client};
use serde_json::{Value, json};

use crate::hosts::{Host, Hosts};
use crate::measure::process::{Daemon, command, go_on};

const PORT: u16 = 10809;
/// How long a job may say nothing.
const SILENCE: Duration = Duration::from_secs(600);

/// An image on the near host behind QEMU's storage daemon, and its copy on the far one behind qemu-nbd.
pub(crate) struct Qemu {
    /// Ended before the servers it speaks to.
    control: BufReader<UnixStream>,
    socket: PathBuf,
    jobs: u32,
    _near: Daemon,
    _far: Daemon,
}

impl Qemu {
    /// Follows the writes that come through [`Qemu::client`]; image and copy are alike now. Sockets lie in `folder`.
    pub(crate) fn new(hosts: &Hosts, image: &Path, copy: &Path, folder: &Path) -> Result<Qemu> {
        let (socket, control) = (folder.join("qemu"), folder.join("qmp"));
        let file = format!(
            "driver=file,node-name=file,filename={},locking=off,aio=native,cache.direct=on",
            image.display()
        );
        let mut daemon = command("qemu-storage-daemon");
        daemon.args(["--blockdev", &file, "--blockdev", "driver=raw,node-name=disk,file=file"]);
        daemon.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
        daemon.args(["--export", "type=nbd,id=export,node-name=disk,name=disk,writable=on"]);
        daemon.arg("--chardev").arg(format!("socket,id=qmp,path={},server=on,wait=off", control.display()));
        daemon.args(["--monitor", "chardev=qmp"]);
        let near = Daemon::start(hosts.near.run(&daemon), &socket)?;
        let far = serve(&hosts.far, copy)?;
        let stream = UnixStream::connect(&control).context("QEMU's control socket")?;
        stream.set_read_timeout(Some(SILENCE))?;
        let mut qemu = Qemu { control: BufReader::new(stream), socket, jobs: 0, _near: near, _far: far };
        qemu.next().context("QEMU's greeting")?;
        qemu.command("qmp_capabilities", json!({}))?;
        qemu.command("block-dirty-bitmap-add", json!({"node": "disk", "name": "changes"}))?;
        Ok(qemu)
    }

    /// A client whose writes are followed.
    pub(crate) fn client(&self) -> Result<Client> {
        Ok(Client::connect_with(&Address::Unix(self.socket.clone()), "disk", &[])?)
    }

    /// Brings the copy up to date. It is durable once the copy's file has been synced.
    pub(crate) fn backup(&mut self) -> Result<()> {
        self.jobs += 1;
        let job = format!("backup{}", self.jobs);
        let server = json!({"type": "inet", "host": Hosts::FAR, "port": PORT.to_string()});
        self.command(
            "blockdev-add",
            json!({"driver": "nbd", "node-name": "copy", "server": server, "export": "copy"}),
        )?;
        self.command(
            "blockdev-backup",
            json!({"job-id": job, "device": "disk", "target": "copy", "sync": "incremental", "bitmap": "changes"}),
        )?;
        loop {
            let message = self.next()?;
            if message["event"] == "BLOCK_JOB_COMPLETED" {
                let error = &message["data"]["error"];
                ensure!(error.is_null(), "QEMU's backup: {error}");
                break;
            }
        }
        self.command("blockdev-del", json!({"node-name": "copy"}))
    }

    fn command(&mut self, name: &str, arguments: Value) -> Result<()> {
        let line = json!({"execute": name, "arguments": arguments});
        self.control.get_mut().write_all(format!("{line}\n").as_bytes())?;
        loop {
            let answer = self.next()?;
            if answer.get("return").is_some() {
                return Ok(());
            }
            if let Some(error) = answer.get("error") {
                bail!("QEMU refuses {name}: {}", error["desc"]);
            }
        }
    }

    fn next(&mut self) -> Result<Value> {
        go_on()?;
        let mut line = String::new();
        ensure!(self.control.read_line(&mut line)? > 0, "QEMU's storage daemon has ended");
        serde_json::from_str(&line).context("QEMU's control socket")
    }
}

fn serve(far: &Host, copy: &Path) -> Result<Daemon> {
    let mut server = command("qemu-nbd");
    server.args(["--persistent", "--shared=4", "--format=raw", "--export-name=copy"]);
    server.args(["--bind", Hosts::FAR, "--port", &PORT.to_string()]).arg(copy);
    // Whether it listens shows at the first backup, a copy later.
    Daemon::start_bare(&mut far.run(&server))
}
