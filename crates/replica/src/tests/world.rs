//! A small world: a destination whose power can be cut at every step, and a source with its history.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use delta::{Encoder, Epoch, Frame, Header, Method, Record, Unit, Units, Writer};
use device::{Buf, Dir, Disk, Folder, InlineQueue, Queue, RamDisk, StateFile};
use lineage::{Lives, Point};
use tempfile::TempDir;
use testing::Random;
use testing::faulty::{FaultyDisk, FaultyFolder, Power};
use uuid::Uuid;

use crate::error::Result;
use crate::past::views::Views;
use crate::state::destination::{Destination, Name};
use crate::state::fingerprint::fingerprint;
use crate::state::lineage::Stamp;
use crate::{CommitMode, Committed, MomentView, Replica, ReplicaMembership, ReplicaOptions, Status};

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 4096;
/// A modelled file begins with its inode: what a power cut leaves is written anew, so real inodes don't last.
const HEAD: u64 = 4096;
const NAME: &str = "vm.raw";
const PARTIAL: &str = "vm.raw.partial";

/// A source: its content at each epoch, and what changed.
pub(crate) struct Source {
    pub id: Uuid,
    pub epochs: Vec<Epoch>,
    pub images: Vec<Vec<u8>>,
    changes: Vec<BTreeSet<u64>>,
    /// The blocks that cannot be read at present.
    unread: RefCell<BTreeSet<u64>>,
}

impl Source {
    /// What a replica knows of the way to its epoch leaves out nothing that changed. Returns how many earlier epochs it knows.
    pub(crate) fn check_trail(&self, replica: &Replica) -> usize {
        let trail = replica.trail();
        let Some(at) = replica.status().epoch.map(|epoch| self.index(&epoch)) else { return 0 };
        let earlier = trail.epochs().into_iter().filter(|epoch| *epoch != self.epochs[at]);
        let mut known = 0;
        for epoch in earlier {
            let Some(ranges) = trail.lacks(&epoch) else { continue };
            known += 1;
            let (then, now) = (&self.images[self.index(&epoch)], &self.images[at]);
            for (block, (then, now)) in then.chunks(4096).zip(now.chunks(4096)).enumerate() {
                let told = ranges.iter().any(|range| range.contains(&(block as u64 * 4096)));
                let short = then.len().min(now.len());
                assert!(
                    told || then[..short] == now[..short],
                    "block {block} since {epoch:?} is not in the trail to {at}"
                );
            }
        }
        known
    }

    /// Epochs of sizes in blocks. The first image has content, zero blocks and holes.
    pub(crate) fn new(seed: u64, blocks: &[u64]) -> Source {
        let mut dice = Random::seeded(seed);
        let (epochs, images, changes) = (vec![], vec![], vec![]);
        let mut source = Source { id: Uuid::new_v4(), epochs, images, changes, unread: RefCell::default() };
        for (n, &size) in blocks.iter().enumerate() {
            let mut image = source.images.last().cloned().unwrap_or_default();
            let before = image.len() as u64 / BLOCK;
            image.resize((size * BLOCK) as usize, 0);
            // Growth marks the new blocks.
            let mut changed: BTreeSet<u64> = (before.min(size)..size).collect();
            let mut at = dice.below(3);
            while at < size {
                let run = 1 + dice.below(3);
                for block in at..(at + run).min(size) {
                    let content = match dice.below(4) {
                        0 => 0,
                        _ => (dice.bits() % 255 + 1) as u8,
                    };
                    let place = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
                    image[place.clone()].fill(content);
                    if content != 0 {
                        image[place.start..place.start + 8].copy_from_slice(&dice.bits().to_le_bytes());
                    }
                    changed.insert(block);
                }
                at += run + 1 + dice.below(6);
            }
            source.epochs.push(Epoch { number: 40 + n as u64, id: Uuid::new_v4() });
            source.images.push(image);
            source.changes.push(changed);
        }
        source
    }

