// SPDX-License-Identifier: Apache-2.0
// Messages from the ranks to the starter: JSON behind a 4-byte length, through a pipe.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "world.h"

namespace moe::perf {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { close(); }
  int get() const { return fd_; }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// Throws Failure when the reader has gone.
void writeFrame(int fd, const Json& message);
// Writes all bytes or throws Failure.
void writeAll(int fd, const void* data, size_t bytes);

// Puts frames together from what a pipe gives.
class FrameReader {
 public:
  // Reads what is there, and returns the frames that it completes. Sets ended() when the writer has gone.
  std::vector<Json> read(int fd);
  bool ended() const { return ended_; }

 private:
  std::string pending_;
  bool ended_ = false;
};

}  // namespace moe::perf
