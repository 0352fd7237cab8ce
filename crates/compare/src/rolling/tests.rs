use std::sync::Arc;

use device::{Disk, RamDisk};
use proptest::prelude::*;

use super::*;

const KEY: [u8; 32] = [7; 32];

/// An edit of a file: what, where, how much, and another place.
type Edit = (u8, u32, u32, u32);

fn noise(len: usize, seed: u64) -> Vec<u8> {
    testing::Random::seeded(seed).bytes(len)
}

fn edit(bytes: &mut Vec<u8>, (what, at, len, other): Edit, most: usize) {
    let size = bytes.len().max(1);
    let at = (at as usize % size).min(bytes.len());
    let len = (len as usize % most).min(bytes.len() - at);
    let other = other as usize % size;
    match what % 10 {
        // Insert.
        0 => drop(bytes.splice(at..at, noise(len, u64::from(what) + other as u64))),
        // Delete.
        1 => drop(bytes.drain(at..at + len)),
        // Move.
        2 => {
            let moved: Vec<u8> = bytes.drain(at..at + len).collect();
            let to = other.min(bytes.len());
            bytes.splice(to..to, moved);
        }
        // Swap.
        3 => {
            for n in 0..len.min(size - other) {
                bytes.swap(at + n, other + n);
            }
        }
        // Duplicate.
        4 => {
            let twice = bytes[at..at + len].to_vec();
            let to = other.min(bytes.len());
            bytes.splice(to..to, twice);
        }
        5 => bytes[at..at + len].reverse(),
        // Truncate and grow.
        6 => bytes.truncate(size - len.min(size)),
        7 => bytes.extend(noise(len, other as u64)),
        8 => bytes[at..at + len].fill(0),
        _ => bytes[at..at + len].fill(other as u8),
    }
}

fn index(old: &Arc<dyn Disk>, params: &SumParams) -> BlockIndex {
    let mut index = BlockIndex::new(params.clone(), old.len()).unwrap();
    block_sums(old, params, |(said, sums)| index.hear(&said, &sums)).unwrap();
    assert!(index.is_whole());
    index.finish();
    index
}

/// Brings `old` to `new`, and counts the bytes that had to be sent.
fn run(new: &[u8], old: &[u8], in_place: Option<InPlace>, block: u32) -> (Vec<u8>, u64) {
    let source: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(new));
    let destination: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(old));
    let params = SumParams { size: old.len().max(new.len()) as u64, block, key: KEY, keep_going: false };
    let index = index(&destination, &params);
    let mut result = old.to_vec();
    result.resize(old.len().max(new.len()), 0);
    let before = result.clone();
    let (mut sent, mut last) = (0, 0);
    let found = |change| {
        let (range, bytes) = match change {
            Change::Data { offset, data } => {
                sent += data.len() as u64;
                (offset..offset + data.len() as u64, data.to_vec())
            }
            Change::Zero(range) => (range.clone(), vec![0; (range.end - range.start) as usize]),
            Change::Copy { offset, len, from, hash } => {
                assert!(from + len <= old.len() as u64 && len <= 1 << 20);
                let read = from as usize..(from + len) as usize;
                let bytes = if in_place.is_some() { &result[read] } else { &before[read] };
                assert_eq!(scan::hash(bytes), hash, "copy of {len} from {from} to {offset}");
                (offset..offset + len, bytes.to_vec())
            }
        };
        assert!(in_place.is_some() || range.start >= last, "changes ascend");
        last = range.end;
        result[range.start as usize..range.end as usize].copy_from_slice(&bytes);
        Ok(())
    };
    changes(&source, &index, in_place, found, |_| {}).unwrap();
    result.truncate(new.len());
    assert!(sent <= new.len() as u64);
    (result, sent)
}

