//! The NBD server beside other NBD servers, driven by fio.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use dsync_tests::nbd::{Address, Client, NbdCommand};
use serde_json::Value;

use crate::Bench;
use crate::measure::dsync::{Dsync, export, uri};
use crate::measure::places::{filled, scratch, sockets, sparse};
use crate::measure::process::{self, Daemon, command, run, shell};
use crate::measure::report::{Report, Table, median};

const OURS: &str = "dsync serve";
const NBDKIT: &str = "nbdkit file";
const NBDKIT_ONE: &str = "nbdkit file, -t 1";
const QEMU: &str = "qemu-nbd";

/// One of fio's jobs.
struct Load {
    name: &'static str,
    options: &'static [&'static str],
    /// Counted in bytes, not in operations.
    large: bool,
}

const LOADS: [Load; 5] = [
    Load {
        name: "4 KiB write, depth 1",
        options: &["--rw=randwrite", "--bs=4k", "--iodepth=1", "--numjobs=1"],
        large: false,
    },
    Load {
        name: "depth 32",
        options: &["--rw=randwrite", "--bs=4k", "--iodepth=32", "--numjobs=1"],
        large: false,
    },
    Load {
        name: "4 connections x 16",
        options: &["--rw=randwrite", "--bs=4k", "--iodepth=16", "--numjobs=4"],
        large: false,
    },
    Load {
        name: "1 MiB write",
        options: &["--rw=randwrite", "--bs=1m", "--iodepth=8", "--numjobs=1"],
        large: true,
    },
    Load {
        name: "1 MiB read",
        options: &["--rw=randread", "--bs=1m", "--iodepth=8", "--numjobs=1"],
        large: true,
    },
];

/// Where the images lie, and how they are opened.
#[derive(Clone, Copy, PartialEq)]
enum Medium {
    Memory,
    Direct,
}

struct Setting<'a> {
    dsync: Option<&'a Dsync>,
    sockets: &'a Path,
    seconds: u64,
    bytes: u64,
}

impl Setting<'_> {
    /// Starts a server over an image; where it listens, and its export.
    fn start(&self, name: &str, image: &Path, medium: Medium) -> Result<(Daemon, PathBuf, String)> {
        let socket = self.sockets.join("nbd");
        let _ = std::fs::remove_file(&socket);
        let direct = medium == Medium::Direct;
        if name == OURS {
            let dsync = self.dsync.context("no dsync")?;
            let server = dsync.serve(image, &socket, if direct { &["--direct"] } else { &[] })?;
            return Ok((server, socket, export(image)));
        }
        let mut line;
        if name == QEMU {
            line = command("qemu-nbd");
            line.args(["-f", "raw", "-t", "-e", "16", "-x", "disk", "--aio=io_uring"]);
            line.arg(if direct { "--cache=none" } else { "--cache=writeback" });
            line.arg("-k").arg(&socket).arg(image);
        } else {
            line = command("nbdkit");
            line.args(["-f", "-e", "disk"]).arg("-U").arg(&socket);
            if name == NBDKIT_ONE {
                line.args(["-t", "1"]);
            }
            line.arg("file").arg(image);
        }
        let export = if name == QEMU { "disk" } else { "" };
        Ok((Daemon::start(line, &socket)?, socket, export.into()))
    }

    /// Operations or bytes a second.
    fn load(&self, load: &Load, socket: &Path, export: &str) -> Result<f64> {
        let mut fio = command("fio");
        fio.args(["--name=load", "--ioengine=nbd", "--thread", "--group_reporting", "--time_based"]);
        fio.args(["--output-format=json", "--randrepeat=0", "--norandommap"]);
        fio.args(load.options);
        fio.arg(format!("--runtime={}", self.seconds)).arg(format!("--size={}", self.bytes));
        fio.arg(format!("--uri={}", uri(export, socket)));
        let outcome = run(&mut fio, Duration::from_secs(60 + 5 * self.seconds))?;
        let json = outcome.stdout.find('{').map(|at| &outcome.stdout[at..]).unwrap_or_default();
        let all: Value = serde_json::from_str(json).context("fio's output")?;
        let job = &all["jobs"][0];
        let side = if load.options[0].ends_with("read") { &job["read"] } else { &job["write"] };
        let figure = if load.large { &side["bw_bytes"] } else { &side["iops"] };
        figure.as_f64().filter(|&figure| figure > 0.0).context("fio did nothing")
    }

    /// Touches every mebibyte, so that each region is active.
    fn warm(&self, socket: &Path, export: &str) -> Result<()> {
        let mut client = Client::connect_with(&Address::Unix(socket.to_path_buf()), export, &[])?;
        for offset in (0..self.bytes).step_by(1 << 20) {
            client.start(&NbdCommand::Write { offset, data: vec![1; 4096], flags: 0 })?;
            if client.in_flight() >= 32 {
                client.finish()?;
            }
        }
        while client.in_flight() > 0 {
            client.finish()?;
        }
        Ok(client.close()?)
    }
}

