// SPDX-License-Identifier: Apache-2.0
#include "gpu_limit.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "machine.h"
#include "text.h"

namespace moe::perf {
namespace {

constexpr int64_t kCopyBytes = int64_t{256} << 20;
constexpr int kCopyRuns = 9;

// What a rank tells the others about the memory that they may write to: numbers that a double holds exactly.
struct Offer {
  double host = 0, process = 0, device = 0, location = 0, address = 0;
  GpuMemoryName name{};
  bool named = false;

  std::vector<double> words() const {
    std::vector<double> all{host, process, device, location, address, named ? 1.0 : 0.0};
    all.insert(all.end(), name.begin(), name.end());
    return all;
  }
  static Offer of(const std::vector<double>& words) {
    Offer offer{words[0], words[1], words[2], words[3], words[4], {}, words[5] != 0};
    for (size_t i = 0; i < offer.name.size(); ++i) offer.name[i] = static_cast<uint32_t>(words[6 + i]);
    return offer;
  }
};

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

  // Nobody frees what others can still reach: all leave first.
  void leave() {
    if (foreign_) gpu_.leave(std::exchange(foreign_, nullptr));
    next_ = nullptr;
  }

  bool severalGpus() const { return severalGpus_; }
  bool between() const { return next_ != nullptr; }

  double secondsOfSlowest() {
    team_.barrier();
    gpu_.closeGate();
    gpu_.mark(0);
    gpu_.copyAcross(next_ ? next_ : target_, source_, kCopyBytes);
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
    Offer mine;
    mine.host = hostNumber();
    mine.process = getpid();
    mine.device = gpu_.device();
    mine.location = static_cast<double>(gpu_.location());
    mine.address = static_cast<double>(reinterpret_cast<uintptr_t>(target_));
    mine.named = gpu_.nameMemory(target_, &mine.name);
    auto offers = team_.gather(mine.words());
    for (const auto& words : offers) {
      Offer offer = Offer::of(words);
      severalGpus_ = severalGpus_ || offer.host != mine.host || offer.location != mine.location;
    }
    Offer theirs = Offer::of(offers[static_cast<size_t>((team_.rank() + 1) % team_.size())]);
    bool sameProcess = theirs.host == mine.host && theirs.process == mine.process;
    void* next = nullptr;
    if (sameProcess && gpu_.reachDevice(static_cast<int>(theirs.device))) {
      next = reinterpret_cast<void*>(static_cast<uintptr_t>(theirs.address));
    } else if (!sameProcess && theirs.host == mine.host && theirs.named) {
      next = foreign_ = gpu_.reachMemory(theirs.name);
    }
    bool all = severalGpus_;
    for (const auto& rank : team_.gather({next ? 1.0 : 0.0})) all = all && rank[0] != 0;
    if (all) next_ = next;
  }

  Team& team_;
  Gpu& gpu_;
  void* source_ = nullptr;
  void* target_ = nullptr;
  void* foreign_ = nullptr;  // the next rank's, of another process
  void* next_ = nullptr;
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
