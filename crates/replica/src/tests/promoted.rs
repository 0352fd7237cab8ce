//! A replica that becomes the source, and a source that becomes a replica.

use std::collections::BTreeSet;
use std::path::Path;

use extents::Bitmap;
use testing::faulty::Power;

use super::crash::{OUTAGES, on};
use super::real::alone;
use super::world::*;
use crate::{
    CommitMode, Demotion, Lineage, Released, Replica, ReplicaError, ReplicaOptions, State, UnsureSet,
    inspect, settle, to_promote,
};

fn options() -> ReplicaOptions {
    ReplicaOptions::default()
}

fn source() -> Source {
    Source::new(5, &[400, 480])
}

fn seeded(path: &Path, source: &Source) {
    merge(&mut Replica::open(path, &options()).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
}

fn lineage(path: &Path) -> Lineage {
    inspect(path, &options()).unwrap().unwrap()
}

fn opened(path: &Path) -> crate::Result<Replica> {
    let lineage = inspect(path, &options()).unwrap();
    to_promote(path, lineage, &options(), &|options| Replica::open(path, options))
}

fn promoted(path: &Path) -> Replica {
    let mut replica = opened(path).unwrap();
    replica.outlook(true, None).unwrap();
    replica.promote().unwrap();
    replica
}

/// Where the source says that there was no more, nothing has to be forced; a later commit takes that back.
#[test]
fn a_promotion_wants_the_last_word_of_the_source() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    let none = opened(&path).err().expect("nothing is there");
    assert!(none.is_refusal() && none.to_string().contains("there is no replica"), "{none}");
    seeded(&path, &source);
    let refused = opened(&path).unwrap().outlook(false, None).unwrap_err();
    for word in ["dsync demote SRC", "--force", "epoch 40"] {
        assert!(refused.to_string().contains(word), "{refused}");
    }
    let forced = opened(&path).unwrap().outlook(true, None).unwrap();
    assert_eq!((forced.epoch, forced.released, forced.later), (source.epochs[0], false, None));
    let mut replica = Replica::open(&path, &options()).unwrap();
    let other = Released { epoch: source.epochs[1], term: 1 };
    assert!(replica.release(other).unwrap_err().is_refusal(), "it is not at that epoch");
    replica.release(Released { epoch: source.epochs[0], term: 3 }).unwrap();
    drop(replica);
    let released = opened(&path).unwrap().outlook(false, None).unwrap();
    assert!(released.released);
    let mut replica = Replica::open(&path, &options()).unwrap();
    receive_part(&mut replica, &source.tracked(0, 1), CommitMode::Journal, 1).unwrap();
    assert!(replica.outlook(false, None).is_err(), "its source goes on");
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    assert!(replica.outlook(false, None).is_err(), "its source went on");
    replica.release(Released { epoch: source.epochs[1], term: 3 }).unwrap();
    drop(replica);
    let mut replica = opened(&path).unwrap();
    replica.outlook(false, None).unwrap();
    let mark = replica.promote().unwrap();
    assert_eq!(mark.term, 4);
    drop(replica);
    let role = lineage(&path).role;
    assert_eq!((role.term, role.promoted, role.released), (4, Some(mark), None));
    // The same command again, after a crash: nothing is given up by that one either.
    assert!(mark.released && promoted(&path).outlook(true, None).unwrap().released);
    assert_eq!(promoted(&path).recorded().role.promoted, Some(mark));
    assert_eq!(promoted(&path).changed_since_mark().unwrap(), None);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    assert!(promoted(&path).changed_since_mark().unwrap().is_some());
}

/// No delta is merged over what is written to a source, whatever it was before.
#[test]
fn a_promoted_replica_takes_no_delta() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    seeded(&path, &source);
    // A part of a delta has come, of an epoch that the source is known to have had.
    let mut replica = Replica::open(&path, &options()).unwrap();
    receive_part(&mut replica, &source.tracked(0, 1), CommitMode::Journal, 1).unwrap();
    drop(replica);
    assert_eq!(opened(&path).unwrap().outlook(true, None).unwrap().later, Some(source.epochs[1]));
    let doubting = ReplicaOptions { doubt: true, ..options() };
    Replica::open(&path, &doubting).unwrap().mergeable().unwrap();
    drop(promoted(&path));
    assert!(matches!(Replica::open(&path, &options()), Err(ReplicaError::Promoted { .. })));
    let mut replica = Replica::open(&path, &doubting).unwrap();
    assert!(matches!(replica.mergeable(), Err(ReplicaError::Promoted { .. })));
    assert!(replica.release(Released { epoch: source.epochs[0], term: 1 }).is_err());
    assert!(merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).is_err());
    drop(replica);
    assert!(std::fs::read(&path).unwrap() == source.images[0]);
    // Adopted, it is a replica again.
    let mut replica = Replica::open(&path, &ReplicaOptions { adopt: true, ..options() }).unwrap();
    let delta = source.lacks(replica.status(), std::fs::read(&path).ok().as_deref(), 1);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    drop(replica);
    assert_eq!(lineage(&path).role.promoted, None);
}

