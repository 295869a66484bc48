#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The conformance suite again with several blocks and warps per operation, which settings allow once per process. Not
# every case: those whose rows spread over blocks in another way.
set -euo pipefail
binary=$MOE_BIN/moe_conformance
# The library would warn of names that are no settings of its own.
unset MOE_BIN MOE_SOURCE MOE_BUILD

# run BLOCKS WARPS FILTER...
run() {
  local blocks=$1 warps=$2 filter
  shift 2
  filter=$(IFS=:; echo "$*")
  MOE_HOST_BLOCKS=$blocks MOE_HOST_WARPS=$warps "$binary" --gtest_brief=1 --gtest_filter="$filter:-*_long*"
}

run 3 2 'ThreadRanks/Exact.*' 'ThreadRanks/Property.*' 'ThreadRanks/ThreadRanksRefusal.*' 'ProcessRanks/Exact.*' \
  'ProcessRanks/ProcessRanksFailure.Killed*' 'BigThreads/Exact.Rows/uneven*' 'BigThreads/Exact.Rows/sizes_change*' \
  'BigThreads/Exact.Rows/field_*'
MOE_PATH=2 run 3 2 'ThreadRanks/Exact.*' 'ThreadRanks/Property.*' 'ThreadRanks/ThreadRanksRefusal.*'
MOE_PATH=2 MOE_FORMAT=2 run 3 2 'ThreadRanks/Exact.*' 'ThreadRanks/Property.*'
MOE_PATH=2 MOE_SLOTS=2 run 3 2 'ThreadRanks/Exact.*' 'ThreadRanks/Property.*'
run 2 1 'ThreadRanks/Exact.Rows/sizes_around*' 'ThreadRanks/Exact.Rows/budget*' 'ThreadRanks/Property.RandomCalls/1'
run 1 3 'ThreadRanks/Exact.Rows/sizes_around*' 'ThreadRanks/Exact.Rows/budget*' 'ThreadRanks/Property.RandomCalls/2'
