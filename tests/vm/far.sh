# A far link. What TLS carries, beside plain TCP with as many connections and the same congestion control.
#   RATES          of the link, in Mbit/s
#   CONNECTIONS    how many
#   SECONDS_EACH   of a run
#   ROUNDS         how often
#   VANISH         yes: see how long it takes to notice that the other side is gone
. /tmp/files/lib.sh
. /tmp/files/namespaces.sh
carry=/tmp/files/carry
cd /tmp || exit
say "congestion control: $(near cat /proc/sys/net/ipv4/tcp_available_congestion_control)"
$carry keys /tmp/keys 10.9.0.2 || exit
far $carry sink tcp 10.9.0.2:7001 >/tmp/tcp.log 2>&1 &
far $carry sink tls 10.9.0.2:7002 /tmp/keys >/tmp/tls.log 2>&1 &
sleep 2
for rate in $RATES; do
    far_link "$rate"
    for connections in $CONNECTIONS; do
        for round in $(seq "$ROUNDS"); do
            plain=$(near $carry source tcp 10.9.0.2:7001 "$connections" "$SECONDS_EACH" bbr) || echo "# tcp: $plain"
            tls=$(near $carry source tls 10.9.0.2:7002 "$connections" "$SECONDS_EACH" /tmp/keys) || cat /tmp/tls.log
            echo "# far $rate $connections $plain $tls"
        done
    done
done
if [ "$VANISH" = yes ]; then
    near $carry source tls 10.9.0.2:7002 2 300 /tmp/keys >/tmp/vanish.log 2>&1 &
    pid=$!
    sleep 3
    ip -n far link set v0 down
    begin=$(date +%s)
    wait $pid
    took=$(($(date +%s) - begin))
    say "a peer that vanished was noticed after $took s: $(cat /tmp/vanish.log)"
    [ "$took" -le 45 ] && ok "a peer that vanished was noticed" || not_ok "a peer that vanished was noticed"
fi
quiet "a far link"
done_testing
