// SPDX-License-Identifier: Apache-2.0
// The direct path's combine: partial rows go to the sources of their tokens, and each source adds those of a token.
#pragma once

#include "device/direct_partials.h"
#include "device/finish.h"
#include "device/row_jobs.h"
#include "device/window_view.h"

namespace moe {

// This rank's tokens as a reduce job. A run is so many tokens, or a slice of one; the warps of all blocks claim runs,
// so that blocks that have sent help with what is left.
template <class X>
class TokenJob {
 public:
  static constexpr bool kOnlyAdds = true;
  struct Lane {
    Claims<X> claims;
    uint32_t known = Claims<X>::kNone;  // the run of which this lane's token is in `ranks`
    TokenRanks ranks{};
    int64_t chunk = -1;  // has arrived
  };

  MOE_PROTOCOL TokenJob(const X& x, const CombineArgs& a, const Epoch& epoch)
      : a_(a),
        shape_(a.common.layout.shape),
        handle_(a.common),
        window_(a.common.layout, a.common.window(), epoch),
        epoch_(epoch),
        outputs_(a),
        ownFirst_(*handle_.sourceFirst(shape_.rank)),
        tokens_(static_cast<uint32_t>(a.common.handleHead()->numTokens)),
        grain_(tokens_, int64_t{a.common.blocks} * x.reducers(), shape_.combineRowBytes, {kEvenRuns, 1}),
        total_((tokens_ + static_cast<uint32_t>(grain_.rows) - 1) / static_cast<uint32_t>(grain_.rows) *
               static_cast<uint32_t>(grain_.slices)) {}

  MOE_PROTOCOL int64_t itemBytes() const { return ReduceItem::bytes(shape_.distinct); }
  MOE_PROTOCOL int64_t mostSources() const { return shape_.distinct; }
  MOE_PROTOCOL bool wide() const {
    const RowsOut& out = a_.output;
    auto bits = reinterpret_cast<uintptr_t>(out.data) | static_cast<uintptr_t>(out.stride | rowBytes());
    if (!shape_.expertLayout() && !a_.inPlace) {
      bits |= reinterpret_cast<uintptr_t>(a_.rows.data) | static_cast<uintptr_t>(a_.rows.stride);
    }
    return bits % 16 == 0;
  }
  MOE_PROTOCOL bool weighted() const { return false; }
  MOE_PROTOCOL int32_t type() const { return shape_.combineType; }
  MOE_PROTOCOL int64_t rowBytes() const { return shape_.combineRowBytes / grain_.slices; }

  MOE_PROTOCOL void start(X& x, Lane& lane) const {
    lane.claims.startClaims(x, &a_.common.control()->receivedClaims, total_);
  }

  MOE_PROTOCOL void prefetchRun(X& x, Lane& lane) const {
    lane.known = lane.claims.next(x);
    uint32_t token = firstToken(lane.known) + static_cast<uint32_t>(x.lane());
    if (lane.known < total_ && x.lane() < grain_.rows && token < tokens_) lane.ranks = *handle_.ranks(token);
  }

  MOE_PROTOCOL RunState beginRun(X& x, int64_t, RunItems items, Lane& lane) const {
    uint32_t run = lane.claims.advance(x);
    if (run >= total_) return RunState::kEnd;
    uint32_t first = firstToken(run);
    int64_t offset = run % static_cast<uint32_t>(grain_.slices) * rowBytes();
    if (!waitForChunk(x, first / static_cast<uint32_t>(kChunkTokens), lane)) return RunState::kFailed;
    MOE_ROLL for (int j = x.lane(); j < kRunRows; j += x.lanes()) {
      int64_t token = int64_t{first} + j;
      auto* item = items.as<ReduceItem>(j);
      if (j >= grain_.rows || token >= tokens_) {
        *item = {nullptr, 0, 0};
        continue;
      }
      TokenRanks ranks = run == lane.known && j == x.lane() ? lane.ranks : *handle_.ranks(token);
      *item = {a_.output.data + token * a_.output.stride + offset, ranks.count, 0};
      MOE_ROLL for (int ordinal = 0; ordinal < ranks.count; ++ordinal) {
        bool own = ranks.ownSlot >= 0 && ordinal == ranks.ownOrdinal && !shape_.expertLayout();
        const std::byte* row = own ? outputs_.row(shape_.rank, ranks.ownSlot, ownFirst_) : window_.row(token, ordinal);
        item->sources()[ordinal] = {row ? row + offset : nullptr, 1.0f};
      }
    }
    return RunState::kReady;
  }
  MOE_PROTOCOL void finishedRun(X&, int64_t, Lane&) const {}

