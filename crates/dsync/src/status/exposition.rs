//! The text exposition format of Prometheus, and the metrics that are printed in it.

use std::collections::BTreeMap;
use std::fmt::Write;

/// A metric. `status --prometheus` and `--metrics` print the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Metric {
    SourceEpoch,
    SourceTracking,
    SourceTerm,
    ReplicaEpoch,
    ReplicaLastSuccess,
    ReplicaLacks,
    ReplicaLag,
    ReplicaSyncs,
    ReplicaFailures,
    ReplicaSent,
    ReplicaFreeze,
    ReplicaLastVerify,
    ReplicaDiffering,
    ReplicaWork,
    LocalState,
    LocalRole,
    LocalEpoch,
    LocalTerm,
    LocalCommitted,
    LocalUnsure,
    LocalAhead,
    JobCopied,
    JobFailing,
    Errors,
}

/// What a metric is to Prometheus. What is made anew with a source begins with another number: that is a gauge.
const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

impl Metric {
    /// The name, the type, and the help, which has neither a backslash nor a line break.
    ///
    /// Longer than a screen: one row for each metric.
    fn described(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Metric::SourceEpoch => ("dsync_source_epoch", GAUGE, "Number of the last epoch of a source."),
            Metric::SourceTracking => (
                "dsync_source_tracking",
                GAUGE,
                "1 if changes since the last epoch are known, 0 if the next sync compares.",
            ),
            Metric::SourceTerm => {
                ("dsync_source_term", GAUGE, "Term of a source: rises at each promotion of a replica.")
            }
            Metric::ReplicaEpoch => {
                ("dsync_replica_epoch", GAUGE, "Epoch of a replica, as its source remembers it.")
            }
            Metric::ReplicaLastSuccess => (
                "dsync_replica_last_success_timestamp_seconds",
                GAUGE,
                "When a replica was last brought up to date, or found to be so.",
            ),
            Metric::ReplicaLacks => (
                "dsync_replica_lacks_bytes",
                GAUGE,
                "Bytes of the blocks written since the epoch of a replica; absent if that is not known.",
            ),
            Metric::ReplicaLag => (
                "dsync_replica_lag_seconds",
                GAUGE,
                "Time since a replica was last up to date; 0 if nothing was written since.",
            ),
            Metric::ReplicaSyncs => (
                "dsync_replica_syncs_total",
                COUNTER,
                "Syncs of a replica that succeeded, a mirror's included.",
            ),
            Metric::ReplicaFailures => (
                "dsync_replica_failures_total",
                COUNTER,
                "Syncs, verifications and conversations of a mirror that failed.",
            ),
            Metric::ReplicaSent => {
                ("dsync_replica_sent_bytes_total", COUNTER, "Bytes sent over links for a replica.")
            }
            Metric::ReplicaFreeze => (
                "dsync_replica_freeze_seconds",
                GAUGE,
                "How long the last sync froze a file system; absent if none did.",
            ),
            Metric::ReplicaLastVerify => (
                "dsync_replica_last_verify_timestamp_seconds",
                GAUGE,
                "When a replica was last verified; absent if it never was.",
            ),
            Metric::ReplicaDiffering => (
                "dsync_replica_last_verify_differing_bytes",
                GAUGE,
                "Bytes in which a replica differed when it was last verified, and was not repaired.",
            ),
            Metric::ReplicaWork => (
                "dsync_replica_work",
                GAUGE,
                "1 while the command in the label is at work for a replica, 0 otherwise.",
            ),
            Metric::LocalState => (
                "dsync_local_replica_state",
                GAUGE,
                "1 for the state that a replica on this host is in, 0 for all others.",
            ),
            Metric::LocalRole => (
                "dsync_local_replica_role",
                GAUGE,
                "1 for the role that a replica on this host has, 0 for all others.",
            ),
            Metric::LocalEpoch => ("dsync_local_replica_epoch", GAUGE, "Epoch of a replica on this host."),
            Metric::LocalTerm => {
                ("dsync_local_replica_term", GAUGE, "Term of the source of a replica on this host.")
            }
            Metric::LocalCommitted => (
                "dsync_local_replica_committed_timestamp_seconds",
                GAUGE,
                "When a replica on this host last committed an epoch.",
            ),
            Metric::LocalUnsure => (
                "dsync_local_replica_unsure_bytes",
                GAUGE,
                "Bytes in which a replica on this host may not be what its epoch was.",
            ),
            Metric::LocalAhead => (
                "dsync_local_replica_ahead",
                GAUGE,
                "1 if batches of a mirror have brought a replica on this host ahead of its epoch.",
            ),
            Metric::JobCopied => (
                "dsync_job_copied",
                GAUGE,
                "1 if a copy that a job of this host is to make was complete once, 0 if it never was.",
            ),
            Metric::JobFailing => (
                "dsync_job_failing",
                GAUGE,
                "1 if a job of this host failed or was killed, and has not succeeded since.",
            ),
            Metric::Errors => (
                "dsync_status_errors",
                GAUGE,
                "Sources whose state could not be read, and jobs that cannot be run.",
            ),
        }
    }
}

