// SPDX-License-Identifier: Apache-2.0
// When a buffer may be written again: a receiver tells each source up to which epoch it has read, and a sender writes
// epoch e only once everybody has read e - buffers.
#pragma once

#include "device/window_view.h"

namespace moe {

// Where in `window` rank `reader` says what it has read; consumedDispatch or consumedCombine.
using ConsumedWord = uint64_t* (*)(const Layout& layout, std::byte* window, int reader);

// Waits until every peer has read what this rank sent `buffers` epochs ago. All warps of the block share the peers:
// true of a thread says nothing of the others' peers.
template <class X>
MOE_PROTOCOL bool peersConsumed(X& x, const CommonArgs& common, uint64_t epoch, ConsumedWord word) {
  const Shape& shape = common.layout.shape;
  auto buffers = static_cast<uint64_t>(shape.buffers);
#ifdef MOE_MUTANT_UNREAD_OVERWRITE
  buffers = epoch;
#endif
  bool ok = true;
  MOE_ROLL for (int peer = x.thread(); ok && epoch > buffers && peer < shape.nranks; peer += x.threads()) {
    ok = x.wait(word(common.layout, common.window(), peer), epoch - buffers, Awaited::kConsumed, peer);
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

// Tells every peer that what it dispatched up to `epoch` has been read. One thread.
template <class X>
MOE_PROTOCOL void releaseDispatch(X& x, const CommonArgs& common, uint64_t epoch) {
  const Shape& shape = common.layout.shape;
  common.control()->releasedDispatch = epoch;
  x.signalMany(shape.nranks, epoch,
               [&](int peer) { return consumedDispatch(common.layout, common.windows[peer], shape.rank); });
}

// Notes that dispatch `epoch` has been read, and releases what can be released: epochs go in order, and views hold
// theirs back. One thread.
template <class X>
MOE_PROTOCOL void finishReading(X& x, const CommonArgs& common, uint64_t epoch) {
  Control* control = common.control();
  auto buffers = static_cast<uint64_t>(common.layout.shape.buffers);
  control->readDispatch[epoch % buffers] = epoch;
  uint64_t released = control->releasedDispatch;
  while (control->readDispatch[(released + 1) % buffers] == released + 1) ++released;
  if (released > control->releasedDispatch) releaseDispatch(x, common, released);
}

}  // namespace moe
