//! Replicas that commit together: after any crash all of them are at one moment, in whichever order they are opened.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use delta::Epoch;
use tempfile::TempDir;
use testing::faulty::{FaultyFolder, Outage, Power};
use testing::{Sample, soak};
use uuid::Uuid;

use super::crash::{OUTAGES, on, replica_at};
use super::world::*;
use crate::group::past::GroupMoment;
use crate::past::commits::PastCommits;
use crate::{
    CommitMode, Group, Intent, Keep, Member, Replica, ReplicaError, ReplicaMembership, ReplicaOptions, State,
};

/// Two replicas of two sources, and the folder of their group.
struct Pair {
    worlds: [World; 2],
    group: TempDir,
    /// What the replicas keep of their past.
    keep: Option<Keep>,
}

fn sources() -> [Source; 2] {
    [Source::new(11, &[40, 48, 44, 44, 60]), Source::new(12, &[30, 30, 36, 20, 24])]
}

fn cut(number: u64) -> Epoch {
    Epoch { number, id: Uuid::from_u128(number.into()) }
}

fn membership() -> ReplicaMembership {
    ReplicaMembership { name: "db".into(), folder: None }
}

impl Pair {
    /// Both at this epoch of their sources.
    fn at(kinds: [Kind; 2], sources: &[Source; 2], epoch: usize) -> Pair {
        let worlds = [0, 1].map(|at| replica_at(kinds[at], &sources[at], epoch));
        Pair { worlds, group: testing::in_memory(), keep: None }
    }

    fn fork(&self) -> Pair {
        let group = testing::in_memory();
        for entry in std::fs::read_dir(self.group.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), group.path().join(entry.file_name())).unwrap();
        }
        let keep = self.keep.clone();
        Pair { worlds: [self.worlds[0].fork(), self.worlds[1].fork()], group, keep }
    }

    /// The group's folder in this life.
    fn begin(&self, power: &Power) -> Arc<FaultyFolder> {
        let folder = Arc::new(FaultyFolder::new(power, self.group.path()).unwrap());
        self.worlds.iter().for_each(|world| *world.group.lock().unwrap() = Some(folder.clone()));
        folder
    }

    fn open_one(&self, at: usize, power: &Power, group: bool) -> crate::Result<Replica> {
        let folder = FaultyFolder::new(power, &self.worlds[at].state()).unwrap();
        let keep = self.keep.clone();
        let options = ReplicaOptions { group: group.then(membership), keep, ..ReplicaOptions::default() };
        self.worlds[at].open_in(power, Box::new(folder), &options)
    }

    /// Opens both as their group does.
    fn open(&self, power: &Power) -> crate::Result<(Group, Vec<Replica>)> {
        let folder = self.begin(power);
        let group = Group::begin(Box::new(SharedFolder(folder)), "db")?;
        Ok((group, vec![self.open_one(0, power, true)?, self.open_one(1, power, true)?]))
    }

    /// Brings both to an epoch of their sources, together.
    fn sync(&self, power: &Power, sources: &[Source; 2], to: usize) -> crate::Result<()> {
        let (mut group, mut replicas) = self.open(power)?;
        for (replica, source) in replicas.iter_mut().zip(sources) {
            let there = source.epochs[to];
            if replica.status().epoch != Some(there) || replica.status().resumes.is_some() {
                prepare(replica, &source.lacks(replica.status(), content(replica).as_deref(), to))?;
            }
        }
        group.commit(cut(to as u64), &mut replicas)?;
        Ok(())
    }

    /// Makes sources of both.
    fn promote(&self, power: &Power) -> crate::Result<()> {
        let (mut group, mut replicas) = self.open(power)?;
        group.promote(&mut replicas).map(drop)
    }

    /// The common commits that are kept, by the numbers of their cuts.
    fn past(&self) -> Vec<Intent> {
        PastCommits::load(&*self.begin(&on())).unwrap().intents
    }

    /// Brings both back to the commit of a cut.
    fn rewind(&self, power: &Power, to: u64) -> crate::Result<()> {
        let to = self.past().into_iter().find(|intent| intent.cut.number == to).expect("a moment");
        let (mut group, mut replicas) = self.open(power)?;
        group.rewind(&GroupMoment::of(&to), &mut replicas).map(drop)
    }

    /// Which of both are sources now. Fails the test if one cannot be opened for another reason.
    fn promoted(&self, order: [usize; 2], what: &str) -> [bool; 2] {
        let mut promoted = [false; 2];
        for one in order {
            let power = on();
            self.begin(&power);
            promoted[one] = match self.open_one(one, &power, false) {
                Ok(_) => false,
                Err(ReplicaError::Promoted { .. }) => true,
                Err(other) => panic!("{what}: {one}: {other}"),
            };
        }
        promoted
    }

    /// Where each is when it is opened alone, in this order. Fails the test if one is not what it says.
    fn stand(&self, sources: &[Source; 2], order: [usize; 2], what: &str) -> [usize; 2] {
        let power = on();
        self.begin(&power);
        let mut at = [0; 2];
        for one in order {
            let replica = self.open_one(one, &power, false);
            let replica = replica.unwrap_or_else(|e| panic!("{what}: {one} does not open: {e}"));
            let status = replica.status();
            assert_eq!(status.state, State::Exact, "{what}: {one}");
            at[one] = sources[one].index(&status.epoch.unwrap());
            assert!(self.worlds[one].holds(&sources[one].images[at[one]]), "{what}: {one} is not its epoch");
        }
        at
    }
}

