//! A page of memory that whoever reads it waits for: see userfaultfd(2).

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

const BYTES: u64 = 4096;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;

/// One page, not there until it is filled.
pub(crate) struct Page {
    faults: File,
    address: u64,
}

impl Page {
    /// `None` where the kernel does not offer it, or not to us.
    pub(crate) fn new() -> Option<Page> {
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

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Whoever waits for it goes on, and finds zeroes.
    pub(crate) fn fill(&self) {
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
