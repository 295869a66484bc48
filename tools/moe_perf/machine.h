// SPDX-License-Identifier: Apache-2.0
// What moe_perf says about the machine, and how fast its memory copies.
#pragma once

#include <cstdint>
#include <string>

#include "team.h"

namespace moe::perf {

std::string cpuModel();
int usableCores();
int64_t totalMemory();
int64_t availableMemory();

// Copies `bytes`, the same number on all ranks, with memcpy on all ranks at once, out of the cache, several times.
// Returns the median of GB/s per rank, the slowest rank counting; 0 for 0 bytes. Collective.
double measureCopyLimit(Team& team, int64_t bytes);

}  // namespace moe::perf
