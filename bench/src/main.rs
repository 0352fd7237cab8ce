//! Whole programs side by side: dsync beside the limit of what is possible, and beside its peers. Medians of interleaved
//! rounds, printed as tables and written to a file.

mod artifact;
mod cases;
mod figures;
mod hosts;
mod measure;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use cases::{
    clones, compare, compress, far, harm, idle, keep, mirror, record, rolling, serve, sync, track, wan,
};
use figures::{inplace, snapshots, trace, vm};
use hosts::link;
use measure::report::{self, Report};
use measure::{limit, limit_commit, paper, process};

/// Measure dsync beside its peers. Needs root for cold caches, loop devices and network namespaces; what cannot be had is
/// left out, with a line that says so.
#[derive(Parser)]
#[command(name = "dsync-bench", version)]
struct Cli {
    #[command(flatten)]
    bench: Bench,
    #[command(subcommand)]
    what: Option<What>,
}

/// What holds for every scenario.
#[derive(Args, Clone)]
struct Bench {
    /// The dsync binary [default: the one beside this program]
    #[arg(long, global = true, env = "DSYNC_BIN", value_name = "FILE")]
    dsync: Option<PathBuf>,
    /// Where images lie: a folder on the disk to be measured
    #[arg(long, global = true, value_name = "DIR", default_value = "target/bench")]
    dir: PathBuf,
    /// A folder in memory
    #[arg(long, global = true, value_name = "DIR", default_value = "/dev/shm")]
    memory_dir: PathBuf,
    /// The file for the results [default: bench/results/DATE.md]
    #[arg(long, global = true, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Small sizes and few rounds: to see that everything works
    #[arg(long, global = true)]
    quick: bool,
    /// Rounds, of which the median is taken
    #[arg(long, global = true, value_name = "COUNT")]
    rounds: Option<usize>,
    /// Size of the images in bytes
    #[arg(long, global = true, value_name = "BYTES", value_parser = bytes)]
    size: Option<u64>,
    /// Seed of all content and all changes
    #[arg(long, global = true, default_value_t = 1)]
    seed: u64,
    /// Percentages of changed blocks, for the scenarios sync and compare
    #[arg(long, global = true, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=100))]
    percent: Vec<u32>,
    /// Only the peers whose name contains one of these words, and the limit; of rolling, only these parts
    #[arg(long, global = true, value_delimiter = ',', value_name = "WORD")]
    only: Vec<String>,
    /// For trace: a block trace, as CSV of Timestamp,Hostname,DiskNumber,Type,Offset,Size,ResponseTime in the form of those
    /// that Microsoft Research published, or as vscsiStats writes it (.vscsi), in either version [default: a generated week]
    #[arg(long, global = true, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// No line for every run
    #[arg(long, global = true)]
    quiet: bool,
}

impl Bench {
    /// True if `--only` names it, or nothing.
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| name.contains(only))
    }
}

