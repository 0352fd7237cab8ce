//! A source as a sync sees it: held by this process, or by a server that answers for it.

use std::path::PathBuf;
use std::sync::Arc;

use delta::Epoch;
use device::{Dir, Disk, Folder, Storage};
use extents::Bitmap;
use lineage::{Lives, Point};
use trackers::LastWriteTime;

use crate::batches::BatchFollower;
use crate::control::group::{SourceMembership, record_commit};
use crate::control::{ControlClient, ServedView, ServerStatus, status};
use crate::disk::backing::{Backing, PathBacking};
use crate::disk::clones;
use crate::disk::export::unrecorded;
use crate::disk::moments;
use crate::live::Live;
use crate::peek::is_cloned;
use crate::record::bookmarks::{Bookmarks, Reached};
use crate::record::history::{History, KnownPosition};
use crate::record::lives;
use crate::record::stamp::ImageStamp;
use crate::record::state::{SourceMetadata, StateDir, about_in};
use crate::record::tally::Counter;
use crate::source::{Source, SourceOptions};
use crate::views::courtesy::{Courtesy, Feels};
use crate::views::shared::View;
use crate::{Gap, SourceError};

/// A source, to be copied from.
pub struct Handle {
    about: SourceMetadata,
    folder: Arc<dyn Folder>,
    backing: Arc<dyn Backing>,
    holder: Holder,
    courtesy: Arc<Courtesy>,
}

/// What a replica lacks for a view.
pub struct MissingChanges {
    /// Blocks, of the source's block size.
    pub blocks: Bitmap,
    /// The epochs at which the replica may be, ascending; the last is the view's.
    pub chain: Vec<Epoch>,
    history: History,
}

impl MissingChanges {
    /// Bytes of the source at an epoch.
    pub fn size_at(&self, epoch: &Epoch) -> Option<u64> {
        self.history.size_at(epoch)
    }
}

enum Holder {
    Here(Box<Source>),
    Live(Box<Live>),
    Server(ControlClient, Connect),
}

/// Connects to the server again.
type Connect = Box<dyn Fn() -> Result<Option<ControlClient>, SourceError> + Send + Sync>;

impl Handle {
    /// Opens the source of a path or export name: through its server if one runs, else by holding it
    /// in this process. A disk that is not yet a source becomes one.
    pub fn attach(state: &StateDir, what: &str, options: &SourceOptions) -> Result<Handle, SourceError> {
        if let Some(handle) = Handle::served(state, what)? {
            return handle.unless_told(options);
        }
        let path = place_of(state, what, options)?;
        let is_told = options.told.as_ref().is_some_and(|told| told.recorded().is_some());
        if let Some(tracker) = trackers::find(&path)?.filter(|_| !is_told) {
            return Handle::from(Live::open(state, &path, tracker)?).unless_told(options);
        }
        refuse_member(state, what, options)?;
        let options = SourceOptions { read_only: true, ..options.clone() };
        let source = match Source::open(state, &path, &options) {
            // A starting server holds the lock before it answers.
            Err(busy @ SourceError::Busy { .. }) => {
                return Handle::served_soon(state, what)?.ok_or(busy)?.unless_told(&options);
            }
            other => other?,
        };
        Ok(Handle::of_source(source))
    }

    /// Refuses what others say of a disk whose writes are recorded here.
    fn unless_told(self, options: &SourceOptions) -> Result<Handle, SourceError> {
        match &options.told {
            Some(told) => Err(moments::refuse_recorded(&self.about.path, told)),
            None => Ok(self),
        }
    }

    /// A source that this process holds.
    #[doc(hidden)]
    pub fn of_source(source: Source) -> Handle {
        let (folder, backing) = source.parts();
        let (about, holder) = (source.about().clone(), Holder::Here(Box::new(source)));
        Handle { about, folder, backing, holder, courtesy: Courtesy::none() }
    }

