// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/shm_transport.h"

#include <unistd.h>

#include <mutex>
#include <string_view>

#include "base/log.h"
#include "transport/host_links.h"
#include "transport/shm/local_windows.h"
#include "transport/shm/memfd.h"
#include "transport/shm/process_identity.h"
#include "transport/wire.h"

namespace moe {
namespace {

constexpr size_t kMaxFailureBytes = 2000;

// What a rank tells all others after a step that can fail on it alone: that it failed, or something they need next.
std::string successReport(const std::string& content) {
  std::string report;
  putValue(&report, static_cast<int32_t>(moeSuccess));
  return report + content;
}

std::string failureReport(const Error& error) {
  std::string report;
  putValue(&report, static_cast<int32_t>(error.code()));
  return report + error.text().substr(0, kMaxFailureBytes);
}

// The contents of all reports. Throws the failure of the lowest rank that has one: the same on all ranks, but that
// "aborted" means this rank itself.
std::vector<std::string> contentsOf(const std::vector<std::string>& reports, int self) {
  std::vector<std::string> contents;
  for (int rank = 0; rank < static_cast<int>(reports.size()); ++rank) {
    const std::string& report = reports[static_cast<size_t>(rank)];
    std::string_view rest = report;
    int32_t code = 0;
    if (!takeValue(&rest, &code) || code < 0 || code >= moeNumResults) {
      fail(moeMismatch, "the report of rank ", rank, " on its shared memory cannot be read (", report.size(),
           " bytes); do all ranks run the same version of moecl?");
    }
    if (code == moeAborted && rank != self) code = moeRankLost;
    if (code != moeSuccess) {
      fail(static_cast<moeResult_t>(code), "rank ", rank, " could not share its memory: ", rest);
    }
    contents.emplace_back(rest);
  }
  return contents;
}

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

Peer unreachable(const std::string& clause) {
  Peer peer;
  peer.reason = "because " + clause;
  return peer;
}

Peer mapped(const Region& region, const char* transport, Reach reach = Reach::kMapped) {
  Peer peer;
  peer.reach = reach;
  peer.window = region.base;
  peer.owner = region.owner;
  peer.transport = transport;
  return peer;
}

class ShmTransport final : public Transport {
 public:
  ShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states)
      : rank_(rank), nranks_(nranks), states_(std::move(states)) {}

  // Without a word before, the peers must not wait for this rank: its state is gone.
  ~ShmTransport() override {
    std::lock_guard lock(mutex_);
    if (announced_ == PeerState::kAlive) deliver(PeerState::kAborted);
  }

  Region allocate(size_t bytes) override;
  std::vector<Peer> connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) override;
  void announce(PeerState state) override;

 private:
  std::string describe(const Region& window);
  std::vector<Peer> reachAll(const Region& window, const std::vector<Card>& cards, Bootstrap& bootstrap,
                             const WaitLimit& limit);
  Peer reachLocal(int peer, const Card& card);
  void mapLinked(const std::vector<Card>& cards, const WaitLimit& limit, std::vector<Peer>* peers);
  // To every peer that is connected by now. Under the mutex.
  void deliver(PeerState state);

  const int rank_;
  const int nranks_;
  const std::shared_ptr<PeerStates> states_;
  FileDescriptor memory_;  // of the own window, until it is shown to the others
  std::unique_ptr<LocalWindowEntry> entry_;
  std::unique_ptr<HostLinks> links_;

  std::mutex mutex_;  // for what follows: announce() may run while connect() does
  PeerState announced_ = PeerState::kAlive;
  std::vector<std::weak_ptr<PeerStates>> localPeers_;
  HostLinks* connectedLinks_ = nullptr;  // links_, once it has connected
};

Region ShmTransport::allocate(size_t bytes) {
  size_t whole = windowBytesFor(bytes);
  FileDescriptor memory = makeSealedMemfd(whole);
  Region region = mapMemfd(memory, whole);
  memory_ = std::move(memory);
  return region;
}

std::vector<Peer> ShmTransport::connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) {
  // A rank that fails tells the others so in the place of what they expect next, and then all fail alike.
  std::string report;
  try {
    report = successReport(describe(window));
  } catch (const Error& error) {
    report = failureReport(error);
  }
  std::vector<Card> cards = parseCards(contentsOf(bootstrap.allGather(report, limit), rank_));
  std::vector<Peer> peers;
  std::unique_ptr<Error> failure;
  try {
    peers = reachAll(window, cards, bootstrap, limit);
  } catch (const Error& error) {
    failure = std::make_unique<Error>(error);
  }
  std::vector<std::string> verdicts;
  try {
    verdicts = bootstrap.allGather(failure ? failureReport(*failure) : successReport(""), limit);
  } catch (const Error&) {
    // What went wrong first says more than that the others could not be told.
    if (failure) throw Error(*failure);
    throw;
  }
  contentsOf(verdicts, rank_);
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
  std::lock_guard lock(mutex_);
  connectedLinks_ = links_.get();
  // What was said meanwhile has not reached all of them.
  if (announced_ != PeerState::kAlive) deliver(announced_);
  return peers;
}

Peer ShmTransport::reachLocal(int peer, const Card& card) {
  std::optional<LocalWindow> found = LocalWindowEntry::find(card.localKey);
  Region region;
  if (found) region = {found->base, found->bytes, found->owner.lock()};
  if (!region.owner || found->rank != peer || region.bytes != card.windowBytes) {
    return unreachable("its window is no longer in this process");
  }
  std::lock_guard lock(mutex_);
  localPeers_.push_back(found->states);
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

void ShmTransport::announce(PeerState state) {
  std::lock_guard lock(mutex_);
  if (state <= announced_) return;
  announced_ = state;
  deliver(state);
}

void ShmTransport::deliver(PeerState state) {
  for (const std::weak_ptr<PeerStates>& peer : localPeers_) {
    if (std::shared_ptr<PeerStates> states = peer.lock()) states->set(rank_, state);
  }
  if (connectedLinks_) connectedLinks_->announce(state);
}

}  // namespace

std::unique_ptr<Transport> makeShmTransport(int rank, int nranks, std::shared_ptr<PeerStates> states) {
  return std::make_unique<ShmTransport>(rank, nranks, std::move(states));
}

}  // namespace moe
