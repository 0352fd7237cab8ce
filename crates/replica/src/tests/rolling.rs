//! Deltas that copy within the destination, by every way to commit them.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use delta::{Encoder, Frame, Header, Method, Record, Writer};
use device::{Buf, Disk, Done, Queue, RamDisk, Request, RequestKind as Op};
use testing::faulty::Power;

use super::crash::{Scenario, cut_everywhere, on, replica_at};
use super::world::*;
use crate::commit::copies::Copies;
use crate::{CommitMode, ReplicaError, State};

fn source() -> Source {
    Source::moving(23, &[40, 48, 44, 44, 60])
}

fn by_rolling(
    world: &World,
    power: &Power,
    source: &Source,
    to: usize,
    commit: CommitMode,
) -> crate::Result<()> {
    let mut replica = world.open(power)?;
    replica.content()?;
    let content = content(&replica).unwrap_or_default();
    let delta = source.rolling(replica.status(), &content, to, replica.is_in_place(commit));
    merge(&mut replica, &delta, commit).map(drop)
}

#[test]
fn every_way_yields_the_source() {
    for seed in 0..30 {
        let source = Source::moving(seed, &[40, 48, 44, 20, 44, 1, 60]);
        for kind in [Kind::File, Kind::Device] {
            for commit in [CommitMode::Journal, CommitMode::InPlace, CommitMode::Reflink] {
                if (kind, commit) == (Kind::Device, CommitMode::Reflink) {
                    continue;
                }
                let world = replica_at(kind, &source, 0);
                for to in 1..source.images.len() {
                    by_rolling(&world, &on(), &source, to, commit).unwrap();
                    assert!(world.holds(&source.images[to]), "{kind:?} {commit:?} {seed}, epoch {to}");
                    let replica = world.open(&on()).unwrap();
                    let status = replica.status();
                    assert_eq!((status.state, status.epoch), (State::Exact, Some(source.epochs[to])));
                }
                assert!(world.names().iter().all(|n| n == "lineage" || n == "vm.raw"), "{:?}", world.names());
            }
        }
    }
}

fn scenario(name: &str, kind: Kind, from: usize, to: usize, commit: CommitMode) {
    let source = source();
    let run = |world: &World, power: &Power| by_rolling(world, power, &source, to, commit);
    let in_place = commit == CommitMode::InPlace;
    let world = replica_at(kind, &source, from);
    let from = Some(from);
    cut_everywhere(&Scenario { name, source: &source, world, from, to, in_place, commit, run: &run });
}

#[test]
fn journal_cut_everywhere() {
    scenario("rolling, journal, grows", Kind::File, 0, 1, CommitMode::Journal);
    scenario("rolling, journal, shrinks", Kind::Device, 1, 2, CommitMode::Journal);
}

#[test]
fn in_place_cut_everywhere() {
    scenario("rolling, in place, grows", Kind::File, 0, 1, CommitMode::InPlace);
    scenario("rolling, in place, shrinks", Kind::File, 1, 2, CommitMode::InPlace);
    scenario("rolling, in place, device", Kind::Device, 0, 1, CommitMode::InPlace);
}

#[test]
fn reflink_cut_everywhere() {
    scenario("rolling, reflink, shrinks", Kind::File, 1, 2, CommitMode::Reflink);
}

/// After a cut in the middle nobody knows what stands where; rolling finds that too.
#[test]
fn what_was_cut_in_place_is_mended_by_rolling() {
    let source = source();
    for kind in [Kind::File, Kind::Device] {
        for frames in 1..12 {
            for commit in [CommitMode::Journal, CommitMode::InPlace] {
                let world = replica_at(kind, &source, 0);
                let mut replica = world.open(&on()).unwrap();
                let delta = source.rolling(replica.status(), &content(&replica).unwrap(), 1, true);
                receive_part(&mut replica, &delta, CommitMode::InPlace, frames).unwrap();
                let status = replica.status().clone();
                assert_eq!((status.state, status.under_way()), (State::Incomplete, true));
                assert!(status.positions.iter().all(|p| p.epoch.is_none()), "{status:?}");
                // Nothing but a comparison will do.
                let tracked = source.tracked(0, 1);
                assert!(matches!(
                    merge(&mut replica, &tracked, commit),
                    Err(ReplicaError::WrongEpoch { .. })
                ));
                drop(replica);
                by_rolling(&world, &on(), &source, 2, commit).unwrap();
                assert!(world.holds(&source.images[2]));
                assert_eq!(world.open(&on()).unwrap().status().state, State::Exact);
            }
        }
    }
}

