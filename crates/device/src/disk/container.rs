//! Image formats that contain a disk. Served or copied raw, they are the container instead of the disk.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Buf;
use crate::disk::file::DiskOptions;

/// How a disk lies in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Byte for byte.
    #[default]
    Raw,
    /// In QEMU's format.
    Qcow2,
}

impl Format {
    /// True of the usual one, which is not written down.
    pub fn is_raw(&self) -> bool {
        *self == Format::Raw
    }

    /// The format that the name of a file says.
    pub fn of_name(path: &Path) -> Format {
        let qcow2 = path.extension().is_some_and(|end| end.eq_ignore_ascii_case("qcow2"));
        if qcow2 { Format::Qcow2 } else { Format::Raw }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        })
    }
}

/// Bytes in which every format says what it is.
const HEAD: u64 = 4096;

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
/// it later reports why. The page cache is left as it was.
pub fn container_format(image: &Path) -> Option<&'static str> {
    let disk =
        crate::disk::file::open(image, &DiskOptions { direct: true, ..DiskOptions::default() }).ok()?;
    let mut head = Buf::new(disk.len().min(HEAD) as usize);
    disk.read_at(0, &mut head).ok()?;
    let is = |offset: u64, magic: &[u8]| head.get(offset as usize..).is_some_and(|at| at.starts_with(magic));
    FORMATS.iter().find(|(_, offset, magic)| is(*offset, magic)).map(|(name, ..)| *name)
}
