//! What a link carries: TLS with one and several connections beside plain TCP and ssh, on loopback.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::Bench;
use crate::hosts::line::Sshd;
use crate::measure::places::scratch;
use crate::measure::process::{Daemon, go_on, run};
use crate::measure::report::{Report, Table, median};
use crate::own;

const LIMIT: Duration = Duration::from_secs(60);
const CONNECTIONS: [&str; 3] = ["1", "2", "4"];

/// This program as `carry`.
pub(crate) fn carry(words: &[&str]) -> Command {
    let mut command = own("carry");
    command.args(words);
    command
}

/// A sink that listens on loopback, and where.
pub(crate) fn sink(words: &[&str]) -> Result<(Daemon, String)> {
    listening(&mut carry(words), "listening ")
}

/// Starts a server that says where it listens, behind these words.
pub(crate) fn listening(command: &mut Command, words: &str) -> Result<(Daemon, String)> {
    let mut daemon = Daemon::start_bare(command)?;
    let until = Instant::now() + LIMIT;
    loop {
        daemon.check()?;
        if let Some(address) = daemon.so_far().lines().find_map(|line| line.strip_prefix(words)) {
            return Ok((daemon, address.to_string()));
        }
        ensure!(Instant::now() < until, "{command:?} does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs the scenario.
pub(crate) fn link(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 5 });
    let seconds = if bench.quick { "0.5" } else { "3" };
    report.section(
        "link: what a link carries on loopback",
        &format!(
            "One way, {seconds} s each, everything taken at the other end; both ends share this machine's cores. The same \
             congestion control everywhere. Medians of {rounds} rounds."
        ),
    );
    let folder = scratch(&bench.dir)?;
    let keys = folder.path().join("keys");
    let keys = keys.to_str().context("a folder with a name")?;
    run(&mut carry(&["keys", keys, "127.0.0.1"]), LIMIT)?;
    let (_tcp, plain) = sink(&["sink", "tcp", "127.0.0.1:0"])?;
    let (_tls, secure) = sink(&["sink", "tls", "127.0.0.1:0", keys])?;
    let mut ways: Vec<(String, Command)> = Vec::new();
    for count in CONNECTIONS {
        let words = ["source", "tcp", &plain, count, seconds, "bbr"];
        ways.push((format!("plain TCP, {count}"), carry(&words)));
        let words = ["source", "tls", &secure, count, seconds, keys];
        ways.push((format!("TLS, {count}"), carry(&words)));
    }
    let sshd = Sshd::start(&[], "127.0.0.1", folder.path()).and_then(|mut sshd| {
        let rsh = sshd.rsh.clone();
        sshd.wait(&rsh).map(|()| sshd)
    });
    match &sshd {
        Ok(sshd) => {
            let far = format!("{} carry sink pipe", own("").get_program().to_string_lossy());
            let mut words = vec!["source", "ssh", "backup", seconds, &far];
            words.extend(sshd.rsh.split(' '));
            ways.push(("ssh".into(), carry(&words)));
        }
        Err(error) => report.left_out("ssh", &format!("{error:#}")),
    }
    let mut figures = vec![Vec::new(); ways.len()];
    for _ in 0..rounds {
        for ((_, way), figures) in ways.iter_mut().zip(&mut figures) {
            go_on()?;
            figures.push(rate(way)?);
        }
    }
    let medians: Vec<f64> = figures.iter().map(|figures| median(figures)).collect();
    let mut table = Table::new("MB/s", &["way, connections", "MB/s", "of plain TCP with one"]);
    for ((name, _), rate) in ways.iter().zip(&medians) {
        table.row(vec![name.clone(), format!("{:.0}", rate / 1e6), format!("{:.2}", rate / medians[0])]);
    }
    report.table(&table);
    Ok(())
}

/// Bytes a second, as `carry` tells.
pub(crate) fn rate(way: &mut Command) -> Result<f64> {
    let said = run(way, LIMIT)?.stdout;
    let mut words = said.split_whitespace().map(str::parse::<f64>);
    match (words.next(), words.next()) {
        (Some(Ok(bytes)), Some(Ok(seconds))) => Ok(bytes / seconds),
        _ => anyhow::bail!("no figures: {said}"),
    }
}
