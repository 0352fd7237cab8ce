//! The mirror: the figures 3 to 8 of "A Remote Mirroring Architecture with Adaptively Cooperative Pipelining", and what a mirror
//! costs the writer.
//!
//! Both sites share this machine's processors, and the writer too. So the figures say what the models are worth to each other
//! here, and the processor time is told for each site; they do not say what two machines would do.

mod pace;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dsync_tests::nbd::{Address, Client, NbdCommand};
use serde_json::Value;

use crate::Bench;
use crate::figures::plot::{Series, lines};
use crate::figures::results;
use crate::measure::dsync::{Dsync, export};
use crate::measure::places::{scratch, sockets, sparse};
use crate::measure::process::{self, Daemon};
use crate::measure::report::{Report, Table, median};

const SIZES: [usize; 3] = [4 << 10, 16 << 10, 64 << 10];
const DEPTH: usize = 8;
/// What the writer may do at most, in bytes a second: it shares the processors with what is measured.
const PRESSURE: f64 = 600e6;
/// The same where the interval is to settle: what both sites can carry.
const EASY: f64 = 40e6;
const MODELS: [&str; 5] = ["serial", "fine", "threads", "hybrid", "adaptive"];

/// Where a writer writes.
#[derive(Clone, Copy)]
struct Pattern {
    name: &'static str,
    /// Of a hundred requests, so many go anywhere.
    random: u64,
}

const SEQUENTIAL: Pattern = Pattern { name: "sequential", random: 0 };
const HALF: Pattern = Pattern { name: "50 % random", random: 50 };
const RANDOM: Pattern = Pattern { name: "100 % random", random: 100 };

/// How a mirror runs.
#[derive(Clone)]
struct How {
    stages: &'static str,
    compress: bool,
    encrypt: bool,
    options: Vec<String>,
    /// Somebody reads the replica as it was when the mirror began.
    read: bool,
    /// Where the replica is to lie, if not beside the source.
    replica: Option<PathBuf>,
}

/// A batch, as the mirror tells of it: times in seconds.
#[derive(Clone, Copy)]
struct Batch {
    blocks: f64,
    bytes: f64,
    interval: f64,
    /// What each site took.
    primary: f64,
    backup: f64,
    lag: f64,
    /// Bytes sent so far.
    sent: f64,
}

impl Batch {
    fn of(line: &Value) -> Batch {
        let number = |field: &str| line[field].as_f64().unwrap_or(0.0);
        Batch {
            blocks: number("blocks"),
            bytes: number("bytes"),
            interval: number("interval"),
            primary: number("primary"),
            backup: number("backup"),
            lag: number("lag"),
            sent: number("sent"),
        }
    }
}

impl How {
    fn new(stages: &'static str, compress: bool, encrypt: bool) -> How {
        How { stages, compress, encrypt, options: Vec::new(), read: false, replica: None }
    }

    fn with(mut self, options: &[&str]) -> How {
        self.options.extend(options.iter().map(|o| o.to_string()));
        self
    }
}

/// What a run showed.
#[derive(Default, Clone)]
struct Figures {
    /// Bytes a second that the writer wrote, and that the replica confirmed.
    written: f64,
    mirrored: f64,
    /// Seconds of processor time a GiB, at the source's site and at the replica's.
    here: f64,
    there: f64,
    batches: Vec<Batch>,
    lag: f64,
}

#[derive(Clone)]
struct Setting<'a> {
    dsync: &'a Dsync,
    far: Dsync,
    place: &'a Path,
    sockets: &'a Path,
    seconds: f64,
    bytes: u64,
    quiet: bool,
    seed: u64,
    /// Of what finds its pace.
    rounds: usize,
    /// Port and process of the listener for the encrypted runs.
    tls: Option<(u16, u32)>,
}

/// Processor time of a process so far, in seconds.
fn processor(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    // User and system time, in hundredths.
    (ticks(11) + ticks(12)) / 100.0
}

/// The process below another that receives.
fn receiver(of: u32) -> Option<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{of}/task")).ok()?;
    let children = tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<u32>>());
    for child in children {
        let line = std::fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
        if line.contains("dsync\0receive") {
            return Some(child);
        }
        if let Some(found) = receiver(child) {
            return Some(found);
        }
    }
    None
}

