//! The few uses of bpf(2) that a tracker needs once its programs run; and the switch that makes a block device read-only.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_link_info, bpf_map_info, bpf_map_type, bpf_prog_info};

/// Flags of a record's map; see `bpf/track.bpf.c`.
const MMAPABLE_INNER: u32 = 1 << 10 | 1 << 12;

fn attr() -> bpf_attr {
    // SAFETY: plain data, for which zeroes are a valid value, and the one that the kernel wants in unused fields.
    unsafe { std::mem::zeroed() }
}

fn bpf(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: the kernel reads, and for some commands writes, `attr`; every caller below lets it point to memory of the
    // size that the map or the command has, which outlives the call.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            cmd as libc::c_long,
            &raw mut *attr,
            size_of::<bpf_attr>() as libc::c_long,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

fn owned(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    let fd = bpf(cmd, attr)?;
    // SAFETY: these commands return a fresh descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))
}

/// Opens the object pinned at a path.
pub(super) fn get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    owned(bpf_cmd::BPF_OBJ_GET, &mut attr)
}

/// Pins a map, program or link.
pub(super) fn pin(fd: BorrowedFd, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = attr();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = fd.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_OBJ_PIN, &mut attr).map(drop)
}

/// Creates a clean record of that many words.
pub(super) fn create_record(words: u64) -> io::Result<OwnedFd> {
    let mut attr = attr();
    // SAFETY: the union is zeroed, so all of this variant is initialised.
    let map = unsafe { &mut attr.__bindgen_anon_1 };
    map.map_type = bpf_map_type::BPF_MAP_TYPE_ARRAY as u32;
    (map.key_size, map.value_size, map.map_flags) = (4, 8, MMAPABLE_INNER);
    map.max_entries = u32::try_from(words).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    for (to, from) in map.map_name.iter_mut().zip(b"record") {
        *to = *from as _;
    }
    owned(bpf_cmd::BPF_MAP_CREATE, &mut attr)
}

/// Reads the value of an array's slot. `value` is as long as the map's values.
pub(super) fn lookup(map: BorrowedFd, key: u32, value: &mut [u8]) -> io::Result<()> {
    check(map, value.len())?;
    let mut attr = attr();
    // SAFETY: the union is zeroed, so all of this variant is initialised.
    let element = unsafe { &mut attr.__bindgen_anon_2 };
    (element.map_fd, element.key) = (map.as_raw_fd() as u32, &raw const key as u64);
    element.__bindgen_anon_1.value = value.as_mut_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr).map(drop)
}

/// Writes the value of an array's slot. For a slot that holds a map the value is a descriptor, and the call returns when no
/// program works with the old map any more.
pub(super) fn update(map: BorrowedFd, key: u32, value: &[u8]) -> io::Result<()> {
    check(map, value.len())?;
    let mut attr = attr();
    // SAFETY: the union is zeroed, so all of this variant is initialised.
    let element = unsafe { &mut attr.__bindgen_anon_2 };
    (element.map_fd, element.key) = (map.as_raw_fd() as u32, &raw const key as u64);
    element.__bindgen_anon_1.value = value.as_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Checks the value size: the kernel reads and writes that many bytes, whatever buffer it gets.
fn check(map: BorrowedFd, len: usize) -> io::Result<()> {
    match map_info(map)?.value_size as usize {
        size if size == len => Ok(()),
        size => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("its values have {size} bytes, not {len}"),
        )),
    }
}

/// Values of a hash map with keys of 8 bytes, each of `N` words. Entries that are present throughout are included.
pub(super) fn values<const N: usize>(map: BorrowedFd) -> io::Result<Vec<[u64; N]>> {
    let info = map_info(map)?;
    if (info.key_size, info.value_size as usize) != (8, N * 8) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it has keys or values of another size"));
    }
    // A batch is whole buckets, so there must be room for the fullest one. It grows if a bucket does not fit.
    let (mut room, most) = (4096usize, (info.max_entries as usize).max(4096));
    let (mut found, mut place, mut begun) = (Vec::new(), [0u64; 1], false);
    loop {
        let mut keys = vec![0u64; room];
        let mut values = vec![[0u64; N]; room];
        let mut next = [0u64; 1];
        let mut attr = attr();
        // SAFETY: the union is zeroed, so all of this variant is initialised.
        let batch = unsafe { &mut attr.batch };
        batch.in_batch = if begun { place.as_ptr() as u64 } else { 0 };
        batch.out_batch = next.as_mut_ptr() as u64;
        (batch.keys, batch.values) = (keys.as_mut_ptr() as u64, values.as_mut_ptr() as u64);
        (batch.count, batch.map_fd) = (room as u32, map.as_raw_fd() as u32);
        let result = bpf(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr);
        // SAFETY: the kernel wrote the count, or left ours.
        let count = unsafe { attr.batch.count } as usize;
        let full = |e: &io::Error| e.raw_os_error() == Some(libc::ENOSPC);
        match result {
            Err(e) if full(&e) && room < most => {
                room = (room * 4).min(most);
                continue;
            }
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            result => {
                found.extend(values.into_iter().take(count));
                if result.is_err() {
                    return Ok(found);
                }
            }
        }
        (place, begun) = (next, true);
    }
}

