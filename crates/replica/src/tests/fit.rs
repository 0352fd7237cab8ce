//! A delta becomes part of the replica it fits, and of no other.

use delta::{Method, Resume};
use testing::faulty::{FaultyFolder, Outage, Power};
use testing::{Random, Sample, rounds};
use uuid::Uuid;

use super::crash::OUTAGES;
use super::world::*;
use crate::state::lineage::Lineage;
use crate::{CommitMode, Position, Replica, ReplicaError, ReplicaOptions, State, Status};

const MODES: [CommitMode; 3] = [CommitMode::Journal, CommitMode::InPlace, CommitMode::Reflink];

fn on() -> Power {
    Power::new(Outage::Kill)
}

fn source() -> Source {
    Source::new(3, &[40, 48, 44, 44, 60])
}

fn at(source: &Source, epoch: usize) -> World {
    let world = World::new(Kind::File);
    merge(&mut world.open(&on()).unwrap(), &source.seed(epoch), CommitMode::Journal).unwrap();
    world
}

/// Merges what a byte stream brings, however damaged.
fn merge_stream(replica: &mut Replica, bytes: &[u8], commit: CommitMode) -> Result<(), String> {
    let mut units = delta::Units::new(bytes);
    let header = units.next().map_err(|e| e.to_string())?.ok_or("empty")?;
    let mut receipt = replica.receive(header, commit).map_err(|e| e.to_string())?;
    while let Some(unit) = units.next().map_err(|e| e.to_string())? {
        receipt.unit(unit).map_err(|e| e.to_string())?;
    }
    receipt.finish().map(drop).map_err(|e| e.to_string())
}

#[test]
fn a_delta_fits_every_position_of_its_chain_and_nothing_else() {
    let source = source();
    for epoch in 0..source.epochs.len() {
        let world = at(&source, epoch);
        for commit in MODES {
            for (from, to) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3), (2, 4), (0, 4)] {
                let world = world.fork();
                let mut replica = world.open(&on()).unwrap();
                let what = format!("at {epoch}, delta {from} to {to} by {commit:?}");
                let result = merge(&mut replica, &source.tracked(from, to), commit);
                if (from..=to).contains(&epoch) {
                    result.unwrap_or_else(|e| panic!("{what}: {e}"));
                    assert!(world.holds(&source.images[to]), "{what}");
                    // And again: as after an answer that was lost.
                    merge(&mut replica, &source.tracked(from, to), commit).unwrap();
                    assert!(world.holds(&source.images[to]), "{what}, again");
                    drop(replica);
                    let replica = world.open(&on()).unwrap();
                    let status = replica.status();
                    assert_eq!((status.epoch, status.state), (Some(source.epochs[to]), State::Exact));
                    assert_eq!(status.recovered, None);
                } else {
                    let error = result.unwrap_err();
                    assert!(error.is_refusal(), "{what}: {error}");
                    let number = source.epochs[epoch].number;
                    let wanted = if epoch < from {
                        format!(
                            "the delta begins at {}: merge the deltas between",
                            source.epochs[from].number
                        )
                    } else {
                        format!("beyond the end of this delta at epoch {}: skip", source.epochs[to].number)
                    };
                    let text = error.to_string();
                    assert!(text.contains(&format!("is at epoch {number}, {wanted}")), "{text}");
                    assert!(world.holds(&source.images[epoch]), "{what}");
                }
            }
        }
    }
}

/// The bytes of some blocks.
fn blocks(range: std::ops::Range<u64>) -> std::ops::Range<usize> {
    (range.start * BLOCK) as usize..(range.end * BLOCK) as usize
}

#[test]
fn what_a_delta_over_a_growth_does_not_name_is_zero_for_a_replica_in_the_middle_of_its_chain_too() {
    let mut source = Source::new(3, &[8, 16, 16]);
    source.images[1][blocks(12..13)].fill(7);
    source.images[2] = source.images[1].clone();
    source.images[2][blocks(12..13)].fill(0);
    // As extract makes it: what changed below the size at its beginning, and beyond that what is not zero.
    let has_data = |b: &u64| source.images[2][blocks(*b..b + 1)].iter().any(|byte| *byte != 0);
    let named = (0..16).filter(|b| *b < 8 || has_data(b)).collect();
    let delta = source.encode(&source.header(0, 2, Method::Tracked), 2, &named);
    for commit in MODES {
        for epoch in [0, 1] {
            let world = at(&source, epoch);
            merge(&mut world.open(&on()).unwrap(), &delta, commit).unwrap();
            assert!(world.holds(&source.images[2]), "from {epoch} by {commit:?}");
        }
    }
}

