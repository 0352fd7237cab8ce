//! `virsh`, libvirt's own client, as a child process: which libvirt is meant it reads from LIBVIRT_DEFAULT_URI itself.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use roxmltree::{Document, Node};
use rustix::fs::MemfdFlags;
use serde_json::{Value, json};

use super::child as process;
use super::xml::child;
use crate::failure::Failure;
use crate::machine::hypervisor::patience;
use crate::terms::units;

const INSTALL: &str =
    "install libvirt's client (Debian: apt install libvirt-clients; Fedora: libvirt-client)";
/// What it says of a checkpoint that is not there.
const NO_CHECKPOINT: &str = "no domain checkpoint with matching name";
/// What it says of a domain that has no backup job.
const NO_JOB: [&str; 2] = ["no domain backup job", IS_OFF];
/// What it says of a domain that is off.
pub(in crate::machine) const IS_OFF: &str = "domain is not running";

/// A domain of libvirt, by its UUID.
pub(in crate::machine) struct Virsh {
    domain: String,
}

/// The text of a domain, by its name.
///
/// # Errors
/// If there is none, and if libvirt cannot be asked.
pub(in crate::machine) fn look_up(name: &str) -> Result<String, Failure> {
    let uri = std::env::var("LIBVIRT_DEFAULT_URI").unwrap_or_default();
    let host = uri.split_once("://").and_then(|(_, rest)| rest.split('/').next());
    if host.is_some_and(|host| !host.is_empty()) {
        return Err(Failure::refused(format!(
            "LIBVIRT_DEFAULT_URI ({uri}) is the libvirt of another host, and the disks are read here: run this on that host"
        )));
    }
    virsh("dumpxml", &[&format!("--domain={name}")], Stdio::null())?.map_err(|why| {
        if why.contains("failed to connect") || why.contains("Failed to connect") {
            return Failure::failed(format!(
                "libvirt does not answer ({why}): start it (\"systemctl start libvirtd\"), or name the one that is meant in LIBVIRT_DEFAULT_URI. A VM without libvirt is named by the monitor of its QEMU, qemu:SOCKET"
            ));
        }
        Failure::failed(format!("there is no VM {name} in libvirt ({why}): \"virsh list --all\" lists them"))
    })
}

/// The text of a domain, by its name or its UUID; `None` if libvirt has none.
///
/// # Errors
/// If libvirt cannot be asked.
pub(in crate::machine) fn seek(name: &str) -> Result<Option<String>, Failure> {
    match virsh("dumpxml", &[&format!("--domain={name}")], Stdio::null())? {
        Ok(text) => Ok(Some(text)),
        Err(why) if why.contains("failed to get domain") => Ok(None),
        Err(why) => Err(Failure::failed(format!("libvirt does not answer: {why}"))),
    }
}

