//! The matrix: every kind of source, destination, way, commit and command, each with something that goes wrong in the midst.
//! Cells are drawn at random. Whatever was killed, cut or refused: the replica is one moment of the source or says that it is
//! not, never an older one than before, and one more sync makes it equal.
//!
//! `DSYNC_SEED` repeats a run. The soak prints how many rounds each cell had.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::image::{self, BLOCK};
use dsync_tests::listener::{HOST, Listening, Offering, trust};
use dsync_tests::mount::{Loop, Mount};
use dsync_tests::nbd::Client;
use dsync_tests::records::{self, Records};
use dsync_tests::{Background, Output, Random, Run, Server, Site, rounds, say, skipped};
use rustix::process::{Signal, kill_process};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
/// A device destination has room for what a file source may grow to.
const ROOM: u64 = 32 * MIB;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");
/// Faults that a cell suffers before another is drawn.
const ROUNDS: u32 = 3;

/// An enum whose variants a cell is drawn from, with the words for the table.
macro_rules! axis {
    ($name:ident { $($variant:ident = $word:literal),* }) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        enum $name { $($variant),* }
        impl $name {
            const ALL: &[$name] = &[$($name::$variant),*];
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $($name::$variant => $word),* })
            }
        }
    };
}

axis!(Source { Buffered = "file", Direct = "file, direct", Device = "device", Bpf = "bpf", Unserved = "unserved" });
axis!(Destination { File = "file", Device = "device" });
axis!(Way {
    Local = "local",
    Shell = "shell",
    Tls = "TLS",
    PulledShell = "shell, pulled",
    PulledTls = "TLS, pulled"
});
axis!(Commit { Journal = "journal", InPlace = "in-place", Reflink = "reflink" });
axis!(Job { Sync = "sync", Mirror = "mirror", Merge = "extract, merge" });
axis!(Change { Scattered = "scattered", Dense = "dense", Grown = "grown" });
axis!(Fault {
    None = "none",
    KillNear = "near killed",
    KillFar = "far killed",
    KillServer = "server killed",
    Cut = "line cut",
    Full = "disk full for a moment",
    Unwritable = "EIO for a moment"
});

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    source: Source,
    destination: Destination,
    way: Way,
    commit: Commit,
    job: Job,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:12} | {:6} | {:13} | {:8} | {:14}",
            self.source, self.destination, self.way, self.commit, self.job
        )
    }
}

fn draw<T: Copy>(random: &mut Random, all: &[T]) -> T {
    all[random.below(all.len() as u64) as usize]
}

impl Cell {
    fn draw(random: &mut Random) -> Cell {
        loop {
            let cell = Cell {
                source: draw(random, Source::ALL),
                destination: draw(random, Destination::ALL),
                way: draw(random, Way::ALL),
                commit: draw(random, Commit::ALL),
                job: draw(random, Job::ALL),
            };
            if cell.exists() {
                return cell;
            }
        }
    }

    /// Devices cannot be cloned, a delta in a file takes no way, a mirror commits in its own way and runs where the source is, and
    /// without a tracker there is neither a mirror nor an extract.
    fn exists(&self) -> bool {
        let Cell { source, destination, way, commit, job } = *self;
        (commit != Commit::Reflink || destination == Destination::File)
            && (job != Job::Merge || way == Way::Local)
            && (job != Job::Mirror || (commit == Commit::Journal && !self.pulled()))
            && (job == Job::Sync || source != Source::Unserved)
    }

    /// The host of the replica runs the command.
    fn pulled(&self) -> bool {
        matches!(self.way, Way::PulledShell | Way::PulledTls)
    }

    /// Writes go on while the replica is brought up to date.
    fn served(&self) -> bool {
        matches!(self.source, Source::Buffered | Source::Direct | Source::Device)
    }

