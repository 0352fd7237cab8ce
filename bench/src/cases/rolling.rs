//! Files whose content has moved: beside rsync, which made this known.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use dsync_tests::Random;

use crate::Bench;
use crate::measure::dsync::Dsync;
use crate::measure::packages::{KERNELS, PACKAGES, versions};
use crate::measure::pair::{Cost, LIMIT, Pair};
use crate::measure::places::{free, scratch};
use crate::measure::process;
use crate::measure::report::{Report, Table, median, seconds, size};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Memory beyond that of a sync of nothing, and its share of a file in per cent.
fn extra(peak: u64, least: u64, bytes: u64) -> (String, f64) {
    let extra = peak.saturating_sub(least);
    let share = extra as f64 * 100.0 / bytes as f64;
    (format!("{} ({share:.1} %)", size(extra as f64)), share)
}

/// Writes a file, a MiB at a time; stretches of zeroes become holes if it is to be `sparse`.
fn write(path: &Path, size: u64, sparse: bool, mut fill: impl FnMut(u64, &mut [u8])) -> Result<()> {
    let file = File::create(path).with_context(|| path.display().to_string())?;
    let mut buf = vec![0; MIB as usize];
    let mut at = 0;
    while at < size {
        process::go_on()?;
        let len = MIB.min(size - at) as usize;
        buf.fill(0);
        fill(at, &mut buf[..len]);
        if !sparse || buf[..len].iter().any(|b| *b != 0) {
            file.write_all_at(&buf[..len], at)?;
        }
        at += len as u64;
    }
    file.set_len(size)?;
    file.sync_all()?;
    Ok(())
}

/// Content that compresses nowhere, by its place alone.
fn noise(seed: u64, at: u64, buf: &mut [u8]) {
    let mut random = Random::seeded(seed << 40 ^ at);
    Random::seeded(random.bits()).fill(buf);
}

