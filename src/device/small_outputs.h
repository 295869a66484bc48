// SPDX-License-Identifier: Apache-2.0
// The receiving half of a dispatch: the small outputs, and what is written of rows that nobody sent.
#pragma once

#include "device/epochs.h"
#include "device/places.h"
#include "device/window_view.h"

namespace moe {

// Marks output row `row` as empty.
MOE_PROTOCOL void markEmpty(const DispatchArgs& a, int64_t row) {
  const Shape& shape = a.common.layout.shape;
  if (a.outSources) a.outSources[2 * row] = a.outSources[2 * row + 1] = -1;
  if (a.outRowExperts) a.outRowExperts[row] = -1;
  if (shape.expertLayout()) {
    if (a.outWeights) a.outWeights[row] = 0;
    return;
  }
  MOE_ROLL for (int64_t at = row * shape.topk; at < (row + 1) * shape.topk; ++at) {
    if (a.outIds && a.wideOutIds) static_cast<int64_t*>(a.outIds)[at] = -1;
    if (a.outIds && !a.wideOutIds) static_cast<int32_t*>(a.outIds)[at] = -1;
    if (a.outWeights) a.outWeights[at] = 0;
  }
}

// Marks output rows first .. end-1 as empty. `parts` warps share them, of which this one is number `part`.
template <class X>
MOE_PROTOCOL void markEmpty(const X& x, const DispatchArgs& a, int64_t first, int64_t end, int64_t part,
                            int64_t parts) {
  MOE_ROLL for (int64_t row = first + part * x.lanes() + x.lane(); row < end; row += parts * x.lanes())
      markEmpty(a, row);
}

// Where experts have the same room each: the rows that thread `thread` of `threads` has to mark.
template <class X>
MOE_PROTOCOL void markPadding(const DispatchArgs& a, const Places<X>& places, int64_t thread, int64_t threads) {
  const Shape& shape = a.common.layout.shape;
  const Divisor& byRoom = shape.byColumnRows;
  MOE_ROLL for (int64_t row = thread; row < places.local() * shape.capacity; row += threads) {
    auto at = static_cast<uint32_t>(row);
    if (byRoom.remainder(at) >= places.delivered(static_cast<int32_t>(byRoom.divide(at)))) markEmpty(a, row);
  }
}

// Marks every output row that no record fills: the share of warp `warp` of the `warps` that do so.
template <class X>
MOE_PROTOCOL void markGaps(const X& x, const DispatchArgs& a, const Places<X>& places, int64_t warp, int64_t warps) {
  if (!a.outIds && !a.outWeights && !a.outSources && !a.outRowExperts) return;
  const Shape& shape = a.common.layout.shape;
  if (!shape.expertLayout()) {
    int64_t end = 0;
    MOE_ROLL for (int source = 0; source < shape.nranks; ++source) {
      end = places.sourceRow(source, places.deliveredFrom(source));
      if (a.views) markEmpty(x, a, end, (source + 1) * shape.maxTokens, warp, warps);
    }
    if (!a.views) markEmpty(x, a, end, a.capacity, warp, warps);
    return;
  }
  if (shape.layout == moeLayoutExpertPadded) {
    markPadding(a, places, warp * x.lanes() + x.lane(), warps * x.lanes());
    return;
  }
  // Warps take an expert each, or, where they are more, a part of one.
  auto local = static_cast<uint32_t>(places.local()), all = static_cast<uint32_t>(warps);
  uint32_t parts = local > 0 && all > local ? all / local : 1;
  MOE_ROLL for (auto at = static_cast<uint32_t>(warp); at < local * parts; at += all) {
    uint32_t expert = parts == 1 ? at : at / parts;
    int64_t first = places.offsets()[expert] + places.delivered(static_cast<int32_t>(expert));
    markEmpty(x, a, first, smaller(places.offsets()[expert + 1], a.capacity), at - expert * parts, parts);
  }
  markEmpty(x, a, places.offsets()[local], a.capacity, warp, warps);
}

// Writes the small outputs, and into the handle what combine needs to know. All threads of one block.
template <class X>
MOE_PROTOCOL void writeCounts(const X& x, const DispatchArgs& a, const Places<X>& places) {
  const Shape& shape = a.common.layout.shape;
  HandleView handle(a.common);
  MOE_ROLL for (int source = x.thread(); source < shape.nranks; source += x.threads()) {
    const SourceInfo& info = places.source(source);
    *handle.sourceRows(source) = info.rows;
    *handle.sourceChunks(source) = info.chunks;
    *handle.sourceFirst(source) = shape.expertLayout() ? 0 : places.sourceRow(source, 0);
    int64_t valid = shape.expertLayout() ? info.rows : places.deliveredFrom(source);
    if (a.outRankCounts) a.outRankCounts[source] = static_cast<int32_t>(valid);
    if (a.outRankOffsets && !shape.expertLayout()) a.outRankOffsets[source] = places.sourceRow(source, 0);
  }
  MOE_ROLL for (int32_t expert = x.thread(); shape.expertLayout() && expert <= places.local(); expert += x.threads()) {
    if (a.outExpertCounts && expert < places.local()) {
      a.outExpertCounts[expert] = static_cast<int32_t>(places.delivered(expert));
    }
    if (a.outExpertOffsets) a.outExpertOffsets[expert] = places.offsets()[expert];
  }
  if (x.warp() != 0) return;
  moeSizes_t sizes = places.sizes();
  if (x.lane() != 0) return;
  HandleHead* head = a.common.handleHead();
  head->sizes = sizes;
  head->views = a.views;
  head->refusal = 0;
  head->capacity = a.views ? kUnbounded : a.capacity;
  if (a.outSizes) *a.outSizes = sizes;
}

// Until the rows have come, the small outputs say that there are none: whoever reads them after a failure does no harm.
// All threads of one block.
template <class X>
MOE_PROTOCOL void writeNoCounts(const X& x, const DispatchArgs& a) {
  const Shape& shape = a.common.layout.shape;
  MOE_ROLL for (int source = x.thread(); source < shape.nranks; source += x.threads()) {
    if (a.outRankCounts) a.outRankCounts[source] = 0;
    if (a.outRankOffsets && !shape.expertLayout()) a.outRankOffsets[source] = 0;
  }
  MOE_ROLL for (int64_t expert = x.thread(); shape.expertLayout() && expert <= shape.localExperts();
                expert += x.threads()) {
    if (a.outExpertCounts && expert < shape.localExperts()) a.outExpertCounts[expert] = 0;
    if (a.outExpertOffsets) a.outExpertOffsets[expert] = 0;
  }
  if (x.thread() == 0 && a.outSizes) *a.outSizes = {0, 0, 0, 0};
}

// Records that `peer` refused this dispatch, for the host and for a combine of the handle. One thread.
MOE_PROTOCOL void noteRefusal(const CommonArgs& common, int32_t code, int peer) {
  tellOutcome(common, {code, peer, 0, 0});
  if (!common.handle) return;
  common.handleHead()->refusal = code;
  common.handleHead()->refusedBy = peer;
}

// Waits for counts and notes the sizes for an output without bound in the handle. All warps of one block; false after a
// failure.
template <class X, class Coming>
MOE_PROTOCOL bool noteSizes(X& x, const DispatchArgs& a, Coming& arrivals) {
  // No block comes after this one, whose number was the first.
  if (x.thread() == 0) x.reset(&a.common.control()->ticket);
  if (!arrivals.waitForCounts()) return false;
  int refusedBy = arrivals.refusedBy();
  if (refusedBy >= 0) {
    if (x.thread() == 0) noteRefusal(a.common, arrivals.source(refusedBy).refusal, refusedBy);
    return true;
  }
  if (!arrivals.findPlaces()) return false;
  if (x.warp() != 0) return true;
  moeSizes_t sizes = arrivals.sizes();
  if (x.lane() == 0) a.common.handleHead()->sizes = sizes;
  return true;
}

}  // namespace moe
