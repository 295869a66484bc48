// SPDX-License-Identifier: Apache-2.0
// How one kernel runs: plain data, set by the host.
#pragma once

#include "base/peer_state.h"
#include "device/failure.h"
#include "layout.h"

namespace moe {

struct CudaGrid {
  const Notices* notices;  // pinned; the PeerStates follow
  Failure* failure;        // pinned; written once
  uint32_t* failed;        // device memory: 1 after the first failure
  uint64_t timeoutNs;
  int32_t nranks, rank;
  int32_t stages;      // rows in flight per warp; 0: rows are not staged
  int32_t stageBytes;  // a multiple of 128
  int32_t itemBytes;   // a multiple of 16
  int32_t warpBytes;   // shared memory of one warp
};

constexpr int kItemRuns = 2;  // runs whose items a warp keeps
constexpr int kMaxStages = 4;
// Where a warp's items begin in its shared memory, and how much it needs. One mbarrier a stage comes last.
MOE_HD inline int64_t itemsOffset(int64_t stages, int64_t stageBytes) { return stages * stageBytes; }
MOE_HD inline int64_t warpSharedBytes(int64_t stages, int64_t stageBytes, int64_t itemBytes) {
  return roundUp(itemsOffset(stages, stageBytes) + kItemRuns * kRunRows * itemBytes + 8 * kMaxStages, 128);
}

}  // namespace moe
