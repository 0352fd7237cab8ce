//! Prometheus' own checks of metrics and rules.

use std::path::PathBuf;
use std::time::Duration;

use crate::{Run, got, repository};

/// `promtool`, of the machine or fetched for the tests. `None` if there is none: then `what` is reported as skipped.
pub fn promtool(what: &str) -> Option<PathBuf> {
    let output = Run::new(repository().join("scripts/promtool")).limit(Duration::from_secs(600)).output();
    let found = match output.status.success() {
        true => Ok(PathBuf::from(output.text().trim())),
        false => Err(format!("no promtool ({})", output.stderr.trim())),
    };
    got(found.as_ref().map(drop), what).then(|| found.ok())?
}
