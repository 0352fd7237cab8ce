//! The paper's way, for comparison: one block read and written at a time, through a pipe and the page cache.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

use crate::measure::limit::{BLOCK, read_list};

/// Writes number and content of each block to standard output.
pub(crate) fn extract(source: &Path, list: &Path) -> Result<()> {
    let file = File::open(source).with_context(|| source.display().to_string())?;
    let mut out = BufWriter::with_capacity(64 << 10, io::stdout().lock());
    let mut block = [0; BLOCK as usize];
    for number in read_list(list)? {
        file.read_exact_at(&mut block, number * BLOCK)?;
        out.write_all(&number.to_le_bytes())?;
        out.write_all(&block)?;
    }
    Ok(out.flush()?)
}

/// Writes blocks from standard input to their places.
pub(crate) fn merge(destination: &Path) -> Result<()> {
    let file = OpenOptions::new().write(true).open(destination);
    let file = file.with_context(|| destination.display().to_string())?;
    let mut input = BufReader::with_capacity(64 << 10, io::stdin().lock());
    let (mut number, mut block) = ([0; 8], [0; BLOCK as usize]);
    loop {
        match input.read_exact(&mut number) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
            other => other?,
        }
        input.read_exact(&mut block)?;
        file.write_all_at(&block, u64::from_le_bytes(number) * BLOCK)?;
    }
    Ok(file.sync_data()?)
}
