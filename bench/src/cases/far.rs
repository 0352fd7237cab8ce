//! What it costs both sites to bring blocks to another host: a first copy, and scattered blocks, over TLS and over ssh, pushed and
//! pulled.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dsync_tests::nbd::{Address, Client};

use crate::Bench;
use crate::hosts::line::Sshd;
use crate::hosts::link::{carry, listening, sink};
use crate::measure::content::Content;
use crate::measure::dsync::{Dsync, export};
use crate::measure::places::{scratch, sockets};
use crate::measure::process::{Daemon, Outcome, command, go_on, quote, run, shell};
use crate::measure::report::{Report, Table, median, size};

const LIMIT: Duration = Duration::from_secs(600);
const HOST: &str = "127.0.0.1";
/// Of so many blocks, one is changed.
const SCATTERED: u64 = 10;

/// The ways in which the site of the copy runs the command.
const PULLED_TLS: &str = "dsync, TLS, pulled";
const PULLED_SSH: &str = "dsync, ssh, pulled";

/// What one run cost.
struct Cost {
    seconds: f64,
    near: f64,
    far: f64,
    bytes: f64,
    /// Of the near and of the far site, where they were counted.
    calls: Option<(u64, u64)>,
}

/// What dsync copied, and by which way.
type Replicas<'w> = Vec<(&'w str, PathBuf)>;

/// The two sites.
struct Sites {
    folder: PathBuf,
    near: Dsync,
    far: Dsync,
    keys: PathBuf,
    /// `dsync receive --listen`, and where it does.
    listener: (Daemon, String),
    /// `dsync send --listen`.
    offering: (Daemon, String),
    sshd: Option<Sshd>,
    image: PathBuf,
    bytes: u64,
    /// Copies made so far: each has a name of its own.
    copies: u32,
}

/// Runs the scenario.
pub(crate) fn far(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 });
    let bytes = bench.size.unwrap_or(if bench.quick { 64 << 20 } else { 1 << 30 }).next_multiple_of(1 << 20);
    report.section(
        "far: a first copy and scattered blocks to another host",
        &format!(
            "{} of random content, durable at the end; then one block of {SCATTERED} changed. Loopback, both sites on this \
             machine's cores. The near site runs the command; it has the image, or, where it pulls, the copy. Processor \
             seconds and system calls are those of each site, a GiB moved; system calls are counted by strace in a run of \
             their own, not for pulls. Medians of {rounds} rounds.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("far", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let folder = scratch(&bench.dir)?;
    let sockets = sockets()?;
    let mut sites = Sites::new(binary, folder.path(), bytes, report)?;
    let mut content = Content::new(bench.seed, bytes);
    content.write(&sites.image)?;
    let socket = sockets.path().join("nbd");
    let server = sites.near.serve(&sites.image, &socket, &[])?;

    let mut ways = vec!["dsync, TLS", "read, TLS, write", PULLED_TLS];
    if sites.sshd.is_some() {
        ways.extend(["dsync, ssh", PULLED_SSH, "ssh into cat"]);
    }
    let (mut first, replicas) = sites.first_copies(&ways, rounds, &content)?;
    let mut scattered: Vec<Vec<Cost>> = replicas.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        let change = content.change(bytes / 4096 / SCATTERED);
        let mut client = Client::connect_with(&Address::Unix(socket.clone()), &export(&sites.image), &[])?;
        content.apply_through(&change, &mut client)?;
        client.close()?;
        for ((way, replica), costs) in replicas.iter().zip(&mut scattered) {
            costs.push(sites.again(way, replica)?);
            content.check_changed(&change, replica)?;
        }
    }
    match dsync_tests::find("strace") {
        None => report.left_out("system calls", "strace is not installed"),
        Some(_) => {
            let costs = first.iter_mut().filter_map(|costs| costs.last_mut());
            for (way, cost) in
                ways.iter().zip(costs).filter(|(way, _)| ![PULLED_TLS, PULLED_SSH].contains(way))
            {
                cost.calls = Some(sites.calls(way)?);
            }
        }
    }
    let mut table = Table::new(
        "Costs",
        &["what", "seconds", "processor s/GiB, near", "far", "system calls/GiB, near", "far"],
    );
    for (way, costs) in ways.iter().zip(&first) {
        table.row(row(&format!("first copy: {way}"), costs));
    }
    for ((way, _), costs) in replicas.iter().zip(&scattered) {
        table.row(row(&format!("scattered: {way}"), costs));
    }
    report.table(&table);
    goals(report, &first, &scattered);
    server.stop()
}