    /// A source that is served, by a server in this process.
    #[doc(hidden)]
    pub fn of_server(source: &Arc<Source>) -> Result<Handle, SourceError> {
        let (folder, backing) = source.parts();
        let about = source.about().clone();
        let source = source.clone();
        let connect: Connect = Box::new(move || ControlClient::within(&source).map(Some));
        let client = connect()?.ok_or_else(|| SourceError::Server("it is not served".into()))?;
        let holder = Holder::Server(client, connect);
        Ok(Handle { about, folder, backing, holder, courtesy: Courtesy::none() })
    }

    /// Opens a source whose writes are recorded: through its server, or its tracker in the kernel. Never holds it:
    /// a server can still be started.
    ///
    /// # Errors
    /// `Refused` if its writes are not recorded.
    pub fn attach_followed(state: &StateDir, what: &str) -> Result<Handle, SourceError> {
        if let Some(handle) = Handle::followed(state, what)? {
            return Ok(handle);
        }
        let path = place_of(state, what, &SourceOptions::default())?;
        if device::is_export(&path) {
            return Err(unrecorded(&path));
        }
        let is_cloned = state.source(what)?.is_some_and(|(place, _)| is_cloned(&place));
        if is_cloned {
            return Err(SourceError::Refused(format!(
                "{} is tracked by clones, which tell only at each sync what was written before it, so there is nothing to mirror from: run \"dsync sync\" \
                 from a timer, or serve the image with \"dsync serve\"",
                path.display()
            )));
        }
        Err(SourceError::Refused(format!(
            "writes to {} are not recorded: serve it with \"dsync serve\", or track a device with \"dsync track add\"",
            path.display()
        )))
    }

    /// Opens a source through its server, or its tracker in the kernel; `None` if its writes are not recorded.
    ///
    /// # Errors
    /// If its server or its tracker cannot be asked.
    pub fn followed(state: &StateDir, what: &str) -> Result<Option<Handle>, SourceError> {
        if let Some(handle) = Handle::served(state, what)? {
            return Ok(Some(handle));
        }
        let path = place_of(state, what, &SourceOptions::default())?;
        if let Some(tracker) = trackers::find(&path)? {
            return Ok(Some(Live::open(state, &path, tracker)?.into()));
        }
        Handle::served_soon(state, what)
    }

    fn served(state: &StateDir, what: &str) -> Result<Option<Handle>, SourceError> {
        let Some((place, about)) = state.source(what)? else { return Ok(None) };
        let Some(client) = ControlClient::connect(&place)? else { return Ok(None) };
        let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
        let backing = Arc::new(PathBacking::new(about.identity.clone(), &place, about.format));
        let connect: Connect = Box::new(move || ControlClient::connect(&place));
        let felt = LastWriteTime::felt_in(&folder).ok();
        let courtesy = Arc::new(Courtesy::new(felt.map(|felt| Box::new(move || felt.read()) as Feels)));
        let holder = Holder::Server(client, connect);
        Ok(Some(Handle { about, folder: Arc::new(folder), backing, holder, courtesy }))
    }

