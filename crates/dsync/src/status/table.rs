//! `dsync status` as a table, problems first: a row for each source, each of its replicas, and each other replica that this host has.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use replica::KnownReplica;
use source::{StateDir, Tally, Work};

use crate::args;
use crate::failure;
use crate::output::Output;
use crate::status::local::LocalReplica;
use crate::status::membership::GroupInfo;
use crate::status::monitor::{Inventory, Problem, problems};
use crate::status::{Lacking, SourceStatus, nothing};
use crate::terms::units;

/// The names of the columns.
const HEAD: [&str; 6] = ["NAME", "ROLE", "STATE", "BEHIND", "SIZE", "WHERE"];
/// Where there is nothing to say.
const NONE: &str = "-";

/// A row of the table, as its columns have it.
struct Row {
    /// It is among the problems.
    is_problem: bool,
    cells: [String; 6],
}

/// Prints problems, and the table.
pub(crate) fn run(args: &args::StatusArgs, state: &StateDir, output: &Output) -> Result<()> {
    let mut found = Inventory::read(None, state)?;
    // They end the command, and are its error.
    let mut errors = std::mem::take(&mut found.errors);
    let lines = lines(&found, &problems(&found, args)?, now())?;
    match lines.is_empty() && errors.is_empty() {
        true => output.say(&nothing(state)),
        false => lines.iter().for_each(|line| output.say(&link::printable(line))),
    }
    // An unreadable source must not hide the others.
    let Some(last) = errors.pop() else { return Ok(()) };
    errors.iter().for_each(|error| output.error(&failure::text(error), failure::code(error)));
    Err(last)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// The lines of problems and of the table; none if nothing is known.
pub(crate) fn lines(found: &Inventory, problems: &[Problem], now: u64) -> Result<Vec<String>> {
    let mut rows: Vec<Row> = Table { found, problems, now }.rows()?;
    rows.sort_by_key(|row| !row.is_problem);
    let mut lines: Vec<String> = problems.iter().map(|problem| format!("! {}", problem.message)).collect();
    if !rows.is_empty() {
        lines.extend((!lines.is_empty()).then(String::new));
        lines.extend(in_columns(&rows));
    }
    Ok(lines)
}

/// The table with its head, each column as wide as what is in it. Rows with a problem are marked, if there are any.
fn in_columns(rows: &[Row]) -> Vec<String> {
    let head = Row { is_problem: false, cells: HEAD.map(str::to_owned) };
    let all = || std::iter::once(&head).chain(rows);
    let length = |row: &Row, at: usize| row.cells[at].chars().count();
    let widths: [usize; 6] = std::array::from_fn(|at| all().map(|row| length(row, at)).max().unwrap_or(0));
    let is_marked = rows.iter().any(|row| row.is_problem);
    let line = |row: &Row| {
        let mark = if !is_marked {
            ""
        } else if row.is_problem {
            "! "
        } else {
            "  "
        };
        let cells = row.cells.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        format!("{mark}{}", cells.collect::<Vec<_>>().join("  ")).trim_end().to_owned()
    };
    all().map(line).collect()
}

/// What the rows are made of.
struct Table<'a> {
    found: &'a Inventory,
    problems: &'a [Problem],
    now: u64,
}