/// Writes through a server until the time is up, at most so many bytes a second; bytes a second.
fn pressure(
    socket: &Path,
    name: &str,
    pattern: Pattern,
    (request, most): (usize, f64),
    setting: &Setting,
) -> Result<f64> {
    let mut client = Client::connect_with(&Address::Unix(socket.to_path_buf()), name, &[])?;
    let mut random = dsync_tests::Random::seeded(setting.seed);
    // Half of it compresses.
    let noise = random.bytes(4 << 20);
    let content = |at: usize| {
        let mut data = vec![0; request];
        let from = at % (noise.len() - request);
        data[..request / 2].copy_from_slice(&noise[from..from + request / 2]);
        data
    };
    let slots = setting.bytes / request as u64;
    let (began, mut count, mut next) = (Instant::now(), 0u64, 0u64);
    while began.elapsed().as_secs_f64() < setting.seconds {
        process::go_on()?;
        let slot = if random.below(100) < pattern.random { random.below(slots) } else { next % slots };
        next += 1;
        let data = content((count as usize).wrapping_mul(4099));
        client.start(&NbdCommand::Write { offset: slot * request as u64, data, flags: 0 })?;
        count += 1;
        if client.in_flight() >= DEPTH {
            client.finish()?;
        }
        let due = (count * request as u64) as f64 / most;
        let early = due - began.elapsed().as_secs_f64();
        if early > 0.002 {
            std::thread::sleep(Duration::from_secs_f64(early));
        }
    }
    while client.in_flight() > 0 {
        client.finish()?;
    }
    let written = (count * request as u64) as f64 / began.elapsed().as_secs_f64();
    client.close()?;
    Ok(written)
}

