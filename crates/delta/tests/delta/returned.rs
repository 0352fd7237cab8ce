//! What is written is what is read.

use delta::{
    Compressor, Decoder, Decompressor, Encoder, Event, Frame, Method, Reader, Record, Resume, Units,
    decode_frame, encode_frame,
};
use device::Buf;
use proptest::prelude::*;
use testing::Random;
use uuid::Uuid;

use crate::model::{changes, delta, epoch, frames, header, merge, read};
use crate::raw;

fn same(a: &[Frame], b: &[Frame]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.records == b.records && a.data[..] == b.data[..])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_delta_returns(
        changes in changes(20_000),
        per_frame in 1usize..6,
        level in proptest::option::of(-3i32..4),
        before in 0u64..30_000,
        binds: Option<u128>,
        resumes: Option<(u128, u64, [u8; 32])>,
        fuzzy: bool,
        method in prop_oneof![Just(Method::Tracked), Just(Method::Compare), Just(Method::Rolling), Just(Method::Copy)],
        middle in proptest::collection::btree_set(2u64..1000, 0..40),
    ) {
        let mut chain = vec![1];
        chain.extend(middle);
        chain.push(1000);
        let mut header = header(before, 20_000, &chain);
        header.method = method;
        header.fuzzy = fuzzy;
        header.binds = binds.map(Uuid::from_u128);
        header.resumes = resumes.map(|(stream, frames, digest)| Resume { stream: Uuid::from_u128(stream), frames, digest });
        if matches!(method, Method::Compare | Method::Rolling) && header.resumes.is_none() {
            header.binds = Some(Uuid::from_u128(9));
        }
        if header.is_seed() {
            header.chain = vec![epoch(1000)];
        }
        let bytes = delta(&header, frames(&changes, per_frame), level);
        let (read_header, read_frames) = read(&bytes).unwrap();
        prop_assert_eq!(read_header, header);
        prop_assert!(same(&read_frames, &frames(&changes, per_frame)));
        let mut disk = vec![1; before as usize];
        merge(&mut disk, &bytes);
        let once = disk.clone();
        merge(&mut disk, &bytes);
        prop_assert!(disk == once, "merging again is harmless");
    }

    #[test]
    fn copies_in_any_order_return(parts in proptest::collection::vec((0u64..5000, 1u64..3000, 0u64..5000, any::<[u8; 16]>()), 1..30)) {
        let mut header = header(8000, 8000, &[1]);
        (header.method, header.binds) = (Method::Rolling, Some(Uuid::from_u128(7)));
        let records: Vec<Record> =
            parts.iter().map(|&(offset, len, from, hash)| Record::Copy { offset, len, from, hash }).collect();
        let bytes = delta(&header, vec![Frame { records: records.clone(), data: Buf::new(0) }], None);
        let (_, frames) = read(&bytes).unwrap();
        prop_assert_eq!(&frames[0].records, &records);
    }
}

#[test]
fn data_moves_and_is_not_copied() {
    let header = header(1 << 30, 1 << 30, &[3, 4]);
    let (mut encoder, first) = Encoder::new(&header, None).unwrap();
    let mut decoder = Decoder::new();
    assert!(matches!(decoder.push(first), Ok(Event::Header(h)) if h == header));
    let data = Buf::new(8192);
    let at = data.as_ptr();
    let records = vec![Record::Data { offset: 4096, len: 8192 }, Record::Zero { offset: 20480, len: 4096 }];
    let unit = encoder.frame(Frame { records: records.clone(), data }).unwrap();
    assert_eq!(unit.body.as_ptr(), at);
    let Ok(Event::Frame(frame)) = decoder.push(unit) else { panic!() };
    assert_eq!(frame.data.as_ptr(), at);
    assert_eq!(frame.records, records);
    assert_eq!(encoder.digest(), decoder.digest());
    assert_eq!((decoder.end(), encoder.end()), (24576, 24576));
    assert_eq!((decoder.units(), decoder.frames()), (2, 1));
    let totals = encoder.totals();
    assert!(matches!(decoder.push(encoder.trailer()), Ok(Event::End(t)) if t == totals));
    assert!(decoder.is_complete());
}

#[test]
fn a_frame_may_be_full() {
    let header = header(u64::MAX >> 1, u64::MAX >> 1, &[3, 4]);
    let many: Vec<Record> = (0..4096).map(|i| Record::Data { offset: i * 1_000_000_007, len: 256 }).collect();
    let one = vec![Record::Data { offset: 1 << 50, len: 1 << 20 }];
    let rest = vec![Record::Zero { offset: 1 << 51, len: (u64::MAX >> 1) - (1 << 51) }];
    let data = Random::seeded(1).bytes(1 << 20);
    let make = || {
        let (a, b) = (Buf::from(&data[..]), Buf::from(&data[..]));
        vec![
            Frame { records: many.clone(), data: a },
            Frame { records: one.clone(), data: b },
            Frame { records: rest.clone(), data: Buf::new(0) },
        ]
    };
    for level in [None, Some(1)] {
        let bytes = delta(&header, make(), level);
        assert!(same(&read(&bytes).unwrap().1, &make()));
    }
}

