//! Whatever crashes when, a mirrored replica is the source as it was at the end of one batch: the last that was confirmed, or the
//! one after.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use delta::{Header, Method, UnitKind, Units, decode_frame};
use lineage::{Lives, Point};
use testing::faulty::{FaultyFolder, Keep, Outage, Power};
use testing::{Sample, soak};
use uuid::Uuid;

use super::crash::{OUTAGES, on, replica_at};
use super::world::*;
use crate::{BatchCommitter, BatchLog, CommitMode, Replica, ReplicaError, ReplicaOptions, State};

/// The images that batches lead to; that of the fourth is an epoch.
pub(super) const LAST: usize = 6;
pub(super) const EPOCH: usize = 4;

pub(super) fn source() -> Source {
    Source::new(5, &[40; LAST + 2])
}

/// What there is besides the destination's content: which batches were sent, and confirmed.
#[derive(Default)]
pub(super) struct Sent {
    /// Streams, by the image that they lead to.
    pub streams: Vec<(Uuid, usize)>,
    pub confirmed: usize,
}

pub(super) fn header(source: &Source, to: usize, nonce: Uuid) -> Header {
    let epoch = if to < EPOCH { 0 } else { EPOCH };
    let batches = if to == EPOCH { 0 } else { to - epoch };
    let at = Point::number(source.epochs[epoch].number, batches as u64);
    Header {
        lives: Lives::first(source.id).reaching(at),
        chain: vec![source.epochs[epoch]],
        binds: Some(nonce),
        batch: to != EPOCH,
        ..source.header(to - 1, to, Method::Tracked)
    }
}

pub(super) fn send(
    log: &mut BatchLog,
    batches: &mut BatchCommitter<'_>,
    bytes: &[u8],
    stream: Uuid,
) -> crate::Result<()> {
    let mut units = Units::new(bytes);
    let mut sequence = 0;
    while let Some(unit) = units.next().unwrap() {
        log.unit(&unit)?;
        match unit.kind {
            UnitKind::Header => batches.begin(unit)?,
            UnitKind::Frame => {
                batches.frame(decode_frame(stream, sequence, unit, None).unwrap())?;
                sequence += 1;
            }
            UnitKind::Trailer => {
                let end = log.end()?;
                batches.commit(unit, end)?;
            }
        }
    }
    Ok(())
}

/// Sends the batch that leads to an image, for a replica of this nonce. Returns the next one.
pub(super) fn send_one(
    source: &Source,
    log: &mut BatchLog,
    batches: &mut BatchCommitter<'_>,
    to: usize,
    nonce: Uuid,
) -> crate::Result<Uuid> {
    let header = header(source, to, nonce);
    let bytes = source.encode(&header, to, &source.changed(to - 1, to));
    send(log, batches, &bytes, header.stream).map(|()| header.stream)
}

fn mirror(source: &Source, world: &World, power: &Power, sent: &RefCell<Sent>) -> crate::Result<()> {
    let mut replica = world.open(power)?;
    mirror_to(source, &mut replica, sent)
}

/// As the receiving end of a mirror does it: what ends the batches, they are finished.
pub(super) fn mirror_to(source: &Source, replica: &mut Replica, sent: &RefCell<Sent>) -> crate::Result<()> {
    let mut nonce = replica.status().nonce;
    let (mut log, mut batches) = replica.batches()?;
    let mut all = || {
        for to in 1..=LAST {
            let header = header(source, to, nonce);
            nonce = header.stream;
            sent.borrow_mut().streams.push((nonce, to));
            let bytes = source.encode(&header, to, &source.changed(to - 1, to));
            send(&mut log, &mut batches, &bytes, nonce)?;
            sent.borrow_mut().confirmed = to;
            batches.apply()?;
            if to == 3 || log.is_long() {
                log = batches.settle()?;
            }
        }
        Ok(())
    };
    let sent_all = all();
    let finished = batches.finish();
    sent_all.and(finished)
}

