//! The command line: one definition for parsing, help, man pages and completions.

// Help texts have brackets that are no links.
#![allow(rustdoc::broken_intra_doc_links)]

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use compare::Hash;
use compare::rolling::Cycles;
use source::{CutOptions, FreezeMode, Told, ToldChanges};
use sync::{CommitMode, Keep, LiveOptions, Stages};

use crate::failure::Failure;
use crate::terms::address::MetricsAddress;
use crate::terms::bandwidth::Bandwidth;
use crate::terms::change_list;
use crate::terms::units::{
    self, parse_expiry, parse_factor, parse_range, parse_rate, parse_size, parse_time, parse_timeout,
};

/// What finds the changes, and how they are committed.
const METHOD: &str = "Method";
/// What stays of a replica's past.
const KEPT: &str = "What is kept";
/// How much of what may be used, and for how long.
const LIMITS: &str = "Limits";
/// How the other host is reached.
const REMOTE: &str = "Remote";
/// What few need.
const ADVANCED: &str = "Advanced";
/// What every command has.
const GLOBAL: &str = "Global options";

/// Keep a copy of a disk up to date by moving only the blocks that changed.
#[derive(Debug, Parser)]
#[command(
    name = "dsync",
    version,
    max_term_width = 100,
    after_help = "A first copy, and every later one:\n  \
        dsync serve /srv/vm.raw --socket /run/vm.sock\n      \
        a VM or any NBD client writes through it\n  \
        dsync sync /srv/vm.raw backup:/srv/vm.raw\n      \
        first everything, later what changed\n  \
        dsync status\n      \
        what is tracked, and what each replica lacks\n\n\
        A demonstration on a scratch disk, in under a minute:\n  \
        dsync demo\n\n\
        Exit codes: 0 done, 1 failed, 2 bad usage, 3 tracking lost where it is required, 4 refused (replica, \
        state or key), 5 verify found differences, 6 in use by another program (--wait waits), 130 \
        interrupted."
)]
pub(crate) struct Cli {
    /// State directory: records, keys, state of replicas on devices [default: $DSYNC_STATE_DIR, else /var/lib/dsync for root, else
    /// ~/.local/state/dsync]
    #[arg(long, global = true, value_name = "DIR", help_heading = GLOBAL)]
    pub state_dir: Option<PathBuf>,

    /// Print one JSON object per line on standard output: message_type status, error or summary
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub json: bool,

