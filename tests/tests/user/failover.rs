//! Roles: a replica takes over from its source, the source comes back, and two sources meet.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::host::Host;
use dsync_tests::load::{Load, Options};
use dsync_tests::mount::{self, Loop};
use dsync_tests::records::{self, Records};
use dsync_tests::scene::{fingerprints, number};
use dsync_tests::site::binary;
use dsync_tests::{
    Output, Random, Run, Scene, Site, beyond, find, image, need, need_root, rounds, say, skipped, until,
};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = image::BLOCK;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

fn equal(a: &Host, b: &Host) {
    image::assert_equal(&a.disk, &b.disk);
}

/// The files beside a host's disk, and the disk: what a refused sync must leave alone. Its state is that of a source, which may be
/// looked into; and what a replica shows to readers changes when it is opened.
fn touchable(host: &Host) -> Vec<(PathBuf, (u64, u64, i64, i64))> {
    let all = fingerprints(&host.disk).into_iter();
    let of_state = |path: &PathBuf| path.starts_with(host.site.state());
    all.filter(|(path, _)| !of_state(path) && !path.ends_with("log") && !path.ends_with("present")).collect()
}

/// Fails the test unless standard output has all of these words.
fn tells(output: &Output, words: &[&str]) {
    let text = output.text();
    assert!(words.iter().all(|word| text.contains(word)), "not all of {words:?}: {output}");
}

/// The last line of JSON.
fn summary(run: Run) -> serde_json::Value {
    run.ok().summary()
}

/// A source and its replica, which has all of it.
fn pair(size: u64, random: &mut Random) -> (Host, Host) {
    let (near, far) = (Host::with_disk(size, random), Host::new());
    near.sync(&far, &[]).ok();
    equal(&near, &far);
    (near, far)
}

/// Ends `from` in good order and makes `to` the source.
fn switch(from: &Host, to: &Host) {
    from.towards(to, &["demote"]).ok();
    to.run(&["promote"]).ok();
}

#[test]
fn a_planned_switch_there_and_back() {
    let mut random = Random::new("a planned switch");
    let (near, far) = pair(16 * MIB, &mut random);
    near.write([1, 2, 900], &mut random);
    // Neither may be used as what it is not.
    far.run(&["promote"]).code(4).says(&["dsync demote SRC", "--force"]);
    let refused = far.run(&["serve", "--socket", "s"]).code(4);
    refused.says(&["a replica of source", "dsync promote /", "--read-only"]);
    let socket = near.site.serve(&[&near.disk], &[]);
    near.towards(&far, &["demote"]).code(4).says(&["is being served", "stop its server"]);
    socket.stop();
    near.towards(&far, &["demote"]).ok();
    equal(&near, &far);
    near.run(&["serve", "--socket", "s"]).code(4).says(&["dsync promote"]);
    near.sync(&far, &[]).code(4).says(&["was demoted on", "dsync promote"]);
    let status = far.run(&["status", "-v"]).ok().text();
    assert!(status.contains("released") && status.contains("can be promoted"), "{status}");
    tells(&near.run(&["status", "-v"]).ok(), &["demoted on", "far:", "was told that it can take over"]);
    // Told once more, it says the same.
    near.towards(&far, &["demote"]).ok();
    assert_eq!(summary(far.run(&["promote", "-n", "--json"]))["dry_run"], true);
    let promoted = summary(far.run(&["promote", "--json"]));
    assert_eq!((number(&promoted, "term"), &promoted["released"]), (2, &true.into()));
    far.run(&["promote"]).code(4).says(&["is a source already (term 2)"]);
    let server = far.site.serve(&[&far.disk], &[]);
    far.run(&["promote"]).code(4).says(&["is a source already (term 2)"]);
    server.stop();
    tells(&near.towards(&far, &["demote"]).ok(), &["was promoted already (term 2)"]);
    let id = |host: &Host| summary(host.run(&["status", "--json"]))["uuid"].clone();
    assert_eq!(id(&far), promoted["source"]);
    // What is written to it from the first write on is what the old source lacks.
    far.write([5, 6, 7, 1], &mut random);
    let back = summary(far.sync(&near, &[]));
    assert_eq!((&back["method"], number(&back, "blocks_changed")), (&"tracked".into(), 4));
    equal(&near, &far);
    // And back. The old folder is taken over, with a history of its own.
    far.write([8], &mut random);
    switch(&far, &near);
    equal(&near, &far);
    assert_eq!(id(&near), promoted["source"]);
    assert_eq!(number(&summary(near.run(&["status", "--json"])), "term"), 3);
    near.write([9, 10], &mut random);
    assert_eq!(number(&summary(near.sync(&far, &[])), "blocks_changed"), 2);
    equal(&near, &far);
    near.run(&["status", "--check"]).ok();
    far.site.dsync(["status", "--check"]).ok();
}

/// A commit after the last word takes it back.
#[test]
fn the_last_word_is_of_one_epoch() {
    let mut random = Random::new("the last word");
    let (near, far) = pair(8 * MIB, &mut random);
    near.towards(&far, &["demote"]).ok();
    near.run(&["promote", "--force"]).ok();
    near.write([3], &mut random);
    near.sync(&far, &[]).ok();
    far.run(&["promote"]).code(4).says(&["has not said"]);
    // To another replica than that of the last sync nothing is told.
    let other = Host::new();
    near.sync(&other, &[]).ok();
    near.write([4], &mut random);
    near.towards(&far, &["demote"]).ok();
    near.towards(&other, &["demote"]).code(4).says(&["is not at epoch"]);
    other.run(&["promote"]).code(4).says(&["has not said"]);
    far.run(&["promote"]).ok();
}

/// A disk that was promoted from an earlier epoch does not have what was written since: its source is not told that the switch is done.
#[test]
fn who_was_promoted_without_the_last_epoch_has_not_taken_over() {
    let mut random = Random::new("not taken over");
    let (near, far) = pair(8 * MIB, &mut random);
    let (other, mut rounds) = (Host::new(), 0);
    let mut refused = |from: &Host, to: &Host, told: &Host| {
        let last = number(&summary(from.run(&["status", "--json"])), "epoch");
        let refused = from.towards(to, &["demote"]).code(4);
        let (lacks, told) = (format!("not known to have epoch {last}"), told.disk.display().to_string());
        refused.says(&["was promoted", &lacks, &told, "promote --force", "is demoted, but"]);
        rounds += 1;
    };
    // Another one was told.
    near.write([2, 3], &mut random);
    near.sync(&other, &[]).ok();
    far.run(&["promote", "--force"]).ok();
    far.write([7], &mut random);
    near.towards(&other, &["demote"]).ok();
    refused(&near, &far, &other);
    other.run(&["promote"]).ok();
    refused(&near, &far, &other);
    tells(&near.towards(&other, &["demote"]).ok(), &["was promoted already (term 2)"]);
    // It was told itself, and went back before it took over.
    let last = Host::new();
    other.write([4], &mut random);
    other.sync(&last, &["--keep-last", "5"]).ok();
    let kept = number(&summary(last.run(&["status", "--json"])), "epoch");
    other.write([5], &mut random);
    other.towards(&last, &["demote"]).ok();
    last.run(&["rewind", "--to", &kept.to_string()]).ok();
    last.run(&["promote", "--force"]).ok();
    refused(&other, &last, &last);
    assert_eq!(rounds, 3);
}

/// A promotion is taken back before anything was written: the next sync makes a replica of the disk again, although it has nothing to send. What
/// the source writes afterwards is named before it is given up.
#[test]
fn a_promotion_that_is_taken_back_leaves_a_replica() {
    for nothing_since in [true, false] {
        let mut random = Random::new("a promotion that is taken back");
        let (near, far) = pair(8 * MIB, &mut random);
        near.write([1], &mut random);
        near.sync(&far, &["--keep-last", "5"]).ok();
        far.run(&["promote", "--force"]).ok();
        far.run(&["demote"]).ok();
        if !nothing_since {
            near.write([2], &mut random);
        }
        for _ in 0..2 {
            assert_eq!(summary(near.sync(&far, &[]))["method"], "tracked");
        }
        equal(&near, &far);
        let status = far.run(&["status", "-v"]).ok().text();
        assert!(status.contains("consistent") && !status.contains("former"), "{status}");
        far.site.serve(&[&PathBuf::from(format!("{}@now", far.disk.display()))], &[]).stop();
        near.write([3], &mut random);
        let refused = far.run(&["promote"]).code(4);
        refused.says(&["has not said", "gives up what was written there after this epoch"]);
        assert!(!refused.stderr.contains("loses nothing"), "{refused}");
        tells(&far.run(&["promote", "--force"]).ok(), &["given up", "--save-there FILE"]);
    }
}

/// A promotion was given up: the disk follows its old source again. A delta file does not overwrite what it wrote itself; a sync does, where
/// its user consents.
#[test]
fn a_disk_whose_promotion_was_given_up_goes_on_from_its_old_source() {
    let mut random = Random::new("a delta after a promotion that was given up");
    let (near, far) = pair(8 * MIB, &mut random);
    for wrote in [true, false] {
        let common = epoch_of(&far).to_string();
        far.run(&["promote", "--force"]).ok();
        if wrote {
            far.write([1, 2], &mut random);
        }
        far.run(&["demote"]).ok();
        near.write([3], &mut random);
        let delta = near.run(&["extract", "--since", &common]).ok().stdout;
        let merge = far.run(&["merge"]).input(delta);
        if wrote {
            refused([&near, &far], merge, &["is at epoch"]);
            let after = summary(near.sync(&far, &["--discard-there"]));
            assert_eq!(
                (&after["method"], number(&after, "blocks_changed")),
                (&"tracked".into(), 3),
                "{after}"
            );
            assert_eq!(number(&after["given_up"], "bytes"), 2 * BLOCK);
        } else {
            merge.ok();
        }
        equal(&near, &far);
    }
}

/// A disk of which it was not known what was written to it, and that was given up before anybody took over, is led back.
#[test]
fn a_disk_that_was_demoted_in_doubt_is_led_back_to_be_a_source() {
    let mut random = Random::new("demoted in doubt");
    let (near, far) = pair(8 * MIB, &mut random);
    near.write([2], &mut random);
    // As if it had been copied.
    let time = std::fs::FileTimes::new().set_modified(std::time::SystemTime::now());
    std::fs::File::options()
        .write(true)
        .open(&near.disk)
        .and_then(|file| file.set_times(time))
        .expect("times");
    near.run(&["demote"]).ok();
    near.towards(&far, &["demote"]).code(4).says(&["is not at epoch", "was not told"]);
    near.run(&["promote", "--force"]).ok();
    near.write([3], &mut random);
    assert_eq!(summary(near.sync(&far, &[]))["method"], "compare");
    equal(&near, &far);
}

