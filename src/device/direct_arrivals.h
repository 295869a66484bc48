// SPDX-License-Identifier: Apache-2.0
// The direct path, receiving half of dispatch: what the counts say, and where everything goes.
//
// Every receiving block works out the places for itself, so that no block waits for another.
#pragma once

#include "device/direct_route.h"
#include "device/window_view.h"

namespace moe {

constexpr int64_t kUnbounded = INT64_MAX;

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
class Arrivals {
 public:
  MOE_PROTOCOL Arrivals(X& x, const DispatchArgs& a, const Epoch& epoch)
      : x_(x),
        a_(a),
        layout_(a.common.layout),
        shape_(layout_.shape),
        window_(layout_, a.common.window(), epoch),
        epoch_(epoch),
        local_(shape_.localExperts()) {
    std::byte* memory = x.blockTable(layout_.workspace.placeStride);
    if (!memory) memory = Workspace(a.common).places(x.block());
    bases_ = reinterpret_cast<int64_t*>(memory + layout_.workspace.bases);
    offsets_ = reinterpret_cast<int64_t*>(memory + layout_.workspace.offsets);
    sources_ = reinterpret_cast<SourceInfo*>(memory + layout_.workspace.sources);
  }

  MOE_PROTOCOL const DispatchWindow& window() const { return window_; }
  MOE_PROTOCOL int32_t local() const { return local_; }
  MOE_PROTOCOL const SourceInfo& source(int source) const { return sources_[source]; }
  MOE_PROTOCOL const int64_t* offsets() const { return offsets_; }

  // Waits for all counts. All warps of the block.
  MOE_PROTOCOL bool waitForCounts() {
    bool ok = true;
    MOE_ROLL for (int source = x_.thread(); ok && source < shape_.nranks; source += x_.threads()) {
      ok = x_.wait(window_.countSignal(source), epoch_, Awaited::kCounts, source) && takeCounts(source);
    }
    return x_.barrier(ok);
  }

  // The first rank that refused its part of the dispatch, or -1. After waitForCounts.
  MOE_PROTOCOL int refusedBy() const {
    MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
      if (sources_[source].refusal != 0) return source;
    }
    return -1;
  }

  // Works out where each source's rows, or each source's rows of each expert, begin. All warps of the block.
  MOE_PROTOCOL bool findPlaces() {
    if (!shape_.expertLayout()) {
      if (x_.warp() == 0) startSources();
      return x_.barrier(true);
    }
    if (!x_.barrier(sumExperts())) return false;
    if (x_.warp() == 0) startExperts();
    x_.barrier(true);
    MOE_ROLL for (int32_t expert = x_.thread(); expert < local_; expert += x_.threads()) {
      MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
        bases_[source * local_ + expert] += offsets_[expert];
      }
    }
    return x_.barrier(true);
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

  // Rank layout: output row of a source's slot.
  MOE_PROTOCOL int64_t sourceRow(int source, int64_t slot) const { return bases_[source] + slot; }
  // Expert layouts: output row of a source's index-th row for a local expert, or -1 if the output does not hold it.
  MOE_PROTOCOL int64_t expertRow(int source, int32_t expert, int32_t index) const {
    int64_t row = bases_[source * local_ + expert] + index;
    return row < endOfRoom(expert) ? row : -1;
  }
  // Rows for a local expert that have arrived, and that the output holds.
  MOE_PROTOCOL int64_t arrived(int32_t expert) const {
    int last = shape_.nranks - 1;
    return bases_[last * local_ + expert] + window_.expertCounts(last)[expert] - offsets_[expert];
  }
  MOE_PROTOCOL int64_t delivered(int32_t expert) const {
    return larger(0, smaller(arrived(expert), endOfRoom(expert) - offsets_[expert]));
  }
  MOE_PROTOCOL int64_t deliveredFrom(int source) const {
    int64_t rows = sources_[source].rows;
    return a_.views ? rows : larger(0, smaller(rows, a_.capacity - bases_[source]));
  }

