//! Groups: several disks of one machine that are cut at one moment, and whose replicas commit together.
//!
//! A writer leaves numbered records on two disks by turns: the record of a number goes to the second disk when that on the first
//! was answered. So at every moment the second disk is at the number of the first, or one behind.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::listener::Listening;
use dsync_tests::nbd::{Address, Client};
use dsync_tests::scene::{fingerprints, restamp};
use dsync_tests::{Output, Random, Run, Server, Site, need, need_root, rounds, skipped, until};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// Places for records on each disk: the last ones are all there.
const RING: u64 = 101;
const NAMES: [&str; 2] = ["data", "log"];

fn record(number: u64, disk: u64) -> Vec<u8> {
    let mut bytes = Random::seeded(number * 2 + disk).bytes(BLOCK as usize);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

fn place(number: u64) -> u64 {
    (number % RING) * 7 * BLOCK
}

/// The writer.
struct Pairs {
    stop: Arc<AtomicBool>,
    next: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Pairs {
    /// Begins with a number.
    fn start(address: &Address, first: u64) -> Pairs {
        let (stop, next) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(first)));
        let (stopped, counter, address) = (stop.clone(), next.clone(), address.clone());
        let thread = std::thread::spawn(move || {
            let connect = |name: &str| Client::connect(&address, name);
            let (Ok(mut data), Ok(mut log)) = (connect(NAMES[0]), connect(NAMES[1])) else { return };
            while !stopped.load(SeqCst) {
                let number = counter.load(SeqCst);
                // A server that was killed does not answer: the same pair is written again later.
                if data.write(place(number), &record(number, 0)).is_err()
                    || log.write(place(number), &record(number, 1)).is_err()
                {
                    return;
                }
                counter.store(number + 1, SeqCst);
            }
        });
        Pairs { stop, next, thread }
    }

    fn wait_for(&self, more: u64) {
        let (upto, until) = (self.next.load(SeqCst) + more, Instant::now() + Duration::from_secs(60));
        while self.next.load(SeqCst) < upto && Instant::now() < until && !self.thread.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops; the number that comes next.
    fn stop(self) -> u64 {
        self.stop.store(true, SeqCst);
        self.thread.join().expect("the writer");
        self.next.load(SeqCst)
    }
}

/// The last record of a disk. Fails the test unless those before it are there.
fn last(image: &Path, disk: u64, what: &str) -> u64 {
    let file = std::fs::File::open(image).unwrap_or_else(|e| panic!("{}: {e}", image.display()));
    let read = |number: u64| {
        let mut bytes = vec![0; BLOCK as usize];
        file.read_exact_at(&mut bytes, place(number)).expect("an image");
        bytes
    };
    let numbers =
        (0..RING).map(read).map(|bytes| (u64::from_le_bytes(bytes[..8].try_into().expect("eight")), bytes));
    let found = numbers.filter(|(number, bytes)| *bytes == record(*number, disk)).map(|(number, _)| number);
    let found = found.max().unwrap_or(0);
    for number in found.saturating_sub(RING - 1).max(1)..=found {
        assert!(read(number) == record(number, disk), "{what}: record {number} of {found} is not there");
    }
    found
}

/// The last record on the first of two disks, which must be of one moment.
fn together(dir: &Path, what: &str) -> u64 {
    let [data, log] = [0, 1].map(|at: u64| last(&dir.join(format!("{}.raw", NAMES[at as usize])), at, what));
    assert!(
        log <= data && data <= log + 1,
        "{what}: torn: the first disk is at record {data}, the second at {log}"
    );
    data
}

/// Two disks, served as a group.
struct Two {
    random: Random,
    site: Site,
    images: [PathBuf; 2],
    /// Of the replicas.
    dir: PathBuf,
    server: Option<Server>,
}

impl Two {
    fn new(what: &str) -> Two {
        Two::at(what, Site::in_memory())
    }

    /// On a real disk, whose times tell a rename from a write.
    fn on_disk(what: &str) -> Two {
        Two::at(what, Site::new())
    }

    fn at(what: &str, site: Site) -> Two {
        let mut random = Random::new(what);
        let images = NAMES.map(|name| site.image(&format!("{name}.raw"), SIZE));
        for image in &images {
            image::scribble(image, 5 * MIB, MIB, &mut random);
        }
        let dir = site.path("replicas");
        std::fs::create_dir(&dir).expect("a folder");
        let mut two = Two { random, site, images, dir, server: None };
        two.start();
        two
    }

    fn start(&mut self) {
        let images = self.images.each_ref().map(PathBuf::as_path);
        self.server = Some(self.site.serve(&images, &["--group", "db"]));
    }

    fn server(&self) -> &Server {
        self.server.as_ref().expect("a server")
    }

    fn sync(&self, options: &[&str]) -> Run {
        self.site.dsync(["sync", "--group", "db", "--json"]).arg(&self.dir).args(options)
    }

    fn pairs(&self, first: u64) -> Pairs {
        Pairs::start(&self.server().address(), first)
    }

    fn change(&mut self, disk: usize, blocks: u64) {
        let mut client = self.server().client(NAMES[disk]);
        for _ in 0..blocks {
            let block = 900 + self.random.below(300);
            client.write(block * BLOCK, &self.random.bytes(BLOCK as usize)).expect("a write");
        }
        client.close().expect("the end");
    }

    /// Changes the first replica as its disk would, of which no time tells.
    fn damage(&mut self) {
        let [replica, _] = self.replicas();
        let time = replica.metadata().and_then(|file| file.modified()).expect("a time");
        image::scribble(&replica, 0, BLOCK, &mut self.random);
        let file = std::fs::OpenOptions::new().write(true).open(&replica).expect("a replica");
        file.set_modified(time).expect("a time");
        restamp(&replica);
    }

    fn replicas(&self) -> [PathBuf; 2] {
        NAMES.map(|name| self.dir.join(format!("{name}.raw")))
    }

    fn equal(&self) {
        for (image, replica) in self.images.iter().zip(self.replicas()) {
            image::assert_equal(image, &replica);
        }
    }

    /// Opens both replicas, each by itself and in some order.
    fn recover(&mut self) {
        let mut replicas = self.replicas();
        if self.random.coin() {
            replicas.reverse();
        }
        for replica in replicas {
            self.site.dsync(["recover"]).arg(replica).ok();
        }
    }
}

/// Fails the test unless a command has printed these words.
fn shows(output: &Output, words: &[&str]) {
    let text = output.text();
    words.iter().for_each(|word| assert!(text.contains(word), "\"{word}\" is not shown: {output}"));
}

/// The objects that a sync of a group prints: one for each member, and that of the group.
fn summaries(output: &Output) -> (Vec<serde_json::Value>, serde_json::Value) {
    let mut all: Vec<_> =
        output.json().into_iter().filter(|object| object["message_type"] == "summary").collect();
    let group = all.pop().expect("a summary");
    assert_eq!(group["kind"], "group", "{output}");
    (all, group)
}

#[test]
fn a_group_is_brought_to_one_moment() {
    let mut two = Two::new("a group");
    let output = two.sync(&["-n"]).ok();
    assert_eq!(std::fs::read_dir(&two.dir).expect("the folder").count(), 0, "{output}");
    let (members, group) = summaries(&two.sync(&[]).ok());
    assert!(members.iter().all(|member| member["method"] == "copy"), "{members:?}");
    let sent = |of: &serde_json::Value| of["bytes_sent"].as_u64().expect("bytes");
    let of_members: u64 = members.iter().map(sent).sum();
    assert!(sent(&members[0]) > 0 && sent(&members[1]) > 0 && of_members <= sent(&group), "{members:?}");
    assert_eq!((group["epoch"].as_u64(), group["group"].as_str()), (Some(1), Some("db")));
    two.equal();
    // Nothing was written: the cut is the same, and what is to be kept applies.
    let (members, group) = summaries(&two.sync(&["--keep-last", "6"]).ok());
    for replica in two.replicas() {
        shows(&two.site.dsync(["rewind"]).arg(replica).ok(), &["keeps the last 6"]);
    }
    assert!(members.iter().all(|member| member["blocks_changed"] == 0), "{members:?}");
    assert_eq!(group["epoch"], 1);
    // Written to one: the other stays at its epoch, and is of the new moment all the same.
    two.change(1, 5);
    let (members, group) = summaries(&two.sync(&[]).ok());
    assert_eq!((members[0]["blocks_changed"].as_u64(), group["epoch"].as_u64()), (Some(0), Some(2)));
    assert_eq!(members[1]["method"], "tracked");
    two.equal();
    let shown = two.site.dsync(["status", "-v"]).ok();
    shows(
        &shown,
        &["in group db, at its common epoch 2", "last common epoch 2", "at common epoch 2 of group db"],
    );
    shows(&two.site.dsync(["status"]).arg(&two.replicas()[1]).ok(), &["at common epoch 2 of group db"]);
    two.change(0, 1);
    let told = two.site.dsync(["sync", "--group", "db"]).arg(&two.dir).ok();
    shows(&told, &["at common epoch 3: 2 disks at one moment"]);
    shows(&two.site.dsync(["status", "data"]).ok(), &["at its common epoch 3"]);
    // What is at rest is at one moment, too.
    two.server.take().expect("a server").stop();
    let (members, group) = summaries(&two.sync(&[]).ok());
    assert!(members.iter().all(|member| member["method"] == "tracked"), "{members:?}");
    assert_eq!(group["epoch"], 3);
}

#[test]
fn the_second_disk_is_never_ahead() {
    let mut two = Two::new("order");
    two.sync(&[]).ok();
    let pairs = two.pairs(1);
    let mut before = 0;
    for round in 0..rounds(6, 300) {
        pairs.wait_for(1 + two.random.below(200));
        two.sync(&[]).ok();
        let at = together(&two.dir, &format!("round {round}"));
        assert!(at > before, "nothing came in round {round}");
        before = at;
    }
    pairs.stop();
    two.sync(&[]).ok();
    two.equal();
}

#[test]
fn kills_tear_nothing() {
    let mut two = Two::new("kills of a group");
    two.sync(&[]).ok();
    let mut next = 1;
    let mut moved = 0;
    let usual = {
        let pairs = two.pairs(next);
        pairs.wait_for(300);
        let began = Instant::now();
        two.sync(&[]).ok();
        next = pairs.stop();
        began.elapsed()
    };
    let mut before = together(&two.dir, "before");
    for round in 0..rounds(12, 1000) {
        let pairs = two.pairs(next);
        pairs.wait_for(200);
        let mut sync = two.sync(&[]).start();
        std::thread::sleep(usual.mul_f64(two.random.below(1200) as f64 / 1000.0));
        let server = two.random.one_in(3);
        if server {
            two.server.take().expect("a server").kill();
            // The sync ends by itself, or is killed as well.
            if two.random.coin() {
                sync.wait_for(Duration::from_secs(30));
            }
        }
        sync.kill();
        next = pairs.stop();
        if server {
            two.start();
        }
        // Now and then a recovery is killed as well.
        if two.random.one_in(3) {
            let mut recover = two.site.dsync(["recover"]).arg(&two.replicas()[two.random.index(2)]).start();
            std::thread::sleep(usual.mul_f64(two.random.below(500) as f64 / 1000.0));
            recover.kill();
        }
        two.recover();
        let at = together(&two.dir, &format!("round {round}"));
        assert!(at >= before, "round {round}: went back");
        moved += u64::from(at > before);
        before = at;
        if two.random.one_in(2) {
            two.sync(&[]).ok();
            before = together(&two.dir, &format!("round {round}, synced"));
        }
    }
    println!("{moved} of the syncs that were killed had committed");
    two.sync(&[]).ok();
    two.equal();
}

/// A group on another host.
struct FarGroup {
    far: Far,
    dir: PathBuf,
}

impl FarGroup {
    fn new() -> FarGroup {
        let far = Far::new(RSH);
        let dir = far.site.path("replicas");
        std::fs::create_dir(&dir).expect("a folder");
        FarGroup { far, dir }
    }

    fn sync(&self, two: &Two, cut: Option<u64>) -> Run {
        let run = two.site.dsync(["sync", "--group", "db", "--json", "--rsh", RSH]);
        let run = run.arg(format!("far:{}", self.dir.display())).env("RSH_STATE", self.far.site.state());
        match cut {
            Some(bytes) => run.env("RSH_CUT", bytes.to_string()),
            None => run,
        }
    }
}

#[test]
fn a_far_group_is_cut_off_at_any_byte() {
    let (mut two, there) = (Two::new("a far group"), FarGroup::new());
    there.sync(&two, None).ok();
    let pairs = two.pairs(1);
    let mut before = 0;
    for round in 0..rounds(7, 400) {
        pairs.wait_for(200);
        let (deaf, bytes) = (two.random.one_in(3), two.random.below(2 * RING * (BLOCK + 100)));
        let run = match deaf {
            true => there.sync(&two, None).env("RSH_DEAF", (bytes % 3000).to_string()),
            false => there.sync(&two, Some(bytes)),
        };
        let output = run.output();
        assert!(matches!(output.status.code(), Some(0 | 1)), "{output}");
        for name in NAMES {
            there.far.site.dsync(["recover"]).arg(there.dir.join(format!("{name}.raw"))).ok();
        }
        let at = together(&there.dir, &format!("round {round}"));
        assert!(at >= before, "round {round}: went back");
        before = at;
    }
    pairs.stop();
    there.sync(&two, None).ok();
    for (image, name) in two.images.iter().zip(NAMES) {
        image::assert_equal(image, &there.dir.join(format!("{name}.raw")));
    }
    // The source remembers the replicas by their names there.
    let name = format!("far:{}/log.raw", there.dir.display());
    shows(&two.site.dsync(["status", "log"]).ok(), &[&name]);
}

/// The first common sync breaks off, when a member has its delta and the group has no commit yet: each can be opened, and the
/// next sync goes on.
#[test]
fn a_first_common_sync_that_breaks_off_locks_nobody_out() {
    let (mut two, there) = (Two::new("a first common sync"), FarGroup::new());
    for name in NAMES {
        let alone = two.site.dsync(["sync", "--rsh", RSH, name]);
        let alone = alone.arg(format!("far:{}/{name}.raw", there.dir.display()));
        alone.env("RSH_STATE", there.far.site.state()).ok();
    }
    [0, 1].into_iter().for_each(|disk| two.change(disk, 200));
    let (mut bytes, mut broken) = (1500, 0);
    while there.sync(&two, Some(bytes)).output().status.code() != Some(0) {
        broken += 1;
        for name in NAMES {
            there.far.site.dsync(["recover"]).arg(there.dir.join(format!("{name}.raw"))).ok();
        }
        bytes = bytes * 3 / 2;
    }
    assert!(broken > 5, "only {broken} syncs broke off");
    for (image, name) in two.images.iter().zip(NAMES) {
        image::assert_equal(image, &there.dir.join(format!("{name}.raw")));
    }
}

/// Runs a sync that must be refused, with these words, and shows that nothing was changed.
fn refused(two: &Two, options: &[&str], words: &[&str]) {
    // What readers are told of a replica is written whenever it is opened.
    let files = || {
        let mut files = fingerprints(&two.replicas()[0]);
        files.retain(|(path, _)| path.file_name().is_some_and(|name| name != "present"));
        files
    };
    let before = files();
    let epoch = || two.site.dsync(["status", "data", "--json"]).ok().summary()["epoch"].clone();
    let was = epoch();
    let code = if words.contains(&"is in use") { 6 } else { 4 };
    two.sync(options).code(code).says(words);
    assert_eq!(before, files(), "{words:?}");
    assert_eq!(was, epoch(), "a refused sync leaves no epoch: {words:?}");
}

/// The command that a message names, as it stands there.
fn advised(two: &Two, told: &Output, begins: &str) -> Run {
    assert!(!told.stderr.contains("SRC") && !told.stderr.contains("DIR"), "{told}");
    let (_, command) = told.stderr.split_once(&format!("\"dsync {begins}")).expect("a command");
    let (rest, _) = command.split_once('"').expect("its end");
    two.site.dsync(begins.split_whitespace().chain(rest.split_whitespace()))
}

#[test]
fn what_refuses_one_refuses_all_before_anything_is_changed() {
    let mut two = Two::on_disk("refused");
    two.sync(&[]).ok();
    two.change(0, 3);
    two.change(1, 3);
    let [data, log] = two.replicas();
    // Busy.
    let held = std::fs::File::options().read(true).open(two.dir.join(".log.raw.dsync/lock")).expect("a lock");
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
    refused(&two, &[], &["log.raw", "is in use"]);
    drop(held);
    // Missing.
    let away = two.site.path("away.raw");
    std::fs::rename(&log, &away).expect("a rename");
    refused(&two, &[], &["log.raw is missing", "--create"]);
    std::fs::rename(&away, &log).expect("a rename");
    // That it had another name is no write.
    let told = two.sync(&[]).ok();
    assert!(told.text().contains("name or links of"), "{told}");
    two.equal();
    // Written to by others.
    two.change(0, 3);
    std::thread::sleep(Duration::from_millis(30));
    image::scribble(&log, MIB, BLOCK, &mut two.random);
    refused(&two, &[], &["log.raw", "modified outside dsync"]);
    refused(&two, &["-n"], &["log.raw", "modified outside dsync"]);
    // Each message leads to the next, and the last one out.
    let told = two.sync(&[]).code(4);
    advised(&two, &told, "verify ").code(5);
    let alone = two.site.sync(&two.images[1], &log, &[]).code(4);
    assert!(!alone.stderr.contains("--repair"), "{alone}");
    let alone = two.site.dsync(["verify", "--repair"]).args([&two.images[1], &log]).code(4);
    let told = advised(&two, &alone, "sync --group db ").code(4);
    advised(&two, &told, "sync --group db --adopt ").ok();
    two.equal();
    // One member is no copy at all: nothing is sent to the other either.
    image::scribble(&log, 0, SIZE, &mut two.random);
    refused(&two, &["--adopt"], &["log.raw", "wrong destination", "--adopt=overwrite"]);
    two.sync(&["--adopt=overwrite"]).ok();
    two.equal();
    // Bad usage.
    two.sync(&["--commit", "in-place"]).code(2);
    two.sync(&["--method", "rolling"]).code(2);
    two.sync(&["--keep-going"]).code(2);
    two.sync(&[data.to_str().expect("a path")]).code(2);
    two.site
        .dsync(["sync", "--group", "nobody"])
        .arg(&two.dir)
        .code(4)
        .says(&["there is no group nobody", "dsync serve"]);
    two.site.dsync(["sync", "--group", "a/b"]).arg(&two.dir).code(4).says(&["invalid group name"]);
}

#[test]
fn a_member_alone_is_kept_in_step() {
    let mut two = Two::new("alone");
    two.sync(&[]).ok();
    two.change(1, 4);
    let log = two.replicas()[1].clone();
    let alone = |two: &Two, options: &[&str]| two.site.sync(&two.images[1], &log, options);
    alone(&two, &[]).code(4).says(&["log.raw is a replica of the group db", "dsync forget --group db DISK"]);
    // What the refusal says leads out.
    let server = two.server.take().expect("a server");
    server.stop();
    let take_out = |two: &Two| two.site.dsync(["forget", "--group", "db"]).arg(&two.images[1]).ok();
    take_out(&two);
    shows(&alone(&two, &[]).ok(), &["it has left the group db"]);
    image::assert_equal(&two.images[1], &log);
    // Also where nothing has to be sent.
    two.start();
    two.sync(&[]).ok();
    two.stop();
    take_out(&two);
    let is_member = |two: &Two| two.site.dsync(["status"]).arg(&log).ok().text().contains("of group db");
    alone(&two, &["-n"]).ok();
    assert!(is_member(&two));
    alone(&two, &[]).ok();
    assert!(!is_member(&two));
    two.start();
    two.site.dsync(["status"]).arg(&log).ok();
    let (_, group) = summaries(&two.sync(&[]).ok());
    assert_eq!(group["epoch"], 3);
    two.equal();
    // The group is all that was said to be in it.
    let sole = two.server.take().expect("a server");
    sole.stop();
    let serve = |image: &Path, options: &[&str]| {
        two.site.dsync(["serve"]).arg(image).arg("--socket").arg(two.site.socket("s")).args(options)
    };
    serve(&two.images[0], &["--group", "db"])
        .code(4)
        .says(&["log.raw is in the group db as well", "forget --group db"]);
    serve(&two.images[0], &["--group", "other"]).code(4).says(&["data.raw is in the group db"]);
    {
        let _one = two.site.serve(&[&two.images[0]], &[]);
        two.sync(&[]).code(4).says(&["data.raw of the group db is served, and", "log.raw is not"]);
        let _other = two.site.serve(&[&two.images[1]], &[]);
        two.sync(&[]).code(4).says(&["does not serve it as a member of a group"]);
    }
    two.site.dsync(["forget", "--group", "db"]).arg(&two.images[1]).ok();
    let again = two.site.dsync(["forget", "--group", "db"]).arg(&two.images[1]).code(1);
    again.says(&["is not in a group"]);
    let (members, _) = summaries(&two.sync(&[]).ok());
    assert_eq!(members.len(), 1);
}

#[test]
fn a_new_member_is_copied_and_joins() {
    let mut two = Two::new("a new member");
    two.sync(&[]).ok();
    two.server.take().expect("a server").stop();
    let third = two.site.image("wal.raw", SIZE);
    image::scribble(&third, 3 * MIB, MIB, &mut two.random);
    let images: Vec<&Path> = two.images.iter().chain([&third]).map(PathBuf::as_path).collect();
    two.server = Some(two.site.serve(&images, &["--group", "db"]));
    let pairs = two.pairs(1);
    pairs.wait_for(50);
    let output = two.sync(&[]).ok();
    let (members, group) = summaries(&output);
    pairs.stop();
    together(&two.dir, "with a third");
    assert_eq!(members.len(), 3, "{output}");
    assert!(group["seeded"][0].as_str().is_some_and(|name| name.ends_with("/wal.raw")), "{output}");
    image::assert_equal(&third, &two.dir.join("wal.raw"));
    let third = two.site.dsync(["status"]).arg(two.dir.join("wal.raw")).ok();
    shows(&third, &["at common epoch 2 of group db"]);
}

/// The moments from before a disk joined are there for those that had a part in them.
/// A repair of one replica, of damage or of nothing, costs the group no moment.
#[test]
fn a_repair_of_a_member_costs_no_common_moment() {
    let mut two = Two::on_disk("a repair of a member");
    two.sync(&["--keep", "24h"]).ok();
    two.change(0, 5);
    two.sync(&[]).ok();
    let were = two.replicas().each_ref().map(|replica| std::fs::read(replica).expect("a replica"));
    let dir = two.dir();
    for damaged in [false, true] {
        let [replica, _] = two.replicas();
        if damaged {
            two.damage();
        }
        two.site.dsync(["verify", "--repair"]).args([&two.images[0], &replica]).output();
        two.command(&["rewind", "--group", &dir, "--to", "1"]).ok();
        two.command(&["rewind", "--group", &dir, "--to", "2"]).ok();
        let is = two.replicas().each_ref().map(|replica| std::fs::read(replica).expect("a replica"));
        assert!(is == were, "damaged: {damaged}");
    }
    two.change(0, 5);
    two.sync(&[]).ok();
    two.change(1, 5);
    two.sync(&[]).ok();
    shows(
        &two.command(&["rewind", "--group", &dir]).ok(),
        &["common epoch 3", "common epoch 2", "common epoch 1"],
    );
    two.command(&["rewind", "--group", &dir, "--to", "2"]).ok();
    let is = two.replicas().each_ref().map(|replica| std::fs::read(replica).expect("a replica"));
    assert!(is == were, "after two more syncs");
}

#[test]
fn a_repair_of_a_member_that_is_killed_costs_no_common_moment() {
    const WHAT: &str = "a repair of a member that is killed";
    if !need(&["strace"], WHAT) {
        return;
    }
    let mut two = Two::new(WHAT);
    two.sync(&["--keep", "24h"]).ok();
    let dir = two.dir();
    // At each of its renames, up to the first repair that has no more of them.
    let mut killed = 0;
    for at in 1.. {
        (0..2).for_each(|disk| two.change(disk, 3));
        let (_, group) = summaries(&two.sync(&[]).ok());
        let epoch = group["epoch"].to_string();
        // What is damaged is damaged in the moments from before the repair, too.
        let sound = |two: &Two| {
            two.replicas().map(|replica| std::fs::read(replica).expect("a replica").split_off(BLOCK as usize))
        };
        let were = sound(&two);
        two.damage();
        let repair = two.site.killed_at_rename(at, ["verify", "--repair"]);
        let [replica, _] = two.replicas();
        let cut = repair.args([&two.images[0], &replica]).output();
        two.change(1, 3);
        let (members, _) = summaries(&two.sync(&[]).ok());
        assert_eq!(members[0]["bytes_written"], 0, "the sync has gone on from the repair: {members:?}");
        two.site.dsync(["verify", "--repair"]).args([&two.images[0], &replica]).ok();
        two.equal();
        two.command(&["rewind", "--group", &dir, "--to", &epoch]).ok();
        assert!(sound(&two) == were, "at rename {at}: {cut}");
        if cut.status.success() {
            break;
        }
        killed += 1;
    }
    assert!(killed > 3, "{killed} repairs were killed");
    println!("{killed} repairs were killed");
}

#[test]
fn a_group_goes_back_to_before_a_disk_joined() {
    let mut two = Two::new("a moment from before a disk joined");
    two.sync(&["--keep-last", "20"]).ok();
    let before = two.replicas().each_ref().map(|replica| std::fs::read(replica).expect("a replica"));
    (0..2).for_each(|disk| two.change(disk, 5));
    two.sync(&[]).ok();
    two.stop();
    let third = two.site.image("wal.raw", SIZE);
    image::scribble(&third, 3 * MIB, MIB, &mut two.random);
    let images: Vec<&Path> = two.images.iter().chain([&third]).map(PathBuf::as_path).collect();
    let server = two.site.serve(&images, &["--group", "db"]);
    two.sync(&["--keep-last", "20"]).ok();
    server.stop();
    let (dir, wal) = (two.dir(), two.dir.join("wal.raw"));
    shows(&two.command(&["rewind", "--group", &dir]).ok(), &["common epoch 2 without wal.raw"]);
    let rewound = two.command(&["rewind", "--group", &dir, "--to", "1"]).ok();
    shows(&rewound, &["common epoch 1", "without wal.raw"]);
    assert!(two.replicas().each_ref().map(|replica| std::fs::read(replica).expect("a replica")) == before);
    image::assert_equal(&third, &wal);
    // It is not at that moment, and nobody takes it for that.
    two.command(&["promote", "--force", "--group", &dir]).code(4).says(&["was committed without", "wal.raw"]);
    two.command(&["rewind", "--group", &dir, "--to", "3"]).ok();
    let server = two.site.serve(&images, &["--group", "db"]);
    let (members, _) = summaries(&two.sync(&[]).ok());
    assert!(members.iter().all(|member| member["method"] == "tracked"), "{members:?}");
    server.stop();
    two.equal();
    image::assert_equal(&third, &wal);
}

/// A disk is taken out of the group: the others take over by a switch once its replica is no member any more.
#[test]
fn a_group_switches_without_a_disk_that_was_taken_out() {
    let mut two = Two::new("a disk is taken out");
    two.sync(&["--keep-last", "5"]).ok();
    two.change(0, 5);
    two.sync(&[]).ok();
    two.stop();
    two.command(&["forget", "--group", "db"]).arg(&two.images[1]).ok();
    image::scribble(&two.images[0], MIB, BLOCK, &mut two.random);
    let (dir, log) = (two.dir(), two.replicas()[1].display().to_string());
    two.command(&["demote", "--group", "db", &dir]).ok();
    let why = ["was committed without", log.as_str(), "dsync forget REPLICA"];
    two.command(&["promote", "--group", &dir]).code(4).says(&why);
    two.command(&["forget", &log]).ok();
    shows(&two.command(&["rewind", "--group", &dir]).ok(), &["common epoch 1 without log.raw"]);
    two.command(&["promote", "--group", &dir]).ok();
    image::assert_equal(&two.images[0], &two.replicas()[0]);
}

/// One disk of a group is not demoted by itself: its replica could not take over with the others.
#[test]
fn a_member_is_not_demoted_alone() {
    let mut two = Two::new("a member is demoted");
    two.sync(&[]).ok();
    two.stop();
    let (disk, replica) = (two.images[1].display().to_string(), two.replicas()[1].display().to_string());
    let words = ["log.raw is in the group db", "dsync demote --group db", "dsync forget --group db"];
    for arguments in [&["demote", &disk, &replica][..], &["demote", &disk], &["demote", "-n", &disk]] {
        two.command(arguments).code(4).says(&words);
    }
    let dir = two.dir();
    two.command(&["demote", "--group", "db", &dir]).ok();
    two.command(&["promote", "--group", &dir]).ok();
    for (image, replica) in two.images.iter().zip(two.replicas()) {
        image::assert_equal(image, &replica);
    }
}

/// A rewind of a group is no step of the history that a promoted replica goes on from: one that followed another branch meanwhile, and has
/// the only copy of it, has diverged.
#[test]
fn a_rewound_group_knows_nothing_of_the_branch_that_it_left() {
    let mut two = Two::new("a rewound group is promoted");
    let [b, c, d] = ["b", "c", "d"].map(|name| {
        let dir = two.site.path(name);
        std::fs::create_dir(&dir).expect("a folder");
        dir
    });
    let brought = |site: &Site, dir: &Path| site.dsync(["sync", "--group", "db"]).arg(dir);
    [&b, &d].into_iter().for_each(|dir| drop(brought(&two.site, dir).ok()));
    brought(&two.site, &c).args(["--keep-last", "20"]).ok();
    for _ in 0..3 {
        [0, 1].into_iter().for_each(|disk| two.change(disk, 3));
        brought(&two.site, &c).ok();
    }
    two.stop();
    // The one in b takes over; those in c and d follow it.
    let (at_b, at_c) = (Site::new(), Site::new());
    at_b.dsync(["promote", "--force", "--group"]).arg(&b).ok();
    for name in NAMES {
        image::scribble(&b.join(format!("{name}.raw")), 3 * MIB, MIB, &mut two.random);
    }
    brought(&at_b, &d).ok();
    at_c.dsync(["rewind", "--group", "--to", "1"]).arg(&c).ok();
    brought(&at_b, &c).ok();
    // It is lost, and the one in c takes over as it was before that.
    at_c.dsync(["rewind", "--group", "--to", "4"]).arg(&c).ok();
    at_c.dsync(["promote", "--force", "--group"]).arg(&c).ok();
    let before = NAMES.map(|name| image::fingerprint(&d.join(format!("{name}.raw"))));
    brought(&at_c, &d).code(4).says(&["has diverged", "of term 2, and term 3 goes on from"]);
    assert_eq!(before, NAMES.map(|name| image::fingerprint(&d.join(format!("{name}.raw")))));
}

/// That a replica may give up what only it has says nothing of its source, and nothing of the other replicas: of a disk that was lost, in whose
/// place is an empty file or an older copy, theirs is the only copy.
#[test]
fn a_consent_to_discard_is_for_what_has_diverged() {
    for (lost, older) in [(1, false), (1, true), (0, false)] {
        let what = format!("disk {lost} is lost, an older copy is in its place: {older}");
        let mut two = Two::new(&what);
        let [far, third] = ["far", "third"].map(|name| two.site.path(name));
        for dir in [&far, &third] {
            std::fs::create_dir(dir).expect("a folder");
            two.site.dsync(["sync", "--group", "db"]).arg(dir).ok();
        }
        // Only the first disk of far is on another branch later.
        two.change(0, 3);
        two.site.dsync(["sync", "--group", "db"]).arg(&far).ok();
        two.stop();
        let there = Site::in_memory();
        there.dsync(["promote", "--force", "--group"]).arg(&third).ok();
        let disk = third.join(format!("{}.raw", NAMES[lost]));
        let (kept, copy) = (std::fs::read(&disk).expect("a disk"), there.path("copy.raw"));
        if older {
            Run::new("cp").args(["-p"]).arg(&disk).arg(&copy).ok();
        } else {
            std::fs::File::create(&copy).and_then(|file| file.set_len(SIZE)).expect("an empty file");
        }
        if older {
            let server = there.serve(&[&disk], &[]);
            let mut client = server.client(NAMES[lost]);
            client.write(0, &two.random.bytes(BLOCK as usize)).expect("a write");
            client.close().expect("the end");
            server.stop();
        }
        std::fs::remove_file(&disk).expect("a disk");
        Run::new("cp").args(["-p", "--sparse=always"]).arg(&copy).arg(&disk).ok();
        let before = fingerprints(&far.join("data.raw"));
        let brought = |options: &[&str]| there.dsync(["sync", "--group", "db"]).arg(&far).args(options);
        for options in [&["--discard-there"][..], &["--discard-there", "-n"]] {
            let refused = brought(options).code(4);
            let words = if older { "may be the newest copy" } else { "may be the only copy" };
            refused.says(&[words]);
            assert!(!refused.text().contains("gave up"), "{what}: {refused}");
            assert_eq!(before, fingerprints(&far.join("data.raw")), "{what}");
        }
        // By itself as well.
        let alone = there
            .dsync(["sync", "--discard-there"])
            .arg(&disk)
            .arg(far.join(disk.file_name().expect("a name")));
        alone.code(4).says(&["Nothing was changed"]);
        // Once the disk is back, the consent holds.
        std::fs::remove_file(&disk).expect("a disk");
        std::fs::write(&disk, kept).expect("a disk");
        brought(&["--discard-there", "--accept-source"]).ok();
        NAMES.iter().for_each(|name| {
            image::assert_equal(&third.join(format!("{name}.raw")), &far.join(format!("{name}.raw")));
        });
    }
}

/// A replica under another name is no reason for a second copy of its source beside it.
#[test]
fn a_replica_of_another_name_is_not_copied_anew() {
    let two = Two::on_disk("a renamed replica");
    two.sync(&[]).ok();
    let rename = |from: &str, to: &str| {
        for (from, to) in
            [(from.to_owned(), to.to_owned()), (format!(".{from}.dsync"), format!(".{to}.dsync"))]
        {
            std::fs::rename(two.dir.join(from), two.dir.join(to)).expect("a replica");
        }
    };
    rename("data.raw", "old.raw");
    for options in [&[][..], &["-n"]] {
        two.sync(options).code(4).says(&["has no data.raw", "rename old.raw to data.raw", ".old.raw.dsync"]);
    }
    assert!(!two.dir.join("data.raw").exists());
    rename("old.raw", "data.raw");
    two.sync(&[]).ok();
    two.equal();
}

/// Two hosts have groups of one name: each commit in one folder would leave out the disks of the other.
#[test]
fn two_groups_of_one_name_do_not_share_a_folder() {
    let (two, other) = (Two::new("a group in a folder"), Site::new());
    two.sync(&[]).ok();
    let images = ["p.raw", "q.raw"].map(|name| other.image(name, MIB));
    let server = other.serve(&images.each_ref().map(PathBuf::as_path), &["--group", "db"]);
    let sync = || other.dsync(["sync", "--group", "db"]).arg(&two.dir);
    sync().code(4).says(&["the replicas of another group db", "data.raw", "a folder of their own"]);
    assert!(!two.dir.join("p.raw").exists());
    two.sync(&[]).ok();
    // What is given up is in nobody's way.
    for replica in two.replicas() {
        two.command(&["forget"]).arg(replica).ok();
    }
    sync().ok();
    server.stop();
}

/// Nothing tells whether a device at rest was written to. What this command has just synced is taken as that.
#[test]
fn a_group_of_devices_at_rest_switches() {
    let what = "a switch of devices at rest";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let (mut random, site) = (Random::new(what), Site::new());
    let beneath = NAMES.map(|name| site.image(&format!("{name}-disk"), SIZE));
    beneath.iter().for_each(|image| image::scribble(image, MIB, MIB, &mut random));
    let loops = beneath.each_ref().map(|image| testing::Loop::new(image));
    let [Some(data), Some(log)] = &loops else { return skipped(what, "there is no loop device") };
    let dir = site.path("replicas");
    std::fs::create_dir(&dir).expect("a folder");
    site.serve(&[data.device(), log.device()], &["--group", "db"]).stop();
    site.dsync(["sync", "--group", "db"]).arg(&dir).ok();
    site.dsync(["demote", "--group", "db"]).arg(&dir).ok();
    site.dsync(["promote", "--group"]).arg(&dir).ok();
    for device in [data.device(), log.device()] {
        let replica = dir.join(device.file_name().expect("a name"));
        assert!(std::fs::read(device).expect("a device") == std::fs::read(replica).expect("a replica"));
    }
}

/// Block devices on both hosts, each behind a link in one folder, are called by their links throughout: over a forced promotion, back by difference, and
/// over a planned switch.
#[test]
fn a_group_of_devices_behind_links_takes_over_and_back() {
    let what = "devices behind links";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let (mut random, near, far) = (Random::new(what), Site::new(), Site::new());
    let mut kept = Vec::new();
    for site in [&near, &far] {
        std::fs::create_dir(site.path("disks")).expect("a folder");
        for name in NAMES {
            let Some(device) = testing::Loop::new(&site.image(&format!("{name}-disk"), SIZE)) else {
                return skipped(what, "there is no loop device");
            };
            std::os::unix::fs::symlink(device.device(), site.path(&format!("disks/{name}.raw")))
                .expect("a link");
            kept.push(device);
        }
    }
    let disks = |site: &Site| NAMES.map(|name| site.path(&format!("disks/{name}.raw")));
    let dir = |site: &Site| site.path("disks");
    let mut write = |site: &Site, block: u64| {
        let images = disks(site);
        let server =
            site.serve(&images.each_ref().map(PathBuf::as_path), &["--group", "db", "--trust-device"]);
        for name in NAMES {
            let mut client = Client::connect(&server.address(), name).expect("a client");
            client.write(block * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
            client.flush().expect("a flush");
        }
        server
    };
    let equal = || {
        for (one, other) in disks(&near).iter().zip(&disks(&far)) {
            assert!(
                std::fs::read(one).expect("a disk") == std::fs::read(other).expect("a disk"),
                "{}",
                one.display()
            );
        }
        for site in [&near, &far] {
            let names = std::fs::read_dir(dir(site)).expect("a folder").flatten();
            let names = names.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
            assert_eq!(names.count(), NAMES.len(), "a disk was made under another name");
        }
    };
    let towards = |from: &Site, to: &Site, words: &[&str]| {
        let run = from.dsync(words).args(["--rsh", RSH]).arg(format!("far:{}", dir(to).display()));
        run.env("RSH_STATE", to.state())
    };
    let brought = |from: &Site, to: &Site| {
        let (members, _) = summaries(&towards(from, to, &["sync", "--json", "--group", "db"]).ok());
        equal();
        members.iter().map(|member| dsync_tests::scene::number(member, "blocks_changed")).collect::<Vec<_>>()
    };
    let server = write(&near, 1);
    brought(&near, &far);
    server.stop();
    write(&near, 2).stop();
    let there = dir(&far).display().to_string();
    let refused = far.dsync(["promote", "--group"]).arg(dir(&far)).code(4);
    refused.says(&[&format!("[HOST:]{there}\""), &format!("dsync promote --force --group {there}\"")]);
    let forced = far.dsync(["promote", "--force", "--group"]).arg(dir(&far)).ok();
    let way_back = "dsync sync --group db --save-there FOLDER";
    shows(
        &forced,
        &[
            "dsync sync --group db DIR --save-there FOLDER",
            &format!("dsync serve --group db {}/data.raw", dir(&far).display()),
        ],
    );
    let server = write(&far, 3);
    towards(&far, &near, &["sync", "--group", "db"]).code(4).says(&["have diverged", way_back]);
    shows(&far.dsync(["status", "--check"]).code(1), &["is not brought up to date", "have diverged"]);
    let lost = near.path("lost");
    near.dsync(["demote", "--group", "db", "--trust-device"]).ok();
    let save = ["sync", "--json", "--group", "db", "--save-there", lost.to_str().expect("UTF-8")];
    let (members, _) = summaries(&towards(&far, &near, &save).ok());
    assert!(
        members.iter().all(|member| dsync_tests::scene::number(member, "blocks_changed") == 2),
        "{members:?}"
    );
    equal();
    NAMES.iter().for_each(|name| assert!(lost.join(format!("{name}.raw.delta")).exists()));
    server.stop();
    towards(&far, &near, &["demote", "--group", "db", "--trust-device"]).ok();
    far.dsync(["sync", "--group", "db"])
        .arg("/nowhere")
        .code(4)
        .says(&["were demoted here", "dsync promote --force /dev/"]);
    // Not one without the other.
    let alone = near.dsync(["promote"]).arg(&disks(&near)[0]).code(4);
    alone.says(&[&format!("run \"dsync promote --group {}\"", dir(&near).display())]);
    near.dsync(["promote", "--group"]).arg(dir(&near)).ok();
    let server = write(&near, 4);
    assert_eq!(brought(&near, &far), [1, 1]);
    // Whichever of the two is to be given up.
    far.dsync(["promote", "--force", "--group"]).arg(dir(&far)).ok();
    for (one, other) in [(&near, &far), (&far, &near)] {
        towards(one, other, &["sync", "--group", "db"]).code(4).says(&["have diverged", way_back]);
    }
    server.stop();
}

#[test]
fn replicas_on_devices_commit_together() {
    let what = "a group on loop devices";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let mut two = Two::new(what);
    let beneath = NAMES.map(|name| two.site.image(&format!("{name}-disk"), SIZE));
    let small = two.site.image("small", SIZE / 2);
    let loops = beneath.each_ref().map(|image| testing::Loop::new(image));
    let ([Some(data), Some(log)], Some(tiny)) = (&loops, testing::Loop::new(&small)) else {
        return skipped(what, "there is no loop device");
    };
    let link = |name: &str, device: &Path| {
        let at = two.dir.join(format!("{name}.raw"));
        let _ = std::fs::remove_file(&at);
        std::os::unix::fs::symlink(device, at).expect("a link");
    };
    link(NAMES[0], data.device());
    // Too small: refused before anything is written.
    link(NAMES[1], tiny.device());
    two.sync(&[]).code(4).says(&["log.raw has", "give a device at least that large"]);
    assert!(image::is_zero(&std::fs::read(data.device()).expect("a device")));
    link(NAMES[1], log.device());
    two.sync(&[]).ok();
    let mut next = 1;
    for round in 0..rounds(3, 100) {
        let pairs = two.pairs(next);
        pairs.wait_for(100);
        let mut sync = two.sync(&[]).start();
        std::thread::sleep(Duration::from_millis(two.random.below(150)));
        sync.kill();
        next = pairs.stop();
        two.recover();
        together(&two.dir, &format!("round {round}"));
        two.sync(&[]).ok();
        together(&two.dir, &format!("round {round}, synced"));
    }
    // Folders of devices do not survive a reboot.
    let dev = Path::new("/dev");
    two.site.dsync(["sync", "--group", "db"]).arg(dev).code(4).says(&["does not survive a reboot"]);
}

#[test]
fn a_mirror_of_a_group_is_at_one_moment_whenever_it_is_killed() {
    let mut two = Two::new("a mirror of a group");
    let mirror = |two: &Two| {
        let mirror = two.site.dsync(["mirror", "-v", "--group", "db", "--rpo", "1s"]).arg(&two.dir);
        let mut mirror = mirror.start();
        mirror.wait_to_say("mirroring group db");
        mirror
    };
    let (mut next, mut before) = (1, 0);
    for round in 0..rounds(3, 100) {
        let mut running = mirror(&two);
        let pairs = two.pairs(next);
        pairs.wait_for(300);
        let until = Instant::now() + Duration::from_secs(60);
        while !running.stderr_so_far().contains("is at common epoch") && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(two.random.below(900)));
        running.kill();
        next = pairs.stop();
        two.recover();
        let at = together(&two.dir, &format!("round {round}"));
        assert!(at > before, "round {round}: the mirror brought nothing");
        before = at;
    }
    // The server is killed under it, and comes back.
    let mut running = mirror(&two);
    let pairs = two.pairs(next);
    pairs.wait_for(100);
    two.server.take().expect("a server").kill();
    next = pairs.stop();
    two.start();
    let pairs = two.pairs(next);
    pairs.wait_for(300);
    next = pairs.stop();
    assert!(next > 1);
    // What was written until it is stopped is there.
    running.signal(rustix::process::Signal::TERM);
    let output = running.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    shows(&output, &["at common epoch", "commits with"]);
    two.equal();
}

/// A server that stays away is waited for, however it ended: it is not held up when it comes back, and is gone on from.
#[test]
fn a_mirror_of_a_group_waits_for_its_server() {
    let mut two = Two::new("the server of a group stays away");
    let mirror = two.site.dsync(["mirror", "-v", "--group", "db", "--rpo", "1s"]).arg(&two.dir);
    let mut running = mirror.start();
    running.wait_to_say("mirroring group db");
    for killed in [true, false] {
        let before = running.stderr_so_far().matches("retrying").count();
        let server = two.server.take().expect("a server");
        let _ = if killed { server.kill() } else { server.stop() };
        until("it waits", || {
            assert!(running.ended().is_none(), "{}", running.stderr_so_far());
            running.stderr_so_far().matches("retrying").count() >= before + 3
        });
        two.start();
        two.change(0, 50);
        until("it goes on", || image::first_difference(&two.images[0], &two.replicas()[0]).is_none());
    }
    running.signal(rustix::process::Signal::TERM);
    let output = running.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    shows(&output, &["at common epoch"]);
    assert!(output.stderr.contains("is not served"), "{output}");
    two.equal();
}

/// A mirror over a line that is cut goes on by itself.
#[test]
fn a_mirror_of_a_group_goes_on_over_another_line() {
    let (two, there) = (Two::new("a mirror of a far group"), FarGroup::new());
    let mirror = two.site.dsync(["mirror", "--group", "db", "--rpo", "1s", "--rsh", RSH]);
    let mirror = mirror.arg(format!("far:{}", there.dir.display())).env("RSH_STATE", there.far.site.state());
    let mut running = mirror.env("RSH_CUT", (6 * MIB).to_string()).start();
    running.wait_to_say("mirroring group db");
    let mut next = 1;
    while !running.stderr_so_far().contains("retrying") {
        let pairs = two.pairs(next);
        pairs.wait_for(300);
        next = pairs.stop();
        assert!(running.ended().is_none(), "{}", running.stderr_so_far());
    }
    running.signal(rustix::process::Signal::TERM);
    let output = running.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    for (image, name) in two.images.iter().zip(NAMES) {
        image::assert_equal(image, &there.dir.join(format!("{name}.raw")));
    }
}

/// Its disks are told as paused, and others can use the replicas meanwhile.
#[test]
fn a_mirror_of_a_group_pauses_and_goes_on() {
    let mut two = Two::new("a pause of a group");
    two.sync(&[]).ok();
    let conf = two.site.path("conf");
    std::fs::create_dir_all(&conf).expect("a folder");
    let dir = two.dir.display().to_string();
    let job = move |limit: &str| {
        let text =
            format!("command = mirror\ngroup = db\ndestination = {dir}\nrpo = 1s\nbwlimit = {limit}\n");
        std::fs::write(conf.join("db.conf"), text).expect("a job");
    };
    job("00:00-12:00=pause,12:00-24:00=pause");
    let mut mirror = two.site.dsync(["run", "db"]).start();
    let mut watch = two.site.dsync(["status", "--watch=1"]).start();
    watch.wait_to_say("paused by --bwlimit");
    watch.kill();
    two.site.dsync(["recover"]).arg(&two.replicas()[0]).ok();
    two.change(0, 50);
    std::thread::sleep(Duration::from_secs(1));
    assert!(image::first_difference(&two.images[0], &two.replicas()[0]).is_some(), "it does not pause");
    job("off");
    mirror.signal(rustix::process::Signal::HUP);
    until("it goes on", || image::first_difference(&two.images[0], &two.replicas()[0]).is_none());
    mirror.wait_to_say("mirroring group db");
    mirror.signal(rustix::process::Signal::TERM);
    let ended = mirror.output(Duration::from_secs(30));
    assert!(ended.status.success(), "{ended}");
    two.equal();
}

/// What was written before another command has ended an epoch is brought too.
#[test]
fn a_mirror_of_a_group_that_is_stopped_brings_what_others_have_synced() {
    let mut two = Two::new("a stop after another sync");
    let mirror = two.site.dsync(["mirror", "--group", "db", "--rpo", "60s"]).arg(&two.dir);
    let mut mirror = mirror.start();
    mirror.wait_to_say("mirroring group db");
    two.change(0, 50);
    let (image, other) = (two.images[0].clone(), two.site.path("other.raw"));
    two.site.dsync(["sync"]).args([&image, &other]).ok();
    mirror.signal(rustix::process::Signal::TERM);
    let ended = mirror.output(Duration::from_secs(30));
    assert!(ended.status.success(), "{ended}");
    image::assert_equal(&image, &other);
    two.equal();
}

#[test]
fn a_mirror_of_what_is_not_served_is_refused() {
    let mut two = Two::new("a mirror of a group at rest");
    two.server.take().expect("a server").stop();
    let mirror = two.site.dsync(["mirror", "--group", "db"]).arg(&two.dir).code(4);
    mirror.says(&["is not served", "dsync serve --group db"]);
    two.site.dsync(["mirror", "--group", "db"]).args([&two.images[0], &two.dir]).code(2);
    two.site.dsync(["mirror", "--group", "db", "--rate", "1M"]).arg(&two.dir).code(2);
}

/// What was cut and not committed is no common epoch, wherever it is asked for.
#[test]
fn a_cut_that_was_not_committed_is_not_counted() {
    let (mut two, there) = (Two::new("a cut that comes to nothing"), FarGroup::new());
    there.sync(&two, None).ok();
    shows(&two.site.dsync(["status", "-v"]).ok(), &["at its common epoch 1", "last common epoch 1"]);
    two.change(0, 200);
    let epoch = || two.site.dsync(["status", "data", "--json"]).ok().summary()["epoch"].clone();
    let before = epoch();
    let output = there.sync(&two, Some(100_000)).output();
    assert_eq!(output.status.code(), Some(1), "{output}");
    assert_ne!(epoch(), before, "the cut has ended no epoch: {output}");
    shows(&two.site.dsync(["status", "-v"]).ok(), &["past its common epoch 1", "last common epoch 1"]);
    let (_, group) = summaries(&there.sync(&two, None).ok());
    let told = format!("last common epoch {}", group["epoch"]);
    shows(&two.site.dsync(["status", "-v"]).ok(), &[&told]);
}

/// What was sent of one member is exact until all are committed: what another program writes meanwhile is not in it, and may be in
/// what is sent of the next.
#[test]
fn a_write_beneath_a_source_at_rest_ends_the_sync_of_all() {
    let mut two = Two::new("a write beneath a source at rest");
    two.sync(&[]).ok();
    two.change(0, 300);
    two.change(1, 300);
    two.server.take().expect("a server").stop();
    let mut sync = two.sync(&["--bwlimit", "512K"]).start();
    let journals = NAMES.map(|name| two.dir.join(format!(".{name}.raw.dsync/journal")));
    let has_come = |at: usize| std::fs::metadata(&journals[at]).is_ok_and(|file| file.len() > 0);
    let until = Instant::now() + Duration::from_secs(60);
    while !(has_come(0) && has_come(1)) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The one that was prepared has its trailer: it is the older file.
    let born =
        |at: usize| std::fs::metadata(&journals[at]).and_then(|file| file.created()).expect("a journal");
    let first = usize::from(born(1) < born(0));
    assert!(sync.ended().is_none(), "{}", sync.stderr_so_far());
    image::scribble(&two.images[first], MIB, BLOCK, &mut two.random);
    let output = sync.output(Duration::from_secs(60));
    assert_eq!(output.status.code(), Some(1), "{output}");
    shows(&output, &[&format!("{}.raw", NAMES[first])]);
    for replica in two.replicas() {
        shows(&two.site.dsync(["status"]).arg(replica).ok(), &["at common epoch 1 of group db"]);
    }
    two.sync(&[]).ok();
    two.equal();
}

#[test]
fn a_mirror_of_a_group_waits_for_a_replica_in_use() {
    let two = Two::new("a mirror of a group in use");
    two.sync(&[]).ok();
    let held = std::fs::File::options().read(true).open(two.dir.join(".log.raw.dsync/lock")).expect("a lock");
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).expect("the lock");
    let mirror = |options: &[&str]| {
        two.site.dsync(["mirror", "--group", "db", "--rpo", "1s"]).arg(&two.dir).args(options)
    };
    mirror(&[]).code(6).says(&["log.raw", "is in use"]);
    let mut waiting = mirror(&["--wait=10min"]).start();
    let until = Instant::now() + Duration::from_secs(60);
    while !waiting.stderr_so_far().contains("waiting for up to") && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(held);
    waiting.wait_to_say("mirroring group db");
    waiting.signal(rustix::process::Signal::TERM);
    let output = waiting.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
}