#[test]
fn what_shrinks_is_compressed_and_what_does_not_is_stored() {
    let header = header(1 << 30, 1 << 30, &[1, 2]);
    let mut random = Random::seeded(5);
    let noise = random.bytes(1 << 18);
    let text: Vec<u8> = (0..1 << 18).map(|_| b"etaoin shrdlu"[random.index(13)]).collect();
    // A sixteenth of zeroes in noise is worth something.
    let mixed: Vec<u8> =
        noise.iter().enumerate().map(|(i, &b)| if i / 4096 % 16 == 3 { 0 } else { b }).collect();
    for (data, fits) in [(&noise, 1 << 18..=1 << 18), (&text, 0..=1 << 17), (&mixed, 0..=(1 << 18) / 32 * 31)]
    {
        let (mut encoder, unit) = Encoder::new(&header, Some(1)).unwrap();
        let mut decoder = Decoder::new();
        decoder.push(unit).unwrap();
        let records = vec![Record::Data { offset: 0, len: 1 << 18 }];
        let unit = encoder.frame(Frame { records, data: Buf::from(&data[..]) }).unwrap();
        assert!(fits.contains(&unit.body.len()), "{} bytes", unit.body.len());
        let Ok(Event::Frame(frame)) = decoder.push(unit) else { panic!() };
        assert_eq!(frame.data[..], data[..]);
    }
}

#[test]
fn threads_share_the_work() {
    let header = header(1 << 30, 1 << 30, &[1, 2]);
    let frame = |i: u64| Frame {
        records: vec![Record::Data { offset: i * 8192, len: 4096 }],
        data: Buf::from(&[i as u8; 4096][..]),
    };
    let (mut encoder, first) = Encoder::new(&header, None).unwrap();
    let mut alone = Encoder::new(&header, Some(3)).unwrap().0;
    let encoded: Vec<_> = std::thread::scope(|scope| {
        let make = |i| {
            scope.spawn(move || {
                encode_frame(header_stream(), i, frame(i), Some(&mut Compressor::new(3).unwrap()))
            })
        };
        let threads: Vec<_> = (0..8).map(make).collect();
        threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
    });
    let mut decoder = Decoder::new();
    let stream = header.stream;
    decoder.push(first).unwrap();
    let units: Vec<_> = encoded.into_iter().map(|e| encoder.append(e).unwrap()).collect();
    let decoded: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = units
            .into_iter()
            .zip(0..)
            .map(|(unit, i)| {
                scope.spawn(move || decode_frame(stream, i, unit, Some(&mut Decompressor::new().unwrap())))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
    });
    for (decoded, i) in decoded.into_iter().zip(0..) {
        alone.frame(frame(i)).unwrap();
        assert_eq!(decoder.append(decoded).unwrap().data[..], frame(i).data[..]);
    }
    assert_eq!(decoder.digest(), alone.digest());
    decoder.push(alone.trailer()).unwrap();
}

fn header_stream() -> Uuid {
    header(0, 0, &[1]).stream
}

#[test]
fn a_frame_out_of_turn_is_refused_by_both_ends() {
    let header = header(1 << 30, 1 << 30, &[1, 2]);
    let frame = || Frame { records: vec![Record::Zero { offset: 0, len: 1 }], data: Buf::new(0) };
    let (mut encoder, unit) = Encoder::new(&header, None).unwrap();
    let encoded = encode_frame(header.stream, 1, frame(), None).unwrap();
    let error = encoder.append(encoded).unwrap_err();
    assert!(matches!(error, delta::Error::Sequence { expected: 0, found: 1 }), "{error}");
    let mut decoder = Decoder::new();
    decoder.push(unit).unwrap();
    let late = encode_frame(header.stream, 1, frame(), None).unwrap();
    let late = Encoder::new(&header, None).unwrap().0.append(late).map(|_| ()).unwrap_err();
    assert!(matches!(late, delta::Error::Sequence { .. }));
    let mut other = Encoder::new(&header, None).unwrap().0;
    other.frame(frame()).unwrap();
    let second =
        other.frame(Frame { records: vec![Record::Zero { offset: 5, len: 1 }], data: Buf::new(0) }).unwrap();
    let decoded = decode_frame(header.stream, 1, second, None).unwrap();
    let error = decoder.append(decoded).unwrap_err();
    assert!(matches!(error, delta::Error::Sequence { expected: 0, found: 1 }), "{error}");
}

