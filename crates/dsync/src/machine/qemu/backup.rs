//! A backup job of a QEMU: of each disk a copy-on-write overlay, whose scratch file keeps what the guest overwrites, is exported read-only by QEMU's own
//! NBD server.
//!
//! - *One moment*: a transaction begins the checkpoint, stops the writes to each disk until its end, and takes what the checkpoint before has recorded,
//!   in this order. Whatever is written between two of its steps is told of twice, and never missed.
//! - *The checkpoint before goes on* until the replicas have committed. Where a run is killed, nothing is to be mended.
//! - *What is ours* is known by its name, `dsync-RUN-…`, and the server by its socket, at which nobody else listens. All of it ends with the QEMU.
//! - *The scratch file* has no name, and QEMU opens it at this process, or gets it from there where it may not: nothing is left.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use serde_json::{Value, json};
use uuid::Uuid;

use super::Monitor;
use super::disks::{self, Node};
use super::process::OpenImages;
use super::qmp::Qmp;
use crate::failure::Failure;
use crate::machine::hypervisor::{Backup, Which};
use crate::machine::part::{Basis, ENDS_WITHIN, OURS, Part, block_of, shown_as};

/// How soon it is asked again whether a step has ended: most take a millisecond or two.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// Hexadecimal digits of the name of a run.
const RUN: usize = 8;
/// Where the kernel lists the sockets of this network namespace.
const UNIX_SOCKETS: &str = "/proc/net/unix";
/// The flags of one there at which somebody listens.
const LISTENS: &str = "00010000";
/// The end of the name of a socket.
const SOCKET: &str = ".sock";

/// The backup job of a run.
pub(super) struct QemuJob {
    monitor: Monitor,
    /// What the names of all that this run makes begin with.
    run: String,
    socket: PathBuf,
    scratch: PathBuf,
    /// The scratch files of the disks that it shows.
    files: Mutex<Vec<File>>,
}

/// What it is about that QEMU has said.
type Said = Result<(), String>;

impl QemuJob {
    pub(super) fn new(monitor: Monitor, scratch: Option<&Path>) -> QemuJob {
        let run = format!("{OURS}{:0RUN$x}-", Uuid::new_v4().as_fields().0);
        let socket = monitor.runs.join(format!("{}{SOCKET}", run.trim_end_matches('-')));
        let scratch = scratch.unwrap_or(&monitor.scratch).to_path_buf();
        QemuJob { monitor, run, socket, scratch, files: Mutex::default() }
    }

    fn connect(&self) -> Result<Qmp, Failure> {
        self.monitor.connect()?.ok_or_else(|| super::nobody(&self.monitor.socket))
    }

    /// True if a thing of this name belongs to a run that is meant.
    fn is_meant(&self, which: Which, name: &str) -> bool {
        match which {
            Which::Own => name.starts_with(&self.run),
            Which::Ours => is_ours(name),
        }
    }

    /// Makes what shows the disks, up to the moment.
    fn prepare(&self, qmp: &mut Qmp, disks: &[(&Part, &Node)]) -> Result<Said, Failure> {
        for (at, (_, node)) in disks.iter().enumerate() {
            if let Err(why) = self.add_scratch(qmp, at, node)? {
                return Ok(Err(why));
            }
        }
        Ok(Ok(()))
    }

