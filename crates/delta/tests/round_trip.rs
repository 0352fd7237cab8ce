//! What is written is what is read.

use delta::{Decoder, Encoder, Epoch, Event, Frame, Header, Method, Reader, Record, Writer};
use device::Buf;
use uuid::Uuid;

fn header() -> Header {
    Header {
        stream: Uuid::from_u128(1),
        source: Uuid::from_u128(2),
        chain: vec![Epoch { number: 3, id: Uuid::from_u128(3) }, Epoch { number: 4, id: Uuid::from_u128(4) }],
        size_before: 1 << 30,
        size_after: 1 << 30,
        block_size: 4096,
        method: Method::Tracked,
        binds: None,
        resumes: None,
        fuzzy: false,
    }
}

#[test]
fn data_moves_and_is_not_copied() {
    let (mut encoder, first) = Encoder::new(&header(), None).unwrap();
    let mut decoder = Decoder::new();
    assert!(matches!(decoder.push(first), Ok(Event::Header(h)) if h == header()));
    let data = Buf::new(8192);
    let at = data.as_ptr();
    let records = vec![Record::Data { offset: 4096, len: 8192 }, Record::Zero { offset: 20480, len: 4096 }];
    let unit = encoder.frame(Frame { records: records.clone(), data }).unwrap();
    assert_eq!(unit.body.as_ptr(), at);
    let Ok(Event::Frame(frame)) = decoder.push(unit) else { panic!() };
    assert_eq!(frame.data.as_ptr(), at);
    assert_eq!(frame.records, records);
    assert_eq!(encoder.digest(), decoder.digest());
    assert_eq!(decoder.end(), 24576);
    let totals = encoder.totals();
    assert!(matches!(decoder.push(encoder.trailer()), Ok(Event::End(t)) if t == totals));
}

#[test]
fn streams_carry_units() {
    for compression in [None, Some(1)] {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes);
        let (mut encoder, unit) = Encoder::new(&header(), compression).unwrap();
        writer.unit(&unit).unwrap();
        for i in 0..5 {
            let frame = Frame {
                records: vec![Record::Data { offset: i * 65536, len: 65536 }],
                data: Buf::from(&vec![i as u8; 65536][..]),
            };
            writer.unit(&encoder.frame(frame).unwrap()).unwrap();
        }
        writer.unit(&encoder.trailer()).unwrap();
        let mut reader = Reader::new(&bytes[..]);
        assert_eq!(*reader.header().unwrap(), header());
        for i in 0..5 {
            let Ok(Some(Event::Frame(frame))) = reader.next() else { panic!() };
            assert_eq!(frame.data[..], vec![i as u8; 65536][..]);
        }
        assert!(matches!(reader.next(), Ok(Some(Event::End(t))) if t.data == 5 * 65536));
        assert!(matches!(reader.next(), Ok(None)));
        reader.expect_end().unwrap();
        assert_eq!(compression.is_some(), bytes.len() < 5000);
    }
}