impl Table<'_> {
    fn rows(&self) -> Result<Vec<Row>> {
        let found = self.found;
        let mut rows = Vec::new();
        for source in found.sources.iter().filter(|source| source.machine().is_none()) {
            rows.extend(self.with_copies(source));
        }
        let mut machines: Vec<&str> = found.sources.iter().filter_map(SourceStatus::machine).collect();
        machines.sort_unstable();
        machines.dedup();
        rows.extend(machines.into_iter().map(|machine| self.machine(machine)));
        let is_shown = |known: &&KnownReplica| self.of_source_here(&known.path).is_none();
        rows.extend(found.replicas.iter().filter(is_shown).map(|known| self.here(known)));
        rows.extend(found.copies.iter().filter(|copy| !copy.made && !copy.begun).map(|copy| {
            let cells = [&copy.job, "replica", "never copied", NONE, NONE, &copy.replica];
            self.row(cells, (None, Some(&copy.replica)))
        }));
        for (path, state) in &found.elsewhere {
            let (path, state) = (path.display(), state.display());
            let place = format!("{path} (state directory {state})");
            let name = source::export_name(Path::new(&path.to_string()));
            rows.push(self.row([&name, "source", "elsewhere", NONE, NONE, &place], (None, None)));
        }
        self.add_trackers(&mut rows)?;
        self.add_groups(&mut rows);
        Ok(rows)
    }

    /// A row; `of` are the source and the replica by which problems name it.
    fn row(&self, cells: [&str; 6], of: (Option<&Path>, Option<&str>)) -> Row {
        let is_it = |problem: &Problem| match of {
            (source, Some(replica)) => {
                problem.replica.as_deref() == Some(replica)
                    && (source.is_none() || problem.source.is_none() || problem.source.as_deref() == source)
            }
            (Some(source), None) => problem.replica.is_none() && problem.source.as_deref() == Some(source),
            (None, None) => false,
        };
        Row { is_problem: self.problems.iter().any(is_it), cells: cells.map(str::to_owned) }
    }

    /// A source, and its replicas.
    fn with_copies(&self, source: &SourceStatus) -> Vec<Row> {
        let replicas = source.replicas.iter().map(|replica| self.replica(source, replica));
        let begun = source.first_copies.iter().map(|tally| self.first_copy(source, tally));
        std::iter::once(self.source(source)).chain(replicas).chain(begun).collect()
    }

    /// A machine: the worst of its disks, what all of them have, and the folders of their replicas.
    fn machine(&self, machine: &str) -> Row {
        let disks = || self.found.sources.iter().filter(|source| source.machine() == Some(machine));
        let rows: Vec<Row> = disks().flat_map(|source| self.with_copies(source)).collect();
        let worst = rows.iter().find(|row| row.is_problem);
        let copies = || rows.iter().filter(|row| row.cells[1] == "replica");
        let usual = |state: &str| ["up to date", "synced"].contains(&state);
        let state = worst.or_else(|| copies().find(|row| !usual(&row.cells[2])));
        let state = state.or_else(|| copies().find(|row| row.cells[2] == "synced")).or(copies().next());
        let state = state.map_or("not synced", |row| &row.cells[2]);
        let late = disks().flat_map(|source| &source.replicas).filter(|replica| !replica.is_current);
        // What is not known is the worst.
        let behind = late.map(|replica| replica.lag(self.now)).max_by_key(|lag| lag.unwrap_or(u64::MAX));
        let behind = behind.map_or(NONE.into(), told_lag);
        let size = units::size(disks().map(|source| source.tracked).sum());
        let folder = |row: &Row| row.cells[5].rsplit_once('/').map(|(folder, _)| folder.to_owned());
        let folders: BTreeSet<String> = copies().filter_map(folder).collect();
        let place = match folders.is_empty() {
            true => NONE.into(),
            false => folders.into_iter().collect::<Vec<_>>().join(", "),
        };
        let cells = [&format!("vm:{machine}"), "VM", state, &behind, &size, &place];
        Row { is_problem: worst.is_some(), ..self.row(cells, (None, None)) }
    }

    fn source(&self, source: &SourceStatus) -> Row {
        let state = match &source.served {
            _ if source.size.is_none() => "missing",
            _ if self.says("other-content", source) => "other content",
            _ if self.says("tracking-lost", source) => "tracking lost",
            _ if source.resized().is_some() => "resized",
            _ if source.flush_failed().is_some() => "flush failed",
            Some(_) => "served",
            None if trackers::find(&source.path).is_ok_and(|tracker| tracker.is_some()) => "tracked",
            None if source.clone.is_some() => "tracked",
            None => "not served",
        };
        let (path, size) = (source.path.display().to_string(), size_of(source));
        let cells = [&source::export_name(&source.path), "source", state, NONE, &size, &path];
        self.row(cells, (Some(&source.path), None))
    }

    /// True if a source has this problem.
    fn says(&self, word: &str, source: &SourceStatus) -> bool {
        let is_it = |problem: &&Problem| problem.source.as_deref() == Some(&*source.path);
        self.problems.iter().filter(is_it).any(|problem| problem.problem == word)
    }

    fn replica(&self, source: &SourceStatus, replica: &Lacking) -> Row {
        let name = &replica.replica;
        let is_source = |of: &PathBuf| *of == source.path;
        let of = |problem: &&Problem| {
            problem.replica.as_deref() == Some(name) && problem.source.as_ref().is_none_or(is_source)
        };
        let problem = self.problems.iter().find(of).map(|problem| problem.problem.replace('-', " "));
        let state = match (replica.work(), problem) {
            (_, Some(problem)) => problem,
            (Some(work), None) => working(work),
            (None, None) if replica.is_current => "up to date".into(),
            (None, None) => "synced".into(),
        };
        let behind = behind(source, replica, self.now);
        let title = source::export_name(&source.path);
        let cells = [&title, "replica", &state, &behind, &size_of(source), name];
        self.row(cells, (Some(&source.path), Some(name)))
    }

    fn first_copy(&self, source: &SourceStatus, tally: &Tally) -> Row {
        let state = match &tally.work {
            Some(work) if work.is_alive() => format!("first {}", working(work)),
            _ if tally.refused => "refused".into(),
            _ => "incomplete".into(),
        };
        let (title, size) = (source::export_name(&source.path), size_of(source));
        let cells = [&title, "replica", &state, NONE, &size, &tally.replica];
        self.row(cells, (Some(&source.path), Some(&tally.replica)))
    }

    /// The source on this host that knows the replica at this path.
    fn of_source_here(&self, path: &Path) -> Option<&SourceStatus> {
        let named = |name: &str| Path::new(name) == path;
        self.found.sources.iter().find(|source| {
            source.replicas.iter().any(|known| named(&known.replica))
                || source.first_copies.iter().any(|tally| named(&tally.replica))
        })
    }

    /// A replica whose source is on another host.
    fn here(&self, known: &KnownReplica) -> Row {
        let local = LocalReplica::of(known);
        let role = if local.role == "demoted" { "former source" } else { local.role };
        let state = if local.state == "exact" { "consistent" } else { local.state };
        let problem = self.problems.iter().find(|p| p.replica.as_deref().map(Path::new) == Some(local.path));
        let state = problem.map_or(state.to_owned(), |problem| problem.problem.replace('-', " "));
        // Only its source knows how far it is behind.
        let at = local
            .at
            .map_or(NONE.into(), |at| format!("{} ago", device::human_time(self.now.saturating_sub(at))));
        let path = local.path.display().to_string();
        let place = local.origin.as_ref().map_or(path.clone(), |origin| format!("{path} from {origin}"));
        let size = known.lineage.as_ref().map_or(NONE.into(), |lineage| units::size(lineage.size));
        let cells = [&source::export_name(local.path), role, &state, &at, &size, &place];
        self.row(cells, (None, Some(&path)))
    }

    /// Trackers of disks that are not sources yet.
    fn add_trackers(&self, rows: &mut Vec<Row>) -> Result<()> {
        for device in trackers::list()? {
            if self.found.sources.iter().any(|source| source.path == device) {
                continue;
            }
            let tracker = trackers::find(&device)?;
            let size = tracker.as_ref().map_or(NONE.into(), |tracker| units::size(tracker.size()));
            let state = if tracker.is_some() || device.exists() { "tracked" } else { "gone" };
            let (title, path) = (source::export_name(&device), device.display().to_string());
            rows.push(self.row([&title, "source", state, NONE, &size, &path], (Some(&device), None)));
        }
        Ok(())
    }

    /// Groups of sources, with their members.
    fn add_groups(&self, rows: &mut Vec<Row>) {
        let sources = &self.found.sources;
        let groups = || sources.iter().filter_map(|source| Some((source.group.as_ref()?, source)));
        let groups = || groups().filter(|(group, _)| group.machine.is_none());
        let mut names: Vec<&str> = groups().map(|(group, _)| group.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            let members: Vec<(&GroupInfo, &SourceStatus)> =
                groups().filter(|(group, _)| group.name == name).collect();
            let epoch = members.iter().filter_map(|(group, _)| group.epoch).max();
            let state = epoch.map_or("no common epoch".into(), |epoch| format!("at common epoch {epoch}"));
            let paths: Vec<_> = members.iter().map(|(_, source)| source.path.display().to_string()).collect();
            rows.push(self.row([name, "group", &state, NONE, NONE, &paths.join(", ")], (None, None)));
        }
    }
}

