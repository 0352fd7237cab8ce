//! A week of a server, day by day: the blocks that a trace writes are changed, and each tool brings its copy up to date every night.
//! Figures 8, 10 and 11 and table 2 of "dsync: Efficient Block-wise Synchronization of Multi-Gigabyte Binary Data" (LISA 2013).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dsync_tests::Random;

use crate::Bench;
use crate::figures::lengths::lengths;
use crate::figures::vscsi::{self, Version};
use crate::figures::{results, rotated, wanted};
use crate::hosts::Hosts;
use crate::hosts::rows::{self, Row};
use crate::hosts::scene::{Scene, Tool};
use crate::measure::content::Content;
use crate::measure::limit::BLOCK;
use crate::measure::places::{own_mounts, root, scratch};
use crate::measure::process::go_on;
use crate::measure::report::{Report, Table, median, size};

const RATE: u64 = 1_000_000_000;
const MIB: f64 = (1u64 << 20) as f64;
/// A day in the units of the traces' clock, of 100 ns.
const DAY: u64 = 864_000_000_000;

/// The blocks written in each period, ascending.
type Days = Vec<Vec<u64>>;

/// The writes to the first bytes of a volume, as they are gathered from a trace.
struct Calendar {
    bytes: u64,
    days: Days,
    first: Option<u64>,
}

impl Calendar {
    fn new(bytes: u64) -> Calendar {
        Calendar { bytes, days: Vec::new(), first: None }
    }

    /// A request at a time in units of 100 ns; of a read, only the day counts. False if it is more than a year after the first.
    fn request(&mut self, time: u64, write: bool, offset: u64, len: u64) -> bool {
        let day = (time.saturating_sub(*self.first.get_or_insert(time)) / DAY) as usize;
        if day >= 366 {
            return false;
        }
        if day >= self.days.len() {
            self.days.resize_with(day + 1, Vec::new);
        }
        if write && len > 0 {
            let end = offset.saturating_add(len).min(self.bytes);
            self.days[day].extend(offset / BLOCK..end.div_ceil(BLOCK).max(offset / BLOCK));
        }
        true
    }

    fn days(self) -> Days {
        self.days.into_iter().map(in_order).collect()
    }
}

/// The writes to the first `bytes` of a volume, by days, of a block trace: what kind it is, its content says.
fn recorded(mut trace: impl BufRead, bytes: u64) -> Result<Days> {
    // More than two records of either version.
    let mut head = Vec::new();
    trace.by_ref().take(128).read_to_end(&mut head)?;
    let version = Version::of(&head);
    let whole = head.chain(trace);
    match version {
        Some(version) => recorded_by_vscsi(vscsi::Trace::new(whole, version), bytes),
        None => recorded_as_csv(whole, bytes),
    }
}

/// As Microsoft Research published them: `Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime`, a request a line, timestamps in
/// units of 100 ns.
fn recorded_as_csv(trace: impl BufRead, bytes: u64) -> Result<Days> {
    let mut calendar = Calendar::new(bytes);
    let mut at = 0;
    for (number, line) in trace.split(b'\n').enumerate() {
        let (began, line) = (at, line?);
        at += line.len() as u64 + 1;
        let line = String::from_utf8_lossy(&line).into_owned();
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let field = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
        let (Some(time), Some(offset), Some(len)) = (field(0), field(4), field(5)) else {
            ensure!(number == 0, "byte {began}, line {}: not a request: {line}", number + 1);
            continue; // A head.
        };
        let within = calendar.request(time, fields[3].eq_ignore_ascii_case("write"), offset, len);
        ensure!(within, "byte {began}, line {}: more than a year after the first", number + 1);
    }
    Ok(calendar.days())
}

