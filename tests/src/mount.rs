//! Mounts, loop devices, and disks that wear out, for root.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use testing::{Loop, Mount};

use crate::{Background, Run};

/// A device over a file some of whose sectors cannot be read until they are written, as those of a worn disk.
pub struct Worn {
    device: Option<Loop>,
    content: PathBuf,
    bad: PathBuf,
    mount: PathBuf,
    _server: Background,
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
        std::fs::create_dir(&mount).expect("a folder");
        let run = Run::new("nbdfuse").arg(&mount).args(["--command", "nbdkit", "-s", "sh"]).arg(&script);
        let mut server = run.env("CONTENT", content).env("BAD", &bad).start();
        let image = mount.join("nbd");
        while !image.exists() {
            if server.ended().is_some() {
                return None;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let device = Loop::new(&image);
        let worn = Worn { content: content.to_path_buf(), bad, mount, _server: server, device };
        worn.device.is_some().then_some(worn)
    }

    /// The device.
    pub fn device(&self) -> &Path {
        self.device.as_ref().expect("a device").device()
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
        let file = format!("if={}", self.mount.join("nbd").display());
        Run::new("dd").arg(file).args(["iflag=nocache", "count=0"]).output();
    }
}

impl Drop for Worn {
    fn drop(&mut self) {
        self.device = None;
        Run::new("umount").arg("--lazy").arg(&self.mount).output();
    }
}
