// SPDX-License-Identifier: Apache-2.0
// --flush: what comes before each timed call, so that it finds nothing in the cache and all ranks begin it together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "gpu.h"
#include "reach.h"
#include "team.h"

namespace moe::perf {

class ColdStart {
 public:
  // Throws where a rank cannot reach another's memory. Collective.
  ColdStart(Team& team, Gpu& gpu);
  ~ColdStart();
  ColdStart(const ColdStart&) = delete;
  ColdStart& operator=(const ColdStart&) = delete;

  // Enqueues a write over all that the cache holds, and a kernel in which the GPUs wait for each other: what follows
  // starts everywhere within about a microsecond. All ranks must do so equally often.
  void enqueue();
  // Throws if they did not find together in what has been enqueued, and completed, so far.
  void requireTogether();
  // Times of this rank between two events with nothing in between, which the GPUs come to together. Collective.
  std::vector<double> emptyPairs();
  // Everybody does so, and passes a barrier, before anybody's is destroyed.
  void leave() { reached_.clear(); }
  int64_t flushBytes() const { return flush_.bytes(); }

 private:
  void reachAll();
  void meet() { gpu_.meet(meeting_, ++turn_); }

  Team& team_;
  Gpu& gpu_;
  Array flush_;
  Array peers_, late_;
  uint32_t* words_ = nullptr;
  std::vector<ReachedMemory> reached_;
  Meeting meeting_;
  uint32_t turn_ = 0;
};

}  // namespace moe::perf
