// SPDX-License-Identifier: Apache-2.0
// What moe_perf says about the machine, and how fast its memory copies.
#pragma once

#include <cstdint>
#include <string>

#include "memory.h"
#include "team.h"

namespace moe::perf {

std::string cpuModel();
int usableCores();
int64_t totalMemory();
int64_t availableMemory();
// Tells this host from others; exact in a double.
double hostNumber();

// How fast all ranks at once copy memory with memcpy, out of the cache. Its memory is made once for all rows.
class CopyLimit {
 public:
  explicit CopyLimit(Team& team);

  // The median over several runs of GB/s per rank, the slowest rank counting, when each copies `bytes`, the same number
  // on all ranks; 0 for 0 bytes. Collective.
  double measure(int64_t bytes);

 private:
  void copy(int64_t bytes);

  Team& team_;
  // Rings, so that each run finds other bytes than the last one left in the cache.
  Buffer source_, target_;
  int64_t at_ = 0;
};

}  // namespace moe::perf
