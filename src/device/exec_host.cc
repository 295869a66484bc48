// SPDX-License-Identifier: Apache-2.0
#include "device/exec_host.h"

#include <sched.h>

#include <chrono>
#include <thread>

#include "base/deadline.h"
#include "moe.h"

namespace moe {
namespace {

// How a waiting thread passes its time: at first it only yields, then it sleeps, so that many ranks can share few
// cores.
class Backoff {
 public:
  void pause() {
    if (++turns_ < kYields) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  static constexpr int kYields = 2000;
  int turns_ = 0;
};

}  // namespace

bool HostBarrier::arrive(bool ok) {
  if (threads_ == 1) return ok;
  if (!ok) ok_.store(false, std::memory_order_relaxed);
  uint32_t generation = generation_.load(std::memory_order_acquire);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    agreed_ = ok_.load(std::memory_order_relaxed);
    ok_.store(true, std::memory_order_relaxed);
    waiting_.store(0, std::memory_order_relaxed);
    bool agreed = agreed_;
    generation_.store(generation + 1, std::memory_order_release);
    return agreed;
  }
  // Bounded, since every warp of a block comes to every barrier: waits inside end by themselves.
  Backoff backoff;
  while (generation_.load(std::memory_order_acquire) == generation) backoff.pause();
  return agreed_;
}

HostGrid::HostGrid(int blockCount, int warpCount, WaitGuard* waitGuard)
    : blocks(blockCount), warps(warpCount), guard(waitGuard) {
  for (int block = 0; block < blockCount; ++block) blockState.push_back(std::make_unique<Block>(warpCount));
}

bool HostExec::wait(const uint64_t* word, uint64_t expected, Awaited awaited, int peer) {
  auto* shared = const_cast<uint64_t*>(word);
  for (int spin = 0; spin < 16; ++spin) {
    if (std::atomic_ref<uint64_t>(*shared).load(std::memory_order_acquire) >= expected) return true;
  }
  return waitSlow(word, expected, awaited, peer);
}

bool HostExec::waitSlow(const uint64_t* word, uint64_t expected, Awaited awaited, int peer) {
  std::atomic_ref<uint64_t> shared(*const_cast<uint64_t*>(word));
  Backoff backoff;
  Deadline deadline = Deadline::in(grid_.guard->patience());
  while (true) {
    // The guard first, the word after it: what a rank wrote before it left still counts.
    int32_t verdict = grid_.guard->check(peer);
    if (verdict == moeSuccess && deadline.passed()) verdict = moeTimeout;
    uint64_t seen = shared.load(std::memory_order_acquire);
    if (seen >= expected) return true;
    if (verdict != moeSuccess) {
      fail(verdict, awaited, verdict == moeTimeout ? peer : grid_.guard->blame(peer), expected, seen);
      return false;
    }
    if (std::atomic_ref<uint32_t>(grid_.failure.claimed).load(std::memory_order_relaxed) != 0) return false;
    backoff.pause();
  }
}

bool HostExec::lastBlock(uint32_t* counter, int blocks) {
  HostGrid::Block& mine = *grid_.blockState[static_cast<size_t>(block_)];
  barrier(true);
  if (warp_ == 0) mine.shared = arrive(counter);
  barrier(true);
  return mine.shared == static_cast<uint32_t>(blocks);
}

void HostExec::fail(int32_t code, Awaited awaited, int peer, uint64_t expected, uint64_t seen) {
  Failure& failure = grid_.failure;
  uint32_t unclaimed = 0;
  if (!std::atomic_ref<uint32_t>(failure.claimed).compare_exchange_strong(unclaimed, 1)) return;
  failure.code = code;
  failure.peer = peer;
  failure.awaited = awaited;
  failure.expected = expected;
  failure.seen = seen;
}

}  // namespace moe
