// SPDX-License-Identifier: Apache-2.0
#include "transport/local_windows.h"

#include <map>
#include <mutex>

namespace moe {
namespace {

struct Table {
  std::mutex mutex;
  uint64_t lastKey = 0;
  std::map<uint64_t, LocalWindow> windows;
};

// Never destroyed: a communicator may outlive the destructors of statics.
Table& table() {
  static Table& once = *new Table;
  return once;
}

}  // namespace

LocalWindowEntry::LocalWindowEntry(LocalWindow window) {
  std::lock_guard lock(table().mutex);
  key_ = ++table().lastKey;
  table().windows.emplace(key_, std::move(window));
}

LocalWindowEntry::~LocalWindowEntry() {
  std::lock_guard lock(table().mutex);
  table().windows.erase(key_);
}

std::optional<LocalWindow> LocalWindowEntry::find(uint64_t key) {
  std::lock_guard lock(table().mutex);
  auto found = table().windows.find(key);
  if (found == table().windows.end()) return std::nullopt;
  return found->second;
}

}  // namespace moe
