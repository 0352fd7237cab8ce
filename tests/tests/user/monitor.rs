//! `dsync status --check` and `--prometheus`: each problem is seen by a monitor, and gone when it is mended. And a monitor is never in
//! the way.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::mount::{Loop, Worn, small};
use dsync_tests::tracked::{Tracked, Untrack};
use dsync_tests::{Output, Random, Run, Scene, Site, got, need, need_root, promtool, sample, skipped};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// What a check finds, by the words that name problems; sorted.
fn problems(site: &Site, options: &[&str]) -> Vec<String> {
    let ask = |form: &[&str]| site.dsync(["status", "--check"]).args(form).args(options).output();
    let both = || (ask(&[]), ask(&["--json"]));
    let (mut plain, mut output) = both();
    // It may have changed between the two.
    let count = |output: &Output| output.text().lines().count();
    let is_same = plain.status.success() || count(&plain) + 1 == count(&output);
    if plain.status.code() != output.status.code() || !is_same {
        (plain, output) = both();
    }
    let lines = output.json();
    let (last, all) = lines.split_last().unwrap_or_else(|| panic!("nothing was found: {output}"));
    assert_eq!((last["kind"].as_str(), last["problems"].as_u64()), (Some("check"), Some(all.len() as u64)));
    let code = match all {
        [] => 0,
        [one] if one["problem"] == "nothing-known" || one["problem"] == "age-unknown" => 3,
        _ => 1,
    };
    assert_eq!([plain.status.code(), output.status.code()], [Some(code); 2], "{plain}\n{output}");
    let text = plain.text();
    match all.is_empty() {
        true => assert_eq!(text, "OK\n"),
        false => assert_eq!(text.lines().count(), all.len(), "{plain}"),
    }
    for problem in all {
        let message = problem["message"].as_str().expect("a message");
        assert!(text.contains(message), "{message} is not in {text}");
    }
    sorted_words(all)
}

fn sorted_words(problems: &[Value]) -> Vec<String> {
    let mut words: Vec<String> =
        problems.iter().map(|problem| problem["problem"].as_str().expect("a word").to_owned()).collect();
    words.sort();
    words
}

/// Writes to an image past its server, or to a replica.
fn scribble(scene: &Scene, at: &Path) {
    // The clock of files ticks a few times a second only.
    std::thread::sleep(Duration::from_millis(50));
    image::scribble(at, MIB, BLOCK, &mut scene.random.clone());
}

fn none() -> Vec<String> {
    Vec::new()
}

#[test]
fn lost_tracking_is_reported_until_it_is_made_good() {
    let mut scene = Scene::synced_in_memory("lost tracking", 8 * MIB);
    let second = scene.site.path("second.raw");
    scene.site.sync(&scene.image, &second, &[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
    // At rest it is as it was left, until another program writes there.
    scene.stop();
    assert_eq!(problems(&scene.site, &[]), none());
    scribble(&scene, &scene.image);
    assert_eq!(problems(&scene.site, &[]), ["tracking-lost"]);
    scene.start();
    assert_eq!(problems(&scene.site, &["vm"]), ["tracking-lost"]);
    // The other replica is behind the gap.
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), ["history-gap"]);
    scene.site.sync(&scene.image, &second, &[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
    // A source that is not there.
    scene.stop();
    let aside = scene.site.path("aside.raw");
    std::fs::rename(&scene.image, &aside).expect("another name");
    assert_eq!(problems(&scene.site, &[]), ["missing"]);
    std::fs::rename(&aside, &scene.image).expect("its name");
    // Renaming changed its times.
    assert_eq!(problems(&scene.site, &[]), ["tracking-lost"]);
}

#[test]
fn a_replica_that_is_out_of_date_is_reported() {
    let mut scene = Scene::synced_in_memory("out of date", 8 * MIB);
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(problems(&scene.site, &["--max-age", "1s"]), none(), "nothing was written since");
    scene.change(3);
    assert_eq!(problems(&scene.site, &["--max-age", "1s"]), ["stale"]);
    let replica = scene.replica.to_str().expect("a path");
    assert_eq!(problems(&scene.site, &["--max-age", "1s", replica]), ["stale"]);
    assert_eq!(problems(&scene.site, &["--max-age", "1h", replica]), none());
    assert_eq!(problems(&scene.site, &["--max-age", "1h"]), none());
    assert_eq!(problems(&scene.site, &[]), none());
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &["--max-age", "1s"]), none());
}

/// A sync while the clock is ahead leaves a time that is still to come.
#[test]
fn a_clock_that_was_ahead_hides_neither_age_nor_failure() {
    let mut scene = Scene::synced_in_memory("a clock that was ahead", 4 * MIB);
    scene.change(3);
    let sources = std::fs::read_dir(scene.site.state().join("sources")).expect("sources").flatten();
    let place = sources.map(|entry| entry.path()).find(|path| path.is_dir()).expect("a source");
    let text = std::fs::read_to_string(place.join("bookmarks")).expect("bookmarks");
    let mut bookmarks: Value = serde_json::from_str(&text).expect("bookmarks");
    let times = bookmarks.as_object_mut().expect("bookmarks").values_mut();
    times
        .for_each(|bookmark| bookmark["time"] = (bookmark["time"].as_u64().expect("a time") + 86_400).into());
    std::fs::write(place.join("bookmarks"), bookmarks.to_string()).expect("bookmarks");
    assert_eq!(problems(&scene.site, &[]), none());
    assert_eq!(problems(&scene.site, &["--max-age", "1h"]), ["stale"]);
    let told = scene.site.dsync(["status", "--check", "--max-age", "1h"]).code(1).text();
    assert!(told.contains("which is still to come"), "{told}");
    let metrics = scene.site.dsync(["status", "--prometheus"]).ok().text();
    assert_eq!(sample(&metrics, "dsync_replica_lag_seconds", &[]), Some(f64::INFINITY));
    // What fails is no older than that.
    let folder = scene.replica.parent().expect("a folder").to_path_buf();
    std::fs::rename(&folder, folder.with_extension("aside")).expect("another name");
    std::fs::write(&folder, "no folder").expect("a file");
    scene.sync(&[]).code(1);
    assert_eq!(problems(&scene.site, &["vm"]), ["failing"]);
    std::fs::remove_file(&folder).expect("its place");
    std::fs::rename(folder.with_extension("aside"), &folder).expect("its name");
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &["--max-age", "1h"]), none());
}

