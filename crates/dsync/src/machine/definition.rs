//! What it takes to start a machine elsewhere: the XML of libvirt, or the command line of its QEMU, and which replica each disk is. It is kept beside the
//! disks. The second, which is JSON, tells of a machine that is off which disks it has.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::domain::{Answer, Disk, Domain, Image};

/// Begins the line behind the XML that says which replica each disk is.
pub(super) const DISKS: &str = "dsync-disks";

/// What it takes to start a machine elsewhere.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Definition {
    /// The XML of libvirt.
    Libvirt(String),
    /// The command line of its QEMU.
    Qemu(QemuDefinition),
}

impl Definition {
    /// Its text, which says of each disk, by its target, which replica is that: another disk may have that target some day.
    pub(super) fn text(&self, disks: &[(String, String)]) -> String {
        match self {
            Definition::Libvirt(text) => {
                let disks: String = disks.iter().map(|(target, file)| format!(" {target}={file}")).collect();
                format!("{}\n<?{DISKS}{disks}?>", text.trim_end())
            }
            Definition::Qemu(definition) => definition.text(disks),
        }
    }
}

/// A machine, as QEMU was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct QemuDefinition {
    pub name: String,
    pub uuid: String,
    /// The socket of its monitor.
    pub monitor: PathBuf,
    pub command_line: Vec<String>,
    /// The folder in which that was run.
    pub folder: PathBuf,
    /// Those that are copied, by their targets.
    pub disks: BTreeMap<String, QemuDisk>,
    /// The targets of all others.
    #[serde(default)]
    pub others: Vec<String>,
}

/// A disk of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct QemuDisk {
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

    /// The targets of the disks of a machine that are not copied.
    pub(super) fn others_of(domain: &Domain) -> Vec<String> {
        let others = domain.disks.iter().filter(|disk| !matches!(disk.answer, Answer::Followed(_)));
        others.map(|disk| disk.target.clone()).collect()
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
        let other = |target: &String| Disk {
            target: target.clone(),
            answer: Answer::LeftOut("it could not be copied while the VM ran"),
        };
        Domain {
            name: self.name.clone(),
            uuid: self.uuid.clone(),
            id: None,
            disks: self.disks.iter().map(disk).chain(self.others.iter().map(other)).collect(),
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
    pub(super) fn text(&self, replicas: &[(String, String)]) -> String {
        let mut definition = self.clone();
        for (target, file) in replicas {
            definition.disks.entry(target.clone()).and_modify(|disk| disk.replica = Some(file.clone()));
        }
        serde_json::to_string_pretty(&definition).unwrap_or_default()
    }
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
            others: vec!["cd".into()],
        };
        let text = definition.text(&[("b".into(), "web1-b.img".into()), ("x".into(), "x.img".into())]);
        let read: QemuDefinition = serde_json::from_str(&format!("{text}\n\n")).unwrap();
        assert_eq!(read.disks["b"].replica.as_deref(), Some("web1-b.img"));
        assert_eq!((read.disks["a"].replica.as_deref(), read.disks.len()), (None, 2));
        assert_eq!(read.without_replicas(), definition);
        let rests = definition.at_rest();
        assert!(rests.id.is_none() && rests.followed().count() == 2 && rests.disks.len() == 3);
        assert!(definition.has_any_of(&rests));
    }
}
