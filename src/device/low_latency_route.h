// SPDX-License-Identifier: Apache-2.0
// The low-latency path, sending half of dispatch: what is said of the tokens. One block counts and numbers all of this
// rank's tokens, while the others send the payloads, and tells every rank how much comes to it and where each row goes.
#pragma once

#include "device/finish.h"
#include "device/low_latency_window.h"
#include "device/numbering.h"

namespace moe {

// The caller's routing, or in a repeated dispatch the handle's.
class Routing {
 public:
  MOE_PROTOCOL explicit Routing(const DispatchArgs& a) : a_(a), shape_(a.common.layout.shape), handle_(a.common) {}

  // What a token names at place `k`, and the expert that this is, -1 if it is none. Apart, so that the first need not
  // be waited for.
  MOE_PROTOCOL int64_t named(int64_t token, int32_t k) const {
    if (!a_.ids) return handle_.ids(token)[k];
    if (k >= a_.topk) return -1;
    int64_t at = token * a_.topk + k;
    return a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
  }
  MOE_PROTOCOL int32_t expert(int64_t named) const {
    return shape_.experts.valid(named) ? static_cast<int32_t>(named) : -1;
  }
  MOE_PROTOCOL int32_t id(int64_t token, int32_t k) const { return expert(named(token, k)); }
  // And its weight, if it names one.
  MOE_PROTOCOL float weight(int64_t token, int32_t k) const {
    if (!a_.ids) return handle_.weights(token)[k];
    return a_.weights && k < a_.topk ? a_.weights[token * a_.topk + k] : 1.0f;
  }
  MOE_PROTOCOL bool repeats() const { return !a_.ids; }

 private:
  const DispatchArgs& a_;
  const Shape& shape_;
  HandleView handle_;
};

// All warps of one block call count(), and run() once the peers' buffers may be written and a barrier has passed.
template <class X>
class SlotRouter {
 public:
  MOE_PROTOCOL SlotRouter(X& x, const DispatchArgs& a)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        work_(a.common),
        handle_(a.common),
        routing_(a),
        entries_(static_cast<int32_t>(a.numTokens) * shape_.topk) {
    auto tokens = static_cast<uint32_t>(a.numTokens), warps = static_cast<uint32_t>(x.warps());
    uint32_t parts = warps < kMaxParts ? warps : static_cast<uint32_t>(kMaxParts);
    if (tokens < parts) parts = tokens > 0 ? tokens : 1;
    auto each = static_cast<int32_t>((tokens + parts - 1) / parts) * shape_.topk;
    parts_ = static_cast<int32_t>(parts);
    begin_ = static_cast<int32_t>(smaller(int64_t{x.warp()} * each, entries_));
    end_ = static_cast<int32_t>(smaller(begin_ + int64_t{each}, entries_));
    takeMemory();
  }

  MOE_PROTOCOL void count() {
    if (x_.warp() < parts_) countPart();
  }

  MOE_PROTOCOL void run(const Epoch& epoch) {
    MOE_ROLL for (int64_t bin = x_.thread(); bin < shape_.bins(); bin += x_.threads()) {
      sums_[bin] = own_.sumParts(shape_, bin, parts_);
    }
    x_.barrier(true);
    // By the last warps, which often have no part.
    sendCounts(epoch, x_.threads() - 1 - x_.thread());
    if (x_.warp() < parts_) sendPart(epoch);
    x_.barrier(true);
    if (shape_.expertSlots() && x_.warp() == 0) countCopies();
    if (x_.thread() == 0) countSent(a_);
  }

  // Bytes that the block keeps of `tokens` tokens.
  MOE_HD static int64_t bytes(const Shape& shape, int64_t tokens) {
    return 17 * tokens * shape.topk + 4 * (kMaxParts + 1) * shape.bins();
  }

 private:
  static constexpr int kBatch = 4;  // loads in flight per lane

  MOE_PROTOCOL SlotWindow windowOf(int peer, const Epoch& epoch) const {
    return SlotWindow(layout_, a_.common.windows[peer], epoch);
  }
  // The token that entry `i` is of.
  MOE_PROTOCOL int32_t tokenOf(int32_t i) const {
    return static_cast<int32_t>(shape_.byTopk.divide(static_cast<uint32_t>(i)));
  }

  MOE_PROTOCOL void takeMemory() {
    if (std::byte* memory = x_.operationScratch()) {
      own_.ids = reinterpret_cast<int32_t*>(memory);
      own_.owners = own_.ids + entries_;
      numbers_ = own_.owners + entries_;
      weights_ = reinterpret_cast<float*>(numbers_ + entries_);
      own_.bins = reinterpret_cast<int32_t*>(weights_ + entries_);
      sums_ = own_.bins + kMaxParts * shape_.bins();
      own_.flags = reinterpret_cast<uint8_t*>(sums_ + shape_.bins());
    } else {
      own_.ids = a_.common.handle ? handle_.ids(0) : nullptr;
      own_.owners = work_.owners(0);
      numbers_ = reinterpret_cast<int32_t*>(work_.targets(0));
      weights_ = a_.common.handle ? handle_.weights(0) : nullptr;
      own_.bins = work_.bins(x_.block());
      sums_ = work_.histogram(x_.block());
      own_.flags = work_.flags(0);
    }
  }

  // Reads this warp's entries, keeps them in the handle, and counts.
  MOE_PROTOCOL void countPart() {
    own_.startPart(x_, shape_);
    MOE_ROLL for (int32_t from = begin_; from < end_; from += kBatch * x_.lanes()) readEntries(from);
    x_.warpBarrier();
    own_.countPart(x_, shape_, begin_, end_, [](int32_t, int32_t) {});
  }

