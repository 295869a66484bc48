// SPDX-License-Identifier: Apache-2.0
// The direct path, receiving half of dispatch: the records of a run are noted once their chunk has come.
#pragma once

#include "device/direct_arrivals.h"
#include "device/notes.h"

namespace moe {

template <class X>
class RunNotes {
 public:
  MOE_PROTOCOL RunNotes(const DispatchArgs& a, const Arrivals<X>& arrivals)
      : shape_(a.common.layout.shape), arrivals_(arrivals), handle_(a.common), notes_(a, arrivals) {}

  // Waits for a run's chunk and finds its records. All lanes of the warp; false after a failure.
  MOE_PROTOCOL bool enter(X& x, const SourceRuns::Run& run, int64_t perRun, int64_t* first, int32_t* count) const {
    int32_t chunk = orderedChunk(arrivals_.source(run.source), run.order);
    ChunkRange range;
    if (!arrivals_.enterChunk(run.source, chunk, &range)) return false;
    if (run.row == 0 && x.lane() == 0 && chunk < arrivals_.source(run.source).chunks) {
      *handle_.chunkRange(run.source, chunk) = range;
    }
    *first = range.begin + run.row;
    *count = static_cast<int32_t>(larger(0, smaller(perRun, range.end - *first)));
    return true;
  }

  // Notes records first .. first+count-1 of a source, and tells take(j, k, token, row) the output row of entry k of
  // record first+j: -1 if it has none. Rank layout: rows are told of the entry that is its token's first of this rank
  // only. All lanes of the warp share the entries and keep kBatch loads in flight; false after a failure.
  template <int kBatch, class Take>
  MOE_PROTOCOL bool note(X& x, int source, int64_t first, int32_t count, Take take) const {
    int32_t entries = count * shape_.topk, found = 0;
    bool ok = true;
    MOE_ROLL for (int32_t from = 0; from < entries; from += kBatch * x.lanes()) {
      typename Notes<X>::Entry batch[kBatch];
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        int32_t at = from + b * x.lanes() + x.lane();
        if (at < entries) batch[b] = notes_.load(record(source, first + at / shape_.topk), at % shape_.topk);
      }
      MOE_UNROLL for (int b = 0; b < kBatch; ++b) {
        int32_t at = from + b * x.lanes() + x.lane();
        if (at >= entries) continue;
        int32_t j = at / shape_.topk, k = at % shape_.topk;
        take(j, k, batch[b].head.token,
             notes_.noteEntry(batch[b], record(source, first + j), source, first + j, k, &found, &ok));
      }
    }
    // Every record has exactly one entry that is its token's first of this rank.
    found = x.scan(found).total;
    if (x.warpAll(ok) && found == count) return true;
    x.fail(moeInternalError, Awaited::kValidCounts, source, static_cast<uint64_t>(first), static_cast<uint64_t>(count));
    return false;
  }

 private:
  MOE_PROTOCOL const std::byte* record(int source, int64_t slot) const {
    return arrivals_.window().record(source, slot);
  }

  const Shape& shape_;
  const Arrivals<X>& arrivals_;
  HandleView handle_;
  Notes<X> notes_;
};

// The rows of all sources stay where they are: notes only. All lanes of every receiving warp; false after a failure.
template <class X>
MOE_PROTOCOL bool noteViews(X& x, const DispatchArgs& a, const Arrivals<X>& arrivals) {
  constexpr int64_t kNotedRows = 16;
  constexpr int kBatch = 4;
  const Shape& shape = a.common.layout.shape;
  RunNotes<X> notes(a, arrivals);
  SourceRuns runs(shape, arrivals.mostOrders(), kNotedRows);
  auto warps = static_cast<uint32_t>(a.common.receiveBlocks * x.warps());
  MOE_ROLL for (auto nth = static_cast<uint32_t>(receivingWarp(x, a.common, x.block(), x.warps())); nth < runs.count();
                nth += warps) {
    SourceRuns::Run run = runs.at(nth);
    int64_t first = 0;
    int32_t rows = 0;
    if (!notes.enter(x, run, kNotedRows, &first, &rows)) return false;
    if (!notes.template note<kBatch>(x, run.source, first, rows, [](int32_t, int32_t, int32_t, int32_t) {}))
      return false;
  }
  return true;
}

}  // namespace moe