fn every_way(new: &[u8], old: &[u8], block: u32) {
    assert!(run(new, old, None, block).0 == new, "out of place");
    for cycles in [Cycles::Trim, Cycles::Delete] {
        for window in [1, 2, 7, 1 << 19] {
            let result = run(new, old, Some(InPlace { cycles, window }), block).0;
            assert!(result == new, "in place, {cycles:?}, window {window}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_file_becomes_any_other(
        size in prop_oneof![0usize..3000, 3000usize..300_000],
        edits in prop::collection::vec(any::<Edit>(), 0..12),
        shift in 9u32..13,
        seed in any::<u64>(),
    ) {
        let old = noise(size, seed);
        let mut new = old.clone();
        edits.into_iter().for_each(|e| edit(&mut new, e, 60_000));
        every_way(&new, &old, 1 << shift);
        every_way(&old, &new, 1 << shift);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() })]

    /// Over the borders of chunks.
    #[test]
    fn any_large_file_becomes_any_other(
        edits in prop::collection::vec(any::<Edit>(), 1..12),
        shift in 12u32..18,
        seed in any::<u64>(),
    ) {
        let old = noise(11_000_000, seed);
        let mut new = old.clone();
        edits.into_iter().for_each(|e| edit(&mut new, e, 3_000_000));
        let block = 1 << shift;
        prop_assert!(run(&new, &old, None, block).0 == new);
        prop_assert!(run(&new, &old, Some(InPlace::default()), block).0 == new);
        let small = InPlace { cycles: Cycles::Delete, window: 9 };
        prop_assert!(run(&new, &old, Some(small), block).0 == new);
    }
}

#[test]
fn what_was_inserted_is_all_that_is_sent() {
    let old = noise(20 << 20, 3);
    for inserted in [1, 511, 4096, 1 << 20, (1 << 20) + 77] {
        let new = [noise(inserted, 9), old.clone()].concat();
        for in_place in [None, Some(InPlace::default())] {
            let (result, sent) = run(&new, &old, in_place, 4096);
            assert!(result == new);
            // And the last block, which is a short one of the new file.
            assert!(sent <= inserted as u64 + 4096, "{sent} for {inserted}");
        }
        // The other way nothing is sent.
        for in_place in [None, Some(InPlace::default())] {
            let (result, sent) = run(&old, &new, in_place, 4096);
            assert!(result == old && sent <= 8192, "{sent} for {inserted} less");
        }
    }
}

#[test]
fn equal_files_need_nothing_and_holes_are_not_read() {
    let bytes = noise(9_000_001, 5);
    assert_eq!(run(&bytes, &bytes, None, 4096).1, 0);
    // Halves swapped: [zeroes][noise] and [noise][zeroes].
    let (a, z) = (noise(6 << 20, 5), vec![0; 6 << 20]);
    let (first, second) = ([a.clone(), z.clone()].concat(), [z, a].concat());
    for in_place in [None, Some(InPlace::default())] {
        assert_eq!(run(&first, &second, in_place, 4096).1, 0);
        assert_eq!(run(&second, &first, in_place, 4096).1, 0);
    }
}

/// Blocks that begin or end with zeroes are found as others are, though zeroes around them reach into them.
#[test]
fn what_stands_among_zeroes_is_found_where_it_has_moved() {
    let mut old = vec![0; 6 << 20];
    for (n, at) in
        (0..2 << 20).step_by(4096).enumerate().filter(|(n, _)| [0, 3, 5, 6, 12].contains(&(n % 17)))
    {
        old[at..at + 4096].copy_from_slice(&noise(4096, n as u64));
    }
    for shift in [4096, 4000, 8191, 1, 512] {
        let mut new = old.clone();
        let to = (4 << 20) - 300_000 + shift;
        new.copy_within(0..2 << 20, to);
        for in_place in [None, Some(InPlace::default())] {
            let (result, sent) = run(&new, &old, in_place, 8192);
            assert!(result == new);
            assert_eq!(sent, 0, "moved by {to}");
        }
    }
}