fn recorded_by_vscsi(mut trace: vscsi::Trace<impl Read>, bytes: u64) -> Result<Days> {
    let mut calendar = Calendar::new(bytes);
    loop {
        let at = trace.at();
        let Some(request) = trace.next()? else { return Ok(calendar.days()) };
        let time = request.time.saturating_mul(10);
        let within = calendar.request(time, request.write, request.offset, request.len);
        ensure!(within, "byte {at}: more than a year after the first");
    }
}

/// A week with the statistics that the paper gives of its trace (the first 32 GiB of a print server's volume): between 1 and 2 % of
/// all blocks a day, most of them in runs of 4 as in its figure 8, and most writes where others were.
fn generated(bytes: u64, random: &mut Random) -> Days {
    (0..7).map(|_| generated_day(bytes / BLOCK, random)).collect()
}

/// One day of that, of a disk of so many blocks.
pub(crate) fn generated_day(blocks: u64, random: &mut Random) -> Vec<u64> {
    let wanted = blocks / 100 + random.below(blocks / 100);
    let mut written = Vec::new();
    while (written.len() as u64) < wanted {
        let len = match random.below(10) {
            0..=2 => 1,
            3 => 2 + random.below(2),
            4..=7 => 4,
            8 => 8,
            _ => 16,
        };
        // Four of five go to a fifth of the volume.
        let within = if random.below(5) > 0 { blocks / 5 } else { blocks };
        let first = random.below(within - len);
        written.extend(first..first + len);
    }
    in_order(written)
}

fn in_order(mut blocks: Vec<u64>) -> Vec<u64> {
    blocks.sort_unstable();
    blocks.dedup();
    blocks
}

/// Runs the scenario.
pub(crate) fn trace(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 256 << 20 } else { 4 << 30 }).next_multiple_of(1 << 20);
    let mut random = Random::seeded(bench.seed);
    let (days, what) = match &bench.trace {
        Some(file) => {
            let open = File::open(file).with_context(|| file.display().to_string())?;
            let days = recorded(BufReader::new(open), bytes);
            (days.with_context(|| file.display().to_string())?, file.display().to_string())
        }
        None => (generated(bytes, &mut random), "a generated week".into()),
    };
    report.section(
        "trace: a week of a server",
        &format!(
            "The first {} of {what}, day by day: what was written is changed through the server that follows it, then each tool \
             brings its copy on another host up to date over 1 Gbit/s, from cold caches. Medians of the days.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("trace", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let synthetic: Vec<u64> = {
        let count = days.first().map_or(0, Vec::len) as u64;
        in_order((0..count).map(|_| random.below(bytes / BLOCK)).collect())
    };
    let first = days.first().unwrap_or(&synthetic);
    lengths(report, &results(bench), "trace", &[("random", &synthetic), ("the first day", first)])?;
    let folder = scratch(&bench.dir)?;
    let own = if root() { own_mounts() } else { Ok(()) };
    let hosts = match own.and_then(|()| Hosts::new(Some(RATE), folder.path())) {
        Ok(hosts) => Arc::new(hosts),
        Err(error) => {
            report.left_out("trace", &format!("{error:#}"));
            return Ok(());
        }
    };
    let mut scene = Scene::new(&hosts, binary, folder.path(), Content::new(bench.seed, bytes))?;
    let mut tools = wanted(bench);
    scene.first_copies(&mut tools, report)?;
    let (mut all, mut reads) = (Vec::new(), Vec::new());
    for (day, blocks) in days.iter().enumerate() {
        go_on()?;
        let change = scene.change_blocks(blocks.clone())?;
        for tool in rotated(&tools, day) {
            let measured = scene.measure(tool, 0, day)?;
            scene.content.check_changed(&change, &scene.copy(tool))?;
            if !bench.quiet {
                println!("day {}: {}: {:.2} s", day + 1, tool.name(), measured.row.seconds);
            }
            if let Some(read) = measured.read.filter(|_| tool == Tool::Tls) {
                reads.push(read as f64 / (blocks.len() as u64 * BLOCK) as f64);
            }
            all.push(measured.row);
        }
    }
    let file = results(bench).join("trace-runs.csv");
    rows::write(&file, &report.about(), &all)?;
    report.table(&table(&tools, &rows::read(&file)?, &days));
    if !reads.is_empty() {
        report.goal("trace: bytes read, times bytes that were dirtied", median(&reads), true, 1.05);
    }
    Ok(())
}