/// What is left is the end of a batch, and says so.
fn check(source: &Source, world: &World, sent: &Sent, what: &str) {
    let replica = world.open(&on()).unwrap_or_else(|e| panic!("{what}: does not open: {e}"));
    let status = replica.status().clone();
    drop(replica);
    let at = sent.streams.iter().find(|(stream, _)| *stream == status.nonce).map_or(0, |(_, to)| *to);
    assert!(world.holds(&source.images[at]), "{what}: is not batch {at} as it says");
    assert!(at >= sent.confirmed, "{what}: is batch {at}, and {} was confirmed", sent.confirmed);
    assert!(at <= sent.confirmed + 1, "{what}: is batch {at}, and only {} was confirmed", sent.confirmed);
    let epoch = if at < EPOCH { 0 } else { EPOCH };
    assert_eq!(status.epoch, Some(source.epochs[epoch]), "{what}: batch {at}");
    assert_eq!(status.ahead, at != 0 && at != EPOCH, "{what}: batch {at}");
    assert_eq!((status.state, status.under_way()), (State::Exact, false), "{what}");
    // A sync goes on from the epoch.
    let next = world.fork();
    let mut replica = next.open_for_sync(&on()).unwrap();
    merge(&mut replica, &source.tracked(epoch, LAST + 1), CommitMode::Journal)
        .unwrap_or_else(|e| panic!("{what}: the next sync: {e}"));
    drop(replica);
    assert!(next.holds(&source.images[LAST + 1]), "{what}: the next sync");
}

fn cut_everywhere(kind: Kind) {
    let source = source();
    let start = replica_at(kind, &source, 0);
    let (whole, power, sent) = (start.fork(), on(), RefCell::default());
    mirror(&source, &whole, &power, &sent).unwrap();
    check(&source, &whole, &sent.borrow(), "without a cut");
    let steps = power.steps();
    println!("{steps} steps");
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps {
            if !soak() && number > 1 && (step + number as u64) % 13 != 0 {
                continue;
            }
            let what = format!("cut by {outage:?} {disks:?} {folders:?} at step {step} of {steps}");
            let (world, power, sent) = (start.fork(), Power::new(outage), RefCell::default());
            power.cut_at(step);
            assert!(mirror(&source, &world, &power, &sent).is_err(), "{what}");
            power.crash(disks, folders, step * 7 + number as u64).unwrap();
            check(&source, &world.fork(), &sent.borrow(), &what);
            // The recovery is cut too.
            if !soak() && step % 3 != 0 {
                continue;
            }
            let power = Power::new(outage);
            power.cut_at(1 + step % 17);
            let _ = world.open(&power);
            power.crash(disks, folders, step * 11 + number as u64).unwrap();
            check(&source, &world, &sent.borrow(), &format!("{what}, and its recovery"));
        }
    }
}

#[test]
fn batches_to_a_file_that_fails_for_a_moment() {
    stumble_everywhere(Kind::File);
}

#[test]
fn batches_to_a_device_that_fails_for_a_moment() {
    stumble_everywhere(Kind::Device);
}

/// The receiving process is killed, and the machine loses power while the next one merges the batches: what lay in the journal
/// and was not synced is lost only then.
#[test]
fn batches_killed_then_cut() {
    let source = source();
    let start = replica_at(Kind::File, &source, 0);
    let many = 1 << 20;
    let run = |world: &World, machine: &Machine, steps: &Arc<AtomicU64>, sent: &RefCell<Sent>| {
        mirror_to(&source, &mut world.open_mortal(machine, steps)?, sent)
    };
    let (world, left) = (start.fork(), Arc::new(AtomicU64::new(many)));
    run(&world, &world.machine(&on()), &left, &RefCell::default()).unwrap();
    let steps = many - left.load(SeqCst);
    let mut turn = 0;
    let sample = Sample::new("batches killed, then cut");
    for killed in (0..steps).filter(|step| sample.takes(*step, 6)) {
        for cut in 1.. {
            turn += 1;
            let (world, sent) = (start.fork(), RefCell::default());
            let power = Power::new(Outage::PowerCut);
            let machine = world.machine(&power);
            run(&world, &machine, &Arc::new(AtomicU64::new(killed)), &sent).unwrap_err();
            power.cut_at(power.steps() + cut);
            let recovered = world.open_mortal(&machine, &Arc::new(AtomicU64::new(many))).is_ok();
            let keep = if turn % 2 == 0 { Keep::LoseUnsynced } else { Keep::Random };
            power.crash(keep, keep, turn).unwrap();
            let what = format!("killed at step {killed}, cut by {keep:?} at step {cut} of the recovery");
            check(&source, &world, &sent.borrow(), &what);
            if recovered {
                break;
            }
        }
    }
    println!("{steps} steps, {turn} outages");
}

#[test]
fn batches_to_a_file() {
    cut_everywhere(Kind::File);
}

#[test]
fn batches_to_a_device() {
    cut_everywhere(Kind::Device);
}

