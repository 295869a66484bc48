// SPDX-License-Identifier: Apache-2.0
#include "numbers.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

namespace moe::perf {
namespace {

float fromBfloat16(uint16_t code) { return std::bit_cast<float>(static_cast<uint32_t>(code) << 16); }

uint16_t toBfloat16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  bool isNan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(isNan ? (bits >> 16) | 0x40 : rounded);
}

float fromFloat16(uint16_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x8000) << 16;
  uint32_t exponent = (code >> 10) & 0x1f;
  uint32_t fraction = code & 0x3ff;
  if (exponent == 0) {
    float magnitude = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -magnitude : magnitude;
  }
  uint32_t wide = exponent == 0x1f ? 0xff : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

uint16_t toFloat16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  // From here on every value rounds to infinity: half a unit above the largest finite one.
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 lets the addition round at 2^-24, fp16's smallest step.
    float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
  }
  uint32_t rounded = magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

float fromFloat8(uint8_t code) {
  int exponent = (code >> 3) & 0xf;
  int fraction = code & 7;
  if (exponent == 15 && fraction == 7) return std::nanf("");
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                  : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

const std::array<float, 65536>& float16Values() {
  static const auto& table = *[] {
    auto* values = new std::array<float, 65536>;
    for (size_t code = 0; code < values->size(); ++code) (*values)[code] = fromFloat16(static_cast<uint16_t>(code));
    return values;
  }();
  return table;
}

const std::array<float, 256>& float8Values() {
  static const auto& table = *[] {
    auto* values = new std::array<float, 256>;
    for (size_t code = 0; code < values->size(); ++code) (*values)[code] = fromFloat8(static_cast<uint8_t>(code));
    return values;
  }();
  return table;
}

// Rows may lie at any address, so elements are copied out and in.
template <class Code, class Convert>
void decodeAs(const void* row, int64_t elements, float* values, Convert convert) {
  const auto* bytes = static_cast<const std::byte*>(row);
  for (int64_t i = 0; i < elements; ++i) {
    Code code;
    std::memcpy(&code, bytes + i * static_cast<int64_t>(sizeof(Code)), sizeof(Code));
    values[i] = convert(code);
  }
}

template <class Code, class Convert>
void encodeAs(const float* values, int64_t elements, void* row, Convert convert) {
  auto* bytes = static_cast<std::byte*>(row);
  for (int64_t i = 0; i < elements; ++i) {
    Code code = convert(values[i]);
    std::memcpy(bytes + i * static_cast<int64_t>(sizeof(Code)), &code, sizeof(Code));
  }
}

}  // namespace

size_t elementBytes(moeDataType_t type) {
  switch (type) {
    case moeFloat32: return 4;
    case moeFloat8e4m3: return 1;
    default: return 2;
  }
}

void decodeRow(moeDataType_t type, const void* row, const float* scales, int64_t elements, float* values) {
  switch (type) {
    case moeFloat32: std::memcpy(values, row, static_cast<size_t>(elements) * sizeof(float)); return;
    case moeFloat16: {
      const auto& table = float16Values();
      decodeAs<uint16_t>(row, elements, values, [&](uint16_t code) { return table[code]; });
      return;
    }
    case moeFloat8e4m3: {
      const auto& table = float8Values();
      decodeAs<uint8_t>(row, elements, values, [&](uint8_t code) { return table[code]; });
      for (int64_t i = 0; i < elements; ++i) values[i] *= scales[i / kScaleGroup];
      return;
    }
    default: decodeAs<uint16_t>(row, elements, values, fromBfloat16);
  }
}

void encodeRow(moeDataType_t type, const float* values, int64_t elements, void* row) {
  switch (type) {
    case moeFloat32: std::memcpy(row, values, static_cast<size_t>(elements) * sizeof(float)); return;
    case moeFloat16: encodeAs<uint16_t>(values, elements, row, toFloat16); return;
    default: encodeAs<uint16_t>(values, elements, row, toBfloat16);
  }
}

