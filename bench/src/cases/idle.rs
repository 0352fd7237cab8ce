//! Cost follows the change, not the disk: a disk of 64 TiB beside one of 1 GiB, idle, and with 1000 blocks changed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use dsync_tests::Random;
use dsync_tests::nbd::{Address, Client, NbdCommand};

use crate::Bench;
use crate::measure::dsync::{Dsync, Synced, export};
use crate::measure::places::{scratch, sockets, sparse};
use crate::measure::process::{self, Daemon};
use crate::measure::report::{Report, Table, median, seconds, size};

const LIMIT: Duration = Duration::from_secs(600);

/// The block size that keeps the bitmap of the large disk at 128 MiB.
const LARGE_BLOCK: u64 = 64 << 10;

struct Disk<'a> {
    name: &'static str,
    dsync: &'a Dsync,
    server: Daemon,
    image: PathBuf,
    replica: PathBuf,
    socket: PathBuf,
    bytes: u64,
    block: u64,
    idle: Vec<f64>,
    changed: Vec<f64>,
    peak: u64,
    read: u64,
}

impl<'a> Disk<'a> {
    fn new(
        name: &'static str,
        dsync: &'a Dsync,
        (folder, sockets): (&Path, &Path),
        bytes: u64,
        block: u64,
    ) -> Result<Disk<'a>> {
        let stem = name.replace([' ', ','], "");
        let image = folder.join(&stem).with_extension("img");
        sparse(&image, bytes)
            .context("a sparse file of 64 TiB needs a file system that allows it, as tmpfs or XFS")?;
        let socket = sockets.join(&stem);
        let server = dsync.serve(&image, &socket, &["--block-size", &block.to_string()])?;
        let replica = folder.join(format!("{stem}-copy.img"));
        Ok(Disk {
            name,
            dsync,
            server,
            image,
            replica,
            socket,
            bytes,
            block,
            idle: Vec::new(),
            changed: Vec::new(),
            peak: 0,
            read: 0,
        })
    }

    fn sync(&mut self) -> Result<Synced> {
        let replica = self.replica.display().to_string();
        let synced = self.dsync.sync(&self.image, &replica, &["--commit", "in-place"], LIMIT)?;
        self.peak = self.peak.max(synced.outcome.peak);
        Ok(synced)
    }

    /// Changes so many blocks somewhere.
    fn change(&mut self, blocks: u64, random: &mut Random) -> Result<()> {
        let mut client =
            Client::connect_with(&Address::Unix(self.socket.clone()), &export(&self.image), &[])?;
        for _ in 0..blocks {
            let offset = random.below(self.bytes / self.block) * self.block;
            client.start(&NbdCommand::Write { offset, data: random.bytes(4096), flags: 0 })?;
            if client.in_flight() >= 32 {
                client.finish()?;
            }
        }
        while client.in_flight() > 0 {
            client.finish()?;
        }
        client.flush()?;
        Ok(client.close()?)
    }
}

/// Runs the scenario.
pub(crate) fn idle(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 3 } else { 15 });
    report.section(
        "idle: cost follows the change, not the disk",
        &format!(
            "Sparse images in memory, the state on disk. An idle sync, then one of 1000 scattered changed blocks; medians of \
             {rounds} interleaved rounds. The large disk has blocks of 64 KiB, so that its bitmap stays at 128 MiB; beside \
             it a small disk with the same blocks, and one with blocks of 4 KiB."
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("idle", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let folder = scratch(&bench.memory_dir)?;
    let state = scratch(&bench.dir)?;
    let sockets = sockets()?;
    let dsync = Dsync::new(binary, state.path().join("state"));
    let places = (folder.path(), sockets.path());
    let mut disks = [
        Disk::new("64 TiB", &dsync, places, 64 << 40, LARGE_BLOCK)?,
        Disk::new("1 GiB", &dsync, places, 1 << 30, LARGE_BLOCK)?,
        Disk::new("1 GiB, 4 KiB blocks", &dsync, places, 1 << 30, 4096)?,
    ];
    for disk in &mut disks {
        let seed = disk.sync().with_context(|| format!("the seed of {}", disk.name))?;
        report.line(&format!("{}: the first sync took {} s", disk.name, seconds(seed.outcome.seconds)));
    }
    let mut random = Random::seeded(bench.seed);
    for round in 0..rounds {
        for at in 0..disks.len() {
            process::go_on()?;
            let disk = &mut disks[(at + round) % 3];
            let idle = disk.sync()?;
            disk.change(1000, &mut random)?;
            let changed = disk.sync()?;
            if !bench.quiet {
                let (idle, changed) = (idle.outcome.seconds, changed.outcome.seconds);
                eprintln!("round {}: {}: {} s, {} s", round + 1, disk.name, seconds(idle), seconds(changed));
            }
            disk.idle.push(idle.outcome.seconds);
            disk.changed.push(changed.outcome.seconds);
            disk.read = changed.number("bytes_read");
        }
    }
    let mut table = Table::new(
        "Seconds of a sync, and peak memory",
        &["source", "idle", "1000 blocks", "read", "sync's memory", "server's memory", "bitmap"],
    );
    for disk in &disks {
        let bitmap = disk.bytes / disk.block / 8;
        let served = disk.server.peak();
        table.row(vec![
            disk.name.into(),
            seconds(median(&disk.idle)),
            seconds(median(&disk.changed)),
            size(disk.read as f64),
            size(disk.peak as f64),
            size(served as f64),
            size(bitmap as f64),
        ]);
        for (whose, peak) in [("sync", disk.peak), ("server", served)] {
            let most = (64 << 20) + bitmap;
            let what = format!("{}: peak memory of the {whose}, times 64 MiB and the bitmap", disk.name);
            report.goal(&what, peak as f64 / most as f64, true, 1.0);
        }
    }
    report.table(&table);
    let ratio = |of: fn(&Disk) -> f64| of(&disks[0]) / of(&disks[1]);
    report.goal("an idle 64 TiB, times an idle 1 GiB", ratio(|disk| median(&disk.idle)), true, 1.5);
    report.goal("64 TiB with 1000 blocks, times 1 GiB", ratio(|disk| median(&disk.changed)), true, 1.5);
    for disk in disks {
        disk.server.stop()?;
    }
    Ok(())
}
