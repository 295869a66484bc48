// SPDX-License-Identifier: Apache-2.0
// One GPU, or one MIG slice of it, as this process sees it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/cuda_ipc/driver.h"

namespace moe {

// A MIG slice has its own.
using GpuUuid = std::array<uint8_t, 16>;

// "GPU-2f1c...", or "MIG-2f1c..." for a slice, as nvidia-smi -L prints it.
std::string gpuUuidText(const GpuUuid& uuid, bool slice);

// The device's number in this process, or -1 when this process does not see it.
int findGpu(const GpuUuid& uuid);

// Holds the device's primary context, which is the one that the CUDA runtime uses.
class Gpu {
 public:
  // Throws moeInvalidArgument for a number that no device has, moeUnsupported without a driver, moeDeviceError.
  static std::shared_ptr<const Gpu> open(int ordinal);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  int ordinal() const { return ordinal_; }
  CUdevice device() const { return device_; }
  const GpuUuid& uuid() const { return uuid_; }
  bool slice() const { return slice_; }
  // For texts: the UUID.
  const std::string& name() const { return name_; }
  int attribute(CUdevice_attribute which) const;
  // Throws, naming the GPU.
  void check(CUresult result, const char* call) const { checkDriver(result, call, name_); }
  void note(CUresult result, const char* call) const noexcept { noteDriver(result, call, name_); }

  // Makes the GPU's context the thread's current one, and afterwards the one before.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Gpu& gpu_;
  };

 private:
  explicit Gpu(int ordinal) : ordinal_(ordinal) {}

  int ordinal_;
  CUdevice device_ = -1;
  CUcontext context_ = nullptr;
  GpuUuid uuid_{};
  bool slice_ = false;
  std::string name_;
};

}  // namespace moe