    /// Adds an overlay of a disk, with a scratch file.
    fn add_scratch(&self, qmp: &mut Qmp, at: usize, node: &Node) -> Result<Said, Failure> {
        let failed = |error: io::Error| {
            Failure::failed(format!("cannot make a scratch file in {}: {error}", self.scratch.display()))
        };
        device::Dir::open(&self.scratch).map_err(failed)?;
        let file = tempfile::tempfile_in(&self.scratch).map_err(failed)?;
        let (name, overlay, job) =
            (format!("{}f{at}", self.run), format!("{}s{at}", self.run), format!("{}c{at}", self.run));
        if let Err(why) = self.open_scratch(qmp, &file, &name)? {
            return Ok(Err(why));
        }
        self.files().push(file);
        let image =
            json!({ "job-id": job, "options": { "driver": "qcow2", "file": name, "size": node.size } });
        if let Err(why) = qmp.ask("blockdev-create", image)? {
            return Ok(Err(why));
        }
        let began = Instant::now();
        loop {
            let jobs = qmp.tell("query-jobs", json!({}))?;
            let own = jobs.as_array().into_iter().flatten().find(|found| found["id"] == job.as_str());
            let Some(own) = own else {
                return Ok(Err("the job that formats the scratch file is gone".into()));
            };
            if own["status"] == "concluded" {
                if let Some(why) = own["error"].as_str() {
                    return Ok(Err(why.to_owned()));
                }
                break;
            }
            if began.elapsed() > ENDS_WITHIN {
                return Ok(Err("the scratch file is not formatted in time".into()));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        qmp.tell("job-dismiss", json!({ "id": job }))?;
        let overlay = json!({ "driver": "qcow2", "node-name": overlay, "file": name, "backing": node.name });
        Ok(qmp.ask("blockdev-add", overlay)?.map(|_| ()))
    }

    /// Has QEMU open a scratch file as a node of this name.
    fn open_scratch(&self, qmp: &mut Qmp, file: &File, name: &str) -> Result<Said, Failure> {
        let open = |qmp: &mut Qmp, path: String| {
            qmp.ask("blockdev-add", json!({ "driver": "file", "node-name": name, "filename": path }))
        };
        let why = match open(qmp, format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))? {
            Ok(_) if OpenImages::of(qmp.pid).is_ok_and(|images| images.has(file)) => return Ok(Ok(())),
            // In a container, the numbers are those of other processes.
            Ok(_) => {
                qmp.tell("blockdev-del", json!({ "node-name": name }))?;
                "its QEMU does not see this process".to_owned()
            }
            Err(why) => why,
        };
        // Another user's may not look into this process. What it is given it gives back only while the VM runs.
        if qmp.tell("query-status", json!({}))?["running"] != true {
            return Ok(Err(format!(
                "{why}, and the VM stands still: run this as the user of its QEMU, or once it goes on"
            )));
        }
        let set = match qmp.hand_over("add-fd", json!({ "opaque": self.run }), file)? {
            Ok(set) => set["fdset-id"].clone(),
            Err(why) => return Ok(Err(why)),
        };
        Ok(open(qmp, format!("/dev/fdset/{set}"))?.map(|_| ()))
    }

    fn files(&self) -> MutexGuard<'_, Vec<File>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the checkpoint, stops the writes, and takes what was recorded, as one.
    fn take(&self, qmp: &mut Qmp, disks: &[(&Part, &Node)], checkpoint: &str) -> Result<Said, Failure> {
        let (mut begins, mut stops, mut takes) = (Vec::new(), Vec::new(), Vec::new());
        let act = |kind: &str, data: Value| json!({ "type": kind, "data": data });
        for (at, (part, node)) in disks.iter().enumerate() {
            let (overlay, block) = (format!("{}s{at}", self.run), block_of(node.size));
            begins.push(act(
                "block-dirty-bitmap-add",
                json!({ "node": node.name, "name": checkpoint, "granularity": block }),
            ));
            stops.push(act(
                "blockdev-backup",
                json!({
                    "job-id": format!("{}j{at}", self.run), "filter-node-name": format!("{}b{at}", self.run),
                    "device": node.name, "target": overlay, "sync": "none",
                }),
            ));
            if let Ok(Basis::Checkpoint(since)) = &part.since {
                let taken = shown_as(&part.target);
                begins.push(act(
                    "block-dirty-bitmap-add",
                    json!({ "node": overlay, "name": taken, "granularity": block, "disabled": true }),
                ));
                takes.push(act(
                    "block-dirty-bitmap-merge",
                    json!({ "node": overlay, "target": taken, "bitmaps": [{ "node": node.name, "name": since }] }),
                ));
            }
        }
        let actions = [begins, stops, takes].concat();
        Ok(qmp.ask("transaction", json!({ "actions": actions }))?.map(|_| ()))
    }

    /// Exports the overlays at a socket of our own.
    fn export(&self, qmp: &mut Qmp, disks: &[(&Part, &Node)]) -> Result<Said, Failure> {
        let failed = |error: io::Error| {
            Failure::failed(format!("cannot listen at {}: {error}", self.socket.display()))
        };
        device::Dir::open(&self.monitor.runs).map_err(failed)?;
        // It is QEMU that listens: whoever finds somebody there knows that the server is ours.
        let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
        let socket = socket_with(kind.0, kind.1, kind.2, None).map_err(io::Error::from).map_err(failed)?;
        let bound = SocketAddrUnix::new(&self.socket).and_then(|address| bind(&socket, &address));
        bound.map_err(io::Error::from).map_err(failed)?;
        let named = json!({ "fdname": self.run });
        if let Err(why) = qmp.hand_over("getfd", named, &socket)? {
            return Ok(Err(why));
        }
        let server = json!({ "addr": { "type": "fd", "data": { "str": self.run } } });
        if let Err(why) = qmp.ask("nbd-server-start", server)? {
            return Ok(Err(why));
        }
        for (at, (part, _)) in disks.iter().enumerate() {
            let bitmaps: Vec<_> = part.has_bitmap().then(|| shown_as(&part.target)).into_iter().collect();
            let export = json!({
                "type": "nbd", "id": format!("{}e{at}", self.run), "node-name": format!("{}s{at}", self.run),
                "name": part.target, "bitmaps": bitmaps,
            });
            if let Err(why) = qmp.ask("block-export-add", export)? {
                return Ok(Err(why));
            }
        }
        Ok(Ok(()))
    }

    /// Refuses to begin beside the job, or the server, of another program.
    fn refuse_foreign(&self, qmp: &mut Qmp) -> Result<(), Failure> {
        let exports = names(&qmp.tell("query-block-exports", json!({}))?, "id");
        let jobs = names(&qmp.tell("query-block-jobs", json!({}))?, "device");
        let busy = |what: &str, name: &str, way: &str| {
            Failure::busy(format!(
                "{what} \"{name}\" of another program is at work in the QEMU at {}: wait for it, as --wait does, or end it with \"{way}\"",
                self.monitor.socket.display()
            ))
        };
        let foreign = |names: &[String]| names.iter().find(|name| !is_ours(name)).cloned();
        match (foreign(&jobs), foreign(&exports)) {
            (Some(job), _) => Err(busy("the block job", &job, "block-job-cancel")),
            (None, Some(export)) => Err(busy("the export", &export, "block-export-del")),
            (None, None) => Ok(()),
        }
    }

    /// The runs that have left something in a QEMU.
    fn runs_in(qmp: &mut Qmp) -> Result<BTreeSet<String>, Failure> {
        let nodes = qmp.tell("query-named-block-nodes", json!({ "flat": true }))?;
        let exports = qmp.tell("query-block-exports", json!({}))?;
        let all = names(&nodes, "node-name").into_iter().chain(names(&exports, "id"));
        Ok(all.filter_map(|name| run_of(&name).map(str::to_owned)).collect())
    }

    /// The sockets that are meant, of these runs.
    fn sockets(&self, which: Which, runs: &BTreeSet<String>) -> Result<BTreeSet<PathBuf>, Failure> {
        if which == Which::Own {
            return Ok([self.socket.clone()].into());
        }
        let run_at = |path: &Path| {
            let name = path.file_name()?.to_str()?.strip_suffix(SOCKET)?;
            run_of(&format!("{name}-")).map(str::to_owned)
        };
        // Those of a run with another state directory are elsewhere.
        let listed = listed_sockets()?.into_iter().map(|(path, _)| path);
        let known = listed.filter(|path| run_at(path).is_some_and(|run| runs.contains(&run)));
        let own =
            std::fs::read_dir(&self.monitor.runs).into_iter().flatten().flatten().map(|file| file.path());
        Ok(own.filter(|path| run_at(path).is_some()).chain(known).collect())
    }

    /// Asks for the end of all that is meant; true if nothing is left.
    fn dismantle(&self, qmp: &mut Qmp, which: Which) -> Result<bool, Failure> {
        let meant = |said: Value, key: &str| -> Vec<String> {
            names(&said, key).into_iter().filter(|name| self.is_meant(which, name)).collect()
        };
        let exports = meant(qmp.tell("query-block-exports", json!({}))?, "id");
        for export in &exports {
            let _ = qmp.ask("block-export-del", json!({ "id": export, "mode": "hard" }))?;
        }
        if !exports.is_empty() {
            return Ok(false);
        }
        let runs = Self::runs_in(qmp)?;
        for socket in &self.sockets(which, &runs)? {
            let (listens, connected) = users_of(socket)?;
            // A server that is stopped while a connection begins or ends takes the VM with it (CVE-2024-7409).
            if listens && connected > 0 {
                return Ok(false);
            }
            if listens {
                let _ = qmp.ask("nbd-server-stop", json!({}))?;
            } else {
                let run = socket.file_stem().unwrap_or_default().to_string_lossy();
                let _ = qmp.ask("closefd", json!({ "fdname": format!("{run}-") }))?;
            }
            let _ = std::fs::remove_file(socket);
        }
        let jobs = meant(qmp.tell("query-jobs", json!({}))?, "id");
        for job in &jobs {
            if qmp.ask("block-job-cancel", json!({ "device": job, "force": true }))?.is_err() {
                let _ = qmp.ask("job-dismiss", json!({ "id": job }))?;
            }
        }
        if !jobs.is_empty() {
            return Ok(false);
        }
        let nodes = qmp.tell("query-named-block-nodes", json!({ "flat": true }))?;
        let mut nodes = meant(nodes, "node-name");
        // The overlays before the files beneath them.
        nodes.sort_by_key(|name| !name[self.run.len().min(name.len())..].starts_with('s'));
        let mut is_gone = true;
        for node in &nodes {
            is_gone &= qmp.ask("blockdev-del", json!({ "node-name": node }))?.is_ok();
        }
        let sets = qmp.tell("query-fdsets", json!({}))?;
        for set in sets.as_array().into_iter().flatten() {
            let ours = names(&set["fds"], "opaque").iter().any(|name| self.is_meant(which, name));
            if ours && is_gone {
                let _ = qmp.ask("remove-fd", json!({ "fdset-id": set["fdset-id"] }))?;
            }
        }
        Ok(is_gone)
    }
}

impl Backup for QemuJob {
    fn is_left(&self) -> Result<bool, Failure> {
        let mut qmp = self.connect()?;
        self.refuse_foreign(&mut qmp)?;
        let runs = Self::runs_in(&mut qmp)?;
        let sockets = self.sockets(Which::Ours, &runs)?;
        for socket in sockets.iter().filter(|socket| socket.parent() != Some(&*self.monitor.runs)) {
            // With a folder of its own, it does not see our lock.
            if users_of(socket)?.1 > 0 {
                return Err(Failure::busy(format!(
                    "the VM of the QEMU at {} is synced or verified already, by another dsync (at {}): wait for it, as --wait does",
                    self.monitor.socket.display(),
                    socket.display()
                )));
            }
        }
        Ok(!runs.is_empty() || !sockets.is_empty())
    }

