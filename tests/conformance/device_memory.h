// SPDX-License-Identifier: Apache-2.0
// Memory of a backend, as the tests use it, and a buffer in it that notices writes outside its bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "moe.h"

namespace moetest {

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Aligned to 256 bytes.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual void copyIn(void* device, const void* host, size_t bytes) = 0;
  virtual void copyOut(void* host, const void* device, size_t bytes) = 0;
  virtual void fill(void* device, int byte, size_t bytes) = 0;
};

class HostMemory : public DeviceMemory {
 public:
  void* allocate(size_t bytes) override { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
  void release(void* memory) override { std::free(memory); }
  void copyIn(void* device, const void* host, size_t bytes) override { copy(device, host, bytes); }
  void copyOut(void* host, const void* device, size_t bytes) override { copy(host, device, bytes); }
  void fill(void* device, int byte, size_t bytes) override {
    if (bytes > 0) std::memset(device, byte, bytes);
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
};

// What the tests need to know of a backend. One entry per backend; every case runs on each that is available.
struct Backend {
  const char* name;
  moeBackend_t value;
  DeviceMemory& (*memory)();
};

inline const Backend& hostBackend() {
  static const Backend backend = {"host", moeBackendHost, []() -> DeviceMemory& {
                                    static HostMemory& memory = *new HostMemory;
                                    return memory;
                                  }};
  return backend;
}

inline constexpr int kPoison = 0xb5;

// A poisoned array with guards on both sides. `misalign` bytes move its start away from the alignment of 256.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DeviceMemory& memory, size_t bytes, size_t misalign = 0) : memory_(&memory), bytes_(bytes) {
    offset_ = kGuard + misalign;
    total_ = offset_ + bytes + kGuard;
    base_ = static_cast<std::byte*>(memory.allocate(total_));
    memory.fill(base_, kPoison, total_);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (base_) memory_->release(base_);
  }

  std::byte* data() const { return base_ ? base_ + offset_ : nullptr; }
  size_t bytes() const { return bytes_; }
  void write(size_t at, const void* host, size_t bytes) { memory_->copyIn(data() + at, host, bytes); }
  void poison() {
    if (base_) memory_->fill(base_, kPoison, total_);
  }
  std::vector<std::byte> read() const {
    std::vector<std::byte> host(bytes_);
    if (base_) memory_->copyOut(host.data(), data(), bytes_);
    return host;
  }
  // True if nothing was written outside of the array.
  bool guardsIntact() const {
    if (!base_) return true;
    std::vector<std::byte> before(offset_), after(kGuard);
    memory_->copyOut(before.data(), base_, offset_);
    memory_->copyOut(after.data(), base_ + offset_ + bytes_, kGuard);
    auto clean = [](std::byte byte) { return byte == std::byte{kPoison}; };
    return std::all_of(before.begin(), before.end(), clean) && std::all_of(after.begin(), after.end(), clean);
  }

 private:
  static constexpr size_t kGuard = 256;

  void swap(Buffer& other) {
    std::swap(memory_, other.memory_);
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(offset_, other.offset_);
    std::swap(total_, other.total_);
  }

  DeviceMemory* memory_ = nullptr;
  std::byte* base_ = nullptr;
  size_t bytes_ = 0, offset_ = 0, total_ = 0;
};

}  // namespace moetest
