//! A promoted replica as a source: what a crash leaves at any step is not a source yet, or is one that knows what changed.

use std::sync::Arc;

use delta::Epoch;
use device::{Disk, Identity, RamDisk};
use extents::Bitmap;
use source::{
    Backing, Boot, History, KnownPosition, Source, SourceError, SourceMetadata, SourceOptions, Succession,
};
use testing::faulty::{FaultyDisk, FaultyFolder, Keep, Outage, Power};
use uuid::Uuid;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 40;

struct Still {
    identity: Identity,
    disk: Arc<dyn Disk>,
}

impl Backing for Still {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(self.identity.clone())
    }
    fn boot(&self) -> Boot {
        Boot { id: "this one".into(), began: u64::MAX }
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        Ok(self.disk.clone())
    }
}

struct Machine {
    temp: tempfile::TempDir,
    ram: Arc<RamDisk>,
    identity: Identity,
    uuid: Uuid,
}

impl Machine {
    /// A disk that was a source before, or was none.
    fn new(was_source: bool) -> Machine {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join("image"), b"").unwrap();
        std::fs::create_dir(temp.path().join("state")).unwrap();
        let identity = device::identity(&temp.path().join("image")).unwrap();
        let ram = Arc::new(RamDisk::new(BLOCKS * BLOCK));
        let machine = Machine { temp, ram, identity, uuid: Uuid::from_u128(7) };
        if was_source {
            let power = Power::new(Outage::Kill);
            let source = machine.start(&power).unwrap();
            source.disk().write_at(0, &[1; 4096]).unwrap();
            source.checkpoint(false).unwrap();
            std::fs::write(machine.temp.path().join("state/source"), b"{}").unwrap();
        }
        machine
    }

    fn folder(&self, power: &Power) -> Result<Arc<FaultyFolder>, SourceError> {
        let path = self.temp.path().join("state");
        let folder = FaultyFolder::new(power, &path);
        folder.map(Arc::new).map_err(|error| SourceError::State { what: "open", path, error })
    }

    fn backing(&self) -> Box<Still> {
        Box::new(Still { identity: self.identity.clone(), disk: self.ram.clone() })
    }

    fn start(&self, power: &Power) -> Result<Source, SourceError> {
        let disk = Arc::new(FaultyDisk::new(power, self.ram.clone()));
        let about = SourceMetadata::new(self.uuid, self.identity.clone(), BLOCK as u32);
        Source::over(about, disk, self.folder(power)?, self.backing(), &SourceOptions::default())
    }

    fn succeed(&self, power: &Power) -> Result<(), SourceError> {
        let disk = Arc::new(FaultyDisk::new(power, self.ram.clone()));
        source::succeed_in(&succession(self.uuid), disk, self.folder(power)?, self.backing())
    }

    /// What a replica at an epoch lacks; `None` where nothing says that the disk is a source of the new term.
    fn lacks(&self, at: Epoch) -> Option<Result<Vec<u64>, String>> {
        let text = std::fs::read_to_string(self.temp.path().join("state/source")).ok()?;
        if !text.contains("\"term\": 3") {
            return None;
        }
        let source = self.start(&Power::new(Outage::Kill)).unwrap();
        if let Some(why) = source.lost() {
            return Some(Err(why.to_string()));
        }
        source.disk().write_at(9 * BLOCK, &[2; 4096]).unwrap();
        source.checkpoint(false).unwrap();
        let blocks = Bitmap::new(BLOCKS);
        let position = KnownPosition { epoch: at, upto: BLOCKS * BLOCK };
        let found = source.with_history(|h: &History| h.changes_since(&[position], BLOCK as u32, &blocks));
        Some(found.map(|_| blocks.runs().flatten().collect()).map_err(|error| error.to_string()))
    }
}

fn epoch(number: u64) -> Epoch {
    Epoch { number, id: Uuid::from_u128(number.into()) }
}

fn succession(uuid: Uuid) -> Succession {
    let changes = Bitmap::new(BLOCKS);
    changes.set(3..5);
    let moments = vec![epoch(6), epoch(7), epoch(8)];
    let (lives, block_size) = (lineage::Lives::first(Uuid::from_u128(3)), BLOCK as u32);
    Succession {
        format: device::Format::Raw,
        uuid,
        term: 3,
        lives,
        gave_up: true,
        base: epoch(5),
        trail: Default::default(),
        moments,
        block_size,
        changes: Ok(changes),
    }
}

#[test]
fn a_crash_leaves_no_source_or_one_that_knows_what_changed() {
    for was_source in [false, true] {
        let power = Power::new(Outage::Kill);
        Machine::new(was_source).succeed(&power).unwrap();
        let steps = power.steps();
        println!("{steps} steps");
        assert!(steps > 10, "what is cut is not counted");
        for (outage, keep) in [
            (Outage::Kill, Keep::KeepAll),
            (Outage::PowerCut, Keep::LoseUnsynced),
            (Outage::PowerCut, Keep::KeepAll),
            (Outage::PowerCut, Keep::Random),
        ] {
            let mut done = 0;
            for step in 1..=steps + 1 {
                let what = format!("cut by {outage:?} {keep:?} at step {step} of {steps}");
                let machine = Machine::new(was_source);
                let power = Power::new(outage);
                power.cut_at(step);
                let ended = machine.succeed(&power);
                power.crash(keep, keep, step).unwrap();
                assert_eq!(ended.is_ok(), step > steps, "{what}: {ended:?}");
                let found = machine.lacks(epoch(5));
                done += u64::from(found.is_some());
                assert!(found.is_none() || found == Some(Ok(vec![3, 4, 9])), "{what}: {found:?}");
                if found.is_none() {
                    machine
                        .succeed(&Power::new(Outage::Kill))
                        .unwrap_or_else(|e| panic!("{what}, again: {e}"));
                    assert_eq!(machine.lacks(epoch(5)), Some(Ok(vec![3, 4, 9])), "{what}, again");
                }
            }
            assert!(done > 0, "it was never done");
        }
    }
}

/// A replica that has none of what batches brought, one for which a later epoch was true as well, and one at the promotion.
#[test]
fn the_history_goes_on_from_the_epochs_of_the_replica() {
    for (at, lacks) in [(5, vec![3, 4, 9]), (6, vec![3, 4, 9]), (7, vec![3, 4, 9]), (8, vec![9])] {
        let machine = Machine::new(false);
        machine.succeed(&Power::new(Outage::Kill)).unwrap();
        assert_eq!(machine.lacks(epoch(at)), Some(Ok(lacks)), "{at}");
    }
    let machine = Machine::new(false);
    machine.succeed(&Power::new(Outage::Kill)).unwrap();
    let earlier = machine.lacks(epoch(4)).unwrap().unwrap_err();
    assert!(earlier.contains("begins at epoch 5"), "{earlier}");
    let machine = Machine::new(false);
    machine.succeed(&Power::new(Outage::Kill)).unwrap();
    let other = machine.lacks(Epoch { number: 6, id: Uuid::from_u128(99) }).unwrap().unwrap_err();
    assert!(other.contains("diverged"), "{other}");
    // What was written while nobody held it is not known.
    let machine = Machine::new(false);
    let folder = machine.folder(&Power::new(Outage::Kill)).unwrap();
    let unknown = Succession { changes: Err("it was written to".into()), ..succession(machine.uuid) };
    source::succeed_in(&unknown, machine.ram.clone(), folder, machine.backing()).unwrap();
    let lost = machine.lacks(epoch(5)).unwrap().unwrap_err();
    assert!(lost.contains("it was written to"), "{lost}");
}
