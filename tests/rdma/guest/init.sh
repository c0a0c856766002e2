#!/bin/busybox sh
# The guest's first program, in its initramfs: loads what it takes to see the host's root file system over 9p, lays a
# file system on top that takes all writes, and goes on there with start.sh.
/bin/busybox mkdir /proc
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin

fail() {
  echo "guest: $*" >/dev/console
  reboot -f
}

mkdir -p /sys /dev /host /layer /root
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null # some kernels did it themselves

for module in /modules/*; do
  insmod "$module" || fail "cannot load $module"
done

mount -t 9p -o ro,noxattr,trans=virtio,version=9p2000.L,access=any,cache=loose,msize=524288 host /host ||
  fail "cannot mount the host's root file system"
mount -t tmpfs -o mode=755,size=75% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root ||
  fail "cannot mount the overlay"
mount -t tmpfs -o mode=755 run /root/run
cp -a /guest /root/run/guest
for folder in proc sys dev; do mount --move /$folder /root/$folder; done

cd /root
exec switch_root /root /bin/sh /run/guest/start.sh