    /// Print more
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = GLOBAL)]
    pub verbose: u8,

    /// Print errors and warnings only
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = GLOBAL)]
    pub quiet: bool,

    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Bring a replica up to date, or create it
    #[command(after_help = "Examples:\n  \
        dsync sync /srv/vm.raw /backup/vm.raw\n      \
        on this host\n  \
        dsync sync vm backup:/srv/vm.raw\n      \
        a served disk, by its export name, over ssh\n  \
        dsync sync -n /srv/vm.raw backup:/srv/vm.raw\n      \
        what would be sent\n  \
        dsync sync --bwlimit 10M --compress /srv/vm.raw root@far:/dev/vg0/vm\n  \
        dsync sync --adopt /srv/vm.raw far:/srv/vm.raw\n      \
        take over a copy made by other means\n  \
        dsync sync --keep 24h/10m,7d/1h vm backup:/srv/vm.raw\n      \
        keep earlier moments: see \"dsync rewind\"\n  \
        dsync sync --method rolling dump.sql far:dump.sql\n      \
        a file with inserted or moved content\n  \
        dsync sync --digests /srv/vm.raw far:/srv/vm.raw\n      \
        compare without reading the replica\n  \
        dsync sync --wait=1h vm backup:/srv/vm.raw\n      \
        let another sync of it end first\n  \
        dsync sync --hook /etc/dsync/hold-guest vm backup:/srv/vm.raw\n      \
        a database is told of the cut\n  \
        dsync sync /srv/vm.raw tls://far/vm.raw\n      \
        without ssh: see \"dsync key\"\n  \
        dsync sync vm ssh://root@far:2222/srv/vm.raw\n      \
        a port; an IPv6 address is in brackets\n  \
        dsync sync prod:/srv/vm.raw /backup/vm.raw\n      \
        run by the host that has the replica\n  \
        dsync sync --adopt backup:/srv/vm.raw /srv/vm.raw\n      \
        restore a disk from its replica\n  \
        dsync sync vm near:/srv/vm.raw --save-there /srv/lost.delta\n      \
        the old source is back after a failover: save there what only it has,\n      \
        and send the differences\n  \
        dsync sync vm:web1 backup:/srv/vms/\n      \
        a VM of libvirt, with all its disks and its definition\n  \
        dsync sync qemu:/run/web1.qmp backup:/srv/vms/\n      \
        a VM without libvirt, by the monitor of its QEMU\n  \
        dsync sync --group db backup:/srv\n      \
        all disks of a group, as they were at one moment\n\n\
        One end may be on another host, where dsync is installed too. A path with a slash before its colon \
        is local. HOST:PATH and HOST:~/PATH are relative to the home folder there, ssh://HOST[:PORT]/PATH is \
        absolute. tls://HOST[:PORT]/PATH is a path in the first --into folder of \"dsync receive\" on that \
        host, or in the first --offer folder of \"dsync send\" if it is the source; tls://HOST//PATH is an \
        absolute path.\n\n\
        A block device is a new destination only if it looks blank, at its first and last MiB, at 512 \
        places between them, and where file systems keep copies of their superblocks. Overwrite one with other content with --adopt=overwrite.\n\n\
        --hook starts a command before the cut, the moment that the copy shows. It reads \"begin\" from \
        standard input, and prints \"ready\" when the disk may be cut; it reads \"cut\" after that, and \
        \"end\" after the commit (\"failed\" if there is none). If it ends before it is ready, or takes too \
        long, the sync ends before the cut. See docs/guide.md.\n\n\
        The summary says how changes were found: tracked, compared (and why), or copied.\n\n\
        With --group, all members of a group (see \"dsync serve --help\") are cut at one moment, and their \
        replicas are committed together: after any crash all of them are at the same moment. See \
        docs/groups.md.")]
    Sync(Sync),

    /// Keep a replica seconds behind until stopped
    #[command(after_help = "Examples:\n  \
        dsync mirror vm backup:/srv/vm.raw\n      \
        a served disk, over ssh\n  \
        dsync mirror --rpo 30s --compress vm backup:/srv/vm.raw\n      \
        a slow link: fewer and larger batches\n  \
        dsync mirror --bwlimit 08:00-18:00=10M,else=off vm backup:/srv/vm.raw\n      \
        no more than 10 MiB a second by day\n  \
        dsync mirror --json -v vm backup:/srv/vm.raw\n      \
        one JSON object a batch: blocks, times, lag\n  \
        dsync mirror --group db backup:/srv\n      \
        all disks of a group, committed together\n\n\
        The mirror begins with a sync. After that, changes are sent in batches. The replica commits each \
        batch whole or not at all, so it is always the disk as it was at one moment. The interval between \
        batches adapts to the speed of both sites and is at most half of --rpo. If the link or the peer \
        fails, the mirror reports it and retries; the source is not slowed down meanwhile.\n\n\
        While it mirrors, a first SIGINT or SIGTERM brings the replica up to date and stops; a second one \
        stops at once.\n\n\
        A disk tracked with \"dsync track\" is mirrored as one sync after another, each with a short freeze, \
        at most one a second, and no more than four within --rpo.\n\n\
        --hook (see \"dsync sync --help\") is held around the cuts of these syncs, and of a served disk \
        around the end of each epoch (--epoch), while batches go on. If it fails then, the mirror says so \
        and tries again at the next.\n\n\
        A group is mirrored by one common commit after another, at least two within --rpo and four a second \
        at most. With --hook, which is held around the common cut of all disks, they are a second apart at \
        least, and no more than four within --rpo. A hook that fails delays them: the replicas stay at the \
        commit before, and the mirror says so and tries again.")]
    Mirror(MirrorArgs),

    /// Serve disks to NBD clients and record their writes
    #[command(after_help = "Examples:\n  \
        dsync serve /srv/vm.raw --socket /run/vm.sock\n  \
        qemu-system-x86_64 … -device virtio-blk-pci,drive=vm \\\n      \
        -blockdev driver=nbd,node-name=vm,server.type=unix,\\\n      \
        server.path=/run/vm.sock,export=vm,reconnect-delay=30,discard=unmap\n  \
        nbdinfo --map=qemu:dirty-bitmap:dsync 'nbd+unix:///vm?socket=/run/vm.sock'\n  \
        nbdcopy 'nbd+unix:///vm@view?socket=/run/vm.sock' vm-now.raw\n      \
        the disk as it is now\n  \
        dsync serve /srv/vm.raw --socket /run/vm.sock --metrics 9750\n      \
        for Prometheus, on loopback\n  \
        dsync serve /srv/vm.raw@now --writable --socket /run/try.sock\n      \
        a rehearsal on a replica\n  \
        dsync serve /srv/vm.raw@41 --socket /run/41.sock\n      \
        a replica as it was at epoch 41\n  \
        dsync serve --group /srv/db@now --writable --socket /run/try.sock\n      \
        the replicas of a group, at one moment\n\n\
        Without --socket and --tcp it serves the socket that a service manager passes to it (LISTEN_FDS):\n  \
        nbdinfo [ dsync serve /srv/vm.raw ]\n      \
        serves for as long as nbdinfo runs\n\n\
        Several disks of one machine, whose replicas must be of one moment, are a group:\n  \
        dsync serve /srv/data.raw /srv/log.raw --group db --socket /run/db.sock\n  \
        dsync sync --group db backup:/srv\n\n\
        An export is named after its file, without the extension. NAME@view is a snapshot of the moment at \
        which the first client connected to it, and lasts until the last one disconnects. NAME@view.READER \
        is a private snapshot, shared by all connections that use this name. A snapshot offers the blocks \
        changed since each named checkpoint as qemu:dirty-bitmap:CHECKPOINT (see \"dsync checkpoint \
        --help\").\n\n\
        REPLICA@now is a replica at its present moment, REPLICA@EPOCH or 'REPLICA@10 minutes ago' at one \
        that --keep has kept (\"dsync rewind REPLICA\" lists them). Syncs and mirrors go on beneath: they \
        never wait for it or fail because of it. If what they replace cannot be kept for it, its clients get \
        I/O errors.")]
    Serve(Serve),

    /// Record the writes to a block device in use, or to an image on XFS or Btrfs
    #[command(after_help = "Examples:\n  \
        dsync track add /dev/sdb\n      \
        mounted or not; nothing is restarted\n  \
        dsync track add /srv/vm.qcow2\n      \
        running or not: each sync copies a clone (reflink) of the file\n  \
        dsync status /dev/sdb\n  \
        dsync track remove /dev/sdb\n  \
        dsync track add --group db /dev/sdb\n  \
        dsync track add --group db /dev/sdc\n  \
        dsync sync --group db backup:/srv/db\n  \
        dsync track add --with dm --meta /dev/sdc1 /dev/sdb\n      \
        as /dev/mapper/sdb-tracked\n\n\
        'dsync track remove' keeps what was recorded if nobody uses the disk: what is written to it afterwards \
        is in no record.\n\n\
        To keep the record across reboots (not for the disk of the root file system):\n  \
        systemctl enable --now \"dsync-track@$(systemd-escape -p /dev/sdb).service\"\n\n\
        The service runs 'dsync track save' after the last file system on it is unmounted, and 'dsync track \
        restore' before the first one is mounted. In between the disk is read-only. The record is trusted \
        only if nothing was written to it, and the disk or each of its partitions holds ext4, XFS or Btrfs, \
        on which a mount by another system shows.\n\n\
        Of an image, the clone of the last sync is kept beside it, in .NAME.dsync-clones. What differs \
        between that and the next one is what changed, whatever program wrote it. The file system tells it; \
        only what Btrfs has compressed is read and compared. What is overwritten between two syncs takes \
        space twice. Writers wait while a clone is made: some milliseconds, longer for a file in very many \
        pieces.")]
    Track(Track),

    /// Show sources, trackers and replicas, and what each replica lacks
    #[command(after_help = "Examples:\n  \
        dsync status\n  \
        dsync status /srv/vm.raw\n      \
        one disk in detail\n  \
        dsync status -v /srv/vm.raw\n      \
        every epoch of its history\n  \
        dsync status /srv/vm.raw --json\n  \
        dsync status --check --max-age 1h\n      \
        for a monitor: problems only\n  \
        dsync status --watch\n      \
        again and again, until Ctrl-C\n  \
        dsync status --prometheus\n      \
        metrics for node_exporter\n\n\
        BEHIND of a replica is how long ago it was up to date, and what was written since; a ? is for \
        changes that are not known. Of a replica whose source is on another host, it is the age of what it \
        holds.\n\n\
        --check reports sources whose changes are not known, so that the next sync compares; replicas that \
        are out of date; copies that a job in /etc/dsync is to make and that never began; and replicas on \
        this host that are incomplete, fuzzy, missing, were changed by other programs, or whose promotion \
        was interrupted. --check and --prometheus change nothing and take no lock: they never make a sync \
        fail. Of a replica on a block device they report changes by other programs after a dsync command \
        noticed them.")]
    Status(StatusArgs),

    /// Write the changed blocks to standard output
    #[command(after_help = "Examples:\n  \
        dsync extract /srv/vm.raw | ssh backup dsync merge /srv/vm.raw\n  \
        dsync extract /srv/vm.raw --since 41 > vm-41.delta\n  \
        dmextract mydev | ssh backup dmmerge /dev/mapper/mydev\n\n\
        Without --since, the delta begins at the oldest epoch that a replica is known to have; if none is \
        known, it holds the whole disk.\n\n\
        extract does not learn whether its output was merged. The next delta begins at the same epoch, so \
        deltas grow until a merge is confirmed. To confirm, pass the answer of the merge back, or name its \
        epoch:\n  \
        dsync extract vm | ssh backup dsync merge --json /srv/vm.raw |\n    \
        dsync checkpoint vm extract --at -\n  \
        dsync checkpoint vm extract --at 17")]
    Extract(Extract),

    /// Merge a delta from standard input into a replica
    #[command(after_help = "Examples:\n  \
        dsync merge /srv/vm.raw < vm-41.delta\n  \
        ssh prod dsync extract /srv/vm.raw | dsync merge /srv/vm.raw\n\n\
        The message names the epoch that the replica has now. To keep later deltas small, confirm it at the \
        source: dsync checkpoint SRC extract --at EPOCH (see \"dsync extract --help\").")]
    Merge(Merge),

    /// Describe a delta and check that it is whole
    #[command(after_help = "Example:\n  \
        dsync inspect vm-41.delta")]
    Inspect(Inspect),

    /// Set, list or delete named checkpoints, for incremental backups
    #[command(after_help = "Examples:\n  \
        dsync checkpoint vm backup\n      \
        record changes for \"backup\" from now on\n  \
        dsync checkpoint vm backup --at 17\n      \
        \"backup\" has stored epoch 17\n  \
        dsync checkpoint vm --list\n  \
        dsync checkpoint vm --delete backup\n  \
        dsync checkpoint vm\n      \
        end the epoch and print its number\n\n\
        Only its reader moves a checkpoint; the changes since are kept until then. Each snapshot of a served \
        disk (see \"dsync serve --help\") offers, for each checkpoint NAME, the blocks changed from NAME up \
        to that snapshot, as qemu:dirty-bitmap:NAME and as qemu:dirty-bitmap:ID, with the id of its epoch. \
        The description of the export begins with \"epoch NUMBER ID\". After it has stored the data, the \
        reader moves its checkpoint to that id with --at; a reader that failed does not, and gets the same \
        changes again the next time. \"dsync changes\" does this for disks that are not served. A source \
        that was restored repeats numbers, but never ids.\n\n\
        With --at - the epoch is read from the output of a merge:\n  \
        dsync extract vm --since far | ssh far dsync merge --json /srv/vm.raw |\n    \
        dsync checkpoint vm far --at -")]
    Checkpoint(CheckpointArgs),

    /// Forget a source, a replica, or a checkpoint
    #[command(after_help = "Examples:\n  \
        dsync forget vm backup:/srv/vm.raw\n      \
        a replica that no longer exists\n  \
        dsync forget vm backup\n      \
        a named checkpoint\n  \
        dsync forget -n /srv/vm.raw\n      \
        what it would cost to forget the source\n  \
        dsync forget /backup/vm.raw\n      \
        a replica on this host: it becomes an ordinary file\n  \
        dsync forget --replica /srv/vm.raw\n      \
        a disk that was restored from its replica\n  \
        dsync forget --group db /srv/log.raw\n      \
        it is not in the group db any more\n\n\
        Only the state kept by dsync is removed; disks and images are not touched. A source in use is \
        refused.")]
    Forget(Forget),

    /// Print the byte ranges changed since a checkpoint
    #[command(after_help = "Examples:\n  \
        dsync changes vm --since backup\n      \
        one line OFFSET LENGTH a range, in bytes\n  \
        dsync changes /dev/sdb --since backup --format json\n  \
        dsync changes vm --since 12 --at 17\n\n\
        Without --at, the epoch ends and the changes up to now are printed; the JSON has the number and the \
        id of that epoch. Store those bytes, then run: dsync checkpoint SRC NAME --at ID. Blocks of a disk in \
        use that are written meanwhile are read newer than that epoch, and listed again the next time. A \
        source that was restored repeats numbers, but never ids.\n\n\
        Exit code 3: the changes are not known (the reason is printed). Read the whole disk then.")]
    Changes(ChangesArgs),

    /// Combine two consecutive deltas into one
    #[command(after_help = "Example:\n  \
        dsync combine monday.delta tuesday.delta > both.delta")]
    Combine(Combine),

    /// Check a replica against its source by checksums
    #[command(after_help = "Examples:\n  \
        dsync verify /srv/vm.raw backup:/srv/vm.raw\n  \
        dsync verify --rate 50M vm backup:/srv/vm.raw\n      \
        read at most that much a second on each side\n  \
        dsync verify --range 0:1G --range 8G:1M vm /backup/vm.raw\n  \
        dsync verify --repair vm backup:/srv/vm.raw\n      \
        send and commit what differs\n\n\
        The source may be served and in use: blocks changed since the replica's epoch are left out. Where \
        those are not known (the output says why), every difference is reported, including new changes. With \
        --repair the replica keeps its epoch, and the moments that --keep has kept. Where the source's \
        changes since that epoch are not known, or others have changed the replica, it is brought to the \
        present epoch instead, and its earlier moments are given up. With --range it always keeps its epoch.\n\n\
        Exit code 0: no differences, or all repaired. 5: differences. 1: something could not be read.")]
    Verify(Verify),

    /// Complete or roll back an interrupted commit, then report the state of a replica
    #[command(after_help = "Examples:\n  \
        dsync recover /srv/vm.raw\n      \
        complete what was interrupted; every command that opens a replica does\n  \
        dsync recover --accept /srv/vm.raw\n      \
        \"cp -a\" brought it back, and its source is not there to compare it with:\n      \
        take it for what it was, with its past")]
    Recover(Recover),

    /// Bring a replica back to an earlier moment, or list the moments that were kept
    #[command(after_help = "Examples:\n  \
        dsync sync --keep 24h/10m,7d/1h vm backup:/srv/vm.raw\n      \
        keep moments from now on\n  \
        dsync rewind /srv/vm.raw\n      \
        list them: time, epoch, space\n  \
        dsync rewind /srv/vm.raw --to '10 minutes ago'\n  \
        dsync rewind /srv/vm.raw --to '2026-11-22 13:05'\n      \
        the last one that is not later\n  \
        dsync rewind /srv/vm.raw --to 41\n      \
        the state of epoch 41\n  \
        dsync rewind --group /srv/db --to 41\n      \
        all disks of a group, at common epoch 41\n\n\
        The time of a moment is that of its commit at the replica: what it holds is no newer. A rewind can \
        be interrupted at any time; run it again then. Later moments stay, so a rewind can be taken back.\n\n\
        The next \"dsync sync\" sends what the source has now. Stop its timer, or its mirror, before you \
        rewind.")]
    Rewind(Rewind),

    /// Make a replica the source: it keeps the id and goes on with the history
    #[command(after_help = "Examples:\n  \
        dsync promote /srv/vm.raw\n      \
        after \"dsync demote\" where the source was\n  \
        dsync promote --force /srv/vm.raw\n      \
        the source is gone, with what it wrote last\n  \
        dsync promote -n --force /srv/vm.raw\n      \
        which moment that would be\n  \
        dsync promote --group /srv/db\n      \
        all disks of a group, or none\n  \
        dsync promote --force --group /srv/vms --define web1.xml\n      \
        those of a VM, with its definition for \"virsh define\"\n  \
        dsync serve /srv/vm.raw --socket /run/vm.sock\n      \
        from then on it is a source like any other\n\n\
        A promoted replica accepts no deltas. Its term, which status shows, is one higher than that of the \
        source it followed; two sources with the same id that meet are told apart by it and refused, before \
        anything is written.\n\n\
        When the old source returns, sync to it with --save-there FILE: that saves what only it has, makes it \
        a replica, and sends what was written on either side since, and nothing else. docs/failover.md shows \
        all of it.")]
    Promote(Promote),

    /// Boot a VM from its replicas, without its networks, and throw away what it writes
    #[command(after_help = "Examples:\n  \
        dsync rehearse vm:web1 /srv/vms\n      \
        web1-rehearsal runs until Ctrl-C, or a shutdown in it\n  \
        dsync rehearse vm:web1@7 /srv/vms\n      \
        as it was at a kept moment: see \"dsync rewind --group\"\n  \
        dsync rehearse vm:web1 /srv/vms --for 5m --check /etc/dsync/web1-answers\n      \
        exit code 0 if that command succeeds within five minutes\n\n\
        Runs on the host of the replicas of \"dsync sync vm:NAME\", which needs libvirt and QEMU. Syncs to them \
        go on beneath. Networks, devices of the host, shared folders and disks that were not copied are left \
        out, and the VM gets another name and UUID.")]
    Rehearse(Rehearse),

    /// Make a source a replica, of the one that was or will be promoted
    #[command(after_help = "Examples:\n  \
        dsync demote /srv/vm.raw far:/srv/vm.raw\n      \
        a planned switch: sync a last time, and tell the replica\n  \
        dsync demote --job vm-far\n      \
        the same, with all that /etc/dsync/vm-far.conf says of it\n  \
        dsync demote /srv/vm.raw\n      \
        another disk has taken over: this one is to be written to no more\n  \
        dsync demote --group db far:/srv/db\n      \
        all disks of a group\n\n\
        Nothing may have the disk open: stop its server first. With DST, the replica there is brought up to \
        date and told that there was no more, so that it can be promoted without --force; if telling it \
        fails, run the command again.\n\n\
        Without DST, the disk only stops being a source: it keeps what was written to it. A sync to it from \
        the disk that took over says what that would overwrite, and takes --save-there or --discard-there.")]
    Demote(Demote),

    /// List the disks of this host, and the commands that follow each
    #[command(after_help = "Examples:\n  \
        dsync discover\n      \
        block devices; images that QEMU has open; those of libvirt and Proxmox\n  \
        dsync discover /srv /home/vms\n      \
        the images in these folders and below\n\n\
        It changes nothing, and starts nothing. Run it as root: others see neither which programs use an \
        image nor what the kernel can record.\n\n\
        Partitions are part of their disk, and what LVM, LUKS or RAID holds is part of what they make of it.")]
    Discover(Discover),

    /// Demonstrate dsync on a scratch disk, in under a minute
    Demo(Demo),

    /// Accept replicas from other sites, over TLS
    #[command(after_help = "Examples:\n  \
        dsync receive --listen 0.0.0.0 --into /srv/replicas\n  \
        dsync receive --listen 192.0.2.7:10873 --into /srv/replicas \\\n      \
        --into /dev/vg0/vm --from alpha\n\n\
        Only peers whose keys are pinned here (see \"dsync key\") are accepted. They can create and update \
        replicas in the given folders and on the given devices, and reach nothing else. Names that begin \
        with a dot need --hidden-files.\n\n\
        With --into but without --listen it serves the socket that a service manager passes to it \
        (LISTEN_FDS). Without either it uses standard input and output; \"dsync sync\" runs it this way over \
        ssh.")]
    Receive(Receive),

    /// Let other hosts pull from sources on this one
    #[command(after_help = "Examples:\n  \
        dsync send --listen 0.0.0.0 --offer /srv/vm.raw\n  \
        dsync send --listen 192.0.2.7:10874 --offer /srv/images --offer /dev/sdb \\\n      \
        --from backup\n\n\
        Only peers whose keys are pinned here (see \"dsync key\") are accepted. They can read the images and \
        devices given, and the images in the directories given, hidden ones only with --hidden-files, and \
        reach nothing else:\n  \
        dsync sync tls://prod//srv/vm.raw /srv/vm.raw      on the peer\n\n\
        With --offer but without --listen it serves the socket that a service manager passes to it \
        (LISTEN_FDS). Without either it uses standard input and output; \"dsync sync HOST:SRC DST\" runs it \
        this way over ssh.")]
    Send(Send),

    /// Show this site's key, and manage the keys it trusts
    #[command(after_help = "Examples:\n  \
        dsync key\n      \
        show this site's key; create it the first time\n  \
        dsync key trust backup dsync-ed25519 AAAA… --for push\n      \
        trust the host backup by this key only\n  \
        dsync key trust alpha dsync-ed25519 AAAA… --for serve --expires 90d\n  \
        dsync key list\n  \
        dsync key forget alpha\n\n\
        On the side that runs sync, NAME is the host as written in tls://HOST/PATH, or HOST:PORT. On the \
        side that runs receive, it is any name, used in the log and with --from.")]
    Key(KeyArgs),

    /// Run a job: a command whose source, destination and options are in a file
    #[command(after_help = "Examples:\n  \
        dsync run vm\n      \
        what /etc/dsync/vm.conf says\n  \
        dsync run vm --print\n      \
        the command line that it stands for\n  \
        dsync run vm -n --bwlimit 10M\n      \
        options given here replace those of the file\n  \
        systemctl enable --now dsync-sync@vm.timer\n      \
        daily; see docs/guide.md\n\n\
        The file /etc/dsync/vm.conf:\n  \
        # a copy at the other site\n  \
        command = sync\n  \
        source = /srv/vm.raw\n  \
        destination = backup:/srv/vm.raw\n  \
        bwlimit = 20M\n  \
        compress = yes\n\n\
        The command is serve, sync, mirror, verify, rehearse, receive or send. Keys are its long options without the \
        dashes; source and destination are its arguments. \"yes\" sets an option that needs no value, \"no\" \
        leaves it out. A key whose option may be repeated may be, too; for serve, each source is an image. A \
        line that begins with # is a comment.")]
    Run(Run),

    /// Write man pages into a folder
    #[command(hide = true)]
    Man {
        /// The folder
        folder: PathBuf,
    },

    /// Print the names of jobs or sources, for completions
    #[command(hide = true)]
    Names {
        /// Which
        what: Names,
    },

    /// Write completions for a shell to standard output
    #[command(hide = true)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// What can be named.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Names {
    /// Jobs, by their files
    Jobs,
    /// Sources, by their exports and paths
    Sources,
}

