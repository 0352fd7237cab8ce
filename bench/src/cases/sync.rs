//! Bringing an older copy up to date: dsync beside the limit and every peer that is installed.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dsync_tests::nbd::{self, Address, Client};

use crate::measure::content::{Change, Content, drop_caches, warm};
use crate::measure::dsync::{Dsync, export};
use crate::measure::limit::write_list;
use crate::measure::places::{Loop, free, root, scratch, sockets};
use crate::measure::process::{self, Daemon, command, quote, run, shell};
use crate::measure::report::{Report, Table, median, seconds, size};
use crate::{Bench, own};

/// A run of a peer is given up after this.
const LIMIT: Duration = Duration::from_secs(600);
/// A peer that takes longer than this is run once a cell.
const SLOW: f64 = 15.0;

const LIMIT_NAME: &str = "limit";
const FULL: &str = "full direct copy, io_uring";
const IN_PLACE: &str = "dsync --commit in-place";
const JOURNAL: &str = "dsync, journal";
const QEMU: &str = "QEMU dirty bitmap, NBD";
const BTRFS: &str = "btrfs send -p, receive";

/// The files of the common destination's peers.
struct Files {
    source: PathBuf,
    destination: PathBuf,
    list: PathBuf,
}

/// One measured run.
struct Run {
    seconds: f64,
    read: Option<u64>,
    sent: Option<u64>,
}

/// A way to bring a copy up to date.
trait Peer {
    /// What it is called in the tables.
    fn name(&self) -> &str;
    /// Writes a round's changes to a source of its own, if it has one.
    fn change(&mut self, _content: &Content, _change: &Change) -> Result<()> {
        Ok(())
    }
    /// Everything that is not measured, before the caches are dropped or warmed. The files to warm.
    fn prepare(&mut self, cold: bool) -> Result<Vec<PathBuf>>;
    /// Brings the copy up to date, durably.
    fn run(&mut self) -> Result<Run>;
    /// The copy.
    fn copy(&self) -> PathBuf;
    /// True if the copy is shared with others, and has to be taken back for the next one.
    fn shared(&self) -> bool {
        false
    }
}

type Line = Box<dyn Fn(&Files) -> Command>;
type Sent = fn(&str) -> Option<u64>;

/// A command that is given both files.
struct Program<'a> {
    name: &'static str,
    files: &'a Files,
    line: Line,
    sent: Option<Sent>,
}

impl Peer for Program<'_> {
    fn name(&self) -> &str {
        self.name
    }
    fn prepare(&mut self, _cold: bool) -> Result<Vec<PathBuf>> {
        Ok(vec![self.files.source.clone(), self.files.destination.clone()])
    }
    fn run(&mut self) -> Result<Run> {
        let outcome = run(&mut (self.line)(self.files), LIMIT)?;
        let sync = Instant::now();
        File::open(&self.files.destination)?.sync_all()?;
        let seconds = outcome.seconds + sync.elapsed().as_secs_f64();
        let sent = self.sent.and_then(|sent| sent(&outcome.stdout));
        Ok(Run { seconds, read: Some(outcome.read), sent })
    }
    fn copy(&self) -> PathBuf {
        self.files.destination.clone()
    }
    fn shared(&self) -> bool {
        true
    }
}

/// rsync's own count.
pub(crate) fn rsync_sent(stdout: &str) -> Option<u64> {
    let number = |line: &str| -> Option<u64> {
        let digits: String = line.chars().filter(char::is_ascii_digit).collect();
        digits.parse().ok()
    };
    let of = |name: &str| stdout.lines().find(|line| line.starts_with(name)).and_then(number);
    Some(of("Total bytes sent")? + of("Total bytes received")?)
}

