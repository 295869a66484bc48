// SPDX-License-Identifier: Apache-2.0
#include "device/exec_host.h"

#include <sched.h>

#include <chrono>
#include <thread>

#include "base/deadline.h"
#include "moe.h"

namespace moe {
namespace {

constexpr int kSpins = 16;  // looks before a wait yields

#ifdef MOE_MUTANT_RELAXED_SIGNAL
constexpr auto kTagOrder = std::memory_order_relaxed;
#else
constexpr auto kTagOrder = std::memory_order_release;
#endif

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
  for (int spin = 0; spin < kSpins; ++spin) {
    if (has(word, expected)) return true;
  }
  return waitSlow(
      [](const void* opaque, uint64_t wanted, uint64_t* seen) {
        auto* shared = const_cast<uint64_t*>(static_cast<const uint64_t*>(opaque));
        *seen = std::atomic_ref<uint64_t>(*shared).load(std::memory_order_acquire);
        return *seen >= wanted;
      },
      word, expected, awaited, peer);
}

bool HostExec::failed() const {
  return std::atomic_ref<uint32_t>(grid_.failure.claimed).load(std::memory_order_relaxed) != 0;
}

void HostExec::hurryUntil(const uint64_t* word, uint32_t value) {
  HostGrid::Block& mine = *grid_.blockState[static_cast<size_t>(block_)];
  mine.awaitedValue.store(value, std::memory_order_relaxed);
  mine.awaited.store(word, std::memory_order_release);
}

bool HostExec::mayGiveUp() const {
  const HostGrid::Block& mine = *grid_.blockState[static_cast<size_t>(block_)];
  const uint64_t* word = mine.awaited.load(std::memory_order_acquire);
  if (!word) return false;
  auto now =
      static_cast<uint32_t>(std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_relaxed));
  return static_cast<int32_t>(now - mine.awaitedValue.load(std::memory_order_relaxed)) < 0;
}

bool HostExec::waitSlow(Look look, const void* word, uint64_t expected, Awaited awaited, int peer) {
  constexpr auto kHurry = std::chrono::milliseconds(1);
  Backoff backoff;
  Deadline hurry = Deadline::in(kHurry);
  Deadline deadline = Deadline::in(grid_.guard->patience());
  while (true) {
    // The guard first, the word after it: what a rank wrote before it left still counts.
    int32_t verdict = grid_.guard->check(peer);
    if (verdict == moeSuccess && deadline.passed()) verdict = moeTimeout;
    uint64_t seen = 0;
    if (look(word, expected, &seen)) return true;
    if (verdict != moeSuccess) {
      fail(verdict, awaited, verdict == moeTimeout ? peer : grid_.guard->blame(peer), expected, seen);
      return false;
    }
    if (failed() || (hurry.passed() && mayGiveUp())) return false;
    backoff.pause();
  }
}

void HostExec::putTagged(std::byte* word, uint32_t tag, uint32_t a, uint32_t b, uint32_t c) {
  auto* parts = reinterpret_cast<uint32_t*>(word);
  std::atomic_ref<uint32_t>(parts[0]).store(a, std::memory_order_relaxed);
  std::atomic_ref<uint32_t>(parts[1]).store(b, std::memory_order_relaxed);
  std::atomic_ref<uint32_t>(parts[2]).store(c, std::memory_order_relaxed);
  std::atomic_ref<uint32_t>(parts[3]).store(tag, kTagOrder);
}

void HostExec::putUnit(std::byte* row, int64_t unit, uint32_t tag, const Unit& data) {
  for (int w = 0; w < kUnitWords; ++w) {
    const uint32_t* words = data.words + 3 * w;
    putTagged(row + Unit::wordAt(unit, w), tag, words[0], words[1], words[2]);
  }
}

bool HostExec::getTagged(const std::byte* word, uint32_t tag, Awaited awaited, int peer, uint32_t* data) {
  auto* parts = const_cast<uint32_t*>(reinterpret_cast<const uint32_t*>(word));
  auto look = [](const void* opaque, uint64_t expected, uint64_t* seen) {
    auto* shared = const_cast<uint32_t*>(static_cast<const uint32_t*>(opaque));
    uint32_t found = std::atomic_ref<uint32_t>(*shared).load(std::memory_order_acquire);
    *seen = epochOf(found);
    return found == tagOf(expected);
  };
  bool came = false;
  uint64_t seen = 0;
  for (int spin = 0; spin < kSpins && !came; ++spin) came = look(parts + 3, epochOf(tag), &seen);
  if (!came && !waitSlow(look, parts + 3, epochOf(tag), awaited, peer)) return false;
  for (int w = 0; w < 3; ++w) data[w] = std::atomic_ref<uint32_t>(parts[w]).load(std::memory_order_relaxed);
  return true;
}

bool HostExec::getUnit(const std::byte* row, int64_t unit, uint32_t tag, Awaited awaited, int peer, Unit* data) {
  for (int w = 0; w < kUnitWords; ++w) {
    if (!getTagged(row + Unit::wordAt(unit, w), tag, awaited, peer, data->words + 3 * w)) return false;
  }
  return true;
}

namespace {

uint16_t wideElement(const std::byte* row, int64_t at) {
  uint16_t bits;
  std::memcpy(&bits, row + 2 * at, sizeof bits);
  return bits;
}

// Of elements first .. first + kGroup - 1, as far as the row has them.
GroupScale scaleAt(const std::byte* row, int64_t first, int64_t elements, bool powerOfTwo) {
  uint32_t most = 0;
  for (int64_t at = first; at < smaller(elements, first + kGroup); ++at) {
    most = std::max(most, wideElement(row, at) & 0x7fffu);
  }
  return groupScale(most, powerOfTwo);
}

std::byte quantized(const std::byte* row, int64_t at, const GroupScale& scale) {
  return static_cast<std::byte>(Float8e4m3::store(Bfloat16::load({wideElement(row, at)}) * scale.reciprocal));
}

}  // namespace

QuantizedUnit HostExec::loadQuantized(const std::byte* row, int64_t unit, int64_t elements, bool powerOfTwo) {
  QuantizedUnit result{};
  for (int v = 0; v < Unit::kVectors; ++v) {
    int64_t first = Unit::vectorAt(unit, v);
    GroupScale scale = scaleAt(row, first / kGroup * kGroup, elements, powerOfTwo);
    result.scales[v] = scale.scale;
    std::byte vector[Unit::kVectorBytes]{};
    int64_t end = smaller(elements, first + Unit::kVectorBytes);
    for (int64_t at = first; at < end; ++at) vector[at - first] = quantized(row, at, scale);
    std::memcpy(result.data.words + 4 * v, vector, sizeof vector);
  }
  return result;
}

void HostRow::writeQuantized(const QuantizedPiece& piece, std::byte* row) {
  int64_t groups = ceilDiv(piece.elements, kGroup);
  for (int64_t group = 0; group < groups; ++group) {
    int64_t first = group * kGroup;
    GroupScale scale = scaleAt(piece.from, first, piece.elements, piece.ue8m0);
    for (int64_t at = first; at < smaller(piece.elements, first + kGroup); ++at) {
      row[piece.tokens + at] = quantized(piece.from, at, scale);
    }
    std::byte* scales = row + piece.scales;
    if (piece.ue8m0) {
      scales[group] = static_cast<std::byte>(ue8m0Of(scale.scale));
    } else {
      std::memcpy(scales + kScaleWord * group, &scale.scale, sizeof scale.scale);
    }
  }
  for (; piece.ue8m0 && groups % kScaleWord != 0; ++groups) row[piece.scales + groups] = std::byte{0};
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
