//! Whatever crashes when: after recovery a replica is one epoch, or marked as incomplete, and the next sync completes it. The
//! sample takes every step, but not everything that can come after each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use testing::faulty::{Keep, Outage, Power};
use testing::{Sample, soak};

use super::world::*;
use crate::state::destination::Name;
use crate::{CommitMode, ReplicaError, ReplicaOptions, State};

/// Every outage that a run goes through. `KeepAll` and `LoseUnsynced` are also taken apart: data without metadata, and the
/// other way round.
pub(super) const OUTAGES: [(Outage, Keep, Keep); 6] = [
    (Outage::Kill, Keep::KeepAll, Keep::KeepAll),
    (Outage::PowerCut, Keep::LoseUnsynced, Keep::LoseUnsynced),
    (Outage::PowerCut, Keep::KeepAll, Keep::KeepAll),
    (Outage::PowerCut, Keep::KeepAll, Keep::LoseUnsynced),
    (Outage::PowerCut, Keep::LoseUnsynced, Keep::KeepAll),
    (Outage::PowerCut, Keep::Random, Keep::Random),
];

pub(super) fn on() -> Power {
    Power::new(Outage::Kill)
}

/// Brings the replica up to date as a sync does, whatever it lacks.
fn sync(world: &World, power: &Power, source: &Source, to: usize, commit: CommitMode) -> crate::Result<()> {
    let mut replica = world.open(power)?;
    let delta = source.lacks(replica.status(), content(&replica).as_deref(), to);
    merge(&mut replica, &delta, commit)?;
    Ok(())
}

/// One scenario: a world in order, and what is done to it while the power may be cut.
pub(super) struct Scenario<'a> {
    pub name: &'a str,
    pub source: &'a Source,
    pub world: World,
    /// The epoch the replica stands at before (none: there is no replica yet), and after.
    pub from: Option<usize>,
    pub to: usize,
    /// The destination itself changes, so is incomplete meanwhile.
    pub in_place: bool,
    pub commit: CommitMode,
    pub run: &'a dyn Fn(&World, &Power) -> crate::Result<()>,
}

/// What is left must be one epoch or marked, whatever happened; and the next syncs succeed: those that `turn` chooses.
fn check(s: &Scenario<'_>, world: &World, turn: u64, what: &str) {
    let source = s.source;
    let fail = |why: String| -> ! { panic!("{}: {what}: {why}", s.name) };
    let power = on();
    let status = match world.open(&power) {
        Ok(replica) => replica.status().clone(),
        Err(e) => fail(format!("does not open: {e}")),
    };
    match status.state {
        State::Exact => {
            let at = source.index(&status.epoch.unwrap());
            if Some(at) != s.from && at != s.to {
                fail(format!("is at {at}"));
            }
            if status.size != source.size(at) || !world.holds(&source.images[at]) {
                fail(format!("is not epoch {at} as it says"));
            }
        }
        State::Fuzzy => fail("is fuzzy".into()),
        State::Incomplete => match (s.from, s.in_place) {
            // A seed under way; the file appears whole.
            (None, _) => {
                if world.kind == Kind::File && world.raw().is_some() {
                    fail("a file is there before it is whole".into());
                }
            }
            (Some(_), true) => {}
            (Some(_), false) => fail("is incomplete".into()),
        },
    }
    // The same delta again, as after a lost acknowledgement or from a pipe.
    if let Some(from) = s.from.filter(|_| soak() || turn % 4 == 3) {
        let again = world.fork();
        let mut replica = again.open(&power).unwrap();
        match merge(&mut replica, &source.tracked(from, s.to), CommitMode::Journal) {
            Ok(_) => assert!(again.holds(&source.images[s.to]), "{}: {what}: merged again", s.name),
            // Where the destination already holds a part of a newer one.
            Err(ReplicaError::WrongEpoch { .. }) => {}
            Err(e) => fail(format!("the delta again: {e}")),
        }
    }
    // The next sync, to the same epoch and to the next, by the same way and by the default.
    let nexts = [(s.to, s.commit), (s.to + 1, s.commit), (s.to + 1, CommitMode::Journal)];
    for (n, (to, commit)) in nexts.into_iter().enumerate() {
        if !soak() && turn % 4 != n as u64 {
            continue;
        }
        let next = world.fork();
        if let Err(e) = sync(&next, &power, source, to, commit) {
            fail(format!("the next sync to {to} by {commit:?}: {e}"));
        }
        if !next.holds(&source.images[to]) {
            fail(format!("is not {to} after the next sync by {commit:?}"));
        }
        let replica = next.open(&power).unwrap();
        let status = replica.status();
        assert_eq!((status.epoch, status.state), (Some(source.epochs[to]), State::Exact));
        assert_eq!((status.under_way(), status.resumes), (false, None));
        source.check_trail(&replica);
        drop(replica);
        let left: Vec<String> = next.names();
        assert!(
            left.iter().all(|n| n == "lineage" || n == "vm.raw"),
            "{}: {what}: left over: {left:?}",
            s.name
        );
    }
}