/// Reads an export to a file.
fn fetch(server: &Server, export: &str, to: &Path) {
    let mut client = server.client(export);
    let bytes = client.read(0, SIZE as u32).expect("an export");
    std::fs::write(to, bytes).expect("a file");
    client.close().expect("the end");
}

/// The last record on the first of two exports, which must be of one moment.
fn shown_together(two: &Two, server: &Server, what: &str) -> u64 {
    let dir = two.site.path("shown");
    std::fs::create_dir_all(&dir).expect("a folder");
    NAMES.iter().for_each(|name| fetch(server, name, &dir.join(format!("{name}.raw"))));
    together(&dir, what)
}

impl Two {
    fn command(&self, words: &[&str]) -> Run {
        self.site.dsync(words)
    }

    fn stop(&mut self) {
        self.server.take().expect("a server").stop();
    }

    /// The promoted replicas are the sources from now on, and the other way round.
    fn exchange(&mut self) {
        let dir = self.images[0].parent().expect("a folder").to_path_buf();
        self.images = self.replicas();
        self.dir = dir;
    }

    fn dir(&self) -> String {
        self.dir.display().to_string()
    }
}

#[test]
fn a_group_switches_and_comes_back() {
    let mut two = Two::new("a switch of a group");
    two.sync(&[]).ok();
    let mut next = 1;
    for _ in 0..2 {
        let pairs = two.pairs(next);
        pairs.wait_for(200);
        two.sync(&[]).ok();
        pairs.wait_for(200);
        next = pairs.stop();
        let dir = two.dir();
        two.command(&["demote", "--group", "db", &dir]).code(4).says(&["is being served"]);
        two.stop();
        two.command(&["promote", "--group", &dir]).code(4).says(&["its source has not said"]);
        shows(&two.command(&["demote", "-n", "--group", "db", &dir]).ok(), &["would become a replica"]);
        let demoted = two.command(&["demote", "--group", "db", &dir]).ok();
        shows(&demoted, &["is now a replica of source", "group db in", "can be promoted"]);
        assert_eq!(together(&two.dir, "demoted") + 1, next);
        two.equal();
        // What is given up can be used no more, and the same command says so again.
        let given_up = two.command(&["serve"]).arg(&two.images[0]).arg("--socket").arg(two.site.socket("s"));
        given_up.code(4).says(&["a replica of source"]);
        let promoted = two.command(&["promote", "--group", &dir]).ok();
        shows(
            &promoted,
            &[
                "nothing that was written to it is lost",
                "goes on from common epoch",
                "dsync serve --group db",
            ],
        );
        two.command(&["promote", "--group", &dir]).code(4).says(&["is a source already"]);
        two.exchange();
        two.start();
        let pairs = two.pairs(next);
        pairs.wait_for(200);
        // The way back moves the differences alone.
        let (members, _) = summaries(&two.sync(&[]).ok());
        assert!(members.iter().all(|member| member["method"] == "tracked"), "{members:?}");
        together(&two.dir, "back");
        next = pairs.stop();
        two.sync(&[]).ok();
        two.equal();
    }
}