/// At every step something fails for a moment, and the mirror's end is closed all the same; then the machine may fail too.
/// Whatever was confirmed is there, or in the journal.
fn stumble_everywhere(kind: Kind) {
    const EIO: i32 = 5;
    const ENOSPC: i32 = 28;
    let source = source();
    let start = replica_at(kind, &source, 0);
    let power = on();
    mirror(&source, &start.fork(), &power, &RefCell::default()).unwrap();
    let steps = power.steps();
    let mut stumbled = 0;
    for (number, (outage, disks, folders)) in OUTAGES.into_iter().enumerate() {
        for step in 1..=steps {
            if !soak() && number > 1 && (step + number as u64) % 13 != 0 {
                continue;
            }
            for (count, errno) in [(1, EIO), (1, ENOSPC), (3, EIO)] {
                if !soak() && (number, count, errno) != (1, 1, EIO) && step % 3 != 0 {
                    continue;
                }
                let what =
                    format!("{outage:?} {disks:?} {folders:?}, error {errno} at step {step}, {count} times");
                let (world, power, sent) = (start.fork(), Power::new(outage), RefCell::default());
                power.fail_at(step, count, errno);
                let Ok(mut replica) = world.open(&power) else { continue };
                let result = mirror_to(&source, &mut replica, &sent);
                stumbled += usize::from(result.is_err());
                // The same process may try something else.
                let epoch = if sent.borrow().confirmed < EPOCH { 0 } else { EPOCH };
                let commit = [CommitMode::InPlace, CommitMode::Journal][step as usize % 2];
                let next = source.tracked(epoch, LAST + 1);
                let done = step % 3 == 0 && merge(&mut replica, &next, commit).is_ok();
                drop(replica);
                power.crash(disks, folders, step * 7 + number as u64).unwrap();
                if done {
                    let epoch = world.open(&on()).unwrap().status().epoch;
                    assert_eq!(epoch, Some(source.epochs[LAST + 1]), "{what}, then a sync");
                    assert!(world.holds(&source.images[LAST + 1]), "{what}, then a sync");
                } else {
                    check(&source, &world, &sent.borrow(), &what);
                }
            }
        }
    }
    assert!(stumbled as u64 > steps / 2);
}

/// The journal's file system is full at any point, and stays so: what was confirmed is merged all the same, by the same process
/// or the next, and the journal gives back the room it took. A batch that finds no room is refused with that reason.
#[test]
fn a_journal_without_room_jams_nothing() {
    let source = source();
    for kind in [Kind::File, Kind::Device] {
        let start = replica_at(kind, &source, 0);
        let (mut all, mut some) = (0, 0);
        for room in (0..400_000).step_by(if soak() { 500 } else { 9_000 }) {
            let (world, power, sent) = (start.fork(), on(), RefCell::default());
            let what = format!("{kind:?}, room for {room} bytes");
            let open = |room: u64, power: &Power| {
                let folder = FaultyFolder::new(power, &world.state()).unwrap();
                folder.full_after(room);
                world.open_in(power, Box::new(folder), &ReplicaOptions::default())
            };
            // Killed there, too, with all of it in the journal.
            let killed = room % 2_000 != 0;
            power.cut_at(if killed { 60 + room / 4_000 } else { u64::MAX });
            if let Ok(mut replica) = open(room, &power) {
                match mirror_to(&source, &mut replica, &sent) {
                    Ok(()) => all += 1,
                    Err(ReplicaError::Full { .. }) => some += 1,
                    Err(e) => assert!(killed, "{what}: {e}"),
                }
            }
            // Not a byte is left.
            drop(open(0, &on()).unwrap_or_else(|e| panic!("{what}: {e}")));
            let left = world.names();
            assert!(!left.iter().any(|name| name.starts_with("journal")), "{what}: {left:?}");
            check(&source, &world, &sent.borrow(), &what);
        }
        assert!(all > 3 && some > 3, "{all} {some}");
    }
}

/// What was received of the first batch in a journal does not count as a part of an epoch, from which another branch could go on.
#[test]
fn a_part_of_a_batch_is_dropped() {
    let source = source();
    let world = replica_at(Kind::File, &source, 0);
    let mut replica = world.open(&on()).unwrap();
    let before = replica.status().clone();
    let header = header(&source, 1, before.nonce);
    let bytes = source.encode(&header, 1, &source.changed(0, 1));
    let (mut log, mut batches) = replica.batches().unwrap();
    let mut units = Units::new(&bytes[..]);
    let begins = units.next().unwrap().unwrap();
    log.unit(&begins).unwrap();
    batches.begin(begins).unwrap();
    let frame = units.next().unwrap().unwrap();
    log.unit(&frame).unwrap();
    batches.frame(decode_frame(header.stream, 0, frame, None).unwrap()).unwrap();
    log.end().unwrap();
    // As if it were killed.
    drop((log, batches));
    drop(replica);
    let replica = world.open(&on()).unwrap();
    let status = replica.status();
    assert_eq!((&status.positions, status.resumes, status.nonce), (&before.positions, None, before.nonce));
    assert!(world.holds(&source.images[0]));
}

