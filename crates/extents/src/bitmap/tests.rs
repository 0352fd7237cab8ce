//! The bitmap against a vector of bools.

use std::sync::Barrier;

use proptest::prelude::*;
use testing::Random;

use super::*;
use crate::DecodeError;

/// Sizes around every edge: empty, within a word, a word, a group, a summary word, and a little more.
fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..200,
        (GROUP_BLOCKS - 70)..(GROUP_BLOCKS + 70),
        (64 * GROUP_BLOCKS - 70)..(64 * GROUP_BLOCKS + 70),
        0..3 * 64 * GROUP_BLOCKS,
    ]
}

/// Mostly short ranges, some long, some past the end, some empty, some upside down.
fn range(blocks: u64) -> impl Strategy<Value = Range<u64>> {
    let start = 0..blocks + 100;
    (start, prop_oneof![Just(1u64), 0..130u64, 0..blocks + 100, Just(u64::MAX)], 0..20u8).prop_map(
        |(start, len, odd)| {
            if odd == 0 { start..start / 2 } else { start..start.saturating_add(len) }
        },
    )
}

fn sets() -> impl Strategy<Value = (u64, Vec<Range<u64>>)> {
    sizes().prop_flat_map(|blocks| (Just(blocks), prop::collection::vec(range(blocks), 0..40)))
}

fn within(range: &Range<u64>, blocks: u64) -> std::ops::Range<usize> {
    let start = range.start.min(blocks);
    start as usize..range.end.min(blocks).max(start) as usize
}

fn model_runs(model: &[bool], range: Range<u64>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for block in within(&range, model.len() as u64) {
        let block = block as u64;
        match runs.last_mut() {
            _ if !model[block as usize] => {}
            Some(last) if last.end == block => last.end += 1,
            _ => runs.push(block..block + 1),
        }
    }
    runs
}

fn filled(blocks: u64, ranges: &[Range<u64>]) -> (Bitmap, Vec<bool>) {
    let map = Bitmap::new(blocks);
    let mut model = vec![false; blocks as usize];
    for range in ranges {
        let inside = &mut model[within(range, blocks)];
        let fresh = inside.iter().any(|b| !b);
        inside.fill(true);
        assert_eq!(map.set(range.clone()), fresh, "{range:?}");
    }
    (map, model)
}