/// The host that receives a replica does not know whether anything was written since.
#[test]
fn an_age_that_only_the_source_knows_is_not_well() {
    let (mut scene, far) = (Scene::in_memory("an age elsewhere", 4 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    scene.change(3);
    let replica = far.replica().display().to_string();
    assert_eq!(problems(&far.site, &["--max-age", "1h", &replica]), ["age-unknown"]);
    let told = far.site.dsync(["status", "--check", "--max-age", "1h", &replica]).code(3).text();
    assert!(told.contains(&format!("is known where its source is, {}", scene.image.display())), "{told}");
    assert_eq!(problems(&far.site, &[&replica]), none());
    assert_eq!(problems(&far.site, &["--max-age", "1h"]), none());
}

/// The disk of a replica is exchanged for an older copy of it, as when another one is mounted in its place.
#[test]
fn an_older_replica_in_the_place_of_the_newest_is_told() {
    let mut scene = Scene::synced("an older replica in its place", 8 * MIB);
    let [place, newest, older] = ["place", "newest", "older"].map(|name| scene.site.path(name));
    let put = |from: &Path, to: &Path| std::fs::rename(from, to).expect("its name");
    scene.replica = place.join("vm.raw");
    std::fs::create_dir(&place).expect("a folder");
    scene.sync(&[]).ok();
    put(&place, &older);
    scene.change(3);
    std::fs::create_dir(&place).expect("a folder");
    scene.sync(&["--create"]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
    put(&place, &newest);
    put(&older, &place);
    assert_eq!(problems(&scene.site, &[]), ["older"]);
    scene.sync(&[]).ok();
    image::assert_equal(&scene.image, &scene.replica);
    assert_eq!(problems(&scene.site, &[]), none());
}

#[test]
fn attempts_that_fail_and_a_replica_that_differs_are_reported() {
    let mut scene = Scene::synced_in_memory("failing and differing", 8 * MIB);
    scene.change(3);
    scene.sync(&[]).ok();
    scene.change(3);
    // Within one second, as often as not, and a success ends it within that as well.
    let folder = scene.replica.parent().expect("a folder").to_path_buf();
    let aside = folder.with_extension("aside");
    std::fs::rename(&folder, &aside).expect("another name");
    std::fs::write(&folder, "no folder").expect("a file");
    scene.sync(&[]).code(1);
    assert_eq!(problems(&scene.site, &["vm"]), ["failing"]);
    std::thread::sleep(Duration::from_millis(1100));
    let stale = scene.site.dsync(["status", "--check", "--max-age", "1s", "vm"]).code(1).text();
    assert!(stale.contains("longer ago than 1") && stale.contains("attempt failed"), "{stale}");
    std::fs::remove_file(&folder).expect("its place");
    std::fs::rename(&aside, &folder).expect("its name");
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());

    let verify =
        |options: &[&str]| scene.site.dsync(["verify"]).args(options).args([&scene.image, &scene.replica]);
    assert_eq!(verify(&[]).output().status.code(), Some(0));
    assert_eq!(problems(&scene.site, &["vm"]), none());
    scribble(&scene, &scene.replica);
    verify(&[]).code(5);
    assert_eq!(problems(&scene.site, &["vm"]), ["differs"]);
    verify(&["--repair"]).ok();
    assert_eq!(problems(&scene.site, &["vm"]), none());

    // Taken over by another source, while nothing is written to this one.
    let other = scene.site.image("other.raw", 8 * MIB);
    scene.site.sync(&other, &scene.replica, &["--adopt=overwrite"]).ok();
    assert_eq!(problems(&scene.site, &["vm"]), ["taken-over"]);
    let shown = scene.site.dsync(["status"]).arg(&scene.replica).ok().text();
    assert!(shown.contains(&format!("it was a replica of {}", scene.image.display())), "{shown}");
    std::thread::sleep(Duration::from_millis(1100));
    scene.sync(&[]).code(4);
    let shown = scene.site.dsync(["status", "vm"]).ok().text();
    assert!(shown.contains("the last attempt failed on"), "{shown}");
    scene.sync(&["--adopt=overwrite"]).ok();
    assert_eq!(problems(&scene.site, &["vm"]), none());
}

#[test]
fn replicas_of_this_host_are_reported_and_forgotten() {
    let mut scene = Scene::new("replicas of this host", 8 * MIB);
    let far = Far::new(RSH);
    far.sync(&scene, &[], None).ok();
    let (site, replica) = (&far.site, far.replica());
    let status = || site.dsync(["status", "-v"]).ok().text();
    assert!(status().contains(&format!("replica {}, at epoch 1", replica.display())), "{}", status());
    assert_eq!(problems(site, &[]), none());
    assert_eq!(problems(&scene.site, &[]), none());

    // Changed by others.
    scribble(&scene, &replica);
    assert_eq!(problems(site, &[]), ["changed"]);
    far.sync(&scene, &[], None).code(4);
    assert_eq!(problems(site, &[replica.to_str().expect("a path")]), ["changed"]);
    far.sync(&scene, &["--adopt"], None).ok();
    assert_eq!(problems(site, &[]), none());

    // Promoted: a source like any other, and then a replica again.
    site.dsync(["promote", "--force"]).arg(&replica).ok();
    assert_eq!(problems(site, &[]), none());
    let server = site.serve(&[&replica], &[]);
    server.client("vm").write(0, &[7; 4096]).expect("a write");
    server.stop();
    assert_eq!(problems(site, &[]), none());
    site.dsync(["demote"]).arg(&replica).ok();
    assert!(status().contains("the former source"), "{}", status());
    far.sync(&scene, &["--discard-there"], None).ok();
    image::assert_equal(&scene.image, &replica);

    // A copy of a disk that was in use, and could not be frozen.
    let lineage = site.path(".vm.raw.dsync/lineage");
    let text = std::fs::read_to_string(&lineage).expect("a lineage");
    assert!(text.contains("\"exact\""), "{text}");
    std::fs::write(&lineage, text.replace("\"exact\"", "\"fuzzy\"")).expect("a lineage");
    assert_eq!(problems(site, &[]), ["fuzzy"]);
    scene.change(1);
    far.sync(&scene, &[], None).ok();
    assert_eq!(problems(site, &[]), none());

    // A commit in place that is cut off.
    scene.change(500);
    far.sync(&scene, &["--commit", "in-place"], Some(MIB)).output();
    assert_eq!(problems(site, &[]), ["incomplete"]);
    far.sync(&scene, &[], None).ok();
    assert_eq!(problems(site, &[]), none());

    // Missing, and back; and gone with its state.
    let aside = site.path("aside");
    std::fs::create_dir(&aside).expect("a folder");
    std::fs::rename(&replica, aside.join("vm.raw")).expect("another place");
    assert_eq!(problems(site, &[]), ["missing"]);
    assert!(status().contains("is missing"), "{}", status());
    std::fs::rename(site.path(".vm.raw.dsync"), aside.join(".vm.raw.dsync")).expect("another place");
    assert_eq!(problems(site, &[]), ["missing"]);
    for name in ["vm.raw", ".vm.raw.dsync"] {
        std::fs::rename(aside.join(name), site.path(name)).expect("its place");
    }
    assert_eq!(problems(site, &[]), none(), "only its name was another one meanwhile");
    std::fs::rename(site.path(".vm.raw.dsync"), aside.join(".vm.raw.dsync")).expect("another place");
    assert_eq!(problems(site, &[]), ["missing"]);
    assert!(status().contains("is there, but its state is missing: put "), "{}", status());
    std::fs::rename(aside.join(".vm.raw.dsync"), site.path(".vm.raw.dsync")).expect("its place");
    for name in ["vm.raw", ".vm.raw.dsync"] {
        std::fs::rename(site.path(name), aside.join(name)).expect("another place");
    }
    site.dsync(["forget", "-n"]).arg(&replica).ok();
    assert_eq!(problems(site, &[]), ["missing"]);
    site.dsync(["forget"]).arg(&replica).ok();
    // Unless other tests track something on this machine.
    assert!(problems(site, &[]).iter().all(|problem| problem == "nothing-known"));
    site.dsync(["forget"]).arg(&replica).code(1).says(&["neither"]);

    // A merge lists it too, and what is forgotten is not listed.
    let delta = scene.site.dsync(["extract", "vm", "--since", "0"]).ok().stdout;
    site.dsync(["merge"]).arg(&replica).input(delta).ok();
    assert!(status().contains(&format!("replica {}", replica.display())), "{}", status());
    site.dsync(["forget"]).arg(&replica).ok();
    assert!(!status().contains("vm.raw"), "{}", status());
}

#[test]
fn a_first_copy_that_was_cut_off_is_reported() {
    let (scene, far) = (Scene::in_memory("first copy", 32 * MIB), Far::new(RSH));
    far.sync(&scene, &[], Some(2 * MIB)).output();
    assert_eq!(problems(&far.site, &[]), ["incomplete"]);
    // Neither host says that all is well, and the source's says what failed.
    assert_eq!(problems(&scene.site, &[]), ["incomplete"]);
    let told = |options: &[&str]| scene.site.dsync(["status"]).args(options).output().text();
    assert!(told(&["--check"]).contains("the first copy of"), "{}", told(&["--check"]));
    assert!(
        told(&["-v"]).contains(": the first copy is not complete: the last attempt failed on"),
        "{}",
        told(&["-v"])
    );
    far.sync(&scene, &[], None).ok();
    assert_eq!(problems(&far.site, &[]), none());
    assert_eq!(problems(&scene.site, &[]), none());
}

#[test]
fn a_first_copy_that_is_killed_is_reported_until_it_is_given_up() {
    let (scene, far) = (Scene::in_memory("killed first copy", 32 * MIB), Far::new(RSH));
    let name = format!("far:{}", far.replica().display());
    let copy = far.sync(&scene, &["--bwlimit", "1M"], None).start();
    let until = Instant::now() + Duration::from_secs(120);
    let told = || scene.site.dsync(["status", "--check"]).output().text();
    while !scene.site.dsync(["status", "vm"]).ok().text().contains("is under way") {
        assert!(Instant::now() < until, "{}", told());
        std::thread::sleep(Duration::from_millis(50));
    }
    // One that goes on is as it is to be.
    assert_eq!(problems(&scene.site, &[]), none());
    assert!(scene.site.dsync(["status"]).ok().text().contains("  first sync"), "it is shown");
    copy.killed();
    assert!(told().contains("was interrupted") && told().contains("dsync forget"), "{}", told());
    assert_eq!(problems(&scene.site, &[]), ["incomplete"]);
    let forgotten = scene.site.dsync(["forget", "vm", &name]).ok().text();
    assert!(forgotten.contains("its first copy was never completed"), "{forgotten}");
    assert_eq!(problems(&scene.site, &[]), none());
    scene.site.dsync(["forget", "vm", &name]).code(1);
}

/// Nor is a device, which each sync compares that does not trust it.
#[test]
fn a_device_that_was_never_tracked_is_no_problem() {
    let what = "a check of a device at rest";
    let (site, mut random) = (Site::new(), Random::new(what));
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let Some(disk) = Loop::new(&site.image("disk.raw", 4 * MIB)) else {
        return skipped(what, "loop devices are not allowed here");
    };
    let copy = site.path("copy.raw");
    for at in [0, MIB] {
        image::scribble(disk.device(), at, BLOCK, &mut random);
        site.sync(disk.device(), &copy, &[]).ok();
        assert_eq!(problems(&site, &[]), none());
    }
}

/// A disk that nobody serves or tracks is compared by each sync: nobody has asked for more.
#[test]
fn an_image_that_was_never_served_is_no_problem() {
    let (site, mut random) = (Site::new(), Random::new("never served"));
    let (image, replicas) = (site.image("dump.raw", 4 * MIB), ["a.raw", "b.raw"].map(|name| site.path(name)));
    for at in [0, MIB, 2 * MIB] {
        image::scribble(&image, at, BLOCK, &mut random);
        assert_eq!(problems(&site, &[]), if at == 0 { vec!["nothing-known".to_owned()] } else { none() });
        replicas.iter().for_each(|replica| drop(site.sync(&image, replica, &[]).ok()));
        assert_eq!(problems(&site, &[]), none());
    }
    // Nor is a replica out of date to which nothing is to be brought.
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(problems(&site, &["--max-age", "1s"]), none());
    image::scribble(&image, 0, BLOCK, &mut random);
    assert_eq!(problems(&site, &["--max-age", "1s"]), ["stale", "stale"]);
    // Where it was served once, it is to be.
    site.serve(&[&image], &[]).stop();
    image::scribble(&image, 3 * MIB, BLOCK, &mut random);
    assert_eq!(problems(&site, &[]), ["tracking-lost"]);
}

#[test]
fn a_first_copy_that_goes_on_is_one() {
    let (site, far) = (Site::new(), Far::new(RSH));
    let image = site.image("vm.raw", 32 * MIB);
    std::fs::write(&image, Random::new("a first copy that goes on").bytes(32 << 20)).expect("a content");
    let destination = format!("far:{}", far.replica().display());
    let sync = || {
        let run = site.dsync(["sync", "--json", "--rsh", RSH]).arg(&image).arg(&destination);
        run.env("RSH_STATE", far.site.state())
    };
    // The last few MiB before the cut may not have been noted, nor much of what comes faster than it is written.
    let line = [("RSH_CUT", 24 * MIB), ("RSH_RATE", 12 * MIB)].map(|(name, bytes)| (name, bytes.to_string()));
    line.into_iter().fold(sync(), |sync, (name, bytes)| sync.env(name, bytes)).code(1);
    let went_on = sync().ok().summary();
    let found = [&went_on["method"], &went_on["trust"]].map(|field| field.as_str().expect("a word"));
    assert!(found == ["copy", "seeded"] && went_on["resumed"] == true, "{went_on}");
    assert!(dsync_tests::scene::number(&went_on, "bytes_sent") < 30 << 20, "{went_on}");
}

#[test]
fn a_verification_that_fails_is_not_a_replica_out_of_date() {
    let scene = Scene::synced_in_memory("a mistyped verification", 4 * MIB);
    let verify = |options: &[&str]| scene.site.dsync(["verify", "vm"]).arg(&scene.replica).args(options);
    verify(&["--range", "1T:1M"]).code(4).says(&["beyond the end"]);
    assert_eq!(problems(&scene.site, &[]), none());
    scene.site.dsync(["verify", "--rsh", "false", "vm", "far:/vm.raw"]).code(1);
    assert_eq!(problems(&scene.site, &[]), none());
}

#[test]
fn a_mirror_of_a_job_that_was_killed_is_reported() {
    let scene = Scene::synced_in_memory("a mirror that was killed", 4 * MIB);
    let (source, replica) = (scene.image.display().to_string(), scene.replica.display().to_string());
    job(&scene.site, "copy", &[("command", "mirror"), ("source", &source), ("destination", &replica)]);
    let start = || {
        let mut mirror = scene.site.dsync(["run", "copy"]).start();
        mirror.wait_to_say("mirroring to");
        mirror
    };
    let mirror = start();
    let until = Instant::now() + Duration::from_secs(30);
    while !scene.site.dsync(["status"]).ok().text().contains("  mirror, ") {
        assert!(Instant::now() < until, "{}", scene.site.dsync(["status"]).ok().text());
    }
    assert_eq!(problems(&scene.site, &[]), none());
    mirror.killed();
    // Nothing is to be moved, and nothing would be.
    assert_eq!(problems(&scene.site, &[]), ["not-mirrored"]);
    let mut mirror = start();
    assert_eq!(problems(&scene.site, &[]), none());
    mirror.kill();
}

#[test]
fn a_state_directory_that_is_not_there_knows_nothing_of_tracked_disks() {
    let Some(tracked) = Tracked::new("a tracked disk of the host", 16 * MIB) else { return };
    // Its record is sound from the first sync on.
    tracked.site.sync(tracked.device(), &tracked.site.path("copy.raw"), &[]).ok();
    let elsewhere = tracked.site.path("nowhere").display().to_string();
    let told = tracked.site.dsync(["status", "--check", "--state-dir", &elsewhere]).code(3).text();
    assert!(told.contains("nothing is watched") && told.contains("does not exist"), "{told}");
}

/// Writes a job of a site.
fn job(site: &Site, name: &str, lines: &[(&str, &str)]) {
    let folder = site.path("conf");
    std::fs::create_dir_all(&folder).expect("a folder");
    let text: String = lines.iter().map(|(key, value)| format!("{key} = {value}\n")).collect();
    std::fs::write(folder.join(format!("{name}.conf")), text).expect("a job");
}

/// Whether each copy of a job is made, by the metric.
fn copied(site: &Site, job: &str) -> Vec<bool> {
    let text = site.dsync(["status", "--prometheus"]).output().text();
    let begins = format!("dsync_job_copied{{job=\"{job}\",");
    text.lines().filter(|line| line.starts_with(&begins)).map(|line| line.ends_with(" 1")).collect()
}

#[test]
fn a_copy_that_a_job_never_began_is_reported() {
    let (site, far) = (Site::new(), Far::new(RSH));
    let (image, replica) = (site.image("vm.raw", 8 * MIB), far.replica().display().to_string());
    let destination = format!("far:{replica}");
    let written = |command: &str, source: &str| {
        let lines = [("command", command), ("source", source), ("destination", &destination), ("rsh", RSH)];
        job(&site, "vm-far", &lines);
    };
    // Its unit was never started, or failed before it knew its source.
    written("mirror", "vm");
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    assert_eq!(problems(&site, &["vm"]), ["never-copied"], "it is asked for by name");
    assert_eq!(copied(&site, "vm-far"), [false]);
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains(&format!("job vm-far is to mirror vm to {destination}, and no")), "{told}");
    let run = || site.dsync(["run", "vm-far"]).env("RSH_STATE", far.site.state());
    assert!(!run().output().status.success(), "nothing is served");
    assert_eq!(problems(&site, &[]), ["never-copied"]);

    // The far host is not reached, and a source that nothing follows leaves no trace of the attempt.
    written("sync", &image.display().to_string());
    run().env("RSH_CUT", "10").code(1);
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    // What failed is kept.
    let server = site.serve(&[&image], &[]);
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    run().env("RSH_CUT", "10").code(1);
    assert_eq!((problems(&site, &[]), copied(&site, "vm-far")), (vec!["never-copied".into()], vec![false]));
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("no copy has begun") && told.contains("an attempt failed on"), "{told}");
    // Without a job its user has seen that.
    site.dsync(["sync", "--rsh", "false", "vm", "far:/other.raw"]).code(1);
    assert_eq!(problems(&site, &[]), ["never-copied"]);

    run().ok();
    assert_eq!((problems(&site, &[]), copied(&site, "vm-far")), (none(), vec![true]));
    // What it gave up is to be copied again.
    site.dsync(["forget"]).arg(&image).arg(&destination).ok();
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    assert_eq!(problems(&site, &[image.to_str().expect("a path")]), ["never-copied"]);
    written("verify", "vm");
    assert_eq!((problems(&site, &[]), copied(&site, "vm-far")), (none(), vec![]));
    drop(server);
}

