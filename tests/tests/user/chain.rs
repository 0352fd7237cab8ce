//! Three sites and more: a replica takes over, and the others go on from it, from whichever epoch they are at, without a comparison
//! where it knows what changed since, and with one where it does not.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsync_tests::host::Host;
use dsync_tests::load::{Load, Options};
use dsync_tests::scene::number;
use dsync_tests::{Output, Random, Run, image, rounds, say};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = image::BLOCK;

fn equal(a: &Host, b: &Host) {
    image::assert_equal(&a.disk, &b.disk);
}

fn sync(from: &Host, to: &Host, options: &[&str]) -> Value {
    let summary = from.sync(to, options).ok().summary();
    equal(from, to);
    summary
}

/// Random blocks of a disk of `size` bytes.
fn blocks(count: u64, size: u64, random: &mut Random) -> BTreeSet<u64> {
    (0..count).map(|_| random.below(size / BLOCK)).collect()
}

/// The folder of a replica's state, and its trail.
fn folder(host: &Host) -> PathBuf {
    host.disk.with_file_name(".vm.raw.dsync")
}

fn trail(host: &Host) -> PathBuf {
    folder(host).join("history")
}

/// What a sync moved is what was written, and no more.
fn moved(summary: &Value, written: &BTreeSet<u64>) {
    moved_between(summary, written, written);
}

/// The same of one whose number of blocks is not known exactly.
fn moved_between(summary: &Value, least: &BTreeSet<u64>, most: &BTreeSet<u64>) {
    assert_eq!(summary["method"], "tracked", "{summary}");
    let blocks = number(summary, "blocks_changed");
    assert!(
        (least.len() as u64..=most.len() as u64).contains(&blocks),
        "{} to {}: {summary}",
        least.len(),
        most.len()
    );
    // A few messages are exchanged however little there is.
    assert!(blocks < 100 || number(summary, "bytes_sent") * 100 <= blocks * BLOCK * 105, "{summary}");
}

/// The first site is lost. Each of the others is at another epoch, most at one that the site which takes over never was at: these get what was
/// written since the last one before at which it was.
#[test]
fn sites_at_earlier_epochs_go_on_from_the_one_that_takes_over() {
    let mut random = Random::new("three sites and more");
    let size = 32 * MIB;
    let (a, b) = (Host::with_disk(size, &mut random), Host::new());
    sync(&a, &b, &[]);
    let mut others: Vec<(Host, [BTreeSet<u64>; 2])> = Vec::new();
    let mut unsent = BTreeSet::new();
    for commit in ["journal", "in-place"].repeat(rounds(1, 2)) {
        for replicas in [1, 0, 1] {
            let written = blocks(300, size, &mut random);
            a.write(written.iter().copied(), &mut random);
            others.iter_mut().flat_map(|(_, lacks)| lacks).for_each(|lacks| lacks.extend(&written));
            unsent.extend(&written);
            for _ in 0..replicas {
                let other = Host::new();
                sync(&a, &other, &[]);
                others.push((other, [BTreeSet::new(), unsent.clone()]));
            }
        }
        assert_eq!(sync(&a, &b, &["--commit", commit])["method"], "tracked");
        unsent.clear();
        let other = Host::new();
        sync(&a, &other, &[]);
        others.push((other, Default::default()));
    }
    // What the second site never gets is in no replica.
    a.write(blocks(300, size, &mut random), &mut random);
    b.run(&["promote", "--force"]).ok();
    let since = blocks(300, size, &mut random);
    b.write(since.iter().copied(), &mut random);
    for (other, lacks) in &mut others {
        lacks.iter_mut().for_each(|lacks| lacks.extend(&since));
        moved_between(&sync(&b, other, &["--method", "tracked"]), &lacks[0], &lacks[1]);
        assert!(sync(&b, other, &[])["method"] == "tracked");
    }
}

