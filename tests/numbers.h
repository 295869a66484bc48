// SPDX-License-Identifier: Apache-2.0
// Number formats for tests, written from their definitions and sharing no code with the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "moe.h"

namespace moetest {

inline uint32_t floatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float floatFromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// bfloat16: the upper half of a float.
inline float fromBfloat16(uint16_t bits) { return floatFromBits(uint32_t{bits} << 16); }

inline uint16_t toBfloat16(float value) {
  uint32_t bits = floatBits(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  uint32_t lower = bits & 0xffffu;
  uint32_t upper = bits >> 16;
  // Ties go to the even neighbour; a carry out of the mantissa is the next exponent, or infinity, as it should be.
  if (lower > 0x8000u || (lower == 0x8000u && (upper & 1u))) ++upper;
  return static_cast<uint16_t>(upper);
}

// IEEE binary16: 1 sign, 5 exponent bits with bias 15, 10 mantissa bits.
inline float fromFloat16(uint16_t bits) {
  int exponent = (bits >> 10) & 31;
  int mantissa = bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? std::nanf("") : INFINITY;
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

inline uint16_t toFloat16(float value) {
  uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00);
  double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= 65520.0) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude == 0) return sign;
  int exponent = std::max(std::ilogb(magnitude), -14);
  // In units of the last mantissa bit. nearbyint rounds halves to even.
  auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent + 14) << 10) + units));
}

// fp8 e4m3: bias 7, no infinities, all ones is NaN.
inline float fromFloat8(uint8_t bits) {
  int exponent = (bits >> 3) & 15;
  int mantissa = bits & 7;
  float magnitude;
  if (exponent == 15 && mantissa == 7) {
    magnitude = std::nanf("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -9);
  } else {
    magnitude = std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  }
  return bits & 0x80 ? -magnitude : magnitude;
}

inline int64_t elementBytes(int dtype) {
  switch (dtype) {
    case moeFloat32: return 4;
    case moeFloat8e4m3: return 1;
    default: return 2;
  }
}

// Element `index` of an array of `dtype` at `data`, which may have any alignment.
inline float loadElement(int dtype, const void* data, int64_t index) {
  const auto* bytes = static_cast<const unsigned char*>(data) + index * elementBytes(dtype);
  if (dtype == moeFloat8e4m3) return fromFloat8(*bytes);
  if (dtype == moeFloat32) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return dtype == moeBfloat16 ? fromBfloat16(half) : fromFloat16(half);
}

// Rounds to nearest even. Not for fp8.
inline void storeElement(int dtype, void* data, int64_t index, float value) {
  auto* bytes = static_cast<unsigned char*>(data) + index * elementBytes(dtype);
  if (dtype == moeFloat32) {
    std::memcpy(bytes, &value, sizeof value);
    return;
  }
  uint16_t half = dtype == moeBfloat16 ? toBfloat16(value) : toFloat16(value);
  std::memcpy(bytes, &half, sizeof half);
}

inline float roundTo(int dtype, float value) {
  unsigned char bytes[4];
  storeElement(dtype, bytes, 0, value);
  return loadElement(dtype, bytes, 0);
}

}  // namespace moetest