    /// Waits a second for a server that may be starting.
    fn served_soon(state: &StateDir, what: &str) -> Result<Option<Handle>, SourceError> {
        for _ in 0..50 {
            if let Some(handle) = Handle::served(state, what)? {
                return Ok(Some(handle));
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Ok(None)
    }

    /// Whether readers of its views give way to a guest that writes; at first they do not.
    pub fn be_polite(&self, polite: bool) {
        self.courtesy.be_polite(polite);
    }

    /// How many reads have waited for the guest.
    pub fn waits(&self) -> u64 {
        self.courtesy.waits()
    }

    /// What the source's folder says of it.
    pub fn about(&self) -> &SourceMetadata {
        &self.about
    }

    /// True if the moment that a sync copies is that of the opening: a clone of the image was made then.
    pub fn is_clone(&self) -> bool {
        matches!(self.holder, Holder::Here(_)) && self.backing.is_clone()
    }

    /// What it is stored on, and where it is read, if that is elsewhere.
    pub fn storage(&self) -> Option<Storage> {
        // What is on another machine is stored nowhere here.
        let own = self.about.path.exists().then(|| Storage::of(&self.about.path)).flatten();
        let shown = self.backing.elsewhere().and_then(Storage::of);
        match (own, shown) {
            (Some(own), Some(shown)) => Some(own.with(shown)),
            (own, shown) => own.or(shown),
        }
    }

    /// True if a server answers for the source.
    pub fn is_served(&self) -> bool {
        matches!(self.holder, Holder::Server(..))
    }

    /// Bytes of the disk, and bytes that its server offers, which was started before it was resized. `None` if they are the same.
    pub fn resized(&self) -> Option<(u64, u64)> {
        let Holder::Server(client, _) = &self.holder else { return None };
        let status = client.status(&self.history().ok()?).ok()?;
        let (offers, now) = (status.size, self.backing.identity().ok()?);
        (offers > 0 && offers != now.size && now.same_object(&self.about.identity))
            .then_some((now.size, offers))
    }

    /// Says that the disk is a replica, and that this way led to what it holds. Does nothing where a server has the disk: it serves no replica.
    ///
    /// # Errors
    /// If the state cannot be read or written.
    pub fn passes_on(&self, lives: &Lives) -> Result<(), SourceError> {
        if let Holder::Here(source) = &self.holder { source.passes_on(lives) } else { Ok(()) }
    }

    /// True if a server answered for the source, and no longer does.
    pub fn is_abandoned(&self) -> bool {
        matches!(&self.holder, Holder::Server(client, _) if client.alive()().is_err())
    }

    /// The format in which its file seems to contain a disk, of one that is read as it lies there. Of what is served, a guest may have
    /// written that to its disk.
    pub fn container(&self) -> Option<&'static str> {
        let rests = matches!(self.holder, Holder::Here(_)) && self.about.format.is_raw();
        let read = self.backing.elsewhere().unwrap_or(&self.about.path);
        rests.then(|| device::container_format(read)).flatten()
    }

    /// True if it is the file that is followed, whatever may be in it, as of one that is tracked by clones: its copy is the same file. Bytes
    /// alone, which a guest may have written to its disk, do not say so, nor does the name of a disk that was served, or is read from an export.
    pub fn is_file(&self) -> bool {
        let exported = device::is_export(self.backing.elsewhere().unwrap_or(&self.about.path));
        let named = !exported && device::Format::of_name(&self.about.path) == device::Format::Qcow2;
        let served =
            || ImageStamp::read(&*self.folder).is_ok_and(|stamp| stamp.is_some_and(|stamp| stamp.served));
        let cloned = || self.is_clone() || clones::are_kept(&*self.folder).unwrap_or(false);
        self.about.format.is_raw() && (cloned() || named && !served())
    }

    /// The source as a live disk, if it is one: then its only views are those of [`Live::cut`].
    pub fn live(&self) -> Option<&Live> {
        match &self.holder {
            Holder::Live(live) => Some(live),
            _ => None,
        }
    }

    /// How the tracker is.
    pub fn status(&self) -> Result<ServerStatus, SourceError> {
        match &self.holder {
            Holder::Here(source) => Ok(status(source)?.0),
            Holder::Live(live) => Ok(ServerStatus {
                size: live.size(),
                process: std::process::id(),
                dirty: live.dirty()?.count(),
                active_regions: 0,
                region: 0,
                views: 0,
                kept_bytes: 0,
                lost: live.lost()?,
                flush_failed: None,
                mirrored: Default::default(),
            }),
            Holder::Server(client, _) => client.status(&self.history()?),
        }
    }

    /// False if another program has written to a disk that rests since this opened it.
    ///
    /// # Errors
    /// If it cannot be looked at.
    pub fn has_rested(&self) -> Result<bool, SourceError> {
        if let Holder::Here(source) = &self.holder { source.has_rested() } else { Ok(true) }
    }

    /// Takes a checkpoint and opens its view, except for a live disk; with `held`, the view that is open as `@view` instead.
    pub fn view(&self, held: bool) -> Result<View, SourceError> {
        match &self.holder {
            Holder::Here(_) | Holder::Live(_) if held => Err(SourceError::Refused(format!(
                "{} is not served, so no snapshot of it is open: omit --at-view",
                self.about.path.display()
            ))),
            Holder::Live(_) => Err(SourceError::Refused(format!(
                "{} is tracked in the kernel, which keeps no snapshots",
                self.about.path.display()
            ))),
            Holder::Here(source) => source.still_view(&source.checkpoint(false)?),
            Holder::Server(client, _) => {
                let view = self.view_over(client, client.view(held)?)?;
                Ok(if held { view.shared() } else { view })
            }
        }
    }

    /// The view that a server has made: an epoch, a size, and what is saved.
    fn view_over(
        &self,
        client: &ControlClient,
        (epoch, size, saved): ServedView,
    ) -> Result<View, SourceError> {
        let disk = self.backing.reader()?;
        if disk.len() < size {
            return Err(SourceError::Moved(self.about.path.clone()));
        }
        let view = View::new(epoch, disk, size, Some(Arc::new(saved)), client.alive());
        Ok(view.beside(&self.courtesy))
    }

    /// Has the server of this source end the epochs of these members of its group, all of them served there, at one moment. The
    /// views last until all are dropped.
    pub(crate) fn cut_together(&self, members: &[Handle]) -> Result<(Epoch, Vec<View>), SourceError> {
        let Holder::Server(_, connect) = &self.holder else {
            return Err(SourceError::Server("it is not served".into()));
        };
        let client = connect()?
            .ok_or_else(|| SourceError::Server("the server of the source ended: run again".into()))?;
        let asked: Vec<_> = members.iter().map(|member| member.about.uuid).collect();
        let (cut, views) = client.cut_together(&asked)?;
        let views = members.iter().zip(views).map(|(member, view)| member.view_over(&client, view));
        Ok((cut, views.collect::<Result<_, _>>()?))
    }

    /// The folder of the source's state.
    pub(crate) fn folder(&self) -> &dyn Folder {
        &*self.folder
    }

    /// The history, as it is now.
    pub fn history(&self) -> Result<History, SourceError> {
        History::read(&*self.folder)
    }

    /// The last epoch of the history.
    pub fn last_epoch(&self) -> Result<Option<Epoch>, SourceError> {
        Ok(self.history()?.last())
    }

    /// What was recorded since the last epoch does not hold: a replica knows later ones, so the state is an older copy. The next sync of any
    /// replica compares. Of a source that is served or tracked the record is that of now, and stands.
    pub fn outdate(&self, why: &str) {
        if let Holder::Here(source) = &self.holder {
            source.outdate(why);
        }
    }

    /// The lives that led to what it is now.
    ///
    /// # Errors
    /// If its state cannot be read.
    pub fn lives(&self) -> Result<Lives, SourceError> {
        lives::lives(&*self.folder, &self.known()?, self.last_epoch()?)
    }

    /// The lives that led to one of its epochs.
    ///
    /// # Errors
    /// If its state cannot be read.
    pub fn lives_to(&self, epoch: &Epoch) -> Result<Lives, SourceError> {
        let lives = lives::lives(&*self.folder, &self.known()?, Some(*epoch))?;
        Ok(lives.upto(Point::number(epoch.number, 0)))
    }

    /// Begins a life where it is now: what follows is a branch of its own, as a replica with these lives knows others that followed. The life of a
    /// server has begun with it, but for one that went back together with its memory: no batch of that is taken any more.
    ///
    /// # Errors
    /// If it cannot be written down.
    pub fn branch(&self, theirs: &Lives) -> Result<(), SourceError> {
        let mut known = self.known()?;
        let present = known.lives.lives().first().map(|life| life.life);
        if self.is_served() && present.is_none_or(|life| theirs.left(life).is_none()) {
            return Ok(());
        }
        lives::begin(&*self.folder, &mut known, self.last_epoch()?)
    }

    /// What its folder says of it now.
    fn known(&self) -> Result<SourceMetadata, SourceError> {
        Ok(about_in(&*self.folder)?.unwrap_or_else(|| self.about.clone()))
    }

    /// The epoch that a number, an id or the name of a checkpoint means.
    ///
    /// # Errors
    /// `Unknown` if there is none.
    pub fn epoch(&self, what: &str) -> Result<Epoch, SourceError> {
        let path = self.about.path.display();
        let epoch = || format!("epoch {what} in its history");
        let found = match (what.parse(), what.parse()) {
            (Ok(number), _) => self.history()?.by_number(number).ok_or_else(epoch),
            (_, Ok(id)) => self.epoch_of(id)?.ok_or_else(epoch),
            _ => {
                let found = self.bookmarks()?.named(what).map(|(_, b)| b.epoch);
                found.ok_or_else(|| format!("checkpoint or replica \"{what}\""))
            }
        };
        found.map_err(|what| {
            SourceError::Unknown(format!(
                "{path} has no {what}: \"dsync status -v {path}\" lists its epochs, checkpoints and replicas"
            ))
        })
    }

    /// The epoch of an id, if the history holds it.
    pub fn epoch_of(&self, id: uuid::Uuid) -> Result<Option<Epoch>, SourceError> {
        Ok(self.history()?.by_id(id))
    }

    /// The size of the source at an epoch.
    pub fn size_at(&self, epoch: &Epoch) -> Result<Option<u64>, SourceError> {
        Ok(self.history()?.size_at(epoch))
    }

    /// Checks that what a replica with these positions lacks is known, as far as possible before a checkpoint.
    pub fn reaches(&self, positions: &[KnownPosition]) -> Result<(), SourceError> {
        let now = self.lost()?;
        match (self.history()?.reaches(positions), now) {
            // Another content is one for every replica, whatever else is not known for some.
            (Ok(()), Some(why)) | (Err(SourceError::Lost { .. }), Some(why @ Gap::OtherContent(_))) => {
                Err(SourceError::Lost { since: positions.last().map_or(0, |p| p.epoch.number), why })
            }
            (known, _) => known,
        }
    }

    /// Why the changes before the next checkpoint are not known; `None` if they are.
    pub fn lost(&self) -> Result<Option<Gap>, SourceError> {
        match &self.holder {
            Holder::Here(source) => Ok(source.lost()),
            Holder::Live(live) => live.lost(),
            Holder::Server(client, _) => Ok(client.status(&self.history()?)?.lost),
        }
    }

    /// The disk as it is now, to query what is allocated.
    pub fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        self.backing.reader()
    }