/// One sync of the journal commits a batch, however many there are.
#[test]
fn a_batch_costs_one_sync() {
    let source = source();
    let world = replica_at(Kind::File, &source, 0);
    let power = on();
    let mut replica = world.open(&power).unwrap();
    let mut nonce = replica.status().nonce;
    let (mut log, mut batches) = replica.batches().unwrap();
    for to in 1..=3 {
        let header = header(&source, to, nonce);
        nonce = header.stream;
        let bytes = source.encode(&header, to, &source.changed(to - 1, to));
        let before = power.syncs();
        send(&mut log, &mut batches, &bytes, nonce).unwrap();
        batches.apply().unwrap();
        // The first one gives the journal its name, durably: a sync of the folder.
        assert_eq!(power.syncs() - before, if to == 1 { 2 } else { 1 }, "batch {to}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let source = source();
    let world = replica_at(Kind::File, &source, 0);
    let mut replica = world.open(&on()).unwrap();
    let nonce = replica.status().nonce;
    let first = header(&source, 1, nonce);
    let bytes = source.encode(&first, 1, &source.changed(0, 1));
    {
        let (mut log, mut batches) = replica.batches().unwrap();
        send(&mut log, &mut batches, &bytes, first.stream).unwrap();
        // The same again, and one that leaves a batch out.
        for (header, to) in [(first.clone(), 1), (header(&source, 3, Uuid::new_v4()), 3)] {
            let bytes = source.encode(&header, to, &source.changed(to - 1, to));
            let error = send(&mut log, &mut batches, &bytes, header.stream).unwrap_err();
            assert!(matches!(error, ReplicaError::WrongEpoch { .. }), "{error}");
            // What was refused lies in the journal: nothing that comes behind it would be found there.
            let error = send(&mut log, &mut batches, &bytes, header.stream).unwrap_err();
            assert!(error.to_string().contains("an earlier part of it failed"), "{error}");
            log = batches.settle().unwrap();
        }
        batches.finish().unwrap();
    }
    assert!(world.holds(&source.images[1]));
    // A delta that ends at the epoch would take a part of the batch back.
    let error = merge(&mut replica, &source.tracked(0, 0), CommitMode::Journal).unwrap_err();
    assert!(error.to_string().contains("ahead"), "{error}");
    drop(replica);
    assert!(world.holds(&source.images[1]));
    // What a batch lacks is not made up for.
    let mut replica = world.open(&on()).unwrap();
    let second = header(&source, 2, first.stream);
    let bytes = source.encode(&second, 2, &source.changed(1, 2));
    let mut damaged = bytes.clone();
    let at = damaged.len() - 20;
    damaged[at] ^= 1;
    let (mut log, mut batches) = replica.batches().unwrap();
    let mut units = Units::new(&damaged[..]);
    let mut sequence = 0;
    let failed = loop {
        let unit = match units.next() {
            Ok(Some(unit)) => unit,
            _ => break true,
        };
        log.unit(&unit).unwrap();
        let taken = match unit.kind {
            UnitKind::Header => batches.begin(unit),
            UnitKind::Frame => {
                sequence += 1;
                batches.frame(decode_frame(second.stream, sequence - 1, unit, None).unwrap())
            }
            UnitKind::Trailer => log.end().and_then(|end| batches.commit(unit, end)),
        };
        if taken.is_err() {
            break true;
        }
        if sequence > 1000 {
            break false;
        }
    };
    assert!(failed);
    batches.finish().unwrap();
    drop(replica);
    assert!(world.holds(&source.images[1]));
}

/// More than is held in memory is read back from the journal.
#[test]
fn a_large_batch_goes_by_the_journal() {
    let blocks = 12_000;
    let source = Source::new(9, &[blocks; 3]);
    let world = replica_at(Kind::File, &source, 0);
    let mut replica = world.open(&on()).unwrap();
    let all = (0..blocks).collect();
    let nonce = replica.status().nonce;
    let first = Header {
        batch: true,
        chain: vec![source.epochs[0]],
        binds: Some(nonce),
        ..source.header(0, 1, Method::Tracked)
    };
    let (mut log, mut batches) = replica.batches().unwrap();
    send(&mut log, &mut batches, &source.encode_in(&first, 1, &all, 200), first.stream).unwrap();
    batches.apply().unwrap();
    batches.finish().unwrap();
    drop(replica);
    assert!(world.holds(&source.images[1]));
}
