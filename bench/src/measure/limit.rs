//! The limit: what moving a known list of blocks costs at least. It is given what the others have to find out.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use device::Buf;
use io_uring::types::Fixed;
use io_uring::{IoUring, opcode, squeue};

/// Blocks or runs on their way at once: 64 for each of the two files. Fewer were slower, more were not faster.
const DEPTH: usize = 128;
/// The longest run moved by one request, in bytes.
const RUN: u64 = 256 << 10;
/// Block size in bytes.
pub(crate) const BLOCK: u64 = 4096;

/// Opens for direct I/O.
pub(crate) fn direct(path: &Path, write: bool) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(write).custom_flags(libc::O_DIRECT);
    options.open(path).with_context(|| format!("{}: cannot open for direct I/O", path.display()))
}

/// Neighbours in an ascending list of blocks, joined: offset and length in bytes.
pub(crate) fn runs(blocks: impl Iterator<Item = u64>, most: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for block in blocks {
        match runs.last_mut() {
            Some((offset, len)) if *offset + *len == block * BLOCK && *len < most => *len += BLOCK,
            _ => runs.push((block * BLOCK, BLOCK)),
        }
    }
    runs
}

/// Reads a list: one block number a line.
pub(crate) fn read_list(path: &Path) -> Result<Vec<u64>> {
    let text = std::fs::read(path).with_context(|| path.display().to_string())?;
    let mut blocks = Vec::with_capacity(text.len() / 6);
    for line in text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        let digits = line.iter().try_fold(0u64, |number, &byte| {
            byte.is_ascii_digit().then(|| number * 10 + u64::from(byte - b'0'))
        });
        blocks.push(digits.with_context(|| format!("{}: a line is not a number", path.display()))?);
    }
    blocks.sort_unstable();
    Ok(blocks)
}

/// Writes a list.
pub(crate) fn write_list(path: &Path, blocks: &[u64]) -> Result<()> {
    let text: String = blocks.iter().map(|block| format!("{block}\n")).collect();
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// Moves the blocks of `list` (all blocks, without one) from `source` to `destination`, and makes them durable.
pub(crate) fn run(source: &Path, destination: &Path, list: Option<&Path>) -> Result<()> {
    let from = direct(source, false)?;
    let to = direct(destination, true)?;
    let size = from.metadata()?.len();
    let runs = match list {
        Some(list) => runs(read_list(list)?.into_iter(), RUN),
        None => (0..size).step_by(RUN as usize).map(|at| (at, RUN.min(size - at))).collect(),
    };
    move_runs(&from, &to, &runs)?;
    to.sync_data().with_context(|| destination.display().to_string())
}

/// Requests on their way to each file that is read in full, and their bytes.
const READ_DEPTH: usize = 16;
const READ: u64 = 1 << 20;

/// Reads files in full, all of them at once, bypassing the page cache; returns the bytes.
pub(crate) fn read(paths: &[impl AsRef<Path>]) -> Result<u64> {
    let files: Vec<File> = paths.iter().map(|path| direct(path.as_ref(), false)).collect::<Result<_>>()?;
    let sizes = files.iter().map(|file| Ok(file.metadata()?.len())).collect::<Result<Vec<u64>>>()?;
    let descriptors: Vec<_> = files.iter().map(|file| file.as_raw_fd()).collect();
    let depth = READ_DEPTH * files.len();
    let mut ring: IoUring = IoUring::new(depth as u32).context("io_uring")?;
    ring.submitter().register_files(&descriptors)?;
    let mut buffers: Vec<Buf> = (0..depth).map(|_| Buf::new(READ as usize)).collect();
    let mut next = vec![0; files.len()];
    let mut wanted = vec![0; depth];
    let mut free: Vec<usize> = (0..depth).collect();
    let (mut in_flight, mut bytes) = (0, 0);
    loop {
        while let Some(slot) = free.pop() {
            let file = slot / READ_DEPTH;
            let offset = next[file];
            if offset >= sizes[file] {
                continue;
            }
            wanted[slot] = READ.min(sizes[file] - offset);
            next[file] += READ;
            let read = opcode::Read::new(Fixed(file as u32), buffers[slot].as_mut_ptr(), READ as u32);
            let entry = read.offset(offset).build().user_data(slot as u64);
            // SAFETY: the buffer lives until the ring is gone, is as long as the request, and its slot has one request at a
            // time; the files are open as long.
            unsafe { ring.submission().push(&entry) }.context("io_uring")?;
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(bytes);
        }
        ring.submit_and_wait(1)?;
        for completion in ring.completion() {
            in_flight -= 1;
            let slot = completion.user_data() as usize;
            let result = completion.result();
            ensure!(result >= 0, "{}", std::io::Error::from_raw_os_error(-result));
            ensure!(result as u64 == wanted[slot], "{result} of {} bytes", wanted[slot]);
            bytes += result as u64;
            free.push(slot);
        }
    }
}

fn move_runs(from: &File, to: &File, runs: &[(u64, u64)]) -> Result<()> {
    let Some(longest) = runs.iter().map(|run| run.1).max() else { return Ok(()) };
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(2 * DEPTH as u32)
        .or_else(|_| IoUring::new(2 * DEPTH as u32))
        .context("io_uring")?;
    ring.submitter().register_files(&[from.as_raw_fd(), to.as_raw_fd()])?;
    let mut buffers: Vec<Buf> = (0..DEPTH.min(runs.len())).map(|_| Buf::new(longest as usize)).collect();
    let mut places = vec![(0, 0); buffers.len()];
    let mut free: Vec<usize> = (0..buffers.len()).collect();
    let mut next = runs.iter();
    let mut ready: VecDeque<squeue::Entry> = VecDeque::new();
    let mut in_flight = 0;
    loop {
        while let Some(slot) = free.pop() {
            let Some(&(offset, len)) = next.next() else { break };
            places[slot] = (offset, len);
            let read = opcode::Read::new(Fixed(0), buffers[slot].as_mut_ptr(), len as u32);
            ready.push_back(read.offset(offset).build().user_data(slot as u64));
        }
        while let Some(entry) = ready.pop_front() {
            // SAFETY: the buffer lives until the ring is gone, is `longest` bytes long, and its slot has one request at a
            // time; the files are open as long.
            if unsafe { ring.submission().push(&entry) }.is_err() {
                ready.push_front(entry);
                break;
            }
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(());
        }
        ring.submit_and_wait(1)?;
        for completion in ring.completion() {
            in_flight -= 1;
            let slot = completion.user_data() as usize;
            let (writing, slot) = (slot >= DEPTH, slot % DEPTH);
            let (offset, len) = places[slot];
            let result = completion.result();
            ensure!(result >= 0, "{}", std::io::Error::from_raw_os_error(-result));
            ensure!(result as u64 == len, "{result} of {len} bytes at {offset}");
            if writing {
                free.push(slot);
            } else {
                let write = opcode::Write::new(Fixed(1), buffers[slot].as_ptr(), len as u32);
                ready.push_back(write.offset(offset).build().user_data((slot + DEPTH) as u64));
            }
        }
    }
}