/// Stores a value in such a map.
#[cfg(test)]
pub(super) fn put<const N: usize>(map: BorrowedFd, key: u64, value: [u64; N]) -> io::Result<()> {
    check(map, N * 8)?;
    let mut attr = attr();
    // SAFETY: the union is zeroed, so all of this variant is initialised.
    let element = unsafe { &mut attr.__bindgen_anon_2 };
    (element.map_fd, element.key) = (map.as_raw_fd() as u32, &raw const key as u64);
    element.__bindgen_anon_1.value = value.as_ptr() as u64;
    bpf(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

fn info<T>(fd: BorrowedFd) -> io::Result<T> {
    // SAFETY: used below with plain data only, for which zeroes are a valid value.
    let mut info: T = unsafe { std::mem::zeroed() };
    let mut attr = attr();
    attr.info.bpf_fd = fd.as_raw_fd() as u32;
    attr.info.info_len = size_of::<T>() as u32;
    attr.info.info = &raw mut info as u64;
    bpf(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

fn map_info(map: BorrowedFd) -> io::Result<bpf_map_info> {
    info(map)
}

/// The id of a map.
pub(super) fn map_id(map: BorrowedFd) -> io::Result<u32> {
    Ok(map_info(map)?.id)
}

/// The ids of a link and of its program.
pub(super) fn link_ids(link: BorrowedFd) -> io::Result<(u32, u32)> {
    let info: bpf_link_info = info(link)?;
    Ok((info.id, info.prog_id))
}

/// How often a program did not run because it was already running on that processor.
pub(super) fn misses(program: u32) -> io::Result<u64> {
    let mut attr = attr();
    attr.__bindgen_anon_6.__bindgen_anon_1.prog_id = program;
    let program = owned(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut attr)?;
    use std::os::fd::AsFd;
    let info: bpf_prog_info = info(program.as_fd())?;
    Ok(info.recursion_misses)
}

/// The words of a record, mapped.
pub(super) struct Words {
    address: *mut libc::c_void,
    bytes: usize,
    words: usize,
}

// SAFETY: shared memory of atomic words, valid until dropped, on any thread.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps a record of that many words.
    pub(super) fn map(record: BorrowedFd, words: u64) -> io::Result<Words> {
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, "it has another size");
        if u64::from(map_info(record)?.max_entries) != words {
            return Err(wrong());
        }
        let words = usize::try_from(words).map_err(|_| wrong())?;
        let bytes = words.checked_mul(8).ok_or_else(wrong)?.next_multiple_of(rustix::param::page_size());
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                record.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Words { address, bytes, words })
    }
}

// In the kernel's headers _IO(0x12, 93) and _IO(0x12, 94).
const BLKROSET: libc::Ioctl = 0x125d;
const BLKROGET: libc::Ioctl = 0x125e;

/// Lets nobody write to a block device any more, nor to its partitions, or ends that.
///
/// What has it open for writing gets an error then; what is mounted on it, or above it, is not stopped.
pub(super) fn set_read_only(device: &File, read_only: bool) -> io::Result<()> {
    let value = libc::c_int::from(read_only);
    // SAFETY: the kernel reads one int.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKROSET, &raw const value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether nobody may write to a block device.
pub(super) fn is_read_only(device: &File) -> io::Result<bool> {
    let mut value: libc::c_int = 0;
    // SAFETY: the kernel writes one int.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET, &raw mut value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(value != 0) }
}

impl Deref for Words {
    type Target = [AtomicU64];
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has at least that many words, all initialised, and kernel and users change them atomically only.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.words) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: our own mapping, with no borrow left.
        unsafe { libc::munmap(self.address, self.bytes) };
    }
}
