//! The backup job of a machine that runs: QEMU shows all its disks as of one moment, and keeps in a checkpoint what the guest writes from then on.
//!
//! ```text
//!     begin ──▶ the disks are read at our socket ──▶ the replicas commit ──▶ end ──▶ tidy
//! ```
//!
//! - *The job is ours by its socket*, which is in the folder of this QEMU: one that a killed run left is ended by the next, and that of another
//!   program is never touched. The lock of the machine keeps two runs apart; those of two state directories may not see each other's, so the
//!   socket of each run is one of its own, and neither reads the job of the other.
//! - *A checkpoint is kept as long as a disk counts from it*: one with a bitmap of that disk, whose name is that of the last moment of its source. All others that were made for this
//!   state directory (`made.rs`) go, after a success as after a failure.
//! - *A bitmap is believed only of an image that this very QEMU has had open since*: whoever writes to an image while the machine is off, or puts another
//!   in its place, is not seen by it.
//! - *The job is there when all was read*, which is asked before anything is committed: libvirt may end it for another.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, UNIX_EPOCH};

use roxmltree::Document;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use source::{Handle, Recorded, SourceError, StateDir, Still};
use uuid::Uuid;

use super::Untold;
use super::domain::Domain;
use super::made::Made;
use super::virsh::{Virsh, quoted, quoted_path};
use crate::failure::Failure;

/// How long a job may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(60);
/// How long a connection to its disks may take to be made, before the job is ended all the same.
const NEGOTIATED_WITHIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What the names of our checkpoints and sockets begin with.
const OURS: &str = "dsync-";

/// The run that an interrupt would end.
static CURRENT: Mutex<Option<Arc<Job>>> = Mutex::new(None);

/// From what it is known what was written to a disk since its last sync.
#[derive(Debug, Clone)]
pub(super) enum Basis {
    /// The checkpoint of this name.
    Checkpoint(String),
    /// What its tracker has recorded.
    Record,
}

/// A disk in a backup job, with that from which its changes are told, or why they are not.
#[derive(Debug)]
pub(super) struct Part {
    pub target: String,
    pub path: PathBuf,
    pub is_qcow2: bool,
    /// A tracker may have recorded what was written to it.
    pub is_raw_device: bool,
    /// libvirt keeps checkpoints of it.
    pub is_listed: bool,
    /// Names the image as it is open in this QEMU; `None` if that is not known.
    pub mark: Option<String>,
    /// What is recorded of it, from before the job on.
    pub recorded: Option<Recorded>,
    pub since: Result<Basis, Untold>,
}

impl Part {
    /// True if QEMU tells what was written to it.
    pub(super) fn has_bitmap(&self) -> bool {
        matches!(self.since, Ok(Basis::Checkpoint(_)))
    }

    /// Takes what its source knows against its bitmap.
    ///
    /// # Errors
    /// If that cannot be asked.
    pub(super) fn doubt(&mut self, handle: &Handle) -> Result<(), SourceError> {
        if let (Ok(_), Some(why)) = (&self.since, handle.lost()?) {
            self.since = Err(Untold::Because(why.to_string()));
        }
        Ok(())
    }
}

/// Where the job of a machine is, and what is left when it ends.
pub(super) struct Job {
    machine: String,
    virsh: Virsh,
    socket: PathBuf,
    /// Where QEMU keeps what is overwritten meanwhile: a path to which `TARGET.scratch` is added.
    scratch: String,
    state: StateDir,
    /// The machine's name where only some characters are allowed.
    plain: String,
    /// Its disks by their targets, with the paths by which each may be known.
    paths: Vec<(String, PathBuf)>,
}

/// A run that has a job, or may have. It ends with this.
pub(super) struct Begun(Arc<Job>);

impl Job {
    /// The job of a machine that runs, with these disks; `scratch` is a folder to which QEMU may write.
    ///
    /// # Errors
    /// If the folder of its QEMU is not found.
    pub(super) fn of(
        (domain, plain): (&Domain, &str),
        scratch: Option<&Path>,
        state: &StateDir,
    ) -> Result<Job, Failure> {
        let folder = folder(domain)?;
        let scratch = match scratch {
            Some(folder) => folder.join(format!("dsync-{}-", domain.uuid)),
            None => folder.join("dsync-"),
        };
        Ok(Job {
            machine: domain.name.clone(),
            virsh: Virsh::of(&domain.uuid),
            socket: folder.join(format!("{OURS}{:08x}.sock", Uuid::new_v4().as_fields().0)),
            scratch: scratch.to_string_lossy().into_owned(),
            state: state.clone(),
            plain: plain.to_owned(),
            paths: domain
                .followed()
                .flat_map(|(target, image)| image.chain().map(|path| (target.to_owned(), path.clone())))
                .collect(),
        })
    }

