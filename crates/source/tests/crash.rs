//! Kills and power cuts at the source: whatever was lost, the dirty set covers every block in which the source differs from
//! what a replica holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use delta::Epoch;
use device::{Disk, Identity, RamDisk};
use extents::Bitmap;
use source::{Backing, Boot, History, KnownPosition, Source, SourceError, SourceMetadata, SourceOptions};
use testing::faulty::{FaultyDisk, FaultyFolder, Keep, Outage, Power, is_cut};
use testing::{Random, rounds, seed};
use uuid::Uuid;

const BLOCK: u64 = 4096;
/// Three regions of the write-intent log and a bit.
const SIZE: u64 = (48 << 20) + 5 * BLOCK + 100;

/// A backing that nobody else touches, on a machine whose boots the test names.
struct Still {
    identity: Identity,
    boot: String,
    disk: Arc<dyn Disk>,
}

impl Backing for Still {
    fn identity(&self) -> Result<Identity, SourceError> {
        Ok(self.identity.clone())
    }
    fn boot(&self) -> Boot {
        Boot { id: self.boot.clone(), began: u64::MAX }
    }
    fn reader(&self) -> Result<Arc<dyn Disk>, SourceError> {
        Ok(self.disk.clone())
    }
}

/// What a replica holds: an epoch, and the blocks that were ever written as they were at it.
#[derive(Default)]
struct Replica {
    at: Option<Epoch>,
    blocks: BTreeMap<u64, Vec<u8>>,
}

struct Machine {
    temp: tempfile::TempDir,
    ram: Arc<RamDisk>,
    identity: Identity,
    uuid: Uuid,
    boots: u32,
}

impl Machine {
    fn new() -> Machine {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("image");
        std::fs::write(&file, b"").unwrap();
        std::fs::create_dir(temp.path().join("state")).unwrap();
        let identity = device::identity(&file).unwrap();
        Machine { temp, ram: Arc::new(RamDisk::new(SIZE)), identity, uuid: Uuid::new_v4(), boots: 0 }
    }

    fn start(&self, power: &Power, intents: bool) -> Result<(Source, Arc<FaultyDisk>), SourceError> {
        let folder = FaultyFolder::new(power, &self.temp.path().join("state"))
            .map_err(|error| SourceError::State { what: "open", path: self.temp.path().into(), error })?;
        self.start_in(Arc::new(folder), power, intents)
    }

    /// Starts a source whose folder outlives the process.
    fn start_in(
        &self,
        folder: Arc<FaultyFolder>,
        power: &Power,
        intents: bool,
    ) -> Result<(Source, Arc<FaultyDisk>), SourceError> {
        let disk = Arc::new(FaultyDisk::new(power, self.ram.clone()));
        let about = SourceMetadata {
            path: self.temp.path().join("image"),
            ..SourceMetadata::new(self.uuid, self.identity.clone(), BLOCK as u32)
        };
        let backing = Still {
            identity: self.identity.clone(),
            boot: format!("boot {}", self.boots),
            disk: self.ram.clone(),
        };
        let options = SourceOptions { intents, ..SourceOptions::default() };
        let source = Source::over(about, disk.clone(), folder, Box::new(backing), &options)?;
        Ok((source, disk))
    }

    fn block(&self, block: u64) -> Vec<u8> {
        let len = BLOCK.min(SIZE - block * BLOCK);
        let mut content = vec![0; len as usize];
        self.ram.read_at(block * BLOCK, &mut content).unwrap();
        content
    }
}

