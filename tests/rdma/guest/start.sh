# The guest's first program once the host's root file system is there: makes the RDMA devices, runs the command, says how
# it ended and ends the machine.
#
# Standard output, standard error and the status leave the guest by one virtio port each.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/guest/settings # DEVICES NODE WIRE HUGEPAGES KEEP_TMP TERMINAL

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

mount_all() {
  mkdir -p /dev/pts /dev/shm /dev/hugepages
  mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
  mount -t tmpfs -o mode=1777 shm /dev/shm
  mount -t hugetlbfs hugetlbfs /dev/hugepages
  [ "$KEEP_TMP" ] || mount -t tmpfs -o mode=1777 tmp /tmp
  ln -sfn /proc/self/fd /dev/fd
  for number in 0=stdin 1=stdout 2=stderr; do ln -sf "/proc/self/fd/${number%=*}" "/dev/${number#*=}"; done

  local common=trans=virtio,version=9p2000.L,access=any,msize=524288 modules index=0 folder
  modules=/lib/modules/$(uname -r)
  mkdir -p "$modules"
  mount -t 9p -o "ro,cache=loose,$common" modules "$modules" || fail "cannot mount the kernel's modules"
  while IFS= read -r folder; do
    mount -t 9p -o "rw,cache=mmap,$common" "share$index" "$folder" || fail "cannot mount $folder"
    index=$((index + 1))
  done </run/guest/shares
}

# pin INTERFACE CPU: veth queues a packet on the CPU that sent it, so that two CPUs would reorder a flow, which rxe answers
# by sending again. One CPU for each receive queue keeps the order.
pin() {
  local queue
  for queue in /sys/class/net/"$1"/queues/rx-*/rps_cpus; do
    printf '%x\n' $((1 << $2 % $(nproc))) >"$queue"
  done
}

# Every RDMA device sits on a veth pair whose other end is a port of one bridge: rxe0 on roce0, with port0 in the bridge.
# The wire to the other guest is one more port.
set_up_network() {
  local kind index host
  ip link set lo up
  # So that two devices of this host exchange packets through the bridge rather than by the kernel's short cut.
  for kind in all default; do
    echo 1 >/proc/sys/net/ipv4/conf/$kind/accept_local
    echo 0 >/proc/sys/net/ipv4/conf/$kind/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/$kind/arp_ignore
    echo 2 >/proc/sys/net/ipv4/conf/$kind/arp_announce
    echo 0 >/proc/sys/net/ipv6/conf/$kind/accept_dad
  done
  # An Ethernet MTU of 4200 gives an RDMA MTU of 4096.
  ip link add bridge0 type bridge forward_delay 0 mcast_snooping 0 || fail "cannot add a bridge"
  ip link set bridge0 mtu 4200 addrgenmode none up
  if [ "$WIRE" ]; then
    set -- /sys/bus/virtio/drivers/virtio_net/virtio*/net/*
    ip link set "${1##*/}" name wire && ip link set wire mtu 4200 master bridge0 addrgenmode none up ||
      fail "cannot set up the wire"
    pin wire 0
  fi
  index=0
  while [ $index -lt "$DEVICES" ]; do
    host=$((index + 1))
    ip link add roce$index mtu 4200 address "$(printf '02:00:0a:4d:%02x:%02x' "$NODE" $host)" type veth \
      peer name port$index mtu 4200 &&
      ip link set port$index master bridge0 addrgenmode none up &&
      ip link set roce$index up &&
      ip address add "10.77.$NODE.$host/16" dev roce$index &&
      rdma link add rxe$index type rxe netdev roce$index || fail "cannot add rxe$index"
    pin roce$index $index
    pin port$index $index
    index=$((index + 1))
  done
}

mount_all
hostname "guest$NODE"
modprobe -a rdma_rxe ib_uverbs rdma_ucm veth bridge || fail "cannot load the modules for RDMA"
set_up_network
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
