// SPDX-License-Identifier: Apache-2.0
// CudaExec: blocks, waits and failures.
#pragma once

#include "device/exec_cuda.cuh"

namespace moe {

// See hurryUntil; for all threads of the block.
struct Hurry {
  const uint64_t* word;
  uint32_t value;
};
__device__ __forceinline__ volatile Hurry& hurry() {
  __shared__ Hurry shared;
  return shared;
}

__device__ inline void CudaExec::hurryUntil(const uint64_t* word, uint32_t value) {
  hurry().value = value;
  __threadfence_block();
  hurry().word = word;
}

// Whether a wait that has lasted a while is given up.
__device__ __noinline__ inline bool mayGiveUp() {
  const uint64_t* word = hurry().word;
  if (!word) return false;
  __threadfence_block();
  auto now = static_cast<uint32_t>(ptx::loadRelaxedGpu(word));
  return static_cast<int32_t>(now - hurry().value) < 0;
}

// Blocks number themselves in the order in which they start, so that one which waits for a lower number waits for a
// block that runs or has run. After a failure they get no number.
__device__ inline CudaExec::CudaExec(const CudaGrid& grid, Control* control, std::byte* shared) : grid_(grid) {
  __shared__ int ticket;
  if (threadIdx.x == 0) {
    uint32_t failed = ptx::loadRelaxedGpu(grid.failed);
    int started = static_cast<int>(atomicAdd(&control->ticket, 1));
    ticket = failed ? -1 : started;
    hurry().word = nullptr;
  }
  shared_ = shared;
  std::byte* items = shared + grid.itemsAt;
  items_ = items + warp() * bareWarpBytes(grid);
  barriers_ = reinterpret_cast<uint64_t*>(items_ + itemsBytes(grid));
#if __CUDA_ARCH__ >= 900
  if (warp() < grid.warps && lane() < kMaxStages) ptx::barrierInit(barriers_ + lane());
  ptx::barrierInitFence();
  ptx::fenceProxyShared();
#endif
  __syncthreads();
  block_ = ticket;
}

__device__ inline CudaExec::CudaExec(const CudaGrid& grid, std::byte* shared)
    : grid_(grid), block_(static_cast<int>(blockIdx.x)), shared_(shared) {
  // Whoever waits before the first barrier waits for long only if this is seen.
  if (threadIdx.x == 0) {
    hurry().word = nullptr;
    failed_ = ptx::loadRelaxedGpu(grid.failed);
  }
}

__device__ inline bool CudaExec::lastBlock(uint32_t* counter, int blocks) {
  __shared__ uint32_t arrived;
  __syncthreads();
  if (threadIdx.x == 0) arrived = arrive(counter);
  __syncthreads();
  return arrived == static_cast<uint32_t>(blocks);
}

// How long a block waits for others of its kernel to get an SM, before it goes on without them.
constexpr uint64_t kStartNs = 20000;

template <class Done>
__device__ __forceinline__ bool CudaExec::waitBriefly(Done done) const {
  uint64_t start = ptx::globalTimerNs();
  while (!done()) {
    if (ptx::globalTimerNs() - start > kStartNs) return false;
  }
  return true;
}

// moeSuccess, or why waiting for `peer` is in vain. Reads pinned memory: only now and then.
__device__ inline int32_t verdict(const CudaGrid& grid, int peer, int* culprit) {
  if (ptx::loadRelaxedSys(&grid.notices->aborted)) {
    *culprit = grid.rank;
    return moeAborted;
  }
  const auto* states = reinterpret_cast<const volatile unsigned char*>(grid.notices + 1);
  auto stateOf = [&](int rank) { return states[rank]; };
  if (stateOf(peer) != static_cast<unsigned char>(PeerState::kAlive)) return moeRankLost;
  if (!ptx::loadRelaxedSys(&grid.notices->lost)) return moeSuccess;
  for (int rank = 0; rank < grid.nranks; ++rank) {
    if (stateOf(rank) > stateOf(*culprit)) *culprit = rank;
  }
  return moeRankLost;
}

__device__ __noinline__ inline void reportFailure(const CudaGrid& grid, int32_t code, Awaited awaited, int peer,
                                                  uint64_t expected, uint64_t seen) {
  if (atomicExch(grid.failed, 1u) != 0) return;
  volatile Failure* failure = grid.failure;
  failure->code = code;
  failure->peer = peer;
  failure->awaited = awaited;
  failure->expected = expected;
  failure->seen = seen;
  __threadfence_system();
  failure->claimed = 1;
}

// How long polls pause: thousands of warps may wait, and polling at full speed takes the memory system from those that
// work.
struct PollPause {
  static constexpr int kEager = 4, kShort = 40;
  static constexpr unsigned kShortNs = 100, kLongNs = 1000;

