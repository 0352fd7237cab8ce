//! Every command, every flag and every error; what a connection may do to others (nothing); and how it ends.
#![allow(missing_docs)]

mod common;

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::*;
use device::{Disk, Done, Queue, RamDisk, Request, RequestKind};
use nbd::{BlockSizes, BlockStatus, Context, Export, ServerLimits};
use testing::Random;

const EPERM: u32 = 1;
const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const MIB: u64 = 1 << 20;

/// Both kinds of replies.
fn both(server: &nbd::Server) -> [Client; 2] {
    [false, true].map(|structured| Client::enter(server, "disk", structured, &[]))
}

fn noise(len: usize) -> Vec<u8> {
    Random::seeded(len as u64).bytes(len)
}

#[test]
fn what_is_written_is_read() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        let server = serve(Rig::plain(8 * MIB, mode));
        for client in &mut both(&server) {
            // Small, odd, on the edges of what is taken in at once and of the parts, and several parts at odd places.
            for (offset, len) in [
                (0, 1),
                (4095, 2),
                (3, 4096),
                (12288, 32 << 10),
                (12289, (32 << 10) + 1),
                (1, (256 << 10) - 28),
                (100, 256 << 10),
                (262_143, 262_146),
                (777, (3 << 20) + 5),
                (8 * MIB - 1, 1),
                (0, 8 << 20),
            ] {
                let bytes = noise(len);
                client.write_at(offset, &bytes);
                assert!(client.read_at(offset, len as u32) == bytes, "{len} bytes at {offset}, {mode:?}");
            }
        }
    }
}

#[test]
fn structured_reads_come_in_parts_and_holes() {
    let server = serve(Rig::plain(4 * MIB, Mode::Inline));
    let mut client = Client::enter(&server, "disk", true, &[]);
    client.write_at(MIB, &noise(300 << 10));
    let answer = client.ask(READ, 0, MIB - 100, 2 << 20, &[]);
    assert!(answer.data[100..][..300 << 10] == noise(300 << 10));
    assert!(answer.data[..100].iter().chain(&answer.data[(300 << 10) + 100..]).all(|byte| *byte == 0));
    assert_eq!(answer.chunks[0], (MIB - 100, 100, true), "the first part ends where whole ones begin");
    let (last_offset, last_len, hole) = *answer.chunks.last().unwrap();
    assert!(hole && last_offset + u64::from(last_len) == 3 * MIB - 100);
    let data = answer.chunks.iter().filter(|(_, _, hole)| !hole);
    assert!(data.map(|(_, len, _)| *len).sum::<u32>() <= 1 << 20, "{:?}", answer.chunks);
    assert!(answer.chunks.iter().all(|(_, len, _)| *len <= 1 << 20), "{:?}", answer.chunks);
    // Whole, if asked to: data and holes alike.
    let answer = client.ask(READ, DF, MIB - 100, 1 << 20, &[]);
    assert_eq!(answer.chunks, [(MIB - 100, 1 << 20, false)]);
    assert!(answer.data[100..][..300 << 10] == noise(300 << 10));
    assert!(answer.data[..100].iter().all(|byte| *byte == 0));
    assert_eq!(client.ask(READ, 0, 0, 4096, &[]).chunks, [(0, 4096, true)]);
    assert_eq!(client.ask(READ, DF, 0, 4096, &[]).chunks, [(0, 4096, false)]);
}