fn show(load: &Load, figure: f64) -> String {
    if load.large { format!("{:.2} GB/s", figure / 1e9) } else { format!("{:.1}k", figure / 1e3) }
}

/// Runs the scenario.
pub(crate) fn serve(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 5 });
    let seconds = if bench.quick { 1 } else { 4 };
    let bytes = bench.size.unwrap_or(if bench.quick { 256 << 20 } else { 1 << 30 }).next_multiple_of(1 << 20);
    report.section(
        "serve: NBD servers",
        &format!(
            "fio's nbd engine over a Unix socket, {seconds} s each, medians of {rounds} interleaved rounds, an image of {}. \
             dsync tracks durably, its state on disk; before each run every region has been written to (warm).",
            crate::measure::report::size(bytes as f64)
        ),
    );
    if dsync_tests::find("fio").is_none() {
        report.left_out("serve", "fio is not installed");
        return Ok(());
    }
    let folder = scratch(&bench.dir)?;
    let memory = scratch(&bench.memory_dir)?;
    let sockets = sockets()?;
    let dsync = bench.dsync.as_ref().map(|binary| Dsync::new(binary, folder.path().join("state")));
    let setting = Setting { dsync: dsync.as_ref(), sockets: sockets.path(), seconds, bytes };
    let mut names = Vec::new();
    for (name, tool) in [(NBDKIT, "nbdkit"), (NBDKIT_ONE, "nbdkit"), (QEMU, "qemu-nbd")] {
        match dsync_tests::find(tool) {
            Some(_) => names.push(name),
            None => report.left_out(name, &format!("{tool} is not installed")),
        }
    }
    match &dsync {
        Some(_) => names.insert(0, OURS),
        None => report.left_out(OURS, "no binary: build it, or name it with --dsync"),
    }
    for medium in [Medium::Memory, Medium::Direct] {
        let (place, title) = match medium {
            Medium::Memory => (memory.path(), "Files in memory"),
            Medium::Direct => {
                (folder.path(), "Files on disk, opened directly (nbdkit has no such way: buffered)")
            }
        };
        // dsync has its own, because others would write past its back.
        let images = [place.join("ours.img"), place.join("theirs.img")];
        images.iter().try_for_each(|image| filled(image, bytes))?;
        compare(bench, report, &setting, &mut names, medium, title, &images, rounds)?;
        for image in &images {
            std::fs::remove_file(image)?;
        }
    }
    if names.contains(&OURS) {
        cold(bench, report, &setting, memory.path(), rounds)?;
        viewed(bench, report, &setting, memory.path())?;
    }
    Ok(())
}

