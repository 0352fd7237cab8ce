//! What a snapshot a day takes on btrfs, beneath a copy that is brought up to date each night: the use that "Out-Tridging Tridge" (2013) has
//! for rsync --inplace.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use dsync_tests::Random;
use dsync_tests::nbd::{Address, Client};

use crate::Bench;
use crate::figures::results;
use crate::figures::sheet::{Line, Sheet};
use crate::figures::trace::generated_day;
use crate::measure::content::Content;
use crate::measure::dsync::{Dsync, export};
use crate::measure::limit::BLOCK;
use crate::measure::places::{Loop, root, scratch, sockets};
use crate::measure::process::{command, go_on, quote, run, shell};
use crate::measure::report::{Report, Table, median, seconds, size};

const LIMIT: Duration = Duration::from_secs(1200);

/// How a copy is brought up to date.
#[derive(Clone, Copy)]
enum How {
    /// dsync with these options.
    Dsync(&'static [&'static str]),
    /// rsync with these.
    Rsync(&'static str),
}

/// A disk that is served, and so known.
const DISK: [(&str, How); 7] = [
    ("dsync, tracked, journal", How::Dsync(&["--commit", "journal"])),
    ("dsync, tracked, in place", How::Dsync(&["--commit", "in-place"])),
    ("dsync, tracked, reflink", How::Dsync(&["--commit", "reflink"])),
    ("dsync, rolling, in place", How::Dsync(&["--method", "rolling", "--commit", "in-place"])),
    ("dsync, rolling, reflink", How::Dsync(&["--method", "rolling", "--commit", "reflink"])),
    ("rsync", How::Rsync("")),
    ("rsync --inplace", How::Rsync("--inplace")),
];

/// A file in which content moves.
const DUMP: [(&str, How); 4] = [DISK[3], DISK[4], DISK[5], DISK[6]];

/// A file system of its own with a copy, so that what it takes can be told.
struct Kept {
    name: &'static str,
    how: How,
    volume: Loop,
}

