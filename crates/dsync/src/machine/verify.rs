//! `dsync verify vm:NAME`: the replicas of a machine are compared with its disks.
//!
//! A verify is a sync that sends nothing: while the machine runs, a backup job shows the disks as of one moment, with a checkpoint from which the
//! next sync counts, and QEMU's bitmaps tell what was written since the last one. That is no difference. A disk of which it is not known what was
//! written is not verified, as changes could not be told from damage: the next sync compares all of it, and mends what differs.
//!
//! The definition, the NVRAM and the TPM's state are compared as they were carried at the last sync: what they are by now is the business of the next one.

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;
use source::{GroupHandle, Handle, SourceOptions, StateDir};
use sync::{SyncError, ToldMember, VerifyOptions};

use super::carry::Carried;
use super::hypervisor::Which;
use super::resting::record_of;
use super::{How, Machine, Untold, hypervisor};
use crate::args;
use crate::commands::verify_command;
use crate::failure::{self, DIFFERS, Failure};
use crate::jobs::steering::Steering;
use crate::output::Output;
use crate::reach::location::{Ends, Location};
use crate::terms::machine_name::MachineWord;
use crate::terms::units;

/// What the verification of a machine found, besides the summaries of its members.
#[derive(Default, Serialize)]
struct Found {
    kind: &'static str,
    machine: String,
    /// The folder of the replicas.
    destination: String,
    /// Replicas that were compared.
    verified: Vec<String>,
    /// Replicas that differ.
    differing: Vec<String>,
    /// Disks that were not compared.
    unverified: Vec<String>,
    seconds: f64,
}

/// A verification of a machine, with what its user asks of it.
struct Verification<'a> {
    machine: Machine<'a>,
    args: &'a args::Verify,
    options: VerifyOptions,
    folder: Location,
    found: Found,
}

/// Runs the command; its exit code, the worst of all members.
pub(crate) fn verify(
    named: MachineWord<'_>,
    args: &args::Verify,
    steering: &Steering,
    state: &StateDir,
    output: &Output,
) -> Result<u8> {
    check(args)?;
    hypervisor::wait_for(args.far.timeout);
    let folder = Location::folder(&args.destination)?;
    let options =
        VerifyOptions { exact: true, ..verify_command::options(args, steering, folder.host.is_some()) };
    let machine = Machine::find(named, (&args.machine, &args.open), state, output)?;
    machine.refuse_unknown()?;
    let _lock = machine.lock()?;
    let (began, destination) = (Instant::now(), folder.place()?.1);
    let name = machine.domain.name.clone();
    let found = Found { kind: "machine-verified", machine: name.clone(), destination, ..Found::default() };
    let mut verification = Verification { machine, args, options, folder, found };
    let code = match verification.machine.domain.id {
        Some(_) => verification.running()?,
        None => verification.resting()?,
    };
    let Found { verified, differing, unverified, seconds, destination, .. } = &mut verification.found;
    *seconds = began.elapsed().as_secs_f64();
    let disks = |count: usize| units::many(count as u64, "disk");
    output.say(&format!(
        "{name} in {destination}: {} verified, {} with differences, {} not verified ({})",
        disks(verified.len()),
        differing.len(),
        unverified.len(),
        units::seconds(*seconds)
    ));
    output.summary(&verification.found);
    Ok(code)
}

/// Refuses options that a machine does not take.
fn check(args: &args::Verify) -> Result<()> {
    let given = [
        ("--repair", args.repair),
        ("--range", !args.ranges.is_empty()),
        ("--moment", args.told.moment.is_some()),
        ("--as", args.told.called.is_some()),
        ("--journal-dir", args.far.journal_dir.is_some()),
    ];
    verify_command::check_rate(args)?;
    match given.into_iter().find(|(_, given)| *given) {
        Some(("--repair", _)) => Err(Failure::usage(
            "--repair would leave the disks of a VM at different moments: omit it, and run \"dsync sync --method compare vm:NAME DIR\", which mends what \
             differs, of all disks at one moment",
        )
        .into()),
        Some((option, _)) => Err(super::refuse_option(option).into()),
        None => Ok(()),
    }
}

