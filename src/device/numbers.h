// SPDX-License-Identifier: Apache-2.0
// Element types: those that combine adds, to fp32 and back, and e4m3, which dispatch makes. All round to nearest even.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace moe {

struct Bfloat16 {
  uint16_t bits;

  MOE_HD static float load(Bfloat16 value) { return __builtin_bit_cast(float, uint32_t{value.bits} << 16); }
  MOE_HD static Bfloat16 store(float value) {
#if defined(__CUDA_ARCH__)
    // The same rounding in one instruction; a NaN becomes the canonical one.
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return {bits};
#else
    auto word = __builtin_bit_cast(uint32_t, value);
    uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    // A NaN must not round up to infinity: keep it one, and quiet.
    bool isNan = (word & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(isNan ? (word >> 16) | 0x40u : rounded)};
#endif
  }
};

struct Float16 {
  uint16_t bits;

  MOE_HD static float load(Float16 value) {
    uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
    uint32_t magnitude = uint32_t{value.bits} & 0x7fffu;
    if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // Moves exponent and fraction into place; the multiplication rebiases and turns subnormals into normals, exactly.
    float scaled = __builtin_bit_cast(float, magnitude << 13) * __builtin_bit_cast(float, 0x77800000u);
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, scaled));
  }
  MOE_HD static Float16 store(float value) {
    auto word = __builtin_bit_cast(uint32_t, value);
    uint32_t sign = (word >> 16) & 0x8000u;
    uint32_t magnitude = word & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
      result = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below the smallest normal: let the addition of 0.5 round to its last bit
      float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
      result = __builtin_bit_cast(uint32_t, shifted) - 0x3f000000u;
    } else {
      result = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return {static_cast<uint16_t>(sign | result)};
  }
};

struct Float8e4m3 {
  // At most 448 in magnitude; infinity is none of its values.
  MOE_HD static uint8_t store(float value) {
    constexpr uint32_t kLargest = 0x7e, kNan = 0x7f;
    auto word = __builtin_bit_cast(uint32_t, value);
    uint32_t sign = word >> 24 & 0x80u;
    uint32_t magnitude = word & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) return kNan;
    if (magnitude < 0x3c800000u) {  // below the smallest normal: let the addition of 2^14 round to its last bit
      float shifted = __builtin_bit_cast(float, magnitude) + 0x1p14f;
      result = __builtin_bit_cast(uint32_t, shifted) - 0x46800000u;
    } else {
      result = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    }
    return static_cast<uint8_t>(sign | (result < kLargest ? result : kLargest));
  }
};

struct Float32 {
  float value;

  MOE_HD static float load(Float32 from) { return from.value; }
  MOE_HD static Float32 store(float value) { return {value}; }
  // 1 / value, as a division rounds it, for normal values whose reciprocal is normal, too: a GPU divides in many steps.
  MOE_HD static float reciprocal(float value) {
#if defined(__CUDA_ARCH__)
    float rough;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(value));
    return __builtin_fmaf(rough, __builtin_fmaf(-value, rough, 1.0f), rough);
#else
    return 1.0f / value;
#endif
  }
};

}  // namespace moe