/// A demotion that was carried out says nothing of what its disks became since: it is not carried out again.
#[test]
fn a_demotion_ends_no_later_term() {
    let mut two = Two::new("a group that was demoted long ago");
    two.sync(&[]).ok();
    let dir = two.dir();
    two.stop();
    two.command(&["demote", "--group", "db", &dir]).ok();
    let again = ["demote", "-n", "--group", "db", &dir];
    two.command(&again).code(4).says(&["are demoted already"]);
    // It is called off, and the disks are used by themselves.
    for image in &two.images {
        two.command(&["promote", "--force"]).arg(image).ok();
    }
    let held = |image: &PathBuf| std::fs::read(image).expect("an image");
    for (at, image) in two.images.iter().enumerate() {
        let server = two.site.serve(&[image], &[]);
        server
            .client(NAMES[at])
            .write(900 * BLOCK, &two.random.clone().bytes(BLOCK as usize))
            .expect("a write");
        server.stop();
    }
    let before = two.images.each_ref().map(held);
    two.command(&["demote", "--group", "db", &dir]).code(4).says(&["there is no group db"]);
    assert!(two.images.each_ref().map(held) == before);
    // They are sources still, and know what they have more.
    for (image, replica) in two.images.iter().zip(two.replicas()) {
        let synced = two.command(&["sync", "--json"]).args([image, &replica]).ok();
        assert_eq!(synced.summary()["method"], "tracked", "{synced}");
    }
    two.equal();
}

