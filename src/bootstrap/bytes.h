// SPDX-License-Identifier: Apache-2.0
// Numbers and byte strings to and from messages: little-endian, and never read past the end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/error.h"

namespace moe {

class ByteWriter {
 public:
  template <class T>
  ByteWriter& number(T value) {
    static_assert(std::is_integral_v<T>);
    auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (size_t i = 0; i < sizeof(T); ++i) out_.push_back(static_cast<char>((bits >> (8 * i)) & 0xff));
    return *this;
  }
  ByteWriter& bytes(std::string_view data) {
    out_.append(data);
    return *this;
  }
  template <class Array>
  ByteWriter& array(const Array& data) {
    return bytes({reinterpret_cast<const char*>(data.data()), data.size()});
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads from memory that must outlive it. Throws when the message is shorter than what is asked for.
class ByteReader {
 public:
  explicit ByteReader(std::string_view data) : data_(data) {}

  template <class T>
  T number() {
    std::string_view raw = bytes(sizeof(T));
    std::make_unsigned_t<T> bits = 0;
    for (size_t i = 0; i < sizeof(T); ++i) {
      auto byte = static_cast<std::make_unsigned_t<T>>(static_cast<unsigned char>(raw[i]));
      bits = static_cast<std::make_unsigned_t<T>>(bits | (byte << (8 * i)));
    }
    return static_cast<T>(bits);
  }
  std::string_view bytes(uint64_t count) {
    if (count > data_.size()) {
      fail(moeSystemError, "a message is cut short: ", count, " bytes wanted, ", data_.size(), " left");
    }
    std::string_view result = data_.substr(0, static_cast<size_t>(count));
    data_.remove_prefix(static_cast<size_t>(count));
    return result;
  }
  template <class Array>
  Array array() {
    Array result;
    std::string_view raw = bytes(result.size());
    std::memcpy(result.data(), raw.data(), result.size());
    return result;
  }
  std::string_view rest() const { return data_; }

 private:
  std::string_view data_;
};

}  // namespace moe