#[test]
fn halves_that_are_swapped_in_place_cost_a_half() {
    let (a, b) = (noise(5 << 20, 1), noise(5 << 20, 2));
    let (first, second) = ([a.clone(), b.clone()].concat(), [b, a].concat());
    assert_eq!(run(&first, &second, None, 4096).1, 0);
    let (result, sent) = run(&first, &second, Some(InPlace::default()), 4096);
    assert!(result == first);
    assert_eq!(sent, 5 << 20);
}

/// What a window has overwritten no later one reads, so that memory is bounded: a shift by a window costs as much again.
#[test]
fn a_window_bounds_what_is_ordered_together() {
    let old = noise(6 << 20, 3);
    let new = [noise(2 << 20, 9), old.clone()].concat();
    let sent = |window| {
        let (result, sent) = run(&new, &old, Some(InPlace { window, ..InPlace::default() }), 4096);
        assert!(result == new);
        sent
    };
    assert!(sent(InPlace::default().window) <= (2 << 20) + 4096);
    assert!(sent(2) >= 5 << 20);
}

/// Bytes that are copied to make one file of another, in blocks of 4 KiB.
fn moved(old: &[u8], new: &[u8]) -> u64 {
    let (from, to): (Arc<dyn Disk>, Arc<dyn Disk>) =
        (Arc::new(RamDisk::from_bytes(new)), Arc::new(RamDisk::from_bytes(old)));
    let index = index(&to, &SumParams { size: old.len() as u64, block: 4096, key: KEY, keep_going: false });
    let mut moved = 0;
    let found = |change| {
        if let Change::Copy { len, .. } = change {
            moved += len;
        }
        Ok(())
    };
    changes(&from, &index, None, found, |_| {}).unwrap();
    moved
}

/// Content that is the same wherever a copy begins: what stands at its place already is left there all the same.
#[test]
fn a_copy_ends_where_a_block_stands() {
    let period = noise(127, 4);
    let old: Vec<u8> = period.iter().copied().cycle().take(400 * 4096).collect();
    let mut new = old.clone();
    for block in [3, 77, 200] {
        new[block * 4096 + 1000] ^= 1;
    }
    let moved = moved(&old, &new);
    assert!(moved <= 3 * 4096, "{moved} bytes are copied");
}

/// A run of copies ends where the blocks stand at their own places, though it could go on.
#[test]
fn a_run_of_copies_ends_where_blocks_stand() {
    // The same 100 blocks at two places, and the source has them at both: behind what was inserted, at the first.
    let twice = noise(100 * 4096, 6);
    let old = [noise(10 * 4096, 7), twice.clone(), noise(10 * 4096, 8), twice.clone()].concat();
    let mut new = old.clone();
    // The last block before the second ones becomes the last before the first ones.
    let (from, to) = (9 * 4096, 119 * 4096);
    new.copy_within(from..from + 4096, to);
    let moved = moved(&old, &new);
    assert!((4096..=17 * 4096).contains(&moved), "{moved} bytes are copied");
}

/// Blocks of which there are many in the index stand there once: a search for one is no longer than for another.
#[test]
fn blocks_that_are_many_hide_no_others() {
    let many = noise(512, 1);
    let old = [many.repeat(4000), noise(512 * 4000, 2)].concat();
    let new = [noise(100, 3), old.clone()].concat();
    assert!(run(&new, &old, None, 512).1 <= 100 + 512);
    let params = SumParams { size: old.len() as u64, block: 512, key: KEY, keep_going: false };
    let destination: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&old));
    let index = index(&destination, &params);
    let mut candidates = Vec::new();
    index.candidates(index.hasher.weak.sum(&many), &mut candidates);
    assert_eq!(candidates.len(), 1);
}

/// A device may hold more than the replica: that stands where it stands, and nothing is copied from there.
/// Where the source is longer, a block of the replica may belong where the replica has ended.
#[test]
fn a_block_moves_to_behind_the_end_of_the_replica() {
    let old = noise(4 * 512, 1);
    let mut new = noise(9 * 512, 2);
    new.extend(&old);
    every_way(&new, &old, 512);
}

