//! What was written to a rehearsal becomes the source, whole and in one step, or nothing of it does.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use delta::{Header, Method};
use device::{Disk, RamDisk};
use testing::faulty::{Outage, Power};
use testing::soak;

use super::crash::{OUTAGES, on, replica_at};
use super::world::*;
use crate::{Commit, Keep, Promoted, Rehearsed, Replica, ReplicaError};

/// A rehearsal at the first epoch, to which the content of the next was written.
struct Rehearsal {
    source: Source,
    delta: Vec<u8>,
    written: BTreeSet<u64>,
}

impl Rehearsal {
    fn new(kind: Kind) -> (World, Rehearsal) {
        let source = source();
        let world = replica_at(kind, &source, 0);
        let nonce = world.open(&on()).unwrap().nonce();
        let header = Header {
            chain: vec![source.epochs[0]],
            binds: Some(nonce),
            batch: true,
            rehearsed: true,
            ..source.header(0, 0, Method::Tracked)
        };
        let written = source.changed(0, 1);
        let delta = source.encode(&header, 1, &written);
        (world, Rehearsal { source, delta, written })
    }

    fn promote(&self, world: &World, power: &Power) -> crate::Result<Promoted> {
        let mut replica = match world.open(power) {
            Err(ReplicaError::Promoted { .. }) => world.open_doubting(power)?,
            opened => opened?,
        };
        replica.promote_with(Rehearsed::read(Path::new("try.delta"), &self.delta[..])?)
    }

    /// True if the replica is the source with all of it; otherwise it must be the replica that it was.
    fn is_promoted(&self, world: &World, what: &str) -> bool {
        match world.open(&on()) {
            Ok(replica) => {
                let status = replica.status();
                assert!(replica.lineage().role.promoted.is_none(), "{what}");
                assert_eq!(status.epoch, Some(self.source.epochs[0]), "{what}");
                // Nothing of it is there to go on from, for whoever syncs to the replica next.
                assert!(status.unsure.is_empty() && status.resumes.is_none(), "{what}: {status:?}");
                assert!(world.holds(&self.source.images[0]), "{what}: it is not the epoch it says");
                false
            }
            Err(ReplicaError::Promoted { .. }) => {
                let replica = world.open_doubting(&on()).unwrap();
                let promoted = replica.lineage().role.promoted.expect("a promotion");
                assert_eq!(promoted.term, 2, "{what}");
                assert!(world.holds(&self.source.images[1]), "{what}: it is not what was written");
                let unsure = replica.status().unsure.ranges();
                let unsure: BTreeSet<u64> =
                    unsure.flat_map(|r| r.start / BLOCK..r.end.div_ceil(BLOCK)).collect();
                assert_eq!(unsure, self.written, "{what}: the record of what was written");
                assert_eq!(replica.lineage().epoch, Some(self.source.epochs[0]), "{what}");
                true
            }
            Err(error) => panic!("{what}: {error}"),
        }
    }
}

fn source() -> Source {
    Source::new(5, &[40, 40, 40])
}

fn cut_everywhere(kind: Kind) {
    let (world, rehearsal) = Rehearsal::new(kind);
    let power = on();
    rehearsal.promote(&world.fork(), &power).unwrap();
    let steps = power.steps();
    let mut ends = [0; 2];
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps + 1 {
            if !soak() && !matches!(number, 0 | 1) && (step + number as u64) % 3 != 0 && step <= steps {
                continue;
            }
            let what = format!("{kind:?}: cut by {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
            let (world, power) = (world.fork(), Power::new(outage));
            power.cut_at(step);
            let done = rehearsal.promote(&world, &power);
            assert_eq!(done.is_ok(), step > steps, "{what}: {done:?}");
            power.crash(disks, folders, step * 7 + number as u64).unwrap();
            // Whoever opens it next is killed, too.
            let power = Power::new(outage);
            power.cut_at(1 + step % 17);
            let _ = world.open(&power);
            power.crash(disks, folders, step * 11 + number as u64).unwrap();
            let promoted = rehearsal.is_promoted(&world, &what);
            assert!(promoted || done.is_err(), "{what}: it was said to be the source");
            ends[usize::from(promoted)] += 1;
            // The same command completes it, or does it.
            rehearsal.promote(&world, &on()).unwrap_or_else(|e| panic!("{what}: the next one: {e}"));
            assert!(rehearsal.is_promoted(&world, &what), "{what}");
        }
    }
    assert!(ends.iter().all(|count| *count > 0), "{ends:?}");
}

#[test]
fn a_promotion_that_is_cut_anywhere_is_done_or_not_begun() {
    cut_everywhere(Kind::File);
}

#[test]
fn a_promotion_of_a_device_that_is_cut_anywhere_is_done_or_not_begun() {
    cut_everywhere(Kind::Device);
}

