//! A machine that is off: its disks are at rest, and locked as QEMU locks them, so that it does not start meanwhile.

use std::path::Path;

use anyhow::Result;
use device::Format;
use source::{GroupHandle, Handle, Recorded, SourceError, SourceOptions, Told, ToldChanges};
use sync::ToldMember;

use super::carry::Carried;
use super::domain::Image;
use super::running::{RECORDED, is_raw_device};
use super::{How, Machine, Pushed, Untold, assigned};
use crate::commands::group_command::GroupSync;
use crate::failure::Failure;

/// How the disks are read.
const STILL: &str = "the VM is off, and nothing was written since its last sync";
const OFF: &str = "the VM is off; if it was not written to since it was synced so, it is not read";

impl Machine<'_> {
    /// Brings the replicas to what the disks are.
    pub(super) fn sync_resting(&self, sync: &GroupSync<'_>) -> Result<Pushed> {
        self.say_left_out();
        if let Some(where_from) = self.host.rests() {
            self.output.note(&format!("{} is off: {where_from}", self.domain.name));
        }
        let mut members = Vec::new();
        let mut recorded = Vec::new();
        for (target, image) in self.disks() {
            let record = if sync.is_dry_run() { None } else { record_of(image)? };
            recorded.push(record.is_some());
            members.push(self.resting(target, image, record)?);
        }
        if sync.is_dry_run() {
            for (target, image) in self.disks() {
                self.say((target, Some(&image.path)), How::Compared, OFF);
            }
            return Ok(None);
        }
        let before = Carried::read(&*self.host, &self.domain)?;
        let disks = assigned(self.disks().map(|(target, _)| target), &members);
        members.extend(self.carried(before.write(self.state, &self.name, &disks)?));
        let group = sync::attach_told_group(self.state, &self.group, &members)?;
        let group = self.still_off(group, &before)?;
        for (((target, image), handle), is_recorded) in self.disks().zip(group.members()).zip(recorded) {
            let known = handle.last_epoch()?.is_some();
            let (how, why) = match self.untold(&image.path, handle)? {
                Some(why) => (How::Compared, why),
                None if known && is_recorded => (How::Recorded, RECORDED.into()),
                None if known => (How::Still, STILL.into()),
                None => (How::Copied, Untold::New.to_string()),
            };
            self.say((target, Some(&image.path)), how, &why);
        }
        sync.run(group, true).map(Some)
    }

    /// A disk at rest as a member of the group.
    pub(super) fn resting(
        &self,
        target: &str,
        image: &Image,
        recorded: Option<Recorded>,
    ) -> Result<ToldMember> {
        if !image.beneath.is_empty() {
            return Err(self.refuse_overlay(target).into());
        }
        let format = image.is_qcow2.then_some(Format::Qcow2);
        let (changes, group) = (recorded.map(ToldChanges::Recorded), Some(self.group.clone()));
        let told = changes.map(|changes| Told { changes, group, ..Told::default() });
        self.member(target, &image.path, SourceOptions { told, format, ..SourceOptions::default() })
    }

    /// The members, which are locked now, unless the machine was started or changed before.
    pub(super) fn still_off(&self, group: GroupHandle, before: &Carried) -> Result<GroupHandle> {
        // From here on no QEMU opens them.
        let now = self.host.look()?;
        let same = now.id.is_none() && now.disks == self.domain.disks;
        if same && Carried::read(&*self.host, &self.domain)? == *before {
            return Ok(group);
        }
        group.close()?;
        let name = &self.domain.name;
        Err(Failure::busy(format!("{name} was started or changed meanwhile: run it again")).into())
    }

    /// Why it is not known what was written to a disk at rest since its last sync.
    pub(super) fn untold(&self, path: &Path, handle: &Handle) -> Result<Option<String>> {
        Ok(match handle.lost()? {
            Some(_) if self.ran(path)? => Some("the VM ran at its last sync".into()),
            lost => lost.map(|why| why.to_string()),
        })
    }

    /// True if what was read last of a disk was a moment of the machine as it ran.
    fn ran(&self, path: &Path) -> Result<bool> {
        Ok(source::last_moment(self.state, path)?.is_some_and(|moment| moment.elsewhere))
    }

    fn refuse_overlay(&self, target: &str) -> Failure {
        Failure::refused(format!(
            "{target} of {} has an image with another beneath, as after a snapshot, which is copied only while the VM runs: start it, or merge the \
             images with {}",
            self.domain.name,
            self.host.merge()
        ))
    }
}

/// What is recorded of a device from now on, if it is tracked.
pub(super) fn record_of(image: &Image) -> Result<Option<Recorded>, SourceError> {
    if is_raw_device(image) { Recorded::begin(&image.path) } else { Ok(None) }
}
