//! A database through the whole life of two sites: planned switches, rehearsals, disasters, and failbacks by difference. At each step the
//! books balance, and what was acknowledged is there: all of it, but after a disaster what came after one moment.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use dsync_tests::host::Host;
use dsync_tests::mount::{Attached, Loop};
use dsync_tests::postgres::{Acknowledged, Clients, Database, Programs};
use dsync_tests::scene::number;
use dsync_tests::{Background, Random, Server, got, image, need, need_root, rounds, say, skipped};
use rustix::process::Signal;
use tempfile::TempDir;

const SIZE: u64 = 256 << 20;

/// A host at work: its disk is served, and is a device on which the database lives. What ends first stands first.
struct AtWork {
    database: Database,
    device: Attached,
    server: Server,
    _place: TempDir,
}

/// A device over an export; `None` where that cannot be had.
fn attach(server: &Server) -> Option<(Attached, TempDir)> {
    let place = testing::temporary();
    Some((Attached::new(&server.uri("vm"), &place.path().join("fuse"))?, place))
}

impl AtWork {
    fn begin(host: &Host, programs: &Programs) -> AtWork {
        AtWork::on(host.site.serve(&[&host.disk], &[]), programs)
    }

    fn on(server: Server, programs: &Programs) -> AtWork {
        let (device, place) = attach(&server).expect("a device");
        let database = Database::start(programs, device.device());
        AtWork { database, device, server, _place: place }
    }

    /// Ends in good order; with `crash` but for the database, which is killed.
    fn end(self, crash: bool) {
        self.database.stop(crash);
        drop(self.device);
        self.server.stop();
    }

    /// Everything is killed, in any order. What the kernel still holds of the file system goes nowhere.
    fn destroy(mut self, mirror: &mut Background, random: &mut Random) {
        let mut left = vec![0, 1, 2, 3];
        while !left.is_empty() {
            match left.swap_remove(random.index(left.len())) {
                0 => self.database.kill(),
                1 => self.device.kill(),
                2 => self.server.process().kill(),
                _ => mirror.kill(),
            }
        }
    }
}

/// A mirror between two hosts, that has begun with its batches.
fn mirror(from: &Host, to: &Host) -> Background {
    let mut mirror = from.towards(to, &["mirror", "--json", "--rpo", "500ms", "--epoch", "2s"]).start();
    mirror.wait_to_say("mirroring to");
    mirror
}

fn pause(random: &mut Random, least: u64) {
    std::thread::sleep(Duration::from_millis(random.within(least..2 * least)));
}

/// A rehearsal on the replica, beneath the mirror: the database begins, and says what it has.
fn rehearse(replica: &Host, programs: &Programs, acked: &Acknowledged) -> usize {
    let moment = PathBuf::from(format!("{}@now", replica.disk.display()));
    let rehearsal = AtWork::on(replica.site.serve(&[&moment], &["--writable"]), programs);
    // More is acknowledged meanwhile, of which it may have a part.
    let lacks = acked.look(&rehearsal.database, "a rehearsal");
    rehearsal.end(true);
    lacks
}

/// Ends the source at `from` in good order, and makes `to` the source. Not a byte is lost.
fn switch(from: &Host, to: &Host) {
    from.towards(to, &["demote"]).ok();
    to.run(&["promote"]).ok();
    image::assert_equal(&from.disk, &to.disk);
}

/// Work at `here`, mirrored to `there`; a rehearsal; a planned switch. Nothing is lost.
fn planned(here: &Host, there: &Host, programs: &Programs, acked: &mut Acknowledged, random: &mut Random) {
    let at_work = AtWork::begin(here, programs);
    acked.check(&at_work.database, "before a planned switch");
    let mut mirror = mirror(here, there);
    let clients = Clients::start(&at_work.database, acked);
    pause(random, 400);
    let lacks = rehearse(there, programs, acked);
    assert_eq!(lacks, 0, "a rehearsal lacks transactions from before the mirror began");
    pause(random, 100);
    clients.stop(acked);
    mirror.signal(Signal::TERM);
    let ended = mirror.output(Duration::from_secs(120));
    assert!(ended.status.success(), "{ended}");
    at_work.end(random.coin());
    switch(here, there);
}

