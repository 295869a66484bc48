// SPDX-License-Identifier: Apache-2.0
// How a rank reaches its peers' windows. Protocols above this line know nothing of shared memory, CUDA or NICs.
//
// A transport allocates this rank's window, shows it to the other ranks, and finds out how each of them can be reached.
// It also carries departures: a rank that leaves, aborts or dies is marked in every peer's PeerStates.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/peer_state.h"
#include "base/wait_limit.h"
#include "bootstrap/bootstrap.h"

namespace moe {

// How rank A touches rank B's window.
enum class Reach : int {
  kSelf,    // it is its own
  kMapped,  // loads and stores through a pointer
  kPosted,  // one-sided puts that a proxy issues
  kNone,    // not at all; Peer::reason says why
};

// This rank's window. `owner` keeps the memory mapped.
struct Region {
  std::byte* base = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> owner;
};

struct Peer {
  Reach reach = Reach::kNone;
  std::byte* window = nullptr;  // for kSelf and kMapped
  std::shared_ptr<void> owner;  // keeps the mapping
  const char* transport = "";   // "self", "local" (same process), "shm", ...
  std::string reason;           // for kNone: a sentence that ends an error text
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Allocates this rank's window, zeroed. Throws moeOutOfMemory or moeSystemError.
  virtual Region allocate(size_t bytes) = 0;

  // Collective over `bootstrap`: shows `window` to all ranks and maps theirs. result[r] is rank r's; a rank that cannot
  // be reached comes back as Reach::kNone with its reason, on this rank alone. Starts to watch the peers: from here on
  // their departures appear in the PeerStates given at construction.
  virtual std::vector<Peer> connect(const Region& window, Bootstrap& bootstrap, const WaitLimit& limit) = 0;

  // Tells every connected peer that this rank leaves (kLeft) or has failed (kAborted). Does not wait for them.
  // Thread-safe; later calls with a state that is not higher do nothing.
  virtual void announce(PeerState state) = 0;
};

}  // namespace moe
