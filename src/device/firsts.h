// SPDX-License-Identifier: Apache-2.0
// A token goes once to each rank, and once to each expert, that its entries name.
#pragma once

#include "base/host_device.h"
#include "layout.h"

namespace moe {

constexpr uint8_t kRankFirst = 1;    // the token's first entry of its rank
constexpr uint8_t kExpertFirst = 2;  // and of its expert

// What entry `i` is the first of in its token. `ids` and `owners` are [tokens][topk], -1 for nobody.
MOE_PROTOCOL uint8_t findFirsts(const int32_t* ids, const int32_t* owners, int32_t i, const Shape& shape) {
  int32_t owner = owners[i], id = ids[i];
  if (owner < 0) return 0;
  bool rankFirst = true, expertFirst = true;
  MOE_ROLL for (int32_t before = i - static_cast<int32_t>(shape.byTopk.remainder(static_cast<uint32_t>(i))); before < i;
                ++before) {
    rankFirst = rankFirst && owners[before] != owner;
    expertFirst = expertFirst && ids[before] != id;
  }
  return static_cast<uint8_t>((rankFirst ? kRankFirst : 0) | (expertFirst ? kExpertFirst : 0));
}

// The same where a warp's lanes hold the entries of whole tokens. Of this lane's entry: the id, the owner, and the
// number of its token among them. `experts`: whether kExpertFirst is wanted. All lanes of the warp.
template <class X>
MOE_PROTOCOL uint8_t matchFirsts(const X& x, const Shape& shape, int32_t token, int32_t id, int32_t owner,
                                 bool experts) {
  bool rankFirst = x.match(owner < 0 ? -1 : token * shape.nranks + owner).below == 0;
  bool expertFirst = experts && x.match(owner < 0 ? -1 : token * shape.experts.experts + id).below == 0;
  if (owner < 0) return 0;
  return static_cast<uint8_t>((rankFirst ? kRankFirst : 0) | (expertFirst ? kExpertFirst : 0));
}

}  // namespace moe
