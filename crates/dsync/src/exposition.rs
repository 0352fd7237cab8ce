//! The text exposition format of Prometheus, and the metrics that are printed in it.

use std::collections::BTreeMap;
use std::fmt::Write;

/// A metric. All of them are gauges: a source that is made anew begins with another epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    SourceEpoch,
    SourceTracking,
    ReplicaEpoch,
    ReplicaLastSuccess,
    ReplicaLacks,
    LocalState,
    LocalUnsure,
    LocalAhead,
    Errors,
}

impl Metric {
    /// The name, and the help, which has neither a backslash nor a line break.
    fn described(self) -> (&'static str, &'static str) {
        match self {
            Metric::SourceEpoch => ("dsync_source_epoch", "Number of the last epoch of a source."),
            Metric::SourceTracking => (
                "dsync_source_tracking",
                "1 if changes since the last epoch are known, 0 if the next sync compares.",
            ),
            Metric::ReplicaEpoch => {
                ("dsync_replica_epoch", "Epoch of a replica, as its source remembers it.")
            }
            Metric::ReplicaLastSuccess => (
                "dsync_replica_last_success_timestamp_seconds",
                "When a replica was last brought up to date, or found to be so.",
            ),
            Metric::ReplicaLacks => (
                "dsync_replica_lacks_bytes",
                "Bytes of the blocks written since the epoch of a replica; absent if that is not known.",
            ),
            Metric::LocalState => (
                "dsync_local_replica_state",
                "1 for the state that a replica on this host is in, 0 for all others.",
            ),
            Metric::LocalUnsure => (
                "dsync_local_replica_unsure_bytes",
                "Bytes in which a replica on this host may not be what its epoch was.",
            ),
            Metric::LocalAhead => (
                "dsync_local_replica_ahead",
                "1 if batches of a mirror have brought a replica on this host ahead of its epoch.",
            ),
            Metric::Errors => ("dsync_status_errors", "Sources whose state could not be read."),
        }
    }
}

/// Samples, by metric: those of one metric must be together.
#[derive(Debug, Default)]
pub(crate) struct Exposition(BTreeMap<Metric, String>);

impl Exposition {
    /// Adds a sample. The names of labels are valid ones.
    pub(crate) fn add(&mut self, metric: Metric, labels: &[(&str, &str)], value: u64) {
        let samples = self.0.entry(metric).or_default();
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(samples, "{}{labels} {value}", metric.described().0);
    }

    /// The whole text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (metric, samples) in &self.0 {
            let (name, help) = metric.described();
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{samples}");
        }
        text
    }
}

/// The value of a label.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_metric_are_together_and_values_of_labels_escaped() {
        let mut out = Exposition::default();
        out.add(Metric::ReplicaEpoch, &[("replica", "a")], 3);
        out.add(Metric::SourceEpoch, &[("source", "/srv/\"a\\b\nc\"")], 7);
        out.add(Metric::ReplicaEpoch, &[("replica", "b")], 4);
        out.add(Metric::Errors, &[], 0);
        let text = out.text();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                r#"dsync_source_epoch{source="/srv/\"a\\b\nc\""} 7"#,
                r#"dsync_replica_epoch{replica="a"} 3"#,
                r#"dsync_replica_epoch{replica="b"} 4"#,
                "dsync_status_errors 0",
            ]
        );
        assert_eq!(text.matches("# TYPE dsync_replica_epoch gauge\n").count(), 1, "{text}");
    }
}
