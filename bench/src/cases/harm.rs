//! What the host suffers: how long a writer's requests take while its disk is followed, viewed, synced, mirrored, or read by rsync;
//! and what a sync leaves in the page cache.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use dsync_tests::nbd::{Address, Client};
use serde_json::Value;

use crate::Bench;
use crate::hosts::Hosts;
use crate::hosts::scene::{Scene, Tool};
use crate::measure::content::{Content, drop_caches};
use crate::measure::dsync::{export, uri};
use crate::measure::places::{filled, root, scratch, sockets};
use crate::measure::process::{Daemon, command, run, shell};
use crate::measure::report::{Report, Table, median, size};

const LIMIT: Duration = Duration::from_secs(600);
const RATE: u64 = 1_000_000_000;

/// What goes on while the writer writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// Nothing, and nobody follows the writes: qemu-nbd serves.
    Untracked,
    Nothing,
    /// A view is open, and nobody reads it.
    Open,
    View,
    /// By a server with `--polite`.
    PoliteView,
    Sync,
    PoliteSync,
    /// With the priority that its unit gives it.
    Unit,
    Mirror,
    Rsync,
}

impl Beside {
    const ALL: [Beside; 10] = [
        Beside::Untracked,
        Beside::Nothing,
        Beside::Open,
        Beside::View,
        Beside::PoliteView,
        Beside::Sync,
        Beside::PoliteSync,
        Beside::Unit,
        Beside::Mirror,
        Beside::Rsync,
    ];

    fn name(self) -> &'static str {
        match self {
            Beside::Untracked => "qemu-nbd, nothing follows",
            Beside::Nothing => "dsync serve",
            Beside::Open => "and a view is open",
            Beside::View => "and a view is read",
            Beside::PoliteView => "and a view is read, serve --polite",
            Beside::Sync => "and a sync runs",
            Beside::PoliteSync => "and a sync --polite runs",
            Beside::Unit => "and a sync runs at nice 10, as its unit does",
            Beside::Mirror => "and a mirror runs",
            Beside::Rsync => "and rsync runs",
        }
    }
}

/// One run of the writer: latencies in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Felt {
    iops: f64,
    middle: f64,
    p99: f64,
    p999: f64,
}

impl Felt {
    /// From fio's JSON.
    fn of(json: &str) -> Result<Felt> {
        let json = json.find('{').map(|at| &json[at..]).unwrap_or_default();
        let all: Value = serde_json::from_str(json).context("fio's output")?;
        let write = &all["jobs"][0]["write"];
        let latency = |percentile: &str| {
            write["clat_ns"]["percentile"][percentile].as_f64().map(|ns| ns / 1e3).context("fio did nothing")
        };
        Ok(Felt {
            iops: write["iops"].as_f64().context("fio did nothing")?,
            middle: latency("50.000000")?,
            p99: latency("99.000000")?,
            p999: latency("99.900000")?,
        })
    }
}

/// The runs of one situation at one depth.
struct Runs {
    beside: Beside,
    depth: u32,
    felt: Vec<Felt>,
}

impl Runs {
    fn of(&self, figure: impl Fn(&Felt) -> f64) -> f64 {
        median(&self.felt.iter().map(figure).collect::<Vec<_>>())
    }
}

