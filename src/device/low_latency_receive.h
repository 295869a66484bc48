// SPDX-License-Identifier: Apache-2.0
// The low-latency path, receiving half of dispatch: rows are put where they belong as their words arrive.
#pragma once

#include "device/low_latency_window.h"
#include "device/notes.h"
#include "device/quantize.h"
#include "device/small_outputs.h"

namespace moe {

// What one block knows about a dispatch that comes in.
template <class X>
class SlotArrivals : public Places<X> {
 public:
  MOE_PROTOCOL SlotArrivals(X& x, const DispatchArgs& a, const Epoch& epoch)
      : Places<X>(x, a, nullptr, 4 * int64_t{a.common.layout.shape.localExperts()}),
        window_(a.common.layout, a.common.window(), epoch),
        tag_(tagOf(epoch)) {
    this->counts_ = this->memory_ + layout_.workspace.counts;
  }

  MOE_PROTOCOL const SlotWindow& window() const { return window_; }
  MOE_PROTOCOL uint32_t tag() const { return tag_; }

  // Waits for all counts. All warps of the block.
  MOE_PROTOCOL bool waitForCounts() {
    const Divisor& byWords = layout_.slot.byCountWords;
    uint32_t words = byWords.value() * static_cast<uint32_t>(shape_.nranks);
    bool ok = true, refused = false;
    // By the last threads, whose warps have less to send than others.
    MOE_ROLL for (auto i = static_cast<uint32_t>(x_.threads() - 1 - x_.thread()); ok && i < words; i += x_.threads()) {
      uint32_t source = byWords.divide(i);
      ok = takeWord(static_cast<int>(source), i - source * byWords.value(), &refused);
    }
    refused_ = !x_.barrier(ok && !refused);
    return !refused_ || x_.barrier(ok);
  }
  MOE_PROTOCOL int refusedBy() const { return refused_ ? Places<X>::refusedBy() : -1; }

 private:
  using Places<X>::x_;
  using Places<X>::layout_;
  using Places<X>::shape_;

  MOE_PROTOCOL bool takeWord(int source, int64_t word, bool* refused) {
    uint32_t data[3];
    if (!x_.getTagged(window_.counts(source, word), tag_, Awaited::kCounts, source, data)) return false;
    if (word == 0) {
      int64_t tokens = data[0], rows = data[1];
      if (tokens > shape_.maxTokens || rows > tokens) {
        x_.fail(moeInternalError, Awaited::kValidCounts, source, data[0], data[1]);
        return false;
      }
      this->sources_[source] = {static_cast<int32_t>(tokens), static_cast<int32_t>(rows), 0, 1,
                                static_cast<int32_t>(data[2])};
      *refused = *refused || data[2] != 0;
      return true;
    }
    auto* counts = reinterpret_cast<int32_t*>(this->memory_ + layout_.workspace.counts) + source * this->local();
    MOE_UNROLL for (int e = 0; e < 3; ++e) {
      int64_t local = 3 * (word - 1) + e;
      if (local < this->local()) counts[local] = static_cast<int32_t>(data[e]);
    }
    return true;
  }

  SlotWindow window_;
  uint32_t tag_;
  bool refused_ = false;  // by some rank
};

// Takes records out of their slots. What the first slice needs is looked up before anything is waited for.
template <class X>
class SlotReceiver {
 public:
  // Of share `share` of `shares`.
  MOE_PROTOCOL SlotReceiver(X& x, const DispatchArgs& a, const SlotArrivals<X>& arrivals, const Epoch& epoch, int share,
                            int shares)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        arrivals_(arrivals),
        notes_(a, arrivals),
        epoch_(epoch),
        // One more than a record has: notes, which are no slice's.
        slices_(x, shape_.maxTokens * shape_.nranks, layout_.slot.bySlicesAndNotes, share, shares, a.common.allSpread) {
    std::byte* heads = x.operationScratch();
    if (!heads) heads = Workspace(a.common).heads(x.block());
    head_ = heads + x.warp() * layout_.slot.headBytes;
    some_ = share < shares && advance();
  }

  // Once it is known what has come. All warps of the block; false after a failure, or if it is given up.
  MOE_PROTOCOL bool run() {
    int32_t most = 0;
    MOE_ROLL for (int source = x_.lane(); source < shape_.nranks; source += x_.lanes()) {
      int32_t tokens = arrivals_.source(source).tokens;
      most = most < tokens ? tokens : most;
    }
    most = x_.warpMax(most);
    slices_.limit(int64_t{most} * shape_.nranks);
    MOE_ROLL while (some_) {
      if (token_ < arrivals_.source(source_).tokens && !take()) return false;
      some_ = advance();
    }
    return true;
  }

