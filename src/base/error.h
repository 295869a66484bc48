// SPDX-License-Identifier: Apache-2.0
// One exception type for the whole library. It is caught at the extern "C" edge and nowhere crosses it.
#pragma once

#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

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

}  // namespace moe