    /// A source whose epochs each have the content of the one before with parts of it moved about.
    pub(crate) fn moving(seed: u64, blocks: &[u64]) -> Source {
        let mut source = Source::new(seed, blocks);
        let mut dice = Random::seeded(seed ^ 0x5eed);
        for n in 1..blocks.len() {
            let mut image = source.images[n - 1].clone();
            for _ in 0..3 {
                let (at, len) = (dice.below(image.len() as u64), dice.below(12 * BLOCK));
                let part: Vec<u8> =
                    image.drain(at as usize..(at + len).min(image.len() as u64) as usize).collect();
                let to = dice.below(image.len() as u64) as usize;
                image.splice(to..to, part);
            }
            let fresh: Vec<u8> = (0..700).map(|_| dice.bits() as u8).collect();
            image.splice(0..0, fresh);
            image.resize(source.images[n].len(), 0x77);
            source.changes[n] = (0..blocks[n].max(blocks[n - 1])).collect();
            source.images[n] = image;
        }
        source
    }

    /// A delta that copies within the destination, as a sync finds it.
    pub(crate) fn rolling(&self, status: &Status, content: &[u8], to: usize, in_place: bool) -> Vec<u8> {
        let mut header = self.header(to, to, Method::Rolling);
        header.size_before = status.size;
        header.binds = Some(status.nonce);
        let (new, old): (Arc<dyn Disk>, Arc<dyn Disk>) =
            (Arc::new(RamDisk::from_bytes(&self.images[to])), Arc::new(RamDisk::from_bytes(content)));
        let size = status.size.max(self.size(to));
        let shape = compare::rolling::SumParams { size, block: 512, key: [3; 32], keep_going: false };
        let mut index = compare::rolling::BlockIndex::new(shape.clone(), status.size).unwrap();
        compare::rolling::block_sums(&old, &shape, |(said, sums)| index.hear(&said, &sums)).unwrap();
        index.finish();
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        let (mut encoder, unit) = Encoder::new(&header, None).unwrap();
        writer.unit(&unit).unwrap();
        let mut frames: Vec<Frame> = Vec::new();
        let in_place = in_place.then(compare::rolling::InPlace::default);
        let found = |change| {
            let (record, data) = match change {
                compare::rolling::Change::Data { offset, data } => {
                    (Record::Data { offset, len: data.len() as u64 }, data)
                }
                compare::rolling::Change::Zero(r) => {
                    (Record::Zero { offset: r.start, len: r.end - r.start }, Buf::default())
                }
                compare::rolling::Change::Copy { offset, len, from, hash } => {
                    (Record::Copy { offset, len, from, hash }, Buf::default())
                }
            };
            match frames.last_mut().filter(|f| f.records.len() < 3 && f.data.is_empty()) {
                Some(frame) => {
                    frame.records.push(record);
                    frame.data = data;
                }
                None => frames.push(Frame { records: vec![record], data }),
            }
            Ok(())
        };
        compare::rolling::changes(&new, &index, in_place, found, |_| {}).unwrap();
        for frame in frames {
            writer.unit(&encoder.frame(frame).unwrap()).unwrap();
        }
        writer.unit(&encoder.trailer()).unwrap();
        bytes
    }

    /// From now on, these blocks cannot be read, and no others.
    pub(crate) fn cannot_read(&self, blocks: impl IntoIterator<Item = u64>) {
        self.unread.replace(blocks.into_iter().collect());
    }

    pub(crate) fn size(&self, at: usize) -> u64 {
        self.images[at].len() as u64
    }

    pub(crate) fn index(&self, epoch: &Epoch) -> usize {
        self.epochs.iter().position(|e| e == epoch).expect("an epoch of this source")
    }

    pub(crate) fn changed(&self, from: usize, to: usize) -> BTreeSet<u64> {
        let mut all: BTreeSet<u64> = self.changes[from + 1..=to].iter().flatten().copied().collect();
        all.retain(|b| b * BLOCK < self.size(to));
        all
    }

    pub(crate) fn header(&self, from: usize, to: usize, method: Method) -> Header {
        let size_before = if method == Method::Copy { 0 } else { self.size(from) };
        let chain = self.epochs[from..=to].to_vec();
        let sizes = (size_before, self.size(to));
        Header { lives: self.lives(to), ..Header::new(self.id, method, chain, sizes, BLOCK as u32) }
    }

