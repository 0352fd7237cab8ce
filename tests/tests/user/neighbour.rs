//! Another dsync on the same host, with the default folders: no site of the tests sees it.

use dsync_tests::site::binary;
use dsync_tests::{Site, image, need, need_root};

const MIB: u64 = 1 << 20;

/// A mount namespace in which the default folders are empty, and a neighbour in it that tracks, serves and mirrors, and whose job fails.
const NEIGHBOUR: &str = r#"
for place in /run /var/lib /etc; do mount -t tmpfs none $place; done
mkdir /etc/dsync
mount -t bpf bpf /sys/fs/bpf
theirs="env -u DSYNC_STATE_DIR -u DSYNC_CONF_DIR -u DSYNC_RUN_DIR -u DSYNC_BPF_DIR $DSYNC"
device=$(losetup --find --show theirs.raw)
end() {
    kill $server $mirror
    $theirs track remove $device
    losetup --detach $device
}
trap end EXIT
$theirs track add $device
$theirs serve served.raw --socket /run/served.sock & server=$!
until [ -S /run/served.sock ]; do sleep 0.05; done
$theirs mirror served.raw mirrored.raw & mirror=$!
until [ -e mirrored.raw ]; do sleep 0.05; done
printf 'command = sync\nsource = /nowhere/vm.raw\ndestination = /nowhere/copy.raw\n' >/etc/dsync/bad.conf
! $theirs run bad
code=0; $theirs status --check || code=$?
[ $code = 1 ]

code=0; "$DSYNC" status --check || code=$?
[ $code = 3 ]
"$DSYNC" sync mine.raw copy.raw
[ "$("$DSYNC" status --check)" = OK ]
"$DSYNC" status --json >status
! grep -e theirs.raw -e served.raw -e mirrored.raw -e "$device" -e nowhere status
"#;

#[test]
fn a_neighbour_is_not_seen() {
    let what = "another dsync on this host";
    if !need_root(what) || !need(&["unshare", "losetup"], what) {
        return;
    }
    let site = Site::new();
    for name in ["theirs.raw", "served.raw", "mine.raw"] {
        image::sparse(&site.path(name), 4 * MIB);
    }
    let unshare =
        site.run("unshare".as_ref()).args(["--mount", "--propagation", "private", "sh", "-ec", NEIGHBOUR]);
    unshare.env("DSYNC", binary()).ok();
}
