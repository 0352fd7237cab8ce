//! Combining and then merging is merging one after the other.

use delta::{Combined, Error, Frame, Header, Method, Record, Resume, Totals, Writer};
use device::Buf;
use proptest::prelude::*;
use uuid::Uuid;

use crate::model::{Change, changes, delta, epoch, frames, header, merge, read};

fn fold(first: &[u8], second: &[u8], level: Option<i32>) -> delta::Result<Vec<u8>> {
    fold_all(&[first, second], level)
}

fn fold_all(deltas: &[&[u8]], level: Option<i32>) -> delta::Result<Vec<u8>> {
    let mut writer = Writer::new(Vec::new());
    let totals = combine(deltas, level, &mut writer)?;
    let bytes = writer.into_inner();
    let (_, frames) = read(&bytes)?;
    assert_eq!(totals.frames, frames.len() as u64);
    Ok(bytes)
}

fn combine(deltas: &[&[u8]], level: Option<i32>, writer: &mut Writer<Vec<u8>>) -> delta::Result<Totals> {
    let mut combined = Combined::new(deltas.to_vec(), level)?;
    while let Some(unit) = combined.next()? {
        writer.unit(&unit)?;
    }
    Ok(combined.totals())
}

fn sizes() -> impl Strategy<Value = [u64; 4]> {
    // Growing, shrinking, and often staying.
    proptest::collection::vec(prop_oneof![Just(12_000u64), 0u64..16_000], 4)
        .prop_map(|s| [s[0], s[1], s[2], s[3]])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn as_one_after_the_other(
        (sizes, one, two, three) in sizes().prop_flat_map(|s| (Just(s), changes(s[1]), changes(s[2]), changes(s[3]))),
        per_frame in 1usize..8,
        level in proptest::option::of(1i32..3),
        noise: u8,
    ) {
        let one = delta(&header(sizes[0], sizes[1], &[1, 2]), frames(&one, per_frame), None);
        let two = delta(&header(sizes[1], sizes[2], &[2, 3]), frames(&two, per_frame + 1), Some(1));
        let three = delta(&header(sizes[2], sizes[3], &[3, 4]), frames(&three, per_frame), None);
        let start: Vec<u8> = (0..sizes[0]).map(|i| (i as u8).wrapping_mul(31).wrapping_add(noise) | 1).collect();
        let mut expected = start.clone();
        for delta in [&one, &two] {
            merge(&mut expected, delta);
        }
        let pair = fold(&one, &two, level).unwrap();
        let mut disk = start.clone();
        merge(&mut disk, &pair);
        prop_assert!(disk == expected);
        merge(&mut expected, &three);
        // Three fold either way, and at once.
        for all in [
            fold(&pair, &three, level).unwrap(),
            fold(&one, &fold(&two, &three, None).unwrap(), level).unwrap(),
            fold_all(&[&one, &two, &three], level).unwrap(),
        ] {
            let mut disk = start.clone();
            merge(&mut disk, &all);
            prop_assert!(disk == expected);
            let (header, _) = read(&all).unwrap();
            prop_assert_eq!(header.chain, [1, 2, 3, 4].map(epoch));
            prop_assert_eq!((header.size_before, header.size_after), (sizes[0], sizes[3]));
        }
    }

    #[test]
    fn a_seed_and_what_follows_is_a_seed(seeded in changes(12_000), later in changes(12_000)) {
        let mut first = header(0, 12_000, &[5]);
        first.method = Method::Copy;
        let first = delta(&first, frames(&seeded, 3), None);
        let second = delta(&header(12_000, 12_000, &[5, 7]), frames(&later, 3), None);
        let both = fold(&first, &second, None).unwrap();
        let (header, _) = read(&both).unwrap();
        prop_assert!(header.is_seed());
        prop_assert_eq!(header.chain, [epoch(7)]);
        let (mut disk, mut expected) = (Vec::new(), Vec::new());
        merge(&mut disk, &both);
        merge(&mut expected, &first);
        merge(&mut expected, &second);
        prop_assert!(disk == expected);
    }
}

fn zero(offset: u64, len: u64) -> Frame {
    Frame { records: vec![Record::Zero { offset, len }], data: Buf::new(0) }
}

#[test]
fn what_was_cut_off_does_not_return() {
    let shrink = delta(&header(10_000, 4000, &[1, 2]), vec![zero(0, 10)], None);
    let grow = delta(&header(4000, 9000, &[2, 3]), vec![zero(8000, 500)], None);
    let both = fold(&shrink, &grow, None).unwrap();
    let mut disk = vec![1; 10_000];
    merge(&mut disk, &both);
    assert_eq!(disk.len(), 9000);
    assert!(disk[4000..].iter().all(|&b| b == 0));
    // It is one record, not three.
    assert_eq!(read(&both).unwrap().1[0].records.last(), Some(&Record::Zero { offset: 4000, len: 5000 }));
}

