//! A file and an older copy of it on one machine, brought up to date by rolling checksums: what that costs, for dsync and for rsync.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::measure::dsync::{Dsync, Synced};
use crate::measure::process::{self, command, quote, run, shell};
use crate::{Bench, own};

/// How long anything may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

/// A source, and a copy beside it that is brought up to date.
pub(crate) struct Pair<'a> {
    pub bench: &'a Bench,
    pub dsync: Dsync,
    pub source: PathBuf,
    pub copy: PathBuf,
}

/// What a run cost.
pub(crate) struct Cost {
    pub seconds: f64,
    /// Seconds of processor time.
    pub processor: f64,
    /// Both ways.
    pub bytes: u64,
    pub peak: u64,
    /// Bytes that were written to files, also to those that are gone in the end.
    pub written: u64,
}

impl Pair<'_> {
    /// Puts an older state in the copy's place, as if it had been carried there.
    pub(crate) fn restore(&self, old: &Path) -> Result<()> {
        let state = self.copy.with_file_name(".copy.dsync");
        if state.exists() {
            std::fs::remove_dir_all(state)?;
        }
        run(command("cp").args(["--sparse=always", "--"]).arg(old).arg(&self.copy), LIMIT)?;
        rustix::fs::sync();
        Ok(())
    }

    fn check(&self) -> Result<()> {
        run(command("cmp").arg(&self.source).arg(&self.copy), LIMIT).context("WRONG CONTENT").map(drop)
    }

    pub(crate) fn dsync(&self, options: &[&str]) -> Result<Cost> {
        let copy = self.copy.display().to_string();
        let options =
            [&["--method", "rolling", "--adopt=overwrite", "--create", "--allow-shrink"], options].concat();
        let synced: Synced = self.dsync.sync(&self.source, &copy, &options, LIMIT)?;
        self.check()?;
        Ok(Cost {
            seconds: synced.outcome.seconds,
            processor: synced.outcome.processor,
            bytes: synced.number("bytes_sent") + synced.number("bytes_received"),
            peak: synced.outcome.peak,
            written: synced.outcome.written,
        })
    }

    /// `None` if it took longer than `limit`.
    pub(crate) fn rsync(&self, options: &str, limit: Duration) -> Result<Option<Cost>> {
        let line = format!(
            "rsync --no-whole-file --ignore-times --stats {options} {} {} && sync {}",
            quote(&self.source),
            quote(&self.copy),
            quote(&self.copy)
        );
        let outcome = match process::run(&mut shell(&line), limit) {
            Err(error) if error.to_string().contains("still running") => return Ok(None),
            other => other?,
        };
        self.check()?;
        let number = |name: &str| {
            let line = outcome.stdout.lines().find_map(|line| line.strip_prefix(name));
            let digits: String = line.unwrap_or("").chars().filter(char::is_ascii_digit).collect();
            digits.parse::<u64>().unwrap_or(0)
        };
        let bytes = number("Total bytes sent:") + number("Total bytes received:");
        let (seconds, processor) = (outcome.seconds, outcome.processor);
        Ok(Some(Cost { seconds, processor, bytes, peak: outcome.peak, written: outcome.written }))
    }

    /// The copy is read, then the source is read while the copy is written, all of it past the page cache.
    pub(crate) fn limit(&self) -> Result<Cost> {
        let read = run(own("read").arg(&self.copy), LIMIT)?;
        let moved = run(own("limit").args([&self.source, &self.copy]), LIMIT)?;
        self.check()?;
        let (seconds, processor) = (read.seconds + moved.seconds, read.processor + moved.processor);
        Ok(Cost { seconds, processor, bytes: 0, peak: 0, written: moved.written })
    }

    /// The most memory that a sync of nothing takes.
    pub(crate) fn least(&self) -> Result<u64> {
        std::fs::write(&self.source, "")?;
        std::fs::write(&self.copy, "")?;
        let _ = std::fs::remove_dir_all(self.copy.with_file_name(".copy.dsync"));
        Ok(self.dsync(&["--commit", "in-place"])?.peak)
    }

    pub(crate) fn has_rsync(&self) -> bool {
        dsync_tests::find("rsync").is_some()
    }
}
