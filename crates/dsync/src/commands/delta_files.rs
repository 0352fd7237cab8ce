//! `dsync inspect` and `dsync combine`: deltas as files.

use std::fs::File;
use std::io::{BufReader, IsTerminal, Read, stdin, stdout};
use std::path::Path;

use anyhow::{Context as _, Result};
use delta::{Combined, Event, Frame, Header, Reader, Record, Totals, Writer};
use serde::Serialize;

use crate::args;
use crate::failure::Failure;
use crate::output::Output;
use crate::terms::units;

#[derive(Serialize)]
struct Inspected {
    header: Header,
    totals: Totals,
    /// Bytes that the source could not read.
    unsure: u64,
    bytes: u64,
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("cannot open the delta {}", path.display()))
}

/// Verifies a delta and prints its content.
pub(crate) fn inspect(args: &args::Inspect, output: &Output) -> Result<()> {
    let (name, input): (String, Box<dyn Read>) = if args.delta == Path::new("-") {
        ("standard input".into(), Box::new(stdin().lock()))
    } else {
        (args.delta.display().to_string(), Box::new(open(&args.delta)?))
    };
    let mut reader = Reader::new(BufReader::with_capacity(1 << 20, input));
    let whole = |e: delta::Error| anyhow::Error::from(e).context(format!("delta {name}"));
    let mut totals = None;
    let header = reader.header().map_err(whole)?.clone();
    let mut unsure = 0;
    while let Some(event) = reader.next().map_err(whole)? {
        match event {
            Event::Frame(frame) => unsure += unsure_bytes(&frame),
            Event::End(end) => totals = Some(end),
            Event::Header(_) => {}
        }
    }
    reader.expect_end().map_err(whole)?;
    let totals = totals.unwrap_or_default();
    let bytes = reader.bytes();
    let first = header.chain.first().map_or(0, |e| e.number);
    let last = header.to().map_or(0, |e| e.number);
    output.say(&format!("delta {name}: complete, {}", units::size(bytes)));
    output.say(&format!("  source   {}", header.source));
    output.say(&if header.is_seed() {
        format!("  epochs   whole disk at epoch {last}")
    } else if header.binds.is_some() {
        format!("  epochs   to {last}, for the one replica that it was made for")
    } else {
        let fits = header.chain.split_last().map_or(&[][..], |(_, fits)| fits);
        let fits: Vec<String> = fits.iter().map(|epoch| epoch.number.to_string()).collect();
        match fits.len() {
            0 => format!("  epochs   {last} to {last}: nothing changed"),
            1..=8 => format!("  epochs   {first} to {last}, fits a replica at epoch {}", fits.join(" or ")),
            many => format!(
                "  epochs   {first} to {last}, fits a replica at any of {many} epochs from {first} on"
            ),
        }
    });
    let fuzzy = if header.fuzzy { ", fuzzy" } else { "" };
    output.say(&format!("  method   {}{fuzzy}", header.method));
    output.say(&match header.size_before == header.size_after || header.is_seed() {
        true => format!("  disk     {}", units::size(header.size_after)),
        false => format!(
            "  disk     {}, before {}",
            units::size(header.size_after),
            units::size(header.size_before)
        ),
    });
    output.say(&format!("  blocks   of {}", units::size(header.block_size.into())));
    output.say(&format!("  data     {}", units::size(totals.data)));
    output.say(&format!("  zeros    {}", units::size(totals.zero)));
    output.say(&format!("  copies   {}", units::size(totals.copied)));
    if unsure > 0 {
        output.say(&format!("  unsure   {}, unreadable at the source", units::size(unsure)));
    }
    output.say(&format!(
        "  records  {} in {} frames",
        units::count(totals.records),
        units::count(totals.frames)
    ));
    output.summary(&Inspected { header, totals, unsure, bytes });
    Ok(())
}

/// Bytes of a frame that the source could not read.
fn unsure_bytes(frame: &Frame) -> u64 {
    let unsure = frame.records.iter().filter(|record| matches!(record, Record::Unsure { .. }));
    unsure.map(Record::len).sum()
}

/// Folds two deltas into one.
pub(crate) fn combine(args: &args::Combine, output: &Output) -> Result<()> {
    if stdout().is_terminal() {
        return Err(
            Failure::usage("refusing to write a binary delta to a terminal: dsync combine A B > C").into()
        );
    }
    let mut writer = Writer::new(stdout().lock());
    let reader = |path| Ok::<_, anyhow::Error>(BufReader::with_capacity(1 << 20, open(path)?));
    let deltas = vec![reader(&args.first)?, reader(&args.second)?];
    let mut combined = Combined::new(deltas, None).map_err(|e| match e {
        delta::Error::Sources { .. } | delta::Error::Apart { .. } => {
            anyhow::Error::from(Failure::refused(e.to_string()))
        }
        other => other.into(),
    })?;
    let mut next = combined.next()?;
    while let Some(unit) = next {
        next = combined.next()?;
        if next.is_none() {
            // Before the trailer, without which it is no delta.
            combined.expect_end()?;
        }
        writer.unit(&unit)?;
    }
    let totals = combined.totals();
    writer.flush()?;
    output.say(&format!("{} of data, {} of zeros", units::size(totals.data), units::size(totals.zero)));
    Ok(())
}
