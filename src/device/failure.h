// SPDX-License-Identifier: Apache-2.0
// What a protocol records when a wait does not end as it should. The host turns it into an error text.
#pragma once

#include <cstdint>

namespace moe {

// What an operation was waiting for.
enum class Awaited : int32_t {
  kNothing,
  kConsumed,     // a peer to have read an earlier dispatch or combine
  kHistogram,    // another block of this rank
  kSent,         // this rank's own rows to be on their way
  kCounts,       // the counts of a source
  kRows,         // the rows of a source
  kCombineHead,  // a peer's announcement of its combine
  kCombineRows,  // a peer's partial rows
  kValidCounts,  // not a wait: a source's counts broke a rule
};

// The first failure of an operation. Zeroed before each.
struct Failure {
  uint32_t claimed;  // nonzero once somebody writes the rest
  int32_t code;      // moeResult_t
  int32_t peer;      // the rank concerned
  Awaited awaited;
  uint64_t expected;
  uint64_t seen;
};

// A call that a rank refused, or whose handles do not fit together. Not a fault of the communicator.
struct Refusal {
  int32_t code;  // moeResult_t; 0: none
  int32_t peer;  // the rank that refused, or whose handle differs
  int64_t seen;  // moeMismatch: the dispatch that the peer combines
  int64_t expected;
};

}  // namespace moe