    /// What a replica with these positions lacks for the view.
    pub fn changes_since(
        &self,
        positions: &[KnownPosition],
        view: &View,
    ) -> Result<MissingChanges, SourceError> {
        let block_size = self.about.block_size;
        if let Some(ahead) = positions.iter().find(|p| p.epoch.number > view.epoch().number) {
            return Err(SourceError::Refused(format!(
                "the replica is at epoch {}, the open snapshot shows epoch {}: a replica never goes back",
                ahead.epoch.number,
                view.epoch().number
            )));
        }
        let changes = self.blocks(view.len())?;
        let history = self.history()?;
        let mut chain = history.changes_since(positions, block_size, &changes)?;
        // Epochs after the view are not part of this delta; what they changed is sent from the view, which has
        // the older content.
        chain.retain(|e| e.number <= view.epoch().number);
        if chain.last() != Some(&view.epoch()) {
            let since = positions.last().map_or(0, |p| p.epoch.number);
            return Err(SourceError::Lost { since, why: "a part of the history is unreadable".into() });
        }
        Ok(MissingChanges { blocks: changes, chain, history })
    }

    /// A bit for each block of so many bytes, none of them set.
    fn blocks(&self, size: u64) -> Result<Bitmap, SourceError> {
        let blocks = size.div_ceil(u64::from(self.about.block_size));
        Bitmap::try_new(blocks).map_err(SourceError::memory(&self.about.path))
    }

