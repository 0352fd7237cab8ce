//! The claims of ARTIFACT.md, each with the scenario that shows it.

use crate::{Bench, SCENARIOS, Scenario};

/// A part of a scenario, made small enough that all of them together take half an hour.
struct Step {
    scenario: &'static str,
    only: &'static [&'static str],
    percent: &'static [u32],
    /// Bytes of the image, and rounds.
    small: (u64, usize),
}

const GIB: u64 = 1 << 30;

const STEPS: [Step; 11] = [
    Step { scenario: "paper", only: &[], percent: &[1, 10, 50], small: (GIB, 3) },
    Step { scenario: "sync", only: &["dsync"], percent: &[1, 10], small: (GIB, 5) },
    Step { scenario: "compare", only: &["dsync"], percent: &[1], small: (GIB, 3) },
    Step { scenario: "rolling", only: &["inserted"], percent: &[], small: (GIB, 3) },
    Step { scenario: "far", only: &[], percent: &[], small: (GIB, 3) },
    Step { scenario: "harm", only: &[], percent: &[], small: (GIB, 3) },
    Step { scenario: "track", only: &[], percent: &[], small: (GIB, 5) },
    Step { scenario: "mirror", only: &["cost", "reader"], percent: &[], small: (GIB, 3) },
    Step { scenario: "keep", only: &[], percent: &[], small: (GIB, 9) },
    Step { scenario: "trace", only: &["dsync"], percent: &[], small: (2 * GIB, 1) },
    Step { scenario: "record", only: &[], percent: &[], small: (128 * GIB, 1) },
];

/// The steps, in small, or with each scenario's own sizes and rounds.
pub(crate) fn steps(bench: &Bench, full: bool) -> Vec<(&'static str, Scenario, Bench)> {
    let step = |step: Step| {
        let (name, scenario) = *SCENARIOS.iter().find(|(name, _)| *name == step.scenario)?;
        let mut bench = bench.clone();
        bench.only = step.only.iter().map(|word| word.to_string()).collect();
        if !full && !bench.quick {
            bench.percent = step.percent.to_vec();
            bench.size = bench.size.or(Some(step.small.0));
            bench.rounds = bench.rounds.or(Some(step.small.1));
        }
        Some((name, scenario, bench))
    };
    STEPS.into_iter().filter_map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_a_scenario() {
        assert!(STEPS.iter().all(|step| SCENARIOS.iter().any(|(name, _)| *name == step.scenario)));
    }
}
