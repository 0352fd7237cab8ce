//! Rows with columns of their own, as CSV files: for scenarios that measure other things than [`crate::hosts::rows`] holds. Tables and
//! figures are made from what is read back.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::hosts::rows::{head, store};

/// Rows by named columns.
#[derive(Debug, PartialEq)]
pub(crate) struct Sheet {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// One of the rows.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a> {
    sheet: &'a Sheet,
    row: &'a [String],
}

impl Sheet {
    pub(crate) fn new(columns: &[&str]) -> Sheet {
        Sheet { columns: columns.iter().map(|column| column.to_string()).collect(), rows: Vec::new() }
    }

    /// Adds a row: a cell for each column.
    pub(crate) fn add<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.columns.len());
        self.rows.push(cells.into());
    }

    /// Writes the rows below comments that say where they were taken, and reads them back.
    pub(crate) fn kept(self, file: &Path, about: &str) -> Result<Sheet> {
        let lines = std::iter::once(&self.columns).chain(&self.rows);
        let text: String = lines.map(|cells| format!("{}\n", cells.join(";"))).collect();
        store(file, &(head(about) + &text))?;
        Sheet::read(file)
    }

    fn read(file: &Path) -> Result<Sheet> {
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let cells = |line: &str| line.split(';').map(str::to_string).collect::<Vec<_>>();
        let mut lines = text.lines().filter(|line| !line.starts_with('#')).map(cells);
        let columns = lines.next().with_context(|| format!("{}: no columns", file.display()))?;
        let rows: Vec<Vec<String>> = lines.collect();
        for row in &rows {
            ensure!(row.len() == columns.len(), "{}: not a row: {}", file.display(), row.join(";"));
        }
        Ok(Sheet { columns, rows })
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        self.rows.iter().map(|row| Line { sheet: self, row })
    }
}

impl<'a> Line<'a> {
    /// A cell; empty if there is no such column.
    pub(crate) fn text(&self, column: &str) -> &'a str {
        let at = self.sheet.columns.iter().position(|name| name == column);
        at.map_or("", |at| &self.row[at])
    }

    /// A cell as a number; 0 if it is none.
    pub(crate) fn number(&self, column: &str) -> f64 {
        self.text(column).parse().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_outlive_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/rows.csv");
        let mut sheet = Sheet::new(&["tool", "seconds"]);
        sheet.add(["a, b".into(), "1.5".into()]);
        let sheet = sheet.kept(&file, "- a machine\n").unwrap();
        let line = sheet.lines().next().unwrap();
        assert_eq!((line.text("tool"), line.number("seconds"), line.text("none")), ("a, b", 1.5, ""));
        std::fs::write(&file, "tool;seconds\na\n").unwrap();
        assert!(Sheet::read(&file).unwrap_err().to_string().contains("not a row"));
    }
}