fn prepare(replica: &mut Replica, bytes: &[u8]) -> crate::Result<()> {
    let mut units = units(bytes).into_iter();
    let mut receipt = replica.receive(units.next().expect("a header"), CommitMode::Journal)?;
    for unit in units {
        receipt.unit(unit)?;
    }
    receipt.prepare().map(drop)
}

/// Both are at `from` or both at `to`, and the next syncs succeed.
fn check(pair: &Pair, sources: &[Source; 2], (from, to): (usize, usize), turn: u64, what: &str) -> usize {
    let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
    let at = pair.stand(sources, order, what);
    assert!(at == [from; 2] || at == [to; 2], "{what}: torn: {at:?}");
    for (n, next) in [to, to + 1].into_iter().enumerate() {
        if soak() || turn % 3 == n as u64 {
            let again = pair.fork();
            again
                .sync(&on(), sources, next)
                .unwrap_or_else(|e| panic!("{what}: the next sync to {next}: {e}"));
            assert_eq!(again.stand(sources, order, what), [next; 2], "{what}");
        }
    }
    at[0]
}

fn cut_everywhere(name: &str, kinds: [Kind; 2], from: usize, to: usize) {
    let sources = sources();
    let world = Pair::at(kinds, &sources, from);
    // A common commit before, so that an older intent is there.
    world.sync(&on(), &sources, from).unwrap();
    let power = on();
    world.fork().sync(&power, &sources, to).unwrap();
    let steps = power.steps();
    println!("{name}: {steps} steps");
    let sample = Sample::new(name);
    let mut ends = [0u64; 2];
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps + 1 {
            let turn = step + number as u64;
            if step <= steps && !sample.takes(turn, if number > 1 { 7 } else { 2 }) {
                continue;
            }
            let what = format!("{name}: cut by {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
            let pair = world.fork();
            let power = Power::new(outage);
            power.cut_at(step);
            let done = pair.sync(&power, &sources, to);
            assert_eq!(done.is_ok(), step > steps, "{what}: {done:?}");
            power.crash(disks, folders, step * 7 + number as u64).unwrap();
            // The recovery of one of them is cut, too; then everything is judged.
            let again = pair.fork();
            let at = check(&pair, &sources, (from, to), turn, &what);
            assert!(step <= steps || at == to, "{what}: what was committed is gone");
            ends[usize::from(at == to)] += 1;
            let power = Power::new(outage);
            again.begin(&power);
            power.cut_at(1 + step % 29);
            let _ = again.open_one((turn % 2) as usize, &power, false);
            power.crash(disks, folders, step * 11 + number as u64).unwrap();
            check(
                &again,
                &sources,
                (from, to),
                turn / 2,
                &format!("{what}, and a recovery at step {}", 1 + step % 29),
            );
        }
    }
    // Neither end was the only one.
    assert!(ends.iter().all(|count| *count > 0), "{name}: {ends:?}");
}

