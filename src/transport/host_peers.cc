// SPDX-License-Identifier: Apache-2.0
#include "transport/host_peers.h"

#include <optional>

#include "base/error.h"
#include "transport/reached.h"
#include "transport/wire.h"

namespace moe {

void putHostCard(std::string* out, const HostCard& card) {
  putValue(out, card.process);
  putValue(out, card.localKey);
  putValue(out, card.windowBytes);
  putText(out, card.linksAddress);
}

bool takeHostCard(std::string_view* in, HostCard* card) {
  return takeValue(in, &card->process) && takeValue(in, &card->localKey) && takeValue(in, &card->windowBytes) &&
         takeText(in, &card->linksAddress);
}

void failUnreadableCard(size_t rank, size_t bytes) {
  fail(moeMismatch, "rank ", rank, " describes its window in ", bytes,
       " bytes that cannot be read; do all ranks run the same version of moecl?");
}

HostCard HostPeers::describe(const Region& window) {
  links_ = std::make_unique<HostLinks>(rank_, nranks_);
  entry_ = std::make_unique<LocalWindowEntry>(LocalWindow{rank_, window.base, window.bytes, window.owner, states_});
  return {processIdentity(), entry_->key(), window.bytes, links_->address()};
}

std::vector<Peer> HostPeers::reachAll(const Region& window, const std::vector<HostCard>& cards, int descriptor,
                                      const Ways& ways, Bootstrap& bootstrap, const WaitLimit& limit) {
  const ProcessIdentity self = cards[static_cast<size_t>(rank_)].process;
  std::vector<Peer> peers(cards.size());
  std::vector<std::string> addresses;
  std::vector<bool> wanted;
  for (int peer = 0; peer < nranks_; ++peer) {
    const HostCard& card = cards[static_cast<size_t>(peer)];
    bool local = card.process == self;
    wanted.push_back(!local);
    addresses.push_back(card.linksAddress);
    if (peer == rank_) {
      peers[static_cast<size_t>(peer)] = mapped(window, "self", Reach::kSelf);
    } else if (local) {
      peers[static_cast<size_t>(peer)] = reachLocal(peer, card, ways);
    }
  }
  std::vector<std::string> reasons = links_->connect(addresses, wanted, bootstrap, limit);
  for (size_t peer = 0; peer < peers.size(); ++peer) {
    if (wanted[peer] && !reasons[peer].empty()) peers[peer] = unreachable(reasons[peer]);
  }
  if (links_->linkedPeers().empty()) {
    links_.reset();
  } else {
    reachLinked(descriptor, ways, limit, &peers);
    links_->watch(states_);
  }
  departures_.connected(links_.get());
  return peers;
}

Peer HostPeers::reachLocal(int peer, const HostCard& card, const Ways& ways) {
  std::optional<LocalWindow> found = LocalWindowEntry::find(card.localKey);
  Region region;
  if (found) region = {found->base, found->bytes, found->owner.lock()};
  if (!region.owner || found->rank != peer || region.bytes != card.windowBytes) {
    return unreachable("its window is no longer in this process");
  }
  departures_.addLocal(found->states);
  return ways.local(peer, region);
}

void HostPeers::reachLinked(int descriptor, const Ways& ways, const WaitLimit& limit, std::vector<Peer>* peers) {
  std::vector<HostLinks::Received> received = links_->exchangeDescriptors(descriptor, "", limit);
  for (int peer : links_->linkedPeers()) {
    HostLinks::Received& got = received[static_cast<size_t>(peer)];
    (*peers)[static_cast<size_t>(peer)] =
        got.failure.empty() ? ways.linked(peer, got.descriptor) : unreachable(got.failure);
    got.descriptor.reset();
  }
}

}  // namespace moe