#[test]
fn an_interrupted_delta_tells_where_it_stopped() {
    let header = header(1 << 30, 1 << 30, &[1, 2]);
    let all: Vec<_> = (0..4)
        .map(|i| Frame {
            records: vec![Record::Data { offset: i * 65536, len: 65536 }],
            data: Buf::from(&[i as u8 + 1; 65536][..]),
        })
        .collect();
    let bytes = delta(&header, all, None);
    let mut units = Units::new(&bytes[..]);
    let mut ends = vec![0];
    while units.next().unwrap().is_some() {
        ends.push(units.bytes() as usize);
    }
    assert_eq!(ends.len(), 7);
    assert_eq!(*ends.last().unwrap(), bytes.len());
    // Both ends name the same digest for the same part.
    let mut encoder = Encoder::new(&header, None).unwrap().0;
    for whole in 1..6 {
        for extra in [0, 1, 15, 16, 40, 80] {
            let mut reader = Reader::new(&bytes[..ends[whole] + extra]);
            let error = loop {
                match reader.next() {
                    Ok(event) => assert!(event.is_some()),
                    Err(error) => break error,
                }
            };
            match extra {
                0 => assert!(
                    matches!(error, delta::Error::NoTrailer { units } if units == whole as u64),
                    "{error}"
                ),
                _ => assert!(
                    matches!(error, delta::Error::Torn { unit, .. } if unit == whole as u64),
                    "{error}"
                ),
            }
            assert_eq!(reader.decoder().frames(), whole as u64 - 1);
            assert_eq!(reader.decoder().end(), (whole as u64 - 1) * 65536);
            assert_eq!(reader.decoder().digest(), encoder.digest());
        }
        if whole < 5 {
            let i = whole as u64 - 1;
            encoder
                .frame(Frame {
                    records: vec![Record::Data { offset: i * 65536, len: 65536 }],
                    data: Buf::from(&[i as u8 + 1; 65536][..]),
                })
                .unwrap();
        }
    }
}

#[test]
fn nothing_behind_the_trailer_is_read() {
    let header = header(4096, 4096, &[1, 2]);
    let one = delta(&header, vec![], None);
    let two = [one.clone(), one.clone()].concat();
    let mut reader = Reader::new(&two[..]);
    while reader.next().unwrap().is_some() {}
    assert_eq!(reader.bytes(), one.len() as u64);
    assert_eq!(reader.into_inner(), &one[..]);
    let mut reader = Reader::new(&two[..]);
    while reader.next().unwrap().is_some() {}
    assert!(matches!(reader.expect_end(), Err(delta::Error::AfterEnd { unit: 2 })));
}

#[test]
fn a_header_fits_the_positions_of_its_chain() {
    let mut header = header(4096, 4096, &[3, 5, 9]);
    for number in 0..12 {
        assert_eq!(header.fits(&epoch(number)), [3, 5, 9].contains(&number));
    }
    let mut copied = epoch(5);
    copied.id = Uuid::from_u128(1);
    assert!(!header.fits(&copied), "a number alone is nothing");
    assert_eq!((header.position(&epoch(5)), header.to()), (Some(1), Some(&epoch(9))));
    header.binds = Some(Uuid::from_u128(1));
    assert!(!header.fits(&epoch(5)), "it is bound to a state, not an epoch");
}

#[test]
fn the_description_makes_the_same_bytes() {
    let header = header(0x1000, 0x2000, &[3, 4]);
    let records = vec![Record::Data { offset: 10, len: 3 }, Record::Zero { offset: 4096, len: 300 }];
    let bytes = delta(&header, vec![Frame { records, data: Buf::from(&b"abc"[..]) }], None);

    let mut head = vec![1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0];
    head.extend(header.stream.as_bytes());
    head.extend(header.source.as_bytes());
    head.extend([0x1000u64.to_le_bytes(), 0x2000u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
    for number in [3, 4] {
        head.extend(epoch(number).number.to_le_bytes());
        head.extend(epoch(number).id.as_bytes());
    }
    let head = raw::sealed(head);
    let mut expected = raw::unit(raw::HEADER, &head, &[]);
    let records =
        [&[0][..], &raw::signed(10), &raw::varint(3), &[1], &raw::signed(4096 - 13), &raw::varint(300)]
            .concat();
    expected.extend(raw::frame(header.stream.as_bytes(), 0, 2, &records, b"abc"));
    let hash = raw::frame_hash(header.stream.as_bytes(), 0, 2, &records, b"abc");
    expected.extend(raw::trailer([1, 2, 3, 300, 0], &head, &[hash]));
    assert_eq!(bytes, expected);
}
