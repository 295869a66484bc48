// SPDX-License-Identifier: Apache-2.0
// The windows of the ranks that live in this process, so that they share one mapping of each.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "transport/transport.h"

namespace moe {

struct LocalWindow {
  int rank = -1;
  std::byte* base = nullptr;
  size_t bytes = 0;
  std::weak_ptr<void> owner;
  std::weak_ptr<PeerStates> states;  // of the rank that owns the window
};

// Lists a window while it lives. Thread-safe.
class LocalWindowEntry {
 public:
  explicit LocalWindowEntry(LocalWindow window);
  ~LocalWindowEntry();
  LocalWindowEntry(const LocalWindowEntry&) = delete;
  LocalWindowEntry& operator=(const LocalWindowEntry&) = delete;

  // Never used twice in a process.
  uint64_t key() const { return key_; }

  static std::optional<LocalWindow> find(uint64_t key);

 private:
  uint64_t key_;
};

}  // namespace moe
