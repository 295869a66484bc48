// SPDX-License-Identifier: Apache-2.0
// The direct path, receiving half of dispatch: what the counts say, and when the rows of a chunk are there.
#pragma once

#include "device/direct_route.h"
#include "device/places.h"
#include "device/window_view.h"

namespace moe {

// The orders that name chunks of a source, and some that name none.
MOE_PROTOCOL int32_t ordersOf(const SourceInfo& info) { return (info.chunks + info.span - 1) / info.span * info.span; }

// The chunk of a source that completes as its order-th one, roughly: spans go side by side. info.chunks or more if
// there is none of that order.
MOE_PROTOCOL int32_t orderedChunk(const SourceInfo& info, int32_t order) {
  int32_t spans = (info.chunks + info.span - 1) / info.span;
  return order < ordersOf(info) ? order % spans * info.span + order / spans : info.chunks;
}

// What one block knows about a dispatch that comes in.
template <class X>
class Arrivals : public Places<X> {
 public:
  MOE_PROTOCOL Arrivals(X& x, const DispatchArgs& a, const Epoch& epoch)
      : Places<X>(
            x, a,
            reinterpret_cast<std::byte*>(DispatchWindow(a.common.layout, a.common.window(), epoch).expertCounts(0)),
            a.common.layout.window.countStride),
        window_(a.common.layout, a.common.window(), epoch),
        epoch_(epoch) {}

  MOE_PROTOCOL const DispatchWindow& window() const { return window_; }

  // Waits for all counts. All warps of the block.
  MOE_PROTOCOL bool waitForCounts() {
    bool ok = true;
    MOE_ROLL for (int source = x_.thread(); ok && source < shape_.nranks; source += x_.threads()) {
      ok = x_.wait(window_.countSignal(source), epoch_, Awaited::kCounts, source) && takeCounts(source);
    }
    return x_.barrier(ok);
  }

  // How far orders must go for orderedChunk to name all chunks of every source.
  MOE_PROTOCOL int64_t mostOrders() const {
    int32_t most = 0;
    MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
      int32_t orders = ordersOf(sources_[source]);
      most = orders > most ? orders : most;
    }
    return most;
  }

  // Waits for a chunk of a source and finds its records. All lanes of the warp.
  MOE_PROTOCOL bool enterChunk(int source, int32_t chunk, ChunkRange* range) const {
    *range = {0, 0};
    const SourceInfo& info = sources_[source];
    if (chunk >= info.chunks) return true;
    bool ok = true;
    if (x_.lane() == 0) ok = x_.wait(window_.chunkSignal(source, chunk), epoch_, Awaited::kRows, source);
    if (!x_.warpAll(ok)) return false;
    *range = *window_.chunkRange(source, chunk);
    if (range->begin >= 0 && range->end >= range->begin && range->end <= range->begin + kChunkTokens &&
        range->end <= info.rows) {
      return true;
    }
    x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(range->begin),
            static_cast<uint64_t>(range->end));
    return false;
  }

 private:
  using Places<X>::x_;
  using Places<X>::shape_;
  using Places<X>::sources_;

  MOE_PROTOCOL bool takeCounts(int source) {
    const CountBlock& block = *window_.counts(source);
    bool ok = block.tokens >= 0 && block.tokens <= shape_.maxTokens && block.rows >= 0 && block.rows <= block.tokens &&
              block.chunks == chunksOf(block.tokens) && block.span > 0 && block.span <= block.chunks;
    if (!ok) {
      x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(block.tokens),
              static_cast<uint64_t>(block.rows));
      return false;
    }
    sources_[source] = {static_cast<int32_t>(block.tokens), static_cast<int32_t>(block.rows), block.chunks, block.span,
                        block.refusal};
    return true;
  }

  DispatchWindow window_;
  Epoch epoch_;
};

// All rows that come, in runs: chunk by chunk, sources in turn, so that every source's link is in use. A run is
// `perRun` contiguous rows of a chunk.
class SourceRuns {
 public:
  // `chunks`: of the longest source.
  MOE_PROTOCOL SourceRuns(const Shape& shape, int64_t chunks, int64_t perRun)
      : ranks_(static_cast<uint32_t>(shape.nranks)),
        rank_(static_cast<uint32_t>(shape.rank)),
        perRun_(static_cast<uint32_t>(perRun)),
        perChunk_(static_cast<uint32_t>(kChunkTokens / perRun)),
        count_(static_cast<uint32_t>(chunks) * perChunk_ * ranks_) {}

  // There are fewer than 2^32, and 64-bit divisions are slow on GPUs.
  MOE_PROTOCOL uint32_t count() const { return count_; }

  struct Run {
    int source;
    int32_t order;  // which of the source's chunks
    int32_t row;    // first row of the run among the records of its chunk
  };
  MOE_PROTOCOL Run at(uint32_t run) const {
    uint32_t ofSource = run / ranks_;
    return {static_cast<int>((rank_ + run % ranks_) % ranks_), static_cast<int32_t>(ofSource / perChunk_),
            static_cast<int32_t>(ofSource % perChunk_ * perRun_)};
  }

 private:
  uint32_t ranks_, rank_, perRun_, perChunk_, count_;
};

}  // namespace moe
