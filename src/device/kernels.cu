// SPDX-License-Identifier: Apache-2.0
// The protocols, compiled for the GPU.
#include "device/direct_combine.h"
#include "device/direct_dispatch.h"
#include "device/exec_cuda.cuh"
#include "device/kernels.h"
#include "device/low_latency_combine.h"
#include "device/low_latency_dispatch.h"

namespace moe {
namespace {

#ifdef MOE_MUTANT_EARLY_EPOCH
// The first block moves the epoch on, and not the last one.
__device__ void moveEpoch(const CudaExec& exec, const DispatchArgs& args) {
  if (exec.block() != 0 || exec.thread() != 0 || !(args.phases & kPhaseSend)) return;
  volatile uint64_t* epoch = &args.common.control()->dispatchEpoch;
  *epoch = *epoch + 1;
}
#else
__device__ void moveEpoch(const CudaExec&, const DispatchArgs&) {}
#endif

extern __shared__ __align__(128) std::byte shared[];

// Arguments lie in constant memory, of which each line that is used for the first time costs a wait. The warps of a
// block touch them all together.
template <class Launch>
__device__ __forceinline__ void touchArguments(const Launch& launch) {
  constexpr unsigned kLineWords = 16, kLines = (sizeof(Launch) + 63) / 64;
  const auto* words = reinterpret_cast<const uint32_t*>(&launch);
  for (unsigned line = threadIdx.x / 32; line < kLines; line += blockDim.x / 32) {
    uint32_t word = words[line * kLineWords];
    asm volatile("" ::"r"(word));
  }
}

// Low-latency kernels may be launched while the one before them still runs, so that their launch is not waited for: see
// CudaBackend::startsEarly.
template <class Launch>
__device__ __forceinline__ void startEarly(const Launch& launch) {
  ptx::startKernelAfter();
  touchArguments(launch);
  ptx::awaitKernelBefore();
}

__global__ void __launch_bounds__(32 * kDispatchWarps, 1)
    dispatchKernel(const __grid_constant__ DispatchLaunch launch) {
  CudaExec exec(launch.grid, launch.op.common.control(), shared);
  if (exec.usable()) {
    moveEpoch(exec, launch.op);
    directDispatch(exec, launch.op);
  } else if (blockIdx.x == 0 && launch.op.phases & kPhaseReceive) {
    writeNoCounts(exec, launch.op);
  }
}

__global__ void __launch_bounds__(32 * kDispatchWarps, 1) countKernel(const __grid_constant__ DispatchLaunch launch) {
  CudaExec exec(launch.grid, launch.op.common.control(), shared);
  if (exec.usable()) countDispatch(exec, launch.op);
}

__global__ void __launch_bounds__(32 * kCombineWarps, 1) combineKernel(const __grid_constant__ CombineLaunch launch) {
  CudaExec exec(launch.grid, launch.op.common.control(), shared);
  if (exec.usable()) directCombine(exec, launch.op);
}

template <class Exec>
__global__ void __launch_bounds__(32 * kDispatchWarps, 1)
    slotDispatchKernel(const __grid_constant__ DispatchLaunch launch) {
  startEarly(launch);
  Exec exec(launch.grid, shared);
  moveEpoch(exec, launch.op);
  slotDispatch(exec, launch.op);
}

__global__ void __launch_bounds__(32 * kDispatchWarps, 1)
    slotCountKernel(const __grid_constant__ DispatchLaunch launch) {
  startEarly(launch);
  CudaExec exec(launch.grid, shared);
  if (exec.barrier(exec.usable())) slotCount(exec, launch.op);
}

__global__ void __launch_bounds__(32 * kCombineWarps, 1)
    slotCombineKernel(const __grid_constant__ CombineLaunch launch) {
  startEarly(launch);
  CudaExec exec(launch.grid, shared);
  slotCombine(exec, launch.op);
}

}  // namespace

int64_t slotScratchBytes(const Layout& layout) {
  return warpHeadBytes(layout, kDispatchWarps) + SlotRouter<CudaExec>::bytes(layout.shape);
}

int64_t dispatchItemBytes(const Layout& layout) {
  return larger(SendJob<CudaExec>::itemBytes(layout), PlaceJob<CudaExec>::itemBytes(layout.shape));
}

const void* kernelAddress(Kernel kernel) {
  switch (kernel) {
    case Kernel::kDispatch: return reinterpret_cast<const void*>(&dispatchKernel);
    case Kernel::kCount: return reinterpret_cast<const void*>(&countKernel);
    case Kernel::kCombine: return reinterpret_cast<const void*>(&combineKernel);
    case Kernel::kSlotDispatch: return reinterpret_cast<const void*>(&slotDispatchKernel<CudaExec>);
    case Kernel::kSlotCount: return reinterpret_cast<const void*>(&slotCountKernel);
    case Kernel::kSlotCombine: return reinterpret_cast<const void*>(&slotCombineKernel);
    case Kernel::kFewRowsDispatch: return reinterpret_cast<const void*>(&slotDispatchKernel<FewRowsExec>);
  }
  return nullptr;
}

}  // namespace moe