    /// An image that grew was not served meanwhile, and only a comparison knows what changed. What is extracted from a live
    /// disk must fit into memory.
    fn changes(&self) -> &'static [Change] {
        match (self.job, self.source) {
            (Job::Merge, Source::Bpf) => &[Change::Scattered],
            (Job::Merge, _) => &[Change::Scattered, Change::Dense],
            _ => Change::ALL,
        }
    }

    fn faults(&self) -> Vec<Fault> {
        let fits = |fault: &Fault| match fault {
            Fault::None | Fault::KillNear => true,
            Fault::KillFar => self.way != Way::Local,
            Fault::KillServer => self.served(),
            Fault::Cut => matches!(self.way, Way::Shell | Way::PulledShell),
            Fault::Full => self.destination == Destination::File,
            Fault::Unwritable => self.destination == Destination::Device,
        };
        Fault::ALL.iter().copied().filter(fits).collect()
    }
}

/// A destination whose writes fail while a file is there: nbdkit's error filter beneath a loop device.
struct Fragile {
    // Let go in this order.
    device: Loop,
    _mount: Mount,
    _server: Background,
    trigger: PathBuf,
}

impl Fragile {
    fn new(site: &Site) -> Option<Fragile> {
        let (image, place, trigger) =
            (site.image("fragile.img", ROOM), site.path("fragile"), site.path("trigger"));
        std::fs::create_dir(&place).expect("a folder");
        let mut server = Run::new("nbdfuse")
            .arg(&place)
            .args(["--command", "nbdkit", "-s", "--filter=error", "file"])
            .arg(&image)
            .args(["error-pwrite=EIO", "error-pwrite-rate=100%"])
            .arg(format!("error-pwrite-file={}", trigger.display()))
            .start();
        let file = place.join("nbd");
        while !file.exists() {
            if server.ended().is_some() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let mount = Mount::made(&place);
        Some(Fragile { device: Loop::new(&file)?, _mount: mount, _server: server, trigger })
    }
}

/// Where the replica lies.
enum Place {
    File { _mount: Option<Mount>, folder: PathBuf },
    Device(Loop),
    Fragile(Fragile),
}

struct World {
    cell: Cell,
    random: Random,
    source: PathBuf,
    replica: PathBuf,
    server: Option<Server>,
    tracked: bool,
    place: Place,
    listening: Option<Listening>,
    /// At the site of the source.
    offering: Option<Offering>,
    /// Behind the remote shell, or the site that pulls.
    far: Option<Site>,
    backing: Option<Loop>,
    near: Site,
    /// The last records that the replica is known to have had, and those that come next.
    had: [u64; 2],
    next: Option<[u64; 2]>,
    /// Where nobody writes meanwhile: what the source was each time, and the first of these that the replica may be at.
    moments: Vec<Vec<u8>>,
    at: usize,
    seeded: bool,
}

impl World {
    /// `None` where this machine lacks what the cell needs, which is said.
    fn new(cell: Cell, random: &mut Random) -> Option<World> {
        let mut random = Random::seeded(random.bits());
        let near = Site::new();
        let image = near.image("vm.raw", SIZE);
        // Behind the records, so that the replica has something that they do not write.
        image::scribble(&image, SIZE / 2, SIZE / 8, &mut random);
        let backing = match cell.source {
            Source::Device | Source::Bpf => Some(Loop::new(&image)?),
            _ => None,
        };
        let source = backing.as_ref().map_or(image, |device| device.device().to_path_buf());
        let listening = (cell.way == Way::Tls).then(|| Listening::for_near(&near));
        let far = (cell.pulled() || cell.way == Way::Shell).then(Site::new);
        let home = match (&listening, &far) {
            (Some(listening), _) => listening.folder(),
            (_, Some(far)) => far.path("into"),
            _ => near.path("into"),
        };
        std::fs::create_dir_all(&home).expect("a folder");
        let place = match cell.destination {
            Destination::Device if random.one_in(2) => Place::Fragile(Fragile::new(&near)?),
            Destination::Device => Place::Device(Loop::new(&near.image("replica.img", ROOM))?),
            Destination::File => {
                let (fs, least) = if cell.commit == Commit::Reflink { ("btrfs", 160) } else { ("ext4", 96) };
                let image = near.image("fs.img", least * MIB);
                Run::new(format!("mkfs.{fs}")).arg("-q").arg(&image).ok();
                Place::File {
                    _mount: Some(Mount::new(&["-o", "loop"], &image, &home)?),
                    folder: home.clone(),
                }
            }
        };
        let replica = match &place {
            Place::File { folder, .. } => folder.join("vm.raw"),
            Place::Device(device) => device.device().to_path_buf(),
            Place::Fragile(fragile) => fragile.device.device().to_path_buf(),
        };
        let offering = far.as_ref().filter(|_| cell.way == Way::PulledTls).map(|far| {
            trust(far, HOST, &near, &[]);
            trust(&near, "far", far, &[]);
            Offering::start(&near, &[&source], &[])
        });
        let mut world = World {
            cell,
            random,
            source,
            replica,
            server: None,
            tracked: false,
            place,
            listening,
            offering,
            far,
            backing,
            near,
            had: [0, 0],
            next: None,
            moments: Vec::new(),
            at: 0,
            seeded: false,
        };
        if let (Some(listening), Destination::Device) = (&mut world.listening, cell.destination) {
            // A device is reached where it is named.
            listening.kill();
            let device = world.replica.display().to_string();
            listening.start(&["--into", &device]);
        }
        match cell.source {
            Source::Unserved => {}
            Source::Bpf => {
                world.near.dsync(["track", "add"]).arg(&world.source).ok();
                world.tracked = true;
            }
            _ => world.serve(),
        }
        if (cell.source, cell.job) == (Source::Bpf, Job::Merge) {
            world.moments.push(std::fs::read(&world.source).expect("the source"));
            world.sync(None).ok();
            world.seeded = true;
        }
        Some(world)
    }