/// How a source is opened.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = ADVANCED)]
pub(crate) struct SourceArgs {
    /// Block size of the record: a power of two from 4K to 1M [default: 4K, more for disks over 4 TiB]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub block_size: Option<u64>,

    /// Trust the record of a block device that was not served for a while; changes are missed if anything wrote to it
    #[arg(long)]
    pub trust_device: bool,

    /// Accept that the source has become smaller; with --adopt, also that the copy is larger than the source, and is cut
    #[arg(long)]
    pub allow_shrink: bool,
}

/// Which moment of a source is read.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = METHOD)]
pub(crate) struct MomentArgs {
    /// Read this in place of SRC: a snapshot, a clone, a read-only device or a read-only export of an NBD server, by its URI, that shows a moment
    /// of it. SRC itself may be in use then, or be on another machine: any absolute path names it
    #[arg(long, value_name = "PATH")]
    pub moment: Option<PathBuf>,
    /// Name of the moment that is read, such as that of its snapshot: no two have the same
    #[arg(long = "as", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub called: Option<String>,
}

impl MomentArgs {
    /// What is told of the moment; `None` if nothing is.
    pub(crate) fn told(&self, changes: ToldChanges) -> Option<Told> {
        let told = Told { place: self.moment.clone(), name: self.called.clone(), changes, ..Told::default() };
        (told.place.is_some() || told.name.is_some()).then_some(told)
    }
}