#[test]
fn a_job_is_judged_by_the_state_directory_that_is_its_own() {
    let site = Site::new();
    let (image, copy) = (site.image("vm.raw", MIB), site.path("copy.raw").display().to_string());
    let source = image.display().to_string();
    let (state, elsewhere) =
        (site.state().display().to_string(), site.path("elsewhere").display().to_string());
    let lines = [("command", "sync"), ("source", &source), ("destination", &copy)];
    let with = |state: &str| job(&site, "vm-copy", &[&lines[..], &[("state-dir", state)]].concat());
    job(&site, "vm-copy", &lines);
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    assert_eq!(problems(&site, &["--state-dir", &elsewhere]), ["nothing-known"]);
    with(&elsewhere);
    assert_eq!(problems(&site, &[]), ["nothing-known"]);
    assert_eq!(problems(&site, &["--state-dir", &elsewhere]), ["never-copied"]);
    with(&state);
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    site.dsync(["run", "vm-copy"]).ok();
    assert_eq!(problems(&site, &[]), none());

    // What was the source waits as a replica for its return.
    site.dsync(["demote"]).arg(&image).arg(&copy).ok();
    assert_eq!(problems(&site, &[]), none());
    site.dsync(["promote", &copy]).ok();
    assert_eq!(problems(&site, &[]), none());
    // Back in its role, it does not know what it was copied to before.
    site.dsync(["demote", &copy]).arg(&image).ok();
    site.dsync(["promote"]).arg(&image).ok();
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("no sync has come since that took over") && !told.contains("never"), "{told}");
    site.dsync(["run", "vm-copy"]).ok();
    assert_eq!(problems(&site, &[]), none());
    // A job that cannot be run makes nothing.
    job(&site, "wrong", &[("command", "sync"), ("sauce", "vm")]);
    assert_eq!(problems(&site, &[]), ["unreadable"]);
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("cannot run job wrong: ") && told.contains("unknown key \"sauce\""), "{told}");
}

