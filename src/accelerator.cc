// SPDX-License-Identifier: Apache-2.0
#include "accelerator.h"

#include "base/error.h"

#ifdef MOE_HAVE_CUDA
#include "device/cuda_backend.h"
#include "transport/cuda_ipc/cuda_ipc_transport.h"
#include "transport/cuda_ipc/cuda_stage.h"
#include "transport/cuda_ipc/device_select.h"

namespace moe {

bool builtWithCuda() { return true; }

bool gpuUsable(int32_t* device, std::string* reason) { return chooseCudaDevice(device, reason); }

int gpuCount() { return cudaDeviceCount(); }

int gpuBlocks(int device) { return cudaMultiprocessors(device); }

std::unique_ptr<Backend> makeGpuBackend(const moeConfig_t& config, int nranks, int rank) {
  return makeCudaBackend(config, nranks, rank);
}

std::unique_ptr<Transport> makeGpuTransport(int rank, int nranks, int device,
                                            const std::shared_ptr<PeerStates>& states) {
  return makeCudaIpcTransport(rank, nranks, device, states);
}

std::shared_ptr<DeviceStage> makeGpuStage(int device) { return makeCudaStage(device); }

}  // namespace moe

#else

namespace moe {

bool builtWithCuda() { return false; }

bool gpuUsable(int32_t*, std::string* reason) {
  *reason = "this build of moecl has no CUDA backend";
  return false;
}

int gpuCount() { return 0; }

int gpuBlocks(int) { fail(moeInternalError, "this build of moecl has no CUDA backend"); }

std::unique_ptr<Backend> makeGpuBackend(const moeConfig_t&, int, int) {
  fail(moeInternalError, "this build of moecl has no CUDA backend");
}

std::unique_ptr<Transport> makeGpuTransport(int, int, int, const std::shared_ptr<PeerStates>&) {
  fail(moeInternalError, "this build of moecl has no CUDA backend");
}

std::shared_ptr<DeviceStage> makeGpuStage(int) { fail(moeInternalError, "this build of moecl has no CUDA backend"); }

}  // namespace moe
#endif
