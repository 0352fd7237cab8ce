//! The link over TLS on a far link: 150 ms, one packet lost in a thousand, 100 Mbit/s and 1 Gbit/s, in a guest with two
//! namespaces. A sample runs by default, all of it with `DSYNC_SOAK=1`.

use std::path::PathBuf;
use std::time::Duration;

use dsync_tests::guest::{self, Guest, Options};
use dsync_tests::{need, repository, say, soak};

/// What one run carried: plain TCP and TLS, in bits a second.
struct Run {
    rate: f64,
    lanes: u32,
    plain: f64,
    tls: f64,
}

fn read(line: &str) -> Option<Run> {
    let mut words =
        line.strip_prefix("# far ")?.split(' ').map(|word| word.parse::<f64>().expect("a number"));
    let mut next = || words.next().expect("a figure");
    let (rate, lanes) = (next() * 1e6, next() as u32);
    let mut speed = || next() * 8.0 / next();
    let (plain, tls) = (speed(), speed());
    Some(Run { rate, lanes, plain, tls })
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

#[test]
fn lanes_fill_a_far_link() {
    let what = "the link over TLS at 150 ms";
    if !need(&["ip", "tc"], what) || !guest::possible(what) {
        return;
    }
    let scripts = repository().join("tests/vm");
    let (rates, lanes, seconds, rounds) = if soak() { ("100 1000", "4", 20, 3) } else { ("100", "4", 10, 1) };
    let options = Options {
        modules: ["veth", "sch_netem", "tcp_bbr"].map(String::from).into(),
        files: vec![PathBuf::from(env!("CARGO_BIN_EXE_carry")), scripts.join("lib.sh")],
        memory: 1024,
        cpus: 2,
        script: format!(
            "RATES=\"{rates}\" LANES=\"{lanes}\" SECONDS_EACH={seconds} ROUNDS={rounds}\n{}",
            std::fs::read_to_string(scripts.join("far.sh")).expect("the script")
        ),
        ..Options::default()
    };
    let limit = Duration::from_secs(if soak() { 1400 } else { 240 });
    let lines = Guest::boot(&options).finish(limit);
    lines.iter().filter(|line| line.starts_with("# ")).for_each(|line| println!("{line}"));
    let runs: Vec<Run> = lines.iter().filter_map(|line| read(line)).collect();
    let mut kinds: Vec<(f64, u32)> = runs.iter().map(|run| (run.rate, run.lanes)).collect();
    kinds.dedup();
    assert!(!kinds.is_empty(), "nothing was measured: {lines:#?}");
    for (rate, lanes) in kinds {
        let of = || runs.iter().filter(|run| (run.rate, run.lanes) == (rate, lanes));
        let (plain, tls) = (median(of().map(|run| run.plain)), median(of().map(|run| run.tls)));
        let ratio = median(of().map(|run| run.tls / run.plain));
        say(&format!(
            "far link of {:.0} Mbit/s, {lanes} lanes: plain TCP {:.1}, TLS {:.1} Mbit/s: {ratio:.2} of it, {:.0} % of the link",
            rate / 1e6,
            plain / 1e6,
            tls / 1e6,
            100.0 * tls / rate
        ));
        // Far below the goals, so that a busy machine does not fail the test.
        assert!(ratio > 0.3, "lanes carry {ratio:.2} of what plain TCP carries");
    }
}