#[test]
fn trims_and_zeroes() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    let hook = move |what, offset, len| {
        if !["write", "read", "queue"].contains(&what) {
            seen.lock().unwrap().push((what, offset, len));
        }
        Ok(())
    };
    let server = serve(Rig::new(8 * MIB, Mode::Inline, Box::new(hook)));
    for client in &mut both(&server) {
        client.write_at(0, &noise(8 << 20));
        for (command, flags, len) in [
            (TRIM, 0, 8 << 20),
            (ZEROES, 0, 1 << 20),
            (ZEROES, NO_HOLE, 1000),
            (ZEROES, FAST, 4096),
            (ZEROES, FAST | NO_HOLE, 4096),
            (ZEROES, FUA, 10),
            (TRIM, FUA, 10),
            (CACHE, 0, 8 << 20),
            (FLUSH, 0, 0),
            (FLUSH, FUA, 0),
        ] {
            assert_eq!(client.ask(command, flags, 0, len, &[]), Answer::default());
        }
        assert_eq!(client.read_at(0, 1 << 20), vec![0; 1 << 20]);
        let expected = [
            ("discard", 0, 8 << 20),
            ("unmap", 0, 1 << 20),
            ("zero", 0, 1000),
            ("fast unmap", 0, 4096),
            ("fast zero", 0, 4096),
            ("unmap", 0, 10),
            ("flush", 0, 0),
            ("discard", 0, 10),
            ("flush", 0, 0),
            ("prefetch", 0, 8 << 20),
            ("flush", 0, 0),
            ("flush", 0, 0),
        ];
        assert_eq!(asked.lock().unwrap().drain(..).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn forced_writes_are_flushed_once_and_before_the_answer() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        let rig = Rig::plain(8 * MIB, mode);
        let server = serve(rig.clone());
        for client in &mut both(&server) {
            for len in [512, 100_000, 3 << 20] {
                rig.flushes.store(0, Ordering::SeqCst);
                client.write_at(5, &noise(len));
                assert_eq!(rig.flushes.load(Ordering::SeqCst), 0);
                assert_eq!(client.ask(WRITE, FUA, 5, len as u32, &noise(len)).error, 0);
                assert_eq!(rig.flushes.load(Ordering::SeqCst), 1, "{len} bytes, {mode:?}");
            }
            assert_eq!(client.ask(READ, FUA, 0, 1, &[]).error, 0);
        }
    }
}

/// The last part of one may complete at any moment, also before the server looks for it the first time.
#[test]
fn forced_writes_in_parts_are_all_answered() {
    for mode in [Mode::Polled, Mode::Blocking] {
        let server = serve(Rig::plain(8 * MIB, mode));
        let mut client = Client::enter(&server, "disk", false, &[]);
        for round in 0..300 {
            let len = (1 << 20) + 512 * (1 + round % 20);
            assert_eq!(client.ask(WRITE, FUA, 0, len, &noise(len as usize)).error, 0);
        }
    }
}

#[test]
fn nothing_asked_nothing_done() {
    let nothing =
        |what: &str, _, _| if what == "queue" { Ok(()) } else { panic!("the disk was asked for a {what}") };
    let server = serve(Rig::new(4096, Mode::Inline, Box::new(nothing)));
    for client in &mut both(&server) {
        for command in [READ, WRITE, TRIM, ZEROES] {
            for offset in [0, 100, 4096] {
                assert_eq!(client.ask(command, 0, offset, 0, &[]), Answer::default());
            }
        }
        assert_eq!(client.ask(READ, 0, 4097, 0, &[]).error, EINVAL);
    }
}