impl Setting<'_> {
    /// One run; without a mirror, what the writer gets by itself.
    fn run(&self, how: Option<&How>, pattern: Pattern, load: (usize, f64)) -> Result<Figures> {
        let folder = scratch(self.place)?;
        let (image, socket) = (folder.path().join("source.raw"), self.sockets.join("mirror"));
        sparse(&image, self.bytes)?;
        let _ = std::fs::remove_file(&socket);
        let server = self.dsync.serve(&image, &socket, &[])?;
        let Some(how) = how else {
            let written = pressure(&socket, &export(&image), pattern, load, self)?;
            server.stop()?;
            return Ok(Figures { written, ..Figures::default() });
        };
        let mut command = self.command(how, folder.path(), &image)?;
        let mut mirror = Daemon::start_bare(&mut command)?;
        let until = Instant::now() + Duration::from_secs(20);
        while !mirror.so_far().contains("mirroring to") {
            mirror.check()?;
            ensure!(Instant::now() < until, "the mirror does not begin");
            std::thread::sleep(Duration::from_millis(10));
        }
        let far = match (how.encrypt, self.tls) {
            (true, Some((_, pid))) => Some(pid),
            _ => receiver(mirror.id()),
        };
        let moment = folder.path().join("replica.raw@now");
        let reader = how.read.then(|| self.dsync.serve(&moment, &self.sockets.join("reader"), &[]));
        let reader = reader.transpose()?;
        let (before, far_before) = (processor(mirror.id()), far.map_or(0.0, processor));
        let written = pressure(&socket, &export(&image), pattern, load, self)?;
        // Of the time in which the pressure was on, and of nothing that was confirmed after.
        let said = mirror.so_far();
        let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let batches: Vec<Batch> =
            lines.filter(|value| value.get("batch").is_some()).map(|line| Batch::of(&line)).collect();
        let mirrored: f64 = batches.iter().map(|batch| batch.bytes).sum();
        let gib = (mirrored / (1u64 << 30) as f64).max(1e-6);
        let here = (processor(mirror.id()) - before) / gib;
        let there = far.map_or(0.0, |far| (processor(far) - far_before) / gib);
        let lags: Vec<f64> = batches.iter().map(|batch| batch.lag).collect();
        mirror.stop()?;
        server.stop()?;
        if let Some(mut reader) = reader {
            reader.check()?;
            reader.stop()?;
        }
        let figures =
            Figures { written, mirrored: mirrored / self.seconds, here, there, lag: median(&lags), batches };
        if !self.quiet {
            eprintln!(
                "{} {}{}, {} KiB, {}: {:.0} MB/s of {:.0} written, lag {:.3} s",
                how.stages,
                if how.compress { "compressed " } else { "" },
                if how.encrypt { "encrypted" } else { "" },
                load.0 >> 10,
                pattern.name,
                figures.mirrored / 1e6,
                written / 1e6,
                figures.lag
            );
        }
        Ok(figures)
    }

    /// The mirror, from a source to a replica beside it.
    fn command(&self, how: &How, folder: &Path, image: &Path) -> Result<std::process::Command> {
        let shell = folder.join("rsh");
        std::fs::write(&shell, "#!/bin/sh\nshift\nexec sh -c \"exec $*\"\n")?;
        rustix::fs::chmod(&shell, rustix::fs::Mode::from_bits_truncate(0o755))?;
        let mut command = self.dsync.command("mirror");
        let replica = how.replica.clone().unwrap_or_else(|| folder.join("replica.raw"));
        let destination = match (how.encrypt, self.tls) {
            (true, Some((port, _))) => format!(
                "tls://127.0.0.1:{port}/{}/replica.raw",
                folder.file_name().unwrap_or_default().to_string_lossy()
            ),
            _ => format!("far:{}", replica.display()),
        };
        command.arg(image).arg(&destination).args(["--json", "-v", "--stages", how.stages]);
        command.arg("--rsh").arg(&shell).arg("--remote-dsync").arg(&self.far.binary);
        command.args(how.compress.then_some("--compress")).args(&how.options);
        Ok(command)
    }

    /// Runs several ways over all request sizes, as a table and a figure.
    fn figure(
        &self,
        report: &mut Report,
        (file, title): (&Path, &str),
        pattern: Pattern,
        ways: &[(&str, Option<How>)],
    ) -> Result<()> {
        let sizes: Vec<String> = SIZES.iter().map(|size| format!("{} KiB", size >> 10)).collect();
        let mut columns = vec!["MB/s"];
        columns.extend(sizes.iter().map(String::as_str));
        columns.extend(["CPU s/GiB here", "there"]);
        let mut table = Table::new(title, &columns);
        let mut series = Vec::new();
        for (name, how) in ways {
            let runs: Vec<Figures> = SIZES
                .iter()
                .map(|size| self.run(how.as_ref(), pattern, (*size, PRESSURE)))
                .collect::<Result<_>>()?;
            let rate = |f: &Figures| if how.is_some() { f.mirrored } else { f.written };
            let mut row = vec![name.to_string()];
            row.extend(runs.iter().map(|f| format!("{:.0}", rate(f) / 1e6)));
            if how.is_some() {
                let mean = |part: fn(&Figures) -> f64| median(&runs.iter().map(part).collect::<Vec<_>>());
                row.extend([format!("{:.2}", mean(|f| f.here)), format!("{:.2}", mean(|f| f.there))]);
            }
            table.row(row);
            let points = runs.iter().enumerate().map(|(at, f)| (at as f64, rate(f) / 1e6)).collect();
            series.push(Series { name: name.to_string(), points });
        }
        report.table(&table);
        lines(file, title, ("request size", "MB/s"), &sizes, &series)?;
        report.line(&format!("plotted in {}", file.display()));
        Ok(())
    }
}

