// SPDX-License-Identifier: Apache-2.0
// One rank's whole run: the communicators, the rows, and what rank 0 tells about them.
#pragma once

#include "options.h"
#include "routing.h"
#include "world.h"

namespace moe::perf {

// Returns whether all rows were right, the same on all ranks. Throws Failure, Follower or UsageError.
bool runRank(World& world, const Options& options, Routing& routing);

}  // namespace moe::perf