  __device__ static void after(int polls) {
    if (polls >= kEager) __nanosleep(polls < kShort ? kShortNs : kLongNs);
  }
};
constexpr int kPollsPerLook = 512;
constexpr int kPollsPerHurry = 64;  // some 20 us

// Whether waiting for a word that polls have not seen is over: true if its value has come after all, or after a
// failure, which is reported.
__device__ __noinline__ inline bool waitIsOver(const CudaGrid& grid, const uint64_t* word, uint64_t expected,
                                               Awaited awaited, int peer, uint64_t start) {
  if (ptx::loadRelaxedGpu(grid.failed)) return true;
  int culprit = peer;
  int32_t code = verdict(grid, peer, &culprit);
  if (code == moeSuccess && ptx::globalTimerNs() - start > grid.timeoutNs) code = moeTimeout;
  if (code == moeSuccess) return false;
  // What a rank wrote before it left still counts.
  uint64_t seen = ptx::loadAcquireSys(word);
  if (seen < expected) reportFailure(grid, code, awaited, culprit, expected, seen);
  return true;
}

// Polls without acquiring, since that empties the first-level cache. Neither this nor reportFailure is a member: an
// Exec whose address is passed to a real function would live in memory, not in registers.
__device__ __noinline__ inline bool pollUntil(const CudaGrid& grid, const uint64_t* word, uint64_t expected,
                                              Awaited awaited, int peer) {
  uint64_t start = ptx::globalTimerNs();
  while (true) {
#pragma unroll 1
    for (int polls = 0; polls < kPollsPerLook; ++polls) {
      if (ptx::loadRelaxedSys(word) >= expected) return true;
      PollPause::after(polls);
      if (polls % kPollsPerHurry == kPollsPerHurry - 1 && mayGiveUp()) return false;
    }
    if (waitIsOver(grid, word, expected, awaited, peer, start)) return ptx::loadAcquireSys(word) >= expected;
  }
}

// As pollUntil, for the words of a warp's lanes. Nothing is acquired: who signals next has a fence of its own.
__device__ __noinline__ inline bool pollUntilAny(const CudaGrid& grid, const uint64_t* word, uint64_t expected,
                                                 Awaited awaited, int peer, bool* came) {
  uint64_t start = ptx::globalTimerNs();
  while (true) {
#pragma unroll 1
    for (int polls = 0; polls < kPollsPerLook; ++polls) {
      *came = word && ptx::loadRelaxedSys(word) >= expected;
      if (__any_sync(~0u, *came)) return true;
      if (polls >= PollPause::kEager) __nanosleep(PollPause::kShortNs);
    }
    bool first = static_cast<unsigned>(__ffs(__ballot_sync(~0u, word != nullptr)) - 1) == threadIdx.x % 32;
    bool over = first && waitIsOver(grid, word, expected, awaited, peer, start);
    bool failed = over && ptx::loadAcquireSys(word) < expected;
    if (__any_sync(~0u, failed)) return false;
  }
}

__device__ inline bool CudaExec::has(const uint64_t* word, uint64_t value) const {
  if (ptx::loadAcquireSys(word) < value) return false;
  // What the word announces may be read or written by the copy engine next.
  ptx::fenceProxyGlobal();
  return true;
}

__device__ inline bool CudaExec::wait(const uint64_t* word, uint64_t expected, Awaited awaited, int peer) {
  while (!has(word, expected)) {
    if (!pollUntil(grid_, word, expected, awaited, peer)) return false;
  }
  return true;
}

__device__ inline bool CudaExec::waitAny(const uint64_t* word, uint64_t expected, Awaited awaited, int peer,
                                         bool* came) {
  return pollUntilAny(grid_, word, expected, awaited, peer, came);
}

__device__ inline void CudaExec::fail(int32_t code, Awaited awaited, int peer, uint64_t expected, uint64_t seen) {
  reportFailure(grid_, code, awaited, peer, expected, seen);
}

}  // namespace moe
