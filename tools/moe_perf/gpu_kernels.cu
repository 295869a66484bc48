// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "gpu_kernels.h"
#include "numbers.h"

namespace moe::perf {
namespace {

// Longer than any rank takes to enqueue what it has to, shorter than anybody's patience with a spinning GPU.
constexpr uint64_t kGateNs = 30000000000u;
constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 8192;

__device__ uint64_t nowNs() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void gateKernel(const volatile uint32_t* opened, uint32_t turn) {
  uint64_t start = nowNs();
  while (static_cast<int32_t>(*opened - turn) < 0 && nowNs() - start < kGateNs) {
  }
}

__device__ float decode(int32_t type, const std::byte* row, int64_t i) {
  switch (type) {
    case moeFloat32: return reinterpret_cast<const float*>(row)[i];
    case moeFloat16: return __half2float(reinterpret_cast<const __half*>(row)[i]);
    case moeFloat8e4m3: {
      auto code = static_cast<__nv_fp8_storage_t>(row[i]);
      return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
    }
    default: return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]);
  }
}

__device__ void encode(int32_t type, std::byte* row, int64_t i, float value) {
  switch (type) {
    case moeFloat32: reinterpret_cast<float*>(row)[i] = value; break;
    case moeFloat16: reinterpret_cast<__half*>(row)[i] = __float2half_rn(value); break;
    default: reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(value);
  }
}

__device__ float factorOf(const ExpertRows& job, int64_t row) {
  if (!job.weights) return 1.0f;
  float sum = 0;
  for (int64_t at = row * job.topk; at < (row + 1) * job.topk; ++at) {
    int64_t id = job.wideIds ? static_cast<const int64_t*>(job.ids)[at] : static_cast<const int32_t*>(job.ids)[at];
    if (id >= 0) sum = __fadd_rn(sum, job.weights[at]);
  }
  return sum;
}

// The same arithmetic, operation by operation, as RowRun::multiplyRow does on the host. Input and output may be the
// same rows.
__global__ void expertKernel(ExpertRows job) {
  for (int64_t row = blockIdx.x; row < job.rows; row += gridDim.x) {
    float factor = factorOf(job, row);
    const std::byte* input = job.input + row * job.inputStride;
    const auto* scales = reinterpret_cast<const float*>(job.scales + row * job.scaleStride);
    for (int64_t i = threadIdx.x; i < job.elements; i += blockDim.x) {
      float value = decode(job.type, input, i);
      if (job.type == moeFloat8e4m3) value = __fmul_rn(value, scales[i / kScaleGroup]);
      encode(job.combineType, job.output + row * job.outputStride, i, __fmul_rn(value, factor));
    }
  }
}

}  // namespace

void launchGate(const uint32_t* opened, uint32_t turn, cudaStream_t stream) {
  gateKernel<<<1, 1, 0, stream>>>(opened, turn);
}

void launchExpert(const ExpertRows& rows, cudaStream_t stream) {
  int64_t blocks = rows.rows < kMaxBlocks ? rows.rows : kMaxBlocks;
  // Without rows it is launched all the same, so that it is loaded.
  expertKernel<<<static_cast<unsigned>(blocks > 0 ? blocks : 1), kThreads, 0, stream>>>(rows);
}

}  // namespace moe::perf
