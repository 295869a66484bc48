// SPDX-License-Identifier: Apache-2.0
// What operations find and leave behind, whatever their path.
#pragma once

#include "device/epochs.h"
#include "device/window_view.h"

namespace moe {

// What has been read before dispatch `epoch`, of which `noted` is known. Views that have been out for `buffers` epochs
// end here: the stream has passed their readers.
MOE_PROTOCOL Consumed withEndedViews(Consumed noted, uint64_t epoch, const Shape& shape) {
  auto buffers = static_cast<uint64_t>(shape.buffers);
  uint64_t ended = epoch > buffers ? epoch - buffers : 0;
  return {noted.dispatches > ended ? noted.dispatches : ended, noted.combines};
}
MOE_PROTOCOL Consumed consumedBefore(const DispatchArgs& a, uint64_t epoch) {
  const Control* control = a.common.control();
  return withEndedViews({control->releasedDispatch, control->combineEpoch}, epoch, a.common.layout.shape);
}

// What has been read before a combine.
MOE_PROTOCOL Consumed consumedBefore(const CombineArgs& a) {
  return {a.common.control()->releasedDispatch, a.common.control()->combineEpoch};
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

// What a dispatch leaves behind of what it sent. One thread, when nobody needs to know any more what was before.
MOE_PROTOCOL void finishSending(const DispatchArgs& a, const Epoch& epoch) {
  if (!(a.phases & kPhaseSend)) return;
  a.common.control()->dispatchEpoch = epoch;
  if (!a.common.handle) return;
  a.common.handleHead()->dispatchEpoch = epoch;
  a.common.handleHead()->numTokens = a.numTokens;
}

// What one dispatch leaves behind. One thread, after all blocks: everybody waits for it.
MOE_PROTOCOL void finishDispatch(const DispatchArgs& a, const Epoch& epoch) {
  Control* control = a.common.control();
  HandleHead* head = a.common.handle ? a.common.handleHead() : nullptr;
  finishSending(a, epoch);
  if (a.phases & kPhaseSend) control->releasedDispatch = consumedBefore(a, epoch).dispatches;
  bool keeps = a.views && head && head->refusal == 0;
  if (a.phases & kPhaseReceive && !keeps) finishReading(a.common, epoch);
}

// Adds to the statistics what has been sent. One thread of the block that has signalled all of it.
MOE_PROTOCOL void countReturned(const CombineArgs& a) {
  const Shape& shape = a.common.layout.shape;
  Control* control = a.common.control();
  HandleView handle(a.common);
  MOE_ROLL for (int source = 0; source < shape.nranks; ++source) {
    (source == shape.rank ? control->selfCombineRows : control->mappedCombineRows) +=
        static_cast<uint64_t>(*handle.sourceRows(source));
  }
}

// What one combine leaves behind. One thread, after all blocks: everybody waits for it.
MOE_PROTOCOL void finishCombine(const CombineArgs& a, const Epoch& epoch) {
  Control* control = a.common.control();
  HandleHead* head = a.common.handle ? a.common.handleHead() : nullptr;
  // Loaded together.
  uint64_t released = control->releasedDispatch, dispatched = head ? head->dispatchEpoch : 0;
  bool views = head && head->views;
  control->combineEpoch = epoch;
  if (views && dispatched > released) finishReading(a.common, dispatched);
  if (head) head->views = 0;
}

}  // namespace moe
