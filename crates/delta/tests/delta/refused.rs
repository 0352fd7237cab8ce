//! Everything else is refused, with a word on what and where.

use delta::{Decoder, Encoder, Error, Event, Frame, Header, Method, Record, Resume, Unit, UnitKind};
use device::Buf;
use testing::Random;
use uuid::Uuid;

use crate::model::Change;
use crate::model::{delta, epoch, frames, header, read};
use crate::raw;

/// A small delta with one of everything.
fn small(level: Option<i32>) -> Vec<u8> {
    let changes: Vec<_> =
        (0..7).map(|i| Change { offset: i * 300, len: 120, fill: (i % 3 != 1).then_some(i as u8) }).collect();
    let mut header = header(4096, 5000, &[7, 8, 12]);
    header.resumes = Some(Resume { stream: Uuid::from_u128(3), frames: 5, digest: [6; 32] });
    header.binds = Some(Uuid::from_u128(4));
    delta(&header, frames(&changes, 3), level)
}

#[test]
fn cut_off_anywhere() {
    for level in [None, Some(1)] {
        let bytes = small(level);
        read(&bytes).unwrap();
        for len in 0..bytes.len() {
            let error = read(&bytes[..len]).unwrap_err();
            let whole = matches!(error, Error::NoTrailer { .. } | Error::Torn { .. });
            assert!(whole, "{len}: {error}");
        }
    }
}

#[test]
fn any_bit_flipped() {
    for level in [None, Some(1)] {
        let mut bytes = small(level);
        assert_eq!(level.is_some(), bytes.len() < small(None).len(), "compressed where asked");
        for at in 0..bytes.len() {
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                assert!(read(&bytes).is_err(), "bit {bit} of byte {at} flipped, and nobody noticed");
                bytes[at] ^= 1 << bit;
            }
        }
    }
}

#[test]
fn bytes_doubled_or_dropped() {
    let bytes = small(None);
    for at in 0..bytes.len() {
        let mut less = bytes.clone();
        less.remove(at);
        assert!(read(&less).is_err());
        let mut more = bytes.clone();
        more.insert(at, bytes[at]);
        assert!(read(&more).is_err());
    }
    let mut more = bytes.clone();
    more.push(0);
    assert!(matches!(read(&more), Err(Error::AfterEnd { .. })));
}

/// The header's head, and the units of a delta as bytes.
fn apart(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut units = Vec::new();
    let mut rest = bytes;
    while let Some((.., behind)) = raw::split(rest) {
        units.push(rest[..rest.len() - behind.len()].to_vec());
        rest = behind;
    }
    units
}

