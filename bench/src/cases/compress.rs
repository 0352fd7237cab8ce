//! A compressible image over a slow link.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dsync_tests::Random;
use dsync_tests::nbd::{Address, Client};

use crate::Bench;
use crate::hosts::line::Line;
use crate::measure::dsync::{Dsync, export};
use crate::measure::places::{scratch, sockets};
use crate::measure::process::{self, quote, run, shell};
use crate::measure::report::{Report, Table, seconds, size};

/// Bits a second.
const RATE: u64 = 100_000_000;
const LIMIT: Duration = Duration::from_secs(600);

/// Text that shrinks about as much as a file system's.
struct Prose {
    words: Vec<Vec<u8>>,
}

impl Prose {
    fn new(random: &mut Random) -> Prose {
        let word = |random: &mut Random| {
            let len = 2 + random.below(9);
            (0..len).map(|_| b'a' + random.below(26) as u8).chain([b' ']).collect()
        };
        Prose { words: (0..3000).map(|_| word(random)).collect() }
    }

    fn fill(&self, random: &mut Random, buf: &mut Vec<u8>, len: usize) {
        buf.clear();
        while buf.len() < len {
            // The product of two makes some words common and most rare.
            let at = random.below(3000) * random.below(3000) / 3000;
            buf.extend_from_slice(&self.words[at as usize]);
            if random.one_in(6) {
                buf.extend_from_slice(random.bits().to_string().as_bytes());
            }
        }
        buf.truncate(len);
    }

    /// Writes an image of it.
    fn write(&self, random: &mut Random, image: &Path, bytes: u64) -> Result<()> {
        let mut text = Vec::new();
        let mut out = BufWriter::new(File::create(image)?);
        for _ in 0..bytes >> 20 {
            process::go_on()?;
            self.fill(random, &mut text, 1 << 20);
            out.write_all(&text)?;
        }
        Ok(out.into_inner()?.sync_all()?)
    }

    /// Writes so many blocks of it to a served image of so many bytes.
    fn scatter(&self, random: &mut Random, client: &mut Client, blocks: u64, bytes: u64) -> Result<()> {
        let mut text = Vec::new();
        for _ in 0..blocks {
            self.fill(random, &mut text, 4096);
            client.write(random.below(bytes >> 12) << 12, &text)?;
        }
        Ok(client.flush()?)
    }
}

/// Runs the scenario.
pub(crate) fn compress(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes =
        bench.size.unwrap_or(if bench.quick { 64 << 20 } else { 512 << 20 }).next_multiple_of(1 << 20);
    report.section(
        "compress: a compressible image over 100 Mbit/s",
        &format!(
            "An image of {} of text, seeded and then synced with a tenth of its blocks changed. The time is compared with what \
             the bytes sent need at the link's rate; the headers of TCP and ssh are part of the time.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("compress", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let folder = scratch(&bench.dir)?;
    let sockets = sockets()?;
    let line = Line::new(RATE, binary, folder.path(), report)?;
    let state = |name: &str| folder.path().join(name);

    let mut random = Random::seeded(bench.seed);
    let prose = Prose::new(&mut random);
    let image = folder.path().join("text.img");
    prose.write(&mut random, &image, bytes)?;
    if dsync_tests::find("zstd").is_some() {
        let counted = run(&mut shell(&format!("zstd -1 -q -c {} | wc -c", quote(&image))), LIMIT)?;
        let alone: f64 = counted.stdout.trim().parse().unwrap_or(0.0);
        let time = seconds(alone * 8.0 / RATE as f64);
        report.line(&format!("zstd -1 alone makes {} of it, {time} s of the link", size(alone)));
    }

    let dsync = Dsync::new(binary, state("state"));
    let socket = sockets.path().join("nbd");
    let server = dsync.serve(&image, &socket, &[])?;
    let replica = folder.path().join("copy.img");
    let destination = format!("backup:{}", replica.display());
    let options = [&["--compress"][..], &line.options()].concat();
    let mut table =
        Table::new("Time against the link", &["sync", "changed", "sent", "seconds", "link alone", "ratio"]);
    for what in ["seed", "a tenth changed"] {
        let mut changed = bytes;
        if what != "seed" {
            changed = bytes / 10;
            let mut client = Client::connect_with(&Address::Unix(socket.clone()), &export(&image), &[])?;
            prose.scatter(&mut random, &mut client, changed >> 12, bytes)?;
            client.close()?;
        }
        let synced = dsync.sync(&image, &destination, &options, LIMIT)?;
        let sent = synced.number("bytes_sent") as f64;
        let alone = sent * 8.0 / RATE as f64;
        let ratio = synced.outcome.seconds / alone;
        table.row(vec![
            what.into(),
            size(changed as f64),
            size(sent),
            seconds(synced.outcome.seconds),
            seconds(alone),
            format!("{ratio:.2}"),
        ]);
        same(&image, &replica)?;
        // A small delta is over before the connection has paid off.
        if what == "seed" {
            report.goal("compressed seed: time, times the link's", ratio, true, 1.1);
            let bare = line.seconds(sent as u64)?;
            report.line(&format!(
                "so many random bytes through the same remote shell into cat, without dsync: {} s ({:.2})",
                seconds(bare),
                bare / alone
            ));
        }
    }
    report.table(&table);
    server.stop()
}

fn same(a: &Path, b: &Path) -> Result<()> {
    let (from, to) = (File::open(a)?, File::open(b).with_context(|| b.display().to_string())?);
    let (mut one, mut other) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let len = from.metadata()?.len();
    ensure!(to.metadata()?.len() == len, "{}: another size", b.display());
    for at in (0..len).step_by(1 << 20) {
        let part = (len - at).min(1 << 20) as usize;
        from.read_exact_at(&mut one[..part], at)?;
        to.read_exact_at(&mut other[..part], at)?;
        ensure!(one[..part] == other[..part], "{}: WRONG CONTENT after byte {at}", b.display());
    }
    Ok(())
}

/// A remote shell over a slow link: runs the words here, and carries so many bits a second each way.
pub(crate) fn rsh(rate: u64, host: &str, words: &[String]) -> Result<i32> {
    ensure!(!host.is_empty() && !words.is_empty(), "rsh RATE HOST COMMAND...");
    let mut child = std::process::Command::new("/bin/sh");
    let mut child =
        child.arg("-c").arg(words.join(" ")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    // The end of either side's words ends that direction alone.
    std::thread::spawn(move || input.map(|input| carry(io::stdin(), input, rate)));
    if let Some(output) = output {
        carry(output, io::stdout(), rate);
    }
    Ok(child.wait()?.code().unwrap_or(255))
}

fn carry(mut from: impl Read, mut to: impl Write, rate: u64) {
    let mut free_at = Instant::now();
    let mut buf = [0; 16 << 10];
    while let Ok(len @ 1..) = from.read(&mut buf) {
        let now = Instant::now();
        // A link that was idle owes nothing.
        free_at = free_at.max(now) + Duration::from_secs_f64(len as f64 * 8.0 / rate as f64);
        std::thread::sleep(free_at.saturating_duration_since(now));
        if to.write_all(&buf[..len]).and_then(|()| to.flush()).is_err() {
            return;
        }
    }
}
