//! Deltas of a source that cannot be read in part: whatever fails, a block that was left out is sent by a later sync.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use testing::faulty::{Keep, Outage, Power};
use testing::{Sample, soak};

use super::crash::{OUTAGES, on, replica_at};
use super::world::*;
use crate::{CommitMode, Replica, ReplicaError, State, Status};

/// Blocks outside of the set must be those of the epoch, of a replica that is not under way.
fn sure_blocks(s: &Source, world: &World, status: &Status, what: &str) {
    if status.under_way() || status.resumes.is_some() {
        return;
    }
    let Some(epoch) = status.epoch else { return };
    let at = s.index(&epoch);
    let raw = world.raw().unwrap();
    for b in 0..s.size(at) / BLOCK {
        let place = (b * BLOCK) as usize..((b + 1) * BLOCK) as usize;
        let unsure = status.unsure.ranges().any(|r| r.contains(&(b * BLOCK)));
        assert!(
            unsure || raw.get(place.clone()) == Some(&s.images[at][place.clone()]),
            "{what}: block {b} is not of epoch {at}, {status:?}"
        );
    }
}

/// A sync to an epoch by a commit; so many frames of it arrive, or all; and what cannot be read.
type Sync = (usize, CommitMode, Option<usize>, Vec<u64>);

/// One sync after another, each by a process that opens the replica; `again`: also after one that failed.
fn run(s: &Source, world: &World, power: &Power, syncs: &[Sync], again: bool) -> crate::Result<()> {
    let machine = world.machine(power);
    let open = || match world.kind {
        Kind::File => world.open_mortal(&machine, &Arc::new(AtomicU64::new(1 << 40))),
        Kind::Device => world.open(power),
    };
    let mut replica = open()?;
    for (to, commit, frames, unread) in syncs {
        s.cannot_read(unread.iter().copied());
        let delta = s.lacks(replica.status(), content(&replica).as_deref(), *to);
        let mut units = units(&delta).into_iter();
        let mut one = |replica: &mut Replica| -> crate::Result<()> {
            let mut receipt = replica.receive(units.next().unwrap(), *commit)?;
            match frames {
                Some(frames) => {
                    for unit in units.by_ref().take(*frames) {
                        receipt.unit(unit)?;
                    }
                    receipt.keep()
                }
                None => {
                    for unit in units.by_ref() {
                        receipt.unit(unit)?;
                    }
                    receipt.finish().map(drop)
                }
            }
        };
        let done = one(&mut replica);
        if !again {
            done?;
        }
        drop(replica);
        replica = open()?;
    }
    Ok(())
}

/// By what the next sync commits: both in full campaigns, and in a sample by turns.
fn next_commits(turn: u64) -> &'static [CommitMode] {
    const ALL: [CommitMode; 2] = [CommitMode::Journal, CommitMode::InPlace];
    let one = turn as usize % 2;
    if soak() { &ALL } else { &ALL[one..=one] }
}

/// What is called exact is, and the next sync by each of these leaves it so.
fn check(s: &Source, world: &World, commits: &[CommitMode], what: &str) {
    let status = world.open(&on()).unwrap_or_else(|e| panic!("{what}: does not open: {e}")).status().clone();
    sure_blocks(s, world, &status, what);
    if status.state == State::Exact && status.resumes.is_none() && !status.under_way() {
        assert!(status.unsure.is_empty(), "{what}: exact and unsure");
    }
    s.cannot_read([]);
    for &commit in commits {
        let next = world.fork();
        let mut replica = next.open(&on()).unwrap();
        let delta = s.lacks(replica.status(), content(&replica).as_deref(), 4);
        merge(&mut replica, &delta, commit).unwrap_or_else(|e| panic!("{what}: next sync: {e}"));
        let status = replica.status().clone();
        drop(replica);
        assert_eq!((status.state, status.unsure.is_empty()), (State::Exact, true), "{what}");
        assert!(
            next.holds(&s.images[4]),
            "{what}: LOST: the next sync by {commit:?} says exact, and is not epoch 4"
        );
    }
}

fn source() -> Source {
    Source::new(11, &[40, 48, 44, 44, 60])
}

/// Blocks that only the first epoch changes, so that nothing but the unsure set asks for them later.
fn left_out(s: &Source) -> Vec<u64> {
    s.changed(0, 1).into_iter().filter(|b| !s.changed(1, 4).contains(b)).collect()
}