#[test]
fn bad_requests_are_refused_and_harm_nobody() {
    let server = serve_one(Rig::plain(MIB, Mode::Inline), ServerLimits::default(), |export| {
        export.block = BlockSizes { min: 512, preferred: 4096, max: 64 << 10 };
        export.fast_zero = false;
    });
    let mut witness = Client::enter(&server, "disk", true, &[]);
    for client in &mut both(&server) {
        let structured = client.structured;
        let payload = noise(128 << 10);
        let mut refused = |command, flags, offset, len: u32, code| {
            let payload = if command == WRITE { &payload[..len as usize] } else { &[] };
            let answer = client.ask(command, flags, offset, len, payload);
            assert_eq!(answer.error, code, "{command} {flags:#x} {offset} {len}");
            assert_eq!(answer.message.is_empty(), !structured);
            assert!(answer.data.is_empty());
        };
        // Beyond the end, also where the sum does not fit 64 bits.
        for offset in [MIB, MIB - 512, MIB * 7, u64::MAX - 511, 1 << 63] {
            for command in [READ, CACHE, TRIM] {
                refused(command, 0, offset, 1024, EINVAL);
            }
            for command in [WRITE, ZEROES] {
                refused(command, 0, offset, 1024, ENOSPC);
            }
        }
        // Not in whole blocks.
        for command in [READ, WRITE, TRIM, ZEROES, CACHE] {
            refused(command, 0, 256, 512, EINVAL);
            refused(command, 0, 512, 100, EINVAL);
        }
        // Too much at once; more than a part, so that it is skipped in steps.
        for command in [READ, WRITE] {
            refused(command, 0, 0, 128 << 10, EINVAL);
        }
        // Flags that are not the command's, or that were not negotiated.
        for (command, flags) in [
            (READ, NO_HOLE),
            (READ, REQ_ONE),
            (READ, if structured { FAST } else { DF }),
            (WRITE, DF),
            (WRITE, NO_HOLE),
            (WRITE, 1 << 15),
            (TRIM, NO_HOLE),
            (ZEROES, FAST),
            (ZEROES, REQ_ONE),
            (CACHE, DF),
        ] {
            refused(command, flags, 0, 512, EINVAL);
        }
        refused(FLUSH, NO_HOLE, 0, 0, EINVAL);
        refused(FLUSH, 0, 512, 0, EINVAL);
        refused(FLUSH, 0, 0, 512, EINVAL);
        // Block status without a context; commands that are none.
        refused(STATUS, 0, 0, 512, EINVAL);
        for command in [8, 9, 1000, u16::MAX] {
            refused(command, 0, 0, 0, EINVAL);
        }
        assert_eq!(client.read_at(0, 4096), vec![0; 4096]);
    }
    assert_eq!(witness.read_at(0, 4096), vec![0; 4096]);
}

#[test]
fn read_only_exports_stay_as_they_are() {
    let disk = RamDisk::from_bytes(&noise(1 << 20));
    let server = serve_one(Arc::new(disk), ServerLimits::default(), |export| export.read_only = true);
    for client in &mut both(&server) {
        let payload = noise(100_000);
        for command in [WRITE, TRIM, ZEROES] {
            let payload = if command == WRITE { &payload[..] } else { &[] };
            for flags in [0, FUA] {
                assert_eq!(client.ask(command, flags, 0, 100_000, payload).error, EPERM);
            }
        }
        assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]).error, 0);
        assert!(client.read_at(0, 1 << 20) == noise(1 << 20));
    }
}

#[test]
fn a_payload_beyond_reason_ends_the_connection() {
    let server = serve(Rig::plain(MIB, Mode::Inline));
    let mut client = Client::enter(&server, "disk", true, &[]);
    client.request(WRITE, 0, 0, u32::MAX, b"and so on");
    assert!(client.is_closed());
    assert_eq!(Client::enter(&server, "disk", true, &[]).read_at(0, 1), [0]);
}

#[test]
fn errors_of_the_disk_reach_the_client() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        let hook = |what: &str, offset: u64, _| {
            if what.starts_with("fast") {
                return Err(ErrorKind::Unsupported.into());
            }
            match offset / MIB {
                1 => Err(io::Error::other("the head has crashed")),
                2 => Err(io::Error::from_raw_os_error(28)),
                3 => Err(io::Error::from_raw_os_error(122)),
                4 => Err(ErrorKind::PermissionDenied.into()),
                5 => Err(ErrorKind::Unsupported.into()),
                6 => Err(ErrorKind::UnexpectedEof.into()),
                _ => Ok(()),
            }
        };
        let server = serve(Rig::new(16 * MIB, mode, Box::new(hook)));
        for client in &mut both(&server) {
            for (at, code) in [(1, EIO), (2, ENOSPC), (3, ENOSPC), (4, EPERM), (5, EINVAL), (6, EIO), (7, 0)]
            {
                for command in [READ, WRITE, TRIM, ZEROES, CACHE] {
                    let payload = if command == WRITE { &noise(4096)[..] } else { &[] };
                    let answer = client.ask(command, 0, at * MIB, 4096, payload);
                    assert_eq!(answer.error, code, "{command} at {at}");
                    if at == 1 && client.structured {
                        assert_eq!(answer.message, "the head has crashed");
                    }
                }
            }
            assert_eq!(client.ask(ZEROES, FAST, 0, 4096, &[]).error, ENOTSUP);
            // One part of many fails: the whole request does, and the next is understood.
            for (command, flags) in [(READ, 0), (WRITE, 0), (WRITE, FUA)] {
                let payload = if command == WRITE { &noise(3 << 20)[..] } else { &[] };
                let answer = client.ask(command, flags, MIB / 2 + 7, 3 << 20, payload);
                assert_eq!(answer.error, EIO.max(answer.error), "{answer:?}");
            }
            if client.structured {
                assert_ne!(client.ask(READ, DF, MIB / 2, 2 << 20, &[]).error, 0);
            }
            assert_eq!(client.ask(READ, 0, 0, 512, &[]).error, 0);
        }
    }
}