/// The names of all domains, if libvirt tells them.
pub(in crate::machine) fn names() -> Vec<String> {
    let said =
        virsh("list", &["--all", "--name"], Stdio::null()).ok().and_then(Result::ok).unwrap_or_default();
    said.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The user and the group that run QEMU, as numbers; `None` where libvirt does not tell.
pub(in crate::machine) fn owner_of_qemu() -> Option<(u32, u32)> {
    owner(&virsh("capabilities", &[], Stdio::null()).ok()?.ok()?)
}

fn owner(capabilities: &str) -> Option<(u32, u32)> {
    let document = Document::parse(capabilities).ok()?;
    let mut models = document.descendants().filter(|node| node.has_tag_name("secmodel"));
    let is_dac = |node: &Node<'_, '_>| child(*node, "model").and_then(|model| model.text()) == Some("dac");
    let dac = models.find(is_dac)?;
    let label = child(dac, "baselabel")?.text()?;
    let (user, group) = label.split_once(':')?;
    let number = |text: &str| text.trim_start_matches('+').parse().ok();
    Some((number(user)?, number(group)?))
}

impl Virsh {
    /// The domain with this UUID or name.
    pub(in crate::machine) fn of(uuid: &str) -> Virsh {
        Virsh { domain: format!("--domain={uuid}") }
    }

    fn ask(&self, command: &str, words: &[&str]) -> Result<Result<String, String>, Failure> {
        virsh(command, &[&[self.domain.as_str()], words].concat(), Stdio::null())
    }

    /// The text of the domain as it runs.
    ///
    /// # Errors
    /// What virsh says.
    pub(in crate::machine) fn text(&self) -> Result<String, Failure> {
        self.ask("dumpxml", &[])?.map_err(|why| failed("tell how the VM runs", &why))
    }

    /// What the domain does, in one word, and why, such as `paused (I/O error)`.
    ///
    /// # Errors
    /// What virsh says.
    pub(in crate::machine) fn condition(&self) -> Result<String, Failure> {
        let said = self.ask("domstate", &["--reason"])?;
        said.map(|text| text.trim().to_owned()).map_err(|why| failed("tell whether the VM runs", &why))
    }

    /// The text that defines the domain anew, with its passwords.
    ///
    /// # Errors
    /// What virsh says.
    pub(in crate::machine) fn definition(&self) -> Result<String, Failure> {
        let said = self.ask("dumpxml", &["--inactive", "--security-info"])?;
        said.map_err(|why| failed("give the definition of the VM", &why))
    }

    /// Runs a command of its QEMU; an inner `Err` is what that says if it fails, or libvirt if it does not pass it on.
    ///
    /// # Errors
    /// If libvirt does not answer.
    pub(in crate::machine) fn monitor(
        &self,
        command: &str,
        arguments: Value,
    ) -> Result<Result<Value, String>, Failure> {
        self.monitor_held(command, arguments, Stdio::null())
    }

    /// [`Virsh::monitor`]; `held` stays open until the command has been carried out or refused, also where this process is killed.
    ///
    /// # Errors
    /// If libvirt does not answer.
    pub(in crate::machine) fn monitor_held(
        &self,
        command: &str,
        arguments: Value,
        held: Stdio,
    ) -> Result<Result<Value, String>, Failure> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        let said = virsh("qemu-monitor-command", &[&self.domain, "--cmd", &text], held)?;
        Ok(said.and_then(|said| {
            let mut said: Value = serde_json::from_str(&said).map_err(|error| error.to_string())?;
            match said["error"]["desc"].as_str() {
                Some(why) => Err(why.to_owned()),
                None => Ok(said["return"].take()),
            }
        }))
    }

    /// The names of its checkpoints.
    ///
    /// # Errors
    /// What virsh says.
    pub(in crate::machine) fn checkpoints(&self) -> Result<Vec<String>, Failure> {
        let said = self.ask("checkpoint-list", &["--name"])?;
        let said = said.map_err(|why| failed("list the checkpoints of the VM", &why))?;
        Ok(said.lines().map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect())
    }

    /// When a checkpoint was created, in seconds since 1970; `None` if there is none of that name.
    ///
    /// # Errors
    /// If libvirt does not answer.
    pub(in crate::machine) fn created(&self, checkpoint: &str) -> Result<Option<String>, Failure> {
        let word = format!("--checkpointname={checkpoint}");
        let Ok(text) = self.ask("checkpoint-dumpxml", &["--no-domain", &word])? else { return Ok(None) };
        let document = Document::parse(&text).ok();
        let root = document.as_ref().map(Document::root_element);
        let created = root.and_then(|root| root.children().find(|node| node.has_tag_name("creationTime")));
        Ok(created.and_then(|node| Some(node.text()?.to_owned())))
    }

    /// The text of its backup job, if there is one.
    ///
    /// # Errors
    /// What virsh says.
    pub(in crate::machine) fn job(&self) -> Result<Option<String>, Failure> {
        match self.ask("backup-dumpxml", &[])? {
            Ok(text) => Ok(Some(text)),
            Err(why) if NO_JOB.iter().any(|none| why.contains(none)) => Ok(None),
            Err(why) => Err(failed("tell of the backup job of the VM", &why)),
        }
    }

    /// Begins a backup job, with a checkpoint if there is one. `held` stays open until that has been carried out or refused, also where this process
    /// is killed.
    ///
    /// # Errors
    /// An inner `Err` is why libvirt refuses it.
    pub(in crate::machine) fn begin(
        &self,
        backup: &str,
        checkpoint: Option<&str>,
        held: File,
    ) -> Result<Result<String, String>, Failure> {
        let texts = [Some(backup), checkpoint].into_iter().flatten();
        let files = texts.map(TextFile::new).collect::<io::Result<Vec<_>>>();
        let files =
            files.map_err(|error| Failure::failed(format!("cannot write a file for virsh: {error}")))?;
        let words = [&self.domain[..]].into_iter().chain(files.iter().map(|file| &*file.path));
        virsh("backup-begin", &words.collect::<Vec<_>>(), held.into())
    }

    /// Asks for the end of the domain's job, which comes a little later.
    ///
    /// # Errors
    /// An inner `Err` is what libvirt says, also if the job has ended.
    pub(in crate::machine) fn abort(&self) -> Result<Result<String, String>, Failure> {
        self.ask("domjobabort", &[])
    }

    /// Ends the domain at once, as if its power were cut.
    ///
    /// # Errors
    /// An inner `Err` is what libvirt says, also if it has ended.
    pub(in crate::machine) fn destroy(&self) -> Result<Result<String, String>, Failure> {
        self.ask("destroy", &[])
    }

    /// Deletes a checkpoint, if it is there.
    ///
    /// # Errors
    /// An inner `Err` is why it is not deleted.
    pub(in crate::machine) fn delete_checkpoint(
        &self,
        name: &str,
    ) -> Result<Result<String, String>, Failure> {
        let word = format!("--checkpointname={name}");
        match self.ask("checkpoint-delete", &[&word])? {
            // Where QEMU was killed, only the name is left.
            Err(why) if why.contains(&format!("bitmap '{name}' not found")) => {
                self.ask("checkpoint-delete", &[&word, "--metadata"])
            }
            Err(why) if why.contains(NO_CHECKPOINT) => Ok(Ok(why)),
            deleted => Ok(deleted),
        }
    }
}

