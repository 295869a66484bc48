// SPDX-License-Identifier: Apache-2.0
// Ranks as processes of their own. A test starts this same binary again as a named rank program, and talks with it in
// lines over a socket. So no process is forked while threads of the library run in it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moe.h"

namespace moetest {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

inline milliseconds since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

// One end of a conversation in lines.
class Lines {
 public:
  explicit Lines(int descriptor) : descriptor_(descriptor) {}
  ~Lines();
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  void tell(const std::string& line);
  // Nothing if none came in time, or the other end is gone.
  std::optional<std::string> hear(milliseconds patience);

 private:
  int descriptor_;
  std::string buffered_;
};

// What a rank program sees.
struct RankContext {
  int rank, nranks;
  std::vector<std::string> arguments;
  Lines& parent;

  // The id that rank 0 made; every rank must ask for it once. The parent passes it on.
  moeUniqueId_t meet();
};

// Returns the exit code of the process.
using RankProgram = std::function<int(RankContext&)>;

// Registers a program under a name; for static initializers.
struct RankProgramEntry {
  RankProgramEntry(const std::string& name, RankProgram program);
};

// If the command line says so, runs a rank program and returns its exit code.
std::optional<int> runAsRank(int argc, char** argv);

class RankProcess {
 public:
  RankProcess(const std::string& program, int rank, int nranks, const std::vector<std::string>& arguments);
  ~RankProcess();

  pid_t pid() const { return pid_; }
  Lines& lines() { return *lines_; }
  void signal(int number);
  // The exit code, 128 + signal number for a killed process, or nothing if it still runs after `patience`.
  std::optional<int> exitCode(milliseconds patience);

 private:
  pid_t pid_ = -1;
  std::optional<int> code_;
  std::unique_ptr<Lines> lines_;
};

// All ranks of a program.
class RankGroup {
 public:
  RankGroup(const std::string& program, int nranks, const std::vector<std::string>& arguments = {});
  int size() const { return static_cast<int>(ranks_.size()); }
  RankProcess& operator[](int rank) { return *ranks_[static_cast<size_t>(rank)]; }
  // Passes rank 0's id on to the ranks given, or to all others. Call once per RankContext::meet.
  bool introduce(const std::vector<int>& guests = {});
  // The next line of a rank, or "" if none comes within `patience`.
  std::string hear(int rank, milliseconds patience = milliseconds(20000));
  void tellAll(const std::string& line);

 private:
  std::vector<std::unique_ptr<RankProcess>> ranks_;
};

}  // namespace moetest
