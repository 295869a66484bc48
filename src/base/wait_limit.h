// SPDX-License-Identifier: Apache-2.0
// What bounds every host-side wait: a deadline, and the communicator's abort flag.
#pragma once

#include <atomic>

#include "base/deadline.h"
#include "base/error.h"

namespace moe {

class WaitLimit {
 public:
  // `aborted` may be null; otherwise it must outlive the limit.
  WaitLimit(Deadline deadline, const std::atomic<bool>* aborted = nullptr) : deadline_(deadline), aborted_(aborted) {}

  // Throws moeAborted when the communicator was aborted.
  void throwIfAborted() const {
    if (aborted_ && aborted_->load(std::memory_order_acquire)) {
      fail(moeAborted, "the communicator was aborted while it waited");
    }
  }
  bool passed() const { return deadline_.passed(); }
  int millisecondsLeft() const { return deadline_.millisecondsLeft(); }
  // A part of this wait: ends after `span`, or with the whole if that is sooner.
  WaitLimit within(std::chrono::milliseconds span) const {
    return WaitLimit(Deadline::in(std::min(span, std::chrono::milliseconds(millisecondsLeft()))), aborted_);
  }
  // The longest that one poll(2) may sleep, so that aborts are seen in time.
  int pollMilliseconds() const { return std::min(deadline_.millisecondsLeft(), 20); }

 private:
  Deadline deadline_;
  const std::atomic<bool>* aborted_;
};

}  // namespace moe