    fn serve(&mut self) {
        let options: &[&str] = if self.cell.source == Source::Direct { &["--direct"] } else { &[] };
        let options = [options, if self.cell.source == Source::Device { &["--trust-device"] } else { &[] }];
        self.server = Some(self.near.serve(&[&self.source], &options.concat()));
    }

    fn export(&self) -> String {
        self.source.file_stem().expect("a name").to_string_lossy().into_owned()
    }

    /// The machine on which the replica is.
    fn far_site(&self) -> &Site {
        match (&self.listening, &self.far) {
            (Some(listening), _) => &listening.site,
            (_, Some(far)) => far,
            _ => &self.near,
        }
    }

    fn destination(&self) -> String {
        match (&self.listening, self.cell.destination) {
            (Some(listening), Destination::File) => listening.destination("vm.raw"),
            (Some(listening), Destination::Device) => {
                listening.destination(&self.replica.display().to_string())
            }
            _ if self.cell.way == Way::Shell => format!("far:{}", self.replica.display()),
            _ => self.replica.display().to_string(),
        }
    }

    /// A command with source and destination, over the cell's way.
    fn command(&self, name: &str, cut: Option<u64>) -> Run {
        let source = self.source.display().to_string();
        let (here, there, source) = match &self.offering {
            Some(offering) => (self.far_site(), &self.near, offering.source(&source)),
            None if self.cell.pulled() => (self.far_site(), &self.near, format!("near:{source}")),
            None => (&self.near, self.far_site(), source),
        };
        let mut run = here.dsync([name, "--json"]).arg(source).arg(self.destination());
        if matches!(self.cell.way, Way::Shell | Way::PulledShell) {
            run = run.args(["--rsh", RSH]).env("RSH_STATE", there.state());
        }
        match cut {
            // Most bytes come from the source.
            Some(bytes) if self.cell.pulled() => run.env("RSH_DEAF", bytes.to_string()),
            Some(bytes) => run.env("RSH_CUT", bytes.to_string()),
            None => run,
        }
    }