fn programs<'a>(files: &'a Files, report: &mut Report) -> Vec<Box<dyn Peer + 'a>> {
    let mut peers: Vec<Box<dyn Peer + 'a>> = Vec::new();
    let mut add = |name: &'static str, tools: &[&str], sent: Option<Sent>, line: Line| match tools
        .iter()
        .find(|tool| dsync_tests::find(tool).is_none())
    {
        Some(tool) => report.left_out(name, &format!("{tool} is not installed")),
        None => peers.push(Box::new(Program { name, files, line, sent })),
    };
    let plain = |program: &'static str, options: &'static [&'static str]| -> Line {
        Box::new(move |files| {
            let mut line = command(program);
            line.args(options).arg(&files.source).arg(&files.destination);
            line
        })
    };
    let dd = |options: &'static [&'static str]| -> Line {
        Box::new(move |files| {
            let mut line = command("dd");
            line.arg(format!("if={}", files.source.display()))
                .arg(format!("of={}", files.destination.display()));
            line.args(options).args(["conv=notrunc", "status=none"]);
            line
        })
    };
    add(
        LIMIT_NAME,
        &[],
        None,
        Box::new(|files| {
            let mut line = own("limit");
            line.arg(&files.source).arg(&files.destination).arg("--list").arg(&files.list);
            line
        }),
    );
    add(
        FULL,
        &[],
        None,
        Box::new(|files| {
            let mut line = own("limit");
            line.arg(&files.source).arg(&files.destination);
            line
        }),
    );
    add(
        "the list, block by block through a pipe",
        &["bash"],
        None,
        Box::new(|files| {
            let own = quote(Path::new(own("").get_program()));
            let (source, list) = (quote(&files.source), quote(&files.list));
            shell(&format!("{own} extract {source} {list} | {own} merge {}", quote(&files.destination)))
        }),
    );
    let rsync = ["--inplace", "--no-whole-file", "--ignore-times", "--stats"];
    for (name, block) in [("rsync --inplace -B4096", Some("-B4096")), ("rsync --inplace", None)] {
        let line = Box::new(move |files: &Files| {
            let mut line = command("rsync");
            line.args(rsync).args(block).arg(&files.source).arg(&files.destination);
            line
        });
        add(name, &["rsync"], Some(rsync_sent), line);
    }
    add("dd, 1 MiB", &["dd"], None, dd(&["bs=1M"]));
    add("dd, direct 4 MiB", &["dd"], None, dd(&["bs=4M", "iflag=direct", "oflag=direct"]));
    add("cp", &["cp"], None, plain("cp", &[]));
    add(
        "qemu-img convert -n",
        &["qemu-img"],
        None,
        plain("qemu-img", &["convert", "-U", "-n", "-f", "raw", "-O", "raw"]),
    );
    add("nbdcopy", &["nbdcopy"], None, plain("nbdcopy", &["--flush"]));
    peers
}

/// dsync, with a replica of its own.
struct Ours<'a> {
    name: &'static str,
    dsync: &'a Dsync,
    server: &'a Daemon,
    source: &'a Path,
    replica: PathBuf,
    options: &'static [&'static str],
    method: String,
}

impl Ours<'_> {
    fn sync(&mut self) -> Result<Run> {
        let before = self.server.reads();
        let synced =
            self.dsync.sync(self.source, &self.replica.display().to_string(), self.options, LIMIT)?;
        let served = self.server.reads().saturating_sub(before);
        self.method = synced.word("method");
        // Its own figure counts what the page cache gave as well; storage may have been asked for more.
        let read = synced.number("bytes_read").max(synced.outcome.read + served);
        Ok(Run { seconds: synced.outcome.seconds, read: Some(read), sent: Some(synced.number("bytes_sent")) })
    }
}

impl Peer for Ours<'_> {
    fn name(&self) -> &str {
        self.name
    }
    fn prepare(&mut self, _cold: bool) -> Result<Vec<PathBuf>> {
        Ok(vec![self.source.to_path_buf(), self.replica.clone()])
    }
    fn run(&mut self) -> Result<Run> {
        let run = self.sync()?;
        ensure!(self.method == "tracked", "the method was \"{}\", and should be \"tracked\"", self.method);
        Ok(run)
    }
    fn copy(&self) -> PathBuf {
        self.replica.clone()
    }
}

/// A source served by qemu-nbd, which keeps a dirty bitmap. What is dirty is read by a client with 64 requests in flight.
struct Qemu<'a> {
    files: &'a Files,
    image: PathBuf,
    data: PathBuf,
    socket: PathBuf,
    server: Option<Daemon>,
}