/// Samples, by metric: those of one metric must be together.
#[derive(Debug, Default)]
pub(crate) struct Exposition(BTreeMap<Metric, String>);

impl Exposition {
    /// Adds a sample. The names of labels are valid ones.
    pub(crate) fn add(&mut self, metric: Metric, labels: &[(&str, &str)], value: impl std::fmt::Display) {
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
            let (name, kind, help) = metric.described();
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{samples}");
        }
        text
    }
}

/// The value of a label.
fn escaped(value: &str) -> String {
    let lines: Vec<_> = value.split('\n').map(link::printable).collect();
    lines.join("\n").replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All metrics, in their order.
    const ALL: [Metric; 24] = [
        Metric::SourceEpoch,
        Metric::SourceTracking,
        Metric::SourceTerm,
        Metric::ReplicaEpoch,
        Metric::ReplicaLastSuccess,
        Metric::ReplicaLacks,
        Metric::ReplicaLag,
        Metric::ReplicaSyncs,
        Metric::ReplicaFailures,
        Metric::ReplicaSent,
        Metric::ReplicaFreeze,
        Metric::ReplicaLastVerify,
        Metric::ReplicaDiffering,
        Metric::ReplicaWork,
        Metric::LocalState,
        Metric::LocalRole,
        Metric::LocalEpoch,
        Metric::LocalTerm,
        Metric::LocalCommitted,
        Metric::LocalUnsure,
        Metric::LocalAhead,
        Metric::JobCopied,
        Metric::JobFailing,
        Metric::Errors,
    ];

    /// The names of metrics in a text.
    fn named(text: &str) -> std::collections::BTreeSet<&str> {
        let words = text.split(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'));
        words.filter(|word| word.starts_with("dsync_")).collect()
    }

    #[test]
    fn alerts_and_the_dashboard_name_metrics_that_exist_and_the_manual_all_of_them() {
        assert!(ALL.iter().enumerate().all(|(at, metric)| *metric as usize == at));
        assert_eq!(ALL.len(), Metric::Errors as usize + 1, "the last one");
        let names: std::collections::BTreeSet<&str> = ALL.iter().map(|metric| metric.described().0).collect();
        assert_eq!(names.len(), ALL.len());
        let alerts = named(include_str!("../../../../docs/alerts.yml"));
        let dashboard = named(include_str!("../../../../docs/dashboard.json"));
        assert!(alerts.len() > 5 && dashboard.len() > 10, "{alerts:?} {dashboard:?}");
        assert_eq!(alerts.union(&dashboard).copied().find(|name| !names.contains(name)), None);
        assert_eq!(named(include_str!("../../../../docs/monitoring.md")), names);
        serde_json::from_str::<serde_json::Value>(include_str!("../../../../docs/dashboard.json")).unwrap();
    }

    #[test]
    fn counters_are_called_so() {
        for metric in ALL {
            let (name, kind, help) = metric.described();
            assert_eq!(name.ends_with("_total"), kind == COUNTER, "{name}");
            assert!(help.ends_with('.') && !help.contains(['\\', '\n']), "{help}");
        }
    }

    #[test]
    fn samples_of_a_metric_are_together_and_values_of_labels_escaped() {
        let mut out = Exposition::default();
        out.add(Metric::ReplicaEpoch, &[("replica", "a")], 3);
        out.add(Metric::SourceEpoch, &[("source", "/srv/\"a\\b\nc\u{1b}\"")], 7);
        out.add(Metric::ReplicaEpoch, &[("replica", "b")], 4);
        out.add(Metric::Errors, &[], 0);
        let text = out.text();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                r#"dsync_source_epoch{source="/srv/\"a\\b\nc\\u{1b}\""} 7"#,
                r#"dsync_replica_epoch{replica="a"} 3"#,
                r#"dsync_replica_epoch{replica="b"} 4"#,
                "dsync_status_errors 0",
            ]
        );
        assert_eq!(text.matches("# TYPE dsync_replica_epoch gauge\n").count(), 1, "{text}");
    }
}
