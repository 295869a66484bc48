// SPDX-License-Identifier: Apache-2.0
// Tells the other ranks of this host that a rank leaves or has failed, be they in this process or in another one.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "base/peer_state.h"
#include "transport/host_links.h"

namespace moe {

// Thread-safe: the news may come while the ranks still connect.
class Departures {
 public:
  explicit Departures(int rank) : rank_(rank) {}
  // Without a word before, the peers must not wait for this rank: its state is gone.
  ~Departures() { announce(PeerState::kAborted, PeerState::kAlive); }
  Departures(const Departures&) = delete;
  Departures& operator=(const Departures&) = delete;

  // `states` belongs to a rank of this process.
  void addLocal(std::weak_ptr<PeerStates> states);
  // All peers are known now; `links` has connected, outlives this, and may be null. What was announced before reaches
  // them here.
  void connected(const HostLinks* links);

  // Never waits. A state that is not higher than the last one does nothing.
  void announce(PeerState state) { announce(state, PeerState::kDead); }

 private:
  // Only if no more than `unless` was announced so far.
  void announce(PeerState state, PeerState unless);
  void deliver();

  const int rank_;
  std::mutex mutex_;
  PeerState announced_ = PeerState::kAlive;
  std::vector<std::weak_ptr<PeerStates>> localPeers_;
  const HostLinks* links_ = nullptr;
};

}  // namespace moe
