// SPDX-License-Identifier: Apache-2.0
// The low-latency path's combine: partial rows travel with their tags, or with signals, and are added as they arrive.
#pragma once

#include "device/expert_rows.h"
#include "device/finish.h"
#include "device/low_latency_start.h"
#include "device/low_latency_window.h"
#include "device/numbers.h"

namespace moe {

// The sum of units, in fp32, in the order in which they come. Multiplication and addition round apart.
template <class Number>
class UnitSum {
 public:
  MOE_PROTOCOL void add(const Unit& unit, bool weighted, float weight) {
    MOE_UNROLL for (int e = 0; e < kCount; ++e) {
      float value = Number::load(element(unit, e));
      if (weighted) value = weight * value;
      values_[e] = any_ ? values_[e] + value : value;
    }
    any_ = true;
  }
  MOE_PROTOCOL Unit rounded() const {
    Unit unit{};
    MOE_UNROLL for (int e = 0; e < kCount; ++e) {
      if constexpr (sizeof(Number) == 4) {
        unit.words[e] = __builtin_bit_cast(uint32_t, Number::store(values_[e]));
      } else {
        auto bits = __builtin_bit_cast(uint16_t, Number::store(values_[e]));
        unit.words[e / 2] |= uint32_t{bits} << (16 * (e % 2));
      }
    }
    return unit;
  }

 private:
  static constexpr int kCount = static_cast<int>(kUnitBytes / static_cast<int64_t>(sizeof(Number)));

  MOE_PROTOCOL static Number element(const Unit& unit, int e) {
    if constexpr (sizeof(Number) == 4) {
      return __builtin_bit_cast(Number, unit.words[e]);
    } else {
      return __builtin_bit_cast(Number, static_cast<uint16_t>(unit.words[e / 2] >> (16 * (e % 2))));
    }
  }

  float values_[kCount]{};
  bool any_ = false;
};

// One block's part of a combine. What the first slices need is looked up before anything is waited for.
template <class X>
class SlotCombine {
 public:
  // Of share `share` of `shares` of both halves.
  MOE_PROTOCOL SlotCombine(X& x, const CombineArgs& a, int share, int shares)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        handle_(a.common),
        units_(rowUnits(shape_.combineRowBytes)),
        together_(x.lanes() >= shape_.topk),
        share_(share),
        shares_(shares) {}

  // Before anything but lookAhead().
  MOE_PROTOCOL void setEpoch(const Epoch& epoch) {
    epoch_ = epoch;
    tag_ = tagOf(epoch);
  }

  // Tells every source which dispatch this rank combines, or that it refuses to.
  MOE_PROTOCOL void sendHeads() const {
    uint64_t dispatched = a_.common.handle ? a_.common.handleHead()->dispatchEpoch : 0;
    MOE_ROLL for (int peer = x_.thread(); peer < shape_.nranks; peer += x_.threads()) {
      x_.putTagged(windowOf(peer).head(shape_.rank), tag_, static_cast<uint32_t>(dispatched),
                   static_cast<uint32_t>(a_.common.refusal), 0);
    }
  }

  // Loads what is known of the record whose rows are sent first.
  MOE_PROTOCOL void lookAhead() {
    slices_ = slicesOf(shape_.maxTokens * shape_.nranks);
    some_ = slices_.take(&slice_);
    if (some_) record_ = look(slice_.row);
  }

  // Adds this share's rows and sends them, once `allow` says that they may be. False if it does not.
  template <class Number, class Allow>
  MOE_PROTOCOL bool sendRows(Allow allow) {
    Unit first{};  // of this lane, added before the wait where a lane has one unit of a slice
    bool added = some_ && X::kSlices == 1 && record_.slot < record_.sourceRows;
    int64_t unit = slice_.number * X::kSlices * kUnitsPerBlock + x_.lane();
    if (added) first = unitOf<Number>(record_, unit, unit < units_);
    slices_.limit(mostRows() * shape_.nranks);
    if (!allow()) return false;
    while (some_) {
      if (record_.slot < record_.sourceRows) sendSlice<Number>(record_, slice_.number, added, first);
      added = false;
      some_ = slices_.take(&slice_);
      if (some_) record_ = look(slice_.row);
    }
    return true;
  }

  // Tells the sources of the share's records that their rows have come. After sendRows() and a barrier.
  MOE_PROTOCOL void signalRows() const {
    auto rows = static_cast<uint32_t>(mostRows() * shape_.nranks), shares = static_cast<uint32_t>(shares_);
    MOE_ROLL for (auto row = static_cast<uint32_t>(share_ + x_.thread() * shares_); row < rows;
                  row += static_cast<uint32_t>(x_.threads()) * shares) {
      uint32_t slot = shape_.byRanks.divide(row);
      auto source = static_cast<int>(shape_.byRanks.remainder(row));
      if (slot >= *handle_.sourceRows(source)) continue;
      x_.signal(windowOf(source).signal(*handle_.token(source, slot), *handle_.ordinal(source, slot)), epoch_);
    }
  }

