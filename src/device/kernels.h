// SPDX-License-Identifier: Apache-2.0
// The kernels as the host sees them. Each takes one argument: the operation and how it runs.
#pragma once

#include "device/args.h"
#include "device/exec_cuda_grid.h"

namespace moe {

struct DispatchLaunch {
  DispatchArgs op;
  CudaGrid grid;
};

struct CombineLaunch {
  CombineArgs op;
  CudaGrid grid;
};

// A low-latency dispatch of few rows, which blocks share, has a kernel of its own.
enum class Kernel { kDispatch, kCount, kCombine, kSlotDispatch, kFewRowsDispatch, kSlotCount, kSlotCombine };
constexpr Kernel kKernels[] = {Kernel::kDispatch,        Kernel::kCount,     Kernel::kCombine,    Kernel::kSlotDispatch,
                               Kernel::kFewRowsDispatch, Kernel::kSlotCount, Kernel::kSlotCombine};
constexpr bool lowLatency(Kernel kernel) { return kernel >= Kernel::kSlotDispatch; }

// The address that cudaLaunchKernel and cudaFuncSetAttribute take.
const void* kernelAddress(Kernel kernel);

// Most bytes of an item of dispatch.
int64_t dispatchItemBytes(const Layout& layout);
// What a block of the low-latency path wants to keep in fast memory in a dispatch.
int64_t slotScratchBytes(const Layout& layout);

// Warps of a block. Combine wants registers more than warps: the stages leave no room in the first-level cache for
// registers that are spilled.
constexpr int kDispatchWarps = 16;
constexpr int kCombineWarps = 12;
constexpr int warpsOf(Kernel kernel) {
  return kernel == Kernel::kCombine || kernel == Kernel::kSlotCombine ? kCombineWarps : kDispatchWarps;
}

}  // namespace moe
