//! What a reader, a rewind and a member of a group are told where something cannot be read, and who waits for whom.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use delta::{Header, Method};
use device::{Dir, Disk, Folder, Mapping, StateFile};
use lineage::Point;
use testing::faulty::{FaultyFolder, Outage, Power};
use uuid::Uuid;

use super::batches;
use super::crash::{on, replica_at};
use super::world::*;
use crate::journal::{self, WHOLE};
use crate::past::views::give_way;
use crate::{CommitMode, Keep, Replica, ReplicaError, ReplicaOptions};

/// How a file of a folder fails.
#[derive(Clone)]
enum Fault {
    /// It cannot be opened.
    Opening(i32),
    /// It cannot be read from this byte on.
    Reading(u64),
    /// Once, the folder cannot be listed, as soon as this says so.
    Listing(Arc<AtomicBool>),
}

/// A folder in which the files whose names begin so fail.
struct Failing {
    folder: FaultyFolder,
    names: &'static str,
    fault: Fault,
}

struct Unreadable {
    file: Box<dyn StateFile>,
    from: u64,
}

impl Folder for Failing {
    fn open(&self, name: &str, create: bool) -> io::Result<Box<dyn StateFile>> {
        match self.fault {
            Fault::Listing(_) => self.folder.open(name, create),
            _ if !name.starts_with(self.names) => self.folder.open(name, create),
            Fault::Opening(errno) => Err(io::Error::from_raw_os_error(errno)),
            Fault::Reading(from) => Ok(Box::new(Unreadable { file: self.folder.open(name, create)?, from })),
        }
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.folder.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.folder.remove(name)
    }
    fn sync(&self) -> io::Result<()> {
        self.folder.sync()
    }
    fn list(&self) -> io::Result<Vec<String>> {
        match &self.fault {
            Fault::Listing(fails) if fails.swap(false, SeqCst) => Err(io::Error::from_raw_os_error(24)),
            _ => self.folder.list(),
        }
    }
    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl StateFile for Unreadable {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match offset + buf.len() as u64 > self.from {
            true => Err(io::Error::from_raw_os_error(5)),
            false => self.file.read_at(offset, buf),
        }
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.file.write_at(offset, buf)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }
    fn reserve(&self, len: u64) -> io::Result<()> {
        self.file.reserve(len)
    }
    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }
    fn map(&self, len: u64) -> io::Result<Mapping> {
        self.file.map(len)
    }
}

fn open(world: &World, names: &'static str, fault: Fault, adopt: bool) -> crate::Result<Replica> {
    let folder = FaultyFolder::new(&on(), &world.state()).unwrap();
    let options = ReplicaOptions { adopt, ..ReplicaOptions::default() };
    world.open_in(&on(), Box::new(Failing { folder, names, fault }), &options)
}

/// A replica at its first epoch that readers may look at.
fn shown(source: &Source) -> World {
    let mut world = replica_at(Kind::File, source, 0);
    world.read = true;
    drop(world.open(&on()).unwrap());
    world
}

#[test]
fn a_log_that_cannot_be_opened_costs_its_reader_and_no_commit() {
    for errno in [13, 24] {
        let source = Source::new(3, &[40, 40]);
        let world = shown(&source);
        let reader = world.reader(None).unwrap().expect("it rests");
        let mut replica = open(&world, "view-", Fault::Opening(errno), false).unwrap();
        merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
        assert!(world.holds(&source.images[1]));
        assert!(reader.lost().is_some(), "error {errno}: the reader is not told");
        let mut bytes = vec![0; reader.len() as usize];
        assert!(reader.read_at(0, &mut bytes).is_err(), "error {errno}: another moment is read");
    }
}

/// A batch that was confirmed is in the destination in the end, though a reader that came just before it could not be looked for. That is not
/// overlooked either.
#[test]
fn a_confirmed_batch_outlives_a_look_for_readers_that_fails() {
    let source = batches::source();
    let world = shown(&source);
    let fails = Arc::<AtomicBool>::default();
    let mut replica = open(&world, "", Fault::Listing(fails.clone()), false).unwrap();
    let nonce = replica.status().nonce;
    let (mut log, mut committing) = replica.batches().unwrap();
    let first = batches::send_one(&source, &mut log, &mut committing, 1, nonce).unwrap();
    committing.apply().unwrap();
    let reader = world.reader(None).unwrap().expect("it rests");
    fails.store(true, SeqCst);
    let second = batches::send_one(&source, &mut log, &mut committing, 2, first).unwrap();
    committing.apply().unwrap_err();
    // As the receiving end of a mirror does it, whatever has failed.
    committing.finish().unwrap_err();
    drop(replica);
    let replica = world.open(&on()).unwrap();
    assert_eq!(replica.status().nonce, second);
    assert!(world.holds(&source.images[2]), "the batch is not there");
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes).unwrap();
    assert!(bytes == source.images[1], "the reader sees another moment");
}