/// Runs the scenario.
pub(crate) fn harm(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 128 << 20 } else { 1 << 30 }).next_multiple_of(1 << 20);
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 });
    let seconds = if bench.quick { 1 } else { 6 };
    report.section(
        "harm: what the writer feels",
        &format!(
            "fio, random writes of 4 KiB through NBD to an image of {} on disk, {seconds} s each; the copy is on another host over \
             1 Gbit/s, each host with a processor of its own. Latencies in microseconds, medians of {rounds} interleaved rounds.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("harm", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    for tool in ["fio", "qemu-nbd", "rsync", "nbdcopy", "fincore"] {
        if dsync_tests::find(tool).is_none() {
            report.left_out("harm", &format!("{tool} is not installed"));
            return Ok(());
        }
    }
    let folder = scratch(&bench.dir)?;
    let hosts = match Hosts::new(Some(RATE), folder.path()) {
        Ok(hosts) => Arc::new(hosts),
        Err(error) => {
            report.left_out("harm", &format!("{error:#}"));
            return Ok(());
        }
    };
    let mut scene = Scene::new(&hosts, binary, folder.path(), Content::new(bench.seed, bytes))?;
    let mut tools = vec![Tool::Tls, Tool::Rsync];
    scene.first_copies(&mut tools, report)?;
    let sockets = sockets()?;
    let raw = folder.path().join("raw.img");
    filled(&raw, bytes)?;
    let _untracked = untracked(&hosts, &raw, &sockets.path().join("raw"))?;
    let (image, polite) = (folder.path().join("polite.img"), sockets.path().join("polite"));
    filled(&image, bytes)?;
    let _polite = served_politely(&hosts, binary, &image, &polite)?;
    let mut all = Vec::new();
    for depth in [1, 32] {
        for beside in Beside::ALL {
            all.push(Runs { beside, depth, felt: Vec::new() });
        }
    }
    for round in 0..rounds {
        for runs in &mut all {
            let uri = match runs.beside {
                Beside::Untracked => uri("disk", &sockets.path().join("raw")),
                Beside::PoliteView => uri("polite", &polite),
                _ => uri(&export(scene.image()), scene.socket()),
            };
            let held = (runs.beside == Beside::Open).then(|| view(&scene)).transpose()?;
            let mut other = beside(&scene, &polite, runs.beside)?;
            let outcome = run(&mut hosts.near.run(&writer(&uri, bytes, runs.depth, seconds)), LIMIT)?;
            if let Some(other) = &mut other {
                other.check().context(runs.beside.name())?;
            }
            drop((other, held));
            let felt = Felt::of(&outcome.stdout)?;
            if !bench.quiet {
                println!("round {}: depth {}, {}: {felt:?}", round + 1, runs.depth, runs.beside.name());
            }
            runs.felt.push(felt);
        }
    }
    show(report, &all);
    cached(&mut scene, report)
}

fn untracked(hosts: &Hosts, image: &Path, socket: &Path) -> Result<Daemon> {
    let mut line = command("qemu-nbd");
    line.args(["-f", "raw", "-t", "-e", "4", "-x", "disk", "--aio=io_uring", "--cache=writeback", "-k"]);
    Daemon::start(hosts.near.run(line.arg(socket).arg(image)), socket)
}

fn served_politely(hosts: &Hosts, binary: &Path, image: &Path, socket: &Path) -> Result<Daemon> {
    let mut serve = Command::new(binary);
    serve.env("DSYNC_STATE_DIR", image.with_extension("state")).args(["serve", "--polite", "--socket"]);
    Daemon::start(hosts.near.run(serve.arg(socket).arg(image)), socket)
}

fn writer(uri: &str, bytes: u64, depth: u32, seconds: u64) -> Command {
    let mut fio = command("fio");
    fio.args(["--name=load", "--ioengine=nbd", "--thread", "--rw=randwrite", "--bs=4k", "--time_based"]);
    fio.args(["--output-format=json", "--randrepeat=0", "--norandommap", "--ramp_time=1"]);
    fio.arg(format!("--iodepth={depth}")).arg(format!("--runtime={seconds}"));
    fio.arg(format!("--size={bytes}")).arg(format!("--uri={uri}"));
    fio
}

/// Opens a view of the image, for as long as the client lives.
fn view(scene: &Scene) -> Result<Client> {
    let address = Address::Unix(scene.socket().to_path_buf());
    Ok(Client::connect_with(&address, &format!("{}@view", export(scene.image())), &[])?)
}