#[test]
fn what_a_source_gave_up_before_it_grew_again_does_not_come_back() {
    let mut source = Source::new(3, &[16, 8, 16]);
    source.images[0][blocks(8..16)].fill(7);
    source.images[2][blocks(8..16)].fill(0);
    for commit in [CommitMode::Journal, CommitMode::InPlace] {
        let world = at(&source, 0);
        let named = (0..8).collect();
        let cut_off = source.encode(&source.header(0, 1, Method::Tracked), 1, &named);
        let frames = units(&cut_off).len() - 2;
        receive_part(&mut world.open(&on()).unwrap(), &cut_off, commit, frames).unwrap();
        let mut replica = world.open(&on()).unwrap();
        let rest = source.lacks(&replica.status().clone(), None, 2);
        merge(&mut replica, &rest, commit).unwrap();
        assert!(world.holds(&source.images[2]), "by {commit:?}");
    }
}

/// Refused, and nothing is changed: not a byte, not a name, not the nonce.
fn refused(world: &World, what: &str, bytes: &[u8], words: &str) {
    for commit in MODES {
        let mut replica = world.open(&on()).unwrap();
        let (raw, status, names) = (world.raw(), replica.status().clone(), world.names());
        let error = merge(&mut replica, bytes, commit).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains(words), "{what} by {commit:?}: {error}");
        assert_eq!(replica.status(), &status, "{what}");
        drop(replica);
        assert_eq!((world.raw(), world.names()), (raw, names), "{what}");
        assert_eq!(world.open(&on()).unwrap().status(), &status, "{what}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let source = source();
    let world = at(&source, 1);
    let other = Source::new(5, &[40, 48, 44]);
    refused(&world, "another source", &other.tracked(1, 2), "is of source");
    // A copy of the source: the same identity and numbers, other ids.
    let mut copied = self::source();
    copied.id = source.id;
    refused(&world, "a copied source", &copied.tracked(1, 2), "copied or restored source");
    refused(&world, "another whole copy", &source.seed(2), "the delta is a whole copy");
    let changed = |change: &dyn Fn(&mut delta::Header)| {
        let mut header = source.header(1, 2, Method::Tracked);
        change(&mut header);
        source.encode(&header, 2, &[2, 3].into())
    };
    refused(&world, "another size", &changed(&|h| h.size_before += BLOCK), "the delta begins with");
    refused(&world, "another state", &changed(&|h| h.binds = Some(Uuid::new_v4())), "another state of it");
    let resume = Resume { stream: Uuid::new_v4(), frames: 2, digest: [3; 32] };
    refused(
        &world,
        "goes on from nothing",
        &changed(&|h| h.resumes = Some(resume)),
        "holds no interrupted delta",
    );
    let state = Some(Uuid::new_v4());
    let rolling = changed(&|h| (h.method, h.binds) = (Method::Rolling, state));
    refused(&world, "copies of another state", &rolling, "another state of it");
    // What is gone on from must be held exactly.
    let mut replica = world.open(&on()).unwrap();
    receive_part(&mut replica, &source.tracked(1, 2), CommitMode::Journal, 2).unwrap();
    let held = replica.status().resumes.unwrap();
    drop(replica);
    for wrong in [
        Resume { frames: held.frames + 1, ..held },
        Resume { digest: [0; 32], ..held },
        Resume { stream: Uuid::new_v4(), ..held },
    ] {
        refused(
            &world,
            "goes on from something else",
            &changed(&|h| h.resumes = Some(wrong)),
            "the delta continues one of",
        );
    }
    let power = on();
    let absent = World::new(Kind::File);
    let error =
        merge(&mut absent.open(&power).unwrap(), &source.tracked(0, 1), CommitMode::Journal).unwrap_err();
    assert!(
        error.to_string().contains("does not exist yet, and the delta begins at 40: merge a whole"),
        "{error}"
    );
    assert_eq!(absent.names(), [""; 0]);
    // A device that is too small.
    let device = World::new(Kind::Device);
    let large = Source::new(5, &[97]);
    let error = merge(&mut device.open(&power).unwrap(), &large.seed(0), CommitMode::Journal).unwrap_err();
    assert!(error.to_string().contains("give a device at least that large"), "{error}");
    assert_eq!(device.raw().unwrap(), vec![0; CAPACITY as usize]);
}

/// Cut short anywhere, or one bit flipped anywhere: refused, and the destination is as it was, or marked.
#[test]
fn damaged_deltas_are_refused() {
    let source = source();
    let begun = at(&source, 0);
    let delta = source.tracked(0, 1);
    let seed = source.seed(1);
    let mut dice = Random::new("damaged deltas");
    let count = rounds(150, 3000);
    for n in 0..count {
        let commit = MODES[n % 3];
        for (bytes, world) in [(&delta, begun.fork()), (&seed, World::new(Kind::File))] {
            let mut bytes = bytes.clone();
            // Half of them near the front, where most kinds of bytes are.
            let at = dice.below(if n % 4 < 2 { 600 } else { bytes.len() as u64 }) as usize;
            let what = if n % 2 == 0 {
                bytes.truncate(at);
                format!("cut at {at} by {commit:?}")
            } else {
                let bit = dice.below(8);
                bytes[at] ^= 1 << bit;
                format!("bit {bit} of byte {at} flipped by {commit:?}")
            };
            let before = world.raw();
            let mut replica = world.open(&on()).unwrap();
            let error = merge_stream(&mut replica, &bytes, commit).unwrap_err();
            assert!(!error.is_empty());
            drop(replica);
            let mut replica = world.open(&on()).unwrap();
            match replica.status().state {
                State::Incomplete => assert!(before.is_none() || commit == CommitMode::InPlace, "{what}"),
                _ => assert_eq!(world.raw(), before, "{what}"),
            }
            let again = source.lacks(replica.status(), None, 1);
            merge(&mut replica, &again, commit).unwrap_or_else(|e| panic!("{what}: {e}"));
            assert!(world.holds(&source.images[1]), "{what}");
        }
    }
}

#[test]
fn units_after_the_end_are_refused() {
    let source = source();
    let world = at(&source, 0);
    let mut replica = world.open(&on()).unwrap();
    let mut all = units(&source.tracked(0, 1));
    let trailer = units(&source.tracked(0, 1)).pop().unwrap();
    let mut receipt = replica.receive(all.remove(0), CommitMode::Journal).unwrap();
    for unit in all {
        receipt.unit(unit).unwrap();
    }
    assert!(receipt.unit(trailer).is_err());
}

#[test]
fn foreign_writes_are_noticed_and_adopted() {
    let source = source();
    for kind in [Kind::File, Kind::Device] {
        let world = World::new(kind);
        merge(&mut world.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
        world.tamper(if kind == Kind::Device { 1100 } else { 17 * BLOCK }, 99);
        let error = world.open(&on()).err().unwrap();
        assert!(error.is_refusal() && error.to_string().contains("--adopt"), "{error}");
        assert!(matches!(error, ReplicaError::Changed { .. }));
        let mut replica = world.open_with(&on(), true, false).unwrap();
        let status = replica.status().clone();
        let size = world.raw().unwrap().len() as u64;
        assert_eq!((status.source, status.epoch, status.size), (None, None, size));
        assert_eq!(status.positions, [Position { epoch: None, upto: size }]);
        // Only a compare can prove it.
        let error = merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap_err();
        assert!(matches!(error, ReplicaError::WrongEpoch { .. }), "{error}");
        let mut header = source.header(1, 1, Method::Copy);
        header.binds = Some(status.nonce);
        let error =
            merge(&mut replica, &source.encode(&header, 1, &[1].into()), CommitMode::Journal).unwrap_err();
        assert!(error.to_string().contains("not compared to the end"), "{error}");
        let delta = source.lacks(&status, world.raw().as_deref(), 1);
        merge(&mut replica, &delta, CommitMode::Journal).unwrap();
        assert!(world.holds(&source.images[1]));
        drop(replica);
        assert_eq!(world.open(&on()).unwrap().status().epoch, Some(source.epochs[1]));
        if kind == Kind::File {
            // Another file in its place, equal though it is.
            world.put(&source.images[1]);
            assert!(matches!(world.open(&on()), Err(ReplicaError::Changed { .. })));
        }
    }
}

/// As a disk in use is copied: a pass that compares, kept in the journal, and a last delta that goes on from it.
#[test]
fn an_adoption_in_place_that_was_cut_off_is_finished_by_passes_too() {
    let source = source();
    let world = at(&source, 0);
    world.tamper(17 * BLOCK, 99);
    let adopt = || world.open_with(&on(), true, false).unwrap();
    {
        let mut replica = adopt();
        let delta = source.lacks(&replica.status().clone(), world.raw().as_deref(), 1);
        receive_part(&mut replica, &delta, CommitMode::InPlace, 1).unwrap();
    }
    let mut replica = world.open(&on()).unwrap();
    let status = replica.status().clone();
    assert!(status.under_way() && status.positions.iter().any(|p| p.epoch.is_none()), "{status:?}");
    // The pass ends with the last block, whatever that holds.
    let mut header = source.header(1, 1, Method::Compare);
    (header.size_before, header.binds) = (status.size, Some(status.nonce));
    let every = (0..source.size(1) / BLOCK).collect();
    let mut pass = units(&source.encode(&header, 1, &every)).into_iter();
    let mut receipt = replica.receive(pass.next().unwrap(), CommitMode::Journal).unwrap();
    for unit in pass.filter(|unit| unit.kind != delta::UnitKind::Trailer) {
        receipt.unit(unit).unwrap();
    }
    receipt.keep_pass().unwrap();
    drop(replica);
    let mut replica = world.open(&on()).unwrap();
    let status = replica.status().clone();
    assert_eq!(status.positions, [Position { epoch: Some(source.epochs[1]), upto: source.size(1) }]);
    merge(&mut replica, &source.lacks(&status, None, 2), CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[2]));
}

/// What others changed may be looked at, and mended by a compare; nothing else fits it.
#[test]
fn what_others_changed_can_be_doubted() {
    let source = source();
    for kind in [Kind::File, Kind::Device] {
        for commit in [CommitMode::Journal, CommitMode::InPlace] {
            let world = World::new(kind);
            merge(&mut world.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
            assert_eq!(world.open_doubting(&on()).unwrap().status().changed, None);
            world.tamper(if kind == Kind::Device { 1100 } else { 17 * BLOCK }, 99);
            let mut replica = world.open_doubting(&on()).unwrap();
            let status = replica.status().clone();
            assert!(status.changed.is_some());
            assert_eq!((status.source, status.epoch), (Some(source.id), Some(source.epochs[0])));
            let error = merge(&mut replica, &source.tracked(0, 1), commit).unwrap_err();
            assert!(matches!(error, ReplicaError::Changed { .. }), "{error}");
            drop(replica);
            // To look changes nothing: who does not doubt is refused as before.
            assert!(matches!(world.open(&on()), Err(ReplicaError::Changed { .. })));
            let mut replica = world.open_doubting(&on()).unwrap();
            let unknown = vec![Position { epoch: None, upto: status.size }];
            let status = Status { positions: unknown, ..status };
            let delta = source.lacks(&status, world.raw().as_deref(), 1);
            merge(&mut replica, &delta, commit).unwrap();
            assert_eq!(replica.status().changed, None);
            drop(replica);
            assert!(world.holds(&source.images[1]));
            assert_eq!(world.open(&on()).unwrap().status().epoch, Some(source.epochs[1]));
        }
    }
}

/// With `--adopt` a good replica may change its source, by a compare.
#[test]
fn a_replica_can_be_adopted_by_another_source() {
    let (source, other) = (source(), Source::new(9, &[30, 50]));
    for commit in MODES {
        let world = at(&source, 0);
        let mut replica = world.open_with(&on(), true, false).unwrap();
        let mut status = replica.status().clone();
        assert_eq!(status.source, Some(source.id));
        status.positions = vec![Position { epoch: None, upto: status.size }];
        let delta = other.lacks(&status, world.raw().as_deref(), 1);
        merge(&mut replica, &delta, commit).unwrap();
        assert!(world.holds(&other.images[1]));
        drop(replica);
        assert_eq!(world.open(&on()).unwrap().status().source, Some(other.id));
    }
}

#[test]
fn a_removed_replica_is_made_anew() {
    let source = source();
    let world = at(&source, 0);
    receive_part(&mut world.open(&on()).unwrap(), &source.tracked(0, 1), CommitMode::Journal, 2).unwrap();
    world.remove();
    let mut replica = world.open(&on()).unwrap();
    assert!(replica.status().recovered.as_ref().unwrap().contains("is gone"));
    assert!(replica.status().positions.is_empty() && replica.status().resumes.is_none());
    // Not without a word: it may come back.
    let refused = merge(&mut replica, &source.seed(1), CommitMode::Journal).unwrap_err();
    assert!(matches!(refused, ReplicaError::Away(_)), "{refused}");
    drop(replica);
    let options = ReplicaOptions { create: true, ..ReplicaOptions::default() };
    let folder = FaultyFolder::new(&on(), &world.state()).unwrap();
    let mut replica = world.open_in(&on(), Box::new(folder), &options).unwrap();
    merge(&mut replica, &source.seed(1), CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[1]));
    drop(replica);
    assert_eq!(world.open(&on()).unwrap().status().state, State::Exact);
}

#[test]
fn a_seed_replaces_only_where_it_is_told_to() {
    let source = source();
    let world = World::new(Kind::File);
    world.put(b"precious");
    assert!(matches!(world.open(&on()), Err(ReplicaError::NotAReplica(_))));
    // Cut off, gone on from, finished: the old file stays to the end.
    let mut replica = world.open_with(&on(), false, true).unwrap();
    receive_part(&mut replica, &source.seed(0), CommitMode::Journal, 2).unwrap();
    drop(replica);
    assert_eq!(world.raw().unwrap(), b"precious");
    let mut replica = world.open(&on()).unwrap();
    assert!(replica.status().under_way());
    let delta = source.lacks(replica.status(), None, 1);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[1]));
    // A file that appears beside a seed under way is nobody's to overwrite.
    let world = World::new(Kind::File);
    receive_part(&mut world.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal, 2).unwrap();
    world.put(b"precious");
    assert!(matches!(world.open(&on()), Err(ReplicaError::NotAReplica(_))));
    world.remove();
    let mut replica = world.open(&on()).unwrap();
    let delta = source.lacks(replica.status(), None, 0);
    world.put(b"precious");
    assert!(matches!(merge(&mut replica, &delta, CommitMode::Journal), Err(ReplicaError::NotAReplica(_))));
    assert_eq!(world.raw().unwrap(), b"precious");
}

