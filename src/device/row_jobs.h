// SPDX-License-Identifier: Apache-2.0
// What a protocol tells an Exec about a sequence of rows, so that the Exec can keep several of them in flight.
//
// A row in flight has an item: memory in which the job notes what it needs of the row later. begin() is called in order
// of rows, and may run ahead of the rest. All lanes of the warp call everything.
//
// A stream job carries rows: gather -> compose -> n destinations.
//   int64_t itemBytes()
//   RowStep begin(x, i, item)   prepares row i, waiting for its source where needed
//   void gather(item, row)      row.load(offset, from, bytes) for each piece of the row that exists already
//   int64_t fillBytes()         bytes that the job composes itself, at fillOffset() in the row; 0: none
//   void fill(x, item, to)      composes them
//   void scatter(item, row)     row.store(to, offset, bytes) for each destination
//   void finished(x, i)         rows up to i have been stored completely (an Exec may be late, never early), or skipped
//
// A reduce job adds rows: begin and finished as above with a ReduceItem, and
//   bool weighted(); int32_t type(); int64_t elements(); int64_t rowBytes()
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/host_device.h"

namespace moe {

enum class RowStep {
  kCarry,
  kSkip,    // nothing to do for this row
  kFailed,  // a wait failed; stop
};

struct ReduceSource {
  const std::byte* row;
  float weight;
};

// result = the sum of the sources in their order; without sources, zeros. The sources follow the struct.
struct ReduceItem {
  std::byte* result;
  int64_t count;

  MOE_HD ReduceSource* sources() { return reinterpret_cast<ReduceSource*>(this + 1); }
  MOE_HD static int64_t bytes(int64_t mostSources) {
    return static_cast<int64_t>(sizeof(ReduceItem)) + mostSources * static_cast<int64_t>(sizeof(ReduceSource));
  }
};

}  // namespace moe