/// What the second adds to the disk of its first epoch, the first may have written to: it begins as zeroes.
#[test]
fn what_the_first_wrote_where_the_second_names_nothing_is_zero() {
    let first = delta(
        &header(4000, 9000, &[1, 2]),
        frames(&[Change { offset: 8000, len: 500, fill: Some(7) }], 1),
        None,
    );
    let second = delta(&header(4000, 9000, &[1, 2, 3]), vec![zero(0, 10)], None);
    let mut disk = vec![1; 4000];
    merge(&mut disk, &fold(&first, &second, None).unwrap());
    assert!(disk.len() == 9000 && disk[4000..].iter().all(|&b| b == 0));
}

#[test]
fn the_second_may_begin_before_the_first_ends() {
    let first = delta(&header(10_000, 10_000, &[1, 2, 3]), vec![zero(0, 10)], None);
    let second = delta(&header(10_000, 10_000, &[2, 3, 4]), vec![zero(5, 10)], None);
    let (header_read, frames) = read(&fold(&first, &second, None).unwrap()).unwrap();
    assert_eq!(header_read.chain, [1, 2, 3, 4].map(epoch));
    assert_eq!(frames[0].records, [Record::Zero { offset: 0, len: 15 }]);
}

/// What the later delta could not read hides what the earlier one wrote there, and the other way round.
#[test]
fn the_later_of_data_and_doubt_wins() {
    let (data, unsure) =
        (|offset, len| Record::Data { offset, len }, |offset, len| Record::Unsure { offset, len });
    let of = |epochs: &[u64], records: &[Record]| {
        let bytes = records.iter().filter(|r| matches!(r, Record::Data { .. })).map(Record::len).sum::<u64>();
        let data = Buf::from(&vec![epochs[0] as u8; bytes as usize][..]);
        delta(&header(10_000, 10_000, epochs), vec![Frame { records: records.to_vec(), data }], None)
    };
    let first = of(&[1, 2], &[data(0, 100), unsure(200, 100)]);
    let second = of(&[2, 3], &[unsure(50, 50), unsure(100, 50), data(250, 100)]);
    let frames = read(&fold(&first, &second, None).unwrap()).unwrap().1;
    assert_eq!(frames[0].records, [data(0, 50), unsure(50, 100), unsure(200, 50), data(250, 100)]);
    assert_eq!(frames[0].data[..], [[1; 50].to_vec(), [2; 100].to_vec()].concat());
}

#[test]
fn large_ones_fill_their_frames() {
    let size = 64 << 20;
    let piece = |i: u64, fill| Change { offset: i * 300_000, len: 200_000, fill: Some(fill) };
    let first: Vec<_> = (0..200).map(|i| piece(i, 1)).collect();
    let second: Vec<_> = (0..200).step_by(3).map(|i| piece(i, 9)).collect();
    let first = delta(&header(size, size, &[1, 2]), frames(&first, 4), None);
    let second = delta(&header(size, size, &[2, 3]), frames(&second, 4), Some(1));
    let both = fold(&first, &second, None).unwrap();
    let (mut disk, mut expected) = (vec![0; size as usize], vec![0; size as usize]);
    merge(&mut disk, &both);
    merge(&mut expected, &first);
    merge(&mut expected, &second);
    assert!(disk == expected);
    let (_, frames) = read(&both).unwrap();
    assert!(frames.len() <= 200 * 200_000 / (900 << 10) + 1, "{} frames", frames.len());
}

#[test]
fn two_that_do_not_belong_together() {
    let first = header(10_000, 10_000, &[1, 2]);
    let second = header(10_000, 10_000, &[2, 3]);
    let refuse = |change: &dyn Fn(&mut Header, &mut Header), why: &str| {
        let (mut first, mut second) = (first.clone(), second.clone());
        change(&mut first, &mut second);
        let (first, second) =
            (delta(&first, vec![zero(0, 10)], None), delta(&second, vec![zero(0, 10)], None));
        let error = fold(&first, &second, None).unwrap_err().to_string();
        assert!(error.contains(why), "{error}, not: {why}");
    };
    refuse(&|_, s| s.source = Uuid::from_u128(8), "are of different sources");
    refuse(
        &|_, s| s.chain.remove(0).number = 0,
        "the first delta ends at epoch 2 (00000000), the second covers",
    );
    refuse(&|_, s| s.chain[0].id = Uuid::from_u128(8), "which do not include it");
    refuse(&|_, s| s.size_before = 20_000, "another disk size");
    refuse(&|_, s| s.binds = Some(Uuid::nil()), "the second delta was not tracked");
    refuse(
        &|_, s| (s.method, s.binds) = (Method::Compare, Some(Uuid::nil())),
        "the second delta was not tracked",
    );
    let resume = Resume { stream: Uuid::nil(), frames: 1, digest: [0; 32] };
    refuse(&|f, _| f.resumes = Some(resume), "the first delta continues an interrupted one");
    refuse(&|_, s| s.resumes = Some(resume), "the second delta continues an interrupted one");
    refuse(&|f, _| (f.method, f.binds) = (Method::Rolling, Some(Uuid::nil())), "may copy");
}

