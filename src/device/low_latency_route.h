// SPDX-License-Identifier: Apache-2.0
// The low-latency path, sending half of dispatch: what is said of the tokens. A block numbers its own, from what it
// counts of those before them, and tells every rank where each row goes. One counts all, and tells how much comes.
#pragma once

#include "device/finish.h"
#include "device/firsts.h"
#include "device/low_latency_window.h"

namespace moe {

// The caller's routing, or in a repeated dispatch the handle's.
class Routing {
 public:
  MOE_PROTOCOL explicit Routing(const DispatchArgs& a) : a_(a), shape_(a.common.layout.shape), handle_(a.common) {}

  // What a token names at place `k`, and the expert that this is, -1 if it is none. Apart, so that the first need not
  // be waited for.
  MOE_PROTOCOL int64_t named(int32_t token, int32_t k) const {
    if (!a_.ids) return handle_.ids(token)[k];
    if (k >= a_.topk) return -1;
    int32_t at = token * a_.topk + k;
    return a_.wideIds ? static_cast<const int64_t*>(a_.ids)[at] : static_cast<const int32_t*>(a_.ids)[at];
  }
  MOE_PROTOCOL int32_t expert(int64_t named) const {
    return shape_.experts.valid(named) ? static_cast<int32_t>(named) : -1;
  }
  MOE_PROTOCOL int32_t id(int32_t token, int32_t k) const { return expert(named(token, k)); }
  // And its weight, if it names one.
  MOE_PROTOCOL float weight(int32_t token, int32_t k) const {
    if (!a_.ids) return handle_.weights(token)[k];
    return a_.weights && k < a_.topk ? a_.weights[token * a_.topk + k] : 1.0f;
  }
  MOE_PROTOCOL bool repeats() const { return !a_.ids; }

  // An entry, and what it is the first of in its token: see firsts.h.
  struct Entry {
    int32_t id, owner;
    uint8_t first;
  };
  MOE_PROTOCOL Entry entry(int32_t token, int32_t k) const {
    int32_t id = this->id(token, k);
    if (id < 0) return {-1, -1, 0};
    int32_t owner = shape_.experts.owner(id);
    uint8_t first = kRankFirst | kExpertFirst;
    MOE_ROLL for (int32_t before = 0; before < k; ++before) {
      int32_t other = this->id(token, before);
      if (other == id) first &= static_cast<uint8_t>(~kExpertFirst);
      if (other >= 0 && shape_.experts.owner(other) == owner) first &= static_cast<uint8_t>(~kRankFirst);
    }
    return {id, owner, first};
  }

 private:
  const DispatchArgs& a_;
  const Shape& shape_;
  HandleView handle_;
};

// What one block says. Numbers come from counting in token order, not from who comes first.
template <class X>
class SlotRouter {
 public:
  // `own`: the block's tokens.
  MOE_PROTOCOL SlotRouter(X& x, const DispatchArgs& a, const TokenRun& own)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        work_(a.common),
        handle_(a.common),
        routing_(a),
        own_(own),
        together_(x.lanes() >= shape_.topk) {
    if (together_) {
      step_ = static_cast<int32_t>(shape_.byTopk.divide(static_cast<uint32_t>(x.lanes())));
      place_ = static_cast<int32_t>(shape_.byTopk.divide(static_cast<uint32_t>(x.lane())));
      k_ = x.lane() - place_ * shape_.topk;
    }
    takeMemory();
  }

  // All warps of the block, before a barrier.
  MOE_PROTOCOL void start() {
    MOE_ROLL for (int64_t bin = x_.thread(); bin < shape_.bins(); bin += x_.threads()) bins_[bin] = 0;
    bool mine = together_ && place_ < step_ && own_.first + place_ < own_.end && x_.warp() == x_.warps() - 1;
    ahead_.named = mine ? routing_.named(own_.first + place_, k_) : -1;
    ahead_.weight = mine ? routing_.weight(own_.first + place_, k_) : 0.0f;
  }

