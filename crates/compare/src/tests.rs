use std::ops::Range;
use std::sync::Arc;

use device::{Disk, RamDisk};
use proptest::prelude::*;
use testing::faulty::{FaultyDisk, Outage, Power};

use super::*;

/// What a comparison came upon.
#[derive(Default)]
struct Outcome {
    mended: Vec<u8>,
    sent: u64,
    read: u64,
    unreadable: Vec<Range<u64>>,
    unreadable_there: Vec<Range<u64>>,
    held: HeldBytes,
}

fn run_disks(
    from: Arc<dyn Disk>,
    to: Arc<dyn Disk>,
    scope: &Scope,
    replica: &[u8],
) -> std::io::Result<Outcome> {
    let mut reports = Vec::new();
    answer(&to, scope, |report, digests| {
        reports.push((report, digests));
        Ok(())
    })?;
    let mut reports = reports.into_iter();
    let mut outcome = Outcome { mended: replica.to_vec(), ..Outcome::default() };
    outcome.mended.resize(scope.size as usize, 0);
    let mut last = 0;
    let mut looked = 0;
    differences(
        &from,
        scope,
        |_| {},
        || Ok(reports.next()),
        |finding| {
            let range = match finding {
                Finding::Data { offset, data } => {
                    outcome.sent += data.len() as u64;
                    outcome.mended[offset as usize..][..data.len()].copy_from_slice(data);
                    offset..offset + data.len() as u64
                }
                Finding::Between { .. } => unreachable!("nothing was asked for besides"),
                Finding::Zero(r) => {
                    outcome.mended[r.start as usize..r.end as usize].fill(0);
                    r
                }
                Finding::Unreadable(r) => {
                    outcome.unreadable.push(r.clone());
                    r
                }
                Finding::UnreadableThere(r) => {
                    outcome.unreadable_there.push(r);
                    return Ok(());
                }
                Finding::Held(held) => {
                    outcome.held.add(held);
                    return Ok(());
                }
                Finding::Upto(upto, read) => {
                    assert!(upto >= last && upto > looked);
                    looked = upto;
                    outcome.read += read;
                    return Ok(());
                }
            };
            assert!(range.start >= last && range.start < range.end, "differences ascend");
            last = range.end;
            Ok(())
        },
    )?;
    assert_eq!(reports.len(), 0);
    Ok(outcome)
}

fn run(source: &[u8], replica: &[u8], scope: &Scope) -> Outcome {
    let from: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(source));
    let to: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(replica));
    run_disks(from, to, scope, replica).unwrap()
}