#[test]
fn two_files_are_at_one_moment_whatever_crashes() {
    cut_everywhere("two files", [Kind::File, Kind::File], 0, 1);
}

#[test]
fn a_file_and_a_device_are_at_one_moment_whatever_crashes() {
    cut_everywhere("a file and a device", [Kind::File, Kind::Device], 1, 2);
}

/// A step fails once; whoever gets the error gives up, and after any crash the next finds both at one moment.
#[test]
fn errors_that_pass_tear_nothing() {
    let sources = sources();
    let (from, to) = (0, 1);
    let world = Pair::at([Kind::File, Kind::Device], &sources, from);
    world.sync(&on(), &sources, from).unwrap();
    let power = on();
    world.fork().sync(&power, &sources, to).unwrap();
    for (number, (outage, disks, folders)) in
        OUTAGES.into_iter().enumerate().filter(|(n, _)| [0, 1, 5].contains(n))
    {
        for step in 1..=power.steps() {
            for errno in [5, 28] {
                if !soak() && errno == 28 && step % 3 != 0 {
                    continue;
                }
                let what = format!("{outage:?} {disks:?}, error {errno} at step {step}");
                let (pair, power) = (world.fork(), Power::new(outage));
                power.fail_at(step, 1, errno);
                let done = pair.sync(&power, &sources, to).is_ok();
                power.crash(disks, folders, step * 7 + number as u64).unwrap();
                let at = check(&pair, &sources, (from, to), step + number as u64, &what);
                assert!(!done || at == to, "{what}: what was committed is gone");
            }
        }
    }
}

#[test]
fn what_was_not_committed_is_gone_on_from() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    let power = on();
    {
        let (_group, mut replicas) = pair.open(&power).unwrap();
        for (replica, source) in replicas.iter_mut().zip(&sources) {
            prepare(replica, &source.tracked(0, 1)).unwrap();
            // Whole, and nobody's by itself.
            assert_eq!(replica.status().epoch, Some(source.epochs[0]));
        }
    }
    assert_eq!(pair.stand(&sources, [0, 1], "prepared"), [0, 0]);
    let (mut group, mut replicas) = pair.open(&power).unwrap();
    for (replica, source) in replicas.iter_mut().zip(&sources) {
        let status = replica.status().clone();
        assert!(status.resumes.is_some() && status.recovered.is_none(), "{status:?}");
        // Nothing of the first is sent again.
        let lacks = source.lacks(&status, None, 2);
        assert!(lacks.len() < source.tracked(0, 2).len());
        prepare(replica, &lacks).unwrap();
    }
    let done = group.commit(cut(2), &mut replicas).unwrap();
    assert!(done.iter().all(Option::is_some));
    drop(replicas);
    assert_eq!(pair.stand(&sources, [0, 1], "committed"), [2, 2]);
}

#[test]
fn a_member_takes_nothing_by_itself_while_its_source_is_in_the_group() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    let power = on();
    pair.sync(&power, &sources, 1).unwrap();
    let delta = sources[0].tracked(1, 2);
    let mut replica = pair.open_one(0, &power, false).unwrap();
    assert_eq!(replica.status().group.as_deref(), Some("db"));
    let refused = merge(&mut replica, &delta, CommitMode::Journal);
    assert!(matches!(&refused, Err(ReplicaError::InGroup { group, .. }) if group == "db"), "{refused:?}");
    assert!(matches!(replica.batches().err(), Some(ReplicaError::InGroup { .. })));
    drop(replica);
    // With its group, it is not committed alone either.
    let mut replica = pair.open_one(0, &power, true).unwrap();
    assert!(matches!(merge(&mut replica, &delta, CommitMode::Journal), Err(ReplicaError::InGroup { .. })));
    drop(replica);
    assert_eq!(pair.stand(&sources, [0, 1], "refused"), [1, 1]);
    let folder = FaultyFolder::new(&power, &pair.worlds[0].state()).unwrap();
    let options = ReplicaOptions { term: 1, ..ReplicaOptions::default() };
    let mut replica = pair.worlds[0].open_in(&power, Box::new(folder), &options).unwrap();
    let delta = sources[0].lacks(replica.status(), None, 2);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    assert_eq!(replica.status().group, None);
    drop(replica);
    assert_eq!(pair.stand(&sources, [0, 1], "left"), [2, 1]);
    // The next common commit takes it in again.
    pair.sync(&power, &sources, 3).unwrap();
    assert_eq!(pair.stand(&sources, [0, 1], "together again"), [3, 3]);
}