/// The source is gone, and comes back with writes that nobody has.
#[test]
fn a_group_is_taken_over_by_force_and_the_old_one_comes_back() {
    let (mut two, there) = (Two::new("a group by force"), FarGroup::new());
    there.sync(&two, None).ok();
    let pairs = two.pairs(1);
    pairs.wait_for(200);
    there.sync(&two, None).ok();
    let at = together(&there.dir, "synced");
    pairs.wait_for(100);
    let next = pairs.stop();
    assert!(next > at + 1);
    two.server.take().expect("a server").kill();
    let far = |words: &[&str]| there.far.site.dsync(words);
    let dir = there.dir.display().to_string();
    // Who looks at a member is named before.
    let shown = there.dir.join("data.raw@now");
    let looked_at = there.far.site.serve(&[&shown], &["--writable"]);
    let planned = far(&["promote", "-n", "--force", "--group", &dir]).ok();
    planned.says(&["shows epoch", "data.raw to its clients"]);
    shows(&planned, &["would go on from common epoch"]);
    looked_at.stop();
    let promoted = far(&["promote", "--force", "--group", &dir]).ok();
    assert_eq!(together(&there.dir, "promoted"), at);
    // What it goes on from is a common epoch, and a disk that is served alone is written to without the others.
    let goes_on = promoted.text().split("goes on from common epoch ").nth(1).expect("an epoch").to_owned();
    let epoch = goes_on.split(':').next().expect("a number");
    let past = format!("past its common epoch {epoch}");
    shows(&far(&["status", "-v"]).ok(), &[&past, &format!("last common epoch {epoch}")]);
    let alone = there.far.site.serve(&[&there.dir.join("data.raw")], &[]).stop();
    alone.says(&["data.raw is in the group db, and is served without it", "dsync serve --group db"]);
    shows(&promoted, &["dsync sync --group db DIR --save-there FOLDER"]);
    there
        .sync(&two, None)
        .code(4)
        .says(&["have diverged: both are sources", "--group db --save-there FOLDER"]);
    far(&["promote", "--force", "--group"])
        .arg(there.dir.join("data.raw"))
        .code(4)
        .says(&["is a disk", &dir]);
    let saved = two.site.path("saved");
    let images = NAMES.map(|name| there.dir.join(format!("{name}.raw")));
    // Disks that took over are at no moment of the past, whatever is written down of that.
    let listed = far(&["rewind", "--group", &dir, "--json"]).ok().summary();
    let rewind = || far(&["rewind", "--group", &dir, "--to", &listed["epoch"]["number"].to_string()]);
    rewind().code(4).says(&["is a source, and only replicas keep moments"]);
    let server = there.far.site.serve(&[&images[0], &images[1]], &["--group", "db"]);
    let home = two.images[0].parent().expect("a folder").to_path_buf();
    // It is back: what it wrote is saved, and given up on both disks, by one command.
    let back = |options: &[&str]| {
        let run =
            far(&["sync", "--group", "db", "--json", "--rsh", RSH]).arg(format!("far:{}", home.display()));
        run.args(options).env("RSH_STATE", two.site.state())
    };
    back(&[]).code(4).says(&["have diverged", "--save-there FOLDER"]);
    back(&["--save-there", "saved"]).code(2).says(&["absolute path"]);
    let (counted, _) = summaries(&back(&["--discard-there", "-n"]).ok());
    assert!(counted.iter().all(|member| member["given_up"]["bytes"].as_u64() > Some(0)), "{counted:?}");
    back(&[]).code(4).says(&["have diverged"]);
    let (members, _) = summaries(&back(&["--save-there", saved.to_str().expect("UTF-8")]).ok());
    for (member, name) in members.iter().zip(NAMES) {
        let file = saved.join(format!("{name}.raw.delta"));
        two.command(&["inspect"]).arg(&file).ok();
        assert_eq!(member["given_up"]["saved"], file.to_str().expect("UTF-8"));
    }
    assert!(members.iter().all(|member| member["method"] == "tracked"), "{members:?}");
    assert_eq!(together(&home, "back"), at);
    for (image, name) in images.iter().zip(NAMES) {
        image::assert_equal(image, &home.join(format!("{name}.raw")));
    }
    server.stop();
}

