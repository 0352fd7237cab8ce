//! Owned, aligned memory for direct I/O.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut, RangeInclusive};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A buffer whose first byte is aligned to [`Buf::ALIGN`]. Its length may shrink and grow within its capacity.
pub struct Buf {
    memory: Memory,
    len: usize,
}

impl Buf {
    /// The alignment of the memory in bytes: a page, enough for every disk's direct I/O.
    pub const ALIGN: usize = 4096;

    /// A buffer of `len` zero bytes; the capacity is at least `len` rounded up to [`Buf::ALIGN`].
    pub fn new(len: usize) -> Buf {
        Buf::take(len, true)
    }

    /// A buffer of `len` bytes that will be written before they are read: it may hold the content of an earlier buffer. To
    /// fill it from a disk or a pipe costs neither fresh pages nor zeroing.
    pub fn scratch(len: usize) -> Buf {
        Buf::take(len, false)
    }

    fn take(len: usize, zeroed: bool) -> Buf {
        let capacity = rounded(len);
        // The lock is not held while memory is asked for.
        let again = kept().take(capacity);
        let fresh = again.is_none();
        let mut buf = Buf { memory: again.unwrap_or_else(|| Memory::new(capacity)), len };
        if zeroed && !fresh {
            buf.fill(0);
        }
        buf
    }

    /// Frees most of what is kept of dropped buffers, at the end of a work that needed many.
    pub fn free_kept() {
        kept().shrink(AT_REST);
    }

    /// How much memory of the sizes that are kept this process has asked the system for so far, in bytes: for tests and measurements.
    #[doc(hidden)]
    pub fn fresh() -> u64 {
        FRESH.load(Ordering::Relaxed)
    }

    /// The capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.memory.capacity
    }

    /// Changes the length within the capacity. Added bytes keep their old content.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "a buffer of {} bytes cannot hold {len}", self.capacity());
        self.len = len;
    }

    /// The address of the bytes, which does not change when the buffer is moved.
    pub(crate) fn memory(&mut self) -> *mut u8 {
        self.memory.start.as_ptr()
    }
}

impl Default for Buf {
    fn default() -> Buf {
        Buf::new(0)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if !SIZES.contains(&self.capacity()) {
            return;
        }
        if cfg!(debug_assertions) {
            // A byte that is read before it is written shows in every comparison.
            self.set_len(self.capacity());
            self.fill(STALE);
        }
        kept().give(std::mem::replace(&mut self.memory, Memory::NONE));
    }
}

/// What a debug build leaves in memory that is given back.
const STALE: u8 = 0xdb;

/// Memory that one owner has alone, as a Box does. All of it was written, with zeroes at first.
struct Memory {
    start: NonNull<u8>,
    capacity: usize,
}

// SAFETY: it is owned alone.
unsafe impl Send for Memory {}
// SAFETY: what is shared gives out shared slices only.
unsafe impl Sync for Memory {}

impl Memory {
    const NONE: Memory = Memory { start: NonNull::dangling(), capacity: 0 };

    fn new(capacity: usize) -> Memory {
        if capacity == 0 {
            return Memory::NONE;
        }
        if SIZES.contains(&capacity) {
            // A count that nothing else depends on.
            FRESH.fetch_add(capacity as u64, Ordering::Relaxed);
        }
        let layout = Self::layout(capacity);
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(memory) else { handle_alloc_error(layout) };
        Memory { start, capacity }
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, Buf::ALIGN).expect("a buffer beyond the address space")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: allocated in `new` with this layout, and freed only here.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) }
        }
    }
}

/// Memory of dropped buffers, kept for the next ones of their size. Fresh pages for every megabyte that passes through would cost more
/// than moving the megabyte: pipes ran at a sixth of their speed.
///
/// What was given back longest ago makes room for what is given back now: sizes change with what passes through, and memory of a size
/// that nothing asks for any more would keep out all other.
struct Kept {
    /// In the order in which it was given back.
    memory: VecDeque<Memory>,
    bytes: usize,
}