/// A reader that could not be looked for is looked for again.
#[test]
fn a_reader_is_not_overlooked_because_a_look_has_failed() {
    let source = Source::new(3, &[40, 40]);
    let world = shown(&source);
    let fails = Arc::<AtomicBool>::default();
    let mut replica = open(&world, "", Fault::Listing(fails.clone()), false).unwrap();
    let reader = world.reader(None).unwrap().expect("it rests");
    fails.store(true, SeqCst);
    replica.announce().unwrap_err();
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    let mut bytes = vec![0; reader.len() as usize];
    reader.read_at(0, &mut bytes).unwrap();
    assert!(bytes == source.images[0], "the reader sees another moment");
}

/// What a reader holds is free once it has let go of it, and not before.
#[test]
fn who_needs_room_waits_until_readers_have_let_go() {
    let source = Source::new(3, &[40, 40]);
    let world = shown(&source);
    let reader = Arc::new(world.reader(None).unwrap().expect("it rests"));
    let free = Arc::<AtomicBool>::default();
    let watch = {
        let (reader, free) = (reader.clone(), free.clone());
        move || {
            while reader.lost().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            // A reader looks twice a second only.
            std::thread::sleep(Duration::from_millis(1000));
            free.store(true, SeqCst);
            reader.let_go();
        }
    };
    let watch = std::thread::spawn(watch);
    let folder = Dir::existing(&world.state()).unwrap();
    assert!(give_way(&folder));
    assert!(free.load(SeqCst), "it did not wait");
    watch.join().unwrap();
    assert!(reader.read_at(0, &mut [0; 512]).is_err());
    // Who is lost already makes no more room, and nobody waits for it again; nor for who is gone.
    assert!(!give_way(&folder));
    drop(reader);
    drop(world.reader(None).unwrap().expect("it rests"));
    assert!(!give_way(&folder));
}

#[test]
fn a_rewind_leads_back_to_the_lives_of_its_moment() {
    let source = Source::new(3, &[40, 40, 40]);
    let world = World::new(Kind::File);
    let keep = Some(Keep { last: 5, bytes: Some(u64::MAX), ..Keep::default() });
    let options = ReplicaOptions { term: 2, keep, ..ReplicaOptions::default() };
    let folder = || Box::new(FaultyFolder::new(&on(), &world.state()).unwrap());
    let mut replica = world.open_in(&on(), folder(), &options).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    // It takes over at its first epoch; the delta names the last life only.
    let whole = source.lives(0).and(Uuid::from_u128(2)).reaching(Point::number(source.epochs[1].number, 0));
    let status = replica.status().clone();
    let header = Header {
        binds: Some(status.nonce),
        lives: whole.since(&status.role.lives),
        ..source.header(0, 1, Method::Tracked)
    };
    let tracked = source.encode(&header, 1, &source.changed(0, 1));
    merge(&mut replica, &tracked, CommitMode::Journal).unwrap();
    assert_eq!(replica.lineage().role.lives, whole);
    drop(replica);
    let mut replica = world.open(&on()).unwrap();
    let moment = replica.history().unwrap().moments[0].state;
    replica.rewind(moment).unwrap();
    assert!(world.holds(&source.images[0]));
    let role = &replica.lineage().role;
    assert_eq!((role.term, &role.lives), (2, &source.lives(0)));
}

/// A journal that cannot be read is not taken for one that ends there: what it holds may have been confirmed.
#[test]
fn a_journal_that_cannot_be_read_is_an_error() {
    let source = Source::new(3, &[40, 60]);
    let before = replica_at(Kind::File, &source, 0);
    // Sealed, and not merged.
    let cut = |step| {
        let (world, power) = (before.fork(), Power::new(Outage::Kill));
        power.cut_at(step);
        let killed = world
            .open(&power)
            .and_then(|mut replica| merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal));
        assert!(killed.is_err(), "it was never sealed");
        world
    };
    let mut worlds = (1..).map(cut);
    let world = worlds.find(|world| world.names().iter().any(|name| name == WHOLE)).unwrap();
    let folder = Dir::existing(&world.state()).unwrap();
    let len = folder.open(WHOLE, false).unwrap().len().unwrap();
    for from in [0, 100, len / 2, len - 1] {
        for names in [WHOLE, journal::ARRIVING] {
            let fork = world.fork();
            if names == journal::ARRIVING {
                let folder = Dir::existing(&fork.state()).unwrap();
                folder.rename(WHOLE, names).unwrap();
            }
            let what = format!("{names} from byte {from}");
            let refused = open(&fork, names, Fault::Reading(from), false).err();
            assert!(matches!(refused, Some(ReplicaError::Io { .. })), "{what}: {refused:?}");
            // Its user may have all of it compared.
            let replica = open(&fork, names, Fault::Reading(from), true).unwrap();
            assert!(replica.status().positions.iter().all(|p| p.epoch.is_none()) || names != WHOLE);
            drop(replica);
            // Nothing is lost when it can be read again.
            let fork = world.fork();
            let replica = fork.open(&on()).unwrap();
            assert_eq!(replica.status().epoch, Some(source.epochs[1]), "{what}");
            assert!(fork.holds(&source.images[1]), "{what}");
        }
    }
}