    /// The lives that led to an epoch: a single one.
    pub(crate) fn lives(&self, to: usize) -> Lives {
        Lives::first(self.id).reaching(Point::number(self.epochs[to].number, 0))
    }

    /// A delta of these blocks, as bytes.
    pub(crate) fn encode(&self, header: &Header, to: usize, blocks: &BTreeSet<u64>) -> Vec<u8> {
        self.encode_in(header, to, blocks, 3)
    }

    /// A delta of these blocks, with so many a frame, as bytes.
    pub(crate) fn encode_in(
        &self,
        header: &Header,
        to: usize,
        blocks: &BTreeSet<u64>,
        frame_blocks: usize,
    ) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        let (mut encoder, unit) = Encoder::new(header, None).unwrap();
        writer.unit(&unit).unwrap();
        let blocks: Vec<u64> = blocks.iter().copied().collect();
        for blocks in blocks.chunks(frame_blocks) {
            let (mut records, mut data) = (Vec::<Record>::new(), Vec::new());
            for &block in blocks {
                let (offset, len) = (block * BLOCK, BLOCK);
                let content = &self.images[to][offset as usize..(offset + len) as usize];
                let record = match content.iter().all(|b| *b == 0) {
                    _ if self.unread.borrow().contains(&block) => Record::Unsure { offset, len },
                    true => Record::Zero { offset, len },
                    false => Record::Data { offset, len },
                };
                if matches!(record, Record::Data { .. }) {
                    data.extend_from_slice(content);
                }
                if !records.last_mut().is_some_and(|last| last.extend(record)) {
                    records.push(record);
                }
            }
            let unit = encoder.frame(Frame { records, data: Buf::from(&data[..]) }).unwrap();
            writer.unit(&unit).unwrap();
        }
        writer.unit(&encoder.trailer()).unwrap();
        bytes
    }

    /// A delta from one epoch to another, as `extract` makes it.
    pub(crate) fn tracked(&self, from: usize, to: usize) -> Vec<u8> {
        self.encode(&self.header(from, to, Method::Tracked), to, &self.changed(from, to))
    }

    /// A seed, as `extract` makes it.
    pub(crate) fn seed(&self, to: usize) -> Vec<u8> {
        self.encode(&self.header(to, to, Method::Copy), to, &self.allocated(to))
    }

    /// The blocks with content, and every third of the others, for a source tells some zeroes and not all.
    pub(crate) fn allocated(&self, to: usize) -> BTreeSet<u64> {
        let is_zero = |b: &u64| {
            self.images[to][(b * BLOCK) as usize..((b + 1) * BLOCK) as usize].iter().all(|byte| *byte == 0)
        };
        (0..self.size(to) / BLOCK).filter(|b| b % 3 == 0 || !is_zero(b)).collect()
    }

    /// What a replica that stands so lacks: as a sync finds it.
    pub(crate) fn lacks(&self, status: &Status, content: Option<&[u8]>, to: usize) -> Vec<u8> {
        let size = self.size(to);
        let known = status.positions.last().map_or(0, |p| p.upto);
        let mut header = self.header(to, to, Method::Tracked);
        header.size_before = status.size;
        header.binds = Some(status.nonce);
        header.resumes = status.resumes;
        if status.positions.is_empty() {
            header.method = Method::Copy;
            header.size_before = 0;
            header.binds = status.under_way().then_some(status.nonce);
            header.resumes = None;
            return self.encode(&header, to, &self.allocated(to));
        }
        if status.positions.iter().any(|p| p.epoch.is_none()) {
            header.method = Method::Compare;
            header.resumes = None;
            let content = content.expect("a content to compare");
            let differs = |b: &u64| {
                let place = (b * BLOCK) as usize..((b + 1) * BLOCK) as usize;
                self.unread.borrow().contains(b)
                    || content.get(place.clone()).is_none_or(|c| c != &self.images[to][place])
            };
            let blocks = (0..size / BLOCK).filter(differs).collect();
            return self.encode(&header, to, &blocks);
        }
        let mut wanted = BTreeSet::new();
        let mut start = 0;
        let mut oldest = to;
        for position in &status.positions {
            let at = self.index(&position.epoch.unwrap());
            oldest = oldest.min(at);
            wanted.extend(
                self.changed(at, to).into_iter().filter(|b| (start..position.upto).contains(&(b * BLOCK))),
            );
            start = position.upto;
        }
        wanted.extend(self.allocated(to).into_iter().filter(|b| b * BLOCK >= known));
        let unsure = status.unsure.ranges().flat_map(|r| r.start / BLOCK..r.end.div_ceil(BLOCK));
        wanted.extend(unsure.filter(|b| b * BLOCK < size));
        if !status.under_way() && status.unsure.is_empty() {
            header.binds = None;
            header.chain = self.epochs[oldest..=to].to_vec();
            header.size_before = self.size(oldest);
        }
        self.encode(&header, to, &wanted)
    }
}

