// SPDX-License-Identifier: Apache-2.0
// Building error texts, and the two ways in which moe_perf gives up.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "moe.h"

namespace moe::perf {

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// The command line asks for something that cannot be done.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The run could not go on.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Another rank failed first and has the reason; this rank only follows.
struct Follower : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void usage(const Parts&... parts) {
  throw UsageError(cat(parts...));
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Failure(cat(parts...));
}

// Throws with the library's text unless `result` is moeSuccess.
inline void require(moeResult_t result, const char* call) {
  if (result != moeSuccess) fail(call, ": ", moeGetErrorString(result), ": ", moeGetLastError());
}

}  // namespace moe::perf
