// SPDX-License-Identifier: Apache-2.0
// Element types, and the tokens that moe_perf sends. Every rank can make any rank's tokens, so that what arrives can be
// checked without asking the sender.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "moe.h"

namespace moe::perf {

size_t elementBytes(moeDataType_t type);

// `row` as fp32. For fp8 the values are multiplied by the scale of their group of kScaleGroup.
void decodeRow(moeDataType_t type, const void* row, const float* scales, int64_t elements, float* values);
// Rounds to nearest even. Not for fp8.
void encodeRow(moeDataType_t type, const float* values, int64_t elements, void* row);

constexpr int64_t kScaleGroup = 128;

// A well mixed function of its argument.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Which token: ranks send a different set of inputs from call to call.
struct TokenId {
  int64_t set;
  int rank;
  int64_t token;
};

inline uint64_t keyOf(uint64_t seed, const TokenId& id) {
  return mix(mix(mix(seed ^ static_cast<uint64_t>(id.set)) ^ static_cast<uint64_t>(id.rank)) ^
             static_cast<uint64_t>(id.token));
}

class TokenData {
 public:
  // `type`: of tokens as they are sent. Those that dispatch quantizes arrive as fp8.
  TokenData(uint64_t seed, moeDataType_t type, moeQuantize_t quantize, int64_t hidden);

  // As they arrive.
  moeDataType_t type() const { return type_; }
  int64_t hidden() const { return hidden_; }
  int64_t rowBytes() const { return hidden_ * static_cast<int64_t>(elementBytes(type_)); }
  // Of fp8 tokens; 0 bytes for other types.
  int64_t scaleCount() const { return type_ == moeFloat8e4m3 ? (hidden_ + kScaleGroup - 1) / kScaleGroup : 0; }
  int64_t scaleBytes() const { return packs() ? (scaleCount() + 3) / 4 * 4 : scaleCount() * 4; }
  // Scales are exponents, a byte each.
  bool packs() const { return quantize_ == moeQuantizeUe8m0; }
  // As they are sent; scales that dispatch makes are not.
  int64_t inputBytes() const { return quantizes() ? 2 * hidden_ : rowBytes(); }
  int64_t inputScaleBytes() const { return quantizes() ? 0 : scaleBytes(); }

  // Values are exact in the type, small and never zero.
  void fillRow(const TokenId& id, void* row) const;
  // Powers of two, so that scaling is exact.
  void fillScales(const TokenId& id, float* scales) const;
  // The same in the form in which they arrive.
  void fillScaleRow(const TokenId& id, std::byte* row) const;
  void readScales(const std::byte* row, float* scales) const;
  // What is sent so that fillRow's values arrive. Each group has a value of the largest magnitude that fp8 has, so that
  // its scale is found again, and nothing is rounded.
  void fillInput(const TokenId& id, void* row) const;

 private:
  template <class Code>
  void fill(uint64_t key, const std::array<Code, 256>& codes, Code* row) const;

  bool quantizes() const { return quantize_ != moeQuantizeNone; }

  uint64_t seed_;
  moeQuantize_t quantize_;
  moeDataType_t type_;
  int64_t hidden_;
  std::array<uint8_t, 256> codes8_{};
  std::array<uint16_t, 256> codes16_{};
  std::array<uint32_t, 256> codes32_{};
};

}  // namespace moe::perf
