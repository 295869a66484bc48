// SPDX-License-Identifier: Apache-2.0
#include "conformance/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace moetest {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

// The memory of one GPU that the tests use, taken at once and kept: cudaMalloc and cudaFree may wait for all kernels of
// a GPU, and these may wait for the very rank that allocates.
class Arena {
 public:
  static Arena& of(int gpu) {
    static std::mutex mutex;
    static auto& arenas = *new std::map<int, Arena*>;
    std::lock_guard<std::mutex> lock(mutex);
    Arena*& arena = arenas[gpu];
    if (!arena) arena = new Arena(gpu);
    return *arena;
  }

  void* allocate(size_t bytes) {
    bytes = (bytes + kUnit - 1) / kUnit * kUnit;
    std::lock_guard<std::mutex> lock(mutex_);
    size_t at = 0;
    for (const auto& [offset, used] : used_) {
      if (offset - at >= bytes) break;
      at = offset + used;
    }
    if (bytes > bytes_ - at)
      throw std::runtime_error("the tests need more than their " + std::to_string(bytes_) + " bytes of a GPU");
    used_[at] = bytes;
    return base_ + at;
  }
  void release(void* memory) {
    std::lock_guard<std::mutex> lock(mutex_);
    used_.erase(static_cast<size_t>(static_cast<std::byte*>(memory) - base_));
  }

 private:
  static constexpr size_t kUnit = 256;
  static constexpr size_t kMostBytes = size_t{4} << 30;

  explicit Arena(int gpu) {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    size_t left = 0, total = 0;
    check(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
    bytes_ = std::min(kMostBytes, left / 2 / kUnit * kUnit);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes_), "cudaMalloc");
    base_ = static_cast<std::byte*>(memory);
  }

  std::mutex mutex_;
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
  std::map<size_t, size_t> used_;  // offset -> bytes
};

// Copies go through the rank's own stream as well: there are only so many hardware queues, and streams that share one
// wait for each other.
class CudaDevice : public Device {
 public:
  explicit CudaDevice(int gpu) : gpu_(gpu), arena_(Arena::of(gpu)) {
    enter();
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~CudaDevice() override {
    cudaSetDevice(gpu_);
    cudaStreamDestroy(stream_);
  }
  void* allocate(size_t bytes) override { return arena_.allocate(bytes); }
  // What still runs may use it. An error will come up again where it can be told.
  void release(void* memory) override {
    cudaStreamSynchronize(stream_);
    arena_.release(memory);
  }
  void copyIn(void* device, const void* host, size_t bytes) override {
    copy(device, host, bytes, cudaMemcpyHostToDevice);
  }
  void copyOut(void* host, const void* device, size_t bytes) override {
    copy(host, device, bytes, cudaMemcpyDeviceToHost);
  }
  void fill(void* device, int byte, size_t bytes) override {
    if (bytes == 0) return;
    enter();
    check(cudaMemsetAsync(device, byte, bytes, stream_), "cudaMemsetAsync");
  }
  void* stream() override { return stream_; }
  bool replay(const std::function<moeResult_t()>& call, moeResult_t* result) override {
    enter();
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    *result = call();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    graphs_.push_back(nullptr);
    check(cudaGraphInstantiate(&graphs_.back(), graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check(cudaGraphLaunch(graphs_.back(), stream_), "cudaGraphLaunch");
    return true;
  }
  bool synchronize() override {
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
    graphs_.clear();
    return true;
  }

 private:
  void enter() const { check(cudaSetDevice(gpu_), "cudaSetDevice"); }
  // Nothing is pending when the copy begins, so that no lock of the driver is held while other ranks are waited for.
  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return;
    enter();
    synchronize();
    check(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync");
    synchronize();
  }

  const int gpu_;
  Arena& arena_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaGraphExec_t> graphs_;  // replayed since the stream was last waited for
};

class CudaBackend : public Backend {
 public:
  CudaBackend(int gpus, const char* name) : gpus_(gpus), name_(name) {}

  const char* name() const override { return name_; }
  std::string missing() const override {
    static const int found = [] {
      int count = 0;
      return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
    }();
    if (found >= gpus_) return "";
    return "needs " + std::to_string(gpus_) + (gpus_ == 1 ? " GPU" : " GPUs") + ", and this machine has " +
           std::to_string(found);
  }
  bool asynchronous() const override { return true; }
  std::shared_ptr<Device> device(int rank) const override { return std::make_shared<CudaDevice>(rank % gpus_); }

  // Ranks that share a GPU leave room for each other's kernels, and for those that fill memory.
  void configure(moeConfig_t* config, int rank, int nranks) const override {
    config->backend = moeBackendCuda;
    config->device = rank % gpus_;
    int perGpu = (nranks + gpus_ - 1) / gpus_;
    if (perGpu == 1) return;
    int sms = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, config->device), "cudaDeviceGetAttribute");
    config->numSms = std::max(2, sms * 10 / 11 / perGpu);
  }

 private:
  const int gpus_;
  const char* const name_;
};

}  // namespace

const Backend& cudaBackend(int gpus) {
  static const Backend& one = *new CudaBackend(1, "cuda_1gpu");
  static const Backend& two = *new CudaBackend(2, "cuda_2gpus");
  return gpus == 1 ? one : two;
}

}  // namespace moetest
