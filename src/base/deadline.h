// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace moe {

// A point in time that a wait must not pass.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline in(std::chrono::milliseconds span) { return Deadline(Clock::now() + span); }

  bool passed() const { return Clock::now() >= at_; }
  // Never negative; for poll(2) and the like.
  int millisecondsLeft() const {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace moe
