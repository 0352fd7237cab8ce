//! How much memory a record of modified blocks takes: the bitmap of table 1 of "dsync: Efficient Block-wise Synchronization of
//! Multi-Gigabyte Binary Data" (LISA 2013), and the Bloom filter that it leaves for future work.

use std::time::Instant;

use anyhow::Result;
use dsync_tests::Random;
use extents::Bitmap;

use crate::Bench;
use crate::measure::limit::BLOCK;
use crate::measure::process::go_on;
use crate::measure::report::{Report, Table, seconds, size};

/// What a page of the bitmap's memory covers, in blocks. A page that nothing was noted in takes no memory.
const PAGE: u64 = 4096 * 8;

/// A set that knows its members and a few others (B. H. Bloom, "Space/Time Trade-offs in Hash Coding with Allowable Errors", CACM
/// 1970), with the two hashes of Kirsch and Mitzenmacher in the place of many.
struct Bloom {
    bits: Vec<u64>,
    hashes: u32,
}

impl Bloom {
    /// For so many members, and so many others taken for members.
    fn new(members: u64, wrong: f64) -> Bloom {
        let ln2 = std::f64::consts::LN_2;
        let bits = (members as f64 * -wrong.ln() / (ln2 * ln2)).ceil();
        let hashes = (bits / members as f64 * ln2).round().max(1.0) as u32;
        Bloom { bits: vec![0; (bits as usize).div_ceil(64)], hashes }
    }

    fn places(&self, block: u64) -> impl Iterator<Item = (usize, u64)> + use<> {
        let mixed = |seed: u64| {
            // The finalizer of MurmurHash3.
            let mut x = block.wrapping_add(seed);
            x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
            x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
            x ^ (x >> 33)
        };
        let (first, step, words) = (mixed(0x9e37_79b9), mixed(0x7f4a_7c15) | 1, self.bits.len() as u64);
        (0..u64::from(self.hashes)).map(move |at| {
            let hash = first.wrapping_add(at.wrapping_mul(step));
            // The upper bits choose the word, without a division.
            (((u128::from(hash) * u128::from(words)) >> 64) as usize, 1 << (hash & 63))
        })
    }

    fn insert(&mut self, block: u64) {
        for (word, bit) in self.places(block) {
            self.bits[word] |= bit;
        }
    }

    fn holds(&self, block: u64) -> bool {
        self.places(block).all(|(word, bit)| self.bits[word] & bit != 0)
    }
}

/// What one kind of record took.
struct Took {
    memory: f64,
    note: f64,
    list: f64,
    wrong: u64,
}

fn bitmap(disk: u64, blocks: &[u64]) -> Took {
    let began = Instant::now();
    let bitmap = Bitmap::new(disk);
    for &block in blocks {
        bitmap.set(block..block + 1);
    }
    let note = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let found: u64 = bitmap.runs().map(|run| run.end - run.start).sum();
    let list = began.elapsed().as_secs_f64();
    let mut pages: Vec<u64> = blocks.iter().map(|block| block / PAGE).collect();
    pages.sort_unstable();
    pages.dedup();
    // Blocks that were drawn twice are found once.
    Took { memory: pages.len() as f64 * 4096.0, note, list, wrong: found.saturating_sub(blocks.len() as u64) }
}

fn bloom(disk: u64, blocks: &[u64], wrong: f64) -> Result<Took> {
    let began = Instant::now();
    let mut bloom = Bloom::new(blocks.len() as u64, wrong);
    for &block in blocks {
        bloom.insert(block);
    }
    let note = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let mut found = 0;
    for first in (0..disk).step_by(1 << 24) {
        go_on()?;
        found += (first..disk.min(first + (1 << 24))).filter(|&block| bloom.holds(block)).count() as u64;
    }
    let list = began.elapsed().as_secs_f64();
    let mut members = blocks.to_vec();
    members.sort_unstable();
    members.dedup();
    let wrong = found - members.len() as u64;
    Ok(Took { memory: bloom.bits.len() as f64 * 8.0, note, list, wrong })
}

/// Blocks of a disk: scattered one by one, or in runs of 16, as file systems write.
fn drawn(disk: u64, count: u64, run: u64, random: &mut Random) -> Vec<u64> {
    (0..count / run)
        .flat_map(|_| {
            let first = random.below(disk / run) * run;
            first..first + run
        })
        .collect()
}

/// Runs the scenario.
pub(crate) fn record(bench: &Bench, report: &mut Report) -> Result<()> {
    let bytes = bench.size.unwrap_or(if bench.quick { 16 << 30 } else { 1 << 40 });
    let disk = bytes / BLOCK;
    report.section(
        "record: memory of what is noted",
        &format!(
            "A disk of {} in blocks of 4 KiB: a bitmap of one bit a block, of which pages that nothing was noted in take no memory, \
             beside a Bloom filter made for just as many blocks as were modified. Run once.",
            size(bytes as f64)
        ),
    );
    let mut table = Table::new(
        &format!("The bitmap in full takes {}", size(disk as f64 / 8.0)),
        &["modified", "record", "memory", "noting, s", "listing, s", "wrongly sent"],
    );
    let mut random = Random::seeded(bench.seed);
    let counts = [disk / 100_000, disk / 1000, disk / 100, disk / 10];
    for (count, run) in counts.into_iter().flat_map(|count| [(count, 1), (count, 16)]) {
        let blocks = drawn(disk, count, run, &mut random);
        let how = if run == 1 { "scattered" } else { "in runs of 16" };
        let mut row = |name: &str, took: &Took| {
            table.row(vec![
                format!("{} {how}", size((blocks.len() as u64 * BLOCK) as f64)),
                name.into(),
                size(took.memory),
                seconds(took.note),
                seconds(took.list),
                size((took.wrong * BLOCK) as f64),
            ]);
        };
        row("bitmap", &bitmap(disk, &blocks));
        for wrong in [0.01, 0.001] {
            row(&format!("Bloom filter, {} %", wrong * 100.0), &bloom(disk, &blocks, wrong)?);
        }
    }
    report.table(&table);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_forgets_nothing_and_errs_as_seldom_as_asked() {
        let mut random = Random::seeded(1);
        let blocks = drawn(1 << 24, 100_000, 1, &mut random);
        let took = bloom(1 << 24, &blocks, 0.01).unwrap();
        let share = took.wrong as f64 / f64::from(1 << 24);
        assert!((0.007..0.013).contains(&share), "{share}");
        let mut filter = Bloom::new(1000, 0.01);
        (0..1000).for_each(|block| filter.insert(block * 7));
        assert!((0..1000).all(|block| filter.holds(block * 7)));
        assert_eq!(bitmap(1 << 24, &blocks).wrong, 0);
    }
}