/// Alternating flags, a block of 512 bytes each; or nonsense.
struct Stripes(&'static str);

impl Context for Stripes {
    fn name(&self) -> &str {
        self.0
    }
    fn status(&self, offset: u64, len: u64, limit: usize) -> io::Result<Vec<BlockStatus>> {
        match self.0 {
            "x-bad:error" => Err(io::Error::other("the map is lost")),
            "x-bad:empty" => Ok(vec![]),
            "x-bad:zero" => Ok(vec![BlockStatus { len: 0, flags: 0 }, BlockStatus { len: 512, flags: 0 }]),
            "x-odd:long" => {
                Ok(vec![BlockStatus { len: u64::MAX, flags: 7 }, BlockStatus { len: u64::MAX, flags: 8 }])
            }
            "x-odd:alike" => Ok(vec![BlockStatus { len: 1, flags: 1 }; 1000]),
            "x-odd:many" => Ok((0..100_000).map(|at| BlockStatus { len: 512, flags: at % 2 }).collect()),
            _ => {
                let first = 512 - offset % 512;
                let runs = (0..).map(|at| (at, if at == 0 { first } else { 512 }));
                let runs = runs.map(|(at, len)| BlockStatus { len, flags: ((offset / 512 + at) % 2) as u32 });
                Ok(runs.take((len.div_ceil(512) as usize + 1).min(limit)).collect())
            }
        }
    }
}

fn with_stripes(export: &mut Export) {
    for name in
        ["x-s:tripes", "x-bad:error", "x-bad:empty", "x-bad:zero", "x-odd:long", "x-odd:alike", "x-odd:many"]
    {
        export.contexts.push(Arc::new(Stripes(name)));
    }
}

#[test]
fn block_status() {
    let rig = Rig::plain(64 * MIB, Mode::Inline);
    let server = serve_one(rig.clone(), ServerLimits::default(), with_stripes);
    rig.ram.write_at(MIB, &noise(8192)).unwrap();
    rig.ram.write_at(2 * MIB, &noise(4096)).unwrap();

    let mut client = Client::enter(&server, "disk", true, &["base:allocation", "x-s:tripes"]);
    let answer = client.ask(STATUS, 0, MIB - 4096, 2 << 20, &[]);
    let allocation = [(4096, 3), (8192, 0), ((1 << 20) - 8192, 3), (4096, 0), ((1 << 20) - 8192, 3)];
    assert_eq!(answer.status[&0], allocation);
    assert_eq!(answer.status[&1].len(), 4096);
    assert_eq!(answer.status[&1][..3], [(512, 0), (512, 1), (512, 0)]);
    let answer = client.ask(STATUS, REQ_ONE, MIB + 100, 5000, &[]);
    assert_eq!((&answer.status[&0][..], &answer.status[&1][..]), (&[(5000, 0)][..], &[(412, 0)][..]));
    assert_eq!(client.ask(STATUS, REQ_ONE, MIB, 1 << 20, &[]).status[&0], [(8192, 0)]);
    // The last byte of the disk.
    assert_eq!(client.ask(STATUS, 0, 64 * MIB - 1, 1, &[]).status[&0], [(1, 3)]);
    for (offset, len) in [(0, 0), (64 * MIB, 1), (64 * MIB - 1, 2), (u64::MAX, 1)] {
        assert_eq!(client.ask(STATUS, 0, offset, len, &[]).error, EINVAL);
    }
    assert_eq!(client.ask(STATUS, DF, 0, 512, &[]).error, EINVAL);
    client.bye();

    for (name, expected) in [
        ("x-odd:long", Some(vec![(1 << 20, 7)])),
        ("x-odd:alike", Some(vec![(1000, 1)])),
        ("x-bad:error", None),
        ("x-bad:empty", None),
        ("x-bad:zero", None),
    ] {
        let mut client = Client::enter(&server, "disk", true, &["base:allocation", name]);
        let answer = client.ask(STATUS, 0, 0, 1 << 20, &[]);
        match expected {
            Some(runs) => assert_eq!(answer.status[&1], runs),
            None => {
                assert_eq!((answer.error, answer.status.len()), (EIO, 0), "{name}");
                let reason = if name == "x-bad:error" { "the map is lost" } else { name };
                assert!(answer.message.contains(reason), "{}", answer.message);
            }
        }
        assert_eq!(client.ask(READ, 0, 0, 512, &[]).error, 0);
        client.bye();
    }
    // No more runs than a reply should hold, and progress all the same.
    let mut client = Client::enter(&server, "disk", true, &["x-odd:many"]);
    assert_eq!(client.ask(STATUS, 0, 0, 64 << 20, &[]).status[&0].len(), 16 << 10);
    assert_eq!(client.ask(STATUS, REQ_ONE, 0, 64 << 20, &[]).status[&0], [(512, 0)]);
    client.bye();
}

#[test]
fn block_status_beyond_4_gib() {
    let server = serve(Arc::new(RamDisk::new(1 << 43)));
    let mut client = Client::enter(&server, "disk", true, &["base:allocation"]);
    assert_eq!(client.ask(STATUS, 0, 1 << 40, u32::MAX, &[]).status[&0], [(u32::MAX, 3)]);
    client.write_at(1 << 42, &[1]);
    assert_eq!(client.ask(STATUS, REQ_ONE, (1 << 42) - 4096, u32::MAX, &[]).status[&0], [(4096, 3)]);
}

/// A gate that a disk's requests wait at.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    waiting: AtomicU64,
}

