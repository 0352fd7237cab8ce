//! `vm:NAME`: a virtual machine with all its disks, as a group. libvirt runs it, or QEMU alone (`qemu:SOCKET`). Beneath it is nothing new: a sync is one conversation, and one commit of all
//! members.
//!
//! - While it *runs*, one backup job shows all disks as of one moment (`job.rs`), and tells of each disk what was written since the moment before, where
//!   a checkpoint of it is kept. Of a device that is tracked its tracker tells it. Any other disk is compared.
//! - While it is *off*, its disks are at rest, and locked, so that it does not start.
//! - Its *definition*, its NVRAM and the state of its TPM are members as well (`carry.rs`): read before and after the moment, and the same.

mod carry;
mod define;
mod definition;
mod domain;
mod forget;
mod hypervisor;
mod job;
mod libvirt;
mod made;
mod mirror;
mod part;
mod qemu;
mod rehearse;
mod rehearsed;
mod resting;
mod running;
mod verify;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use device::{Dir, FolderLock};
use serde::Serialize;
use source::{AtRest, Bookmarks, SourceMembership, SourceOptions, StateDir};
use sync::{GroupSummary, Summary, ToldMember};
use uuid::Uuid;

use crate::args;
use crate::commands::group_command::{self, GroupSync};
use crate::failure::Failure;
use crate::jobs::steering::Steering;
use crate::output::Output;
use crate::terms::machine_name::{self, MachineWord};
pub(crate) use define::define;
use domain::{Answer, Domain};
pub(crate) use forget::forget;
use hypervisor::Hypervisor;
pub(crate) use job::end_interrupted;
pub(crate) use mirror::mirror;
pub(crate) use rehearse::rehearse;
pub(crate) use verify::verify;

/// Why it is not told what was written to a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Untold {
    /// It is no source yet.
    New,
    Because(String),
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Untold::New => "it was not synced yet",
            Untold::Because(why) => why,
        })
    }
}

/// How a disk is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum How {
    /// By a bitmap of QEMU.
    Bitmap,
    /// By its tracker in the kernel.
    Recorded,
    /// Read on both sides.
    Compared,
    /// For the first time.
    Copied,
    /// Nothing was written to it.
    Still,
    /// It is no part of the copy.
    LeftOut,
    /// Its replica is not verified.
    Unverified,
}

impl From<&Untold> for How {
    fn from(why: &Untold) -> How {
        if *why == Untold::New { How::Copied } else { How::Compared }
    }
}

/// The names of the machines on this host. Of a user's own libvirt, which a question would start, none is known.
pub(crate) fn names() -> Vec<String> {
    let is_asked = rustix::process::geteuid().is_root() || std::env::var_os("LIBVIRT_DEFAULT_URI").is_some();
    if is_asked { libvirt::virsh::names() } else { Vec::new() }
}

/// The monitors of the QEMUs of this host that are started by hand.
pub(crate) fn monitors() -> Vec<PathBuf> {
    qemu::process::monitors()
}

/// A machine, as its commands see it.
struct Machine<'a> {
    domain: Domain,
    host: Arc<dyn Hypervisor>,
    /// Its name where only some characters are allowed.
    name: String,
    /// The name of its group.
    group: String,
    args: &'a args::MachineArgs,
    open: &'a args::SourceArgs,
    state: &'a StateDir,
    output: &'a Output,
    /// What was said in earlier passes, and is not said again.
    said: Option<&'a Said>,
}

/// How each disk was followed last.
type Said = RefCell<BTreeMap<String, How>>;

/// How a disk is followed, as a line of JSON.
#[derive(Serialize)]
struct Told<'a> {
    kind: &'static str,
    machine: &'a str,
    disk: &'a str,
    path: Option<&'a Path>,
    how: How,
    why: &'a str,
}

