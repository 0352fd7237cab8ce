//! The backup job of a machine that runs: its disks are shown as of one moment, and a checkpoint tells what the guest writes from then on.
//!
//! ```text
//!     begin ──▶ the disks are read at our socket ──▶ the replicas commit ──▶ end ──▶ tidy
//! ```
//!
//! - *A job that a killed run left* is ended by the next. The lock of the machine keeps two runs apart; those of two state directories may not see each
//!   other's, so the socket of each run is one of its own, and neither reads the job of the other.
//! - *A checkpoint is kept as long as a disk counts from it*: one with a bitmap of that disk, whose name is that of the last moment of its source. All others that were made for this
//!   state directory (`made.rs`) go, after a success as after a failure.
//! - *A bitmap is believed only of an image that this very QEMU has had open since*: whoever writes to an image while the machine is off, or puts another
//!   in its place, is not seen by it.
//! - *The job is there when all was read*, which is asked before anything is committed: it may be ended for another.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use source::{StateDir, Still};

use super::Untold;
use super::domain::Domain;
use super::hypervisor::{Backup, Hypervisor, Which};
use super::made::Made;
use super::part::{OURS, Part};
use crate::failure::Failure;
use crate::output::Output;

/// How long a connection to its disks may take to be made, before the job is ended all the same.
const NEGOTIATED_WITHIN: Duration = Duration::from_secs(5);

/// The run that an interrupt would end.
static CURRENT: Mutex<Option<Arc<Job>>> = Mutex::new(None);

/// The job of a machine, and what is left when it ends.
pub(super) struct Job {
    machine: String,
    host: Arc<dyn Hypervisor>,
    backup: Box<dyn Backup>,
    state: StateDir,
    /// The machine's name where only some characters are allowed.
    plain: String,
    /// Its disks by their targets, with the paths by which each may be known.
    paths: Vec<(String, PathBuf)>,
    output: Output,
}

/// A run that has a job, or may have. It ends with this.
pub(super) struct Begun(Arc<Job>);

impl Job {
    /// The job of a machine with these disks.
    pub(super) fn new(
        (domain, plain): (&Domain, &str),
        (host, backup): (Arc<dyn Hypervisor>, Box<dyn Backup>),
        (state, output): (&StateDir, &Output),
    ) -> Job {
        Job {
            machine: domain.name.clone(),
            host,
            backup,
            state: state.clone(),
            plain: plain.to_owned(),
            paths: domain
                .followed()
                .flat_map(|(target, image)| image.chain().map(|path| (target.to_owned(), path.clone())))
                .collect(),
            output: output.alike(),
        }
    }

    /// Refuses to begin while another program has a job. True if there is one of ours, which a killed run left.
    ///
    /// # Errors
    /// That.
    pub(super) fn refuse_other(&self) -> Result<bool, Failure> {
        self.backup.is_left()
    }

    /// Ends the job that a killed run left, and has an interrupt end this one from now on.
    ///
    /// # Errors
    /// As [`Job::refuse_other`], and if it does not end.
    pub(super) fn enter(self) -> Result<Begun, Failure> {
        self.backup.settle()?;
        if self.refuse_other()? {
            // Beside it libvirt would wait half a minute before it refuses ours.
            self.end(Which::Ours)?;
        }
        let job = Arc::new(self);
        *current() = Some(job.clone());
        Ok(Begun(job))
    }

    /// Ends a job that is meant, and waits until it has ended.
    ///
    /// # Errors
    /// If it does not end.
    pub(super) fn end(&self, which: Which) -> Result<(), Failure> {
        // Until it is gone: its server is stopped some time after that was asked for.
        let _held = nbd::client::hold_connections(NEGOTIATED_WITHIN);
        self.backup.end(which)
    }

    /// Begins, with a checkpoint of this name if one is kept of any of the disks. What is not told of a disk is noted in its part.
    fn begin(&self, parts: &mut [Part], name: &str) -> Result<(), Failure> {
        let mut is_alone = false;
        loop {
            // Before it is made: what is on no list is never deleted.
            let marks = parts.iter().filter(|part| part.is_listed);
            let marks = marks.map(|part| (&*part.target, part.mark.as_deref().unwrap_or_default()));
            Made::of(&self.state, &self.plain).add(name, marks)?;
            let Err(why) = self.backup.begin(parts, name)? else {
                return Made::of(&self.state, &self.plain).confirm(name, self.host.created(name)?);
            };
            // That of a run that was killed, whose request was carried out only now.
            if !is_alone && self.refuse_other()? {
                self.end(Which::Ours)?;
                is_alone = true;
                continue;
            }
            // It names the disk whose bitmap is gone; where it names none, all are compared.
            let named = |part: &Part| why.contains(&format!("'{}'", part.target));
            let names_one = parts.iter().any(|part| part.has_bitmap() && named(part));
            let lost: Vec<_> =
                parts.iter_mut().filter(|part| part.has_bitmap() && (named(part) || !names_one)).collect();
            if lost.is_empty() {
                return Err(Failure::failed(format!("no backup job of {} begins: {why}", self.machine)));
            }
            for part in lost {
                part.since = Err(Untold::Because(format!("QEMU's bitmap does not hold: {why}")));
            }
        }
    }

