//! dsync as it is installed and operated: Debian 12 machines with systemd, the packages, and the commands of the guide. Reboots
//! and power cuts while writes go on; after each, what the monitors say is true and the replica is the source.
//!
//! It takes minutes under emulation: `make test-vm` builds the package and runs it, with `DSYNC_SOAK=1` for hours: 20 reboots and 20 power
//! cuts of each host. On two cores that others used as well, a round of the sample took 100 to 252 s, and that of one disk 12 minutes in all.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::guest::Kernel;
use dsync_tests::machine::{self, Machine};
use dsync_tests::{Random, Site, got, left_out, repository, rounds, soak};

const MIB: u64 = 1 << 20;
/// What takes seconds, on a machine that is busy.
const SOON: Duration = Duration::from_secs(600);

/// The package, if the test is to run.
fn package(what: &str) -> Option<PathBuf> {
    if !(soak() || std::env::var_os("DSYNC_VM").is_some_and(|v| v == "1")) {
        left_out(what, "make test-vm");
        return None;
    }
    let found = std::env::var_os("DSYNC_DEB").map(PathBuf::from).filter(|path| path.is_file());
    let found = found.ok_or("DSYNC_DEB names no package: \"make test-vm\" builds one");
    (got(found.clone().map(drop), what) && machine::possible(what)).then(|| found.expect("asked"))
}

/// The commands of a section of the guide, each with the host that it is for.
fn commands(section: &str) -> Vec<(usize, String)> {
    let guide = std::fs::read_to_string(repository().join("docs/guide.md")).expect("the guide");
    let (_, text) = guide.split_once(&format!("\n## {section}\n")).expect("the section");
    let text = text.split("\n## ").next().unwrap_or_default();
    let host = |line: &str| {
        let (host, command) = line.strip_prefix("    ")?.split_once('#')?;
        let host = ["near", "far"].iter().position(|name| *name == host)?;
        // What is printed stands behind the command.
        let command = command.split(" # ").next().unwrap_or_default().trim();
        Some((host, command.to_owned()))
    };
    text.lines().filter_map(host).collect()
}

/// Two hosts with dsync on them.
struct Hosts {
    /// The one with the sources, and the one with their replicas.
    machines: [Machine; 2],
    /// The keys that they have printed.
    keys: [String; 2],
    random: Random,
    _site: Site,
}

/// Writes to both sources, as long as the machine runs.
const LOAD: &str = r#"
cat >/usr/local/sbin/load <<'END'
#!/bin/sh
i=0
while :; do
    i=$((i + 1))
    dd if=/dev/urandom of=/data/f$((i % 20)) bs=16k count=$((i % 8 + 1)) 2>/dev/null
    dd if=/dev/urandom of=/dev/nbd0 bs=4k count=4 seek=$((i * 37 % 7000)) conv=notrunc oflag=direct 2>/dev/null
    [ $((i % 5)) != 0 ] || sync -f /data
    sleep 0.3
done
END
chmod 755 /usr/local/sbin/load
cat >/etc/systemd/system/load.service <<'END'
[Unit]
After=data.mount dsync-serve@vm.socket
Requires=data.mount
[Service]
ExecStartPre=/sbin/modprobe nbd
ExecStartPre=/sbin/nbd-client -unix /run/dsync/vm.sock /dev/nbd0 -N vm
ExecStart=/usr/local/sbin/load
ExecStopPost=/sbin/nbd-client -d /dev/nbd0
[Install]
WantedBy=multi-user.target
END
# So that the end of a boot can be looked at in the next.
mkdir -p /var/log/journal
systemctl restart systemd-journald
mkfs.ext4 -q /dev/vdb
mkdir /data
echo '/dev/vdb /data ext4 nofail 0 2' >>/etc/fstab
systemctl daemon-reload
systemctl start data.mount
systemctl enable --now load
"#;

const MIRRORS: &str = "dsync-mirror@vm-far dsync-mirror@disk-far";