/// Waits until the replica has all that the source has.
fn wait_for_all(source: &Host, replica: &Host) {
    let until = Instant::now() + Duration::from_secs(120);
    while image::first_difference(&source.disk, &replica.disk).is_some() {
        assert!(Instant::now() < until, "the mirror does not catch up");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What a disaster left.
struct Left {
    /// The epoch from which the new source went on.
    epoch: u64,
    /// Blocks in which the two differed then.
    differing: usize,
    /// All had arrived before.
    quiet: bool,
}

/// Work at `here`, mirrored to `there`; `here` is destroyed at any moment, and `there` promoted.
fn disaster(
    (here, there): (&Host, &Host),
    programs: &Programs,
    acked: &mut Acknowledged,
    random: &mut Random,
) -> Left {
    let at_work = AtWork::begin(here, programs);
    acked.check(&at_work.database, "after a planned switch");
    let mut mirror = mirror(here, there);
    let mut clients = Some(Clients::start(&at_work.database, acked));
    pause(random, 600);
    let quiet = random.coin();
    if let Some(clients) = clients.take_if(|_| quiet) {
        clients.stop(acked);
        wait_for_all(here, there);
    }
    at_work.destroy(&mut mirror, random);
    if let Some(clients) = clients {
        clients.stop(acked);
    }
    // What was acknowledged is on the disk that was lost.
    let old = here.copy("old.raw");
    let device = Loop::new(&old).expect("a loop device");
    let database = Database::start(programs, device.device());
    acked.check(&database, "the disk that was destroyed");
    database.stop(true);
    let epoch = number(&there.force(), "epoch");
    Left { epoch, differing: image::differing_blocks(&here.disk, &there.disk).len(), quiet }
}

/// The database goes on at `there` with what it has, while `here` comes back as a replica: what moves is what either wrote.
fn failback(
    (here, there): (&Host, &Host),
    left: &Left,
    programs: &Programs,
    acked: &mut Acknowledged,
    random: &mut Random,
) {
    let at_work = AtWork::begin(there, programs);
    let lost = acked.check_cut(&at_work.database, "after a disaster");
    assert!(!left.quiet || lost.is_empty(), "{} transactions that had arrived are lost", lost.len());
    let clients = Clients::start(&at_work.database, acked);
    pause(random, 300);
    let since = left.epoch.to_string();
    let ours = here.changed(&since);
    let saved = here.new_file();
    let save = ["--save-there", saved.to_str().expect("a path")];
    clients.stop(acked);
    // At rest, so that it is known what was written.
    let AtWork { database, device, server, _place } = at_work;
    database.stop(random.coin());
    let either = ours.union(&there.changed(&since)).count() as u64 * image::BLOCK;
    // What was written and did not arrive is named, and saved.
    there.sync(here, &[]).code(4).says(&["have diverged", "--save-there FILE"]);
    let back = there.sync(here, &save).ok().summary();
    assert_eq!(back["method"], "tracked", "{back}");
    let named = number(&back["given_up"], "bytes");
    assert!(named / image::BLOCK >= left.differing as u64, "{} blocks differed: {named}", left.differing);
    assert!(saved.exists());
    let sent = number(&back, "bytes_sent");
    // A few messages are exchanged however little there is.
    assert!(sent * 100 <= either * 105 + 800_000, "{sent} bytes were sent, and either side wrote {either}");
    drop(device);
    server.stop();
    say(&format!(
        "a disaster: {} acknowledged transactions of {} lost, {} blocks named; {sent} bytes for {either} that either side wrote",
        lost.len(),
        lost.len() + acked.count(),
        named / image::BLOCK
    ));
}

#[test]
fn a_database_lives_through_switches_disasters_and_failbacks() {
    let what = "PostgreSQL on a disk that moves between two hosts";
    let programs = Programs::find();
    let tools = ["mkfs.ext4", "nbdfuse", "losetup", "unshare", "setpriv"];
    if !need_root(what) || !need(&tools, what) || !got(programs.as_ref(), what) {
        return;
    }
    let (programs, mut random) = (programs.expect("they are there"), Random::new(what));
    let (mut here, mut there) = (Host::new(), Host::new());
    image::sparse(&here.disk, SIZE);
    let server = here.site.serve(&[&here.disk], &[]);
    let Some((device, place)) = attach(&server) else {
        return skipped(what, "an NBD export cannot be made a device here");
    };
    Database::create(&programs, device.device()).stop(false);
    drop((device, place));
    server.stop();
    here.sync(&there, &[]).ok();
    let mut acked = Acknowledged::default();
    for _ in 0..rounds(1, 25) {
        planned(&here, &there, &programs, &mut acked, &mut random);
        let left = disaster((&there, &here), &programs, &mut acked, &mut random);
        failback((&there, &here), &left, &programs, &mut acked, &mut random);
        switch(&here, &there);
        std::mem::swap(&mut here, &mut there);
    }
    let at_work = AtWork::begin(&here, &programs);
    let kept = acked.check(&at_work.database, "at the end");
    at_work.end(false);
    say(&format!("{kept} acknowledged transactions lived through it"));
}