/// The old source returns, with writes that nobody has: they are named, saved, and given up; what moves is what either side wrote.
#[test]
fn a_failback_moves_what_either_side_wrote() {
    let mut random = Random::new("a failback");
    let (near, far) = pair(64 * MIB, &mut random);
    near.write([100], &mut random);
    near.sync(&far, &[]).ok();
    let keeper = Host::new();
    near.sync(&keeper, &[]).ok();
    let ours: BTreeSet<u64> = (0..500).map(|_| random.below(16384)).collect();
    near.write(ours.iter().copied(), &mut random);
    let lost = near.copy("lost.raw");
    let forced = far.run(&["promote", "--force"]).ok();
    tells(&forced, &["is now the source", "in term 2", "given up", "--save-there FILE"]);
    let theirs: BTreeSet<u64> = (0..700).map(|_| random.below(16384)).collect();
    far.write(theirs.iter().copied(), &mut random);
    // Before anything is done, both are told apart, and nothing is touched.
    let before = (touchable(&near), touchable(&far));
    for (one, other) in [(&near, &far), (&far, &near)] {
        let bytes = |blocks: &BTreeSet<u64>| format!("{:.2} MiB", blocks.len() as f64 / 256.0);
        let (near, far) = (bytes(&ours), bytes(&theirs));
        let refused = one.sync(other, &[]).code(4);
        refused.says(&[
            "have diverged",
            "(term 1)",
            "(term 2)",
            "apart since epoch",
            "--save-there FILE",
            &near,
            &far,
        ]);
        one.sync(other, &["--method", "compare"]).code(4).says(&["have diverged"]);
        one.towards(other, &["mirror"]).code(4);
    }
    assert_eq!((touchable(&near), touchable(&far)), before, "a refused sync wrote");
    near.site.serve(&[&near.disk], &[]).stop();
    let saved = near.new_file();
    let shown = saved.to_str().expect("a path");
    let save = ["--save-there", shown];
    let dry = summary(far.sync(&near, &[&save[..], &["-n"]].concat()));
    let given_up = |summary: &serde_json::Value| number(&summary["given_up"], "bytes");
    assert_eq!(given_up(&dry), ours.len() as u64 * BLOCK);
    assert_eq!((touchable(&near), touchable(&far)), before, "a dry run wrote");
    let union = ours.union(&theirs).count() as u64;
    let back = summary(far.sync(&near, &save));
    assert_eq!((given_up(&back), &back["given_up"]["saved"]), (ours.len() as u64 * BLOCK, &shown.into()));
    tells(&near.site.dsync(["inspect", shown]).ok(), &["complete"]);
    assert_eq!((&back["method"], &back["trust"]), (&"tracked".into(), &"tracked".into()));
    assert_eq!(number(&back, "blocks_changed"), union);
    let sent = number(&back, "bytes_sent");
    assert!(sent * 100 <= union * BLOCK * 105, "{sent} bytes were sent for {union} blocks");
    assert!(number(&back, "bytes_read") * 100 <= union * BLOCK * 105, "{back}");
    say(&format!(
        "failback: {union} blocks, {:.3} of their bytes sent",
        sent as f64 / (union * BLOCK) as f64
    ));
    equal(&near, &far);
    // What was saved is what was lost.
    keeper.run(&["merge"]).input(std::fs::read(&saved).expect("a delta")).ok();
    image::assert_equal(&lost, &keeper.disk);
}

/// Whichever of two sources is kept, the other takes the differences; the kept one may be that of the earlier term.
#[test]
fn either_of_two_sources_may_be_kept() {
    let mut random = Random::new("two sources");
    let (near, far) = pair(16 * MIB, &mut random);
    near.write([1, 2], &mut random);
    far.run(&["promote", "--force"]).ok();
    far.write([2, 3, 4], &mut random);
    // The later term has a replica that knows nothing of the earlier one.
    let other = Host::new();
    far.sync(&other, &[]).ok();
    near.sync(&other, &[]).code(4).says(&["follows a later term", "--discard-there"]);
    let kept = summary(near.sync(&far, &["--discard-there"]));
    assert_eq!((&kept["method"], number(&kept, "blocks_changed")), (&"tracked".into(), 4));
    equal(&near, &far);
    near.write([9], &mut random);
    assert_eq!(number(&summary(near.sync(&far, &[])), "blocks_changed"), 1);
    // A promotion by mistake, taken back.
    far.run(&["promote", "--force"]).ok();
    far.run(&["demote"]).ok();
    assert_eq!(summary(near.sync(&far, &[]))["method"], "tracked");
    switch(&near, &far);
    equal(&near, &far);
}

/// What a disk became stays with it under a new name, whatever its folder is called: what refuses it says that, and what is possible.
#[test]
fn a_promoted_disk_that_was_renamed_is_told_what_it_is() {
    let mut random = Random::new("a promoted disk is renamed");
    let (_near, far) = pair(4 * MIB, &mut random);
    far.run(&["promote", "--force"]).ok();
    let renamed = far.site.path("renamed.raw");
    std::fs::rename(&far.disk, &renamed).expect("another name");
    let run = |words: &[&str]| far.site.dsync([words[0]]).arg(&renamed).args(&words[1..]);
    let refused = run(&["recover"]).code(4);
    refused.says(&[
        "was promoted on",
        "it is a source itself now",
        &format!("dsync demote {}", renamed.display()),
    ]);
    assert!(!refused.stderr.contains("--repair"), "{refused}");
    run(&["demote"]).ok();
    tells(&run(&["recover"]).ok(), &["the former source"]);
}

/// The old site was not given up for the way back: the host that took over says so, until it was, or the way back is given up.
#[test]
fn a_way_back_that_was_refused_is_reported() {
    let mut random = Random::new("a way back that is refused");
    let (near, far) = pair(4 * MIB, &mut random);
    far.run(&["promote", "--force"]).ok();
    let check = || far.site.dsync(["status", "--check"]);
    assert_eq!(check().ok().text(), "OK\n");
    far.sync(&near, &[]).code(4).says(&["have diverged"]);
    tells(&check().code(1), &["is not brought up to date", "have diverged", "dsync forget"]);
    tells(&far.run(&["status", "-v"]).ok(), &["first sync has not begun", "have diverged"]);
    // To look at what differs changes nothing of that.
    far.towards(&near, &["verify"]);
    tells(&far.run(&["status", "-v"]).ok(), &["first sync has not begun", "have diverged"]);
    // A mistyped name is none of the source's.
    let other = Host::with_disk(4 * MIB, &mut random);
    far.sync(&other, &[]).code(4);
    assert_eq!(check().code(1).text().lines().count(), 1);
    far.sync(&near, &["--discard-there"]).ok();
    assert_eq!(check().ok().text(), "OK\n");
}

/// The replica had committed, and its source did not hear of it: what is in common is known all the same.
#[test]
fn a_lost_acknowledgement_costs_no_comparison() {
    for (further, name) in [(false, "at the last epoch"), (true, "with writes since")] {
        let mut random = Random::new(name);
        let (near, far) = pair(16 * MIB, &mut random);
        near.write([1, 2], &mut random);
        let bookmarks = near.state_file("bookmarks");
        let before = std::fs::read(&bookmarks).expect("bookmarks");
        near.sync(&far, &[]).ok();
        std::fs::write(&bookmarks, &before).expect("bookmarks");
        if further {
            near.write([3], &mut random);
        }
        far.run(&["promote", "--force"]).ok();
        far.write([10, 11], &mut random);
        let unsure = u64::from(further);
        let back = summary(far.sync(&near, &["--discard-there"]));
        assert_eq!(number(&back["given_up"], "bytes"), unsure * BLOCK);
        assert_eq!((&back["method"], number(&back, "blocks_changed")), (&"tracked".into(), unsure + 2));
        equal(&near, &far);
    }
}

/// Where it is not known what was written to the former source, the next sync compares, without another word.
#[test]
fn a_former_source_of_which_nothing_is_known_is_compared() {
    let mut random = Random::new("an unknown former source");
    let (near, far) = pair(8 * MIB, &mut random);
    far.run(&["promote", "--force"]).ok();
    far.write([1], &mut random);
    image::scribble(&near.disk, 5 * MIB, 4096, &mut random);
    let file = near.new_file();
    let save = ["--save-there", file.to_str().expect("a path")];
    far.sync(&near, &save).code(4).says(&["cannot be saved as a delta", "--discard-there"]);
    assert!(!file.exists());
    let back = summary(far.sync(&near, &["--discard-there"]));
    assert_eq!((&back["method"], &back["given_up"]["bytes"]), (&"compare".into(), &serde_json::Value::Null));
    assert_eq!(number(&back, "blocks_changed"), 2);
    equal(&near, &far);
    far.write([2], &mut random);
    assert_eq!(summary(far.sync(&near, &[]))["method"], "tracked");
}

/// A third replica goes on from the new source, from the epoch at which it is.
#[test]
fn another_replica_goes_on_from_the_new_source() {
    let mut random = Random::new("a third host");
    let (a, b) = pair(16 * MIB, &mut random);
    let (c, behind) = (Host::new(), Host::new());
    a.sync(&behind, &[]).ok();
    a.write([1], &mut random);
    a.sync(&b, &[]).ok();
    a.sync(&c, &[]).ok();
    // One replica of which it was known that it is ahead follows the old source.
    let ahead = Host::new();
    a.write([2], &mut random);
    a.sync(&ahead, &[]).ok();
    b.run(&["promote", "--force"]).ok();
    b.write([3, 4], &mut random);
    let went_on = summary(b.sync(&c, &[]));
    assert_eq!((&went_on["method"], number(&went_on, "blocks_changed")), (&"tracked".into(), 2));
    equal(&b, &c);
    // It has heard of the new term, and the old source is refused.
    let before = touchable(&c);
    a.sync(&c, &[]).code(4).says(&["follows a later term", "term 2", "sync from its source"]);
    assert_eq!(touchable(&c), before);
    // One that is behind gets what it lacks; one that is ahead has diverged.
    let went_on = summary(b.sync(&behind, &[]));
    assert_eq!((&went_on["method"], number(&went_on, "blocks_changed")), (&"tracked".into(), 3));
    equal(&b, &behind);
    let before = touchable(&ahead);
    b.sync(&ahead, &[]).code(4).says(&["has diverged", "of term 1", "--discard-there"]);
    b.sync(&ahead, &["--method", "compare"]).code(4).says(&["has diverged"]);
    let file = ahead.new_file();
    let saved = b.sync(&ahead, &["--save-there", file.to_str().expect("a path")]).code(4);
    saved.says(&["cannot be saved as a delta", "only a source records"]);
    assert_eq!(touchable(&ahead), before);
    b.sync(&ahead, &["--discard-there"]).ok();
    equal(&b, &ahead);
    // The old source is a replica again, and then a third source.
    b.sync(&a, &["--discard-there"]).ok();
    equal(&a, &b);
    switch(&b, &c);
    c.write([9], &mut random);
    for host in [&a, &b] {
        assert_eq!(summary(c.sync(host, &[]))["method"], "tracked");
        equal(&c, host);
    }
}

/// Has a disk give up what only it has, and cuts the line before it gets anything.
fn give_up(source: &Host, other: &Host) {
    let cut = source.sync(other, &["--discard-there"]).env("RSH_CUT", "6000").output();
    assert!(!cut.status.success(), "{cut}");
    tells(&other.run(&["status", "-v"]).ok(), &["demoted on"]);
}

/// What a command says is refused, leaves both disks, and all that is beside them, as they were.
fn refused(hosts: [&Host; 2], run: Run, words: &[&str]) -> Output {
    let before = hosts.map(touchable);
    let output = run.code(4);
    output.says(words);
    assert_eq!(hosts.map(touchable), before, "it was refused, and wrote: {output}");
    output
}

/// The epoch of a host's disk, as a source or as a replica.
fn epoch_of(host: &Host) -> u64 {
    number(&summary(host.run(&["status", "--json"])), "epoch")
}

/// A source is not overwritten by the way: not where it is adopted, repaired or merged into, whatever it was before.
#[test]
fn a_source_is_never_adopted_repaired_or_merged_into() {
    let mut random = Random::new("two sources, adopted");
    let (near, far) = pair(8 * MIB, &mut random);
    let since = epoch_of(&far).to_string();
    near.write([1, 2], &mut random);
    far.run(&["promote", "--force"]).ok();
    far.write([2, 3, 4], &mut random);
    for (one, other) in [(&near, &far), (&far, &near)] {
        let both = ["have diverged", "apart since epoch", "--save-there FILE"];
        let adopt = ["sync", "--adopt"];
        for words in [&adopt[..], &["sync", "--adopt", "--method", "rolling"], &["verify"]] {
            let said = refused([one, other], one.towards(other, words), &both);
            assert!(!said.stderr.contains("--adopt"), "{said}");
        }
        let server = one.site.serve(&[&one.disk], &[]);
        refused([one, other], one.towards(other, &["mirror", "--adopt"]), &both);
        server.stop();
        refused([one, other], one.towards(other, &["verify", "--repair"]), &both);
        let delta = one.run(&["extract", "--since", &since]).ok().stdout;
        let merge = refused([one, other], other.run(&["merge"]).input(delta), &["is a source itself"]);
        assert!(!merge.stderr.contains("--adopt"), "{merge}");
    }
    // Of another source it is not the replica either; a disk that was never promoted may be restored.
    let other = Host::with_disk(8 * MIB, &mut random);
    let words = ["is a source itself (term 2)", "dsync demote"];
    refused([&other, &far], other.towards(&far, &["sync", "--adopt"]), &words);
    assert_eq!(summary(near.sync(&far, &["--discard-there"]))["method"], "tracked");
    equal(&near, &far);
    other.sync(&far, &["--adopt=overwrite"]).ok();
    equal(&other, &far);
    other.sync(&near, &["--adopt=overwrite"]).ok();
    equal(&other, &near);
}