impl Hosts {
    /// `replicas` are the disks of the host that keeps them, beside its root.
    fn new(what: &str, package: &Path, replicas: &[u64]) -> Hosts {
        let site = Site::new();
        let share = site.path("share");
        std::fs::create_dir(&share).expect("a folder");
        let to = share.join("dsync_0.1.0_amd64.deb");
        std::fs::copy(package, to).expect("the package");
        let near = Machine::new(&site, "near", &[64 * MIB], &share);
        let far = Machine::new(&site, "far", replicas, &share);
        let mut machines = Machine::pair([near, far]);
        machines.iter_mut().for_each(Machine::power);
        machines.iter_mut().for_each(Machine::wait_up);
        Hosts { machines, keys: Default::default(), random: Random::new(what), _site: site }
    }

    /// Runs the commands of a section of the guide. Returns how long they took.
    fn follow(&mut self, section: &str) -> Duration {
        let began = Instant::now();
        let commands = commands(section);
        assert!(!commands.is_empty(), "no commands in {section}");
        for (host, command) in commands {
            // What is not in the guide are the keys that its reader pastes.
            let pasted = [("AAAA…", 1), ("BBBB…", 0)];
            let command = pasted.iter().fold(command, |command, (shown, host)| {
                command.replace(&format!("dsync-ed25519 {shown}"), &self.keys[*host])
            });
            let script = format!("cd /mnt\n{command}");
            // Content once the first copy is complete.
            let printed = match command.starts_with("dsync status --check") {
                true => self.machines[host].until(&script, SOON),
                false => self.machines[host].ok(&script),
            };
            if let Some(key) = printed.lines().find(|line| line.starts_with("dsync-ed25519 ")) {
                self.keys[host] = key.split(' ').take(2).collect::<Vec<_>>().join(" ");
            }
        }
        began.elapsed()
    }

    fn near(&mut self) -> &mut Machine {
        &mut self.machines[0]
    }

    fn far(&mut self) -> &mut Machine {
        &mut self.machines[1]
    }

    /// All that was enabled runs, nothing failed, and the monitors are content.
    fn are_well(&mut self) {
        let units =
            format!("dsync-serve@vm.socket dsync-serve@vm.service dsync-track@dev-vdb load {MIRRORS}");
        let active = format!("for unit in {units}; do systemctl is-active -q $unit || exit 1; done");
        self.near().until(&active, SOON);
        self.far().until("systemctl is-active dsync-receive.socket", SOON);
        self.near().until("dsync status --check --max-age 1m", SOON);
        self.far().until("sudo -u dsync dsync --state-dir /var/lib/dsync-receive status --check", SOON);
        for machine in &mut self.machines {
            let failed = machine.ok("systemctl list-units --failed --no-legend --plain 'dsync*'");
            assert_eq!(failed, "");
        }
    }

    /// Without writers, the replicas are the sources, and the metrics say so.
    fn are_equal(&mut self) {
        self.near().ok("systemctl stop load");
        // A mirror that freezes the file system has it open for a moment.
        self.near().until("systemctl stop data.mount", SOON);
        self.near().ok(&format!("systemctl stop {MIRRORS}"));
        self.near().ok("dsync verify vm tls://far/vm.raw");
        let sums = "sha256sum | cut -d' ' -f1";
        let sources = self.near().ok(&format!(
            "for f in /srv/vm.raw /dev/vdb; do dd if=$f bs=1M iflag=direct 2>/dev/null | {sums}; done"
        ));
        let replicas =
            self.far().ok(&format!("cd /srv/replicas\nfor f in vm.raw disk.raw; do cat $f | {sums}; done"));
        assert_eq!(sources, replicas, "the replicas are not the sources");
        let metrics = self.near().ok("dsync status --prometheus");
        let has = |metrics: &str, name: &str, value: &str, count: usize| {
            let lines =
                metrics.lines().filter(|line| line.starts_with(name) && line.ends_with(&format!(" {value}")));
            assert_eq!(lines.count(), count, "{name} {value}: {metrics}");
        };
        has(&metrics, "dsync_source_tracking{", "1", 2);
        has(&metrics, "dsync_replica_lag_seconds{", "0", 2);
        has(&metrics, "dsync_replica_lacks_bytes{", "0", 2);
        let metrics =
            self.far().ok("sudo -u dsync dsync --state-dir /var/lib/dsync-receive status --prometheus");
        let exact = metrics.lines().filter(|line| line.contains("state=\"exact\"") && line.ends_with(" 1"));
        assert_eq!(exact.count(), 2, "{metrics}");
        self.near().ok(&format!("systemctl start data.mount\nsystemctl start load {MIRRORS}"));
    }

