//! `dsync forget vm:NAME`: the sources that are the disks of a machine, with its checkpoints and what was carried; or what is known of its replicas
//! in one folder. The machine need not be there any more: it is found by what was synced.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use device::Dir;
use source::{Bookmarks, SourceMembership, SourceMetadata, StateDir, Tally};

use super::hypervisor::{Hypervisor, Which};
use super::made::Made;
use super::{Domain, carry, libvirt, lock, qemu, refuse_option};
use crate::args;
use crate::commands::forget;
use crate::failure::Failure;
use crate::output::Output;
use crate::reach::location::Location;
use crate::status::job_copies::remembered;
use crate::terms::machine_name;

/// What is forgotten of.
struct Forgotten {
    /// As its user names it.
    name: String,
    group: String,
    members: Vec<(PathBuf, SourceMetadata)>,
}

/// Runs the command.
pub(crate) fn forget(name: &str, args: &args::Forget, state: &StateDir, output: &Output) -> Result<()> {
    let given = [
        ("--group", args.group.is_some()),
        ("--replica", args.replica),
        ("--journal-dir", args.journal_dir.is_some()),
    ];
    if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
        return Err(refuse_option(option).into());
    }
    let members = machine_name::members(name, state)?;
    let mut groups = BTreeSet::new();
    for (place, _) in &members {
        groups.extend(SourceMembership::read(&Dir::existing(place)?)?.map(|group| group.name));
    }
    let mut groups = groups.into_iter();
    let (Some(group), None) = (groups.next(), groups.next()) else {
        return Err(Failure::refused(format!(
            "several VMs are called {name}: \"dsync status\" lists each by a name of its own"
        ))
        .into());
    };
    let _lock = if args.dry_run { None } else { Some(lock((name, &group), state)?) };
    let forgotten = Forgotten { name: name.to_owned(), group, members };
    match &args.bookmark {
        Some(folder) => forgotten.replicas(folder, args.dry_run, state, output),
        None => forgotten.machine(args.dry_run, state, output),
    }
}

impl Forgotten {
    /// Forgets the replicas in a folder.
    fn replicas(&self, folder: &str, dry_run: bool, state: &StateDir, output: &Output) -> Result<()> {
        let location = Location::folder(folder)?;
        let mut known = Vec::new();
        for (place, about) in &self.members {
            let folder = Dir::existing(place)?;
            let Some(group) = SourceMembership::read(&folder)? else { continue };
            let replica = remembered(&location.within(Path::new(&group.file_of(&about.path))))?;
            let is_begun = Tally::read(place, &replica).is_first_copy();
            if is_begun || Bookmarks::read(&folder)?.named(&replica).is_some() {
                known.push((about, replica));
            }
        }
        if known.is_empty() {
            return Err(Failure::refused(format!(
                "no replica of {0} in {folder} is known: \"dsync status vm:{0}\" lists them",
                self.name
            ))
            .into());
        }
        for (about, replica) in known {
            forget::bookmark(&about.path.to_string_lossy(), &replica, dry_run, state, output)?;
        }
        Ok(())
    }

    /// Forgets all.
    fn machine(&self, dry_run: bool, state: &StateDir, output: &Output) -> Result<()> {
        for (place, about) in &self.members {
            if let Some(why) = source::in_use(place, about)? {
                return Err(Failure::refused(why).into());
            }
        }
        let plain = machine_name::of_group(&self.group).unwrap_or_default();
        self.checkpoints(plain, dry_run, state, output)?;
        for (place, about) in &self.members {
            forget::source(place, about, dry_run, state, output)?;
        }
        if !dry_run {
            for path in carry::files(state, plain) {
                let failed = |error| Failure::failed(format!("cannot remove {}: {error}", path.display()));
                carry::remove(&path).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Deletes its checkpoints, while it runs. Those that are left are deleted by its next sync, if there is one: the list of them stays.
    fn checkpoints(&self, plain: &str, dry_run: bool, state: &StateDir, output: &Output) -> Result<()> {
        let made = Made::of(state, plain);
        let left = match delete(&made, &self.name, (plain, state), dry_run) {
            Ok(left) => left,
            Err(error) => {
                output.warn(&format!("the checkpoints of {} are left: {error}", self.name));
                return Ok(());
            }
        };
        left.iter().for_each(|left| output.warn(left));
        if !dry_run && left.is_empty() {
            made.remove().map_err(|error| {
                Failure::failed(format!("cannot remove the list of checkpoints: {error}"))
            })?;
        }
        Ok(())
    }
}

/// Deletes the checkpoints that were made of a machine, which is known by its definition, or by its name. Returns what is said of those that are left.
fn delete(
    made: &Made,
    name: &str,
    (plain, state): (&str, &StateDir),
    dry_run: bool,
) -> Result<Vec<String>, Failure> {
    let Some((host, domain)) = seek(name, plain, state)? else { return Ok(Vec::new()) };
    // What a killed run left.
    if !dry_run && domain.id.is_some() {
        host.backup(&domain, None)?.end(Which::Ours)?;
    }
    let (mut left, ours) = (Vec::new(), made.names());
    for checkpoint in host.checkpoints()?.into_iter().filter(|checkpoint| ours.contains(&**checkpoint)) {
        let deleted = match domain.id {
            None => Err("the VM is off".to_owned()),
            Some(_) if dry_run => Ok(()),
            Some(_) => host.delete_checkpoint(&checkpoint)?,
        };
        left.extend(deleted.err().map(|why| {
            let way = host.deletion(&checkpoint);
            format!("checkpoint {checkpoint} of {name} is left ({why}): {way} deletes it while the VM runs")
        }));
    }
    Ok(left)
}

/// A machine that is there.
type Found = (Box<dyn Hypervisor>, Domain);

/// The machine of this name; `None` if libvirt has it no more.
fn seek(name: &str, plain: &str, state: &StateDir) -> Result<Option<Found>, Failure> {
    if let Some((plain, socket)) = machine_name::monitor_of(name, state) {
        let (monitor, domain, found) = qemu::at(&socket, Some(&plain), state)?;
        // Another one may be there by now, with its own.
        return Ok((found == plain).then(|| (Box::new(monitor) as Box<dyn Hypervisor>, domain)));
    }
    let [definition, ..] = carry::files(state, plain);
    let carried = std::fs::read_to_string(definition).ok();
    let found = libvirt::seek(carried.as_deref(), name)?;
    Ok(found.map(|(libvirt, domain)| (Box::new(libvirt) as Box<dyn Hypervisor>, domain)))
}
