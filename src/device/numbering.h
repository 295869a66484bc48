// SPDX-License-Identifier: Apache-2.0
// Numbering what tokens bring to each rank and to each expert, in token order.
//
// Numbers come from counting, not from atomics. The warps of a block take a part of its tokens each: they count, add up
// what the parts before have counted, and number their own.
#pragma once

#include "device/firsts.h"
#include "layout.h"

namespace moe {

// One warp's view of its block's tokens. Entries count from the block's first token on.
template <class X>
struct Numbering {
  int32_t* ids = nullptr;     // [tokens][topk], -1 for nobody's
  int32_t* owners = nullptr;  // [tokens][topk], -1 for nobody
  uint8_t* flags = nullptr;   // [tokens][topk], of what an entry is the first
  int32_t* bins = nullptr;    // [parts][bins]: counts, then the next number
  int32_t* next = nullptr;    // this warp's part of them

  MOE_PROTOCOL void startPart(X& x, const Shape& shape) {
    next = bins + x.warp() * shape.bins();
    MOE_ROLL for (int64_t bin = x.lane(); bin < shape.bins(); bin += x.lanes()) next[bin] = 0;
  }

  // Counts entries begin .. end-1, this warp's, and tells noteId(i, id) of each. `ids` is filled in.
  template <class NoteId>
  MOE_PROTOCOL void countPart(X& x, const Shape& shape, int32_t begin, int32_t end, NoteId noteId) const {
    bool whole = x.lanes() >= shape.topk;
    auto token = static_cast<int32_t>(shape.byTopk.divide(static_cast<uint32_t>(x.lane())));
    auto lanes = static_cast<uint32_t>(x.lanes());
    int32_t step = whole ? static_cast<int32_t>(lanes - shape.byTopk.remainder(lanes)) : x.lanes();
    MOE_ROLL for (int32_t from = begin; from < end; from += step) {
      int32_t i = from + x.lane();
      bool mine = i < end && x.lane() < step;
      int32_t id = mine ? ids[i] : -1, owner = id >= 0 ? shape.experts.owner(id) : -1;
      if (mine) owners[i] = owner;
      if (mine) noteId(i, id);
      uint8_t first = 0;
      if (whole) first = matchFirsts(x, shape, token, id, owner, shape.expertLayout());
      x.warpBarrier();
      if (mine && !whole) first = findFirsts(ids, owners, i, shape);
      if (mine) flags[i] = first;
      if (shape.expertLayout() && first & kExpertFirst) x.addShared(&next[shape.nranks + id], 1);
      int32_t rank = first & kRankFirst ? owner : -1;
      auto same = x.match(rank);
      if (rank >= 0 && same.below == 0) next[rank] += same.total;
      x.warpBarrier();
    }
  }

  // Turns the counts of a bin into what the parts before have counted; the sum of all. Between barriers of the block.
  MOE_PROTOCOL int32_t sumParts(const Shape& shape, int64_t bin, int64_t parts) const {
    int32_t sum = 0;
    MOE_ROLL for (int64_t part = 0; part < parts; ++part) {
      int32_t& counted = bins[part * shape.bins() + bin];
      int32_t count = counted;
      counted = sum;
      sum += count;
    }
    return sum;
  }

  // Numbers entries begin .. end-1, this warp's: use(i, rank, number, index). `rank` is -1 unless the entry is its
  // token's first of that rank, and `number` counts those. Expert layouts: `index` counts the firsts of the entry's
  // expert, and is -1 for others.
  template <class Use>
  MOE_PROTOCOL void number(X& x, const Shape& shape, int32_t begin, int32_t end, Use use) const {
    int32_t* nextIndex = next + shape.nranks;
    MOE_ROLL for (int32_t from = begin; from < end; from += x.lanes()) {
      int32_t i = from + x.lane();
      bool mine = i < end;
      int32_t rank = mine && flags[i] & kRankFirst ? owners[i] : -1, index = -1;
      auto sameRank = x.match(rank);
      int32_t number = rank >= 0 ? next[rank] + sameRank.below : -1;
      if (shape.expertLayout()) {
        int32_t expert = mine && flags[i] & kExpertFirst ? ids[i] : -1;
        auto sameExpert = x.match(expert);
        if (expert >= 0) index = nextIndex[expert] + sameExpert.below;
        x.warpBarrier();
        if (expert >= 0 && sameExpert.below == 0) nextIndex[expert] += sameExpert.total;
      }
      if (mine) use(i, rank, number, index);
      x.warpBarrier();
      if (rank >= 0 && sameRank.below == 0) next[rank] += sameRank.total;
      x.warpBarrier();
    }
  }
};

}  // namespace moe
