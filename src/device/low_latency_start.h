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
// Blocks send before they receive, and do not receive while others have not come: those may need their SM, and peers
// wait for what they send. What such a block would have received is left to the last one that comes.
template <class X>
class RollCall {
 public:
  MOE_PROTOCOL RollCall(X& x, const CommonArgs& common)
      : x_(x),
        control_(common.control()),
        left_(Workspace(common).skipped(0)),
        blocks_(static_cast<uint32_t>(common.blocks)),
        before_(control_->startedBefore) {}

  // The thread that speaks for the block. One of the last, which have less to send than others.
  MOE_PROTOCOL bool speaks() const { return x_.thread() == x_.threads() - 1; }

  // After a barrier: the block has come. True in the speaking thread of the last one.
  MOE_PROTOCOL bool comesLast() {
    if (!speaks()) return false;
    uint64_t now = x_.addTo(&control_->started, 1);
    if (come(now) != blocks_) return false;
    sharesLeft_ = (now - before_) / kShareLeft;
    control_->startedBefore = now;
    return true;
  }

  // Whether the block receives its share. The speaking thread, after comesLast().
  MOE_PROTOCOL bool stays() const {
    bool all = x_.waitBriefly([&] { return come(x_.peek(&control_->started)) == blocks_; });
    if (all) return come(x_.look(&control_->started)) == blocks_;
    // Either the last block learns of this when it comes, or it has come by now.
    left_[x_.block()] = 1;
    uint64_t seen = x_.look(&control_->started);
    while (come(seen) != blocks_) {
      if (x_.exchange(&control_->started, &seen, seen + kShareLeft)) return false;
    }
    left_[x_.block()] = 0;
    return true;
  }

  // Calls receive(share) for the block's own share, if it `stays`, and in the last block for those that others have
  // left to it. All warps of the block; false once receive() is, for any thread.
  template <class Receive>
  MOE_PROTOCOL bool receiveAll(bool stays, Receive receive) const {
    int share = x_.block(), next = 0, blocks = static_cast<int>(blocks_);
    bool mine = stays;
    while (true) {
      bool ok = !mine || receive(share);
      if (x_.barrier(ok && sharesLeft_ == 0)) return true;
      if (!x_.barrier(ok)) return false;
      if (next == blocks) return true;
      share = next++;
      mine = take(share);
    }
  }

 private:
  // `started` counts blocks that have come, and shares that were left; neither is ever reset.
  static constexpr uint64_t kShareLeft = uint64_t{1} << 32;
  MOE_PROTOCOL uint32_t come(uint64_t started) const { return static_cast<uint32_t>(started - before_); }

  MOE_PROTOCOL bool take(int block) const {
    bool taken = static_cast<volatile uint32_t*>(left_)[block] != 0;
    if (x_.barrier(!taken)) return false;
    if (speaks()) left_[block] = 0;
    return true;
  }

  X& x_;
  Control* control_;
  uint32_t* left_;  // [blocks] 1: the block has left its share
  uint32_t blocks_;
  uint64_t before_;          // what `started` was before the operation
  uint64_t sharesLeft_ = 0;  // to this block; its speaking thread knows
};

}  // namespace moe
