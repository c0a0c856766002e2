#!/usr/bin/env bash
# quiet.sh LABEL COMMAND...: one line when the command succeeds, all of its output when it fails. V=1 shows everything.
# SHOW=PATTERN adds what matches it to the line of success.
set -uo pipefail
label=$1
shift
if [[ ${V:-} == 1 ]]; then
  printf '== %s: %s\n' "$label" "$*"
  exec "$@"
fi
mkdir -p build/logs
log=build/logs/${label//[^A-Za-z0-9_.-]/-}.log
started=$SECONDS
"$@" >"$log" 2>&1 </dev/null
status=$?
seconds=$((SECONDS - started))
if ((status)); then
  cat "$log"
  printf '%s: FAILED with status %d after %d s\n' "$label" "$status" "$seconds" >&2
  exit "$status"
fi
printf '%s: ok (%d s)%s\n' "$label" "$seconds" "${SHOW:+ $(grep -o -m1 -- "$SHOW" "$log" | tr -s ' ')}"
