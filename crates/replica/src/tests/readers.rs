//! Readers of a replica beside commits: whatever is committed, fails or is killed beneath, a reader sees its moment or an error,
//! and the replica is what it would be without.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use device::Disk;
use testing::faulty::{Keep as Kept, Outage, Power};
use testing::{Random, rounds};

use super::batches;
use super::crash::on;
use super::lives::check;
use super::world::*;
use crate::{CommitMode, Keep, MomentView, Replica};

/// Reads a moment in random parts, in random order. The bytes of a part that cannot be read are `None`.
fn read_in_parts(view: &MomentView, dice: &mut Random) -> (Vec<u8>, io::Result<()>) {
    let mut bytes = vec![0; view.len() as usize];
    let mut parts: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < view.len() {
        let len = (1 + dice.below(5 * BLOCK)).min(view.len() - at);
        parts.push((at, len));
        at += len;
    }
    while !parts.is_empty() {
        let (at, len) = parts.swap_remove(dice.index(parts.len()));
        if let Err(error) = view.read_at(at, &mut bytes[at as usize..(at + len) as usize]) {
            return (bytes, Err(error));
        }
    }
    (bytes, Ok(()))
}

/// A reader, and what it must see.
struct Reader {
    view: Arc<MomentView>,
    image: usize,
}

impl Reader {
    /// False if it is lost, and says so.
    fn sees_its_moment(&self, source: &Source, dice: &mut Random, what: &str) -> bool {
        match read_in_parts(&self.view, dice) {
            (bytes, Ok(())) => {
                assert!(
                    bytes == source.images[self.image],
                    "{what}: what is read is not image {}",
                    self.image
                );
                true
            }
            (_, Err(error)) => {
                let lost = self.view.lost();
                self.view.let_go();
                assert!(lost.is_some_and(|why| error.to_string().contains(&why)), "{what}: {error}");
                false
            }
        }
    }
}

/// A life with readers.
struct Life {
    source: Source,
    world: World,
    keep: Keep,
    mirrors: bool,
    /// Streams of batches, by the image that they lead to.
    streams: Vec<(uuid::Uuid, usize)>,
    readers: Vec<Reader>,
    dice: Random,
    trace: String,
    lost: usize,
    read: usize,
}

