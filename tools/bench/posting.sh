#!/usr/bin/env bash
# Instructions per work request of transports cx7 and efa, beside bare loops of verbs and libfabric, with devices that
# cost nothing.
#
#   tools/bench/posting.sh BUILD_DIRECTORY     needs valgrind
#
# Each side runs twice, with different numbers of rounds, under callgrind; the difference has no set-up in it.
set -euo pipefail
readonly build=$(realpath "${1:?usage: tools/bench/posting.sh BUILD_DIRECTORY}")
readonly few=200 many=1200
command -v valgrind >/dev/null || { echo "posting: valgrind is not installed: no instruction counts"; exit 0; }

export TE_LIBIBVERBS=$build/libstandin_verbs.so TE_RDMA_ROOT=$build/standin TE_STANDIN=fast=1
export TE_LIBFABRIC=$build/libstandin_fabric.so TE_STANDIN_FABRIC=free=1
mkdir -p "$TE_RDMA_ROOT"

instructions() { # instructions PROGRAM SIDE ROUNDS ARGUMENT...
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$build/bench_$1" "${@:2}" 2>&1 |
    sed -n 's/^==[0-9]*== Collected : \([0-9]*\).*/\1/p'
}

compare() { # compare LABEL PROGRAM REQUESTS ARGUMENT...: a line, when the program was built
  local label=$1 program=$2 requests=$3 side
  shift 3
  test -x "$build/bench_$program" || return 0
  local -A each
  for side in ours bare; do
    each[$side]=$(($(instructions "$program" $side $many "$@") - $(instructions "$program" $side $few "$@")))
  done
  awk -v label="$label" -v ours="${each[ours]}" -v bare="${each[bare]}" -v n=$(((many - few) * requests)) \
    'BEGIN { printf "%-48s %12.1f %12.1f %8.2f\n", label, ours / n, bare / n, ours / bare }'
}

printf '%-48s %12s %12s %8s\n' 'instructions per work request' ours bare ratio
for bytes in 64 256 65536; do compare "cx7, 32 writes of $bytes bytes to one peer" posting 32 $bytes; done
for bytes in 64 65536; do compare "efa, 32 writes of $bytes bytes to one peer" posting_fabric 32 $bytes 1; done
for bytes in 64 4096; do compare "efa, $bytes bytes and an immediate to each of 64" posting_fabric 64 $bytes 64; done
