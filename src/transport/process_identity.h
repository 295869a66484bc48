// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace moe {

// Equal exactly for ranks of one process.
struct ProcessIdentity {
  int64_t pid = 0;  // of no use across PID namespaces, and reused: hence the nonce
  std::array<uint64_t, 2> nonce{};

  bool operator==(const ProcessIdentity&) const = default;
};

// Random, and another one in a forked child. Thread-safe. Throws moeSystemError.
ProcessIdentity processIdentity();

}  // namespace moe
