//! `dsync rehearse vm:NAME DIR`: a VM is booted from its replicas as they were at one moment, without its networks, while syncs go on beneath.
//!
//! ```text
//!     replicas at a moment ──▶ exports with scratch files ──▶ a VM of another name ──▶ its user, or --check ──▶ all of it is thrown away
//! ```
//!
//! The VM lives as long as the virsh that has started it, and that ends with its input: where this process is killed, a folder of some KiB is left.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use device::Disk;
use nbd::{Export, ExportInfo, ExportRefusal, Exports};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use source::{StateDir, export_name};
use uuid::Uuid;

use super::define::{CarriedFiles, DiskPlace, with_images};
use super::hypervisor::patience;
use super::libvirt::virsh::{self, Virsh};
use super::libvirt::xml;
use super::rehearsed::alone;
use crate::args;
use crate::commands::rehearsal::{self, Rehearsal, Writes};
use crate::failure::Failure;
use crate::jobs::hook::UserCommand;
use crate::output::Output;
use crate::reach::location;
use crate::terms::machine_name::{self, MachineWord};
use crate::terms::units;
use crate::unix_socket;

/// How often it is looked whether it is to end.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long clients may take to finish when the server stops.
const PATIENCE: Duration = Duration::from_secs(10);
/// The largest definition or NVRAM that is read.
const CARRIED_MAX: u64 = 64 << 20;

/// What a rehearsal was, as a line of JSON.
#[derive(Serialize)]
struct RehearsalSummary<'a> {
    kind: &'static str,
    machine: &'a str,
    /// The name of the VM that ran.
    vm: &'a str,
    /// When its disks were as they are shown, in seconds since 1970.
    at: Option<u64>,
    /// What it had not, that the machine has.
    left_out: Vec<String>,
    /// Why it ended.
    ended: RehearsalEnd,
    /// Bytes that its writes took.
    bytes_written: u64,
    seconds: f64,
}

/// Why a rehearsal ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum RehearsalEnd {
    /// By a signal.
    Stopped,
    /// The time of `--for` was over.
    TimeOver,
    /// The VM was shut down, or its QEMU has ended.
    Off,
    /// The command of `--check` has ended well.
    Checked,
    /// It has not.
    CheckFailed,
}

/// Runs the command.
pub(crate) fn rehearse(args: &args::Rehearse, state: &StateDir, output: &Output) -> Result<()> {
    let (machine, moment) = machine_and_moment(&args.source)?;
    location::refuse_host(&args.destination, "rehearse")?;
    let group = folder_of_group(machine, &args.destination)?;
    let writes = Writes::Scratch(args.overlay.as_deref());
    let shown = rehearsal::open_group(&group, moment, writes, state, output)?;
    let mut vm = BootedVm::boot(&shown, &args.destination)?;
    let at = shown.first().and_then(|(_, disk)| disk.at());
    let moment = at.map_or_else(String::new, |at| format!(" of {}", device::moment(at)));
    let left_out: Vec<String> = vm.left_out.clone();
    if !left_out.is_empty() {
        output.say(&format!("left out: {}", left_out.join(", ")));
    }
    output.ready(&format!(
        "{} runs from the replicas{moment}, without its networks: \"virsh console {0}\" or a viewer shows it. What it writes is thrown away when it ends, by \
         Ctrl-C here or by a shutdown in it",
        vm.name
    ));
    let watch = rehearsal::Watch::start(shown.iter().map(|(_, disk)| disk.clone()).collect(), output)?;
    let began = Instant::now();
    let checked = vm.attend(args, output);
    let seconds = began.elapsed().as_secs_f64();
    let bytes_written = shown.iter().map(|(_, disk)| disk.taken()).sum();
    let name = vm.name.clone();
    vm.end()?;
    watch.end()?;
    let (ended, said) = checked?;
    output.say(&match ended {
        RehearsalEnd::Off => format!("{name} has ended by itself: {} written", units::size(bytes_written)),
        _ => format!(
            "{name} was ended after {}: {} written",
            units::seconds(seconds),
            units::size(bytes_written)
        ),
    });
    output.summary(&RehearsalSummary {
        kind: "rehearsal",
        machine,
        vm: &name,
        at,
        left_out,
        ended,
        bytes_written,
        seconds,
    });
    match (ended, &args.check) {
        (RehearsalEnd::CheckFailed, Some(check)) => {
            Err(Failure::failed(format!("--check \"{check}\" {said}")).into())
        }
        (RehearsalEnd::Checked, _) | (_, None) => Ok(()),
        (RehearsalEnd::Off, Some(_)) => {
            Err(Failure::failed(format!("{name} ended before its --check did")).into())
        }
        (RehearsalEnd::TimeOver, Some(check)) => {
            Err(Failure::failed(format!("--check \"{check}\" has not ended within the time of --for{said}"))
                .into())
        }
        (_, Some(_)) => Err(Failure::interrupted("interrupted before --check has ended").into()),
    }
}

