//! When to stop making passes over a disk in use.

/// Decides whether another pass pays: each reads what was written during the previous one, so the rest shrinks until the
/// disk is written to as fast as it is read.
#[derive(Debug, Clone, Copy)]
pub struct Convergence {
    /// The number of bytes below which no pass pays.
    few: u64,
    /// Bytes left the last time.
    before: u64,
}

impl Convergence {
    /// Passes stop at `few` bytes.
    pub fn new(few: u64) -> Convergence {
        Convergence { few, before: u64::MAX }
    }

    /// True if the bytes left are worth another pass: they are more than a few, and at most three quarters
    /// of what was left the last time.
    pub fn pays(&mut self, left: u64) -> bool {
        let before = std::mem::replace(&mut self.before, left);
        left > self.few && left <= before / 4 * 3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_stop_where_little_is_left_or_it_shrinks_no_more() {
        let pays = |left: &[u64]| {
            let mut convergence = Convergence::new(100);
            left.iter().map(|&left| convergence.pays(left)).collect::<Vec<_>>()
        };
        assert_eq!(pays(&[1 << 40, 4000, 3000, 2251]), [true, true, true, false]);
        assert_eq!(pays(&[100]), [false]);
        assert_eq!(pays(&[4000, 101, 100]), [true, true, false]);
        assert_eq!(pays(&[4000, 5000]), [true, false]);
    }
}
