//! The command line: one definition for parsing, help, man pages and completions.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::units::{parse_expiry, parse_factor, parse_range, parse_size, parse_time, parse_timeout};

/// Keep a copy of a disk up to date by moving only the blocks that changed.
#[derive(Debug, Parser)]
#[command(
    name = "dsync",
    version,
    max_term_width = 100,
    after_help = "A first copy, and every later one:\n  \
        dsync serve /srv/vm.raw --socket /run/vm.sock      let a VM or any NBD client write to the disk\n  \
        dsync sync /srv/vm.raw backup:/srv/vm.raw          the first time everything, then what changed\n  \
        dsync status                                       what is followed, and what each replica lacks\n\n\
        See it work on a scratch disk, in under a minute:\n  \
        dsync demo\n\n\
        Exit codes: 0 done, 1 failed, 2 bad usage, 3 tracking lost and --method tracked was demanded,\n\
        4 lineage, state, lock or key refuses, 5 verify found differences, 130 interrupted."
)]
pub struct Cli {
    /// Where sources keep their records [default: $DSYNC_STATE_DIR, else /var/lib/dsync for root, else
    /// ~/.local/state/dsync]
    #[arg(long, global = true, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// One JSON object a line on standard output: message_type status, error or summary
    #[arg(long, global = true)]
    pub json: bool,

    /// Say more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// Say nothing but errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,

    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Bring a replica up to date; the first time, make it
    #[command(after_help = "Examples:\n  \
        dsync sync /srv/vm.raw /backup/vm.raw              on this host\n  \
        dsync sync vm backup:/srv/vm.raw                   a served disk by its export name, over ssh\n  \
        dsync sync -n /srv/vm.raw backup:/srv/vm.raw       what would be sent\n  \
        dsync sync --bwlimit 10M --compress /srv/vm.raw root@far:/dev/vg0/vm\n  \
        dsync sync --adopt /srv/vm.raw far:/srv/vm.raw     a copy that was carried there by hand\n  \
        dsync sync --method rolling dump.sql far:dump.sql  a file in which much was inserted or moved\n  \
        dsync sync --digests /srv/vm.raw far:/srv/vm.raw   without a record, don't read the replica\n  \
        dsync sync /srv/vm.raw tls://far/vm.raw            without ssh, see \"dsync key\"\n\n\
        A path with a slash before its colon is local. tls://HOST[:PORT]/PATH is a path in the first folder\n\
        that \"dsync receive --listen\" was given there; tls://HOST//PATH is an absolute one.")]
    Sync(Sync),