#[test]
fn what_lies_at_the_partial_name_is_not_touched() {
    let source = source();
    let world = World::new(Kind::File);
    let mut replica = world.open(&on()).unwrap();
    // It comes before the copy begins, or was there before.
    world.put(b"not ours");
    std::fs::rename(world.site().join("vm.raw"), world.site().join("vm.raw.partial")).unwrap();
    let late = merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap_err();
    drop(replica);
    for error in [late, world.open(&on()).err().unwrap()] {
        assert!(
            matches!(&error, ReplicaError::PartialTaken(path) if path.ends_with("vm.raw.partial")),
            "{error}"
        );
    }
}

#[test]
fn a_fuzzy_copy_becomes_exact() {
    let source = source();
    let world = World::new(Kind::File);
    let mut header = source.header(0, 0, Method::Copy);
    header.fuzzy = true;
    let mut replica = world.open(&on()).unwrap();
    merge(&mut replica, &source.encode(&header, 0, &source.allocated(0)), CommitMode::Journal).unwrap();
    assert_eq!(replica.status().state, State::Fuzzy);
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    assert_eq!(replica.status().state, State::Exact);
}

/// The destination is another disk under the same name.
#[test]
fn another_device_is_refused() {
    let source = source();
    let world = World::new(Kind::Device);
    merge(&mut world.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
    world.soil();
    assert!(matches!(world.open(&on()), Err(ReplicaError::Changed { .. })));
}

/// A journal that was whole and is damaged: the destination may be half merged, so it is not trusted.
#[test]
fn a_damaged_journal_is_not_merged() {
    let source = source();
    let world = at(&source, 0);
    world.room.store(2 * BLOCK, std::sync::atomic::Ordering::SeqCst);
    merge(&mut world.open(&on()).unwrap(), &source.tracked(0, 1), CommitMode::Journal).unwrap_err();
    world.room.store(u64::MAX, std::sync::atomic::Ordering::SeqCst);
    let journal = world.state().join("journal-whole");
    let mut bytes = std::fs::read(&journal).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&journal, &bytes).unwrap();
    let error = world.open(&on()).err().unwrap();
    assert!(
        matches!(error, ReplicaError::Damaged { .. }) && error.to_string().contains("--adopt"),
        "{error}"
    );
    let mut replica = world.open_with(&on(), true, false).unwrap();
    let delta = source.lacks(replica.status(), world.raw().as_deref(), 1);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[1]));
}

