// SPDX-License-Identifier: Apache-2.0
// The text and the JSON that a run leaves.
#pragma once

#include <cstdio>
#include <string>

#include "options.h"
#include "world.h"

namespace moe::perf {

class Report {
 public:
  explicit Report(const Options& options);

  // Takes a message of a rank: see World::emit.
  void take(int rank, int pid, const Json& message);
  // An error of the run that concerns no rank, or one rank whose process can no longer tell.
  void error(const std::string& text);
  void rankError(int rank, int pid, const std::string& text);

  // Prints the footer and writes the JSON. `complete`: all ranks came to their end. Returns the exit status.
  int finish(bool complete);

 private:
  void printHeader(const Json& header);
  void printRow(const Json& row);
  void printColumns(const Json& header);
  void printHostTimes(const Json& row);
  void clearProgress();
  void writeJson();

  const Options& options_;
  std::FILE* out_;
  bool progress_;  // stderr is a terminal
  bool progressShown_ = false;
  Json document_;
  int64_t wrong_ = 0;
  int64_t overflowed_ = 0;
};

}  // namespace moe::perf