#[test]
fn nothing_is_copied_from_behind_the_replica() {
    let old = noise(8 * 4096, 8);
    let destination: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&old));
    let params = SumParams { size: old.len() as u64, block: 4096, key: KEY, keep_going: false };
    let mut index = BlockIndex::new(params.clone(), 4 * 4096).unwrap();
    block_sums(&destination, &params, |(said, sums)| index.hear(&said, &sums)).unwrap();
    index.finish();
    let block = |number: usize| &old[number * 4096..(number + 1) * 4096];
    let new = [&[7; 100][..], block(6), block(2), &noise(3996, 9)[..], block(3), &old[4 * 4096..]].concat();
    let source: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&new));
    let (mut copied, mut sent) = (Vec::new(), 0);
    let found = |change| {
        match change {
            Change::Copy { from, len, .. } => copied.push((from, len)),
            Change::Data { data, .. } => sent += data.len(),
            Change::Zero(_) => {}
        }
        Ok(())
    };
    changes(&source, &index, None, found, |_| {}).unwrap();
    assert_eq!((copied, sent), (vec![(2 * 4096, 4096)], 100 + 4096 + 3996));
}

/// What cannot be read fits nothing, is no zeroes, and is told; without leave it is an error that names the block.
#[test]
fn blocks_that_cannot_be_read_are_sent() {
    use testing::faulty::{FaultyDisk, Outage, Power};
    let mut old = noise(5 << 20, 8);
    old[1 << 20..2 << 20].fill(0);
    let new = [noise(100, 9), old.clone()].concat();
    let worn = |bad: &[u64]| {
        let disk = FaultyDisk::new(&Power::new(Outage::Kill), Arc::new(RamDisk::from_bytes(&old)));
        bad.iter().for_each(|at| disk.fail_reads(*at..*at + 1, 5));
        Arc::new(disk) as Arc<dyn Disk>
    };
    let strict = SumParams { size: old.len() as u64, block: 4096, key: KEY, keep_going: false };
    let error = block_sums(&worn(&[3_000_000]), &strict, |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains(&(3_000_000u64 / 4096 * 4096).to_string()), "{error}");
    let lenient = SumParams { keep_going: true, ..strict.clone() };
    let bad = [1_500_000, 3_000_000, 3_004_000, 5_242_879];
    let (sound, lacking) = (index(&worn(&[]), &strict), index(&worn(&bad), &lenient));
    let blocks: Vec<u64> = lacking.unreadable().iter().map(|range| range.start / 4096).collect();
    assert_eq!(blocks, bad.map(|at| at / 4096));
    assert!(sound.unreadable().is_empty());
    let all = |index: &BlockIndex, source: &[u8]| {
        let source: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(source));
        let mut ranges: Vec<(bool, u64, u64)> = Vec::new();
        let found = |change| {
            ranges.push(match change {
                Change::Data { offset, data } => (true, offset, offset + data.len() as u64),
                Change::Zero(range) => (false, range.start, range.end),
                Change::Copy { from, len, .. } => {
                    assert!(bad.iter().all(|bad| from + len <= bad / 4096 * 4096 || from > *bad));
                    return Ok(());
                }
            });
            Ok(())
        };
        changes(&source, index, None, found, |_| {}).unwrap();
        ranges
    };
    // At its place, all else is left; zeroes are told, what is not zero is sent.
    let there = all(&lacking, &old);
    let sent: u64 = there.iter().filter(|(data, ..)| *data).map(|(_, start, end)| end - start).sum();
    assert_eq!(sent, 3 * 4096);
    let zero = 1_500_000 / 4096 * 4096;
    assert!(there.contains(&(false, zero, zero + 4096)), "{there:?}");
    let moved: u64 = all(&lacking, &new).iter().filter(|(data, ..)| *data).map(|(_, s, e)| e - s).sum();
    assert!((3 * 4096..=5 * 4096).contains(&moved), "{moved}");
}