/// A clone that was not put in place yet has not touched the replica.
#[test]
fn what_is_not_one_moment_of_its_source_is_not_promoted() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    seeded(&path, &source);
    let mut replica = Replica::open(&path, &options()).unwrap();
    receive_part(&mut replica, &source.tracked(0, 1), CommitMode::InPlace, 1).unwrap();
    drop(replica);
    let refused = opened(&path).unwrap().outlook(true, None).unwrap_err().to_string();
    for word in ["cut off between", "dsync sync", "dsync forget"] {
        assert!(refused.contains(word), "{refused}");
    }
    assert_eq!(lineage(&path).role.promoted, None);
}

fn demotion(source: &Source, size: u64, blocks: &[u64]) -> Demotion {
    let unsure = Bitmap::new(size / BLOCK);
    blocks.iter().for_each(|block| {
        unsure.set(*block..*block + 1);
    });
    let since = (source.epochs[0], UnsureSet::of_blocks(&unsure, BLOCK));
    Demotion {
        source: source.id,
        term: 2,
        lives: source.lives(1),
        gave_up: None,
        block_size: BLOCK as u32,
        size,
        since: Some(since),
        others_wrote: false,
        saved: None,
    }
}

fn demote(path: &Path, demotion: &Demotion, is_unwritten: bool) -> crate::Result<Replica> {
    let mut replica = Replica::open(path, &ReplicaOptions { adopt: true, ..options() })?;
    replica.demote(demotion, &|_| is_unwritten)?;
    Ok(replica)
}

/// What was written to a former source is sent again, with what the new one has written, and nothing else.
#[test]
fn a_former_source_is_unsure_of_what_was_written_to_it() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    std::fs::write(&path, &source.images[0]).unwrap();
    scribble(&path, &[3, 70, 71]);
    let demotion = demotion(&source, source.size(0), &[3, 70, 71]);
    let refused = demote(&path, &demotion, false).err().expect("it was written to");
    assert!(refused.is_refusal() && refused.to_string().contains("run the command again"), "{refused}");
    assert_eq!(inspect(&path, &options()).unwrap(), None, "it is the source that it was");
    let replica = demote(&path, &demotion, true).unwrap();
    let status = replica.status().clone();
    assert_eq!((status.epoch, status.state), (Some(source.epochs[0]), State::Exact));
    assert_eq!(status.unsure.bytes(), 3 * BLOCK);
    assert!(!status.ahead, "no batch has come");
    drop(replica);
    // It may be promoted again as it is.
    let outlook = opened(&path).unwrap();
    assert!(outlook.outlook(false, None).is_err());
    outlook.outlook(true, None).unwrap();
    drop(outlook);
    let mut replica = Replica::open(&path, &options()).unwrap();
    let status = replica.status().clone();
    let lacking: BTreeSet<u64> =
        status.unsure.ranges().flat_map(|r| r.start / BLOCK..r.end / BLOCK).collect();
    assert_eq!(lacking, BTreeSet::from([3, 70, 71]));
    merge(&mut replica, &source.lacks(&status, None, 1), CommitMode::Journal).unwrap();
    let status = replica.status().clone();
    assert_eq!((status.epoch, status.role.demoted), (Some(source.epochs[1]), None));
    assert!(status.unsure.is_empty());
    drop(replica);
    assert!(std::fs::read(&path).unwrap() == source.images[1]);
}

/// Where it is not known what was written, the next sync compares, without another word.
#[test]
fn a_former_source_of_which_nothing_is_known_is_compared() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    seeded(&path, &source);
    drop(promoted(&path));
    scribble(&path, &[1, 2]);
    let demotion = Demotion { since: None, ..demotion(&source, source.size(0), &[]) };
    drop(demote(&path, &demotion, true).unwrap());
    let mut replica = Replica::open(&path, &options()).unwrap();
    assert!(replica.outlook(true, None).is_err(), "it is of no moment that is known");
    let status = replica.status().clone();
    assert_eq!((status.epoch, status.state, status.positions[0].epoch), (None, State::Incomplete, None));
    assert!(merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).is_err());
    let delta = source.lacks(&status, std::fs::read(&path).ok().as_deref(), 1);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    drop(replica);
    assert!(std::fs::read(&path).unwrap() == source.images[1]);
}

fn scribble(path: &Path, blocks: &[u64]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().write(true).open(path).unwrap();
    blocks.iter().for_each(|block| file.write_all_at(&[0xa5; BLOCK as usize], block * BLOCK).unwrap());
}

