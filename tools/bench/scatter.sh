#!/usr/bin/env bash
# Instructions that a scatter costs the host for each member, over both RDMA transports with libraries that cost nothing.
#
#   tools/bench/scatter.sh BUILD_DIRECTORY [MEMBERS...]     needs valgrind
#
# Counted under callgrind, by function, everything below it included: what the caller's thread does (call), what the worker does
# to post (post, without the library's own instructions), and to take a completion (complete, without the poll). Each runs twice, with
# different numbers of rounds; the difference has no set-up in it.
set -euo pipefail
readonly build=$(realpath "${1:?usage: tools/bench/scatter.sh BUILD_DIRECTORY [MEMBERS...]}")
shift
readonly few=20 many=100 engines=8
command -v valgrind >/dev/null || { echo "scatter: valgrind is not installed: no instruction counts"; exit 0; }
readonly profile=$(mktemp)
trap 'rm -f "$profile"' EXIT

export TE_LIBIBVERBS=$build/libstandin_verbs.so TE_RDMA_ROOT=$build/standin TE_STANDIN=fast=1,max_cqe=4194304
export TE_LIBFABRIC=$build/libstandin_fabric.so TE_STANDIN_FABRIC=free=1,max_cq=4194304
mkdir -p "$TE_RDMA_ROOT"

# Of each function the highest count among those whose names match: "call post complete library".
counts() { # counts TRANSPORT MEMBERS ROUNDS
  valgrind --tool=callgrind --callgrind-out-file="$profile" \
    "$build/bench_scatter" "$1" "$2" $engines "$3" 256 0 >/dev/null 2>&1
  callgrind_annotate --inclusive=yes --threshold=100 "$profile" | awk '
    { count = $1; gsub(",", "", count); count += 0 }
    /te::Engine::scatter[(]/ && count > call { call = count }
    /te::Worker::post_flight[(]/ && count > post { post = count }
    /te::Worker::complete_write[(]/ && count > complete { complete = count }
    /standin::post_send_fast[(]|srd::.*write_message[(]/ && count > library { library = count }
    END { print call, post, complete, library }'
}

printf '%-5s %8s %8s %8s %10s %8s %10s\n' '' members call post complete ours library
for transport in cx7 efa; do
  for members in ${*:-8 16 32 64 256 512}; do
    read -r call post complete library <<<"$(counts $transport "$members" $many)"
    read -r call0 post0 complete0 library0 <<<"$(counts $transport "$members" $few)"
    awk -v t=$transport -v m="$members" -v n=$(((many - few) * members)) -v call=$((call - call0)) -v post=$((post - post0)) \
      -v complete=$((complete - complete0)) -v library=$((library - library0)) 'BEGIN {
        printf "%-5s %8d %8.1f %8.1f %10.1f %8.1f %10.1f\n", t, m, call / n, (post - library) / n, complete / n,
               (call + post - library + complete) / n, library / n }'
  done
done
