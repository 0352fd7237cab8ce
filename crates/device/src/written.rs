//! How much was written to a block device, by the kernel's count.

use std::path::Path;

use crate::identity::sysfs;

/// What was written to a block device since it appeared, by whoever it was: where two counts are equal nobody wrote between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Sectors of 512 bytes, by writes that have ended.
    pub sectors: u64,
    /// Sectors, by discards that have ended.
    pub discarded: u64,
    /// Writes that have begun and not ended.
    pub in_flight: u64,
}

impl Written {
    /// Counts for the device of this number; a partition counts what goes through it. `None` where the kernel doesn't count.
    pub fn of(device: u64) -> Option<Written> {
        let place = std::fs::canonicalize(sysfs(device)).ok()?;
        let disk = if place.join("partition").exists() { place.parent()? } else { &place };
        if numbers(&disk.join("queue/iostats"))?.first() != Some(&1) {
            return None;
        }
        let (stat, in_flight) = (numbers(&place.join("stat"))?, numbers(&place.join("inflight"))?);
        Some(Written { sectors: *stat.get(6)?, discarded: *stat.get(13)?, in_flight: *in_flight.get(1)? })
    }
}

fn numbers(path: &Path) -> Option<Vec<u64>> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.split_whitespace().map_while(|number| number.parse().ok()).collect())
}
