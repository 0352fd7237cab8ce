//! `--metrics`: what a scrape gets, what each metric measures, and clients that mean harm.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use dsync_tests::far::Far;
use dsync_tests::image::{self, BLOCK};
use dsync_tests::tracked::Tracked;
use dsync_tests::{Run, Scene, Site, promtool, repository, sample, until};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const RSH: &str = env!("CARGO_BIN_EXE_rsh");

/// The body that a request gets.
fn get(mut to: impl Read + Write) -> String {
    to.write_all(b"GET /metrics HTTP/1.1\r\nHost: dsync\r\n\r\n").expect("a request");
    let mut answer = String::new();
    to.read_to_string(&mut answer).expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("version=0.0.4"), "{head}");
    body.to_owned()
}

/// The metrics that the manual describes.
fn documented() -> Vec<String> {
    let path = repository().join("docs/monitoring.md");
    let text = std::fs::read_to_string(path).expect("the manual");
    let rows = text.lines().filter(|line| line.starts_with("| `dsync_"));
    let names = rows.flat_map(|row| row.split('|').nth(1).expect("a name").split(", "));
    names.map(|name| name.trim().trim_matches('`').to_owned()).collect()
}

/// Metrics before and after something happened, and which of those in the manual were seen to move.
struct Watch<'a> {
    site: &'a Site,
    seen: std::collections::BTreeSet<&'static str>,
}

impl Watch<'_> {
    fn value(&self, name: &str, labels: &[&str]) -> Option<f64> {
        sample(&self.site.dsync(["status", "--prometheus"]).output().text(), name, labels)
    }

    /// Breaks something, and fails unless the metric tells.
    fn moves(
        &mut self,
        name: &'static str,
        labels: &[&str],
        act: impl FnOnce(),
    ) -> (Option<f64>, Option<f64>) {
        let before = self.value(name, labels);
        act();
        let after = self.value(name, labels);
        assert_ne!(before, after, "{name} {labels:?} did not move");
        self.seen.insert(name);
        (before, after)
    }
}

