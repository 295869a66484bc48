// SPDX-License-Identifier: Apache-2.0
#include "baseline_kernels.h"
#include "elements.cuh"

namespace moe::perf {
namespace {

constexpr int kPlanThreads = 1024;
constexpr int kRowThreads = 256;
constexpr int kWarp = 32;

__device__ int64_t idAt(const BaselineShape& shape, const void* ids, int64_t at) {
  return shape.wideIds ? static_cast<const int64_t*>(ids)[at] : static_cast<const int32_t*>(ids)[at];
}

__device__ int64_t firstExpert(const BaselineShape& shape, int rank) {
  int64_t longer = shape.experts % shape.ranks;
  return rank * (shape.experts / shape.ranks) + (rank < longer ? rank : longer);
}

__device__ int ownerOf(const BaselineShape& shape, int64_t expert) {
  if (expert < 0 || expert >= shape.experts) return -1;
  int64_t share = shape.experts / shape.ranks;
  int64_t longer = shape.experts % shape.ranks;
  if (expert < longer * (share + 1)) return static_cast<int>(expert / (share + 1));
  return static_cast<int>(longer + (expert - longer * (share + 1)) / share);
}

// The rank that row `at` of rows ordered by rank belongs to; *index: its number there.
__device__ int rankOf(const int32_t* counts, int64_t at, int64_t* index) {
  int rank = 0;
  while (at >= counts[rank]) at -= counts[rank++];
  *index = at;
  return rank;
}

// How many threads of the block before this one have `flag`, and in *total how many in all.
__device__ int countBefore(bool flag, int* total) {
  __shared__ int warps[kPlanThreads / kWarp];
  unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  unsigned votes = __ballot_sync(0xffffffffu, flag);
  __syncthreads();
  if (lane == 0) warps[warp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  *total = 0;
  for (unsigned i = 0; i < kPlanThreads / kWarp; ++i) {
    if (i < warp) before += warps[i];
    *total += warps[i];
  }
  return before;
}

// One block a rank.
__global__ void planKernel(BaselineShape shape, const void* ids, BaselinePlan plan) {
  auto rank = static_cast<int>(blockIdx.x);
  int filled = 0;
  for (int64_t base = 0; base < shape.tokens; base += kPlanThreads) {
    int64_t token = base + threadIdx.x;
    bool mine = false;
    for (int k = 0; token < shape.tokens && k < shape.topk; ++k) {
      mine = mine || ownerOf(shape, idAt(shape, ids, token * shape.topk + k)) == rank;
    }
    int total = 0;
    int place = filled + countBefore(mine, &total);
    filled += total;
    if (token >= shape.tokens) continue;
    if (mine) plan.tokens[rank * shape.tokens + place] = static_cast<int32_t>(token);
    bool first = true;
    for (int64_t at = token * shape.topk; at < (token + 1) * shape.topk; ++at) {
      int owner = ownerOf(shape, idAt(shape, ids, at));
      if (owner == rank) {
        plan.slots[at] = first ? place : -1;
        first = false;
      } else if (owner < 0 && rank == 0) {
        plan.slots[at] = -1;
      }
    }
  }
  if (threadIdx.x == 0) plan.sendCounts[rank] = filled;
}

__device__ void copyRow(std::byte* to, const std::byte* from, int64_t bytes) {
  auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes);
  if (odd % sizeof(uint4) == 0) {
    for (int64_t i = threadIdx.x; i < bytes / int64_t{sizeof(uint4)}; i += blockDim.x) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// One block a record.
__global__ void packKernel(BaselineShape shape, BaselinePlan plan, const std::byte* rows, const std::byte* scales,
                           const void* ids, const float* weights, std::byte* records) {
  int64_t index = 0;
  int rank = rankOf(plan.sendCounts, blockIdx.x, &index);
  int64_t token = plan.tokens[rank * shape.tokens + index];
  std::byte* record = records + blockIdx.x * shape.recordBytes;
  copyRow(record, rows + token * shape.rowBytes, shape.rowBytes);
  copyRow(record + shape.scalesAt, scales + token * shape.scaleBytes, shape.scaleBytes);
  for (int k = static_cast<int>(threadIdx.x); k < shape.topk; k += kRowThreads) {
    int64_t at = token * shape.topk + k;
    reinterpret_cast<int32_t*>(record + shape.idsAt)[k] = static_cast<int32_t>(idAt(shape, ids, at));
    reinterpret_cast<float*>(record + shape.weightsAt)[k] = weights[at];
  }
  if (threadIdx.x == 0) *reinterpret_cast<int32_t*>(record + shape.tokenAt) = static_cast<int32_t>(token);
}

// One block a record. Ids of other ranks become -1.
__global__ void unpackKernel(BaselineShape shape, const std::byte* records, const int32_t* receiveCounts,
                             BaselineRows to) {
  int64_t row = blockIdx.x, index = 0;
  int source = rankOf(receiveCounts, row, &index);
  const std::byte* record = records + row * shape.recordBytes;
  copyRow(to.rows + row * shape.rowBytes, record, shape.rowBytes);
  copyRow(to.scales + row * shape.scaleBytes, record + shape.scalesAt, shape.scaleBytes);
  int64_t first = firstExpert(shape, shape.rank), end = firstExpert(shape, shape.rank + 1);
  for (int k = static_cast<int>(threadIdx.x); k < shape.topk; k += kRowThreads) {
    int64_t at = row * shape.topk + k;
    int64_t id = reinterpret_cast<const int32_t*>(record + shape.idsAt)[k];
    if (id < first || id >= end) id = -1;
    if (shape.wideIds) {
      static_cast<int64_t*>(to.ids)[at] = id;
    } else {
      static_cast<int32_t*>(to.ids)[at] = static_cast<int32_t>(id);
    }
    to.weights[at] = reinterpret_cast<const float*>(record + shape.weightsAt)[k];
  }
  if (threadIdx.x != 0) return;
  to.sources[2 * row] = source;
  to.sources[2 * row + 1] = *reinterpret_cast<const int32_t*>(record + shape.tokenAt);
}

// Adds one vector of 16 bytes of each partial row.
__device__ void reduceVector(int32_t type, const int64_t* rows, int count, const std::byte* partials, int64_t rowBytes,
                             int64_t at, std::byte* output) {
  constexpr int kMost = 8;
  int elements = type == moeFloat32 ? 4 : kMost;
  float sums[kMost] = {};
  for (int i = 0; i < count; ++i) {
    alignas(16) std::byte bytes[sizeof(uint4)];
    *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(partials + rows[i] * rowBytes + at);
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j < elements) sums[j] = __fadd_rn(sums[j], decodeElement(type, bytes, j));
    }
  }
  alignas(16) std::byte bytes[sizeof(uint4)];
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    if (j < elements) encodeElement(type, bytes, j, sums[j]);
  }
  *reinterpret_cast<uint4*>(output + at) = *reinterpret_cast<const uint4*>(bytes);
}

// One block a token: its partial rows in the order in which their ranks first appear among its ids.
__global__ void reduceKernel(BaselineShape shape, BaselinePlan plan, const void* ids, const std::byte* partials,
                             std::byte* output) {
  __shared__ int64_t rows[MOE_MAX_TOPK];
  __shared__ int count;
  int64_t token = blockIdx.x;
  if (threadIdx.x == 0) {
    count = 0;
    for (int64_t at = token * shape.topk; at < (token + 1) * shape.topk; ++at) {
      if (plan.slots[at] < 0) continue;
      int64_t row = plan.slots[at];
      int owner = ownerOf(shape, idAt(shape, ids, at));
      for (int rank = 0; rank < owner; ++rank) row += plan.sendCounts[rank];
      rows[count++] = row;
    }
  }
  __syncthreads();
  int64_t element = shape.combineType == moeFloat32 ? 4 : 2;
  int64_t bytes = shape.hidden * element;
  std::byte* to = output + token * bytes;
  if (bytes % int64_t{sizeof(uint4)} == 0) {
    for (int64_t at = int64_t{threadIdx.x} * 16; at < bytes; at += int64_t{kRowThreads} * 16) {
      reduceVector(shape.combineType, rows, count, partials, bytes, at, to);
    }
    return;
  }
  for (int64_t i = threadIdx.x; i < shape.hidden; i += kRowThreads) {
    float sum = 0;
    for (int row = 0; row < count; ++row) {
      sum = __fadd_rn(sum, decodeElement(shape.combineType, partials + rows[row] * bytes, i));
    }
    encodeElement(shape.combineType, to, i, sum);
  }
}

}  // namespace