/// A replica that left the group is at the epoch of the common commit, with later writes: the group is not at one moment.
#[test]
fn a_member_that_is_ahead_is_not_at_the_common_epoch() {
    let mut two = Two::new("a member that is ahead");
    two.sync(&["--keep-last", "20"]).ok();
    two.stop();
    let ends = [two.images[0].clone(), two.replicas()[0].clone()];
    two.command(&["forget", "--group", "db"]).arg(&two.images[0]).ok();
    two.command(&["sync", "--method", "compare"]).args(&ends).ok();
    two.start();
    let mut mirror = two.command(&["mirror", "--rpo", "1s"]).args(&ends).start();
    mirror.wait_to_say("mirroring");
    let at = 77 * BLOCK;
    for name in ["log", "data"] {
        let mut client = two.server().client(name);
        client.write(at, &[0xaa; BLOCK as usize]).expect("a write");
        client.close().expect("the end");
    }
    let has = |replica: &PathBuf| std::fs::read(replica).expect("a replica")[at as usize] == 0xaa;
    let until = Instant::now() + Duration::from_secs(60);
    while !has(&ends[1]) {
        assert!(Instant::now() < until, "no batch comes: {}", mirror.stderr_so_far());
        std::thread::sleep(Duration::from_millis(20));
    }
    mirror.kill();
    two.server.take().expect("a server").kill();
    two.command(&["recover"]).arg(&ends[1]).ok();
    // The later write has come without the earlier one.
    assert!(!has(&two.replicas()[1]));
    let dir = two.dir();
    let why = "data.raw is not as it was at common epoch 1";
    shows(&two.command(&["rewind", "--group", &dir]).ok(), &[why, "common epoch 1"]);
    two.command(&["promote", "--force", "--group", &dir]).code(4).says(&[why, "dsync rewind --group"]);
    two.command(&["rewind", "--group", &dir, "--to", "1"]).ok();
    two.command(&["promote", "--force", "--group", &dir]).ok();
    assert_eq!(two.replicas().each_ref().map(has), [false, false]);
}

