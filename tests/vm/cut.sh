# One life between two power cuts. How the last one left the record is looked at first; then there is load until the
# host cuts. /dev/vda is tracked, /dev/vdb was its copy, /dev/vdc holds the metadata.
#   LIFE   0 for the first
#   LAST   what the life before did: plain, or sync, which also synced all the time
#   NEXT   what this one does, or end
. /tmp/files/lib.sh
insmod /tmp/files/dm-track.ko idle_ms=60 || exit
export BLOCKS_REGION=256
track t /dev/vda 8 4 meta /dev/vdc region_sectors 2048 || exit
say "$(dmsetup status t)"
if [ $LIFE = 0 ]; then
    is "a new record is lost" "$(field t 7)" lost
    sync_up t /dev/vdb >/dev/null
else
    is "the record survived" "$(field t 7)" tracked
    active=$(dmesg | sed -n 's/.*: \([0-9]*\) regions were active.*/\1/p' | tail -n 1)
    frozen=$(field t 4)
    say "$LAST: ${active:-0} regions were active, frozen: $frozen"
    if [ "$frozen" != - ]; then
        if [ $((LIFE % 2)) = 0 ]; then message t abort; else sync_up t /dev/vdb >/dev/null; fi
    fi
    truth t /dev/vdb "after a cut" loose
    if [ $LAST = plain ]; then
        is "a surplus only where a region was active" "$(number regions)" "$(number whole)"
        [ "$(number whole)" -le "${active:-0}" ] && ok "in no more of them" || not_ok "in no more of them: $verdict"
    fi
    check "the copy is the disk" cmp /dev/mapper/t /dev/vdb
fi
if [ $NEXT != end ]; then
    blocks load /dev/mapper/t $SEED 3 1000 &
    mark load
    while [ $NEXT = sync ]; do sync_up t /dev/vdb >/dev/null; done
    wait
fi
dmsetup remove t
check "the module can be unloaded" rmmod dm-track
quiet "power cuts"
done_testing