/// What runs beside the writer until it is dropped, again and again.
fn beside(scene: &Scene, polite: &Path, what: Beside) -> Result<Option<Daemon>> {
    let again = |line: String| shell(&format!("while {line}; do :; done"));
    // What was stopped before may not have let go of the replica yet.
    let waiting = |line: String| format!("{line} --wait=30s");
    let read = |view: String| scene.near(&again(format!("nbdcopy '{view}' null:")));
    let mut command = match what {
        Beside::Untracked | Beside::Nothing | Beside::Open => return Ok(None),
        Beside::View => read(uri(&format!("{}@view", export(scene.image())), scene.socket())),
        Beside::PoliteView => read(uri("polite@view", polite)),
        Beside::Sync => scene.near(&again(waiting(scene.line(Tool::Tls)?))),
        Beside::PoliteSync => scene.near(&again(waiting(format!("{} --polite", scene.line(Tool::Tls)?)))),
        Beside::Unit => scene.near(&again(waiting(format!("nice -n 10 {}", scene.line(Tool::Tls)?)))),
        Beside::Rsync => scene.near(&again(scene.line(Tool::Rsync)?)),
        Beside::Mirror => {
            let mut mirror = scene.mirror(Tool::Tls);
            mirror.arg("--wait=30s");
            mirror
        }
    };
    let mut started = Daemon::start_bare(&mut command)?;
    std::thread::sleep(Duration::from_millis(500));
    started.check().context(what.name())?;
    Ok(Some(started))
}

fn show(report: &mut Report, all: &[Runs]) {
    for depth in [1, 32] {
        let mut table = Table::new(
            &format!("The writer at depth {depth}"),
            &["", "writes a second", "p50", "p99", "p99.9", "spread of p99"],
        );
        for runs in all.iter().filter(|runs| runs.depth == depth) {
            let p99 = || runs.felt.iter().map(|felt| felt.p99);
            table.row(vec![
                runs.beside.name().into(),
                format!("{:.0}", runs.of(|felt| felt.iops)),
                format!("{:.0}", runs.of(|felt| felt.middle)),
                format!("{:.0}", runs.of(|felt| felt.p99)),
                format!("{:.0}", runs.of(|felt| felt.p999)),
                format!("{:.0}-{:.0}", p99().fold(f64::MAX, f64::min), p99().fold(0.0, f64::max)),
            ]);
        }
        report.table(&table);
        let find = |beside| all.iter().find(|runs| runs.depth == depth && runs.beside == beside);
        let Some(alone) = find(Beside::Nothing) else { continue };
        for beside in [Beside::Sync, Beside::PoliteSync, Beside::Unit, Beside::Mirror] {
            if let Some(runs) = find(beside) {
                let ratio = runs.of(|felt| felt.p99) / alone.of(|felt| felt.p99);
                report.goal(
                    &format!("p99 at depth {depth}, {}: times without", beside.name()),
                    ratio,
                    true,
                    2.0,
                );
            }
        }
        for beside in [Beside::Open, Beside::PoliteView, Beside::PoliteSync] {
            if let Some(runs) = find(beside) {
                let ratio = runs.of(|felt| felt.iops) / alone.of(|felt| felt.iops);
                let least = if beside == Beside::PoliteSync { 0.8 } else { 0.5 };
                let what = format!("writes a second at depth {depth}, {}: times without", beside.name());
                report.goal(&what, ratio, false, least);
            }
        }
    }
}

/// Pages of image and copy that are in memory after each tool brought its copy up to date from cold caches.
fn cached(scene: &mut Scene, report: &mut Report) -> Result<()> {
    if !root() {
        report.left_out("the page cache", "emptying it needs root");
        return Ok(());
    }
    let mut table = Table::new(
        "In the page cache after 10 % were brought over, MiB",
        &["", "of the image", "of the copy"],
    );
    for tool in [Tool::Tls, Tool::Rsync] {
        scene.change(10)?;
        drop_caches()?;
        scene.measure(tool, 10, 0)?;
        let (image, copy) = (resident(scene.image())?, resident(&scene.copy(tool))?);
        table.row(vec![tool.name().into(), format!("{image:.1}"), format!("{copy:.1}")]);
    }
    report.table(&table);
    Ok(())
}

fn resident(file: &Path) -> Result<f64> {
    let outcome =
        run(command("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(file), LIMIT)?;
    let bytes: f64 = outcome.stdout.trim().parse().context("fincore's output")?;
    Ok(bytes / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_as_fio_prints_them() {
        let json = r#"fio: a note
            {"jobs":[{"write":{"iops":1250.5,"clat_ns":{"percentile":{"50.000000":81000,"99.000000":200500,"99.900000":1e6}}}}]}"#;
        let felt = Felt { iops: 1250.5, middle: 81.0, p99: 200.5, p999: 1000.0 };
        assert_eq!(Felt::of(json).unwrap(), felt);
        assert!(Felt::of("{}").is_err());
    }
}
