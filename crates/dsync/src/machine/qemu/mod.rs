//! Machines that QEMU alone runs, which is asked at its monitor (`qemu:SOCKET`).
//!
//! - *A checkpoint* is a bitmap of its name on the node of each disk. It lives as long as the QEMU does, and is in no image: of one that was started
//!   since nothing is known, and all is compared.
//! - *A machine is off* when nobody listens at its monitor. Which disks it has is known then from its last sync.

mod backup;
mod disks;
pub(super) mod process;
mod qmp;

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use source::StateDir;

use super::carry;
use super::definition::{Definition, QemuDefinition};
use super::domain::{Domain, Image};
use super::hypervisor::{Backup, Hypervisor, closes_safely};
use super::made::Made;
use super::part::OURS;
use crate::failure::Failure;
use crate::terms::machine_name;
use backup::QemuJob;
use qmp::Qmp;

/// A machine at the monitor of its QEMU.
#[derive(Clone)]
pub(super) struct Monitor {
    socket: PathBuf,
    /// As it was at its last sync.
    kept: Option<QemuDefinition>,
    /// Where the sockets of its backup jobs are.
    runs: PathBuf,
    /// Where what is overwritten during a backup is kept, if its user does not say.
    scratch: PathBuf,
}

/// The machine at a monitor, with its plain name. While it is off, that of this name is meant.
///
/// # Errors
/// If nobody listens there and none was synced from there, and if another one was synced under its name.
pub(super) fn at(
    socket: &Path,
    meant: Option<&str>,
    state: &StateDir,
) -> Result<(Monitor, Domain, String), Failure> {
    let failed =
        |error: io::Error| Failure::usage(format!("qemu:{} names no path: {error}", socket.display()));
    let socket = std::path::absolute(socket).map_err(failed)?;
    let known = machine_name::definitions::<QemuDefinition>(state);
    let mut monitor = Monitor {
        socket: socket.clone(),
        kept: None,
        runs: PathBuf::new(),
        scratch: state.machines_folder(),
    };
    let Some(mut qmp) = Qmp::connect(&socket)? else {
        let is_it = |plain: &str, kept: &QemuDefinition| {
            kept.monitor == socket && meant.is_none_or(|meant| meant == plain)
        };
        let mut found = known.into_iter().filter(|(plain, kept)| is_it(plain, kept));
        let (Some((plain, kept)), None) = (found.next(), found.next()) else {
            return Err(nobody(&socket));
        };
        let domain = kept.at_rest();
        monitor.runs = super::place_of(&machine_name::group(&plain), state);
        monitor.kept = Some(kept);
        return Ok((monitor, domain, plain));
    };
    let domain = monitor.look_at(&mut qmp)?;
    let plain = machine_name::plain(&domain.name, &domain.uuid);
    let [xml, ..] = carry::files(state, &plain);
    monitor.kept = known.into_iter().find(|(known, _)| *known == plain).map(|(_, kept)| kept);
    // In the same QEMU the images of all disks may be others by now.
    let is_in = domain.id.as_deref().is_some_and(|qemu| Made::of(state, &plain).is_in(qemu));
    let is_other = |kept: &QemuDefinition| !(is_in || kept.disks.is_empty() || kept.has_any_of(&domain));
    if xml.exists() || monitor.kept.as_ref().is_some_and(is_other) {
        return Err(Failure::refused(format!(
            "another VM was synced as {0} from this host: give this one a name of its own (\"qemu -name NAME\"), or forget that one with \"dsync forget vm:{0}\"",
            domain.name
        )));
    }
    monitor.runs = super::place_of(&machine_name::group(&plain), state);
    Ok((monitor, domain, plain))
}

fn nobody(socket: &Path) -> Failure {
    let is_other = |found: std::fs::Metadata| {
        use std::os::unix::fs::FileTypeExt;
        !found.file_type().is_socket()
    };
    if socket.metadata().is_ok_and(is_other) {
        return Failure::usage(format!(
            "{0} is not the socket of a monitor. What is at {0} on a host that is called qemu is ssh://qemu{0}",
            socket.display()
        ));
    }
    Failure::failed(format!(
        "no QEMU listens at {0}: start the VM with -qmp unix:{0},server=on,wait=off",
        socket.display()
    ))
}

impl Monitor {
    /// Connects; `None` while the machine is off.
    fn connect(&self) -> Result<Option<Qmp>, Failure> {
        Qmp::connect(&self.socket)
    }