/// The epoch in common of two sources is the last that is in the past of both, also where one of them no longer knows it.
#[test]
fn two_sources_name_the_last_epoch_in_common() {
    let mut random = Random::new("the epoch in common");
    let (a, b) = pair(8 * MIB, &mut random);
    a.write([1], &mut random);
    switch(&a, &b);
    let common = epoch_of(&a);
    b.write([2], &mut random);
    let c = Host::new();
    b.sync(&c, &[]).ok();
    b.write([3], &mut random);
    switch(&b, &c);
    c.write([4], &mut random);
    a.run(&["promote", "--force"]).ok();
    a.write([5], &mut random);
    let apart = format!("apart since epoch {common}.");
    // The history of c begins later.
    let ends = |from: &Host, to: &Host| format!("{} far:{}", from.disk.display(), to.disk.display());
    let back = |from: &Host, to: &Host| format!("far:{} {}", from.disk.display(), to.disk.display());
    let (save, discard) = ("dsync sync --save-there FILE", "dsync sync --discard-there");
    let ways = [format!("{save} {}", ends(&c, &a)), format!("{discard} {}", back(&a, &c))];
    refused(
        [&c, &a],
        c.sync(&a, &[]),
        &[&apart, "(term 3)", "(term 2)", &ways[0], &ways[1], "copy it first"],
    );
    let ways = [format!("{discard} {}", ends(&a, &c)), format!("{save} {}", back(&c, &a))];
    refused([&a, &c], a.sync(&c, &[]), &[&apart, &ways[0], &ways[1], "compares everything"]);
    let file = a.new_file();
    let dry = summary(c.sync(&a, &["--save-there", file.to_str().expect("a path"), "-n"]));
    assert_eq!((&dry["method"], file.exists()), (&"compare".into(), false));
    // As it says.
    assert_eq!(summary(a.sync(&c, &["--discard-there"]))["method"], "compare");
    equal(&a, &c);
    // Both have gone on from epochs of b's term: the earlier one counts.
    let (d, e) = (Host::new(), Host::new());
    for replica in [&d, &e] {
        a.sync(replica, &[]).ok();
    }
    d.run(&["promote", "--force"]).ok();
    let earlier = format!("apart since epoch {}.", epoch_of(&e));
    a.write([6], &mut random);
    a.sync(&e, &[]).ok();
    e.run(&["promote", "--force"]).ok();
    for (one, other) in [(&d, &e), (&e, &d), (&a, &d), (&d, &a)] {
        refused([one, other], one.sync(other, &[]), &[&earlier]);
    }
}

/// One replica has the last word of its source. Another one that is at the same epoch is not told the same.
#[test]
fn the_last_word_is_given_once() {
    let mut random = Random::new("the last word, twice");
    let (a, b) = pair(8 * MIB, &mut random);
    let c = Host::new();
    a.sync(&c, &[]).ok();
    a.towards(&b, &["demote"]).ok();
    let said = refused([&a, &c], a.towards(&c, &["demote"]), &["was told", "--force"]);
    assert!(said.stderr.contains(&format!("far:{}", b.disk.display())), "{said}");
    a.towards(&b, &["demote"]).ok();
    c.run(&["promote"]).code(4).says(&["has not said"]);
    b.run(&["promote"]).ok();
    refused([&a, &c], a.towards(&c, &["demote"]), &["was told"]);
    // Taken back by force, the replica that has the word is named; a later demotion has a word of its own.
    let (a, b) = pair(8 * MIB, &mut random);
    a.towards(&b, &["demote"]).ok();
    tells(
        &a.run(&["promote", "--force"]).ok(),
        &["its last word was given to", &b.disk.display().to_string()],
    );
    a.write([1], &mut random);
    let c = Host::new();
    a.sync(&c, &[]).ok();
    a.towards(&c, &["demote"]).ok();
    c.run(&["promote"]).ok();
}

/// A source that is refused has nobody give up anything for it.
#[test]
fn nothing_is_given_up_for_a_source_that_is_refused() {
    let mut random = Random::new("consent to a source that is refused");
    let (near, far) = pair(8 * MIB, &mut random);
    far.run(&["promote", "--force"]).ok();
    far.write([1], &mut random);
    let old = far.copy("old.raw");
    near.write([2], &mut random);
    far.write([3], &mut random);
    // A backup is put in its place.
    std::fs::rename(&old, &far.disk).expect("a backup");
    let words = ["is not the disk that", "--accept-source"];
    refused([&far, &near], far.sync(&near, &["--discard-there"]), &words);
    let words = ["cannot be saved as a delta"];
    refused([&far, &near], far.sync(&near, &["--save-there=/nowhere/lost.delta"]), &words);
    assert_eq!(summary(near.run(&["status", "--json"]))["kind"], "source");
}

/// A sync that was killed after its delta had a name goes on with that.
#[test]
fn a_saved_delta_is_recognised() {
    let mut random = Random::new("a saved delta");
    let (near, far) = pair(8 * MIB, &mut random);
    let since = epoch_of(&far).to_string();
    near.write([1, 2], &mut random);
    far.run(&["promote", "--force"]).ok();
    let (saved, early) = (near.new_file(), near.new_file());
    let save = |file: &PathBuf| far.sync(&near, &["--save-there", file.to_str().expect("a path")]);
    let delta = |file: &PathBuf| {
        std::fs::write(file, near.run(&["extract", "--since", &since]).ok().stdout).expect("a delta");
    };
    delta(&early);
    near.write([3], &mut random);
    delta(&saved);
    let bytes = std::fs::read(&saved).expect("a delta");
    let new_name = ["exists", "new file"];
    refused([&near, &far], save(&early), &new_name);
    for other in
        [&bytes[..bytes.len() - 1], &bytes[..100], b"", b"no delta at all", &[&bytes[..], b"x"].concat()]
    {
        std::fs::write(&saved, other).expect("a file");
        refused([&near, &far], save(&saved), &new_name);
    }
    std::fs::write(&saved, &bytes).expect("a delta");
    let given_up = summary(save(&saved))["given_up"].clone();
    assert_eq!((number(&given_up, "bytes"), &given_up["saved"]), (3 * BLOCK, &saved.to_str().into()));
    assert!(std::fs::read(&saved).expect("a delta") == bytes, "it was written anew");
    equal(&near, &far);
    // Run again, it has nothing to give up.
    let other = near.new_file();
    let again = summary(save(&other));
    let told = again["warnings"][0].as_str().expect("a warning");
    assert!(again["given_up"].is_null() && told.contains("was not written") && !other.exists(), "{again}");
}

/// What fails after that says what was given up, and where it is.
#[test]
fn a_sync_that_fails_after_the_consent_says_what_was_given_up() {
    let mut random = Random::new("a consent before an error");
    let (near, far) = pair(8 * MIB, &mut random);
    let since = epoch_of(&far);
    near.write([1], &mut random);
    far.run(&["promote", "--force"]).ok();
    let saved = near.new_file();
    let file = saved.to_str().expect("a path");
    let failed = far.sync(&near, &["--save-there", file, "--hook", "false"]).code(1);
    let gave_up = format!("gave up what was written to it since epoch {since}, saved in {file}");
    tells(&failed, &["Before that, ", &gave_up]);
    tells(&far.sync(&near, &["--save-there", file]).ok(), &[&format!("is saved in {file}")]);
    equal(&near, &far);
}

/// A sync whose consent was carried out, and that was cut off then, says where that was saved; what was given up without saving it is
/// saved as long as it is there.
#[test]
fn what_was_given_up_before_a_cut_is_saved_or_named() {
    let mut random = Random::new("second thoughts");
    for discards in [false, true] {
        let (near, far) = pair(32 * MIB, &mut random);
        near.write([1, 2, 900], &mut random);
        far.run(&["promote", "--force"]).ok();
        far.write(1000..1600, &mut random);
        let content = near.copy("content.raw");
        let [first, second] = [near.new_file(), near.new_file()];
        let save = |file: &PathBuf| ["--save-there".to_owned(), file.display().to_string()];
        let consent = if discards { vec!["--discard-there".to_owned()] } else { save(&first).to_vec() };
        let words: Vec<&str> = consent.iter().map(String::as_str).collect();
        let cut = far.sync(&near, &words).env("RSH_CUT", "300000").output();
        assert!(!cut.status.success() && first.exists() != discards, "{cut}");
        tells(&near.run(&["status", "-v"]).ok(), &["demoted on", "will be overwritten"]);
        image::assert_equal(&content, &near.disk);
        let saving = save(&second);
        let again = far.sync(&near, &[&saving[0], &saving[1]]).output();
        if discards {
            // A part of what was sent is in the journal, and nothing of it on the disk.
            assert!(again.status.success() || again.status.code() == Some(4), "{again}");
            assert_eq!(again.status.success(), second.exists());
        } else {
            let told = again.summary()["warnings"].to_string();
            assert!(told.contains(&first.display().to_string()) && !second.exists(), "{told}");
            equal(&near, &far);
        }
    }
}

/// The replica that is promoted was rewound: what the old source has more than that is later than all that it knows to be in common.
#[test]
fn a_replica_that_was_rewound_and_promoted_gives_up_nothing_unsaved() {
    let mut random = Random::new("rewound and promoted");
    let (near, far) = pair(8 * MIB, &mut random);
    let mut epochs = Vec::new();
    for block in [5, 6] {
        near.write([block], &mut random);
        near.sync(&far, &["--keep-last", "9"]).ok();
        epochs.push(epoch_of(&far));
    }
    let to = epochs[0];
    far.run(&["rewind", "--to", &to.to_string()]).ok();
    far.run(&["promote", "--force"]).ok();
    near.run(&["demote"]).ok();
    let since = format!("goes on from epoch {to}");
    refused([&far, &near], far.sync(&near, &[]), &["was demoted at epoch", &since, "--save-there FILE"]);
    let saved = near.new_file();
    let back = summary(far.sync(&near, &["--save-there", saved.to_str().expect("a path")]));
    let given_up = &back["given_up"];
    assert_eq!((number(given_up, "since"), number(given_up, "bytes")), (to, BLOCK));
    tells(&near.site.dsync(["inspect"]).arg(&saved).ok(), &["complete", "4.00 KiB"]);
    assert_eq!(back["method"], "tracked");
    equal(&near, &far);
}

/// Where the history of the old source does not go back to the epoch in common, nothing leads to a file: it is not promoted for that.
#[test]
fn what_no_delta_can_save_is_to_be_copied() {
    let mut random = Random::new("to be copied");
    let (near, far) = pair(8 * MIB, &mut random);
    let to = epoch_of(&far).to_string();
    // What this wrote is in no record.
    image::scribble(&near.disk, 5 * MIB, 4096, &mut random);
    near.sync(&far, &["--keep-last", "9"]).ok();
    far.run(&["rewind", "--to", &to]).ok();
    far.run(&["promote", "--force"]).ok();
    for demoted in [false, true] {
        if demoted {
            near.run(&["demote"]).ok();
        }
        let saved = near.new_file();
        let save = ["--save-there", saved.to_str().expect("a path")];
        let words = ["cannot be saved as a delta", "opy"];
        refused([&far, &near], far.sync(&near, &save), &words);
        refused([&far, &near], far.sync(&near, &[]), &words);
        assert!(!saved.exists());
    }
    assert_eq!(summary(far.sync(&near, &["--discard-there"]))["method"], "compare");
    equal(&near, &far);
}

