//! Owned, aligned memory for direct I/O.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// A buffer whose first byte is aligned to [`Buf::ALIGN`]. Its length may shrink and grow within its capacity.
pub struct Buf {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: a Buf owns its memory alone, as a Box does.
unsafe impl Send for Buf {}
// SAFETY: shared access gives out shared slices only.
unsafe impl Sync for Buf {}

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
        let mut capacity = len.next_multiple_of(Self::ALIGN);
        if capacity == 0 {
            return Buf { start: NonNull::dangling(), len: 0, capacity: 0 };
        }
        if let Some(class) = class(capacity) {
            capacity = SMALLEST_KEPT << class;
            if let Some(start) = kept(class).pop() {
                KEPT_BYTES.fetch_sub(capacity, Ordering::Relaxed);
                let mut buf = Buf { start: start.0, len, capacity };
                if zeroed {
                    buf.fill(0);
                }
                return buf;
            }
        }
        let layout = Self::layout(capacity);
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(memory) else { handle_alloc_error(layout) };
        Buf { start, len, capacity }
    }

    /// The capacity in bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the length within the capacity. Added bytes keep their old content.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "a buffer of {} bytes cannot hold {len}", self.capacity);
        self.len = len;
    }

    /// The address of the bytes, which does not change when the buffer is moved.
    pub(crate) fn memory(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, Self::ALIGN).expect("a buffer beyond the address space")
    }
}

impl Default for Buf {
    fn default() -> Buf {
        Buf::new(0)
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        if self.capacity == 0 {
            return;
        }
        if let Some(class) = class(self.capacity) {
            if KEPT_BYTES.fetch_add(self.capacity, Ordering::Relaxed) + self.capacity <= MOST_KEPT {
                return kept(class).push(FreeBlock(self.start));
            }
            KEPT_BYTES.fetch_sub(self.capacity, Ordering::Relaxed);
        }
        // SAFETY: allocated in `take` with this layout, and freed only here.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) }
    }
}

/// Memory of a dropped buffer, kept for the next one of its class. Fresh pages for every megabyte that passes through would
/// cost more than moving the megabyte: pipes ran at a sixth of their speed.
struct FreeBlock(NonNull<u8>);

// SAFETY: this owns its memory, as a Buf does.
unsafe impl Send for FreeBlock {}

/// Buffers of 64 KiB to 4 MiB are kept, in classes of powers of two.
const SMALLEST_KEPT: usize = 64 << 10;
const CLASSES: usize = 7;
/// In bytes, for all classes together.
const MOST_KEPT: usize = 24 << 20;

static KEPT: [Mutex<Vec<FreeBlock>>; CLASSES] = [const { Mutex::new(Vec::new()) }; CLASSES];
static KEPT_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The class whose buffers hold `capacity` bytes; `None` for what is not kept.
fn class(capacity: usize) -> Option<usize> {
    if capacity < SMALLEST_KEPT {
        return None;
    }
    let class = capacity.div_ceil(SMALLEST_KEPT).next_power_of_two().trailing_zeros() as usize;
    (class < CLASSES).then_some(class)
}

fn kept(class: usize) -> std::sync::MutexGuard<'static, Vec<FreeBlock>> {
    KEPT[class].lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `capacity` bytes are allocated and were zeroed at allocation; `len` is at most that.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
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
                assert_eq!(Buf::scratch(len).len(), len);
            }
        }
        let many: Vec<Buf> = (0..40).map(|_| Buf::new(1 << 20)).collect();
        drop(many);
        // Other tests of this process may hold and drop buffers meanwhile: the count may exceed the limit for a moment.
        let held: usize = (0..CLASSES).map(|class| kept(class).len() * (SMALLEST_KEPT << class)).sum();
        assert!(held <= MOST_KEPT, "{held} bytes kept");
    }
}
