// SPDX-License-Identifier: Apache-2.0
// Tokens that are quantized on their way: what a scale is, and where scales lie. See moeQuantize_t.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"
#include "device/args.h"
#include "device/numbers.h"
#include "device/tagged.h"
#include "layout.h"

namespace moe {

struct GroupScale {
  float scale, reciprocal;
};

// The largest value of e4m3.
constexpr float kLargestE4m3 = 448.0f;

// value / 448 for finite values, as a division rounds it wherever the quotient is normal.
MOE_HD inline float dividedByLargest(float value) {
  constexpr float kReciprocal = 1.0f / kLargestE4m3;
  float quotient = value * kReciprocal;
  return __builtin_fmaf(__builtin_fmaf(-quotient, kLargestE4m3, value), kReciprocal, quotient);
}

// `most`: the largest magnitude of the group, as the bits of a bf16. Those of NaN and infinity are larger than all
// others.
MOE_HD inline GroupScale groupScale(uint32_t most, bool powerOfTwo) {
  constexpr uint32_t kInfinity = 0x7f80;
  constexpr float kLeast = 0x1p-126f;
  float scale = dividedByLargest(Bfloat16::load({static_cast<uint16_t>(most)}));
  if (scale < kLeast) scale = kLeast;
  // Any bit of the fraction carries into the exponent, and is cleared.
  if (powerOfTwo) scale = __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, scale) + 0x7fffffu) & 0xff800000u);
  float reciprocal = Float32::reciprocal(scale);
  if (most < kInfinity) return {scale, reciprocal};
  float nan = __builtin_bit_cast(float, 0x7fc00000u);
  return {nan, nan};
}

// A power of two, or NaN, as its exponent.
MOE_HD inline uint32_t ue8m0Of(float scale) { return __builtin_bit_cast(uint32_t, scale) >> 23 & 0xffu; }

// Vectors of a unit whose elements have a scale in common; so many units in a row of them, too.
constexpr int64_t kGroupVectors = kGroup / Unit::kVectorBytes;

// A unit of e4m3 and the scales of the groups that its vectors belong to.
struct QuantizedUnit {
  Unit data;
  float scales[Unit::kVectors];
};

// A row of bf16 that becomes e4m3 and scales, at these offsets of the row that it is part of.
struct QuantizedPiece {
  const std::byte* from;
  int64_t elements, tokens, scales;
  bool ue8m0;
};

// The caller's array of scales, or that of views.
class ScaleOutput {
 public:
  MOE_HD ScaleOutput(const Shape& shape, const RowsOut& out, bool byRow)
      : shape_(shape), out_(out), wordStride_(byRow ? kScaleWord : out.stride), byRow_(byRow) {}

  MOE_HD int64_t wordStride() const { return wordStride_; }
  // The first of a row's words; the others follow wordStride() bytes apart.
  MOE_HD std::byte* firstWord(int64_t row) const {
    if (byRow_) return out_.data + row * out_.stride;
    int64_t matrix = shape_.byColumnRows.divide(static_cast<uint32_t>(row));
    int64_t inMatrix = row - matrix * shape_.byColumnRows.value();
    return out_.data + matrix * shape_.scaleWords() * out_.stride + inMatrix * kScaleWord;
  }

  // One of the words in which the low-latency path carries scales: word kWordsPerBlock * b + j has those of the vectors
  // of unit kUnitsPerBlock * b + kGroupVectors * j. `first`: the row's first word.
  MOE_HD void storeWord(std::byte* first, uint32_t from, const uint32_t* data) const {
    constexpr uint32_t kWords = kWordsPerBlock;
    uint32_t byte = from % kWords, begin = (from - byte) * Unit::kVectors + byte;
    MOE_UNROLL for (uint32_t v = 0; v < Unit::kVectors; ++v) {
      uint32_t group = begin + v * kWords;
      bool exists = group < shape_.groups();
      if (shape_.quantize != moeQuantizeUe8m0) {
        if (exists) *reinterpret_cast<uint32_t*>(first + group * wordStride_) = data[v];
      } else if (group / kWords < shape_.scaleWords()) {
        uint32_t exponent = exists ? ue8m0Of(__builtin_bit_cast(float, data[v])) : 0;
        first[group / kWords * wordStride_ + byte] = static_cast<std::byte>(exponent);
      }
    }
  }
  static constexpr int64_t kWordsPerBlock = kUnitsPerBlock / kGroupVectors;
  static_assert(kWordsPerBlock == kScaleWord, "a word's exponents come from one vector of a block");

 private:
  const Shape& shape_;
  RowsOut out_;
  int64_t wordStride_;
  bool byRow_;
};

}  // namespace moe
