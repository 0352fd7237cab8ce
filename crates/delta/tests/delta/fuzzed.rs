//! Inputs that nobody would write. A bounded run belongs to the tests: `DSYNC_SEED` repeats one, `DSYNC_FUZZ_RUNS` sets its
//! length. `fuzz/` runs the same function without end.

use crate::model::{Change, Random, changes_of, delta, frames, header};
use crate::raw;
use crate::reader::fuzz_reader;

use delta::{Header, Method, Record, Resume};
use device::Buf;
use uuid::Uuid;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Some good delta.
fn good(random: &mut Random) -> Vec<u8> {
    let size = 1 + random.below(20_000) as u64;
    let mut header: Header = header(random.below(20_000) as u64, size, &[1, 2, 5][..1 + random.below(3)]);
    if random.below(3) == 0 {
        header.method = [Method::Compare, Method::Rolling][random.below(2)];
        header.binds = Some(Uuid::from_u128(u128::from(random.next())));
    }
    if random.below(4) == 0 {
        header.resumes = Some(Resume { stream: Uuid::nil(), frames: random.next(), digest: [1; 32] });
    }
    let changes: Vec<Change> = changes_of(random, size);
    let mut frames = frames(&changes, 1 + random.below(5));
    if header.method == Method::Rolling && header.size_before > 0 {
        let copy =
            Record::Copy { offset: 0, len: 1, from: random.next() % header.size_before, hash: [2; 16] };
        frames.insert(0, delta::Frame { records: vec![copy], data: Buf::new(0) });
    }
    delta(&header, frames, [None, Some(1)][random.below(2)])
}

fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + random.below(3) {
        let at = random.below(bytes.len());
        match random.below(8) {
            _ if bytes.is_empty() => bytes.push(random.next() as u8),
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            2 => bytes.truncate(at),
            3 => {
                let len = random.below(20);
                let noise = random.bytes(len);
                bytes.splice(at..at, noise);
            }
            4 => {
                let end = at + random.below(40).min(bytes.len() - at);
                bytes.drain(at..end);
            }
            5 => {
                let end = at + random.below(200).min(bytes.len() - at);
                let part = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, part);
            }
            6 => {
                // A number that means something.
                let value =
                    [0, 1, u64::from(u32::MAX), 1 << 20, (1 << 20) + 1, u64::MAX, 1 << 63][random.below(7)];
                let width = [4, 8][random.below(2)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
            _ => {
                let from = random.below(other.len());
                bytes.truncate(at);
                bytes.extend(&other[from..]);
            }
        }
    }
}

#[test]
fn the_reader_stands_anything() {
    let seed = number("DSYNC_SEED").unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        since.as_nanos() as u64 | 1
    });
    let runs = number("DSYNC_FUZZ_RUNS").unwrap_or(if std::env::var_os("DSYNC_SOAK").is_some() {
        3_000_000
    } else {
        30_000
    });
    println!("DSYNC_SEED={seed} DSYNC_FUZZ_RUNS={runs}");
    let mut accepted = 0;
    for run in 0..runs {
        // Each run has a seed of its own, told where it fails.
        let own = seed.wrapping_add(run).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let outcome = std::panic::catch_unwind(|| {
            let mut random = Random(own);
            let mut bytes = match random.below(10) {
                0 => {
                    let len = random.below(300);
                    random.bytes(len)
                }
                _ => good(&mut random),
            };
            let other = good(&mut random);
            mutate(&mut random, &mut bytes, &other);
            if random.below(3) > 0 {
                bytes = raw::repair(&bytes);
            }
            fuzz_reader(&bytes)
        });
        match outcome {
            Ok(whole) => accepted += u64::from(whole),
            Err(panic) => {
                eprintln!(
                    "run {run} failed: DSYNC_SEED={} DSYNC_FUZZ_RUNS=1 repeats it",
                    seed.wrapping_add(run)
                );
                std::panic::resume_unwind(panic);
            }
        }
    }
    println!("{accepted} of {runs} were taken for whole deltas");
    assert!(runs < 10_000 || accepted > 0, "nothing gets behind the checksums: the runs prove little");
}