/// What a replica holds, to be compared.
pub(crate) fn content(replica: &Replica) -> Option<Vec<u8>> {
    let disk = replica.content().ok()?;
    let mut bytes = vec![0; disk.len() as usize];
    disk.read_at(0, &mut bytes).ok()?;
    Some(bytes)
}

/// The units of a delta.
pub(crate) fn units(bytes: &[u8]) -> Vec<Unit> {
    let (mut units, mut all) = (Units::new(bytes), Vec::new());
    while let Ok(Some(unit)) = units.next() {
        all.push(unit);
    }
    all
}

/// Merges a delta.
pub(crate) fn merge(replica: &mut Replica, bytes: &[u8], commit: CommitMode) -> Result<Committed> {
    let mut units = units(bytes).into_iter();
    let mut receipt = replica.receive(units.next().expect("a header"), commit)?;
    for unit in units {
        receipt.unit(unit)?;
    }
    receipt.finish()
}

/// Receives so many frames of a delta, then the link is cut.
pub(crate) fn receive_part(
    replica: &mut Replica,
    bytes: &[u8],
    commit: CommitMode,
    frames: usize,
) -> Result<()> {
    let mut units = units(bytes).into_iter();
    let mut receipt = replica.receive(units.next().expect("a header"), commit)?;
    for unit in units.take(frames) {
        receipt.unit(unit)?;
    }
    receipt.keep()
}

/// What kind of destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Device,
}

/// A destination's machine, from one life to the next.
pub(crate) struct World {
    temp: TempDir,
    pub kind: Kind,
    ram: Arc<RamDisk>,
    inodes: Arc<AtomicU64>,
    /// Bytes that may still be written to the destination.
    pub room: Arc<AtomicU64>,
    /// How long each write to a device takes.
    pub delay: Duration,
    /// It is said what the destination holds, for readers.
    pub read: bool,
    /// The folder of the replica's group, in this life.
    pub group: Mutex<Option<Arc<FaultyFolder>>>,
}

/// A folder that several have open.
pub(crate) struct SharedFolder(pub Arc<FaultyFolder>);

impl Folder for SharedFolder {
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
        self.0.open(name, create)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.0.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.remove(name)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.0.list()
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
}

