#!/usr/bin/env bash
# Instructions that a scatter costs the host for each member, over both RDMA transports with libraries that cost nothing.
#
#   tools/bench/scatter.sh BUILD_DIRECTORY [MEMBERS...]     needs valgrind
#
# Counted under callgrind, by function, everything below it included: what the caller's thread does (call), what the worker does
# to post (post, without the library's own instructions), and to take a completion (complete, likewise without the poll).
set -euo pipefail
readonly build=$(realpath "${1:?usage: tools/bench/scatter.sh BUILD_DIRECTORY [MEMBERS...]}")
shift
readonly rounds=60 most_engines=64
command -v valgrind >/dev/null || { echo "scatter: valgrind is not installed: no instruction counts"; exit 0; }
readonly profile=$(mktemp)
trap 'rm -f "$profile"' EXIT

export TE_LIBIBVERBS=$build/libstandin_verbs.so TE_RDMA_ROOT=$build/standin TE_STANDIN=fast=1,max_cqe=4194304
export TE_LIBFABRIC=$build/libstandin_fabric.so TE_STANDIN_FABRIC=free=1,max_cq=4194304
mkdir -p "$TE_RDMA_ROOT"

inclusive() { # inclusive PATTERN: the highest count of a function whose name matches
  callgrind_annotate --inclusive=yes --threshold=100 "$profile" |
    awk -v pattern="$1" '$0 ~ pattern { gsub(",", "", $1); if ($1 > most) most = $1 } END { print most + 0 }'
}

printf '%-5s %8s %8s %8s %10s %12s %8s\n' '' members call post complete 'library' 'ours'
for transport in cx7 efa; do
  for members in "${@:-8 16 32 64 256 512}"; do
    for count in $members; do
      valgrind --tool=callgrind --callgrind-out-file="$profile" \
        "$build/bench_scatter" "$transport" "$count" $((count < most_engines ? count : most_engines)) "$rounds" >/dev/null 2>&1
      library=$(inclusive 'post_send_fast|srd::.*write_message')
      awk -v t="$transport" -v m="$count" -v n="$(((rounds + 3) * count))" -v call="$(inclusive 'te::Engine::scatter[(]')" \
        -v post="$(inclusive 'te::Worker::post_flight[(]')" -v complete="$(inclusive 'te::Worker::complete_write[(]')" \
        -v library="$library" 'BEGIN {
          printf "%-5s %8d %8.1f %8.1f %10.1f %12.1f %8.1f\n", t, m, call / n, (post - library) / n, complete / n, library / n,
                 (call + post - library + complete) / n }'
    done
  done
done
