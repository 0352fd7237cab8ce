# What the tests in a guest share. They speak TAP: `ok N - what`, `not ok N - what`, and `1..N` at the end.
# The guest's files lie in /tmp/files: the module, the program `blocks`, mdadm, and these scripts.
export DM_DISABLE_UDEV=1 MDADM_NO_UDEV=1
PATH=$PATH:/tmp/files
insmod() { busybox insmod "$@"; }
rmmod() { busybox rmmod "$@"; }

tests=0
failed=0
log_seen=0

ok() {
    tests=$((tests + 1))
    echo "ok $tests - $*"
}

not_ok() {
    tests=$((tests + 1))
    failed=$((failed + 1))
    echo "not ok $tests - $*"
}

say() { echo "# $*"; }

# The rest of the line is a command that has to succeed.
check() {
    what=$1
    shift
    if "$@" >/tmp/check.out 2>&1; then ok "$what"; else
        not_ok "$what"
        sed 's/^/# /' /tmp/check.out
    fi
}

# One that has to fail.
refuse() {
    what=$1
    shift
    if "$@" >/tmp/check.out 2>&1; then not_ok "$what"; else ok "$what"; fi
}

# says WHAT PATTERN COMMAND...: it fails, and says so.
says() {
    what=$1
    pattern=$2
    shift 2
    if "$@" >/tmp/said 2>&1; then not_ok "$what"
    elif grep -q "$pattern" /tmp/said; then ok "$what"
    else not_ok "$what: $(cat /tmp/said)"; fi
}

is() {
    if [ "$2" = "$3" ]; then ok "$1"; else not_ok "$1: '$2' is not '$3'"; fi
}

# The kernel must not have complained since it was looked at last.
quiet() {
    dmesg >/tmp/log
    tail -n +$((log_seen + 1)) /tmp/log >/tmp/log.new
    log_seen=$(wc -l </tmp/log)
    if grep -E -A 12 'WARNING:|BUG:|Oops|Call Trace|blocked for more|general protection|soft lockup|refcount|leaked' \
        /tmp/log.new | grep -v -E 'Speculative|RETBleed|Spectre' >/tmp/log.bad; then
        not_ok "nothing in the kernel's log: $*"
        sed 's/^/# /' /tmp/log.bad
    else
        ok "nothing in the kernel's log: $*"
    fi
}

done_testing() {
    cd /
    echo "1..$tests"
    [ $failed = 0 ]
    exit
}

sectors() { blockdev --getsz "$1"; }

# track NAME DEVICE [ARGS...]: a tracked device over a whole device.
track() {
    name=$1
    device=$2
    shift 2
    dmsetup create "$name" --table "0 $(sectors "$device") track $device 0 ${*:-8}"
}

message() {
    name=$1
    shift
    dmsetup message "$name" 0 "$@"
}

# A field of the status line, counted from the block's sectors.
field() { dmsetup status "$1" | cut -d' ' -f$(($2 + 3)); }

# sync_up NAME REPLICA: what a sync does. Prints what `blocks judge` says.
sync_up() {
    epoch=$(message "$1" checkpoint) || return 1
    blocks judge "/dev/mapper/$1" "$2" "/proc/track/$1.frozen" || return 1
    message "$1" release "$epoch"
}

# number KEY: of what `blocks judge` said.
number() { echo "$verdict" | sed -n "s/^reported.*/ &/; s/.* $1 \([0-9]*\).*/\1/p"; }

# truth NAME REPLICA WHAT [loose]: every difference is reported; at most 5 % of the set is no difference, unless loose.
truth() {
    sync
    verdict=$(sync_up "$1" "$2")
    say "$3: $verdict"
    if [ -z "$(number missed)" ] || [ "$(number missed)" != 0 ]; then
        not_ok "$3: every difference is reported"
        return
    fi
    ok "$3: every difference is reported"
    [ "${4:-}" = loose ] && return
    if [ $(($(number surplus) * 20)) -le "$(number reported)" ]; then
        ok "$3: hardly more than the differences"
    else
        not_ok "$3: hardly more than the differences"
    fi
}

# make FILESYSTEM DEVICE
make() {
    case $1 in
    ext4) mkfs.ext4 -q -F -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 $2 ;;
    xfs) mkfs.xfs -q -f -K $2 ;;
    btrfs) mkfs.btrfs -q -f -K $2 >/dev/null ;;
    esac || not_ok "mkfs.$1"
}

# fill FILESYSTEM DEVICE OPTIONS COMMAND...: the command is run while it is mounted and half full.
fill() {
    kind=$1
    options=$3
    mkdir -p /tmp/m
    mount -o $options $2 /tmp/m || not_ok "mounting $kind"
    shift 3
    for n in 1 2 3 4 5 6; do
        dd if=/dev/urandom of=/tmp/m/f$n bs=64k count=$((n * 16)) 2>/dev/null
    done
    for n in $(seq 200); do echo $n >/tmp/m/s$n; done
    "$@"
    rm -f /tmp/m/f3 /tmp/m/f5
    dd if=/dev/urandom of=/tmp/m/f1 bs=4k count=40 seek=3 conv=notrunc 2>/dev/null
    [ $options != discard ] || fstrim /tmp/m || not_ok "trimming $kind"
    umount /tmp/m
}

# two_partitions DEVICE: in an MBR, 2048 + 40960 sectors, and 43008 + 500000.
two_partitions() {
    printf '\0\0\0\0\203\0\0\0\0\010\0\0\0\240\0\0\0\0\0\0\203\0\0\0\0\250\0\0\040\241\007\0' |
        dd of=$1 bs=1 seek=446 conv=notrunc 2>/dev/null
    printf '\125\252' | dd of=$1 bs=1 seek=510 conv=notrunc 2>/dev/null
}

# synced WHAT DISK REPLICA [ARGS...]: leaves the summary in $summary.
synced() {
    what=$1
    shift
    if dsync sync --json "$@" >/tmp/sync.out 2>/tmp/sync.err; then ok "$what"; else
        not_ok "$what"
        sed 's/^/# /' /tmp/sync.out /tmp/sync.err
    fi
    summary=$(tail -n 1 /tmp/sync.out)
    say "$what: $summary"
}

# value KEY: of that summary.
value() { echo "$summary" | sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p"; }
