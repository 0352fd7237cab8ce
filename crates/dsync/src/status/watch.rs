//! `dsync status --watch`: problems and the table, again and again.

use std::io::{IsTerminal, Write as _, stdout};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::termios::tcgetwinsize;
use source::StateDir;

use crate::args;
use crate::status::monitor::{Inventory, problems};
use crate::status::table;

/// Clears a terminal.
const CLEAR: &str = "\x1b[2J";
/// Puts the cursor at its beginning.
const HOME: &str = "\x1b[H";
/// Clears the rest of a line.
const LINE: &str = "\x1b[K";
/// Clears the rest of the screen.
const REST: &str = "\x1b[J";

/// Prints until a signal ends it. A terminal has one page, cut to it; on what is not one, one page follows another.
///
/// # Errors
/// If nothing can be read or printed.
pub(crate) fn run(args: &args::StatusArgs, every: Duration, state: &StateDir) -> Result<()> {
    let is_terminal = stdout().is_terminal();
    let mut begin = CLEAR;
    loop {
        let lines = page(args, state)?;
        let text = match is_terminal {
            true => {
                let lines = table::cut(&lines, screen()).join(&format!("{LINE}\n"));
                format!("{}{HOME}{lines}{LINE}\n{REST}", std::mem::take(&mut begin))
            }
            false => format!("{}\n\n", lines.join("\n")),
        };
        let mut out = stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot print the status")?;
        drop(out);
        std::thread::sleep(every);
    }
}

/// The columns and rows of the terminal.
fn screen() -> (usize, usize) {
    match tcgetwinsize(stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
        _ => (80, 24),
    }
}

/// The lines of one page: problems first.
fn page(args: &args::StatusArgs, state: &StateDir) -> Result<Vec<String>> {
    let found = Inventory::read(args.path.as_deref(), state)?;
    let (problems, now) = (problems(&found, args)?, table::now());
    let mut lines = vec![format!("{}, {}", link::host_name(), device::moment(now))];
    lines.extend(problems.is_empty().then(|| "no problems".to_owned()));
    lines.extend(table::lines(&found, &problems, now)?);
    Ok(lines.iter().map(|line| link::printable(line).into_owned()).collect())
}
