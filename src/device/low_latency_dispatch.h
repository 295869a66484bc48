// SPDX-License-Identifier: Apache-2.0
// The low-latency path's dispatch: the operation as a whole.
#pragma once

#include "device/low_latency_receive.h"
#include "device/low_latency_send.h"
#include "device/low_latency_start.h"

namespace moe {

// Where the words of Control lie that a dispatch begins with.
constexpr int wordAt(size_t offset) { return static_cast<int>(offset / sizeof(uint64_t)); }
constexpr int kDispatchWord = wordAt(offsetof(Control, dispatchEpoch)),
              kCombineWord = wordAt(offsetof(Control, combineEpoch)),
              kReleasedWord = wordAt(offsetof(Control, releasedDispatch)),
              kStartedWord = wordAt(offsetof(Control, startedBefore));
static_assert(kDispatchWord == 0 && kStartedWord < kSharedWords && sizeof(Control) >= 8 * kSharedWords);

// Where blocks have few rows, they send and receive at the same time, with teams of their own; with more, all warps do
// one after the other. `both`: of an operation that does both.
template <class X>
MOE_PROTOCOL int teamsOf(const CommonArgs& common, bool both) {
  return both && common.allSpread > 0 ? X::kTeams : 1;
}

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

// Whether the rows of a dispatch are left where they are, if no rank refuses it.
MOE_PROTOCOL bool keepsViews(const DispatchArgs& a) { return a.views && a.common.handle; }

// The receiving half: share `share`, that of a block. All warps of a team; false after a failure, or if it is given up.
template <class X, class Caller>
MOE_PROTOCOL bool receiveSlots(X& x, const DispatchArgs& a, const Epoch& epoch, const Caller& rollCall, int share) {
  SlotArrivals<X> arrivals(x, a, epoch);
  SlotRoles roles(a.common, true);
  bool reports = share == roles.router, speaks = reports && x.thread() == 0;
  if (reports) writeNoCounts(x, a);
  SlotReceiver<X> receiver(x, a, arrivals, epoch, share, roles.workers);
  if (!arrivals.waitForCounts()) return false;
  int refusedBy = arrivals.refusedBy();
  if (refusedBy >= 0) {
    bool notes = keepsViews(a) && speaks, allCome = !notes || rollCall.allCome();
    if (!x.barrier(allCome)) return false;
    if (notes) noteRead(a, epoch);
    if (speaks) noteRefusal(a.common, arrivals.source(refusedBy).refusal, refusedBy);
    return true;
  }
  if (!arrivals.findPlaces()) return false;
  if (reports) writeCounts(x, a, arrivals);
  markSlotGaps(x, a, arrivals, roles, share);
  return receiver.run();
}

// The sending half of a block. meet() sets the epoch; all warps of the block are there then, and peers' buffers may be
// written; it is asked once what is sent first is on its way here. come() says that the block has come, which takes one
// warp long. All warps of a team; false if meet() is.
template <class X, class Meet, class Come>
MOE_PROTOCOL bool sendSlots(X& x, const DispatchArgs& a, const Epoch& epoch, const Consumed& read, Meet meet,
                            Come come) {
  SlotRoles roles(a.common, true);
  bool carries = x.block() < roles.workers, counts = x.block() == roles.router;
  auto all = static_cast<int32_t>(a.numTokens);
  int32_t spread = X::kSpreads ? a.common.ownSpread : 0;
  TokenRun own = carries ? roles.tokensOf(x.block(), all, spread) : TokenRun{all, all};
  bool routes = (own.count() > 0 && (x.block() & ((1 << spread) - 1)) == 0) || counts;
  PayloadSender<X> sender(x, a, own);
  sender.lookAhead();
  SlotRouter<X> router(x, a, own);
  if (routes) router.start();
  if (!meet()) return false;
  if (routes) router.countBefore();
  if (routes && own.first > 0) x.barrier(true);
  come();
  // Counts are of all tokens once this block has numbered its own.
  if (counts && !carries) router.sendCounts(epoch);
  if (routes && x.warp() == x.warps() - 1) router.sendNotes(epoch);
  sender.run(epoch);
  if (counts && carries) {
    x.barrier(true);
    router.sendCounts(epoch);
  }
  if (counts) {
    x.barrier(true);
    router.noteSent();
  }
  if (own.count() > 0 && a.common.layout.shape.signals()) {
    x.barrier(true);
    sender.signal(epoch);
  }
  if (x.block() == roles.teller) tellConsumed(x, a.common, read, x.thread(), x.threads());
  return true;
}

// A dispatch, or half of one, on every warp of the grid. False after a failure, which the Exec has recorded. A block
// sends and receives at the same time, with teams of its own, if it has them.
template <class X>
MOE_PROTOCOL bool slotDispatch(X& x, const DispatchArgs& a) {
  Control* control = a.common.control();
  const Shape& shape = a.common.layout.shape;
  auto words = x.loadWords(&control->dispatchEpoch);
  bool sends = a.phases & kPhaseSend, receives = a.phases & kPhaseReceive;
  int teams = teamsOf<X>(a.common, sends && receives);
  auto team = x.team(teams);
  bool sender = sends && team.number() == 0, receiver = receives && team.number() == teams - 1;
  RollCall<X> rollCall(x, a.common, team);
  Consumed read{0, 0};
  Epoch epoch;
  auto meet = [&] {
    rollCall.begin(x.wordOf(words, kStartedWord));
    uint64_t before = x.wordOf(words, kDispatchWord);
    if (!sends) before = a.common.handleHead()->dispatchEpoch - 1;
    if (sends) read = {x.wordOf(words, kReleasedWord), x.wordOf(words, kCombineWord)};
    epoch = Epoch(before + 1, shape);
    read = withEndedViews(read, epoch, shape);
    bool ready = !sender || peersHaveConsumed(team, a.common, epoch, consumedDispatch);
    if (!x.barrier(x.usable() && ready)) {
      if (!x.barrier(x.usable())) return false;
      if (sender && !team.barrier(peersConsumed(team, a.common, epoch, consumedDispatch, read, false))) return false;
    }
    return true;
  };
  auto come = [&] {
    if (!rollCall.comesLast()) return;
    finishSending(a, epoch);
    if (receives && !keepsViews(a)) noteRead(a, epoch);
  };
  bool begun = sender ? sendSlots(team, a, epoch, read, meet, come) : meet();
  if (!sends && begun) come();
  bool ok = rollCall.receiveAll(
      [&](int share) { return begun && (!receiver || receiveSlots(team, a, epoch, rollCall, share)); });
  if (!ok) {
    // Whoever reads the small outputs after a failure does no harm.
    if (receives && x.block() == 0) writeNoCounts(x, a);
    return false;
  }
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