/// What is bound to a state fits that state, and not what a commit or a step has made of it.
#[test]
fn a_bound_delta_fits_once() {
    let source = source();
    for commit in MODES {
        let world = at(&source, 0);
        let mut replica = world.open(&on()).unwrap();
        let mut status = replica.status().clone();
        status.toward = Some(source.epochs[1]);
        let delta = source.lacks(&status, None, 1);
        receive_part(&mut replica, &delta, commit, 2).unwrap();
        if commit == CommitMode::InPlace {
            let error = merge(&mut replica, &delta, commit).unwrap_err();
            assert!(error.to_string().contains("another state of it"), "{error}");
        }
        let rest = source.lacks(replica.status(), None, 1);
        merge(&mut replica, &rest, commit).unwrap();
        assert!(world.holds(&source.images[1]));
        let error = merge(&mut replica, &delta, commit).unwrap_err();
        assert!(error.to_string().contains("another state of it"), "{error}");
    }
}

/// A file that somebody puts in the place of an unfinished seed is neither gone on with nor removed.
#[test]
fn another_file_at_the_partial_name_is_noticed() {
    let source = source();
    let world = World::new(Kind::File);
    receive_part(&mut world.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal, 3).unwrap();
    let partial = world.site().join("vm.raw.partial");
    let ours = std::fs::read(&partial).unwrap();
    world.put(&ours[4096..]);
    std::fs::rename(world.site().join("vm.raw"), &partial).unwrap();
    let theirs = std::fs::read(&partial).unwrap();
    let mut replica = world.open(&on()).unwrap();
    assert!(replica.status().positions.is_empty());
    let delta = source.lacks(replica.status(), None, 0);
    let error = merge(&mut replica, &delta, CommitMode::Journal).unwrap_err();
    assert!(matches!(error, ReplicaError::PartialTaken(_)), "{error}");
    assert_eq!(std::fs::read(&partial).unwrap(), theirs);
}