    /// Refuses to begin while another program has a job. True if there is one of ours, which a killed run left.
    ///
    /// # Errors
    /// That.
    pub(super) fn refuse_other(&self) -> Result<bool, Failure> {
        match self.virsh.job()?.map(|job| socket_of(&job)) {
            Some(socket) if !socket.as_deref().is_some_and(|socket| self.is_ours(socket)) => {
                let whose = socket.map_or_else(String::new, |socket| format!(" (at {})", socket.display()));
                Err(Failure::busy(format!(
                    "another backup job of {} is running{whose}: wait for it, as --wait does, or end it with \"virsh domjobabort {0}\"",
                    self.machine
                )))
            }
            job => Ok(job.is_some()),
        }
    }

    /// Ends the job that a killed run left, and has an interrupt end this one from now on.
    ///
    /// # Errors
    /// As [`Job::refuse_other`], and if it does not end.
    pub(super) fn enter(self) -> Result<Begun, Failure> {
        drop(self.hold_begin()?);
        if self.refuse_other()? {
            // Beside it libvirt would wait half a minute before it refuses ours.
            self.end_left()?;
        }
        let job = Arc::new(self);
        *current() = Some(job.clone());
        Ok(Begun(job))
    }

    /// True if a job at this socket is ours, of this run or another.
    fn is_ours(&self, socket: &Path) -> bool {
        let is_named = socket.file_name().is_some_and(|name| name.to_string_lossy().starts_with(OURS));
        is_named && socket.parent() == self.socket.parent()
    }

    /// Ends the job that a killed run left, if there is one, and waits until it has ended.
    ///
    /// # Errors
    /// If it does not end.
    pub(super) fn end_left(&self) -> Result<(), Failure> {
        self.end(|socket| self.is_ours(socket))
    }

