//! A write that does not end before it may: a freeze of the file system waits for it.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::skipped;

const BYTES: u64 = 4096;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;

/// One page, not there until it is filled: whoever reads it waits. See userfaultfd(2).
struct Page {
    faults: File,
    address: u64,
}

impl Page {
    /// `None` where the kernel does not offer it, or not to us.
    fn new() -> Option<Page> {
        // SAFETY: a fresh descriptor, and a fresh mapping at an address of the kernel's choice.
        let (faults, address) = unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC);
            let faults = File::from_raw_fd(i32::try_from(fd).ok().filter(|fd| *fd >= 0)?);
            let (access, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let address = libc::mmap(std::ptr::null_mut(), BYTES as usize, access, kind, -1, 0);
            (faults, (address != libc::MAP_FAILED).then_some(address as u64)?)
        };
        let page = Page { faults, address };
        let begun =
            page.ask(UFFDIO_API, [0xaa, 0, 0, 0]) && page.ask(UFFDIO_REGISTER, [address, BYTES, 1, 0]);
        begun.then_some(page)
    }

    /// Whoever waits for it goes on, and finds zeroes.
    fn fill(&self) {
        assert!(
            self.ask(UFFDIO_ZEROPAGE, [self.address, BYTES, 0, 0]),
            "{}",
            std::io::Error::last_os_error()
        );
    }

    fn ask(&self, request: u64, mut about: [u64; 4]) -> bool {
        // SAFETY: the largest of these requests takes and writes four words.
        unsafe { libc::ioctl(self.faults.as_raw_fd(), request as _, about.as_mut_ptr()) >= 0 }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the writer was joined, or the process ends.
        unsafe { libc::munmap(self.address as *mut _, BYTES as usize) };
    }
}

/// A write to a file whose content the writer's memory does not have yet.
pub struct StalledWrite {
    memory: Page,
    writer: JoinHandle<()>,
}

impl StalledWrite {
    /// One to a new file. `None` where that cannot be had; a line says so.
    pub fn new(path: &Path, what: &str) -> Option<StalledWrite> {
        StalledWrite::begin(path, 0, what)
    }

    /// One to the beginning of a file, past the page cache: who reads it does not wait.
    pub fn direct(path: &Path, what: &str) -> Option<StalledWrite> {
        StalledWrite::begin(path, libc::O_DIRECT, what)
    }

    fn begin(path: &Path, flags: i32, what: &str) -> Option<StalledWrite> {
        let memory = Page::new();
        if memory.is_none() {
            skipped(what, "this needs userfaultfd");
        }
        let (memory, path) = (memory?, path.to_path_buf());
        let (address, (begins, begun)) = (memory.address, mpsc::channel());
        let writer = std::thread::spawn(move || {
            let mut options = File::options();
            let file = options.write(true).create(true).truncate(false).custom_flags(flags).open(path);
            let file = file.expect("a file");
            begins.send(rustix::thread::gettid()).expect("its thread");
            // SAFETY: the page stays mapped until this thread is joined.
            let written = unsafe { libc::write(file.as_raw_fd(), address as *const _, BYTES as usize) };
            assert_eq!(written, BYTES as isize);
        });
        let call = format!("/proc/self/task/{}/syscall", begun.recv().expect("a writer"));
        let (write, page) = (format!("{} ", libc::SYS_write), format!("{address:#x}"));
        let writes = |call: String| call.starts_with(&write) && call.contains(&page);
        while !std::fs::read_to_string(&call).is_ok_and(writes) {
            assert!(!writer.is_finished(), "the write ended");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(StalledWrite { memory, writer })
    }

    /// The memory comes, and the write ends.
    pub fn end(self) {
        self.memory.fill();
        self.writer.join().expect("a write");
    }
}

/// True while a thread of the process in this folder of procfs is inside the request to freeze.
pub fn is_freezing(process: &Path) -> bool {
    is_asking(process, "c0045877")
}

/// True if one is inside the request to clone a file.
pub fn is_cloning(process: &Path) -> bool {
    is_asking(process, "40049409")
}

fn is_asking(process: &Path, request: &str) -> bool {
    let threads = std::fs::read_dir(process.join("task")).expect("a process").flatten();
    threads.filter_map(|t| std::fs::read_to_string(t.path().join("syscall")).ok()).any(|call| {
        // Its number, the descriptor, the request.
        call.split(' ').nth(2).is_some_and(|asked| asked.ends_with(request))
    })
}