#[test]
fn jobs_of_groups_and_of_other_hosts_are_judged_by_each_replica() {
    let (site, far) = (Site::new(), Far::new(RSH));
    let images = ["data", "log"].map(|name| site.image(&format!("{name}.raw"), MIB));
    let folder = site.path("copies");
    std::fs::create_dir(&folder).expect("a folder");
    let group = [("command", "mirror"), ("group", "db"), ("destination", folder.to_str().expect("a path"))];
    job(&site, "db-far", &group);
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    let paths = images.each_ref().map(|image| image.as_path());
    let server = site.serve(&paths, &["--group", "db"]);
    assert_eq!(problems(&site, &[]), ["never-copied", "never-copied"]);
    assert_eq!(problems(&site, &["log"]), none(), "it is the job of the group");
    assert_eq!(copied(&site, "db-far"), [false, false]);
    site.dsync(["sync", "--group", "db"]).arg(&folder).ok();
    assert_eq!((problems(&site, &[]), copied(&site, "db-far")), (none(), vec![true, true]));

    // Fetched by the host of the replica.
    let copy = far.site.path("fetched.raw").display().to_string();
    let source = format!("near:{}", images[0].display());
    let lines = [("command", "sync"), ("source", &source), ("destination", &copy), ("rsh", RSH)];
    job(&far.site, "fetch", &lines);
    assert_eq!(problems(&far.site, &[]), ["never-copied"]);
    far.site.dsync(["run", "fetch"]).env("RSH_STATE", site.state()).ok();
    assert_eq!((problems(&far.site, &[]), copied(&far.site, "fetch")), (none(), vec![true]));

    // Demoted, the disks wait as replicas until they are the sources again.
    drop(server);
    site.dsync(["demote", "--group", "db"]).arg(&folder).ok();
    assert_eq!((problems(&site, &[]), copied(&site, "db-far")), (none(), vec![]));
}

/// Waits until a sync has told that it is under way.
fn wait_for_work(site: &Site) {
    dsync_tests::until("it is at work", || {
        let metrics = site.dsync(["status", "--prometheus"]).ok().text();
        let mut of_syncs = metrics.lines().filter(|line| line.starts_with("dsync_replica_work{"));
        of_syncs.any(|line| line.ends_with("command=\"sync\"} 1"))
    });
}

/// A job that fails each night is no less a problem because its replica is a whole copy.
#[test]
fn a_job_that_fails_is_reported_until_it_succeeds() {
    let (site, mut random) = (Site::new(), Random::new("a job that fails"));
    let images = ["a.raw", "b.raw"].map(|name| site.image(name, 4 * MIB));
    let [a, b] = images.each_ref().map(|image| image.display().to_string());
    let copy = site.path("copy.raw").display().to_string();
    let written = |name: &str, lines: &[(&str, &str)]| {
        job(&site, name, &[&[("command", "sync"), ("destination", copy.as_str())], lines].concat());
    };
    let told = || site.dsync(["status", "--check"]).output().text();
    written("a", &[("source", &a)]);
    site.dsync(["run", "a"]).ok();
    assert_eq!(problems(&site, &[]), none());
    // The replica is another source's, and that source is well.
    site.sync(&images[1], &site.path("copy of b.raw"), &[]).ok();
    written("b", &[("source", &b)]);
    site.dsync(["run", "b"]).code(4);
    assert_eq!(problems(&site, &[]), ["never-copied"]);
    assert!(
        told().contains("an attempt failed on") && told().contains("a copy of another source"),
        "{}",
        told()
    );
    std::fs::remove_file(site.path("conf/b.conf")).expect("a job");
    assert_eq!(problems(&site, &[]), none(), "a job that is gone is none");

    // Broken by an edit: refused as it is read, and as it begins.
    image::scribble(&images[0], 0, BLOCK, &mut random);
    written("a", &[("source", &a), ("sauce", &a)]);
    site.dsync(["run", "a"]).code(2);
    assert_eq!(problems(&site, &[]), ["unreadable"]);
    written("a", &[("source", &a), ("bwlimit", "08:00-18:00=pause,else=off")]);
    assert_eq!(problems(&site, &[]), ["failing"], "it was refused before");
    site.dsync(["run", "a"]).code(2);
    assert_eq!(problems(&site, &[]), ["failing"]);
    assert_eq!(problems(&site, &[&copy]), ["failing"]);
    assert_eq!(problems(&site, &["b.raw"]), none());
    assert!(
        told().contains("an attempt of a (sync) failed on") && told().contains("only a mirror"),
        "{}",
        told()
    );
    // Nothing that was not tried ends it: a trial, an interrupt, or that something is in use.
    written("a", &[("source", &a)]);
    site.dsync(["run", "a", "-n"]).ok();
    assert_eq!(problems(&site, &[]), ["failing"]);
    image::random(&images[0], 4 * MIB, &mut random);
    let mut slow = site.dsync(["run", "a", "--bwlimit", "256K"]).start();
    wait_for_work(&site);
    site.dsync(["run", "a"]).code(6);
    assert_eq!(problems(&site, &[]), ["failing"]);
    slow.signal(rustix::process::Signal::TERM);
    assert_eq!(slow.output(Duration::from_secs(60)).status.code(), Some(130));
    assert_eq!(problems(&site, &[]), ["failing"]);
    site.dsync(["run", "a"]).ok();
    assert_eq!(problems(&site, &[]), none());
}

#[test]
fn a_job_that_is_killed_is_reported() {
    let (site, mut random) = (Site::new(), Random::new("a job that is killed"));
    let image = site.image("vm.raw", 4 * MIB);
    let (source, copy) = (image.display().to_string(), site.path("copy.raw").display().to_string());
    job(&site, "copy", &[("command", "sync"), ("source", &source), ("destination", &copy)]);
    site.dsync(["run", "copy"]).ok();
    image::random(&image, 4 * MIB, &mut random);
    let start = || {
        let slow = site.dsync(["run", "copy", "--bwlimit", "256K"]).start();
        wait_for_work(&site);
        slow
    };
    let slow = start();
    assert_eq!(problems(&site, &[]), none());
    slow.killed();
    assert_eq!(problems(&site, &[]), ["failing"]);
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("an attempt of copy (sync) was killed"), "{told}");
    // The next attempt does not hide it, and is stopped in good order.
    let mut slow = start();
    slow.signal(rustix::process::Signal::INT);
    slow.output(Duration::from_secs(60));
    assert_eq!(problems(&site, &[]), ["failing"]);
    site.dsync(["run", "copy"]).ok();
    assert_eq!(problems(&site, &[]), none());

    // A service that runs is well, whatever was before.
    job(&site, "serve", &[("command", "serve"), ("source", &source)]);
    let serve = || {
        let mut server = site.dsync(["run", "serve", "--socket"]).arg(site.socket("served")).start();
        server.wait_to_say("serving");
        server
    };
    serve().killed();
    assert_eq!(problems(&site, &["vm"]), ["failing"]);
    let mut server = serve();
    assert_eq!(problems(&site, &["vm"]), none());
    server.signal(rustix::process::Signal::TERM);
    server.output(Duration::from_secs(60));
    assert_eq!(problems(&site, &["vm"]), none());
}

#[test]
fn a_verification_of_a_job_is_judged_by_its_last_run() {
    let scene = Scene::synced_in_memory("a verification of a job", 4 * MIB);
    let (site, source) = (&scene.site, scene.image.display().to_string());
    let replica = scene.replica.display().to_string();
    job(site, "check", &[("command", "verify"), ("source", &source), ("destination", &replica)]);
    let run = |options: &[&str]| site.dsync(["run", "check"]).args(options);
    assert_eq!(problems(site, &[]), none());
    // One that compared nothing is none.
    let mut client = scene.client();
    client.write(0, &[7; 4 << 20]).expect("a write");
    client.close().expect("the end");
    assert!(run(&[]).ok().text().contains("compared 0 B"));
    let verified = || {
        let metrics = site.dsync(["status", "--prometheus"]).ok().text();
        sample(&metrics, "dsync_replica_last_verify_timestamp_seconds", &[])
    };
    assert_eq!(verified(), None);
    scene.sync(&[]).ok();
    run(&[]).ok();
    assert!(verified().is_some());
    run(&["--range", "1T:1M"]).code(4);
    assert_eq!(problems(site, &[]), ["failing"]);
    // What it finds is a problem of the replica, and is told once.
    scribble(&scene, &scene.replica);
    run(&[]).code(5);
    assert_eq!(problems(site, &["vm"]), ["differs"]);
    // A failure for another reason is not hidden by that.
    run(&["--range", "1T:1M"]).code(4);
    assert_eq!(problems(site, &["vm"]), ["differs", "failing"]);
    run(&[]).code(5);
    site.dsync(["verify", "--repair", "vm", &replica]).ok();
    assert_eq!(problems(site, &[]), none());
}

