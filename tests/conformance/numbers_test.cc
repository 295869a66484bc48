// SPDX-License-Identifier: Apache-2.0
// The number formats that the reference stands on.
#include "numbers.h"

#include <gtest/gtest.h>

#include "quantized.h"

namespace moetest {
namespace {

TEST(Numbers, EveryHalfSurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    auto half = static_cast<uint16_t>(bits);
    if (!std::isnan(fromFloat16(half))) {
      ASSERT_EQ(toFloat16(fromFloat16(half)), half);
    }
    if (!std::isnan(fromBfloat16(half))) {
      ASSERT_EQ(toBfloat16(fromBfloat16(half)), half);
    }
  }
}

TEST(Numbers, HalvesRoundToTheNearestAndTiesToEven) {
  EXPECT_EQ(toBfloat16(1.0f + 0x1p-8f), 0x3f80);  // a tie, down to even
  EXPECT_EQ(toBfloat16(1.0f + 0x3p-8f), 0x3f82);  // a tie, up to even
  EXPECT_EQ(toBfloat16(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);
  EXPECT_EQ(toBfloat16(floatFromBits(0x7f7fffff)), 0x7f80);  // the largest float becomes infinity
  EXPECT_EQ(toFloat16(1.0f + 0x1p-11f), 0x3c00);
  EXPECT_EQ(toFloat16(1.0f + 0x3p-11f), 0x3c02);
  EXPECT_EQ(toFloat16(65519.0f), 0x7bff);
  EXPECT_EQ(toFloat16(65520.0f), 0x7c00);
  EXPECT_EQ(toFloat16(0x1p-25f), 0x0000);  // half of the smallest: to even
  EXPECT_EQ(toFloat16(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(toFloat16(-0x3p-25f), 0x8002);
  EXPECT_EQ(toFloat16(-0.0f), 0x8000);
  EXPECT_EQ(toFloat16(0x1.ff8p-15f), 0x03ff);  // the largest subnormal
  EXPECT_EQ(toFloat16(0x1.ffep-15f), 0x0400);  // rounds up into the normals
}

TEST(Numbers, EveryFloat8SurvivesTheWayToFloatAndBack) {
  for (int bits = 0; bits < 256; ++bits) {
    auto code = static_cast<uint8_t>(bits);
    EXPECT_EQ(toFloat8(fromFloat8(code)), (code & 0x7f) == 0x7f ? 0x7f : code);
  }
}

TEST(Numbers, Float8RoundsToTheNearestAndTiesToEven) {
  EXPECT_EQ(toFloat8(1.0f + 0x1p-4f), 0x38);  // a tie, down to even
  EXPECT_EQ(toFloat8(1.0f + 0x3p-4f), 0x3a);  // a tie, up to even
  EXPECT_EQ(toFloat8(1.0f + 0x1p-4f + 0x1p-20f), 0x39);
  EXPECT_EQ(toFloat8(-0x1p-10f), 0x80);  // half of the smallest: to even
  EXPECT_EQ(toFloat8(0x1.00001p-10f), 0x01);
  EXPECT_EQ(toFloat8(1e30f), 0x7e);
  EXPECT_EQ(toFloat8(-INFINITY), 0xfe);
}

TEST(Numbers, ScalesOfQuantizedGroups) {
  EXPECT_EQ(quantizedScale(448.0f, moeQuantizeFloat32), 1.0f);
  EXPECT_EQ(quantizedScale(448.0f, moeQuantizeUe8m0), 1.0f);
  EXPECT_EQ(quantizedScale(450.0f, moeQuantizeUe8m0), 2.0f);
  EXPECT_EQ(quantizedScale(3.0f, moeQuantizeUe8m0), 0x1p-7f);
  EXPECT_EQ(quantizedScale(0.0f, moeQuantizeFloat32), 0x1p-126f);
}

TEST(Numbers, Float8HasItsKnownValues) {
  EXPECT_EQ(fromFloat8(0x00), 0.0f);
  EXPECT_EQ(fromFloat8(0x01), 0x1p-9f);
  EXPECT_EQ(fromFloat8(0x08), 0x1p-6f);
  EXPECT_EQ(fromFloat8(0x38), 1.0f);
  EXPECT_EQ(fromFloat8(0x7e), 448.0f);
  EXPECT_EQ(fromFloat8(0xfe), -448.0f);
  EXPECT_TRUE(std::isnan(fromFloat8(0x7f)));
}

}  // namespace
}  // namespace moetest
