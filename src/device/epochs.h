// SPDX-License-Identifier: Apache-2.0
// When a buffer may be written again: a receiver tells each source up to which epoch it has read, and a sender writes
// epoch e only once everybody has read e - buffers.
//
// What an operation has read is told at the start of the next one: told at its own end, a fence would hold up whoever
// waits for the operation, for 3 us on H200s. So a sender may have to wait until its peers have called what comes after
// the reading, at the latest the very operation that it is in.
#pragma once

#include "device/window_view.h"

namespace moe {

// Where in `window` rank `reader` says what it has read; consumedDispatch or consumedCombine.
using ConsumedWord = uint64_t* (*)(const Layout& layout, std::byte* window, int reader);

// What this rank has read of what its peers sent, before it sends.
struct Consumed {
  uint64_t dispatches, combines;
};

// Tells every peer what has been read. `threads` share the peers, of which this is number `thread`.
template <class X>
MOE_PROTOCOL void tellConsumed(X& x, const CommonArgs& common, const Consumed& consumed, int thread, int threads) {
  const Layout& layout = common.layout;
  MOE_ROLL for (int peer = thread; peer < layout.shape.nranks; peer += threads) {
    std::byte* window = common.windows[peer];
    x.signal(consumedDispatch(layout, window, layout.shape.rank), consumed.dispatches);
    x.signal(consumedCombine(layout, window, layout.shape.rank), consumed.combines);
  }
}

// The epoch that peers must have read before `epoch` is sent; 0 if none.
MOE_PROTOCOL uint64_t mustBeConsumed(uint64_t epoch, const Shape& shape) {
  auto buffers = static_cast<uint64_t>(shape.buffers);
#ifdef MOE_MUTANT_UNREAD_OVERWRITE
  buffers = epoch;
#endif
  return epoch > buffers ? epoch - buffers : 0;
}

// Whether the peers that are this thread's have read that already. All warps of a block share the peers, of which the
// last have less to do than others.
template <class X>
MOE_PROTOCOL bool peersHaveConsumed(const X& x, const CommonArgs& common, uint64_t epoch, ConsumedWord word) {
  uint64_t wanted = mustBeConsumed(epoch, common.layout.shape);
  bool ok = true;
  MOE_ROLL for (int peer = x.threads() - 1 - x.thread(); wanted > 0 && peer < common.layout.shape.nranks;
                peer += x.threads()) {
    ok = ok && x.sees(word(common.layout, common.window(), peer), wanted);
  }
  return ok;
}

// Waits until every peer has read what this rank sent `buffers` epochs ago. All warps of the block share the peers:
// true of a thread says nothing of the others' peers. Another block tells `consumed` meanwhile; but it may need the SM
// that this one waits on, so the first block tells it, too, before it waits. `copies`: the copy engine writes next.
template <class X>
MOE_PROTOCOL bool peersConsumed(X& x, const CommonArgs& common, uint64_t epoch, ConsumedWord word,
                                const Consumed& consumed, bool copies) {
  uint64_t wanted = mustBeConsumed(epoch, common.layout.shape);
  bool ok = true;
  MOE_ROLL for (int peer = x.thread(); ok && wanted > 0 && peer < common.layout.shape.nranks; peer += x.threads()) {
    const uint64_t* read = word(common.layout, common.window(), peer);
    if (copies ? x.has(read, wanted) : x.sees(read, wanted)) continue;
    if (x.block() == 0) tellConsumed(x, common, consumed, 0, 1);
    // Never given up: what is sent is not left to others.
    do {
      ok = x.wait(read, wanted, Awaited::kConsumed, peer);
    } while (!ok && !x.failed());
  }
  return ok;
}

// Reports that the operation was refused, unless this rank has refused it, too: its call has said so already. One
// thread.
MOE_PROTOCOL void tellOutcome(const CommonArgs& common, const Refusal& refusal) {
  if (common.refusal == 0) *common.outcome = refusal;
}

// For the next operation. One thread of the last block.
template <class X>
MOE_PROTOCOL void resetCounters(X& x, Control* control) {
  x.reset(&control->finishedBlocks);
  x.reset(&control->ticket);
  x.reset(&control->sentClaims);
  x.reset(&control->receivedClaims);
}

// Notes that dispatch `epoch` has been read, and what can be released now: epochs go in order, and views hold theirs
// back. One thread.
MOE_PROTOCOL void finishReading(const CommonArgs& common, uint64_t epoch) {
  Control* control = common.control();
  const Divisor& byBuffers = common.layout.shape.byBuffers;
  control->readDispatch[byBuffers.wideRemainder(epoch)] = epoch;
  uint64_t released = control->releasedDispatch;
  while (control->readDispatch[byBuffers.wideRemainder(released + 1)] == released + 1) ++released;
  control->releasedDispatch = released;
}

}  // namespace moe
