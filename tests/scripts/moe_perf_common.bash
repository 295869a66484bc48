# SPDX-License-Identifier: Apache-2.0
# What the tests of moe_perf share. Sourced, after `set -euo pipefail`.
perf=$MOE_BIN/moe_perf
# The library takes MOE_* variables for settings and warns of those it does not know.
export -n MOE_BIN MOE_SOURCE
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
# A small layer with odd sizes.
layer=(--hidden 200 --experts 19 --topk 4 -n 2 -w 2)

complain() {
  echo "$(basename "$0"): $1"
  failures=$((failures + 1))
}

# run WANTED_STATUS ARGUMENT...: leaves $work/out and $work/err.
run() {
  local wanted=$1 status=0
  shift
  timeout 50 "$perf" "$@" >"$work/out" 2>"$work/err" || status=$?
  if [[ $status == "$wanted" ]]; then return; fi
  complain "moe_perf $*: exit status $status, expected $wanted"
  sed 's/^/    /' "$work/out" "$work/err"
}

# says FILE PATTERN: the file of the last run has a line that matches.
says() { grep -Eq -- "$2" "$work/$1" || complain "no line '$2' in: $(cat "$work/$1")"; }

finish() { exit $((failures > 0)); }

# await SECONDS COMMAND...: until the command succeeds.
await() {
  local end=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    if ((SECONDS >= end)); then return 1; fi
    sleep 0.05
  done
}