    /// The machine as it runs.
    fn look_at(&self, qmp: &mut Qmp) -> Result<Domain, Failure> {
        let unread = |error: io::Error| {
            Failure::failed(format!(
                "cannot look at the process of the QEMU at {}: {error}",
                self.socket.display()
            ))
        };
        let id = process::process_id(qmp.pid).map_err(unread)?;
        self.refuse_migrated(qmp)?;
        let images = process::OpenImages::of(qmp.pid).map_err(unread)?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let named = text(&qmp.tell("query-name", json!({}))?["name"]).filter(|name| !name.is_empty());
        let stem = || self.socket.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let uuid = text(&qmp.tell("query-uuid", json!({}))?["UUID"]).unwrap_or_default();
        let blocks = self.blocks(qmp)?;
        // Of a QEMU that was built without it there is none.
        let tpms = qmp.ask("query-tpm", json!({}))?.unwrap_or_default();
        let has_tpm = tpms.as_array().is_some_and(|tpms| !tpms.is_empty());
        let disks = disks::disks(&blocks, |name| images.path(name));
        let mut names = BTreeSet::new();
        if let Some(twice) = disks.iter().find(|disk| !names.insert(&disk.target)) {
            return Err(Failure::refused(format!(
                "two disks of the QEMU at {} are called {}: give each device an id of its own",
                self.socket.display(),
                twice.target
            )));
        }
        Ok(Domain {
            name: named.unwrap_or_else(stem),
            uuid,
            id: Some(id),
            disks,
            nvram: None,
            tpm: None,
            also: has_tpm.then_some("the state of its TPM").into_iter().collect(),
        })
    }

    /// Refuses a QEMU whose disks another one has, or will have: what that writes is in no bitmap of this one.
    fn refuse_migrated(&self, qmp: &mut Qmp) -> Result<(), Failure> {
        let status = qmp.tell("query-status", json!({}))?;
        if has_moved(&status) {
            return Err(Failure::refused(format!(
                "the VM of the QEMU at {} runs in another one ({}), where it was migrated to, or comes from: run this on the host of that, by its monitor",
                self.socket.display(),
                status["status"].as_str().unwrap_or_default()
            )));
        }
        let migration = qmp.tell("query-migrate", json!({}))?;
        let ended = ["none", "completed", "failed", "cancelled"];
        match migration["status"].as_str().filter(|status| !ended.contains(status)) {
            Some(_) => Err(Failure::busy(format!(
                "the VM of the QEMU at {} is being migrated: wait for that, as --wait does",
                self.socket.display()
            ))),
            None => Ok(()),
        }
    }

    /// What QEMU says of the disks, as they are without a job of ours.
    fn blocks(&self, qmp: &mut Qmp) -> Result<Value, Failure> {
        let blocks = qmp.tell("query-block", json!({}))?;
        let filters = disks::filters(&blocks);
        if let Some((_, disk)) = filters.iter().find(|(name, _)| !backup::is_ours(name)) {
            return Err(Failure::busy(format!(
                "a block job of another program is at work on {disk} in the QEMU at {}: wait for it, as --wait does, or end it with \"block-job-cancel\"",
                self.socket.display()
            )));
        }
        if filters.is_empty() {
            return Ok(blocks);
        }
        Ok(disks::without_filters(blocks, &qmp.tell("query-named-block-nodes", json!({}))?))
    }

    /// Each node that has checkpoints of ours, with their names.
    fn bitmaps(qmp: &mut Qmp) -> Result<Vec<(String, Vec<String>)>, Failure> {
        let nodes = qmp.tell("query-named-block-nodes", json!({ "flat": true }))?;
        let nodes = nodes.as_array().into_iter().flatten();
        let node = |node: &Value| {
            let bitmaps = node["dirty-bitmaps"].as_array().into_iter().flatten();
            let names = bitmaps.filter_map(|bitmap| bitmap["name"].as_str());
            let names = names.filter(|name| name.starts_with(OURS)).map(str::to_owned).collect();
            Some((node["node-name"].as_str()?.to_owned(), names))
        };
        Ok(nodes.filter_map(node).collect())
    }
}

/// True if another QEMU has the disks of one with this status, or will have them.
fn has_moved(status: &Value) -> bool {
    matches!(status["status"].as_str(), Some("postmigrate" | "finish-migrate" | "inmigrate"))
}

/// True if a device, or the controller that it is at, has an I/O thread.
fn has_thread(qmp: &mut Qmp, device: &str) -> Result<bool, Failure> {
    let mut property = |path: &str, name: &str| {
        let said = qmp.ask("qom-get", json!({ "path": path, "property": name }))?;
        Ok(said.ok().and_then(|value| value.as_str().map(str::to_owned)).filter(|value| !value.is_empty()))
    };
    if property(device, "iothread")?.is_some() {
        return Ok(true);
    }
    let bus = property(device, "parent_bus")?;
    let Some((controller, _)) = bus.as_deref().and_then(|bus| bus.rsplit_once('/')) else { return Ok(false) };
    Ok(property(controller, "iothread")?.is_some())
}

impl Hypervisor for Monitor {
    fn look(&self) -> Result<Domain, Failure> {
        match (self.connect()?, &self.kept) {
            (Some(mut qmp), _) => self.look_at(&mut qmp),
            (None, Some(kept)) => Ok(kept.at_rest()),
            (None, None) => Err(nobody(&self.socket)),
        }
    }

