// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/gpu.h"

#include <cstring>

#include "base/error.h"

namespace moe {
namespace {

GpuUuid readUuid(CUdevice device, const std::string& where) {
  CUuuid raw{};
  checkDriver(driver().deviceGetUuid(&raw, device), "cuDeviceGetUuid", where);
  GpuUuid uuid;
  static_assert(sizeof(raw.bytes) == sizeof(uuid));
  std::memcpy(uuid.data(), raw.bytes, sizeof(uuid));
  return uuid;
}

// The driver tells slices by their names alone: "NVIDIA H200 MIG 1g.18gb".
bool isSlice(CUdevice device, const std::string& where) {
  char model[256] = {};
  checkDriver(driver().deviceGetName(model, static_cast<int>(sizeof(model)) - 1, device), "cuDeviceGetName", where);
  return std::strstr(model, " MIG ") != nullptr;
}

}  // namespace

std::string gpuUuidText(const GpuUuid& uuid, bool slice) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = slice ? "MIG" : "GPU";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

int findGpu(const GpuUuid& uuid) {
  int count = 0;
  checkDriver(driver().deviceGetCount(&count), "cuDeviceGetCount", "this machine");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    std::string where = cat("device ", ordinal);
    CUdevice device = -1;
    checkDriver(driver().deviceGet(&device, ordinal), "cuDeviceGet", where);
    if (readUuid(device, where) == uuid) return ordinal;
  }
  return -1;
}

std::shared_ptr<const Gpu> Gpu::open(int ordinal) {
  const Driver& cuda = driver();
  int count = 0;
  checkDriver(cuda.deviceGetCount(&count), "cuDeviceGetCount", "this machine");
  if (ordinal < 0 || ordinal >= count) {
    fail(moeInvalidArgument, "device ", ordinal, " does not exist: this process sees ", count,
         count == 1 ? " GPU" : " GPUs", ", counted from 0; see CUDA_VISIBLE_DEVICES");
  }
  std::shared_ptr<Gpu> gpu(new Gpu(ordinal));
  gpu->name_ = cat("device ", ordinal);
  gpu->check(cuda.deviceGet(&gpu->device_, ordinal), "cuDeviceGet");
  gpu->uuid_ = readUuid(gpu->device_, gpu->name_);
  gpu->slice_ = isSlice(gpu->device_, gpu->name_);
  gpu->name_ = gpuUuidText(gpu->uuid_, gpu->slice_);
  gpu->check(cuda.devicePrimaryCtxRetain(&gpu->context_, gpu->device_), "cuDevicePrimaryCtxRetain");
  return gpu;
}

Gpu::~Gpu() {
  if (context_) note(driver().devicePrimaryCtxRelease(device_), "cuDevicePrimaryCtxRelease");
}

int Gpu::attribute(CUdevice_attribute which) const {
  int value = 0;
  check(driver().deviceGetAttribute(&value, which, device_), "cuDeviceGetAttribute");
  return value;
}

Gpu::Current::Current(const Gpu& gpu) : gpu_(gpu) {
  gpu_.check(driver().ctxPushCurrent(gpu_.context_), "cuCtxPushCurrent");
}

Gpu::Current::~Current() {
  CUcontext popped = nullptr;
  gpu_.note(driver().ctxPopCurrent(&popped), "cuCtxPopCurrent");
}

}  // namespace moe
