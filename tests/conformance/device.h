// SPDX-License-Identifier: Apache-2.0
// Where ranks run, as the tests see it, and a buffer there that notices writes outside its bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moe.h"

namespace moetest {

// Where one rank works: memory, and a stream of operations.
class Device {
 public:
  virtual ~Device() = default;
  // Aligned to 256 bytes.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual void copyIn(void* device, const void* host, size_t bytes) = 0;
  virtual void copyOut(void* host, const void* device, size_t bytes) = 0;
  virtual void fill(void* device, int byte, size_t bytes) = 0;
  // What to pass to moe.h.
  virtual void* stream() = 0;
  // Makes a call of moe.h that puts something into the stream, as part of a graph that is then replayed once. False if
  // there are no graphs here.
  virtual bool replay(const std::function<moeResult_t()>&, moeResult_t*) { return false; }
  // Waits for all that was put into the stream. False where operations are over when their call returns.
  virtual bool synchronize() = 0;
};

// What the tests need to know of a backend.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // Why nothing can run on it here; "" if it can.
  virtual std::string missing() const = 0;
  // Operations go on after their call has returned.
  virtual bool asynchronous() const = 0;
  // Made before the ranks' operations begin: making it may wait for all that runs on a GPU.
  virtual std::shared_ptr<Device> device(int rank) const = 0;
  // Fills in what a rank's config says about where it runs.
  virtual void configure(moeConfig_t* config, int rank, int nranks) const = 0;
};

const Backend& hostBackend();
// Ranks on GPUs, several on each if need be: all on one, and spread over two. None in a build without CUDA.
std::vector<const Backend*> cudaBackends();
// Of any of these names; null if there is none.
const Backend* findBackend(const std::string& name);

// How an operation ended whose call returned `returned`. On a GPU that is known only when its stream has got there. The
// text is in moeGetLastError.
inline moeResult_t outcomeOf(moeResult_t returned, moeComm_t comm, Device& device) {
  if (!device.synchronize() || returned != moeSuccess) return returned;
  moeResult_t state = moeSuccess;
  moeResult_t asked = moeCommGetAsyncError(comm, &state);
  return asked != moeSuccess ? asked : state;
}

inline constexpr int kPoison = 0xb5;

// A poisoned array with guards on both sides. `misalign` bytes move its start away from the alignment of 256.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device& device, size_t bytes, size_t misalign = 0) : device_(&device), bytes_(bytes) {
    offset_ = kGuard + misalign;
    total_ = offset_ + bytes + kGuard;
    base_ = static_cast<std::byte*>(device.allocate(total_));
    device.fill(base_, kPoison, total_);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (base_) device_->release(base_);
  }

  std::byte* data() const { return base_ ? base_ + offset_ : nullptr; }
  size_t bytes() const { return bytes_; }
  void write(size_t at, const void* host, size_t bytes) { device_->copyIn(data() + at, host, bytes); }
  void poison() {
    if (base_) device_->fill(base_, kPoison, total_);
  }
  std::vector<std::byte> read() const {
    std::vector<std::byte> host(bytes_);
    if (base_) device_->copyOut(host.data(), data(), bytes_);
    return host;
  }
  // True if nothing was written outside of the array.
  bool guardsIntact() const {
    if (!base_) return true;
    std::vector<std::byte> before(offset_), after(kGuard);
    device_->copyOut(before.data(), base_, offset_);
    device_->copyOut(after.data(), base_ + offset_ + bytes_, kGuard);
    auto clean = [](std::byte byte) { return byte == std::byte{kPoison}; };
    return std::all_of(before.begin(), before.end(), clean) && std::all_of(after.begin(), after.end(), clean);
  }

 private:
  static constexpr size_t kGuard = 256;

  void swap(Buffer& other) {
    std::swap(device_, other.device_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(offset_, other.offset_);
    std::swap(total_, other.total_);
  }

  Device* device_ = nullptr;
  std::byte* base_ = nullptr;
  size_t bytes_ = 0, offset_ = 0, total_ = 0;
};

}  // namespace moetest
