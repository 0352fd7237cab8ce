//! The disk of a virtual machine at work: PostgreSQL under pgbench and users of a file server on one live ext4, whose device the bpf tracker
//! follows. Figures 8 and 9 of "dsync: Efficient Block-wise Synchronization of Multi-Gigabyte Binary Data" (LISA 2013), which had RUBiS
//! for a load.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dsync_tests::Random;
use serde_json::Value;
use tempfile::TempDir;

use crate::Bench;
use crate::figures::churn::{Churn, User};
use crate::figures::lengths::lengths;
use crate::figures::plot::{Series, points};
use crate::figures::postgres::{Database, Programs};
use crate::figures::results;
use crate::figures::sheet::{Line, Sheet};
use crate::hosts::Hosts;
use crate::hosts::sites::{Followed, Sites};
use crate::measure::limit::BLOCK;
use crate::measure::places::{Loop, own_mounts, root, scratch, sockets, sparse};
use crate::measure::process::{command, go_on, quote, run, shell};
use crate::measure::report::{Report, Table, median, size};

const RATE: u64 = 1_000_000_000;
const LIMIT: Duration = Duration::from_secs(1200);
const MB: f64 = 1e6;
/// Tools without a record read everything, which takes long and always the same: they run each fifth time.
const SELDOM: usize = 5;
const QUIET: &str = "dsync, at rest";
const BUSY: &str = "dsync, under load";
const RSYNC: &str = "rsync --inplace";
const SCP: &str = "scp";

/// The machine's disk and the file system on it.
struct Machine {
    image: PathBuf,
    disk: Followed,
    mounted: PathBuf,
    /// Everybody may enter it, as the database must.
    _place: TempDir,
}

impl Machine {
    fn new(image: PathBuf, bytes: u64, sites: &Sites) -> Result<Machine> {
        sparse(&image, bytes)?;
        let mut device = Loop::over(&image, true)?;
        run(command("mkfs.ext4").args(["-q", "-F"]).arg(device.path()), LIMIT)?;
        let place = open_place()?;
        let mounted = place.path().join("disk");
        device.mount("ext4", &mounted)?;
        Ok(Machine { image, disk: Followed::new(device, &sites.near)?, mounted, _place: place })
    }

    fn data(&self) -> PathBuf {
        self.mounted.join("data")
    }
}

/// A folder that everybody may enter, on a short path.
fn open_place() -> Result<TempDir> {
    let place = sockets()?;
    rustix::fs::chmod(place.path(), rustix::fs::Mode::from_bits_truncate(0o755))?;
    Ok(place)
}

/// A file system that takes no writes until this is dropped.
struct Frozen<'a>(&'a Path);

impl<'a> Frozen<'a> {
    fn new(folder: &'a Path) -> Result<Frozen<'a>> {
        run(command("fsfreeze").arg("--freeze").arg(folder), LIMIT)?;
        Ok(Frozen(folder))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Err(error) =
            crate::measure::process::run_always(command("fsfreeze").arg("--unfreeze").arg(self.0), LIMIT)
        {
            eprintln!("{} stays frozen: {error:#}", self.0.display());
        }
    }
}

/// What the runs have in common.
struct Setting<'a> {
    hosts: &'a Hosts,
    sites: Sites,
    machine: Machine,
    sheet: Sheet,
    /// The blocks that were changed in all runs, those of one run after the other.
    changed: Vec<Vec<u64>>,
    /// The replica's, since which the next run's changes are counted.
    epoch: u64,
    quiet: bool,
}

