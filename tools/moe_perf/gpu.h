// SPDX-License-Identifier: Apache-2.0
// A rank's GPU, behind an interface that exists in every build.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "moe.h"

namespace moe::perf {

// What the identity expert does to rows of one kind that follow each other: decode, multiply, encode. All in device
// memory.
struct ExpertRows {
  int64_t rows = 0;
  int64_t elements = 0;
  int32_t type = moeBfloat16;
  int32_t combineType = moeBfloat16;
  const std::byte* input = nullptr;
  int64_t inputStride = 0;
  const std::byte* scales = nullptr;  // fp8: floats, or exponents of a byte each
  int64_t scaleStride = 0;
  bool packedScales = false;
  std::byte* output = nullptr;
  int64_t outputStride = 0;
  // A row's factor is the sum in order of its weights whose ids are not negative; 1 without weights.
  const void* ids = nullptr;
  const float* weights = nullptr;
  int32_t topk = 0;
  bool wideIds = false;
};

// Words in which ranks tell each other, GPU to GPU, that they have come. All in device memory.
struct Meeting {
  int32_t rank = 0;
  int32_t ranks = 0;
  uint32_t* const* peers = nullptr;  // [ranks] every rank's words, as this GPU reaches them; its own, too
  const uint32_t* words = nullptr;   // [ranks] this rank's: the turn that each rank has come to
  uint32_t* late = nullptr;          // this rank's: becomes 1 when somebody did not come, and nobody is waited for then
};

// How another process finds memory of this one.
using GpuMemoryName = std::array<uint32_t, 16>;

// One rank's use of one GPU: a stream, a gate in front of it, and marks in it. Calls are for one thread, in which the
// GPU is the current one. Errors throw Failure.
class Gpu {
 public:
  virtual ~Gpu() = default;

  virtual int device() const = 0;
  // The same for two ranks of a host exactly if they share the GPU.
  virtual int64_t location() const = 0;
  // Model, driver and runtime.
  virtual std::string describe() const = 0;
  virtual void* stream() const = 0;

  virtual void* allocate(int64_t bytes) = 0;
  // Waits for the whole GPU, so never behind a closed gate.
  virtual void release(void* memory) = 0;
  // Pinned, so that copies into it are cheap.
  virtual void* allocateHost(int64_t bytes) = 0;
  virtual void releaseHost(void* memory) = 0;
  // These complete before they return.
  virtual void copyIn(void* device, const void* host, int64_t bytes) = 0;
  virtual void copyOut(void* host, const void* device, int64_t bytes) = 0;
  virtual void copyRowsOut(void* host, int64_t hostStride, const void* device, int64_t deviceStride, int64_t rowBytes,
                           int64_t rows) = 0;
  virtual void fill(void* device, unsigned char pattern, int64_t bytes) = 0;
  virtual void enqueueFill(void* device, unsigned char pattern, int64_t bytes) = 0;
  virtual int64_t cacheBytes() const = 0;
  virtual void runExpert(const ExpertRows& rows) = 0;

  // What is enqueued behind a closed gate starts when it opens, without the host's launches in between. A gate opens by
  // itself after a while, so that a rank that is lost leaves no GPU spinning.
  virtual void closeGate() = 0;
  virtual void openGate() = 0;
  // Marks are points in the stream. Reserving makes the first `count`, which must not happen behind a closed gate.
  virtual void reserveMarks(size_t count) = 0;
  virtual void mark(size_t index) = 0;
  virtual double microsecondsBetween(size_t from, size_t to) = 0;
  // Enqueues a kernel that ends when all ranks have come to this turn, or when that took too long. Turns count up.
  virtual void meet(const Meeting& meeting, uint32_t turn) = 0;
  // Makes a graph of what `calls` enqueues, and runs none of it. Not behind a closed gate.
  virtual void capture(const std::function<void()>& calls) = 0;
  // Enqueues the graph that was made last.
  virtual void replay() = 0;
  virtual void synchronize() = 0;
  virtual bool idle() = 0;
  virtual void enqueueCopyOut(void* host, const void* device, int64_t bytes) = 0;

  // Other ranks' memory. False or nullptr: it cannot be reached from here.
  virtual bool reachDevice(int device) = 0;  // memory of this process
  virtual bool nameMemory(void* memory, GpuMemoryName* name) = 0;
  virtual void* reachMemory(const GpuMemoryName& name) = 0;  // memory of another process, until it is left
  virtual void leave(void* reached) = 0;
  // Enqueues a kernel that copies a multiple of 16 bytes. Either side may be another GPU's.
  virtual void copyAcross(void* to, const void* from, int64_t bytes) = 0;
};

// GPUs that this process can use; 0 also in a build without CUDA.
int gpuCount();
// Makes the GPU the current one of this thread.
std::unique_ptr<Gpu> makeGpu(int device);

}  // namespace moe::perf