/// Under load and a mirror, the first site is lost at any moment. The one that takes over may be ahead of its last epoch.
#[test]
fn a_mirrored_site_takes_over_for_one_that_was_synced() {
    let mut random = Random::new("a mirror and a third site");
    let (a, b, c) = (Host::with_disk(32 * MIB, &mut random), Host::new(), Host::new());
    sync(&a, &b, &[]);
    sync(&a, &c, &[]);
    for _ in 0..2 {
        let server = a.site.serve(&[&a.disk], &[]);
        let mut mirror = a.towards(&b, &["mirror", "--json", "--epoch", "300ms"]).start();
        mirror.wait_to_say("mirroring to");
        let load = Load::start(
            &server.address(),
            "vm",
            &Options { connections: 2, depth: 4, ..Options::default() },
            &mut random,
        );
        load.wait_for(400);
        std::thread::sleep(Duration::from_millis(400 + random.below(600)));
        load.stop();
        mirror.kill();
        server.kill();
    }
    let promoted = b.force();
    say(&format!("promoted with {} bytes ahead", promoted["bytes_ahead"]));
    b.write(blocks(20, 32 * MIB, &mut random), &mut random);
    let differs = image::differing_blocks(&b.disk, &c.disk).len() as u64;
    let went_on = sync(&b, &c, &[]);
    assert_eq!(went_on["method"], "tracked", "{went_on}");
    assert!(differs > 20 && number(&went_on, "blocks_changed") >= differs, "{differs}: {went_on}");
}

/// A delta in a file does not say of which branch it is. A site that a mirror has brought ahead takes none: that of a site that took over at the
/// epoch has nothing of what was brought, and may name the same blocks.
#[test]
fn a_delta_in_a_file_overwrites_no_batches() {
    let mut random = Random::new("a file for a mirrored site");
    let size = 16 * MIB;
    let (a, b, c) = (Host::with_disk(size, &mut random), Host::new(), Host::new());
    sync(&a, &b, &[]);
    let since = number(&sync(&a, &c, &[]), "epoch").to_string();
    let server = a.site.serve(&[&a.disk], &[]);
    let mut mirror = a.towards(&c, &["mirror", "--json", "--epoch", "1h"]).start();
    mirror.wait_to_say("mirroring to");
    let options = Options { connections: 1, depth: 4, ..Options::default() };
    let load = Load::start(&server.address(), "vm", &options, &mut random);
    let at_b = image::fingerprint(&b.disk).0;
    dsync_tests::until("a batch has come", || image::fingerprint(&c.disk).0 != at_b);
    load.stop();
    mirror.kill();
    server.kill();
    // The far side of the mirror ends by itself.
    assert!(settled(|| c.run(&["recover"]).output()).status.success());
    let before = image::fingerprint(&c.disk).0;
    b.force();
    b.write(blocks(20, size, &mut random), &mut random);
    let merge = |from: &Host, options: &[&str]| {
        let delta = from.run(&["extract", "--since", &since]).ok().stdout;
        c.run(&[&["merge"], options].concat()).input(delta)
    };
    for commit in ["journal", "in-place"] {
        merge(&b, &["--commit", commit])
            .code(4)
            .says(&["was brought ahead of epoch", "dsync promote --force"]);
    }
    assert_eq!(before, image::fingerprint(&c.disk).0);
    b.sync(&c, &[]).code(4).says(&["has diverged"]);
    sync(&a, &c, &[]);
}