    fn begin(&self, parts: &[Part], checkpoint: &str) -> Result<Result<(), String>, Failure> {
        let mut qmp = self.connect()?;
        let nodes = disks::nodes(&self.monitor.blocks(&mut qmp)?);
        let mut shown = Vec::new();
        for part in parts {
            let Some(node) = nodes.iter().find(|node| node.target == part.target) else {
                return Err(Failure::busy(format!(
                    "the disk {} was removed meanwhile: run it again",
                    part.target
                )));
            };
            if let Ok(Basis::Checkpoint(since)) = &part.since
                && !node.bitmaps.contains(since)
            {
                return Ok(Err(format!("'{}' has no bitmap {since} that records", part.target)));
            }
            shown.push((part, node));
        }
        // All of it is ended where a step of it fails: by the caller, or by the next run.
        self.files().clear();
        let mut begun = self.prepare(&mut qmp, &shown)?;
        if begun.is_ok() {
            begun = self.take(&mut qmp, &shown, checkpoint)?;
        }
        if begun.is_ok() {
            begun = self.export(&mut qmp, &shown)?;
        }
        if let Err(why) = begun {
            drop(qmp);
            self.end(Which::Own)?;
            return Err(Failure::failed(format!(
                "the QEMU at {} begins no backup job: {why}",
                self.monitor.socket.display()
            )));
        }
        Ok(Ok(()))
    }

