//! What a run says that failed.

/// A failed run: what is wrong, and its steps.
#[derive(Debug)]
pub struct Failure {
    /// The run's seed.
    pub seed: u64,
    /// Its cell.
    pub cell: String,
    /// What is wrong.
    pub why: String,
    /// What was done.
    pub steps: Vec<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "DSYNC_SEED={} {}: {}", self.seed, self.cell, self.why)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "    {step}"))
    }
}