    /// Deletes those of our checkpoints from which no disk counts. Returns what went wrong, which the next run repeats.
    fn tidy(&self) -> Result<Vec<String>, String> {
        let said = |error: Failure| error.to_string();
        let checkpoints = self.host.checkpoints().map_err(said)?;
        let mut wanted = BTreeSet::new();
        let mut made = Made::of(&self.state, &self.plain);
        for (target, path) in &self.paths {
            let moment = source::last_moment(&self.state, path).map_err(|error| error.to_string())?;
            wanted.extend(moment.and_then(|moment| moment.name).filter(|name| made.is_of(name, target)));
        }
        let mut wrong = Vec::new();
        let ours = made.names();
        let mut left: BTreeSet<String> = checkpoints.iter().cloned().collect();
        for name in checkpoints.iter().filter(|name| ours.contains(&***name) && !wanted.contains(*name)) {
            if let Err(why) = self.host.delete_checkpoint(name).map_err(said)? {
                wrong.push(format!(
                    "checkpoint {name} of {} is left, and slows it down until it is deleted: {why}",
                    self.machine
                ));
            } else {
                left.remove(name);
            }
        }
        made.keep(&left).map_err(said)?;
        Ok(wrong)
    }

    /// Ends the job and tidies up. Says what is left, and whether the machine stands still.
    fn finish(&self) -> Result<(), Failure> {
        let ended = self.end(Which::Own);
        let left = self.tidy().unwrap_or_else(|why| {
            vec![format!("the checkpoints of {} are not tidied up: {why}", self.machine)]
        });
        left.iter().for_each(|left| self.output.warn(left));
        if let Ok(Some((state, way))) = self.host.stopped() {
            self.output.warn(&format!(
                "{} is {state}: its scratch file may have found no room. Free some, and {way}",
                self.machine
            ));
        }
        ended
    }
}

impl Begun {
    /// Begins the job: all disks are readable from now on. What is not told of a disk is noted in its part.
    ///
    /// # Errors
    /// Why libvirt refuses it.
    pub(super) fn begin(&self, parts: &mut [Part], name: &str) -> Result<(), Failure> {
        let _held = current();
        self.0.begin(parts, name)
    }

    /// Ends the job, to begin another.
    ///
    /// # Errors
    /// If it does not end.
    pub(super) fn pause(&self) -> Result<(), Failure> {
        let _held = current();
        self.0.end(Which::Own)
    }

    /// Where a disk is read.
    pub(super) fn place(&self, part: &Part) -> PathBuf {
        let server = device::NbdServer::Unix(self.0.backup.socket());
        device::ExportUri { server, export: self.0.backup.export(part) }.to_string().into()
    }

    /// Asks whether the job still shows its moment: what is read after its end is the present.
    pub(super) fn still(&self) -> Still {
        let job = self.0.clone();
        Still(Arc::new(move || match job.backup.is_on() {
            Ok(true) => Ok(()),
            Ok(false) => Err(io::Error::other(format!(
                "the backup job of {} ended while its disks were read: run the sync again",
                job.machine
            ))),
            Err(error) => Err(io::Error::other(error.to_string())),
        }))
    }

    /// Ends the job and tidies up.
    ///
    /// # Errors
    /// If the job does not end.
    pub(super) fn end(self) -> Result<(), Failure> {
        let mut held = current();
        *held = None;
        self.0.finish()
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // What is left then, the next run ends.
        let mut held = current();
        let _ = held.take().map(|job| job.finish());
    }
}

/// Ends the run, if there is one, as the program is interrupted. The lock stays taken: nothing begins or ends a job from then on.
pub(crate) fn end_interrupted() {
    let held = current();
    let _ = held.as_ref().map(|job| job.finish());
    std::mem::forget(held);
}

fn current() -> MutexGuard<'static, Option<Arc<Job>>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A name for a moment, by its time.
pub(super) fn name_at(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let (day, nanos) = (crate::terms::units::date(seconds), since_1970.subsec_nanos());
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{OURS}{day}T{hour:02}{minute:02}{second:02}.{nanos:09}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_named_by_their_time() {
        let name = name_at(Duration::new(1_795_747_501, 42));
        assert_eq!(name, "dsync-2026-11-27T024501.000000042");
    }
}
