#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The conformance suite again with several blocks and warps per operation, which settings allow once per process. Not
# every case: those whose rows spread over blocks in another way.
set -euo pipefail
bin=$MOE_BIN
filter='ThreadRanks/Exact.*:ThreadRanks/Property.*:ThreadRanksRefusal.*:ProcessRanks/Exact.*:ProcessRanksFailure.Killed*'
filter+=':BigThreads/Exact.Rows/uneven*:BigThreads/Exact.Rows/sizes_change*:BigThreads/Exact.Rows/field_*'
for shape in '3 2' '2 1' '1 3'; do
  read -r blocks warps <<<"$shape"
  env -u MOE_BIN -u MOE_SOURCE -u MOE_BUILD MOE_HOST_BLOCKS=$blocks MOE_HOST_WARPS=$warps "$bin/moe_conformance" --gtest_brief=1 \
    --gtest_filter="$filter:-*_long*"
  # The whole filter once is enough; the other shapes see the cases with several chunks.
  filter='ThreadRanks/Exact.Rows/sizes_around*:ThreadRanks/Exact.Rows/budget*:ThreadRanks/Property.RandomCalls/2'
done