/// The figures of the paper.
pub(crate) fn mirror(bench: &Bench, report: &mut Report) -> Result<()> {
    let Some(binary) = &bench.dsync else {
        report.left_out("mirror", "there is no dsync binary");
        return Ok(());
    };
    report.section(
        "Mirror",
        "Bytes of changed blocks that the replica confirmed a second while a client wrote through NBD as fast as it got \
         (at most 600 MB/s, 40 in figure 6; 8 requests in flight, half of the content compresses). Both sites and the writer share the \
         processors: seconds of processor time are told for each site and GiB.",
    );
    let place = scratch(&bench.dir)?;
    let sockets = sockets()?;
    let dsync = Dsync::new(binary, place.path().join("state"));
    let far = Dsync::new(binary, place.path().join("far"));
    let figures = results(bench);
    std::fs::create_dir_all(&figures)?;
    let listening = listen(&dsync, &far, place.path(), report);
    let setting = Setting {
        dsync: &dsync,
        far,
        place: place.path(),
        sockets: sockets.path(),
        seconds: if bench.quick { 1.0 } else { 3.0 },
        bytes: bench.size.unwrap_or(if bench.quick { 256 << 20 } else { 2 << 30 }),
        quiet: bench.quiet,
        seed: bench.seed,
        rounds: bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 }),
        tls: listening.as_ref().map(|(listener, port)| (*port, listener.id())),
    };
    let at = |name: &str| figures.join(name);
    let wanted = |name: &str| bench.only.is_empty() || bench.only.iter().any(|word| word == name);
    let serial = |compress, encrypt| Some(How::new("serial", compress, encrypt));
    let figure_3 = [
        ("no mirror", None),
        ("without adaptive batching", Some(How::new("serial", false, false).with(&["--fixed-interval"]))),
        ("adaptive batching", serial(false, false)),
    ];
    let figure_4 = [
        ("neither", serial(false, false)),
        ("compression", serial(true, false)),
        ("encryption", serial(false, true)),
        ("both", serial(true, true)),
    ];
    let models: Vec<(&str, Option<How>)> =
        MODELS.iter().map(|model| (*model, Some(How::new(model, true, true)))).collect();
    for (number, title, pattern, ways) in [
        (3, "baseline", SEQUENTIAL, &figure_3[..]),
        (4, "compression and encryption, serial", SEQUENTIAL, &figure_4[..]),
        (5, "models, sequential", SEQUENTIAL, &models[..]),
        (7, "models, 50 % random", HALF, &models[..]),
        (8, "models, 100 % random", RANDOM, &models[..]),
    ] {
        if wanted(&format!("fig{number}")) {
            let file = at(&format!("mirror-fig{number}.svg"));
            setting.figure(report, (&file, &format!("Figure {number}: {title}")), pattern, ways)?;
        }
    }
    if wanted("fig6") {
        pace::convergence(&setting, report, &figures, &bench.memory_dir)?;
    }
    if wanted("destination") {
        pace::destination(&setting, report, &figures, &bench.memory_dir)?;
    }
    if wanted("limits") {
        pace::limits(&setting, report, &figures)?;
    }
    if wanted("cost") {
        cost(&setting, report)?;
    }
    if wanted("reader") {
        reader(&setting, report)?;
    }
    if let Some((listener, _)) = listening {
        listener.stop()?;
    }
    Ok(())
}

/// What somebody who reads the replica costs the mirror: its lag with a reader and without.
fn reader(setting: &Setting, report: &mut Report) -> Result<()> {
    let mut lags = [Vec::new(), Vec::new()];
    for _ in 0..5 {
        for (read, lags) in lags.iter_mut().enumerate() {
            let how = How { read: read == 1, ..How::new("adaptive", false, false) };
            lags.push(setting.run(Some(&how), RANDOM, (4 << 10, EASY))?.lag);
        }
    }
    let mut table = Table::new(
        "A rehearsal's cost: the lag of a mirror in ms, 4 KiB random writes at 40 MB/s, without a reader and with one at REPLICA@now",
        &["", "median", "least", "most"],
    );
    for (name, lags) in ["without", "with a reader"].into_iter().zip(&lags) {
        let bound = |pick: fn(f64, f64) -> f64| lags.iter().copied().reduce(pick).unwrap_or(0.0);
        let row = [median(lags), bound(f64::min), bound(f64::max)].map(|lag| format!("{:.1}", lag * 1e3));
        table.row([name.to_string()].into_iter().chain(row).collect());
    }
    report.table(&table);
    let [without, with] = lags.map(|lags| median(&lags));
    report.goal("a mirror's lag, with a reader : without", with / without, true, 1.2);
    Ok(())
}

