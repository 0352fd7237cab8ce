//! What a qcow2 file says of itself in its first bytes, of which QEMU's `docs/interop/qcow2.txt` tells.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::tools::check_size;

/// The bytes that are read.
const LEN: usize = 104;
const MAGIC: &[u8] = b"QFI\xfb";

/// Incompatible features.
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
/// Compression types and extended L2 entries: QEMU's business.
const HARMLESS: u64 = 1 << 3 | 1 << 4;

/// The head of a qcow2 file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageHeader {
    /// Bytes of the disk in it.
    pub size: u64,
    backing: bool,
    encrypted: bool,
    snapshots: u32,
    features: u64,
    bitmaps: bool,
    /// Bytes of a cluster.
    pub(crate) cluster: u64,
    /// Bytes of the entry of one in a table.
    entry: u64,
}

impl ImageHeader {
    /// The head of a file; `None` if it is no qcow2 file.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn of(file: &File) -> io::Result<Option<ImageHeader>> {
        let mut bytes = [0; LEN];
        match file.read_exact_at(&mut bytes, 0) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        Ok(ImageHeader::parse(&bytes))
    }

    fn parse(bytes: &[u8; LEN]) -> Option<ImageHeader> {
        let number = |at: usize, len: usize| {
            bytes[at..at + len].iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let version = number(4, 4);
        if !bytes.starts_with(MAGIC) || !(2..=3).contains(&version) {
            return None;
        }
        // The second version has none of these.
        let later = |at| if version == 2 { 0 } else { number(at, 8) };
        Some(ImageHeader {
            backing: number(8, 8) != 0,
            size: number(24, 8),
            encrypted: number(32, 4) != 0,
            snapshots: number(60, 4) as u32,
            features: later(72),
            bitmaps: later(88) & 1 != 0,
            cluster: 1 << number(20, 4).min(21),
            entry: if later(72) & 1 << 4 != 0 { 16 } else { 8 },
        })
    }

    /// Fails for a size that the disk in such a file cannot have. QEMU's first table has 32 MiB at most.
    ///
    /// # Errors
    /// `Unsupported`, with the reason.
    pub fn check_size(&self, len: u64) -> io::Result<()> {
        check_size(len)?;
        let most = ((32 << 20) / 8 * (self.cluster / self.entry)).saturating_mul(self.cluster);
        if len <= most {
            return Ok(());
        }
        let text = format!(
            "clusters of {} bytes make a disk of {most} bytes at most, and not one of {len}: use a raw replica",
            self.cluster
        );
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    /// Why such a file is neither served nor a replica, and what to do; `None` if it may be.
    pub fn refusal(&self) -> Option<(&'static str, &'static str)> {
        Some(match () {
            () if self.features & CORRUPT != 0 => {
                ("it is marked corrupt", "repair it with \"qemu-img check -r all\", or restore it")
            }
            () if self.features & DIRTY != 0 => {
                ("QEMU did not close it (it is marked dirty)", "repair it with \"qemu-img check -r all\"")
            }
            () if self.backing => (
                "it has a backing file, whose changes it does not show",
                "join both with \"qemu-img convert -O qcow2\"",
            ),
            () if self.features & EXTERNAL_DATA != 0 => (
                "its data is in another file, whose changes it does not show",
                "join both with \"qemu-img convert -O qcow2\"",
            ),
            () if self.encrypted => {
                ("it is encrypted, and dsync has no key", "decrypt it with \"qemu-img convert -O qcow2\"")
            }
            () if self.bitmaps => (
                "it holds dirty bitmaps of QEMU, which dsync would not keep up",
                "remove them with \"qemu-img bitmap --remove\"",
            ),
            () if self.features & !(DIRTY | CORRUPT | EXTERNAL_DATA | HARMLESS) != 0 => {
                ("it has a feature that dsync does not know", "convert it with \"qemu-img convert -O qcow2\"")
            }
            () => return None,
        })
    }

    /// Why a file that is only read is refused, and what to do; its bitmaps do not matter, as only a writer has to keep them up.
    pub fn refusal_of_reader(&self) -> Option<(&'static str, &'static str)> {
        ImageHeader { bitmaps: false, ..*self }.refusal()
    }

    /// Why a file cannot be a replica, and what to do; `None` if it may be.
    pub fn refusal_of_replica(&self) -> Option<(&'static str, &'static str)> {
        // They would keep what dsync writes over, and a return to one would look like a foreign write.
        let snapshots = self.snapshots > 0;
        self.refusal().or(snapshots.then_some((
            "it has internal snapshots, which hold moments that are not the source's",
            "remove them with \"qemu-img snapshot -d\", and use --keep for earlier moments",
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_qemu_makes_is_told_apart() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str| temp.path().join(name);
        let qemu_img = |args: &[&str]| {
            let done = Command::new("qemu-img").current_dir(temp.path()).args(args).output().unwrap();
            assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        };
        let why = |name: &str| {
            let head = ImageHeader::of(&File::open(at(name)).unwrap()).unwrap().unwrap();
            (head.size, head.refusal().map(|(why, _)| why), head.refusal_of_replica().map(|(why, _)| why))
        };
        let create = |name: &str, options: &str| {
            qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, name, "3M"]);
        };
        for (name, options) in [("plain", "compat=1.1"), ("old", "compat=0.10"), ("wide", "extended_l2=on")] {
            create(name, options);
            assert_eq!(why(name), (3 << 20, None, None), "{name}");
        }
        qemu_img(&["snapshot", "-c", "one", "plain"]);
        let (_, served, replica) = why("plain");
        assert!(served.is_none() && replica.unwrap().contains("snapshots"));
        create("data", "data_file=there");
        create("over", "backing_file=old,backing_fmt=qcow2");
        create("bitmap", "compat=1.1");
        qemu_img(&["bitmap", "--add", "bitmap", "b"]);
        create("luks", "compat=1.1");
        // To make a key takes seconds.
        File::options().write(true).open(at("luks")).unwrap().write_all_at(&[2], 35).unwrap();
        for (name, word) in
            [("data", "another file"), ("over", "backing"), ("bitmap", "bitmaps"), ("luks", "encrypted")]
        {
            let (_, served, _) = why(name);
            assert!(served.is_some_and(|why| why.contains(word)), "{name}: {served:?}");
            let head = ImageHeader::of(&File::open(at(name)).unwrap()).unwrap().unwrap();
            assert_eq!(head.refusal_of_reader().is_none(), name == "bitmap", "{name}");
        }
        // What only a crash of QEMU leaves.
        create("marked", "compat=1.1");
        for (bit, word) in [(1, "dirty"), (2, "corrupt"), (1 << 5, "does not know")] {
            File::options().write(true).open(at("marked")).unwrap().write_all_at(&[bit], 79).unwrap();
            assert!(why("marked").1.is_some_and(|why| why.contains(word)), "{word}");
        }
        std::fs::write(at("raw"), [0; 4096]).unwrap();
        std::fs::write(at("empty"), []).unwrap();
        for name in ["raw", "empty"] {
            assert_eq!(ImageHeader::of(&File::open(at(name)).unwrap()).unwrap(), None);
        }
    }
}
