// SPDX-License-Identifier: Apache-2.0
// Several communicators over the same threads: disjoint, overlapping, used at once, many.
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "conformance/cases.h"
#include "conformance/simple_call.h"
#include "conformance/world.h"

namespace moetest {
namespace {

struct Seat {
  int comm;
  int rank;
};

// Eight threads, four groups of two and two groups of four, made in another order on every other thread.
TEST(SeveralComms, DisjointGroupsAtOnce) {
  moeConfig_t config = simpleConfig(5, 24, 8, 2);
  config.timeoutMs = 30000;
  moeUniqueId_t ids[6];
  for (moeUniqueId_t& id : ids) ASSERT_EQ(moeGetUniqueId(&id), moeSuccess) << moeGetLastError();
  std::string wrong[8];
  runThreads(8, [&](int thread) {
    // Groups 0-3 are pairs, 4 and 5 quads. Every thread sits in one of each.
    Seat pair{thread / 2, thread % 2}, quad{4 + thread / 4, thread % 4};
    moeComm_t comms[2] = {nullptr, nullptr};
    auto init = [&](int which) {
      const Seat& seat = which ? quad : pair;
      int nranks = which ? 4 : 2;
      if (moeCommInit(&comms[which], nranks, &ids[seat.comm], seat.rank, &config) != moeSuccess) {
        wrong[thread] = moeGetLastError();
      }
    };
    // The order is the same in each pair, and differs between the pairs of a quad.
    init(pair.comm % 2);
    init(1 - pair.comm % 2);
    if (wrong[thread].empty()) {
      SimpleCall small(comms[0], config, pair.rank, 2), large(comms[1], config, quad.rank, 4);
      for (int round = 0; round < 60 && wrong[thread].empty(); ++round) {
        wrong[thread] = small.runBoth(round);
        if (wrong[thread].empty()) wrong[thread] = large.runBoth(round + 1);
      }
    }
    for (moeComm_t comm : comms) moeCommDestroy(comm);
  });
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
}

// Two communicators of the same four ranks, each driven by threads of its own, at whatever times they run.
TEST(ThreadRanksSeveralComms, TwoOverTheSameRanks) {
  moeConfig_t config = simpleConfig(6, 32, 8, 2);
  config.timeoutMs = 30000;
  LocalComms first(4, config), second(4, config);
  ASSERT_TRUE(first.ok() && second.ok());
  std::string wrong[8];
  runThreads(8, [&](int thread) {
    SimpleCall call(thread < 4 ? first[thread] : second[thread - 4], config, thread % 4, 4);
    for (int round = 0; round < 60 && wrong[thread].empty(); ++round) wrong[thread] = call.runBoth(thread / 4 + round);
  });
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
}

// One thread per rank, and ranks that use the communicators in different order: send halves do not wait for peers.
TEST(ThreadRanksSeveralComms, HalvesInAnyOrder) {
  moeConfig_t config = simpleConfig(6, 32, 8, 2);
  LocalComms first(4, config), second(4, config);
  ASSERT_TRUE(first.ok() && second.ok());
  std::string wrong[4];
  runThreads(4, [&](int rank) {
    SimpleCall a(first[rank], config, rank, 4), b(second[rank], config, rank, 4);
    for (int round = 0; round < 40 && wrong[rank].empty(); ++round) {
      SimpleCall* order[2] = {&a, &b};
      if ((rank + round) % 2) std::swap(order[0], order[1]);
      for (SimpleCall* call : order) {
        call->reset(round);
        call->dispatch.flags = MOE_SEND_HALF;
        if (call->runDispatch() != moeSuccess) wrong[rank] = moeGetLastError();
      }
      for (SimpleCall* call : {&a, &b}) {
        if (moeWait(call->comm, call->handle.get(), &call->receive, nullptr) != moeSuccess) {
          wrong[rank] = moeGetLastError();
        }
        if (call->runCombine() != moeSuccess) wrong[rank] = moeGetLastError();
        if (wrong[rank].empty()) wrong[rank] = call->wrongOutput();
      }
    }
  });
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
}

TEST(ThreadRanksSeveralComms, SixtyFourInOneProcess) {
  moeConfig_t config = simpleConfig(2, 8, 4, 2);
  std::vector<LocalComms> comms;
  for (int i = 0; i < 64; ++i) {
    comms.emplace_back(2, config);
    ASSERT_TRUE(comms.back().ok()) << "communicator " << i << ": " << comms.back().error();
  }
  std::string wrong[2];
  runThreads(2, [&](int rank) {
    for (LocalComms& both : comms) {
      SimpleCall call(both[rank], config, rank, 2);
      if (wrong[rank].empty()) wrong[rank] = call.runBoth();
    }
  });
  EXPECT_EQ(wrong[0] + wrong[1], "");
}

// Ten times the same data give ten times the same bits, rows and sums.
TEST(ThreadRanksSeveralComms, SameInputsSameBits) {
  Plan plan("same_bits", 4, 24, 40, 12, 4);
  plan.config.layout = moeLayoutExpert;
  Scenario once = toScenario(plan);
  Scenario scenario = once;
  scenario.name = "same_bits";
  scenario.call = [once](int) { return once.call(0); };
  scenario.steps.clear();
  for (int call = 0; call < 10; ++call) {
    scenario.steps.push_back({Step::kDispatch, 0});
    scenario.steps.push_back({Step::kCombine, 0});
  }
  EXPECT_EQ(runScenario(scenario, Way::kCallbacks, hostBackend()), "");
}

}  // namespace
}  // namespace moetest
