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

/// What is wrong with a run, by how it ended; `None` if it went well.
pub(crate) fn why(done: std::thread::Result<Result<(), String>>) -> Option<String> {
    match done {
        Ok(result) => result.err(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into()));
            Some(format!("panic: {}", text.unwrap_or_default()))
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "DSYNC_SEED={} {}: {}", self.seed, self.cell, self.why)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "    {step}"))
    }
}
