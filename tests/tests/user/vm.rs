//! dm-track in guests with Debian's kernels: built against their headers, loaded, and put to the tests in `tests/vm`,
//! which speak TAP. A sample runs by default; all of it with `DSYNC_VM=1` (`make test-vm`), the long campaigns with
//! `DSYNC_SOAK=1`.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use device::{Disk, RamDisk};
use dsync_tests::guest::{self, Guest, Kernel, Options};
use dsync_tests::{Random, Run, Site, got, image, left_out, need, profile_dir, repository, soak};
use nbd::{Export, ExportInfo, ExportRefusal, Exports, Server};
use testing::faulty::{FaultyDisk, Keep, Outage, Power};

const MIB: u64 = 1 << 20;

/// The kernels to test on: the sample takes the first.
fn kernels() -> &'static [Kernel] {
    static SAID: Once = Once::new();
    if testing::guests_in_full() {
        return &[Kernel::Stable, Kernel::Backports];
    }
    SAID.call_once(|| left_out("the kernel module on the backported kernel", "make test-vm"));
    &[Kernel::Stable]
}

/// True if the module can be built and run.
fn possible(kernel: Kernel, what: &str) -> bool {
    need(&["make", "gcc", "dmsetup", "fio"], what)
        && guest::possible_with(kernel, what)
        && got(kernel.headers(), what)
}

/// Builds the module, in a folder of its own for each kernel and set of definitions. A warning is a failure.
fn module(kernel: Kernel, define: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let headers = kernel.headers().expect("headers: ask possible first");
    let folder = profile_dir().join(format!("../vm/{kernel:?}{define}"));
    fs::create_dir_all(&folder).expect("a folder for the module");
    let source = repository().join("kernel/dm-track");
    for entry in fs::read_dir(&source).expect("the module's source") {
        let path = entry.expect("the module's source").path();
        let to = folder.join(path.file_name().expect("a name"));
        // make goes by the time.
        if fs::read(&path).ok() != fs::read(&to).ok() {
            fs::copy(&path, &to).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
    let module = folder.join("dm-track.ko");
    let flags = if define.is_empty() { String::new() } else { format!("-D{define}") };
    let output = Run::new("make")
        .arg("-C")
        .arg(&headers)
        .arg(format!("M={}", folder.canonicalize().expect("a folder").display()))
        .args(["W=1", "CONFIG_DEBUG_INFO_BTF_MODULES=", &format!("KCFLAGS={flags}"), "modules"])
        .limit(Duration::from_secs(300))
        .output();
    let said = format!("{}\n{}", output.text(), output.stderr);
    assert!(output.status.success() && !said.to_lowercase().contains("warning"), "{kernel:?}: {said}");
    module
}

/// A test in a guest.
struct Vm<'a> {
    kernel: Kernel,
    script: &'a str,
    variables: String,
    options: Options,
}

impl Vm<'_> {
    fn new(kernel: Kernel, script: &str, disks: Vec<String>) -> Vm<'_> {
        let modules = vec!["dm_mod".into()];
        let options = Options { kernel, disks, modules, memory: 768, cpus: 2, ..Options::default() };
        Vm { kernel, script, variables: String::new(), options }
    }

    fn modules(&mut self, names: &[&str]) {
        self.options.modules.extend(names.iter().map(|name| name.to_string()));
    }

    fn boot(&self) -> Guest {
        let scripts = repository().join("tests/vm");
        let mut options = self.options.clone();
        options.files.extend([
            module(self.kernel, ""),
            PathBuf::from(env!("CARGO_BIN_EXE_blocks")),
            scripts.join("lib.sh"),
            scripts.join(self.script),
        ]);
        options.script = format!("{}\n. /tmp/files/{}", self.variables, self.script);
        Guest::boot(&options)
    }

    /// Runs it to its end.
    fn run(&self, limit: u64) {
        self.finish(self.boot(), limit);
    }

    /// Waits for the end. Every test must have passed.
    fn finish(&self, guest: Guest, limit: u64) {
        let started = guest.started;
        let lines = guest.finish(Duration::from_secs(limit));
        for line in &lines {
            if line.starts_with("# ") {
                println!("{line}");
            }
        }
        let passed = lines.iter().filter(|line| line.starts_with("ok ")).count();
        assert!(lines.contains(&format!("1..{passed}")), "not all tests ran: {lines:#?}");
        let seconds = started.elapsed().as_secs();
        println!("{:?} {}: {passed} tests in {seconds} s", self.kernel, self.script);
    }
}

