//! A far line that loses packets, which "A Remote Mirroring Architecture with Adaptively Cooperative Pipelining" leaves for future work, and
//! with it forward error correction: what plain TCP carries, and what dsync's link does.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::Bench;
use crate::cases::fec;
use crate::figures::plot::{Series, lines};
use crate::figures::results;
use crate::figures::sheet::{Line, Sheet};
use crate::hosts::link::{carry, listening, rate};
use crate::hosts::relay::{Relay, Shape};
use crate::measure::places::scratch;
use crate::measure::process::{Daemon, command, go_on, run};
use crate::measure::report::{Report, Table, median};

const LIMIT: Duration = Duration::from_secs(60);
const RATE: u64 = 1_000_000_000;
const DELAY: Duration = Duration::from_millis(75);
/// Of a million packets.
const LOSSES: [(u64, &str); 3] = [(0, "none"), (1000, "0.1 %"), (10_000, "1 %")];
/// The most that a socket's buffers grow to, in bytes: the kernel's usual ones, and some that hold what is on its way.
const BUFFERS: [(&str, [u64; 2]); 2] = [("usual", [4 << 20, 6 << 20]), ("64 MiB", [64 << 20, 64 << 20])];

/// What carries.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// The congestion control of plain TCP; the link chooses its own.
    plain: Option<&'static str>,
    connections: &'static str,
    buffers: usize,
}

const fn way(
    name: &'static str,
    plain: Option<&'static str>,
    connections: &'static str,
    buffers: usize,
) -> Way {
    Way { name, plain, connections, buffers }
}

/// The link opens 8 connections by itself at this round trip.
const WAYS: [Way; 9] = [
    way("plain TCP, cubic", Some("cubic"), "1", 0),
    way("plain TCP, cubic", Some("cubic"), "8", 0),
    way("plain TCP, bbr", Some("bbr"), "1", 0),
    way("plain TCP, bbr", Some("bbr"), "8", 0),
    way("dsync's link", None, "1", 0),
    way("dsync's link", None, "8", 0),
    way("plain TCP, cubic", Some("cubic"), "1", 1),
    way("plain TCP, bbr", Some("bbr"), "1", 1),
    way("dsync's link", None, "1", 1),
];

impl Way {
    fn title(&self) -> String {
        let buffers = if self.buffers == 0 { "" } else { ", buffers of 64 MiB" };
        format!("{}, {}{buffers}", self.name, self.connections)
    }
}

/// Runs the scenario.
pub(crate) fn wan(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 });
    let seconds = if bench.quick { "2" } else { "8" };
    report.section(
        "wan: a far line that loses packets",
        &format!(
            "1 Gbit/s, 150 ms there and back, packets lost at random each way: two network namespaces with TUN devices, and a relay in user \
             space that delays, paces and drops single IP packets (a queue of 50 ms), so that each connection is the kernel's TCP from end \
             to end. {seconds} s of sending each, until everything has arrived, so the start counts; buffers grow to the kernel's usual \
             limits, or to 64 MiB. The link asks for BBR itself, so there is none with cubic. Medians of {rounds} interleaved rounds."
        ),
    );
    let kept = measured(bench, report, rounds, seconds).or_else(|error| {
        go_on()?;
        report.left_out("wan, measured", &format!("{error:#}"));
        anyhow::Ok(Vec::new())
    })?;
    fec::told(report, fec::Line { rate: RATE as f64 / 8.0, round_trip: 2.0 * DELAY.as_secs_f64() });
    for ((loss, name), kept) in LOSSES.into_iter().zip(kept).skip(1) {
        fec::told_of_measured(report, name, loss as f64 / 1e6, kept);
    }
    Ok(())
}

