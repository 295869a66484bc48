// SPDX-License-Identifier: Apache-2.0
#include "base/divisor.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace moe {
namespace {

constexpr uint32_t kEnd = uint32_t{1} << 31;  // of dividends

std::vector<uint32_t> divisors() {
  std::vector<uint32_t> all;
  for (uint32_t small = 1; small < 300; ++small) all.push_back(small);
  for (int bit = 8; bit < 31; ++bit) {
    for (uint32_t near : {(1u << bit) - 1, 1u << bit, (1u << bit) + 1}) all.push_back(near);
  }
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) all.push_back(1 + random() % (kEnd - 1));
  return all;
}

TEST(Divisor, DividesAsDivisionDoes) {
  std::mt19937 random(7);
  for (uint32_t by : divisors()) {
    Divisor divisor(by);
    EXPECT_EQ(divisor.value(), by);
    std::vector<uint32_t> dividends = {0, 1, by - 1, by, kEnd - 1, kEnd - 2};
    // Multiples, and their neighbours, are where it could go wrong.
    for (int i = 0; i < 200; ++i) {
      uint32_t multiple = random() % kEnd / by * by;
      for (uint32_t near : {multiple, multiple + 1, multiple + by - 1}) dividends.push_back(near);
    }
    for (uint32_t dividend : dividends) {
      if (dividend >= kEnd) continue;
      ASSERT_EQ(divisor.divide(dividend), dividend / by) << dividend << " / " << by;
      ASSERT_EQ(divisor.remainder(dividend), dividend % by) << dividend << " % " << by;
    }
  }
}

TEST(Divisor, WideRemainders) {
  std::mt19937_64 random(9);
  for (uint32_t by : {1u, 2u, 3u, 5u, 7u, 8u, 999u, 32767u}) {
    Divisor divisor(by);
    for (int i = 0; i < 10000; ++i) {
      uint64_t dividend = random() >> (2 + i % 60);
      ASSERT_EQ(divisor.wideRemainder(dividend), dividend % by) << dividend << " % " << by;
    }
  }
}

TEST(Divisor, OneIsWhatItIsWithoutAValue) { EXPECT_EQ(Divisor().divide(kEnd - 1), kEnd - 1); }

}  // namespace
}  // namespace moe