/// What came to the journal before a cut is gone on from: its copies are data there.
#[test]
fn what_was_cut_in_the_journal_is_gone_on_from() {
    let source = source();
    let world = replica_at(Kind::File, &source, 0);
    let mut replica = world.open(&on()).unwrap();
    let delta = source.rolling(replica.status(), &content(&replica).unwrap(), 1, false);
    receive_part(&mut replica, &delta, CommitMode::Journal, 5).unwrap();
    drop(replica);
    let mut replica = world.open(&on()).unwrap();
    let status = replica.status().clone();
    assert_eq!(status.positions[0].epoch, Some(source.epochs[1]));
    assert!(status.resumes.is_some() && world.holds(&source.images[0]));
    // What copies begins anew: it reads what stands there, not what the journal holds.
    let header = Header { resumes: status.resumes, ..source.header(1, 2, Method::Rolling) };
    let (_, unit) = Encoder::new(&Header { binds: Some(status.nonce), ..header }, None).unwrap();
    assert!(matches!(replica.receive(unit, CommitMode::Journal), Err(ReplicaError::Delta { .. })));
    let rest = source.lacks(&status, None, 2);
    merge(&mut replica, &rest, CommitMode::Journal).unwrap();
    assert!(world.holds(&source.images[2]));
}

/// A peer that lies: what it says is refused, and nothing that is exact changes.
#[test]
fn lies_are_refused() {
    let source = source();
    let data = |offset, len| (Record::Data { offset, len }, vec![9; len as usize]);
    let image = &source.images[0];
    let copy = |offset: u64, from: u64, len: u64| {
        let bytes = image.get(from as usize..(from + len) as usize).unwrap_or(b"");
        let hash = twox_hash::XxHash3_128::oneshot(bytes).to_le_bytes();
        (Record::Copy { offset, len, from, hash }, Vec::new())
    };
    let bad_hash = (Record::Copy { offset: 0, len: 4096, from: 8192, hash: [1; 16] }, Vec::new());
    let beyond = copy(0, source.size(0) + 40 * BLOCK, 4096);
    type Lie = (&'static str, Vec<(Record, Vec<u8>)>);
    let cases: Vec<Lie> = vec![
        ("a false hash", vec![bad_hash]),
        ("copied from beyond the end", vec![beyond]),
        ("two copies to one place", vec![copy(0, 8192, 4096), copy(4000, 20_000, 4096)]),
        ("data over a copy", vec![copy(0, 8192, 4096), data(100, 512)]),
        ("zeroes over a copy", vec![copy(9000, 0, 4096), (Record::Zero { offset: 0, len: 10_000 }, vec![])]),
        ("read after it was overwritten", vec![data(8192, 4096), copy(0, 8192, 4096), data(60_000, 512)]),
    ];
    for (what, records) in cases {
        for commit in [CommitMode::Journal, CommitMode::InPlace, CommitMode::Reflink] {
            let world = replica_at(Kind::File, &source, 0);
            let mut replica = world.open(&on()).unwrap();
            let mut header = source.header(1, 1, Method::Rolling);
            header.binds = Some(replica.status().nonce);
            header.size_before = source.size(0) * 4;
            let mut bytes = Vec::new();
            let mut writer = Writer::new(&mut bytes);
            let (mut encoder, unit) = Encoder::new(&header, None).unwrap();
            writer.unit(&unit).unwrap();
            for (record, data) in &records {
                let frame = Frame { records: vec![*record], data: Buf::from(&data[..]) };
                writer.unit(&encoder.frame(frame).unwrap()).unwrap();
            }
            writer.unit(&encoder.trailer()).unwrap();
            let result = merge(&mut replica, &bytes, commit);
            drop(replica);
            let status = world.open(&on()).unwrap().status().clone();
            // Where the old content is still there when it is read, a delta that reads it late is none the worse.
            if what.starts_with("read after") && result.is_ok() {
                continue;
            }
            assert!(
                matches!(result, Err(ReplicaError::Delta { .. } | ReplicaError::Io { .. })),
                "{what}, {commit:?}: {result:?}"
            );
            if commit == CommitMode::InPlace {
                assert_eq!(status.state, State::Incomplete, "{what}");
            } else {
                assert!(world.holds(&source.images[0]), "{what}, {commit:?}");
                assert_eq!(status.state, State::Exact, "{what}, {commit:?}");
            }
            // And the replica can be brought in order.
            by_rolling(&world, &on(), &source, 2, CommitMode::Journal).unwrap();
            assert!(world.holds(&source.images[2]), "{what}, {commit:?}");
        }
    }
    // Copies that go on from another delta, or fit no state.
    let world = replica_at(Kind::File, &source, 0);
    let mut replica = world.open(&on()).unwrap();
    let delta = source.rolling(replica.status(), &content(&replica).unwrap(), 1, false);
    merge(&mut replica, &delta, CommitMode::Journal).unwrap();
    assert!(matches!(merge(&mut replica, &delta, CommitMode::Journal), Err(ReplicaError::WrongEpoch { .. })));
}

/// What stands in no order is never read to fill a gap: what is still on its way there would be lost.
#[test]
fn gaps_of_what_stands_in_no_order_are_left_alone() {
    let source = source();
    let mut world = replica_at(Kind::Device, &source, 0);
    world.delay = Duration::from_millis(20);
    let mut replica = world.open(&on()).unwrap();
    let header = Header {
        binds: Some(replica.status().nonce),
        size_before: source.size(0),
        ..source.header(1, 1, Method::Rolling)
    };
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes);
    let (mut encoder, unit) = Encoder::new(&header, None).unwrap();
    writer.unit(&unit).unwrap();
    for (first, fill) in [(1, 5), (0, 6)] {
        let offsets = (first..30).step_by(2).map(|block| block * BLOCK);
        let records: Vec<Record> = offsets.map(|offset| Record::Data { offset, len: BLOCK }).collect();
        let data = vec![fill; records.len() * BLOCK as usize];
        let frame = Frame { records, data: Buf::from(&data[..]) };
        writer.unit(&encoder.frame(frame).unwrap()).unwrap();
    }
    writer.unit(&encoder.trailer()).unwrap();
    merge(&mut replica, &bytes, CommitMode::InPlace).unwrap();
    let found = content(&replica).unwrap();
    for (block, bytes) in found.chunks(BLOCK as usize).take(30).enumerate() {
        let fill = if block % 2 == 1 { 5 } else { 6 };
        assert!(bytes.iter().all(|b| *b == fill), "block {block}");
    }
}