impl<'a> Qemu<'a> {
    const CONTEXT: &'static str = "qemu:dirty-bitmap:changes";

    fn new(files: &'a Files, content: &Content, folder: &Path, sockets: &Path) -> Result<Qemu<'a>> {
        let (image, data) = (folder.join("qemu.qcow2"), folder.join("qemu.data"));
        let options = format!("data_file={},data_file_raw=on", data.display());
        let bytes = (content.blocks() * crate::measure::limit::BLOCK).to_string();
        let mut create = command("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", &options]).arg(&image).arg(&bytes);
        run(&mut create, LIMIT)?;
        content.write(&data)?;
        Ok(Qemu { files, image, data, socket: sockets.join("qemu"), server: None })
    }

    fn serve(&self, options: &[&str]) -> Result<Daemon> {
        let mut line = command("qemu-nbd");
        line.args(["-f", "qcow2", "-t", "-e", "4", "-x", "disk", "-k"]).arg(&self.socket);
        line.args(options).arg(&self.image);
        let _ = std::fs::remove_file(&self.socket);
        Daemon::start(line, &self.socket)
    }

    fn connect(&self) -> Result<Client> {
        Ok(Client::connect_with(&Address::Unix(self.socket.clone()), "disk", &[Self::CONTEXT])?)
    }

    fn copy_dirty(&self) -> Result<u64> {
        let to = OpenOptions::new().write(true).open(&self.files.destination)?;
        let mut client = self.connect()?;
        let dirty = client.ranges(Self::CONTEXT, 1)?;
        ensure!(!dirty.is_empty(), "qemu-nbd offers no dirty blocks");
        let mut asked: HashMap<u64, u64> = HashMap::new();
        let mut copied = 0;
        let mut take = |client: &mut Client, asked: &mut HashMap<u64, u64>| -> Result<()> {
            let reply = client.finish()?;
            ensure!(reply.error == 0, "qemu-nbd answers a read with error {}", reply.error);
            let offset = asked.remove(&reply.cookie).context("an answer to nothing")?;
            copied += reply.data.len() as u64;
            Ok(to.write_all_at(&reply.data, offset)?)
        };
        for range in dirty {
            let mut offset = range.start;
            while offset < range.end {
                let len = (range.end - offset).min(256 << 10) as u32;
                if asked.len() >= 64 {
                    take(&mut client, &mut asked)?;
                }
                asked.insert(client.start(&nbd::NbdCommand::Read { offset, len })?, offset);
                offset += u64::from(len);
            }
        }
        while !asked.is_empty() {
            take(&mut client, &mut asked)?;
        }
        to.sync_data()?;
        client.close()?;
        Ok(copied)
    }
}

impl Peer for Qemu<'_> {
    fn name(&self) -> &str {
        QEMU
    }
    fn change(&mut self, content: &Content, change: &Change) -> Result<()> {
        self.server = None;
        let bitmap = |action: &[&str]| {
            let mut line = command("qemu-img");
            line.arg("bitmap").args(action).arg(&self.image).arg("changes");
            run(&mut line, LIMIT)
        };
        // The first time there is none to remove.
        let _ = bitmap(&["--remove"]);
        bitmap(&["--add", "-g", "4096"])?;
        let server = self.serve(&["--cache=writeback"])?;
        let mut client = self.connect()?;
        content.apply_through(change, &mut client)?;
        client.close()?;
        // The bitmap is saved at the end.
        server.stop()
    }
    fn prepare(&mut self, cold: bool) -> Result<Vec<PathBuf>> {
        self.server = None;
        // The faster way for each.
        let cache: &[&str] = if cold { &["--cache=none", "--aio=io_uring"] } else { &["--cache=writeback"] };
        self.server = Some(self.serve(&[&["-r", "-B", "changes"], cache].concat())?);
        Ok(vec![self.data.clone(), self.files.destination.clone()])
    }
    fn run(&mut self) -> Result<Run> {
        let server = self.server.as_ref().context("qemu-nbd is not running")?;
        let before = server.reads();
        let started = Instant::now();
        let copied = self.copy_dirty()?;
        let seconds = started.elapsed().as_secs_f64();
        let read = Some(server.reads().saturating_sub(before));
        self.server = None;
        Ok(Run { seconds, read, sent: Some(copied) })
    }
    fn copy(&self) -> PathBuf {
        self.files.destination.clone()
    }
    fn shared(&self) -> bool {
        true
    }
}