    /// What a sync would find now, without taking a checkpoint.
    pub fn estimate(&self, positions: &[KnownPosition]) -> Result<Bitmap, SourceError> {
        self.reaches(positions)?;
        let block_size = self.about.block_size;
        let size = self.backing.identity()?.size;
        let changes = self.blocks(size)?;
        // The record before the history: what an epoch has that another command ends meanwhile is in one of them.
        match &self.holder {
            Holder::Here(source) => changes.union_with(&source.dirty()?),
            Holder::Live(live) => changes.union_with(&live.dirty()?),
            Holder::Server(client, _) => client.dirty(&changes)?,
        }
        self.history()?.changes_since(positions, block_size, &changes)?;
        Ok(changes)
    }

    /// What was written after an epoch, up to now, and the later epochs: the disk is each of them but for these blocks.
    ///
    /// # Errors
    /// `Lost` where that is not known, `Unknown` or `Foreign` where the epoch is of another history.
    pub fn written_after(&self, epoch: &Epoch) -> Result<(Bitmap, Vec<Epoch>), SourceError> {
        let changes = self.estimate(&[KnownPosition { epoch: *epoch, upto: u64::MAX }])?;
        let history = self.history()?;
        let infos = history.epochs();
        let spanned = infos.iter().filter(|info| info.epoch.number >= epoch.number);
        let least = spanned.map(|info| info.size).min().unwrap_or(0);
        if least < self.backing.identity()?.size {
            changes.set(least / u64::from(self.about.block_size)..changes.blocks());
        }
        let scratch = Bitmap::try_new(changes.blocks()).map_err(SourceError::memory(&self.about.path))?;
        let chain = history.changes_since(
            &[KnownPosition { epoch: *epoch, upto: u64::MAX }],
            self.about.block_size,
            &scratch,
        )?;
        Ok((changes, chain.into_iter().filter(|later| later.number > epoch.number).collect()))
    }

