#!/usr/bin/env bash
# Tests main on a machine that has nothing: a minimal Debian in build/fresh/, made by debootstrap, and a fresh clone in it.
#
#   tools/fresh.sh SUITE    bookworm (12) or trixie (13); as root; writes docs/results/fresh-SUITE.txt
#
# There, in this order: an unprivileged user is told what is missing; root runs `make loopback` and the quick part of `make test`;
# the user runs the same in a clone of his own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly suite=${1:?usage: tools/fresh.sh SUITE}
readonly root=$PWD/build/fresh/$suite log=$PWD/build/fresh/$suite.log result=docs/results/fresh-$suite.txt
readonly quick="test-native test-python ARGS='-k unit'"
((EUID == 0)) || { echo "fresh: needs root, for debootstrap and chroot" >&2; exit 1; }

rm -rf "$root"
mkdir -p "$root" docs/results
: >"$log"

step() { # step TEXT COMMAND...: runs it, all output to the log, one line with the time to standard output
  local text=$1 begin=$SECONDS status=0
  shift
  printf '\n== %s\n' "$text" >>"$log"
  "$@" >>"$log" 2>&1 || status=$?
  printf '%-72s %s (%d s)\n' "$text" "$( ((status)) && echo "FAILED with status $status" || echo ok)" $((SECONDS - begin))
  ((status == 0)) || { tail -40 "$log" >&2; return "$status"; }
}

# inside USER COMMAND: in the root, with mounts and processes of its own that end with it, and no variable but these.
inside() {
  local user=$1 home=/root
  [[ $user == root ]] || home=/home/$user
  unshare --mount --pid --fork --kill-child -- bash -c '
    set -e
    mount -t proc proc "$1/proc"; mount --rbind /dev "$1/dev"; mount -t sysfs -o ro sysfs "$1/sys"
    exec chroot --userspec="$2" "$1" /usr/bin/env -i HOME="$3" USER="$2" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
      TERM=dumb ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} /bin/bash -c "cd ~ && $4"' \
    inside "$root" "$user" "$home" "$2"
}

told_what_is_missing() {
  local said
  if said=$(inside tester 'cd transfer_engine && make loopback' 2>&1); then
    echo "make loopback succeeded without its packages"
    return 1
  fi
  printf '%s\n' "$said"
  grep -q 'install them as root, then try again: apt-get update && apt-get install' <<<"$said"
}

clone() { # clone USER HOME
  git clone --quiet --no-hardlinks . "$root$2/transfer_engine"
  inside root "chown -R $1: $2"
}

prepare() {
  cp -L /etc/resolv.conf "$root/etc/resolv.conf"
  mkdir -p "$root/etc/ssl/certs"
  cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # this machine's, where a proxy of its own signs
  inside root 'useradd --create-home --shell /bin/bash tester'
}

run() {
  step "debootstrap --variant=minbase --include=make,ca-certificates $suite" \
    debootstrap --variant=minbase --include=make,ca-certificates "$suite" "$root"
  step "a user beside root" prepare
  step "clone" clone root /root
  step "clone for the user" clone tester /home/tester
  step "the user is told which packages are missing" told_what_is_missing
  step "root: make loopback" inside root 'cd transfer_engine && make loopback'
  step "root: make $quick" inside root "cd transfer_engine && make $quick"
  step "user: make loopback" inside tester 'cd transfer_engine && make loopback'
  step "user: make $quick" inside tester "cd transfer_engine && make $quick"
  printf '\n'
  inside root 'cat /etc/debian_version; ~/transfer_engine/.venv/bin/python -V; g++ --version | head -1' 2>&1
  inside root "~/transfer_engine/.venv/bin/transfer-engine doctor --json | ~/transfer_engine/.venv/bin/python -c '
import json, sys
print(*(entry[\"what\"] for entry in json.load(sys.stdin)[\"findings\"] if entry[\"id\"] == \"libfabric.library\"))'" 2>/dev/null || true
}

{
  printf 'transfer_engine at %s on a minimal Debian %s\n%s\n\n' "$(git rev-parse --short HEAD)" "$suite" "$(date -u +%F)"
  run
} | tee "$result"