/// Runs the scenario.
pub(crate) fn vm(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 768 << 20 } else { 2 << 30 }).next_multiple_of(1 << 20);
    let count = bench.rounds.unwrap_or(if bench.quick { 5 } else { 20 });
    report.section(
        "vm: twenty runs of a machine at work",
        &format!(
            "An ext4 of {} on a loop device that the bpf tracker follows, with PostgreSQL under pgbench and the users of a file server. \
             {count} times: a load of 1 to 4 clients and up to 3 users for up to 4 s, then a sync to another host over TLS and 1 Gbit/s; \
             at random the load ends before it or goes on. The database and the file system are up all the time, so a sync freezes the \
             file system for its last pass.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("vm", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    for tool in ["mkfs.ext4", "losetup", "e2fsck", "fsfreeze", "unshare", "setpriv"] {
        if dsync_tests::find(tool).is_none() {
            report.left_out("vm", &format!("{tool} is not installed"));
            return Ok(());
        }
    }
    let programs = match Programs::find() {
        Ok(programs) => programs,
        Err(error) => {
            report.left_out("vm", &format!("{error:#}"));
            return Ok(());
        }
    };
    let folder = scratch(&bench.dir)?;
    let own = if root() { own_mounts() } else { Ok(()) };
    let hosts = match own.and_then(|()| Hosts::new(Some(RATE), folder.path())) {
        Ok(hosts) => Arc::new(hosts),
        Err(error) => {
            report.left_out("vm", &format!("{error:#}"));
            return Ok(());
        }
    };
    let sites = Sites::new(&hosts, binary, folder.path())?;
    let machine = Machine::new(folder.path().join("vm.raw"), bytes, &sites)?;
    let sheet = Sheet::new(&[
        "tool",
        "bytes",
        "run",
        "seconds",
        "changed",
        "extents",
        "read",
        "sent",
        "written",
        "freeze_ms",
    ]);
    let changed = Vec::new();
    let mut setting = Setting { hosts: &hosts, sites, machine, sheet, changed, epoch: 0, quiet: bench.quiet };
    let scale = if bytes < 1 << 30 { 2 } else { 20 };
    let database = Database::create(&programs, &hosts.near, &setting.machine.data(), scale)?;
    let mut random = Random::seeded(bench.seed);
    let mut user = User::new(&setting.machine.mounted.join("user-0"), random.fork())?;
    for _ in 0..100 {
        user.make()?;
    }
    setting.sync("first copy", 0)?;
    let others = setting.others(bench, report);
    for at in 1..=count {
        setting.one(&database, &mut random, at, &others)?;
    }
    let transactions = look(&setting, &programs).context("the replica of the last run")?;
    report.line(&format!(
        "the replica of the last run mounts, and {} starts on it: the books of {transactions} transactions balance",
        programs.version()?
    ));
    finish(&mut setting, database, count + 1)?;
    let file = results(bench).join("vm-runs.csv");
    let about = format!("{}- {}\n", report.about(), programs.version()?);
    let Setting { sheet, changed, .. } = setting;
    let sheet = sheet.kept(&file, &about)?;
    draw(report, &results(bench), &sheet)?;
    told_lengths(report, &results(bench), changed, bytes, &mut random)
}

