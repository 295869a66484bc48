// SPDX-License-Identifier: Apache-2.0
// What the scale of a group is, for every magnitude that a bf16 can have.
#include "device/quantize.h"

#include <gtest/gtest.h>

#include <cmath>

namespace moe {
namespace {

TEST(GroupScale, IsTheQuotientThatADivisionRounds) {
  for (uint32_t most = 0; most < 0x7f80; ++most) {
    float value = Bfloat16::load({static_cast<uint16_t>(most)});
    float quotient = std::fmax(value / 448.0f, std::ldexp(1.0f, -126));
    auto [scale, reciprocal] = groupScale(most, false);
    EXPECT_EQ(scale, quotient) << value;
    EXPECT_EQ(reciprocal, 1.0f / quotient) << value;
    int exponent = 0;
    float fraction = std::frexp(quotient, &exponent);
    EXPECT_EQ(groupScale(most, true).scale, std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent)) << value;
  }
}

TEST(GroupScale, OfInfinityAndNanIsNan) {
  for (uint32_t most : {0x7f80u, 0x7fc0u, 0x7fffu}) {
    for (bool powerOfTwo : {false, true}) {
      auto [scale, reciprocal] = groupScale(most, powerOfTwo);
      EXPECT_TRUE(std::isnan(scale));
      EXPECT_TRUE(std::isnan(reciprocal));
    }
  }
}

}  // namespace
}  // namespace moe