    /// A host restarts in order, or loses its power for a while.
    fn lose(&mut self, host: usize, is_cut: bool) {
        let name = ["near", "far"][host];
        println!("{} of {name}", if is_cut { "a power cut" } else { "a reboot" });
        if !is_cut {
            return self.machines[host].reboot();
        }
        self.machines[host].cut(&mut self.random);
        if host == 1 {
            // As long as it is away, the sources' host says so.
            let late = self.near().until("sleep 4; ! dsync status --check --max-age 5s", SOON);
            assert!(late.contains("replica is out of date"), "{late}");
        }
        self.machines[host].on();
    }

    /// The host with the sources kept its record over a reboot; after a power cut it says that it is lost, and compares.
    fn remember(&mut self, is_cut: bool) {
        let begun = self.near().ok("journalctl -b --no-pager -o cat -u dsync-track@dev-vdb");
        let found = self.found();
        if is_cut {
            assert!(
                begun.contains("earlier changes are lost") && found.contains("(compared"),
                "{begun}{found}"
            );
        } else {
            self.ended_in_order();
            assert!(begun.contains("from its saved record") && found.contains("(tracked"), "{begun}{found}");
        }
    }

    /// At the end of the last boot the mirrors ended before what they follow: the mount, and the server.
    fn ended_in_order(&mut self) {
        let journal = self.near().ok("journalctl -b -1 --no-pager -o cat -t systemd -t dsync");
        let lines: Vec<&str> = journal.lines().collect();
        let at = |what: &str| {
            let found = lines.iter().rposition(|line| line.starts_with(what));
            found.unwrap_or_else(|| panic!("no \"{what}\" in {journal}"))
        };
        assert!(at("Stopped dsync-mirror@disk-far") < at("Unmounting data.mount"), "{journal}");
        assert!(at("Unmounted data.mount") < at("saved the record of /dev/vdb"), "{journal}");
        assert!(at("Stopped dsync-mirror@vm-far") < at("Stopping dsync-serve@vm.service"), "{journal}");
    }

    /// How the mirror of the tracked disk found what the replica lacks, since this boot.
    fn found(&mut self) -> String {
        self.near().ok("journalctl -b --no-pager -o cat -u dsync-mirror@disk-far | grep 'is at epoch\\|is up to date' | head -n 1")
    }
}

#[test]
fn installed_services_survive_reboots_and_power_cuts() {
    let what = "the installed services over reboots and power cuts";
    let Some(package) = package(what) else { return };
    let mut hosts = Hosts::new(what, &package, &[]);
    hosts
        .near()
        .ok("truncate -s 64M /srv/vm.raw\ndd if=/dev/urandom of=/srv/vm.raw bs=1M count=16 conv=notrunc");
    let took = hosts.follow("Two hosts in five minutes");
    println!("from the package to the first mirror, under emulation: {} s", took.as_secs());
    hosts.near().ok(LOAD);
    hosts.follow("A disk in use");
    hosts.are_well();
    hosts.are_equal();
    monitors_notice(&mut hosts);
    for round in 0..rounds(4, 80) {
        // The host with the sources first; with a sample, one of each.
        let (host, is_cut) = (round as usize / 2 % 2, round % 2 == 1);
        std::thread::sleep(Duration::from_millis(hosts.random.below(5000)));
        let began = Instant::now();
        hosts.lose(host, is_cut);
        hosts.are_well();
        if host == 0 {
            hosts.remember(is_cut);
        }
        hosts.are_equal();
        println!("round {round}: {} s", began.elapsed().as_secs());
    }
}