#[derive(Subcommand)]
enum What {
    /// All scenarios, one after the other; also without a word
    All,
    /// An older copy brought up to date, 1, 10 and 50 % changed, warm and cold
    Sync,
    /// Files whose content has moved: inserted, hostile, and versions of packages
    Rolling,
    /// NBD servers side by side, and ours with cold regions and with an open view
    Serve,
    /// A disk of 64 TiB beside one of 1 GiB: idle, and with 1000 blocks changed; memory
    Idle,
    /// The mirror: figures 3 to 8 of its paper, the destination's writes, limits, and what it costs the writer, and a reader it; --only
    /// fig3,…,fig8,destination,limits,cost,reader for some of it
    Mirror,
    /// Images on XFS and Btrfs that are tracked by clones: what a clone and finding the changes cost, by the number of their pieces
    Clones,
    /// Writing to a live disk that is tracked, beside one that is not
    Track,
    /// An older copy brought up to date without a record: here, and over a link of 1 Gbit/s
    Compare,
    /// A compressible image over a link of 100 Mbit/s
    Compress,
    /// What a link carries over TLS, beside plain TCP and ssh
    Link,
    /// A first copy and scattered blocks to another host: processor time and system calls of both sites
    Far,
    /// A commit that keeps the past beside one that does not
    Keep,
    /// Memory of the record of modified blocks: the bitmap beside a Bloom filter
    Record,
    /// What a writer feels while its disk is followed, viewed, synced, mirrored, or read by rsync; and the page cache
    Harm,
    /// A week of a server on two hosts, day by day: times and bytes of each tool; run lengths
    Trace,
    /// A far line that loses packets: plain TCP beside dsync's link; when an erasure code would pay, computed
    Wan,
    /// A snapshot a day on btrfs beneath a copy: what each takes, for each way to bring the copy up to date
    Snapshots,
    /// Versions of binaries, file by file and joined: in place and not, beside rsync; over slow lines too
    InPlace,
    /// A machine with PostgreSQL and a file server on a live disk: twenty runs, each with a sync to another host
    Vm,
    /// Two hosts and a line of 1 Gbit/s: the first paper's figures 2 to 7, from 1 GiB to 32 GiB as far as the disk has room;
    /// hours, so not part of all
    Paper,
    /// What the papers measured, one scenario after the other; hours
    Figures,
    /// The claims of ARTIFACT.md, with a verdict for each: half an hour. Exit code 1 if one is missed
    Artifact {
        /// At the sizes and with the rounds of the results that are kept: hours
        #[arg(long)]
        full: bool,
    },
    /// The limit: move blocks that are known, or all of them, with io_uring and bypassing the page cache
    Limit {
        /// The file to read
        source: PathBuf,
        /// The file to write
        destination: PathBuf,
        /// The numbers of the blocks of 4 KiB, one a line
        #[arg(long)]
        list: Option<PathBuf>,
    },
    /// Read files in full, all of them at once, with io_uring and bypassing the page cache
    Read {
        /// The files
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// The limit of a commit: the same by way of a journal, with what the blocks replace kept in another file
    #[command(hide = true)]
    LimitCommit {
        source: PathBuf,
        destination: PathBuf,
        list: PathBuf,
        #[arg(long)]
        journal: Option<PathBuf>,
        #[arg(long)]
        undo: Option<PathBuf>,
    },
    /// The paper's way: listed blocks to standard output, one at a time
    #[command(hide = true)]
    Extract { source: PathBuf, list: PathBuf },
    /// The paper's way: blocks from standard input to their places
    #[command(hide = true)]
    Merge { destination: PathBuf },
    /// Carries bytes over a link, or takes them
    #[command(hide = true)]
    Carry {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// A remote shell over a slow link: RATE in bits a second
    #[command(hide = true)]
    Rsh {
        rate: u64,
        host: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

fn bytes(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: u64 =
        number.parse().map_err(|_| format!("invalid size \"{text}\": use a form like 4096, 256M or 4G"))?;
    number
        .checked_shl(shift)
        .filter(|&bytes| bytes >> shift == number && bytes > 0)
        .ok_or_else(|| "too large".into())
}

/// This program with one of its own subcommands.
fn own(subcommand: &str) -> Command {
    let program = std::env::current_exe().unwrap_or_else(|_| "dsync-bench".into());
    let mut command = Command::new(program);
    command.arg(subcommand);
    command
}

type Scenario = fn(&Bench, &mut Report) -> Result<()>;

/// All scenarios by name.
const SCENARIOS: [(&str, Scenario); 20] = [
    ("sync", sync::sync),
    ("compare", compare::compare),
    ("rolling", rolling::rolling),
    ("serve", serve::serve),
    ("idle", idle::idle),
    ("compress", compress::compress),
    ("clones", clones::clones),
    ("track", track::track),
    ("link", link::link),
    ("far", far::far),
    ("mirror", mirror::mirror),
    ("keep", keep::keep),
    ("record", record::record),
    ("harm", harm::harm),
    ("trace", trace::trace),
    ("vm", vm::vm),
    ("in-place", inplace::inplace),
    ("snapshots", snapshots::snapshots),
    ("wan", wan::wan),
    ("paper", figures::figures),
];

/// Those that show what the papers show.
const FIGURES: [&str; 9] =
    ["paper", "vm", "trace", "record", "rolling", "in-place", "snapshots", "mirror", "wan"];

impl What {
    /// The scenarios that are meant.
    fn scenarios(&self) -> Vec<(&'static str, Scenario)> {
        let name = match self {
            What::Sync => "sync",
            What::Compare => "compare",
            What::Rolling => "rolling",
            What::Serve => "serve",
            What::Idle => "idle",
            What::Compress => "compress",
            What::Clones => "clones",
            What::Track => "track",
            What::Link => "link",
            What::Mirror => "mirror",
            What::Far => "far",
            What::Keep => "keep",
            What::Record => "record",
            What::Harm => "harm",
            What::Trace => "trace",
            What::Vm => "vm",
            What::InPlace => "in-place",
            What::Snapshots => "snapshots",
            What::Wan => "wan",
            What::Paper => "paper",
            What::Figures => {
                let named = |name: &&str| SCENARIOS.into_iter().find(|(other, _)| other == name);
                return FIGURES.iter().filter_map(named).collect();
            }
            _ => return SCENARIOS.into_iter().filter(|(name, _)| *name != "paper").collect(),
        };
        SCENARIOS.into_iter().filter(|(other, _)| *other == name).collect()
    }
}

fn scenarios(mut bench: Bench, what: What) -> Result<bool> {
    process::catch_signals()?;
    if bench.dsync.is_none() {
        let beside = std::env::current_exe()?.with_file_name("dsync");
        bench.dsync = beside.is_file().then_some(beside);
    }
    if let Some(path) = &mut bench.dsync {
        *path =
            std::fs::canonicalize(&*path).with_context(|| format!("{}: no dsync there", path.display()))?;
    }
    std::fs::create_dir_all(&bench.dir).with_context(|| bench.dir.display().to_string())?;
    bench.dir = std::fs::canonicalize(&bench.dir)?;
    let out = bench.out.clone();
    let out = out.unwrap_or_else(|| Path::new("bench/results").join(format!("{}.md", report::date())));
    let mut report = Report::new(bench.dsync.as_deref(), &bench.dir, bench.quick);
    let steps: Vec<(&str, Scenario, Bench)> = match what {
        What::Artifact { full } => artifact::steps(&bench, full),
        _ => what.scenarios().into_iter().map(|(name, run)| (name, run, bench.clone())).collect(),
    };
    for (name, scenario, bench) in steps {
        if let Err(error) = scenario(&bench, &mut report) {
            report.failed(name, &error);
        }
        if process::interrupted() {
            break;
        }
    }
    let missed = matches!(what, What::Artifact { .. }) && report.misses();
    Ok(report.finish(&out)? && !missed)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.what.unwrap_or(What::All) {
        What::Limit { source, destination, list } => {
            limit::run(&source, &destination, list.as_deref()).map(|()| true)
        }
        What::LimitCommit { source, destination, list, journal, undo } => {
            limit_commit::run(&source, &destination, &list, journal.as_deref(), undo.as_deref())
                .map(|()| true)
        }
        What::Read { files } => limit::read(&files).map(|_| true),
        What::Extract { source, list } => paper::extract(&source, &list).map(|()| true),
        What::Merge { destination } => paper::merge(&destination).map(|()| true),
        What::Carry { words } => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            dsync_tests::carry::run(&words).map(|()| true).map_err(|error| anyhow::anyhow!(error))
        }
        What::Rsh { rate, host, words } => match compress::rsh(rate, &host, &words) {
            Ok(code) => return ExitCode::from(u8::try_from(code).unwrap_or(255)),
            Err(error) => Err(error),
        },
        what => scenarios(cli.bench, what),
    };
    match result {
        _ if process::interrupted() => ExitCode::from(130),
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("dsync-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
