//! What becomes of a program whose memory is limited and at an end.
//!
//! Memory that the system refuses ends the program with a message and code 1, which is a kill like any other to
//! all that is kept. What grows with a disk and can be refused alone is asked for by `Bitmap::try_new`: a server that lacks the memory
//! for a checkpoint refuses that before its cut, and goes on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Write;

thread_local! {
    /// The caller handles what is refused.
    static TRIES: Cell<bool> = const { Cell::new(false) };
}

/// The system refuses memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no memory for {} KiB: raise the limit of this process (\"ulimit -v\", LimitAS= of a unit); for a disk of many terabytes, larger blocks \
     (--block-size, for a new source) take less",
    bytes.div_ceil(1024)
)]
pub struct OutOfMemory {
    /// What was asked for.
    pub bytes: u64,
}

impl From<OutOfMemory> for std::io::Error {
    fn from(error: OutOfMemory) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::OutOfMemory, error)
    }
}

/// The system's allocator for a program: where memory is refused, the program ends with a message and code 1, as after a kill. Without it, it aborts; as it
/// still does where the C library lacks a few bytes of its own as a thread begins.
pub struct Memory;

/// Calls a function whose allocations may be refused.
pub(crate) fn tries<T>(allocate: impl FnOnce() -> T) -> T {
    TRIES.set(true);
    let allocated = allocate();
    TRIES.set(false);
    allocated
}

fn given(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && !TRIES.get() {
        let _ = writeln!(std::io::stderr(), "dsync: {}", OutOfMemory { bytes: bytes as u64 });
        std::process::exit(1);
    }
    memory
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        given(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller's.
        given(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as the caller's.
        given(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}