impl Setting<'_> {
    /// The tools without a record that can be had.
    fn others(&self, bench: &Bench, report: &mut Report) -> Vec<&'static str> {
        let mut found = Vec::new();
        for (name, program) in [(RSYNC, "rsync"), (SCP, "scp")] {
            match dsync_tests::find(program) {
                _ if !bench.wants(name) => {}
                Some(_) => found.push(name),
                None => report.left_out(name, "it is not installed"),
            }
        }
        found
    }

    /// A load, and then the syncs.
    fn one(
        &mut self,
        database: &Database,
        random: &mut Random,
        at: usize,
        others: &[&'static str],
    ) -> Result<()> {
        go_on()?;
        std::thread::sleep(Duration::from_millis(random.below(1000)));
        // With others the sync is of a disk at rest, as theirs are.
        let seldom = at % SELDOM == 0 && !others.is_empty();
        let last = random.coin();
        let busy = last && !seldom;
        let clients = database.clients(random.within(1..5), 3600)?;
        let users = Churn::start(&self.machine.mounted, random.below(4), random)?;
        // As many short ones as long ones.
        let scale = random.below(6);
        std::thread::sleep(Duration::from_millis(random.within(60 << scale..120 << scale)));
        if busy {
            self.sync(BUSY, at)?;
            drop(clients);
            return users.stop();
        }
        drop(clients);
        users.stop()?;
        self.sync(QUIET, at)?;
        if seldom {
            for tool in others {
                self.other(tool, at)?;
            }
        }
        Ok(())
    }

    /// One sync of dsync, and the row of it.
    fn sync(&mut self, name: &str, at: usize) -> Result<()> {
        if at > 0 {
            self.changed.push(self.blocks()?);
        }
        let mut sync = self.sites.near.command("sync");
        sync.arg("--json").arg(self.machine.disk.path()).arg(self.sites.url("vm.img"));
        let outcome = run(&mut self.hosts.near.run(&sync), LIMIT)?;
        let mut lines = outcome.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let summary = lines.rfind(|line| line["message_type"] == "summary").unwrap_or_default();
        ensure!(at == 0 || summary["method"] == "tracked", "the sync of run {at}: {summary}");
        let number = |field: &str| summary[field].as_u64().unwrap_or(0);
        self.epoch = summary["epoch"].as_u64().context("a sync without an epoch")?;
        let counters = ["bytes_changed", "extents", "bytes_read", "bytes_sent", "bytes_written", "freeze_ms"]
            .map(number);
        self.row(name, at, outcome.seconds, counters);
        Ok(())
    }

    fn row(
        &mut self,
        name: &str,
        at: usize,
        seconds: f64,
        [changed, extents, read, sent, written, ms]: [u64; 6],
    ) {
        if !self.quiet {
            println!("run {at}: {name}: {:.1} MB sent in {seconds:.2} s", sent as f64 / MB);
        }
        let bytes = std::fs::metadata(&self.machine.image).map_or(0, |meta| meta.len());
        let counters = [changed, extents, read, sent, written, ms].map(|number| number.to_string());
        let [changed, extents, read, sent, written, ms] = counters;
        let cells = [name.to_string(), bytes.to_string(), at.to_string(), format!("{seconds:.4}")];
        let [name, bytes, at, seconds] = cells;
        self.sheet.add([name, bytes, at, seconds, changed, extents, read, sent, written, ms]);
    }

    /// The blocks that the tracker noted since the last sync.
    fn blocks(&self) -> Result<Vec<u64>> {
        let mut changes = self.sites.near.command("changes");
        changes.arg(self.machine.disk.path()).args(["--since", &self.epoch.to_string()]);
        let text = run(&mut changes, LIMIT)?.stdout;
        let range = |line: &str| {
            let (offset, len) = line.split_once(' ')?;
            let (offset, len): (u64, u64) = (offset.parse().ok()?, len.trim().parse().ok()?);
            Some(offset / BLOCK..(offset + len).div_ceil(BLOCK))
        };
        Ok(text.lines().filter_map(range).flatten().collect())
    }

    /// A tool that knows nothing of what changed, from a file system that is frozen for as long as it takes.
    fn other(&mut self, tool: &'static str, at: usize) -> Result<()> {
        let copy = self.sites.copy(if tool == RSYNC { "rsync.img" } else { "scp.img" });
        if !copy.exists() {
            // Its first copy is not what is measured.
            run(command("cp").args(["--sparse=always"]).arg(&self.machine.image).arg(&copy), LIMIT)?;
        }
        let (image, rsh) = (quote(&self.machine.image), &self.hosts.rsh);
        let durable = format!("{rsh} backup 'sync {0}'", copy.display());
        let line = match tool {
            RSYNC => format!(
                "rsync --inplace --no-whole-file --ignore-times --rsh={} {image} backup:{} && {durable}",
                quote(Path::new(rsh)),
                copy.display()
            ),
            _ => format!(
                "scp -q {} {image} backup:{} && {durable}",
                rsh.trim_start_matches("ssh "),
                copy.display()
            ),
        };
        let folder = self.machine.mounted.clone();
        let frozen = Frozen::new(&folder)?;
        let before = self.hosts.near.used();
        let seconds = run(&mut self.hosts.near.run(&shell(&line)), LIMIT)?.seconds;
        let sent = self.hosts.near.used().sent - before.sent;
        run(command("cmp").arg(&self.machine.image).arg(&copy), LIMIT).context("WRONG CONTENT")?;
        drop(frozen);
        self.row(tool, at, seconds, [0, 0, 0, sent as u64, 0, 0]);
        Ok(())
    }
}

/// The replica, as its user would after a disaster: a copy of it is mounted, and PostgreSQL started. The transactions in its books.
fn look(setting: &Setting, programs: &Programs) -> Result<u64> {
    let copy = setting.machine.image.with_file_name("look.raw");
    run(command("cp").arg("--sparse=always").arg(setting.sites.copy("vm.img")).arg(&copy), LIMIT)?;
    let mut device = Loop::over(&copy, true)?;
    let place = open_place()?;
    device.mount("ext4", &place.path().join("disk"))?;
    let database = Database::start(programs, &setting.hosts.near, &place.path().join("disk/data"))?;
    let transactions = database.books()?;
    database.stop()?;
    device.unmount()?;
    run(command("e2fsck").arg("-fn").arg(device.path()), LIMIT)?;
    drop(device);
    std::fs::remove_file(copy)?;
    Ok(transactions)
}

/// Ends everything in good order; the replica is then the disk, byte for byte.
fn finish(setting: &mut Setting, database: Database, at: usize) -> Result<()> {
    database.stop()?;
    setting.machine.disk.unmount()?;
    setting.sync("at the end", at)?;
    let copy = setting.sites.copy("vm.img");
    run(command("cmp").arg(setting.machine.disk.path()).arg(copy), LIMIT).context("WRONG CONTENT").map(drop)
}