/// A crash leaves what was, or what is to be; the same command does the rest.
#[test]
fn a_promotion_and_a_demotion_are_cut_at_every_step() {
    let source = Source::new(11, &[40, 40]);
    type Act<'a> = &'a dyn Fn(&World, &Power) -> crate::Result<()>;
    let promote: Act<'_> = &|world, power| world.open_doubting(power)?.promote().map(drop);
    let demotion = demotion(&source, source.size(0), &[3, 7]);
    let demote: Act<'_> = &|world, power| world.open_with(power, true, false)?.demote(&demotion, &|_| true);
    for (name, act) in [("promote", promote), ("demote", demote)] {
        for kind in [Kind::File, Kind::Device] {
            let before = World::new(kind);
            merge(&mut before.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
            // A part of a delta, which goes.
            let mut replica = before.open(&on()).unwrap();
            receive_part(&mut replica, &source.tracked(0, 1), CommitMode::Journal, 1).unwrap();
            drop(replica);
            if name == "demote" {
                promote(&before, &on()).unwrap();
            }
            let power = on();
            act(&before.fork(), &power).unwrap();
            let steps = power.steps();
            assert!(steps > 3, "what is cut is not counted");
            for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
                for step in 1..=steps + 1 {
                    let what = format!(
                        "{name} of a {kind:?} cut by {outage:?} {disks:?} {folders:?} at {step} of {steps}"
                    );
                    let world = before.fork();
                    let power = Power::new(outage);
                    power.cut_at(step);
                    let ended = act(&world, &power);
                    assert_eq!(ended.is_ok(), step > steps, "{what}: {ended:?}");
                    power.crash(disks, folders, step * 7 + number as u64).unwrap();
                    let marked = world.open_doubting(&on()).unwrap().lineage().role.promoted;
                    if name == "demote" && marked.is_some() {
                        act(&world, &on()).unwrap_or_else(|e| panic!("{what}, again: {e}"));
                    }
                    if name == "promote" {
                        act(&world, &on()).unwrap_or_else(|e| panic!("{what}, again: {e}"));
                        let replica = world.open_doubting(&on()).unwrap();
                        let role = &replica.lineage().role;
                        assert!(marked.is_none() || role.promoted == marked, "{what}: another mark");
                        assert_eq!(
                            (role.term, replica.lineage().epoch),
                            (2, Some(source.epochs[0])),
                            "{what}"
                        );
                    } else {
                        let replica = world.open(&on()).unwrap();
                        let (status, lineage) = (replica.status(), replica.lineage());
                        assert_eq!(status.epoch, Some(source.epochs[0]));
                        assert!(
                            lineage.role.promoted.is_none() && status.unsure.bytes() == 2 * BLOCK,
                            "{what}"
                        );
                        assert!(status.resumes.is_none(), "{what}: a part of a delta is left");
                    }
                    assert!(world.holds(&source.images[0]), "{what}: it was written to");
                }
            }
        }
    }
}

/// What a crash left in the midst of a merge is merged before it is read.
#[test]
fn a_half_merged_replica_is_settled_before_it_is_read() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    settle(&path, &options()).unwrap();
    seeded(&path, &source);
    settle(&path, &options()).unwrap();
    let mut replica = Replica::open(&path, &options()).unwrap();
    let mut units = units(&source.tracked(0, 1)).into_iter();
    let mut receipt = replica.receive(units.next().unwrap(), CommitMode::Journal).unwrap();
    units.for_each(|unit| receipt.unit(unit).unwrap());
    receipt.keep().unwrap();
    drop(replica);
    let folder = temp.path().join(".vm.raw.dsync");
    std::fs::rename(folder.join("journal"), folder.join("journal-whole")).unwrap();
    settle(&path, &options()).unwrap();
    assert!(std::fs::read(&path).unwrap() == source.images[1], "it holds neither epoch");
}

/// A commit in place that was cut off is finished by its source alone.
#[test]
fn a_replica_between_two_epochs_is_not_read() {
    let _alone = alone();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("vm.raw");
    let source = source();
    seeded(&path, &source);
    let mut replica = Replica::open(&path, &options()).unwrap();
    receive_part(&mut replica, &source.tracked(0, 1), CommitMode::InPlace, 1).unwrap();
    drop(replica);
    let refused = settle(&path, &options()).unwrap_err();
    assert!(refused.is_refusal(), "{refused}");
    let said = refused.to_string();
    for word in ["cut off between", "dsync sync", "dsync forget"] {
        assert!(said.contains(word), "{said}");
    }
    let mut replica = Replica::open(&path, &options()).unwrap();
    let delta = source.lacks(replica.status(), None, 1);
    merge(&mut replica, &delta, CommitMode::InPlace).unwrap();
    drop(replica);
    settle(&path, &options()).unwrap();
    assert!(std::fs::read(&path).unwrap() == source.images[1]);
}