/// Two equal disks of random content.
fn twins(site: &Site, size: u64, random: &mut Random) -> Vec<String> {
    let (disk, copy) = (site.path("disk.raw"), site.path("copy.raw"));
    image::random(&disk, size, random);
    image::copy(&disk, &copy);
    [disk, copy].iter().map(|path| path.display().to_string()).collect()
}

/// A metadata device whose faults the test chooses, served to the guest over NBD for one of its lives.
struct Meta {
    power: Power,
    disk: Arc<FaultyDisk>,
    server: Server,
    socket: PathBuf,
}

struct One(Arc<FaultyDisk>);

impl Exports for One {
    fn list(&self) -> Vec<ExportInfo> {
        vec![ExportInfo { name: "meta".into(), description: String::new() }]
    }

    fn open(&self, name: &str) -> Result<Export, ExportRefusal> {
        Ok(Export::new(name, Arc::clone(&self.0) as Arc<dyn Disk>))
    }
}

impl Meta {
    fn serve(site: &Site, content: &Arc<RamDisk>) -> Meta {
        let power = Power::new(Outage::PowerCut);
        let disk = Arc::new(FaultyDisk::new(&power, Arc::clone(content) as Arc<dyn Disk>));
        let server = Server::new(Arc::new(One(Arc::clone(&disk))));
        let socket = site.socket("meta");
        let _ = fs::remove_file(&socket);
        server.serve_unix(UnixListener::bind(&socket).expect("a socket")).expect("a server");
        Meta { power, disk, server, socket }
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///meta?socket={}", self.socket.display())
    }

    /// Ends the life. Of what was not flushed each sector stays or goes as the dice fall.
    fn lose(self, random: &mut Random) {
        self.power.crash(Keep::Random, Keep::KeepAll, random.bits()).expect("a crash");
        self.server.shutdown(Duration::from_secs(1));
    }
}

#[test]
fn every_difference_is_reported() {
    let what = "dm-track against the truth";
    for &kernel in kernels() {
        if !guest::drawn(0, what)
            || !possible(kernel, what)
            || !need(&["mkfs.ext4", "blkdiscard", "losetup"], what)
        {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        // The smallest that mkfs.xfs takes, or a smaller one.
        let size = if testing::guests_in_full() { 320 * MIB } else { 64 * MIB };
        let mut vm = Vm::new(kernel, "truth.sh", twins(&site, size, &mut random));
        vm.modules(&["loop", "raid1", "xfs", "btrfs"]);
        let (fs, io, more) =
            if testing::guests_in_full() { ("ext4 xfs btrfs", "24m", "yes") } else { ("ext4", "4m", "") };
        vm.variables = format!("SEED={}\nFILESYSTEMS='{fs}'\nIO={io}\nMORE={more}", random.below(1 << 30));
        vm.run(600);
    }
}

#[test]
fn no_update_is_lost_between_two_epochs() {
    let what = "dm-track with writes in flight at a checkpoint";
    for &kernel in kernels() {
        if !guest::drawn(1, what) || !possible(kernel, what) {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        let mut vm = Vm::new(kernel, "race.sh", twins(&site, 32 * MIB, &mut random));
        let broken = site.path("dm-track-nodrain.ko");
        fs::copy(module(kernel, "DM_TRACK_TEST_NO_DRAIN"), &broken).expect("a copy");
        vm.options.files.push(broken);
        vm.modules(&["dm_delay"]);
        let seconds = if testing::guests_in_full() { 20 } else { 4 };
        vm.variables = format!("SEED={}\nSECONDS_OF_LOAD={seconds}", random.below(1 << 30));
        vm.run(180);
    }
}

#[test]
fn tables_come_and_go() {
    let what = "dm-track's tables, messages and removal";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        let mut vm = Vm::new(kernel, "life.sh", twins(&site, 64 * MIB, &mut random));
        vm.modules(&["dm_zero"]);
        vm.variables = format!("SEED={}\nSECONDS_OF_LOAD=20", random.below(1 << 30));
        vm.run(300);
    }
}

#[test]
fn a_log_outlives_failures() {
    let what = "dm-track's metadata";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        let meta = Meta::serve(&site, &Arc::new(RamDisk::new(20 * MIB)));
        let mut disks = twins(&site, 64 * MIB, &mut random);
        disks.push(meta.uri());
        let vm = Vm::new(kernel, "meta.sh", disks);
        let mut guest = vm.boot();
        for _ in 0..2 {
            guest.wait_for("fail", Duration::from_secs(120));
            meta.disk.fail_writes(0..u64::MAX, 5);
            guest.send("done");
            guest.wait_for("heal", Duration::from_secs(60));
            meta.disk.heal();
            guest.send("done");
        }
        vm.finish(guest, 120);
        meta.server.shutdown(Duration::from_secs(1));
    }
}