fn goals(report: &mut Report, first: &[Vec<Cost>], scattered: &[Vec<Cost>]) {
    let of = |costs: &[Cost], figure: fn(&Cost) -> f64| median(&costs.iter().map(figure).collect::<Vec<_>>());
    let seconds = |costs: &[Cost]| of(costs, |cost| cost.seconds);
    let ratio = seconds(&first[1]) / seconds(&first[0]);
    report.goal("first copy over TLS: the bare program's time by dsync's", ratio, false, 0.8);
    for (what, costs, goal) in [("first copy", &first[0], 0.6), ("scattered blocks", &scattered[0], 1.0)] {
        let near = of(costs, |cost| cost.near * f64::from(1 << 30) / cost.bytes);
        let far = of(costs, |cost| cost.far * f64::from(1 << 30) / cost.bytes);
        for (host, spent) in [("near", near), ("far", far)] {
            let what = format!("{what} over TLS: processor seconds a GiB, {host}");
            report.goal(&what, spent, true, goal);
        }
    }
}

fn row(what: &str, costs: &[Cost]) -> Vec<String> {
    let of = |figure: fn(&Cost) -> f64| median(&costs.iter().map(figure).collect::<Vec<_>>());
    let gib = |cost: &Cost| cost.bytes / f64::from(1 << 30);
    let calls =
        costs.iter().find_map(|cost| cost.calls.map(|(n, f)| (n as f64 / gib(cost), f as f64 / gib(cost))));
    vec![
        what.into(),
        format!("{:.2}", of(|cost| cost.seconds)),
        format!("{:.2}", of(|cost| cost.near * f64::from(1 << 30) / cost.bytes)),
        format!("{:.2}", of(|cost| cost.far * f64::from(1 << 30) / cost.bytes)),
        calls.map_or("-".into(), |(near, _)| format!("{near:.0}")),
        calls.map_or("-".into(), |(_, far)| format!("{far:.0}")),
    ]
}

impl Sites {
    /// The costs of each way to make a first copy, and the replicas that the first round leaves.
    fn first_copies<'w>(
        &mut self,
        ways: &[&'w str],
        rounds: usize,
        content: &Content,
    ) -> Result<(Vec<Vec<Cost>>, Replicas<'w>)> {
        let mut first: Vec<Vec<Cost>> = ways.iter().map(|_| Vec::new()).collect();
        let mut replicas = Vec::new();
        for round in 0..rounds {
            for (way, costs) in ways.iter().zip(&mut first) {
                let (cost, copy) = self.first(way)?;
                if round == 0 {
                    content.check(&copy)?;
                }
                costs.push(cost);
                if way.starts_with("dsync") && round == 0 {
                    replicas.push((*way, copy));
                } else {
                    std::fs::remove_file(copy)?;
                }
            }
        }
        Ok((first, replicas))
    }