/// What was prepared with the group, and never committed, is nobody's commit for one that leaves it, whatever crashes meanwhile.
#[test]
fn who_leaves_a_group_takes_no_commit_along() {
    let sources = sources();
    let start = Pair::at([Kind::File, Kind::Device], &sources, 0);
    start.sync(&on(), &sources, 1).unwrap();
    {
        let (_group, mut replicas) = start.open(&on()).unwrap();
        for (replica, source) in replicas.iter_mut().zip(&sources) {
            prepare(replica, &source.tracked(1, 2)).unwrap();
        }
    }
    for (one, (outage, disks, folders)) in
        [0, 1].into_iter().flat_map(|one| OUTAGES.map(|outage| (one, outage)))
    {
        // The folder of a device's replica is opened anew each time, so that a cut tells nothing there.
        if one == 1 && outage == Outage::PowerCut {
            continue;
        }
        for step in 1.. {
            let (pair, power) = (start.fork(), Power::new(outage));
            pair.begin(&power);
            power.cut_at(step);
            let left = pair.open_one(one, &power, false).and_then(|mut replica| replica.leave_group());
            power.crash(disks, folders, step * 7).unwrap();
            let what = format!("{one} leaves, {outage:?} {disks:?} {folders:?} at step {step}");
            assert_eq!(pair.stand(&sources, [one, 1 - one], &what), [1, 1], "{what}");
            let power = on();
            pair.begin(&power);
            let mut replica = pair.open_one(one, &power, false).unwrap();
            if left.is_ok() {
                // It goes on from the part that it has.
                let lacks = sources[one].lacks(replica.status(), content(&replica).as_deref(), 2);
                merge(&mut replica, &lacks, CommitMode::Journal).unwrap();
                assert!(pair.worlds[one].holds(&sources[one].images[2]), "{what}");
                break;
            }
        }
    }
}

#[test]
fn a_foreign_write_to_one_commits_none() {
    for victim in [0, 1] {
        let sources = sources();
        let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
        let power = on();
        let (mut group, mut replicas) = pair.open(&power).unwrap();
        for (replica, source) in replicas.iter_mut().zip(&sources) {
            prepare(replica, &source.tracked(0, 1)).unwrap();
        }
        pair.worlds[victim].tamper(5 * BLOCK, 0xee);
        let refused = group.commit(cut(1), &mut replicas);
        assert!(matches!(refused, Err(ReplicaError::Changed { .. })), "{refused:?}");
        drop((group, replicas));
        pair.begin(&power);
        assert!(matches!(pair.open_one(victim, &power, false), Err(ReplicaError::Changed { .. })));
        let other = pair.open_one(1 - victim, &power, false).unwrap();
        assert_eq!(other.status().epoch, Some(sources[1 - victim].epochs[0]));
    }
}

