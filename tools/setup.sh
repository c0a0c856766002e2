#!/usr/bin/env bash
# Prepares a machine for building and testing.
#
#   tools/setup.sh system   compiler, headers, Python: installs what is missing (as root, Debian and its relatives),
#                           or says what to install and fails
#   tools/setup.sh arm      a cross compiler for aarch64 and qemu, for `make test-arm`
#   tools/setup.sh fresh    debootstrap, for `make test-fresh`
#   tools/setup.sh rdma     QEMU, and libibverbs with its tools and Python binding, for `make test-rdma`
#   tools/setup.sh venv     .venv with the build tools and linters; implies `system`
#
# PYTHON=/path/to/python chooses the interpreter; otherwise the newest CPython 3.10 to 3.14 on PATH is taken.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly newest=14 oldest=10
python=          # the interpreter chosen
python_lacks=()  # of "venv" and "headers"
missing=()       # Debian packages

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# describe CANDIDATE: prints "minor path lacks..." of a usable interpreter, fails for any other.
describe() {
  "$1" -I - "$oldest" "$newest" 2>/dev/null <<'PYTHON'
import importlib.util, os, sys, sysconfig
oldest, newest = map(int, sys.argv[1:])
major, minor = sys.version_info[:2]
if sys.implementation.name != "cpython" or major != 3 or not oldest <= minor <= newest:
    sys.exit(1)
if sysconfig.get_config_var("Py_GIL_DISABLED"):  # the stable ABI does not cover free-threaded builds
    sys.exit(1)
path = sys.executable if sys.prefix == sys.base_prefix else sys._base_executable
lacks = []
if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
    lacks.append("venv")
if not os.path.exists(os.path.join(sysconfig.get_path("include", vars={"base": sys.base_prefix}), "Python.h")):
    lacks.append("headers")
print(minor, path, *lacks)
PYTHON
}

choose_python() {
  python= python_lacks=()
  local candidate description best_score=-1 score minor path lacks
  local -a candidates=()
  if [[ -n ${PYTHON:-} ]]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program"
    candidates=("$PYTHON")
  else
    for ((minor = newest; minor >= oldest; minor--)); do candidates+=("python3.$minor"); done
    candidates+=(python3)
  fi
  for candidate in "${candidates[@]}"; do
    command -v "$candidate" >/dev/null || continue
    description=$(describe "$candidate") || continue
    read -r minor path lacks <<<"$description"
    score=$minor
    [[ -z $lacks ]] && score=$((score + 100)) # a complete one goes before a newer one
    if ((score > best_score)); then
      best_score=$score python=$path
      read -ra python_lacks <<<"$lacks"
    fi
  done
  [[ -n $python || -z ${PYTHON:-} ]] || fail "PYTHON=$PYTHON: not a usable CPython 3.$oldest to 3.$newest"
}

compiles() { # compiles 'HEADER...': can the C++ compiler include these in C++20?
  local header text=
  for header in $1; do text+="#include <$header>"$'\n'; done
  "${CXX:-g++}" -std=c++20 -I/opt/amazon/efa/include -fsyntax-only -x c++ - <<<"$text" >/dev/null 2>&1
}

has_library() {
  { ldconfig -p 2>/dev/null || /sbin/ldconfig -p 2>/dev/null; } | grep -q "$1" || compgen -G "/opt/amazon/efa/lib*/$1" >/dev/null
}

find_missing() {
  missing=()
  command -v make >/dev/null || missing+=(make)
  command -v ip >/dev/null || [[ -x /sbin/ip ]] || missing+=(iproute2) # tests between network namespaces
  compiles 'cstdint span stop_token' || missing+=(g++)
  compiles 'doctest/doctest.h' || missing+=(doctest-dev)
  { compiles 'rdma/fabric.h' && has_library libfabric.so.1; } || missing+=(libfabric-dev)
  compiles 'infiniband/verbs.h' || missing+=(libibverbs-dev)
  has_library libhwloc.so.15 || missing+=(libhwloc15) # tests of topologies; the package runs without it
  choose_python
  if [[ -z $python ]]; then
    missing+=(python3 python3-dev python3-venv)
    return
  fi
  local lack version
  for lack in "${python_lacks[@]}"; do
    [[ $python == /usr/bin/* ]] || fail "$python lacks its ${lack/venv/modules venv and ensurepip}; choose another with PYTHON=..."
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    case $lack in
      venv) missing+=("$version-venv") ;;
      headers) missing+=("$version-dev") ;;
    esac
  done
}

set_up_system() {
  find_missing
  ((${#missing[@]})) || return 0
  install_missing
  local -a wanted=("${missing[@]}")
  find_missing
  ((${#missing[@]} == 0)) || fail "installed ${wanted[*]}, yet still missing: ${missing[*]}"
}

# What only one target needs: PACKAGE=PROGRAM..., or PACKAGE=/a/file/of/it
set_up_programs() {
  missing=()
  local pair PATH=$PATH:/usr/sbin:/sbin
  for pair in "$@"; do [[ -e ${pair#*=} ]] || command -v "${pair#*=}" >/dev/null || missing+=("${pair%=*}"); done
  ((${#missing[@]})) || return 0
  install_missing
}

install_missing() {
  local command="apt-get update && apt-get install --no-install-recommends ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    fail "missing: ${missing[*]} (names as Debian has them). Install their equivalents, then try again."
  elif ((EUID)); then
    fail "missing packages: ${missing[*]}"$'\n'"setup: install them as root, then try again: $command"
  fi
  export DEBIAN_FRONTEND=noninteractive
  tools/quiet.sh "apt-get update" apt-get update
  tools/quiet.sh "apt-get install ${missing[*]}" apt-get install -y --no-install-recommends "${missing[@]}"
}

set_up_venv() {
  set_up_system
  local base=
  # A working .venv is kept unless it was moved or stems from another interpreter than the one asked for.
  [[ $(cat .venv/.home 2>/dev/null) == "$(pwd -P)" ]] && base=$(describe .venv/bin/python | cut -d' ' -f2) || true
  if [[ -z $base || (-n ${PYTHON:-} && ! $base -ef $python) ]]; then
    rm -rf .venv build/wheel build/native build/asan build/tsan build/bench # they remember .venv's cmake and ninja
    tools/quiet.sh "python -m venv ($("$python" -V))" "$python" -m venv .venv
  fi
  local -a pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
  tools/quiet.sh "pip" "${pip[@]}" 'pip>=25.1' # the first that knows dependency groups
  tools/quiet.sh "pip install build tools and linters" "${pip[@]}" --group build --group lint
  printf '%s\n' "${PYTHON:-}" >.venv/.python
  pwd -P >.venv/.home
  touch .venv/.setup
}

mkdir -p build
exec 9>build/.setup.lock
flock 9 # two makes at once take turns
case ${1:-venv} in
  system) set_up_system ;;
  arm) set_up_programs g++-aarch64-linux-gnu=aarch64-linux-gnu-g++ qemu-user=qemu-aarch64 ;;
  fresh) set_up_programs debootstrap=debootstrap ;;
  rdma)
    set_up_programs qemu-system-x86=qemu-system-x86_64 iproute2=ip kmod=modprobe xz-utils=xz zstd=zstd \
      ibverbs-providers=/etc/libibverbs.d/rxe.driver ibverbs-utils=ibv_rc_pingpong \
      python3-pyverbs=/usr/lib/python3/dist-packages/pyverbs
    ;;
  venv) set_up_venv ;;
  *) fail "usage: tools/setup.sh [system|arm|fresh|rdma|venv]" ;;
esac
