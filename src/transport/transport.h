// SPDX-License-Identifier: Apache-2.0
// How a rank reaches its peers' windows. Protocols above this line know nothing of shared memory, CUDA or NICs.
//
// A transport allocates this rank's window, shows it to the other ranks, and finds out how each of them can be reached.
// It also carries departures: a rank that leaves, aborts or dies is marked in every peer's PeerStates.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

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

// What became of a rank. Ordered: a later state never goes back to an earlier one.
enum class PeerState : unsigned char {
  kAlive = 0,
  kLeft = 1,     // finalized in good order
  kAborted = 2,  // called moeCommAbort, or failed
  kDead = 3,     // its process went away without a word
};

// One word per rank, written by transports and read by every wait. Any thread.
class PeerStates {
 public:
  explicit PeerStates(int nranks) : states_(static_cast<size_t>(nranks)) {}

  PeerState get(int rank) const { return states_[static_cast<size_t>(rank)].load(std::memory_order_acquire); }
  // True if any rank has aborted or died: then no wait can be trusted to end.
  bool anyLost() const { return lost_.load(std::memory_order_acquire); }
  void set(int rank, PeerState state) {
    std::atomic<PeerState>& word = states_[static_cast<size_t>(rank)];
    PeerState seen = word.load(std::memory_order_relaxed);
    while (seen < state && !word.compare_exchange_weak(seen, state, std::memory_order_release)) {
    }
    if (state >= PeerState::kAborted) lost_.store(true, std::memory_order_release);
  }
  int size() const { return static_cast<int>(states_.size()); }

 private:
  std::vector<std::atomic<PeerState>> states_;
  std::atomic<bool> lost_{false};
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
