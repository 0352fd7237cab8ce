//! Tables, on the terminal and as Markdown, with machine and date.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// What a run of the bench found out.
pub(crate) struct Report {
    text: String,
    machine: String,
    goals: Vec<(Verdict, String)>,
    quick: bool,
    /// What went wrong on the way.
    pub failures: Vec<String>,
}

/// Figures by rows and columns.
pub(crate) struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub(crate) fn new(title: &str, columns: &[&str]) -> Table {
        Table { title: title.into(), rows: vec![columns.iter().map(|column| column.to_string()).collect()] }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    fn text(&self) -> String {
        let columns = self.rows[0].len();
        let cell = |row: &[String], at: usize| row.get(at).cloned().unwrap_or_default();
        let width = |at: usize| self.rows.iter().map(|row| cell(row, at).chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(|at| width(at).max(3)).collect();
        let mut text = format!("### {}\n\n", self.title);
        for (line, row) in self.rows.iter().enumerate() {
            for (at, &width) in widths.iter().enumerate() {
                let cell = cell(row, at);
                let _ = if at == 0 {
                    write!(text, "| {cell:width$} ")
                } else {
                    write!(text, "| {cell:>width$} ")
                };
            }
            text.push_str("|\n");
            if line == 0 {
                for (at, &width) in widths.iter().enumerate() {
                    let _ = match at {
                        0 => write!(text, "| {:-<width$} ", ""),
                        _ => write!(text, "| {:-<1$}: ", "", width - 1),
                    };
                }
                text.push_str("|\n");
            }
        }
        text.push('\n');
        text
    }
}

/// Two runs on one machine differ by so much: a figure that exceeds its goal by less does not say that the goal is missed.
const TOLERANCE: f64 = 1.1;

/// What a figure says of its goal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Met,
    Near,
    Missed,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Met => "met",
            Verdict::Near => "within the tolerance of 10 %",
            Verdict::Missed => "MISSED",
        }
    }
}

impl Report {
    /// Begins with the machine.
    pub(crate) fn new(dsync: Option<&Path>, dir: &Path, quick: bool) -> Report {
        let machine = machine(dsync, dir);
        let begin = format!("# dsync-bench, {}\n\n{machine}\n", date());
        let mut report =
            Report { text: String::new(), machine, goals: Vec::new(), quick, failures: Vec::new() };
        report.add(&begin);
        report
    }

    /// The day and the machine, a line each.
    pub(crate) fn about(&self) -> String {
        format!("{}\n{}", date(), self.machine)
    }

    fn add(&mut self, text: &str) {
        print!("{text}");
        self.text.push_str(text);
    }

    /// A section.
    pub(crate) fn section(&mut self, title: &str, about: &str) {
        self.add(&format!("\n## {title}\n\n{about}\n\n"));
    }

    /// A line of text.
    pub(crate) fn line(&mut self, line: &str) {
        self.add(&format!("- {line}\n"));
    }

    /// A table.
    pub(crate) fn table(&mut self, table: &Table) {
        self.add("\n");
        self.add(&table.text());
    }

    /// Says that something was left out.
    pub(crate) fn left_out(&mut self, what: &str, why: &str) {
        self.line(&format!("left out: {what}: {why}"));
    }

    /// Notes a failure; the bench goes on.
    pub(crate) fn failed(&mut self, what: &str, error: &anyhow::Error) {
        let line = format!("{what}: {error:#}");
        self.line(&format!("FAILED: {line}"));
        self.failures.push(line);
    }

    /// Compares a figure with what is asked of it: `ratio` is to be at most (or at least) `goal`.
    pub(crate) fn goal(&mut self, what: &str, ratio: f64, at_most: bool, goal: f64) {
        let over = if at_most { ratio / goal } else { goal / ratio.max(f64::MIN_POSITIVE) };
        let verdict = match over {
            over if over <= 1.0 => Verdict::Met,
            over if over <= TOLERANCE => Verdict::Near,
            _ => Verdict::Missed,
        };
        let bound = if at_most { "at most" } else { "at least" };
        self.goals.push((verdict, format!("{what}: {ratio:.2} ({bound} {goal})")));
    }

    /// True if a figure misses its goal by more than the tolerance.
    pub(crate) fn misses(&self) -> bool {
        self.goals.iter().any(|goal| goal.0 == Verdict::Missed)
    }

