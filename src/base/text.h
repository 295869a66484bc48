// SPDX-License-Identifier: Apache-2.0
// Building the text of errors and log lines.
#pragma once

#include <sstream>
#include <string>

namespace moe {

// Joins its arguments as operator<< would print them.
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace moe