/// Runs the command; its exit code.
pub(crate) fn sync(
    named: MachineWord<'_>,
    args: &args::Sync,
    steering: &Steering,
    state: &StateDir,
    output: &Output,
) -> Result<u8> {
    check(args)?;
    hypervisor::wait_for(args.far.timeout);
    let machine = Machine::find(named, (&args.machine, &args.open), state, output)?;
    if let Some((summary, members)) = machine.pass(args, steering)? {
        group_command::tell(&summary, &members, output);
    }
    Ok(0)
}

/// Refuses options that a machine does not take.
fn check(args: &args::Sync) -> Result<(), Failure> {
    let given = [
        ("--group", args.group.is_some()),
        ("--moment", args.told.at.moment.is_some()),
        ("--as", args.told.at.called.is_some()),
        ("--changes", args.told.changes.is_some()),
        ("--format", args.begin.format.is_some()),
        ("--keep-going", args.keep_going),
        ("--digests", args.digests.is_some()),
        ("--journal-dir", args.far.journal_dir.is_some()),
        ("--at-view", args.live.at_view),
        ("--freeze", args.live.freeze.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(refuse_option(option)),
        None => Ok(()),
    }
}

fn refuse_option(option: &str) -> Failure {
    Failure::usage(format!("a VM does not take {option}: omit it"))
}

/// Where the runs for the machine with this group meet.
fn place_of(group: &str, state: &StateDir) -> PathBuf {
    let place = match rustix::process::geteuid().is_root() {
        true => trackers::run_folder(),
        false => state.path().to_path_buf(),
    };
    place.join("machines").join(group)
}

/// Keeps other runs away for the machine with this name and this group.
fn lock((name, group): (&str, &str), state: &StateDir) -> Result<FolderLock, Failure> {
    let place = place_of(group, state);
    let taken = Dir::open(&place).and_then(|_| FolderLock::take(&place));
    let failed = |error| Failure::failed(format!("cannot lock {}: {error}", place.display()));
    taken.map_err(failed)?.map_err(|holder| {
        Failure::busy(format!(
            "{name} is synced or verified already, by {holder}: wait for it, as --wait does, or stop it"
        ))
    })
}

/// The machine that is meant, and its plain name.
fn find(named: MachineWord<'_>, state: &StateDir) -> Result<(Arc<dyn Hypervisor>, Domain, String), Failure> {
    let (meant, socket) = match named {
        MachineWord::Monitor(socket) => (None, socket.to_path_buf()),
        MachineWord::Name(name) => match machine_name::monitor_of(name, state) {
            Some((plain, socket)) => (Some(plain), socket),
            None => {
                let (libvirt, domain) = libvirt::find(name)?;
                let plain = machine_name::plain(&domain.name, &domain.uuid);
                return Ok((Arc::new(libvirt), domain, plain));
            }
        },
    };
    let (monitor, domain, plain) = qemu::at(&socket, meant.as_deref(), state)?;
    if let Some(meant) = meant.filter(|meant| *meant != plain) {
        return Err(Failure::refused(format!(
            "the QEMU at {}, where {meant} was, is {} now: name the monitor of {meant} as qemu:SOCKET",
            socket.display(),
            domain.name
        )));
    }
    Ok((Arc::new(monitor), domain, plain))
}

impl<'a> Machine<'a> {
    fn find(
        named: MachineWord<'_>,
        (args, open): (&'a args::MachineArgs, &'a args::SourceArgs),
        state: &'a StateDir,
        output: &'a Output,
    ) -> Result<Machine<'a>, Failure> {
        let (host, domain, name) = find(named, state)?;
        let group = machine_name::group(&name);
        Ok(Machine { domain, host, name, group, args, open, state, output, said: None })
    }

    /// Brings the replicas of its disks to one moment.
    fn pass(&self, args: &args::Sync, steering: &Steering) -> Result<Pushed> {
        let folder = args.destination.as_deref().unwrap_or_default();
        let sync = GroupSync::new((&self.group, folder), args, steering, self.state, self.output)?;
        self.refuse()?;
        let _lock = if args.dry_run { None } else { Some(self.lock()?) };
        let pushed = match self.domain.id {
            Some(_) => self.sync_running(&sync),
            None => self.sync_resting(&sync),
        };
        sync.hook.inspect(|hook| hook.end(pushed.is_ok(), self.output));
        let pushed = pushed?;
        if let Some((_, members)) = pushed.as_ref().filter(|_| !args.dry_run) {
            self.leave_removed(members)?;
        }
        Ok(pushed)
    }

    /// Refuses a machine with a disk that cannot be copied, unless that is to be left out.
    fn refuse(&self) -> Result<()> {
        self.refuse_unknown()?;
        self.refuse_renamed()?;
        let (name, without) = (&self.domain.name, &self.args.without);
        for disk in self.domain.disks.iter().filter(|disk| !without.contains(&disk.target)) {
            if let Answer::Refused(why) = &disk.answer {
                return Err(Failure::refused(format!(
                    "{} of {name} cannot be copied, as it is {why}: leave it out with --without {0}, and copy it by other means",
                    disk.target
                ))
                .into());
            }
        }
        match self.disks().next() {
            Some(_) => Ok(()),
            None => Err(Failure::refused(format!(
                "{name} has no disk that can be copied: {} lists its disks",
                self.host.list()
            ))
            .into()),
        }
    }

    /// Refuses a machine whose disks are those of another one here, as after it got another name.
    fn refuse_renamed(&self) -> Result<()> {
        for (_, image) in self.disks() {
            let Some((place, about)) = self.state.source(&image.path.to_string_lossy())? else { continue };
            let group =
                SourceMembership::read(&Dir::existing(&place)?)?.filter(|group| group.name != self.group);
            if let Some(old) = group.as_ref().and_then(|group| machine_name::of_group(&group.name)) {
                return Err(Failure::refused(format!(
                    "{} of {} was synced as a disk of the VM {old}: if that is this VM by its former name, or is gone, run \"dsync forget vm:{old}\", and the \
                     next sync copies the disks anew",
                    about.path.display(),
                    self.domain.name
                ))
                .into());
            }
        }
        Ok(())
    }

    /// Refuses to leave out what the machine does not have.
    fn refuse_unknown(&self) -> Result<(), Failure> {
        let has = |target: &String| self.domain.disks.iter().any(|disk| disk.target == *target);
        match self.args.without.iter().find(|target| !has(target)) {
            Some(unknown) => Err(Failure::usage(format!(
                "{} has no disk {unknown}, which --without names: {} lists them",
                self.domain.name,
                self.host.list()
            ))),
            None => Ok(()),
        }
    }

    /// The disks that are followed.
    fn disks(&self) -> impl Iterator<Item = (&str, &domain::Image)> {
        self.domain.followed().filter(|(target, _)| !self.args.without.iter().any(|out| out == target))
    }

    /// Keeps other runs for this machine away.
    fn lock(&self) -> Result<FolderLock, Failure> {
        lock((&self.domain.name, &self.group), self.state)
    }

    /// Says of a disk how it is followed.
    fn say(&self, (disk, path): (&str, Option<&Path>), how: How, why: &str) {
        let before = self.said.and_then(|said| said.borrow_mut().insert(disk.to_owned(), how));
        if before == Some(how) {
            return;
        }
        match how {
            How::Copied => self.output.say(&format!("{disk}: copied: {why}")),
            How::LeftOut => self.output.say(&format!("{disk}: left out: {why}")),
            How::Still => self.output.say(&format!("{disk}: not read: {why}")),
            How::Bitmap => self.output.say(&format!("{disk}: QEMU's bitmap since {why}")),
            How::Recorded => self.output.say(&format!("{disk}: tracked: {why}")),
            How::Compared => self.output.say(&format!("{disk}: compared: {why}")),
            How::Unverified => self.output.warn(&format!("{disk}: not verified: {why}")),
        }
        let machine = &self.domain.name;
        self.output.status(&Told { kind: "machine-disk", machine, disk, path, how, why });
    }

    /// Says what is no part of the copy.
    fn say_left_out(&self) {
        for disk in &self.domain.disks {
            match &disk.answer {
                _ if self.args.without.contains(&disk.target) => {
                    self.say((&disk.target, None), How::LeftOut, "by --without");
                }
                Answer::LeftOut(why) => self.say((&disk.target, None), How::LeftOut, why),
                _ => {}
            }
        }
        let tpm = self.domain.tpm.as_ref().filter(|state| !state.exists());
        let tpm = tpm.map(|state| format!("the state of its TPM, which is not at {},", state.display()));
        for what in self.domain.also.iter().copied().chain(tpm.as_deref()) {
            self.output.warn_once(&format!(
                "{} needs {what} to start elsewhere: copy it by other means",
                self.domain.name
            ));
        }
    }

    /// A disk as a member of the group.
    fn member(&self, target: &str, path: &Path, options: SourceOptions) -> Result<ToldMember> {
        let given = crate::reach::source::source_options(self.open)?;
        let options = SourceOptions {
            block_size: given.block_size,
            device_trust: given.device_trust,
            allow_shrink: given.allow_shrink,
            at_rest: AtRest::InUse,
            ..options
        };
        let file = self.file(target, path)?;
        Ok(ToldMember { path: path.to_path_buf(), file, options })
    }

    /// What the replica of a disk is called: as it is, or if it is no member yet by its target, unless that is what another's is called.
    fn file(&self, target: &str, path: &Path) -> Result<String> {
        let own = self.state.source(&path.to_string_lossy())?.map(|(_, about)| about.uuid);
        let members = source::group_members(self.state, &self.group)?;
        if let Some((_, about, group)) = members.iter().find(|(_, about, _)| Some(about.uuid) == own) {
            return Ok(group.file_of(&about.path));
        }
        let mut taken = self.names_of_others(own)?;
        taken.extend(members.iter().map(|(_, about, group)| group.file_of(&about.path)));
        let mut file = format!("{}-{target}.img", self.name);
        let mut count = 1;
        while taken.contains(&file) {
            count += 1;
            file = format!("{}-{target}.{count}.img", self.name);
        }
        Ok(file)
    }

    /// The names of the replicas that other disks of this host have, in whichever folder. A disk that has left its machine leaves its replicas where
    /// they are, until they are forgotten.
    fn names_of_others(&self, own: Option<Uuid>) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for (place, about) in self.state.survey()?.sources {
            if Some(about.uuid) == own || !place.exists() {
                continue;
            }
            let bookmarks = Bookmarks::read(&Dir::existing(&place)?)?;
            let replicas = bookmarks.replicas().flat_map(|(name, known)| known.also.iter().chain([name]));
            names.extend(replicas.filter_map(|name| name.rsplit(['/', ':']).next()).map(str::to_owned));
        }
        Ok(names)
    }

    /// The files of the definition, the NVRAM and the TPM's state as members.
    fn carried(&self, paths: Vec<PathBuf>) -> Vec<ToldMember> {
        let options = SourceOptions { allow_shrink: true, ..SourceOptions::default() };
        let member = |path: PathBuf| {
            let file = source::file_name(&path);
            ToldMember { path, file, options: options.clone() }
        };
        paths.into_iter().map(member).collect()
    }

    /// Takes the disks that the machine has no more out of its group.
    fn leave_removed(&self, members: &[Summary]) -> Result<()> {
        for (place, about, group) in source::group_members(self.state, &self.group)? {
            if members.iter().any(|member| member.source == about.path) {
                continue;
            }
            source::leave_group(&place, &about, &self.group)?;
            self.output.say(&format!(
                "{} is no disk of {} any more: its replica {} stays as it was, until \"dsync forget\" there",
                about.path.display(),
                self.domain.name,
                group.file_of(&about.path)
            ));
        }
        Ok(())
    }
}

/// Which replica each disk is, by its target.
fn assigned<'a>(targets: impl Iterator<Item = &'a str>, members: &[ToldMember]) -> Vec<(String, String)> {
    targets.zip(members).map(|(target, member)| (target.to_owned(), member.file.clone())).collect()
}

/// What a sync of a group did; `None` if nothing was to be done.
type Pushed = Option<(GroupSummary, Vec<Summary>)>;
