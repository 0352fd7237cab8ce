//! The past: every moment that is offered is what its source was then, whatever crashes when.

use delta::Units;
use testing::faulty::{FaultyFolder, Outage, Power};
use testing::{Random, Sample, soak};

use std::cell::RefCell;

use super::batches::{self, EPOCH, LAST, Sent};
use super::crash::{OUTAGES, on, replica_at};
use super::world::*;
use crate::{CommitMode, Keep, Moment, Replica, ReplicaError, ReplicaOptions, Result, Span, State};

fn last(last: u64) -> Keep {
    Keep { last, bytes: Some(u64::MAX), ..Keep::default() }
}

/// Sizes that stay, grow and shrink.
fn source() -> Source {
    Source::new(77, &[40, 40, 56, 31, 31, 64, 48, 48])
}

/// Commits the epochs up to this one, one by one, with what is kept.
fn replica_after(kind: Kind, source: &Source, upto: usize, keep: &Keep, commit: CommitMode) -> World {
    let world = World::new(kind);
    let mut replica = world.open_keeping(&on(), keep).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    for to in 1..=upto {
        merge(&mut replica, &source.tracked(to - 1, to), commit).unwrap();
    }
    drop(replica);
    world
}

fn epochs(source: &Source, moments: &[Moment]) -> Vec<usize> {
    let mut epochs: Vec<usize> = moments.iter().map(|moment| source.index(&moment.epoch)).collect();
    epochs.sort_unstable();
    epochs
}

/// The replica must say what it holds, and hold it.
fn assert_exact(source: &Source, world: &World, replica: &Replica, what: &str) -> usize {
    let status = replica.status();
    let at = source.index(&status.epoch.unwrap_or_else(|| panic!("{what}: no epoch")));
    assert_eq!((status.state, status.size), (State::Exact, source.size(at)), "{what}");
    assert!(world.holds(&source.images[at]), "{what}: is not epoch {at} as it says");
    at
}

/// Rewinds a copy of the world to each moment. Returns their epochs.
fn assert_moments(source: &Source, world: &World, what: &str) -> Vec<usize> {
    let replica = world.open(&on()).unwrap();
    let (status, moments) = (replica.status().clone(), replica.history().unwrap().moments);
    drop(replica);
    for moment in &moments {
        let other = world.fork();
        let mut replica = other.open(&on()).unwrap();
        replica.rewind(moment.state).unwrap_or_else(|e| panic!("{what}: to {:?}: {e}", moment.epoch));
        let at = assert_exact(source, &other, &replica, what);
        assert_eq!((source.epochs[at], moment.size), (moment.epoch, source.size(at)), "{what}");
        if status.ahead {
            let image = source.images.iter().find(|image| world.holds(image)).expect(what);
            let ahead = ahead_of(&replica, status.nonce, what);
            assert_eq!((ahead.epoch, ahead.size), (status.epoch.unwrap(), status.size), "{what}");
            replica.rewind(ahead.state).unwrap_or_else(|e| panic!("{what}: back: {e}"));
            assert_ahead(source, &other, &replica, image, what);
        }
    }
    epochs(source, &moments)
}

/// The moment of a state that was ahead of its epoch.
fn ahead_of(replica: &Replica, state: uuid::Uuid, what: &str) -> Moment {
    let moments = replica.history().unwrap().moments;
    let found = moments.iter().find(|moment| moment.ahead && moment.state == state).cloned();
    found.unwrap_or_else(|| panic!("{what}: the state ahead is not one of {moments:?}"))
}

/// The replica must hold this image, and know in which blocks that may differ from its epoch.
pub(super) fn assert_ahead(source: &Source, world: &World, replica: &Replica, image: &[u8], what: &str) {
    let status = replica.status();
    assert_eq!((status.state, status.ahead), (State::Exact, true), "{what}");
    assert!(world.holds(image), "{what}: is not what it was before it was rewound");
    let epoch = &source.images[source.index(&status.epoch.expect(what))];
    let unsure: Vec<_> = status.unsure.ranges().collect();
    for (at, (now, then)) in image.chunks(BLOCK as usize).zip(epoch.chunks(BLOCK as usize)).enumerate() {
        let at = at as u64 * BLOCK;
        let known = unsure.iter().any(|range| range.contains(&at));
        assert!(now == then || known, "{what}: byte {at} differs from its epoch, and is not in {unsure:?}");
    }
}

#[test]
fn every_moment_is_what_the_source_was() {
    let source = source();
    for (kind, commit) in [
        (Kind::File, CommitMode::Journal),
        (Kind::File, CommitMode::Reflink),
        (Kind::Device, CommitMode::Journal),
    ] {
        let what = format!("{kind:?} {commit:?}");
        let world = replica_after(kind, &source, 7, &last(100), commit);
        assert_eq!(assert_moments(&source, &world, &what), (0..7).collect::<Vec<_>>(), "{what}");
    }
}