/// Without its intent nobody knows what is to be done, so nothing is.
#[test]
fn a_missing_folder_of_the_group_is_no_answer() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    let power = on();
    let (_group, mut replicas) = pair.open(&power).unwrap();
    for (replica, source) in replicas.iter_mut().zip(&sources) {
        prepare(replica, &source.tracked(0, 1)).unwrap();
    }
    drop(replicas);
    *pair.worlds[0].group.lock().unwrap() = None;
    let refused = pair.open_one(0, &power, false).err();
    assert!(
        matches!(&refused, Some(ReplicaError::Away(why)) if why.contains("--adopt --group")),
        "{refused:?}"
    );
    let folder = FaultyFolder::new(&power, &pair.worlds[0].state()).unwrap();
    let options = ReplicaOptions { adopt: true, term: 1, ..ReplicaOptions::default() };
    let mut replica = pair.worlds[0].open_in(&power, Box::new(folder), &options).unwrap();
    let delta = sources[0].lacks(replica.status(), content(&replica).as_deref(), 1);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    assert_eq!(replica.status().epoch, Some(sources[0].epochs[1]));
}

/// There is no room any more for what the group has committed: nothing is dropped, and all is well when there is.
#[test]
fn what_was_committed_waits_for_room() {
    let sources = sources();
    let world = Pair::at([Kind::File, Kind::File], &sources, 0);
    world.sync(&on(), &sources, 0).unwrap();
    let power = on();
    world.fork().sync(&power, &sources, 1).unwrap();
    let mut waited = 0;
    for step in 1..=power.steps() {
        let pair = world.fork();
        let power = Power::new(Outage::Kill);
        power.cut_at(step);
        let _ = pair.sync(&power, &sources, 1);
        let power = on();
        pair.begin(&power);
        pair.worlds[1].room.store(0, SeqCst);
        let full = pair.open_one(1, &power, false);
        pair.worlds[1].room.store(u64::MAX, SeqCst);
        waited += u64::from(matches!(full, Err(ReplicaError::Full { .. })));
        drop(full);
        let at = pair.stand(&sources, [1, 0], "with room again");
        assert!(at == [0, 0] || at == [1, 1], "step {step}: {at:?}");
    }
    assert!(waited > 0);
}

/// Both have prepared this epoch, and are committed; neither has been merged.
fn committed_and_not_merged(pair: &Pair, sources: &[Source; 2], to: usize) {
    let power = on();
    let folder = pair.begin(&power);
    let mut members = std::collections::BTreeMap::new();
    for (at, source) in sources.iter().enumerate() {
        let mut replica = pair.open_one(at, &power, true).unwrap();
        let lacks = source.lacks(replica.status(), None, to);
        prepare(&mut replica, &lacks).unwrap();
        let stream = replica.prepared().unwrap().toward.stream;
        let member = Member { stream: Some(stream), ..Member::at(source.id, source.epochs[to]) };
        members.insert(Path::new(&format!("/of/{at}")).to_path_buf(), member);
    }
    let intent = Intent { time: 0, ..Intent::new("db", cut(to as u64), members) };
    intent.store(&SharedFolder(folder)).unwrap();
}

#[test]
fn what_is_owed_to_an_absent_replica_outlives_the_commits_of_the_others() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    pair.sync(&on(), &sources, 0).unwrap();
    committed_and_not_merged(&pair, &sources, 1);
    // The second is away while the first goes on, twice.
    for to in [2, 3] {
        let power = on();
        let folder = pair.begin(&power);
        let mut group = Group::begin(Box::new(SharedFolder(folder)), "db").unwrap();
        let mut replicas = [pair.open_one(0, &power, true).unwrap()];
        assert_eq!(replicas[0].status().epoch, Some(sources[0].epochs[to - 1]));
        let lacks = sources[0].lacks(replicas[0].status(), None, to);
        prepare(&mut replicas[0], &lacks).unwrap();
        group.commit(cut(to as u64), &mut replicas).unwrap();
        assert_eq!(group.intent().unwrap().owed.len(), 1, "of the second alone");
    }
    assert_eq!(pair.stand(&sources, [1, 0], "the second is back"), [3, 1]);
    pair.sync(&on(), &sources, 4).unwrap();
    assert_eq!(pair.stand(&sources, [0, 1], "together again"), [4, 4]);
}

