// SPDX-License-Identifier: Apache-2.0
// What the low-latency path writes into windows.
#pragma once

#include "device/tagged.h"
#include "device/window_view.h"

namespace moe {

// One buffer of the dispatch half.
class SlotWindow {
 public:
  MOE_HD SlotWindow(const Layout& layout, std::byte* window, const Epoch& epoch)
      : layout_(layout), base_(window + layout.window.dispatchBuffers + epoch.buffer * layout.window.dispatchBytes) {}

  // Word `word` of a source's counts: the first has tokens, records and refusal, each of the others three experts.
  MOE_HD std::byte* counts(int source, int64_t word) const {
    return base_ + layout_.window.taggedCounts + source * layout_.window.taggedCountStride + word * kTaggedWord;
  }
  // A token's slot: word 0 has the record's slot and rankFirsts, word 1 + k entry k; then come the payloads.
  MOE_HD std::byte* slot(int source, int64_t token) const {
    return base_ + layout_.window.slots + (source * layout_.shape.maxTokens + token) * layout_.slot.stride;
  }
  MOE_HD std::byte* word(int source, int64_t token, int64_t word) const {
    return slot(source, token) + word * kTaggedWord;
  }
  // Says that all copies of a token's payloads have come.
  MOE_HD uint64_t* signal(int source, int64_t token) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.window.slotSignals) + source * layout_.shape.maxTokens + token;
  }
  // All tagged words.
  MOE_HD std::byte* words() const { return base_ + layout_.window.slots; }
  MOE_HD int64_t wordBytes() const { return layout_.window.dispatchBytes - layout_.window.slots; }

 private:
  const Layout& layout_;
  std::byte* base_;
};

// One buffer of the combine half.
class PartialWindow {
 public:
  MOE_HD PartialWindow(const Layout& layout, std::byte* window, const Epoch& epoch)
      : layout_(layout), base_(window + layout.window.combineBuffers + epoch.buffer * layout.window.combineBytes) {}

  MOE_HD std::byte* head(int sender) const { return base_ + layout_.window.taggedHeads + sender * kSignalStride; }
  MOE_HD std::byte* row(int64_t token, int64_t ordinal) const {
    return base_ + layout_.window.taggedRows +
           (token * layout_.shape.distinct + ordinal) * layout_.window.taggedRowStride;
  }
  // Says that a row has come.
  MOE_HD uint64_t* signal(int64_t token, int64_t ordinal) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.window.rowSignals) + token * layout_.shape.distinct + ordinal;
  }
  // All tagged words.
  MOE_HD std::byte* words() const { return base_ + layout_.window.taggedRows; }
  MOE_HD int64_t wordBytes() const { return layout_.window.combineBytes - layout_.window.taggedRows; }

 private:
  const Layout& layout_;
  std::byte* base_;
};

// So many blocks share each row of few: 2^spread. `slices`: of a row.
constexpr int32_t kMostSpread = 3;
MOE_HD inline int32_t spreadOf(int64_t rows, int64_t workers, int64_t slices) {
  int32_t spread = 0;
  while (spread < kMostSpread && (larger(rows, 1) << (spread + 1)) <= workers && (2 << spread) <= slices) ++spread;
  return spread;
}

// Work that all warps of some blocks share: so many rows, each cut into slices. Warps of a block take the slices of one
// row, or of each row every so many.
template <class X>
class Slices {
 public:
  Slices() = default;
  // Share `share` of `shares`. `bySlices`: of one row. `spread`: 0, unless the Exec spreads rows.
  MOE_PROTOCOL Slices(const X& x, int64_t rows, const Divisor& bySlices, int share, int shares, int32_t spread)
      : perRow_(X::kSlices == 1 ? bySlices : Divisor()),
        next_(static_cast<uint32_t>(x.warp())),
        step_(static_cast<uint32_t>(x.warps())),
        share_(static_cast<uint32_t>(share)),
        shares_(static_cast<uint32_t>(shares)),
        rows_(static_cast<uint32_t>(rows)) {
    if constexpr (X::kSpreads) {
      spread_ = static_cast<uint32_t>(spread);
      part_ = share_ & ((1u << spread) - 1);
      share_ >>= spread;
      shares_ >>= spread;
      // Blocks that are too few to share one more row have none.
      if (share_ >= shares_) share_ = kNoRow;
    }
  }

  struct Slice {
    uint32_t row;
    int32_t number;  // of the row: kSlices slices from number * kSlices on
  };
  // So many rows, if not as many as it was made for. The first slice may have been taken already.
  MOE_PROTOCOL void limit(int64_t rows) { rows_ = static_cast<uint32_t>(rows); }
  // False after the last one.
  MOE_PROTOCOL bool take(Slice* slice) {
    if constexpr (X::kSpreads) {
      if (spread_ > 0) return takePart(slice);
    }
    uint32_t turn = perRow_.divide(next_), row = turn * shares_ + share_;
    if (row >= rows_) return false;
    *slice = {row, static_cast<int32_t>(next_ - turn * perRow_.value())};
    next_ += step_;
    return true;
  }

 private:
  static constexpr uint32_t kNoRow = INT32_MAX;

