// SPDX-License-Identifier: Apache-2.0
#include "transport/cuda_ipc/driver.h"

#include <dlfcn.h>

#include <memory>

#include "base/error.h"
#include "base/log.h"

namespace moe {
namespace {

// Loaded once and never unloaded: CUDA does not survive that.
struct Loaded {
  Driver functions{};
  std::unique_ptr<Error> error;
  CUresult init = CUDA_SUCCESS;
};

template <class Function>
void resolve(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!*function) {
    fail(moeUnsupported, "libcuda.so.1 has no ", name, "; the NVIDIA driver is older than this build of moecl needs");
  }
}

void resolveDevices(void* library, Driver* to) {
  resolve(library, "cuInit", &to->init);
  resolve(library, "cuGetErrorName", &to->getErrorName);
  resolve(library, "cuGetErrorString", &to->getErrorString);
  resolve(library, "cuDeviceGetCount", &to->deviceGetCount);
  resolve(library, "cuDeviceGet", &to->deviceGet);
  resolve(library, "cuDeviceGetName", &to->deviceGetName);
  resolve(library, "cuDeviceGetUuid_v2", &to->deviceGetUuid);
  resolve(library, "cuDeviceGetAttribute", &to->deviceGetAttribute);
  resolve(library, "cuDeviceCanAccessPeer", &to->deviceCanAccessPeer);
  resolve(library, "cuDevicePrimaryCtxRetain", &to->devicePrimaryCtxRetain);
  resolve(library, "cuDevicePrimaryCtxRelease_v2", &to->devicePrimaryCtxRelease);
  resolve(library, "cuCtxPushCurrent_v2", &to->ctxPushCurrent);
  resolve(library, "cuCtxPopCurrent_v2", &to->ctxPopCurrent);
}

void resolveMemory(void* library, Driver* to) {
  resolve(library, "cuMemGetAllocationGranularity", &to->memGetAllocationGranularity);
  resolve(library, "cuMemCreate", &to->memCreate);
  resolve(library, "cuMemRelease", &to->memRelease);
  resolve(library, "cuMemAddressReserve", &to->memAddressReserve);
  resolve(library, "cuMemAddressFree", &to->memAddressFree);
  resolve(library, "cuMemMap", &to->memMap);
  resolve(library, "cuMemUnmap", &to->memUnmap);
  resolve(library, "cuMemSetAccess", &to->memSetAccess);
  resolve(library, "cuMemExportToShareableHandle", &to->memExportToShareableHandle);
  resolve(library, "cuMemImportFromShareableHandle", &to->memImportFromShareableHandle);
  resolve(library, "cuMemAlloc_v2", &to->memAlloc);
  resolve(library, "cuMemFree_v2", &to->memFree);
  resolve(library, "cuMemHostAlloc", &to->memHostAlloc);
  resolve(library, "cuMemFreeHost", &to->memFreeHost);
  resolve(library, "cuMemsetD8Async", &to->memsetD8Async);
  resolve(library, "cuMemcpyHtoDAsync_v2", &to->memcpyHtoDAsync);
  resolve(library, "cuMemcpyDtoHAsync_v2", &to->memcpyDtoHAsync);
  resolve(library, "cuStreamCreate", &to->streamCreate);
  resolve(library, "cuStreamQuery", &to->streamQuery);
  resolve(library, "cuStreamDestroy_v2", &to->streamDestroy);
}

Loaded* load() {
  auto* loaded = new Loaded;
  try {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char* why = ::dlerror();
      fail(moeUnsupported, "the CUDA driver cannot be opened: ", why ? why : "libcuda.so.1",
           "; install the NVIDIA driver, or let the container see it");
    }
    resolveDevices(library, &loaded->functions);
    resolveMemory(library, &loaded->functions);
    loaded->init = loaded->functions.init(0);
  } catch (const Error& error) {
    loaded->error = std::make_unique<Error>(error);
  }
  return loaded;
}

Loaded& loadedDriver() {
  static Loaded& once = *load();
  return once;
}

std::string errorText(const Driver& functions, CUresult result) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (functions.getErrorName(result, &name) != CUDA_SUCCESS || !name) {
    return cat("error ", static_cast<int>(result), ", which this driver does not know");
  }
  if (functions.getErrorString(result, &meaning) != CUDA_SUCCESS || !meaning) meaning = "no description";
  return cat(name, " (", meaning, ")");
}

}  // namespace

const Driver& driver() {
  const Loaded& loaded = loadedDriver();
  if (loaded.error) throw Error(*loaded.error);
  if (loaded.init == CUDA_ERROR_NO_DEVICE) fail(moeUnsupported, "this process sees no GPU; see CUDA_VISIBLE_DEVICES");
  if (loaded.init != CUDA_SUCCESS) {
    fail(moeDeviceError, "cuInit failed: ", errorText(loaded.functions, loaded.init),
         loaded.init == CUDA_ERROR_NOT_INITIALIZED ? "; a child of fork() cannot use CUDA once its parent has" : "");
  }
  return loaded.functions;
}

std::string driverErrorText(CUresult result) { return errorText(driver(), result); }

void checkDriver(CUresult result, const char* call, const std::string& where) {
  if (result == CUDA_SUCCESS) return;
  fail(result == CUDA_ERROR_OUT_OF_MEMORY ? moeOutOfMemory : moeDeviceError, call, " on ", where,
       " failed: ", driverErrorText(result));
}

void noteDriver(CUresult result, const char* call, const std::string& where) noexcept {
  // The driver of a process that exits, or of a reset GPU, has cleaned up itself.
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) return;
  try {
    log(LogLevel::kWarn, call, " on ", where, " failed while cleaning up: ", driverErrorText(result));
  } catch (const std::exception&) {
    // Without memory for the text there is nothing to be said.
  }
}

}  // namespace moe
