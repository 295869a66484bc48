#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Recorded routings: what moe_perf takes from them, and that it names the line of what it cannot take.
set -euo pipefail
source "$(dirname "$0")/moe_perf_common.bash"
trace=$work/trace.jsonl
shape=(--hidden 64 --experts 8 --topk 2 -n 2 -w 2 -b 4 -e 4 --routing "file:$trace")

# with LINE...: a trace of a good record and these lines.
with() {
  {
    echo '{"type":"meta","num_experts":8,"note":"skipped"}'
    echo '{"type":"route","token_idx":0,"topk_ids":[1,6],"topk_weights":[0.75,0.25]}'
    printf '%s\n' "$@"
  } >"$trace"
}
refuses() {
  run 2 -t 2 "${shape[@]}"
  says err "^moe_perf: --routing file:$trace: $1"
}

with '' '{"type":"other","topk_ids":"anything"}' '{"type":"route","topk_ids":[7,0],"topk_weights":[0.5,0.125]}'
run 0 -t 2 "${shape[@]}"
says out '\(2 rows dealt to 2 ranks in turn; repeated, because 8 are needed\)'
run 0 -p 3 "${shape[@]}" -b 0 -e 0
says out '\(2 rows dealt to 3 ranks in turn\)'
# Rank 0 sends the first record, rank 1 the second: rank 0 owns experts 0 to 3, so each rank gets a row of each.
run 0 -t 2 "${shape[@]}" -b 1 -e 1 --json "$work/run.json"
python3 - "$work/run.json" <<'END' || complain 'the rows of the trace are not where they should be'
import json, sys
row = json.load(open(sys.argv[1]))["rows"][0]
assert row["rows_min"] == row["rows_max"] == 2 and row["copies_per_token"] == 2, row
END

with '{"type":"route","topk_ids":[1,8],"topk_weights":[0.5,0.5]}'
refuses 'line 3: expert id 8 is outside 0 .. 7; pass --experts'
with '{"type":"meta"}' '{"type":"route","topk_ids":[-1,2],"topk_weights":[0.5,0.5]}'
refuses 'line 4: expert id -1 is outside'
with '{"type":"route","topk_ids":[18446744073709551615,2],"topk_weights":[0.5,0.5]}'
refuses 'line 3: expert id 18446744073709551615 is outside'
with '{"type":"route","topk_ids":[1.5,2],"topk_weights":[0.5,0.5]}'
refuses 'line 3: topk_ids has 1.5'
with '{"type":"route","topk_ids":[1,2,3],"topk_weights":[0.5,0.5,0.5]}'
refuses 'line 3: topk_ids has 3 entries, but --topk is 2'
with '{"type":"route","topk_ids":[1,2],"topk_weights":[0.5]}'
refuses 'line 3: topk_weights has 1 entries'
with '{"type":"route","topk_ids":[1,2],"topk_weights":[0.5,"x"]}'
refuses 'line 3: topk_weights has "x"'
with '{"type":"route","topk_ids":[1,2]}'
refuses 'line 3: has no list topk_weights'
with '{"type":"route","topk_ids":[1,2'
refuses 'line 3: is not a JSON object'
echo '{"type":"meta"}' >"$trace"
refuses 'has no record of type "route"'
rm "$trace"
refuses 'cannot be opened'
finish
