//! Figure 8 of "dsync: Efficient Block-wise Synchronization of Multi-Gigabyte Binary Data" (LISA 2013): how far what is written lies
//! together.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::Result;

use crate::figures::plot::{Series, lines};
use crate::figures::sheet::Sheet;
use crate::measure::report::{Report, Table};

/// The lengths that are told apart: names, and runs of so many blocks.
const CLASSES: [(&str, RangeInclusive<u64>); 9] = [
    ("1", 1..=1),
    ("2", 2..=2),
    ("3", 3..=3),
    ("4", 4..=4),
    ("5-8", 5..=8),
    ("9-16", 9..=16),
    ("17-64", 17..=64),
    ("65-256", 65..=256),
    ("more", 257..=u64::MAX),
];

/// How many blocks lie in runs of each length. The blocks ascend.
pub(crate) fn runs(blocks: &[u64]) -> BTreeMap<u64, u64> {
    let mut found = BTreeMap::new();
    for run in blocks.chunk_by(|a, b| a + 1 == *b) {
        *found.entry(run.len() as u64).or_default() += run.len() as u64;
    }
    found
}

/// Tells of sets of blocks, ascending each: rows as NAME-lengths.csv, the figure as NAME-fig8.svg in `results`, and a table.
pub(crate) fn lengths(
    report: &mut Report,
    results: &Path,
    name: &str,
    sets: &[(&str, &[u64])],
) -> Result<()> {
    let mut sheet = Sheet::new(&["set", "length", "blocks"]);
    for (set, blocks) in sets {
        for (length, count) in runs(blocks) {
            sheet.add([set.to_string(), length.to_string(), count.to_string()]);
        }
    }
    let sheet = sheet.kept(&results.join(format!("{name}-lengths.csv")), &report.about())?;
    let names = CLASSES.map(|(name, _)| name.to_string());
    let columns: Vec<&str> = [""].into_iter().chain(CLASSES.iter().map(|(name, _)| *name)).collect();
    let mut table = Table::new("Of a hundred blocks so many lie in runs of", &columns);
    let mut series = Vec::new();
    for (set, _) in sets {
        let of = |lengths: &RangeInclusive<u64>| -> f64 {
            let lines = sheet.lines().filter(|line| line.text("set") == *set);
            let within = lines.filter(|line| lengths.contains(&(line.number("length") as u64)));
            // An empty sum of floats is -0.
            within.map(|line| line.number("blocks")).sum::<f64>() + 0.0
        };
        let all = of(&(1..=u64::MAX)).max(1.0);
        let shares: Vec<f64> = CLASSES.iter().map(|(_, lengths)| 100.0 * of(lengths) / all).collect();
        let cells = shares.iter().map(|share| format!("{share:.1}"));
        table.row([set.to_string()].into_iter().chain(cells).collect());
        let points = shares.iter().enumerate().map(|(at, share)| (at as f64, *share)).collect();
        series.push(Series { name: set.to_string(), points });
    }
    report.table(&table);
    let file = results.join(format!("{name}-fig8.svg"));
    lines(
        &file,
        "Figure 8: how far changes lie together",
        ("blocks in a run", "% of all changed"),
        &names,
        &series,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_in_blocks() {
        assert_eq!(runs(&[1, 2, 3, 7, 9, 10]), BTreeMap::from([(1, 1), (2, 2), (3, 3)]));
        assert!(runs(&[]).is_empty());
    }
}
