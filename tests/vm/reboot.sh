# One life of a machine whose disk is followed over reboots. /dev/vda is followed, /dev/vdb holds state and replica.
#   BETWEEN  what happens before the record is restored: first, mount, write or nothing
#   EXPECT   what restoring says; nothing in the first life
#   METHOD   of the sync that comes next
#   END      save, or anything else: then nothing is saved
. /tmp/files/lib.sh
export DSYNC_STATE_DIR=/tmp/r/state
mkdir -p /tmp/r /tmp/m
mount -t bpf bpf /sys/fs/bpf
if [ $BETWEEN = first ]; then
    for disk in /dev/vda /dev/vdb; do mkfs.ext4 -q -F $disk; done
fi
mount /dev/vdb /tmp/r
case $BETWEEN in
first) check "added" dsync track add /dev/vda ;;
mount) mount /dev/vda /tmp/m && umount /tmp/m ;;
write) dd if=/dev/urandom of=/dev/vda bs=4k seek=9000 count=1 oflag=direct conv=notrunc 2>/dev/null ;;
esac
if [ $BETWEEN != first ]; then
    check "restored" dsync track restore /dev/vda
    grep -q "$EXPECT" /tmp/check.out && ok "$BETWEEN: $EXPECT" || not_ok "$BETWEEN: $EXPECT: $(cat /tmp/check.out)"
fi
synced "$BETWEEN: a sync" /dev/vda /tmp/r/copy.raw
is "$BETWEEN: its method" "$(value method)" $METHOD
[ $METHOD != tracked ] || [ "$(value blocks_changed)" -lt 4000 ] || not_ok "$(value blocks_changed) blocks"
check "$BETWEEN: the replica is the disk" cmp /dev/vda /tmp/r/copy.raw
mount /dev/vda /tmp/m
dd if=/dev/urandom of=/tmp/m/file$$ bs=4k count=20 2>/dev/null
[ $END = save ] && says "not while it is mounted" "in use" dsync track save /dev/vda
umount /tmp/m
[ $END = save ] && check "saved" dsync track save /dev/vda
umount /tmp/r
quiet "$BETWEEN"
done_testing
