// SPDX-License-Identifier: Apache-2.0
// Buffers of one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace moe::perf {

// Page-aligned zeroed memory that takes up space only where it was touched, so that outputs can be reserved for the
// worst case.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t bytes);
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer();

  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

  // Fills the first `bytes` (at most all) with `pattern`.
  void poison(unsigned char pattern, int64_t bytes) const;

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace moe::perf
