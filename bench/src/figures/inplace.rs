//! The tables of "In-Place Rsync" (Rasch and Burns, USENIX 2003): versions of binaries, file by file and joined, in place and not; what that
//! costs in bytes, writes and memory, and how long it takes over slow lines.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use dsync_tests::Random;
use tempfile::TempDir;

use crate::Bench;
use crate::figures::plot::{Series, lines};
use crate::figures::results;
use crate::figures::sheet::{Line, Sheet};
use crate::hosts::Hosts;
use crate::measure::dsync::Dsync;
use crate::measure::packages::{KERNELS, PACKAGES, versions};
use crate::measure::pair::{Cost, LIMIT, Pair};
use crate::measure::places::{scratch, sockets};
use crate::measure::process::{Daemon, go_on, quote, run, shell};
use crate::measure::report::{Report, Table, median, seconds, size};

const IN_PLACE: &str = "in place";
const ROLLING: &str = "not in place";
const RSYNC: &str = "rsync";
const RSYNC_IN_PLACE: &str = "rsync --inplace";

/// Ways on one machine: a name, and the options of dsync, or of rsync if it is that.
const WAYS: [(&str, &[&str]); 5] = [
    (ROLLING, &["--commit", "journal"]),
    ("in place, trim", &["--commit", "in-place", "--cycles", "trim"]),
    ("in place, delete", &["--commit", "in-place", "--cycles", "delete"]),
    (RSYNC, &[]),
    (RSYNC_IN_PLACE, &["--inplace"]),
];

/// Lines in bits a second: a modem, ISDN, and two of the paper's faster ones.
const LINES: [(u64, &str); 4] =
    [(33_600, "33.6 kbit/s"), (128_000, "128 kbit/s"), (1_000_000, "1 Mbit/s"), (10_000_000, "10 Mbit/s")];
/// What a line is to carry of what changed, in seconds: a run takes a few times as long.
const BUDGET: u64 = 4;

/// A file of the new version and the same one of the old.
struct Versions {
    new: PathBuf,
    old: PathBuf,
    size: u64,
    /// What changed, by the bytes that go over a line: known after the first part.
    delta: u64,
}

