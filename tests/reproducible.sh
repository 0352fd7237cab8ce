#!/bin/sh
# Builds a target of make a second time, of the same sources in another folder, in another time zone, locale and umask, and compares
# what comes out, byte by byte.
#
#   tests/reproducible.sh TARGET FILE...      FILE is below the folder of builds ("target", or $CARGO_TARGET_DIR)
set -eu

say() { echo "reproducible: $*"; }

what=$1
shift
builds=${CARGO_TARGET_DIR:-target}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
# The length of its name differs as well.
again=$work/the-same-sources-elsewhere
mkdir "$again"
# What git tracks, as it is in this folder; of an unpacked archive, all that was not built.
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z
else
    find . -path ./target -prune -o -path ./.git -prune -o ! -type d -print0
fi >"$work/files"
tar --create --null --files-from="$work/files" | tar --extract --directory="$again"

say "building $what again"
if ! (
    umask 027
    unset CARGO_TARGET_DIR
    TZ=Pacific/Kiritimati LC_ALL=C.UTF-8 make --directory="$again" "$what"
) >"$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    say "FAILED: make $what in another folder" >&2
    exit 1
fi

differ=
for file in "$@"; do
    second=$again/target/${file#"$builds"/}
    if cmp -s "$file" "$second"; then
        say "$(sha256sum "$file" | cut -c 1-16)  $(basename "$file")"
        continue
    fi
    differ="$differ $(basename "$file")"
    [ -e "$second" ] || continue
    case $file in
    *.deb)
        # Which of its files differ.
        for side in "$file" "$second"; do
            rm -rf "$work/tree"
            dpkg-deb -R "$side" "$work/tree"
            (cd "$work/tree" && find . -type f -exec sha256sum {} + | LC_ALL=C sort -k 2) >"$work/list.$([ "$side" = "$file" ] && echo 1 || echo 2)"
        done
        diff "$work/list.1" "$work/list.2" >&2 || true
        ;;
    esac
done
if [ -n "$differ" ]; then
    say "FAILED: two builds of $what are not the same:$differ" >&2
    exit 1
fi
