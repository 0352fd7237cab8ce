//! A pool of buffers for one connection: fresh ones would be zeroed and faulted in for every request.

use device::Buf;

/// Free buffers by size: powers of two from [`Buf::ALIGN`] up.
pub(crate) struct Pool {
    free: Vec<Vec<Buf>>,
    /// Bytes in `free`.
    kept: usize,
    /// Bytes in use.
    held: usize,
}

/// Bytes kept for use again.
const KEEP: usize = 4 << 20;

impl Pool {
    pub(crate) fn new() -> Pool {
        Pool { free: Vec::new(), kept: 0, held: 0 }
    }

    /// A buffer of `len` bytes, whatever they hold.
    pub(crate) fn take(&mut self, len: usize) -> Buf {
        if len == 0 {
            return Buf::default();
        }
        let class = Self::class(len);
        let mut buf = match self.free.get_mut(class).and_then(Vec::pop) {
            Some(buf) => {
                self.kept -= buf.capacity();
                buf
            }
            None => Buf::new(Buf::ALIGN << class),
        };
        self.held += buf.capacity();
        buf.set_len(len);
        buf
    }

    pub(crate) fn give(&mut self, buf: Buf) {
        let capacity = buf.capacity();
        // A queue may return another buffer than it was given.
        self.held = self.held.saturating_sub(capacity);
        if capacity == 0 || !(capacity / Buf::ALIGN).is_power_of_two() || self.kept + capacity > KEEP {
            return;
        }
        let class = Self::class(capacity);
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.kept += capacity;
        self.free[class].push(buf);
    }

    pub(crate) fn held(&self) -> usize {
        self.held
    }

    fn class(len: usize) -> usize {
        len.div_ceil(Buf::ALIGN).next_power_of_two().trailing_zeros() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_bounded() {
        let mut pool = Pool::new();
        let first = pool.take(5000);
        assert_eq!((first.len(), first.capacity(), pool.held()), (5000, 8192, 8192));
        let place = first.as_ptr();
        pool.give(first);
        let again = pool.take(8192);
        assert_eq!((again.as_ptr(), pool.held()), (place, 8192));
        pool.give(again);
        let many: Vec<Buf> = (0..10).map(|_| pool.take(1 << 20)).collect();
        assert_eq!(pool.held(), 10 << 20);
        many.into_iter().for_each(|buf| pool.give(buf));
        assert_eq!(pool.held(), 0);
        assert!(pool.kept <= KEEP);
    }
}
