# dm-track as dsync sets it up and uses it. /dev/vda is tracked, /dev/vdb was its copy, /dev/vdc is for metadata.
. /tmp/files/lib.sh
t=/dev/mapper/t
export DSYNC_STATE_DIR=/tmp/state
first=11111111-1111-4111-8111-111111111111
second=22222222-2222-4222-8222-222222222222
add() { dsync track add --with dm --name t "$@"; }
put() { dd if=/dev/urandom of=$t bs=4k seek=$1 count=$2 conv=notrunc oflag=direct 2>/dev/null; }

says "without the module" "bpf" add /dev/vda
insmod /tmp/files/dm-track.ko idle_ms=200 || exit
says "a device that does not exist" "/dev/none" add /dev/none
says "a file" "serve" add /tmp/script
mkdir -p /tmp/m
mkfs.ext4 -q -F /dev/vdc
mount /dev/vdc /tmp/m
says "a mounted device" "mounted" add /dev/vdc
says "metadata on a mounted device" "mounted" add --meta /dev/vdc /dev/vda
umount /tmp/m
says "metadata on a file system" "dmesg" add --meta /dev/vdc /dev/vda

check "added" add /dev/vda
check "status knows it" sh -c "dsync status $t | grep -q 'is tracked by dm'"
says "added twice" "held by" add /dev/vda
says "a name twice" "busy\|exists" add /dev/vdb
put 100 5
is "a new one does not know what was before" "$(blocks follow $t /dev/vdb $first)" \
    "dm it was not tracked before - 5"
put 200 3
is "after a release it does" "$(blocks follow $t /dev/vdb $second die)" "dm tracked $first 3"
put 300 2
is "what was not released comes again, and what came since" "$(blocks follow $t /dev/vdb $second)" \
    "dm tracked $first 5"
check "the copy is the disk" cmp $t /dev/vdb
echo >/proc/track/t
is "a clear takes the name away" "$(blocks follow $t /dev/vdb $second)" "dm tracked - 0"
check "removed" dsync track remove $t
check "and gone" test ! -e $t
quiet "without metadata"

dd if=/dev/zero of=/dev/vdc bs=64k count=2 conv=notrunc 2>/dev/null
check "added with metadata" add --meta /dev/vdc /dev/vda
blocks follow $t /dev/vdb $first >/dev/null
put 400 4
blocks follow $t /dev/vdb $second die >/dev/null
put 500 4
dsync track remove $t
check "and again" add --meta /dev/vdc /dev/vda
is "record and name are there" "$(blocks follow $t /dev/vdb $second)" "dm tracked $first 8"
dsync track remove $t
check "once more" add --meta /dev/vdc /dev/vda
is "with the next name" "$(blocks follow $t /dev/vdb $first)" "dm tracked $second 0"
check "the copy is the disk" cmp $t /dev/vdb
dsync track remove $t
check "the module can be unloaded" rmmod dm-track
quiet "with metadata"
done_testing
