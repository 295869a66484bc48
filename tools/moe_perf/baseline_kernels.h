// SPDX-License-Identifier: Apache-2.0
// Kernels around a library that only sends and receives: packing, unpacking and adding. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace moe::perf {

// A layer as one rank sees it, and what one token looks like on the wire: payload, scales, ids (as int32), weights and
// the token's number.
struct BaselineShape {
  int32_t rank = 0, ranks = 1;
  int32_t topk = 1;
  bool wideIds = false;
  int64_t tokens = 0, experts = 1;
  int64_t rowBytes = 0, scaleBytes = 0;
  int64_t scalesAt = 0, idsAt = 0, weightsAt = 0, tokenAt = 0, recordBytes = 0;
  int64_t hidden = 0;
  int32_t combineType = 0;
};

// Which tokens go to which rank. All device memory.
struct BaselinePlan {
  int32_t* tokens;      // [ranks][tokens]: those that go to each rank, in order
  int32_t* slots;       // [tokens][topk]: a token's place among those; -1 unless the entry is its rank's first
  int32_t* sendCounts;  // [ranks]
};

struct BaselineRows {
  std::byte* rows;
  std::byte* scales;
  void* ids;
  float* weights;
  int32_t* sources;
};

void launchPlan(const BaselineShape& shape, const void* ids, const BaselinePlan& plan, cudaStream_t stream);
void launchPack(const BaselineShape& shape, const BaselinePlan& plan, const std::byte* rows, const std::byte* scales,
                const void* ids, const float* weights, std::byte* records, int64_t count, cudaStream_t stream);
void launchUnpack(const BaselineShape& shape, const std::byte* records, const int32_t* receiveCounts, int64_t count,
                  const BaselineRows& to, cudaStream_t stream);
// partials: [rank][place] rows in the order of the plan.
void launchReduce(const BaselineShape& shape, const BaselinePlan& plan, const void* ids, const std::byte* partials,
                  std::byte* output, cudaStream_t stream);

}  // namespace moe::perf
