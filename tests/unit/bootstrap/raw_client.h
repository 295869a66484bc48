// SPDX-License-Identifier: Apache-2.0
// A rank's side of the protocol taken apart, so that tests can do it wrong.
#pragma once

#include <poll.h>

#include <memory>
#include <optional>

#include "bootstrap/frame.h"
#include "bootstrap/handshake.h"
#include "unit/bootstrap/helpers.h"

namespace moe::test {

class RawClient {
 public:
  explicit RawClient(const SocketAddress& address) {
    int error = 0;
    FileDescriptor fd = connectTo(address, within(2s), &error);
    EXPECT_EQ(error, 0);
    fd_ = fd.get();
    channel_ = std::make_unique<FrameChannel>(std::move(fd));
    channel_->setMaxPayload(Bootstrap::kMaxBytes);
  }

  int fd() const { return fd_; }
  FrameChannel& channel() { return *channel_; }
  void close() { channel_.reset(); }

  void write(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      ssize_t now = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (now < 0 && errno == EAGAIN) {
        waitFor(fd_, POLLOUT, within(1s));
        continue;
      }
      if (now < 0) return;  // the root has dropped this connection, which is what some tests want
      sent += static_cast<size_t>(now);
    }
  }

  // nullopt when the root closed the connection, or after two seconds.
  std::optional<Frame> read() {
    WaitLimit limit = within(2s);
    while (!limit.passed()) {
      if (auto frame = channel_->next()) return frame;
      waitFor(fd_, POLLIN, limit);
      if (!channel_->receive()) return channel_->next();
    }
    return std::nullopt;
  }

  // True when the root closes this connection within `most`.
  bool closedWithin(std::chrono::milliseconds most) {
    WaitLimit limit = within(most);
    while (!limit.passed()) {
      waitFor(fd_, POLLIN, limit);
      try {
        if (!channel_->discard()) return true;
      } catch (const Error&) {
        return true;
      }
    }
    return false;
  }

  // Joins as that rank. False when the root does not play along.
  bool join(int rank, int nranks, const Digest& secret) {
    Handshake handshake;
    handshake.rank = rank;
    handshake.nranks = nranks;
    handshake.rankNonce = randomDigest();
    channel_->send(FrameType::kHello, handshake.hello());
    channel_->flush();
    std::optional<Frame> challenge = read();
    if (!challenge || challenge->type != FrameType::kChallenge) return false;
    handshake.parseChallenge(challenge->payload, secret);
    channel_->send(FrameType::kProof, handshake.proof(secret));
    handshake.sealAsRank(*channel_, secret);
    channel_->flush();
    return true;
  }

 private:
  int fd_ = -1;
  std::unique_ptr<FrameChannel> channel_;
};

}  // namespace moe::test
