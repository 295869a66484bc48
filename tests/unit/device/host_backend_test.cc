// SPDX-License-Identifier: Apache-2.0
#include "device/host_backend.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace moe {
namespace {

// Ends every wait.
class NoPatience final : public WaitGuard {
 public:
  int32_t check(int) override { return moeAborted; }
  int blame(int peer) override { return peer; }
  std::chrono::milliseconds patience() const override { return std::chrono::milliseconds(0); }
};

Layout layoutFor(int32_t topk, int32_t layout, int32_t sideRows) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = 16, config.hidden = 7, config.numExperts = 5 * topk, config.maxTopk = topk;
  config.layout = layout, config.capacity = layout == moeLayoutExpertPadded ? 4 : 0;
  config.numSideRows = sideRows, config.buffers = 2;
  for (int side = 0; side < sideRows; ++side) config.sideRowBytes[side] = 1 + 33 * side;
  return makeLayout(config, 2 * topk, 0, 1);
}

TEST(HostBackend, EveryLegalShapesItemsFit) {
  NoPatience guard;
  for (int32_t topk = 1; topk <= MOE_MAX_TOPK; ++topk) {
    for (int32_t layout : {moeLayoutRank, moeLayoutExpert, moeLayoutExpertPadded}) {
      for (int32_t sideRows : {0, MOE_MAX_SIDE_ROWS}) {
        EXPECT_NO_THROW(makeHostBackend(layoutFor(topk, layout, sideRows), 1, 1, &guard))
            << "top-" << topk << ", layout " << layout << ", " << sideRows << " side rows";
      }
    }
  }
}

TEST(HostBackend, ItemsThatDoNotFitAreRefused) {
  NoPatience guard;
  try {
    makeHostBackend(layoutFor(4 * MOE_MAX_TOPK, moeLayoutExpert, 0), 1, 1, &guard);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), moeInternalError);
    EXPECT_NE(error.text().find("HostExec::kItemBytes is"), std::string::npos) << error.text();
  }
}

}  // namespace
}  // namespace moe
