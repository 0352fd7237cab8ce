//! Bringing an older copy up to date without a record of the changes: dsync's digests beside the time that reading both
//! sides takes, and beside tools that look for changes too.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::cases::sync::{Cell, rsync_sent};
use crate::hosts::line::Line;
use crate::measure::content::{Change, Content, drop_caches, warm};
use crate::measure::dsync::Dsync;
use crate::measure::limit::write_list;
use crate::measure::places::{free, scratch};
use crate::measure::process::{self, command, quote, run, shell};
use crate::measure::report::{Report, Table, median, seconds, size};
use crate::{Bench, own};

const LIMIT: Duration = Duration::from_secs(600);
/// What takes longer than this is run once a cell.
const SLOW: f64 = 15.0;
/// Bits a second.
const RATE: u64 = 1_000_000_000;

const READ: &str = "both files read";
const MOVED: &str = "both files read, then the changed blocks moved";
const OURS: &str = "dsync, in place";

/// What is compared.
struct Files {
    source: PathBuf,
    copy: PathBuf,
    list: PathBuf,
}

/// A tool, and how it is called.
struct Tool {
    name: &'static str,
    line: Box<dyn Fn(&Files) -> Command>,
    /// It leaves the copy as it was.
    reads_only: bool,
}

#[derive(Default)]
struct Cellful {
    seconds: Vec<f64>,
    cached: Vec<f64>,
}

/// Runs the scenario.
pub(crate) fn compare(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 256 << 20 } else { 4 << 30 }).next_multiple_of(1 << 20);
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 });
    report.section(
        "compare: an older copy brought up to date without a record",
        &format!(
            "An image of {} without compressible content, random 4 KiB blocks changed, both files on one disk, nobody wrote \
             down what changed. Seconds until the copy is durable, the median of up to {rounds} interleaved rounds; in \
             brackets the ratio to reading both files in full, at the same time, with io_uring and past the page cache. \
             What takes over {SLOW} s is run once.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("compare", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let free = free(&bench.dir);
    ensure!(free > 4 * bytes, "{}: {} free, {} needed", bench.dir.display(), free, 4 * bytes);
    let folder = scratch(&bench.dir)?;
    let at = |name: &str| folder.path().join(name);
    let files = Files { source: at("source.img"), copy: at("copy.img"), list: at("list") };
    let mut content = Content::new(bench.seed, bytes);
    content.write(&files.source)?;
    content.write(&files.copy)?;
    let dsync = Dsync::new(binary, at("state"));
    here(bench, report, &dsync, &files, &mut content, rounds)?;
    if bench.wants("link") {
        afar(bench, report, &dsync, &files, &mut content, folder.path())?;
    }
    Ok(())
}

fn tools(dsync: &Dsync, bench: &Bench, report: &mut Report) -> Vec<Tool> {
    let mut tools: Vec<Tool> = Vec::new();
    let mut add =
        |name: &'static str, program: &str, reads_only: bool, line: Box<dyn Fn(&Files) -> Command>| {
            if program.is_empty() || dsync_tests::find(program).is_some() {
                tools.push(Tool { name, line, reads_only });
            } else {
                report.left_out(name, &format!("{program} is not installed"));
            }
        };
    add(
        READ,
        "",
        true,
        Box::new(|files| {
            let mut line = own("read");
            line.arg(&files.source).arg(&files.copy);
            line
        }),
    );
    add(
        MOVED,
        "",
        false,
        Box::new(|files| {
            let own = quote(Path::new(own("").get_program()));
            let (from, to) = (quote(&files.source), quote(&files.copy));
            shell(&format!("{own} read {from} {to} && {own} limit {from} {to} --list {}", quote(&files.list)))
        }),
    );
    // Every other tool has changed the copy behind its back, so it is adopted each time: a full compare.
    for (name, options) in [
        (OURS, &["--commit", "in-place"][..]),
        ("dsync, journal", &[]),
        ("dsync, in place, --hash xxh3", &["--commit", "in-place", "--hash", "xxh3"]),
    ] {
        let dsync = dsync.clone();
        let line = move |files: &Files| {
            let mut line = dsync.command("sync");
            line.arg(&files.source).arg(&files.copy).args(["--quiet", "--adopt=overwrite"]).args(options);
            line
        };
        add(name, "", false, Box::new(line));
    }
    for (name, block) in [("rsync --inplace -B4096", Some("-B4096")), ("rsync --inplace", None)] {
        let line = move |files: &Files| {
            let mut line = command("rsync");
            line.args(["--inplace", "--no-whole-file", "--ignore-times"]).args(block);
            line.arg(&files.source).arg(&files.copy);
            line
        };
        add(name, "rsync", false, Box::new(line));
    }
    let cp = |files: &Files| {
        let mut line = command("cp");
        line.arg(&files.source).arg(&files.copy);
        line
    };
    add("cp", "cp", false, Box::new(cp));
    let bdsync = |files: &Files| {
        let (from, to) = (quote(&files.source), quote(&files.copy));
        shell(&format!("bdsync 'bdsync --server' {from} {to} | bdsync --patch={to}"))
    };
    add("bdsync", "bdsync", false, Box::new(bdsync));
    let blocksync = |files: &Files| {
        let mut line = command("blocksync-fast");
        line.arg("-s").arg(&files.source).arg("-d").arg(&files.copy);
        line
    };
    add("blocksync-fast", "blocksync-fast", false, Box::new(blocksync));
    tools.retain(|tool| [READ, MOVED].contains(&tool.name) || bench.wants(tool.name));
    tools
}

