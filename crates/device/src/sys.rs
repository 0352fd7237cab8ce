//! The few system calls that no safe wrapper covers.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The minute of the day by the system's local time (TZ, else /etc/localtime), as it is now.
pub fn local_minute() -> u16 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    // `time_t` by its use: musl's is about to change.
    let seconds = now.as_secs().try_into().unwrap_or_default();
    // SAFETY: tm is plain data, for which zeroes are a valid value.
    let mut local: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values that outlive the call.
    if unsafe { libc::localtime_r(&raw const seconds, &raw mut local) }.is_null() {
        return (now.as_secs() % 86_400 / 60) as u16;
    }
    (local.tm_hour * 60 + local.tm_min) as u16
}

/// Discards a range of a block device (BLKDISCARD). Offset and length are whole sectors.
pub(crate) fn block_discard(file: &File, offset: u64, len: u64) -> io::Result<()> {
    const BLKDISCARD: u32 = 0x1277;
    let range = [offset, len];
    // SAFETY: the kernel reads two u64 from `range`, which outlives the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD as _, range.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Writes out what the page cache holds of a block device, and waits for that.
pub(crate) fn write_back(file: &File) -> io::Result<()> {
    const ALL: u32 =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: no memory is passed; the descriptor is open as long as `file` lives.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, ALL) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The memory and offset alignment that direct I/O to a file needs, if the kernel reports it (Linux 6.1).
/// `Some((0, 0))` says that the file takes no direct I/O.
pub(crate) fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    // SAFETY: statx is plain data, for which zeroes are a valid value.
    let mut answer: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is an empty C string, `answer` a statx to fill; both outlive the call.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut answer,
        )
    };
    (result == 0 && answer.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((answer.stx_dio_mem_align, answer.stx_dio_offset_align))
}

/// Whether the page cache holds every page of a range of a file. False if the kernel does not tell (before Linux 6.5).
pub(crate) fn is_cached(file: &File, offset: u64, len: u64) -> bool {
    // The same number on every architecture that Rust knows.
    const CACHESTAT: libc::c_long = 451;
    const PAGE: u64 = 4096;
    let range = [offset, len];
    // Pages cached, dirty, under writeback, evicted, recently evicted.
    let mut answer = [0u64; 5];
    // SAFETY: the kernel reads two u64 from `range` and writes five to `answer`; both outlive the call.
    let result =
        unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), answer.as_mut_ptr(), 0) };
    let pages = (offset + len).div_ceil(PAGE) - offset / PAGE;
    result == 0 && len > 0 && answer[0] >= pages
}

/// Lets a range of one file share what another of the same file system holds (FICLONERANGE). Offsets and length are whole
/// blocks of that.
pub(crate) fn clone_range(
    (from, from_offset): (&File, u64),
    (to, to_offset): (&File, u64),
    len: u64,
) -> io::Result<()> {
    let fd = u64::try_from(from.as_raw_fd()).map_err(io::Error::other)?;
    // struct file_clone_range: a descriptor as a signed number of 64 bits, and three offsets.
    let range = [fd, from_offset, len, to_offset];
    // SAFETY: the kernel reads four u64 from `range`, which outlives the call, as do both files.
    let result = unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONERANGE as _, range.as_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Where the file system keeps a file from an offset on (FIEMAP): some of its extents, the first ones, each as offset, place, length in bytes, and
/// flags. Empty where there are none. With `flush`, what is cached of it is written out before.
pub(crate) fn extents(file: &File, from: u64, flush: bool) -> io::Result<Vec<(u64, u64, u64, u32)>> {
    const FS_IOC_FIEMAP: u32 = 0xc020_660b;
    const FIEMAP_FLAG_SYNC: u32 = 1;
    const MOST: u32 = 4096;
    // struct fiemap: start and length; flags and the number of extents found; the number for which there is room. And struct fiemap_extent: offset,
    // place, length, two words of nothing, flags and a half of nothing, a word of nothing.
    const HEAD: usize = 4;
    const EXTENT: usize = 7;
    let halves = |a: u32, b: u32| {
        let ([a, b, c, d], [e, f, g, h]) = (a.to_ne_bytes(), b.to_ne_bytes());
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    };
    let half = |word: u64, at: usize| {
        let bytes = word.to_ne_bytes();
        u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    let mut words = vec![0u64; HEAD + MOST as usize * EXTENT];
    words[..HEAD].copy_from_slice(&[
        from,
        u64::MAX - from,
        halves(if flush { FIEMAP_FLAG_SYNC } else { 0 }, 0),
        halves(MOST, 0),
    ]);
    // SAFETY: the kernel reads and writes a struct fiemap with room for `MOST` extents after it, which is what `words` has, and it outlives the call.
    if unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, words.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let found = half(words[2], 4).min(MOST) as usize;
    let extents = words[HEAD..].chunks_exact(EXTENT).take(found);
    Ok(extents.map(|extent| (extent[0], extent[1], extent[2], half(extent[5], 0))).collect())
}
