// SPDX-License-Identifier: Apache-2.0
// Blocks that come one after the other, as they do where SMs are few: each share is received once, by whoever can wait.
#include "device/low_latency_start.h"

#include <gtest/gtest.h>

#include <vector>

#include "device/exec_host.h"

namespace moe {
namespace {

// Waits for nothing.
class NoGuard final : public WaitGuard {
 public:
  int32_t check(int) override { return moeSuccess; }
  int blame(int peer) override { return peer; }
  std::chrono::milliseconds patience() const override { return std::chrono::milliseconds(1000); }
};

constexpr int kBlocks = 3;

// Blocks of one warp, all of which are this thread's.
class Blocks {
 public:
  Blocks() : grid_(kBlocks, 1, &guard_) {
    moeConfig_t config = MOE_CONFIG_INIT;
    config.maxTokensPerRank = 4, config.hidden = 8, config.numExperts = 2, config.maxTopk = 1;
    config.buffers = 2, config.path = moePathLowLatency;
    common_.layout = makeLayout(config, 1, 0, kBlocks);
    memory_.resize(static_cast<size_t>(common_.layout.workspace.bytes) / sizeof(uint64_t));
    common_.workspace = reinterpret_cast<std::byte*>(memory_.data());
    common_.blocks = kBlocks;
    for (int block = 0; block < kBlocks; ++block) execs_.emplace_back(grid_, block, 0, nullptr);
  }

  // One operation after the other may begin.
  void begin() {
    calls_.clear();
    for (HostExec& exec : execs_) calls_.emplace_back(exec, common_, exec).begin(common_.control()->startedBefore);
  }
  RollCall<HostExec>& operator[](int block) { return calls_[static_cast<size_t>(block)]; }
  HostExec& exec(int block) { return execs_[static_cast<size_t>(block)]; }
  // The shares that a block receives. What it waits for comes at once, or not while other blocks are awaited.
  std::vector<int> sharesOf(int block, bool comes = true) {
    std::vector<int> shares;
    EXPECT_TRUE((*this)[block].receiveAll([&](int share) {
      uint64_t word = comes ? 1 : 0;
      if (!exec(block).wait(&word, 1, Awaited::kRows, 0)) return false;
      shares.push_back(share);
      return true;
    }));
    return shares;
  }

 private:
  NoGuard guard_;
  HostGrid grid_;
  CommonArgs common_{};
  std::vector<uint64_t> memory_;
  std::vector<HostExec> execs_;
  std::vector<RollCall<HostExec>> calls_;
};

using Shares = std::vector<int>;

TEST(RollCall, BlocksThatAllComeReceiveTheirOwnShares) {
  Blocks blocks;
  for (int operation = 0; operation < 3; ++operation) {
    blocks.begin();
    EXPECT_FALSE(blocks[1].comesLast());
    EXPECT_FALSE(blocks[0].comesLast());
    EXPECT_TRUE(blocks[2].comesLast());
    for (int block = 0; block < kBlocks; ++block) EXPECT_EQ(blocks.sharesOf(block), Shares{block});
  }
}

TEST(RollCall, WhatHasComeIsReceivedByWhoeverIsThere) {
  Blocks blocks;
  blocks.begin();
  EXPECT_FALSE(blocks[1].comesLast());
  EXPECT_EQ(blocks.sharesOf(1), Shares{1});
  EXPECT_FALSE(blocks[2].comesLast());
  EXPECT_TRUE(blocks[0].comesLast());
  EXPECT_EQ(blocks.sharesOf(0), Shares{0});
  EXPECT_EQ(blocks.sharesOf(2), Shares{2});
}

TEST(RollCall, WhoCannotWaitLeavesItsShareToTheLastBlock) {
  Blocks blocks;
  for (int operation = 0; operation < 3; ++operation) {
    blocks.begin();
    for (int block : {0, 2}) {
      EXPECT_FALSE(blocks[block].comesLast());
      EXPECT_FALSE(blocks[block].allCome());
      EXPECT_EQ(blocks.sharesOf(block, false), Shares{});
    }
    EXPECT_TRUE(blocks[1].comesLast());
    EXPECT_TRUE(blocks[1].allCome());
    EXPECT_EQ(blocks.sharesOf(1), (Shares{1, 0, 2}));
  }
}

TEST(RollCall, OneBlockMayLeaveAndTheOthersStay) {
  Blocks blocks;
  blocks.begin();
  EXPECT_FALSE(blocks[0].comesLast());
  EXPECT_EQ(blocks.sharesOf(0, false), Shares{});
  EXPECT_FALSE(blocks[2].comesLast());
  EXPECT_TRUE(blocks[1].comesLast());
  EXPECT_EQ(blocks.sharesOf(2), Shares{2});
  EXPECT_EQ(blocks.sharesOf(1), (Shares{1, 0}));
}

TEST(RollCall, AShareThatWasGivenUpTooEarlyIsTakenAgain) {
  Blocks blocks;
  blocks.begin();
  EXPECT_FALSE(blocks[0].comesLast());
  EXPECT_FALSE(blocks[2].comesLast());
  std::vector<int> shares;
  EXPECT_TRUE(blocks[0].receiveAll([&](int share) {
    shares.push_back(share);
    if (shares.size() == 2) return true;
    EXPECT_TRUE(blocks[1].comesLast());
    return false;
  }));
  EXPECT_EQ(shares, (Shares{0, 0}));
  EXPECT_EQ(blocks.sharesOf(1), Shares{1});
}

TEST(RollCall, AFailedShareEndsIt) {
  Blocks blocks;
  blocks.begin();
  for (int block = 0; block < kBlocks; ++block) blocks[block].comesLast();
  EXPECT_FALSE(blocks[1].receiveAll([&](int) {
    blocks.exec(1).fail(moeInternalError, Awaited::kValidCounts, 0, 0, 0);
    return false;
  }));
}

}  // namespace
}  // namespace moe
