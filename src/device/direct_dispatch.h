// SPDX-License-Identifier: Apache-2.0
// The direct path's dispatch: the operation as a whole.
#pragma once

#include "device/direct_place.h"
#include "device/direct_send.h"
#include "device/small_outputs.h"

namespace moe {

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
  markGaps(x, a, arrivals, receivingWarp(x, a.common, x.block(), x.warps()),
           int64_t{a.common.receiveBlocks} * x.warps());
  if (a.views) return noteViews(x, a, arrivals);
  if (x.warp() >= x.streamers()) return true;
  PlaceJob<X> job(x, a, arrivals);
  return x.streamRows(job);
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
  if (x.thread() != 0) return true;
  resetCounters(x, control);
  finishDispatch(a, epoch);
  return true;
}

// Waits for the counts of a dispatch and works out its sizes for an output without bound. One block.
template <class X>
MOE_PROTOCOL bool countDispatch(X& x, const DispatchArgs& a) {
  Arrivals<X> arrivals(x, a, Epoch(a.common.handleHead()->dispatchEpoch, a.common.layout.shape));
  return noteSizes(x, a, arrivals);
}

}  // namespace moe