/// A mirror that is stopped is noticed, and one that runs again is, too.
fn monitors_notice(hosts: &mut Hosts) {
    let near = hosts.near();
    near.ok("systemctl stop dsync-mirror@vm-far");
    let late = near.until("sleep 4; ! dsync status --check --max-age 2s /srv/vm.raw", SOON);
    assert!(late.contains("out of date"), "{late}");
    near.ok("systemctl start dsync-mirror@vm-far");
    near.until("dsync status --check --max-age 1m", SOON);
}
/// What is the same in each life of a host with one disk: a marker that says how far it is, and a replica that catches up.
fn root_is_mirrored(hosts: &mut Hosts, count: u32) {
    let near = hosts.near();
    let units = "systemctl is-active -q dsync-track@dev-vda && systemctl is-active -q dsync-mirror@root-far";
    near.until(units, SOON);
    // A first copy that is under way is stopped as it is.
    near.until("dsync status --check --max-age 5m && dsync status -v | grep 'up to date as of'", SOON);
    near.ok(&format!("echo {count} >/srv/marker\nsync"));
    // The end of a mirror is a sync that begins after the stop was requested.
    near.ok("systemctl stop dsync-mirror@root-far");
    near.ok("dsync status --check --max-age 5m");
}

/// The host with one disk gets another release's kernel as any package, and runs it from then on: the tracker is the same program
/// there. False, with a line that says why, if there is none at hand.
fn new_kernel(hosts: &mut Hosts, count: u32) -> bool {
    let package = Kernel::Backports.package();
    if !got(package.clone().map(drop), "an upgrade of the kernel of a host with one disk") {
        return false;
    }
    let boots = hosts._site.path("share/boots");
    std::fs::create_dir(&boots).expect("a folder");
    std::fs::copy(package.expect("asked"), boots.join("linux.deb")).expect("the package");
    let near = hosts.near();
    let began = Instant::now();
    let before = near.ok("uname -r");
    near.ok("systemctl start dsync-mirror@root-far");
    near.ok("dpkg -i /mnt/boots/linux.deb");
    for file in ["vmlinuz", "initrd"] {
        near.ok(&format!("cp $(ls /boot/{file}* | sort -V | tail -n 1) /mnt/boots/{file}"));
    }
    near.off();
    near.boots = Some(boots);
    near.on();
    root_is_mirrored(hosts, count);
    let after = hosts.near().ok("uname -r");
    println!("from {} to {} in {:?}", before.trim(), after.trim(), began.elapsed());
    assert_ne!(before, after);
    true
}

#[test]
fn a_host_with_one_disk_is_mirrored_and_its_replica_boots() {
    let what =
        "a host with one disk over a reboot, a power cut, another kernel command line and another kernel";
    let Some(package) = package(what) else { return };
    let mut hosts = Hosts::new(what, &package, &[3072 * MIB]);
    let began = Instant::now();
    // Beside the replica it has room for a journal with all that a new kernel writes.
    hosts.far().ok("mkfs.ext4 -q /dev/vdb\nmkdir -p /srv/replicas\necho '/dev/vdb /srv/replicas ext4 nofail 0 2' >>/etc/fstab\nmount /srv/replicas");
    hosts.near().ok("truncate -s 1M /srv/vm.raw");
    hosts.follow("Two hosts in five minutes");
    hosts
        .near()
        .ok("systemctl disable --now dsync-mirror@vm-far dsync-serve@vm.socket dsync-serve@vm.service");
    // A job that copies nothing any more would be missed by the monitor.
    hosts.near().ok("dsync forget /srv/vm.raw\nrm /etc/dsync/vm-far.conf");
    hosts.follow("A host with one disk");
    root_is_mirrored(&mut hosts, 0);
    for round in 0..rounds(2, 40) as u32 {
        let is_cut = round % 2 == 1;
        println!(
            "round {round}: {} after {:?}",
            if is_cut { "a power cut" } else { "a shutdown" },
            began.elapsed()
        );
        hosts
            .near()
            .ok("systemctl start dsync-mirror@root-far\ndd if=/dev/urandom of=/srv/more bs=1M count=4");
        let Hosts { machines, random, .. } = &mut hosts;
        if is_cut {
            machines[0].cut(random);
        } else {
            machines[0].off();
        }
        machines[0].append = format!("dsync.test={round} {}", if is_cut { "nokaslr" } else { "" });
        machines[0].on();
        root_is_mirrored(&mut hosts, round + 1);
        // What was lost is compared, and said.
        let said = hosts
            .near()
            .ok("journalctl -b --no-pager -o cat -u dsync-track@dev-vda -u dsync-mirror@root-far");
        assert!(said.contains("earlier changes are lost") && said.contains("(compared"), "{said}");
    }
    let upgraded = new_kernel(&mut hosts, rounds(2, 40) as u32 + 1);
    // The replica is a machine, which boots from it.
    let far = hosts.far();
    far.ok("cp --sparse=always /srv/replicas/root.raw /mnt/root.raw");
    far.off();
    hosts.near().off();
    let share = hosts._site.path("share");
    let copy = share.join("root.raw");
    let mut machine = Machine::new(&hosts._site, "again", &[], &share);
    std::fs::rename(copy, machine.disk(0)).expect("the replica");
    machine.on();
    let last = rounds(2, 40) + u64::from(upgraded);
    assert_eq!(machine.ok("cat /srv/marker").trim(), last.to_string());
    machine.ok("dsync status");
    machine.off();
}