    /// Keep a replica up to date, seconds behind, until it is stopped
    #[command(after_help = "Examples:\n  \
        dsync mirror vm backup:/srv/vm.raw                 a served disk, over ssh\n  \
        dsync mirror --rpo 30s --compress vm backup:/srv/vm.raw    a slow link: fewer and larger batches\n  \
        dsync mirror --rate 20M vm /mnt/copy/vm.raw        move no more than 20 MiB of changes a second\n  \
        dsync mirror --json -v vm backup:/srv/vm.raw       one JSON object a batch: blocks, times, lag\n\n\
        It begins with a sync. From then on what was written is sent in batches, each of which the replica\n\
        takes whole or not at all: it is always the disk as it was at one moment. The interval between\n\
        batches follows the speed of both sites, and is at most half of --rpo. If the link or the other side\n\
        fails, that is said, and tried again until it works; meanwhile only the replica falls behind.\n\n\
        Once it mirrors, a first SIGINT or SIGTERM brings the replica up to date and ends; a second one ends at once.\n\n\
        A disk followed with \"dsync track\" is mirrored too: each batch is a sync with its short freeze, at\n\
        most one a second.")]
    Mirror(Mirror),

    /// Serve disks to NBD clients and record what they write
    #[command(after_help = "Examples:\n  \
        dsync serve /srv/vm.raw --socket /run/vm.sock\n  \
        qemu-system-x86_64 … -device virtio-blk-pci,drive=vm -blockdev driver=nbd,node-name=vm,\\\n    \
            server.type=unix,server.path=/run/vm.sock,export=vm,reconnect-delay=30,discard=unmap\n  \
        nbdinfo --map=qemu:dirty-bitmap:dsync 'nbd+unix:///vm?socket=/run/vm.sock'\n  \
        nbdcopy 'nbd+unix:///vm@view?socket=/run/vm.sock' vm-now.raw    the disk as it is at this moment\n\n\
        An export is named by its file's stem. NAME@view is the disk as it was when the first client\n\
        connected to it, for as long as one stays connected. NAME@view.READER is the same, apart from all others:\n\
        the connections of one reader share it by that name. Of what changed, a view offers what \"dsync\n\
        checkpoint\" keeps, up to the moment that it shows.")]
    Serve(Serve),

    /// Follow a live disk: from now on every block written to it is known
    #[command(after_help = "Examples:\n  \
        dsync track add /dev/sdb                           at once: mounted or not, nothing is restarted\n  \
        dsync status /dev/sdb\n  \
        dsync track remove /dev/sdb\n  \
        dsync track add --with dm --meta /dev/sdc1 /dev/sdb   as /dev/mapper/sdb-tracked\n\n\
        To keep the record over a reboot, for a disk that is not the root file system's:\n  \
        systemctl enable --now \"dsync-track@$(systemd-escape -p /dev/sdb).service\"\n\n\
        The service runs 'dsync track save' when the last file system is unmounted, and 'dsync track\n\
        restore' before the first is mounted. A record is trusted again only if nothing wrote between.")]
    Track(Track),

    /// Sources, trackers and replicas: trust, epochs, what each lacks
    #[command(after_help = "Examples:\n  dsync status\n  dsync status /srv/vm.raw --json")]
    Status(Status),

    /// Write the changed blocks to standard output
    #[command(after_help = "Examples:\n  \
        dsync extract /srv/vm.raw | ssh backup dsync merge /srv/vm.raw\n  \
        dsync extract /srv/vm.raw --since 41 > vm-41.delta\n  \
        dmextract mydev | ssh backup dmmerge /dev/mapper/mydev\n\n\
        Without --since: everything since the oldest epoch at which a replica is known to stand; where none is\n\
        known, the whole disk. dsync does not see what becomes of its output, so the next delta begins at the same\n\
        epoch, and fits whether this one was merged or not. To begin where the replica is, let the merge say so:\n  \
        dsync extract vm | ssh backup dsync merge --json /srv/vm.raw | dsync checkpoint vm extract --at -")]
    Extract(Extract),

    /// Merge a delta from standard input into a replica
    #[command(after_help = "Examples:\n  \
        dsync merge /srv/vm.raw < vm-41.delta\n  \
        ssh prod dsync extract /srv/vm.raw | dsync merge /srv/vm.raw")]
    Merge(Merge),

    /// Say what a delta file holds, and whether it is whole
    #[command(after_help = "Example:\n  dsync inspect vm-41.delta")]
    Inspect(Inspect),

    /// Keep an epoch of a source for a reader of its own, such as an incremental backup
    #[command(after_help = "Examples:\n  \
        dsync checkpoint vm backup                         from now on, what changes is known for \"backup\"\n  \
        dsync checkpoint vm backup --at 17                 the reader has epoch 17: move on to it\n  \
        dsync checkpoint vm --list\n  \
        dsync checkpoint vm --delete backup\n  \
        dsync checkpoint vm                                only end the epoch, and name its number\n\n\
        A checkpoint belongs to its reader: nothing else moves it, and what has changed since is kept for it.\n\
        Each view of a served disk (see \"dsync serve --help\") offers, for each checkpoint NAME, the blocks that\n\
        changed from NAME up to that very view, as qemu:dirty-bitmap:NAME. The view's description begins with\n\
        \"epoch NUMBER\". When the reader has stored what it read, it moves its checkpoint --at that number; a\n\
        reader that failed does not, and finds all of it again the next time. \"man dsync-changes\" has the same\n\
        for disks that are not served.\n\n\
        With --at - the number comes from a merge that has committed:\n  \
        dsync extract vm --since far | ssh far dsync merge --json /srv/vm.raw | dsync checkpoint vm far --at -")]
    Checkpoint(Checkpoint),

    /// Forget a source, a replica, or what a source keeps for one of its readers
    #[command(after_help = "Examples:\n  \
        dsync forget vm backup:/srv/vm.raw                 a replica that is no more: its bookmark at the source\n  \
        dsync forget vm backup                             a named checkpoint\n  \
        dsync forget -n /srv/vm.raw                        what forgetting the source would cost\n  \
        dsync forget /backup/vm.raw                        the replica here: it becomes a file like any other\n\n\
        Only what dsync knows is forgotten; no disk and no file is touched. What is in use is refused.")]
    Forget(Forget),

    /// Print which bytes changed since a checkpoint
    #[command(after_help = "Examples:\n  \
        dsync changes vm --since backup                    a line OFFSET LENGTH for each range, in bytes\n  \
        dsync changes /dev/sdb --since backup --format json\n  \
        dsync changes vm --since 12 --at 17\n\n\
        Without --at it ends the epoch, and prints what changed up to now; the JSON has the number of that epoch.\n\
        Read those bytes, and when they are stored: dsync checkpoint SRC NAME --at EPOCH. What a disk in use is\n\
        written to meanwhile is read newer than that epoch, and named again the next time.\n\n\
        Exit code 3: what changed since is not known (the reason is printed). Read everything then.")]
    Changes(Changes),

    /// Fold two consecutive deltas into one; what the later one wrote wins
    #[command(after_help = "Example:\n  dsync combine monday.delta tuesday.delta > both.delta")]
    Combine(Combine),

    /// Prove a replica: compare its checksums with those of the source
    #[command(after_help = "Examples:\n  \
        dsync verify /srv/vm.raw backup:/srv/vm.raw\n  \
        dsync verify --rate 50M vm backup:/srv/vm.raw      read no more than that a second, on each side\n  \
        dsync verify --range 0:1G --range 8G:1M vm /backup/vm.raw\n  \
        dsync verify --repair vm backup:/srv/vm.raw        send what differs, and commit it\n\n\
        The source may be in use, served: what has changed there since the replica's epoch is known, and left out.\n\
        Where that is not known (the output says why) every difference is told, changes among them.\n\
        A repair of the whole replica brings it to the source's epoch of now; one of ranges leaves it at its own.\n\n\
        Exit code 0: no differences, or all of them repaired. 5: differences. 1: something could not be read.")]
    Verify(Verify),

    /// Finish or undo what a crash left of a replica, and say how it is (every command does this on opening)
    #[command(after_help = "Example:\n  dsync recover /srv/vm.raw")]
    Recover(Recover),

    /// Show the whole thing on a scratch disk, in under a minute
    Demo(Demo),

    /// The far end of a sync: take replicas from other sites, over TLS
    #[command(after_help = "Examples:\n  \
        dsync receive --listen 0.0.0.0 --into /srv/replicas\n  \
        dsync receive --listen 192.0.2.7:10873 --into /srv/replicas --into /dev/vg0/vm --from alpha\n\n\
        Lets in those whose keys are pinned here (see \"dsync key\"), and nobody else. They can make replicas\n\
        in the folders and on the devices named, and reach nothing else.\n\n\
        Without --listen it talks over standard input and output: that is what \"dsync sync\" runs over ssh.")]
    Receive(Receive),

    /// This site's key, and the keys of others that it trusts
    #[command(after_help = "Examples:\n  \
        dsync key                                          show this site's key; the first time, make it\n  \
        dsync key trust backup dsync-ed25519 AAAA…         believe the host backup by this key alone\n  \
        dsync key trust alpha dsync-ed25519 AAAA… --expires 90d\n  \
        dsync key list\n  \
        dsync key forget alpha\n\n\
        On the side that syncs, a name is the host as it stands in tls://HOST/PATH, or HOST:PORT.\n\
        On the side that receives it is any name, for the log and for --from.")]
    Key(KeyArgs),

    /// Write man pages into a folder
    #[command(hide = true)]
    Man {
        /// The folder
        folder: PathBuf,
    },

    /// Write completions for a shell to standard output
    #[command(hide = true)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// How a source is opened.
