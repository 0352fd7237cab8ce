//! Aligned memory that direct I/O can use, owned by whoever holds it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

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

    /// A buffer of `len` zero bytes; the capacity is `len` rounded up to [`Buf::ALIGN`].
    pub fn new(len: usize) -> Buf {
        let capacity = len.next_multiple_of(Self::ALIGN);
        if capacity == 0 {
            return Buf { start: NonNull::dangling(), len: 0, capacity: 0 };
        }
        let layout = Self::layout(capacity);
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(memory) else { handle_alloc_error(layout) };
        Buf { start, len, capacity }
    }

    /// The bytes that [`Buf::set_len`] may reach.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the length within the capacity. Bytes that appear hold what was there before.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "a buffer of {} bytes can't hold {len}", self.capacity);
        self.len = len;
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
        if self.capacity > 0 {
            // SAFETY: allocated in `new` with this layout, and only freed here.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) }
        }
    }
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
        let mut buf = Buf::new(bytes.len());
        buf.copy_from_slice(bytes);
        buf
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}