/// Whatever makes the trail incomplete: a site that is behind the gap is compared, and gets all that it lacks; one that is at an epoch after it
/// gets what changed.
#[test]
fn what_is_behind_a_gap_is_compared() {
    let mut random = Random::new("gaps");
    let size = 16 * MIB;
    for gap in ["compare", "copy", "no trail", "not noted", "damaged", "torn", "restored", "adopted"] {
        let (a, b, behind, after) =
            (Host::with_disk(size, &mut random), Host::new(), Host::new(), Host::new());
        let step = |random: &mut Random, options: &[&str]| {
            a.write(blocks(5, size, random), random);
            sync(&a, &b, options)
        };
        sync(&a, &b, &[]);
        step(&mut random, &[]);
        sync(&a, &behind, &[]);
        step(&mut random, &[]);
        let before = std::fs::read(trail(&b)).expect("a trail");
        match gap {
            "compare" | "copy" => drop(step(&mut random, &["--method", gap])),
            "adopted" => {
                image::scribble(&b.disk, 5 * MIB, 4096, &mut random);
                drop(step(&mut random, &["--adopt"]));
            }
            _ => {
                step(&mut random, &[]);
                let mut now = std::fs::read(trail(&b)).expect("a trail");
                let len = now.len();
                match gap {
                    "no trail" => std::fs::remove_file(trail(&b)).expect("no trail"),
                    // As a crash leaves it.
                    "not noted" => std::fs::write(trail(&b), before).expect("a trail"),
                    "damaged" => {
                        now[(before.len() + len) / 2] ^= 4;
                        std::fs::write(trail(&b), now).expect("a trail");
                    }
                    "torn" => std::fs::write(trail(&b), &now[..len - 7]).expect("a trail"),
                    _ => std::fs::write(trail(&b), &before[..before.len() / 2]).expect("a trail"),
                }
                step(&mut random, &[]);
            }
        }
        step(&mut random, &[]);
        sync(&a, &after, &[]);
        step(&mut random, &[]);
        b.run(&["promote", "--force"]).ok();
        b.write([7], &mut random);
        b.sync(&behind, &["--method", "tracked"]).code(3).says(&["is not known"]);
        assert_eq!(sync(&b, &behind, &[])["method"], "compare", "{gap}");
        assert_eq!(sync(&b, &after, &[])["method"], "tracked", "{gap}");
    }
}

/// A replica that was brought back goes on from there: what it was brought back from is no part of what it knows.
#[test]
fn a_rewound_site_takes_over() {
    let mut random = Random::new("a rewound site");
    let size = 16 * MIB;
    let (a, b) = (Host::with_disk(size, &mut random), Host::new());
    let [first, second, astray] = std::array::from_fn(|_| Host::new());
    sync(&a, &b, &["--keep-last", "5"]);
    sync(&a, &first, &[]);
    a.write([1, 2, 3], &mut random);
    let at = number(&sync(&a, &b, &[]), "epoch");
    sync(&a, &second, &[]);
    a.write([3, 4, 5], &mut random);
    sync(&a, &b, &[]);
    sync(&a, &astray, &[]);
    b.run(&["rewind", "--to", &at.to_string()]).ok();
    b.run(&["promote", "--force"]).ok();
    b.write([9], &mut random);
    moved(&sync(&b, &second, &[]), &[9].into());
    moved(&sync(&b, &first, &[]), &[1, 2, 3, 9].into());
    b.sync(&astray, &[]).code(4).says(&["has diverged"]);
    // And one that goes another way from there.
    let (a, b, first) = (Host::with_disk(size, &mut random), Host::new(), Host::new());
    sync(&a, &b, &["--keep-last", "5"]);
    sync(&a, &first, &[]);
    a.write([1], &mut random);
    let at = number(&sync(&a, &b, &[]), "epoch");
    a.write([2], &mut random);
    sync(&a, &b, &[]);
    b.run(&["rewind", "--to", &at.to_string()]).ok();
    a.write([3], &mut random);
    sync(&a, &b, &[]);
    b.run(&["promote", "--force"]).ok();
    b.write([4], &mut random);
    moved(&sync(&b, &first, &[]), &[1, 2, 3, 4].into());
}

