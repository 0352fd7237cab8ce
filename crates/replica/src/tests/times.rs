//! How old a replica says that it is: as old as what it holds, however much later that was brought to its destination.

use std::fs::File;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use device::Dir;
use testing::faulty::{Outage, Power};

use super::crash::{OUTAGES, on};
use super::world::*;
use crate::journal::{ARRIVING, WHOLE};
use crate::{CommitMode, Keep, Lineage};

/// A long time ago, in seconds since 1970.
const THEN: u64 = 1_700_000_000;

fn kept() -> Keep {
    Keep { last: 100, ..Keep::default() }
}

fn replica_after(source: &Source, upto: usize) -> World {
    let world = World::new(Kind::File);
    let mut replica = world.open_keeping(&on(), &kept()).unwrap();
    for at in 0..=upto {
        let delta = if at == 0 { source.seed(0) } else { source.tracked(at - 1, at) };
        merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    }
    drop(replica);
    world
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// A delta had arrived, and what received it was killed: whoever completes the commit much later does not make it younger.
#[test]
fn what_is_recovered_is_as_old_as_its_arrival() {
    let source = Source::new(11, &[40, 40, 40]);
    let world = replica_after(&source, 1);
    let before = world.open(&on()).unwrap().history().unwrap().at.unwrap();
    let at_last = Some(source.epochs[2]);
    // How often it was completed by the one that was killed, by one of the two that came later, and not at all.
    let (mut whole, mut recovered, mut lost) = (0, 0, 0);
    for step in 1.. {
        let (world, power) = (world.fork(), Power::new(Outage::Kill));
        power.cut_at(step);
        let began = now();
        let done =
            world.open(&power).and_then(|mut r| merge(&mut r, &source.tracked(1, 2), CommitMode::Journal));
        let (_, disks, folders) = OUTAGES[0];
        power.crash(disks, folders, step).unwrap();
        for name in [WHOLE, ARRIVING] {
            if let Ok(file) = File::options().write(true).open(world.state().join(name)) {
                file.set_modified(UNIX_EPOCH + Duration::from_secs(THEN)).unwrap();
            }
        }
        let kept = Lineage::load(&Dir::existing(&world.state()).unwrap()).unwrap();
        let committed = kept.is_some_and(|lineage| lineage.epoch == at_last);
        // The one that completes it may be killed in its turn.
        let power = Power::new(Outage::Kill);
        power.cut_at(1 + step % 23);
        let _ = world.open(&power);
        power.crash(disks, folders, step).unwrap();
        let replica = world.open(&on()).unwrap();
        let (status, at) = (replica.status().clone(), replica.history().unwrap().at.unwrap());
        let what = format!("step {step}: {:?}", status.recovered);
        match status.epoch == at_last {
            true if committed => {
                assert!((began - 1..=now()).contains(&at), "{what}: {at}, and it began at {began}");
                whole += 1;
            }
            true => {
                assert_eq!(at, THEN, "{what}");
                recovered += 1;
            }
            false => {
                assert_eq!(at, before, "{what}");
                lost += 1;
            }
        }
        if done.is_ok() {
            break;
        }
    }
    assert!(whole > 0 && recovered > 3 && lost > 3, "{whole} {recovered} {lost}");
}

/// To go back once more does not make the moment younger from which that is done.
#[test]
fn a_moment_keeps_its_age_through_two_rewinds() {
    let source = Source::new(12, &[40; 8]);
    let world = replica_after(&source, 6);
    let moments = world.open(&on()).unwrap().history().unwrap().moments;
    let times = super::past::age(&world, &moments, || 1000);
    let time_of = |epoch: usize| {
        let at = moments.iter().position(|moment| moment.epoch == source.epochs[epoch]).unwrap();
        times[at]
    };
    for to in [4, 2, 4, 3] {
        let mut replica = world.open(&on()).unwrap();
        let history = replica.history().unwrap();
        let moment = history.moments.iter().find(|moment| moment.epoch == source.epochs[to]).unwrap();
        replica.rewind(moment.state).unwrap();
        let history = replica.history().unwrap();
        assert_eq!(history.at, Some(time_of(to)), "the present one, {to}");
        for moment in history.moments.iter().filter(|moment| moment.epoch != source.epochs[6]) {
            let epoch = source.index(&moment.epoch);
            assert_eq!(moment.at, time_of(epoch), "epoch {epoch}, after the rewind to {to}");
        }
    }
    // What comes after it is new.
    let mut replica = world.open(&on()).unwrap();
    merge(&mut replica, &source.tracked(3, 7), CommitMode::Journal).unwrap();
    assert!(replica.history().unwrap().at.unwrap() >= now() - 600);
}