/// A replica into which half of a delta was merged is no moment of its source.
#[test]
fn a_merge_that_was_interrupted_is_reported() {
    let (site, mut random) = (Site::new(), Random::new("an interrupted merge"));
    let (image, copy) = (site.image("vm.raw", 16 * MIB), site.path("copy.raw"));
    site.sync(&image, &copy, &[]).ok();
    let whole = site.path(".copy.raw.dsync/journal-whole");
    let mut merging = loop {
        image::random(&image, 16 * MIB, &mut random);
        let mut sync = site.sync(&image, &copy, &[]).start();
        while !whole.exists() && sync.ended().is_none() {}
        sync.signal(rustix::process::Signal::STOP);
        if whole.exists() {
            break sync;
        }
        sync.kill();
    };
    let state = |state: &str| {
        let text = site.dsync(["status", "--prometheus"]).ok().text();
        sample(&text, "dsync_local_replica_state", &[&format!("state=\"{state}\"")]).expect("a state")
    };
    assert_eq!((problems(&site, &[]), state("exact")), (none(), 1.0), "it is at work");
    merging.kill();
    assert_eq!(problems(&site, &[]), ["interrupted"]);
    assert_eq!((state("exact"), state("interrupted")), (0.0, 1.0));
    let told = site.dsync(["status"]).ok().text();
    assert!(told.contains("a merge to it was interrupted") && told.contains("  interrupted  "), "{told}");
    site.dsync(["recover"]).arg(&copy).ok();
    assert_eq!((problems(&site, &[]), state("exact")), (none(), 1.0));
    site.sync(&image, &copy, &[]).ok();
    image::assert_equal(&image, &copy);
}

/// What cannot be run is not passed over.
#[test]
fn jobs_that_cannot_be_read_are_reported() {
    let site = Site::new();
    let image = site.image("vm.raw", MIB);
    site.sync(&image, &site.path("copy.raw"), &[]).ok();
    let lines = [("command", "sync"), ("source", "vm"), ("destination", "/nowhere.raw")];
    job(&site, "vm@far", &lines);
    assert_eq!(problems(&site, &[]), ["unreadable"]);
    std::fs::rename(site.path("conf/vm@far.conf"), site.path("conf/.vm.conf")).expect("another name");
    assert_eq!(problems(&site, &[]), none(), "it is hidden");
    // Its state directory is read where the rest is wrong.
    let elsewhere = site.path("elsewhere").display().to_string();
    job(&site, "wrong", &[("state-dir", &elsewhere), ("sauce", "vm")]);
    assert_eq!(problems(&site, &[]), none());
    assert_eq!(problems(&site, &["--state-dir", &elsewhere]), ["unreadable"]);
    std::fs::remove_dir_all(site.path("conf")).expect("a folder");
    std::fs::write(site.path("conf"), "no folder").expect("a file");
    assert_eq!(problems(&site, &[]), ["unreadable"]);
}

/// A replica of another host's disk may be called as the source of a job is.
#[test]
fn a_job_is_judged_although_a_replica_here_has_the_name_of_its_source() {
    let (scene, far) = (Scene::in_memory("the name of a source", MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    assert_eq!(problems(&far.site, &[]), none());
    job(&far.site, "vm-away", &[("command", "sync"), ("source", "vm"), ("destination", "away:/vm.raw")]);
    assert_eq!(problems(&far.site, &[]), ["never-copied"]);
}

/// What fails for want of room in the state directory is told all the same.
#[test]
fn a_full_state_directory_hides_no_failure() {
    let what = "a full state directory";
    let site = Site::new();
    if !need_root(what) {
        return;
    }
    std::fs::create_dir_all(site.state()).expect("a folder");
    let Some(_mounted) = small(&site.state(), "1m", what) else { return };
    let image = site.image("vm.raw", MIB);
    let (source, copy) = (image.display().to_string(), site.path("copies/vm.raw").display().to_string());
    std::fs::create_dir(site.path("copies")).expect("a folder");
    job(&site, "copy", &[("command", "sync"), ("source", &source), ("destination", &copy)]);
    site.dsync(["run", "copy"]).ok();
    assert_eq!(problems(&site, &[]), none());
    let fill = site.state().join("fill");
    std::fs::write(&fill, vec![1; 2 << 20]).expect_err("no room");
    std::fs::rename(site.path("copies"), site.path("away")).expect("another name");
    site.dsync(["run", "copy"]).output();
    assert_eq!(problems(&site, &[]), ["missing", "state-full"], "it is told once");
    std::fs::remove_file(&fill).expect("room");
    std::fs::rename(site.path("away"), site.path("copies")).expect("its name");
    assert_eq!(problems(&site, &[]), ["failing"]);
    site.dsync(["run", "copy"]).ok();
    assert_eq!(problems(&site, &[]), none());
}

/// What could not take over in an emergency is said before it.
#[test]
fn a_group_that_could_not_be_promoted_is_reported() {
    let site = Site::new();
    let images = ["data", "log"].map(|name| site.image(&format!("{name}.raw"), MIB));
    let folder = site.path("copies");
    std::fs::create_dir(&folder).expect("a folder");
    let paths = images.each_ref().map(|image| image.as_path());
    let server = site.serve(&paths, &["--group", "db"]);
    let sync = || site.dsync(["sync", "--group", "db"]).arg(&folder).ok();
    sync();
    assert_eq!(problems(&site, &[]), none());
    let copy = folder.join("data.raw");
    let mut client = server.client("data");
    client.write(0, &[7; 4096]).expect("a write");
    client.close().expect("the end");
    server.stop();
    site.dsync(["forget", "--group", "db"]).arg(&images[0]).ok();
    site.dsync(["sync"]).arg(&images[0]).arg(&copy).ok();
    let _server = site.serve(&paths, &["--group", "db"]);
    assert_eq!(problems(&site, &[]), ["apart"]);
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("data.raw is at epoch") && told.contains("and common epoch"), "{told}");
    sync();
    assert_eq!(problems(&site, &[]), none());
    // One of them alone.
    let together = format!("dsync promote --group {}", folder.display());
    site.dsync(["promote", "-n", "--force"]).arg(&copy).code(4).says(&[&together, "dsync forget --group db"]);
    site.dsync(["forget", "--group", "db"]).arg(&copy).ok();
    site.dsync(["promote", "--force"]).arg(&copy).ok();
    assert!(problems(&site, &[]).contains(&"apart".into()));
    let told = site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("data.raw was promoted, and ") && told.contains("log.raw was not"), "{told}");
    assert!(told.contains("make the promoted one a replica again"), "{told}");
    let refused = site.dsync(["sync", "--group", "db"]).arg(&folder).code(4);
    refused.says(&["one was promoted without the others", "but for ", "--save-there FOLDER"]);
    // Taken back, it is told how all of them are promoted.
    site.dsync(["demote"]).arg(&copy).ok();
    let all = format!("\"dsync promote --force --group {}\"", folder.display());
    site.dsync(["promote", "--group"]).arg(&folder).code(4).says(&[&all]);
}

/// A source takes it for up to date until something is written.
#[test]
fn a_replica_that_was_rewound_and_left_is_reported() {
    let mut scene = Scene::in_memory("a rewound replica", 8 * MIB);
    scene.sync(&["--keep-last", "5"]).ok();
    scene.change(3);
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
    scene.site.dsync(["rewind"]).arg(&scene.replica).args(["--to", "1"]).ok();
    assert_eq!(problems(&scene.site, &[]), ["rewound"]);
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
}

