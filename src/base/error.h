// SPDX-License-Identifier: Apache-2.0
// One exception type for the whole library. It is caught at the extern "C" edge and nowhere crosses it.
#pragma once

#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <variant>

#include "base/text.h"
#include "moe.h"

namespace moe {

class Error : public std::exception {
 public:
  Error(moeResult_t code, std::string text) : code_(code), text_(std::move(text)) {}
  moeResult_t code() const { return code_; }
  const std::string& text() const { return text_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  moeResult_t code_;
  std::string text_;
};

template <class... Parts>
[[noreturn]] void fail(moeResult_t code, const Parts&... parts) {
  throw Error(code, cat(parts...));
}

// For a failed system call: appends what errno says. Pass errno's value when other calls came between.
template <class... Parts>
[[noreturn]] void failErrno(int error, const Parts&... parts) {
  throw Error(error == ENOMEM ? moeOutOfMemory : moeSystemError, cat(parts..., ": ", std::strerror(error)));
}

// A value, or the error that came up when it was to be had: for errors that must be dealt with later.
template <class Value>
using OrError = std::variant<Value, Error>;

template <class Make>
auto taking(Make&& make) -> OrError<decltype(make())> {
  try {
    return make();
  } catch (const Error& error) {
    return error;
  }
}

template <class Value>
const Value& valueOrThrow(const OrError<Value>& given) {
  if (const Error* error = std::get_if<Error>(&given)) throw *error;
  return std::get<Value>(given);
}

}  // namespace moe
