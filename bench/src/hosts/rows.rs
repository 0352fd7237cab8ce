//! Runs as CSV files: what was measured, from which tables and figures are made.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::hosts::{Carried, Used};

/// One run of one tool, or what it had used at a moment of that run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub tool: String,
    /// Size of the image.
    pub bytes: u64,
    /// Of a hundred blocks, so many had changed.
    pub percent: u32,
    pub round: usize,
    pub seconds: f64,
    /// By the disk, for both hosts.
    pub disk: Carried,
    pub near: Used,
    pub far: Used,
}

const COLUMNS: &str = "tool;bytes;percent;round;seconds;\
    read;written;near_processor;near_memory;near_received;near_sent;\
    far_processor;far_memory;far_received;far_sent";

fn numbers(used: &Used) -> [f64; 4] {
    [used.processor, used.memory, used.received, used.sent]
}

fn used(fields: &[f64]) -> Option<Used> {
    let [processor, memory, received, sent] = *fields else { return None };
    Some(Used { processor, memory, received, sent })
}

/// Writes rows below comment lines that say where they were taken.
pub(crate) fn write(file: &Path, about: &str, rows: &[Row]) -> Result<()> {
    let mut text = head(about);
    let _ = writeln!(text, "{COLUMNS}");
    for row in rows {
        let _ = write!(text, "{};{};{};{};{:.4}", row.tool, row.bytes, row.percent, row.round, row.seconds);
        let disk = [row.disk.read, row.disk.written];
        for number in disk.into_iter().chain(numbers(&row.near)).chain(numbers(&row.far)) {
            let _ = write!(text, ";{}", (number * 1e4).round() / 1e4);
        }
        text.push('\n');
    }
    store(file, &text)
}

/// The machine and the day as comments.
pub(crate) fn head(about: &str) -> String {
    about.lines().map(|line| format!("# {}\n", line.trim_start_matches("- "))).collect()
}

/// Writes a file of results, and its folder if that is not there.
pub(crate) fn store(file: &Path, text: &str) -> Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    std::fs::write(file, text).with_context(|| file.display().to_string())
}

/// Reads what [`write()`] wrote.
pub(crate) fn read(file: &Path) -> Result<Vec<Row>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    ensure!(lines.next() == Some(COLUMNS), "{}: other columns than expected", file.display());
    let row = |line: &str| -> Option<Row> {
        let mut fields = line.split(';');
        let (tool, bytes, percent) =
            (fields.next()?.to_string(), fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let (round, seconds) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let rest = fields.map(|field| field.parse().ok()).collect::<Option<Vec<f64>>>()?;
        let [read, written, hosts @ ..] = rest.as_slice() else { return None };
        let (near, far) = (used(hosts.get(..4)?)?, used(hosts.get(4..)?)?);
        Some(Row {
            tool,
            bytes,
            percent,
            round,
            seconds,
            disk: Carried { read: *read, written: *written },
            near,
            far,
        })
    };
    lines.map(|line| row(line).with_context(|| format!("{}: not a run: {line}", file.display()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_outlive_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("runs.csv");
        let near = Used { processor: 1.25, sent: 7e9, ..Used::default() };
        let row = Row {
            tool: "scp".into(),
            bytes: 1 << 30,
            percent: 10,
            round: 2,
            seconds: 3.5,
            disk: Carried { read: 7.0, written: 8.0 },
            near,
            far: Used::default(),
        };
        write(&file, "- a machine\n- a disk\n", std::slice::from_ref(&row)).unwrap();
        assert_eq!(read(&file).unwrap(), [row]);
        std::fs::write(&file, format!("{COLUMNS}\nscp;1;2\n")).unwrap();
        assert!(read(&file).unwrap_err().to_string().contains("not a run"));
    }
}