#[test]
fn an_intent_that_could_not_be_read_again_is_not_written() {
    let folder = testing::in_memory();
    let folder = device::Dir::open(folder.path()).unwrap();
    let member = |number: u128| {
        let path = format!("/srv/{}/{number}.raw", "a".repeat(4000));
        (path.into(), Member::at(Uuid::from_u128(number), cut(1)))
    };
    let intent = |members: u128| Intent::new("db", cut(1), (0..members).map(member).collect());
    // The moment of its making is in it.
    let stored = intent(200);
    stored.store(&folder).unwrap();
    let refused = intent(300).store(&folder);
    assert!(
        matches!(&refused, Err(ReplicaError::Refused(why)) if why.contains("shorter path")),
        "{refused:?}"
    );
    assert_eq!(Intent::read(&folder).unwrap(), Some(stored));
}

/// The first delta of a member makes it one: that must not take the room in which its lineage is to say that it was merged.
#[test]
fn who_joins_a_group_has_room_for_the_commit() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    let power = on();
    let (_group, mut replicas) = pair.open(&power).unwrap();
    for (replica, source) in replicas.iter_mut().zip(&sources) {
        assert_eq!(replica.status().group, None);
        prepare(replica, &source.tracked(0, 1)).unwrap();
        let reserved = replica.state().open(&device::reserved(crate::state::lineage::NAME), false);
        assert!(reserved.is_ok(), "room for the lineage is not reserved any more");
    }
}

/// The intent names what the journal of a member does not hold any more: it is not taken for one that has nothing to do.
#[test]
fn a_member_that_lost_its_commit_is_found() {
    let sources = sources();
    let world = Pair::at([Kind::File, Kind::File], &sources, 0);
    world.sync(&on(), &sources, 0).unwrap();
    let power = on();
    world.fork().sync(&power, &sources, 1).unwrap();
    let mut found = 0;
    for step in 1..=power.steps() {
        let pair = world.fork();
        let power = Power::new(Outage::Kill);
        power.cut_at(step);
        let _ = pair.sync(&power, &sources, 1);
        // Committed, if both are there; the second has not merged it yet, if it has its journal.
        let waits = pair.worlds[1].names().iter().any(|name| name == "journal");
        if !waits || pair.fork().stand(&sources, [0, 1], "committed") != [1, 1] {
            continue;
        }
        found += 1;
        std::fs::remove_file(pair.worlds[1].state().join("journal")).unwrap();
        let power = on();
        pair.begin(&power);
        let refused = pair.open_one(1, &power, false).err();
        assert!(matches!(refused, Some(ReplicaError::Damaged { .. })), "step {step}: {refused:?}");
        // Its user may have all of it compared.
        let folder = FaultyFolder::new(&power, &pair.worlds[1].state()).unwrap();
        let options = ReplicaOptions { adopt: true, term: 1, ..ReplicaOptions::default() };
        let mut replica = pair.worlds[1].open_in(&power, Box::new(folder), &options).unwrap();
        let delta = sources[1].lacks(replica.status(), content(&replica).as_deref(), 1);
        merge(&mut replica, &delta, CommitMode::Journal).unwrap();
        assert_eq!(replica.status().epoch, Some(sources[1].epochs[1]));
    }
    assert!(found > 0);
}

/// What never arrived whole was committed by nobody: no folder of a group has to say so.
#[test]
fn a_part_of_a_delta_needs_no_group() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    let power = on();
    let (group, mut replicas) = pair.open(&power).unwrap();
    receive_part(&mut replicas[0], &sources[0].tracked(0, 1), CommitMode::Journal, 2).unwrap();
    assert!(replicas[0].status().resumes.is_some());
    drop((group, replicas));
    *pair.worlds[0].group.lock().unwrap() = None;
    let replica = pair.open_one(0, &power, false).unwrap();
    assert_eq!(replica.status().epoch, Some(sources[0].epochs[0]));
    assert!(replica.status().resumes.is_some());
}