/// A host whose state directory and replicas lie on NFS. Its own server stands for that of another host.
const ON_NFS: &str = r#"
set -e
dpkg -i /mnt/dsync.deb
mkdir -p /export/state /export/replicas /nfs
echo '/export localhost(rw,no_root_squash,insecure,sync,no_subtree_check)' >/etc/exports
systemctl start nfs-server
mount -t nfs4 localhost:/export /nfs
truncate -s 64M /srv/vm.raw
dd if=/dev/urandom of=/srv/vm.raw bs=1M count=16 conv=notrunc 2>/dev/null
modprobe nbd
cat >/usr/local/sbin/write <<'END'
#!/bin/sh
# Through the server, and acknowledged.
set -e
nbd-client -unix /run/vm.sock /dev/nbd0 -N vm >/dev/null
dd if=/dev/urandom of=/dev/nbd0 bs=4k count=3 seek="$1" oflag=direct conv=fsync 2>/dev/null
nbd-client -d /dev/nbd0 >/dev/null
END
cat >/usr/local/sbin/serve <<'END'
#!/bin/sh
systemd-run -q --unit=served --setenv=DSYNC_STATE_DIR=/nfs/state -p Type=notify dsync serve /srv/vm.raw --socket /run/vm.sock
END
cat >/usr/local/sbin/bring <<'END'
#!/bin/sh
# How it was found, and whether it is right.
set -e
export DSYNC_STATE_DIR=/nfs/state
for to in /srv/copy.raw /nfs/replicas/vm.raw; do
    dsync sync /srv/vm.raw $to
    cmp /srv/vm.raw $to
done
END
chmod 755 /usr/local/sbin/*
serve
bring
"#;

/// Locks, mappings and renames of a state directory on NFS hold what they promise: over a kill of the server, a server of NFS that is
/// away for a while, and beside another process.
#[test]
fn a_state_directory_on_nfs_keeps_its_word() {
    let what = "a state directory and replicas on NFS";
    let Some(package) = package(what) else { return };
    let site = Site::new();
    let share = site.path("share");
    std::fs::create_dir(&share).expect("a folder");
    std::fs::copy(package, share.join("dsync.deb")).expect("the package");
    let mut machine = Machine::new(&site, "near", &[], &share);
    machine.on();
    println!("{}", machine.ok(ON_NFS));
    let brought = |machine: &mut Machine, script: &str| {
        let said = machine.ok(&format!("set -e\n{script}\nbring"));
        println!("{said}");
        assert_eq!(said.matches("(tracked").count(), 2, "{script}: {said}");
    };
    brought(&mut machine, "write 100");
    brought(
        &mut machine,
        "write 200; systemctl kill -s KILL served; sleep 1; systemctl reset-failed served; serve",
    );
    brought(&mut machine, "write 300; systemctl stop served; serve; write 400");
    // What was begun waits for the server of NFS.
    brought(
        &mut machine,
        "write 500; systemctl stop nfs-server; (sleep 3; systemctl start nfs-server) & sleep 1",
    );
    let busy = machine.ok("DSYNC_STATE_DIR=/nfs/state dsync serve /srv/vm.raw --socket /run/other.sock 2>&1 || echo \"code $?\"");
    assert!(busy.contains("is in use (dsync") && busy.contains("code 6"), "{busy}");
    machine.off();
}
