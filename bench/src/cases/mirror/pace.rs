//! How a mirror finds its pace: figure 6 until the interval has settled, what the destination's writes do to it, and what a limit does.

use std::path::Path;

use anyhow::Result;

use super::{Batch, EASY, Figures, How, RANDOM, SEQUENTIAL, Setting};
use crate::figures::plot::{Series, lines};
use crate::figures::sheet::Sheet;
use crate::measure::places::scratch;
use crate::measure::report::{Report, Table, median};

/// The batches that the figure of the paper has, and those that are shown here: by then it has settled.
const PAPER: usize = 20;
const SHOWN: usize = 100;

/// Batches of several runs as rows.
struct Kept(Sheet);

impl Kept {
    fn new() -> Kept {
        Kept(Sheet::new(&[
            "run", "round", "batch", "blocks", "bytes", "interval", "primary", "backup", "lag", "sent",
        ]))
    }

    fn add(&mut self, run: &str, round: usize, figures: &Figures) {
        for (at, batch) in figures.batches.iter().enumerate() {
            let Batch { blocks, bytes, interval, primary, backup, lag, sent } = *batch;
            let counts = [at as u64 + 1, blocks as u64, bytes as u64].map(|number| number.to_string());
            let [at, blocks, bytes] = counts;
            let [interval, primary, backup, lag] =
                [interval, primary, backup, lag].map(|time| format!("{time:.6}"));
            let (run, round, sent) = (run.to_string(), round.to_string(), format!("{sent:.0}"));
            self.0.add([run, round, at, blocks, bytes, interval, primary, backup, lag, sent]);
        }
    }

    /// Writes them, and gives the batches of each run and round back as they were read.
    fn read_back(self, file: &Path, report: &Report) -> Result<impl Fn(&str) -> Vec<Vec<Batch>> + use<>> {
        let sheet = self.0.kept(file, &report.about())?;
        Ok(move |run: &str| {
            let mut rounds: Vec<Vec<Batch>> = Vec::new();
            for line in sheet.lines().filter(|line| line.text("run") == run) {
                let round = line.number("round") as usize;
                if rounds.len() <= round {
                    rounds.resize_with(round + 1, Vec::new);
                }
                let [blocks, bytes, interval, primary, backup, lag, sent] =
                    ["blocks", "bytes", "interval", "primary", "backup", "lag", "sent"]
                        .map(|name| line.number(name));
                rounds[round].push(Batch { blocks, bytes, interval, primary, backup, lag, sent });
            }
            rounds
        })
    }
}

/// The batch at which the running median of nine intervals first comes within a factor of two of the median of the later half, and the part of
/// all running medians from there on that stay within it. `None` of too few.
fn settled(intervals: &[f64]) -> Option<(usize, f64)> {
    let middle = median(&intervals[intervals.len() / 2..]);
    let close = |nine: &[f64]| (middle / 2.0..=middle * 2.0).contains(&median(nine));
    let windows: Vec<bool> = intervals.windows(9).map(close).collect();
    let at = windows.iter().position(|close| *close)?;
    let rest = &windows[at..];
    let stay = rest.iter().filter(|close| **close).count();
    Some((at + 1, stay as f64 / rest.len() as f64))
}

fn column(batches: &[Batch], part: fn(&Batch) -> f64) -> Vec<f64> {
    batches.iter().map(part).collect()
}