/// A site that has followed two branches, and goes back to the one that was lost, has the only copy of it: the sites that have taken over from each
/// other since do not know that branch, and say so.
#[test]
fn a_site_that_goes_back_to_a_lost_branch_has_diverged() {
    let mut random = Random::new("a lost branch");
    let size = 4 * MIB;
    let (a, b) = (Host::with_disk(size, &mut random), Host::new());
    let [c, d, e] = std::array::from_fn(|_| Host::new());
    sync(&a, &b, &[]);
    sync(&a, &c, &["--keep-last", "30"]);
    let begin = c.run(&["rewind", "--json"]).ok().summary()["state"].as_str().expect("a state").to_owned();
    for block in 0..7 {
        a.write([block], &mut random);
        sync(&a, &c, &[]);
    }
    let lost = c.run(&["rewind", "--json"]).ok().summary()["state"].as_str().expect("a state").to_owned();
    let content = image::fingerprint(&c.disk).0;
    b.run(&["promote", "--force"]).ok();
    c.run(&["rewind", "--to", &begin]).ok();
    for block in 10..23 {
        b.write([block], &mut random);
        sync(&b, &c, &[]);
    }
    let switch = |from: &Host, to: &Host| {
        sync(from, to, &[]);
        from.towards(to, &["demote"]).ok();
        to.run(&["promote"]).ok();
        to.write([30], &mut Random::new("after a switch"));
    };
    switch(&b, &d);
    sync(&d, &c, &[]);
    c.run(&["rewind", "--to", &lost]).ok();
    switch(&d, &e);
    e.sync(&c, &[]).code(4).says(&["has diverged"]);
    assert_eq!(content, image::fingerprint(&c.disk).0);
    e.sync(&c, &["--discard-there"]).ok();
    equal(&e, &c);
}

/// A site takes over after a step back, and another one from that: a replica of the branch that was left is known to neither, and both say so.
#[test]
fn a_step_back_before_a_promotion_is_no_past_of_what_follows() {
    let mut random = Random::new("a step back");
    let size = 4 * MIB;
    let (a, b) = (Host::with_disk(size, &mut random), Host::new());
    let [d, e, r] = std::array::from_fn(|_| Host::new());
    let epoch = number(&sync(&a, &d, &["--keep-last", "20"]), "epoch").to_string();
    [&b, &r].into_iter().for_each(|host| drop(sync(&a, host, &[])));
    a.write([5], &mut random);
    [&b, &d, &r].into_iter().for_each(|host| drop(sync(&a, host, &[])));
    b.force();
    b.write([7], &mut random);
    sync(&b, &d, &[]);
    d.run(&["rewind", "--to", &epoch]).ok();
    d.force();
    for block in 10..16 {
        d.write([block], &mut random);
        d.run(&["checkpoint"]).ok();
    }
    let lost = image::fingerprint(&r.disk).0;
    d.sync(&r, &[]).code(4).says(&["has diverged"]);
    sync(&d, &e, &[]);
    e.force();
    e.sync(&r, &[]).code(4).says(&["has diverged"]);
    assert_eq!(lost, image::fingerprint(&r.disk).0);
}

/// A source's host is restored from a backup, disk and state. A replica that it refuses, since that knows later epochs, is refused by the replica
/// that takes over from it, too.
#[test]
fn what_a_restored_source_has_lost_is_not_overwritten_by_who_takes_over() {
    let mut random = Random::new("a restored host");
    let (a, first) = (Host::with_disk(4 * MIB, &mut random), Host::new());
    let [second, piped] = std::array::from_fn(|_| Host::new());
    let since = number(&sync(&a, &first, &[]), "epoch").to_string();
    sync(&a, &piped, &[]);
    let state = a.site.path("state-before");
    Run::new("cp").arg("-a").args([a.site.state(), state.clone()]).ok();
    let disk = std::fs::read(&a.disk).expect("a disk");
    a.write([5], &mut random);
    sync(&a, &first, &[]);
    let delta = a.run(&["extract", "--since", &since]).ok().stdout;
    piped.run(&["merge"]).input(delta).ok();
    std::fs::write(&a.disk, disk).expect("a disk");
    std::fs::remove_dir_all(a.site.state()).expect("a state");
    std::fs::rename(&state, a.site.state()).expect("a state");
    // However often it is tried, and whoever tells it, it is one branch.
    for _ in 0..3 {
        a.sync(&first, &[]).code(4).says(&["restored"]);
        a.sync(&piped, &[]).code(4).says(&["restored"]);
    }
    let about = std::fs::read_to_string(a.state_file("source")).expect("a source");
    let about: Value = serde_json::from_str(&about).expect("JSON");
    assert_eq!(about["lives"]["steps"].as_array().map(Vec::len), Some(2), "{about}");
    for block in 11..16 {
        a.write([block], &mut random);
        a.run(&["checkpoint"]).ok();
    }
    a.sync(&first, &[]).code(4);
    sync(&a, &second, &[]);
    second.force();
    let lost = image::fingerprint(&first.disk).0;
    second.sync(&first, &[]).code(4).says(&["has diverged"]);
    assert_eq!(lost, image::fingerprint(&first.disk).0);
    second.sync(&first, &["--discard-there"]).ok();
    equal(&second, &first);
}