#[test]
fn each_metric_moves_with_what_it_measures() {
    let (mut scene, far) = (Scene::new("what metrics measure", 16 * MIB), Far::new(RSH));
    far.sync(&scene, &[], None).ok();
    let copy = far.replica();
    let (near, there) = (Site::state(&scene.site), Site::state(&far.site));
    assert_ne!(near, there);
    let sync = |options: &[&str]| far.sync(&scene, options, None);
    let write = |block: u64| scene.client().write(block * BLOCK, &[7; BLOCK as usize]).expect("a write");
    let mut here = Watch { site: &scene.site, seen: Default::default() };
    let mut far_side = Watch { site: &far.site, seen: Default::default() };

    here.moves("dsync_replica_lacks_bytes", &[], || write(1));
    std::thread::sleep(Duration::from_millis(1100));
    here.moves("dsync_replica_lag_seconds", &[], || {
        sync(&[]).ok();
    });
    assert_eq!(here.value("dsync_replica_lag_seconds", &[]), Some(0.0));
    for name in [
        "dsync_source_epoch",
        "dsync_replica_epoch",
        "dsync_replica_syncs_total",
        "dsync_replica_sent_bytes_total",
        "dsync_replica_last_success_timestamp_seconds",
    ] {
        std::thread::sleep(Duration::from_millis(250));
        here.moves(name, &[], || {
            std::thread::sleep(Duration::from_millis(850));
            write(2);
            sync(&[]).ok();
        });
    }
    for name in ["dsync_local_replica_epoch", "dsync_local_replica_committed_timestamp_seconds"] {
        far_side.moves(name, &[], || {
            std::thread::sleep(Duration::from_millis(1050));
            write(3);
            sync(&[]).ok();
        });
    }

    // Failures: the other host is away, and the line is cut.
    let away = || scene.site.dsync(["sync", "vm", &format!("unreachable:{}", copy.display())]);
    here.moves("dsync_replica_failures_total", &[], || {
        write(4);
        let run = sync(&[]).env("RSH_CUT", "100");
        assert!(!run.output().status.success());
    });
    let failures = here.value("dsync_replica_failures_total", &[]);
    assert!(!away().args(["--rsh", RSH]).output().status.success());
    assert_eq!(here.value("dsync_replica_failures_total", &[]), failures, "another destination");
    let mut mirror = far.run("mirror", &scene, &[], None).start();
    here.moves("dsync_replica_work", &["command=\"mirror\""], || {
        mirror.wait_to_say("mirroring to");
        for block in 0..20 {
            write(block);
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let recover = || {
        // Until its side has noticed the end of the line.
        let until = Instant::now() + Duration::from_secs(30);
        while !far.site.dsync(["recover"]).arg(&copy).output().status.success() {
            assert!(Instant::now() < until, "the replica is not released");
        }
    };
    far_side.moves("dsync_local_replica_ahead", &[], || {
        mirror.kill();
        recover();
    });
    far_side.moves("dsync_local_replica_ahead", &[], || {
        sync(&[]).ok();
    });
    assert_eq!(here.value("dsync_replica_work", &["command=\"mirror\""]), Some(0.0), "a dead one");

    // Verification.
    let verify = |options: &[&str], code: i32| far.run("verify", &scene, options, None).code(code);
    here.moves("dsync_replica_last_verify_timestamp_seconds", &[], || drop(verify(&[], 0)));
    assert_eq!(here.value("dsync_replica_last_verify_differing_bytes", &[]), Some(0.0));
    std::thread::sleep(Duration::from_millis(50));
    far_side.moves("dsync_local_replica_state", &["state=\"changed\""], || {
        image::scribble(&copy, MIB, BLOCK, &mut scene.random.clone());
    });
    here.moves("dsync_replica_last_verify_differing_bytes", &[], || drop(verify(&[], 5)));
    here.moves("dsync_replica_last_verify_differing_bytes", &[], || drop(verify(&["--repair"], 0)));

    // Unsure bytes: a mirror that was killed within an epoch.
    let mut mirror = far.run("mirror", &scene, &["--epoch", "1h"], None).start();
    mirror.wait_to_say("mirroring to");
    far_side.moves("dsync_local_replica_unsure_bytes", &[], || {
        write(25);
        until("a batch arrives", || image::first_difference(&scene.image, &copy).is_none());
        mirror.kill();
        recover();
    });
    sync(&[]).ok();

    // A job whose copy never began.
    here.moves("dsync_job_copied", &[], || {
        let jobs = scene.site.path("conf");
        std::fs::create_dir_all(&jobs).expect("a folder");
        let job = "command = sync\nsource = vm\ndestination = far:/nowhere\n";
        std::fs::write(jobs.join("new.conf"), job).expect("a job");
    });
    here.moves("dsync_job_failing", &[], || {
        scene.site.dsync(["run", "new", "--rsh", "false"]).code(1);
    });

    // Roles and terms.
    drop(scene.server.take().expect("a server").stop());
    let to = format!("far:{}", copy.display());
    let demote = scene.site.dsync(["demote"]).arg(&scene.image).arg(to).args(["--rsh", RSH]);
    let demote = demote.env("RSH_STATE", far.site.state());
    far_side.moves("dsync_local_replica_role", &["role=\"released\""], || {
        demote.ok();
    });
    far_side.moves("dsync_source_term", &[], || {
        far.site.dsync(["promote"]).arg(&copy).ok();
    });
    let back = format!("near:{}", scene.image.display());
    here.moves("dsync_local_replica_term", &[], || {
        let sync = far.site.dsync(["sync"]).arg(&copy).arg(back).args(["--rsh", RSH]);
        sync.env("RSH_STATE", scene.site.state()).ok();
    });
    // What is lost, and what cannot be read.
    far_side.moves("dsync_source_tracking", &[], || {
        std::thread::sleep(Duration::from_millis(50));
        image::scribble(&copy, MIB, BLOCK, &mut scene.random.clone());
    });
    far_side.moves("dsync_status_errors", &[], || {
        let sources = far.site.state().join("sources");
        let source = std::fs::read_dir(sources).expect("sources").flatten().find(|e| e.path().is_dir());
        std::fs::write(source.expect("one").path().join("source"), "nonsense").expect("a file");
    });
    here.seen.append(&mut far_side.seen);
    // That of a freeze needs a disk that is tracked in the kernel.
    let rest: Vec<String> =
        documented().into_iter().filter(|name| !here.seen.contains(name.as_str())).collect();
    assert_eq!(rest, ["dsync_replica_freeze_seconds"]);
    assert!(documented().len() > 18, "the manual was not read");
}

#[test]
fn a_freeze_is_measured() {
    let what = "the metric of a freeze";
    let Some(tracked) = Tracked::new(what, 64 * MIB) else { return };
    let (site, path) = (&tracked.site, tracked.device());
    let freeze = || {
        let text = site.dsync(["status", "--prometheus"]).output().text();
        sample(&text, "dsync_replica_freeze_seconds", &[])
    };
    let copy = site.path("copy.raw");
    assert_eq!(freeze(), None);
    let ms = site.sync(path, &copy, &["--freeze", "require"]).ok().summary()["freeze_ms"].as_f64();
    assert_eq!(freeze(), Some(ms.expect("a freeze") / 1000.0));
}

/// The text without what moves by itself.
fn still(text: &str) -> Vec<&str> {
    text.lines().filter(|line| !line.starts_with("dsync_replica_lag_seconds")).collect()
}

#[test]
fn what_runs_long_serves_the_metrics_of_the_status() {
    let mut scene = Scene::synced("served metrics", 8 * MIB);
    scene.stop();
    let (nbd, socket) = (scene.site.socket("nbd"), scene.site.socket("metrics"));
    let serve = scene.site.dsync(["serve"]).arg(&scene.image).arg("--socket").arg(&nbd);
    let mut server = serve.args(["--metrics", "0"]).start();
    server.wait_to_say("serving vm");
    until("its address is said", || server.stderr_so_far().contains("metrics on http://"));
    let place = port(&server.stderr_so_far());
    assert!(place.starts_with("127.0.0.1:"), "loopback, unless another is given: {place}");
    let status = || scene.site.dsync(["status", "--prometheus"]).ok().text();
    let over_tcp = || get(TcpStream::connect(&place).expect("a connection"));
    assert_eq!(still(&over_tcp()), still(&status()));

    let unix = format!("unix:{}", socket.display());
    let mirror = scene.site.dsync(["mirror", "vm"]).arg(&scene.replica).args(["--metrics", &unix]);
    let mut mirror = mirror.start();
    mirror.wait_to_say("mirroring to");
    let over_unix = || get(UnixStream::connect(&socket).expect("a connection"));
    assert_eq!(sample(&over_unix(), "dsync_source_tracking", &[]), Some(1.0));
    // Another one cannot take its place.
    let second = scene.site.dsync(["mirror", "vm"]).arg(scene.site.path("second.raw"));
    second.args(["--metrics", &unix]).code(4).says(&["already listening"]);
    let second = scene.site.dsync(["mirror", "vm"]).arg(scene.site.path("second.raw"));
    second.args(["--metrics", &place]).code(1).says(&["cannot serve metrics on 127.0.0.1:"]);
    mirror.signal(Signal::TERM);
    mirror.output(Duration::from_secs(30));
    assert!(!socket.exists(), "its socket is left");

    let receive = scene.site.dsync(["receive", "--listen", "127.0.0.1:0", "--metrics", &unix, "--into"]);
    let mut receive = receive.arg(scene.site.dir()).start();
    receive.wait_to_say("listening on");
    wait_for(&socket);
    assert_eq!(sample(&over_unix(), "dsync_local_replica_state", &["state=\"exact\""]), Some(1.0));
    receive.kill();
    scene.site.dsync(["receive", "--metrics", "9750"]).code(2).says(&["pass --listen"]);
}

fn wait_for(socket: &Path) {
    let until = Instant::now() + Duration::from_secs(10);
    while UnixStream::connect(socket).is_err() {
        assert!(Instant::now() < until, "nothing listens on {}", socket.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The address of "metrics on http://…/metrics".
fn port(said: &str) -> String {
    let place = said.lines().find_map(|line| line.strip_prefix("metrics on http://")).expect("metrics");
    place.strip_suffix("/metrics").expect("a path").to_owned()
}

#[test]
fn clients_that_mean_harm_end_in_time() {
    let scene = Scene::new("hostile scrapes", 8 * MIB);
    let server = scene.site.dsync(["serve", "--read-only", "--metrics", "0"]).arg(&scene.image);
    let mut server = server.arg("--socket").arg(scene.site.socket("second")).start();
    server.wait_to_say("serving vm");
    until("it says where its metrics are", || server.stderr_so_far().contains("metrics on http://"));
    let place = port(&server.stderr_so_far());
    let connect = || TcpStream::connect(&place).expect("a connection");
    let threads = || {
        let tasks = format!("/proc/{}/task", server.child.id());
        std::fs::read_dir(tasks).expect("a process").count()
    };
    // Once all of its own threads run.
    get(connect());
    let before = threads();
    // Clients that say nothing, and one that says a byte now and then, have all the places.
    let mut idle: Vec<TcpStream> = (0..40).map(|_| connect()).collect();
    let began = Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    assert!(threads() <= before + 32, "{} threads for clients", threads() - before);
    while began.elapsed() < Duration::from_secs(6) {
        let _ = idle[0].write_all(b"G");
        std::thread::sleep(Duration::from_millis(200));
    }
    // All have ended by now, however slowly they sent.
    for client in &mut idle {
        client.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        match client.read(&mut [0; 64]) {
            Ok(0) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
            Ok(_) => panic!("an answer to nothing"),
        }
    }
    assert_eq!(sample(&get(connect()), "dsync_status_errors", &[]), Some(0.0));
    // A head without an end.
    let mut long = connect();
    let _ = long.write_all(&[b'x'; 20_000]);
    let mut answer = String::new();
    let _ = long.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    assert!(server.ended().is_none(), "{}", server.stderr_so_far());
}

/// Each alert fires where it should, and is silent before and after: `tests/alerts.yml` says when.
#[test]
fn every_alert_fires_and_clears() {
    let Some(promtool) = promtool("the alert rules, by promtool") else { return };
    let (rules, cases) = (repository().join("docs/alerts.yml"), repository().join("tests/alerts.yml"));
    Run::new(&promtool).args(["check", "rules"]).arg(&rules).ok();
    Run::new(&promtool).args(["test", "rules"]).arg(&cases).ok();
    let read = |path: &Path| std::fs::read_to_string(path).expect("a file");
    let (rules, cases) = (read(&rules), read(&cases));
    let names: BTreeSet<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() > 5, "{names:?}");
    for name in names {
        let silent = cases.matches(&format!("{{ alertname: {name}, ")).count();
        let fires = cases.matches(&format!("- alertname: {name}\n")).count();
        assert!(fires > 0 && silent > fires, "{name}: fires {fires} times, is silent {silent} times");
    }
}