  MOE_PROTOCOL void readEntries(int32_t from) {
    int64_t named[kBatch];
    float weight[kBatch];
    MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
      int32_t i = from + b * x_.lanes() + x_.lane(), token = tokenOf(i), k = i - token * shape_.topk;
      named[b] = i < end_ ? routing_.named(token, k) : -1;
      weight[b] = i < end_ ? routing_.weight(token, k) : 0.0f;
    }
    // In a repeated dispatch they may lie in the handle, where other blocks read them now.
    bool inHandle = own_.ids == handle_.ids(0);
    MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
      int32_t i = from + b * x_.lanes() + x_.lane();
      if (i >= end_ || (routing_.repeats() && inHandle)) continue;
      int32_t id = routing_.expert(named[b]);
      own_.ids[i] = id;
      weights_[i] = id < 0 ? 0.0f : weight[b];
      if (routing_.repeats() || inHandle) continue;
      handle_.ids(0)[i] = id;
      handle_.weights(0)[i] = weights_[i];
    }
  }

  // Tells every rank how much comes to it. `thread`: number of this thread, as far as this goes.
  MOE_PROTOCOL void sendCounts(const Epoch& epoch, int thread) const {
    const Divisor& byWords = layout_.slot.byCountWords;
    uint32_t words = byWords.value() * static_cast<uint32_t>(shape_.nranks);
    MOE_ROLL for (auto i = static_cast<uint32_t>(thread); i < words; i += x_.threads()) {
      auto peer = static_cast<int>(byWords.divide(i));
      int64_t word = byWords.remainder(i);
      uint32_t data[3];
      if (word == 0) {
        data[0] = static_cast<uint32_t>(a_.numTokens);
        data[1] = static_cast<uint32_t>(sums_[peer]);
        data[2] = static_cast<uint32_t>(a_.common.refusal);
        *work_.sentRows(peer) = sums_[peer];
      } else {
        MOE_UNROLL for (int e = 0; e < 3; ++e) {
          int64_t local = 3 * (word - 1) + e;
          bool exists = local < shape_.experts.count(peer);
          data[e] = exists ? static_cast<uint32_t>(sums_[shape_.nranks + shape_.experts.first(peer) + local]) : 0;
        }
      }
      x_.putTagged(windowOf(peer, epoch).counts(shape_.rank, word), tagOf(epoch), data[0], data[1], data[2]);
    }
  }

  // Where experts get copies, those are the rows that were sent. All lanes of a warp.
  MOE_PROTOCOL void countCopies() const {
    MOE_ROLL for (int peer = 0; peer < shape_.nranks; ++peer) {
      int32_t copies = 0;
      MOE_ROLL for (int32_t e = x_.lane(); e < shape_.experts.count(peer); e += x_.lanes()) {
        copies += sums_[shape_.nranks + shape_.experts.first(peer) + e];
      }
      copies = x_.scan(copies).total;
      if (x_.lane() == 0) *work_.sentRows(peer) = copies;
    }
    x_.warpBarrier();
  }

  // Numbers this warp's entries and tells every rank of them: the expert, the weight, and the index of the row among
  // this rank's rows for that expert.
  MOE_PROTOCOL void sendPart(const Epoch& epoch) const {
    own_.number(x_, shape_, begin_, end_, [&](int32_t i, int32_t, int32_t number, int32_t index) {
      numbers_[i] = number;
      int32_t token = tokenOf(i), k = i - token * shape_.topk;
      MOE_ROLL for (int peer = 0; peer < shape_.nranks; ++peer) {
        x_.putTagged(windowOf(peer, epoch).word(shape_.rank, token, 1 + k), tagOf(epoch),
                     static_cast<uint32_t>(own_.ids[i]), static_cast<uint32_t>(index),
                     __builtin_bit_cast(uint32_t, weights_[i]));
      }
    });
    int32_t first = tokenOf(begin_), heads = (tokenOf(end_) - first) * shape_.nranks;
    MOE_ROLL for (int32_t i = x_.lane(); i < heads; i += x_.lanes()) {
      auto token = static_cast<int32_t>(shape_.byRanks.divide(static_cast<uint32_t>(i)));
      sendHead(epoch, first + token, i - token * shape_.nranks);
    }
  }

  // Tells a rank the slot of a token's record, -1 if it has none, and which entries are firsts of their rank. The
  // token's own rank also notes where it goes.
  MOE_PROTOCOL void sendHead(const Epoch& epoch, int32_t token, int peer) const {
    uint64_t firsts = 0;
    int32_t slot = -1, begin = token * shape_.topk;
    TokenRanks ranks{-1, 0, 0};
    MOE_ROLL for (int32_t k = 0; k < shape_.topk; ++k) {
      if (!(own_.flags[begin + k] & kRankFirst)) continue;
      firsts |= uint64_t{1} << k;
      if (own_.owners[begin + k] == peer) {
        slot = numbers_[begin + k];
        ranks.ownOrdinal = ranks.count;
      }
      if (peer == shape_.rank) handle_.goals(token)[ranks.count] = own_.owners[begin + k];
      ++ranks.count;
    }
    x_.putTagged(windowOf(peer, epoch).slot(shape_.rank, token), tagOf(epoch), static_cast<uint32_t>(slot),
                 static_cast<uint32_t>(firsts), static_cast<uint32_t>(firsts >> 32));
    if (peer != shape_.rank) return;
    ranks.ownSlot = slot;
    *handle_.ranks(token) = ranks;
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  Routing routing_;
  int32_t entries_;      // of all tokens
  int32_t begin_, end_;  // this warp's
  int32_t parts_;
  Numbering<X> own_;
  int32_t* numbers_;  // [tokens][topk] of the firsts of their rank: slots
  float* weights_;    // [tokens][topk]
  int32_t* sums_;     // [bins]
};

}  // namespace moe
