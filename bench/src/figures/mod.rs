//! The evaluation in "dsync: Efficient Block-wise Synchronization of Multi-Gigabyte Binary Data" (LISA 2013) again: two hosts, a
//! line of 1 Gbit/s, random blocks of an image changed, cold caches, everything durable at the end.
//!
//! Runs are written to CSV files; tables and figures are made from those files and from nothing else.

pub(crate) mod churn;
pub(crate) mod inplace;
pub(crate) mod lengths;
pub(crate) mod plot;
pub(crate) mod postgres;
pub(crate) mod sheet;
pub(crate) mod snapshots;
pub(crate) mod trace;
pub(crate) mod vm;
pub(crate) mod vscsi;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};

use crate::Bench;
use crate::figures::plot::{Series, lines};
use crate::hosts::rows::{self, Row};
use crate::hosts::scene::{Measured, Scene, Tool};
use crate::hosts::{Hosts, Sample};
use crate::measure::content::Content;
use crate::measure::places::{free, own_mounts, root, scratch};
use crate::measure::report::{Report, Table, median, size};

const RATE: u64 = 1_000_000_000;
const GIB: f64 = (1u64 << 30) as f64;

/// Runs the scenario.
pub(crate) fn figures(bench: &Bench, report: &mut Report) -> Result<()> {
    let results = results(bench);
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 });
    report.section(
        "paper: two hosts and a line",
        &format!(
            "Two network namespaces joined by 1 Gbit/s, each with a processor of its own, one disk for both. Random 4 KiB blocks \
             of an image of random content are changed through the NBD server that follows them; then the far host's copy is \
             brought up to date and made durable, from cold caches. Medians of {rounds} interleaved rounds, and the least and \
             the most."
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("paper", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let folder = scratch(&bench.dir)?;
    let own = if root() { own_mounts() } else { Ok(()) };
    let hosts = match own.and_then(|()| Hosts::new(Some(RATE), folder.path())) {
        Ok(hosts) => Arc::new(hosts),
        Err(error) => {
            report.left_out("paper", &format!("{error:#}"));
            return Ok(());
        }
    };
    let sizes = sizes(bench, report);
    let Some(&largest) = sizes.last() else { return Ok(()) };
    let mut runs = Vec::new();
    let mut usage = Vec::new();
    for &bytes in &sizes {
        let site = scratch(folder.path())?;
        let mut scene = Scene::new(&hosts, binary, site.path(), Content::new(bench.seed, bytes))?;
        let mut tools = wanted(bench);
        scene.first_copies(&mut tools, report)?;
        let percents = if bytes == largest { percents(bench) } else { vec![10] };
        for percent in percents {
            for round in 0..rounds {
                let change = scene.change(percent)?;
                for tool in rotated(&tools, round) {
                    let Measured { row, samples, .. } = scene.measure(tool, percent, round)?;
                    scene.content.check_changed(&change, &scene.copy(tool))?;
                    if !bench.quiet {
                        println!(
                            "{} {percent} %, round {}: {}: {:.2} s",
                            size(bytes as f64),
                            round + 1,
                            row.tool,
                            row.seconds
                        );
                    }
                    if (percent, bytes, round) == (10, largest, 0) {
                        usage.extend(samples.iter().map(|sample| over_time(&row, sample)));
                    }
                    runs.push(row);
                }
            }
        }
    }
    let (runs_file, usage_file) = (results.join("paper-runs.csv"), results.join("paper-usage.csv"));
    rows::write(&runs_file, &report.about(), &runs)?;
    rows::write(&usage_file, &report.about(), &usage)?;
    draw(report, &results, &rows::read(&runs_file)?, &rows::read(&usage_file)?)
}

/// Where runs and figures go: beside the file for the results.
pub(crate) fn results(bench: &Bench) -> PathBuf {
    let out = bench.out.clone().unwrap_or_default();
    match out.parent() {
        Some(parent) if !out.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("bench/results"),
    }
}

/// The sizes of the paper, as far as the disk has room for the image, the copies and what the tools need beside them.
fn sizes(bench: &Bench, report: &mut Report) -> Vec<u64> {
    if let Some(bytes) = bench.size {
        return vec![bytes.next_multiple_of(1 << 20)];
    }
    let all: Vec<u64> =
        if bench.quick { vec![64 << 20, 128 << 20] } else { (0..6).map(|power| 1 << (30 + power)).collect() };
    let copies = wanted(bench).len() as u64;
    let room = free(&bench.dir);
    let (fitting, others): (Vec<u64>, Vec<u64>) =
        all.into_iter().partition(|bytes| bytes * (copies + 3) < room);
    for bytes in others {
        report.left_out(&size(bytes as f64), "the disk has too little room for all copies");
    }
    fitting
}

fn percents(bench: &Bench) -> Vec<u32> {
    if bench.percent.is_empty() { vec![1, 10, 50, 90] } else { bench.percent.clone() }
}

/// The tools that `--only` names.
pub(crate) fn wanted(bench: &Bench) -> Vec<Tool> {
    Tool::ALL.into_iter().filter(|tool| bench.wants(tool.name())).collect()
}

/// The tools, or what else is compared, in another order each round.
pub(crate) fn rotated<T: Clone>(tools: &[T], round: usize) -> Vec<T> {
    let mut tools = tools.to_vec();
    if !tools.is_empty() {
        let by = round % tools.len();
        tools.rotate_left(by);
    }
    tools
}

fn over_time(row: &Row, sample: &Sample) -> Row {
    Row { seconds: sample.at, near: sample.near, far: sample.far, ..row.clone() }
}

/// Medians of a figure over the rounds, for each tool.
struct Middle {
    tool: String,
    at: f64,
    runs: Vec<Row>,
}

impl Middle {
    fn of(&self, figure: impl Fn(&Row) -> f64) -> f64 {
        median(&self.runs.iter().map(figure).collect::<Vec<_>>())
    }

    /// `12.3 (12.1-12.9)`.
    fn seconds(&self) -> String {
        let all = || self.runs.iter().map(|row| row.seconds);
        let (least, most) = (all().fold(f64::MAX, f64::min), all().fold(0.0, f64::max));
        format!("{:.2} ({least:.2}-{most:.2})", self.of(|row| row.seconds))
    }
}

/// The runs that `chosen` places, grouped by tool and place, in the order in which they appear.
fn middles(runs: &[Row], chosen: impl Fn(&Row) -> Option<f64>) -> Vec<Middle> {
    let mut found: Vec<Middle> = Vec::new();
    for row in runs {
        let Some(at) = chosen(row) else { continue };
        match found.iter_mut().find(|middle| middle.tool == row.tool && middle.at == at) {
            Some(middle) => middle.runs.push(row.clone()),
            None => found.push(Middle { tool: row.tool.clone(), at, runs: vec![row.clone()] }),
        }
    }
    found.sort_by(|a, b| a.at.total_cmp(&b.at));
    found
}

fn series(middles: &[Middle]) -> Vec<Series> {
    let mut all: Vec<Series> = Vec::new();
    for middle in middles {
        let point = (middle.at, middle.of(|row| row.seconds));
        match all.iter_mut().find(|series| series.name == middle.tool) {
            Some(series) => series.points.push(point),
            None => all.push(Series { name: middle.tool.clone(), points: vec![point] }),
        }
    }
    all
}

/// Tables, figures and goals of the runs in the files.
fn draw(report: &mut Report, results: &Path, runs: &[Row], usage: &[Row]) -> Result<()> {
    let largest = runs.iter().map(|row| row.bytes).max().context("no runs")?;
    let by_size = middles(runs, |row| (row.percent == 10).then_some(row.bytes as f64 / GIB));
    let by_percent = middles(runs, |row| (row.bytes == largest).then_some(f64::from(row.percent)));
    for (name, title, x, middles) in [
        ("paper-size.svg", "10 % of an image changed", "GiB", &by_size),
        ("paper-percent.svg", "The largest image", "% changed", &by_percent),
    ] {
        if middles.is_empty() {
            continue;
        }
        lines(&results.join(name), title, (x, "seconds"), &[], &series(middles))?;
        report.table(&table(title, x, middles));
    }
    over_time_figures(results, usage)?;
    goals(report, runs);
    Ok(())
}

fn table(title: &str, x: &str, middles: &[Middle]) -> Table {
    let columns =
        [x, "tool", "seconds", "processor s, near", "far", "sent, MiB", "disk: read, MiB", "written, MiB"];
    let mut table = Table::new(title, &columns);
    const MIB: f64 = (1u64 << 20) as f64;
    for middle in middles {
        table.row(vec![
            format!("{:.3}", middle.at).trim_end_matches('0').trim_end_matches('.').to_string(),
            middle.tool.clone(),
            middle.seconds(),
            format!("{:.2}", middle.of(|row| row.near.processor)),
            format!("{:.2}", middle.of(|row| row.far.processor)),
            format!("{:.0}", middle.of(|row| row.near.sent) / MIB),
            format!("{:.0}", middle.of(|row| row.disk.read) / MIB),
            format!("{:.0}", middle.of(|row| row.disk.written) / MIB),
        ]);
    }
    table
}

/// Processor and line over time, at the largest size: differences of one sample to the next.
fn over_time_figures(results: &Path, usage: &[Row]) -> Result<()> {
    type Counter = fn(&Row) -> f64;
    let figures: [(&str, &str, &str, Counter, f64); 3] = [
        (
            "paper-processor-near.svg",
            "Processor of the near host",
            "% of one",
            |row| row.near.processor,
            100.0,
        ),
        ("paper-processor-far.svg", "Processor of the far host", "% of one", |row| row.far.processor, 100.0),
        ("paper-line.svg", "Sent by the near host", "MB/s", |row| row.near.sent, 1e-6),
    ];
    for (name, title, y, counter, scale) in figures {
        let mut all: Vec<Series> = Vec::new();
        for pair in usage.windows(2).filter(|pair| pair[0].tool == pair[1].tool) {
            let [before, after] = [&pair[0], &pair[1]];
            let rate = (counter(after) - counter(before)) / (after.seconds - before.seconds).max(1e-3);
            let point = (after.seconds, rate * scale);
            match all.last_mut().filter(|series| series.name == after.tool) {
                Some(series) => series.points.push(point),
                None => all.push(Series { name: after.tool.clone(), points: vec![point] }),
            }
        }
        if !all.is_empty() {
            lines(&results.join(name), title, ("seconds", y), &[], &all)?;
        }
    }
    Ok(())
}

/// A tracked sync is to take little more than the line needs for what changed.
fn goals(report: &mut Report, runs: &[Row]) {
    let changed = |row: &Row| row.bytes as f64 * f64::from(row.percent) / 100.0;
    for middle in middles(runs, |row| (row.tool == Tool::Tls.name()).then(|| changed(row))) {
        let (Some(row), line) = (middle.runs.first(), middle.at * 8.0 / RATE as f64) else { continue };
        let what = format!(
            "{}, {} %: tracked over TLS, times 1.1 x the line's time + 0.2 s",
            size(row.bytes as f64),
            row.percent
        );
        report.goal(&what, middle.of(|row| row.seconds) / (1.1 * line + 0.2), true, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tool: &str, bytes: u64, percent: u32, seconds: f64) -> Row {
        let (tool, round) = (tool.to_string(), 0);
        Row {
            tool,
            bytes,
            percent,
            round,
            seconds,
            disk: Default::default(),
            near: Default::default(),
            far: Default::default(),
        }
    }

    #[test]
    fn medians_by_tool_and_place() {
        let runs = [
            row("a", 1 << 30, 10, 3.0),
            row("b", 1 << 30, 10, 9.0),
            row("a", 1 << 30, 10, 1.0),
            row("a", 2 << 30, 10, 8.0),
        ];
        let found = middles(&runs, |row| Some(row.bytes as f64 / GIB));
        let all: Vec<(&str, f64, String)> =
            found.iter().map(|middle| (middle.tool.as_str(), middle.at, middle.seconds())).collect();
        assert_eq!(
            all,
            [
                ("a", 1.0, "2.00 (1.00-3.00)".to_string()),
                ("b", 1.0, "9.00 (9.00-9.00)".into()),
                ("a", 2.0, "8.00 (8.00-8.00)".into())
            ]
        );
        let lines = series(&found);
        assert_eq!(lines[0].points, [(1.0, 2.0), (2.0, 8.0)]);
    }
}
