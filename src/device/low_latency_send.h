// SPDX-License-Identifier: Apache-2.0
// The low-latency path, sending half of dispatch. A token's slot at its rank is its index, so payloads leave before
// anything is counted; what counting brings follows in the slot's first words.
#pragma once

#include "device/finish.h"
#include "device/firsts.h"
#include "device/low_latency_window.h"

namespace moe {

// One block's tokens: a contiguous part of all. All warps of the block call run().
template <class X>
class SlotSender {
 public:
  MOE_PROTOCOL SlotSender(X& x, const DispatchArgs& a, const Epoch& epoch)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        work_(a.common),
        handle_(a.common),
        epoch_(epoch),
        tag_(tagOf(epoch)) {
    int64_t each = ceilDiv(larger(a.numTokens, 1), workersOf(a.common));
    first_ = smaller(x.block() * each, a.numTokens);
    tokens_ = static_cast<int32_t>(smaller(each, a.numTokens - first_));
    // The block that has the last token; without tokens, the first.
    last_ = x.block() == ceilDiv(larger(a.numTokens, 1), each) - 1;
    takeMemory();
  }

  MOE_PROTOCOL void run() {
    MOE_ROLL for (int32_t i = x_.thread(); i < entries(); i += x_.threads()) readEntry(i);
    x_.barrier(true);
    MOE_ROLL for (int32_t i = x_.thread(); i < entries(); i += x_.threads()) flags_[i] =
        findFirsts(ids_, owners_, i, shape_.topk);
    x_.barrier(true);
    sendPayloads();
    if (tokens_ > 0 || last_) {
      countEarlier();
      MOE_ROLL for (int32_t i = x_.thread(); i < entries(); i += x_.threads()) sendEntry(i);
      MOE_ROLL for (int32_t i = x_.thread(); i < tokens_ * shape_.nranks; i += x_.threads()) {
        sendHead(i / shape_.nranks, i % shape_.nranks);
      }
    }
    x_.barrier(true);
    if (last_) sendCounts();
  }

  // Bytes that a block keeps of `tokens` tokens: ids, owners, bins and flags.
  MOE_HD static int64_t bytes(const Shape& shape, int64_t tokens) { return 9 * tokens * shape.topk + 4 * shape.bins(); }

 private:
  MOE_PROTOCOL int32_t entries() const { return tokens_ * shape_.topk; }
  MOE_PROTOCOL SlotWindow windowOf(int peer) const { return SlotWindow(layout_, a_.common.windows[peer], epoch_); }

  MOE_PROTOCOL void takeMemory() {
    if (std::byte* memory = x_.blockScratch(bytes(shape_, tokens_))) {
      ids_ = reinterpret_cast<int32_t*>(memory);
      owners_ = ids_ + entries();
      bins_ = owners_ + entries();
      flags_ = reinterpret_cast<uint8_t*>(bins_ + shape_.bins());
    } else {
      ids_ = a_.common.handle ? handle_.ids(first_) : nullptr;
      owners_ = work_.owners(first_);
      bins_ = work_.bins(x_.block());
      flags_ = work_.flags(first_);
    }
  }

  // The caller's id of entry `i` of the block's tokens, -1 if it is no expert's.
  MOE_PROTOCOL int32_t idOf(int64_t token, int32_t k) const {
    if (!a_.ids) return handle_.ids(token)[k];
    if (k >= a_.topk) return -1;
    int64_t at = token * a_.topk + k;
    int64_t id = a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
    return shape_.experts.valid(id) ? static_cast<int32_t>(id) : -1;
  }

