//! `--bwlimit` by the hour, changed while a command runs, and the pause of a mirror; and what gives way to a guest.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dsync_tests::{Background, Scene};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// The time of the day in UTC, so many minutes from now.
fn time(minutes: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_secs() as i64;
    let at = (now / 60 + minutes).rem_euclid(24 * 60);
    format!("{:02}:{:02}", at / 60, at % 60)
}

/// Hours that hold the present, or not.
fn hours(present: bool) -> String {
    let (from, to) = if present { (-120, 120) } else { (120, 240) };
    format!("{}-{}", time(from), time(to))
}

/// Writes the job of a mirror.
fn job(scene: &Scene, limit: &str) {
    let folder = scene.site.path("conf");
    std::fs::create_dir_all(&folder).expect("a folder");
    let replica = scene.replica.display();
    let text =
        format!("command = mirror\nsource = vm\ndestination = {replica}\nrpo = 1s\nbwlimit = {limit}\n");
    std::fs::write(folder.join("vm.conf"), text).expect("a job");
}

fn wait_to_warn(process: &mut Background, words: &str) {
    let until = Instant::now() + Duration::from_secs(20);
    while !process.stderr_so_far().contains(words) {
        assert!(
            process.ended().is_none() && Instant::now() < until,
            "no '{words}': {}",
            process.stderr_so_far()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// True if the replica becomes equal to the source within the time.
fn arrives(scene: &Scene, within: Duration) -> bool {
    let until = Instant::now() + within;
    let is_equal =
        || std::fs::read(&scene.image).expect("a disk") == std::fs::read(&scene.replica).expect("a disk");
    while !is_equal() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

fn write(scene: &Scene, byte: u8) {
    let mut random = scene.random.clone();
    let content: Vec<u8> = random.bytes(2 << 20).iter().map(|old| old ^ byte).collect();
    let mut client = scene.client();
    client.write(0, &content).expect("a write");
    client.close().expect("the end");
}

#[test]
fn a_limit_holds_in_its_hours_alone() {
    let scene = Scene::synced("hours", 8 * MIB);
    let sync = |limit: &str, zone: &str| {
        let began = Instant::now();
        scene.sync(&["--bwlimit", limit]).env("TZ", zone).ok();
        began.elapsed()
    };
    let slow = Duration::from_millis(1500);
    write(&scene, 1);
    assert!(sync(&format!("{}=1M,else=off", hours(true)), "UTC") > slow);
    write(&scene, 2);
    let fast = sync(&format!("{}=1M", hours(false)), "UTC");
    assert!(fast < slow, "{fast:?}");
    write(&scene, 3);
    assert!(sync(&format!("{}=off,else=1M", hours(false)), "UTC") > slow);
    // By local time: three hours east of UTC the hours are those that are not now.
    write(&scene, 4);
    let fast = sync(&format!("{}=1M", hours(true)), "EAST-3");
    assert!(fast < slow, "{fast:?}");
    scene.equal();
    for (limit, says) in [
        (format!("{}=pause", hours(false)), "only a mirror can pause"),
        ("pause".to_owned(), "pause needs hours"),
        ("8-18=1M".to_owned(), "08:00-18:00=10M"),
        ("0".to_owned(), "above zero"),
    ] {
        scene.sync(&["--bwlimit", &limit]).code(2).says(&[says]);
    }
    let pull = scene.site.dsync(["sync", "near:/vm.raw", "copy.raw", "--bwlimit", "08:00-18:00=1M"]);
    pull.code(2).says(&["near sends", "give one rate"]);
}

#[test]
fn a_limit_is_changed_and_a_mirror_paused_while_it_runs() {
    let scene = Scene::synced("a changed limit", 8 * MIB);
    job(&scene, "100K");
    let mut mirror = scene.site.dsync(["run", "vm"]).env("TZ", "UTC").start();
    mirror.wait_to_say("mirroring to");
    write(&scene, 1);
    assert!(!arrives(&scene, Duration::from_secs(4)), "2 MiB at 100 KiB/s");
    // What is wrong changes nothing.
    job(&scene, "quick");
    mirror.signal(Signal::HUP);
    wait_to_warn(&mut mirror, "--bwlimit stays as it is: ");
    assert!(
        mirror.stderr_so_far().contains("vm.conf:5: invalid value 'quick'"),
        "{}",
        mirror.stderr_so_far()
    );
    job(&scene, "off");
    mirror.signal(Signal::HUP);
    wait_to_warn(&mut mirror, "--bwlimit: no limit now");
    assert!(arrives(&scene, Duration::from_secs(5)), "{}", mirror.stderr_so_far());

    job(&scene, &format!("{}=pause,else=5M", hours(true)));
    mirror.signal(Signal::HUP);
    wait_to_warn(&mut mirror, "--bwlimit: paused now");
    std::thread::sleep(Duration::from_millis(500));
    write(&scene, 2);
    assert!(!arrives(&scene, Duration::from_secs(2)), "it does not pause");
    // Others can use the replica meanwhile.
    scene.site.dsync(["recover"]).arg(&scene.replica).ok();
    job(&scene, &format!("{}=5M,else=off", hours(true)));
    mirror.signal(Signal::HUP);
    wait_to_warn(&mut mirror, "--bwlimit: at most 5.00 MiB/s now");
    assert!(arrives(&scene, Duration::from_secs(10)), "{}", mirror.stderr_so_far());
    mirror.kill();
}

#[test]
fn a_mirror_that_begins_in_a_pause_says_so_and_a_hang_up_ends_nothing() {
    let mut scene = Scene::synced("a pause at the beginning", 8 * MIB);
    let limit = format!("{}=pause", hours(true));
    let mirror = scene.site.dsync(["mirror", "vm"]).arg(&scene.replica);
    let mut mirror = mirror.args(["--bwlimit", &limit]).env("TZ", "UTC").start();
    wait_to_warn(&mut mirror, "--bwlimit: paused now, until ");
    let mut watch = scene.site.dsync(["status", "--watch=1"]).start();
    watch.wait_to_say("paused by --bwlimit");
    watch.kill();
    mirror.signal(Signal::HUP);
    scene.server.as_mut().expect("a server").process().signal(Signal::HUP);
    std::thread::sleep(Duration::from_millis(300));
    assert!(mirror.ended().is_none(), "{}", mirror.stderr_so_far());
    write(&scene, 1);
    mirror.kill();
}

#[test]
fn a_paused_mirror_that_is_stopped_brings_what_was_written() {
    let scene = Scene::synced("a stop in a pause", 8 * MIB);
    job(&scene, "off");
    let mut mirror = scene.site.dsync(["run", "vm"]).env("TZ", "UTC").start();
    mirror.wait_to_say("mirroring to");
    job(&scene, &format!("{}=pause", hours(true)));
    mirror.signal(Signal::HUP);
    wait_to_warn(&mut mirror, "--bwlimit: paused now");
    std::thread::sleep(Duration::from_millis(500));
    write(&scene, 3);
    mirror.signal(Signal::TERM);
    let ended = mirror.output(Duration::from_secs(30));
    assert!(ended.status.success(), "{ended}");
    scene.equal();
}

#[test]
fn a_polite_sync_gives_way_to_a_guest_that_writes() {
    let scene = Scene::synced("polite", 16 * MIB);
    let waited = |options: &[&str]| scene.sync(options).ok().summary()["reads_waited"].as_u64();
    write(&scene, 1);
    assert_eq!(waited(&["--polite"]), Some(0), "its guest is at rest");
    let writes = AtomicBool::new(true);
    let (polite, others) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = scene.client();
            for at in (0..16 * MIB).step_by(4096).cycle().take_while(|_| writes.load(Relaxed)) {
                client.write(at, &[7; 4096]).expect("a write");
            }
            client.close().expect("the end");
        });
        let until = Instant::now() + Duration::from_secs(15);
        let (mut polite, mut others) = (0, 0);
        while polite == 0 && Instant::now() < until {
            polite += waited(&["--polite"]).unwrap_or(0);
            others += waited(&[]).unwrap_or(u64::MAX);
        }
        writes.store(false, Relaxed);
        (polite, others)
    });
    assert!(polite > 0 && others == 0, "{polite} and {others} reads waited");
}