/// The machine and the moment of `vm:NAME[@MOMENT]`.
fn machine_and_moment(word: &str) -> Result<(&str, &str), Failure> {
    let named = MachineWord::read(word);
    let machine = if let Some(MachineWord::Name(name)) = named { Some(name) } else { None };
    let machine = machine.ok_or_else(|| {
        Failure::usage(format!(
            "{word} is not vm:NAME, the name of a VM that was synced by \"dsync sync vm:NAME DIR\""
        ))
    })?;
    Ok(machine
        .rsplit_once('@')
        .filter(|(name, moment)| !name.is_empty() && !moment.is_empty())
        .unwrap_or((machine, "now")))
}

/// The folder of the group of a machine whose replicas are in this folder.
fn folder_of_group(machine: &str, folder: &Path) -> Result<PathBuf> {
    let names = replica::groups_in(folder)?;
    let mut of_machine = names.iter().filter(|name| {
        machine_name::is_group_of(machine, name) || machine_name::of_group(name) == Some(machine)
    });
    let refused = |what: String| Failure::refused(format!("{} {what}", folder.display()));
    match (of_machine.next(), of_machine.next()) {
        (Some(name), None) => Ok(replica::ReplicaMembership::folder_in(folder, name)),
        (Some(_), Some(_)) => Err(refused(format!(
            "has several VMs that are called {machine}: name one as its files there begin, such as vm:{machine}-0123abcd"
        ))
        .into()),
        (None, _) => {
            let all: Vec<&str> = names.iter().filter_map(|name| machine_name::of_group(name)).collect();
            let has = if all.is_empty() { "no VM".to_owned() } else { all.join(", ") };
            Err(refused(format!("has no replicas of a VM {machine}: it has {has}, and \"dsync sync vm:{machine} DIR\" makes them")).into())
        }
    }
}

/// The disks of a VM, by their names.
struct RehearsedDisks(Vec<(String, Arc<dyn Disk>)>);

impl Exports for RehearsedDisks {
    fn list(&self) -> Vec<ExportInfo> {
        let told = |(name, _): &(String, _)| ExportInfo { name: name.clone(), description: String::new() };
        self.0.iter().map(told).collect()
    }

    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        let disk = self.0.iter().find(|(of, _)| of == name);
        let (_, disk) = disk.ok_or_else(|| ExportRefusal::unknown(format!("no export \"{name}\"")))?;
        Ok(Export::new(name, disk.clone()))
    }
}

/// A VM that runs from exports of this process.
struct BootedVm {
    /// As libvirt calls it.
    name: String,
    vm: Virsh,
    left_out: Vec<String>,
    /// What ends it.
    signals: Signals,
    virsh: Child,
    server: nbd::Server,
    /// The socket of the server, the definition and the NVRAM.
    folder: tempfile::TempDir,
}

impl BootedVm {
    /// Boots the machine whose replicas are shown. `dir` is their folder, as its user calls it.
    fn boot(shown: &[(PathBuf, Rehearsal)], dir: &Path) -> Result<BootedVm> {
        let files: Vec<String> = shown.iter().map(|(path, _)| source::file_name(path)).collect();
        let mut carried = CarriedFiles::among(&files).ok_or_else(|| {
            Failure::refused(format!("there is no definition of a VM at that moment in {}", dir.display()))
        })?;
        let disk_of = |file: &str| files.iter().position(|of| of == file).map(|at| &shown[at].1);
        let owner = virsh::owner_of_qemu();
        // Of a folder that others may pass, only the socket is for them: for the user of QEMU.
        let folder = tempfile::Builder::new().prefix("dsync-rehearsal-").tempdir()?;
        std::fs::set_permissions(folder.path(), Permissions::from_mode(0o711))?;
        let give = |path: &Path| match owner.filter(|_| rustix::process::geteuid().is_root()) {
            Some((uid, gid)) => chown(path, Some(uid), Some(gid))
                .with_context(|| format!("cannot give {} to QEMU", path.display())),
            None => Ok(()),
        };
        let socket = folder.path().join("disks.sock");
        // Without one that was carried, libvirt makes it there.
        let nvram = folder.path().join("nvram");
        if let Some(content) = carried.beside("nvram").and_then(disk_of) {
            super::carry::put(&nvram, &read(content)?)?;
            give(&nvram)?;
        }
        let definition = disk_of(carried.definition).map(read).transpose()?.unwrap_or_default();
        let text = String::from_utf8_lossy(&definition);
        carried.assign(&text);
        if let Some(disk) = carried.lacking() {
            let what =
                format!("{disk} was copied, and {} has no replica of it at that moment", dir.display());
            return Err(Failure::refused(what).into());
        }
        let unread = |why: String| {
            Failure::failed(format!("{} is not the definition of a VM: {why}", carried.definition))
        };
        let export =
            |target: &str| Some(DiskPlace::Export(&socket, export_name(carried.image(target)?.as_ref())));
        let defined = with_images(text.trim_end(), export, None).map_err(unread)?;
        let uuid = Uuid::new_v4();
        let name = format!("{}-rehearsal", xml::domain(&text)?.name);
        let alone = alone(&defined.text, (&name, uuid), &nvram, &defined.left).map_err(unread)?;
        let images = shown.iter().filter(|(path, _)| path.extension().is_some_and(|end| end == "img"));
        let disks = images.map(|(path, disk)| (export_name(path), disk.disk())).collect();
        let server = nbd::Server::new(Arc::new(RehearsedDisks(disks)));
        // Its file goes with the folder.
        let listener = device::listen_at(&socket, unix_socket::OWN)
            .with_context(|| format!("cannot listen on {}", socket.display()))?;
        give(&socket)?;
        server.serve_unix(listener)?;
        super::carry::put(&folder.path().join(DEFINITION), alone.text.as_bytes())?;
        if virsh::seek(&name)?.is_some() {
            return Err(Failure::busy(format!(
                "{name} runs already: end that rehearsal first, or \"virsh destroy {name}\""
            ))
            .into());
        }
        // By its UUID, so that no other VM of that name is taken for it.
        let vm = Virsh::of(&uuid.to_string());
        // Not before: while this waits for another rehearsal, a signal ends it at once.
        let signals = Signals::new([SIGINT, SIGTERM])?;
        let virsh = start(&name, &vm, folder.path())?;
        let left_out = alone.left_out.into_iter().collect();
        Ok(BootedVm { name, vm, left_out, signals, virsh, server, folder })
    }

