# The write-intent log over clean lives and over a metadata device that fails. /dev/vda is tracked, /dev/vdb was its
# copy, /dev/vdc holds the metadata; the host makes it fail when asked.
. /tmp/files/lib.sh
insmod /tmp/files/dm-track.ko idle_ms=500 || exit
half=$(($(sectors /dev/vda) / 2))
t=/dev/mapper/t
args="8 4 meta /dev/vdc region_sectors 2048"
create() { dmsetup create t --table "0 ${1:-$half} track /dev/vda 0 $args"; }
# await FIELD VALUE: within ten seconds.
await() {
    for i in $(seq 50); do
        [ "$(field t $1)" = "$2" ] && return
        busybox usleep 200000
    done
    false
}
idle() { await 11 0; }
# Blocks, in a region each: 256 blocks are a region.
put() { dd if=/dev/urandom of=$t bs=4k seek=$1 count=${2:-1} conv=notrunc oflag=direct 2>/dev/null; }

echo "somebody's data" | dd of=/dev/vdc conv=notrunc,sync 2>/dev/null
refuse "a metadata device with something on it" create
dd if=/dev/zero of=/dev/vdc bs=64k count=2 conv=notrunc 2>/dev/null
check "a blank one" create
is "a new record is lost" "$(field t 7)" lost
sync_up t /dev/vdb >/dev/null
put 1000
is "a write makes its region active" "$(field t 11)" 1
check "left alone it idles" idle
put 3000
put 3001
epoch=$(message t checkpoint)
put 5000 2
before=$(dmsetup status t | cut -d' ' -f4-9)
cp /proc/track/t.frozen /tmp/frozen
dmsetup remove t
for args in "16 4 meta /dev/vdc region_sectors 2048" "8 2 meta /dev/vdc"; do refuse "other units: $args" create; done
args="8 4 meta /dev/vdc region_sectors 2048"
refuse "a smaller device" create $((half - 8))
check "made again" create
is "it is the same record" "$(dmsetup status t | cut -d' ' -f4-9)" "$before"
check "with the same frozen epoch" cmp /tmp/frozen /proc/track/t.frozen
is "asked again, the same epoch" "$(message t checkpoint)" "$epoch"
check "abort" message t abort
is "both epochs' blocks" "$(echo $(cat /proc/track/t))" "1000 3000 3001 5000 5001"
dmsetup remove t
create
is "and after one more life" "$(echo $(cat /proc/track/t))" "1000 3000 3001 5000 5001"
is "without a frozen epoch" "$(field t 4)" -
truth t /dev/vdb "over lives"
is "nothing but that" "$(number reported)" 5
dmsetup remove t
create
is "unnamed releases leave no name" "$(field t 9)" -
is "what was released stays away" "$(cat /proc/track/t)" ""

message t mark 70 2
dmsetup load t --table "0 $((half * 2)) track /dev/vda 0 $args" && dmsetup resume t
is "growing marks the tail" "$(wc -l </proc/track/t)" $((half / 8 + 2))
dmsetup remove t
create $((half * 2))
is "durably" "$(wc -l </proc/track/t)" $((half / 8 + 2))
sync_up t /dev/vdb >/dev/null
dmsetup remove t
refuse "a smaller device than the record" create
half=$((half * 2))
create
truth t /dev/vdb "grown"
quiet "clean lives"

# Metadata that can't be written. Region 0 is active, and stays so: it is written to all the time.
(while [ ! -e /tmp/stop ]; do put 1; done) &
busybox usleep 300000
mark fail
read -r word
(put 9000; touch /tmp/passed) &
busybox usleep 1500000
[ -e /tmp/passed ] && not_ok "a write to an idle region waits" || ok "a write to an idle region waits"
is "and status says so" "$(field t 10)" waiting
check "a write to an active region passes" put 2
message t mark 12000 1 2>/dev/null && not_ok "a mark that would not last is an error" || ok "a mark that would not last is an error"
mark heal
read -r word
busybox usleep 2000000
check "it passes once the metadata can be written" test -e /tmp/passed
check "the log is back" await 10 ok
touch /tmp/stop
wait
check "and its regions idle" idle
truth t /dev/vdb "after the failure" loose
is "nothing but what was written" "$(number reported)" 4

mark fail
read -r word
rm /tmp/passed
(put 9000; touch /tmp/passed) &
busybox usleep 1000000
is "waiting again" "$(field t 10)" waiting
check "it is declared untracked" message t untrack
busybox usleep 500000
check "then the write passes" test -e /tmp/passed
wait
is "and status says so" "$(field t 10)" untracked
truth t /dev/vdb "untracked, while it lasts"
check "removed with metadata that fails" dmsetup remove t
mark heal
read -r word

# Damage.
dd if=/dev/zero of=/dev/vdc bs=64k count=2 conv=notrunc 2>/dev/null
create
sync_up t /dev/vdb >/dev/null
put 1000
idle
epoch=$(field t 5)
dmsetup remove t
# A region's bits: after 8 KiB and a unit of intents come 4032 regions of even epochs, then of odd ones, a unit each.
at=$((8192 + 512 + (epoch % 2) * 4032 * 512 + 3 * 512))
printf '\377' | dd of=/dev/vdc bs=1 seek=$((at + 20)) conv=notrunc 2>/dev/null
create
is "a region whose bits are damaged is dirty" "$(wc -l </proc/track/t)" 256
dmsetup remove t
printf '\377' | dd of=/dev/vdc bs=1 seek=$((8192 + 100)) conv=notrunc 2>/dev/null
create
is "damaged intents make their group dirty" "$(wc -l </proc/track/t)" $((half / 8))
check "they idle" idle
dmsetup remove t
for at in 0 4096; do printf '\377' | dd of=/dev/vdc bs=1 seek=$((at + 40)) conv=notrunc 2>/dev/null; done
refuse "without a superblock it is somebody else's" create
dmesg | grep 'device-mapper: track' | tail -n 5 | sed 's/^/# /'
check "the module can be unloaded" rmmod dm-track
quiet "metadata"
done_testing
