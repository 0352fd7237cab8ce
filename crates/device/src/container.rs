//! Image formats that contain a disk. Served or copied raw, they are the container instead of the disk.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Name, magic bytes and their offset. LUKS is missing on purpose: an encrypted disk
/// is served as it is.
const FORMATS: [(&str, u64, &[u8]); 7] = [
    ("qcow2", 0, b"QFI\xfb"),
    ("QED", 0, b"QED\0"),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    ("VHDX", 0, b"vhdxfile"),
    ("VHD", 0, b"conectix"),
    ("VDI", 0x40, b"\x7f\x10\xda\xbe"),
];

/// The format of an image that is not raw. `None` if none is recognised, or the image cannot be read: opening
/// it later reports why.
pub fn container_format(image: &Path) -> Option<&'static str> {
    let file = File::open(image).ok()?;
    let is = |offset, magic: &[u8]| {
        let mut found = vec![0; magic.len()];
        file.read_exact_at(&mut found, offset).is_ok() && found == magic
    };
    FORMATS.iter().find(|(_, offset, magic)| is(*offset, magic)).map(|(name, ..)| *name)
}
