//! Blocks of a delta by which a destination without times shows that it was merged.

use std::ops::Range;

use crate::state::destination::Destination;
use crate::state::fingerprint::{PRINT_BLOCK, PRINT_BLOCKS};

/// Which blocks of a delta mark the state to which it leads: some of those that it changes, spread over all of them.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    blocks: Vec<u64>,
    seen: u64,
}

impl Marks {
    /// A range that is changed, in bytes.
    pub(crate) fn add(&mut self, range: &Range<u64>) {
        let block = range.start / PRINT_BLOCK * PRINT_BLOCK;
        self.seen += 1;
        // Each of what was seen is among them with the same likelihood (Vitter's algorithm R, with a fixed sequence).
        let place = (self.seen.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % self.seen;
        if self.blocks.len() < PRINT_BLOCKS as usize {
            self.blocks.push(block);
        } else if let Some(kept) = self.blocks.get_mut(place as usize) {
            *kept = block;
        }
    }

    /// Has the stamps of a destination show them, if there are any.
    pub(crate) fn leave(&self, destination: &dyn Destination) {
        if !self.blocks.is_empty() {
            destination.mark(&self.blocks);
        }
    }
}
