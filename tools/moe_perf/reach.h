// SPDX-License-Identifier: Apache-2.0
// How a rank's GPU comes to use the memory of another rank's.
#pragma once

#include <utility>
#include <vector>

#include "gpu.h"

namespace moe::perf {

// What a rank tells the others about the memory that they may write to: numbers that a double holds exactly.
struct Offer {
  double host = 0, process = 0, device = 0, location = 0, address = 0;
  GpuMemoryName name{};
  bool named = false;

  static Offer make(Gpu& gpu, void* memory);
  // For Team::gather, and back.
  std::vector<double> words() const;
  static Offer of(const std::vector<double>& words);
  bool sameGpu(const Offer& other) const { return host == other.host && location == other.location; }
};

// The memory that `theirs` offers, until it is left. Nobody may free what others can still reach.
class ReachedMemory {
 public:
  ReachedMemory() = default;
  ReachedMemory(Gpu& gpu, const Offer& mine, const Offer& theirs);
  ReachedMemory(ReachedMemory&& other) noexcept
      : gpu_(other.gpu_),
        memory_(std::exchange(other.memory_, nullptr)),
        foreign_(std::exchange(other.foreign_, nullptr)) {}
  ReachedMemory& operator=(ReachedMemory&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(memory_, other.memory_);
    std::swap(foreign_, other.foreign_);
    return *this;
  }
  ~ReachedMemory() { leave(); }

  // nullptr: it cannot be reached.
  void* get() const { return memory_; }
  void leave();

 private:
  Gpu* gpu_ = nullptr;
  void* memory_ = nullptr;
  void* foreign_ = nullptr;  // the same, if it is another process's
};

}  // namespace moe::perf