/// A disk that grows, is cut off there, and shrinks again: what was received lies beyond the end it will have.
#[test]
fn a_part_beyond_the_final_end_is_merged() {
    let source = source();
    for then in MODES {
        let world = at(&source, 0);
        let mut replica = world.open(&on()).unwrap();
        let delta = source.tracked(0, 1);
        let frames = units(&delta).len() - 2;
        receive_part(&mut replica, &delta, CommitMode::Journal, frames).unwrap();
        assert!(replica.status().positions[0].upto > source.size(2));
        let rest = source.lacks(replica.status(), None, 2);
        merge(&mut replica, &rest, then).unwrap();
        assert!(world.holds(&source.images[2]), "{then:?}");
    }
}

/// Somebody writes into the file while a clone of it is about to take its place: that is told, and nothing is put in place.
#[test]
fn a_write_beside_a_reflink_commit_is_noticed() {
    let source = source();
    let world = at(&source, 0);
    let power = on();
    let whole = world.fork();
    merge(&mut whole.open(&power).unwrap(), &source.tracked(0, 1), CommitMode::Reflink).unwrap();
    let steps = power.steps();
    // The process is killed at any step, and somebody writes then.
    for step in 1..=steps {
        let (world, power) = (world.fork(), on());
        power.cut_at(step);
        if let Ok(mut replica) = world.open(&power) {
            let _ = merge(&mut replica, &source.tracked(0, 1), CommitMode::Reflink);
        }
        let put = world.raw().unwrap() != source.images[0];
        world.tamper(17 * BLOCK, 99);
        let found = world.raw();
        match world.open(&on()).err() {
            Some(ReplicaError::Changed { .. }) => {}
            // In a world without clocks, a file that has just got its name is known by that alone.
            None if put => continue,
            other => panic!("killed at {step} of {steps}: {:?}", other.map(|e| e.to_string())),
        }
        assert_eq!(world.raw(), found, "killed at {step}");
    }
    // The process lives on.
    let mut replica = world.open(&on()).unwrap();
    let mut units = units(&source.tracked(0, 1)).into_iter();
    let mut receipt = replica.receive(units.next().unwrap(), CommitMode::Reflink).unwrap();
    units.for_each(|unit| receipt.unit(unit).unwrap());
    world.tamper(17 * BLOCK, 99);
    let found = world.raw();
    assert!(matches!(receipt.finish(), Err(ReplicaError::Changed { .. })));
    drop(replica);
    assert!(matches!(world.open(&on()), Err(ReplicaError::Changed { .. })));
    assert_eq!(world.raw(), found);
}

