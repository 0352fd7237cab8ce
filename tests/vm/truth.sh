# Whatever writes to a tracked device: every block that differs is reported. /dev/vda is tracked, /dev/vdb was its copy.
#   FILESYSTEMS   made, mounted and filled
#   IO            how much fio writes
#   MORE          if not empty: also file systems that discard, partitions, and a mirror's member
. /tmp/files/lib.sh
insmod /tmp/files/dm-track.ko || exit
track t /dev/vda
t=/dev/mapper/t
is "a new record does not know what was before" "$(field t 7)" lost

truth t /dev/vdb "nothing"
is "nothing was written" "$(number reported)" 0
is "from the first checkpoint on it knows" "$(field t 7)" tracked

dd if=/dev/urandom of=$t bs=4k seek=77 count=3 conv=notrunc oflag=direct 2>/dev/null
is "/proc lists what was written" "$(echo $(cat /proc/track/t))" "77 78 79"
truth t /dev/vdb "three blocks"
is "no more than was written" "$(number reported)" 3
dd if=/dev/urandom of=$t bs=512 seek=8007 count=2 conv=notrunc oflag=direct 2>/dev/null
is "parts of blocks count" "$(echo $(cat /proc/track/t))" "1000 1001"
truth t /dev/vdb "parts of blocks"

fio --name=f --filename=$t --rw=randwrite --bsrange=512-256k --blockalign=512 --direct=1 --size=100% --io_size=$IO \
    --ioengine=libaio --iodepth=16 --randrepeat=0 --randseed=$SEED --refill_buffers --output=/dev/null
truth t /dev/vdb "fio, direct"
fio --name=f --filename=$t --rw=randwrite --bs=4k-64k --size=100% --io_size=$IO --randrepeat=0 --randseed=$SEED \
    --refill_buffers --fsync_on_close=1 --output=/dev/null
truth t /dev/vdb "fio, through the page cache"
quiet "plain writes"

blkdiscard -o 20M -l 9M $t
truth t /dev/vdb "a discard" loose
is "every block of the discard" "$(number reported)" 2304
blkdiscard -z -o 30M -l 5M $t
truth t /dev/vdb "write-zeroes"
is "every block of the write-zeroes" "$(number reported)" 1280
blkdiscard -o 40M -l 10M $t
blkdiscard -z -o 45M -l 10M $t
truth t /dev/vdb "discard and write-zeroes, one over the other" loose
blkdiscard -s -o 57M -l 1M $t 2>/dev/null || say "no secure erase here"
truth t /dev/vdb "secure erase" loose
# What reads as zeroes now would be no difference where zeroes are written next.
for part in 20+9 30+5 40+15 57+1; do
    dd if=/dev/urandom of=$t bs=1M seek=${part%+*} count=${part#*+} conv=notrunc oflag=direct 2>/dev/null
done
truth t /dev/vdb "all written again"
quiet "discards"

for fs in $FILESYSTEMS; do
    make $fs $t
    truth t /dev/vdb "mkfs.$fs"
    fill $fs $t defaults :
    truth t /dev/vdb "$fs, filled"
    quiet "$fs"
done
for fs in ${MORE:+$FILESYSTEMS}; do
    make $fs $t
    fill $fs $t discard truth t /dev/vdb "$fs, mounted" loose
    truth t /dev/vdb "$fs with discards" loose
    quiet "$fs with discards"
done
mkfs.ext4 -q -F -E discard $t
truth t /dev/vdb "mkfs.ext4 that discards the whole device" loose

# Partitions: of the tracked device as a loop device's, the whole and the part written in turns.
if [ -n "$MORE" ]; then
    two_partitions $t
    truth t /dev/vdb "a table of partitions"
    loop=$(losetup -f --show -P --direct-io=on $t)
    [ -b ${loop}p1 ] || not_ok "partitions are seen"
    dd if=/dev/urandom of=${loop}p1 bs=4k seek=100 count=50 oflag=direct 2>/dev/null
    dd if=/dev/urandom of=$loop bs=4k seek=9000 count=50 oflag=direct 2>/dev/null
    dd if=/dev/urandom of=${loop}p2 bs=4k seek=200 count=50 2>/dev/null
    sync
    losetup -d $loop
    truth t /dev/vdb "writes through partitions and the whole"
    is "no more than the partitions' writes" "$(number reported)" 150
    quiet "partitions"

    # A mirror's member.
    truncate -s 64M /tmp/other
    other=$(losetup -f --show /tmp/other)
    mdadm --create /dev/md/m --run --force --assume-clean --level=1 --raid-devices=2 --metadata=1.2 $t $other \
        </dev/null >/tmp/mdadm.out 2>&1 || { not_ok "a mirror"; sed 's/^/# /' /tmp/mdadm.out; }
    md=$(ls /dev/md[0-9]* | head -n 1)
    dd if=/dev/urandom of=$md bs=64k count=200 seek=50 oflag=direct 2>/dev/null
    mkfs.ext4 -q -F -E nodiscard $md
    mdadm --stop $md >/dev/null 2>&1
    losetup -d $other
    truth t /dev/vdb "a mirror's member" loose
    quiet "a mirror"
fi

check "it can be removed" dmsetup remove t
check "the copy is the disk" cmp /dev/vda /dev/vdb
check "the module can be unloaded" rmmod dm-track
quiet "truth"
done_testing