  // Counts the tokens before the block's own. All warps of the block; a barrier must follow.
  MOE_PROTOCOL void countBefore() {
    int32_t first = own_.first, stride = x_.warps() * step_;
    MOE_ROLL for (int32_t from = x_.warp() * step_; from < first; from += kBatch * stride) {
      if (!together_) {
        MOE_ROLL for (int b = 0; b < kBatch && from + b * stride < first; ++b) countToken(from + b * stride);
        continue;
      }
      int64_t named[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        int32_t token = from + b * stride + place_;
        named[b] = place_ < step_ && token < first ? routing_.named(token, k_) : -1;
      }
      MOE_ROLL for (int b = 0; b < kBatch && from + b * stride < first; ++b) {
        countEntry(entryOf(routing_.expert(named[0])));
        MOE_UNROLL for (int later = 1; later < kBatch; ++later) named[later - 1] = named[later];
      }
    }
  }

  // Tells every rank of the block's tokens: of each entry the expert, the weight, and the index of the row among this
  // rank's rows for that expert; and the slot of each record. All lanes of one warp.
  MOE_PROTOCOL void sendNotes(const Epoch& epoch) {
    MOE_ROLL for (int32_t token = own_.first; token < own_.end; token += step_) {
      if (!together_) {
        sendToken(epoch, token);
        continue;
      }
      bool mine = place_ < step_ && token + place_ < own_.end;
      Named named = token == own_.first ? ahead_ : load(token + place_, k_, mine);
      Entry entry = entryOf(routing_.expert(named.named));
      int32_t slot = sendEntry(epoch, token + place_, k_, mine, entry, named.weight);
      sendHeads(epoch, token + place_, mine, entry, slot);
    }
  }

  // Tells every rank how much comes to it. All threads of a block that has counted all tokens.
  MOE_PROTOCOL void sendCounts(const Epoch& epoch) const {
    const Divisor& byWords = layout_.slot.byCountWords;
    uint32_t words = byWords.value() * static_cast<uint32_t>(shape_.nranks);
    MOE_ROLL for (auto i = static_cast<uint32_t>(x_.thread()); i < words; i += x_.threads()) {
      auto peer = static_cast<int>(byWords.divide(i));
      int64_t word = byWords.remainder(i);
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
      x_.putTagged(windowOf(peer, epoch).counts(shape_.rank, word), tagOf(epoch), data[0], data[1], data[2]);
    }
  }

  // Adds to the statistics what was sent. All warps of the block, after sendCounts() and a barrier.
  MOE_PROTOCOL void noteSent() const {
    if (x_.warp() != 0) return;
    if (shape_.expertSlots()) countCopies();
    if (x_.lane() == 0) countSent(a_);
  }

  // Bytes that a block keeps.
  MOE_HD static int64_t bytes(const Shape& shape) { return roundUp(4 * (shape.bins() + 2 * shape.topk), 16); }

 private:
  static constexpr int kBatch = 4;  // loads in flight per lane

  using Entry = Routing::Entry;
  struct Named {
    int64_t named;
    float weight;
  };

  MOE_PROTOCOL SlotWindow windowOf(int peer, const Epoch& epoch) const {
    return SlotWindow(layout_, a_.common.windows[peer], epoch);
  }

  MOE_PROTOCOL void takeMemory() {
    if (std::byte* memory = x_.operationScratch()) {
      bins_ = reinterpret_cast<int32_t*>(memory + warpHeadBytes(layout_, x_.warps()));
      owners_ = bins_ + shape_.bins();
      slots_ = owners_ + shape_.topk;
    } else {
      bins_ = work_.bins(x_.block());
      owners_ = work_.owners(own_.first);
      slots_ = reinterpret_cast<int32_t*>(work_.targets(own_.first));
    }
  }