/// What somebody else says of the changes of a source.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = METHOD)]
pub(crate) struct ToldArgs {
    #[command(flatten)]
    pub at: MomentArgs,
    /// Take what was written to SRC from this file, and not from a record of dsync: lines OFFSET LENGTH in bytes, each with its newline, or the
    /// output of "dsync changes --json" or "rbd diff --format json"; - for standard input. qemu:dirty-bitmap:NAME is the bitmap of that name which
    /// the export of --moment offers; a file called so is ./qemu:dirty-bitmap:NAME. What the list omits is not sent: "dsync verify" shows it
    #[arg(long, value_name = "FILE", requires_all = ["since", "called"])]
    pub changes: Option<PathBuf>,
    /// The moment from which the list counts, by the name that the last sync had with --as; without --changes, that moment itself, for another
    /// replica or after an interruption
    #[arg(long, value_name = "NAME", requires = "called")]
    pub since: Option<String>,
}

impl ToldArgs {
    /// Reads what is told of the moment; `None` if nothing is. Standard input can be read once.
    ///
    /// # Errors
    /// [`Failure`] if the list cannot be read.
    pub(crate) fn read(&self) -> Result<Option<Told>, Failure> {
        let changes = match (&self.changes, &self.since) {
            (Some(list), Some(since)) => change_list::read(list, since)?,
            (None, Some(since)) if Some(since) != self.at.called.as_ref() => {
                let how = "--since needs --changes, with what was written since that moment; or the same name as --as, if it is that moment itself";
                return Err(Failure::usage(how));
            }
            (None, Some(_)) => ToldChanges::Nothing,
            _ => ToldChanges::Unknown,
        };
        Ok(self.at.told(changes))
    }
}

/// What a command for a VM by its name leaves out, and where it takes room.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = METHOD)]
pub(crate) struct MachineArgs {
    /// With a VM, leave out this disk, by its target such as vdb; may be repeated
    #[arg(long, value_name = "DISK", value_parser = NonEmptyStringValueParser::new())]
    pub without: Vec<String>,
    /// With a VM, the folder in which QEMU keeps what the VM overwrites meanwhile [default: the folder of this QEMU in
    /// /var/lib/libvirt/qemu; without libvirt the state directory]
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,
}

impl MachineArgs {
    /// True if any of them was given.
    pub(crate) fn any(&self) -> bool {
        !self.without.is_empty() || self.scratch.is_some()
    }
}

/// Where metrics are served.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = ADVANCED)]
pub(crate) struct MetricsArg {
    /// Serve the metrics of this host to Prometheus over HTTP, those of "dsync status --prometheus": at a port on loopback,
    /// an address and a port, or unix:PATH
    #[arg(long, value_name = "ADDRESS", value_parser = MetricsAddress::parse)]
    pub metrics: Option<MetricsAddress>,
}

/// The job that names what a command is about.
#[derive(Debug, Clone, Args)]
pub(crate) struct JobArg {
    /// Take what is not given here from this job of "dsync run": SRC, DST, and how the other host is reached
    #[arg(long = "job", value_name = "JOB")]
    pub named: Option<String>,
}

/// Whether a command waits for what is in use.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = LIMITS)]
pub(crate) struct WaitArg {
    /// If another program uses the source or the replica, wait until it is free, up to this long [10m without a value]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "10m",
          value_parser = parse_time)]
    pub wait: Option<Duration>,
}

/// What a command does about what it depends on, and if it fails.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub wait: WaitArg,
    /// If this fails, run a command: DSYNC_JOB, DSYNC_EXIT_CODE and DSYNC_MESSAGE are in its environment
    #[arg(long, value_name = "COMMAND", help_heading = ADVANCED)]
    pub on_failure: Option<String>,
}

/// How the other host is reached.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = REMOTE)]
pub(crate) struct FarArgs {
    /// Send at most this much per second, such as 10M; by the hour, in local time: 08:00-18:00=10M,else=off
    #[arg(long, help_heading = LIMITS, value_name = "RATE|HOURS=RATE,...", value_parser = Bandwidth::parse)]
    pub bwlimit: Option<Bandwidth>,
    /// Read the source more slowly while its guest writes: so that the guest's writes take hardly longer than without a reader, but at least 8 MiB a second. A mirror does so in its first sync
    #[arg(long, help_heading = LIMITS)]
    pub polite: bool,
    /// Give up on the peer after this long without a reply; the shorter timeout of both sides applies. At a terminal, where ssh may ask for a password, the first connection may take longer [default: 30s]
    #[arg(long, help_heading = LIMITS, value_name = "TIME", value_parser = parse_timeout)]
    pub timeout: Option<Duration>,
    /// Remote shell with its options, split as a shell does: quote what has blanks [default: $DSYNC_RSH, else ssh]
    #[arg(short = 'e', long, value_name = "COMMAND")]
    pub rsh: Option<String>,
    /// Command that runs dsync on the far host [default: dsync]
    #[arg(long, value_name = "COMMAND")]
    pub remote_dsync: Option<String>,
    /// Connections to a tls:// host, 1 to 16 [default: one for every 20 ms of the round trip, 8 at most]
    #[arg(long, alias = "lanes", value_name = "COUNT", value_parser = units::number(1..=16u8))]
    pub connections: Option<u8>,
    /// Directory for the state and journal of the replica [default: beside a file, in the state directory for a device]
    #[arg(long, help_heading = ADVANCED, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

impl FarArgs {
    /// The remote shell with its options.
    pub(crate) fn rsh(&self) -> String {
        let variable = || std::env::var("DSYNC_RSH").ok().filter(|rsh| !rsh.is_empty());
        self.rsh.clone().or_else(variable).unwrap_or_else(|| "ssh".into())
    }

    /// The command on the far host.
    pub(crate) fn remote_dsync(&self) -> &str {
        self.remote_dsync.as_deref().unwrap_or("dsync")
    }

    /// The timeout for a silent peer.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(30))
    }
}

/// What of a replica's past is kept.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = KEPT)]
pub(crate) struct KeepArgs {
    /// Keep earlier moments of the replica for "dsync rewind": all of the last TIME, or with /TIME one of each such
    /// period; "none" drops them [default: as before; a new replica keeps none]
    #[arg(long, value_name = "TIME[/TIME],...")]
    pub keep: Option<Keep>,
    /// Keep the last COUNT moments too
    #[arg(long, value_name = "COUNT", value_parser = units::number(1..=100_000u64))]
    pub keep_last: Option<u64>,
    /// Drop the oldest moments when all take more than this [default: as much as the file system has left free]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub keep_bytes: Option<u64>,
}

impl KeepArgs {
    /// What is to be kept; `None` if nothing is said of it.
    pub(crate) fn keep(&self) -> Result<Option<Keep>, Failure> {
        let asked = self.keep.is_some() || self.keep_last.is_some();
        if self.keep_bytes.is_some() && !asked {
            return Err(Failure::usage(
                "--keep-bytes bounds what --keep or --keep-last keeps: give one of them",
            ));
        }
        let keep = Keep {
            last: self.keep_last.unwrap_or(0),
            bytes: self.keep_bytes,
            ..self.keep.clone().unwrap_or_default()
        };
        Ok(asked.then_some(keep))
    }
}

/// What an adopted destination may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AdoptArg {
    /// A copy of the source.
    #[value(hide = true)]
    Copy,
    /// Anything.
    Overwrite,
}