/// Runs the scenario.
pub(crate) fn inplace(bench: &Bench, report: &mut Report) -> Result<()> {
    report.section(
        "in-place: versions of binaries, file by file and joined",
        "Programs, libraries and modules of two versions of packages, downloaded with apt-get: those that differ. dsync by rolling \
         checksums in place, with each rule that breaks cycles, and not in place (through its journal); rsync with and without \
         --inplace. Bytes are those of both directions. On one machine, bytes, writes and memory are told, and each run was done \
         once, for they do not vary.",
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("in-place", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    for tool in ["apt-get", "dpkg", "rsync"] {
        if dsync_tests::find(tool).is_none() {
            report.left_out("in-place", &format!("{tool} is not installed"));
            return Ok(());
        }
    }
    let folder = scratch(&bench.dir)?;
    let path = |name: &str| folder.path().join(name);
    let pair =
        Pair { bench, dsync: Dsync::new(binary, path("state")), source: path("source"), copy: path("copy") };
    let mut all = gathered(bench, report, folder.path())?;
    if all.is_empty() {
        report.left_out("in-place", "no package has two versions in the archives");
        return Ok(());
    }
    here(&pair, report, &mut all)?;
    if bench.wants("lines") {
        over_lines(&pair, report, &all, folder.path())?;
    }
    Ok(())
}

/// The pairs of files that differ, smallest first: of each package so many, spread evenly over their sizes.
fn gathered(bench: &Bench, report: &mut Report, folder: &Path) -> Result<Vec<Versions>> {
    let mut packages: Vec<&str> = PACKAGES.to_vec();
    packages.push(KERNELS);
    let most = if bench.quick { 10 } else { 40 };
    if bench.quick {
        packages.truncate(2);
    }
    let mut all = Vec::new();
    for (at, name) in packages.into_iter().enumerate() {
        go_on()?;
        let place = folder.join(format!("versions-{at}"));
        std::fs::create_dir(&place)?;
        match versions(&place, name) {
            Ok(Some(_)) => {}
            Ok(None) => {
                report.left_out(name, "the archives have one version only");
                continue;
            }
            Err(error) => {
                go_on()?;
                report.left_out(name, &format!("{error:#}"));
                continue;
            }
        }
        let mut found = pairs(&place)?;
        found.sort_by_key(|versions| versions.size);
        let step = found.len().div_ceil(most).max(1);
        all.extend(found.into_iter().step_by(step));
    }
    all.sort_by_key(|versions| versions.size);
    Ok(all)
}

/// The files of both versions that stand at the same place and differ.
fn pairs(place: &Path) -> Result<Vec<Versions>> {
    let [old, new] = ["package-0", "package-1"].map(|version| listed(&place.join(version)));
    let (old, mut found) = (old?, Vec::new());
    for (name, new) in new? {
        let Some(old) = old.get(&name) else { continue };
        let (before, after) = (std::fs::read(old)?, std::fs::read(&new)?);
        if before != after && !after.is_empty() {
            found.push(Versions { size: after.len() as u64, new, old: old.clone(), delta: 0 });
        }
    }
    Ok(found)
}

/// The files of a version by their names, in which the version of a kernel counts for nothing.
fn listed(place: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let list = std::fs::read_to_string(place.join("list"))?;
    let name = |line: &str| {
        let parts = line.split('/').map(|part| match part.split_once("6.1.0-") {
            Some((before, _)) => format!("{before}6.1.0"),
            None => part.to_string(),
        });
        parts.collect::<Vec<_>>().join("/")
    };
    Ok(list.lines().map(|line| (name(line), place.join(line))).collect())
}

fn joined<'a>(files: impl Iterator<Item = &'a PathBuf>, into: &Path) -> Result<u64> {
    let mut whole = Vec::new();
    for file in files {
        whole.extend(std::fs::read(file)?);
    }
    std::fs::write(into, &whole)?;
    Ok(whole.len() as u64)
}

/// One way on this machine. What takes too long counts for nothing.
fn cost(pair: &Pair, old: &Path, (name, options): (&str, &[&str])) -> Result<Cost> {
    pair.restore(old)?;
    match name.starts_with("rsync") {
        true => pair.rsync(&options.join(" "), LIMIT)?.context("rsync took too long"),
        false => pair.dsync(options),
    }
}

/// Bytes, writes and memory, on this machine.
fn here(pair: &Pair, report: &mut Report, all: &mut [Versions]) -> Result<()> {
    let mut sheet = Sheet::new(&["part", "file", "way", "size", "bytes", "written", "memory", "seconds"]);
    let least = pair.least()?;
    let mut add = |part: &str, file: &str, way: &str, size: u64, cost: &Cost| {
        let memory = cost.peak.saturating_sub(least);
        let numbers = [size, cost.bytes, cost.written, memory].map(|number| number.to_string());
        let [size, bytes, written, memory] = numbers;
        let [part, file, way] = [part, file, way].map(str::to_string);
        sheet.add([part, file, way, size, bytes, written, memory, format!("{:.4}", cost.seconds)]);
    };
    for (at, versions) in all.iter_mut().enumerate() {
        go_on()?;
        std::fs::copy(&versions.new, &pair.source)?;
        let file = versions.new.file_name().unwrap_or_default().to_string_lossy().replace(';', ",");
        for way in WAYS {
            let cost = cost(pair, &versions.old, way)?;
            if way.0 == ROLLING {
                versions.delta = cost.bytes;
            }
            add("file by file", &format!("{at}:{file}"), way.0, versions.size, &cost);
        }
    }
    let old = pair.source.with_file_name("joined-old");
    joined(all.iter().map(|versions| &versions.old), &old)?;
    let size = joined(all.iter().map(|versions| &versions.new), &pair.source)?;
    for way in WAYS {
        add("joined", "all", way.0, size, &cost(pair, &old, way)?);
    }
    let sheet = sheet.kept(&results(pair.bench).join("in-place-bytes.csv"), &report.about())?;
    told(report, &sheet, all.len());
    Ok(())
}

/// Mean and standard deviation.
fn spread(figures: &[f64]) -> (f64, f64) {
    let count = figures.len().max(1) as f64;
    let mean = figures.iter().sum::<f64>() / count;
    (mean, (figures.iter().map(|figure| (figure - mean).powi(2)).sum::<f64>() / count).sqrt())
}

/// The tables of what was measured on one machine.
fn told(report: &mut Report, sheet: &Sheet, count: usize) {
    for part in ["file by file", "joined"] {
        let of = |way: &str| {
            let lines = sheet.lines().filter(|line| line.text("part") == part && line.text("way") == way);
            lines.collect::<Vec<Line>>()
        };
        let sum = |lines: &[Line], column: &str| lines.iter().map(|line| line.number(column)).sum::<f64>();
        let plain = of(ROLLING);
        let total = sum(&plain, "size");
        let mut table = Table::new(
            &format!("{count} files of {}, {part}", size(total)),
            &[
                "way",
                "bytes",
                "lost compression, %",
                "a file, %",
                "written",
                "of a rewrite, %",
                "extra memory",
                "s",
            ],
        );
        for (way, _) in WAYS {
            let lines = of(way);
            let base = if way.starts_with("rsync") { of(RSYNC) } else { of(ROLLING) };
            let pairs = lines.iter().zip(&base);
            let lost: Vec<f64> = pairs
                .map(|(line, base)| {
                    100.0 * (line.number("bytes") - base.number("bytes")) / line.number("size")
                })
                .collect();
            let (mean, deviation) = spread(&lost);
            let whole = 100.0 * (sum(&lines, "bytes") - sum(&base, "bytes")) / total;
            let (written, memory) = (sum(&lines, "written"), lines.iter().map(|line| line.number("memory")));
            let in_place = way.starts_with("in place") || way == RSYNC_IN_PLACE;
            let loss = |text: String| if in_place { text } else { String::new() };
            table.row(vec![
                way.into(),
                format!("{:.0}", sum(&lines, "bytes")),
                loss(format!("{whole:.3}")),
                loss(if part == "joined" { String::new() } else { format!("{mean:.2} ± {deviation:.2}") }),
                size(written),
                format!("{:.0}", 100.0 * written / total),
                if way.starts_with("rsync") || part != "joined" {
                    String::new()
                } else {
                    size(memory.fold(0.0, f64::max))
                },
                seconds(sum(&lines, "seconds")),
            ]);
            if in_place && !way.starts_with("rsync") {
                report.goal(&format!("in-place: lost compression in %, {part}, {way}"), whole, true, 0.55);
            }
        }
        report.table(&table);
    }
}

/// The two hosts at the ends of a slow line, with a connection of ssh that is open already.
struct Remote<'a> {
    pair: &'a Pair<'a>,
    rsh: String,
    far: String,
    // In the order in which they end: the connection is of the hosts.
    _master: Daemon,
    _socket: TempDir,
    hosts: Hosts,
    folder: TempDir,
}

