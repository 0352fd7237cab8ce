# A far link: two namespaces, netem between them with half of the round trip and the loss each way. What lanes of TLS carry,
# beside plain TCP with as many connections and the same congestion control. RATES, LANES, SECONDS_EACH, ROUNDS are given.
. /tmp/files/lib.sh
carry=/tmp/files/carry
cd /tmp || exit
for side in near far; do
    ip netns add $side
    ip -n $side link set lo up
done
ip link add v0 netns near type veth peer name v0 netns far
ip -n near address add 10.9.0.1/24 dev v0
ip -n far address add 10.9.0.2/24 dev v0
ip -n near link set v0 up
ip -n far link set v0 up
near() { ip netns exec near "$@"; }
far() { ip netns exec far "$@"; }
for side in near far; do
    ip netns exec $side sh -c 'echo "4096 131072 67108864" >/proc/sys/net/ipv4/tcp_rmem
        echo "4096 65536 67108864" >/proc/sys/net/ipv4/tcp_wmem'
    cat /proc/sys/net/ipv4/tcp_available_congestion_control >/tmp/congestion
done
say "congestion control: $(cat /tmp/congestion)"
$carry keys /tmp/keys 10.9.0.2 || exit
far $carry sink tcp 10.9.0.2:7001 >/tmp/tcp.log 2>&1 &
far $carry sink tls 10.9.0.2:7002 /tmp/keys >/tmp/tls.log 2>&1 &
sleep 2
for rate in $RATES; do
    for side in near far; do
        tc -n $side qdisc replace dev v0 root netem delay 75ms loss 0.1% rate "${rate}mbit" limit 30000 || exit
    done
    for lanes in $LANES; do
        for round in $(seq "$ROUNDS"); do
            plain=$(near $carry source tcp 10.9.0.2:7001 "$lanes" "$SECONDS_EACH" bbr) || echo "# tcp: $plain"
            tls=$(near $carry source tls 10.9.0.2:7002 "$lanes" "$SECONDS_EACH" /tmp/keys) || cat /tmp/tls.log
            echo "# far $rate $lanes $plain $tls"
        done
    done
done
# A peer that vanishes: the link goes down in the middle.
near $carry source tls 10.9.0.2:7002 2 300 /tmp/keys >/tmp/vanish.log 2>&1 &
pid=$!
sleep 3
ip -n far link set v0 down
begin=$(date +%s)
wait $pid
took=$(($(date +%s) - begin))
say "a peer that vanished was noticed after $took s: $(cat /tmp/vanish.log)"
[ "$took" -le 45 ] && ok "a peer that vanished was noticed" || not_ok "a peer that vanished was noticed"
quiet "a far link"
done_testing