fn text(result: delta::Result<(Header, Vec<Frame>)>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn units_out_of_place() {
    let units = apart(&small(None));
    let [header, one, two, three, trailer] = &units[..] else { panic!("{} units", units.len()) };
    let join = |parts: &[&Vec<u8>]| read(&parts.iter().flat_map(|p| p.iter().copied()).collect::<Vec<_>>());
    let again = "send or extract the delta again";
    assert_eq!(
        text(join(&[header, two])),
        format!("frame 1 of the delta is in the place of frame 0: {again}")
    );
    assert_eq!(
        text(join(&[header, one, one])),
        format!("frame 0 of the delta is in the place of frame 1: {again}")
    );
    assert_eq!(text(join(&[one])), format!("unit 0 of the delta is a frame instead of the header: {again}"));
    assert_eq!(
        text(join(&[trailer])),
        format!("unit 0 of the delta is a trailer instead of the header: {again}")
    );
    assert_eq!(
        text(join(&[header, one, header])),
        format!("unit 2 of the delta is a header instead of a frame or the trailer: {again}")
    );
    assert_eq!(
        text(join(&[header, one, trailer])),
        format!("unit 2 of the delta is damaged (its totals are not those of the frames before it): {again}")
    );
    assert_eq!(
        text(join(&[header, one, two, three, trailer, three])),
        "the delta continues after its trailer, with unit 5: it was altered, or concatenated with another"
    );
    assert_eq!(
        text(join(&[header, one, two])),
        "the delta ends after 3 units without its trailer, so it is incomplete: send or extract it again"
    );
    assert_eq!(text(join(&[])), "the delta is empty: send or extract it again");
}

#[test]
fn a_frame_of_another_delta() {
    let ours = apart(&small(None));
    let mut other = header(4096, 5000, &[7, 8, 12]);
    other.stream = Uuid::from_u128(99);
    let change = Change { offset: 0, len: 120, fill: Some(0) };
    let theirs = apart(&delta(&other, frames(&[change], 3), None));
    let error = read(&[&ours[0][..], &theirs[1]].concat()).unwrap_err();
    assert!(matches!(error, Error::Foreign { frame: 0 }), "{error}");
    // With the same stream id, but another header: the trailer tells.
    let mut forged = header(4096, 5000, &[6, 12]);
    forged.stream = header(0, 0, &[]).stream;
    let head = apart(&delta(&forged, vec![], None)).remove(0);
    let error = read(&[&head[..], &ours[1], &ours[2], &ours[3], &ours[4]].concat()).unwrap_err();
    assert!(matches!(error, Error::Damaged { unit: 4, .. }), "{error}");
}

#[test]
fn no_delta_at_all() {
    for bytes in [&b"#!/bin/sh\n"[..], &[0; 100], b"dsy?", b"x", b"dsy\0"] {
        assert!(matches!(read(bytes), Err(Error::NotADelta)), "{bytes:?}");
    }
}

#[test]
fn what_a_later_version_may_add() {
    let good = header(4096, 4096, &[1, 2]);
    let units = apart(&delta(&good, vec![], None));
    let head = &units[0][16..units[0].len() - 16];
    let with = |at: usize, byte: u8| {
        let mut head = head.to_vec();
        head[at] = byte;
        head
    };
    let try_head = |head: Vec<u8>| read(&[&raw::unit(1, &raw::sealed(head), &[])[..], &units[1]].concat());
    assert_eq!(
        text(try_head(with(0, 2))),
        "the delta has format version 2, and this dsync reads version 1: use a newer dsync"
    );
    assert_eq!(
        text(try_head(with(7, 0x80))),
        "the delta uses features that this dsync does not know (flags 0x80000000): use a newer dsync"
    );
    assert!(text(try_head(with(2, 9))).contains("unknown method"));
    // What may be ignored is: the header is read, and the digest covers what was not understood.
    let mut longer = with(8, 1);
    longer.extend([1, 2, 3]);
    let longer = raw::sealed(longer);
    let stream = [&raw::unit(1, &longer, &[])[..], &raw::trailer([0; 5], &longer, &[])].concat();
    assert_eq!(read(&stream).unwrap().0, good);
    // Without a flag that says so, nothing may stand there.
    let mut longer = head.to_vec();
    longer.extend([1, 2, 3]);
    assert!(text(try_head(longer)).contains("too long"));
    assert!(text(try_head(with(3, 1))).contains("reserved"));
    assert!(text(try_head(with(68, 1))).contains("too short"), "a life that is not there");
    assert!(text(try_head(head[..70].to_vec())).contains("too short"));
    let mut many = head.to_vec();
    many[64..68].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(try_head(many.clone()), Err(Error::TooLong { what: "epochs in its chain", .. })));
    many[64..72].copy_from_slice(&(2 | u64::from(u32::MAX) << 32).to_le_bytes());
    assert!(matches!(try_head(many), Err(Error::TooLong { what: "lives in its path", .. })));
}

