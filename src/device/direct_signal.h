// SPDX-License-Identifier: Apache-2.0
// How peers learn that rows have come: warps count the rows that they have stored, a counter a chunk, and one block
// watches the counters and signals.
#pragma once

#include "base/host_device.h"
#include "device/failure.h"

namespace moe {

// Tells of every chunk as soon as all of its rows are stored. All warps of one block, and not one of those that send if
// there is a choice: a fence takes long where the copy engine is busy. A warp watches as many chunks as it has lanes,
// and one fence serves all that have been completed since the last. `rank`: this one. A Chunks has
//   uint32_t count()
//   uint64_t* counter(nth)    null: the chunk does not exist
//   uint64_t rows(nth)        of the chunk
//   void signal(x, nth)       tells whom it concerns, by signalMany, which has the fence that waitAny leaves out
template <class X, class Chunks>
MOE_PROTOCOL bool signalWhenStored(X& x, int rank, const Chunks& chunks) {
  auto warp = static_cast<uint32_t>(x.warp()), warps = static_cast<uint32_t>(x.warps());
  auto lane = static_cast<uint32_t>(x.lane()), lanes = static_cast<uint32_t>(x.lanes());
  MOE_ROLL for (uint32_t first = 0; first < chunks.count(); first += warps * lanes) {
    uint32_t nth = first + lane * warps + warp;
    uint64_t* counter = nth < chunks.count() ? chunks.counter(nth) : nullptr;
    uint64_t rows = counter ? chunks.rows(nth) : 0;
    while (!x.warpAll(!counter)) {
      bool stored = false;
      if (!x.waitAny(counter, rows, Awaited::kSent, rank, &stored)) return false;
      if (!stored) continue;
      *counter = 0;
      chunks.signal(x, nth);
      counter = nullptr;
    }
  }
  return true;
}

}  // namespace moe
