// SPDX-License-Identifier: Apache-2.0
#include "transport/departures.h"

namespace moe {

void Departures::addLocal(std::weak_ptr<PeerStates> states) {
  std::lock_guard lock(mutex_);
  localPeers_.push_back(std::move(states));
}

void Departures::connected(const HostLinks* links) {
  std::lock_guard lock(mutex_);
  links_ = links;
  if (announced_ != PeerState::kAlive) deliver();
}

void Departures::announce(PeerState state, PeerState unless) {
  std::lock_guard lock(mutex_);
  if (state <= announced_ || announced_ > unless) return;
  announced_ = state;
  deliver();
}

void Departures::deliver() {
  for (const std::weak_ptr<PeerStates>& peer : localPeers_) {
    if (std::shared_ptr<PeerStates> states = peer.lock()) states->set(rank_, announced_);
  }
  if (links_) links_->announce(announced_);
}

}  // namespace moe