#[test]
fn what_the_replica_holds_is_counted_without_its_zeroes() {
    let scope = Scope::whole(20_001, 4096);
    let disk = |blocks: [u8; 5]| {
        let bytes: Vec<u8> = blocks.into_iter().flat_map(|value| vec![value; 4096]).collect();
        bytes[..20_001].to_vec()
    };
    let held = |source, replica| run(&disk(source), &disk(replica), &scope).held;
    assert_eq!(held([1, 2, 3, 4, 5], [0; 5]), HeldBytes::default());
    assert_eq!(held([1, 2, 0, 4, 5], [1, 9, 9, 0, 5]), HeldBytes { bytes: 15_905, differing: 8192 });
    assert_eq!(held([0; 5], [0, 0, 0, 0, 5]), HeldBytes { bytes: 3617, differing: 3617 });
    // A hole of the source, and one block that is not read as a part of it.
    let sparse: Arc<dyn Disk> = Arc::new(RamDisk::new(20_001));
    let there = disk([7, 0, 0, 0, 7]);
    let told = run_disks(sparse, Arc::new(RamDisk::from_bytes(&there)), &scope, &there).unwrap();
    assert_eq!(told.held, HeldBytes { bytes: 7713, differing: 7713 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_replica_becomes_equal(
        size in 1usize..5_000_000,
        other in 1usize..5_000_000,
        edits in proptest::collection::vec((0usize..5_000_000, 1usize..300_000, 0u8..4), 0..20),
        shift in 12u32..17,
        fast in any::<bool>(),
        ranges in proptest::collection::vec((0u64..5_000_000, 1u64..2_000_000), 0..4),
    ) {
        let mut source = vec![0u8; size];
        for (at, len, value) in &edits {
            if *at < size {
                let end = (at + len).min(size);
                source[*at..end].fill(*value);
            }
        }
        let mut replica = source.clone();
        replica.resize(other, 7);
        for (at, len, value) in edits.iter().rev().take(5) {
            if *at < other {
                let end = (at + len / 2).min(other);
                replica[*at..end].fill(value.wrapping_mul(3));
            }
        }
        let hash = if fast { Hash::Xxh3 } else { Hash::Blake3 };
        let whole = Scope { hash, ..Scope::whole(size as u64, 1 << shift) };
        prop_assert!(run(&source, &replica, &whole).mended == source);
        // Only where it is asked for.
        if !ranges.is_empty() {
            let ranges: Vec<Range<u64>> = ranges.iter().map(|(at, len)| *at..at + len).collect();
            let scope = whole.within(&ranges);
            let mended = run(&source, &replica, &scope).mended;
            replica.resize(size, 0);
            let mut expected = replica;
            for r in &scope.ranges {
                let r = r.start as usize..r.end as usize;
                expected[r.clone()].copy_from_slice(&source[r]);
            }
            prop_assert!(mended == expected);
        }
    }
}

#[test]
fn equal_disks_differ_nowhere_and_holes_are_not_read() {
    let bytes: Vec<u8> = (0..3_000_001u32).map(|i| (i / 7) as u8).collect();
    let scope = Scope::whole(bytes.len() as u64, 4096);
    assert_eq!(run(&bytes, &bytes, &scope).sent, 0);
    let sparse = || {
        let disk = RamDisk::new(64 << 30);
        disk.write_at(5 << 30, &[1; 10_000]).unwrap();
        Arc::new(disk) as Arc<dyn Disk>
    };
    let mut reports = Vec::new();
    let scope = Scope::whole(64 << 30, 4096);
    answer(&sparse(), &scope, |report, digests| {
        reports.push((report, digests));
        Ok(())
    })
    .unwrap();
    assert!(reports.len() < 10, "{} reports", reports.len());
    let (mut reports, mut read) = (reports.into_iter(), 0);
    differences(
        &sparse(),
        &scope,
        |_| {},
        || Ok(reports.next()),
        |finding| {
            match finding {
                Finding::Held(held) => assert_eq!(held.differing, 0),
                Finding::Upto(_, bytes) => read += bytes,
                other => panic!("{other:?}"),
            }
            Ok(())
        },
    )
    .unwrap();
    assert!(read <= 2 << 20, "{read} bytes read");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is asked for besides: what differs is told as that, once, and of the rest what was asked for and is not zero.
    #[test]
    fn what_is_told_besides_is_no_difference(
        size in 1usize..3_000_000,
        kinds in proptest::collection::vec(0u8..6, 1..800),
        asked in proptest::collection::vec(any::<bool>(), 1..100),
    ) {
        let (mut source, mut replica) = (vec![1; size], vec![1; size]);
        let blocks = size.div_ceil(4096);
        let kind = |block: usize| kinds[block % kinds.len()];
        for block in 0..blocks {
            let range = block * 4096..((block + 1) * 4096).min(size);
            match kind(block) {
                0 | 1 => replica[range].fill(2),
                2 => source[range].fill(0),
                3 => {
                    source[range.clone()].fill(0);
                    replica[range].fill(0);
                }
                _ => {}
            }
        }
        let (from, to): (Arc<dyn Disk>, Arc<dyn Disk>) =
            (Arc::new(RamDisk::from_bytes(&source)), Arc::new(RamDisk::from_bytes(&replica)));
        let scope = Scope::whole(size as u64, 4096);
        let mut reports = Vec::new();
        answer(&to, &scope, |report, digests| {
            reports.push((report, digests));
            Ok(())
        })
        .unwrap();
        let mut reports = reports.into_iter();
        let widen = |marks: &extents::Bitmap| {
            let told: Vec<_> = marks.runs().collect();
            let within = told[0].start..told[told.len() - 1].end;
            for block in within.filter(|block| asked[*block as usize % asked.len()]) {
                marks.set(block..block + 1);
            }
        };
        let (mut told, mut last) = (vec![None; blocks], 0);
        let found = |finding: Finding<'_>| {
            let (range, what) = match &finding {
                Finding::Data { offset, data } => (*offset..offset + data.len() as u64, 0),
                Finding::Zero(range) => (range.clone(), 2),
                Finding::Between { offset, data } => (*offset..offset + data.len() as u64, 4),
                _ => return Ok(()),
            };
            if let Finding::Data { offset, data } | Finding::Between { offset, data } = finding {
                assert!(data == &source[offset as usize..][..data.len()]);
            }
            assert!(range.start >= last && range.start % 4096 == 0, "findings ascend, in whole blocks");
            last = range.end;
            (range.start / 4096..range.end.div_ceil(4096)).for_each(|block| told[block as usize] = Some(what));
            Ok(())
        };
        differences(&from, &scope, widen, || Ok(reports.next()), found).unwrap();
        for (block, told) in told.iter().enumerate() {
            let stretch = block / 256 * 256;
            let differs = (stretch..(stretch + 256).min(blocks)).filter(|b| kind(*b) < 2);
            let between = differs.clone().any(|b| b < block) && differs.clone().any(|b| b > block);
            let expected = match kind(block) {
                0 | 1 => Some(0),
                2 => Some(2),
                3 => None,
                _ => (between && asked[(block - stretch) % asked.len()]).then_some(4),
            };
            prop_assert_eq!(*told, expected, "block {}", block);
        }
    }
}

#[test]
fn a_lying_account_is_refused() {
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&[1; 10_000]));
    let scope = Scope::whole(10_000, 4096);
    let hear = |reports: Vec<(DigestReport, Vec<u8>)>, scope: &Scope| {
        let mut reports = reports.into_iter();
        differences(&disk, scope, |_| {}, || Ok(reports.next()), |_| Ok(()))
    };
    for reports in [
        vec![],
        vec![(DigestReport::Zero(0..20_000), vec![])],
        vec![(DigestReport::Zero(0..u64::MAX), vec![])],
        vec![(DigestReport::Zero(4096..8192), vec![])],
        vec![(DigestReport::Zero(0..0), vec![])],
        vec![(DigestReport::Zero(0..5), vec![])],
        vec![(DigestReport::Zero(0..4096), vec![0; DIGEST])],
        vec![(DigestReport::Unreadable(0..20_000), vec![])],
        vec![(DigestReport::Digests(0..10_000), vec![0; 7])],
        vec![(DigestReport::Digests(0..10_000), vec![0; 4 * DIGEST])],
        vec![
            (DigestReport::Digests(0..4096), vec![0; DIGEST]),
            (DigestReport::Digests(0..4096), vec![0; DIGEST]),
        ],
        vec![(DigestReport::Zero(0..8192), vec![]), (DigestReport::Zero(4096..10_000), vec![])],
    ] {
        let text = format!("{reports:?}");
        assert!(hear(reports, &scope).is_err(), "{text}");
    }
    // Claims of a part must stay within it.
    let part = scope.clone().within(&[4096..8192]);
    assert!(hear(vec![(DigestReport::Zero(4096..8192), vec![])], &part).is_ok());
    assert!(hear(vec![(DigestReport::Zero(0..4096), vec![])], &part).is_err());
    assert!(hear(vec![(DigestReport::Zero(4096..10_000), vec![])], &part).is_err());
    // And what is no scope is not begun.
    let bad = Scope { block_size: 3, ..scope.clone() };
    assert!(answer(&disk, &bad, |_, _| Ok(())).is_err() && hear(vec![], &bad).is_err());
}