/// One replica is to be compared, as others have written to it; another one is newer than its source.
#[test]
fn an_adoption_overwrites_no_newer_member() {
    let mut two = Two::new("a group that is adopted");
    two.sync(&[]).ok();
    two.stop();
    let (state, before) = (two.site.state(), two.site.path("state-before"));
    Run::new("cp").arg("-a").args([&state, &before]).ok();
    let disks = two.images.each_ref().map(|image| std::fs::read(image).expect("an image"));
    two.start();
    two.change(1, 5);
    two.sync(&[]).ok();
    two.stop();
    // The host of the sources goes back as a whole.
    std::fs::remove_dir_all(&state).expect("a state");
    std::fs::rename(&before, &state).expect("a state");
    two.images.iter().zip(&disks).for_each(|(image, disk)| std::fs::write(image, disk).expect("an image"));
    let [data, log] = two.replicas();
    image::scribble(&data, MIB, BLOCK, &mut two.random);
    let newer = std::fs::read(&log).expect("a replica");
    two.sync(&[]).code(4).says(&["data.raw was modified outside dsync"]);
    two.sync(&["--adopt"]).code(4).says(&["log.raw", "gives up nothing that only the replica has"]);
    assert!(std::fs::read(&log).expect("a replica") == newer);
    two.sync(&["--adopt=overwrite"]).ok();
    two.equal();
}

/// What is written to a disk between a demotion that failed half way and its completion is not given up by that.
#[test]
fn a_demotion_that_failed_half_way_gives_up_no_later_write() {
    let mut two = Two::new("a demotion that fails half way");
    two.sync(&[]).ok();
    (0..2).for_each(|disk| two.change(disk, 5));
    two.stop();
    let log = two.images[1].clone();
    let in_the_way = two.site.path(".log.raw.dsync");
    std::fs::write(&in_the_way, "").expect("a file");
    let demote = |two: &Two| two.command(&["demote", "--group", "db"]);
    demote(&two).code(1);
    std::fs::remove_file(&in_the_way).expect("a file");
    // A disk that has ended is not opened, also where the record of that cannot be read.
    let serve = |two: &Two| two.command(&["serve"]).arg(&log).arg("--socket").arg(two.site.socket("s"));
    serve(&two).code(4).says(&["dsync demote --group db"]);
    let (record, aside) = (two.site.state().join("demoting/db"), two.site.path("aside"));
    std::fs::rename(&record, &aside).expect("a folder");
    std::os::unix::fs::symlink("db", &record).expect("a link");
    serve(&two).code(1).says(&["demoting/db"]);
    std::fs::remove_file(&record).expect("a link");
    std::fs::rename(&aside, &record).expect("a folder");
    image::scribble(&log, MIB, BLOCK, &mut two.random);
    let before = std::fs::read(&log).expect("an image");
    serve(&two).code(4).says(&["was interrupted"]);
    shows(&demote(&two).ok(), &["others may have written"]);
    assert!(std::fs::read(&log).expect("an image") == before);
    let status = two.command(&["status"]).arg(&log).code(4);
    assert!(status.says(&["was modified outside dsync"]).text().contains("demoted on"), "{status}");
    assert!(!status.text().contains("overwritten by the next sync"), "{status}");
}

/// The replicas go on from an earlier moment: what the old sources have since is in no epoch that they take for the one in common.
#[test]
fn what_came_after_the_moment_that_was_promoted_is_saved() {
    let mut two = Two::new("a group that is rewound and promoted");
    two.sync(&["--keep-last", "20"]).ok();
    for byte in [0x57, 0x52] {
        let mut client = two.server().client("data");
        client.write(u64::from(byte) * BLOCK, &[byte; BLOCK as usize]).expect("a write");
        client.close().expect("the end");
        two.sync(&[]).ok();
    }
    two.stop();
    let far = Site::new();
    let dir = two.dir();
    far.dsync(["rewind", "--to", "1", "--group", &dir]).ok();
    far.dsync(["promote", "--force", "--group", &dir]).ok();
    let saved = two.site.path("saved");
    // Nothing was written since the epoch that the sources know the replicas to have been at, which is another one.
    two.command(&["demote", "--group", "db"]).ok();
    let home = two.images[0].parent().expect("a folder").to_path_buf();
    let back = |options: &[&str]| far.dsync(["sync", "--group", "db", "--json"]).arg(&home).args(options);
    back(&[]).code(4).says(&["was demoted at epoch", "--group db --save-there FOLDER"]);
    let done = back(&["--save-there", saved.to_str().expect("UTF-8")]).ok();
    shows(&two.command(&["inspect"]).arg(saved.join("data.raw.delta")).ok(), &["8.00 KiB"]);
    // The way back is the differences.
    let (members, _) = summaries(&done);
    assert!(members.iter().all(|member| member["method"] == "tracked"), "{members:?}");
    two.equal();
}

/// A promotion that was a mistake is taken back, the old sources go on, and are lost later: the next promotion has the number of the
/// first one, and is another one all the same.
#[test]
fn a_promotion_that_was_taken_back_hinders_no_later_one() {
    let mut two = Two::new("a promotion that is taken back");
    let far = Site::new();
    two.sync(&[]).ok();
    let dir = two.dir();
    far.dsync(["promote", "--force", "--group", &dir]).ok();
    far.dsync(["demote", "--group", "db"]).ok();
    two.change(0, 5);
    two.sync(&[]).ok();
    two.server.take().expect("a server").kill();
    let promoted = far.dsync(["promote", "--force", "--group", &dir]).ok();
    shows(&promoted, &["in term 2"]);
    let replicas = two.replicas();
    far.serve(&[&replicas[0], &replicas[1]], &["--group", "db"]).stop();
    let third = two.site.path("third");
    std::fs::create_dir(&third).expect("a folder");
    far.dsync(["sync", "--group", "db"]).arg(&third).ok();
    // It ends in its turn, and says so again.
    let third = third.display().to_string();
    far.dsync(["demote", "--group", "db", &third]).ok();
    far.dsync(["demote", "--group", "db", &third]).ok();
    far.dsync(["serve"])
        .arg(&replicas[0])
        .arg("--socket")
        .arg(far.socket("s"))
        .code(4)
        .says(&["a replica of source"]);
    Site::new().dsync(["promote", "--group", &third]).ok();
}