/// One life of a source, until the power goes. Errors are those of the cut.
fn live(
    machine: &Machine,
    power: &Power,
    intents: bool,
    random: &mut Random,
    replica: &mut Replica,
    touched: &mut Vec<u64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let (source, _disk) = machine.start(power, intents)?;
    let disk = source.disk();
    let blocks = SIZE.div_ceil(BLOCK);
    for _ in 0..20 + random.below(60) {
        match random.below(12) {
            0 => disk.flush()?,
            1 => disk.sweep(0)?,
            2 => {
                let checkpoint = source.checkpoint(false)?;
                // A sync: what changed since the replica's epoch is copied from the view, here the disk itself.
                let changes = Bitmap::new(blocks);
                let since = replica.at.map(|epoch| KnownPosition { epoch, upto: SIZE });
                match since {
                    Some(position) => {
                        source.with_history(|h| h.changes_since(&[position], BLOCK as u32, &changes))?;
                    }
                    None => touched.iter().for_each(|b| {
                        changes.set(*b..*b + 1);
                    }),
                }
                for block in changes.runs().flatten() {
                    replica.blocks.insert(block, machine.block(block));
                }
                replica.at = Some(checkpoint.epoch);
            }
            3 => {
                let first = random.below(blocks - 8);
                let count = 1 + random.below(8);
                touched.extend(first..first + count);
                disk.zero(first * BLOCK, count * BLOCK, true, false)?;
            }
            _ => {
                let block = if random.below(3) == 0 {
                    blocks - 1 - random.below(4)
                } else {
                    random.below(40) * 311 % blocks
                };
                let len = BLOCK.min(SIZE - block * BLOCK) as usize;
                touched.push(block);
                disk.write_at(block * BLOCK, &random.bytes(len))?;
            }
        }
    }
    if random.below(3) == 0 {
        source.close()?;
    }
    Ok(())
}

/// Blocks in which the source differs from the replica although nothing says so.
fn missed(machine: &Machine, replica: &Replica, touched: &[u64], intents: bool) -> Vec<u64> {
    let Some(epoch) = replica.at else { return Vec::new() };
    let power = Power::new(Outage::Kill);
    let began = machine.start(&power, intents);
    let (source, _disk) = began.unwrap_or_else(|e| panic!("what a crash has left is not opened: {e}"));
    source.checkpoint(false).unwrap();
    let changes = Bitmap::new(SIZE.div_ceil(BLOCK));
    let position = KnownPosition { epoch, upto: SIZE };
    source.with_history(|h| h.changes_since(&[position], BLOCK as u32, &changes)).unwrap();
    let differs = |block: &&u64| match replica.blocks.get(block) {
        Some(content) => *content != machine.block(**block),
        None => machine.block(**block).iter().any(|b| *b != 0),
    };
    let mut missed: Vec<u64> = touched.iter().filter(differs).copied().filter(|b| !changes.get(*b)).collect();
    missed.sort_unstable();
    missed.dedup();
    missed
}

fn campaign(run: u64, base: u64, outage: Outage, disks: Keep, folders: Keep, intents: bool) -> Vec<u64> {
    println!("run {run}, {outage:?}, {disks:?} of the data, {folders:?} of the state");
    let mut random = Random::seeded(base.wrapping_add(run));
    let mut machine = Machine::new();
    let mut replica = Replica::default();
    let mut touched = Vec::new();
    // Several lives of one machine: what a first crash left must not mislead after a second.
    for _ in 0..3 {
        let power = Power::new(outage);
        power.cut_at(1 + random.below(250));
        if let Err(error) = live(&machine, &power, intents, &mut random, &mut replica, &mut touched) {
            let cut = power.is_cut() || error.downcast_ref::<std::io::Error>().is_some_and(is_cut);
            assert!(cut, "run {run}: {error}");
        }
        power.crash(disks, folders, random.bits()).unwrap();
        if matches!(outage, Outage::PowerCut) {
            machine.boots += 1;
        }
        let missed = missed(&machine, &replica, &touched, intents);
        if !missed.is_empty() {
            return missed;
        }
    }
    Vec::new()
}

#[test]
fn a_kill_loses_nothing() {
    let base = seed("a_kill_loses_nothing");
    for run in 0..rounds(150, 5000) {
        let missed = campaign(run, base, Outage::Kill, Keep::KeepAll, Keep::KeepAll, true);
        assert!(missed.is_empty(), "run {run}: blocks {missed:?} changed and nobody says so");
    }
}

#[test]
fn a_power_cut_loses_nothing_whatever_reached_the_disks() {
    let base = seed("a_power_cut_loses_nothing");
    for run in 0..rounds(100, 4000) {
        for (disks, folders) in [
            (Keep::KeepAll, Keep::LoseUnsynced),
            (Keep::LoseUnsynced, Keep::KeepAll),
            (Keep::LoseUnsynced, Keep::LoseUnsynced),
            (Keep::Random, Keep::Random),
        ] {
            let missed = campaign(run, base, Outage::PowerCut, disks, folders, true);
            assert!(
                missed.is_empty(),
                "run {run}, {disks:?} of the data, {folders:?} of the state: blocks {missed:?} changed and nobody says so"
            );
        }
    }
}

