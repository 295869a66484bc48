// SPDX-License-Identifier: Apache-2.0
// Several ranks in one process.
#pragma once

#include <functional>

#include "options.h"
#include "routing.h"
#include "world.h"

namespace moe::perf {

// Calls runOne(0 .. count - 1), each in a thread of its own. True if all returned true.
bool runAsThreads(int count, const std::function<bool(int)>& runOne);

enum class RankEnd { kDone, kFollowed, kFailed };

// Runs one rank. If it fails, it says why, and nobody waits for it any longer.
RankEnd runToEnd(World& world, SharedBlock* block, const Options& options, Routing routing);

}  // namespace moe::perf