/// The same where it is restored twice, to one and the same epoch: each time it is another branch.
#[test]
fn a_source_that_is_restored_twice_has_three_branches() {
    let mut random = Random::new("a host restored twice");
    let a = Host::with_disk(4 * MIB, &mut random);
    let [first, second, third] = std::array::from_fn(|_| Host::new());
    sync(&a, &third, &[]);
    let disk = std::fs::read(&a.disk).expect("a disk");
    let keep = |name: &str| {
        Run::new("cp").arg("-a").arg(a.site.state()).arg(a.site.path(name)).ok();
    };
    let restore = |name: &str| {
        std::fs::write(&a.disk, &disk).expect("a disk");
        std::fs::remove_dir_all(a.site.state()).expect("a state");
        Run::new("cp").arg("-a").arg(a.site.path(name)).arg(a.site.state()).ok();
    };
    keep("once");
    a.write([5], &mut random);
    sync(&a, &first, &[]);
    restore("once");
    a.sync(&first, &[]).code(4).says(&["restored"]);
    keep("twice");
    for block in 10..14 {
        a.write([block], &mut random);
        sync(&a, &second, &[]);
    }
    restore("twice");
    a.sync(&second, &[]).code(4).says(&["restored"]);
    a.write([20], &mut random);
    sync(&a, &third, &[]);
    second.force();
    for block in 30..34 {
        second.write([block], &mut random);
        second.run(&["checkpoint"]).ok();
    }
    let lost = image::fingerprint(&third.disk).0;
    second.sync(&third, &[]).code(4).says(&["has diverged"]);
    assert_eq!(lost, image::fingerprint(&third.disk).0);
}

/// A site follows another one after a planned switch, goes back along that branch, and takes over: the first source, all of which is in its past, is
/// taken back, however quickly all of it followed.
#[test]
fn a_step_back_on_ones_own_branch_leaves_all_that_was_before_known() {
    let mut random = Random::new("a step back on one's own branch");
    for _ in 0..3 {
        let (a, b, c) = (Host::with_disk(MIB, &mut random), Host::new(), Host::new());
        sync(&a, &b, &[]);
        sync(&a, &c, &["--keep-last", "20"]);
        std::thread::sleep(Duration::from_millis(1000 + random.below(1000)));
        a.towards(&b, &["demote"]).ok();
        b.run(&["promote"]).ok();
        b.write([1], &mut random);
        let epoch = number(&sync(&b, &c, &[]), "epoch").to_string();
        b.write([2], &mut random);
        sync(&b, &c, &[]);
        c.run(&["rewind", "--to", &epoch]).ok();
        let lineage = std::fs::read_to_string(folder(&c).join("lineage")).expect("a lineage");
        let lineage: Value = serde_json::from_str(&lineage).expect("JSON");
        // From the first life of the disk to the epoch.
        let at = lineage["lives"]["steps"][0]["n"].as_u64().map(|n| (n >> 24).to_string());
        assert_eq!((at, &lineage["lives"]["whole"]), (Some(epoch), &Value::Bool(true)), "{lineage}");
        c.force();
        c.write([4], &mut random);
        sync(&c, &a, &[]);
    }
}