/// A text that virsh reads from a file. It is in memory: nothing stays where this process is killed.
struct TextFile {
    path: String,
    _file: File,
}

impl TextFile {
    fn new(text: &str) -> io::Result<TextFile> {
        let mut file = File::from(rustix::fs::memfd_create("virsh", MemfdFlags::CLOEXEC)?);
        file.write_all(text.as_bytes())?;
        Ok(TextFile { path: format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()), _file: file })
    }
}

fn failed(what: &str, why: &str) -> Failure {
    Failure::failed(format!("libvirt does not {what}: {why}"))
}

/// How many times as long it has for what takes its time: it merges bitmaps as a checkpoint goes, and QEMU makes a file for each disk as a job begins.
const ACTS: u32 = 5;
/// How many times less once it has not answered: what is tidied up then does not wait as long again.
const HURRY: u32 = 12;

/// It has not answered in time, and not since.
static HANGS: AtomicBool = AtomicBool::new(false);

/// Runs a command; an inner `Err` is what it says if it fails.
fn virsh(command: &str, words: &[&str], stdin: Stdio) -> Result<Result<String, String>, Failure> {
    let mut virsh = Command::new("virsh");
    virsh.arg("-q").arg(command).args(words).env("LC_ALL", "C").stdin(stdin);
    let patience = patience();
    let limit = match command {
        _ if HANGS.load(Relaxed) => patience / HURRY,
        "backup-begin" | "checkpoint-delete" => patience * ACTS,
        _ => patience,
    };
    let output = process::output_within(&mut virsh, limit).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            Failure::failed(format!("vm:NAME needs virsh, which is not here: {INSTALL}"))
        }
        _ => Failure::failed(format!("cannot start virsh: {error}")),
    })?;
    HANGS.store(output.is_none(), Relaxed);
    let Some(output) = output else {
        let why = format!(
            "libvirt hangs: \"virsh {command}\" has not ended within {}, and was killed: \"systemctl status libvirtd\" and \"journalctl -u libvirtd\" say why; \
             restarting libvirtd ends no VM",
            units::seconds(limit.as_secs_f64())
        );
        return Err(Failure::failed(why));
    };
    if output.status.success() {
        return Ok(Ok(String::from_utf8_lossy(&output.stdout).into_owned()));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let lines = said.lines().map(|line| line.trim().trim_start_matches("error: "));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    Ok(Err(lines.join(": ")))
}

/// A text as it stands in an attribute or between tags.
pub(in crate::machine) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => quoted.push_str("&amp;"),
            '<' => quoted.push_str("&lt;"),
            '>' => quoted.push_str("&gt;"),
            '\'' => quoted.push_str("&apos;"),
            '"' => quoted.push_str("&quot;"),
            other => quoted.push(other),
        }
    }
    quoted
}

/// Quotes a path for XML.
pub(in crate::machine) fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_qemu_is_read_from_the_capabilities() {
        let model = |name: &str, label: &str| {
            format!(
                "<secmodel><model>{name}</model><doi>0</doi><baselabel type='kvm'>{label}</baselabel></secmodel>"
            )
        };
        let said = |models: String| format!("<capabilities><host>{models}</host></capabilities>");
        let both = said(model("selinux", "system_u:system_r:svirt_t:s0") + &model("dac", "+64055:+994"));
        assert_eq!(owner(&both), Some((64055, 994)));
        assert_eq!(owner(&said(model("selinux", "a:b"))), None);
    }
}
