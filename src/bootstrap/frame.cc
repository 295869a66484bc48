// SPDX-License-Identifier: Apache-2.0
#include "bootstrap/frame.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>

#include "base/error.h"
#include "bootstrap/bytes.h"

namespace moe {
namespace {

constexpr uint32_t kMagic = 0x464d6f65;
constexpr size_t kHeaderBytes = 24;
constexpr size_t kPrefixBytes = kHeaderBytes + sizeof(Digest);
constexpr size_t kReadBytes = 64 << 10;

Digest sealOf(const Digest& key, std::string_view header, const Digest& payloadDigest) {
  return hmacSha256(key, ByteWriter().bytes(header).array(payloadDigest).take());
}

// Bytes read, 0 at the end of the stream, -1 when there is nothing now.
ssize_t readOnce(int fd, void* to, size_t most) {
  ssize_t got;
  do {
    got = ::recv(fd, to, most, 0);
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK) failErrno(errno, "cannot read from a connection");
  return got;
}

}  // namespace

void FrameChannel::seal(const Digest& sendKey, const Digest& receiveKey) {
  sendKey_ = sendKey;
  receiveKey_ = receiveKey;
}

void FrameChannel::send(FrameType type, std::shared_ptr<const SharedPayload> payload) {
  std::string header = ByteWriter()
                           .number(kMagic)
                           .number(static_cast<uint32_t>(type))
                           .number(static_cast<uint64_t>(payload->bytes.size()))
                           .number(nextSent_++)
                           .take();
  Digest seal = sendKey_ ? sealOf(*sendKey_, header, payload->digest) : Digest{};
  output_.push_back({ByteWriter().bytes(header).array(seal).take(), std::move(payload), 0});
}

void FrameChannel::flush() {
  while (!output_.empty()) {
    Output& out = output_.front();
    const std::string& body = out.payload->bytes;
    size_t prefixDone = std::min(out.sent, kPrefixBytes);
    size_t bodyDone = out.sent - prefixDone;
    std::array<iovec, 2> parts = {iovec{out.prefix.data() + prefixDone, kPrefixBytes - prefixDone},
                                  iovec{const_cast<char*>(body.data()) + bodyDone, body.size() - bodyDone}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) failErrno(errno, "cannot write to a connection");
    out.sent += static_cast<size_t>(sent);
    if (out.sent == kPrefixBytes + body.size()) output_.pop_front();
  }
}

bool FrameChannel::receive() {
  std::array<char, kReadBytes> chunk;
  ssize_t got = readOnce(fd_.get(), chunk.data(), chunk.size());
  if (got > 0) input_.append(chunk.data(), static_cast<size_t>(got));
  return got != 0;
}

std::optional<Frame> FrameChannel::next() {
  if (input_.size() < kPrefixBytes) return std::nullopt;
  ByteReader in(input_);
  auto magic = in.number<uint32_t>();
  auto type = static_cast<FrameType>(in.number<uint32_t>());
  auto length = in.number<uint64_t>();
  auto sequence = in.number<uint64_t>();
  auto seal = in.array<Digest>();
  if (magic != kMagic) fail(moeSystemError, "the other side does not speak moecl's rendezvous protocol");
  if (length > maxPayload_) {
    fail(moeSystemError, "a frame of ", length, " bytes; at most ", maxPayload_, " are allowed");
  }
  if (sequence != nextReceived_) fail(moeSystemError, "frame ", sequence, " where ", nextReceived_, " was due");
  if (input_.size() - kPrefixBytes < length) return std::nullopt;

  Frame frame{type, std::string(in.bytes(length))};
  if (receiveKey_) {
    Digest expected = sealOf(*receiveKey_, std::string_view(input_).substr(0, kHeaderBytes), sha256(frame.payload));
    if (!equalSecrets(seal, expected)) fail(moeSystemError, "a frame was altered on its way: its seal does not match");
  }
  ++nextReceived_;
  input_.erase(0, kPrefixBytes + static_cast<size_t>(length));
  return frame;
}

bool FrameChannel::discard() {
  std::array<char, kReadBytes> chunk;
  return readOnce(fd_.get(), chunk.data(), chunk.size()) != 0;
}

void FrameChannel::shutdownOutput() { ::shutdown(fd_.get(), SHUT_WR); }

}  // namespace moe