#[derive(Debug, Args)]
pub struct SourceArgs {
    /// Bytes a block: a power of two from 4K to 1M [default: 4K, more for disks over 4 TiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub block_size: Option<u64>,

    /// Trust the record of a block device although nobody served it for a while: nobody else wrote to it
    #[arg(long)]
    pub trust_device: bool,

    /// The source became smaller and that is meant
    #[arg(long)]
    pub allow_shrink: bool,
}

/// How the replica's side is reached.
#[derive(Debug, Clone, Args)]
pub struct FarArgs {
    /// Send at most this many bytes a second, such as 10M
    #[arg(long, value_name = "RATE", value_parser = parse_size)]
    pub bwlimit: Option<u64>,
    /// The remote shell with its options
    #[arg(short = 'e', long, value_name = "COMMAND", env = "DSYNC_RSH", default_value = "ssh")]
    pub rsh: String,
    /// The command that runs dsync on the far host
    #[arg(long, value_name = "COMMAND", default_value = "dsync")]
    pub remote_dsync: String,
    /// Where the replica keeps its lineage and journal [default: beside a file, in the state directory for a device]
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<String>,
    /// Connections to a tls:// destination, 1 to 16 [default: as many as cores, 2 to 4]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub lanes: Option<u8>,
    /// Give up on the far side after this long without a sign of it; the shorter one of both sides holds
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, default_value = "30s")]
    pub timeout: Duration,
}

