//! Figures, for those who ask: `cargo test --release -p delta speed -- --ignored --nocapture`.

use std::time::Instant;

use delta::{Decoder, Encoder, Event, Frame, Record};
use device::Buf;

use crate::model::{Random, header};

#[test]
#[ignore = "prints figures, proves nothing"]
fn speed_of_frames() {
    let size = 1 << 40;
    let random = Random(1).bytes(1 << 20);
    let text: Vec<u8> = (0..1 << 20).map(|i| b"The quick brown fox "[(i * i / 7 + i) % 20]).collect();
    for (name, data, level) in
        [("stored", &random, None), ("random, zstd 1", &random, Some(1)), ("text, zstd 1", &text, Some(1))]
    {
        let header = header(size, size, &[1, 2]);
        let (mut encoder, unit) = Encoder::new(&header, level).unwrap();
        let mut decoder = Decoder::new();
        decoder.push(unit).unwrap();
        let mut spare = Buf::from(&data[..]);
        let (mut encoding, mut decoding) = (0.0, 0.0);
        let frames = 2000;
        for i in 0..frames {
            let records =
                (0..256).map(|j| Record::Data { offset: (i * 256 + j) * 40960, len: 4096 }).collect();
            let began = Instant::now();
            let unit = encoder.frame(Frame { records, data: spare }).unwrap();
            encoding += began.elapsed().as_secs_f64();
            let began = Instant::now();
            let Ok(Event::Frame(frame)) = decoder.push(unit) else { panic!() };
            decoding += began.elapsed().as_secs_f64();
            spare = frame.data;
        }
        let gigabytes = frames as f64 * (1 << 20) as f64 / 1e9;
        println!("{name}: encode {:.1} GB/s, decode {:.1} GB/s", gigabytes / encoding, gigabytes / decoding);
    }
    let began = Instant::now();
    let mut sum = 0u128;
    for _ in 0..2000 {
        sum ^= twox_hash::XxHash3_128::oneshot(std::hint::black_box(&random));
    }
    std::hint::black_box(sum);
    println!("the hash alone: {:.1} GB/s", 2000.0 * (1 << 20) as f64 / 1e9 / began.elapsed().as_secs_f64());
}
