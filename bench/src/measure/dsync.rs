//! The dsync binary, as its user runs it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::measure::process::{self, Daemon, Outcome};

/// The binary with a state directory.
#[derive(Clone)]
pub(crate) struct Dsync {
    /// The binary.
    pub binary: PathBuf,
    state: PathBuf,
}

/// What a sync said of itself.
pub(crate) struct Synced {
    /// As measured from outside.
    pub outcome: Outcome,
    summary: Value,
}

impl Synced {
    /// A number of the summary; 0 if it is not there.
    pub(crate) fn number(&self, field: &str) -> u64 {
        self.summary[field].as_u64().unwrap_or(0)
    }

    /// A word of the summary.
    pub(crate) fn word(&self, field: &str) -> String {
        self.summary[field].as_str().unwrap_or("?").to_string()
    }
}

impl Dsync {
    /// The binary, with its state in this folder.
    pub(crate) fn new(binary: &Path, state: PathBuf) -> Dsync {
        Dsync { binary: binary.to_path_buf(), state }
    }

    /// One of its commands, in this state.
    pub(crate) fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg(name).env("DSYNC_STATE_DIR", &self.state).env("LC_ALL", "C");
        command
    }

    /// Serves an image on a socket.
    pub(crate) fn serve(&self, image: &Path, socket: &Path, options: &[&str]) -> Result<Daemon> {
        let mut command = self.command("serve");
        command.arg(image).arg("--socket").arg(socket).args(options);
        Daemon::start(command, socket)
    }

    /// Brings a replica up to date.
    pub(crate) fn sync(
        &self,
        source: &Path,
        destination: &str,
        options: &[&str],
        limit: Duration,
    ) -> Result<Synced> {
        let mut command = self.command("sync");
        command.arg(source).arg(destination).arg("--json").args(options);
        let outcome = process::run(&mut command, limit)?;
        let lines = outcome.stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let summary = lines.into_iter().find(|line| line["message_type"] == "summary");
        let summary = summary.context("dsync sync --json printed no summary")?;
        Ok(Synced { outcome, summary })
    }
}

/// The name under which an image is served.
pub(crate) fn export(image: &Path) -> String {
    image.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The URI of an export on a socket.
pub(crate) fn uri(export: &str, socket: &Path) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.display())
}
