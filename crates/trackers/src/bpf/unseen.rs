//! Devices whose content can change without a tracepoint of the block layer: the tracker would miss these changes.
//!
//! Refused, since the tracker would miss writes: zoned disks; disks that can be written to as memory (`queue/dax` is 1: pmem,
//! virtio-pmem, mapped devices over them), mounted with DAX or not, since a single file may be switched to it at any time; brd, zram,
//! pmem and btt on kernels whose block devices have `rw_page` (until Linux 6.2; the kernel's type information shows it), through which
//! swap, FAT and other file systems write single pages without a bio. A device-mapper device with dm-track over such a disk offers
//! neither DAX nor `rw_page`, and can be tracked.

use std::path::Path;

/// The kernel's own description of its types.
pub(super) const TYPES: &str = "/sys/kernel/btf/vmlinux";

/// Drivers that take single pages past the block layer where the kernel has `rw_page`: brd, zram, and those of persistent
/// memory (pmem and btt), by what the names of their disks begin with.
const BY_PAGES: [&str; 3] = ["ram", "zram", "pmem"];

/// How the content of a disk can change unseen; `None` if it cannot. `disk` is the whole disk's folder in sysfs, `types` a file
/// like [`TYPES`].
///
/// The worse case is assumed: a disk of these drivers is refused where `types` cannot be read.
pub(super) fn unseen(disk: &Path, types: &Path) -> Option<&'static str> {
    // The kernel maps no file of a file system with DAX unless its device has this flag, whatever the mount options are; with
    // it a single file may be mapped at any time (`chattr +x`).
    if std::fs::read_to_string(disk.join("queue/dax")).is_ok_and(|dax| dax.trim() != "0") {
        return Some("can be written to as memory (DAX)");
    }
    let by_pages = disk.file_name().and_then(|name| name.to_str()).is_some_and(takes_pages);
    (by_pages && has_rw_page(types))
        .then_some("takes pages past the block layer on this kernel (rw_page, before Linux 6.3)")
}

fn takes_pages(name: &str) -> bool {
    let numbered = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    BY_PAGES.iter().any(|driver| name.strip_prefix(driver).is_some_and(numbered))
}

/// True unless it is certain that the kernel's block devices have no such operation. Its release would not tell: distributions
/// take changes over into older ones.
fn has_rw_page(types: &Path) -> bool {
    // Names end with a zero byte, and one begins after another's.
    const NAME: &[u8] = b"\0rw_page\0";
    !std::fs::read(types).is_ok_and(|types| !types.windows(NAME.len()).any(|name| name == NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk's folder in sysfs with what is in its `queue/dax`, and the types of a kernel.
    fn said(name: &str, dax: Option<&str>, types: Option<&[u8]>) -> Option<&'static str> {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join(name);
        std::fs::create_dir_all(disk.join("queue")).unwrap();
        if let Some(dax) = dax {
            std::fs::write(disk.join("queue/dax"), dax).unwrap();
        }
        let place = folder.path().join("types");
        if let Some(types) = types {
            std::fs::write(&place, types).unwrap();
        }
        unseen(&disk, &place)
    }

    const OLD: &[u8] = b"\0block_device_operations\0submit_bio\0rw_page\0ioctl\0";
    const NEW: &[u8] = b"\0block_device_operations\0submit_bio\0ioctl\0zram_rw_page\0rw_pages\0";

    #[test]
    fn what_can_be_mapped_is_refused_on_every_kernel() {
        for (name, types) in [("pmem0", NEW), ("dm-3", NEW), ("vda", OLD)] {
            let why = said(name, Some("1\n"), Some(types)).expect(name);
            assert!(why.contains("DAX"), "{why}");
        }
    }

    #[test]
    fn pages_past_the_block_layer_are_refused_where_the_kernel_has_them() {
        for name in ["ram0", "zram12", "pmem0", "pmem0.1", "pmem1s"] {
            let why = said(name, Some("0\n"), Some(OLD)).expect(name);
            assert!(why.contains("rw_page"), "{why}");
            assert_eq!(said(name, Some("0\n"), Some(NEW)), None, "{name}");
            assert!(said(name, None, None).is_some(), "{name} where the kernel tells nothing");
        }
    }

    #[test]
    fn other_disks_are_followed() {
        for name in ["vda", "sdb", "dm-0", "loop7", "nvme0n1", "ramdisk", "pmemory", "zra0", "ram"] {
            assert_eq!(said(name, Some("0\n"), Some(OLD)), None, "{name}");
            assert_eq!(said(name, None, None), None, "{name}");
        }
    }
}