void launchPlan(const BaselineShape& shape, const void* ids, const BaselinePlan& plan, cudaStream_t stream) {
  planKernel<<<static_cast<unsigned>(shape.ranks), kPlanThreads, 0, stream>>>(shape, ids, plan);
}

void launchPack(const BaselineShape& shape, const BaselinePlan& plan, const std::byte* rows, const std::byte* scales,
                const void* ids, const float* weights, std::byte* records, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  packKernel<<<static_cast<unsigned>(count), kRowThreads, 0, stream>>>(shape, plan, rows, scales, ids, weights,
                                                                       records);
}

void launchUnpack(const BaselineShape& shape, const std::byte* records, const int32_t* receiveCounts, int64_t count,
                  const BaselineRows& to, cudaStream_t stream) {
  if (count == 0) return;
  unpackKernel<<<static_cast<unsigned>(count), kRowThreads, 0, stream>>>(shape, records, receiveCounts, to);
}

void launchReduce(const BaselineShape& shape, const BaselinePlan& plan, const void* ids, const std::byte* partials,
                  std::byte* output, cudaStream_t stream) {
  if (shape.tokens == 0) return;
  reduceKernel<<<static_cast<unsigned>(shape.tokens), kRowThreads, 0, stream>>>(shape, plan, ids, partials, output);
}

}  // namespace moe::perf
