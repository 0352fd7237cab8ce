//! Two deltas into one.

use std::io::{Read, Seek, Write};

use crate::{Result, Totals};

/// Being built.
pub fn combine<A: Read, B: Read + Seek, W: Write>(
    _first: A,
    _second: B,
    _out: W,
    _compression: Option<i32>,
) -> Result<Totals> {
    Ok(Totals::default())
}
