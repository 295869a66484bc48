// SPDX-License-Identifier: Apache-2.0
// Division by a number that is known beforehand, as a multiplication and a shift: GPUs take dozens of instructions to
// divide, and hundreds of nanoseconds for 64 bits.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace moe {

// Exact for dividends below 2^31: with 2^s the power of two that is not less than the divisor, `factor` is
// 2^(31 + s) / divisor rounded up, so that the error of a product is less than 2^31 * 2^s.
class Divisor {
 public:
  constexpr Divisor() = default;
  MOE_HD constexpr explicit Divisor(int64_t value) : value_(static_cast<uint32_t>(value)) {
    while ((uint64_t{1} << (shift_ - 31)) < value_) ++shift_;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + value_ - 1) / value_);
  }

  MOE_HD constexpr uint32_t value() const { return value_; }
  MOE_HD constexpr uint32_t divide(uint32_t dividend) const {
    return static_cast<uint32_t>((uint64_t{dividend} * factor_) >> shift_);
  }
  MOE_HD constexpr uint32_t remainder(uint32_t dividend) const { return dividend - divide(dividend) * value_; }
  // The same for dividends below 2^62, and divisors below 2^15.
  MOE_HD constexpr uint32_t wideRemainder(uint64_t dividend) const {
    if ((value_ & (value_ - 1)) == 0) return static_cast<uint32_t>(dividend) & (value_ - 1);
    constexpr uint32_t kLow = 0x7fffffffu;
    uint32_t high = remainder(static_cast<uint32_t>(dividend >> 31)), low = static_cast<uint32_t>(dividend) & kLow;
    return remainder(high * (remainder(kLow) + 1) + remainder(low));
  }

 private:
  uint32_t value_ = 1, factor_ = uint32_t{1} << 31, shift_ = 31;
};

}  // namespace moe
