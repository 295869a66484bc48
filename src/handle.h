// SPDX-License-Identifier: Apache-2.0
// What the host remembers of a handle. Its routing lies in the caller's device memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe {

class Comm;

enum class HandleState {
  kEmpty,     // no dispatch yet
  kFailed,    // the last dispatch was refused, on all ranks
  kSent,      // a send half that awaits moeWait
  kReceived,  // ready for moeCombine
};

}  // namespace moe

struct moeHandle {
  moe::Comm* comm = nullptr;
  std::byte* memory = nullptr;
  moe::HandleState state = moe::HandleState::kEmpty;
  uint64_t epoch = 0;       // of its dispatch, counted by the host
  int64_t numTokens = 0;    // of its dispatch
  void* stream = nullptr;   // of its dispatch
  bool routed = false;      // holds a routing that MOE_REUSE_ROUTING can repeat
  bool knownEmpty = false;  // the caller has learned that its send half brings no rows
  bool views = false;       // its rows are in the window
};
