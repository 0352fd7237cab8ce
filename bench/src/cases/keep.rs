//! What a commit costs that keeps the past, beside what the disk allows.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use dsync_tests::Random;
use dsync_tests::nbd::{Address, Client, NbdCommand};

use crate::figures::rotated;
use crate::measure::dsync::{Dsync, export};
use crate::measure::limit::{BLOCK, write_list};
use crate::measure::places::{scratch, sockets};
use crate::measure::process::{self, command, run};
use crate::measure::report::{Report, Table, median, seconds, size};
use crate::{Bench, own};

const LIMIT: Duration = Duration::from_secs(600);
/// Bytes of a write.
const WRITE: u64 = 64 << 10;

/// A copy, and how it is brought up to date.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Kept,
    PlainLimit,
    KeptLimit,
    /// What is kept, in the journal's place.
    UndoLimit,
}

impl Way {
    const ALL: [Way; 5] = [Way::Plain, Way::Kept, Way::PlainLimit, Way::KeptLimit, Way::UndoLimit];

    fn file(self) -> &'static str {
        match self {
            Way::Plain => "plain.raw",
            Way::Kept => "kept.raw",
            Way::PlainLimit => "plain-limit.raw",
            Way::KeptLimit => "kept-limit.raw",
            Way::UndoLimit => "undo-limit.raw",
        }
    }
}

/// Runs the scenario.
pub(crate) fn keep(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 3 } else { 9 });
    let bytes = bench.size.unwrap_or(if bench.quick { 128 << 20 } else { 1 << 30 });
    report.section(
        "keep: what a commit costs that keeps the past",
        &format!(
            "An image of {} of random data, served; before each round a tenth is overwritten in writes of 64 KiB. Then a sync to a local \
             replica, one to another with `--keep-last 100`, and the limit of both: a program that is given the list, and stores the \
             blocks in a journal, then what they replace in another file, if that is to be kept, then brings them to their places, each \
             step durable, with io_uring past the page cache; and that without the journal. In rotating order; medians of {rounds} rounds.",
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
    for way in [Way::PlainLimit, Way::KeptLimit, Way::UndoLimit] {
        std::fs::copy(&image, folder.path().join(way.file()))?;
    }
    let server = dsync.serve(&image, &socket, &[])?;
    let mut client = Client::connect_with(&Address::Unix(socket), &export(&image), &[])?;
    let mut times = [const { Vec::new() }; Way::ALL.len()];
    // The first round is each replica's first copy.
    for round in 0..=rounds {
        let changed = overwrite(&mut client, bytes, &mut random)?;
        write_list(&folder.path().join("list"), &changed)?;
        for way in rotated(&Way::ALL, round) {
            process::go_on()?;
            let seconds = match way {
                Way::Plain | Way::Kept => {
                    let options = if way == Way::Kept { &["--keep-last", "100"][..] } else { &[] };
                    let replica = folder.path().join(way.file()).display().to_string();
                    dsync.sync(&image, &replica, options, LIMIT)?.outcome.seconds
                }
                Way::PlainLimit | Way::KeptLimit | Way::UndoLimit => {
                    limit(folder.path(), &image, way, round)?
                }
            };
            if round > 0 {
                times[way as usize].push(seconds);
            }
        }
    }
    client.close()?;
    server.stop()?;
    for way in Way::ALL {
        let copy = folder.path().join(way.file());
        run(command("cmp").arg(&image).arg(copy), LIMIT).context("WRONG CONTENT")?;
    }
    show(report, &times);
    Ok(())
}

/// Overwrites a tenth of the image, and returns the blocks, ascending.
fn overwrite(client: &mut Client, bytes: u64, random: &mut Random) -> Result<Vec<u64>> {
    let mut changed = Vec::new();
    for _ in 0..bytes / 10 / WRITE {
        let offset = random.below(bytes / WRITE) * WRITE;
        changed.extend(offset / BLOCK..(offset + WRITE) / BLOCK);
        client.start(&NbdCommand::Write { offset, data: random.bytes(WRITE as usize), flags: 0 })?;
        if client.in_flight() >= 8 {
            client.finish()?;
        }
    }
    while client.in_flight() > 0 {
        client.finish()?;
    }
    client.flush()?;
    changed.sort_unstable();
    changed.dedup();
    Ok(changed)
}

fn show(report: &mut Report, times: &[Vec<f64>; Way::ALL.len()]) {
    let mut table = Table::new("Seconds", &["", "without", "keeping", "ratio", "of single rounds"]);
    let mut ratio = |what: &str, [plain, kept]: [Way; 2]| {
        let [plain, kept] = [plain, kept].map(|way| &times[way as usize]);
        let single: Vec<f64> = kept.iter().zip(plain).map(|(kept, plain)| kept / plain).collect();
        let bound = |pick: fn(f64, f64) -> f64| single.iter().copied().reduce(pick).unwrap_or(0.0);
        let ratio = median(kept) / median(plain);
        table.row(vec![
            what.into(),
            seconds(median(plain)),
            seconds(median(kept)),
            format!("{ratio:.2}"),
            format!("{:.2} to {:.2}", bound(f64::min), bound(f64::max)),
        ]);
        ratio
    };
    let ours = ratio("dsync sync", [Way::Plain, Way::Kept]);
    ratio("limit", [Way::PlainLimit, Way::KeptLimit]);
    ratio("limit, keeping in the journal's place", [Way::PlainLimit, Way::UndoLimit]);
    report.table(&table);
    report.goal("a commit with --keep-last : without", ours, true, 1.5);
}

/// Seconds that the limit takes for one round's blocks.
fn limit(folder: &Path, image: &Path, way: Way, round: usize) -> Result<f64> {
    let mut limit = own("limit-commit");
    limit.arg(image).arg(folder.join(way.file())).arg(folder.join("list"));
    if way != Way::UndoLimit {
        limit.arg("--journal").arg(folder.join("journal"));
    }
    if way != Way::PlainLimit {
        limit.arg("--undo").arg(folder.join(format!("{}-{round}", way.file())));
    }
    Ok(run(&mut limit, LIMIT)?.seconds)
}
