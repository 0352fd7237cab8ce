//! A machine that is off: its disks are at rest, and locked as QEMU locks them, so that it does not start meanwhile.

use std::path::Path;

use anyhow::Result;
use device::Format;
use source::SourceOptions;

use super::carry::Carried;
use super::domain::Domain;
use super::{Machine, NEW, Pushed};
use crate::commands::group_command::GroupSync;
use crate::failure::Failure;

/// How the disks are read.
const OFF: &str = "the VM is off; if it was not written to since it was synced so, it is not read";

impl Machine<'_> {
    /// Brings the replicas to what the disks are.
    pub(super) fn sync_resting(&self, sync: &GroupSync<'_>) -> Result<Pushed> {
        self.say_left_out();
        let mut members = Vec::new();
        for (target, image) in self.disks() {
            if !image.beneath.is_empty() {
                return Err(self.refuse_overlay(target).into());
            }
            let format = image.is_qcow2.then_some(Format::Qcow2);
            let options = SourceOptions { format, ..SourceOptions::default() };
            members.push(self.member(target, &image.path, options)?);
        }
        if self.args.dry_run {
            for (target, image) in self.disks() {
                self.say((target, Some(&image.path)), "compared", OFF);
            }
            return Ok(None);
        }
        let before = Carried::read(&self.virsh, &self.domain)?;
        members.extend(self.carried(before.write(self.state, &self.name)?));
        let group = sync::attach_told_group(self.state, &self.group, &members)?;
        // From here on no QEMU opens them.
        let now = Domain::read(&self.virsh.text()?)?;
        if now.id.is_some()
            || now.disks != self.domain.disks
            || Carried::read(&self.virsh, &self.domain)? != before
        {
            group.close()?;
            let name = &self.domain.name;
            return Err(Failure::busy(format!(
                "{name} was started or changed while its sync began: run it again"
            ))
            .into());
        }
        for ((target, image), handle) in self.disks().zip(group.members()) {
            let known = handle.last_epoch()?.is_some();
            let (how, why) = match handle.lost()? {
                Some(_) if self.ran(&image.path)? => ("compared", "the VM ran at its last sync".into()),
                Some(why) => ("compared", why.to_string()),
                None if known => {
                    ("still", "the VM is off, and nothing was written since its last sync".into())
                }
                None => ("compared", NEW.into()),
            };
            self.say((target, Some(&image.path)), how, &why);
        }
        sync.run(group, true)
    }

    /// True if what was read last of a disk was a moment of the machine as it ran.
    fn ran(&self, path: &Path) -> Result<bool> {
        Ok(source::last_moment(self.state, path)?.is_some_and(|moment| moment.elsewhere))
    }

    fn refuse_overlay(&self, target: &str) -> Failure {
        Failure::refused(format!(
            "{target} of {0} has an image with another beneath, as after a snapshot, which is copied only while the VM runs: start it, or merge the \
             images with \"virsh blockcommit\"",
            self.domain.name
        ))
    }
}