    fn new(binary: &Path, folder: &Path, bytes: u64, report: &mut Report) -> Result<Sites> {
        let near = Dsync::new(binary, folder.join("near-state"));
        let keys = folder.join("keys");
        run(&mut carry(&["keys", &text(&keys)?, HOST]), LIMIT)?;
        // The same keys serve dsync itself.
        for (site, state) in [("near", "near-state"), ("far", "far-state")] {
            std::fs::create_dir_all(folder.join(state))?;
            run(command("cp").arg("-a").arg(keys.join(site)).arg(folder.join(state).join("keys")), LIMIT)?;
        }
        std::fs::create_dir(folder.join("into"))?;
        let sshd = Sshd::start(&[], HOST, folder).and_then(|mut sshd| {
            let rsh = sshd.rsh.clone();
            sshd.wait(&rsh).map(|()| sshd)
        });
        let sshd = match sshd {
            Ok(sshd) => Some(sshd),
            Err(error) => {
                report.left_out("ssh", &format!("{error:#}"));
                None
            }
        };
        let listener = listener(&near.binary, folder, None)?;
        let image = folder.join("disk.img");
        std::fs::write(&image, "")?;
        let mut send = near.command("send");
        send.args(["--listen", "127.0.0.1:0", "--offer"]).arg(&image);
        let offering = listening(&mut send, "listening on ")?;
        let far = Dsync::new(binary, folder.join("far-state"));
        let key = run(&mut near.command("key"), LIMIT)?.stdout;
        run(
            far.command("key").args([
                "trust",
                HOST,
                key.lines().next().context("a key")?,
                "--for",
                "push,pull,serve",
            ]),
            LIMIT,
        )?;
        Ok(Sites {
            folder: folder.into(),
            near,
            far,
            keys,
            listener,
            offering,
            sshd,
            image,
            bytes,
            copies: 0,
        })
    }

    fn fresh(&mut self) -> PathBuf {
        self.copies += 1;
        self.folder.join("into").join(format!("copy-{}.img", self.copies))
    }

    /// The near site's command for a way; the server of the far site is there already, but for the bare program.
    fn command(&self, way: &str, copy: &Path, address: &str) -> Result<Command> {
        let name = copy.file_name().context("a file")?.to_string_lossy();
        let far = |sshd: &Sshd, state: &str| -> Result<(String, String)> {
            let state = self.folder.join(state).display().to_string();
            Ok((sshd.rsh.clone(), format!("env DSYNC_STATE_DIR={state} {}", self.near.binary.display())))
        };
        let mut sync = self.near.command("sync");
        sync.arg("--quiet").arg(&self.image);
        Ok(match (way, &self.sshd) {
            ("dsync, TLS", _) => {
                sync.arg(format!("tls://{address}/{name}"));
                sync
            }
            ("dsync, ssh", Some(sshd)) => {
                let (rsh, dsync) = far(sshd, "far-state")?;
                sync.arg(format!("backup:{}", copy.display())).args([
                    "--rsh",
                    &rsh,
                    "--remote-dsync",
                    &dsync,
                ]);
                sync
            }
            (PULLED_TLS, _) => {
                let mut pull = self.far.command("sync");
                pull.arg("--quiet").arg(format!("tls://{address}/{}", self.image.display())).arg(copy);
                pull
            }
            (PULLED_SSH, Some(sshd)) => {
                let (rsh, dsync) = far(sshd, "near-state")?;
                let mut pull = self.far.command("sync");
                pull.args(["--quiet", "--rsh", &rsh, "--remote-dsync", &dsync]);
                pull.arg(format!("backup:{}", self.image.display())).arg(copy);
                pull
            }
            ("ssh into cat", Some(sshd)) => {
                let copy = copy.display();
                shell(&format!("{} backup 'cat >{copy}; sync {copy}' <{}", sshd.rsh, quote(&self.image)))
            }
            _ => carry(&["source", "file", address, "1", &text(&self.keys)?, &text(&self.image)?]),
        })
    }

