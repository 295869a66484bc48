// SPDX-License-Identifier: Apache-2.0
// How one kernel runs: plain data, set by the host.
#pragma once

#include "base/peer_state.h"
#include "device/failure.h"
#include "layout.h"

namespace moe {

// How rows are staged in shared memory on their way. The first `warps` warps of a block take part.
struct Staging {
  int32_t warps;
  int32_t stages;  // rows, or parts of rows, in flight per warp; 0: rows are not staged
  int32_t bytes;   // of a stage, a multiple of 128

  MOE_HD int64_t warpBytes() const { return int64_t{stages} * bytes; }
  MOE_HD int64_t blockBytes() const { return warps * warpBytes(); }
};

struct CudaGrid {
  const Notices* notices;  // pinned; the PeerStates follow
  Failure* failure;        // pinned; written once
  uint32_t* failed;        // device memory: 1 after the first failure
  uint64_t timeoutNs;
  int32_t nranks, rank;
  // Dynamic shared memory of a block: the stages; items and barriers of each warp; the table. The first `warps`
  // warps carry or add rows.
  int32_t warps;
  Staging stream, reduce;
  int32_t itemBytes;   // a multiple of 16
  int32_t tableBytes;  // a multiple of 128
  // Where items and table begin: worked out once, before the launch.
  int32_t itemsAt, tableAt;
};

constexpr int kItemRuns = 2;  // runs whose items a warp keeps
constexpr int kMaxStages = 4;

// A warp streams or reduces.
MOE_HD inline int64_t stagesBytes(const CudaGrid& grid) {
  return larger(grid.stream.blockBytes(), grid.reduce.blockBytes());
}
// Of one warp: the items of kItemRuns runs, then its barriers.
MOE_HD inline int64_t itemsBytes(const CudaGrid& grid) { return kItemRuns * kRunRows * grid.itemBytes; }
MOE_HD inline int64_t bareWarpBytes(const CudaGrid& grid) { return itemsBytes(grid) + 8 * kMaxStages; }
MOE_HD inline int64_t sharedBytes(const CudaGrid& grid) {
  return stagesBytes(grid) + roundUp(grid.warps * bareWarpBytes(grid), 128) + grid.tableBytes;
}

}  // namespace moe