/// The longest that a freeze may last, in seconds.
pub const FREEZE_LIMIT: u64 = 10;
/// Passes over what changes on a live disk before the last one.
pub const PASSES: u32 = 8;

/// `mirror`.
#[derive(Debug, Args)]
pub struct Mirror {
    /// The name under which a disk is served, its path, or a tracked device
    #[arg(value_name = "SRC")]
    pub source: String,
    /// Where the replica lives; tls://HOST[:PORT]/DST without ssh
    #[arg(value_name = "[[USER@]HOST:]DST")]
    pub destination: String,
    /// How far the replica may be behind while the link keeps up
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "5s")]
    pub rpo: Duration,
    /// The first interval between batches
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "30ms")]
    pub interval: Duration,
    /// The shortest interval between batches
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "10ms")]
    pub min_interval: Duration,
    /// How fast the interval follows the time that this site needs for a batch, 0 to 1
    #[arg(long, value_name = "FACTOR", value_parser = parse_factor, default_value = "0.5")]
    pub alpha: f64,
    /// How fast the interval follows the time that the replica's site needs, 0 to 1
    #[arg(long, value_name = "FACTOR", value_parser = parse_factor, default_value = "0.5")]
    pub beta: f64,
    /// Move at most so many bytes of changed blocks a second, by longer intervals: what is written again meanwhile is moved once
    #[arg(long, value_name = "RATE", value_parser = parse_size)]
    pub rate: Option<u64>,
    /// How often an epoch ends: after a crash of the source, what was written since then is sent again
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "60s")]
    pub epoch: Duration,
    /// Compress with zstd, at a level from 1 to 19
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_parser = clap::value_parser!(i32).range(1..=19))]
    pub compress: Option<i32>,
    /// Make a replica of what is there already, by comparing all of it
    #[arg(long)]
    pub adopt: bool,
    /// Begin a new replica where there was one that is gone for good, with all of the source
    #[arg(long)]
    pub create: bool,
    /// How both sites share their work among threads
    #[arg(long, value_enum, default_value_t = StagesArg::Adaptive, hide = true)]
    pub stages: StagesArg,
    /// Keep the interval as it begins
    #[arg(long, hide = true)]
    pub fixed_interval: bool,
    /// How the replica's side is reached
    #[command(flatten)]
    pub far: FarArgs,
}

/// The models of pipelining that paper 004 measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StagesArg {
    /// As many threads as are measured to be of use
    Adaptive,
    /// One thread a site
    Serial,
    /// One thread a stage
    Fine,
    /// Two threads on one batch
    Threads,
    /// Both
    Hybrid,
}

