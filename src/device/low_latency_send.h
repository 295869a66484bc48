// SPDX-License-Identifier: Apache-2.0
// The low-latency path, sending half of dispatch: payloads. A token's slot at its rank is its index, so they leave
// before anything is counted.
#pragma once

#include "device/low_latency_route.h"
#include "device/quantize.h"

namespace moe {

// Sends share `share` of `shares` of this rank's payloads. Warps work by themselves.
template <class X>
class PayloadSender {
 public:
  MOE_PROTOCOL PayloadSender(X& x, const DispatchArgs& a, const Epoch& epoch)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        routing_(a),
        epoch_(epoch),
        tag_(tagOf(epoch)),
        together_(x.lanes() >= shape_.topk) {}

  MOE_PROTOCOL void run(int share, int shares) const {
    Slices slices(x_, a_.numTokens, layout_.slot.allSlices, share, shares);
    Slices::Slice slice;
    while (slices.take(&slice)) {
      int64_t named = together_ && x_.lane() < shape_.topk ? routing_.named(slice.row, x_.lane()) : -1;
      forPayloadUnits(x_, layout_, slice.number, [&](int payload, int64_t unit, bool mine) {
        // They go with their tokens.
        if (shape_.makesScales(payload)) return true;
        bool quantized = shape_.quantizes() && payload == 0;
        QuantizedUnit data = load(payload, slice.row, unit, mine, quantized);
        int32_t goal = together_ ? goalOfLane(routing_.expert(named)) : -1;
        MOE_ROLL for (int32_t k = 0; k < shape_.topk; ++k) {
          int32_t to =
              together_ ? static_cast<int32_t>(x_.broadcast(static_cast<uint32_t>(goal), k)) : goalOf(slice.row, k);
          if (to < 0 || !mine) continue;
          std::byte* slot = windowOf(to).slot(shape_.rank, slice.row);
          x_.putUnit(slot + layout_.slot.payload[payload], unit, tag_, data.data);
          if (quantized && unit % kGroupVectors == 0) putScales(slot, unit, data.scales);
        }
        return true;
      });
    }
  }

 private:
  MOE_PROTOCOL SlotWindow windowOf(int peer) const { return SlotWindow(layout_, a_.common.windows[peer], epoch_); }

  // All lanes of the warp, with units of one block.
  MOE_PROTOCOL QuantizedUnit load(int payload, int64_t token, int64_t unit, bool mine, bool quantized) const {
    const RowsIn& in = a_.inputs[payload];
    const std::byte* row = in.data + token * in.stride;
    if (quantized) return x_.loadQuantized(row, unit, shape_.hidden, shape_.quantize == moeQuantizeUe8m0);
    QuantizedUnit data{};
    if (mine) data.data = x_.loadUnit(row, unit, shape_.payloadBytes[payload]);
    return data;
  }

  // The scales of the groups that begin with a unit's vectors, in one word.
  MOE_PROTOCOL void putScales(std::byte* slot, int64_t unit, const float* scales) const {
    std::byte* to = slot + layout_.slot.payload[Shape::kScales] + unit / kGroupVectors * kTaggedWord;
    x_.putTagged(to, tag_, __builtin_bit_cast(uint32_t, scales[0]), __builtin_bit_cast(uint32_t, scales[1]),
                 __builtin_bit_cast(uint32_t, scales[2]));
  }

  // The owner of this lane's expert, or -1 if an earlier lane's has the same. All lanes of the warp.
  MOE_PROTOCOL int32_t goalOfLane(int32_t id) const {
    int32_t owner = id >= 0 ? shape_.experts.owner(id) : -1;
    return matchFirsts(x_, shape_, 0, id, owner, false) & kRankFirst ? owner : -1;
  }

  // The same for entry `k` of a token, where it has more entries than a warp has lanes.
  MOE_PROTOCOL int32_t goalOf(int64_t token, int32_t k) const {
    int32_t id = routing_.id(token, k);
    if (id < 0) return -1;
    int32_t owner = shape_.experts.owner(id);
    MOE_ROLL for (int32_t before = 0; before < k; ++before) {
      int32_t other = routing_.id(token, before);
      if (other >= 0 && shape_.experts.owner(other) == owner) return -1;
    }
    return owner;
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Routing routing_;
  Epoch epoch_;
  uint32_t tag_;
  bool together_;  // the lanes of a warp have an entry each
};

}  // namespace moe
