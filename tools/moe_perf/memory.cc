// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "text.h"

namespace moe::perf {

Buffer::Buffer(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    int error = errno;
    bytes_ = 0;
    fail("a buffer of ", bytes, " bytes: ", std::strerror(error),
         "; use fewer tokens, or --exact or --budget in place of worst-case outputs");
  }
  data_ = static_cast<std::byte*>(memory);
}

Buffer::~Buffer() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

void Buffer::poison(unsigned char pattern, int64_t bytes) const {
  if (data_) std::memset(data_, pattern, static_cast<size_t>(std::min(bytes, bytes_)));
}

}  // namespace moe::perf
