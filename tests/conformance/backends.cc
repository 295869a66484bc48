// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>

#include "conformance/cuda_backend.h"
#include "conformance/device.h"

namespace moetest {
namespace {

class HostDevice : public Device {
 public:
  void* allocate(size_t bytes) override { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
  void release(void* memory) override { std::free(memory); }
  void copyIn(void* device, const void* host, size_t bytes) override { copy(device, host, bytes); }
  void copyOut(void* host, const void* device, size_t bytes) override { copy(host, device, bytes); }
  void fill(void* device, int byte, size_t bytes) override {
    if (bytes > 0) std::memset(device, byte, bytes);
  }
  void* stream() override { return nullptr; }
  bool synchronize() override { return false; }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};

class HostBackend : public Backend {
 public:
  const char* name() const override { return "host"; }
  std::string missing() const override { return ""; }
  bool asynchronous() const override { return false; }
  // One for all, which buffers may outlive.
  std::shared_ptr<Device> device(int) const override {
    static const auto& device = *new std::shared_ptr<Device>(new HostDevice);
    return device;
  }
  void configure(moeConfig_t* config, int, int) const override { config->backend = moeBackendHost; }
};

}  // namespace

const Backend& hostBackend() {
  static const Backend& backend = *new HostBackend;
  return backend;
}

std::vector<const Backend*> cudaBackends() {
#ifdef MOE_TEST_CUDA
  return {&cudaBackend(1), &cudaBackend(2)};
#else
  return {};
#endif
}

const Backend* findBackend(const std::string& name) {
  if (name == hostBackend().name()) return &hostBackend();
  for (const Backend* backend : cudaBackends()) {
    if (name == backend->name()) return backend;
  }
  return nullptr;
}

}  // namespace moetest