/// Bytes of a file that the page cache holds.
fn cached(path: &Path) -> Option<f64> {
    let said = run(command("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(path), LIMIT);
    said.ok()?.stdout.trim().parse().ok()
}

fn here(
    bench: &Bench,
    report: &mut Report,
    dsync: &Dsync,
    files: &Files,
    content: &mut Content,
    rounds: usize,
) -> Result<()> {
    let tools = tools(dsync, bench, report);
    let names = ["rsync", "cp", "bash", "bdsync", "blocksync-fast"];
    let found: Vec<PathBuf> = names.iter().filter_map(|tool| dsync_tests::find(tool)).collect();
    let own = PathBuf::from(own("").get_program());
    let programs = process::parts(found.iter().chain([&own, &dsync.binary]).map(PathBuf::as_path));
    let cells = Cell::all(bench, report);
    let mut figures: BTreeMap<(Cell, &str), Cellful> = BTreeMap::new();
    let mut gone: Vec<&str> = Vec::new();
    for &cell in &cells {
        for round in 0..rounds {
            process::go_on()?;
            let change = content.change(content.blocks() * u64::from(cell.percent) / 100);
            write_list(&files.list, &change.blocks)?;
            content.apply(&change, &files.source)?;
            let mut moved = false;
            for turn in 0..tools.len() {
                let tool = &tools[(turn + round) % tools.len()];
                let so_far = figures.entry((cell, tool.name)).or_default();
                if gone.contains(&tool.name) || so_far.seconds.iter().any(|seconds| *seconds > SLOW) {
                    continue;
                }
                if std::mem::take(&mut moved) {
                    content.undo(&change, &files.copy)?;
                }
                moved = !tool.reads_only;
                match one(tool, files, content, &change, cell, &programs) {
                    Ok((time, cached)) => {
                        if !bench.quiet {
                            eprintln!("{cell}, round {}: {}: {} s", round + 1, tool.name, seconds(time));
                        }
                        so_far.seconds.push(time);
                        so_far.cached.extend(cached);
                    }
                    Err(error) => {
                        process::go_on()?;
                        report.failed(&format!("{}, {cell}", tool.name), &error);
                        gone.push(tool.name);
                    }
                }
            }
            content.apply(&change, &files.copy)?;
        }
    }
    tables(report, &tools, &cells, &figures);
    Ok(())
}

fn one(
    tool: &Tool,
    files: &Files,
    content: &Content,
    change: &Change,
    cell: Cell,
    programs: &[PathBuf],
) -> Result<(f64, Option<f64>)> {
    rustix::fs::sync();
    if cell.cold {
        drop_caches()?;
        programs.iter().try_for_each(|file| warm(file))?;
    } else {
        warm(&files.source)?;
        warm(&files.copy)?;
    }
    let before = (cached(&files.source), cached(&files.copy));
    let outcome = run(&mut (tool.line)(files), LIMIT)?;
    let sync = Instant::now();
    File::open(&files.copy)?.sync_all()?;
    let time = outcome.seconds + sync.elapsed().as_secs_f64();
    let after = (cached(&files.source), cached(&files.copy));
    let moved = |before: Option<f64>, after: Option<f64>| Some(after? - before?);
    let cached = moved(before.0, after.0).zip(moved(before.1, after.1)).map(|(a, b)| a + b);
    if !tool.reads_only {
        content.check_changed(change, &files.copy)?;
    }
    Ok((time, cached))
}

fn tables(report: &mut Report, tools: &[Tool], cells: &[Cell], figures: &BTreeMap<(Cell, &str), Cellful>) {
    let titles: Vec<String> = cells.iter().map(Cell::to_string).collect();
    let columns: Vec<&str> = std::iter::once("tool").chain(titles.iter().map(String::as_str)).collect();
    let middle = |cell: Cell, name: &str| -> Option<f64> {
        let all = &figures.get(&(cell, name))?.seconds;
        (!all.is_empty()).then(|| median(all))
    };
    let mut times = Table::new("Seconds, and the ratio to reading both files", &columns);
    let mut pages = Table::new("Page cache of both files: what came in, less what went", &columns);
    for tool in tools {
        let mut row = vec![tool.name.to_string()];
        let mut cache = row.clone();
        for &cell in cells {
            row.push(match (middle(cell, tool.name), middle(cell, READ)) {
                (Some(time), Some(read)) => format!("{} ({:.2})", seconds(time), time / read),
                (Some(time), None) => seconds(time),
                _ => "-".into(),
            });
            let moved = figures.get(&(cell, tool.name)).map_or(&[][..], |f| &f.cached);
            cache.push(match moved {
                [] => "-".into(),
                moved if median(moved) < 0.0 => format!("-{}", size(-median(moved))),
                moved => size(median(moved)),
            });
        }
        times.row(row);
        pages.row(cache);
    }
    report.table(&times);
    report.table(&pages);
    for &cell in cells {
        let of = |name: &str| middle(cell, name);
        if let (Some(ours), Some(read), Some(moved)) = (of(OURS), of(READ), of(MOVED)) {
            if cell.percent <= 1 {
                report.goal(&format!("{cell}: compare, times reading both files"), ours / read, true, 1.15);
            }
            let what = format!("{cell}: compare, times reading both files and moving what changed");
            report.goal(&what, ours / moved, true, 1.15);
        }
    }
}

/// The same over a link.
fn afar(
    bench: &Bench,
    report: &mut Report,
    dsync: &Dsync,
    files: &Files,
    content: &mut Content,
    folder: &Path,
) -> Result<()> {
    let line = Line::new(RATE, &dsync.binary, folder, report)?;
    let bytes = (content.blocks() * crate::measure::limit::BLOCK) as f64;
    let mut table = Table::new(
        "Over 1 Gbit/s",
        &["tool", "changed", "seconds", "both ways, bytes", "besides what changed", "of the disk"],
    );
    let destination = format!("backup:{}", files.copy.display());
    for percent in [1, 10] {
        let change = content.change(content.blocks() * percent / 100);
        content.apply(&change, &files.source)?;
        let changed = change.blocks.len() as f64 * crate::measure::limit::BLOCK as f64;
        let mut add = |name: &str, time: f64, carried: f64| {
            let besides = carried - changed;
            table.row(vec![
                name.into(),
                format!("{percent} %"),
                seconds(time),
                size(carried),
                size(besides.max(0.0)),
                format!("{:.3} %", besides / bytes * 100.0),
            ]);
            besides / bytes * 100.0
        };
        if dsync_tests::find("rsync").is_some() && line.about.contains("ssh") {
            rustix::fs::sync();
            let mut rsync = command("rsync");
            rsync.args(["--inplace", "--no-whole-file", "--ignore-times", "--stats", "-e", &line.rsh]);
            let outcome = run(rsync.arg(&files.source).arg(&destination), LIMIT)?;
            let carried = rsync_sent(&outcome.stdout).context("rsync told no figures")?;
            add("rsync --inplace", outcome.seconds, carried as f64);
            content.undo(&change, &files.copy)?;
        }
        rustix::fs::sync();
        let options = [&["--adopt=overwrite", "--commit", "in-place"][..], &line.options()].concat();
        let synced = dsync.sync(&files.source, &destination, &options, LIMIT)?;
        content.check_changed(&change, &files.copy)?;
        ensure!(synced.word("method") == "compare", "the method was {}", synced.word("method"));
        let carried = synced.number("bytes_sent") + synced.number("bytes_received");
        let besides = add(OURS, synced.outcome.seconds, carried as f64);
        let what = format!("1 Gbit/s, {percent} %: per cent of the disk sent besides the changed blocks");
        report.goal(&what, besides, true, 0.5);
        if !bench.quick {
            let bare = line.seconds(synced.number("bytes_sent"))?;
            report
                .line(&format!("the link alone carries what was sent at {percent} % in {} s", seconds(bare)));
        }
    }
    report.table(&table);
    Ok(())
}