impl Kept {
    fn new(file: &Path, bytes: u64, (name, how): (&'static str, How)) -> Result<Kept> {
        let volume = Loop::formatted(file, "btrfs", bytes)?;
        run(command("btrfs").args(["-q", "subvolume", "create"]).arg(volume.folder().join("live")), LIMIT)?;
        Ok(Kept { name, how, volume })
    }

    fn copy(&self) -> PathBuf {
        self.volume.folder().join("live/copy")
    }

    fn snapshot(&self, day: usize) -> PathBuf {
        self.volume.folder().join(format!("day-{day}"))
    }

    /// Brings the copy up to date, checks it, and keeps it as of that day. Seconds.
    fn night(&self, dsync: &Dsync, source: &Path, day: usize) -> Result<f64> {
        let copy = self.copy();
        let took = match self.how {
            // The first copy is the same for all.
            How::Dsync(options) => {
                let path = copy.display().to_string();
                let options = if day == 0 { &options[options.len() - 2..] } else { options };
                let options = [options, &["--allow-shrink"]].concat();
                dsync.sync(source, &path, &options, LIMIT)?.outcome.seconds
            }
            How::Rsync(options) => {
                let line = format!(
                    "rsync --no-whole-file --ignore-times {options} {0} {1} && sync {1}",
                    quote(source),
                    quote(&copy)
                );
                run(&mut shell(&line), LIMIT)?.seconds
            }
        };
        run(command("cmp").arg(source).arg(&copy), LIMIT).context("WRONG CONTENT")?;
        let mut snapshot = command("btrfs");
        snapshot.args(["-q", "subvolume", "snapshot", "-r"]).arg(self.volume.folder().join("live"));
        run(snapshot.arg(self.snapshot(day)), LIMIT)?;
        run(command("btrfs").args(["filesystem", "sync"]).arg(self.volume.folder()), LIMIT)?;
        Ok(took)
    }

    /// Bytes of data and metadata that the file system holds.
    fn used(&self) -> Result<u64> {
        let said =
            run(command("btrfs").args(["filesystem", "df", "--raw"]).arg(self.volume.folder()), LIMIT)?;
        let used =
            |line: &str| line.rsplit_once("used=").and_then(|(_, number)| number.trim().parse::<u64>().ok());
        let kinds = said.stdout.lines().filter(|line| !line.starts_with("GlobalReserve"));
        Ok(kinds.filter_map(used).sum())
    }

    /// Bytes that nothing holds but this snapshot.
    fn exclusive(&self, day: usize) -> Result<u64> {
        let mut du = command("btrfs");
        du.args(["filesystem", "du", "--raw", "--summarize"]).arg(self.snapshot(day));
        let said = run(&mut du, LIMIT)?.stdout;
        let number = said.lines().nth(1).and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        number.with_context(|| format!("no figure in: {said}"))
    }
}

/// Something that changes from day to day.
trait Changing {
    fn path(&self) -> &Path;
    /// Changes it; the bytes that are new.
    fn next(&mut self, random: &mut Random) -> Result<u64>;
}

/// Runs the scenario.
pub(crate) fn snapshots(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes =
        bench.size.unwrap_or(if bench.quick { 128 << 20 } else { 512 << 20 }).next_multiple_of(1 << 20);
    let days = bench.rounds.unwrap_or(if bench.quick { 3 } else { 10 });
    report.section(
        "snapshots: what a snapshot a day takes",
        &format!(
            "{} of random content, a copy on btrfs for each way (a loop device of its own, no compression), and a read-only snapshot \
             after each of {days} nights. Exclusive is what only that snapshot holds, by `btrfs filesystem du`: the last one shares \
             all with the copy, and is not counted. Taken is by how much the file system grew in all nights, metadata and what partly \
             overwritten extents hold on to included. Run once: space does not vary.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("snapshots", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    for tool in ["mkfs.btrfs", "btrfs", "losetup", "rsync"] {
        if dsync_tests::find(tool).is_none() {
            report.left_out("snapshots", &format!("{tool} is not installed"));
            return Ok(());
        }
    }
    if !root() {
        report.left_out("snapshots", "loop devices need root");
        return Ok(());
    }
    let folder = scratch(&bench.dir)?;
    let dsync = Dsync::new(binary, folder.path().join("state"));
    let mut sheet = Sheet::new(&["part", "way", "day", "changed", "seconds", "used", "exclusive"]);
    let mut parts = Vec::new();
    if bench.wants("disk") {
        let title = "A disk, 1 to 2 % written a day, most of it in runs of 4 blocks";
        let mut disk = Disk::new(folder.path(), &dsync, Content::new(bench.seed, bytes))?;
        part(bench, (&dsync, folder.path()), (title, &DISK), &mut disk, days, &mut sheet)?;
        parts.push((title, &DISK[..]));
    }
    if bench.wants("dump") {
        let title = "A dump, 256 KiB inserted at 4 places a day";
        let mut dump = Dump::new(folder.path().join("dump"), bytes, &mut Random::seeded(bench.seed))?;
        part(bench, (&dsync, folder.path()), (title, &DUMP), &mut dump, days, &mut sheet)?;
        parts.push((title, &DUMP[..]));
    }
    let sheet = sheet.kept(&results(bench).join("snapshots.csv"), &report.about())?;
    parts.iter().for_each(|(title, ways)| told(report, &sheet, title, ways, days));
    Ok(())
}

/// All days of one source, all ways side by side.
fn part(
    bench: &Bench,
    (dsync, folder): (&Dsync, &Path),
    (title, ways): (&str, &[(&'static str, How)]),
    source: &mut dyn Changing,
    days: usize,
    sheet: &mut Sheet,
) -> Result<()> {
    let mut random = Random::seeded(bench.seed);
    let place = scratch(folder)?;
    let room = (source.path().metadata()?.len() * (days as u64 + 3)).max(1 << 30);
    let made = ways.iter().enumerate().map(|(at, way)| {
        Kept::new(&place.path().join(format!("{at}.btrfs")), room, *way).with_context(|| way.0.to_string())
    });
    let all: Vec<Kept> = made.collect::<Result<_>>()?;
    let mut rows = Vec::new();
    for day in 0..=days {
        go_on()?;
        let changed = if day > 0 { source.next(&mut random)? } else { 0 };
        for kept in &all {
            let seconds = kept.night(dsync, source.path(), day).with_context(|| kept.name.to_string())?;
            if !bench.quiet {
                println!("day {day}: {}: {seconds:.2} s", kept.name);
            }
            rows.push((day, kept, changed, seconds, kept.used()?));
        }
    }
    for (day, kept, changed, seconds, used) in rows {
        let numbers = [changed, used, kept.exclusive(day)?].map(|number| number.to_string());
        let [changed, used, exclusive] = numbers;
        let [title, way] = [title, kept.name].map(str::to_string);
        sheet.add([title, way, day.to_string(), changed, format!("{seconds:.4}"), used, exclusive]);
    }
    Ok(())
}

fn told(report: &mut Report, sheet: &Sheet, title: &str, ways: &[(&str, How)], days: usize) {
    let mut table = Table::new(
        &format!("{title}, {days} days"),
        &[
            "way",
            "changed a day",
            "exclusive, median",
            "least",
            "most",
            "taken, all days",
            "of what changed",
            "s",
        ],
    );
    for (way, _) in ways {
        let lines: Vec<Line> =
            sheet.lines().filter(|line| line.text("part") == title && line.text("way") == *way).collect();
        let [first, .., last] = &lines[..] else { continue };
        let of =
            |column: &str, lines: &[Line]| lines.iter().map(|line| line.number(column)).collect::<Vec<_>>();
        // What a snapshot alone holds is what the next night replaced.
        let exclusive = of("exclusive", &lines[..lines.len() - 1]);
        let changed = of("changed", &lines[1..]);
        let taken = last.number("used") - first.number("used");
        let share = taken / changed.iter().sum::<f64>().max(1.0);
        if way.contains("tracked") || (way.ends_with("reflink") && ways.len() == DUMP.len()) {
            report.goal(
                &format!("snapshots: bytes taken, times what changed: {title}: {way}"),
                share,
                true,
                1.5,
            );
        }
        table.row(vec![
            way.to_string(),
            size(median(&changed)),
            size(median(&exclusive)),
            size(exclusive.iter().copied().fold(f64::MAX, f64::min)),
            size(exclusive.iter().copied().fold(0.0, f64::max)),
            size(taken),
            format!("{share:.2}"),
            seconds(median(&of("seconds", &lines[1..]))),
        ]);
    }
    report.table(&table);
}

/// An image that is served, and written through the server.
struct Disk {
    image: PathBuf,
    socket: PathBuf,
    content: Content,
    _server: crate::measure::process::Daemon,
    _sockets: tempfile::TempDir,
}

impl Disk {
    fn new(folder: &Path, dsync: &Dsync, content: Content) -> Result<Disk> {
        let (image, sockets) = (folder.join("disk.img"), sockets()?);
        content.write(&image)?;
        let socket = sockets.path().join("nbd");
        let server = dsync.serve(&image, &socket, &[])?;
        Ok(Disk { image, socket, content, _server: server, _sockets: sockets })
    }
}

impl Changing for Disk {
    fn path(&self) -> &Path {
        &self.image
    }

    fn next(&mut self, random: &mut Random) -> Result<u64> {
        let blocks = generated_day(self.content.blocks(), random);
        let change = self.content.change_blocks(blocks);
        let mut client =
            Client::connect_with(&Address::Unix(self.socket.clone()), &export(&self.image), &[])?;
        self.content.apply_through(&change, &mut client)?;
        client.close()?;
        Ok(change.blocks.len() as u64 * BLOCK)
    }
}

/// A file into which content is inserted.
struct Dump {
    path: PathBuf,
    content: Vec<u8>,
}

impl Dump {
    const PLACES: usize = 4;
    const INSERTED: usize = 256 << 10;

    fn new(path: PathBuf, bytes: u64, random: &mut Random) -> Result<Dump> {
        let content = random.bytes(bytes as usize);
        std::fs::write(&path, &content)?;
        Ok(Dump { path, content })
    }
}

impl Changing for Dump {
    fn path(&self) -> &Path {
        &self.path
    }

    fn next(&mut self, random: &mut Random) -> Result<u64> {
        for _ in 0..Self::PLACES {
            let at = random.index(self.content.len());
            let new = random.bytes(Self::INSERTED);
            self.content.splice(at..at, new);
        }
        std::fs::write(&self.path, &self.content)?;
        Ok((Self::PLACES * Self::INSERTED) as u64)
    }
}