    fn end(&self, which: Which) -> Result<(), Failure> {
        let began = Instant::now();
        let Some(mut qmp) = self.monitor.connect()? else {
            let sockets = self.sockets(which, &BTreeSet::new())?;
            sockets.iter().for_each(|socket| drop(std::fs::remove_file(socket)));
            return Ok(());
        };
        while !self.dismantle(&mut qmp, which)? {
            if began.elapsed() > ENDS_WITHIN {
                return Err(Failure::failed(format!(
                    "the backup job in the QEMU at {} does not end: \"query-jobs\" and \"query-block-exports\" at its monitor show it, as {}",
                    self.monitor.socket.display(),
                    self.run
                )));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    fn is_on(&self) -> Result<bool, Failure> {
        let mut qmp = self.connect()?;
        let own = |said: &Value, key: &str| {
            names(said, key).iter().filter(|name| name.starts_with(&self.run)).count()
        };
        let jobs = own(&qmp.tell("query-block-jobs", json!({}))?, "device");
        let exports = own(&qmp.tell("query-block-exports", json!({}))?, "id");
        let shown = self.files().len();
        if super::has_moved(&qmp.tell("query-status", json!({}))?) {
            return Ok(false);
        }
        Ok(jobs == shown && exports == shown)
    }

    fn socket(&self) -> PathBuf {
        self.socket.clone()
    }
}

/// True if somebody listens at a socket of ours, which is nobody but a QEMU whose server has not ended; and how many are connected there. It is not
/// tried, but asked of the kernel.
fn users_of(socket: &Path) -> Result<(bool, usize), Failure> {
    let sockets = listed_sockets()?;
    let users = sockets.iter().filter(|(path, _)| path == socket);
    let (listening, connected): (Vec<_>, Vec<_>) = users.partition(|(_, listens)| *listens);
    Ok((!listening.is_empty(), connected.len()))
}

/// The sockets of this network namespace that have a path, each with whether somebody listens there.
fn listed_sockets() -> Result<Vec<(PathBuf, bool)>, Failure> {
    let failed = |error| Failure::failed(format!("cannot read {UNIX_SOCKETS}: {error}"));
    let text = std::fs::read(UNIX_SOCKETS).map_err(failed)?;
    let text = String::from_utf8_lossy(&text);
    let socket = |line: &str| {
        // Number, users, protocol, flags, type, state, inode, path.
        let at = line.find(" /")? + 1;
        let flags = line[..at].split_whitespace().nth(3)?;
        Some((PathBuf::from(&line[at..]), flags == LISTENS))
    };
    Ok(text.lines().filter_map(socket).collect())
}

/// True if a name is that of a thing that a run has made.
pub(super) fn is_ours(name: &str) -> bool {
    run_of(name).is_some()
}

/// The run that has made a thing of this name.
fn run_of(name: &str) -> Option<&str> {
    let (run, _) = name.strip_prefix(OURS)?.split_once('-')?;
    (run.len() == RUN && run.chars().all(|c| c.is_ascii_hexdigit())).then_some(run)
}

/// What the things of a list are called under this key.
fn names(list: &Value, key: &str) -> Vec<String> {
    let things = list.as_array().into_iter().flatten();
    things.filter_map(|thing| Some(thing[key].as_str()?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ours_is_known_by_its_name() {
        for ours in ["dsync-0123abcd-s0", "dsync-0123abcd-", "dsync-ffffffff-j12"] {
            assert!(is_ours(ours), "{ours}");
        }
        // The last is a checkpoint.
        for other in ["dsync-0123abcd", "dsync-mine-s0", "mine", "", "dsync-2026-11-27T024501.000000042"] {
            assert!(!is_ours(other), "{other}");
        }
    }

    #[test]
    fn who_uses_a_socket_is_known_without_a_connection() {
        let temp = tempfile::tempdir().unwrap();
        let socket = temp.path().join("a b.sock");
        let users = || users_of(&socket).unwrap();
        assert_eq!(users(), (false, 0));
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(users(), (true, 0));
        let client = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        let (server, _) = listener.accept().unwrap();
        assert_eq!(users(), (true, 1));
        assert_eq!(users_of(&temp.path().join("b.sock")).unwrap(), (false, 0));
        drop((client, server, listener));
        assert_eq!(users(), (false, 0));
    }
}
