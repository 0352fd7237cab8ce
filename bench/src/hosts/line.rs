//! A line of a known rate to a far side with a state of its own: two network namespaces with ssh, or a throttled pipe.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::measure::places::{Network, root};
use crate::measure::process::{Daemon, command, quote, run, shell};
use crate::measure::report::Report;
use crate::own;

const LIMIT: Duration = Duration::from_secs(60);

/// How the far side is reached. Its host is called `backup`.
pub(crate) struct Line {
    /// What it consists of.
    pub about: &'static str,
    /// The remote shell with its options.
    pub rsh: String,
    /// The command that runs dsync there.
    pub dsync: String,
    /// Ended before the network goes.
    _sshd: Option<Sshd>,
    _network: Option<Network>,
}

impl Line {
    /// A line of so many bits a second each way. What is needed for it lies in `folder`.
    pub(crate) fn new(rate: u64, binary: &Path, folder: &Path, report: &mut Report) -> Result<Line> {
        // The far side keeps its state apart, as another machine would.
        let far = folder.join("far-dsync");
        let state = quote(&folder.join("far-state"));
        let script = format!("#!/bin/sh\nDSYNC_STATE_DIR={state} exec {} \"$@\"\n", quote(binary));
        std::fs::write(&far, script)?;
        std::fs::set_permissions(&far, std::fs::Permissions::from_mode(0o755))?;
        let tools = ["ip", "tc", "nsenter", "ssh", "sshd", "ssh-keygen"];
        let network = match tools.iter().find(|tool| dsync_tests::find(tool).is_none()) {
            Some(tool) => Err(anyhow::anyhow!("{tool} is not installed")),
            None if !root() => Err(anyhow::anyhow!("network namespaces need root")),
            None => network(rate, folder, &far),
        };
        let line = network.unwrap_or_else(|error| {
            let why = format!("{error:#}; a throttled pipe instead");
            report.left_out("the link of two network namespaces", &why);
            let rsh = format!("{} rsh {rate}", own("").get_program().to_string_lossy());
            let dsync = far.display().to_string();
            Line { about: "a throttled pipe", rsh, dsync, _sshd: None, _network: None }
        });
        report.line(&format!("the link: {}", line.about));
        Ok(line)
    }

    /// The options of `dsync sync` that lead over the line.
    pub(crate) fn options(&self) -> [&str; 4] {
        ["--rsh", &self.rsh, "--remote-dsync", &self.dsync]
    }

    /// What the remote shell needs for so many bytes, in seconds.
    pub(crate) fn seconds(&self, bytes: u64) -> Result<f64> {
        let line = format!("head -c {bytes} /dev/urandom | {} backup 'cat >/dev/null'", self.rsh);
        Ok(run(&mut shell(&line), 10 * LIMIT)?.seconds)
    }
}

fn keygen(file: &Path) -> Result<()> {
    run(command("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(file), LIMIT).map(drop)
}

/// Two namespaces with a sshd on the far side.
fn network(rate: u64, folder: &Path, far: &Path) -> Result<Line> {
    let network = Network::new(Some(rate))?;
    let mut sshd = Sshd::start(&network.far().each_ref().map(String::as_str), Network::FAR, folder)?;
    let rsh = format!("{} {}", network.near().join(" "), sshd.rsh);
    sshd.wait(&rsh)?;
    let about = "two network namespaces, veth, tbf, ssh";
    let dsync = PathBuf::from(far).display().to_string();
    Ok(Line { about, rsh, dsync, _sshd: Some(sshd), _network: Some(network) })
}

/// A sshd with keys and a configuration of its own.
pub(crate) struct Sshd {
    /// The remote shell that leads to it, as the host `backup`.
    pub rsh: String,
    daemon: Daemon,
}

impl Sshd {
    /// Starts one that listens on `address`, behind the words of `within`. What is needed for it lies in `folder`.
    pub(crate) fn start(within: &[&str], address: &str, folder: &Path) -> Result<Sshd> {
        let here = folder.display();
        keygen(&folder.join("host_key"))?;
        keygen(&folder.join("key"))?;
        std::fs::copy(folder.join("key.pub"), folder.join("authorized_keys"))?;
        let config = format!(
            "Port 2222\nListenAddress {address}\nHostKey {here}/host_key\nAuthorizedKeysFile {here}/authorized_keys\nPidFile none\n\
             StrictModes no\nUsePAM no\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
        );
        std::fs::write(folder.join("sshd_config"), config)?;
        let config = format!(
            "Host backup\n HostName {address}\n Port 2222\n User root\n IdentityFile {here}/key\n IdentitiesOnly yes\n BatchMode yes\n\
             \x20UserKnownHostsFile {here}/known_hosts\n StrictHostKeyChecking accept-new\n LogLevel ERROR\n"
        );
        std::fs::write(folder.join("ssh_config"), config)?;
        std::fs::create_dir_all("/run/sshd")?;
        let program = dsync_tests::find("sshd").context("sshd is not installed")?;
        let mut line = match within {
            [first, rest @ ..] => {
                let mut line = command(first);
                line.args(rest).arg(program);
                line
            }
            [] => std::process::Command::new(program),
        };
        let daemon = Daemon::start_bare(line.args(["-D", "-e", "-f"]).arg(folder.join("sshd_config")))?;
        let rsh = format!("ssh -F {here}/ssh_config");
        Ok(Sshd { rsh, daemon })
    }

    /// The server itself: what it runs for its callers, its children.
    pub(crate) fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Waits until it answers to this remote shell.
    pub(crate) fn wait(&mut self, rsh: &str) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(20);
        while let Err(error) = run(&mut shell(&format!("{rsh} backup true")), LIMIT) {
            self.daemon.check()?;
            ensure!(Instant::now() < until, "sshd does not answer: {error:#}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}
