#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of the CUDA backend, from binaries: FOLDER is a build folder, or a copy of its bin/ and lib/ from elsewhere.
# Needs neither a compiler nor GoogleTest, unless --build finds both. A process a suite, so that a GPU error in one is
# not the end of all. All of it once for each path, or for the one that MOE_PATH names (1 direct, 2 low latency).
#   scripts/test_gpu.sh [--build] [--conformance] [--long] [--only PATTERN] [--logs DIR] [FOLDER]     FOLDER: build
#     --build         builds FOLDER first where that can be done
#     --conformance   only the conformance suite
#     --long          the long tests in place of the others
#     --only PATTERN  only the suites that the shell pattern matches, e.g. '*Failure*'
#     --logs DIR      keeps there what each of them said
# Exit codes: 0 all passed, 1 some failed, 2 nothing to run, 77 no GPU here, or none of it can run on those there are.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=0 conformance_only=0 long=0 only='*' logs='' folder=$root/build
while (($#)); do
  case $1 in
    --build) build=1 ;;
    --conformance) conformance_only=1 ;;
    --long) long=1 ;;
    --only) only=${2:?--only needs a pattern}; shift ;;
    --logs) logs=${2:?--logs needs a folder}; shift ;;
    -*) echo "test_gpu.sh: unknown option $1" >&2; exit 2 ;;
    *) folder=$1 ;;
  esac
  shift
done

can_build() {
  command -v cmake >/dev/null && [[ -e /usr/include/gtest/gtest.h ]] &&
    { command -v nvcc >/dev/null || [[ -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; }
}
if ((build)); then
  if can_build; then
    make -C "$root" build BUILD="$(realpath -m "$folder")"
  else
    echo "test_gpu.sh: no cmake, nvcc or GoogleTest here: what lies in $folder is run as it is"
  fi
fi
bin=$folder/bin
if [[ ! -x $bin/moe_conformance ]]; then
  echo "test_gpu.sh: there is no $bin/moe_conformance; build it, or copy bin/ and lib/ of a build folder there" >&2
  exit 2
fi
if ! nvidia-smi -L 2>/dev/null; then
  # The tests say by name that they are skipped, and why.
  "$bin/moe_conformance" --gtest_filter='*cuda_*' --gtest_brief=1 | tail -n 1 || true
  echo "test_gpu.sh: skipped, nvidia-smi lists no GPU on this machine"
  exit 77
fi

if [[ -z $logs ]]; then
  logs=$(mktemp -d)
  trap 'rm -rf "$logs"' EXIT
fi
mkdir -p "$logs"
names=() results=() times=()

# run NAME SECONDS COMMAND...: notes how it ended, and shows what it said when it failed.
run() {
  local name="path $MOE_PATH: $1" limit=$2 status=0 started=$SECONDS result log
  shift 2
  # shellcheck disable=SC2053
  if [[ $name != $only ]]; then return; fi
  log=$logs/$(printf %02d ${#names[@]})-${name//[^A-Za-z0-9]/_}.log
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 || status=$?
  case $status in
    0) result=passed ;;
    77) result=skipped ;;
    124 | 137) result="FAILED: ran longer than $limit s" ;;
    *) result="FAILED with $status" ;;
  esac
  if [[ $result == FAILED* ]]; then
    echo "== $name: $result: $*"
    echo "$(grep -c '^\[  FAILED  \].*ms)$' "$log" || true) tests failed; the beginning and the end of what it said:"
    head -n 30 "$log" | cut -c 1-300
    echo ...
    tail -n 20 "$log" | cut -c 1-300
  fi
  names+=("$name$(sed -n 's/^\[  PASSED  \] \([1-9][0-9]*\) tests*\.$/ (\1)/p' "$log")")
  results+=("$result")
  times+=($((SECONDS - started)))
  printf '%-64s %4d s  %s\n' "${names[-1]}" "${times[-1]}" "$result"
}

