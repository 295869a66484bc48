// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"

#include "text.h"

#ifdef MOE_HAVE_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "gpu_kernels.h"

namespace moe::perf {
namespace {

// Owns what the runtime made; `Free` is the function that takes it back.
template <class Handle, cudaError_t (*Free)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_) Free(handle_);
  }
  Handle get() const { return handle_; }
  Handle* place() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};

using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;
using PinnedMemory = Owned<void*, cudaFreeHost>;

class CudaGpu : public Gpu {
 public:
  explicit CudaGpu(int device) : device_(device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(stream_.place(), cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaHostAlloc(flag_.place(), sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    opened().store(0);
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    // Loads the kernels: loading one behind a closed gate would wait for the gate.
    launchGate(static_cast<uint32_t*>(flag_.get()), 0, stream_.get());
    launchExpert({}, stream_.get());
    launchMeeting({}, 0, stream_.get());
    launchCopy(nullptr, nullptr, 0, 1, stream_.get());
    checkLaunch("the first kernels");
    synchronize();
  }

  ~CudaGpu() override { openGate(); }

  int device() const override { return device_; }

  int64_t location() const override {
    int domain = 0, bus = 0, slot = 0;
    check(cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, device_), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, device_), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&slot, cudaDevAttrPciDeviceId, device_), "cudaDeviceGetAttribute");
    return (int64_t{domain} * 256 + bus) * 256 + slot;
  }

  std::string describe() const override {
    cudaDeviceProp properties{};
    int driver = 0, runtime = 0;
    check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    return cat(properties.name, ", ", properties.multiProcessorCount, " SMs, driver for CUDA ", driver / 1000, ".",
               driver % 1000 / 10, ", runtime ", runtime / 1000, ".", runtime % 1000 / 10);
  }

  void* stream() const override { return stream_.get(); }

  void* allocate(int64_t bytes) override {
    void* memory = nullptr;
    cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(bytes));
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      fail("a buffer of ", bytes, " bytes does not fit on GPU ", device_,
           "; use fewer tokens, or --exact or --budget in place of worst-case outputs");
    }
    check(error, "cudaMalloc");
    return memory;
  }

  void release(void* memory) override { cudaFree(memory); }

  void copyIn(void* device, const void* host, int64_t bytes) override {
    check(cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream_.get()),
          "cudaMemcpyAsync to the GPU");
    synchronize();
  }

  void* allocateHost(int64_t bytes) override {
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocDefault), "cudaHostAlloc");
    return memory;
  }

  void releaseHost(void* memory) override { cudaFreeHost(memory); }

  void copyOut(void* host, const void* device, int64_t bytes) override {
    enqueueCopyOut(host, device, bytes);
    synchronize();
  }

  void enqueueCopyOut(void* host, const void* device, int64_t bytes) override {
    check(cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream_.get()),
          "cudaMemcpyAsync from the GPU");
  }

  void copyRowsOut(void* host, int64_t hostStride, const void* device, int64_t deviceStride, int64_t rowBytes,
                   int64_t rows) override {
    if (rows == 0) return;
    check(cudaMemcpy2DAsync(host, static_cast<size_t>(hostStride), device, static_cast<size_t>(deviceStride),
                            static_cast<size_t>(rowBytes), static_cast<size_t>(rows), cudaMemcpyDeviceToHost,
                            stream_.get()),
          "cudaMemcpy2DAsync from the GPU");
    synchronize();
  }

  void fill(void* device, unsigned char pattern, int64_t bytes) override {
    enqueueFill(device, pattern, bytes);
    synchronize();
  }

  void enqueueFill(void* device, unsigned char pattern, int64_t bytes) override {
    check(cudaMemsetAsync(device, pattern, static_cast<size_t>(bytes), stream_.get()), "cudaMemsetAsync");
  }

  int64_t cacheBytes() const override {
    int bytes = 0;
    check(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device_), "cudaDeviceGetAttribute");
    return bytes;
  }

  void runExpert(const ExpertRows& rows) override {
    if (rows.rows == 0) return;
    launchExpert(rows, stream_.get());
    checkLaunch("the expert");
    synchronize();
  }

  void closeGate() override {
    launchGate(static_cast<uint32_t*>(flag_.get()), ++turn_, stream_.get());
    checkLaunch("the gate");
  }

  void openGate() override { opened().store(turn_, std::memory_order_release); }

  void reserveMarks(size_t count) override {
    while (marks_.size() < count) {
      Event event;
      check(cudaEventCreate(event.place()), "cudaEventCreate");
      marks_.push_back(std::move(event));
    }
  }

  void mark(size_t index) override { check(cudaEventRecord(marks_.at(index).get(), stream_.get()), "cudaEventRecord"); }

  double microsecondsBetween(size_t from, size_t to) override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, marks_.at(from).get(), marks_.at(to).get()), "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1000;
  }

  void meet(const Meeting& meeting, uint32_t turn) override {
    launchMeeting(meeting, turn, stream_.get());
    checkLaunch("a meeting");
  }

  void capture(const std::function<void()>& calls) override {
    Graph graph;
    // The host's other ranks may make any call meanwhile.
    check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    calls();
    check(cudaStreamEndCapture(stream_.get(), graph.place()), "cudaStreamEndCapture");
    graph_ = GraphExec();
    check(cudaGraphInstantiate(graph_.place(), graph.get(), 0), "cudaGraphInstantiate");
    check(cudaGraphUpload(graph_.get(), stream_.get()), "cudaGraphUpload");
    synchronize();
  }

  void replay() override { check(cudaGraphLaunch(graph_.get(), stream_.get()), "cudaGraphLaunch"); }

  void synchronize() override { check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

  bool idle() override {
    cudaError_t error = cudaStreamQuery(stream_.get());
    if (error == cudaErrorNotReady) return false;
    check(error, "cudaStreamQuery");
    return true;
  }

  bool reachDevice(int device) override {
    if (device == device_) return true;
    int possible = 0;
    cudaError_t error = cudaDeviceCanAccessPeer(&possible, device_, device);
    if (error == cudaSuccess && possible) error = cudaDeviceEnablePeerAccess(device, 0);
    cudaGetLastError();
    return possible && (error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled);
  }

  bool nameMemory(void* memory, GpuMemoryName* name) override {
    cudaIpcMemHandle_t handle{};
    static_assert(sizeof handle == sizeof *name);
    if (cudaIpcGetMemHandle(&handle, memory) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    std::memcpy(name->data(), &handle, sizeof handle);
    return true;
  }

  void* reachMemory(const GpuMemoryName& name) override {
    cudaIpcMemHandle_t handle{};
    std::memcpy(&handle, name.data(), sizeof handle);
    void* memory = nullptr;
    if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) return memory;
    cudaGetLastError();
    return nullptr;
  }

  void leave(void* reached) override { cudaIpcCloseMemHandle(reached); }

  void copyAcross(void* to, const void* from, int64_t bytes) override {
    launchCopy(to, from, bytes, sms_, stream_.get());
    checkLaunch("a copy");
  }

 private:
  void check(cudaError_t error, const char* call) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    fail(call, " on GPU ", device_, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
  }

  void checkLaunch(const char* what) const { check(cudaGetLastError(), what); }

  std::atomic_ref<uint32_t> opened() const { return std::atomic_ref(*static_cast<uint32_t*>(flag_.get())); }

  int device_;
  int sms_ = 1;
  uint32_t turn_ = 0;
  PinnedMemory flag_;
  Stream stream_;
  std::vector<Event> marks_;
  GraphExec graph_;
};

}  // namespace

int gpuCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::unique_ptr<Gpu> makeGpu(int device) { return std::make_unique<CudaGpu>(device); }

}  // namespace moe::perf

#else

namespace moe::perf {

int gpuCount() { return 0; }

std::unique_ptr<Gpu> makeGpu(int) { fail("this build of moe_perf has no CUDA"); }

}  // namespace moe::perf
#endif