#[test]
fn nothing_is_kept_unasked() {
    let source = source();
    let world = World::new(Kind::File);
    let mut replica = world.open(&on()).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap();
    assert!(replica.history().unwrap().moments.is_empty());
    assert_eq!(world.names(), ["lineage", "vm.raw"]);
    // It is kept on by commands that do not say so, until one says otherwise.
    drop(replica);
    merge(&mut world.open_keeping(&on(), &last(9)).unwrap(), &source.tracked(1, 2), CommitMode::Journal)
        .unwrap();
    merge(&mut world.open(&on()).unwrap(), &source.tracked(2, 3), CommitMode::Journal).unwrap();
    assert_eq!(assert_moments(&source, &world, "kept on"), [1, 2]);
    let mut replica = world.open_keeping(&on(), &Keep::default()).unwrap();
    assert_eq!(replica.history().unwrap().moments.len(), 2, "opening changes nothing");
    merge(&mut replica, &source.tracked(3, 4), CommitMode::Journal).unwrap();
    assert!(replica.history().unwrap().moments.is_empty());
    assert_eq!(world.names(), ["lineage", "vm.raw"]);
}

#[test]
fn after_a_rewind_the_replica_goes_on_and_the_way_forth_remains() {
    let source = source();
    for kind in [Kind::File, Kind::Device] {
        let world = replica_after(kind, &source, 5, &last(100), CommitMode::Journal);
        let mut replica = world.open(&on()).unwrap();
        let moments = replica.history().unwrap().moments;
        let to = |epoch: usize| moments.iter().find(|m| m.epoch == source.epochs[epoch]).unwrap().state;
        replica.rewind(to(2)).unwrap();
        assert_eq!(assert_exact(&source, &world, &replica, "rewound"), 2);
        drop(replica);
        assert_eq!(assert_moments(&source, &world, "rewound"), [0, 1, 3, 4, 5]);
        // What is already there is no moment to go back to.
        assert!(matches!(world.open(&on()).unwrap().rewind(to(2)), Err(ReplicaError::Refused(_))));
        // Forth, and back again, on the same deltas.
        let again = world.fork();
        let mut replica = again.open(&on()).unwrap();
        let newest =
            replica.history().unwrap().moments.iter().find(|m| m.epoch == source.epochs[5]).unwrap().state;
        replica.rewind(newest).unwrap();
        drop(replica);
        assert_eq!(assert_moments(&source, &again, "forth"), [0, 1, 2, 3, 4]);
        // The next sync goes on by the changes since the epoch.
        let mut replica = world.open(&on()).unwrap();
        merge(&mut replica, &source.tracked(2, 6), CommitMode::Journal).unwrap();
        assert_eq!(assert_exact(&source, &world, &replica, "after it"), 6);
        drop(replica);
        assert_eq!(assert_moments(&source, &world, "after it"), [0, 1, 2, 3, 4, 5]);
    }
}

