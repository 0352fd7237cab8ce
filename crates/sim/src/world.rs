//! A source and its replicas on simulated machines, and the moments that the source went through.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device::{DiskKind, Identity};
use link::Link;
use replica::{Destination, Replica, Status, UnsureSet};
use source::{CutOptions, FreezeMode, Handle, Live, Source, SourceError, SourceMetadata};
use sync::SyncError;
use testing::Random;
use uuid::Uuid;

use crate::cell::{Cell, Origin, Target, Way};
use crate::machine::backing::SimBacking;
use crate::machine::destination::{SimDevice, SimFile};
use crate::machine::files::{SimDisk, SimFolder};
use crate::machine::host::{Held, Host, Process, lock};
use crate::machine::inode::{Content, PAGE};
use crate::machine::kernel::{BLOCK, Kernel, Kind};
use crate::machine::mirror::{self, Ends};
use crate::machine::pipe::far_link;
use crate::machine::tracker::SimTracker;

/// Bytes of a region of the write-intent log.
pub(crate) const REGION: u64 = 64 << 10;
/// The folder of images.
pub const IMAGES: &str = "images";
/// The source's name.
pub const DISK: &str = "disk";

/// The moments that the source went through, in order.
#[derive(Debug, Default)]
pub struct Moments {
    all: Vec<Content>,
    places: HashMap<Content, Vec<usize>>,
    /// What an epoch holds, once a replica has said that it is it.
    epochs: HashMap<Uuid, (Content, Vec<u8>)>,
}

impl Moments {
    /// Adds a moment, unless it is the last one.
    pub fn add(&mut self, content: Content) {
        if self.all.last() != Some(&content) {
            self.places.entry(content).or_default().push(self.all.len());
            self.all.push(content);
        }
    }

    /// Moments so far.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// The last place of a content among the moments.
    pub fn last(&self, content: &Content) -> Option<usize> {
        self.places.get(content)?.last().copied()
    }

    /// The first place at or after `from`.
    pub fn since(&self, content: &Content, from: usize) -> Option<usize> {
        self.places.get(content)?.iter().find(|at| **at >= from).copied()
    }

    /// Says that an epoch holds a content. False if it holds another.
    pub fn bind(&mut self, epoch: Uuid, content: Content, held: &[u8]) -> bool {
        self.epochs.entry(epoch).or_insert_with(|| (content, held.to_vec())).0 == content
    }

    /// What a trail to an epoch leaves out: the first byte in which an earlier epoch differs, and which one that is. Adds the number of
    /// epochs that were looked at to `looked`.
    pub fn missed(&self, trail: &source::Trail, to: Uuid, looked: &AtomicU64) -> Option<(u64, usize)> {
        let (_, held) = self.epochs.get(&to)?;
        trail.epochs().iter().filter(|epoch| epoch.id != to).find_map(|epoch| {
            let (_, before) = self.epochs.get(&epoch.id)?;
            let ranges = trail.lacks(epoch)?;
            looked.fetch_add(1, SeqCst);
            let mut told = vec![false; held.len().div_ceil(PAGE)];
            for range in ranges {
                let pages = range.start as usize / PAGE..(range.end as usize).div_ceil(PAGE).min(told.len());
                told[pages].fill(true);
            }
            let differs = |at: &usize| {
                let page = *at..(*at + PAGE).min(held.len()).min(before.len());
                before.get(page.clone()) != held.get(page)
            };
            let missed =
                (0..held.len().min(before.len())).step_by(PAGE).find(|at| !told[at / PAGE] && differs(at));
            missed.map(|at| (epoch.number, at))
        })
    }

    /// The first byte in which something is not an epoch, blocks in which it is unsure left out; `None` if there is none, or
    /// the epoch is not known.
    pub fn stray(&self, epoch: Uuid, unsure: &UnsureSet, held: &[u8]) -> Option<usize> {
        let (_, epoch) = self.epochs.get(&epoch)?;
        let differs = |at: &usize| {
            let page = *at..(*at + PAGE).min(held.len());
            epoch.get(page.clone()) != held.get(page)
        };
        let sure = |at: &usize| !unsure.ranges().any(|range| range.contains(&(*at as u64)));
        (0..held.len()).step_by(PAGE).find(|at| differs(at) && sure(at))
    }
}

