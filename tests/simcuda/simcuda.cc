// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1 with four GPUs whose memory is the host's, for what src/transport/cuda_ipc/ calls. It
// refuses what the real driver's documentation forbids, and fails on request: see simcuda.h. Memory is a memfd, so that
// other processes import it through its descriptor.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int kDevices = 4;
constexpr size_t kGranularity = size_t{2} << 20;

struct Allocation {
  int fd;
  size_t bytes;
};
struct Mapping {
  size_t bytes;
  int device;  // where the memory is; of imported memory unknown, -1
  std::set<int> access;
};

struct State {
  std::mutex mutex;
  std::map<std::string, CUresult> failures;
  std::map<CUmemGenericAllocationHandle, std::pair<Allocation, int>> allocations;
  CUmemGenericAllocationHandle lastHandle = 0;
  std::map<CUdeviceptr, size_t> reservations;
  std::map<CUdeviceptr, Mapping> mappings;
  int contexts[kDevices] = {};
  std::map<CUstream, int> streams;  // and how many queries it still answers with "not ready"
  std::set<void*> pinned;
};

State& state() {
  static State& once = *new State;
  return once;
}

std::atomic<int> trouble{0};
thread_local std::vector<int> currentDevices;

CUresult failureOf(const char* call) {
  std::lock_guard lock(state().mutex);
  auto found = state().failures.find(call);
  return found == state().failures.end() ? CUDA_SUCCESS : found->second;
}

CUcontext contextOf(int device) { return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1); }
bool valid(int device) { return device >= 0 && device < kDevices; }

// The mapping around an address, if the current GPU may touch all of it. Under the mutex.
Mapping* accessible(CUdeviceptr at, size_t bytes) {
  auto next = state().mappings.upper_bound(at);
  if (currentDevices.empty() || next == state().mappings.begin()) return nullptr;
  auto& [start, mapping] = *std::prev(next);
  bool inside = at - start <= mapping.bytes && bytes <= mapping.bytes - (at - start);
  return inside && mapping.access.count(currentDevices.back()) ? &mapping : nullptr;
}

