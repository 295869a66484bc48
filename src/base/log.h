// SPDX-License-Identifier: Apache-2.0
// Log lines: to stderr, to MOE_DEBUG_FILE, or to the caller's function. Nothing below the wanted level is formatted.
#pragma once

#include <string>

#include "base/text.h"
#include "moe.h"

namespace moe {

enum class LogLevel { kWarn = 1, kInfo = 2, kTrace = 3 };

bool logEnabled(LogLevel level);
void logLine(LogLevel level, const std::string& line);
// With nullptr, back to stderr or MOE_DEBUG_FILE.
void setLogFunction(moeLogFunction_t function, void* context);

template <class... Parts>
void log(LogLevel level, const Parts&... parts) {
  if (logEnabled(level)) logLine(level, cat(parts...));
}

}  // namespace moe