/// Two btrfs on loop devices.
struct Btrfs {
    from: Loop,
    to: Loop,
    round: u32,
}

impl Btrfs {
    fn new(content: &Content, folder: &Path) -> Result<Btrfs> {
        let bytes = content.blocks() * crate::measure::limit::BLOCK;
        let make = |name: &str| Loop::formatted(&folder.join(name), "btrfs", 4 * bytes + (2 << 30));
        let mut peer = Btrfs { from: make("btrfs-from")?, to: make("btrfs-to")?, round: 0 };
        run(command("btrfs").args(["-q", "subvolume", "create"]).arg(peer.live()), LIMIT)?;
        content.write(&peer.live().join("image"))?;
        peer.snapshot()?;
        peer.send()?;
        Ok(peer)
    }

    fn live(&self) -> PathBuf {
        self.from.folder().join("live")
    }

    fn at(folder: &Loop, round: u32) -> PathBuf {
        folder.folder().join(format!("s{round}"))
    }

    fn snapshot(&mut self) -> Result<()> {
        let to = Self::at(&self.from, self.round);
        run(command("btrfs").args(["-q", "subvolume", "snapshot", "-r"]).arg(self.live()).arg(to), LIMIT)?;
        run(command("btrfs").args(["filesystem", "sync"]).arg(self.from.folder()), LIMIT).map(drop)
    }

    fn send(&self) -> Result<process::Outcome> {
        let parent = match self.round {
            0 => String::new(),
            round => format!("-p {}", quote(&Self::at(&self.from, round - 1))),
        };
        let (now, to) = (quote(&Self::at(&self.from, self.round)), quote(self.to.folder()));
        run(
            &mut shell(&format!(
                "btrfs -q send {parent} {now} | btrfs -q receive {to} && btrfs filesystem sync {to}"
            )),
            LIMIT,
        )
    }
}

impl Peer for Btrfs {
    fn name(&self) -> &str {
        BTRFS
    }
    fn change(&mut self, content: &Content, change: &Change) -> Result<()> {
        // What is older than the parent is not needed.
        if self.round > 0 {
            for side in [&self.from, &self.to] {
                let old = Self::at(side, self.round - 1);
                if old.exists() {
                    run(command("btrfs").args(["-q", "subvolume", "delete"]).arg(old), LIMIT)?;
                }
            }
        }
        self.round += 1;
        content.apply(change, &self.live().join("image"))?;
        self.snapshot()
    }
    fn prepare(&mut self, _cold: bool) -> Result<Vec<PathBuf>> {
        let now = Self::at(&self.from, self.round).join("image");
        Ok(vec![now, Self::at(&self.to, self.round - 1).join("image")])
    }
    fn run(&mut self) -> Result<Run> {
        let outcome = self.send()?;
        Ok(Run { seconds: outcome.seconds, read: None, sent: None })
    }
    fn copy(&self) -> PathBuf {
        Self::at(&self.to, self.round).join("image")
    }
}

/// One column of the tables.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    /// Blocks that changed.
    pub percent: u32,
    /// With empty caches.
    pub cold: bool,
}

impl Cell {
    /// The columns of a scenario.
    pub(crate) fn all(bench: &Bench, report: &mut Report) -> Vec<Cell> {
        let percents = if bench.percent.is_empty() { &[1, 10, 50] } else { &bench.percent[..] };
        let cells = percents.iter().flat_map(|&percent| [false, true].map(|cold| Cell { percent, cold }));
        if !root() {
            report.left_out("cold caches", "dropping them needs root");
        }
        cells.filter(|cell| root() || !cell.cold).collect()
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} % {}", self.percent, if self.cold { "cold" } else { "warm" })
    }
}