/// What a source knew while it was one, it still knows when it is one again, and so does who takes over from it.
#[test]
fn a_trail_leads_through_changes_of_roles() {
    let mut random = Random::new("a trail through roles");
    let size = 16 * MIB;
    let (a, b) = (Host::with_disk(size, &mut random), Host::new());
    sync(&a, &b, &[]);
    let old: Vec<Host> = (0..3).map(|_| Host::new()).collect();
    let mut lacks: Vec<BTreeSet<u64>> = Vec::new();
    for round in 0..4u64 {
        let (here, there) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        if let Some(host) = old.get(round as usize) {
            sync(here, host, &[]);
            lacks.push(BTreeSet::new());
        }
        let written: BTreeSet<u64> = [10 + round, 100 + round / 2, 7].into();
        here.write(written.iter().copied(), &mut random);
        lacks.iter_mut().for_each(|lacks| lacks.extend(&written));
        here.towards(there, &["demote"]).ok();
        there.run(&["promote"]).ok();
    }
    for (host, lacks) in old.iter().zip(&lacks) {
        moved(&sync(&a, host, &[]), lacks);
    }
}

/// A campaign over three sites.
struct Sites {
    hosts: [Host; 3],
    /// Which of them are sources, and which of these counts.
    sources: BTreeSet<usize>,
    source: usize,
    /// Copies of the folders of their states, and of their trails.
    folders: Vec<(usize, PathBuf)>,
    trails: Vec<(usize, Vec<u8>)>,
    /// Syncs by what they were based on.
    tracked: u32,
    across: u32,
    compared: u32,
    adopted: u32,
}

impl Sites {
    fn new(size: u64, random: &mut Random) -> Sites {
        let hosts = [Host::with_disk(size, random), Host::new(), Host::new()];
        for host in &hosts[1..] {
            sync(&hosts[0], host, &["--keep-last", "4"]);
        }
        let (folders, trails) = (Vec::new(), Vec::new());
        let (tracked, across, compared, adopted) = (0, 0, 0, 0);
        Sites { hosts, sources: [0].into(), source: 0, folders, trails, tracked, across, compared, adopted }
    }

    /// The term that a disk has heard of last.
    fn term(&self, which: usize) -> u64 {
        let status = self.hosts[which].run(&["status", "--json"]).output();
        // A switch that was killed leaves a disk that is both.
        status.json().iter().filter_map(|line| line["term"].as_u64()).max().unwrap_or(0)
    }

    /// Brings another site up to date: whatever it takes, it is equal then.
    fn sync(&mut self, random: &mut Random) {
        let to = (self.source + 1 + random.below(2) as usize) % 3;
        let (here, there) = (&self.hosts[self.source], &self.hosts[to]);
        let mut options = if random.one_in(8) { vec!["--method", "compare"] } else { Vec::new() };
        if self.sources.remove(&to) {
            options.push("--discard-there");
        }
        let options = &options[..];
        if random.one_in(4) {
            let mut process = here.sync(there, options).start();
            std::thread::sleep(Duration::from_micros(random.below(120_000)));
            process.kill();
        }
        let before = (self.term(self.source), self.term(to));
        let output = settled(|| here.sync(there, options).output());
        let summary = match output.status.code() {
            Some(0) => output.summary(),
            // It was changed behind its state, or has what was given up.
            Some(4) => {
                self.adopted += 1;
                settled(|| here.sync(there, &["--adopt=overwrite"]).output()).summary()
            }
            _ => panic!("{output}"),
        };
        equal(here, there);
        match summary["method"].as_str() {
            Some("tracked") if before.0 != before.1 => self.across += 1,
            Some("tracked") => self.tracked += 1,
            _ => self.compared += 1,
        }
    }