    /// Notes that what is read of an epoch is about to be sent to the replica in this state. If it never arrives, a part of it may have, of whatever the disk held then.
    ///
    /// # Errors
    /// If that cannot be written.
    pub fn sends(&self, epoch: Epoch, replica: uuid::Uuid) -> Result<(), SourceError> {
        // What is served or tracked is read as it was, or what was written is known.
        if let Holder::Here(source) = &self.holder { source.sends(epoch, replica) } else { Ok(()) }
    }

    /// Records the epoch at which a replica is now.
    pub fn acknowledge(&self, replica: &str, at: Reached) -> Result<(), SourceError> {
        match &self.holder {
            Holder::Here(source) => source.acknowledge(replica, at),
            Holder::Live(live) => live.acknowledge(replica, at),
            Holder::Server(client, _) => client.acknowledge(replica, at),
        }
    }

    /// Writes down that the replicas of a group have committed a cut, with this member at an epoch.
    pub(crate) fn committed(&self, group: &str, at: (Epoch, Epoch)) -> Result<(), SourceError> {
        match &self.holder {
            Holder::Here(_) | Holder::Live(_) => record_commit(&*self.folder, group, at),
            Holder::Server(client, _) => client.committed(group, at),
        }
    }

    /// Counts what is done for a replica, for people and monitors.
    pub fn counter(&self, replica: String) -> Counter {
        Counter::new(self.folder.path(), replica)
    }

    /// A mirror has brought a replica up to date as of then, in seconds since 1970: for `dsync status`, until the server ends.
    ///
    /// # Errors
    /// If the server does not answer.
    pub fn reached(&self, replica: &str, time: u64) -> Result<(), SourceError> {
        match &self.holder {
            Holder::Server(client, _) => client.reached(replica, time),
            Holder::Here(_) | Holder::Live(_) => Ok(()),
        }
    }

    /// Starts following writes, for batches. The next checkpoint is the first moment from which a replica can
    /// continue with them.
    ///
    /// # Errors
    /// `Refused` if the source is not served: only a server knows what is written within an epoch.
    pub fn follow(&self) -> Result<BatchFollower, SourceError> {
        match &self.holder {
            Holder::Server(_, connect) => {
                let client = connect()?
                    .ok_or_else(|| SourceError::Server("the server of the source ended: run again".into()))?;
                BatchFollower::begin(client, &*self.backing, &self.about, &self.courtesy)
            }
            Holder::Here(_) | Holder::Live(_) => Err(SourceError::Refused(format!(
                "{} is not served, so writes within an epoch are not known: serve it with \"dsync serve\"",
                self.about.path.display()
            ))),
        }
    }

