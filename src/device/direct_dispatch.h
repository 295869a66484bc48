// SPDX-License-Identifier: Apache-2.0
// The direct path's dispatch: the operation as a whole.
#pragma once

#include "device/direct_place.h"
#include "device/direct_send.h"

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

// Marks every output row that no record fills.
template <class X>
MOE_PROTOCOL void markGaps(const X& x, const DispatchArgs& a, const Arrivals<X>& arrivals) {
  if (!a.outIds && !a.outWeights && !a.outSources && !a.outRowExperts) return;
  const Shape& shape = a.common.layout.shape;
  int64_t warp = receivingWarp(x, a.common, x.warps()), warps = int64_t{a.common.receiveBlocks} * x.warps();
  if (!shape.expertLayout()) {
    int64_t end = 0;
    MOE_ROLL for (int source = 0; source < shape.nranks; ++source) {
      end = arrivals.sourceRow(source, arrivals.deliveredFrom(source));
      if (a.views) markEmpty(x, a, end, (source + 1) * shape.maxTokens, warp, warps);
    }
    if (!a.views) markEmpty(x, a, end, a.capacity, warp, warps);
    return;
  }
  // Warps take an expert each, or, where they are more, a part of one.
  bool padded = shape.layout == moeLayoutExpertPadded;
  int64_t local = arrivals.local();
  int64_t parts = local > 0 ? larger(1, warps / local) : 1;
  MOE_ROLL for (int64_t at = warp; at < local * parts; at += warps) {
    auto expert = static_cast<int32_t>(at / parts);
    int64_t first = arrivals.offsets()[expert] + arrivals.delivered(expert);
    int64_t end = arrivals.offsets()[expert + 1];
    markEmpty(x, a, first, padded ? end : smaller(end, a.capacity), at % parts, parts);
  }
  if (!padded) markEmpty(x, a, arrivals.offsets()[local], a.capacity, warp, warps);
}