TokenData::TokenData(uint64_t seed, moeDataType_t type, moeQuantize_t quantize, int64_t hidden)
    : seed_(seed), quantize_(quantize), type_(quantizes() ? moeFloat8e4m3 : type), hidden_(hidden) {
  for (uint32_t i = 0; i < 256; ++i) {
    float magnitude = static_cast<float>(1 + (i & 127)) / 64;
    float value = i & 128 ? -magnitude : magnitude;
    codes32_[i] = std::bit_cast<uint32_t>(value);
    codes16_[i] = type == moeFloat16 ? toFloat16(value) : toBfloat16(value);
    // Every code of e4m3 but the two zeros and the two NaNs, which become +-1.
    bool special = (i & 127) == 0 || (i & 127) == 127;
    codes8_[i] = static_cast<uint8_t>(special ? (i & 128) | 0x38 : i);
  }
}

template <class Code>
void TokenData::fill(uint64_t key, const std::array<Code, 256>& codes, Code* row) const {
  int64_t whole = hidden_ / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    uint64_t bits = mix(key + static_cast<uint64_t>(i));
    for (int64_t j = 0; j < 8; ++j) row[i + j] = codes[(bits >> (8 * j)) & 255];
  }
  uint64_t bits = mix(key + static_cast<uint64_t>(whole));
  for (int64_t i = whole; i < hidden_; ++i) row[i] = codes[(bits >> (8 * (i - whole))) & 255];
}

void TokenData::fillRow(const TokenId& id, void* row) const {
  uint64_t key = keyOf(seed_ ^ 0x746f6b656e, id);
  switch (elementBytes(type_)) {
    case 1: {
      auto* codes = static_cast<uint8_t*>(row);
      fill(key, codes8_, codes);
      constexpr uint8_t kLargest = 0x7e;
      for (int64_t i = 0; quantizes() && i < hidden_; i += kScaleGroup) codes[i] = kLargest;
      return;
    }
    case 2: fill(key, codes16_, static_cast<uint16_t*>(row)); return;
    default: fill(key, codes32_, static_cast<uint32_t*>(row));
  }
}

void TokenData::fillScales(const TokenId& id, float* scales) const {
  uint64_t key = keyOf(seed_ ^ 0x7363616c65, id);
  for (int64_t i = 0; i < scaleCount(); ++i) {
    scales[i] = std::ldexp(1.0f, static_cast<int>(mix(key + static_cast<uint64_t>(i)) % 8) - 5);
  }
}

void TokenData::fillScaleRow(const TokenId& id, std::byte* row) const {
  std::vector<float> scales(static_cast<size_t>(scaleCount()));
  fillScales(id, scales.data());
  if (!packs()) {
    std::memcpy(row, scales.data(), static_cast<size_t>(scaleBytes()));
    return;
  }
  std::memset(row, 0, static_cast<size_t>(scaleBytes()));
  for (size_t i = 0; i < scales.size(); ++i) row[i] = static_cast<std::byte>(std::bit_cast<uint32_t>(scales[i]) >> 23);
}

void TokenData::readScales(const std::byte* row, float* scales) const {
  if (!packs()) {
    std::memcpy(scales, row, static_cast<size_t>(scaleBytes()));
    return;
  }
  for (int64_t i = 0; i < scaleCount(); ++i) scales[i] = std::bit_cast<float>(std::to_integer<uint32_t>(row[i]) << 23);
}

void TokenData::fillInput(const TokenId& id, void* row) const {
  if (!quantizes()) return fillRow(id, row);
  auto elements = static_cast<size_t>(hidden_);
  std::vector<uint8_t> codes(elements);
  std::vector<float> scales(static_cast<size_t>(scaleCount())), values(elements);
  fillRow(id, codes.data());
  fillScales(id, scales.data());
  decodeRow(moeFloat8e4m3, codes.data(), scales.data(), hidden_, values.data());
  encodeRow(moeBfloat16, values.data(), hidden_, row);
}

}  // namespace moe::perf
