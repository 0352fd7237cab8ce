//! What it takes to start a machine elsewhere that QEMU alone runs: its command line, and which replica each disk is. It is kept as JSON beside the
//! disks, and tells of a machine that is off which disks it has.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::machine::domain::{Answer, Disk, Domain, Image};

/// A machine, as QEMU was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::machine) struct QemuDefinition {
    pub name: String,
    pub uuid: String,
    /// The socket of its monitor.
    pub monitor: PathBuf,
    pub command_line: Vec<String>,
    /// The folder in which that was run.
    pub folder: PathBuf,
    /// Those that are copied, by their targets.
    pub disks: BTreeMap<String, QemuDisk>,
}

/// A disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::machine) struct QemuDisk {
    pub path: PathBuf,
    pub is_qcow2: bool,
    /// The images beneath its own, from above.
    #[serde(default)]
    pub beneath: Vec<PathBuf>,
    /// The file name of its replica.
    #[serde(default)]
    pub replica: Option<String>,
}

impl QemuDefinition {
    /// The disks of a machine that are copied.
    pub(super) fn disks_of(domain: &Domain) -> BTreeMap<String, QemuDisk> {
        let disk = |image: &Image| QemuDisk {
            path: image.path.clone(),
            is_qcow2: image.is_qcow2,
            beneath: image.beneath.clone(),
            replica: None,
        };
        domain.followed().map(|(target, image)| (target.to_owned(), disk(image))).collect()
    }

    /// The machine while it is off.
    pub(super) fn at_rest(&self) -> Domain {
        let image = |disk: &QemuDisk| Image {
            path: disk.path.clone(),
            is_qcow2: disk.is_qcow2,
            index: None,
            beneath: disk.beneath.clone(),
        };
        let disk = |(target, disk): (&String, &QemuDisk)| Disk {
            target: target.clone(),
            answer: Answer::Followed(image(disk)),
        };
        Domain {
            name: self.name.clone(),
            uuid: self.uuid.clone(),
            id: None,
            disks: self.disks.iter().map(disk).collect(),
            nvram: None,
            tpm: None,
            also: Vec::new(),
        }
    }

    /// True if one of the images is among its disks, or beneath one.
    pub(super) fn has_any_of(&self, domain: &Domain) -> bool {
        let paths = |disk: &QemuDisk| [std::slice::from_ref(&disk.path), &disk.beneath].concat();
        let known: Vec<PathBuf> = self.disks.values().flat_map(paths).collect();
        domain.followed().any(|(_, image)| image.chain().any(|path| known.contains(path)))
    }

    /// It as it is before it says which replica each disk is.
    pub(super) fn without_replicas(mut self) -> QemuDefinition {
        self.disks.values_mut().for_each(|disk| disk.replica = None);
        self
    }

    /// Its text, with the replica of each disk, by its target.
    pub(in crate::machine) fn text(&self, replicas: &[(String, String)]) -> String {
        let mut definition = self.clone();
        for (target, file) in replicas {
            definition.disks.entry(target.clone()).and_modify(|disk| disk.replica = Some(file.clone()));
        }
        serde_json::to_string_pretty(&definition).unwrap_or_default()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_says_which_replica_each_disk_is() {
        let disk =
            |path: &str| QemuDisk { path: path.into(), is_qcow2: true, beneath: Vec::new(), replica: None };
        let definition = QemuDefinition {
            name: "web1".into(),
            uuid: String::new(),
            monitor: "/run/web1.qmp".into(),
            command_line: vec!["qemu".into(), "-name".into(), "web1".into()],
            folder: "/".into(),
            disks: [("a", "/i/a"), ("b", "/i/b")].map(|(name, path)| (name.to_owned(), disk(path))).into(),
        };
        let text = definition.text(&[("b".into(), "web1-b.img".into()), ("x".into(), "x.img".into())]);
        let read: QemuDefinition = serde_json::from_str(&format!("{text}\n\n")).unwrap();
        assert_eq!(read.disks["b"].replica.as_deref(), Some("web1-b.img"));
        assert_eq!((read.disks["a"].replica.as_deref(), read.disks.len()), (None, 2));
        assert_eq!(read.without_replicas(), definition);
        let rests = definition.at_rest();
        assert!(rests.id.is_none() && rests.followed().count() == 2);
        assert!(definition.has_any_of(&rests));
    }

    #[test]
    fn a_process_is_named_once() {
        let own = process_id(std::process::id()).unwrap();
        assert_eq!(own, process_id(std::process::id()).unwrap());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert_ne!(process_id(child.id()).unwrap(), own);
        let (words, _) = command_line(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(words, ["sleep", "600"]);
    }
}