 private:
  // The next slice, of a record that may not be. False after the last one.
  MOE_PROTOCOL bool advance() {
    typename Slices<X>::Slice slice;
    if (!slices_.take(&slice)) return false;
    token_ = static_cast<int32_t>(shape_.byRanks.divide(slice.row));
    source_ = static_cast<int32_t>(slice.row) - token_ * shape_.nranks;
    number_ = slice.number;
    words_ = arrivals_.window().slot(source_, token_);
    first_ = firstPayloadUnit(x_, layout_, number_);
    if (first_.payload >= 0) out_ = outputOf(first_.payload);
    return true;
  }

  // The slice, if its record comes here. All lanes of the warp.
  MOE_PROTOCOL bool take() {
    // A look at this lane's first unit, while the entries are waited for.
    typename X::Peek peek;
    bool peeks = first_.mine && !shape_.makesScales(first_.payload) && !shape_.signals() && !shape_.expertSlots();
    if (peeks) peek = x_.peekUnit(wordsOf(first_.payload, 0), first_.unit);
    bool notes = (int64_t{number_} + 1) * X::kSlices > layout_.slot.allSlices;
    x_.warpBarrier();
    if (!placeEntries(notes)) return false;
    if (slot_ < 0) return true;
    x_.warpBarrier();
    if (notes && !noteEntries()) return false;
    if (first_.payload < 0) return true;
    if (shape_.signals() && !awaitSignal()) return false;
    return forPayloadUnits(x_, layout_, number_, first_, [&](int payload, int64_t unit, bool mine) {
      bool first = payload == first_.payload, peeked = peeks && first && unit == first_.unit;
      const RowsOut out = first ? out_ : outputOf(payload);
      if (shape_.makesScales(payload)) return takeScales(out, unit, mine);
      return takeUnit(out, payload, unit, mine, peeked, peek);
    });
  }

  // Fetches the record's slot and its entries, and finds their output rows. What notes are made from is kept. All lanes
  // of the warp.
  MOE_PROTOCOL bool placeEntries(bool notes) {
    bool sane = true;
    placed_ = 0;
    MOE_ROLL for (int32_t from = 0; from < shape_.topk; from += x_.lanes()) {
      int32_t k = from + x_.lane();
      bool mine = k < shape_.topk;
      uint32_t data[6];  // the head's, and the entry's
      int64_t entryAt = mine ? (1 + k) * kTaggedWord : 0;
      bool came = x_.getTaggedPair(words_, entryAt, arrivals_.tag(), Awaited::kRows, source_, data);
      if (!x_.warpAll(came)) return false;
      slot_ = static_cast<int32_t>(data[0]);
      if (slot_ < 0) return true;
      if (slot_ >= arrivals_.source(source_).rows) return broken(token_);
      typename Notes<X>::Entry entry{{token_, 0, data[1] | uint64_t{data[2]} << 32},
                                     static_cast<int32_t>(data[3]),
                                     shape_.expertLayout() ? static_cast<int32_t>(data[4]) : -1,
                                     __builtin_bit_cast(float, data[5])};
      if (mine && notes) keep(entry, k);
      int32_t row = mine ? notes_.rowOf(entry, source_, slot_, k, &sane) : -1;
      if (mine) rows()[k] = row;
      placed_ |= uint64_t{x_.ballot(row >= 0)} << from;
    }
    return x_.warpAll(sane) || broken(token_);
  }

  MOE_PROTOCOL void keep(const typename Notes<X>::Entry& entry, int k) const {
    if (k == 0) *at<RecordHead>(layout_.record.head) = entry.head;
    at<int32_t>(layout_.record.ids)[k] = entry.id;
    if (shape_.expertLayout()) at<int32_t>(layout_.record.indexes)[k] = entry.index;
    at<float>(layout_.record.weights)[k] = entry.weight;
  }

  // Notes the entries that were kept. All lanes of the warp.
  MOE_PROTOCOL bool noteEntries() {
    const std::byte* base = head_ - layout_.record.head;
    bool ok = true, once = true;  // no entry repeats an expert
    int32_t found = 0;
    MOE_ROLL for (int k = x_.lane(); shape_.expertLayout() && k < shape_.topk; k += x_.lanes()) {
      once = once && (at<int32_t>(layout_.record.ids)[k] < 0 || at<int32_t>(layout_.record.indexes)[k] >= 0);
    }
    once = x_.warpAll(once);
    MOE_ROLL for (int k = x_.lane(); k < shape_.topk; k += x_.lanes()) {
      auto entry = notes_.load(base, k);
      entry.head.repeats = once ? 0 : 1;
      notes_.noteEntry(entry, base, source_, slot_, k, &found, &ok);
    }
    found = x_.scan(found).total;
    return (x_.warpAll(ok) && found == 1) || broken(found);
  }

