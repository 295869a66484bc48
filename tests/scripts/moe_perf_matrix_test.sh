#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every layout, type and way of sizing outputs gives the oracle's bits, with ranks as threads and as processes.
set -euo pipefail
source "$(dirname "$0")/moe_perf_common.bash"

# right ARGUMENT...: the run is right, and has checked something.
right() {
  run 0 "${layer[@]}" -b 0 -e 13 -f 13 "$@"
  says out '^# 3 of 3 sizes, [1-9][0-9]* received and combined rows checked, 0 wrong: OK$'
}

for layout in rank expert 'expert --align 8' expert-padded; do
  read -ra words <<<"$layout"
  for choice in bf16 'bf16 --exact' 'bf16 --budget 0' fp16 'fp32 --exact' fp8 'fp8 --exact' 'fp8 --budget 0'; do
    read -ra more <<<"$choice"
    right -t 3 --layout "${words[@]}" --dtype "${more[@]}"
  done
done
# Small communicators take the low-latency path, unless told otherwise.
right -t 3
says out '^# path: low-latency, chosen by the library'
says out '^# slots: of each rank; format: tagged'
for layout in rank expert expert-padded; do
  right -t 3 --layout "$layout" --dtype fp8 --path direct
  says out '^# path: direct, as asked'
done
for slots in rank expert; do
  for format in tagged signalled; do
    right -t 3 --layout expert-padded --quant fp8 --slots "$slots" --format "$format"
    says out "^# slots: of each $slots; format: $format"
  done
done
run 1 "${layer[@]}" -t 2 --slots expert
says err 'config.slots = 2, but in moeLayoutRank'
for quant in fp8 fp8-ue8m0; do
  for layout in rank expert expert-padded; do right -t 3 --layout "$layout" --quant "$quant" --hidden 700; done
  right -t 3 --quant "$quant" --path direct --exact
done
right -t 8 --ids int32
right -t 1
right -t 8 --experts 5 --topk 2
right -p 3
right -p 3 --layout expert --dtype fp8 --exact --ids int32
right -p 2 --max-tokens 20 --layout expert-padded --budget 26
for routing in zipf:1 zipf:20 node-limited:3 same masked:0.3 masked:1 last; do right -t 4 --routing "$routing"; done
right -t 4 --op dispatch
says out '^ +13 .* - +- '
right -t 4 --op combine

# The header says how rows are handed over.
right -t 2
says out '^# output: views of the window'
right -t 2 --exact
says out '^# output: copied out into outputs of the exact size'
right -t 2 --budget 30
says out '^# output: copied out into outputs of 30 rows'

# Outputs that are too small: what fits is right, what was lost counts as zero, and the run fails.
for layout in rank expert expert-padded; do
  run 1 -t 3 "${layer[@]}" -b 13 -e 13 --layout "$layout" --budget 7
  says out ', 0 wrong, [1-9][0-9]* calls overflowed: FAILED$'
  says err 'would have held everything: pass --budget'
done

# JSON beside the text, and alone on stdout.
run 0 -t 2 "${layer[@]}" -b 4 -e 8 --json "$work/run.json"
python3 - "$work/run.json" <<'END' || complain 'the JSON file is not as expected'
import json, sys
run = json.load(open(sys.argv[1]))
assert run["result"] == "OK" and [row["tokens"] for row in run["rows"]] == [4, 8], run
assert all(len(row["dispatch"]["us"]) == 2 and row["combine"]["p50_us"] > 0 for row in run["rows"]), run
assert run["totals"]["wrong_rows"] == 0 and run["options"]["hidden"] == 200 and len(run["ranks"]) == 2, run
END
run 0 -p 2 "${layer[@]}" -b 4 -e 4 --json -
python3 -c 'import json, sys; json.load(sys.stdin)' <"$work/out" || complain '--json - mixes text into stdout'
says err '^# 1 of 1 sizes'
run 1 -t 2 "${layer[@]}" -b 4 -e 4 --json "$work/none/run.json"
says err '^moe_perf: --json .*: No such file or directory'
finish
