// SPDX-License-Identifier: Apache-2.0
// Flag-in-data: words of 12 bytes and a tag that arrive whole, so that whoever finds the tag of an epoch has the data,
// too, and no signal follows. It costs a third more bytes: for small messages.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "layout.h"

namespace moe {

// What one lane carries at a time: three vectors of 16 bytes, which travel as four words. 32 units make a block, whose
// first vectors lie side by side in the row, then its second ones; likewise its words on the wire: so lanes that have a
// unit each access memory in whole lines.
struct Unit {
  static constexpr int kVectors = 3, kVectorBytes = 16;
  uint32_t words[kVectors * kVectorBytes / 4];

  // Where a vector lies in its row. In 32 bits, which GPUs work faster with: rows have at most 2^30 bytes, and their
  // words a third more.
  MOE_HD static int64_t vectorAt(int64_t unit, int vector) {
    constexpr uint32_t kUnits = kUnitsPerBlock, kBytes = kUnitBytes;
    auto at = static_cast<uint32_t>(unit), in = at % kUnits;
    return (at - in) * kBytes + (static_cast<uint32_t>(vector) * kUnits + in) * uint32_t{kVectorBytes};
  }
  // Bytes of a vector that a row of `bytes` bytes has.
  MOE_HD static int64_t vectorBytes(int64_t unit, int vector, int64_t bytes) {
    return larger(0, smaller(kVectorBytes, bytes - vectorAt(unit, vector)));
  }
  // Where a word lies among those of its row.
  MOE_HD static int64_t wordAt(int64_t unit, int word) {
    constexpr uint32_t kUnits = kUnitsPerBlock, kWords = kUnitWords, kBytes = kTaggedWord;
    auto at = static_cast<uint32_t>(unit), in = at % kUnits;
    return ((at - in) * kWords + static_cast<uint32_t>(word) * kUnits + in) * kBytes;
  }
};

// The tag of an epoch; never that of untouched memory. It comes again after 2^31 epochs: until then every word that was
// not written again must have been swept.
MOE_HD inline uint32_t tagOf(uint64_t epoch) { return static_cast<uint32_t>(epoch) * 2 + 1; }
// The epoch of a tag, as far as it is known: for the text of a failure.
MOE_HD inline uint64_t epochOf(uint32_t tag) { return tag / 2; }

}  // namespace moe
