#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every field case has its row, every test named there exists; and the checker notices when not.
set -euo pipefail
checker=$MOE_SOURCE/scripts/check_field_cases.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A stand-in tree: two binaries that list tests as GoogleTest does.
mkdir -p "$work/bin" "$work/tests/scripts" "$work/tests/c"
touch "$work/tests/scripts/real.sh" "$work/tests/c/real.c"
printf '#!/bin/sh\nprintf "Plain.\\n  Case\\nAll/Param.\\n  Works/0  # GetParam() = 4\\n"\n' >"$work/bin/moe_unit_tests"
printf '#!/bin/sh\nprintf "Typed/0.  # TypeParam = int\\n  Case\\n"\n' >"$work/bin/moe_conformance"
chmod +x "$work/bin/"*

# expect TEXT LINE...: a file of these lines must give a report with TEXT; "" for a clean one.
expect() {
  local text=$1 report
  shift
  printf '%s\n' "$@" >"$work/tests/field_cases.md"
  report=$(python3 "$checker" --root "$work" --bin "$work/bin") || true
  if [[ -z $text && -n $report ]] || [[ $report != *"$text"* ]]; then
    printf 'field_cases_test: wanted "%s", got:\n%s\n' "$text" "$report"
    exit 1
  fi
}
head=('| case | title | status |' '|---|---|---|')
expect '' 'Cases: 1-3, 7' '' "${head[@]}" '| 1 | a | test: Plain.Case |' '| 2 | b | test: `Param.Works`, real.sh |' \
  '| 3 | c | test: real.c, Typed.Case |' '| 7 | d | later: verbs |'
# Without any test on GPUs nothing can be said of one; with another, it must exist.
expect '' 'Cases: 1' "${head[@]}" '| 1 | a | test: `All/Gpu.Case/cuda_1gpu` |'
printf '#!/bin/sh\nprintf "All/Gpu.\\n  Case/cuda_1gpu\\nTyped/0.\\n  Case\\n"\n' >"$work/bin/moe_conformance"
expect '' 'Cases: 1' "${head[@]}" '| 1 | a | test: `All/Gpu.Case/cuda_1gpu` |'
expect 'no test All/Gpu.Gone' 'Cases: 1' "${head[@]}" '| 1 | a | test: `All/Gpu.Gone/cuda_1gpu` |'
expect 'no line' "${head[@]}" '| 1 | a | later: x |'
expect 'no test Plain.Absent' 'Cases: 1' "${head[@]}" '| 1 | a | test: Plain.Absent |'
expect 'no test gone.sh' 'Cases: 1' "${head[@]}" '| 1 | a | test: Plain.Case, gone.sh |'
expect 'case 1 has 2 rows' 'Cases: 1' "${head[@]}" '| 1 | a | later: x |' '| 1 | b | later: x |'
expect 'case 2 is listed' 'Cases: 1-2' "${head[@]}" '| 1 | a | later: x |'
expect 'case 3 has a row' 'Cases: 1' "${head[@]}" '| 1 | a | later: x |' '| 3 | b | later: x |'
expect "neither 'test: NAME'" 'Cases: 1' "${head[@]}" '| 1 | a | done |'
expect "neither 'test: NAME'" 'Cases: 1' "${head[@]}" '| 1 | a | later: |'
expect 'has no title' 'Cases: 1' "${head[@]}" '| 1 |  | later: x |'

python3 "$checker" --root "$MOE_SOURCE" --bin "$MOE_BIN"
