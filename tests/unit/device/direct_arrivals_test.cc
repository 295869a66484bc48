// SPDX-License-Identifier: Apache-2.0
#include "device/direct_arrivals.h"

#include <gtest/gtest.h>

#include <vector>

namespace moe {
namespace {

// Receivers go through the orders of the longest source, whatever each source has.
TEST(Arrivals, EveryChunkHasOneOrder) {
  constexpr int32_t kMostOrders = 200;
  for (int32_t chunks = 1; chunks <= 40; ++chunks) {
    for (int32_t span = 1; span <= chunks; ++span) {
      SourceInfo info{0, 0, chunks, span, 0};
      ASSERT_LE(ordersOf(info), kMostOrders);
      std::vector<int> named(static_cast<size_t>(chunks), 0);
      for (int32_t order = 0; order < kMostOrders; ++order) {
        int32_t chunk = orderedChunk(info, order);
        ASSERT_GE(chunk, 0);
        if (chunk >= chunks) continue;
        EXPECT_LT(order, ordersOf(info));
        ++named[static_cast<size_t>(chunk)];
      }
      EXPECT_EQ(named, std::vector<int>(static_cast<size_t>(chunks), 1)) << chunks << " chunks in spans of " << span;
    }
  }
}

// The first chunks of all spans come before the second ones.
TEST(Arrivals, SpansGoSideBySide) {
  SourceInfo info{0, 0, 8, 3, 0};
  std::vector<int32_t> chunks;
  for (int32_t order = 0; order < 9; ++order) chunks.push_back(orderedChunk(info, order));
  EXPECT_EQ(chunks, (std::vector<int32_t>{0, 3, 6, 1, 4, 7, 2, 5, 8}));
}

}  // namespace
}  // namespace moe
