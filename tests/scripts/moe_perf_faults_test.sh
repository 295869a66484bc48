#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# moe_perf sees a flipped bit, waits for slow ranks, names stopped and killed ones, and leaves no process behind.
set -euo pipefail
source "$(dirname "$0")/moe_perf_common.bash"

for way in '-t 3' '-p 3' '-t 3 --layout expert' '-t 3 --dtype fp8 --exact' '-t 3 -w 0' '-t 3 --op dispatch' \
  '-t 3 --routing last'; do
  read -ra words <<<"$way"
  run 1 "${layer[@]}" -b 0 -e 13 -f 13 "${words[@]}" --corrupt
  says out ', 1 wrong: FAILED$'
  says err '^moe_perf: rank [0-9]+ \(pid [0-9]+\): 1 wrong row at 1 tokens .* payload differs in 1 of [0-9]+ bytes'
done
run 1 -t 2 "${layer[@]}" -b 0 -e 0 --corrupt
says err '^moe_perf: rank 0 .*--corrupt found no row to corrupt'

run 0 -p 3 "${layer[@]}" -b 13 -e 13 --stall 1:30
says out ', 0 wrong: OK$'
awk '!/^#/ { exit !($4 >= 30000 && $6 >= 30000) }' "$work/out" || complain 'the stall is not in the times'
run 1 -p 3 "${layer[@]}" -b 13 -e 13 --stall 1:1500 --timeout-ms 200
says err '^moe_perf: rank [02] \(pid [0-9]+\) failed: moeDispatch: timeout: .*rank 1'

# start ARGUMENT...: a run that would take minutes, once its header is out. Sets starter and ranks (pids).
start() {
  rm -f "$work/out"  # the header waited for is not the last run's
  "$perf" "${layer[@]}" -p 3 -b 200 -e 200 -n 1000000 -c 0 "$@" >"$work/out" 2>"$work/err" &
  starter=$!
  await 20 grep -q '^#.*tokens' "$work/out" || complain "no header: $(cat "$work/err")"
  mapfile -t ranks < <(awk '/^# rank [0-9]+ pid/ { print $5 }' "$work/out")
}

all_gone() {
  local pid
  for pid in "${ranks[@]}"; do
    if [[ -e /proc/$pid ]]; then return 1; fi
  done
}

# ended STATUS: the starter ends within seconds, with this status, and no rank is left.
ended() {
  local status=0
  await 10 bash -c "! kill -0 $starter || grep -q '^State:.Z' /proc/$starter/status" || complain 'still runs after 10 s'
  wait "$starter" || status=$?
  if [[ $status != "$1" ]]; then complain "exit status $status, expected $1: $(cat "$work/err")"; fi
  await 5 all_gone || complain 'a rank outlives the run'
}

start
kill -KILL "${ranks[2]}"
ended 1
says err "^moe_perf: rank 2 \(pid ${ranks[2]}\) was killed by signal 9 \(Killed\)$"
says out ': FAILED$'

start
kill -INT "$starter"
ended 130
says err '^moe_perf: interrupted by signal 2'

# Even a starter that can no longer do anything leaves nobody.
start
kill -KILL "$starter"
ended 137
finish
