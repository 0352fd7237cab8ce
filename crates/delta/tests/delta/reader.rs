//! One input for everything that reads deltas; `fuzz/` includes this file.

use delta::{Combined, Decoder, Encoder, Event, MAX_DATA, MAX_RECORDS, Method, Reader, Record, Writer};

/// Reads `bytes` as a delta, and holds what was taken to what every delta promises. True if it was a whole one.
///
/// # Panics
/// If a promise is broken.
pub(crate) fn fuzz_reader(bytes: &[u8]) -> bool {
    let mut reader = Reader::new(bytes);
    let mut header = None;
    let mut frames = Vec::new();
    let mut end = 0;
    let totals = loop {
        assert!(
            reader.decoder().units() <= 1 + bytes.len() as u64 / 16,
            "a unit takes sixteen bytes at least"
        );
        match reader.next() {
            Ok(Some(Event::Header(h))) => header = Some(h),
            Ok(Some(Event::Frame(frame))) => {
                let header = header.as_ref().expect("no frame before the header");
                assert!((1..=MAX_RECORDS).contains(&frame.records.len()) && frame.data.len() <= MAX_DATA);
                let mut data = 0;
                for record in &frame.records {
                    assert!(!record.is_empty() && record.end() <= header.size_after);
                    assert!(header.method == Method::Rolling || record.offset() >= end);
                    end = end.max(record.end());
                    match *record {
                        Record::Data { len, .. } => data += len,
                        Record::Zero { .. } | Record::Unsure { .. } => {}
                        Record::Copy { from, len, .. } => {
                            assert!(header.method == Method::Rolling && from + len <= header.size_before);
                        }
                    }
                }
                assert_eq!(data, frame.data.len() as u64);
                assert_eq!(reader.decoder().end(), end);
                frames.push(frame);
            }
            Ok(Some(Event::End(totals))) => break totals,
            Ok(None) => panic!("the end comes with a trailer"),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert!(reader.next().is_err(), "after a refusal nothing is taken");
                return false;
            }
        }
    };
    let header = header.expect("a whole delta has a header");
    assert!(matches!(reader.next(), Ok(None)));
    let digest = reader.decoder().digest();

    // What was taken could have been written.
    let (mut encoder, unit) = Encoder::new(&header, None).expect("a header that was read can be written");
    let mut writer = Writer::new(Vec::new());
    writer.unit(&unit).expect("memory takes all");
    let plain =
        unit.head.len() + 16 == bytes.len().min(unit.head.len() + 16) && bytes[16..].starts_with(&unit.head);
    for frame in frames {
        writer
            .unit(&encoder.frame(frame).expect("a frame that was read can be written"))
            .expect("memory takes all");
    }
    assert_eq!(encoder.totals(), totals);
    // The digest covers the header as it was written, with what a reader may ignore.
    assert!(!plain || encoder.digest() == digest);
    writer.unit(&encoder.trailer()).expect("memory takes all");

    let again = writer.into_inner();
    if let Ok(mut combined) = Combined::new(vec![bytes, &again], None) {
        let mut decoder = Decoder::new();
        while let Ok(Some(unit)) = combined.next() {
            decoder.push(unit).expect("what combines can be read");
        }
    }
    true
}
