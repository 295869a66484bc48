// SPDX-License-Identifier: Apache-2.0
#include "cold_start.h"

#include <algorithm>
#include <exception>

#include "text.h"

namespace moe::perf {
namespace {

constexpr int64_t kLeastFlushBytes = int64_t{256} << 20;
// How many times what the cache holds: it need not drop the oldest lines first.
constexpr int64_t kCaches = 4;
// CUDA shares smaller allocations between processes together with their neighbours.
constexpr int64_t kWordsBytes = int64_t{2} << 20;
constexpr int kEmptyPairs = 32;

}  // namespace

ColdStart::ColdStart(Team& team, Gpu& gpu)
    : team_(team),
      gpu_(gpu),
      flush_(std::max(kLeastFlushBytes, kCaches * gpu.cacheBytes()), &gpu),
      peers_(team.size() * static_cast<int64_t>(sizeof(uint32_t*)), &gpu),
      late_(sizeof(uint32_t), &gpu),
      words_(static_cast<uint32_t*>(gpu.allocate(kWordsBytes))) {
  // The first write also loads what does the later ones: that would wait for a closed gate.
  gpu.fill(flush_.device(), 0, flush_.bytes());
  gpu.fill(words_, 0, kWordsBytes);
  *late_.hostAs<uint32_t>() = 0;
  late_.push();
  reachAll();
  meeting_ = {team.rank(), team.size(), peers_.deviceAs<uint32_t*>(), words_, late_.deviceAs<uint32_t>()};
}

ColdStart::~ColdStart() {
  if (std::uncaught_exceptions() > 0) {
    // Freeing waits for the GPU. Other ranks may still write to the words, so these stay until the process ends.
    gpu_.openGate();
    return;
  }
  gpu_.release(words_);
}

void ColdStart::reachAll() {
  Offer mine = Offer::make(gpu_, words_);
  std::vector<double> missing;
  for (const auto& words : team_.gather(mine.words())) {
    reached_.emplace_back(gpu_, mine, Offer::of(words));
    size_t rank = reached_.size() - 1;
    peers_.hostAs<uint32_t*>()[rank] = static_cast<uint32_t*>(reached_[rank].get());
    if (!reached_[rank].get()) missing.push_back(static_cast<double>(rank));
  }
  bool all = true;
  for (const auto& rank : team_.gather({static_cast<double>(missing.size())})) all = all && rank[0] == 0;
  if (!missing.empty()) {
    fail("--flush: this rank's GPU cannot reach the memory of rank ", missing[0],
         ", so that they cannot start together; leave out --flush, or use ranks of one host whose GPUs have peer "
         "access");
  }
  if (!all) throw Follower("another rank cannot reach all others");
  peers_.push();
}

void ColdStart::enqueue() {
  gpu_.enqueueFill(flush_.device(), 0, flush_.bytes());
  meet();
}

void ColdStart::requireTogether() {
  late_.fetch();
  if (*late_.hostAs<uint32_t>() == 0) return;
  fail(
      "--flush: before a call, the GPUs of all ranks did not come together within seconds; another rank may have "
      "stopped, or processes share a GPU, which runs them in turn");
}

std::vector<double> ColdStart::emptyPairs() {
  gpu_.reserveMarks(2 * kEmptyPairs);
  team_.barrier();
  gpu_.closeGate();
  for (size_t pair = 0; pair < kEmptyPairs; ++pair) {
    meet();
    gpu_.mark(2 * pair);
    gpu_.mark(2 * pair + 1);
  }
  team_.startTogether();
  gpu_.openGate();
  gpu_.synchronize();
  requireTogether();
  std::vector<double> us;
  for (size_t pair = 0; pair < kEmptyPairs; ++pair) us.push_back(gpu_.microsecondsBetween(2 * pair, 2 * pair + 1));
  return us;
}

}  // namespace moe::perf
