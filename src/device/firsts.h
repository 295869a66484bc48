// SPDX-License-Identifier: Apache-2.0
// A token goes once to each rank, and once to each expert, that its entries name.
#pragma once

#include "base/host_device.h"

namespace moe {

constexpr uint8_t kRankFirst = 1;    // the token's first entry of its rank
constexpr uint8_t kExpertFirst = 2;  // and of its expert

// What entry `i` is the first of in its token. `ids` and `owners` are [tokens][topk], -1 for nobody.
MOE_PROTOCOL uint8_t findFirsts(const int32_t* ids, const int32_t* owners, int32_t i, int32_t topk) {
  int32_t owner = owners[i], id = ids[i];
  if (owner < 0) return 0;
  bool rankFirst = true, expertFirst = true;
  MOE_ROLL for (int32_t before = i - i % topk; before < i; ++before) {
    rankFirst = rankFirst && owners[before] != owner;
    expertFirst = expertFirst && ids[before] != id;
  }
  return static_cast<uint8_t>((rankFirst ? kRankFirst : 0) | (expertFirst ? kExpertFirst : 0));
}

}  // namespace moe