fn size_of(source: &SourceStatus) -> String {
    units::size(source.tracked)
}

/// What is under way, and how fast.
fn working(work: &Work) -> String {
    let rate = units::size(work.rate);
    match work.bytes_done.saturating_mul(100).checked_div(work.bytes_total) {
        _ if work.paused => "paused by --bwlimit".into(),
        Some(percent) => format!("{} {percent} %, {rate}/s", work.what),
        None => format!("{}, {rate}/s", work.what),
    }
}

fn told_lag(lag: Option<u64>) -> String {
    lag.map_or("?".to_owned(), device::human_time)
}

/// How long a replica is behind, and by how much, as far as that is known.
fn behind(source: &SourceStatus, replica: &Lacking, now: u64) -> String {
    let lag = told_lag(replica.lag(now));
    match replica.blocks {
        _ if replica.is_current => NONE.into(),
        // They count from its last epoch.
        _ if replica.mirrored => lag,
        Some(blocks) => {
            format!("{lag}, {}", units::size(blocks.saturating_mul(source.block_size.into())))
        }
        None => format!("{lag}, ?"),
    }
}

/// Lines cut to a screen of so many columns and rows, of which the last is left to the cursor.
pub(crate) fn cut(lines: &[String], (columns, rows): (usize, usize)) -> Vec<String> {
    let narrow = |line: &String| match line.chars().count() > columns {
        true => line.chars().take(columns.saturating_sub(1)).chain(['…']).collect(),
        false => line.clone(),
    };
    let room = rows.saturating_sub(1).max(1);
    if lines.len() <= room {
        return lines.iter().map(narrow).collect();
    }
    let more = lines.len() - (room - 1);
    let last = format!("… {more} more lines: \"dsync status\" shows them");
    lines[..room - 1].iter().chain([&last]).map(narrow).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_is_never_wider_or_longer_than_the_terminal() {
        let lines: Vec<String> = (0..50).map(|at| format!("{at}: {}", "é".repeat(at * 3))).collect();
        for (columns, rows) in [(80, 24), (20, 5), (200, 60), (1, 1), (0, 0)] {
            let shown = cut(&lines, (columns, rows));
            assert!(shown.len() <= rows.saturating_sub(1).max(1), "{rows} rows");
            assert!(shown.iter().all(|line| line.chars().count() <= columns.max(1)), "{columns} columns");
        }
        let shown = cut(&lines, (80, 10));
        assert_eq!((shown.len(), &shown[0], shown[8].starts_with("… 42 more")), (9, &lines[0], true));
    }

    #[test]
    fn a_table_has_problems_marked_in_columns() {
        let row = |is_problem, name: &str, place: &str| {
            let cells = [name, "replica", "synced", "3 min", "1.00 GiB", place].map(str::to_owned);
            Row { is_problem, cells }
        };
        let lines = in_columns(&[row(true, "database", "far:/x"), row(false, "vm", "/a")]);
        assert_eq!(lines[0], "  NAME      ROLE     STATE   BEHIND  SIZE      WHERE");
        assert_eq!(lines[1], "! database  replica  synced  3 min   1.00 GiB  far:/x");
        assert_eq!(lines[2], "  vm        replica  synced  3 min   1.00 GiB  /a");
        assert!(in_columns(&[row(false, "vm", "/a")])[1].starts_with("vm "));
    }
}
