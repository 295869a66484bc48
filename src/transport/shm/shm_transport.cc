// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm_transport.h"

#include <unistd.h>

#include <string_view>

#include "transport/departures.h"
#include "transport/host_links.h"
#include "transport/local_windows.h"
#include "transport/process_identity.h"
#include "transport/reached.h"
#include "transport/reports.h"
#include "transport/shm/memfd.h"
#include "transport/wire.h"

namespace moe {
namespace {

// What the ranks tell each other first.
struct Card {
  ProcessIdentity process;
  uint64_t localKey = 0;
  uint64_t windowBytes = 0;
  std::string linksAddress;
};

std::string packCard(const Card& card) {
  std::string out;
  putValue(&out, card.process);
  putValue(&out, card.localKey);
  putValue(&out, card.windowBytes);
  putText(&out, card.linksAddress);
  return out;
}

std::vector<Card> parseCards(const std::vector<std::string>& contents) {
  auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<Card> cards(contents.size());
  for (size_t rank = 0; rank < contents.size(); ++rank) {
    std::string_view rest = contents[rank];
    Card& card = cards[rank];
    if (!takeValue(&rest, &card.process) || !takeValue(&rest, &card.localKey) || !takeValue(&rest, &card.windowBytes) ||
        !takeText(&rest, &card.linksAddress) || !rest.empty()) {
      fail(moeMismatch, "rank ", rank, " describes its window in ", contents[rank].size(),
           " bytes that cannot be read; do all ranks run the same version of moecl?");
    }
    if (card.windowBytes == 0 || card.windowBytes > static_cast<uint64_t>(PTRDIFF_MAX) ||
        card.windowBytes % page != 0) {
      fail(moeMismatch, "rank ", rank, " announces a window of ", card.windowBytes, " bytes; it must be a multiple of ",
           page, " and less than 2^63");
    }
  }
  return cards;
}

class ShmTransport final : public Transport {
 public:
  ShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states)
      : rank_(rank), nranks_(nranks), states_(std::move(states)), departures_(rank) {}

  Region allocate(size_t bytes) override;
  std::vector<Peer> connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) override;
  void announce(PeerState state) override { departures_.announce(state); }

 private:
  std::string describe(const Region& window);
  std::vector<Peer> reachAll(const Region& window, const std::vector<Card>& cards, Bootstrap& bootstrap,
                             const WaitLimit& limit);
  Peer reachLocal(int peer, const Card& card);
  void mapLinked(const std::vector<Card>& cards, const WaitLimit& limit, std::vector<Peer>* peers);

  const int rank_;
  const int nranks_;
  const std::shared_ptr<PeerStates> states_;
  FileDescriptor memory_;  // of the own window, until it is shown to the others
  std::unique_ptr<LocalWindowEntry> entry_;
  std::unique_ptr<HostLinks> links_;
  Departures departures_;  // last: it speaks through the links when it goes
};

Region ShmTransport::allocate(size_t bytes) {
  size_t whole = windowBytesFor(bytes);
  FileDescriptor memory = makeSealedMemfd(whole);
  Region region = mapMemfd(memory, whole);
  memory_ = std::move(memory);
  return region;
}

std::vector<Peer> ShmTransport::connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) {
  constexpr char kWhat[] = "share its memory";
  std::vector<Card> cards = parseCards(exchangeReports([&] { return describe(window); }, kWhat, bootstrap, limit));
  std::vector<Peer> peers;
  auto reach = [&] {
    peers = reachAll(window, cards, bootstrap, limit);
    return std::string();
  };
  exchangeReports(reach, kWhat, bootstrap, limit);
  memory_.reset();
  return peers;
}

std::string ShmTransport::describe(const Region& window) {
  if (!memory_.valid() || !window.owner) {
    fail(moeInternalError, "connect() needs the region that the last allocate() gave, and works once");
  }
  links_ = std::make_unique<HostLinks>(rank_, nranks_);
  entry_ = std::make_unique<LocalWindowEntry>(LocalWindow{rank_, window.base, window.bytes, window.owner, states_});
  return packCard({processIdentity(), entry_->key(), window.bytes, links_->address()});
}

std::vector<Peer> ShmTransport::reachAll(const Region& window, const std::vector<Card>& cards, Bootstrap& bootstrap,
                                         const WaitLimit& limit) {
  const ProcessIdentity self = cards[static_cast<size_t>(rank_)].process;
  std::vector<Peer> peers;
  std::vector<std::string> addresses;
  std::vector<bool> wanted;
  for (int peer = 0; peer < nranks_; ++peer) {
    const Card& card = cards[static_cast<size_t>(peer)];
    bool local = card.process == self;
    wanted.push_back(!local);
    addresses.push_back(card.linksAddress);
    peers.push_back(peer == rank_ ? mapped(window, "self", Reach::kSelf) : local ? reachLocal(peer, card) : Peer());
  }
  std::vector<std::string> reasons = links_->connect(addresses, wanted, bootstrap, limit);
  for (size_t peer = 0; peer < peers.size(); ++peer) {
    if (wanted[peer] && !reasons[peer].empty()) peers[peer] = unreachable(reasons[peer]);
  }
  if (links_->linkedPeers().empty()) {
    links_.reset();
  } else {
    mapLinked(cards, limit, &peers);
    links_->watch(states_);
  }
  departures_.connected(links_.get());
  return peers;
}

Peer ShmTransport::reachLocal(int peer, const Card& card) {
  std::optional<LocalWindow> found = LocalWindowEntry::find(card.localKey);
  Region region;
  if (found) region = {found->base, found->bytes, found->owner.lock()};
  if (!region.owner || found->rank != peer || region.bytes != card.windowBytes) {
    return unreachable("its window is no longer in this process");
  }
  departures_.addLocal(found->states);
  return mapped(region, "local");
}

void ShmTransport::mapLinked(const std::vector<Card>& cards, const WaitLimit& limit, std::vector<Peer>* peers) {
  std::vector<HostLinks::Received> received = links_->exchangeDescriptors(memory_.get(), "", limit);
  for (int peer : links_->linkedPeers()) {
    auto index = static_cast<size_t>(peer);
    HostLinks::Received& got = received[index];
    auto bytes = static_cast<size_t>(cards[index].windowBytes);
    std::string refusal = got.failure.empty() ? refuseMemfd(got.descriptor, bytes) : got.failure;
    (*peers)[index] = refusal.empty() ? mapped(mapMemfd(got.descriptor, bytes), "shm") : unreachable(refusal);
    got.descriptor.reset();
  }
}

}  // namespace

std::unique_ptr<Transport> makeShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states) {
  return std::make_unique<ShmTransport>(rank, nranks, std::move(states));
}

}  // namespace moe