impl Gate {
    fn pass(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let open = self.open.lock().unwrap();
        let passed = self.changed.wait_timeout_while(open, Duration::from_secs(30), |open| !*open).unwrap();
        assert!(!passed.1.timed_out());
    }
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }
    fn await_waiting(&self, count: u64) {
        let start = Instant::now();
        while self.waiting.load(Ordering::SeqCst) < count {
            assert!(start.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A disk whose first MiB waits at the gate.
fn gated(mode: Mode) -> (Arc<Gate>, Arc<Rig>) {
    let gate = Arc::new(Gate::default());
    let hook = {
        let gate = gate.clone();
        move |what: &'static str, offset, _| {
            if offset < MIB && what != "queue" {
                gate.pass();
            }
            Ok(())
        }
    };
    (gate, Rig::new(4 * MIB, mode, Box::new(hook)))
}

#[test]
fn a_slow_request_holds_up_no_other() {
    let (gate, rig) = gated(Mode::Polled);
    let server = serve(rig);
    let mut client = Client::enter(&server, "disk", true, &[]);
    let slow = client.request(READ, 0, 0, 512, &[]);
    gate.await_waiting(1);
    for _ in 0..10 {
        let fast = client.request(READ, 0, MIB, 512, &[]);
        assert_eq!(client.next().0, fast);
    }
    // Half a write keeps the answer to the slow one from nobody.
    let write = request_bytes(WRITE, 0, 99, MIB, 100_000);
    client.send(&write);
    client.send(&[7; 50_000]);
    gate.open();
    assert_eq!(client.next().0, slow);
    client.send(&[7; 50_000]);
    assert_eq!(client.read::<16>()[4..], [&[0; 4][..], &99u64.to_be_bytes()].concat());
    client.bye();
}

#[test]
fn a_slow_request_of_one_client_holds_up_no_other_client() {
    let (gate, rig) = gated(Mode::Inline);
    let server = serve(rig);
    let mut slow = Client::enter(&server, "disk", true, &[]);
    let mut fast = Client::enter(&server, "disk", true, &[]);
    let cookie = slow.request(WRITE, 0, 0, 512, &[1; 512]);
    gate.await_waiting(1);
    fast.write_at(MIB, &[2; 512]);
    assert_eq!(fast.read_at(MIB, 512), [2; 512]);
    gate.open();
    assert_eq!(slow.next().0, cookie);
}

#[test]
fn the_depth_of_the_queue_is_kept() {
    for mode in [Mode::Polled, Mode::Blocking] {
        let (gate, rig) = gated(mode);
        let server = serve_one(rig.clone(), ServerLimits::default(), |export| export.queue_depth = 3);
        let mut client = Client::enter(&server, "disk", true, &[]);
        for at in 0..20 {
            client.request(READ, 0, at * 512, 512, &[]);
        }
        client.request(READ, 0, 0, 3 << 20, &[]);
        client.request(READ, DF, 0, 3 << 20, &[]);
        // A queue that is waited for by itself takes no more in meanwhile than has come by then.
        gate.await_waiting(if mode == Mode::Polled { 3 } else { 1 });
        gate.open();
        for _ in 0..22 {
            assert_eq!(client.next().1.error, 0);
        }
        client.request(WRITE, FUA, MIB, 3 << 20, &noise(3 << 20));
        for at in 0..20 {
            client.request(TRIM, 0, at * 512, 512, &[]);
        }
        for _ in 0..21 {
            assert_eq!(client.next().1.error, 0);
        }
        client.bye();
        assert!(rig.most_in_flight.load(Ordering::SeqCst) <= 3);
    }
}

#[test]
fn many_requests_at_once() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        let server = serve(Rig::plain(16 * MIB, mode));
        for structured in [false, true] {
            let mut client = Client::enter(&server, "disk", structured, &[]);
            let mut writer = client.stream.try_clone().unwrap();
            let mut noise = Random::seeded(7);
            let blocks: Vec<Vec<u8>> = (0..1000).map(|_| noise.bytes(4096)).collect();
            let mut bytes = Vec::new();
            for (at, block) in blocks.iter().enumerate() {
                bytes.extend(request_bytes(WRITE, 0, at as u64, at as u64 * 4096, 4096));
                bytes.extend(block);
            }
            // In pieces that end anywhere.
            let writing = std::thread::spawn(move || {
                bytes.chunks(10_007).for_each(|part| writer.write_all(part).unwrap())
            });
            let mut answered: Vec<u64> = (0..1000)
                .map(|_| {
                    let reply = client.read::<16>();
                    assert_eq!(reply[..8], *b"\x67\x44\x66\x98\0\0\0\0");
                    u64::from_be_bytes(reply[8..].try_into().unwrap())
                })
                .collect();
            writing.join().unwrap();
            answered.sort_unstable();
            assert!(answered.into_iter().eq(0..1000));
            // No more than the sockets hold: this client does not read while it writes.
            for _ in 0..20 {
                let ask = |at| (client.request(READ, 0, at as u64 * 4096, 4096, &[]), at);
                let mut asked: HashMap<u64, usize> = (0..50).map(|_| noise.index(1000)).map(ask).collect();
                while !asked.is_empty() {
                    let (cookie, answer) = client.next();
                    assert!(answer.data == blocks[asked.remove(&cookie).unwrap()]);
                }
            }
            client.bye();
        }
    }
}