/// A file that is asked for is there, also where nothing was written.
#[test]
fn a_delta_of_nothing_is_a_delta() {
    let mut random = Random::new("nothing to save");
    let (near, far) = pair(8 * MIB, &mut random);
    far.run(&["promote", "--force"]).ok();
    let saved = near.new_file();
    let file = saved.to_str().expect("a path");
    let synced = summary(far.sync(&near, &["--save-there", file]));
    assert_eq!((&synced["given_up"]["saved"], &synced["method"]), (&file.into(), &"tracked".into()));
    tells(&near.site.dsync(["inspect"]).arg(&saved).ok(), &["complete"]);
}

/// What a delta in a file leaves of a former source's writes was not unreadable anywhere.
#[test]
fn a_delta_that_is_merged_into_a_former_source_leaves_what_it_does_not_have() {
    let mut random = Random::new("a delta for a former source");
    let (near, far) = pair(8 * MIB, &mut random);
    let since = epoch_of(&far).to_string();
    near.write([1, 2], &mut random);
    far.run(&["promote", "--force"]).ok();
    far.write([2, 3], &mut random);
    give_up(&far, &near);
    let delta = far.run(&["extract", "--since", &since]).ok().stdout;
    near.run(&["merge"]).input(delta).ok();
    for words in [&["status"][..], &["recover"]] {
        tells(&near.run(words).ok(), &["4.00 KiB", "was not in what was merged", "dsync sync"]);
    }
    let status = near.site.dsync(["status", "-v"]).ok().text();
    assert!(status.contains("not in what was merged"), "{status}");
    near.run(&["promote", "--force"]).code(4).says(&["not in what was merged"]);
    assert_eq!(number(&summary(far.sync(&near, &[])), "blocks_changed"), 1);
    equal(&near, &far);
}

/// Promotions follow one another. A replica that is further back than the last of them, on the way to it, goes on; one of another
/// branch is refused, with both ways out.
#[test]
fn a_replica_goes_on_from_before_several_promotions() {
    let mut random = Random::new("a line of promotions");
    let (a, b) = pair(16 * MIB, &mut random);
    let [first, second, demoted, astray] = std::array::from_fn(|_| Host::new());
    a.sync(&first, &[]).ok();
    a.write([1], &mut random);
    a.sync(&b, &[]).ok();
    // Written by the first source after what the second knows.
    a.write([2], &mut random);
    a.sync(&astray, &[]).ok();
    b.run(&["promote", "--force"]).ok();
    b.write([3], &mut random);
    for replica in [&second, &demoted] {
        b.sync(replica, &[]).ok();
    }
    b.sync(&a, &["--discard-there"]).ok();
    for round in 0..3 {
        let (from, to) = if round % 2 == 0 { (&b, &a) } else { (&a, &b) };
        from.write([10 + round, 20 + round], &mut random);
        switch(from, to);
    }
    a.write([30], &mut random);
    for replica in [&first, &second, &demoted] {
        let went_on = summary(a.sync(replica, &[]));
        assert_ne!(went_on["method"], "copy");
        assert!(number(&went_on, "blocks_changed") <= 10, "{went_on}");
        equal(&a, replica);
    }
    refused(
        [&a, &astray],
        a.sync(&astray, &[]),
        &["has diverged", "of term 1", "--discard-there", "go on syncing"],
    );
    assert_eq!(summary(a.sync(&first, &[]))["method"], "tracked");
    a.sync(&astray, &["--discard-there"]).ok();
    equal(&a, &astray);
}

/// On one host, with one state directory.
#[test]
fn a_replica_on_the_host_of_its_source_is_promoted() {
    let mut random = Random::new("one host");
    let host = Host::with_disk(8 * MIB, &mut random);
    let replica = host.site.path("copy.raw");
    host.site.sync(&host.disk, &replica, &[]).ok();
    host.site.dsync(["promote", "--force"]).arg(&replica).ok();
    let id = summary(host.site.dsync(["status", "--json"]).arg(&replica))["uuid"].clone();
    let id = id.as_str().expect("an id");
    // Of two with one id, that of the later term is meant.
    tells(&host.site.dsync(["status", id]).ok(), &["copy.raw", "term 2"]);
    host.site.sync(&replica, &host.disk, &[]).code(4).says(&["have diverged"]);
    let server = host.site.serve(&[&replica], &[]);
    server.client("copy").write(0, &[1; 4096]).expect("a write");
    server.stop();
    let back = summary(host.site.sync(&replica, &host.disk, &["--discard-there"]));
    assert_eq!((&back["method"], number(&back, "blocks_changed")), (&"tracked".into(), 1));
    image::assert_equal(&replica, &host.disk);
    // And back, to the path that was the source before.
    host.site.dsync(["demote"]).arg(&replica).arg(&host.disk).ok();
    host.run(&["promote"]).ok();
    assert_eq!(summary(host.site.sync(&host.disk, &replica, &[]))["method"], "tracked");
}