/// A disk that reads nothing until somebody waits for it.
struct Lazy(RamDisk);

struct LazyQueue(Arc<Lazy>, VecDeque<Request>);

impl Disk for Lazy {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, buf)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.0.zero(offset, len, unmap, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }
    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }
    fn queue(self: Arc<Self>, _depth: u32) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(LazyQueue(self, VecDeque::new())))
    }
}

impl Queue for LazyQueue {
    fn submit(&mut self, request: Request) {
        self.1.push_back(request);
    }
    fn start(&mut self) {}
    fn complete(&mut self, wait: bool) -> Option<Done> {
        let mut request = wait.then(|| self.1.pop_front())??;
        assert_eq!(request.kind, Op::Read);
        let result = request.run(&self.0.0);
        Some(Done { request, result })
    }
    fn in_flight(&self) -> usize {
        self.1.len()
    }
}

/// However slowly the disk reads what is copied: what has come is held in bounded memory.
#[test]
fn what_waits_for_a_copy_is_bounded() {
    let disk: Arc<dyn Disk> = Arc::new(Lazy(RamDisk::new(1 << 20)));
    let mut copies = Copies::new(&disk).ok().unwrap();
    let hash = twox_hash::XxHash3_128::oneshot(&[0; 4096]).to_le_bytes();
    let mut held = 0;
    for n in 0..64u64 {
        let copy = Record::Copy { offset: n << 21, len: 4096, from: 0, hash };
        let data = Record::Data { offset: (n << 21) + 4096, len: 1 << 20 };
        copies.push(Frame { records: vec![copy], data: Buf::default() });
        copies.push(Frame { records: vec![data], data: Buf::new(1 << 20) });
        held += 4096 + (1 << 20);
        while let Some(frame) = copies.next(false).ok().unwrap() {
            held -= frame.data.len();
        }
        assert!(held <= 16 << 20, "{held} bytes are held");
    }
    while let Some(frame) = copies.next(true).ok().unwrap() {
        held -= frame.data.len();
    }
    assert_eq!(held, 0);
}