/// Cuts the power at every step of the scenario.
pub(super) fn cut_everywhere(s: &Scenario<'_>) {
    let power = on();
    let whole = s.world.fork();
    (s.run)(&whole, &power).unwrap_or_else(|e| panic!("{}: without a cut: {e}", s.name));
    assert!(whole.holds(&s.source.images[s.to]), "{}: without a cut", s.name);
    let steps = power.steps();
    println!("{}: {steps} steps", s.name);
    let sample = Sample::new(s.name);
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps + 1 {
            let turn = step + number as u64;
            // The outages that find most are tried at every step.
            if number > 1 && step <= steps && !sample.takes(turn, 7) {
                continue;
            }
            let what = format!("cut by {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
            let world = s.world.fork();
            let power = Power::new(outage);
            power.cut_at(step);
            let result = (s.run)(&world, &power);
            assert_eq!(result.is_ok(), step > steps, "{}: {what}: {result:?}", s.name);
            power.crash(disks, folders, step * 7 + number as u64).unwrap();
            check(s, &world, turn, &what);
            if step > steps {
                // What was acknowledged stays.
                let replica = world.open(&on()).unwrap();
                assert_eq!(replica.status().epoch, Some(s.source.epochs[s.to]), "{}: {what}", s.name);
            }
            // The recovery is cut too, at some step.
            if !soak() && turn % 3 != 1 {
                continue;
            }
            let again = world.fork();
            let power = Power::new(outage);
            power.cut_at(1 + step % 23);
            let _ = again.open(&power);
            power.crash(disks, folders, step * 11 + number as u64).unwrap();
            check(s, &again, turn / 3, &format!("{what}, and its recovery at step {}", 1 + step % 23));
        }
    }
}

/// Something fails for a moment, at every step in turn; the same process tries again with what it holds, and once that is over
/// the machine may lose power. What was said to be committed is there.
fn stumble_everywhere(name: &str, kind: Kind, from: Option<usize>, to: usize, commit: CommitMode) {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    let source = source();
    let world = from.map_or_else(|| World::new(kind), |from| replica_at(kind, &source, from));
    let in_place = commit == CommitMode::InPlace;
    let s = Scenario { name, source: &source, world, from, to, in_place, commit, run: &|_, _| Ok(()) };
    let (mut turn, power) = (0, on());
    try_again(&source, &mut s.world.fork().open(&power).unwrap(), from, to, commit, false);
    let steps = power.steps();
    for (number, (outage, disks, folders)) in
        OUTAGES.into_iter().enumerate().filter(|(n, _)| [0, 1, 5].contains(n))
    {
        for (count, errno) in [(1, EIO), (1, ENOSPC), (2, EIO)] {
            for step in 1.. {
                turn += 1;
                let most = (outage, count, errno) == (Outage::PowerCut, 1, EIO) && number == 1;
                if !soak() && !most && (step * 3 + turn) % 5 != 0 && step < steps {
                    continue;
                }
                let what = format!("{outage:?} {disks:?}, error {errno} at step {step}, {count} times");
                let (world, power) = (s.world.fork(), Power::new(outage));
                power.fail_at(step, count, errno);
                let Ok(mut replica) = world.open(&power).or_else(|_| world.open(&power)) else { continue };
                let stubborn = turn % 2 == 0;
                let done = try_again(&source, &mut replica, from, to, commit, stubborn);
                drop(replica);
                let over = power.steps() < step;
                power.crash(disks, folders, step * 7 + number as u64).unwrap();
                if done {
                    let replica = world.open(&on()).unwrap_or_else(|e| panic!("{name}: {what}: {e}"));
                    assert_eq!(replica.status().epoch, Some(source.epochs[to]), "{name}: {what}");
                }
                check(&s, &world, turn, &what);
                if over {
                    break;
                }
            }
        }
    }
    println!("{name}: {turn} stumbles");
}