#[test]
fn the_dm_tracker_follows() {
    let what = "dsync's tracker over dm-track";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        let mut disks = twins(&site, 64 * MIB, &mut random);
        let meta = site.path("meta.raw");
        image::sparse(&meta, 20 * MIB);
        disks.push(meta.display().to_string());
        let mut vm = Vm::new(kernel, "tracker.sh", disks);
        vm.options.files.push(dsync_tests::site::binary().into());
        vm.run(120);
    }
}

#[test]
fn the_bpf_tracker_follows() {
    let what = "the bpf tracker on Debian's kernels";
    for &kernel in kernels() {
        let tools = ["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "blkdiscard"];
        if !guest::wanted(what) || !possible(kernel, what) || !need(&tools, what) {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        let mut vm = Vm::new(kernel, "bpf.sh", twins(&site, 320 * MIB, &mut random));
        vm.modules(&["dm_delay", "raid1", "xfs", "btrfs", "brd rd_nr=1 rd_size=16384", "zram"]);
        vm.variables = format!("SEED={}\nSECONDS_OF_LOAD=20", random.below(1 << 30));
        vm.run(900);
    }
}

#[test]
fn a_command_past_the_block_layer_is_lost() {
    let what = "SCSI commands of a program on a tracked disk";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) || !need(&["python3"], what) {
            continue;
        }
        let mut vm = Vm::new(kernel, "scsi.sh", Vec::new());
        vm.modules(&["sd_mod", "scsi_debug dev_size_mb=16", "brd rd_nr=1 rd_size=16384"]);
        vm.run(180);
    }
}

#[test]
fn a_user_follows_and_syncs() {
    let what = "a user's commands on live disks of a guest";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) || !need(&["mkfs.ext4", "e2fsck", "python3"], what)
        {
            continue;
        }
        let site = Site::new();
        let disks = [("disk.raw", 64 * MIB), ("replicas.raw", 320 * MIB)].map(|(name, size)| {
            let path = site.path(name);
            image::sparse(&path, size);
            path.display().to_string()
        });
        let mut vm = Vm::new(kernel, "user.sh", disks.into());
        vm.options.files.extend([dsync_tests::site::binary().into(), repository().join("tests/chain.py")]);
        vm.modules(&["loop", "dm_delay"]);
        vm.variables = format!("LIVES={}", if soak() { 20 } else { 3 });
        vm.run(1200);
    }
}

