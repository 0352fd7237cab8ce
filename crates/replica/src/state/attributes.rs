//! What a file is besides its content: its owner, mode, access list, extended attributes and flags. A clone that takes the place of a file has
//! all of them, or is not made: a lost access list or label would open a disk to others, or close it to those who use it.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, fchown};

use rustix::fs::{
    IFlags, XattrFlags, fgetxattr, flistxattr, fremovexattr, fsetxattr, ioctl_getflags, ioctl_setflags,
};
use rustix::io::Errno;

/// Flags that a user sets, and that a clone can have. On Btrfs one without copy-on-write is not cloned to one with it.
const FLAGS: IFlags =
    IFlags::NOCOW.union(IFlags::COMPRESSED).union(IFlags::NODUMP).union(IFlags::NOATIME).union(IFlags::SYNC);

/// What the kernel keeps of a file by itself: sums, and the access list under the name that it has on an XFS.
const KERNELS: [&[u8]; 4] =
    [b"security.ima", b"security.evm", b"trusted.SGI_ACL_FILE", b"trusted.SGI_ACL_DEFAULT"];

/// Gives the empty file `to` the flags of `from`, as far as it takes them.
pub(crate) fn carry_flags(from: &File, to: &File) -> io::Result<()> {
    let (Ok(flags), Ok(own)) = (ioctl_getflags(from), ioctl_getflags(to)) else { return Ok(()) };
    match own & FLAGS == flags & FLAGS {
        true => Ok(()),
        false => Ok(ioctl_setflags(to, own.difference(FLAGS) | flags & FLAGS)?),
    }
}

/// Gives `to`, which no other may open yet, the owner, the extended attributes with the access list, and the mode of `from`.
///
/// # Errors
/// Names the first that it cannot have.
pub(crate) fn carry(from: &File, to: &File) -> io::Result<()> {
    carry_flags(from, to).map_err(named("its flags"))?;
    let old = from.metadata()?;
    if (old.uid(), old.gid()) != (to.metadata()?.uid(), to.metadata()?.gid()) {
        fchown(to, Some(old.uid()), Some(old.gid())).map_err(named("its owner and group"))?;
    }
    let (has, own) = (names(from)?, names(to)?);
    // What the folder gave it: under another mode it would let others in.
    for name in own.iter().filter(|name| !has.contains(name)) {
        fremovexattr(to, name.as_slice()).map_err(|e| named(&shown(name))(e.into()))?;
    }
    for name in &has {
        let value = value(from, name)?;
        if own.contains(name) && self::value(to, name)? == value {
            continue;
        }
        fsetxattr(to, name.as_slice(), &value, XattrFlags::empty())
            .map_err(|e| named(&shown(name))(e.into()))?;
    }
    // Last: of a file with an access list this is the mask of that.
    to.set_permissions(old.permissions()).map_err(named("its mode"))
}

fn shown(name: &[u8]) -> String {
    format!("its attribute {}", String::from_utf8_lossy(name))
}

fn named(what: &str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// The extended attributes that this process may read.
fn names(file: &File) -> io::Result<Vec<Vec<u8>>> {
    // The most that the kernel returns.
    let mut list = vec![0; 1 << 16];
    let len = match flistxattr(file, list.as_mut_slice()) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => 0,
        listed => listed?,
    };
    let names = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    Ok(names.filter(|name| !KERNELS.contains(name)).map(<[u8]>::to_vec).collect())
}

fn value(file: &File, name: &[u8]) -> io::Result<Vec<u8>> {
    let mut value = vec![0; 1 << 16];
    let len = fgetxattr(file, name, value.as_mut_slice()).map_err(|e| named(&shown(name))(e.into()))?;
    value.truncate(len);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const NAME: &[u8] = b"user.note";

    #[test]
    fn a_file_gets_what_another_has_and_nothing_else() {
        let (from, to) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let (from, to) = (from.as_file(), to.as_file());
        if fsetxattr(from, NAME, b"hello", XattrFlags::empty()).is_err() {
            println!("SKIPPED: there are no extended attributes here; not tested: that a clone has them");
            return;
        }
        from.set_permissions(std::fs::Permissions::from_mode(0o640)).unwrap();
        fsetxattr(to, NAME, b"another", XattrFlags::empty()).unwrap();
        fsetxattr(to, "user.own", b"of the folder", XattrFlags::empty()).unwrap();
        carry(from, to).unwrap();
        assert_eq!(names(to).unwrap(), names(from).unwrap());
        assert_eq!(value(to, NAME).unwrap(), b"hello");
        assert_eq!(to.metadata().unwrap().mode() & 0o7777, 0o640);
    }
}
