// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string_view>
#include <vector>

namespace moe::perf {
namespace {

// Source and target of all ranks together are twice this.
constexpr int64_t kCopyBytes = int64_t{64} << 20;
constexpr int kCopyRuns = 7;

// A line "name: value" of a file in /proc.
std::string procValue(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    size_t colon = line.find(':');
    if (!line.starts_with(name) || colon == std::string::npos) continue;
    size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

int64_t memoryValue(const char* name) {
  int64_t kilobytes = 0;
  std::istringstream(procValue("/proc/meminfo", name)) >> kilobytes;
  return kilobytes * 1024;
}

}  // namespace

std::string cpuModel() {
  std::string model = procValue("/proc/cpuinfo", "model name");
  return model.empty() ? "unknown cpu" : model;
}

int usableCores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

int64_t totalMemory() { return memoryValue("MemTotal"); }
int64_t availableMemory() { return std::max<int64_t>(memoryValue("MemAvailable"), int64_t{64} << 20); }

double hostNumber() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return static_cast<double>(std::hash<std::string_view>()(name) >> 16);
}

CopyLimit::CopyLimit(Team& team) : team_(team) {
  int64_t bytes = std::max<int64_t>(std::min(kCopyBytes, availableMemory() / 8) / team.size(), int64_t{1} << 20);
  source_ = Buffer(bytes);
  target_ = Buffer(bytes);
  source_.poison(1, bytes);
  target_.poison(2, bytes);
}

void CopyLimit::copy(int64_t bytes) {
  while (bytes > 0) {
    int64_t part = std::min(bytes, source_.bytes() - at_);
    std::memcpy(target_.data() + at_, source_.data() + at_, static_cast<size_t>(part));
    at_ = (at_ + part) % source_.bytes();
    bytes -= part;
  }
}

double CopyLimit::measure(int64_t bytes) {
  if (bytes == 0) return 0;
  std::vector<double> speeds;
  for (int run = 0; run < kCopyRuns; ++run) {
    team_.barrier();
    auto start = std::chrono::steady_clock::now();
    copy(bytes);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    double slowest = 0;
    for (const auto& rank : team_.gather({seconds})) slowest = std::max(slowest, rank[0]);
    speeds.push_back(slowest > 0 ? static_cast<double>(bytes) / slowest / 1e9 : 0);
  }
  std::nth_element(speeds.begin(), speeds.begin() + kCopyRuns / 2, speeds.end());
  return speeds[kCopyRuns / 2];
}

}  // namespace moe::perf
