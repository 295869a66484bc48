// SPDX-License-Identifier: Apache-2.0
// Memory that the library reads or writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "gpu.h"
#include "memory.h"

namespace moe::perf {

// Device memory of the rank's backend. On a GPU it has a copy on the host, in which inputs are made and results are
// checked; for the host backend both are the same memory.
class Array {
 public:
  Array() = default;
  // gpu == nullptr: host memory.
  Array(int64_t bytes, Gpu* gpu);
  Array(Array&& other) noexcept
      : gpu_(other.gpu_), host_(std::move(other.host_)), device_(std::exchange(other.device_, nullptr)) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(host_, other.host_);
    std::swap(device_, other.device_);
    return *this;
  }
  ~Array();

  // What the library is given; nullptr for 0 bytes.
  std::byte* device() const { return gpu_ ? device_ : host_.data(); }
  std::byte* host() const { return host_.data(); }
  template <class T>
  T* deviceAs() const {
    return reinterpret_cast<T*>(device());
  }
  template <class T>
  T* hostAs() const {
    return reinterpret_cast<T*>(host());
  }
  int64_t bytes() const { return host_.bytes(); }

  // From the host's copy, and to it.
  void push() const;
  void fetch() const { fetch(0, bytes()); }
  void fetch(int64_t begin, int64_t bytes) const;
  // Fills `bytes` from `begin` on, at most up to the end. Only what the library is given.
  void poison(unsigned char pattern, int64_t begin, int64_t bytes) const;

 private:
  Gpu* gpu_ = nullptr;
  Buffer host_;
  std::byte* device_ = nullptr;
};

}  // namespace moe::perf