/// A mirror had brought the replica ahead of its last epoch: that is what it goes on with.
#[test]
fn a_replica_that_batches_brought_ahead_is_promoted_as_it_is() {
    let mut random = Random::new("batches");
    let (near, far) = pair(16 * MIB, &mut random);
    let server = near.site.serve(&[&near.disk], &[]);
    let mut mirror = near.towards(&far, &["mirror", "--json", "-v", "--epoch", "1h"]).start();
    let mut client = server.client("vm");
    let deadline = Instant::now() + Duration::from_secs(60);
    // What is written before the first batch may be of the first copy.
    let (mut block, mut since) = (0, 0);
    while since < 20 {
        assert!(Instant::now() < deadline, "no batch: {}", mirror.stdout_so_far());
        since += u64::from(mirror.stdout_so_far().contains("\"batch\""));
        client.write(block * 3 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        block = (block + 1) % 1000;
        std::thread::sleep(Duration::from_millis(10));
    }
    // All of it has arrived.
    let same = || image::first_difference(&near.disk, &far.disk).is_none();
    client.flush().expect("a flush");
    while !same() {
        assert!(Instant::now() < deadline, "the mirror does not catch up");
        std::thread::sleep(Duration::from_millis(50));
    }
    mirror.kill();
    drop(client);
    server.kill();
    through(&mut random, 1, || far.run(&["promote", "--force", "-n"]), |_| false);
    let promoted = summary(far.run(&["promote", "--force", "--json"]));
    let ahead = number(&promoted, "bytes_ahead") / BLOCK;
    assert!(ahead >= 15, "{promoted}");
    equal(&near, &far);
    far.write([4000], &mut random);
    let back = summary(far.sync(&near, &["--discard-there"]));
    assert_eq!(back["method"], "tracked");
    // Each block of the batches was written to both.
    assert!(
        (ahead + 1..=block + ahead + 1).contains(&number(&back, "blocks_changed")),
        "{ahead} ahead: {back}"
    );
    equal(&near, &far);
}

/// Brings a replica ahead of its epoch by a mirror, which is killed, and its source with it.
fn bring_ahead(source: &Host, replica: &Host, random: &mut Random) {
    let server = source.site.serve(&[&source.disk], &[]);
    let options = ["mirror", "--json", "-v", "--epoch", "1h", "--keep-last", "20"];
    let mut mirror = source.towards(replica, &options).start();
    mirror.wait_to_say("mirroring to");
    let mut client = server.client("vm");
    for block in 0..20 {
        client.write(block * 3 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
    }
    client.flush().expect("a flush");
    let deadline = Instant::now() + Duration::from_secs(60);
    while image::first_difference(&source.disk, &replica.disk).is_some() {
        assert!(Instant::now() < deadline, "the mirror does not catch up");
        std::thread::sleep(Duration::from_millis(50));
    }
    mirror.kill();
    drop(client);
    server.kill();
    through(random, 1, || replica.run(&["recover"]), |_| false);
}

/// What a mirror brought to a replica may be nowhere else: it is not overwritten because another replica took over.
#[test]
fn what_only_a_mirror_brought_is_not_overwritten() {
    let mut random = Random::new("a mirror ahead of who takes over");
    let (a, b) = pair(8 * MIB, &mut random);
    let c = Host::new();
    let epoch = number(&a.sync(&c, &["--keep-last", "20"]).ok().summary(), "epoch").to_string();
    bring_ahead(&a, &c, &mut random);
    let last = c.copy("last.raw");
    b.force();
    b.write([100], &mut random);
    let rewind = format!("dsync rewind {} --to {epoch}", c.disk.display());
    let words = ["has diverged", &format!("ahead of epoch {epoch} (80.0 KiB"), &rewind, "--discard-there"];
    for command in [&["sync"][..], &["sync", "--method", "compare"], &["verify", "--repair"], &["demote"]] {
        refused([&b, &c], b.towards(&c, command), &words);
    }
    // Either way out leaves it as a moment, where moments are kept.
    let moment = format!("--to {epoch}+");
    c.run(&["rewind", "--to", &epoch]).ok();
    assert_eq!(summary(b.sync(&c, &[]))["method"], "tracked");
    equal(&b, &c);
    for _ in 0..2 {
        tells(&c.run(&["rewind"]).ok(), &[&moment]);
        c.run(&["rewind", "--to", &format!("{epoch}+")]).ok();
        image::assert_equal(&last, &c.disk);
        refused([&b, &c], b.towards(&c, &["sync"]), &words[..1]);
        b.sync(&c, &["--discard-there"]).ok();
        equal(&b, &c);
        b.write([200], &mut random);
        assert_eq!(summary(b.sync(&c, &[]))["method"], "tracked");
    }
    // It can take over from there.
    c.run(&["rewind", "--to", &format!("{epoch}+")]).ok();
    c.force();
    image::assert_equal(&last, &c.disk);
}

/// After a planned switch all of it is in the new source as well.
#[test]
fn what_a_mirror_brought_before_a_planned_switch_is_gone_on_from() {
    let mut random = Random::new("a mirror before a planned switch");
    let (a, b) = pair(8 * MIB, &mut random);
    let c = Host::new();
    a.sync(&c, &[]).ok();
    bring_ahead(&a, &c, &mut random);
    switch(&a, &b);
    b.write([100], &mut random);
    assert_eq!(summary(b.sync(&c, &[]))["method"], "tracked");
    equal(&b, &c);
    assert_eq!(summary(b.sync(&a, &[]))["method"], "tracked");
    // A switch that is taken back gives up nothing of it either.
    bring_ahead(&b, &c, &mut random);
    b.towards(&a, &["demote"]).ok();
    b.run(&["promote", "--force"]).ok();
    b.write([200], &mut random);
    assert_eq!(summary(b.sync(&c, &[]))["method"], "tracked");
    equal(&b, &c);
}

/// The record of a device is trusted across a stop where the user says so; without that, all of it is compared.
#[test]
fn a_replica_on_a_device_is_promoted() {
    let what = "a promoted replica on a device";
    if !need_root(what) {
        return;
    }
    let same = |a: &Host, b: &Host| {
        let read = |host: &Host| std::fs::read(&host.disk).expect("a disk");
        assert!(read(a) == read(b), "the disks differ");
    };
    let mut random = Random::new(what);
    let near = Host::with_disk(16 * MIB, &mut random);
    let mut far = Host::new();
    let file = far.site.image("device.img", 16 * MIB);
    let Some(device) = Loop::new(&file) else { return skipped(what, "there is no loop device") };
    far.disk = device.device().to_path_buf();
    let name = far.disk.file_name().expect("a name").to_string_lossy().into_owned();
    near.sync(&far, &[]).ok();
    near.towards(&far, &["demote"]).ok();
    far.run(&["promote"]).ok();
    let server = far.site.serve(&[&far.disk], &["--trust-device"]);
    server.client(&name).write(0, &[7; 8192]).expect("a write");
    server.stop();
    let back = summary(far.sync(&near, &["--trust-device"]));
    assert_eq!((&back["method"], number(&back, "blocks_changed")), (&"tracked".into(), 2));
    same(&near, &far);
    far.towards(&near, &["demote", "--trust-device"]).ok();
    near.run(&["promote"]).ok();
    near.write([77], &mut random);
    assert_eq!(number(&summary(near.sync(&far, &[])), "blocks_changed"), 1);
    same(&near, &far);
    // Another program writes while nothing counts for dsync.
    far.run(&["promote", "--force"]).ok();
    image::scribble(&far.disk, 3 * MIB, 4096, &mut random);
    assert_eq!(summary(far.sync(&near, &["--discard-there"]))["method"], "compare");
    same(&near, &far);
}

/// A planned switch that was begun without its replica is gone on with, and loses nothing.
#[test]
fn a_switch_that_was_begun_without_its_replica_is_told_the_way_that_loses_nothing() {
    let mut random = Random::new("a switch begun without its replica");
    let (near, far) = pair(4 * MIB, &mut random);
    near.write([3], &mut random);
    near.run(&["demote"]).ok();
    let back = format!("\"dsync promote --force {}\" makes this the source again", near.disk.display());
    near.towards(&far, &["demote"]).code(4).says(&["is not at epoch", &back, "loses nothing"]);
    near.run(&["promote", "--force"]).ok();
    switch(&near, &far);
    equal(&near, &far);
}

/// Nothing takes the mark of a promotion back, so one that cannot be completed is refused before it.
#[test]
fn a_second_promotion_on_a_host_leaves_the_replica_as_it_was() {
    let mut random = Random::new("a second promotion");
    let host = Host::with_disk(4 * MIB, &mut random);
    let [one, other] = ["one.raw", "other.raw"].map(|name| host.site.path(name));
    let sync = |from: &Path, to: &Path| host.site.sync(from, to, &["--keep-last", "5"]).ok();
    let on = |what: &str, path: &Path, options: &[&str]| host.site.dsync([what]).arg(path).args(options);
    let moments = || on("rewind", &other, &["--json"]).ok().summary()["moments"].as_array().map(Vec::len);
    for block in [1, 2] {
        host.write([block], &mut random);
        sync(&host.disk, &one);
        sync(&host.disk, &other);
    }
    on("promote", &one, &["--force"]).ok();
    on("promote", &other, &["-n", "--force"]).code(4).says(&["is already the source"]);
    on("promote", &other, &["--force"]).code(4).says(&["is already the source"]);
    assert_eq!(moments(), Some(1));
    sync(&one, &other);
    // One that was marked, with a state directory that is gone, is told the way out.
    let elsewhere = host.site.path("elsewhere");
    on("forget", &other, &[]).ok();
    host.site.sync(&host.disk, &other, &["--adopt"]).ok();
    on("promote", &other, &["--force", "--state-dir", elsewhere.to_str().expect("UTF-8")]).ok();
    std::fs::remove_dir_all(&elsewhere).expect("a state directory");
    let way = format!("\"dsync forget {}\"", other.display());
    on("promote", &other, &[]).code(4).says(&["cannot be completed", &way]);
    on("forget", &other, &[]).ok();
    sync_adopting(&host, &one, &other);
}

fn sync_adopting(host: &Host, from: &Path, to: &Path) {
    host.site.sync(from, to, &["--adopt"]).ok();
    image::assert_equal(from, to);
}

/// The folder beside a promoted disk is put back from a backup that was made before: each command says so, and one ends it.
#[test]
fn a_promoted_disk_whose_folder_was_put_back_stays_the_source() {
    let mut random = Random::new("a folder put back");
    let (near, far) = pair(4 * MIB, &mut random);
    let folder = far.disk.with_file_name(".vm.raw.dsync");
    let backup = far.site.path("backup");
    let copy = |from: &Path, to: &Path| {
        let _ = std::fs::remove_dir_all(to);
        Run::new("cp").arg("-a").args([from, to]).ok();
    };
    // Once while it was only a replica, and once with what a demotion wrote.
    for round in 0..2 {
        copy(&folder, &backup);
        near.write([3], &mut random);
        near.sync(&far, &[]).ok();
        far.run(&["promote", "--force"]).ok();
        far.write([900, 901], &mut random);
        copy(&backup, &folder);
        let way = format!("\"dsync forget --replica {}\"", far.disk.display());
        for command in [
            &["demote"][..],
            &["promote"],
            &["promote", "--force"],
            &["serve", "--socket", "s"],
            &["checkpoint"],
        ] {
            let name = if command == ["checkpoint"] { &["nightly"][..] } else { &[] };
            far.run(command).args(name).code(4).says(&["its folder of state is of before that", &way]);
        }
        near.sync(&far, &[]).code(4);
        far.run(&["forget", "--replica"]).ok();
        // Nothing of what it was as the source is lost.
        near.sync(&far, &[]).code(4).says(&["have diverged"]);
        let back = far.sync(&near, &["--discard-there"]).ok().summary();
        assert_eq!(back["method"], "tracked", "{round}: {back}");
        equal(&near, &far);
        far.towards(&near, &["demote"]).ok();
        near.run(&["promote"]).ok();
    }
}

/// A copy that was made of a replica is in nobody's way when the replica is needed: of a restore, or of a disk that is carried away.
#[test]
fn a_replica_that_was_copied_onward_takes_over() {
    let mut random = Random::new("copied onward");
    let (near, far) = pair(4 * MIB, &mut random);
    let carried = far.site.path("usb.raw");
    for block in [5, 900] {
        far.site.sync(&far.disk, &carried, &[]).ok();
        image::assert_equal(&far.disk, &carried);
        near.write([block], &mut random);
        near.sync(&far, &[]).ok();
    }
    let told = format!("copies were made of it while it was a replica ({}): the next", carried.display());
    for options in [&["promote", "-n", "--force"][..], &["promote", "--force"]] {
        assert!(far.run(options).ok().text().contains(&told));
    }
    equal(&near, &far);
    // It is one source, of which both are replicas, each with what it takes.
    assert_eq!(far.run(&["status", "--json", "-v"]).ok().text().matches("\"kind\":\"source\"").count(), 1);
    far.write([7], &mut random);
    far.site.sync(&far.disk, &carried, &[]).code(4).says(&["--adopt"]);
    sync_adopting(&far, &far.disk, &carried);
    far.sync(&near, &["--discard-there"]).ok();
    equal(&near, &far);
}

/// A switch to the replica and back restores a disk by differences, and later needs no consent but for a replica that has more.
#[test]
fn a_switch_there_and_back_restores_a_disk() {
    for spoiled in ["by its guest", "by another program", "gone"] {
        let mut random = Random::new(spoiled);
        let (near, far) = pair(4 * MIB, &mut random);
        let [older, newer] = [Host::new(), Host::new()];
        near.sync(&older, &[]).ok();
        near.write([1, 2], &mut random);
        near.sync(&far, &[]).ok();
        near.write([3], &mut random);
        near.sync(&newer, &[]).ok();
        match spoiled {
            "by its guest" => near.write([4, 5], &mut random),
            "by another program" => image::scribble(&near.disk, 2 * MIB, 8192, &mut random),
            _ => std::fs::remove_file(&near.disk).expect("the disk"),
        }
        far.run(&["promote", "--force"]).ok();
        let consent: &[&str] =
            if spoiled == "gone" { &["--discard-there", "--create"] } else { &["--discard-there"] };
        let restored = summary(far.sync(&near, consent));
        equal(&near, &far);
        let (method, blocks) = match spoiled {
            "by its guest" => ("tracked", 3),
            "by another program" => ("compare", 3),
            _ => ("copy", 4 * MIB / BLOCK / 8),
        };
        assert_eq!((&restored["method"], number(&restored, "blocks_changed")), (&method.into(), blocks));
        switch(&far, &near);
        near.write([6], &mut random);
        let next = summary(near.sync(&far, &[]));
        assert_eq!((&next["method"], number(&next, "blocks_changed")), (&"tracked".into(), 1));
        near.sync(&older, &[]).ok();
        equal(&near, &older);
        near.sync(&newer, &[]).code(4).says(&["has diverged", "--discard-there"]);
    }
}

/// The file system of the old source is not mounted: what is in its place is no new replica.
#[test]
fn a_way_back_to_a_source_that_is_away_is_refused() {
    let mut random = Random::new("a source that is away");
    let (near, far) = pair(4 * MIB, &mut random);
    near.write([3], &mut random);
    far.force();
    far.write([5], &mut random);
    let away = near.site.path("away.raw");
    std::fs::rename(&near.disk, &away).expect("a file");
    far.sync(&near, &[]).output().says(&["is a source of its host", "is missing there", "--create"]);
    assert!(!near.disk.exists());
    // Gone for good.
    far.sync(&near, &["--create"]).ok();
    image::assert_equal(&near.disk, &far.disk);
}

/// What a disk is as a source of its own is not given up by the way.
#[test]
fn a_disk_that_was_restored_is_not_promoted_over_the_source_that_it_is() {
    let mut random = Random::new("a restored disk");
    let host = Host::with_disk(4 * MIB, &mut random);
    let replica = host.site.path("replica.raw");
    host.site.sync(&host.disk, &replica, &[]).ok();
    host.site.dsync(["checkpoint"]).arg(&host.disk).arg("nightly").ok();
    sync_adopting(&host, &replica, &host.disk);
    for options in [&["promote", "-n", "--force"][..], &["promote", "--force"]] {
        host.run(options).code(4).says(&["is a source itself", "dsync forget --replica"]);
    }
    assert!(host.run(&["status", "-v"]).ok().text().contains("nightly"));
    host.run(&["forget", "--replica"]).ok();
    host.site.sync(&host.disk, &replica, &["--adopt"]).code(4).says(&["--accept-source"]);
    host.site.sync(&host.disk, &replica, &["--accept-source"]).ok();
}

#[test]
fn a_disk_that_was_served_and_restored_is_not_promoted_over_the_source_that_it_is() {
    let mut random = Random::new("a restored disk that was served");
    let host = Host::with_disk(4 * MIB, &mut random);
    let replica = host.site.path("replica.raw");
    host.site.serve(&[&host.disk], &[]).stop();
    host.site.sync(&host.disk, &replica, &[]).ok();
    sync_adopting(&host, &replica, &host.disk);
    host.run(&["promote", "--force"]).code(4).says(&["is a source itself", "dsync forget --replica"]);
}

/// The service that received a replica has a state directory of its own: a promotion with another one is told from one that was interrupted.
#[test]
fn a_disk_is_the_source_with_one_state_directory() {
    let mut random = Random::new("two state directories");
    let (_near, far) = pair(4 * MIB, &mut random);
    let elsewhere = far.site.path("elsewhere");
    let state = elsewhere.to_str().expect("UTF-8");
    far.run(&["promote", "--force", "--state-dir", state]).ok();
    assert_eq!(far.site.dsync(["status", "--check"]).ok().text(), "OK\n");
    let status = far.site.dsync(["status", "-v"]).ok().text();
    assert!(
        status.contains(&format!("is the source itself now, with the state directory {state}")),
        "{status}"
    );
    far.run(&["status", "-v"]).ok();
    let there = format!("pass --state-dir {state}");
    for options in
        [&["promote", "-n"][..], &["promote"], &["promote", "--force"], &["serve", "--socket", "s"]]
    {
        far.run(options).code(4).says(&["is the source already (term 2)", &there]);
    }
    far.run(&["promote", "--state-dir", state]).code(4).says(&["is a source already"]);
    // If that is lost, the source is made anew.
    std::fs::remove_dir_all(&elsewhere).expect("a state directory");
    let told = far.site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("or it was made with another state directory"), "{told}");
    far.run(&["promote"]).ok();
    assert_eq!(
        far.site.dsync(["status", "--check", &far.disk.display().to_string()]).output().status.code(),
        Some(0)
    );
}

/// The user of a receiver reads what root has promoted: the old source is told that the two have diverged.
#[test]
fn what_root_promotes_stays_with_the_user_of_its_receiver() {
    if !need_root("a state of another user") {
        return;
    }
    let mut random = Random::new("another user's replica");
    let (_near, far) = pair(4 * MIB, &mut random);
    let folder = far.disk.with_file_name(".vm.raw.dsync");
    let all = || std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("a file").path());
    let nobody = Some(65534);
    all()
        .chain([folder.clone()])
        .for_each(|path| std::os::unix::fs::chown(path, nobody, nobody).expect("root"));
    far.run(&["promote", "--force"]).ok();
    for path in all() {
        assert_eq!(std::fs::metadata(&path).expect("a file").uid(), 65534, "{}", path.display());
    }
}