fn shared(group: &Option<Arc<FaultyFolder>>) -> io::Result<Box<dyn Folder>> {
    match group {
        Some(folder) => Ok(Box::new(SharedFolder(folder.clone()))),
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

/// A device's size in the tests.
pub(crate) const CAPACITY: u64 = 96 * BLOCK;

impl World {
    pub(crate) fn new(kind: Kind) -> World {
        let temp = testing::in_memory();
        for name in ["site", "state"] {
            std::fs::create_dir(temp.path().join(name)).unwrap();
        }
        World {
            temp,
            kind,
            ram: Arc::new(RamDisk::new(CAPACITY)),
            inodes: Arc::new(AtomicU64::new(1)),
            room: Arc::new(AtomicU64::new(u64::MAX)),
            delay: Duration::ZERO,
            read: false,
            group: Mutex::default(),
        }
    }

    /// A copy of this world.
    pub(crate) fn fork(&self) -> World {
        let other = World::new(self.kind);
        for folder in ["site", "state"] {
            for entry in std::fs::read_dir(self.temp.path().join(folder)).unwrap() {
                let entry = entry.unwrap();
                std::fs::copy(entry.path(), other.temp.path().join(folder).join(entry.file_name())).unwrap();
            }
        }
        let mut bytes = vec![0; CAPACITY as usize];
        self.ram.read_at(0, &mut bytes).unwrap();
        other.ram.write_at(0, &bytes).unwrap();
        other.inodes.store(self.inodes.load(SeqCst), SeqCst);
        other
    }

    pub(crate) fn site(&self) -> PathBuf {
        self.temp.path().join("site")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.temp.path().join("state")
    }

    /// What a used device holds.
    pub(crate) fn soil(&self) {
        let mut dice = Random::seeded(7);
        let mut bytes = vec![0; CAPACITY as usize];
        bytes.iter_mut().for_each(|b| *b = dice.bits() as u8);
        self.ram.write_at(0, &bytes).unwrap();
    }

    /// Opens the replica in a life of its own.
    pub(crate) fn open(&self, power: &Power) -> Result<Replica> {
        self.open_with(power, false, false)
    }

    pub(crate) fn open_with(&self, power: &Power, adopt: bool, replace: bool) -> Result<Replica> {
        let folder = FaultyFolder::new(power, &self.state()).unwrap();
        self.open_in(power, Box::new(folder), &ReplicaOptions { adopt, replace, ..ReplicaOptions::default() })
    }

    /// Opens it for a sync of its source.
    pub(crate) fn open_for_sync(&self, power: &Power) -> Result<Replica> {
        let folder = FaultyFolder::new(power, &self.state()).unwrap();
        self.open_in(
            power,
            Box::new(folder),
            &ReplicaOptions { term: crate::FIRST_TERM, ..ReplicaOptions::default() },
        )
    }

    /// Opens it with this kept of its past from the next commit on.
    pub(crate) fn open_keeping(&self, power: &Power, keep: &crate::Keep) -> Result<Replica> {
        let folder = FaultyFolder::new(power, &self.state()).unwrap();
        let options = ReplicaOptions { keep: Some(keep.clone()), ..ReplicaOptions::default() };
        self.open_in(power, Box::new(folder), &options)
    }

    pub(crate) fn open_doubting(&self, power: &Power) -> Result<Replica> {
        let folder = FaultyFolder::new(power, &self.state()).unwrap();
        self.open_in(power, Box::new(folder), &ReplicaOptions { doubt: true, ..ReplicaOptions::default() })
    }

    /// The folders of a machine, for several lives of a process between two power cuts.
    pub(crate) fn machine(&self, power: &Power) -> Machine {
        let folder = |path: &Path| Arc::new(FaultyFolder::new(power, path).unwrap());
        let syncs = Arc::new(Syncs::default());
        Machine { site: folder(&self.site()), state: folder(&self.state()), syncs }
    }

    /// Opens the replica's file in a process that is killed after so many steps, on a machine that lives on.
    pub(crate) fn open_mortal(&self, machine: &Machine, steps: &Arc<AtomicU64>) -> Result<Replica> {
        self.open_mortal_with(machine, steps, &ReplicaOptions::default())
    }

    pub(crate) fn open_mortal_with(
        &self,
        machine: &Machine,
        steps: &Arc<AtomicU64>,
        options: &ReplicaOptions,
    ) -> Result<Replica> {
        let mortal = |folder: &Arc<FaultyFolder>| {
            let (folder, steps, syncs) = (folder.clone(), steps.clone(), machine.syncs.clone());
            Mortal { folder, steps, syncs }
        };
        let destination = ModelFile {
            path: self.site().join(NAME),
            folder: Box::new(mortal(&machine.site)),
            inodes: self.inodes.clone(),
            room: self.room.clone(),
            group: None,
        };
        let mut replica = Replica::begin(Box::new(destination), Box::new(mortal(&machine.state)), options)?;
        replica.save_every(5 * BLOCK);
        Ok(replica)
    }

    pub(crate) fn open_in(
        &self,
        power: &Power,
        folder: Box<dyn Folder>,
        options: &ReplicaOptions,
    ) -> Result<Replica> {
        let group = self.group.lock().unwrap().clone();
        let destination: Box<dyn Destination> = match self.kind {
            Kind::File => Box::new(ModelFile {
                path: self.site().join(NAME),
                folder: Box::new(FaultyFolder::new(power, &self.site()).unwrap()),
                inodes: self.inodes.clone(),
                room: self.room.clone(),
                group,
            }),
            Kind::Device => {
                let disk = FaultyDisk::new(power, self.ram.clone() as _);
                disk.shuffle_completions(power.steps() + 3);
                disk.delay(self.delay);
                if self.room.load(SeqCst) != u64::MAX {
                    disk.full_after(self.room.load(SeqCst));
                }
                Box::new(ModelDevice {
                    path: "/dev/model".into(),
                    disk: Arc::new(disk),
                    group,
                    marks: Mutex::default(),
                })
            }
        };
        let views = match self.read {
            true => Views::of(&Dir::existing(&self.state()).unwrap()).unwrap(),
            false => Views::default(),
        };
        let mut replica = Replica::begin_read(destination, folder, options, views)?;
        replica.save_every(5 * BLOCK);
        Ok(replica)
    }

    /// Begins to read the replica, as it is now or was in a state. `None` where it is written to.
    pub(crate) fn reader(&self, to: Option<Uuid>) -> Result<Option<MomentView>> {
        let path = self.site().join(NAME);
        let raw = || -> Result<(Arc<dyn Disk>, u64)> {
            if self.kind == Kind::Device {
                return Ok((self.ram.clone(), 0));
            }
            let file = File::open(&path).map_err(crate::error::io_error("open", &path))?;
            let mut inode = [0; 8];
            file.read_exact_at(&mut inode, 0).unwrap();
            Ok((Arc::new(OpenFile(file)), u64::from_le_bytes(inode)))
        };
        MomentView::over(&path, &Dir::existing(&self.state()).unwrap(), &raw, to)
    }

    /// What the destination holds, `None` if there is none.
    pub(crate) fn raw(&self) -> Option<Vec<u8>> {
        match self.kind {
            Kind::File => {
                std::fs::read(self.site().join(NAME)).ok().map(|bytes| bytes[HEAD as usize..].to_vec())
            }
            Kind::Device => {
                let mut bytes = vec![0; CAPACITY as usize];
                self.ram.read_at(0, &mut bytes).unwrap();
                Some(bytes)
            }
        }
    }

    /// True if the destination is the image; what lies behind it on a device is nobody's.
    pub(crate) fn holds(&self, image: &[u8]) -> bool {
        match (self.raw(), self.kind) {
            (Some(raw), Kind::File) => raw == image,
            (Some(raw), Kind::Device) => raw.get(..image.len()) == Some(image),
            (None, _) => false,
        }
    }

    /// Writes to the destination behind the replica's back.
    pub(crate) fn tamper(&self, offset: u64, byte: u8) {
        match self.kind {
            Kind::File => {
                let file = std::fs::File::options().write(true).open(self.site().join(NAME)).unwrap();
                file.write_at(&[byte], HEAD + offset).unwrap();
            }
            Kind::Device => self.ram.write_at(offset, &[byte]).unwrap(),
        }
    }

    /// Puts another file in the destination's place.
    pub(crate) fn put(&self, content: &[u8]) {
        let mut bytes = vec![0; HEAD as usize];
        bytes[..8].copy_from_slice(&self.inodes.fetch_add(1, SeqCst).to_le_bytes());
        bytes.extend_from_slice(content);
        std::fs::write(self.site().join(NAME), bytes).unwrap();
    }

    pub(crate) fn remove(&self) {
        std::fs::remove_file(self.site().join(NAME)).unwrap();
    }

    /// What lies in the site and in the folder of the state, but for the trail.
    pub(crate) fn names(&self) -> Vec<String> {
        let dirs = [self.site(), self.state()];
        let mut names: Vec<String> = dirs
            .iter()
            .flat_map(|d| std::fs::read_dir(d).unwrap())
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != "history")
            .collect();
        names.sort();
        names
    }
}

/// A file, all of whose steps can be cut.
struct ModelFile {
    path: PathBuf,
    folder: Box<dyn Folder>,
    inodes: Arc<AtomicU64>,
    room: Arc<AtomicU64>,
    group: Option<Arc<FaultyFolder>>,
}

fn file_name(name: Name) -> &'static str {
    match name {
        Name::Final => NAME,
        Name::Temporary => PARTIAL,
    }
}