  // All lanes of one warp.
  MOE_PROTOCOL moeSizes_t sizes() const {
    moeSizes_t sizes{0, 0, 0, 0};
    MOE_ROLL for (int from = 0; from < shape_.nranks; from += x_.lanes()) {
      int source = from + x_.lane();
      sizes.copies += x_.scan(source < shape_.nranks ? sources_[source].rows : 0).total;
    }
    if (!shape_.expertLayout()) {
      sizes.requiredRows = sizes.copies;
      sizes.rows = a_.views ? sizes.copies : smaller(sizes.copies, a_.capacity);
      sizes.overflow = !a_.views && sizes.requiredRows > a_.capacity ? 1 : 0;
      return sizes;
    }
    int32_t most = 0;
    bool allThere = true;
    MOE_ROLL for (int32_t from = 0; from < local_; from += x_.lanes()) {
      int32_t expert = from + x_.lane();
      int64_t came = expert < local_ ? arrived(expert) : 0;
      int64_t held = expert < local_ ? delivered(expert) : 0;
      most = came > most ? static_cast<int32_t>(came) : most;
      allThere = allThere && held == came;
      sizes.rows += x_.scan(static_cast<int32_t>(held)).total;
    }
    sizes.requiredRows = shape_.layout == moeLayoutExpertPadded ? x_.warpMax(most) : offsets_[local_];
    // The gap after the last expert may reach past an output that holds every row.
    sizes.overflow = x_.warpAll(allThere) ? 0 : 1;
    return sizes;
  }

 private:
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

  // The row behind the last one that the output has for a local expert.
  MOE_PROTOCOL int64_t endOfRoom(int32_t expert) const {
    if (shape_.layout != moeLayoutExpertPadded) return a_.capacity;
    return a_.capacity == kUnbounded ? kUnbounded : expert * shape_.capacity + a_.capacity;
  }

  // A thread takes an expert: sums over the sources, and leaves the total in offsets_.
  MOE_PROTOCOL bool sumExperts() {
    bool ok = true;
    MOE_ROLL for (int32_t expert = x_.thread(); expert < local_; expert += x_.threads()) {
      int64_t sum = 0;
      MOE_ROLL for (int source = 0; source < shape_.nranks; ++source) {
        int32_t count = window_.expertCounts(source)[expert];
        if (count < 0 || count > sources_[source].rows) {
          x_.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(sources_[source].rows),
                  static_cast<uint64_t>(count));
          ok = false;
        }
        bases_[source * local_ + expert] = sum;
        sum += count;
      }
      offsets_[expert] = sum;
    }
    return ok;
  }

  // All lanes of one warp.
  MOE_PROTOCOL void startExperts() {
    bool padded = shape_.layout == moeLayoutExpertPadded;
    int64_t next = 0;
    MOE_ROLL for (int32_t from = 0; from < local_; from += x_.lanes()) {
      int32_t expert = from + x_.lane();
      int64_t room = 0;
      if (expert < local_) room = padded ? shape_.capacity : roundUp(offsets_[expert], shape_.expertAlign);
      auto scanned = x_.scan(static_cast<int32_t>(room));
      if (expert < local_) offsets_[expert] = next + scanned.before;
      next += scanned.total;
    }
    if (x_.lane() == 0) offsets_[local_] = next;
  }

  // All lanes of one warp.
  MOE_PROTOCOL void startSources() {
    int64_t next = 0;
    MOE_ROLL for (int from = 0; from < shape_.nranks; from += x_.lanes()) {
      int source = from + x_.lane();
      auto scanned = x_.scan(source < shape_.nranks ? sources_[source].rows : 0);
      if (source < shape_.nranks) bases_[source] = a_.views ? source * shape_.maxTokens : next + scanned.before;
      next += scanned.total;
    }
  }

  X& x_;
  const DispatchArgs& a_;
  const Layout& layout_;
  const Shape& shape_;
  DispatchWindow window_;
  Epoch epoch_;
  int32_t local_;
  int64_t* bases_;    // rank layout: [source] first row; expert layouts: [source][local expert]
  int64_t* offsets_;  // expert layouts: [local expert + 1] first rows
  SourceInfo* sources_;
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

// Number of a warp among the first `warps` of every receiving block.
template <class X>
MOE_PROTOCOL int64_t receivingWarp(const X& x, const CommonArgs& common, int warps) {
  return int64_t{x.block() - (common.blocks - common.receiveBlocks)} * warps + x.warp();
}

}  // namespace moe