#[test]
fn headers_that_contradict_themselves() {
    let refuse = |change: &dyn Fn(&mut Header), why: &str| {
        let mut header = header(4096, 4096, &[1, 2]);
        change(&mut header);
        let Err(error) = Encoder::new(&header, None) else { panic!("taken, though {why}") };
        assert!(error.to_string().contains(why), "{error}");
    };
    refuse(&|h| h.chain.clear(), "empty");
    refuse(&|h| h.chain.reverse(), "do not ascend");
    refuse(&|h| h.chain.push(epoch(2)), "do not ascend");
    refuse(&|h| h.chain = (0..1 << 17).map(epoch).collect(), "too long");
    refuse(&|h| h.block_size = 0, "block size");
    refuse(&|h| h.block_size = 4097, "block size");
    refuse(&|h| h.size_after = 1 << 63, "out of range");
    refuse(&|h| h.method = Method::Compare, "does not say which");
    refuse(&|h| h.method = Method::Copy, "seed");
    let mut longest = header(4096, 4096, &[]);
    longest.chain = (0..delta::MAX_CHAIN as u64).map(epoch).collect();
    assert_eq!(read(&delta(&longest, vec![], None)).unwrap().0, longest);
    // Of a longer one those in between are left out.
    let mut longer = longest.clone();
    longer.chain.extend((1 << 17..3 << 17).map(epoch));
    longer.limit_chain();
    assert_eq!((longer.chain.first(), longer.to()), (Some(&epoch(0)), Some(&epoch((3 << 17) - 1))));
    assert_eq!(read(&delta(&longer, vec![], None)).unwrap().0, longer);
    longest.limit_chain();
    assert_eq!(longest.chain.len(), delta::MAX_CHAIN);
}

const STREAM: u128 = 0x5;

/// A delta of one frame, its checksums in order, from records in bytes.
fn of_records(
    header: &Header,
    count: u32,
    records: &[u8],
    data: &[u8],
) -> delta::Result<(Header, Vec<Frame>)> {
    let units = apart(&delta(header, vec![], None));
    let frame = raw::frame(&STREAM.to_be_bytes(), 0, count, records, data);
    read(&[&units[0][..], &frame].concat())
}

fn record(kind: u8, offset: i64, len: u64) -> Vec<u8> {
    [&[kind][..], &raw::signed(offset), &raw::varint(len)].concat()
}