impl Life {
    fn new(seed: u64) -> Life {
        let mut dice = Random::seeded(seed);
        let kind = if dice.coin() { Kind::File } else { Kind::Device };
        let mirrors = dice.coin();
        let source = match mirrors {
            true => batches::source(),
            false => {
                let sizes = [(); 8].map(|()| if dice.coin() { 40 } else { 20 + dice.below(44) });
                Source::new(dice.bits(), &sizes)
            }
        };
        let keep = match dice.coin() {
            true => Keep { last: 1 + dice.below(4), bytes: Some(u64::MAX), ..Keep::default() },
            false => Keep::default(),
        };
        let mut world = World::new(kind);
        world.read = true;
        merge(&mut world.open_keeping(&on(), &keep).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
        let trace = format!("DSYNC_SEED={seed} {kind:?}");
        Life {
            source,
            world,
            keep,
            mirrors,
            streams: Vec::new(),
            readers: Vec::new(),
            dice,
            trace,
            lost: 0,
            read: 0,
        }
    }

    /// Somebody begins to read, at the present moment or an earlier one.
    fn begin(&mut self) {
        if self.dice.coin() {
            self.begin_at(None);
        } else if let Ok(replica) = self.world.open(&on()) {
            let moments = replica.history().unwrap().moments;
            if !moments.is_empty() {
                let moment = &moments[self.dice.index(moments.len())];
                self.begin_at(Some(moment.state));
            }
        }
    }

    fn begin_at(&mut self, to: Option<uuid::Uuid>) {
        let Ok(Some(view)) = self.world.reader(to) else { return };
        let batch = self.streams.iter().find(|(stream, _)| *stream == view.state()).map(|(_, image)| *image);
        let image = batch.unwrap_or_else(|| self.source.index(&view.epoch()));
        self.trace += &format!("; reads {image}");
        self.readers.push(Reader { view: Arc::new(view), image });
    }

    fn look(&mut self) {
        let mut readers = std::mem::take(&mut self.readers);
        readers.retain(|reader| {
            let sees = reader.sees_its_moment(&self.source, &mut self.dice, &self.trace);
            self.lost += usize::from(!sees);
            self.read += usize::from(sees);
            sees
        });
        self.readers = readers;
        if !self.readers.is_empty() && self.dice.one_in(5) {
            self.readers.swap_remove(self.dice.index(self.readers.len()));
        }
    }

    /// One command, which something may fail or kill, with others that read meanwhile.
    fn step(&mut self) {
        if self.dice.coin() {
            self.begin();
        }
        let power = Power::new(Outage::Kill);
        let fails = self.dice.one_in(3);
        if fails {
            let errno = if self.dice.coin() { 5 } else { 28 };
            let (step, count) = (1 + self.dice.below(80), 1 + self.dice.below(3));
            power.fail_at(step, count, errno);
            self.trace += &format!("; error {errno} at {step}, {count} times");
        }
        if self.dice.one_in(3) {
            let cut = 1 + self.dice.below(100);
            power.cut_at(cut);
            self.trace += &format!("; killed at {cut}");
        }
        let ends = Arc::<AtomicBool>::default();
        let (lost, what, seed) = (self.lost, self.trace.clone(), self.dice.bits());
        let watched: Vec<(Arc<MomentView>, Vec<u8>)> = self
            .readers
            .iter()
            .map(|reader| (reader.view.clone(), self.source.images[reader.image].clone()))
            .collect();
        let watch = {
            let ends = ends.clone();
            move || {
                let mut dice = Random::seeded(seed);
                while !ends.load(SeqCst) {
                    for (view, image) in &watched {
                        let (bytes, read) = read_in_parts(view, &mut dice);
                        assert!(
                            read.is_err() || bytes == *image,
                            "{what}: while that went on, it was read wrong"
                        );
                        if view.lost().is_some() {
                            view.let_go();
                        }
                    }
                }
            }
        };
        let watch = std::thread::spawn(watch);
        let done = self.world.open_keeping(&power, &self.keep).and_then(|mut replica| self.act(&mut replica));
        self.trace += if done.is_ok() { " done" } else { " failed" };
        ends.store(true, SeqCst);
        power.crash(Kept::KeepAll, Kept::KeepAll, 1).unwrap();
        watch.join().unwrap();
        self.look();
        assert!(fails || self.lost == lost, "{}: lost for nothing", self.trace);
        check(&self.source, &self.world, &self.trace);
        self.look();
    }

    fn act(&mut self, replica: &mut Replica) -> crate::Result<()> {
        let status = replica.status().clone();
        let at = status.epoch.map(|epoch| self.source.index(&epoch));
        match self.dice.below(8) {
            0..=3 if self.mirrors && at == Some(0) && !status.ahead && !status.under_way() => {
                self.mirror(replica)
            }
            0..=2 => {
                let moments = replica.history()?.moments;
                if moments.is_empty() {
                    return Ok(());
                }
                let moment = &moments[self.dice.index(moments.len())];
                self.trace += &format!("; rewinds to {}", moment.epoch.number);
                replica.rewind(moment.state).map(drop)
            }
            _ => self.sync(replica),
        }
    }

    /// Batches, between which others begin to read.
    fn mirror(&mut self, replica: &mut Replica) -> crate::Result<()> {
        self.trace += "; mirrors";
        let mut nonce = replica.status().nonce;
        let (mut log, mut batches) = replica.batches()?;
        let mut all = || {
            for to in 1..=batches::LAST {
                let header = batches::header(&self.source, to, nonce);
                nonce = header.stream;
                self.streams.push((nonce, to));
                let changed = self.source.changed(to - 1, to);
                batches::send(&mut log, &mut batches, &self.source.encode(&header, to, &changed), nonce)?;
                if self.dice.coin() {
                    // At the one before: this one is not written yet.
                    self.begin_at(None);
                }
                batches.apply()?;
                if to == 3 || log.is_long() {
                    log = batches.settle()?;
                }
                if self.dice.coin() {
                    self.begin_at(None);
                }
            }
            Ok(())
        };
        let sent = all();
        sent.and(batches.finish())
    }

    fn sync(&mut self, replica: &mut Replica) -> crate::Result<()> {
        let status = replica.status().clone();
        let parts = status.positions.iter().filter_map(|position| position.epoch);
        let known = parts.chain(status.epoch).chain(status.toward).map(|epoch| self.source.index(&epoch));
        let drawn = if self.mirrors { self.dice.pick(&[4, 7, 7]) } else { self.dice.index(8) };
        let to = known.chain([drawn]).max().unwrap_or(drawn);
        let clones = self.world.kind == Kind::File && self.dice.coin();
        let commit = if clones { CommitMode::Reflink } else { CommitMode::Journal };
        let delta = self.source.lacks(&status, content(replica).as_deref(), to);
        self.trace += &format!("; sync to {to} by {commit:?}");
        match self.dice.one_in(4) {
            true => receive_part(replica, &delta, commit, self.dice.index(6)),
            false => merge(replica, &delta, commit).map(drop),
        }
    }
}

#[test]
fn readers_see_their_moment_beside_commits() {
    let first = testing::seed("readers");
    let (mut lost, mut read) = (0, 0);
    for seed in (0..rounds(60, 4000)).map(|n| first + n) {
        let mut life = Life::new(seed);
        for _ in 0..2 + life.dice.below(8) {
            life.step();
        }
        (lost, read) = (lost + life.lost, read + life.read);
        // Nothing is left of them.
        life.readers.clear();
        drop(life.world.open(&on()).unwrap());
        let names = life.world.names();
        assert!(!names.iter().any(|name| name.starts_with("view-")), "{}: {names:?}", life.trace);
        let kept = !life.keep.is_nothing();
        assert!(kept || !names.iter().any(|name| name.starts_with("undo")), "{}: {names:?}", life.trace);
    }
    println!("{read} moments were read, {lost} were lost");
    assert!(read > 5 * lost && read > 50, "{read} moments were read, {lost} were lost");
}