#[test]
fn what_the_first_is_bound_to_binds_both() {
    let mut first = header(10_000, 10_000, &[2]);
    (first.method, first.binds) = (Method::Compare, Some(Uuid::from_u128(77)));
    let mut second = header(10_000, 10_000, &[2, 3]);
    second.fuzzy = true;
    let (first, second) = (delta(&first, vec![zero(0, 10)], None), delta(&second, vec![], None));
    let (both, _) = read(&fold(&first, &second, None).unwrap()).unwrap();
    assert_eq!((both.method, both.binds, both.fuzzy), (Method::Compare, Some(Uuid::from_u128(77)), true));
    assert_eq!(both.chain, [epoch(3)]);
}

#[test]
fn damage_in_either_leaves_no_delta() {
    let first = delta(&header(10_000, 10_000, &[1, 2]), vec![zero(0, 10), zero(50, 10)], None);
    let second = delta(&header(10_000, 10_000, &[2, 3]), vec![zero(5, 10), zero(70, 10)], None);
    for flip_first in [true, false] {
        for at in 0..first.len().max(second.len()) {
            let (mut first, mut second) = (first.clone(), second.clone());
            let damaged = if flip_first { &mut first } else { &mut second };
            let Some(byte) = damaged.get_mut(at) else { continue };
            *byte ^= 4;
            let mut writer = Writer::new(Vec::new());
            let error = combine(&[&first, &second], None, &mut writer).unwrap_err();
            let damaged = if flip_first { 1 } else { 2 };
            assert!(matches!(&error, Error::Of { number, .. } if *number == damaged), "{error}");
            assert!(read(&writer.into_inner()).is_err(), "what was written is taken for a delta");
        }
    }
}

#[test]
fn what_follows_either_is_told() {
    let first = delta(&header(10_000, 10_000, &[1, 2]), vec![zero(0, 10)], None);
    let second = delta(&header(10_000, 10_000, &[2, 3]), vec![zero(5, 10)], None);
    let with = |one: &[u8], more: &[u8]| [one, more].concat();
    for (first, second, expected) in [
        (first.clone(), second.clone(), None),
        (with(&first, b"more"), second.clone(), Some(1)),
        (with(&first, &second), second.clone(), Some(1)),
        (first.clone(), with(&second, &second), Some(2)),
    ] {
        let mut combined = Combined::new(vec![&first[..], &second[..]], None).unwrap();
        while combined.next().unwrap().is_some() {}
        let number = match combined.expect_end() {
            Ok(()) => None,
            Err(Error::Of { number, .. }) => Some(number),
            Err(other) => panic!("{other}"),
        };
        assert_eq!(number, expected);
    }
}

/// Deltas that are bound to one another's states, as those that lead a replica back: the result leads to the state of the last.
#[test]
fn what_is_bound_to_the_state_before_continues_it() {
    let state = |n: u128| Uuid::from_u128(n);
    let step = |from: u128, to: u128, epoch_number: u64, sizes: (u64, u64)| {
        let mut header = header(sizes.0, sizes.1, &[epoch_number]);
        (header.stream, header.binds) = (state(to), Some(state(from)));
        header
    };
    let first = step(9, 8, 5, (10_000, 8000));
    let second = step(8, 7, 4, (8000, 12_000));
    let (one, two) = (delta(&first, vec![zero(0, 10)], None), delta(&second, vec![zero(5, 10)], None));
    let (both, frames) = read(&fold(&one, &two, None).unwrap()).unwrap();
    assert_eq!((both.binds, both.stream, &both.chain[..]), (Some(state(9)), state(7), &[epoch(4)][..]));
    assert_eq!((both.size_before, both.size_after), (10_000, 12_000));
    let zeroes = [Record::Zero { offset: 0, len: 15 }, Record::Zero { offset: 8000, len: 4000 }];
    assert_eq!(frames[0].records, zeroes);
    // Another state, or another size of the same.
    for wrong in [step(6, 7, 4, (8000, 12_000)), step(8, 7, 4, (8001, 12_000))] {
        let wrong = delta(&wrong, vec![zero(5, 10)], None);
        assert!(matches!(fold(&one, &wrong, None), Err(Error::Uncombinable { number: 2, .. })));
    }
}
