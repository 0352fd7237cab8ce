# What a user does, with either tracker: /dev/vda is followed, /dev/vdb holds state and replicas.
#   LIVES   syncs under load
. /tmp/files/lib.sh
export DSYNC_STATE_DIR=/tmp/r/state
mkdir -p /tmp/r /tmp/m /tmp/look
mkfs.ext4 -q -F /dev/vdb
mount /dev/vdb /tmp/r
mount -t bpf bpf /sys/fs/bpf
insmod /tmp/files/dm-track.ko idle_ms=200 || exit
ln -s /tmp/files/dsync /tmp/files/dmextract
ln -s /tmp/files/dsync /tmp/files/dmmerge
copy=/tmp/r/copy.raw

# look REPLICA WHAT: it is a file system without a fault. It is looked at in a copy: mounting writes.
look() {
    cp --sparse=always $1 /tmp/r/look.raw
    check "$2: the replica's journal is good" e2fsck -fp /tmp/r/look.raw
    check "$2: no fault is in it" e2fsck -fn /tmp/r/look.raw
    mount -o loop /tmp/r/look.raw /tmp/look || not_ok "$2: the replica mounts"
}
whole() { look $copy "$1"; }

# waits COMMAND...: for a minute at most, until it succeeds.
waits() {
    for i in $(seq 300); do
        "$@" && return
        busybox usleep 200000
    done
    false
}
# A write waits for the thaw, and can't be killed meanwhile.
write() {
    rm -f /tmp/written
    (echo . >/tmp/m/probe; : >/tmp/written) &
}
writes() { write; waits test -e /tmp/written; }
stuck() { write; busybox usleep 1500000; [ ! -e /tmp/written ]; }
# comes_to_freeze PID: while the process lives, a write gets stuck.
comes_to_freeze() {
    while kill -0 $1; do
        stuck && return
    done
    cat /tmp/sync.out
    false
}

user() {
    kind=$1
    # Without what ext4 writes by itself later on.
    make ext4 $disk
    mount $disk /tmp/m
    dd if=/dev/urandom of=/tmp/m/first bs=64k count=60 2>/dev/null
    synced "$kind: a first sync" $disk $copy
    is "$kind: it copies" "$(value method)" copy
    dd if=/dev/urandom of=/tmp/m/second bs=4k count=20 2>/dev/null
    synced "$kind: a second one" $disk $copy
    is "$kind: it knows what changed" "$(value method)" tracked
    [ "$(value blocks_changed)" -lt 400 ] && ok "$kind: and moves no more" ||
        not_ok "$kind: and moves no more: $(value blocks_changed) blocks"
    [ -n "$(value freeze_ms)" ] && ok "$kind: it says how long it froze" || not_ok "$kind: it says how long it froze"
    check "$kind: status tells who follows" sh -c "dsync status $disk | grep -q 'is tracked by $kind'"
    whole "$kind"
    check "$kind: with the same files" diff -r /tmp/m /tmp/look
    umount /tmp/look

    check "$kind: state on what is to be frozen" dsync --state-dir /tmp/m/state sync $disk /tmp/r/other.raw
    rm -rf /tmp/m/state /tmp/r/other.raw /tmp/r/.other.raw.dsync
    synced "$kind: with the first state again" $disk $copy

    # The paper's way.
    dd if=/dev/urandom of=/tmp/m/third bs=4k count=20 2>/dev/null
    check "$kind: dmextract and dmmerge" sh -c "dmextract $name 2>/tmp/extract.err >/tmp/r/delta && dmmerge $copy </tmp/r/delta"
    say "$kind: the delta has $(stat -c %s /tmp/r/delta) bytes; $(cat /tmp/extract.err)"
    whole "$kind, merged"
    check "$kind: the merged replica has the same files" diff -r /tmp/m /tmp/look
    umount /tmp/look

    # Under load every replica is one moment.
    python3 /tmp/files/chain.py write /tmp/m/chain.db /tmp/stop &
    waits test -s /tmp/m/chain.db
    last=0
    for round in $(seq $LIVES); do
        synced "$kind: under load" $disk $copy --freeze require --freeze-limit 30
        is "$kind: known" "$(value method)" tracked
        whole "$kind, under load"
        rows=$(python3 /tmp/files/chain.py check /tmp/look/chain.db) || not_ok "$kind: the database is whole"
        umount /tmp/look
        [ "${rows:-0}" -ge $last ] && ok "$kind: the database goes on, $rows rows" || not_ok "$kind: $rows rows after $last"
        last=${rows:-0}
    done
    touch /tmp/stop
    wait
    rm /tmp/stop
    quiet "$kind: syncs"
}

