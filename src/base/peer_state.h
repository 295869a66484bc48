// SPDX-License-Identifier: Apache-2.0
// What became of each rank, as this rank knows it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace moe {

// Ordered: a later state never goes back to an earlier one.
enum class PeerState : unsigned char {
  kAlive = 0,
  kLeft = 1,     // finalized in good order
  kAborted = 2,  // called moeCommAbort, or failed
  kDead = 3,     // its process went away without a word
};

// What a wait looks at besides its word. GPUs read it too, so it lies in memory that the backend provides.
struct Notices {
  uint32_t aborted;  // moeCommAbort was called here
  uint32_t lost;     // some rank has aborted or died
  // A PeerState for each rank follows the struct.
};

// Written by transports and read by every wait. Any thread.
class PeerStates {
 public:
  static size_t bytes(int nranks) { return sizeof(Notices) + static_cast<size_t>(nranks); }

  // `memory`: bytes(nranks) of zeros.
  PeerStates(int nranks, std::shared_ptr<void> memory)
      : nranks_(nranks),
        memory_(std::move(memory)),
        notices_(static_cast<Notices*>(memory_.get())),
        states_(reinterpret_cast<PeerState*>(notices_ + 1)) {}
  // In ordinary memory.
  explicit PeerStates(int nranks) : PeerStates(nranks, ordinaryMemory(nranks)) {}

  PeerState get(int rank) const { return std::atomic_ref(states_[rank]).load(std::memory_order_acquire); }
  // True if any rank has aborted or died: then no wait can be trusted to end.
  bool anyLost() const { return std::atomic_ref(notices_->lost).load(std::memory_order_acquire) != 0; }
  void set(int rank, PeerState state) {
    std::atomic_ref word(states_[rank]);
    PeerState seen = word.load(std::memory_order_relaxed);
    while (seen < state && !word.compare_exchange_weak(seen, state, std::memory_order_release)) {
    }
    if (state >= PeerState::kAborted) std::atomic_ref(notices_->lost).store(1, std::memory_order_release);
  }
  void setAborted() { std::atomic_ref(notices_->aborted).store(1, std::memory_order_release); }
  int size() const { return nranks_; }

 private:
  static std::shared_ptr<void> ordinaryMemory(int nranks) {
    return {new uint64_t[bytes(nranks) / sizeof(uint64_t) + 1]{},
            [](void* memory) { delete[] static_cast<uint64_t*>(memory); }};
  }

  int nranks_;
  std::shared_ptr<void> memory_;
  Notices* notices_;
  PeerState* states_;
};

}  // namespace moe
