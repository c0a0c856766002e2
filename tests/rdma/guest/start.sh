# The guest's first program once the host's root file system is there: makes the RDMA devices, runs the command, says how
# it ended and ends the machine.
#
# Standard output, standard error and the status leave the guest by one virtio port each.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/guest/settings # DEVICES CPUS NODE WIRE HUGEPAGES TERMINAL

power_off() {
  sync
  echo b >/proc/sysrq-trigger # QEMU ends where a machine would start again
  sleep 60
}

fail() {
  echo "guest: $*" >/dev/console
  power_off
}

port() { # port NAME: the device of the virtio port with this name
  local name
  name=$(grep -lx "$1" /sys/class/virtio-ports/*/name) || fail "no virtio port named $1"
  name=${name%/name}
  echo "/dev/${name##*/}"
}

# Every RDMA device sits on a veth pair whose other end is a port of one bridge: rxe0 on roce0, with port0 in the bridge.
# The wire to the other guest is one more port. An Ethernet MTU of 4200 gives an RDMA MTU of 4096.
links() { # as commands of ip(8)
  echo "link set lo up"
  echo "link add bridge0 mtu 4200 type bridge forward_delay 0 mcast_snooping 0"
  echo "link set bridge0 addrgenmode none"
  echo "link set bridge0 up"
  if [ "$WIRE" ]; then
    set -- /sys/bus/virtio/drivers/virtio_net/virtio*/net/*
    echo "link set ${1##*/} name wire mtu 4200 master bridge0 addrgenmode none up"
  fi
  local index=0
  while [ $index -lt "$DEVICES" ]; do
    printf 'link add roce%d mtu 4200 address 02:00:0a:4d:%02x:%02x type veth peer name port%d mtu 4200\n' \
      $index "$NODE" $((index + 1)) $index
    echo "link set port$index master bridge0 addrgenmode none up"
    echo "link set roce$index up"
    echo "address add 10.77.$NODE.$((index + 1))/16 dev roce$index"
    index=$((index + 1))
  done
}

# pin INTERFACE CPU: veth queues a packet on the CPU that sent it, so that two CPUs would reorder a flow, which rxe answers
# by sending again. One CPU for each receive queue keeps the order.
pin() {
  local queue
  for queue in /sys/class/net/"$1"/queues/rx-*/rps_cpus; do printf '%x\n' $((1 << $2 % CPUS)) >"$queue"; done
}

set_up_devices() {
  local kind index=0
  # So that two devices of this host exchange packets through the bridge rather than by the kernel's short cut.
  for kind in all default; do
    echo 1 >/proc/sys/net/ipv4/conf/$kind/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$kind/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$kind/arp_ignore
    echo 2 >/proc/sys/net/ipv4/conf/$kind/arp_announce
    echo 0 >/proc/sys/net/ipv6/conf/$kind/accept_dad
  done
  links | ip -batch - || fail "cannot set up the network"
  if [ "$WIRE" ]; then pin wire 0; fi
  while [ $index -lt "$DEVICES" ]; do
    rdma link add rxe$index type rxe netdev roce$index || fail "cannot add rxe$index"
    pin roce$index $index
    pin port$index $index
    index=$((index + 1))
  done
}

echo "guest$NODE" >/proc/sys/kernel/hostname
set_up_devices
echo "$HUGEPAGES" >/proc/sys/vm/nr_hugepages
ulimit -l unlimited
ulimit -n 65536
exec 3>"$(port status)"
read -r uptime _ </proc/uptime
echo "running $uptime" >&3

if [ "$TERMINAL" ]; then
  setsid -c /bin/sh /run/guest/command </dev/ttyS0 >/dev/ttyS0 2>&1 3>&-
  status=$?
else
  # A port can be opened only once, a FIFO often: /dev/stdout keeps its meaning.
  mkfifo /run/guest/out /run/guest/err
  cat /run/guest/out >"$(port out)" 3>&- &
  cat /run/guest/err >"$(port err)" 3>&- &
  setsid /bin/sh /run/guest/command </dev/null >/run/guest/out 2>/run/guest/err 3>&-
  status=$?
  # Processes left behind may hold a FIFO open: they are not waited for.
  (sleep 3; kill $(jobs -p)) 2>/dev/null &
  wait %1 %2
fi
echo "ended $status" >&3
power_off
