#!/bin/sh
# Tests Debian packages: what lintian says of them, then installing, using, upgrading, removing and purging them in a new
# root of Debian 12.
#
#   tests/package.sh FOLDER      the folder that has them
set -eu

say() { echo "package: $*"; }
fail() { say "FAILED: $*" >&2; exit 1; }

skip() {
    echo "SKIPPED $*"
    [ "${DSYNC_STRICT:-0}" != 1 ] || exit 1
}

# All paths, other than those that every package leaves: caches, logs, the lists of dpkg.
paths() {
    find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /tmp -o -path /packages \
        -o -path /var/cache -o -path /var/log -o -path /var/lib/dpkg -o -path /var/lib/apt \) -prune -o -print | LC_ALL=C sort
}

# Lines of a file that another lacks.
new() { LC_ALL=C comm -13 "$1" "$2"; }

quietly() { "$@" >/tmp/log 2>&1 || { cat /tmp/log >&2; fail "$*"; }; }

# What happens in the new root, where /packages has the packages, and in next/ the same ones of a higher revision.
inside() {
    export DEBIAN_FRONTEND=noninteractive
    kernel=$(basename "$(echo /lib/modules/*-amd64)")
    quietly depmod "$kernel"
    paths >/tmp/before

    say "install"
    quietly dpkg -i /packages/*.deb
    dpkg -L dsync dsync-dkms | grep . | while read -r path; do [ -e "$path" ] || fail "$path is not there"; done
    [ ! -e /usr/local/bin/dsync ] || fail "the program is in /usr/local"
    unit=/lib/systemd/system/dsync-track@.service
    grep -q '^ExecStart=/usr/bin/dsync ' $unit && grep -q '^ExecStop=/usr/bin/dsync ' $unit || fail "$unit has another path"
    quietly systemd-analyze --man=no verify dsync-track@dev-sdz.service dsync-serve@vm.service dsync-serve@vm.socket \
        dsync-mirror@vm.service dsync-sync@vm.timer dsync-verify@vm.timer dsync-receive.service dsync-receive.socket
    getent passwd dsync >/dev/null || fail "the user dsync is not there"
    [ -z "$(find /etc/systemd/system -name 'dsync-*')" ] || fail "a unit is enabled that has no job"
    dkms status -m dm-track -k "$kernel" | grep -q ': installed' || fail "dm-track was not built for $kernel: $(dkms status)"
    [ "$(modinfo -k "$kernel" -F license dm-track)" = GPL ] || fail "modinfo does not find dm-track"

    say "use"
    quietly dsync demo
    key=$(dsync key 2>/dev/null)
    quietly systemctl enable dsync-track@dev-sdz.service
    truncate -s 8M /root/from.raw
    printf '%s\n' 'command = sync' 'source = /root/from.raw' 'destination = /root/to.raw' >/etc/dsync/root.conf
    quietly dsync run root
    quietly systemctl enable dsync-sync@root.timer dsync-receive.socket

    say "upgrade"
    quietly dpkg -i /packages/next/*.deb
    [ "$(dpkg-query -W -f '${Version}' dsync)" = "$(cat /packages/next/version)" ] || fail "the upgrade left the old version"
    [ "$(dsync key 2>/dev/null)" = "$key" ] || fail "the upgrade lost the key"
    [ -L /etc/systemd/system/local-fs.target.wants/dsync-track@dev-sdz.service ] || fail "the upgrade disabled a unit"
    dkms status -m dm-track -k "$kernel" | grep -q ': installed' || fail "the upgrade lost dm-track: $(dkms status)"
    [ -L /etc/systemd/system/timers.target.wants/dsync-sync@root.timer ] || fail "the upgrade disabled a timer"
    quietly dsync run root
    rm -r /etc/dsync/root.conf /root/from.raw /root/to.raw /root/.to.raw.dsync

    say "remove"
    quietly dpkg -r dsync-dkms dsync
    paths >/tmp/removed
    [ -z "$(grep -E '^/(usr|lib)/' /tmp/removed | new /tmp/before -)" ] ||
        fail "left after removal: $(new /tmp/before /tmp/removed)"

    say "purge"
    quietly dpkg -P dsync-dkms dsync
    ! dpkg-query -W dsync dsync-dkms 2>/dev/null | grep . || fail "dpkg still knows the packages"
    paths >/tmp/after
    left=$(new /tmp/before /tmp/after | grep -v -e '^/var/lib/dsync$' -e '^/var/lib/dsync/' || true)
    [ -z "$left" ] || fail "left after the purge: $left"
    [ -z "$(new /tmp/after /tmp/before)" ] || fail "gone with the purge: $(new /tmp/after /tmp/before)"

    say "install again"
    quietly dpkg -i /packages/dsync_*.deb
    [ "$(dsync key 2>/dev/null)" = "$key" ] || fail "the state did not outlive the purge"
    say "passed in the new root"
    exit
}

[ "$1" != inside ] || inside

packages=$(ls "$1"/*.deb)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
mkdir -p "$work/packages/next"
# Without root, what mmdebstrap does is done by another user.
chmod a+rx "$work"
chmod a+rwxt "$work/packages"

if command -v lintian >/dev/null; then
    # shellcheck disable=SC2086 # a list of files
    lintian --allow-root --fail-on error,warning --tag-display-limit 0 $packages
    say "lintian has neither errors nor warnings"
else
    skip "lintian: it is not installed"
fi

if ! command -v mmdebstrap >/dev/null; then
    skip "the packages in a new root: mmdebstrap is not installed"
    exit
fi

for package in $packages; do
    name=$(dpkg-deb -f "$package" Package)
    case $name in *-dbgsym) continue ;; esac
    cp "$package" "$work/packages/"
    dpkg-deb -R "$package" "$work/next"
    echo "$(dpkg-deb -f "$package" Version)+next" >"$work/packages/next/version"
    sed -i "s/^Version: .*/Version: $(cat "$work/packages/next/version")/" "$work/next/DEBIAN/control"
    dpkg-deb --root-owner-group -b "$work/next" "$work/packages/next/$name.deb" >/dev/null
    rm -r "$work/next"
done
cp "$0" "$work/packages/package.sh"

say "making a root of Debian 12"
# systemd and what the packages depend on belong to the root, so that what the packages leave shows.
if ! mmdebstrap --quiet --variant=minbase --include=systemd,dkms,linux-headers-amd64 \
    --customize-hook="copy-in '$work/packages' /" \
    --customize-hook="touch '$work/packages/made'" \
    --customize-hook='chroot "$1" sh /packages/package.sh inside' bookworm /dev/null; then
    [ ! -e "$work/packages/made" ] || exit 1
    skip "the packages in a new root: it could not be made"
fi
