// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm_transport.h"

#include <unistd.h>

#include <string_view>

#include "transport/host_peers.h"
#include "transport/reached.h"
#include "transport/reports.h"
#include "transport/shm/memfd.h"

namespace moe {
namespace {

std::vector<HostCard> parseCards(const std::vector<std::string>& contents) {
  auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<HostCard> cards(contents.size());
  for (size_t rank = 0; rank < contents.size(); ++rank) {
    std::string_view rest = contents[rank];
    HostCard& card = cards[rank];
    if (!takeHostCard(&rest, &card) || !rest.empty()) failUnreadableCard(rank, contents[rank].size());
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
  ShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states) : host_(rank, nranks, std::move(states)) {}

  Region allocate(size_t bytes) override;
  std::vector<Peer> connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) override;
  void announce(PeerState state) override { host_.announce(state); }

 private:
  std::string describe(const Region& window);
  std::vector<Peer> reachAll(const Region& window, const std::vector<HostCard>& cards, Bootstrap& bootstrap,
                             const WaitLimit& limit);

  FileDescriptor memory_;  // of the own window, until it is shown to the others
  HostPeers host_;
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
  std::vector<HostCard> cards = parseCards(exchangeReports([&] { return describe(window); }, kWhat, bootstrap, limit));
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
  std::string card;
  putHostCard(&card, host_.describe(window));
  return card;
}

std::vector<Peer> ShmTransport::reachAll(const Region& window, const std::vector<HostCard>& cards, Bootstrap& bootstrap,
                                         const WaitLimit& limit) {
  HostPeers::Ways ways;
  ways.local = [](int, const Region& region) { return mapped(region, "local"); };
  ways.linked = [&](int peer, const FileDescriptor& descriptor) {
    auto bytes = static_cast<size_t>(cards[static_cast<size_t>(peer)].windowBytes);
    std::string refusal = refuseMemfd(descriptor, bytes);
    return refusal.empty() ? mapped(mapMemfd(descriptor, bytes), "shm") : unreachable(refusal);
  };
  return host_.reachAll(window, cards, memory_.get(), ways, bootstrap, limit);
}

}  // namespace

std::unique_ptr<Transport> makeShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states) {
  return std::make_unique<ShmTransport>(rank, nranks, std::move(states));
}

}  // namespace moe