/// How a replica begins where there is a copy already, or where one is missing; and what it keeps of its past.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = METHOD)]
pub(crate) struct BeginArgs {
    /// Take over an existing copy: compare all of it, and overwrite what differs, also what only the copy has. One of whose data the larger
    /// part differs, and a replica with epochs that the source does not know, are refused without "=overwrite", and a file larger than the
    /// source without --allow-shrink
    #[arg(long, value_name = "overwrite", num_args = 0..=1, require_equals = true, default_missing_value = "copy", hide_possible_values = true)]
    pub adopt: Option<AdoptArg>,
    /// Accept the source as it is now, although its times show that it is not the content recorded last, but a backup that was put in its
    /// place, for example: compare everything, and overwrite what differs in the replica
    #[arg(long)]
    pub accept_source: bool,
    /// Create a new replica where one is missing for good
    #[arg(long)]
    pub create: bool,
    /// How the disk lies in the replica's file. One that is there stays as it is [default: qcow2 if a new file's name ends in
    /// .qcow2, else raw]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub format: Option<FormatArg>,
    #[command(flatten)]
    pub past: KeepArgs,
}

impl BeginArgs {
    /// What is at the destination is taken over.
    pub(crate) fn adopts(&self) -> bool {
        self.adopt.is_some()
    }

    /// Whatever it holds.
    pub(crate) fn overwrites(&self) -> bool {
        self.adopt == Some(AdoptArg::Overwrite)
    }
}

/// What becomes of what only the destination has.
#[derive(Debug, Args)]
#[command(next_help_heading = METHOD)]
pub(crate) struct ConsentArgs {
    /// Save what was written to DST since it went its own way as a delta in this new file on its host, and overwrite it; with --group, as
    /// DISK.delta for each disk in this folder there
    #[arg(long, value_name = "FILE", conflicts_with = "discard_there")]
    pub save_there: Option<PathBuf>,
    /// Overwrite what was written to DST since it went its own way, without saving it
    #[arg(long)]
    pub discard_there: bool,
}

impl ConsentArgs {
    /// What is consented to, of a destination that is on another host or not.
    ///
    /// # Errors
    /// [`Failure::usage`] for a relative path on another host.
    pub(crate) fn give_up(&self, is_far: bool) -> Result<Option<sync::GiveUp>, Failure> {
        match &self.save_there {
            None => Ok(self.discard_there.then_some(sync::GiveUp::Discard)),
            Some(file) if is_far && !file.is_absolute() => Err(Failure::usage(format!(
                "--save-there names a file on the destination's host: give the absolute path of {}",
                file.display()
            ))),
            Some(file) => match std::path::absolute(file) {
                Ok(file) => Ok(Some(sync::GiveUp::Save(file))),
                Err(error) => Err(Failure::failed(format!("cannot find {}: {error}", file.display()))),
            },
        }
    }
}

/// Whether data is compressed.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = REMOTE)]
pub(crate) struct CompressArg {
    /// Compress with zstd, at a level from 1 to 19
    #[arg(long = "compress", value_name = "LEVEL", num_args = 0..=1, require_equals = true, default_missing_value = "1",
          value_parser = units::number(1..=19i32))]
    pub level: Option<i32>,
}

/// What is held open around the cut.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = ADVANCED)]
pub(crate) struct HookArgs {
    /// Hold a command open around the cut: it reads "begin", answers "ready", and reads "cut" and "end" (or "failed")
    #[arg(long, value_name = "COMMAND")]
    pub hook: Option<String>,
    /// End the sync if the hook is not ready after this long [default: 60s]
    #[arg(long, value_name = "TIME", value_parser = parse_time, requires = "hook")]
    pub hook_limit: Option<Duration>,
}

/// How a disk is followed and cut; most of it is for those tracked in the kernel.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = ADVANCED)]
pub(crate) struct LiveArgs {
    /// For a tracked disk: whether to freeze its file systems for the last, short pass [default: auto]
    #[arg(long, value_enum)]
    pub freeze: Option<FreezeArg>,
    /// For a tracked disk: thaw after this long whatever happens, and fail; 1s to 5m [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = units::parse_freeze)]
    pub freeze_limit: Option<Duration>,
    /// For a tracked disk: most passes over changed blocks before the last one [default: 8]
    #[arg(long, hide = true, value_name = "COUNT", value_parser = units::number(1..=100u32))]
    pub passes: Option<u32>,
    /// Send the snapshot that is open as NAME@view instead of the present state
    #[arg(long, hide = true, conflicts_with = "group")]
    pub at_view: bool,
    #[command(flatten)]
    pub hook: HookArgs,
}

impl LiveArgs {
    /// The cut options.
    pub(crate) fn options(&self) -> LiveOptions {
        let freeze = match self.freeze.unwrap_or(FreezeArg::Auto) {
            FreezeArg::Auto => FreezeMode::Auto,
            FreezeArg::Never => FreezeMode::Never,
            FreezeArg::Require => FreezeMode::Require,
        };
        let usual = CutOptions::default();
        let limit = self.freeze_limit.unwrap_or(usual.limit);
        LiveOptions { passes: self.passes.unwrap_or(8), cut: CutOptions { freeze, limit, ..usual } }
    }

    /// Which of them were given.
    pub(crate) fn given(&self) -> [(&'static str, bool); 3] {
        [
            ("--passes", self.passes.is_some()),
            ("--freeze", self.freeze.is_some()),
            ("--freeze-limit", self.freeze_limit.is_some()),
        ]
    }
}

/// When a mirror cuts batches.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = ADVANCED)]
pub(crate) struct IntervalArgs {
    /// The first interval between batches [default: 30ms]
    #[arg(conflicts_with = "group", long, hide = true, value_name = "TIME", value_parser = parse_time)]
    pub interval: Option<Duration>,
    /// The shortest interval between batches [default: 10ms]
    #[arg(conflicts_with = "group", long, hide = true, value_name = "TIME", value_parser = parse_time)]
    pub min_interval: Option<Duration>,
    /// How fast the interval adapts to the time this site needs for a batch, 0 to 1 [default: 0.5]
    #[arg(conflicts_with = "group", long, hide = true, value_name = "FACTOR", value_parser = parse_factor)]
    pub alpha: Option<f64>,
    /// How fast the interval adapts to the time the replica's site needs, 0 to 1 [default: 0.5]
    #[arg(conflicts_with = "group", long, hide = true, value_name = "FACTOR", value_parser = parse_factor)]
    pub beta: Option<f64>,
    /// Keep the first interval
    #[arg(long, hide = true)]
    pub fixed_interval: bool,
}

/// `mirror`.
#[derive(Debug, Args)]
pub(crate) struct MirrorArgs {
    /// Served image or its export name, or a tracked device; vm:NAME for a VM on this host with all its disks, as libvirt calls it; qemu:SOCKET for one
    /// without libvirt, by its QMP monitor
    #[arg(value_name = "SRC", value_parser = NonEmptyStringValueParser::new())]
    pub source: String,
    /// Path of the replica; tls://HOST[:PORT]/DST without ssh. With vm:NAME, and with --group, which has no SRC, the folder of the replicas
    #[arg(value_name = "[[USER@]HOST:]DST", required_unless_present = "group")]
    pub destination: Option<String>,
    /// Mirror all members of this group: their replicas are always of one moment
    #[arg(long, value_name = "NAME", conflicts_with_all = ["epoch", "journal_dir"])]
    pub group: Option<String>,
    #[command(flatten)]
    pub begin: BeginArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// How far the replica may fall behind while the link keeps up
    #[arg(help_heading = LIMITS, long, value_name = "TIME", value_parser = parse_time, default_value = "5s")]
    pub rpo: Duration,
    #[command(flatten)]
    pub far: FarArgs,
    #[command(flatten)]
    pub compress: CompressArg,
    #[command(flatten)]
    pub run: RunArgs,
    /// Send at most this much of changed blocks per second, by longer intervals; blocks written repeatedly are sent once
    #[arg(conflicts_with = "group", long, hide = true, value_name = "RATE", value_parser = parse_rate)]
    pub rate: Option<u64>,
    /// How often an epoch ends, at least: after a crash of the source, what was written since then is sent again. One also ends in each period of
    /// which --keep keeps a moment [default: 60s]
    #[arg(help_heading = ADVANCED, long, value_name = "TIME", value_parser = parse_time)]
    pub epoch: Option<Duration>,
    #[command(flatten)]
    pub hook: HookArgs,
    #[command(flatten)]
    pub batches: IntervalArgs,
    /// How both sites share their work among threads
    #[arg(long, value_enum, default_value_t = StagesArg::Adaptive, hide = true)]
    pub stages: StagesArg,
    #[command(flatten)]
    pub metrics: MetricsArg,
}

/// The models of pipelining that paper 004 measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StagesArg {
    /// As many threads as are measured to be useful
    Adaptive,
    /// One thread per site
    Serial,
    /// One thread per stage
    Fine,
    /// Two threads on one batch
    Threads,
    /// Both
    Hybrid,
}