    /// Ends a job that is meant, by its socket, and waits until it has ended.
    fn end(&self, is_meant: impl Fn(&Path) -> bool) -> Result<(), Failure> {
        let began = Instant::now();
        // Until it is gone: its server is stopped some time after that was asked for.
        let _held = nbd::client::hold_connections(NEGOTIATED_WITHIN);
        while let Some(job) = self.virsh.job()? {
            if !socket_of(&job).is_some_and(|socket| is_meant(&socket)) {
                return Ok(());
            }
            if began.elapsed() > ENDS_WITHIN {
                return Err(Failure::failed(format!(
                    "the backup job of {} does not end: \"virsh domjobinfo {0}\" shows it, and \"virsh domjobabort {0}\" ends it",
                    self.machine
                )));
            }
            // It takes a moment, in which another request is refused.
            let _ = self.virsh.abort()?;
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Holds the right to ask for a job. Of a run that was killed its virsh has it, until what that has asked for was carried out or refused: beside a
    /// second request libvirt would have one wait half a minute, and begin it thereafter.
    fn hold_begin(&self) -> Result<File, Failure> {
        let folder = self.socket.parent().unwrap_or(Path::new("/"));
        let failed = |error: io::Error| Failure::failed(format!("cannot lock {}: {error}", folder.display()));
        let (held, began) = (File::open(folder).map_err(failed)?, Instant::now());
        loop {
            match flock(&held, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(held),
                Err(Errno::WOULDBLOCK) if began.elapsed() < ENDS_WITHIN => std::thread::sleep(LOOK_EVERY),
                Err(Errno::WOULDBLOCK) => {
                    return Err(Failure::busy(format!(
                        "a backup job of {} that a killed run has asked for does not begin: end its \"virsh backup-begin\", and run this again",
                        self.machine
                    )));
                }
                Err(error) => return Err(failed(error.into())),
            }
        }
    }

    /// Begins, with a checkpoint of this name if libvirt keeps one of any of the disks. What is not told of a disk is noted in its part.
    fn begin(&self, parts: &mut [Part], name: &str) -> Result<(), Failure> {
        loop {
            let checkpoint = parts.iter().any(|part| part.is_listed).then(|| checkpoint(parts, name));
            // Before it is made: what is on no list is never deleted.
            let marks = parts.iter().filter(|part| part.is_listed);
            let marks = marks.map(|part| (&*part.target, part.mark.as_deref().unwrap_or_default()));
            Made::of(&self.state, &self.plain).add(name, marks)?;
            let Err(why) =
                self.virsh.begin(&self.backup(parts), checkpoint.as_deref(), self.hold_begin()?)?
            else {
                let created = checkpoint.and_then(|_| self.virsh.created(name).transpose()).transpose()?;
                return Made::of(&self.state, &self.plain).confirm(name, created);
            };
            // That of a run that was killed, whose request libvirt has carried out only now.
            if self.refuse_other()? {
                self.end_left()?;
                continue;
            }
            // It names the disk whose bitmap is gone; where it names none, all are compared.
            let named = |part: &Part| why.contains(&format!("'{}'", part.target));
            let names_one = parts.iter().any(|part| part.has_bitmap() && named(part));
            let lost: Vec<_> =
                parts.iter_mut().filter(|part| part.has_bitmap() && (named(part) || !names_one)).collect();
            if lost.is_empty() {
                return Err(Failure::failed(format!(
                    "libvirt does not begin a backup job of {}: {why}",
                    self.machine
                )));
            }
            for part in lost {
                part.since = Err(Untold::Because(format!("QEMU's bitmap does not hold: {why}")));
            }
        }
    }

    fn backup(&self, parts: &[Part]) -> String {
        let disks = parts.iter().map(|part| {
            let mode = match &part.since {
                Ok(Basis::Checkpoint(since)) => {
                    format!("backupmode='incremental' incremental='{}'", quoted(since))
                }
                _ => "backupmode='full'".to_owned(),
            };
            let scratch = quoted(&format!("{}{}.scratch", self.scratch, part.target));
            format!("<disk name='{}' type='file' {mode}><scratch file='{scratch}'/></disk>", part.target)
        });
        format!(
            "<domainbackup mode='pull'><server transport='unix' socket='{}'/><disks>{}</disks></domainbackup>",
            quoted_path(&self.socket),
            disks.collect::<String>()
        )
    }

    /// Deletes those of our checkpoints from which no disk counts. Returns what went wrong, which the next run repeats.
    fn tidy(&self) -> Result<Vec<String>, String> {
        let said = |error: Failure| error.to_string();
        let checkpoints = self.virsh.checkpoints().map_err(said)?;
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
            if let Err(why) = self.virsh.delete_checkpoint(name).map_err(said)? {
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

    /// Ends the job and tidies up. Returns what is left.
    fn finish(&self) -> Result<Vec<String>, Failure> {
        let ended = self.end(|socket| socket == self.socket);
        let left = self.tidy().unwrap_or_else(|why| {
            vec![format!("the checkpoints of {} are not tidied up: {why}", self.machine)]
        });
        ended.map(|()| left)
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
        self.0.end(|socket| socket == self.0.socket)
    }

    /// Where a disk is read.
    pub(super) fn place(&self, target: &str) -> PathBuf {
        let server = device::NbdServer::Unix(self.0.socket.clone());
        device::ExportUri { server, export: target.to_owned() }.to_string().into()
    }

    /// Asks whether the job still shows its moment: what is read after its end is the present.
    pub(super) fn still(&self) -> Still {
        let job = self.0.clone();
        Still(Arc::new(move || match job.virsh.job() {
            Ok(Some(text)) if socket_of(&text).as_deref() == Some(&*job.socket) => Ok(()),
            Ok(_) => Err(io::Error::other(format!(
                "the backup job of {} ended while its disks were read: run the sync again",
                job.machine
            ))),
            Err(error) => Err(io::Error::other(error.to_string())),
        }))
    }

    /// Ends the job and tidies up. Returns what is left.
    ///
    /// # Errors
    /// If the job does not end.
    pub(super) fn end(self) -> Result<Vec<String>, Failure> {
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

/// Names the QEMU of a machine: its folder is made as it starts. `None` where the file system does not tell when that was.
pub(super) fn qemu(domain: &Domain) -> Option<String> {
    let folder = folder(domain).ok()?.metadata().ok()?;
    let made = folder.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some(format!("{}-{}", folder.ino(), made.as_nanos()))
}

/// The folder to which QEMU may write, and which libvirt removes when QEMU has ended.
fn folder(domain: &Domain) -> Result<PathBuf, Failure> {
    // libvirt's own rule for the names of its folders.
    let short: String = domain.name.chars().take(20).collect();
    let name = format!("domain-{}-{short}", domain.id.as_deref().unwrap_or_default());
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let own = variable("XDG_CONFIG_HOME").or_else(|| Some(variable("HOME")?.join(".config")));
    let places = [Some("/var/lib/libvirt/qemu".into()), own.map(|own| own.join("libvirt/qemu/lib"))];
    let places: Vec<PathBuf> = places.into_iter().flatten().map(|place| place.join(&name)).collect();
    let found = places.iter().find(|place| place.is_dir()).cloned();
    found.ok_or_else(|| {
        let shown: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        Failure::failed(format!(
            "the folder of the QEMU of {} is not here ({}): run this on the host of the VM, as the user of its libvirt",
            domain.name,
            shown.join(", ")
        ))
    })
}

/// The socket in the text of a backup job.
fn socket_of(job: &str) -> Option<PathBuf> {
    let document = Document::parse(job).ok()?;
    let server = document.root_element().children().find(|node| node.has_tag_name("server"))?;
    server.attribute("socket").map(PathBuf::from)
}

fn checkpoint(parts: &[Part], name: &str) -> String {
    let disks = parts.iter().map(|part| {
        let kind = if part.is_listed { "bitmap" } else { "no" };
        format!("<disk name='{}' checkpoint='{kind}'/>", part.target)
    });
    format!(
        "<domaincheckpoint><name>{}</name><disks>{}</disks></domaincheckpoint>",
        quoted(name),
        disks.collect::<String>()
    )
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

    #[test]
    fn the_socket_of_a_job_is_read_whatever_is_in_its_name() {
        let socket = Path::new("/run/a & 'b'/x.sock");
        let job = format!(
            "<domainbackup><server transport='unix' socket='{}'/></domainbackup>",
            quoted_path(socket)
        );
        assert_eq!(socket_of(&job).as_deref(), Some(socket));
        assert_eq!(socket_of("<domainbackup><server transport='tcp' name='::1'/></domainbackup>"), None);
    }
}