#[test]
fn disconnecting_lets_requests_finish() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        // Said properly, by leaving half the connection open, and by talking nonsense.
        for ending in 0..3 {
            let (gate, rig) = gated(mode);
            let server = serve(rig.clone());
            let mut client = Client::enter(&server, "disk", true, &[]);
            let cookies = [
                client.request(WRITE, 0, 0, 512, &[9; 512]),
                client.request(WRITE, FUA, MIB, 512, &[9; 512]),
            ];
            match ending {
                0 => client.send(&request_bytes(DISC, 0, 0, 0, 0)),
                1 => client.stream.shutdown(Shutdown::Write).unwrap(),
                _ => client.send(&[0x55; 100]),
            }
            gate.await_waiting(1);
            gate.open();
            let mut answered = [client.next(), client.next()].map(|(cookie, answer)| {
                assert_eq!(answer.error, 0);
                cookie
            });
            answered.sort_unstable();
            assert_eq!(answered, cookies);
            assert!(client.is_closed());
            let mut bytes = [0; 512];
            rig.ram.read_at(MIB, &mut bytes).unwrap();
            assert_eq!(bytes, [9; 512]);
        }
    }
}

#[test]
fn shutting_down_finishes_what_arrived() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        let (gate, rig) = gated(mode);
        let server = serve(rig.clone());
        let mut busy = Client::enter(&server, "disk", true, &[]);
        let mut idle = Client::enter(&server, "disk", true, &[]);
        let mut half = Client::enter(&server, "disk", true, &[]);
        half.request(WRITE, 0, 2 * MIB, 100_000, &[3; 50_000]);
        let cookies = [busy.request(WRITE, 0, 0, 512, &[9; 512]), busy.request(READ, 0, MIB, 512, &[])];
        gate.await_waiting(1);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                server.shutdown(Duration::from_secs(30));
                ended.store(true, Ordering::SeqCst);
            });
            assert!(idle.is_closed());
            assert!(half.is_closed());
            assert!(!ended.load(Ordering::SeqCst));
            gate.open();
            let mut answered = [busy.next(), busy.next()].map(|(cookie, answer)| {
                assert_eq!(answer.error, 0);
                cookie
            });
            answered.sort_unstable();
            assert_eq!(answered, cookies);
            assert!(busy.is_closed());
        });
        assert!(ended.load(Ordering::SeqCst));
        assert_eq!(server.connections(), 0);
        // A second time is harmless.
        server.shutdown(Duration::ZERO);
    }
}