/// What a mirror costs the writer: operations a second at depth 1 and 32 with it and without.
fn cost(setting: &Setting, report: &mut Report) -> Result<()> {
    let mut table = Table::new(
        "The writer's cost: 4 KiB random writes a second",
        &["", "tracking only", "mirrored", "ratio"],
    );
    for depth in [1, 32] {
        let mut rates = [Vec::new(), Vec::new()];
        // One request at a time is as fast as the system wakes threads, which differs from run to run.
        for _ in 0..if depth == 1 { 9 } else { 3 } {
            for (mirrored, rates) in rates.iter_mut().enumerate() {
                rates.push(setting.writes(depth, mirrored == 1)?);
            }
        }
        let [plain, mirrored] = rates.map(|rates| median(&rates));
        let ratio = mirrored / plain;
        report.goal(&format!("IOPS at depth {depth}, mirrored : not"), ratio, false, 0.9);
        table.row(vec![
            format!("depth {depth}"),
            format!("{plain:.0}"),
            format!("{mirrored:.0}"),
            format!("{ratio:.2}"),
        ]);
    }
    report.table(&table);
    Ok(())
}

impl Setting<'_> {
    /// Random writes of 4 KiB a second, so many in flight.
    fn writes(&self, depth: usize, mirrored: bool) -> Result<f64> {
        let folder = scratch(self.place)?;
        let (image, socket) = (folder.path().join("source.raw"), self.sockets.join("cost"));
        sparse(&image, self.bytes)?;
        let _ = std::fs::remove_file(&socket);
        let server = self.dsync.serve(&image, &socket, &[])?;
        let mut mirror = None;
        if mirrored {
            let mut command = self.dsync.command("mirror");
            command.arg(&image).arg(folder.path().join("replica.raw")).arg("--json");
            let mut started = Daemon::start_bare(&mut command)?;
            while !started.so_far().contains("mirroring to") {
                started.check()?;
                std::thread::sleep(Duration::from_millis(10));
            }
            mirror = Some(started);
        }
        let mut client = Client::connect_with(&Address::Unix(socket.clone()), &export(&image), &[])?;
        let mut random = dsync_tests::Random::seeded(self.seed);
        let data = random.bytes(4 << 10);
        // A part of the disk, so that its regions are active.
        let slots = (64u64 << 20) / 4096;
        for warm in [true, false] {
            let (began, mut count) = (Instant::now(), 0u64);
            let seconds = if warm { 0.5 } else { self.seconds };
            while began.elapsed().as_secs_f64() < seconds {
                let offset = random.below(slots) * 4096;
                client.start(&NbdCommand::Write { offset, data: data.clone(), flags: 0 })?;
                count += 1;
                if client.in_flight() >= depth {
                    client.finish()?;
                }
            }
            while client.in_flight() > 0 {
                client.finish()?;
            }
            if !warm {
                let rate = count as f64 / began.elapsed().as_secs_f64();
                client.close()?;
                if let Some(mirror) = mirror {
                    mirror.stop()?;
                }
                server.stop()?;
                return Ok(rate);
            }
        }
        Ok(0.0)
    }
}

/// A listener for the encrypted runs.
fn listen(dsync: &Dsync, far: &Dsync, place: &Path, report: &mut Report) -> Option<(Daemon, u16)> {
    let listening = || -> Result<(Daemon, u16)> {
        let key = |site: &Dsync| -> Result<String> {
            let outcome = process::run(&mut site.command("key"), Duration::from_secs(10))?;
            let line = outcome.stdout.lines().find(|line| line.starts_with("dsync-"));
            Ok(line.context("dsync key printed no key")?.to_string())
        };
        let (near, there) = (key(dsync)?, key(far)?);
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        for (site, name, key) in
            [(dsync, format!("127.0.0.1:{port}"), &there), (far, "bench".to_string(), &near)]
        {
            let mut command = site.command("key");
            command.args(["trust", &name, key, "--for", "push,pull,serve"]);
            process::run(&mut command, Duration::from_secs(10))?;
        }
        let mut command = far.command("receive");
        command.args(["--listen", &format!("127.0.0.1:{port}")]).arg("--into").arg(place);
        let mut listener = Daemon::start_bare(&mut command)?;
        let until = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            listener.check()?;
            ensure!(Instant::now() < until, "no listener came up");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok((listener, port))
    };
    match listening() {
        Ok(listening) => Some(listening),
        Err(error) => {
            report.left_out("mirror with encryption", &format!("{error:#}"));
            None
        }
    }
}
