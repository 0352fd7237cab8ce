//! What a machine is made of: its disks, and for each whether it can be followed.

use std::path::PathBuf;

/// A domain.
#[derive(Debug)]
pub(super) struct Domain {
    pub name: String,
    pub uuid: String,
    /// Its number while it runs.
    pub id: Option<String>,
    pub disks: Vec<Disk>,
    /// The file of its NVRAM.
    pub nvram: Option<PathBuf>,
    /// The file in which libvirt keeps the state of its emulated TPM.
    pub tpm: Option<PathBuf>,
    /// What else it needs to start, and is not copied.
    pub also: Vec<&'static str>,
}

/// A disk of a domain.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Disk {
    /// As the domain calls it, such as `vda`.
    pub target: String,
    pub answer: Answer,
}

/// What is done with a disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Followed(Image),
    /// It is no part of the copy, for this reason.
    LeftOut(&'static str),
    /// It cannot be copied, for this reason; only its user can leave it out.
    Refused(String),
}

/// What a disk is kept on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Image {
    pub path: PathBuf,
    pub is_qcow2: bool,
    /// Its number in this QEMU, which no other image that is opened there gets.
    pub index: Option<String>,
    /// The images beneath it, from above, as after a snapshot.
    pub beneath: Vec<PathBuf>,
}

impl Image {
    /// Its path and those of the images beneath it.
    pub(super) fn chain(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.path).chain(&self.beneath)
    }
}

impl Domain {
    /// The disks that are followed.
    pub(super) fn followed(&self) -> impl Iterator<Item = (&str, &Image)> {
        self.disks.iter().filter_map(|disk| match &disk.answer {
            Answer::Followed(image) => Some((disk.target.as_str(), image)),
            _ => None,
        })
    }
}
