// SPDX-License-Identifier: Apache-2.0
// How the blocks of a low-latency operation begin and end. Nobody waits for all of them at the end: a kernel that is
// over is over for the next one, too. So what an operation changes for the next is changed as soon as all blocks have
// read what they need of it.
#pragma once

#include "device/window_view.h"

namespace moe {

// Blocks come once all their threads have read what the operation begins with. Who sees that all have come may change
// that; so does the block that comes last.
//
// Blocks send before they receive, and wait long only once all have come: the others may need their SM, and peers wait
// for what those send. A share that is not there soon is left to the block that comes last, which takes all of it
// again.
template <class X>
class RollCall {
 public:
  // `team`: this thread's. A thread of the first team speaks for the block, of a warp that has less to send than
  // others.
  template <class Team>
  MOE_PROTOCOL RollCall(X& x, const CommonArgs& common, const Team& team)
      : x_(x),
        common_(common),
        blocks_(static_cast<uint32_t>(common.blocks)),
        speaks_(team.number() == 0 && team.lane() == 0 && team.warp() == (team.warps() > 1 ? team.warps() - 2 : 0)) {}

  // Before anything else: what startedBefore is. All threads, which a barrier must follow.
  MOE_PROTOCOL void begin(uint64_t startedBefore) { before_ = startedBefore; }

  // After a barrier: the block has come. True in the speaking thread of the last one.
  MOE_PROTOCOL bool comesLast() {
    if (!speaks_) return false;
    Control* control = common_.control();
    uint64_t now = x_.addTo(&control->started, 1);
    if (come(now) != blocks_) {
      x_.hurryUntil(&control->started, static_cast<uint32_t>(before_) + blocks_);
      return false;
    }
    sharesLeft_ = (now - before_) / kShareLeft;
    control->startedBefore = now;
    return true;
  }

  // Whether all blocks have come, or do so soon.
  MOE_PROTOCOL bool allCome() const {
    return x_.waitBriefly([&] { return come(x_.peek(&common_.control()->started)) == blocks_; });
  }

  // Whether the block keeps its share, since all have come by now. The speaking thread, after comesLast().
  MOE_PROTOCOL bool stays() const {
    uint64_t* started = &common_.control()->started;
    // Either the last block learns of this when it comes, or it has come by now.
    *left(x_.block()) = 1;
    uint64_t seen = x_.look(started);
    while (come(seen) != blocks_) {
      if (x_.exchange(started, &seen, seen + kShareLeft)) return false;
    }
    *left(x_.block()) = 0;
    return true;
  }

  // Calls receive(share) for the block's own share, and in the last block for those that others have left to it. A
  // share for which it is false, for any thread, was given up, unless there was a failure. All warps of the block;
  // false after a failure.
  template <class Receive>
  MOE_PROTOCOL bool receiveAll(Receive receive) const {
    int share = x_.block(), next = 0, blocks = static_cast<int>(blocks_);
    bool mine = true;
    while (true) {
      bool ok = !mine || receive(share);
      if (x_.barrier(ok && sharesLeft_ == 0)) return true;
      if (!x_.barrier(ok)) {
        if (!x_.barrier(!x_.failed())) return false;
        if (!x_.barrier(!speaks_ || stays())) return true;
        continue;
      }
      if (next == blocks) return true;
      share = next++;
      mine = take(share);
    }
  }

 private:
  // `started` counts blocks that have come, and shares that were left; neither is ever reset.
  static constexpr uint64_t kShareLeft = uint64_t{1} << 32;
  MOE_PROTOCOL uint32_t come(uint64_t started) const { return static_cast<uint32_t>(started - before_); }

  // 1: the block has left its share.
  MOE_PROTOCOL uint32_t* left(int block) const { return Workspace(common_).skipped(block); }

  MOE_PROTOCOL bool take(int block) const {
    bool taken = *static_cast<volatile uint32_t*>(left(block)) != 0;
    if (x_.barrier(!taken)) return false;
    if (speaks_) *left(block) = 0;
    return true;
  }

  X& x_;
  const CommonArgs& common_;
  uint32_t blocks_;
  bool speaks_;
  uint64_t before_ = 0;      // what `started` was before the operation
  uint64_t sharesLeft_ = 0;  // to this block; its speaking thread knows
};

}  // namespace moe