/// The replicas take over on the host of their sources: a demotion of the group does not choose by itself.
#[test]
fn a_failover_on_one_host_gives_up_neither_side_by_mistake() {
    let mut two = Two::new("a group that fails over on one host");
    two.sync(&[]).ok();
    two.change(0, 3);
    two.stop();
    let dir = two.dir();
    two.command(&["promote", "--force", "--group", &dir]).ok();
    let old = two.images.clone();
    two.exchange();
    two.start();
    two.change(1, 3);
    let home = two.dir();
    two.command(&["sync", "--group", "db", &home])
        .code(4)
        .says(&["(term 2) went on from them", "--save-there FILE"]);
    two.stop();
    let ways = old.each_ref().map(|image| format!("{} --save-there FILE", image.display()));
    two.command(&["demote", "--group", "db"]).code(4).says(&["(term 2)", &ways[0], &ways[1]]);
    for (new, old) in two.images.iter().zip(&old) {
        two.command(&["sync", "--discard-there"]).args([new, old]).ok();
    }
    two.start();
    let (members, _) = summaries(&two.sync(&[]).ok());
    assert!(members.iter().all(|member| member["method"] == "tracked"), "{members:?}");
    two.equal();
    // And back, by a switch.
    two.stop();
    two.command(&["demote", "--group", "db", &home]).ok();
    two.command(&["promote", "--group", &home]).ok();
}

/// Old sources and promoted disks are on one host: no sync takes one disk of each, or those that are not served.
#[test]
fn a_sync_mixes_no_promotions() {
    let mut two = Two::new("a group of two promotions");
    two.sync(&[]).ok();
    two.stop();
    let (dir, third) = (two.dir(), two.site.path("third"));
    std::fs::create_dir(&third).expect("a folder");
    two.command(&["promote", "--force", "--group", &dir]).ok();
    let promoted = two.replicas();
    let serve = |images: &[&PathBuf]| {
        let socket = two.site.socket("again");
        two.command(&["serve", "--group", "db"]).args(images).arg("--socket").arg(socket)
    };
    let sync = || two.command(&["sync", "--group", "db"]).arg(&third).code(4);
    let [data, log] = two.images.each_ref();
    // The old ones are not served as the group any more, and a sync does not choose.
    serve(&[data, log]).code(4).says(&["was promoted in the place of", "dsync forget --group db"]);
    sync().says(&["(term 2) went on from them", "dsync forget --group db DISK"]);
    // One of each is neither.
    two.command(&["demote"]).arg(&promoted[0]).ok();
    sync().says(&["(term 2) went on from them"]);
    two.command(&["demote"]).arg(log).ok();
    let mixed = ["are of different moments", "log.raw was promoted with the group", "data.raw"];
    sync().says(&mixed);
    serve(&[data, &promoted[1]]).code(4).says(&mixed);
    assert!(std::fs::read_dir(&third).expect("a folder").next().is_none());
    // Unless its user says so.
    two.command(&["forget", "--group", "db"]).arg(data).ok();
    two.site.serve(&[data, &promoted[1]], &["--group", "db"]).stop();
    two.command(&["sync", "--group", "db"]).arg(&third).ok();
}

/// A second set of replicas on the host of the first cannot take over in the same term: it stays what it is.
#[test]
fn a_term_that_is_taken_is_refused_before_anything_is_marked() {
    let mut two = Two::new("a term that is taken");
    let second = two.site.path("second");
    std::fs::create_dir(&second).expect("a folder");
    let (dir, other) = (two.dir(), second.display().to_string());
    for _ in 0..2 {
        two.sync(&[]).ok();
        two.command(&["sync", "--group", "db", "--keep-last", "5", &other]).ok();
        two.change(0, 3);
    }
    two.stop();
    two.command(&["promote", "--force", "--group", &dir]).ok();
    let promote = || two.command(&["promote", "--force", "--group", &other]).code(4);
    promote().says(&["is already the source"]);
    promote().says(&["is already the source"]);
    shows(&two.command(&["rewind", "--group", &other]).ok(), &["common epoch 1"]);
    // The state directory of those that took over is lost: the way out is named.
    let elsewhere = Site::new();
    elsewhere.dsync(["promote", "--force", "--group", &dir]).code(4).says(&["dsync promote DISK"]);
}

/// A promotion that has not made sources of all disks leaves none that can be used.
#[test]
fn a_group_that_is_half_promoted_is_not_used() {
    let mut two = Two::new("a group that is half promoted");
    two.sync(&[]).ok();
    two.stop();
    let (far, third) = (Site::new(), two.site.path("third"));
    std::fs::create_dir(&third).expect("a folder");
    let (dir, [data, log]) = (two.dir(), two.replicas());
    let lineage = std::fs::read_to_string(two.dir.join(".log.raw.dsync/lineage")).expect("a lineage");
    let lineage: serde_json::Value = serde_json::from_str(&lineage).expect("a lineage");
    let place = far.state().join("sources").join(lineage["source"].as_str().expect("an id"));
    // Where the second is to be made a source, something is in the way.
    std::fs::create_dir_all(place.join("source.new/in the way")).expect("a folder");
    far.dsync(["promote", "--force", "--group", &dir]).code(1).says(&["is not complete"]);
    std::fs::remove_dir_all(&place).expect("a folder");
    let complete = format!("dsync promote --group {dir}");
    let way_out = ["was interrupted", complete.as_str()];
    let to_third = third.display().to_string();
    far.dsync(["sync", "--group", "db", &to_third]).code(4).says(&way_out);
    far.dsync(["demote", "--group", "db", &to_third]).code(4).says(&way_out);
    for image in [&data, &log] {
        let socket = far.socket("s");
        far.dsync(["serve", "--group", "db"]).arg(image).arg("--socket").arg(socket).code(4).says(&way_out);
        far.dsync(["sync"]).arg(image).arg(third.join("one.raw")).code(4).says(&way_out);
    }
    shows(&far.dsync(["status"]).arg(&log).output(), &[&complete]);
    far.dsync(["promote", "--group", &dir]).ok();
    far.serve(&[&data, &log], &["--group", "db"]).stop();
    far.dsync(["sync", "--group", "db", &to_third]).ok();
    together(&third, "after the promotion is complete");
}

/// Whatever is killed when, all disks are sources, or none is, on either side.
#[test]
fn kills_of_a_switch_tear_nothing() {
    let mut two = Two::new("kills of a switch");
    two.sync(&[]).ok();
    let (mut next, mut usual) = (1, [Duration::from_millis(300), Duration::from_millis(100)]);
    let (mut given_up, mut taken_over) = (0, 0);
    for round in 0..rounds(8, 300) {
        let pairs = two.pairs(next);
        pairs.wait_for(20 + two.random.below(100));
        next = pairs.stop();
        two.stop();
        let dir = two.dir();
        let what = |step: &str| format!("round {round}, {step}");
        let commands = [vec!["demote", "--group", "db", &dir], vec!["promote", "--group", &dir]];
        for (at, words) in commands.iter().enumerate() {
            if round > 0 {
                let mut killed = two.command(words).start();
                std::thread::sleep(usual[at].mul_f64(two.random.below(1200) as f64 / 1000.0));
                killed.kill();
                // Asked in any order, each by itself.
                let sources = |paths: &[PathBuf]| -> Vec<bool> {
                    let one = |path: &PathBuf| {
                        let output = two.command(&["checkpoint"]).arg(path).output();
                        assert!(matches!(output.status.code(), Some(0 | 4)), "{}: {output}", what(words[0]));
                        output.status.success()
                    };
                    paths.iter().map(one).collect()
                };
                let before = sources(&two.images);
                assert!(before[0] == before[1], "{}: torn: {before:?}", what(words[0]));
                given_up += u64::from(!before[0] && at == 0);
                let recovered =
                    two.replicas().map(|replica| two.command(&["recover"]).arg(&replica).output());
                let [data, log] = recovered.each_ref().map(|output| output.status.code());
                assert!(
                    matches!(data, Some(0 | 4)) && data == log,
                    "{}: torn: {data:?} and {log:?}",
                    what(words[0])
                );
                taken_over += u64::from(data == Some(4));
                together(&two.dir, &what("killed"));
            }
            let began = Instant::now();
            let again = two.command(words).output();
            let already = again.stderr.contains("is a source already");
            assert!(again.status.success() || already, "{}: {again}", what(words[0]));
            if round == 0 {
                usual[at] = began.elapsed();
            }
        }
        assert_eq!(together(&two.dir, &what("promoted")) + 1, next);
        two.exchange();
        two.start();
        two.sync(&[]).ok();
        together(&two.dir, &what("synced"));
        two.equal();
    }
    println!("{given_up} demotions and {taken_over} promotions were killed after they were decided");
}

#[test]
fn a_group_goes_back_to_what_it_was() {
    let mut two = Two::new("a group goes back");
    two.sync(&["--keep-last", "50"]).ok();
    let pairs = two.pairs(1);
    let mut were = Vec::new();
    for round in 0..5 {
        pairs.wait_for(30 + two.random.below(60));
        let (_, group) = summaries(&two.sync(&[]).ok());
        were.push((group["epoch"].to_string(), together(&two.dir, &format!("round {round}"))));
    }
    pairs.stop();
    let dir = two.dir();
    let listed = two.command(&["rewind", "--group", &dir]).ok();
    shows(&listed, &["at common epoch", &format!("common epoch {}", were[0].0)]);
    two.command(&["rewind", "--to", "1"])
        .arg(&two.replicas()[0])
        .code(4)
        .says(&["is a replica of the group db"]);
    two.command(&["rewind", "--group", &dir, "--to", "9999"]).code(4).says(&["no moment of epoch 9999"]);
    // Each is shown, and gone back to, killed or not.
    let moved = std::cell::Cell::new(0);
    for turn in 0..rounds(6, 200) {
        let (epoch, at) = &were[two.random.index(were.len())];
        let shown = two.site.serve(&[], &["--group", &format!("{dir}@{epoch}")]);
        assert_eq!(shown_together(&two, &shown, &format!("shown at {epoch}")), *at);
        shown.stop();
        let mut killed = two.command(&["rewind", "--group", &dir, "--to", epoch]).start();
        std::thread::sleep(Duration::from_millis(two.random.below(40)));
        killed.kill();
        two.recover();
        let now = together(&two.dir, &format!("turn {turn}, killed"));
        assert!(
            were.iter().any(|(_, at)| *at == now),
            "turn {turn}: at {now}, which is no moment of the group"
        );
        moved.set(moved.get() + u64::from(now == *at));
        two.command(&["rewind", "--group", &dir, "--to", epoch]).ok();
        assert_eq!(together(&two.dir, &format!("turn {turn}")), *at);
    }
    println!("{} rewinds that were killed had committed", moved.get());
    two.sync(&[]).ok();
    two.equal();
}

#[test]
fn readers_of_a_group_are_shown_one_moment() {
    let mut two = Two::new("readers of a group");
    two.sync(&[]).ok();
    let mirror = two.command(&["mirror", "--group", "db", "--rpo", "1s"]).arg(&two.dir);
    let mut mirror = mirror.start();
    mirror.wait_to_say("mirroring group db");
    let pairs = two.pairs(1);
    pairs.wait_for(100);
    let dir = two.dir();
    for round in 0..rounds(6, 200) {
        let server = match two.random.coin() {
            true => two.site.serve(&[], &["--group", &format!("{dir}@now"), "--writable"]),
            false => {
                let paths = two.replicas().map(|replica| PathBuf::from(format!("{}@now", replica.display())));
                two.site.serve(&[&paths[0], &paths[1]], &[])
            }
        };
        std::thread::sleep(Duration::from_millis(two.random.below(300)));
        shown_together(&two, &server, &format!("round {round}"));
        server.stop();
    }
    pairs.stop();
    mirror.signal(rustix::process::Signal::TERM);
    let output = mirror.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    // One that is not where the other is.
    two.change(1, 4);
    two.stop();
    two.command(&["forget", "--group", "db"]).arg(&two.images[1]).ok();
    two.site.sync(&two.images[1], &two.replicas()[1], &[]).ok();
    let apart = ["log.raw is at epoch", "and common epoch"];
    let serve = |words: &[&str]| two.command(words).arg("--socket").arg(two.site.socket("s"));
    serve(&["serve", "--group", &format!("{dir}@now")]).code(4).says(&apart);
    two.command(&["promote", "--force", "--group", &dir]).code(4).says(&apart);
    std::fs::rename(&two.replicas()[1], two.site.path("away.raw")).expect("a rename");
    two.command(&["promote", "--force", "--group", &dir])
        .code(4)
        .says(&["lacks its replica of source", "dsync forget --group db REPLICA"]);
    // What is lost for good keeps the others from nothing: what is named leads out.
    let left = two.replicas()[0].clone();
    let promote = || two.command(&["promote", "--force"]).arg(&left);
    let way = format!("\"dsync forget --group db {}\"", left.display());
    promote().code(4).says(&["whose disks take over together", &way]);
    two.command(&["forget", "--group", "db"]).arg(&left).ok();
    promote().ok();
    // There is no such group, or not one.
    let nowhere = two.site.path("nowhere");
    std::fs::create_dir_all(nowhere.join(".a.dsync-group")).expect("a folder");
    two.command(&["promote", "--group"]).arg(&nowhere).code(4).says(&["has no common commit yet"]);
    for name in ["a", "b"] {
        std::fs::create_dir_all(nowhere.join(format!(".{name}.dsync-group"))).expect("a folder");
    }
    two.command(&["rewind", "--group"]).arg(&nowhere).code(4).says(&["several groups", "(a, b)"]);
    two.command(&["rewind", "--group"]).arg(nowhere.join("x")).code(4).says(&["does not exist"]);
    two.command(&["rewind", "--group"]).arg(two.site.socket("")).code(4).says(&["no replicas of a group"]);
}

