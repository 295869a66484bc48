// SPDX-License-Identifier: Apache-2.0
// The low-latency path, sending half of dispatch: payloads. A token's slot at its rank is its index, so they leave
// before anything is counted. A copy for each expert lies at the place of the token's entry.
#pragma once

#include "device/low_latency_route.h"
#include "device/quantize.h"

namespace moe {

// Sends share `share` of `shares` of this rank's payloads. Warps work by themselves.
template <class X>
class PayloadSender {
 public:
  MOE_PROTOCOL PayloadSender(X& x, const DispatchArgs& a, int share, int shares)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        routing_(a),
        together_(x.lanes() >= shape_.topk),
        share_(share),
        shares_(shares),
        slices_(x, a.numTokens, layout_.slot.bySlices, share, shares) {}

  // Loads what run() sends first, where a lane has one unit of a slice. Needs no epoch, which is on its way, too.
  MOE_PROTOCOL void lookAhead() {
    if (X::kSlices != 1) return;
    known_ = slices_.take(&slice_);
    if (!known_) return;
    named_ = named(slice_.row);
    forPayloadUnits(x_, layout_, slice_.number, [&](int payload, int64_t unit, bool mine) {
      first_ = load(payload, slice_.row, unit, mine);
      return true;
    });
  }

  MOE_PROTOCOL void run(const Epoch& epoch) {
    uint32_t tag = tagOf(epoch);
    while (known_ || slices_.take(&slice_)) {
      if (!known_) named_ = named(slice_.row);
      forPayloadUnits(x_, layout_, slice_.number, [&](int payload, int64_t unit, bool mine) {
        // They go with their tokens.
        if (shape_.makesScales(payload)) return true;
        QuantizedUnit data = known_ ? first_ : load(payload, slice_.row, unit, mine);
        bool scales = quantizes(payload) && unit % kGroupVectors == 0;
        int32_t goal = together_ ? goalOfLane(routing_.expert(named_), copyFirst()) : -1;
        MOE_ROLL for (int32_t k = 0; k < shape_.topk; ++k) {
          int32_t to = together_ ? static_cast<int32_t>(x_.broadcast(static_cast<uint32_t>(goal), k))
                                 : goalOf(slice_.row, k, copyFirst());
          if (to < 0 || !mine) continue;
          std::byte* copy = SlotWindow(layout_, a_.common.windows[to], epoch).slot(shape_.rank, slice_.row);
          if (shape_.expertSlots()) copy += k * layout_.slot.copyStride;
          if (shape_.signals()) {
            x_.storeUnit(copy + layout_.slot.payload[payload], unit, wholeVectors(shape_.payloadBytes[payload]),
                         data.data);
          } else {
            x_.putUnit(copy + layout_.slot.payload[payload], unit, tag, data.data);
          }
          if (scales) putScales(copy, unit, tag, data.scales);
        }
        return true;
      });
      known_ = false;
    }
  }

  // Tells the ranks of the share's tokens that they have come. After run() and a barrier.
  MOE_PROTOCOL void signal(const Epoch& epoch) const {
    MOE_ROLL for (int64_t token = share_ + int64_t{x_.warp()} * shares_; token < a_.numTokens;
                  token += int64_t{x_.warps()} * shares_) {
      int32_t goal = together_ ? goalOfLane(routing_.expert(named(token)), kRankFirst) : -1;
      MOE_ROLL for (int32_t k = x_.lane(); k < shape_.topk; k += x_.lanes()) {
        int32_t to = together_ ? goal : goalOf(token, k, kRankFirst);
        if (to >= 0) x_.signal(SlotWindow(layout_, a_.common.windows[to], epoch).signal(shape_.rank, token), epoch);
      }
    }
  }

 private:
  MOE_PROTOCOL bool quantizes(int payload) const { return shape_.quantizes() && payload == 0; }
  // Entries that get a copy are the first of their expert, or of their rank.
  MOE_PROTOCOL uint8_t copyFirst() const { return shape_.expertSlots() ? kExpertFirst : kRankFirst; }
  // What this lane's entry of a token names.
  MOE_PROTOCOL int64_t named(int64_t token) const {
    return together_ && x_.lane() < shape_.topk ? routing_.named(token, x_.lane()) : -1;
  }
  // All lanes of the warp, with units of one block.
  MOE_PROTOCOL QuantizedUnit load(int payload, int64_t token, int64_t unit, bool mine) const {
    if (shape_.makesScales(payload)) return {};
    const RowsIn& in = a_.inputs[payload];
    const std::byte* row = in.data + token * in.stride;
    if (quantizes(payload)) return x_.loadQuantized(row, unit, shape_.hidden, shape_.quantize == moeQuantizeUe8m0);
    QuantizedUnit data{};
    if (mine) data.data = x_.loadUnit(row, unit, shape_.payloadBytes[payload]);
    return data;
  }

  // The scales of the groups that begin with a unit's vectors, in one word.
  MOE_PROTOCOL void putScales(std::byte* slot, int64_t unit, uint32_t tag, const float* scales) const {
    std::byte* to = slot + layout_.slot.payload[Shape::kScales] + unit / kGroupVectors * kTaggedWord;
    x_.putTagged(to, tag, __builtin_bit_cast(uint32_t, scales[0]), __builtin_bit_cast(uint32_t, scales[1]),
                 __builtin_bit_cast(uint32_t, scales[2]));
  }

  // The owner of this lane's expert, or -1 if the lane's entry is not the `first` one of its rank or expert. All lanes
  // of the warp.
  MOE_PROTOCOL int32_t goalOfLane(int32_t id, uint8_t first) const {
    int32_t owner = id >= 0 ? shape_.experts.owner(id) : -1;
    return matchFirsts(x_, shape_, 0, id, owner, first == kExpertFirst) & first ? owner : -1;
  }

  // The same for entry `k` of a token, where it has more entries than a warp has lanes.
  MOE_PROTOCOL int32_t goalOf(int64_t token, int32_t k, uint8_t first) const {
    int32_t id = routing_.id(token, k);
    if (id < 0) return -1;
    int32_t owner = shape_.experts.owner(id);
    MOE_ROLL for (int32_t before = 0; before < k; ++before) {
      int32_t other = routing_.id(token, before);
      bool same = first == kExpertFirst ? other == id : other >= 0 && shape_.experts.owner(other) == owner;
      if (same) return -1;
    }
    return owner;
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Routing routing_;
  bool together_;  // the lanes of a warp have an entry each
  int share_, shares_;
  Slices slices_;
  Slices::Slice slice_{};
  int64_t named_ = -1;
  bool known_ = false;  // of slice_, this lane's unit is first_
  QuantizedUnit first_{};
};

}  // namespace moe