/// If the source's host is gone, the replica's alone can tell.
#[test]
fn a_replica_that_is_fetched_no_more_is_reported_by_its_own_host() {
    let (site, far) = (Site::new(), Far::new(RSH));
    let [image, other] = ["vm.raw", "other.raw"].map(|name| site.image(name, MIB));
    let copy = far.site.path("fetched.raw").display().to_string();
    let fetch = |image: &Path| {
        let source = format!("near:{}", image.display());
        job(
            &far.site,
            "fetch",
            &[("command", "sync"), ("source", &source), ("destination", &copy), ("rsh", RSH)],
        );
    };
    let run = || far.site.dsync(["run", "fetch"]).env("RSH_STATE", site.state());
    let aged = |age: &str| problems(&far.site, &["--max-age", age]);
    fetch(&image);
    run().env("RSH_CUT", "10").code(1);
    assert_eq!(problems(&far.site, &[]), ["never-copied"]);
    run().ok();
    assert_eq!((problems(&far.site, &[]), aged("1h")), (none(), none()));
    // The far host is not reached. What was tried only counts for nothing.
    run().env("RSH_CUT", "10").code(1);
    far.site.dsync(["run", "fetch", "-n"]).env("RSH_STATE", site.state()).ok();
    assert_eq!((problems(&far.site, &[]), aged("1h")), (vec!["failing".into()], vec!["failing".into()]));
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(aged("5s"), ["stale"]);
    let told = far.site.dsync(["status", "--check", "--max-age", "5s"]).code(1).text();
    assert!(told.contains("from near:") && told.contains("the last attempt failed"), "{told}");
    // Nothing was written, and it is up to date.
    run().ok();
    assert_eq!((problems(&far.site, &[]), aged("5s")), (none(), none()));
    // Of what the job names now, nothing was ever fetched.
    fetch(&other);
    run().code(4);
    assert_eq!(
        (problems(&far.site, &[]), copied(&far.site, "fetch")),
        (vec!["never-copied".into()], vec![false])
    );
    let told = far.site.dsync(["status", "--check"]).code(1).text();
    assert!(told.contains("none was ever complete") && told.contains("a copy of another source"), "{told}");
    fetch(&image);
    assert_eq!((problems(&far.site, &[]), copied(&far.site, "fetch")), (vec!["failing".into()], vec![true]));
    run().ok();
    assert_eq!(problems(&far.site, &[]), none());
    // Another job fetches another source to it, and has never run.
    let source = format!("near:{}", other.display());
    job(&far.site, "other", &[("command", "sync"), ("source", &source), ("destination", &copy)]);
    assert_eq!(
        (problems(&far.site, &[]), copied(&far.site, "other")),
        (vec!["never-copied".into()], vec![false])
    );
    std::fs::remove_file(far.site.path("conf/other.conf")).expect("a job");
    // One that was fetched by hand has no record.
    std::fs::remove_dir_all(far.site.state().join("jobs")).expect("the records");
    run().env("RSH_CUT", "10").code(1);
    assert_eq!((problems(&far.site, &[]), copied(&far.site, "fetch")), (vec!["failing".into()], vec![true]));
}

#[test]
fn blocks_that_the_source_could_not_read_are_reported() {
    let what = "a check of a replica that lacks unreadable blocks";
    if !need(&["losetup", "nbdkit", "nbdfuse"], what) || !need_root(what) {
        return;
    }
    let mut scene = Scene::in_memory(what, 8 * MIB);
    image::random(&scene.image, 8 * MIB, &mut scene.random);
    let Some(worn) = Worn::new(&scene.image) else {
        return skipped(what, "there are no loop devices over FUSE here");
    };
    scene.stop();
    scene.image = worn.device().to_path_buf();
    scene.start();
    worn.spoil(&[700 * BLOCK]);
    scene.sync(&["--keep-going"]).code(1);
    // The source's host and the replica's, which are one here, both know it.
    assert_eq!(problems(&scene.site, &[]), ["incomplete", "incomplete"]);
    let text = scene.site.dsync(["status", "--check"]).code(1).text();
    assert!(text.contains("4.00 KiB are not of its epoch"), "{text}");
    worn.spoil(&[]);
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
}

#[test]
fn a_tracked_disk_that_lost_its_record_is_reported() {
    let what = "a check of a tracked disk";
    if !need_root(what) || !need(&["losetup"], what) {
        return;
    }
    let site = Site::new();
    let disk = site.image("disk.raw", 8 * MIB);
    let Some(device) = Loop::new(&disk) else { return skipped(what, "loop devices are not allowed here") };
    let path = device.device().to_path_buf();
    let track = |action: &str| site.dsync(["track", action]).arg(&path).output();
    let added = track("add");
    let untrack = Untrack(&site, &path);
    if !got(if added.status.success() { Ok(()) } else { Err(added.stderr) }, what) {
        return;
    }
    let mine = path.to_str().expect("a path");
    let copy = site.path("copy.raw");
    let said = site.dsync(["status", "--check"]).output().text();
    assert!(!said.contains("tracking is lost"), "it was not synced yet: {said}");
    site.sync(&path, &copy, &[]).ok();
    image::scribble(&path, 0, BLOCK, &mut Random::new(what));
    site.sync(&path, &copy, &[]).ok();
    assert_eq!(problems(&site, &[mine]), none());
    // At rest, writes to a device are not recorded. Another record begins.
    track("remove");
    assert_eq!(problems(&site, &[mine]), ["tracking-lost"]);
    track("add");
    assert_eq!(problems(&site, &[mine]), ["tracking-lost"]);
    let said = site.dsync(["status", "--check", mine]).code(1).text();
    assert!(said.contains("was not synced since tracking began"), "{said}");
    site.sync(&path, &copy, &[]).ok();
    assert_eq!(problems(&site, &[mine]), none());
    // At rest, once that is synced, nobody has asked for a record.
    track("remove");
    site.sync(&path, &copy, &[]).ok();
    assert_eq!(problems(&site, &[mine]), none());
    track("add");
    assert_eq!(problems(&site, &[mine]), ["tracking-lost"]);
    site.sync(&path, &copy, &[]).ok();
    // Its disk is gone from under the tracker; another state directory of the host does not know it as a source.
    drop(device);
    let check =
        || site.dsync(["status", "--check"]).env("DSYNC_STATE_DIR", site.path("other")).output().text();
    let told = format!("tracking is lost: the tracker of {mine} ");
    assert!(check().contains(&told), "{}", check());
    drop(untrack);
    assert!(!check().contains(&told), "{}", check());
}

/// All files of a site, with their content.
fn files(folder: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("a folder").path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false if path.is_file() => {
                let content = std::fs::read(&path).expect("a file");
                found.push((path, content));
            }
            false => {}
        }
    }
    found.sort();
    found
}

#[test]
fn a_monitor_changes_nothing_and_is_never_in_the_way() {
    let mut scene = Scene::synced_in_memory("a monitor beside syncs", 8 * MIB);
    scene.stop();
    let before = files(scene.site.dir());
    for options in [&["--check"][..], &["--check", "--json"], &["--prometheus"]] {
        scene.site.dsync(["status"]).args(options).output();
    }
    assert!(before == files(scene.site.dir()), "a monitor changed something");
    scene.start();
    let (over, looks) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let site = &scene.site;
        let monitor = scope.spawn(|| {
            while !over.load(SeqCst) {
                assert_eq!(problems(site, &["--max-age", "1h"]), none());
                site.dsync(["status", "--prometheus"]).ok();
                looks.fetch_add(1, SeqCst);
            }
        });
        let until = Instant::now() + Duration::from_secs(8);
        while (Instant::now() < until || looks.load(SeqCst) < 4) && !monitor.is_finished() {
            let mut client = scene.client();
            client.write(0, &[7; 1 << 20]).expect("a write");
            client.close().expect("the end");
            scene.sync(&[]).ok();
        }
        over.store(true, SeqCst);
        monitor.join().expect("the monitor");
    });
    // While a sync holds the replica.
    scene.change(1000);
    let mut slow = scene.sync(&["--bwlimit", "1M"]).start();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(slow.ended().is_none(), "the sync did not last");
    assert_eq!(problems(&scene.site, &[]), none());
    slow.kill();
    scene.sync(&[]).ok();
    scene.equal();
}

