//! `dsync demo`: a demonstration on a scratch disk. An image is served and filled through its NBD export, a replica is seeded,
//! a little is changed, and the replica is synced and compared byte for byte.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nbd::client::{Address, Client};
use serde::Serialize;
use serde_json::Value;

use crate::args;
use crate::failure::Failure;
use crate::output::Output;
use crate::terms::units;

/// The most regions of data on the scratch disk, and bytes of each.
const REGIONS: u64 = 200;
const REGION: usize = 1 << 20;
/// Regions that are changed, and bytes of each change.
const CHANGED: u64 = 12;
const CHANGE: usize = 5 * BLOCK as usize;
const BLOCK: u64 = 4096;

/// The smallest disk with room for them.
const LEAST: u64 = 64 << 20;

/// The server, stopped with the demo.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::process::Pid::from_raw(self.0.id() as i32)
            .map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::TERM));
        let _ = self.0.wait();
    }
}

fn connect(socket: &Path) -> Result<Client> {
    Client::connect(&Address::from(socket), "disk").context("cannot connect to the demo's server")
}

/// Bytes that cannot be compressed.
fn noise(len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).context("/dev/urandom")?;
    Ok(bytes)
}

/// The start of a region: regions of [`REGION`] bytes are spread over a disk of `size` bytes.
fn region(number: u64, regions: u64, size: u64) -> u64 {
    (size / regions * number).next_multiple_of(BLOCK)
}

fn fill(mut disk: Client, regions: u64) -> Result<()> {
    for number in 0..regions {
        disk.write(region(number, regions, disk.size), &noise(REGION)?)?;
    }
    disk.flush().context("cannot flush the export")
}

fn change(mut disk: Client, regions: u64) -> Result<()> {
    for number in 0..CHANGED {
        let at = region(number * regions / CHANGED, regions, disk.size);
        disk.write(at + number * 8 * BLOCK, &noise(CHANGE)?)?;
    }
    disk.flush().context("cannot flush the export")
}

/// One line of the table.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    blocks: Option<u64>,
    bytes_read: u64,
    bytes_sent: u64,
    bytes_written: u64,
    seconds: f64,
}