  MOE_PROTOCOL Named load(int32_t token, int32_t k, bool mine) const {
    if (!mine) return {-1, 0.0f};
    return {routing_.named(token, k), routing_.weight(token, k)};
  }

  // Where lanes hold the entries of whole tokens: this lane's, of token place_ among them. All lanes of the warp.
  MOE_PROTOCOL Entry entryOf(int32_t id) const {
    int32_t owner = id >= 0 ? shape_.experts.owner(id) : -1;
    return {id, owner, matchFirsts(x_, shape_, place_, id, owner, shape_.expertLayout())};
  }
  MOE_PROTOCOL void countEntry(const Entry& entry) const {
    if (entry.first & kRankFirst) x_.addBlock(&bins_[entry.owner], 1);
    if (shape_.expertLayout() && entry.first & kExpertFirst) x_.addBlock(&bins_[shape_.nranks + entry.id], 1);
  }
  MOE_PROTOCOL void countToken(int32_t token) const {
    MOE_ROLL for (int32_t k = x_.lane(); k < shape_.topk; k += x_.lanes()) countEntry(routing_.entry(token, k));
  }

  // Counts one more for each lane's bin, and returns what it was before, in the order of the lanes. All lanes of the
  // warp; -1 if there is no bin.
  MOE_PROTOCOL int32_t numberIn(int32_t* bins, int32_t bin) const {
    // Entries of one token have bins of their own.
    typename X::Match same{0, 1};
    if (own_.count() > 1) same = x_.match(bin);
    int32_t number = bin >= 0 ? bins[bin] + same.below : -1;
    x_.warpBarrier();
    if (bin >= 0 && same.below == 0) bins[bin] = number + same.total;
    x_.warpBarrier();
    return number;
  }

  // Returns the slot of the record if the entry is the first of its rank. All lanes of the warp; those without an entry
  // are not `mine`.
  MOE_PROTOCOL int32_t sendEntry(const Epoch& epoch, int32_t token, int32_t k, bool mine, const Entry& entry,
                                 float weight) const {
    int32_t slot = numberIn(bins_, entry.first & kRankFirst ? entry.owner : -1), index = -1;
    if (shape_.expertLayout()) index = numberIn(bins_ + shape_.nranks, entry.first & kExpertFirst ? entry.id : -1);
    if (!mine) return -1;
    if (entry.id < 0) weight = 0.0f;
    MOE_ROLL for (int peer = 0; peer < shape_.nranks; ++peer) {
      x_.putTagged(windowOf(peer, epoch).word(shape_.rank, token, 1 + k), tagOf(epoch), static_cast<uint32_t>(entry.id),
                   static_cast<uint32_t>(index), __builtin_bit_cast(uint32_t, weight));
    }
    // A repeated dispatch finds them there.
    if (!routing_.repeats()) {
      handle_.ids(token)[k] = entry.id;
      handle_.weights(token)[k] = weight;
    }
    return slot;
  }

  // Where lanes hold the entries of whole tokens: tells every rank the slots of its records, -1 if it has none, and
  // which entries are firsts of their rank; and notes where the tokens go. All lanes of the warp.
  MOE_PROTOCOL void sendHeads(const Epoch& epoch, int32_t token, bool mine, const Entry& entry, int32_t slot) const {
    int begin = place_ * shape_.topk;
    uint32_t width = shape_.topk < 32 ? (1u << shape_.topk) - 1 : ~0u;
    auto ofToken = [&](uint32_t lanes) { return mine ? lanes >> begin & width : 0; };
    bool first = entry.first & kRankFirst;
    uint32_t firsts = ofToken(x_.ballot(first));
    TokenRanks ranks{-1, static_cast<int16_t>(popcount(firsts)), 0};
    MOE_ROLL for (int peer = 0; peer < shape_.nranks; ++peer) {
      uint32_t at = ofToken(x_.ballot(first && entry.owner == peer));
      int32_t found =
          static_cast<int32_t>(x_.broadcast(static_cast<uint32_t>(slot), at != 0 ? begin + lowestBit(at) : x_.lane()));
      if (at == 0) found = -1;
      if (peer == shape_.rank && at != 0) {
        ranks.ownSlot = found;
        ranks.ownOrdinal = static_cast<int16_t>(popcount(firsts & (at - 1)));
      }
      if (!mine || k_ != 0) continue;
      std::byte* word = windowOf(peer, epoch).slot(shape_.rank, token);
      x_.putTagged(word, tagOf(epoch), static_cast<uint32_t>(found), firsts, 0);
    }
    if (mine && first) handle_.goals(token)[popcount(firsts & ((1u << k_) - 1))] = entry.owner;
    if (mine && k_ == 0) *handle_.ranks(token) = ranks;
  }