/// How far two figures go together, from -1 to 1 (Pearson); `None` where one of them is always the same.
fn correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    let count = pairs.len() as f64;
    let mean = |part: fn(&(f64, f64)) -> f64| pairs.iter().map(part).sum::<f64>() / count;
    let (x, y) = (mean(|pair| pair.0), mean(|pair| pair.1));
    let sum =
        |part: &dyn Fn(f64, f64) -> f64| pairs.iter().map(|pair| part(pair.0 - x, pair.1 - y)).sum::<f64>();
    let spread = (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt();
    (spread > 0.0).then(|| sum(&|x, y| x * y) / spread)
}

/// Figure 9, and a table of all tools.
fn draw(report: &mut Report, results: &Path, sheet: &Sheet) -> Result<()> {
    let of = |tool: &str| sheet.lines().filter(|line| line.text("tool") == tool).collect::<Vec<Line>>();
    let mut table = Table::new(
        "Runs",
        &[
            "tool",
            "runs",
            "MB changed, median",
            "least",
            "most",
            "seconds, median",
            "least",
            "most",
            "sent, MB",
            "frozen, ms",
        ],
    );
    let mut series = Vec::new();
    let mut pairs = Vec::new();
    for tool in [QUIET, BUSY, RSYNC, SCP] {
        let lines = of(tool);
        if lines.is_empty() {
            continue;
        }
        let column = |name: &str| lines.iter().map(|line| line.number(name)).collect::<Vec<f64>>();
        let spread = |figures: &[f64], unit: f64, digits: usize| -> [String; 3] {
            let (least, most) = (
                figures.iter().copied().fold(f64::MAX, f64::min),
                figures.iter().copied().fold(0.0, f64::max),
            );
            [median(figures), least, most].map(|figure| format!("{:.digits$}", figure / unit))
        };
        let (changed, seconds) = (column("changed"), column("seconds"));
        let known = tool == QUIET || tool == BUSY;
        let changed_cells = if known { spread(&changed, MB, 1) } else { Default::default() };
        let frozen = if known { format!("{:.0}", median(&column("freeze_ms"))) } else { String::new() };
        let sent = format!("{:.1}", median(&column("sent")) / MB);
        let first = [tool.to_string(), lines.len().to_string()].into_iter();
        table.row(first.chain(changed_cells).chain(spread(&seconds, 1.0, 2)).chain([sent, frozen]).collect());
        if known {
            let these: Vec<(f64, f64)> =
                lines.iter().map(|line| (line.number("changed") / MB, line.number("seconds"))).collect();
            pairs.extend_from_slice(&these);
            series.push(Series { name: tool.into(), points: these });
        }
    }
    report.table(&table);
    let file = results.join("vm-fig9.svg");
    points(&file, "Figure 9: a machine's syncs", ("MB changed", "seconds"), &series)?;
    report.line(&format!("plotted in {}; the rows are in vm-runs.csv", file.display()));
    for Series { name, points } in series.iter().filter(|series| series.points.len() > 2) {
        if let Some(found) = correlation(points) {
            report.line(&format!(
                "correlation of seconds and bytes, {name}: {found:.2} of {} runs",
                points.len()
            ));
        }
    }
    if let Some(found) = correlation(&pairs) {
        report.line(&format!(
            "correlation of seconds and bytes, all {} runs: {found:.2} (0.54 in the paper)",
            pairs.len()
        ));
        report.goal("vm: correlation of a sync's seconds and bytes", found, false, 0.54);
    }
    Ok(())
}

/// Figure 8: the median run of these beside as many blocks at random.
fn told_lengths(
    report: &mut Report,
    results: &Path,
    mut changed: Vec<Vec<u64>>,
    bytes: u64,
    random: &mut Random,
) -> Result<()> {
    // The last sync was of a disk at its end.
    changed.pop();
    changed.sort_by_key(Vec::len);
    let Some(middle) = changed.get(changed.len() / 2) else { return Ok(()) };
    let mut scattered: Vec<u64> = middle.iter().map(|_| random.below(bytes / BLOCK)).collect();
    scattered.sort_unstable();
    scattered.dedup();
    let most = changed.last().context("no runs")?;
    let sets: [(&str, &[u64]); 3] =
        [("random", &scattered), ("the median run", middle), ("the largest run", most)];
    lengths(report, results, "vm", &sets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn correlations() {
        let up = [(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)];
        assert!((correlation(&up).unwrap() - 1.0).abs() < 1e-9);
        assert!((correlation(&up.map(|(x, y)| (x, -y))).unwrap() + 1.0).abs() < 1e-9);
        assert_eq!(correlation(&[(0.0, 1.0), (1.0, 1.0)]), None);
        let some = correlation(&[(0.0, 0.0), (1.0, 1.0), (2.0, 0.0), (3.0, 1.0)]).unwrap();
        assert!((some - 0.4472).abs() < 1e-3, "{some}");
    }
}