/// Runs the scenario.
pub(crate) fn sync(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 256 << 20 } else { 4 << 30 });
    let bytes = bytes.next_multiple_of(1 << 20);
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 5 });
    report.section(
        "sync: an older copy brought up to date",
        &format!(
            "An image of {} without compressible content, random 4 KiB blocks changed, both files on one disk. Seconds until \
             the copy is durable, the median of up to {rounds} interleaved rounds, and in brackets the ratio to the limit. \
             What takes over {SLOW} s is run once.",
            size(bytes as f64)
        ),
    );
    let folder = scratch(&bench.dir)?;
    let sockets = sockets()?;
    let free = free(&bench.dir);
    ensure!(free > 5 * bytes, "{}: {} free, {} needed", bench.dir.display(), free, 5 * bytes);
    let at = |name: &str| folder.path().join(name);
    let files = Files { source: at("source.img"), destination: at("copy.img"), list: at("list") };
    let mut content = Content::new(bench.seed, bytes);
    content.write(&files.source)?;
    content.write(&files.destination)?;

    // The server comes first, so that it is the last to go.
    let socket = sockets.path().join("dsync");
    let dsync = bench.dsync.as_ref().map(|binary| Dsync::new(binary, at("state")));
    let mut server = None;
    let mut peers = programs(&files, report);
    match &dsync {
        None => report.left_out("dsync", "no binary: build it, or name it with --dsync"),
        Some(dsync) => match dsync.serve(&files.source, &socket, &[]) {
            Err(error) => report.failed("dsync serve", &error),
            Ok(daemon) => server = Some(daemon),
        },
    }
    if let (Some(dsync), Some(server)) = (&dsync, &server) {
        let ways: [(&str, &str, &[&str]); 2] = [
            (IN_PLACE, "in-place.img", &["--commit", "in-place"]),
            (JOURNAL, "journal.img", &["--commit", "journal"]),
        ];
        for (name, replica, options) in ways {
            let replica = at(replica);
            let method = String::new();
            let mut peer = Ours { name, dsync, server, source: &files.source, replica, options, method };
            match peer.sync().and_then(|run| content.check(&peer.replica).map(|()| run)) {
                Ok(run) => {
                    report.line(&format!("{name}: seeded in {} s", seconds(run.seconds)));
                    peers.push(Box::new(peer));
                }
                Err(error) => report.failed(name, &error),
            }
        }
    }
    trackers(&files, &content, folder.path(), sockets.path(), &mut peers, report);
    peers.retain(|peer| peer.name() == LIMIT_NAME || bench.wants(peer.name()));

    let cells = Cell::all(bench, report);
    let names: Vec<String> = peers.iter().map(|peer| peer.name().to_string()).collect();
    let mut runs = Runs::new();
    let socket = server.as_ref().map(|_| &*socket);
    let course = Course { bench, files: &files, socket, programs: programs_of(bench), rounds };
    let mut done = Ok(());
    for &cell in &cells {
        done = course.measure(cell, &mut content, &mut peers, &mut runs, report);
        if done.is_err() {
            break;
        }
    }
    // What was found out before an interruption is worth showing.
    tables(report, &runs, &names, &cells, bytes);
    goals(report, &runs, &cells, bytes);
    done?;
    drop(peers);
    if let Some(server) = server {
        server.stop()?;
    }
    Ok(())
}

/// Adds the peers that know what changed as dsync does.
fn trackers<'p>(
    files: &'p Files,
    content: &Content,
    folder: &Path,
    sockets: &Path,
    peers: &mut Vec<Box<dyn Peer + 'p>>,
    report: &mut Report,
) {
    match dsync_tests::find("qemu-nbd").is_some() && dsync_tests::find("qemu-img").is_some() {
        false => report.left_out(QEMU, "qemu-nbd and qemu-img are not installed"),
        true => match Qemu::new(files, content, folder, sockets) {
            Ok(peer) => peers.push(Box::new(peer)),
            Err(error) => report.failed(QEMU, &error),
        },
    }
    let tools = ["btrfs", "mkfs.btrfs", "losetup"];
    match tools.iter().find(|tool| dsync_tests::find(tool).is_none()) {
        Some(tool) => report.left_out(BTRFS, &format!("{tool} is not installed")),
        None if !root() => report.left_out(BTRFS, "loop devices need root"),
        None => match Btrfs::new(content, folder) {
            Ok(peer) => peers.push(Box::new(peer)),
            Err(error) => report.failed(BTRFS, &error),
        },
    }
}