/// Three syncs: one that leaves blocks out, whole or cut; one that is cut; one that leaves out the first of them again.
fn campaigns(s: &Source) -> Vec<(String, Kind, Vec<Sync>)> {
    use CommitMode::{InPlace, Journal, Reflink};
    let blocks = left_out(s);
    assert!(blocks.len() > 1, "{blocks:?}");
    let pairs = [
        (Journal, Journal),
        (InPlace, InPlace),
        (Journal, InPlace),
        (InPlace, Journal),
        (Reflink, Reflink),
        (Journal, Reflink),
    ];
    let mut all = Vec::new();
    for kind in [Kind::File, Kind::Device] {
        for (first, then) in pairs.into_iter().filter(|pair| kind == Kind::File || pair.1 != Reflink) {
            for cut in [None, Some(4)] {
                let name = format!("{kind:?}, {first:?} cut at {cut:?}, {then:?}");
                let syncs = vec![
                    (1, first, cut, blocks.clone()),
                    (2, then, Some(2), blocks[..1].to_vec()),
                    (3, then, None, blocks[..1].to_vec()),
                ];
                all.push((name, kind, syncs));
            }
        }
    }
    all
}

/// An error at any step, of the destination or of the state's folder, loses no block.
#[test]
fn an_error_at_any_step() {
    let s = source();
    let sample = Sample::new("errors at any step");
    let mut turn = 0;
    for (name, kind, syncs) in campaigns(&s) {
        let start = replica_at(kind, &s, 0);
        for errno in [28, 5] {
            for step in 1.. {
                if !sample.takes(step + errno as u64, 8) && !(20..=27).contains(&step) {
                    continue;
                }
                let (world, power) = (start.fork(), Power::new(Outage::Kill));
                power.fail_at(step, 1, errno);
                let _ = run(&s, &world, &power, &syncs, true);
                turn += 1;
                check(&s, &world, next_commits(turn), &format!("{name}: error {errno} at step {step}"));
                if power.steps() < step {
                    break;
                }
            }
        }
    }
}

/// Nor does a kill or a power cut.
#[test]
fn cut_at_any_step() {
    let s = source();
    let sample = Sample::new("cuts at any step");
    let mut turn = 0;
    for (name, kind, syncs) in campaigns(&s) {
        let start = replica_at(kind, &s, 0);
        // The folder of a device's replica is opened anew each time, so that a cut tells nothing there.
        let outages = if kind == Kind::Device { &OUTAGES[..1] } else { &OUTAGES[..] };
        for (number, (outage, disks, folders)) in outages.iter().copied().enumerate() {
            for step in 1.. {
                if !sample.takes(step + number as u64, 22) {
                    continue;
                }
                let (world, power) = (start.fork(), Power::new(outage));
                power.cut_at(step);
                let _ = run(&s, &world, &power, &syncs, false);
                power.crash(disks, folders, step * 7).unwrap();
                turn += 1;
                let what = format!("{name}: {outage:?} {disks:?} {folders:?} at step {step}");
                check(&s, &world, next_commits(turn), &what);
                if power.steps() < step {
                    break;
                }
            }
        }
    }
}

/// A process is killed at some step, the next one opens the replica, and then the power is cut.
#[test]
fn killed_then_cut() {
    const MANY: u64 = 1 << 20;
    let s = source();
    let blocks = left_out(&s);
    let mut turn = 0;
    for commit in [CommitMode::Journal, CommitMode::InPlace, CommitMode::Reflink] {
        let start = replica_at(Kind::File, &s, 0);
        run(&s, &start, &on(), &[(1, commit, None, blocks.clone())], false).unwrap();
        let go = |world: &World, machine: &Machine, left: &Arc<AtomicU64>| -> crate::Result<()> {
            let mut replica = world.open_mortal(machine, left)?;
            s.cannot_read(blocks[..1].iter().copied());
            let delta = s.lacks(replica.status(), content(&replica).as_deref(), 2);
            merge(&mut replica, &delta, commit).map(drop)
        };
        let (world, left) = (start.fork(), Arc::new(AtomicU64::new(MANY)));
        go(&world, &world.machine(&on()), &left).unwrap();
        let steps = MANY - left.load(SeqCst);
        for killed in (0..steps).filter(|step| soak() || step % 7 == 1 || step + 8 > steps) {
            for cut in 1.. {
                let mut recovered = false;
                for keep in [Keep::LoseUnsynced, Keep::Random] {
                    turn += 1;
                    let (world, power) = (start.fork(), Power::new(Outage::PowerCut));
                    let machine = world.machine(&power);
                    let _ = go(&world, &machine, &Arc::new(AtomicU64::new(killed)));
                    power.cut_at(power.steps() + cut);
                    recovered = world.open_mortal(&machine, &Arc::new(AtomicU64::new(MANY))).is_ok();
                    power.crash(keep, keep, turn).unwrap();
                    let what =
                        format!("{commit:?} killed at {killed}, {keep:?} at step {cut} of the recovery");
                    check(&s, &world, next_commits(killed + cut + turn), &what);
                }
                if recovered {
                    break;
                }
            }
        }
    }
}

