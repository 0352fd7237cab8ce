//! `dsync status --watch`: what is wrong, what is at work, and how far each replica is, again and again.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _, stdout};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use source::{StateDir, Work};

use crate::args;
use crate::local::LocalReplica;
use crate::monitor::{Found, problems};
use crate::status::{Lacking, SourceStatus, differed};
use crate::units;

/// Clears a terminal, and puts the cursor at its beginning.
const CLEAR: &str = "\x1b[H\x1b[2J\x1b[3J";

/// Prints until a signal ends it. On what is not a terminal, one page follows another.
///
/// # Errors
/// If nothing can be read or printed.
pub(crate) fn run(args: &args::Status, every: Duration, state: &StateDir) -> Result<()> {
    let terminal = stdout().is_terminal();
    loop {
        let found = Found::read(args.path.as_deref(), state)?;
        let page = page(&found, args, now())?;
        let clear = if terminal { CLEAR } else { "" };
        let mut out = stdout().lock();
        writeln!(out, "{clear}{page}").and_then(|()| out.flush()).context("cannot print the status")?;
        drop(out);
        std::thread::sleep(every);
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// One page: problems first.
fn page(found: &Found, args: &args::Status, now: u64) -> Result<String> {
    let mut page = String::new();
    let host = rustix::system::uname();
    let _ = writeln!(page, "{}, {}", host.nodename().to_string_lossy(), device::moment(now));
    let problems = problems(found, args)?;
    for problem in &problems {
        let _ = writeln!(page, "! {}", link::printable(&problem.message));
    }
    if problems.is_empty() {
        page.push_str("no problems\n");
    }
    let each = || found.sources.iter().flat_map(|source| source.replicas.iter().map(move |r| (source, r)));
    let at_work: Vec<_> =
        each().filter_map(|(source, replica)| Some((source, replica, replica.work()?))).collect();
    section(
        "at work",
        at_work.iter().map(|(source, replica, work)| working(source, replica, work, now)),
        &mut page,
    );
    section(
        "replicas of sources here",
        each().map(|(source, replica)| behind(source, replica, now)),
        &mut page,
    );
    let local = found.replicas.iter().map(|known| here(&LocalReplica::of(known), now));
    section("replicas on this host", local, &mut page);
    Ok(page)
}

/// Lines under a heading, if there are any.
fn section(heading: &str, lines: impl Iterator<Item = String>, page: &mut String) {
    for (at, line) in lines.enumerate() {
        if at == 0 {
            let _ = writeln!(page, "\n{heading}:");
        }
        let _ = writeln!(page, "  {}", link::printable(&line));
    }
}

/// A sync, a mirror or a verification.
fn working(source: &SourceStatus, replica: &Lacking, work: &Work, now: u64) -> String {
    let mut line = format!("{} {} to {}: ", work.what, source.path.display(), replica.replica);
    if work.paused {
        let since = units::seconds(now.saturating_sub(work.since) as f64);
        let _ = write!(line, "paused by --bwlimit, for {since}");
        return line;
    }
    match (work.bytes_done.saturating_mul(100).checked_div(work.bytes_total), work.lag) {
        (Some(percent), _) => {
            let _ = write!(line, "{percent} % of {}, ", units::size(work.bytes_total));
        }
        (None, Some(lag)) => {
            let _ = write!(line, "{} behind, {} moved, ", units::seconds(lag), units::size(work.bytes_done));
        }
        (None, None) => {}
    }
    let since = units::seconds(now.saturating_sub(work.since) as f64);
    let _ = write!(line, "{}/s, for {since}", units::size(work.rate));
    line
}

/// How far a replica is behind.
fn behind(source: &SourceStatus, replica: &Lacking, now: u64) -> String {
    let how = match (replica.lag(now), replica.blocks) {
        (0, _) => "up to date".to_owned(),
        (lag, Some(blocks)) => {
            let lacks = units::size(blocks.saturating_mul(source.block_size.into()));
            format!("{} behind, {lacks} written since its epoch", age(lag))
        }
        (lag, None) if replica.compared => format!("{} behind, the next sync compares all of it", age(lag)),
        (lag, None) => format!("last up to date {} ago, later writes are not known", age(lag)),
    };
    let failed = replica.failed().map_or(String::new(), |failed| {
        format!("; failed {} ago: {}", age(now.saturating_sub(failed.time)), failed.message)
    });
    let verified = replica.tally.verified.as_ref().filter(|verified| verified.differs());
    let differs = verified.map_or(String::new(), |verified| format!("; {}", differed(verified)));
    format!(
        "{} to {} at epoch {}: {how}{differs}{failed}",
        source.path.display(),
        replica.replica,
        replica.epoch
    )
}

/// A replica of this host.
fn here(replica: &LocalReplica<'_>, now: u64) -> String {
    let epoch = replica.epoch.map_or_else(|| "no epoch yet".into(), |epoch| format!("epoch {epoch}"));
    let ahead = if replica.ahead { ", ahead of it by a mirror" } else { "" };
    let role = if replica.role == "replica" { "" } else { replica.role };
    let role = if role.is_empty() { String::new() } else { format!(", {role}") };
    let written = replica
        .written
        .map_or(String::new(), |written| format!(", committed {} ago", age(now.saturating_sub(written))));
    format!("{}: {} at {epoch}{ahead}{role}{written}", replica.path.display(), replica.state)
}

/// A time in whole seconds.
fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..172_800 => units::seconds(seconds as f64),
        _ => format!("{} days", seconds / 86_400),
    }
}
