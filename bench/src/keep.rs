//! What a commit costs that keeps the past.

use std::time::Duration;

use anyhow::Result;
use dsync_tests::Random;
use dsync_tests::nbd::{Address, Client, Command};

use crate::Bench;
use crate::dsync::{Dsync, export};
use crate::places::{scratch, sockets};
use crate::process;
use crate::report::{Report, Table, median, seconds, size};

const LIMIT: Duration = Duration::from_secs(600);
/// Bytes of a write.
const WRITE: u64 = 64 << 10;

/// Runs the scenario.
pub(crate) fn keep(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 3 } else { 9 });
    let bytes = bench.size.unwrap_or(if bench.quick { 128 << 20 } else { 1 << 30 });
    report.section(
        "keep: what a commit costs that keeps the past",
        &format!(
            "An image of {} of random data, served; before each round a tenth is overwritten in writes of 64 KiB. Then a sync to a local \
             replica, and one to another with `--keep-last 100`, in alternating order; medians of {rounds} rounds.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("keep", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let (folder, sockets) = (scratch(&bench.dir)?, sockets()?);
    let dsync = Dsync::new(binary, folder.path().join("state"));
    let (image, socket) = (folder.path().join("source.raw"), sockets.path().join("keep"));
    let mut random = Random::seeded(bench.seed);
    std::fs::write(&image, random.bytes(bytes as usize))?;
    let server = dsync.serve(&image, &socket, &[])?;
    let mut client = Client::connect_with(&Address::Unix(socket), &export(&image), &[])?;
    let (mut plain, mut kept) = (Vec::new(), Vec::new());
    // The first round is each replica's first copy.
    for round in 0..=rounds {
        for _ in 0..bytes / 10 / WRITE {
            let offset = random.below(bytes / WRITE) * WRITE;
            client.start(&Command::Write { offset, data: random.bytes(WRITE as usize), flags: 0 })?;
            if client.in_flight() >= 8 {
                client.finish()?;
            }
        }
        while client.in_flight() > 0 {
            client.finish()?;
        }
        client.flush()?;
        for half in 0..2 {
            process::go_on()?;
            let keeps = (half + round) % 2 == 1;
            let (name, options, times) = match keeps {
                true => ("kept.raw", &["--keep-last", "100"][..], &mut kept),
                false => ("plain.raw", &[][..], &mut plain),
            };
            let replica = folder.path().join(name).display().to_string();
            let synced = dsync.sync(&image, &replica, options, LIMIT)?;
            if round > 0 {
                times.push(synced.outcome.seconds);
            }
        }
    }
    client.close()?;
    server.stop()?;
    let ratio = median(&kept) / median(&plain);
    let single: Vec<f64> = kept.iter().zip(&plain).map(|(kept, plain)| kept / plain).collect();
    let bound = |pick: fn(f64, f64) -> f64| single.iter().copied().reduce(pick).unwrap_or(0.0);
    let mut table =
        Table::new("Seconds of a sync", &["without", "with --keep-last", "ratio", "of single rounds"]);
    table.row(vec![
        seconds(median(&plain)),
        seconds(median(&kept)),
        format!("{ratio:.2}"),
        format!("{:.2} to {:.2}", bound(f64::min), bound(f64::max)),
    ]);
    report.table(&table);
    report.goal("a commit with --keep-last : without", ratio, true, 1.5);
    Ok(())
}