fn same<S: Deref<Target = [AtomicU64]>>(map: &Bitmap<S>, model: &[bool]) {
    assert_eq!(map.runs().collect::<Vec<_>>(), model_runs(model, 0..model.len() as u64));
    assert_eq!(map.count(), model.iter().filter(|b| **b).count() as u64);
    for group in 0..map.groups() {
        let clean = map.group(group).iter().all(|w| w.load(Relaxed) == 0);
        let marked = map.summary()[group / 64].load(Relaxed) >> (group % 64) & 1 == 1;
        assert!(clean || marked, "group {group} is set without its summary bit");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn behaves_as_bools((blocks, ranges) in sets(), asked in prop::collection::vec(any::<prop::sample::Index>(), 20)) {
        let (map, model) = filled(blocks, &ranges);
        same(&map, &model);
        prop_assert_eq!(map.is_clean(), !model.contains(&true));
        for pair in asked.chunks(2) {
            let (a, b) = (pair[0].index(blocks as usize + 80) as u64, pair[1].index(blocks as usize + 80) as u64);
            prop_assert_eq!(map.get(a), model.get(a as usize).copied().unwrap_or(false));
            for range in [a..b, a..a + 1, a..a.saturating_add(b % 100)] {
                let inside = &model[within(&range, blocks)];
                prop_assert_eq!(map.any(range.clone()), inside.contains(&true), "{:?}", range);
                let all = range.is_empty() || (range.end <= blocks && !inside.contains(&false));
                prop_assert_eq!(map.all(range.clone()), all, "{:?}", range);
                prop_assert_eq!(map.runs_in(range.clone()).collect::<Vec<_>>(), model_runs(&model, range));
            }
        }
    }

    #[test]
    fn clears_as_bools((blocks, ranges) in sets(), cut in prop::collection::vec((any::<prop::sample::Index>(), 0u64..10_000), 1..10)) {
        let (map, mut model) = filled(blocks, &ranges);
        for (start, len) in cut {
            let start = start.index(blocks as usize + 10) as u64;
            let range = start..start + len;
            map.clear(range.clone());
            model[within(&range, blocks)].fill(false);
            same(&map, &model);
        }
        map.clear(0..u64::MAX);
        prop_assert!(map.is_clean());
        prop_assert!(map.storage().iter().all(|w| w.load(Relaxed) == 0), "the summary too");
    }

    #[test]
    fn joins_and_subtracts_as_bools((blocks, ranges) in sets(), (other_blocks, other) in sets()) {
        let (map, mut model) = filled(blocks, &ranges);
        let (other, other_model) = filled(other_blocks, &other);
        map.union_with(&other);
        model.iter_mut().zip(&other_model).for_each(|(a, b)| *a |= b);
        same(&map, &model);
        same(&other, &other_model);
        map.subtract(&other);
        model.iter_mut().zip(&other_model).for_each(|(a, b)| *a &= !b);
        same(&map, &model);
    }

    #[test]
    fn stands_again_over_its_words((blocks, ranges) in sets()) {
        let (map, model) = filled(blocks, &ranges);
        same(&Bitmap::over(&**map.storage(), blocks).unwrap(), &model);
    }

    #[test]
    fn encodes_and_decodes((blocks, ranges) in sets(), scattered in prop::collection::vec(any::<prop::sample::Index>(), 0..4000)) {
        let (map, _) = filled(blocks, &ranges);
        for index in scattered.iter().filter(|_| blocks > 0) {
            let block = index.index(blocks as usize) as u64;
            map.set(block..block + 1);
        }
        let mut bytes = Vec::new();
        map.encode(&mut bytes);
        let leaves = blocks.div_ceil(64) * 8;
        prop_assert!(bytes.len() as u64 <= leaves + leaves / 100 + 32, "{} bytes for {} of leaves", bytes.len(), leaves);
        let copy = Bitmap::new(blocks);
        copy.decode_into(&bytes).unwrap();
        prop_assert_eq!(copy.extents(), map.extents());
        // Decoding adds to what is there.
        let joined = Bitmap::new(blocks);
        joined.set(0..7);
        joined.decode_into(&bytes).unwrap();
        prop_assert_eq!(joined.extents(), map.extents().union(&Extents::from(0..7.min(blocks))));
        let mut cut = bytes.clone();
        while cut.pop().is_some() {
            prop_assert!(Bitmap::new(blocks).decode_into(&cut).is_err());
            // The tail matters most; the rest of a long one by halves.
            if cut.len() > 200 {
                cut.truncate(cut.len() / 2 + 100);
            }
        }
        bytes.push(0);
        prop_assert_eq!(Bitmap::new(blocks).decode_into(&bytes), Err(DecodeError::Trailing));
    }

    #[test]
    fn garbage_is_refused_whole(
        (blocks, ranges) in sets(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        noise in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let (map, _) = filled(blocks, &ranges);
        let mut bytes = Vec::new();
        map.encode(&mut bytes);
        for (at, with) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= with;
        }
        let copy = Bitmap::new(blocks);
        if copy.decode_into(&bytes).is_err() {
            prop_assert!(copy.is_clean());
        }
        same(&copy, &(0..blocks).map(|b| copy.get(b)).collect::<Vec<_>>());
        let mut begun = Vec::new();
        crate::varint::put(&mut begun, blocks);
        begun.extend(noise);
        let copy = Bitmap::new(blocks);
        if copy.decode_into(&begun).is_err() {
            prop_assert!(copy.is_clean());
        }
    }
}

#[test]
fn storage_of_another_size_is_refused() {
    let wrong: Box<[AtomicU64]> = (0..10).map(AtomicU64::new).collect();
    let error = Bitmap::over(wrong, 100).unwrap_err();
    assert_eq!(error, StorageError { blocks: 100, needed: 65, found: 10 });
}

#[test]
fn bits_past_the_end_are_dropped() {
    let full: Box<[AtomicU64]> = (0..Bitmap::<()>::words(4100)).map(|_| AtomicU64::new(u64::MAX)).collect();
    let map = Bitmap::over(full, 4100).unwrap();
    assert!(map.all(0..4100));
    assert_eq!(map.count(), 4100);
}

#[test]
fn a_small_bitmap_takes_no_more_room_than_its_words() {
    let map = Bitmap::new(180);
    (0..180).step_by(3).for_each(|block| {
        map.set(block..block + 1);
    });
    let mut bytes = Vec::new();
    map.encode(&mut bytes);
    assert!(bytes.len() < 24 + 12, "{} bytes", bytes.len());
}

#[test]
fn a_bitmap_of_another_size_is_not_decoded() {
    let mut bytes = Vec::new();
    Bitmap::new(100).encode(&mut bytes);
    let error = Bitmap::new(101).decode_into(&bytes);
    assert_eq!(error, Err(DecodeError::Blocks { expected: 101, found: 100 }));
}

#[test]
fn few_scattered_blocks_take_few_bytes() {
    // 0.001 % of 4 TiB in blocks of 4 KiB: roaring bitmaps take 84 KB for it.
    let blocks = 1 << 30;
    let map = Bitmap::new(blocks);
    let mut random = Random::seeded(1);
    for _ in 0..blocks / 100_000 {
        let block = random.below(blocks);
        map.set(block..block + 1);
    }
    let mut bytes = Vec::new();
    map.encode(&mut bytes);
    assert!(bytes.len() < 33_000, "{} bytes", bytes.len());
    let full = Bitmap::new(blocks);
    full.set(0..blocks);
    bytes.clear();
    full.encode(&mut bytes);
    assert!(bytes.len() < 20, "{} bytes for one run", bytes.len());
}

#[test]
fn racing_setters_lose_nothing_and_share_the_claims() {
    const THREADS: u64 = 4;
    let blocks = 5 * GROUP_BLOCKS + 17;
    for round in 0..20u64 {
        let map = Bitmap::new(blocks);
        let barrier = Barrier::new(THREADS as usize);
        let (map, barrier) = (&map, &barrier);
        let claimed: u64 = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    scope.spawn(move || {
                        barrier.wait();
                        let mut claims = 0;
                        let mut random = Random::seeded(round * THREADS + thread);
                        for _ in 0..3000 {
                            let block = random.below(blocks);
                            claims += u64::from(map.set(block..block + 1));
                        }
                        claims
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(claimed, map.count(), "each block is claimed once");
        let mut model = vec![false; blocks as usize];
        for thread in 0..THREADS {
            let mut random = Random::seeded(round * THREADS + thread);
            for _ in 0..3000 {
                model[random.below(blocks) as usize] = true;
            }
        }
        same(map, &model);
    }
}

#[test]
fn a_reader_finds_every_leaf_it_has_heard_of() {
    // The writer tells, by a plain flag, how far it has come; the reader must then find all of it by the summary.
    let blocks = 200 * GROUP_BLOCKS;
    let (map, told) = (Bitmap::new(blocks), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for group in 0..200 {
                map.set(group * GROUP_BLOCKS + 5..group * GROUP_BLOCKS + 6);
                told.store(group + 1, std::sync::atomic::Ordering::Release);
            }
        });
        loop {
            let known = told.load(Acquire);
            assert!(map.runs().count() as u64 >= known);
            assert!(map.count() >= known);
            if known == 200 {
                break;
            }
        }
    });
}