  // Waits for the heads of all senders. All threads of the block get the same refusal; false after a failure.
  MOE_PROTOCOL bool awaitHeads(Refusal* refusal) const {
    bool ok = true, fine = true;
    MOE_ROLL for (int sender = x_.thread(); ok && sender < shape_.nranks; sender += x_.threads()) {
      Refusal found{};
      ok = takeHead(sender, &found);
      fine = fine && ok && found.code == 0;
    }
    *refusal = {0, 0, 0, 0};
    if (x_.barrier(fine)) return true;
    if (!x_.barrier(ok)) return false;
    MOE_ROLL for (int sender = 0; refusal->code == 0 && sender < shape_.nranks; ++sender) {
      if (!takeHead(sender, refusal)) return false;
    }
    return true;
  }

  // Adds this share's partial rows, once `heads` says that they are in order. False if it does not, or after a failure.
  template <class Number, class Heads>
  MOE_PROTOCOL bool receiveRows(Heads heads) const {
    Slices<X> slices = slicesOf(a_.common.handleHead()->numTokens);
    typename Slices<X>::Slice slice{};
    TokenRanks ranks{};
    bool some = slices.take(&slice);
    if (some) ranks = *handle_.ranks(slice.row);
    if (!heads()) return false;
    while (some) {
      if (!receiveSlice<Number>(slice, ranks.count)) return false;
      some = slices.take(&slice);
      if (some) ranks = *handle_.ranks(slice.row);
    }
    return true;
  }

 private:
  // A record whose rows are added, and what this lane knows of it: the row of entry `lane` and its weight.
  struct Record {
    int source;
    int64_t slot, sourceRows;
    int32_t token, ordinal;
    int32_t row;
    float weight;
  };

  MOE_PROTOCOL PartialWindow windowOf(int peer) const {
    return PartialWindow(layout_, a_.common.windows[peer], epoch_);
  }
  MOE_PROTOCOL Slices<X> slicesOf(int64_t rows) const {
    return Slices<X>(x_, rows, layout_.window.byRowSlices, share_, shares_, 0);
  }

  // Records of the source that has most. All lanes of the warp.
  MOE_PROTOCOL int64_t mostRows() const {
    int32_t most = 0;
    MOE_ROLL for (int source = x_.lane(); source < shape_.nranks; source += x_.lanes()) {
      most = static_cast<int32_t>(larger(most, *handle_.sourceRows(source)));
    }
    return x_.warpMax(most);
  }

  // Row `row` of all sources' records in turn. Whether the source has it need not be known to load what would be there.
  MOE_PROTOCOL Record look(uint32_t row) const {
    uint32_t slot = shape_.byRanks.divide(row);
    Record record{static_cast<int>(row - slot * shape_.byRanks.value()), slot, 0, 0, 0, -1, 0.0f};
    record.sourceRows = *handle_.sourceRows(record.source);
    record.token = *handle_.token(record.source, record.slot);
    record.ordinal = *handle_.ordinal(record.source, record.slot);
    if (!shape_.expertLayout() || !together_ || x_.lane() >= shape_.topk) return record;
    record.row = handle_.rows(record.source, record.slot)[x_.lane()];
    record.weight = handle_.rowWeights(record.source, record.slot)[x_.lane()];
    return record;
  }

  // `first` is this lane's first unit if it was `added` already. All lanes of the warp.
  template <class Number>
  MOE_PROTOCOL void sendSlice(const Record& record, int32_t number, bool added, const Unit& first) const {
    std::byte* row = windowOf(record.source).row(record.token, record.ordinal);
    forUnits(x_, units_, number, [&](int64_t unit, bool mine) {
      Unit sum = added ? first : unitOf<Number>(record, unit, mine);
      if (mine && shape_.signals()) x_.storeUnit(row, unit, wholeVectors(shape_.combineRowBytes), sum);
      if (mine && !shape_.signals()) x_.putUnit(row, unit, tag_, sum);
      return true;
    });
  }