#[test]
fn errors_leave_the_replica_or_the_source() {
    let (world, rehearsal) = Rehearsal::new(Kind::File);
    let power = on();
    rehearsal.promote(&world.fork(), &power).unwrap();
    for step in 1..=power.steps() {
        for errno in [5, 28] {
            let (world, power) = (world.fork(), Power::new(Outage::Kill));
            power.fail_at(step, 1, errno);
            let done = rehearsal.promote(&world, &power);
            let what = format!("error {errno} at step {step}: {done:?}");
            assert!(rehearsal.is_promoted(&world, &what) || done.is_err(), "{what}");
        }
    }
}

#[test]
fn what_was_rehearsed_is_no_delta_for_anybody_else() {
    let (world, rehearsal) = Rehearsal::new(Kind::File);
    let mut replica = world.open(&on()).unwrap();
    let refused = merge(&mut replica, &rehearsal.delta, Commit::Journal).unwrap_err();
    assert!(refused.is_refusal() && refused.to_string().contains("dsync promote"), "{refused}");
    let first = units(&rehearsal.delta).remove(0);
    let (_log, mut batches) = replica.batches().unwrap();
    assert!(batches.begin(first).unwrap_err().to_string().contains("dsync promote"));
    drop(batches);
    drop(replica);
    assert!(!rehearsal.is_promoted(&world, "refused"));
    // One that is cut short is refused whole.
    let mut replica = world.open(&on()).unwrap();
    let short = &rehearsal.delta[..rehearsal.delta.len() - 10];
    let refused = replica.promote_with(Rehearsed::read(Path::new("try.delta"), short).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("is damaged"), "{refused}");
    drop(replica);
    assert!(!rehearsal.is_promoted(&world, "cut short"));
    let plain = rehearsal.source.tracked(0, 1);
    let other = Rehearsed::read(Path::new("try.delta"), &plain[..]).err().expect("no rehearsal");
    assert!(other.to_string().contains("--writable --save"), "{other}");
}

/// A replica that has moved on is brought back first, if that moment was kept.
#[test]
fn a_replica_that_has_moved_on_is_refused_with_the_way_back() {
    for kept in [true, false] {
        let (world, rehearsal) = Rehearsal::new(Kind::File);
        let keep = Keep { last: if kept { 3 } else { 0 }, bytes: Some(u64::MAX), ..Keep::default() };
        let mut replica = world.open_keeping(&on(), &keep).unwrap();
        merge(&mut replica, &rehearsal.source.tracked(0, 2), Commit::Journal).unwrap();
        drop(replica);
        let refused = rehearsal.promote(&world, &on()).unwrap_err();
        let way = if kept { "dsync rewind" } else { "is not kept" };
        assert!(refused.is_refusal() && refused.to_string().contains(way), "{refused}");
        assert!(world.holds(&rehearsal.source.images[2]));
        if kept {
            let mut replica = world.open(&on()).unwrap();
            let moment = replica.history().unwrap().moments[0].state;
            replica.rewind(moment).unwrap();
            drop(replica);
            rehearsal.promote(&world, &on()).unwrap();
            assert!(rehearsal.is_promoted(&world, "after a rewind"));
        }
    }
}

/// What a rehearsal saves is what its disk held, in the blocks that were written, bound to the state that was shown.
#[test]
fn what_is_saved_is_what_was_written() {
    let source = source();
    let mut world = replica_at(Kind::File, &source, 0);
    world.read = true;
    drop(world.open(&on()).unwrap());
    let view = world.reader(None).unwrap().expect("it rests");
    let disk = RamDisk::new(view.len());
    disk.write_at(0, &source.images[0]).unwrap();
    disk.write_at(3 * BLOCK + 5, &[7; 100]).unwrap();
    disk.write_at(9 * BLOCK, &[8; 2 * BLOCK as usize]).unwrap();
    let mut delta = Vec::new();
    let written = [3 * BLOCK + 5..3 * BLOCK + 105, 9 * BLOCK..11 * BLOCK];
    assert_eq!(view.save(Arc::new(disk), &written, &mut delta).unwrap(), 3 * BLOCK);
    drop(view);
    let rehearsed = Rehearsed::read(Path::new("try.delta"), &delta[..]).unwrap();
    let mut replica: Replica = world.open(&on()).unwrap();
    assert!(!replica.fits_rehearsal(&rehearsed).unwrap());
    replica.promote_with(rehearsed).unwrap();
    let mut expected = source.images[0].clone();
    expected[3 * BLOCK as usize + 5..3 * BLOCK as usize + 105].fill(7);
    expected[9 * BLOCK as usize..11 * BLOCK as usize].fill(8);
    assert!(world.holds(&expected));
    let unsure = replica.status().unsure.ranges().collect::<Vec<_>>();
    assert_eq!(unsure, [3 * BLOCK..4 * BLOCK, 9 * BLOCK..11 * BLOCK]);
    // A second time it is that already.
    let again = Rehearsed::read(Path::new("try.delta"), &delta[..]).unwrap();
    assert!(replica.fits_rehearsal(&again).unwrap());
}