/// The interval's first steps, from 15 and from 30 ms, and those until it has settled.
pub(super) fn convergence(
    setting: &Setting,
    report: &mut Report,
    results: &Path,
    memory: &Path,
) -> Result<()> {
    let in_memory = scratch(memory)?;
    let starts = [
        ("from 15 ms", "15ms", None),
        ("from 30 ms", "30ms", None),
        ("from 15 ms, replica in memory", "15ms", Some(in_memory.path())),
        ("from 30 ms, replica in memory", "30ms", Some(in_memory.path())),
    ];
    let mut kept = Kept::new();
    for round in 0..setting.rounds {
        for (name, first, folder) in starts {
            let mut how =
                How::new("adaptive", true, false).with(&["--interval", first, "--min-interval", "1ms"]);
            how.replica = folder.map(|folder| folder.join("replica.raw"));
            kept.add(name, round, &setting.run(Some(&how), SEQUENTIAL, (4 << 10, EASY))?);
            how.replica.iter().try_for_each(|replica| removed(replica))?;
        }
    }
    let batches = kept.read_back(&results.join("mirror-fig6.csv"), report)?;
    let mut table = Table::new(
        "Figure 6: the interval of the first batches in ms, 4 KiB requests, 40 MB/s. Arrived is the batch from which the \
         running median of nine is within a factor of two of the median of the later half; so many of those after it stay there",
        &[
            "begun at",
            "1",
            "5",
            "10",
            "15",
            "20",
            "50",
            "100",
            "arrived, by rounds",
            "stay, %",
            "at, ms",
            "T_pri, ms",
            "T_back, ms",
        ],
    );
    let mut series = Vec::new();
    for (name, ..) in starts {
        let rounds = batches(name);
        let Some(shown) = rounds.first() else { continue };
        let step = |at: usize| shown.get(at - 1).map_or(0.0, |batch| batch.interval * 1e3);
        let mut row = vec![name.to_string()];
        row.extend([1, 5, 10, 15, PAPER, 50, SHOWN].map(|at| format!("{:.1}", step(at))));
        let intervals = rounds.iter().map(|batches| column(batches, |batch| batch.interval));
        let found: Vec<(usize, f64)> = intervals.filter_map(|intervals| settled(&intervals)).collect();
        let told =
            |part: &dyn Fn(&(usize, f64)) -> String| found.iter().map(part).collect::<Vec<_>>().join(", ");
        row.push(told(&|found| found.0.to_string()));
        row.push(told(&|found| format!("{:.0}", found.1 * 100.0)));
        for part in
            [(|batch| batch.interval) as fn(&Batch) -> f64, |batch| batch.primary, |batch| batch.backup]
        {
            row.push(format!("{:.1}", median(&column(&shown[shown.len() / 2..], part)) * 1e3));
        }
        table.row(row);
        let points = (1..=SHOWN.min(shown.len())).map(|at| (at as f64, step(at))).collect();
        series.push(Series { name: name.into(), points });
    }
    report.table(&table);
    let file = results.join("mirror-fig6.svg");
    lines(&file, "Figure 6: convergence of the interval", ("batch", "interval in ms"), &[], &series)
}

/// What the replica's site takes for a batch, where the replica is in memory, and where it is on disk.
pub(super) fn destination(
    setting: &Setting,
    report: &mut Report,
    results: &Path,
    memory: &Path,
) -> Result<()> {
    let in_memory = scratch(memory)?;
    let on_disk = scratch(setting.place)?;
    let places = [("in memory", in_memory.path()), ("on disk", on_disk.path())];
    let loads = [("sequential", SEQUENTIAL), ("random", RANDOM)];
    let mut kept = Kept::new();
    for round in 0..setting.rounds {
        for (place, folder) in places {
            for (load, pattern) in loads {
                let mut how = How::new("adaptive", false, false);
                let replica = folder.join("replica.raw");
                how.replica = Some(replica.clone());
                kept.add(
                    &format!("{place}, {load}"),
                    round,
                    &setting.run(Some(&how), pattern, (4 << 10, EASY))?,
                );
                removed(&replica)?;
            }
        }
    }
    let batches = kept.read_back(&results.join("mirror-destination.csv"), report)?;
    let mut table = Table::new(
        &format!(
            "T_back with the destination's write: 4 KiB requests, 40 MB/s, ms; medians of {} rounds",
            setting.rounds
        ),
        &["replica", "T_pri", "T_back", "T_back, p95", "interval", "lag"],
    );
    for (place, _) in places {
        for (load, _) in loads {
            let run = format!("{place}, {load}");
            let rounds = batches(&run);
            let of = |part: fn(&Batch) -> f64| {
                median(&rounds.iter().map(|batches| median(&column(batches, part))).collect::<Vec<_>>()) * 1e3
            };
            let mut slow = column(&rounds.concat(), |batch| batch.backup);
            slow.sort_by(f64::total_cmp);
            let slow = slow.get(slow.len() * 95 / 100).copied().unwrap_or(0.0) * 1e3;
            let figures = [of(|b| b.primary), of(|b| b.backup), slow, of(|b| b.interval), of(|b| b.lag)];
            table.row([run].into_iter().chain(figures.map(|figure| format!("{figure:.1}"))).collect());
        }
    }
    report.table(&table);
    Ok(())
}