/// Brings the replica up to date; what fails is tried again with the same replica. A stubborn caller goes on with a receipt
/// that has failed. True if a commit was said to be done.
fn try_again(
    source: &Source,
    replica: &mut crate::Replica,
    from: Option<usize>,
    to: usize,
    commit: CommitMode,
    stubborn: bool,
) -> bool {
    let mut delta = from.map_or_else(|| source.seed(to), |from| source.tracked(from, to));
    for _ in 0..3 {
        let mut units = units(&delta).into_iter();
        if let Ok(mut receipt) = replica.receive(units.next().unwrap(), commit) {
            let mut taken = units.map(|unit| receipt.unit(unit));
            let whole =
                if stubborn { taken.filter(Result::is_err).count() == 0 } else { taken.all(|r| r.is_ok()) };
            if (whole || stubborn) && receipt.finish().is_ok() {
                return true;
            }
        }
        let status = replica.status().clone();
        let content = content(replica);
        if content.is_none() && status.positions.iter().any(|p| p.epoch.is_none()) {
            return false;
        }
        delta = source.lacks(&status, content.as_deref(), to);
    }
    false
}

#[test]
fn errors_that_pass() {
    stumble_everywhere("journal, file", Kind::File, Some(0), 1, CommitMode::Journal);
    stumble_everywhere("journal, device", Kind::Device, Some(1), 3, CommitMode::Journal);
    stumble_everywhere("in place, file", Kind::File, Some(0), 1, CommitMode::InPlace);
    stumble_everywhere("in place, device", Kind::Device, Some(1), 3, CommitMode::InPlace);
    stumble_everywhere("reflink", Kind::File, Some(0), 1, CommitMode::Reflink);
    stumble_everywhere("seed, file", Kind::File, None, 1, CommitMode::Journal);
    stumble_everywhere("seed, device", Kind::Device, None, 1, CommitMode::Journal);
}

fn source() -> Source {
    // Grown and shrunk on the way.
    Source::new(11, &[40, 48, 44, 44, 60])
}

pub(super) fn replica_at(kind: Kind, source: &Source, at: usize) -> World {
    let world = World::new(kind);
    if kind == Kind::Device {
        world.soil();
        let mut replica = world.open_with(&on(), false, true).unwrap();
        merge(&mut replica, &source.seed(at), CommitMode::Journal).unwrap();
    } else {
        sync(&world, &on(), source, at, CommitMode::Journal).unwrap();
    }
    assert!(world.holds(&source.images[at]));
    world
}

fn scenario(name: &str, kind: Kind, from: usize, to: usize, commit: CommitMode) {
    let source = source();
    let run = |world: &World, power: &Power| {
        let mut replica = world.open(power)?;
        merge(&mut replica, &source.tracked(from, to), commit).map(drop)
    };
    let in_place = commit == CommitMode::InPlace;
    let world = replica_at(kind, &source, from);
    cut_everywhere(&Scenario {
        name,
        source: &source,
        world,
        from: Some(from),
        to,
        in_place,
        commit,
        run: &run,
    });
}

#[test]
fn journal_on_a_file_that_grows() {
    scenario("journal, file, grows", Kind::File, 0, 1, CommitMode::Journal);
}

#[test]
fn journal_on_a_file_that_shrinks() {
    scenario("journal, file, shrinks", Kind::File, 1, 3, CommitMode::Journal);
}

#[test]
fn journal_on_a_device() {
    scenario("journal, device", Kind::Device, 0, 1, CommitMode::Journal);
}

#[test]
fn in_place_on_a_file_that_grows() {
    scenario("in place, file, grows", Kind::File, 0, 1, CommitMode::InPlace);
}

#[test]
fn in_place_on_a_file_that_shrinks() {
    scenario("in place, file, shrinks", Kind::File, 1, 3, CommitMode::InPlace);
}

