// SPDX-License-Identifier: Apache-2.0
// The low-latency path, sending half of dispatch: payloads. A token's slot at its rank is its index, so they wait for
// no rank's counts. A copy for each expert lies at the place of the token's entry.
#pragma once

#include "device/low_latency_route.h"
#include "device/quantize.h"

namespace moe {

// Sends the payloads of a block's own tokens. Warps work by themselves.
template <class X>
class PayloadSender {
 public:
  MOE_PROTOCOL PayloadSender(X& x, const DispatchArgs& a, const TokenRun& own)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        routing_(a),
        together_(x.lanes() >= shape_.topk),
        own_(own),
        slices_(x, own.count(), layout_.slot.bySlices, x.block() & (sharing(a) - 1), sharing(a), a.common.ownSpread) {}

  // Has what run() sends first brought closer. Needs no epoch, which is on its way, too.
  MOE_PROTOCOL void lookAhead() {
    known_ = take();
    if (!known_ || at_.payload < 0 || shape_.makesScales(at_.payload)) return;
    const RowsIn& in = a_.inputs[at_.payload];
    int64_t wide = quantizes(at_.payload) ? 2 : 1;
    x_.prefetchUnit(in.data + token_ * in.stride, at_.unit, wide, wide * shape_.payloadBytes[at_.payload]);
  }

  MOE_PROTOCOL void run(const Epoch& epoch) {
    uint32_t tag = tagOf(epoch);
    while (known_ || take()) {
      forPayloadUnits(x_, layout_, slice_.number, at_, [&](int payload, int64_t unit, bool mine) {
        // They go with their tokens.
        if (shape_.makesScales(payload)) return true;
        QuantizedUnit data = load(payload, unit, mine);
        bool scales = quantizes(payload) && unit % kGroupVectors == 0;
        int32_t goal = together_ ? goalOfLane(routing_.expert(named_), copyFirst()) : -1;
        MOE_ROLL for (uint64_t left = together_ ? x_.ballot(goal >= 0) : goalsOf(token_, copyFirst()); left != 0;
                      left &= left - 1) {
          int k = lowestBit(left);
          auto to = together_ ? static_cast<int32_t>(x_.broadcast(static_cast<uint32_t>(goal), k))
                              : shape_.experts.owner(routing_.id(token_, k));
          if (!mine) continue;
          std::byte* copy = SlotWindow(layout_, a_.common.windows[to], epoch).slot(shape_.rank, token_);
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

  // Tells the ranks of the block's tokens that they have come. After run() and a barrier.
  MOE_PROTOCOL void signal(const Epoch& epoch) const {
    MOE_ROLL for (int32_t token = own_.first + x_.warp(); token < own_.end; token += x_.warps()) {
      int32_t goal = together_ ? goalOfLane(routing_.expert(named(token)), kRankFirst) : -1;
      uint64_t goals = together_ ? x_.ballot(goal >= 0) : goalsOf(token, kRankFirst);
      MOE_ROLL for (int32_t k = x_.lane(); k < shape_.topk; k += x_.lanes()) {
        if (!(goals >> k & 1)) continue;
        int32_t to = together_ ? goal : shape_.experts.owner(routing_.id(token, k));
        x_.signal(SlotWindow(layout_, a_.common.windows[to], epoch).signal(shape_.rank, token), epoch);
      }
    }
  }

 private:
  // Blocks that share the run.
  MOE_PROTOCOL static int sharing(const DispatchArgs& a) { return X::kSpreads ? 1 << a.common.ownSpread : 1; }
  MOE_PROTOCOL bool quantizes(int payload) const { return shape_.quantizes() && payload == 0; }
  // Entries that get a copy are the first of their expert, or of their rank.
  MOE_PROTOCOL uint8_t copyFirst() const { return shape_.expertSlots() ? kExpertFirst : kRankFirst; }
  // Takes the next slice of a token. False after the last one.
  MOE_PROTOCOL bool take() {
    if (!slices_.take(&slice_)) return false;
    token_ = own_.first + static_cast<int32_t>(slice_.row);
    named_ = named(token_);
    at_ = firstPayloadUnit(x_, layout_, slice_.number);
    return true;
  }
  // What this lane's entry of a token names.
  MOE_PROTOCOL int64_t named(int32_t token) const {
    return together_ && x_.lane() < shape_.topk ? routing_.named(token, x_.lane()) : -1;
  }
  // A unit of what is sent of the slice's token. All lanes of the warp, with units of one block.
  MOE_PROTOCOL QuantizedUnit load(int payload, int64_t unit, bool mine) const {
    const RowsIn& in = a_.inputs[payload];
    const std::byte* row = in.data + token_ * in.stride;
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

  // A bit for each entry of a token that is the `first` one of its rank or expert.
  MOE_PROTOCOL uint64_t goalsOf(int32_t token, uint8_t first) const {
    uint64_t goals = 0;
    MOE_ROLL for (int32_t k = 0; k < shape_.topk; ++k) {
      if (routing_.entry(token, k).first & first) goals |= uint64_t{1} << k;
    }
    return goals;
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Routing routing_;
  bool together_;  // the lanes of a warp have an entry each
  TokenRun own_;
  Slices<X> slices_;
  typename Slices<X>::Slice slice_{};
  PayloadUnit at_{-1, 0, false};
  int32_t token_ = 0;   // of the slice
  int64_t named_ = -1;  // by this lane's entry of it
  bool known_ = false;  // slice_ has been taken, and not been sent
};

}  // namespace moe
