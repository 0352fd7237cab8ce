//! What the bpf tracker costs the writers of a live disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::Bench;
use crate::measure::dsync::Dsync;
use crate::measure::places::{Loop, filled, own_mounts, root, scratch};
use crate::measure::process::{self, quote, run, shell};
use crate::measure::report::{Report, Table, median};

/// Writes a second that the capped device is let do.
const CAP: u32 = 100_000;
const STEP: Duration = Duration::from_secs(30);

/// A cgroup whose members do so many writes a second to a device, removed when dropped.
struct Cap(PathBuf);

impl Cap {
    /// `None` where neither version of the controller is at hand.
    fn new(device: &Path) -> Option<Cap> {
        let number = rustix::fs::stat(device).ok()?.st_rdev;
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let ways = [
            ("/sys/fs/cgroup/blkio", "blkio.throttle.write_iops_device", format!("{number} {CAP}")),
            ("/sys/fs/cgroup", "io.max", format!("{number} wiops={CAP}")),
        ];
        ways.iter().find_map(|(place, file, line)| {
            let cap = Cap(Path::new(place).join(format!("dsync-bench-{}", std::process::id())));
            std::fs::create_dir(&cap.0).ok()?;
            std::fs::write(cap.0.join(file), line).ok().map(|()| cap)
        })
    }
}

impl Drop for Cap {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Writes of 4 KiB a second at depth 32.
fn load(device: &Path, cap: Option<&Cap>, seconds: u64) -> Result<f64> {
    let join = cap.map(|cap| format!("echo $$ >{}; ", quote(&cap.0.join("cgroup.procs"))));
    let line = format!(
        "{}exec fio --name=load --filename={} --rw=randwrite --bs=4k --iodepth=32 --ioengine=io_uring --direct=1 \
         --norandommap --randrepeat=0 --time_based --runtime={seconds} --ramp_time=1 --output-format=json",
        join.unwrap_or_default(),
        quote(device)
    );
    let outcome = run(&mut shell(&line), Duration::from_secs(60 + seconds))?;
    let json = outcome.stdout.find('{').map(|at| &outcome.stdout[at..]).unwrap_or_default();
    let all: Value = serde_json::from_str(json).context("fio's output")?;
    all["jobs"][0]["write"]["iops"].as_f64().filter(|&iops| iops > 0.0).context("fio did nothing")
}

/// Runs the scenario.
pub(crate) fn track(bench: &Bench, report: &mut Report) -> Result<()> {
    let rounds = bench.rounds.unwrap_or(if bench.quick { 1 } else { 5 });
    let seconds = if bench.quick { 1 } else { 4 };
    let bytes = bench.size.unwrap_or(1 << 30).next_multiple_of(1 << 20);
    report.section(
        "track: writing to a disk that is followed by the bpf tracker",
        &format!(
            "fio, random writes of 4 KiB at depth 32 to a loop device over a file in memory of {}, {seconds} s each, medians of \
             {rounds} interleaved rounds.",
            crate::measure::report::size(bytes as f64)
        ),
    );
    let Some(binary) = &bench.dsync else {
        report.left_out("track", "no binary: build it, or name it with --dsync");
        return Ok(());
    };
    if !root() || dsync_tests::find("fio").is_none() {
        report.left_out("track", "it takes root and fio");
        return Ok(());
    }
    own_mounts()?;
    let (folder, memory) = (scratch(&bench.dir)?, scratch(&bench.memory_dir)?);
    let dsync = Dsync::new(binary, folder.path().join("state"));
    let image = memory.path().join("disk.img");
    filled(&image, bytes)?;
    let disk = Loop::over(&image, false)?;
    let mut table = Table::new("Writes a second", &["", "untracked", "tracked", "ratio"]);
    for capped in [false, true] {
        let cap = if capped { Cap::new(disk.path()) } else { None };
        if capped && cap.is_none() {
            report.left_out("the capped device", "no cgroup lets writes be counted out");
            continue;
        }
        let mut figures = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            for at in 0..2 {
                process::go_on()?;
                let tracked = (at + round) % 2 == 1;
                if tracked {
                    run(dsync.command("track").arg("add").arg(disk.path()), STEP)?;
                }
                let figure = load(disk.path(), cap.as_ref(), seconds);
                if tracked {
                    run(dsync.command("track").arg("remove").arg(disk.path()), STEP)?;
                }
                figures[usize::from(tracked)].push(figure?);
            }
        }
        let [untracked, tracked] = figures.map(|figures| median(&figures));
        let name = if capped { format!("capped at {}k", CAP / 1000) } else { "uncapped".into() };
        let ratio = tracked / untracked;
        table.row(vec![
            name.clone(),
            format!("{:.1}k", untracked / 1e3),
            format!("{:.1}k", tracked / 1e3),
            format!("{ratio:.3}"),
        ]);
        if capped {
            report.goal("track: tracked beside untracked, capped", ratio, false, 0.95);
        } else {
            report.goal("track: tracked beside untracked, uncapped", ratio, false, 0.92);
        }
    }
    report.table(&table);
    Ok(())
}
