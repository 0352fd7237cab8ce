# The bpf tracker on this kernel. /dev/vda is tracked, /dev/vdb was its copy.
. /tmp/files/lib.sh
first=11111111-1111-4111-8111-111111111111
mount -t bpf bpf /sys/fs/bpf

# copied WHAT DEVICE [loose]: what its tracker reports goes to the copy, which is the device then; at most 5 % of it was
# there before, unless loose.
copied() {
    sync
    said=$(blocks follow "$2" /dev/vdb $first 2>/tmp/same)
    same=$(cut -d' ' -f2 /tmp/same)
    say "$1: $said, $same of these as before"
    is "$1: it is sure" "$(echo "$said" | cut -d' ' -f1-2)" "bpf tracked"
    check "$1: the copy is the device" cmp "$2" /dev/vdb
    [ "${3:-}" = loose ] && return
    if [ $((same * 20)) -le "${said##* }" ]; then
        ok "$1: hardly more than the differences"
    else
        not_ok "$1: hardly more than the differences"
    fi
}

# Before Linux 6.3 these take pages past the block layer.
echo 16M >/sys/block/zram0/disksize
for device in /dev/ram0 /dev/zram0; do
    case $(uname -r) in
    6.[0-2].* | [0-5].*) says "$device: writes would go unseen" "rw_page.*--with dm.*--method compare" blocks bpf $device ;;
    *) check "$device: added" blocks bpf $device && check "$device: removed" blocks unbpf $device ;;
    esac
done

check "added" blocks bpf /dev/vda
refuse "added twice" blocks bpf /dev/vda
say "$(blocks follow /dev/vda /dev/vdb $first 2>/dev/null)"
dd if=/dev/urandom of=/dev/vda bs=12k seek=100 count=50 conv=notrunc oflag=direct 2>/dev/null
dd if=/dev/urandom of=/dev/vda bs=5000 seek=999 count=500 conv=notrunc,fsync 2>/dev/null
blkdiscard -z -o 8k -l 1M /dev/vda
copied "direct, buffered and zeroes" /dev/vda
fio --name=f --filename=/dev/vda --rw=randwrite --bsrange=512-256k --blockalign=512 --direct=1 --size=100% --io_size=24m \
    --ioengine=libaio --iodepth=16 --randrepeat=0 --randseed=$SEED --refill_buffers --output=/dev/null
copied "fio" /dev/vda
blkdiscard -f -o 40M -l 9M /dev/vda
copied "a discard" /dev/vda loose
for fs in ext4 xfs btrfs; do
    make $fs /dev/vda
    copied "mkfs.$fs" /dev/vda
    fill $fs /dev/vda defaults :
    copied "$fs" /dev/vda
done
# What reads as zeroes after a discard would be no difference where zeroes are written.
for fs in ext4 xfs btrfs; do
    make $fs /dev/vda
    fill $fs /dev/vda discard :
    copied "$fs with discards" /dev/vda loose
done
two_partitions /dev/vda
copied "a table of partitions" /dev/vda
blockdev --rereadpt /dev/vda
dd if=/dev/urandom of=/dev/vda1 bs=4k seek=100 count=50 oflag=direct 2>/dev/null
dd if=/dev/urandom of=/dev/vda bs=4k seek=9000 count=50 oflag=direct conv=notrunc 2>/dev/null
dd if=/dev/urandom of=/dev/vda2 bs=4k seek=200 count=50 2>/dev/null
sync
copied "partitions and the whole" /dev/vda
is "no more than their writes" "${said##* }" 150
dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=notrunc 2>/dev/null
blockdev --rereadpt /dev/vda
copied "no table" /dev/vda
dmsetup create l --table "0 40000 linear /dev/vda 2048"
dd if=/dev/urandom of=/dev/mapper/l bs=64k count=100 seek=20 oflag=direct conv=notrunc 2>/dev/null
dmsetup remove l
copied "through dm-linear" /dev/vda
if command -v mdadm >/dev/null; then
    mdadm --create /dev/md/m --run --force --assume-clean --level=1 --raid-devices=2 --metadata=1.2 /dev/vda missing \
        </dev/null >/tmp/mdadm.out 2>&1 || { not_ok "a mirror"; sed 's/^/# /' /tmp/mdadm.out; }
    md=$(ls /dev/md[0-9]* | head -n 1)
    dd if=/dev/urandom of=$md bs=64k count=100 seek=50 oflag=direct 2>/dev/null
    mdadm --stop $md >/dev/null 2>&1
    copied "a mirror's member" /dev/vda loose
fi
check "removed" blocks unbpf /dev/vda
quiet "a disk"

# A device that takes no requests, whose writes take 400 ms.
dmsetup create slow --table "0 $(sectors /dev/vda) delay /dev/vda 0 0 /dev/vda 0 400"
check "added to a dm device" blocks bpf /dev/mapper/slow
say "$(blocks follow /dev/mapper/slow /dev/vdb $first 2>/dev/null)"
blocks load /dev/mapper/slow $SEED 24 $SECONDS_OF_LOAD &
rounds=0
while kill -0 $! 2>/dev/null; do
    blocks follow /dev/mapper/slow /dev/vdb $first >/tmp/out 2>&1 || { not_ok "a sync under load"; break; }
    rounds=$((rounds + 1))
done
wait
[ $rounds -ge 3 ] && ok "$rounds syncs under load" || not_ok "$rounds syncs under load"
copied "writes in flight at a checkpoint" /dev/mapper/slow loose
check "removed from it" blocks unbpf /dev/mapper/slow
dmsetup remove slow
quiet "a dm device"
done_testing
