// SPDX-License-Identifier: Apache-2.0
// Marks functions that are compiled for the CPU and, under nvcc, for the GPU.
#pragma once

#if defined(__CUDACC__)
#define MOE_HD __host__ __device__
// Protocols: for the CPU when a C++ compiler reads them, for the GPU when nvcc does. There they are inlined, since an
// Exec whose address a real function takes would live in memory, not in registers.
#define MOE_PROTOCOL __device__ __forceinline__
#else
#define MOE_HD
#define MOE_PROTOCOL inline
#endif

// Before a loop whose iterations must become straight code, so that their loads overlap.
#if defined(__CUDA_ARCH__)
#define MOE_UNROLL _Pragma("unroll")
#else
#define MOE_UNROLL
#endif

// Before a loop that runs once an operation: instructions that are executed once must be fetched from far away, so
// there should be few.
#if defined(__CUDA_ARCH__)
#define MOE_ROLL _Pragma("unroll 1")
#else
#define MOE_ROLL
#endif

#include <cstdint>

namespace moe {

MOE_HD inline int popcount(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

// The number of the lowest bit that is set; `word` is not 0.
MOE_HD inline int lowestBit(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return __builtin_ctzll(word);
#endif
}

}  // namespace moe