  // Adds a slice of the `count` partial rows of a token. All lanes of the warp; false after a failure.
  template <class Number>
  MOE_PROTOCOL bool receiveSlice(const typename Slices<X>::Slice& slice, int count) const {
    PartialWindow window = windowOf(shape_.rank);
    std::byte* out = a_.output.data + slice.row * a_.output.stride;
    MOE_ROLL for (int ordinal = 0; shape_.signals() && ordinal < count; ++ordinal) {
      bool came =
          x_.wait(window.signal(slice.row, ordinal), epoch_, Awaited::kCombineRows, handle_.goals(slice.row)[ordinal]);
      if (!x_.warpAll(came)) return false;
    }
    return forUnits(x_, units_, slice.number, [&](int64_t unit, bool mine) {
      if (!mine) return true;
      UnitSum<Number> sum;
      // A look at the next row's words, while this one's are added.
      typename X::Peek next{};
      bool tags = !shape_.signals();
      if (tags && count > 0) next = x_.peekUnit(window.row(slice.row, 0), unit);
      MOE_ROLL for (int ordinal = 0; ordinal < count; ++ordinal) {
        Unit partial;
        typename X::Peek peek = next;
        if (tags && ordinal + 1 < count) next = x_.peekUnit(window.row(slice.row, ordinal + 1), unit);
        if (!tags) {
          partial = x_.loadUnit(window.row(slice.row, ordinal), unit, wholeVectors(shape_.combineRowBytes));
        } else if (!x_.takePeek(peek, tag_, &partial)) {
          int sender = handle_.goals(slice.row)[ordinal];
          const std::byte* row = window.row(slice.row, ordinal);
          if (!x_.getUnit(row, unit, tag_, Awaited::kCombineRows, sender, &partial)) return false;
        }
        sum.add(partial, false, 1.0f);
      }
      x_.storeUnit(out, unit, shape_.combineRowBytes, sum.rounded());
      return true;
    });
  }

  // A unit of what is sent of a record. All lanes of the warp; zeros for those whose unit does not exist.
  template <class Number>
  MOE_PROTOCOL Unit unitOf(const Record& record, int64_t unit, bool mine) const {
    if (shape_.expertLayout()) return sumOf<Number>(record, unit, mine);
    ExpertRows outputs(a_);
    const std::byte* row = outputs.row(record.source, record.slot, *handle_.sourceFirst(record.source));
    return row && mine ? x_.loadUnit(row, unit, shape_.combineRowBytes) : Unit{};
  }

  // A unit of the sum of a record's rows.
  template <class Number>
  MOE_PROTOCOL Unit sumOf(const Record& record, int64_t unit, bool mine) const {
    constexpr int kBatch = 4;  // loads in flight
    UnitSum<Number> sum;
    const int32_t* rows = handle_.rows(record.source, record.slot);
    const float* weights = handle_.rowWeights(record.source, record.slot);
    MOE_ROLL for (int from = 0; from < shape_.topk; from += kBatch) {
      int32_t row[kBatch];
      float weight[kBatch];
      Unit data[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        int k = from + b;
        bool there = k < shape_.topk;
        if (together_) {
          row[b] = static_cast<int32_t>(x_.broadcast(static_cast<uint32_t>(record.row), k));
          weight[b] = __builtin_bit_cast(float, x_.broadcast(__builtin_bit_cast(uint32_t, record.weight), k));
        } else {
          row[b] = there ? rows[k] : -1;
          weight[b] = there ? weights[k] : 0.0f;
        }
        if (!there || !mine) row[b] = -1;
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        if (row[b] >= 0) data[b] = x_.loadUnit(a_.rows.data + row[b] * a_.rows.stride, unit, shape_.combineRowBytes);
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        if (row[b] >= 0) sum.add(data[b], a_.applyWeights, weight[b]);
      }
    }
    return sum.rounded();
  }

  // A sender's refusal, or a handle of another dispatch.
  MOE_PROTOCOL bool takeHead(int sender, Refusal* refusal) const {
    uint32_t head[3];
    if (!x_.getTagged(windowOf(shape_.rank).head(sender), tag_, Awaited::kCombineHead, sender, head)) return false;
    uint64_t mine = a_.common.handle ? a_.common.handleHead()->dispatchEpoch : 0;
    if (head[1] != 0) {
      *refusal = {static_cast<int32_t>(head[1]), sender, 0, 0};
    } else if (a_.common.handle && head[0] != static_cast<uint32_t>(mine)) {
      // Both are recent: they differ by less than half of what 32 bits hold.
      auto seen = static_cast<int64_t>(mine) + static_cast<int32_t>(head[0] - static_cast<uint32_t>(mine));
      *refusal = {moeMismatch, sender, seen, static_cast<int64_t>(mine)};
    }
    return true;
  }