/// What somebody writes before the clone is made is not cloned.
#[test]
fn a_write_before_a_clone_is_noticed() {
    let source = source();
    let world = at(&source, 0);
    let mut replica = world.open(&on()).unwrap();
    let header = units(&source.tracked(0, 1)).remove(0);
    world.tamper(17 * BLOCK, 99);
    let (found, names) = (world.raw(), world.names());
    assert!(matches!(replica.receive(header, CommitMode::Reflink).err(), Some(ReplicaError::Changed { .. })));
    assert_eq!((world.raw(), world.names()), (found, names));
}

/// A clone that is given up, whatever failed, is no reason to take the file for what it is by then.
#[test]
fn a_clone_that_is_dropped_covers_no_foreign_write() {
    let source = source();
    let start = at(&source, 0);
    for failing in 1..40 {
        let (world, power) = (start.fork(), on());
        let mut replica = world.open(&power).unwrap();
        let delta = source.tracked(0, 1);
        let mut units = units(&delta).into_iter();
        let mut receipt = replica.receive(units.next().unwrap(), CommitMode::Reflink).unwrap();
        world.tamper(17 * BLOCK, 99);
        power.fail_at(power.steps() + failing, 1, 5);
        let _ = units.try_for_each(|unit| receipt.unit(unit));
        let _ = receipt.keep();
        for commit in [CommitMode::Reflink, CommitMode::Journal] {
            let merged = merge(&mut replica, &delta, commit);
            assert!(merged.is_err(), "step {failing} of a commit failed, then {commit:?}");
        }
    }
}