  // The same for any token, whose entries are taken one after the other. All lanes of the warp.
  MOE_PROTOCOL void sendToken(const Epoch& epoch, int32_t token) const {
    TokenRanks ranks{-1, 0, 0};
    uint64_t firsts = 0;
    MOE_ROLL for (int32_t from = 0; from < shape_.topk; from += x_.lanes()) {
      int32_t k = from + x_.lane();
      bool mine = k < shape_.topk;
      Entry entry = mine ? routing_.entry(token, k) : Entry{-1, -1, 0};
      int32_t slot = sendEntry(epoch, token, k, mine, entry, load(token, k, mine).weight);
      if (mine) slots_[k] = slot;
      if (mine) owners_[k] = entry.owner;
      firsts |= uint64_t{x_.ballot(entry.first & kRankFirst)} << from;
    }
    x_.warpBarrier();
    ranks.count = static_cast<int16_t>(popcount(firsts));
    MOE_ROLL for (int peer = x_.lane(); peer < shape_.nranks; peer += x_.lanes()) {
      int32_t slot = -1;
      int16_t ordinal = 0;
      MOE_ROLL for (uint64_t left = firsts; left != 0; left &= left - 1, ++ordinal) {
        int k = lowestBit(left);
        if (peer == shape_.rank) handle_.goals(token)[ordinal] = owners_[k];
        if (owners_[k] != peer) continue;
        slot = slots_[k];
        ranks.ownOrdinal = ordinal;
      }
      x_.putTagged(windowOf(peer, epoch).slot(shape_.rank, token), tagOf(epoch), static_cast<uint32_t>(slot),
                   static_cast<uint32_t>(firsts), static_cast<uint32_t>(firsts >> 32));
      ranks.ownSlot = slot;
      if (peer == shape_.rank) *handle_.ranks(token) = ranks;
    }
    x_.warpBarrier();
  }

  // Where experts get copies, those are the rows that were sent. All lanes of a warp.
  MOE_PROTOCOL void countCopies() const {
    MOE_ROLL for (int peer = 0; peer < shape_.nranks; ++peer) {
      int32_t copies = 0;
      MOE_ROLL for (int32_t e = x_.lane(); e < shape_.experts.count(peer); e += x_.lanes()) {
        copies += bins_[shape_.nranks + shape_.experts.first(peer) + e];
      }
      copies = x_.scan(copies).total;
      if (x_.lane() == 0) *work_.sentRows(peer) = copies;
    }
    x_.warpBarrier();
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  Workspace work_;
  HandleView handle_;
  Routing routing_;
  TokenRun own_;
  bool together_;  // lanes hold the entries of step_ whole tokens: this one entry k_ of token place_
  int32_t step_ = 1, place_ = 0, k_ = 0;
  Named ahead_{-1, 0.0f};  // of the first of the block's tokens
  int32_t* bins_;          // [bins] what was counted
  int32_t* owners_;        // [topk] of a token, if not together
  int32_t* slots_;         // [topk] of its records
};

}  // namespace moe
