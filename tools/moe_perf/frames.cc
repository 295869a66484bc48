// SPDX-License-Identifier: Apache-2.0
#include "frames.h"

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "text.h"

namespace moe::perf {
namespace {

// More than any row of any run needs; what is longer is not a frame.
constexpr uint32_t kMaxFrame = 64u << 20;

}  // namespace

void writeAll(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    ssize_t written = ::write(fd, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write to a pipe: ", std::strerror(errno));
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void writeFrame(int fd, const Json& message) {
  // A library's text may hold any bytes; JSON must be UTF-8.
  std::string body = message.dump(-1, ' ', false, Json::error_handler_t::replace);
  auto length = static_cast<uint32_t>(body.size());
  std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
  frame += body;
  writeAll(fd, frame.data(), frame.size());
}

std::vector<Json> FrameReader::read(int fd) {
  char chunk[65536];
  ssize_t got = ::read(fd, chunk, sizeof chunk);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return {};
  if (got <= 0) ended_ = true;
  if (got > 0) pending_.append(chunk, static_cast<size_t>(got));
  std::vector<Json> frames;
  uint32_t length = 0;
  while (pending_.size() >= sizeof length) {
    std::memcpy(&length, pending_.data(), sizeof length);
    if (length > kMaxFrame) fail("a rank sent a message of ", length, " bytes");
    if (pending_.size() < sizeof length + length) break;
    frames.push_back(Json::parse(pending_.begin() + sizeof length,
                                 pending_.begin() + static_cast<std::ptrdiff_t>(sizeof length + length)));
    pending_.erase(0, sizeof length + length);
  }
  return frames;
}

}  // namespace moe::perf