/// A delta that was found by comparing all of a destination that is adopted; so many units of it arrive.
fn adopt(source: &Source, replica: &mut Replica, units: usize) -> crate::Result<()> {
    let mut status = replica.status().clone();
    status.positions.iter_mut().for_each(|position| position.epoch = None);
    replica.content()?;
    let delta = source.lacks(&status, Some(&content(replica).unwrap_or_default()), 1);
    receive_part(replica, &delta, CommitMode::Journal, units)
}

/// An adoption that comes to nothing changes nothing, or leaves what was half merged unproven.
#[test]
fn an_adoption_given_up_leaves_no_half_merged_replica() {
    let source = source();
    let start = World::new(Kind::Device);
    merge(&mut start.open(&on()).unwrap(), &source.seed(0), CommitMode::Journal).unwrap();
    let power = on();
    merge(&mut start.fork().open(&power).unwrap(), &source.tracked(0, 1), CommitMode::Journal).unwrap();
    let mut unproven = 0;
    for (step, received) in (1..=power.steps()).flat_map(|step| [(step, false), (step, true)]) {
        let (world, power) = (start.fork(), on());
        power.cut_at(step);
        let _ = world
            .open(&power)
            .and_then(|mut replica| merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal));
        let mut replica = world.open_with(&on(), true, false).unwrap();
        if received {
            adopt(&source, &mut replica, 1).unwrap();
        }
        drop(replica);
        match world.open(&on()) {
            Ok(replica) => {
                let at = source.index(&replica.status().epoch.unwrap());
                assert!(world.holds(&source.images[at]), "killed at {step}: it is not epoch {at}");
            }
            Err(ReplicaError::Unproven(_)) if received => unproven += 1,
            Err(e) => panic!("killed at {step}: {e}"),
        }
    }
    assert!(unproven > 0);
}