/// The files of all programs that may run, to be kept warm.
fn programs_of(bench: &Bench) -> Vec<PathBuf> {
    let tools = ["rsync", "dd", "cp", "qemu-img", "nbdcopy", "qemu-nbd", "btrfs", "bash"];
    let found: Vec<PathBuf> = tools.iter().filter_map(|tool| dsync_tests::find(tool)).collect();
    let own = PathBuf::from(own("").get_program());
    process::parts(found.iter().chain([&own]).chain(&bench.dsync).map(PathBuf::as_path))
}

/// How the rounds are run.
struct Course<'a> {
    bench: &'a Bench,
    files: &'a Files,
    /// Of the server of the source, if there is one.
    socket: Option<&'a Path>,
    programs: Vec<PathBuf>,
    rounds: usize,
}

impl Course<'_> {
    fn measure<'p>(
        &self,
        cell: Cell,
        content: &mut Content,
        peers: &mut Vec<Box<dyn Peer + 'p>>,
        runs: &mut Runs,
        report: &mut Report,
    ) -> Result<()> {
        for round in 0..self.rounds {
            process::go_on()?;
            let change = content.change(content.blocks() * u64::from(cell.percent) / 100);
            write_list(&self.files.list, &change.blocks)?;
            match self.socket {
                Some(socket) => {
                    let address = Address::Unix(socket.to_path_buf());
                    let mut client = Client::connect_with(&address, &export(&self.files.source), &[])?;
                    content.apply_through(&change, &mut client)?;
                    client.close()?;
                }
                None => content.apply(&change, &self.files.source)?,
            }
            let mut gone = Vec::new();
            for peer in peers.iter_mut() {
                if let Err(error) = peer.change(content, &change) {
                    process::go_on()?;
                    report.failed(&format!("{}, {cell}", peer.name()), &error);
                    gone.push(peer.name().to_string());
                }
            }
            peers.retain(|peer| !gone.iter().any(|gone| gone == peer.name()));
            // Nobody is always first, and nobody always comes after the same one.
            let count = peers.len();
            let mut moved = true;
            for at in 0..count {
                let peer = &mut peers[(at + round) % count];
                let name = peer.name().to_string();
                let so_far = runs.entry((cell, name.clone())).or_default();
                if peer.shared() && so_far.iter().any(|run| run.seconds > SLOW) {
                    continue;
                }
                if peer.shared() && !std::mem::take(&mut moved) {
                    content.undo(&change, &self.files.destination)?;
                }
                match one(peer.as_mut(), content, &change, cell, round == 0, &self.programs) {
                    Ok(run) => {
                        if !self.bench.quiet {
                            eprintln!("{cell}, round {}: {name}: {} s", round + 1, seconds(run.seconds));
                        }
                        so_far.push(run);
                    }
                    Err(error) => {
                        process::go_on()?;
                        report.failed(&format!("{name}, {cell}"), &error);
                        gone.push(name);
                    }
                }
            }
            peers.retain(|peer| !gone.iter().any(|gone| gone == peer.name()));
            // Whoever was last, or failed: the common copy stands at this round for the next one.
            content.apply(&change, &self.files.destination)?;
        }
        Ok(())
    }
}

/// One run of one peer, with its check.
fn one(
    peer: &mut dyn Peer,
    content: &Content,
    change: &Change,
    cell: Cell,
    whole: bool,
    programs: &[PathBuf],
) -> Result<Run> {
    let files = peer.prepare(cell.cold)?;
    rustix::fs::sync();
    if cell.cold {
        drop_caches()?;
        programs.iter().try_for_each(|file| warm(file))?;
    } else {
        files.iter().try_for_each(|file| warm(file))?;
    }
    let run = peer.run()?;
    if whole {
        content.check(&peer.copy())?;
    } else {
        content.check_changed(change, &peer.copy())?;
    }
    Ok(run)
}