/// `sync`.
#[derive(Debug, Args)]
pub struct Sync {
    /// An image, a block device, or the name under which one is served
    #[arg(value_name = "SRC")]
    pub source: String,
    /// Where the replica lives; tls://HOST[:PORT]/DST without ssh
    #[arg(value_name = "[[USER@]HOST:]DST")]
    pub destination: String,
    /// How to find the changes
    #[arg(long, value_enum, default_value_t = MethodArg::Auto)]
    pub method: MethodArg,
    /// How blocks are compared
    #[arg(long, value_enum, default_value_t = HashArg::Blake3)]
    pub hash: HashArg,
    /// Keep digests of the replica, so that it need not be read the next time it is compared [default: in its folder]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub digests: Option<String>,
    /// How the replica steps to the new epoch
    #[arg(long, value_enum, default_value_t = CommitArg::Journal)]
    pub commit: CommitArg,
    /// Go on behind what can't be read, with exit code 1: of the source it is left out, and the replica incomplete then; of
    /// the replica it is written anew
    #[arg(long)]
    pub keep_going: bool,
    /// How cycles of copies are broken, for --method rolling in place
    #[arg(long, value_enum, default_value_t = CyclesArg::Trim, hide = true)]
    pub cycles: CyclesArg,
    /// Only say what would be moved
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Take over a copy that was carried there by hand: compares all of it
    #[arg(long)]
    pub adopt: bool,
    /// Begin a new replica where there was one that is gone for good, with all of the source
    #[arg(long)]
    pub create: bool,
    /// Send the view that is open as the export NAME@view, not the disk as it is now
    #[arg(long)]
    pub at_view: bool,
    /// Compress with zstd, at a level from 1 to 19
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_parser = clap::value_parser!(i32).range(1..=19))]
    pub compress: Option<i32>,
    /// On a live disk: freeze what is mounted for the last, short pass
    #[arg(long, value_enum, default_value_t = FreezeArg::Auto)]
    pub freeze: FreezeArg,
    /// The longest that a freeze may last, in seconds; then it is ended by force and the sync fails
    #[arg(long, value_name = "SECONDS", default_value_t = FREEZE_LIMIT, value_parser = clap::value_parser!(u64).range(1..=300))]
    pub freeze_limit: u64,
    /// On a live disk: passes over what changes before the last one
    #[arg(long, value_name = "COUNT", default_value_t = PASSES, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub passes: u32,
    #[command(flatten)]
    pub far: FarArgs,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// How to find the changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    /// What the tracker wrote down; compare where it knows nothing; copy where there is no replica
    Auto,
    /// Only what the tracker wrote down; fails where knowledge was lost
    Tracked,
    /// Checksums of all blocks on both sides
    Compare,
    /// Checksums of blocks wherever they stand: for files whose content has moved
    Rolling,
    /// No finding: everything that is allocated is sent
    Copy,
}

/// How blocks are digested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HashArg {
    /// BLAKE3: no two blocks are alike, whoever wrote them
    Blake3,
    /// XXH3-128: faster, for disks whose writers mean no harm
    Xxh3,
}

/// What is sent of copies that overwrite each other's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CyclesArg {
    /// As little as can be
    Trim,
    /// One of them, whole
    Delete,
}

/// Whether file systems on a live disk may be frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FreezeArg {
    /// Those that are mounted; where there are none, the sync waits for a moment in which nobody writes
    Auto,
    /// None: the replica may be of several moments, and is marked fuzzy then
    Never,
    /// There must be one to freeze
    Require,
}

/// How the replica steps to the new epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CommitArg {
    /// Store the whole delta, then merge it: the replica is never between two epochs
    Journal,
    /// Write blocks as they come: fastest; incomplete meanwhile
    InPlace,
    /// Merge into a clone and swap it in (XFS, Btrfs): what has moved by whole blocks is shared, not written
    Reflink,
}

/// `serve`.
#[derive(Debug, Args)]
pub struct Serve {
    /// Images or block devices
    #[arg(required = true, value_name = "IMAGE")]
    pub images: Vec<PathBuf>,
    /// The Unix socket to listen on
    #[arg(long, value_name = "PATH", required_unless_present = "tcp")]
    pub socket: Option<PathBuf>,
    /// A loopback address and port to listen on, such as 127.0.0.1:10809
    #[arg(long, value_name = "ADDRESS")]
    pub tcp: Option<std::net::SocketAddr>,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Serve the bytes of the files as they are, even if they look like qcow2 or another container format
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Write past the page cache
    #[arg(long)]
    pub direct: bool,
    /// The most that a view may keep of what is overwritten
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "16G")]
    pub view_limit: u64,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// What an image is taken for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The bytes of a disk
    Raw,
}

/// `track`.
#[derive(Debug, Args)]
pub struct Track {
    /// What to do
    #[command(subcommand)]
    pub action: TrackAction,
}

