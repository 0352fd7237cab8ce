//! Extents for reports: all are counted, the first ones listed.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A range of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Extents that were found: all are counted, the first ones listed.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ListedExtents {
    /// How many there are.
    pub extents: u64,
    /// Bytes in all of them.
    pub bytes: u64,
    /// The first ones, at most [`ListedExtents::LISTED`].
    pub list: Vec<Extent>,
    /// Where the last one ends.
    #[serde(skip)]
    end: Option<u64>,
}

impl ListedExtents {
    /// The most extents that are listed.
    pub const LISTED: usize = 1000;

    pub(crate) fn add(&mut self, range: &Range<u64>) {
        let bytes = range.end - range.start;
        self.bytes += bytes;
        if self.end.replace(range.end) == Some(range.start) {
            // Extends the last one, listed or not.
            let listed = self.extents == self.list.len() as u64;
            if let Some(last) = self.list.last_mut().filter(|_| listed) {
                last.bytes += bytes;
            }
            return;
        }
        self.extents += 1;
        if self.list.len() < Self::LISTED {
            self.list.push(Extent { offset: range.start, bytes });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_are_counted_and_so_many_listed() {
        let mut extents = ListedExtents::default();
        extents.add(&(0..10));
        extents.add(&(10..30));
        extents.add(&(40..50));
        assert_eq!((extents.extents, extents.bytes), (2, 40));
        assert_eq!(extents.list[0], Extent { offset: 0, bytes: 30 });
        for n in 10..5000 {
            extents.add(&(n * 10..n * 10 + 5));
            extents.add(&(n * 10 + 5..n * 10 + 6));
        }
        assert_eq!((extents.extents, extents.bytes), (4992, 40 + 4990 * 6));
        assert_eq!(extents.list.len(), ListedExtents::LISTED);
        assert!(extents.list[2..].iter().all(|e| e.bytes == 6));
    }
}
