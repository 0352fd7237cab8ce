//! A machine that runs: read in a backup job of libvirt.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::Result;
use device::{Dir, Format};
use source::{History, Members, Recorded, SourceOptions, Told, ToldChanges};
use sync::{CutHook as _, ToldMember};

use super::carry::Carried;
use super::domain::Image;
use super::job::{Begun, Job, name_at};
use super::made::Made;
use super::part::{Basis, Part};
use super::{How, Machine, Pushed, Untold, assigned};
use crate::commands::group_command::GroupSync;
use crate::commands::sync_command::TRACKED;
use crate::failure::Failure;

/// How often it is begun anew because the machine was changed meanwhile.
const ATTEMPTS: usize = 5;
/// How the changes of a device are known.
pub(super) const RECORDED: &str =
    "what was written to the device since its last sync is recorded in the kernel";
/// Why they are not, where the tracker was removed between two looks.
const NOT_TRACKED: &str = "it is not tracked any more";

impl Machine<'_> {
    /// Brings the replicas to the present moment of the machine.
    pub(super) fn sync_running(&self, sync: &GroupSync<'_>) -> Result<Pushed> {
        let job = self.job()?;
        if sync.is_dry_run() {
            job.refuse_other()?;
            self.say_left_out();
            self.say_parts(&self.parts()?);
            self.output.say("nothing was changed: how much has to be sent is known only during a sync");
            return Ok(None);
        }
        let begun = job.enter()?;
        self.say_left_out();
        let (name, mut parts, carried) = self.begin(&begun, sync)?;
        let shown = |part| self.shown(part, &begun, &name);
        let mut members = parts.iter().map(shown).collect::<Result<Vec<_>>>()?;
        let disks = assigned(parts.iter().map(|part| part.target.as_str()), &members);
        members.extend(self.carried(carried.write(self.state, &self.name, &disks)?));
        let group = sync::attach_told_group(self.state, &self.group, &members)?;
        // What does not fit is known by now.
        for (part, handle) in parts.iter_mut().zip(group.members()).filter(|(part, _)| part.since.is_ok()) {
            part.doubt(handle)?;
        }
        self.say_parts(&parts);
        let (group, mut members) = sync.run(group, false)?;
        begun.end()?;
        for (member, _) in members.iter_mut().zip(&parts).filter(|(_, part)| part.has_bitmap()) {
            if member.trust == TRACKED {
                member.trust = "as told by QEMU".into();
            }
        }
        Ok(Some((group, members)))
    }

    /// Its backup job.
    pub(super) fn job(&self) -> Result<Job, Failure> {
        let endangered = self.host.endangered()?;
        if let Some((disk, _)) = self.disks().find(|(disk, _)| endangered.iter().any(|other| other == disk)) {
            return Err(Failure::refused(format!(
                "{disk} of {0} has an I/O thread, and before version 9.0 a QEMU ends, and {0} with it, when its NBD server loses a connection there: start {0} \
                 with a newer QEMU, or its disks without I/O threads. Or sync {0} while it is off, or without these disks (--without {disk})",
                self.domain.name
            )));
        }
        let backup = self.host.backup(&self.domain, self.args.scratch.as_deref())?;
        Ok(Job::new((&self.domain, &self.name), (self.host.clone(), backup), (self.state, self.output)))
    }

    /// A disk as a member of the group, as the job shows it.
    pub(super) fn shown(&self, part: &Part, begun: &Begun, name: &str) -> Result<ToldMember> {
        let changes = match (&part.recorded, &part.since) {
            // What is recorded from now on is for the next sync, whatever is known by now.
            (Some(recorded), _) => ToldChanges::Recorded(recorded.clone()),
            (None, Ok(Basis::Checkpoint(since))) => {
                let context = format!("qemu:dirty-bitmap:backup-{}", part.target);
                ToldChanges::Bitmap { since: since.clone(), context }
            }
            (None, Ok(Basis::Record)) => ToldChanges::Lost(NOT_TRACKED.into()),
            (None, Err(why)) => ToldChanges::Lost(why.to_string()),
        };
        let told = Some(Told {
            place: Some(begun.place(part)),
            name: Some(name.to_owned()),
            changes,
            group: Some(self.group.clone()),
            still: Some(begun.still()),
        });
        let format = part.is_qcow2.then_some(Format::Qcow2);
        self.member(&part.target, &part.path, SourceOptions { told, format, ..SourceOptions::default() })
    }

    /// Begins the job, between two looks at the machine that show the same. Returns the name of its moment.
    fn begin(&self, begun: &Begun, sync: &GroupSync<'_>) -> Result<(String, Vec<Part>, Carried)> {
        let hook = sync.hook.as_ref();
        hook.map_or(Ok(()), |hook| hook.before())?;
        let tried = self.begin_held(begun, |_| true);
        hook.inspect(|hook| hook.after(tried.is_ok()));
        tried
    }

    /// Begins the job for the disks that are wanted, without the hook.
    pub(super) fn begin_held(
        &self,
        begun: &Begun,
        wanted: impl Fn(&Part) -> bool,
    ) -> Result<(String, Vec<Part>, Carried)> {
        for _ in 0..ATTEMPTS {
            let before = Carried::read(&*self.host, &self.domain)?;
            let mut parts = self.parts()?;
            parts.retain(&wanted);
            for part in parts.iter_mut().filter(|part| part.is_raw_device) {
                part.recorded = Recorded::begin(&part.path)?;
            }
            // Another one in each attempt: the checkpoint of one that is given up is of another moment.
            let name = name_at(UNIX_EPOCH.elapsed().unwrap_or_default());
            begun.begin(&mut parts, &name)?;
            let now = self.host.look()?;
            let same = now.id == self.domain.id && now.disks == self.domain.disks;
            if same && Carried::read(&*self.host, &self.domain)? == before {
                return Ok((name, parts, before));
            }
            begun.pause()?;
            if !same {
                break;
            }
        }
        let name = &self.domain.name;
        Err(Failure::busy(format!("{name} was changed meanwhile: run it again")).into())
    }

    /// The disks, each with the checkpoint from which its changes can be told.
    pub(super) fn parts(&self) -> Result<Vec<Part>> {
        let checkpoints = self.host.checkpoints()?;
        let (qemu, made) = (self.host.qemu(&self.domain), Made::of(self.state, &self.name));
        let members = source::group_members(self.state, &self.group)?;
        let mut parts = Vec::new();
        for (target, image) in self.disks() {
            let path = self.source_of(image, &members);
            let is_raw_device = is_raw_device(image);
            let tracked = if is_raw_device { self.tracked(&path)? } else { None };
            let cannot = self.host.cannot_follow(image);
            // Of a device that has a record, that goes on where QEMU ends.
            let is_listed = tracked.is_none() && cannot.is_none();
            let since = match (tracked, cannot) {
                (Some(since), _) => since,
                (None, Some(why)) => Err(because(why)),
                (None, None) => self.since(&path, &checkpoints)?.map(Basis::Checkpoint),
            };
            let mark = qemu.as_ref().zip(image.index.as_ref()).map(|(qemu, index)| format!("{qemu}-{index}"));
            let since = match (since, &mark) {
                (Ok(Basis::Checkpoint(since)), mark) => {
                    let created = self.host.created(&since)?;
                    let both = mark.as_ref().zip(created.as_ref());
                    match both.is_some_and(|(mark, created)| made.has(&since, target, mark, created)) {
                        true => Ok(Basis::Checkpoint(since)),
                        false if !made.is_of(&since, target) => {
                            Err(because("its last sync began no bitmap of it"))
                        }
                        false => Err(because(
                            "its QEMU was started, its image opened, or its checkpoint deleted or made again after its last sync",
                        )),
                    }
                }
                (since, _) => since,
            };
            let target = target.to_owned();
            // What is beneath is known, whatever it is.
            let is_qcow2 = image.is_qcow2 && path == image.path;
            parts.push(Part {
                target,
                path,
                is_qcow2,
                is_raw_device,
                is_listed,
                index: image.index.clone(),
                mark,
                recorded: None,
                since,
            });
        }
        Ok(parts)
    }

    /// Of a raw device: that its tracker tells what was written to it, or why it does not; `None` if it has none.
    fn tracked(&self, path: &Path) -> Result<Option<Result<Basis, Untold>>> {
        if trackers::find(path)?.is_none() {
            return Ok(None);
        }
        let Some((place, about)) = self.state.source(&path.to_string_lossy())? else {
            return Ok(Some(Err(Untold::New)));
        };
        let history = History::read(&Dir::existing(&place)?)?;
        let lost = source::lost(&place, &about, &history)?;
        Ok(Some(lost.map_or(Ok(Basis::Record), |why| Err(because(&why.to_string())))))
    }

    /// The checkpoint from which the changes of a disk can be told, or why there is none.
    fn since(&self, path: &Path, checkpoints: &[String]) -> Result<Result<String, Untold>> {
        let Some(moment) = source::last_moment(self.state, path)? else {
            let Some((place, _)) = self.state.source(&path.to_string_lossy())? else {
                return Ok(Err(Untold::New));
            };
            let is_begun = History::read(&Dir::existing(&place)?)?.last().is_none();
            let why =
                if is_begun { "its first copy was interrupted" } else { "the VM was off at its last sync" };
            return Ok(Err(because(why)));
        };
        Ok(match moment.name.filter(|_| moment.elsewhere) {
            Some(name) if checkpoints.contains(&name) => Ok(name),
            Some(name) => Err(because(&format!("there is no checkpoint {name} any more"))),
            None => Err(because("its last sync was of a moment without a name")),
        })
    }

    /// The path by which a disk is known: that of the image, or of one beneath it that is a member, as before a snapshot.
    fn source_of(&self, image: &Image, members: &Members) -> PathBuf {
        // Without another image beneath there is no choice.
        if image.beneath.is_empty() {
            return image.path.clone();
        }
        let is_member = |path: &&PathBuf| {
            let found = self.state.source(&path.to_string_lossy()).ok().flatten();
            found.is_some_and(|(_, known)| members.iter().any(|(_, about, _)| about.uuid == known.uuid))
        };
        image.chain().find(is_member).unwrap_or(&image.path).clone()
    }

    fn say_parts(&self, parts: &[Part]) {
        parts.iter().for_each(|part| self.say_part(part));
    }

    /// Says of a disk how its changes are known, or that they are not.
    pub(super) fn say_part(&self, part: &Part) {
        let (how, why) = match &part.since {
            Ok(Basis::Checkpoint(since)) => (How::Bitmap, since.clone()),
            Ok(Basis::Record) => (How::Recorded, RECORDED.into()),
            Err(why) => (why.into(), why.to_string()),
        };
        self.say((&part.target, Some(&part.path)), how, &why);
    }
}

/// True if a disk is a device whose bytes are those of its image, so that a tracker's record is of them.
pub(super) fn is_raw_device(image: &Image) -> bool {
    let raw = !image.is_qcow2 && image.beneath.is_empty();
    raw && image.path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}

fn because(why: &str) -> Untold {
    Untold::Because(why.to_owned())
}
