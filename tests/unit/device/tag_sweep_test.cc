// SPDX-License-Identifier: Apache-2.0
// Tags come again after 2^31 epochs. A communicator of one rank is moved to shortly before it sweeps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "device/host_backend.h"
#include "device/low_latency_window.h"

namespace moe {
namespace {

constexpr uint64_t kSweep = uint64_t{1} << 30;
constexpr int64_t kHidden = 16, kTokens = 3;

// Waits for nothing: everything comes from this rank itself.
class Impatient final : public WaitGuard {
 public:
  int32_t check(int) override { return moeSuccess; }
  int blame(int peer) override { return peer; }
  std::chrono::milliseconds patience() const override { return std::chrono::milliseconds(1000); }
};

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, Freed>;

Memory zeros(int64_t bytes) {
  auto size = static_cast<size_t>(roundUp(bytes, 4096));
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(4096, size)));
  std::memset(memory.get(), 0, size);
  return memory;
}

class OneRank {
 public:
  explicit OneRank(uint64_t epochsBefore)
      : layout_(shape()),
        backend_(makeHostBackend(layout_, 1, 1, &guard_)),
        window_(zeros(layout_.window.bytes)),
        handle_(zeros(layout_.handle.bytes)),
        tokens_(kTokens * kHidden, 1.5f),
        rows_(static_cast<size_t>(layout_.shape.rowCapacity * kHidden)),
        sums_(kTokens * kHidden) {
    common_.layout = layout_;
    common_.windows = {{window_.get()}, backend_->publish({window_.get()})};
    common_.workspace = backend_->allocate(static_cast<size_t>(layout_.workspace.bytes));
    common_.handle = handle_.get();
    *common_.control() = {};
    common_.control()->dispatchEpoch = common_.control()->combineEpoch = epochsBefore;
    common_.control()->releasedDispatch = epochsBefore;
    *consumedDispatch(layout_, window_.get(), 0) = *consumedCombine(layout_, window_.get(), 0) = epochsBefore;
    // What old epochs have left: words that no token of this test is in.
    std::ranges::fill(dispatchWords(), std::byte{0x5a});
    std::ranges::fill(combineWords(), std::byte{0x5a});
  }

  void dispatch() {
    static const std::vector<int32_t> ids(kTokens, 0);
    DispatchArgs args{};
    args.common = common_;
    args.phases = kPhaseBoth;
    args.numTokens = kTokens, args.topk = 1, args.ids = ids.data();
    args.inputs[0] = {reinterpret_cast<const std::byte*>(tokens_.data()), 4 * kHidden};
    args.outputs[0] = {reinterpret_cast<std::byte*>(rows_.data()), 4 * kHidden};
    args.capacity = layout_.shape.rowCapacity;
    EXPECT_TRUE(backend_->dispatch(args, nullptr).ok);
    EXPECT_TRUE(std::equal(tokens_.begin(), tokens_.end(), rows_.begin()));
  }
  void combine() {
    CombineArgs args{};
    args.common = common_;
    args.rows = {reinterpret_cast<const std::byte*>(rows_.data()), 4 * kHidden};
    args.output = {reinterpret_cast<std::byte*>(sums_.data()), 4 * kHidden};
    EXPECT_TRUE(backend_->combine(args, nullptr).ok);
    EXPECT_EQ(sums_, tokens_);
  }

  // Of the buffer that the next operation uses, or the last one has used.
  std::vector<std::byte>::difference_type untouched(bool dispatch) {
    auto words = dispatch ? dispatchWords() : combineWords();
    return std::ranges::count(words, std::byte{0});
  }
  std::span<std::byte> dispatchWords() {
    SlotWindow window(layout_, window_.get(), Epoch(kSweep + 1, layout_.shape));
    return {window.words(), static_cast<size_t>(window.wordBytes())};
  }
  std::span<std::byte> combineWords() {
    PartialWindow window(layout_, window_.get(), Epoch(kSweep + 1, layout_.shape));
    return {window.words(), static_cast<size_t>(window.wordBytes())};
  }

 private:
  static Layout shape() {
    moeConfig_t config = MOE_CONFIG_INIT;
    config.maxTokensPerRank = 8, config.hidden = kHidden, config.numExperts = 2, config.maxTopk = 1;
    config.dtype = config.combineDtype = moeFloat32, config.layout = moeLayoutExpert, config.buffers = 2;
    config.path = moePathLowLatency;
    return makeLayout(config, 1, 0, 1);
  }

  Impatient guard_;
  Layout layout_;
  std::unique_ptr<Backend> backend_;
  Memory window_, handle_;
  CommonArgs common_{};
  std::vector<float> tokens_, rows_, sums_;
};

TEST(TagSweep, EveryWordOfTheBufferIsUntouchedAfterIt) {
  OneRank rank(kSweep);  // the next epoch is the second that sweeps
  rank.dispatch();
  EXPECT_EQ(rank.untouched(true), std::ssize(rank.dispatchWords()));
  rank.combine();
  EXPECT_EQ(rank.untouched(false), std::ssize(rank.combineWords()));
}

// The same buffer one turn later, and the first epoch of all.
TEST(TagSweep, OtherEpochsLeaveOldWordsAlone) {
  for (uint64_t before : {kSweep + 2, uint64_t{0}}) {
    OneRank rank(before);
    rank.dispatch();
    EXPECT_LT(rank.untouched(true), std::ssize(rank.dispatchWords()) / 2) << before << " epochs before";
    rank.combine();
    EXPECT_LT(rank.untouched(false), std::ssize(rank.combineWords()) / 2) << before << " epochs before";
  }
}

}  // namespace
}  // namespace moe
