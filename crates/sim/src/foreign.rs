//! Other programs that write to a replica, at any step.
//!
//! While the replica's file rests, they must be noticed before anything is called exact. The documented windows are the
//! exception: during own writes, within a second after a kill interrupted these, within ten before a power cut,
//! and on a device before a reboot.

use crate::machine::host::{Foreign, State};
use crate::world::{IMAGES, folder_of, name_of};

/// More replicas than any world has.
const MOST: usize = 8;

impl State {
    /// Another program writes sectors to a replica, and flushes them. `late`: after a pause.
    pub fn foreign_write(&mut self, name: &str, offset: u64, bytes: &[u8], late: bool) {
        let Some(number) = self.files.find(IMAGES, name) else { return };
        // A working process notes the time as it passes: here no time passes during its work.
        let late = late && !(0..MOST).any(|number| self.is_at_work(&name_of(number)) == Some(true));
        let is_device = self.files.inodes.get(&number).is_some_and(|inode| inode.is_device);
        let blind = match self.is_at_work(name) {
            // The kernel's count was not recorded since the reboot.
            None => is_device && !self.opened.contains(name),
            // Its own writes continue. Sectors that were submitted and not counted yet cannot be attributed.
            Some(alive) => alive || !late || is_device,
        };
        let time = if late { self.later() } else { self.tick() };
        let Some(inode) =
            self.files.inodes.get_mut(&number).filter(|i| i.len() >= offset + bytes.len() as u64)
        else {
            return;
        };
        inode.write(offset, bytes, time);
        inode.sync(true);
        let which = if blind { ", unnoticeably" } else { "" };
        self.told.push(format!("somebody writes to {name} at {offset}, at step {}{which}", self.steps));
        self.foreign.push(Foreign { name: name.into(), blind, late, is_device });
    }

    /// A process of this boot has noted that it writes to the replica. True if one still runs.
    fn is_at_work(&self, name: &str) -> Option<bool> {
        let note = self.files.content(self.files.find(&folder_of(name), "rest")?);
        let text = String::from_utf8_lossy(&note[..note.len().min(512)]).into_owned();
        let life = format!("\"life\":\"{}\"", self.boot().0);
        let mapped =
            self.files.find(&folder_of(name), "rest").and_then(|number| self.files.inodes.get(&number));
        (text.contains("\"stamp\":null") && text.contains(&life))
            .then(|| mapped.is_some_and(|inode| inode.is_mapped()))
    }
}