    /// Waits for the end, and says why that has come, and what there is to say of a check.
    fn attend(&mut self, args: &args::Rehearse, output: &Output) -> Result<(RehearsalEnd, String)> {
        let began = Instant::now();
        let environment = [("DSYNC_VM", self.name.clone())];
        let check = args.check.as_deref().map(|check| UserCommand::start(check, &environment));
        let mut check = check.transpose().context("cannot start the command of --check")?;
        loop {
            if let Some(running) = &mut check {
                if let Some(status) = running.ended() {
                    let well = status.success();
                    let said =
                        if well { String::new() } else { format!("failed ({status}){}", running.output()) };
                    return Ok((if well { RehearsalEnd::Checked } else { RehearsalEnd::CheckFailed }, said));
                }
            }
            let condition = self.vm.condition();
            let ended = match &condition {
                _ if self.signals.pending().next().is_some() => Some(RehearsalEnd::Stopped),
                _ if args.lasts.is_some_and(|limit| began.elapsed() >= limit) => Some(RehearsalEnd::TimeOver),
                Err(_) if virsh::seek(&self.name).is_ok_and(|found| found.is_none()) => {
                    Some(RehearsalEnd::Off)
                }
                _ => None,
            };
            if let Some(ended) = ended {
                let said = check.map(|mut running| {
                    let said = running.output();
                    running.end(Duration::ZERO);
                    said
                });
                return Ok((ended, said.unwrap_or_default()));
            }
            if let Some(paused) = condition.ok().filter(|said| said.starts_with("paused")) {
                output.warn_once(&format!("{} does not run: it is {paused}", self.name));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Ends the VM, and then what it ran from.
    fn end(self) -> Result<()> {
        let BootedVm { vm, mut virsh, server, folder, .. } = self;
        // It may have ended by itself.
        let _ = vm.destroy()?;
        drop(virsh.stdin.take());
        virsh.wait()?;
        server.shutdown(PATIENCE);
        Ok(folder.close()?)
    }
}

/// The file of the definition.
const DEFINITION: &str = "vm.xml";

/// Starts a VM, by a virsh that is connected for as long as it lives.
fn start(name: &str, vm: &Virsh, folder: &Path) -> Result<Child> {
    let said = folder.join("said");
    let mut virsh = Command::new("virsh");
    virsh.env("LC_ALL", "C").current_dir(folder).process_group(0);
    virsh.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(File::create(&said)?);
    let mut virsh = virsh.spawn().map_err(|error| Failure::failed(format!("cannot start virsh: {error}")))?;
    if let Some(words) = &mut virsh.stdin {
        writeln!(words, "create {DEFINITION} --autodestroy")?;
    }
    let began = Instant::now();
    let why = loop {
        if vm.condition().is_ok_and(|condition| condition.starts_with("running")) {
            return Ok(virsh);
        }
        let said = std::fs::read_to_string(&said).unwrap_or_default();
        let lines = said.lines().map(|line| line.trim().trim_start_matches("error: "));
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        if !lines.is_empty() || virsh.try_wait()?.is_some() {
            break lines.join(": ");
        }
        if began.elapsed() > patience() {
            break "it does not answer".to_owned();
        }
        std::thread::sleep(LOOK_EVERY / 5);
    };
    let _ = virsh.kill();
    let _ = virsh.wait();
    Err(Failure::failed(format!("libvirt does not start {name}: {why}")).into())
}

/// All of a file that was carried with the disks.
fn read(of: &Rehearsal) -> Result<Vec<u8>> {
    let disk = of.disk();
    if disk.len() > CARRIED_MAX {
        return Err(
            Failure::refused(format!("{} is no definition or NVRAM: it is too large", of.moment())).into()
        );
    }
    let mut content = vec![0; disk.len() as usize];
    disk.read_at(0, &mut content).with_context(|| format!("cannot read {}", of.moment()))?;
    Ok(content)
}
