//! Measures the queues on a scratch file: `cargo run --release -p device --example rates -- FOLDER [MIB]`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use device::{Buf, Disk, DiskOptions, Piece, Pieces, Request, RequestKind};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("give a folder for the scratch file")?);
    let mib: u64 = arguments.next().map_or(Ok(1024), |n| n.to_string_lossy().parse())?;
    let path = folder.join("rates.scratch");
    std::fs::File::create(&path)?.set_len(mib << 20)?;
    let result = measure(&path, mib << 20);
    std::fs::remove_file(&path)?;
    result
}

fn measure(path: &std::path::Path, len: u64) -> Result<(), Box<dyn std::error::Error>> {
    let disk = device::open(path, &DiskOptions { write: true, direct: true, exclusive: false })?;
    let all: Vec<u64> = (0..len >> 20).map(|n| n << 20).collect();
    report("1 MiB first writes, depth 32", 1 << 20, &all, 32, 1, &disk, true)?;
    disk.flush()?;
    for _ in 0..2 {
        for (name, depth) in [("1 MiB reads, depth 1", 1), ("1 MiB reads, depth 32", 32)] {
            report(name, 1 << 20, &all, depth, 1, &disk, false)?;
        }
        report("1 MiB writes, depth 32", 1 << 20, &all, 32, 1, &disk, true)?;
        let mut random = testing::Random::seeded(1);
        let scattered: Vec<u64> = (0..200_000).map(|_| random.below(len >> 12) << 12).collect();
        let mut sorted: Vec<u64> = scattered[..20_000].to_vec();
        sorted.sort();
        sorted.dedup();
        report("4 KiB scattered reads, depth 1", 4096, &scattered[..20_000], 1, 1, &disk, false)?;
        report("4 KiB scattered reads, depth 64", 4096, &scattered, 64, 1, &disk, false)?;
        report("4 KiB scattered reads, depth 64, 64 a request", 4096, &scattered, 64, 64, &disk, false)?;
        report("4 KiB sorted reads, depth 64, 64 a request", 4096, &sorted, 64, 64, &disk, false)?;
        report("4 KiB scattered writes, depth 64", 4096, &scattered[..50_000], 64, 1, &disk, true)?;
        report(
            "4 KiB scattered writes, depth 64, 64 a request",
            4096,
            &scattered[..50_000],
            64,
            64,
            &disk,
            true,
        )?;
    }
    Ok(())
}

/// Reads or writes pieces of `size` bytes at `offsets`, `each` of them a request.
fn report(
    name: &str,
    size: u64,
    offsets: &[u64],
    depth: u32,
    each: usize,
    disk: &Arc<dyn Disk>,
    write: bool,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut queue = Arc::clone(disk).queue(depth)?;
    let kind = if write { RequestKind::Write { fua: false } } else { RequestKind::Read };
    let mut bufs = Vec::new();
    let most = (depth as usize).div_ceil(each) + usize::from(each > 1);
    let (begin, used) = (Instant::now(), cpu());
    let mut batches = offsets.chunks(each);
    let mut exhausted = false;
    while !exhausted || queue.in_flight() > 0 {
        while !exhausted && queue.in_flight() < most {
            let Some(batch) = batches.next() else {
                exhausted = true;
                break;
            };
            let pieces: Pieces = batch.iter().map(|offset| Piece { offset: *offset, len: size }).collect();
            let mut buf = bufs.pop().unwrap_or_else(|| Buf::new(each * size as usize));
            buf.set_len(batch.len() * size as usize);
            queue.submit(Request { kind, pieces, buf, token: 0 });
        }
        queue.start();
        let mut next = queue.complete(true);
        while let Some(done) = next {
            done.result?;
            bufs.push(done.request.buf);
            next = queue.complete(false);
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let (count, bytes) = (offsets.len() as f64, offsets.len() as f64 * size as f64);
    let micros = (cpu() - used) * 1e6 / count;
    println!(
        "{name:50} {:9.0}/s {:8.2} GB/s {micros:7.1} us CPU each",
        count / seconds,
        bytes / seconds / 1e9
    );
    Ok(())
}

/// Seconds of processor time so far.
fn cpu() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
