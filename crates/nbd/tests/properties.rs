//! Random valid requests against a model, by one connection and by four at once. `DSYNC_SEED` repeats a run.
#![allow(missing_docs)]

mod common;

use std::collections::HashMap;

use common::*;
use device::Disk;
use nbd::{Server, state};
use testing::Random;

const REGION: u64 = 1 << 20;

/// Batches of requests that don't touch one another, in the part of the disk that is this client's own.
fn exercise(server: &Server, structured: bool, base: u64, noise: &mut Random, batches: usize) -> Vec<u8> {
    let contexts: &[&str] = if structured { &["base:allocation"] } else { &[] };
    let mut client = Client::enter(server, "disk", structured, contexts);
    let mut model = vec![0u8; REGION as usize];
    for _ in 0..batches {
        let mut expected: HashMap<u64, (u16, usize, usize)> = HashMap::new();
        let mut at = noise.below(REGION / 4);
        while at < REGION && expected.len() < 24 {
            let len = match noise.below(8) {
                0 => noise.below(600_000),
                1 => noise.below(70_000),
                2 => 4096,
                _ => noise.below(5000),
            };
            let len = len.min(REGION - at) as usize;
            let command = [READ, READ, READ, WRITE, WRITE, WRITE, ZEROES, TRIM, CACHE, FLUSH, STATUS];
            let mut command = command[noise.index(11)];
            if command == STATUS && (!structured || len == 0) {
                command = READ;
            }
            let flags = match (command, noise.below(4)) {
                (READ, 0) if structured => DF,
                (WRITE | TRIM, 0) => FUA,
                (ZEROES, n) => [0, NO_HOLE, FUA, NO_HOLE | FUA][n as usize],
                (STATUS, 0) => REQ_ONE,
                _ => 0,
            };
            let range = at as usize..at as usize + len;
            let payload = if command == WRITE { noise.bytes(len) } else { Vec::new() };
            match command {
                WRITE => model[range].copy_from_slice(&payload),
                ZEROES => model[range].fill(0),
                // What a trimmed range holds is the disk's choice; this one's is zero.
                TRIM => model[range].fill(0),
                _ => {}
            }
            let (offset, asked) = if command == FLUSH { (0, 0) } else { (base + at, len as u32) };
            let cookie = client.request(command, flags, offset, asked, &payload);
            expected.insert(cookie, (command, at as usize, len));
            at += len as u64 + if noise.below(2) == 0 { 0 } else { noise.below(50_000) };
            // A client that only sends and does not read waits for a server that does the same.
            if command == READ && len > 50_000 {
                break;
            }
        }
        while !expected.is_empty() {
            let (cookie, answer) = client.next();
            let (command, at, len) = expected.remove(&cookie).expect("asked");
            assert_eq!(answer.error, 0, "command {command}, {len} bytes at {at}: {}", answer.message);
            match command {
                READ => assert!(answer.data == model[at..at + len], "{len} bytes at {at}"),
                STATUS => {
                    let mut from = at;
                    for (len, flags) in &answer.status[&0] {
                        let run = &model[from..from + *len as usize];
                        assert!(flags & state::ZERO == 0 || run.iter().all(|byte| *byte == 0));
                        from += *len as usize;
                    }
                    assert!(from > at && from <= at + len);
                }
                _ => {}
            }
        }
    }
    let read = client.read_at(base, REGION as u32);
    assert!(read == model);
    client.bye();
    model
}

#[test]
fn random_requests_against_a_model() {
    let seed = testing::seed("requests of all kinds");
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        for structured in [false, true] {
            for connections in [1, 4] {
                let rig = Rig::plain(REGION * connections, mode);
                let server = serve(rig.clone());
                let models: Vec<Vec<u8>> = std::thread::scope(|scope| {
                    let (server, seed) = (&server, seed ^ mode as u64 ^ connections << 8);
                    let run = |at| {
                        move || exercise(server, structured, at * REGION, &mut Random::seeded(seed + at), 40)
                    };
                    let running: Vec<_> = (0..connections).map(|at| scope.spawn(run(at))).collect();
                    running.into_iter().map(|one| one.join().expect("one client went well")).collect()
                });
                let mut disk = vec![0; (REGION * connections) as usize];
                rig.ram.read_at(0, &mut disk).unwrap();
                assert!(disk == models.concat());
            }
        }
    }
}
