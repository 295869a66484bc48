// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <unistd.h>

#include <cstdio>
#include <mutex>

#include "base/settings.h"

namespace moe {
namespace {

struct Sink {
  std::mutex mutex;
  moeLogFunction_t function = nullptr;
  void* context = nullptr;
  std::FILE* file = nullptr;  // stderr, or a file that stays open as long as the process
};

std::FILE* openFile(std::string path) {
  if (path.empty()) return stderr;
  if (size_t at = path.find("%p"); at != std::string::npos) path.replace(at, 2, cat(::getpid()));
  std::FILE* file = std::fopen(path.c_str(), "ae");
  return file ? file : stderr;
}

// Never destroyed: threads may log while the process exits.
Sink& sink() {
  static Sink& once = *new Sink;
  return once;
}

const char* levelName(LogLevel level) {
  switch (level) {
    case LogLevel::kWarn: return "WARN";
    case LogLevel::kInfo: return "INFO";
    case LogLevel::kTrace: return "TRACE";
  }
  return "?";
}

}  // namespace

bool logEnabled(LogLevel level) { return static_cast<int>(level) <= settings().debug; }

void logLine(LogLevel level, const std::string& line) {
  Sink& out = sink();
  std::lock_guard lock(out.mutex);
  if (out.function) {
    out.function(out.context, static_cast<int>(level), line.c_str());
    return;
  }
  if (!out.file) out.file = openFile(settings().debugFile);
  std::fprintf(out.file, "moecl %d %s %s\n", static_cast<int>(::getpid()), levelName(level), line.c_str());
  std::fflush(out.file);
}

void setLogFunction(moeLogFunction_t function, void* context) {
  Sink& out = sink();
  std::lock_guard lock(out.mutex);
  out.function = function;
  out.context = context;
}

}  // namespace moe
