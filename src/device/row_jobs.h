// SPDX-License-Identifier: Apache-2.0
// What a protocol tells an Exec about a sequence of rows, so that the Exec can keep several of them in flight.
//
// A stream job carries rows: gather -> compose -> n destinations.
//   RowStep begin(x, i)      all lanes; rows come in order. Prepares row i, waiting for its source where needed
//   void gather(i, row)      row.load(offset, from, bytes) for each piece of the row that exists already
//   int64_t fillBytes()      bytes that the job composes itself, at fillOffset() in the row; 0: none
//   void fill(x, i, to)      all lanes; composes them
//   void scatter(i, row)     row.store(to, offset, bytes) for each destination
//   void finished(x, i)      rows up to i have been stored completely (an Exec may be late, never early), or skipped
//
// A reduce job adds rows: begin and finished as above, and
//   int sources(i, list)     fills in the rows to add, in order, and returns their number; 0 writes zeros
//   std::byte* result(i)     where the sum goes
//   bool weighted(); int32_t type(); int64_t elements(); int64_t rowBytes()
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace moe
