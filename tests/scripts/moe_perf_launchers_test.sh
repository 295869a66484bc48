#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Ranks that a launcher starts: torchrun's environment, and mpirun where it is installed.
set -euo pipefail
source "$(dirname "$0")/moe_perf_common.bash"
export MOE_SOCKET_IFNAME=lo

# As torchrun would: one process a rank, the rank and the size in the environment. Sets statuses.
torchrun_like() {
  local rank size=$1 pids=()
  shift
  for ((rank = 0; rank < size; ++rank)); do
    RANK=$rank WORLD_SIZE=$size LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$size MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 \
      timeout 50 "$perf" "$@" >"$work/out$rank" 2>"$work/err$rank" &
    pids+=($!)
  done
  statuses=''
  for rank in "${!pids[@]}"; do
    local status=0
    wait "${pids[rank]}" || status=$?
    statuses+=" $status"
  done
  cat "$work"/out? >"$work/out"
  cat "$work"/err? >"$work/err"
}

torchrun_like 3 "${layer[@]}" -b 0 -e 13 -f 13
if [[ $statuses != ' 0 0 0' ]]; then complain "torchrun: exit statuses$statuses: $(cat "$work/err")"; fi
says out '^# 3 ranks on 1 node as a launcher.s ranks$'
says out '^# 3 of 3 sizes, .* 0 wrong: OK$'
if [[ $(grep -c '^# rank' "$work/out") != 3 ]]; then complain 'rank 0 alone should print, once'; fi
if [[ -s $work/out1 || -s $work/out2 ]]; then complain 'only rank 0 writes to stdout'; fi

torchrun_like 2 "${layer[@]}" -b 13 -e 13 --corrupt
if [[ $statuses != ' 1 1' ]]; then complain "a wrong row: exit statuses$statuses, expected 1 1"; fi
says out ', 1 wrong: FAILED$'

torchrun_like 2 "${layer[@]}" -b 13 -e 13 --stall 2:5
if [[ $statuses == *0* ]]; then complain "a stall of a rank that is not there: exit statuses$statuses"; fi

if command -v mpirun >/dev/null; then
  status=0
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 50 mpirun --oversubscribe -np 3 \
    "$perf" "${layer[@]}" -b 13 -e 13 --layout expert >"$work/out" 2>"$work/err" || status=$?
  if [[ $status != 0 ]]; then complain "mpirun: exit status $status: $(cat "$work/err")"; fi
  says out '^# 1 of 1 sizes, .* 0 wrong: OK$'
fi
finish
