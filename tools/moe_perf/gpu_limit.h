// SPDX-License-Identifier: Apache-2.0
// How fast GPUs can write to each other.
#pragma once

#include <string>

#include "gpu.h"
#include "team.h"

namespace moe::perf {

struct GpuLimit {
  double gbs = 0;        // each way, the slowest rank's median
  bool between = false;  // between GPUs; false: within each
  std::string text;      // how it was measured
};

// A kernel on every GPU copies into the next rank's memory, all at the same time; where ranks cannot reach each other,
// or all have the same GPU, into their own. Collective.
GpuLimit measureGpuLimit(Team& team, Gpu& gpu);

}  // namespace moe::perf