#[test]
fn records_that_no_delta_may_have() {
    let tracked = header(10_000, 10_000, &[1, 2]);
    let mut rolling = tracked.clone();
    (rolling.method, rolling.binds) = (Method::Rolling, Some(Uuid::from_u128(1)));
    let zero = |offset, len| record(1, offset, len);
    let copy = |offset, len, from| [&record(2, offset, len)[..], &raw::varint(from), &[7; 16]].concat();
    let refuse = |header: &Header, records: &[Vec<u8>], data: &[u8], why: &str| {
        let error = of_records(header, records.len() as u32, &records.concat(), data).unwrap_err();
        assert!(error.to_string().contains(why), "{error}, not: {why}");
        assert!(!matches!(error, Error::NoTrailer { .. }));
    };
    refuse(
        &tracked,
        &[zero(0, 0)],
        &[],
        "unit 1 of the delta has a record at byte 0 of 0 bytes that is empty",
    );
    refuse(&tracked, &[record(0, 5, 0)], &[], "is empty");
    refuse(&tracked, &[zero(0, 10_001)], &[], "past the end of the disk");
    refuse(&tracked, &[zero(10_000, 1)], &[], "past the end of the disk");
    refuse(&tracked, &[zero(10_001, u64::MAX >> 1)], &[], "its records are malformed");
    refuse(&tracked, &[zero(-1, 1)], &[], "its records are malformed");
    refuse(&tracked, &[zero(i64::MIN, 1)], &[], "its records are malformed");
    refuse(&tracked, &[zero(i64::MAX, 1)], &[], "its records are malformed");
    refuse(&tracked, &[zero(0, u64::MAX)], &[], "its records are malformed");
    refuse(
        &tracked,
        &[zero(100, 10), zero(-1, 10)],
        &[],
        "at byte 109 of 10 bytes that is not behind the previous",
    );
    refuse(
        &tracked,
        &[zero(100, 10), zero(-50, 10)],
        &[],
        "at byte 60 of 10 bytes that is not behind the previous",
    );
    refuse(&tracked, &[copy(0, 10, 0)], &[], "copies, which is allowed in deltas of the method rolling only");
    refuse(&rolling, &[copy(0, 10, 9_991)], &[], "copies from past the end of the disk");
    refuse(&rolling, &[copy(0, 10, u64::MAX)], &[], "copies from beyond");
    refuse(&rolling, &[copy(0, 1 << 21, 0)], &[], "longer than a frame may be");
    refuse(&tracked, &[record(0, 0, 1 << 21)], &[], "longer than a frame may be");
    refuse(&tracked, &[record(0, 0, 5)], b"four", "the length of its data differs from its records");
    refuse(&tracked, &[record(0, 0, 3)], b"four", "the length of its data differs from its records");
    refuse(&tracked, &[zero(0, 3)], b"four", "the length of its data differs from its records");
    refuse(&tracked, &[record(4, 0, 3)], b"", "its records are malformed");
    refuse(&tracked, &[], &[], "no records");
    // A number in more bytes than it needs is another number in disguise.
    refuse(&tracked, &[vec![1, 0x80, 0, 1]], &[], "its records are malformed");
    let one = zero(0, 1);
    assert!(
        of_records(&tracked, 2, &one, &[]).unwrap_err().to_string().contains("its records are malformed")
    );
    assert!(
        of_records(&tracked, 0, &one, &[]).unwrap_err().to_string().contains("its records are malformed")
    );
    assert!(matches!(of_records(&tracked, u32::MAX, &one, &[]), Err(Error::TooLong { .. })));
    let many: Vec<u8> = (0..4097).flat_map(|_| zero(1, 1)).collect();
    assert!(matches!(of_records(&tracked, 4097, &many, &[]), Err(Error::TooLong { found: 4097, .. })));
    // Rolling deltas order their copies as they must.
    let taken = of_records(&rolling, 2, &[copy(100, 10, 50), copy(-110, 10, 100)].concat(), &[]);
    assert!(matches!(taken, Err(Error::NoTrailer { units: 2 })));
}

#[test]
fn frames_that_overlap() {
    let header = header(10_000, 10_000, &[1, 2]);
    let units = apart(&delta(&header, vec![], None));
    let stream = STREAM.to_be_bytes();
    for (second, fine) in [(110, true), (109, false), (0, false), (100, false)] {
        let bytes = [
            &units[0][..],
            &raw::frame(&stream, 0, 1, &record(1, 100, 10), &[]),
            &raw::frame(&stream, 1, 1, &record(1, second, 10), &[]),
        ]
        .concat();
        match read(&bytes).unwrap_err() {
            Error::NoTrailer { units: 3 } if fine => {}
            Error::Record { unit: 2, offset, len: 10, .. } if !fine && offset == second as u64 => {}
            error => panic!("{error}"),
        }
        let (mut encoder, _) = Encoder::new(&header, None).unwrap();
        let frame = |offset| Frame { records: vec![Record::Zero { offset, len: 10 }], data: Buf::new(0) };
        encoder.frame(frame(100)).unwrap();
        assert_eq!(encoder.frame(frame(second as u64)).is_ok(), fine);
    }
}