    fn definition(&self) -> Result<Definition, Failure> {
        let Some(mut qmp) = self.connect()? else {
            let kept = self.kept.clone().ok_or_else(|| nobody(&self.socket))?;
            return Ok(Definition::Qemu(kept.without_replicas()));
        };
        let domain = self.look_at(&mut qmp)?;
        let (command_line, folder) = process::command_line(qmp.pid).map_err(|error| {
            Failure::failed(format!("cannot read the command line of {}: {error}", domain.name))
        })?;
        Ok(Definition::Qemu(QemuDefinition {
            disks: QemuDefinition::disks_of(&domain),
            others: QemuDefinition::others_of(&domain),
            name: domain.name,
            uuid: domain.uuid,
            monitor: self.socket.clone(),
            command_line,
            // For people: JSON has no other bytes.
            folder: folder.to_string_lossy().into_owned().into(),
        }))
    }

    fn stopped(&self) -> Result<Option<(String, String)>, Failure> {
        let Some(mut qmp) = self.connect()? else { return Ok(None) };
        let status = qmp.tell("query-status", json!({}))?;
        let way = format!("have it go on with \"cont\" at its monitor {}", self.socket.display());
        Ok((status["status"] == "io-error").then(|| ("paused (I/O error)".into(), way)))
    }

    fn checkpoints(&self) -> Result<Vec<String>, Failure> {
        let Some(mut qmp) = self.connect()? else { return Ok(Vec::new()) };
        let names = Monitor::bitmaps(&mut qmp)?.into_iter().flat_map(|(_, names)| names);
        Ok(names.collect::<BTreeSet<_>>().into_iter().collect())
    }

    fn created(&self, checkpoint: &str) -> Result<Option<String>, Failure> {
        let Some(mut qmp) = self.connect()? else { return Ok(None) };
        let is_there =
            Monitor::bitmaps(&mut qmp)?.iter().any(|(_, names)| names.iter().any(|n| n == checkpoint));
        // None of its name was there before: it ends with the QEMU.
        Ok(if is_there { process::process_id(qmp.pid).ok() } else { None })
    }

    fn delete_checkpoint(&self, name: &str) -> Result<Result<(), String>, Failure> {
        let Some(mut qmp) = self.connect()? else { return Ok(Ok(())) };
        for (node, names) in Monitor::bitmaps(&mut qmp)? {
            if names.iter().any(|known| known == name) {
                let bitmap = json!({ "node": node, "name": name });
                if let Err(why) = qmp.ask("block-dirty-bitmap-remove", bitmap)? {
                    return Ok(Err(why));
                }
            }
        }
        Ok(Ok(()))
    }

    fn deletion(&self, name: &str) -> String {
        format!("\"block-dirty-bitmap-remove\" of {name} at its monitor {}", self.socket.display())
    }

    fn cannot_follow(&self, _image: &Image) -> Option<&'static str> {
        None
    }

    fn qemu(&self, domain: &Domain) -> Option<String> {
        domain.id.clone()
    }

    fn endangered(&self) -> Result<Vec<String>, Failure> {
        let Some(mut qmp) = self.connect()? else { return Ok(Vec::new()) };
        let threads = qmp.tell("query-iothreads", json!({}))?;
        let has_threads = threads.as_array().is_some_and(|threads| !threads.is_empty());
        if !has_threads || closes_safely(&qmp.tell("query-version", json!({}))?) {
            return Ok(Vec::new());
        }
        let blocks = qmp.tell("query-block", json!({}))?;
        let mut endangered = Vec::new();
        for (target, device) in disks::devices(&blocks) {
            if has_thread(&mut qmp, &device)? {
                endangered.push(target);
            }
        }
        Ok(endangered)
    }

    fn backup(&self, _domain: &Domain, scratch: Option<&Path>) -> Result<Box<dyn Backup>, Failure> {
        Ok(Box::new(QemuJob::new(self.clone(), scratch)))
    }

    fn rests(&self) -> Option<String> {
        let disks = self.kept.iter().flat_map(|kept| kept.disks.values());
        let disks: Vec<_> = disks.map(|disk| disk.path.display().to_string()).collect();
        Some(format!(
            "its disks are those of its last sync, {}. A snapshot that was made since is not seen",
            disks.join(", ")
        ))
    }

    fn list(&self) -> String {
        match self.kept.as_ref().filter(|_| Qmp::connect(&self.socket).is_ok_and(|qmp| qmp.is_none())) {
            Some(kept) => format!("the definition of {}, which was carried at its last sync,", kept.name),
            None => format!("\"query-block\" at its monitor {}", self.socket.display()),
        }
    }

    fn merge(&self) -> &'static str {
        "\"block-commit\""
    }
}
