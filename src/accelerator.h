// SPDX-License-Identifier: Apache-2.0
// What of moecl needs a GPU, behind functions that exist in every build.
#pragma once

#include <memory>
#include <string>

#include "bootstrap/device_stage.h"
#include "device/backend.h"
#include "transport/transport.h"

namespace moe {

bool builtWithCuda();

// Whether this process can use a GPU. *device: the wanted one, or -1 for the current one; then set to its number. If
// not, *reason ends a sentence.
bool gpuUsable(int32_t* device, std::string* reason);

// GPUs that this process sees; 0 in a build without CUDA.
int gpuCount();

// Backend::blocks() of that GPU. Only where gpuUsable.
int gpuBlocks(int device);

// Only where gpuUsable. `config` is complete and has its device.
std::unique_ptr<Backend> makeGpuBackend(const moeConfig_t& config, int nranks, int rank);
std::unique_ptr<Transport> makeGpuTransport(int rank, int nranks, int device,
                                            const std::shared_ptr<PeerStates>& states);
// On a GPU by its number in this process. Throws moeUnsupported without a driver, moeDeviceError, moeOutOfMemory.
std::shared_ptr<DeviceStage> makeGpuStage(int device);

}  // namespace moe
