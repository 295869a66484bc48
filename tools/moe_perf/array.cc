// SPDX-License-Identifier: Apache-2.0
#include "array.h"

#include <algorithm>
#include <cstring>

namespace moe::perf {

Array::Array(int64_t bytes, Gpu* gpu) : gpu_(gpu), host_(bytes) {
  if (gpu && bytes > 0) device_ = static_cast<std::byte*>(gpu->allocate(bytes));
}

Array::~Array() {
  if (device_) gpu_->release(device_);
}

void Array::push() const {
  if (gpu_ && bytes() > 0) gpu_->copyIn(device_, host(), bytes());
}

void Array::fetch(int64_t begin, int64_t bytes) const {
  if (gpu_ && bytes > 0) gpu_->copyOut(host() + begin, device_ + begin, bytes);
}

void Array::poison(unsigned char pattern, int64_t begin, int64_t bytes) const {
  int64_t count = std::min(bytes, this->bytes() - begin);
  if (count <= 0) return;
  if (gpu_) {
    gpu_->fill(device_ + begin, pattern, count);
  } else {
    std::memset(host() + begin, pattern, static_cast<size_t>(count));
  }
}

}  // namespace moe::perf
