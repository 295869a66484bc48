// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/device_memory.h"

#include <cstdint>
#include <optional>

#include "base/error.h"
#include "transport/cuda_ipc/copy_queue.h"

namespace moe {
namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
// A memory's worth of zeros takes well below a second; the rest is for work that holds the GPU.
constexpr std::chrono::seconds kZeroPatience{60};

CUmemLocation locationOf(const Gpu& gpu) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = gpu.ordinal();
  return location;
}

CUmemAllocationProp propertiesOn(const Gpu& gpu) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = kHandleType;
  properties.location = locationOf(gpu);
  return properties;
}

size_t granularityOn(const Gpu& gpu, CUmemAllocationGranularity_flags which) {
  CUmemAllocationProp properties = propertiesOn(gpu);
  size_t granularity = 0;
  gpu.check(driver().memGetAllocationGranularity(&granularity, &properties, which), "cuMemGetAllocationGranularity");
  if (granularity == 0) fail(moeDeviceError, "cuMemGetAllocationGranularity on ", gpu.name(), " gave 0");
  return granularity;
}

void requireSharing(const Gpu& gpu) {
  if (gpu.attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
    fail(moeUnsupported, gpu.name(), " has no virtual memory management, which windows need");
  }
  if (gpu.attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == 0) {
    fail(moeUnsupported, gpu.name(), " cannot share memory through file descriptors, which windows need");
  }
}

size_t wholeBytes(const Gpu& gpu, size_t bytes) {
  if (bytes == 0) fail(moeInvalidArgument, "a window of 0 bytes was asked for; it needs at least 1");
  if (bytes > static_cast<size_t>(PTRDIFF_MAX) / 2) {
    fail(moeOutOfMemory, "a window of ", bytes, " bytes is larger than any GPU's memory");
  }
  size_t granularity = granularityOn(gpu, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  return (bytes + granularity - 1) / granularity * granularity;
}

}  // namespace

std::shared_ptr<DeviceMemory> DeviceMemory::create(const std::shared_ptr<const Gpu>& gpu, size_t bytes) {
  Gpu::Current current(*gpu);
  requireSharing(*gpu);
  std::shared_ptr<DeviceMemory> memory(new DeviceMemory(gpu, wholeBytes(*gpu, bytes)));
  CUmemAllocationProp properties = propertiesOn(*gpu);
  CUresult made = driver().memCreate(&memory->handle_, memory->bytes_, &properties, 0);
  if (made == CUDA_ERROR_OUT_OF_MEMORY) {
    fail(moeOutOfMemory, gpu->name(), " has no room for a window of ", memory->bytes_,
         " bytes: cuMemCreate failed: ", driverErrorText(made),
         "; free GPU memory, or lower maxTokensPerRank, hidden, maxTopk or buffers");
  }
  gpu->check(made, "cuMemCreate");
  memory->held_ = true;
  memory->map();
  CopyQueue queue(gpu, 1);
  queue.keep(memory);
  queue.zero(memory->base(), memory->bytes_);
  queue.finish(WaitLimit(Deadline::in(kZeroPatience)));
  return memory;
}

std::shared_ptr<DeviceMemory> DeviceMemory::import(const std::shared_ptr<const Gpu>& gpu,
                                                   const FileDescriptor& descriptor, size_t bytes) {
  Gpu::Current current(*gpu);
  size_t granularity = granularityOn(*gpu, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (bytes == 0 || bytes > static_cast<size_t>(PTRDIFF_MAX) || bytes % granularity != 0) {
    fail(moeMismatch, "a window of ", bytes, " bytes was announced, which is not a multiple of the ", granularity,
         " bytes that ", gpu->name(), " maps at once");
  }
  std::shared_ptr<DeviceMemory> memory(new DeviceMemory(gpu, bytes));
  auto* number = reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.get()));
  gpu->check(driver().memImportFromShareableHandle(&memory->handle_, number, kHandleType),
             "cuMemImportFromShareableHandle");
  memory->held_ = true;
  memory->map();
  return memory;
}

void DeviceMemory::map() {
  gpu_->check(driver().memAddressReserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
  // Refused when the memory behind the handle is smaller.
  gpu_->check(driver().memMap(address_, bytes_, 0, handle_, 0), "cuMemMap");
  mapped_ = true;
  grant(*gpu_);
}

void DeviceMemory::grant(const Gpu& gpu) {
  Gpu::Current current(gpu);
  CUmemAccessDesc access{};
  access.location = locationOf(gpu);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  std::lock_guard lock(accessMutex_);
  // Changes the given location alone: GPUs that had access keep it.
  gpu.check(driver().memSetAccess(address_, bytes_, &access, 1), "cuMemSetAccess");
}

FileDescriptor DeviceMemory::exportDescriptor() const {
  Gpu::Current current(*gpu_);
  int fd = -1;
  gpu_->check(driver().memExportToShareableHandle(&fd, handle_, kHandleType, 0), "cuMemExportToShareableHandle");
  return FileDescriptor(fd);
}

DeviceMemory::~DeviceMemory() {
  std::optional<Gpu::Current> current;
  try {
    current.emplace(*gpu_);
  } catch (const Error&) {
    // The application has reset the GPU, or exits: the calls below say what is left to be done.
  }
  if (mapped_) gpu_->note(driver().memUnmap(address_, bytes_), "cuMemUnmap");
  if (held_) gpu_->note(driver().memRelease(handle_), "cuMemRelease");
  if (address_ != 0) gpu_->note(driver().memAddressFree(address_, bytes_), "cuMemAddressFree");
}

}  // namespace moe
