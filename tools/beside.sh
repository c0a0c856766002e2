#!/usr/bin/env bash
# beside.sh COMMAND COMMAND: both at the same time, each one word for the shell. What the first says is shown as it comes, what the second says
# when both have ended. Fails if either fails.
set -uo pipefail
mkdir -p build/logs
log=build/logs/beside.log
# A session for each, so that all of it can be ended when this script is; a shell that waits for a background job hears of that at once.
setsid bash -c "$1" </dev/null &
first=$!
setsid bash -c "$2" >"$log" 2>&1 </dev/null &
second=$!
trap 'kill -- -"$first" -"$second" 2>/dev/null; exit 130' INT TERM HUP
wait "$first"
first_status=$?
wait "$second"
second_status=$?
cat "$log"
((first_status == 0)) || printf '%s: FAILED with status %d\n' "$1" "$first_status" >&2
((second_status == 0)) || printf '%s: FAILED with status %d\n' "$2" "$second_status" >&2
exit $((first_status ? first_status : second_status))