/// Wherever an adoption of a half merged replica is cut off, the old journal proves nothing of what others wrote.
#[test]
fn a_journal_from_before_an_adoption_is_not_merged() {
    let source = source();
    let start = at(&source, 0);
    let blocks = start.raw().unwrap().len() as u64 / BLOCK;
    let others = (0..blocks).find(|block| !source.changed(0, 1).contains(block)).unwrap();
    let power = on();
    merge(&mut start.fork().open(&power).unwrap(), &source.tracked(0, 1), CommitMode::Journal).unwrap();
    let (mut unproven, sample) = (0, Sample::new("a journal from before an adoption"));
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for (step, after) in (1..=power.steps()).flat_map(|step| (1..14).map(move |after| (step, after))) {
            if !sample.takes(step + after + number as u64, 3) {
                continue;
            }
            let (world, power) = (start.fork(), on());
            power.cut_at(step);
            let _ = world
                .open(&power)
                .and_then(|mut replica| merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal));
            world.tamper(others * BLOCK, 99);
            let power = Power::new(outage);
            power.cut_at(after);
            let _ =
                world.open_with(&power, true, false).and_then(|mut replica| adopt(&source, &mut replica, 1));
            power.crash(disks, folders, step + number as u64).unwrap();
            let folder = FaultyFolder::new(&on(), &world.state()).unwrap();
            let adopted = Lineage::load(&folder).unwrap().is_some_and(|lineage| lineage.epoch.is_none());
            let opened = world.open(&on()).map(|replica| replica.status().clone());
            let what = format!("killed at {step}, the adoption {outage:?} {disks:?} {folders:?} at {after}");
            assert!(!adopted || matches!(opened, Err(ReplicaError::Unproven(_))), "{what}: {opened:?}");
            unproven += usize::from(adopted);
        }
    }
    assert!(unproven > 0);
}

/// The journal's work is done and only its removal was missing; then somebody writes to the destination.
#[test]
fn a_journal_that_was_merged_covers_no_foreign_write() {
    let source = source();
    let world = at(&source, 0);
    let power = on();
    let mut replica = world.open(&power).unwrap();
    let already = power.steps();
    let other = world.fork();
    merge(&mut other.open(&power).unwrap(), &source.tracked(0, 1), CommitMode::Journal).unwrap();
    // Opening took a step too; the last of all is the removal.
    let steps = power.steps() - already - 1;
    power.cut_at(power.steps() + steps);
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap_err();
    drop(replica);
    assert!(world.names().contains(&"journal-whole".to_owned()));
    world.fork().open(&on()).unwrap();
    world.tamper(3 * BLOCK, 99);
    assert!(matches!(world.open(&on()), Err(ReplicaError::Changed { .. })));
}

/// A part of a delta that does not fit, as when a state folder was put together from two backups.
#[test]
fn a_part_that_does_not_fit_is_dropped() {
    let source = source();
    let (old, new) = (at(&source, 1), at(&source, 3));
    receive_part(&mut old.open(&on()).unwrap(), &source.tracked(1, 2), CommitMode::Journal, 2).unwrap();
    assert!(old.open(&on()).unwrap().status().resumes.is_some());
    std::fs::copy(old.state().join("journal"), new.state().join("journal")).unwrap();
    let replica = new.open(&on()).unwrap();
    assert_eq!((replica.status().resumes, replica.status().positions.len()), (None, 1));
    assert!(!new.names().contains(&"journal".to_owned()));
}

/// Each byte of a kept part is verified before it is counted.
#[test]
fn a_damaged_part_counts_up_to_the_damage() {
    let source = source();
    let world = at(&source, 0);
    receive_part(&mut world.open(&on()).unwrap(), &source.tracked(0, 1), CommitMode::Journal, 4).unwrap();
    let held = world.open(&on()).unwrap().status().resumes.unwrap();
    let journal = world.state().join("journal");
    let mut bytes = std::fs::read(&journal).unwrap();
    let last = bytes.len() - 10;
    bytes[last] ^= 1;
    std::fs::write(&journal, &bytes).unwrap();
    let mut replica = world.open(&on()).unwrap();
    assert_eq!(replica.status().resumes.unwrap().frames, held.frames - 1);
    let rest = source.lacks(replica.status(), None, 2);
    merge(&mut replica, &rest, CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[2]));
}
