//! Images that are tracked by clones: what a clone costs the writers of a file in many pieces, what finding the changes costs, and whole syncs beside those that
//! compare.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dsync_tests::Random;

use crate::Bench;
use crate::measure::content::Content;
use crate::measure::dsync::Dsync;
use crate::measure::limit::BLOCK;
use crate::measure::places::{Loop, root, scratch};
use crate::measure::process::{command, go_on, quote, run, shell};
use crate::measure::report::{Report, Table, median, seconds, size};

const LIMIT: Duration = Duration::from_secs(1200);

/// Blocks that are written between two syncs.
const CHANGED: u64 = 1000;

/// Runs the scenario.
pub(crate) fn clones(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 64 << 20 } else { 1 << 30 }).next_multiple_of(1 << 20);
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 5 });
    report.section(
        "clones: images that are tracked by clones",
        &format!(
            "An image of {} on a file system of its own (a loop device past the page cache), in so many pieces; {CHANGED} blocks written between two syncs; the \
             replica on the disk beneath. A clone is one call, for which writers wait; finding reads the map of the new one once, and of the old one twice. Medians of \
             {rounds} rounds. The writer writes a block and makes it durable, again and again; with a sync after each second or without.",
            size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("clones", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    for tool in ["mkfs.btrfs", "mkfs.xfs", "filefrag", "losetup", "rsync"] {
        if dsync_tests::find(tool).is_none() {
            report.left_out("clones", &format!("{tool} is not installed"));
            return Ok(());
        }
    }
    if !root() {
        report.left_out("clones", "loop devices need root");
        return Ok(());
    }
    let most = bytes / BLOCK / 2;
    let mut table = Table::new(
        "Costs by pieces",
        &[
            "file system",
            "pieces",
            "clone",
            "finding",
            "s per 100 000 pieces",
            "sync",
            "--method compare",
            "rsync --inplace",
        ],
    );
    let mut waits = Table::new(
        "Writer beside syncs: milliseconds until a block is durable",
        &["file system", "pieces", "median", "p99", "most", "with syncs: median", "p99", "most"],
    );
    for kind in ["xfs", "btrfs"].into_iter().filter(|kind| bench.wants(kind)) {
        for overwritten in [0, most / 26, most * 10 / 26, most * 23 / 26] {
            let scene = Scene::new(bench, binary, kind, bytes, overwritten)?;
            scene.measure(rounds, bench.seed, &mut table, report)?;
            scene.wait(if bench.quick { 1 } else { 8 }, &mut waits)?;
        }
    }
    report.table(&table);
    report.table(&waits);
    Ok(())
}

struct Scene {
    kind: &'static str,
    folder: tempfile::TempDir,
    volume: Loop,
    dsync: Dsync,
    bytes: u64,
}

impl Scene {
    /// An image with so many blocks that are kept apart from their neighbours.
    fn new(bench: &Bench, binary: &Path, kind: &'static str, bytes: u64, overwritten: u64) -> Result<Scene> {
        let folder = scratch(&bench.dir)?;
        let file = folder.path().join("volume");
        let volume = Loop::formatted(&file, kind, bytes * 4 + (1 << 30))?;
        let dsync = Dsync::new(binary, folder.path().join("state"));
        let image = volume.folder().join("image");
        let mut content = Content::new(bench.seed, bytes);
        content.write(&image)?;
        let base = volume.folder().join("base");
        run(command("cp").arg("--reflink=always").arg(&image).arg(&base), LIMIT)?;
        let change = content.change_blocks((0..overwritten).map(|block| block * 2).collect());
        content.apply(&change, &image)?;
        File::open(&image)?.sync_all()?;
        std::fs::remove_file(&base)?;
        Ok(Scene { kind, folder, volume, dsync, bytes })
    }

    /// In how many pieces the image is.
    fn pieces(&self) -> Result<u64> {
        let said = run(command("filefrag").arg(self.image()), LIMIT)?.stdout;
        let pieces = said.rsplit(": ").next().and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        pieces.with_context(|| format!("no number of extents in: {said}"))
    }

    fn image(&self) -> std::path::PathBuf {
        self.volume.folder().join("image")
    }

    /// Writes blocks at random.
    fn change(&self, random: &mut Random) -> Result<()> {
        let file = OpenOptions::new().write(true).open(self.image())?;
        for _ in 0..CHANGED {
            file.write_all_at(&random.bytes(BLOCK as usize), random.below(self.bytes / BLOCK) * BLOCK)?;
        }
        Ok(file.sync_all()?)
    }

    /// Makes a clone of the image, and says how long that took.
    fn clone(&self, name: &str) -> Result<(File, f64)> {
        let path = self.volume.folder().join(name);
        let _ = std::fs::remove_file(&path);
        let (from, to) = (
            File::open(self.image())?,
            OpenOptions::new().read(true).write(true).create_new(true).open(&path)?,
        );
        from.sync_all()?;
        let began = Instant::now();
        device::clone_file(&from, &to)?;
        Ok((to, began.elapsed().as_secs_f64()))
    }

    fn measure(&self, rounds: usize, seed: u64, table: &mut Table, report: &mut Report) -> Result<()> {
        let mut random = Random::seeded(seed);
        let (image, copy) = (self.image(), self.folder.path().join("copy"));
        let name = copy.display().to_string();
        run(self.dsync.command("track").arg("add").arg(&image), LIMIT)?;
        self.dsync.sync(&image, &name, &[], LIMIT)?;
        let other = self.folder.path().join("other");
        run(command("cp").arg(&copy).arg(&other), LIMIT)?;
        let [mut pieces, mut clone, mut finding, mut sync, mut compare, mut rsync] =
            [(); 6].map(|()| Vec::new());
        for _ in 0..rounds {
            go_on()?;
            let old = self.clone("old")?.0;
            self.change(&mut random)?;
            let (new, took) = self.clone("new")?;
            clone.push(took);
            pieces.push(self.pieces()? as f64);
            let began = Instant::now();
            let found = device::differing(&old, &new)?;
            finding.push(began.elapsed().as_secs_f64());
            anyhow::ensure!(!found.is_empty(), "nothing was found");
            for name in ["old", "new"] {
                std::fs::remove_file(self.volume.folder().join(name))?;
            }
            let synced = self.dsync.sync(&image, &name, &[], LIMIT)?;
            anyhow::ensure!(synced.word("method") == "tracked", "it was not tracked");
            sync.push(synced.outcome.seconds);
            self.change(&mut random)?;
            compare.push(self.dsync.sync(&image, &name, &["--method", "compare"], LIMIT)?.outcome.seconds);
            let line = format!(
                "rsync --inplace --no-whole-file --ignore-times {} {1} && sync {1}",
                quote(&image),
                quote(&other)
            );
            rsync.push(run(&mut shell(&line), LIMIT)?.seconds);
            run(command("cmp").arg(&image).arg(&copy), LIMIT).context("WRONG CONTENT")?;
        }
        let pieces = median(&pieces);
        let each = median(&finding) / pieces * 1e5;
        if pieces > 10_000.0 {
            report.goal(
                &format!("clones: seconds to find changes per 100 000 pieces, {}", self.kind),
                each,
                true,
                0.3,
            );
        }
        let [clone, finding, sync, compare, rsync] =
            [clone, finding, sync, compare, rsync].map(|figures| median(&figures));
        let each = if pieces > 10_000.0 { format!("{each:.3}") } else { "-".into() };
        table.row(vec![
            self.kind.into(),
            format!("{pieces:.0}"),
            format!("{:.1} ms", clone * 1e3),
            format!("{:.1} ms", finding * 1e3),
            each,
            seconds(sync),
            seconds(compare),
            seconds(rsync),
        ]);
        Ok(())
    }

    /// What a writer feels, without syncs and with them.
    fn wait(&self, lasts: u64, table: &mut Table) -> Result<()> {
        let name = self.folder.path().join("copy").display().to_string();
        let mut cells = vec![self.kind.to_string(), self.pieces()?.to_string()];
        for with in [false, true] {
            go_on()?;
            let ended = AtomicBool::new(false);
            let times = std::thread::scope(|scope| -> Result<Vec<f64>> {
                let writer = scope.spawn(|| self.write(&ended));
                let synced = (0..lasts).try_for_each(|_| {
                    std::thread::sleep(Duration::from_secs(1));
                    if with { self.dsync.sync(&self.image(), &name, &[], LIMIT).map(drop) } else { Ok(()) }
                });
                ended.store(true, SeqCst);
                let times = writer.join().map_err(|_| anyhow::anyhow!("the writer failed"))?;
                synced.and(times)
            })?;
            let mut times: Vec<f64> = times.into_iter().map(|seconds| seconds * 1e3).collect();
            times.sort_by(f64::total_cmp);
            let at =
                |share: f64| times.get(((times.len() - 1) as f64 * share) as usize).copied().unwrap_or(0.0);
            cells.extend([0.5, 0.99, 1.0].map(|share| format!("{:.2}", at(share))));
        }
        table.row(cells);
        Ok(())
    }

    /// Writes blocks, each durable before the next, until it has to end. Seconds of each.
    fn write(&self, ended: &AtomicBool) -> Result<Vec<f64>> {
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DSYNC).open(self.image())?;
        let (mut random, mut times) = (Random::seeded(7), Vec::new());
        while !ended.load(SeqCst) {
            let bytes = random.bytes(BLOCK as usize);
            let at = random.below(self.bytes / BLOCK) * BLOCK;
            let began = Instant::now();
            file.write_all_at(&bytes, at)?;
            times.push(began.elapsed().as_secs_f64());
        }
        Ok(times)
    }
}
