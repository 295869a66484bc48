// SPDX-License-Identifier: Apache-2.0
// A rank's side of the rendezvous through sockets.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/bootstrap.h"
#include "bootstrap/frame.h"
#include "bootstrap/hmac.h"
#include "bootstrap/socket.h"

namespace moe {

// Where a rank looks for its root.
struct Meeting {
  std::vector<SocketAddress> addresses;  // in this order, again and again while it makes sense
  Digest secret{};
  // The root may start after this rank: a refused connection, or another secret, is then no reason to give up.
  bool rootMayComeLater = false;
  // For Unix sockets: the root must belong to this user.
  bool sameUserOnly = false;
  std::string place;  // "the rendezvous of this id": begins the error text
  std::string hint;   // what to look at when the root cannot be reached: ends it
};

// Collective: returns when all ranks have come. Throws for all of them when one is wrong.
std::unique_ptr<Bootstrap> joinMeeting(const Meeting& meeting, int rank, int nranks, const WaitLimit& limit);

class SocketBootstrap final : public Bootstrap {
 public:
  // `channel` is past its handshake; `where` is the address that it leads to.
  SocketBootstrap(FrameChannel channel, std::string where, int rank, int nranks);
  // Tells the root that this rank leaves in good order.
  ~SocketBootstrap() override;

  std::vector<std::string> allGather(const std::string& mine, const WaitLimit& limit) override;

 private:
  std::vector<std::string> gather(const std::string& mine, const WaitLimit& limit);
  // False when the connection is at its end.
  bool exchange();
  std::optional<std::vector<std::string>> handle(const Frame& frame);
  // Best effort, never waits.
  void leave(moeResult_t code, const std::string& why) noexcept;

  FrameChannel channel_;
  std::string where_;
  std::string missing_;  // whom the root last said this rank waits for
  std::string lostWhy_;
  std::optional<Error> failure_;
};

}  // namespace moe