#[test]
fn metrics_are_those_of_the_status() {
    let mut scene = Scene::synced_in_memory("metrics", 8 * MIB);
    let odd = scene.site.path("odd \"name\" \\ of\na replica.raw");
    scene.site.sync(&scene.image, &odd, &[]).ok();
    let blocks = scene.change(5).len() as u64;
    let metrics = || scene.site.dsync(["status", "--prometheus"]).ok().text();
    let (text, copy) = (metrics(), format!("replica=\"{}\"", scene.replica.display()));
    let source = format!("source=\"{}\"", scene.image.display());
    assert_eq!(sample(&text, "dsync_source_epoch", &[&source]), Some(1.0), "{text}");
    assert_eq!(sample(&text, "dsync_source_tracking", &[&source]), Some(1.0));
    assert_eq!(sample(&text, "dsync_replica_epoch", &[&source, &copy]), Some(1.0), "{text}");
    let success = sample(&text, "dsync_replica_last_success_timestamp_seconds", &[&copy]).expect("a time");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a time");
    assert!((now.as_secs_f64() - success).abs() < 60.0, "{text}");
    let escaped = "odd \\\"name\\\" \\\\ of\\na replica.raw\"";
    let lacks = sample(&text, "dsync_replica_lacks_bytes", &[escaped]).expect("bytes");
    assert_eq!(lacks, (blocks * BLOCK) as f64, "{text}");
    for (state, value) in [("exact", 1.0), ("changed", 0.0)] {
        let labels = [copy.as_str(), &format!("state=\"{state}\"")];
        assert_eq!(sample(&text, "dsync_local_replica_state", &labels), Some(value), "{text}");
    }
    assert_eq!(sample(&text, "dsync_local_replica_unsure_bytes", &[&copy]), Some(0.0));
    assert_eq!(sample(&text, "dsync_local_replica_ahead", &[&copy]), Some(0.0));
    assert_eq!(sample(&text, "dsync_status_errors", &[]), Some(0.0));
    if let Some(promtool) = promtool("the metrics, by promtool") {
        let checked = Run::new(promtool).args(["check", "metrics"]).input(text.into_bytes()).ok();
        assert!(checked.text().is_empty() && checked.stderr.is_empty(), "{checked}");
    }
    // What is lost shows, and what a replica lacks is not known then.
    scene.stop();
    scribble(&scene, &scene.image);
    let text = scene.site.dsync(["status", "--prometheus"]).ok().text();
    assert_eq!(sample(&text, "dsync_source_tracking", &[&source]), Some(0.0), "{text}");
    assert_eq!(sample(&text, "dsync_replica_lacks_bytes", &[&copy]), None, "{text}");
    // A source that cannot be read is counted, and does not hide the others.
    let other = scene.site.image("other.raw", MIB);
    scene.site.sync(&other, &scene.site.path("copy of other.raw"), &[]).ok();
    let sources = std::fs::read_dir(scene.site.state().join("sources")).expect("sources").flatten();
    let about = sources
        .map(|entry| entry.path().join("source"))
        .find(|about| std::fs::read_to_string(about).is_ok_and(|text| text.contains("other.raw")));
    let about = about.expect("its state");
    let said = std::fs::read(&about).expect("its state");
    // Its folder does not say of which disk it is.
    std::fs::remove_file(&about).expect("a file");
    assert_eq!(problems(&scene.site, &[]), ["tracking-lost", "unreadable"]);
    std::fs::write(&about, said).expect("a file");
    assert_eq!(problems(&scene.site, &[]), ["tracking-lost"]);
    std::fs::write(&about, "nonsense").expect("a file");
    let output = scene.site.dsync(["status", "--prometheus"]).code(1);
    assert_eq!(sample(&output.text(), "dsync_status_errors", &[]), Some(1.0), "{output}");
    assert_eq!(sample(&output.text(), "dsync_source_tracking", &[&source]), Some(0.0), "{output}");
    assert_eq!(problems(&scene.site, &[]), ["tracking-lost", "unreadable"]);
}

#[test]
fn nothing_to_watch_is_not_well() {
    let site = Site::new();
    assert_eq!(problems(&site, &[]), ["nothing-known"]);
    let elsewhere = site.path("elsewhere").display().to_string();
    for (state, says) in
        [(elsewhere, "does not exist"), (site.state().display().to_string(), "state directory")]
    {
        let checked = site.dsync(["status", "--check", "--state-dir", &state]).code(3);
        assert!(
            checked.text().contains("nothing is watched") && checked.text().contains(&state),
            "{checked}"
        );
        assert!(checked.text().contains(says), "{checked}");
    }
    let disk = site.image("vm.raw", MIB);
    site.sync(&disk, &site.path("copy.raw"), &[]).ok();
    assert_eq!(problems(&site, &[]), none());
}

#[test]
fn bad_usage_is_told_from_a_problem() {
    let site = Site::new();
    for words in [
        &["--max-age", "1h"][..],
        &["--check", "--max-age", "soon"],
        &["--check", "--prometheus"],
        &["--prometheus", "vm"],
        &["--prometheus", "--json"],
    ] {
        site.dsync(["status"]).args(words).code(2);
    }
    site.dsync(["status", "--check", "nobody"]).code(2).says(&["nobody"]);
}

#[test]
fn a_mirror_keeps_its_replica_from_being_out_of_date() {
    let mut scene = Scene::in_memory("the age of a mirror", 4 * MIB);
    let mirror = scene.site.dsync(["mirror", "--epoch", "1h"]).arg(&scene.image).arg(&scene.replica);
    let mut mirror = mirror.start();
    mirror.wait_to_say("mirroring to");
    let stale = |site: &Site| problems(site, &["--max-age", "4s"]);
    let until = Instant::now() + Duration::from_secs(6);
    // Longer than that age after the epoch.
    while Instant::now() < until {
        scene.change(3);
        std::thread::sleep(Duration::from_millis(200));
    }
    // Unless its machine stands still for longer than that.
    let is_up_to_date = || dsync_tests::until("it is up to date", || stale(&scene.site) == none());
    is_up_to_date();
    // At rest it stays so, although there are blocks that the epoch has not.
    std::thread::sleep(Duration::from_secs(5));
    is_up_to_date();
    let status = scene.site.dsync(["status", "vm"]).ok().text();
    assert!(status.contains("by a mirror"), "{status}");
    mirror.killed();
    scene.change(3);
    dsync_tests::until("it is out of date", || stale(&scene.site) == ["interrupted", "stale"]);
}

/// The rows of the last whole page of a watch, or of a table, without the marks of problems.
fn rows(text: &str) -> Vec<Vec<String>> {
    let table = &text[text.rfind("NAME").unwrap_or_else(|| panic!("a table: {text}"))..];
    let words = |line: &str| {
        let cells = line.trim_start_matches(['!', ' ']).split("  ").map(str::trim);
        cells.filter(|cell| !cell.is_empty()).map(str::to_owned).collect()
    };
    table.lines().skip(1).take_while(|line| !line.is_empty()).map(words).collect()
}

#[test]
fn a_status_is_a_table_with_problems_first() {
    let mut scene = Scene::synced_in_memory("a table", 16 * MIB);
    let second = scene.site.image("other.raw", 8 * MIB);
    let copy = scene.site.path("copy.raw");
    scene.site.sync(&second, &copy, &[]).ok();
    scene.change(10);
    let shown = scene.site.dsync(["status"]).ok().text();
    assert!(shown.starts_with("NAME "), "nothing is wrong: {shown}");
    for head in ["ROLE", "STATE", "BEHIND", "SIZE", "WHERE"] {
        assert!(shown.lines().next().is_some_and(|line| line.contains(head)), "{head}: {shown}");
    }
    let of = |place: &Path| {
        let found = rows(&shown).into_iter().find(|row| row.last().unwrap() == place.to_str().unwrap());
        found.unwrap_or_else(|| panic!("{}: {shown}", place.display()))
    };
    assert_eq!(of(&scene.image)[..5], ["vm", "source", "served", "-", "16.0 MiB"]);
    let replica = of(&scene.replica);
    assert_eq!(replica[..3], ["vm", "replica", "synced"]);
    assert!(replica[3].ends_with(" s, 40.0 KiB"), "{shown}");
    assert_eq!(of(&copy)[..4], ["other", "replica", "up to date", "-"]);
    assert!(!shown.contains("blocks of") && shown.lines().count() == 5, "{shown}");
    // Of one disk, and with -v, all is told.
    scene.site.dsync(["status", "-v"]).ok().text().find("blocks of").expect("prose");
    scene.site.dsync(["status", "vm"]).ok().text().find("blocks of").expect("prose");
    // A problem is told first, and its row is the first.
    scribble(&scene, &copy);
    let shown = scene.site.dsync(["status"]).ok().text();
    assert!(shown.starts_with("! replica ") && shown.contains(" was changed by another program"), "{shown}");
    let first = rows(&shown).remove(0);
    assert!(shown.contains("\n! other ") && first[2] == "changed", "{shown}");
}

#[test]
fn a_replica_shows_where_its_source_is() {
    let (far, scene) = (Far::new(RSH), Scene::in_memory("where a source is", 8 * MIB));
    far.sync(&scene, &[], None).ok();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let shown = far.site.dsync(["status"]).ok().text();
    let replica = rows(&shown).remove(0);
    assert_eq!(replica[1..3], ["replica", "consistent"], "{shown}");
    // On this host the two share its name, which is left out then.
    assert_eq!(replica[5], format!("{} from {}", far.replica().display(), scene.image.display()), "{shown}");
    let detail = far.site.dsync(["status"]).arg(far.replica()).ok().text();
    assert!(detail.contains(&format!("its source is {}", scene.image.display())), "{detail}");
    let noted = far.replica().with_file_name(".vm.raw.dsync/origin");
    let noted = std::fs::read_to_string(noted).expect("the origin");
    assert!(noted.contains(&format!("{host}:{}", scene.image.display())), "{noted}");
}

/// The screens of a program on a terminal of this size, as `script` records them.
fn on_terminal(site: &Site, (rows, columns): (u32, u32), words: &str) -> String {
    let shell = format!(
        "stty rows {rows} cols {columns}; exec timeout -s INT 3 {} {words}",
        dsync_tests::site::binary().display()
    );
    let run = site.run("script".as_ref()).args(["-qec", &shell, "/dev/null"]);
    run.output().text()
}