/// What `track` does.
#[derive(Debug, Subcommand)]
pub enum TrackAction {
    /// Begin to follow a disk, a partition, or any other block device
    Add {
        /// The block device
        #[arg(value_name = "DEV")]
        device: PathBuf,
        /// What follows it
        #[arg(long, value_enum, default_value_t = With::Bpf)]
        with: With,
        /// Bytes a block: a power of two from 4K to 1M [default: 4K, more for disks over 4 TiB]
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        block_size: Option<u64>,
        /// With dm: the name of the new device, /dev/mapper/NAME [default: the device's name and "-tracked"]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// With dm: a device for metadata, so that the record outlives a reboot or a crash
        #[arg(long, value_name = "DEV")]
        meta: Option<PathBuf>,
    },
    /// Stop following it, and forget what was recorded
    Remove {
        /// The block device
        #[arg(value_name = "DEV")]
        device: PathBuf,
    },
    /// Save the record of a device that nobody uses any more, for 'restore' after a reboot
    Save {
        /// The block device
        #[arg(value_name = "DEV")]
        device: PathBuf,
    },
    /// Follow a device on from its saved record; where that can't be trusted, from now on
    Restore {
        /// The block device
        #[arg(value_name = "DEV")]
        device: PathBuf,
    },
}

/// What follows a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum With {
    /// Programs in the kernel (BPF): nothing to install
    Bpf,
    /// The device-mapper target dm-track, beneath a new device; its module has to be installed
    Dm,
}

/// `status`.
#[derive(Debug, Args)]
pub struct Status {
    /// A source or a replica; without it, every source known here
    pub path: Option<String>,
}