// Also runs the copy, unless the data is to be lost.
CUresult touch(CUdeviceptr at, size_t bytes, CUstream stream, bool writes, void (*copy)(void*, void*, size_t),
               void* host) {
  std::lock_guard lock(state().mutex);
  if (!state().streams.count(stream)) return CUDA_ERROR_INVALID_HANDLE;
  Mapping* mapping = accessible(at, bytes);
  if (!mapping) return CUDA_ERROR_ILLEGAL_ADDRESS;
  state().streams[stream] = 2;
  bool lost = writes && trouble == 1 && mapping->device != currentDevices.back();
  if (!lost) copy(reinterpret_cast<void*>(at), host, bytes);
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void simCudaFail(const char* call, int result) {
  std::lock_guard lock(state().mutex);
  state().failures[call] = static_cast<CUresult>(result);
}
void simCudaTrouble(int kind) { trouble = kind; }
int simCudaLive() {
  State& all = state();
  std::lock_guard lock(all.mutex);
  size_t live = all.allocations.size() + all.reservations.size() + all.mappings.size() + all.streams.size() +
                all.pinned.size() + currentDevices.size();
  for (int held : all.contexts) live += static_cast<size_t>(held);
  return static_cast<int>(live);
}

CUresult cuInit(unsigned) {
  if (CUresult asked = failureOf("cuInit"); asked != CUDA_SUCCESS) return asked;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  thread_local char name[64];
  std::snprintf(name, sizeof(name), "CUDA_ERROR_%d", static_cast<int>(error));
  *text = name;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "simulated";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  if (CUresult asked = failureOf("cuDeviceGetCount"); asked != CUDA_SUCCESS) return asked;
  *count = kDevices;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (!valid(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(length), "Stand-in %d", device);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::memset(uuid->bytes, 0x10 + device, sizeof(uuid->bytes));
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice device) {
  if (CUresult asked = failureOf("cuDeviceGetAttribute"); asked != CUDA_SUCCESS) return asked;
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  *value = 1;
  return CUDA_SUCCESS;
}
// Fails when asked to, and then says no rather than nothing.
CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  if (!valid(device) || !valid(peer)) return CUDA_ERROR_INVALID_DEVICE;
  *can = failureOf("cuDeviceCanAccessPeer") == CUDA_SUCCESS ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!valid(device)) return CUDA_ERROR_INVALID_DEVICE;
  std::lock_guard lock(state().mutex);
  ++state().contexts[device];
  *context = contextOf(device);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  std::lock_guard lock(state().mutex);
  if (!valid(device) || state().contexts[device] == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --state().contexts[device];
  return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext context) {
  int device = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  std::lock_guard lock(state().mutex);
  if (!valid(device) || state().contexts[device] == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
  currentDevices.push_back(device);
  return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  if (currentDevices.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contextOf(currentDevices.back());
  currentDevices.pop_back();
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  if (CUresult asked = failureOf("cuMemGetAllocationGranularity"); asked != CUDA_SUCCESS) return asked;
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
  if (CUresult asked = failureOf("cuMemCreate"); asked != CUDA_SUCCESS) return asked;
  if (bytes == 0 || bytes % kGranularity || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || !valid(prop->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int fd = ::memfd_create("simcuda", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  // Memory comes as it was left.
  void* dirty = ::mmap(nullptr, kGranularity, PROT_WRITE, MAP_SHARED, fd, 0);
  std::memset(dirty, 0xa5, kGranularity);
  ::munmap(dirty, kGranularity);
  std::lock_guard lock(state().mutex);
  *handle = ++state().lastHandle;
  state().allocations[*handle] = {{fd, bytes}, prop->location.id};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(state().mutex);
  auto found = state().allocations.find(handle);
  if (found == state().allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  ::close(found->second.first.fd);
  state().allocations.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long) {
  if (CUresult asked = failureOf("cuMemExportToShareableHandle"); asked != CUDA_SUCCESS) return asked;
  std::lock_guard lock(state().mutex);
  auto found = state().allocations.find(handle);
  if (found == state().allocations.end() || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *static_cast<int*>(out) = ::fcntl(found->second.first.fd, F_DUPFD_CLOEXEC, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* os, CUmemAllocationHandleType) {
  if (CUresult asked = failureOf("cuMemImportFromShareableHandle"); asked != CUDA_SUCCESS) return asked;
  struct stat status {};
  int fd = ::fcntl(static_cast<int>(reinterpret_cast<uintptr_t>(os)), F_DUPFD_CLOEXEC, 0);
  if (fd < 0 || ::fcntl(fd, F_GET_SEALS) < 0 || ::fstat(fd, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(state().mutex);
  *handle = ++state().lastHandle;
  state().allocations[*handle] = {{fd, static_cast<size_t>(status.st_size)}, -1};
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  if (CUresult asked = failureOf("cuMemAddressReserve"); asked != CUDA_SUCCESS) return asked;
  void* range = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(state().mutex);
  *at = reinterpret_cast<CUdeviceptr>(range);
  state().reservations[*at] = bytes;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  std::lock_guard lock(state().mutex);
  auto found = state().reservations.find(at);
  bool free = found != state().reservations.end() && found->second == bytes && !state().mappings.count(at);
  if (!free) return CUDA_ERROR_INVALID_VALUE;
  state().reservations.erase(found);
  ::munmap(reinterpret_cast<void*>(at), bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  if (CUresult asked = failureOf("cuMemMap"); asked != CUDA_SUCCESS) return asked;
  std::lock_guard lock(state().mutex);
  auto memory = state().allocations.find(handle);
  auto range = state().reservations.find(at);
  if (memory == state().allocations.end() || range == state().reservations.end() || range->second != bytes || offset ||
      flags || memory->second.first.bytes < bytes || state().mappings.count(at)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  int protection = PROT_READ | PROT_WRITE;
  void* mapped =
      ::mmap(reinterpret_cast<void*>(at), bytes, protection, MAP_SHARED | MAP_FIXED, memory->second.first.fd, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  state().mappings[at] = {bytes, memory->second.second, {}};
  return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  std::lock_guard lock(state().mutex);
  auto found = state().mappings.find(at);
  if (found == state().mappings.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  state().mappings.erase(found);
  ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  if (CUresult asked = failureOf("cuMemSetAccess"); asked != CUDA_SUCCESS) return asked;
  std::lock_guard lock(state().mutex);
  auto found = state().mappings.find(at);
  if (found == state().mappings.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (!valid(access[i].location.id)) return CUDA_ERROR_INVALID_DEVICE;
    found->second.access.insert(access[i].location.id);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* at, size_t bytes) {
  if (CUresult asked = failureOf("cuMemAlloc_v2"); asked != CUDA_SUCCESS) return asked;
  if (currentDevices.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(state().mutex);
  *at = reinterpret_cast<CUdeviceptr>(memory);
  state().mappings[*at] = {bytes, currentDevices.back(), {currentDevices.back()}};
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr at) {
  std::lock_guard lock(state().mutex);
  auto found = state().mappings.find(at);
  if (found == state().mappings.end() || state().reservations.count(at)) return CUDA_ERROR_INVALID_VALUE;
  ::munmap(reinterpret_cast<void*>(at), found->second.bytes);
  state().mappings.erase(found);
  return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** at, size_t bytes, unsigned) {
  if (CUresult asked = failureOf("cuMemHostAlloc"); asked != CUDA_SUCCESS) return asked;
  *at = ::operator new(bytes);
  std::lock_guard lock(state().mutex);
  state().pinned.insert(*at);
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* at) {
  std::lock_guard lock(state().mutex);
  if (state().pinned.erase(at) == 0) return CUDA_ERROR_INVALID_VALUE;
  ::operator delete(at);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned) {
  if (CUresult asked = failureOf("cuStreamCreate"); asked != CUDA_SUCCESS) return asked;
  static std::atomic<uintptr_t> last{0};
  std::lock_guard lock(state().mutex);
  *stream = reinterpret_cast<CUstream>(++last);
  state().streams[*stream] = 0;
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
  std::lock_guard lock(state().mutex);
  return state().streams.erase(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamQuery(CUstream stream) {
  if (CUresult asked = failureOf("cuStreamQuery"); asked != CUDA_SUCCESS) return asked;
  std::lock_guard lock(state().mutex);
  auto found = state().streams.find(stream);
  if (found == state().streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (trouble == 2) return CUDA_ERROR_NOT_READY;
  return found->second > 0 && found->second-- ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream stream) {
  if (CUresult asked = failureOf("cuMemsetD8Async"); asked != CUDA_SUCCESS) return asked;
  auto set = [](void* device, void* host, size_t count) {
    std::memset(device, *static_cast<unsigned char*>(host), count);
  };
  return touch(at, bytes, stream, true, set, &value);
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (CUresult asked = failureOf("cuMemcpyHtoDAsync_v2"); asked != CUDA_SUCCESS) return asked;
  auto copy = [](void* device, void* host, size_t count) { std::memcpy(device, host, count); };
  return touch(to, bytes, stream, true, copy, const_cast<void*>(from));
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (CUresult asked = failureOf("cuMemcpyDtoHAsync_v2"); asked != CUDA_SUCCESS) return asked;
  auto copy = [](void* device, void* host, size_t count) { std::memcpy(host, device, count); };
  return touch(from, bytes, stream, false, copy, to);
}

}  // extern "C"