/// A set that is gone or damaged is no reason to believe the replica, nor one to lose it: a comparison takes it over.
#[test]
fn a_damaged_set_means_everything() {
    let s = source();
    let blocks = left_out(&s);
    for cut in [None, Some(4)] {
        for spoil in [
            |path: &std::path::Path| std::fs::remove_file(path).unwrap(),
            |path: &std::path::Path| std::fs::write(path, [7; 40]).unwrap(),
        ] {
            let world = replica_at(Kind::File, &s, 0);
            let syncs = [
                (1, CommitMode::InPlace, None, blocks.clone()),
                (2, CommitMode::InPlace, cut, blocks.clone()),
            ];
            run(&s, &world, &on(), &syncs, false).unwrap();
            let folder = world.state();
            let sets = world.names().into_iter().filter(|name| name.starts_with("unsure-"));
            sets.for_each(|name| spoil(&folder.join(name)));
            let refused = world.open(&on()).map(drop).unwrap_err();
            assert!(refused.to_string().contains("--adopt"), "{refused}");
            assert!(world.open_doubting(&on()).unwrap().status().changed.is_some());
            let mut replica = world.open_with(&on(), true, false).unwrap();
            s.cannot_read([]);
            let delta = s.lacks(replica.status(), content(&replica).as_deref(), 4);
            merge(&mut replica, &delta, CommitMode::Journal).unwrap();
            drop(replica);
            assert!(world.holds(&s.images[4]));
            assert!(world.names().iter().all(|name| !name.starts_with("unsure")), "{:?}", world.names());
        }
    }
}

/// The set is lost where of a step only the names of its copy were still to be changed.
#[test]
fn a_set_that_is_lost_with_a_finished_step_means_everything() {
    let s = source();
    for (start, commit) in
        [(World::new(Kind::File), CommitMode::Journal), (replica_at(Kind::File, &s, 0), CommitMode::Reflink)]
    {
        let mut finished = 0;
        for step in 1.. {
            let (world, power) = (start.fork(), Power::new(Outage::Kill));
            power.cut_at(step);
            let _ = run(&s, &world, &power, &[(1, commit, None, left_out(&s))], false);
            let done = power.steps() < step;
            power.crash(Keep::KeepAll, Keep::KeepAll, 1).unwrap();
            let folder = world.state();
            let said = std::fs::read_to_string(folder.join("lineage")).unwrap_or_default();
            if said.contains("\"finished\": true") {
                finished += 1;
                let sets = world.names().into_iter().filter(|name| name.starts_with("unsure-"));
                sets.for_each(|name| std::fs::remove_file(folder.join(name)).unwrap());
                let opened = world.open(&on()).map(|replica| replica.status().clone());
                assert!(matches!(opened, Err(ReplicaError::Changed { .. })), "step {step}: {opened:?}");
            }
            if done {
                break;
            }
        }
        assert!(finished > 3, "{commit:?}: {finished}");
        s.cannot_read([]);
    }
}

/// A first copy is finished, and its last name is taken meanwhile: the file that has it can be adopted.
#[test]
fn a_name_that_was_taken_can_be_adopted() {
    let s = source();
    let mut taken = 0;
    for step in 1.. {
        let (world, power) = (World::new(Kind::File), Power::new(Outage::Kill));
        power.cut_at(step);
        let _ = run(&s, &world, &power, &[(1, CommitMode::Journal, None, vec![])], false);
        let done = power.steps() < step;
        power.crash(Keep::KeepAll, Keep::KeepAll, 1).unwrap();
        let said = std::fs::read_to_string(world.state().join("lineage")).unwrap_or_default();
        if said.contains("\"finished\": true") && world.raw().is_none() {
            taken += 1;
            world.put(&[7; 4096]);
            let refused = world.open(&on()).map(drop);
            assert!(matches!(refused, Err(ReplicaError::NotAReplica(_))), "step {step}: {refused:?}");
            let mut replica = world.open_with(&on(), true, false).unwrap();
            let delta = s.lacks(replica.status(), content(&replica).as_deref(), 2);
            merge(&mut replica, &delta, CommitMode::Journal).unwrap();
            drop(replica);
            assert!(world.holds(&s.images[2]), "step {step}");
            assert_eq!(world.open(&on()).unwrap().status().state, State::Exact, "step {step}");
        }
        if done {
            break;
        }
    }
    assert!(taken > 0);
}