/// Cuts the power at every step of `run`, at which the replica comes from one epoch to another, and rewinds to all that is left.
fn cut_everywhere(
    name: &str,
    source: &Source,
    world: &World,
    (from, to): (usize, usize),
    run: &dyn Fn(&World, &Power) -> Result<()>,
) {
    let before = epochs(source, &world.open(&on()).unwrap().history().unwrap().moments);
    let (power, whole) = (on(), world.fork());
    run(&whole, &power).unwrap();
    let after = epochs(source, &whole.open(&on()).unwrap().history().unwrap().moments);
    let steps = power.steps();
    println!("{name}: {steps} steps, {before:?} to {after:?}");
    let sample = Sample::new(name);
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps + 1 {
            let turn = step + number as u64;
            if !sample.takes(turn, if number > 1 { 11 } else { 5 }) {
                continue;
            }
            let what = format!("{name}: {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
            let world = world.fork();
            let power = Power::new(outage);
            power.cut_at(step);
            let result = run(&world, &power);
            power.crash(disks, folders, step * 7 + number as u64).unwrap();
            if turn % 2 == 0 {
                let power = Power::new(outage);
                power.cut_at(1 + step % 29);
                let _ = world.open(&power);
                power.crash(disks, folders, step * 11 + number as u64).unwrap();
            }
            let replica = world.open(&on()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let at = assert_exact(source, &world, &replica, &what);
            // Ageing comes after the commit, which does not fail with it.
            assert!(at == to || at == from && result.is_err(), "{what}: is at {at}: {result:?}");
            assert!(result.is_ok() || step <= steps, "{what}: {result:?}");
            drop(replica);
            let found = assert_moments(source, &world, &what);
            let all = if at == from { &before } else { &after };
            assert!(all.iter().all(|epoch| found.contains(epoch)), "{what}: at {at}: {found:?}, not {all:?}");
            // The next sync goes on, and leaves nothing but what is kept.
            let delta = source.lacks(world.open(&on()).unwrap().status(), None, 7);
            merge(&mut world.open(&on()).unwrap(), &delta, CommitMode::Journal).unwrap();
            assert!(assert_moments(source, &world, &what).contains(&at), "{what}");
            let left: Vec<String> = world.names();
            let known = |name: &String| {
                ["lineage", "vm.raw", "past", "digests-doubted"].contains(&&name[..])
                    || name.starts_with("undo-")
            };
            assert!(left.iter().all(known), "{what}: left over: {left:?}");
        }
    }
}

#[test]
fn a_commit_that_is_cut_anywhere_keeps_the_past() {
    let source = source();
    for (kind, commit) in [
        (Kind::File, CommitMode::Journal),
        (Kind::File, CommitMode::Reflink),
        (Kind::Device, CommitMode::Journal),
    ] {
        for (from, keep) in [(2, last(100)), (3, last(2))] {
            let world = replica_after(kind, &source, from, &keep, commit);
            let name = format!("{kind:?} {commit:?} from {from}");
            cut_everywhere(&name, &source, &world, (from, from + 1), &|world, power| {
                let mut replica = world.open(power)?;
                merge(&mut replica, &source.tracked(from, from + 1), commit).map(drop)
            });
        }
    }
}

#[test]
fn a_rewind_of_a_file_that_is_cut_anywhere_is_done_or_not_begun() {
    cut_rewinds(Kind::File);
}

#[test]
fn a_rewind_of_a_device_that_is_cut_anywhere_is_done_or_not_begun() {
    cut_rewinds(Kind::Device);
}

fn cut_rewinds(kind: Kind) {
    let source = source();
    let world = replica_after(kind, &source, 5, &last(100), CommitMode::Journal);
    for to in [4, 1] {
        cut_everywhere(&format!("{kind:?} to {to}"), &source, &world, (5, to), &|world, power| {
            let mut replica = world.open(power)?;
            let moments = replica.history()?.moments;
            let moment = moments.iter().find(|moment| moment.epoch == source.epochs[to]).unwrap();
            replica.rewind(moment.state).map(drop)
        });
    }
}

/// Of batches that had arrived whole when the process was killed, and none of which was confirmed, only the first is merged: whatever fails then,
/// every moment is kept.
#[test]
fn batches_that_were_not_confirmed_cost_no_past() {
    let source = batches::source();
    let world = World::new(Kind::File);
    let mut replica = world.open_keeping(&on(), &last(100)).unwrap();
    merge(&mut replica, &source.seed(0), CommitMode::Journal).unwrap();
    let mut nonce = replica.status().nonce;
    let (mut log, mut committing) = replica.batches().unwrap();
    for to in 1..=EPOCH {
        nonce = batches::send_one(&source, &mut log, &mut committing, to, nonce).unwrap();
        committing.apply().unwrap();
    }
    log = committing.settle().unwrap();
    for to in EPOCH + 1..=EPOCH + 3 {
        let header = batches::header(&source, to, nonce);
        nonce = header.stream;
        let bytes = source.encode(&header, to, &source.changed(to - 1, to));
        let mut units = Units::new(&bytes[..]);
        while let Some(unit) = units.next().unwrap() {
            log.unit(&unit).unwrap();
        }
    }
    log.end().unwrap();
    drop((log, committing));
    drop(replica);
    for step in 1.. {
        let (world, power) = (world.fork(), Power::new(Outage::Kill));
        power.fail_at(step, 1, 5);
        let mut told = Vec::new();
        let opened = world.open(&power).map(|mut replica| told.append(&mut replica.take_warnings()));
        let over = power.steps() < step;
        let mut replica = world.open(&on()).unwrap();
        told.append(&mut replica.take_warnings());
        let found = epochs(&source, &replica.history().unwrap().moments);
        let kept = found.contains(&0) && found.contains(&EPOCH);
        let is_told = told.iter().any(|warning| warning.contains("is given up"));
        assert!(kept || is_told, "step {step}, {opened:?}: {found:?}, {told:?}");
        assert!(kept || !over, "nothing failed");
        if over {
            break;
        }
    }
}

/// What a killed process wrote to a clone last, a comparison finds equal: the way back must have it all the same.
#[test]
fn a_clone_of_a_killed_process_costs_no_way_back() {
    let source = source();
    for frames in 1..12 {
        let world = replica_after(Kind::File, &source, 1, &last(100), CommitMode::Reflink);
        let mut replica = world.open(&on()).unwrap();
        let mut units = units(&source.tracked(1, 2)).into_iter();
        let mut receipt = replica.receive(units.next().unwrap(), CommitMode::Reflink).unwrap();
        units.take(frames).for_each(|unit| receipt.unit(unit).unwrap());
        std::mem::forget(receipt);
        drop(replica);
        let mut replica = world.open(&on()).unwrap();
        let found = content(&replica).unwrap();
        let in_place = replica.is_in_place(CommitMode::Reflink);
        let delta = source.rolling(replica.status(), &found, 2, in_place);
        merge(&mut replica, &delta, CommitMode::Reflink).unwrap();
        assert!(world.holds(&source.images[2]));
        let moments = replica.history().unwrap().moments;
        let before =
            moments.iter().find(|moment| moment.epoch == source.epochs[1]).expect("the moment before");
        replica.rewind(before.state).unwrap();
        assert!(world.holds(&source.images[1]), "killed after {frames} frames");
    }
}

/// Something fails for a moment at every step: the commit goes on without a past, or fails, but no wrong moment is ever offered.
#[test]
fn what_fails_costs_the_past_at_most() {
    let source = source();
    for (kind, errno) in [(Kind::File, 28), (Kind::File, 5), (Kind::Device, 28), (Kind::Device, 5)] {
        let world = replica_after(kind, &source, 3, &last(100), CommitMode::Journal);
        for step in 1.. {
            let (world, power) = (world.fork(), Power::new(Outage::PowerCut));
            power.fail_at(step, 1, errno);
            let what = format!("{kind:?}, error {errno} at step {step}");
            let mut told = false;
            let done = (|| {
                let mut replica = world.open(&power)?;
                merge(&mut replica, &source.tracked(3, 4), CommitMode::Journal)?;
                let lost = replica.history()?.moments.len() < 4;
                let warnings = replica.take_warnings();
                assert!(!lost || !warnings.is_empty(), "{what}: lost without a word");
                told = warnings.iter().any(|warning| warning.contains("its past is given up"));
                Ok::<_, ReplicaError>(())
            })();
            let over = power.steps() < step;
            let (_, disks, folders) = OUTAGES[1];
            power.crash(disks, folders, step).unwrap();
            let replica = world.open(&on()).unwrap_or_else(|e| panic!("{what}: {e}"));
            let at = assert_exact(&source, &world, &replica, &what);
            assert!(at == 4 || done.is_err() && at == 3, "{what}: is at {at}");
            let given_up = replica.settings().is_some_and(|settings| settings.given_up.is_some());
            assert!(given_up || !told, "{what}: nobody is told of it later");
            drop(replica);
            assert_moments(&source, &world, &what);
            if over {
                assert_eq!(at, 4);
                break;
            }
        }
    }
}

#[test]
fn a_hundred_moments_are_each_reached_through_a_kill() {
    let seed = testing::seed("a_hundred_moments");
    let mut dice = Random::seeded(seed);
    let sizes: Vec<u64> =
        (0..101).map(|_| if dice.below(4) == 0 { 20 + dice.below(44) } else { 40 }).collect();
    let source = Source::new(seed, &sizes);
    let world = replica_after(Kind::File, &source, 100, &last(100), CommitMode::Journal);
    let moments = world.open(&on()).unwrap().history().unwrap().moments;
    assert_eq!(epochs(&source, &moments), (0..100).collect::<Vec<_>>());
    for moment in moments {
        let (world, power) = (world.fork(), Power::new(Outage::Kill));
        power.cut_at(1 + dice.below(60));
        let killed = world.open(&power).and_then(|mut replica| replica.rewind(moment.state));
        let (_, disks, folders) = OUTAGES[0];
        power.crash(disks, folders, dice.bits()).unwrap();
        let mut replica = world.open(&on()).unwrap();
        assert_exact(&source, &world, &replica, "after a kill");
        if replica.status().epoch != Some(moment.epoch) {
            assert!(killed.is_err());
            replica.rewind(moment.state).unwrap();
        }
        let at = assert_exact(&source, &world, &replica, "rewound");
        assert_eq!(source.epochs[at], moment.epoch);
    }
}

#[test]
fn what_others_changed_ends_the_past() {
    let source = source();
    let world = replica_after(Kind::File, &source, 3, &last(100), CommitMode::Journal);
    world.tamper(5 * BLOCK, 0xee);
    assert!(matches!(world.open(&on()), Err(ReplicaError::Changed { .. })));
    let mut replica = world.open_with(&on(), true, false).unwrap();
    assert!(replica.history().unwrap().moments.is_empty());
    let delta = source.lacks(replica.status(), content(&replica).as_deref(), 4);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    assert_exact(&source, &world, &replica, "adopted");
    assert!(replica.history().unwrap().moments.is_empty());
    // From there on there is a past again.
    merge(&mut replica, &source.tracked(4, 5), CommitMode::Journal).unwrap();
    drop(replica);
    assert_eq!(assert_moments(&source, &world, "after it"), [4]);
}

/// Whether it was a repair is not known by the command that completes it: the past ends, and that is said.
#[test]
fn a_comparison_that_was_cut_off_at_its_end_ends_the_past() {
    let source = source();
    let world = replica_after(Kind::File, &source, 3, &last(100), CommitMode::Journal);
    let mut replica = world.open(&on()).unwrap();
    assert_eq!(replica.history().unwrap().moments.len(), 3);
    let mut header = source.header(4, 4, delta::Method::Compare);
    (header.size_before, header.binds) = (replica.status().size, Some(replica.status().nonce));
    let all = (0..source.size(4) / BLOCK).collect();
    receive_part(&mut replica, &source.encode(&header, 4, &all), CommitMode::Journal, usize::MAX).unwrap();
    drop(replica);
    let mut replica = world.open(&on()).unwrap();
    assert_eq!(assert_exact(&source, &world, &replica, "completed"), 4);
    assert!(replica.history().unwrap().moments.is_empty());
    let warnings = replica.take_warnings();
    assert!(warnings.iter().any(|warning| warning.contains("its past is given up")), "{warnings:?}");
}

#[test]
fn a_damaged_undo_delta_ends_the_past_behind_it() {
    let source = source();
    let world = replica_after(Kind::File, &source, 4, &last(100), CommitMode::Journal);
    let moments = world.open(&on()).unwrap().history().unwrap().moments;
    let named = |state: uuid::Uuid| format!("-{}", state.simple());
    let names = world.names();
    let name = names.iter().find(|name| name.ends_with(&named(moments[1].state))).unwrap();
    let path = world.state().join(name);
    let whole = std::fs::read(&path).unwrap();
    // Within its data: it is found out when it is read, and nothing was changed then.
    let mut bytes = whole.clone();
    let at = bytes.len() - 300;
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    for moment in &moments[1..] {
        let mut replica = world.open(&on()).unwrap();
        assert!(matches!(replica.rewind(moment.state), Err(ReplicaError::Damaged { .. })));
        drop(replica);
        assert_eq!(assert_exact(&source, &world, &world.open(&on()).unwrap(), "refused"), 4);
    }
    world.fork().open(&on()).unwrap().rewind(moments[0].state).unwrap();
    // In its header, or gone: what is behind it is not offered.
    std::fs::write(&path, &whole[..50]).unwrap();
    assert_eq!(assert_moments(&source, &world, "torn"), [3]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(assert_moments(&source, &world, "gone"), [3]);
}

#[test]
fn a_commit_in_place_is_refused_where_the_past_is_kept() {
    let source = source();
    let world = replica_after(Kind::File, &source, 2, &last(100), CommitMode::Journal);
    let mut replica = world.open(&on()).unwrap();
    let refused = merge(&mut replica, &source.tracked(2, 3), CommitMode::InPlace).unwrap_err();
    assert!(refused.to_string().contains("--keep none"), "{refused}");
    drop(replica);
    assert_eq!(assert_moments(&source, &world, "refused"), [0, 1]);
}

/// What a mirror leaves: the end of a batch, from which all epochs before it are reached.
fn check_mirrored(source: &Source, world: &World, sent: &Sent, what: &str) {
    let replica = world.open(&on()).unwrap_or_else(|e| panic!("{what}: does not open: {e}"));
    let status = replica.status().clone();
    drop(replica);
    let at = sent.streams.iter().find(|(stream, _)| *stream == status.nonce).map_or(0, |(_, to)| *to);
    assert!(world.holds(&source.images[at]), "{what}: is not batch {at} as it says");
    assert!(at >= sent.confirmed, "{what}: is batch {at}, and {} was confirmed", sent.confirmed);
    let epochs: Vec<usize> = [0, EPOCH].into_iter().filter(|epoch| *epoch < at).collect();
    assert_eq!(assert_moments(source, world, what), epochs, "{what}: at batch {at}");
    // A sync goes on from the epoch, and all are reached from there, but not what was between two.
    let from = if at < EPOCH { 0 } else { EPOCH };
    let mut replica = world.open_for_sync(&on()).unwrap();
    merge(&mut replica, &source.tracked(from, LAST + 1), CommitMode::Journal).unwrap();
    drop(replica);
    let settled = world.state().join("past").exists();
    let at_epoch = (settled && (at == 0 || at == EPOCH)).then_some(at);
    let epochs: Vec<usize> = epochs.into_iter().chain(at_epoch).collect();
    assert_eq!(assert_moments(source, world, what), epochs, "{what}: after a sync, from batch {at}");
}

#[test]
fn a_mirror_that_is_cut_anywhere_keeps_its_epochs() {
    let source = batches::source();
    for kind in [Kind::File, Kind::Device] {
        let start = replica_at(kind, &source, 0);
        let run = |world: &World, power: &Power, sent: &RefCell<Sent>| {
            let mut replica = world.open_keeping(power, &last(100))?;
            batches::mirror_to(&source, &mut replica, sent)
        };
        let (whole, power, sent) = (start.fork(), on(), RefCell::default());
        run(&whole, &power, &sent).unwrap();
        check_mirrored(&source, &whole, &sent.borrow(), "without a cut");
        let steps = power.steps();
        println!("{kind:?}: {steps} steps");
        let sample = Sample::new("a mirror that is cut");
        for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
            for step in 1..=steps {
                let turn = step + number as u64;
                if !sample.takes(turn, if number > 1 { 11 } else { 5 }) {
                    continue;
                }
                let what = format!("{kind:?}: {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
                let (world, power, sent) = (start.fork(), Power::new(outage), RefCell::default());
                power.cut_at(step);
                let _ = run(&world, &power, &sent);
                power.crash(disks, folders, step * 7 + number as u64).unwrap();
                if turn % 2 == 0 {
                    let power = Power::new(outage);
                    power.cut_at(1 + step % 31);
                    let _ = world.open(&power);
                    power.crash(disks, folders, step * 11 + number as u64).unwrap();
                }
                check_mirrored(&source, &world, &sent.borrow(), &what);
            }
        }
    }
}

/// The moment that it was brought back to, which may be the last good one, is not the first to go when it goes on.
#[test]
fn the_moment_that_was_gone_back_to_is_kept() {
    let source = source();
    let world = replica_after(Kind::File, &source, 5, &last(3), CommitMode::Journal);
    let moments = world.open(&on()).unwrap().history().unwrap().moments;
    // Of one second, the order of the files would tell.
    age(&world, &moments, || 1000);
    let mut replica = world.open(&on()).unwrap();
    let moment = moments.iter().find(|moment| moment.epoch == source.epochs[2]).unwrap().state;
    replica.rewind(moment).unwrap();
    merge(&mut replica, &source.tracked(2, 6), CommitMode::Journal).unwrap();
    drop(replica);
    let mut kept = assert_moments(&source, &world, "gone on");
    kept.sort_unstable();
    assert_eq!(kept, [2, 4, 5]);
}

/// A replica that a mirror has left ahead of its epoch, and that may be the only copy, is rewound and taken back.
#[test]
fn a_state_ahead_of_its_epoch_outlives_every_cut_of_a_rewind() {
    let source = batches::source();
    for (kind, to) in [(Kind::File, 0), (Kind::File, EPOCH), (Kind::Device, 0)] {
        // What the grid would drop at once: it is of the same period as the rewind.
        let keep = Keep { last: 0, spans: vec![Span { seconds: 8 << 30, every: 4 << 30 }], ..last(0) };
        let world = replica_at(kind, &source, 0);
        let mut replica = world.open_keeping(&on(), &last(100)).unwrap();
        batches::mirror_to(&source, &mut replica, &RefCell::default()).unwrap();
        let (nonce, image) = (replica.status().nonce, &source.images[LAST]);
        drop(replica);
        let replica = world.open_keeping(&on(), &keep).unwrap();
        let moments = replica.history().unwrap().moments;
        let moment = moments.iter().find(|moment| moment.epoch == source.epochs[to]).unwrap().state;
        drop(replica);
        for back in [false, true] {
            let (from, state) = if back { (moment, nonce) } else { (nonce, moment) };
            let start = world.fork();
            if back {
                start.open_keeping(&on(), &keep).unwrap().rewind(moment).unwrap();
            }
            let run = |world: &World, power: &Power| -> Result<()> {
                world.open_keeping(power, &keep)?.rewind(state).map(drop)
            };
            let power = on();
            run(&start.fork(), &power).unwrap();
            let steps = power.steps();
            println!("{kind:?} to {to}, back {back}: {steps} steps");
            let sample = Sample::new("a state ahead");
            for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
                for step in 1..=steps + 1 {
                    if !sample.takes(step + number as u64, 7) {
                        continue;
                    }
                    let what = format!("{kind:?} to {to}, back {back}: {outage:?} at step {step} of {steps}");
                    let (world, power) = (start.fork(), Power::new(outage));
                    power.cut_at(step);
                    let done = run(&world, &power);
                    power.crash(disks, folders, step * 7 + number as u64).unwrap();
                    let mut replica = world.open(&on()).unwrap_or_else(|e| panic!("{what}: {e}"));
                    let at = replica.status().nonce;
                    assert!(at == state || at == from && done.is_err(), "{what}: {done:?}");
                    if at == moment {
                        assert_eq!(assert_exact(&source, &world, &replica, &what), to);
                        let ahead = ahead_of(&replica, nonce, &what);
                        replica.rewind(ahead.state).unwrap_or_else(|e| panic!("{what}: {e}"));
                    }
                    assert_ahead(&source, &world, &replica, image, &what);
                    // The next sync has all that the source has, and nothing else.
                    let delta = source.lacks(replica.status(), None, LAST + 1);
                    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
                    assert_eq!(assert_exact(&source, &world, &replica, &what), LAST + 1);
                }
            }
        }
    }
}

/// Without room for what a rewind leaves, there is no rewind.
#[test]
fn a_rewind_that_could_not_be_taken_back_is_not_made() {
    let source = batches::source();
    let start = replica_at(Kind::File, &source, 0);
    let mut replica = start.open_keeping(&on(), &last(100)).unwrap();
    batches::mirror_to(&source, &mut replica, &RefCell::default()).unwrap();
    let (nonce, moments) = (replica.status().nonce, replica.history().unwrap().moments);
    drop(replica);
    for errno in [28, 5] {
        for step in 1.. {
            let (world, power) = (start.fork(), Power::new(Outage::Kill));
            power.fail_at(step, 1, errno);
            let what = format!("error {errno} at step {step}");
            let _ = world.open(&power).and_then(|mut replica| replica.rewind(moments[0].state));
            let over = power.steps() < step;
            drop(power);
            let replica = world.open(&on()).unwrap_or_else(|e| panic!("{what}: {e}"));
            match replica.status().nonce == nonce {
                true => assert_ahead(&source, &world, &replica, &source.images[LAST], &what),
                false => drop(ahead_of(&replica, nonce, &what)),
            }
            if over {
                break;
            }
        }
    }
}

/// Something fails for a moment at every step of a mirror: no wrong moment is ever offered.
#[test]
fn what_fails_costs_a_mirror_the_past_at_most() {
    let source = batches::source();
    let sample = Sample::new("what fails costs a mirror the past at most");
    for (kind, errno) in [(Kind::File, 28), (Kind::File, 5), (Kind::Device, 28)] {
        let start = replica_at(kind, &source, 0);
        for step in (1..).filter(|step| sample.takes(*step, 5)) {
            let (world, power) = (start.fork(), Power::new(Outage::PowerCut));
            power.fail_at(step, 1, errno);
            let what = format!("{kind:?}, error {errno} at step {step}");
            let sent = RefCell::default();
            let opened = world.open_keeping(&power, &last(100));
            let _ = opened.and_then(|mut replica| batches::mirror_to(&source, &mut replica, &sent));
            let over = power.steps() < step;
            let (_, disks, folders) = OUTAGES[1];
            power.crash(disks, folders, step).unwrap();
            drop(world.open(&on()).unwrap_or_else(|e| panic!("{what}: {e}")));
            assert_moments(&source, &world, &what);
            if over {
                break;
            }
        }
    }
}

/// Where a mirror finds no room for what a batch replaces, the oldest moments go, and none before them.
#[test]
fn a_mirror_without_room_drops_the_oldest_moments_first() {
    let source = Source::new(testing::seed("a mirror without room"), &[40; 12]);
    for kind in [Kind::File, Kind::Device] {
        let world = replica_after(kind, &source, 8, &last(100), CommitMode::Journal);
        let power = on();
        let folder = FaultyFolder::new(&power, &world.state()).unwrap();
        let options = ReplicaOptions { keep: Some(last(100)), ..ReplicaOptions::default() };
        let mut replica = world.open_in(&power, Box::new(folder.clone()), &options).unwrap();
        let mut nonce = replica.status().nonce;
        let (mut log, mut batches) = replica.batches().unwrap();
        for to in 9..=10 {
            let chain = vec![source.epochs[8]];
            let header = delta::Header {
                chain,
                binds: Some(nonce),
                batch: true,
                ..source.header(to - 1, to, delta::Method::Tracked)
            };
            nonce = header.stream;
            let bytes = source.encode(&header, to, &source.changed(to - 1, to));
            batches::send(&mut log, &mut batches, &bytes, nonce).unwrap();
            folder.full_after(BLOCK);
            batches.apply().unwrap();
            folder.heal();
        }
        batches.finish().unwrap();
        drop(replica);
        let left = assert_moments(&source, &world, &format!("{kind:?}"));
        assert!(left.ends_with(&[8]) && left.windows(2).all(|two| two[0] + 1 == two[1]), "{left:?}");
        assert!((2..9).contains(&left.len()), "{left:?}");
    }
}

/// Wherever a commit has room that keeps nothing, it has room with a past as well, which gives way where there is no room for both.
#[test]
fn a_past_hinders_no_commit() {
    let source = Source::new(testing::seed("an undo delta without room"), &[40; 12]);
    for (kind, upto) in [(Kind::File, 1), (Kind::File, 6), (Kind::Device, 1), (Kind::Device, 6)] {
        let [plain, kept] = [Keep::default(), last(100)]
            .map(|keep| replica_after(kind, &source, upto, &keep, CommitMode::Journal));
        let commit = |world: &World, room: u64| {
            let (world, power) = (world.fork(), on());
            let folder = FaultyFolder::new(&power, &world.state()).unwrap();
            let mut replica =
                world.open_in(&power, Box::new(folder.clone()), &ReplicaOptions::default()).unwrap();
            folder.full_after(room);
            let done = merge(&mut replica, &source.tracked(upto, upto + 1), CommitMode::Journal);
            folder.heal();
            let warned = !replica.take_warnings().is_empty();
            drop(replica);
            (world, done, warned)
        };
        let least = (0..).map(|n| n * 1024).find(|room| commit(&plain, *room).1.is_ok()).unwrap();
        let mut all = 0;
        for room in (least..least * 4).step_by(if soak() { 1024 } else { 5 * 1024 }) {
            let what = format!("{kind:?} at {upto}, room for {room} of {least}");
            let (world, done, warned) = commit(&kept, room);
            done.unwrap_or_else(|e| panic!("{what}: {e}"));
            let replica = world.open(&on()).unwrap();
            assert_eq!(assert_exact(&source, &world, &replica, &what), upto + 1);
            drop(replica);
            let left = assert_moments(&source, &world, &what);
            assert!(left.len() > upto || warned, "{what}: lost without a word");
            assert!(!world.state().join("undo").exists(), "{what}: it is still there");
            all += usize::from(left.len() > upto);
        }
        assert!(all > 0, "{kind:?} at {upto}: it never had room");
    }
}

/// Gives moments other ages, the latest first: their files' names say when they were.
pub(super) fn age(world: &World, moments: &[Moment], mut seconds: impl FnMut() -> u64) -> Vec<u64> {
    let mut at = moments[0].at;
    let mut ages = Vec::new();
    for moment in moments {
        at -= seconds();
        let end = moment.state.simple().to_string();
        let old = world.names().into_iter().find(|name| name.ends_with(&end)).unwrap();
        let rest = old.splitn(3, '-').nth(2).unwrap();
        let new = format!("undo-{at:011}-{rest}");
        std::fs::rename(world.state().join(&old), world.state().join(new)).unwrap();
        ages.push(at);
    }
    ages
}

/// What is too old by the replica's clock may not be by the source's: then one of the two is far ahead.
#[test]
fn a_clock_that_is_ahead_drops_no_moment() {
    const DAY: u64 = 86_400;
    let source = source();
    for (said, kept) in [(None, 2), (Some(0), 2), (Some(7 * DAY), 4)] {
        let keep = Keep { last: 0, spans: vec![Span { seconds: DAY, every: 0 }], ..last(0) };
        let world = replica_after(Kind::File, &source, 3, &keep, CommitMode::Journal);
        let moments = world.open(&on()).unwrap().history().unwrap().moments;
        age(&world, &moments, || 2 * DAY);
        let now = device::Clock::system().now() / 1_000_000_000;
        let source_time = said.map(|ago| crate::SourceTime::said(now - ago));
        let options = ReplicaOptions { source_time, ..ReplicaOptions::default() };
        let folder = FaultyFolder::new(&on(), &world.state()).unwrap();
        let mut replica = world.open_in(&on(), Box::new(folder), &options).unwrap();
        merge(&mut replica, &source.tracked(3, 4), CommitMode::Journal).unwrap();
        let left = replica.history().unwrap().moments.len();
        assert_eq!(left, kept, "the source is {said:?} seconds behind");
    }
}

#[test]
fn a_grid_folds_what_it_does_not_keep() {
    let seed = testing::seed("a_grid_folds");
    let mut dice = Random::seeded(seed);
    for round in 0..if soak() { 60 } else { 8 } {
        let count = 10 + dice.below(60) as usize;
        let source = Source::new(seed ^ round, &vec![40; count + 2]);
        let world = replica_after(Kind::File, &source, count, &last(1000), CommitMode::Journal);
        let moments = world.open(&on()).unwrap().history().unwrap().moments;
        let times = age(&world, &moments, || 1 + dice.below(3000));
        let spans = vec![
            Span { seconds: 1 + dice.below(20_000), every: 0 },
            Span { seconds: 5000 + dice.below(90_000), every: 60 + dice.below(4000) },
        ];
        let keep = Keep { spans, last: dice.below(4), bytes: Some(u64::MAX) };
        let what = format!("round {round}, {count} moments, {keep}");
        // What the rules keep of them, with the present state and the one that a commit adds.
        let mut all: Vec<u64> = times.into_iter().rev().chain([moments[0].at]).collect();
        let kept = |all: &[u64], now| -> Vec<usize> {
            let kept = keep.kept(&[all, &[now]].concat());
            (0..all.len()).filter(|n| kept[*n]).collect()
        };
        let before = world.open(&on()).unwrap().now();
        let mut replica = world.open_keeping(&on(), &keep).unwrap();
        merge(&mut replica, &source.tracked(count, count + 1), CommitMode::Journal).unwrap();
        // A commit does a part of the work.
        let mut left = replica.history().unwrap().moments;
        loop {
            replica.age_past();
            let now = replica.history().unwrap().moments;
            if std::mem::replace(&mut left, now).len() == left.len() {
                break;
            }
        }
        *all.last_mut().unwrap() = left.iter().map(|moment| moment.at).max().unwrap_or(before);
        let (most, least) = (kept(&all, before), kept(&all, replica.now()));
        drop(replica);
        let found = assert_moments(&source, &world, &what);
        assert!(found.iter().all(|n| most.contains(n)), "{what}: {found:?}, and not more than {most:?}");
        assert!(least.iter().all(|n| found.contains(n)), "{what}: {found:?}, and not less than {least:?}");
    }
}

#[test]
fn the_oldest_go_where_they_take_too_much() {
    let source = Source::new(3, &[40; 42]);
    let world = replica_after(Kind::File, &source, 40, &last(1000), CommitMode::Journal);
    let moments = world.open(&on()).unwrap().history().unwrap().moments;
    let newest: u64 = moments[..5].iter().map(|moment| moment.bytes).sum();
    let keep = Keep { bytes: Some(newest + moments[5].bytes / 2), ..last(1000) };
    let mut replica = world.open_keeping(&on(), &keep).unwrap();
    merge(&mut replica, &source.tracked(40, 41), CommitMode::Journal).unwrap();
    drop(replica);
    let left = assert_moments(&source, &world, "bounded");
    assert!(left.len() >= 3 && left.contains(&40), "{left:?}");
    assert!(left.windows(2).all(|two| two[0] + 1 == two[1]), "{left:?}");
    let bytes: u64 = world.open(&on()).unwrap().history().unwrap().moments.iter().map(|m| m.bytes).sum();
    assert!(bytes <= keep.bytes.unwrap(), "{bytes}");
}
