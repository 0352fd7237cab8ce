//! What one connection may cost in memory. Alone in its process, so that nothing else is counted.
#![allow(missing_docs)]

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use device::{Disk, RamDisk};
use nbd::ServerLimits;
use testing::Random;

#[test]
fn memory_is_bounded_whatever_is_asked() {
    let disk = Arc::new(RamDisk::new(64 << 20));
    let mut noise = Random::seeded(5);
    (0..64).for_each(|at| disk.write_at(at << 20, &noise.bytes(1 << 20)).unwrap());
    let server = serve(disk);
    let before = peak();
    for structured in [false, true] {
        let mut client = Client::enter(&server, "disk", structured, &[]);
        let mut writer = client.stream.try_clone().unwrap();
        // A gigabyte of replies asked for at once, most of it before the first is read.
        let asking = std::thread::spawn(move || {
            for at in 0..64 {
                writer.write_all(&request_bytes(READ, 0, at, 0, 16 << 20)).unwrap();
            }
            writer.shutdown(Shutdown::Write).unwrap();
        });
        std::thread::sleep(Duration::from_millis(100));
        let mut bytes = 0;
        let mut part = vec![0; 1 << 20];
        loop {
            match client.stream.read(&mut part).unwrap() {
                0 => break,
                got => bytes += got,
            }
        }
        assert!(bytes > 1 << 30);
        asking.join().unwrap();
    }
    // And as much written.
    let mut client = Client::enter(&server, "disk", true, &[]);
    let payload = vec![7; 16 << 20];
    (0..8).for_each(|_| client.write_at(3, &payload));
    client.bye();
    // A deep queue and a slow disk are no reason to hold more.
    let slow = |what: &str, _, _| {
        if what == "read" {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    };
    let server =
        serve_one(Rig::new(64 << 20, Mode::Polled, Box::new(slow)), ServerLimits::default(), |export| {
            export.queue_depth = 4096;
        });
    let mut client = Client::enter(&server, "disk", true, &[]);
    for at in 0..4 {
        client.send(&request_bytes(READ, 0, at, 0, 32 << 20));
    }
    client.send(&request_bytes(DISC, 0, 0, 0, 0));
    while client.stream.read(&mut [0; 65536]).unwrap() > 0 {}
    let grown = peak() - before;
    println!("{grown} bytes of memory");
    assert!(grown < 64 << 20, "{grown} bytes of memory");
}
