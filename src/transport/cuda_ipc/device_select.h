// SPDX-License-Identifier: Apache-2.0
// Which GPUs there are, for who chooses one. Needs no CUDA header.
#pragma once

#include <string>

namespace moe {

// How many GPUs this process sees: 0 also without a driver, or with one that does not work. The first call initializes
// CUDA in this process, so that children forked later cannot use it.
int cudaDeviceCount() noexcept;

// The GPU's multiprocessors. Throws as cudaDeviceName.
int cudaMultiprocessors(int device);

// What the vendor calls the GPU, as in "NVIDIA H200". Throws moeInvalidArgument for a number that no device has,
// moeUnsupported without a driver, moeDeviceError.
std::string cudaDeviceName(int device);

}  // namespace moe