/// The record of the bpf tracker over real reboots: what its unit runs at the end of one and the beginning of the next.
#[test]
fn a_record_is_believed_after_a_reboot_only_if_nobody_wrote() {
    let what = "the bpf tracker over reboots";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) || !need(&["mkfs.ext4", "tune2fs"], what) {
            continue;
        }
        let site = Site::new();
        let images = [("disk.raw", 64 * MIB), ("state.raw", 256 * MIB)].map(|(name, size)| {
            let path = site.path(name);
            image::sparse(&path, size);
            path
        });
        let known = "tracked again, from its saved record";
        let lives = [
            ("first", "", "copy", "save"),
            ("nothing", known, "tracked", "save"),
            ("mount", "lost: the device was", "compare", "save"),
            ("write", "lost: the device was written", "compare", "save"),
            ("nothing", known, "tracked", "leave"),
            ("nothing", "lost: no record was saved", "compare", "save"),
            ("elsewhere", "lost: the device was mounted or written", "compare", "save"),
            ("replaced", "lost: the device was mounted or written", "compare", "save"),
        ];
        for (between, expect, method, end) in lives {
            match between {
                "elsewhere" => {
                    Run::new("tune2fs").args(["-c", "7"]).arg(&images[0]).ok();
                }
                "replaced" => {
                    let mut random = Random::new(what);
                    image::random(&images[0], 64 * MIB, &mut random);
                    Run::new("mkfs.ext4").args(["-q", "-F"]).arg(&images[0]).ok();
                }
                _ => {}
            }
            let disks = images.iter().map(|path| path.display().to_string()).collect();
            let mut vm = Vm::new(kernel, "reboot.sh", disks);
            vm.options.files.push(dsync_tests::site::binary().into());
            vm.variables = format!("BETWEEN={between}\nEXPECT='{expect}'\nMETHOD={method}\nEND={end}");
            vm.run(180);
        }
    }
}

#[test]
fn power_cuts() {
    let what = "dm-track over power cuts";
    for &kernel in kernels() {
        if !guest::drawn(2, what) || !possible(kernel, what) {
            continue;
        }
        let mut random = Random::new(what);
        let site = Site::new();
        let disks = twins(&site, 64 * MIB, &mut random);
        let content = Arc::new(RamDisk::new(20 * MIB));
        let rounds = if soak() {
            100
        } else if testing::guests_in_full() {
            10
        } else {
            1
        };
        let mut last = "none";
        for life in 0..=rounds {
            let meta = Meta::serve(&site, &content);
            let mut disks = disks.clone();
            disks.push(meta.uri());
            let mut vm = Vm::new(kernel, "cut.sh", disks);
            let next = match random.below(2) {
                _ if life == rounds => "end",
                0 => "plain",
                _ => "sync",
            };
            let seed = random.below(1 << 30);
            vm.variables = format!("LIFE={life}\nLAST={last}\nNEXT={next}\nSEED={seed}");
            let mut guest = vm.boot();
            if next == "end" {
                vm.finish(guest, 120);
            } else {
                guest.wait_for("load", Duration::from_secs(120));
                std::thread::sleep(Duration::from_millis(random.below(3000)));
                let report = guest.report();
                guest.cut();
                assert!(!report.contains("\nnot ok"), "life {life} after {last}: {report}");
            }
            meta.lose(&mut random);
            last = next;
        }
    }
}

#[test]
fn a_write_costs_little() {
    let what = "the instructions that dm-track adds to a write";
    for &kernel in kernels() {
        if !guest::wanted(what) || !possible(kernel, what) {
            continue;
        }
        let mut vm = Vm::new(kernel, "cost.sh", Vec::new());
        vm.options.cpus = 1;
        vm.options.qemu = ["-icount", "shift=0,sleep=off"].map(String::from).to_vec();
        // Without a queue the device itself costs least; newer kernels have no such mode.
        let mode = if kernel == Kernel::Stable { 0 } else { 2 };
        vm.modules(&["brd rd_nr=1 rd_size=65536", &format!("null_blk queue_mode={mode} irqmode=0 gb=1")]);
        vm.run(600);
    }
}
