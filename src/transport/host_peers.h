// SPDX-License-Identifier: Apache-2.0
// The ranks of one host, whatever their windows are made of: those of this process share one mapping of each window,
// those of other processes send each other descriptors.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/departures.h"
#include "transport/host_links.h"
#include "transport/local_windows.h"
#include "transport/process_identity.h"
#include "transport/transport.h"

namespace moe {

// Where a rank and its window can be found. Every backend's card has one.
struct HostCard {
  ProcessIdentity process;
  uint64_t localKey = 0;
  uint64_t windowBytes = 0;  // whole, as allocated
  std::string linksAddress;
};
void putHostCard(std::string* out, const HostCard& card);
// From the front of `in`; false when it cannot be read.
bool takeHostCard(std::string_view* in, HostCard* card);
// For what announces a window that cannot be read, or has a size that cannot be.
[[noreturn]] void failUnreadableCard(size_t rank, size_t bytes);

class HostPeers {
 public:
  HostPeers(int rank, int nranks, std::shared_ptr<PeerStates> states)
      : rank_(rank), nranks_(nranks), states_(std::move(states)), departures_(rank) {}

  // Lists the own window for the ranks of this process, and listens for the others from here on. Once.
  HostCard describe(const Region& window);

  // What a backend makes of a window that was found: a Peer, which may be unreachable.
  struct Ways {
    std::function<Peer(int peer, const Region& region)> local;
    std::function<Peer(int peer, const FileDescriptor& descriptor)> linked;
  };
  // Collective over `bootstrap`, once: finds everybody's window. `descriptor` is this rank's own, for other processes.
  // From here on departures appear in the states.
  std::vector<Peer> reachAll(const Region& window, const std::vector<HostCard>& cards, int descriptor, const Ways& ways,
                             Bootstrap& bootstrap, const WaitLimit& limit);

  // As Transport::announce.
  void announce(PeerState state) { departures_.announce(state); }

 private:
  Peer reachLocal(int peer, const HostCard& card, const Ways& ways);
  void reachLinked(int descriptor, const Ways& ways, const WaitLimit& limit, std::vector<Peer>* peers);

  const int rank_;
  const int nranks_;
  const std::shared_ptr<PeerStates> states_;
  std::unique_ptr<LocalWindowEntry> entry_;
  std::unique_ptr<HostLinks> links_;
  Departures departures_;  // last: it speaks through the links when it goes
};

}  // namespace moe