/// The test above shows something: with the write-intent log off, changes are lost.
#[test]
fn without_the_intent_log_a_power_cut_loses_changes() {
    let base = seed("without_the_intent_log");
    let lost = (0..200).any(|run| {
        !campaign(run, base, Outage::PowerCut, Keep::KeepAll, Keep::LoseUnsynced, false).is_empty()
    });
    assert!(lost, "nothing was lost without the log: what is it for?");
}

/// The checkpoint itself, cut at every one of its steps.
#[test]
fn a_checkpoint_cut_at_any_step_loses_nothing() {
    for (outage, disks, folders) in [
        (Outage::Kill, Keep::KeepAll, Keep::KeepAll),
        (Outage::PowerCut, Keep::KeepAll, Keep::LoseUnsynced),
        (Outage::PowerCut, Keep::LoseUnsynced, Keep::KeepAll),
        (Outage::PowerCut, Keep::Random, Keep::Random),
    ] {
        let mut step = 1;
        loop {
            let mut machine = Machine::new();
            let mut replica = Replica::default();
            let touched = vec![1, 2, 3, 4, 5000];
            let power = Power::new(outage);
            let (source, _disk) = machine.start(&power, true).unwrap();
            source.disk().write_at(BLOCK, &[1; 2 * BLOCK as usize]).unwrap();
            replica.at = Some(source.checkpoint(false).unwrap().epoch);
            for block in &touched {
                replica.blocks.insert(*block, machine.block(*block));
            }
            source.disk().write_at(2 * BLOCK, &[2; 3 * BLOCK as usize]).unwrap();
            source.disk().write_at(5000 * BLOCK, &[2; BLOCK as usize]).unwrap();
            power.cut_at(power.steps() + step);
            let done = source.checkpoint(false).is_ok();
            drop(source);
            power.crash(disks, folders, step).unwrap();
            machine.boots += u32::from(outage == Outage::PowerCut);
            let missed = missed(&machine, &replica, &touched, true);
            assert!(missed.is_empty(), "{outage:?}, {disks:?}, {folders:?} at step {step}: {missed:?}");
            if done {
                break;
            }
            step += 1;
        }
        println!("{outage:?}, {disks:?}, {folders:?}: {step} steps");
        assert!(step > 5);
    }
}

/// A process is stopped at any step of a checkpoint, and what it left in memory is what the next one finds. What that one calls an
/// epoch is one, also after a power cut.
#[test]
fn an_epoch_that_a_dying_process_left_in_memory_is_not_built_on() {
    // Unlike what fails, it is not even begun.
    const EINTR: i32 = 4;
    let mut found = 0;
    for step in 1..40 {
        let machine = Machine::new();
        let power = Power::new(Outage::PowerCut);
        let folder = Arc::new(FaultyFolder::new(&power, &machine.temp.path().join("state")).unwrap());
        let (source, _disk) = machine.start_in(folder.clone(), &power, true).unwrap();
        source.disk().write_at(BLOCK, &[1; 2 * BLOCK as usize]).unwrap();
        source.checkpoint(false).unwrap();
        source.disk().write_at(2 * BLOCK, &[2; 3 * BLOCK as usize]).unwrap();
        // From here on nothing that it does comes about.
        power.fail_at(power.steps() + step, 1000, EINTR);
        let stopped = source.checkpoint(false).is_err();
        drop(source);
        power.fail_at(0, 0, 0);
        let (source, _disk) = machine.start_in(folder.clone(), &power, true).unwrap();
        let epoch = source.checkpoint(false).unwrap().epoch;
        power.cut();
        drop(source);
        power.crash(Keep::KeepAll, Keep::LoseUnsynced, step).unwrap();
        let power = Power::new(Outage::PowerCut);
        let folder = FaultyFolder::new(&power, &machine.temp.path().join("state")).unwrap();
        let known = History::read(&folder).unwrap().by_number(epoch.number);
        assert_eq!(known, Some(epoch), "stopped at step {step}");
        found += u32::from(stopped);
    }
    assert!(found > 5, "{found}");
}