/// The replica and what belongs to it, so that the next run begins anew.
fn removed(replica: &Path) -> Result<()> {
    std::fs::remove_file(replica)?;
    let _ = std::fs::remove_dir_all(replica.with_file_name(".replica.raw.dsync"));
    Ok(())
}

/// What a limit does to a mirror of a disk of which a part is written again and again.
pub(super) fn limits(setting: &Setting, report: &mut Report, results: &Path) -> Result<()> {
    // Longer than a batch at the lowest of them, several times.
    let setting = Setting { bytes: 64 << 20, seconds: 3.0 * setting.seconds, ..setting.clone() };
    let limits: [&[&str]; 7] = [
        &[],
        &["--rate", "20M"],
        &["--rate", "10M"],
        &["--rate", "5M"],
        &["--bwlimit", "20M"],
        &["--bwlimit", "10M"],
        &["--bwlimit", "5M"],
    ];
    let name = |limit: &[&str]| if limit.is_empty() { "none".to_string() } else { limit.join(" ") };
    let mut kept = Kept::new();
    for round in 0..setting.rounds {
        for turn in 0..limits.len() {
            let limit = limits[(turn + round) % limits.len()];
            let how = How::new("adaptive", false, false).with(limit);
            kept.add(&name(limit), round, &setting.run(Some(&how), RANDOM, (4 << 10, EASY))?);
        }
    }
    let batches = kept.read_back(&results.join("mirror-limits.csv"), report)?;
    let mut table = Table::new(
        &format!(
            "A limit: random writes of 4 KiB at 40 MB/s to 64 MiB for {:.0} s, medians of {} rounds",
            setting.seconds, setting.rounds
        ),
        &["limit", "changed MiB/s", "sent MiB/s", "batches", "interval, ms", "lag, ms", "most"],
    );
    for limit in limits {
        let rounds = batches(&name(limit));
        let of = |part: &dyn Fn(&[Batch]) -> f64| {
            median(&rounds.iter().map(|batches| part(batches)).collect::<Vec<_>>())
        };
        let mib = |bytes: f64| bytes / f64::from(1 << 20) / setting.seconds;
        let sent = |batches: &[Batch]| match batches {
            [first, .., last] => last.sent - first.sent,
            _ => 0.0,
        };
        table.row(vec![
            name(limit),
            format!("{:.1}", mib(of(&|batches| batches.iter().map(|batch| batch.bytes).sum()))),
            format!("{:.1}", mib(of(&sent))),
            format!("{:.0}", of(&|batches| batches.len() as f64)),
            format!("{:.1}", 1e3 * of(&|batches| median(&column(batches, |batch| batch.interval)))),
            format!("{:.1}", 1e3 * of(&|batches| median(&column(batches, |batch| batch.lag)))),
            format!("{:.1}", 1e3 * of(&|batches| batches.iter().map(|batch| batch.lag).fold(0.0, f64::max))),
        ]);
    }
    report.table(&table);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_has_settled_when_it_stays() {
        let falling = |at: i32| 10.0 + 20.0 * 0.5f64.powi(at);
        let mut steps: Vec<f64> = (0..40).map(falling).collect();
        assert_eq!(settled(&steps), Some((1, 1.0)));
        steps.splice(0..0, [40.0; 20]);
        assert_eq!(settled(&steps), Some((18, 1.0)));
        // A single one that is long does not count, ten do.
        steps[50] = 90.0;
        assert_eq!(settled(&steps), Some((18, 1.0)));
        steps[40..50].fill(90.0);
        assert!(settled(&steps).unwrap().1 < 0.8);
        assert_eq!(settled(&[]), None);
    }
}