  X& x_;
  const CombineArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  HandleView handle_;
  Epoch epoch_;
  uint32_t tag_ = 0;
  int64_t units_;  // of a row
  bool together_;  // the lanes of a warp know an entry each
  int share_, shares_;
  // What is sent next.
  Slices<X> slices_;
  typename Slices<X>::Slice slice_{};
  Record record_{};
  bool some_ = false;
};

// The receiving half: share `share`, that of a block. All warps of the block; false after a failure, or if it is given
// up.
template <class Number, class X>
MOE_PROTOCOL bool receivePartials(X& x, const CombineArgs& a, const Epoch& epoch, int share) {
  SlotRoles roles(a.common, false);
  SlotCombine<X> part(x, a, share, roles.workers);
  part.setEpoch(epoch);
  Refusal refusal{0, 0, 0, 0};
  bool ok = true;
  auto heads = [&] {
    ok = part.awaitHeads(&refusal);
    return ok && refusal.code == 0;
  };
  bool receives = a.common.handle && share < roles.workers;
  bool received = receives ? part.template receiveRows<Number>(heads) : heads();
  if (!ok) return false;
  if (refusal.code == 0) return received;
  if (share == 0 && x.thread() == 0) tellOutcome(a.common, refusal);
  return true;
}

// What a combine begins with.
struct CombineStart {
  uint64_t before;  // the combine before it
  Consumed consumed;
  int64_t refusal;  // of the dispatch
};

// The sending half of a block. begin() is as meet() is in a dispatch; it is asked once the first unit is added. All
// warps of the block; false if begin() is.
template <class Number, class X, class Begin>
MOE_PROTOCOL bool sendPartials(X& x, const CombineArgs& a, const Epoch& epoch, const Consumed& consumed, Begin begin) {
  SlotRoles roles(a.common, false);
  SlotCombine<X> part(x, a, x.block(), roles.workers);
  bool tells = x.block() == roles.teller, sends = a.common.handle && x.block() < roles.workers;
  if (sends) part.lookAhead();
  part.setEpoch(epoch);
  auto start = [&] {
    if (!begin()) return false;
    if (tells) part.sendHeads();
    return true;
  };
  if (!(sends ? part.template sendRows<Number>(start) : start())) return false;
  if (sends && a.common.layout.shape.signals()) {
    x.barrier(true);
    part.signalRows();
  }
  if (tells) tellConsumed(x, a.common, consumed, x.threads() - 1 - x.thread(), x.threads());
  return true;
}

template <class Number, class X>
MOE_PROTOCOL bool slotCombineOf(X& x, const CombineArgs& a, RollCall<X>& rollCall, const CombineStart& start) {
  Control* control = a.common.control();
  const Shape& shape = a.common.layout.shape;
  Epoch epoch(start.before + 1, shape);
  auto begin = [&] {
    bool ok = x.usable() && peersConsumed(x, a.common, epoch, consumedCombine, start.consumed, false);
    if (!x.barrier(ok)) return false;
    if (!rollCall.comesLast()) return true;
    if (a.common.handle) countReturned(a);
    finishCombine(a, epoch);
    return true;
  };
  if (!sendPartials<Number>(x, a, epoch, start.consumed, begin)) return false;
  if (!rollCall.receiveAll([&](int share) { return receivePartials<Number>(x, a, epoch, share); })) return false;
  if (sweeps(epoch, shape) && x.lastBlock(&control->finishedBlocks, a.common.blocks)) {
    PartialWindow window(a.common.layout, a.common.window(), epoch);
    sweep(x, window.words(), window.wordBytes());
    if (x.thread() == 0) x.reset(&control->finishedBlocks);
  }
  return true;
}

// The combine of a dispatch that a rank refused. It was refused on all ranks: all leave its combine out, and nobody is
// told. All warps of the block; false after a failure.
template <class X>
MOE_PROTOCOL bool leaveOut(X& x, const CombineArgs& a, RollCall<X>& rollCall, int64_t refusal) {
  if (!x.barrier(x.usable())) return false;
  if (!rollCall.comesLast()) return true;
  auto by = static_cast<int32_t>(a.common.handleHead()->refusedBy);
  tellOutcome(a.common, {static_cast<int32_t>(refusal), by, 0, 0});
  return true;
}

// A combine on every warp of the grid. False after a failure, which the Exec has recorded.
template <class X>
MOE_PROTOCOL bool slotCombine(X& x, const CombineArgs& a) {
  // Loaded together with what is known of the first record: a GPU waits for all of it once.
  RollCall<X> rollCall(x, a.common, x);
  rollCall.begin(a.common.control()->startedBefore);
  CombineStart start{a.common.control()->combineEpoch, consumedBefore(a),
                     a.common.handle ? a.common.handleHead()->refusal : 0};
  if (start.refusal != 0) return leaveOut(x, a, rollCall, start.refusal);
  switch (a.common.layout.shape.combineType) {
    case moeFloat32: return slotCombineOf<Float32>(x, a, rollCall, start);
    case moeFloat16: return slotCombineOf<Float16>(x, a, rollCall, start);
    default: return slotCombineOf<Bfloat16>(x, a, rollCall, start);
  }
}

}  // namespace moe