#[test]
fn a_lying_account_is_refused_or_does_no_harm() {
    let params = SumParams { size: 40_000, block: 4096, key: KEY, keep_going: false };
    for (said, sums) in [
        (SumReport::Sums(0..50_000), vec![0; 13 * SUMS]),
        (SumReport::Sums(4096..8192), vec![0; SUMS]),
        (SumReport::Sums(0..8192), vec![0; SUMS]),
        (SumReport::Sums(0..0), vec![]),
        #[allow(clippy::reversed_empty_ranges)]
        (SumReport::Sums(0..u64::MAX), vec![]),
        (SumReport::Zero(0..50_000), vec![]),
        (SumReport::Zero(0..4096), vec![1]),
    ] {
        assert!(BlockIndex::new(params.clone(), 40_000).unwrap().hear(&said, &sums).is_err(), "{said:?}");
    }
    let mut short = BlockIndex::new(params.clone(), 40_000).unwrap();
    short.hear(&SumReport::Sums(0..5000), &[1; 2 * SUMS]).unwrap();
    assert!(short.hear(&SumReport::Sums(5000..9000), &[1; SUMS]).is_err(), "nothing follows a short block");
    assert!(short.hear(&SumReport::Zero(5000..9000), &[]).is_err(), "but its end");
    short.hear(&SumReport::Zero(5000..40_000), &[]).unwrap();
    for block in [0, 1, 256, 5000, 1 << 31] {
        assert!(BlockIndex::new(SumParams { block, ..params.clone() }, 0).is_err());
    }

    // Equal weak sums for everything, which are also those of the source, and false strong ones: it takes no time.
    let new = vec![0x55; 24 << 20];
    let params = SumParams { size: 24 << 20, block: 65536, key: KEY, keep_going: false };
    let mut sums = sums::Hasher::new(&params).sums(sums::Hasher::new(&params).weak.sum(&new[..65536]), &new);
    let mut index = BlockIndex::new(params, 24 << 20).unwrap();
    for chunk in 0..6 {
        let mut told = Vec::new();
        for block in 0..64u8 {
            (sums[10], sums[11]) = (chunk, block);
            told.extend(sums);
        }
        let from = u64::from(chunk) * (4 << 20);
        index.hear(&SumReport::Sums(from..from + (4 << 20)), &told).unwrap();
    }
    index.finish();
    let source: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&new));
    let (mut sent, began) = (0, std::time::Instant::now());
    let found = |change| {
        if let Change::Data { data, .. } = change {
            sent += data.len();
        }
        Ok(())
    };
    changes(&source, &index, None, found, |_| {}).unwrap();
    assert_eq!(sent, new.len());
    // It would be hours, and a busy machine takes its time.
    assert!(began.elapsed().as_secs() < 120, "{:?}", began.elapsed());
}

/// A block that stands at its place is not hashed again by anybody: the bits that must agree are counted.
#[test]
fn a_block_at_its_place_is_believed_by_96_bits() {
    let old = noise(4 * 4096, 5);
    let source: Arc<dyn Disk> = Arc::new(RamDisk::from_bytes(&old));
    let params = SumParams { size: old.len() as u64, block: 4096, key: KEY, keep_going: false };
    let mut told = Vec::new();
    block_sums(&source, &params, |said| {
        told.push(said);
        Ok(())
    })
    .unwrap();
    let sent = |flip: Option<usize>| {
        let mut index = BlockIndex::new(params.clone(), old.len() as u64).unwrap();
        for (said, sums) in &told {
            let mut sums = sums.clone();
            if let Some(bit) = flip {
                sums[SUMS + bit / 8] ^= 1 << (bit % 8);
            }
            index.hear(said, &sums).unwrap();
        }
        index.finish();
        let mut sent = 0;
        let found = |change| {
            sent += u64::from(matches!(change, Change::Data { .. }));
            Ok(())
        };
        changes(&source, &index, None, found, |_| {}).unwrap();
        sent
    };
    assert_eq!(sent(None), 0);
    let bits = (0..8 * SUMS).filter(|bit| sent(Some(*bit)) > 0).count();
    assert!(bits >= 96, "{bits} bits");
}