#[test]
fn a_leaf_found_set_is_found_through_the_summary() {
    // Two set the same blocks side by side: the one that comes second finds the leaf set and writes nothing. If the leaf
    // went before the summary bit, it would now and then find the leaf alone, and nobody would look there.
    const GROUPS: u64 = 2000;
    for _ in 0..8 {
        let map = Bitmap::new(GROUPS * GROUP_BLOCKS);
        let turns = [AtomicU64::new(0), AtomicU64::new(0)];
        let missed = AtomicU64::new(0);
        let (map, turns, lost) = (&map, &turns, &missed);
        std::thread::scope(|scope| {
            for me in 0..2 {
                scope.spawn(move || {
                    for group in 1..GROUPS {
                        turns[me].store(group, std::sync::atomic::Ordering::Release);
                        while turns[1 - me].load(Acquire) < group {
                            std::thread::yield_now();
                        }
                        let block = group * GROUP_BLOCKS;
                        map.set(block..block + 1);
                        if map.next_group(group as usize) != Some(group as usize) {
                            lost.fetch_add(1, Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(missed.into_inner(), 0);
    }
}

#[test]
fn memory_that_is_refused_is_told() {
    let error = Bitmap::try_new(1 << 62).map(|bitmap| bitmap.blocks()).unwrap_err();
    assert!(error.to_string().contains("ulimit -v"), "{error}");
    assert_eq!(std::io::Error::from(error).kind(), std::io::ErrorKind::OutOfMemory);
    assert!(Bitmap::try_new(0).unwrap().is_clean());
    let map = Bitmap::try_new(100).unwrap();
    map.set(3..5);
    assert_eq!(map.count(), 2);
}