#[test]
fn in_place_on_a_device() {
    scenario("in place, device", Kind::Device, 0, 1, CommitMode::InPlace);
}

#[test]
fn reflink_that_grows() {
    scenario("reflink, grows", Kind::File, 0, 1, CommitMode::Reflink);
}

#[test]
fn reflink_that_shrinks() {
    scenario("reflink, shrinks", Kind::File, 1, 3, CommitMode::Reflink);
}

fn seed(name: &str, kind: Kind) {
    let source = source();
    let run = |world: &World, power: &Power| {
        let mut replica = world.open_with(power, false, kind == Kind::Device)?;
        merge(&mut replica, &source.seed(1), CommitMode::Journal).map(drop)
    };
    let world = World::new(kind);
    if kind == Kind::Device {
        world.soil();
    }
    let scenario = Scenario {
        name,
        source: &source,
        world,
        from: None,
        to: 1,
        in_place: true,
        commit: CommitMode::Journal,
        run: &run,
    };
    if kind == Kind::File {
        return cut_everywhere(&scenario);
    }
    // A soiled device without a lineage is refused: what was cut before the lineage lay there has changed nothing.
    let power = on();
    assert!(matches!(scenario.world.open(&power), Err(ReplicaError::NotAReplica(_))));
    let blank = World::new(kind);
    cut_everywhere(&Scenario { world: blank, ..scenario });
    let whole = scenario.world.fork();
    run(&whole, &power).unwrap();
    assert!(whole.holds(&source.images[1]));
    let steps = power.steps();
    for step in 1..=steps {
        let world = scenario.world.fork();
        let power = Power::new(Outage::PowerCut);
        power.cut_at(step);
        let _ = run(&world, &power);
        power.crash(Keep::Random, Keep::Random, step).unwrap();
        if !world.names().contains(&"lineage".to_owned()) {
            assert_eq!(world.raw(), scenario.world.raw());
            continue;
        }
        check(&scenario, &world, step, &format!("on a used device, cut at {step}"));
    }
}

#[test]
fn seed_of_a_file() {
    seed("seed, file", Kind::File);
}

#[test]
fn seed_of_a_device() {
    seed("seed, device", Kind::Device);
}

/// A transfer cut in the middle, gone on from with a newer epoch, by the same or another way.
fn resumed(name: &str, kind: Kind, from: Option<usize>, first: CommitMode, then: CommitMode) {
    let source = source();
    let world = match from {
        Some(from) => replica_at(kind, &source, from),
        None => World::new(kind),
    };
    let mut replica = world.open(&on()).unwrap();
    let middle = from.map_or(1, |from| from + 1);
    let delta = match from {
        Some(from) => source.tracked(from, middle),
        None => source.seed(middle),
    };
    receive_part(&mut replica, &delta, first, 3).unwrap();
    let status = replica.status().clone();
    drop(replica);
    assert_eq!(world.open(&on()).unwrap().status().positions, status.positions, "{name}");
    let upto = status.positions[0].upto;
    assert!(upto > 0 && status.positions[0].epoch == Some(source.epochs[middle]), "{name}: {status:?}");
    let to = middle + 1;
    let run = |world: &World, power: &Power| {
        let mut replica = world.open(power)?;
        let delta = source.lacks(replica.status(), None, to);
        merge(&mut replica, &delta, then).map(drop)
    };
    // What was interrupted before may be there in every state.
    let in_place = first == CommitMode::InPlace || then == CommitMode::InPlace;
    cut_everywhere(&Scenario { name, source: &source, world, from, to, in_place, commit: then, run: &run });
}

#[test]
fn journal_resumed() {
    resumed("journal, resumed", Kind::File, Some(0), CommitMode::Journal, CommitMode::Journal);
}

#[test]
fn journal_resumed_on_a_device() {
    resumed("journal, device, resumed", Kind::Device, Some(0), CommitMode::Journal, CommitMode::Journal);
}

#[test]
fn in_place_resumed() {
    resumed("in place, resumed", Kind::File, Some(0), CommitMode::InPlace, CommitMode::InPlace);
}

#[test]
fn in_place_resumed_on_a_device() {
    resumed("in place, device, resumed", Kind::Device, Some(0), CommitMode::InPlace, CommitMode::InPlace);
}