/// Table 2.
fn table(tools: &[Tool], all: &[Row], days: &Days) -> Table {
    let dirtied: Vec<f64> = days.iter().map(|blocks| (blocks.len() as u64 * BLOCK) as f64 / MIB).collect();
    let title = format!("{} days of {:.0} MiB", days.len(), median(&dirtied));
    let mut table = Table::new(&title, &["tool", "seconds", "least", "most", "transferred, MiB"]);
    for tool in tools {
        let runs: Vec<&Row> = all.iter().filter(|row| row.tool == tool.name()).collect();
        let seconds: Vec<f64> = runs.iter().map(|row| row.seconds).collect();
        let carried: Vec<f64> = runs.iter().map(|row| (row.near.sent + row.near.received) / MIB).collect();
        table.row(vec![
            tool.name().into(),
            format!("{:.2}", median(&seconds)),
            format!("{:.2}", seconds.iter().copied().fold(f64::MAX, f64::min)),
            format!("{:.2}", seconds.iter().copied().fold(0.0, f64::max)),
            format!("{:.0}", median(&carried)),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::lengths::runs;

    #[test]
    fn days_of_a_trace() {
        let text = format!(
            "Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime\n\
             1000,host,0,Write,8192,4096,1\n1001,host,0,Read,0,4096,1\n1002,host,0,Write,12000,1000,1\n\
             {},host,0,Write,0,8193,1\n{},host,0,Write,1048576,4096,1\n",
            1000 + DAY,
            1001 + DAY
        );
        let days = recorded(text.as_bytes(), 1 << 20).unwrap();
        assert_eq!(days, [vec![2, 3], vec![0, 1, 2]]);
        let error = recorded(&b"1,h,0,Write,0,4096,1\nnonsense\n"[..], 1 << 20).unwrap_err();
        assert!(error.to_string().starts_with("byte 21, line 2: not a request"), "{error}");
    }

    #[test]
    fn days_of_a_binary_trace() {
        let day = DAY / 10;
        let record = |time: u64, command: u16, block: u64, len: u32| {
            let mut record = [command.to_le_bytes(), [0, 2]].concat();
            record.extend([1u32, len, 1].map(u32::to_le_bytes).concat());
            record.extend([block, time, 0].map(u64::to_le_bytes).concat());
            record
        };
        let mut trace = [
            record(1000, 0x2a, 16, 4096),
            record(1001, 0x28, 64, 4096),
            record(1000 + day, 0x8a, 0, 8193),
            record(1001 + day, 0x2a, 1 << 11, 4096),
        ]
        .concat();
        assert_eq!(recorded(&trace[..], 1 << 20).unwrap(), [vec![2], vec![0, 1, 2]]);
        trace.extend(record(1000 + 400 * day, 0x2a, 0, 512));
        let error = recorded(&trace[..], 1 << 20).unwrap_err().to_string();
        assert!(error.starts_with("byte 160: more than a year"), "{error}");
        trace.truncate(170);
        assert!(
            recorded(&trace[..], 1 << 20).unwrap_err().to_string().starts_with("byte 160: the last record")
        );
    }

    #[test]
    fn a_generated_week_is_as_the_paper_says() {
        let mut random = Random::seeded(1);
        let days = generated(1 << 30, &mut random);
        assert_eq!(days.len(), 7);
        for day in &days {
            let share = day.len() as f64 / f64::from(1 << 18);
            assert!((0.009..0.021).contains(&share), "{share}");
            let runs = runs(day);
            assert!(runs[&4] > runs[&1], "{runs:?}");
        }
    }
}
