// SPDX-License-Identifier: Apache-2.0
#include "device/row_jobs.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace moe {
namespace {

// A warp of one lane. A claim is on its way until its value is looked at.
struct Warp {
  mutable int onTheirWay = 0;

  uint32_t claim(uint32_t* counter) {
    ++onTheirWay;
    return (*counter)++;
  }
  uint32_t broadcast(uint32_t value, int) const {
    onTheirWay = 0;
    return value;
  }
};

TEST(Claims, EveryRunIsTakenOnceAndNoClaimOutlivesItsWarp) {
  constexpr uint32_t kWarps = 3;
  for (uint32_t runs : {0u, 1u, 2u, 3u, 4u, 17u}) {
    uint32_t counter = 0;
    std::array<Warp, kWarps> warps;
    std::array<Claims<Warp>, kWarps> claims;
    std::vector<int> taken(runs);
    for (uint32_t w = 0; w < kWarps; ++w) claims[w].startClaims(warps[w], &counter, runs);
    for (uint32_t left = kWarps, step = 0; left > 0; ++step) {
      ASSERT_LE(step, 4 * (runs + 1));
      left = 0;
      for (uint32_t w = 0; w < kWarps; ++w) {
        // The last warp is slow.
        if (w == kWarps - 1 && step % 3 != 0) {
          ++left;
          continue;
        }
        uint32_t run = claims[w].advance(warps[w]);
        if (run >= runs) {
          EXPECT_EQ(warps[w].onTheirWay, 0) << "warp " << w << " of " << runs << " runs";
          EXPECT_GE(claims[w].advance(warps[w]), runs);
          continue;
        }
        ++taken[run];
        ++left;
      }
    }
    EXPECT_EQ(taken, std::vector<int>(runs, 1));
  }
}

TEST(Claims, TurnsEnd) {
  Warp warp;
  Claims<Warp> claims;
  claims.startTurns(warp, 1, 3, 8);
  EXPECT_EQ(claims.next(warp), 1u);
  EXPECT_EQ(claims.advance(warp), 1u);
  EXPECT_EQ(claims.advance(warp), 4u);
  EXPECT_EQ(claims.next(warp), 7u);
  EXPECT_EQ(claims.advance(warp), 7u);
  EXPECT_EQ(claims.advance(warp), Claims<Warp>::kNone);
  EXPECT_EQ(claims.advance(warp), Claims<Warp>::kNone);
}

// Turns of the own runs, then claims of those of all.
TEST(Claims, ClaimsAfterTurns) {
  Warp warp;
  uint32_t counter = 5;
  Claims<Warp> claims;
  claims.startTurns(warp, 0, 1, 1);
  EXPECT_EQ(claims.advance(warp), 0u);
  EXPECT_EQ(claims.advance(warp), Claims<Warp>::kNone);
  claims.startClaims(warp, &counter, 7);
  EXPECT_EQ(claims.advance(warp), 5u);
  EXPECT_EQ(claims.advance(warp), 6u);
  EXPECT_GE(claims.advance(warp), 7u);
  EXPECT_EQ(counter, 8u);
}

TEST(Grain, RowsAreSlicedWhileNoWarpGetsTooMany) {
  constexpr int64_t kWarps = 8, kRowBytes = 512 * 8;
  auto slices = [](int64_t rows, int32_t most) { return Grain(rows, kWarps, kRowBytes, {4, most}).slices; };
  EXPECT_EQ(slices(4, 1), 2);
  EXPECT_EQ(slices(5, 1), 1);
  EXPECT_EQ(slices(16, 4), 2);
  EXPECT_EQ(slices(17, 4), 1);
  EXPECT_EQ(slices(1, 4), kRowParts);
  EXPECT_EQ(Grain(1, kWarps, 512 * 3, {4, 4}).slices, 1) << "slices are multiples of 512 bytes";
  EXPECT_EQ(Grain(4 * kWarps * kRunRows, kWarps, kRowBytes, {4, 4}).rows, kRunRows);
}

}  // namespace
}  // namespace moe