    fn sync(&self, cut: Option<u64>) -> Run {
        let run = self.command("sync", cut).args(["--commit", &self.cell.commit.to_string()]);
        // Slow enough that a fault meets it.
        if self.cell.way == Way::Local { run } else { run.args(["--bwlimit", "64M"]) }
    }

    fn write(&mut self, offset: u64, len: u64) {
        let data = self.random.bytes(len as usize);
        if self.server.is_some() {
            let mut client = self.client();
            for (n, part) in data.chunks(256 << 10).enumerate() {
                client.write(offset + ((n as u64) << 18), part).expect("a write");
            }
            return client.close().expect("the end");
        }
        // The page cache of a device that others read directly is in the way.
        let direct = if self.backing.is_some() { rustix::fs::OFlags::DIRECT.bits() as i32 } else { 0 };
        let file = std::fs::OpenOptions::new().write(true).custom_flags(direct).open(&self.source);
        let file = file.expect("the source");
        let buf = device::Buf::from(&data[..]);
        file.write_all_at(&buf, offset).expect("a write");
    }

    fn client(&self) -> Client {
        self.server.as_ref().expect("a server").client(&self.export())
    }

    fn change(&mut self, change: Change) {
        // The records are in the first quarter and more; what is changed here is behind them.
        let (start, size) = (records::SPACE.next_multiple_of(MIB), SIZE);
        match change {
            Change::Scattered => {
                for _ in 0..self.random.within(1..200) {
                    let at = self.random.within(start / BLOCK..size / BLOCK) * BLOCK;
                    self.write(at, BLOCK);
                }
            }
            Change::Dense => {
                let at = self.random.within(start / BLOCK..size / BLOCK / 2) * BLOCK;
                let len = self.random.within(1..(size - at) / BLOCK) * BLOCK;
                self.write(at, len);
            }
            Change::Grown if self.backing.is_some() => {}
            Change::Grown => {
                let served = self.server.take().map(Server::stop).is_some();
                let size = image::size(&self.source) + self.random.within(1..300) * 1000;
                if size <= ROOM {
                    let file =
                        std::fs::OpenOptions::new().write(true).open(&self.source).expect("the source");
                    file.set_len(size).expect("a larger source");
                }
                if served {
                    self.serve();
                }
            }
        }
    }

