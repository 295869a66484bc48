// SPDX-License-Identifier: Apache-2.0
// Operations as kernels on the caller's stream.
#pragma once

#include <memory>
#include <string>

#include "device/backend.h"

namespace moe {

// See gpuUsable.
bool chooseCudaDevice(int32_t* device, std::string* reason);

// Loads every kernel, so that none is loaded behind one that waits.
std::unique_ptr<Backend> makeCudaBackend(const moeConfig_t& config, int nranks, int rank);

}  // namespace moe