/// Does something to a pair that is cut off at any step, in any way, and has the result judged.
fn cut_off_anywhere(
    name: &str,
    world: &Pair,
    act: impl Fn(&Pair, &Power) -> crate::Result<()>,
    judge: impl Fn(&Pair, bool, [usize; 2], &str) -> bool,
) {
    let power = on();
    act(&world.fork(), &power).unwrap();
    let steps = power.steps();
    println!("{name}: {steps} steps");
    let sample = Sample::new(name);
    let mut ends = [0u64; 2];
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps + 1 {
            let turn = step + number as u64;
            if step <= steps && !sample.takes(turn, 7) {
                continue;
            }
            let what = format!("{name}: cut by {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
            let (pair, power) = (world.fork(), Power::new(outage));
            power.cut_at(step);
            let done = act(&pair, &power);
            // What only tidies up after a commit does not fail it.
            assert!(done.is_ok() || step <= steps, "{what}: {done:?}");
            power.crash(disks, folders, step * 7 + number as u64).unwrap();
            let order = if turn % 2 == 0 { [0, 1] } else { [1, 0] };
            ends[usize::from(judge(&pair, done.is_ok(), order, &what))] += 1;
        }
    }
    assert!(ends.iter().all(|count| *count > 0), "{name}: {ends:?}");
}

#[test]
fn both_are_promoted_or_none_whatever_crashes() {
    let sources = sources();
    let world = Pair::at([Kind::File, Kind::Device], &sources, 0);
    world.sync(&on(), &sources, 1).unwrap();
    cut_off_anywhere("a promotion", &world, Pair::promote, |pair, done, order, what| {
        let promoted = pair.promoted(order, what);
        assert!(promoted == [done; 2] || promoted == [true; 2], "{what}: torn: {promoted:?}");
        if promoted[0] {
            return true;
        }
        assert_eq!(pair.stand(&sources, order, what), [1, 1], "{what}");
        pair.promote(&on()).unwrap_or_else(|e| panic!("{what}: the next promotion: {e}"));
        assert_eq!(pair.promoted(order, what), [true; 2], "{what}");
        false
    });
}

/// What was promoted, and is a replica again since, is not promoted by what its group's folder still says.
#[test]
fn a_promotion_that_has_ended_is_not_completed_again() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    pair.sync(&on(), &sources, 1).unwrap();
    let power = on();
    pair.promote(&power).unwrap();
    for (at, source) in sources.iter().enumerate() {
        let world = &pair.worlds[at];
        let folder = FaultyFolder::new(&power, &world.state()).unwrap();
        let options = ReplicaOptions { adopt: true, ..ReplicaOptions::default() };
        let mut replica = world.open_in(&power, Box::new(folder), &options).unwrap();
        let demotion = crate::Demotion {
            source: source.id,
            term: 2,
            lives: source.lives(1),
            gave_up: None,
            block_size: BLOCK as u32,
            size: source.images[1].len() as u64,
            since: Some((source.epochs[1], crate::UnsureSet::new())),
            others_wrote: false,
            saved: None,
        };
        replica.demote(&demotion, &|_| true).unwrap();
    }
    // As members of the same group, at the epoch at which they were promoted; and then, as if cut off, of a source of the term before.
    for term in [0, 1] {
        pair.begin(&power);
        let open = |at: usize| {
            let folder = FaultyFolder::new(&power, &pair.worlds[at].state()).unwrap();
            let options = ReplicaOptions { group: Some(membership()), term, ..ReplicaOptions::default() };
            pair.worlds[at].open_in(&power, Box::new(folder), &options).unwrap()
        };
        let mut replicas = [open(0), open(1)];
        for (replica, source) in replicas.iter_mut().zip(&sources) {
            prepare(replica, &source.lacks(&replica.status().clone(), None, 2)).unwrap();
            assert_eq!(replica.status().group.as_deref(), Some("db"));
        }
        drop(replicas);
        assert_eq!(pair.promoted([0, 1], "demoted"), [false; 2], "of term {term}");
    }
}