  MOE_PROTOCOL void readEntry(int32_t i) {
    int64_t token = first_ + i / shape_.topk;
    int32_t k = i % shape_.topk, id = idOf(token, k);
    // In a repeated dispatch they may lie in the handle, where other blocks read them now.
    if (a_.ids || ids_ != handle_.ids(first_)) ids_[i] = id;
    owners_[i] = id >= 0 ? shape_.experts.owner(id) : -1;
    if (!a_.ids) return;
    handle_.ids(token)[k] = id;
    handle_.weights(token)[k] = id < 0 ? 0.0f : a_.weights ? a_.weights[token * a_.topk + k] : 1.0f;
  }

  // Every warp takes slices of the block's rows, and sends each unit to all ranks of its token.
  MOE_PROTOCOL void sendPayloads() const {
    Slices slices(x_, tokens_, layout_.slot.allSlices, 0, 1);
    Slices::Slice slice;
    while (slices.take(&slice)) {
      if (!travels(slice.row)) continue;
      forPayloadUnits(x_, layout_, slice.number, [&](int payload, int64_t unit) {
        sendUnit(slice.row, payload, unit);
        return true;
      });
    }
  }

  // Whether a token goes to any rank: what pads a batch goes nowhere, and is not even read.
  MOE_PROTOCOL bool travels(int64_t row) const {
    bool goes = false;
    MOE_ROLL for (int32_t k = 0; k < shape_.topk; ++k) goes = goes || flags_[row * shape_.topk + k] & kRankFirst;
    return goes;
  }

  MOE_PROTOCOL void sendUnit(int64_t row, int payload, int64_t unit) const {
    const RowsIn& in = a_.inputs[payload];
    int64_t token = first_ + row;
    Unit data = x_.loadUnit(in.data + token * in.stride, unit, shape_.payloadBytes[payload]);
    MOE_ROLL for (int32_t i = static_cast<int32_t>(row) * shape_.topk; i < (row + 1) * shape_.topk; ++i) {
      if (!(flags_[i] & kRankFirst)) continue;
      std::byte* slot = windowOf(owners_[i]).slot(shape_.rank, token);
      x_.putUnit(slot + layout_.slot.payload[payload], unit, tag_, data);
    }
  }

  // Counts, for each rank and each expert, what the tokens before the block's bring it.
  MOE_PROTOCOL void countEarlier() {
    MOE_ROLL for (int64_t bin = x_.thread(); bin < shape_.bins(); bin += x_.threads()) bins_[bin] = 0;
    x_.barrier(true);
    MOE_ROLL for (int64_t i = x_.thread(); i < first_ * shape_.topk; i += x_.threads()) {
      int64_t token = i / shape_.topk;
      auto k = static_cast<int32_t>(i % shape_.topk);
      int32_t id = idOf(token, k);
      if (id < 0) continue;
      int32_t owner = shape_.experts.owner(id);
      int32_t begin = shape_.experts.first(owner), end = begin + shape_.experts.count(owner);
      bool rankFirst = true, expertFirst = true;
      MOE_ROLL for (int32_t before = 0; before < k; ++before) {
        int32_t other = idOf(token, before);
        expertFirst = expertFirst && other != id;
        rankFirst = rankFirst && (other < begin || other >= end);
      }
      count(id, owner, rankFirst, expertFirst);
    }
    x_.barrier(true);
  }
  MOE_PROTOCOL void count(int32_t id, int32_t owner, bool rankFirst, bool expertFirst) const {
    if (rankFirst) x_.addBlock(&bins_[owner], 1);
    if (expertFirst && shape_.expertLayout()) x_.addBlock(&bins_[shape_.nranks + id], 1);
  }

  // Tells every rank the expert of an entry, its weight, and its row's index among this rank's rows for that expert.
  MOE_PROTOCOL void sendEntry(int32_t i) const {
    int64_t token = first_ + i / shape_.topk;
    int32_t k = i % shape_.topk, id = ids_[i], index = -1;
    if (shape_.expertLayout() && flags_[i] & kExpertFirst) {
      index = bins_[shape_.nranks + id];
      MOE_ROLL for (int32_t before = 0; before < i; ++before) {
        if (ids_[before] == id && flags_[before] & kExpertFirst) ++index;
      }
    }
    auto weight = __builtin_bit_cast(uint32_t, handle_.weights(token)[k]);
    MOE_ROLL for (int peer = 0; peer < shape_.nranks; ++peer) {
      x_.putTagged(windowOf(peer).word(shape_.rank, token, 1 + k), tag_, static_cast<uint32_t>(id),
                   static_cast<uint32_t>(index), weight);
    }
  }