  // All lanes of the warp, which may read the payloads then.
  MOE_PROTOCOL bool awaitSignal() const {
    return x_.warpAll(x_.wait(arrivals_.window().signal(source_, token_), epoch_, Awaited::kRows, source_));
  }

  MOE_PROTOCOL const std::byte* wordsOf(int payload, int copy) const {
    return words_ + layout_.slot.payload[payload] + copy * layout_.slot.copyStride;
  }

  // The entries that copy number `copy` is for, of those that are left: all, or the first.
  MOE_PROTOCOL uint64_t entriesOfCopy(uint64_t left) const { return shape_.expertSlots() ? left & (~left + 1) : left; }
  MOE_PROTOCOL int copyOf(uint64_t entries) const { return shape_.expertSlots() ? lowestBit(entries) : 0; }

  // `peek` is of this unit if it is `peeked`. All lanes of the warp; a lane without a unit is not `mine`.
  MOE_PROTOCOL bool takeUnit(const RowsOut& out, int payload, int64_t unit, bool mine, bool peeked,
                             const typename X::Peek& peek) const {
    MOE_ROLL for (uint64_t left = placed_, entries; left != 0; left ^= entries) {
      entries = entriesOfCopy(left);
      Unit data{};
      bool came = true;
      const std::byte* words = wordsOf(payload, copyOf(entries));
      if (mine && shape_.signals()) {
        data = x_.loadUnit(words, unit, wholeVectors(shape_.payloadBytes[payload]));
      } else if (mine && (!peeked || !x_.takePeek(peek, arrivals_.tag(), &data))) {
        came = x_.getUnit(words, unit, arrivals_.tag(), Awaited::kRows, source_, &data);
      }
      if (!x_.warpAll(came)) return false;
      auto to = [&](int k) { return out.data + rows()[k] * out.stride; };
      x_.storeUnits(entries, to, unit, mine ? shape_.payloadBytes[payload] : 0, data);
    }
    return true;
  }

  // A word of scales. All lanes of the warp; a lane without a word is not `mine`.
  MOE_PROTOCOL bool takeScales(const RowsOut& out, int64_t word, bool mine) const {
    ScaleOutput scales(shape_, out, a_.views || shape_.scaleOrder == moeScalesByRow);
    MOE_ROLL for (uint64_t left = placed_, entries; left != 0; left ^= entries) {
      entries = entriesOfCopy(left);
      uint32_t data[3];
      bool came = true;
      const std::byte* from = wordsOf(Shape::kScales, copyOf(entries)) + word * kTaggedWord;
      if (mine) came = x_.getTagged(from, arrivals_.tag(), Awaited::kRows, source_, data);
      if (!x_.warpAll(came)) return false;
      auto to = [&](int k) { return scales.firstWord(rows()[k]); };
      x_.forRows(entries, to, [&](std::byte* first) {
        if (mine) scales.storeWord(first, static_cast<uint32_t>(word), data);
      });
    }
    return true;
  }

  MOE_PROTOCOL bool broken(int64_t seen) const {
    x_.fail(moeInternalError, Awaited::kValidCounts, source_, static_cast<uint64_t>(slot_),
            static_cast<uint64_t>(seen));
    return false;
  }

  template <class T>
  MOE_PROTOCOL T* at(int64_t offset) const {
    return reinterpret_cast<T*>(head_ + (offset - layout_.record.head));
  }
  // The output rows of the entries follow the head.
  MOE_PROTOCOL int32_t* rows() const { return at<int32_t>(layout_.record.end); }
  // Views lie in this rank's own window.
  MOE_PROTOCOL RowsOut outputOf(int payload) const {
    if (!a_.views) return a_.outputs[payload];
    return {DispatchWindow(layout_, a_.common.window(), epoch_).record(0, 0) + layout_.record.payload[payload],
            layout_.record.stride};
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  const SlotArrivals<X>& arrivals_;
  Notes<X> notes_;
  Epoch epoch_;
  std::byte* head_;  // of the warp's record, as RecordLayout has it
  // The slice that is taken next.
  Slices<X> slices_;
  bool some_ = false;
  int32_t source_ = 0, token_ = 0, number_ = 0;
  const std::byte* words_ = nullptr;  // of its record
  PayloadUnit first_{-1, 0, false};   // this lane's
  RowsOut out_{};                     // of that payload
  // Of the record: its slot, and a bit for each entry that has an output row.
  int32_t slot_ = -1;
  uint64_t placed_ = 0;
};

}  // namespace moe
