// SPDX-License-Identifier: Apache-2.0
// moe_perf's own kernels. Only in builds with CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu.h"

namespace moe::perf {

// Waits until *opened, in mapped host memory, has reached `turn`, but no longer than a fixed time.
void launchGate(const uint32_t* opened, uint32_t turn, cudaStream_t stream);
// See Gpu::meet. Without ranks it does nothing.
void launchMeeting(const Meeting& meeting, uint32_t turn, cudaStream_t stream);
// `bytes` is a multiple of 16.
void launchCopy(void* to, const void* from, int64_t bytes, int sms, cudaStream_t stream);
void launchExpert(const ExpertRows& rows, cudaStream_t stream);

}  // namespace moe::perf