# GoogleTest lists a suite in a line of its own, and its tests below it.
conformance() {
  local filter='*cuda_*-*_long*' limit=560 suite gpus listed
  if ((long)); then filter='*_long*cuda_*' limit=580; fi
  while read -r suite; do
    for gpus in cuda_2gpus cuda_1gpu; do
      listed=$("$bin/moe_conformance" --gtest_list_tests --gtest_filter="$suite${filter/cuda_/$gpus}")
      if [[ $listed != *$'\n  '* ]]; then continue; fi
      run "$suite$gpus" "$limit" "$bin/moe_conformance" --gtest_brief=1 --gtest_filter="$suite${filter/cuda_/$gpus}"
    done
  done < <("$bin/moe_conformance" --gtest_list_tests --gtest_filter="$filter" | grep -v '^ ' | cut -d' ' -f1)
  if ((!long)); then
    run "Exact in graphs, cuda_2gpus" 300 env CONFORMANCE_GRAPHS=1 "$bin/moe_conformance" --gtest_brief=1 \
      --gtest_filter='*Exact*cuda_2gpus*-*_long*'
  fi
  if ((!long && MOE_PATH == 2)); then
    run "Exact with signals, cuda_2gpus" 300 env MOE_FORMAT=2 "$bin/moe_conformance" --gtest_brief=1 \
      --gtest_filter='*Exact*cuda_2gpus*-*_long*'
    run "Exact in expert slots, cuda_2gpus" 300 env MOE_SLOTS=2 MOE_FORMAT=1 "$bin/moe_conformance" --gtest_brief=1 \
      --gtest_filter='*Exact*cuda_2gpus*-*_long*'
    run "Exact in expert slots with signals, cuda_2gpus" 300 env MOE_SLOTS=2 MOE_FORMAT=2 CONFORMANCE_GRAPHS=1 \
      "$bin/moe_conformance" --gtest_brief=1 --gtest_filter='*Exact*cuda_2gpus*-*_long*'
  fi
}

hashes() {
  local layout ranks gpus
  [[ -x $bin/gpu_hash_check ]] || return 0
  for layout in views rank expert padded; do
    if ((long)); then
      run "hash $layout" 600 "$bin/gpu_hash_check" --layout "$layout" --calls 5000 --tokens 600 --stall 300
      continue
    fi
    run "hash $layout" 120 "$bin/gpu_hash_check" --layout "$layout" --calls 100 --tokens 600 --stall 300
    run "hash $layout, odd sizes" 120 "$bin/gpu_hash_check" --layout "$layout" --calls 20 --tokens 300 --hidden 121 \
      --experts 257 --topk 9
    run "hash $layout, few tokens" 120 "$bin/gpu_hash_check" --layout "$layout" --calls 300 --tokens 20 --hidden 1024 \
      --stall 100
    if [[ $layout != views ]]; then
      run "hash $layout, graphs" 120 "$bin/gpu_hash_check" --layout "$layout" --calls 1000 --tokens 256 --graphs 1 \
        --hidden 1024 --stall 30
    fi
    run "hash $layout, an absent rank" 60 "$bin/gpu_hash_check" --layout "$layout" --calls 5 --tokens 300 --absent 1
    for ranks in 3 4 8; do
      for gpus in 2 1; do
        run "hash $layout, $ranks ranks on $gpus" 120 "$bin/gpu_hash_check" --layout "$layout" --calls 30 --tokens 300 \
          --ranks "$ranks" --gpus "$gpus" --stall 300
      done
    done
  done
}

# The transport alone, where its test was brought along.
transport() {
  [[ -x $bin/moe_unit_tests ]] || return 0
  run "unit CudaIpc" 300 "$bin/moe_unit_tests" --gtest_brief=1 --gtest_filter='*Cuda*'
}

for path in ${MOE_PATH:-1 2}; do
  export MOE_PATH=$path
  conformance
  if ((!conformance_only)); then hashes; fi
done
if ((!conformance_only && !long)); then transport; fi

failed=0 passed=0
for result in ${results[@]+"${results[@]}"}; do
  case $result in
    passed) passed=$((passed + 1)) ;;
    FAILED*) failed=$((failed + 1)) ;;
  esac
done
all=${#results[@]}
echo "test_gpu.sh: $passed of $all groups passed, $failed failed, $((all - passed - failed)) skipped"
if ((all == 0)); then exit 2; fi
if ((failed)); then
  for i in "${!results[@]}"; do
    if [[ ${results[i]} == FAILED* ]]; then echo "  ${names[i]}: ${results[i]}"; fi
  done
  exit 1
fi
if ((passed == 0)); then exit 77; fi
