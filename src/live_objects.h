// SPDX-License-Identifier: Apache-2.0
// Which communicators and handles exist, so that a stale pointer is an error and not a crash.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace moe {

// Owns objects of one type by their address. Any thread.
template <class Object>
class LiveObjects {
 public:
  Object* add(std::unique_ptr<Object> object) {
    Object* key = object.get();
    std::unique_lock lock(mutex_);
    objects_.emplace(key, std::move(object));
    return key;
  }
  bool contains(const Object* object) const {
    std::shared_lock lock(mutex_);
    return objects_.contains(object);
  }
  // Takes an object out; null if it is not there.
  std::unique_ptr<Object> remove(const Object* object) {
    std::unique_lock lock(mutex_);
    auto found = objects_.find(object);
    if (found == objects_.end()) return nullptr;
    std::unique_ptr<Object> result = std::move(found->second);
    objects_.erase(found);
    return result;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const Object*, std::unique_ptr<Object>> objects_;
};

}  // namespace moe
