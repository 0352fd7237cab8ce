# Tables that come and go, arguments and messages that make no sense, and all of it under load.
. /tmp/files/lib.sh
insmod /tmp/files/dm-track.ko || exit
half=$(($(sectors /dev/vda) / 2))
table() { echo "0 ${2:-$(sectors /dev/vda)} track /dev/vda ${3:-0} $1"; }
bad() {
    what=$1
    shift
    refuse "refused: $what" dmsetup create x --table "$*"
}
bad "no arguments" "0 800 track"
bad "no such device" "0 800 track /dev/none 0 8"
bad "an offset that is no number" "0 800 track /dev/vda x 8"
for blocks in 0 4 12 4096 x; do bad "blocks of $blocks sectors" "$(table $blocks 800)"; done
bad "options without their number" "$(table 8 800) meta /dev/vdb"
bad "an unknown option" "$(table 8 800) 2 color blue"
bad "half an option" "$(table 8 800) 1 meta"
bad "data and metadata on one device" "$(table 8 800) 2 meta /dev/vda"
bad "regions without a metadata device" "$(table 8 800) 2 region_sectors 2048"
for region in 1000 256 1; do bad "regions of $region sectors" "$(table 8 800) 4 meta /dev/vdb region_sectors $region"; done
bad "two in one table" "0 800 track /dev/vda 0 8
800 800 track /dev/vda 800 8"
dmsetup create big --table "0 $((1 << 37)) zero"
bad "a bitmap above the limit" "0 $((1 << 37)) track /dev/mapper/big 0 8"
check "larger blocks make it small" dmsetup create x --table "0 $((1 << 37)) track /dev/mapper/big 0 2048"
dmsetup remove x
dmsetup remove big
dmsetup create x --notable
check "a table that is never used" dmsetup load x --table "$(table 8)"
dmsetup clear x
dmsetup remove x
refuse "a name that /proc can't hold" dmsetup create a.frozen --table "$(table 8)"
quiet "arguments"

dmsetup create t --table "$(table 8 $half)"
t=/dev/mapper/t
is "the table line" "$(dmsetup table t | cut -d' ' -f3,5-)" "track 0 8"
is "status: block sectors and blocks" "$(dmsetup status t | cut -d' ' -f4,5)" "8 $((half / 8))"
refuse "release of what was never frozen" message t release 1
refuse "abort of nothing" message t abort
refuse "the frozen record of nothing" cat /proc/track/t.frozen
for words in "" "checkpoint now" "release" "release x" "release 1 x" "mark" "mark 1" "mark 0 0" "mark $((half / 8)) 1" \
    "mark 1 18446744073709551615" "mark -1 1" "unknown" "untrack"; do
    refuse "message '$words'" message t $words
done
is "the first checkpoint" "$(message t checkpoint)" 1
is "asked again it is the same" "$(message t checkpoint)" 1
refuse "release of another" message t release 2
check "release" message t release 1
refuse "release twice" message t release 1
check "mark" message t mark 5 3
is "what was marked" "$(echo $(cat /proc/track/t))" "5 6 7"
is "the next checkpoint" "$(message t checkpoint)" 2
message t mark 100 1
is "/proc shows what is not released" "$(echo $(cat /proc/track/t))" "5 6 7 100"
is "status: dirty, frozen, epoch" "$(dmsetup status t | cut -d' ' -f6-8)" "1 2 3"
check "abort" message t abort
is "after it all is active" "$(dmsetup status t | cut -d' ' -f6-8)" "4 - 3"
exec 3<>/proc/track/t
echo >&3
exec 3>&-
is "writing clears" "$(cat /proc/track/t)" ""
is "and the epoch jumps" "$(field t 5)" 4
check "mark_all" message t mark_all
is "all are dirty" "$(wc -l </proc/track/t)" $((half / 8))
is "and counted" "$(field t 3)" $((half / 8))
check "removed while a record is frozen" sh -c "dmsetup message t 0 checkpoint && dmsetup remove t"
quiet "messages"

# Growing, with a record frozen meanwhile.
dmsetup create t --table "$(table 8 $((half - 4)))"
sync_up t /dev/vdb >/dev/null
message t mark 1 1
epoch=$(message t checkpoint)
message t mark 3 1
refuse "a smaller table" dmsetup load t --table "$(table 8 $((half - 800)))"
refuse "another block size" dmsetup load t --table "$(table 16 $half)"
refuse "a metadata device for a record without" dmsetup load t --table "$(table 8 $half) 2 meta /dev/vdb"
check "a larger table" dmsetup load t --table "$(table 8 $((half + 64)))"
check "resumed" dmsetup resume t
message t release $epoch
is "the tail is marked, the short block too" "$(echo $(cat /proc/track/t))" \
    "3 $(echo $(seq $((half / 8 - 1)) $((half / 8 + 7))))"
dmsetup remove t
quiet "growing"

# Under load.
track t /dev/vda
sync_up t /dev/vdb >/dev/null
blocks load $t $SEED 4 $SECONDS_OF_LOAD &
reloads=0
while kill -0 $! 2>/dev/null; do
    dmsetup load t --table "$(table 8)" && dmsetup resume t || { not_ok "a reload under load"; break; }
    dmsetup suspend t && message t checkpoint >/dev/null && dmsetup resume t || not_ok "a checkpoint while suspended"
    reloads=$((reloads + 1))
    case $((reloads % 3)) in
    0) sync_up t /dev/vdb >/dev/null ;;
    1) message t abort ;;
    esac
done
wait
say "$reloads reloads under load"
sync_up t /dev/vdb >/dev/null
sync_up t /dev/vdb >/dev/null
check "nothing is lost over reloads" cmp $t /dev/vdb
refuse "the module can't be unloaded while in use" rmmod dm-track
quiet "reloads under load"

exec 4<$t
refuse "removed while open" dmsetup remove t
exec 4<&-
for round in 1 2 3; do
    (blocks load $t $round 4 20 2>/dev/null || :) &
    message t mark_all
    (while cat /proc/track/t /proc/track/t.frozen >/dev/null 2>&1; do :; done) &
    exec 5</proc/track/t
    read -r line <&5
    busybox usleep 700000
    message t checkpoint >/dev/null
    check "removed under load, while /proc is read" sh -c "dmsetup remove -f t
        for i in 1 2 3 4 5 6 7 8 9 10; do dmsetup info t >/dev/null 2>&1 || exit 0; dmsetup remove t && exit 0; sleep 1; done; exit 1"
    cat <&5 >/dev/null 2>&1
    exec 5<&-
    wait
    track t /dev/vda
done
quiet "removal under load"
dmsetup remove t
check "the module can be unloaded" rmmod dm-track
quiet "its end"
done_testing