/// `extract`.
#[derive(Debug, Args)]
pub struct Extract {
    /// An image, a block device, or the name under which one is served
    #[arg(value_name = "SRC")]
    pub source: String,
    /// The epoch at which the replica is, or a checkpoint's name; 0 for the whole disk
    #[arg(long, value_name = "EPOCH|NAME")]
    pub since: Option<String>,
    /// Compress with zstd, at a level from 1 to 19
    #[arg(long, value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_parser = clap::value_parser!(i32).range(1..=19))]
    pub compress: Option<i32>,
    /// Write at most this many bytes a second
    #[arg(long, value_name = "RATE", value_parser = parse_size)]
    pub bwlimit: Option<u64>,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// `checkpoint`.
#[derive(Debug, Args)]
pub struct Checkpoint {
    /// An image, a block device, or the name under which one is served
    #[arg(value_name = "SRC")]
    pub source: String,
    /// The checkpoint to set: a letter, then letters, digits, dots, dashes or underscores
    pub name: Option<String>,
    /// Set it at this epoch, not at the present; - reads it from the output of "dsync merge --json"
    #[arg(long, value_name = "EPOCH", requires = "name")]
    pub at: Option<String>,
    /// List the checkpoints
    #[arg(long, conflicts_with_all = ["name", "delete"])]
    pub list: bool,
    /// Remove a checkpoint: what changed since is no longer kept for it
    #[arg(long, value_name = "NAME", conflicts_with = "name")]
    pub delete: Option<String>,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// `forget`.
#[derive(Debug, Args)]
pub struct Forget {
    /// A source, by path or by the name under which it is served; or a replica on this host
    pub what: String,
    /// Of a source, only the bookmark of this replica or checkpoint, as "dsync status" names it
    #[arg(value_name = "BOOKMARK")]
    pub bookmark: Option<String>,
    /// Only say what would be forgotten, and what that costs
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Where the replica keeps its lineage and journal
    #[arg(long, value_name = "DIR", conflicts_with = "bookmark")]
    pub journal_dir: Option<PathBuf>,
}

/// `changes`.
#[derive(Debug, Args)]
pub struct Changes {
    /// An image, a block device, or the name under which one is served
    #[arg(value_name = "SRC")]
    pub source: String,
    /// A checkpoint's name, or an epoch
    #[arg(long, value_name = "NAME|EPOCH")]
    pub since: String,
    /// Up to this epoch, or this checkpoint, not up to now
    #[arg(long, value_name = "NAME|EPOCH")]
    pub at: Option<String>,
    /// How to print them
    #[arg(long, value_enum, default_value_t = ChangesFormat::Ranges)]
    pub format: ChangesFormat,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// How changes are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ChangesFormat {
    /// A line OFFSET LENGTH for each range, in bytes
    Ranges,
    /// One object, with the epochs, the size and all ranges; the same as --json
    Json,
}

/// `merge`.
#[derive(Debug, Args)]
pub struct Merge {
    /// The replica
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// How the replica steps to the new epoch
    #[arg(long, value_enum, default_value_t = CommitArg::Journal)]
    pub commit: CommitArg,
    /// Begin a new replica where the file of one is gone, with a delta that is a whole copy
    #[arg(long)]
    pub create: bool,
    /// Where the replica keeps its lineage and journal
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

/// `inspect`.
#[derive(Debug, Args)]
pub struct Inspect {
    /// The delta; - for standard input
    pub delta: PathBuf,
}

/// `combine`.
#[derive(Debug, Args)]
pub struct Combine {
    /// The earlier delta
    pub first: PathBuf,
    /// The later delta
    pub second: PathBuf,
}

/// `verify`.
#[derive(Debug, Args)]
pub struct Verify {
    /// An image, a block device, or the name under which one is served
    #[arg(value_name = "SRC")]
    pub source: String,
    /// Where the replica lives; tls://HOST[:PORT]/DST without ssh
    #[arg(value_name = "[[USER@]HOST:]DST")]
    pub destination: String,
    /// Send what differs, and commit it
    #[arg(long)]
    pub repair: bool,
    /// Compare only these bytes, such as 1G:64M; may be given several times
    #[arg(long = "range", value_name = "OFFSET:LEN", value_parser = parse_range)]
    pub ranges: Vec<std::ops::Range<u64>>,
    /// Read at most this many bytes a second on each side, such as 50M; 16K at least
    #[arg(long, value_name = "RATE", value_parser = parse_size)]
    pub rate: Option<u64>,
    /// Go on behind what can't be read; the exit code is 1 then
    #[arg(long)]
    pub keep_going: bool,
    /// How blocks are compared
    #[arg(long, value_enum, default_value_t = HashArg::Blake3)]
    pub hash: HashArg,
    /// How a repair is committed
    #[arg(long, value_enum, default_value_t = CommitArg::Journal)]
    pub commit: CommitArg,
    #[command(flatten)]
    pub far: FarArgs,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// `recover`.
#[derive(Debug, Args)]
pub struct Recover {
    /// The replica
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Where the replica keeps its lineage and journal
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

/// `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Size of the scratch disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    pub size: u64,
    /// Keep the folder to look around in
    #[arg(long)]
    pub keep: bool,
}

/// `receive`.
#[derive(Debug, Args)]
pub struct Receive {
    /// Where to take sessions: an address with or without a port [default port: 10873]
    #[arg(long, value_name = "ADDRESS[:PORT]", requires = "into", value_parser = parse_listen)]
    pub listen: Option<std::net::SocketAddr>,
    /// A folder in which callers may make replicas, or a device for one; may be given several times
    #[arg(long, value_name = "PATH", requires = "listen")]
    pub into: Vec<PathBuf>,
    /// Let in only the key pinned under this name; may be given several times [default: all that are pinned]
    #[arg(long, value_name = "NAME", requires = "listen")]
    pub from: Vec<String>,
    /// Give up on a caller after this long without a sign of it; the shorter one of both sides holds
    #[arg(long, value_name = "TIME", value_parser = parse_timeout, default_value = "30s", requires = "listen")]
    pub timeout: Duration,
}

/// Reads an address with or without a port.
fn parse_listen(text: &str) -> Result<std::net::SocketAddr, String> {
    let alone = |text: &str| text.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    match (text.parse(), alone(text)) {
        (Ok(address), _) => Ok(address),
        (_, Ok(ip)) => Ok((ip, link::PORT).into()),
        _ => Err(format!("\"{text}\" is no address: write 192.0.2.7, 192.0.2.7:{0} or [::]:{0}", link::PORT)),
    }
}

/// `key`.
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// What to do; without it, the key is shown
    #[command(subcommand)]
    pub action: Option<KeyAction>,
}

/// What `key` does.
#[derive(Debug, Subcommand)]
pub enum KeyAction {
    /// Trust a key
    Trust {
        /// The host, as it will be called; HOST:PORT for one of several there; for a caller any name
        name: String,
        /// The line that "dsync key" prints there
        #[arg(required = true, num_args = 1..=3)]
        key: Vec<String>,
        /// Until when: 90d, 12h, or a date such as 2027-03-01
        #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
        expires: Option<u64>,
    },
    /// The keys that are trusted
    List,
    /// Trust a key no longer
    Forget {
        /// Its name
        name: String,
    },
}