  // As take(), of the slices part_, part_ + 2^spread_ ... of rows share_, share_ + shares_ ... Mostly there is one row,
  // so that nothing is divided.
  MOE_PROTOCOL bool takePart(Slice* slice) {
    uint32_t slices = (perRow_.value() + (1u << spread_) - 1 - part_) >> spread_;
    while (share_ < rows_ && next_ >= slices) {
      next_ -= slices;
      share_ += shares_;
    }
    if (share_ >= rows_) return false;
    *slice = {share_, static_cast<int32_t>((next_ << spread_) + part_)};
    next_ += step_;
    return true;
  }

  Divisor perRow_;
  uint32_t next_ = 0, step_ = 0, share_ = 0, shares_ = 0, rows_ = 0;
  uint32_t spread_ = 0, part_ = 0;
};

// Calls use(unit, mine) for the units of slices number * kSlices and on of a row of `units`, a lane each. All lanes
// make the same calls, and `mine` is false for those whose unit does not exist. False once use is, for any lane.
template <class X, class Use>
MOE_PROTOCOL bool forUnits(const X& x, int64_t units, int64_t number, Use use) {
  int64_t begin = number * X::kSlices * kUnitsPerBlock, end = smaller(units, begin + X::kSlices * kUnitsPerBlock);
  MOE_ROLL for (int64_t unit = begin; unit < end; unit += x.lanes()) {
    if (!x.warpAll(use(unit + x.lane(), unit + x.lane() < end))) return false;
  }
  return true;
}

// The first unit that forPayloadUnits gives this lane, which may not exist. Payload -1 if the slice does not.
struct PayloadUnit {
  int payload;
  int64_t unit;
  bool mine;
};
template <class X>
MOE_PROTOCOL PayloadUnit firstPayloadUnit(const X& x, const Layout& layout, int32_t number) {
  int32_t slice = number * X::kSlices;
  MOE_ROLL for (int payload = 0; payload < layout.shape.payloads; ++payload) {
    auto slices = static_cast<int32_t>(layout.slot.slices[payload]);
    if (slice < slices) {
      int32_t unit = slice * kUnitsPerBlock + x.lane();
      return {payload, unit, unit < layout.slot.units[payload]};
    }
    slice -= slices;
  }
  return {-1, 0, false};
}

// As forUnits for a record's payloads, one after the other: use(payload, unit, mine). `at`: what firstPayloadUnit says.
template <class X, class Use>
MOE_PROTOCOL bool forPayloadUnits(const X& x, const Layout& layout, int32_t number, const PayloadUnit& at, Use use) {
  if constexpr (X::kSlices == 1) return at.payload < 0 || x.warpAll(use(at.payload, at.unit, at.mine));
  int32_t first = 0, begin = number * X::kSlices, end = begin + X::kSlices;
  MOE_ROLL for (int payload = 0; payload < layout.shape.payloads; ++payload) {
    MOE_ROLL for (int32_t slice = begin < first ? first : begin;
                  slice < end && slice < first + layout.slot.slices[payload]; ++slice) {
      int32_t from = (slice - first) * kUnitsPerBlock;
      int32_t to = static_cast<int32_t>(smaller(layout.slot.units[payload], from + kUnitsPerBlock));
      MOE_ROLL for (; from < to; from += x.lanes()) {
        if (!x.warpAll(use(payload, from + x.lane(), from + x.lane() < to))) return false;
      }
    }
    first += static_cast<int32_t>(layout.slot.slices[payload]);
  }
  return true;
}

// Whether a buffer is swept once epoch `epoch` has been read: each one is, every so many epochs, but not at the start,
// when a window is untouched memory that may never be needed.
MOE_PROTOCOL bool sweeps(const Epoch& epoch, const Shape& shape) {
  constexpr uint64_t kEpochs = uint64_t{1} << 30;
  return epoch.number >= kEpochs && epoch.number % kEpochs < static_cast<uint64_t>(shape.buffers);
}
// Makes all words of a segment untouched. All warps of one block, before the peers are told that its epoch was read.
template <class X>
MOE_PROTOCOL void sweep(X& x, std::byte* segment, int64_t bytes) {
  MOE_ROLL for (int64_t at = x.thread() * kTaggedWord; at < bytes; at += x.threads() * kTaggedWord) {
    x.putTagged(segment + at, 0, 0, 0, 0);
  }
}

// What the warps of a block keep of the records that they take, at the start of its scratch.
MOE_HD inline int64_t warpHeadBytes(const Layout& layout, int64_t warps) { return warps * layout.slot.headBytes; }

// Tokens first .. end-1.
struct TokenRun {
  int32_t first, end;

  MOE_HD int32_t count() const { return end - first; }
};

// Which blocks do what. One tells peers what has been read, since its fence takes long; in a dispatch one more counts
// all tokens, and says what came; the others carry rows. Few blocks do more than one of these.
struct SlotRoles {
  int workers;  // blocks 0 .. workers-1
  int router, teller;

  // `routes`: of a dispatch.
  MOE_HD SlotRoles(const CommonArgs& common, bool routes) : teller(common.blocks - 1) {
    router = routes && common.blocks > 2 ? common.blocks - 2 : teller;
    workers = router > 0 ? router : 1;
  }

  // What a worker sends of `count` tokens, alone or with others.
  MOE_HD TokenRun tokensOf(int worker, int32_t count, int32_t spread) const {
    // Mostly one.
    int32_t each = count <= workers ? 1 : (count + workers - 1) / workers;
    int32_t first = each * (worker >> spread);
    return first < count ? TokenRun{first, first + each < count ? first + each : count} : TokenRun{count, count};
  }
};

}  // namespace moe
