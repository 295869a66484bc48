// SPDX-License-Identifier: Apache-2.0
// The low-latency path's dispatch: the operation as a whole.
#pragma once

#include "device/low_latency_receive.h"
#include "device/low_latency_send.h"
#include "device/low_latency_start.h"

namespace moe {

// Warps of a block that mark empty rows.
constexpr int kGapWarps = 4;

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

// Notes that this dispatch has been read, though that is so only when its kernel is over: nobody asks earlier. One
// thread, when all blocks have come.
MOE_PROTOCOL void noteRead(const DispatchArgs& a, const Epoch& epoch) {
  Control* control = a.common.control();
  uint64_t sent = a.phases & kPhaseSend ? uint64_t{epoch} : control->dispatchEpoch;
  control->releasedDispatch = consumedBefore(a, sent).dispatches;
  finishReading(a.common, epoch);
}

// The receiving half: share `share`, that of a block. All warps of the block; false after a failure.
template <class X>
MOE_PROTOCOL bool receiveSlots(X& x, const DispatchArgs& a, const Epoch& epoch, int share) {
  SlotArrivals<X> arrivals(x, a, epoch);
  SlotRoles roles(a.common, true);
  bool reports = share == roles.router, speaks = reports && x.thread() == 0;
  if (reports) writeNoCounts(x, a);
  if (!arrivals.waitForCounts()) return false;
  int refusedBy = arrivals.refusedBy();
  if (speaks && !(a.views && a.common.handle && refusedBy < 0)) noteRead(a, epoch);
  if (refusedBy >= 0) {
    if (speaks) noteRefusal(a.common, arrivals.source(refusedBy).refusal, refusedBy);
    return true;
  }
  if (!arrivals.findPlaces()) return false;
  if (reports) writeCounts(x, a, arrivals);
  markSlotGaps(x, a, arrivals, roles, share);
  return share >= roles.workers || SlotReceiver<X>(x, a, arrivals, epoch).run(share, roles.workers);
}

// The sending half of a block. begin() says, for all its warps, whether peers' buffers may be written, and with which
// epoch, which is left in *epoch; it is asked once this block's first tokens are on their way. False if they may not.
template <class X, class Begin>
MOE_PROTOCOL bool sendSlots(X& x, const DispatchArgs& a, const SlotRoles& roles, Epoch* epoch, Begin begin) {
  bool carries = x.block() < roles.workers;
  PayloadSender<X> sender(x, a, x.block(), roles.workers);
  if (x.block() == roles.router) {
    SlotRouter<X> router(x, a);
    router.count();
    if (!begin(epoch)) return false;
    router.run(*epoch);
  } else {
    if (carries) sender.lookAhead();
    if (!begin(epoch)) return false;
  }
  if (!carries) return true;
  sender.run(*epoch);
  if (!a.common.layout.shape.signals()) return true;
  x.barrier(true);
  sender.signal(*epoch);
  return true;
}

// A dispatch, or half of one, on every warp of the grid. False after a failure, which the Exec has recorded.
template <class X>
MOE_PROTOCOL bool slotDispatch(X& x, const DispatchArgs& a) {
  Control* control = a.common.control();
  const Shape& shape = a.common.layout.shape;
  bool sends = a.phases & kPhaseSend, receives = a.phases & kPhaseReceive;
  SlotRoles roles(a.common, true);
  // What the operation begins with is loaded together with what is sent first: a GPU waits for all of it once.
  RollCall<X> rollCall(x, a.common);
  uint64_t before = sends ? control->dispatchEpoch : a.common.handleHead()->dispatchEpoch - 1;
  Consumed read{0, 0};
  if (sends) read = {control->releasedDispatch, control->combineEpoch};
  auto begin = [&](Epoch* epoch) {
    *epoch = Epoch(before + 1, shape);
    read = withEndedViews(read, *epoch, shape);
    bool ok = x.usable() && (!sends || peersConsumed(x, a.common, *epoch, consumedDispatch, read, false));
    if (!x.barrier(ok)) return false;
    if (rollCall.comesLast()) finishSending(a, *epoch);
    return true;
  };
  Epoch epoch;
  if (!(sends ? sendSlots(x, a, roles, &epoch, begin) : begin(&epoch))) {
    // Whoever reads the small outputs after a failure does no harm.
    if (receives && x.block() == 0) writeNoCounts(x, a);
    return false;
  }
  if (sends && x.block() == roles.teller) tellConsumed(x, a.common, read, x.thread(), x.threads());
  if (!receives) return true;
  bool stays = !sends || x.barrier(!rollCall.speaks() || rollCall.stays());
  if (!rollCall.receiveAll(stays, [&](int share) { return receiveSlots(x, a, epoch, share); })) return false;
  if (sweeps(epoch, shape) && x.lastBlock(&control->finishedBlocks, a.common.blocks)) {
    SlotWindow window(a.common.layout, a.common.window(), epoch);
    sweep(x, window.words(), window.wordBytes());
    if (x.thread() == 0) x.reset(&control->finishedBlocks);
  }
  return true;
}

// Waits for the counts of a dispatch and works out its sizes for an output without bound. One block.
template <class X>
MOE_PROTOCOL bool slotCount(X& x, const DispatchArgs& a) {
  SlotArrivals<X> arrivals(x, a, Epoch(a.common.handleHead()->dispatchEpoch, a.common.layout.shape));
  return noteSizes(x, a, arrivals);
}

}  // namespace moe
