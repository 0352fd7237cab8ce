# Writes that take 400 ms, and syncs that never wait for them by themselves: none may be lost. The same with a module
# that does not drain: there it must show.
. /tmp/files/lib.sh
# race MODULE: leaves what was lost in $lost.
race() {
    insmod /tmp/files/$1.ko || exit
    dmsetup create slow --table "0 $(sectors /dev/vda) delay /dev/vda 0 0 /dev/vda 0 400"
    track t /dev/mapper/slow
    sync_up t /dev/vdb >/dev/null
    blocks load /dev/mapper/t $SEED 24 $SECONDS_OF_LOAD &
    rounds=0
    while kill -0 $! 2>/dev/null; do
        sync_up t /dev/vdb >/tmp/out || { not_ok "a sync under load"; break; }
        rounds=$((rounds + 1))
    done
    wait
    sync_up t /dev/vdb
    [ $rounds -ge 3 ] && ok "$rounds syncs under load" || not_ok "$rounds syncs under load"
    lost=$(cmp /dev/mapper/t /dev/vdb 2>&1)
    dmsetup remove t
    dmsetup remove slow
    check "the module can be unloaded" rmmod dm-track
    quiet "$1: writes in flight at a checkpoint"
}
# How often the two meet is up to chance.
for attempt in 1 2 3 4 5; do
    race dm-track-nodrain
    case $lost in *differ*) break ;; esac
done
case $lost in *differ*) ok "without the drain updates are lost" ;; *) not_ok "without the drain updates are lost" ;; esac
dd if=/dev/vda of=/dev/vdb bs=1M iflag=direct oflag=direct 2>/dev/null
race dm-track
is "with it none is" "$lost" ""
done_testing
