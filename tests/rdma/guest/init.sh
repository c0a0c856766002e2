#!/bin/busybox sh
# The guest's first program, in its initramfs: loads the modules, mounts the host's root file system over 9p with a layer
# on top that takes all writes, and goes on there with start.sh.
/bin/busybox mkdir /proc
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
. /guest/settings # KEEP_TMP

fail() {
  echo "guest: $*" >/dev/console
  reboot -f
}

mount_9p() { # mount_9p NAME FOLDER OPTIONS
  mount -t 9p -o "trans=virtio,version=9p2000.L,access=any,msize=524288,$3" "$1" "$2" || fail "cannot mount $2"
}

mkdir -p /sys /host /layer /merged
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev 2>/dev/null # some kernels did it themselves
for module in /modules/*; do
  insmod "$module" || fail "cannot load $module"
done

mount_9p host /host ro,noxattr,cache=loose
mount -t tmpfs -o mode=755,size=75% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /merged || fail "cannot mount the overlay"

mkdir /dev/pts /dev/shm /dev/hugepages
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t hugetlbfs hugetlbfs /dev/hugepages
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr

modules=/merged/usr/lib/modules/$(uname -r)
mkdir -p "$modules"
mount_9p modules "$modules" ro,cache=loose
[ "$KEEP_TMP" ] || mount -t tmpfs -o mode=1777 tmp /merged/tmp
number=0
while IFS= read -r folder; do
  mount_9p share$number "/merged$folder" rw,cache=mmap
  number=$((number + 1))
done </guest/shares
mount -t tmpfs -o mode=755 run /merged/run
cp -a /guest /merged/run/guest
for folder in proc sys dev; do mount --move /$folder /merged/$folder; done

cd /merged
exec switch_root /merged /bin/sh /run/guest/start.sh
