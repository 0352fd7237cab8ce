# The bpf tracker on this kernel. /dev/vda is tracked, /dev/vdb was its copy.
. /tmp/files/lib.sh
first=11111111-1111-4111-8111-111111111111
mount -t bpf bpf /sys/fs/bpf
mkdir -p /tmp/m

# copied WHAT DEVICE: what its tracker reports goes to the copy, which is the device then.
copied() {
    sync
    said=$(blocks follow "$2" /dev/vdb $first)
    say "$1: $said"
    is "$1: it is sure" "$(echo "$said" | cut -d' ' -f1-2)" "bpf tracked"
    check "$1: the copy is the device" cmp "$2" /dev/vdb
}

check "added" blocks bpf /dev/vda
refuse "added twice" blocks bpf /dev/vda
say "$(blocks follow /dev/vda /dev/vdb $first)"
dd if=/dev/urandom of=/dev/vda bs=12k seek=100 count=50 conv=notrunc oflag=direct 2>/dev/null
dd if=/dev/urandom of=/dev/vda bs=5000 seek=999 count=500 conv=notrunc,fsync 2>/dev/null
blkdiscard -z -o 8k -l 1M /dev/vda
copied "direct, buffered and zeroes" /dev/vda
mkfs.ext4 -q -F /dev/vda
mount /dev/vda /tmp/m
dd if=/dev/urandom of=/tmp/m/a bs=64k count=100 2>/dev/null
cp /tmp/m/a /tmp/m/b
rm /tmp/m/a
umount /tmp/m
copied "ext4" /dev/vda
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
    copied "a mirror's member" /dev/vda
fi
check "removed" blocks unbpf /dev/vda
quiet "a disk"

# A device that takes no requests, whose writes take 400 ms.
dmsetup create slow --table "0 $(sectors /dev/vda) delay /dev/vda 0 0 /dev/vda 0 400"
check "added to a dm device" blocks bpf /dev/mapper/slow
say "$(blocks follow /dev/mapper/slow /dev/vdb $first)"
blocks load /dev/mapper/slow $SEED 24 $SECONDS_OF_LOAD &
rounds=0
while kill -0 $! 2>/dev/null; do
    blocks follow /dev/mapper/slow /dev/vdb $first >/tmp/out || { not_ok "a sync under load"; break; }
    rounds=$((rounds + 1))
done
wait
[ $rounds -ge 3 ] && ok "$rounds syncs under load" || not_ok "$rounds syncs under load"
copied "writes in flight at a checkpoint" /dev/mapper/slow
check "removed from it" blocks unbpf /dev/mapper/slow
dmsetup remove slow
quiet "a dm device"
done_testing