#[test]
fn what_cannot_be_read_is_named_and_the_rest_goes_on() {
    const EIO: i32 = 5;
    let source: Vec<u8> = (0..4_000_000u32).map(|i| (i / 5000 + 1) as u8).collect();
    let mut replica = source.clone();
    for at in [100_000, 1_500_000, 3_900_000] {
        replica[at] ^= 1;
    }
    let disk = |bytes: &[u8], bad: &[u64]| {
        let faulty = FaultyDisk::new(&Power::new(Outage::Kill), Arc::new(RamDisk::from_bytes(bytes)));
        bad.iter().for_each(|at| faulty.fail_reads(*at..*at + 1, EIO));
        Arc::new(faulty) as Arc<dyn Disk>
    };
    let strict = Scope::whole(4_000_000, 4096);
    // Without a word the first block that cannot be read ends it, by name, on either side.
    for (here, there) in [(&[2_000_000][..], &[][..]), (&[], &[2_000_000])] {
        let error = run_disks(disk(&source, here), disk(&replica, there), &strict, &replica).err().unwrap();
        let block = 2_000_000 / 4096 * 4096;
        assert!(error.to_string().contains(&block.to_string()), "{error}");
    }
    // With it, all else is compared: what cannot be read there is sent, what cannot be read here is told.
    let lenient = Scope { keep_going: true, ..strict };
    let bad_here = [1_500_000, 2_000_000];
    let bad_there = [3_000_000, 3_003_904];
    let outcome =
        run_disks(disk(&source, &bad_here), disk(&replica, &bad_there), &lenient, &replica).unwrap();
    let block = |at: u64| at / 4096 * 4096..at / 4096 * 4096 + 4096;
    assert_eq!(outcome.unreadable, bad_here.map(block));
    assert_eq!(outcome.unreadable_there.iter().map(|r| r.end - r.start).sum::<u64>(), 2 * 4096);
    assert_eq!(outcome.sent, 4 * 4096, "two that differ, two that cannot be read there");
    let mut expected = source.clone();
    expected[1_500_000] = replica[1_500_000];
    assert!(outcome.mended == expected);
    // Another error than the medium's is none to go on behind: the source became shorter.
    let short = disk(&source[..3_000_000], &[]);
    assert!(run_disks(short, disk(&replica, &[]), &lenient, &replica).is_err());
}

#[test]
fn reading_keeps_to_its_rate() {
    let bytes = vec![1; 4 << 20];
    let scope = Scope { rate: Some(8 << 20), ..Scope::whole(4 << 20, 4096) };
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&bytes));
    let began = std::time::Instant::now();
    answer(&disk, &scope, |_, _| Ok(())).unwrap();
    let time = began.elapsed().as_secs_f64();
    assert!(time > 0.25 && time < 5.0, "{time} s");
}
