#!/usr/bin/env bash
# Instructions per work request of transport cx7, beside a bare loop of verbs, with a device that costs nothing.
#
#   tools/bench/posting.sh BUILD_DIRECTORY     needs valgrind
#
# Each side runs twice, with different numbers of rounds, under callgrind; the difference has no set-up in it.
set -euo pipefail
readonly build=$(realpath "${1:?usage: tools/bench/posting.sh BUILD_DIRECTORY}")
readonly few=200 many=1200 chain=32
command -v valgrind >/dev/null || { echo "posting: valgrind is not installed: no instruction counts"; exit 0; }

export TE_LIBIBVERBS=$build/libstandin_verbs.so TE_RDMA_ROOT=$build/standin TE_STANDIN=fast=1
mkdir -p "$TE_RDMA_ROOT"

instructions() { # instructions SIDE ROUNDS BYTES
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$build/bench_posting" "$@" 2>&1 |
    sed -n 's/^==[0-9]*== Collected : \([0-9]*\).*/\1/p'
}

printf '%8s %22s %22s %8s\n' bytes 'ours, instructions' 'bare, instructions' ratio
for bytes in 64 256 65536; do
  declare -A each
  for side in ours bare; do
    each[$side]=$(($(instructions "$side" $many $bytes) - $(instructions "$side" $few $bytes)))
  done
  awk -v bytes=$bytes -v ours="${each[ours]}" -v bare="${each[bare]}" -v n=$(((many - few) * chain)) \
    'BEGIN { printf "%8d %22.1f %22.1f %8.2f\n", bytes, ours / n, bare / n, ours / bare }'
done
