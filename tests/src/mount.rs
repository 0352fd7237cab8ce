//! Mounts, loop devices, and disks that wear out, for root.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use testing::{Loop, Mount};

use crate::{Background, Run, skipped, until};

/// A new tmpfs of this size, such as "12m". `None` where none can be mounted: then `what` is reported as skipped.
pub fn small(place: &Path, size: &str, what: &str) -> Option<Mount> {
    let mounted = Mount::new(&["-t", "tmpfs", "-o", &format!("size={size}")], Path::new("none"), place);
    if mounted.is_none() {
        skipped(what, "a tmpfs cannot be mounted here");
    }
    mounted
}

/// Waits until an ext4 file system on a device is mounted nowhere: not in another mount namespace, nor after a lazy unmount.
pub fn wait_until_free(device: &Path) {
    let name = device.file_name().expect("a name");
    until("it is mounted nowhere", || !Path::new("/sys/fs/ext4").join(name).exists());
}

/// A block device of this machine over what an NBD server exports: a loop device over the one file of a FUSE mount.
pub struct Attached {
    device: Option<Loop>,
    mount: PathBuf,
    server: Background,
}

impl Attached {
    /// Over an export; `mount` is a folder to be made. `None` where that cannot be had.
    pub fn new(uri: &str, mount: &Path) -> Option<Attached> {
        Attached::over(Run::new("nbdfuse").arg(mount).arg(uri), mount)
    }

    /// Over what this nbdfuse shows in `mount`.
    fn over(nbdfuse: Run, mount: &Path) -> Option<Attached> {
        std::fs::create_dir(mount).expect("a folder");
        let mut server = nbdfuse.start();
        let image = mount.join("nbd");
        while !image.exists() {
            if server.ended().is_some() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let device = Loop::new(&image);
        let attached = Attached { mount: mount.to_path_buf(), server, device };
        attached.device.is_some().then_some(attached)
    }

    /// The device.
    pub fn device(&self) -> &Path {
        self.device.as_ref().expect("a device").device()
    }

    /// Kills what brings its writes to the server: from now on the device fails.
    pub fn kill(&mut self) {
        self.server.kill();
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.device = None;
        Run::new("umount").arg("--lazy").arg(&self.mount).output();
    }
}

/// A device over a file some of whose sectors cannot be read until they are written, as those of a worn disk.
pub struct Worn {
    attached: Attached,
    content: PathBuf,
    bad: PathBuf,
}

/// For nbdkit: serves the file CONTENT. BAD lists where its bad sectors begin.
const WORN: &str = r#"
offset=${4:-0}
end=$((offset + ${3:-0}))
case $1 in
get_size) stat -L -c %s "$CONTENT" ;;
pread)
    while read -r at; do
        if [ "$offset" -lt $((at + 4096)) ] && [ "$end" -gt "$at" ]; then
            echo "EIO a bad sector" >&2
            exit 1
        fi
    done <"$BAD"
    dd if="$CONTENT" iflag=skip_bytes,count_bytes bs=1M skip="$offset" count="$3" status=none ;;
pwrite)
    dd of="$CONTENT" conv=notrunc oflag=seek_bytes bs=1M seek="$offset" status=none
    while read -r at; do
        [ "$offset" -le "$at" ] && [ "$end" -ge $((at + 4096)) ] || echo "$at"
    done <"$BAD" >"$BAD.new"
    mv "$BAD.new" "$BAD" ;;
can_write | can_flush) ;;
flush) sync "$CONTENT" ;;
*) exit 2 ;;
esac
"#;

impl Worn {
    /// Over a file in this folder, as yet without a bad sector; `None` where that cannot be had.
    pub fn new(content: &Path) -> Option<Worn> {
        let beside = |end: &str| content.with_extension(end);
        let (bad, script, mount) = (beside("bad"), beside("sh"), beside("mount"));
        std::fs::write(&bad, "").expect("a list of sectors");
        std::fs::write(&script, format!("#!/bin/sh{WORN}")).expect("a script");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("a script");
        let run = Run::new("nbdfuse").arg(&mount).args(["--command", "nbdkit", "-s", "sh"]).arg(&script);
        let attached = Attached::over(run.env("CONTENT", content).env("BAD", &bad), &mount)?;
        Some(Worn { attached, content: content.to_path_buf(), bad })
    }

    /// The device.
    pub fn device(&self) -> &Path {
        self.attached.device()
    }

    /// The file beneath, all of which can be read.
    pub fn content(&self) -> &Path {
        &self.content
    }

    /// From now on the sectors of 4 KiB that begin here cannot be read, and no others.
    pub fn spoil(&self, sectors: &[u64]) {
        Run::new("sync").output();
        let list: String = sectors.iter().map(|at| format!("{at}\n")).collect();
        std::fs::write(&self.bad, list).expect("a list of sectors");
        Run::new("blockdev").arg("--flushbufs").arg(self.device()).output();
        let file = format!("if={}", self.attached.mount.join("nbd").display());
        Run::new("dd").arg(file).args(["iflag=nocache", "count=0"]).output();
    }
}
