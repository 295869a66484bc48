// SPDX-License-Identifier: Apache-2.0
// What quantizing in dispatch must make of a row of bf16, from the definition in moe.h and sharing no code with the
// library.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "moe.h"
#include "numbers.h"

namespace moetest {

// The e4m3 value nearest to a number, by looking at all of them.
inline uint8_t toFloat8(float value) {
  constexpr int kCodes = 0x7f;  // of magnitudes that are numbers
  static const auto magnitudes = [] {
    std::array<double, kCodes> all{};
    for (int code = 0; code < kCodes; ++code) all[static_cast<size_t>(code)] = fromFloat8(static_cast<uint8_t>(code));
    return all;
  }();
  if (std::isnan(value)) return 0x7f;
  double magnitude = std::fabs(static_cast<double>(value));
  size_t above = 0;
  while (above + 1 < kCodes && magnitudes[above] < magnitude) ++above;
  size_t nearest = above;
  if (above > 0) {
    double up = magnitudes[above] - magnitude, down = magnitude - magnitudes[above - 1];
    if (down < up || (down == up && above % 2 == 1)) nearest = above - 1;
  }
  return static_cast<uint8_t>(nearest | (std::signbit(value) ? 0x80u : 0u));
}

// The scale of a group whose largest magnitude is `most`; the group has only numbers.
inline float quantizedScale(float most, int quantize) {
  float scale = std::max(most / 448.0f, std::ldexp(1.0f, -126));
  if (quantize != moeQuantizeUe8m0) return scale;
  int exponent = -126;
  while (std::ldexp(1.0f, exponent) < scale) ++exponent;
  return std::ldexp(1.0f, exponent);
}

// The 32-bit words of a row's scales.
inline int64_t quantizedWords(int64_t hidden, int quantize) {
  int64_t groups = (hidden + MOE_QUANTIZE_GROUP - 1) / MOE_QUANTIZE_GROUP;
  return quantize == moeQuantizeUe8m0 ? (groups + 3) / 4 : groups;
}

struct QuantizedRow {
  std::vector<std::byte> elements, words;
};

inline QuantizedRow quantizeRow(const std::byte* row, int64_t hidden, int quantize) {
  QuantizedRow result;
  result.words.resize(static_cast<size_t>(4 * quantizedWords(hidden, quantize)));
  for (int64_t first = 0; first < hidden; first += MOE_QUANTIZE_GROUP) {
    int64_t end = std::min<int64_t>(hidden, first + MOE_QUANTIZE_GROUP);
    float most = 0;
    bool numbers = true;
    for (int64_t h = first; h < end; ++h) {
      float value = loadElement(moeBfloat16, row, h);
      numbers = numbers && std::isfinite(value);
      most = std::max(most, std::fabs(value));
    }
    float scale = numbers ? quantizedScale(most, quantize) : floatFromBits(0x7fc00000);
    for (int64_t h = first; h < end; ++h) {
      float value = numbers ? loadElement(moeBfloat16, row, h) * (1.0f / scale) : scale;
      result.elements.push_back(static_cast<std::byte>(toFloat8(value)));
    }
    auto group = static_cast<size_t>(first / MOE_QUANTIZE_GROUP);
    if (quantize == moeQuantizeUe8m0) {
      result.words[group] = static_cast<std::byte>(numbers ? std::ilogb(scale) + 127 : 255);
    } else {
      std::memcpy(&result.words[4 * group], &scale, 4);
    }
  }
  return result;
}

}  // namespace moetest