#[test]
fn a_client_that_never_stops_asking_can_not_keep_the_server_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = serve(Rig::plain(MIB, Mode::Inline));
    server.serve_tcp(listener).unwrap();
    let mut asking = TcpStream::connect(address).unwrap();
    asking.write_all(&[&3u32.to_be_bytes()[..], &option_bytes(1, b"disk")].concat()).unwrap();
    asking.read_exact(&mut [0; 18 + 10]).unwrap();
    let mut reading = asking.try_clone().unwrap();
    let ask = std::thread::spawn(move || while asking.write_all(&request_bytes(READ, 0, 1, 0, 1)).is_ok() {});
    let read = std::thread::spawn(move || while reading.read(&mut [0; 4096]).is_ok_and(|got| got > 0) {});
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    server.shutdown(Duration::from_secs(60));
    assert!(start.elapsed() < Duration::from_secs(30));
    ask.join().unwrap();
    read.join().unwrap();
}

#[test]
fn a_client_that_takes_no_replies_is_cut_off() {
    let server = serve(Rig::plain(8 * MIB, Mode::Inline));
    let mut deaf = Client::enter(&server, "disk", false, &[]);
    for _ in 0..8 {
        deaf.request(READ, 0, 0, 4 << 20, &[]);
    }
    let start = Instant::now();
    server.shutdown(Duration::from_millis(200));
    assert!((200..20_000).contains(&start.elapsed().as_millis()));
}