/// A device whose user says nothing of it is compared, and then switched. What only looks, or is refused, leaves the record to a command that is
/// told that it holds: it is all that says what was not sent.
#[test]
fn a_device_that_nothing_is_said_of_is_switched_and_keeps_its_record() {
    let what = "a switch of a device that is not trusted";
    if !need_root(what) {
        return;
    }
    let mut random = Random::new(what);
    let (mut near, far) = (Host::new(), Host::new());
    let file = near.site.image("device.img", 16 * MIB);
    image::scribble(&file, 0, 4 * MIB, &mut random);
    let Some(device) = Loop::new(&file) else { return skipped(what, "there is no loop device") };
    near.disk = device.device().to_path_buf();
    let name = near.disk.file_name().expect("a name").to_string_lossy().into_owned();
    near.sync(&far, &[]).ok();
    let server = near.site.serve(&[&near.disk], &["--trust-device"]);
    near.sync(&far, &[]).ok();
    server.client(&name).write(0, &[7; 8192]).expect("a write");
    server.stop();
    // Each of them is without a word of the device.
    near.sync(&far, &["-n"]).ok();
    near.run(&["demote", "-n"]).ok();
    far.force();
    let lost = near.site.path("lost.delta");
    let save = ["--save-there", lost.to_str().expect("UTF-8")];
    let way = format!("dsync demote --trust-device {}", near.disk.display());
    far.sync(&near, &save).code(4).says(&["cannot be saved as a delta", &way]);
    // As it says.
    near.run(&["demote", "-n", "--trust-device"]).ok();
    near.run(&["demote", "--trust-device"]).ok();
    let given_up = summary(far.sync(&near, &save))["given_up"].clone();
    assert_eq!(number(&given_up, "bytes"), 8192, "{given_up}");
    assert!(lost.exists());
    far.towards(&near, &["demote"]).ok();
    near.run(&["promote"]).ok();
    near.towards(&far, &["demote"]).ok();
    far.run(&["promote"]).ok();
    assert!(std::fs::read(&near.disk).expect("a disk") == std::fs::read(&far.disk).expect("a disk"));
}

/// What says that a replica was promoted is lost, with its folder restored from before: what was written to it since is not repaired away.
#[test]
fn a_repair_overwrites_no_promoted_disk() {
    let mut random = Random::new("a repair of a promoted disk");
    let (near, far) = (Host::with_disk(MIB, &mut random), Host::new());
    near.sync(&far, &[]).ok();
    let (folder, kept) = (far.disk.with_file_name(".vm.raw.dsync"), far.site.path("kept"));
    Run::new("cp").arg("-a").args([&folder, &kept]).ok();
    far.force();
    far.write([1], &mut random);
    far.run(&["checkpoint"]).ok();
    std::fs::remove_dir_all(&folder).expect("a folder");
    std::fs::rename(&kept, &folder).expect("a folder");
    let written = image::fingerprint(&far.disk);
    for command in [&["verify", "--repair"][..], &["sync", "--adopt"]] {
        near.towards(&far, command).code(4).says(&["is a source itself (term 2)"]);
    }
    assert_eq!(written, image::fingerprint(&far.disk));
}

/// Nothing in a promotion is proportional to the disk.
#[test]
fn a_large_replica_is_promoted_in_less_than_a_second() {
    let near = Host::new();
    image::sparse(&near.disk, 1 << 40);
    let mut random = Random::new("a large replica");
    image::scribble(&near.disk, 5 << 30, MIB, &mut random);
    let far = Host::new();
    let synced = near.sync(&far, &[]).output();
    if !synced.status.success() {
        return beyond("a replica of 1 TiB", &format!("this file system cannot hold it: {}", synced.stderr));
    }
    let promoted = far.run(&["promote", "--force"]).ok();
    say(&format!("promotion of a sparse replica of 1 TiB: {} ms", promoted.time.as_millis()));
    assert!(promoted.time < Duration::from_secs(1), "{:?}", promoted.time);
    let demoted = near.run(&["demote"]).ok();
    say(&format!("demotion of its source: {} ms", demoted.time.as_millis()));
    assert!(demoted.time < Duration::from_secs(2), "{:?}", demoted.time);
}

/// The disk moves between two hosts, and is written to in between by several clients at once.
#[test]
fn roles_are_swapped_under_load() {
    let mut random = Random::new("swaps under load");
    let hosts = pair(32 * MIB, &mut random);
    let (mut here, mut there) = (&hosts.0, &hosts.1);
    let options = Options { connections: 2, depth: 8, ..Options::default() };
    for round in 0..rounds(8, 25) {
        let server = here.site.serve(&[&here.disk], &[]);
        let load = Load::start(&server.address(), "vm", &options, &mut random);
        load.wait_for(100);
        if random.coin() {
            here.sync(there, &[]).ok();
            load.wait_for(50);
        }
        let written = load.stop();
        let _ = if random.one_in(4) { server.kill() } else { server.stop() };
        switch(here, there);
        equal(here, there);
        written.check(&there.disk);
        (here, there) = (there, here);
        assert_eq!(number(&summary(here.run(&["status", "--json"])), "term"), round + 2);
    }
}

/// Everything at one site is killed at any moment, under load and a mirror; the other goes on from one moment of it. What comes back takes
/// what either side wrote, and no more.
#[test]
fn sites_are_lost_under_load() {
    let mut random = Random::new("sites lost under load");
    let hosts = pair(32 * MIB, &mut random);
    let (mut here, mut there) = (&hosts.0, &hosts.1);
    let mut next = None;
    for round in 0..rounds(6, 150) {
        let server = here.site.serve(&[&here.disk], &[]);
        let mut mirror = here.towards(there, &["mirror", "--json", "--epoch", "300ms"]).start();
        let load = Records::start(&server.address(), "vm", next, 300);
        if !random.one_in(3) {
            mirror.wait_to_say("mirroring to");
        }
        std::thread::sleep(Duration::from_millis(random.below(700)));
        if random.coin() {
            mirror.kill();
        }
        server.kill();
        mirror.kill();
        let written = load.stop();
        let since = number(&there.force(), "epoch").to_string();
        let found = records::check(&there.disk, &format!("round {round}"));
        assert!(found <= written, "{found:?} of {written:?}");
        next = Some(found.map(|last| last + 1));
        // Apart from the records.
        let theirs: BTreeSet<u64> = (0..random.below(300)).map(|_| random.within(2000..8192)).collect();
        there.write(theirs.iter().copied(), &mut random);
        // The last batch of an epoch counts as one of the next, too.
        let either = here.changed(&since).union(&there.changed(&since)).count() as u64;
        let back = summary(there.sync(here, &["--discard-there"]));
        assert_eq!((&back["method"], number(&back, "blocks_changed")), (&"tracked".into(), either), "{back}");
        // A few messages are exchanged however little there is.
        assert!(number(&back, "bytes_sent") * 100 <= either * BLOCK * 105 + 800_000, "{back}");
        equal(here, there);
        (here, there) = (there, here);
    }
}

/// Whoever rehearses leaves no trace: a promotion does not wait for the rehearsal, and takes nothing of it.
#[test]
fn a_rehearsal_is_given_up_for_a_promotion() {
    let mut random = Random::new("a rehearsal, then a promotion");
    let (near, far) = pair(16 * MIB, &mut random);
    let (mut here, mut there) = (&near, &far);
    for still_running in [false, true] {
        let moment = PathBuf::from(format!("{}@now", there.disk.display()));
        let rehearsal = there.site.serve(&[&moment], &["--writable"]);
        let mut client = rehearsal.client("vm");
        for block in 0..300 {
            client.write(block * 7 * BLOCK, &random.bytes(BLOCK as usize)).expect("a write");
        }
        client.flush().expect("a flush");
        here.write([1, 2, 3], &mut random);
        if !still_running {
            client.close().expect("the end");
            rehearsal.stop();
            switch(here, there);
        } else {
            switch(here, there);
            assert!(client.read(16 * BLOCK, BLOCK as u32).is_err(), "it reads on from what is a source now");
        }
        equal(here, there);
        there.write([5], &mut random);
        assert_eq!(number(&summary(there.sync(here, &[])), "blocks_changed"), 1);
        (here, there) = (there, here);
    }
}

/// What is met at night. Each refusal leaves everything as it was, and names the way out that loses nothing before any other.
#[test]
fn every_refusal_leads_out() {
    let mut random = Random::new("refusals at night");
    let (near, far) = pair(8 * MIB, &mut random);
    near.write([1], &mut random);
    // Nobody has promoted the replica.
    let both = [
        "is a replica itself",
        "\n  - to bring it up to date, exchange SRC and DST\n",
        "run \"dsync promote /",
        "not a dsync replica but a source itself",
        "--adopt",
    ];
    refused([&far, &near], far.sync(&near, &[]), &both);
    // The wrong host, and the wrong side.
    refused(
        [&near, &far],
        near.run(&["promote"]),
        &["is a source already", "Its replica is promoted where that is"],
    );
    let there = format!("far:{}", far.disk.display());
    near.site.dsync(["promote", &there]).code(2).says(&[
        "is on another host",
        "run \"dsync promote /",
        "\" on far",
    ]);
    refused(
        [&far, &near],
        far.towards(&near, &["demote"]),
        &["is a replica, and not the source", "dsync promote"],
    );
    // A mirror is under way.
    let server = near.site.serve(&[&near.disk], &[]);
    let mut mirror = near.towards(&far, &["mirror", "--json"]).start();
    mirror.wait_to_say("mirroring to");
    let busy = far.run(&["promote", "--force"]).code(6);
    busy.says(&["stop that where its source is", "what it has committed stays", "in use"]);
    mirror.kill();
    server.stop();
    // The switch was begun, and its last word given. The mirror's other end may still be about to end.
    near.towards(&far, &["demote", "--wait"]).ok();
    refused(
        [&near, &far],
        near.run(&["promote"]),
        &["was told that it can take over", &there, "sync from there"],
    );
    let other = Host::new();
    let told = near.towards(&other, &["demote"]).code(4);
    told.says(&["was not told so", "give the replica of the last sync, which was far:"]);
    assert!(!told.stderr.contains("again"), "{told}");
    let unpromoted =
        refused([&far, &near], far.sync(&near, &[]), &["is a replica itself", "copy of another source"]);
    assert!(
        unpromoted.stderr.contains("\"dsync promote /"),
        "it can be promoted without force: {unpromoted}"
    );
    far.run(&["promote"]).ok();
    // A demotion without a successor is taken back.
    let (near, far) = pair(8 * MIB, &mut random);
    near.run(&["demote"]).ok();
    refused(
        [&near, &far],
        near.run(&["promote"]),
        &["it is the former source", "promote --force", "loses nothing"],
    );
    tells(&near.run(&["promote", "--force"]).ok(), &["nothing that was written to it is lost"]);
    // The command for the old source's return is whole.
    let way = format!("dsync sync {} SRC --save-there FILE", far.disk.display());
    tells(&far.run(&["promote", "--force", "-n"]).ok(), &[&way]);
    // A replica that somebody has written to, whose source is gone.
    image::scribble(&far.disk, 4 * MIB, 4096, &mut random);
    refused([&far, &near], far.run(&["promote", "--force"]), &["modified outside dsync", "dsync forget"]);
}

