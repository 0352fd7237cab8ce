# Instructions per write of 4 KiB, one by one, on a null device. The guest's clock counts them: one is a nanosecond.
. /tmp/files/lib.sh
insmod /tmp/files/dm-track.ko || exit
n=/dev/nullb0
cost() {
    blocks time "$@" >/dev/null # warm
    for i in 1 2 3; do blocks time "$@"; done | sort -n | sed -n 2p
}
sleep 20
say "raw $(cost $n 20000 7)"
dmsetup create l --table "0 $(sectors $n) linear $n 0"
linear=$(cost /dev/mapper/l 20000 7)
dmsetup remove l
track t $n
fresh=$(blocks time /dev/mapper/t 20000 7)
marked=$(cost /dev/mapper/t 20000 7)
dmsetup remove t
say "linear $linear"
say "track, first write to a block $fresh (+$((fresh - linear)))"
say "track, block marked before $marked (+$((marked - linear)))"
track t $n 8 4 meta /dev/ram0 region_sectors 512
blocks time /dev/mapper/t 4096 +262144 >/dev/null
say "track, meta, active regions $(cost /dev/mapper/t 20000 7)"
dmsetup remove t
track t $n 8 4 meta /dev/ram0 region_sectors 512
say "track, meta, idle regions $(blocks time /dev/mapper/t 4000 +262144)"
dmsetup remove t
[ $((fresh - linear)) -le 150 ] && ok "at most 150 instructions more than dm-linear" ||
    not_ok "at most 150 instructions more than dm-linear: $((fresh - linear))"
quiet "cost"
done_testing
