//! Inputs that nobody would write. A bounded run belongs to the tests: `DSYNC_SEED` repeats one, `DSYNC_FUZZ_RUNS` sets its
//! length. `fuzz/` runs the same function without end.

use crate::model::{Change, changes_of, delta, frames, header};
use crate::raw;
use crate::reader::fuzz_reader;

use delta::{Header, Method, Record, Resume};
use device::Buf;
use testing::{Random, number, rounds};
use uuid::Uuid;

/// Some good delta.
fn good(random: &mut Random) -> Vec<u8> {
    let size = 1 + random.below(20_000);
    let mut header: Header = header(random.below(20_000), size, &[1, 2, 5][..1 + random.index(3)]);
    if random.index(3) == 0 {
        header.method = random.pick(&[Method::Compare, Method::Rolling]);
        header.binds = Some(Uuid::from_u128(u128::from(random.bits())));
    }
    if random.index(4) == 0 {
        header.resumes = Some(Resume { stream: Uuid::nil(), frames: random.bits(), digest: [1; 32] });
    }
    let changes: Vec<Change> = changes_of(random, size);
    let mut frames = frames(&changes, 1 + random.index(5));
    if header.method == Method::Rolling && header.size_before > 0 {
        let copy =
            Record::Copy { offset: 0, len: 1, from: random.bits() % header.size_before, hash: [2; 16] };
        frames.insert(0, delta::Frame { records: vec![copy], data: Buf::new(0) });
    }
    delta(&header, frames, random.pick(&[None, Some(1)]))
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + random.index(3) {
        let at = random.index(bytes.len());
        match random.index(8) {
            _ if bytes.is_empty() => bytes.push(random.bits() as u8),
            0 => bytes[at] ^= 1 << random.index(8),
            1 => bytes[at] = random.pick(&[0, 1, 0x7f, 0x80, 0xff]),
            2 => bytes.truncate(at),
            3 => {
                let len = random.index(20);
                let noise = random.bytes(len);
                bytes.splice(at..at, noise);
            }
            4 => {
                let end = at + random.index(40).min(bytes.len() - at);
                bytes.drain(at..end);
            }
            5 => {
                let end = at + random.index(200).min(bytes.len() - at);
                let part = bytes[at..end].to_vec();
                let to = random.index(bytes.len());
                bytes.splice(to..to, part);
            }
            6 => {
                // A number that means something.
                let value =
                    random.pick(&[0, 1, u64::from(u32::MAX), 1 << 20, (1 << 20) + 1, u64::MAX, 1 << 63]);
                let width = random.pick(&[4, 8]).min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
            _ => {
                let from = random.index(other.len());
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            }
        }
    }
}

#[test]
fn the_reader_stands_anything() {
    let seed = testing::seed("the reader of deltas");
    let runs = number("DSYNC_FUZZ_RUNS").unwrap_or_else(|| rounds(30_000, 3_000_000));
    let mut accepted = 0;
    for run in 0..runs {
        // Each run has a seed of its own, told where it fails.
        let own = seed.wrapping_add(run);
        let outcome = std::panic::catch_unwind(|| {
            let mut random = Random::seeded(own);
            let mut bytes = match random.index(10) {
                0 => {
                    let len = random.index(300);
                    random.bytes(len)
                }
                _ => good(&mut random),
            };
            let other = good(&mut random);
            mutate(&mut random, &mut bytes, &other);
            if random.index(3) > 0 {
                bytes = raw::repair(&bytes);
            }
            fuzz_reader(&bytes)
        });
        match outcome {
            Ok(whole) => accepted += u64::from(whole),
            Err(panic) => {
                eprintln!("run {run} failed: DSYNC_SEED={own} DSYNC_FUZZ_RUNS=1 repeats it");
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{accepted} of {runs} were taken for whole deltas");
    assert!(runs < 10_000 || accepted > 0, "nothing gets behind the checksums: the runs prove little");
}