/// A demoted disk that nobody has taken over from was touched: it is led back, and not to a repair from a source that is not there.
#[test]
fn a_former_source_that_was_touched_is_led_out() {
    let mut random = Random::new("a former source that was touched");
    let (near, far) = pair(8 * MIB, &mut random);
    near.run(&["demote"]).ok();
    refused([&near, &far], near.towards(&far, &["mirror"]), &["was demoted on", "dsync promote"]);
    // As "cp -a" brings it back.
    let (copy, known) = (near.site.path("copied.raw"), std::fs::metadata(&near.disk).expect("the disk"));
    image::copy(&near.disk, &copy);
    let copied = std::fs::File::options().write(true).open(&copy).expect("the copy");
    copied.set_modified(known.modified().expect("a time")).expect("its time");
    std::fs::rename(&copy, &near.disk).expect("a restore");
    let accept = format!("dsync recover --accept {}", near.disk.display());
    let words = ["was the source until it was demoted", "dsync forget", "sync --adopt", &accept];
    refused([&near, &far], near.run(&["promote", "--force"]), &words);
    tells(&near.run(&["recover", "--accept"]).ok(), &["is taken for what it was"]);
    near.run(&["promote", "--force"]).ok();
    near.write([3, 4], &mut random);
    assert_eq!(summary(near.sync(&far, &[]))["method"], "tracked");
    equal(&near, &far);

    // What was written to it is in no record.
    near.run(&["demote"]).ok();
    image::scribble(&near.disk, 4 * MIB, 4096, &mut random);
    let out = near.run(&["promote", "--force"]).code(4);
    assert!(out.stderr.contains("was the source until") && !out.stderr.contains("--accept"), "{out}");
    near.run(&["recover", "--accept"]).code(4).says(&["cannot be taken for what it was", "content written"]);
    near.run(&["forget"]).ok();
    near.sync(&far, &["--adopt"]).ok();
    equal(&near, &far);
    // Who took over overwrites it, where its user says so.
    near.run(&["demote"]).ok();
    far.run(&["promote", "--force"]).ok();
    image::scribble(&near.disk, 2 * MIB, 4096, &mut random);
    far.sync(&near, &[]).code(4).says(&["If another disk was promoted in its place"]);
    far.sync(&near, &["--adopt"]).ok();
    equal(&near, &far);
}

/// What another program wrote to one of two sources is in no record: the command that gives it up is one that is not refused.
#[test]
fn what_others_wrote_to_one_of_two_sources_is_not_said_to_be_saved() {
    let mut random = Random::new("two sources and another program");
    let (near, far) = pair(8 * MIB, &mut random);
    far.run(&["promote", "--force"]).ok();
    far.write([1], &mut random);
    image::scribble(&near.disk, MIB, 4096, &mut random);
    let words = ["copy", "cannot be saved as a delta", "dsync sync --discard-there"];
    let both_say_so = || {
        refused([&far, &near], far.sync(&near, &[]), &words);
        refused([&far, &near], near.sync(&far, &[]), &words);
    };
    both_say_so();
    // Once that was compared for a third disk, it is a gap in the history of a disk of which nothing is doubted now.
    near.sync(&Host::new(), &[]).ok();
    both_say_so();
    let dry = summary(far.sync(&near, &["--discard-there", "-n"]));
    assert_eq!((&dry["method"], &dry["given_up"]["bytes"]), (&"compare".into(), &serde_json::Value::Null));
    far.sync(&near, &["--discard-there"]).ok();
    equal(&near, &far);
}

/// A promotion was taken back and is made again: what its old source wrote meanwhile is given up as it was then, and named.
#[test]
fn a_promotion_that_is_made_again_names_what_it_gives_up() {
    let mut random = Random::new("a promotion that is made again");
    let (near, far) = pair(8 * MIB, &mut random);
    let epoch = epoch_of(&far);
    far.run(&["promote", "--force"]).ok();
    far.run(&["demote"]).ok();
    near.write([3, 4], &mut random);
    let lost = format!("what its old source wrote after epoch {epoch} is given up");
    far.run(&["promote"]).code(4).says(&[&lost]);
    tells(&far.run(&["promote", "--force"]).ok(), &[&lost, "SRC --save-there FILE"]);
    // It is one, however it is opened since.
    far.write([5], &mut random);
    refused([&far, &near], far.run(&["promote", "--force"]), &["is a source already"]);
}

/// Where there is no room, a source stays the source until there is.
#[test]
fn a_demotion_without_room_says_what_it_left() {
    let what = "a demotion on full file systems";
    if !need_root(what) {
        return;
    }
    let mut random = Random::new(what);
    let (near, far) = pair(8 * MIB, &mut random);
    near.write(0..40, &mut random);
    let small = near.site.path("small");
    let Some(mounted) = mount::small(&small, "64k", what) else { return };
    let saved = small.join("lost.delta");
    far.run(&["promote", "--force"]).ok();
    let full = far.sync(&near, &["--save-there", saved.to_str().expect("a path")]).code(1);
    full.says(&["lost.delta", "No space left"]);
    assert!(std::fs::read_dir(&small).expect("a folder").next().is_none(), "half a delta is left");
    drop(mounted);
    // It is the source that it was.
    near.write([1], &mut random);
    let saved = near.new_file();
    far.sync(&near, &["--save-there", saved.to_str().expect("a path")]).ok();
    equal(&near, &far);
}

/// The old site is gone for good. A new one takes its place, and then the source.
#[test]
fn a_failback_goes_to_a_new_and_empty_site() {
    let mut random = Random::new("a new site");
    let (near, far) = pair(16 * MIB, &mut random);
    near.write([1, 2], &mut random);
    drop(near);
    far.run(&["promote", "--force"]).ok();
    far.write([3], &mut random);
    let new = Host::new();
    // Only a replica that is there is told that it can take over: a mistyped name is no new one.
    let refused = far.towards(&new, &["demote"]).code(4);
    refused.says(&["there is no replica of", "dsync status", "dsync sync"]);
    assert!(!new.disk.exists() && far.site.serve(&[&far.disk], &[]).stop().status.success());
    assert_eq!(summary(far.sync(&new, &[]))["method"], "copy");
    far.write([4], &mut random);
    switch(&far, &new);
    equal(&far, &new);
    new.write([5, 6], &mut random);
    let back = summary(new.sync(&far, &[]));
    assert_eq!((&back["method"], number(&back, "blocks_changed")), (&"tracked".into(), 2));
    equal(&far, &new);
}

