// SPDX-License-Identifier: Apache-2.0
#include "gpu_limit.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "reach.h"
#include "text.h"

namespace moe::perf {
namespace {

constexpr int64_t kCopyBytes = int64_t{256} << 20;
constexpr int kCopyRuns = 9;

// The memory of one measurement, and the way to the next rank's.
class CopyPair {
 public:
  CopyPair(Team& team, Gpu& gpu) : team_(team), gpu_(gpu) {
    source_ = gpu.allocate(kCopyBytes);
    target_ = gpu.allocate(kCopyBytes);
    gpu.fill(source_, 1, kCopyBytes);
    gpu.fill(target_, 2, kCopyBytes);
    reachNext();
  }

  ~CopyPair() {
    leave();
    gpu_.release(source_);
    gpu_.release(target_);
  }
  CopyPair(const CopyPair&) = delete;
  CopyPair& operator=(const CopyPair&) = delete;

  // All do so before anybody's memory is freed.
  void leave() { next_.leave(); }

  bool severalGpus() const { return severalGpus_; }
  bool between() const { return next_.get() != nullptr; }

  double secondsOfSlowest() {
    team_.barrier();
    gpu_.closeGate();
    gpu_.mark(0);
    gpu_.copyAcross(between() ? next_.get() : target_, source_, kCopyBytes);
    gpu_.mark(1);
    team_.startTogether();
    gpu_.openGate();
    gpu_.synchronize();
    double slowest = 0;
    for (const auto& rank : team_.gather({gpu_.microsecondsBetween(0, 1)})) slowest = std::max(slowest, rank[0]);
    return slowest / 1e6;
  }

 private:
  // Sets next_ if every rank can write to the rank after it.
  void reachNext() {
    Offer mine = Offer::make(gpu_, target_);
    auto offers = team_.gather(mine.words());
    for (const auto& words : offers) severalGpus_ = severalGpus_ || !Offer::of(words).sameGpu(mine);
    ReachedMemory next(gpu_, mine, Offer::of(offers[static_cast<size_t>((team_.rank() + 1) % team_.size())]));
    bool all = severalGpus_;
    for (const auto& rank : team_.gather({next.get() ? 1.0 : 0.0})) all = all && rank[0] != 0;
    if (all) next_ = std::move(next);
  }

  Team& team_;
  Gpu& gpu_;
  void* source_ = nullptr;
  void* target_ = nullptr;
  ReachedMemory next_;
  bool severalGpus_ = false;
};

}  // namespace

GpuLimit measureGpuLimit(Team& team, Gpu& gpu) {
  gpu.reserveMarks(2);
  GpuLimit limit;
  std::vector<double> speeds;
  {
    CopyPair pair(team, gpu);
    for (int run = 0; run < kCopyRuns; ++run) {
      double seconds = pair.secondsOfSlowest();
      if (run > 0 && seconds > 0) speeds.push_back(static_cast<double>(kCopyBytes) / seconds / 1e9);
    }
    limit.between = pair.between();
    limit.text = cat("a kernel on each GPU copies ", kCopyBytes >> 20, " MiB ",
                     pair.between() ? "into the next rank's GPU, all at once, GB/s each way"
                                    : "within the GPU's own memory, all at once",
                     ", median of ", kCopyRuns - 1);
    if (pair.severalGpus() && !pair.between()) limit.text += " (the ranks cannot reach each other's GPU memory)";
    pair.leave();
    team.barrier();
  }
  team.barrier();
  if (speeds.empty()) return limit;
  auto middle = speeds.begin() + std::ssize(speeds) / 2;
  std::nth_element(speeds.begin(), middle, speeds.end());
  limit.gbs = *middle;
  return limit;
}

}  // namespace moe::perf