    /// Sets a named checkpoint at an epoch; without one at the present, which ends the epoch.
    ///
    /// # Errors
    /// `Refused` if the name is invalid, is in use and no epoch is given, or would move back; then no epoch has ended.
    pub fn name_checkpoint(&self, name: &str, at: Option<Epoch>) -> Result<Epoch, SourceError> {
        match &self.holder {
            Holder::Here(source) => source.name_checkpoint(name, at),
            Holder::Live(live) => {
                let epoch = live.name_checkpoint(name, at)?;
                at.map_or_else(|| live.drop_cached(), |_| Ok(()))?;
                Ok(epoch)
            }
            Holder::Server(client, _) => client.name_checkpoint(name, at),
        }
    }

    /// Ends the epoch, without a view. Data that anybody reads afterwards is of this epoch or newer.
    ///
    /// # Errors
    /// If that fails, or the device of a live disk cannot be opened.
    pub fn end_epoch(&self) -> Result<Epoch, SourceError> {
        match &self.holder {
            Holder::Here(source) => Ok(source.checkpoint(false)?.epoch),
            Holder::Live(live) => {
                let epoch = live.checkpoint()?.epoch();
                live.drop_cached()?;
                Ok(epoch)
            }
            Holder::Server(client, _) => Ok(client.view(false)?.0),
        }
    }

    /// What changed from one epoch to a later one, and the size of the disk at the later one.
    ///
    /// # Errors
    /// `Lost` where the history has a gap in between.
    pub fn changes_between(&self, since: &Epoch, upto: &Epoch) -> Result<(Bitmap, u64), SourceError> {
        let history = self.history()?;
        let size = history.size_at(upto).unwrap_or(0);
        let changes = self.blocks(size)?;
        history.changes_between(since, upto, self.about.block_size, &changes)?;
        Ok((changes, size))
    }

    /// The group that it is in.
    ///
    /// # Errors
    /// If that cannot be read.
    pub fn group(&self) -> Result<Option<String>, SourceError> {
        Ok(SourceMembership::read(&*self.folder)?.map(|group| group.name))
    }

    /// The bookmarks of replicas, and the named checkpoints.
    pub fn bookmarks(&self) -> Result<Bookmarks, SourceError> {
        Bookmarks::read(&*self.folder)
    }

    /// Releases the source cleanly.
    pub fn close(self) -> Result<(), SourceError> {
        match self.holder {
            Holder::Here(source) => source.close(),
            Holder::Server(..) | Holder::Live(_) => Ok(()),
        }
    }
}

/// Refuses what others say of a disk of a group, unless it is said of the moment of that group.
fn refuse_member(state: &StateDir, what: &str, options: &SourceOptions) -> Result<(), SourceError> {
    let Some(told) = &options.told else { return Ok(()) };
    let Some((place, about)) = state.source(what)? else { return Ok(()) };
    let folder = Dir::existing(&place).map_err(SourceError::state("open", &place))?;
    let group = SourceMembership::read(&folder)?.filter(|group| told.group.as_ref() != Some(&group.name));
    group.map_or(Ok(()), |group| Err(moments::refuse_member(&about.path, &group.name)))
}

/// The path of the source, which must exist, unless its moment is read elsewhere.
fn place_of(state: &StateDir, what: &str, options: &SourceOptions) -> Result<PathBuf, SourceError> {
    let known = state.source(what)?;
    let path = known.as_ref().map_or_else(|| PathBuf::from(what), |(_, about)| about.path.clone());
    if device::is_there(&path) || options.elsewhere().is_some() {
        return Ok(path);
    }
    Err(SourceError::Unknown(match known {
        Some(_) => {
            format!("source {} does not exist: if it was moved, pass its new path", path.display())
        }
        None if what.contains('/') => format!("no source {what}: no such file or device"),
        None => format!(
            "no source {what}: there is no such file, and no export of that name (\"dsync status\" lists the sources)"
        ),
    }))
}

impl From<Live> for Handle {
    fn from(live: Live) -> Handle {
        let (about, folder, backing) = (live.about().clone(), live.folder(), live.backing());
        let courtesy = live.courtesy().clone();
        Handle { about, folder, backing, holder: Holder::Live(Box::new(live)), courtesy }
    }
}