/// Runs a command, which may be killed, until it ends well; it may have to be said differently the next time.
fn through(
    random: &mut Random,
    limit: u64,
    command: impl Fn() -> Run,
    done: impl Fn(&Output) -> bool,
) -> u32 {
    let mut kills = 0;
    for _ in 0..random.below(3) {
        let mut process = command().start();
        std::thread::sleep(Duration::from_micros(random.below(limit)));
        kills += u32::from(process.ended().is_none());
        process.kill();
    }
    // What was killed is let go of a moment later.
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let output = command().output();
        if output.status.success() || done(&output) {
            return kills;
        }
        assert!(output.status.code() == Some(6) && Instant::now() < until, "{output}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Where the state of a promoted replica is lost, completing its promotion again does not give what it holds now the epoch that it had
/// then: replicas that are at that one lack what was written since.
#[test]
fn a_promotion_that_is_made_again_has_an_epoch_of_its_own() {
    let mut random = Random::new("a promotion made again");
    let (near, far) = pair(16 * MIB, &mut random);
    far.force();
    far.sync(&near, &["--discard-there"]).ok();
    // Of the history alone another program's word is enough to serve it again.
    std::fs::remove_file(far.state_file("history")).expect("a history");
    far.run(&["promote"]).code(4).says(&["is a source already"]);
    far.write(10..20, &mut random);
    std::fs::rename(far.site.state(), far.site.path("lost")).expect("its state");
    far.site.dsync(["serve"]).arg(&far.disk).args(["--socket", "s"]).code(4).says(&["dsync promote"]);
    assert_eq!(far.run(&["promote", "--json"]).ok().summary()["completed"], true);
    let synced = summary(far.sync(&near, &[]));
    assert_eq!(synced["method"], "compare", "{synced}");
    equal(&near, &far);
}

/// A former source is its epoch in all but what it is unsure of: a part of it is not repaired alone.
#[test]
fn a_range_of_a_former_source_is_not_repaired_alone() {
    let mut random = Random::new("a range of a former source");
    let (near, far) = pair(16 * MIB, &mut random);
    far.force();
    near.write([1, 5], &mut random);
    give_up(&far, &near);
    let repair = || far.towards(&near, &["verify", "--repair"]);
    repair().args(["--range", "4K:4K"]).code(4).says(&["another moment than its epoch", "omit --range"]);
    repair().ok();
    equal(&near, &far);
}

/// Neither a copy that was never to be made nor its failure is told of.
#[test]
fn a_mistyped_replica_of_a_demotion_leaves_no_trace() {
    let mut random = Random::new("a mistyped replica");
    let (near, far) = pair(8 * MIB, &mut random);
    let wrong = far.site.path("wrong.raw");
    let mistyped = || near.run(&["demote"]).arg(&wrong);
    mistyped().code(4).says(&["that could take over"]);
    let told = near.site.dsync(["status", "-v"]).ok().text();
    assert!(!told.contains("wrong.raw"), "{told}");
    // Nor of a sync.
    near.site
        .dsync(["sync", "--method", "tracked"])
        .arg(&near.disk)
        .arg(&wrong)
        .code(4)
        .says(&["no replica at"]);
    let told = near.site.dsync(["status", "-v"]).ok().text();
    assert!(!told.contains("wrong.raw"), "{told}");
    near.towards(&far, &["demote"]).ok();
}

/// Both branches count on from one number: no moment is chosen silently.
#[test]
fn a_number_that_two_branches_share_is_refused() {
    let mut random = Random::new("one number of two branches");
    let (a, b) = pair(16 * MIB, &mut random);
    let r = Host::new();
    let common = number(&a.sync(&r, &["--keep-last", "20"]).ok().summary(), "epoch");
    let mut before = Vec::new();
    for block in 0..8 {
        a.write([block], &mut random);
        let epoch = number(&a.sync(&r, &[]).ok().summary(), "epoch");
        before.push((epoch, r.copy(&format!("{block}.raw"))));
    }
    b.force();
    r.run(&["rewind", "--to", &common.to_string()]).ok();
    for block in 100..105 {
        b.write([block], &mut random);
        b.sync(&r, &[]).ok();
    }
    let present = r.copy("present.raw");
    let listed = r.run(&["rewind", "--json"]).ok().summary();
    let moments = listed["moments"].as_array().expect("moments");
    let epoch =
        |moment: &serde_json::Value| (number(&moment["epoch"], "number"), moment["epoch"]["id"].to_string());
    let (now, id) = epoch(&listed);
    // Of the present state and of an earlier one, and of two earlier ones.
    let earlier = moments.iter().map(epoch).find(|(number, _)| before.iter().any(|(old, _)| old == number));
    for shared in [now, earlier.expect("a number of both").0] {
        let ids = moments.iter().chain([&listed]).map(epoch).filter(|(number, _)| *number == shared);
        let ids: Vec<String> = ids.map(|(_, id)| id.trim_matches('"').to_owned()).collect();
        assert_eq!(ids.len(), 2, "{listed}");
        let way = "by its id or its time";
        refused([&r, &a], r.run(&["rewind", "--to", &shared.to_string()]), &[&ids[0], &ids[1], way]);
        tells(&r.run(&["rewind"]).ok(), &[&format!("(--to {})", ids[0])]);
    }
    r.run(&["rewind", "--to", id.trim_matches('"')]).ok();
    image::assert_equal(&present, &r.disk);
    let (_, id) = moments.iter().map(epoch).find(|(number, _)| *number == now).expect("a moment");
    r.run(&["rewind", "--to", id.trim_matches('"')]).ok();
    let (_, then) = before.iter().find(|(epoch, _)| *epoch == now).expect("an epoch of both");
    image::assert_equal(then, &r.disk);
    r.run(&["rewind", "--to", "00000000-0000-0000-0000-000000000000"]).code(4).says(&["no moment with id"]);
}

/// A moment of another branch does not become one of the branch that the replica follows.
#[test]
fn a_moment_of_another_branch_stays_one() {
    let mut random = Random::new("moments of two branches");
    let (a, b) = pair(16 * MIB, &mut random);
    let (r, c) = (Host::new(), Host::new());
    a.sync(&c, &[]).ok();
    let common = number(&a.sync(&r, &["--keep-last", "20"]).ok().summary(), "epoch");
    let mut last = 0;
    for block in 0..3 {
        a.write([block], &mut random);
        last = number(&a.sync(&r, &[]).ok().summary(), "epoch");
    }
    b.force();
    r.run(&["rewind", "--to", &common.to_string()]).ok();
    b.write([100], &mut random);
    b.sync(&r, &[]).ok();
    b.sync(&c, &[]).ok();
    let content = c.copy("content.raw");
    // What b wrote is nowhere but there.
    r.run(&["rewind", "--to", &last.to_string()]).ok();
    r.force();
    r.sync(&c, &[]).code(4).says(&["has diverged"]);
    image::assert_equal(&content, &c.disk);
}

/// A former source whose last epochs its successor does not have is brought up to date by difference, also where the line breaks on the way.
#[test]
fn a_failback_that_was_cut_off_goes_on() {
    let mut random = Random::new("a failback that is cut off");
    let (near, far) = pair(32 * MIB, &mut random);
    near.write(0..100, &mut random);
    near.sync(&far, &[]).ok();
    far.force();
    far.write(1000..1600, &mut random);
    near.write(50..300, &mut random);
    let cut = far.sync(&near, &["--discard-there"]).env("RSH_CUT", MIB.to_string()).output();
    assert!(!cut.status.success(), "{cut}");
    let back = summary(far.sync(&near, &[]));
    assert_eq!((&back["method"], &back["resumed"]), (&"tracked".into(), &true.into()));
    equal(&near, &far);
}

/// Whatever is killed when, the same command leads to the end; the disk of the source is what was last written to it; two sources
/// that meet are refused; and a failback compares nothing.
#[test]
fn any_command_may_be_killed() {
    let mut random = Random::new("kills of a failover");
    let hosts = pair(8 * MIB, &mut random);
    let (mut here, mut there) = (&hosts.0, &hosts.1);
    let (mut kills, rounds, mut saved) = (0, rounds(12, 500), Vec::new());
    let limit = 150_000;
    let blocks =
        |random: &mut Random| (0..1 + random.below(20)).map(|_| random.below(2048)).collect::<Vec<u64>>();
    for round in 0..rounds {
        here.write(blocks(&mut random), &mut random);
        if random.coin() {
            kills += through(&mut random, limit, || here.sync(there, &[]), |_| false);
            here.write(blocks(&mut random), &mut random);
        }
        if random.coin() {
            let content = here.copy("content.raw");
            kills += through(&mut random, limit, || here.towards(there, &["demote"]), |_| false);
            let already = |output: &Output| output.stderr.contains("is a source already");
            kills += through(&mut random, limit, || there.run(&["promote"]), already);
            image::assert_equal(&content, &there.disk);
        } else {
            let already = |output: &Output| output.stderr.contains("is a source already");
            kills += through(&mut random, limit, || there.run(&["promote", "--force"]), already);
            let both = random.coin();
            if both {
                here.write(blocks(&mut random), &mut random);
            }
            there.write(blocks(&mut random), &mut random);
            let before = (touchable(here), touchable(there));
            there.sync(here, &[]).code(4).says(&["have diverged"]);
            assert_eq!((touchable(here), touchable(there)), before, "round {round}");
            // A command that is run again finds its own file.
            let file = here.new_file();
            let consent = match random.coin() {
                true => vec!["--save-there", file.to_str().expect("a path")],
                false => vec!["--discard-there"],
            };
            if random.one_in(4) {
                kills += through(&mut random, limit, || here.run(&["demote"]), |_| false);
            }
            let dry = [&consent[..], &["--dry-run"]].concat();
            let first = there.sync(here, &dry).ok().summary();
            assert_eq!(first["method"], "tracked", "round {round}: {first}");
            kills += through(&mut random, limit, || there.sync(here, &consent), |_| false);
            equal(here, there);
            saved.extend(file.exists().then_some(file));
        }
        let content = there.copy("content.raw");
        let first = there.sync(here, &["--dry-run"]).ok().summary();
        assert_eq!(first["method"], "tracked", "round {round}: {first}");
        kills += through(&mut random, limit, || there.sync(here, &[]), |_| false);
        image::assert_equal(&content, &here.disk);
        equal(here, there);
        (here, there) = (there, here);
    }
    saved.iter().for_each(|file| tells(&here.site.dsync(["inspect"]).arg(file).ok(), &["complete"]));
    say(&format!("{rounds} changes of roles, {kills} commands killed, {} deltas saved", saved.len()));
}

/// What a save that was killed has left is in the way of nobody.
#[test]
fn a_save_begins_anew_what_a_killed_one_has_left() {
    let mut random = Random::new("a killed save");
    let (near, far) = pair(8 * MIB, &mut random);
    let file = near.new_file();
    let partial = PathBuf::from(format!("{}.partial", file.display()));
    std::fs::write(&partial, b"a part").expect("a file");
    near.write([1], &mut random);
    far.run(&["promote", "--force"]).ok();
    far.sync(&near, &["--save-there", file.to_str().expect("a path")]).ok();
    assert!(!partial.exists() && file.exists());
}

/// On the worst day nobody types from memory what a job has: the source, the replica, and how that is reached.
#[test]
fn a_job_names_what_is_demoted_promoted_and_verified() {
    let scene = Scene::synced("a job that is named", 8 * MIB);
    let site = &scene.site;
    let folder = site.path("conf");
    std::fs::create_dir_all(&folder).expect("a folder");
    let (source, replica) = (scene.image.display(), scene.replica.display());
    let text = format!("command = sync\nsource = {source}\ndestination = {replica}\nkeep-last = 3\n");
    std::fs::write(folder.join("copy.conf"), text).expect("a job");
    let told = site.dsync(["verify", "--job", "copy"]).ok().text();
    assert!(told.contains(&format!("{replica} at epoch 1: no differences")), "{told}");
    assert!(site.dsync(["rewind", "--job=copy"]).ok().text().contains(&scene.replica.display().to_string()));
    site.dsync(["demote", "--job", "nothing"]).code(2).says(&["no job \"nothing\"", "copy"]);
    let names = site.dsync(["names", "jobs"]).ok().text();
    assert_eq!(names, "copy\n");
    let names = site.dsync(["names", "sources"]).ok().text();
    assert!(names.lines().any(|name| name == "vm") && names.contains(&source.to_string()), "{names}");
    let Scene { mut server, site, replica, .. } = scene;
    server.take().expect("a server").stop();
    site.dsync(["demote", "--job", "copy"]).ok();
    let told = site.dsync(["promote", "--job", "copy"]).ok().text();
    assert!(told.contains(&replica.display().to_string()) && told.contains("term 2"), "{told}");
}

/// Of a replica on another host a job knows how that is reached, and where it is promoted.
#[test]
fn a_job_names_a_replica_on_another_host() {
    let (mut scene, far) = (Scene::in_memory("a far job", MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let site = &scene.site;
    std::fs::create_dir_all(site.path("conf")).expect("a folder");
    let text = format!("command = sync\nsource = vm\ndestination = {}\nrsh = {RSH}\n", far.name());
    std::fs::write(site.path("conf/copy.conf"), text).expect("a job");
    let run = |command: &str| site.dsync([command, "--job=copy"]).env("RSH_STATE", far.site.state());
    let told = run("verify").ok().text();
    assert!(told.contains(&format!("{} at epoch 1: no differences", far.name())), "{told}");
    for command in ["promote", "rewind"] {
        let there =
            format!("its replica is on far: run \"dsync {command} {}\" there", far.replica().display());
        run(command).code(2).says(&["copy.conf", &there]);
    }
    scene.server.take().expect("a server").stop();
    let told = run("demote").ok().text();
    assert!(told.contains(&far.name()), "{told}");
    far.site.dsync(["promote"]).arg(far.replica()).ok();
}

/// A job of a group is about all of its disks.
#[test]
fn a_job_names_a_group() {
    let site = Site::in_memory();
    let disks = ["data", "log"].map(|name| site.image(&format!("{name}.raw"), MIB));
    let dir = site.path("replicas");
    std::fs::create_dir_all(site.path("conf")).and_then(|()| std::fs::create_dir(&dir)).expect("folders");
    let text = format!("command = sync\ngroup = db\ndestination = {}\n", dir.display());
    std::fs::write(site.path("conf/db.conf"), text).expect("a job");
    let server = site.serve(&disks.each_ref().map(PathBuf::as_path), &["--group", "db"]);
    site.dsync(["run", "db"]).ok();
    server.stop();
    let run = |command: &str| site.dsync([command, "--job", "db"]);
    run("verify").code(2).says(&["db.conf", "it is of a group"]);
    let told = run("rewind").ok().text();
    assert!(told.contains("common epoch 1"), "{told}");
    run("demote").ok();
    let told = run("promote").ok().text();
    for name in ["data.raw", "log.raw"] {
        let promoted = format!("{} is now the source", dir.join(name).display());
        assert!(told.contains(&promoted), "{told}");
    }
}

/// Between the last sync and the moment at which it is a replica nobody holds a source.
#[test]
fn a_source_that_was_served_while_it_was_demoted_stays_the_source() {
    if !need(&["strace"], "a source that is served while it is demoted") {
        return;
    }
    let mut scene = Scene::synced("served while demoted", MIB);
    scene.stop();
    let (trace, lock) = (scene.site.path("trace"), scene.site.path(".vm.raw.dsync/lock"));
    let strace = scene.site.run(&find("strace").expect("strace")).args(["-f", "-e", "trace=flock"]);
    let strace = strace.args(["-e", "inject=flock:signal=STOP", "-P"]).arg(&lock).arg("-o").arg(&trace);
    let strace = strace.arg(binary()).arg("demote").arg(&scene.image).arg(&scene.replica);
    let demotion = strace.start();
    let traced = || std::fs::read_to_string(&trace).unwrap_or_default();
    until("it has let go of the source, and taken the folder of the replica", || {
        traced().contains("stopped by SIGSTOP")
    });
    scene.start();
    let written = scene.change(1);
    scene.stop();
    let stopped = demotion.descendant("dsync", "demote").expect("a demotion");
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).expect("a stopped process");
    let refused = demotion.output(Duration::from_secs(60));
    assert_eq!(refused.status.code(), Some(4), "{refused}");
    refused.says(&["was written to while it was demoted"]);
    scene.start();
    assert_eq!(scene.dirty().len(), written.len(), "what was written is still known");
    scene.sync(&[]).ok();
    scene.equal();
}

/// By its numbers a delta of the source that did not take over may be in order.
#[test]
fn a_delta_of_a_source_that_went_its_own_way_is_not_skipped() {
    let mut random = Random::new("a delta of another branch");
    let (old, new, third) = (Host::with_disk(4 * MIB, &mut random), Host::new(), Host::new());
    [&new, &third].iter().for_each(|to| drop(old.sync(to, &[]).ok()));
    new.run(&["promote", "--force"]).ok();
    for block in 3..6 {
        new.write([block], &mut random);
        new.sync(&third, &[]).ok();
    }
    old.write([7], &mut random);
    let delta = old.run(&["extract", "--since", "1"]).ok().stdout;
    third.run(&["merge"]).input(delta).code(4).says(&["has gone its own way"]);
    image::assert_equal(&new.disk, &third.disk);
}

/// That others have changed a replica, or seem to have, takes nothing from what only it has.
#[test]
fn a_replica_that_was_touched_keeps_what_only_it_has() {
    let mut random = Random::new("a touched replica of another branch");
    let (near, far, third) = (Host::with_disk(8 * MIB, &mut random), Host::new(), Host::new());
    [&far, &third].iter().for_each(|to| drop(near.sync(to, &[]).ok()));
    near.write([7], &mut random);
    near.sync(&third, &["--keep", "24h"]).ok();
    far.run(&["promote", "--force"]).ok();
    let newest = image::fingerprint(&third.disk).0;
    for touched in [false, true] {
        if touched {
            let file = std::fs::File::options().write(true).open(&third.disk).expect("a replica");
            file.set_modified(std::time::SystemTime::now()).expect("a time");
        }
        let adopted = far.sync(&third, &["--adopt"]).code(4);
        adopted.says(&["--adopt gives up nothing that only the replica has", "has diverged"]);
        assert_eq!(image::fingerprint(&third.disk).0, newest, "touched: {touched}");
    }
    far.sync(&third, &["--adopt=overwrite"]).ok();
    equal(&far, &third);
}
