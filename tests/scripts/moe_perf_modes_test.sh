#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The ways of timing that only GPUs have: right rows, and figures that say what they are of.
set -euo pipefail
source "$(dirname "$0")/moe_perf_common.bash"

if ! timeout 50 "$perf" -t 1 --backend cuda "${layer[@]}" -b 1 -e 1 >"$work/out" 2>"$work/err"; then
  if grep -E 'no GPU can be used here|has no CUDA' "$work/err"; then exit 77; fi
fi
ranks=$(nvidia-smi -L | wc -l)
if ((ranks > 2)); then ranks=2; fi

# modes ARGUMENT...: with each --op, the samples that there should be, and no others.
modes() {
  local op
  for op in roundtrip dispatch combine; do
    run 0 -t "$ranks" --backend cuda "${layer[@]}" -b 0 -e 13 -f 13 -n 40 --op "$op" --json "$work/run.json" "$@"
    says out '^# 3 of 3 sizes, [1-9][0-9]* received and combined rows checked, 0 wrong: OK$'
    python3 - "$work/run.json" "$op" <<'CHECK' || complain "moe_perf --op $op $*: the JSON is not as expected"
import json, sys
run, op = json.load(open(sys.argv[1])), sys.argv[2]
graph = run["options"]["graph"]
assert run["timing"] == ("graph replays" if graph else "cold calls") and run["times"].startswith(run["timing"]), run
assert graph or run["event_us"] > 0, run
kinds = ["dispatch", "combine", "roundtrip"]
for row in run["rows"]:
    assert [kind for kind in kinds if kind in row] == (kinds if op == "roundtrip" else [op]), row
    assert all(len(row[kind]["us"]) == (10 if graph else 40) for kind in kinds if kind in row), row
    assert all(time > 0 for kind in kinds if kind in row for time in row[kind]["us"]), row
CHECK
  done
}

for mode in --graph --flush; do
  for path in direct low-latency; do
    modes "$mode" --path "$path"
    modes "$mode" --path "$path" --layout expert --dtype fp8 --halves
  done
  run 0 -t "$ranks" --backend cuda "${layer[@]}" -b 4 -e 4 "$mode"
  says out '^#.* round trip  round trip '
  # The check finds what is wrong in these modes, too.
  run 1 -t "$ranks" --backend cuda "${layer[@]}" -b 4 -e 4 -w 0 "$mode" --corrupt
  says out ', 1 wrong: FAILED$'
done
run 0 -t "$ranks" --backend cuda "${layer[@]}" -b 70 -e 70 -n 330 --graph --json "$work/run.json"
python3 -c 'import json, sys; assert len(json.load(sys.stdin)["rows"][0]["combine"]["us"]) == 11' <"$work/run.json" ||
  complain '-n 330 --graph: not 11 replays'
finish
