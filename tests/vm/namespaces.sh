# Two namespaces, near (10.9.0.1) and far (10.9.0.2), and a link between them.
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
# Room for what is on its way at a Gbit/s.
for side in near far; do
    ip netns exec $side sh -c 'echo "4096 131072 67108864" >/proc/sys/net/ipv4/tcp_rmem
        echo "4096 65536 67108864" >/proc/sys/net/ipv4/tcp_wmem'
done

# far_link RATE: in Mbit/s; 150 ms there and back, one packet in a thousand is lost each way.
far_link() {
    for side in near far; do
        tc -n $side qdisc replace dev v0 root netem delay 75ms loss 0.1% rate "$1mbit" limit 30000 || exit
    done
}