impl Verification<'_> {
    fn running(&mut self) -> Result<u8> {
        let machine = &self.machine;
        let parts = machine.parts()?;
        let known = parts.iter().filter(|part| part.since.is_ok());
        let known: Vec<String> = known.map(|part| part.target.clone()).collect();
        for part in &parts {
            if let Err(why) = &part.since {
                self.found.unverified.push(part.target.clone());
                machine.say_unverified((&part.target, &part.path), why);
            }
        }
        if known.is_empty() {
            // What a killed run left is not to wait for a run that is not refused.
            machine.job()?.end(Which::Ours)?;
            return Err(self.refuse_all());
        }
        let begun = machine.job()?.enter()?;
        let wanted = |part: &super::part::Part| known.contains(&part.target);
        let (name, mut parts, _) = machine.begin_held(&begun, wanted)?;
        let shown = |part| machine.shown(part, &begun, &name);
        let mut members = parts.iter().map(shown).collect::<Result<Vec<_>>>()?;
        members.extend(machine.carried_before()?);
        let group = sync::attach_told_group(machine.state, &machine.group, &members)?;
        let mut untold = Vec::new();
        for (part, handle) in parts.iter_mut().zip(group.members()) {
            part.doubt(handle)?;
            match &part.since {
                Ok(_) => machine.say_part(part),
                Err(why) => {
                    machine.say_unverified((&part.target, &part.path), why);
                    untold.push(part.target.clone());
                }
            }
        }
        let is_told: Vec<bool> = parts.iter().map(|part| part.since.is_ok()).collect();
        let code = self.compare(group, &is_told);
        begun.end()?;
        self.found.unverified.extend(untold);
        code
    }

    fn resting(&mut self) -> Result<u8> {
        let machine = &self.machine;
        let before = Carried::read(&*machine.host, &machine.domain)?;
        let members = source::group_members(machine.state, &machine.group)?;
        let (mut told, mut disks) = (Vec::new(), Vec::new());
        for (target, image) in machine.disks() {
            let known = machine.state.source(&image.path.to_string_lossy())?;
            let known = known.filter(|(_, about)| members.iter().any(|(_, m, _)| m.uuid == about.uuid));
            if known.is_some() {
                told.push(machine.resting(target, image, record_of(image)?)?);
                disks.push((target, &image.path));
            } else {
                self.found.unverified.push(target.to_owned());
                machine.say_unverified((target, &image.path), &Untold::New);
            }
        }
        told.extend(machine.carried_before()?);
        let group = sync::attach_told_group(machine.state, &machine.group, &told)?;
        let group = machine.still_off(group, &before)?;
        let mut is_told = Vec::new();
        for ((target, path), handle) in disks.into_iter().zip(group.members()) {
            let untold = machine.untold(path, handle)?;
            is_told.push(untold.is_none());
            if let Some(why) = untold {
                self.found.unverified.push(target.to_owned());
                machine.say_unverified((target, path), &Untold::Because(why));
            }
        }
        if !is_told.contains(&true) {
            group.close()?;
            return Err(self.refuse_all());
        }
        self.compare(group, &is_told)
    }

    /// Compares those members of which it is told what was written, and all behind them.
    fn compare(&mut self, group: GroupHandle, is_told: &[bool]) -> Result<u8> {
        let (output, mut code, mut is_any, mut failed) = (self.machine.output, 0, false, Vec::new());
        for (at, (handle, file)) in group.members().iter().zip(group.files()).enumerate() {
            if is_told.get(at).is_some_and(|told| !told) {
                continue;
            }
            match self.compare_one(handle, file) {
                Ok(found) => {
                    is_any |= at < is_told.len() && found.is_some();
                    // What could not be read is worse than a difference.
                    let found = found.unwrap_or(0);
                    if code == 0 || (code == DIFFERS && found != 0) {
                        code = found;
                    }
                }
                Err(error) => failed.push(error),
            }
        }
        let closed = group.close();
        let Some(last) = failed.pop() else {
            closed?;
            return if is_any { Ok(code) } else { Err(self.refuse_all()) };
        };
        failed.iter().for_each(|error| output.error(&failure::text(error), failure::code(error)));
        Err(last)
    }

    /// The exit code for one member; `None` if its differences could be changes.
    fn compare_one(&mut self, handle: &Handle, file: &str) -> Result<Option<u8>> {
        let Machine { state, output, .. } = self.machine;
        let path = &handle.about().path;
        let source = Location::parse(&path.to_string_lossy())?;
        let ends = Ends { source, destination: self.folder.within(Path::new(file)) };
        let progress = |done, total| output.progress(done, total);
        let verified = ends.converse(&self.args.far, state, None, |link, path, name| {
            sync::verify(handle, link, path, name, &self.options, &progress)
        });
        output.finish();
        let verified = match verified {
            Err(error) if matches!(error.downcast_ref(), Some(SyncError::Inexact { .. })) => {
                let disk = self.machine.disks().find(|(_, image)| image.path == *path);
                let name = disk.map_or(file, |(target, _)| target);
                self.machine.say_unverified((name, path), &Untold::Because(error.to_string()));
                self.found.unverified.push(name.to_owned());
                return Ok(None);
            }
            verified => verified?,
        };
        self.found.verified.push(verified.destination.clone());
        self.found.differing.extend(verified.differs().then(|| verified.destination.clone()));
        Ok(Some(verify_command::tell(&verified, output)))
    }

    /// Of a verify that would find nothing out.
    fn refuse_all(&self) -> anyhow::Error {
        let name = &self.machine.domain.name;
        Failure::refused(format!(
            "no disk of {name} can be verified, as it is not known what was written to any of them since the last sync: run \"dsync sync vm:{name} {}\", which \
             compares them, and mends what differs",
            self.folder.name
        ))
        .into()
    }
}

impl Machine<'_> {
    /// Says of a disk that its replica is not verified.
    fn say_unverified(&self, (target, path): (&str, &Path), why: &Untold) {
        let next =
            if *why == Untold::New { "copies it" } else { "compares all of it, and mends what differs" };
        self.say((target, Some(path)), How::Unverified, &format!("{why}; the next sync {next}"));
    }

    /// The files of the definition, the NVRAM and the TPM's state as they were at the last sync.
    fn carried_before(&self) -> Result<Vec<ToldMember>> {
        let Ok(folder) = self.state.machines_folder().canonicalize() else { return Ok(Vec::new()) };
        let members = source::group_members(self.state, &self.group)?.into_iter();
        let carried = members.filter(|(_, about, _)| about.path.starts_with(&folder));
        let member = |(_, about, group): (_, source::SourceMetadata, source::SourceMembership)| {
            let (file, path) = (group.file_of(&about.path), about.path);
            ToldMember { path, file, options: SourceOptions::default() }
        };
        Ok(carried.map(member).collect())
    }
}