/// A server of the source.
pub struct Server {
    /// Its process.
    pub process: Arc<Process>,
    /// What it holds.
    pub source: Arc<Source>,
}

/// Ends a server: cleanly, or as a kill does.
pub(crate) fn end_server(process: &Process, source: Arc<Source>, cleanly: bool) -> Result<(), SourceError> {
    let (mut held, mut result) = (source, Ok(()));
    // Conversations end a moment after their clients.
    for _ in 0..10_000 {
        match Arc::try_unwrap(held) {
            Ok(source) if cleanly => result = source.close(),
            Ok(source) => {
                process.host.state().end(process);
                drop(source);
            }
            Err(shared) => {
                held = shared;
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
        }
        break;
    }
    process.host.state().end(process);
    result
}

/// What a test knows of a replica.
#[derive(Debug, Clone)]
pub struct Known {
    /// Its name.
    pub name: String,
    /// Another program wrote to it since it was proven: it may say so.
    pub touched: bool,
    /// Another program wrote to a device: nobody need notice before it is compared.
    pub tainted: bool,
    /// Another program wrote shortly after what was written before: a power cut may take what tells the two apart.
    pub soon: bool,
    /// That another program wrote was told.
    pub noticed: bool,
    /// Another program may write to it in this round.
    pub meanwhile: bool,
    /// Nothing was done with it since it was recovered.
    pub settled: bool,
    /// An adoption was begun.
    pub adopting: bool,
    /// The earliest moment that it may stand at.
    pub at: usize,
}

/// A source and its replicas, with their machines.
pub struct World {
    /// The source's machine.
    pub near: Arc<Host>,
    /// The replica's.
    pub far: Arc<Host>,
    /// What it is about.
    pub cell: Cell,
    /// For what is done.
    pub dice: Random,
    /// The source's server, if one runs.
    pub server: Option<Server>,
    reader: Arc<Mutex<Arc<Process>>>,
    /// Several conversations go on, and share who reads.
    several: AtomicBool,
    /// The source's name.
    pub uuid: Uuid,
    /// The folder of the source's state that is used.
    pub state: String,
    /// Each replica of a live disk has a state folder of its own at the source.
    pub many_states: bool,
    /// What the source went through.
    pub moments: Arc<Mutex<Moments>>,
    /// The replicas.
    pub replicas: Vec<Known>,
    /// A source that is smaller than it was is meant.
    pub allow_shrink: bool,
    /// What was done.
    pub told: Vec<String>,
}

/// The name of a replica.
pub(crate) fn name_of(number: usize) -> String {
    format!("copy-{number}")
}

/// The folder of the state of a replica of that name.
pub fn folder_of(name: &str) -> String {
    format!("state of {name}")
}

/// Bytes that a device at the replica's end has more than the source.
pub const SPARE: u64 = 96 << 10;

/// When lines are cut: after so many bytes one way and the other.
#[derive(Debug, Clone, Copy)]
pub struct Cuts(pub u64, pub u64);

impl Cuts {
    /// Lines that are never cut.
    pub const NEVER: Cuts = Cuts(u64::MAX, u64::MAX);
}

impl World {
    /// A source with some content, and no replica.
    pub fn new(cell: Cell, dice: &mut Random, scratch: &std::path::Path) -> World {
        let near = Host::new("near", scratch, dice);
        let far = match cell.way {
            Way::Local => near.clone(),
            Way::Far => Host::new("far", scratch, dice),
        };
        // Small, most of the time: what a larger one has more of is blocks.
        let blocks = if dice.one_in(6) { dice.within(48..129) } else { dice.within(10..48) };
        let size =
            BLOCK * blocks + if dice.one_in(4) && !cell.origin.is_live() { 512 * dice.below(8) } else { 0 };
        let process = near.process();
        {
            let mut state = near.state();
            let disk = state.make(size, cell.origin.is_device());
            state.files.link(IMAGES, DISK, disk);
            state.files.sync_names(IMAGES);
            let kind = match cell.origin {
                Origin::Bpf => Some(Kind::Bpf),
                Origin::Dm => Some(Kind::Dm),
                _ => None,
            };
            if let Some(kind) = kind {
                state.trackers.insert(disk, Kernel::new(kind, size));
            }
            // Some of it was there before.
            let time = state.tick();
            let mut content = vec![0; size as usize];
            for sector in content.chunks_mut(512) {
                let byte = dice.bits() as u8;
                sector.fill(if dice.one_in(2) { byte } else { 0 });
            }
            if let Some(inode) = state.files.inodes.get_mut(&disk) {
                inode.write(0, &content, time);
                inode.sync(true);
            }
        }
        let world = World {
            near,
            far,
            cell,
            dice: dice.fork(),
            server: None,
            reader: Arc::new(Mutex::new(process)),
            several: AtomicBool::new(false),
            uuid: Uuid::from_u128(u128::from(dice.bits()) << 64 | u128::from(dice.bits())),
            state: "source".into(),
            many_states: cell.origin.is_live() && dice.one_in(4),
            moments: Arc::default(),
            replicas: Vec::new(),
            allow_shrink: false,
            told: Vec::new(),
        };
        world.moment();
        world
    }

    /// Notes what was done.
    pub fn tell(&mut self, what: impl Into<String>) {
        // One after the other: both may be the same machine.
        let near = self.near.state().steps;
        let far = self.far.state().steps;
        self.told.push(format!("[{near} {far}] {}", what.into()));
    }

    /// The inode of the source.
    pub fn disk(&self) -> u64 {
        self.near.state().files.find(IMAGES, DISK).unwrap_or(0)
    }

    /// Some pages of the source cannot be read.
    pub fn spoil(&mut self) {
        let pages = self.size().div_ceil(PAGE as u64);
        let bad: Vec<usize> = (0..self.dice.within(1..5)).map(|_| self.dice.below(pages) as usize).collect();
        let disk = self.disk();
        self.near.state().files.spoil(disk, &bad);
        self.tell(format!("pages {bad:?} of {DISK} cannot be read"));
    }

    /// What the source holds.
    pub fn content(&self) -> Vec<u8> {
        let state = self.near.state();
        state.files.find(IMAGES, DISK).map(|disk| state.files.content(disk)).unwrap_or_default()
    }

    /// Bytes of the source.
    pub fn size(&self) -> u64 {
        let state = self.near.state();
        state.files.find(IMAGES, DISK).map_or(0, |disk| state.files.len(disk))
    }

    /// Notes the source's state of now as a moment.
    pub fn moment(&self) {
        let mut state = self.near.state();
        let disk = state.files.find(IMAGES, DISK).unwrap_or(0);
        let content = state.files.content_name(disk);
        drop(state);
        lock(&self.moments).add(content);
    }

    fn about(&self) -> SourceMetadata {
        let kind = if self.cell.origin.is_device() { DiskKind::Block } else { DiskKind::File };
        let path = self.near.scratch.join(DISK);
        let identity = Identity {
            kind,
            path: path.clone(),
            dev: 7,
            ino: 0,
            diskseq: None,
            size: self.size(),
            mtime_ns: 0,
            ctime_ns: 0,
            born_ns: None,
            part: None,
        };
        SourceMetadata { path, ..SourceMetadata::new(self.uuid, identity, BLOCK as u32) }
    }

    /// What is written down of the source, as a real one has it from its first opening on.
    fn known(&self, folder: &SimFolder, uuid: Uuid) -> Result<SourceMetadata, SourceError> {
        let about = SourceMetadata { uuid, ..self.about() };
        if let Some(known) = source::about_in(folder)? {
            return Ok(SourceMetadata { lives: known.lives, ..about });
        }
        source::write_about(folder, &about)?;
        Ok(about)
    }

    /// The lock of the source's state.
    fn hold(&self, process: &Arc<Process>, state: &str) -> Result<Arc<Held>, SourceError> {
        let busy = || SourceError::Busy { path: DISK.into(), holder: "another process".into() };
        Held::take(process, state).ok_or_else(busy)
    }

    fn open_source(&self, process: &Arc<Process>, read_only: bool) -> Result<Source, SourceError> {
        let held = self.hold(process, &self.state)?;
        let medium = SimBacking::new(held, process, &self.reader, IMAGES, DISK);
        let options = source::SourceOptions {
            direct: self.cell.origin != Origin::File,
            allow_shrink: self.allow_shrink,
            read_only,
            region: REGION,
            ..source::SourceOptions::default()
        };
        let disk = Arc::new(SimDisk::new(process, self.disk()));
        let folder = Arc::new(SimFolder::new(process, &self.state));
        Source::over(self.known(&folder, self.uuid)?, disk, folder, Box::new(medium), &options)
    }

    /// Starts a server of the source.
    pub fn serve(&mut self) -> Result<(), SourceError> {
        let process = self.near.process();
        *lock(&self.reader) = process.clone();
        let source = Arc::new(self.open_source(&process, false)?);
        self.server = Some(Server { process, source });
        Ok(())
    }

    /// Ends the server: cleanly, or as a kill does.
    pub fn stop(&mut self, cleanly: bool) -> Result<(), SourceError> {
        let Some(Server { process, source }) = self.server.take() else { return Ok(()) };
        end_server(&process, source, cleanly)
    }

    /// Drops what died with its machine or its process.
    pub fn bury(&mut self) {
        if self.server.as_ref().is_some_and(|server| !server.process.is_alive()) {
            let _ = self.stop(false);
        }
        for foreign in std::mem::take(&mut self.far.state().foreign) {
            for known in self.replicas.iter_mut().filter(|known| known.name == foreign.name) {
                (known.touched, known.noticed, known.soon) = (true, false, !foreign.late);
                known.tainted |= foreign.blind;
            }
        }
        for host in [&self.near, &self.far] {
            if host.state().is_down {
                host.boot();
                let is_device = self.cell.target == Target::Device;
                for known in self.replicas.iter_mut().filter(|_| host.name == self.far.name) {
                    // A kernel counts again.
                    let forgotten = if is_device { !known.noticed } else { known.soon };
                    known.tainted |= known.touched && forgotten;
                }
            }
        }
        self.moment();
        for host in [&self.near, &self.far] {
            let told = std::mem::take(&mut host.state().told);
            self.told.extend(told);
        }
    }

    /// Reaches the source from a process.
    pub fn handle(&self, process: &Arc<Process>) -> Result<Handle, SyncError> {
        self.handle_of(process, &self.state, self.uuid)
    }

    /// Reaches the source of that id from a process, with its state in the folder `state`.
    fn handle_of(&self, process: &Arc<Process>, state: &str, uuid: Uuid) -> Result<Handle, SyncError> {
        if !self.several.load(SeqCst) {
            *lock(&self.reader) = process.clone();
        }
        if let Some(server) = &self.server {
            return Ok(Handle::of_server(&server.source)?);
        }
        if self.cell.origin.is_live() {
            let tracker = SimTracker::new(self.hold(process, state)?, process, self.disk());
            let disk = Arc::new(SimDisk::new(process, self.disk()));
            let folder = Arc::new(SimFolder::new(process, state));
            let about = self.known(&folder, uuid)?;
            return Ok(Live::over(about, disk, folder, Box::new(tracker))?.into());
        }
        Ok(Handle::of_source(self.open_source(process, true)?))
    }

    /// A process at the source's machine, and one at the replica's: the same, where both ends are in one.
    pub fn processes(&self) -> (Arc<Process>, Arc<Process>) {
        let near = self.near.process();
        let far = if self.cell.way == Way::Local { near.clone() } else { self.far.process() };
        (near, far)
    }

    /// Ends processes that have done their work.
    pub fn exit(&self, near: &Process, far: &Process) {
        self.near.state().end(near);
        self.far.state().end(far);
    }

    /// A replica of the source, not made yet.
    pub fn add_replica(&mut self) -> usize {
        let name = name_of(self.replicas.len());
        if self.cell.target == Target::Device {
            let size = self.size() + SPARE;
            let mut state = self.far.state();
            let device = state.make(size.div_ceil(BLOCK) * BLOCK, true);
            state.files.link(IMAGES, &name, device);
            state.files.sync_names(IMAGES);
        }
        self.replicas.push(Known {
            name,
            touched: false,
            tainted: false,
            soon: false,
            noticed: false,
            meanwhile: false,
            settled: false,
            adopting: false,
            at: 0,
        });
        self.replicas.len() - 1
    }

    /// What a replica's file or device holds; `None` if there is none.
    pub fn raw(&self, which: usize) -> Option<Vec<u8>> {
        let state = self.far.state();
        Some(state.files.content(state.files.find(IMAGES, &self.replicas[which].name)?))
    }

    /// Bytes of a replica's file or device; `None` if there is none.
    pub fn raw_size(&self, which: usize) -> Option<u64> {
        let state = self.far.state();
        Some(state.files.len(state.files.find(IMAGES, &self.replicas[which].name)?))
    }

    /// The folder of a replica's state.
    pub fn folder_of(&self, which: usize) -> String {
        folder_of(&self.replicas[which].name)
    }

    /// Opens a replica from a process.
    pub fn open_replica(
        far: &Arc<Process>,
        target: Target,
        name: &str,
        options: &replica::ReplicaOptions,
    ) -> replica::Result<Replica> {
        let folder = SimFolder::new(far, &folder_of(name));
        let busy = || replica::ReplicaError::Busy { path: name.into(), holder: "another process".into() };
        let held = Held::take(far, name).ok_or_else(busy)?;
        let destination: Box<dyn Destination> = match target {
            Target::File => Box::new(SimFile::new(held, far, IMAGES, name)),
            Target::Device => {
                let device = far.host.state().files.find(IMAGES, name).unwrap_or(0);
                Box::new(SimDevice::new(held, far, name, device))
            }
        };
        let opened = Replica::begin(destination, Box::new(folder), options);
        let mut state = far.host.state();
        if opened.is_ok() && state.files.room.is_none() && state.is_well() {
            state.opened.insert(name.to_owned());
        }
        drop(state);
        opened
    }

    /// Opens a replica as `recover` does, and says where it stands, what it holds, and what it knows of the way there.
    pub fn recover(&self, which: usize) -> replica::Result<(Status, Option<Vec<u8>>, source::Trail)> {
        let process = self.far.process();
        let opened = Self::open_replica(
            &process,
            self.cell.target,
            &self.replicas[which].name,
            &replica::ReplicaOptions::default(),
        );
        let found = opened.map(|replica| {
            let content = replica.content().ok().and_then(|disk| {
                let mut bytes = vec![0; disk.len() as usize];
                disk.read_at(0, &mut bytes).ok().map(|()| bytes)
            });
            (replica.status().clone(), content, replica.trail())
        });
        self.far.state().end(&process);
        found
    }

    /// Works with the state folder that belongs to a replica, where each has its own: with another name of the source.
    pub fn use_state_of(&mut self, which: usize) {
        (self.state, self.uuid) = self.state_of(which);
    }

    fn state_of(&self, which: usize) -> (String, Uuid) {
        if !self.many_states {
            return (self.state.clone(), self.uuid);
        }
        let uuid = Uuid::from_u128((self.uuid.as_u128() & !0xff) | which as u128);
        (format!("source of {which}"), uuid)
    }

    /// A line between two processes.
    pub fn line(&self, near: &Process, far: &Process, cuts: Cuts) -> (Link, Link) {
        match self.cell.way {
            Way::Local => Link::pair(),
            Way::Far => far_link(near, far, cuts.0, cuts.1),
        }
    }

    /// A conversation about a replica: `say` at the source's end.
    pub fn converse<T>(
        &self,
        which: usize,
        cuts: Cuts,
        say: impl FnOnce(&Handle, Link, &std::path::Path, &str) -> Result<T, SyncError>,
    ) -> Result<T, SyncError> {
        let (near, far) = self.processes();
        let result = (|| {
            let (state, uuid) = self.state_of(which);
            let handle = self.handle_of(&near, &state, uuid)?;
            let (here, there) = self.line(&near, &far, cuts);
            let (name, target) = (self.replicas[which].name.clone(), self.cell.target);
            let path = self.far.scratch.join(&name);
            let said = std::thread::scope(|scope| {
                let far = &far;
                let (name, path) = (&name, &path);
                scope.spawn(move || {
                    sync::receive_over(there, &|options| Self::open_replica(far, target, name, options))
                });
                say(&handle, here, path, &format!("far:{name}"))
            })?;
            handle.close()?;
            Ok(said)
        })();
        self.exit(&near, &far);
        result
    }

    /// A sync.
    pub fn sync(
        &self,
        which: usize,
        options: &sync::SyncOptions,
        cuts: Cuts,
    ) -> Result<sync::Summary, SyncError> {
        self.converse(which, cuts, |handle, link, path, name| {
            sync::push(handle, link, path, name, options, &|_, _| {})
        })
    }

    /// Two syncs at once.
    pub fn syncs(
        &self,
        one: (usize, &sync::SyncOptions, Cuts),
        other: (usize, &sync::SyncOptions, Cuts),
    ) -> [Result<sync::Summary, SyncError>; 2] {
        let reader = self.near.process();
        *lock(&self.reader) = reader.clone();
        self.several.store(true, SeqCst);
        let results = std::thread::scope(|scope| {
            let first = scope.spawn(move || self.sync(one.0, one.1, one.2));
            let second = self.sync(other.0, other.1, other.2);
            let ended = || SyncError::Refused("a thread panicked".into());
            [first.join().unwrap_or_else(|_| Err(ended())), second]
        });
        self.several.store(false, SeqCst);
        self.near.state().end(&reader);
        results
    }

    /// A verify.
    pub fn verify(
        &self,
        which: usize,
        options: &sync::VerifyOptions,
        cuts: Cuts,
    ) -> Result<sync::Verified, SyncError> {
        self.converse(which, cuts, |handle, link, path, name| {
            sync::verify(handle, link, path, name, options, &|_, _| {})
        })
    }

    /// What a sync is told in this cell.
    pub fn options(&self, method: Option<sync::Method>) -> sync::SyncOptions {
        sync::SyncOptions {
            method,
            commit: self.cell.commit.into(),
            way: sync::Way::to(self.cell.way == Way::Far),
            // What an adopted copy has beyond the source may go.
            shrink: true,
            live: sync::LiveOptions {
                passes: 6,
                cut: CutOptions { freeze: FreezeMode::Auto, ..CutOptions::default() },
            },
            ..sync::SyncOptions::default()
        }
    }

    /// A mirror of the served source, while `write` writes to it. Ends when that has returned, or at the first trouble.
    pub fn mirror(
        &self,
        which: usize,
        cuts: Cuts,
        epoch_every: Duration,
        write: impl FnOnce(&dyn Fn() -> bool) + Send,
    ) -> Result<sync::MirrorSummary, SyncError> {
        let (near, far) = self.processes();
        let (name, target) = (self.replicas[which].name.clone(), self.cell.target);
        let path = self.far.scratch.join(&name);
        let options = mirror::options(self.options(None), epoch_every);
        let mut first = Some(cuts);
        let ends = Ends {
            near: &near,
            far: &far,
            line: &mut || self.line(&near, &far, first.take().unwrap_or(Cuts::NEVER)),
            attach: &mut || self.handle(&near),
            receive: &|there| {
                sync::receive_over(there, &|options| Self::open_replica(&far, target, &name, options))
            },
            destination: &path,
            name: &format!("far:{name}"),
        };
        let result = mirror::run(ends, &options, write);
        self.exit(&near, &far);
        result
    }

    /// A delta for whoever carries it on. The pipe breaks after so many bytes.
    pub fn extract(&self, since: Option<u64>, breaks: u64) -> Result<Vec<u8>, SyncError> {
        struct Pipe<'a>(&'a mut Vec<u8>, u64);
        impl Write for Pipe<'_> {
            fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                if self.1 < buf.len() as u64 {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                self.1 -= buf.len() as u64;
                self.0.extend_from_slice(buf);
                Ok(buf.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let process = self.near.process();
        let mut delta = Vec::new();
        let result = (|| {
            let handle = self.handle(&process)?;
            let since = since.map(|number| number.to_string());
            sync::extract(&handle, since.as_deref(), None, Pipe(&mut delta, breaks), &|_, _| {})?;
            Ok(handle.close()?)
        })();
        self.near.state().end(&process);
        result.map(|()| delta)
    }

    /// Merges a delta into a replica.
    pub fn merge(&self, which: usize, delta: &[u8]) -> Result<sync::Merged, SyncError> {
        let process = self.far.process();
        let name = &self.replicas[which].name;
        let result = sync::merge_over(
            || Self::open_replica(&process, self.cell.target, name, &replica::ReplicaOptions::default()),
            self.cell.commit.into(),
            delta,
        );
        self.far.state().end(&process);
        result
    }
}
