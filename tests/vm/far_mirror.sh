# A mirror over a far link, over TLS: how far it lags behind a steady load, and what it costs when the link was gone.
#   RATE     of the link, in Mbit/s
#   STEADY   seconds of steady load
#   AWAY     seconds without the link, under load
. /tmp/files/lib.sh
. /tmp/files/namespaces.sh
PER_SECOND=300
# at SIDE ARGS...: dsync on one of the sides.
at() {
    side=$1
    shift
    (
        export DSYNC_STATE_DIR=/tmp/$side/state
        exec ip netns exec "$side" dsync "$@"
    )
}
# The same to stay: it takes the place of the shell.
begin() {
    export DSYNC_STATE_DIR=/tmp/$1/state
    side=$1
    shift
    exec ip netns exec "$side" dsync "$@"
}
# write FIRST COUNT: blocks that nobody wrote before, at a steady pace.
write() { near blocks pace /tmp/near/sock vm "$1" "$2" $PER_SECOND; }
arrived() {
    for i in $(seq 600); do
        cmp -s /tmp/near/vm.raw /tmp/far/replicas/vm.raw && return
        busybox usleep 200000
    done
    false
}

far_link "$RATE"
mkdir -p /tmp/near /tmp/far/replicas
truncate -s 512M /tmp/near/vm.raw
at near key trust 10.9.0.2 $(at far key | head -n 1 | cut -d' ' -f1,2) --for push,serve
at far key trust near $(at near key | head -n 1 | cut -d' ' -f1,2) --for push,serve
begin far receive --listen 10.9.0.2 --into /tmp/far/replicas >/tmp/far/log 2>&1 &
receiving=$!
begin near serve /tmp/near/vm.raw --socket /tmp/near/sock >/tmp/near/log 2>&1 &
serving=$!
sleep 3
begin near mirror /tmp/near/vm.raw tls://10.9.0.2/vm.raw --json -v --rpo 20s >/tmp/mirror.out 2>/tmp/mirror.err &
mirroring=$!
write 0 1
check "the mirror runs" arrived

began=$(wc -l </tmp/mirror.out)
steady=$((STEADY * PER_SECOND))
check "a steady load" write 1 $steady
tail -n +$((began + 1)) /tmp/mirror.out | sed -n 's/^{.*"batch":.*/# batch &/p'
check "what it wrote arrives" arrived

gone=$((AWAY * PER_SECOND))
ip -n far link set v0 down
check "a load while the link is gone" write $((1 + steady)) $gone
cmp -s /tmp/near/vm.raw /tmp/far/replicas/vm.raw && not_ok "the link was gone" || ok "the link was gone"
ip -n far link set v0 up
up=$(date +%s)
check "the mirror catches up" arrived
say "caught up after $(($(date +%s) - up)) s"
kill -TERM $mirroring
wait $mirroring && ok "the mirror ends in order" || not_ok "the mirror ends in order"
check "both are equal" cmp /tmp/near/vm.raw /tmp/far/replicas/vm.raw
say "dirtied $((1 + steady + gone))"
sed 's/^/# said: /' /tmp/mirror.err
tail -n 1 /tmp/mirror.out | sed 's/^/# summary /'
kill $receiving $serving
wait
quiet "a mirror over a far link"
done_testing
