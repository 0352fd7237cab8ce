//! What runs a machine, and shows its disks as of one moment: libvirt, or its QEMU, which is asked at its monitor.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

use super::definition::Definition;
use super::domain::{Domain, Image};
use super::part::Part;
use crate::failure::Failure;

/// A machine, of whoever runs it.
///
/// # Errors
/// Each call fails if that is not answered.
pub(super) trait Hypervisor: Send + Sync {
    /// The machine as it is now.
    fn look(&self) -> Result<Domain, Failure>;

    /// What it takes to start the machine elsewhere, as a text.
    fn definition(&self) -> Result<Definition, Failure>;

    /// What the machine is, and the way to go on, if it was stopped by an I/O error.
    fn stopped(&self) -> Result<Option<(String, String)>, Failure>;

    /// The names of the checkpoints that are there.
    fn checkpoints(&self) -> Result<Vec<String>, Failure>;

    /// What tells a checkpoint from another one of its name; `None` if there is none.
    fn created(&self, checkpoint: &str) -> Result<Option<String>, Failure>;

    /// Deletes a checkpoint. An inner `Err` is why it is not deleted.
    fn delete_checkpoint(&self, name: &str) -> Result<Result<(), String>, Failure>;

    /// The command that does so by hand.
    fn deletion(&self, name: &str) -> String;

    /// Why no checkpoint of a disk can be kept.
    fn cannot_follow(&self, image: &Image) -> Option<&'static str>;

    /// Names the QEMU of a machine that runs, of all that there will ever be; `None` if that is not known.
    fn qemu(&self, domain: &Domain) -> Option<String>;

    /// The disks with an I/O thread, by their targets, if this QEMU is one that ends when its NBD server loses a connection there.
    fn endangered(&self) -> Result<Vec<String>, Failure>;

    /// A backup job of the machine, which runs, with a socket of its own; `scratch` is a folder for what is overwritten meanwhile.
    fn backup(&self, domain: &Domain, scratch: Option<&Path>) -> Result<Box<dyn Backup>, Failure>;

    /// From where it is known which disks the machine has while it is off, if that may be out of date.
    fn rests(&self) -> Option<String>;

    /// Where the disks of the machine are listed.
    fn list(&self) -> String;

    /// How images are merged into those beneath them.
    fn merge(&self) -> &'static str;
}

/// A backup job: it shows the disks of a machine that runs as of one moment, and begins a checkpoint there.
///
/// # Errors
/// Each call fails if it is not answered.
pub(super) trait Backup: Send + Sync {
    /// True if there is a job of ours, which a killed run left. Refuses to begin while another program has one.
    fn is_left(&self) -> Result<bool, Failure>;

    /// Begins the job, with a checkpoint of this name of all disks that can have one. An inner `Err` is why it does not begin, with the targets in
    /// single quotes of those disks whose bitmaps are the reason.
    fn begin(&self, parts: &[Part], checkpoint: &str) -> Result<Result<(), String>, Failure>;

    /// Ends the job of this run, or any of ours, and waits until it has ended.
    fn end(&self, which: Which) -> Result<(), Failure>;

    /// True as long as the job shows its moment.
    fn is_on(&self) -> Result<bool, Failure>;

    /// The socket at which the disks are read.
    fn socket(&self) -> PathBuf;

    /// The export there of a disk.
    fn export(&self, part: &Part) -> String {
        part.target.clone()
    }

    /// Waits until no run that was killed can begin one any more.
    fn settle(&self) -> Result<(), Failure> {
        Ok(())
    }
}

/// True if a QEMU of this version survives the end of a connection to its NBD server in an I/O thread. Version 7.2 aborts; 9.0 closes connections in its
/// main thread. What is in between or older is not trusted.
pub(super) fn closes_safely(version: &Value) -> bool {
    version["qemu"]["major"].as_u64().is_some_and(|major| major >= 9)
}

/// Which jobs are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    /// Of this run alone.
    Own,
    /// All of dsync, also of a run that was killed.
    Ours,
}

/// How long whoever runs a machine has for an answer.
pub(super) fn patience() -> Duration {
    *PATIENCE.get().unwrap_or(&ANSWERS_WITHIN)
}

/// Sets it, if its user says so.
pub(super) fn wait_for(limit: Option<Duration>) {
    limit.map(|limit| PATIENCE.set(limit));
}

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);

static PATIENCE: OnceLock<Duration> = OnceLock::new();