    /// Runs a way, and tells what it cost.
    fn measure(&self, way: &str, copy: &Path, bytes: u64) -> Result<Cost> {
        go_on()?;
        let bare;
        let (daemon, address) = match (way, &self.sshd) {
            ("read, TLS, write", _) => {
                bare = sink(&["sink", "file", "127.0.0.1:0", &text(&self.keys)?, &text(copy)?])?;
                (&bare.0, &bare.1)
            }
            ("dsync, TLS", _) => (&self.listener.0, &self.listener.1),
            (PULLED_TLS, _) => (&self.offering.0, &self.offering.1),
            (_, Some(sshd)) => (sshd.daemon(), &self.listener.1),
            _ => anyhow::bail!("no such way: {way}"),
        };
        let before = daemon.processor();
        let Outcome { seconds, processor, .. } = run(&mut self.command(way, copy, address)?, LIMIT)?;
        // What ended a moment after the near side has still to be reaped there.
        std::thread::sleep(Duration::from_millis(100));
        let far = daemon.processor() - before;
        Ok(Cost { seconds, near: processor, far, bytes: bytes as f64, calls: None })
    }

    fn first(&mut self, way: &str) -> Result<(Cost, PathBuf)> {
        let copy = self.fresh();
        Ok((self.measure(way, &copy, self.bytes)?, copy))
    }

    fn again(&self, way: &str, replica: &Path) -> Result<Cost> {
        self.measure(way, replica, self.bytes / SCATTERED)
    }

    /// The system calls of both sites for a first copy.
    fn calls(&mut self, way: &str) -> Result<(u64, u64)> {
        let copy = self.fresh();
        let counts = [self.folder.join("near-calls"), self.folder.join("far-calls")];
        let (daemon, address) = match way {
            "dsync, TLS" => listener(&self.near.binary, &self.folder, Some(&counts[1]))?,
            "read, TLS, write" => {
                let words = ["sink", "file", "127.0.0.1:0", &text(&self.keys)?, &text(&copy)?];
                listening(&mut traced(&carry(&words), &counts[1]), "listening ")?
            }
            _ => {
                let sshd = self.sshd.as_ref().context("no sshd")?;
                let mut attach = command("strace");
                attach.args(["-f", "-c", "-q", "-p", &sshd.daemon().id().to_string(), "-o"]).arg(&counts[1]);
                let daemon = Daemon::start_bare(&mut attach)?;
                std::thread::sleep(Duration::from_millis(300));
                (daemon, self.listener.1.clone())
            }
        };
        run(&mut traced(&self.command(way, &copy, &address)?, &counts[0]), LIMIT)?;
        daemon.interrupt()?;
        std::fs::remove_file(copy)?;
        Ok((total(&counts[0])?, total(&counts[1])?))
    }
}

/// `dsync receive --listen`, traced if a file for the counts is given, and where it listens.
fn listener(binary: &Path, folder: &Path, counts: Option<&Path>) -> Result<(Daemon, String)> {
    let far = Dsync::new(binary, folder.join("far-state"));
    let mut listen = far.command("receive");
    listen.args(["--listen", "127.0.0.1:0", "--into"]).arg(folder.join("into"));
    if let Some(counts) = counts {
        listen = traced(&listen, counts);
    }
    listening(&mut listen, "listening on ")
}

/// The same command under strace, which counts into a file.
fn traced(program: &Command, counts: &Path) -> Command {
    let mut trace = command("strace");
    trace.args(["-f", "-c", "-q", "-o"]).arg(counts).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        value.map(|value| trace.env(name, value));
    }
    trace
}

/// The number of calls, from the last line of strace's table.
fn total(counts: &Path) -> Result<u64> {
    let table = std::fs::read_to_string(counts).with_context(|| counts.display().to_string())?;
    let line = table.lines().find(|line| line.ends_with(" total")).context("strace counted nothing")?;
    let calls = line.split_whitespace().nth(3).and_then(|field| field.parse().ok());
    ensure!(calls.is_some(), "strace's last line is {line}");
    Ok(calls.unwrap_or(0))
}

fn text(path: &Path) -> Result<String> {
    Ok(path.to_str().with_context(|| path.display().to_string())?.into())
}
