// SPDX-License-Identifier: Apache-2.0
// The one argument of each operation: plain data, copied to the device as it is.
#pragma once

#include <cstddef>

#include "device/failure.h"
#include "layout.h"

namespace moe {

// Which halves of a dispatch to run.
enum DispatchPhase : int32_t { kPhaseSend = 1, kPhaseReceive = 2, kPhaseBoth = 3 };

// Every rank's window as this rank sees it. The first ranks' travel with the arguments: a GPU need not load them.
struct WindowTable {
  static constexpr int kNear = 8;

  std::byte* near[kNear];
  std::byte* const* all;  // [nranks]

  MOE_HD std::byte* operator[](int rank) const { return rank < kNear ? near[rank] : all[rank]; }
};

// What every operation knows.
struct CommonArgs {
  Layout layout;
  WindowTable windows;
  std::byte* workspace;
  std::byte* handle;  // null in a refused call
  int32_t blocks;
  int32_t sendBlocks;     // blocks 0 .. sendBlocks-1 send
  int32_t signalBlock;    // tells the peers what has been sent; no lower than those that send
  int32_t receiveBlocks;  // the last receiveBlocks blocks receive; a block may do both
  // Low latency, see spreadOf(): of a row for each own token, and of one for each token of each rank.
  int32_t ownSpread, allSpread;
  int32_t refusal;   // moeResult_t with which this rank refuses its part of the call, else 0
  Refusal* outcome;  // zero before the call; a refused call is reported here by the last block

  MOE_HD std::byte* window() const { return windows[layout.shape.rank]; }
  MOE_HD Control* control() const { return reinterpret_cast<Control*>(workspace + layout.workspace.control); }
  MOE_HD HandleHead* handleHead() const { return reinterpret_cast<HandleHead*>(handle + layout.handle.head); }
};

struct RowsIn {
  const std::byte* data;
  int64_t stride;
};

struct RowsOut {
  std::byte* data;
  int64_t stride;
};

struct DispatchArgs {
  CommonArgs common;
  int32_t phases;
  // Send half.
  int64_t numTokens;
  int32_t topk;
  int32_t wideIds;  // 1: int64 ids
  const void* ids;  // null: the handle's (a repeated dispatch)
  const float* weights;
  RowsIn inputs[kMaxPayloads];  // none of scales that dispatch makes
  // Receive half; see moeReceive_t.
  int32_t views;
  int32_t localIds;
  int32_t wideOutIds;
  int64_t capacity;  // rows of an output; expert-padded: rows per expert
  RowsOut outputs[kMaxPayloads];
  void* outIds;
  float* outWeights;
  int32_t* outSources;
  int32_t* outRowExperts;
  int32_t* outRankCounts;
  int64_t* outRankOffsets;
  int32_t* outExpertCounts;
  int64_t* outExpertOffsets;
  moeSizes_t* outSizes;
};

// Whether the receiving half takes the payloads of this rank's own rows where the caller has them, so that they need
// not go through the window. Not if the caller may change them between the halves, or if they become something else.
MOE_HD inline bool placesOwnInput(const DispatchArgs& a) {
  return a.phases == kPhaseBoth && !a.views && !a.common.layout.shape.quantizes();
}

struct CombineArgs {
  CommonArgs common;
  int32_t applyWeights;
  int32_t inPlace;  // rows lie in the views of the handle's dispatch
  RowsIn rows;
  RowsOut output;
};

}  // namespace moe