/// A hook holds all disks: what was written to any before it is ready is in all replicas, and nothing that comes after the cut.
#[test]
fn a_hook_is_held_once_around_the_cut_of_all() {
    let two = Two::new("a hook of a group");
    let at = |name: &str| two.site.path(name);
    let write = |byte: u8| {
        for name in NAMES {
            let mut client = two.server().client(name);
            client.write(7 * BLOCK, &[byte; BLOCK as usize]).expect("a write");
            client.close().expect("the end");
        }
    };
    let wait_for = |path: &Path| {
        let until = Instant::now() + Duration::from_secs(60);
        while !path.exists() {
            assert!(Instant::now() < until, "{} does not come", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let script = "echo \"$DSYNC_SOURCE $DSYNC_REPLICA\" >> names; read word; echo $word >> begun; \
                  while ! test -e go; do sleep 0.02; done; echo ready; \
                  read word; echo $word > word-of-cut; read word; echo $word > word-of-end";
    // With a first copy, which is no cut that anybody is told of.
    let sync = two.sync(&["--hook", script, "--bwlimit", "4M"]).start();
    wait_for(&at("begun"));
    write(0xaa);
    std::fs::write(at("go"), "").expect("a file");
    wait_for(&at("word-of-cut"));
    write(0xbb);
    let ended = sync.output(Duration::from_secs(60));
    assert!(ended.status.success(), "{ended}");
    for replica in two.replicas() {
        assert_eq!(
            std::fs::read(&replica).expect("a replica")[7 * BLOCK as usize],
            0xaa,
            "{}",
            replica.display()
        );
    }
    let said = |name: &str| std::fs::read_to_string(at(name)).expect("a word");
    assert_eq!([said("begun"), said("word-of-cut"), said("word-of-end")], ["begin\n", "cut\n", "end\n"]);
    assert_eq!(said("names"), format!("db {}\n", two.dir()));
    // One that fails ends the sync of all before the cut.
    let before = two.site.dsync(["status", "data", "--json"]).ok().summary()["epoch"].clone();
    two.sync(&["--hook", "echo no >&2; exit 3"]).code(1).says(&["exit status: 3"]);
    assert_eq!(two.site.dsync(["status", "data", "--json"]).ok().summary()["epoch"], before);
}

/// An application that writes the same byte to both disks, one after the other. While the file `hold` is there, it stops between two
/// such pairs, and says so with the file `held` for as long.
fn held_application(two: &Two) -> (std::sync::mpsc::Sender<()>, JoinHandle<()>) {
    let (tell, told) = std::sync::mpsc::channel();
    let (hold, held) = (two.site.path("hold"), two.site.path("held"));
    let mut clients = NAMES.map(|name| two.server().client(name));
    let application = std::thread::spawn(move || {
        for byte in (1..=255).cycle() {
            for client in &mut clients {
                client.write(7 * BLOCK, &[byte; BLOCK as usize]).expect("a write");
                std::thread::sleep(Duration::from_millis(15));
            }
            if hold.exists() {
                std::fs::write(&held, "").expect("a file");
                while hold.exists() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                std::fs::remove_file(&held).expect("the file");
            }
            if told.try_recv().is_ok() {
                return clients.into_iter().for_each(|client| client.close().expect("the end"));
            }
        }
    });
    (tell, application)
}

/// The same around each common commit of a mirror, of which there are four within its bound at most. One that fails delays them.
#[test]
fn a_mirror_of_a_group_holds_its_hook_around_each_common_cut() {
    let two = Two::new("a hook of a mirror of a group");
    let mut random = two.random.clone();
    two.sync(&[]).ok();
    let (site, at) = (&two.site, |name: &str| two.site.path(name));
    let script = "read word; test ! -e broken || { echo no database >&2; exit 3; }; touch hold; \
                  while ! test -e held; do sleep 0.01; done; echo ready; \
                  read word; test -z \"$word\" || rm hold; echo $word >> words; read word; echo $word >> words";
    let words = |word: &str| {
        let all = std::fs::read_to_string(at("words")).unwrap_or_default();
        all.lines().filter(|line| *line == word).count()
    };
    let mirror = || site.dsync(["mirror", "--group", "db", "--rpo", "2s", "--hook", script]).arg(&two.dir);
    std::fs::write(at("broken"), "").expect("a file");
    mirror().code(1).says(&["exit status: 3", "before the cut", "no database"]);
    std::fs::remove_file(at("broken")).expect("a file");
    let (tell, application) = held_application(&two);
    let pair = |what: &str| {
        let bytes = two.replicas().map(|path| std::fs::read(path).expect("a replica")[7 * BLOCK as usize]);
        assert_eq!(bytes[0], bytes[1], "{what}: not as the application was held");
    };
    for round in 0..rounds(2, 20) {
        let (began, before) = (Instant::now(), words("cut"));
        let mut running = mirror().start();
        running.wait_to_say("mirroring group db");
        until("two commits", || words("end") >= before + 2);
        // Any moment of a round, the hook's included.
        std::thread::sleep(Duration::from_millis(random.below(700)));
        running.kill();
        let (cuts, most) = (words("cut") - before, began.elapsed().as_secs() as usize + 2);
        assert!(cuts <= most, "round {round}: {cuts} cuts within {:?}", began.elapsed());
        two.replicas().iter().for_each(|replica| drop(site.dsync(["recover"]).arg(replica).ok()));
        pair(&format!("round {round}"));
        // What the hook of a killed mirror held.
        let _ = std::fs::remove_file(at("hold"));
    }
    let mut running = mirror().start();
    running.wait_to_say("mirroring group db");
    std::fs::write(at("broken"), "").expect("a file");
    until("the failure is said", || running.stderr_so_far().contains("no database"));
    assert!(running.stderr_so_far().contains("retrying in"), "{}", running.stderr_so_far());
    std::fs::remove_file(at("broken")).expect("a file");
    let before = words("end");
    until("it goes on", || words("end") > before + 1);
    running.signal(rustix::process::Signal::TERM);
    let ended = running.output(Duration::from_secs(60));
    assert!(ended.status.success(), "{ended}");
    pair("at the end");
    tell.send(()).expect("it writes");
    application.join().expect("an application");
}

#[test]
fn a_group_goes_over_tls() {
    let mut two = Two::new("a group over TLS");
    let mut far = Listening::for_near(&two.site);
    two.dir = far.folder().join("db");
    std::fs::create_dir(&two.dir).expect("a folder");
    let place = far.destination("db");
    let sync = |two: &Two| two.site.dsync(["sync", "--group", "db", "--json"]).arg(&place);
    sync(&two).ok();
    let pairs = two.pairs(1);
    let mut before = 0;
    for round in 0..rounds(4, 100) {
        pairs.wait_for(100);
        let mut killed = sync(&two).start();
        std::thread::sleep(Duration::from_millis(two.random.below(300)));
        // Either end.
        match two.random.coin() {
            true => killed.kill(),
            false => {
                far.kill();
                killed.wait_for(Duration::from_secs(60));
                far.start(&[]);
            }
        }
        for replica in two.replicas() {
            // The session of what was killed may be there for a moment.
            let recover = || far.site.dsync(["recover"]).arg(&replica).output();
            let until = Instant::now() + Duration::from_secs(60);
            while recover().status.code() == Some(6) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
            }
            let recovered = recover();
            assert!(recovered.status.success(), "{recovered}");
        }
        let at = together(&two.dir, &format!("round {round}"));
        assert!(at >= before, "round {round}: went back");
        before = at;
    }
    let next = pairs.stop();
    // A mirror, and a switch.
    let mut mirror = two.site.dsync(["mirror", "--group", "db", "--rpo", "1s"]).arg(&place).start();
    mirror.wait_to_say("mirroring group db");
    let pairs = two.pairs(next);
    pairs.wait_for(200);
    let next = pairs.stop();
    mirror.signal(rustix::process::Signal::TERM);
    let output = mirror.output(Duration::from_secs(60));
    assert!(output.status.success(), "{output}");
    two.equal();
    two.stop();
    two.site.dsync(["demote", "--group", "db"]).arg(&place).ok();
    far.site.dsync(["promote", "--group"]).arg(&two.dir).ok();
    assert_eq!(together(&two.dir, "promoted") + 1, next);
}

/// Devices whose record nobody vouches for, and that others have overwritten: what was doubted is compared, although nothing writes to them while
/// they are demoted.
#[test]
fn a_demotion_of_doubted_devices_carries_the_doubt() {
    let what = "devices that were overwritten before they are demoted";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let (mut random, near, far) = (Random::new(what), Site::new(), Site::new());
    let there = far.path("replicas");
    [near.path("disks"), there.clone()].iter().for_each(|dir| std::fs::create_dir(dir).expect("a folder"));
    let disks = NAMES.map(|name| near.path(&format!("disks/{name}.raw")));
    let mut kept = Vec::new();
    for (name, disk) in NAMES.iter().zip(&disks) {
        let Some(device) = testing::Loop::new(&near.image(&format!("{name}-disk"), SIZE)) else {
            return skipped(what, "there is no loop device");
        };
        std::os::unix::fs::symlink(device.device(), disk).expect("a link");
        kept.push(device);
    }
    let towards = |from: &Site, to: &Site, dir: &Path| {
        let run = from.dsync(["sync", "--json", "--group", "db", "--trust-device", "--rsh", RSH]);
        run.arg(format!("far:{}", dir.display())).env("RSH_STATE", to.state())
    };
    let server = near.serve(&disks.each_ref().map(PathBuf::as_path), &["--group", "db"]);
    towards(&near, &far, &there).ok();
    for name in NAMES {
        let mut client = server.client(name);
        client.write(10 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        client.close().expect("the end");
    }
    server.kill();
    far.dsync(["promote", "--force", "--group"]).arg(&there).ok();
    for disk in &disks {
        let device = std::fs::File::options().write(true).open(disk).expect("a device");
        device.write_all_at(&random.bytes(BLOCK as usize), 900 * BLOCK).expect("a write");
        device.sync_all().expect("a flush");
    }
    let (members, _) = summaries(&towards(&far, &near, &near.path("disks")).args(["--discard-there"]).ok());
    assert!(members.iter().all(|member| member["method"] == "compare"), "{members:?}");
    for (name, disk) in NAMES.iter().zip(&disks) {
        let replica = std::fs::read(there.join(format!("{name}.raw"))).expect("a disk");
        assert!(replica == std::fs::read(disk).expect("a device"), "{name} differs");
    }
}
