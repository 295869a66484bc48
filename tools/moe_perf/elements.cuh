// SPDX-License-Identifier: Apache-2.0
// Elements of rows in moe_perf's kernels, with the same bits as on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

#include "moe.h"

namespace moe::perf {

__device__ inline float decodeElement(int32_t type, const std::byte* row, int64_t i) {
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

// Not for fp8.
__device__ inline void encodeElement(int32_t type, std::byte* row, int64_t i, float value) {
  switch (type) {
    case moeFloat32: reinterpret_cast<float*>(row)[i] = value; break;
    case moeFloat16: reinterpret_cast<__half*>(row)[i] = __float2half_rn(value); break;
    default: reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(value);
  }
}

}  // namespace moe::perf
