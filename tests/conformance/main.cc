// SPDX-License-Identifier: Apache-2.0
// The conformance suite uses moe.h alone. This binary is also what a rank's process runs.
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/rank_process.h"

int main(int argc, char** argv) {
  // Settings are read at the first call of the library. Tests meet on this machine and nowhere else.
  setenv("MOE_SOCKET_IFNAME", "lo", 1);
  // Ranks that are threads may share a GPU. Each needs a hardware queue of its own there, and a kernel that is loaded
  // only when it is first launched would wait for those that run.
  setenv("MOE_ALLOW_SHARED_GPU", "1", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  // Small communicators would all take the low-latency path: the suite runs once for each.
  setenv("MOE_PATH", "1", 0);
  if (auto code = moetest::runAsRank(argc, argv)) return *code;
  testing::InitGoogleTest(&argc, argv);
  int failed = RUN_ALL_TESTS();
  // 77: skipped, when nothing of what was asked for can run on this machine.
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  bool skipped = all.test_to_run_count() > 0 && all.skipped_test_count() == all.test_to_run_count();
  return failed == 0 && skipped ? 77 : failed;
}
