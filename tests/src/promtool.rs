//! Metrics as Prometheus reads them, and its own checks of these and of rules.

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

/// The value of the one sample of a metric with these labels; `None` if there is none.
pub fn sample(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let is_it = |line: &&str| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label))
    };
    let mut found = text.lines().filter(is_it);
    let value = found.next()?.rsplit(' ').next()?.parse().ok();
    assert!(found.next().is_none(), "two samples of {name} {labels:?} in {text}");
    value
}
