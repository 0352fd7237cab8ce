//! What the jobs of this host did last, for `dsync status --check`: written as an attempt begins, and as it ends.
//!
//! A job of which nothing else is left, as one whose options are refused, is known by this alone.

use std::path::PathBuf;
use std::sync::OnceLock;

use source::{FetchedCopy, JobOutcome, JobRecord, StateDir};

use crate::args::{Cli, Command};
use crate::failure;
use crate::jobs::job;

/// The attempt that this process is.
#[derive(Debug)]
struct JobAttempt {
    /// The folder of the records.
    folder: PathBuf,
    job: String,
}

static ATTEMPT: OnceLock<JobAttempt> = OnceLock::new();

/// Notes that the job which this process runs begins, if it is one of this host's. `cli` is what it stands for, if that can be read.
pub(crate) fn begin(cli: Option<&Cli>) {
    let is_trial = |cli: &Cli| matches!(&cli.command, Command::Sync(args) if args.dry_run);
    let Some(job) = job::running().filter(|job| job.is_of_this_host() && !cli.is_some_and(is_trial)) else {
        return;
    };
    let state = cli.map_or_else(|| job.state_dir(), |cli| cli.state_dir.clone());
    let folder = StateDir::find(state.as_deref()).jobs_folder();
    let attempt = ATTEMPT.get_or_init(|| JobAttempt { folder, job: job.name().to_owned() });
    JobRecord::begin(&attempt.folder, &attempt.job);
}

/// Notes how the attempt ends.
pub(crate) fn end(code: u8, message: &str) {
    let outcome = match code {
        // What a verification found has problems of its own.
        0 | failure::DIFFERS => JobOutcome::Done,
        failure::BUSY | failure::INTERRUPTED => JobOutcome::Neither,
        _ => JobOutcome::Failed,
    };
    if let Some(JobAttempt { folder, job }) = ATTEMPT.get() {
        JobRecord::end(folder, job, (code, message), outcome);
    }
}

/// Notes that a copy was fetched from another host.
pub(crate) fn fetched(copy: FetchedCopy) {
    if let Some(JobAttempt { folder, job }) = ATTEMPT.get() {
        JobRecord::fetch(folder, job, copy);
    }
}