#[test]
fn in_place_resumed_by_journal() {
    resumed("in place, resumed by journal", Kind::File, Some(0), CommitMode::InPlace, CommitMode::Journal);
}

#[test]
fn journal_resumed_in_place() {
    resumed("journal, resumed in place", Kind::File, Some(0), CommitMode::Journal, CommitMode::InPlace);
}

#[test]
fn journal_resumed_by_reflink() {
    resumed("journal, resumed by reflink", Kind::File, Some(0), CommitMode::Journal, CommitMode::Reflink);
}

#[test]
fn reflink_resumed() {
    resumed("reflink, resumed", Kind::File, Some(0), CommitMode::Reflink, CommitMode::Reflink);
}

#[test]
fn seed_resumed() {
    resumed("seed, resumed", Kind::File, None, CommitMode::Journal, CommitMode::Journal);
}

#[test]
fn seed_of_a_device_resumed() {
    resumed("seed, device, resumed", Kind::Device, None, CommitMode::Journal, CommitMode::Journal);
}

/// A file brought by hand, proven by comparing.
#[test]
fn adopted() {
    for commit in [CommitMode::Journal, CommitMode::InPlace, CommitMode::Reflink] {
        let source = source();
        let world = World::new(Kind::File);
        world.put(&source.images[0]);
        let power = on();
        let adopt = |world: &World, power: &Power| {
            let mut replica = world.open_with(power, true, false)?;
            let disk = replica.content()?;
            let mut content = vec![0; disk.len() as usize];
            disk.read_at(0, &mut content).map_err(crate::error::io_error("read", replica.path()))?;
            let delta = source.lacks(replica.status(), Some(&content), 1);
            merge(&mut replica, &delta, commit).map(drop)
        };
        let whole = world.fork();
        adopt(&whole, &power).unwrap();
        assert!(whole.holds(&source.images[1]));
        let steps = power.steps();
        println!("adopted by {commit:?}: {steps} steps");
        for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
            for step in 1..=steps + 1 {
                let what = format!("adopt by {commit:?}, {outage:?} {disks:?} {folders:?} at step {step}");
                let world = world.fork();
                let power = Power::new(outage);
                power.cut_at(step);
                let _ = adopt(&world, &power);
                power.crash(disks, folders, step + number as u64).unwrap();
                match world.open(&on()) {
                    Ok(replica) => match replica.status().state {
                        State::Exact => assert!(world.holds(&source.images[1]), "{what}"),
                        state => {
                            assert_eq!((state, replica.status().epoch), (State::Incomplete, None), "{what}")
                        }
                    },
                    Err(ReplicaError::NotAReplica(_) | ReplicaError::Unproven(_)) => {
                        assert!(world.holds(&source.images[0]), "{what}")
                    }
                    Err(e) => panic!("{what}: {e}"),
                }
                adopt(&world, &on()).unwrap_or_else(|e| panic!("{what}: again: {e}"));
                assert!(world.holds(&source.images[1]), "{what}: again");
                assert_eq!(world.open(&on()).unwrap().status().state, State::Exact, "{what}");
            }
        }
    }
}

/// What others wrote just before a comparison is in memory only. The delta omits what is equal there, so it must not be taken
/// away by a power cut once the delta is sealed.
#[test]
fn what_was_compared_outlives_a_power_cut() {
    let source = source();
    let start = replica_at(Kind::File, &source, 0);
    let adopt = |world: &World, power: &Power| -> crate::Result<()> {
        let (machine, steps) = (world.machine(power), Arc::new(AtomicU64::new(u64::MAX)));
        let disk = world.open_mortal(&machine, &steps)?.destination().open(Name::Final)?;
        for block in source.changed(0, 1).into_iter().filter(|block| (block + 1) * BLOCK <= disk.len()) {
            let place = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
            let written = disk.write_at(block * BLOCK, &source.images[1][place]);
            written.map_err(crate::error::io_error("write", &world.site()))?;
        }
        let adopt = ReplicaOptions { adopt: true, ..ReplicaOptions::default() };
        let mut replica = world.open_mortal_with(&machine, &steps, &adopt)?;
        let mut status = replica.status().clone();
        status.positions.iter_mut().for_each(|position| position.epoch = None);
        let delta = source.lacks(&status, Some(&content(&replica).unwrap_or_default()), 1);
        merge(&mut replica, &delta, CommitMode::Journal).map(drop)
    };
    let power = on();
    adopt(&start.fork(), &power).unwrap();
    for step in 1..=power.steps() {
        let (world, power) = (start.fork(), Power::new(Outage::PowerCut));
        power.cut_at(step);
        let _ = adopt(&world, &power);
        power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, step).unwrap();
        if let Ok(replica) = world.open(&on()) {
            let at = replica.status().epoch.map(|epoch| source.index(&epoch));
            let holds = at.is_some_and(|at| world.holds(&source.images[at]));
            assert!(replica.status().state != State::Exact || holds, "cut at {step}: not epoch {at:?}");
        }
    }
}