    /// Ends with the goals, and writes everything to a file. True if nothing failed.
    pub(crate) fn finish(mut self, file: &Path) -> Result<bool> {
        if !self.goals.is_empty() {
            let met = self.goals.iter().filter(|goal| goal.0 == Verdict::Met).count();
            let mut text = format!("\n## Goals: {met} of {} met\n\n", self.goals.len());
            if self.quick {
                text.push_str(
                    "This was a quick run: sizes are too small, and rounds too few, to judge by.\n\n",
                );
            }
            for (verdict, goal) in &self.goals {
                let _ = writeln!(text, "- {}: {goal}", verdict.word());
            }
            self.add(&text);
        }
        if !self.failures.is_empty() {
            let list: String = self.failures.iter().map(|failure| format!("- {failure}\n")).collect();
            self.add(&format!("\n## Failures\n\n{list}"));
        }
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        }
        std::fs::write(file, &self.text).with_context(|| file.display().to_string())?;
        println!("\nwritten to {}", file.display());
        Ok(self.failures.is_empty())
    }
}

/// The middle of the figures; 0 without any.
pub(crate) fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[len / 2],
        len => (sorted[len / 2 - 1] + sorted[len / 2]) / 2.0,
    }
}

/// Bytes for people.
pub(crate) fn size(bytes: f64) -> String {
    let (mut value, mut unit) = (bytes, 0);
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Seconds with three digits that count.
pub(crate) fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{s:.3}"),
        s if s < 10.0 => format!("{s:.2}"),
        s => format!("{s:.1}"),
    }
}

/// Today, as 2026-11-21, in UTC.
pub(crate) fn date() -> String {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() / 86_400) as i64;
    // Days since 0000-03-01, split into eras of 400 years; years begin in March, so that leap days come last.
    let days = days + 719_468;
    let (era, day) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + i64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

fn machine(dsync: Option<&Path>, dir: &Path) -> String {
    let said = |program: &str, args: &[&str]| -> String {
        let output = crate::measure::process::command(program).args(args).output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        text.lines().next().unwrap_or_default().trim().to_string()
    };
    let field = |file: &str, name: &str| -> String {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or(String::new(), |(_, value)| value.trim().to_string())
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let memory = field("/proc/meminfo", "MemTotal").trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0);
    let place = dir.display().to_string();
    let version = match dsync {
        Some(path) => said(&path.display().to_string(), &["--version"]),
        None => "no dsync".into(),
    };
    let lies_on = {
        let output = crate::measure::process::command("df").args(["--output=fstype,source", &place]).output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        text.lines().nth(1).unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" on ")
    };
    let options = said("findmnt", &["--noheadings", "--output", "OPTIONS", "--target", &place]);
    let processor = field("/proc/cpuinfo", "model name");
    let mut lines = vec![
        format!("{version}; Linux {}", said("uname", &["-r"])),
        format!("{cores} x {processor}, {} of memory", size(memory * 1024.0)),
        format!("files on {lies_on} ({options})"),
    ];
    let tools: Vec<String> = [
        ("rsync", "--version"),
        ("nbdkit", "--version"),
        ("nbdcopy", "--version"),
        ("qemu-nbd", "--version"),
        ("btrfs", "--version"),
        ("fio", "--version"),
    ]
    .into_iter()
    .filter(|(tool, _)| dsync_tests::find(tool).is_some())
    .map(|(tool, option)| said(tool, &[option]))
    .collect();
    lines.push(tools.join("; "));
    lines.iter().map(|line| format!("- {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), 0.0);
    }

    #[test]
    fn a_goal_is_missed_beyond_the_tolerance() {
        let mut report = Report::new(None, Path::new("."), true);
        report.goal("at most", 1.05, true, 1.0);
        report.goal("at least", 0.95, false, 1.0);
        assert!(!report.misses());
        report.goal("at least", 0.0, false, 1.0);
        assert!(report.misses());
    }

    #[test]
    fn tables_are_markdown() {
        let mut table = Table::new("t", &["tool", "s"]);
        table.row(vec!["limit".into(), "0.2".into()]);
        assert_eq!(table.text(), "### t\n\n| tool  |   s |\n| ----- | --: |\n| limit | 0.2 |\n\n");
    }
}