# two_states: another state directory follows the same disk. Neither takes from the other's record what it has not seen itself.
two_states() {
    kind=$1
    ours=$DSYNC_STATE_DIR theirs=/tmp/r/theirs
    DSYNC_STATE_DIR=$theirs
    synced "$kind: with another state directory" $disk $theirs.raw
    is "$kind: it copies" "$(value method)" copy
    DSYNC_STATE_DIR=$ours
    dd if=/dev/urandom of=/tmp/m/both bs=64k count=128 2>/dev/null
    dsync sync $disk $copy --bwlimit 1M >/tmp/ours.out 2>&1 &
    DSYNC_STATE_DIR=$theirs dsync sync $disk $theirs.raw >/tmp/theirs.out 2>&1
    wait
    check "$kind: at the same time one is refused" grep -q "in use (dsync" /tmp/ours.out /tmp/theirs.out
    dd if=/dev/urandom of=/tmp/m/both bs=4k count=20 conv=notrunc 2>/dev/null
    DSYNC_STATE_DIR=$theirs
    synced "$kind: the other one" $disk $theirs.raw
    DSYNC_STATE_DIR=$ours
    synced "$kind: and the first" $disk $copy
    is "$kind: it does not believe the other's record" "$(value method)" compare
    for replica in $copy $theirs.raw; do
        look $replica "$kind: two state directories"
        check "$kind: with the same files" diff -r /tmp/m /tmp/look
        umount /tmp/look
    done
    rm -rf $theirs $theirs.raw /tmp/r/.theirs.raw.dsync
    synced "$kind: alone again" $disk $copy
    is "$kind: it knows what changed" "$(value method)" tracked
    quiet "$kind: two state directories"
}

# frozen_to_death: reads that take four seconds hold the freeze, long enough to be found by one of the probes. Whoever freezes
# is killed, or takes too long.
frozen_to_death() {
    kind=$1
    dd if=/dev/urandom of=/tmp/m/fourth bs=4k count=5 2>/dev/null
    slow 4000
    dsync sync $disk $copy --freeze-limit 60 >/tmp/sync.out 2>&1 &
    pid=$!
    check "$kind: it comes to a freeze" comes_to_freeze $pid
    kill -9 $pid
    wait $pid
    check "$kind: killed, it leaves nothing frozen" writes
    dsync sync $disk $copy --freeze-limit 1 >/tmp/sync.out 2>&1 && not_ok "$kind: a freeze that is too long" ||
        check "$kind: a freeze that is too long ends, and proves nothing" grep -q "longer than its limit" /tmp/sync.out
    check "$kind: and leaves nothing frozen" writes
    slow 0
    synced "$kind: the next one goes on" $disk $copy
    is "$kind: from what was known" "$(value method)" tracked
    whole "$kind, after kills"
    check "$kind: and has the same files" diff -r /tmp/m /tmp/look
    umount /tmp/look /tmp/m
    check "$kind: removed" dsync track remove $disk
    rm -rf $copy /tmp/r/.copy.raw.dsync $DSYNC_STATE_DIR
    quiet "$kind: kills"
}

# slow MS: how long a read of the device below takes.
table() { echo "0 $(sectors /dev/vda) delay /dev/vda 0 $1 /dev/vda 0 0"; }
slow() {
    dmsetup load slow --table "$(table $1)" && dmsetup resume slow
}
dmsetup create slow --table "$(table 0)"

add="dsync track add"
says "a device that does not exist" "/dev/none" $add /dev/none
says "a file of a network file system" "dsync serve" $add /etc/hostname
says "an ordinary user" "sudo.*--method compare" env DSYNC_STATE_DIR=/tmp/of-nobody setpriv --reuid 65534 --clear-groups $add /dev/vda
mount -t tmpfs none /sys/kernel/btf
says "a kernel without BTF" "dsync serve.*--method compare" $add /dev/vda
umount /sys/kernel/btf
umount /sys/fs/bpf
mount -t tmpfs none /sys/fs
says "no BPF file system" "mount -t bpf" $add /dev/vda
umount /sys/fs
rmmod dm-track
says "without the module" "bpf" $add --with dm --name t /dev/vda
insmod /tmp/files/dm-track.ko idle_ms=200

check "dm: added" dsync track add --with dm --name t /dev/mapper/slow
disk=/dev/mapper/t name=t
user dm
two_states dm
frozen_to_death dm
check "bpf: added" dsync track add /dev/mapper/slow
disk=/dev/mapper/slow name=$disk
user bpf
two_states bpf
frozen_to_death bpf
# smaller: a disk that is made smaller and as large again, with nothing read or written between, is not what it was.
smaller() {
    kind=$1
    check "$kind: added again" dsync track add $disk
    synced "$kind: and synced" $disk $copy
    synced "$kind: at rest" $disk $copy
    is "$kind: it knows what changed" "$(value method)" tracked
    sectors=$(sectors /dev/vda)
    for size in $((sectors / 2)) $sectors; do
        dmsetup suspend --noflush --nolockfs slow
        dmsetup load slow --table "0 $size delay /dev/vda 0 0 /dev/vda 0 0"
        dmsetup resume slow
    done
    check "$kind: that it was smaller is known" sh -c "dsync status $disk | grep 'made smaller'"
    synced "$kind: it is compared" $disk $copy
    is "$kind: all of it" "$(value method)" compare
    check "$kind: removed again" dsync track remove $disk
}
smaller bpf
dmsetup remove slow
check "the module can be unloaded" rmmod dm-track
umount /tmp/r
done_testing