    /// Makes a replica the source, in good order or not.
    fn promote(&mut self, random: &mut Random) {
        let to = (self.source + 1 + random.below(2) as usize) % 3;
        if self.sources.contains(&to) {
            return;
        }
        let (here, there) = (&self.hosts[self.source], &self.hosts[to]);
        if random.coin() && settled(|| here.towards(there, &["demote"]).output()).status.success() {
            self.sources.remove(&self.source);
            equal(here, there);
        } else if random.coin() {
            here.write(blocks(random.below(8), 4 * MIB, random), random);
        }
        if settled(|| there.run(&["promote", "--force"]).output()).status.success() {
            self.sources.insert(to);
            self.source = to;
        } else if !self.sources.contains(&self.source) {
            here.run(&["promote", "--force"]).ok();
            self.sources.insert(self.source);
        }
    }

    /// Something happens to what is written down of a replica.
    fn meddle(&mut self, random: &mut Random, copies: &Path) {
        let which = random.below(3) as usize;
        let host = &self.hosts[which];
        if self.sources.contains(&which) {
            return;
        }
        let log = std::fs::read(trail(host)).unwrap_or_default();
        let mine = |of: &usize| *of == which;
        match random.below(6) {
            0 => drop(std::fs::remove_file(trail(host))),
            1 => std::fs::write(trail(host), &log[..random.below(log.len() as u64 + 1) as usize])
                .expect("a trail"),
            2 => self.trails.push((which, log)),
            3 => {
                if let Some((_, old)) = self.trails.iter().rfind(|(of, _)| mine(of)) {
                    std::fs::write(trail(host), old).expect("a trail");
                }
            }
            4 => {
                let copy = copies.join(self.folders.len().to_string());
                copy_folder(&folder(host), &copy);
                self.folders.push((which, copy));
            }
            _ => {
                if let Some((_, copy)) = self.folders.iter().rfind(|(of, _)| mine(of)) {
                    std::fs::remove_dir_all(folder(host)).expect("a folder");
                    copy_folder(copy, &folder(host));
                }
            }
        }
    }

    /// A replica goes back to a moment that it has kept.
    fn rewind(&mut self, random: &mut Random) {
        let host = &self.hosts[random.below(3) as usize];
        let listed = host.run(&["rewind", "--json"]).output();
        if !listed.status.success() {
            return;
        }
        let moments = listed.summary()["moments"].as_array().cloned().unwrap_or_default();
        if !moments.is_empty() {
            let moment = &moments[random.below(moments.len() as u64) as usize];
            let to = moment["state"].as_str().expect("a state");
            settled(|| host.run(&["rewind", "--to", to]).output());
        }
    }
}

/// The output of a command, once what was killed before has let go.
fn settled(run: impl Fn() -> Output) -> Output {
    let until = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let output = run();
        if !output.stderr.contains("in use") || std::time::Instant::now() > until {
            return output;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for file in std::fs::read_dir(from).expect("a folder").flatten() {
        if file.file_type().is_ok_and(|kind| kind.is_file()) {
            std::fs::copy(file.path(), to.join(file.file_name())).expect("a copy");
        }
    }
}

/// Sites take over from each other in good order or by force, go back to earlier moments, lose what they know or get an old copy of it, and
/// their syncs are killed. Whatever a sync is based on, both are equal after it.
#[test]
fn whatever_a_site_knows_no_change_is_missed() {
    let mut random = Random::new("three sites");
    let mut sites = Sites::new(4 * MIB, &mut random);
    let copies = Host::new();
    for _ in 0..rounds(40, 6000) {
        let source = sites.source;
        match random.below(16) {
            0..=5 => {
                let written = blocks(1 + random.below(12), 4 * MIB, &mut random);
                sites.hosts[source].write(written, &mut random);
            }
            6..=10 => sites.sync(&mut random),
            11 | 12 => sites.promote(&mut random),
            13 => sites.rewind(&mut random),
            _ => sites.meddle(&mut random, &copies.site.path("copies")),
        }
    }
    for _ in 0..4 {
        sites.sync(&mut random);
    }
    let Sites { tracked, across, compared, adopted, .. } = sites;
    say(&format!(
        "{tracked} syncs of what changed, {across} over a promotion, {compared} compared, {adopted} adopted"
    ));
    assert!(tracked + across > compared, "hardly anything is known");
}
