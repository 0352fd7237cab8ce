//! The sources of a group as a sync sees them: all served by one server, all at rest and held by this process, or all tracked in the
//! kernel.

use delta::Epoch;
use extents::Bitmap;

use crate::SourceError;
use crate::control::group::{SourceMembership, check_name, in_another, join_in, record_cut};
use crate::handle::Handle;
use crate::live::{Cut, CutOptions, Live};
use crate::views::shared::View;

/// The sources of a group, to be copied from.
pub struct GroupHandle {
    name: String,
    members: Vec<Handle>,
    /// What the replica of each member is called.
    files: Vec<String>,
    /// Its members join it at the cut: they are not of it by what their folders say.
    joins: bool,
}

impl GroupHandle {
    /// A group of these sources, which are its members by what their folders say.
    ///
    /// # Errors
    /// `Refused` if they cannot be cut at one moment.
    pub fn new(name: &str, members: Vec<Handle>) -> Result<GroupHandle, SourceError> {
        check_name(name)?;
        let file = |member: &Handle| {
            let group =
                SourceMembership::read(member.folder())?.unwrap_or_else(|| SourceMembership::first(name));
            Ok::<_, SourceError>(group.file_of(&member.about().path))
        };
        let files = members.iter().map(file).collect::<Result<_, _>>()?;
        GroupHandle { name: name.to_owned(), members, files, joins: false }.checked()
    }

    /// A group of these sources, each with what its replica is called. Those that are not members yet become so at the first cut.
    ///
    /// # Errors
    /// `Refused` if they cannot be cut at one moment, or one is in another group.
    pub fn joining(name: &str, members: Vec<(Handle, String)>) -> Result<GroupHandle, SourceError> {
        check_name(name)?;
        for (member, _) in &members {
            let other = SourceMembership::read(member.folder())?.filter(|group| group.name != name);
            other.map_or(Ok(()), |group| Err(in_another(&member.about().path, &group.name)))?;
        }
        let (members, files) = members.into_iter().unzip();
        GroupHandle { name: name.to_owned(), members, files, joins: true }.checked()
    }

    fn checked(self) -> Result<GroupHandle, SourceError> {
        match self.refusal() {
            None => Ok(self),
            Some(why) => {
                self.close()?;
                Err(SourceError::Refused(why))
            }
        }
    }

    /// Makes members of those that are not yet. They belong to the promotion of the others.
    fn join(&self) -> Result<(), SourceError> {
        if !self.joins {
            return Ok(());
        }
        let known = self.members.iter().map(|member| SourceMembership::read(member.folder()));
        let known = known.collect::<Result<Vec<_>, _>>()?;
        let promotion = known.iter().flatten().find_map(|group| group.promotion);
        for (member, file) in self.members.iter().zip(&self.files) {
            let group = SourceMembership {
                file: Some(file.clone()),
                promotion,
                ..SourceMembership::first(&self.name)
            };
            join_in(member.folder(), &member.about().path, group, &|_| Ok(Vec::new()))?;
        }
        Ok(())
    }

    fn refusal(&self) -> Option<String> {
        let name = &self.name;
        let live = self.members.iter().find(|member| member.live().is_some());
        let other = self.members.iter().find(|member| member.live().is_none());
        if let (Some(live), Some(other)) = (live, other) {
            return Some(format!(
                "{} of the group {name} is tracked in the kernel, and {} is not, so they cannot be cut at one moment: track all of them, or \
                 serve all of them with \"dsync serve --group {name}\"",
                live.about().path.display(),
                other.about().path.display()
            ));
        }
        if live.is_some() {
            return None;
        }
        let resting = self.members.iter().find(|member| !member.is_served())?;
        let served = self.members.iter().find(|member| member.is_served())?;
        Some(format!(
            "{} of the group {name} is served, and {} is not: serve all of its members by one \"dsync serve --group {name}\"",
            served.about().path.display(),
            resting.about().path.display()
        ))
    }

    /// The name of the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The sources of the group.
    pub fn members(&self) -> &[Handle] {
        &self.members
    }

    /// What the replicas of its members are called in their folder, in the order of the members.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Ends the epochs of all members at one moment: the cut, and a view of each member there, in the order of the members. Sources at
    /// rest are at one moment as long as they are held.
    ///
    /// # Errors
    /// `Refused` if a member is not served by the server of the others.
    pub fn cut(&self) -> Result<(Epoch, Vec<View>), SourceError> {
        let Some(first) = self.members.first() else {
            return Err(SourceError::Unknown(format!("the group {} has no members", self.name)));
        };
        if first.is_served() {
            return first.cut_together(&self.members);
        }
        self.join()?;
        let views = self.members.iter().map(|member| member.view(false)).collect::<Result<Vec<_>, _>>()?;
        let folders = self.members.iter().map(Handle::folder);
        let folders: Vec<_> = folders.zip(&views).map(|(folder, view)| (folder, view.epoch())).collect();
        Ok((record_cut(&self.name, &folders)?, views))
    }

    /// True if its members are tracked in the kernel: then [`GroupHandle::cut_live`] cuts them.
    pub fn is_live(&self) -> bool {
        self.members.iter().any(|member| member.live().is_some())
    }

    /// Like [`GroupHandle::cut`], for disks tracked in the kernel: the last pass of each, with the blocks in `also`, all as of one moment.
    ///
    /// # Errors
    /// As [`Live::cut`].
    pub fn cut_live(&self, also: &[Bitmap], options: &CutOptions) -> Result<(Epoch, Vec<Cut>), SourceError> {
        let lives: Vec<&Live> = self.members.iter().filter_map(Handle::live).collect();
        let members: Vec<_> = lives.into_iter().zip(also).collect();
        let cuts = Live::cut_together(&members, options)?;
        let folders = self.members.iter().map(Handle::folder);
        let folders: Vec<_> = folders.zip(&cuts).map(|(folder, cut)| (folder, cut.view.epoch())).collect();
        Ok((record_cut(&self.name, &folders)?, cuts))
    }

    /// Writes down that the replicas have committed a cut, with the members at these epochs, in their order.
    pub fn committed(&self, cut: Epoch, epochs: &[Epoch]) -> Result<(), SourceError> {
        let mut members = self.members.iter().zip(epochs);
        members.try_for_each(|(member, epoch)| member.committed(&self.name, (cut, *epoch)))
    }

    /// Releases the sources cleanly.
    pub fn close(self) -> Result<(), SourceError> {
        let mut closed = Ok(());
        for member in self.members {
            closed = closed.and(member.close());
        }
        closed
    }
}
