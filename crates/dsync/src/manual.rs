//! Man pages and completions, from the same definition as the help.

use std::io::Write;
use std::path::Path;

use anyhow::{Context as _, Result};
use clap::CommandFactory;

use crate::args::Cli;

/// Writes a page for the program and one for each command.
pub fn pages(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("can't make {}", folder.display()))?;
    clap_mangen::generate_to(Cli::command(), folder)
        .with_context(|| format!("can't write man pages into {}", folder.display()))
}

/// Writes the completions for a shell to standard output.
pub fn completions(shell: clap_complete::Shell) {
    // By way of memory: the generator panics where a reader has gone.
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "dsync", &mut text);
    let _ = std::io::stdout().write_all(&text);
}