  // Tells a rank the slot of a token's record, and which entries are firsts of their rank. The token's own rank also
  // notes to how many it goes.
  MOE_PROTOCOL void sendHead(int32_t row, int peer) const {
    uint64_t firsts = 0;
    int32_t slot = -1, begin = row * shape_.topk;
    TokenRanks ranks{-1, 0, 0};
    MOE_ROLL for (int32_t k = 0; k < shape_.topk; ++k) {
      if (!(flags_[begin + k] & kRankFirst)) continue;
      firsts |= uint64_t{1} << k;
      if (owners_[begin + k] == peer) {
        slot = bins_[peer];
        ranks.ownOrdinal = ranks.count;
      }
      if (peer == shape_.rank) handle_.goals(first_ + row)[ranks.count] = owners_[begin + k];
      ++ranks.count;
    }
    if (slot >= 0) {
      MOE_ROLL for (int32_t before = 0; before < begin; ++before) {
        if (owners_[before] == peer && flags_[before] & kRankFirst) ++slot;
      }
    }
    x_.putTagged(windowOf(peer).slot(shape_.rank, first_ + row), tag_, static_cast<uint32_t>(slot),
                 static_cast<uint32_t>(firsts), static_cast<uint32_t>(firsts >> 32));
    if (peer != shape_.rank) return;
    ranks.ownSlot = slot;
    *handle_.ranks(first_ + row) = ranks;
  }

  // Tells every rank how much comes to it. All warps of the block with the last tokens, whose counts it adds.
  MOE_PROTOCOL void sendCounts() const {
    MOE_ROLL for (int32_t i = x_.thread(); i < entries(); i += x_.threads()) {
      if (ids_[i] >= 0) count(ids_[i], owners_[i], flags_[i] & kRankFirst, flags_[i] & kExpertFirst);
    }
    x_.barrier(true);
    int64_t words = 1 + (shape_.expertLayout() ? ceilDiv(shape_.experts.count(0), 3) : 0);
    MOE_ROLL for (int64_t i = x_.thread(); i < words * shape_.nranks; i += x_.threads()) {
      auto peer = static_cast<int>(i / words);
      int64_t word = i % words;
      uint32_t data[3];
      if (word == 0) {
        data[0] = static_cast<uint32_t>(a_.numTokens);
        data[1] = static_cast<uint32_t>(bins_[peer]);
        data[2] = static_cast<uint32_t>(a_.common.refusal);
        *work_.sentRows(peer) = bins_[peer];
      } else {
        MOE_UNROLL for (int e = 0; e < 3; ++e) {
          int64_t local = 3 * (word - 1) + e;
          bool exists = local < shape_.experts.count(peer);
          data[e] = exists ? static_cast<uint32_t>(bins_[shape_.nranks + shape_.experts.first(peer) + local]) : 0;
        }
      }
      x_.putTagged(windowOf(peer).counts(shape_.rank, word), tag_, data[0], data[1], data[2]);
    }
    x_.barrier(true);
    if (x_.thread() == 0) countSent(a_);
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  Epoch epoch_;
  uint32_t tag_;
  int64_t first_;   // token of the block
  int32_t tokens_;  // of the block
  bool last_;
  // Of the block's tokens.
  int32_t* ids_;
  int32_t* owners_;
  int32_t* bins_;  // [bins] what the tokens before bring each rank and each expert
  uint8_t* flags_;
};

}  // namespace moe