#[expect(clippy::too_many_arguments, reason = "a step of the one function above")]
fn compare(
    bench: &Bench,
    report: &mut Report,
    setting: &Setting,
    names: &mut Vec<&'static str>,
    medium: Medium,
    title: &str,
    images: &[PathBuf; 2],
    rounds: usize,
) -> Result<()> {
    let mut figures: BTreeMap<(&str, usize), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        for at in 0..names.len() {
            if process::interrupted() {
                break;
            }
            let name = names[(at + round) % names.len()];
            let image = &images[usize::from(name != OURS)];
            let mut one = || -> Result<()> {
                let (server, socket, export) = setting.start(name, image, medium)?;
                for (at, load) in LOADS.iter().enumerate() {
                    setting.warm(&socket, &export)?;
                    let figure = setting.load(load, &socket, &export)?;
                    if !bench.quiet {
                        eprintln!("round {}: {name}, {}: {}", round + 1, load.name, show(load, figure));
                    }
                    figures.entry((name, at)).or_default().push(figure);
                }
                server.stop()
            };
            if let Err(error) = one() {
                if process::interrupted() {
                    break;
                }
                report.failed(&format!("{name}, {title}"), &error);
            }
        }
    }
    let columns: Vec<&str> = std::iter::once("server").chain(LOADS.iter().map(|load| load.name)).collect();
    let mut table = Table::new(title, &columns);
    let of = |name: &str, at: usize| figures.get(&(name, at)).map(|all| median(all));
    for &name in names.iter() {
        let mut row = vec![name.to_string()];
        for (at, load) in LOADS.iter().enumerate() {
            row.push(match (of(name, at), of(OURS, at)) {
                (Some(theirs), Some(ours)) if name != OURS => {
                    format!("{} ({:.2})", show(load, theirs), ours / theirs)
                }
                (Some(figure), _) => show(load, figure),
                (None, _) => "-".into(),
            });
        }
        table.row(row);
    }
    report.table(&table);
    if of(OURS, 0).is_some() {
        report.line("In brackets: dsync's figure over this one.");
    }
    for (at, load) in LOADS.iter().enumerate() {
        let (peer, goal) = match (medium, at) {
            (Medium::Direct, _) => (QEMU, 1.3),
            (Medium::Memory, 0) => (NBDKIT_ONE, 0.9),
            (Medium::Memory, 1 | 2) => (NBDKIT, 1.3),
            (Medium::Memory, _) => (NBDKIT, 1.0),
        };
        if let (Some(ours), Some(theirs)) = (of(OURS, at), of(peer, at)) {
            let place = if medium == Medium::Memory { "in memory" } else { "direct" };
            report.goal(&format!("{place}: {}, times {peer}", load.name), ours / theirs, false, goal);
        }
    }
    Ok(())
}

/// The first seconds of a fresh server over a large image: every region is idle, and its first write waits for its intent.
fn cold(bench: &Bench, report: &mut Report, setting: &Setting, place: &Path, rounds: usize) -> Result<()> {
    let bytes = 8 * setting.bytes;
    let setting = Setting { bytes, ..*setting };
    let mut table = Table::new(
        &format!(
            "Cold regions: a fresh server over a sparse image of {}",
            crate::measure::report::size(bytes as f64)
        ),
        &["dsync serve", LOADS[0].name, LOADS[1].name, LOADS[2].name],
    );
    let image = place.join("cold.img");
    for warm in [false, true] {
        let mut row = vec![if warm { "warm" } else { "cold" }.to_string()];
        for load in &LOADS[..3] {
            let mut figures = Vec::new();
            for round in 0..rounds.min(3) {
                sparse(&image, bytes)?;
                let (server, socket, export) = setting.start(OURS, &image, Medium::Memory)?;
                if warm {
                    setting.warm(&socket, &export)?;
                }
                figures.push(setting.load(load, &socket, &export)?);
                if !bench.quiet {
                    eprintln!(
                        "round {}: warm {warm}, {}: {}",
                        round + 1,
                        load.name,
                        show(load, figures[round])
                    );
                }
                server.stop()?;
                std::fs::remove_file(&image)?;
            }
            row.push(show(load, median(&figures)));
        }
        table.row(row);
    }
    report.table(&table);
    Ok(())
}

/// The same loads while a view is open and read, again and again.
fn viewed(bench: &Bench, report: &mut Report, setting: &Setting, place: &Path) -> Result<()> {
    if dsync_tests::find("nbdcopy").is_none() {
        report.left_out("serve with an open view", "nbdcopy is not installed");
        return Ok(());
    }
    let columns: Vec<&str> =
        std::iter::once("dsync serve").chain(LOADS.iter().map(|load| load.name)).collect();
    let mut table = Table::new("While a view is open and nbdcopy reads it", &columns);
    let image = place.join("viewed.img");
    filled(&image, setting.bytes)?;
    let (server, socket, export) = setting.start(OURS, &image, Medium::Memory)?;
    for open in [false, true] {
        let mut row = vec![if open { "open view" } else { "no view" }.to_string()];
        for load in &LOADS {
            setting.warm(&socket, &export)?;
            // Every copy is of a view of its own: what a longer one would have read is in the cache of saved blocks.
            let line =
                format!("while nbdcopy '{}' null:; do :; done", uri(&format!("{export}@view"), &socket));
            let mut reader = if open { Some(Daemon::start_bare(&mut shell(&line))?) } else { None };
            let figure = setting.load(load, &socket, &export)?;
            if let Some(reader) = &mut reader {
                reader.check().context("nbdcopy of the view")?;
            }
            if !bench.quiet {
                eprintln!("view {open}, {}: {}", load.name, show(load, figure));
            }
            row.push(show(load, figure));
        }
        table.row(row);
    }
    server.stop()?;
    report.table(&table);
    Ok(())
}