 private:
  MOE_PROTOCOL uint32_t firstToken(uint32_t run) const {
    return run / static_cast<uint32_t>(grain_.slices) * static_cast<uint32_t>(grain_.rows);
  }

  MOE_PROTOCOL bool waitForChunk(X& x, int64_t chunk, Lane& lane) const {
    if (chunk == lane.chunk) return true;
    bool ok = true;
    MOE_ROLL for (int sender = x.lane(); ok && sender < shape_.nranks; sender += x.lanes()) {
      if (sender == shape_.rank && !shape_.expertLayout()) continue;
      ok = x.wait(window_.chunkSignal(sender, chunk), epoch_, Awaited::kCombineRows, sender);
    }
    lane.chunk = chunk;
    return x.warpAll(ok);
  }

  const CombineArgs& a_;
  const Shape& shape_;
  HandleView handle_;
  CombineWindow window_;
  Epoch epoch_;
  ExpertRows outputs_;
  int64_t ownFirst_;  // row of this rank's own first record
  uint32_t tokens_;
  Grain grain_;
  uint32_t total_;  // runs
};

// Tells every source which dispatch this rank combines. All warps of one block: the last ones, while the first ones
// wait for rows.
template <class X>
MOE_PROTOCOL void tellHeads(X& x, const CombineArgs& a, const Epoch& epoch) {
  const Layout& layout = a.common.layout;
  MOE_ROLL for (int peer = x.threads() - 1 - x.thread(); peer < layout.shape.nranks; peer += x.threads()) {
    CombineWindow window(layout, a.common.windows[peer], epoch);
    int64_t dispatched = 0;
    int32_t chunks = 0;
    if (a.common.handle) {
      dispatched = static_cast<int64_t>(a.common.handleHead()->dispatchEpoch);
      chunks = *HandleView(a.common).sourceChunks(peer);
    }
    *window.head(layout.shape.rank) = {dispatched, chunks, a.common.refusal};
    x.signal(window.headSignal(layout.shape.rank), epoch);
  }
}

// Looks at the head of a sender: a refusal, or a handle of another dispatch than `mine`.
MOE_PROTOCOL Refusal checkHead(const CombineArgs& a, const CombineWindow& window, int sender, int64_t mine) {
  CombineHead head = *window.head(sender);
  if (head.refusal != 0) return {head.refusal, sender, 0, 0};
  if (a.common.handle && head.dispatchEpoch != mine) return {moeMismatch, sender, head.dispatchEpoch, mine};
  return {0, 0, 0, 0};
}

// Waits for the heads of all senders and looks at them. All threads of a block get the same; false after a failure.
template <class X>
MOE_PROTOCOL bool awaitHeads(X& x, const CombineArgs& a, const Epoch& epoch, Refusal* refusal) {
  const Shape& shape = a.common.layout.shape;
  CombineWindow window(a.common.layout, a.common.window(), epoch);
  int64_t mine = a.common.handle ? static_cast<int64_t>(a.common.handleHead()->dispatchEpoch) : 0;
  bool ok = true, fine = true;
  MOE_ROLL for (int sender = x.thread(); ok && sender < shape.nranks; sender += x.threads()) {
    ok = x.wait(window.headSignal(sender), epoch, Awaited::kCombineHead, sender);
    fine = fine && ok && checkHead(a, window, sender, mine).code == 0;
  }
  *refusal = {0, 0, 0, 0};
  if (x.barrier(fine)) return true;
  if (!x.barrier(ok)) return false;
  MOE_ROLL for (int sender = 0; refusal->code == 0 && sender < shape.nranks; ++sender) {
    *refusal = checkHead(a, window, sender, mine);
  }
  return true;
}

// A combine that somebody refused: nothing is added, but what was sent is waited for, so that the buffers stay in step.
template <class X>
MOE_PROTOCOL bool drainCombine(X& x, const CombineArgs& a, const Epoch& epoch, const Refusal& refusal) {
  const Shape& shape = a.common.layout.shape;
  CombineWindow window(a.common.layout, a.common.window(), epoch);
  if (x.block() == a.common.blocks - 1 && x.thread() == 0) tellOutcome(a.common, refusal);
  bool ok = true;
  MOE_ROLL for (int sender = 0; ok && sender < shape.nranks; ++sender) {
    if (sender == shape.rank && !shape.expertLayout()) continue;  // sends itself nothing
    int64_t chunks = smaller(window.head(sender)->chunks, shape.chunks);
    MOE_ROLL for (int64_t chunk = x.thread(); ok && chunk < chunks; chunk += x.threads()) {
      ok = x.wait(window.chunkSignal(sender, chunk), epoch, Awaited::kCombineRows, sender);
    }
  }
  return x.barrier(ok);
}

// The receiving half of a combine. All warps of the receiving blocks, and of those that have sent; false after a
// failure.
template <class X>
MOE_PROTOCOL bool receiveCombine(X& x, const CombineArgs& a, const Epoch& epoch) {
  Refusal refusal;
  if (!a.common.handle) return awaitHeads(x, a, epoch, &refusal) && drainCombine(x, a, epoch, refusal);
  TokenJob<X> job(x, a, epoch);  // before the wait: it loads
  if (!awaitHeads(x, a, epoch, &refusal)) return false;
  if (refusal.code != 0) return drainCombine(x, a, epoch, refusal);
  bool ok = true;
  if (x.warp() < x.reducers()) ok = x.reduceRows(job);
  return x.barrier(ok);
}

template <class X>
MOE_PROTOCOL bool sendPartialRows(X& x, const CombineArgs& a, const Epoch& epoch) {
  if (a.common.layout.shape.expertLayout()) {
    if (x.warp() >= x.reducers()) return true;
    SumJob<X> job(x, a, epoch);
    return x.reduceRows(job);
  }
  if (x.warp() >= x.streamers()) return true;
  CopyJob<X> job(x, a, epoch);
  return x.streamRows(job);
}

// Tells every source which dispatch is combined, and what has been sent to it. All warps of one block.
template <class X>
MOE_PROTOCOL bool signalPartialRows(X& x, const CombineArgs& a, const Epoch& epoch) {
  tellConsumed(x, a.common, consumedBefore(a), x.threads() - 1 - x.thread(), x.threads());
  if (!x.barrier(peersConsumed(x, a.common, epoch, consumedCombine, consumedBefore(a), true))) return false;
  tellHeads(x, a, epoch);
  return !a.common.handle || signalWhenStored(x, a.common.layout.shape.rank, PartialChunks(a, epoch));
}

// A combine on every warp of the grid. False after a failure, which the Exec has recorded.
template <class X>
MOE_PROTOCOL bool directCombine(X& x, const CombineArgs& a) {
  Control* control = a.common.control();
  Epoch epoch(control->combineEpoch + 1, a.common.layout.shape);
  // A refused dispatch was refused on all ranks: all leave its combine out, and nobody is told.
  bool leftOut = a.common.handle && a.common.handleHead()->refusal != 0;
  bool ok = true;
  if (!leftOut && x.block() < a.common.sendBlocks) {
    ok = x.barrier(peersConsumed(x, a.common, epoch, consumedCombine, consumedBefore(a), true));
    if (ok && a.common.handle) ok = sendPartialRows(x, a, epoch);
  }
  if (!x.barrier(ok)) return false;
  bool signals = !leftOut && x.block() == a.common.signalBlock;
  if (signals) ok = signalPartialRows(x, a, epoch);
  if (!x.barrier(ok)) return false;
  if (signals && a.common.handle && x.thread() == 0) countReturned(a);
  bool receives = x.block() >= a.common.blocks - a.common.receiveBlocks;
  // A block that has sent may help, but not in place of the one that signals: the peers wait for that.
  if (!receives) receives = x.barrier(x.thread() != 0 || x.started(&control->ticket, a.common.signalBlock));
  if (!leftOut && receives && !receiveCombine(x, a, epoch)) return false;
  if (x.lastBlock(&control->finishedBlocks, a.common.blocks) && x.thread() == 0) {
    resetCounters(x, control);
    if (leftOut) {
      const HandleHead& head = *a.common.handleHead();
      tellOutcome(a.common, {static_cast<int32_t>(head.refusal), static_cast<int32_t>(head.refusedBy), 0, 0});
    } else {
      finishCombine(a, epoch);
    }
  }
  return true;
}

}  // namespace moe
