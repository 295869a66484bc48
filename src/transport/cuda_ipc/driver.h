// SPDX-License-Identifier: Apache-2.0
// CUDA's driver, opened at run time: the library must load where there is none.
#pragma once

#include <cuda.h>

#include <string>

namespace moe {

// The functions that are used, by the names that libcuda exports: most of CUDA's names stand for a version, which
// cuda.h chooses by macros.
struct Driver {
  decltype(&::cuInit) init;
  decltype(&::cuGetErrorName) getErrorName;
  decltype(&::cuGetErrorString) getErrorString;
  decltype(&::cuDeviceGetCount) deviceGetCount;
  decltype(&::cuDeviceGet) deviceGet;
  decltype(&::cuDeviceGetName) deviceGetName;
  decltype(&::cuDeviceGetUuid_v2) deviceGetUuid;
  decltype(&::cuDeviceGetAttribute) deviceGetAttribute;
  decltype(&::cuDeviceCanAccessPeer) deviceCanAccessPeer;
  decltype(&::cuDevicePrimaryCtxRetain) devicePrimaryCtxRetain;
  decltype(&::cuDevicePrimaryCtxRelease_v2) devicePrimaryCtxRelease;
  decltype(&::cuCtxPushCurrent_v2) ctxPushCurrent;
  decltype(&::cuCtxPopCurrent_v2) ctxPopCurrent;
  decltype(&::cuMemGetAllocationGranularity) memGetAllocationGranularity;
  decltype(&::cuMemCreate) memCreate;
  decltype(&::cuMemRelease) memRelease;
  decltype(&::cuMemAddressReserve) memAddressReserve;
  decltype(&::cuMemAddressFree) memAddressFree;
  decltype(&::cuMemMap) memMap;
  decltype(&::cuMemUnmap) memUnmap;
  decltype(&::cuMemSetAccess) memSetAccess;
  decltype(&::cuMemExportToShareableHandle) memExportToShareableHandle;
  decltype(&::cuMemImportFromShareableHandle) memImportFromShareableHandle;
  decltype(&::cuMemAlloc_v2) memAlloc;
  decltype(&::cuMemFree_v2) memFree;
  decltype(&::cuMemHostAlloc) memHostAlloc;
  decltype(&::cuMemFreeHost) memFreeHost;
  decltype(&::cuMemsetD8Async) memsetD8Async;
  decltype(&::cuMemcpyHtoDAsync_v2) memcpyHtoDAsync;
  decltype(&::cuMemcpyDtoHAsync_v2) memcpyDtoHAsync;
  decltype(&::cuStreamCreate) streamCreate;
  decltype(&::cuStreamQuery) streamQuery;
  decltype(&::cuStreamDestroy_v2) streamDestroy;
};

// Opens and initializes the driver when first asked; a child forked after that cannot use CUDA. Thread-safe. Throws
// moeUnsupported where there is no usable driver, moeDeviceError where it refuses.
const Driver& driver();

// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string driverErrorText(CUresult result);

// Throws when `result` is an error: moeOutOfMemory or moeDeviceError. `call` and `where` go into the text, as in
// "cuMemMap on GPU-...".
void checkDriver(CUresult result, const char* call, const std::string& where);

// For clean-up, which goes on whatever happens: logs an error.
void noteDriver(CUresult result, const char* call, const std::string& where) noexcept;

}  // namespace moe