/// For each loss, what the link kept of what it carried without.
fn measured(bench: &Bench, report: &mut Report, rounds: usize, seconds: &str) -> Result<Vec<f64>> {
    let folder = scratch(&bench.dir)?;
    let keys = folder.path().join("keys");
    let keys = keys.to_str().context("a folder with a name")?;
    run(&mut carry(&["keys", keys, Relay::FAR]), LIMIT)?;
    let relay = Relay::new(Shape { rate: RATE, delay: DELAY }, bench.seed)?;
    let address = format!("{}:0", Relay::FAR);
    let far = |words: &[&str]| -> Result<(Daemon, String)> {
        listening(&mut within(&relay.network.far(), &carry(words)), "listening ")
    };
    let (_tcp, plain) = far(&["sink", "tcp", &address])?;
    let (_tls, secure) = far(&["sink", "tls", &address, keys])?;
    let ways: Vec<Way> = WAYS.into_iter().filter(|way| bench.wants(&way.title())).collect();
    let mut sheet =
        Sheet::new(&["way", "connections", "buffers", "loss_per_million", "round", "bytes_per_second"]);
    for round in 0..rounds {
        for (loss, told) in LOSSES {
            relay.lose(loss);
            for turn in 0..ways.len() {
                go_on()?;
                let way = &ways[(turn + round) % ways.len()];
                buffers(&relay, BUFFERS[way.buffers].1)?;
                let words = match way.plain {
                    Some(congestion) => ["source", "tcp", &plain, way.connections, seconds, congestion],
                    None => ["source", "tls", &secure, way.connections, seconds, keys],
                };
                let rate = rate(&mut within(&relay.network.near(), &carry(&words)))?;
                if !bench.quiet {
                    println!("round {}: {told} lost: {}: {:.1} MB/s", round + 1, way.title(), rate / 1e6);
                }
                let [name, count, buffers] =
                    [way.name, way.connections, BUFFERS[way.buffers].0].map(String::from);
                sheet.add([name, count, buffers, loss.to_string(), round.to_string(), format!("{rate:.0}")]);
            }
        }
    }
    let sheet = sheet.kept(&results(bench).join("wan-runs.csv"), &report.about())?;
    show(report, &sheet, &ways, &results(bench))
}

/// The same command behind words that lead into a namespace.
fn within(words: &[String; 2], program: &std::process::Command) -> std::process::Command {
    let mut inside = command(&words[0]);
    inside.arg(&words[1]).arg(program.get_program()).args(program.get_args());
    inside
}

fn buffers(relay: &Relay, [send, receive]: [u64; 2]) -> Result<()> {
    let line = format!(
        "echo 4096 16384 {send} >/proc/sys/net/ipv4/tcp_wmem && echo 4096 131072 {receive} >/proc/sys/net/ipv4/tcp_rmem"
    );
    for side in [relay.network.near(), relay.network.far()] {
        run(&mut within(&side, command("sh").args(["-c", &line])), LIMIT)?;
    }
    Ok(())
}

fn show(report: &mut Report, sheet: &Sheet, ways: &[Way], results: &Path) -> Result<Vec<f64>> {
    let ticks = LOSSES.map(|(_, name)| name.to_string());
    let mut columns = vec!["MB/s; way, connections"];
    columns.extend(ticks.iter().map(String::as_str));
    columns.push("with 0.1 %: least-most");
    let mut table = Table::new("What is carried, by packets lost", &columns);
    let mut series = Vec::new();
    for way in ways {
        let of = |loss: u64| -> Vec<f64> {
            let same = |line: &Line| {
                line.text("way") == way.name
                    && line.text("connections") == way.connections
                    && line.text("buffers") == BUFFERS[way.buffers].0
                    && line.number("loss_per_million") == loss as f64
            };
            sheet.lines().filter(same).map(|line| line.number("bytes_per_second") / 1e6).collect()
        };
        let rates = LOSSES.map(|(loss, _)| median(&of(loss)));
        let (least, most) = of(1000).into_iter().fold((f64::MAX, 0.0f64), |(a, b), r| (a.min(r), b.max(r)));
        let cells = rates.iter().map(|rate| format!("{rate:.1}"));
        table.row([way.title()].into_iter().chain(cells).chain([format!("{least:.1}-{most:.1}")]).collect());
        let points = rates.iter().enumerate().map(|(at, rate)| (at as f64, *rate)).collect();
        series.push(Series { name: way.title(), points });
    }
    report.table(&table);
    let of = |title: &str| series.iter().find(|series| series.name == title);
    if let (Some(ours), Some(theirs)) = (of("dsync's link, 8"), of("plain TCP, bbr, 8")) {
        for (((_, lost), ours), theirs) in LOSSES.into_iter().zip(&ours.points).zip(&theirs.points) {
            let what =
                format!("wan: the link with 8 connections, of plain TCP with BBR, packets lost: {lost}");
            report.goal(&what, ours.1 / theirs.1.max(1e-9), false, 0.9);
        }
    }
    let ours = of("dsync's link, 8").map_or(&[][..], |series| &series.points);
    let kept = ours.iter().map(|point| point.1 / ours[0].1.max(1e-9)).collect();
    lines(&results.join("wan.svg"), "1 Gbit/s, 150 ms", ("packets lost", "MB/s"), &ticks, &series)?;
    Ok(kept)
}