impl From<StagesArg> for Stages {
    fn from(arg: StagesArg) -> Stages {
        match arg {
            StagesArg::Adaptive => Stages::ADAPTIVE,
            StagesArg::Serial => Stages::SERIAL,
            StagesArg::Fine => Stages::FINE,
            StagesArg::Threads => Stages::THREADS,
            StagesArg::Hybrid => Stages::HYBRID,
        }
    }
}

/// `sync`.
///
/// More than fifteen fields: they are the options of the command.
#[derive(Debug, Args)]
pub(crate) struct Sync {
    /// Image, block device, or export name, on this host or on another; vm:NAME for a VM on this host with all its disks, as libvirt calls it; qemu:SOCKET for one
    /// without libvirt, by its QMP monitor
    #[arg(value_name = "[[USER@]HOST:]SRC")]
    pub source: String,
    /// Path of the replica; tls://HOST[:PORT]/DST without ssh. With vm:NAME, and with --group, which has no SRC, the folder of the replicas
    #[arg(value_name = "[[USER@]HOST:]DST", required_unless_present = "group")]
    pub destination: Option<String>,
    /// Bring the replicas of all members of this group to one moment; they have the names of the members' files
    #[arg(long, value_name = "NAME", conflicts_with_all = ["keep_going", "digests", "journal_dir", "moment", "called", "changes"])]
    pub group: Option<String>,
    /// Print what would be sent, and change nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// How to find changed blocks
    #[arg(help_heading = METHOD, long, value_enum, default_value_t = MethodArg::Auto)]
    pub method: MethodArg,
    /// How the replica is updated
    #[arg(help_heading = METHOD, long, value_enum, default_value_t = CommitArg::Journal)]
    pub commit: CommitArg,
    /// Keep digests of the replica, so that the next compare need not read it: in this file on the replica's host [default: in its
    /// state directory]
    #[arg(help_heading = METHOD, long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    pub digests: Option<String>,
    /// Skip unreadable blocks and exit with code 1; unreadable blocks of the source leave the replica incomplete, those of the
    /// replica are rewritten
    #[arg(help_heading = METHOD, long)]
    pub keep_going: bool,
    /// How cycles of copies are broken, for --method rolling in place
    #[arg(long, value_enum, default_value_t = CyclesArg::Trim, hide = true)]
    pub cycles: CyclesArg,
    #[command(flatten)]
    pub begin: BeginArgs,
    #[command(flatten)]
    pub told: ToldArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub consent: ConsentArgs,
    #[command(flatten)]
    pub far: FarArgs,
    #[command(flatten)]
    pub compress: CompressArg,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub live: LiveArgs,
    #[command(flatten)]
    pub open: SourceArgs,
    /// Checksum for comparing blocks [default: blake3]
    #[arg(help_heading = ADVANCED, long, value_enum)]
    pub hash: Option<HashArg>,
}

/// How to find the changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum MethodArg {
    /// Use the tracker's record; fall back to compare where it has a gap, and to copy for a new replica
    Auto,
    /// Use the tracker's record only; fail where it has a gap
    Tracked,
    /// Compare checksums of all blocks on both sides
    Compare,
    /// Find blocks by rolling checksums, wherever they are: for files with moved content
    Rolling,
    /// Send all allocated blocks
    Copy,
}

/// The hash of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HashArg {
    /// BLAKE3: cryptographic, collisions cannot be constructed
    Blake3,
    /// XXH3-128: faster, not collision-resistant; only if no writer is malicious
    Xxh3,
}

impl From<HashArg> for Hash {
    fn from(arg: HashArg) -> Hash {
        match arg {
            HashArg::Blake3 => Hash::Blake3,
            HashArg::Xxh3 => Hash::Xxh3,
        }
    }
}

/// What to send of copies that overwrite each other's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CyclesArg {
    /// As little as possible
    Trim,
    /// One of them, whole
    Delete,
}

impl From<CyclesArg> for Cycles {
    fn from(arg: CyclesArg) -> Cycles {
        match arg {
            CyclesArg::Trim => Cycles::Trim,
            CyclesArg::Delete => Cycles::Delete,
        }
    }
}

/// Whether file systems on a live disk may be frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FreezeArg {
    /// Freeze mounted file systems; without one, wait for a moment without writes
    Auto,
    /// Do not freeze: the replica may mix several moments, and is marked fuzzy
    Never,
    /// Fail if there is no file system to freeze
    Require,
}

/// The commit mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CommitArg {
    /// Store the whole delta, then merge it: the replica is never between two states
    Journal,
    /// Write blocks as they arrive: fastest; the replica is incomplete meanwhile
    InPlace,
    /// Merge into a clone and swap it in (XFS, Btrfs): moved blocks are shared instead of written
    Reflink,
}

impl From<CommitArg> for CommitMode {
    fn from(arg: CommitArg) -> CommitMode {
        match arg {
            CommitArg::Journal => CommitMode::Journal,
            CommitArg::InPlace => CommitMode::InPlace,
            CommitArg::Reflink => CommitMode::Reflink,
        }
    }
}

/// `serve`.
#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// Raw or qcow2 images, or block devices; REPLICA@now or REPLICA@EPOCH for a replica at one moment
    #[arg(required_unless_present = "group", value_name = "IMAGE")]
    pub images: Vec<PathBuf>,
    #[command(flatten)]
    pub places: PlaceArgs,
    /// Refuse writes, and record nothing
    #[arg(long, conflicts_with_all = ["block_size", "trust_device", "allow_shrink", "view_limit", "polite"])]
    pub read_only: bool,
    /// Let clients write to REPLICA@MOMENT: to a scratch file, which is thrown away at the end
    #[arg(long, conflicts_with = "read_only")]
    pub writable: bool,
    /// Folder of the scratch file [default: the folder of the replica's state]
    #[arg(long, value_name = "DIR", requires = "writable")]
    pub overlay: Option<PathBuf>,
    /// Make these images a group: "dsync sync --group" brings replicas of all of them to one moment. Without images, DIR@now or
    /// DIR@EPOCH: the replicas of the group in this folder, as they were at one common epoch
    #[arg(long, value_name = "NAME|DIR@EPOCH", conflicts_with = "read_only")]
    pub group: Option<String>,
    /// Limit for old data kept for a snapshot; beyond it the snapshot fails
    #[arg(help_heading = LIMITS, long, value_name = "SIZE", value_parser = parse_size, default_value = "16G")]
    pub view_limit: u64,
    /// Have clients that read NAME@view give way while the disk is written to: they read 8 MiB a second at least
    #[arg(help_heading = LIMITS, long)]
    pub polite: bool,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub metrics: MetricsArg,
    #[command(flatten)]
    pub open: SourceArgs,
    /// Serve the bytes of the file as they are, even if it looks like qcow2 or another container, or the disk in a qcow2 file [default: what
    /// the file seems to be; of a known source, what it is]
    #[arg(help_heading = ADVANCED, long, value_enum, value_name = "FORMAT")]
    pub format: Option<FormatArg>,
    /// Bypass the page cache (O_DIRECT)
    #[arg(help_heading = ADVANCED, long)]
    pub direct: bool,
}

/// Where NBD clients connect.
#[derive(Debug, Args)]
pub(crate) struct PlaceArgs {
    /// The Unix socket to listen on
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Mode of the socket's file, in octal: 660 also lets its group connect, 666 every user
    #[arg(long, value_name = "MODE", value_parser = parse_mode, requires = "socket", default_value = "600")]
    pub socket_mode: u32,
    /// A loopback address and port to listen on, such as 127.0.0.1:10809; needs --allow-local-users
    #[arg(long, value_name = "ADDRESS", value_parser = parse_tcp)]
    pub tcp: Option<std::net::SocketAddr>,
    /// Let every user of this host read and write the disks over TCP, where nobody is asked who they are
    #[arg(long)]
    pub allow_local_users: bool,
}

/// How a disk lies in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Byte for byte
    Raw,
    /// In QEMU's format
    Qcow2,
}

impl From<FormatArg> for device::Format {
    fn from(format: FormatArg) -> device::Format {
        match format {
            FormatArg::Raw => device::Format::Raw,
            FormatArg::Qcow2 => device::Format::Qcow2,
        }
    }
}

/// `track`.
#[derive(Debug, Args)]
pub(crate) struct Track {
    /// What to do
    #[command(subcommand)]
    pub action: TrackAction,
}

/// What `track` does.
#[derive(Debug, Subcommand)]
pub(crate) enum TrackAction {
    /// Start to track a disk, a partition, any other block device, or an image on XFS or Btrfs
    Add {
        /// The block device, or the image
        #[arg(value_name = "DISK")]
        device: PathBuf,
        /// The tracker of a block device [default: bpf]
        #[arg(long, value_enum)]
        with: Option<With>,
        /// Block size of the record: a power of two from 4K to 1M [default: 4K, more for disks over 4 TiB]
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        block_size: Option<u64>,
        /// Take the disk into this group: "dsync sync --group" brings replicas of all its disks to one moment
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
        /// With dm: name of the new device, /dev/mapper/NAME [default: name of the device and "-tracked"]
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// With dm: device for metadata, so that the record survives reboots and crashes
        #[arg(long, value_name = "DEV")]
        meta: Option<PathBuf>,
    },
    /// Stop tracking, and discard the record, or the clone that is kept
    Remove {
        /// The block device, or the image
        #[arg(value_name = "DISK")]
        device: PathBuf,
    },
    /// Save the record of a device that is no longer in use, and make it read-only, for 'restore' after a reboot
    Save {
        /// The block device
        #[arg(value_name = "DEV")]
        device: PathBuf,
    },
    /// Continue from the saved record; if it cannot be trusted, start again
    Restore {
        /// The block device
        #[arg(value_name = "DEV")]
        device: PathBuf,
    },
}