impl Destination for ModelFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn is_device(&self) -> bool {
        false
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        let file = match self.folder.open(file_name(name), false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut bytes = vec![0; file.len()? as usize];
        file.read_at(0, &mut bytes)?;
        if (bytes.len() as u64) < HEAD {
            // Cut while it was made.
            return Ok(Some(Stamp { inode: 0, size: 0, changed: 0, ..Stamp::default() }));
        }
        let inode = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let hash = blake3::hash(&bytes[HEAD as usize..]);
        let changed = i64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap());
        Ok(Some(Stamp { inode, size: bytes.len() as u64 - HEAD, changed, ..Stamp::default() }))
    }

    fn settle(&self) -> io::Result<Stamp> {
        self.stamp(Name::Final)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self, name: Name) -> Result<Arc<dyn Disk>> {
        let file =
            self.folder.open(file_name(name), false).map_err(crate::error::io_error("open", &self.path))?;
        Ok(Arc::new(ModelDisk { file, room: self.room.clone() }))
    }

    fn create(&self) -> io::Result<u64> {
        if self.folder.list()?.iter().any(|n| n == PARTIAL) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = self.inodes.fetch_add(1, SeqCst);
        let file = self.folder.open(PARTIAL, true)?;
        let mut head = vec![0; HEAD as usize];
        head[..8].copy_from_slice(&inode.to_le_bytes());
        file.write_at(0, &head)?;
        // The inode is part of the file's being, so never lost where the name is not.
        file.sync()?;
        Ok(inode)
    }

    fn clone_final(&self) -> io::Result<()> {
        let from = self.folder.open(NAME, false)?;
        let mut bytes = vec![0; (from.len()? - HEAD) as usize];
        from.read_at(HEAD, &mut bytes)?;
        self.folder.open(PARTIAL, false)?.write_at(HEAD, &bytes)
    }

    fn rename(&self, replace: bool) -> io::Result<()> {
        if !replace && self.folder.list()?.iter().any(|n| n == NAME) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.folder.rename(PARTIAL, NAME)
    }

    fn remove(&self) -> io::Result<()> {
        self.folder.remove(PARTIAL)
    }

    fn sync(&self) -> io::Result<()> {
        self.folder.sync()
    }

    fn group(&self, _group: &ReplicaMembership) -> io::Result<Box<dyn Folder>> {
        shared(&self.group)
    }
}

