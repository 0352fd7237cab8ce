//! Noise, which must do no harm: conversations that make sense, spoiled a little or a lot. `DSYNC_SEED` repeats a run,
//! `DSYNC_FUZZ_RUNS` sets the number of conversations.
#![allow(missing_docs)]

mod common;

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use device::Disk;
use nbd::{BlockStatus, Context, ServerLimits};
use testing::Random;

/// The parts of a conversation that makes sense.
fn conversation(noise: &mut Random) -> Vec<Vec<u8>> {
    let name = ["disk", "", "other"][noise.below(8).min(2) as usize];
    let mut parts = vec![(noise.below(4) as u32).to_be_bytes().to_vec()];
    for _ in 0..noise.below(5) {
        let option = noise.below(12) as u32;
        let data = match option {
            6 => info(name, &[0, 1, 2, 3]),
            9 | 10 => meta(name, &["base:allocation", "qemu:", "x-test:leaf"]),
            1 | 2 | 7 => continue,
            _ => vec![],
        };
        parts.push(option_bytes(option, &data));
    }
    parts.push(match noise.below(4) {
        0 => option_bytes(1, b"disk"),
        _ => option_bytes(7, &info("disk", &[3])),
    });
    for at in 0..noise.below(20) {
        let command = noise.below(9) as u16;
        let flags = if noise.below(3) == 0 { noise.below(32) as u16 } else { 0 };
        let offset = if noise.below(10) == 0 { noise.bits() } else { noise.below(FUZZ_DISK) };
        let len = if noise.below(4) == 0 { noise.below(FUZZ_DISK) } else { noise.below(5000) } as u32;
        let payload = if command == WRITE { noise.bytes(len.min(20_000) as usize) } else { vec![] };
        let len = if command == WRITE { payload.len() as u32 } else { len };
        let mut request = request_bytes(command, flags, at, offset, len);
        request.extend(payload);
        parts.push(request);
    }
    parts
}

/// Spoils a conversation a little, or a lot.
fn spoil(parts: &mut Vec<Vec<u8>>, noise: &mut Random) {
    const TELLING: [u64; 8] = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 20, (1 << 20) + 1, 1 << 63];
    for _ in 0..noise.below(4) {
        let at = noise.index(parts.len());
        let part = &mut parts[at];
        let place = noise.index(part.len());
        match noise.below(7) {
            0 => part.truncate(place),
            1 if !part.is_empty() => part[place] ^= 1 << noise.below(8),
            2 if !part.is_empty() => part[place] = noise.bits() as u8,
            3 => {
                let len = noise.index(40);
                let more = noise.bytes(len);
                drop(part.splice(place..place, more));
            }
            4 => {
                let value = TELLING[noise.index(8)];
                let width = [2, 4, 8][noise.index(3)];
                let end = (place + width).min(part.len());
                part[place..end].copy_from_slice(&value.to_be_bytes()[8 - (end - place)..]);
            }
            5 => {
                let copy = part.clone();
                parts.insert(at, copy);
            }
            _ => drop(parts.remove(at)),
        }
        if parts.is_empty() {
            return;
        }
    }
}

const FUZZ_DISK: u64 = 1 << 20;

/// Has much to say, and says it with an error now and then.
struct Talkative;

impl Context for Talkative {
    fn name(&self) -> &str {
        "x-test:leaf"
    }
    fn status(&self, offset: u64, _: u64, limit: usize) -> io::Result<Vec<BlockStatus>> {
        if offset % 7 == 0 {
            return Err(io::Error::other("x".repeat(70_000)));
        }
        Ok((0..limit as u64).map(|at| BlockStatus { len: 1 + at % 3, flags: at as u32 }).collect())
    }
}

#[test]
fn noise_does_no_harm() {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::SeqCst);
        usual(info);
    }));
    let seed = testing::seed("noise for a server");
    let runs = testing::number("DSYNC_FUZZ_RUNS").unwrap_or(3000);
    // A run of the usual length is bounded in time on a slow machine too.
    let until = (runs <= 3000).then(|| Instant::now() + Duration::from_secs(20));

    let before = peak();
    for mode in [Mode::Inline, Mode::Polled] {
        let disk = Rig::plain(FUZZ_DISK, mode);
        disk.ram.write_at(0, &Random::seeded(1).bytes(300_000)).unwrap();
        let server =
            serve_one(disk, ServerLimits::default(), |export| export.contexts.push(Arc::new(Talkative)));
        let mut witness = Client::enter(&server, "disk", true, &[]);
        for run in 0..runs / 2 {
            if until.is_some_and(|until| Instant::now() > until) {
                println!("{run} conversations in the time given");
                break;
            }
            let mut noise = Random::seeded(seed.wrapping_add(run));
            let mut parts = conversation(&mut noise);
            match noise.below(10) {
                // Nothing but noise.
                0 => {
                    let len = noise.index(3000);
                    parts = vec![noise.bytes(len)];
                }
                // Noise after a greeting.
                1 => parts[1..].iter_mut().for_each(|part| *part = noise.bytes(part.len())),
                _ => spoil(&mut parts, &mut noise),
            }
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            ours.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            server.serve_stream(theirs).unwrap();
            let mut writer = ours.try_clone().unwrap();
            let bytes = parts.concat();
            let whole = noise.below(2) == 0;
            let talking = std::thread::spawn(move || {
                let step = if whole { bytes.len().max(1) } else { 1000 };
                let _ = bytes.chunks(step).try_for_each(|part| writer.write_all(part));
                let _ = writer.shutdown(Shutdown::Write);
            });
            let mut said = [0; 64 << 10];
            loop {
                match ours.read(&mut said) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::ConnectionReset => break,
                    Err(e) => panic!("run {run}: the server neither speaks nor ends: {e}"),
                }
            }
            talking.join().unwrap();
        }
        assert_eq!(witness.read_at(FUZZ_DISK - 10, 10).len(), 10);
        witness.bye();
        server.shutdown(Duration::from_secs(30));
    }
    assert_eq!(PANICS.load(Ordering::SeqCst), 0);
    let grown = peak() - before;
    assert!(grown < 64 << 20, "{grown} bytes of memory");
}