#[test]
fn a_watch_fits_its_terminal_and_never_scrolls() {
    let what = "a watch on a terminal";
    if !need(&["script", "stty", "timeout"], what) {
        return;
    }
    let scene = Scene::synced_in_memory(what, 4 * MIB);
    for at in 0..12 {
        let copy = scene.site.path(&format!("a-folder-with-a-long-name/copy-{at}.raw"));
        std::fs::create_dir_all(copy.parent().unwrap()).expect("a folder");
        scene.site.sync(&scene.image, &copy, &[]).ok();
    }
    let shown = on_terminal(&scene.site, (10, 60), "status --watch=1");
    let screens: Vec<&str> = shown.split("\x1b[H").skip(1).collect();
    assert!(screens.len() >= 2, "{shown:?}");
    for screen in &screens[..screens.len() - 1] {
        let lines: Vec<&str> = screen.split('\n').map(|line| line.trim_end_matches('\r')).collect();
        // The cursor is in the last row.
        assert_eq!(lines.len(), 10, "{screen:?}");
        let width = |line: &&str| line.replace("\x1b[K", "").replace("\x1b[J", "").chars().count();
        assert!(lines.iter().map(width).all(|width| width <= 60), "{screen:?}");
        assert!(lines[8].contains("more lines") && lines[2].starts_with("NAME "), "{screen:?}");
    }
    assert!(!shown.contains("\x1b[3J"), "what was on the terminal before is not lost");
}

#[test]
fn a_watch_shows_problems_first_and_what_is_at_work() {
    let mut scene = Scene::synced_in_memory("a watch", 16 * MIB);
    scene.change(1500);
    std::thread::sleep(Duration::from_millis(2100));
    let mut slow = scene.sync(&["--bwlimit", "256K"]).start();
    let mut watch = scene.site.dsync(["status", "--watch=1", "--max-age", "1s"]).start();
    watch.wait_to_say("! replica is out of date: ");
    watch.wait_to_say("! vm    replica  stale");
    let said = watch.stdout_so_far();
    assert!(said.find("! replica is").unwrap() < said.find("NAME").unwrap(), "{said}");
    assert!(!said.contains('\x1b'), "it is not a terminal");
    let mut calm = scene.site.dsync(["status", "--watch=1"]).start();
    calm.wait_to_say("  sync ");
    calm.wait_to_say("KiB/s  ");
    // What is killed is not at work.
    slow.kill();
    calm.wait_to_say("  synced  ");
    calm.kill();
    scene.sync(&[]).ok();
    watch.wait_to_say("no problems\n");
    watch.wait_to_say("  up to date  ");
    watch.signal(rustix::process::Signal::INT);
    let ended = watch.output(Duration::from_secs(10));
    assert!(ended.status.code() == Some(130) && ended.stderr.is_empty(), "{ended}");
    scene.site.dsync(["status", "--watch", "--check"]).code(2);
    scene.site.dsync(["status", "--max-age", "1h"]).code(2).says(&["--check or --watch"]);
}

/// What was kept could not be kept any more: a monitor says so long after the sync that warned of it.
#[test]
fn a_past_that_was_given_up_is_reported() {
    let what = "a past that is given up";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("given up", 8 * MIB, "15m", what) else {
        return;
    };
    scene.fill();
    scene.sync(&["--keep-last", "9"]).ok();
    scene.change(100);
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
    scene.stop();
    let mut large = scene.random.bytes(5 << 20);
    large.extend(std::fs::read(&scene.replica).expect("the replica").split_off(5 << 20));
    std::fs::write(&scene.image, large).expect("another content");
    assert!(scene.sync(&[]).ok().text().contains("its past is given up"));
    scene.equal();
    let told = scene.site.dsync(["status", "--check"]).arg(&scene.replica).code(1).text();
    assert!(told.contains("past is given up") && told.contains("none is kept since"), "{told}");
    assert!(told.contains("until the next sync that brings changes"), "{told}");
    // Kept again: it is still to be known for a day.
    image::scribble(&scene.image, MIB, BLOCK, &mut scene.random);
    scene.sync(&[]).ok();
    let told = scene.site.dsync(["status", "--check"]).arg(&scene.replica).code(1).text();
    assert!(told.contains("past is given up") && !told.contains("none is kept since"), "{told}");
    assert!(told.contains("a sync with another --keep or --keep-last than before ends it"), "{told}");
    // Whoever asks for something else has seen it.
    scene.sync(&["--keep-last", "2"]).ok();
    assert!(!problems(&scene.site, &[]).contains(&"past-given-up".to_owned()));
}

/// Moments that are dropped to make room are missed when they are needed.
#[test]
fn a_past_that_is_shorter_than_asked_for_is_reported() {
    let what = "a past without room";
    let Some((mut scene, _mounted)) = Scene::with_small_replica("short past", 8 * MIB, "24m", what) else {
        return;
    };
    scene.fill();
    scene.sync(&["--keep-last", "5"]).ok();
    let dropped = (0..5).any(|at| {
        let bytes = scene.random.bytes(3 << 20);
        let mut client = scene.client();
        client.write(at * MIB, &bytes).expect("a write");
        client.close().expect("the end");
        assert_eq!(problems(&scene.site, &[]), none());
        format!("{}", scene.sync(&[]).ok()).contains("dropped")
    });
    assert!(dropped, "there was room for all of them");
    assert_eq!(problems(&scene.site, &[]), ["past-short"]);
    // It stays so, and ends with what is asked for.
    scene.sync(&[]).ok();
    assert_eq!(problems(&scene.site, &[]), ["past-short"]);
    scene.sync(&["--keep-last", "1"]).ok();
    assert_eq!(problems(&scene.site, &[]), none());
}

/// An epoch that ends while a monitor looks is not missing from what it finds.
#[test]
fn what_a_replica_lacks_is_found_while_epochs_end() {
    let scene = Scene::synced_in_memory("a monitor while epochs end", 16 * MIB);
    let mut client = scene.client();
    let scene = &scene;
    let (other, name) = (scene.site.path("other.raw"), scene.replica.display().to_string());
    let (written, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let look = || {
        let shown = scene.site.dsync(["status", "--json"]).arg(&scene.image).ok().json();
        let sources = shown.iter().filter_map(|line| line["replicas"].as_array());
        let ours = sources.flatten().find(|replica| replica["replica"] == name.as_str());
        ours.unwrap_or_else(|| panic!("{shown:?}"))["blocks"].as_u64().expect("what it lacks")
    };
    let looks = || {
        while !ended.load(SeqCst) {
            let least = written.load(SeqCst);
            let found = look();
            assert!(found >= least, "of {least} blocks {found}");
        }
    };
    std::thread::scope(|scope| {
        (0..3).for_each(|_| drop(scope.spawn(looks)));
        for block in 0..80 {
            client.write(block * BLOCK, &[1; BLOCK as usize]).expect("a write");
            written.store(block + 1, SeqCst);
            scene.site.sync(&scene.image, &other, &[]).ok();
        }
        ended.store(true, SeqCst);
    });
}

/// A server that ends while a monitor asks it is no problem of its source.
#[test]
fn a_server_that_ends_while_it_is_asked_is_not_a_problem() {
    let mut scene = Scene::synced("a monitor while a server ends", MIB);
    scene.stop();
    let sources = std::fs::read_dir(scene.site.state().join("sources")).expect("sources").flatten();
    let place = sources.map(|entry| entry.path()).find(|path| path.is_dir()).expect("a source");
    for options in [&["--json"][..], &["--check"], &["--prometheus"]] {
        let (socket, control) = (scene.site.socket("ends"), place.join("control"));
        let listener = UnixListener::bind(&socket).expect("a socket");
        std::fs::rename(&socket, &control).expect("the place of a server");
        let ends = std::thread::spawn(move || {
            let (asks, _) = listener.accept().expect("a question");
            std::fs::remove_file(&control).expect("a socket");
            drop((listener, asks));
        });
        let told = scene.site.dsync(["status"]).args(options).ok().text();
        assert!(!told.contains("cannot read"), "{told}");
        ends.join().expect("a server that ended");
    }
}

/// A server that hangs is a problem of its source, and holds no monitor up.
#[test]
fn a_server_that_hangs_is_a_problem() {
    let mut scene = Scene::synced_in_memory("a monitor while a server hangs", MIB);
    let server = scene.server.as_mut().expect("a server").process().pid();
    let signal = |signal| rustix::process::kill_process(server, signal).expect("the server");
    signal(rustix::process::Signal::STOP);
    let forms = [&["status", "--check"][..], &["status", "--prometheus"], &["status"]];
    let asked = forms.map(|form| scene.site.dsync(form).start());
    for run in asked {
        let told = run.output(Duration::from_secs(25));
        assert_eq!(told.status.code(), Some(1), "{told}");
        assert!(format!("{told}").contains("has not answered for 10 seconds"), "{told}");
    }
    signal(rustix::process::Signal::CONT);
    assert_eq!(problems(&scene.site, &[]), none());
}
