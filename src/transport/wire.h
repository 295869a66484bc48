// SPDX-License-Identifier: Apache-2.0
// Plain values to bytes and back, for what ranks of one build tell each other at init. Every read is checked.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace moe {

template <class Value>
void putValue(std::string* out, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value> && std::has_unique_object_representations_v<Value>,
                "padding would leak memory and differ between ranks");
  out->append(reinterpret_cast<const char*>(&value), sizeof(Value));
}

inline void putText(std::string* out, std::string_view text) {
  putValue(out, static_cast<uint32_t>(text.size()));
  out->append(text);
}

// These take from the front of `in`. False, with `in` as it was, when too little is left.
template <class Value>
bool takeValue(std::string_view* in, Value* value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  if (in->size() < sizeof(Value)) return false;
  std::memcpy(value, in->data(), sizeof(Value));
  in->remove_prefix(sizeof(Value));
  return true;
}

inline bool takeText(std::string_view* in, std::string* text) {
  std::string_view rest = *in;
  uint32_t length = 0;
  if (!takeValue(&rest, &length) || length > rest.size()) return false;
  text->assign(rest.substr(0, length));
  *in = rest.substr(length);
  return true;
}

}  // namespace moe