/// A modelled file's content.
struct ModelDisk {
    file: Box<dyn StateFile>,
    room: Arc<AtomicU64>,
}

impl ModelDisk {
    fn within(&self, range: Range<u64>) -> io::Result<()> {
        if range.end <= self.len() { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }
}

impl Disk for ModelDisk {
    fn len(&self) -> u64 {
        self.file.len().map_or(0, |len| len - HEAD)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_at(HEAD + offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.within(offset..offset + buf.len() as u64)?;
        let room = self.room.load(SeqCst);
        if room != u64::MAX {
            let left = room.checked_sub(buf.len() as u64).ok_or(io::ErrorKind::StorageFull)?;
            self.room.store(left, SeqCst);
        }
        self.file.write_at(HEAD + offset, buf)
    }

    fn zero(&self, offset: u64, len: u64, _unmap: bool, _fast: bool) -> io::Result<()> {
        self.within(offset..offset + len)?;
        self.file.write_at(HEAD + offset, &vec![0; len as usize])
    }

    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        self.file.set_len(HEAD + len)
    }

    fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(InlineQueue::new(self)))
    }
}

/// A modelled file's content, as another process sees it.
struct OpenFile(File);

impl Disk for OpenFile {
    fn len(&self) -> u64 {
        self.0.metadata().unwrap().len() - HEAD
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buf, HEAD + offset)
    }

    fn write_at(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        unreachable!()
    }

    fn zero(&self, _offset: u64, _len: u64, _unmap: bool, _fast: bool) -> io::Result<()> {
        unreachable!()
    }

    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        unreachable!()
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(InlineQueue::new(self)))
    }
}

/// A device.
struct ModelDevice {
    path: PathBuf,
    disk: Arc<FaultyDisk>,
    group: Option<Arc<FaultyFolder>>,
    marks: Mutex<Vec<u64>>,
}