type Runs = BTreeMap<(Cell, String), Vec<Run>>;

fn middle(runs: &Runs, cell: Cell, name: &str) -> Option<f64> {
    let seconds: Vec<f64> = runs.get(&(cell, name.to_string()))?.iter().map(|run| run.seconds).collect();
    (!seconds.is_empty()).then(|| median(&seconds))
}

fn tables(report: &mut Report, runs: &Runs, names: &[String], cells: &[Cell], bytes: u64) {
    let titles: Vec<String> = cells.iter().map(Cell::to_string).collect();
    let columns: Vec<&str> = std::iter::once("tool").chain(titles.iter().map(String::as_str)).collect();
    let mut table = Table::new("Seconds, and the ratio to the limit", &columns);
    for name in names {
        let mut row = vec![name.clone()];
        for &cell in cells {
            row.push(match (middle(runs, cell, name), middle(runs, cell, LIMIT_NAME)) {
                (Some(time), Some(limit)) => format!("{} ({:.2})", seconds(time), time / limit),
                (Some(time), None) => seconds(time),
                _ => "-".into(),
            });
        }
        table.row(row);
    }
    report.table(&table);
    for (title, of) in [
        ("Bytes read from storage, at the source and at the copy (dsync: at least what it says it read)", 0),
        ("Bytes sent", 1),
    ] {
        let mut table = Table::new(title, &columns);
        let mut changed = vec!["changed".to_string()];
        changed.extend(cells.iter().map(|cell| size(bytes as f64 * f64::from(cell.percent) / 100.0)));
        table.row(changed);
        for name in names {
            let mut row = vec![name.clone()];
            for &cell in cells {
                let of = |run: &Run| if of == 0 { run.read } else { run.sent };
                let all = runs.get(&(cell, name.clone())).map_or(&[][..], Vec::as_slice);
                let figures: Vec<f64> = all.iter().filter_map(of).map(|bytes| bytes as f64).collect();
                row.push(if figures.is_empty() { "-".into() } else { size(median(&figures)) });
            }
            if row.iter().skip(1).any(|figure| figure != "-") {
                table.row(row);
            }
        }
        report.table(&table);
    }
}

fn goals(report: &mut Report, runs: &Runs, cells: &[Cell], bytes: u64) {
    for &cell in cells {
        let of = |name: &str| middle(runs, cell, name);
        let (Some(limit), Some(ours)) = (of(LIMIT_NAME), of(IN_PLACE)) else { continue };
        if cell.percent < 50 {
            report.goal(&format!("{cell}: in place, times the limit"), ours / limit, true, 1.25);
        } else {
            let full = [of(FULL), of("dd, direct 4 MiB")].into_iter().flatten().fold(limit, f64::min);
            report.goal(
                &format!("{cell}: in place, times the faster of limit and full copy"),
                ours / full,
                true,
                1.25,
            );
        }
        if let Some(journal) = of(JOURNAL) {
            report.goal(&format!("{cell}: journal, times the limit"), journal / limit, true, 2.2);
        }
        if cell.percent <= 10 {
            let all = runs.get(&(cell, IN_PLACE.to_string())).map_or(&[][..], Vec::as_slice);
            let read: Vec<f64> = all.iter().filter_map(|run| run.read).map(|bytes| bytes as f64).collect();
            let changed = bytes as f64 * f64::from(cell.percent) / 100.0;
            report.goal(
                &format!("{cell}: bytes read, times bytes changed"),
                median(&read) / changed,
                true,
                1.05,
            );
        }
        if cell.percent == 1 {
            for (peer, goal) in [
                ("rsync --inplace -B4096", 20.0),
                ("rsync --inplace", 20.0),
                ("cp", 5.0),
                (QEMU, 1.0),
                (BTRFS, 1.0),
            ] {
                if let Some(theirs) = of(peer) {
                    report.goal(&format!("{cell}: {peer}, times dsync in place"), theirs / ours, false, goal);
                }
            }
        }
    }
}
