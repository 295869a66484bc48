// SPDX-License-Identifier: Apache-2.0
// The low-latency path's dispatch: the operation as a whole.
#pragma once

#include "device/low_latency_receive.h"
#include "device/low_latency_send.h"

namespace moe {

// Warps of a block that mark empty rows.
constexpr int kGapWarps = 4;

// The sending half. All warps of the block.
template <class X>
MOE_PROTOCOL void sendSlots(X& x, const DispatchArgs& a, const Epoch& epoch) {
  SlotRoles roles(a.common, true);
  if (x.block() < roles.workers) PayloadSender<X>(x, a, epoch).run(x.block(), roles.workers);
  if (x.block() == roles.router) SlotRouter<X>(x, a, epoch).run();
  if (x.block() == roles.teller) tellConsumed(x, a.common, consumedBefore(a, epoch), x.thread(), x.threads());
}

// Marks a block's share of the empty rows. Not the router's, if there are others: it writes the small outputs.
template <class X>
MOE_PROTOCOL void markSlotGaps(const X& x, const DispatchArgs& a, const SlotArrivals<X>& arrivals,
                               const SlotRoles& roles, int share) {
  bool spares = roles.router != roles.teller;
  if (spares && share == roles.router) return;
  int block = spares && share > roles.router ? share - 1 : share, blocks = a.common.blocks - (spares ? 1 : 0);
  // The last warps have fewer rows than the others, and of one token none.
  int warps = x.warps() < kGapWarps ? x.warps() : kGapWarps, warp = x.warps() - 1 - x.warp();
  if (warp < warps) markGaps(x, a, arrivals, block * warps + warp, blocks * warps);
}

// The receiving half: share `share`, that of a block. All warps of the block; false after a failure.
template <class X>
MOE_PROTOCOL bool receiveSlots(X& x, const DispatchArgs& a, const Epoch& epoch, int share) {
  SlotArrivals<X> arrivals(x, a, epoch);
  SlotRoles roles(a.common, true);
  bool reports = share == roles.router;
  if (reports) writeNoCounts(x, a);
  if (!arrivals.waitForCounts()) return false;
  int refusedBy = arrivals.refusedBy();
  if (refusedBy >= 0) {
    if (reports && x.thread() == 0) noteRefusal(a.common, arrivals.source(refusedBy).refusal, refusedBy);
    return true;
  }
  if (!arrivals.findPlaces()) return false;
  if (reports) writeCounts(x, a, arrivals);
  markSlotGaps(x, a, arrivals, roles, share);
  return share >= roles.workers || SlotReceiver<X>(x, a, arrivals, epoch).run(share, roles.workers);
}

// A dispatch, or half of one, on every warp of the grid. False after a failure, which the Exec has recorded.
//
// Blocks send before they receive, and do not receive while others have not started: those may need their SM, and
// peers wait for what they send. What such a block leaves is the last one's.
template <class X>
MOE_PROTOCOL bool slotDispatch(X& x, const DispatchArgs& a) {
  Control* control = a.common.control();
  int blocks = a.common.blocks;
  bool sends = a.phases & kPhaseSend, receives = a.phases & kPhaseReceive;
  Epoch epoch(sends ? control->dispatchEpoch + 1 : a.common.handleHead()->dispatchEpoch, a.common.layout.shape);
  bool ok = true;
  if (sends) {
    ok = peersConsumed(x, a.common, epoch, consumedDispatch, consumedBefore(a, epoch));
    if (!x.barrier(ok)) return false;
    sendSlots(x, a, epoch);
  }
  if (receives) {
    bool stays = !sends || x.barrier(x.thread() != 0 || x.allStart(&control->ticket, blocks));
    if (!stays) skipShare(x, a.common);
    if (stays) ok = receiveSlots(x, a, epoch, x.block());
  }
  if (!x.barrier(ok)) return false;
  if (!x.lastBlock(&control->finishedBlocks, blocks)) return true;
  MOE_ROLL for (int block = 0; control->skippedShares != 0 && block < blocks; ++block) {
    if (takeShare(x, a.common, block) && !x.barrier(receiveSlots(x, a, epoch, block))) return false;
  }
  if (receives && sweeps(epoch, a.common.layout.shape)) {
    SlotWindow window(a.common.layout, a.common.window(), epoch);
    sweep(x, window.words(), window.wordBytes());
  }
  if (x.thread() != 0) return true;
  resetCounters(x, control);
  finishDispatch(a, epoch);
  return true;
}

// Waits for the counts of a dispatch and works out its sizes for an output without bound. One block.
template <class X>
MOE_PROTOCOL bool slotCount(X& x, const DispatchArgs& a) {
  SlotArrivals<X> arrivals(x, a, Epoch(a.common.handleHead()->dispatchEpoch, a.common.layout.shape));
  return noteSizes(x, a, arrivals);
}

}  // namespace moe