/// Runs the scenario.
pub(crate) fn rolling(bench: &Bench, report: &mut Report) -> Result<()> {
    let Some(binary) = &bench.dsync else {
        report.section("rolling: files whose content has moved", "");
        report.left_out("rolling", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    let folder = scratch(&bench.dir)?;
    let path = |name: &str| folder.path().join(name);
    let place =
        Pair { bench, dsync: Dsync::new(binary, path("state")), source: path("source"), copy: path("copy") };
    if !place.has_rsync() {
        report.left_out("rsync", "it is not installed");
    }
    if bench.wants("inserted") {
        inserted(&place, report, &path("old"))?;
    }
    hostile(&place, report, &path("old"))?;
    if bench.wants("packages") {
        if let Err(error) = real(&place, report, folder.path()) {
            process::go_on()?;
            report.left_out("packages", &format!("{error:#}"));
        }
    }
    Ok(())
}

/// 1 MiB inserted at the front.
fn inserted(place: &Pair<'_>, report: &mut Report, old: &Path) -> Result<()> {
    let bench = place.bench;
    let bytes = bench.size.unwrap_or(if bench.quick { 256 * MIB } else { 4 * GIB }) / MIB * MIB;
    report.section(
        &format!("rolling: {} with 1 MiB inserted at the front", size(bytes as f64)),
        "The copy's old state has just been written, so it is in the page cache, which rsync reads and dsync reads past. \
         Bytes are those of both directions. Each run ends with an fsync of the copy. Extra memory is that beyond a sync of \
         nothing, and its share of the file (Rasch and Burns: 3.1 %). The limit reads the copy, then reads the source while it \
         writes the copy, with io_uring.",
    );
    let least = place.least()?;
    write(old, bytes, false, |at, buf| noise(bench.seed, at, buf))?;
    write(&place.source, bytes + MIB, false, |at, buf| match at.checked_sub(MIB) {
        Some(at) => noise(bench.seed, at, buf),
        None => noise(bench.seed + 1, at, buf),
    })?;
    let ways: [(&str, Option<&[&str]>); 5] = [
        ("rsync", None),
        ("dsync --commit journal", Some(&["--commit", "journal"])),
        ("dsync --commit in-place", Some(&["--commit", "in-place"])),
        ("dsync --commit reflink", Some(&["--commit", "reflink"])),
        ("limit", None),
    ];
    let mut costs = [const { Vec::<Cost>::new() }; 5];
    for round in 0..bench.rounds.unwrap_or(if bench.quick { 1 } else { 3 }) {
        for turn in 0..ways.len() {
            let at = (turn + round) % ways.len();
            let (name, options) = ways[at];
            if (name == "rsync" && !place.has_rsync()) || (round > 0 && costs[at].is_empty()) {
                continue;
            }
            place.restore(old)?;
            let cost = match options {
                Some(options) => place.dsync(options).map(Some),
                None if name == "limit" => place.limit().map(Some),
                None => place.rsync("", LIMIT),
            };
            match cost {
                Ok(Some(cost)) => {
                    if !bench.quiet {
                        eprintln!("{name}: {} s, {} bytes", seconds(cost.seconds), cost.bytes);
                    }
                    costs[at].push(cost);
                }
                Ok(None) => report.left_out(name, "it took too long"),
                Err(error) if format!("{error:#}").contains("cannot clone") => {
                    report.left_out(name, "the file system cannot clone");
                }
                Err(error) => report.failed(name, &error),
            }
        }
    }
    told(report, &ways.map(|(name, _)| name), &costs, (least, bytes));
    Ok(())
}

/// The table of the ways, in the order of [`inserted`]. Of memory, the least that a sync takes, and the bytes of the file.
fn told(report: &mut Report, names: &[&str; 5], costs: &[Vec<Cost>; 5], (least, bytes): (u64, u64)) {
    let middle = |costs: &[Cost], part: fn(&Cost) -> f64| median(&costs.iter().map(part).collect::<Vec<_>>());
    let mut table =
        Table::new("1 MiB inserted", &["program", "s", "processor s", "bytes", "of rsync's", "extra memory"]);
    let theirs = costs[0].first().map(|cost| cost.bytes);
    for (name, costs) in names.iter().zip(costs) {
        let Some(first) = costs.first() else { continue };
        let peak = costs.iter().map(|c| c.peak).max().unwrap_or(0);
        let share = theirs.map_or("?".into(), |theirs| format!("{:.3}", first.bytes as f64 / theirs as f64));
        if name.ends_with("in-place") {
            let allowed = bytes as f64 * 0.031 + (32 * MIB) as f64;
            let ratio = peak.saturating_sub(least) as f64 / allowed;
            report.goal("rolling: extra memory in place, of 3.1 % of the file and 32 MiB", ratio, true, 1.0);
        }
        let memory = if name.starts_with("dsync") { extra(peak, least, bytes).0 } else { String::new() };
        let sent = [first.bytes.to_string(), share];
        let sent = if *name == "limit" { Default::default() } else { sent };
        let cost = [seconds(middle(costs, |c| c.seconds)), seconds(middle(costs, |c| c.processor))];
        table.row([name.to_string()].into_iter().chain(cost).chain(sent).chain([memory]).collect());
    }
    report.table(&table);
    let [rsync, journal, in_place, _, limit] = costs;
    if let (Some(theirs), Some(ours)) = (rsync.first(), in_place.first()) {
        let bytes = ours.bytes as f64 / theirs.bytes as f64;
        report.goal("rolling: bytes, against rsync", bytes, true, 1.02);
        for (name, costs) in [("in-place", in_place), ("journal", journal)] {
            let ratio = |part| middle(costs, part) / middle(rsync, part);
            report.goal(&format!("rolling: --commit {name} : rsync"), ratio(|c| c.seconds), true, 1.0);
            report.goal(
                &format!("rolling: processor, --commit {name} : rsync"),
                ratio(|c| c.processor),
                true,
                1.2,
            );
        }
    }
    if !limit.is_empty() {
        let ratio = middle(in_place, |c| c.seconds) / middle(limit, |c| c.seconds);
        report.goal("rolling: --commit in-place : the limit", ratio, true, 1.25);
    }
}

/// What a file holds: a half at a time.
type Fill = fn(seed: u64, at: u64, size: u64, buf: &mut [u8]);

/// Blocks whose weak sums are equal for rsync, wherever they are cut, and whose content is not.
fn equal_sums(seed: u64, at: u64, buf: &mut [u8]) {
    buf.fill(100);
    let mut random = Random::seeded(seed << 40 ^ at);
    for block in buf.chunks_mut(512) {
        for _ in 0..16 {
            // Neither the sum nor the sum of sums changes.
            let place = random.below(block.len() as u64 - 2) as usize;
            block[place] += 1;
            block[place + 1] -= 2;
            block[place + 2] += 1;
        }
    }
}

/// Files at which others take forever: name, sparse, the old content, the new one.
const HOSTILE: [(&str, bool, Fill, Fill); 7] = [
    ("zeroes early, changes late", false, early, late),
    ("the same, sparse", true, early, late),
    (
        "[zeroes][noise] to [noise][zeroes]",
        false,
        |seed, at, size, buf| {
            if at >= size / 2 {
                noise(seed, at - size / 2, buf)
            }
        },
        |seed, at, size, buf| {
            if at < size / 2 {
                noise(seed, at, buf)
            }
        },
    ),
    (
        "equal weak sums",
        false,
        |seed, at, _, buf| equal_sums(seed, at, buf),
        |seed, at, _, buf| equal_sums(seed + 1, at, buf),
    ),
    (
        "one block again and again, shifted",
        false,
        |_, at, _, buf| {
            (at..).zip(buf).for_each(|(at, b)| *b = ((at % 4096 * 31) >> 3) as u8);
        },
        |_, at, _, buf| {
            (at..).zip(buf).for_each(|(at, b)| *b = (((at + 4095) % 4096 * 31) >> 3) as u8);
        },
    ),
    ("a byte before every 4 MiB", false, |seed, at, _, buf| noise(seed, at, buf), shifted),
    (
        "nothing alike",
        false,
        |seed, at, _, buf| noise(seed, at, buf),
        |seed, at, _, buf| noise(seed + 7, at, buf),
    ),
];

fn early(seed: u64, at: u64, size: u64, buf: &mut [u8]) {
    if at >= size / 2 {
        noise(seed, at, buf);
    }
}

/// The noise with one byte before each 4 MiB of it, so that nothing stands at its place any more.
fn shifted(seed: u64, at: u64, _size: u64, buf: &mut [u8]) {
    const EVERY: u64 = 4 * MIB;
    let mut old = vec![0; MIB as usize];
    let mut held = None;
    let mut done = 0;
    while done < buf.len() {
        let place = at + done as u64;
        let (part, within) = (place / (EVERY + 1), place % (EVERY + 1));
        if within == 0 {
            buf[done] = part as u8;
            done += 1;
            continue;
        }
        let from = part * EVERY + within - 1;
        let chunk = from / MIB * MIB;
        if held.replace(chunk) != Some(chunk) {
            noise(seed, chunk, &mut old);
        }
        let skip = (from - chunk) as usize;
        let len = (old.len() - skip).min(buf.len() - done).min((EVERY + 1 - within) as usize);
        buf[done..done + len].copy_from_slice(&old[skip..skip + len]);
        done += len;
    }
}

/// As before, but its last quarter has zeroes and noise in turns, which nowhere begin at a block.
fn late(seed: u64, at: u64, size: u64, buf: &mut [u8]) {
    early(seed, at, size, buf);
    if at >= size / 4 * 3 {
        noise(seed + 3, at, buf);
        let len = buf.len();
        buf[len / 7..len / 7 * 5].fill(0);
    }
}

fn hostile(place: &Pair<'_>, report: &mut Report, old: &Path) -> Result<()> {
    let bench = place.bench;
    let files: Vec<_> =
        HOSTILE.into_iter().filter(|(name, ..)| bench.wants(name) || bench.wants("hostile")).collect();
    if files.is_empty() {
        return Ok(());
    }
    let sizes = match (bench.quick, bench.size) {
        (true, _) => vec![32 * MIB, 128 * MIB],
        (_, Some(most)) => vec![most / 4, most],
        _ => vec![GIB, 4 * GIB],
    };
    let sizes: Vec<u64> = sizes.iter().map(|size| size / (8 * MIB) * (8 * MIB)).filter(|s| *s > 0).collect();
    let least = place.least()?;
    report.section(
        "rolling: files at which others take for ever",
        &format!(
            "dsync --method rolling --commit in-place beside rsync --inplace, which is given four times as long, {} s at \
             least. What makes equal sums for rsync makes none here, and nobody can make any: the weak sum has a key. Extra \
             memory is that beyond a sync of nothing, and its share of the file. Sizes up to 16 GiB: --size 16G.",
            patience(bench)
        ),
    );
    let mut table = Table::new(
        "time and bytes",
        &[
            "file",
            "size",
            "dsync s",
            "s/GiB",
            "bytes",
            "of the file",
            "extra memory",
            "rsync s",
            "bytes",
            "rsync/dsync",
        ],
    );
    let mut most = 0f64;
    for (name, sparse, before, after) in files {
        let mut rates = Vec::new();
        for &bytes in &sizes {
            let needed = bytes * 3 + GIB;
            if free(old.parent().unwrap_or(old)) < needed {
                report.left_out(&format!("{name}, {}", size(bytes as f64)), "too little space");
                continue;
            }
            write(old, bytes, sparse, |at, buf| before(bench.seed, at, bytes, buf))?;
            write(&place.source, bytes, sparse, |at, buf| after(bench.seed, at, bytes, buf))?;
            let (ours, cells) = hostile_row(place, old, name, bytes, least)?;
            rates.push(ours.seconds / (bytes as f64 / GIB as f64));
            most = most.max(ours.bytes as f64 / bytes as f64);
            if !bench.quiet {
                eprintln!("{}", cells.join(", "));
            }
            table.row(cells);
        }
        if let [small, .., large] = rates[..] {
            report.goal(
                &format!("rolling: {name}: time a GiB, largest to smallest"),
                large / small,
                true,
                1.5,
            );
        }
    }
    report.goal("rolling: bytes, against the file", most, true, 1.01);
    report.table(&table);
    Ok(())
}

/// The least that rsync is given, in seconds.
fn patience(bench: &Bench) -> f64 {
    if bench.quick { 10.0 } else { 60.0 }
}

/// What a file of so many bytes costs dsync, and its row in the table.
fn hostile_row(
    place: &Pair<'_>,
    old: &Path,
    name: &str,
    bytes: u64,
    least: u64,
) -> Result<(Cost, Vec<String>)> {
    place.restore(old)?;
    let ours = place.dsync(&["--commit", "in-place"])?;
    // Frames and sums cost a little, whatever is in them.
    let share = ours.bytes as f64 / bytes as f64;
    ensure!(share < 1.02 || bytes < GIB, "{name}: {} bytes for {bytes}", ours.bytes);
    let mut cells = vec![
        name.to_string(),
        size(bytes as f64),
        seconds(ours.seconds),
        seconds(ours.seconds / (bytes as f64 / GIB as f64)),
        size(ours.bytes as f64),
        format!("{share:.4}"),
        extra(ours.peak, least, bytes).0,
    ];
    if place.has_rsync() {
        place.restore(old)?;
        let limit = Duration::from_secs_f64(patience(place.bench).max(4.0 * ours.seconds));
        match place.rsync("--inplace", limit)? {
            Some(theirs) => cells.extend([
                seconds(theirs.seconds),
                size(theirs.bytes as f64),
                format!("{:.1}", theirs.seconds / ours.seconds),
            ]),
            None => cells.extend([
                format!("> {}", seconds(limit.as_secs_f64())),
                "?".into(),
                format!("> {:.1}", limit.as_secs_f64() / ours.seconds),
            ]),
        }
    }
    Ok((ours, cells))
}

/// The size of a file, and the bytes that each way to send it to where its older version is takes; 0 without rsync.
fn traffic(place: &Pair<'_>, old: &Path, total: u64) -> Result<[u64; 6]> {
    let mut bytes = [total, 0, 0, 0, 0, 0];
    for (options, to) in [
        &["--commit", "journal"][..],
        &["--commit", "in-place", "--cycles", "trim"],
        &["--commit", "in-place", "--cycles", "delete"],
    ]
    .iter()
    .zip(&mut bytes[1..4])
    {
        place.restore(old)?;
        *to = place.dsync(options)?.bytes;
    }
    for (options, to) in ["", "--inplace"].iter().zip(&mut bytes[4..]).filter(|_| place.has_rsync()) {
        place.restore(old)?;
        *to = place.rsync(options, LIMIT)?.map_or(0, |cost| cost.bytes);
    }
    Ok(bytes)
}

/// Successive versions of kernel modules and other binaries.
fn real(place: &Pair<'_>, report: &mut Report, folder: &Path) -> Result<()> {
    ensure!(dsync_tests::find("apt-get").is_some(), "apt-get is not installed");
    report.section(
        "rolling: two versions of packages of binaries",
        "Each package's modules, libraries and programs, joined to one file. Bytes of both directions. Lost compression is \
         what a program sends more in place than out of place, as a part of the file, as the paper counts it (\"In-Place \
         Rsync\", Rasch and Burns: 0.54 % lost compression with either rule, 3.1 % of the file's size of extra memory).",
    );
    let columns = [
        "package",
        "files",
        "size",
        "rolling",
        "in place, trim",
        "in place, delete",
        "rsync",
        "rsync --inplace",
    ];
    let mut table = Table::new("bytes", &columns);
    let mut sums = [0u64; 6];
    let mut packages: Vec<&str> = PACKAGES.to_vec();
    packages.push(KERNELS);
    if place.bench.quick {
        packages.truncate(2);
    }
    for name in packages {
        process::go_on()?;
        let found = match versions(folder, name) {
            Ok(Some(found)) => found,
            Ok(None) => {
                report.left_out(name, "the archives have one version only");
                continue;
            }
            Err(error) => {
                process::go_on()?;
                report.left_out(name, &format!("{error:#}"));
                continue;
            }
        };
        let (old, new, count) = found;
        std::fs::copy(&new, &place.source)?;
        let total = std::fs::metadata(&new)?.len();
        let bytes = traffic(place, &old, total)?;
        let name = if name.starts_with('^') { "linux-image-6.1 (cloud)" } else { name };
        let mut cells = vec![name.to_string(), count.to_string(), size(total as f64)];
        cells.extend(bytes[1..].iter().map(u64::to_string));
        if !place.bench.quiet {
            eprintln!("{}", cells.join(", "));
        }
        table.row(cells);
        sums.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
    }
    let mut cells = vec!["all".to_string(), String::new(), size(sums[0] as f64)];
    cells.extend(sums[1..].iter().map(u64::to_string));
    table.row(cells);
    let lost = |at: usize| (sums[at] as f64 - sums[1] as f64) * 100.0 / sums[0].max(1) as f64;
    let percent = |at: usize| format!("{:.2} %", lost(at));
    let blank = || "".to_string();
    table.row(vec!["lost compression".into(), blank(), blank(), blank(), percent(2), percent(3)]);
    report.table(&table);
    report.goal("rolling: lost compression in %, trim", lost(2), true, 0.5);
    report.goal("rolling: lost compression in %, delete", lost(3), true, 0.5);
    if sums[5] > 0 {
        let ratio = sums[2] as f64 / sums[5] as f64;
        report.goal("rolling: bytes in place, against rsync --inplace", ratio, true, 1.0);
    }
    Ok(())
}