    /// What the machine of the replica says of it; `None` where nothing is there yet.
    fn recover(&self) -> Option<serde_json::Value> {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let output = self.far_site().dsync(["recover", "--json"]).arg(&self.replica).output();
            if output.status.success() {
                return Some(output.summary());
            }
            assert!(!output.stderr.contains("panicked"), "{output}");
            if !self.seeded {
                return None;
            }
            // Who was killed may hold the replica for a moment.
            let busy = output.stderr.contains("in use") || output.stderr.contains("busy");
            assert!(busy && Instant::now() < until, "{output}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// After whatever went wrong: one moment, and none older than before.
    fn look(&mut self, what: &str) {
        let Some(said) = self.recover() else { return };
        let state = said["state"].as_str().unwrap_or("?");
        if state == "incomplete" {
            let meant = self.cell.commit == Commit::InPlace || !self.seeded;
            return assert!(meant, "{what}: {said}");
        }
        assert_eq!(state, "exact", "{what}: {said}");
        if !self.cell.served() {
            let replica = std::fs::read(&self.replica).expect("the replica");
            let is = |moment: &Vec<u8>| replica.get(..moment.len()).is_some_and(|part| part == moment);
            let found = self.moments[self.at..].iter().rposition(is);
            let found =
                found.unwrap_or_else(|| panic!("{what}: no moment of the source from {} on", self.at));
            self.at += found;
            return;
        }
        let found = records::check(&self.replica, what);
        assert!(found >= self.had, "{what}: the replica went back from {:?} to {found:?}", self.had);
        self.had = found;
    }

    fn equal(&self, what: &str) {
        let (source, replica) = (std::fs::read(&self.source), std::fs::read(&self.replica));
        let (source, replica) = (source.expect("the source"), replica.expect("the replica"));
        assert!(replica.len() >= source.len(), "{what}: the replica is shorter");
        let differs = source
            .chunks(BLOCK as usize)
            .zip(replica.chunks(BLOCK as usize))
            .position(|(a, b)| a != &b[..a.len()]);
        assert_eq!(differs, None, "{what}: the first block that differs");
    }

    /// In good order to where the source is; nothing may be in the way for long.
    fn settle(&mut self, what: &str) {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let output = match self.cell.job {
                Job::Merge => self.merge(),
                _ => self.sync(None).output(),
            };
            if output.status.success() {
                break;
            }
            // Only who was killed a moment ago may still be in the way.
            let busy = ["in use", "busy", "being written"].iter().any(|word| output.stderr.contains(word));
            assert!(busy && Instant::now() < until, "{what}: {output}");
            std::thread::sleep(Duration::from_millis(50));
        }
        self.seeded = true;
        self.equal(what);
    }

    /// Takes a delta and merges it.
    fn merge(&self) -> Output {
        // The first one may not have arrived, and nobody but its user knows.
        let since: &[&str] = if self.seeded { &[] } else { &["--since", "0"] };
        let delta = self.near.dsync(["extract"]).arg(&self.source).args(since).output();
        if delta.status.success() { self.merging(&delta.stdout).output() } else { delta }
    }

    fn merging(&self, delta: &[u8]) -> Run {
        let commit = self.cell.commit.to_string();
        self.near.dsync(["merge", "--commit", &commit]).arg(&self.replica).input(delta)
    }

    fn round(&mut self, fault: Fault, change: Change, what: &str) {
        self.change(change);
        if !self.cell.served() {
            self.moments.push(std::fs::read(&self.source).expect("the source"));
        }
        let load = self
            .server
            .as_ref()
            .map(|server| Records::start(&server.address(), &self.export(), self.next, 300));
        let cut = (fault == Fault::Cut).then(|| self.random.below(3 * MIB));
        let mut running = match self.cell.job {
            Job::Sync => self.sync(cut).start(),
            Job::Mirror => self.command("mirror", cut).args(["-v", "--epoch", "300ms"]).start(),
            Job::Merge => {
                let delta = self.near.dsync(["extract"]).arg(&self.source).ok();
                self.merging(&delta.stdout).start()
            }
        };
        let pause =
            Duration::from_millis(self.random.below(if self.cell.job == Job::Mirror { 900 } else { 250 }));
        std::thread::sleep(pause);
        self.suffer(fault, &mut running);
        let ended = match self.cell.job {
            // It goes on by itself until it is told to end, or dies.
            Job::Mirror => {
                std::thread::sleep(Duration::from_millis(self.random.below(500)));
                running.kill();
                None
            }
            _ => {
                let status = running.wait_for(Duration::from_secs(60));
                assert!(status.is_some(), "{what}: it hangs: {}", running.stderr_so_far());
                status
            }
        };
        if let Some(load) = load {
            self.next = Some(load.stop());
        }
        if ended.is_some_and(|status| status.success()) {
            self.seeded = true;
        }
        let said = running.stderr_so_far();
        assert!(!said.contains("panicked"), "{what}: {said}");
        drop(running);
        if self.server.is_none() && self.cell.served() {
            self.serve();
        }
        if let (Some(listening), Fault::KillFar) = (&mut self.listening, fault) {
            let device = self.replica.display().to_string();
            let also: &[&str] = match self.cell.destination {
                Destination::Device => &["--into", &device],
                Destination::File => &[],
            };
            listening.start(also);
        }
        if let (Some(offering), Fault::KillFar) = (&mut self.offering, fault) {
            *offering = Offering::start(&self.near, &[&self.source], &[]);
        }
        self.look(what);
    }

    fn suffer(&mut self, fault: Fault, running: &mut Background) {
        match fault {
            Fault::None | Fault::Cut => {}
            Fault::KillNear => running.kill(),
            Fault::KillFar => match (&mut self.listening, &mut self.offering) {
                (Some(listening), _) => listening.kill(),
                (_, Some(offering)) => offering.process.kill(),
                _ => {
                    let verb = if self.cell.pulled() { "send" } else { "receive" };
                    running.descendant("dsync", verb).map(|far| kill_process(far, Signal::KILL));
                }
            },
            Fault::KillServer => drop(self.server.take().map(Server::kill)),
            Fault::Full => {
                let Place::File { folder, .. } = &self.place else { return };
                let filler = folder.join("filler");
                fill(&filler);
                std::thread::sleep(Duration::from_millis(self.random.below(300)));
                std::fs::remove_file(filler).expect("the filler");
            }
            Fault::Unwritable => {
                let Place::Fragile(fragile) = &self.place else { return };
                std::fs::write(&fragile.trigger, "").expect("a trigger");
                std::thread::sleep(Duration::from_millis(self.random.below(300)));
                std::fs::remove_file(&fragile.trigger).expect("a trigger");
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.tracked {
            self.near.dsync(["track", "remove"]).arg(&self.source).output();
        }
        // Sessions hold files below what is unmounted.
        if let Some(listening) = &mut self.listening {
            listening.kill();
        }
        if let Some(offering) = &mut self.offering {
            offering.process.kill();
        }
    }
}

/// Takes what room a file system has.
fn fill(path: &Path) {
    let file = std::fs::File::create(path).expect("a file");
    let mut at = 0;
    for step in [16 * MIB, MIB, 64 << 10, BLOCK] {
        while rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), at, step).is_ok() {
            at += step;
        }
    }
}

#[test]
fn every_cell_survives_what_goes_wrong() {
    let what = "the matrix of sources, destinations, ways, commits and commands";
    if !dsync_tests::need_root(what)
        || !dsync_tests::need(&["nbdkit", "nbdfuse", "mkfs.btrfs", "mkfs.ext4"], what)
    {
        return;
    }
    let bpf = Path::new("/sys/fs/bpf");
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("the table of mounts");
    let mounted = mounts.lines().any(|line| line.split(' ').nth(1) == bpf.to_str());
    let _bpf = if mounted { None } else { Mount::new(&["-t", "bpf"], Path::new("bpf"), bpf) };
    let mut random = Random::new(what);
    let mut table: BTreeMap<Cell, BTreeMap<Fault, u32>> = BTreeMap::new();
    let mut left_out = BTreeMap::new();
    for _ in 0..rounds(6, 1500) {
        let cell = Cell::draw(&mut random);
        println!("{cell}");
        let Some(mut world) = World::new(cell, &mut random) else {
            left_out.insert(cell, ());
            continue;
        };
        for number in 0..ROUNDS {
            let (fault, change) = (draw(&mut random, &cell.faults()), draw(&mut random, cell.changes()));
            let words = format!("{cell}, round {number}: {change}, {fault}");
            println!("{words}");
            world.round(fault, change, &words);
            // The first copy may take several attempts; some rounds pile up without a good one between.
            if number + 1 == ROUNDS || random.one_in(2) {
                world.settle(&words);
            }
            *table.entry(cell).or_default().entry(fault).or_default() += 1;
        }
    }
    for cell in left_out.keys() {
        skipped(&cell.to_string(), "a loop device, a mount or nbdkit's error filter cannot be had");
    }
    if dsync_tests::soak() {
        for (cell, faults) in &table {
            let faults: Vec<String> =
                faults.iter().map(|(fault, count)| format!("{fault} {count}")).collect();
            say(&format!("{cell}: {}", faults.join(", ")));
        }
    }
}
