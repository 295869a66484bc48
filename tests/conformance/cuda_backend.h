// SPDX-License-Identifier: Apache-2.0
// Ranks on GPUs. Only in builds with CUDA.
#pragma once

#include "conformance/device.h"

namespace moetest {

// Rank r runs on GPU r % gpus; 1 or 2 of them.
const Backend& cudaBackend(int gpus);

}  // namespace moetest
