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
    bool ok = true;
    MOE_ROLL for (auto i = static_cast<uint32_t>(x_.thread()); ok && i < words; i += x_.threads()) {
      uint32_t source = byWords.divide(i);
      ok = takeWord(static_cast<int>(source), i - source * byWords.value());
    }
    return x_.barrier(ok);
  }

 private:
  using Places<X>::x_;
  using Places<X>::layout_;
  using Places<X>::shape_;

  MOE_PROTOCOL bool takeWord(int source, int64_t word) {
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
};

// Takes records out of their slots.
template <class X>
class SlotReceiver {
 public:
  MOE_PROTOCOL SlotReceiver(X& x, const DispatchArgs& a, const SlotArrivals<X>& arrivals, const Epoch& epoch)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        arrivals_(arrivals),
        notes_(a, arrivals),
        epoch_(epoch),
        records_(DispatchWindow(layout_, a.common.window(), epoch).record(0, 0)) {
    std::byte* heads = x.operationScratch();
    if (!heads) heads = Workspace(a.common).heads(x.block());
    head_ = heads + x.warp() * layout_.slot.headBytes;
  }

  MOE_HD static int64_t bytes(const Layout& layout, int64_t warps) { return warps * layout.slot.headBytes; }

  // Share `share` of `shares`. All warps of the block; false after a failure.
  MOE_PROTOCOL bool run(int share, int shares) {
    int64_t most = 0;
    MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
      most = larger(most, arrivals_.source(source).tokens);
    }
    // One more than a record has: notes, which are no slice's.
    Slices slices(x_, most * shape_.nranks, layout_.slot.bySlicesAndNotes, share, shares);
    Slices::Slice slice;
    while (slices.take(&slice)) {
      auto token = static_cast<int32_t>(shape_.byRanks.divide(slice.row));
      int source = static_cast<int32_t>(slice.row) - token * shape_.nranks;
      if (token < arrivals_.source(source).tokens && !take(source, token, slice.number)) return false;
    }
    return true;
  }

 private:
  // A slice of a token's record, if it comes here. All lanes of the warp.
  MOE_PROTOCOL bool take(int source, int64_t token, int32_t number) {
    // A look at this lane's first unit, while the entries are waited for.
    PayloadUnit first = firstPayloadUnit(x_, layout_, number);
    typename X::Peek peek;
    bool peeks = first.mine && !shape_.makesScales(first.payload) && !shape_.signals() && !shape_.expertSlots();
    if (peeks) peek = x_.peekUnit(wordsOf(source, token, first.payload, 0), first.unit);
    if (!takeEntries(source, token)) return false;
    int32_t slot = rows()[shape_.topk];
    if (slot < 0) return true;
    if (slot >= arrivals_.source(source).rows) return broken(source, static_cast<uint64_t>(slot), token);
    bool notes = (int64_t{number} + 1) * X::kSlices > layout_.slot.allSlices;
    if (!placeEntries(source, slot, notes)) return false;
    if (shape_.signals() && !awaitSignal(source, token)) return false;
    bool ok = forPayloadUnits(x_, layout_, number, [&](int payload, int64_t unit, bool mine) {
      bool peeked = peeks && payload == first.payload && unit == first.unit;
      if (shape_.makesScales(payload)) return !mine || takeScales(source, token, unit);
      return !mine || takeUnit(source, token, payload, unit, peeked, peek);
    });
    x_.warpBarrier();
    return ok;
  }

  // Fetches the record's slot, head and entries.
  MOE_PROTOCOL bool takeEntries(int source, int64_t token) {
    bool ok = true, once = true;  // no entry repeats an expert
    x_.warpBarrier();
    MOE_ROLL for (int word = x_.lane(); word <= shape_.topk; word += x_.lanes()) {
      uint32_t data[3];
      const std::byte* from = arrivals_.window().word(source, token, word);
      ok = x_.getTagged(from, arrivals_.tag(), Awaited::kRows, source, data);
      if (!ok) break;
      if (word == 0) {
        rows()[shape_.topk] = static_cast<int32_t>(data[0]);
        *at<RecordHead>(layout_.record.head) = {static_cast<int32_t>(token), 0, data[1] | uint64_t{data[2]} << 32};
        continue;
      }
      auto id = static_cast<int32_t>(data[0]), index = static_cast<int32_t>(data[1]);
      at<int32_t>(layout_.record.ids)[word - 1] = id;
      if (shape_.expertLayout()) at<int32_t>(layout_.record.indexes)[word - 1] = index;
      once = once && (id < 0 || index >= 0);
      at<float>(layout_.record.weights)[word - 1] = __builtin_bit_cast(float, data[2]);
    }
    once = x_.warpAll(once);
    if (x_.lane() == 0) at<RecordHead>(layout_.record.head)->repeats = once ? 0 : 1;
    x_.warpBarrier();
    return x_.warpAll(ok);
  }

  // Finds the entries' output rows, and notes them.
  MOE_PROTOCOL bool placeEntries(int source, int32_t slot, bool notes) {
    const std::byte* base = head_ - layout_.record.head;
    bool ok = true;
    int32_t found = 0;
    MOE_ROLL for (int k = x_.lane(); k < shape_.topk; k += x_.lanes()) {
      auto entry = notes_.load(base, k);
      rows()[k] = notes ? notes_.noteEntry(entry, base, source, slot, k, &found, &ok)
                        : notes_.rowOf(entry, source, slot, k, &ok);
    }
    found = x_.scan(found).total;
    x_.warpBarrier();
    return x_.warpAll(ok) && (!notes || found == 1) ? true : broken(source, static_cast<uint64_t>(slot), found);
  }

  // All lanes of the warp, which may read the payloads then.
  MOE_PROTOCOL bool awaitSignal(int source, int64_t token) const {
    return x_.warpAll(x_.wait(arrivals_.window().signal(source, token), epoch_, Awaited::kRows, source));
  }

  MOE_PROTOCOL const std::byte* wordsOf(int source, int64_t token, int payload, int copy) const {
    return arrivals_.window().slot(source, token) + layout_.slot.payload[payload] + copy * layout_.slot.copyStride;
  }

  // `peek` is of this unit if it is `peeked`.
  MOE_PROTOCOL bool takeUnit(int source, int64_t token, int payload, int64_t unit, bool peeked,
                             const typename X::Peek& peek) const {
    const RowsOut out = outputOf(payload);
    MOE_ROLL for (int copy = 0; copy < layout_.slot.copies; ++copy) {
      int first = shape_.expertSlots() ? copy : 0;
      if (shape_.expertSlots() && rows()[copy] < 0) continue;
      Unit data;
      const std::byte* words = wordsOf(source, token, payload, copy);
      if (shape_.signals()) {
        data = x_.loadUnit(words, unit, wholeVectors(shape_.payloadBytes[payload]));
      } else if (!peeked || !x_.takePeek(peek, arrivals_.tag(), &data)) {
        if (!x_.getUnit(words, unit, arrivals_.tag(), Awaited::kRows, source, &data)) return false;
      }
      auto to = [&](int k) { return rows()[first + k] >= 0 ? out.data + rows()[first + k] * out.stride : nullptr; };
      x_.storeUnits(shape_.expertSlots() ? 1 : shape_.topk, to, unit, shape_.payloadBytes[payload], data);
    }
    return true;
  }

  // A word of scales.
  MOE_PROTOCOL bool takeScales(int source, int64_t token, int64_t word) const {
    ScaleOutput scales(shape_, outputOf(Shape::kScales), a_.views || shape_.scaleOrder == moeScalesByRow);
    bool fetched = false;
    uint32_t data[3];
    MOE_ROLL for (int k = 0; k < shape_.topk; ++k) {
      if (rows()[k] < 0) continue;
      if (!fetched || shape_.expertSlots()) {
        int copy = shape_.expertSlots() ? k : 0;
        const std::byte* from = wordsOf(source, token, Shape::kScales, copy) + word * kTaggedWord;
        if (!x_.getTagged(from, arrivals_.tag(), Awaited::kRows, source, data)) return false;
        fetched = true;
      }
      scales.storeWord(rows()[k], static_cast<uint32_t>(word), data);
    }
    return true;
  }

  MOE_PROTOCOL bool broken(int source, uint64_t slot, int64_t token) const {
    x_.fail(moeInternalError, Awaited::kValidCounts, source, slot, static_cast<uint64_t>(token));
    return false;
  }

  template <class T>
  MOE_PROTOCOL T* at(int64_t offset) const {
    return reinterpret_cast<T*>(head_ + (offset - layout_.record.head));
  }
  // The output rows of the entries follow the head, and then the record's slot.
  MOE_PROTOCOL int32_t* rows() const { return at<int32_t>(layout_.record.end); }
  // Views lie in this rank's own window.
  MOE_PROTOCOL RowsOut outputOf(int payload) const {
    if (!a_.views) return a_.outputs[payload];
    return {records_ + layout_.record.payload[payload], layout_.record.stride};
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  const SlotArrivals<X>& arrivals_;
  Notes<X> notes_;
  Epoch epoch_;
  std::byte* records_;  // of views
  std::byte* head_;     // of the warp's record, as RecordLayout has it
};

}  // namespace moe