// Writes the small outputs, and into the handle what combine needs to know. All threads of one block.
template <class X>
MOE_PROTOCOL void writeCounts(const X& x, const DispatchArgs& a, const Arrivals<X>& arrivals) {
  const Shape& shape = a.common.layout.shape;
  HandleView handle(a.common);
  MOE_ROLL for (int source = x.thread(); source < shape.nranks; source += x.threads()) {
    const SourceInfo& info = arrivals.source(source);
    *handle.sourceRows(source) = info.rows;
    *handle.sourceChunks(source) = info.chunks;
    *handle.sourceFirst(source) = shape.expertLayout() ? 0 : arrivals.sourceRow(source, 0);
    int64_t valid = shape.expertLayout() ? info.rows : arrivals.deliveredFrom(source);
    if (a.outRankCounts) a.outRankCounts[source] = static_cast<int32_t>(valid);
    if (a.outRankOffsets && !shape.expertLayout()) a.outRankOffsets[source] = arrivals.sourceRow(source, 0);
  }
  MOE_ROLL for (int32_t expert = x.thread(); shape.expertLayout() && expert <= arrivals.local();
                expert += x.threads()) {
    if (a.outExpertCounts && expert < arrivals.local()) {
      a.outExpertCounts[expert] = static_cast<int32_t>(arrivals.delivered(expert));
    }
    if (a.outExpertOffsets) a.outExpertOffsets[expert] = arrivals.offsets()[expert];
  }
  if (x.warp() != 0) return;
  moeSizes_t sizes = arrivals.sizes();
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

// A dispatch that somebody refused: nothing is placed, but what was sent is waited for, so that the buffers stay in
// step.
template <class X>
MOE_PROTOCOL bool drainDispatch(X& x, const DispatchArgs& a, const Arrivals<X>& arrivals, const Epoch& epoch) {
  const Shape& shape = a.common.layout.shape;
  bool ok = true;
  MOE_ROLL for (int source = 0; ok && source < shape.nranks; ++source) {
    MOE_ROLL for (int64_t chunk = x.thread(); ok && chunk < arrivals.source(source).chunks; chunk += x.threads()) {
      ok = x.wait(arrivals.window().chunkSignal(source, chunk), epoch, Awaited::kRows, source);
    }
  }
  return x.barrier(ok);
}

// The receiving half of a dispatch. All warps of the last receiveBlocks blocks; false after a failure.
template <class X>
MOE_PROTOCOL bool receiveDispatch(X& x, const DispatchArgs& a, const Epoch& epoch) {
  Arrivals<X> arrivals(x, a, epoch);
  bool reports = x.block() == a.common.blocks - 1;
  if (reports) writeNoCounts(x, a);
  if (!arrivals.waitForCounts()) return false;
  int refusedBy = arrivals.refusedBy();
  if (refusedBy >= 0) {
    if (reports && x.thread() == 0) noteRefusal(a.common, arrivals.source(refusedBy).refusal, refusedBy);
    return drainDispatch(x, a, arrivals, epoch);
  }
  if (!arrivals.findPlaces()) return false;
  if (reports) writeCounts(x, a, arrivals);
  markGaps(x, a, arrivals);
  if (a.views) return noteViews(x, a, arrivals);
  if (x.warp() >= x.streamers()) return true;
  PlaceJob<X> job(x, a, arrivals);
  return x.streamRows(job);
}

// Adds to the statistics what has been sent. One thread of the block that has signalled all of it.
MOE_PROTOCOL void countSent(const DispatchArgs& a) {
  Control* control = a.common.control();
  const Shape& shape = a.common.layout.shape;
  Workspace work(a.common);
  control->tokens += static_cast<uint64_t>(a.numTokens);
  MOE_ROLL for (int peer = 0; peer < shape.nranks; ++peer) {
    (peer == shape.rank ? control->selfRows : control->mappedRows) += static_cast<uint64_t>(*work.sentRows(peer));
  }
}

// What one dispatch leaves behind. All threads of the last block: everybody waits for it, so that it should load
// little, and not one after the other.
template <class X>
MOE_PROTOCOL void finishDispatch(X& x, const DispatchArgs& a, const Epoch& epoch) {
  const Shape& shape = a.common.layout.shape;
  bool refused = false;
  if (a.views && a.phases & kPhaseReceive) {
    DispatchWindow window(a.common.layout, a.common.window(), epoch);
    MOE_ROLL for (int source = x.thread(); source < shape.nranks; source += x.threads()) {
      refused = refused || window.counts(source)->refusal != 0;
    }
    refused = !x.barrier(!refused);
  }
  if (x.thread() != 0) return;
  if (a.phases & kPhaseSend) {
    a.common.control()->dispatchEpoch = epoch;
    a.common.control()->releasedDispatch = consumedBefore(a, epoch).dispatches;
    if (a.common.handle) {
      a.common.handleHead()->dispatchEpoch = epoch;
      a.common.handleHead()->numTokens = a.numTokens;
    }
  }
  if (a.phases & kPhaseReceive && (!a.views || refused)) finishReading(a.common, epoch);
}

// A dispatch, or half of one, on every warp of the grid. False after a failure, which the Exec has recorded.
template <class X>
MOE_PROTOCOL bool directDispatch(X& x, const DispatchArgs& a) {
  Control* control = a.common.control();
  Epoch epoch(a.phases & kPhaseSend ? control->dispatchEpoch + 1 : a.common.handleHead()->dispatchEpoch,
              a.common.layout.shape);
  bool ok = true, signals = a.phases & kPhaseSend && x.block() == a.common.signalBlock;
  if (a.phases & kPhaseSend && x.block() < a.common.sendBlocks) ok = sendDispatch(x, a, epoch);
  if (!x.barrier(ok)) return false;
  if (signals) {
    tellConsumed(x, a.common, consumedBefore(a, epoch), x.threads() - 1 - x.thread(), x.threads());
    ok = signalWhenStored(x, a.common.layout.shape.rank, DispatchedChunks(a, epoch));
  }
  if (!x.barrier(ok)) return false;
  if (signals && x.thread() == 0) countSent(a);
  if (a.phases & kPhaseReceive && x.block() >= a.common.blocks - a.common.receiveBlocks) {
    ok = receiveDispatch(x, a, epoch);
  }
  if (!x.barrier(ok)) return false;
  if (!x.lastBlock(&control->finishedBlocks, a.common.blocks)) return true;
  if (x.thread() == 0) resetCounters(x, control);
  finishDispatch(x, a, epoch);
  return true;
}

// Waits for the counts of a dispatch and works out its sizes for an output without bound. One block.
template <class X>
MOE_PROTOCOL bool countDispatch(X& x, const DispatchArgs& a) {
  // No block comes after this one, whose number was the first.
  if (x.thread() == 0) x.reset(&a.common.control()->ticket);
  Arrivals<X> arrivals(x, a, Epoch(a.common.handleHead()->dispatchEpoch, a.common.layout.shape));
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
