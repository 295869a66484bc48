// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/device_select.h"

#include "base/error.h"
#include "base/log.h"
#include "transport/cuda_ipc/driver.h"

namespace moe {
namespace {

int countDevices() {
  int count = 0;
  checkDriver(driver().deviceGetCount(&count), "cuDeviceGetCount", "this machine");
  return count;
}

CUdevice deviceOf(int ordinal) {
  int count = countDevices();
  if (ordinal < 0 || ordinal >= count) {
    fail(moeInvalidArgument, "device ", ordinal, " does not exist: this process sees ", count, " GPUs, counted from 0");
  }
  CUdevice device = -1;
  checkDriver(driver().deviceGet(&device, ordinal), "cuDeviceGet", cat("device ", ordinal));
  return device;
}

}  // namespace

int cudaDeviceCount() noexcept {
  try {
    OrError<int> count = taking(countDevices);
    if (const int* devices = std::get_if<int>(&count)) return *devices;
    log(LogLevel::kTrace, "no GPU is used: ", std::get<Error>(count).text());
  } catch (const std::exception&) {
    // Without memory for a text, there is none for a GPU's windows either.
  }
  return 0;
}

int cudaMultiprocessors(int device) {
  int count = 0;
  checkDriver(driver().deviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, deviceOf(device)),
              "cuDeviceGetAttribute", cat("device ", device));
  return count;
}

std::string cudaDeviceName(int device) {
  std::string where = cat("device ", device);
  CUdevice handle = deviceOf(device);
  char name[256] = {};
  checkDriver(driver().deviceGetName(name, static_cast<int>(sizeof(name)) - 1, handle), "cuDeviceGetName", where);
  return name;
}

}  // namespace moe
