// SPDX-License-Identifier: Apache-2.0
// How the low-latency path cuts rows into units, and deals slices out.
#include <gtest/gtest.h>

#include <array>
#include <set>
#include <vector>

#include "device/low_latency_window.h"
#include "device/tagged.h"

namespace moe {
namespace {

// A warp of 32 lanes, of which this is one.
struct Lane {
  static constexpr int kSlices = 1;
  static constexpr bool kSpreads = true;
  int lane_, warp_, warps_;

  int lane() const { return lane_; }
  int lanes() const { return 32; }
  int warp() const { return warp_; }
  int warps() const { return warps_; }
  bool warpAll(bool ok) const { return ok; }
};

TEST(Units, EveryByteOfARowIsInOneUnitAndEveryWordHasAPlaceOfItsOwn) {
  for (int64_t bytes : {1, 15, 16, 17, 224, 511, 512, 513, 1535, 1536, 1537, 7168, 14336, 14350}) {
    std::vector<int> covered(static_cast<size_t>(bytes));
    std::set<int64_t> places;
    for (int64_t unit = 0; unit < rowUnits(bytes); ++unit) {
      EXPECT_GT(Unit::vectorBytes(unit, 0, bytes), 0) << bytes << " bytes: unit " << unit << " carries nothing";
      for (int v = 0; v < Unit::kVectors; ++v) {
        for (int64_t b = 0; b < Unit::vectorBytes(unit, v, bytes); ++b) {
          ++covered.at(static_cast<size_t>(Unit::vectorAt(unit, v) + b));
        }
      }
      for (int w = 0; w < kUnitWords; ++w) {
        int64_t at = Unit::wordAt(unit, w);
        EXPECT_TRUE(places.insert(at).second) << bytes << " bytes: word " << w << " of unit " << unit;
        EXPECT_LE(at + kTaggedWord, taggedBytes(bytes));
      }
    }
    EXPECT_EQ(covered, std::vector<int>(static_cast<size_t>(bytes), 1)) << bytes << " bytes";
  }
}

TEST(Tags, DifferBetweenEpochsAndFromUntouchedMemory) {
  std::set<uint32_t> tags;
  for (uint64_t epoch = 1; epoch < 1000; ++epoch) EXPECT_TRUE(tags.insert(tagOf(epoch)).second);
  EXPECT_FALSE(tags.contains(0));
  EXPECT_EQ(epochOf(tagOf(41)), 41u);
  EXPECT_EQ(epochOf(0), 0u);
  EXPECT_NE(tagOf(uint64_t{1} << 31), 0u);
}

TEST(Slices, AllOfEveryRowAreTakenOnce) {
  constexpr int kWarps = 4;
  for (auto [shares, spread] : {std::pair{3, 0}, {3, 1}, {4, 1}, {11, 2}, {8, 3}}) {
    for (int64_t rows : {0, 1, 2, 3, 7, 20}) {
      for (int64_t units : {1, 32, 33, 299}) {
        std::vector<int> taken(static_cast<size_t>(rows * units));
        for (int i = 0; i < shares * kWarps * 32; ++i) {
          Lane x{i % 32, i / 32 % kWarps, kWarps};
          Slices<Lane> slices(x, rows, Divisor(ceilDiv(units, kUnitsPerBlock)), i / 32 / kWarps, shares, spread);
          Slices<Lane>::Slice slice;
          while (slices.take(&slice)) {
            forUnits(x, units, slice.number, [&](int64_t unit, bool mine) {
              if (mine) ++taken.at(static_cast<size_t>(int64_t{slice.row} * units + unit));
              return true;
            });
          }
        }
        EXPECT_EQ(taken, std::vector<int>(taken.size(), 1))
            << rows << " rows of " << units << " units, " << shares << " shares, spread " << spread;
      }
    }
  }
}

TEST(Slices, EveryWarpTakesSomeWhereMoreRowsComeThanBlocksShare) {
  constexpr int kWarps = 16, kShares = 16, kRows = 200;
  for (int32_t spread : {0, 1, 2, 3}) {
    for (int i = 0; i < kShares * kWarps; ++i) {
      Slices<Lane> slices(Lane{0, i % kWarps, kWarps}, kRows, Divisor(10), i / kWarps, kShares, spread);
      Slices<Lane>::Slice slice;
      EXPECT_TRUE(slices.take(&slice)) << "warp " << i % kWarps << " of share " << i / kWarps << ", spread " << spread;
    }
  }
}

TEST(Slices, RowsAreSpreadWhereTheyAreFewerThanBlocks) {
  EXPECT_EQ(spreadOf(128, 130, 10), 0);
  EXPECT_EQ(spreadOf(65, 130, 10), 1);
  EXPECT_EQ(spreadOf(17, 130, 10), 2);
  EXPECT_EQ(spreadOf(0, 130, 10), 3);
  EXPECT_EQ(spreadOf(1, 130, 3), 1);
  EXPECT_EQ(spreadOf(1, 1, 10), 0);
}

// Side rows have slices of their own behind the tokens'.
TEST(Slices, PayloadsFollowEachOther) {
  Layout layout{};
  layout.shape.payloads = 2;
  layout.slot.units[0] = 40;
  layout.slot.slices[0] = 2;
  layout.slot.units[1] = 5;
  layout.slot.slices[1] = 1;
  std::array<std::vector<int>, 2> taken{std::vector<int>(40), std::vector<int>(5)};
  // A fourth one has nothing.
  for (int number = 0; number < 4; ++number) {
    std::set<int> calls;
    for (int lane = 0; lane < 32; ++lane) {
      Lane x{lane, 0, 1};
      PayloadUnit first = firstPayloadUnit(x, layout, number);
      int made = 0, had = 0;
      forPayloadUnits(x, layout, number, first, [&](int payload, int64_t unit, bool mine) {
        ++made;
        if (!mine) return true;
        bool isFirst = first.payload == payload && first.unit == unit;
        EXPECT_EQ(++had == 1, isFirst);
        ++taken.at(static_cast<size_t>(payload)).at(static_cast<size_t>(unit));
        return true;
      });
      calls.insert(made);
      EXPECT_EQ(first.mine, had > 0);
    }
    EXPECT_EQ(calls.size(), 1u) << "lanes must make the same calls";
  }
  EXPECT_EQ(taken[0], std::vector<int>(40, 1));
  EXPECT_EQ(taken[1], std::vector<int>(5, 1));
}

// Of two ranks with 8 tokens, 3 entries each.
Layout layoutOf(int slots, int format) {
  moeConfig_t config = MOE_CONFIG_INIT;
  config.maxTokensPerRank = 8;
  config.hidden = 700;
  config.numExperts = 6;
  config.maxTopk = 3;
  config.layout = moeLayoutExpert;
  config.numSideRows = 1;
  config.sideRowBytes[0] = 13;
  config.buffers = 2;
  config.path = moePathLowLatency;
  config.slots = slots;
  config.format = format;
  return makeLayout(config, 2, 0, 4);
}

TEST(SlotLayout, CopiesDoNotOverlapAndSignalsAreNotSwept) {
  for (int slots : {moeSlotsRank, moeSlotsExpert}) {
    for (int format : {moeFormatTagged, moeFormatSignalled}) {
      Layout layout = layoutOf(slots, format);
      const SlotLayout& slot = layout.slot;
      bool signals = format == moeFormatSignalled;
      int64_t sideBytes = signals ? 16 : taggedBytes(13), tokenBytes = signals ? 1400 : taggedBytes(1400);
      EXPECT_EQ(slot.copies, slots == moeSlotsExpert ? 3 : 1);
      EXPECT_GE(slot.payload[0], 4 * kTaggedWord) << "after the head's words";
      EXPECT_GE(slot.payload[1], slot.payload[0] + tokenBytes);
      EXPECT_GE(slot.payload[0] + slot.copyStride, slot.payload[1] + sideBytes);
      EXPECT_EQ(slot.stride, slot.payload[0] + slot.copies * slot.copyStride);
      // Words are swept from the first slot and the first row on.
      EXPECT_EQ(layout.window.slots - layout.window.slotSignals >= 8 * 2 * 8, signals);
      EXPECT_EQ(layout.window.taggedRows - layout.window.rowSignals >= 8 * 8 * 2, signals);
      EXPECT_GE(layout.window.taggedRowStride, tokenBytes);
    }
  }
  EXPECT_LT(recordBytes(layoutOf(moeSlotsRank, moeFormatSignalled)),
            recordBytes(layoutOf(moeSlotsRank, moeFormatTagged)));
  EXPECT_LT(partialBytes(layoutOf(moeSlotsRank, moeFormatSignalled)),
            partialBytes(layoutOf(moeSlotsRank, moeFormatTagged)));
}

TEST(SlotRoles, EveryBlockHasOneAndEveryRoleABlock) {
  for (int blocks : {1, 2, 3, 4, 132}) {
    CommonArgs common{};
    common.blocks = blocks;
    for (bool routes : {false, true}) {
      SlotRoles roles(common, routes);
      std::set<int> busy{roles.router, roles.teller};
      for (int block = 0; block < roles.workers; ++block) busy.insert(block);
      EXPECT_EQ(busy.size(), static_cast<size_t>(blocks)) << blocks << " blocks";
      EXPECT_EQ(*busy.rbegin(), blocks - 1);
      EXPECT_GE(roles.workers, 1);
      EXPECT_EQ(roles.router != roles.teller, routes && blocks > 2);
    }
  }
}

}  // namespace
}  // namespace moe