/// A common commit of the same cut ends what was decided since: it is not found by those who open the replicas next.
#[test]
fn the_commit_of_a_cut_that_stands_ends_a_promotion() {
    let sources = sources();
    let pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    pair.sync(&on(), &sources, 1).unwrap();
    let power = on();
    let folder = SharedFolder(pair.begin(&power));
    let mut intent = Intent::read(&folder).unwrap().expect("a commit");
    let mark = crate::Promoted { since: 1, id: Uuid::new_v4(), term: 2, released: false };
    intent.members.values_mut().for_each(|member| member.promoted = Some(mark));
    let (_, mut replicas) = pair.open(&power).unwrap();
    intent.store(&folder).unwrap();
    let mut group = Group::begin(Box::new(folder), "db").unwrap();
    group.commit(cut(1), &mut replicas).unwrap();
    assert!(!group.intent().unwrap().promotes());
    drop(replicas);
    assert_eq!(pair.promoted([0, 1], "committed since"), [false; 2]);
}

fn with_a_past(kinds: [Kind; 2], sources: &[Source; 2]) -> Pair {
    let mut pair = Pair::at(kinds, sources, 0);
    pair.keep = Some(Keep { last: 20, ..Keep::default() });
    (0..4).for_each(|to| pair.sync(&on(), sources, to).unwrap());
    assert_eq!(pair.past().iter().map(|intent| intent.cut.number).collect::<Vec<_>>(), [0, 1, 2]);
    pair
}

#[test]
fn both_go_back_or_none_whatever_crashes() {
    let sources = sources();
    let world = with_a_past([Kind::File, Kind::File], &sources);
    let act = |pair: &Pair, power: &Power| pair.rewind(power, 1);
    cut_off_anywhere("a rewind", &world, act, |pair, done, order, what| {
        let at = pair.stand(&sources, order, what);
        assert!(at == [1, 1] || (!done && at == [3, 3]), "{what}: torn: {at:?}");
        pair.sync(&on(), &sources, 4).unwrap_or_else(|e| panic!("{what}: the next sync: {e}"));
        assert_eq!(pair.stand(&sources, order, what), [4, 4], "{what}");
        at == [1, 1]
    });
}

#[test]
fn a_group_goes_back_and_forth() {
    let sources = sources();
    let pair = with_a_past([Kind::File, Kind::Device], &sources);
    for to in [0, 2, 1, 3, 0, 3] {
        pair.rewind(&on(), to).unwrap();
        assert_eq!(pair.stand(&sources, [0, 1], "rewound"), [to as usize; 2]);
    }
    pair.sync(&on(), &sources, 4).unwrap();
    assert_eq!(pair.stand(&sources, [0, 1], "synced"), [4, 4]);
    // A member alone does not go.
    let power = on();
    pair.begin(&power);
    let mut replica = pair.open_one(0, &power, false).unwrap();
    let state = replica.history().unwrap().moments[0].state;
    assert!(matches!(replica.rewind(state), Err(ReplicaError::InGroup { .. })));
}

/// One replica changes at every commit, the other at the first and the last: what is thinned out is the same for both.
#[test]
fn the_moments_of_the_members_are_those_of_the_group() {
    let sources = sources();
    let mut pair = Pair::at([Kind::File, Kind::File], &sources, 0);
    pair.keep = Some(Keep { last: 2, ..Keep::default() });
    for to in 0..5 {
        let power = on();
        let (mut group, mut replicas) = pair.open(&power).unwrap();
        for (at, (replica, source)) in replicas.iter_mut().zip(&sources).enumerate() {
            let there = if at == 0 || to < 2 { to } else { 1 };
            if replica.status().epoch != Some(source.epochs[there]) {
                let lacks = source.lacks(&replica.status().clone(), None, there);
                prepare(replica, &lacks).unwrap();
            }
        }
        group.commit(cut(to as u64), &mut replicas).unwrap();
    }
    let kept = |at: usize| {
        let power = on();
        pair.begin(&power);
        let replica = pair.open_one(at, &power, false).unwrap();
        let moments = replica.history().unwrap().moments;
        moments.iter().map(|moment| sources[at].index(&moment.epoch)).collect::<Vec<_>>()
    };
    // The last two common commits before the present one: of the other, that is what it still is.
    assert_eq!(kept(0), [3, 2]);
    pair.rewind(&on(), 2).unwrap();
    assert_eq!(pair.stand(&sources, [0, 1], "rewound"), [2, 1]);
}