/// The sizes of memory that is kept: powers of two.
const SIZES: RangeInclusive<usize> = 64 << 10..=4 << 20;
/// The most that is kept, in bytes: what a site may have received while its disk made durable what came before.
const MOST_KEPT: usize = 64 << 20;
/// The most that is kept between two works.
const AT_REST: usize = 24 << 20;

/// The memory kept by all threads. The lock is held to move an entry and to free what makes room for it, never together with another.
static KEPT: Mutex<Kept> = Mutex::new(Kept::new());
static FRESH: AtomicU64 = AtomicU64::new(0);

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The capacity of a buffer that holds `len` bytes.
fn rounded(len: usize) -> usize {
    let capacity = len.next_multiple_of(Buf::ALIGN);
    if SIZES.contains(&capacity) { capacity.next_power_of_two() } else { capacity }
}

impl Kept {
    const fn new() -> Kept {
        Kept { memory: VecDeque::new(), bytes: 0 }
    }

    /// Memory of this size, that which was given back last: the processor's caches still hold it.
    fn take(&mut self, capacity: usize) -> Option<Memory> {
        let at = self.memory.iter().rposition(|memory| memory.capacity == capacity)?;
        self.bytes -= capacity;
        self.memory.remove(at)
    }

    fn give(&mut self, memory: Memory) {
        self.bytes += memory.capacity;
        self.memory.push_back(memory);
        self.shrink(MOST_KEPT);
    }

    /// Frees what was given back longest ago, down to so many bytes.
    fn shrink(&mut self, most: usize) {
        while self.bytes > most {
            let Some(oldest) = self.memory.pop_front() else { return };
            self.bytes -= oldest.capacity;
        }
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `capacity` bytes are allocated and were zeroed at allocation; `len` is at most that.
        unsafe { std::slice::from_raw_parts(self.memory.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start.as_ptr(), self.len) }
    }
}

impl From<&[u8]> for Buf {
    fn from(bytes: &[u8]) -> Buf {
        let mut buf = Buf::scratch(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_zero_and_what_is_kept_is_bounded() {
        for len in [0, 1, 4096, 64 << 10, (64 << 10) + 1, 1 << 20, (4 << 20) - 1, 4 << 20, (4 << 20) + 1] {
            for _ in 0..3 {
                let mut buf = Buf::new(len);
                assert!(buf.len() == len && buf.capacity() >= len && buf.capacity() % Buf::ALIGN == 0);
                assert!(len == 0 || buf.as_ptr() as usize % Buf::ALIGN == 0);
                assert!(buf.iter().all(|&byte| byte == 0));
                buf.set_len(buf.capacity());
                buf.fill(0xff);
                drop(buf);
                let again = Buf::scratch(len);
                assert_eq!(again.len(), len);
                if cfg!(debug_assertions) && SIZES.contains(&again.capacity()) {
                    assert!(again.iter().all(|byte| [0, STALE].contains(byte)), "what a buffer held is seen");
                }
            }
        }
        let many: Vec<Buf> = (0..100).map(|_| Buf::new(1 << 20)).collect();
        drop(many);
        let kept = kept();
        assert_eq!(kept.memory.iter().map(|memory| memory.capacity).sum::<usize>(), kept.bytes);
        assert!(kept.bytes <= MOST_KEPT, "{} bytes kept", kept.bytes);
    }

    #[test]
    fn memory_of_one_size_does_not_keep_out_that_of_another() {
        let mut kept = Kept::new();
        for _ in 0..MOST_KEPT >> 17 {
            kept.give(Memory::new(128 << 10));
        }
        assert_eq!(kept.bytes, MOST_KEPT);
        let memory = Memory::new(1 << 20);
        let place = memory.start;
        kept.give(memory);
        assert_eq!(kept.bytes, MOST_KEPT, "the oldest made room");
        assert_eq!(kept.take(1 << 20).map(|memory| memory.start), Some(place));
        assert!(kept.take(1 << 20).is_none() && kept.take(128 << 10).is_some());
        kept.shrink(AT_REST);
        assert_eq!(kept.bytes, AT_REST);
        assert_eq!(kept.memory.iter().map(|memory| memory.capacity).sum::<usize>(), kept.bytes);
    }
}
