// SPDX-License-Identifier: Apache-2.0
// What operations find and leave behind, whatever their path.
#pragma once

#include "device/epochs.h"
#include "device/window_view.h"

namespace moe {

// What has been read before dispatch `epoch`. Views that have been out for `buffers` epochs end here: the stream has
// passed their readers.
MOE_PROTOCOL Consumed consumedBefore(const DispatchArgs& a, uint64_t epoch) {
  const Control* control = a.common.control();
  auto buffers = static_cast<uint64_t>(a.common.layout.shape.buffers);
  uint64_t ended = epoch > buffers ? epoch - buffers : 0, released = control->releasedDispatch;
  return {released > ended ? released : ended, control->combineEpoch};
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

// What one dispatch leaves behind. One thread, after all blocks: everybody waits for it.
MOE_PROTOCOL void finishDispatch(const DispatchArgs& a, const Epoch& epoch) {
  Control* control = a.common.control();
  HandleHead* head = a.common.handle ? a.common.handleHead() : nullptr;
  if (a.phases & kPhaseSend) {
    control->dispatchEpoch = epoch;
    control->releasedDispatch = consumedBefore(a, epoch).dispatches;
    if (head) {
      head->dispatchEpoch = epoch;
      head->numTokens = a.numTokens;
    }
  }
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
