// SPDX-License-Identifier: Apache-2.0
// The caller's config: taken from any version of the struct, completed with defaults, checked, compared across ranks.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "moe.h"

namespace moe {

// What structs that have grown since their first version had as their size then.
constexpr size_t kFirstConfigBytes = offsetof(moeConfig_t, quantize), kFirstInfoBytes = offsetof(moeInfo_t, scaleBytes);

// Copies a versioned struct of the C ABI. Fields that an older caller does not have keep the initializer's value; a
// newer caller's extra fields must be zero. `least` is the size of the struct's first version.
template <class Struct>
Struct takeStruct(const Struct* given, const char* name, const Struct& initial, size_t least = sizeof(Struct)) {
  if (!given) fail(moeInvalidArgument, name, " is NULL");
  size_t size = given->size;
  if (size < least) {
    fail(moeInvalidArgument, name, "->size is ", size, ", but the first version of the struct has ", least,
         " bytes; set it with the struct's initializer macro");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t at = sizeof(Struct); at < size; ++at) {
    if (bytes[at] != 0) {
      fail(moeInvalidArgument, name, "->size is ", size, " and byte ", at, " is set, but this library (version ",
           MOE_VERSION_MAJOR, ".", MOE_VERSION_MINOR, ".", MOE_VERSION_PATCH, ") knows only ", sizeof(Struct),
           " bytes; the caller was built for a newer moecl");
    }
  }
  Struct result = initial;
  std::memcpy(&result, given, size < sizeof(Struct) ? size : sizeof(Struct));
  result.size = sizeof(Struct);
  return result;
}

// The other way: as much of `ours` as the caller's struct holds, and its size stays.
template <class Struct>
void giveStruct(Struct ours, Struct* to) {
  ours.size = to->size;
  std::memcpy(to, &ours, ours.size < sizeof(Struct) ? ours.size : sizeof(Struct));
}

const char* dataTypeName(int32_t type);
const char* layoutName(int32_t layout);

// The config with every default filled in. Throws moeInvalidArgument or moeUnsupported naming field, value and rule.
moeConfig_t completeConfig(const moeConfig_t* given, int nranks);

// Throws moeMismatch listing the values of every rank for each field that must agree and does not.
void compareConfigs(const std::vector<moeConfig_t>& ofRanks);

}  // namespace moe