/// The destination is full in the middle of the merge: the journal is kept, and recovery finishes once there is space.
#[test]
fn no_space_in_the_middle_of_a_merge() {
    for kind in [Kind::File, Kind::Device] {
        let source = source();
        let world = replica_at(kind, &source, 0);
        for blocks in 0..6 {
            let world = world.fork();
            world.room.store(blocks * BLOCK, SeqCst);
            let mut replica = world.open(&on()).unwrap();
            let error = merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap_err();
            assert!(matches!(error, ReplicaError::Full { .. }), "{error}");
            assert!(
                !error.is_refusal() && error.to_string().contains("the next command completes"),
                "{error}"
            );
            drop(replica);
            // Still full: said again, and nothing is lost.
            world.room.store(blocks * BLOCK, SeqCst);
            assert!(matches!(world.open(&on()), Err(ReplicaError::Full { .. })));
            world.room.store(u64::MAX, SeqCst);
            let replica = world.open(&on()).unwrap();
            assert!(replica.status().recovered.as_ref().unwrap().contains("has been merged"));
            assert_eq!(replica.status().epoch, Some(source.epochs[1]));
            assert!(world.holds(&source.images[1]));
        }
    }
}

/// The journal's place is full before the merge: nothing has happened.
#[test]
fn no_space_for_the_journal() {
    let source = source();
    let world = replica_at(Kind::File, &source, 0);
    let names = world.names();
    for bytes in [0, 1, 100, 5000, 20000, 60000] {
        let power = on();
        let folder = testing::faulty::FaultyFolder::new(&power, &world.state()).unwrap();
        folder.full_after(bytes);
        let mut replica = world.open_in(&power, Box::new(folder), &crate::ReplicaOptions::default()).unwrap();
        let error = merge(&mut replica, &source.tracked(0, 1), CommitMode::Journal).unwrap_err();
        assert!(matches!(error, ReplicaError::Full { .. }), "{bytes}: {error}");
        assert!(world.holds(&source.images[0]));
        drop(replica);
        assert_eq!(world.names(), names, "{bytes}");
    }
    sync(&world, &on(), &source, 1, CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[1]));
}

/// What was made durable of a seed, or of an in-place commit, outlives a power cut, so that it need not be sent again.
#[test]
fn what_was_saved_is_gone_on_from() {
    for (kind, from, commit) in [
        (Kind::File, None, CommitMode::Journal),
        (Kind::Device, None, CommitMode::Journal),
        (Kind::File, Some(0), CommitMode::InPlace),
        (Kind::File, Some(0), CommitMode::Reflink),
    ] {
        let source = source();
        let world = match from {
            Some(from) => replica_at(kind, &source, from),
            None => World::new(kind),
        };
        let delta = from.map_or_else(|| source.seed(1), |from| source.tracked(from, 1));
        let power = Power::new(Outage::PowerCut);
        let mut replica = world.open(&power).unwrap();
        let mut units = units(&delta).into_iter();
        let mut receipt = replica.receive(units.next().unwrap(), commit).unwrap();
        for unit in units.take(8) {
            receipt.unit(unit).unwrap();
        }
        power.cut();
        drop(receipt);
        drop(replica);
        power.crash(Keep::LoseUnsynced, Keep::LoseUnsynced, 0).unwrap();
        let replica = world.open(&on()).unwrap();
        let status = replica.status();
        let first =
            status.positions.first().unwrap_or_else(|| panic!("{kind:?} by {commit:?}: nothing is left"));
        assert_eq!(first.epoch, Some(source.epochs[1]), "{kind:?} by {commit:?}: {status:?}");
        assert!(first.upto > 4 * BLOCK, "{status:?}");
        drop(replica);
        sync(&world, &on(), &source, 2, commit).unwrap();
        assert!(world.holds(&source.images[2]));
    }
}

