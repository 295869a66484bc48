// SPDX-License-Identifier: Apache-2.0
// The conformance suite uses moe.h alone. This binary is also what a rank's process runs.
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/rank_process.h"

int main(int argc, char** argv) {
  // Settings are read at the first call of the library. Tests meet on this machine and nowhere else.
  setenv("MOE_SOCKET_IFNAME", "lo", 1);
  if (auto code = moetest::runAsRank(argc, argv)) return *code;
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
