// SPDX-License-Identifier: Apache-2.0
// A DeviceStage on a GPU.
#pragma once

#include <memory>

#include "bootstrap/device_stage.h"

namespace moe {

// `device` by its number in this process. Throws moeInvalidArgument for one that does not exist, moeUnsupported without
// a driver, moeDeviceError.
std::shared_ptr<DeviceStage> makeCudaStage(int device);

}  // namespace moe