#[test]
fn a_client_that_vanishes_leaves_nothing_behind() {
    for mode in [Mode::Inline, Mode::Polled, Mode::Blocking] {
        let server = serve(Rig::plain(8 * MIB, mode));
        for len in [0, 20, 28, 1000, 300_000] {
            let mut client = Client::enter(&server, "disk", true, &[]);
            client.request(READ, 0, 0, 8 << 20, &[]);
            let mut write = request_bytes(WRITE, 0, 1, 0, 1 << 20);
            write.extend(noise(1 << 20));
            client.send(&write[..len]);
            drop(client);
        }
        let start = Instant::now();
        while server.connections() > 0 {
            assert!(start.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_panic_below_ends_one_connection() {
    let hook = |_: &'static str, offset, _| if offset == 666 { panic!("on purpose") } else { Ok(()) };
    let server = serve(Rig::new(MIB, Mode::Inline, Box::new(hook)));
    let mut witness = Client::enter(&server, "disk", true, &[]);
    let mut client = Client::enter(&server, "disk", true, &[]);
    client.request(READ, 0, 666, 1, &[]);
    assert!(client.is_closed());
    assert_eq!(witness.read_at(0, 1), [0]);
    server.shutdown(Duration::from_secs(10));
}

/// A disk whose writes are under way until somebody waits for them; everything else is done at once.
struct Counting {
    ram: Arc<RamDisk>,
    /// Writes submitted, and writes completed.
    writes: Arc<[AtomicU64; 2]>,
}

impl Disk for Counting {
    fn len(&self) -> u64 {
        self.ram.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.ram.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.ram.write_at(offset, buf)
    }
    fn zero(&self, offset: u64, len: u64, unmap: bool, fast: bool) -> io::Result<()> {
        self.ram.zero(offset, len, unmap, fast)
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.ram.discard(offset, len)
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn queue(self: Arc<Self>, depth: u32) -> io::Result<Box<dyn Queue>> {
        let inner = self.ram.clone().queue(depth)?;
        Ok(Box::new(CountingQueue { inner, held: Vec::new(), writes: self.writes.clone() }))
    }
}

struct CountingQueue {
    inner: Box<dyn Queue>,
    held: Vec<Request>,
    writes: Arc<[AtomicU64; 2]>,
}

impl Queue for CountingQueue {
    fn submit(&mut self, request: Request) {
        match request.kind {
            RequestKind::Write { .. } => {
                self.writes[0].fetch_add(1, Ordering::SeqCst);
                self.held.push(request);
            }
            _ => self.inner.submit(request),
        }
    }
    fn start(&mut self) {}
    fn complete(&mut self, wait: bool) -> Option<Done> {
        if let Some(done) = self.inner.complete(false) {
            return Some(done);
        }
        let request = if wait { self.held.pop()? } else { return None };
        self.writes[1].fetch_add(1, Ordering::SeqCst);
        self.inner.submit(request);
        self.inner.complete(true)
    }
    fn in_flight(&self) -> usize {
        self.held.len() + self.inner.in_flight()
    }
}

/// A tracked disk counts the writes under way, and a checkpoint waits until they have been collected.
#[test]
fn a_client_that_takes_no_replies_leaves_no_write_uncollected() {
    let writes: Arc<[AtomicU64; 2]> = Arc::default();
    let disk = Arc::new(Counting { ram: Arc::new(RamDisk::new(8 * MIB)), writes: writes.clone() });
    let server = serve(disk);
    let mut client = Client::enter(&server, "disk", false, &[]);
    for block in 0..8 {
        client.request(WRITE, u16::from(block == 3), block * 4096, 4096, &noise(4096));
    }
    let replies = 8 + (0..16).map(|_| client.request(READ, 0, MIB, 4 << 20, &[])).count();
    let until = Instant::now() + Duration::from_secs(30);
    while writes[1].load(Ordering::SeqCst) < 8 {
        assert!(Instant::now() < until, "submitted and collected: {writes:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    // And every reply is there, once the client takes them.
    for _ in 0..replies {
        assert_eq!(client.next().1.error, 0);
    }
    client.bye();
}

/// A client that takes its replies slowly makes the server look for completions while it sends: none that it finds there is forgotten.
#[test]
fn a_client_that_takes_its_replies_slowly_gets_them_all() {
    let mut dice = Random::new("slow client");
    let folder = testing::on_disk();
    let path = folder.path().join("disk.raw");
    std::fs::write(&path, noise(16 << 20)).unwrap();
    let options = device::DiskOptions { write: true, direct: true, ..Default::default() };
    let server = serve(device::open(&path, &options).unwrap());
    let mut client = Client::enter(&server, "disk", false, &[]);
    for _ in 0..300 {
        // So much that the socket does not hold it.
        let requests = dice.within(6..24);
        for _ in 0..requests {
            client.request(READ, 0, dice.below(60) << 18, 256 << 10, &[]);
        }
        std::thread::sleep(Duration::from_micros(dice.below(2000)));
        for _ in 0..requests {
            assert_eq!(client.next().1.error, 0);
            std::thread::sleep(Duration::from_micros(dice.below(100)));
        }
    }
    client.bye();
}