impl Destination for ModelDevice {
    fn path(&self) -> &Path {
        &self.path
    }

    fn is_device(&self) -> bool {
        true
    }

    fn stamp(&self, name: Name) -> io::Result<Option<Stamp>> {
        if name == Name::Temporary {
            return Ok(None);
        }
        let marks = self.marks.lock().unwrap().clone();
        let print = fingerprint(&*self.disk, &marks)?;
        Ok(Some(Stamp { size: self.disk.len(), print, marks, ..Stamp::default() }))
    }

    fn mark(&self, blocks: &[u64]) {
        *self.marks.lock().unwrap() = blocks.to_vec();
    }

    fn glance(&self) -> io::Result<Option<Stamp>> {
        Ok(Some(Stamp { size: self.disk.len(), ..Stamp::default() }))
    }

    fn settle(&self) -> io::Result<Stamp> {
        self.stamp(Name::Final)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn open(&self, _name: Name) -> Result<Arc<dyn Disk>> {
        Ok(self.disk.clone())
    }

    fn group(&self, _group: &ReplicaMembership) -> io::Result<Box<dyn Folder>> {
        shared(&self.group)
    }
}

/// What outlives a process that is killed: what it did and did not sync may still be lost by a later power cut.
pub(crate) struct Machine {
    site: Arc<FaultyFolder>,
    state: Arc<FaultyFolder>,
    pub syncs: Arc<Syncs>,
}

/// The syncs of files, one of which may fail.
#[derive(Default)]
pub(crate) struct Syncs {
    names: Mutex<Vec<String>>,
    /// Counted from 1; 0 for none.
    pub fails: AtomicU64,
}

impl Syncs {
    fn sync(&self, name: &str) -> io::Result<()> {
        let mut names = self.names.lock().unwrap();
        names.push(name.into());
        if names.len() as u64 == self.fails.load(SeqCst) {
            Err(io::Error::from_raw_os_error(5))
        } else {
            Ok(())
        }
    }

    /// The file whose sync failed, and how often it was synced after that.
    pub(crate) fn failed(&self) -> Option<(String, usize)> {
        let names = self.names.lock().unwrap();
        let at = self.fails.load(SeqCst).checked_sub(1)? as usize;
        let name = names.get(at)?;
        Some((name.clone(), names[at + 1..].iter().filter(|n| *n == name).count()))
    }
}

/// A folder as a process sees it that is killed after so many steps.
struct Mortal {
    folder: Arc<FaultyFolder>,
    steps: Arc<AtomicU64>,
    syncs: Arc<Syncs>,
}

fn step(steps: &AtomicU64) -> io::Result<()> {
    match steps.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)) {
        Ok(_) => Ok(()),
        Err(_) => Err(io::Error::other("killed")),
    }
}

impl Folder for Mortal {
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
        if create {
            step(&self.steps)?;
        }
        let file = self.folder.open(name, create)?;
        Ok(Box::new(MortalFile {
            name: name.into(),
            file,
            steps: self.steps.clone(),
            syncs: self.syncs.clone(),
        }))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        step(&self.steps)?;
        self.folder.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        step(&self.steps)?;
        self.folder.remove(name)
    }
    fn sync(&self) -> io::Result<()> {
        step(&self.steps)?;
        self.folder.sync()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        self.folder.list()
    }
    fn path(&self) -> &Path {
        self.folder.path()
    }
}

struct MortalFile {
    name: String,
    file: Box<dyn StateFile>,
    steps: Arc<AtomicU64>,
    syncs: Arc<Syncs>,
}

impl StateFile for MortalFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        step(&self.steps)?;
        self.file.write_at(offset, buf)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        step(&self.steps)?;
        self.file.set_len(len)
    }
    fn reserve(&self, len: u64) -> io::Result<()> {
        self.file.reserve(len)
    }
    fn sync(&self) -> io::Result<()> {
        step(&self.steps)?;
        self.syncs.sync(&self.name)?;
        self.file.sync()
    }
    fn map(&self, len: u64) -> io::Result<device::Mapping> {
        self.file.map(len)
    }
}