impl<'a> Remote<'a> {
    fn new(rate: u64, pair: &'a Pair, parent: &Path) -> Result<Remote<'a>> {
        let folder = scratch(parent)?;
        let hosts = Hosts::new(Some(rate), folder.path())?;
        let socket = sockets()?;
        let control = socket.path().join("ssh");
        let rsh = format!("{} -S {}", hosts.rsh, control.display());
        let open = shell(&format!("exec {rsh} -M -N backup"));
        let mut master = Daemon::start_bare(&mut hosts.near.run(&open))?;
        let check = shell(&format!("until {rsh} -O check backup; do sleep 0.1; done"));
        run(&mut hosts.near.run(&check), LIMIT)?;
        master.check()?;
        let state = folder.path().join("far-state");
        let far = format!("env DSYNC_STATE_DIR={} {}", state.display(), pair.dsync.binary.display());
        Ok(Remote { pair, rsh, far, _master: master, _socket: socket, hosts, folder })
    }

    /// Puts these files in place: new ones as sources, old ones as copies.
    fn place(&self, files: &[(&Path, &Path)]) -> Result<()> {
        for (name, side) in [("src", 0), ("dst", 1)] {
            let place = self.folder.path().join(name);
            if place.exists() {
                std::fs::remove_dir_all(&place)?;
            }
            std::fs::create_dir(&place)?;
            for (at, (new, old)) in files.iter().enumerate() {
                std::fs::copy(if side == 0 { new } else { old }, place.join(format!("{at:03}")))?;
            }
        }
        rustix::fs::sync();
        Ok(())
    }

    /// Brings all copies up to date; seconds, and bytes over the line with all headers.
    fn measure(&self, way: &str, files: &[(&Path, &Path)]) -> Result<(f64, f64)> {
        self.place(files)?;
        let (src, dst) = (self.folder.path().join("src"), self.folder.path().join("dst"));
        let line = match way {
            RSYNC | RSYNC_IN_PLACE => format!(
                "rsync -r --no-whole-file --ignore-times {} --timeout=0 --rsh={} {}/ backup:{}/",
                if way == RSYNC { "" } else { "--inplace" },
                quote(Path::new(&self.rsh)),
                src.display(),
                dst.display()
            ),
            _ => format!(
                "cd {} && for file in *; do {} sync -q --method rolling --commit {} --adopt=overwrite --create --allow-shrink --rsh {} \
                 --remote-dsync {} $file backup:{}/$file || exit; done",
                src.display(),
                quote(&self.pair.dsync.binary),
                if way == IN_PLACE { "in-place" } else { "journal" },
                quote(Path::new(&self.rsh)),
                quote(Path::new(&self.far)),
                dst.display()
            ),
        };
        let mut line = shell(&line);
        line.env("DSYNC_STATE_DIR", self.folder.path().join("near-state"));
        let before = self.hosts.near.used();
        let seconds = run(&mut self.hosts.near.run(&line), LIMIT)?.seconds;
        let used = self.hosts.near.used().since(before);
        let check = format!("diff -r -x '.*' {} {}", src.display(), dst.display());
        run(&mut shell(&check), LIMIT).context("WRONG CONTENT")?;
        Ok((seconds, used.sent + used.received))
    }
}

/// Time over each line, of as many files as it carries in a few seconds.
fn over_lines(pair: &Pair, report: &mut Report, all: &[Versions], folder: &Path) -> Result<()> {
    let rounds = pair.bench.rounds.unwrap_or(if pair.bench.quick { 1 } else { 3 });
    let mut sheet =
        Sheet::new(&["line", "rate", "part", "way", "round", "files", "size", "seconds", "bytes"]);
    let mut told = Vec::new();
    let chosen =
        LINES.into_iter().filter(|(rate, _)| !pair.bench.quick || [128_000, 10_000_000].contains(rate));
    for (rate, name) in chosen {
        let remote = match Remote::new(rate, pair, folder) {
            Ok(remote) => remote,
            Err(error) => {
                go_on()?;
                report.left_out(name, &format!("{error:#}"));
                continue;
            }
        };
        let files = fitting(all, rate / 8 * BUDGET, if rate < 1_000_000 { 8 } else { 40 }, pair.bench.seed);
        if files.is_empty() {
            report.left_out(name, "no file is small enough");
            continue;
        }
        let (new, old) = (folder.join("line-new"), folder.join("line-old"));
        let total = joined(files.iter().map(|versions| &versions.new), &new)?;
        joined(files.iter().map(|versions| &versions.old), &old)?;
        let apart: Vec<(&Path, &Path)> =
            files.iter().map(|versions| (versions.new.as_path(), versions.old.as_path())).collect();
        let whole = [(new.as_path(), old.as_path())];
        let ways = [IN_PLACE, ROLLING, RSYNC, RSYNC_IN_PLACE];
        for round in 0..rounds {
            for turn in 0..ways.len() {
                let way = ways[(turn + round) % ways.len()];
                for (part, set) in [("file by file", &apart[..]), ("joined", &whole[..])] {
                    let (seconds, bytes) = remote.measure(way, set)?;
                    if !pair.bench.quiet {
                        println!("{name}: {part}, {way}: {seconds:.2} s, {bytes:.0} bytes");
                    }
                    let words = [name, &rate.to_string(), part, way].map(str::to_string);
                    let [name, rate, part, way] = words;
                    let [round, count, size] =
                        [round as u64, files.len() as u64, total].map(|n| n.to_string());
                    sheet.add([
                        name,
                        rate,
                        part,
                        way,
                        round,
                        count,
                        size,
                        format!("{seconds:.4}"),
                        bytes.to_string(),
                    ]);
                }
            }
        }
        told.push(name);
    }
    ensure!(!told.is_empty(), "no line could be made");
    let sheet = sheet.kept(&results(pair.bench).join("in-place-lines.csv"), &report.about())?;
    line_tables(report, &sheet, &told, &results(pair.bench), rounds)
}

/// Files of all sizes, as many as a line carries within so many bytes, and no more than `most`.
fn fitting(all: &[Versions], mut bytes: u64, most: usize, seed: u64) -> Vec<&Versions> {
    let mut random = Random::seeded(seed);
    let mut left: Vec<&Versions> = all.iter().collect();
    let mut chosen = Vec::new();
    while !left.is_empty() && chosen.len() < most {
        let versions = left.swap_remove(random.index(left.len()));
        if versions.delta <= bytes {
            bytes -= versions.delta;
            chosen.push(versions);
        }
    }
    chosen
}

fn line_tables(
    report: &mut Report,
    sheet: &Sheet,
    names: &[&str],
    results: &Path,
    rounds: usize,
) -> Result<()> {
    let ways = [IN_PLACE, ROLLING, RSYNC, RSYNC_IN_PLACE];
    let mut columns = vec!["line", "files", "size"];
    columns.extend(ways);
    columns.extend(["in place : not", "in place : rsync", "bytes, in place : rsync"]);
    for part in ["file by file", "joined"] {
        let mut table =
            Table::new(&format!("Seconds over a line, {part}, medians of {rounds} rounds"), &columns);
        let mut series: Vec<Series> =
            ways.iter().map(|way| Series { name: way.to_string(), points: Vec::new() }).collect();
        for (at, name) in names.iter().enumerate() {
            let lines: Vec<Line> = sheet
                .lines()
                .filter(|line| line.text("line") == *name && line.text("part") == part)
                .collect();
            let Some(first) = lines.first() else { continue };
            let of = |way: &str, column: &str| {
                let these = lines.iter().filter(|line| line.text("way") == way);
                median(&these.map(|line| line.number(column)).collect::<Vec<_>>())
            };
            let took = ways.map(|way| of(way, "seconds"));
            let mut row = vec![name.to_string(), first.text("files").into(), size(first.number("size"))];
            row.extend(took.map(seconds));
            row.push(format!("{:.2}", took[0] / took[1]));
            row.push(format!("{:.2}", took[0] / took[2]));
            row.push(format!("{:.2}", of(IN_PLACE, "bytes") / of(RSYNC, "bytes")));
            table.row(row);
            for (series, way) in series.iter_mut().zip(ways) {
                // Each line has a set of its own: what is compared is seconds for what a line carries in one.
                series.points.push((
                    at as f64,
                    of(way, "seconds") / (of(RSYNC, "bytes") * 8.0 / first.number("rate")),
                ));
            }
        }
        report.table(&table);
        let ticks: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let file = results.join(format!("in-place-{}.svg", part.replace(' ', "-")));
        let y = "times what the line needs for rsync's bytes";
        lines(&file, &format!("Transfer times, {part}"), ("line", y), &ticks, &series)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_and_deviations() {
        assert_eq!(spread(&[1.0, 3.0]), (2.0, 1.0));
        assert_eq!(spread(&[]), (0.0, 0.0));
    }

    #[test]
    fn a_module_keeps_its_name_from_kernel_to_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let list = "all/lib/modules/6.1.0-37-cloud-amd64/kernel/a.ko\nall/usr/bin/b\n";
        std::fs::write(folder.path().join("list"), list).unwrap();
        let names: Vec<String> = listed(folder.path()).unwrap().into_keys().collect();
        assert_eq!(names, ["all/lib/modules/6.1.0/kernel/a.ko", "all/usr/bin/b"]);
    }
}