/// The kind of tracker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum With {
    /// BPF programs in the kernel: nothing to install
    Bpf,
    /// The device-mapper target dm-track, as a new device; its module must be installed
    Dm,
}

/// `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// A source, a replica, or a VM as vm:NAME, in detail [default: a table of all that this host knows; in detail with -v]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub path: Option<String>,
    /// Print one line per problem, or "OK"; the exit code is 1 if there is a problem
    #[arg(long)]
    pub check: bool,
    /// With --check or --watch, report replicas that were last brought up to date longer ago, if anything was written since
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub max_age: Option<Duration>,
    /// Print problems and the table every TIME until interrupted, cut to the screen [2s without a value]
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, default_missing_value = "2",
          value_parser = units::parse_period, conflicts_with_all = ["check", "prometheus", "json", "quiet"])]
    pub watch: Option<Duration>,
    /// Print metrics for the textfile collector of node_exporter
    #[arg(long, conflicts_with_all = ["path", "check", "json", "quiet"])]
    pub prometheus: bool,
}

/// `extract`.
#[derive(Debug, Args)]
pub(crate) struct Extract {
    /// Image, block device, or export name
    #[arg(value_name = "SRC", value_parser = NonEmptyStringValueParser::new())]
    pub source: String,
    /// Epoch of the replica, or name of a checkpoint; 0 for the whole disk
    #[arg(long, value_name = "EPOCH|NAME")]
    pub since: Option<String>,
    #[command(flatten)]
    pub compress: CompressArg,
    /// Write at most this much per second
    #[arg(help_heading = LIMITS, long, value_name = "RATE", value_parser = parse_rate)]
    pub bwlimit: Option<u64>,
    #[command(flatten)]
    pub wait: WaitArg,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// `checkpoint`.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// Image, block device, or export name
    #[arg(value_name = "SRC", value_parser = NonEmptyStringValueParser::new())]
    pub source: String,
    /// Checkpoint to set: a letter, then letters, digits, dots, dashes or underscores
    pub name: Option<String>,
    /// Epoch to set it at, by its number or id [default: the present]; - reads it from the output of "dsync merge --json"
    #[arg(long, value_name = "EPOCH", requires = "name")]
    pub at: Option<String>,
    /// List the checkpoints
    #[arg(long, conflicts_with_all = ["name", "delete", "block_size", "trust_device", "allow_shrink"])]
    pub list: bool,
    /// Delete a checkpoint, and the changes kept for it
    #[arg(long, value_name = "NAME", conflicts_with_all = ["name", "block_size", "trust_device", "allow_shrink"])]
    pub delete: Option<String>,
    #[command(flatten)]
    pub wait: WaitArg,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// `forget`.
#[derive(Debug, Args)]
pub(crate) struct Forget {
    /// Source, by path, export name or id; vm:NAME for all disks of a VM; or a replica on this host
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub what: String,
    /// Forget only this replica or checkpoint of the source, as "dsync status" names it; with vm:NAME, the folder of its replicas
    #[arg(value_name = "BOOKMARK")]
    pub bookmark: Option<String>,
    /// Print what would be forgotten and what it costs, and change nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    /// Forget only that the source, or the replica, is in this group
    #[arg(long, value_name = "NAME", conflicts_with_all = ["bookmark", "replica", "journal_dir"])]
    pub group: Option<String>,
    /// Of a disk that is a source and a replica, forget the replica: it becomes an ordinary disk, with its record
    #[arg(long, conflicts_with = "bookmark")]
    pub replica: bool,
    /// Directory for the state and journal of the replica
    #[arg(long, value_name = "DIR", conflicts_with = "bookmark")]
    pub journal_dir: Option<PathBuf>,
}

/// `changes`.
#[derive(Debug, Args)]
pub(crate) struct ChangesArgs {
    /// Image, block device, or export name
    #[arg(value_name = "SRC", value_parser = NonEmptyStringValueParser::new())]
    pub source: String,
    /// Name of a checkpoint, or the number or id of an epoch
    #[arg(long, value_name = "NAME|EPOCH")]
    pub since: String,
    /// Up to this epoch or checkpoint [default: now]
    #[arg(long, value_name = "NAME|EPOCH")]
    pub at: Option<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = ChangesFormat::Ranges)]
    pub format: ChangesFormat,
    #[command(flatten)]
    pub wait: WaitArg,
    #[command(flatten)]
    pub open: SourceArgs,
}

/// How changes are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ChangesFormat {
    /// One line OFFSET LENGTH per range, in bytes
    Ranges,
    /// One object, with the epochs, the size and all ranges; the same as --json
    Json,
}

/// `merge`.
#[derive(Debug, Args)]
pub(crate) struct Merge {
    /// Path of the replica
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// How the replica is updated
    #[arg(help_heading = METHOD, long, value_enum, default_value_t = CommitArg::Journal)]
    pub commit: CommitArg,
    /// Create a new replica where the file of one is missing, from a delta of the whole disk
    #[arg(help_heading = METHOD, long)]
    pub create: bool,
    #[command(flatten)]
    pub past: KeepArgs,
    /// Directory for the state and journal of the replica
    #[arg(help_heading = ADVANCED, long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

/// `inspect`.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Delta file; - for standard input
    pub delta: PathBuf,
}

/// `combine`.
#[derive(Debug, Args)]
pub(crate) struct Combine {
    /// The earlier delta
    pub first: PathBuf,
    /// The later delta
    pub second: PathBuf,
}

/// `verify`.
#[derive(Debug, Args)]
pub(crate) struct Verify {
    #[command(flatten)]
    pub job: JobArg,
    /// Image, block device, or export name, on this host or on another; vm:NAME for a VM on this host with all its disks, as libvirt calls it; qemu:SOCKET for one
    /// without libvirt, by its QMP monitor
    #[arg(value_name = "[[USER@]HOST:]SRC")]
    pub source: String,
    /// Path of the replica; tls://HOST[:PORT]/DST without ssh. With vm:NAME, the folder of the replicas
    #[arg(value_name = "[[USER@]HOST:]DST")]
    pub destination: String,
    /// Send and commit what differs
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub told: MomentArgs,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Compare only this range of bytes, such as 1G:64M; may be repeated
    #[arg(long = "range", value_name = "OFFSET:LEN", value_parser = parse_range)]
    pub ranges: Vec<std::ops::Range<u64>>,
    /// Read at most this much per second on each side, such as 50M; at least 16K
    #[arg(help_heading = LIMITS, long, value_name = "RATE", value_parser = parse_rate)]
    pub rate: Option<u64>,
    /// Skip unreadable blocks and exit with code 1
    #[arg(long)]
    pub keep_going: bool,
    #[command(flatten)]
    pub far: FarArgs,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub open: SourceArgs,
    /// Checksum for comparing blocks
    #[arg(help_heading = ADVANCED, long, value_enum, default_value_t = HashArg::Blake3)]
    pub hash: HashArg,
    /// How the replica is updated by --repair [default: journal]
    #[arg(help_heading = ADVANCED, long, value_enum, requires = "repair")]
    pub commit: Option<CommitArg>,
}

