#!/bin/sh
# Shows that a binary is static: runs the demonstration in a root that holds nothing but it, /proc and /dev.
#
#   tests/static.sh BINARY
set -eu
if [ "$(id -u)" != 0 ]; then
    echo "SKIPPED: a root of its own needs root; not tested: $1 in an empty root"
    exit 0
fi
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
mkdir "$root/proc" "$root/dev" "$root/tmp"
install -m755 "$1" "$root/dsync"
# The mounts go with the process.
unshare --mount sh -euc '
    mount -t proc proc "$1/proc"
    mount --bind /dev "$1/dev"
    exec chroot "$1" /dsync demo
' sh "$root"
