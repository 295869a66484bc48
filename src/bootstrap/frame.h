// SPDX-License-Identifier: Apache-2.0
// Messages over a stream socket: framed, length-capped, numbered and, once both sides have proved that they know the
// secret, sealed by an HMAC.
//
// On the wire, little-endian: magic 4, type 4, payload length 8, sequence number 8, seal 32, payload. The seal is
// HMAC(key of this connection and direction, the four fields before it || SHA-256(payload)); zero before the handshake
// is over. The payload is hashed apart so that one that goes to many ranks is hashed once.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/file_descriptor.h"
#include "bootstrap/hmac.h"

namespace moe {

enum class FrameType : uint32_t {
  kHello = 1,      // rank -> root: who I claim to be, and a nonce
  kChallenge = 2,  // root -> rank: a nonce, and the root's proof
  kProof = 3,      // rank -> root: the rank's proof
  kGather = 4,     // rank -> root: my part of an all-gather
  kGathered = 5,   // root -> rank: everybody's parts
  kMissing = 6,    // root -> rank: whom you are waiting for, as text
  kFailed = 7,     // root -> rank: result code and text; nothing follows
  kLeave = 8,      // rank -> root: result code and text; nothing follows
};

struct Frame {
  FrameType type;
  std::string payload;
};

// A payload that several connections can send without a copy each.
struct SharedPayload {
  explicit SharedPayload(std::string content) : bytes(std::move(content)), digest(sha256(bytes)) {}
  const std::string bytes;
  const Digest digest;
};

// One end of a connection. Never blocks. Errors of the connection, and frames that break the rules, throw
// moeSystemError; after that the channel is of no use.
class FrameChannel {
 public:
  explicit FrameChannel(FileDescriptor fd) : fd_(std::move(fd)) {}

  int fd() const { return fd_.get(); }

  // The longest payload that the peer may send; checked before any of it is kept.
  void setMaxPayload(uint64_t bytes) { maxPayload_ = bytes; }
  // From here on, what is sent and received is sealed.
  void seal(const Digest& sendKey, const Digest& receiveKey);

  // Puts a frame in the queue.
  void send(FrameType type, std::shared_ptr<const SharedPayload> payload);
  void send(FrameType type, std::string payload) {
    send(type, std::make_shared<const SharedPayload>(std::move(payload)));
  }
  bool hasOutput() const { return !output_.empty(); }
  // Writes what the socket takes.
  void flush();

  // Reads once. False when the peer has closed its side.
  bool receive();
  // The next whole frame of what was read.
  std::optional<Frame> next();
  // Reads once and forgets it. False when the peer has closed its side.
  bool discard();

  // The peer sees the end of the stream after what was flushed.
  void shutdownOutput();

 private:
  struct Output {
    std::string prefix;
    std::shared_ptr<const SharedPayload> payload;
    size_t sent;
  };

  FileDescriptor fd_;
  uint64_t maxPayload_ = 256;
  std::optional<Digest> sendKey_;
  std::optional<Digest> receiveKey_;
  uint64_t nextSent_ = 0;
  uint64_t nextReceived_ = 0;
  std::deque<Output> output_;
  std::string input_;
};

}  // namespace moe
