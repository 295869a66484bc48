// SPDX-License-Identifier: Apache-2.0
// Very many calls: nothing grows, and no timing changes a result.
#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "conformance/cases.h"
#include "conformance/on_backend.h"
#include "conformance/simple_call.h"
#include "conformance/world.h"

namespace moetest {
namespace {

// Sanitizers keep freed memory for a while, so that there growth says nothing.
int64_t residentBytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 0;
#endif
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int openDescriptors() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (directory && readdir(directory)) ++count;
  if (directory) closedir(directory);
  return count;
}

// The distinct ranks of token t's experts are r, r + 1, ... as in SimpleCall, whatever the number of tokens.
void changingSizes(int calls, bool stalls, const Backend& backend) {
  moeConfig_t config = simpleConfig(96, 8, 8, 3);
  config.timeoutMs = 60000;
  LocalComms comms(4, config, backend);
  ASSERT_TRUE(comms.ok()) << comms.error();
  std::vector<std::unique_ptr<SimpleCall>> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.push_back(std::make_unique<SimpleCall>(comms[rank], config, rank, 4, backend));
  }
  std::string wrong[4];
  auto run = [&](int first, int count) {
    runThreads(4, [&](int rank) {
      SimpleCall& call = *ranks[static_cast<size_t>(rank)];
      Random random(static_cast<uint64_t>(first * 4 + rank));
      for (int round = first; round < first + count && wrong[rank].empty(); ++round) {
        call.reset(round);
        call.dispatch.numTokens = random.oneIn(10) ? 0 : random.oneIn(4) ? 96 : random.between(1, 12);
        if (stalls && random.oneIn(3)) usleep(static_cast<useconds_t>(random.between(1, 400)));
        moeResult_t result = call.runDispatch();
        if (stalls && random.oneIn(3)) usleep(static_cast<useconds_t>(random.between(1, 400)));
        if (result == moeSuccess) result = call.runCombine();
        if (result != moeSuccess) wrong[rank] = moeGetLastError();
        if (wrong[rank].empty()) wrong[rank] = call.wrongOutput(call.dispatch.numTokens);
      }
    });
  };
  run(0, calls / 10);
  int64_t resident = residentBytes();
  int descriptors = openDescriptors();
  run(calls / 10, calls - calls / 10);
  for (const std::string& text : wrong) EXPECT_EQ(text, "");
  // The allocator may keep a little more for the threads' stacks and tables, and a driver what it likes.
  if (!backend.asynchronous()) {
    EXPECT_LT(residentBytes() - resident, 2 << 20);
  }
  EXPECT_LE(openDescriptors(), descriptors);
}

TEST(Endurance, TenThousandCallsOfChangingSize) { changingSizes(10000, false, hostBackend()); }

TEST(Endurance, StallsChangeNothing) { changingSizes(1500, true, hostBackend()); }

TEST(Endurance, StallsChangeNothing_long) { changingSizes(40000, true, hostBackend()); }

// Communicators come and go; nothing stays behind.
void makeAndDestroy(int times, const Backend& backend) {
  moeConfig_t config = simpleConfig(4, 16, 8, 2);
  int64_t resident = 0;
  int descriptors = 0;
  for (int i = 0; i < times; ++i) {
    if (i == times / 4) {
      resident = residentBytes();
      descriptors = openDescriptors();
    }
    LocalComms comms(3, config, backend);
    ASSERT_TRUE(comms.ok()) << comms.error();
    std::vector<std::unique_ptr<SimpleCall>> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.push_back(std::make_unique<SimpleCall>(comms[rank], config, rank, 3, backend));
    }
    runThreads(3, [&](int rank) { EXPECT_EQ(ranks[static_cast<size_t>(rank)]->runBoth(i), ""); });
  }
  if (!backend.asynchronous()) {
    EXPECT_LT(residentBytes() - resident, 2 << 20);
  }
  EXPECT_LE(openDescriptors(), descriptors);
}

TEST(Endurance, CommunicatorsLeaveNothingBehind) { makeAndDestroy(200, hostBackend()); }

TEST(Endurance, CommunicatorsLeaveNothingBehind_long) { makeAndDestroy(3000, hostBackend()); }

// The same on GPUs, with fewer calls.
class GpuEndurance : public OnBackend<const Backend*> {};

TEST_P(GpuEndurance, CallsOfChangingSize) { changingSizes(600, false, *GetParam()); }

TEST_P(GpuEndurance, StallsChangeNothing) { changingSizes(400, true, *GetParam()); }

TEST_P(GpuEndurance, StallsChangeNothing_long) { changingSizes(5000, true, *GetParam()); }

TEST_P(GpuEndurance, CommunicatorsLeaveNothingBehind) { makeAndDestroy(20, *GetParam()); }

INSTANTIATE_TEST_SUITE_P(Gpu, GpuEndurance, testing::ValuesIn(cudaBackends()), backendName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuEndurance);

}  // namespace
}  // namespace moetest