fn sync(dsync: &Path, state: &Path, from: &Path, to: &Path, what: &'static str) -> Result<Row> {
    let output = Command::new(dsync)
        .args(["--json", "--state-dir"])
        .arg(state)
        .arg("sync")
        .arg(from)
        .arg(to)
        .stderr(Stdio::piped())
        .output()
        .context("cannot run dsync")?;
    ensure!(
        output.status.success(),
        "the demo's sync failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let lines = String::from_utf8_lossy(&output.stdout);
    let summary = lines
        .lines()
        .filter_map(|l| serde_json::from_str::<Value>(l).ok())
        .find(|v| v["message_type"] == "summary")
        .context("the demo's sync gave no summary")?;
    let field = |name: &str| summary[name].as_u64().unwrap_or(0);
    Ok(Row {
        what,
        blocks: Some(field("blocks_changed")),
        bytes_read: field("bytes_read"),
        bytes_sent: field("bytes_sent"),
        bytes_written: field("bytes_written"),
        seconds: summary["seconds"].as_f64().unwrap_or(0.0),
    })
}

/// Copies everything durably, like `dd`, for comparison.
fn full_copy(from: &Path, to: &Path) -> Result<Row> {
    let began = Instant::now();
    let (mut from, mut to) = (File::open(from)?, File::create(to)?);
    let mut buffer = vec![0u8; 4 << 20];
    let mut bytes = 0;
    loop {
        let got = from.read(&mut buffer)?;
        if got == 0 {
            break;
        }
        to.write_all(&buffer[..got])?;
        bytes += got as u64;
    }
    to.sync_all()?;
    Ok(Row {
        what: "a full copy",
        blocks: None,
        bytes_read: bytes,
        bytes_sent: bytes,
        bytes_written: bytes,
        seconds: began.elapsed().as_secs_f64(),
    })
}

fn equal(a: &Path, b: &Path) -> Result<()> {
    let (mut a, mut b) = (File::open(a)?, File::open(b)?);
    ensure!(a.metadata()?.len() == b.metadata()?.len(), "the replica has another size");
    let (mut x, mut y) = (vec![0u8; 1 << 20], vec![0u8; 1 << 20]);
    let mut at = 0u64;
    loop {
        let got = a.read(&mut x)?;
        b.read_exact(&mut y[..got])?;
        if got == 0 {
            return Ok(());
        }
        if let Some(first) = x[..got].iter().zip(&y[..got]).position(|(x, y)| x != y) {
            bail!("the replica differs at byte {}", at + first as u64);
        }
        at += got as u64;
    }
}

fn serve(dsync: &Path, state: &Path, image: &Path, socket: &Path) -> Result<Server> {
    let child = Command::new(dsync)
        .arg("--state-dir")
        .arg(state)
        .arg("serve")
        .arg(image)
        .arg("--socket")
        .arg(socket)
        .stdout(Stdio::null())
        .spawn()
        .context("cannot start the demo's server")?;
    let mut server = Server(child);
    let began = Instant::now();
    // Its file is there a moment before the server listens.
    while UnixStream::connect(socket).is_err() {
        if let Some(status) = server.0.try_wait()? {
            bail!("the demo's server ended ({status})");
        }
        ensure!(began.elapsed() < Duration::from_secs(10), "the demo's server does not come up");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(server)
}

/// Runs the demo.
pub(crate) fn run(args: &args::Demo, output: &Output) -> Result<()> {
    if args.size < LEAST || args.size % 4096 != 0 {
        return Err(Failure::usage(format!(
            "the demo's disk has at least {} and whole blocks of 4 KiB",
            units::size(LEAST)
        ))
        .into());
    }
    let dsync = std::env::current_exe().context("cannot find this program")?;
    let folder =
        tempfile::Builder::new().prefix("dsync-demo-").tempdir().context("cannot create a folder")?;
    let at = |name: &str| -> PathBuf { folder.path().join(name) };
    let (image, replica, socket, state) = (at("disk.raw"), at("replica.raw"), at("socket"), at("state"));
    File::create(&image)?.set_len(args.size)?;
    output.say(&format!(
        "A scratch disk of {}, served as an NBD export from {}.",
        units::size(args.size),
        image.display()
    ));
    let server = serve(&dsync, &state, &image, &socket)?;
    // Half of the disk at most: the rest stays free, as on real ones.
    let regions = REGIONS.min(args.size / 2 / REGION as u64);
    fill(connect(&socket)?, regions)?;
    output.say(&format!(
        "{regions} regions of {} were written to it, through the export.",
        units::size(REGION as u64)
    ));
    let seed = sync(&dsync, &state, &image, &replica, "seed, the first sync")?;
    change(connect(&socket)?, regions)?;
    output.say(&format!("Then a little was changed in {CHANGED} of them."));
    let delta = sync(&dsync, &state, &image, &replica, "sync of the changes")?;
    equal(&image, &replica)?;
    output.say("The replica is equal to the disk, byte for byte.");
    output.say("");
    let copy = full_copy(&image, &at("copy.raw"))?;
    drop(server);

    output.say(&format!(
        "{:<24}{:>10}{:>12}{:>12}{:>12}{:>10}",
        "", "blocks", "read", "sent", "written", "time"
    ));
    for row in [&seed, &delta, &copy] {
        output.say(&format!(
            "{:<24}{:>10}{:>12}{:>12}{:>12}{:>10}",
            row.what,
            row.blocks.map_or_else(|| "all".into(), units::count),
            units::size(row.bytes_read),
            units::size(row.bytes_sent),
            units::size(row.bytes_written),
            units::seconds(row.seconds)
        ));
    }
    output.say("");
    output.say(&format!(
        "The sync moved {} of {}: {:.0} times less than the full copy, in {:.0} times less time.",
        units::size(delta.bytes_sent),
        units::size(args.size),
        copy.bytes_sent as f64 / delta.bytes_sent.max(1) as f64,
        copy.seconds / delta.seconds.max(1e-6)
    ));
    #[derive(Serialize)]
    struct Summary<'a> {
        disk_size: u64,
        equal: bool,
        seed: &'a Row,
        delta: &'a Row,
        copy: &'a Row,
    }
    output.summary(&Summary { disk_size: args.size, equal: true, seed: &seed, delta: &delta, copy: &copy });
    if args.keep {
        output.say(&format!("Everything is kept in {}.", folder.keep().display()));
    }
    Ok(())
}