/// The process is killed at a step, and the machine loses power while the next one recovers: what the first had not synced
/// is lost only then.
fn killed_then_cut(name: &str, from: Option<usize>, commit: CommitMode) {
    let source = source();
    let first = match from {
        Some(from) => replica_at(Kind::File, &source, from),
        None => World::new(Kind::File),
    };
    let delta = from.map_or_else(|| source.seed(1), |from| source.tracked(from, 1));
    let run = |world: &World, machine: &Machine, steps: u64| {
        let steps = Arc::new(AtomicU64::new(steps));
        let mut replica = world.open_mortal(machine, &steps)?;
        merge(&mut replica, &delta, commit)?;
        Ok::<u64, ReplicaError>(steps.load(SeqCst))
    };
    let many = 1 << 20;
    let world = first.fork();
    let steps = many - run(&world, &world.machine(&on()), many).unwrap();
    let scenario = Scenario {
        name,
        source: &source,
        world: first,
        from,
        to: 1,
        in_place: commit == CommitMode::InPlace,
        commit,
        run: &|_, _| Ok(()),
    };
    let mut turn = 0;
    for killed in 0..=steps {
        // Until the recovery gets through.
        for cut in 1.. {
            turn += 1;
            let world = scenario.world.fork();
            let power = Power::new(Outage::PowerCut);
            let machine = world.machine(&power);
            assert_eq!(run(&world, &machine, killed).is_ok(), killed == steps);
            let already = power.steps();
            power.cut_at(already + cut);
            let recovered = world.open_mortal(&machine, &Arc::new(AtomicU64::new(many))).is_ok();
            let keep = if turn % 2 == 0 { Keep::LoseUnsynced } else { Keep::Random };
            power.crash(keep, keep, turn).unwrap();
            let what = format!("killed at step {killed}, cut by {keep:?} at step {cut} of the recovery");
            check(&scenario, &world, turn / 2, &what);
            if recovered {
                break;
            }
        }
    }
    println!("{name}: {steps} steps, {turn} outages");
}

#[test]
fn journal_killed_then_cut() {
    killed_then_cut("journal, killed, then cut", Some(0), CommitMode::Journal);
}

#[test]
fn in_place_killed_then_cut() {
    killed_then_cut("in place, killed, then cut", Some(0), CommitMode::InPlace);
}

#[test]
fn reflink_killed_then_cut() {
    killed_then_cut("reflink, killed, then cut", Some(0), CommitMode::Reflink);
}

#[test]
fn seed_killed_then_cut() {
    killed_then_cut("seed, killed, then cut", None, CommitMode::Journal);
}

/// A sync fails, once: the system forgets what it could not write, and says so only that time. Nothing that was under way is
/// believed to be durable by a later sync.
#[test]
fn a_failed_sync_is_not_asked_again() {
    let source = source();
    for commit in [CommitMode::Journal, CommitMode::InPlace, CommitMode::Reflink] {
        let first = replica_at(Kind::File, &source, 0);
        for number in 1.. {
            let world = first.fork();
            let machine = world.machine(&on());
            let steps = Arc::new(AtomicU64::new(1 << 20));
            let mut replica = world.open_mortal(&machine, &steps).unwrap();
            machine.syncs.fails.store(number, SeqCst);
            let result = merge(&mut replica, &source.tracked(0, 1), commit);
            drop(replica);
            let failed = machine.syncs.failed();
            let what = format!("{commit:?}: sync {number} fails: {failed:?}");
            assert_eq!(result.is_err(), failed.is_some(), "{what}: {result:?}");
            // The lineage is written anew as a whole; all else is left alone.
            assert!(
                failed.as_ref().is_none_or(|(name, after)| name == "lineage.new" || *after == 0),
                "{what}"
            );
            assert!(!world.names().contains(&"journal".to_owned()), "{what}");
            sync(&world, &on(), &source, 2, commit).unwrap();
            assert!(world.holds(&source.images[2]), "{what}");
            if failed.is_none() {
                assert!(number > 3);
                break;
            }
        }
    }
}
