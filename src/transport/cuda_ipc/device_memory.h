// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that other GPUs and other processes can map, by the driver's virtual memory management.
#pragma once

#include <memory>
#include <mutex>

#include "base/file_descriptor.h"
#include "transport/cuda_ipc/gpu.h"

namespace moe {

// Unmaps when it goes; the memory itself is freed when all processes that imported it have unmapped it too. GPU work on
// this mapping must have ended by then.
class DeviceMemory {
 public:
  // On `gpu`, zeroed, of `bytes` rounded up to what the driver maps. Throws moeInvalidArgument for 0, moeOutOfMemory,
  // moeUnsupported when the GPU cannot share memory so, moeDeviceError.
  static std::shared_ptr<DeviceMemory> create(const std::shared_ptr<const Gpu>& gpu, size_t bytes);
  // Another process's, mapped for `gpu`. The descriptor is not needed any more afterwards. Throws moeMismatch when
  // `bytes` cannot be right, else as above.
  static std::shared_ptr<DeviceMemory> import(const std::shared_ptr<const Gpu>& gpu, const FileDescriptor& descriptor,
                                              size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* base() const { return reinterpret_cast<std::byte*>(address_); }
  size_t bytes() const { return bytes_; }

  // For import() elsewhere.
  FileDescriptor exportDescriptor() const;
  // Lets one more GPU of this process read and write through the same addresses. Thread-safe.
  void grant(const Gpu& gpu);

 private:
  DeviceMemory(std::shared_ptr<const Gpu> gpu, size_t bytes) : gpu_(std::move(gpu)), bytes_(bytes) {}
  void map();

  const std::shared_ptr<const Gpu> gpu_;
  const size_t bytes_;
  bool held_ = false;  // handle_ is valid
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;  // reserved, when not 0
  bool mapped_ = false;
  std::mutex accessMutex_;  // ranks that are threads grant access at the same time
};

}  // namespace moe