#[test]
fn lengths_before_memory() {
    let header = apart(&small(None)).remove(0);
    let prefix = |kind: u8, head: u32, body: u32| {
        [&b"dsyn"[..], &[kind, 0, 0, 0], &head.to_le_bytes(), &body.to_le_bytes()].concat()
    };
    for (kind, head, body, what) in [
        (2, u32::MAX, 0, "bytes of metadata"),
        (2, 0, u32::MAX, "bytes of data"),
        (2, 0, (1 << 20) + 1, "bytes of data"),
        (1, u32::MAX, 0, "bytes of metadata"),
        (1, 0, 1, "bytes of data"),
        (3, 73, 0, "bytes of metadata"),
        (3, 72, 1, "bytes of data"),
    ] {
        let error = read(&[&header[..], &prefix(kind, head, body)].concat()).unwrap_err();
        assert!(matches!(error, Error::TooLong { unit: 1, what: w, .. } if w == what), "{error}");
    }
    // Units that come as messages have no prefix, and the same bounds.
    let mut decoder = Decoder::new();
    let long = Unit { kind: UnitKind::Header, head: vec![0; 3 << 20], body: Buf::new(0) };
    assert!(matches!(decoder.push(long), Err(Error::TooLong { .. })));
    let next = Unit { kind: UnitKind::Header, head: vec![], body: Buf::new(0) };
    assert!(matches!(decoder.push(next), Err(Error::Refused { unit: 0 })), "nothing goes on after a refusal");
}

#[test]
fn compressed_data_that_lies() {
    let header = header(1 << 30, 1 << 30, &[1, 2]);
    let units = apart(&delta(&header, vec![], None));
    let stream = STREAM.to_be_bytes();
    let data = vec![7; 60_000];
    let records = record(0, 0, data.len() as u64);
    let packed = zstd::bulk::compress(&data, 1).unwrap();
    let frame = |stated: usize, body: &[u8]| {
        let mut head = raw::frame_head(&stream, 0, 1, &records, &data);
        head[8] = 1;
        head[16..20].copy_from_slice(&(stated as u32).to_le_bytes());
        let check = twox_hash::XxHash3_64::oneshot(body).to_le_bytes();
        head.splice(36..36, check);
        read(&[&units[0][..], &raw::unit(2, &head, body)].concat()).unwrap_err()
    };
    assert!(matches!(frame(data.len(), &packed), Error::NoTrailer { units: 2 }));
    assert!(frame(data.len() - 1, &packed).to_string().contains("cannot be decompressed"));
    assert!(frame(data.len() + 1, &packed).to_string().contains("cannot be decompressed"));
    assert!(frame(data.len(), &data).to_string().contains("cannot be decompressed"));
    assert!(frame(data.len(), &[]).to_string().contains("cannot be decompressed"));
    assert!(matches!(frame((1 << 20) + 1, &packed), Error::TooLong { .. }));
    // A bomb: 64 MiB in a few kilobytes, said to be 60000 bytes.
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
    assert!(frame(data.len(), &bomb).to_string().contains("cannot be decompressed"));
    let noise = Random::seeded(3).bytes(5000);
    assert!(frame(data.len(), &noise).to_string().contains("cannot be decompressed"));
}

#[test]
fn a_header_alone_is_read_and_is_not_whole() {
    let mut decoder = Decoder::new();
    let (_, unit) = Encoder::new(&header(4096, 4096, &[1, 2]), None).unwrap();
    assert!(matches!(decoder.push(unit), Ok(Event::Header(_))));
    assert!(!decoder.is_complete());
    assert_eq!(decoder.units(), 1);
}

#[test]
fn nothing_comes_after_the_trailer() {
    let header = header(4096, 4096, &[1, 2]);
    let zero = || Frame { records: vec![Record::Zero { offset: 0, len: 1 }], data: Buf::new(0) };
    for late in 0..4 {
        let (encoder, first) = Encoder::new(&header, None).unwrap();
        let mut decoder = Decoder::new();
        decoder.push(first).unwrap();
        decoder.push(encoder.trailer()).unwrap();
        let (mut encoder, first) = Encoder::new(&header, None).unwrap();
        let result = match late {
            0 => decoder.push(first).map(|_| ()),
            1 => decoder.push(encoder.frame(zero()).unwrap()).map(|_| ()),
            2 => decoder.push(encoder.trailer()).map(|_| ()),
            _ => {
                let unit = encoder.frame(zero()).unwrap();
                decoder.append(delta::decode_frame(header.stream, 0, unit, None).unwrap()).map(|_| ())
            }
        };
        assert!(matches!(result, Err(Error::AfterEnd { unit: 2 })), "{result:?}");
    }
}