/// `recover`.
#[derive(Debug, Args)]
pub(crate) struct Recover {
    /// Path of the replica
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Take a replica that was changed outside dsync for what it was. You say that nothing was written to it; it is refused if the time of its
    /// content, or its size, is another one. Where its source is there, use "dsync verify --repair", which compares it
    #[arg(long)]
    pub accept: bool,
    /// Directory for the state and journal of the replica
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

/// `rewind`.
#[derive(Debug, Args)]
pub(crate) struct Rewind {
    #[command(flatten)]
    pub job: JobArg,
    /// Path of the replica; with --group, the folder of the replicas
    #[arg(value_name = "DST")]
    pub destination: PathBuf,
    /// Bring all replicas of the group in this folder back to a common epoch, or list those that were kept
    #[arg(long, conflicts_with = "journal_dir")]
    pub group: bool,
    /// Moment to go back to: an epoch (with "+", the state ahead of it that a rewind left), an id where several have that number, a
    /// time in UTC, or how long ago; omit it to list the moments
    #[arg(long, value_name = "EPOCH|ID|TIME")]
    pub to: Option<String>,
    /// Print what would be done, and change nothing
    #[arg(short = 'n', long, requires = "to")]
    pub dry_run: bool,
    #[command(flatten)]
    pub wait: WaitArg,
    /// Directory for the state and journal of the replica
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

/// `promote`.
#[derive(Debug, Args)]
pub(crate) struct Promote {
    #[command(flatten)]
    pub job: JobArg,
    /// Path of the replica; with --group, the folder of the replicas
    #[arg(value_name = "REPLICA")]
    pub replica: PathBuf,
    /// Promote all replicas of the group in this folder, which must be at one common epoch
    #[arg(long, conflicts_with = "journal_dir")]
    pub group: bool,
    /// Give up what the source wrote after the replica's epoch
    #[arg(long)]
    pub force: bool,
    /// With --group, of a VM that was copied by "dsync sync vm:NAME": write its definition to this file, with the paths of these
    /// replicas, for "virsh define"
    #[arg(long, value_name = "FILE", requires = "group")]
    pub define: Option<PathBuf>,
    /// Print what would be done and change nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub wait: WaitArg,
    /// Directory for the state and journal of the replica
    #[arg(long, value_name = "DIR")]
    pub journal_dir: Option<PathBuf>,
}

/// `rehearse`.
#[derive(Debug, Args)]
pub(crate) struct Rehearse {
    /// The VM, by the name under which it was synced; with @EPOCH, @TIME or @AGE as it was at a kept moment
    #[arg(value_name = "vm:NAME[@MOMENT]")]
    pub source: String,
    /// The folder of its replicas
    #[arg(value_name = "DIR")]
    pub destination: PathBuf,
    /// Run a command once the VM runs, with its name in DSYNC_VM, and end with its result: 0 if it succeeds, else 1
    #[arg(long, value_name = "COMMAND")]
    pub check: Option<String>,
    /// End after this time; a --check that has not ended by then has failed
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
    pub lasts: Option<Duration>,
    /// Folder of the scratch files, to which the VM writes [default: those of the replicas' state]
    #[arg(long, value_name = "DIR")]
    pub overlay: Option<PathBuf>,
    #[command(flatten)]
    pub run: RunArgs,
}

/// `demote`.
#[derive(Debug, Args)]
pub(crate) struct Demote {
    #[command(flatten)]
    pub job: JobArg,
    /// Image, block device, or export name
    #[arg(value_name = "SRC", required_unless_present_any = ["group", "named"])]
    pub source: Option<String>,
    /// Path of the replica that will be promoted; tls://HOST[:PORT]/DST without ssh. With --group, which has no SRC, the folder of the
    /// replicas
    #[arg(value_name = "[[USER@]HOST:]DST")]
    pub destination: Option<String>,
    /// Demote all members of this group together
    #[arg(long, value_name = "NAME", conflicts_with_all = ["own_journal_dir", "journal_dir"])]
    pub group: Option<String>,
    /// Print what would be done and change nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub wait: WaitArg,
    #[command(flatten)]
    pub compress: CompressArg,
    #[command(flatten)]
    pub far: FarArgs,
    #[command(flatten)]
    pub open: SourceArgs,
    /// Directory for the state and journal of the replica that the source becomes
    #[arg(help_heading = ADVANCED, long, value_name = "DIR")]
    pub own_journal_dir: Option<PathBuf>,
}

/// `discover`.
#[derive(Debug, Args)]
pub(crate) struct Discover {
    /// Folder with images, which is searched with those below it
    #[arg(value_name = "FOLDER")]
    pub folders: Vec<PathBuf>,
}

/// `demo`.
#[derive(Debug, Args)]
pub(crate) struct Demo {
    /// Size of the scratch disk
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "1G")]
    pub size: u64,
    /// Keep its files
    #[arg(long)]
    pub keep: bool,
}

/// `receive`.
#[derive(Debug, Args)]
pub(crate) struct Receive {
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Directory in which peers may create replicas, or a device for one; may be repeated
    #[arg(long, value_name = "PATH")]
    pub into: Vec<PathBuf>,
}

/// `send`.
#[derive(Debug, Args)]
pub(crate) struct Send {
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Image or device that peers may read, or a directory of images; may be repeated
    #[arg(long, value_name = "PATH")]
    pub offer: Vec<PathBuf>,
    /// Of a tracked disk that is offered: the longest freeze of its file systems that a peer gets, 1s to 5m, whatever it asks for. After a freeze,
    /// peers are refused (exit code 6, which --wait tries again) for nine times as long as that was [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = units::parse_freeze, requires = "offer")]
    pub freeze_limit: Option<Duration>,
}

/// How peers reach this site without ssh.
#[derive(Debug, Args)]
pub(crate) struct ListenArgs {
    /// Address to listen on, with or without a port [default port: 10873]
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = parse_listen)]
    pub listen: Option<std::net::SocketAddr>,
    /// Accept only the key pinned under this name; may be repeated [default: all pinned keys]
    #[arg(long, value_name = "NAME")]
    pub from: Vec<String>,
    /// Give up on a peer after this long without a reply; the shorter timeout of both sides applies [default: 30s]
    #[arg(long, value_name = "TIME", value_parser = parse_timeout)]
    pub timeout: Option<Duration>,
    /// Also allow names below the given directories that begin with a dot, which may be a user's keys and settings
    #[arg(long)]
    pub hidden_files: bool,
    #[command(flatten)]
    pub metrics: MetricsArg,
    /// If this fails, run a command: DSYNC_JOB, DSYNC_EXIT_CODE and DSYNC_MESSAGE are in its environment
    #[arg(long, value_name = "COMMAND", help_heading = ADVANCED)]
    pub on_failure: Option<String>,
}

impl ListenArgs {
    /// Refuses them where the peer is at standard input and output.
    pub(crate) fn check_unused(&self) -> Result<(), Failure> {
        let unused = self.from.is_empty() && self.timeout.is_none() && self.metrics.metrics.is_none();
        match unused && !self.hidden_files {
            true => Ok(()),
            false => Err(Failure::usage(
                "--from, --timeout, --hidden-files and --metrics apply to peers over TLS: pass --listen",
            )),
        }
    }
}

impl Command {
    /// What is to be run if it fails.
    pub(crate) fn on_failure(&self) -> Option<&str> {
        let command = match self {
            Command::Sync(args) => &args.run.on_failure,
            Command::Mirror(args) => &args.run.on_failure,
            Command::Verify(args) => &args.run.on_failure,
            Command::Serve(args) => &args.run.on_failure,
            Command::Rehearse(args) => &args.run.on_failure,
            Command::Receive(args) => &args.listen.on_failure,
            Command::Send(args) => &args.listen.on_failure,
            _ => return None,
        };
        command.as_deref()
    }
}

impl Receive {
    /// True if it accepts peers over TLS, false if it talks to one over standard input and output.
    pub(crate) fn listens(&self) -> bool {
        self.listen.listen.is_some() || !self.into.is_empty()
    }
}

impl Send {
    /// True if it accepts peers over TLS, false if it talks to one over standard input and output.
    pub(crate) fn listens(&self) -> bool {
        self.listen.listen.is_some() || !self.offer.is_empty()
    }
}

/// Reads an address with or without a port.
fn parse_listen(text: &str) -> Result<std::net::SocketAddr, String> {
    let alone = |text: &str| text.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    match (text.parse(), alone(text)) {
        (Ok(address), _) => Ok(address),
        (_, Ok(ip)) => Ok((ip, link::PORT).into()),
        _ => Err(format!("use a form like 192.0.2.7, 192.0.2.7:{0} or [::]:{0}", link::PORT)),
    }
}

/// `run`.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Name of the job: that of its file, without ".conf"
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Print the command line that the job stands for, and run nothing
    #[arg(long)]
    pub print: bool,
    /// Directory of the jobs [default: $DSYNC_CONF_DIR, else /etc/dsync]
    #[arg(long, value_name = "DIR")]
    pub config: Option<PathBuf>,
    /// Options of the job's command
    #[arg(value_name = "OPTION", trailing_var_arg = true, allow_hyphen_values = true)]
    pub options: Vec<std::ffi::OsString>,
}

/// `key`.
#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// What to do [default: show the key]
    #[command(subcommand)]
    pub action: Option<KeyAction>,
}

/// What `key` does.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyAction {
    /// Pin a key
    Trust {
        /// Host as used in tls://HOST or HOST:PORT; any name for a peer that connects to this site
        name: String,
        /// The line printed by "dsync key" there; for a key that is pinned already, it may be omitted
        #[arg(num_args = 0..=3)]
        key: Vec<String>,
        /// What it is trusted for: push (this site sends to it), pull (this site fetches from it), serve (it may connect to "receive" and
        /// "send" here); several are separated by commas
        #[arg(long = "for", value_name = "ROLES")]
        roles: link::Roles,
        /// When the trust lapses: 90d, 12h, or a date such as 2027-03-01
        #[arg(long, value_name = "WHEN", value_parser = parse_expiry)]
        expires: Option<u64>,
    },
    /// List the trusted keys
    List,
    /// Stop trusting a key
    Forget {
        /// Name of the key
        name: String,
    },
}

/// A mode in octal.
fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("invalid mode \"{text}\": use octal digits, like 660"))
}

/// An address and a port.
fn parse_tcp(text: &str) -> Result<std::net::SocketAddr, String> {
    let wrong = || "use a form with a port, like 127.0.0.1:10809 or [::1]:10809".to_owned();
    text.parse().map_err(|_| wrong())
}
